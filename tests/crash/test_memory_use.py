"""How much memory a save takes beside the state: watched from outside the engine, by the kernel's own counters."""

from __future__ import annotations

from pathlib import Path

import pytest

from .processes import Zygote

MIB = 1 << 20

PREAMBLE = """
MIB = 1 << 20
STATE = 192 * MIB  # the case has 1 GB: what counts is what grows with it

def status(name):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name + ":"))

def above(work):
    "The peak of resident memory during `work`, shared memory included, above what was there before."
    with open("/proc/self/clear_refs", "w") as refs:
        refs.write("5")  # resets the peak
    before = status("VmRSS")
    work()
    return status("VmHWM") - before

def tier():
    "What the memory tier occupies, from the outside."
    directory = os.environ["RELIGHT_MEMORY_DIR"]
    return sum(os.stat(os.path.join(directory, name)).st_blocks * 512 for name in os.listdir(directory))

path = sys.argv[1]
os.makedirs(path)
state = {f"w{n}": torch.full((12 * MIB,), float(n)) for n in range(4)}  # 4 x 48 MiB
assert sum(w.nbytes for w in state.values()) == STATE
relight.save({"warm": 1}, path + "/warm.pt")  # imports, copy threads
"""


def run(processes: Zygote, source: str, *arguments: object) -> list[int]:
    return [int(word) for word in " ".join(processes.start(PREAMBLE + source, *arguments).end()).split()]


def test_bl_184_a_blocking_save_takes_a_small_constant_of_memory(processes: Zygote, root: Path) -> None:
    """Guards: an image of the whole state beside the state."""
    peak, tier = run(processes, 'say(above(lambda: relight.save(state, path + "/a.pt")), tier())', root)
    assert peak < 40 * MIB
    assert tier == 0


def test_bl_184_an_async_save_takes_one_copy_within_the_budget(processes: Zygote, root: Path) -> None:
    """Guards: a second copy beside that of the memory tier, or a budget that several saves in flight pass."""
    peak, tier, tiers = run(
        processes,
        """
budget = 300 * MIB
ckpt = relight.Checkpointer(path + "/run", options=relight.Options(memory_bytes_max=budget))
say(above(lambda: ckpt.save(1, state)), tier())
most = 0
def more():
    global most
    for n in range(2, 6):
        handle = ckpt.save(n, state)
        assert not handle.streamed
        most = max(most, tier())
more()
ckpt.wait()
assert [one.step for one in ckpt.list()] == [1, 2, 3, 4, 5]
say(max(most, tier()))
""",
        root,
    )
    assert peak < (192 + 40) * MIB
    assert 192 * MIB <= tier < (192 + 16) * MIB
    assert tiers <= (300 + 1) * MIB, "the budget holds with five saves in flight (the header page comes on top)"


@pytest.mark.parametrize("how", ["option", "environment"])
def test_bl_184_a_checkpoint_larger_than_the_budget_streams_through(processes: Zygote, root: Path, how: str) -> None:
    """Guards: a state that cannot be saved because the memory tier is small, or that passes its budget."""
    peak, tier, streamed, good = run(
        processes,
        """
if sys.argv[2] == "option":
    options = relight.Options(memory_bytes_max=64 * MIB)
else:
    os.environ["RELIGHT_MEMORY_BYTES_MAX"] = str(64 * MIB)
    options = None
ckpt = relight.Checkpointer(path + "/run", options=options)
handle = None
def save():
    global handle
    handle = ckpt.save(1, state)
    handle.result()
say(above(save), tier(), int(handle.streamed))
loaded = ckpt.load(1)
say(int(all(torch.equal(loaded[name], state[name]) for name in state) and bool(ckpt.verify(1))))
""",
        root,
        how,
    )
    assert peak < (64 + 40) * MIB
    assert tier <= 65 * MIB
    assert (streamed, good) == (1, 1)


def test_bl_184_files_of_one_checkpoint_that_fit_one_by_one_but_not_together(processes: Zygote, root: Path) -> None:
    """Guards: a deadlock of a share that waits for room which only its own files hold."""
    peak, tier, good = run(
        processes,
        """
ckpt = relight.Checkpointer(path + "/run", options=relight.Options(memory_bytes_max=110 * MIB))
files = {f"{name}.pt": w for name, w in state.items()}
say(above(lambda: ckpt.save(1, files=files).result()), tier())
say(int(all(torch.equal(ckpt.load(1, f"{name}.pt"), w) for name, w in state.items()) and bool(ckpt.verify(1))))
""",
        root,
    )
    assert peak < (110 + 40) * MIB
    assert tier <= 111 * MIB
    assert good == 1
