"""What the training scripts share: a byte-level GPT, its data and one training step. It knows nothing of checkpoints.

Owns: the model, the corpus (the Python standard library's own sources), the sampler, the step, the fingerprint.
Must not: import relight; save or load anything.
Invariant: a run is a function of its seed and of what `run.parts()` and the three random generators hold. That
is what makes "bit for bit the same after the kill" a test: whoever forgets one of them gets other losses.
"""

import hashlib
import pickle
import random
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

WIDTH, LAYERS, HEADS = 384, 6, 6  # 10.8 million parameters: with AdamW, 130 MB of state
CONTEXT, BATCH = 128, 6
CORPUS_BYTES = 4 << 20
SEED = 1337


class Block(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.project = nn.Linear(WIDTH, WIDTH)
        self.norm_mlp = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.drop = nn.Dropout(0.05)  # draws from torch's generator, so a resume must restore it

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, context, WIDTH] to the same."""
        batch, context, _ = x.shape
        q, k, v = self.qkv(self.norm_attention(x)).view(batch, context, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.project(mixed.transpose(1, 2).reshape(batch, context, WIDTH)))
        return x + self.drop(self.mlp(self.norm_mlp(x)))


class GPT(nn.Module):
    """Predicts the next byte. The output layer is tied to the embedding, as checkpoints of real models have it."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(256, WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 256, bias=False)
        nn.init.normal_(self.token.weight, std=0.02)
        self.head.weight = self.token.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """[batch, context] bytes to [batch, context, 256] logits."""
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class WindowSampler:
    """Windows of the corpus in a random order that is drawn anew each epoch; it can say and restore where it is."""

    def __init__(self, windows: int) -> None:
        self.windows, self.epoch, self.position = windows, 0, 0
        self._order = self._shuffled()

    def _shuffled(self) -> np.ndarray:
        return np.random.default_rng((SEED, self.epoch)).permutation(self.windows)

    def take(self, count: int) -> np.ndarray:
        """The next `count` window numbers."""
        if self.position + count > self.windows:
            self.epoch, self.position = self.epoch + 1, 0
            self._order = self._shuffled()
        self.position += count
        return self._order[self.position - count : self.position]

    def state_dict(self) -> dict[str, int]:
        """Where in which epoch."""
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Goes there."""
        self.epoch, self.position = state["epoch"], state["position"]
        self._order = self._shuffled()


def corpus() -> np.ndarray:
    """The first CORPUS_BYTES of the standard library's modules, in the order of their names."""
    library = Path(sysconfig.get_path("stdlib"))
    text, size = [], 0
    for path in sorted(library.glob("*.py")) + sorted(library.glob("[a-z]*/*.py")):
        if path.parts[-2] in ("site-packages", "test", "idlelib"):
            continue
        text.append(path.read_bytes())
        size += len(text[-1])
        if size >= CORPUS_BYTES:
            break
    return np.frombuffer(b"".join(text)[:CORPUS_BYTES], dtype=np.uint8)


class Run:
    """A training run: model, AdamW, schedule, sampler, and the step that uses all three random generators."""

    def __init__(self, threads: int = 2) -> None:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(True)
        random.seed(SEED)
        np.random.seed(SEED)
        torch.manual_seed(SEED)
        self.corpus = corpus()
        self.model = GPT()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda n: min(1.0, (n + 1) / 10) * 0.995**n)
        self.sampler = WindowSampler(len(self.corpus) // CONTEXT - 2)

    def parts(self) -> dict[str, Any]:
        """Everything that has a `state_dict`."""
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler, "sampler": self.sampler}

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets, [BATCH, CONTEXT] each; shifted by NumPy's generator, sometimes masked by Python's."""
        starts = self.sampler.take(BATCH) * CONTEXT + np.random.randint(0, CONTEXT, BATCH)
        rows = np.stack([self.corpus[start : start + CONTEXT + 1] for start in starts]).astype(np.int64)
        inputs, targets = torch.from_numpy(rows[:, :-1].copy()), torch.from_numpy(rows[:, 1:].copy())
        if random.random() < 0.25:
            inputs[:, random.randrange(CONTEXT)] = 0
        return inputs, targets

    def step(self) -> float:
        """One optimizer step; the loss."""
        inputs, targets = self.batch()
        loss = F.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.scheduler.step()
        return loss.item()

    def fingerprint(self) -> dict[str, str]:
        """SHA-256 of each part and of each random generator: equal only if every bit is."""
        held = {name: part.state_dict() for name, part in self.parts().items()}
        held["rng.python"] = random.getstate()
        held["rng.numpy"] = np.random.get_state()
        held["rng.torch"] = torch.get_rng_state()
        return {name: _digest(value) for name, value in held.items()}


def state_bytes(run: Run) -> int:
    """Bytes of all tensors of the model (tied ones once) and the optimizer."""
    tensors = {t.data_ptr(): t.nbytes for t in run.model.state_dict().values()}
    moments = sum(v.nbytes for s in run.optimizer.state.values() for v in s.values() if torch.is_tensor(v))
    return sum(tensors.values()) + moments


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, bytes]]:
    if torch.is_tensor(value):
        yield f"{path}:{value.dtype}:{tuple(value.shape)}", value.detach().contiguous().numpy().tobytes()
    elif isinstance(value, np.ndarray):
        yield f"{path}:{value.dtype}:{value.shape}", value.tobytes()
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, f"{path}/{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}/{index}")
    else:
        yield f"{path}:{type(value).__name__}", pickle.dumps(value, protocol=4)


def _digest(value: Any) -> str:
    whole = hashlib.sha256()
    for name, data in _leaves(value):
        whole.update(name.encode() + b"\0" + data)
    return whole.hexdigest()


if __name__ == "__main__":
    import time

    trial = Run()
    print(f"{sum(p.numel() for p in trial.model.parameters()):,} parameters, {len(trial.corpus):,} bytes of source")
    for number in range(int(sys.argv[1]) if len(sys.argv) > 1 else 5):
        started = time.perf_counter()
        print(f"step {number + 1} loss {trial.step():.4f} {time.perf_counter() - started:.2f} s")
    print(f"{state_bytes(trial) / 1e6:.0f} MB of state")
