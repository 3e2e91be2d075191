"""Tensor kinds: each comes back as it was, or is refused by key before a byte is written."""

from __future__ import annotations

import io
import warnings
from typing import Any

import pytest
import relight
import torch


def saved(obj: Any) -> io.BytesIO:
    file = io.BytesIO()
    relight.save(obj, file)
    file.seek(0)
    return file


def there_and_back(obj: Any, **options: Any) -> Any:
    return relight.load(saved(obj), **options)


def test_bl_013_strides_and_memory_format_are_kept() -> None:
    big = torch.arange(60.0).view(6, 10)
    state = {
        "channels last": torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last),
        "transposed": torch.randn(3, 4).T,
        "strides 2 and 3": big[::2, ::3],
        "flipped": torch.arange(5.0).flip(0),
        "permuted": torch.randn(2, 3, 4, 5, 6).permute(4, 2, 0, 1, 3),
    }
    loaded = there_and_back(state)
    for name, value in state.items():
        assert torch.equal(loaded[name], value) and loaded[name].stride() == value.stride(), name
    assert loaded["channels last"].is_contiguous(memory_format=torch.channels_last)


def test_bl_013_the_exception_a_large_sparse_slice_has_the_strides_of_its_dense_form() -> None:
    table = torch.randn(1000, 1000)
    loaded = there_and_back(table[:, :10])
    assert torch.equal(loaded, table[:, :10]) and loaded.stride() == (10, 1)


def test_bl_016_parameters_and_flags() -> None:
    leaf = torch.randn(3, requires_grad=True)
    state = {
        "empty": torch.nn.Parameter(torch.empty(0)),
        "frozen": torch.nn.Parameter(torch.ones(2), requires_grad=False),
        "trained": torch.nn.Parameter(torch.ones(2)),
        "leaf": leaf,
        "result": leaf * 2,
    }
    loaded = there_and_back(state)
    assert [type(loaded[name]) for name in state] == [torch.nn.Parameter] * 3 + [torch.Tensor] * 2
    assert [loaded[name].requires_grad for name in state] == [True, False, True, True, True]
    assert loaded["result"].is_leaf  # what it was computed from is not saved: it comes back detached
    assert torch.equal(loaded["result"], state["result"])


ALL_DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)


@pytest.mark.parametrize("dtype", [d for d in ALL_DTYPES if not str(d).startswith(("torch.q", "torch.bits"))], ids=str)
def test_bl_018_every_dtype_keeps_its_bytes_or_is_refused(dtype: torch.dtype) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls complex32 experimental
        tensor = torch.tensor(range(64), dtype=torch.uint8).view(dtype)
        state = {"x": tensor, "parameter": torch.nn.Parameter(tensor, requires_grad=False)}
        loaded = there_and_back(state)
    for value in loaded.values():
        assert value.dtype == dtype and value.shape == tensor.shape
        assert value.detach().untyped_storage().tolist() == list(range(64))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_bl_018_a_new_dtype_that_requires_grad_can_be_loaded(dtype: torch.dtype) -> None:
    """torch.save writes a file for this one that torch.load refuses."""
    tensor = torch.ones(4).to(dtype).requires_grad_()
    file = saved({"x": tensor})
    assert torch.load(file, weights_only=True)["x"].requires_grad
    file.seek(0)
    assert relight.load(file)["x"].requires_grad


class Scaled(torch.Tensor):
    """A wrapper subclass: one inner tensor, one Python attribute, no storage of its own."""

    inner: torch.Tensor
    scale: float

    @staticmethod
    def __new__(cls, inner: torch.Tensor, scale: float) -> Scaled:
        made: Scaled = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=torch.float32)  # type: ignore[attr-defined]
        made.inner, made.scale = inner, scale
        return made

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        return ["inner"], {"scale": self.scale}

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)


def test_bl_019_a_wrapper_subclass_brings_its_inner_tensor_and_attribute_back() -> None:
    state = {"w": Scaled(torch.arange(6, dtype=torch.int8).view(2, 3), 0.5), "plain": torch.ones(2)}
    loaded = there_and_back(state, allow=[Scaled])
    assert type(loaded["w"]) is Scaled and loaded["w"].scale == 0.5
    assert torch.equal(loaded["w"].inner, state["w"].inner) and torch.equal(loaded["plain"], state["plain"])


def test_bl_019_its_class_is_named_where_it_is_not_allowed() -> None:
    with pytest.raises(relight.ObjectNotAllowed, match=r"Scaled at w .*allow=\['.*Scaled'\]") as caught:
        there_and_back({"w": Scaled(torch.ones(2), 1.0)})
    assert caught.value.name is not None and caught.value.name.endswith("Scaled")


def test_bl_020_an_empty_own_storage_is_no_invalid_view() -> None:
    state = {"plain": torch.ones(3), "w": Scaled(torch.ones(2, 2), 2.0)}
    assert torch.equal(there_and_back(state, allow=[Scaled])["plain"], state["plain"])


def test_bl_020_a_view_beyond_its_storage_is_refused_by_key_and_class() -> None:
    freed = torch.ones(2, 2)
    freed.untyped_storage().resize_(0)  # as sharded training does between steps
    file = io.BytesIO(b"old")
    with pytest.raises(relight.NotPicklable, match=r"model\.w is .*torch\.Tensor.*16 bytes of a storage of 0"):
        relight.save({"plain": torch.ones(3), "model": {"w": freed}}, file)
    assert file.getvalue() == b"old"


@pytest.mark.parametrize("requires_grad", [True, False])
def test_bl_022_nested_tensors(requires_grad: bool) -> None:
    rows = [torch.arange(3.0), torch.arange(5.0)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls the nested API a prototype
        strided = torch.nested.nested_tensor(rows, requires_grad=requires_grad)
        jagged = torch.nested.nested_tensor(rows, layout=torch.jagged, requires_grad=requires_grad)
        loaded = there_and_back({"strided": strided, "jagged": jagged})
        assert [part.tolist() for part in loaded["strided"].unbind()] == [row.tolist() for row in rows]
        assert [part.tolist() for part in loaded["jagged"].unbind()] == [row.tolist() for row in rows]
        file = io.BytesIO()
        torch.save(jagged, file)  # torch 2.4 loses the flag of a jagged tensor
        file.seek(0)
        kept = torch.load(file, weights_only=False).requires_grad
    assert loaded["strided"].layout is torch.strided and loaded["jagged"].layout is torch.jagged
    assert loaded["jagged"].requires_grad is kept


def test_bl_025_sparse_tensors() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls CSR a beta
        coo = torch.sparse_coo_tensor(torch.tensor([[0, 0, 1], [1, 1, 0]]), torch.tensor([1.0, 2.0, 3.0]), (2, 2))
        state = {
            "uncoalesced": coo,
            "coalesced": coo.coalesce(),
            "csr": coo.to_dense().to_sparse_csr(),
            "empty": torch.sparse_coo_tensor(size=(3, 3)),
        }
        loaded = there_and_back(state)
        for name, value in state.items():
            assert loaded[name].layout == value.layout and torch.equal(loaded[name].to_dense(), value.to_dense())
            assert loaded[name]._nnz() == value._nnz()
    assert not loaded["uncoalesced"].is_coalesced() and loaded["coalesced"].is_coalesced()


def test_conjugated_and_negated_views_keep_their_bits() -> None:
    values = torch.randn(4, dtype=torch.complex64)
    state = {"values": values, "conj": values.conj(), "neg": values.conj().imag}
    loaded = there_and_back(state)
    assert loaded["conj"].is_conj() and loaded["neg"].is_neg()
    assert all(torch.equal(loaded[name], value) for name, value in state.items())


def test_quantized_tensors() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch has deprecated them, files have them
        per_tensor = torch.quantize_per_tensor(torch.randn(8), 0.1, 3, torch.qint8)
        per_channel = torch.quantize_per_channel(
            torch.randn(2, 4), torch.tensor([0.1, 0.2]), torch.tensor([0, 1]), 0, torch.quint8
        )
        loaded = there_and_back([per_tensor, per_channel])
        assert torch.equal(loaded[0].int_repr(), per_tensor.int_repr()) and loaded[0].q_scale() == 0.1
        assert torch.equal(loaded[1].int_repr(), per_channel.int_repr())


def test_meta_tensors_come_back_without_data() -> None:
    loaded = there_and_back({"x": torch.empty(3, 4, device="meta")})["x"]
    assert loaded.is_meta and loaded.shape == (3, 4)


def test_attributes_of_a_tensor_are_kept() -> None:
    tensor = torch.ones(2)
    tensor.note = "mine"  # type: ignore[attr-defined]
    assert there_and_back(tensor).note == "mine"


def test_bl_170_optimizer_moments_in_full_precision_beside_half_parameters() -> None:
    moments = {"exp_avg": torch.randn(1000), "exp_avg_sq": torch.rand(1000) * 1e-30}
    state = {"p": torch.randn(1000).half(), "b": torch.randn(1000).bfloat16(), "state": {0: moments}}
    loaded = there_and_back(state)
    assert loaded["p"].dtype == torch.float16 and loaded["b"].dtype == torch.bfloat16
    for name, value in moments.items():
        assert loaded["state"][0][name].dtype == torch.float32 and torch.equal(loaded["state"][0][name], value)


def test_bl_171_eight_bit_state_plain_and_as_a_subclass() -> None:
    state = {"plain": torch.arange(-5, 5, dtype=torch.int8), "w": Scaled(torch.ones(3, dtype=torch.int8), 0.1)}
    loaded = there_and_back(state, allow=[Scaled])
    assert loaded["plain"].dtype == torch.int8 and torch.equal(loaded["plain"], state["plain"])
    assert type(loaded["w"]) is Scaled and loaded["w"].inner.dtype == torch.int8
