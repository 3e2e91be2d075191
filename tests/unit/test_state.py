"""TrainState: saves what a run needs to go on, changes nothing on save, on restore nothing before all is checked."""

from __future__ import annotations

import copy
import io
import random
import warnings
from collections.abc import Callable, Collection
from typing import Any

import numpy
import pytest
import torch
from relight.exceptions import CorruptCheckpoint, InvalidArgument, ResumeWarning
from relight.state import TrainState, optional


class Saved:
    """A checkpoint in a dict: each file as torch.save writes it, read with weights_only=True."""

    def __init__(self, state: TrainState, *, step: int | None = 7, rank: int = 0, world_size: int = 1) -> None:
        self.tag = f"global_step{step}"
        capture = state.capture()
        facts = capture.facts(step=step, rank=rank, world_size=world_size, left_out=())
        self._bytes: dict[str, bytes] = {}
        for part in (*capture.parts, facts):
            self.put(part.file, part.value)

    def put(self, file: str, value: object) -> None:
        buffer = io.BytesIO()
        torch.save(value, buffer)
        self._bytes[file] = buffer.getvalue()

    def drop(self, file: str) -> None:
        del self._bytes[file]

    @property
    def files(self) -> Collection[str]:
        return self._bytes.keys()

    def load(self, file: str) -> Any:
        return torch.load(io.BytesIO(self._bytes[file]), map_location="cpu", weights_only=True)

    def later(self, file: str) -> Callable[[], object]:
        kept = self._bytes[file]
        return lambda: torch.load(io.BytesIO(kept), weights_only=True)


def give_back(state: TrainState, saved: Saved) -> list[str]:
    restore = state.read(saved, rank=0, world_size=1)
    restore.apply()
    return restore.remarks


class Training:
    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7), torch.nn.Dropout(0.5))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)

    def state(self, **more: Any) -> TrainState:
        return TrainState(model=self.model, optimizer=self.optimizer, scheduler=self.scheduler, **more)

    def step(self) -> float:
        self.optimizer.zero_grad()
        loss = self.model(torch.randn(8, 5)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        return float(loss.detach())


def draws() -> tuple[float, float, float]:
    return float(torch.rand(1)), float(numpy.random.rand()), random.random()


# ---- the whole ----


def test_bl_179_a_fresh_optimizer_gets_its_moments_and_the_run_goes_on_as_if_never_stopped() -> None:
    one = Training()
    for _ in range(3):
        one.step()
    saved = Saved(one.state())
    goes_on = [one.step() for _ in range(4)]

    other = Training(seed=99)  # its Adam has made no step, so it has no moments yet
    assert give_back(other.state(), saved) == []
    moments = other.optimizer.state_dict()["state"]
    assert set(moments) == {0, 1, 2, 3}
    assert all({"step", "exp_avg", "exp_avg_sq"} <= set(one) for one in moments.values())
    assert [other.step() for _ in range(4)] == goes_on
    for mine, theirs in zip(other.model.state_dict().values(), one.model.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)


def test_restoring_fills_the_live_parameters_in_place() -> None:
    one, other = Training(1), Training(2)
    addresses = [parameter.data_ptr() for parameter in other.model.parameters()]
    give_back(other.state(), Saved(one.state()))
    assert [parameter.data_ptr() for parameter in other.model.parameters()] == addresses


def test_bl_177_saving_changes_nothing_of_the_callers() -> None:
    run = Training()
    run.step()
    before = copy.deepcopy(run.model.state_dict())
    metadata = copy.deepcopy(run.model.state_dict()._metadata)
    moments = copy.deepcopy(run.optimizer.state_dict())
    torch.manual_seed(5)
    random.seed(5)
    numpy.random.seed(5)
    expected = draws()
    torch.manual_seed(5)
    random.seed(5)
    numpy.random.seed(5)
    Saved(run.state())
    assert draws() == expected
    after = run.model.state_dict()
    assert list(after) == list(before)
    assert after._metadata == metadata
    assert all(torch.equal(after[key], before[key]) for key in before)
    assert str(run.optimizer.state_dict()) == str(moments)


def test_each_component_is_a_plain_state_dict_and_one_small_file_has_the_rest() -> None:
    run = Training()
    saved = Saved(run.state(), step=7)
    assert set(saved.files) == {"model.pt", "optimizer.pt", "scheduler.pt", "train_state.pt"}
    run.model.load_state_dict(saved.load("model.pt"))
    facts = saved.load("train_state.pt")
    assert (facts["version"], facts["step"], facts["rank"], facts["world_size"]) == (1, 7, 0, 1)
    assert facts["components"] == ["model", "optimizer", "scheduler"]
    assert set(facts["rng"]) == {"python", "torch", "numpy"}


# ---- random state ----


def test_the_global_random_streams_go_on() -> None:
    saved = Saved(TrainState(model=torch.nn.Linear(1, 1)))
    expected = draws()
    draws()
    give_back(TrainState(model=torch.nn.Linear(1, 1)), saved)
    assert draws() == expected


def test_normal_deviates_in_store_go_on_too() -> None:
    """Guards: Python's and NumPy's Gaussians come in pairs, and the second one is part of the state."""
    random.gauss(0, 1)
    numpy.random.normal()
    saved = Saved(TrainState(model=torch.nn.Linear(1, 1)))
    expected = random.gauss(0, 1), numpy.random.normal()
    give_back(TrainState(model=torch.nn.Linear(1, 1)), saved)
    assert (random.gauss(0, 1), numpy.random.normal()) == expected


def _generators() -> dict[str, Any]:
    return {
        "torch_generator": torch.Generator().manual_seed(random.getrandbits(20)),
        "python": random.Random(random.getrandbits(20)),
        "pcg": numpy.random.default_rng(random.getrandbits(20)),
        "mt": numpy.random.Generator(numpy.random.MT19937(random.getrandbits(20))),
        "philox": numpy.random.Generator(numpy.random.Philox(random.getrandbits(20))),
        "sfc": numpy.random.Generator(numpy.random.SFC64(random.getrandbits(20))),
        "legacy": numpy.random.RandomState(random.getrandbits(20)),
    }


def _draw(generator: Any) -> float:
    if isinstance(generator, torch.Generator):
        return float(torch.rand(1, generator=generator))
    return float(generator.random_sample() if hasattr(generator, "random_sample") else generator.random())


def test_bl_038_generators_of_every_kind_are_components_and_load_weights_only() -> None:
    mine = _generators()
    saved = Saved(TrainState(**mine))
    expected = {name: _draw(generator) for name, generator in mine.items()}
    others = _generators()
    assert give_back(TrainState(**others), saved) == []
    assert {name: _draw(generator) for name, generator in others.items()} == expected


def _damaged_rng(facts: dict[str, Any], name: str) -> None:
    facts["rng"][name] = {
        "torch": torch.zeros(3, dtype=torch.uint8),
        "python": (3, (1, 2, 3), None),
        "numpy": {"bit_generator": "MT19937", "state": {"key": 5, "pos": 0}},
        "cuda": "none",
    }[name]


@pytest.mark.parametrize("name", ["torch", "python", "numpy", "cuda"])
def test_bl_192_damaged_random_state_is_refused_by_name_before_anything_changes(name: str) -> None:
    run = Training()
    saved = Saved(run.state())
    facts = saved.load("train_state.pt")
    _damaged_rng(facts, name)
    saved.put("train_state.pt", facts)
    other = Training(3)
    before = copy.deepcopy(other.model.state_dict())
    stream = torch.get_rng_state()
    with pytest.raises(CorruptCheckpoint, match=rf"random state of {name} in train_state.pt of global_step7"):
        other.state().read(saved, rank=0, world_size=1)
    assert all(torch.equal(other.model.state_dict()[key], before[key]) for key in before)
    assert torch.equal(torch.get_rng_state(), stream)


def test_bl_192_random_state_that_is_absent_is_said() -> None:
    run = Training()
    saved = Saved(run.state(rng=False))
    assert give_back(Training().state(), saved) == [
        "no random state is in it: the run goes on with other random numbers"
    ]
    assert give_back(Training().state(rng=False), saved) == []


def test_bl_192_random_state_of_devices_that_are_not_here_is_said() -> None:
    run = Training()
    saved = Saved(run.state())
    facts = saved.load("train_state.pt")
    facts["rng"]["cuda"] = [torch.get_rng_state()] * (torch.cuda.device_count() + 2)
    facts["rng"]["abacus"] = 1
    saved.put("train_state.pt", facts)
    remarks = give_back(Training().state(), saved)
    assert remarks[0].startswith(f"the random state of {torch.cuda.device_count() + 2} CUDA devices is saved")
    assert "'abacus'" in remarks[1]


# ---- what fits ----


def test_bl_190_a_component_without_state_and_a_state_without_component_are_named() -> None:
    run = Training()
    saved = Saved(TrainState(model=run.model, scheduler=run.scheduler))
    other = Training()
    remarks = give_back(TrainState(model=other.model, optimizer=other.optimizer), saved)
    assert remarks == [
        "component 'optimizer' is not in it and keeps its state",
        "its component 'scheduler' is not registered and is not restored",
    ]


def test_a_checkpoint_with_nothing_for_this_state_is_refused() -> None:
    run = Training()
    saved = Saved(TrainState(net=run.model))
    with pytest.raises(InvalidArgument, match=r"nothing for this TrainState.*net\.pt.*registered are model"):
        TrainState(model=run.model).read(saved, rank=0, world_size=1)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (torch.nn.Linear(5, 8), r"has another shape of weight \(saved \(7, 5\), here \(8, 5\)\), bias"),
        (torch.nn.Linear(5, 7, bias=False), "has also bias"),
        (torch.nn.Sequential(torch.nn.Linear(5, 7)), r"lacks 0\.weight, 0\.bias; it has also weight, bias"),
    ],
)
def test_a_model_that_differs_is_refused_before_anything_changes(other: torch.nn.Module, said: str) -> None:
    model = torch.nn.Linear(5, 7)
    saved = Saved(TrainState(model=model, first=torch.nn.Linear(2, 2)))
    first = torch.nn.Linear(2, 2)
    before = copy.deepcopy(first.state_dict())
    with pytest.raises(InvalidArgument, match=said):
        TrainState(first=first, model=other).read(saved, rank=0, world_size=1)
    assert all(torch.equal(first.state_dict()[key], before[key]) for key in before)


def test_an_optimizer_of_other_parameters_is_refused_before_anything_changes() -> None:
    saved = Saved(Training().state())
    other = Training()
    other.optimizer = torch.optim.AdamW([next(other.model.parameters())])
    with pytest.raises(InvalidArgument, match=r"saved with \[4\] parameters per group, and there are \[1\] here"):
        other.state().read(saved, rank=0, world_size=1)


_Optimizers = {
    "AdamW": torch.optim.AdamW,
    "Adam": torch.optim.Adam,
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "RMSprop": torch.optim.RMSprop,
    "Adagrad": torch.optim.Adagrad,
    "Adamax": torch.optim.Adamax,
    "NAdam": torch.optim.NAdam,
}


def _with_optimizer(kind: str) -> Training:
    run = Training()
    run.optimizer = _Optimizers[kind](run.model.parameters())
    run.scheduler = torch.optim.lr_scheduler.OneCycleLR(run.optimizer, 0.1, 20, cycle_momentum=False)
    run.step()
    return run


def _forget_classes(saved: Saved) -> None:
    """As a file written before the classes were recorded."""
    facts = saved.load("train_state.pt")
    del facts["optimizers"]
    saved.put("train_state.pt", facts)


@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "early file"])
@pytest.mark.parametrize(
    ("there", "here"),
    [("AdamW", "SGD"), ("SGD", "AdamW"), ("AdamW", "RMSprop"), ("Adagrad", "SGD"), ("NAdam", "Adagrad")],
)
def test_an_optimizer_of_another_class_is_refused_before_anything_changes(
    there: str, here: str, recorded: bool
) -> None:
    """Guards: a resume that passes, and a training that dies in the step() after it with KeyError: 'momentum'."""
    saved = Saved(_with_optimizer(there).state())
    if not recorded:
        _forget_classes(saved)
    other = _with_optimizer(here)
    before = copy.deepcopy(other.model.state_dict())
    said = f"the state of an? {there} .*" if recorded else "its groups have .* and lack .*"
    with pytest.raises(InvalidArgument, match=rf"optimizer\.pt of global_step7 .*{said}and here is an? {here} "):
        other.state().read(saved, rank=0, world_size=1)
    assert all(torch.equal(other.model.state_dict()[key], before[key]) for key in before)
    other.step()


@pytest.mark.parametrize(("there", "here"), [("Adam", "Adamax"), ("Adamax", "Adam"), ("Adam", "NAdam")])
def test_optimizers_whose_groups_are_alike_are_told_apart_by_their_class(there: str, here: str) -> None:
    saved = Saved(_with_optimizer(there).state())
    with pytest.raises(InvalidArgument, match=f"the state of an? {there} .*and here is an? {here} "):
        _with_optimizer(here).state().read(saved, rank=0, world_size=1)


def test_an_optimizer_of_another_class_is_refused_when_it_is_registered_late_too() -> None:
    saved = Saved(_with_optimizer("Adam").state())
    late = _with_optimizer("Adamax")
    state = TrainState(model=late.model, scheduler=late.scheduler)
    give_back(state, saved)
    with pytest.raises(InvalidArgument, match=r"the state of an Adam .*and here is an Adamax "):
        state.register("optimizer", late.optimizer)


class _Logged(torch.optim.AdamW):
    """An optimizer of one's own."""


@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "early file"])
@pytest.mark.parametrize(
    ("there", "here"), [(torch.optim.AdamW, _Logged), (_Logged, torch.optim.AdamW), (torch.optim.AdamW,) * 2]
)
def test_an_optimizer_and_its_subclass_take_each_others_state(there: Any, here: Any, recorded: bool) -> None:
    one, other = Training(), Training()
    one.optimizer, other.optimizer = there(one.model.parameters()), here(other.model.parameters())
    for run in (one, other):
        run.scheduler = torch.optim.lr_scheduler.OneCycleLR(run.optimizer, 0.1, 20)
    one.optimizer.param_groups[0]["name"] = "all of it"  # a key of the user's is no sign of another class
    one.step()
    saved = Saved(TrainState(model=one.model, optimizer=one.optimizer))
    if not recorded:
        _forget_classes(saved)
    assert give_back(TrainState(model=other.model, optimizer=other.optimizer), saved) == []
    other.step()


@pytest.mark.parametrize("there_is_newer", [True, False])
def test_an_optimizer_of_another_version_of_torch_takes_its_state(there_is_newer: bool) -> None:
    """Guards: keys that came with a version of torch being taken for another class."""
    run = Training()
    run.step()
    saved = Saved(run.state())
    _forget_classes(saved)
    states = saved.load("optimizer.pt")
    for group in states["param_groups"]:
        if there_is_newer:
            group["invented_later"] = True
        else:
            group.pop("decoupled_weight_decay", None)
            del group["amsgrad"], group["fused"]
    saved.put("optimizer.pt", states)
    other = Training()
    assert give_back(other.state(), saved) == []


def test_a_class_of_the_script_itself_is_the_same_where_the_script_is_imported() -> None:
    run = Training()
    run.optimizer = _Logged(run.model.parameters())
    saved = Saved(run.state())
    facts = saved.load("train_state.pt")
    facts["optimizers"]["optimizer"] = ["__main__._Logged", "torch.optim.elsewhere.AdamW"]
    saved.put("train_state.pt", facts)
    assert give_back(run.state(), saved) == []


def test_a_wrapper_that_gives_the_state_of_another_optimizer_is_no_class_of_its_own() -> None:
    class Wrapper(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.inner = inner
            self.param_groups = inner.param_groups

        def state_dict(self) -> dict[str, Any]:
            return self.inner.state_dict()

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.inner.load_state_dict(state_dict)

    run = Training()
    saved = Saved(TrainState(model=run.model, optimizer=Wrapper(run.optimizer)))
    assert saved.load("train_state.pt")["optimizers"] == {}
    assert give_back(TrainState(model=run.model, optimizer=run.optimizer), saved) == []
    saved = Saved(TrainState(model=run.model, optimizer=run.optimizer))
    assert give_back(TrainState(model=run.model, optimizer=Wrapper(run.optimizer)), saved) == []


def test_a_model_on_meta_is_refused_with_the_way_out() -> None:
    saved = Saved(TrainState(model=torch.nn.Linear(2, 2)))
    with torch.device("meta"):
        model = torch.nn.Linear(2, 2)
    with pytest.raises(InvalidArgument, match=r"weight, bias of 'model' are on the meta device.*to_empty"):
        TrainState(model=model).read(saved, rank=0, world_size=1)


def test_a_model_whose_hook_renames_keys_loads() -> None:
    saved = Saved(TrainState(model=torch.nn.Linear(2, 2)))

    class Renamed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(2, 2)
            self._register_load_state_dict_pre_hook(self._rename)  # torch 2.4 has no other

        @staticmethod
        def _rename(states: dict[str, Any], prefix: str, *rest: Any) -> None:
            for key in [key for key in states if not key.startswith("inner.")]:
                states[f"inner.{key}"] = states.pop(key)

    model = Renamed()
    give_back(TrainState(model=model), saved)
    assert torch.equal(model.inner.weight, saved.load("model.pt")["weight"])


def test_bl_182_an_optimizer_that_holds_the_old_parameters_is_said() -> None:
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    saved = Saved(TrainState(model=model, optimizer=optimizer))
    model.load_state_dict(copy.deepcopy(saved.load("model.pt")), assign=True)
    state = TrainState(model=model, optimizer=optimizer)
    said = "optimizer 'optimizer' holds no parameter of a registered model"
    assert [remark.startswith(said) for remark in give_back(state, saved)] == [True]
    assert [remark.startswith(said) for remark in state.capture().remarks] == [True]
    assert state.capture().remarks == ()  # once is enough


def test_bl_191_a_component_registered_after_the_resume_gets_its_state_then() -> None:
    run = Training()
    run.step()
    saved = Saved(run.state())
    late = Training()
    state = TrainState(model=late.model, scheduler=late.scheduler)
    give_back(state, saved)
    assert late.optimizer.state_dict()["state"] == {}
    state.register("optimizer", late.optimizer)
    assert set(late.optimizer.state_dict()["state"]) == {0, 1, 2, 3}
    assert list(state.components) == ["model", "scheduler", "optimizer"]


def test_bl_191_after_the_next_save_it_is_a_clear_error_and_never_a_start_from_nothing() -> None:
    run = Training()
    saved = Saved(run.state())
    late = Training()
    state = TrainState(model=late.model, scheduler=late.scheduler)
    give_back(state, saved)
    Saved(state)
    with pytest.raises(InvalidArgument, match="registered after the next save"):
        state.register("optimizer", late.optimizer)
    assert "optimizer" not in state.components
    state.register("optimizer", late.optimizer, fresh=True)
    assert "optimizer" in state.components


def test_bl_191_what_the_checkpoint_never_had_starts_from_nothing_with_a_word() -> None:
    saved = Saved(TrainState(model=torch.nn.Linear(1, 1)))
    state = TrainState(model=torch.nn.Linear(1, 1))
    give_back(state, saved)
    with pytest.warns(ResumeWarning, match=r"'late' is not in global_step7.*starts from nothing"):
        state.register("late", torch.nn.Linear(1, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state.register("meant", torch.nn.Linear(1, 1), fresh=True)


def test_bl_193_another_rank_or_world_is_said() -> None:
    run = Training()
    saved = Saved(run.state(), rank=1, world_size=2)
    facts = saved.load("train_state.pt")
    assert (facts["rank"], facts["world_size"]) == (1, 2)
    restore = Training().state().read(saved, rank=0, world_size=1)
    assert restore.remarks == [
        "it was written by rank 1 of 2, and this is rank 0 of 1: data loaders and random streams go on as those of "
        "that rank"
    ]
    assert Training().state().read(saved, rank=1, world_size=2).remarks == []


def test_a_component_that_refuses_its_state_says_what_was_changed_before() -> None:
    class Fussy:
        def state_dict(self) -> dict[str, int]:
            return {"a": 1}

        def load_state_dict(self, state: dict[str, int]) -> None:
            raise KeyError("epoch")

    saved = Saved(TrainState(model=torch.nn.Linear(1, 1), loader=Fussy()))
    restore = TrainState(model=torch.nn.Linear(1, 1), loader=Fussy()).read(saved, rank=0, world_size=1)
    with pytest.raises(KeyError) as caught:
        restore.apply()
    assert caught.value.__notes__ == [
        "relight: component 'loader' did not take its state from global_step7; restored before it: model"
    ]


@pytest.mark.parametrize("damage", ["version", "list", "lost", "key", "kinds"])
def test_a_small_file_that_is_not_ours_is_corrupt_or_too_new(damage: str) -> None:
    model = torch.nn.Linear(1, 1)
    saved = Saved(TrainState(model=model, other=torch.nn.Linear(1, 1)))
    facts = saved.load("train_state.pt")
    expected: type[Exception] = CorruptCheckpoint
    if damage == "version":
        saved.put("train_state.pt", facts | {"version": 99})
        expected = InvalidArgument
    elif damage == "list":
        saved.put("train_state.pt", [1])
    elif damage == "lost":
        saved.drop("other.pt")
    elif damage == "kinds":
        saved.put("train_state.pt", facts | {"optimizers": 5})
    else:
        del facts["components"]
        saved.put("train_state.pt", facts)
    with pytest.raises(expected, match=r"train_state\.pt"):
        TrainState(model=model, other=model).read(saved, rank=0, world_size=1)


# ---- what may be registered ----


def test_what_has_no_state_is_refused_with_the_way_out() -> None:
    with pytest.raises(InvalidArgument, match=r"'history' is a list, which has no state_dict"):
        TrainState(history=[])
    loader = torch.utils.data.DataLoader([1, 2])
    with pytest.raises(InvalidArgument, match=r"'loader' is a DataLoader.*StatefulDataLoader"):
        TrainState(loader=loader)
    with pytest.raises(InvalidArgument, match="rename it"):
        TrainState(train_state=torch.nn.Linear(1, 1))
    with pytest.raises(InvalidArgument, match=r"optional=\['modle'\] names no component; choose from \['model'\]"):
        TrainState(model=torch.nn.Linear(1, 1), optional={"modle"})
    with pytest.raises(InvalidArgument, match="registered already"):
        TrainState(model=torch.nn.Linear(1, 1)).register("model", torch.nn.Linear(1, 1))


def test_none_is_left_out_and_optional_is_marked_either_way() -> None:
    state = TrainState(model=torch.nn.Linear(1, 1), scaler=None, a=optional(torch.nn.Linear(1, 1)), optional="model")
    assert list(state.components) == ["model", "a"]
    assert [(part.file, part.optional) for part in state.capture().parts] == [("model.pt", True), ("a.pt", True)]


def test_its_repr_names_what_is_registered() -> None:
    """Guards: a notebook that shows an address in place of what would be saved."""
    state = TrainState(model=torch.nn.Linear(1, 1), scaler=None, dice=random.Random(), rng=False)
    assert repr(state) == "<relight.TrainState model=Linear, dice=Random, rng=False>"


@pytest.mark.parametrize(
    "rng", [torch.Generator(), random.Random(), None, 1, "yes"], ids=["torch", "random", "None", "1", "yes"]
)
def test_a_generator_of_ones_own_is_not_taken_for_the_switch(rng: object) -> None:
    """Guards: `rng=generator` being true enough to save the global random state, and the generator's being lost."""
    with pytest.raises(InvalidArgument, match="under another name"):
        TrainState(rng=rng)  # type: ignore[arg-type]
