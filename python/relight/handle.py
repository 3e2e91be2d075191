"""Handles: what a save returns, to wait for its persist or to ask about it.

Owns: the waiting, the errors and the callbacks of one persist.
Must not: import torch; run a caller's callback while a lock is held.
Invariant: an error is never lost: it is raised or returned to somebody, or the exit of the process prints it.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from relight import runtime
from relight.exceptions import CheckpointError, NotPicklable, WaitTimeout

if TYPE_CHECKING:
    from relight import _core

__all__ = ["Handle", "Progress"]

_log = logging.getLogger("relight.save")


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a persist is; a snapshot."""

    state: Literal["queued", "persisting", "committed", "failed"]
    bytes_total: int
    bytes_persisted: int
    attempts: int
    """Tries so far; more than 1 says that the storage had trouble."""
    seconds: float
    """Time spent on persisting."""
    queued_seconds: float
    """Time spent in the queue behind earlier saves."""

    @property
    def fraction(self) -> float:
        """From 0 to 1; 1 when committed."""
        if self.state == "committed" or not self.bytes_total:
            return 1.0 if self.state == "committed" else 0.0
        return min(1.0, self.bytes_persisted / self.bytes_total)


class Handle:
    """One save under way, with the manners of `concurrent.futures.Future`.

    The caller may change its tensors as soon as it has the handle: the state is staged by then. `result()` waits until
    the checkpoint is durable and visible.

    Attributes:
        tag: the checkpoint; None for a save to a single path.
        path: the directory of the tag, or the file.
        files: the names of the files saved.
        bytes: length of all of them together.
        stall_s: how long `save` held up its caller.
        streamed: larger than the memory tier: written through, not kept in memory.
    """

    def __init__(
        self,
        ticket: _core.Ticket,
        *,
        path: str,
        files: Sequence[str],
        reports: Sequence[_core.StageReport],
        stall_s: float,
        tag: str | None = None,
        on_start: Callable[[Handle], None] | None = None,
        on_done: Callable[[Handle, CheckpointError | None], None] | None = None,
    ) -> None:
        self._ticket = ticket
        self.id = ticket.id
        self.tag = tag
        self.path = path
        self.files = tuple(files)
        self.bytes = sum(report.bytes for report in reports)
        self.stall_s = stall_s
        self.streamed = any(report.streamed for report in reports)
        self.outlives = bool(reports) and all(report.memory == "shared" for report in reports)
        """Whether a death of this process leaves it in memory for the next one."""
        self.given_up = False
        """A close() with a time limit gave up waiting for it."""
        self._on_done = on_done
        self._callbacks: list[Callable[[Handle], object]] = []
        self._settled = False
        self.told = False
        """Somebody was given its error."""
        if on_start is not None:
            on_start(self)  # before the end can be noticed: `on_done` undoes it
        self._lock = threading.RLock()  # a signal handler may come in while its own thread holds it
        runtime.track(self)

    @property
    def what(self) -> str:
        """The tag, or the path of a save to a single file: what messages call it."""
        return self.path if self.tag is None else self.tag

    def staged(self, timeout: float | None = None) -> bool:
        """Whether the state is copied, so that the caller may change its tensors. True: `save` returns only then."""
        return True

    def done(self) -> bool:
        """Whether the persist has ended, well or badly. Never waits."""
        return self._ticket.wait(0.0)

    def result(self, timeout: float | None = None) -> str:
        """Waits until the save is committed.

        Returns:
            Where it is: the directory of the tag, or the file.

        Raises:
            WaitTimeout: not committed after `timeout` seconds; the persist goes on.
            CheckpointError: the persist failed; see `relight.exceptions`.
        """
        error = self.exception(timeout)
        if error is not None:
            raise error
        return self.path

    def exception(self, timeout: float | None = None) -> CheckpointError | None:
        """Waits for the end of the persist; its error, or None if it was committed.

        Raises:
            WaitTimeout: not ended after `timeout` seconds; the persist goes on.
        """
        if not self.wait(timeout):
            raise WaitTimeout(
                f"{self.what} is not persisted after {timeout:g} s ({_said(self.progress())}); it goes on. Wait "
                "longer, or look at the storage",
                path=self.path,
                tag=self.tag,
            )
        error = self.error()
        if error is not None:
            self.told = True
            runtime.told(self)
        return error

    def wait(self, timeout: float | None = None) -> bool:
        """Waits for the end of the persist, good or bad; False if that is not within `timeout` seconds."""
        runtime.check_fork()
        deadline = runtime.deadline_after(timeout)
        if not self._ticket.wait(runtime.remaining(deadline)):
            return False
        self.settle()
        return True

    def progress(self) -> Progress:
        """How far the persist is. Never waits."""
        facts: dict[str, Any] = json.loads(self._ticket.progress())
        return Progress(**{name: facts[name] for name in Progress.__dataclass_fields__})

    def add_done_callback(self, callback: Callable[[Handle], object]) -> None:
        """Calls `callback(handle)` when the persist has ended, or now if it has.

        It runs in relight's event thread or in a thread that waits for the handle. What it raises is logged.
        """
        with self._lock:
            if not self._settled:
                self._callbacks.append(callback)
                return
        self._call(callback)

    def error(self) -> CheckpointError | None:
        """The error of a persist that has ended; None while it is under way. Does not count as being told."""
        try:
            self._ticket.check()
        except CheckpointError as error:
            return error
        return None

    def settle(self) -> None:
        """The persist has ended: takes note of it, once, and runs the callbacks. For relight's own use."""
        with self._lock:
            if self._settled:
                return
            error = self.error()
            runtime.untrack(self, failed=error is not None)
            if self._on_done is not None:
                self._on_done(self, error)
                self._on_done = None
            self._settled = True
            callbacks, self._callbacks = self._callbacks, []
        if error is None:
            _log.debug("committed %s", self.what, extra={"tag": self.tag})
        else:
            _log.error("%s was not saved: %s: %s", self.what, type(error).__name__, error, extra={"tag": self.tag})
        for callback in callbacks:  # not under the lock: a callback may wait for a thread that wants it
            self._call(callback)

    def _call(self, callback: Callable[[Handle], object]) -> None:
        try:
            callback(self)
        except Exception:  # noqa: BLE001  # the caller's code: whatever it raises must not end the event thread
            _log.exception("a callback of %s raised", self.what)

    def __repr__(self) -> str:
        state = "settled" if self._settled else "under way"
        return f"<relight.Handle {self.what} {state}>"

    def __reduce__(self) -> Any:
        raise NotPicklable(
            "a relight.Handle belongs to its process and cannot be pickled; pass its path or tag instead"
        )


def _said(progress: Progress) -> str:
    text = f"{progress.state}, {progress.bytes_persisted} of {progress.bytes_total} bytes"
    return text + (f", attempt {progress.attempts}" if progress.attempts > 1 else "")


def wait_all(handles: Sequence[Handle], timeout: float | None) -> list[Handle]:
    """Waits for all of `handles`, at most `timeout` seconds together; those that have not ended by then."""
    deadline = runtime.deadline_after(timeout)
    return [handle for handle in handles if not handle.wait(runtime.remaining(deadline))]
