"""Adds the scores of an evaluation to the candidates of a ranking."""

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
        UsageError: the evaluation has another original, evaluates none of the candidates, or a candidate's file has
            changed since.
    """
    where = f"{OPTION} {display(os.fspath(path))}"
    if evaluation.original_bytes != ranking.original_bytes:
        raise UsageError(f"{where}: is of another original, {display(evaluation.original)}")
    check_names([candidate.path for candidate in ranking.candidates], evaluation, path)
    return replace(
        ranking,
        candidates=[_fill(candidate, evaluation, where) for candidate in ranking.candidates],
        evaluation=os.fspath(path),
    )


def check_names(paths: Sequence[str], evaluation: Evaluation, path: str | os.PathLike[str]) -> None:
    """Check that a file evaluates at least one candidate with one of these paths or names of recipes.

    Raises:
        UsageError: it evaluates none of them.
    """
    if not any(_find_evaluated(path_or_name, evaluation.candidates) for path_or_name in paths):
        names = ", ".join(display(candidate.name) for candidate in evaluation.candidates[:5])
        raise UsageError(f"{OPTION} {display(os.fspath(path))}: evaluates none of the candidates, but {names}")


def _find_evaluated(path: str, candidates: Sequence[Evaluated], nbytes: int | None = None) -> Evaluated | None:
    """Return the evaluation of a checkpoint, found by its path or else by its file name and, if known, its size."""
    checkpoints = [candidate for candidate in candidates if not candidate.draft]
    same = (candidate for candidate in checkpoints if os.path.abspath(candidate.path) == os.path.abspath(path))
    alike = (
        candidate
        for candidate in checkpoints
        if os.path.basename(candidate.path) == os.path.basename(path) and nbytes in (None, candidate.bytes)
    )
    return next(same, None) or next(alike, None)


def _fill(candidate: Candidate, evaluation: Evaluation, where: str) -> Candidate:
    """Return a candidate with its scores, if it was evaluated.

    Raises:
        UsageError: the file has changed since then.
    """
    evaluated = _find_evaluated(candidate.path, evaluation.candidates, candidate.checkpoint_bytes)
    if evaluated is None or candidate.unreadable:
        return candidate
    if evaluated.bytes != candidate.checkpoint_bytes:
        raise UsageError(f"{where}: {display(candidate.name)} is another file now; evaluate it again")
    values = {name: evaluated.value(name) for name in ERRORS}
    return replace(candidate, **values, **{error: evaluated.error(name) for name, error in ERRORS.items()})
