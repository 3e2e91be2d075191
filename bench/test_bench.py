"""pytest-benchmark: small states, where the cost of a call shows. `make bench`, or pytest bench --benchmark-only.

No time is asserted. Each way checks that what it wrote is there.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import relight
import states
import torch

STATES = {"1 KB dict": states.small, "5000 tensors of 256 B": states.tiny_tensors, "32 MiB": lambda: _training()}


def _training() -> dict[str, Any]:
    model, optimizer = states.training(32)
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


@pytest.fixture(params=list(STATES), scope="module")
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def state(kind: str) -> Any:
    return STATES[kind]()


def torch_save_durably(state: Any, path: Path) -> None:
    """What relight.save promises, made of torch.save: temporary name, fsync, rename, fsync of the folder."""
    partial = path.with_suffix(".partial")
    with open(partial, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def test_save_torch(benchmark: Any, state: Any, kind: str, tmp_path: Path) -> None:
    benchmark.group = f"save durably: {kind}"
    benchmark(torch_save_durably, state, tmp_path / "a.pt")
    assert (tmp_path / "a.pt").exists()


def test_save_relight(benchmark: Any, state: Any, kind: str, tmp_path: Path) -> None:
    benchmark.group = f"save durably: {kind}"
    benchmark(relight.save, state, tmp_path / "a.pt")
    assert torch.load(tmp_path / "a.pt").keys() == state.keys()


def test_stall_relight(benchmark: Any, state: Any, kind: str, tmp_path: Path) -> None:
    benchmark.group = f"save durably: {kind}"
    with relight.Checkpointer(tmp_path, keep=1) as ckpt:
        handles = []

        def stage() -> None:
            handles.append(ckpt.save(len(handles), state))

        def settle() -> None:
            ckpt.wait()  # a save into an empty queue: the stall of the copy, not of the disk

        benchmark.pedantic(stage, setup=settle, rounds=10, warmup_rounds=2)
        handles[-1].result()


def test_load_torch(benchmark: Any, state: Any, kind: str, tmp_path: Path) -> None:
    benchmark.group = f"load, warm: {kind}"
    torch.save(state, tmp_path / "a.pt")
    assert benchmark(torch.load, tmp_path / "a.pt").keys() == state.keys()


def test_load_relight(benchmark: Any, state: Any, kind: str, tmp_path: Path) -> None:
    benchmark.group = f"load, warm: {kind}"
    relight.save(state, tmp_path / "a.pt")
    assert benchmark(relight.load, tmp_path / "a.pt").keys() == state.keys()
