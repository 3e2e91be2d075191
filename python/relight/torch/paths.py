"""Paths: names for the parts of a state, as `optimizer.state.0.exp_avg`.

Owns: the walk over containers and attributes, and how a path is written.
Must not: copy or change what it walks; follow a cycle twice.
Invariant: a path is the keys, indexes and attribute names from the root to the part, joined by dots.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

__all__ = ["children", "find", "join", "type_name", "walk"]


def join(path: str, key: object) -> str:
    """The path of `key` inside `path`."""
    return f"{path}.{key}" if path else str(key)


def type_name(obj: object) -> str:
    """The full name of the type of `obj`; for a function or class the name of the thing itself."""
    if callable(obj) and hasattr(obj, "__qualname__"):
        return f"{type(obj).__name__} {getattr(obj, '__module__', None) or '?'}.{obj.__qualname__}"
    cls = type(obj)
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


def children(obj: object) -> Iterator[tuple[object, object]]:
    """Key and value of each part: of a container its items, of other objects their attributes."""
    if isinstance(obj, Mapping):
        yield from obj.items()
        return
    if isinstance(obj, (list, tuple, deque)):
        names = getattr(obj, "_fields", None)  # a namedtuple
        yield from zip(names, obj, strict=False) if names else enumerate(obj)
        return
    if isinstance(obj, (set, frozenset)):
        yield from enumerate(obj)
        return
    if isinstance(obj, torch.nn.Module):
        # Its parts by the names that its state dict has; the dicts that hold them are no names of the user's.
        hidden = ("_parameters", "_buffers", "_modules")
        for name in hidden:
            yield from obj.__dict__.get(name, {}).items()
        yield from ((name, value) for name, value in obj.__dict__.items() if name not in hidden)
        return
    if isinstance(obj, type) or (callable(obj) and hasattr(obj, "__code__")):
        return
    attributes = getattr(obj, "__dict__", None)
    if isinstance(attributes, dict):
        yield from attributes.items()
    for cls in type(obj).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(obj, name):
                yield name, getattr(obj, name)


def walk(obj: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Path and object of everything inside `obj`, itself first, depth first; each container once."""
    seen: set[int] = set()
    stack: list[tuple[str, object]] = [(path, obj)]
    while stack:
        at, here = stack.pop()
        yield at, here
        if isinstance(here, (str, bytes, int, float, type(None))):
            continue
        if id(here) in seen:
            continue
        seen.add(id(here))
        stack += reversed([(join(at, key), value) for key, value in children(here)])


def find(obj: object, wanted: Callable[[Any], bool]) -> str | None:
    """The path of the first part that `wanted` accepts; None if there is none."""
    for path, part in walk(obj):
        if wanted(part):
            return path
    return None
