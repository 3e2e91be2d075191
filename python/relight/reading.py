"""Reading: which checkpoint is taken, from which tier, and what happens to a damaged one.

Owns: the choice of the newest good checkpoint, and the way back to older ones.
Must not: import torch at module level; change an object of the caller; decide what is complete (the engine does).
Invariant: what is read stays pinned until the caller lets it go; what is read of one checkpoint is of the one state of
it that was listed; a checkpoint that is passed over is named with its reason.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

from relight.checkpoint import Checkpoint, Tier
from relight.exceptions import (
    CheckpointError,
    CheckpointNotFound,
    CommitConflict,
    CorruptCheckpoint,
    InvalidArgument,
)

if TYPE_CHECKING:
    from relight import _core

__all__ = ["SINGLE_FILE", "Loading", "Reader", "TagSource"]

_log = logging.getLogger("relight.checkpointer")

SINGLE_FILE: Final = "state.pt"
"""The file of a save of one object."""

_ATTEMPTS: Final = 5
"""To read a tag that is saved again meanwhile."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """How objects are made from a file."""

    map_location: Any = "cpu"
    weights_only: bool = True
    mmap: bool = False
    allow: tuple[object, ...] = ()

    def object_of(self, image: _core.Image) -> Any:
        """The object in `image`."""
        from relight.torch.unpickling import load_image

        return load_image(
            image,
            map_location=self.map_location,
            weights_only=self.weights_only,
            mmap=self.mmap,
            allow=self.allow,
        )

    def of_foreign(self, path: str) -> Any:
        """The object in a file that relight did not write: of any form that torch.save ever had."""
        from relight.files import load

        return load(path, self.map_location, weights_only=self.weights_only, mmap=self.mmap, allow=self.allow)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A directory that looks like a checkpoint of relight and is not whole."""

    tag: str
    reason: str
    committed: bool
    """It was complete once, and is damaged; else its save was not finished."""


class TagSource:
    """One checkpoint, file by file, in the state that was listed: a file of another save of the tag is refused."""

    def __init__(self, root: _core.Root, checkpoint: Checkpoint, loading: Loading) -> None:
        self._root = root
        self._loading = loading
        self.checkpoint: Final = checkpoint
        self.tag: Final = checkpoint.tag
        names = _regular_files(checkpoint.path) if checkpoint.foreign else (file.name for file in checkpoint.files)
        self.files: Final = frozenset(names)
        self._records = {file.name: file for file in checkpoint.files}
        self._held: dict[str, _core.Image] = {}
        self.tier: Tier = "memory"
        """The farthest tier that was read from."""

    def load(self, file: str) -> Any:
        """The object in one file, checksums verified.

        Raises:
            CheckpointNotFound: the checkpoint has no such file.
            CorruptCheckpoint: its bytes are not what was written.
            CommitConflict: the tag was saved again since it was listed.
        """
        if file not in self.files:
            raise CheckpointNotFound(
                f"{self.tag} has no file {file!r}; it has {_listed(self.files)}",
                path=self.checkpoint.path,
                tag=self.tag,
            )
        if self.checkpoint.foreign:
            self.tier = "persistent"
            return self._loading.of_foreign(os.path.join(self.checkpoint.path, file))
        image = self._take(file)
        if image.tier == "memory" and "persistent" in self.checkpoint.tiers:
            try:
                return self._loading.object_of(image)
            except CorruptCheckpoint as error:
                _log.warning("%s of %s in memory is damaged, reading the persisted one: %s", file, self.tag, error)
                image = self._open(file, "persistent")
        if image.tier != "memory":
            self.tier = "persistent"
        return self._loading.object_of(image)

    def later(self, file: str) -> Callable[[], Any]:
        """Loads `file` when called. The open image keeps its bytes readable if the checkpoint is deleted meanwhile."""
        image = self._take(file)
        return lambda: self._loading.object_of(image)

    @contextmanager
    def held(self) -> Iterator[None]:
        """All files are opened at once: a save of the tag meanwhile no longer changes what is loaded.

        Raises:
            CommitConflict: the tag was saved again since it was listed.
        """
        try:
            for file in self._records:
                try:
                    self._held[file] = self._open(file)
                except CommitConflict:
                    raise
                except CheckpointError as error:  # said again when it is loaded, if it is
                    _log.debug("%s of %s does not open: %s", file, self.tag, error)
            yield
        finally:
            self._held.clear()

    def _take(self, file: str) -> _core.Image:
        held = self._held.pop(file, None)
        return self._open(file) if held is None else held

    def _open(self, file: str, tier: Tier | None = None) -> _core.Image:
        """The image of `file` that was listed. The engine opens the newest one, which may be of a later save."""
        record = self._records[file]

        def is_listed(image: _core.Image) -> bool:
            return (image.length, image.crc32) == (record.bytes, record.crc32)

        image = self._root.open_image(self.tag, file, tier=tier)
        if is_listed(image):
            return image
        if image.tier == "memory":  # the later save may not have reached the disk yet
            with suppress(CheckpointError):
                image = self._root.open_image(self.tag, file, tier="persistent")
                if is_listed(image):
                    return image
        raise CommitConflict(
            f"{self.tag} was saved again while it was read: its {file} is of another save than was listed",
            path=self.checkpoint.path,
            tag=self.tag,
        )

    def only_file(self) -> str:
        """The file that is meant when none is named.

        Raises:
            InvalidArgument: there are several.
        """
        if SINGLE_FILE in self.files:
            return SINGLE_FILE
        if len(self.files) == 1:
            return next(iter(self.files))
        raise InvalidArgument(
            f"{self.tag} has the files {_listed(self.files)}; say which with file=",
            path=self.checkpoint.path,
            tag=self.tag,
        )


class Reader:
    """Reads one root."""

    def __init__(self, root: _core.Root) -> None:
        self._root = root
        self.skipped: list[str] = []
        """Newer checkpoints that were passed over, each with its reason."""

    def checkpoints(self) -> list[Checkpoint]:
        """All complete ones and the foreign ones, oldest first."""
        return [Checkpoint.from_json(facts) for facts in json.loads(self._root.list())]

    @contextmanager
    def pinned(self, tag: str) -> Iterator[None]:
        """Retention leaves `tag` alone meanwhile."""
        self._root.pin(tag)
        try:
            yield
        finally:
            self._root.unpin(tag)

    def one(self, tag: str, loading: Loading, read: Callable[[TagSource], T]) -> tuple[TagSource, T]:
        """What `read` makes of the checkpoint of that name.

        Raises:
            CheckpointNotFound: there is none.
            CorruptCheckpoint: there are remains of one; the message has the reason.
            CommitConflict: it is saved again, faster than it can be read.
        """
        return self._settled(lambda: self._read(self._find(tag), loading, read))

    def newest(self, loading: Loading, read: Callable[[TagSource], T]) -> tuple[TagSource, T] | None:
        """What `read` makes of the newest checkpoint that is good; None if there is none at all.

        Raises:
            CorruptCheckpoint: there are some, and all are damaged.
            CommitConflict: it is saved again, faster than it can be read.
        """
        return self._settled(lambda: self._newest(loading, read))

    def _settled(self, attempt: Callable[[], T]) -> T:
        """Lists and reads again if a save of the tag came in between."""
        for _ in range(_ATTEMPTS - 1):
            try:
                return attempt()
            except CommitConflict as conflict:
                _log.info("%s; reading it again", conflict)
                self.skipped.clear()
        try:
            return attempt()
        except CommitConflict as conflict:
            raise CommitConflict(
                f"{conflict}, in each of {_ATTEMPTS} attempts; wait for its writer to pause, or load another tag",
                path=conflict.path,
                tag=conflict.tag,
            ) from conflict

    def _read(self, found: Checkpoint, loading: Loading, read: Callable[[TagSource], T]) -> tuple[TagSource, T]:
        source = TagSource(self._root, found, loading)
        with self.pinned(source.tag):
            return source, read(source)

    def _find(self, tag: str) -> Checkpoint:
        listed = self.checkpoints()
        for checkpoint in listed:
            if checkpoint.tag == tag:
                return checkpoint
        reason = next((one.reason for one in self.problems() if one.tag == tag), None)
        if reason is not None:
            raise CorruptCheckpoint(
                f"{tag} is not complete: {reason}; use another checkpoint", path=self._root.path, tag=tag
            )
        have = _listed(checkpoint.tag for checkpoint in listed)
        raise CheckpointNotFound(
            f"there is no checkpoint {tag!r} in {self._root.path}; there is {have or 'none'}",
            path=self._root.path,
            tag=tag,
        )

    def _newest(self, loading: Loading, read: Callable[[TagSource], T]) -> tuple[TagSource, T] | None:
        candidates = self.candidates()
        damaged = [one for one in self.problems() if one.committed]
        for checkpoint in candidates:
            try:
                return self._read(checkpoint, loading, read)
            except (CorruptCheckpoint, CheckpointNotFound) as error:
                self.skipped.append(f"{checkpoint.tag} cannot be used: {error}")
                _log.warning("%s cannot be used: %s", checkpoint.tag, error)
        if not candidates and not damaged:
            return None
        reasons = [*self.skipped, *(f"{one.tag} cannot be used: {one.reason}" for one in damaged)]
        raise CorruptCheckpoint(
            f"no checkpoint in {self._root.path} can be used. {'. '.join(reasons)}. Move them away to start anew",
            path=self._root.path,
            tag=candidates[0].tag if candidates else damaged[-1].tag,
        )

    def candidates(self) -> list[Checkpoint]:
        """What "newest" may mean, newest first; those that a later run left behind come last.

        A checkpoint without a step is no candidate unless the engine calls it the latest: then no other has one.
        """
        latest = self._root.latest()
        ours = [one for one in reversed(self.checkpoints()) if not one.foreign]
        ours = [one for one in ours if one.step is not None or one.tag == latest]
        ours.sort(key=lambda one: (one.tag != latest, one.left_behind))
        return ours

    def problems(self) -> list[Problem]:
        """Directories that look like checkpoints of relight and are not whole."""
        return [
            Problem(
                tag=facts["tag"],
                reason=facts["reason"],
                committed=os.path.lexists(os.path.join(self._root.path, facts["tag"], ".relight", "manifest.json")),
            )
            for facts in json.loads(self._root.problems())
        ]


def _regular_files(directory: str) -> list[str]:
    """What a foreign checkpoint consists of; the engine lists only what it wrote."""
    try:
        with os.scandir(directory) as entries:
            return [entry.name for entry in entries if entry.is_file() and not entry.name.startswith(".")]
    except FileNotFoundError:  # deleted since it was listed: it has nothing
        return []


def _listed(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:10]) + (f" and {len(ordered) - 10} more" if len(ordered) > 10 else "")
