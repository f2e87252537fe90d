"""Where this process stands among those that torchrun or srun started for one run."""

import os
from collections.abc import Mapping
from typing import NamedTuple

from quanterr.errors import UsageError


class Process(NamedTuple):
    """Of ``world`` processes number ``rank``; on its machine of ``local_world`` number ``local_rank``."""

    rank: int
    world: int
    local_rank: int
    local_world: int


# As torchrun sets them, and as srun does, which binds each process to cores of its own.
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
SRUN = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "")


def this_process(environment: Mapping[str, str] = os.environ) -> Process:
    """What the environment says; a process that stands alone is rank 0 of 1.

    srun counts only where MASTER_ADDR says where the processes of a run meet.

    Raises:
        UsageError: variables that are no numbers, or contradict each other.
    """
    is_srun = "WORLD_SIZE" not in environment and "MASTER_ADDR" in environment and SRUN[1] in environment
    names = SRUN if is_srun else TORCHRUN
    try:
        found = Process(*(int(environment.get(name, default)) for name, default in zip(names, "0101", strict=True)))
    except ValueError as error:
        raise UsageError(f"{', '.join(filter(None, names))} must be whole numbers: {error}") from error
    if not 0 <= found.rank < found.world:
        raise UsageError(f"{names[0]} {found.rank} is not below {names[1]} {found.world}")
    return found


def tasks_apart(environment: Mapping[str, str] = os.environ) -> int:
    """How many tasks srun started that do not know where to meet, as the first of them sees it; otherwise 0."""
    if {"WORLD_SIZE", "MASTER_ADDR"} & environment.keys() or environment.get("SLURM_PROCID") != "0":
        return 0
    tasks = environment.get("SLURM_STEP_NUM_TASKS", "")
    return int(tasks) if tasks.isdecimal() and int(tasks) > 1 else 0
