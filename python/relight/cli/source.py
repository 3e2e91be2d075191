"""Where the verbs get their facts: a root on disk, its checkpoints in memory, the regions that processes left.

Owns: the quiet engine of the command line; the shapes of the engine's JSON.
Must not: write to a root, or adopt a region unless `drain` asks for it.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from relight import _core
from relight.exceptions import CheckpointNotFound, CorruptCheckpoint, InvalidArgument

Json = dict[str, Any]


@contextmanager
def engine(memory_dir: str | None = None) -> Iterator[_core.Engine]:
    """An engine for the time of one command. It makes no region as long as nothing is staged."""
    one = _core.Engine(memory_dir=memory_dir)
    try:
        yield one
    finally:
        one.close(None)


@contextmanager
def opened(path: str) -> Iterator[_core.Root]:
    """A root that exists. Nothing is drained: looking changes nothing.

    Raises:
        CheckpointNotFound: there is nothing at this path.
        InvalidArgument: it is a file.
    """
    if not os.path.lexists(path):
        raise CheckpointNotFound(f"there is no directory {path}", path=path)
    if not os.path.isdir(path):
        raise InvalidArgument(
            f"{path} is a file, and a root is a directory; `relight show {path}` reads one file", path=path
        )
    with engine() as one:
        yield one.open_root(path, create=False, drain=False)


def checkpoints(root: _core.Root) -> list[Json]:
    """All checkpoints, oldest first by the latest rule; foreign ones before them, with the files that lie in them."""
    listed: list[Json] = json.loads(root.list())
    for one in listed:
        if one["foreign"]:  # no manifest: the engine knows no more than the name
            one["files"] = _lying_in(one["path"])
            one["bytes"] = sum(file["bytes"] for file in one["files"])
    return listed


def _lying_in(folder: str) -> list[Json]:
    with os.scandir(folder) as entries:
        found = sorted((entry.name, entry.stat().st_size) for entry in entries if entry.is_file())
    return [
        {"name": name, "path": name, "bytes": size, "crc32": None, "codec": "none", "rank": None}
        for name, size in found
    ]


def problems(root: _core.Root) -> list[Json]:
    """Directories that look like checkpoints and are not whole: {tag, reason}."""
    found: list[Json] = json.loads(root.problems())
    return found


def find(root: _core.Root, tag: str) -> Json:
    """One checkpoint by its tag.

    Raises:
        CorruptCheckpoint: it is there but not whole (from the engine, which names the file).
        CheckpointNotFound: with what is there instead.
    """
    known = checkpoints(root)
    for one in known:
        if one["tag"] == tag:
            return one
    for bad in problems(root):
        if bad["tag"] == tag:
            raise _not_whole(root, tag, bad["reason"])
    for one in staged_for(root):
        if one["tag"] == tag:
            way_out = "wait until it is persisted" if one["alive"] else "`relight drain` persists it"
            message = f"{tag} of {root.path} is only in the memory of process {one['pid']} so far; {way_out}"
            raise CheckpointNotFound(message, path=root.path, tag=tag)
    names = ", ".join(one["tag"] for one in known[-5:]) or "none"
    raise CheckpointNotFound(f"{root.path} has no checkpoint {tag}; the newest there: {names}", path=root.path, tag=tag)


def _not_whole(root: _core.Root, tag: str, reason: str) -> Exception:
    return CorruptCheckpoint(f"{tag} in {root.path} is not a whole checkpoint: {reason}", path=root.path, tag=tag)


def regions(memory_dir: str | None = None) -> list[Json]:
    """This user's regions of the memory tier, with what is in them."""
    found: list[Json] = json.loads(_core.regions(memory_dir))
    return found


def staged_for(root: _core.Root) -> list[Json]:
    """What regions hold for this root: {tag, step, bytes, state, pid, alive}, whoever owns them."""
    return [
        {**one, "pid": region["pid"], "alive": region["alive"]}
        for region in regions()
        for one in region["checkpoints"]
        if one["root"] == root.path
    ]
