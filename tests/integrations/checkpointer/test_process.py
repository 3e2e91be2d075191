"""Ends of processes, forks and signals, with real processes that meet through pipes; nothing sleeps."""

from __future__ import annotations

import fcntl
import os
import random
import signal
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import relight
import torch
from relight import runtime

from .conftest import Script, block, steps, values

Start = Callable[..., Script]


# ---- exits ----


@pytest.mark.parametrize(
    ("way", "code"),
    [("pass", 0), ("sys.exit(3)", 3), ("raise ValueError('mine')", 1), ("def f(): return\nf()", 0)],
)
def test_bl_060_a_save_under_way_is_completed_by_every_ordinary_exit(
    root: Path, script: Start, way: str, code: int
) -> None:
    source = f"""
ckpt = relight.Checkpointer(root)
ckpt.save(7, values(7, count=5_000_000))
{way}
"""
    got, _, err = script(source, root).end()
    assert got == code, err
    assert ("mine" in err) == (code == 1)
    assert "relight:" not in err
    loaded = torch.load(root / "global_step7" / "state.pt", weights_only=True)
    assert torch.equal(loaded["weight"], values(7, count=5_000_000)["weight"])
    with relight.Checkpointer(root) as ckpt:
        assert steps(ckpt) == [7]
        assert ckpt.verify(7)


def test_bl_083_a_save_of_300_mb_is_complete_when_the_script_falls_off_its_end(root: Path, script: Start) -> None:
    source = """
    relight.Checkpointer(root).save(1, values(1, count=75_000_000))
    """
    code, _, err = script(source, root).end()
    assert (code, err) == (0, "")
    with relight.Checkpointer(root) as ckpt:
        assert ckpt.latest().bytes >= 300_000_000  # type: ignore[union-attr]
        assert ckpt.verify(1)


def test_bl_060_after_os_exit_the_next_process_has_it_from_memory_and_persists_it(root: Path, script: Start) -> None:
    dies = """
    import fcntl
    state = relight.TrainState(model=torch.nn.Linear(3, 3))
    with torch.no_grad():
        for parameter in state.components["model"].parameters():
            parameter.fill_(8)
    ckpt = relight.Checkpointer(root, options=relight.Options(lock_timeout_s=3600))
    ckpt.save(7, state, blocking=True)
    say("saved 7")
    sys.stdin.readline()
    ckpt.save(8, state)
    os._exit(9)
    """
    first = script(dies, root)
    assert first.line() == "saved 7"
    with held(root, "global_step8"):  # so that its persist cannot be faster than its death
        first.go_on()
        assert first.end()[0] == 9
    next_ = """
    import logging
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    model = torch.nn.Linear(3, 3)
    with relight.Checkpointer(root) as ckpt:
        say(ckpt.resume(relight.TrainState(model=model)), ckpt.resumed.tier, *ckpt.resumed.drained)
        say(float(model.weight.detach()[0, 0]))
    """
    second = script(next_, root)
    assert second.line() == "8 memory global_step8"
    assert second.line() == "8.0"
    code, _, err = second.end()
    assert code == 0
    assert "left in memory by a process that died" in err
    with relight.Checkpointer(root) as ckpt:
        assert steps(ckpt) == [7, 8]
        assert ckpt.verify(8)


def test_bl_075_without_a_close_a_failed_save_is_on_stderr(root: Path, script: Start) -> None:
    block(root, "global_step4")
    source = """
    ckpt = relight.Checkpointer(root)
    ckpt.save(4, values(4))
    ckpt.save(5, values(5))
    """
    code, _, err = script(source, root).end()
    assert code == 0
    assert "relight: global_step4 was NOT saved: " in err
    assert "global_step5" not in err.replace("global_step5 is staged", "")
    with relight.Checkpointer(root) as ckpt:
        assert steps(ckpt) == [5]


def test_bl_075_with_a_close_the_exit_code_says_so(root: Path, script: Start) -> None:
    block(root, "global_step4")
    source = """
    with relight.Checkpointer(root) as ckpt:
        ckpt.save(4, values(4))
    """
    code, _, err = script(source, root).end()
    assert code == 1
    assert "global_step4" in err.splitlines()[-1]
    assert "NOT saved" not in err  # it was raised: nobody is told twice


class held:
    """Holds the lock of a tag, as another process that writes it would, for as long as the block lasts."""

    def __init__(self, root: Path, tag: str) -> None:
        self.path = root / tag / ".relight" / "lock"

    def __enter__(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.file = os.open(self.path, os.O_RDWR | os.O_CREAT)
        fcntl.lockf(self.file, fcntl.LOCK_EX)  # both kinds of lock: which one the engine takes is its own affair
        fcntl.flock(self.file, fcntl.LOCK_EX)

    def __exit__(self, *error: object) -> None:
        os.close(self.file)


def test_bl_087_close_with_a_limit_ends_a_process_whose_write_is_stuck(root: Path, script: Start) -> None:
    source = """
    ckpt = relight.Checkpointer(root, options=relight.Options(lock_timeout_s=3600))
    ckpt.save(4, values(4))
    ckpt.close(timeout=0.5)
    """
    with held(root, "global_step4"):
        code, _, err = script(source, root).end()
    assert code == 1
    assert "WaitTimeout: not persisted after 0.5 s: global_step4" in err
    assert "relight: global_step4 stays in memory on this node" in err
    assert not (root / "global_step4" / ".relight" / "manifest.json").exists()
    drains = "with relight.Checkpointer(root) as ckpt: say(ckpt.load(4)['weight'][0].item())"
    code, out, err = script(drains, root).end()
    assert (code, out.strip()) == (0, "4.0"), err
    with relight.Checkpointer(root) as ckpt:
        assert steps(ckpt) == [4]


def test_bl_087_the_limit_at_exit_is_an_option_and_names_the_tag(root: Path, script: Start) -> None:
    source = """
    ckpt = relight.Checkpointer(root, options=relight.Options(lock_timeout_s=3600, close_timeout_s=0.5))
    ckpt.save(4, values(4))
    """
    with held(root, "global_step4"):
        code, _, err = script(source, root).end()
    assert code == 0
    assert "relight: global_step4: not finished within 0.5 s, not persisted." in err


def test_bl_087_ctrl_c_ends_a_wait(root: Path, script: Start) -> None:
    source = """
    ckpt = relight.Checkpointer(root, options=relight.Options(lock_timeout_s=3600, close_timeout_s=1))
    handle = ckpt.save(4, values(4))
    try:
        say("waiting")
        ckpt.close(timeout=3600)
    except KeyboardInterrupt:
        say("interrupted")
    try:
        ckpt.close(timeout=0)
    except relight.WaitTimeout:
        say("gave up")
    """
    with held(root, "global_step4"):
        process = script(source, root)
        assert process.line() == "waiting"
        os.kill(process.process.pid, signal.SIGINT)
        assert process.line() == "interrupted"
        assert process.line() == "gave up"
        assert process.end()[0] == 0


def test_a_save_of_another_process_that_is_under_way_is_no_damage(root: Path, script: Start) -> None:
    """Guards: an evaluation beside a healthy training that is told, each time, of one that cannot be used."""
    source = """
    ckpt = relight.Checkpointer(root, options=relight.Options(lock_timeout_s=3600, close_timeout_s=0))
    state = relight.TrainState(dice=__import__("random").Random(), rng=False)
    ckpt.save(3, state).result()
    ckpt.save(4, state)
    say("saving")
    sys.stdin.readline()
    """
    with held(root, "global_step4"):
        training = script(source, root)
        assert training.line() == "saving"
        with relight.Checkpointer(root) as ckpt, warnings.catch_warnings():
            warnings.simplefilter("error")
            assert ckpt.resume(relight.TrainState(dice=random.Random(), rng=False)) == 3
            assert ckpt.resumed is not None and ckpt.resumed.skipped == ()
        training.kill()
        runtime.close(60)
        # Its memory is gone with it: now this is what is left of a save that nobody will finish.
        for region in Path(os.environ["RELIGHT_MEMORY_DIR"]).rglob("*"):
            if region.is_file():
                region.unlink()
        with (
            relight.Checkpointer(root) as ckpt,
            pytest.warns(relight.ResumeWarning, match="global_step4 cannot be used"),
        ):
            assert ckpt.resume(relight.TrainState(dice=random.Random(), rng=False)) == 3


# ---- forks ----


def test_bl_088_a_forked_child_is_refused_at_once_and_the_parent_goes_on(root: Path, script: Start) -> None:
    source = """
    ckpt = relight.Checkpointer(root)
    handle = ckpt.save(1, values(1))
    child = os.fork()
    if child == 0:
        refused = 0
        for call in (
            lambda: ckpt.save(2, values(2)), lambda: ckpt.load(1), ckpt.list, ckpt.latest, ckpt.wait, ckpt.close,
            lambda: handle.result(), lambda: relight.Checkpointer(root), lambda: ckpt.verify(1), lambda: ckpt.delete(1),
        ):
            try:
                call()
            except relight.EngineClosed as error:
                assert "forked from process" in str(error), error
                refused += 1
        say("refused", refused)
        del ckpt, handle
        sys.exit(0)
    _, status = os.waitpid(child, 0)
    say("child", os.waitstatus_to_exitcode(status))
    ckpt.save(3, values(3))
    ckpt.close()
    say("parent done")
    """
    code, out, err = script(source, root).end()
    assert out.splitlines() == ["refused 10", "child 0", "parent done"], err
    assert (code, err) == (0, "")
    with relight.Checkpointer(root) as ckpt:
        assert steps(ckpt) == [1, 3]


def test_bl_088_a_with_block_in_a_forked_child_ends_in_silence(root: Path, script: Start) -> None:
    source = """
    with relight.Checkpointer(root) as ckpt:
        ckpt.save(1, values(1))
        child = os.fork()
        if child == 0:
            sys.exit(5)
        _, status = os.waitpid(child, 0)
        say(os.waitstatus_to_exitcode(status))
    """
    code, out, err = script(source, root).end()
    assert (code, out.strip(), err) == (0, "5", "")


def test_a_fork_before_the_first_use_is_no_fork_of_the_engine(root: Path, script: Start) -> None:
    source = """
    child = os.fork()
    if child == 0:
        with relight.Checkpointer(root) as ckpt:
            ckpt.save(1, values(1))
        sys.exit(0)
    _, status = os.waitpid(child, 0)
    say(os.waitstatus_to_exitcode(status))
    with relight.Checkpointer(root) as ckpt:
        say(ckpt.latest().step)
    """
    code, out, err = script(source, root).end()
    assert (code, out.split(), err) == (0, ["0", "1"], "")


def test_bl_083_a_child_of_multiprocessing_completes_its_save_too(root: Path, script: Start) -> None:
    """Guards: such a child leaves by os._exit, where no atexit function runs."""
    source = """
    import multiprocessing
    def work(root):
        relight.Checkpointer(root).save(6, values(6, count=5_000_000))
    child = multiprocessing.get_context("fork").Process(target=work, args=(root,))
    child.start()
    child.join()
    say(child.exitcode)
    """
    code, out, err = script(source, root).end()
    assert (code, out.strip(), err) == (0, "0", "")
    with relight.Checkpointer(root) as ckpt:
        assert steps(ckpt) == [6]


# ---- signals ----


def test_bl_090_a_hundred_saves_inside_signal_handlers_end_without_harm(root: Path, script: Start) -> None:
    source = """
    import signal, threading
    ckpt = relight.Checkpointer(root, torn_check="version")
    counts = {"saved": 0, "refused": 0}
    number = iter(range(1000, 10000))

    def handler(*_):
        step = next(number)
        for step in (step, next(number)):  # two in a row
            try:
                ckpt.save(step, values(step))
                counts["saved"] += 1
            except relight.CheckpointError as error:
                print(error, file=sys.stderr)
                counts["refused"] += 1

    signal.signal(signal.SIGUSR1, handler)
    done = threading.Event()

    def shoot():
        for _ in range(100):
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
            taken.acquire()
        done.set()

    taken = threading.Semaphore(0)
    inner = handler
    def counted(*_):
        inner()
        taken.release()
    signal.signal(signal.SIGUSR1, counted)
    threading.Thread(target=shoot).start()
    step = 0
    while not done.is_set():
        step += 1
        ckpt.save(step, values(step, count=200_000), blocking=step % 5 == 0)
    ckpt.close()
    say(counts["saved"], counts["refused"])
    """
    code, out, err = script(source, root).end()
    assert code == 0, err
    saved, refused = map(int, out.split())
    assert saved + refused == 200
    assert refused == 0, err
    with relight.Checkpointer(root) as ckpt:
        checkpoints = ckpt.list()
        assert sum(1 for one in checkpoints if (one.step or 0) >= 1000) == 200
        for one in (checkpoints[0], checkpoints[-1], checkpoints[len(checkpoints) // 2]):
            assert float(ckpt.load(one.tag)["weight"][-1]) == one.step
            assert ckpt.verify(one.tag)


def test_bl_091_only_the_owner_saves_when_the_whole_group_is_told_to_end(root: Path, script: Start) -> None:
    source = """
    import signal
    stop, owner = False, os.getpid()

    def handler(number, frame):
        global stop
        stop = True

    signal.signal(signal.SIGTERM, handler)
    ckpt = relight.Checkpointer(root)
    state = relight.TrainState(model=torch.nn.Linear(2, 2))
    ckpt.save(1, state, blocking=True)
    try:
        for number, _ in enumerate(torch.utils.data.DataLoader(range(10**9), num_workers=2)):
            if number == 5:
                say("ready")
            if stop:
                break
    except RuntimeError:  # torch's own: its workers were told to end too, perhaps before this process was
        pass
    ckpt.save(2, state)
    say("saved by", "owner" if os.getpid() == owner else "worker")
    sys.exit(143)
    """
    process = script(source, root)
    assert process.line() == "ready"
    os.killpg(process.process.pid, signal.SIGTERM)
    code, out, err = process.end()
    assert out.strip() == "saved by owner"
    assert code == 143, err
    with relight.Checkpointer(root) as ckpt:
        assert steps(ckpt) == [1, 2]
        assert ckpt.verify(2)
