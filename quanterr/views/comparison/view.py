"""The view of a report: numbers of the whole model, findings, gates, maps, formats and the worst layers."""

import re
from collections.abc import Iterator, Sequence
from math import inf, log10
from typing import TYPE_CHECKING

from quanterr.documents.base import Finding
from quanterr.documents.comparison.aggregate import Aggregate
from quanterr.documents.comparison.layer import Layer
from quanterr.documents.comparison.model import Report, Side
from quanterr.documents.gate_results import list_reasons
from quanterr.errors import UsageError
from quanterr.metrics.scores import collect_scores
from quanterr.outputs.formatting import (
    format_answer,
    format_cosine,
    format_db,
    format_number,
    list_doubts,
    say_once,
    sentence,
)
from quanterr.outputs.markdown import shorten_path
from quanterr.outputs.page.columns import DIFFERS, IDENTICAL, NOT_COMPARED
from quanterr.outputs.sections import (
    CARD,
    MAP,
    PAGE,
    TERMINAL,
    VERBOSE,
    BarCell,
    BlockMap,
    CellColumn,
    Column,
    Figure,
    FigureGroup,
    Findings,
    Gates,
    Interactive,
    LayerName,
    Lines,
    MapCell,
    Name,
    PageScripts,
    Part,
    Section,
    Share,
    Shares,
    Table,
    View,
    Whole,
    fill,
)
from quanterr.util.text import count, display, itemize, size
from quanterr.views.comparison.failed_gates import describe_failed_gates, list_judged_failures
from quanterr.views.comparison.layers import (
    BUCKETS,
    SORTS,
    WorstLayerRow,
    describe_comparison,
    describe_coverage,
    pick_worst_layers,
)
from quanterr.views.comparison.origin import make_origin_section
from quanterr.views.comparison.page_data import page_data
from quanterr.views.comparison.summary import is_faultless, list_told, summarize
from quanterr.views.loading import make_loading_section
from quanterr.views.parts import format_score, list_number_columns, make_view

if TYPE_CHECKING:
    from quanterr.documents.evaluation.model import Evaluated, Evaluation

KEEP = Section("keep", "Layers to keep", [Interactive("keep")], (PAGE,))
SCRIPTS = ("histogram", "report_details", "keep", "report")
ABOUT = (
    "SNR compares the energy of the original weights with that of their errors, in dB. With the same scales, the best "
    "codes would reach the attainable SNR; the difference is the excess. Weight error is not task accuracy: it shows "
    "which layers changed, and by how much, not how well the model still performs."
)
AGGREGATE = collect_scores(Aggregate)
IF_KNOWN = ("attainable_snr_db", "predicted_kld", "predicted_output_error")
FIGURES = (
    *("overall_snr_db", "attainable_snr_db", "worst_layer_snr_db", "predicted_kld", "predicted_output_error"),
    *("mean_relative_error", "mean_absolute_error", "max_absolute_error", "cosine_similarity", "bits_per_weight"),
)
BAR_DB = 60  # SNR at which a bar is empty
LISTED = 200  # rows shown of tensors that were not compared
MAX_FILES = 4
NAMED = 2  # damaged layers in the conclusion
OTHER_ORIGINAL = "unquantized_changed"  # the finding that, as an error, says that the original is another checkpoint
NONE = "-"
NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")  # the number of a block or an expert in a name
COUNTS: Sequence[CellColumn[Aggregate]] = (
    (Column("layers", 2), lambda a: f"{a.total_layers:,}"),
    (Column("elements", 6), lambda a: f"{a.total_elements:,}"),
)
LOST = (Column("in", 2, right=False), Column("why", 0, right=False), Column("in detail", 1, right=False))
ERROR: CellColumn[WorstLayerRow] = (
    Column("error", 4, right=False, legend=f"bars of errors are full at 0 dB and empty at {BAR_DB} dB"),
    lambda row: BarCell(1.0 if row.layer.snr_db is None else min(max(1 - row.layer.snr_db / BAR_DB, 0.0), 1.0)),
)
FORMAT: CellColumn[WorstLayerRow] = (Column("format", 2, right=False), lambda row: Name(row.layer.format))
STANDS_FOR: CellColumn[WorstLayerRow] = (Column("stands for", 7, right=False), lambda row: row.stands_for or NONE)


def view(report: Report, top: int, sort_by: str = "snr", evaluation: "Evaluation | None" = None) -> View:
    """Return the view of a report with the ``top`` worst layers by a metric of SORTS.

    ``evaluation`` of the same pair adds its scores and the measured error of each weight.

    Raises:
        UsageError: the evaluation belongs to another pair.
    """
    evaluated = None if evaluation is None else find_candidate(report, evaluation)
    snr = format_db(report.aggregate.overall_snr_db, " dB") if report.layers else ""
    return make_view(
        report,
        "Weight fidelity",
        conclusion(report),
        [
            ("coverage", [describe_coverage(report)]),
            ("quantized", _describe_side(report.quantized)),
            ("original", _describe_side(report.original)),
        ],
        _sections(report, top, sort_by, evaluation),
        ABOUT,
        PageScripts(SCRIPTS, lambda: page_data(report, evaluated)),
        list_reasons(report) if report.verdict != "pass" else [],
        "compared",
        _list_settings(report),
        summarize(report, sort_by),
        list_told(report, sort_by),
        title=f"{shorten_path(report.quantized.path)}{f': {snr}' if snr else ''}",
    )


def find_candidate(report: Report, evaluation: "Evaluation") -> "Evaluated":
    """Return the candidate of an evaluation with the same checkpoint sizes as the report.

    Raises:
        UsageError: there is none, or more than one.
    """
    sizes = report.original.bytes, report.quantized.bytes
    alike = [each for each in evaluation.candidates if (evaluation.original_bytes, each.bytes) == sizes]
    candidates = alike if len(alike) < 2 else [each for each in alike if each.path == report.quantized.path]
    if len(candidates) != 1:
        why = (
            "several candidates have tensors of these sizes, but none has this path"
            if alike
            else "the sizes of their tensors differ"
        )
        raise UsageError(
            f"--evaluation: not of {display(report.original.path)} and {display(report.quantized.path)}: {why}"
        )
    return candidates[0]


def conclusion(report: Report) -> str:
    """Return what decided the verdict in one sentence, with counts."""
    if report.verdict == "pass":
        return sentence("; ".join(report.reasons)) if report.gates else describe_comparison(report)
    if report.verdict == "fail" or (not report.complete and list_judged_failures(report)):
        return describe_failed_gates(report)
    another = [
        finding.message for finding in report.findings if finding.code == OTHER_ORIGINAL and finding.severity == "error"
    ]
    if another:
        return sentence(another[0])
    if report.reasons and not (report.layers or report.lossless or report.other_changes):
        return sentence(report.reasons[0])
    damaged, missing = sorted(_list_damaged(report)), len({row.layer_name for row in report.not_compared})
    parts = [f"{count(len(damaged), 'layer')} damaged ({itemize(damaged, NAMED)})"] if damaged else []
    parts += [f"{missing:,} not compared"] if missing else []
    return ", ".join(parts) or sentence(report.reasons[0] if report.reasons else "no reason given")


def brief(report: Report) -> str:
    """Return verdict, pooled SNR and reasons in one line, for ``--quiet``."""
    is_judged = report.verdict != "pass" or bool(report.gates)
    layers = count(report.aggregate.total_layers, "layer")
    snr = f"{layers}, {format_db(report.aggregate.overall_snr_db, ' dB')}; " if is_judged else f"{layers}; "
    word, doubts = report.verdict if is_judged else "compared", list_doubts(report.verdict, report.findings)
    reasons = "; ".join(map(sentence, say_once(report.reasons))) if is_judged else describe_comparison(report)
    return f"quanterr: {format_answer(word, doubts, (snr if report.layers else '') + reasons)}"


def _list_damaged(report: Report) -> set[str]:
    """Return the names of layers with a finding that is an error."""
    errors = [finding for finding in report.findings if finding.severity == "error"]
    return {name for finding in errors for name in (finding.layer, *finding.evidence.get("layers", ())) if name}


def _describe_side(side: Side) -> list[str]:
    return [Name(side.path), f"{f', revision {side.revision}' if side.revision else ''}, {size(side.bytes)}"]


def _sections(report: Report, top: int, sort_by: str, evaluation: "Evaluation | None") -> Iterator[Section]:
    yield Section("summary", "The whole model", [_figures(report)])
    if report.not_compared:
        yield _make_not_compared(report)
    if report.verdict != "inconclusive" and not is_faultless(report):
        yield KEEP
    if evaluation is not None:
        from quanterr.views.evaluation.view import make_scores_table

        findings = [(candidate.name, finding) for candidate in evaluation.candidates for finding in candidate.findings]
        yield Section("scores", "Scores", [make_scores_table(evaluation), Findings(findings)], (PAGE,))
    yield from make_loading_section(report.loading)
    yield from make_origin_section(report)
    yield Section("gates", "Gates", [Gates([("", gate) for gate in report.gates])], (PAGE,))
    yield Section("findings", "Findings", [Findings([("", finding) for finding in _sort_findings(report)])])
    if report.verdict == "inconclusive":  # the findings come first, as they are the reasons
        yield KEEP
    yield Section("map", MAP.title, [BlockMap(lambda: map_cells(report))], (TERMINAL,))
    yield MAP
    coverage: list[Part] = [
        Lines(["The bytes of both checkpoints by what happened to their tensors."]),
        Shares(list(_make_coverage(report))),
    ]
    yield Section("coverage", "Coverage", coverage, (PAGE,), is_open=bool(report.not_compared))
    yield Section("distribution", "Distribution", [Interactive("histogram")], (PAGE,))
    if report.layers:
        yield Section("groups", "By format and role", [_group_table(report, "format"), _group_table(report, "role")])
    yield Section("worst", "Worst layers", list(_worst_layers(report, top, sort_by)), (TERMINAL, CARD))
    yield Section("evidence", "Evidence for the formats", [Lines(_group_evidence(report))], (VERBOSE,))


def _group_evidence(report: Report) -> list[str]:
    """Return what decided the formats, once for all layers whose names differ in numbers only."""
    lines_by_key: dict[tuple[str, str, str], list[str]] = {}
    for layer in report.layers + report.other_changes:
        module = layer.layer_name.removesuffix(".weight")
        for seen in layer.evidence:
            key = layer.format, NUMBER.sub("*", module), NUMBER.sub("*", seen.replace(module, "…"))
            lines_by_key.setdefault(key, []).append(f"{layer.display_name}: {layer.format}: {seen}")
    return [f"{same[0]}{f' (and {len(same) - 1:,} alike)' if same[1:] else ''}" for same in lines_by_key.values()]


def _figures(report: Report) -> FigureGroup:
    a: Aggregate = report.aggregate
    if not report.layers:
        return FigureGroup("No layer differs, so there is no error to show.", [])
    worst = min(report.layers, key=lambda layer: -inf if layer.snr_db is None else layer.snr_db)
    known = {name for name in AGGREGATE if getattr(a, name) is not None or name in a.nonfinite}
    excess, p99 = _show(a, "excess_db"), format_number(a.absolute_error_percentiles.p99)
    notes = {
        "overall_snr_db": _describe_finite_snr(report),
        "attainable_snr_db": f"{excess} dB excess, {_show(a, 'worst_layer_excess_db')} dB in the worst layer",
        "worst_layer_snr_db": LayerName(worst.layer_name),
        "mean_relative_error": "sum of |e| over sum of |x|",
        "max_absolute_error": f"99 % below {p99}",
        "cosine_similarity": "between original and quantized",
    }
    shown = [_figure(a, name, notes.get(name, "")) for name in FIGURES if name in known or name not in IF_KNOWN]
    shown.append(
        Figure(
            "Size", size(a.quantized_bytes), note=f"of {size(a.original_bytes)}, {_show(a, 'compression_ratio')} to 1"
        )
    )
    differ = count(a.total_layers, "layer differs", "layers differ")
    return FigureGroup(f"{differ}, {a.total_elements:,} elements", shown)


def _figure(a: Aggregate, name: str, note: str) -> Figure:
    value, title = _show(a, name), AGGREGATE[name].title
    is_known = getattr(a, name) is not None
    unit = AGGREGATE[name].unit if is_known and AGGREGATE[name].unit in ("dB", "nat") else ""
    return Figure(title[0].upper() + title[1:], value, unit, note)


def _show(a: Aggregate, name: str) -> str:
    if name == "cosine_similarity":
        return format_cosine(a.cosine_similarity)
    return format_score(a, AGGREGATE[name])


def _describe_finite_snr(report: Report) -> str:
    """Return the pooled SNR of layers with a defined SNR, as text, if other layers make the pooled SNR undefined."""
    finite = [layer for layer in report.layers if layer.snr_db is not None and layer.squared_error]
    if report.aggregate.overall_snr_db is not None or not finite:
        return ""
    signal = sum((layer.original_norm or 0.0) ** 2 for layer in finite)
    error = sum(layer.squared_error or 0.0 for layer in finite)
    if not 0 < error < inf or not 0 < signal < inf:
        return ""
    left_out = count(len(report.layers) - len(finite), "layer")
    return f"{format_db(10 * log10(signal / error), ' dB')} without {left_out}"


def _make_not_compared(report: Report) -> Section:
    items = report.not_compared
    rows = [
        [LayerName(item.layer_name), item.side, BUCKETS.get(item.bucket, item.bucket), item.reason]
        for item in items[:LISTED]
    ]
    title = f"Not compared: {count(len(items), 'tensor')}"
    about = Lines(["Their error is unknown, and no average includes them."])
    table = Table(title, "tensor", LOST, rows, len(items) - len(rows))
    return Section("not_compared", title, [about, table], (PAGE, CARD), is_problem=True)


def _sort_findings(report: Report) -> list[Finding]:
    """Return findings about whole checkpoints, then findings about layers, the lowest SNR first."""
    levels = {layer.layer_name: layer.snr_db for layer in report.layers}

    def level(finding: Finding) -> float:
        snr_db = levels.get(finding.layer or "")
        return -inf if snr_db is None else snr_db

    return sorted(report.findings, key=level)


def map_cells(report: Report) -> Iterator[MapCell]:
    """Yield every weight of a report for a block map."""
    yield from (MapCell(item.layer_name, NOT_COMPARED, None) for item in report.not_compared)
    yield from (MapCell(layer.layer_name, DIFFERS, layer.snr_db) for layer in report.layers)
    yield from (MapCell(layer.layer_name, IDENTICAL, None) for layer in report.lossless)


def _make_coverage(report: Report) -> Iterator[Whole]:
    for title, buckets, fraction in (
        ("Original", report.coverage.original, report.coverage.original_compared_fraction),
        ("Quantized", report.coverage.quantized, report.coverage.quantized_compared_fraction),
    ):
        note = "" if fraction is None else f"{100 * fraction:.4g} % of the selected bytes compared"
        shares = [
            Share(name if name in BUCKETS else "error", BUCKETS.get(name, name), bucket.tensors, bucket.bytes)
            for name, bucket in buckets.items()
        ]
        yield Whole(title, note, shares)


def _group_table(report: Report, grouping: str) -> Table:
    groups = report.groups.get(grouping, {})
    return Table(
        f"By {grouping}",
        grouping,
        *fill([*COUNTS, *list_number_columns(Aggregate)], ((Name(name), a) for name, a in groups.items())),
    )


def _worst_layers(report: Report, top: int, sort_by: str) -> Iterator[Table]:
    """Yield the table of the worst layers, without layers with an error, which findings report."""
    damaged = _list_damaged(report)
    others = [layer for layer in report.layers if layer.layer_name not in damaged]
    layers = pick_worst_layers(others, top, sort_by) if top else []
    if not layers:
        return
    of = "of the other layers" if damaged else "layers"
    if len(layers) < len(others):
        title = f"The {len(layers)} worst {of}" if len(layers) > 1 else f"The worst {of if damaged else 'layer'}"
    else:
        title = f"All {'other ' if damaged else ''}layers, the worst first"
    first, *others_shown = list_number_columns(Layer, lambda row: row.layer)
    columns = [first, ERROR, *others_shown, FORMAT, *([STANDS_FOR] if any(row.stands_for for row in layers) else [])]
    rows = ((LayerName(row.layer.layer_name), row) for row in layers)
    yield Table(f"{title}, by {SORTS[sort_by][1]}", "layer", *fill(columns, rows))


def _list_settings(report: Report) -> list[tuple[str, str]]:
    facts = [
        ("Schema", report.schema_version),
        ("Selected", ", ".join(report.selection.patterns) or "everything"),
        ("Outliers", f"elements with |e| above {format_number(report.settings.outlier_threshold)}"),
    ]
    return facts + [
        (f"{title} {topic}", text)
        for title, side in (("Original", report.original), ("Quantized", report.quantized))
        for topic, text in _list_provenance(side)
    ]


def _list_provenance(side: Side) -> Iterator[tuple[str, str]]:
    """Yield a title and a text each for the files, the prefix and the notes of a checkpoint."""
    names = ", ".join(f"{display(file.name)} ({size(file.bytes)})" for file in side.files[:MAX_FILES])
    more = f" and {len(side.files) - MAX_FILES:,} more" if len(side.files) > MAX_FILES else ""
    if len(side.files) > 1:
        yield "files", f"{names}{more}"
    if side.prefix:
        yield "prefix", side.prefix
    yield from (("note", note) for note in side.notes[:LISTED])
