"""TrainState: all that a training needs to go on as if it had never stopped.

Owns: the components by name, their files, the small file beside them (step, names, ranks, random state), and the order
of a restore: read all, check all, then change.
Must not: import torch at module level; read or write a file itself (`Checkpointer` does).
Invariant: saving changes nothing of the caller's. Restoring changes nothing until every file has been read and checked.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Protocol, TypeVar

from relight.exceptions import CorruptCheckpoint, InvalidArgument, ResumeWarning

__all__ = ["Capture", "OptionalPart", "Part", "Restore", "Source", "TrainState", "optional"]

STATE_FILE: Final = "train_state.pt"
STATE_VERSION: Final = 1

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class OptionalPart:
    """A part of the state that may be left out where it cannot be pickled. Made by `optional`."""

    value: Any


def optional(value: Any) -> OptionalPart:
    """Marks a component of a `TrainState` or an entry of `files={...}` as one that may be left out.

    Where it cannot be pickled (a data loader that holds a local function, say) it is left out with a
    `PartLeftOutWarning`, and the rest is saved.
    """
    return OptionalPart(value)


@dataclass(frozen=True, slots=True)
class Part:
    """One file of a save: its name and the object in it."""

    file: str
    value: object
    optional: bool = False


class Source(Protocol):
    """One checkpoint, as a restore reads it."""

    @property
    def tag(self) -> str: ...
    @property
    def files(self) -> Collection[str]: ...
    def load(self, file: str) -> object:
        """The object in one file, checksums verified."""
        ...

    def later(self, file: str) -> Callable[[], object]:
        """Loads the file when called, also after the checkpoint was deleted."""
        ...


class TrainState:
    """Names the objects whose state makes up a training.

    Each component is anything with `state_dict()` and `load_state_dict()` (model, optimizer, scheduler, gradient
    scaler, sampler, stateful data loader), or a random generator: `torch.Generator`, `random.Random`,
    `numpy.random.Generator`. A component of None is left out, so that `scaler=scaler if amp else None` works.

    Each component becomes the file `<name>.pt`, the state dict itself, which `torch.load` reads. One small file more,
    `train_state.pt`, has the step, the names of the components, rank and world size, and the random state of Python,
    NumPy and torch (CPU and every CUDA device).

    Args:
        rng: whether the global random state is saved and restored.
        step: only for checkpoints whose tag has no number in it: the step that `resume` shall return for them. Keep it
            up to date yourself (`state.step += 1`).
        optional: names of components that may be left out, as `relight.optional(obj)` marks them.
        components: the objects, by name.

    Raises:
        InvalidArgument: a component has no state to take, or a name cannot be one.
    """

    def __init__(
        self, *, rng: bool = True, step: int | None = None, optional: Collection[str] = (), **components: Any
    ) -> None:
        if not isinstance(rng, bool):
            raise InvalidArgument(
                f"rng={rng!r} cannot be used; give True or False: it is about the global random state. Register a "
                "generator of your own under another name, as generator=..."
            )
        self.rng = rng
        try:
            self.step = None if step is None else operator.index(step)
        except TypeError:
            raise InvalidArgument(f"step={step!r} is no step; give a whole number, or None") from None
        self._components: dict[str, Any] = {}
        self._optional = set([optional] if isinstance(optional, str) else optional)
        self._resumed: str | None = None
        self._unclaimed: dict[str, Callable[[], object]] = {}
        self._expired: set[str] = set()
        self._saved_optimizers: Mapping[str, Sequence[str]] = {}
        self._warned_detached = False
        for name, component in components.items():
            self._add(name, component)
        unknown = sorted(self._optional - set(components))
        if unknown:
            raise InvalidArgument(f"optional={unknown} names no component; choose from {sorted(components)}")

    def __repr__(self) -> str:
        parts = [f"{name}={type(component).__qualname__}" for name, component in self._components.items()]
        return f"<relight.TrainState {', '.join([*parts, f'rng={self.rng}'])}>"

    @property
    def components(self) -> Mapping[str, Any]:
        """The registered objects, by name; read-only."""
        return MappingProxyType(self._components)

    def register(self, name: str, component: Any, *, fresh: bool = False) -> None:
        """Adds a component, also after `resume`: it then gets its saved state at once.

        That is possible until the first save after the resume; the checkpoint may be gone later.

        Args:
            fresh: it starts from nothing on purpose, whatever the checkpoint has.

        Raises:
            InvalidArgument: the name is taken, the object has no state to take, or its saved state can no longer be
                had.
        """
        if name in self._components:
            raise InvalidArgument(f"component {name!r} is registered already; choose another name")
        if not fresh and name in self._expired:
            raise InvalidArgument(
                f"component {name!r} is in {self._resumed}, which was resumed from, but was registered after the next "
                "save, so its state was let go. Register it before that, load the file yourself, or pass fresh=True to "
                "start it from nothing"
            )
        value = component.value if isinstance(component, OptionalPart) else component
        if fresh or self._resumed is None or value is None:
            self._add(name, component)
            self._unclaimed.pop(name, None)
            return
        later = self._unclaimed.get(name)
        if later is None:
            self._add(name, component)
            warnings.warn(
                f"component {name!r} is not in {self._resumed}, which was resumed from: it starts from nothing "
                "(fresh=True says that this is meant)",
                ResumeWarning,
                stacklevel=2,
            )
            return
        from relight.torch import state_dict

        _check_name(name)
        state_dict.check_component(name, value)
        saved = later()
        where = f"{_file_of(name)} of {self._resumed}"
        state_dict.check(name, value, saved, where, classes=self._saved_optimizers.get(name, ()))
        state_dict.restore(value, saved)
        self._add(name, component)
        del self._unclaimed[name]

    def _add(self, name: str, component: Any) -> None:
        from relight.torch import state_dict

        _check_name(name)
        if isinstance(component, OptionalPart):
            self._optional.add(name)
            component = component.value
        if component is None:
            return
        state_dict.check_component(name, component)
        self._components[name] = component

    # ---- saving ----

    def capture(self) -> Capture:
        """What there is to save, now: references, no copies. The random state comes first, as it is at the call."""
        from relight.torch import rng, state_dict

        states = rng.capture_global() if self.rng else None
        parts = tuple(
            Part(_file_of(name), state_dict.capture(component), name in self._optional)
            for name, component in self._components.items()
        )
        detached = [] if self._warned_detached else state_dict.detached_optimizers(self._components)
        self._warned_detached = self._warned_detached or bool(detached)
        # What nobody has claimed by the first save is let go: it holds a file open, or a piece of the memory tier.
        self._expired.update(self._unclaimed)
        self._unclaimed.clear()
        optimizers = {name: state_dict.optimizer_classes(component) for name, component in self._components.items()}
        return Capture(
            parts,
            tuple(self._components),
            states,
            self.step,
            tuple(_about_detached(name) for name in detached),
            {name: classes for name, classes in optimizers.items() if classes},
        )

    # ---- restoring ----

    def read(self, source: Source, *, rank: int, world_size: int) -> Restore:
        """Reads and checks what `source` has for the registered components; changes nothing.

        Raises:
            CorruptCheckpoint: a file is damaged, or holds no state of its component.
            InvalidArgument: an object differs from what was saved, or nothing in the checkpoint is for this state.
        """
        from relight.torch import rng, state_dict

        facts = _Facts.of(source)
        missing = [name for name in self._components if name not in facts.components]
        unexpected = [name for name in facts.components if name not in self._components]
        if self._components and len(missing) == len(self._components):
            raise InvalidArgument(
                f"{source.tag} has nothing for this TrainState: it has the files {', '.join(sorted(source.files))}, "
                f"and registered are {', '.join(missing)}. Register them under the names that they were saved with, or "
                "load the files with load()",
                tag=source.tag,
            )
        saved: dict[str, object] = {}
        for name, component in self._components.items():
            if name in facts.components:
                file = _file_of(name)
                saved[name] = source.load(file)
                classes = facts.optimizers.get(name, ())
                state_dict.check(name, component, saved[name], f"{file} of {source.tag}", classes=classes)
        remarks = [
            f"component {name!r} is not in it and keeps its state" for name in missing if name not in facts.left_out
        ]
        remarks += [
            f"component {name!r} was left out of it and keeps its state" for name in missing if name in facts.left_out
        ]
        remarks += [f"its component {name!r} is not registered and is not restored" for name in unexpected]
        if (facts.rank, facts.world_size) != (rank, world_size) and facts.world_size is not None:
            remarks.append(
                f"it was written by rank {facts.rank} of {facts.world_size}, and this is rank {rank} of {world_size}: "
                "data loaders and random streams go on as those of that rank"
            )
        states = None
        if self.rng:
            if facts.rng is None:
                remarks.append("no random state is in it: the run goes on with other random numbers")
            else:
                remarks += rng.check_global(facts.rng, f"{STATE_FILE} of {source.tag}")
                states = facts.rng
        later = {name: source.later(_file_of(name)) for name in unexpected}
        return Restore(self, source.tag, saved, states, facts.step, later, remarks, facts.optimizers)


@dataclass(frozen=True, slots=True)
class Capture:
    """One moment of a TrainState, on its way into files."""

    parts: Sequence[Part]
    names: Sequence[str]
    rng: Mapping[str, object] | None
    step: int | None
    remarks: Sequence[str]
    optimizers: Mapping[str, Sequence[str]]
    """The class of each optimizer and its bases, by full name."""

    def facts(self, *, step: int | None, rank: int, world_size: int, left_out: Collection[str]) -> Part:
        """The small file beside the components."""
        gone = {name for name in self.names if _file_of(name) in left_out}
        return Part(
            STATE_FILE,
            {
                "version": STATE_VERSION,
                "step": self.step if step is None else step,
                "components": [name for name in self.names if name not in gone],
                "left_out": sorted(gone),
                "optimizers": {name: list(kinds) for name, kinds in self.optimizers.items() if name not in gone},
                "rank": rank,
                "world_size": world_size,
                "rng": None if self.rng is None else dict(self.rng),
            },
        )


class Restore:
    """States that were read and checked, and are about to be given back."""

    def __init__(
        self,
        state: TrainState,
        tag: str,
        saved: dict[str, object],
        rng: dict[str, Any] | None,
        step: int | None,
        later: dict[str, Callable[[], object]],
        remarks: list[str],
        optimizers: Mapping[str, Sequence[str]],
    ) -> None:
        self._state = state
        self._tag = tag
        self._saved = saved
        self._rng = rng
        self.step = step
        self._later = later
        self.remarks = remarks
        """What the resume could not do, one clause each."""
        self._optimizers = optimizers

    def apply(self) -> None:
        """Changes the caller's objects: components in the order of their registration, the random state last.

        An error here comes from the `load_state_dict` of a component, with a note that says what was changed before.
        """
        from relight.torch import rng, state_dict

        done: list[str] = []
        for name, component in self._state.components.items():
            if name not in self._saved:
                continue
            try:
                state_dict.restore(component, self._saved.pop(name))  # popped: its memory is free for the next one
            except BaseException as error:
                error.add_note(
                    f"relight: component {name!r} did not take its state from {self._tag}; restored before it: "
                    f"{', '.join(done) or 'nothing'}"
                )
                raise
            done.append(name)
        if self._rng is not None:
            rng.restore_global(self._rng)
        state = self._state
        state._resumed = self._tag
        state._unclaimed = self._later
        state._expired = set()
        state._saved_optimizers = self._optimizers
        state._warned_detached = False
        self.remarks += [_about_detached(name) for name in state_dict.detached_optimizers(state.components)]


@dataclass(frozen=True, slots=True)
class _Facts:
    """The content of `train_state.pt`."""

    step: int | None
    components: Sequence[str]
    left_out: Sequence[str]
    rank: int | None
    world_size: int | None
    rng: dict[str, Any] | None
    optimizers: Mapping[str, Sequence[str]]

    @classmethod
    def of(cls, source: Source) -> _Facts:
        if STATE_FILE not in source.files:  # saved with files={"model.pt": ...}
            names = [file.removesuffix(".pt") for file in source.files if file.endswith(".pt")]
            return cls(None, names, (), None, None, None, {})
        found = source.load(STATE_FILE)
        version = found.get("version") if isinstance(found, dict) else None
        if isinstance(version, int) and version > STATE_VERSION:
            raise InvalidArgument(
                f"{STATE_FILE} of {source.tag} is of version {version}, and this relight reads up to {STATE_VERSION}; "
                "use a newer relight",
                tag=source.tag,
            )
        try:
            assert isinstance(found, dict)
            components = [str(name) for name in found["components"]]
            kinds = found.get("optimizers", {})  # early files have none
            optimizers = {str(name): [str(one) for one in kinds[name]] for name in kinds}
            rank, world_size = found["rank"], found["world_size"]
            facts = cls(found["step"], components, found["left_out"], rank, world_size, found["rng"], optimizers)
            lost = [name for name in components if _file_of(name) not in source.files]
        except (AssertionError, KeyError, TypeError) as cause:
            raise CorruptCheckpoint(
                f"{STATE_FILE} of {source.tag} is not what relight writes; use another checkpoint", tag=source.tag
            ) from cause
        if lost:
            raise CorruptCheckpoint(
                f"{source.tag} lacks {', '.join(map(_file_of, lost))}, which its {STATE_FILE} names; use another "
                "checkpoint",
                tag=source.tag,
            )
        return facts


def _file_of(name: str) -> str:
    return f"{name}.pt"


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not name:
        raise InvalidArgument(f"{name!r} cannot name a component; give a non-empty string")
    if _file_of(name) == STATE_FILE:
        raise InvalidArgument(
            f"component {name!r} would be saved as {STATE_FILE}, which relight writes itself; rename it"
        )


def _about_detached(name: str) -> str:
    return (
        f"optimizer {name!r} holds no parameter of a registered model, so its step() moves none of them: the "
        "parameters were replaced after it was made. Make it anew from model.parameters(), or fill the model in place"
    )
