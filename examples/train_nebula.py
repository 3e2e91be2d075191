"""The same training as a script written for Nebula: `import nebulaml as nm` and Nebula's own calls, nothing of relight.

relight answers to that name. The only thing that changed in this script since it ran on Nebula is the path it is given.
"""

import argparse
import random
import time

import gpt
import nebulaml as nm
import numpy as np
import torch
from say import say


def save(tag: str, run: gpt.Run) -> None:
    """Three files under one tag; -2: the tag is complete when we say so."""
    checkpoint = nm.Checkpoint(tag, -2)
    checkpoint.save("model.pt", run.model.state_dict())
    checkpoint.save("optimizer.pt", {"optimizer": run.optimizer.state_dict(), "scheduler": run.scheduler.state_dict()})
    generators = (random.getstate(), np.random.get_state(), torch.get_rng_state())
    checkpoint.save("loop.pt", {"sampler": run.sampler.state_dict(), "generators": generators})
    if not checkpoint.commit():
        raise RuntimeError(f"{tag} was not saved")


def resume(run: gpt.Run) -> int:
    """The step to go on from: 0 on a fresh run."""
    checkpoint = nm.get_latest_checkpoint()
    if checkpoint is None:
        return 0
    run.model.load_state_dict(checkpoint.load("model.pt", map_location="cpu"))
    saved = checkpoint.load("optimizer.pt", map_location="cpu")
    run.optimizer.load_state_dict(saved["optimizer"])
    run.scheduler.load_state_dict(saved["scheduler"])
    loop = checkpoint.load("loop.pt")
    run.sampler.load_state_dict(loop["sampler"])
    python, numpy, pytorch = loop["generators"]
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(pytorch)
    return int(checkpoint.tag.removeprefix("global_step"))


def main() -> None:
    """Trains; goes on from the latest checkpoint under the path if there is one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=10, help="steps between saves")
    args = parser.parse_args()
    nm.init(persistent_storage_path=args.path, persistent_time_interval=2)

    run = gpt.Run()
    start = resume(run)
    if start:
        say("resumed", step=start)
    for step in range(start + 1, args.steps + 1):
        started = time.perf_counter()
        loss = run.step()
        say("step", step=step, loss=loss, seconds=time.perf_counter() - started)
        if step % args.every == 0:
            started = time.perf_counter()
            save(f"global_step{step}", run)
            say("saved", step=step, stall=time.perf_counter() - started)
    say("end", **run.fingerprint())


if __name__ == "__main__":
    main()
