"""The view of changes between candidates of two documents, and its CSV rows."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib import import_module

from quanterr.documents.diff.candidates.model import CandidateChange, CandidateDiff, MetricChange
from quanterr.documents.kinds import KINDS
from quanterr.metrics.scores import Score
from quanterr.outputs.formatting import format_in_units
from quanterr.outputs.sections import Column, Lines, Name, Part, Section, Table, View, fill
from quanterr.util.strict_json import JsonObject
from quanterr.util.text import count, display, size
from quanterr.views.diff.candidates.items import ItemWords
from quanterr.views.diff.parts import format_answer, format_sizes, list_names, make_view

NUMBERS = (Column("old", 1), Column("new", 2), Column("change", 0), Column("", 3, right=False))
MAX_SUMMARIZED = 3  # candidates, numbers and items in the summary
LEADS = ("kld_mean", "cosine_mean", "snr_db", "ssim", "cost", "bits_per_weight")  # the most informative first
CSV_COLUMNS = ("list", "candidate", "name", "old", "new", "change", "change_se", "chance", "word")


def view(diff: CandidateDiff, top: int) -> View:
    """Return the view of the changes, with ``top`` items in each table."""
    words = _find_words(find_document_kind(diff))
    summary = list(_list_changes(diff))
    return make_view((diff.old, diff.new), conclusion(diff), _sections(diff, top), words.about, summary=summary)


def _list_changes(diff: CandidateDiff) -> Iterator[str]:
    """Yield the numbers of each candidate that changed by more than chance, and the items that changed most."""
    document = find_document_kind(diff)
    scores = _find_scores(document)
    cells = [cell for _, cell in _find_words(document).columns]
    for candidate in diff.candidates[:MAX_SUMMARIZED]:
        changed = [change for change in candidate.metrics if change.change and not change.chance][:MAX_SUMMARIZED]
        for change in changed:
            title, old, new, by, word = _number(change, scores[change.metric])
            yield f"  {display(candidate.name)}: {title} {old} -> {new} ({by}), {word}"
        for item in (
            *candidate.worse[:MAX_SUMMARIZED],
            *candidate.better[: max(MAX_SUMMARIZED - len(candidate.worse), 0)],
        ):
            yield f"  {display(item.layer)}: {', '.join(cell(item) for cell in cells)}"


def find_document_kind(diff: CandidateDiff) -> str:
    """Return the type of both documents, such as "evaluation"."""
    return diff.schema.removeprefix("quanterr.").removesuffix("_diff")


def _find_words(document: str) -> ItemWords:
    """Return the words and columns for changed items of a type of document."""
    return import_module(f"quanterr.views.{document}.view").ITEM_WORDS  # type: ignore[no-any-return]


def _find_item(document: str) -> str:
    """Return the name of the items that are compared, such as "layer"."""
    return KINDS[f"quanterr.{document}"].values.CHANGES.item  # type: ignore[no-any-return]


def _find_scores(document: str) -> dict[str, Score]:
    """Return the scores of a type of document by name."""
    return KINDS[f"quanterr.{document}"].values.VOCABULARY.scores  # type: ignore[no-any-return]


def conclusion(diff: CandidateDiff) -> str:
    """Return the changes in a sentence, such as "fp8: KLD 0.0125 -> 0.01; 9 numbers better, 0 worse"."""
    document = find_document_kind(diff)
    scores = _find_scores(document)
    parts = [
        f"{display(candidate.name)}: {_summarize(candidate, scores, _find_item(document))}"
        for candidate in diff.candidates
    ]
    more = [(len(diff.added), "new"), (len(diff.gone), "gone")]
    parts += [f"{count(n, 'candidate')} {word}" for n, word in more if n]
    return format_answer(diff.difference, "; ".join(parts) or "no candidate is in both")


def _summarize(candidate: CandidateChange, scores: dict[str, Score], item: str) -> str:
    """Return the change of the main metric, and how many metrics are better or worse and how many items changed."""
    words = [change.word for change in candidate.metrics if not change.chance]
    numbers = f"{count(words.count('better'), 'number')} better, {words.count('worse'):,} worse"
    lead, first = next((change for name in LEADS for change in candidate.metrics if change.metric == name), None), ""
    if lead is not None:
        old, new = (format_in_units(scores[lead.metric], value) for value in (lead.old, lead.new))
        first = f"{scores[lead.metric].title} {f'{new} as before' if old == new else f'{old} -> {new}'}; "
    changed = len(candidate.worse) + len(candidate.better)
    items = f"; {changed:,} of {count(changed + candidate.unchanged, item)} changed" if changed else ""
    return f"{first}{numbers}{items}"


def _sections(diff: CandidateDiff, top: int) -> Iterator[Section]:
    document = find_document_kind(diff)
    for number, candidate in enumerate(diff.candidates):
        yield Section(f"candidate-{number}", _title(candidate), list(_parts(candidate, document, top)))
    names = (("new", "new", diff.added), ("gone", "gone", diff.gone))
    yield from list_names("candidate", names, len(diff.added + diff.gone))


def _title(change: CandidateChange) -> str:
    was = "" if change.old_name == change.name else f", {display(change.old_name)} before"
    verdict = change.new_verdict or ""
    if change.old_verdict != change.new_verdict:
        verdict = f"{change.old_verdict} -> {change.new_verdict}"
    new = change.new_bytes
    stored = "" if new is None else size(new) if change.old_bytes is None else format_sizes(change.old_bytes, new)
    more = ", ".join(filter(None, (verdict, stored)))
    return f"{display(change.name)}{was}{f': {more}' if more else ''}"


def _parts(change: CandidateChange, document: str, top: int) -> Iterator[Part]:
    scores = _find_scores(document)
    yield Table(
        _title(change), "number", NUMBERS, [_number(metric, scores[metric.metric]) for metric in change.metrics]
    )
    item_name, words = _find_item(document), _find_words(document)
    for word, items in ((words.worse, change.worse), (words.better, change.better)):
        if items:
            filled = fill(words.columns, ((Name(metric.layer), metric) for metric in items[:top]))
            yield Table(f"{count(len(items), item_name)} {word}", item_name, *filled, max(len(items) - top, 0))
    for section in list_names(item_name, (("new", "new", change.added), ("gone", "gone", change.gone)), top):
        yield from section.parts
    yield Lines([f"{count(change.unchanged, item_name)} unchanged"])


def _number(change: MetricChange, score: Score) -> Sequence[str]:
    old, new = (format_in_units(score, value) for value in (change.old, change.new))
    by = format_in_units(score, change.change, change.change_se, 3, "+") if change.change else "-"
    chance = ", within chance" if change.chance and change.change else ""
    return [score.title, old, new, by, f"{change.word}{chance}"]


def rows(diff: CandidateDiff) -> Iterator[JsonObject]:
    """Yield CSV rows: the metrics and the changed, new and gone items of each candidate, by ``list``."""
    ends_of = _find_words(find_document_kind(diff)).ends
    for candidate in diff.candidates:
        for change in candidate.metrics:
            numbers = {key: value for key, value in asdict(change).items() if key != "metric"}
            yield {"list": "numbers", "candidate": candidate.name, "name": change.metric, **numbers}
        for word, items in (("worse", candidate.worse), ("better", candidate.better)):
            for item in items:
                ends = zip(("old", "new", "change"), ends_of(item), strict=True)
                yield {"list": word, "candidate": candidate.name, "name": item.layer, **dict(ends)}
        for word, names in (("new", candidate.added), ("gone", candidate.gone)):
            yield from ({"list": word, "candidate": candidate.name, "name": name} for name in names)
    for word, names in (("new", diff.added), ("gone", diff.gone)):
        yield from ({"list": word, "candidate": name} for name in names)
