"""`import relight`: what it gives, what it does not bring along, and the two ways to run the command."""

import subprocess
import sys
from pathlib import Path


def run(*arguments: str, cwd: Path) -> str:
    """A fresh interpreter, which cannot import torch."""
    blocked = "import sys; sys.modules['torch'] = None\n"
    command = [sys.executable, "-W", "error", "-c", blocked + arguments[0], *arguments[1:]]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_nebula_api_is_there_after_import_relight_alone(tmp_path: Path) -> None:
    """Guards: `relight.nebula.init(...)`, as the documents write it, failing for want of a second import."""
    code = "import relight; ours = relight.nebula.Checkpoint; import nebulaml; print(ours is nebulaml.Checkpoint)"
    assert run(code, cwd=tmp_path) == "True"


def test_import_relight_brings_neither_the_nebula_api_nor_torch_nor_the_engine(tmp_path: Path) -> None:
    """Guards: an import that costs what the process does not use."""
    code = (
        "import relight; print([m for m in sys.modules if m.startswith(('relight.nebula', 'relight._core', 'numpy'))])"
    )
    assert run(code, cwd=tmp_path) == "[]"


def test_view_is_there_to_annotate_with() -> None:
    """Guards: `def rows(view: relight.View)` failing, and `import relight` bringing torch for it."""
    code = "import sys, relight; print('torch' in sys.modules, relight.View.__name__, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout.strip(), done.stderr) == ("False View True", "")


def test_an_unknown_name_is_an_attribute_error(tmp_path: Path) -> None:
    code = (
        "import relight; print(hasattr(relight, 'Chekpointer'), hasattr(relight, 'nebula'), bool(relight.__version__))"
    )
    assert run(code, cwd=tmp_path) == "False True True"


def test_python_m_relight_is_the_command(tmp_path: Path) -> None:
    for module in ("relight", "relight.cli"):
        command = [sys.executable, "-m", module, "--version"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith("relight ")
