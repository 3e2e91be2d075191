"""Which checkpoint is the newest, and what a resume takes when it is not whole."""

from __future__ import annotations

import json
import logging
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import relight
import torch

from .conftest import fill_of, model_of, steps, values


def save_steps(root: Path, *numbers: int, keep: int | None = None) -> None:
    with relight.Checkpointer(root, keep=keep) as ckpt:
        for number in numbers:
            ckpt.save(number, relight.TrainState(model=model_of(number)))


def forget_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What follows reads the storage: the engine with its memory tier ends."""
    from relight import runtime

    assert runtime.close(60)


@pytest.fixture
def persisted(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Steps 100, 200, 300, on storage only."""
    save_steps(root, 100, 200, 300)
    forget_memory(monkeypatch)
    return root


def test_a_fresh_run_starts_at_0_without_a_word(root: Path) -> None:
    with relight.Checkpointer(root) as ckpt, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ckpt.resume(relight.TrainState(model=model_of(0))) == 0
        assert ckpt.resumed is None
        assert ckpt.latest() is None
        assert ckpt.list() == []
        with pytest.raises(relight.CheckpointNotFound, match="no complete checkpoint in"):
            ckpt.load()


def test_bl_095_order_is_by_number(root: Path) -> None:
    with relight.Checkpointer(root) as ckpt:
        for number in (1000, 9, 10000, 100, 2500, 10, 500, 99):
            ckpt.save(number, values(number))
        assert steps(ckpt) == [9, 10, 99, 100, 500, 1000, 2500, 10000]
        found = ckpt.latest()
        assert found is not None and found.step == 10000
        assert float(ckpt.load()["weight"][0]) == 10000


def test_bl_096_tags_of_digits_order_by_value_and_what_has_no_step_is_never_newest(root: Path) -> None:
    with relight.Checkpointer(root) as ckpt:
        for tag in ("0900000", "09000000", "100000", "handpicked"):
            ckpt.save(tag, values(0))
        ckpt.wait()
        for name in ("best", "10.bak", "99999999999"):
            (root / name).mkdir()
            (root / name / "weights.bin").write_bytes(b"x")
        found = ckpt.latest()
        assert found is not None and found.tag == "09000000"
        assert [one.tag for one in ckpt.list() if not one.foreign] == ["handpicked", "100000", "0900000", "09000000"]


def test_bl_100_times_have_no_say(root: Path) -> None:
    save_steps(root, *range(1, 21))
    for step in range(1, 21):  # reversed: the oldest step gets the newest time
        for path in (root / f"global_step{step}", *(root / f"global_step{step}").rglob("*")):
            os.utime(path, (2e9 - step * 1e6, 2e9 - step * 1e6))
    with relight.Checkpointer(root) as ckpt:
        assert steps(ckpt) == list(range(1, 21))
        model = model_of(0)
        assert ckpt.resume(relight.TrainState(model=model)) == 20
        assert fill_of(model) == 20


def test_bl_102_a_step_by_name_is_that_step_with_every_option(persisted: Path) -> None:
    (persisted / "latest").unlink(missing_ok=True)
    with relight.Checkpointer(persisted) as ckpt:
        for options in ({}, {"mmap": True}, {"weights_only": False}, {"map_location": "meta"}, {"map_location": "cpu"}):
            loaded = ckpt.load(100, "model.pt", **options)
            assert loaded["weight"].shape == (3, 3)
            if not loaded["weight"].is_meta:
                assert set(loaded["weight"].flatten().tolist()) == {100.0}
        model = model_of(0)
        assert ckpt.resume(relight.TrainState(model=model), tag=100) == 100
        assert fill_of(model) == 100
        assert ckpt.resumed is not None and ckpt.resumed.tag == "global_step100"


def test_a_new_run_is_newer_than_what_it_left_behind(root: Path) -> None:
    with relight.Checkpointer(root) as ckpt:
        for number in (500, 1000):
            ckpt.save(number, relight.TrainState(model=model_of(number)))
        assert ckpt.resume(relight.TrainState(model=model_of(0)), tag=500) == 500
        ckpt.save(600, relight.TrainState(model=model_of(600)), blocking=True)
        found = ckpt.latest()
        assert found is not None and found.step == 600
        assert {one.step: one.left_behind for one in ckpt.list()} == {500: False, 600: False, 1000: True}
    with relight.Checkpointer(root) as again:
        assert again.resume(relight.TrainState(model=model_of(0))) == 600


# ---- damage ----


def without_manifest(tag: Path) -> None:
    (tag / ".relight" / "manifest.json").unlink()


def without_file(tag: Path) -> None:
    (tag / "model.pt").unlink()


def with_a_file_of_no_bytes(tag: Path) -> None:
    (tag / "model.pt").write_bytes(b"")


def with_a_short_file(tag: Path) -> None:
    os.truncate(tag / "model.pt", 100)


def with_a_flipped_byte(tag: Path) -> None:
    with open(tag / "model.pt", "r+b") as file:
        data = bytearray(file.read())
        data[data.index(b"\x00\x00\x96\x43" * 4) + 1] ^= 1  # 300.0, in the weights
        file.seek(0)
        file.write(data)


def as_an_empty_directory(tag: Path) -> None:
    shutil.rmtree(tag)
    tag.mkdir()


DAMAGES: tuple[Callable[[Path], None], ...] = (
    without_manifest, without_file, with_a_file_of_no_bytes, with_a_short_file, with_a_flipped_byte,
    as_an_empty_directory,
)  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda one: one.__name__)
def test_bl_097_resume_takes_the_older_one_and_names_the_damaged(
    persisted: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    damage(persisted / "global_step300")
    model = model_of(0)
    with relight.Checkpointer(persisted) as ckpt:
        with pytest.warns(relight.ResumeWarning, match="global_step300"):
            assert ckpt.resume(relight.TrainState(model=model)) == 200
        assert fill_of(model) == 200
        assert "global_step300" in caplog.text
        with pytest.raises((relight.CorruptCheckpoint, relight.CheckpointNotFound), match=r"global_step300|model.pt"):
            ckpt.resume(relight.TrainState(model=model), tag=300)
        with pytest.raises((relight.CorruptCheckpoint, relight.CheckpointNotFound), match=r"global_step300|model.pt"):
            ckpt.load(300, "model.pt")
        assert fill_of(model) == 200


def test_bl_097_load_of_the_newest_names_what_it_passed_over_without_reading_it(persisted: Path) -> None:
    """Guards: `resume` warned of a newest one without its manifest, and `load()` gave the older in silence."""
    without_manifest(persisted / "global_step300")
    with relight.Checkpointer(persisted) as ckpt:
        with pytest.warns(relight.ResumeWarning, match="global_step300 cannot be used"):
            loaded = ckpt.load(file="model.pt")
        assert float(loaded["weight"][0, 0]) == 200


def test_bl_097_a_directory_stripped_of_what_relight_wrote_is_named_and_loaded_only_by_name(persisted: Path) -> None:
    shutil.rmtree(persisted / "global_step300" / ".relight")
    with relight.Checkpointer(persisted) as ckpt:
        with pytest.warns(relight.ResumeWarning, match="global_step300 was not completed by relight"):
            assert ckpt.resume(relight.TrainState(model=model_of(0))) == 200
        with pytest.raises(relight.InvalidArgument, match=r"global_step300 .* has no manifest"):
            ckpt.resume(relight.TrainState(model=model_of(0)), tag=300)
        assert float(ckpt.load(300, "model.pt")["weight"][0, 0]) == 300


def test_if_every_checkpoint_is_damaged_the_run_does_not_start_from_0(persisted: Path) -> None:
    for step in (100, 200, 300):
        with_a_short_file(persisted / f"global_step{step}")
    with relight.Checkpointer(persisted) as ckpt:
        with pytest.raises(relight.CorruptCheckpoint, match=r"no checkpoint in .* can be used") as caught:
            ckpt.resume(relight.TrainState(model=model_of(0)))
        for step in (100, 200, 300):
            assert f"global_step{step}" in str(caught.value)


def test_verify_names_the_bad_file(persisted: Path) -> None:
    with_a_flipped_byte(persisted / "global_step300")
    with relight.Checkpointer(persisted) as ckpt:
        assert ckpt.verify(200)
        report = ckpt.verify(300)
        assert not report
        assert [(file.name, file.ok) for file in report.files if not file.ok] == [("model.pt", False)]
        assert report.files[0].problem or report.files[1].problem
        with pytest.raises(relight.CheckpointNotFound, match="global_step7"):
            ckpt.verify(7)


def test_an_unknown_tag_is_not_found_and_what_is_there_is_said(persisted: Path) -> None:
    with relight.Checkpointer(persisted) as ckpt:
        for call in (
            lambda: ckpt.load(7),
            lambda: ckpt.resume(relight.TrainState(model=model_of(0)), tag="nope"),
        ):
            with pytest.raises(FileNotFoundError, match="global_step100, global_step200, global_step300"):
                call()  # type: ignore[no-untyped-call]
        with pytest.raises(relight.CheckpointNotFound):
            ckpt.delete(7)


def test_foreign_checkpoints_are_loaded_by_name_and_never_resumed_in_silence(root: Path) -> None:
    (root / "global_step50").mkdir(parents=True)
    torch.save({"weight": torch.ones(1)}, root / "global_step50" / "model.pt")
    with relight.Checkpointer(root, keep=1) as ckpt:
        with pytest.warns(relight.ResumeWarning, match="global_step50 was not completed by relight"):
            assert ckpt.resume(relight.TrainState(model=model_of(0))) == 0
        assert float(ckpt.load("global_step50", "model.pt")["weight"]) == 1
        for number in (1, 2, 3):
            ckpt.save(number, values(number), blocking=True)
        assert ckpt.latest().step == 3  # type: ignore[union-attr]
    assert (root / "global_step50" / "model.pt").exists()


def test_a_resume_says_what_it_did(persisted: Path, caplog: pytest.LogCaptureFixture) -> None:
    with relight.Checkpointer(persisted) as ckpt, caplog.at_level(logging.INFO, "relight"):
        assert ckpt.resume(relight.TrainState(model=model_of(0))) == 300
        assert ckpt.resumed is not None
        assert (ckpt.resumed.tag, ckpt.resumed.step, ckpt.resumed.tier) == ("global_step300", 300, "persistent")
        assert ckpt.resumed.seconds > 0
        assert (ckpt.resumed.drained, ckpt.resumed.skipped) == ((), ())
        assert "resumed from global_step300, persistent tier, in " in caplog.text
        ckpt.save(301, relight.TrainState(model=model_of(301)))
        ckpt.resume(relight.TrainState(model=model_of(0)))
        assert ckpt.resumed.tier == "memory"


def test_bl_193_ranks_and_world_are_readable_without_relight(persisted: Path) -> None:
    manifest = json.loads((persisted / "global_step300" / ".relight" / "manifest.json").read_text())
    assert manifest["world_size"] == 1
    assert [writer["rank"] for writer in manifest["writers"]] == [0]
    facts = torch.load(persisted / "global_step300" / "train_state.pt", weights_only=True)
    assert (facts["rank"], facts["world_size"]) == (0, 1)


def test_bl_191_a_late_component_gets_its_state_even_if_the_checkpoint_is_deleted(root: Path) -> None:
    model = model_of(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.25)
    with relight.Checkpointer(root) as ckpt:
        ckpt.save(1, relight.TrainState(model=model, optimizer=optimizer), blocking=True)
        state = relight.TrainState(model=model_of(0))
        with pytest.warns(relight.ResumeWarning, match="its component 'optimizer' is not registered"):
            ckpt.resume(state)
        ckpt.delete(1)
        late = torch.optim.Adam(model_of(0).parameters(), lr=0.5)
        state.register("optimizer", late)
        assert late.param_groups[0]["lr"] == 0.25


def test_resume_takes_a_train_state_only(root: Path) -> None:
    with (
        relight.Checkpointer(root) as ckpt,
        pytest.raises(relight.InvalidArgument, match=r"takes a relight.TrainState"),
    ):
        ckpt.resume(model_of(0))  # type: ignore[arg-type]


def test_a_tag_without_a_step_returns_the_step_that_the_state_tracks_or_0_with_a_word(root: Path) -> None:
    with relight.Checkpointer(root) as ckpt:
        ckpt.save("final", relight.TrainState(model=model_of(1), step=41), blocking=True)
        assert ckpt.resume(relight.TrainState(model=model_of(0)), tag="final") == 41
        ckpt.save("other", relight.TrainState(model=model_of(1)), blocking=True)
        with pytest.warns(relight.ResumeWarning, match="it has no step, so 0 is returned"):
            assert ckpt.resume(relight.TrainState(model=model_of(0)), tag="other") == 0
