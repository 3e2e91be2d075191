"""The weights-only unpickler: makes nothing that is not on the list it was given.

Owns: the opcodes of pickle protocols 2 to 5, and which of them may touch which objects.
Must not: import a module or look a name up outside its table; set an attribute of a class or a function.
Invariant: a callable is called only if it came from the table, and only instances of classes in the table are given
state.

The rules are those of torch's `_weights_only_unpickler`, which is private, differs between torch versions and takes
twice the time: GLOBAL looks into the table; REDUCE and NEWOBJ take only what the table holds; BUILD, APPEND and SETITEM
take only kinds that cannot be a class or a function. Memo, frames and marks are as in the standard library's `pickle`.
"""

from __future__ import annotations

import enum
import struct
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING  # the names of Python 2, which protocol 2 writes
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from io import BytesIO
from pickle import PickleError, UnpicklingError, decode_long
from typing import Any

import torch
from relight.exceptions import CheckpointError
from relight.torch import private, safe_types

__all__ = ["NotAllowed", "Refused", "SafeUnpickler"]

_CONTAINERS = (deque, defaultdict, set, frozenset, OrderedDict, list, tuple, dict)  # may hold what is not allowed
_SETITEM_TYPES = (dict, OrderedDict, Counter)
# One number in the file would make them as large as it says; what is pickled names its items.
_SIZED_BY_A_NUMBER = (bytes, bytearray)
_FILLED_BY_A_RANGE = (list, tuple, set, frozenset, deque, dict, OrderedDict, Counter)
# What calls of the table raise for arguments that no pickler wrote. Memory and interrupts are not the file's fault.
_BROKEN = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, SystemError, TypeError, ValueError),
    *(PickleError, struct.error),  # SystemError: of torch.Generator, for a state that is none
)
# Even if the user allows them: their names stand for the operating system.
_BLOCKED_MODULES = frozenset({"sys", "os", "posix", "nt", "subprocess"})


class Refused:
    """Stands in a lenient load for an object of a type that is not allowed. It does nothing at all."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"<not allowed: {self.name}>"


class SafeUnpickler:
    """Reads one pickle.

    Args:
        data: the pickle.
        table: full name to the object that it stands for.
        persistent_load: makes a storage of its persistent id.
        lenient: put a `Refused` in the place of what is not allowed, instead of raising.
        users_code: the table holds classes of the caller, whose own errors are his to see.
    """

    def __init__(
        self,
        data: bytes,
        *,
        table: Mapping[str, object],
        persistent_load: Callable[[Any], object],
        lenient: bool = False,
        users_code: bool = False,
    ) -> None:
        file = BytesIO(data)
        self._read = file.read
        self._readline = file.readline
        self._table = table
        self._persistent_load = persistent_load
        self._lenient = lenient
        self._users_code = users_code
        self._callers: Exception | None = None
        self.refused: list[str] = []
        # By identity: what is in the table stays alive as long as this object does, and not everything hashes.
        self._callables = {id(item) for item in table.values()}
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._memo: dict[int, Any] = {}

    def load(self) -> Any:
        """The object.

        Raises:
            NotAllowed: a name that the table lacks.
            UnpicklingError: the pickle is damaged, or does what it may not.
        """
        read, dispatch = self._read, _DISPATCH
        try:
            while True:
                code = read(1)
                if code == b".":
                    return self._stack.pop()
                dispatch[code](self)
        except (CheckpointError, UnpicklingError):
            raise
        except (KeyError, IndexError, struct.error, UnicodeDecodeError) as error:
            if error is self._callers:
                raise
            raise UnpicklingError(
                f"the pickle is damaged or has an operation that is not supported: {error!r}"
            ) from error
        except _BROKEN as error:
            if self._users_code or error is self._callers:
                raise
            raise UnpicklingError(
                f"its pickle cannot be followed ({error!r}): it is damaged, made by hand, or of a torch that this one "
                "does not read"
            ) from error

    # ---- names and calls ----

    def _global(self, module: str, name: str) -> None:
        if (module, name) in NAME_MAPPING:
            module, name = NAME_MAPPING[module, name]
        elif module in IMPORT_MAPPING:
            module = IMPORT_MAPPING[module]
        full = f"{module}.{name}"
        found = self._table.get(full, _MISSING)
        if found is _MISSING or module.partition(".")[0] in _BLOCKED_MODULES:
            if not self._lenient:
                raise NotAllowed(full)
            if full not in self.refused:
                self.refused.append(full)
            found = Refused(full)
        self._stack.append(found)

    def _load_global(self) -> None:
        module = self._readline()[:-1].decode("utf-8")
        self._global(module, self._readline()[:-1].decode("utf-8"))

    def _load_stack_global(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if type(name) is not str or type(module) is not str:
            raise UnpicklingError("the name of a global is not text")
        self._global(module, name)

    def _load_reduce(self) -> None:
        args = self._stack.pop()
        function = self._stack[-1]
        if type(function) is Refused:
            self._stack[-1] = Refused(function.name)
            return
        if id(function) not in self._callables:
            raise UnpicklingError(f"{type(function).__qualname__} is called, which is not on the list")
        if self._lenient and _holds_refused(args):
            if function is defaultdict and type(args[0]) is Refused:
                args = (None, *args[1:])
            elif function not in _CONTAINERS:
                self._stack[-1] = Refused(_first_refused(args))
                return
        if function in _SIZED_BY_A_NUMBER and args and type(args[0]) is int:
            raise UnpicklingError(f"{function.__qualname__} of a number is made, which would only take memory")
        if function in _FILLED_BY_A_RANGE and any(type(item) is range for item in args):
            raise UnpicklingError(f"a {function.__qualname__} of a range is made, which would only take memory")
        result = function(*args)
        self._stack[-1] = result
        if private.is_sparse_class(function):
            private.sparse_to_validate().append(result)

    def _load_newobj(self) -> None:
        args = self._stack.pop()
        self._make(self._stack.pop(), args, {})

    def _load_newobj_ex(self) -> None:
        kwargs, args = self._stack.pop(), self._stack.pop()
        self._make(self._stack.pop(), args, kwargs)

    def _make(self, cls: Any, args: Any, kwargs: Any) -> None:
        if type(cls) is Refused:
            self._stack.append(Refused(cls.name))
            return
        if cls is torch.nn.Parameter:
            self._stack.append(torch.nn.Parameter(*args))
            return
        if id(cls) not in self._callables or not isinstance(cls, type):
            raise UnpicklingError(f"an object of {cls!r} is made, which is not on the list")
        result = cls.__new__(cls, *args, **kwargs)
        if private.is_sparse_class(cls):
            private.sparse_to_validate().append(result)
        self._stack.append(result)

    def _load_build(self) -> None:
        state = self._stack.pop()
        inst = self._stack[-1]
        cls = type(inst)
        if cls is Refused:
            return
        if cls is torch.Tensor:
            inst.set_(*state)  # files of old torch versions
        elif cls is torch.nn.Parameter:
            inst.__setstate__(state)
        elif cls is OrderedDict:
            inst.__dict__.update(state)
        elif cls.__module__.partition(".")[0] == "numpy" and _is_numpy(inst, "dtype"):
            safe_types.check_dtype_state(inst, state)
        elif cls.__module__ == "numpy" and _is_numpy(inst, "ndarray"):
            safe_types.restore_array(inst, state)
        elif id(cls) not in self._callables or isinstance(inst, (type, enum.Enum)):
            # a member of an enum is one object for the whole process: state would change it for everybody
            raise UnpicklingError(f"state is given to {cls.__module__}.{cls.__qualname__}, which is not on the list")
        elif hasattr(inst, "__setstate__"):
            safe_types.check_torch_generator(inst, state)
            inst.__setstate__(state)
            safe_types.check_generator(inst)
        else:
            slots = None
            if isinstance(state, tuple) and len(state) == 2:
                state, slots = state
            if state:
                inst.__dict__.update(state)
            for name, value in (slots or {}).items():
                setattr(inst, name, value)

    def _load_persid(self) -> None:
        pid = self._stack.pop()
        if type(pid) is not tuple or not pid or pid[0] not in ("storage", b"storage"):
            raise UnpicklingError("a persistent id that is no storage")
        try:
            storage = self._persistent_load(pid)
        except Exception as error:
            self._callers = error  # of `map_location`, say: no word on the file
            raise
        self._stack.append(storage)

    # ---- containers ----

    def _pop_mark(self) -> list[Any]:
        items = self._stack
        self._stack = self._marks.pop()
        return items

    def _load_mark(self) -> None:
        self._marks.append(self._stack)
        self._stack = []

    def _load_append(self) -> None:
        item = self._stack.pop()
        self._extend([item])

    def _load_appends(self) -> None:
        items = self._pop_mark()
        self._extend(items)

    def _extend(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is list:
            target.extend(items)
        elif id(type(target)) in self._callables and hasattr(target, "extend"):
            target.extend(items)  # a deque, or a list class that the user allowed
        elif type(target) is not Refused:
            raise UnpicklingError(f"items are appended to a {type(target).__qualname__}")

    def _load_setitem(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._update([key, value])

    def _load_setitems(self) -> None:
        items = self._pop_mark()
        self._update(items)

    def _update(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) not in _SETITEM_TYPES and not (
            isinstance(target, dict) and id(type(target)) in self._callables
        ):
            if type(target) is Refused:
                return
            raise UnpicklingError(f"items are set in a {type(target).__qualname__}")
        for i in range(0, len(items), 2):
            target[items[i]] = items[i + 1]

    def _load_additems(self) -> None:
        items = self._pop_mark()
        target = self._stack[-1]
        if type(target) is not set:
            raise UnpicklingError(f"items are added to a {type(target).__qualname__}")
        target.update(items)

    def _load_tuple(self) -> None:
        items = self._pop_mark()
        self._stack.append(tuple(items))

    def _load_frozenset(self) -> None:
        items = self._pop_mark()
        self._stack.append(frozenset(items))

    def _load_tuple1(self) -> None:
        self._stack[-1] = (self._stack[-1],)

    def _load_tuple2(self) -> None:
        self._stack[-2:] = [(self._stack[-2], self._stack[-1])]

    def _load_tuple3(self) -> None:
        self._stack[-3:] = [(self._stack[-3], self._stack[-2], self._stack[-1])]

    # ---- memo ----

    def _load_binput(self) -> None:
        self._memo[self._read(1)[0]] = self._stack[-1]

    def _load_long_binput(self) -> None:
        self._memo[_U32(self._read(4))[0]] = self._stack[-1]

    def _load_memoize(self) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def _load_binget(self) -> None:
        self._stack.append(self._memo[self._read(1)[0]])

    def _load_long_binget(self) -> None:
        self._stack.append(self._memo[_U32(self._read(4))[0]])

    # ---- values ----

    def _take(self, count: int) -> bytes:
        data = self._read(count)
        if len(data) != count:
            raise UnpicklingError("the pickle is cut short")
        return data

    def _load_binint1(self) -> None:
        self._stack.append(self._read(1)[0])

    def _load_binint2(self) -> None:
        self._stack.append(_U16(self._read(2))[0])

    def _load_binint(self) -> None:
        self._stack.append(_I32(self._read(4))[0])

    def _load_binfloat(self) -> None:
        self._stack.append(_F64(self._read(8))[0])

    def _load_long1(self) -> None:
        self._stack.append(decode_long(self._take(self._read(1)[0])))

    def _load_long4(self) -> None:
        self._stack.append(decode_long(self._take(_U32(self._read(4))[0])))

    def _load_binunicode(self) -> None:
        self._stack.append(str(self._take(_U32(self._read(4))[0]), "utf-8", "surrogatepass"))

    def _load_short_binunicode(self) -> None:
        self._stack.append(str(self._take(self._read(1)[0]), "utf-8", "surrogatepass"))

    def _load_binunicode8(self) -> None:
        self._stack.append(str(self._take(_U64(self._read(8))[0]), "utf-8", "surrogatepass"))

    def _load_short_binstring(self) -> None:
        self._stack.append(self._take(self._read(1)[0]).decode("utf-8"))  # as torch.load's default encoding

    def _load_short_binbytes(self) -> None:
        self._stack.append(self._take(self._read(1)[0]))

    def _load_binbytes(self) -> None:
        self._stack.append(self._take(_U32(self._read(4))[0]))

    def _load_binbytes8(self) -> None:
        self._stack.append(self._take(_U64(self._read(8))[0]))

    def _load_bytearray8(self) -> None:
        self._stack.append(bytearray(self._take(_U64(self._read(8))[0])))

    def _load_proto(self) -> None:
        self._read(1)

    def _load_frame(self) -> None:
        self._take(8)  # only says how to buffer a stream; all of it is here

    def _load_pop(self) -> None:
        if self._stack:
            self._stack.pop()
        else:
            self._pop_mark()

    def _load_pop_mark(self) -> None:
        self._pop_mark()


class NotAllowed(UnpicklingError):
    """The pickle names something that is not on the list."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} is not on the list")
        self.name = name


_MISSING = object()
_U16 = struct.Struct("<H").unpack
_U32 = struct.Struct("<I").unpack
_I32 = struct.Struct("<i").unpack
_U64 = struct.Struct("<Q").unpack
_F64 = struct.Struct(">d").unpack


def _is_numpy(inst: Any, name: str) -> bool:
    np = safe_types._numpy()
    return np is not None and (isinstance(inst, np.dtype) if name == "dtype" else type(inst) is np.ndarray)


def _holds_refused(args: Any) -> bool:
    return any(type(item) is Refused or (type(item) in (tuple, list) and _holds_refused(item)) for item in args)


def _first_refused(args: Any) -> str:
    for item in args:
        if type(item) is Refused:
            return item.name
        if type(item) in (tuple, list) and _holds_refused(item):
            return _first_refused(item)
    raise AssertionError("called only when there is one")


def _constant(make: Callable[[], object]) -> Callable[[SafeUnpickler], None]:
    return lambda unpickler: unpickler._stack.append(make())


_DISPATCH: dict[bytes, Callable[[SafeUnpickler], None]] = {
    b"c": SafeUnpickler._load_global,
    b"\x93": SafeUnpickler._load_stack_global,
    b"R": SafeUnpickler._load_reduce,
    b"\x81": SafeUnpickler._load_newobj,
    b"\x92": SafeUnpickler._load_newobj_ex,
    b"b": SafeUnpickler._load_build,
    b"Q": SafeUnpickler._load_persid,
    b"(": SafeUnpickler._load_mark,
    b"a": SafeUnpickler._load_append,
    b"e": SafeUnpickler._load_appends,
    b"s": SafeUnpickler._load_setitem,
    b"u": SafeUnpickler._load_setitems,
    b"\x90": SafeUnpickler._load_additems,
    b"t": SafeUnpickler._load_tuple,
    b"\x85": SafeUnpickler._load_tuple1,
    b"\x86": SafeUnpickler._load_tuple2,
    b"\x87": SafeUnpickler._load_tuple3,
    b"\x91": SafeUnpickler._load_frozenset,
    b"q": SafeUnpickler._load_binput,
    b"r": SafeUnpickler._load_long_binput,
    b"\x94": SafeUnpickler._load_memoize,
    b"h": SafeUnpickler._load_binget,
    b"j": SafeUnpickler._load_long_binget,
    b"K": SafeUnpickler._load_binint1,
    b"M": SafeUnpickler._load_binint2,
    b"J": SafeUnpickler._load_binint,
    b"G": SafeUnpickler._load_binfloat,
    b"\x8a": SafeUnpickler._load_long1,
    b"\x8b": SafeUnpickler._load_long4,
    b"X": SafeUnpickler._load_binunicode,
    b"\x8c": SafeUnpickler._load_short_binunicode,
    b"\x8d": SafeUnpickler._load_binunicode8,
    b"U": SafeUnpickler._load_short_binstring,
    b"C": SafeUnpickler._load_short_binbytes,
    b"B": SafeUnpickler._load_binbytes,
    b"\x8e": SafeUnpickler._load_binbytes8,
    b"\x96": SafeUnpickler._load_bytearray8,
    b"\x80": SafeUnpickler._load_proto,
    b"\x95": SafeUnpickler._load_frame,
    b"0": SafeUnpickler._load_pop,
    b"1": SafeUnpickler._load_pop_mark,
    b"N": _constant(lambda: None),
    b"\x88": _constant(lambda: True),
    b"\x89": _constant(lambda: False),
    b")": _constant(lambda: ()),
    b"]": _constant(lambda: []),
    b"}": _constant(lambda: {}),
    b"\x8f": _constant(lambda: set()),
}
