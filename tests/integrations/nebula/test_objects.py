"""What is saved and what comes back: NEBULA_API.md 4.2, 4.3 and 7; acceptance lines 5 to 9.

Guards: a client that steps right after `save` found the stepped weights in its checkpoint.
"""

import random
import shutil
from pathlib import Path

import nebulaml as nm
import numpy as np
import pytest
import torch
from relight.exceptions import CheckpointNotFound, InvalidArgument


@pytest.fixture(autouse=True)
def initialised(root: Path) -> None:
    nm.init(str(root))


def test_nebula_05_changing_an_object_after_save_changes_nothing_saved() -> None:
    weights, array, words = torch.zeros(1000), np.zeros(10), ["a"]
    checkpoint = nm.Checkpoint("global_step1")
    checkpoint.save("all", {"w": weights, "n": array, "l": words})
    weights.fill_(7)
    array.fill(7)
    words.append("b")
    loaded = nm.get_latest_checkpoint().load("all")
    assert loaded["w"].eq(0).all() and (loaded["n"] == 0).all() and loaded["l"] == ["a"]
    nm.flush_persistence()
    loaded = nm.get_latest_checkpoint().load("all")
    assert loaded["w"].eq(0).all() and (loaded["n"] == 0).all() and loaded["l"] == ["a"]


def test_nebula_05_modules_ties_numpy_and_random_state_come_back_equal(root: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    model(torch.randn(4, 3))
    tied = torch.nn.Linear(4, 4, bias=False)
    pair = {"embed.weight": tied.weight, "head.weight": tied.weight}
    states = (random.getstate(), np.random.get_state(), torch.get_rng_state())
    checkpoint = nm.Checkpoint("global_step1")
    checkpoint.save("module", model)
    checkpoint.save("tied", pair)
    checkpoint.save("rng", states)
    checkpoint.save("optimizer", torch.optim.Adam(model.parameters()).state_dict())
    drawn = (random.random(), np.random.rand(), torch.rand(1))
    found = nm.get_latest_checkpoint()
    module = found.load("module")
    assert torch.equal(module[0].weight, model[0].weight)
    assert torch.equal(module[1].running_mean, model[1].running_mean)
    tied_loaded = found.load("tied")
    assert tied_loaded["embed.weight"].data_ptr() == tied_loaded["head.weight"].data_ptr()
    python_state, numpy_state, torch_state = found.load("rng")
    random.setstate(python_state)
    np.random.set_state(numpy_state)
    torch.set_rng_state(torch_state)
    assert (random.random(), np.random.rand(), torch.rand(1)) == drawn


def test_nebula_06_load_honours_string_device_and_callable_map_location() -> None:
    nm.Checkpoint("global_step1").save("w", torch.arange(5.0))
    found = nm.get_latest_checkpoint()
    seen: list[str] = []

    def keep(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
        seen.append(location)
        return storage

    for map_location in (None, "cpu", torch.device("cpu"), keep, {"cpu": "cpu"}):
        assert torch.equal(found.load("w", map_location=map_location), torch.arange(5.0))
    assert seen == ["cpu"]
    assert found.load("w", map_location="meta").device.type == "meta"
    assert torch.equal(found.load("w", "cpu"), torch.arange(5.0))


def test_nebula_06_load_unpickles_any_object_unless_weights_only_is_asked() -> None:
    nm.Checkpoint("global_step1").save("module", torch.nn.Linear(2, 2))
    found = nm.get_latest_checkpoint()
    assert isinstance(found.load("module"), torch.nn.Linear)
    with pytest.raises(PermissionError):
        found.load("module", weights_only=True)


def test_nebula_07_each_file_opens_with_plain_torch_load_also_after_moving_the_tree(
    root: Path, tmp_path: Path, start
) -> None:
    checkpoint = nm.Checkpoint("global_step1", 2)
    checkpoint.save("mp_rank_00_model_states.pt", {"module": {"w": torch.arange(6.0)}})
    checkpoint.save("no_extension", [1, 2, 3])
    nm.flush_persistence()
    moved = tmp_path / "moved"
    shutil.copytree(root, moved)
    for place in (root, moved):
        start.run(
            """
            import sys
            sys.modules["relight"] = None
            import torch
            model = torch.load(sys.argv[1] + "/global_step1/mp_rank_00_model_states.pt", weights_only=True)
            assert model["module"]["w"].sum() == 15
            assert torch.load(sys.argv[1] + "/global_step1/no_extension", weights_only=True) == [1, 2, 3]
            """,
            place,
        )
    assert str(root) not in "".join(p.read_text() for p in moved.rglob("*.json"))
    assert nm.get_latest_checkpoint(persist_path=moved).load("no_extension") == [1, 2, 3]


NAMES = [
    "model\n  part   0\n",
    "a b  c",
    "x/y",
    "..",
    "100%",
    "%2F",
    "n" * 300,
    "é" * 200,
    "complete.txt",
    ".relight",
    "manifest.json",
    "latest",
    "\x00\x1f",
    "a\\b",
    "CON",
    "model.pt",
]


def test_nebula_09_any_file_name_round_trips(root: Path, tmp_path: Path) -> None:
    checkpoint = nm.Checkpoint("global_step1")
    for number, name in enumerate(NAMES):
        checkpoint.save(name, number)
    nm.flush_persistence()
    found = nm.get_latest_checkpoint()
    assert [found.load(name) for name in NAMES] == list(range(len(NAMES)))
    assert sorted(file["name"] for file in nm.list_checkpoints()[0]["files"]) == sorted(NAMES)
    for number, name in enumerate(NAMES):
        path = Path(nm.get_latest_checkpoint_path(name))
        assert path.parent == root / "global_step1"
        assert torch.load(path, weights_only=True) == number
    assert (root / "global_step1" / "complete.txt").read_bytes() == b"OK"


@pytest.mark.parametrize("name", ["", 3, None, b"x"])
def test_nebula_09_what_is_no_file_name_is_refused(name: object) -> None:
    with pytest.raises(InvalidArgument):
        nm.Checkpoint("global_step1").save(name, 1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "tag", ["", ".", "..", "a/b", "/abs", "../x", "a\\b", "a\nb", "a\0b", "val/loss=0.1", "x" * 300]
)
def test_bl_159_nebula_09_bad_tags_are_refused_and_nothing_is_written_outside_the_root(
    tag: str, root: Path, tmp_path: Path
) -> None:
    with pytest.raises(InvalidArgument):
        nm.Checkpoint(tag)
    assert nm.get_checkpoint(tag) is None  # what cannot be saved cannot be there
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cwd", "root"]


@pytest.mark.parametrize("tag", ["checkpoint", "pytorch_model", "epoch=3-val_loss=0.1", "global_step5", 500, "é 1"])
def test_bl_159_any_other_tag_reads_back_as_it_was_given(tag: object, root: Path) -> None:
    nm.Checkpoint(tag).save("m", 1)
    assert nm.Checkpoint(tag).tag == str(tag)
    assert nm.get_checkpoint(tag).tag == str(tag)
    assert [entry["tag"] for entry in nm.list_checkpoints()] == [str(tag)]


def test_a_missing_file_is_named_with_those_there_are() -> None:
    nm.Checkpoint("global_step1").save("model", 1)
    found = nm.get_latest_checkpoint()
    with pytest.raises(CheckpointNotFound, match="has no file 'optimizer'; its files: 'model'"):
        found.load("optimizer")
    with pytest.raises(CheckpointNotFound, match=r"no complete checkpoint global_step9 .*global_step1"):
        nm.Checkpoint("global_step9").load("model")


def test_a_file_with_bad_bytes_is_refused_and_its_checkpoint_skipped_from_then_on(start, root: Path) -> None:
    """The memory copy is served where there is one; a process that has none meets the file."""
    for step in (1, 2):
        nm.Checkpoint(f"global_step{step}").save("w", torch.full((10_000,), step))
    nm.flush_persistence()
    path = root / "global_step2" / "w"
    data = bytearray(path.read_bytes())
    data[20_000] ^= 1
    path.write_bytes(data)
    out, _ = start.run(
        """
        import sys, nebulaml as nm
        from relight.exceptions import CorruptCheckpoint
        nm.init(sys.argv[1])
        found = nm.get_latest_checkpoint()
        try:
            found.load("w")
        except CorruptCheckpoint as error:
            print(error)
        print(nm.get_latest_checkpoint().tag, nm.get_checkpoint("global_step2"))
        nm.Checkpoint("global_step2").save("w", 3)
        print(nm.get_latest_checkpoint().load("w"))
        """,
        root,
    )
    lines = out.splitlines()
    assert "global_step2" in lines[0] and "w" in lines[0]
    assert lines[-2:] == ["global_step1 None", "3"]


def test_a_truncated_file_is_served_from_memory(root: Path) -> None:
    """Where the root equals DeepSpeed's save_dir it truncates the committed file of a reused tag to its placeholder."""
    handle = nm.Checkpoint("global_step1")
    handle.save("w", torch.arange(1000))
    nm.flush_persistence()
    torch.save("", root / "global_step1" / "w")
    assert torch.equal(handle.load("w"), torch.arange(1000))
