"""What is private in torch is named in one module, and a torch that lacks some of it is refused in words."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import relight

PACKAGE = Path(relight.__file__).parent
OF_TENSORS = {"_version", "_cdata", "_backward_hooks", "_untyped_storage", "_fake_device", "_checkpoint_offset"}
OF_OTHERS = {"_load_state_dict_pre_hooks", "_load_from_state_dict", "_optimizer_load_state_dict_pre_hooks"}


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def private_names(source: str) -> list[str]:
    """What in this source is private in torch: names below `torch`, imports, and attributes of its objects."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            name = dotted(node)
            below_torch = name.startswith("torch.") and any(part.startswith("_") for part in name.split("."))
            if below_torch or node.attr in OF_TENSORS | OF_OTHERS:
                found.append(name)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            found += [f"{node.module}: {name}" for name in names if name.startswith("_")]
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.startswith("torch.") and "._" in alias.name]
    return found


def test_no_other_module_names_what_is_private_in_torch() -> None:
    """Guards: a private name that a new torch renames, found by a user instead of by the one list."""
    files = [file for file in PACKAGE.rglob("*.py") if file != PACKAGE / "torch" / "private.py"]
    assert len(files) > 20
    found = {str(file.relative_to(PACKAGE)): private_names(file.read_text(encoding="utf-8")) for file in files}
    # `torch._C.Generator` is the name of the public `torch.Generator` in a pickle.
    allowed = {"torch._C.Generator", "torch._C"}
    assert {file: names for file, names in found.items() if set(names) - allowed} == {}


def test_the_search_finds_each_kind() -> None:
    source = """
import torch._guards
from torch._utils import x
from torch.storage import _y
torch._C.z
tensor._version
"""
    assert len(private_names(source)) >= 5


@pytest.mark.parametrize(
    ("lost", "call"),
    [
        ("torch._utils._rebuild_tensor_v3", "relight.save({'w': 1}, sys.argv[1])"),
        ("torch._weights_only_unpickler._get_allowed_globals", "relight.load(sys.argv[1])"),
        ("torch._guards.detect_fake_mode", "relight.open(sys.argv[1])"),
    ],
)
def test_a_torch_that_has_lost_a_name_is_refused_by_that_name_before_anything_is_done(
    tmp_path: Path, lost: str, call: str
) -> None:
    path = tmp_path / "w.pt"
    relight.save({"w": 1}, path)
    before = path.read_bytes()
    owner, _, name = lost.rpartition(".")
    script = f"""
import sys, torch, relight
import torch._weights_only_unpickler
del {owner}.{name}
for _ in range(2):
    try:
        {call}
    except relight.CheckpointError as error:
        assert "relight needs {lost}" in str(error), error
        assert torch.__version__ in str(error) and "2.4 to " in str(error), error
    else:
        raise AssertionError("it worked")
"""
    subprocess.run([sys.executable, "-c", script, str(path)], check=True, timeout=120)
    assert path.read_bytes() == before
