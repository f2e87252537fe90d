import math
from dataclasses import replace
from math import ceil, inf, nan, sqrt

import numpy as np
import pytest
import torch
from msgspec import structs, to_builtins
from support.making import compare, fp8_codes, int8_codes, numbers, sum_up

from quanterr import theoretical_sqnr
from quanterr.documents.comparison.aggregate import AGGREGATES, Aggregate
from quanterr.documents.comparison.layer import METRICS, Layer
from quanterr.metrics import (
    LAYER_PERCENTILES,
    NONFINITE,
    OUTLIER,
    PERCENTILES,
    PREDICTED,
    RELATIVE_OUTLIER,
    LayerValues,
    Measurement,
)
from quanterr.metrics.attainable import Attainable
from quanterr.metrics.scores import collect_scores, compute_scores
from quanterr.metrics.sums import KEPT_ROWS, Sums

NAMES = [metric.name for metric in METRICS]
AGGREGATE_NAMES = [metric.name for metric in AGGREGATES]
EVERY_PERCENTILE = tuple(PERCENTILES)


def plain(values):
    """Return the values as in JSON."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in to_builtins(values).items()}


def measure(x, y, wide=False, **known):
    """Return all metrics of two tensors, and the names of undefined ones."""
    sums = sum_up(torch.as_tensor(x), torch.as_tensor(y), wide=wide)
    values, nonfinite = compute_scores(Layer, Measurement(sums, **known))
    return plain(values), nonfinite


@pytest.mark.parametrize("rows", [METRICS, AGGREGATES], ids=["METRICS", "AGGREGATES"])
class TestTable:
    def test_metric_names_are_unique(self, rows):
        names = [row.name for row in rows]

        assert sorted(set(names)) == sorted(names)

    def test_every_metric_is_described(self, rows):
        assert [row.name for row in rows if not row.formula] == []
        assert {row.better for row in rows} <= {"lower", "higher", ""}
        assert [row.name for row in rows if row.of is None] == []


def of_equal_sides(scale):
    """Return the sums of a weight and itself; its norm and deviation are integers, so nothing is rounded."""
    x = torch.tensor([[1.0, 1.0, 7.0, 7.0]]) * scale
    sums = sum_up(x, x)
    return replace(sums, weighted_x_sq=sums.x_sq)


EQUAL_SAMPLE = Attainable(n=4, x_sq=1.0, e_sq=0.0, best_sq=0.0, stored_sq=0.0)
EQUAL_LAYERS = LayerValues([0.0], [0.0], [inf], [], [0.0], [0.0])


@pytest.mark.parametrize("struct", [Layer, Aggregate])
@pytest.mark.parametrize("predicts", PREDICTED)
def test_declared_values_for_equal_sides_match_the_formulas(struct, predicts):
    for scale in (1.0, 2.0):
        measured = Measurement(
            of_equal_sides(scale), attainable=EQUAL_SAMPLE, alpha=scale, predicts=predicts, layers=EQUAL_LAYERS
        )
        values, nonfinite = compute_scores(struct, measured)
        computed = {name: NONFINITE.get(nonfinite.get(name), value) for name, value in plain(values).items()}
        declared = {name: score.equal for name, score in collect_scores(struct).items() if score.equal is not None}
        declared = {name: value for name, value in declared.items() if name not in PREDICTED or name == predicts}

        percentiles = {name for name in declared if isinstance(computed[name], dict)}
        assert {name: value for name, value in declared.items() if name not in percentiles} == {
            name: computed[name] for name in declared.keys() - percentiles
        }
        assert all(computed[name]["p50"] == declared[name] == 0 for name in percentiles)


def test_constant_values_for_equal_sides_are_declared():
    (first, _), (second, _) = (
        compute_scores(Layer, Measurement(of_equal_sides(scale), attainable=EQUAL_SAMPLE)) for scale in (1.0, 2.0)
    )
    same = {name for name, value in first.items() if isinstance(value, float | int) and value == second[name]}

    assert same - {"bits_per_weight"} <= {
        name for name, score in collect_scores(Layer).items() if score.equal is not None
    }


class TestTheoreticalSqnr:
    @pytest.mark.parametrize(("bits", "expected"), [(4, 25.84), (8, 49.92), (6, 37.88), (2.5, 16.81)])
    def test_theoretical_sqnr_is_six_decibels_a_bit(self, bits, expected):
        assert expected == pytest.approx(theoretical_sqnr(bits), rel=1e-15)

    def test_theoretical_sqnr_is_given_for_uniform_codes_only(self, tmp_path):
        report = compare(
            tmp_path,
            {"a.weight": numbers(4, 64), "b.weight": numbers(4, 64)},
            {
                "a.weight": int8_codes(4, 64),
                "a.weight_scale": torch.tensor(0.001),
                "b.weight": fp8_codes(4, 64),
                "b.weight_scale": torch.tensor(0.001),
            },
        )

        levels = {layer.layer_name: layer.theoretical_sqnr_db for layer in report.layers}

        assert levels == {"a.weight": pytest.approx(49.92), "b.weight": None}


X = [[1.0, -2.0], [4.0, 0.0]]
Y = [[1.5, -2.0], [3.0, 0.25]]  # e = 0.5, 0; -1, 0.25
BY_HAND = {
    "mean_absolute_error": 1.75 / 4,
    "relative_error": 1.75 / 7,
    "max_absolute_error": 1.0,
    "min_absolute_error": 0.0,
    "std_absolute_error": sqrt(0.13671875),  # 1.3125 / 4 - 0.4375²
    "mean_squared_error": 1.3125 / 4,
    "root_mean_squared_error": sqrt(1.3125 / 4),
    "mean_error": -0.25 / 4,
    "max_relative_error": 0.5,
    "mean_relative_error": 0.75 / 3,  # 0.5, 0, 0.25 where x is not zero
    "zero_reference_elements": 1,
    "snr_db": 12.041199826559248,  # 10·log10(21 / 1.3125) = 10·log10(16)
    "nmse": 1 / 16,
    "weighted_nmse": None,
    "weighted_error_norm": None,
    "weighted_snr_db": None,
    "relative_l2_error": 1 / 4,
    "cosine_similarity": 17.5 / sqrt(21 * 15.3125),
    "pearson_correlation": 15.4375 / sqrt(18.75 * 13.421875),  # means 0.75 and 0.6875
    "original_norm": sqrt(21),
    "quantized_norm": sqrt(15.3125),
    "error_norm": sqrt(1.3125),
    "absolute_error_percentiles": {"p50": 0.25, "p75": 0.5, "p90": 1.0, "p95": 1.0, "p99": 1.0, "p99_9": 1.0},
    "outlier_pct": 75.0,
    "relative_outlier_pct": 75.0,
    "worst_rows": [
        {"row": 1, "snr_db": pytest.approx(10 * math.log10(16 / 1.0625)), "max_absolute_error": 1.0},
        {"row": 0, "snr_db": pytest.approx(10 * math.log10(5 / 0.25)), "max_absolute_error": 0.5},
    ],
    "experts": [],
    "zeroed_pct": 0.0,
    "saturated_pct": 25.0,
    "bits_per_weight": 10.0,
    "theoretical_sqnr_db": 49.92,
    "attainable_snr_db": 10 * math.log10(21 / 0.21),
    "excess_db": 10 * math.log10(1.3125 / 0.21),
    "format_snr_db": 10 * math.log10(21 / 0.21) + 10 * math.log10(0.3 / 0.1),
    "scale_loss_db": 10 * math.log10(0.3 / 0.1),
    "avoidable_db": 10 * math.log10(1.3125 / 0.21) + 10 * math.log10(0.3 / 0.1),
    "off_code_pct": 100 / 3,
    "clipped_pct": 25.0,
    "predicted_kld": 8 / 16,
    "predicted_output_error": None,  # the sensitivity predicts the other cost
    "effective_bits": (12.041199826559248 - 1.76) / 6.02,
}


def make_by_hand():
    sums = sum_up(torch.tensor(X), torch.tensor(Y))
    sums.saturated = 1
    attainable = Attainable(4, x_sq=21.0, e_sq=1.3125, best_sq=0.21, clipped_sq=0.1, off=1, clipped=1)
    attainable = structs.replace(attainable, stored_sq=0.3, good_sq=0.1)
    return compute_scores(Layer, Measurement(sums, 40, 64, 8, counts_saturated=True, attainable=attainable, alpha=8.0))


class TestByHand:
    def test_every_metric_is_worked_out_by_hand(self):
        assert list(BY_HAND) == NAMES

    @pytest.mark.parametrize("name", NAMES)
    def test_metric_equals_its_hand_worked_value(self, name):
        values, nonfinite = make_by_hand()
        values = plain(values)
        expected = BY_HAND[name]

        assert nonfinite == {}
        assert values[name] == (pytest.approx(expected, rel=1e-14) if isinstance(expected, float) else expected)

    def test_sensitivity_from_recorded_calls_predicts_the_output_error(self):
        sums = sum_up(torch.tensor(X), torch.tensor(Y))
        values, _ = compute_scores(Layer, Measurement(sums, alpha=8.0, predicts="predicted_output_error"))

        assert (8 / 16, None) == (values["predicted_output_error"], values["predicted_kld"])

    def test_only_nonzero_elements_count_as_zeroed(self):
        values, _ = measure([[0.0, 0.0, 3.0, 4.0]], [[0.0, 1.0, 0.0, -0.0]])

        assert values["zeroed_pct"] == 50.0
        assert values["zero_reference_elements"] == 1

    def test_signs_are_not_hidden(self):
        values, _ = measure([[1.0, -2.0, 3.0]], [[-1.0, 2.0, -3.0]])

        assert values["cosine_similarity"] == pytest.approx(-1, rel=1e-14)
        assert values["pearson_correlation"] == pytest.approx(-1, rel=1e-14)
        assert values["relative_error"] == 2.0

    def test_bias_keeps_its_sign(self):
        values, _ = measure([[1.0, 2.0]], [[0.75, 1.75]])

        assert values["mean_error"] == -0.25
        assert values["std_absolute_error"] == 0.0

    def test_outliers_are_above_the_requested_threshold(self):
        x = torch.zeros(1, 4)
        sums = sum_up(x, torch.tensor([[0.5, 0.25, -0.75, 0.125]]), outlier=0.25)
        values, _ = compute_scores(Layer, Measurement(sums))

        assert values["outlier_pct"] == 50.0

    def test_rows_without_signal_have_no_snr_and_come_first(self):
        values, _ = measure([[1.0, 1.0], [0.0, 0.0]], [[1.5, 1.0], [0.0, 0.25]])

        assert [row["row"] for row in values["worst_rows"]] == [1, 0]
        assert [row["snr_db"] is None for row in values["worst_rows"]] == [True, False]


def nearest_rank(values, q):
    return np.sort(values)[ceil(round(q * values.size, 6)) - 1]


def snr(signal, noise):
    return 10 * np.log10(signal / noise)


def rows_of(x, y):
    e = y - x
    row_snr = snr((x * x).sum(1), (e * e).sum(1))
    return [
        {"row": int(row), "snr_db": row_snr[row], "max_absolute_error": np.abs(e[row]).max()}
        for row in np.argsort(row_snr)[:KEPT_ROWS]
    ]


BY_NUMPY = {
    "mean_absolute_error": lambda x, y: np.abs(y - x).mean(),
    "relative_error": lambda x, y: np.abs(y - x).sum() / np.abs(x).sum(),
    "max_absolute_error": lambda x, y: np.abs(y - x).max(),
    "min_absolute_error": lambda x, y: np.abs(y - x).min(),
    "std_absolute_error": lambda x, y: np.abs(y - x).std(),
    "mean_squared_error": lambda x, y: ((y - x) ** 2).mean(),
    "root_mean_squared_error": lambda x, y: np.sqrt(((y - x) ** 2).mean()),
    "mean_error": lambda x, y: (y - x).mean(),
    "max_relative_error": lambda x, y: (np.abs(y - x)[x != 0] / np.abs(x[x != 0])).max(),
    "mean_relative_error": lambda x, y: (np.abs(y - x)[x != 0] / np.abs(x[x != 0])).mean(),
    "zero_reference_elements": lambda x, y: ((x == 0) & (y != 0)).sum(),
    "snr_db": lambda x, y: 20 * np.log10(np.linalg.norm(x) / np.linalg.norm(y - x)),
    "nmse": lambda x, y: ((y - x) ** 2).sum() / (x * x).sum(),
    "weighted_nmse": lambda x, y: None,
    "weighted_error_norm": lambda x, y: None,
    "weighted_snr_db": lambda x, y: None,
    "relative_l2_error": lambda x, y: np.linalg.norm(y - x) / np.linalg.norm(x),
    "cosine_similarity": lambda x, y: (x * y).sum() / (np.linalg.norm(x) * np.linalg.norm(y)),
    "pearson_correlation": lambda x, y: np.corrcoef(x.ravel(), y.ravel())[0, 1],
    "original_norm": lambda x, y: np.linalg.norm(x),
    "quantized_norm": lambda x, y: np.linalg.norm(y),
    "error_norm": lambda x, y: np.linalg.norm(y - x),
    "absolute_error_percentiles": lambda x, y: {
        key: pytest.approx(nearest_rank(np.abs(y - x).ravel(), q), rel=0.005) for key, q in PERCENTILES.items()
    },
    "outlier_pct": lambda x, y: 100 * (np.abs(y - x) > OUTLIER).mean(),
    "relative_outlier_pct": lambda x, y: 100 * (np.abs(y - x) > RELATIVE_OUTLIER * np.abs(x)).mean(),
    "worst_rows": rows_of,
    "experts": lambda x, y: [],  # for stacks only: test_experts.py
    "zeroed_pct": lambda x, y: 100 * ((x != 0) & (y == 0)).mean(),
    "saturated_pct": lambda x, y: None,
    "bits_per_weight": lambda x, y: 8.25,
    "theoretical_sqnr_db": lambda x, y: 49.92,
    "attainable_snr_db": lambda x, y: None,  # from a sample: test_attainable.py
    "excess_db": lambda x, y: None,
    "format_snr_db": lambda x, y: None,
    "scale_loss_db": lambda x, y: None,
    "avoidable_db": lambda x, y: None,
    "off_code_pct": lambda x, y: None,
    "clipped_pct": lambda x, y: None,
    "predicted_kld": lambda x, y: None,  # without a sensitivity
    "predicted_output_error": lambda x, y: None,
    "effective_bits": lambda x, y: (20 * np.log10(np.linalg.norm(x) / np.linalg.norm(y - x)) - 1.76) / 6.02,
}
# For the fast computation in float32. The tolerance of a mean of signed errors is relative to the size of errors.
LOOSE = {"mean_error": {"abs": 1e-8}, "worst_rows": {"rel": 1e-6}, "mean_relative_error": {"rel": 1e-6}}


FACTORS = [1.0, 1.1, 0.3, -0.7, -3.0, 448.0, 1 / 448, 1e-4, -1e-6, 1e-12]


def weights(distribution):
    """Return a weight with that distribution, and the same after quantization to a few bits."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(96, 200, generator=generator)
    x = {
        "normal": 0.05 * x,
        "heavy tails": 0.02 * x**3,
        "positive": x.abs() + 0.5,
        "with zeros": (0.3 * x).relu(),
    }[distribution]
    scale = x.abs().amax(1, keepdim=True) / 15
    return x, (x / scale).round() * scale + 1e-3 * torch.randn(96, 200, generator=generator) * (x > 0.2)


class TestByNumpy:
    def test_every_metric_has_a_numpy_definition(self):
        assert list(BY_NUMPY) == NAMES

    @pytest.mark.parametrize("wide", [False, True], ids=["run", "exact"])
    @pytest.mark.parametrize("distribution", ["normal", "heavy tails", "positive", "with zeros"])
    @pytest.mark.parametrize("name", NAMES)
    def test_metric_equals_its_numpy_definition(self, distribution, name, wide):
        x, y = weights(distribution)
        values, _ = measure(x, y, wide, stored_bits=int(8.25 * x.numel()), uniform_bits=8)
        expected = BY_NUMPY[name](x.double().numpy(), y.double().numpy())
        tolerance = {"rel": 1e-11} if wide else LOOSE.get(name, {"rel": 2e-7})
        if name == "worst_rows":
            expected = [pytest.approx(row, **tolerance) for row in expected]
        elif name != "absolute_error_percentiles" and expected is not None:
            expected = pytest.approx(expected, **tolerance)

        assert values[name] == expected

    @pytest.mark.parametrize("factor", FACTORS)
    @pytest.mark.parametrize("wide", [False, True], ids=["run", "exact"])
    def test_wrong_scale_shows_in_the_norm_and_not_in_the_correlations(self, factor, wide):
        x = torch.randn(64, 300, generator=torch.Generator().manual_seed(0))
        values, _ = measure(x, factor * x, wide)

        assert values["quantized_norm"] == pytest.approx(abs(factor) * values["original_norm"], rel=1e-6)
        assert values["cosine_similarity"] == pytest.approx(math.copysign(1, factor), rel=1e-6)
        assert values["pearson_correlation"] == pytest.approx(math.copysign(1, factor), rel=1e-6)

    @pytest.mark.parametrize("factor", FACTORS)
    @pytest.mark.parametrize("seed", range(3))
    def test_correlations_stay_between_minus_one_and_one(self, factor, seed):
        x = torch.randn(64, 300, generator=torch.Generator().manual_seed(seed))
        values, _ = measure(x, factor * x)

        assert -1 <= values["cosine_similarity"] <= 1
        assert -1 <= values["pearson_correlation"] <= 1

    @pytest.mark.parametrize("spread", [0.3, 0.1, 0.02])
    @pytest.mark.parametrize("n", [4096, 100_000])
    def test_pearson_and_deviation_are_accurate_for_norms_near_one(self, spread, n):
        """The scales of a norm are near 1, so most of Σx² is the mean."""
        x = 1 + spread * torch.randn(n, generator=torch.Generator().manual_seed(0))
        y = x.bfloat16().float()
        values, _ = measure(x, y)
        x, y = x.double().numpy(), y.double().numpy()

        assert values["pearson_correlation"] == pytest.approx(np.corrcoef(x, y)[0, 1], abs=1e-6)
        assert values["std_absolute_error"] == pytest.approx(np.abs(y - x).std(), rel=1e-4)


ALL_NAN = {name: "nan" for name in NAMES if name not in ("zero_reference_elements", "worst_rows", "experts")}
NONE_OF_THEM = {
    "original_norm",
    "quantized_norm",
    "error_norm",
    "absolute_error_percentiles",
    "saturated_pct",
    "theoretical_sqnr_db",
    "attainable_snr_db",
    "excess_db",
    "format_snr_db",
    "scale_loss_db",
    "avoidable_db",
    "off_code_pct",
    "clipped_pct",
    "weighted_nmse",
    "weighted_error_norm",
    "weighted_snr_db",
    "predicted_kld",
    "predicted_output_error",
}  # sums over nothing are zero; the others are reported otherwise

UNDEFINED = {
    "an all-zero original": (
        torch.zeros(4, 8),
        torch.full((4, 8), 0.5),
        {
            "relative_error": "+inf",
            "max_relative_error": "nan",
            "mean_relative_error": "nan",
            "snr_db": "-inf",
            "nmse": "+inf",
            "relative_l2_error": "+inf",
            "cosine_similarity": "nan",
            "pearson_correlation": "nan",
            "effective_bits": "-inf",
        },
    ),
    "an all-zero quantized weight": (
        torch.arange(32.0).view(4, 8),
        torch.zeros(4, 8),
        {"cosine_similarity": "nan", "pearson_correlation": "nan"},
    ),
    "both all zero": (
        torch.zeros(4, 8),
        torch.zeros(4, 8),
        dict.fromkeys(
            [
                "relative_error",
                "max_relative_error",
                "mean_relative_error",
                "snr_db",
                "nmse",
                "relative_l2_error",
                "cosine_similarity",
                "pearson_correlation",
                "effective_bits",
            ],
            "nan",
        ),
    ),
    "equal weights": (
        torch.arange(32.0).view(4, 8),
        torch.arange(32.0).view(4, 8),
        {"snr_db": "+inf", "effective_bits": "+inf"},
    ),
    "constant weights": (
        torch.full((4, 8), 0.5),
        torch.full((4, 8), 0.25),
        {"pearson_correlation": "nan"},
    ),
    "a constant original": (
        torch.full((4, 8), 0.5),
        torch.arange(32.0).view(4, 8),
        {"pearson_correlation": "nan"},
    ),
    "a constant quantized weight": (
        torch.arange(32.0).view(4, 8),
        torch.full((4, 8), 0.5),
        {"pearson_correlation": "nan"},
    ),
    "a single element": (torch.tensor([[2.0]]), torch.tensor([[1.0]]), {"pearson_correlation": "nan"}),
    "no element": (
        torch.zeros(0, 8),
        torch.zeros(0, 8),
        {name: word for name, word in ALL_NAN.items() if name not in NONE_OF_THEM},
    ),
    "no finite element": (
        torch.full((4, 8), nan),
        torch.ones(4, 8),
        {name: word for name, word in ALL_NAN.items() if name not in {*NONE_OF_THEM, "bits_per_weight"}},
    ),
    "some infinite or NaN elements": (
        torch.tensor([[1.0, inf, 3.0, 4.0]]),
        torch.tensor([[1.5, 2.0, 3.0, nan]]),
        {"snr_db": "nan", "effective_bits": "nan"},
    ),
}


class TestUndefined:
    @pytest.mark.parametrize("wide", [False, True], ids=["run", "exact"])
    @pytest.mark.parametrize(("x", "y", "expected"), UNDEFINED.values(), ids=UNDEFINED)
    def test_undefined_metrics_are_null_and_named(self, x, y, expected, wide):
        values, nonfinite = measure(x, y, wide)

        assert expected == nonfinite
        assert {values[name] for name in nonfinite} == {None}

    @pytest.mark.parametrize(("x", "y", "expected"), UNDEFINED.values(), ids=UNDEFINED)
    def test_metrics_are_null_only_where_they_are_undefined(self, x, y, expected):
        values, _ = measure(x, y)
        # null for formats without these, without an importance matrix, and without a sensitivity
        told_otherwise = {"saturated_pct", "theoretical_sqnr_db", "weighted_nmse", "weighted_snr_db", *PREDICTED}
        told_otherwise |= {"weighted_error_norm"}
        told_otherwise |= {"attainable_snr_db", "excess_db", "off_code_pct", "clipped_pct"}
        told_otherwise |= {"format_snr_db", "scale_loss_db", "avoidable_db"}

        assert expected.keys() | told_otherwise == {name for name, value in values.items() if value is None}

    def test_percentiles_without_finite_values_are_null(self):
        values, _ = measure(torch.full((2, 2), nan), torch.ones(2, 2))

        assert dict.fromkeys(EVERY_PERCENTILE) == values["absolute_error_percentiles"]

    @pytest.mark.parametrize("size", [1e-170, 1e-50, 1e-41, 1e41, 1e160])
    def test_percentiles_beyond_bfloat16_are_null(self, size):
        x = size * torch.rand(16, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        values, _ = measure(x, 1.5 * x, wide=True)

        assert dict.fromkeys(EVERY_PERCENTILE) == values["absolute_error_percentiles"]

    @pytest.mark.parametrize("constant", [0.1, 1 / 3, 1e-3, 7.7, 1e20, 1e-20])
    @pytest.mark.parametrize("shape", [(1, 1000), (37, 129), (300, 512)], ids=str)  # one row, odd, more than a chunk
    @pytest.mark.parametrize("wide", [False, True], ids=["run", "exact"])
    def test_correlation_with_a_constant_is_always_null(self, constant, shape, wide):
        x = torch.full(shape, constant)
        y = x * (1 + 0.1 * torch.rand(shape, generator=torch.Generator().manual_seed(0)))
        for pair in ((x, y), (y, x), (x, 1.1 * x)):
            _, nonfinite = measure(*pair, wide)

            assert nonfinite == {"pearson_correlation": "nan"}

    def test_aggregates_over_no_layer_are_null_and_named(self):
        values, nonfinite = compute_scores(Aggregate, Measurement(Sums()))
        percentiles = {"relative_error_percentiles", "absolute_error_percentiles"}
        weighted = {"weighted_nmse", "weighted_snr_db", *PREDICTED}  # null without the necessary files
        of_scales = {"attainable_snr_db", "excess_db", "worst_layer_excess_db"}  # null without nearest codes
        of_scales |= {"format_snr_db", "scale_loss_db", "avoidable_db"}

        assert dict.fromkeys(set(AGGREGATE_NAMES) - percentiles - weighted - of_scales, "nan") == nonfinite
        assert dict.fromkeys(LAYER_PERCENTILES) == to_builtins(values["relative_error_percentiles"])
        assert dict.fromkeys(PERCENTILES) == to_builtins(values["absolute_error_percentiles"])


def to_dict(percentiles):
    """Return the percentiles of a report as a dict."""
    return {key: getattr(percentiles, key) for key in PERCENTILES if hasattr(percentiles, key)}


def three_layers():
    """Return originals and their changed values; a fourth is equal on both sides, a fifth is a changed bias."""
    original = {
        "a.weight": torch.tensor([[1.0, -2.0], [4.0, 0.0]]),
        "b.weight": torch.tensor([[2.0, 2.0]]),
        "c.weight": torch.tensor([[1.0, 1.0, 1.0, 1.0]]),
        "d.weight": torch.tensor([[100.0, 100.0]]),
        "a.bias": torch.tensor([50.0]),
    }
    quantized = original | {
        "a.weight": torch.tensor([[1.5, -2.0], [3.0, 0.25]]),  # Σ|e| 1.75, Σe² 1.3125, Σ|x| 7, Σx² 21
        "b.weight": torch.tensor([[2.5, 2.0]]),  # 0.5, 0.25, 4, 8
        "c.weight": torch.tensor([[3.0, 1.0, 1.0, 1.0]]),  # 2, 4, 4, 4
        "a.bias": torch.tensor([60.0]),
    }
    return original, {name: tensor.bfloat16() for name, tensor in quantized.items()}


SNRS = [10 * math.log10(ratio) for ratio in (21 / 1.3125, 8 / 0.25, 4 / 4)]
AGGREGATED = {
    "mean_absolute_error": 4.25 / 10,
    "median_absolute_error": 1.75 / 4,  # of 1.75/4, 0.5/2, 2/4
    "max_absolute_error": 2.0,
    "mean_squared_error": 5.5625 / 10,
    "root_mean_squared_error": sqrt(5.5625 / 10),
    "mean_relative_error": 4.25 / 15,
    "median_relative_error": 0.25,  # of 0.25, 0.125, 0.5
    "max_relative_error": 2.0,
    "relative_error_percentiles": {
        "p50": 0.25,
        "p75": 0.375,
        "p90": pytest.approx(0.45),
        "p95": pytest.approx(0.475),
        "p99": pytest.approx(0.495),
    },
    "overall_snr_db": 10 * math.log10(33 / 5.5625),
    "mean_layer_snr_db": sum(SNRS) / 3,
    "worst_layer_snr_db": 0.0,
    "attainable_snr_db": None,
    "excess_db": None,
    "format_snr_db": None,
    "scale_loss_db": None,
    "avoidable_db": None,
    "worst_layer_excess_db": None,
    "nmse": 5.5625 / 33,
    "weighted_nmse": None,
    "weighted_snr_db": None,
    "cosine_similarity": (17.5 + 9 + 6) / sqrt(33 * (15.3125 + 10.25 + 12)),
    # |e|: five zeros, 0.25, 0.5, 0.5, 1, 2
    "absolute_error_percentiles": {"p50": 0.0, "p75": 0.5, "p90": 1.0, "p95": 2.0, "p99": 2.0, "p99_9": 2.0},
    "predicted_kld": None,
    "predicted_output_error": None,
    "bits_per_weight": 16.0,
    "compression_ratio": 2.0,
}


class TestAggregates:
    def test_aggregates_are_all_worked_out_by_hand(self):
        assert list(AGGREGATED) == AGGREGATE_NAMES

    @pytest.mark.parametrize("name", AGGREGATE_NAMES)
    def test_aggregates_cover_the_layers_that_differ(self, tmp_path, name):
        report = compare(tmp_path, *three_layers())
        expected, value = AGGREGATED[name], getattr(report.aggregate, name)

        assert report.aggregate.nonfinite == {}
        if isinstance(expected, dict):
            assert to_dict(value) == expected
        else:
            assert value == (None if expected is None else pytest.approx(expected, rel=1e-14, abs=1e-300))

    def test_aggregates_count_layers_elements_and_bytes(self, tmp_path):
        total = compare(tmp_path, *three_layers()).aggregate

        assert (3, 10, 40, 20) == (
            total.total_layers,
            total.total_elements,
            total.original_bytes,
            total.quantized_bytes,
        )

    def test_group_aggregates_cover_their_layers(self, tmp_path):
        x, y = weights("normal")
        original = {"layers.0.mlp.up.weight": x, "layers.1.mlp.up.weight": 2 * x, "layers.1.attn.q.weight": x}
        quantized = {name: y * (2 if name == "layers.1.mlp.up.weight" else 1) for name in original}
        groups = compare(tmp_path, original, quantized).groups

        assert {"mlp": 2, "attention": 1} == {key: group.total_layers for key, group in groups["role"].items()}
        assert {"layers.0": 1, "layers.1": 2} == {key: group.total_layers for key, group in groups["block"].items()}
        mlp = groups["role"]["mlp"]
        pooled = [np.concatenate([t.double().numpy().ravel(), 2 * t.double().numpy().ravel()]) for t in (x, y)]
        for name in ("mean_absolute_error", "root_mean_squared_error", "cosine_similarity"):
            assert getattr(mlp, name) == pytest.approx(BY_NUMPY[name](*pooled), rel=1e-7), name
        assert BY_NUMPY["absolute_error_percentiles"](*pooled) == to_dict(mlp.absolute_error_percentiles)

    def test_aggregates_equal_numpy_over_all_elements(self, tmp_path):
        kinds = ("normal", "heavy tails", "positive", "with zeros")
        pairs = {f"{distribution}.weight": weights(distribution) for distribution in kinds}
        report = compare(tmp_path, {n: x for n, (x, _) in pairs.items()}, {n: y for n, (_, y) in pairs.items()})
        x, y = (np.concatenate([pair[side].double().numpy().ravel() for pair in pairs.values()]) for side in (0, 1))
        layers = [
            [BY_NUMPY[name](a.double().numpy(), b.double().numpy()) for a, b in pairs.values()]
            for name in ("mean_absolute_error", "relative_error", "snr_db")
        ]
        expected = {
            "median_absolute_error": np.median(layers[0]),
            "mean_relative_error": BY_NUMPY["relative_error"](x, y),
            "median_relative_error": np.median(layers[1]),
            "overall_snr_db": BY_NUMPY["snr_db"](x, y),
            "mean_layer_snr_db": np.mean(layers[2]),
            "worst_layer_snr_db": np.min(layers[2]),
            "bits_per_weight": 32.0,
            "compression_ratio": 1.0,
        }
        of_scales = {"attainable_snr_db", "excess_db", *PREDICTED}
        of_scales |= {"format_snr_db", "scale_loss_db", "avoidable_db"}
        same = set(AGGREGATE_NAMES) & set(BY_NUMPY) - {"mean_relative_error", "bits_per_weight"} - of_scales
        expected |= {name: BY_NUMPY[name](x, y) for name in same}
        assert None is report.aggregate.weighted_nmse is report.aggregate.weighted_snr_db
        del expected["weighted_nmse"], expected["weighted_snr_db"]
        percentiles = expected.pop("absolute_error_percentiles")
        of_layers = {key: np.quantile(layers[1], q) for key, q in LAYER_PERCENTILES.items()}

        told_apart = {"relative_error_percentiles", "absolute_error_percentiles", "weighted_nmse", "weighted_snr_db"}
        told_apart |= {*of_scales, "worst_layer_excess_db"}

        assert expected.keys() | told_apart == set(AGGREGATE_NAMES)
        assert expected == pytest.approx({name: getattr(report.aggregate, name) for name in expected}, rel=2e-7)
        assert percentiles == to_dict(report.aggregate.absolute_error_percentiles)
        assert of_layers == pytest.approx(to_dict(report.aggregate.relative_error_percentiles), rel=2e-7)
