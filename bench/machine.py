"""The machine and the versions that a result belongs to, and how much memory a piece of work took."""

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import relight
import torch


def facts(folder: Path) -> dict[str, object]:
    """What a reader of the numbers must know."""
    # `stat -f` calls ext4 by the number that it shares with ext2.
    mounts = [mount for mount in psutil.disk_partitions(all=True) if folder.resolve().is_relative_to(mount.mountpoint)]
    processor = next(
        (line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "?"
    )
    return {
        "processor": processor,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "file_system": max(mounts, key=lambda mount: len(mount.mountpoint)).fstype if mounts else "?",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "relight": relight.__version__,
        "load_average": round(os.getloadavg()[0], 2),
    }


def _lines(path: str) -> list[str]:
    return Path(path).read_text(encoding="utf-8", errors="replace").splitlines()


def _status() -> dict[str, int]:
    fields = (line.split(":", 1) for line in _lines("/proc/self/status") if line.endswith("kB"))
    return {name: int(value.split()[0]) * 1024 for name, value in fields}


class Peak:
    """Bytes of memory above what was there before; filled in when the block ends."""

    grown = 0  # of the process at its highest
    whole = 0  # the same, with the shared memory that it had before: the memory tier counts each time
    shared = 0  # shared memory at the end


@contextmanager
def peak_memory() -> Iterator[Peak]:
    """The kernel's own high-water mark, so no sampling thread disturbs what is measured."""
    peak = Peak()
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before = _status()
    yield peak
    after = _status()
    peak.grown = max(0, after["VmHWM"] - before["VmRSS"])
    peak.whole = peak.grown + before["RssShmem"]
    peak.shared = after["RssShmem"]
