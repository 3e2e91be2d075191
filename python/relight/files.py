"""Single files: `save`, `load`, `open` and `save_async`, in the place of torch.save and torch.load.

Owns: what is a path and what is a file object, the wait for a save in flight, the kinds of file that are not ours.
Must not: import torch at module level; rename or sync (the engine does, in one place).
Invariant: after `save` returns, the path holds the whole new file, durably; after it raises, what it held before.
"""

from __future__ import annotations

import builtins
import io
import json
import os
import pickle
import stat
import time
from collections.abc import Iterable
from typing import IO, TYPE_CHECKING, Any

from relight import runtime
from relight.arguments import allowed
from relight.exceptions import EngineClosed, InvalidArgument
from relight.options import Options
from relight.parts import others_run, stem_of

if TYPE_CHECKING:
    from relight.handle import Handle
    from relight.torch.unpickling import MapLocation
    from relight.torch.view import View

__all__ = ["load", "open", "save", "save_async"]

_PathLike = str | os.PathLike[str]
_ZIP_MAGIC = b"PK\x03\x04"
_EMPTY_ZIP = b"PK\x05\x06"
_HEAD_BYTES = 512


def save(
    obj: object,
    f: _PathLike | IO[bytes],
    pickle_module: Any = pickle,
    pickle_protocol: int = 2,
    *,
    durable: bool = True,
) -> None:
    """Saves an object as torch.save does, durably: the file is whole and on the disk when this returns.

    The file is a torch.save archive that plain `torch.load` reads. Only the bytes that the saved tensors reach are
    written: a slice costs the slice, and does not share memory with a parent that is not saved. The object is
    unchanged.

    Args:
        f: a path, or a file object with `write` (then durability is up to it).
        pickle_module, pickle_protocol: as in torch.save.
        durable: False skips the syncs: a power cut may take the file back, or what it replaced.

    Raises:
        NotPicklable: names the part of `obj` that cannot be saved; nothing was written.
        StorageFull, StorageDenied, StorageUnavailable: the path holds what it held before.
        TornSnapshot: another thread changed a tensor meanwhile; the path holds what it held before.
        EngineClosed: this process was forked from one that uses relight.
    """
    runtime.check_fork()
    _check_pickler(pickle_module, pickle_protocol)
    from relight.torch.pickling import plan_object

    if _is_path(f):
        from relight import _core

        path = _path_of(f)
        stem = stem_of(os.path.basename(path))
        if runtime.started():
            earlier = runtime.engine().pending_path(path)
            if earlier is not None:
                earlier.wait(None)  # else its older state would be put over this one; its handle has its error
        snapshot = plan_object(obj, pickle_module=pickle_module, pickle_protocol=pickle_protocol, stem=stem)
        _core.save_file(path, snapshot.entries, stem=stem, compare=_must_compare(), durable=durable)
        return
    write = getattr(f, "write", None)
    if write is None:
        raise InvalidArgument(f"cannot save to {f!r:.100}; give a path or a file object with write()")
    from relight.torch.archive import write_archive

    snapshot = plan_object(obj, pickle_module=pickle_module, pickle_protocol=pickle_protocol, stem="archive")
    write_archive(write, snapshot.entries, snapshot.stem)
    snapshot.check_torn()


def save_async(
    obj: object,
    path: _PathLike,
    pickle_module: Any = pickle,
    pickle_protocol: int = 2,
) -> Handle:
    """Saves an object to a path in the background: returns once it is copied, and the caller may change its tensors.

    What was copied is written even if this process dies: by the next one on this node that uses relight.

    Returns:
        A handle: `result()` waits until the file is durable.

    Raises:
        NotPicklable, TornSnapshot, EngineClosed: as `save`. Errors of the storage are raised by the handle.
    """
    runtime.check_fork()
    started = time.monotonic()
    if not _is_path(path):
        raise InvalidArgument("save_async needs a path; a file object can only be saved to by save()")
    _check_pickler(pickle_module, pickle_protocol)
    from relight.handle import Handle
    from relight.torch.pickling import plan_object

    engine = runtime.engine()
    name = os.path.abspath(_path_of(path))
    stem = stem_of(os.path.basename(name))
    snapshot = plan_object(obj, pickle_module=pickle_module, pickle_protocol=pickle_protocol, stem=stem)
    report, ticket = engine.stage_file(name, snapshot.entries, stem=stem, compare=_must_compare())
    handle = Handle(
        ticket, path=name, files=[os.path.basename(name)], reports=[report], stall_s=time.monotonic() - started
    )
    return handle


def _must_compare() -> bool:
    """A single file is on its way to its path when the copy ends: what version counters say after that is too late."""
    return Options().torn_check == "compare" or others_run()


def load(
    f: _PathLike | IO[bytes],
    map_location: MapLocation = None,
    pickle_module: Any = None,
    *,
    weights_only: bool | None = True,
    mmap: bool | None = None,
    allow: Iterable[object] = (),
) -> Any:
    """Loads what torch.save or relight wrote, every byte verified.

    A `save_async` to the same path that is still under way is waited for; if it fails, its error is raised here, so
    that the older file does not pass for the newer one.

    Args:
        f: a path, or a seekable file object, which is read from where it stands.
        map_location: as in torch.load: a device, a dict or a function.
        pickle_module: with weights_only=False, whose `Unpickler` to use.
        weights_only: make only the types on the published list (docs/reference/types.md). False runs whatever code the
            file holds: only for files that you trust. None, torch's word for its default, is True.
        mmap: back the tensors by a private mapping of the file: nothing is read or verified until it is used, and what
            you write to the tensors stays in this process. Paths only.
        allow: classes, functions or their full names that are trusted beside the list.

    Raises:
        CheckpointNotFound: there is no such file.
        CorruptCheckpoint: its bytes are not what was written.
        ObjectNotAllowed: names the types that are not on the list, and where they are.
        InvalidArgument: a file of another kind, or a location that this machine does not have.
    """
    if weights_only is None:
        weights_only = True
    if weights_only and pickle_module is not None:
        raise InvalidArgument("pickle_module is used with weights_only=False only; leave it out, or trust the file")
    allow = allowed(allow)
    if not _is_path(f):
        if mmap:
            raise InvalidArgument("mmap=True needs a path, not a file object")
        return _load_object(f, map_location, pickle_module, weights_only, allow)
    path = _path_of(f)
    _wait_for_saves_to(path)
    from relight import _core
    from relight.torch import other_files
    from relight.torch.unpickling import load_image

    if not _is_zip(_head_of(path)):
        return other_files.load(path, path, _head_of(path), map_location, pickle_module, weights_only, allow)
    image = _core.open_image(path)
    if not all(entry.stored for entry in image.entries):
        return other_files.load_packed(path, map_location, pickle_module, weights_only, allow)
    return load_image(
        image,
        map_location=map_location,
        weights_only=weights_only,
        mmap=bool(mmap),
        allow=allow,
        pickle_module=pickle_module,
    )


def open(path: _PathLike, *, allow: Iterable[object] = ()) -> View:
    """Looks into a file without reading its tensors: names, shapes and dtypes, and single tensors on demand.

    ```python
    with relight.open("model.pt") as f:
        f.shapes["model.layer.weight"]
        row = f["model.layer.weight"][7]        # reads the pages of this row
    ```

    Raises:
        CheckpointNotFound, CorruptCheckpoint, InvalidArgument: as `load`. What is not allowed is left out: see
            `View.refused`.
    """
    name = _path_of(path)
    _wait_for_saves_to(name)
    from relight import _core
    from relight.torch.view import View

    head = _head_of(name)
    if not _is_zip(head):
        from relight.torch import other_files

        other_files.check(name, head)
        raise InvalidArgument(f"{name} is in the format of torch before 1.6; load it with relight.load", path=name)
    return View(_core.open_image(name), allow=allowed(allow))


# ---- helpers ----


def _is_path(f: object) -> bool:
    return isinstance(f, (str, os.PathLike))


def _path_of(f: Any) -> str:
    try:
        given = os.fspath(f)
    except TypeError:
        raise InvalidArgument(f"{f!r:.100} is no path; give the path of a file") from None
    path = given if isinstance(given, str) else os.fsdecode(given)
    if not path or "\0" in path:
        raise InvalidArgument(f"{path!r} is no path; give the path of a file")
    return path


def _check_pickler(pickle_module: Any, pickle_protocol: Any) -> None:
    """Else the error comes from the midst of pickling, and the state is blamed for it."""
    if not callable(getattr(pickle_module, "Pickler", None)):
        raise InvalidArgument(f"pickle_module={pickle_module!r} has no Pickler; give a module such as pickle or dill")
    # 0 and 1 are written in opcodes that neither load() nor torch.load reads by default; negative is the highest.
    if not isinstance(pickle_protocol, int) or pickle_protocol in (0, 1) or pickle_protocol > pickle.HIGHEST_PROTOCOL:
        raise InvalidArgument(
            f"pickle_protocol={pickle_protocol!r} cannot be used; give a number from 2 to {pickle.HIGHEST_PROTOCOL}"
        )


def _is_zip(head: bytes) -> bool:
    return head.startswith((_ZIP_MAGIC, _EMPTY_ZIP))


def _head_of(path: str) -> bytes:
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return _ZIP_MAGIC  # a pipe would be waited for, perhaps for ever
        with builtins.open(path, "rb") as file:
            return file.read(_HEAD_BYTES)
    except OSError:
        return _ZIP_MAGIC  # the engine says what is wrong with the path, in its own words


def _load_object(f: Any, map_location: MapLocation, pickle_module: Any, weights_only: bool, allow: list[object]) -> Any:
    from relight.torch import other_files
    from relight.torch.archive import FileImage
    from relight.torch.unpickling import load_image

    name = str(getattr(f, "name", None) or f"a {type(f).__qualname__}")
    try:
        start = f.tell()
        head = f.read(_HEAD_BYTES)
        f.seek(start)
    except (AttributeError, io.UnsupportedOperation) as error:
        raise InvalidArgument(
            f"{name} cannot be read and seeked; read it into io.BytesIO first, or give a path"
        ) from error
    if start and not head:
        raise InvalidArgument(f"{name} is read to its end; seek(0) first")
    if not _is_zip(head):
        return other_files.load(f, name, head, map_location, pickle_module, weights_only, allow)
    return load_image(
        FileImage(f, name, start),
        map_location=map_location,
        weights_only=weights_only,
        allow=allow,
        pickle_module=pickle_module,
    )


def _wait_for_saves_to(path: str) -> None:
    """A load finds the newest save: one in flight is finished first, what a dead process left is persisted."""
    try:
        runtime.check_fork()
    except EngineClosed:
        return  # a forked child reads what is on the disk
    from relight import _core

    if not runtime.started() and not any(
        region["adopted"] or not region["alive"] for region in json.loads(_core.regions())
    ):
        return
    engine = runtime.engine()
    engine.drain()
    engine.await_drains(path)
    ticket = engine.pending_path(path)
    if ticket is not None:
        ticket.wait(None)
        ticket.check()
