"""The caller's own facts about a checkpoint, as JSON text.

Owns: what `save(meta=...)` accepts and how it is written down.
Must not: lose a value without a word; import torch.
Invariant: the text is strict JSON, which every reader of the manifest understands.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from relight.exceptions import InvalidArgument

__all__ = ["meta_to_json"]

_DEPTH_MAX = 64


def meta_to_json(meta: Mapping[str, Any] | None) -> str:
    """`meta` as JSON. Scalars of NumPy and torch become numbers, tuples become lists.

    Numbers that JSON does not have (a loss that is NaN is no reason to lose a checkpoint) become the texts "NaN",
    "Infinity" and "-Infinity".

    Raises:
        InvalidArgument: a value that is no JSON, or a key that is no string; the message names it.
    """
    if meta is None:
        return "{}"
    if not isinstance(meta, Mapping):
        raise InvalidArgument(f"meta is a {type(meta).__name__}; give a dict with strings as keys")
    return json.dumps(_plain(meta, "meta", 0), allow_nan=False, ensure_ascii=False)


def _plain(value: Any, where: str, depth: int) -> Any:
    if depth > _DEPTH_MAX:
        raise InvalidArgument(f"{where} is nested more than {_DEPTH_MAX} deep (or in itself); give something flatter")
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else _WORDS[str(float(value))]
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise InvalidArgument(f"{where} has the key {key!r}, which is no string; JSON has no other keys")
        return {key: _plain(item, f"{where}[{key!r}]", depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{where}[{index}]", depth + 1) for index, item in enumerate(value)]
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "ndim", None) == 0:  # a scalar of NumPy or torch
        return _plain(item(), where, depth + 1)
    raise InvalidArgument(
        f"{where} is a {type(value).__qualname__}, which JSON does not have; give numbers, text, lists and dicts, and "
        "save objects in files={...}"
    )


_WORDS = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
