"""docs/reference/types.md lists exactly what loading allows."""

from __future__ import annotations

import re
from pathlib import Path

from relight.torch import safe_types

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "types.md"


def listed(group: str) -> list[str]:
    text = PAGE.read_text(encoding="utf-8")
    section = re.search(rf"^### {group}$(.*?)^##", text, re.DOTALL | re.MULTILINE | re.IGNORECASE)
    assert section, f"the page has no section {group}"
    return re.findall(r"^\| `([^`]+)` \|", section[1], re.MULTILINE)


def test_the_page_lists_what_is_allowed_and_nothing_else() -> None:
    published = safe_types.published()
    assert tuple(published) == safe_types.GROUPS
    for group, table in published.items():
        assert listed(group) == sorted(table), group


def test_nothing_on_the_list_is_a_way_to_the_system() -> None:
    """Guards: a careless addition to the list."""
    for name in (name for table in safe_types.published().values() for name in table):
        module, _, leaf = name.rpartition(".")
        assert module not in {"os", "sys", "posix", "subprocess", "shutil", "importlib", "io", "socket"}, name
        assert leaf not in {
            "eval",
            "exec",
            "open",
            "compile",
            "__import__",
            "setattr",
            "delattr",
            "globals",
            "type",
            "partial",
        }
