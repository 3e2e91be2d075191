"""The engine of a process: made at first use, one only, quiet, and gone when it is closed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import relight

from .conftest import Script, values

Start = Callable[..., Script]


def test_importing_relight_imports_neither_torch_nor_numpy_nor_the_extension() -> None:
    code = "import sys, relight; print([name for name in ('torch', 'numpy', 'relight._core') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"


def test_the_version_is_that_of_the_extension() -> None:
    import relight
    from relight import _core

    assert relight.__version__ == _core.__version__


def test_the_engine_starts_at_first_use_and_again_after_a_close(root: Path, script: Start) -> None:
    source = """
    from relight import runtime
    say(runtime.started())
    ckpt = relight.Checkpointer(root)
    say(runtime.started())
    ckpt.save(1, values(1))
    say(runtime.close(60), runtime.started(), runtime.close())
    try:
        ckpt.save(2, values(2))
    except relight.EngineClosed:
        say("closed")
    ckpt = relight.Checkpointer(root)
    ckpt.save(3, values(3), blocking=True)
    say([one.step for one in ckpt.list()])
    """
    code, out, err = script(source, root).end()
    assert (code, err) == (0, "")
    assert out.splitlines() == ["False", "True", "True False True", "closed", "[1, 3]"]


def test_options_of_the_process_are_taken_once_and_never_ignored(root: Path, script: Start) -> None:
    source = """
    first = relight.Checkpointer(root, options=relight.Options(copy_threads=3))
    relight.Checkpointer(root, options=relight.Options(copy_threads=3, on_error="raise"))
    relight.Checkpointer(root, options=relight.Options(on_error="raise"))
    relight.Checkpointer(root)
    try:
        relight.Checkpointer(root, options=relight.Options(copy_threads=4))
    except relight.InvalidArgument as error:
        say(error)
    """
    code, out, err = script(source, root).end()
    assert (code, err) == (0, "")
    assert out.startswith("copy_threads=4 comes too late: the engine of this process runs with 3.")
    assert "RELIGHT_COPY_THREADS" in out


def test_a_run_prints_nothing_unless_logging_is_asked_for(root: Path, script: Start) -> None:
    source = """
    with relight.Checkpointer(root, keep=1) as ckpt:
        state = relight.TrainState(model=torch.nn.Linear(2, 2))
        ckpt.resume(state)
        for step in (1, 2):
            ckpt.save(step, state)
        ckpt.resume(state)
    """
    assert script(source, root).end() == (0, "", "")


def test_callbacks_run_without_anybody_waiting(root: Path, script: Start) -> None:
    source = """
    import threading
    done = threading.Event()
    ckpt = relight.Checkpointer(root)
    ckpt.save(1, values(1)).add_done_callback(lambda handle: (say(handle.done(), handle.exception()), done.set()))
    assert done.wait(60)
    """
    code, out, err = script(source, root).end()
    assert (code, out.strip(), err) == (0, "True None", "")


def test_in_several_processes_the_error_names_a_way_out_that_works(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: advice ("save on one process only") that the same refusal stands in the way of."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(
        relight.InvalidArgument, match=r"one rank only.* as relight\.Checkpointer\(root, rank=0, world_"
    ):
        relight.Checkpointer(root)
    with relight.Checkpointer(root, rank=0, world_size=1) as ckpt:
        ckpt.save(1, values(1))
    assert (root / "global_step1" / "complete.txt").exists()
