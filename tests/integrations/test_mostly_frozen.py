"""A model of which most never changes: what a save costs, and the way to store the rest once (docs/guide/resume.md)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import relight
import torch

FROZEN, TRAINED = 200_000, 1_000


def mostly_frozen(fill: float) -> torch.nn.ModuleDict:
    model = torch.nn.ModuleDict({"base": torch.nn.Linear(FROZEN, 1), "head": torch.nn.Linear(TRAINED, 1)})
    model["base"].requires_grad_(False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(fill)
    return model


class Trained:
    """The parameters of a model that are trained, as a component of their own."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        frozen = {name for name, parameter in self.model.named_parameters() if not parameter.requires_grad}
        return {name: value for name, value in self.model.state_dict().items() if name not in frozen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state, strict=False)


def bytes_on_disk(root: Path) -> int:
    return sum(path.stat().st_size for path in root.rglob("*") if path.is_file())


def test_bl_186_a_whole_model_is_written_with_each_save(tmp_path: Path) -> None:
    """What the guide says of the plain way: five saves cost five times the model."""
    model = mostly_frozen(1)
    with relight.Checkpointer(tmp_path / "run") as ckpt:
        for step in range(1, 6):
            ckpt.save(step, relight.TrainState(model=model))
    assert 5 * 4 * FROZEN < bytes_on_disk(tmp_path / "run") < 5 * (4 * FROZEN + 64_000)


def test_bl_186_what_never_changes_is_stored_once(tmp_path: Path) -> None:
    """The documented way: the base once, as a file of its own, then only what is trained; `keep` leaves the base."""
    model = mostly_frozen(1)
    root = tmp_path / "run"
    with relight.Checkpointer(root, keep=3) as ckpt:
        relight.save(model["base"].state_dict(), root / "base.pt")
        state = relight.TrainState(trained=Trained(model))
        for step in range(1, 6):
            with torch.no_grad():
                model["head"].get_parameter("weight").fill_(step)
            ckpt.save(step, state)
    assert bytes_on_disk(root) < 4 * FROZEN + 5 * 64_000

    again = mostly_frozen(0)
    with relight.Checkpointer(root, keep=3) as ckpt:
        assert [one.tag for one in ckpt.list()] == ["global_step3", "global_step4", "global_step5"]
        again["base"].load_state_dict(relight.load(root / "base.pt"))
        assert ckpt.resume(relight.TrainState(trained=Trained(again))) == 5
    for ours, theirs in zip(again.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
