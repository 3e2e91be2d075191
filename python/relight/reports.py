"""Reports: what people are told of a save, in the log and in the errors of a wait.

Owns: the log line of a save; which failures nobody was given yet, and how several become one error.
Must not: decide when to tell (the Checkpointer does).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from relight.exceptions import CheckpointError
from relight.handle import Handle

if TYPE_CHECKING:
    from relight import _core

__all__ = ["joined_error", "log_save", "untold"]

_log = logging.getLogger("relight.checkpointer")


def log_save(handle: Handle, reports: Sequence[_core.StageReport]) -> None:
    """One line for each save."""
    rate = handle.bytes / handle.stall_s / 1e9 if handle.stall_s else 0.0
    waited = sum(report.wait_seconds for report in reports)
    where = "streamed to storage" if handle.streamed else "in memory"
    _log.info(
        "staged %s: %s in %.1f ms (%.2f GB/s), %s%s",
        handle.what,
        _bytes(handle.bytes),
        handle.stall_s * 1e3,
        rate,
        where,
        f"; {waited * 1e3:.1f} ms of it waiting for room in memory" if waited >= 1e-3 else "",
        extra={"tag": handle.tag, "bytes": handle.bytes, "stall_s": handle.stall_s},
    )


def _bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    raise AssertionError("unreachable: GiB ends the loop")


def untold(queue: deque[Handle]) -> list[Handle]:
    """Empties the queue; what comes in meanwhile is either taken or left for the next time, never lost."""
    taken = []
    while queue:
        taken.append(queue.popleft())
    return [handle for handle in taken if not handle.told]


def joined_error(failures: Sequence[Handle]) -> CheckpointError:
    """The error of the first failure, with those of the others as notes."""
    errors = [handle.exception(0.0) for handle in failures]
    first = errors[0]
    assert first is not None  # a failed persist has an error
    for handle, error in zip(failures[1:], errors[1:], strict=True):
        first.add_note(f"relight: {handle.what} failed too: {type(error).__name__}: {error}")
    return first
