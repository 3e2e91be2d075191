"""Python objects and containers: each comes back as it was, or is refused by the path of its key."""

from __future__ import annotations

import dataclasses
import enum
import functools
import gc
import io
import pickletools
import threading
import weakref
import zipfile
from collections import OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import relight
import torch


def saved(obj: Any, **options: Any) -> io.BytesIO:
    file = io.BytesIO()
    relight.save(obj, file, **options)
    file.seek(0)
    return file


def there_and_back(obj: Any, **options: Any) -> Any:
    return relight.load(saved(obj), **options)


def globals_of(file: io.BytesIO) -> set[str]:
    data = zipfile.ZipFile(file).read("archive/data.pkl")
    return {str(argument) for code, argument, _ in pickletools.genops(data) if code.name == "GLOBAL"}


def test_bl_026_what_is_no_tensor_comes_back_with_its_type() -> None:
    class WithState(torch.nn.Linear):
        def get_extra_state(self) -> dict[str, Any]:
            return {"calls": 3, "name": "x"}

        def set_extra_state(self, state: Any) -> None:
            self.restored = state

    state = {"t": torch.ones(2), "s": "text", "i": 7, "n": None, "b": b"\x00\xff", "m": WithState(2, 2).state_dict()}
    loaded = there_and_back(state)
    assert (loaded["s"], loaded["i"], loaded["n"], loaded["b"]) == ("text", 7, None, b"\x00\xff")
    model = WithState(2, 2)
    model.load_state_dict(loaded["m"])
    assert model.restored == {"calls": 3, "name": "x"}


@dataclasses.dataclass
class Recipe:
    make: Any


class Weights(enum.Enum):
    SMALL = Recipe(functools.partial(int, base=2))
    LARGE = Recipe(functools.partial(int, base=8))


class Plain(enum.IntEnum):
    ONE = 1


def test_bl_037_an_enum_member_with_a_complex_value_is_the_same_member() -> None:
    """Its value is not equal to itself after loading, so it is written by name."""
    state = {"weights": Weights.LARGE, "plain": Plain.ONE}
    loaded = there_and_back(state, allow=[Weights, Plain])
    assert loaded["weights"] is Weights.LARGE and loaded["plain"] is Plain.ONE
    assert torch.load(saved(state), weights_only=False)["weights"] is Weights.LARGE


def test_bl_037_by_name_is_only_for_members() -> None:
    class Trick:
        def __reduce__(self) -> Any:
            return getattr, (torch.Tensor, "__init__")

    with pytest.raises(relight.CorruptCheckpoint, match="only for a member of an enum"):
        there_and_back(Trick())


NUMPY = {
    "array": np.arange(6, dtype=np.float32).reshape(2, 3),
    "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "big endian": np.arange(3, dtype=">i4"),
    "empty": np.empty((0, 3)),
    "text": np.array(["a", "bcd"]),
    "times": np.array(["2020-01-01", "NaT"], dtype="datetime64[ns]"),
    "records": np.array([(1, 2.5)], dtype=[("a", "<i4"), ("b", "<f8")]),
    "half": np.array([1.5], dtype=np.float16),
    "float64": np.float64(1.5),
    "float32": np.float32(0.1),
    "int": np.int64(-3),
    "bool": np.bool_(True),
    "complex": np.complex64(1 + 2j),
    "str": np.str_("x"),
    "when": np.datetime64("2020-02-03T04:05:06", "s"),
    "span": np.timedelta64(25, "ms"),
    "dtype": np.dtype("<f4"),
}


@pytest.mark.parametrize("name", NUMPY)
def test_bl_041_numpy_values_come_back_and_name_no_module_that_only_one_numpy_has(name: str) -> None:
    value = NUMPY[name]
    file = saved({"x": value})
    names = globals_of(file)
    assert not [one for one in names if "_core" in one or "numpy.core" in one], names
    file.seek(0)
    for loaded in (relight.load(file)["x"], torch.load(saved({"x": value}), weights_only=False)["x"]):
        assert type(loaded) is type(value)
        if isinstance(value, np.dtype):
            assert loaded == value
        else:
            assert loaded.dtype == value.dtype and loaded.shape == value.shape
            assert loaded.tobytes() == value.tobytes()


def test_bl_041_an_array_is_writable_and_keeps_its_order() -> None:
    loaded = there_and_back([NUMPY["array"], NUMPY["fortran"]])
    loaded[0][0, 0] = 9
    assert loaded[0][0, 0] == 9 and loaded[1].flags.f_contiguous


def test_bl_041_what_has_no_plain_form_uses_names_that_both_have() -> None:
    file = saved({"x": np.longdouble(1.5), "text": "cnumpy._core.multiarray\nscalar\n"})
    assert "numpy.core.multiarray scalar" in globals_of(file)
    loaded = torch.load(saved({"x": np.longdouble(1.5), "text": "cnumpy._core.\n"}), weights_only=False)
    assert loaded == {"x": np.longdouble(1.5), "text": "cnumpy._core.\n"}


def test_bl_041_numpys_own_form_is_read_too() -> None:
    """Files of torch.save, by numpy 1 and 2."""
    file = io.BytesIO()
    state = {"a": np.arange(3.0), "s": np.float32(2), "legacy": np.random.RandomState(1).get_state()}
    torch.save(state, file)
    file.seek(0)
    loaded = relight.load(file)
    assert loaded["a"].tolist() == [0, 1, 2] and loaded["s"] == np.float32(2)
    assert np.array_equal(loaded["legacy"][1], state["legacy"][1])


class Schedule:
    def __init__(self, reference: Any) -> None:
        self._scale_fn_ref = reference
        self.steps = 3

    def scale(self) -> None: ...


def unpicklable() -> dict[str, Any]:
    kept = Schedule(None)

    def generate() -> Any:
        yield 1

    return {
        "weakref": weakref.ref(kept),
        "weak method": weakref.WeakMethod(kept.scale),
        "file": open(__file__),  # closed by the test
        "lock": threading.Lock(),
        "generator": generate(),
        "local function": generate,
        "lambda": lambda: None,
    }


@pytest.mark.parametrize("kind", ["weakref", "weak method", "file", "lock", "generator", "local function", "lambda"])
def test_bl_044_what_cannot_be_saved_is_named_by_path_and_type(kind: str) -> None:
    values = unpicklable()
    state = {"model": torch.ones(2), "sched": [Schedule(values[kind])]}
    file = io.BytesIO(b"untouched")
    with pytest.raises(relight.NotPicklable, match=r"^sched\.0\._scale_fn_ref is a .*cannot be saved") as caught:
        relight.save(state, file)
    values["file"].close()
    named = {"file": "_io.TextIOWrapper", "lock": "_thread.lock", "generator": "generator"}
    assert named.get(kind, "") in str(caught.value)
    assert caught.value.__cause__ is not None
    assert file.getvalue() == b"untouched"


def test_bl_044_a_key_is_found_too() -> None:
    with pytest.raises(relight.NotPicklable, match=r"a\.b\.<key "):
        saved({"a": {"b": {threading.Lock: 1, (1, lambda: 0): 2}}})


def test_bl_048_nested_lists_and_empty_containers() -> None:
    state = {"hist": [{"a": 1}, {"b": 2}], "e": [], "d": {}, "t": ()}
    assert there_and_back(state) == state


def test_bl_049_types_and_order_of_keys() -> None:
    state = {0: "int", "0": "text", (1, "a"): "tuple", True: "bool", None: "none", 1.5: {3: {4: torch.ones(1)}}}
    loaded = there_and_back(state)
    assert list(loaded) == list(state) and [type(key) for key in loaded] == [type(key) for key in state]
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([parameter])
    parameter.sum().backward()
    optimizer.step()
    assert list(there_and_back(optimizer.state_dict())["state"]) == [0]


def test_bl_050_kinds_of_containers() -> None:
    model = torch.nn.Linear(2, 2)
    counts = defaultdict(list, {"a": [1]})
    state = {"default": counts, "ordered": OrderedDict(b=1, a=2), "model": model.state_dict(), "last": deque([1, 2], 2)}
    loaded = there_and_back(state)
    assert type(loaded["default"]) is defaultdict and loaded["default"]["new"] == [] and loaded["default"]["a"] == [1]
    assert type(loaded["ordered"]) is OrderedDict and list(loaded["ordered"]) == ["b", "a"]
    assert loaded["model"]._metadata == model.state_dict()._metadata
    assert loaded["last"] == deque([1, 2]) and loaded["last"].maxlen == 2


def test_bl_050_a_factory_that_cannot_be_pickled_is_refused() -> None:
    with pytest.raises(relight.NotPicklable, match=r"^counts\.default_factory is a function .*lambda"):
        saved({"counts": defaultdict(lambda: 0)})


def test_containers_that_hold_themselves() -> None:
    queue: deque[Any] = deque([1])
    queue.append(queue)
    loaded = there_and_back({"q": queue})["q"]
    assert loaded[1] is loaded


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_protocol_loads(protocol: int) -> None:
    state = {"t": torch.ones(3), "s": {1, 2}, "f": frozenset([3]), "b": b"x" * 300, "big": 1 << 3000, "p": Path("a/b")}
    loaded = relight.load(saved(state, pickle_protocol=protocol))
    assert loaded["t"].tolist() == [1, 1, 1] and {k: loaded[k] for k in "sfb"} == {k: state[k] for k in "sfb"}
    assert loaded["big"] == state["big"] and loaded["p"] == state["p"]


def test_a_module_is_saved_whole_as_torch_does() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    loaded = relight.load(saved(model), weights_only=False)
    assert torch.equal(loaded[0].weight, model[0].weight)
    with pytest.raises(relight.ObjectNotAllowed, match=r"torch\.nn\.modules\.container\.Sequential"):
        relight.load(saved(model))


def test_another_pickle_module_is_used() -> None:
    class Module:
        """As dill and cloudpickle: a Pickler class with a rule of its own."""

        import pickle as _pickle

        class Pickler(_pickle._Pickler):  # type: ignore[name-defined]
            def reducer_override(self, obj: Any) -> Any:
                return (str, ("replaced",)) if isinstance(obj, threading.Event) else NotImplemented

    assert relight.load(saved({"e": threading.Event(), "t": torch.ones(1)}, pickle_module=Module))["e"] == "replaced"


@pytest.mark.parametrize("was_on", [True, False])
def test_the_garbage_collector_is_as_it_was(was_on: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if was_on else gc.disable)()
        with pytest.raises(relight.NotPicklable):
            saved({"x": threading.Lock()})
        assert there_and_back({"x": 1}) == {"x": 1}
        assert gc.isenabled() is was_on
    finally:
        (gc.enable if before else gc.disable)()


def test_an_object_that_makes_tensors_while_it_is_pickled_is_saved_whole() -> None:
    class Fresh(dict):  # type: ignore[type-arg]
        def __reduce_ex__(self, protocol: Any) -> Any:
            made = torch.arange(1000.0)
            start = int(torch.randint(0, 900, ()))
            return dict, ([("view", made[start : start + 3]), ("start", start)],)

    table = torch.arange(1000.0)
    loaded = relight.load(saved({"fresh": Fresh(), "row": table[5:8]}))
    start = loaded["fresh"]["start"]
    assert loaded["fresh"]["view"].tolist() == [start, start + 1, start + 2] and loaded["row"].tolist() == [5, 6, 7]


@pytest.mark.skipif(not hasattr(torch.serialization, "skip_data"), reason="torch 2.4 has no skip_data")
def test_a_file_without_data_is_left_to_torch() -> None:
    with torch.serialization.skip_data(), pytest.raises(relight.InvalidArgument, match="skip_data"):
        saved({"x": torch.ones(1)})
