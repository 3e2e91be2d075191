"""Runs one training process, listens to what it says, and kills it from outside where the plan says so.

Owns: the process, the record of its losses, stalls and persists.
Must not: know what is being proved.
"""

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from say import heard
from screen import Screen

EXAMPLES = Path(__file__).parent


@dataclass
class Record:
    """What one run of a script said."""

    losses: dict[int, str] = field(default_factory=dict)  # in full, as text: equal text means equal bits
    step_seconds: list[float] = field(default_factory=list)
    stalls: dict[int, float] = field(default_factory=dict)
    persists: dict[str, tuple[float, int]] = field(default_factory=dict)  # tag: seconds, bytes
    resumed: dict[str, str] | None = None
    fingerprint: dict[str, str] | None = None
    killed_at: int | None = None  # the step whose save was being persisted
    pid: int = 0
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=12))


class Died(Exception):
    """The training script ended with an error of its own."""


def run(
    script: str,
    folder: Path,
    screen: Screen,
    *,
    steps: int,
    every: int,
    environment: dict[str, str],
    kill_at: int | None = None,
    each: Callable[[], None] = lambda: None,
) -> Record:
    """Runs `script` to its end, or SIGKILLs it the moment it says that it has staged the save of step `kill_at`.

    `each` is called for every line it says.

    Raises:
        Died: it ended with an error; the message has its last lines.
    """
    command = [sys.executable, str(EXAMPLES / script), str(folder), "--steps", str(steps), "--every", str(every)]
    record = Record()
    started = time.perf_counter()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=environment
    ) as process:
        record.pid = process.pid
        assert process.stdout is not None
        try:
            for line in process.stdout:
                event, facts = heard(line)
                # First of all: the persist is running, and every microsecond of ours brings it nearer to its end.
                if event == "saved" and kill_at is not None and int(facts["step"]) >= kill_at:
                    os.kill(process.pid, signal.SIGKILL)
                    record.killed_at = int(facts["step"])
                _note(record, event, facts, line, screen, steps)
                each()
                if record.killed_at is not None:
                    break
        finally:
            if process.poll() is None and record.killed_at is None:
                process.kill()  # we were interrupted: leave nobody behind
    screen.pause()
    if record.killed_at is None and (process.returncode or record.fingerprint is None):
        raise Died(f"{script} ended with {process.returncode}:\n" + "".join(record.tail))
    mean = sum(record.step_seconds) / max(1, len(record.step_seconds))
    stalls = ", ".join(f"{1000 * stall:.0f}" for stall in record.stalls.values())
    screen.line(
        f"{script}: {time.perf_counter() - started:.1f} s, {mean:.2f} s a step; stall of each save in ms: {stalls}"
    )
    return record


def _note(record: Record, event: str, facts: dict[str, str], line: str, screen: Screen, steps: int) -> None:
    match event:
        case "step":
            step = int(facts["step"])
            record.losses[step] = facts["loss"]
            record.step_seconds.append(float(facts["seconds"]))
            screen.training(step, steps, float(facts["loss"]), float(facts["seconds"]))
        case "saved":
            record.stalls[int(facts["step"])] = float(facts["stall"])
        case "durable":
            record.persists[facts["tag"]] = float(facts["seconds"]), int(facts["bytes"])
        case "resumed":
            record.resumed = facts
        case "end":
            record.fingerprint = facts
        case _:
            record.tail.append(line)
