"""What the kernel holds of a file: whether it is durable, whether it is cached, and how to get it out of the cache.

Owns: cachestat(2), posix_fadvise, drop_caches.
Must not: believe that a call had an effect; it looks.
"""

import ctypes
import errno
import os
from collections.abc import Iterable
from pathlib import Path

_CACHESTAT = 451  # the same number on every architecture; Linux 6.5 and newer
_LIBC = ctypes.CDLL(None, use_errno=True)


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _Stat(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recently_evicted")
    )


def pages(path: Path) -> _Stat | None:
    """Pages of the file that are cached, dirty and being written; None where the kernel does not tell."""
    stat = _Stat()
    descriptor = os.open(path, os.O_RDONLY)
    try:
        whole = _Range(0, 0)
        if _LIBC.syscall(_CACHESTAT, descriptor, ctypes.byref(whole), ctypes.byref(stat), 0) != 0:
            code = ctypes.get_errno()
            if code in (errno.ENOSYS, errno.EPERM, errno.EOPNOTSUPP):
                return None
            raise OSError(code, os.strerror(code), str(path))
    finally:
        os.close(descriptor)
    return stat


def require_durable(paths: Iterable[Path]) -> str:
    """How it was seen that no byte of these files waits for the disk.

    Raises:
        SystemExit: bytes are still dirty: what was measured is not what was claimed.
    """
    how = "cachestat: no dirty page"
    for path in paths:
        found = pages(path)
        if found is None:
            how = "fsync by the code under test (this kernel has no cachestat to look)"
        elif found.dirty or found.writeback:
            raise SystemExit(
                f"bench: {path} has {found.dirty} dirty pages and {found.writeback} on their way: not durable"
            )
    return how


def evict(paths: Iterable[Path]) -> str:
    """Takes the files out of the page cache, and says how and whether it worked."""
    paths = list(paths)
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    left = sum(found.cached for path in paths if (found := pages(path)) is not None)
    if not left:
        known = all(pages(path) is not None for path in paths)
        return "cold: posix_fadvise" + (", cachestat sees no page left" if known else ", not checked")
    try:
        Path("/proc/sys/vm/drop_caches").write_text("1")
    except OSError:
        return f"not quite cold: {left} pages stayed, and drop_caches needs root"
    return "cold: drop_caches"
