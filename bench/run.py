"""relight against torch.save and torch.load: one run, in turn, with fsync; a table, a plot and the raw numbers.

bench/README.md has the method. What was measured is checked: durable when it is said to be, and equal bit for bit.
"""

import argparse
import ctypes
import datetime
import json
import mmap
import os
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import cache
import machine
import relight
import render
import states
import torch

BLOCK = 4 << 20


class Bench:
    """One state, one folder, and the ways to save and load it; each way notes its own times."""

    def __init__(self, folder: Path, size_mib: int) -> None:
        self.folder = folder
        self.model, self.optimizer = states.training(size_mib)
        self.bytes = states.state_bytes(self.model, self.optimizer)
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.peaks: dict[str, dict[str, int]] = defaultdict(dict)
        self.checks: dict[str, str] = {}
        self.by_torch = folder / "torch.pt"
        self.ckpt = relight.Checkpointer(folder / "root", keep=2)
        self.state = relight.TrainState(model=self.model, optimizer=self.optimizer, rng=False)
        self.copies = [torch.empty_like(t) for t in self._tensors()]
        self.block = mmap.mmap(-1, BLOCK)  # page-aligned, as O_DIRECT asks
        ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(self.block)), 0x5A, BLOCK)
        self.tag_path = Path()
        self.number = 0

    def _tensors(self) -> list[torch.Tensor]:
        moments = [v for s in self.optimizer.state.values() for v in s.values() if torch.is_tensor(v)]
        return [*self.model.state_dict().values(), *moments]

    def _plain(self) -> dict[str, object]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def _timed(self, name: str, work: Callable[[], object]) -> object:
        with machine.peak_memory() as peak:
            started = time.perf_counter()
            result = work()
            self.seconds[name].append(time.perf_counter() - started)
        highest = self.peaks[name]
        for what, value in vars(peak).items():
            highest[what] = max(highest.get(what, 0), value)
        return result

    # ---- limits of the machine ----

    def copy_limit(self) -> None:
        """torch's own copy into memory that is there already."""

        def work() -> None:
            for target, source in zip(self.copies, self._tensors(), strict=True):
                target.copy_(source)

        self._timed("limit: copy in memory", work)

    def write_limit(self) -> None:
        """A plain write loop and an fsync."""
        self._write("limit: buffered write + fsync", 0)

    def direct_limit(self) -> None:
        """The same past the page cache."""
        self._write("limit: direct write + fsync", os.O_DIRECT)

    def _write(self, name: str, flags: int) -> None:
        path = self.folder / "loop.bin"
        path.unlink(missing_ok=True)

        def work() -> None:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | flags, 0o600)
            for offset in range(0, self.bytes - self.bytes % BLOCK, BLOCK):
                os.pwrite(descriptor, self.block, offset)
            os.fsync(descriptor)
            os.close(descriptor)

        try:
            self._timed(name, work)
        except OSError as error:
            self.checks[name] = f"not possible here: {error.strerror}"

    def read_limit(self) -> None:
        """A plain read loop past the page cache, of what torch.save wrote."""

        def work() -> None:
            descriptor = os.open(self.by_torch, os.O_RDONLY | os.O_DIRECT)
            for offset in range(0, self.by_torch.stat().st_size, BLOCK):
                os.preadv(descriptor, [self.block], offset)
            os.close(descriptor)

        try:
            self._timed("limit: direct read", work)
        except OSError as error:
            self.checks["limit: direct read"] = f"not possible here: {error.strerror}"

    # ---- saving ----

    def torch_save(self) -> None:
        """torch.save, flush, fsync of file and folder: durable when it returns."""

        def work() -> None:
            partial = self.by_torch.with_suffix(".partial")
            with open(partial, "wb") as file:
                torch.save(self._plain(), file)
                file.flush()
                os.fsync(file.fileno())
            partial.rename(self.by_torch)
            folder = os.open(self.folder, os.O_RDONLY)
            os.fsync(folder)
            os.close(folder)

        self._timed("torch.save + fsync", work)
        self.checks["torch.save + fsync"] = cache.require_durable([self.by_torch])

    def relight_save(self) -> None:
        """Checkpointer.save until it returns, and until the checkpoint is durable and committed."""
        self.number += 1
        handle: relight.Handle | None = None

        def work() -> None:
            nonlocal handle
            started = time.perf_counter()
            handle = self.ckpt.save(self.number, self.state)
            self.seconds["relight: save returns"].append(time.perf_counter() - started)
            self.tag_path = Path(handle.result())

        self._timed("relight: save durable", work)
        files = [self.tag_path / file for file in ("model.pt", "optimizer.pt", "train_state.pt")]
        if not (self.tag_path / "complete.txt").exists():
            raise SystemExit(f"bench: {self.tag_path} is not committed although its handle says so")
        self.checks["relight: save durable"] = cache.require_durable(
            [*files, self.tag_path / ".relight" / "manifest.json"]
        )
        assert handle is not None
        self.checks["relight: memory"] = "shared memory" if handle.outlives else "not in shared memory"

    def relight_file(self) -> None:
        """relight.save to one file: blocking and durable, with no memory tier."""
        path = self.folder / "file.pt"
        self._timed("relight.save to a file", lambda: relight.save(self._plain(), path))
        self.checks["relight.save to a file"] = cache.require_durable([path])

    # ---- loading ----

    def torch_load(self, cold: bool) -> None:
        """torch.load and load_state_dict: into the live model and optimizer."""
        name = f"torch.load + load_state_dict, {'cold' if cold else 'warm'}"
        if cold:
            self.checks[name] = cache.evict([self.by_torch])

        def work() -> None:
            found = torch.load(self.by_torch)
            self.model.load_state_dict(found["model"])
            self.optimizer.load_state_dict(found["optimizer"])

        self._timed(name, work)

    def relight_load(self, cold: bool) -> None:
        """The same from the files of the tag, every checksum verified."""
        name = f"relight: load + load_state_dict, {'cold' if cold else 'warm'}"
        if cold:
            self.checks[name] = cache.evict([self.tag_path / "model.pt", self.tag_path / "optimizer.pt"])

        def work() -> None:
            self.model.load_state_dict(relight.load(self.tag_path / "model.pt"))
            self.optimizer.load_state_dict(relight.load(self.tag_path / "optimizer.pt"))

        self._timed(name, work)

    def relight_resume(self) -> None:
        """Checkpointer.resume: into the live model and optimizer, from the memory tier, every checksum verified."""
        name = "relight: resume from memory"
        self._timed(name, lambda: self.ckpt.resume(self.state))
        tier = self.ckpt.resumed.tier if self.ckpt.resumed else "none"
        if tier != "memory":
            self.checks[name] = f"not from memory but from {tier}: the memory tier is too small here"

    # ---- proof ----

    def require_equal(self) -> None:
        """Plain torch reads in relight's files, bit for bit, what is in the live state."""
        found = torch.load(self.by_torch)
        expected, _ = torch.utils._pytree.tree_flatten(found)
        read = {name: torch.load(self.tag_path / f"{name}.pt") for name in ("model", "optimizer")}
        for what, one in (("the tag", read), ("the file", torch.load(self.folder / "file.pt"))):
            leaves, _ = torch.utils._pytree.tree_flatten(one)
            if len(leaves) != len(expected) or not all(map(_same, leaves, expected)):
                raise SystemExit(f"bench: {what} that relight wrote holds other values than the file of torch.save")
        verification = self.ckpt.verify(self.tag_path.name)
        if not verification.ok:
            raise SystemExit(f"bench: {verification}")
        self.checks["equal"] = (
            "plain torch.load of relight's files is bit-equal to torch.save's; relight verify is content"
        )


def _same(one: object, other: object) -> bool:
    if torch.is_tensor(one) and torch.is_tensor(other):
        return one.dtype == other.dtype and one.numpy().tobytes() == other.numpy().tobytes()
    return one == other


def measure(folder: Path, size_mib: int, rounds: int) -> dict[str, object]:
    """All ways, `rounds` times after one round that is thrown away; each round begins with another way."""
    bench = Bench(folder, size_mib)
    ways: list[Callable[[], None]] = [
        bench.copy_limit, bench.write_limit, bench.direct_limit,
        bench.torch_save, bench.relight_save, bench.relight_file,
    ]  # fmt: skip
    loads: list[Callable[[], None]] = [
        lambda: bench.torch_load(cold=False), lambda: bench.relight_load(cold=False), bench.relight_resume,
        lambda: bench.torch_load(cold=True), lambda: bench.relight_load(cold=True), bench.read_limit,
    ]  # fmt: skip
    load_before = os.getloadavg()[0]
    for number in range(rounds + 1):
        for group in (ways, loads):
            for turn in range(len(group)):
                group[(number + turn) % len(group)]()
        if number == 0:
            bench.seconds.clear()  # memory tier and caches are made now; a training pays that once
        print(f"round {number} of {rounds}{' (to warm up)' if number == 0 else ''}", file=sys.stderr, flush=True)
    bench.require_equal()
    bench.ckpt.close()
    facts = machine.facts(folder)
    facts["load_average_before"] = round(load_before, 2)
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "bytes": bench.bytes,
        "tensors": len(bench.copies),
        "rounds": rounds,
        "machine": facts,
        "seconds": dict(bench.seconds),
        "peak_bytes": dict(bench.peaks),
        "checks": bench.checks,
    }


def main() -> None:
    """Measures, checks, writes table, plot and JSON."""
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size-mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--folder", type=Path, default=here, help="where to write the checkpoints (a scratch folder is made)"
    )
    parser.add_argument("--results", type=Path, default=here / "results")
    args = parser.parse_args()
    if args.rounds < 5:
        parser.error("medians of fewer than 5 rounds say little")
    scratch = Path(tempfile.mkdtemp(prefix="scratch-", dir=args.folder))
    try:
        result = measure(scratch, args.size_mib, args.rounds)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    args.results.mkdir(parents=True, exist_ok=True)
    stem = args.results / f"{result['date'][:10]}-{args.size_mib}MiB"  # type: ignore[index]
    stem.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    table = render.table(result)
    stem.with_suffix(".md").write_text(table)
    render.plot(result, stem.with_suffix(".png"))
    print(table)
    print(f"{stem}.json, .md, .png")


if __name__ == "__main__":
    main()
