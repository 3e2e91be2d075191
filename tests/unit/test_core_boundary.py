"""The door between Python and the engine: errors, buffers, forks, signals, panics, exit.

Each test names what it guards. What the engine itself does is tested in Rust and by the tests of its users.
"""

from __future__ import annotations

import array
import errno
import gc
import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from relight import _core, exceptions

SMALL: list[tuple[str, Any]] = [("data.pkl", b"pickle"), ("data/0", [b"0123456789" * 7]), ("version", b"3\n")]


@pytest.fixture
def engine() -> Iterator[_core.Engine]:
    engine = _core.Engine(memory_bytes_max=64 << 20, lock_timeout_s=60.0, retry_delay_s=0.01)
    yield engine
    engine.close(10.0)


def stage(root: _core.Root, tag: str, entries: Any = SMALL) -> _core.Ticket:
    share = root.begin(tag)
    share.stage("model.pt", entries, stem="model")
    return share.seal()


def index_of(image: _core.Image, name: str) -> int:
    return [entry.name for entry in image.entries].index(name)


def run(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs `code` in an interpreter of its own. Python warns of forks beside threads; that is what is tested."""
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


# ---- bytes -----------------------------------------------------------------------------------------------------------


def test_what_is_staged_is_read_back_from_memory_and_from_disk(engine: _core.Engine, tmp_path: Path) -> None:
    root = engine.open_root(str(tmp_path))
    big = os.urandom(3 << 20)
    floats = array.array("d", [1.0, -2.5])
    entries = [("data.pkl", b"p"), ("data/0", [memoryview(big)[: 1 << 20], memoryview(big)[1 << 20 :], floats, b""])]
    share = root.begin("global_step5")
    report = share.stage("model.pt", entries, stem="model")
    assert share.files == ["model.pt"]
    expected = big + floats.tobytes()
    assert report.bytes > len(expected) and not report.streamed
    ticket = share.seal()
    assert ticket.wait(30.0)
    ticket.check()
    for tier in ("memory", "persistent"):
        image = root.open_image("global_step5", "model.pt", tier=tier)
        index = index_of(image, "data/0")
        assert (image.tier, image.stem, image.verify()) == (tier, "model", [])
        assert (image.length, image.crc32) == (report.bytes, report.crc32)
        assert image.read(index) == expected
        target = bytearray(len(expected))
        image.read_into([(index, 0, memoryview(target)[:1000]), (index, 1000, memoryview(target)[1000:])])
        assert target == expected
        assert image.entries[index].crc32 == _core.crc32(expected)


def test_targets_may_hold_items_of_any_type(engine: _core.Engine, tmp_path: Path) -> None:
    numbers = array.array("f", range(100))
    _core.save_file(str(tmp_path / "x.pt"), [("data.pkl", b"p"), ("data/0", [numbers])], stem="x")
    image = _core.open_image(str(tmp_path / "x.pt"))
    assert image.crc32 is None
    target = array.array("f", bytes(400))
    image.read_into([(index_of(image, "data/0"), 0, target)])
    assert target == numbers


# ---- buffers that cannot be used -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ([memoryview(b"0123456789")[::2]], "not contiguous"),
        (["text"], "not a buffer"),
        ([1], "not a buffer"),
        (17, "give bytes, or a sequence of buffers"),
    ],
)
def test_a_piece_that_is_no_contiguous_buffer_is_refused(tmp_path: Path, content: Any, says: str) -> None:
    with pytest.raises(exceptions.InvalidArgument, match=says) as caught:
        _core.save_file(str(tmp_path / "x.pt"), [("data.pkl", b"p"), ("data/0", content)], stem="x")
    assert "data/0" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_target_that_cannot_be_filled_is_refused(tmp_path: Path) -> None:
    _core.save_file(str(tmp_path / "x.pt"), SMALL, stem="x")
    image = _core.open_image(str(tmp_path / "x.pt"))
    index = index_of(image, "data/0")
    for target, says in [
        (bytes(70), "read-only"),
        (memoryview(bytearray(140))[::2], "not contiguous"),
        (None, "not a buffer"),
    ]:
        with pytest.raises(exceptions.InvalidArgument, match=says):
            image.read_into([(index, 0, target)])  # type: ignore[list-item]
    with pytest.raises(exceptions.InvalidArgument):
        image.read_into([(index, 0, bytearray(71))])
    with pytest.raises(exceptions.InvalidArgument):
        image.read(99)


def test_a_buffer_is_free_again_after_the_call(tmp_path: Path) -> None:
    """Guards: an export that stays makes `bytearray.append` raise BufferError for ever."""
    data = bytearray(100)
    _core.save_file(str(tmp_path / "x.pt"), [("data.pkl", b"p"), ("data/0", [data])], stem="x")
    with pytest.raises(exceptions.CheckpointError):
        _core.save_file(str(tmp_path / "no" / "x.pt"), [("data.pkl", b"p"), ("data/0", [data])], stem="x")
    data.append(1)


@pytest.mark.parametrize("seconds", [-1.0, float("nan")])
def test_a_time_limit_that_is_no_time_is_refused(engine: _core.Engine, seconds: float) -> None:
    with pytest.raises(exceptions.InvalidArgument, match="timeout_s"):
        engine.flush(seconds)
    assert engine.flush(float("inf"))


# ---- errors ----------------------------------------------------------------------------------------------------------


def test_an_error_of_the_system_keeps_number_path_and_cause(tmp_path: Path) -> None:
    with pytest.raises(exceptions.CheckpointNotFound) as caught:
        _core.open_image(str(tmp_path / "missing.pt"))
    error = caught.value
    assert isinstance(error, FileNotFoundError)
    assert (error.kind, error.errno, error.path) == ("not_found", errno.ENOENT, str(tmp_path / "missing.pt"))
    assert isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.ENOENT


def test_a_tag_that_cannot_be_used_is_refused_with_its_name(engine: _core.Engine, tmp_path: Path) -> None:
    root = engine.open_root(str(tmp_path))
    for tag in ("", "..", "a/b", "new\nline"):
        with pytest.raises(exceptions.InvalidArgument):
            root.begin(tag)
        with pytest.raises(exceptions.InvalidArgument):
            _core.check_tag(tag)
    with pytest.raises(exceptions.InvalidArgument, match="meta"):
        root.begin("good", meta="{")
    with pytest.raises(exceptions.InvalidArgument, match="tier"):
        root.open_image("good", "f", tier="cloud")


def test_a_file_cut_short_is_corrupt_and_named(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    _core.save_file(str(path), SMALL, stem="x")
    os.truncate(path, path.stat().st_size - 30)
    with pytest.raises(exceptions.CorruptCheckpoint) as caught:
        _core.open_image(str(path))
    assert caught.value.path == str(path)


def test_storage_that_is_full_says_so(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(exceptions.StorageFull) as caught:
            _core.save_file(str(tmp_path / "x.pt"), [("data.pkl", b"p"), ("data/0", [bytes(1 << 20)])], stem="x")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.errno == errno.EFBIG and caught.value.retryable
    assert list(tmp_path.iterdir()) == []


def test_a_closed_engine_refuses_and_closing_again_is_nothing(engine: _core.Engine, tmp_path: Path) -> None:
    root = engine.open_root(str(tmp_path))
    share = root.begin("t")
    assert engine.close(10.0) and engine.close(10.0)
    with pytest.raises(exceptions.EngineClosed):
        share.stage("f", SMALL, stem="x")


def test_a_failed_persist_raises_a_new_exception_each_time(tmp_path: Path) -> None:
    engine = _core.Engine(memory_bytes_max=64 << 20, attempts_max=1)
    root = engine.open_root(str(tmp_path / "root"))
    share = root.begin("t")
    share.stage("f", SMALL, stem="x")
    (tmp_path / "root" / "t").write_text("a file where the tag's directory should be")
    ticket = share.seal()
    assert ticket.wait(30.0)
    assert json.loads(ticket.progress())["state"] == "failed"
    errors = []
    for _ in range(2):
        with pytest.raises(exceptions.CheckpointError) as caught:
            ticket.check()
        errors.append(caught.value)
    assert errors[0] is not errors[1] and str(errors[0]) == str(errors[1])
    engine.close(0.0)
    for region in json.loads(_core.regions()):
        if region["pid"] == os.getpid() or not region["alive"]:
            for checkpoint in region["checkpoints"]:
                if checkpoint["root"] == str(tmp_path / "root"):
                    _core.remove_region(region["path"])


def test_a_panic_becomes_engine_closed_and_the_engine_goes_on(engine: _core.Engine, tmp_path: Path) -> None:
    with pytest.raises(exceptions.EngineClosed, match=r"bug in relight.*boom"):
        _core._panic("boom")
    ticket = stage(engine.open_root(str(tmp_path)), "t")
    assert ticket.wait(30.0)
    ticket.check()


# ---- events, waits, signals ------------------------------------------------------------------------------------------


def test_events_tell_of_each_ticket_and_end_with_closed(engine: _core.Engine, tmp_path: Path) -> None:
    tickets = [stage(engine.open_root(str(tmp_path)), f"global_step{i}") for i in range(3)]
    engine.close(30.0)
    events = []
    while (event := json.loads(engine.next_event(10.0) or "null"))["event"] != "closed":
        events.append(event)
    ended = [(event["id"], event["state"]) for event in events if event["event"] == "ticket"]
    assert ended == [(ticket.id, "committed") for ticket in tickets]
    assert json.loads(engine.next_event(0.0) or "null") == {"event": "closed"}


def locked_tag(root: Path, tag: str) -> subprocess.Popen[bytes]:
    """Another process that holds the lock of a tag, so that its persist waits."""
    code = """
    import fcntl, os, sys
    os.makedirs(os.path.dirname(sys.argv[1]), exist_ok=True)
    file = open(sys.argv[1], "a")
    fcntl.flock(file, fcntl.LOCK_EX)
    fcntl.lockf(file, fcntl.LOCK_EX)
    print("held", flush=True)
    sys.stdin.read()
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(root / tag / ".relight" / "lock")]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"held\n"
    return process


@pytest.fixture
def stuck(engine: _core.Engine, tmp_path: Path) -> Iterator[tuple[_core.Ticket, _core.Root]]:
    root = engine.open_root(str(tmp_path))
    holder = locked_tag(tmp_path, "t")
    ticket = stage(root, "t")
    yield ticket, root
    holder.communicate()
    assert ticket.wait(60.0)
    ticket.check()


def test_a_wait_reaches_its_limit_and_frees_the_interpreter(stuck: tuple[_core.Ticket, _core.Root]) -> None:
    """Guards: a wait with the GIL held stops all of training."""
    ticket, _ = stuck
    turns = 0
    done = threading.Event()

    def count() -> None:
        nonlocal turns
        while not done.is_set():
            turns += 1
            time.sleep(0)

    counter = threading.Thread(target=count)
    counter.start()
    assert not ticket.wait(0.3)
    done.set()
    counter.join()
    assert turns > 10


def test_ctrl_c_ends_a_wait_and_the_persist_goes_on(stuck: tuple[_core.Ticket, _core.Root]) -> None:
    ticket, _ = stuck
    signal_it = threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGINT])
    signal_it.start()
    with pytest.raises(KeyboardInterrupt):
        ticket.wait(50.0)
    signal_it.join()
    assert json.loads(ticket.progress())["state"] in ("queued", "persisting")


def test_what_a_signal_handler_raises_comes_out_of_the_wait(stuck: tuple[_core.Ticket, _core.Root]) -> None:
    class Stop(Exception):
        pass

    def handler(number: int, frame: object) -> None:
        raise Stop

    before = signal.signal(signal.SIGUSR1, handler)
    signal_it = threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGUSR1])
    try:
        signal_it.start()
        with pytest.raises(Stop):
            stuck[0].wait(50.0)
    finally:
        signal_it.join()
        signal.signal(signal.SIGUSR1, before)


# ---- forks and exit --------------------------------------------------------------------------------------------------

FORK = """
    import gc, json, os, sys, threading
    from relight import _core, exceptions

    engine = _core.Engine(memory_bytes_max=64 << 20)
    root = engine.open_root(sys.argv[1])
    entries = [("data.pkl", b"p"), ("data/0", [bytes(1 << 20)])]
    share = root.begin("t")
    share.stage("f", entries, stem="f")
    ticket = share.seal()
    assert ticket.wait(30.0)
    image = root.open_image("t", "f", tier="memory")
    on_disk = root.open_image("t", "f", tier="persistent")
    waiting = threading.Thread(target=engine.next_event, args=(60.0,))
    engine.next_event(5.0)
    waiting.start()  # a thread of the parent is inside the engine at the fork
"""


def test_a_forked_child_is_refused_at_once_and_harms_nothing(tmp_path: Path) -> None:
    """Guards: a DataLoader worker that hangs on a lock of its parent's engine, or frees what its parent staged."""
    code = (
        FORK
        + """
    pid = os.fork()
    if pid == 0:
        calls = [
            lambda: engine.open_root(sys.argv[1]), engine.memory, engine.drain, lambda: engine.flush(1.0), engine.close,
            lambda: engine.next_event(0.1), lambda: engine.stage_file("x", entries, stem="x"), root.list, root.latest,
            lambda: root.begin("u"), lambda: root.open_image("t", "f"), share.seal, share.abandon, ticket.progress,
            lambda: ticket.wait(1.0), ticket.check, lambda: image.read(0), image.verify,
        ]
        for call in calls:
            try:
                call()
            except exceptions.EngineClosed as error:
                assert "forked" in str(error) and "spawn" in str(error), error
            else:
                os._exit(1)
        # What reads a file by its path, or had it open, takes nothing of the parent's.
        assert on_disk.read(1) == bytes(1 << 20)
        assert _core.open_image(on_disk.path).verify() == []
        del engine, root, share, ticket, image, on_disk, calls, call
        gc.collect()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert image.verify() == [] and json.loads(engine.memory())["checkpoints"]
    again = root.begin("u")
    again.stage("f", entries, stem="f")
    assert again.seal().wait(30.0)
    assert engine.close(10.0)
    waiting.join()
    """
    )
    result = run(code, tmp_path)
    assert result.returncode == 0, result.stderr


def test_a_forked_child_that_outlives_its_parent_does_not_keep_the_memory_tier(tmp_path: Path) -> None:
    """Guards: the region of a killed trainer stayed locked for as long as one of its DataLoader workers lived."""
    memory = tmp_path / "memory"
    memory.mkdir()
    code = """
    import os, signal, sys
    from relight import _core
    engine = _core.Engine(memory_bytes_max=64 << 20, memory_dir=sys.argv[2])
    root = engine.open_root(sys.argv[1])
    share = root.begin("t")
    share.stage("f", [("data.pkl", b"p")], stem="f")
    assert share.seal().wait(30.0)
    ready, done = os.pipe()
    if os.fork() == 0:
        os.write(done, b"x")
        os.read(0, 1)  # lives until the test closes the pipe
        os._exit(0)
    os.read(ready, 1)
    print("ready", flush=True)
    signal.pause()
    """
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code), str(tmp_path / "root"), str(memory)]
    trainer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert trainer.stdout is not None and trainer.stdin is not None
    assert trainer.stdout.readline() == b"ready\n"
    [region] = json.loads(_core.regions(str(memory)))
    assert region["alive"] and region["pid"] == trainer.pid
    with pytest.raises(exceptions.CheckpointError):
        _core.remove_region(region["path"])
    trainer.kill()
    trainer.wait()
    [region] = json.loads(_core.regions(str(memory)))
    assert not region["alive"]
    _core.remove_region(region["path"])
    assert json.loads(_core.regions(str(memory))) == []
    trainer.stdin.close()
    trainer.stdout.read()  # the worker is gone
    trainer.stdout.close()


def test_an_interpreter_that_ends_without_close_does_not_hang(tmp_path: Path) -> None:
    code = (
        FORK.replace("waiting = threading.Thread(", "waiting = threading.Thread(daemon=True, ")
        + """
    holder = root.begin("u")
    holder.stage("f", entries, stem="f")
    sys.exit(7)
    """
    )
    assert run(code, tmp_path).returncode == 7
    for region in json.loads(_core.regions()):
        if not region["alive"]:
            _core.remove_region(region["path"])


def test_objects_may_outlive_each_other_in_any_order(tmp_path: Path) -> None:
    engine = _core.Engine(memory_bytes_max=64 << 20)
    root = engine.open_root(str(tmp_path))
    ticket = stage(root, "t")
    assert ticket.wait(30.0)
    image = root.open_image("t", "model.pt", tier="memory")
    engine.close(10.0)
    del engine, root, ticket
    gc.collect()
    assert image.read(index_of(image, "data/0")) == b"0123456789" * 7


# ---- the stub --------------------------------------------------------------------------------------------------------


def test_the_stub_is_true() -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "mypy.stubtest", "relight._core"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=root)
    assert result.returncode == 0, result.stdout
