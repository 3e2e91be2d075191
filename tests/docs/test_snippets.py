"""The Python of README.md and docs/guide runs as it stands there.

The blocks of one page run in order and share their names, in a process and a folder of their own. What a reader has
already (a model, an optimizer) stands in a comment that the page does not show: `<!-- run first` ... `-->`.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs" / "guide").glob("*.md"))]
BLOCK = re.compile(r"^(?:```python\n(?P<shown>.*?)^```|<!-- run first\n(?P<hidden>.*?)^-->)", re.MULTILINE | re.DOTALL)


def program(page: Path) -> str:
    """The blocks at the lines that they have in the page, so that a traceback names the line of the document."""
    text = page.read_text(encoding="utf-8")
    lines: list[str] = []
    for block in BLOCK.finditer(text):
        kind = "shown" if block["shown"] is not None else "hidden"
        lines += [""] * (text.count("\n", 0, block.start(kind)) - len(lines))
        lines += block[kind].splitlines()
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    "page", [p for p in PAGES if "```python" in p.read_text(encoding="utf-8")], ids=lambda p: p.name
)
def test_the_snippets_of_a_page_run(page: Path, tmp_path: Path) -> None:
    """Guards: an example that stopped working when the API moved on."""
    runner = f"exec(compile(open(r'{tmp_path / 'page.py'}').read(), r'{page}', 'exec'), {{'__name__': '__main__'}})"
    (tmp_path / "page.py").write_text(program(page))
    work = tmp_path / "work"
    work.mkdir()
    environment = {**os.environ, "PYTHONWARNINGS": "error::DeprecationWarning:__main__"}
    done = subprocess.run(
        [sys.executable, "-c", runner],
        cwd=work,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_page_of_the_guide_is_found() -> None:
    """Guards: this test passing because it looks at nothing."""
    assert {"README.md", "start.md", "resume.md", "torch_save.md"} <= {page.name for page in PAGES}
