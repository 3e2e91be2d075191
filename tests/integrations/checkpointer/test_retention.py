"""Retention: what was just committed stays, what relight did not write stays, and the limit is never without effect."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import relight

from .conftest import fill_of, model_of, steps, values


def on_storage(root: Path) -> set[str]:
    return {path.name for path in root.iterdir() if path.is_dir() and not path.name.startswith(".")}


@pytest.mark.parametrize("keep", [0, -1, True, 2.0, "2"])
def test_bl_112_a_limit_without_a_meaning_is_refused_before_anything_is_made(root: Path, keep: Any) -> None:
    with pytest.raises(relight.InvalidArgument, match=r"give a whole number from 1 up .* or None to keep all"):
        relight.Checkpointer(root, keep=keep)
    assert not root.exists()


@pytest.mark.parametrize("keep", [None, 10**30])
def test_bl_112_none_and_a_huge_limit_keep_all(root: Path, keep: int | None) -> None:
    with relight.Checkpointer(root, keep=keep) as ckpt:
        for step in range(12):
            ckpt.save(step, values(step))
        ckpt.wait()
        assert steps(ckpt) == list(range(12))


def test_bl_093_ten_rounds_of_save_and_resume_leave_two(root: Path) -> None:
    for round_ in range(10):
        with relight.Checkpointer(root, keep=2) as ckpt:
            model = model_of(0)
            step = ckpt.resume(relight.TrainState(model=model))
            assert step == 10 * round_
            if round_:
                assert fill_of(model) == step
            ckpt.save(step + 10, relight.TrainState(model=model_of(step + 10)))
    with relight.Checkpointer(root, keep=2) as ckpt:
        assert steps(ckpt) == [90, 100]
    assert on_storage(root) == {"global_step90", "global_step100"}


def test_bl_101_the_oldest_by_step_goes_whatever_the_times_say(root: Path) -> None:
    with relight.Checkpointer(root, keep=2) as ckpt:
        for step in (1, 2):
            ckpt.save(step, values(step), blocking=True)
        for path in (root / "global_step1", *(root / "global_step1").rglob("*")):
            os.utime(path, (4e9, 4e9))  # the oldest looks newest
        ckpt.save(3, values(3), blocking=True)
        assert steps(ckpt) == [2, 3]
    assert on_storage(root) == {"global_step2", "global_step3"}


def test_bl_110_what_a_new_run_commits_is_never_deleted_for_an_older_run_of_higher_steps(root: Path) -> None:
    with relight.Checkpointer(root) as old:
        for step in (500, 600, 700):
            old.save(step, values(step))
    from relight import runtime

    assert runtime.close(60)  # the old run's process ends
    with relight.Checkpointer(root, keep=3) as ckpt:
        for step in (100, 200, 300):
            ckpt.save(step, values(step), blocking=True)
            assert step in steps(ckpt)
        assert sorted(filter(None, steps(ckpt))) == [100, 200, 300]
        found = ckpt.latest()
        assert found is not None and found.step == 300


def test_bl_111_steps_out_of_order_and_one_twice(root: Path) -> None:
    """Inside one run, steps order: 5 is what was just saved, so it stays until the next save, and then goes."""
    with relight.Checkpointer(root, keep=2) as ckpt:
        ckpt.save(125, values(125), blocking=True)
        ckpt.save(5, values(5), blocking=True)
        assert steps(ckpt) == [5, 125]
        ckpt.save(130, values(130), blocking=True)
        assert steps(ckpt) == [125, 130]
        ckpt.save(125, values(-125), blocking=True)
        assert steps(ckpt) == [125, 130]
        assert float(ckpt.load(125)["weight"][0]) == -125
    assert on_storage(root) == {"global_step125", "global_step130"}


def test_bl_113_the_root_that_was_resumed_from_is_untouched(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    with relight.Checkpointer(first) as a:
        for step in (1, 2, 3):
            a.save(step, relight.TrainState(model=model_of(step)))
    before = {path: path.stat().st_mtime_ns for path in first.rglob("*.pt")}
    with relight.Checkpointer(first) as a, relight.Checkpointer(second, keep=1) as b:
        model = model_of(0)
        step = a.resume(relight.TrainState(model=model), tag=2)
        for number in range(step + 1, step + 6):
            b.save(number, relight.TrainState(model=model))
        b.wait()
        assert steps(b) == [7]
        assert steps(a) == [1, 2, 3]
    assert {path: path.stat().st_mtime_ns for path in first.rglob("*.pt")} == before


def test_bl_114_checkpoints_of_earlier_processes_count(root: Path) -> None:
    from relight import runtime

    with relight.Checkpointer(root, keep=3) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, values(step))
    assert runtime.close(60)  # as a restart: nothing of them is in memory
    with relight.Checkpointer(root, keep=3) as ckpt:
        for step in (4, 5, 6):
            ckpt.save(step, values(step))
        ckpt.wait()
        assert steps(ckpt) == [4, 5, 6]


@pytest.mark.parametrize("tag", ["global_step{}", "epoch={}", "{}", "step-{}-of-100"])
@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("route", ["state", "files", "train_state"])
def test_bl_115_the_limit_works_in_every_naming_mode_and_on_every_route(
    root: Path, tag: str, blocking: bool, route: str
) -> None:
    with relight.Checkpointer(root, keep=2) as ckpt:
        for step in range(1, 6):
            name = tag.format(step) if "of" not in tag else f"run-of-{step}"
            match route:
                case "state":
                    ckpt.save(name, values(step), blocking=blocking)
                case "files":
                    ckpt.save(name, files={"a.pt": values(step), "b.pt": step}, blocking=blocking)
                case _:
                    ckpt.save(name, relight.TrainState(model=model_of(step)), blocking=blocking)
        ckpt.wait()
        assert steps(ckpt) == [4, 5]
    assert len(on_storage(root)) == 2


def test_bl_115_tags_without_a_step_count_too(root: Path) -> None:
    with relight.Checkpointer(root, keep=2) as ckpt:
        for name in ("red", "green", "blue"):
            ckpt.save(name, values(0), blocking=True)
        assert [one.tag for one in ckpt.list()] == ["green", "blue"]


def test_files_that_relight_did_not_write_stay(root: Path) -> None:
    with relight.Checkpointer(root, keep=1) as ckpt:
        ckpt.save(1, values(1), blocking=True)
        (root / "global_step1" / "notes.txt").write_text("mine")
        (root / "other").mkdir()
        (root / "other" / "data").write_text("mine too")
        ckpt.save(2, values(2), blocking=True)
        assert steps(ckpt) == [2]
    assert (root / "global_step1" / "notes.txt").read_text() == "mine"
    assert (root / "other" / "data").read_text() == "mine too"
    assert not (root / "global_step1" / "state.pt").exists()
