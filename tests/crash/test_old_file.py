"""Whatever ends a save, what was there before is there after; and what is mapped keeps its values."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path

import pytest
import relight
import torch

from .processes import Zygote
from .shim import Shim, rule
from .test_faults import BYTES


@pytest.fixture
def old(tmp_path: Path) -> Path:
    path = tmp_path / "model.pt"
    torch.save({"n": "old", "w": torch.arange(100_000)}, path)
    return path


# ---- BL-053: a save that fails ----

ENDINGS = {
    "write error": ("pwrite", errno.EIO, "relight.StorageUnavailable"),
    "no space": ("pwrite", errno.ENOSPC, "relight.StorageFull"),
    "quota": ("pwrite", errno.EDQUOT, "relight.StorageFull"),
    "fsync error": ("fsync", errno.EIO, "relight.StorageUnavailable"),
    "no right to rename": ("rename", errno.EACCES, "relight.StorageDenied"),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_bl_053_an_error_of_the_storage_leaves_the_old_file_byte_for_byte(shim: Shim, old: Path, ending: str) -> None:
    """Guards: a save that has truncated what it was to replace."""
    call, code, kind = ENDINGS[ending]
    content = old.read_bytes()
    pattern = old if call == "rename" else BYTES
    first = 2 if call == "pwrite" else 1
    shim.run(
        f"""
path, faults = sys.argv[1:]
state = {{"w": torch.ones(3_000_000)}}
for save in (lambda: relight.save(state, path), lambda: relight.save_async(state, path).result()):
    rules(faults)
    try:
        save()
        raise AssertionError("no error")
    except {kind} as error:
        assert "model.pt" in str(error), error
        assert error.errno == {code}, error.errno
    assert seen() >= {first}
    rules("")
    assert relight.load(path)["n"] == "old"
""",
        old,
        rule(call, pattern, "errno", code, first=first),
    )
    assert old.read_bytes() == content
    assert [name for name in os.listdir(old.parent) if "tmp" in name] == []


def test_bl_053_an_object_that_cannot_be_pickled_leaves_the_old_file(old: Path) -> None:
    """Guards: a file that is opened before the object is known to be picklable."""
    content, before = old.read_bytes(), old.stat()
    state = {"w": torch.ones(1_000_000), "deep": [{"lambda": lambda: None}]}
    for save in (relight.save, relight.save_async):
        with pytest.raises(relight.NotPicklable, match="deep"):
            save(state, old)
    assert old.read_bytes() == content
    assert old.stat().st_ino == before.st_ino and old.stat().st_mtime_ns == before.st_mtime_ns
    assert [name for name in os.listdir(old.parent) if "tmp" in name] == []


def test_bl_053_an_object_that_raises_while_it_is_pickled_leaves_the_old_file(old: Path) -> None:
    """Guards: as above, for the user's own errors, lack of memory and Ctrl-C among them."""

    class Breaks:
        def __init__(self, error: BaseException) -> None:
            self.error = error

        def __reduce__(self) -> tuple[object, ...]:
            raise self.error

    content = old.read_bytes()
    for error in (MemoryError("no memory"), KeyboardInterrupt(), ValueError("mine")):
        with pytest.raises((type(error), relight.NotPicklable)) as caught:
            relight.save({"w": torch.ones(10), "x": Breaks(error)}, old)
        if not isinstance(error, ValueError):
            assert type(caught.value) is type(error), "what is no matter of pickling passes unchanged"
    assert old.read_bytes() == content
    assert [name for name in os.listdir(old.parent) if "tmp" in name] == []


def test_bl_053_ctrl_c_in_the_middle_of_a_write_leaves_the_old_file(shim: Shim, old: Path) -> None:
    """Guards: a blocking save that no Ctrl-C can end, or that leaves half a file when one does."""
    content = old.read_bytes()
    child = shim.start(
        """
path, faults = sys.argv[1:]
rules(faults)
say("ready")
try:
    relight.save(torch.ones(80_000_000), path)
    say("saved")
except KeyboardInterrupt:
    say("interrupted")
rules("")
relight.save({"n": "new"}, path + ".other")  # and the process is well
""",
        old,
        shim.hanging("pwrite", BYTES, first=2),
    )
    child.expect("ready")
    shim.await_hang()
    child.signal(signal.SIGINT)
    shim.let_go()
    child.expect("interrupted")
    assert child.end() == []
    assert old.read_bytes() == content
    assert torch.load(f"{old}.other", weights_only=True) == {"n": "new"}
    assert [name for name in os.listdir(old.parent) if "relight-tmp" in name] == []


@pytest.mark.parametrize("what", ["save", "async", "load"])
def test_bl_053_where_there_is_no_memory_there_is_an_error_and_the_old_file_stays(
    processes: Zygote, old: Path, what: str
) -> None:
    """Guards: an abort of the process when a buffer cannot be had, or a file cut short."""
    content = old.read_bytes()
    outcomes = []
    for spare_kib in (100, 1000, 3000, 9000, 13_000, 17_000, 22_000, 30_000, 300_000):
        child = processes.start(
            """
import resource
path, what, spare_kib = sys.argv[1:]
torch.save("old", path + ".other")
relight.load(path + ".other")
if what == "async":
    relight.runtime.engine()
state = {"n": "new", "w": torch.ones(30_000_000)}
with open("/proc/self/status") as status:
    size = next(int(line.split()[1]) for line in status if line.startswith("VmSize"))
say("ready")
resource.setrlimit(resource.RLIMIT_AS, ((size + int(spare_kib)) << 10, resource.RLIM_INFINITY))
try:
    if what == "save":
        relight.save(state, path)
    elif what == "async":
        relight.save_async(state, path).result()
    else:
        relight.load(path)
    outcome = "good"
except (MemoryError, RuntimeError, relight.StorageUnavailable) as error:
    outcome = type(error).__name__
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
say(outcome)
""",
            old,
            what,
            spare_kib,
        )
        child.expect("ready")
        outcomes.append((spare_kib, child.end()[0]))
        if outcomes[-1][1] == "good" and what != "load":
            assert torch.load(old, weights_only=True)["w"].numel() == 30_000_000
            old.write_bytes(content)
        assert old.read_bytes() == content
    print(outcomes)
    assert outcomes[-1][1] == "good"


def test_bl_053_a_failed_checkpoint_leaves_the_old_generation_of_its_tag(shim: Shim, root: Path) -> None:
    """Guards: a second save to a tag that has moved one of its files before it fails."""
    said = shim.run(
        """
root, faults = sys.argv[1:]
def state(n):
    return {"a.pt": {"n": n, "w": torch.full((300_000,), float(n))}, "b.pt": {"n": n}}
ckpt = relight.Checkpointer(root, options=relight.Options(attempts_max=1))
ckpt.save("last", files=state(1), step=1, blocking=True)
from pathlib import Path
content = {p.name: p.read_bytes() for p in Path(root, "last").glob("*.pt")}
errors = []
for nth in range(1, 100):
    rules(faults.replace("\\t1\\t", f"\\t{nth}\\t"))
    handle = ckpt.save("last", files=state(2), step=2)
    error = handle.exception()
    hit = seen() >= nth
    rules("")
    if error is None:
        break
    errors.append(error)
    found = ckpt.load("last", "a.pt"), ckpt.load("last", "b.pt")
    assert found[0]["n"] == found[1]["n"], found
    assert found[0]["n"] in (1, 2)
    assert ckpt.verify("last")
    if found[0]["n"] == 1:
        assert {p.name: p.read_bytes() for p in Path(root, "last").glob("*.pt")} == content, nth
say(len(errors), ckpt.load("last", "b.pt")["n"])
""",
        root,
        rule("fsync", f"{root}/last*", "errno", errno.EIO, count=1),
    )
    failures, n = map(int, said[0].split())
    assert failures >= 3 and n == 2


# ---- BL-059: files that are mapped ----


def test_bl_059_a_file_that_is_mapped_is_replaced_and_never_changed(processes: Zygote, tmp_path: Path) -> None:
    """Guards: a file that is overwritten in place under tensors that are mapped from it: new values, SIGBUS."""
    path, hard, soft = tmp_path / "model.pt", tmp_path / "hard.pt", tmp_path / "soft.pt"
    torch.save({"w": torch.zeros(3_000_000), "other": torch.ones(5)}, path)
    os.link(path, hard)
    soft.symlink_to(path.name)
    other = processes.start(
        """
loaded = relight.load(sys.argv[1], mmap=True)
say("mapped")
sys.stdin.readline()
assert bool((loaded["w"] == 0).all())
with relight.open(sys.argv[2]) as hard:
    assert bool((hard["w"] == 0).all())
say("unchanged")
""",
        path,
        hard,
    )
    other.expect("mapped")
    mine = relight.load(path, mmap=True)
    mine["w"][7] = 1
    relight.save(mine, path)
    assert mine["w"][7] == 1 and mine["w"].sum() == 1
    assert torch.load(path, weights_only=True)["w"].sum() == 1
    assert torch.load(hard, weights_only=True)["w"].sum() == 0, "the other name keeps what it had"
    mine["w"][8] = 1
    relight.save(mine, soft)
    assert soft.is_symlink() and os.readlink(soft) == path.name
    assert torch.load(path, weights_only=True)["w"].sum() == 2
    mine["w"][9] = 1
    relight.save_async(mine, soft).result()
    assert soft.is_symlink()
    assert torch.load(path, weights_only=True)["w"].sum() == 3
    small = {"w": torch.ones(1)}
    relight.save(small, path)  # shorter than what is mapped
    assert mine["w"].sum() == 3
    other.go_on()
    assert other.end() == ["unchanged"]


def test_bl_059_a_link_that_leads_nowhere_yet_stays_a_link(tmp_path: Path) -> None:
    """Guards: a link that is replaced by the file, so that the file lies on another disk than was meant."""
    (tmp_path / "disk").mkdir()
    link, chain = tmp_path / "model.pt", tmp_path / "chain.pt"
    link.symlink_to("disk/real.pt")
    chain.symlink_to(link)
    relight.save(1, chain)
    assert link.is_symlink() and chain.is_symlink()
    assert torch.load(tmp_path / "disk" / "real.pt", weights_only=True) == 1
    (tmp_path / "disk" / "real.pt").unlink()
    relight.save_async(2, link).result()
    assert link.is_symlink()
    assert torch.load(tmp_path / "disk" / "real.pt", weights_only=True) == 2
    broken = tmp_path / "broken.pt"
    broken.symlink_to("missing/real.pt")
    with pytest.raises(relight.CheckpointError, match=r"real\.pt|broken\.pt"):
        relight.save(3, broken)
    assert broken.is_symlink()


def test_bl_059_what_is_mapped_from_a_checkpoint_outlives_its_retention(processes: Zygote, root: Path) -> None:
    """Guards: retention that truncates or recycles a file under a mapping, here and in another process."""
    script = """
with relight.Checkpointer(sys.argv[1], keep=1) as ckpt:
    ckpt.save(1, {"w": torch.full((2_000_000,), 1.0)}, blocking=True)
"""
    processes.start(script, root).end()
    readers = [
        processes.start(
            """
path = sys.argv[1] + "/global_step1/state.pt"
if sys.argv[2] == "load":
    w = relight.load(path, mmap=True)["w"]
elif sys.argv[2] == "open":
    view = relight.open(path)
    w = view["w"]
else:
    w = relight.Checkpointer(sys.argv[1]).load(1, mmap=True)["w"]
say("mapped")
sys.stdin.readline()
assert bool((w == 1).all())
""",
            root,
            way,
        )
        for way in ("load", "open", "checkpointer")
    ]
    for reader in readers:
        reader.expect("mapped")
    said = processes.start(
        """
with relight.Checkpointer(sys.argv[1], keep=1) as ckpt:
    mine = ckpt.load(1, mmap=True)["w"]
    for n in (2, 3):
        ckpt.save(n, {"w": torch.full((2_000_000,), float(n))}, blocking=True)
    assert bool((mine == 1).all())
    say(*(one.step for one in ckpt.list()))
""",
        root,
    ).end()
    assert said[0].split()[-1] == "3"
    for reader in readers:
        reader.go_on()
        reader.end()
