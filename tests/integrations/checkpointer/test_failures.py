"""Failed background saves: reported to everyone who asks, and never at the cost of another save."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import relight

from .conftest import block, fill_of, model_of, steps, values


def test_bl_074_one_failed_save_costs_no_other_and_retention_does_not_trip(root: Path) -> None:
    block(root, "global_step2")
    with pytest.raises(relight.CheckpointError, match="global_step2") as caught:  # noqa: SIM117
        with relight.Checkpointer(root, keep=2) as ckpt:
            ckpt.save(1, values(1)).result()
            failed = ckpt.save(2, values(2))
            assert failed.wait()
            with pytest.warns(
                relight.SaveFailedWarning, match=r"an earlier save failed: global_step2: .*global_step3 is"
            ):
                ckpt.save(3, values(3)).result()
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # it is said once
                ckpt.save(4, values(4)).result()
            assert steps(ckpt) == [3, 4]
    assert caught.value.tag == "global_step2"


def test_bl_075_the_end_of_the_block_raises_what_nobody_was_told(root: Path) -> None:
    block(root, "global_step1")
    with pytest.raises(relight.CheckpointError, match="global_step1"):  # noqa: SIM117
        with relight.Checkpointer(root) as ckpt:
            ckpt.save(1, values(1))


def test_bl_075_close_and_wait_raise_too_and_once_is_enough(root: Path) -> None:
    block(root, "global_step1")
    block(root, "global_step2")
    ckpt = relight.Checkpointer(root)
    ckpt.save(1, values(1)).wait()
    with pytest.warns(relight.SaveFailedWarning):
        ckpt.save(2, values(2)).wait()
    with pytest.raises(relight.CheckpointError, match="global_step1") as caught:
        ckpt.wait()
    assert any("global_step2 failed too" in note for note in caught.value.__notes__)
    ckpt.wait()
    ckpt.close()

    ckpt = relight.Checkpointer(root)
    ckpt.save(1, values(1))
    with pytest.raises(relight.CheckpointError, match="global_step1"):
        ckpt.close()
    ckpt.close()


def test_an_error_taken_from_the_handle_is_not_raised_again(root: Path) -> None:
    block(root, "global_step1")
    with relight.Checkpointer(root) as ckpt:
        assert ckpt.save(1, values(1)).exception() is not None
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ckpt.save(2, values(2))


def test_a_blocking_save_raises_its_own_error_once(root: Path) -> None:
    block(root, "global_step1")
    with relight.Checkpointer(root) as ckpt:
        with pytest.raises(relight.CheckpointError, match="global_step1"):
            ckpt.save(1, values(1), blocking=True)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ckpt.save(2, values(2), blocking=True)
        assert steps(ckpt) == [2]


def test_on_error_raise_raises_once_the_own_save_is_staged(root: Path) -> None:
    block(root, "global_step1")
    with relight.Checkpointer(root, on_error="raise") as ckpt:
        ckpt.save(1, values(1)).wait()
        with pytest.raises(relight.CheckpointError, match="global_step1"):
            ckpt.save(2, values(2))
        ckpt.wait()
        assert steps(ckpt) == [2]


def test_a_warning_turned_into_an_error_costs_the_save_nothing(root: Path) -> None:
    block(root, "global_step1")
    ckpt = relight.Checkpointer(root)
    failed = ckpt.save(1, values(1))
    failed.wait()
    with warnings.catch_warnings(), pytest.raises(relight.SaveFailedWarning):
        warnings.simplefilter("error")
        ckpt.save(2, values(2))
    assert failed.exception() is not None
    ckpt.close()
    with relight.Checkpointer(root) as again:
        assert steps(again) == [2]


def test_bl_080_the_callers_error_wins_and_the_good_save_is_finished(root: Path) -> None:
    block(root, "global_step2")
    with pytest.raises(ValueError, match="mine") as caught:  # noqa: SIM117
        with relight.Checkpointer(root) as ckpt:
            good = ckpt.save(1, values(1))
            ckpt.save(2, values(2))
            raise ValueError("mine")
    assert good.done() and good.exception() is None
    assert any("global_step2" in note for note in caught.value.__notes__)
    with relight.Checkpointer(root) as again:
        assert steps(again) == [1]


def test_bl_081_a_step_whose_commit_failed_is_never_listed_and_the_way_from_16_is_latest(root: Path) -> None:
    block(root, "global_step20")
    with relight.Checkpointer(root) as ckpt:
        ckpt.save(16, relight.TrainState(model=model_of(16))).result()
        assert ckpt.save(20, relight.TrainState(model=model_of(20))).exception() is not None
        model = model_of(0)
        assert ckpt.resume(relight.TrainState(model=model)) == 16
        assert fill_of(model) == 16
        ckpt.save(17, relight.TrainState(model=model_of(17)))
        ckpt.save(18, relight.TrainState(model=model_of(18)))
        ckpt.wait()
        assert steps(ckpt) == [16, 17, 18]
        found = ckpt.latest()
        assert found is not None and found.step == 18
    with relight.Checkpointer(root) as again:
        assert steps(again) == [16, 17, 18]


def test_bl_072_what_comes_right_after_a_save_sees_the_new_state_or_waits(root: Path) -> None:
    with relight.Checkpointer(root) as ckpt:
        ckpt.save(1, values(1), blocking=True)
        ckpt.save(1, values(1.5))
        assert float(ckpt.load(1)["weight"][0]) == 1.5
        ckpt.save(2, values(2))
        found = ckpt.latest()
        assert found is not None and found.step == 2
        assert steps(ckpt) == [1, 2]
        assert float(ckpt.load()["weight"][0]) == 2
        ckpt.save(2, values(2.5))
        ckpt.delete(2)
        assert steps(ckpt) == [1]
        ckpt.save(2, values(2.75))
        assert float(ckpt.load(2)["weight"][0]) == 2.75
        ckpt.wait()
    with relight.Checkpointer(root) as again:
        assert float(again.load(2)["weight"][0]) == 2.75
        assert float(again.load(1)["weight"][0]) == 1.5
