"""Handles: the manners of a future, errors that are never lost, callbacks that run once and outside every lock."""

from __future__ import annotations

import json
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from relight import runtime
from relight.exceptions import CheckpointError, InvalidArgument, NotPicklable, StorageUnavailable, WaitTimeout
from relight.handle import Handle, wait_all


class Ticket:
    """A persist that ends when the test says so."""

    def __init__(self, number: int) -> None:
        self.id = number
        self.tag = f"global_step{number}"
        self.ended = threading.Event()
        self.failure: str | None = None

    def wait(self, timeout_s: float | None = None) -> bool:
        return self.ended.wait(timeout_s)

    def check(self) -> None:
        if self.failure is not None:
            raise StorageUnavailable(self.failure, tag=self.tag)

    def progress(self) -> str:
        state = "persisting" if not self.ended.is_set() else "failed" if self.failure else "committed"
        done = 30 if state == "persisting" else 120
        return json.dumps(
            {"state": state, "bytes_total": 120, "bytes_persisted": done, "attempts": 2, "seconds": 0.5,
             "queued_seconds": 0.1, "of_a_later_version": 1}
        )  # fmt: skip

    def end(self, failure: str | None = None) -> None:
        self.failure = failure
        self.ended.set()


class Report:
    bytes = 120
    streamed = False
    memory = "shared"


numbers = iter(range(10**6, 10**7))  # apart from those of a real engine in this process


def make(**more: Any) -> tuple[Ticket, Handle]:
    ticket = Ticket(next(numbers))
    arguments: dict[str, Any] = {
        "path": f"/ckpt/{ticket.tag}", "tag": ticket.tag, "files": ["a.pt"], "reports": [Report()], "stall_s": 0.25,
    }  # fmt: skip
    return ticket, Handle(ticket, **(arguments | more))  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    yield
    for handle in (*runtime._state.pending.values(), *runtime._state.failed.values()):
        if isinstance(handle._ticket, Ticket):
            handle._ticket.ended.set()
            handle.settle()
            runtime.told(handle)


def test_a_handle_is_staged_at_once_and_done_when_committed() -> None:
    ticket, handle = make()
    assert handle.staged()
    assert not handle.done()
    assert (handle.bytes, handle.stall_s, handle.files, handle.streamed) == (120, 0.25, ("a.pt",), False)
    progress = handle.progress()
    assert (progress.state, progress.fraction, progress.attempts) == ("persisting", 0.25, 2)
    ticket.end()
    assert handle.done()
    assert handle.result() == f"/ckpt/{ticket.tag}"
    assert handle.exception() is None
    assert handle.progress().fraction == 1.0


def test_a_wait_with_a_limit_says_what_is_waited_for() -> None:
    _, handle = make()
    with pytest.raises(TimeoutError) as caught:
        handle.result(timeout=0)
    assert isinstance(caught.value, WaitTimeout)
    assert str(caught.value).startswith(
        f"{handle.tag} is not persisted after 0 s (persisting, 30 of 120 bytes, attempt 2); it goes on"
    )
    assert caught.value.tag == handle.tag


@pytest.mark.parametrize("timeout", [-1, "5", True, float("nan")])
def test_a_limit_that_is_no_time_is_refused(timeout: Any) -> None:
    _, handle = make()
    with pytest.raises(InvalidArgument, match="give seconds from 0 up, or None"):
        handle.result(timeout)


def test_a_failure_is_raised_anew_each_time_and_remembered_until_somebody_is_told() -> None:
    ticket, handle = make()
    ticket.end("no space")
    assert handle.wait()
    assert handle in runtime._state.failed.values()
    with pytest.raises(StorageUnavailable, match="no space") as first:
        handle.result()
    assert handle.told
    assert handle not in runtime._state.failed.values()
    with pytest.raises(StorageUnavailable) as second:
        handle.result()
    assert first.value is not second.value  # tracebacks must not pile up on one object
    assert isinstance(handle.exception(), StorageUnavailable)


def test_callbacks_run_once_in_order_and_one_that_raises_stops_none(caplog: pytest.LogCaptureFixture) -> None:
    ticket, handle = make()
    called: list[object] = []

    def bad(given: Handle) -> None:
        called.append("bad")
        raise ValueError("mine")

    handle.add_done_callback(bad)
    handle.add_done_callback(called.append)
    ticket.end()
    handle.settle()
    handle.settle()
    handle.add_done_callback(called.append)
    assert called == ["bad", handle, handle]
    assert "a callback of" in caplog.text


def test_a_callback_may_wait_for_another_thread_that_uses_the_handle() -> None:
    """Guards: callbacks under the handle's lock would wait here for ever."""
    ticket, handle = make()
    seen: list[str] = []

    def callback(given: Handle) -> None:
        other = threading.Thread(target=lambda: seen.append(given.result()))
        other.start()
        other.join(10)

    handle.add_done_callback(callback)
    ticket.end()
    handle.settle()
    assert seen == [handle.path]


def test_the_owner_hears_of_the_end_before_a_waiter_goes_on() -> None:
    heard: list[CheckpointError | None] = []
    order: list[str] = []
    ticket, handle = make(
        on_start=lambda given: order.append("start"),
        on_done=lambda given, error: (heard.append(error), order.append("done")),
    )
    ticket.end("broken")
    handle.wait()
    assert order == ["start", "done"]
    assert [str(error) for error in heard] == ["broken"]


def test_a_persist_that_ended_before_its_handle_is_noticed() -> None:
    ticket = Ticket(next(numbers))
    ticket.end()
    handle = Handle(ticket, path="/x", files=[], reports=[], stall_s=0)  # type: ignore[arg-type]
    assert handle.id not in runtime._state.pending
    assert handle.what == "/x"


def test_waiting_for_several_shares_one_limit() -> None:
    done, first = make()
    _, second = make()
    done.end()
    assert wait_all([first, second], 0.01) == [second]


def test_a_handle_does_not_pickle() -> None:
    _, handle = make()
    with pytest.raises(NotPicklable, match="belongs to its process"):
        pickle.dumps(handle)
