"""The errors of relight: one base, and one child for each thing that a caller can do next.

Owns: the classes, their kinds (stable words), and which builtin each child is too.
Must not: import the engine or torch; turn a cause into text (raise `from` it).
Invariant: every error pickles whole, and `str(error)` is the message and nothing else.
"""

from __future__ import annotations

import errno as _errno
import os
import pickle
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

__all__ = [
    "KINDS",
    "CheckpointError",
    "CheckpointNotFound",
    "CommitConflict",
    "CorruptCheckpoint",
    "DistributedSaveError",
    "EngineClosed",
    "InvalidArgument",
    "NotPicklable",
    "ObjectNotAllowed",
    "PartLeftOutWarning",
    "ResumeWarning",
    "SaveFailedWarning",
    "StorageDenied",
    "StorageFull",
    "StorageUnavailable",
    "TornSnapshot",
    "WaitTimeout",
]


class CheckpointError(Exception):
    """Anything that goes wrong in relight. Raised itself only for what fits no child, such as a bug in relight.

    What to do: catch this class to keep training whatever happens to a checkpoint; look at `kind` or catch a child to
    act on one kind. If it is raised itself, report it with its message.

    Attributes:
        kind: a stable word for what the caller does next, a key of `KINDS`.
        message: the fact and the way out; the same as `str(error)`.
        path: the file or directory that the fact is about, where there is one.
        tag: the checkpoint that it is about, where there is one.
        rank: the rank on which it happened, where that is known.
        retryable: the same call may succeed later with nothing changed by the caller.
    """

    kind: ClassVar[str] = "unknown"
    retryable_by_kind: ClassVar[bool] = False
    errno_by_kind: ClassVar[int | None] = None  # for children of OSError: its code when the system gave none

    message: str
    path: str | None
    tag: str | None
    rank: int | None
    retryable: bool

    def __init__(
        self,
        message: str,
        *,
        path: str | os.PathLike[str] | None = None,
        tag: str | None = None,
        rank: int | None = None,
        retryable: bool | None = None,
        errno: int | None = None,
    ) -> None:
        path = None if path is None else os.fspath(path)
        code = self.errno_by_kind if errno is None else errno
        if not isinstance(self, OSError) or code is None:
            super().__init__(message)
        elif path is None:  # OSError fills errno and strerror only from two arguments or more
            super().__init__(code, message)
        else:
            super().__init__(code, message, path)
        self.message = message
        self.path = path
        self.tag = tag
        self.rank = rank
        self.retryable = self.retryable_by_kind if retryable is None else retryable

    def __str__(self) -> str:
        # OSError would say "[Errno 28] <message>: '<path>'", with the path twice.
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        # BaseException pickles by `cls(*args)`, which loses the keywords, and for OSError the message.
        code = self.errno if isinstance(self, OSError) else None
        return _rebuild, (type(self), self.message, code, self.path), self.__dict__


def _rebuild(cls: type[CheckpointError], message: str, code: int | None, path: str | None) -> CheckpointError:
    return cls(message, errno=code, path=path)


class CheckpointNotFound(CheckpointError, FileNotFoundError):
    """A tag, file or directory that was asked for by name is not there.

    What to do: list what is there (`Checkpointer.list()`, `relight ls`) and ask for one of those.
    """

    kind = "not_found"
    errno_by_kind = _errno.ENOENT


class InvalidArgument(CheckpointError, ValueError):
    """The call cannot be meant so: an option out of range, a tag that is no name, a state that cannot be saved.

    What to do: change the call as the message says. Nothing was written.
    """

    kind = "invalid_argument"


class NotPicklable(InvalidArgument, pickle.PicklingError):
    """A part of the state cannot be pickled: a lock, an open file, a function defined inside another function.

    What to do: take the part out of the state, or mark it optional (`relight.optional`, `TrainState(optional=...)`).
    The message names its key. Nothing was written.
    """

    kind = "not_picklable"


class StorageFull(CheckpointError, OSError):
    """The storage or the memory tier has no room, a quota is used up, or the checkpoint is larger than a file may be.

    What to do: free space, lower `keep`, raise the memory limit or choose another path; then save again.
    """

    kind = "storage_full"
    retryable_by_kind = True
    errno_by_kind = _errno.ENOSPC


class StorageDenied(CheckpointError, PermissionError):
    """The storage refuses this user, or is mounted read-only.

    What to do: give the user access to the path, or choose another.
    """

    kind = "storage_denied"
    errno_by_kind = _errno.EACCES


class StorageUnavailable(CheckpointError, ConnectionError):
    """The storage fails or does not answer: an I/O error, a lost mount, a server that is down.

    What to do: look at the storage, then save again; the next save does its own work and may well succeed.
    """

    kind = "storage_unavailable"
    retryable_by_kind = True
    errno_by_kind = _errno.EIO


class CorruptCheckpoint(CheckpointError):
    """Bytes on the storage are not what was written: a file cut short, changed, missing, or a checksum that differs.

    What to do: use another checkpoint (`resume` does so by itself) and look at the storage; `Checkpointer.verify(tag)`
    names every bad file.
    """

    kind = "corrupt"


class CommitConflict(CheckpointError):
    """Another process holds the tag, or has committed it meanwhile.

    What to do: let one process write a tag, or choose another tag. The message names the other writer.
    """

    kind = "conflict"
    retryable_by_kind = True


class TornSnapshot(CheckpointError):
    """A tensor was changed while it was being copied; what was copied is the state of no moment and is not committed.

    What to do: do not change the state from another thread during the call to `save`; then save again.
    """

    kind = "torn"
    retryable_by_kind = True


class EngineClosed(CheckpointError):
    """The engine or the Checkpointer is closed, or belongs to the process that this one was forked from.

    What to do: make a new Checkpointer. In a forked child, leave saving to the parent, or start the child by spawn.
    """

    kind = "closed"


class WaitTimeout(CheckpointError, TimeoutError):
    """A wait reached its time limit; what was waited for goes on.

    What to do: wait again with more time, or look at what is slow; the message says who waits for what.
    """

    kind = "timed_out"
    retryable_by_kind = True
    errno_by_kind = _errno.ETIMEDOUT


class DistributedSaveError(CheckpointError):
    """One or more ranks failed to save their part, so the tag was not committed on any rank.

    What to do: look at `errors`, which has the error of each rank that failed; the next save is a new try.

    Attributes:
        errors: rank to error.
    """

    kind = "distributed"
    errors: dict[int, BaseException]

    def __init__(self, message: str, *, errors: Mapping[int, BaseException] | None = None, **facts: Any) -> None:
        super().__init__(message, **facts)
        self.errors = dict(errors or {})


class ObjectNotAllowed(CheckpointError, PermissionError):
    """Loading met a type that is not on the list of what is always allowed, and so did not make it: it could run code.

    What to do: if the file comes from someone you trust, pass `allow=[<name in the message>]`, or `weights_only=False`.

    Attributes:
        name: the full name of the type or function, as `allow=` takes it.
    """

    kind = "object_not_allowed"
    errno_by_kind = _errno.EPERM
    name: str | None

    def __init__(self, message: str, *, name: str | None = None, **facts: Any) -> None:
        super().__init__(message, **facts)
        self.name = name


class SaveFailedWarning(RuntimeWarning):
    """An earlier save failed in the background, and the call that warns goes on to do its own work.

    What to do: look at the message; `on_error="raise"` turns the warning into the error itself.
    """


class ResumeWarning(RuntimeWarning):
    """A resume did less than it might: a newer checkpoint is damaged and an older one was taken, an object has no state
    in the checkpoint, or a part of the checkpoint has no object.

    What to do: read the names in the message; register what is missing, or repair what is damaged.
    """


class PartLeftOutWarning(RuntimeWarning):
    """A part that was marked optional could not be saved and was left out; the rest is saved.

    What to do: nothing, if the part is as dispensable as its mark says.
    """


KINDS: Mapping[str, type[CheckpointError]] = MappingProxyType(
    {
        cls.kind: cls
        for cls in (
            CheckpointError,
            CheckpointNotFound,
            InvalidArgument,
            NotPicklable,
            StorageFull,
            StorageDenied,
            StorageUnavailable,
            CorruptCheckpoint,
            CommitConflict,
            TornSnapshot,
            EngineClosed,
            WaitTimeout,
            DistributedSaveError,
            ObjectNotAllowed,
        )
    }
)
"""Each kind (a stable word) and its class."""
