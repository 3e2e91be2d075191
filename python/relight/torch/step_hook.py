"""A call before each optimizer step of the process.

Owns: the one registration with torch.
Must not: know what the call is for; raise into the training step (the caller's function must not).
"""

from collections.abc import Callable
from typing import Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

_registered: set[Callable[[], None]] = set()


def before_each_step(call: Callable[[], None]) -> None:
    """Calls `call` in the stepping thread before every step of every `torch.optim.Optimizer`, from now on.

    A second registration of the same function does nothing. There is no way back: the hook is process-wide, and cheap.
    """
    if call in _registered:
        return

    def hook(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call()

    register_optimizer_step_pre_hook(hook)
    _registered.add(call)
