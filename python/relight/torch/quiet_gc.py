"""Pausing the cyclic garbage collector while many small objects are made that all stay alive.

Owns: the pause. Must not: be held over a call into the engine or into user code that waits.
Invariant: the collector is on again afterwards if it was on before, whatever happens.

Pickling 100,000 tensors makes a million tuples; the collector walks all of them again and again and finds nothing,
which more than doubles the time.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["paused"]


@contextmanager
def paused() -> Iterator[None]:
    """No cyclic collection inside the block."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
