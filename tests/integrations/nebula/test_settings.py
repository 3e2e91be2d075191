"""Import names and settings: NEBULA_API.md section 3; acceptance lines 1 to 4; BL-112."""

import json
import warnings
from pathlib import Path

import nebulaml as nm
import pytest
import relight.nebula
import torch
import torch_nebula as tn
from relight import runtime
from relight.exceptions import InvalidArgument
from relight.nebula import settings


def test_nebula_01_both_import_names_are_the_same_objects(root: Path) -> None:
    for name in relight.nebula.__all__:
        if name not in ("CheckpointSummary", "FileSummary"):
            assert getattr(nm, name) is getattr(tn, name) is getattr(relight.nebula, name)
    nm.init(str(root))
    tn.Checkpoint("global_step1").save("model", {"w": 1})
    found = nm.get_latest_checkpoint()
    assert found is not None
    assert found.load("model") == {"w": 1}


def test_nebula_01_names_import_neither_lightning_nor_deepspeed_nor_torch(start) -> None:
    out, _ = start.run("""
        import sys, nebulaml, torch_nebula, relight.nebula
        assert nebulaml.__version__ == torch_nebula.__version__ == relight.nebula.__version__
        print([m for m in ("torch", "lightning", "pytorch_lightning", "deepspeed") if m in sys.modules])
    """)
    assert out.strip() == "[]"


@pytest.mark.parametrize("name", ["NebulaCallback", "NebulaCheckpointIO", "NebulaDeepspeedStrategy"])
def test_nebula_01_lightning_names_exist_and_name_what_is_missing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = getattr(nm, name)
    monkeypatch.setattr("relight.nebula.lightning.find_spec", lambda package: None)
    with pytest.raises(ModuleNotFoundError, match="Lightning, which is not installed"):
        made()
    monkeypatch.setattr("relight.nebula.lightning.find_spec", lambda package: object())
    with pytest.raises(NotImplementedError, match=r"not built yet.*;"):
        made(dirpath="x")


def test_nebula_02_init_may_be_repeated_and_none_changes_nothing(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    nm.init(str(a), 5, 3)
    tn.init()
    assert settings.current().path.value == str(a)
    assert settings.current().interval_s.value == 5
    assert settings.current().retention.value == 3
    old = nm.Checkpoint("global_step1")
    nm.init(persistent_storage_path=b)
    old.save("m", 1)
    nm.Checkpoint("global_step2").save("m", 2)
    nm.flush_persistence()
    assert (a / "global_step1" / "m").is_file()
    assert (b / "global_step2" / "m").is_file()


def test_nebula_02_variables_fill_in_and_arguments_beat_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEBULA_PERSISTENT_STORAGE_PATH", str(tmp_path / "variable"))
    monkeypatch.setenv("NEBULA_PERSISTENT_TIME_INTERVAL", "7.5")
    nm.init()
    assert settings.current().path.value == str(tmp_path / "variable")
    assert settings.current().interval_s.value == 7.5
    monkeypatch.setenv("NEBULA_PERSISTENT_STORAGE_PATH", str(tmp_path / "changed"))
    nm.init()  # read at each call
    assert settings.current().path.value == str(tmp_path / "changed")
    nm.init(str(tmp_path / "argument"))
    nm.init()
    assert settings.current().path.value == str(tmp_path / "argument")


def test_nebula_02_with_nothing_set_the_memory_tier_saves_and_loads() -> None:
    nm.init()
    nm.Checkpoint("global_step1").save("model", {"w": torch.arange(4)})
    found = nm.get_latest_checkpoint()
    assert found is not None and found.tag == "global_step1"
    assert torch.equal(found.load("model")["w"], torch.arange(4))
    nm.flush_persistence()  # without a path it returns at once
    assert nm.get_latest_checkpoint_path("model") is None
    assert [entry["tiers"] for entry in nm.list_checkpoints()] == [["memory"]]


def test_nebula_02_a_save_or_a_getter_without_init_calls_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEBULA_PERSISTENT_STORAGE_PATH", str(tmp_path / "variable"))
    assert nm.get_latest_checkpoint() is None
    nm.Checkpoint("global_step1").save("m", 1)
    nm.flush_persistence()
    assert (tmp_path / "variable" / "global_step1" / "complete.txt").read_bytes() == b"OK"


def test_nebula_03_the_stray_comma_works_with_a_warning(root: Path) -> None:
    with pytest.warns(UserWarning, match="stray comma"):
        nm.init((str(root),), persistent_time_interval=2)
    assert settings.current().path.value == str(root)
    with pytest.raises(InvalidArgument, match="one path"):
        nm.init((str(root), "other"))


@pytest.mark.parametrize("path", ["", "  ", 3, b"x\0y", "s3://bucket/run", True, object()])
def test_nebula_03_a_bad_path_fails_in_init(path: object) -> None:
    with pytest.raises(InvalidArgument):
        nm.init(path)  # type: ignore[arg-type]
    assert settings.current().path.value is None


def test_nebula_03_a_path_that_cannot_be_a_directory_fails_in_init(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(InvalidArgument, match="a file is in its way"):
        nm.init(tmp_path / "file" / "root")
    with pytest.raises(InvalidArgument, match="a file is in its way"):
        nm.init(tmp_path / "file")


def test_nebula_03_paths_become_absolute_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nm.init("relative/root")
    expected = Path.cwd() / "relative/root"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    nm.Checkpoint("global_step1").save("m", 1)
    nm.flush_persistence()
    assert (expected / "global_step1" / "m").is_file()
    nm.init(f"file://{tmp_path}/with%20space")
    assert (tmp_path / "with space").is_dir()


@pytest.mark.parametrize("interval", [-1, "-0.5", "soon", float("nan"), float("inf"), True, [1]])
def test_nebula_03_a_bad_interval_fails_in_init(interval: object) -> None:
    with pytest.raises(InvalidArgument, match="persistent_time_interval"):
        nm.init(persistent_time_interval=interval)  # type: ignore[arg-type]


def test_nebula_03_bad_values_change_nothing(root: Path) -> None:
    with pytest.raises(InvalidArgument):
        nm.init(str(root), -1)
    assert not root.exists()
    assert settings.current().path.value is None


def test_nebula_03_numeric_strings_are_taken(root: Path) -> None:
    nm.init(str(root), "100", "4")
    assert settings.current().interval_s.value == 100
    assert settings.current().retention.value == 4


def test_nebula_03_init_before_init_process_group_works(start, root: Path) -> None:
    start.run(
        """
        import sys, torch, torch.distributed as dist, nebulaml as nm
        nm.init(sys.argv[1])
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        nm.Checkpoint("global_step1", -2).save("m", torch.ones(2))
        assert nm.Checkpoint("global_step1", -2).commit()
        assert nm.get_latest_checkpoint().tag == "global_step1"
        dist.destroy_process_group()
        """,
        root,
    )
    assert (root / "global_step1" / "complete.txt").read_bytes() == b"OK"


def test_several_processes_are_refused_with_the_way_out(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nm.init(str(root))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InvalidArgument, match=r"rank 1 of 2 .*rank=0, world_size=1"):
        nm.Checkpoint("global_step1")
    assert nm.get_latest_checkpoint() is None  # reading is no part of a save


def test_nebula_04_the_node_stays_within_the_memory_budget_and_a_larger_checkpoint_is_saved(start, root: Path) -> None:
    out, _ = start.run(
        """
        import json, os, sys
        os.environ["NEBULA_MEMORY_BUFFER_SIZE"] = str(16 << 20)
        import torch, nebulaml as nm
        from relight import runtime
        nm.init(sys.argv[1])
        for step in range(1, 9):
            nm.Checkpoint(f"global_step{step}").save("small", torch.full((1 << 20,), step))
        nm.Checkpoint("global_step9").save("large", torch.full((12 << 20,), 9, dtype=torch.int32))
        nm.flush_persistence()
        print(runtime.engine().memory())
        """,
        root,
    )
    memory = json.loads(out)
    assert memory["peak_bytes"] <= memory["capacity_bytes"] <= 16 << 20
    for step in range(1, 9):
        assert torch.equal(
            torch.load(root / f"global_step{step}" / "small", weights_only=True), torch.full((1 << 20,), step)
        )
    assert torch.load(root / "global_step9" / "large", weights_only=True).eq(9).all()


def test_nebula_04_a_budget_that_is_no_number_fails_in_init(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEBULA_MEMORY_BUFFER_SIZE", "2GB")
    with pytest.raises(InvalidArgument, match="NEBULA_MEMORY_BUFFER_SIZE is '2GB'; give a number of bytes"):
        nm.init()


@pytest.mark.parametrize("retention", [-1, 0, "-3", 1.5, "two", False])
def test_bl_112_a_retention_without_a_meaning_is_refused(retention: object) -> None:
    with pytest.raises(InvalidArgument, match="num_of_version_in_retention"):
        nm.init(num_of_version_in_retention=retention)  # type: ignore[arg-type]


@pytest.mark.parametrize("retention", [None, 1, 2**31, 10**400])
def test_bl_112_no_retention_ever_deletes_from_the_persistent_tier(root: Path, retention: int | None) -> None:
    nm.init(str(root), num_of_version_in_retention=retention)
    for step in range(1, 6):
        nm.Checkpoint(f"global_step{step}").save("m", step)
    nm.flush_persistence()
    assert [entry["tag"] for entry in nm.list_checkpoints()] == [f"global_step{step}" for step in range(1, 6)]
    assert [nm.get_checkpoint(f"global_step{step}").load("m") for step in range(1, 6)] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("count", [0, -3, "2", 1.0, True])
def test_bl_112_a_number_of_files_without_a_meaning_is_refused(root: Path, count: object) -> None:
    nm.init(str(root))
    with pytest.raises(InvalidArgument, match="num_of_files"):
        nm.Checkpoint("global_step1", count)  # type: ignore[arg-type]


def test_settings_warn_of_nothing_in_ordinary_use(root: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nm.init(str(root), 100, 2)
        nm.Checkpoint("global_step1").save("m", 1)
        nm.flush_persistence()
    assert runtime.started()
