import pytest

from quanterr.errors import UsageError
from quanterr.util.processes import Process, count_unconnected_tasks, this_process

SLURM = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, Process(0, 1, 0, 1)),
        ({"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, Process(2, 4, 0, 2)),
        (SLURM | {"MASTER_ADDR": "node0"}, Process(3, 8, 1, 1)),
        (SLURM, Process(0, 1, 0, 1)),  # a batch script, or a run that shares no work with other processes
        (SLURM | {"MASTER_ADDR": "node0", "RANK": "0", "WORLD_SIZE": "2"}, Process(0, 2, 0, 1)),
    ],
)
def test_launcher_variables_are_read(environment, expected):
    assert expected == this_process(environment)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, 0),
        (SLURM | {"SLURM_PROCID": "0"}, 8),
        (SLURM, 0),  # a single variable is enough
        (SLURM | {"SLURM_PROCID": "0", "MASTER_ADDR": "node0"}, 0),
        (SLURM | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, 0),
    ],
)
def test_unconnected_tasks_are_counted_by_the_first(environment, expected):
    assert expected == count_unconnected_tasks(environment)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"WORLD_SIZE": "two"}, "RANK, WORLD_SIZE, .* must be whole numbers"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "RANK 2 is not below WORLD_SIZE 2"),
        ({"WORLD_SIZE": "0"}, "RANK 0 is not below WORLD_SIZE 0"),
    ],
)
def test_contradictory_variables_are_an_error(environment, message):
    with pytest.raises(UsageError, match=message):
        this_process(environment)
