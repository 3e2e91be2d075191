"""Which checkpoints there are: the listing of a root, and the choices among it.

Owns: what counts as a checkpoint for Nebula's clients (ours, and foreign ones that Nebula completed), and their order.
Must not: load a file; show a tag that is not complete; wait.
Invariant: "there is none" is None or an empty list; "cannot look" is an error.
"""

import json
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypedDict

from relight.exceptions import CheckpointNotFound, ResumeWarning, StorageDenied, StorageUnavailable
from relight.nebula.roots import NebulaRoot

_COMPLETE_FILE: Final = "complete.txt"
_COMPLETE_TEXT: Final = b"OK"


class FileSummary(TypedDict):
    """One file of a checkpoint, as `list_checkpoints` gives it."""

    name: str
    size: int


class CheckpointSummary(TypedDict):
    """One checkpoint, as `list_checkpoints` gives it."""

    tag: str
    step: int | None
    path: str | None
    tiers: list[str]
    files: list[FileSummary]
    size: int
    committed_at: str | None
    best: bool
    foreign: bool


@dataclass(frozen=True, slots=True)
class Found:
    """One complete checkpoint of a root, as the engine lists it."""

    root: NebulaRoot
    raw: dict[str, Any]

    @property
    def tag(self) -> str:
        return str(self.raw["tag"])

    @property
    def foreign(self) -> bool:
        return bool(self.raw["foreign"])

    @property
    def names(self) -> list[str]:
        return [str(file["name"]) for file in self.raw["files"]]

    @property
    def persistent(self) -> bool:
        return "persistent" in self.raw["tiers"]

    @property
    def identity(self) -> tuple[str, str, int, int]:
        """Changes when the tag is saved again."""
        return self.root.key, self.tag, int(self.raw["sequence"] or 0), int(self.raw["generation"] or 0)

    @property
    def directory(self) -> str | None:
        """The tag's directory; None in the memory tier alone."""
        return None if self.root.path is None else os.path.join(self.root.path, self.tag)

    def path_of(self, name: str) -> str | None:
        """The path of one file; None if the checkpoint has no such file, or it is in memory alone."""
        if self.directory is None:
            return None
        for file in self.raw["files"]:
            if file["name"] == name:
                return os.path.join(self.directory, str(file["path"]))
        return None

    def summary(self) -> CheckpointSummary:
        return {
            "tag": self.tag,
            "step": self.raw["step"],
            "path": self.directory,
            "tiers": [str(tier) for tier in self.raw["tiers"]],
            "files": [{"name": str(file["name"]), "size": int(file["bytes"])} for file in self.raw["files"]],
            "size": int(self.raw["bytes"]),
            "committed_at": self.raw["committed_at"],
            "best": bool(self.raw["best"]),
            "foreign": self.foreign,
        }


# What failed its checksums in this process: the same bytes would fail again, and the caller wants the next best.
_corrupt: set[tuple[str, str, int, int]] = set()
_told: set[tuple[str, str, str]] = set()


def complete(root: NebulaRoot | None) -> list[Found]:
    """The complete checkpoints of a root, oldest first, foreign ones before all others.

    Raises:
        StorageUnavailable: the root is there but cannot be read.
    """
    if root is None:
        return []
    try:
        listing = json.loads(root.core.list())
    except CheckpointNotFound:
        return []
    except StorageDenied as cause:
        raise StorageUnavailable(f"cannot list {root.path}: {cause}", path=root.path) from cause
    everything = [Found(root, raw) for raw in listing]
    counting = [found for found in everything if found.identity not in _corrupt and _counts(found)]
    for found in counting:
        if found.foreign:
            _look_into(found)
    return counting


def latest_first(root: NebulaRoot | None) -> Iterator[Found]:
    """The same, newest first."""
    return reversed(complete(root))


def by_tag(root: NebulaRoot | None, tag: str) -> Found | None:
    """One complete checkpoint by its name."""
    return next((found for found in complete(root) if found.tag == tag), None)


def skip_from_now_on(found: Found) -> None:
    """Hides a checkpoint whose bytes are bad, until its tag is saved again."""
    _corrupt.add(found.identity)


def damaged(root: NebulaRoot | None) -> dict[str, str]:
    """Tags that look like relight's but are not whole, each with the reason."""
    if root is None:
        return {}
    try:
        return {str(problem["tag"]): str(problem["reason"]) for problem in json.loads(root.core.problems())}
    except CheckpointNotFound:
        return {}
    except StorageDenied as cause:
        raise StorageUnavailable(f"cannot look into {root.path}: {cause}", path=root.path) from cause


def warn_of_damaged(root: NebulaRoot | None) -> None:
    """Says once of each tag why it is passed over: whoever takes the latest must know that there was a later one."""
    for tag, reason in damaged(root).items():
        assert root is not None  # else there is nothing damaged
        if (root.key, tag, reason) not in _told:
            _told.add((root.key, tag, reason))
            warnings.warn(f"{tag} in {root.path} is passed over: {reason}", ResumeWarning, stacklevel=3)


def forget() -> None:
    """Forgets what was found corrupt, for tests."""
    _corrupt.clear()
    _told.clear()


def largest_step(root: NebulaRoot) -> int:
    """The largest step among the complete checkpoints; 0 if none has one."""
    return max((found.raw["step"] for found in complete(root) if found.raw["step"] is not None), default=0)


def _look_into(found: Found) -> None:
    """Files and size of a directory that Nebula left, which no manifest tells."""
    assert found.directory is not None  # `_counts` read a file in it
    with _readable(found), os.scandir(found.directory) as entries:
        files = sorted(
            (entry.name, entry.stat().st_size) for entry in entries if entry.is_file() and entry.name != _COMPLETE_FILE
        )
    found.raw["files"] = [{"name": name, "path": name, "bytes": size} for name, size in files]
    found.raw["bytes"] = sum(size for _, size in files)


@contextmanager
def _readable(found: Found) -> Iterator[None]:
    try:
        yield
    except OSError as cause:
        raise StorageUnavailable(
            f"cannot read {found.tag} in {found.root.path}: {cause}; check the storage",
            path=found.directory,
            tag=found.tag,
        ) from cause


def _counts(found: Found) -> bool:
    """A directory without a manifest counts only where Nebula wrote that it is complete: DeepSpeed's placeholders and
    half-written directories must stay a miss."""
    if not found.foreign:
        return True
    if found.directory is None:
        return False
    with _readable(found):
        try:
            with open(os.path.join(found.directory, _COMPLETE_FILE), "rb") as file:
                return file.read(16).strip() == _COMPLETE_TEXT
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return False
