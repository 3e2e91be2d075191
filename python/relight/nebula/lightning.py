"""Nebula's names for PyTorch Lightning.

Owns: that the names exist wherever `import nebulaml` works, and say what is missing when they are used.
Must not: import Lightning or DeepSpeed.
"""

from importlib.util import find_spec
from typing import Any, ClassVar, Final, NoReturn

_LIGHTNING: Final = ("lightning", "pytorch_lightning")


class _NotBuilt:
    needs_deepspeed: ClassVar[bool] = False
    instead: ClassVar[str] = ""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._refuse()

    @classmethod
    def _refuse(cls) -> NoReturn:
        name = cls.__name__
        if not any(find_spec(package) for package in _LIGHTNING):
            raise ModuleNotFoundError(
                f"{name} needs PyTorch Lightning, which is not installed; pip install lightning", name=_LIGHTNING[0]
            )
        if cls.needs_deepspeed and find_spec("deepspeed") is None:
            raise ModuleNotFoundError(
                f"{name} needs DeepSpeed, which is not installed; pip install deepspeed", name="deepspeed"
            )
        raise NotImplementedError(f"{name} is not built yet in this version of relight; {cls.instead}")


class NebulaCallback(_NotBuilt):
    """Will stand for Lightning's `ModelCheckpoint`. Not built yet: making one raises, and says what to do."""

    instead = "use Lightning's ModelCheckpoint without a Nebula plug-in, and remove NebulaCheckpointIO from the Trainer"


class NebulaCheckpointIO(_NotBuilt):
    """Will write Lightning's checkpoints in the background. Not built yet: making one raises, and says what to do."""

    instead = "leave it out of Trainer(plugins=...): Lightning then writes its checkpoints itself"


class NebulaDeepspeedStrategy(_NotBuilt):
    """Will run DeepSpeed under Lightning. Not built yet: making one raises, and says what to do."""

    needs_deepspeed = True
    instead = "use Lightning's DeepSpeedStrategy, with the nebula block taken out of its config"
