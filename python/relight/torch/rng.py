"""Random state: of torch, CUDA, NumPy and Python, in a form that loads without running code.

Owns: which global generators are saved, their form in the file, and the generators that a caller registers himself.
Must not: import NumPy where the process has not; initialise CUDA; touch a generator before all states are checked.
Invariant: the form is made of dict, list, tuple, int, float, str, None and tensors, so `torch.load(weights_only=True)`
of any version reads it.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import torch
from relight.exceptions import CorruptCheckpoint
from relight.torch import safe_types

__all__ = ["capture_generator", "capture_global", "check_generator", "check_global", "is_generator",
           "restore_generator", "restore_global"]  # fmt: skip


# ---- the global generators ----


def capture_global() -> dict[str, Any]:
    """The state of the generators that every training uses without naming them.

    Returns:
        `python` (`random`), `torch` (CPU), and where this process has them `cuda` (one per device) and `numpy` (the
        legacy global of `np.random.seed`).
    """
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # untyped in torch
        states["cuda"] = list(torch.cuda.get_rng_state_all())
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        states["numpy"] = _numpy_to_plain(numpy.random.get_state(legacy=False))
    return states


def check_global(states: object, where: str) -> list[str]:
    """Tries every state on a scratch generator.

    Args:
        where: the file, for the message.

    Returns:
        One sentence per state that cannot be restored here although it is sound, as of a GPU that this process lacks.

    Raises:
        CorruptCheckpoint: a state is none.
    """
    if not isinstance(states, dict):
        raise CorruptCheckpoint(f"the random state in {where} is a {type(states).__name__}, not a dict; {_WAY_OUT}")
    remarks = []
    for name, state in states.items():
        match name:
            case "python":
                _try(name, where, _scratch_python, state)
            case "torch":
                _try(name, where, torch.Generator().set_state, state)
            case "numpy":
                if not _has_numpy():
                    remarks.append("the random state of NumPy is saved, and NumPy is not installed here")
                else:
                    _try(name, where, _scratch_numpy, state)
            case "cuda":
                if not (isinstance(state, list) and all(isinstance(one, torch.Tensor) for one in state)):
                    raise CorruptCheckpoint(f"the random state of cuda in {where} is no list of tensors; {_WAY_OUT}")
                here = torch.cuda.device_count() if torch.cuda.is_available() else 0
                if len(state) != here:
                    remarks.append(f"the random state of {len(state)} CUDA devices is saved, and there are {here} here")
            case _:
                remarks.append(f"the random state of {name!r} is saved, which this version of relight does not know")
    remarks.extend(
        f"the random state of {name} is not in {where}" for name in ("python", "torch") if name not in states
    )
    if "numpy" in sys.modules and "numpy" not in states:
        remarks.append(f"the random state of numpy is not in {where}")
    return remarks


def restore_global(states: dict[str, Any]) -> None:
    """Sets the global generators to states that `check_global` has passed."""
    if "python" in states:
        random.setstate(_tupled(states["python"]))
    if "torch" in states:
        torch.set_rng_state(states["torch"])
    if "numpy" in states and _has_numpy():
        import numpy

        numpy.random.set_state(_plain_to_numpy(states["numpy"]))
    if "cuda" in states and torch.cuda.is_available():
        for device, state in zip(range(torch.cuda.device_count()), states["cuda"], strict=False):
            torch.cuda.set_rng_state(state, device)


# ---- generators that the caller registers ----


def is_generator(value: object) -> bool:
    """Whether `value` is a `torch.Generator`, a `random.Random`, or a generator of NumPy, old or new."""
    if isinstance(value, (torch.Generator, random.Random)):
        return True
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.random.Generator, numpy.random.RandomState))


def capture_generator(generator: Any) -> dict[str, Any]:
    """The state of one generator, with its kind."""
    if isinstance(generator, torch.Generator):
        return {"kind": "torch", "state": generator.get_state()}
    if isinstance(generator, random.Random):
        return {"kind": "python", "state": generator.getstate()}
    if hasattr(generator, "bit_generator"):
        return {"kind": "numpy", "state": _numpy_to_plain(generator.bit_generator.state)}
    return {"kind": "numpy_legacy", "state": _numpy_to_plain(generator.get_state(legacy=False))}


def check_generator(generator: Any, saved: object, where: str) -> None:
    """Tries a saved state on a scratch generator of the same kind.

    Raises:
        CorruptCheckpoint: it is no state of such a generator.
    """
    mine = capture_generator(generator)["kind"]
    if not isinstance(saved, dict) or saved.get("kind") != mine:
        raise CorruptCheckpoint(f"{where} holds no state of a generator of {mine}; {_WAY_OUT}")
    state = saved.get("state")
    match mine:
        case "torch":
            _try(mine, where, torch.Generator(device=generator.device).set_state, state)
        case "python":
            _try(mine, where, _scratch_python, state)
        case "numpy":
            scratch = type(generator.bit_generator)()
            _try(mine, where, lambda state: setattr(scratch, "state", _checked_numpy(state)), state)
        case _:
            _try(mine, where, _scratch_numpy, state)


def restore_generator(generator: Any, saved: dict[str, Any]) -> None:
    """Sets `generator` to a state that `check_generator` has passed."""
    match saved["kind"]:
        case "torch":
            generator.set_state(saved["state"])
        case "python":
            generator.setstate(_tupled(saved["state"]))
        case "numpy":
            generator.bit_generator.state = _plain_to_numpy(saved["state"])
        case _:
            generator.set_state(_plain_to_numpy(saved["state"]))


# ---- forms ----

_WAY_OUT = "use another checkpoint"


def _try(name: str, where: str, attempt: Callable[[Any], object], state: Any) -> None:
    try:
        attempt(state)
    except (TypeError, ValueError, RuntimeError, KeyError, AttributeError, OverflowError, IndexError) as cause:
        raise CorruptCheckpoint(f"the random state of {name} in {where} is damaged: {cause}; {_WAY_OUT}") from cause


def _tupled(value: Any) -> Any:
    """Lists as tuples: `setstate` insists on them."""
    return tuple(_tupled(item) for item in value) if isinstance(value, (list, tuple)) else value


def _has_numpy() -> bool:
    if "numpy" not in sys.modules:
        try:
            import numpy  # noqa: F401
        except ImportError:
            return False
    return True


def _scratch_python(state: Any) -> None:
    random.Random().setstate(_tupled(state))


def _scratch_numpy(state: Any) -> None:
    import numpy

    numpy.random.RandomState().set_state(_checked_numpy(state))


def _checked_numpy(state: Any) -> Any:
    made = _plain_to_numpy(state)
    safe_types.check_generator_state(made)
    return made


def _numpy_to_plain(value: Any) -> Any:
    """Arrays become {"dtype", "values"}: a pickled array names modules that differ between versions of NumPy."""
    import numpy

    if isinstance(value, dict):
        return {key: _numpy_to_plain(item) for key, item in value.items()}
    if isinstance(value, numpy.ndarray):
        return {"dtype": value.dtype.name, "values": value.tolist()}
    return value.item() if isinstance(value, numpy.generic) else value


def _plain_to_numpy(value: Any) -> Any:
    import numpy

    if not isinstance(value, dict):
        return value
    if set(value) == {"dtype", "values"}:
        return numpy.array(value["values"], dtype=value["dtype"])
    return {key: _plain_to_numpy(item) for key, item in value.items()}
