"""The report as one page: works from a file, offline, and runs nothing but its own script.

The verdict, what was not compared, findings, gates and groups are in the page itself and need no script.
The script (html/*.js) adds the map, the distribution and the table of all layers (data: html_data.py).

Names are hostile. Here :func:`tag` escapes every text, the script only makes text nodes, and the policy
in the page's head lets a browser run no other script and fetch nothing.
"""

import base64
import hashlib
import re
import shlex
from html import escape
from pathlib import Path
from string import Template
from typing import IO

from quanterr.report import html_data
from quanterr.report.finding_codes import CODES
from quanterr.report.formatting import (
    BUCKETS,
    cosine,
    coverage_line,
    db,
    gate_words,
    judged,
    number,
    of_scales,
    percent,
    sentence,
    violation_line,
)
from quanterr.report.gate_results import Gate
from quanterr.report.model import Aggregate, BucketSize, Finding, NotCompared, Report, Side
from quanterr.util.text import count, display, size, unrounded

FOLDER = Path(__file__).parent / "html"
SCRIPTS = ("data", "dom", "scale", "heatmap", "histogram", "table", "details", "main")
SIGNS = {"pass": "✓", "fail": "✕", "inconclusive": "?"}
MAX_LISTED = 200  # rows of a table that is in the page itself
MAX_FILES = 4
MAX_VIOLATIONS = 20


class Markup(str):
    """HTML; a plain string is text."""

    __slots__ = ()


def tag(name: str, *children: str, **attributes: str) -> Markup:
    """An element. Strings are text and get escaped; ``class_`` is the attribute class, ``aria_hidden`` aria-hidden."""
    description = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"' for key, value in attributes.items()
    )
    return Markup(f"<{name}{description}>{joined(*children)}</{name}>")


def joined(*children: str) -> Markup:
    """Elements and texts one after the other."""
    return Markup("".join(child if isinstance(child, Markup) else escape(child) for child in children))


def breakable(name: str) -> Markup:
    """A name that lines may break after its dots and underscores."""
    return Markup(re.sub(r"([._])", r"\1<wbr>", escape(name)))


def write(report: Report, file: IO[str]) -> None:
    """Write the page."""
    style, script = _read("style.css"), "\n".join(_read(f"{name}.js") for name in SCRIPTS)
    page = Template(_read("page.html"))
    file.write(
        page.substitute(
            policy=_policy(style, script),
            style=style,
            script=script,
            title=escape(f"{report.verdict}: {_short(report.quantized)} – quanterr"),
            verdict=report.verdict,
            verdict_word=report.verdict.capitalize(),
            sign=SIGNS[report.verdict],
            reasons=_reasons(report),
            sides=_sides(report),
            figures=_figures(report),
            problems=_not_compared(report.not_compared),
            coverage=_coverage(report),
            gates=_gates(report),
            findings=_findings(report),
            by_format=_groups(report, "format"),
            by_role=_groups(report, "role"),
            run=_run(report),
            data=html_data.packed(report),
        )
    )


def _read(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def _policy(style: str, script: str) -> str:
    """A browser may use this style and this script, an empty icon, and nothing else."""
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (style, script)]
    return (
        f"default-src 'none'; style-src 'sha256-{hashes[0]}'; script-src 'sha256-{hashes[1]}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


def _short(side: Side) -> str:
    return display(side.path.rstrip("/").rsplit("/", 1)[-1], 80)


def _reasons(report: Report) -> Markup:
    description = [sentence(reason) for reason in report.reasons[:MAX_LISTED]]
    if len(report.reasons) > MAX_LISTED:
        description.append(f"and {count(len(report.reasons) - MAX_LISTED, 'more reason')}")
    return tag("ul", *(tag("li", reason) for reason in [*description, coverage_line(report)]), class_="reasons")


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
    figures = [
        (
            "SNR, pooled",
            db(a.overall_snr_db),
            "" if a.overall_snr_db is None else "dB",
            f"over {count(a.total_layers, 'layer that differs', 'layers that differ')}",
        ),
        (
            "Worst layer",
            db(a.worst_layer_snr_db),
            "" if a.worst_layer_snr_db is None else "dB",
            breakable(display(worst.layer_name, 80)) if worst else "",
        ),
        ("Relative error", percent(a.mean_relative_error), "", "Σ|e| / Σ|x|"),
        ("Max |e|", number(a.max_absolute_error), "", f"99 % below {number(a.absolute_error_percentiles.p99)}"),
        ("Cosine", cosine(a.cosine_similarity), "", "of original and quantized"),
        (
            "Bits per weight",
            number(a.bits_per_weight),
            "",
            f"{size(a.original_bytes)} → {size(a.quantized_bytes)}, {number(a.compression_ratio)} to 1",
        ),
    ]
    if not report.layers:
        return tag("div", tag("p", "No layer differs, so there is no error to show.", class_="note"))
    return joined(
        *(
            tag(
                "div",
                tag("p", title, class_="label"),
                tag("p", value, " ", tag("small", unit), class_="value"),
                tag("p", note, class_="note"),
            )
            for title, value, unit, note in figures
        )
    )


def _not_compared(items: list[NotCompared]) -> Markup:
    if not items:
        return Markup("")
    rows = [
        [display(item.layer_name), item.side, BUCKETS.get(item.bucket, display(item.bucket)), sentence(item.reason)]
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
        _table(["tensor", "in", "why", "in detail"], rows, "stack"),
        *more,
        class_="problems",
    )


def _table(heads: list[str], rows: list[list[str]], kind: str, numbers: int = 0) -> Markup:
    """A table whose first cells are row heads and whose last columns, that many, are numbers.

    ``kind``: "short" names are never broken; the rows of a "stack" become lines where the page is narrow.
    """
    right = [{"class_": "number"} if n >= len(heads) - numbers else {} for n in range(len(heads))]
    head = tag("tr", *(tag("th", text, scope="col", **right[n]) for n, text in enumerate(heads)))
    body = [
        tag(
            "tr",
            tag("th", tag("span", row[0], class_="name"), scope="row"),
            *(tag("td", text, **right[n]) for n, text in enumerate(row[1:], 1)),
        )
        for row in rows
    ]
    return tag("div", tag("table", tag("thead", head), tag("tbody", *body), class_=f"plain {kind}"), class_="scroll")


def _coverage(report: Report) -> Markup:
    sides = []
    for title, buckets, fraction in (
        ("Original", report.coverage.original, report.coverage.original_compared_fraction),
        ("Quantized", report.coverage.quantized, report.coverage.quantized_compared_fraction),
    ):
        share = "" if fraction is None else f"{100 * fraction:.4g} % of the selected bytes compared"
        sides.append(tag("div", tag("h3", title, tag("span", share)), _strip(buckets), _bucket_table(buckets)))
    return tag("div", *sides, class_="coverage")


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
    items = [_finding(found) for found in shown]
    if len(shown) < len(report.findings):
        more = f"and {count(len(report.findings) - len(shown), 'more finding')}, in the JSON report"
        items.append(tag("li", tag("span"), tag("p", more)))
    return tag("ul", *items, class_="findings")


def _finding(found: Finding) -> Markup:
    remedy = [tag("p", sentence(found.remedy), class_="remedy")] if found.remedy else []
    severity = tag("span", found.severity, class_=f"tag {found.severity}")
    return tag("li", severity, tag("div", tag("p", sentence(found.message)), *remedy, *_explained(found.code)))


def _explained(code: str) -> list[Markup]:
    """What the guide says of a finding; nothing of those of a newer version."""
    row = CODES.get(code)
    if row is None:
        return []
    more = tag("p", row.remedy, " More: ", tag("code", f"quanterr explain {code}"))
    return [tag("details", tag("summary", tag("code", code)), tag("p", f"{row.meaning}."), more)]


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
    table = tag("table", tag("thead", tag("tr", *heads)), tag("tbody", *rows), class_="plain gates")
    return joined(tag("p", description, class_="about"), tag("div", table, class_="scroll"))


def _gate(gate: Gate) -> list[Markup]:
    """The gate in a row, and in a second one why it does not hold."""
    word, tone = gate_words(gate)
    patterns = f" for {sentence(', '.join(gate.layers))}" if gate.layers else ""
    row = tag(
        "tr",
        tag("td", tag("span", word, class_=f"tag {tone}")),
        tag("th", display(gate.id) if gate.id != gate.require else "", scope="row"),
        tag("td", tag("code", sentence(gate.require)), patterns),
        tag("td", judged(gate.observed, gate.limit), class_="number"),
        tag("td", unrounded(gate.limit), class_="number"),
        tag("td", judged(gate.margin, 0), class_="number"),
    )
    if gate.status == "pass":
        return [row]
    reason = [tag("p", f"Reason: {sentence(gate.reason)}", class_="remedy")] if gate.reason else []
    shown = [tag("li", violation_line(violation)) for violation in gate.violations[:MAX_VIOLATIONS]]
    if len(gate.violations) > MAX_VIOLATIONS:
        shown.append(tag("li", f"and {len(gate.violations) - MAX_VIOLATIONS:,} more, in the JSON report"))
    why = [tag("p", sentence(gate.message)), *reason, tag("ul", *shown)]
    return [row, tag("tr", tag("td", ""), tag("td", *why, colspan="5"), class_="why")]


def _groups(report: Report, kind: str) -> Markup:
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
    return _table(heads, rows, "short", len(heads) - 1) if rows else tag("p", "No layer differs.", class_="none")


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
    return tag("dl", *(part for title, text in facts for part in (tag("dt", title), tag("dd", text))), class_="facts")


def _provenance(side: Side) -> list[tuple[str, str]]:
    """Files, prefix and notes of a checkpoint."""
    names = ", ".join(f"{display(file.name)} ({size(file.bytes)})" for file in side.files[:MAX_FILES])
    more = f" and {len(side.files) - MAX_FILES:,} more" if len(side.files) > MAX_FILES else ""
    description = [("files", f"{names}{more}")] if len(side.files) > 1 else []
    description += [("prefix", display(side.prefix))] if side.prefix else []
    return description + [("note", sentence(note)) for note in side.notes[:MAX_LISTED]]
