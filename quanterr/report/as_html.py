"""The report as one page: the map, the verdict, gates, findings, coverage, which layers to keep, all layers.

The verdict, what was not compared, findings, gates and groups are in the page itself and need no script.
The scripts (html/*.js) add the map, the curves, the distribution and the table of all layers (data: html_data.py).
"""

import shlex
from typing import IO, TYPE_CHECKING

from quanterr.errors import UsageError
from quanterr.report import html_data
from quanterr.report.formatting import cosine, db, doubts, gate_words, judged, number, percent, sentence, violation_line
from quanterr.report.gate_results import Gate
from quanterr.report.layers import BUCKETS, compared_line, coverage_line, of_scales, word_of
from quanterr.report.markup import (
    LAYER_SCRIPTS,
    Markup,
    figures,
    folding,
    headed,
    joined,
    layer_link,
    navigation,
    page,
    part,
    short,
    table,
    tag,
    with_links,
)
from quanterr.report.model import Aggregate, BucketSize, NotCompared, Report, Side
from quanterr.report.page import finding_item, findings_of, table_of
from quanterr.util.text import count, display, size, unrounded

if TYPE_CHECKING:
    from quanterr.report.evaluation.model import Evaluated, Evaluation

SCRIPTS = (*LAYER_SCRIPTS, "histogram", "report_metrics", "report_details", "keep", "report")
SECTIONS = (
    ("places", "Map"),
    ("gates", "Gates"),
    ("findings", "Findings"),
    ("coverage", "Coverage"),
    ("keep", "What to keep"),
    ("distribution", "Distribution"),
    ("groups", "Formats and roles"),
    ("layers", "Layers"),
)
CAVEAT = (
    "SNR is 10·log10 of the energy of the original weights over that of the errors. Weight error is not task "
    "accuracy: it says which layers changed, and how much, not what the model still can."
)
MAX_LISTED = 200  # rows of a table that is in the page itself
MAX_FILES = 4
MAX_VIOLATIONS = 20


def write(report: Report, file: IO[str], evaluation: "Evaluation | None" = None) -> None:
    """Write the page; with an evaluation of the same pair also what that says of the model and of each weight."""
    evaluated = None if evaluation is None else of_same_pair(report, evaluation)
    body = joined(
        headed(*_verdict(report)),
        navigation(SECTIONS),
        part("map"),
        tag("section", _figures(report), class_="figures", aria_label="The whole model"),
        _not_compared(report.not_compared),
        Markup("") if evaluation is None else _scores(evaluation),
        folding("gates", "Gates", _gates(report)),
        folding("findings", "Findings", _findings(report)),
        folding("coverage", "Coverage", _coverage(report), is_open=bool(report.not_compared)),
        part("keep"),
        part("histogram"),
        folding("groups", "By format and role", *_groups(report, "format"), *_groups(report, "role")),
        part("layers"),
        folding("run", "How it was made", _run(report), is_open=False),
    )
    title = f"{word_of(report)}: {short(report.quantized.path)}"
    file.write(page("report", title, SCRIPTS, body, html_data.page_data(report, evaluated)))


def of_same_pair(report: Report, evaluation: "Evaluation") -> "Evaluated":
    """The candidate of an evaluation that a report is about, as the sizes of both checkpoints show.

    Raises:
        UsageError: there is none, or several.
    """
    sizes = report.original.bytes, report.quantized.bytes
    found = [each for each in evaluation.candidates if (evaluation.original_bytes, each.bytes) == sizes]
    if len(found) > 1:
        found = [each for each in found if each.path == report.quantized.path]
    if len(found) != 1:
        raise UsageError(
            f"--evaluation: is not of {display(report.original.path)} and {display(report.quantized.path)}, "
            "as the sizes of their tensors show"
        )
    return found[0]


def _scores(evaluation: "Evaluation") -> Markup:
    from quanterr.report.evaluation.view import scores

    found = [(candidate.name, one) for candidate in evaluation.candidates for one in candidate.findings]
    return folding("scores", "Scores", table_of(scores(evaluation)), findings_of(found))


def _verdict(report: Report) -> tuple[str, list[Markup], Markup, str]:
    """The tone, the reasons with what questions them, both sides, the word."""
    word, found = word_of(report), doubts(report.verdict, report.findings)
    if report.verdict != "pass" or not (found or word == "compared"):
        return report.verdict, _reasons(report), _sides(report), word.capitalize()
    questions = [tag("strong", sentence(one)) for one in found]
    own = [joined(compared_line(report)), joined(coverage_line(report))] if word == "compared" else _reasons(report)
    return (
        "inconclusive" if found else "info",
        [*questions, *own],
        _sides(report),
        f"{word.capitalize()}{', but' if found else ''}",
    )


def _reasons(report: Report) -> list[Markup]:
    named = [found.layer for found in report.findings[:MAX_LISTED] if found.layer is not None]
    named += [item.layer_name for item in report.not_compared[:MAX_LISTED]]
    description = [with_links(sentence(reason), named) for reason in report.reasons[:MAX_LISTED]]
    if len(report.reasons) > MAX_LISTED:
        description.append(joined(f"and {count(len(report.reasons) - MAX_LISTED, 'more reason')}"))
    return [*description, joined(coverage_line(report))]


def _sides(report: Report) -> Markup:
    parts = []
    for title, side in (("quantized", report.quantized), ("original", report.original)):
        revision = f" at {display(side.revision)}" if side.revision else ""
        path = tag("span", sentence(side.path), class_="name")
        parts += [tag("dt", title), tag("dd", path, f"{revision}, {size(side.bytes)}")]
    return tag("dl", *parts, class_="sides")


def _figures(report: Report) -> Markup:
    a: Aggregate = report.aggregate
    worst = min(report.layers, key=lambda x: -1e9 if x.snr_db is None else x.snr_db, default=None)
    if worst is None:
        return tag("div", tag("p", "No layer differs, so there is no error to show.", class_="note"))
    differ = f"over {count(a.total_layers, 'layer that differs', 'layers that differ')}"
    sizes = f"{size(a.original_bytes)} → {size(a.quantized_bytes)}, {number(a.compression_ratio)} to 1"
    return figures(
        [
            ("SNR, pooled", db(a.overall_snr_db), "" if a.overall_snr_db is None else "dB", differ),
            (
                "Worst layer",
                db(a.worst_layer_snr_db),
                "" if a.worst_layer_snr_db is None else "dB",
                layer_link(worst.layer_name, display(worst.layer_name, 80)),
            ),
            ("Relative error", percent(a.mean_relative_error), "", "Σ|e| / Σ|x|"),
            (
                "Max |e|",
                number(a.max_absolute_error),
                "",
                f"99 % below {number(a.absolute_error_percentiles.p99)}",
            ),
            ("Cosine", cosine(a.cosine_similarity), "", "of original and quantized"),
            ("Bits per weight", number(a.bits_per_weight), "", sizes),
        ]
    )


def _not_compared(items: list[NotCompared]) -> Markup:
    if not items:
        return Markup("")
    rows = [
        [layer_link(item.layer_name), item.side, BUCKETS.get(item.bucket, display(item.bucket)), sentence(item.reason)]
        for item in items[:MAX_LISTED]
    ]
    more = []
    if len(items) > MAX_LISTED:
        text = f"and {len(items) - MAX_LISTED:,} more, in the table of layers below"
        more.append(tag("p", text, class_="about"))
    return tag(
        "section",
        tag("h2", f"Not compared: {count(len(items), 'tensor')}"),
        tag("p", "Their error is unknown; no average includes them.", class_="about"),
        table(["tensor", "in", "why", "in detail"], rows, "stack"),
        *more,
        class_="problems",
    )


def _coverage(report: Report) -> Markup:
    sides = []
    for title, buckets, fraction in (
        ("Original", report.coverage.original, report.coverage.original_compared_fraction),
        ("Quantized", report.coverage.quantized, report.coverage.quantized_compared_fraction),
    ):
        share = "" if fraction is None else f"{100 * fraction:.4g} % of the selected bytes compared"
        sides.append(tag("div", tag("h3", title, tag("span", share)), _strip(buckets), _bucket_table(buckets)))
    about = tag("p", "Where every tensor of both checkpoints ended, by bytes.", class_="about")
    return joined(about, tag("div", *sides, class_="coverage"))


def _strip(buckets: dict[str, BucketSize]) -> Markup:
    """Parts as wide as their shares; the script makes them so, for the page may have no style of its own."""
    parts = [tag("i", class_=_bucket(name), data_share=str(found.bytes)) for name, found in buckets.items()]
    return tag("div", *parts, class_="strip", aria_hidden="true")


def _bucket(name: str) -> str:
    return name if name in BUCKETS else "error"


def _bucket_table(buckets: dict[str, BucketSize]) -> Markup:
    rows = [
        tag(
            "tr",
            tag("th", tag("i", class_=f"key {_bucket(name)}"), BUCKETS.get(name, display(name)), scope="row"),
            tag("td", f"{found.tensors:,}", class_="number"),
            tag("td", f"{found.elements:,}", class_="number wide"),
            tag("td", size(found.bytes), class_="number"),
        )
        for name, found in buckets.items()
    ]
    heads = [
        tag("th", "", scope="col"),
        tag("th", "tensors", scope="col", class_="number"),
        tag("th", "elements", scope="col", class_="number wide"),
        tag("th", "size", scope="col", class_="number"),
    ]
    return tag("table", tag("thead", tag("tr", *heads)), tag("tbody", *rows), class_="plain short")


def _findings(report: Report) -> Markup:
    if not report.findings:
        return tag("p", "No findings.", class_="none")
    shown = html_data.shown_findings(report)[:MAX_LISTED]
    items = [finding_item(found) for found in shown]
    if len(shown) < len(report.findings):
        more = f"and {count(len(report.findings) - len(shown), 'more finding')}, in the JSON report"
        items.append(tag("li", tag("span"), tag("p", more)))
    return tag("ul", *items, class_="findings")


def _gates(report: Report) -> Markup:
    if not report.gates:
        return tag("p", "No gates set, so nothing says whether the error is small enough.", class_="none")
    failed = sum(gate.status == "fail" for gate in report.gates)
    description = (
        f"{failed:,} of {count(len(report.gates), 'gate')} {'does' if failed == 1 else 'do'} not hold."
        if failed
        else "All gates hold."
    )
    heads = [tag("th", text, scope="col") for text in ("", "gate", "condition")]
    heads += [tag("th", text, scope="col", class_="number") for text in ("observed", "limit", "margin")]
    rows = [row for gate in sorted(report.gates, key=lambda gate: gate.status) for row in _gate(gate)]
    listed = tag("table", tag("thead", tag("tr", *heads)), tag("tbody", *rows), class_="plain gates rows")
    return joined(tag("p", description, class_="about"), tag("div", listed, class_="scroll"))


def _gate(gate: Gate) -> list[Markup]:
    """The gate in a row, and in a second one why it does not hold."""
    word, tone = gate_words(gate)
    patterns = f" for {sentence(', '.join(gate.layers))}" if gate.layers else ""
    row = tag(
        "tr",
        tag("td", tag("span", word, class_=f"tag {tone}")),
        tag("th", display(gate.id) if gate.id != gate.require else "", scope="row"),
        tag("td", tag("code", sentence(gate.require)), patterns),
        tag("td", judged(gate.observed, gate.limit), class_="number", data_head="observed"),
        tag("td", unrounded(gate.limit), class_="number", data_head="limit"),
        tag("td", judged(gate.margin, 0), class_="number", data_head="margin"),
    )
    if gate.status == "pass":
        return [row]
    reason = [tag("p", f"Reason: {sentence(gate.reason)}", class_="remedy")] if gate.reason else []
    shown = [
        tag("li", with_links(violation_line(violation), [violation.layer] if violation.layer else []))
        for violation in gate.violations[:MAX_VIOLATIONS]
    ]
    if len(gate.violations) > MAX_VIOLATIONS:
        shown.append(tag("li", f"and {len(gate.violations) - MAX_VIOLATIONS:,} more, in the JSON report"))
    why = [tag("p", sentence(gate.message)), *reason, tag("ul", *shown)]
    return [row, tag("tr", tag("td", ""), tag("td", *why, colspan="5"), class_="why")]


def _groups(report: Report, kind: str) -> list[Markup]:
    heads = [kind, "layers", "SNR dB", "attainable dB", "excess dB", "worst dB", "relative error", "max |e|"]
    heads += ["bits/weight", "elements"]
    rows = [
        [
            display(name),
            f"{a.total_layers:,}",
            db(a.overall_snr_db),
            of_scales(a, "attainable_snr_db", "–"),
            of_scales(a, "excess_db", "–"),
            db(a.worst_layer_snr_db),
            percent(a.mean_relative_error),
            number(a.max_absolute_error),
            number(a.bits_per_weight),
            f"{a.total_elements:,}",
        ]
        for name, a in report.groups.get(kind, {}).items()
    ]
    found = table(heads, rows, "short rows", len(heads) - 1) if rows else tag("p", "No layer differs.", class_="none")
    return [tag("h3", f"By {kind}"), found]


def _run(report: Report) -> Markup:
    run, tool = report.run, report.tool
    facts = [
        ("Command", sentence(shlex.join(run.command)) if run.command else "from a library"),
        ("Made by", f"{display(tool.name)} {display(tool.version)}, schema {display(report.schema_version)}"),
        ("Selected", sentence(", ".join(report.selection.patterns) or "everything")),
        ("Outliers", f"elements with |e| above {number(report.settings.outlier_threshold)}"),
        ("When", f"{display(run.started)}, in {run.seconds:.1f} s, {size(run.read_bytes)} read"),
        ("Where", f"{display(run.device)}, {count(run.threads, 'thread')}"),
        ("With", f"torch {display(run.torch)}, Python {display(run.python)}"),
    ]
    facts += [
        (f"{title} {what}", text)
        for title, side in (("Original", report.original), ("Quantized", report.quantized))
        for what, text in _provenance(side)
    ]
    return joined(
        tag("dl", *(item for title, text in facts for item in (tag("dt", title), tag("dd", text))), class_="facts"),
        tag("p", CAVEAT, class_="about"),
    )


def _provenance(side: Side) -> list[tuple[str, str]]:
    """Files, prefix and notes of a checkpoint."""
    names = ", ".join(f"{display(file.name)} ({size(file.bytes)})" for file in side.files[:MAX_FILES])
    more = f" and {len(side.files) - MAX_FILES:,} more" if len(side.files) > MAX_FILES else ""
    description = [("files", f"{names}{more}")] if len(side.files) > 1 else []
    description += [("prefix", display(side.prefix))] if side.prefix else []
    return description + [("note", sentence(note)) for note in side.notes[:MAX_LISTED]]
