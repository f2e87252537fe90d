"""The uncertainty of an evaluation: errors from chunks, and whether one candidate is nearer than another."""

from math import sqrt

import pytest
import torch
from support.small_models import ids, save_model

import quanterr
from quanterr.documents.evaluation.pairs import compare_neighbours, compare_paired
from quanterr.evaluation.measures import scores
from quanterr.util.student import compute_p_value, find_t
from quanterr.views.evaluation.numbers_as_text import conclusion, describe_nearer, describe_precision, format_metric

pytest.importorskip("transformers", reason='transformers is not installed (pip install "quanterr[evaluate]")')


@pytest.fixture(scope="module")
def evaluation(tmp_path_factory):
    folder = tmp_path_factory.mktemp("intervals")
    original = save_model("llama", folder / "original")
    return quanterr.evaluate(
        original, against=["int8_row", "int6_g32", "int4_g32"], tokens=ids(folder, 160), context=16
    )


@pytest.mark.parametrize(
    ("freedom", "t"),  # 97.5 % quantiles of Student's t; NIST, Engineering Statistics Handbook, 1.3.6.7.2
    [(1, 12.706), (2, 4.303), (3, 3.182), (7, 2.365), (10, 2.228), (29, 2.045), (100, 1.984)],
)
def test_p_value_follows_student_t(freedom, t):
    steepest = 0.12  # 2 · density at these quantiles: the change of p per 1
    assert compute_p_value(t, freedom) == pytest.approx(0.05, abs=0.0005 * steepest)  # t has three decimals
    assert compute_p_value(0.0, freedom) == 1
    assert find_t(0.05, freedom) == pytest.approx(t, abs=0.0005)


def test_difference_is_paired_by_chunks():
    first, second = [1.0, 2.0, 3.0, 4.0, 5.0], [1.5, 2.4, 3.6, 4.5, 5.5]
    difference = compare_paired(first, second)

    assert difference.mean == pytest.approx(0.5)
    assert difference.error == pytest.approx(sqrt(0.02 / 4 / 5))  # the standard error of 0.5, 0.4, 0.6, 0.5, 0.5
    assert 0.00005 < difference.p < 0.0001  # t = 15.81 with 4 degrees of freedom, between 15.54 and 18.52


def test_few_chunks_or_identical_numbers_give_no_comparison():
    assert compare_paired([1.0, 2.0, 3.0, 4.0], [1.5, 2.4, 3.6, 4.5]) is None
    assert compare_paired([1.0] * 5, [1.0] * 5) is None


def test_result_contains_the_chunks_and_their_mean(evaluation):
    for candidate in evaluation.candidates:
        chunks = torch.tensor(candidate.scores.kld_chunks, dtype=torch.float64)
        assert len(chunks) == candidate.scores.chunks == 10
        assert float(chunks.mean()) == pytest.approx(candidate.scores.kld_mean, rel=1e-12)
        assert float(chunks.std()) / sqrt(10) == pytest.approx(candidate.scores.kld_mean_chunk_se, rel=1e-12)


def test_neighbours_are_compared_by_divergence_and_reported(evaluation):
    differences = compare_neighbours(evaluation)

    assert ["int8_row", "int6_g32"] == [near.name for near, _, _ in differences]
    assert "int8_row is nearer than int6_g32: by " in describe_nearer(*differences[0])
    assert "; int6_g32 is next (p" in conclusion(evaluation)


def test_candidate_within_chance_is_not_called_nearer(evaluation):
    near, far, _ = compare_neighbours(evaluation)[0]
    chunks = near.scores.kld_chunks
    apart = compare_paired(chunks, [value * (1.1 if n % 2 else 0.92) for n, value in enumerate(chunks)])

    assert apart.p > 0.05
    assert "int8_row is not significantly nearer than int6_g32" in describe_nearer(near, far, apart)


def test_shown_errors_equal_those_for_gates(evaluation):
    candidate = evaluation.candidates[2]
    error = max(candidate.scores.kld_mean_se, candidate.scores.kld_mean_chunk_se)

    assert candidate.error("kld_mean") == error
    assert f"± {error:.1g}"[:3] in format_metric(candidate, "kld_mean")
    assert candidate.error("ppl_ratio") == pytest.approx(
        candidate.scores.ppl_ratio * max(candidate.scores.ln_ppl_ratio_se, candidate.scores.ln_ppl_ratio_chunk_se)
    )
    assert candidate.error("kld_p99") == candidate.scores.kld_p99_se > 0


def test_more_chunks_are_requested_where_the_error_is_large(evaluation):
    best = evaluation.candidates[0]
    share = best.scores.kld_error / best.scores.kld_mean

    assert share > 0.03
    assert describe_precision(evaluation).startswith("10 chunks: KLD ± ")


def test_quantile_error_comes_from_resampled_chunks():
    """If all values within a chunk are equal, the error is the spread of chunks, which is zero for equal chunks."""
    made = scores.Scores({n: torch.full((8, 20), float(n % 2 + 1), dtype=torch.float64) for n in range(8)})
    alike = scores.Scores({n: torch.ones(8, 20, dtype=torch.float64) for n in range(8)})
    few = scores.Scores({n: torch.ones(8, 20, dtype=torch.float64) for n in range(7)})

    assert 0 < made._quantile_se(0.5) < 1
    assert alike._quantile_se(0.99) == 0
    assert few._quantile_se(0.99) is None
