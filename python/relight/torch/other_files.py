"""Other files: what torch.save wrote before 1.6, and what only looks like a checkpoint.

Owns: which files are given to torch.load, and the errors for those that are not.
Must not: guess: a file is known by its first bytes.
Invariant: `weights_only` and `allow` hold for these files too.
"""

from __future__ import annotations

import pickle
from typing import IO, Any

import torch
from relight.exceptions import CorruptCheckpoint, InvalidArgument, ObjectNotAllowed
from relight.torch import private, safe_types

__all__ = ["check", "load", "load_packed"]

# The pickle of `torch.serialization.MAGIC_NUMBER`, with which every file in the format before 1.6 starts.
_LEGACY_MAGIC = bytes.fromhex("8a0a6cfc9c46f9206aa85019")
_TAR_MAGIC, _TAR_AT = b"ustar", 257


def load(
    f: str | IO[bytes],
    name: str,
    head: bytes,
    map_location: Any,
    pickle_module: Any,
    weights_only: bool,
    allow: list[object],
) -> Any:
    """What torch.load makes of a file that is no zip archive.

    Raises:
        CorruptCheckpoint: no file of torch.save.
        InvalidArgument: a file of another tool; the message names the tool.
        ObjectNotAllowed: it holds a type that torch's list and `allow` lack.
    """
    check(name, head)
    try:
        return _torch_load(f, map_location, pickle_module, weights_only, allow)
    except pickle.UnpicklingError as error:
        raise ObjectNotAllowed(
            f"{name} is in the format before torch 1.6, and torch's weights-only loader does not take it: "
            f"{_gist(error)}. If you trust the file, load it with weights_only=False and save it again",
            path=name,
        ) from error


def check(name: str, head: bytes) -> None:
    """Refuses a file that torch.load would not take, by its first bytes.

    Raises:
        CorruptCheckpoint, InvalidArgument: as `load`.
    """
    if name.endswith(".safetensors"):
        raise InvalidArgument(f"{name} is a safetensors file; load it with safetensors.torch.load_file", path=name)
    if not head:
        raise CorruptCheckpoint(f"{name} has no bytes; use another checkpoint", path=name)
    is_tar = head[_TAR_AT : _TAR_AT + len(_TAR_MAGIC)] == _TAR_MAGIC
    if _LEGACY_MAGIC not in head[:64] and not is_tar:
        raise CorruptCheckpoint(
            f"{name} is no file of torch.save: it starts with {head[:8]!r}; use another checkpoint", path=name
        )


def load_packed(path: str, map_location: Any, pickle_module: Any, weights_only: bool, allow: list[object]) -> Any:
    """What torch.load makes of an archive that another tool has packed anew, with compression.

    Raises:
        ObjectNotAllowed: it holds a type that torch's list and `allow` lack.
    """
    try:
        return _torch_load(path, map_location, pickle_module, weights_only, allow)
    except pickle.UnpicklingError as error:
        raise ObjectNotAllowed(
            f"{path} was compressed by another tool, and torch's weights-only loader does not take it: {_gist(error)}. "
            "Unpack it and pack it again without compression, or if you trust it pass weights_only=False",
            path=path,
        ) from error


def _torch_load(f: Any, map_location: Any, pickle_module: Any, weights_only: bool, allow: list[object]) -> Any:
    with private.safe_globals(safe_types.as_torch_globals(allow)):
        return torch.load(f, map_location=map_location, pickle_module=pickle_module, weights_only=weights_only)


def _gist(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if "GLOBAL" in line), lines[0] if lines else "")[:200]
