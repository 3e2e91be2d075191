"""Buffers: the bytes of a CPU storage as a memoryview, without numpy and without a copy.

Owns: the two calls that turn an address into a buffer.
Must not: keep the storage alive: the caller does, for as long as the view is used.
Invariant: a view covers bytes of its storage and nothing else.
"""

from __future__ import annotations

import ctypes

from torch.storage import UntypedStorage

__all__ = ["readable_view", "writable_view"]

_from_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_from_memory.restype = ctypes.py_object
_from_memory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_READ, _WRITE = 0x100, 0x200  # PyBUF_READ and PyBUF_WRITE of the C API


def readable_view(storage: UntypedStorage, start: int, length: int) -> memoryview:
    """`length` bytes of a CPU storage from `start` on, read-only."""
    view: memoryview = _from_memory(storage.data_ptr() + start, length, _READ)
    return view


def writable_view(storage: UntypedStorage) -> memoryview:
    """All bytes of a CPU storage. Not for mapped storages that others read: torch may share their pages."""
    view: memoryview = _from_memory(storage.data_ptr(), storage.nbytes(), _WRITE)
    return view
