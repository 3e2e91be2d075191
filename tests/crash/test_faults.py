"""System calls that fail: the error that the user gets, what stays on the disk, and what the next save does."""

from __future__ import annotations

import csv
import errno
import os
import signal
from pathlib import Path

import pytest
import torch

from .shim import Shim, rule

TEMPORARY = "*/.relight-tmp-*"  # fnmatch: the files that bytes are written to before they have their name
BYTES = "*/.relight-tmp-*[!k]"  # of these, not the locks


def names(directory: Path) -> list[str]:
    return sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())


def history(root: Path) -> list[dict[str, str]]:
    with open(root / "checkpointHistories.csv", newline="") as file:
        return list(csv.DictReader(file))


# ---- short reads and writes ----


def test_bl_027_short_writes_and_short_reads_are_continued(shim: Shim, root: Path) -> None:
    """Guards: a system call that moves less than it was asked to, taken for all of it."""
    root.mkdir()
    limit = 1_000_000
    cut = "".join(rule(call, f"{root}/*", "short", limit) for call in ("write", "pwrite", "read", "pread"))
    shim.run(
        """
import hashlib
root, cut = sys.argv[1:]
generator = torch.Generator().manual_seed(27)
state = {"w": torch.randint(-128, 127, (9_000_001,), generator=generator, dtype=torch.int8), "tail": torch.ones(3)}
digest = hashlib.sha256(state["w"].numpy()).hexdigest()
rules(cut)
relight.save(state, root + "/plain.pt")
relight.save_async(state, root + "/async.pt").result()
with relight.Checkpointer(root + "/tags") as ckpt:
    ckpt.save(1, state, blocking=True)
    assert ckpt.verify(1)
assert seen(1) > 27, "the writes were not cut"
for path in ("/plain.pt", "/async.pt", "/tags/global_step1/state.pt"):
    loaded = relight.load(root + path)
    assert hashlib.sha256(loaded["w"].numpy()).hexdigest() == digest, path
    assert loaded["tail"].tolist() == [1, 1, 1]
assert seen(3) > 27, "the reads were not cut"
""",
        root,
        cut,
    )
    for path in ("plain.pt", "async.pt", "tags/global_step1/state.pt"):
        assert torch.load(root / path, weights_only=True)["tail"].tolist() == [1, 1, 1]


# ---- no space ----

FULL = {
    "a: creation": ("open", BYTES, 1),
    "a: reservation": ("fallocate", BYTES, 1),
    "b: header": ("pwrite", BYTES, 1),
    "c: last bytes": ("pwrite", BYTES, 0),  # 0: the last one
    "d: fsync": ("fsync", BYTES, 1),
}


@pytest.mark.parametrize("where", FULL)
def test_bl_066_no_space_at_any_point_is_storage_full_and_the_old_file_stays(
    shim: Shim, root: Path, where: str
) -> None:
    """Guards: a process that aborts, an error of the closing that hides the first, an old file cut short."""
    call, pattern, first = FULL[where]
    root.mkdir()
    old = root / "model.pt"
    torch.save("old", old)
    content = old.read_bytes()
    faults = rule(call, pattern, "errno", errno.ENOSPC, first=first or 10**6)
    shim.run(
        """
path, faults, last = sys.argv[1:]
state = torch.ones(5_000_000)
def arm():
    rules(faults)
    if last:
        handle = relight.save_async(state, path + ".other") if last == "async" else relight.save(state, path + ".other")
        if handle:
            handle.result()
        os.unlink(path + ".other")
        assert seen() > 1
        rules(faults.replace("1000000", str(seen())))
arm()
try:
    relight.save(state, path)
except relight.StorageFull as error:
    assert "model.pt" in str(error) and isinstance(error, OSError) and error.errno == 28, (error, error.errno)
    assert isinstance(error.__cause__, OSError) or "No space left" in str(error), (error, error.__cause__)
else:
    raise AssertionError("no error")
assert seen() >= 1
handle = None
last = last and "async"
arm()
try:
    handle = relight.save_async(state, path)
except relight.StorageFull:
    pass
if handle is not None:
    error = handle.exception()
    assert isinstance(error, relight.StorageFull), error
    assert "model.pt" in str(error)
rules("")
""",
        old,
        faults,
        "" if first else "save",
    )
    assert old.read_bytes() == content
    assert names(root) == ["model.pt"]


@pytest.mark.parametrize("where", FULL)
def test_bl_066_no_space_while_a_checkpoint_is_persisted_leaves_the_last_good_one(
    shim: Shim, root: Path, where: str
) -> None:
    """Guards: as above for a tag; and a failed save that costs the next one."""
    call, pattern, first = FULL[where]
    pattern = pattern.replace("*/", f"{root}/global_step2/*/", 1)
    faults = rule(call, pattern, "errno", errno.ENOSPC, first=first or 3)  # 10 MB in chunks of 4
    said = shim.run(
        """
import warnings
root, faults = sys.argv[1:]
state = torch.ones(2_600_000)
with relight.Checkpointer(root, options=relight.Options(attempts_max=2, retry_delay_s=0)) as ckpt:
    ckpt.save(1, {"n": 1, "w": state}, blocking=True)
    rules(faults)
    handle = ckpt.save(2, {"n": 2, "w": state})
    error = handle.exception()
    assert isinstance(error, relight.StorageFull), error
    assert error.tag == "global_step2" and "global_step2" in str(error) and "state.pt" in str(error), error
    assert error.errno == 28, error.errno
    say([one.step for one in ckpt.list()], ckpt.latest().step, ckpt.load(ckpt.latest().tag)["n"])
    rules("")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ckpt.save(3, {"n": 3, "w": state}, blocking=True)
    assert [w.category for w in caught] == [relight.SaveFailedWarning] or not caught, caught
    say([one.step for one in ckpt.list()], ckpt.load()["n"])
""",
        root,
        faults,
    )
    assert said == ["[1] 1 1", "[1, 3] 3"]
    for step in (1, 3):
        assert torch.load(root / f"global_step{step}" / "state.pt", weights_only=True)["n"] == step
    assert not (root / "global_step2" / "complete.txt").exists()


# ---- transient and lasting errors ----


@pytest.mark.parametrize("call", ["pwrite", "fsync", "open", "rename"])
def test_bl_067_two_errors_and_then_success_is_a_commit_with_each_try_on_a_new_file(
    shim: Shim, root: Path, call: str
) -> None:
    """Guards: a second fsync of a file whose first one failed, which says that all is well when it is not."""
    pattern = f"{root}/global_step2/*/state.pt" if call == "rename" else f"{root}/global_step2/{BYTES}"
    faults = rule(call, pattern, "errno", errno.EIO, first=1, count=2)
    said = shim.run(
        """
root, faults, recording = sys.argv[1:]
with relight.Checkpointer(root, options=relight.Options(attempts_max=3, retry_delay_s=0)) as ckpt:
    ckpt.save(1, {"n": 1}, blocking=True)
    rules(recording + faults)
    handle = ckpt.save(2, {"n": 2, "w": torch.ones(100_000)}, blocking=True)
    say(handle.progress().attempts, seen())
    rules("")
    assert ckpt.verify(2)
    say([one.step for one in ckpt.list()], ckpt.load()["n"])
""",
        root,
        faults,
        shim.recording(root),
    )
    assert said[0].split()[0] == "3"
    assert int(said[0].split()[1]) >= 3
    assert said[1] == "[1, 2] 2"
    # between an error of a file and the next use of its name, the name is a new file
    failed = None
    for step in shim.calls():
        if step.result == -errno.EIO and call in ("pwrite", "fsync"):
            failed = step.path
        elif failed is not None and step.path == failed:
            if step.creates:
                failed = None
            else:
                assert step.name == "unlink" or step.result < 0, f"{step} after an error of this file"
    assert failed is None
    lines = [line for line in history(root) if line["tag"] == "global_step2" and line["error"]]
    assert len(lines) == 2, "each failed try has its line"
    assert all(line["file"] == "state.pt" or not line["file"] for line in lines)


def test_bl_067_errors_that_last_are_reported_and_training_goes_on(shim: Shim, root: Path) -> None:
    """Guards: a failing disk that stops the training, or a failure that nobody hears of."""
    faults = rule("pwrite", f"{root}/global_step2/{BYTES}", "errno", errno.EIO)
    said = shim.run(
        """
import warnings
root, faults = sys.argv[1:]
ckpt = relight.Checkpointer(root, options=relight.Options(attempts_max=3, retry_delay_s=0))
ckpt.save(1, {"n": 1}, blocking=True)
rules(faults)
handle = ckpt.save(2, {"n": 2})
while not handle.done():
    handle.wait()
say(seen(), handle.progress().attempts, handle.progress().state)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    ckpt.save(3, {"n": 3}).wait()
say(len(caught), caught[0].category.__name__, "global_step2" in str(caught[0].message))
say([one.step for one in ckpt.list()], ckpt.load()["n"])
try:
    ckpt.close()
except relight.StorageUnavailable as error:
    say(error.tag, error.errno, error.retryable)
""",
        root,
        faults,
    )
    assert said[0] == "3 3 failed"
    assert said[1] == "1 SaveFailedWarning True"
    assert said[2] == "[1, 3] 3"
    assert said[3].startswith("global_step2 5 ")
    lines = [line for line in history(root) if line["tag"] == "global_step2" and line["error"]]
    assert len(lines) >= 3


# ---- odd file systems ----


def test_bl_069_a_mount_that_cannot_rename_is_named_and_gets_no_half_file(shim: Shim, root: Path) -> None:
    """Guards: half a checkpoint on a bucket mounted through FUSE, or an error that does not say what is the matter."""
    root.mkdir()
    faults = rule("rename", f"{root}*", "errno", errno.ENOSYS) + rule("chmod", f"{root}*", "errno", errno.EPERM)
    said = shim.run(
        """
root, faults = sys.argv[1:]
rules(faults)
for save in (
    lambda: relight.save(torch.ones(10), root + "/model.pt"),
    lambda: relight.save_async(torch.ones(10), root + "/other.pt").result(),
    lambda: relight.Checkpointer(root + "/tags").save(1, {"n": 1}, blocking=True),
):
    try:
        save()
        say("saved")
    except relight.CheckpointError as error:
        say(type(error).__name__, "mount" in str(error) and "rename" in str(error))
rules("")
""",
        root,
        faults,
    )
    assert said == ["InvalidArgument True"] * 3
    left = [name for name in names(root) if not name.endswith((".lock", "/lock", "checkpointHistories.csv"))]
    assert left == []


def test_bl_069_a_mount_that_refuses_chmod_alone_is_fine(shim: Shim, root: Path) -> None:
    """Guards: a mode that is set for no need."""
    root.mkdir()
    shim.run(
        """
root, faults = sys.argv[1:]
rules(faults)
relight.save(torch.ones(10), root + "/model.pt")
with relight.Checkpointer(root + "/tags") as ckpt:
    ckpt.save(1, {"n": 1}, blocking=True)
""",
        root,
        rule("chmod", f"{root}*", "errno", errno.EPERM),
    )
    assert torch.load(root / "model.pt", weights_only=True).sum() == 10
    assert torch.load(root / "tags" / "global_step1" / "state.pt", weights_only=True) == {"n": 1}


STALE = """
root, call = sys.argv[1:]
works = {
    "list": lambda ckpt: [one.step for one in ckpt.list()] == [1, 2, 3],
    "latest": lambda ckpt: ckpt.latest().step == 3,
    "load one": lambda ckpt: ckpt.load(2, "state.pt")["n"] == 2,
    "load the newest": lambda ckpt: ckpt.load(None, "state.pt")["n"] == 3,
    "resume": lambda ckpt: ckpt.resume(relight.TrainState(model=torch.nn.Linear(1, 1), rng=False)) == 3,
    "verify": lambda ckpt: bool(ckpt.verify(1)),
    "load a path": lambda ckpt: relight.load(root + "/global_step1/state.pt")["n"] == 1,
}
hits = 0
def outcomes():
    "Each work with each of its calls failing once."
    global hits
    for name, work in works.items():
        for nth in range(1, 200):
            with relight.Checkpointer(root) as ckpt:
                rules(f"{call}\\t{root}*\\t{nth}\\t1\\terrno\\t116\\n")
                try:
                    good = work(ckpt)
                except relight.StorageUnavailable as error:
                    good = error.errno == 116 and error.retryable
                    if call in ("open", "stat", "opendir"):
                        raise AssertionError((name, nth)) from error
                hit = seen() >= nth
                rules("")
            assert good, (name, nth)
            hits += hit
            if not hit:
                break
        else:
            raise AssertionError(f"{name} makes too many calls")
outcomes()
say(hits)
"""


@pytest.mark.parametrize("call", ["open", "stat", "opendir", "fstat", "pread"])
def test_bl_163_a_stale_handle_is_looked_up_again_and_hides_no_good_tag(shim: Shim, root: Path, call: str) -> None:
    """Guards: a listing or a load that dies of the ESTALE that NFS gives once for what another host has replaced.

    Where a file that is open already goes stale, an error that can be retried is right too; another checkpoint is not.
    """
    shim.run(
        """
with relight.Checkpointer(sys.argv[1]) as ckpt:
    for n in (1, 2, 3):
        model = torch.nn.Linear(1, 1)
        state = relight.TrainState(model=model, rng=False)
        ckpt.save(n, state, files={"state.pt": {"n": n}}, blocking=True)
""",
        root,
    )
    said = shim.run(STALE, root, call)
    assert int(said[0]) >= 5


# ---- a stuck write ----


def test_bl_087_close_with_a_limit_returns_while_fsync_is_stuck_and_the_next_process_persists(
    shim: Shim, root: Path
) -> None:
    """Guards: a hung mount that hangs the exit of the training, or costs what was staged."""
    child = shim.start(
        """
root, faults = sys.argv[1:]
ckpt = relight.Checkpointer(root)
ckpt.save(1, {"n": 1}, blocking=True)
rules(faults)
ckpt.save(2, {"n": 2, "w": torch.ones(100_000)})
say("saved")
sys.stdin.readline()
ckpt.close(timeout=0.3)
""",
        root,
        shim.hanging("fsync", f"{root}/global_step2/{BYTES}"),
        whole_exit=True,
    )
    child.expect("saved")
    shim.await_hang()
    child.go_on()
    assert child.wait(20) == 1, child.errors()
    assert "WaitTimeout" in child.errors() and "global_step2" in child.errors()
    said = shim.run(
        """
with relight.Checkpointer(sys.argv[1]) as ckpt:
    say(ckpt.latest().step, ckpt.load(2)["n"])
    ckpt.save(3, {"n": 3}, blocking=True)
    assert ckpt.verify(2) and ckpt.verify(3)
    say([one.step for one in ckpt.list()])
""",
        root,
    )
    assert said == ["2 2", "[1, 2, 3]"]


def test_bl_087_ctrl_c_ends_the_wait_for_a_stuck_fsync(shim: Shim, root: Path) -> None:
    """Guards: a wait that no signal can end."""
    child = shim.start(
        """
root, faults = sys.argv[1:]
ckpt = relight.Checkpointer(root, options=relight.Options(close_timeout_s=0.2))
rules(faults)
handle = ckpt.save(2, {"n": 2})
say("saved")
try:
    handle.result()
except KeyboardInterrupt:
    say("interrupted")
""",
        root,
        shim.hanging("fsync", f"{root}/global_step2/{BYTES}"),
        whole_exit=True,
    )
    child.expect("saved")
    shim.await_hang()
    child.signal(signal.SIGINT)
    child.expect("interrupted")
    assert child.wait(20) == 0, child.errors()
    assert "global_step2" in child.errors()


# ---- no threads ----


@pytest.mark.parametrize("first", [1, 2, 3, 4])
def test_bl_077_where_no_thread_can_be_started_there_is_an_error_and_nothing_half(
    shim: Shim, root: Path, first: int
) -> None:
    """Guards: a panic, a hang, or a checkpoint taken for complete when the process limit is reached."""
    root.mkdir()
    torch.save("old", root / "model.pt")
    said = shim.run(
        """
root, faults = sys.argv[1:]
outcome = []
state = {"n": 2, "w": torch.ones(3_000_000)}
rules(faults)
for name, save in (
    ("save", lambda: relight.save(state, root + "/model.pt")),
    ("async", lambda: relight.save_async(state, root + "/async.pt").result(20)),
    ("tag", lambda: relight.Checkpointer(root + "/tags").save(1, state).result(20)),
):
    try:
        save()
        outcome.append("saved")
    except (relight.CheckpointError, RuntimeError) as error:
        assert not isinstance(error, relight.WaitTimeout), error
        assert "panic" not in str(error), error
        outcome.append(type(error).__name__)
rules("")
say(*outcome)
with relight.Checkpointer(root + "/tags") as ckpt:  # and when there are threads again, all works
    ckpt.save(2, state, blocking=True)
    assert ckpt.verify(2)
    say(ckpt.latest().step)
""",
        root,
        rule("thread", "thread", "errno", errno.EAGAIN, first=first),
    )
    saved = said[0].split()[0] == "saved"
    loaded = torch.load(root / "model.pt", weights_only=True)
    assert (loaded["n"] == 2) if saved else (loaded == "old")
    if (root / "async.pt").exists():
        assert torch.load(root / "async.pt", weights_only=True)["n"] == 2
    assert said[1] == "2"


def test_the_shim_leaves_calls_alone_that_no_rule_matches(shim: Shim, root: Path) -> None:
    """Guards: tests of this file that pass because of the shim itself."""
    root.mkdir()
    shim.run('relight.save({"w": torch.ones(10)}, sys.argv[1])', root / "x.pt")
    assert torch.equal(torch.load(root / "x.pt", weights_only=True)["w"], torch.ones(10))
    assert os.listdir(root) == ["x.pt"]
