from fractions import Fraction
from math import ceil, inf, isnan

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.making import CPU, compare, fp8_codes, int8_codes, pair_of, sum_up, summed_by_chunk
from support.tolerances import EXACT, FEW, MANY, MANY_ELEMENTS

from quanterr.comparison.worker import Worker
from quanterr.metrics import OUTLIER, PERCENTILES, RELATIVE_OUTLIER, Measurement, percentiles
from quanterr.metrics.sums import KEPT_ROWS, ONE, Sums, as_float, worst_rows
from quanterr.tensors.chunks import CPU_CHUNK, Cut

COUNTS = (
    "elements",
    "n",
    "nonfinite_original",
    "nonfinite_quantized",
    "x_nonzero",
    "zero_reference",
    "zeroed",
)

# Reported values of single elements: the difference and the quotient are float32.
ONE_ROUNDING, TWO_ROUNDINGS = 2.0**-24, 2.0**-23


@pytest.fixture(autouse=True)
def one_thread():
    """Use one thread, as a worker does; with more, torch adds a row in more pieces and rounds less."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def worst_element(x, y, size=CPU_CHUNK):
    """Return where the largest |e| is, as a run finds it."""
    pair, worker = pair_of(x, y), Worker(CPU, size, OUTLIER)
    with torch.inference_mode():
        sums = worker.sum_chunks([pair], list(Cut(*pair.original.matrix, size)))[0]
        return worker.finish(0, pair, sums).worst


def by_numpy(x, y, outlier=OUTLIER):
    """Return the same numbers by numpy in float64, and for each sum the sum of its terms' magnitudes."""
    x, y = (tensor.double().numpy().ravel() for tensor in (x, y))
    both = np.isfinite(x) & np.isfinite(y)
    counts = {
        "elements": x.size,
        "n": both.sum(),
        "nonfinite_original": (~np.isfinite(x)).sum(),
        "nonfinite_quantized": (~np.isfinite(y)).sum(),
    }
    x, y = x[both], y[both]
    e = y - x
    nonzero = x != 0
    relative = np.abs(e[nonzero]) / np.abs(x[nonzero])
    counts |= {
        "x_nonzero": nonzero.sum(),
        "zero_reference": (~nonzero & (y != 0)).sum(),
        "zeroed": (nonzero & (y == 0)).sum(),
        "outliers": (np.abs(e) > outlier).sum(),
        "relative_outliers": (np.abs(e) > RELATIVE_OUTLIER * np.abs(x)).sum(),
    }
    terms = {
        "x": x,
        "y": y,
        "e": e,
        "x_abs": np.abs(x),
        "e_abs": np.abs(e),
        "x_sq": x * x,
        "y_sq": y * y,
        "e_sq": e * e,
        "xy": x * y,
        "relative": relative,
    }
    total = {name: (term.sum(), np.abs(term).sum()) for name, term in terms.items()}
    extremes = {
        "e_max": np.abs(e).max(initial=0),
        "e_min": np.abs(e).min(initial=inf),
        "relative_max": relative.max(initial=0),
        "x_max": np.abs(x).max(initial=0),
    }
    return counts, total, extremes


def assert_agrees(sums, x, y, wide=False, outlier=OUTLIER):
    """Check that the sums equal numpy's, within a tolerance relative to the magnitudes that were added."""
    counts, totals, extremes = by_numpy(x, y, outlier)
    tolerance = EXACT if wide else MANY if x.numel() >= MANY_ELEMENTS else FEW

    assert {name: counts[name] for name in COUNTS} == {name: getattr(sums, name) for name in COUNTS}
    off = {
        name: float(abs(Fraction(getattr(sums, name), ONE) - Fraction(value)) / Fraction(magnitude or 1))
        for name, (value, magnitude) in totals.items()
    }
    assert {name: error for name, error in off.items() if error > tolerance} == {}
    for name, value in extremes.items():
        assert getattr(sums, name) == pytest.approx(value, rel=0 if wide else TWO_ROUNDINGS, abs=0), name


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def normal(*shape, seed=0):
    return torch.randn(shape, generator=generator(seed))


def quantize(x, bits=8):
    """Round to equal steps with a scale per row, as int8 does."""
    scale = (x.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)).clamp(min=1e-30)
    return (x / scale).round() * scale


def about(energy):
    """Return a tolerance for the energy of one row: float32, with pairwise sums."""
    return pytest.approx(as_float(energy), rel=FEW)


SHAPES = [(64, 512), (37, 129), (300, 7), (5000, 1), (1, 1), (1, 2), (2, 1), (1, 100_003), (3, 40_000), (16, 40_000)]
SHAPES += [(1100, 128), (64, 4096), (17, 16_384)]  # their products are matrix products

EVEN = {
    "normal": lambda *shape: (0.05 * normal(*shape)).bfloat16().float(),
    "uniform and positive": lambda *shape: torch.rand(shape, generator=generator()) + 0.1,
    "a nonzero mean": lambda *shape: 2 + normal(*shape),
    "half zeros": lambda *shape: normal(*shape).relu(),
}
UNEVEN = {  # one row has most of the energy
    "heavy tails": lambda *shape: normal(*shape) ** 5,
    "rows of very different size": lambda *shape: (
        normal(*shape) * torch.logspace(-9, 9, shape[0]).view(-1, *[1] * (len(shape) - 1))
    ),
}
TAME = EVEN | UNEVEN


class TestFast:
    @pytest.mark.parametrize("make", TAME.values(), ids=TAME)
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    @pytest.mark.parametrize("bits", [8, 3])
    def test_fast_sums_are_as_good_as_float64(self, make, shape, bits):
        x = make(*shape)
        y = quantize(x, bits)
        sums = sum_up(x, y)

        assert_agrees(sums, x, y)

    @pytest.mark.parametrize("make", TAME.values(), ids=TAME)
    def test_fast_counts_equal_exact_counts_except_on_the_threshold(self, make):
        x = make(64, 512)
        y = quantize(x, 5)
        fast, slow = sum_up(x, y), sum_up(x, y, wide=True)
        e, x = (y.double() - x.double()).abs(), x.double().abs()
        on_threshold = int(((e - OUTLIER).abs() <= ONE_ROUNDING * OUTLIER).sum())
        on_relative = int(((e - RELATIVE_OUTLIER * x).abs() <= TWO_ROUNDINGS * RELATIVE_OUTLIER * x).sum())

        assert abs(fast.outliers - slow.outliers) <= on_threshold
        assert abs(fast.relative_outliers - slow.relative_outliers) <= on_relative

    @pytest.mark.parametrize("make", TAME.values(), ids=TAME)
    def test_fast_worst_rows_equal_the_exact_ones(self, make):
        x = make(200, 96)
        y = quantize(x, 4) + 1e-3 * x * torch.linspace(0, 1, 200)[:, None]
        fast, slow = (dict(worst_rows(sum_up(x, y, wide=wide).rows.items())) for wide in (False, True))

        assert list(slow) == list(fast)
        for number, row in slow.items():
            assert as_float(fast[number].x_sq) == about(row.x_sq)
            assert as_float(fast[number].e_sq) == about(row.e_sq)
            assert fast[number].e_max == pytest.approx(row.e_max, rel=ONE_ROUNDING)

    def test_sums_do_not_depend_on_earlier_comparisons(self):
        worker = Worker(CPU, CPU_CHUNK, OUTLIER)
        pairs = [pair_of(x, quantize(x)) for x in (normal(64, 512), normal(3, 5), normal(1, 9), normal(64, 512))]
        with torch.inference_mode():
            together = [worker.sum_chunks([pair], list(Cut(*pair.original.matrix, CPU_CHUNK))) for pair in pairs]
            alone = [
                Worker(CPU, CPU_CHUNK, OUTLIER).sum_chunks([pair], list(Cut(*pair.original.matrix, CPU_CHUNK)))
                for pair in pairs
            ]

        assert alone == together


def exact_fields(x, y, outlier):
    """Return the fields by their definitions, in rational numbers."""
    pairs = [(Fraction(a), Fraction(b)) for a, b in zip(x, y, strict=True)]
    e = [b - a for a, b in pairs]
    relative = [abs(b - a) / abs(a) for a, b in pairs if a]
    return {
        "elements": len(pairs),
        "n": len(pairs),
        "nonfinite_original": 0,
        "nonfinite_quantized": 0,
        "x_nonzero": len(relative),
        "zero_reference": sum(a == 0 != b for a, b in pairs),
        "zeroed": sum(a != 0 == b for a, b in pairs),
        "outliers": sum(abs(d) > Fraction(outlier) for d in e),
        "relative_outliers": sum(abs(b - a) > Fraction(RELATIVE_OUTLIER) * abs(a) for a, b in pairs),
        "x": sum(a for a, _ in pairs),
        "y": sum(b for _, b in pairs),
        "e": sum(e),
        "x_abs": sum(abs(a) for a, _ in pairs),
        "e_abs": sum(map(abs, e)),
        "x_sq": sum(a * a for a, _ in pairs),
        "y_sq": sum(b * b for _, b in pairs),
        "e_sq": sum(d * d for d in e),
        "xy": sum(a * b for a, b in pairs),
        "e_max": max(map(abs, e)),
        "e_min": min(map(abs, e)),
        "relative": sum(relative),
        "relative_max": max(relative, default=0),
        "x_max": max((abs(a) for a, _ in pairs), default=0),
    }


UNITS = ("x", "y", "e", "x_abs", "e_abs", "x_sq", "y_sq", "e_sq", "xy", "relative")
ROUNDED = ("relative", "relative_max")  # quotients are not exact in float64 in general
small = st.integers(-(1 << 12), 1 << 12).map(lambda k: k / 64)
single = st.floats(width=32, allow_nan=False, allow_infinity=False)


class TestExact:
    @given(st.lists(st.tuples(small, small), min_size=1, max_size=40), st.sampled_from([0.0, 0.01, 1.0]))
    @settings(deadline=None, max_examples=60)
    def test_exact_sums_are_rational_arithmetic_where_float64_holds_it(self, pairs, outlier):
        x, y = map(list, zip(*pairs, strict=True))
        expected = exact_fields(x, y, outlier)
        sums = sum_up(torch.tensor([x]), torch.tensor([y]), outlier=outlier, wide=True)
        actual = {n: Fraction(getattr(sums, n), ONE) if n in UNITS else getattr(sums, n) for n in expected}
        for name in ROUNDED:
            assert float(actual.pop(name)) == pytest.approx(float(expected.pop(name)), rel=1e-15 * len(x))

        assert expected == actual

    @given(st.lists(st.tuples(single, single), min_size=1, max_size=40))
    @settings(deadline=None, max_examples=60)
    def test_exact_float32_sums_are_rational_arithmetic_within_roundings(self, pairs):
        x, y = map(list, zip(*pairs, strict=True))
        expected = exact_fields(x, y, OUTLIER)
        sums = sum_up(torch.tensor([x]), torch.tensor([y]), wide=True)
        magnitudes = {
            "x": expected["x_abs"],
            "y": sum(abs(Fraction(b)) for b in y),
            "e": expected["e_abs"],
            "xy": sum(abs(Fraction(a) * Fraction(b)) for a, b in pairs),
        }
        tolerance = Fraction(len(pairs) + 4, 1 << 53)
        off = {
            name: abs(Fraction(getattr(sums, name), ONE) - expected[name])
            > tolerance * magnitudes.get(name, expected[name]) + Fraction(len(pairs), ONE)
            for name in UNITS
            if name != "relative"
        }

        assert dict.fromkeys(off, False) == off
        assert {name: expected[name] for name in COUNTS} == {name: getattr(sums, name) for name in COUNTS}

    @pytest.mark.parametrize("make", TAME.values(), ids=TAME)
    @pytest.mark.parametrize("shape", [(512, 1024), (1, 100_003), (37, 129)], ids=str)
    def test_exact_sums_equal_numpy(self, make, shape):
        x = make(*shape)
        y = quantize(x, 4)
        sums = sum_up(x, y, wide=True)

        assert_agrees(sums, x, y, wide=True)


def tiny_beside_one(*rows):
    """Return a weight whose rows have these sizes."""
    return normal(len(rows), 64) * torch.tensor(rows)[:, None]


def ones(*shape):
    return torch.ones(shape)


@pytest.mark.parametrize("change", [1e-15, 1e-12, 1e-9])
def test_float64_is_compared_in_float64(tmp_path, change):
    x = normal(16, 64).double()
    y = x * (1 + change)
    report = compare(tmp_path, {"a.weight": x, "b.weight": x}, {"a.weight": y, "b.weight": x.float()})
    layers = {layer.layer_name: layer for layer in report.layers}

    assert layers["a.weight"].mean_absolute_error == pytest.approx(float((y - x).abs().mean()), rel=1e-12)
    assert layers["a.weight"].relative_error == pytest.approx(change, rel=0.2)
    assert [layer.layer_name for layer in report.lossless] == ["b.weight"]


WILD = {
    "all of 1e-30": (1e-30 * normal(8, 64), quantize(1e-30 * normal(8, 64), 4)),
    "all of 1e30": (1e30 * normal(8, 64), quantize(1e30 * normal(8, 64), 4)),
    "all subnormal": (1e-40 * normal(8, 64), 1.5e-40 * normal(8, 64)),
    "rows of 1e-30 and of 1": (
        tiny_beside_one(1e-30, 1, 1e-30),
        quantize(tiny_beside_one(1e-30, 1, 1e-30), 4),
    ),
    "rows of 1e30 and of 1": (tiny_beside_one(1e30, 1), quantize(tiny_beside_one(1e30, 1), 4)),
    "one element of 1e30": (ones(4, 8).index_fill(1, torch.tensor([3]), 1e30), ones(4, 8)),
    "one element of 1e-30 in each row": (ones(4, 8).index_fill(1, torch.tensor([3]), 1e-30), 2 * ones(4, 8)),
    "elements of 1e-30 that become zero": (1e-30 * ones(4, 8), torch.zeros(4, 8)),
    "zeros that become 1e-30": (torch.zeros(4, 8), 1e-30 * ones(4, 8)),
    "zeros that become subnormal": (torch.zeros(4, 8), 1e-44 * ones(4, 8)),
    "zeros next to zeros that become 1e-30": (torch.zeros(2, 8), torch.tensor([[0.0], [1e-30]]) * ones(2, 8)),
    "an error of 1e-30 next to one of 1": (ones(2, 8), ones(2, 8) + torch.tensor([[0.0], [1.0]])),
    "the largest float32, negated": (3e38 * ones(4, 8), -3e38 * ones(4, 8)),
    "quotients beyond float32": (1e-20 * ones(4, 8), 1e20 * ones(4, 8)),
    "sums of quotients beyond float32": (
        ones(2, 4000).index_fill(1, torch.arange(2000), 1e-36),
        2 * ones(2, 4000),
    ),
    "sums of quotients beyond float32 over rows": (
        ones(4000, 2).index_fill(1, torch.tensor([0]), 1e-36),
        2 * ones(4000, 2),
    ),
    "a tiny row next to a row of zeros": (
        torch.tensor([[1e-25], [0.0], [0.0]]) * ones(3, 8),
        torch.tensor([[1e-25], [0.0], [1e-3]]) * ones(3, 8),
    ),
    "the smallest step of small numbers": (
        1e-37 * ones(2, 8),
        torch.full((2, 8), 1e-37).nextafter(ones(2, 8)),
    ),
}


class TestWildValues:
    @pytest.mark.parametrize(("x", "y"), WILD.values(), ids=WILD)
    def test_values_of_extreme_magnitude_are_summed_correctly(self, x, y):
        sums = sum_up(x, y)

        assert_agrees(sums, x, y)

    @pytest.mark.parametrize(("x", "y"), WILD.values(), ids=WILD)
    def test_values_of_extreme_magnitude_are_summed_exactly_on_request(self, x, y):
        sums = sum_up(x, y, wide=True)

        assert_agrees(sums, x, y, wide=True)

    @pytest.mark.parametrize("scale", [1e-40, 1e-30, 1e-25, 1e-20, 1e-15, 1e-10, 1e10, 1e15, 1e20, 1e25, 1e30])
    @pytest.mark.parametrize("ratio", [1e-12, 1e-6, 1e-3, 1.0])
    def test_error_ratio_does_not_depend_on_the_magnitude(self, scale, ratio):
        x = (scale * normal(16, 64)).clamp(-1e38, 1e38)
        y = (x.double() + scale * ratio * normal(16, 64, seed=1).double()).float()
        sums = sum_up(x, y)

        assert_agrees(sums, x, y)


NONFINITE = [float("nan"), inf, -inf]


class TestNonfinite:
    @pytest.mark.parametrize("bad", NONFINITE, ids=str)
    @pytest.mark.parametrize("side", ["original", "quantized", "both", "both but elsewhere"])
    @pytest.mark.parametrize("wide", [False, True], ids=["run", "exact"])
    def test_infinite_elements_are_counted_and_left_out(self, bad, side, wide):
        x = normal(8, 64)
        y = quantize(x, 4)
        if side != "quantized":
            x[2, 5] = x[7, 63] = bad
        if side != "original":
            y[(3, 5) if side == "both but elsewhere" else (2, 5)] = bad
        sums = sum_up(x, y, wide=wide)

        assert sums.nonfinite
        assert_agrees(sums, x, y, wide)

    @pytest.mark.parametrize("bad", NONFINITE, ids=str)
    def test_infinite_rows_and_weights_are_counted_and_left_out(self, bad):
        x, y = normal(4, 16), normal(4, 16, seed=1)
        x[1] = bad
        some = sum_up(x, y)
        x[:] = bad
        none = sum_up(x, y)

        assert (some.nonfinite_original, some.nonfinite_quantized, some.n) == (16, 0, 48)
        assert (none.nonfinite_original, none.nonfinite_quantized, none.n) == (64, 0, 0)
        assert (none.e_sq, none.e_max, none.x_sq) == (0, 0, 0)
        assert inf == none.e_min

    def test_elements_that_are_infinite_on_both_sides_are_not_equal(self):
        x = torch.full((2, 4), inf)
        sums = sum_up(x, x)

        assert (sums.nonfinite_original, sums.nonfinite_quantized, sums.n, sums.exact) == (8, 8, 0, False)


class TestZeros:
    def test_zeros_are_counted_by_side(self):
        x = torch.tensor([[0.0, 0.0, 2.0, 4.0, -0.0, 5.0]])
        y = torch.tensor([[0.0, 3.0, 0.0, 4.0, 0.0, -0.0]])
        sums = sum_up(x, y)

        assert (sums.x_nonzero, sums.zero_reference, sums.zeroed) == (3, 1, 2)
        assert sums.relative_max == 1.0
        assert sums.relative == 2 * ONE

    @pytest.mark.parametrize("wide", [False, True], ids=["run", "exact"])
    def test_zeros_that_became_nonzero_are_relative_outliers(self, wide):
        x, y = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[0.0, 1e-6, 1.0]])
        sums = sum_up(x, y, wide=wide)

        assert sums.relative_outliers == 1

    @pytest.mark.parametrize("rows", [[0], [0, 5], [3, 4, 5, 6], range(8)])
    @pytest.mark.parametrize("side", ["original", "quantized", "both"])
    def test_rows_of_zeros_are_measured(self, rows, side):
        x = normal(8, 64)
        y = quantize(x, 4)
        if side != "quantized":
            x[list(rows)] = 0
        if side != "original":
            y[list(rows)] = 0
        sums = sum_up(x, y)

        assert_agrees(sums, x, y)

    def test_zeros_on_both_sides_are_exact(self):
        sums = sum_up(torch.zeros(4, 8), torch.zeros(4, 8))

        assert sums.exact
        assert (sums.x_nonzero, sums.n, sums.e_max, sums.e_min) == (0, 32, 0.0, 0.0)

    def test_zeros_with_either_sign_are_equal(self):
        sums = sum_up(torch.zeros(4, 8), -torch.zeros(4, 8))

        assert sums.exact


@pytest.mark.parametrize("wide", [False, True], ids=["run", "exact"])
class TestSmall:
    def test_single_element_is_measured(self, wide):
        sums = sum_up(torch.tensor([[2.0]]), torch.tensor([[1.5]]), wide=wide)

        assert (sums.n, sums.e_max, sums.e_min, sums.relative_max) == (1, 0.5, 0.5, 0.25)
        assert (
            sums.x,
            sums.e,
            sums.x_sq,
            sums.e_sq,
            sums.xy,
        ) == (2 * ONE, -ONE // 2, 4 * ONE, ONE // 4, 3 * ONE)

    def test_equal_weights_are_exact_without_a_worst_row(self, wide):
        x = normal(5, 9)
        sums = sum_up(x, x, wide=wide)

        assert (sums.exact, sums.worst, worst_rows(sums.rows.items())) == (True, None, [])

    def test_one_different_element_makes_weights_inexact(self, wide):
        x = normal(50, 90)
        y = x.clone()
        y[49, 89] = y[49, 89].nextafter(torch.tensor(inf))
        sums = sum_up(x, y, wide=wide)

        assert not sums.exact
        assert [number for number, _ in worst_rows(sums.rows.items())] == [49]

    def test_empty_weight_has_empty_sums(self, wide):
        sums = sum_up(torch.zeros(0, 5), torch.zeros(0, 5), wide=wide)

        assert Sums() == sums

    def test_smallest_error_counts_only_different_elements(self, wide):
        x = ones(2, 3)
        sums = sum_up(x, torch.tensor([[1.5, 1.25, 2.0], [3.0, 1.125, 1.5]]), wide=wide)

        assert (sums.e_min, sums.e_max) == (0.125, 2.0)


@pytest.mark.parametrize("outlier", [0.0, 0.01, 0.1, 1.0, 100.0])
@pytest.mark.parametrize("wide", [False, True], ids=["run", "exact"])
def test_outliers_are_errors_above_the_threshold(outlier, wide):
    x = normal(64, 128)
    y = quantize(x, 4) * 1.1
    counts, _, _ = by_numpy(x, y, outlier)
    sums = sum_up(x, y, outlier=outlier, wide=wide)

    assert counts["outliers"] == sums.outliers
    assert counts["relative_outliers"] == pytest.approx(sums.relative_outliers, abs=0 if wide else 1)


@pytest.mark.parametrize("wide", [False, True], ids=["run", "exact"])
class TestWorstRows:
    def test_worst_rows_come_by_snr(self, wide):
        x = ones(20, 16)
        order = torch.randperm(20, generator=generator()).tolist()
        y = x.clone()
        for place, row in enumerate(order):
            y[row] += 0.5 / (place + 1)
        rows = worst_rows(sum_up(x, y, wide=wide).rows.items())

        assert order[:KEPT_ROWS] == [number for number, _ in rows]
        assert [0.5 / (place + 1) for place in range(KEPT_ROWS)] == pytest.approx([row.e_max for _, row in rows])

    def test_worst_rows_are_not_those_with_the_largest_error(self, wide):
        x = torch.tensor([[100.0, 100.0], [1.0, 1.0], [10.0, 10.0]])
        y = torch.tensor([[101.0, 100.0], [1.5, 1.0], [10.0, 10.0]])
        sums = sum_up(x, y, wide=wide)

        assert [number for number, _ in worst_rows(sums.rows.items())] == [1, 0]
        assert (sums.worst.error, sums.worst.row) == (1.0, 0)

    def test_rows_without_signal_come_first(self, wide):
        x, y = ones(4, 8), 2 * ones(4, 8)
        x[2] = 0
        sums = sum_up(x, y, wide=wide)

        assert [number for number, _ in worst_rows(sums.rows.items())] == [2, 0, 1, 3]

    @pytest.mark.parametrize("n_rows", [6, 100])
    @pytest.mark.parametrize("signal", [0.0, 1.0])
    @pytest.mark.parametrize("size", [CPU_CHUNK, 8 * 7, 8])
    def test_equally_bad_rows_come_in_order(self, wide, n_rows, signal, size):
        x = torch.full((n_rows, 8), signal)
        sums = sum_up(x, x + 0.5, size=size, wide=wide)

        assert list(range(KEPT_ROWS)) == [number for number, _ in worst_rows(sums.rows.items())]
        assert (sums.worst.row, sums.worst.col) == (0, 0)

    @pytest.mark.parametrize("size", [8, 24, 80, 1 << 18])
    def test_worst_rows_do_not_depend_on_the_cut(self, wide, size):
        x = normal(100, 8)
        y = quantize(x, 3)
        whole = worst_rows(sum_up(x, y, wide=True).rows.items())
        rows = worst_rows(sum_up(x, y, size=size, wide=wide).rows.items())

        assert [number for number, _ in whole] == [number for number, _ in rows]

    def test_worst_rows_keep_no_more_than_they_need(self, wide):
        x = normal(5000, 8)
        sums = sum_up(x, quantize(x, 3), size=80, wide=wide)

        assert len(sums.rows) <= 4 * KEPT_ROWS


class TestRowPieces:
    @pytest.mark.parametrize("size", [1000, 4096, 33_333, 99_999])
    @pytest.mark.parametrize("wide", [False, True], ids=["run", "exact"])
    def test_row_pieces_give_the_same_sums_and_worst_rows_as_whole_rows(self, size, wide):
        x = normal(3, 100_003)
        y = quantize(x, 4)
        y[1] *= 1.5
        pieces, whole = sum_up(x, y, size=size, wide=wide), sum_up(x, y, size=1 << 20, wide=True)
        actual, expected = (dict(worst_rows(sums.rows.items())) for sums in (pieces, whole))

        assert_agrees(pieces, x, y, wide)
        assert [1, *(number for number in expected if number != 1)] == list(actual)
        for number, row in expected.items():
            assert as_float(actual[number].x_sq) == about(row.x_sq)
            assert as_float(actual[number].e_sq) == about(row.e_sq)
            assert actual[number].e_max == pytest.approx(row.e_max, rel=ONE_ROUNDING)

    @pytest.mark.parametrize("size", [5000, 5120])
    def test_row_pieces_with_any_width_give_the_same_sums(self, size):
        x = normal(20, 12_800)
        y = quantize(x)

        assert_agrees(sum_up(x, y, size=size), x, y)

    @pytest.mark.parametrize("size", [100, 4000, 5000, 9999])
    @pytest.mark.parametrize("wide", [False, True], ids=["run", "exact"])
    def test_equal_row_pieces_count_in_their_row_too(self, size, wide):
        x = torch.ones(3, 10_000)
        y = x.clone()
        y[1, 7000:] = 2
        expected = [(1, 10_000, 3000, 1.0)]
        at_once, one_by_one = sum_up(x, y, size, wide=wide), Sums.merge(summed_by_chunk(x, y, size, wide))

        for sums in (at_once, one_by_one):
            rows = worst_rows(sums.rows.items())

            assert expected == [(n, row.x_sq / ONE, row.e_sq / ONE, row.e_max) for n, row in rows]

    @pytest.mark.parametrize("size", [1000, 4096, 99_999, 1 << 18])
    @pytest.mark.parametrize("place", [(0, 0), (1, 999), (1, 1000), (2, 54_321), (2, 100_002)], ids=str)
    def test_row_pieces_find_the_worst_element(self, size, place):
        x = normal(3, 100_003)
        y = quantize(x, 8)
        y[place] += 1
        row, col, original, quantized_value = worst_element(x, y, size)

        assert place == (row, col)
        assert (float(x[place]), float(y[place])) == (original, quantized_value)

    def test_first_worst_element_is_found_on_a_tie(self):
        x = torch.zeros(3, 5000)
        y = x.clone()
        y[1, 4000] = y[1, 4500] = y[2, 3] = -1
        place = worst_element(x, y, 1000)

        assert place == (1, 4000, 0.0, -1.0)

    def test_worst_element_is_found_next_to_infinite_ones(self):
        x = normal(3, 5000)
        y = quantize(x, 8)
        y[1, 4000] = float("nan")
        x[1, 4001] = inf
        y[1, 4002] += 1
        row, col, _, _ = worst_element(x, y, 1000)

        assert (row, col) == (1, 4002)


def nearest_rank(values, q):
    """Return the smallest value that this share of the values does not exceed."""
    rank = ceil(Fraction(str(q)) * values.size)
    return float(np.sort(values)[rank - 1])


ERRORS = {
    "half normal": lambda n: normal(n),
    "uniform": lambda n: torch.rand(n, generator=generator()),
    "lognormal": lambda n: (3 * normal(n)).exp(),
    "heavy tails": lambda n: normal(n) / normal(n, seed=1).clamp(min=1e-3),
    "few values": lambda n: torch.randint(1, 5, (n,), generator=generator()).float(),
    "one value": lambda n: torch.full((n,), 0.3),
    "mostly zeros": lambda n: normal(n) * (torch.rand(n, generator=generator(2)) > 0.8),
    "of 1e-30": lambda n: 1e-30 * normal(n),
    "of 1e30": lambda n: 1e30 * normal(n),
}


class TestPercentiles:
    @pytest.mark.parametrize("make", ERRORS.values(), ids=ERRORS)
    @pytest.mark.parametrize("n", [1, 2, 3, 10, 1000, 1001, 70_000])
    def test_percentiles_agree_with_numpy_within_half_a_percent(self, make, n):
        e = make(n)
        expected = {key: nearest_rank(e.abs().double().numpy(), q) for key, q in PERCENTILES.items()}
        reported = percentiles(dict, Measurement(sum_up(torch.zeros(n), e)))

        assert expected == pytest.approx(reported, rel=0.005, abs=0)

    def test_percentiles_leave_out_infinite_values(self):
        e = torch.tensor([1.0, 2.0, 3.0, float("nan"), inf])
        reported = percentiles(dict, Measurement(sum_up(torch.zeros(5), e)))

        assert (reported["p50"], reported["p99_9"]) == (2.0, 3.0)

    def test_percentiles_are_the_same_in_any_cut(self):
        x = normal(64, 500)
        y = quantize(x, 4)
        whole = sum_up(x, y).histogram

        assert all(whole == sum_up(x, y, size=size).histogram for size in (100, 500, 1501))


class TestZeroCodes:
    @pytest.mark.parametrize(
        "codes",
        [
            fp8_codes(16, 64),
            fp8_codes(16, 64, dtype=torch.float8_e5m2),
            int8_codes(16, 64),
        ],
        ids=["e4m3", "e5m2", "int8"],
    )
    @pytest.mark.parametrize(
        "scale",
        [
            torch.tensor(0.01),
            torch.tensor(0.0),
            torch.tensor(-0.01),
            torch.tensor(1e-38),
            torch.tensor(1e-43),
            torch.tensor([0.01, 0.0, 1e-44, 1e-40] * 4),
            torch.tensor([[0.01, 1e-44], [0.02, 1e-3]]),
        ],
        ids=["tame", "zero", "negative", "tiny", "subnormal", "rows", "blocks"],
    )
    def test_zero_codes_and_vanishing_products_count_as_zeroed_elements(self, tmp_path, codes, scale):
        codes = codes.clone()
        codes.view(torch.uint8)[:, ::3] = 0
        if codes.dtype != torch.int8:
            codes.view(torch.uint8)[:, 1::7] = 0x80  # minus zero is counted like zero
        x = normal(16, 64)
        x[2:4, ::5] = 0
        scale_of_each = scale.view(-1, 1) if scale.dim() == 1 else scale
        if scale.dim() == 2:
            scale_of_each = scale.repeat_interleave(8, 0).repeat_interleave(32, 1)
        counts, _, _ = by_numpy(x, codes.float() * scale_of_each)
        report = compare(tmp_path, {"a.weight": x}, {"a.weight": codes, "a.weight_scale": scale})
        layer = report.layers[0]

        assert layer.zeroed_pct == pytest.approx(100 * counts["zeroed"] / x.numel())
        assert counts["zero_reference"] == layer.zero_reference_elements


class TestSaturatedCodes:
    @pytest.mark.parametrize(
        ("codes", "ends"),
        [
            (fp8_codes(70, 300), {0x7E, 0xFE}),
            (fp8_codes(70, 300, dtype=torch.float8_e5m2), {0x7B, 0xFB}),
            (int8_codes(70, 300), {0x7F, 0x80, 0x81}),
        ],
        ids=["e4m3", "e5m2", "int8"],
    )
    @pytest.mark.parametrize("original", [0.05, 1e-30, float("nan")], ids=["tame", "wild", "not finite"])
    def test_saturated_codes_are_counted_once_on_either_path(self, tmp_path, codes, ends, original):
        x = normal(70, 300)
        x[0, 0] = original
        x[1] *= original
        report = compare(
            tmp_path,
            {"a.weight": x},
            {"a.weight": codes, "a.weight_scale": torch.tensor(0.01)},
        )
        layer = report.layers[0]
        expected = int(np.isin(codes.view(torch.uint8).numpy(), list(ends)).sum())
        finite = 70 * 300 - (301 if isnan(original) else 0)

        assert layer.saturated_pct == pytest.approx(100 * expected / finite)
        assert isnan(original) != layer.finite

    def test_saturated_codes_are_undefined_without_a_scale(self, tmp_path):
        report = compare(
            tmp_path,
            {"a.weight": normal(4, 64), "b.weight": normal(4, 64)},
            {"a.weight": fp8_codes(4, 64), "b.weight": normal(4, 64, seed=1)},
        )

        assert [layer.saturated_pct for layer in report.layers] == [None, None]
