"""Names and modes: what people call things, who may read what is saved, and copies of it. Public API only."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import relight
import torch
from relight import runtime


def values(fill: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((1000,), float(fill))}


def fill_of(state: Any) -> float:
    (fill,) = state["w"].unique().tolist()
    return float(fill)


@pytest.fixture(autouse=True)
def memory(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An engine and a memory tier of this test alone."""
    monkeypatch.setenv("RELIGHT_MEMORY_DIR", str(tmp_path_factory.mktemp("memory")))
    monkeypatch.setenv("RELIGHT_MEMORY_BYTES_MAX", str(256 << 20))
    yield
    runtime.close(60)


def run(code: str, *arguments: object, umask: int = 0o022) -> str:
    """Output of a process of its own: the umask is one for all threads of a process."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        umask=umask,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# ---- copies ----


@pytest.mark.parametrize("follow", [True, False], ids=["links followed", "links kept"])
def test_bl_151_a_copied_tree_restores(tmp_path: Path, follow: bool) -> None:
    """Guards: a link where a copy needs a file, and absolute paths in what is written."""
    root, copy = tmp_path / "run", tmp_path / "bucket" / "copied"
    model = torch.nn.Linear(4, 4)
    with relight.Checkpointer(root) as ckpt:
        ckpt.save(1, values(1))
        for fill in (2.0, 3.0):  # the second is a new generation of the tag
            with torch.no_grad():
                model.weight.fill_(fill)
            ckpt.save(2, relight.TrainState(model=model))
    assert not [path for path in root.rglob("*") if path.is_symlink()]
    assert (root / "latest").read_text().strip() == "global_step2"
    shutil.copytree(root, copy, symlinks=not follow)
    shutil.rmtree(root)
    again = torch.nn.Linear(4, 4)
    with relight.Checkpointer(copy) as ckpt:
        assert ckpt.resume(relight.TrainState(model=again)) == 2
        assert torch.equal(again.weight, torch.full((4, 4), 3.0))
        assert fill_of(ckpt.load(1)) == 1 and all(ckpt.verify(one.tag) for one in ckpt.list())
    for path in copy.rglob("*"):
        assert b"bucket" not in path.read_bytes() if path.is_file() else True


# ---- modes ----

SAVE_EACH_WAY = """
    import os, sys, torch, relight
    folder = sys.argv[1]
    state = {"w": torch.ones(50_000)}
    open(os.path.join(folder, "plain"), "w").close()
    os.mkdir(os.path.join(folder, "made"))
    relight.save(state, os.path.join(folder, "saved.pt"))
    relight.save_async(state, os.path.join(folder, "async.pt")).result(60)
    with relight.Checkpointer(os.path.join(folder, "run"), keep=2) as ckpt:
        for step in (1, 2, 3, 3):
            ckpt.save(step, relight.TrainState(model=torch.nn.Linear(2, 2)))
    import nebulaml as nm
    nm.init(persistent_storage_path=os.path.join(folder, "nebula"))
    nm.Checkpoint("global_step1", 1).save("model.pt", state)
    nm.flush_persistence()
"""


@pytest.mark.parametrize("setgid", [False, True], ids=["plain", "setgid"])
@pytest.mark.parametrize("umask", [0o022, 0o002, 0o007, 0o077], ids=lambda umask: f"{umask:03o}")
def test_bl_153_modes_and_groups_are_those_of_a_plain_open_and_mkdir(tmp_path: Path, umask: int, setgid: bool) -> None:
    """Guards: a temporary file of 0600 that is renamed into place, so that the group cannot read it."""
    folder = tmp_path / "shared"
    folder.mkdir()
    if setgid:
        if os.geteuid() == 0:
            os.chown(folder, -1, 4242)
        folder.chmod(0o2775)
    run(SAVE_EACH_WAY, folder, umask=umask)
    plain, made = (folder / "plain").stat(), (folder / "made").stat()
    assert stat.S_IMODE(plain.st_mode) == 0o666 & ~umask  # else this test compares nothing
    seen = 0
    for path in [
        folder / "saved.pt",
        folder / "async.pt",
        *(folder / "run").rglob("*"),
        *(folder / "nebula").rglob("*"),
    ]:
        like, found = (made if path.is_dir() else plain), path.stat()
        assert oct(found.st_mode) == oct(like.st_mode), path
        assert found.st_gid == like.st_gid, path
        seen += 1
    assert seen > 15


def test_bl_153_a_file_that_is_replaced_is_as_one_that_is_made(tmp_path: Path) -> None:
    code = """
    import sys, torch, relight
    relight.save({"w": torch.ones(3)}, sys.argv[1])
    relight.save_async({"w": torch.ones(3)}, sys.argv[1]).result(60)
    """
    run(code, tmp_path / "a.pt", umask=0o077)
    run(code, tmp_path / "a.pt", umask=0o022)
    assert stat.S_IMODE((tmp_path / "a.pt").stat().st_mode) == 0o644


def test_bl_154_the_umask_is_never_changed(tmp_path: Path) -> None:
    """Guards: a umask that is set and set back, which is the process's: files of other threads get wrong modes."""
    code = """
    import os, re, sys, threading, torch, relight
    folder = sys.argv[1]
    state = {"w": torch.ones(1000)}
    done = threading.Event()
    wrong = []
    def watch():
        number = 0
        while not done.is_set():
            number += 1
            path = os.path.join(folder, f"other{number % 8}")
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o666))
            if os.stat(path).st_mode & 0o777 != 0o640:
                wrong.append(path)
            os.unlink(path)
            with open("/proc/self/status") as status:
                if re.search(r"^Umask:\\s*(\\d+)", status.read(), re.M)[1] != "0027":
                    wrong.append("the umask")
    watcher = threading.Thread(target=watch)
    watcher.start()
    with relight.Checkpointer(os.path.join(folder, "run"), keep=5) as ckpt:
        def save(number):
            for turn in range(2):
                relight.save(state, os.path.join(folder, f"{number}.pt"))
                relight.save_async(state, os.path.join(folder, f"{number}a.pt"))
                ckpt.save(f"of{number}_step{turn}", state)
        threads = [threading.Thread(target=save, args=(number,)) for number in range(20)]
        [one.start() for one in threads]
        [one.join() for one in threads]
    done.set()
    watcher.join()
    print(len(wrong), wrong[:3])
    """
    assert run(code, tmp_path, umask=0o027).startswith("0 ")


# ---- names ----

ODD_NAMES = (
    *("a b", "a_b", "a/b", "a:b", "a\\b", "a.b", "..", ".", "", "CON", "con.pt", "x" * 180, "x" * 255, "x" * 5000),
    *("a\nb", "a\0b", "🚀", "a%2Fb", "模型", "../x", "/x", "-rf", ".hidden", "trailing.", "trailing ", "latest"),
    *("complete.txt", "manifest.json", ".relight", "Prüfung", "val/loss=0.1", "\udcff"),
)


def accepted(save: Callable[[str], relight.Handle]) -> dict[str, float]:
    """Which of the names were taken, each with the fill of what was saved under it."""
    kept = {}
    for fill, name in enumerate(ODD_NAMES):
        try:
            save(name).result(60)
        except relight.InvalidArgument as error:
            assert str(error)
        else:
            kept[name] = float(fill)
    return kept


def test_bl_158_keys_are_all_kept(tmp_path: Path) -> None:
    state = {name: torch.full((3,), float(fill)) for fill, name in enumerate(ODD_NAMES) if name.isprintable() or name}
    state[""] = torch.zeros(3)
    relight.save(state, tmp_path / "state.pt")
    for loaded in (relight.load(tmp_path / "state.pt"), torch.load(tmp_path / "state.pt")):
        assert list(loaded) == list(state) and all(torch.equal(loaded[key], state[key]) for key in state)


def test_bl_158_tags_are_kept_apart_or_refused_and_none_leaves_the_root(tmp_path: Path) -> None:
    root = tmp_path / "around" / "run"
    with relight.Checkpointer(root) as ckpt:
        kept = accepted(lambda name: ckpt.save(name, values(ODD_NAMES.index(name))))
        assert {"a b", "a_b", "a.b", "🚀", "模型", "a%2Fb", "Prüfung", "-rf"} <= set(kept)
        assert not {"a/b", "a\\b", "..", ".", "", "a\nb", "a\0b", "../x", "/x", "CON", "latest", ".relight"} & set(kept)
        assert {one.tag for one in ckpt.list()} == set(kept)
        for name, fill in kept.items():
            assert fill_of(ckpt.load(name)) == fill
            assert fill_of(torch.load(root / name / "state.pt")) == fill
    assert [path.name for path in (tmp_path / "around").iterdir()] == ["run"]


def test_bl_158_file_names_are_kept_apart_or_refused_and_none_leaves_the_tag(tmp_path: Path) -> None:
    root = tmp_path / "around" / "run"
    with relight.Checkpointer(root) as ckpt:
        kept = accepted(lambda name: ckpt.save(1, files={name: values(ODD_NAMES.index(name))}))
        assert set(ODD_NAMES) - set(kept) == {"", "x" * 5000, "\udcff"}
        (found,) = ckpt.list()
        assert {file.name for file in found.files} == set(kept)
        assert len({file.path.casefold() for file in found.files}) == len(kept)
        for name, fill in kept.items():
            assert fill_of(ckpt.load(1, name)) == fill
        assert ckpt.verify(1)
    assert (root / "global_step1" / "complete.txt").read_text() == "OK"
    assert sorted(path.name for path in root.iterdir() if path.is_dir()) == [".relight", "global_step1"]
    assert [path.name for path in (tmp_path / "around").iterdir()] == ["run"]


def test_bl_158_names_that_differ_in_case_only_are_refused_at_the_call(tmp_path: Path) -> None:
    """Guards: a mistake of the call that only the handle told of, hours of training later."""
    with relight.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.save("best", values(1))
        with pytest.raises(relight.InvalidArgument, match="case only"):
            ckpt.save("Best", values(2))  # perhaps before the first is on the disk
        ckpt.wait()
        with pytest.raises(relight.InvalidArgument, match="case only"):
            ckpt.save("BEST", values(3))
        with pytest.raises(relight.InvalidArgument, match="case is ignored"):
            ckpt.save(1, files={"model.pt": 1, "Model.pt": 2})
        ckpt.save("best", values(4))
        ckpt.wait()
        assert [one.tag for one in ckpt.list()] == ["best"] and fill_of(ckpt.load("best")) == 4


@pytest.mark.parametrize("tag", ["val/loss=0.1", "../x", "/tmp/x", "a/../../x"])
def test_bl_159_a_path_as_tag_is_refused_by_every_call(tmp_path: Path, tag: str) -> None:
    root = tmp_path / "around" / "run"
    with relight.Checkpointer(root) as ckpt:
        ckpt.save("loss=0.1", values(1)).result(60)
        for call in (lambda: ckpt.save(tag, values(2)), lambda: ckpt.load(tag), lambda: ckpt.delete(tag)):
            with pytest.raises(relight.InvalidArgument, match="holds '/'"):
                call()
        with pytest.raises(relight.InvalidArgument, match="holds '/'"):
            ckpt.verify(tag)
        assert fill_of(ckpt.load("loss=0.1")) == 1
    assert [path.name for path in (tmp_path / "around").iterdir()] == ["run"]


WINDOWS = re.compile(r'[<>:"|?*\\\x00-\x1f]|[. ]$|^(con|prn|aux|nul|com\d|lpt\d)(\.|$)', re.IGNORECASE)


def test_bl_161_no_name_that_relight_makes_is_reserved_on_windows(tmp_path: Path) -> None:
    """Guards: a time with colons in a name. Also of those that are there only while a save is under way."""
    root, done = tmp_path / "run", threading.Event()
    seen: set[str] = set()

    def watch() -> None:
        while not done.is_set():
            for _, folders, files in os.walk(tmp_path):
                seen.update(folders, files)

    watcher = threading.Thread(target=watch)
    watcher.start()
    with relight.Checkpointer(root, keep=2) as ckpt:
        for step in range(12):
            ckpt.save(step % 5, files={"a:b.pt": values(step), "nul": 1, "x" * 300: values(step)})
            relight.save_async(values(step), tmp_path / "single.pt")
    done.set()
    watcher.join()
    seen.update(path.name for path in tmp_path.rglob("*"))
    assert len(seen) > 15
    assert [name for name in seen if WINDOWS.search(name)] == []


def test_bl_166_linked_roots_and_checkpoints_work_and_a_dangling_link_is_skipped(tmp_path: Path) -> None:
    real = tmp_path / "real"
    with relight.Checkpointer(real) as ckpt:
        for step in (1, 2):
            model = torch.nn.Linear(2, 2)
            with torch.no_grad():
                model.weight.fill_(step)
            ckpt.save(step, relight.TrainState(model=model))
    (real / "global_step2").rename(tmp_path / "elsewhere")
    (real / "global_step2").symlink_to(tmp_path / "elsewhere")
    (real / "global_step9").symlink_to(tmp_path / "nowhere")
    (tmp_path / "root").symlink_to("real")
    model = torch.nn.Linear(2, 2)
    with relight.Checkpointer(tmp_path / "root") as ckpt:
        assert [one.tag for one in ckpt.list()] == ["global_step1", "global_step2"]
        with pytest.warns(relight.ResumeWarning, match="global_step9 cannot be used: a link to nothing"):
            assert ckpt.resume(relight.TrainState(model=model)) == 2
        assert torch.equal(model.weight, torch.full((2, 2), 2.0))
        assert ckpt.verify(2)
        ckpt.save(2, files={"more.pt": values(5)}).result(60)
        assert fill_of(torch.load(tmp_path / "elsewhere" / "more.pt")) == 5
        with pytest.raises(relight.CorruptCheckpoint, match="a link to nothing"):
            ckpt.load(9)
    assert (real / "global_step2").is_symlink() and not (tmp_path / "nowhere").exists()


# ---- directories and counts ----


@pytest.mark.parametrize("name", ["Prüfung Ångström", "检查点", "🚀🔥", "a\u0301 é", "tab\there"])
def test_bl_030_a_directory_with_any_name(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name / name
    with relight.Checkpointer(folder) as ckpt:
        ckpt.save(1, values(1), meta={"note": name})
        ckpt.save(name.replace("\t", "-"), values(2))
    relight.save(values(3), folder / f"{name}.pt")
    relight.save_async(values(4), folder / f"{name}4.pt").result(60)
    with relight.Checkpointer(folder) as ckpt:
        assert fill_of(ckpt.load(1)) == 1 and ckpt.list()[-1].meta == {"note": name}
        assert fill_of(ckpt.load(name.replace("\t", "-"))) == 2
    assert fill_of(torch.load(folder / f"{name}.pt")) == 3
    assert fill_of(torch.load(folder / f"{name}4.pt")) == 4
    listed = json.loads(command("ls", folder, "--json"))
    assert "global_step1" in json.dumps(listed)
    command("verify", folder)


def command(*arguments: object) -> str:
    """Output of the command where torch cannot be imported."""
    code = "import sys; sys.modules['torch'] = None; from relight.cli import main; sys.exit(main())"
    return run(code, *arguments)


def test_bl_033_all_readers_show_the_same_70_000_entries_of_a_checkpoint(tmp_path: Path) -> None:
    """Guards: batches of 1,000 in a pickle, 16-bit counts in a zip."""
    count = 70_000
    state = {f"k{i}": torch.tensor(float(i)) for i in range(count)}
    with relight.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.save(1, state)
        ours = ckpt.load(1)
    path = tmp_path / "run" / "global_step1" / "state.pt"
    for loaded in (ours, torch.load(path)):
        assert list(loaded) == list(state)
        assert torch.equal(torch.stack(list(loaded.values())), torch.arange(float(count)))
    shown = json.loads(command("show", path, "--json"))["contents"]
    assert [leaf["name"] for leaf in shown if leaf["type"].startswith("tensor")] == list(state)


def test_bl_032_a_hundred_thousand_tensors_cost_bytes_near_those_of_torch(tmp_path: Path) -> None:
    """The cost of a tensor beside its data, in the file: bounded, and near that of torch.save."""
    count, data = 100_000, 64
    state = {f"k{i}": torch.full((16,), float(i)) for i in range(count)}
    torch.save(state, tmp_path / "torch.pt")
    with relight.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.save(1, state)
    path = tmp_path / "run" / "global_step1" / "state.pt"
    ours, theirs = (one.stat().st_size / count - data for one in (path, tmp_path / "torch.pt"))
    assert ours < 400 and ours < 1.25 * theirs, (ours, theirs)
    manifest = path.parent / ".relight" / "manifest.json"
    assert manifest.stat().st_size < 10_000  # per file and per chunk, not per tensor
    loaded = relight.load(path, mmap=True)
    assert all(torch.equal(loaded[key], state[key]) for key in list(state)[::997])
