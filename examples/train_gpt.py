"""The training loop with relight: the lines that differ from train_plain.py are the ones with `ckpt` and `state`.

Kill it whenever you like and start it again: it goes on from the newest complete checkpoint, from shared memory if the
last process had no time to write it out.
"""

import argparse
import os
import time

import gpt
import relight
from say import say


def begun(handle: relight.Handle) -> str:
    """The state of a save once its persist has begun. Only for the demo: its killer waits for that word."""
    while (state := handle.progress().state) == "queued":
        os.sched_yield()
    return state


def durable(handle: relight.Handle) -> None:
    """Reports a persist that has ended."""
    progress = handle.progress()
    say("durable", tag=handle.tag, state=progress.state, seconds=progress.seconds, bytes=handle.bytes)


def main() -> None:
    """Trains; goes on from the newest complete checkpoint in the folder if there is one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=10, help="steps between saves")
    parser.add_argument("--keep", type=int, default=4, help="checkpoints that stay on disk")
    args = parser.parse_args()

    run = gpt.Run()
    with relight.Checkpointer(args.folder, keep=args.keep) as ckpt:
        state = relight.TrainState(**run.parts(), rng=True)
        start = ckpt.resume(state)
        if ckpt.resumed is not None:
            say("resumed", step=start, tier=ckpt.resumed.tier, drained=",".join(ckpt.resumed.drained))
        for step in range(start + 1, args.steps + 1):
            started = time.perf_counter()
            loss = run.step()
            say("step", step=step, loss=loss, seconds=time.perf_counter() - started)
            if step % args.every == 0:
                handle = ckpt.save(step, state)
                say("saved", step=step, tag=handle.tag, stall=handle.stall_s, state=begun(handle))
                handle.add_done_callback(durable)
    say("end", **run.fingerprint())


if __name__ == "__main__":
    main()
