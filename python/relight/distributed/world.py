"""Which rank of how many this process is.

Owns: the order in which that is looked up (process group, launcher's variables, else one process).
Must not: import torch (a process group exists only where the caller imported it); run a collective.
Invariant: asking changes nothing and never blocks.
"""

import os
import sys
from dataclasses import dataclass

from relight.exceptions import InvalidArgument

# Rank and size, per launcher. Both must be set: one alone (as SLURM sets in a plain `salloc` shell) says nothing.
_LAUNCHERS: tuple[tuple[str, str], ...] = (
    ("RANK", "WORLD_SIZE"),  # torchrun, DeepSpeed, Azure Machine Learning
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),  # MPICH, Intel MPI
    ("HOROVOD_RANK", "HOROVOD_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),  # set by srun in each task, not in the batch shell
)


@dataclass(frozen=True, slots=True)
class World:
    """This process among those that save together."""

    rank: int
    world_size: int
    source: str
    """Where this was found: `torch.distributed`, the launcher's variables, or `one process`."""


def find_world() -> World:
    """This process's rank and world, now.

    Raises:
        InvalidArgument: the launcher's variables are no numbers, or contradict each other.
    """
    # Not `import torch.distributed`: a group can only be running where it was imported already.
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return World(distributed.get_rank(), distributed.get_world_size(), "torch.distributed")
    for rank_name, size_name in _LAUNCHERS:
        rank_text, size_text = os.environ.get(rank_name), os.environ.get(size_name)
        if rank_text and size_text:
            return _from_variables(rank_name, rank_text, size_name, size_text)
    return World(0, 1, "one process")


def _from_variables(rank_name: str, rank_text: str, size_name: str, size_text: str) -> World:
    source = f"{rank_name} and {size_name}"
    try:
        rank, world_size = int(rank_text), int(size_text)
    except ValueError:
        raise InvalidArgument(
            f"{rank_name}={rank_text!r} and {size_name}={size_text!r} are not both numbers; correct or unset them"
        ) from None
    if not 0 <= rank < world_size:
        raise InvalidArgument(f"{rank_name}={rank} is not a rank of {size_name}={world_size}; correct or unset them")
    return World(rank, world_size, source)


def require_one_process(world: World, what: str) -> None:
    """Refuses a world of several processes, which `what` cannot serve yet.

    Raises:
        InvalidArgument: there is more than one process.
    """
    if world.world_size > 1:
        raise InvalidArgument(
            f"{what} in several processes is not built yet: this is rank {world.rank} of {world.world_size} "
            f"(from {world.source}). Save on one rank only, or give each rank a root of its own; either way as "
            "relight.Checkpointer(root, rank=0, world_size=1)",
            rank=world.rank,
        )
