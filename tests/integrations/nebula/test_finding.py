"""Finding checkpoints: NEBULA_API.md section 5; acceptance lines 20 to 25 and 30; BL-095, BL-097, BL-102.

Guards: a restart that was shown nothing, or the wrong checkpoint, trained from there without a word.
"""

import json
import shutil
from pathlib import Path

import nebulaml as nm
import pytest
import torch
from relight.exceptions import CheckpointNotFound, InvalidArgument


@pytest.fixture(autouse=True)
def initialised(root: Path) -> None:
    nm.init(str(root))


def save(tag: str, value: object = 1, name: str = "m") -> None:
    nm.Checkpoint(tag).save(name, value)


def test_nebula_20_getters_give_none_for_unknown_and_incomplete() -> None:
    assert nm.get_checkpoint(tag="global_step1") is None
    assert nm.get_latest_checkpoint() is None
    assert nm.get_latest_checkpoint_path("m") is None
    assert nm.list_checkpoints() == []
    nm.Checkpoint("global_step1", -2).save("m", 1)
    nm.Checkpoint("global_step2", 2).save("m", 1)
    for tag in ("global_step1", "global_step2", "", None, "nowhere", "../x"):
        assert nm.get_checkpoint(tag) is None
    assert nm.get_latest_checkpoint() is None
    assert nm.get_latest_checkpoint_path("m") is None


def test_nebula_20_an_absent_root_is_a_miss_and_is_not_made(tmp_path: Path) -> None:
    absent = tmp_path / "absent"
    assert nm.get_checkpoint(tag="global_step1", persist_path=absent) is None
    assert nm.get_latest_checkpoint(persist_path=str(absent)) is None
    assert nm.list_checkpoints(absent) == []
    assert not absent.exists()


def test_nebula_20_a_root_that_is_no_directory_raises(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for look in (
        nm.get_latest_checkpoint,
        nm.list_checkpoints,
        lambda persist_path: nm.get_checkpoint("t", persist_path),
    ):
        with pytest.raises(InvalidArgument, match="not a directory"):
            look(persist_path=tmp_path / "file")


def test_nebula_20_a_root_that_refuses_this_user_raises(start, memory_dir: Path, root: Path) -> None:
    """Guards: None for "cannot look" made the job start from nothing."""
    out, _ = start.run(
        """
        import os, sys
        import nebulaml as nm
        import torch
        from relight.exceptions import StorageUnavailable
        os.chmod(sys.argv[1], 0)
        if os.getuid() == 0:  # whom no mode keeps out
            os.chmod(os.environ["RELIGHT_MEMORY_DIR"], 0o777)
            os.setuid(65534)
        try:
            nm.get_latest_checkpoint(persist_path=sys.argv[1])
        except StorageUnavailable as error:
            print("raised", error)
        """,
        root,
    )
    root.chmod(0o700)
    assert out.startswith("raised cannot") and str(root) in out


def test_nebula_21_persist_path_finds_what_is_only_in_memory_under_that_root_and_nothing_of_another(
    root: Path, tmp_path: Path
) -> None:
    link = tmp_path / "link"
    link.symlink_to(root)
    save("global_step1")
    for path in (root, str(root), f"{root}/", root / ".." / "root", link, f"file://{root}"):
        assert nm.get_checkpoint(tag="global_step1", persist_path=path).load("m") == 1
    other = tmp_path / "other"
    other.mkdir()
    assert nm.get_checkpoint(tag="global_step1", persist_path=other) is None
    assert nm.get_latest_checkpoint(persist_path=other) is None


def test_nebula_21_another_runs_root_is_found_by_a_process_that_called_only_init(start, root: Path) -> None:
    save("global_step7", torch.ones(3))
    nm.flush_persistence()
    start.run(
        """
        import sys, nebulaml as nm
        nm.init()
        found = nm.get_checkpoint("global_step7", persist_path=sys.argv[1])
        assert found.load("m").sum() == 3
        assert nm.get_latest_checkpoint(persist_path=sys.argv[1]).tag == "global_step7"
        assert nm.get_latest_checkpoint() is None
        """,
        root,
    )


def test_nebula_23_latest_is_the_last_completed_also_after_a_step_back(start, root: Path) -> None:
    """The run went to 30, was resumed from 10 and is now at 20."""
    for step in (10, 20, 30):
        save(f"global_step{step}", ("first", step))
    assert nm.get_latest_checkpoint().tag == "global_step30"
    assert nm.get_checkpoint("global_step10").load("m") == ("first", 10)
    save("global_step20", ("second", 20))
    assert nm.get_latest_checkpoint().load("m") == ("second", 20)
    nm.flush_persistence()
    out, _ = start.run("import sys, nebulaml as nm; nm.init(sys.argv[1]); print(nm.get_latest_checkpoint().tag)", root)
    assert out.strip() == "global_step20"


def test_nebula_23_a_restarted_process_outranks_the_higher_steps_it_went_behind(start, root: Path) -> None:
    script = """
        import sys, nebulaml as nm
        nm.init(sys.argv[1])
        for step in sys.argv[2:]:
            nm.Checkpoint(f"global_step{step}").save("m", step)
        """
    start.run(script, root, 10, 20)
    start.run(script, root, 15)
    assert nm.get_latest_checkpoint().tag == "global_step15"


def test_nebula_24_get_latest_checkpoint_path_right_after_a_save_gives_a_complete_file(root: Path) -> None:
    for step in (1, 2, 3):
        save(f"global_step{step}", torch.full((300_000,), step))
        path = nm.get_latest_checkpoint_path("m", str(root))
        assert path == str(root / f"global_step{step}" / "m")
        assert torch.load(path, weights_only=True).eq(step).all()


def test_nebula_24_it_is_the_newest_that_has_the_file(root: Path) -> None:
    save("global_step1", 1, "checkpoint")
    save("global_step2", 2, "other")
    assert nm.get_latest_checkpoint_path("checkpoint") == str(root / "global_step1" / "checkpoint")
    assert nm.get_latest_checkpoint_path("nowhere") is None


def test_nebula_25_list_checkpoints_can_be_dumped_and_ends_with_the_latest(root: Path) -> None:
    save("global_step2")
    nm.flush_persistence()
    save("best")
    save("global_step10")
    nm.Checkpoint("global_step11", -2).save("m", 1)
    entries = json.loads(json.dumps(nm.list_checkpoints(), sort_keys=True))
    assert [entry["tag"] for entry in entries] == ["best", "global_step2", "global_step10"]
    assert entries[-1]["tag"] == nm.get_latest_checkpoint().tag
    nm.flush_persistence()
    (_, entry, _) = nm.list_checkpoints()
    size = (root / "global_step2" / "m").stat().st_size
    committed_at = entry.pop("committed_at")
    assert committed_at is not None and committed_at.startswith("20") and committed_at.endswith("Z")
    tiers = entry.pop("tiers")
    assert "persistent" in tiers
    assert entry == {
        "tag": "global_step2",
        "step": 2,
        "path": str(root / "global_step2"),
        "files": [{"name": "m", "size": size}],
        "size": size,
        "best": False,
        "foreign": False,
    }


def left_by_nebula(root: Path, tag: str, text: str = "OK") -> None:
    (root / tag).mkdir()
    torch.save({"w": torch.ones(2)}, root / tag / "mp_rank_00_model_states.pt")
    (root / tag / "complete.txt").write_text(text)


def test_nebula_30_a_directory_left_by_nebula_loads_and_is_older_than_all_others(root: Path) -> None:
    left_by_nebula(root, "global_step900")
    found = nm.get_latest_checkpoint()
    assert found.tag == "global_step900"
    assert found.load("mp_rank_00_model_states.pt", map_location="cpu")["w"].sum() == 2
    assert nm.list_checkpoints()[0]["foreign"] is True
    assert nm.get_latest_checkpoint_path("mp_rank_00_model_states.pt") is not None
    save("global_step1")
    assert nm.get_latest_checkpoint().tag == "global_step1"
    assert [entry["tag"] for entry in nm.list_checkpoints()] == ["global_step900", "global_step1"]


def test_nebula_30_placeholders_and_directories_that_nebula_did_not_complete_are_a_miss(root: Path) -> None:
    (root / "global_step1").mkdir()
    torch.save("", root / "global_step1" / "mp_rank_00_model_states.pt")  # as DeepSpeed does
    left_by_nebula(root, "global_step2", text="")
    (root / "global_step3" / "complete.txt").mkdir(parents=True)
    (root / "logs").mkdir()
    (root / "latest").write_text("global_step1")
    (root / "metrics.json").write_text("{}")
    for tag in ("global_step1", "global_step2", "global_step3", "logs", "latest"):
        assert nm.get_checkpoint(tag) is None
    assert nm.get_latest_checkpoint() is None
    assert nm.list_checkpoints() == []


def test_nebula_30_foreign_files_in_a_tag_survive(root: Path) -> None:
    (root / "global_step1" / "offloaded_tensors").mkdir(parents=True)
    (root / "global_step1" / "offloaded_tensors" / "t").write_bytes(b"mine")
    torch.save("", root / "global_step1" / "m")  # a placeholder at the file's own name: replaced
    save("global_step1", 5)
    nm.flush_persistence()
    assert torch.load(root / "global_step1" / "m", weights_only=True) == 5
    assert (root / "global_step1" / "offloaded_tensors" / "t").read_bytes() == b"mine"
    assert [file["name"] for file in nm.list_checkpoints()[0]["files"]] == ["m"]


def test_bl_095_latest_and_order_are_by_number_not_by_text() -> None:
    steps = [99, 10000, 9, 1000, 10, 2500, 100, 500]
    for step in steps:
        save(f"global_step{step}", step)
    assert nm.get_latest_checkpoint().load("m") == 10000
    assert [entry["step"] for entry in nm.list_checkpoints()] == sorted(steps)
    nm.flush_persistence()
    assert [entry["step"] for entry in nm.list_checkpoints()] == sorted(steps)


@pytest.mark.parametrize("damage", ["no manifest", "a file missing", "a file of no bytes", "an empty directory"])
def test_bl_097_a_damaged_newest_checkpoint_is_passed_over(start, root: Path, damage: str) -> None:
    """Run in a process that has neither in memory."""
    for step in (200, 300):
        save(f"global_step{step}", step)
    nm.flush_persistence()
    bad = root / "global_step300"
    if damage == "no manifest":
        (bad / ".relight" / "manifest.json").unlink()
        (bad / "complete.txt").unlink()
    elif damage == "a file missing":
        (bad / "m").unlink()
    elif damage == "a file of no bytes":
        (bad / "m").write_bytes(b"")
    else:
        shutil.rmtree(bad)
        bad.mkdir()
    out, _ = start.run(
        """
        import sys, warnings, nebulaml as nm
        from relight.exceptions import CheckpointError, ResumeWarning
        nm.init(sys.argv[1])
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            found = nm.get_latest_checkpoint()
            assert nm.get_latest_checkpoint().tag == found.tag
        print("warned", [str(w.message).split()[0] for w in told if w.category is ResumeWarning])
        try:
            value = found.load("m")
        except CheckpointError as error:
            assert "global_step300" in str(error) and "m" in str(error), error
            found = nm.get_latest_checkpoint()
            value = found.load("m")
        print(found.tag, value)
        try:
            nm.Checkpoint("global_step300").load("m")
        except CheckpointError as error:
            print("refused", "global_step300" in str(error))
        """,
        root,
    )
    assert out.splitlines()[1:] == ["global_step200 200", "refused True"]
    if damage != "an empty directory":  # which is nobody's checkpoint
        assert out.splitlines()[0] == "warned ['global_step300']"


def test_bl_102_a_checkpoint_loaded_by_name_is_never_another_one(start, root: Path) -> None:
    for step in (1, 2):
        save(f"global_step{step}", {"w": torch.full((100,), step), "step": step})
    nm.flush_persistence()
    (root / "latest").unlink(missing_ok=True)
    script = """
        import sys, torch, nebulaml as nm
        nm.init(sys.argv[1])
        for options in ({}, {"weights_only": True}, {"map_location": "cpu"}, {"map_location": lambda s, l: s}):
            for handle in (nm.get_checkpoint(tag="global_step1"), nm.Checkpoint("global_step1")):
                loaded = handle.load("m", **options)
                assert loaded["step"] == 1 and loaded["w"].eq(1).all()
        assert nm.get_checkpoint("global_step1").load("m", map_location="meta")["step"] == 1
        assert nm.get_latest_checkpoint().load("m")["step"] == 2
        """
    start.run(script, root)
    nm.get_checkpoint("global_step1")
    with pytest.raises(CheckpointNotFound):
        nm.Checkpoint("global_step3").load("m")
