"""`init`, `flush_persistence` and `_shutdown`: the calls that are about the whole process.

Owns: their order of work.
Must not: hold a setting (`settings`) or a share (`shares`).
"""

import os
from typing import Any

from relight.nebula import persistence, settings, shares


def init(
    persistent_storage_path: "str | os.PathLike[str] | tuple[Any, ...] | list[Any] | None" = None,
    persistent_time_interval: float | str | None = None,
    num_of_version_in_retention: int | str | None = None,
) -> None:
    """Sets where and how checkpoints are kept. May be called again: None changes nothing, and what is new counts for
    tags opened later.

    Args:
        persistent_storage_path: the directory that holds the checkpoints; made here. None:
            `NEBULA_PERSISTENT_STORAGE_PATH`, else the memory tier alone.
        persistent_time_interval: seconds that a complete checkpoint may wait at most for its persist to begin; relight
            begins at once. None: `NEBULA_PERSISTENT_TIME_INTERVAL`, else 100.
        num_of_version_in_retention: complete checkpoints kept in memory. None: 2.

    Raises:
        InvalidArgument: a value, or one of Nebula's variables, has no meaning.
        StorageDenied, StorageFull, StorageUnavailable: the directory cannot be made or used.
    """
    # The engine is not started here: a process that forks its workers after `init` must not have one.
    settings.update(persistent_storage_path, persistent_time_interval, num_of_version_in_retention)
    _watch_optimizers()


def ensure_init() -> None:
    """What a first use without `init` does."""
    if not settings.current().initialised:
        init()


def flush_persistence(tag: object = None) -> None:
    """Seals what is saved (or one tag), and returns when it is committed. Never seals what waits for `commit()`.

    Raises:
        CheckpointError: a persist failed since the last flush; each failure is raised once.
    """
    persistence.flush(None if tag is None else str(tag))


def shutdown() -> None:
    """Does what a normal end of the process does: seals, and waits within `RELIGHT_CLOSE_TIMEOUT_S` for the persists.

    Raises nothing of the background: call `flush_persistence` to be told.
    """
    persistence.shutdown()


def _watch_optimizers() -> None:
    try:
        from relight.torch import step_hook
    except ModuleNotFoundError as missing:
        if missing.name != "torch":
            raise
        return  # without torch there is no optimizer to watch, and listing works without it
    step_hook.before_each_step(shares.before_step)
