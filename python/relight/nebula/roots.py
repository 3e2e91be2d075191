"""The roots that this process has met, by their normal form.

Owns: the way from a path (or none) to the engine's `Root`; the engine's memory retention.
Must not: read or write in a root; decide what is visible.
Invariant: two names of one directory give one `NebulaRoot`; a forked child starts with none.
"""

import os
import threading
from typing import Any, Final

from relight import _core, runtime
from relight.exceptions import CheckpointNotFound, StorageDenied, StorageUnavailable
from relight.nebula import settings

_MEMORY_PREFIX: Final = "memory:"  # the engine's word for a root without a persistent tier


class NebulaRoot:
    """One directory of checkpoints, or the memory tier alone."""

    __slots__ = ("_core", "_engine", "key", "path")

    def __init__(self, key: str, path: str | None, *, create: bool) -> None:
        self.key: Final = key
        self.path: Final = path
        """None: nothing is persisted."""
        self._engine = _engine()
        self._core = _opened(self._engine, key, create=create)

    @property
    def core(self) -> _core.Root:
        """The engine's side of it. Opened again if the engine was closed and started anew."""
        engine = _engine()
        if engine is not self._engine:
            self._engine, self._core = engine, _opened(engine, self.key, create=True)
        return self._core

    def directory_of(self, tag: str) -> str:
        """Where a tag is or will be; for a person to read where nothing is persisted."""
        return f"{self.key}/{tag}" if self.path is None else os.path.join(self.path, tag)

    def __repr__(self) -> str:
        return f"NebulaRoot({self.key!r})"


_lock = threading.RLock()
_roots: dict[str, NebulaRoot] = {}
_memory_root: NebulaRoot | None = None


def configured() -> NebulaRoot:
    """The root that `init` set, made if it is not there; the memory tier alone if it set none."""
    path = settings.current().path.value
    return _memory_only() if path is None else _open(path, create=True)


def find(persist_path: Any) -> NebulaRoot | None:
    """The root that a getter means: `persist_path`, or the configured one. None: there is no such directory.

    Raises:
        InvalidArgument: `persist_path` is no path.
        StorageUnavailable: it cannot be read.
    """
    if persist_path is None:
        path = settings.current().path.value
        if path is None:
            return _memory_only()
    else:
        path = settings.read_root("persist_path", persist_path)
    try:
        return _open(path, create=False)
    except CheckpointNotFound:
        return None
    except StorageDenied as cause:
        # The caller would take None for "start from nothing"; not being let in is not the same as nothing being there.
        raise StorageUnavailable(f"cannot look for checkpoints in {path}: {cause}", path=path) from cause


def _open(path: str, *, create: bool) -> NebulaRoot:
    with _lock:
        key = os.path.realpath(path)
        known = _roots.get(key)
        if known is None:
            known = _roots[key] = NebulaRoot(key, key, create=create)
        return known


def _memory_only() -> NebulaRoot:
    # Named after the working directory, so that the next process of this job finds what a dead one staged,
    # while jobs that run elsewhere on the node never see each other's checkpoints.
    # Looked up once: a later chdir must not hide what was saved before it.
    global _memory_root
    with _lock:
        if _memory_root is None:
            key = _MEMORY_PREFIX + os.path.realpath(os.getcwd())
            _memory_root = NebulaRoot(key, None, create=True)
        return _memory_root


def _engine() -> _core.Engine:
    engine = runtime.engine()
    engine.set_memory_keep(settings.current().retention.value)
    return engine


def wait_until_idle() -> None:
    """Returns when no persist of this process is queued, those for dead processes included."""
    if runtime.started():
        runtime.engine().flush(None)


def forget() -> None:
    """Forgets every root: their engine is gone (a fork, or the end of a test)."""
    global _lock, _memory_root
    _lock = threading.RLock()
    _roots.clear()
    _memory_root = None


def _opened(engine: _core.Engine, key: str, *, create: bool) -> _core.Root:
    root = engine.open_root(key, create=create)
    engine.await_drains(key)
    return root
