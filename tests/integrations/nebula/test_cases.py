"""Failures that users of other systems met, through the Nebula drop-in: BL-052, 070, 072, 081, 130.

The other ids of that row are beside what they are about: BL-060 and BL-075 in test_persistence, BL-095, BL-097 and
BL-102 in test_finding, BL-112 in test_settings, BL-159 in test_objects.
"""

import random
import threading
from pathlib import Path

import nebulaml as nm
import pytest
import torch
from relight.exceptions import CheckpointError, TornSnapshot


@pytest.fixture(autouse=True)
def initialised(root: Path) -> None:
    nm.init(str(root))


def test_bl_052_kills_in_a_loop_of_saves_to_one_tag_leave_the_old_or_the_new(start, root: Path) -> None:
    """SIGKILL after a random number of printed lines and of staged bytes; each round resumes what the last one left."""
    script = """
        import sys, torch, nebulaml as nm
        nm.init(sys.argv[1])
        found = nm.get_latest_checkpoint()
        start = 0 if found is None else found.load("n")
        if found is not None:
            assert found.load("w").eq(start).all()
        print("resumed", start, flush=True)
        for n in range(start + 1, start + 1000):
            checkpoint = nm.Checkpoint("checkpoint", 2)
            checkpoint.save("w", torch.full((1 << 20,), n))
            checkpoint.save("n", n)
            print(n, flush=True)
        """
    draw = random.Random(52)
    newest = 0
    for _ in range(8):
        client = start(script, root)
        lines = client.process.stdout
        word, resumed = lines.readline().split()
        assert word == "resumed", client.process.communicate()[1]
        assert int(resumed) in (newest, newest + 1)  # what was staged when the last one died, and nothing half
        newest = int(resumed)
        for _ in range(draw.randrange(1, 6)):
            newest = int(lines.readline())
        client.kill()
    found = nm.get_latest_checkpoint()
    n = found.load("n")
    assert n in (newest, newest + 1)
    assert found.load("w").eq(n).all()
    nm.flush_persistence()
    assert torch.load(root / "checkpoint" / "n", weights_only=True) == n
    nm.Checkpoint("checkpoint", 2).save("w", torch.full((4,), -1))
    nm.Checkpoint("checkpoint", 2).save("n", -1)
    nm.flush_persistence()
    names = {path.relative_to(root / "checkpoint").as_posix() for path in (root / "checkpoint").rglob("*")}
    left = {name for name in names if "tmp" in name or name.startswith(".relight/g")}
    assert not left, "what dead writers left is gone after the next save"


def test_bl_070_a_change_right_after_save_or_during_it_is_never_a_mixture() -> None:
    weights = torch.zeros(1 << 22)
    stop = threading.Event()

    def change() -> None:
        while not stop.is_set():
            weights.add_(1)

    for step in range(5):
        before = float(weights[0])
        nm.Checkpoint(f"global_step{step}", 1).save("w", weights)
        weights.fill_(before + 1)
        loaded = nm.get_checkpoint(f"global_step{step}").load("w")
        assert loaded.eq(before).all()
    thread = threading.Thread(target=change)
    thread.start()
    torn = 0
    try:
        for step in range(5, 25):
            try:
                nm.Checkpoint(f"global_step{step}", 1).save("w", weights)
            except TornSnapshot as error:
                assert nm.get_checkpoint(f"global_step{step}") is None
                assert error.retryable
                torn += 1
            else:
                loaded = nm.get_checkpoint(f"global_step{step}").load("w")
                assert loaded.eq(loaded[0]).all()
    finally:
        stop.set()
        thread.join()
    assert torn > 0  # the test did meet a copy that was running


def test_bl_072_load_list_latest_and_save_right_after_a_save(root: Path) -> None:
    for n in range(20):
        nm.Checkpoint("checkpoint", 1).save("w", torch.full((100_000,), n))
        assert nm.get_latest_checkpoint().load("w").eq(n).all()
        assert nm.Checkpoint("checkpoint").load("w").eq(n).all()
        assert [entry["tag"] for entry in nm.list_checkpoints()] == ["checkpoint"]
        if n % 5 == 0:
            assert torch.load(nm.get_latest_checkpoint_path("w"), weights_only=True).eq(n).all()
    nm.flush_persistence()
    assert torch.load(root / "checkpoint" / "w", weights_only=True).eq(19).all()


def test_bl_081_what_could_not_be_committed_is_not_the_latest_after_going_back(start, root: Path) -> None:
    nm.Checkpoint("global_step16").save("m", 16)
    nm.flush_persistence()
    (root / "global_step20").write_text("in the way")
    nm.Checkpoint("global_step20").save("m", 20)
    with pytest.raises(CheckpointError):
        nm.flush_persistence()
    assert nm.get_checkpoint("global_step16").load("m") == 16
    for step in (17, 18):
        nm.Checkpoint(f"global_step{step}").save("m", step)
    assert nm.get_latest_checkpoint().tag == "global_step18"
    nm.flush_persistence()
    (root / "global_step20").unlink()
    script = """
        import sys, nebulaml as nm
        nm.init(sys.argv[1])
        print(nm.get_latest_checkpoint().tag, [entry["tag"] for entry in nm.list_checkpoints()])
        """
    out, _ = start.run(script, root)
    assert out.strip() == "global_step18 ['global_step16', 'global_step17', 'global_step18']"


def test_bl_130_what_a_dead_process_had_saved_of_a_tag_never_counts_towards_a_new_one(start, root: Path) -> None:
    client = start(
        """
        import sys, nebulaml as nm
        nm.init(sys.argv[1])
        nm.Checkpoint("global_step1", 2).save("a", "old")
        print("half")
        input()
        """,
        root,
    )
    client.wait_for("half")
    client.kill()
    nm.Checkpoint("global_step1", 2).save("b", "new")
    assert nm.get_checkpoint("global_step1") is None
    nm.Checkpoint("global_step1", 2).save("a", "new")
    found = nm.get_checkpoint("global_step1")
    assert (found.load("a"), found.load("b")) == ("new", "new")
