"""What `init` sets: path, interval and retention, from arguments, variables and defaults.

Owns: how each value is read and refused; which source wins; the settings of this process.
Must not: write a checkpoint; import torch; start the engine (`roots` does, with what is set here).
Invariant: a setting once given as an argument is never replaced by a variable, and None changes nothing.
"""

import errno
import math
import os
import re
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, Generic, TypeVar
from urllib.parse import unquote, urlsplit

from relight.exceptions import InvalidArgument, StorageDenied, StorageFull, StorageUnavailable

PATH_VARIABLE: Final = "NEBULA_PERSISTENT_STORAGE_PATH"
INTERVAL_VARIABLE: Final = "NEBULA_PERSISTENT_TIME_INTERVAL"
MEMORY_VARIABLE: Final = "NEBULA_MEMORY_BUFFER_SIZE"

_RETENTION_MAX: Final = 2**31 - 1  # more than any memory holds: a larger number means "all", and is cut to this

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Setting(Generic[T]):
    """One value and where it came from, since an argument outranks a variable in every later call too."""

    value: T
    from_argument: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings that hold for tags opened from now on."""

    path: Setting[str | None] = Setting(None)
    """Absolute root of the persistent tier; None: the memory tier alone."""
    interval_s: Setting[float] = Setting(100.0)
    """The longest that a complete checkpoint may wait for its persist to begin. relight begins at once."""
    retention: Setting[int] = Setting(2)
    """Complete checkpoints kept in memory."""
    initialised: bool = False


_lock = threading.Lock()
_settings = Settings()


def current() -> Settings:
    """The settings now."""
    return _settings


def update(path: Any, interval: Any, retention: Any) -> Settings:
    """Takes what an `init` call gives, variables included; changes nothing unless all of it is good.

    Raises:
        InvalidArgument: a value has no meaning.
        StorageDenied, StorageFull, StorageUnavailable: the path cannot be made a directory.
    """
    global _settings
    with _lock:
        new = replace(
            _settings,
            path=_choose(_settings.path, path, PATH_VARIABLE, read_root),
            interval_s=_choose(_settings.interval_s, interval, INTERVAL_VARIABLE, _read_interval),
            retention=_choose(_settings.retention, retention, None, _read_retention),
            initialised=True,
        )
        _check_memory_variable()
        if new.path.value is not None and new.path.value != _settings.path.value:
            make_root(new.path.value)
        _settings = new
        return new


def forget() -> None:
    """Back to the state before the first `init`, for tests."""
    global _settings
    with _lock:
        _settings = Settings()


def renew_lock() -> None:
    """A lock that another thread of the parent held at the fork is never released in the child."""
    global _lock
    _lock = threading.Lock()


def _choose(old: Setting[T], argument: Any, variable: str | None, read: Callable[[str, Any], T]) -> Setting[T]:
    if argument is not None:
        return Setting(read("init", argument), from_argument=True)
    text = os.environ.get(variable, "") if variable else ""
    if variable and text.strip() and not old.from_argument:
        return Setting(read(variable, text))
    return old


def read_root(source: str, value: Any) -> str:
    """A path as clients give it, made absolute: str, PathLike, `file:` URL, or one of them in a tuple or list.

    Raises:
        InvalidArgument: it is none of these, empty, or a URL that is not built yet.
    """
    if isinstance(value, (tuple, list)):
        # `persistent_storage_path="/tmp/test",` with its stray comma is in Azure's own sample.
        if len(value) != 1:
            raise InvalidArgument(f"{source}: the storage path is {value!r}; give one path")
        warnings.warn(
            f"the storage path {value!r} is a {type(value).__name__} of one path: a stray comma? relight takes it",
            UserWarning,
            stacklevel=5,
        )
        value = value[0]
    if not isinstance(value, (str, bytes, os.PathLike)):
        raise InvalidArgument(
            f"{source}: the storage path is {value!r}, a {type(value).__name__}; give a str or a Path"
        )
    text = os.fsdecode(os.fspath(value))
    if not text.strip():
        raise InvalidArgument(
            f"{source}: the storage path is empty; give a directory, or None for the memory tier alone"
        )
    if "\0" in text:
        raise InvalidArgument(f"{source}: the storage path {text!r} has a NUL character in it")
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", text):
        return os.path.abspath(_path_of_url(source, text))
    return os.path.abspath(text)


def _path_of_url(source: str, text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme != "file" or parts.netloc not in ("", "localhost"):
        raise InvalidArgument(
            f"{source}: {text!r} is an object store, which is not built yet; mount it and give the path of the mount"
        )
    return unquote(parts.path)


def make_root(path: str) -> None:
    """Makes the directory, so that a path that cannot serve fails in `init` and not hours later.

    Raises:
        InvalidArgument, StorageDenied, StorageFull, StorageUnavailable: by what the system says.
    """
    try:
        os.makedirs(path, exist_ok=True)
    except PermissionError as cause:
        raise StorageDenied(
            f"cannot make {path}: {cause.strerror}; give this user access, or choose another path", path=path
        ) from cause
    except (FileExistsError, NotADirectoryError) as cause:
        raise InvalidArgument(f"cannot make {path}: a file is in its way; choose another path", path=path) from cause
    except OSError as cause:
        if cause.errno == errno.EROFS:
            raise StorageDenied(f"cannot make {path}: {cause.strerror}; choose another path", path=path) from cause
        if cause.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageFull(
                f"cannot make {path}: {cause.strerror}; free space, or choose another path", path=path
            ) from cause
        if cause.errno in (errno.ENAMETOOLONG, errno.EINVAL, errno.ELOOP):
            raise InvalidArgument(f"cannot make {path}: {cause.strerror}; choose another path", path=path) from cause
        raise StorageUnavailable(f"cannot make {path}: {cause.strerror}; check the storage", path=path) from cause


def _read_number(source: str, name: str, value: Any) -> float:
    # bool is an int to Python, but `True` seconds is a mistake.
    if isinstance(value, bool):
        raise InvalidArgument(f"{source}: {name} is {value!r}; give a number")
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise InvalidArgument(f"{source}: {name} is {value!r}; give a number") from None
    if not math.isfinite(number) or number < 0:
        raise InvalidArgument(f"{source}: {name} is {value!r}; give a number of at least 0")
    return number


def _read_interval(source: str, value: Any) -> float:
    return _read_number(source, "persistent_time_interval", value)


def _read_retention(source: str, value: Any) -> int:
    name = "num_of_version_in_retention"
    if isinstance(value, int) and not isinstance(value, bool) and value > _RETENTION_MAX:
        return _RETENTION_MAX  # also beyond what a float holds
    number = _read_number(source, name, value)
    if number != int(number):
        raise InvalidArgument(f"{source}: {name} is {value!r}; give a whole number")
    if number == 0:
        # Without a path the memory tier is all there is: keeping none of it would delete each checkpoint as it is made.
        raise InvalidArgument(f"{source}: {name} is 0, which keeps nothing; give 1 or more")
    return min(int(number), _RETENTION_MAX)


def _check_memory_variable() -> None:
    """The engine reads this variable when it starts; a value that it cannot read must fail in `init` already."""
    text = os.environ.get(MEMORY_VARIABLE, "").strip()
    if text and (not text.isascii() or not text.isdigit() or int(text) == 0):
        raise InvalidArgument(
            f"{MEMORY_VARIABLE} is {text!r}; give a number of bytes, or unset it for as much as needed"
        )
