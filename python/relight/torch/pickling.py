"""Pickling: turns an object into the entries of a torch.save archive, without copying what lies in CPU memory.

Owns: the pickler, which bytes of which storage are written, the order and content of the small entries.
Must not: write a file, know of tiers or of the engine, change the object.
Invariant: plain `torch.load` of the entries gives what the object was at the call, with the same sharing between the
    tensors that are saved; whatever cannot be written so is refused here, before a byte is written.

Two passes at most. The first pickles as torch does and notes what of each storage is reached. If something is not
(a row of a table), the second one pickles again with the offsets of a smaller storage (`reach`).
"""

from __future__ import annotations

import functools
import hashlib
import io
import operator
import pickle
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from relight.exceptions import InvalidArgument, TornSnapshot
from relight.torch import diagnose, paths, private, quiet_gc, reach, safe_types
from relight.torch.buffers import readable_view
from torch.storage import TypedStorage, UntypedStorage

__all__ = ["Snapshot", "plan_object"]

Entry: TypeAlias = tuple[str, bytes | list[bytes | memoryview]]

# What reads these entries (torch 1.6 to 2.13) accepts version 3; `.format_version` 0 says that data entries are not at
# offsets which torch could compute by itself.
_ARCHIVE_VERSION = b"3\n"
_FORMAT_VERSION = b"0"
_STORAGE_ALIGNMENT = b"64"

_PLAIN = (torch.Tensor, torch.nn.Parameter)


@dataclass(slots=True)
class Snapshot:
    """One object, planned: the entries of its archive, as views of live memory.

    The memory is that of the caller's tensors: stage or write `entries` before the caller may change them, then call
    `check_torn()`.
    """

    entries: list[Entry]
    stem: str
    keepalive: list[object] = field(repr=False)
    versions: list[tuple[torch.Tensor, int]] = field(repr=False)
    obj: object = field(repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes of all entries, without headers."""
        return sum(len(data) if isinstance(data, bytes) else sum(map(len, data)) for _, data in self.entries)

    def check_torn(self) -> None:
        """Refuses the snapshot if a tensor was changed in place since it was planned.

        It sees what torch's version counters see: every in-place operation of torch, in any thread, but not writes
        through `.data`, numpy or raw memory; those need the byte comparison (`compare=True` when staging).

        Raises:
            TornSnapshot: names the tensor. Nothing of this snapshot may be committed.
        """
        for tensor, version in self.versions:
            if private.version_of(tensor) != version:
                name = paths.find(self.obj, functools.partial(operator.is_, tensor))
                raise TornSnapshot(
                    f"{name or 'a tensor'} was changed while it was being copied; do not change the state during the "
                    "call to save, then save again"
                )


class _Mark:
    """Stands for a storage in the arguments of a rebuild function; `persistent_id` knows it."""

    __slots__ = ("pid",)

    def __init__(self, pid: tuple[Any, ...]) -> None:
        self.pid = pid


class _Kept:
    """One live storage of the object: how it is written, and what of it is reached."""

    __slots__ = ("dtype", "forced", "key", "layout", "mark", "nbytes", "storage", "typed", "views", "whole")

    def __init__(self, storage: UntypedStorage, key: str, dtype: torch.dtype, typed: bool) -> None:
        self.storage = storage  # alive, so that its address is not given to another one
        self.key = key
        self.dtype = dtype
        self.typed = typed  # written as a typed storage, as FloatStorage, not as UntypedStorage
        self.nbytes = storage.nbytes()
        self.layout: reach.Layout | None = None
        self.views: set[reach.View] = set()
        self.whole = False
        self.forced: tuple[torch.dtype, bool] | None = None  # the kind that a raw storage in the object asks for
        self.mark: _Mark | None = None


@dataclass(frozen=True, slots=True)
class _Plan:
    """What the first pass found, for the second: by identity of the storage, which the first pass keeps alive."""

    layouts: dict[tuple[int, torch.dtype | None], reach.Layout]
    forced: dict[tuple[int, torch.dtype | None], tuple[torch.dtype, bool]]


class _PlanMissed(Exception):
    """The second pass met a view that the first did not: the object makes new tensors when it is pickled."""


def plan_object(
    obj: object, *, pickle_module: Any = pickle, pickle_protocol: int = 2, stem: str = "archive"
) -> Snapshot:
    """The entries of the archive that `torch.save(obj)` would write, over the live memory of the tensors.

    Args:
        pickle_module: as in torch.save; its `Pickler` is subclassed.
        pickle_protocol: as in torch.save.
        stem: the name inside the archive, before each entry's.

    Raises:
        NotPicklable: names the key and the type of what cannot be saved.
        InvalidArgument: inside `torch.serialization.skip_data`.
    """
    if private.skips_data():
        raise InvalidArgument("torch.serialization.skip_data makes a file without data; use torch.save for that")
    with quiet_gc.paused():
        try:
            try:
                pickler, data = _two_passes(obj, pickle_module, pickle_protocol, portable=True)
            except RecursionError:
                # A deque or defaultdict that holds itself: only its own form can say that.
                pickler, data = _two_passes(obj, pickle_module, pickle_protocol, portable=False)
        except diagnose.PICKLE_ERRORS as error:
            refusal = diagnose.not_picklable(
                obj, error, lambda part: _pass(part, pickle_module, pickle_protocol, True, None)
            )
            raise refusal from error
        return _snapshot(obj, stem, pickler, data)


def _two_passes(obj: object, pickle_module: Any, protocol: int, portable: bool) -> tuple[Any, bytes]:
    pickler, data = _pass(obj, pickle_module, protocol, portable, None)
    plan = pickler.plan()
    if plan is None:
        return pickler, data
    first = pickler  # keeps the storages, so that the plan's identities stay true
    try:
        pickler, data = _pass(obj, pickle_module, protocol, portable, plan)
    except _PlanMissed:
        plan = _Plan({}, plan.forced)
        pickler, data = _pass(obj, pickle_module, protocol, portable, plan)
    del first
    return pickler, data


def _pass(obj: object, pickle_module: Any, protocol: int, portable: bool, plan: _Plan | None) -> tuple[Any, bytes]:
    file = io.BytesIO()
    pickler = _pickler_class(pickle_module.Pickler)(file, protocol, portable, plan)
    pickler.dump(obj)
    return pickler, safe_types.portable_names(file.getvalue(), protocol)


_classes: dict[type, type] = {}


def _pickler_class(base: type) -> Any:
    """Our pickler over the pickler of the caller's pickle module."""
    found = _classes.get(base)
    if found is None:
        found = _classes[base] = type("Pickler", (_TorchPickler, base), {})
    return found


_Reduce = Callable[["_TorchPickler", Any], Any]


class _TorchPickler:
    """The part of the pickler that is ours; mixed into `pickle.Pickler` or what the caller gives in its place."""

    persistent_id: Callable[[Any], Any]

    def __init__(self, file: io.BytesIO, protocol: int, portable: bool, plan: _Plan | None) -> None:
        self._protocol = protocol
        self._portable = portable
        self._given = plan
        self._reducers: dict[type, _Reduce | None] = {}
        self._inner: object = None
        self.kept: dict[tuple[int, torch.dtype | None], _Kept] = {}
        self.versions: list[tuple[torch.Tensor, int]] = []
        self.persistent_id = _persistent_id(self._raw_storage)  # before the base looks for it
        super().__init__(file, protocol=protocol)  # type: ignore[call-arg]  # the base is given by the mixing class
        self._base_override: Any = getattr(super(), "reducer_override", None)

    # ---- storages ----

    def _raw_storage(self, obj: Any) -> tuple[Any, ...]:
        if isinstance(obj, TypedStorage):
            storage, dtype, typed = private.untyped_of(obj), obj.dtype, True
        else:
            storage, dtype, typed = obj, torch.uint8, False
        if storage.device.type == "meta":
            raise TypeError("a storage on the meta device has no bytes")
        kept = self._keep(storage, dtype, typed)
        if kept.layout is not None:
            raise _PlanMissed
        kept.whole = True
        if (kept.dtype, kept.typed) != (dtype, typed):
            if kept.forced not in (None, (dtype, typed)):
                raise TypeError(f"one storage is there as {kept.forced} and as {dtype}")
            kept.forced = (dtype, typed)
        return self._mark_of(kept).pid

    def _keep(
        self, storage: UntypedStorage, dtype: torch.dtype, typed: bool, alone: torch.dtype | None = None
    ) -> _Kept:
        identity = (private.storage_identity(storage), alone)
        kept = self.kept.get(identity)
        if kept is None:
            if self._given is not None and identity in self._given.forced:
                dtype, typed = self._given.forced[identity]
            if typed and storage.nbytes() % _item_bytes(dtype):
                dtype, typed = torch.uint8, False  # a typed storage could not say how long it is
            kept = _Kept(storage, str(len(self.kept)), dtype, typed)
            if self._given is not None:
                kept.layout = self._given.layouts.get(identity)
            self.kept[identity] = kept
        return kept

    def _mark_of(self, kept: _Kept) -> _Mark:
        if kept.mark is None:
            nbytes = kept.nbytes if kept.layout is None else kept.layout.length
            kind: Any = UntypedStorage
            numel = nbytes
            if kept.typed:
                kind = private.storage_type_of(kept.dtype)
                numel = nbytes // _item_bytes(kept.dtype)
            # Set by torch on storages of fake tensors under skip_data.
            fake = private.fake_device_of(kept.storage)
            location = torch.serialization.location_tag(kept.storage) if fake is None else str(fake)
            kept.mark = _Mark(("storage", kind, kept.key, location, numel))
        return kept.mark

    # ---- tensors and other objects ----

    def reducer_override(self, obj: Any) -> Any:
        cls = type(obj)
        reducer = self._reducers.get(cls, _UNKNOWN)
        if reducer is _UNKNOWN:
            reducer = self._reducers[cls] = self._find_reducer(cls)
        if reducer is not None:
            reduced = reducer(self, obj)
            if reduced is not NotImplemented:
                return reduced
        return NotImplemented if self._base_override is None else self._base_override(obj)

    def _find_reducer(self, cls: type) -> _Reduce | None:
        if cls is torch.Tensor:
            return _TorchPickler._reduce_plain
        if issubclass(cls, torch.Tensor):
            return _TorchPickler._reduce_tensor
        if cls is type:
            return _TorchPickler._reduce_class
        own = safe_types.reducer_for(cls) if self._portable else None
        return None if own is None else lambda _, obj: own(obj)

    def _reduce_class(self, cls: Any) -> Any:
        return safe_types.class_name(cls)

    def _reduce_plain(self, tensor: Any) -> Any:
        """`_reduce_tensor` for the most common kind, at half its cost: what torch's reducer does for it, in one go."""
        dtype = tensor.dtype
        if (
            tensor.__dict__
            or dtype not in private.TYPED_DTYPES
            or tensor.layout is not torch.strided
            or tensor.device.type not in ("cpu", "cuda")
            or tensor.is_nested
            or private.backward_hooks_of(tensor) is not None
        ):
            return self._reduce_tensor(tensor)
        if tensor is self._inner:
            self._inner = None
        elif not tensor.is_inference():
            self.versions.append((tensor, private.version_of(tensor)))
        storage = tensor.untyped_storage()
        kept = self.kept.get((private.storage_identity(storage), None)) or self._keep(storage, dtype, True)
        offset, size, stride = tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
        metadata = private.tensor_metadata(tensor)
        tail = (metadata,) if metadata else ()
        if not kept.typed or kept.dtype != dtype or kept.layout is not None:
            shell = private.typed_storage(storage, dtype)
            args = (shell, offset, size, stride, tensor.requires_grad, OrderedDict(), *tail)
            return self._rewrite_strided(private.REBUILD_V2, args)
        if not kept.whole:
            if not offset and tensor.nbytes == kept.nbytes and tensor.is_contiguous():
                kept.whole = True
            else:
                self._place(kept, offset, size, stride, dtype.itemsize)
        mark = kept.mark or self._mark_of(kept)
        return private.REBUILD_V2, (mark, offset, size, stride, tensor.requires_grad, OrderedDict(), *tail)

    def _reduce_tensor(self, tensor: Any) -> Any:
        if tensor is self._inner:
            self._inner = None  # the `.data` of a Parameter: has a version counter of its own that never moves
        elif type(tensor) in _PLAIN:
            if not tensor.is_inference():
                self.versions.append((tensor, private.version_of(tensor)))
        else:
            with private.without_torch_function():  # a subclass may answer these with tensors of its own
                if not tensor.is_inference():
                    self.versions.append((tensor, private.version_of(tensor)))
        reduced = tensor.__reduce_ex__(self._protocol)
        if not isinstance(reduced, tuple):
            return reduced
        function, args, *rest = reduced
        if function in private.REBUILD_PARAMETER:
            self._inner = args[0]
            return reduced
        try:
            return (*self._rewrite(function, args), *rest)
        except ValueError as error:
            raise ValueError(f"{paths.type_name(tensor)} of shape {tuple(tensor.shape)}: {error}") from error

    def _rewrite(self, function: Any, args: Any) -> tuple[Any, Any]:
        """The same call, with the storage replaced by its mark and the place of the view in it."""
        if function is private.REBUILD_TYPE:
            inner, cls, inner_args, state = args
            inner, inner_args = self._rewrite(inner, inner_args)
            return function, (inner, cls, inner_args, state)
        if function is private.REBUILD_V2 or function is private.REBUILD_V3:
            return self._rewrite_strided(function, args)
        if function is private.REBUILD_QUANTIZED:
            # Takes its dtype from the storage, so the storage is written for this dtype alone; and whole, because some
            # of these dtypes have several elements in a byte.
            typed = args[0]
            kept = self._keep(private.untyped_of(typed), typed.dtype, True, alone=typed.dtype)
            kept.whole = True
            return function, (self._mark_of(kept), *args[1:])
        return function, args

    def _rewrite_strided(self, function: Any, args: Any) -> tuple[Any, Any]:
        storage, offset, size, stride, requires_grad, hooks, *rest = args
        if function is private.REBUILD_V2:
            # A dtype without a storage class (int4) is one that torch.save cannot write; v3 can.
            dtype, typed = storage.dtype, storage.dtype in private.TYPED_DTYPES
            storage = private.untyped_of(storage)
        else:
            dtype, typed = rest.pop(0), False
        kept = self._keep(storage, dtype if typed else torch.uint8, typed)
        offset, stride = self._place(kept, offset, size, stride, _item_bytes(dtype))
        mark = self._mark_of(kept)
        if kept.typed and kept.dtype == dtype:
            return private.REBUILD_V2, (mark, offset, size, stride, requires_grad, hooks, *rest)
        # The storage is written under another type, or under none. v3 names the dtype; it fails on a tensor that
        # requires grad (it changes a leaf in place), so the flag is set as state afterwards.
        call = (mark, offset, size, stride, False, hooks, dtype, *rest)
        if requires_grad:
            return private.REBUILD_TYPE, (private.REBUILD_V3, torch.Tensor, call, {"requires_grad": True})
        return private.REBUILD_V3, call

    def _place(self, kept: _Kept, offset: Any, size: Any, stride: Any, itemsize: int) -> tuple[Any, Any]:
        if kept.layout is not None:
            place = kept.layout.places.get((offset, size, stride, itemsize))
            if place is None:
                raise _PlanMissed
            return place
        if not kept.whole:
            end = reach.span_end(offset, size, stride, itemsize)
            if end > kept.nbytes:
                raise ValueError(f"it reaches {end} bytes of a storage of {kept.nbytes}")
            if end == kept.nbytes and offset == 0 and _is_contiguous(size, stride):
                kept.whole = True
            else:
                kept.views.add((offset, size, stride, itemsize))
        return offset, stride

    def plan(self) -> _Plan | None:
        """What a second pass has to do otherwise, or None if nothing."""
        layouts = {}
        for identity, kept in self.kept.items():
            if not kept.whole:
                layout = reach.plan(kept.nbytes, kept.views)
                if layout is not None:
                    layouts[identity] = layout
        forced = {identity: kept.forced for identity, kept in self.kept.items() if kept.forced is not None}
        return _Plan(layouts, forced) if layouts or forced else None


def _persistent_id(raw_storage: Callable[[Any], tuple[Any, ...]]) -> Callable[[Any], Any]:
    """The `persistent_id` of a pickler. It is called for every object there is, so it is one lookup for most."""
    plain: set[type] = set()

    def persistent_id(obj: Any) -> Any:
        cls = type(obj)
        if cls in plain:
            return None
        if cls is _Mark:
            return obj.pid
        if issubclass(cls, TypedStorage) or cls in private.STORAGE_CLASSES:
            return raw_storage(obj)
        plain.add(cls)
        return None

    return persistent_id


_UNKNOWN: Any = object()


def _item_bytes(dtype: torch.dtype) -> int:
    return dtype.itemsize


def _is_contiguous(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether the view has its elements without gaps, in any order of its dimensions: then its span is its reach."""
    expected = 1
    for step, count in sorted(zip(stride, size, strict=True)):
        if count != 1:
            if step != expected:
                return False
            expected *= count
    return True


# ---- bytes ----


def _snapshot(obj: object, stem: str, pickler: Any, data: bytes) -> Snapshot:
    keepalive: list[object] = []
    records: list[Entry] = []
    for kept in pickler.kept.values():
        records.append((f"data/{kept.key}", list(_pieces(kept, keepalive))))
    identity = hashlib.blake2b(data, digest_size=16).digest()
    numbers = (int.from_bytes(identity[:8], "little"), int.from_bytes(identity[8:], "little"))
    entries: list[Entry] = [
        ("data.pkl", data),
        (".format_version", _FORMAT_VERSION),
        (".storage_alignment", _STORAGE_ALIGNMENT),
        ("byteorder", sys.byteorder.encode()),
        *records,
        ("version", _ARCHIVE_VERSION),
        # 40 digits, as torch has them. From the pickle, not from a clock: the same object gives the same file.
        (".data/serialization_id", "".join(f"{number:020d}" for number in numbers).encode()),
    ]
    return Snapshot(entries, stem, keepalive, pickler.versions, obj)


def _pieces(kept: _Kept, keepalive: list[object]) -> Iterator[bytes | memoryview]:
    """The bytes of one storage as it is written, in order."""
    storage = kept.storage
    if kept.layout is None:
        if kept.nbytes:
            yield _view(_on_cpu(storage), 0, kept.nbytes, keepalive)
        return
    done = 0
    for group in kept.layout.groups:
        if group.target > done:
            yield bytes(group.target - done)
        if len(group.moves) == 1 and not group.moves[0].dims:
            source, end = group.moves[0].source, group.moves[0].source + group.length
            if storage.device.type == "cpu":
                yield _view(storage, source, group.length, keepalive)
            else:
                piece = _bytes_of(storage)[source:end].cpu().untyped_storage()
                yield _view(piece, 0, group.length, keepalive)
        else:
            yield _view(_gather(storage, group), 0, group.length, keepalive)
        done = group.target + group.length
    if kept.layout.length > done:
        yield bytes(kept.layout.length - done)


def _view(storage: UntypedStorage, start: int, length: int, keepalive: list[object]) -> memoryview:
    keepalive.append(storage)
    return readable_view(storage, start, length)


def _on_cpu(storage: UntypedStorage) -> UntypedStorage:
    # The copy from a device is made here, at the call: it is the state of this moment.
    return storage if storage.device.type == "cpu" else _bytes_of(storage).cpu().untyped_storage()


def _bytes_of(storage: UntypedStorage, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage)


def _gather(storage: UntypedStorage, group: reach.Group) -> UntypedStorage:
    """Copies what is scattered over the storage (a column of a table) together, by torch's strided copy."""
    unit, dtype = 1, torch.uint8
    numbers = [group.length]
    for move in group.moves:
        numbers += [move.source, move.target, move.length]
        numbers += [step for dim in move.dims for step in dim[1:]]
    for wider, wider_dtype in ((2, torch.int16), (4, torch.int32), (8, torch.int64)):
        if storage.nbytes() % wider == 0 and not any(number % wider for number in numbers):
            unit, dtype = wider, wider_dtype
    source = _bytes_of(storage, dtype)
    target = torch.zeros(group.length // unit, dtype=dtype)
    for move in group.moves:
        size = [*(dim[0] for dim in move.dims), move.length // unit]
        to_view = target.as_strided(size, [*(dim[2] // unit for dim in move.dims), 1], move.target // unit)
        to_view.copy_(source.as_strided(size, [*(dim[1] // unit for dim in move.dims), 1], move.source // unit))
    return target.untyped_storage()
