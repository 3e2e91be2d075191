"""Fixtures of the crash tests: processes, a memory tier of their own, system calls that fail, small file systems."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from .processes import Zygote
from .shim import Shim, build_shim


@pytest.fixture(scope="package")
def _zygote() -> Iterator[Zygote]:
    zygote = Zygote()
    yield zygote
    zygote.close()


@pytest.fixture
def memory_dir() -> Iterator[Path]:
    """A directory in shared memory for the memory tier of one test."""
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    path = Path(tempfile.mkdtemp(prefix="relight-test-", dir=base))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def processes(_zygote: Zygote, memory_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Zygote]:
    """Starts processes whose memory tier is `memory_dir`; what still runs at the end of the test is killed."""
    _zygote.environment = {"RELIGHT_MEMORY_DIR": str(memory_dir)}
    monkeypatch.setenv("RELIGHT_MEMORY_DIR", str(memory_dir))
    yield _zygote
    _zygote.end_children()


@pytest.fixture(scope="package")
def _shim_zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    library = build_shim(tmp_path_factory.mktemp("shim"))
    zygote = Zygote({"LD_PRELOAD": str(library)})
    yield zygote
    zygote.close()


@pytest.fixture
def shim(_shim_zygote: Zygote, memory_dir: Path, tmp_path: Path) -> Iterator[Shim]:
    """Starts processes whose system calls can be recorded and can be made to fail."""
    _shim_zygote.environment = {"RELIGHT_MEMORY_DIR": str(memory_dir)}
    yield Shim(_shim_zygote, tmp_path)
    _shim_zygote.end_children()
