"""The training loop as most people have it: `torch.save` every few steps, with the fsync that makes it durable.

The demo's reference: it is never interrupted and never meets relight, so equal losses and weights mean that neither the
kill nor relight changed anything. Compare with train_gpt.py (relight) and train_nebula.py (Nebula).
"""

import argparse
import os
import random
import time
from pathlib import Path

import gpt
import numpy as np
import torch
from say import say


def save_durably(obj: object, path: Path) -> None:
    """torch.save, fsync, rename: what `torch.save(obj, path)` alone does not promise."""
    partial = path.with_suffix(".partial")
    with open(partial, "wb") as file:
        torch.save(obj, file)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def main() -> None:
    """Trains; goes on from <folder>/last.pt if it is there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=10, help="steps between saves")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)

    run, start, last = gpt.Run(), 0, args.folder / "last.pt"
    if last.exists():
        saved = torch.load(last, weights_only=False)  # the NumPy and Python generators are not plain tensors
        for name, part in run.parts().items():
            part.load_state_dict(saved[name])
        random.setstate(saved["python"])
        np.random.set_state(saved["numpy"])
        torch.set_rng_state(saved["torch"])
        start = saved["step"]
        say("resumed", step=start, tier="file")
    say("training", parameters=sum(p.numel() for p in run.model.parameters()), state_bytes=gpt.state_bytes(run))
    for step in range(start + 1, args.steps + 1):
        started = time.perf_counter()
        loss = run.step()
        say("step", step=step, loss=loss, seconds=time.perf_counter() - started)
        if step % args.every == 0:
            started = time.perf_counter()
            state = {name: part.state_dict() for name, part in run.parts().items()}
            generators = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
            save_durably({**state, **generators, "step": step}, last)
            say("saved", step=step, stall=time.perf_counter() - started)
    say("end", **run.fingerprint())


if __name__ == "__main__":
    main()
