"""When is a tag complete: shares, their seals, and what is sealed by itself.

Owns: the state of every (root, tag) of this process; the second argument of `Checkpoint` (-2, n, none).
Must not: pickle or read an object; wait for a persist; import torch.
Invariant: time alone never seals. A tag with a failed save, or with fewer than its n files, is never handed to the
engine as complete, whatever seals it.
"""

import logging
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from relight import _core
from relight.distributed.world import World
from relight.exceptions import CheckpointError, InvalidArgument, SaveFailedWarning, WaitTimeout
from relight.handle import Handle, wait_all
from relight.nebula import find
from relight.nebula.roots import NebulaRoot

logger = logging.getLogger("relight.nebula")

BY_COMMIT: Final = -2
"""The second argument of a client that declares the end by `commit()`."""


def read_count(num_of_files: object) -> int | None:
    """The second argument of `Checkpoint`: -2, a number of files, or None (which -1 also means).

    Raises:
        InvalidArgument: it is none of these.
    """
    if num_of_files is None:
        return None
    if isinstance(num_of_files, bool) or not hasattr(num_of_files, "__index__"):
        raise InvalidArgument(f"num_of_files is {num_of_files!r}; give a number of files, -2 or None")
    count = num_of_files.__index__()
    if count == -1:
        return None
    if count != BY_COMMIT and count < 1:
        raise InvalidArgument(f"num_of_files is {count}; give 1 or more, -2 (until commit()) or None")
    return int(count)


@dataclass(frozen=True, slots=True)
class Books:
    """Which shares have something to do, so that a step or a save of a long run does not walk over all its tags.
    Dicts, for their order: what was saved first is published first."""

    unsealed: dict["TagShare", None]
    persisting: dict["TagShare", None]


class TagShare:
    """What this process saves under one tag of one root. Every handle of the tag shares it."""

    def __init__(self, root: NebulaRoot, tag: str, world: World, books: "Books") -> None:
        self.root: Final = root
        self.tag: Final = tag
        self.world: Final = world
        # Held while a file is staged and while the share is sealed: an optimizer step in another thread waits here
        # until the copy is done, and no seal comes between the two halves of a save.
        self.lock: Final = threading.RLock()
        self._count: int | None = None
        self._open: _core.Share | None = None
        self._staged: set[str] = set()  # files of the open generation
        self._failed: set[str] = set()  # files whose last save raised
        self._published: set[str] = set()  # files of the generations that this process has sealed
        self._sealed = False  # sealed, but with fewer files than its n
        self._books: Final = books
        self._said_failed: set[str] = set()
        self._said_incomplete = 0  # with how many files that was last said
        self._said_at_exit = False  # the end of a process is noticed twice, see `lifetime`
        self._exception_at_open: object = None
        self._reports: list[_core.StageReport] = []
        self._handles: list[Handle] = []  # persists under way, and failed ones whose error nobody has been told
        self._warned: set[int] = set()
        self._warned_replaced = False

    @property
    def by_commit(self) -> bool:
        """Whether only `commit()` seals it."""
        return self._count == BY_COMMIT

    def has_published(self, file: str) -> bool:
        """Whether this process has sealed a file of that name here."""
        return file in self._published

    def save(self, file: str, count: int | None, stage: Callable[[_core.Share], _core.StageReport]) -> None:
        """Runs `stage` on the open generation, and seals it where `file` is the last of the n.

        Raises:
            CheckpointError: as `stage` does; the tag cannot complete until `file` is saved again.
        """
        with self.lock:
            self._declare(count)
            self._sealed = False
            self._books.unsealed.setdefault(self)
            self._failed.add(file)  # until it is staged: also when Ctrl-C ends this call
            if self._open is None:
                self._open = self.root.core.begin(self.tag, rank=self.world.rank, world_size=self.world.world_size)
                self._exception_at_open = last_unhandled_exception()
            self._reports.append(stage(self._open))
            self._failed.discard(file)
            self._said_failed.discard(file)
            self._staged.add(file)
            if self._is_last(file):
                self.seal()

    def image(self, file: str) -> _core.Image | None:
        """A file of the open generation, which only this process may read yet."""
        with self.lock:
            return self._open.image(file) if self._open is not None and file in self._staged - self._failed else None

    def seal(self) -> bool:
        """Declares that this process's files are all there, and hands a complete tag to the engine.

        Returns False if a save failed and was not repeated: then the tag stays incomplete.
        """
        with self.lock:
            if self._failed:
                self._say_failed()
                return False
            if self._open is None:
                self._books.unsealed.pop(self, None)
                return True
            self._sealed = True
            if self._has_all_files():
                self._publish(self._open)
            return True

    def seal_implied(self) -> None:
        """Seals as an event does that is not `commit()`: never what waits for `commit()`."""
        if not self.by_commit:
            self.seal()

    def seal_at_exit(self, exception: object) -> str | None:
        """Seals at a clean end of the process. `exception`: what is ending it, if anything is.

        Returns what stays incomplete and why, if anything does. What was being saved when an exception ended the
        program may be half a checkpoint, and a restart would read it.
        """
        if exception is None and last_unhandled_exception() is self._exception_at_open:
            self.seal_implied()
        elif self._open is not None and not self.by_commit:
            if self._said_at_exit:
                return None
            self._said_at_exit = True
            return f"{self.tag} is not published: an exception ended the program before the tag was complete"
        return self.incomplete()

    def incomplete(self) -> str | None:
        """What a sealed or ended share still waits for, told once for each number of files."""
        if self._open is None or self._said_incomplete == len(self._staged):
            return None
        self._said_incomplete = len(self._staged)
        if self.by_commit:
            return f"{self.tag} is incomplete: {len(self._staged)} file(s) are saved, but commit() was not called"
        if self._sealed and self._count is not None:
            have = len(self._published | self._staged)
            return f"{self.tag} is incomplete: {have} of its {self._count} files are saved by rank {self.world.rank}"
        return None

    def take_errors(self) -> list[CheckpointError]:
        """The errors of persists that have ended, each given out once."""
        with self.lock:
            errors = []
            for handle in list(self._handles):
                if not handle.done():
                    continue
                self._handles.remove(handle)
                if (error := handle.exception()) is not None:
                    error.tag = error.tag or self.tag
                    error.add_note(f"relight: so {self.tag} was not persisted")
                    errors.append(error)
            self._forget_committed()
            return errors

    def wait_for_persists(self, timeout_s: float | None) -> bool:
        """Waits until nothing of this tag is under way. False: there was nothing to wait for.

        Raises:
            WaitTimeout: it takes longer.
            CheckpointError: it failed, and nobody has been told yet.
        """
        handles = self.handles()
        left = wait_all(handles, timeout_s)
        if left:
            raise WaitTimeout(f"{self.tag} is not persisted after {timeout_s} s; it goes on, wait again", tag=self.tag)
        raise_first(self.take_errors())
        return bool(handles)

    def handles(self) -> list[Handle]:
        """The persists that may still be under way, or whose failure nobody was told."""
        with self.lock:
            self._forget_committed()
            return list(self._handles)

    def _declare(self, count: int | None) -> None:
        """Merges the second argument of the handle in use into that of the open round: the stricter one wins."""
        if self._open is None:
            self._count = count
        elif count == BY_COMMIT or self._count == BY_COMMIT:
            self._count = BY_COMMIT
        elif count is not None:
            self._count = max(count, self._count or 0)

    def _has_all_files(self) -> bool:
        if self._count is None or self.by_commit:
            return True
        return len(self._published | self._staged) >= self._count

    def _is_last(self, file: str) -> bool:
        """Whether `file` is the one that completes an n-file tag without any further sign."""
        if self._count is None or self.by_commit:
            return False
        # A second round over the same names waits for all n again, so that readers never see half of it; a file that
        # is new to a complete tag joins it at once.
        return len(self._staged) >= self._count or (file not in self._published and self._has_all_files())

    def _say_failed(self) -> None:
        if self._failed <= self._said_failed:
            return  # every step of the optimizer comes here
        self._said_failed |= self._failed
        logger.warning(
            "%s stays incomplete: saving %s failed; save it again, then the tag completes",
            self.tag,
            ", ".join(map(repr, sorted(self._failed))),
        )

    def _publish(self, share: _core.Share) -> None:
        replaced = self._staged & self._published
        if self.by_commit and not replaced:
            replaced = self._staged & set(self._names_before())
        handle = Handle(
            share.seal(),
            path=self.root.directory_of(self.tag),
            files=sorted(self._staged),
            reports=self._reports,
            stall_s=sum(report.seconds for report in self._reports),
            tag=self.tag,
        )
        self._handles.append(handle)
        self._reports = []
        self._books.persisting.setdefault(self)
        self._open = None
        self._exception_at_open = None
        self._published |= self._staged
        self._staged = set()
        self._said_incomplete = 0
        self._sealed = False
        self._books.unsealed.pop(self, None)
        self._forget_committed()
        for other in list(self._books.unsealed):
            if other.root is self.root:
                other.give_up_if_failed(self.tag)
        if self.by_commit and replaced and not self._warned_replaced:
            self._warned_replaced = True
            warnings.warn(
                f"{self.tag} was saved before: what was in {', '.join(map(repr, sorted(replaced)))} is gone. Use "
                "another tag for each step to keep both",
                UserWarning,
                stacklevel=4,
            )

    def give_up_if_failed(self, newer: str) -> None:
        """Frees what is staged beside a failed save once a newer tag is complete: no client goes back to repeat it, and
        its memory would never be given back. Should one do so all the same, it must save every file again."""
        # Not waited for: its owner may be waiting for the lock of the newer tag, whose thread this is.
        if not self._failed or not self.lock.acquire(blocking=False):
            return
        try:
            if self._open is not None and self._failed:
                logger.warning("%s is given up: a save of it failed, and %s is complete now", self.tag, newer)
                self._open.abandon()
                self._open = None
                self._failed |= self._staged
                self._staged = set()
                self._reports = []
                self._books.unsealed.pop(self, None)
        finally:
            self.lock.release()

    def _names_before(self) -> Iterable[str]:
        """What another process left under this tag, for a warning: no reason to fail or to delay a commit."""
        if self.root.path is None or self._published or not os.path.isdir(self.root.directory_of(self.tag)):
            return []
        try:
            found = find.by_tag(self.root, self.tag)
        except CheckpointError:
            return []
        return [] if found is None else found.names

    def warn_of_failed_persists(self) -> None:
        """Warns once of each persist that failed; its error stays for the next call that waits."""
        for handle in self.handles():
            if handle.id in self._warned or (error := handle.error()) is None:
                continue
            self._warned.add(handle.id)
            warnings.warn(f"an earlier checkpoint was not persisted: {error}", SaveFailedWarning, stacklevel=4)

    def _forget_committed(self) -> None:
        self._handles = [handle for handle in self._handles if not handle.done() or handle.error() is not None]
        if not self._handles:
            self._warned.clear()
            self._books.persisting.pop(self, None)


class Shares:
    """Every share of this process, and the events that seal them."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._shares: dict[tuple[str, str], TagShare] = {}
        self._books = Books({}, {})
        self._next_step: dict[str, int] = {}
        self._stepped = False

    def open(self, root: NebulaRoot, tag: str, world: World) -> TagShare:
        """The share of a tag that a client begins. Who never steps ends a tag by beginning another."""
        share = self.of(root, tag, world)
        self.end_others_unless_stepping(share)
        return share

    def of(self, root: NebulaRoot, tag: str, world: World) -> TagShare:
        """The share of a tag."""
        with self._lock:
            share = self._shares.get((root.key, tag))
            if share is None:
                share = self._shares[root.key, tag] = TagShare(root, tag, world, self._books)
            return share

    def end_others_unless_stepping(self, current: TagShare | None) -> None:
        """Seals every share but `current`, in a process that has made no optimizer step to seal them."""
        if self._stepped:
            return
        for share in self.unsealed():
            if share is not current:
                share.seal_implied()

    def next_tag(self, root: NebulaRoot) -> str:
        """The tag of `Checkpoint()`: one step above the largest complete one, then one more with each call."""
        self.end_others_unless_stepping(None)
        with self._lock:
            step = self._next_step.get(root.key) or find.largest_step(root) + 1
            self._next_step[root.key] = step + 1
        return f"global_step{step}"

    def known(self, root: NebulaRoot, tag: str) -> TagShare | None:
        """The share of a tag that this process has opened."""
        with self._lock:
            return self._shares.get((root.key, tag))

    def unsealed(self) -> list[TagShare]:
        """What was saved and not published, in the order in which the saves began: so it is published, too."""
        return list(self._books.unsealed)

    def seal_implied(self, tag: str | None = None) -> None:
        """Seals everything (or one tag) that does not wait for `commit()`."""
        for share in self.unsealed():
            if tag is None or share.tag == tag:
                share.seal_implied()

    def before_step(self) -> None:
        """The optimizer is about to change the parameters: what was saved before is whole."""
        self._stepped = True
        for share in self.unsealed():
            try:
                share.seal_implied()
            except CheckpointError as error:
                # An error here would kill the training step; it is of this tag alone, and stays visible in the log.
                logger.error("%s is not published: %s", share.tag, error)

    def before_reading(self) -> None:
        """In a world of one process, whoever asks for checkpoints is not inside a save."""
        for share in self.unsealed():
            if share.world.world_size == 1:
                share.seal_implied()

    def persisting(self, tag: str | None = None) -> list[TagShare]:
        """The shares (or those of one tag) with a persist under way, or with a failure that nobody was told."""
        return [share for share in list(self._books.persisting) if tag is None or share.tag == tag]

    def take_errors(self, tag: str | None = None) -> list[CheckpointError]:
        """The errors of persists that have ended, each given out once."""
        return [error for share in self.persisting(tag) for error in share.take_errors()]

    def handles(self, tag: str | None = None) -> list[Handle]:
        """What may still be under way."""
        return [handle for share in self.persisting(tag) for handle in share.handles()]

    def warn_of_failed_persists(self) -> None:
        """Warns once of each persist that failed."""
        for share in self.persisting():
            share.warn_of_failed_persists()


def raise_first(errors: list[CheckpointError]) -> None:
    """Raises the first error, with the others in its notes; does nothing if there is none."""
    if not errors:
        return
    first, *others = errors
    for other in others:
        first.add_note(f"and: {other}")
    raise first


def last_unhandled_exception() -> object:
    """What the interpreter last printed a traceback for, because nothing caught it."""
    return getattr(sys, "last_value", None)


_process = Shares()


def process() -> Shares:
    """The shares of this process."""
    return _process


def before_step() -> None:
    """The function that the optimizer hook calls; one object, so that it is registered once."""
    _process.before_step()


def forget() -> None:
    """Starts with no share: in a forked child, whose parent goes on with them, and between tests."""
    global _process
    _process = Shares()
