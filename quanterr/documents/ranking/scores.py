"""The scores of an evaluation, added to the candidates of a ranking."""

import os
from collections.abc import Sequence

from msgspec.structs import replace

from quanterr.documents.evaluation.model import Evaluated, Evaluation
from quanterr.documents.ranking.model import Candidate, Ranking
from quanterr.errors import UsageError
from quanterr.util.text import display

OPTION = "--evaluation"
ERRORS = {"kld_mean": "kld_mean_se", "ppl": "ppl_se", "top1": "top1_se", "output_error": "output_error_se"}


def add_scores(ranking: Ranking, evaluation: Evaluation, path: str | os.PathLike[str]) -> Ranking:
    """Return the ranking with the scores of an evaluation, which was read from ``path``.

    Raises:
        UsageError: the evaluation is of another original, of none of the candidates, or of another file of one.
    """
    where = f"{OPTION} {display(os.fspath(path))}"
    if evaluation.original_bytes != ranking.original_bytes:
        raise UsageError(f"{where}: is of another original, {display(evaluation.original)}")
    check_names([one.path for one in ranking.candidates], evaluation, path)
    return replace(
        ranking, candidates=[_fill(one, evaluation, where) for one in ranking.candidates], evaluation=os.fspath(path)
    )


def check_names(paths: Sequence[str], evaluation: Evaluation, path: str | os.PathLike[str]) -> None:
    """Check that an evaluation is of at least one of the candidates with these paths, or names of recipes.

    Raises:
        UsageError: it is of none.
    """
    if not any(_find_evaluated(one, evaluation.candidates) for one in paths):
        names = ", ".join(display(one.name) for one in evaluation.candidates[:5])
        raise UsageError(f"{OPTION} {display(os.fspath(path))}: evaluates none of the candidates, but {names}")


def _find_evaluated(path: str, candidates: Sequence[Evaluated], nbytes: int | None = None) -> Evaluated | None:
    """Return what was evaluated of a checkpoint: by its path, otherwise by its file's name and its bytes, if known."""
    own = [one for one in candidates if not one.draft]
    same = (one for one in own if os.path.abspath(one.path) == os.path.abspath(path))
    alike = (one for one in own if os.path.basename(one.path) == os.path.basename(path) and nbytes in (None, one.bytes))
    return next(same, None) or next(alike, None)


def _fill(candidate: Candidate, evaluation: Evaluation, where: str) -> Candidate:
    """Return a candidate with its scores, if it was evaluated.

    Raises:
        UsageError: the file has changed since then.
    """
    found = _find_evaluated(candidate.path, evaluation.candidates, candidate.checkpoint_bytes)
    if found is None or candidate.unreadable:
        return candidate
    if found.bytes != candidate.checkpoint_bytes:
        raise UsageError(f"{where}: {display(candidate.name)} is another file now; evaluate it again")
    values = {name: found.value(name) for name in ERRORS}
    return replace(candidate, **values, **{error: found.error(name) for name, error in ERRORS.items()})
