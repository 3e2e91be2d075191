"""Disks that are really full, /dev/shm of 64 MB, roots that become read-only: small file systems of a real kernel."""

from __future__ import annotations

from pathlib import Path

import pytest

from .mounts import PREAMBLE, need_mounts
from .processes import Zygote


@pytest.fixture(autouse=True)
def _mounts() -> None:
    need_mounts()


def run(processes: Zygote, source: str, *arguments: object) -> list[str]:
    return processes.start(PREAMBLE + source, *arguments).end()


@pytest.mark.parametrize("through", ["itself", "a symlink", "a bind mount", "a symlinked file"])
def test_bl_065_a_volume_that_is_too_small_is_storage_full_with_the_old_file_whole(
    processes: Zygote, tmp_path: Path, through: str
) -> None:
    """Guards: free space asked of the wrong file system, and the error of a closing above that of the write."""
    run(
        processes,
        """
base, through = sys.argv[1:]
small = tmpfs(base + "/small", "8m")
place = small
if through == "a symlink":
    place = base + "/link"
    os.symlink(small, place)
elif through == "a bind mount":
    place = base + "/bound"
    os.mkdir(place)
    mount(small, place, None, BIND)
path = place + "/model.pt"
if through == "a symlinked file":
    path = base + "/model.pt"
    os.symlink(small + "/model.pt", path)
relight.save("old", path)
content = open(path, "rb").read()
big = torch.ones(4_000_000)
for save in (lambda: relight.save(big, path), lambda: relight.save_async(big, path).result()):
    try:
        save()
        raise AssertionError("no error")
    except relight.StorageFull as error:
        text = str(error)
        assert isinstance(error, OSError) and error.errno == 28, error.errno
        assert "model.pt" in text and "16" in text, text  # what it needs
        import re
        free = [int(n) for n in re.findall(r"has (\\d+) bytes free", text)]
        assert free and free[0] <= 8 << 20, text  # of the target's own file system
    assert open(path, "rb").read() == content
    assert relight.load(path) == "old"
    assert os.listdir(small) == ["model.pt"], os.listdir(small)
relight.save(torch.ones(1000), path)
assert relight.load(path).sum() == 1000
""".replace('content = open(path, "rb").read()', "from pathlib import Path\ncontent = Path(path).read_bytes()").replace(
            'open(path, "rb").read() == content', "Path(path).read_bytes() == content"
        ),
        tmp_path,
        through,
    )


def test_bl_065_a_full_disk_costs_a_checkpointer_one_save_and_room_lets_the_next_one_in(
    processes: Zygote, tmp_path: Path
) -> None:
    """Guards: a full disk that retention of good checkpoints pays for, or that poisons all later saves."""
    said = run(
        processes,
        """
import warnings
root = tmpfs(sys.argv[1] + "/small", "40m") + "/run"
state = lambda n: {"n": n, "w": torch.full((2_000_000,), float(n))}
ckpt = relight.Checkpointer(root, keep=2, options=relight.Options(attempts_max=2, retry_delay_s=0))
for n in (1, 2):
    ckpt.save(n, state(n), blocking=True)
with open(root + "/../ballast", "wb") as ballast:
    ballast.write(bytes(20 << 20))
error = ckpt.save(3, state(3)).exception()
assert isinstance(error, relight.StorageFull), error
say(error)
say([one.step for one in ckpt.list()], ckpt.load(2)["n"], bool(ckpt.verify(1)), bool(ckpt.verify(2)))
os.unlink(root + "/../ballast")
with warnings.catch_warnings(record=True):
    warnings.simplefilter("always")
    ckpt.save(4, state(4), blocking=True)
say([one.step for one in ckpt.list()], ckpt.load()["n"])
ckpt.close()
known = {"global_step2", "global_step3", "global_step4", ".relight", "latest", "checkpointHistories.csv"}
assert set(os.listdir(root)) <= known, os.listdir(root)
used = sum(os.path.getsize(os.path.join(where, name)) for where, _, names in os.walk(root) for name in names)
assert used < 17 << 20, used
""",
        tmp_path,
    )
    assert "global_step3" in said[0] and "state.pt" in said[0]
    assert "Newest complete" in said[0] or "keep" in said[0]
    assert said[1] == "[1, 2] 2 True True"
    assert said[2] == "[2, 4] 4"


@pytest.mark.parametrize("given", ["/dev/shm itself", "memory_dir"])
def test_dev_shm_of_64_mb_is_no_hindrance_and_is_said_once(processes: Zygote, root: Path, given: str) -> None:
    """Guards: the one run-time failure that Nebula's users reported: Docker's default /dev/shm."""
    said = run(
        processes,
        """
import logging
root, given = sys.argv[1:]
tmpfs("/dev/shm", "64m")
os.environ.pop("RELIGHT_MEMORY_DIR")
messages = []
class Keep(logging.Handler):
    def emit(self, record): messages.append(record.getMessage())
logging.getLogger("relight").addHandler(Keep())
logging.getLogger("relight").setLevel(logging.INFO)
options = relight.Options(memory_dir="/dev/shm") if given == "memory_dir" else None
w = torch.empty(30_000_000)  # 120 MB: more than all of it
with relight.Checkpointer(root, keep=2, options=options) as ckpt:
    for n in (1, 2, 3):
        ckpt.save(n, {"n": n, "w": w.fill_(n)})
        w.fill_(-1)
    ckpt.wait()
    for n in (2, 3):
        loaded = ckpt.load(n)
        assert loaded["n"] == n and bool((loaded["w"] == n).all())
        assert ckpt.verify(n)
    model = torch.nn.Linear(2, 2)
    ckpt.save(4, relight.TrainState(model=model), blocking=True)  # small: shared memory again or not, it works
    assert ckpt.resume(relight.TrainState(model=model)) == 4
relight.save_async(w.fill_(5), root + "/alone.pt").result()
assert bool((relight.load(root + "/alone.pt") == 5).all())
relight.runtime.close()
about = [m for m in messages if "/dev/shm" in m]
say(len(about), *about)
assert not [name for name in os.listdir("/dev/shm")], os.listdir("/dev/shm")
""",
        root,
        given,
    )
    assert said[0].split()[0] == "1", said


def test_a_memory_tier_that_fills_while_saving_makes_the_caller_wait_and_loses_nothing(
    processes: Zygote, root: Path
) -> None:
    """Guards: SIGBUS on a full /dev/shm, a deadlock between staging and persisting, a save that is dropped."""
    said = run(
        processes,
        """
root = sys.argv[1]
tmpfs("/dev/shm", "96m")
os.environ["RELIGHT_MEMORY_DIR"] = "/dev/shm"
w = torch.empty(5_000_000)
with relight.Checkpointer(root) as ckpt:
    handles = [ckpt.save(n, {"n": n, "w": w.fill_(n)}) for n in range(1, 16)]
    w.fill_(-1)
    # somebody else takes what is left of the memory, in the middle of it
    with open("/dev/shm/other", "wb") as other:
        try:
            while True:
                other.write(bytes(1 << 20))
                other.flush()
        except OSError as error:
            assert error.errno == 28
        finally:
            try:
                other.close()
            except OSError:
                pass
    handles += [ckpt.save(n, {"n": n, "w": w.fill_(n)}) for n in range(16, 24)]
    w.fill_(-1)
    ckpt.wait()
    assert [one.step for one in ckpt.list()] == list(range(1, 24))
    for n in (1, 7, 15, 16, 23):
        loaded = ckpt.load(n)
        assert loaded["n"] == n and bool((loaded["w"] == n).all()), n
say("done")
""",
        root,
    )
    assert said == ["done"]


def test_a_root_that_becomes_read_only_costs_the_saves_and_not_the_process(processes: Zygote, tmp_path: Path) -> None:
    """Guards: an error of the file system (remounted read-only after a fault) that ends the training, or hides what is
    there."""
    said = run(
        processes,
        """
import warnings
small = tmpfs(sys.argv[1] + "/disk", "64m")
root = small + "/run"
ckpt = relight.Checkpointer(root, options=relight.Options(attempts_max=2, retry_delay_s=0))
ckpt.save(1, {"n": 1}, blocking=True)
mount("none", small, None, REMOUNT | READ_ONLY)
error = ckpt.save(2, {"n": 2}).exception()
say(type(error).__name__, error.tag, error.errno)
try:
    relight.save(1, root + "/x.pt")
except relight.CheckpointError as error:
    say(type(error).__name__, error.errno)
say([one.step for one in ckpt.list()], ckpt.load(1)["n"])
mount("none", small, None, REMOUNT, "size=64m")
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    ckpt.save(3, {"n": 3}, blocking=True)
say([one.step for one in ckpt.list()], ckpt.load()["n"], len(caught))
ckpt.close()
# a reader needs no right to write
mount("none", small, None, REMOUNT | READ_ONLY)
reader = relight.Checkpointer(root)
say(reader.latest().step, reader.load()["n"], bool(reader.verify(3)))
state = relight.TrainState(model=torch.nn.Linear(1, 1))
reader.close()
""",
        tmp_path,
    )
    assert said[0] == "StorageDenied global_step2 30" or said[0] == "StorageUnavailable global_step2 30", said
    assert said[1] in ("StorageDenied 30", "StorageUnavailable 30")
    assert said[2] == "[1] 1"
    assert said[3] == "[1, 3] 3 0" or said[3] == "[1, 3] 3 1"
    assert said[4] == "3 3 True"
