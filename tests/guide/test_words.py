"""Every word that an output shows is explained, and completion offers it."""

import ast
import re
from pathlib import Path
from typing import get_args

import pytest
from support import sample_documents
from support.sample_reports import report_of, tiny

from quanterr import guide
from quanterr.cli import completion
from quanterr.documents.base import Finding
from quanterr.documents.diff.candidates.model import Word as Change
from quanterr.documents.finding_codes import CODES
from quanterr.documents.gate_results import Word as Verdict
from quanterr.documents.kinds import KINDS
from quanterr.metrics import NONFINITE
from quanterr.outputs.sections import FigureGroup, Shares, Table
from quanterr.ranking import gains
from quanterr.selection.roles import ALIASES, OTHER, ROLES
from quanterr.views.comparison.layers import BUCKETS

ROOMS = [Path(guide.__file__).parents[1] / name for name in ("documents", "outputs")]
# Calls that declare a heading → its argument, by position and by keyword.
DECLARED = {"Column": (0, "header"), "Figure": (0, "title"), "MapMetric": (0, "column"), "Table": (1, "first")}
SAMPLES = {
    "report": lambda: report_of(tiny()),
    **{
        name: getattr(sample_documents, name)
        for document_kind in sample_documents.KINDS_WITH_SAMPLES
        for name in (document_kind, f"{document_kind}_diff")
    },
    "encoder": sample_documents.encoder,
    "diff": sample_documents.report_diff,
}
OF_DATA = re.compile(r"[\d,]+-[\d,]+|[\d.]+ % (of columns )?out|scale [+-]\d+ %|step \d+|")  # headings with numbers


def declared_headings() -> set[str]:
    """Return headings that the code declares as texts, including those of tables that no sample has."""
    headings = set(
        re.findall(r'title: "([^"$]+)"', "".join(path.read_text() for room in ROOMS for path in room.rglob("*.js")))
    )
    for path in (path for room in ROOMS for path in room.rglob("*.py")):
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in DECLARED:
                position, keyword = DECLARED[call.func.id]
                given = [*call.args[position : position + 1], *(k.value for k in call.keywords if k.arg == keyword)]
                headings |= {argument.value for argument in given if isinstance(argument, ast.Constant)}
    return headings


def list_shown_words(document) -> set[str]:
    """Return the headings and figures of a document, its verdict and the codes of its findings."""
    view, words = document.view(10), set()
    names = {candidate.name for candidate in getattr(document, "candidates", ())}
    for part in (part for section in view.sections for part in section.parts):
        if isinstance(part, Table):
            words |= {part.first, *(column.header for column in part.columns)} - names
        elif isinstance(part, FigureGroup):
            words |= {figure.title for figure in part.shown}
        elif isinstance(part, Shares):
            words |= {share.title for whole in part.wholes for share in whole.shares}
    return words | {view.word or "pass"}


def of_vocabularies() -> set[str]:
    vocabulary_words = set()
    for document_kind in KINDS.values():
        words = document_kind.values.VOCABULARY
        vocabulary_words |= {*words.items, *words.items.values(), *words.whole, *words.model}
        vocabulary_words |= {score.title for score in words.scores.values()}
    return vocabulary_words


WORDS = {
    "headings": declared_headings(),
    "rules": of_vocabularies(),
    "findings": {*CODES, *get_args(Finding.__annotations__["severity"])},
    "verdicts": {*get_args(Verdict), "compared", "evaluated"},
    "roles": {*(role for role, _ in ROLES), *ALIASES, OTHER},
    "states": {*BUCKETS, *BUCKETS.values(), "not compared", "not ranked", "undefined", "exact", "not finite"},
    "changes": {*get_args(Change), "within chance", "new", "gone"},
    "gains": set(gains.WORDS.values()),
    "rows": {"floor", "macro average", "this plan", "knee", "Pareto-optimal", *NONFINITE},
}


def find_unexplained(words: set[str]) -> set[str]:
    missing = set()
    for word in words:
        if OF_DATA.fullmatch(word):
            continue
        try:
            guide.explain(word)
        except guide.UsageError:
            missing.add(word)
    return missing


@pytest.mark.parametrize("document_kind", WORDS)
def test_every_declared_word_is_explained(document_kind):
    assert WORDS[document_kind]
    assert set() == find_unexplained(WORDS[document_kind])


@pytest.mark.parametrize("document_kind", SAMPLES)
def test_every_word_in_a_document_is_explained(document_kind):
    assert set() == find_unexplained(list_shown_words(SAMPLES[document_kind]()))


def test_word_is_found_in_other_spellings():
    assert guide.explain("old SNR dB") == guide.explain("SNR") == guide.explain("snr")
    assert "## attention" in guide.explain("attn")


def test_completion_offers_the_explained_words():
    offered = set(completion.names())

    assert {"predicted KLD", "attn", "not compared", "relative", "kld_mean_se", "fp8_row"} <= offered
    assert {*CODES, *guide.words.WORDS} <= offered
