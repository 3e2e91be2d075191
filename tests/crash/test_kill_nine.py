"""SIGKILL of real trainers at random moments: nothing torn, nothing staged lost, nothing left lying about.

Each save holds values that follow from its number alone, so any mixture shows. A trainer says a number once its save
has returned; from then on that state may not be lost. The random moment of the kill is the subject of these tests: the
one place where a delay is drawn. The seed is printed, and RELIGHT_TEST_SEED repeats one.
"""

from __future__ import annotations

import os
import random
import select
from collections.abc import Iterator
from pathlib import Path

import pytest
import relight
import torch

from .processes import Child, Zygote

SEED = int(os.environ.get("RELIGHT_TEST_SEED") or random.SystemRandom().randrange(1 << 32))


@pytest.fixture
def draw(request: pytest.FixtureRequest) -> random.Random:
    print(f"RELIGHT_TEST_SEED={SEED}")
    return random.Random(f"{SEED} {request.node.name}")


def kill_at_random(child: Child, draw: random.Random, reports: int, delay_s: float) -> list[str]:
    """Reads up to `reports` further lines, waits for a drawn time and kills; all the lines that it said."""
    lines = []
    for _ in range(draw.randrange(reports + 1)):
        line = child.line()
        assert line is not None, child.errors()
        lines.append(line)
    # it ends early only if the trainer does, which the assertion below notices
    select.select([child.pidfd], [], [], draw.uniform(0, delay_s))
    child.kill()
    assert child.code == -9, child.errors()
    return lines + child.lines_left()


def leftovers(directory: Path) -> list[str]:
    """What may only be there while a save is under way."""
    return sorted(
        path.relative_to(directory).as_posix()
        for path in directory.rglob("*")
        if path.name.startswith(".relight-tmp-") or (path.parent.name == ".relight" and path.name.startswith("g"))
    )


TRAINER = """
size = 1 << 18

def build():
    model = torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.BatchNorm1d(1024))
    optimizer = torch.optim.AdamW(model.parameters())
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    return model, optimizer, relight.TrainState(model=model, optimizer=optimizer, counter=Counter())

class Counter:
    value = 0
    def state_dict(self): return {"value": self.value}
    def load_state_dict(self, state): self.value = state["value"]

def tensors(model, optimizer):
    for value in model.state_dict().values():
        yield value
    for state in optimizer.state.values():
        yield from state.values()

def fill(parts, n):
    model, optimizer, state = parts
    with torch.no_grad():
        for k, tensor in enumerate(tensors(model, optimizer)):
            tensor.fill_(n * 100 + k)
    state.components["counter"].value = n
    torch.manual_seed(n)

def check(parts, n):
    model, optimizer, state = parts
    for k, tensor in enumerate(tensors(model, optimizer)):
        assert bool((tensor == n * 100 + k).all()), ("torn", n, k)
    assert state.components["counter"].value == n
    mine = torch.get_rng_state()
    torch.manual_seed(n)
    assert torch.equal(mine, torch.get_rng_state())
"""


def test_bl_052_a_checkpointer_killed_in_any_moment_loses_nothing_that_was_staged(
    processes: Zygote, root: Path, memory_dir: Path, draw: random.Random
) -> None:
    """Guards: a resume from a torn or older state, a region that is never drained, files of dead writers that stay.

    Each trainer resumes what the one before left, in the tier that has it, and is killed in turn.
    """
    source = (
        TRAINER
        + """
ckpt = relight.Checkpointer(sys.argv[1], keep=2)
parts = build()
start = ckpt.resume(parts[2])
check(parts, start) if start else None
say("resumed", start, ckpt.resumed.tier if start else "none")
for n in range(start + 1, start + 10000):
    fill(parts, n)
    ckpt.save(n, parts[2], blocking=n % 5 == 0)
    fill(parts, 0)  # what is staged is not what the tensors hold now
    say(n)
"""
    )
    newest, tiers = 0, []
    for round_ in range(25):
        child = processes.start(source, root)
        word = child.line()
        assert word is not None, f"round {round_}: {child.errors()}"
        _, start, tier = word.split()
        assert int(start) in (newest, newest + 1), f"round {round_}: resumed {start}, {newest} was staged"
        tiers.append(tier)
        said = kill_at_random(child, draw, reports=5, delay_s=0.05)
        newest = max([int(start), *map(int, said)])
        for manifest in root.glob("*/.relight/manifest.json"):
            for file in manifest.parent.parent.glob("*.pt"):
                torch.load(file, weights_only=True)  # each plain name that is there is a whole file
    assert "memory" in tiers and "none" in tiers
    last = processes.start(
        TRAINER
        + """
with relight.Checkpointer(sys.argv[1], keep=2) as ckpt:
    parts = build()
    start = ckpt.resume(parts[2])
    check(parts, start)
    fill(parts, start + 1)
    ckpt.save(start + 1, parts[2], blocking=True)
    say(start, *(one.step for one in ckpt.list()), *(bool(ckpt.verify(one.tag)) for one in ckpt.list()))
""",
        root,
    )
    start, *facts = last.end()[0].split()
    assert int(start) in (newest, newest + 1)
    assert facts == [start, str(int(start) + 1), "True", "True"]
    assert leftovers(root) == []
    assert list(memory_dir.iterdir()) == [], "a region that nobody needs any more"
    for name in ("model.pt", "optimizer.pt", "counter.pt", "train_state.pt"):
        torch.load(root / f"global_step{int(start) + 1}" / name, weights_only=True)


def test_bl_052_fifty_mb_saved_over_one_tag_in_a_loop(
    processes: Zygote, root: Path, memory_dir: Path, draw: random.Random
) -> None:
    """Guards: a crash between two moves of a generation that shows half of each, or an old one gone too early."""
    source = """
ckpt = relight.Checkpointer(sys.argv[1])
latest = ckpt.latest()
n = 0
if latest:
    assert latest.tag == "last", latest
    a, b = ckpt.load("last", "a.pt"), ckpt.load("last", "b.pt")
    n = int(a["w"][0])
    assert bool((a["w"] == n).all()) and bool((b["w"] == n).all()), "torn"
say("found", n)
while True:
    n += 1
    w = torch.full((3_250_000,), float(n))
    ckpt.save("last", files={"a.pt": {"w": w}, "b.pt": {"w": w}}, step=n)
    w.fill_(-1)
    say(n)
"""
    newest = 0
    for round_ in range(15):
        child = processes.start(source, root)
        word = child.line()
        assert word is not None, f"round {round_}: {child.errors()}"
        found = int(word.split()[1])
        assert found in (newest, newest + 1), f"round {round_}: found {found}, {newest} was staged"
        newest = max([found, *map(int, kill_at_random(child, draw, reports=3, delay_s=0.1))])
    child = processes.start(
        """
with relight.Checkpointer(sys.argv[1]) as ckpt:
    say(int(ckpt.load("last", "b.pt")["w"][-1]))
    ckpt.save("last", files={"a.pt": {"w": -1}, "b.pt": {"w": -1}}, step=0, blocking=True)
    say(bool(ckpt.verify("last")))
""",
        root,
    )
    found, verified = child.end()
    assert int(found) in (newest, newest + 1)
    assert verified == "True"
    assert torch.load(root / "last" / "a.pt", weights_only=True) == {"w": -1}
    assert leftovers(root) == []
    assert list(memory_dir.iterdir()) == []


def test_bl_052_a_blocking_save_to_a_path_killed_at_random_leaves_the_old_or_the_new(
    processes: Zygote, tmp_path: Path, draw: random.Random
) -> None:
    """Guards: a file cut short, an acknowledged save that is not there, temporary files that pile up."""
    source = """
n, w = int(sys.argv[2]), torch.empty(13_000_000)
while True:
    n += 1
    w.fill_(n)
    say("begin", n)
    relight.save({"n": n, "w": w}, sys.argv[1])
    say("done", n)
"""
    path = tmp_path / "model.pt"
    done = 0
    for round_ in range(25):
        child = processes.start(source, path, done)
        begun = done
        for line in kill_at_random(child, draw, reports=4, delay_s=0.1):
            word, number = line.split()
            begun, done = (int(number), done) if word == "begin" else (begun, int(number))
        if path.exists():
            loaded = torch.load(path, weights_only=True)
            assert loaded["n"] in (done, begun), f"round {round_}: {loaded['n']}"
            assert bool((loaded["w"] == loaded["n"]).all()), f"round {round_}: torn"
            done = loaded["n"]
        else:
            assert done == 0
    relight.save({"n": -1}, path)
    assert torch.load(path, weights_only=True) == {"n": -1}
    assert [entry.name for entry in tmp_path.iterdir() if entry.name != "memory"] == ["model.pt"]


def test_bl_052_a_save_async_to_a_path_killed_at_random_is_finished_by_the_next_process(
    processes: Zygote, tmp_path: Path, memory_dir: Path, draw: random.Random
) -> None:
    """Guards: a staged file that nobody writes, or an older image that is drained over a newer file."""
    source = """
path = sys.argv[1]
n = 0
try:
    loaded = relight.load(path)
    n = loaded["n"]
    assert bool((loaded["w"] == n).all()), "torn"
except relight.CheckpointNotFound:
    pass
say("found", n)
while True:
    n += 1
    relight.save_async({"n": n, "w": torch.full((1_000_000,), float(n))}, path)
    say(n)
"""
    path = tmp_path / "model.pt"
    newest = 0
    for round_ in range(25):
        child = processes.start(source, path)
        word = child.line()
        assert word is not None, f"round {round_}: {child.errors()}"
        found = int(word.split()[1])
        assert found in (newest, newest + 1), f"round {round_}: found {found}, {newest} was staged"
        newest = max([found, *map(int, kill_at_random(child, draw, reports=6, delay_s=0.03))])
    child = processes.start('say(relight.load(sys.argv[1])["n"])', path)
    assert int(child.end()[0]) in (newest, newest + 1)
    on_disk = torch.load(path, weights_only=True)
    assert on_disk["n"] in (newest, newest + 1)
    assert bool((on_disk["w"] == on_disk["n"]).all())
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.pt"]
    assert list(memory_dir.iterdir()) == []


def test_bl_052_through_nebula_with_a_new_tag_each_time(
    processes: Zygote, root: Path, memory_dir: Path, draw: random.Random
) -> None:
    """Guards: a tag that has one of its two partitions, or a latest checkpoint that is not the newest complete one."""
    source = """
import nebulaml as nm
nm.init(persistent_storage_path=sys.argv[1])
found = nm.get_latest_checkpoint()
n = 0 if found is None else found.load("n")
if n:
    assert found.tag == f"step{n}", (found.tag, n)
    assert bool((found.load("w") == n).all())
say("found", n)
while True:
    n += 1
    checkpoint = nm.Checkpoint(f"step{n}", 2)
    checkpoint.save("w", torch.full((300_000,), float(n)))
    say("half", n)
    checkpoint.save("n", n)
    say("whole", n)
"""
    newest = 0
    for round_ in range(20):
        child = processes.start(source, root)
        word = child.line()
        assert word is not None, f"round {round_}: {child.errors()}"
        found = int(word.split()[1])
        assert found in (newest, newest + 1), f"round {round_}: found {found}, {newest} was whole"
        said = [line.split() for line in kill_at_random(child, draw, reports=9, delay_s=0.03)]
        newest = max([found, *(int(number) for word, number in said if word == "whole")])
    child = processes.start(
        """
import nebulaml as nm
nm.init(persistent_storage_path=sys.argv[1])
say(nm.get_latest_checkpoint().load("n"))
nm.flush_persistence()
""",
        root,
    )
    last = int(child.end()[0])
    assert last in (newest, newest + 1)
    for n in range(1, last + 1):
        assert torch.load(root / f"step{n}" / "n", weights_only=True) == n
        assert bool((torch.load(root / f"step{n}" / "w", weights_only=True) == n).all())
        assert (root / f"step{n}" / "complete.txt").exists()
    assert leftovers(root) == []
    assert list(memory_dir.iterdir()) == []


@pytest.fixture
def reader(processes: Zygote, root: Path) -> Iterator[Child]:
    """Polls the hint file and the newest checkpoint until it is told to stop."""
    source = """
import json
from pathlib import Path
root = Path(sys.argv[1])
import select
polls, newest, seen_hint = 0, 0, False
say("polling")
with relight.Checkpointer(root) as ckpt:
    while not select.select([0], [], [], 0)[0]:
        polls += 1
        try:
            hint = (root / "latest").read_text().strip()
            seen_hint = True
        except FileNotFoundError:
            assert not seen_hint, "latest was there and is missing"
            hint = None
        if hint is not None:
            # keep=3: what the hint named may be retired while it is read only if two newer ones were committed since
            try:
                state = ckpt.load(hint)
                assert bool((state["w"] == state["n"]).all()), "torn"
                assert hint == f"global_step{state['n']}"
            except relight.CheckpointNotFound:
                now = (root / "latest").read_text().strip()
                assert int(now[11:]) >= int(hint[11:]) + 2, ("latest named a tag that cannot be loaded", hint, now)
        found = ckpt.latest()
        if found is not None:
            assert found.step >= newest, ("latest went back", newest, found.step)
            newest = found.step
say(polls, newest)
"""
    child = processes.start(source, root)
    child.expect("polling")
    yield child


def test_bl_056_a_reader_of_latest_never_meets_a_checkpoint_that_cannot_be_loaded(
    processes: Zygote, root: Path, memory_dir: Path, reader: Child, draw: random.Random
) -> None:
    """Guards: the hint file removed and written anew, or written before the commit; a newest tag that goes back."""
    source = """
ckpt = relight.Checkpointer(sys.argv[1], keep=3)
found = ckpt.latest()
n = found.step if found else 0
say("found", n)
while True:
    n += 1
    ckpt.save(n, {"n": n, "w": torch.full((200_000,), float(n))}, blocking=n % 3 == 0)
    say(n)
"""
    newest = 0
    for round_ in range(15):
        child = processes.start(source, root)
        word = child.line()
        assert word is not None, f"round {round_}: {child.errors()}"
        found = int(word.split()[1])
        assert found in (newest, newest + 1), f"round {round_}: found {found}, {newest} was staged"
        newest = max([found, *map(int, kill_at_random(child, draw, reports=8, delay_s=0.03))])
    reader.go_on()
    polls, seen = map(int, reader.end()[-1].split())
    assert polls > 10 and 0 < seen <= newest + 1
    (root / "latest").unlink(missing_ok=True)
    child = processes.start("with relight.Checkpointer(sys.argv[1]) as c: say(c.latest().step, c.load()['n'])", root)
    step, value = child.end()[-1].split()
    assert step == value and int(step) in (newest, newest + 1)


def test_bl_055_two_processes_with_two_threads_each_save_to_one_path(
    processes: Zygote, tmp_path: Path, draw: random.Random
) -> None:
    """Guards: two writers in one temporary file, and a dead writer's that blocks or is published."""
    path = tmp_path / "shared.pt"
    # a writer dies in mid-save: its temporary file lies about
    dead = processes.start(
        """
w = torch.zeros(30_000_000)
say("go")
while True:
    relight.save({"who": "dead", "n": 1, "w": w}, sys.argv[1])
""",
        path,
    )
    dead.expect("go")
    kill_at_random(dead, draw, reports=0, delay_s=0.3)
    source = """
import threading
who = sys.argv[2]
errors = []
def work(k):
    for n in range(50):
        size = 1 + (n * 7919 + k * 104729 + ord(who) * 31) % 200_000
        try:
            relight.save({"who": who, "k": k, "n": n, "size": size, "w": torch.full((size,), float(n))}, sys.argv[1])
        except relight.CommitConflict as error:
            errors.append(error)
threads = [threading.Thread(target=work, args=(k,)) for k in range(2)]
for t in threads: t.start()
for t in threads: t.join()
say("done", len(errors))
"""
    writers = [processes.start(source, path, who) for who in "ab"]
    reader = processes.start(
        """
import select
reads = 0
while not select.select([0], [], [], 0)[0]:
    try:
        found = relight.load(sys.argv[1])
    except relight.CheckpointNotFound:
        assert reads == 0, "the name was there and is gone"
        continue
    if found["who"] != "dead":
        assert found["w"].numel() == found["size"] and bool((found["w"] == found["n"]).all()), "mixture"
    reads += 1
say(reads)
""",
        path,
    )
    for writer in writers:
        assert writer.end() == ["done 0"]
    reader.go_on()
    assert int(reader.end()[0]) > 0
    final = torch.load(path, weights_only=True)
    assert final["n"] == 49 and bool((final["w"] == 49).all()) and final["w"].numel() == final["size"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["shared.pt"]


def test_bl_055_two_processes_with_two_threads_each_save_to_one_tag(processes: Zygote, root: Path) -> None:
    """Guards: a manifest that names files of two generations by one name, or a writer that removes another's."""
    source = """
import threading
who = sys.argv[2]
refused = []
def work(k):
    with relight.Checkpointer(sys.argv[1]) as ckpt:
        for n in range(12):
            size = 1 + (n * 7919 + k * 104729 + ord(who) * 31) % 200_000
            mine = (who, k, n, size)
            part = {"mine": mine, "w": torch.full((size,), float(n))}
            try:
                ckpt.save("shared", files={"a.pt": part, "b.pt": part}, step=n, blocking=True)
            except relight.CommitConflict as error:
                refused.append(error)
threads = [threading.Thread(target=work, args=(k,)) for k in range(2)]
for t in threads: t.start()
for t in threads: t.join()
say("done", len(refused))
"""
    writers = [processes.start(source, root, who) for who in "ab"]
    for writer in writers:
        assert writer.end()[0].startswith("done ")
    check = processes.start(
        """
with relight.Checkpointer(sys.argv[1]) as ckpt:
    a, b = ckpt.load("shared", "a.pt"), ckpt.load("shared", "b.pt")
    assert a["mine"] == b["mine"], (a["mine"], b["mine"])
    for part in (a, b):
        assert part["w"].numel() == part["mine"][3] and bool((part["w"] == part["mine"][2]).all())
    assert ckpt.verify("shared")
""",
        root,
    )
    check.end()
    for name in ("a.pt", "b.pt"):
        torch.load(root / "shared" / name, weights_only=True)
    assert leftovers(root) == []
