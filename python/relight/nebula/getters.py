"""The getters that clients call.

Owns: what each of them answers, and that in one process asking ends the saves before it.
Must not: give a checkpoint that is not complete, or an object with an empty tag; save.
Invariant: a miss is None (or an empty list); a root that cannot be read is an error.
"""

import os
from typing import Any

from relight.nebula import api, find, roots, shares
from relight.nebula.checkpoint import Checkpoint
from relight.nebula.find import CheckpointSummary, Found
from relight.nebula.roots import NebulaRoot


def get_checkpoint(tag: object, persist_path: Any = None) -> Checkpoint | None:
    """The complete checkpoint `tag`, or None if it is unknown or not complete.

    Args:
        persist_path: the root to look in, its checkpoints in memory included. None: the one that `init` set.

    Raises:
        InvalidArgument: `persist_path` is no path.
        StorageUnavailable: the root is there but cannot be read.
    """
    root = _root_to_read(persist_path)
    found = None if tag is None else find.by_tag(root, str(tag))
    return None if found is None else _handle(found)


def get_latest_checkpoint(persist_path: Any = None) -> Checkpoint | None:
    """The checkpoint completed last, or None if there is none; a `ResumeWarning` names what is damaged and passed over.

    Arguments and errors as in `get_checkpoint`.
    """
    root = _root_to_read(persist_path)
    found = next(find.latest_first(root), None)
    find.warn_of_damaged(root)
    return None if found is None else _handle(found)


def list_checkpoints(persist_path: Any = None) -> list[CheckpointSummary]:
    """The complete checkpoints, oldest first, the latest last; made for `json.dumps`. Errors as in `get_checkpoint`."""
    return [found.summary() for found in find.complete(_root_to_read(persist_path))]


def get_latest_checkpoint_path(name: str, persist_path: Any = None) -> str | None:
    """The path, for plain `torch.load`, of the file `name` in the newest checkpoint that has it. Waits for its persist.

    Returns:
        The path; None if no checkpoint has the file, or nothing is persisted because no path was set.

    Raises:
        InvalidArgument, StorageUnavailable: as `get_checkpoint` does.
        CheckpointError: the newest could not be persisted; told once, then the next older one is given.
    """
    root = _root_to_read(persist_path)
    if root is None or root.path is None:
        return None
    name = os.fspath(name)
    for share in shares.process().persisting():
        if share.root is root and share.has_published(name):
            share.wait_for_persists(None)
    newest = _newest_with(root, name)
    if newest is not None and not newest.persistent:
        roots.wait_until_idle()  # a dead process staged it: the drain persists it, and has no ticket here
    for found in find.latest_first(root):
        path = found.path_of(name)
        if path is not None and found.persistent:
            return path
    return None


def _newest_with(root: NebulaRoot, name: str) -> Found | None:
    return next((found for found in find.latest_first(root) if name in found.names), None)


def _handle(found: Found) -> Checkpoint:
    return Checkpoint.of_found(found.root, found.tag)


def _root_to_read(persist_path: Any) -> NebulaRoot | None:
    api.ensure_init()
    shares.process().before_reading()
    return roots.find(persist_path)
