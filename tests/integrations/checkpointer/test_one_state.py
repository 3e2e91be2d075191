"""A tag that is saved again while it is read: what is loaded is of one save."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import relight
import torch

from .conftest import fill_of, model_of


class Disturbed:
    """A root that does something after each image that it has opened."""

    def __init__(self, root: Any, then: Callable[[int], None]) -> None:
        self._root = root
        self._then = then
        self.opened = 0

    def open_image(self, tag: str, file: str, **options: Any) -> Any:
        image = self._root.open_image(tag, file, **options)
        self.opened += 1
        self._then(self.opened)
        return image

    def __getattr__(self, name: str) -> Any:
        return getattr(self._root, name)


def pair(fill: float) -> relight.TrainState:
    return relight.TrainState(model=model_of(fill), other=model_of(fill))


def fills(state: relight.TrainState) -> tuple[float, float]:
    model, other = state.components["model"], state.components["other"]
    assert isinstance(model, torch.nn.Module) and isinstance(other, torch.nn.Module)
    return fill_of(model), fill_of(other)


def disturb(reader: relight.Checkpointer, then: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> Disturbed:
    disturbed = Disturbed(reader._root, then)
    monkeypatch.setattr(reader, "_root", disturbed)
    return disturbed


@pytest.mark.parametrize("tag", [None, "last"])
@pytest.mark.parametrize("after", [1, 2, 3])
@pytest.mark.parametrize("persisted", [True, False], ids=["committed", "staged"])
def test_a_save_between_two_opens_mixes_nothing(
    root: Path, tag: str | None, after: int, persisted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with relight.Checkpointer(root) as writer, relight.Checkpointer(root) as reader:
        writer.save("last", pair(5), step=5)
        writer.wait()

        def save_again(opened: int) -> None:
            if opened == after:
                writer.save("last", pair(6), step=6)
                if persisted:
                    writer.wait()

        disturb(reader, save_again, monkeypatch)
        state = pair(0)
        step = reader.resume(state, tag)
        assert fills(state) == (step, step)
        assert step in (5, 6)


def test_what_is_claimed_later_is_of_the_same_save(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with relight.Checkpointer(root) as writer, relight.Checkpointer(root) as reader:
        writer.save("last", pair(5), step=5)
        writer.wait()

        def save_again(opened: int) -> None:
            if opened == 3:  # all are open
                writer.save("last", pair(6), step=6)
                writer.wait()

        disturb(reader, save_again, monkeypatch)
        state = relight.TrainState(model=model_of(0))
        with pytest.warns(relight.ResumeWarning, match="other"):
            assert reader.resume(state) == 5
        other = model_of(0)
        state.register("other", other)
        model = state.components["model"]
        assert isinstance(model, torch.nn.Module)
        assert (fill_of(model), fill_of(other)) == (5, 5)


def test_files_of_several_saves_are_one_checkpoint(root: Path) -> None:
    with relight.Checkpointer(root) as ckpt:
        ckpt.save("last", pair(1), step=1)
        ckpt.wait()
        ckpt.save("last", files={"other.pt": model_of(2).state_dict()}, step=1)
        state = pair(0)
        ckpt.resume(state)
        assert fills(state) == (1, 2)
        ckpt.wait()
        ckpt.resume(state)
        assert fills(state) == (1, 2)


@pytest.mark.parametrize("tag", [None, "last"])
def test_a_tag_that_never_rests_is_a_conflict(
    root: Path, tag: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with relight.Checkpointer(root) as writer, relight.Checkpointer(root) as reader:
        writer.save("last", pair(0), step=1)

        def save_again(opened: int) -> None:
            writer.save("last", pair(opened), step=1)
            writer.wait()

        disturb(reader, save_again, monkeypatch)
        state = pair(-1)
        with (
            caplog.at_level(logging.INFO, "relight"),
            pytest.raises(relight.CommitConflict, match="5 attempts") as info,
        ):
            reader.resume(state, tag)
        assert info.value.tag == "last"
        assert fills(state) == (-1, -1)
        assert sum("reading it again" in record.getMessage() for record in caplog.records) == 4
