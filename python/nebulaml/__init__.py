"""Nebula's import name `nebulaml`: the objects of `relight.nebula`, with the same state.

Owns: the name. Must not: hold anything of its own, or import Lightning or DeepSpeed.
"""

from relight.nebula import (
    Checkpoint,
    NebulaCallback,
    NebulaCheckpointIO,
    NebulaDeepspeedStrategy,
    __version__,
    _shutdown,
    flush_persistence,
    get_checkpoint,
    get_latest_checkpoint,
    get_latest_checkpoint_path,
    init,
    list_checkpoints,
)

__all__ = [
    "Checkpoint",
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
