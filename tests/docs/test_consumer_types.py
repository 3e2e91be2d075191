"""What a type checker says of a script that uses relight: right calls pass `mypy --strict`, mistakes are found."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="mypy is not installed")

GOOD = """
from pathlib import Path

import nebulaml
import relight
import torch_nebula


class Sampler:
    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


with relight.Checkpointer(Path("runs"), keep=3, options=relight.Options(memory_keep=1)) as ckpt:
    state = relight.TrainState(sampler=Sampler(), rng=False)
    start: int = ckpt.resume(state, allow=[Sampler, "package.Class"])
    handle: relight.Handle = ckpt.save(start + 1, state, files={"x.pt": 1}, meta={"loss": 0.5})
    handle.add_done_callback(lambda done: print(done.tag, done.stall_s))
    folder: str = handle.result(timeout=3)
    newest: relight.Checkpoint | None = ckpt.latest()
    step: int | None = None if newest is None else newest.step
    sampler = ckpt.load(3, "sampler.pt", map_location="cpu", allow=[Sampler])
relight.save({"a": 1}, "a.pt")
again = relight.load(Path("a.pt"), allow=[Sampler])
version: str = relight.__version__


def first_row(view: relight.View) -> list[float]:
    return [float(number) for number in view["w"][0]]


with relight.open("a.pt") as opened:
    row = first_row(opened)

relight.nebula.init("runs")
nebulaml.init(persistent_storage_path=("runs",), persistent_time_interval=2)
checkpoint = nebulaml.Checkpoint("global_step1", -2)
checkpoint.save("model.pt", {})
accepted: bool = checkpoint.commit()
latest = torch_nebula.get_latest_checkpoint(persist_path="runs")
tag: str | None = None if latest is None else latest.tag
path: str | None = nebulaml.get_latest_checkpoint_path("model.pt", "runs")
first: str = nebulaml.list_checkpoints()[0]["tag"]
"""

# Each line alone is a mistake.
BAD = """
relight.Chekpointer("runs")
misspelt: str = relight.sav
relight.Checkpointer("runs", kep=3)
relight.Checkpointer("runs", keep="3")
relight.Checkpointer("runs", on_error="explode")
relight.Options(torn_check="never")
relight.Options(memory_keep="2")
ckpt.save()
ckpt.save(1.5, {})
ckpt.resume({})
missing: int = ckpt.latest().step
done: bool = ckpt.save(1, {})
nebulaml.Checkpoint("a", "2")
nebulaml.get_latest_checkpoint().load("a")
nebulaml.list_checkpoints()[0]["tog"]
""".strip().splitlines()


def messages(code: str, folder: Path) -> list[str]:
    """What `mypy --strict` finds, without a look into torch (its types are no business of ours, and take a minute)."""
    (folder / "consumer.py").write_text(code)
    (folder / "mypy.ini").write_text("[mypy]\nstrict = True\n[mypy-torch.*,numpy.*]\nfollow_imports = skip\n")
    command = [sys.executable, "-m", "mypy", "--config-file=mypy.ini", "--cache-dir=cache", "consumer.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode in (0, 1) and not done.stderr, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if ": error:" in line]


def test_a_right_script_passes(tmp_path: Path) -> None:
    """Guards: arguments that work and are documented, and that the annotations refuse."""
    assert messages(GOOD, tmp_path) == []


def test_each_mistake_is_found(tmp_path: Path) -> None:
    """Guards: names and arguments that are wrong, and that the annotations let pass."""
    lines = ["import nebulaml", "import relight", 'ckpt = relight.Checkpointer("runs")', *BAD]
    found = {int(line.split(":")[1]) for line in messages("\n".join(lines) + "\n", tmp_path)}
    assert [lines[number] for number in range(3, len(lines)) if number + 1 not in found] == []
