"""Measures torch.save + fsync and relight on the same state, in the same run, in turn; prints JSON.

Each round: the plain write of the same bytes (what the disk gives), torch.save + fsync, relight; the order turns from
round to round. `stall` is how long the training loop would stand still, `durable` the time until the bytes are on disk.
"""

import argparse
import json
import os
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import gpt
import relight
import torch
from train_plain import save_durably


def plain_write(path: Path, blob: bytes) -> None:
    """A write loop and an fsync: no pickling, no checksums."""
    with open(path, "wb") as file:
        for offset in range(0, len(blob), 4 << 20):
            file.write(memoryview(blob)[offset : offset + (4 << 20)])
        file.flush()
        os.fsync(file.fileno())


def main() -> None:
    """Measures and checks that what was measured is really there, and equal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)

    run = gpt.Run()
    run.step()  # AdamW has its moments only after a step
    model = run.model
    state = {"model": model.state_dict(), "optimizer": run.optimizer.state_dict()}
    by_torch, by_loop = args.folder / "torch.pt", args.folder / "loop.bin"
    times: dict[str, list[float]] = defaultdict(list)

    with relight.Checkpointer(args.folder / "relight", keep=2) as ckpt:
        newest = ""

        def loop(_: int) -> None:
            blob = bytes(size)
            started = time.perf_counter()
            plain_write(by_loop, blob)
            times["loop durable"].append(time.perf_counter() - started)

        def with_torch(_: int) -> None:
            started = time.perf_counter()
            save_durably(state, by_torch)
            times["torch durable"].append(
                time.perf_counter() - started
            )  # it returns when durable: the stall is the same
            started = time.perf_counter()
            model.load_state_dict(torch.load(by_torch)["model"])
            times["torch load"].append(time.perf_counter() - started)

        def with_relight(number: int) -> None:
            nonlocal newest
            started = time.perf_counter()
            handle = ckpt.save(f"round-{number}", state)
            times["relight stall"].append(time.perf_counter() - started)
            newest = os.path.join(handle.result(), "state.pt")
            times["relight durable"].append(time.perf_counter() - started)
            started = time.perf_counter()
            model.load_state_dict(relight.load(newest)["model"])
            times["relight load"].append(time.perf_counter() - started)

        size = gpt.state_bytes(run)
        ways: list[Callable[[int], None]] = [loop, with_torch, with_relight]
        for number in range(args.rounds + 1):
            for turn in range(len(ways)):
                ways[(number + turn) % len(ways)](number)
            if number == 0:
                times.clear()  # the first round makes the memory tier and the caches; no training is that short

        one, other = torch.load(by_torch), torch.load(newest)
    for part in ("model", "optimizer"):
        first, second = torch.utils._pytree.tree_flatten(one[part]), torch.utils._pytree.tree_flatten(other[part])
        pairs = list(zip(first[0], second[0], strict=True))
        if first[1] != second[1] or not all(torch.equal(a, b) if torch.is_tensor(a) else a == b for a, b in pairs):
            raise SystemExit(f"measure: the file of relight holds another {part} than the file of torch.save")
    print(json.dumps({"bytes": size, "rounds": args.rounds, "seconds": times}))


if __name__ == "__main__":
    main()
