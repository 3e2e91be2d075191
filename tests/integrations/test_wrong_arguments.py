"""Calls that cannot be meant so: an `InvalidArgument` that says what to give, at once, and nothing written."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import relight
import torch

STATE = {"a": torch.ones(2)}


@pytest.mark.parametrize("path", [None, 5, ["x.pt"], "", "a\0b"])
def test_what_is_no_path_is_said_to_be_none(tmp_path: Path, path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for call in (
        lambda: relight.save(STATE, path),
        lambda: relight.save_async(STATE, path),
        lambda: relight.load(path),
        lambda: relight.open(path),
    ):
        with pytest.raises(relight.InvalidArgument, match="path"):
            call()
    assert not list(tmp_path.iterdir())


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    """Guards: opening it blocks until somebody writes into it, perhaps for ever."""
    os.mkfifo(tmp_path / "pipe")
    for call in (relight.load, relight.open, lambda path: relight.save(STATE, path)):
        with pytest.raises(relight.InvalidArgument, match="file"):
            call(tmp_path / "pipe")


def test_links_in_a_circle_are_no_trouble_of_the_storage(tmp_path: Path) -> None:
    (tmp_path / "one").symlink_to("two")
    (tmp_path / "two").symlink_to("one")
    for call in (relight.load, relight.open, lambda path: relight.save(STATE, path)):
        with pytest.raises(relight.InvalidArgument, match=r"symbolic links.*choose another path"):
            call(tmp_path / "one")


@pytest.mark.parametrize(
    "options", [*({"pickle_protocol": one} for one in (0, 1, 6, "2")), {"pickle_module": None}], ids=str
)
def test_a_wrong_pickler_is_not_blamed_on_the_state(tmp_path: Path, options: dict[str, Any]) -> None:
    for call in (relight.save, relight.save_async):
        with pytest.raises(relight.InvalidArgument, match=next(iter(options))):
            call(STATE, tmp_path / "a.pt", **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("protocol", [*range(2, pickle.HIGHEST_PROTOCOL + 1), -1])
def test_every_protocol_is_read_without_code(tmp_path: Path, protocol: int) -> None:
    relight.save(STATE, tmp_path / "a.pt", pickle_protocol=protocol)
    assert torch.equal(relight.load(tmp_path / "a.pt")["a"], STATE["a"])
    assert torch.equal(torch.load(tmp_path / "a.pt", weights_only=False)["a"], STATE["a"])


@pytest.mark.parametrize("allow", [None, 5, "builtins.dict"])
def test_allow_is_a_list(tmp_path: Path, allow: Any) -> None:
    relight.save(STATE, tmp_path / "a.pt")
    for call in (relight.load, relight.open):
        with pytest.raises(relight.InvalidArgument, match="allow="):
            call(tmp_path / "a.pt", allow=allow)


def test_a_file_object_that_takes_nothing_ends_the_save() -> None:
    """Guards: a count below 0 was added up for ever."""

    class Refuses(io.RawIOBase):
        def write(self, data: Any) -> int:
            return -5

    with pytest.raises(relight.StorageFull):
        relight.save(STATE, Refuses())  # type: ignore[arg-type]  # a raw file is one


def test_open_and_load_say_the_same_of_a_file_that_is_none(tmp_path: Path) -> None:
    """Guards: `open` sent the reader of an empty file to `load`, which refused it."""
    (tmp_path / "empty.pt").touch()
    (tmp_path / "text.pt").write_text("not a checkpoint")
    for path in (tmp_path / "empty.pt", tmp_path / "text.pt"):
        for call in (relight.load, relight.open):
            with pytest.raises(relight.CorruptCheckpoint, match="use another checkpoint"):
                call(path)
    torch.save(STATE, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(relight.InvalidArgument, match=r"relight\.load"):
        relight.open(tmp_path / "old.pt")


def test_a_foreign_zip_is_the_same_mistake_by_path_and_by_object(tmp_path: Path) -> None:
    path = tmp_path / "photos.zip"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("a.txt", "a")
        file.writestr("b/c.txt", "c")
    for source in (path, io.BytesIO(path.read_bytes())):
        with pytest.raises(relight.InvalidArgument, match=r"torch\.save did not write"):
            relight.load(source)
