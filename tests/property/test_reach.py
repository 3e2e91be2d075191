"""Reach: every element of every view has its bytes in the compact storage, and nothing else is kept that could go."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from relight.torch import reach


@st.composite
def views_of(draw: st.DrawFn) -> tuple[int, list[reach.View]]:
    nbytes = draw(st.integers(0, 20_000))
    views = []
    for _ in range(draw(st.integers(1, 4))):
        itemsize = draw(st.sampled_from([1, 2, 4, 8, 16]))
        elements = nbytes // itemsize
        dims = draw(st.integers(0, 3))
        size = tuple(draw(st.integers(0, 12)) for _ in range(dims))
        stride = tuple(draw(st.sampled_from([0, 1, 2, 3, 10, 40, 100])) for _ in range(dims))
        extent = 0 if 0 in size else sum((n - 1) * s for n, s in zip(size, stride, strict=True)) + 1
        if extent <= elements:
            views.append((draw(st.integers(0, elements - extent)), size, stride, itemsize))
    return nbytes, views


def bytes_of(offset: int, size: tuple[int, ...], stride: tuple[int, ...], itemsize: int) -> list[int]:
    starts = [offset * itemsize]
    for count, step in zip(size, stride, strict=True):
        starts = [start + i * step * itemsize for start in starts for i in range(count)]
    return [start + i for start in starts for i in range(itemsize)]


def compact(source: list[int], layout: reach.Layout) -> list[int]:
    target = [-1] * layout.length
    for group in layout.groups:
        for move in group.moves:
            places = [(move.source, group.target + move.target)]
            for count, source_step, target_step in move.dims:
                places = [(s + i * source_step, t + i * target_step) for s, t in places for i in range(count)]
            for s, t in places:
                assert group.target <= t and t + move.length <= group.target + group.length
                for i in range(move.length):
                    assert target[t + i] in (-1, source[s + i]), "two bytes in one place"
                    target[t + i] = source[s + i]
    return target


@given(views_of())
def test_each_view_reads_the_same_bytes_in_the_compact_storage(case: tuple[int, list[reach.View]]) -> None:
    nbytes, views = case
    layout = reach.plan(nbytes, views)
    if layout is None:
        return
    source = list(range(nbytes))  # each byte is known by its place
    target = compact(source, layout)
    for view in views:
        offset, size, stride, itemsize = view
        new_offset, new_stride = layout.places[view]
        was = [source[i] for i in bytes_of(offset, size, stride, itemsize)]
        now = [target[i] for i in bytes_of(new_offset, size, new_stride, itemsize)]
        assert now == was
    assert layout.length < nbytes


@given(views_of())
def test_what_starts_aligned_stays_aligned(case: tuple[int, list[reach.View]]) -> None:
    nbytes, views = case
    layout = reach.plan(nbytes, views)
    for group in layout.groups if layout else ():
        for move in group.moves[:1]:
            assert (group.target + move.target - move.source) % 16 == 0


def test_a_view_beyond_the_storage_is_refused() -> None:
    try:
        reach.plan(10, [(0, (3,), (1,), 4)])
    except ValueError as error:
        assert "12 bytes of a storage of 10" in str(error)
    else:
        raise AssertionError("it was accepted")


def test_a_column_costs_the_column() -> None:
    layout = reach.plan(4_000_000, [(0, (1000, 2), (1000, 1), 4)])
    assert layout is not None and layout.length == 8000 and reach.reached_bytes(layout) == 8000
