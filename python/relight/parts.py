"""From the caller's objects to files of a tag: what is one file, and its plan.

Owns: the check of file names, and what happens to an optional part that cannot be pickled.
Must not: import torch at module level; copy or write a byte.
Invariant: every object of a save has been walked before the first byte of it is copied.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

from relight.arguments import check_file_name
from relight.exceptions import InvalidArgument, NotPicklable, PartLeftOutWarning
from relight.state import OptionalPart, Part, TrainState

if TYPE_CHECKING:
    from relight.torch.pickling import Snapshot

__all__ = ["others_run", "part_of", "plan_parts", "stem_of"]


def part_of(file: object, value: object) -> Part:
    name = check_file_name(file)
    if isinstance(value, OptionalPart):
        return Part(name, value.value, optional=True)
    if isinstance(value, TrainState):
        raise InvalidArgument(f"files has a TrainState as {name!r}; give it as the state of save(tag, state)")
    return Part(name, value)


def plan_parts(parts: Sequence[Part], tag: str) -> list[tuple[str, Snapshot]]:
    """Walks every object before a byte is copied: what cannot be pickled is refused, or left out if optional."""
    from relight.torch.pickling import plan_object

    planned = []
    for part in parts:
        try:
            planned.append((part.file, plan_object(part.value, stem=stem_of(part.file))))
        except NotPicklable as error:
            if not part.optional:
                error.add_note(f"relight: in {part.file} of {tag}; mark it with relight.optional(...) to save the rest")
                raise
            warnings.warn(f"{part.file} of {tag} is left out: {error}", PartLeftOutWarning, stacklevel=4)
    return planned


def stem_of(file: str) -> str:
    """The folder in the archive, named as torch.save names it; `archive` where the name of the file cannot be one."""
    stem = file.rsplit(".", 1)[0]
    plain = stem.isascii() and stem.isprintable() and not {"/", "\\"} & set(stem) and 0 < len(stem) <= 200
    return stem if plain and stem not in (".", "..") else "archive"


def others_run() -> bool:
    """Whether Python threads other than this one and relight's own are alive, which could write into a tensor."""
    me = threading.current_thread()
    return any(one is not me and not one.name.startswith("relight-") for one in threading.enumerate())
