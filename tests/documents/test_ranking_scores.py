"""The scores of an evaluation in a ranking."""

import pytest
from msgspec.structs import replace
from support.sample_documents import evaluation, ranking

from quanterr.documents.ranking.scores import add_scores
from quanterr.errors import UsageError


def both():
    """Return a ranking, and an evaluation of its candidate fp8 and of another one."""
    ranked = ranking()
    candidates = [replace(candidate, path=f"elsewhere/{candidate.name}.safetensors") for candidate in ranked.candidates]
    ranked = replace(ranked, candidates=candidates, original_bytes=1 << 21)
    [candidate] = [candidate for candidate in candidates if candidate.name == "fp8"]
    document = evaluation()
    evaluated = [replace(candidate, path=f"here/{candidate.name}.safetensors") for candidate in document.candidates]
    return ranked, replace(document, candidates=[replace(evaluated[0], bytes=candidate.checkpoint_bytes), evaluated[1]])


def test_scores_are_added_to_the_file_of_the_same_name():
    ranked, evaluation = both()
    added = {candidate.name: candidate for candidate in add_scores(ranked, evaluation, "e.json").candidates}
    fp8, scores = added["fp8"], evaluation.candidates[0].scores

    assert (scores.kld_mean, scores.kld_error, scores.ppl, scores.top1) == (
        fp8.kld_mean,
        fp8.kld_mean_se,
        fp8.ppl,
        fp8.top1,
    )
    assert (None, None) == (added["int8"].kld_mean, added["int8"].ppl)


def test_all_outputs_show_the_scores(tmp_path):
    ranked, evaluation = both()
    added = add_scores(ranked, evaluation, "e.json")
    for suffix in ("md", "csv", "html"):
        added.save(tmp_path / f"r.{suffix}")
    shown = {suffix: (tmp_path / f"r.{suffix}").read_text() for suffix in ("md", "csv", "html")}

    assert "| KLD | PPL | same top token |" in shown["md"]
    assert "0.01250 ± 0.00060" in shown["md"]
    assert "0.0125" in shown["csv"]
    assert "KLD [nat] over size" in shown["html"]
    assert "fp8 has the lowest KLD (0.01250 ± 0.00060)" in added.view(0).conclusion


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"original_bytes": 5}, "e.json: is of another original, original.safetensors"),
        ({"candidates": []}, "e.json: evaluates none of the candidates"),
    ],
)
def test_evaluation_of_something_else_is_refused(changed, says):
    ranked, evaluation = both()
    with pytest.raises(UsageError, match=says):
        add_scores(ranked, replace(evaluation, **changed), "e.json")


def test_evaluation_of_an_older_file_is_refused():
    ranked, evaluation = both()
    evaluation.candidates[0].bytes += 1
    evaluation.candidates[0].path = next(candidate.path for candidate in ranked.candidates if candidate.name == "fp8")
    with pytest.raises(UsageError, match="fp8 is another file now; evaluate it again"):
        add_scores(ranked, evaluation, "e.json")
