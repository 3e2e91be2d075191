"""Options: each declared once, with its doc, type, default, range and environment variable.

Owns: the values that a process or a Checkpointer can be tuned by, and the checks of them.
Must not: start the engine; import torch.
Invariant: an `Options` object that exists is valid, and never changes.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from relight.exceptions import InvalidArgument

__all__ = ["OnError", "Options", "TornCheck", "check_keep"]

TornCheck = Literal["auto", "version", "compare"]
OnError = Literal["warn", "raise"]

MIB = 1 << 20


def _option(
    default: object,
    doc: str,
    *,
    least: float | None = None,
    most: float | None = None,
    multiple_of: int | None = None,
    choices: tuple[str, ...] = (),
    per_process: bool = True,
    optional: bool = False,
) -> Any:
    """A field whose default is its environment variable where that is set, else `default`."""
    facts: dict[str, object] = {
        "default": default,
        "doc": doc,
        "least": least,
        "most": most,
        "multiple_of": multiple_of,
        "choices": choices,
        "per_process": per_process,
        "optional": optional,
    }
    # The name is not known yet here: `__post_init__` puts the real default in the place of this mark.
    return dataclasses.field(default=_UNSET, metadata=facts)


class _Unset:
    def __repr__(self) -> str:
        return "<environment or default>"


_UNSET = _Unset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How relight works in this process. What is given here goes before the environment, and that before the default.

    Options of the process belong to the engine, which a process has once: the first Checkpointer (or `save_async`) that
    needs the engine sets them; other values later are refused, never ignored. The rest belong to one Checkpointer.

    Raises:
        InvalidArgument: a value is out of its range; the message names the option, the value and the range.
    """

    memory_bytes_max: int | None = _option(
        None,
        "Most bytes of the memory tier. None: `NEBULA_MEMORY_BUFFER_SIZE`, else half of what the node can spare.",
        least=4096,
        most=1 << 62,
        optional=True,
    )
    memory_dir: str | None = _option(
        None, "Directory on shared memory (tmpfs) for the memory tier. None: `/dev/shm`.", optional=True
    )
    memory_keep: int = _option(
        2, "Checkpoints of each root that stay in memory once persisted, for a fast resume.", least=0, most=10**6
    )
    chunk_bytes: int = _option(
        4 * MIB, "Unit of staging, checksums and I/O, in bytes.", least=4096, most=1 << 30, multiple_of=4096
    )
    copy_threads: int = _option(2, "Threads that copy a snapshot into memory.", least=1, most=256)
    attempts_max: int = _option(3, "Tries of one persist, each on a new file.", least=1, most=1000)
    retry_delay_s: float = _option(
        0.5, "Seconds before the second try of a persist; it doubles with each try.", least=0, most=3600
    )
    lock_timeout_s: float = _option(
        30.0, "Seconds to wait for a tag that another process is writing.", least=0, most=86400
    )
    close_timeout_s: float = _option(
        600.0,
        "Seconds that the end of a `with` block, `close()` and the exit of the process wait for saves under way. What "
        "is not persisted by then stays in memory for the next process on the node.",
        least=0,
        most=10**9,
        per_process=False,
    )
    torn_check: TornCheck = _option(  # noqa: RUF009
        "auto",
        "How `save` makes sure that no tensor changed while it was copied. `version`: by torch's version counters. "
        "`compare`: the bytes too, which also sees writes past torch. `auto`: `compare` while other Python threads "
        "run, else `version`. Single files (`relight.save`, `save_async`) compare whenever other Python threads run.",
        choices=("auto", "version", "compare"),
        per_process=False,
    )
    on_error: OnError = _option(  # noqa: RUF009
        "warn",
        "What `save` does about an earlier save that failed in the background. `warn`: gives a `SaveFailedWarning`. "
        "`raise`: raises that error, once its own state is staged.",
        choices=("warn", "raise"),
        per_process=False,
    )

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is _UNSET:
                value = _from_environment(field, os.environ)
            object.__setattr__(self, field.name, _checked(field, value, field.name))

    def replaced(self, **changes: object) -> Options:
        """A copy with some values changed; None leaves a value as it is.

        Raises:
            InvalidArgument: a value is out of its range, or there is no such option.
        """
        names = {field.name for field in dataclasses.fields(self)}
        for name in changes:
            if name not in names:
                raise InvalidArgument(f"there is no option {name!r}; choose from {', '.join(sorted(names))}")
        given: dict[str, Any] = {name: value for name, value in changes.items() if value is not None}
        return dataclasses.replace(self, **given)

    @staticmethod
    def environment_variable(name: str) -> str:
        """The variable of one option: `RELIGHT_COPY_THREADS` for `copy_threads`."""
        return f"RELIGHT_{name.upper()}"

    def for_engine(self) -> dict[str, Any]:
        """The options of the engine, as `_core.Engine` takes them."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.metadata["per_process"]}


def _from_environment(field: dataclasses.Field[Any], environment: Mapping[str, str]) -> object:
    variable = Options.environment_variable(field.name)
    text = environment.get(variable, "").strip()
    default = field.metadata["default"]
    if not text:
        return default
    value: object = text
    if field.metadata["least"] is not None:
        try:
            value = float(text) if isinstance(default, float) else int(text)
        except ValueError:
            raise InvalidArgument(f"{variable}={text!r} is no number; {_range(field)}") from None
    return _checked(field, value, variable)


def _checked(field: dataclasses.Field[Any], value: object, called: str) -> object:
    facts = field.metadata
    if value is None and facts["optional"]:
        return None
    refusal = InvalidArgument(f"{called}={value!r} cannot be used; {_range(field)}")
    if facts["choices"]:
        if value not in facts["choices"]:
            raise refusal
        return value
    if facts["least"] is None:  # a directory
        if not isinstance(value, (str, os.PathLike)):
            raise refusal
        path = os.fspath(value)
        if not isinstance(path, str) or not path or "\0" in path:
            raise refusal
        return path
    wants_float = isinstance(facts["default"], float)
    number = _number(value, wants_float)
    if number is None or not facts["least"] <= number <= facts["most"]:
        raise refusal
    if facts["multiple_of"] and number % facts["multiple_of"]:
        raise refusal
    return number


def _number(value: object, wants_float: bool) -> float | int | None:
    if isinstance(value, bool):  # an int to Python, and always a slip here
        return None
    if wants_float:
        if not isinstance(value, (int, float)) or math.isnan(value):
            return None
        return float(value)
    try:
        return operator.index(value)  # type: ignore[arg-type]  # numpy integers too; what is none raises TypeError
    except TypeError:
        return None


def _range(field: dataclasses.Field[Any]) -> str:
    facts = field.metadata
    if facts["choices"]:
        return f"give one of {', '.join(repr(choice) for choice in facts['choices'])}"
    if facts["least"] is None:
        return "give a path, or None" if facts["optional"] else "give a path"
    kind = "a number" if isinstance(facts["default"], float) else "a whole number"
    text = f"give {kind} from {facts['least']} to {facts['most']}"
    if facts["multiple_of"]:
        text += f", a multiple of {facts['multiple_of']}"
    return text + (", or None" if facts["optional"] else "")


def check_keep(keep: object) -> int | None:
    """`keep` as the engine takes it: None keeps all, a whole number from 1 up keeps that many.

    Raises:
        InvalidArgument: 0, a negative number, a bool, a float or a string: none of them says what to keep.
    """
    if keep is None:
        return None
    number = _number(keep, wants_float=False)
    if number is None or number < 1:
        raise InvalidArgument(
            f"keep={keep!r} cannot be used; give a whole number from 1 up (so many stay), or None to keep all"
        )
    return int(min(number, (1 << 32) - 1))  # more than any root holds, and the most the engine counts to
