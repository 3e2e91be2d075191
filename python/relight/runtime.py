"""The engine of this process: made at first use, closed at exit, forgotten by a forked child.

Owns: the one `_core.Engine`, the thread that turns its events into log records and callbacks, the close at exit.
Must not: import torch; hold a lock while it waits; start anything in a forked child.
Invariant: a process has at most one engine, and a process forked from one that has an engine never touches it.

In a forked child (DESIGN.md, "Fork"): the engine's threads are not there, so nothing that saves can work. Every use is
refused at once with `EngineClosed`, before a lock is taken: another thread of the parent may have held it at the fork.
The child does not get an engine of its own, because the state of torch and of the interpreter that saving needs (import
locks, allocators) may be caught in the middle of another thread's work. Loading a file by its path needs no engine and
works.
"""

from __future__ import annotations

import atexit
import json
import logging
import math
import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from relight.exceptions import EngineClosed, InvalidArgument
from relight.options import Options

if TYPE_CHECKING:
    from relight import _core
    from relight.handle import Handle

__all__ = ["check_fork", "close", "engine", "started"]

logging.getLogger("relight").addHandler(logging.NullHandler())  # quiet unless the application asks
_log = logging.getLogger("relight.engine")
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}

_EVENTS_POLL_S = 60.0  # the engine wakes the thread itself; this only bounds one call
_JOIN_TIMEOUT_S = 5.0


class _State:
    """What a process knows of its engine. Replaced as a whole in a forked child."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.lock = threading.RLock()  # a signal handler may come in while its own thread holds it
        self.engine: _core.Engine | None = None
        self.options: Options | None = None
        self.starting = False
        self.events: threading.Thread | None = None
        self.pending: dict[int, Handle] = {}  # ticket id -> handle, until its persist has ended
        self.failed: dict[int, Handle] = {}  # id(handle) -> failures that nobody has been told of
        self.unfinished: list[Handle] = []  # of engines that were closed before their saves had ended
        self.exit_hooks = False
        self.exiting = False


_state = _State()
_forked_from: int | None = None  # the process whose engine this forked child may not use


def started() -> bool:
    """Whether this process has a running engine. Takes no lock."""
    return _state.engine is not None


def check_fork() -> None:
    """Refuses to go on in a process that was forked from one with an engine. Call it before anything that saves.

    Raises:
        EngineClosed: this is such a process.
    """
    if _forked_from is not None:
        raise EngineClosed(
            f"this process ({os.getpid()}) was forked from process {_forked_from}, which uses relight: saving here "
            "cannot work. Save in the parent, or start this process with the 'spawn' or 'forkserver' method"
        )


def engine(options: Options | None = None) -> _core.Engine:
    """The engine of this process, made now if there is none.

    Args:
        options: how to make it. Once it runs, only the values it runs with (or the defaults) are accepted.

    Raises:
        EngineClosed: this process was forked from one with an engine, or is about to end.
        InvalidArgument: the engine runs already with another value of an option of the process.
    """
    check_fork()
    state = _state
    with state.lock:
        if state.engine is None:
            return _start(state, options or Options())
        assert state.options is not None  # set together with the engine
        if options is not None:
            _refuse_other_options(options, state.options)
        return state.engine


def _start(state: _State, options: Options) -> _core.Engine:
    from relight import _core

    if state.exiting:
        raise EngineClosed("the process is about to end and relight is closed; save before that")
    if state.starting:  # same thread, inside the call below: only a signal handler gets here
        raise EngineClosed(
            "relight is being started by the call that this signal handler interrupted; save once before, or set a "
            "flag in the handler and save in the training loop"
        )
    state.starting = True
    try:
        made = _core.Engine(**options.for_engine())
        thread = threading.Thread(target=_pass_on_events, args=(made, state), name="relight-events", daemon=True)
        thread.start()
        if not state.exit_hooks:
            _close_at_exit_of_this_process()
            state.exit_hooks = True
        state.engine, state.options, state.events = made, options, thread
        return made
    finally:
        state.starting = False


def _refuse_other_options(asked: Options, running: Options) -> None:
    defaults = Options().for_engine()
    now = running.for_engine()
    for name, value in asked.for_engine().items():
        if value not in (defaults[name], now[name]):
            raise InvalidArgument(
                f"{name}={value!r} comes too late: the engine of this process runs with {now[name]!r}. Give it to the "
                f"first Checkpointer of the process, or set {Options.environment_variable(name)}"
            )


def close(timeout_s: float | None = None) -> bool:
    """Finishes what is under way and stops the engine; the next use makes a new one. Checkpointers of the old one are
    closed.

    Args:
        timeout_s: longest wait. None: no limit. What is not persisted by then stays in memory for the next process.

    Returns:
        Whether everything was persisted. Errors of saves are not raised here: their handles have them.
    """
    check_fork()
    state = _state
    with state.lock:
        closing, thread = state.engine, state.events
        state.engine = state.events = state.options = None
    if closing is None:
        return True
    drained = closing.close(timeout_s)
    if thread is not None and thread is not threading.current_thread():
        thread.join(_JOIN_TIMEOUT_S)
    _settle(state)
    return drained


# ---- handles ----


def track(handle: Handle) -> None:
    """Takes note of a persist under way: its callbacks run when it ends, and the exit of the process waits for it."""
    _state.pending[handle.id] = handle
    if handle.done():  # ended before we knew of it: its event found nobody
        handle.settle()


def untrack(handle: Handle, *, failed: bool) -> None:
    """The persist has ended; a failure is remembered until somebody is told."""
    if failed:
        _state.failed[id(handle)] = handle
    if _state.pending.get(handle.id) is handle:  # ids start anew with each engine
        del _state.pending[handle.id]


def told(handle: Handle) -> None:
    """Somebody was given the error of this handle: the exit of the process need not print it."""
    _state.failed.pop(id(handle), None)


def _settle(state: _State) -> None:
    for handle in list(state.pending.values()):
        if handle.done():
            handle.settle()
    state.unfinished.extend(state.pending.values())
    state.pending.clear()


# ---- events ----


def _pass_on_events(source: _core.Engine, state: _State) -> None:
    """Runs in the thread "relight-events" until the engine is closed."""
    while True:
        text = source.next_event(_EVENTS_POLL_S)
        if text is None:
            continue
        event: dict[str, Any] = json.loads(text)
        if event["event"] == "closed":
            return
        if event["event"] == "log":
            facts = {"tag": event.get("tag"), "root": event.get("root")}
            _log.log(_LEVELS.get(event["level"], logging.INFO), "%s", event["message"], extra=facts)
        elif event["event"] == "ticket":
            handle = state.pending.get(event["id"])
            if handle is not None:
                handle.settle()


# ---- exit and fork ----


def _close_at_exit_of_this_process() -> None:
    # A child of multiprocessing leaves by os._exit: only its own finalizers run there, never atexit.
    from multiprocessing import util

    util.Finalize(None, _close_at_exit, exitpriority=10)
    atexit.register(_close_at_exit)


def _close_at_exit() -> None:
    state = _state
    if state.exiting or _forked_from is not None:
        return
    state.exiting = True
    limit_s = (state.options or Options()).close_timeout_s
    # What a close() with a time limit gave up on is not waited for again.
    if state.pending and all(handle.given_up for handle in state.pending.values()):
        limit_s = 0.0
    interrupted = False
    try:
        close(limit_s)
    except KeyboardInterrupt:
        interrupted = True
    _report(state, limit_s, interrupted)


def _report(state: _State, limit_s: float, interrupted: bool) -> None:
    """Says on stderr what was not saved: at exit nobody is left to raise to."""
    for handle in list(state.failed.values()):
        error = handle.error()
        print(f"relight: {handle.what} was NOT saved: {type(error).__name__}: {error}", file=sys.stderr)
    unfinished = [*state.unfinished, *state.pending.values()]
    if unfinished:
        why = "interrupted" if interrupted else f"not finished within {limit_s:g} s"
        kept = [handle.what for handle in unfinished if handle.outlives]
        names = ", ".join(handle.what for handle in unfinished)
        print(f"relight: {names}: {why}, not persisted.", file=sys.stderr)
        if kept:
            print(
                f"relight: {', '.join(kept)} stays in memory on this node; the next process that opens the directory "
                "persists it.",
                file=sys.stderr,
            )


def _forget_in_child() -> None:
    global _state, _forked_from
    old = _state
    if old.engine is not None or old.starting:
        _forked_from = old.pid
    # The engine's own objects know their process: in a child they are dropped without a look at threads or locks.
    _state = _State()


os.register_at_fork(after_in_child=_forget_in_child)


def remaining(deadline: float | None) -> float | None:
    """Seconds until `deadline` of `time.monotonic()`, at least 0; None: no limit."""
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def deadline_after(timeout_s: float | None) -> float | None:
    """The time of `time.monotonic()` at which a wait of `timeout_s` ends; None: no limit.

    Raises:
        InvalidArgument: not a number of seconds from 0 up.
    """
    if timeout_s is None:
        return None
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)) or not timeout_s >= 0:
        raise InvalidArgument(f"timeout={timeout_s!r} cannot be used; give seconds from 0 up, or None for no limit")
    return None if math.isinf(timeout_s) else time.monotonic() + timeout_s
