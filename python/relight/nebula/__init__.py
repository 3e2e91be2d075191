"""The Nebula API (`nebulaml`, `torch_nebula`) over relight's engine, for scripts written for Nebula.

The names of Azure's `nebulaml` package, with the same arguments; `import nebulaml` and `import torch_nebula` give these
same objects. See docs/guide/nebula.md for what runs unchanged and what differs.
"""

from relight._core import __version__
from relight.nebula.api import flush_persistence, init
from relight.nebula.api import shutdown as _shutdown
from relight.nebula.checkpoint import Checkpoint
from relight.nebula.find import CheckpointSummary, FileSummary
from relight.nebula.getters import (
    get_checkpoint,
    get_latest_checkpoint,
    get_latest_checkpoint_path,
    list_checkpoints,
)
from relight.nebula.lightning import NebulaCallback, NebulaCheckpointIO, NebulaDeepspeedStrategy

__all__ = [
    "Checkpoint",
    "CheckpointSummary",
    "FileSummary",
    "NebulaCallback",
    "NebulaCheckpointIO",
    "NebulaDeepspeedStrategy",
    "__version__",
    "_shutdown",
    "flush_persistence",
    "get_checkpoint",
    "get_latest_checkpoint",
    "get_latest_checkpoint_path",
    "init",
    "list_checkpoints",
]
