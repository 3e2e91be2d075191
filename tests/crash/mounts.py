"""Small file systems in a mount namespace of one child: nothing is mounted for anybody else.

Owns: the code that a child mounts with, and the question whether this machine lets it.
"""

from __future__ import annotations

import ctypes
import os

import pytest

PREAMBLE = """
import ctypes as _ctypes
_libc = _ctypes.CDLL(None, use_errno=True)

def _check(result):
    if result:
        raise OSError(_ctypes.get_errno(), os.strerror(_ctypes.get_errno()))

def mount(source, target, kind=None, flags=0, options=None):
    encoded = [None if text is None else str(text).encode() for text in (source, target, kind, options)]
    _check(_libc.mount(encoded[0], encoded[1], encoded[2], _ctypes.c_ulong(flags), encoded[3]))

NEW_NAMESPACE, BIND, PRIVATE, RECURSIVE, READ_ONLY, REMOUNT = 0x20000, 4096, 1 << 18, 16384, 1, 32
_check(_libc.unshare(NEW_NAMESPACE))
mount("none", "/", None, PRIVATE | RECURSIVE)

def tmpfs(path, size):
    os.makedirs(path, exist_ok=True)
    mount("tmpfs", path, "tmpfs", 0, f"size={size}")
    return path
"""


def need_mounts() -> None:
    """Skips the test where a process may not mount."""
    pid = os.fork()
    if pid == 0:  # in a child: the namespace of the tester stays as it is
        os._exit(0 if ctypes.CDLL(None).unshare(0x20000) == 0 else 1)
    if os.waitpid(pid, 0)[1] != 0:
        pytest.skip("mounting small file systems needs root (CAP_SYS_ADMIN)")
