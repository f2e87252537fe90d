import math
import sys
from copy import deepcopy
from dataclasses import fields
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.making import sum_up, summed_by_chunk

from quanterr.documents.comparison.layer import Layer
from quanterr.metrics import Measurement
from quanterr.metrics.scores import compute_scores
from quanterr.metrics.sums import ADDED, KEPT_ROWS, ONE, RowSums, Sums, as_float, exact, worst_rows

FINITE = st.floats(allow_nan=False, allow_infinity=False)
ODD = [0.0, -0.0, 1.0, -1.5, 0.1, 448.0, 1e30, -1e30, 1e-30, 1e-40, math.nan, math.inf, -math.inf]
EXTREMES = {"e_max": max, "e_min": min, "relative_max": max, "x_max": max, "cast_max": max}
PLACES = ("worst", "rows", "matrices", "histogram", "peaks")


def facts(sums):
    """Return every field, and every metric made from them, in a form that == compares.

    Only the worst few rows count; the others that are still kept do not matter.
    """
    values = {field.name: getattr(sums, field.name) for field in fields(Sums) if field.init}
    values["rows"] = worst_rows(sums.rows.items())
    return values, compute_scores(Layer, Measurement(sums, 8, 16, 8, True))


@st.composite
def chunks_of_a_weight(draw):
    """Return sums of the chunks of one weight, whole rows or pieces of them."""
    rows, cols = draw(st.integers(1, 30)), draw(st.integers(1, 6))
    number = st.one_of(st.floats(-2, 2, width=16), st.sampled_from(ODD))
    values = st.lists(number, min_size=rows * cols, max_size=rows * cols)
    x, y = (torch.tensor(draw(values)).float().view(rows, cols) for _ in range(2))
    if draw(st.booleans()):  # large parts of the weight are equal on both sides
        y = torch.where(torch.rand(rows, cols, generator=torch.Generator().manual_seed(rows)) < 0.2, y, x)
    return summed_by_chunk(x, y, draw(st.integers(1, 2 * cols)), draw(st.booleans()))


def group(parts, random):
    """Return the parts merged in any order, in groups of any depth, with empty ones between them."""
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return Sums()
    shuffled = random.sample(parts, len(parts))
    cut = random.randint(0, len(parts))
    if cut in (0, len(parts)):
        return Sums.merge([Sums(), *shuffled, Sums()])
    return Sums.merge([group(shuffled[:cut], random), Sums(), group(shuffled[cut:], random)])


@pytest.mark.slow
class TestMerging:
    @given(chunks_of_a_weight(), st.randoms(use_true_random=False))
    @settings(deadline=None, max_examples=60)
    def test_merging_is_exact_in_any_order_and_grouping(self, parts, random):
        in_order = Sums.merge(parts)

        assert facts(in_order) == facts(group(parts, random))

    @given(chunks_of_a_weight())
    @settings(deadline=None, max_examples=25)
    def test_merging_leaves_the_parts_as_they_were(self, parts):
        before = deepcopy([facts(part) for part in parts])
        Sums.merge([*parts, *parts])

        assert before == [facts(part) for part in parts]

    @given(chunks_of_a_weight())
    @settings(deadline=None, max_examples=25)
    def test_merging_an_empty_part_changes_nothing(self, parts):
        for part in parts:
            assert facts(part) == facts(Sums.merge([Sums(), part, Sums()]))

    def test_merging_no_part_gives_empty_sums(self):
        assert facts(Sums()) == facts(Sums.merge([]))
        assert Sums().exact
        assert not Sums().nonfinite

    def test_merging_finds_the_worst_rows_among_many(self):
        x = torch.ones(500, 4)
        y = x + 0.001 * torch.randperm(500, generator=torch.Generator().manual_seed(0))[:, None]
        parts = summed_by_chunk(x, y, 12)
        whole = sum_up(x, y, wide=True)

        assert [row for row, _ in worst_rows(whole.rows.items())] == [
            row for row, _ in worst_rows(Sums.merge(parts).rows.items())
        ]
        assert len(Sums.merge(parts).rows) <= 4 * KEPT_ROWS

    def test_merging_another_weight_drops_fields_for_a_single_weight(self):
        first, second = sum_up(torch.ones(3, 4), torch.zeros(3, 4)), sum_up(torch.ones(2, 2), torch.ones(2, 2))
        total = Sums()
        for sums in (first, second):
            total.merge_other_weight(sums)

        assert (
            total.worst,
            total.rows,
            total.n,
            total.e_sq,
            total.e_max,
            total.e_min,
        ) == (None, {}, 16, 12 * ONE, 1.0, 0.0)


class TestFields:
    def test_all_integer_fields_are_added(self):
        integers = tuple(field.name for field in fields(Sums) if field.type in ("int", int))

        assert integers == ADDED

    def test_every_field_has_a_tested_merge(self):
        assert {field.name for field in fields(Sums) if field.init} == {*ADDED, *EXTREMES, *PLACES}

    @pytest.mark.parametrize("name", ADDED)
    def test_added_fields_are_added(self, name):
        total = Sums.merge([Sums(**{name: 3}), Sums(**{name: -(1 << 200)}), Sums(**{name: 4})])

        assert Sums(**{name: 7 - (1 << 200)}) == total

    @pytest.mark.parametrize(("name", "pick"), EXTREMES.items())
    @pytest.mark.parametrize("values", [(0.25, 3.0), (3.0, 0.25), (1.0, 1.0)])
    def test_extreme_fields_are_picked(self, name, pick, values):
        total = Sums.merge([Sums(**{name: value}) for value in values])

        assert Sums(**{name: pick(values)}) == total


def unit(value):
    return Fraction(value) * ONE


@pytest.mark.parametrize(("x_sq", "zeroed", "dead"), [(ONE, True, True), (ONE, False, False), (0, True, False)])
def test_row_is_dead_if_only_its_quantized_values_are_zero(x_sq, zeroed, dead):
    assert dead is RowSums(x_sq, x_sq, 1.0, True, zeroed).dead


class TestExact:
    @given(FINITE)
    @settings(max_examples=500)
    def test_exact_number_converts_back_to_the_same_value(self, value):
        assert value == as_float(exact(value))
        assert unit(value) == exact(value)

    @pytest.mark.parametrize(
        "value",
        [
            0.0,
            -0.0,
            math.ulp(0.0),
            -math.ulp(0.0),
            sys.float_info.min,
            sys.float_info.min - math.ulp(0.0),
            sys.float_info.max,
            -sys.float_info.max,
            sys.float_info.epsilon,
            1 / 3,
            1e308,
            1e-320,
        ],
    )
    def test_exact_number_converts_back_at_the_ends_of_the_range(self, value):
        assert value == as_float(exact(value))

    def test_smallest_exact_number_is_one(self):
        assert exact(math.ulp(0.0)) == 1
        assert exact(1.0) == ONE

    @given(st.lists(FINITE, max_size=20))
    def test_sums_are_rounded_once(self, values):
        total = sum(map(exact, values))
        expected = sum(map(Fraction, values))

        assert expected * ONE == total
        if abs(expected) <= sys.float_info.max:
            assert float(expected) == as_float(total)

    def test_sums_keep_small_values_next_to_huge_ones(self):
        total = exact(1e308) + exact(5e-324) - exact(1e308)

        assert as_float(total) == 5e-324

    @pytest.mark.parametrize("sign", [1, -1])
    def test_sums_beyond_float64_are_infinite(self, sign):
        total = 2 * exact(sign * sys.float_info.max)

        assert sign * math.inf == as_float(total)

    @pytest.mark.parametrize("sign", [1, -1])
    def test_exact_infinity_stays_infinite(self, sign):
        assert sign * math.inf == as_float(exact(sign * math.inf))
        assert sign * math.inf == as_float(exact(sign * math.inf) - exact(sign * sys.float_info.max))
