"""relight: checkpoints of PyTorch training that do not stop it and are there after anything dies.

Owns: the public names. Must not: hold code, or import torch. Invariant: `import relight` is light.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from relight.checkpoint import Checkpoint, CheckpointFile, FileCheck, Resumed, Verification
from relight.checkpointer import Checkpointer
from relight.exceptions import (
    CheckpointError,
    CheckpointNotFound,
    CommitConflict,
    CorruptCheckpoint,
    DistributedSaveError,
    EngineClosed,
    InvalidArgument,
    NotPicklable,
    ObjectNotAllowed,
    PartLeftOutWarning,
    ResumeWarning,
    SaveFailedWarning,
    StorageDenied,
    StorageFull,
    StorageUnavailable,
    TornSnapshot,
    WaitTimeout,
)
from relight.files import load, open, save, save_async
from relight.handle import Handle, Progress
from relight.options import Options
from relight.state import TrainState, optional

__version__: str

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "CheckpointFile",
    "CheckpointNotFound",
    "Checkpointer",
    "CommitConflict",
    "CorruptCheckpoint",
    "DistributedSaveError",
    "EngineClosed",
    "FileCheck",
    "Handle",
    "InvalidArgument",
    "NotPicklable",
    "ObjectNotAllowed",
    "Options",
    "PartLeftOutWarning",
    "Progress",
    "ResumeWarning",
    "Resumed",
    "SaveFailedWarning",
    "StorageDenied",
    "StorageFull",
    "StorageUnavailable",
    "TornSnapshot",
    "TrainState",
    "Verification",
    "WaitTimeout",
    "__version__",
    "load",
    "open",
    "optional",
    "save",
    "save_async",
]


if TYPE_CHECKING:
    from relight import nebula as nebula
    from relight.torch.view import View as View
else:
    # Not for type checkers: to them it would give every misspelt name a type.
    def __getattr__(name: str) -> Any:
        if name == "__version__":  # it is the extension's, which is loaded at first use only
            from relight._core import __version__

            return __version__
        if name == "nebula":  # with `import relight` alone; what does not use it does not pay for it
            from importlib import import_module

            return import_module("relight.nebula")
        if name == "View":  # what `open` returns, for annotations; it needs torch
            from relight.torch.view import View

            return View
        raise AttributeError(f"module 'relight' has no attribute {name!r}")
