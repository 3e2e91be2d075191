"""SIGKILL and errors at chosen system calls: at each one in turn, not at a random moment.

RELIGHT_TEST_STRIDE=1 visits every call; by default only some are visited, from a drawn start that is printed.
"""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

from .processes import Child
from .shim import Shim, rule
from .test_kill_nine import SEED, leftovers

STRIDE = int(os.environ.get("RELIGHT_TEST_STRIDE") or 1000)

# Checks what is there, then saves under new tags and twice under one, and says what is staged.
TRAINER = """
root, faults = sys.argv[1:]
def state(n):
    return {"a.pt": {"n": n, "w": torch.full((30_000,), float(n))}, "b.pt": {"n": n}}
def arm():
    rules(faults)
#arm early
ckpt = relight.Checkpointer(root, keep=2)
latest = ckpt.latest()
n = 0
if latest:
    a, b = ckpt.load(latest.tag, "a.pt"), ckpt.load(latest.tag, "b.pt")
    n = a["n"]
    assert n == b["n"] and bool((a["w"] == n).all()), (a["n"], b["n"])
say("found", n)
#arm late
for tag in ("x", "x", "y", "z"):
    n += 1
    ckpt.save(tag, files=state(n), step=n)
    say("staged", n)
ckpt.close()
say("seen", seen())
relight.runtime.close()
rules("")
assert ckpt
"""


def visited(draw: random.Random, stride: int) -> range:
    stride = min(STRIDE, stride)
    first = draw.randrange(1, stride + 1)
    print(f"RELIGHT_TEST_SEED={SEED} RELIGHT_TEST_STRIDE={stride} first={first}")
    return range(first, 2000, stride)


def staged(child: Child, before: int) -> int:
    """The newest number that it said was staged."""
    return max([before, *(int(line.split()[1]) for line in child.lines_left() if line.startswith("staged"))])


def met(shim: Shim, root: Path, faults: str, newest: int, nth: int, *, early: bool) -> tuple[int, int]:
    """Runs a trainer, which must find `newest` or what was being staged; the newest now, and its exit code."""
    child = shim.start(TRAINER.replace("#arm early" if early else "#arm late", "arm()"), root, faults)
    line = child.line()
    if line is not None:  # killed early, it may not come so far
        found = int(line.split()[1])
        assert found in (newest, newest + 1), f"call {nth}: found {found}, {newest} was staged"
        newest = found
    code = child.wait()
    assert code in (-9, 0), f"call {nth}: {child.errors()}"
    return staged(child, newest), code


def test_bl_052_sigkill_at_each_change_of_the_root(shim: Shim, root: Path, memory_dir: Path) -> None:
    """Guards: an order of two calls between which a checkpoint is lost, half, or of two generations.

    One trainer is killed at a call of its saves, the next at that call of its drain or saves, the third finishes.
    """
    newest = 0
    for nth in visited(random.Random(f"{SEED} root"), 25):
        faults = rule("change", f"{root}*", "kill", 9, first=nth, count=1)
        newest, code = met(shim, root, faults, newest, nth, early=False)
        newest, _ = met(shim, root, faults, newest, nth, early=True)
        newest, last = met(shim, root, "", newest, nth, early=False)
        assert last == 0
        assert leftovers(root) == []
        assert list(memory_dir.iterdir()) == []
        if code == 0:
            break
    else:
        raise AssertionError("it makes calls without end")


def test_bl_052_sigkill_at_each_change_of_the_memory_tier(shim: Shim, root: Path, memory_dir: Path) -> None:
    """Guards: a region of which a successor believes more than was written, or which it never removes."""
    source = TRAINER.replace("#arm early", "arm()")
    newest = 0
    for nth in visited(random.Random(f"{SEED} memory"), 2):
        child = shim.start(source, root, rule("change", f"{memory_dir}*", "kill", 9, first=nth, count=1))
        code = child.wait()
        assert code in (-9, 0), f"call {nth}: {child.errors()}"
        newest = staged(child, newest)
        if code == 0:
            break
        child = shim.start(TRAINER, root, "")
        line = child.line()
        assert line is not None, f"call {nth}: {child.errors()}"
        assert int(line.split()[1]) in (newest, newest + 1), f"call {nth}: {line}, {newest} was staged"
        child.wait()
        newest = staged(child, newest)
        assert list(memory_dir.iterdir()) == [], f"call {nth}: a region stays"
    else:
        raise AssertionError("it makes calls without end")


def test_an_error_at_each_call_of_the_memory_tier_costs_no_save(shim: Shim, root: Path, memory_dir: Path) -> None:
    """Guards: a memory tier that cannot be had and takes the training with it."""
    source = TRAINER.replace("#arm early", "arm()")
    codes = (errno.EIO, errno.ENOSPC, errno.EACCES)
    for nth in range(1, 200):
        faults = rule("change", f"{memory_dir}*", "errno", codes[nth % 3], first=nth, count=1)
        lines = shim.start(source, root / str(nth), faults).end()
        assert lines[:5] == ["found 0", "staged 1", "staged 2", "staged 3", "staged 4"]
        assert (root / str(nth) / "z" / "complete.txt").exists()
        if int(lines[5].split()[1]) < nth:
            break
        for left in memory_dir.iterdir():  # where its removal was what failed
            left.unlink()
    else:
        raise AssertionError("it makes calls without end")
