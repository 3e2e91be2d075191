"""What a torch.save file holds, read without torch and without running anything.

Owns: an unpickler whose world has no code: every class and function in the pickle becomes an inert stand-in.
Must not: import what a pickle names. There is no list of what is harmless, because nothing is called.
Invariant: whatever the pickle says, reading it only builds dicts, lists, tuples, numbers, text and stand-ins.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from relight.exceptions import CorruptCheckpoint

if TYPE_CHECKING:
    from relight import _core

_DTYPES = {
    "FloatStorage": ("float32", 4), "DoubleStorage": ("float64", 8), "HalfStorage": ("float16", 2),
    "BFloat16Storage": ("bfloat16", 2), "LongStorage": ("int64", 8), "IntStorage": ("int32", 4),
    "ShortStorage": ("int16", 2),
    "CharStorage": ("int8", 1), "ByteStorage": ("uint8", 1), "BoolStorage": ("bool", 1), "UntypedStorage": ("bytes", 1),
    "ComplexFloatStorage": ("complex64", 8), "ComplexDoubleStorage": ("complex128", 16), "QInt8Storage": ("qint8", 1),
    "QUInt8Storage": ("quint8", 1), "QInt32Storage": ("qint32", 4),
}  # fmt: skip
_WIDTHS = {
    "uint16": 2, "uint32": 4, "uint64": 8, "complex32": 4, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
}  # fmt: skip
_VALUE_WIDTH = 60
# What a damaged or hostile pickle makes the unpickler raise.
_UNREADABLE = (
    pickle.UnpicklingError, EOFError, LookupError, ValueError, TypeError, AttributeError, OverflowError, MemoryError,
    RecursionError,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Leaf:
    """One value in a file: where it is, what it is, and its shape or its text."""

    name: str
    type: str
    shape: tuple[int, ...] | None
    bytes: int | None
    value: str | None

    def as_json(self) -> dict[str, Any]:
        """All of it."""
        shape = None if self.shape is None else list(self.shape)
        return {"name": self.name, "type": self.type, "shape": shape, "bytes": self.bytes, "value": self.value}

    def as_row(self) -> list[object]:
        """For a table; long values are cut."""
        from relight.cli.output import size

        text = self.value or ""
        shape = None if self.shape is None else str(list(self.shape))
        short = text if len(text) <= _VALUE_WIDTH else text[: _VALUE_WIDTH - 1] + "…"
        return [self.name, self.type, shape, size(self.bytes), short]


def leaves(image: _core.Image) -> list[Leaf]:
    """Every value in the file, in its order.

    Raises:
        CorruptCheckpoint: the file is no archive of torch.save, or its pickle cannot be read.
    """
    index = next((i for i, entry in enumerate(image.entries) if entry.name == "data.pkl"), None)
    if index is None:
        message = f"{image.path} is a zip archive without data.pkl: torch.save did not write it"
        raise CorruptCheckpoint(message, path=image.path)
    reader = _Inert(io.BytesIO(image.read(index)))
    try:
        whole = reader.load()
        return list(_walk(whole))
    except _UNREADABLE as error:
        raise CorruptCheckpoint(f"the pickle in {image.path} cannot be read: {error}", path=image.path) from error


class _StandIn:
    """In the place of a class or function of the pickle. Remembers what it was given, and does nothing with it."""

    called: ClassVar[str] = ""
    given: tuple[Any, ...]
    state: Any

    def __new__(cls, *given: Any, **_: Any) -> _StandIn:
        self = super().__new__(cls)
        self.given, self.state, self.items = given, None, []
        return self

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def append(self, item: Any) -> None:
        """As a list subclass would."""
        self.items.append((len(self.items), item))

    def add(self, item: Any) -> None:
        """As a set subclass would."""
        self.append(item)

    def extend(self, items: Any) -> None:
        """As a list subclass would."""
        for item in items:
            self.append(item)

    def __setitem__(self, key: Any, item: Any) -> None:
        self.items.append((key, item))

    items: list[tuple[Any, Any]]


@dataclass(frozen=True, slots=True, eq=False)
class _Storage:
    dtype: str
    item_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class _Tensor:
    dtype: str
    item_bytes: int
    shape: tuple[int, ...]
    kind: str


def _tensor(storage: Any, _offset: Any = 0, shape: Any = (), *_rest: Any) -> Any:
    if not isinstance(storage, _Storage):
        return _Tensor("?", 0, tuple(shape), "tensor")
    return _Tensor(storage.dtype, storage.item_bytes, tuple(shape), "tensor")


def _tensor_v3(
    _storage: Any, _offset: Any, shape: Any, _stride: Any, _grad: Any, _hooks: Any, dtype: Any, *_: Any
) -> Any:
    name = dtype.called.removeprefix("torch.") if isinstance(dtype, type) and issubclass(dtype, _StandIn) else "?"
    return _Tensor(name, _WIDTHS.get(name, 1), tuple(shape), "tensor")


def _parameter(data: Any, *_: Any) -> Any:
    return _Tensor(data.dtype, data.item_bytes, data.shape, "parameter") if isinstance(data, _Tensor) else data


# Names that are read as plain data, each by code of ours.
_PLAIN: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("builtins", "complex"): complex,
    ("builtins", "bytearray"): bytearray,
    ("torch", "Size"): tuple,
    ("_codecs", "encode"): lambda text, coding="latin1": text.encode("latin1") if coding == "latin1" else text,
    ("torch._utils", "_rebuild_tensor"): _tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor_v3,
    ("torch._utils", "_rebuild_qtensor"): _tensor,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _parameter,
}


class _Inert(pickle.Unpickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, encoding="utf-8", errors="surrogateescape")
        self._made: dict[tuple[str, str], type[_StandIn]] = {}

    def find_class(self, module: str, name: str, /) -> Any:
        module = {"__builtin__": "builtins"}.get(module, module)  # protocol 2 has the old names
        if (plain := _PLAIN.get((module, name))) is not None:
            return plain
        if (module, name) not in self._made:
            self._made[module, name] = type("StandIn", (_StandIn,), {"called": f"{module}.{name}"})
        return self._made[module, name]

    def persistent_load(self, pid: Any, /) -> Any:
        kind = pid[1] if isinstance(pid, tuple) and len(pid) > 1 else None
        name = kind.called.rpartition(".")[2] if isinstance(kind, type) and issubclass(kind, _StandIn) else ""
        dtype, item_bytes = _DTYPES.get(name, ("bytes", 1))
        return _Storage(dtype, item_bytes)


# No pickler nests as deeply; names of a level more each would take memory by the square of it.
_LEVELS_MAX = 1000


def _walk(whole: Any) -> Iterator[Leaf]:
    """Depth first and without recursion: a pickle may nest deeper than Python's stack."""
    stack: list[tuple[str, Any, int]] = [("", whole, 0)]
    # A container is walked once: shared ones may multiply without end, and may hold themselves.
    seen: dict[int, str] = {}
    while stack:
        name, value, level = stack.pop()
        inside = _inside(value)
        if inside is None:
            yield _leaf(name, value)
        elif not inside:
            yield Leaf(name, _called(value), None, None, "empty")
        elif (first := seen.get(id(value))) is not None:
            yield Leaf(name, _called(value), None, None, f"the same as {first or 'the whole'}")
        elif level == _LEVELS_MAX:
            yield Leaf(name, _called(value), None, None, f"more than {_LEVELS_MAX} levels down: not shown")
        else:
            seen[id(value)] = name
            below = ((f"{name}.{key}" if name else str(key), item, level + 1) for key, item in reversed(inside))
            stack.extend(below)


def _inside(value: Any) -> list[tuple[Any, Any]] | None:
    """Names and values one level down; None for what is shown in one line."""
    if _numpy(value) or _numbers(value):
        return None
    if isinstance(value, dict):
        own = list(value.items())
        attributes = getattr(value, "__dict__", {})  # a state_dict has `_metadata`, which is no content
        return own + [(k, v) for k, v in attributes.items() if k != "_metadata"]
    if isinstance(value, list | tuple | set | frozenset):
        return list(enumerate(value))
    if isinstance(value, _StandIn):
        held: list[tuple[Any, Any]] = list(value.items)
        if isinstance(value.state, dict):
            held += list(value.state.items())
        elif value.state is not None:
            held.append(("state", value.state))
        return held + [(f"({i})", item) for i, item in enumerate(value.given)]
    return None


def _numpy(value: Any) -> tuple[str, tuple[int, ...], int] | None:
    """Type, shape and bytes of a NumPy array, which pickles as a call of `_reconstruct` and a state of five."""
    if not isinstance(value, _StandIn) or not value.called.endswith("multiarray._reconstruct"):
        return None
    match value.state:
        case (_, tuple() as shape, _StandIn(given=(str() as code, *_)), _, bytes() as data):
            return f"numpy {code}", shape, len(data)
    return None


def _numbers(value: Any) -> bool:
    """A long row of plain numbers, as the state of a random generator: one line, not hundreds."""
    return isinstance(value, list | tuple) and len(value) > 32 and all(type(item) in (int, float) for item in value)


def _called(value: Any) -> str:
    return value.called if isinstance(value, _StandIn) else type(value).__name__


def _leaf(name: str, value: Any) -> Leaf:
    if isinstance(value, _Tensor):
        count = 1
        for extent in value.shape:
            count *= extent
        return Leaf(name, f"{value.kind} {value.dtype}", value.shape, count * value.item_bytes, None)
    if array := _numpy(value):
        kind, shape, held = array
        return Leaf(name, kind, shape, held, None)
    if _numbers(value):
        return Leaf(name, f"{type(value).__name__} of {len(value)} numbers", None, None, repr(value))
    if isinstance(value, _Storage):
        return Leaf(name, f"storage {value.dtype}", None, None, None)
    if isinstance(value, type):
        return Leaf(name, "name", None, None, value.called if issubclass(value, _StandIn) else value.__name__)
    if isinstance(value, bytes | bytearray):
        return Leaf(name, type(value).__name__, None, len(value), None)
    return Leaf(name, type(value).__name__, None, None, value if isinstance(value, str) else repr(value))
