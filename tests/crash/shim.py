"""System calls that fail on request: the preloaded shim.c, its rules and its record.

Owns: building the shim, the text of its rules, the form of its record. Must not: know the names of relight's own files.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from .processes import Child, Zygote

SOURCE = Path(__file__).with_name("shim.c")

PREAMBLE = """
import ctypes as _ctypes
_shim = _ctypes.CDLL(os.environ["LD_PRELOAD"])
_shim.shim_seen.restype = _ctypes.c_long

def rules(text):
    "Replaces the rules of the shim."
    assert _shim.shim_set(text.encode()) >= 0, text

def seen(number=0):
    return _shim.shim_seen(number)

def mark(text):
    _shim.shim_mark(text.encode())
"""


def build_shim(directory: Path) -> Path:
    """Compiles the shim, or skips the test where there is no C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler (cc) for the library that makes system calls fail")
    library = directory / "shim.so"
    command = [compiler, "-O1", "-shared", "-fPIC", "-o"]
    done = subprocess.run([*command, str(library), str(SOURCE), "-ldl"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return library


def rule(call: str, pattern: object, action: str, argument: object, *, first: int = 1, count: int = 0) -> str:
    """One rule: from matching call number `first` on, `count` calls (0: all) get the action."""
    return f"{call}\t{pattern}\t{first}\t{count}\t{action}\t{argument}\n"


@dataclass(frozen=True)
class Call:
    """One recorded call."""

    number: int
    name: str
    path: str
    second: str
    offset: int
    bytes: int
    result: int

    @property
    def flags(self) -> int:
        return self.offset

    @property
    def creates(self) -> bool:
        return self.name == "open" and bool(self.flags & os.O_CREAT) and self.result >= 0


class Shim:
    """Starts processes with the shim inside, and reads what it recorded."""

    def __init__(self, zygote: Zygote, directory: Path) -> None:
        self._zygote = zygote
        self.record_file = directory / "calls"
        self.kept = directory / "kept"
        self.kept.mkdir()
        self._fifo = directory / "fifo"

    def start(self, source: str, *arguments: object, whole_exit: bool = False) -> Child:
        return self._zygote.start(PREAMBLE + source, *arguments, whole_exit=whole_exit)

    def run(self, source: str, *arguments: object) -> list[str]:
        """Runs a script to its good end; what it said."""
        return self.start(source, *arguments).end()

    def recording(self, scope: Path) -> str:
        """The lines that make the shim record every call on paths below `scope`."""
        return f"record\t{self.record_file}\t{scope}\nkeep\t{self.kept}\n"

    def calls(self) -> list[Call]:
        calls = []
        for line in self.record_file.read_text().splitlines():
            number, name, path, second, offset, size, result = line.split("\t")
            calls.append(Call(int(number), name, path, second, int(offset), int(size), int(result)))
        return calls

    def hanging(self, call: str, pattern: object, *, first: int = 1) -> str:
        """A rule that makes one call hang until `let_go`."""
        for name in (self._fifo, self._fifo.with_name("fifo.reached")):
            if not name.exists():
                os.mkfifo(name)
        return rule(call, pattern, "hang", self._fifo, first=first, count=1)

    def await_hang(self) -> None:
        """Returns once the call hangs."""
        with open(self._fifo.with_name("fifo.reached"), "rb") as reached:
            reached.read()

    def let_go(self) -> None:
        with open(self._fifo, "wb"):
            pass
