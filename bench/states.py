"""The states that are measured: a GPT-like model with AdamW, many tiny tensors, a small dict."""

import torch
from torch import nn


class Gpt(nn.Module):
    """Weights in the shapes of a GPT; it never runs."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.token = nn.Embedding(8192, width)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm": nn.LayerNorm(width),
                    "qkv": nn.Linear(width, 3 * width),
                    "project": nn.Linear(width, width),
                    "up": nn.Linear(width, 4 * width),
                    "down": nn.Linear(4 * width, width),
                }
            )
            for _ in range(layers)
        )


def training(size_mib: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its AdamW, whose parameters and moments together have about this many MiB."""
    torch.manual_seed(0)
    parameters = size_mib * 2**20 / 12  # float32, and two moments
    width = 1024 if size_mib >= 256 else 256
    layers = max(1, round((parameters - 8192 * width) / (12 * width**2)))
    model = Gpt(width, layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return model, optimizer


def tiny_tensors(count: int = 5000) -> dict[str, torch.Tensor]:
    """Tensors of 256 bytes each."""
    return {f"layer.{i}.bias": torch.full((64,), float(i)) for i in range(count)}


def small() -> dict[str, object]:
    """A dict of about 1 KB."""
    return {"step": 12, "lr": 0.1, "values": torch.arange(200)}


def state_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes of all tensors."""
    moments = sum(v.nbytes for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v))
    return sum(t.nbytes for t in model.state_dict().values()) + moments
