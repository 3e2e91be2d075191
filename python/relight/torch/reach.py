"""Reach: which bytes of a storage the saved tensors can see, and where those bytes go in a smaller storage.

Owns: the interval arithmetic; the rule when gaps between and inside views are dropped.
Must not: import torch, read a byte of data, know of pickles.
Invariant: every byte that a view reaches has exactly one place in the layout, and each view stays affine (one stride
    for each dimension), so that it can be rebuilt by torch's own `set_`.

All numbers are bytes. A view is `(offset, size, stride, itemsize)` with offset and stride in elements, as torch has
them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

__all__ = ["Group", "Layout", "Move", "View", "plan", "span_end"]

View = tuple[int, tuple[int, ...], tuple[int, ...], int]

# A storage starts at a multiple of 64 in memory and in the file: a view keeps its place modulo 64, so that what was
# aligned stays aligned. A gap shorter than this cannot be dropped without breaking that, so it is kept.
ALIGN = 64
# Inside the span of one group of views, gaps are dropped only where that pays: it costs a copy at the call, and the
# strides of the tensors change. Small slices keep their strides.
FOLD_BYTES_MIN = 4096
STORAGE_UNIT = 16  # the largest itemsize of torch: the compact storage is a whole number of elements of any dtype


@dataclass(frozen=True, slots=True)
class Move:
    """A run of `length` bytes, repeated over `dims` of (count, stride in the source, stride in the group)."""

    source: int
    target: int  # from the start of the group
    length: int
    dims: tuple[tuple[int, int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Group:
    """`length` bytes of the compact storage from `target` on, made by `moves`."""

    target: int
    length: int
    moves: tuple[Move, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """The compact storage: its length, what fills it, and the new (offset, stride) of each view, in elements."""

    length: int
    groups: tuple[Group, ...]
    places: dict[View, tuple[int, tuple[int, ...]]]


def span_end(offset: int, size: Sequence[int], stride: Sequence[int], itemsize: int) -> int:
    """The byte after the last one that the view reaches; 0 if it has no elements."""
    if 0 in size:
        return 0
    return (offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) + 1) * itemsize


@dataclass(slots=True)
class _Part:
    """A view while it is folded: `dims` are the indexes of its dimensions that are not yet folded, outermost first."""

    view: View
    start: int
    dims: list[int]
    strides: list[int]  # new strides in bytes, filled in by folding
    target: int = 0

    def count(self) -> int:
        return self.view[1][self.dims[0]]

    def step(self) -> int:
        return self.view[2][self.dims[0]] * self.view[3]

    def end(self) -> int:
        _, size, stride, itemsize = self.view
        return self.start + sum((size[d] - 1) * stride[d] * itemsize for d in self.dims) + itemsize


def plan(nbytes: int, views: Iterable[View]) -> Layout | None:
    """The layout of a storage of `nbytes` that only `views` reach, or None if it is to be stored as it is.

    Gaps of 64 bytes and more between the spans of views are dropped. Gaps inside a span (a column of a table) are
    dropped if that makes the span less than half as long and saves 4 KiB.

    Raises:
        ValueError: a view reaches beyond the storage.

    Source: interval union after a sort; the fold is by the common outermost stride, recursively.
    """
    parts: list[_Part] = []
    empty: list[View] = []
    for view in views:
        offset, size, stride, itemsize = view
        if 0 in size:
            empty.append(view)
            continue
        end = span_end(offset, size, stride, itemsize)
        if end > nbytes:
            raise ValueError(f"it reaches {end} bytes of a storage of {nbytes}")
        dims = [d for d in range(len(size)) if size[d] > 1 and stride[d] > 0]
        dims.sort(key=lambda d: stride[d], reverse=True)
        parts.append(_Part(view, offset * itemsize, dims, [s * itemsize for s in stride]))

    groups: list[Group] = []
    length = 0
    for start, end, members in _merge(parts, ALIGN):
        folded, moves = _fold(start, end, members)
        span = end - start
        if 2 * folded > span or span - folded < FOLD_BYTES_MIN:
            folded, moves = span, _keep(start, end, members)
        target = _same_phase(length, start, ALIGN)
        for part in members:
            part.target += target
        groups.append(Group(target, folded, tuple(moves)))
        length = target + folded
    length = -(-length // STORAGE_UNIT) * STORAGE_UNIT
    if length + ALIGN > nbytes:
        return None

    places: dict[View, tuple[int, tuple[int, ...]]] = {}
    for part in parts:
        itemsize = part.view[3]
        places[part.view] = (part.target // itemsize, tuple(s // itemsize for s in part.strides))
    for view in empty:
        places[view] = (0, view[2])
    return Layout(length, tuple(groups), places)


def _merge(parts: list[_Part], gap: int) -> list[tuple[int, int, list[_Part]]]:
    """Groups of parts whose spans overlap, or are less than `gap` apart, in order."""
    merged: list[tuple[int, int, list[_Part]]] = []
    for part in sorted(parts, key=lambda p: p.start):
        end = part.end()
        if merged and part.start < merged[-1][1] + gap:
            start, old_end, members = merged[-1]
            members.append(part)
            merged[-1] = (start, max(old_end, end), members)
        else:
            merged.append((part.start, end, [part]))
    return merged


def _keep(start: int, end: int, members: list[_Part]) -> list[Move]:
    for part in members:
        part.target = part.start - start
        _, _, stride, itemsize = part.view
        part.strides = [s * itemsize for s in stride]
    return [Move(start, 0, end - start)]


def _fold(start: int, end: int, members: list[_Part]) -> tuple[int, list[Move]]:
    """Lays out the span [start, end) without its inner gaps: its new length and the moves that fill it.

    If all members step through the span by one common outermost stride, and what each reaches in a step lies in one
    window not longer than that stride, the span is that window, repeated: the window is folded the same way.
    Otherwise the span is kept, which is always right.
    """
    first = members[0]
    if not all(part.dims for part in members):
        return end - start, _keep(start, end, members)
    step, count = first.step(), first.count()
    if any(part.step() != step or part.count() != count for part in members):
        return end - start, _keep(start, end, members)
    outer = [part.dims.pop(0) for part in members]
    window_end = max(part.end() for part in members)
    if window_end - start > step:
        for part, dim in zip(members, outer, strict=True):
            part.dims.insert(0, dim)
        return end - start, _keep(start, end, members)

    unit = max(part.view[3] for part in members)
    moves: list[Move] = []
    length = 0
    for inner_start, inner_end, inner in _merge(members, unit):
        inner_length, inner_moves = _fold(inner_start, inner_end, inner)
        target = _same_phase(length, inner_start - start, unit)
        for part in inner:
            part.target += target
        moves += [Move(m.source, m.target + target, m.length, m.dims) for m in inner_moves]
        length = target + inner_length
    length = -(-length // unit) * unit
    for part, dim in zip(members, outer, strict=True):
        part.dims.insert(0, dim)
        part.strides[dim] = length
    moves = [Move(m.source, m.target, m.length, ((count, step, length), *m.dims)) for m in moves]
    return (count - 1) * length + max(m.target + _move_span(m, skip=1) for m in moves), moves


def _move_span(move: Move, skip: int) -> int:
    return sum((count - 1) * target for count, _, target in move.dims[skip:]) + move.length


def _same_phase(position: int, start: int, unit: int) -> int:
    """The first place at or after `position` with the same remainder modulo `unit` as `start`."""
    return position + (start - position) % unit


def reached_bytes(layout: Layout) -> int:
    """How many bytes the moves copy: for reports and tests."""
    return sum(m.length * prod(count for count, _, _ in m.dims) for g in layout.groups for m in g.moves)
