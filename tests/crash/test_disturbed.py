"""What else happens to a training: exits of every kind, and directories that somebody takes away."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from .processes import Zygote
from .shim import Shim
from .test_faults import BYTES


@pytest.mark.parametrize(
    ("way", "code"),
    [
        ("pass", 0),
        ("sys.exit(3)", 3),
        ("raise ValueError('mine')", 1),
        ("import threading; threading.Thread(target=lambda: None).start()", 0),
        ("os._exit(9)", 9),
        ("import signal; os.kill(os.getpid(), signal.SIGTERM)", -15),
    ],
)
def test_bl_060_bl_083_a_save_of_300_mb_survives_every_way_to_end(
    processes: Zygote, root: Path, memory_dir: Path, way: str, code: int
) -> None:
    """Guards: a daemon thread that the end of the interpreter cuts off; a death whose staged state nobody drains."""
    child = processes.start(
        f"""
ckpt = relight.Checkpointer(sys.argv[1])
relight.save_async({{"w": torch.full((5_000_000,), 5.0)}}, sys.argv[1] + "/alone.pt")
ckpt.save(7, {{"w": torch.full((70_000_000,), 7.0)}})
{way}
""",
        root,
        whole_exit=True,
    )
    assert child.wait() == code, child.errors()
    assert ("mine" in child.errors()) == (code == 1)
    ordinary = code in (0, 1, 3)
    if ordinary:
        assert list(memory_dir.iterdir()) == []
        assert (root / "global_step7" / "complete.txt").exists()
        assert bool((torch.load(root / "alone.pt", weights_only=True)["w"] == 5).all())
    said = processes.start(
        """
with relight.Checkpointer(sys.argv[1]) as ckpt:
    w = ckpt.load(7)["w"]
    say([one.step for one in ckpt.list()], w.min().item(), w.max().item())
    say(relight.load(sys.argv[1] + "/alone.pt")["w"][-1].item())
""",
        root,
    ).end()
    assert said == ["[7] 7.0 7.0", "5.0"]
    assert bool((torch.load(root / "global_step7" / "state.pt", mmap=True, weights_only=True)["w"] == 7).all())
    assert list(memory_dir.iterdir()) == []


def test_bl_060_without_a_memory_tier_no_half_tag_is_shown_and_the_resume_says_so(shim: Shim, root: Path) -> None:
    """Guards: half a checkpoint after os._exit taken for whole, or a lost save of which nobody hears."""
    child = shim.start(
        """
root, faults = sys.argv[1:]
state = relight.TrainState(model=torch.nn.Linear(1000, 1000))
ckpt = relight.Checkpointer(root, options=relight.Options(memory_bytes_max=1 << 20))
ckpt.save(1, state, blocking=True)
rules(faults)
ckpt.save(2, state)
""",
        root,
        shim.hanging("fsync", f"{root}/global_step2/{BYTES}"),
    )
    shim.await_hang()
    child.kill()
    said = shim.run(
        """
import warnings
with relight.Checkpointer(sys.argv[1]) as ckpt:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        say(ckpt.resume(relight.TrainState(model=torch.nn.Linear(1000, 1000))), [one.step for one in ckpt.list()])
    say(sum("global_step2" in str(one.message) for one in caught), *(one.category.__name__ for one in caught))
    ckpt.save(2, {"n": 2}, blocking=True)
    say(ckpt.latest().step, bool(ckpt.verify(2)))
""",
        root,
    )
    assert said == ["1 [1]", "1 ResumeWarning", "2 True"]


def test_a_root_that_is_removed_under_the_writer_costs_what_was_in_it_and_nothing_more(
    processes: Zygote, root: Path
) -> None:
    """Guards: a training that dies because somebody tidied up."""
    child = processes.start(
        """
import warnings
ckpt = relight.Checkpointer(sys.argv[1], options=relight.Options(attempts_max=2, retry_delay_s=0))
ckpt.save(1, {"n": 1}, blocking=True)
say("saved")
sys.stdin.readline()
error = ckpt.save(2, {"n": 2}).exception()
say("no error" if error is None else type(error).__name__)
with warnings.catch_warnings(record=True):
    warnings.simplefilter("always")
    os.makedirs(sys.argv[1], exist_ok=True)
    ckpt.save(3, {"n": 3}, blocking=True)
say(ckpt.latest().step, ckpt.load(3)["n"], bool(ckpt.verify(3)))
ckpt.close()
""",
        root,
    )
    child.expect("saved")
    shutil.rmtree(root)
    child.go_on()
    first, second = child.end()
    assert first in ("no error", "CheckpointNotFound", "StorageUnavailable")
    assert second == "3 3 True"
    assert torch.load(root / "global_step3" / "state.pt", weights_only=True) == {"n": 3}
    if first == "no error":
        assert torch.load(root / "global_step2" / "state.pt", weights_only=True) == {"n": 2}


def test_a_tag_that_is_removed_while_it_is_written_is_written_again_or_reported(shim: Shim, root: Path) -> None:
    """Guards: a commit that names files that are gone."""
    child = shim.start(
        """
import warnings
root, faults = sys.argv[1:]
ckpt = relight.Checkpointer(root, options=relight.Options(attempts_max=2, retry_delay_s=0))
ckpt.save(1, {"n": 1}, blocking=True)
rules(faults)
error = ckpt.save(2, {"n": 2}).exception()
rules("")
say("committed" if error is None else "failed")
say(*(one.step for one in ckpt.list()))
for one in ckpt.list():
    assert ckpt.verify(one.tag)
with warnings.catch_warnings(record=True):
    warnings.simplefilter("always")
    ckpt.save(3, {"n": 3}, blocking=True)
say(ckpt.latest().step)
""",
        root,
        shim.hanging("fsync", f"{root}/global_step2/{BYTES}"),
    )
    shim.await_hang()
    shutil.rmtree(root / "global_step2")
    shim.let_go()
    outcome, steps, latest = child.end()
    assert (outcome, steps) in [("committed", "1 2"), ("failed", "1")]
    assert latest == "3"


def test_a_tag_directory_replaced_by_a_file_fails_that_save_alone(processes: Zygote, root: Path) -> None:
    """Guards: a file of the user's that is deleted to make room, or a save that hangs on it."""
    root.mkdir()
    (root / "global_step2").write_text("notes of mine")
    said = processes.start(
        """
import warnings
ckpt = relight.Checkpointer(sys.argv[1], options=relight.Options(attempts_max=2, retry_delay_s=0))
ckpt.save(1, {"n": 1}, blocking=True)
error = ckpt.save(2, {"n": 2}).exception()
say(type(error).__name__, error.tag, "global_step2" in str(error))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    ckpt.save(3, {"n": 3}, blocking=True)
say([one.step for one in ckpt.list()])
ckpt.close()
""",
        root,
    ).end()
    assert said[0].endswith(" global_step2 True") and not said[0].startswith("NoneType"), said
    assert said[1] == "[1, 3]"
    assert (root / "global_step2").read_text() == "notes of mine"


def test_a_root_that_is_a_file_or_below_one_is_refused_at_once(processes: Zygote, tmp_path: Path) -> None:
    """Guards: a training that finds out at its first save, hours later."""
    (tmp_path / "file").write_text("mine")
    said = processes.start(
        """
for path in (sys.argv[1] + "/file", sys.argv[1] + "/file/below"):
    try:
        relight.Checkpointer(path)
        say("made")
    except relight.CheckpointError as error:
        kinds = relight.InvalidArgument, relight.StorageUnavailable, relight.StorageDenied
        say(isinstance(error, kinds), "file" in str(error))
    try:
        relight.save(1, path + "/x.pt")
    except relight.CheckpointError as error:
        say("x.pt" in str(error))
""",
        tmp_path,
    ).end()
    assert said == ["True True", "True"] * 2
    assert (tmp_path / "file").read_text() == "mine"
