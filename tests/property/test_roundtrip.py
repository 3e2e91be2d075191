"""Any state: relight and torch read what relight wrote as torch reads what torch wrote."""

from __future__ import annotations

import io
from collections import OrderedDict
from typing import Any

import pytest
import relight
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

DTYPES = [
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.uint8,
    torch.complex64,
    torch.bool,
    torch.uint16,
]


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 6), max_size=3))
    base = torch.arange(2 + int(torch.Size(shape).numel()) * 3, dtype=torch.float32).to(dtype)
    start = draw(st.integers(0, 2))
    step = draw(st.integers(1, 3))
    count = int(torch.Size(shape).numel())
    tensor = base[start:][::step][:count].reshape(shape) if draw(st.booleans()) else base[:count].view(shape)
    if tensor.dim() > 1 and draw(st.booleans()):
        tensor = tensor.transpose(0, 1)
    if dtype.is_floating_point and draw(st.booleans()):
        tensor = tensor.detach().requires_grad_()
    return torch.nn.Parameter(tensor.detach(), requires_grad=False) if draw(st.booleans()) else tensor


@st.composite
def states(draw: st.DrawFn) -> Any:
    """Nested containers over a few tensors and values; tensors and containers may be there several times."""
    pool = draw(st.lists(tensors(), min_size=1, max_size=4))
    pool += [tensor[:1] for tensor in pool if tensor.dim() and not tensor.requires_grad]
    leaf = st.one_of(
        st.sampled_from(pool),
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(allow_nan=False),
        st.text(),
        st.binary(),
    )
    keys = st.one_of(st.text(max_size=5), st.integers(), st.tuples(st.integers(), st.text(max_size=2)))
    tree = st.recursive(
        leaf,
        lambda child: st.one_of(
            st.lists(child, max_size=4),
            st.dictionaries(keys, child, max_size=4),
            st.dictionaries(keys, child, max_size=3).map(OrderedDict),
            st.tuples(child, child),
        ),
        max_leaves=12,
    )
    return draw(st.lists(tree, max_size=4))


def leaves(obj: Any) -> list[torch.Tensor]:
    if isinstance(obj, torch.Tensor):
        return [obj]
    if isinstance(obj, dict):
        return [leaf for value in obj.values() for leaf in leaves(value)]
    return [leaf for value in obj for leaf in leaves(value)] if isinstance(obj, (list, tuple)) else []


def assert_equal(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape, a.stride(), a.requires_grad) == (b.dtype, b.shape, b.stride(), b.requires_grad)
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert [(type(k), k) for k in a] == [(type(k), k) for k in b]
        for key in a:
            assert_equal(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            assert_equal(one, other)
    else:
        assert a == b


def sharing(obj: Any) -> list[list[bool]]:
    found = leaves(obj)
    return [[one is two for two in found] for one in found], [
        [one.untyped_storage()._cdata == two.untyped_storage()._cdata for two in found] for one in found
    ]  # type: ignore[return-value]


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(states(), st.sampled_from([2, 3, 4, 5]))
def test_a_state_comes_back_equal_with_its_sharing(state: Any, protocol: int) -> None:
    ours = io.BytesIO()
    relight.save(state, ours, pickle_protocol=protocol)
    ours.seek(0)
    for loaded in (relight.load(ours), torch.load(io.BytesIO(ours.getvalue()), weights_only=False)):
        assert_equal(loaded, state)
        # One object is one object again, and one storage one storage. (Two empty storages may be one.)
        assert sharing(loaded)[0] == sharing(state)[0]
        nonempty = [i for i, t in enumerate(leaves(state)) if t.numel()]
        for i in nonempty:
            for j in nonempty:
                assert sharing(loaded)[1][i][j] == sharing(state)[1][i][j]
    theirs = io.BytesIO()
    torch.save(state, theirs, pickle_protocol=protocol)
    theirs.seek(0)
    assert_equal(relight.load(theirs), torch.load(io.BytesIO(theirs.getvalue()), weights_only=False))


@pytest.mark.parametrize("swap", [False, True])
def test_a_file_of_the_other_byte_order_is_swapped(swap: bool) -> None:
    """Only the note of the byte order is changed: the values then read as their bytes reversed."""
    import zipfile

    source = io.BytesIO()
    relight.save({"x": torch.tensor([1, 256], dtype=torch.int32)}, source)
    target = io.BytesIO()
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for info in old.infolist():
            data = old.read(info)
            new.writestr(info.filename, b"big" if swap and info.filename.endswith("byteorder") else data)
    target.seek(0)
    values = relight.load(target)["x"].tolist()
    assert values == ([1 << 24, 1 << 16] if swap else [1, 256])
