"""Diagnosis: which part of a state cannot be pickled, by path and type. Runs only after a save has been refused.

Owns: the search; the sentence that names what it found.
Must not: run on the way of a save that works; change the state.
Invariant: what it names is a part that fails alone, with no smaller part that does.
"""

from __future__ import annotations

import pickle
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator

from relight.exceptions import NotPicklable
from relight.torch import paths

__all__ = ["PICKLE_ERRORS", "not_picklable"]

# What pickling something unpicklable raises, by Python and by torch. Other errors come from the user's own `__reduce__`
# or from the machine, and are left as they are.
PICKLE_ERRORS = (pickle.PicklingError, TypeError, AttributeError, ValueError, NotImplementedError, RuntimeError)

_DEPTH_MAX = 200


def not_picklable(obj: object, error: Exception, try_pickle: Callable[[object], object]) -> NotPicklable:
    """The error to raise for `obj`, whose pickling raised `error`.

    Args:
        try_pickle: pickles one part and throws the bytes away.
    """
    if isinstance(error, RecursionError):
        return NotPicklable(
            "the state is nested too deeply to be pickled; flatten it, or raise sys.setrecursionlimit. Nothing was "
            "written"
        )
    path, part, cause = _narrow(obj, error, try_pickle)
    where = f"{path} is" if path else "the object is"
    return NotPicklable(
        f"{where} a {paths.type_name(part)}, which cannot be saved ({_first_line(cause)}). "
        "Take it out of the state, or give the class that holds it a __getstate__ without it. Nothing was written"
    )


def _narrow(obj: object, error: Exception, try_pickle: Callable[[object], object]) -> tuple[str, object, Exception]:
    path, part = "", obj
    for _ in range(_DEPTH_MAX):
        for name, child in _parts(part):
            failure = _failure(child, try_pickle)
            if failure is not None:
                path, part, error = paths.join(path, name), child, failure
                break
        else:
            break
    return path, part, error


def _failure(part: object, try_pickle: Callable[[object], object]) -> Exception | None:
    try:
        try_pickle(part)
    except PICKLE_ERRORS as error:
        return error
    return None


def _parts(part: object) -> Iterator[tuple[object, object]]:
    """The parts that pickle would go into: items, else what the object says its state is, else its attributes."""
    if isinstance(part, (dict, list, tuple, set, frozenset)):
        yield from paths.children(part)
        if isinstance(part, dict):
            yield from ((f"<key {key!r}>", key) for key in part if not isinstance(key, (str, int)))
    reduce = getattr(part, "__reduce_ex__", None)
    if isinstance(part, (type, weakref.ReferenceType)) or reduce is None:
        return  # a weak method is made of weak references, which is no name of the user's
    try:
        reduced = reduce(2)
    except PICKLE_ERRORS:
        yield from paths.children(part)
        return
    if not isinstance(reduced, tuple):
        return
    state = reduced[2] if len(reduced) > 2 else None
    for half in state if isinstance(state, tuple) and len(state) == 2 else (state,):
        if isinstance(half, dict):
            yield from half.items()
        elif half is not None:
            yield "<state>", half
    attributes = dict(paths.children(part)) if not isinstance(part, (dict, list, tuple, set, frozenset)) else {}
    if isinstance(part, defaultdict):
        attributes["default_factory"] = part.default_factory
    for index, argument in enumerate(reduced[1]):
        if argument is not part:
            name = next((key for key, value in attributes.items() if value is argument), f"<argument {index}>")
            yield name, argument


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
