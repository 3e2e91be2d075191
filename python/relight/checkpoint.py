"""What there is in a root: checkpoints, their files, and what verifying or resuming one found.

Owns: the typed form of the engine's listings.
Must not: read a file; import torch.
Invariant: these objects are snapshots; they never change and never go back to the storage.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["Checkpoint", "CheckpointFile", "FileCheck", "Resumed", "Tier", "Verification"]

Tier = Literal["memory", "persistent"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFile:
    """One file of a checkpoint."""

    name: str
    path: str
    """Where it is below the directory of the tag; differs from `name` where that cannot be a file name."""
    bytes: int
    crc32: int | None
    codec: str
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """One complete checkpoint, or a foreign directory that relight did not write."""

    tag: str
    step: int | None
    path: str
    """The directory of the tag."""
    files: tuple[CheckpointFile, ...]
    bytes: int
    tiers: tuple[Tier, ...]
    """Where it can be loaded from, nearest first."""
    foreign: bool
    """Written by something else (torch.save, DeepSpeed, Nebula): loaded by name only, never deleted."""
    left_behind: bool
    """A later run resumed from an older checkpoint and went another way."""
    best: bool
    run: int | None
    """Which run saved it; each resume starts a new one."""
    sequence: int | None
    generation: int | None
    world_size: int | None
    staged_at: dt.datetime | None
    committed_at: dt.datetime | None
    """None: it is in memory only, so far."""
    meta: Mapping[str, Any]
    """What was given to `save(meta=...)`."""

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> Checkpoint:
        """One element of the engine's list."""
        return cls(
            tag=facts["tag"],
            step=facts.get("step"),
            path=facts["path"],
            files=tuple(
                CheckpointFile(
                    name=file["name"],
                    path=file["path"],
                    bytes=file["bytes"],
                    crc32=_checksum(file.get("crc32")),
                    codec=file.get("codec") or "none",
                    rank=file.get("rank") or 0,
                )
                for file in facts["files"]
            ),
            bytes=facts["bytes"],
            tiers=tuple(facts["tiers"]),
            foreign=facts["foreign"],
            left_behind=facts["left_behind"],
            best=bool(facts.get("best")),
            run=facts.get("run"),
            sequence=facts.get("sequence"),
            generation=facts.get("generation"),
            world_size=facts.get("world_size"),
            staged_at=_time(facts.get("staged_at")),
            committed_at=_time(facts.get("committed_at")),
            meta=facts.get("meta") or {},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FileCheck:
    """What verifying one file found."""

    name: str
    bytes: int
    ok: bool
    problem: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What verifying a checkpoint found: every byte was read and compared with its checksum."""

    tag: str
    ok: bool
    files: tuple[FileCheck, ...]

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> Verification:
        """The engine's report."""
        files = tuple(
            FileCheck(name=f["name"], bytes=f["bytes"], ok=f["ok"], problem=f.get("problem")) for f in facts["files"]
        )
        return cls(tag=facts["tag"], ok=facts["ok"], files=files)

    def __bool__(self) -> bool:
        return self.ok


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """What a resume did."""

    tag: str
    step: int
    tier: Tier
    seconds: float
    drained: tuple[str, ...]
    """Tags that a process which died had left in memory, not persisted; they are being persisted now."""
    skipped: tuple[str, ...]
    """Newer tags that could not be used, with the reason each."""


def _time(text: str | None) -> dt.datetime | None:
    return None if not text else dt.datetime.fromisoformat(text)


def _checksum(value: int | str | None) -> int | None:
    return int(value, 16) if isinstance(value, str) else value
