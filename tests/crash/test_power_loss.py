"""What a power cut leaves: the recorded system calls of real saves, replayed with only what was synced.

Two disks are replayed. The lazy one has lost every name that no sync of its directory followed. The eager one has all
names at once, but of each file only the bytes that were synced: what a journal of metadata alone leaves. A checkpoint
that survives both needs write, sync of the file, rename, sync of the directory, and the manifest after all files.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from .processes import Zygote
from .shim import Call, Shim


@dataclass(eq=False)
class File:
    """A file: what would be read of it after the cut. None: nothing was ever synced."""

    synced: Path | None = None


@dataclass(eq=False)
class Directory:
    """A directory: its names now, and its names at its last sync."""

    names: dict[str, File | Directory] = field(default_factory=dict)
    synced: dict[str, File | Directory] = field(default_factory=dict)


class Disk:
    """The state of a disk, from the recorded calls. All that was there before them is durable."""

    def __init__(self, root: Path, before: Path, kept: Path) -> None:
        self._top = str(root)
        self._kept = kept
        self.root = self._read(before)

    def _read(self, path: Path) -> Directory:
        names: dict[str, File | Directory] = {}
        for entry in path.iterdir():
            names[entry.name] = self._read(entry) if entry.is_dir() else File(entry)
        return Directory(names, dict(names))

    def _find(self, path: str) -> File | Directory | None:
        found: File | Directory | None = self.root
        for name in path.removeprefix(self._top).strip("/").split("/"):
            if name:
                found = found.names.get(name) if isinstance(found, Directory) else None
        return found

    def _parent(self, path: str) -> tuple[Directory, str]:
        above, name = os.path.split(path)
        parent = self._find(above)
        assert isinstance(parent, Directory), path
        return parent, name

    def apply(self, call: Call) -> bool:
        """Takes one call into account; whether it changed what a cut leaves."""
        if call.result < 0 or call.path.endswith(" (deleted)"):
            return False
        if call.name in ("fsync", "fdatasync"):
            found = self._find(call.path)
            if isinstance(found, Directory):
                found.synced = dict(found.names)
            elif found is not None:
                found.synced = self._kept / str(call.number)
            return True
        if call.name == "mkdir" or (call.creates and self._find(call.path) is None):
            parent, name = self._parent(call.path)
            parent.names[name] = Directory() if call.name == "mkdir" else File()
            return True
        if call.name == "rename":
            parent, name = self._parent(call.path)
            moved = parent.names.pop(name)
            parent, name = self._parent(call.second)
            parent.names[name] = moved
            return True
        if call.name in ("unlink", "rmdir"):
            parent, name = self._parent(call.path)
            del parent.names[name]
            return True
        return False

    def content(self, *, eager: bool) -> tuple[object, ...]:
        """What a cut now would leave, to be compared with what another leaves."""

        def of(directory: Directory) -> tuple[object, ...]:
            names = directory.names if eager else directory.synced
            return tuple(
                (name, of(found) if isinstance(found, Directory) else found.synced)
                for name, found in sorted(names.items())
            )

        return of(self.root)

    def write(self, target: Path, *, eager: bool) -> None:
        """Makes `target` what a cut now would leave."""
        self._write(self.root, target, eager)

    def _write(self, directory: Directory, target: Path, eager: bool) -> None:
        target.mkdir()
        for name, found in (directory.names if eager else directory.synced).items():
            if isinstance(found, Directory):
                self._write(found, target / name, eager)
            elif found.synced is None:
                (target / name).touch()
            else:
                os.link(found.synced, target / name)


def cuts(shim: Shim, root: Path, before: Path, into: Path) -> Iterator[tuple[Path, str]]:
    """Every state that a power cut could leave, and the last mark before it."""
    disk = Disk(root, before, shim.kept)
    number, last, seen = itertools.count(), "", set()
    for call in shim.calls():
        if call.name == "mark":
            last = call.path
        elif not disk.apply(call):
            continue
        for eager in (False, True):
            state = last, disk.content(eager=eager)
            if state in seen:
                continue
            seen.add(state)
            path = into / str(next(number))
            disk.write(path, eager=eager)
            yield path, last


def test_bl_054_whatever_was_reported_as_committed_survives_a_power_cut(
    shim: Shim, processes: Zygote, root: Path, tmp_path: Path
) -> None:
    """Guards: a name that is durable before its bytes, a manifest before its files, one reported before its sync."""
    before, into = tmp_path / "before", tmp_path / "cuts"
    into.mkdir()
    shim.run(
        """
import shutil
root, before, recording = sys.argv[1:]
def state(n):
    return {"a.pt": {"n": n, "w": torch.full((300,), float(n))}, "b.pt": {"n": n}}
with relight.Checkpointer(root, keep=2) as ckpt:
    ckpt.save(1, files=state(1), blocking=True)
    shutil.copytree(root, before)
    rules(recording)
    mark("1")
    for n, tag in ((2, "global_step2"), (3, "global_step3"), (4, "global_step3"), (5, "global_step5")):
        ckpt.save(tag, files=state(n), blocking=True)
        mark(str(n))
    rules("")
""",
        root,
        before,
        shim.recording(root),
    )
    found = list(cuts(shim, root, before, into))
    assert len(found) > 60
    assert {last for _, last in found} >= {"1", "2", "3", "4"}
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps([(str(path), int(last)) for path, last in found]))
    child = processes.start(
        """
import json
with open(sys.argv[1]) as file:
    plan = json.load(file)
for path, committed in plan:
    with relight.Checkpointer(path) as ckpt:
        newest = ckpt.latest()
        assert newest is not None, (path, committed)
        a, b = ckpt.load(newest.tag, "a.pt"), ckpt.load(newest.tag, "b.pt")
        assert a["n"] == b["n"], (path, "a mixture")
        assert bool((a["w"] == a["n"]).all()), (path, "torn")
        assert a["n"] in (committed, committed + 1), (path, committed, a["n"])
        for one in ckpt.list():
            assert ckpt.verify(one.tag), (path, one.tag)
        # and the disk is good for the next save, to a tag that may be half there
        ckpt.save("global_step5", files={"a.pt": a, "b.pt": b}, blocking=True)
        assert ckpt.verify("global_step5"), path
""",
        plan,
    )
    child.end()


def test_bl_054_a_save_to_a_path_survives_a_power_cut(shim: Shim, root: Path, tmp_path: Path) -> None:
    """Guards: as above, for relight.save and save_async."""
    before, into = tmp_path / "before", tmp_path / "cuts"
    into.mkdir()
    root.mkdir()
    shim.run(
        """
import shutil
root, before, recording = sys.argv[1:]
path = root + "/model.pt"
relight.save(1, path)
shutil.copytree(root, before)
rules(recording)
mark("1")
relight.save(2, path)
mark("2")
relight.save_async(3, path).result()
mark("3")
rules("")
""",
        root,
        before,
        shim.recording(root),
    )
    for path, last in cuts(shim, root, before, into):
        value = int(torch.load(path / "model.pt", weights_only=True))
        assert value in (int(last), int(last) + 1), (path, last)


def test_bl_054_syncs_are_left_out_only_where_that_was_asked_for(shim: Shim, root: Path) -> None:
    """Guards: a default that is not durable, or `durable=False` that syncs after all."""
    root.mkdir()
    script = """
rules(sys.argv[2])
relight.save(torch.ones(10), sys.argv[1] + "/x.pt", durable=sys.argv[3] == "yes")
rules("")
"""
    shim.run(script, root, shim.recording(root), "no")
    assert [call.name for call in shim.calls() if "sync" in call.name] == []
    shim.record_file.unlink()
    shim.run(script, root, shim.recording(root), "yes")
    calls = shim.calls()
    synced = [number for number, call in enumerate(calls) if call.name in ("fsync", "fdatasync")]
    renamed = [number for number, call in enumerate(calls) if call.name == "rename"]
    written = [
        number for number, call in enumerate(calls) if call.name in ("pwrite", "write") and ".lock" not in call.path
    ]
    assert len(renamed) == 1 and len(synced) == 2
    assert written[-1] < synced[0] < renamed[0] < synced[1]
    assert calls[synced[0]].path == calls[renamed[0]].path
    assert calls[synced[1]].path == str(root)
