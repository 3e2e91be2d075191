"""Components of a training: how the state of a model, an optimizer, a sampler or a generator is taken and given back.

Owns: what counts as a component; the checks of a saved state against the live object before anything is changed.
Must not: read or write a file; change an object in a check.
Invariant: `check` passes only what `restore` takes, as far as torch lets that be known without trying.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from relight.exceptions import CorruptCheckpoint, InvalidArgument
from relight.torch import private, rng

__all__ = ["capture", "check", "check_component", "detached_optimizers", "optimizer_classes", "restore"]

_SHOWN = 5  # names in a message; the rest is counted
# Keys of groups that say nothing about the class: what schedulers leave there, and what versions of torch add.
_OF_SCHEDULERS = frozenset(
    {"initial_lr", "max_lr", "min_lr", "base_lr", "swa_lr", "base_momentum", "max_momentum", "min_momentum"}
)
_OF_VERSIONS = frozenset(
    {"params", "param_names", "foreach", "maximize", "capturable", "differentiable", "fused", "decoupled_weight_decay"}
)


def check_component(name: str, component: object) -> None:
    """Refuses what has no state to take.

    Raises:
        InvalidArgument: no `state_dict` and `load_state_dict`, and no random generator.
    """
    if rng.is_generator(component) or (
        callable(getattr(component, "state_dict", None)) and callable(getattr(component, "load_state_dict", None))
    ):
        return
    hint = ""
    if isinstance(component, torch.utils.data.DataLoader):
        hint = ". A plain DataLoader has no position to save: give its sampler, or torchdata's StatefulDataLoader"
    raise InvalidArgument(
        f"component {name!r} is a {type(component).__qualname__}, which has no state_dict() and load_state_dict(); "
        f"give an object that has them, or save it with files={{...}}{hint}"
    )


def capture(component: Any) -> object:
    """The state of a component as it is: references to its tensors, no copies."""
    return rng.capture_generator(component) if rng.is_generator(component) else component.state_dict()


def optimizer_classes(component: object) -> list[str]:
    """The class of an optimizer and those that it was made from, by full name; empty where its state is its own affair.

    That is so for what is no optimizer, and for one that wraps another and gives the state of that.
    """
    if not isinstance(component, torch.optim.Optimizer) or not _keeps_torch_state(type(component)):
        return []
    bases = [one for one in type(component).__mro__[1:] if issubclass(one, torch.optim.Optimizer)]
    return [_full_name(one) for one in (type(component), *bases) if one is not torch.optim.Optimizer]


def check(name: str, component: Any, saved: object, where: str, *, classes: Sequence[str] = ()) -> None:
    """Whether `saved` fits the live component; changes nothing.

    Args:
        where: the file and its tag, for messages.
        classes: what `optimizer_classes` was when it was saved, where that is known.

    Raises:
        InvalidArgument: the object of the caller differs from what was saved.
        CorruptCheckpoint: what was saved is no such state.
    """
    if rng.is_generator(component):
        rng.check_generator(component, saved, where)
    elif isinstance(component, torch.nn.Module):
        _check_module(name, component, saved, where)
    elif isinstance(component, torch.optim.Optimizer):
        _check_optimizer(name, component, saved, where, classes)


def restore(component: Any, saved: Any) -> None:
    """Gives a component its state back; a module copies it into its live parameters."""
    if rng.is_generator(component):
        rng.restore_generator(component, saved)
    else:
        component.load_state_dict(saved)


def detached_optimizers(components: Mapping[str, object]) -> list[str]:
    """The optimizers that hold no parameter of any registered module: their step() would not move the model.

    That happens when the parameters were replaced after the optimizer was made (`load_state_dict(assign=True)`,
    `.to()` of some devices).
    """
    modules = [one for one in components.values() if isinstance(one, torch.nn.Module)]
    live = {id(parameter) for module in modules for parameter in module.parameters()}
    if not live:
        return []
    return [
        name
        for name, one in components.items()
        if isinstance(one, torch.optim.Optimizer)
        and not any(id(parameter) in live for group in one.param_groups for parameter in group["params"])
    ]


def _check_module(name: str, module: torch.nn.Module, saved: object, where: str) -> None:
    if not isinstance(saved, Mapping):
        raise CorruptCheckpoint(f"{where} holds a {type(saved).__name__}, not a state dict; use another checkpoint")
    meta = [key for key, tensor in _tensors(module) if tensor.is_meta]
    if meta:
        raise InvalidArgument(
            f"{_listed(meta)} of {name!r} {'is' if len(meta) == 1 else 'are'} on the meta device and cannot be filled; "
            f"call {name}.to_empty(device=...) before the optimizer is made, then resume"
        )
    if not _loads_key_by_key(module):
        return
    own = module.state_dict()
    missing = [key for key in own if key not in saved]
    unexpected = [key for key in saved if key not in own]
    different = [
        f"{key} (saved {tuple(saved[key].shape)}, here {tuple(value.shape)})"
        for key, value in own.items()
        if isinstance(value, torch.Tensor)
        and isinstance(saved.get(key), torch.Tensor)
        and value.shape != saved[key].shape
    ]
    facts = [
        f"{what} {_listed(keys)}"
        for what, keys in (("lacks", missing), ("has also", unexpected), ("has another shape of", different))
        if keys
    ]
    if facts:
        raise InvalidArgument(
            f"{where} does not fit {name!r}: the file {'; it '.join(facts)}. Nothing was changed. Make the model as it "
            "was saved, or load the file yourself and call load_state_dict(..., strict=False)"
        )


def _check_optimizer(
    name: str, optimizer: torch.optim.Optimizer, saved: object, where: str, classes: Sequence[str]
) -> None:
    if not isinstance(saved, Mapping) or not {"state", "param_groups"} <= set(saved):
        raise CorruptCheckpoint(f"{where} holds no state of an optimizer; use another checkpoint")
    if type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict:
        return
    if private.optimizer_load_hooks_of(optimizer):
        return
    _check_class(name, optimizer, saved["param_groups"], where, classes)
    here = [len(group["params"]) for group in optimizer.param_groups]
    there = [len(group["params"]) for group in saved["param_groups"]]
    if here != there:
        raise InvalidArgument(
            f"{where} does not fit {name!r}: it was saved with {there} parameters per group, and there are {here} "
            "here. Nothing was changed. Make the optimizer as it was saved"
        )


def _check_class(
    name: str,
    optimizer: torch.optim.Optimizer,
    groups: Sequence[Mapping[str, object]],
    where: str,
    classes: Sequence[str],
) -> None:
    """torch takes the state of any optimizer, and the step() of another one then fails, or goes on without moments."""
    here = optimizer_classes(optimizer)
    if classes and here:
        if any(_same(classes[0], one) for one in here) or any(_same(here[0], one) for one in classes):
            return
        known = _find(classes[0])  # the bases of a class change with versions of torch
        if known is not None and (issubclass(known, type(optimizer)) or issubclass(type(optimizer), known)):
            return
        fact = f"it has the state of {_article(classes[0])}"
    else:
        there = {key for group in groups for key in group}
        missing = sorted(optimizer.defaults.keys() - there - _OF_VERSIONS)
        own = optimizer.defaults.keys() | {key for group in optimizer.param_groups for key in group}
        foreign = sorted(str(key) for key in there - own - _OF_SCHEDULERS - _OF_VERSIONS)
        if not missing or not foreign:  # one of them alone: another version of torch, or a key of the user's
            return
        fact = f"its groups have {_listed(foreign)} and lack {_listed(missing)}, so it is of another class of optimizer"
    raise InvalidArgument(
        f"{where} does not fit {name!r}: {fact}, and here is {_article(_full_name(type(optimizer)))}. Nothing was "
        "changed. Make the optimizer as it was saved, or register this one under another name to start it from nothing"
    )


def _keeps_torch_state(kind: type[torch.optim.Optimizer]) -> bool:
    base = torch.optim.Optimizer
    return kind.load_state_dict is base.load_state_dict and kind.state_dict is base.state_dict


def _full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _same(one: str, other: str) -> bool:
    """A class of the script itself has another module where the script is imported."""
    if one.startswith("__main__.") or other.startswith("__main__."):
        return one.split(".")[-1] == other.split(".")[-1]
    return one == other


def _find(name: str) -> type | None:
    """The class of this full name, if its module is loaded; imports nothing."""
    module, _, kind = name.rpartition(".")
    found = getattr(sys.modules.get(module), kind, None)
    return found if isinstance(found, type) else None


def _article(name: str) -> str:
    kind = name.split(".")[-1]
    return f"{'an' if kind[:1] in 'AEIO' else 'a'} {kind} ({name})"


def _tensors(module: torch.nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    # A buffer that is not persistent is not in the file either way.
    persistent = module.state_dict(keep_vars=True)
    yield from ((key, buffer) for key, buffer in module.named_buffers() if key in persistent)


def _loads_key_by_key(module: torch.nn.Module) -> bool:
    """Whether loading takes the keys as they are: no hook and no override that may rename, add or drop some."""
    if not _of_torch(type(module).load_state_dict):
        return False
    return all(not private.load_hooks_of(one) and _of_torch(private.load_rule_of(one)) for one in module.modules())


def _of_torch(function: Any) -> bool:
    return (getattr(function, "__module__", "") or "").split(".")[0] == "torch"


def _listed(names: list[str]) -> str:
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
