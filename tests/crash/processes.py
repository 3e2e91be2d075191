"""Real processes for the crash tests: started fast, spoken to through pipes, killed and waited for.

Owns: the life of the zygotes and of their children. Must not: sleep.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import IO

ZYGOTE = Path(__file__).with_name("zygote.py")
LIMIT_S = 60  # of one wait; far above what one needs


class Child:
    """One process that runs a script."""

    def __init__(self, zygote: Zygote, pid: int, stdin: int, stdout: int, stderr: IO[bytes]) -> None:
        self._zygote = zygote
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        self._stdin = stdin
        self.stdout = stdout
        self._stderr = stderr
        self._buffer = b""
        self._eof = False
        self.code: int | None = None

    def _more(self, limit_s: float) -> bool:
        ready, _, _ = select.select([self.stdout], [], [], limit_s)
        if not ready:
            return False
        got = os.read(self.stdout, 1 << 16)
        self._eof = not got
        self._buffer += got
        return True

    def line(self, limit_s: float = LIMIT_S) -> str | None:
        """The next line that it says; None once it has ended without one, or at the time limit."""
        while b"\n" not in self._buffer:
            if self._eof or not self._more(limit_s):
                return None
        line, self._buffer = self._buffer.split(b"\n", 1)
        return line.decode()

    def expect(self, words: str) -> None:
        """The next line must be this."""
        line = self.line()
        assert line == words, f"{line!r} instead of {words!r}\n{self.errors()}"

    def go_on(self) -> None:
        """Answers a `sys.stdin.readline()` of the script."""
        os.write(self._stdin, b"go\n")

    def lines_left(self) -> list[str]:
        """All that it has said and was not read, after its end."""
        while not self._eof and self._more(LIMIT_S):
            pass
        text, self._buffer = self._buffer.decode(), b""
        return text.splitlines()

    def errors(self) -> str:
        self._stderr.flush()
        return os.pread(self._stderr.fileno(), 1 << 20, 0).decode(errors="replace")

    def wait(self, limit_s: float = LIMIT_S) -> int:
        """Waits for its end; its exit code, or minus the signal."""
        if self.code is None:
            poll = select.poll()
            poll.register(self.pidfd, select.POLLIN)
            if not poll.poll(limit_s * 1000):
                self.kill()
                raise AssertionError(f"the process did not end within {limit_s} s\n{self.errors()}")
            self.code = self._zygote.reap(self.pid)
        return self.code

    def end(self, code: int = 0, limit_s: float = LIMIT_S) -> list[str]:
        """Waits for its end, which must be with this code; what it said and was not read yet."""
        got = self.wait(limit_s)
        assert got == code, f"exit code {got} instead of {code}\n{self.errors()}"
        return self.lines_left()

    def signal(self, number: int) -> None:
        signal.pidfd_send_signal(self.pidfd, number)

    def kill(self) -> None:
        """SIGKILL, and waits until it is gone."""
        if self.code is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            self.code = self._zygote.reap(self.pid)

    def close(self) -> None:
        self.kill()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # what it forked
        for number in (self._stdin, self.stdout, self.pidfd):
            os.close(number)
        self._stderr.close()


class Zygote:
    """Forks children that have torch and relight imported; see zygote.py."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._door = ours
        self.environment: dict[str, str] = {}
        """What every child gets."""
        self._children: list[Child] = []
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(ZYGOTE), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
            )

    def start(
        self,
        source: str,
        *arguments: object,
        environment: Mapping[str, str] | None = None,
        whole_exit: bool = False,
    ) -> Child:
        """Runs `source` in a process of its own, with `torch`, `relight`, `os`, `sys` and `say` at hand.

        Args:
            whole_exit: take the interpreter down as Python does, where the end of the process is the subject.
        """
        request = {
            "source": textwrap.dedent(source),
            "arguments": [str(argument) for argument in arguments],
            "whole_exit": whole_exit,
            "environment": {**self.environment, **(environment or {})},
        }
        in_read, in_write = os.pipe()
        out_read, out_write = os.pipe()
        stderr = tempfile.TemporaryFile()  # noqa: SIM115  # it lives as long as the child
        socket.send_fds(self._door, [json.dumps(request).encode()], [in_read, out_write, stderr.fileno()])
        pid = json.loads(self._door.recv(1 << 16))["pid"]
        os.close(in_read)
        os.close(out_write)
        child = Child(self, pid, in_write, out_read, stderr)
        self._children.append(child)
        return child

    def reap(self, pid: int) -> int:
        self._door.send(json.dumps({"wait": pid}).encode())
        return int(json.loads(self._door.recv(1 << 16))["code"])

    def end_children(self) -> None:
        for child in self._children:
            child.close()
        self._children.clear()

    def close(self) -> None:
        self.end_children()
        self._door.close()
        self._process.wait(LIMIT_S)
