"""Restoring a module from a state dict: what torch's `load_state_dict` leaves unsaid is said here.

Owns: the names that wrappers add, the report of what does not fit, ties and flags under assignment.
Must not: read files; change the state dict; change the module before everything was compared.
Invariant: after `load_into` returns, every tensor of the module is either loaded or named in the report.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from relight.exceptions import InvalidArgument

__all__ = ["LoadReport", "load_into", "strip_wrappers"]

WRAPPERS = ("module.", "_orig_mod.")  # DataParallel and DistributedDataParallel; torch.compile
_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What of a module and of a state dict did not meet."""

    missing: tuple[str, ...]
    """Keys of the module that the state dict lacks; they keep their values."""
    unexpected: tuple[str, ...]
    """Keys of the state dict that the module lacks; they are not used."""
    on_meta: tuple[str, ...]
    """Tensors of the module that are still on the meta device, and so have no values; non-persistent buffers too."""


def strip_wrappers(state_dict: Mapping[str, Any], module: torch.nn.Module) -> dict[str, Any]:
    """The state dict with the prefixes added or removed by which wrappers around the saved model and this one differ.

    Only what a wrapper adds is touched: a prefix must be on every key, and a child that is really called `module`
    stays.

    Raises:
        InvalidArgument: no key matches, with or without prefixes.
    """
    own = list(module.state_dict(keep_vars=True))
    saved_prefix, saved = _peel(list(state_dict))
    own_prefix, bare = _peel(own)
    if not own or not state_dict:
        return dict(state_dict)
    # From the names as they are to the most that can be taken off: the first that fits best keeps a real child's name.
    candidates: list[tuple[int, int, str, str]] = []
    for cut in _cuts(saved_prefix):
        for add in _cuts(own_prefix):
            keys = {add + key[len(cut) :] for key in state_dict}
            candidates.append((len(keys & set(own)), -(len(cut) + len(add)), cut, add))
    matched, _, cut, add = max(candidates)
    if not matched:
        raise InvalidArgument(
            f"no key of the state dict is one of the module's: it has {_listed(saved)}, the module has {_listed(bare)}"
        )
    return {add + key[len(cut) :]: value for key, value in state_dict.items()}


def load_into(
    module: torch.nn.Module,
    state_dict: Mapping[str, Any],
    *,
    strict: bool = True,
    assign: bool = False,
    strip_wrappers: bool = False,
) -> LoadReport:
    """Loads a state dict into a module and says all that does not fit. The state dict is unchanged.

    Args:
        strict: refuse missing and unexpected keys alike, and tensors that would still be on meta, before anything is
            changed. False: report them.
        assign: put the tensors of the state dict in the place of the module's, as a module on meta needs. Each keeps
        the
            `requires_grad` of the module, and names that were one Parameter are one again. An optimizer that was made
            before still holds the old parameters: make it afterwards.
        strip_wrappers: let the prefixes of wrappers (`module.`, `_orig_mod.`) differ.

    Raises:
        InvalidArgument: the state dict does not fit; nothing was changed.
    """
    given = _stripped(state_dict, module) if strip_wrappers else dict(state_dict)
    own = module.state_dict(keep_vars=True)
    missing = tuple(key for key in own if key not in given)
    unexpected = tuple(key for key in given if key not in own)
    different = [
        f"{key} (saved {tuple(given[key].shape)}, here {tuple(value.shape)})"
        for key, value in own.items()
        if isinstance(value, torch.Tensor)
        and isinstance(given.get(key), torch.Tensor)
        and not isinstance(value, (torch.nn.UninitializedParameter, torch.nn.UninitializedBuffer))
        and value.shape != given[key].shape
    ]
    on_meta = _left_on_meta(module, given, assign)
    facts = [(_listed(different), "have another shape")] if different else []
    if strict:
        facts += [
            (_listed(keys), said) for keys, said in ((missing, "are missing"), (unexpected, "are unexpected")) if keys
        ]
        if on_meta:
            facts.append((_listed(on_meta), "would stay on the meta device, without values"))
    if facts:
        said = "; ".join(f"{names} {what}" for names, what in facts)
        way = "" if different else ", or pass strict=False"
        if on_meta and not assign:
            way += ", or pass assign=True"
        raise InvalidArgument(
            f"the state dict does not fit the module: {said}. Nothing was changed. Give the right one{way}"
        )
    tied = _ties(module) if assign else []
    module.load_state_dict(given, strict=False, assign=assign)
    if assign:
        _tie(module, tied)
    return LoadReport(missing=missing, unexpected=unexpected, on_meta=tuple(on_meta))


_stripped = strip_wrappers


def _peel(keys: list[str]) -> tuple[str, list[str]]:
    """The wrappers' prefixes that all keys share, and the keys without them."""
    prefix = ""
    while keys:
        found = next((wrapper for wrapper in WRAPPERS if all(key.startswith(wrapper) for key in keys)), None)
        if found is None:
            break
        prefix += found
        keys = [key[len(found) :] for key in keys]
    return prefix, keys


def _cuts(prefix: str) -> list[str]:
    """All leading parts of a chain of prefixes: "", "module.", "module._orig_mod."."""
    parts = prefix.split(".")[:-1]
    return ["".join(part + "." for part in parts[:count]) for count in range(len(parts) + 1)]


def _left_on_meta(module: torch.nn.Module, given: Mapping[str, Any], assign: bool) -> list[str]:
    names = []
    for name, tensor in [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]:
        filled = assign and isinstance(given.get(name), torch.Tensor) and not given[name].is_meta
        if tensor.is_meta and not filled:
            names.append(name)
    return names


def _ties(module: torch.nn.Module) -> list[list[str]]:
    """Groups of names that are one Parameter."""
    groups: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def _tie(module: torch.nn.Module, groups: list[list[str]]) -> None:
    # Assignment makes one Parameter for each name, over one storage: torch would count and update it twice.
    for first, *others in groups:
        parameter = module.get_parameter(first)
        for name in others:
            owner, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(owner), leaf, parameter)


def _listed(names: list[str] | tuple[str, ...]) -> str:
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
