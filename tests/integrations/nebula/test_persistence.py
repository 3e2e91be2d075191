"""The persistent tier: NEBULA_API.md section 6; acceptance lines 8 and 26 to 29; BL-060, BL-075.

Guards: a job that ended well lost its last checkpoint; a job that could not write learnt it from nobody.
"""

import json
import os
import shutil
import subprocess
import warnings
from collections.abc import Callable
from pathlib import Path

import nebulaml as nm
import pytest
import torch
from relight import runtime
from relight.exceptions import CheckpointError, SaveFailedWarning

Look = Callable[[Path], set[str]]


@pytest.fixture(autouse=True)
def initialised(root: Path) -> None:
    nm.init(str(root))


def block(root: Path, tag: str) -> Path:
    """Makes every persist of `tag` fail: a file stands where its directory must be."""
    path = root / tag
    path.write_text("in the way")
    return path


def test_nebula_26_after_a_flush_files_manifest_and_complete_txt_are_there(root: Path) -> None:
    checkpoint = nm.Checkpoint("global_step1")
    checkpoint.save("a", 1)
    checkpoint.save("b", torch.ones(1 << 18))
    nm.flush_persistence()
    assert torch.load(root / "global_step1" / "b", weights_only=True).sum() == 1 << 18
    assert (root / "global_step1" / "complete.txt").read_bytes() == b"OK"
    manifest = json.loads((root / "global_step1" / ".relight" / "manifest.json").read_text())
    assert sorted(file["name"] for file in manifest["files"]) == ["a", "b"]


def test_nebula_26_a_persist_error_is_raised_at_the_flush_once(root: Path) -> None:
    block(root, "global_step1")
    nm.Checkpoint("global_step1").save("m", 1)
    with pytest.raises(CheckpointError, match="global_step1"):
        nm.flush_persistence()
    nm.flush_persistence()
    nm.Checkpoint("global_step2").save("m", 2)
    nm.flush_persistence()
    assert nm.get_latest_checkpoint_path("m") == str(root / "global_step2" / "m")


def test_nebula_26_a_flush_of_one_tag_raises_its_errors_and_leaves_the_others(root: Path) -> None:
    block(root, "global_step1")
    nm.Checkpoint("global_step1").save("m", 1)
    step_two = nm.Checkpoint("global_step2")  # ends the first
    runtime.engine().flush()
    with pytest.warns(SaveFailedWarning):
        step_two.save("m", 2)
    nm.flush_persistence("global_step2")
    with pytest.raises(CheckpointError, match="global_step1"):
        nm.flush_persistence("global_step1")


def test_nebula_26_the_next_save_warns_and_does_its_own_work(root: Path) -> None:
    block(root, "global_step1")
    nm.Checkpoint("global_step1").save("m", 1)
    assert nm.Checkpoint("global_step1").commit()
    runtime.engine().flush()
    with pytest.warns(SaveFailedWarning, match="global_step1"):
        nm.Checkpoint("global_step2").save("m", 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nm.Checkpoint("global_step3").save("m", 3)
    with pytest.raises(CheckpointError, match="global_step1"):
        nm.flush_persistence()
    assert nm.get_latest_checkpoint().load("m") == 3
    assert nm.get_checkpoint("global_step1") is None


def test_nebula_26_a_path_that_cannot_be_is_told_by_the_getter_that_waits_for_it(root: Path) -> None:
    nm.Checkpoint("global_step1").save("m", 1)
    nm.flush_persistence()
    block(root, "global_step2")
    nm.Checkpoint("global_step2").save("m", 2)
    with pytest.raises(CheckpointError, match="global_step2"):
        nm.get_latest_checkpoint_path("m")
    assert nm.get_latest_checkpoint_path("m") == str(root / "global_step1" / "m")
    nm.flush_persistence()


def test_nebula_27_ten_commits_in_one_interval_are_all_persisted_in_order(root: Path) -> None:
    nm.init(persistent_time_interval=3600, num_of_version_in_retention=3)
    for step in range(1, 11):
        nm.Checkpoint(f"global_step{step}", 1).save("m", torch.full((1000,), step))
    nm.flush_persistence()
    sequences = []
    for step in range(1, 11):
        manifest = json.loads((root / f"global_step{step}" / ".relight" / "manifest.json").read_text())
        sequences.append((manifest["committed_at"], manifest["sequence"]))
        assert torch.load(root / f"global_step{step}" / "m", weights_only=True).eq(step).all()
    assert sequences == sorted(sequences)
    in_memory = [entry["tag"] for entry in nm.list_checkpoints() if "memory" in entry["tiers"]]
    assert in_memory == ["global_step8", "global_step9", "global_step10"]


def test_nebula_27_without_a_path_the_oldest_goes(tmp_path: Path, start) -> None:
    out, _ = start.run(
        """
        import nebulaml as nm
        nm.init(num_of_version_in_retention=3)
        for step in range(1, 11):
            nm.Checkpoint(f"global_step{step}", 1).save("m", step)
        print([entry["tag"] for entry in nm.list_checkpoints()])
        print([nm.get_checkpoint(f"global_step{step}").load("m") for step in (8, 9, 10)])
        """
    )
    assert out.splitlines() == ["['global_step8', 'global_step9', 'global_step10']", "[8, 9, 10]"]


def test_nebula_27_without_a_path_a_checkpoint_that_memory_cannot_hold_is_refused(start) -> None:
    out, _ = start.run(
        """
        import os
        os.environ["NEBULA_MEMORY_BUFFER_SIZE"] = str(8 << 20)
        os.environ["RELIGHT_RETRY_DELAY_S"] = "0"
        import torch, nebulaml as nm
        from relight.exceptions import StorageFull
        nm.init()
        nm.Checkpoint("global_step1", 1).save("m", 1)
        try:
            nm.Checkpoint("global_step2", 1).save("m", torch.zeros(4 << 20))
        except OSError as error:
            print(type(error) is StorageFull, error)
        print(nm.get_latest_checkpoint().tag)
        """
    )
    first, last = out.splitlines()
    assert first.startswith("True") and "path" in first
    assert last == "global_step1"


def test_nebula_28_a_normal_exit_without_a_flush_persists_all(start, root: Path, committed: Look) -> None:
    start.run(
        """
        import sys, torch, nebulaml as nm
        nm.init(sys.argv[1])
        for step in range(1, 6):
            nm.Checkpoint(f"global_step{step}").save("m", torch.full((1 << 20,), step))
        """,
        root,
    )
    assert committed(root) == {f"global_step{step}" for step in range(1, 6)}
    assert torch.load(root / "global_step5" / "m", weights_only=True).eq(5).all()


def test_nebula_28_after_sigkill_the_next_process_loads_and_persists_what_was_complete(start, root: Path) -> None:
    client = start(
        """
        import sys, torch, nebulaml as nm
        nm.init(sys.argv[1])
        nm.Checkpoint("global_step1").save("m", torch.full((1000,), 1))
        nm.flush_persistence()
        blocked = open(sys.argv[1] + "/global_step2", "w")  # nothing persists while a file is in its place
        nm.Checkpoint("global_step2").save("m", torch.full((1000,), 2))
        nm.Checkpoint("global_step3", -2).save("m", 3)
        print("staged")
        input()
        """,
        root,
    )
    client.wait_for("staged")
    client.kill()
    (root / "global_step2").unlink()
    found = nm.get_latest_checkpoint()
    assert found.tag == "global_step2"
    assert found.load("m").eq(2).all()
    path = nm.get_latest_checkpoint_path("m")
    assert path == str(root / "global_step2" / "m")
    assert torch.load(path, weights_only=True).eq(2).all()
    assert nm.get_checkpoint("global_step3") is None


def test_nebula_28_without_a_path_the_next_process_of_the_job_finds_it_in_memory(start) -> None:
    client = start(
        """
        import nebulaml as nm
        nm.init()
        nm.Checkpoint("global_step5", 1).save("m", 5)
        print("staged")
        input()
        """
    )
    client.wait_for("staged")
    client.kill()
    out, _ = start.run("import nebulaml as nm; nm.init(); print(nm.get_latest_checkpoint().load('m'))")
    assert out.strip() == "5"
    out, _ = start.run("import nebulaml as nm; nm.init(); print(nm.get_latest_checkpoint())")
    assert out.strip() == "None"  # that process ended well: nothing of it is left in shared memory
    assert os.listdir(os.environ["RELIGHT_MEMORY_DIR"]) == []


def test_nebula_28_shutdown_does_what_an_exit_does(root: Path, committed: Look) -> None:
    nm.Checkpoint("global_step1").save("m", 1)
    nm._shutdown()
    assert committed(root) == {"global_step1"}
    nm.Checkpoint("global_step2").save("m", 2)  # and the process may go on
    nm.flush_persistence()
    assert committed(root) == {"global_step1", "global_step2"}


def namespace_with_mounts() -> tuple[str, ...]:
    """A prefix that lets a client mount file systems of its own, seen by nobody else."""
    prefix = ("unshare", "--user", "--map-root-user", "--mount")
    if shutil.which("unshare") is None or subprocess.run([*prefix, "true"], check=False).returncode != 0:
        pytest.skip("this system gives no user namespaces")
    return prefix


@pytest.mark.parametrize("option", ["size=1m", "ro"])
def test_nebula_29_a_full_or_read_only_root_raises_from_neither_save_nor_commit(start, root: Path, option: str) -> None:
    client = start(
        """
        import os, subprocess, sys, warnings
        root, option = sys.argv[1:]
        subprocess.run(["mount", "-t", "tmpfs", "-o", option, "none", root], check=True)
        import torch, nebulaml as nm
        from relight.exceptions import StorageDenied, StorageFull
        nm.init(root)
        checkpoint = nm.Checkpoint("global_step1", -2)
        checkpoint.save("m", torch.zeros(1 << 20))
        assert checkpoint.commit() is True
        try:
            nm.flush_persistence()
        except (StorageDenied if option == "ro" else StorageFull) as error:
            print("told:", error.tag, error)
        nm.flush_persistence()
        assert nm.get_checkpoint("global_step1") is None  # what could not be committed is not shown
        """,
        root,
        option,
        prefix=namespace_with_mounts(),
    )
    out, _ = client.end()
    assert out.startswith("told: global_step1 ")


def test_nebula_08_complete_txt_is_exactly_ok_and_never_without_a_manifest(start, root: Path) -> None:
    """Kills at many moments of a save loop; each look must find every complete.txt beside a manifest that is whole."""
    script = """
        import sys, torch, nebulaml as nm
        nm.init(sys.argv[1])
        print("go")
        for round_ in range(1000):
            nm.Checkpoint(f"global_step{round_ % 7}", 2).save("a", torch.full((30_000,), round_))
            nm.Checkpoint(f"global_step{round_ % 7}", 2).save("b", round_)
            print("saved")
        """
    for kill_after in range(1, 13):
        client = start(script, root)
        client.wait_for("go")
        for _ in range(kill_after):
            client.wait_for("saved")
        client.kill()
        for complete in root.glob("*/complete.txt"):
            assert complete.read_bytes() == b"OK"
            manifest = json.loads((complete.parent / ".relight" / "manifest.json").read_text())
            assert sorted(file["name"] for file in manifest["files"]) == ["a", "b"]
    for entry in nm.list_checkpoints():
        found = nm.get_checkpoint(entry["tag"])
        assert found.load("a").eq(found.load("b")).all()


@pytest.mark.parametrize("way", ["return", "sys.exit(0)", "sys.exit(3)", "raise ValueError", "os._exit(0)"])
def test_bl_060_a_save_and_a_way_out(start, root: Path, committed: Look, way: str) -> None:
    """What was committed by the client is complete whichever way it leaves; `os._exit` leaves it to the drain."""
    client = start(
        f"""
        import os, sys, torch, nebulaml as nm
        def main():
            nm.init(sys.argv[1])
            checkpoint = nm.Checkpoint("global_step1", -2)
            checkpoint.save("m", torch.full((1 << 20,), 1))
            checkpoint.commit()
            {way}
        main()
        """,
        root,
    )
    client.end(code={"sys.exit(3)": 3, "raise ValueError": 1}.get(way, 0))
    if way != "os._exit(0)":
        assert committed(root) == {"global_step1"}
    assert nm.get_latest_checkpoint().load("m").eq(1).all()
    nm.flush_persistence()


def test_bl_075_a_failed_save_at_the_end_of_a_script_is_said_on_stderr(start, root: Path) -> None:
    block(root, "global_step1")
    script = """
        import sys, nebulaml as nm
        nm.init(sys.argv[1])
        nm.Checkpoint("global_step1").save("m", 1)
        {end}
        """
    _, err = start.run(script.format(end=""), root)
    assert "global_step1 was NOT saved" in err
    # The documented way to an exit code: end with a flush.
    _, err = start.run(script.format(end="nm.flush_persistence()"), root, code=1)
    assert "global_step1" in err
