"""What changed between two evaluations, in lines for the terminal."""

from collections.abc import Iterator

from quanterr.report.diff.as_text import TONES, listed
from quanterr.report.diff.evaluations import CandidateChange, EvaluationDiff, MetricChange, WeightChange
from quanterr.report.evaluation.model import SCORES
from quanterr.report.evaluation.wording import in_units
from quanterr.util.colors import painted
from quanterr.util.text import count, display, size


def evaluation_lines(found: EvaluationDiff, top: int, colored: bool = False) -> Iterator[str]:
    """What is reported of it: at most ``top`` weights of each kind. No line begins with a name."""
    if found.difference:
        yield f"{painted('warning', 'warning', colored)}: not comparable: {found.difference}"
    yield f"old: {display(found.old)}"
    yield f"new: {display(found.new)}"
    for candidate in found.candidates:
        yield from _of_candidate(candidate, top, colored)
    for word, names in (("new", found.added), ("gone", found.gone)):
        yield from listed(f"{count(len(names), 'candidate')} {word}", [display(name) for name in names], top)


def _of_candidate(found: CandidateChange, top: int, colored: bool) -> Iterator[str]:
    was = "" if found.old_name == found.name else f", {display(found.old_name)} before"
    sizes = size(found.new_bytes)
    if found.old_bytes != found.new_bytes:
        sizes = f"{size(found.old_bytes)} -> {sizes}"
    verdict = found.new_verdict
    if found.old_verdict != verdict:
        verdict = f"{found.old_verdict} -> {verdict}"
    yield f"candidate {display(found.name)}{was}: {verdict}, {sizes}"
    for change in found.metrics:
        yield f"  {_metric(change, colored)}"
    for word, items in (("worse", found.worse), ("better", found.better)):
        title = painted(f"{count(len(items), 'weight')} with {word} output", TONES[word], colored)
        yield from (f"  {line}" for line in listed(title, [_weight(item) for item in items], top))
    yield f"  {count(found.unchanged, 'weight')} unchanged"
    for word, names in (("new", found.added), ("gone", found.gone)):
        lines = listed(f"{count(len(names), 'weight')} {word}", [display(name) for name in names], top)
        yield from (f"  {line}" for line in lines)


def _metric(change: MetricChange, colored: bool) -> str:
    old, new = (in_units(change.metric, value) for value in (change.old, change.new))
    by = f" ({in_units(change.metric, change.change, change.change_se, 3, '+')})" if change.change else ""
    word = change.word
    shown = painted(word, TONES[word], colored) if word in TONES and not change.chance else word
    told = ", within chance" if change.chance and change.change else ""
    return f"{SCORES[change.metric].title}: {old} -> {new}{by}: {shown}{told}"


def _weight(item: WeightChange) -> str:
    by = "" if item.ratio is None else f" (× {item.ratio:.3g})"
    return f"{display(item.layer)}: output error {item.old_output_error:.4g} -> {item.new_output_error:.4g}{by}"
