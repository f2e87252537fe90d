"""The summary of a report: what makes the error, what is usual, the worst layers with their cause."""

from collections.abc import Iterator
from math import fsum, log10

from quanterr.advice.kept_layers import find_common_dtype, list_keepable, propose_kept
from quanterr.documents.base import Finding
from quanterr.documents.comparison.layer import Layer
from quanterr.documents.comparison.model import Report
from quanterr.metrics import PREDICTED
from quanterr.metrics.scores import collect_scores
from quanterr.outputs.formatting import format_db, format_in_units, format_percent
from quanterr.util.text import count, display, size
from quanterr.views.comparison.layers import describe_coverage, pick_worst_layers
from quanterr.views.comparison.origin import describe_origin

WORST = 3  # number of worst layers that the summary names
FORMATS = 2  # formats whose usual SNR is given
WORTH = 1.0  # loss in dB from which better codes are worth the effort
EXCESS = 0.5  # loss in dB from which the summary mentions that codes are not the nearest


def summarize(report: Report, sort_by: str = "snr") -> list[str]:
    """Return the sentences that a reader should know after the verdict, the most important first."""
    idle = [finding.message.partition(";")[0] for finding in report.findings if finding.code == "nothing_excluded"]
    about = [describe_coverage(report), *idle, *describe_origin(report), *_judge(report)]
    about += [*_describe_usual(report), *_describe_weighted(report)]
    return [*about, *_list_worst(report, sort_by)]


def _judge(report: Report) -> Iterator[str]:
    """Yield what a few layers cost and would gain, or that no layer stands out."""
    if not report.layers or report.verdict == "inconclusive" or not report.complete:
        return
    allowed = list(_describe_allowed(report))
    yield from allowed
    kept, total = propose_kept(report)
    if not kept and not allowed:
        if _is_sound(report):
            yield "Nothing needs to be done: no format has more error than usual, and keeping layers would gain little"
        elif len(report.layers) > 1 and list_keepable(report.layers, report.findings):
            yield "Keeping a few layers unquantized would gain little for their size"
    if not kept:
        return
    left = max(1 - fsum(layer.error for layer in kept) / total, 0.0)
    added = sum(layer.added for layer in kept)
    dtype = find_common_dtype(report)
    makes = "makes" if len(kept) == 1 else "make"
    before = report.aggregate.overall_snr_db
    snr = ""
    if before is not None and left > 0:
        snr = f", SNR {format_db(before)} -> {format_db(before - 10 * log10(left))} dB"
    yield (
        f"{count(len(kept), 'layer')} {makes} {format_percent(1 - left)} of the error; kept "
        f"{f'in {dtype}' if dtype else 'as in the original'}, the file {'shrinks' if added < 0 else 'grows'} by "
        f"{format_percent(abs(added) / max(report.quantized.bytes, 1))} ({size(abs(added))}){snr}"
    )


def list_told(report: Report, sort_by: str = "snr") -> list[Finding]:
    """Return the findings that the summary states, each about one of the worst layers alone."""
    causes = _find_causes(report)
    alone = [row.layer for row in pick_worst_layers(report.layers, WORST, sort_by) if not row.stands_for]
    return [causes[layer.layer_name] for layer in alone if layer.layer_name in causes]


def _find_causes(report: Report) -> dict[str, Finding]:
    """Return the most severe finding about each layer by its name."""
    causes: dict[str, Finding] = {}
    for finding in sorted(report.findings, key=lambda finding: finding.rank):
        if finding.layer is not None:
            causes.setdefault(finding.layer, finding)
    return causes


def is_faultless(report: Report) -> bool:
    """Return True if nothing needs to be done: nothing is doubtful or low, and no layer is worth keeping."""
    return _is_sound(report) and not propose_kept(report)[0]


def _is_sound(report: Report) -> bool:
    """Return True if a complete report passes, without a warning or a format that has more error than usual."""
    for name, group in report.groups.get("format", {}).items():
        usual = report.formats[name].usual_snr_db if name in report.formats else None
        if usual and group.overall_snr_db is not None and group.overall_snr_db < usual[0]:
            return False
        if (group.excess_db or 0) >= EXCESS:
            return False
    sound = report.verdict == "pass" and report.complete and bool(report.layers)
    return sound and all(finding.severity == "info" for finding in report.findings)


def _describe_allowed(report: Report) -> Iterator[str]:
    """Yield what the same scales would allow, if the codes are far worse and no method that compensates explains it."""
    excess, allowed = report.aggregate.excess_db, report.aggregate.attainable_snr_db
    is_wrong = any(
        finding.severity != "info" and finding.code in ("excess_error", "scale_factor") for finding in report.findings
    )
    if is_wrong and excess is not None and allowed is not None and excess >= WORTH:
        yield f"With the same scales, the nearest codes would have {format_db(allowed, ' dB')}: {excess:.2f} dB more"


def _describe_usual(report: Report) -> Iterator[str]:
    """Yield the SNR of the formats with most weights, compared with what is usual for them."""
    groups = report.groups.get("format", {})
    largest = sorted(groups, key=lambda name: -groups[name].total_elements)[:FORMATS]
    for name in largest:
        group, note = groups[name], report.formats.get(name)
        usual = ""
        if note and note.usual_snr_db:
            low, high = note.usual_snr_db
            is_low = group.overall_snr_db is not None and group.overall_snr_db < low
            usual = f", {'below the usual' if is_low else 'usual'} {low} to {high} dB"
        excess = ""
        is_told = bool(list(_describe_allowed(report))) and len(groups) == 1
        if group.attainable_snr_db is not None and (group.excess_db or 0) >= EXCESS and not is_told:
            excess = f"; its scales allow {format_db(group.attainable_snr_db, ' dB')}"
        yield f"{display(name)}: {format_db(group.overall_snr_db, ' dB')}{usual}{excess}"


def _describe_weighted(report: Report) -> Iterator[str]:
    """Yield what an importance matrix and a sensitivity say of the whole, and of the layer that costs most."""
    weighted = [layer for layer in report.layers if layer.weighted_snr_db is not None]
    if weighted and report.aggregate.weighted_snr_db is not None:
        worst = min(weighted, key=lambda layer: layer.weighted_snr_db or 0.0)
        level, lowest = (format_db(part.weighted_snr_db, " dB") for part in (report.aggregate, worst))
        yield f"weighted by importance: {level}; worst {lowest}  {display(worst.layer_name)}"
    for metric in PREDICTED:
        declared, total = collect_scores(Layer)[metric], getattr(report.aggregate, metric)
        if total is not None:
            costliest = max(report.layers, key=lambda layer: getattr(layer, metric) or 0.0)
            share = format_percent((getattr(costliest, metric) or 0.0) / total) if total else "none"
            value = format_in_units(declared, total, digits=4)
            yield f"{declared.title}: {value}; {share} of it from {display(costliest.layer_name)}"


def _list_worst(report: Report, sort_by: str) -> Iterator[str]:
    """Yield the worst layers, each with the most severe finding about it."""
    causes = _find_causes(report)
    for row in pick_worst_layers(report.layers, WORST, sort_by):
        layer = row.layer
        cause = causes.get(layer.layer_name)
        stands_for = f" ({row.stands_for})" if row.stands_for else ""
        why = f": {cause.statement}" if cause else ""
        yield f"worst: {format_db(layer.snr_db, ' dB')}  {display(layer.layer_name)}{stands_for}{why}"
