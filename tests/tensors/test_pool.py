"""Threads that share tasks: order, buffers, errors, and what is begun."""

import threading
import time
from itertools import count

import pytest
import torch

from quanterr.tensors.pool import map_in_threads


def test_results_come_in_the_order_of_the_tasks():
    def work(task, _):
        time.sleep(0.002 * (7 - task) if task < 7 else 0)  # so that tasks finish in the opposite order
        return task

    with map_in_threads(work, range(50), [None] * 3) as results:
        assert [*range(50)] == list(results)


def test_no_buffers_are_used_by_two_threads():
    everyone = threading.Barrier(3)

    def work(_, buffers):
        everyone.wait(10)
        buffers.add(threading.get_ident())

    buffers = [set(), set(), set()]
    with map_in_threads(work, range(9), buffers) as results:
        list(results)

    assert [1, 1, 1] == [len(users) for users in buffers]
    assert 3 == len(set.union(*buffers))


def test_work_is_in_inference_mode_without_threads_of_torch():
    with map_in_threads(
        lambda *_: (torch.is_inference_mode_enabled(), torch.get_num_threads()), [0], [None]
    ) as results:
        assert [(True, 1)] == list(results)


def test_no_task_is_begun_after_an_error_though_an_earlier_task_goes_on():
    begun, failing = [], threading.Event()

    def work(task, _):
        begun.append(task)
        if task == 1:
            failing.set()
            raise KeyError(task)
        failing.wait(10)
        time.sleep(0.2)
        return task

    with map_in_threads(work, range(1000), [None] * 2) as results:
        assert 0 == next(results)
        with pytest.raises(KeyError, match="1"):
            next(results)

    assert [0, 1] == sorted(begun)


def test_endless_tasks_are_begun_as_their_results_are_taken():
    begun = []

    with map_in_threads(lambda task, _: begun.append(task), count(), [None] * 2, ahead=4) as results:
        for _ in range(20):
            next(results)

    assert 20 <= len(begun) <= 24


def test_no_task_is_begun_after_the_context():
    begun, ended = [], []

    def work(task, _):
        begun.append(task)
        time.sleep(0.005)
        ended.append(task)

    with map_in_threads(work, range(1000), [None] * 2) as results:
        next(results)

    assert sorted(begun) == sorted(ended)
    assert len(begun) < 500


def test_waiting_is_reported_while_a_result_is_awaited():
    calls, enough = [], threading.Event()

    def report():
        calls.append(0)
        if len(calls) == 3:
            enough.set()

    with map_in_threads(lambda *_: enough.wait(10), [0], [None], on_wait=report) as results:
        assert [True] == list(results)
