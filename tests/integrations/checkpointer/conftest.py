"""Helpers of these tests: small trainings, storage that fails, scripts in processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import relight
import torch
from relight import runtime

LIMIT_S = 120  # of a script; far above what one needs


def values(fill: float, count: int = 1000) -> dict[str, torch.Tensor]:
    """A state whose every number is `fill`."""
    return {"weight": torch.full((count,), float(fill))}


def model_of(fill: float) -> torch.nn.Linear:
    model = torch.nn.Linear(3, 3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(fill)
    return model


def fill_of(model: torch.nn.Module) -> float:
    found = {float(value) for parameter in model.parameters() for value in parameter.detach().flatten()}
    assert len(found) == 1, "a mixture of two states"
    return found.pop()


def block(root: Path, tag: str) -> None:
    """Makes every save of `tag` fail in the background: a file lies where its directory must be."""
    root.mkdir(exist_ok=True)
    (root / tag).write_text("in the way")


def steps(checkpointer: relight.Checkpointer) -> list[int | None]:
    return [one.step for one in checkpointer.list() if not one.foreign]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """An engine and a memory tier of this test alone: failed saves stay in memory for the next process."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="relight-test-", dir=shared if shared.is_dir() else None) as directory:
        environment = {"RELIGHT_MEMORY_DIR": directory, "RELIGHT_MEMORY_BYTES_MAX": str(2 << 30)}
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        yield environment
        runtime.close(60)


class Script:
    """A Python process that runs `source`; it is killed with its children at the end of the test."""

    def __init__(self, source: str, *arguments: object, preamble: str = "", environment: dict[str, str] | None = None):
        code = PREAMBLE + preamble + textwrap.dedent(source)
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
        self._limit = threading.Timer(LIMIT_S, self._kill_group)
        self._limit.daemon = True
        self._limit.start()

    def line(self) -> str:
        """The next line of its output; an empty one if it has ended."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def end(self) -> tuple[int, str, str]:
        """Waits for its end: exit code, output, errors."""
        out, err = self.process.communicate(timeout=LIMIT_S)
        return self.process.returncode, out, err

    def _kill_group(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)

    def kill(self) -> None:
        self._limit.cancel()
        self._kill_group()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None and not stream.closed:
                stream.close()


PREAMBLE = """\
import os, sys, warnings
import torch, relight
root = sys.argv[1]
def values(fill, count=1000):
    return {"weight": torch.full((count,), float(fill))}
def say(*words):
    print(*words, flush=True)
"""


@pytest.fixture
def script() -> Iterator[Callable[..., Script]]:
    started: list[Script] = []

    def start(source: str, *arguments: object, environment: dict[str, str] | None = None) -> Script:
        started.append(Script(source, *arguments, environment=environment))
        return started[-1]

    yield start
    for one in started:
        one.kill()
