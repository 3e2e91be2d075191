"""Unpickling: turns a torch.save archive, from any tier, into the object.

Owns: how storages get their bytes (read at once, or mapped), where they go (`map_location`), what may be made.
Must not: write, know of tags, change an object of the caller.
Invariant: with `weights_only` nothing is made that is not on the published list or named by the caller; every byte that
is
    read is verified (a mapped byte is not: it is read when it is used).

Source: `torch.serialization._load` of torch 2.4 to 2.13, whose rules for locations, byte order and sparse tensors these
are.
"""

from __future__ import annotations

import io
import mmap as _mmap
import os
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from relight.exceptions import CorruptCheckpoint, InvalidArgument, ObjectNotAllowed
from relight.torch import paths, private, quiet_gc, safe_types
from relight.torch.archive import ImageLike
from relight.torch.buffers import writable_view
from relight.torch.safe_unpickler import NotAllowed, Refused, SafeUnpickler
from torch.storage import TypedStorage, UntypedStorage

__all__ = ["MapLocation", "load_image", "load_leniently"]

MapLocation = str | torch.device | dict[str, str] | Callable[[Any, str], Any] | None


def load_image(
    image: ImageLike,
    *,
    map_location: MapLocation = None,
    weights_only: bool | None = True,
    mmap: bool = False,
    allow: Iterable[object] = (),
    pickle_module: Any = None,
    encoding: str = "utf-8",
) -> Any:
    """The object in `image`.

    Args:
        map_location: as in torch.load: a device, a dict or a function (storage, location) -> storage or None.
        weights_only: make only what is on the published list (docs/reference/types.md) or in `allow`. False runs
        whatever
            code the file holds: only for files that you trust.
        mmap: back the tensors by a private copy-on-write mapping of the file instead of reading it. Their bytes are not
            verified. An image in the memory tier is read in any case.
        allow: classes, functions or their full names, which are trusted beside the list.
        pickle_module: with weights_only=False, whose `Unpickler` to use.

    Raises:
        ObjectNotAllowed: names what is not on the list, and where it is.
        CorruptCheckpoint: the bytes are not what was written, or are no archive of torch.save.
        InvalidArgument: the file is of another kind; or a location that this machine does not have.
    """
    allow = list(allow)
    reader = _Reader(image, map_location, mmap)
    with quiet_gc.paused(), private.map_location_set(map_location):
        if weights_only is None or weights_only:  # None is torch's word for its default, which is no code either
            return _load_safely(reader, allow)
        result = _load_trusting(reader, pickle_module or pickle, encoding)
        private.validate_sparse()
    return result


def load_leniently(image: ImageLike, *, mmap: bool, allow: Iterable[object] = ()) -> Any:
    """The object, with a `Refused` in the place of whatever is not allowed."""
    reader = _Reader(image, None, mmap, cpu_only=True)
    with quiet_gc.paused(), private.map_location_set(None):
        unpickler = SafeUnpickler(
            reader.pickle, table=safe_types.allowed_globals(allow), persistent_load=reader.persistent_load, lenient=True
        )
        try:
            result = unpickler.load()
            reader.check_result()
        except pickle.UnpicklingError as error:
            raise CorruptCheckpoint(f"{image.path}: {error}", path=image.path) from error
        finally:
            private.sparse_to_validate().clear()
    return result


def _load_safely(reader: _Reader, allow: list[object]) -> Any:
    table = safe_types.allowed_globals(allow)
    unpickler = SafeUnpickler(
        reader.pickle,
        table=table,
        persistent_load=reader.persistent_load,
        users_code=bool(allow) or safe_types.torch_was_told(),
    )
    try:
        result = unpickler.load()
        reader.check_result()
    except pickle.UnpicklingError as error:
        raise _refusal(reader, table, error) from error
    finally:
        private.sparse_to_validate().clear()
    return result


def _refusal(reader: _Reader, table: dict[str, object], error: Exception) -> Exception:
    """The error for a file that the weights-only loader does not take: all types it lacks, and where they are."""
    path = reader.image.path
    # Everything again, with marks in the place of what is refused, and no data: only to name it.
    bare = _Reader(reader.image, "meta", False)
    unpickler = SafeUnpickler(bare.pickle, table=table, persistent_load=bare.persistent_load, lenient=True)
    try:
        with private.map_location_set("meta"):
            result = unpickler.load()
    except (pickle.UnpicklingError, TypeError, ValueError, AttributeError, RuntimeError):
        result = None
    finally:
        private.sparse_to_validate().clear()
    names = unpickler.refused
    if isinstance(error, NotAllowed) and error.name not in names:
        names = [error.name, *names]  # the second reading stopped before it: torch cannot make everything on meta
    if not names:
        return CorruptCheckpoint(f"{path}: {error}", path=path)
    where = [f"{at or 'the object'} ({part.name})" for at, part in paths.walk(result) if type(part) is Refused]
    places = f" at {', '.join(where[:5])}{' and more' if len(where) > 5 else ''}" if where else ""
    return ObjectNotAllowed(
        f"{path}: holds {', '.join(names)}{places}, which is not on the list of what loading makes unasked. If you "
        f"trust the file, pass allow={names!r} or weights_only=False; relight.open gives its tensors without either",
        path=path,
        name=names[0],
    )


def _load_trusting(reader: _Reader, pickle_module: Any, encoding: str) -> Any:
    class Unpickler(pickle_module.Unpickler):  # type: ignore[misc]  # the caller's pickle module
        def find_class(self, module: str, name: str) -> Any:
            if "Storage" in name:
                try:
                    return private.storage_type(name)
                except KeyError:
                    pass  # some other class with that word in its name
            return super().find_class("torch._tensor" if module == "torch.tensor" else module, name)

    unpickler = Unpickler(io.BytesIO(reader.pickle), encoding=encoding)
    unpickler.persistent_load = reader.persistent_load
    return unpickler.load()


# ---- storages ----


class _Reader:
    """The entries of one image, and the storages made of them."""

    def __init__(self, image: ImageLike, map_location: MapLocation, mmap: bool, *, cpu_only: bool = False) -> None:
        self.image = image
        self._entries = list(image.entries)  # once: the engine makes the list anew each time
        self._index = {entry.name: number for number, entry in enumerate(self._entries)}
        self._check_kind()
        self._cpu_only = cpu_only
        if not (map_location is None or isinstance(map_location, (str, torch.device, dict)) or callable(map_location)):
            raise InvalidArgument(
                f"map_location={map_location!r} is no location; give a device or its name, a dict, or a function"
            )
        self._asked_for = str(map_location) if isinstance(map_location, (str, torch.device)) else None
        self._restore = private.restore_location(map_location)
        self._meta = isinstance(map_location, (str, torch.device)) and str(map_location).partition(":")[0] == "meta"
        self._fake = private.in_fake_mode()
        self._swap = self._is_other_byte_order()
        self._loaded: dict[str, TypedStorage] = {}
        self._placed: dict[str, int] = {}  # bytes of each, before a tensor was made of it
        self.pickle = image.read(self._index["data.pkl"])
        self._raw: dict[str, UntypedStorage] = {}
        if not self._meta and not self._fake:
            self._raw = self._mapped() if mmap and os.path.isfile(image.path) else self._filled()

    def _check_kind(self) -> None:
        path = self.image.path
        if "constants.pkl" in self._index:
            raise InvalidArgument(f"{path} is a TorchScript archive; load it with torch.jit.load", path=path)
        if "data.pkl" not in self._index:
            raise CorruptCheckpoint(f"{path} is no torch.save archive: it has no data.pkl", path=path)

    def _is_other_byte_order(self) -> bool:
        number = self._index.get("byteorder")
        if number is None:
            default = torch.serialization.get_default_load_endianness()
            name = "little" if default is None else default.name.lower()
            return name != "native" and name != sys.byteorder
        name = self.image.read(number).decode("ascii", "replace")
        if name not in ("little", "big"):
            raise CorruptCheckpoint(f"{self.image.path}: byte order {name!r} is unknown", path=self.image.path)
        return name != sys.byteorder

    def _data(self) -> Iterator[tuple[int, Any]]:
        for number, entry in enumerate(self._entries):
            if entry.name.startswith("data/") and entry.length:
                yield number, entry

    def _filled(self) -> dict[str, UntypedStorage]:
        """All data entries, read and verified in one call, in parallel."""
        raw: dict[str, UntypedStorage] = {}
        targets = []
        for number, entry in self._data():
            storage = raw[entry.name[5:]] = private.new_storage(entry.length)
            targets.append((number, 0, writable_view(storage)))
        self.image.read_into(targets)
        return raw

    def _mapped(self) -> dict[str, UntypedStorage]:
        """All data entries, as parts of one private mapping: what is written to them stays in this process."""
        entries = [entry for _, entry in self._data()]
        if not entries:
            return {}
        for entry in entries:
            if not entry.stored:
                raise InvalidArgument(
                    f"{self.image.path}: {entry.name} is compressed and cannot be mapped; load it with mmap=False",
                    path=self.image.path,
                )
        with open(self.image.path, "rb") as file:
            if os.fstat(file.fileno()).st_size < self.image.length:
                raise CorruptCheckpoint(f"{self.image.path} was cut short while it was opened", path=self.image.path)
            mapping = _mmap.mmap(file.fileno(), self.image.length, access=_mmap.ACCESS_COPY)
        # The tensor keeps the mapping alive, and each slice of its storage keeps that.
        whole = torch.frombuffer(mapping, dtype=torch.uint8).untyped_storage()
        return {entry.name[5:]: whole[entry.offset : entry.offset + entry.length] for entry in entries}

    def persistent_load(self, saved: Any) -> TypedStorage:
        """The storage that a persistent id stands for: ("storage", kind, key, location, numel)."""
        if len(saved) != 5:  # files of old torch versions may have a view as the sixth; torch.load refuses it as well
            raise pickle.UnpicklingError(f"a storage is named by {len(saved)} values, not by 5")
        _, kind, key, location, numel = saved
        if isinstance(location, bytes):  # from Python 2
            location = location.decode("ascii", "replace")
        known = kind is UntypedStorage or isinstance(getattr(kind, "dtype", None), torch.dtype)
        if not (known and type(key) is str and type(location) is str and type(numel) is int and numel >= 0):
            raise pickle.UnpicklingError(f"no storage can have the name {saved!r:.200}")
        found = self._loaded.get(key)
        if found is not None:
            return found
        dtype: torch.dtype = torch.uint8 if kind is UntypedStorage else kind.dtype
        nbytes = numel * dtype.itemsize
        storage: Any = self._place(self._bytes(key, nbytes), dtype, location)
        typed: TypedStorage = private.typed_storage(storage, dtype)
        self._loaded[key] = typed
        self._placed[key] = 0 if self._meta or self._fake else storage.nbytes()
        return typed

    def check_result(self) -> None:
        """Refuses tensors that reach outside of the bytes in the file.

        torch makes a storage longer for a tensor that is said to need it, and the rest holds whatever was in memory. It
        takes any indices of a sparse tensor, and writes out of bounds when that is used.
        """
        if self._meta or self._fake:
            return
        path = self.image.path
        for key, typed in self._loaded.items():
            nbytes = private.untyped_of(typed).nbytes()
            if nbytes > self._placed[key]:
                raise CorruptCheckpoint(
                    f"{path}: data/{key} has {self._placed[key]} bytes, its tensors need {nbytes}", path=path
                )
        if private.sparse_to_validate():
            try:
                private.validate_sparse(always=True)
            except RuntimeError as error:
                raise CorruptCheckpoint(f"{path}: a sparse tensor is damaged: {error}", path=path) from error

    def _bytes(self, key: str, nbytes: int) -> UntypedStorage:
        if self._meta or self._fake:
            storage = private.new_storage(nbytes, "meta")
            number = self._index.get(f"data/{key}")
            if number is not None:
                private.set_checkpoint_offset(storage, self._entries[number].offset)
            return storage
        if not nbytes:
            return private.new_storage(0)
        raw = self._raw.pop(key, None)
        if raw is None or raw.nbytes() < nbytes:
            have = 0 if raw is None else raw.nbytes()
            path = self.image.path
            raise CorruptCheckpoint(f"{path}: data/{key} has {have} bytes, its tensors need {nbytes}", path=path)
        return raw if raw.nbytes() == nbytes else raw[:nbytes]

    def _place(self, storage: UntypedStorage, dtype: torch.dtype, location: str) -> Any:
        if self._swap and not (self._meta or self._fake):
            swap: Any = storage.byteswap
            swap(dtype)
        if self._meta or self._cpu_only:
            return storage
        if self._fake:
            private.set_fake_device(storage, location)
            return storage
        try:
            return self._restore(storage, location)
        except (RuntimeError, AssertionError) as error:
            path = self.image.path
            asked = self._asked_for
            fact = f"map_location={asked!r} asks for what" if asked else f"was saved from {location!r}, which"
            raise InvalidArgument(
                f"{path}: {fact} cannot be had here ({_first_line(error)}); pass map_location='cpu', or a dict or "
                "function that maps it to a device of this machine",
                path=path,
            ) from error


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
