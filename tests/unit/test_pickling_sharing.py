"""Sharing, views and ties: what is one storage in memory is one in the file, and only what is reached is written."""

from __future__ import annotations

import io
import itertools
import pickle
from typing import Any

import pytest
import relight
import torch
from torch._weights_only_unpickler import _get_allowed_globals


def saved(obj: Any) -> io.BytesIO:
    file = io.BytesIO()
    relight.save(obj, file)
    file.seek(0)
    return file


# What the running torch has and its own weights-only loader does not take: uint16, uint32, uint64 and others in 2.4.
UNKNOWN_TO_TORCH = {value for value in vars(torch).values() if isinstance(value, torch.dtype)} - {
    value for value in _get_allowed_globals().values() if isinstance(value, torch.dtype)
}


def there_and_back(obj: Any) -> Any:
    """Through relight both ways; plain torch.load, weights-only, must give the same.

    The weights-only loader of torch 2.4 refuses some dtypes of its own, as uint16; then it must say so.
    """
    file = saved(obj)
    refused = UNKNOWN_TO_TORCH & {getattr(value, "dtype", None) for value in obj.values()}
    if refused:
        with pytest.raises(pickle.UnpicklingError, match=f"GLOBAL ({'|'.join(map(str, refused))}) was not an allowed"):
            torch.load(file, weights_only=True)
        file.seek(0)
    with_torch = torch.load(file, weights_only=not refused)
    file.seek(0)
    ours = relight.load(file)
    assert_same(with_torch, ours)
    return ours


def assert_same(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        assert same_bytes(a, b)
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            assert_same(a[key], b[key])


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bytes(a.contiguous().flatten().view(torch.uint8).tolist()) == bytes(
        b.contiguous().flatten().view(torch.uint8).tolist()
    )


def size_of(obj: Any) -> int:
    return len(saved(obj).getvalue())


TABLE = torch.arange(1000 * 1000, dtype=torch.float32).view(1000, 1000)


@pytest.mark.parametrize(
    "view",
    [
        torch.arange(1 << 20, dtype=torch.float32)[:1000],
        TABLE[500],
        TABLE[:, :1],
        TABLE[:, 999:],
        TABLE.narrow(0, 10, 1),
        TABLE.narrow(1, 500, 1),
        TABLE[::50, ::50],
    ],
    ids=["head of a vector", "row", "column", "last column", "narrow rows", "narrow columns", "grid"],
)
def test_bl_001_a_slice_costs_the_slice(view: torch.Tensor) -> None:
    loaded = there_and_back({"view": view})["view"]
    assert torch.equal(loaded, view)
    # 64 bytes of alignment and a little pickle, not 4 MB of parent.
    assert size_of({"view": view}) <= size_of({"view": view.clone()}) + 256


def test_bl_001_slices_of_one_table_stay_shared_where_they_overlap() -> None:
    state = {"first": TABLE[10:20], "second": TABLE[15:25], "far": TABLE[900]}
    loaded = there_and_back(state)
    assert all(torch.equal(loaded[name], state[name]) for name in state)
    loaded["first"][5, 0] = -1
    assert loaded["second"][0, 0] == -1
    assert size_of(state) < 17 * 1000 * 4


def test_bl_001_several_columns_of_one_table_cost_the_columns() -> None:
    state = {"left": TABLE[:, :2], "right": TABLE[:, 990:992], "left again": TABLE[:, 1:3]}
    loaded = there_and_back(state)
    assert all(torch.equal(loaded[name], state[name]) for name in state)
    loaded["left"][3, 1] = -7
    assert loaded["left again"][3, 0] == -7
    assert size_of(state) < 1000 * 5 * 4 + 4096


def test_a_row_across_columns_keeps_the_table_because_no_smaller_layout_has_one_stride() -> None:
    state = {"column": TABLE[:, :1], "row": TABLE[500]}
    loaded = there_and_back(state)
    assert all(torch.equal(loaded[name], state[name]) for name in state)


def test_a_view_with_expanded_and_repeated_elements_survives() -> None:
    state = {
        "expanded": TABLE[3:4, :5].expand(100, 5),
        "windows": torch.arange(1000.0).unfold(0, 10, 1)[100:110],
        "empty": TABLE[5:5],
        "scalar": TABLE[7, 7],
    }
    loaded = there_and_back(state)
    assert all(torch.equal(loaded[name], state[name]) for name in state)


DTYPES = (
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.float32,
    torch.bfloat16,
    torch.float64,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.uint16,
)


@pytest.mark.parametrize(("first", "second"), list(itertools.permutations(DTYPES, 2)), ids=str)
def test_bl_004_two_dtypes_of_one_storage_keep_their_bytes_and_stay_shared(
    first: torch.dtype, second: torch.dtype
) -> None:
    storage = torch.arange(64, dtype=torch.uint8)
    state = {"first": storage.view(first), "second": storage.view(second)}
    loaded = there_and_back(state)
    assert (loaded["first"].dtype, loaded["second"].dtype) == (first, second)
    assert same_bytes(loaded["first"], state["first"]) and same_bytes(loaded["second"], state["second"])
    assert loaded["first"].data_ptr() == loaded["second"].data_ptr()


def test_bl_004_the_shared_bytes_are_stored_once() -> None:
    vector = torch.randn(1 << 16)
    complex_vector = torch.randn(1 << 16, dtype=torch.complex64)
    state = {
        "float": vector,
        "int": vector.view(torch.int32),
        "bytes": vector.view(torch.uint8),
        "complex": complex_vector,
        "real": torch.view_as_real(complex_vector),
    }
    loaded = there_and_back(state)
    assert same_bytes(loaded["int"], state["int"]) and same_bytes(loaded["real"], state["real"])
    assert size_of(state) < vector.nbytes + complex_vector.nbytes + 16384


def test_bl_004_a_storage_of_odd_length_is_not_cut() -> None:
    raw = torch.arange(13, dtype=torch.uint8)
    state = {"floats": raw[:12].view(torch.float32), "all": raw}
    loaded = there_and_back(state)
    assert torch.equal(loaded["all"], raw) and same_bytes(loaded["floats"], state["floats"])


def test_bl_004_a_flag_survives_beside_a_second_dtype() -> None:
    vector = torch.randn(4)
    state = {"bytes": vector.detach().view(torch.uint8), "float": vector.requires_grad_()}
    loaded = there_and_back(state)
    assert loaded["float"].requires_grad and loaded["float"].is_leaf and not loaded["bytes"].requires_grad


def test_bl_007_only_live_storages_are_one() -> None:
    class Streamed(dict):  # type: ignore[type-arg]
        """Makes each tensor when it is asked for and keeps none, so that they get one address after the other."""

        def __reduce_ex__(self, protocol: Any) -> Any:
            return dict, (), None, None, ((f"k{i}", torch.full((1024,), float(i))) for i in range(50))

    loaded = relight.load(saved(Streamed()))
    assert [value[0].item() for value in loaded.values()] == [float(i) for i in range(50)]


def test_bl_007_empty_tensors_and_slices_with_one_start_are_kept_apart() -> None:
    vector = torch.arange(1000.0)
    state = {f"empty {i}": torch.empty(0, i) for i in range(20)} | {"short": vector[:10], "long": vector[:500]}
    loaded = there_and_back(state)
    assert [loaded[f"empty {i}"].shape for i in range(20)] == [torch.Size([0, i]) for i in range(20)]
    assert loaded["short"].shape == (10,) and torch.equal(loaded["long"], vector[:500])


def test_bl_007_a_tensor_with_a_reused_address_is_a_new_one() -> None:
    state = {"a": torch.ones(1 << 12)}
    first = saved(state)
    address = state["a"].data_ptr()
    del state["a"]
    state["a"] = torch.full((1 << 12,), 2.0)
    second = saved(state)
    assert relight.load(first)["a"][0] == 1 and relight.load(second)["a"][0] == 2
    assert address  # whether it was reused is up to the allocator; the values are not


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(50, 8)
        self.head = torch.nn.Linear(8, 50, bias=False)
        self.head.weight = self.embed.weight


def test_bl_008_tied_parameters_are_stored_once_and_are_one_object_after_a_load_of_the_module_state() -> None:
    model = Tied()
    state = {"parameters": dict(model.named_parameters(remove_duplicate=False)), "dict": model.state_dict()}
    loaded = there_and_back(state)
    assert loaded["parameters"]["embed.weight"] is loaded["parameters"]["head.weight"]
    assert loaded["dict"]["embed.weight"].data_ptr() == loaded["dict"]["head.weight"].data_ptr()
    assert size_of(state) < 50 * 8 * 4 + 4096


def test_bl_014_two_names_of_one_weight_cost_one_and_load_both() -> None:
    net = torch.nn.Linear(64, 64)
    holder = torch.nn.Module()
    holder.net = net
    holder.wrapped = torch.nn.Sequential(net)
    state = holder.state_dict()
    loaded = there_and_back(dict(state))
    assert set(loaded) == {"net.weight", "net.bias", "wrapped.0.weight", "wrapped.0.bias"}
    assert loaded["net.weight"].data_ptr() == loaded["wrapped.0.weight"].data_ptr()
    assert size_of(dict(state)) < 64 * 65 * 4 + 4096


def test_the_same_object_gives_the_same_bytes() -> None:
    state = {"w": torch.arange(10.0), "v": torch.arange(100.0)[5:7]}
    assert saved(state).getvalue() == saved(state).getvalue()


def test_bl_177_a_save_changes_nothing_of_the_state() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    state = model.state_dict()
    metadata = {key: dict(value) for key, value in state._metadata.items()}
    before = {key: (id(value), value._version, value.clone()) for key, value in state.items()}
    loaded = relight.load(saved(state))
    assert {key: dict(value) for key, value in state._metadata.items()} == metadata == loaded._metadata
    assert list(state) == list(before)
    for key, (identity, version, value) in before.items():
        assert id(state[key]) == identity and state[key]._version == version and torch.equal(state[key], value)


def test_raw_storages_are_whole_and_shared_with_their_tensors() -> None:
    vector = torch.arange(100.0)
    state = {"part": vector[3:5], "storage": vector.untyped_storage()}
    loaded = relight.load(saved(state))
    assert loaded["part"].tolist() == [3.0, 4.0]
    assert loaded["storage"]._untyped_storage.data_ptr() == loaded["part"].data_ptr() - 12
    assert bytes(loaded["storage"]._untyped_storage) == bytes(vector.untyped_storage())
