"""The view of changes between candidates of two documents, and its CSV rows."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from quanterr.documents.diff.base import format_answer, format_sizes, list_names, make_view
from quanterr.documents.diff.candidates.model import (
    CandidateChange,
    CandidateDiff,
    ImageChange,
    ItemChange,
    LayerChange,
    MetricChange,
    StoredChange,
    WeightChange,
)
from quanterr.documents.kinds import KINDS
from quanterr.metrics.scores import Score
from quanterr.outputs.formatting import format_in_units, format_percent, format_size_change
from quanterr.outputs.sections import Column, Lines, Name, Part, Section, Table, View
from quanterr.util.strict_json import JsonObject
from quanterr.util.text import count, display, size

NUMBERS = (Column("old", 1), Column("new", 2), Column("change", 0), Column("", 3, right=False))
OF_ITEMS = {
    "evaluation": (Column("old output error", 1), Column("new output error", 2), Column("ratio", 0)),
    "ranking": (Column("old dB", 1), Column("new dB", 2), Column("change dB", 0)),
    "plan": (Column("old recipe", 0, right=False), Column("new recipe", 1, right=False), Column("bytes", 3),
             Column("cost", 2)),
    "inspection": (Column("old format", 0, right=False), Column("new format", 1, right=False), Column("bytes", 2)),
    "images": (Column("old SSIM", 1), Column("new SSIM", 2), Column("change", 0)),
}  # fmt: skip
ITEMS = {
    "evaluation": ("weight", "with worse output", "with better output"),
    "ranking": ("layer", "worse", "better"),
    "plan": ("layer", "changed, at more cost", "changed, at no more cost"),
    "inspection": ("weight", "changed, with more bytes", "changed, with no more bytes"),
    "images": ("pair", "further from the original", "nearer to it"),
}
MOST = 3  # candidates, numbers and items in the summary
LEADS = ("kld_mean", "cosine_mean", "snr_db", "ssim", "cost", "bits_per_weight")  # the first that there is says most
CSV_COLUMNS = ("list", "candidate", "name", "old", "new", "change", "change_se", "chance", "word")
ABOUT = (
    "From two stored results. ± is a standard error as if both had read different tokens. Within chance: the change is "
    "no larger than different tokens would cause."
)
ABOUT_KIND = {
    "plan": "From two stored plans. Costs are predicted, in the same measure for both.",
    "images": "From two stored results. ± is a standard error as if both had compared different images.",
    "inspection": "From two stored inspections: formats and sizes, no values.",
}


def view(diff: CandidateDiff, top: int) -> View:
    """Return the view of the changes with ``top`` items of each kind."""
    about = ABOUT_KIND.get(find_document_kind(diff), ABOUT)
    summary = list(_list_changes(diff))
    return make_view((diff.old, diff.new), conclusion(diff), _sections(diff, top), about, summary=summary)


def _list_changes(diff: CandidateDiff) -> Iterator[str]:
    """Yield the numbers of each candidate that changed by more than chance, and the items that changed most."""
    document = find_document_kind(diff)
    scores = KINDS[f"quanterr.{document}"].values.VOCABULARY.scores
    for one in diff.candidates[:MOST]:
        changed = [change for change in one.metrics if change.change and not change.chance][:MOST]
        for change in changed:
            title, old, new, by, word = _number(change, scores[change.metric])
            yield f"  {display(one.name)}: {title} {old} -> {new} ({by}), {word}"
        for item in (*one.worse[:MOST], *one.better[: MOST - len(one.worse)]):
            yield f"  {display(item.layer)}: {', '.join(_cells(item))}"


def find_document_kind(diff: CandidateDiff) -> str:
    """Return the kind of both documents: "evaluation", "ranking" or "plan"."""
    return diff.schema.removeprefix("quanterr.").removesuffix("_diff")


def conclusion(diff: CandidateDiff) -> str:
    """Return the changes in a sentence, such as "fp8: KLD 0.0125 -> 0.01, better; 9 numbers better, 0 worse"."""
    document = find_document_kind(diff)
    scores = KINDS[f"quanterr.{document}"].values.VOCABULARY.scores
    found = [f"{display(one.name)}: {_summarize(one, scores, ITEMS[document][0])}" for one in diff.candidates]
    more = [(len(diff.added), "new"), (len(diff.gone), "gone")]
    found += [f"{count(n, 'candidate')} {word}" for n, word in more if n]
    return format_answer(diff.difference, "; ".join(found) or "no candidate is in both")


def _summarize(one: CandidateChange, scores: dict[str, Score], item: str) -> str:
    """Return the change of the main metric, the numbers of metrics that are better and worse, and of changed items."""
    words = [change.word for change in one.metrics if not change.chance]
    numbers = f"{count(words.count('better'), 'number')} better, {words.count('worse'):,} worse"
    lead = next((change for name in LEADS for change in one.metrics if change.metric == name), None)
    first = "" if lead is None else f"{scores[lead.metric].title} {_format_change(lead, scores[lead.metric])}; "
    changed = len(one.worse) + len(one.better)
    items = f"; {changed:,} of {count(changed + one.unchanged, item)} changed" if changed else ""
    return f"{first}{numbers}{items}"


def _format_change(change: MetricChange, score: Score) -> str:
    old, new = (format_in_units(score, value) for value in (change.old, change.new))
    return f"{new} as before" if old == new else f"{old} -> {new}"


def _sections(diff: CandidateDiff, top: int) -> Iterator[Section]:
    document = find_document_kind(diff)
    for number, candidate in enumerate(diff.candidates):
        yield Section(f"candidate-{number}", _title(candidate), list(_parts(candidate, document, top)))
    names = (("new", "new", diff.added), ("gone", "gone", diff.gone))
    yield from list_names("candidate", names, len(diff.added + diff.gone))


def _title(found: CandidateChange) -> str:
    was = "" if found.old_name == found.name else f", {display(found.old_name)} before"
    verdict = found.new_verdict or ""
    if found.old_verdict != found.new_verdict:
        verdict = f"{found.old_verdict} -> {found.new_verdict}"
    new = found.new_bytes
    stored = "" if new is None else size(new) if found.old_bytes is None else format_sizes(found.old_bytes, new)
    return f"{display(found.name)}{was}: {', '.join(filter(None, (verdict, stored)))}"


def _parts(found: CandidateChange, document: str, top: int) -> Iterator[Part]:
    scores = KINDS[f"quanterr.{document}"].values.VOCABULARY.scores
    yield Table(_title(found), "number", NUMBERS, [_number(one, scores[one.metric]) for one in found.metrics])
    item, *words = ITEMS[document]
    for word, items in zip(words, (found.worse, found.better), strict=True):
        if items:
            rows = [[Name(one.layer), *_cells(one)] for one in items[:top]]
            yield Table(f"{count(len(items), item)} {word}", item, OF_ITEMS[document], rows, len(items) - len(rows))
    for section in list_names(item, (("new", "new", found.added), ("gone", "gone", found.gone)), top):
        yield from section.parts
    yield Lines([f"{count(found.unchanged, item)} unchanged"])


def _number(change: MetricChange, score: Score) -> Sequence[str]:
    old, new = (format_in_units(score, value) for value in (change.old, change.new))
    by = format_in_units(score, change.change, change.change_se, 3, "+") if change.change else "-"
    chance = ", within chance" if change.chance and change.change else ""
    return [score.title, old, new, by, f"{change.word}{chance}"]


def _cells(item: ItemChange) -> Sequence[str]:
    if isinstance(item, WeightChange):
        ratio = "-" if item.ratio is None else f"× {item.ratio:.3g}"
        return [format_percent(item.old_output_error), format_percent(item.new_output_error), ratio]
    if isinstance(item, LayerChange):
        levels = ["exact" if level is None else f"{level:.2f}" for level in (item.old_snr_db, item.new_snr_db)]
        return [*levels, "-" if item.change_db is None else f"{item.change_db:+.4g}"]
    if isinstance(item, ImageChange):
        return [f"{item.old_ssim:.4g}", f"{item.new_ssim:.4g}", f"{item.change:+.3g}"]
    stored = format_size_change(item.new_bytes - item.old_bytes)
    if isinstance(item, StoredChange):
        return [item.old_format or "unread", item.new_format or "unread", stored]
    return [item.old_recipe, item.new_recipe, stored, f"{item.new_cost - item.old_cost:+.3g}"]


def rows(diff: CandidateDiff) -> Iterator[JsonObject]:
    """Yield CSV rows: the metrics and the changed, new and gone items of each candidate, by ``list``."""
    for one in diff.candidates:
        for change in one.metrics:
            numbers = {key: value for key, value in asdict(change).items() if key != "metric"}
            yield {"list": "numbers", "candidate": one.name, "name": change.metric, **numbers}
        for word, items in (("worse", one.worse), ("better", one.better)):
            for item in items:
                yield {"list": word, "candidate": one.name, "name": item.layer, **_pick_values(item)}
        for word, names in (("new", one.added), ("gone", one.gone)):
            yield from ({"list": word, "candidate": one.name, "name": name} for name in names)
    for word, names in (("new", diff.added), ("gone", diff.gone)):
        yield from ({"list": word, "candidate": name} for name in names)


def _pick_values(item: ItemChange) -> dict[str, object]:
    if isinstance(item, WeightChange):
        old, new = item.old_output_error, item.new_output_error
        return {"old": old, "new": new, "change": new - old}
    if isinstance(item, LayerChange):
        return {"old": item.old_snr_db, "new": item.new_snr_db, "change": item.change_db}
    if isinstance(item, StoredChange):
        return {"old": item.old_format, "new": item.new_format, "change": item.new_bytes - item.old_bytes}
    if isinstance(item, ImageChange):
        return {"old": item.old_ssim, "new": item.new_ssim, "change": item.change}
    return {"old": item.old_recipe, "new": item.new_recipe, "change": item.new_bytes - item.old_bytes}
