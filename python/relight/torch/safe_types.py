"""Safe types: what loading makes without being asked, and the plain forms in which saving writes it.

Owns: the published list (docs/reference/types.md, kept in step by a test); the reducers that make common types loadable
    by it and by torch's own weights-only loader; the names that differ between versions of libraries.
Must not: allow anything that can run code, open files or set attributes of classes, whatever its arguments are.
Invariant: nothing that a reducer here writes needs relight to be read: plain `pickle` and `torch.load` do.

numpy gets functions of our own in place of its classes: `numpy.dtype` and `numpy.ndarray` with arguments and state
chosen by an attacker can make arrays of object pointers out of bytes.
"""

from __future__ import annotations

import argparse
import collections
import copyreg
import datetime
import decimal
import enum
import fractions
import importlib
import pathlib
import pickle
import sys
import types
import uuid
import zoneinfo
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any, Literal

import torch
from relight.exceptions import InvalidArgument
from relight.torch import private

__all__ = ["GROUPS", "allowed_globals", "portable_names", "published", "reducer_for"]

Reduced = tuple[Any, ...] | str
Reducer = Callable[[Any], Any]  # the value of `__reduce__`, or NotImplemented

GROUPS = ("python", "numpy", "torch")

# ---- the list ----


def _own(cls: type[pathlib.PurePath], pure: type[pathlib.PurePath]) -> type[pathlib.PurePath]:
    """`cls` where this system can have it, else its pure form: a path of another system is still a path."""
    return cls if issubclass(pathlib.Path(".").__class__, cls) else pure


def _enum_member(cls: Any, name: Any) -> Any:
    """`getattr` as a pickle of an enum member by its name needs it, and nothing else."""
    if isinstance(cls, enum.EnumMeta) and type(name) is str and name in cls.__members__:
        return cls.__members__[name]
    raise pickle.UnpicklingError("getattr is allowed only for a member of an enum")


def _bytes_of_text(text: Any, encoding: Any = "latin1") -> bytes:
    """`_codecs.encode` as pickle protocol 2 needs it for bytes, and nothing else."""
    if type(text) is not str or encoding != "latin1":
        raise pickle.UnpicklingError("_codecs.encode is allowed only for bytes")
    return text.encode("latin1")


_PYTHON: Mapping[str, object] = {
    "_codecs.encode": _bytes_of_text,
    "argparse.Namespace": argparse.Namespace,
    "builtins.Ellipsis": Ellipsis,
    "builtins.NotImplemented": NotImplemented,
    "builtins.bool": bool,
    "builtins.bytearray": bytearray,
    "builtins.bytes": bytes,
    "builtins.complex": complex,
    "builtins.dict": dict,
    "builtins.float": float,
    "builtins.frozenset": frozenset,
    "builtins.getattr": _enum_member,  # only a member of an allowed enum
    "builtins.int": int,
    "builtins.list": list,
    "builtins.range": range,
    "builtins.set": set,
    "builtins.slice": slice,
    "builtins.str": str,
    "builtins.tuple": tuple,
    "collections.Counter": collections.Counter,
    "collections.OrderedDict": collections.OrderedDict,
    "collections.defaultdict": collections.defaultdict,
    "collections.deque": collections.deque,
    "datetime.date": datetime.date,
    "datetime.datetime": datetime.datetime,
    "datetime.time": datetime.time,
    "datetime.timedelta": datetime.timedelta,
    "datetime.timezone": datetime.timezone,
    "decimal.Decimal": decimal.Decimal,
    "fractions.Fraction": fractions.Fraction,
    "pathlib.PosixPath": _own(pathlib.PosixPath, pathlib.PurePosixPath),
    "pathlib.PurePosixPath": pathlib.PurePosixPath,
    "pathlib.PureWindowsPath": pathlib.PureWindowsPath,
    "pathlib.WindowsPath": _own(pathlib.WindowsPath, pathlib.PureWindowsPath),
    "types.SimpleNamespace": types.SimpleNamespace,
    "uuid.SafeUUID": uuid.SafeUUID,
    "uuid.UUID": uuid.UUID,
    "zoneinfo.ZoneInfo": zoneinfo.ZoneInfo,
}

_NUMPY_SCALARS = (
    *(
        "bool_",
        "bytes_",
        "str_",
        "datetime64",
        "timedelta64",
        "float16",
        "float32",
        "float64",
        "complex64",
        "complex128",
    ),
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
)
_NUMPY_GENERATORS = {
    "numpy.random._generator": ("Generator",),
    "numpy.random._mt19937": ("MT19937",),
    "numpy.random._pcg64": ("PCG64", "PCG64DXSM"),
    "numpy.random._philox": ("Philox",),
    "numpy.random._sfc64": ("SFC64",),
    "numpy.random._pickle": ("__bit_generator_ctor", "__generator_ctor", "__randomstate_ctor"),
    "numpy.random.bit_generator": ("SeedSequence", "__pyx_unpickle_SeedSequence"),
    "numpy.random.mtrand": ("RandomState",),
}


@lru_cache(maxsize=1)
def _numpy() -> Any:
    """numpy, or None: torch works without it."""
    try:
        import numpy
    except ModuleNotFoundError:
        return None
    return numpy


@lru_cache(maxsize=1)
def _numpy_table() -> Mapping[str, object]:
    np = _numpy()
    if np is None:
        return {}
    table: dict[str, object] = {f"numpy.{name}": getattr(np, name) for name in _NUMPY_SCALARS}
    table["numpy.bool"] = np.bool_  # the name of the same class in numpy 2
    table["numpy.dtype"] = _numpy_dtype
    table["numpy.ndarray"] = _numpy_array
    for module in ("numpy.core.multiarray", "numpy._core.multiarray"):  # numpy 1 and 2
        table[f"{module}._reconstruct"] = _numpy_reconstruct
        table[f"{module}.scalar"] = _numpy_scalar
    for module, names in _NUMPY_GENERATORS.items():
        try:
            loaded = importlib.import_module(module)
        except ModuleNotFoundError:  # private modules: another numpy may have moved them
            continue
        table.update({f"{module}.{name}": getattr(loaded, name) for name in names if hasattr(loaded, name)})
    return table


def _torch_table() -> Mapping[str, object]:
    return {"torch._C.Generator": torch._C.Generator}


def published() -> Mapping[str, Mapping[str, object]]:
    """What relight allows beside torch's own list, by group: the name in the pickle and what is made of it."""
    return {"python": _PYTHON, "numpy": _numpy_table(), "torch": _torch_table()}


def allowed_globals(allow: Iterable[object] = ()) -> dict[str, object]:
    """Everything that a load may make: torch's list, relight's, what the user told torch, and `allow`.

    Args:
        allow: classes or functions, their full names, or pairs of one and the name that the pickle uses for it.

    Raises:
        InvalidArgument: a name in `allow` that nothing has.
    """
    table = private.weights_only_globals()
    for group in published().values():
        table.update(group)
    table.update(_named(item) for item in torch.serialization.get_safe_globals())
    if isinstance(allow, (str, bytes)):
        raise InvalidArgument(f"allow={allow!r} is one name; give a list of names, as allow=[{allow!r}]")
    table.update(_named(item) for item in allow)
    return table


def torch_was_told() -> bool:
    """Whether the user, or another package, has told torch to allow classes that are not torch's own."""
    return any(not name.startswith("torch.") for name, _ in map(_named, torch.serialization.get_safe_globals()))


def as_torch_globals(allow: Iterable[object]) -> list[Any]:
    """`allow` in the form that torch.serialization.safe_globals takes."""
    return [_find(item) if isinstance(item, str) else item for item in allow]


def _named(item: object) -> tuple[str, object]:
    if isinstance(item, str):
        return item, _find(item)
    if isinstance(item, tuple) and len(item) == 2 and isinstance(item[1], str):
        return item[1], item[0]
    name = getattr(item, "__qualname__", None)
    if name is None:
        raise InvalidArgument(f"allow has {item!r}, which is no class, function or name; give one of these")
    return f"{getattr(item, '__module__', None) or 'builtins'}.{name}", item


def _find(name: str) -> object:
    """The object with this full name; imports its module, which the user asked for by naming it."""
    parts = name.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            found = getattr(found, part, None)
        if found is not None:
            return found
    raise InvalidArgument(
        f"allow has {name!r}, and there is nothing of this name; give its full name, as package.module.Class"
    )


# ---- numpy, loading ----

_SIMPLE_KINDS = "biufcSUMm?"  # no objects, whose items are addresses, and no void


def _checked_dtype(spec: Any) -> Any:
    np = _numpy()
    dtype = spec if isinstance(spec, np.dtype) else np.dtype(spec)
    if dtype.fields is not None:
        if dtype.subdtype is None and all(_checked_dtype(field[0]) is not None for field in dtype.fields.values()):
            return dtype
    elif dtype.subdtype is not None:
        if _checked_dtype(dtype.subdtype[0]) is not None:
            return dtype
    elif dtype.kind in _SIMPLE_KINDS:
        return dtype
    raise pickle.UnpicklingError(f"numpy dtype {dtype} is not allowed: only numbers, text, bytes and times are")


def _numpy_dtype(spec: Any, align: Any = False, copy: Any = False) -> Any:
    if type(spec) not in (str, list):
        raise pickle.UnpicklingError("a numpy dtype is allowed only by its code")
    return _checked_dtype(spec)


def check_dtype_state(dtype: Any, state: Any) -> None:
    """Refuses a pickled state that would change a dtype: numpy would believe flags that say how to free its items.

    What the state of an ordinary dtype of this machine says is what its code has said already.
    """
    native = "<" if sys.byteorder == "little" else ">"
    order, parts = (state[1], state[2:5]) if isinstance(state, tuple) and len(state) >= 5 else (None, None)
    if order not in ("|", "=", native) or parts != (None, None, None) or dtype.kind in "mMV":
        raise pickle.UnpicklingError(
            f"numpy dtype {dtype} in the form of numpy itself, of another byte order or with parts, needs "
            "weights_only=False"
        )


def _numpy_array(
    shape: Any, dtype: Any, buffer: Any = None, offset: Any = 0, strides: Any = None, order: Any = "C"
) -> Any:
    if type(buffer) is not bytearray:
        raise pickle.UnpicklingError("a numpy array is allowed only over a bytearray of its own")
    if offset != 0 or strides is not None:
        # numpy believes a negative offset and reads what lies before the buffer; the array that is saved has neither.
        raise pickle.UnpicklingError("a numpy array is allowed only from the start of its bytes, without strides")
    np = _numpy()
    return np.ndarray(tuple(shape), _checked_dtype(dtype), buffer, 0, None, order)


def _numpy_reconstruct(cls: Any, shape: Any, code: Any) -> Any:
    if cls is not _numpy_array:
        raise pickle.UnpicklingError("a subclass of numpy.ndarray is not allowed")
    np = _numpy()
    return np.ndarray((0,), np.uint8)


def restore_array(array: Any, state: Any) -> None:
    """numpy's own `__setstate__` of a plain array, once its dtype is known to hold no objects."""
    version, shape, dtype, fortran, raw = state
    if type(raw) is str:  # from Python 2
        raw = raw.encode("latin1")
    if type(raw) is not bytes or not isinstance(dtype, _numpy().dtype):
        raise pickle.UnpicklingError("a numpy array of objects is not allowed")
    array.__setstate__((version, tuple(shape), _checked_dtype(dtype), bool(fortran), raw))


# Where a generator stands in its block of numbers: name of the generator, the member of its state, its last place.
# numpy takes any number, and the next draw then reads that far outside of the block.
_PLACES = {"MT19937": ("pos", 624), "Philox": ("buffer_pos", 4)}


def check_generator_state(state: Any) -> None:
    """Refuses the state of a generator of numpy that stands outside of its own numbers.

    Raises:
        ValueError: it does. A state of another form is left to numpy.
    """
    if isinstance(state, (tuple, list)) and len(state) >= 3:  # of RandomState.get_state(legacy=True)
        state = {"bit_generator": state[0], "pos": state[2]}
    if not isinstance(state, Mapping) or state.get("bit_generator") not in _PLACES:
        return
    member, last = _PLACES[state["bit_generator"]]
    inner = state.get("state")
    places = [one[member] for one in (state, inner) if isinstance(one, Mapping) and member in one]
    for place in places:
        if not 0 <= int(place) <= last:
            raise ValueError(f"{member} of {state['bit_generator']} is {place}, and its last place is {last}")


def check_torch_generator(inst: Any, state: Any) -> None:
    """Refuses a state that is none for a `torch.Generator`, which takes what it gets for a tuple, and crashes."""
    if not isinstance(inst, torch.Generator):
        return
    if type(state) is tuple and len(state) == 3:
        seed, offset, values = state
        whole = type(seed) is int and (offset is None or type(offset) is int)
        if whole and isinstance(values, torch.Tensor) and values.dtype == torch.uint8:
            return
    raise pickle.UnpicklingError("the state of a torch.Generator is none")


def check_generator(inst: Any) -> None:
    """Refuses a generator of numpy that was just given a state which `check_generator_state` refuses."""
    np = _numpy()
    if np is None:
        return
    if isinstance(inst, np.random.Generator):  # numpy 1 gives the state to it, not to its bits
        inst = inst.bit_generator
    if isinstance(inst, np.random.RandomState):
        check_generator_state(inst.get_state(legacy=False))
    elif isinstance(inst, np.random.BitGenerator):
        check_generator_state(inst.state)


def _numpy_scalar(dtype: Any, raw: Any = b"") -> Any:
    if type(raw) is str:  # from Python 2
        raw = raw.encode("latin1")
    if type(raw) is not bytes:
        raise pickle.UnpicklingError("a numpy scalar is allowed only from its bytes")
    return _numpy().frombuffer(raw, _checked_dtype(dtype), count=1)[0]


# ---- saving ----


def _reduce_deque(obj: Any) -> Reduced:
    # Its own form appends to the object, which weights-only loaders do for lists only.
    return collections.deque, (list(obj), obj.maxlen)


def _reduce_defaultdict(obj: Any) -> Reduced:
    return collections.defaultdict, (obj.default_factory, dict(obj))


def _reduce_zone(obj: Any) -> Any:
    # Its own form is a bound method, which needs getattr. One read from a file has no key and no pickle.
    return (zoneinfo.ZoneInfo, (obj.key,)) if obj.key is not None else NotImplemented


_BY_VALUE = (int, str, float, bool, bytes, type(None))


def _reduce_enum(obj: Any) -> Any:
    """By name where the value may not be equal to itself after loading (a dataclass that holds a partial)."""
    plain = type(obj._value_) in _BY_VALUE or isinstance(obj, _BY_VALUE)
    if plain or type(obj).__members__.get(obj._name_) is not obj:
        return NotImplemented
    return getattr, (type(obj), obj._name_)


def _reduce_array(obj: Any) -> Any:
    """The array over a bytearray: names no private module of numpy, so that 1.26 and 2 both read it."""
    np = _numpy()
    dtype = obj.dtype
    if dtype.hasobject or dtype.metadata:
        return NotImplemented
    spec: Any = dtype.str
    if dtype.fields is not None:
        spec = dtype.descr
    if (dtype.kind == "V" and dtype.fields is None) or np.dtype(spec) != dtype:
        return NotImplemented
    order: Literal["C", "F"] = "F" if obj.flags.f_contiguous and not obj.flags.c_contiguous else "C"
    return np.ndarray, (obj.shape, spec, bytearray(obj.tobytes(order)), 0, None, order)


def _reduce_dtype(obj: Any) -> Any:
    np = _numpy()
    if obj.kind not in _SIMPLE_KINDS or obj.metadata or np.dtype(obj.str) != obj:
        return NotImplemented
    return np.dtype, (obj.str,)


def _reduce_scalar(obj: Any) -> Any:
    """The class called with a Python value, where that is exact; numpy's form names a private module."""
    np = _numpy()
    cls = type(obj)
    if isinstance(obj, (np.datetime64, np.timedelta64)):
        unit, count = np.datetime_data(obj.dtype)
        number = int(obj.astype(np.int64))
        return cls, ((number,) if unit == "generic" else (number, unit if count == 1 else (unit, count)))
    if isinstance(obj, (np.longdouble, np.clongdouble, np.void)):
        return NotImplemented
    return cls, (obj.item(),)


@lru_cache(maxsize=1)
def _by_class() -> Mapping[type, Reducer]:
    table: dict[type, Reducer] = {
        collections.deque: _reduce_deque,
        collections.defaultdict: _reduce_defaultdict,
        zoneinfo.ZoneInfo: _reduce_zone,
    }
    np = _numpy()
    if np is not None:
        table[np.ndarray] = _reduce_array
    return table


def reducer_for(cls: type) -> Reducer | None:
    """How objects of exactly this class are written, or None: as they say themselves."""
    if cls in copyreg.dispatch_table:
        return None  # the user has said how
    found = _by_class().get(cls)
    if found is not None:
        return found
    if issubclass(cls, enum.Enum) and cls.__reduce_ex__ is enum.Enum.__reduce_ex__:
        return _reduce_enum
    np = _numpy()
    if np is not None:
        if issubclass(cls, np.dtype):
            return _reduce_dtype
        if issubclass(cls, np.generic) and cls.__module__ == "numpy":
            return _reduce_scalar
    return None


def class_name(cls: type) -> Any:
    """The name under which a class is written, where its own is new in some version; else NotImplemented."""
    np = _numpy()
    return "bool_" if np is not None and cls is np.bool_ else NotImplemented


# Names of modules that only some versions have, and the name that all of them read.
_RENAMED = {b"numpy._core.": b"numpy.core.", b"pathlib._local\n": b"pathlib\n"}


def portable_names(data: bytes, protocol: int) -> bytes:
    """The pickle with private module names replaced by those that older and newer versions have.

    What is left over for this after the reducers above is rare (long doubles, matrices, paths of Python 3.13). From
    protocol 4 on names are framed text and stay as they are.
    """
    if protocol >= 4 or not any(b"c" + name in data for name in _RENAMED):
        return data
    import pickletools

    edits: list[tuple[int, bytes, bytes]] = []
    for code, _, position in pickletools.genops(data):
        if code.name == "GLOBAL" and position is not None:
            for old, new in _RENAMED.items():
                if data.startswith(old, position + 1):
                    edits.append((position + 1, old, new))
    pieces: list[bytes] = []
    done = 0
    for start, old, new in edits:
        pieces += [data[done:start], new]
        done = start + len(old)
    return b"".join([*pieces, data[done:]])
