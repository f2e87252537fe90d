"""Counts of |e| by size, compared with sorting the bfloat16 values themselves."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quanterr.metrics.histogram import BIN_STEP, MIN_UNCROPPED_ELEMENTS, Histogram

SMALLEST, LARGEST = 2.0**-133, float(torch.finfo(torch.bfloat16).max)
magnitudes = st.lists(
    st.one_of(st.sampled_from([0.0, SMALLEST, 1e-3, 1.0, LARGEST]), st.floats(0, 2.0**126, width=32)), min_size=1
)


def values(numbers):
    """Return the numbers as their bins have them, in order."""
    return sorted(torch.tensor(numbers).to(torch.bfloat16).tolist())


def read(histogram, n):
    return histogram.values_at(range(1, n + 1))


@given(magnitudes)
@settings(deadline=None)
def test_every_rank_equals_the_sorted_value(numbers):
    assert values(numbers) == read(Histogram.of(torch.tensor(numbers)), len(numbers))


@pytest.mark.session
@given(st.lists(magnitudes, min_size=1, max_size=5), st.randoms())
@settings(deadline=None)
def test_merging_in_any_order_gives_the_whole_histogram(lists, random):
    together = [number for numbers in lists for number in numbers]
    random.shuffle(lists)
    merged = Histogram.empty()
    for numbers in lists:
        merged.add(Histogram.of(torch.tensor(numbers)))

    assert Histogram.of(torch.tensor(together)) == merged
    assert values(together) == read(merged, len(together))


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_large_histogram_equals_the_sum_over_its_pieces(share):
    numbers = torch.rand(MIN_UNCROPPED_ELEMENTS + 100, generator=torch.Generator().manual_seed(0))
    numbers[: int(share * len(numbers))] = 0
    whole = Histogram.of(numbers)

    assert whole == Histogram.of(numbers[:100]) + Histogram.of(numbers[100:500]) + Histogram.of(numbers[500:])
    assert int(share * len(numbers)) == whole.zeros


def test_empty_histogram_adds_nothing():
    some = Histogram.of(torch.tensor([1.0, 2.0]))

    assert some == some + Histogram.empty() == Histogram.empty() + some
    assert Histogram.of(torch.tensor([])) == Histogram.empty() != some


def test_histogram_takes_room_for_used_bins_only():
    merged = Histogram.empty()
    for power in range(4):
        merged.add(Histogram.of(torch.tensor([0.0, 2.0**power])))

    assert len(merged.counts) <= 4 * BIN_STEP
