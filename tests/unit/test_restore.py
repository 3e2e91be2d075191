"""Restoring a module: what does not fit is said, ties and flags are kept, and the state dict is unchanged."""

from __future__ import annotations

import io
from typing import Any

import pytest
import relight
import torch
from relight.torch.restore import load_into, strip_wrappers


def there_and_back(obj: Any) -> Any:
    file = io.BytesIO()
    relight.save(obj, file)
    file.seek(0)
    return relight.load(file)


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(5, 3)
        self.head = torch.nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(x))


def step(model: torch.nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(torch.tensor([1, 2])).square().sum().backward()
    optimizer.step()


def test_bl_008_a_tie_is_back_after_restoring_a_meta_module_by_assignment() -> None:
    model = Tied()
    state = there_and_back(model.state_dict())
    with torch.device("meta"):
        restored = Tied()
    report = load_into(restored, state, assign=True)
    assert report.on_meta == ()
    assert restored.head.weight is restored.embed.weight
    assert (
        len(list(restored.parameters())) == len(torch.optim.SGD(restored.parameters()).param_groups[0]["params"]) == 1
    )
    step(model)
    step(restored)
    assert torch.equal(restored.head.weight, model.head.weight)


class WithScratch(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


@pytest.mark.parametrize("strict", [True, False])
def test_bl_174_what_is_still_on_meta_is_named(strict: bool) -> None:
    state = there_and_back(WithScratch().state_dict())
    with torch.device("meta"):
        module = WithScratch()
    if strict:
        with pytest.raises(relight.InvalidArgument, match="scratch would stay on the meta device"):
            load_into(module, state, assign=True)
        assert module.linear.weight.is_meta  # nothing was changed
    else:
        assert load_into(module, state, assign=True, strict=False).on_meta == ("scratch",)
        assert not module.linear.weight.is_meta


def test_bl_174_copying_into_a_meta_module_fills_nothing_and_says_so() -> None:
    with torch.device("meta"):
        module = torch.nn.Linear(2, 2)
    with pytest.raises(relight.InvalidArgument, match="assign=True"):
        load_into(module, torch.nn.Linear(2, 2).state_dict())


class RealChild(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.module = torch.nn.Linear(2, 2)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_bl_175_wrappers_are_stripped_and_added(prefix: str) -> None:
    plain = torch.nn.Linear(2, 2)
    wrapped = {prefix + key: value for key, value in plain.state_dict().items()}
    with pytest.raises(relight.InvalidArgument, match=r"weight, bias are missing.*unexpected"):
        load_into(torch.nn.Linear(2, 2), wrapped)
    target = torch.nn.Linear(2, 2)
    load_into(target, wrapped, strip_wrappers=True)
    assert torch.equal(target.weight, plain.weight)

    holder: torch.nn.Module = torch.nn.Linear(2, 2)
    for name in reversed(prefix.split(".")[:-1]):
        outer = torch.nn.Module()
        outer.add_module(name, holder)
        holder = outer
    load_into(holder, plain.state_dict(), strip_wrappers=True)
    assert torch.equal(holder.state_dict()[prefix + "weight"], plain.weight)


def test_bl_175_a_real_child_of_that_name_keeps_it() -> None:
    saved = RealChild().state_dict()
    target = RealChild()
    load_into(target, saved, strip_wrappers=True)
    assert torch.equal(target.module.weight, saved["module.weight"])
    load_into(target, {"module." + key: value for key, value in saved.items()}, strip_wrappers=True)
    assert list(strip_wrappers(saved, target)) == ["module.weight", "module.bias"]


def test_bl_175_no_key_matched_is_an_error() -> None:
    with pytest.raises(relight.InvalidArgument, match="no key"):
        load_into(torch.nn.Linear(2, 2), {"module.other": torch.ones(1)}, strict=False, strip_wrappers=True)


@pytest.mark.parametrize("change", ["more", "less"])
def test_bl_176_missing_and_unexpected_are_treated_alike(change: str) -> None:
    module = torch.nn.Linear(2, 2)
    before = module.weight.clone()
    state = {key: value + 1 for key, value in module.state_dict().items()}
    if change == "more":
        state["extra"] = torch.ones(1)
    else:
        del state["bias"]
    named = "extra" if change == "more" else "bias"
    with pytest.raises(relight.InvalidArgument, match=rf"{named} are (missing|unexpected)"):
        load_into(module, state)
    assert torch.equal(module.weight, before)
    report = load_into(module, state, strict=False)
    assert (report.unexpected, report.missing) == ((("extra",), ()) if change == "more" else ((), ("bias",)))
    assert torch.equal(module.weight, before + 1)


def test_another_shape_is_refused_before_anything_is_changed() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 3))
    before = module[0].weight.clone()
    state = module.state_dict() | {"0.weight": before + 1, "1.weight": torch.ones(4, 4)}
    with pytest.raises(relight.InvalidArgument, match=r"1\.weight \(saved \(4, 4\), here \(3, 2\)\)"):
        load_into(module, state, strict=False)
    assert torch.equal(module[0].weight, before)


def test_bl_177_a_load_leaves_the_state_dict_as_it_was() -> None:
    module = torch.nn.BatchNorm1d(2)
    state = there_and_back(module.state_dict())
    keys, metadata = list(state), dict(state._metadata)
    load_into(module, state)
    load_into(torch.nn.BatchNorm1d(2), state, assign=True)
    assert list(state) == keys and dict(state._metadata) == metadata


@pytest.mark.parametrize("frozen_here", [True, False])
def test_bl_183_the_flag_of_the_module_is_kept_under_assignment(frozen_here: bool) -> None:
    saved, module = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    (module if frozen_here else saved).weight.requires_grad_(False)
    load_into(module, there_and_back(saved.state_dict(keep_vars=True)), assign=True)
    assert module.weight.requires_grad is not frozen_here
    assert module.bias.requires_grad and torch.equal(module.weight, saved.weight)
