"""Saving: what becomes which file, what is refused before a byte is written, and the moment that is saved."""

from __future__ import annotations

import copy
import logging
import pickle
import threading
from pathlib import Path
from typing import Any

import numpy
import pytest
import relight
import torch

from .conftest import fill_of, model_of, steps, values


def test_a_saved_state_is_committed_and_plain_torch_reads_it(root: Path) -> None:
    with relight.Checkpointer(root) as ckpt:
        handle = ckpt.save(5, values(5))
        assert handle.staged()
        assert handle.result() == str(root / "global_step5")
        assert handle.done()
    loaded = torch.load(root / "global_step5" / "state.pt", weights_only=True)
    assert torch.equal(loaded["weight"], values(5)["weight"])


def test_a_dict_is_one_file_whatever_its_keys(root: Path) -> None:
    """Guards: a state dict whose keys look like file names is not taken apart."""
    state = {"model.pt": torch.ones(2), "optimizer.pt": torch.zeros(2)}
    with relight.Checkpointer(root) as ckpt:
        assert ckpt.save(1, state, blocking=True).files == ("state.pt",)
        assert set(ckpt.load(1)) == set(state)


def test_several_objects_are_several_files(root: Path) -> None:
    with relight.Checkpointer(root) as ckpt:
        handle = ckpt.save(1, values(1), files={"ema.pt": values(2), "notes/of mine.pt": [1, 2]})
        assert handle.files == ("state.pt", "ema.pt", "notes/of mine.pt")
        handle.result()
        assert float(ckpt.load(1, "ema.pt")["weight"][0]) == 2
        assert ckpt.load(1, "notes/of mine.pt") == [1, 2]
        assert float(ckpt.load(1)["weight"][0]) == 1
        found = ckpt.latest()
        assert found is not None
        assert {file.name for file in found.files} == {"state.pt", "ema.pt", "notes/of mine.pt"}
        ckpt.save(2, files={"a.pt": 1, "b.pt": 2})
        with pytest.raises(relight.InvalidArgument, match=r"has the files a.pt, b.pt; say which with file="):
            ckpt.load(2)
        with pytest.raises(relight.CheckpointNotFound, match=r"has no file 'c.pt'; it has a.pt, b.pt"):
            ckpt.load(2, "c.pt")


def test_facts_of_a_checkpoint_are_listed(root: Path) -> None:
    with relight.Checkpointer(root) as ckpt:
        ckpt.save(numpy.int64(3), values(3), meta={"loss": float("nan"), "n": numpy.int32(2)}, best=True, blocking=True)
        found = ckpt.latest()
        assert found is not None
        assert (found.tag, found.step, found.best, found.foreign, found.left_behind) == (
            "global_step3",
            3,
            True,
            False,
            False,
        )
        assert found.meta == {"loss": "NaN", "n": 2}
        assert found.world_size == 1
        assert [(file.name, file.rank) for file in found.files] == [("state.pt", 0)]
        assert found.committed_at is not None and found.committed_at.tzinfo is not None
        assert found.path == str(root / "global_step3")


@pytest.mark.parametrize(
    "tag", [-1, True, 1.0, None, 1 << 63, b"x", "", "..", ".", "a/b", "/tmp/x", "../x", "a\nb", "a\0b"]
)
def test_bl_159_a_tag_that_is_no_name_is_refused_and_nothing_is_written(root: Path, tag: Any) -> None:
    with relight.Checkpointer(root) as ckpt:
        with pytest.raises(relight.InvalidArgument):
            ckpt.save(tag, values(0))
        assert ckpt.list() == []
    assert not (root.parent / "x").exists()


def test_the_step_of_a_name_is_the_number_in_it_or_what_is_given(root: Path) -> None:
    with relight.Checkpointer(root) as ckpt:
        ckpt.save("epoch-7", values(7))
        ckpt.save("final", values(9), step=9)
        ckpt.save("handpicked", values(0))
        with pytest.raises(relight.InvalidArgument, match="two steps"):
            ckpt.save(3, values(3), step=4)
        ckpt.wait()
        assert {one.tag: one.step for one in ckpt.list()} == {"epoch-7": 7, "final": 9, "handpicked": None}
        found = ckpt.latest()
        assert found is not None and found.tag == "final"


def test_nothing_to_save_and_files_of_one_name_are_refused(root: Path) -> None:
    with relight.Checkpointer(root) as ckpt:
        with pytest.raises(relight.InvalidArgument, match="nothing to save under global_step1"):
            ckpt.save(1)
        with pytest.raises(relight.InvalidArgument, match=r"state\.pt would be saved twice"):
            ckpt.save(1, values(1), files={"state.pt": 1})
        with pytest.raises(relight.InvalidArgument, match=r"train_state\.pt would be saved twice"):
            ckpt.save(1, relight.TrainState(model=model_of(1)), files={"train_state.pt": 1})
        with pytest.raises(relight.InvalidArgument, match="files is a list"):
            ckpt.save(1, files=[1])  # type: ignore[arg-type]
        assert ckpt.list() == []


def test_each_save_logs_one_line_with_bytes_and_speed(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "relight.checkpointer"), relight.Checkpointer(root) as ckpt:
        ckpt.save(4, values(4))
        lines = [record.getMessage() for record in caplog.records if record.name == "relight.checkpointer"]
    assert len(lines) == 1
    assert lines[0].startswith("staged global_step4: ")
    for part in ("KiB in ", " ms (", " GB/s), in memory"):
        assert part in lines[0]


# ---- the moment ----


def test_bl_070_the_file_holds_the_values_at_the_call(root: Path) -> None:
    state = values(1, count=1 << 20)
    with relight.Checkpointer(root) as ckpt:
        handle = ckpt.save(1, state)
        state["weight"].fill_(2)  # at once, while it is being persisted
        handle.result()
        assert torch.equal(ckpt.load(1)["weight"], torch.ones(1 << 20))
    assert torch.equal(torch.load(root / "global_step1" / "state.pt", weights_only=True)["weight"], torch.ones(1 << 20))


class ChangesOnTheWay:
    """Its pickling changes another tensor of the same save, as a thread that trains would."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __reduce__(self) -> Any:
        self.tensor.add_(1)
        return (list, ())


def test_bl_070_a_change_during_the_call_is_torn_and_nothing_is_committed(root: Path) -> None:
    state = values(1)
    with relight.Checkpointer(root) as ckpt:
        with pytest.raises(relight.TornSnapshot, match="weight was changed while it was being copied"):
            ckpt.save(1, files={"a.pt": state, "b.pt": ChangesOnTheWay(state["weight"])})
        assert ckpt.list() == []
        ckpt.save(1, state, blocking=True)
        assert steps(ckpt) == [1]


def test_bl_177_the_callers_state_dict_is_not_changed(root: Path) -> None:
    model = model_of(1)
    state = model.state_dict()
    before, metadata = copy.deepcopy(state), copy.deepcopy(state._metadata)
    with relight.Checkpointer(root) as ckpt:
        ckpt.save(1, state, blocking=True)
        ckpt.load(1)
    assert list(state) == list(before)
    assert state._metadata == metadata
    assert all(torch.equal(state[key], before[key]) for key in state)


# ---- what cannot be pickled ----


def test_what_cannot_be_pickled_is_refused_by_its_key_before_a_byte_is_written(root: Path) -> None:
    with relight.Checkpointer(root) as ckpt:
        with pytest.raises(relight.NotPicklable, match=r"sched\.0"):
            ckpt.save(1, {"ok": torch.ones(1), "sched": [threading.Lock()]})
        assert ckpt.list() == []
    assert not (root / "global_step1").exists()


def test_bl_046_an_optional_part_that_cannot_be_pickled_is_left_out_with_a_warning(root: Path) -> None:
    def collate() -> None: ...

    class Loader:
        position = 3

        def state_dict(self) -> dict[str, Any]:
            return {"position": self.position, "collate": collate}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.position = state["position"]

    with relight.Checkpointer(root) as ckpt:
        with pytest.raises(relight.NotPicklable, match="collate") as caught:
            ckpt.save(1, relight.TrainState(model=model_of(1), loader=Loader()))
        assert "mark it with relight.optional" in caught.value.__notes__[0]
        assert ckpt.list() == []
        state = relight.TrainState(model=model_of(1), loader=relight.optional(Loader()))
        with pytest.warns(relight.PartLeftOutWarning, match=r"loader\.pt of global_step1 is left out: .*collate"):
            ckpt.save(1, state).result()
        model = model_of(0)
        with pytest.warns(relight.ResumeWarning, match="component 'loader' was left out of it and keeps its state"):
            assert ckpt.resume(relight.TrainState(model=model, loader=Loader())) == 1
        assert fill_of(model) == 1
        with pytest.warns(relight.PartLeftOutWarning, match=r"side\.pt"):
            ckpt.save(2, values(2), files={"side.pt": relight.optional(threading.Lock())}).result()
        assert float(ckpt.load(2)["weight"][0]) == 2


# ---- who may save ----


def test_a_closed_checkpointer_is_refused_and_closing_twice_is_fine(root: Path) -> None:
    ckpt = relight.Checkpointer(root)
    ckpt.save(1, values(1))
    ckpt.close()
    ckpt.close()
    for call in (lambda: ckpt.save(2, values(2)), ckpt.list, ckpt.latest, lambda: ckpt.load(1), lambda: ckpt.delete(1)):
        with pytest.raises(relight.EngineClosed, match="this Checkpointer is closed"):
            call()  # type: ignore[no-untyped-call]
    with relight.Checkpointer(root) as again:
        assert steps(again) == [1]


def test_a_checkpointer_does_not_pickle_nor_hide_in_a_state(root: Path) -> None:
    with relight.Checkpointer(root) as ckpt:
        with pytest.raises(relight.NotPicklable, match="belongs to its process"):
            pickle.dumps(ckpt)
        with pytest.raises(relight.NotPicklable):
            ckpt.save(1, {"trainer": ckpt})


def test_two_checkpointers_of_one_root_see_the_same(root: Path) -> None:
    with relight.Checkpointer(root) as one, relight.Checkpointer(root) as two:
        one.save(1, values(1))
        two.save(2, values(2))
        one.wait()
        two.wait()
        assert steps(one) == steps(two) == [1, 2]
        assert float(one.load(2)["weight"][0]) == 2


def test_several_threads_may_save_with_one_checkpointer(root: Path) -> None:
    with relight.Checkpointer(root, torn_check="version") as ckpt:
        errors: list[BaseException] = []

        def work(first: int) -> None:
            try:
                for step in range(first, 40, 4):
                    ckpt.save(step, values(step))
            except BaseException as error:
                errors.append(error)
                raise

        threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        ckpt.wait()
        assert errors == []
        assert steps(ckpt) == list(range(40))
        assert all(float(ckpt.load(step)["weight"][-1]) == step for step in range(40))


def test_urls_and_what_is_no_path_are_refused_and_a_home_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for bad in ("s3://bucket/run", "", None, 3, b"bytes"):
        with pytest.raises(relight.InvalidArgument):
            relight.Checkpointer(bad)  # type: ignore[arg-type]
    monkeypatch.setenv("HOME", str(tmp_path))
    with relight.Checkpointer("~/run") as ckpt:
        assert ckpt.path == str(tmp_path.resolve() / "run")


def test_several_processes_are_refused_with_the_way_out(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(relight.InvalidArgument, match=r"rank 1 of 2 .*a root of its own"):
        relight.Checkpointer(root)
    relight.Checkpointer(root, rank=0, world_size=1).close()
    with pytest.raises(relight.InvalidArgument, match="give both, or neither"):
        relight.Checkpointer(root, rank=0)


def test_bl_166_a_root_that_is_a_link_works(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with relight.Checkpointer(tmp_path / "link") as ckpt:
        ckpt.save(1, values(1), blocking=True)
        assert ckpt.path == str((tmp_path / "real").resolve())
    assert (tmp_path / "link").is_symlink()
    with relight.Checkpointer(tmp_path / "real") as ckpt:
        assert steps(ckpt) == [1]
