"""What the tests of the Nebula drop-in share: a clean process, and real child processes that can be killed.

Owns: isolation (settings, roots, shares, the engine, the memory tier's directory) and the runner of client scripts.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

_VARIABLES = (
    "NEBULA_PERSISTENT_STORAGE_PATH",
    "NEBULA_PERSISTENT_TIME_INTERVAL",
    "NEBULA_MEMORY_BUFFER_SIZE",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
)
CHILD_LIMIT_S = 120


@pytest.fixture
def memory_dir(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A place in shared memory of this test's own, so that no test drains what another left."""
    directory = Path(tempfile.mkdtemp(prefix="relight-test-", dir="/dev/shm"))
    monkeypatch.setenv("RELIGHT_MEMORY_DIR", str(directory))
    yield directory
    shutil.rmtree(directory)


@pytest.fixture(autouse=True)
def fresh_process(memory_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if no test had used the drop-in before in this process."""
    from relight import runtime
    from relight.nebula import find, lifetime, settings

    for name in _VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RELIGHT_RETRY_DELAY_S", "0")
    working = tmp_path / "cwd"
    working.mkdir()
    monkeypatch.chdir(working)
    yield
    runtime.close(60)
    lifetime.forget()
    settings.forget()
    find.forget()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root that does not exist yet."""
    return tmp_path / "root"


class Client:
    """A client script in a process of its own. It says where it is by lines on stdout and goes on by lines on stdin."""

    def __init__(self, script: str, *arguments: str, cwd: Path, prefix: tuple[str, ...] = ()) -> None:
        file = Path(tempfile.mkdtemp(dir=cwd)) / "client.py"
        file.write_text(textwrap.dedent(script))  # a file: children that are spawned import it
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-W", "error", str(file), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )

    def wait_for(self, word: str) -> None:
        """Returns when the script has printed `word` as a line."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.strip() == word:
                return
        raise AssertionError(f"the script ended before {word!r}: {self.process.communicate()[1]}")

    def go_on(self) -> None:
        """Answers the script's `input()`."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        """SIGKILL: nothing of the process's own runs any more."""
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate(timeout=CHILD_LIMIT_S)

    def end(self, *, code: int = 0) -> tuple[str, str]:
        """Waits for the end of the script; its output and its errors."""
        out, err = self.process.communicate(timeout=CHILD_LIMIT_S)
        assert self.process.returncode == code, err
        return out, err


@pytest.fixture
def start(tmp_path: Path, memory_dir: Path) -> Iterator["Starter"]:
    """Starts client scripts; whatever still runs at the end of the test is killed."""
    starter = Starter(tmp_path / "cwd")
    yield starter
    for client in starter.clients:
        if client.process.poll() is None:
            client.kill()
        for stream in (client.process.stdin, client.process.stdout, client.process.stderr):
            if stream is not None:
                stream.close()


class Starter:
    """`start(script, arguments)` gives a running `Client`; `start.run(...)` waits for its good end."""

    def __init__(self, cwd: Path) -> None:
        self.cwd = cwd
        self.clients: list[Client] = []

    def __call__(self, script: str, *arguments: object, prefix: tuple[str, ...] = ()) -> Client:
        client = Client(script, *map(str, arguments), cwd=self.cwd, prefix=prefix)
        self.clients.append(client)
        return client

    def run(self, script: str, *arguments: object, code: int = 0) -> tuple[str, str]:
        return self(script, *arguments).end(code=code)


@pytest.fixture
def committed() -> Callable[[Path], set[str]]:
    """Gives the tags of a root whose manifest is on the disk, seen without relight."""

    def look(root: Path) -> set[str]:
        return {path.parent.parent.name for path in root.glob("*/.relight/manifest.json")}

    return look


@pytest.fixture
def visible() -> Callable[[Path], list[str]]:
    """Gives the complete tags of a root, oldest first, seen past the drop-in, whose getters would seal."""
    from relight import runtime

    def look(root: Path) -> list[str]:
        return [entry["tag"] for entry in json.loads(runtime.engine().open_root(str(root)).list())]

    return look
