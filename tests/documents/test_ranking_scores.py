"""The scores of an evaluation in a ranking."""

import pytest
from msgspec.structs import replace
from support.sample_documents import evaluation, ranking

from quanterr.documents.ranking.scores import add_scores
from quanterr.errors import UsageError


def both():
    """Return a ranking, and an evaluation of its candidate fp8 and of another one."""
    ranked = ranking()
    candidates = [replace(one, path=f"elsewhere/{one.name}.safetensors") for one in ranked.candidates]
    ranked = replace(ranked, candidates=candidates, original_bytes=1 << 21)
    [own] = [one for one in candidates if one.name == "fp8"]
    found = evaluation()
    evaluated = [replace(one, path=f"here/{one.name}.safetensors") for one in found.candidates]
    return ranked, replace(found, candidates=[replace(evaluated[0], bytes=own.checkpoint_bytes), evaluated[1]])


def test_scores_are_added_to_the_file_of_the_same_name():
    ranked, found = both()
    added = {one.name: one for one in add_scores(ranked, found, "e.json").candidates}
    fp8, scores = added["fp8"], found.candidates[0].scores

    assert (scores.kld_mean, scores.kld_error, scores.ppl, scores.top1) == (
        fp8.kld_mean,
        fp8.kld_mean_se,
        fp8.ppl,
        fp8.top1,
    )
    assert (None, None) == (added["int8"].kld_mean, added["int8"].ppl)


def test_all_outputs_show_the_scores(tmp_path):
    ranked, found = both()
    added = add_scores(ranked, found, "e.json")
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
    ranked, found = both()
    with pytest.raises(UsageError, match=says):
        add_scores(ranked, replace(found, **changed), "e.json")


def test_evaluation_of_an_older_file_is_refused():
    ranked, found = both()
    found.candidates[0].bytes += 1
    found.candidates[0].path = next(one.path for one in ranked.candidates if one.name == "fp8")
    with pytest.raises(UsageError, match="fp8 is another file now; evaluate it again"):
        add_scores(ranked, found, "e.json")
