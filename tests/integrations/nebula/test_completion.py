"""When a tag is complete: NEBULA_API.md section 4; acceptance lines 10 to 19.

Guards: half a checkpoint was shown as the latest just before the restart that read it.
"""

import json
import logging
from collections.abc import Callable
from pathlib import Path

import nebulaml as nm
import pytest
import torch
import torch_nebula as tn
from relight import runtime
from relight.exceptions import CheckpointError, NotPicklable

Look = Callable[[Path], list[str]]


def step() -> None:
    """One optimizer step."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.ones(1)
    torch.optim.SGD([parameter], lr=0.1).step()


def generation(root: Path) -> object:
    """The generation of the only tag, seen past the getters, which would seal."""
    (entry,) = json.loads(runtime.engine().open_root(str(root)).list())
    return entry["generation"], entry["sequence"]


@pytest.fixture(autouse=True)
def initialised(root: Path) -> None:
    nm.init(str(root))


def test_nebula_10_minus_two_is_a_miss_until_commit(root: Path) -> None:
    checkpoint = nm.Checkpoint("global_step1", -2)
    checkpoint.save("model", 1)
    step()
    nm.Checkpoint("global_step2", -2)
    nm.flush_persistence()
    assert nm.get_checkpoint(tag="global_step1") is None
    assert nm.get_latest_checkpoint() is None
    assert checkpoint.commit() is True
    assert nm.get_checkpoint(tag="global_step1").tag == "global_step1"


def test_nebula_10_an_early_commit_of_no_file_completes_nothing(root: Path) -> None:
    checkpoint = nm.Checkpoint("global_step1", -2)
    assert checkpoint.commit() is True
    assert nm.get_checkpoint("global_step1") is None
    checkpoint.save("model", 1)
    assert nm.get_checkpoint("global_step1") is None
    assert checkpoint.commit() is True
    assert nm.get_checkpoint("global_step1").load("model") == 1


def test_nebula_10_minus_two_is_not_published_by_a_clean_exit(start, root: Path, committed: Look) -> None:
    _, err = start.run(
        """
        import sys, nebulaml as nm
        nm.init(sys.argv[1])
        nm.Checkpoint("global_step1", -2).save("a", 1)
        """,
        root,
    )
    assert "commit()" in err
    assert committed(root) == set()
    assert nm.get_checkpoint("global_step1") is None


def test_nebula_11_n_completes_at_the_nth_distinct_file_not_before(root: Path, visible: Look) -> None:
    checkpoint = nm.Checkpoint("global_step1", 2)
    checkpoint.save("a", 1)
    checkpoint.save("a", 2)  # one name twice: the last wins, and it counts once
    step()
    nm.flush_persistence()
    assert nm.Checkpoint("global_step1", 2).commit() is True
    assert nm.get_checkpoint("global_step1") is None
    checkpoint.save("b", 3)
    assert visible(root) == ["global_step1"]  # with no further sign
    found = nm.get_checkpoint("global_step1")
    assert (found.load("a"), found.load("b")) == (2, 3)


def test_nebula_11_n_is_not_published_by_a_clean_exit_with_fewer_files(start, root: Path, committed: Look) -> None:
    _, err = start.run(
        """
        import sys, nebulaml as nm
        nm.init(sys.argv[1])
        nm.Checkpoint("global_step1", 2).save("a", 1)
        nm.Checkpoint("global_step2", 1).save("a", 2)
        """,
        root,
    )
    assert "1 of its 2 files" in err
    assert committed(root) == {"global_step2"}


def test_nebula_11_a_second_round_of_n_shows_the_first_whole_until_it_is_complete(root: Path) -> None:
    for round_ in (1, 2):
        checkpoint = nm.Checkpoint("checkpoint", 2)
        checkpoint.save("a", round_)
        checkpoint.save("b", round_)
        found = nm.get_checkpoint("checkpoint")
        assert (found.load("a"), found.load("b")) == (round_, round_)
    before = generation(root)
    nm.Checkpoint("checkpoint", 2).save("a", 3)
    assert generation(root) == before
    nm.Checkpoint("checkpoint", 2).save("b", 3)
    found = nm.get_checkpoint("checkpoint")
    assert (found.load("a"), found.load("b")) == (3, 3)


def test_nebula_11_a_file_that_is_new_to_a_complete_tag_joins_it_at_once(root: Path, visible: Look) -> None:
    checkpoint = nm.Checkpoint("global_step1", 1)
    checkpoint.save("a", 1)
    checkpoint.save("b", 2)
    assert visible(root) == ["global_step1"]
    nm.flush_persistence()
    assert [file["name"] for file in nm.list_checkpoints()[0]["files"]] == ["a", "b"]


def test_nebula_12_one_save_is_visible_after_an_optimizer_step(root: Path, visible: Look) -> None:
    nm.Checkpoint("global_step1").save("m", 1)
    assert visible(root) == []
    step()
    assert visible(root) == ["global_step1"]


def test_nebula_12_one_save_is_visible_after_a_flush(root: Path, committed: Look) -> None:
    nm.Checkpoint("global_step1").save("m", 1)
    nm.Checkpoint("global_step2").save("m", 2)
    nm.flush_persistence("global_step2")
    assert committed(root) == {
        "global_step1",
        "global_step2",
    }  # the second was opened without a step: it ended the first


def test_nebula_12_a_flush_of_one_tag_seals_that_tag_alone(root: Path, visible: Look) -> None:
    step()
    nm.Checkpoint("global_step1").save("m", 1)
    nm.Checkpoint("global_step2").save("m", 2)
    nm.flush_persistence("global_step2")
    assert visible(root) == ["global_step2"]


def test_nebula_12_one_save_is_visible_to_a_getter_of_one_process(root: Path) -> None:
    nm.Checkpoint("global_step1").save("m", 1)
    assert nm.get_latest_checkpoint().tag == "global_step1"


def test_nebula_12_one_save_is_visible_after_another_tag_without_steps(root: Path, visible: Look) -> None:
    nm.Checkpoint("global_step1").save("m", 1)
    nm.Checkpoint("global_step2")
    assert visible(root) == ["global_step1"]


def test_nebula_12_saves_by_turns_through_two_handles_end_neither(root: Path, visible: Look) -> None:
    """Guards: saving through a handle was taken for beginning its tag, and published the other one half."""
    first, second = nm.Checkpoint("first"), nm.Checkpoint("second")
    for name in ("a", "b"):
        first.save(name, 1)
        second.save(name, 1)
    assert visible(root) == []
    nm.flush_persistence()
    assert sorted(visible(root)) == ["first", "second"]


def test_nebula_12_another_tag_does_not_end_a_save_once_the_process_steps(root: Path, visible: Look) -> None:
    step()
    best, last = nm.Checkpoint("best"), nm.Checkpoint("last")
    best.save("a", 1)
    last.save("a", 1)
    best.save("b", 2)
    assert visible(root) == []
    step()
    assert sorted(visible(root)) == ["best", "last"]


def test_nebula_12_one_save_is_visible_after_a_clean_exit(start, root: Path, committed: Look) -> None:
    start.run("import sys, nebulaml as nm; nm.init(sys.argv[1]); nm.Checkpoint('global_step1').save('m', 1)", root)
    assert committed(root) == {"global_step1"}


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_nebula_12_one_save_is_visible_after_the_clean_exit_of_a_multiprocessing_child(
    start, root: Path, committed: Look, method: str
) -> None:
    """`atexit` does not run in such a child."""
    start.run(
        """
        import multiprocessing, sys, warnings
        import nebulaml as nm

        def train(root):
            nm.init(root)
            nm.Checkpoint("global_step1").save("m", 1)

        def fail(root):
            nm.init(root)
            nm.Checkpoint("global_step2").save("m", 1)
            sys.stderr.close()
            raise ValueError

        if __name__ == "__main__":
            warnings.simplefilter("ignore", DeprecationWarning)  # fork beside the threads of torch
            nm.init(sys.argv[1])
            context = multiprocessing.get_context(sys.argv[2])
            for target, code in ((train, 0), (fail, 1)):
                child = context.Process(target=target, args=(sys.argv[1],))
                child.start()
                child.join()
                assert child.exitcode == code, child.exitcode
        """,
        root,
        method,
    )
    assert committed(root) == {"global_step1"}


def test_nebula_14_an_unhandled_exception_leaves_the_previous_one_the_latest(start, root: Path) -> None:
    _, err = start.run(
        """
        import sys, nebulaml as nm
        nm.init(sys.argv[1])
        nm.Checkpoint("global_step1").save("a", 1)
        half = nm.Checkpoint("global_step2")
        half.save("a", 2)
        raise RuntimeError("the second file was never saved")
        """,
        root,
        code=1,
    )
    assert err.count("global_step2 is not published: an exception ended the program") == 1
    assert [entry["tag"] for entry in nm.list_checkpoints()] == ["global_step1"]


def test_nebula_14_an_exception_that_was_caught_does_not_keep_a_tag_from_completing(start, root: Path) -> None:
    start.run(
        """
        import sys, nebulaml as nm
        nm.init(sys.argv[1])
        nm.Checkpoint("global_step1").save("a", 1)
        try:
            raise RuntimeError
        except RuntimeError:
            pass
        sys.exit(0)
        """,
        root,
    )
    assert nm.get_latest_checkpoint().tag == "global_step1"


def test_nebula_14_a_failed_save_leaves_the_previous_one_the_latest(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nm.Checkpoint("global_step1").save("a", 1)
    half = nm.Checkpoint("global_step2")
    half.save("a", 2)
    with pytest.raises(NotPicklable):
        half.save("b", lambda: None)
    for _ in range(3):
        step()
    with caplog.at_level(logging.WARNING):
        nm.flush_persistence()
    assert nm.get_latest_checkpoint().tag == "global_step1"
    assert nm.get_checkpoint("global_step2") is None
    half.save("b", 3)  # saved again: now it is whole
    assert nm.get_latest_checkpoint().tag == "global_step2"


def test_nebula_15_the_microsoft_trainers_sequence(root: Path) -> None:
    """On one rank: asks for the tag, skips it if it is there, else saves several files without a commit."""

    def save(iteration: int) -> bool:
        tag = f"global_step{iteration}"
        if tn.get_checkpoint(tag=tag) is not None:
            return False
        checkpoint = tn.Checkpoint(tag)
        checkpoint.save("model\n  part  0", {"w": torch.ones(2) * iteration})
        checkpoint.save("rng_state 0", {"torch": torch.get_rng_state()})
        return True

    def load() -> int:
        for look in (
            lambda: tn.get_checkpoint(persist_path=str(root), tag="global_step20"),
            lambda: tn.get_latest_checkpoint(persist_path=str(root)),
            lambda: tn.get_latest_checkpoint(),
        ):
            checkpoint = look()
            if checkpoint is not None:
                assert checkpoint.load("model\n  part  0")["w"][0] == int(checkpoint.tag.split("global_step")[1])
                return int(checkpoint.tag.split("global_step")[1])
        return 0

    assert load() == 0
    assert save(10)
    step()
    assert not save(10)
    assert save(20)
    step()
    assert not save(20)
    assert load() == 20


def test_nebula_16_fresh_objects_for_a_tag_act_as_one(root: Path) -> None:
    """As earlier revisions of DeepSpeed's engine: a new object for each file and one more to commit."""
    nm.Checkpoint("global_step1", -2).save("a", 1)
    tn.Checkpoint("global_step1", -2).save("b", 2)
    assert nm.get_checkpoint("global_step1") is None
    assert tn.Checkpoint("global_step1", -2).load("a") == 1  # a handle may read its own files before
    assert tn.Checkpoint("global_step1", -2).commit()
    assert [file["name"] for file in nm.list_checkpoints()[0]["files"]] == ["a", "b"]


def test_nebula_17_two_rounds_of_minus_two_leave_the_union_the_newer_of_equal_names(root: Path) -> None:
    first = nm.Checkpoint("global_step1", -2)
    first.save("a", 1)
    first.save("b", 1)
    assert first.commit()
    second = nm.Checkpoint("global_step1", -2)
    second.save("b", 2)
    second.save("c", 2)
    with pytest.warns(UserWarning, match=r"global_step1 was saved before: what was in 'b' is gone"):
        assert second.commit()
    nm.flush_persistence()
    found = nm.get_checkpoint("global_step1")
    assert [found.load(name) for name in "abc"] == [1, 2, 2]
    assert [torch.load(root / "global_step1" / name, weights_only=False) for name in "abc"] == [1, 2, 2]
    second.save("c", 3)
    assert second.commit()  # warned once


def test_nebula_17_what_another_process_left_is_replaced_with_the_warning_too(start, root: Path) -> None:
    start.run("import sys, nebulaml as nm; nm.init(sys.argv[1]); nm.Checkpoint('t').save('a', 1)", root)
    nm.Checkpoint("t", -2).save("a", 2)
    with pytest.warns(UserWarning, match="'a' is gone"):
        assert nm.Checkpoint("t", -2).commit()
    assert nm.get_checkpoint("t").load("a") == 2


def test_nebula_18_a_crash_in_the_second_round_leaves_the_first_whole(start, root: Path) -> None:
    client = start(
        """
        import sys, nebulaml as nm
        nm.init(sys.argv[1])
        for name in "ab":
            nm.Checkpoint("global_step1", -2).save(name, 1)
        nm.Checkpoint("global_step1", -2).commit()
        nm.flush_persistence()
        nm.Checkpoint("global_step1", -2).save("a", 2)
        print("staged"); input()
        """,
        root,
    )
    client.wait_for("staged")
    client.kill()
    found = nm.get_checkpoint("global_step1")
    assert [found.load(name) for name in "ab"] == [1, 1]
    assert [torch.load(root / "global_step1" / name, weights_only=False) for name in "ab"] == [1, 1]


def test_nebula_19_commit_is_true_before_the_disk_and_false_after_a_failed_save(root: Path) -> None:
    checkpoint = nm.Checkpoint("global_step1", -2)
    checkpoint.save("a", 1)
    with pytest.raises(NotPicklable):
        checkpoint.save("b", lambda: None)
    assert checkpoint.commit() is False
    checkpoint.save("b", 2)
    assert checkpoint.commit() is True


def test_nebula_19_commit_raises_no_disk_error(root: Path) -> None:
    (root / "global_step1").write_text("a file in the way of the tag's directory")
    checkpoint = nm.Checkpoint("global_step1", -2)
    checkpoint.save("a", 1)
    assert checkpoint.commit() is True
    with pytest.raises(CheckpointError):
        nm.flush_persistence()


def test_checkpoint_without_a_tag_counts_up_from_the_largest_complete_step(root: Path) -> None:
    nm.Checkpoint("global_step7").save("m", 7)
    first = nm.Checkpoint()
    first.save("m", 8)
    second = nm.Checkpoint()
    assert (first.tag, second.tag) == ("global_step8", "global_step9")
    assert nm.Checkpoint(tag=None, num_of_files=-1).tag == "global_step10"


def test_handles_with_different_counts_take_the_stricter_one(root: Path, visible: Look) -> None:
    nm.Checkpoint("global_step1", 1)
    nm.Checkpoint("global_step1").save("a", 1)
    nm.Checkpoint("global_step1", -2).save("b", 1)
    nm.flush_persistence()
    assert visible(root) == []
    assert nm.Checkpoint("global_step1").commit()
    assert visible(root) == ["global_step1"]


def test_a_failed_tag_gives_its_memory_back_once_a_newer_one_is_complete(root: Path) -> None:
    """Guards: a client that goes on after each failed save filled the memory tier with files of no use to anybody."""
    failed = nm.Checkpoint("global_step1", -2)
    failed.save("a", torch.zeros(1 << 18))
    with pytest.raises(NotPicklable):
        failed.save("b", lambda: None)
    assert failed.commit() is False
    nm.Checkpoint("global_step2", 1).save("a", 2)
    nm.flush_persistence()
    assert json.loads(runtime.engine().memory())["used_bytes"] < 1 << 20
    failed.save("b", 1)  # a late repetition of the failed file alone must not complete half of the tag
    assert failed.commit() is False
    assert nm.get_checkpoint("global_step1") is None
    failed.save("a", 1)
    assert failed.commit() is True
    found = nm.get_checkpoint("global_step1")
    assert (found.load("a"), found.load("b")) == (1, 1)


def test_nebula_12_a_save_through_a_handle_of_a_getter_is_visible_after_a_clean_exit(start, root: Path) -> None:
    start.run("import sys, nebulaml as nm; nm.init(sys.argv[1]); nm.Checkpoint('t').save('a', 1)", root)
    start.run("import sys, nebulaml as nm; nm.init(sys.argv[1]); nm.get_checkpoint('t').save('b', 2)", root)
    assert [file["name"] for file in nm.list_checkpoints()[0]["files"]] == ["a", "b"]
