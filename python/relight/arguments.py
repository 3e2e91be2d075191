"""What a caller gives: paths, tags, steps, ranks.

Owns: how each is read, and refused in words that say what to give.
Must not: touch the storage; import torch.
Invariant: what passes here the engine can take.
"""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Iterable
from typing import Any, Final

from relight.distributed.world import World, find_world, require_one_process
from relight.exceptions import InvalidArgument

__all__ = ["allowed", "check_file_name", "local_path", "step_of_tag", "tag_and_step", "world_of"]

_TAG_OF_STEP: Final = "global_step{}"
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")


def world_of(rank: int | None, world_size: int | None) -> World:
    if (rank is None) != (world_size is None):
        raise InvalidArgument(f"rank={rank!r} and world_size={world_size!r}: give both, or neither")
    if rank is None or world_size is None:
        world = find_world()
    else:
        try:
            world = World(operator.index(rank), operator.index(world_size), "the arguments")
        except TypeError:
            raise InvalidArgument(f"rank={rank!r} and world_size={world_size!r}: give whole numbers") from None
        if not 0 <= world.rank < world.world_size:
            raise InvalidArgument(f"rank={rank!r} is not a rank of world_size={world_size!r}; ranks count from 0")
    require_one_process(world, "relight.Checkpointer")
    return world


def local_path(path: str | os.PathLike[str]) -> str:
    try:
        text = os.fspath(path)
    except TypeError:
        raise InvalidArgument(f"{path!r} is no path; give a directory as str or Path") from None
    if not isinstance(text, str) or not text:
        raise InvalidArgument(f"{path!r} is no path; give a directory as str or Path")
    if _URL.match(text):
        raise InvalidArgument(f"{text} is a URL, and this version of relight saves to directories only; give a path")
    return os.path.expanduser(text)


def tag_and_step(tag: object, step: object) -> tuple[str, int | None]:
    """Tag and step: of a number n `global_step<n>` and n; of a name the name, and `step` or the number in it."""
    from relight import _core

    if isinstance(tag, str):
        if not _is_text(tag):
            raise InvalidArgument(f"tag={tag!r} is no text that can be written; leave out what cannot")
        _core.check_tag(tag)
        given = None if step is None else _step(step, "step")
        in_tag = _core.step_of_tag(tag)
        return tag, in_tag if given is None else given
    number = _step(tag, "tag")
    if step is not None and _step(step, "step") != number:
        raise InvalidArgument(f"tag={tag!r} and step={step!r} are two steps; give one")
    return _TAG_OF_STEP.format(number), number


def _is_text(name: str) -> bool:
    """False for halves of characters, as `os.fsdecode` makes of bytes that are no UTF-8."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_file_name(file: object) -> str:
    if not isinstance(file, str) or not file or not _is_text(file):
        raise InvalidArgument(f"{file!r} cannot name a file; give a non-empty string of whole characters")
    return file


def allowed(allow: object) -> list[Any]:
    """`allow` as a list; one name alone would be taken for its letters."""
    if isinstance(allow, (str, bytes)) or not isinstance(allow, Iterable):
        raise InvalidArgument(f"allow={allow!r} is no list of names; give one, as allow=['package.module.Class']")
    return list(allow)


def _step(value: object, called: str) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]  # NumPy's integers too; what is none raises TypeError
    except TypeError:
        names = " or a name" if called == "tag" else ""
        raise InvalidArgument(f"{called}={value!r} cannot be used; give a whole number from 0 up{names}") from None
    if not 0 <= number < 1 << 63:
        raise InvalidArgument(f"{called}={value!r} cannot be used; give a whole number from 0 up")
    return number


def step_of_tag(tag: str) -> int | None:
    from relight import _core

    return _core.step_of_tag(tag)
