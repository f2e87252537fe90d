"""The rank of this process among the processes that torchrun or srun started for one run."""

import os
from collections.abc import Mapping
from typing import NamedTuple

from quanterr.errors import UsageError


class Process(NamedTuple):
    """Process ``rank`` of ``world``, which is ``local_rank`` of ``local_world`` on this machine; ranks count from 0."""

    rank: int
    world: int
    local_rank: int
    local_world: int


# Environment variables of torchrun and of srun. srun binds processes to their cores itself, so no local world is
# needed.
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
SRUN = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "")


def this_process(environment: Mapping[str, str] = os.environ) -> Process:
    """Return the rank of this process from its environment; a single process is rank 0 of 1.

    srun's variables are used only if MASTER_ADDR is set, as processes cannot reach each other otherwise.

    Raises:
        UsageError: a variable is not a whole number, or the variables contradict each other.
    """
    is_srun = "WORLD_SIZE" not in environment and "MASTER_ADDR" in environment and SRUN[1] in environment
    names = SRUN if is_srun else TORCHRUN
    try:
        process = Process(*(int(environment.get(name, default)) for name, default in zip(names, "0101", strict=True)))
    except ValueError as error:
        raise UsageError(f"{', '.join(filter(None, names))} must be whole numbers: {error}") from error
    if not 0 <= process.rank < process.world:
        raise UsageError(f"{names[0]} {process.rank} is not below {names[1]} {process.world}")
    return process


def count_unconnected_tasks(environment: Mapping[str, str] = os.environ) -> int:
    """Return the number of srun tasks if MASTER_ADDR is missing, so that each would run alone; 0 on all but task 0."""
    if {"WORLD_SIZE", "MASTER_ADDR"} & environment.keys() or environment.get("SLURM_PROCID") != "0":
        return 0
    tasks = environment.get("SLURM_STEP_NUM_TASKS", "")
    return int(tasks) if tasks.isdecimal() and int(tasks) > 1 else 0
