"""The report in the terminal: coverage first, the verdict last."""

from collections.abc import Sequence
from itertools import takewhile
from math import inf, log10

from rich.console import Console
from rich.table import Table
from rich.text import Text

from quanterr.report.base import Finding
from quanterr.report.block_map import block_maps
from quanterr.report.formatting import cosine, db, doubts, number, percent, sentence
from quanterr.report.layers import SORTS, compared_line, coverage_line, of_scales, word_of, worst_layers
from quanterr.report.model import Aggregate, Layer, Report
from quanterr.report.sections import Column
from quanterr.report.terminal import (
    bare_table,
    ended,
    fitted,
    hidden,
    is_plain,
    print_findings,
    print_next,
    style_of,
    written,
)
from quanterr.util.text import count, display, size

BAR = 12  # characters
BAR_DB = 60  # an SNR from which the bar is empty
WEIGHT = ".weight"


def show(
    report: Report,
    to: Console,
    top: int = 10,
    sort_by: str = "snr",
    verbose: bool = False,
    plot: bool = True,
    ending: str = "",
    next_step: str = "",
) -> None:
    """Print the whole report; maps and curves only in a terminal. ``ending`` is the last line: see :func:`answer`;
    ``next_step`` the command that is proposed.
    """
    unicode = "utf" in (to.encoding or "").lower()
    plain = is_plain(to)
    to.print(Text(coverage_line(report)), soft_wrap=not to.is_terminal)
    if report.layers:
        for table in (
            _aggregate(report, plain),
            _groups(report, "format", plain, to),
            _groups(report, "role", plain, to),
        ):
            to.print()
            to.print(table)
        if plot and to.file.isatty():
            for picture in block_maps(report, to.width, unicode):
                to.print()
                to.print(picture)
        if top:
            _print_worst(report, top, sort_by, plain, to)
    if verbose:
        _print_evidence(report, to)
    print_findings(_worst_first(report), to, verbose)
    to.print()
    _print_reasons(report, to)
    print_next(next_step, to)
    style = style_of(word_of(report), doubts(report.verdict, report.findings))
    to.print(Text(ending or answer(report), style=style), soft_wrap=not to.is_terminal)


def answer(report: Report, status: int | None = None, wrote: Sequence[str] = ()) -> str:
    """Verdict, exit status and what decided, and which files were written, on one line."""
    return ended(word_of(report), status, _decided(report) + written(wrote), doubts(report.verdict, report.findings))


def _decided(report: Report) -> str:
    """What made the verdict, counted."""
    if report.verdict == "pass":
        return sentence("; ".join(report.reasons)) if report.gates else compared_line(report)
    if report.verdict == "fail":
        failed = sum(gate.status == "fail" and gate.severity == "error" for gate in report.gates)
        return f"{failed} of {count(len(report.gates), 'gate')} {'does' if failed == 1 else 'do'} not hold"
    damaged, missing = len(_damaged(report)), len({row.layer_name for row in report.not_compared})
    parts = [f"{count(damaged, 'layer')} damaged"] if damaged else []
    parts += [f"{missing:,} not compared"] if missing else []
    return ", ".join(parts) or sentence(report.reasons[0] if report.reasons else "no reason given")


def _damaged(report: Report) -> set[str]:
    """Layers with an error."""
    return {found.layer for found in report.findings if found.severity == "error" and found.layer is not None}


def _aggregate(report: Report, plain: bool) -> Table:
    a: Aggregate = report.aggregate
    differ = "layer differs" if a.total_layers == 1 else "layers differ"
    table = bare_table(f"{a.total_layers:,} {differ}, {a.total_elements:,} elements", plain)
    table.show_header = False
    cells = [
        ("SNR, pooled", db(a.overall_snr_db, " dB") + _of_finite(report)),
        ("its scales allow", _allowed(a)),
        ("worst layer", db(a.worst_layer_snr_db, " dB")),
        *([] if a.predicted_kld is None else [("predicted KLD", f"{number(a.predicted_kld)} nat")]),
        ("relative error", percent(a.mean_relative_error)),
        ("mean |e|", number(a.mean_absolute_error)),
        ("99 % of |e| below", number(a.absolute_error_percentiles.p99)),
        ("max |e|", number(a.max_absolute_error)),
        ("cosine", cosine(a.cosine_similarity)),
        ("bits per weight", number(a.bits_per_weight)),
        ("size", f"{size(a.original_bytes)} -> {size(a.quantized_bytes)}, {number(a.compression_ratio)} to 1"),
    ]
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for cell in cells:
        table.add_row(*cell)
    return table


def _of_finite(report: Report) -> str:
    """What the pooled SNR is without layers whose own is undefined, where these make it so."""
    finite = [layer for layer in report.layers if layer.snr_db is not None and layer.error_norm]
    if report.aggregate.overall_snr_db is not None or not finite:
        return ""
    signal = sum((layer.original_norm or 0.0) ** 2 for layer in finite)
    error = sum((layer.error_norm or 0.0) ** 2 for layer in finite)
    if not 0 < error < inf or not 0 < signal < inf:
        return ""
    left_out = count(len(report.layers) - len(finite), "layer")
    return f"; {db(10 * log10(signal / error), ' dB')} without {left_out}"


def _allowed(a: Aggregate) -> str:
    attainable, excess = of_scales(a, "attainable_snr_db"), of_scales(a, "excess_db")
    if a.attainable_snr_db is None:
        return attainable
    return f"{attainable} dB: {excess} dB in excess, {of_scales(a, 'worst_layer_excess_db')} dB in the worst layer"


GROUP_COLUMNS = (
    Column("layers", 2),
    Column("elements", 6),
    Column("bits/w", 7),
    Column("SNR dB", 0),
    Column("attainable", 4),
    Column("excess dB", 1),
    Column("worst dB", 3),
    Column("relative", 5),
    Column("max |e|", 8),
)


def _groups(report: Report, kind: str, plain: bool, to: Console) -> Table:
    rows = []
    for name, a in report.groups.get(kind, {}).items():
        row = [
            f"{a.total_layers:,}",
            f"{a.total_elements:,}",
            number(a.bits_per_weight),
            db(a.overall_snr_db),
            of_scales(a, "attainable_snr_db"),
            of_scales(a, "excess_db"),
            db(a.worst_layer_snr_db),
            percent(a.mean_relative_error),
            number(a.max_absolute_error),
        ]
        rows.append((name, row))
    return fitted(f"By {kind}", kind, GROUP_COLUMNS, rows, plain, to)


LAYER_COLUMNS = (
    Column("SNR dB", 0),
    Column("distance", 4, right=False),
    Column("excess dB", 1),
    Column("relative", 3),
    Column("max |e|", 5),
    Column("bits/w", 6),
    Column("format", 2, right=False),
)


def _print_worst(report: Report, top: int, sort_by: str, plain: bool, to: Console) -> None:
    """The worst layers, but for those with an error: findings report them."""
    damaged = _damaged(report)
    others = [layer for layer in report.layers if layer.layer_name not in damaged]
    layers = worst_layers(others, top, sort_by)
    if not layers:
        return
    of = "of the other layers" if damaged else "layers"
    if len(layers) < len(others):
        title = f"The {len(layers)} worst {of}" if len(layers) > 1 else f"The worst {of.removesuffix('s')}"
    else:
        title = f"All {'other ' if damaged else ''}layers, the worst first"
    table, left_out = _worst(f"{title}, by {SORTS[sort_by][1]}", layers, plain, to)
    to.print()
    to.print(table)
    notes = [f"names without {left_out}"] if left_out else []
    notes += hidden(table, LAYER_COLUMNS)
    if any(column.header == "distance" for column in table.columns):
        notes.append(f"distance: full at 0 dB, empty at {BAR_DB} dB")
    if notes:
        to.print(Text("; ".join(notes), style="dim"), soft_wrap=not to.is_terminal)


def _common(names: Sequence[str]) -> tuple[str, str]:
    """What all names begin and end with: words before any number, and .weight; each keeps a word of its own."""
    suffix = WEIGHT if len(names) > 1 and all(name.endswith(WEIGHT) for name in names) else ""
    words = [name.removesuffix(suffix).split(".")[:-1] for name in names]
    if len(names) < 2:
        return "", ""
    alike = takewhile(lambda same: len(set(same)) == 1 and not same[0].isdecimal(), zip(*words, strict=False))
    return "".join(f"{same[0]}." for same in alike), suffix


def _worst(title: str, layers: Sequence[tuple[str, Layer]], plain: bool, to: Console) -> tuple[Table, str]:
    """The table, and what was left out of its names."""
    prefix, suffix = _common([layer.layer_name for _, layer in layers])
    rows = [
        (
            layer.layer_name.removeprefix(prefix).removesuffix(suffix) + name.removeprefix(layer.layer_name),
            (
                db(layer.snr_db),
                _bar(layer.snr_db, plain),
                of_scales(layer, "excess_db"),
                percent(layer.relative_error),
                number(layer.max_absolute_error),
                number(layer.bits_per_weight),
                display(layer.format),
            ),
        )
        for name, layer in layers
    ]
    left_out = " and ".join(display(part) for part in (prefix, suffix) if part)
    return fitted(title, "layer", LAYER_COLUMNS, rows, plain, to), left_out


def _bar(snr_db: float | None, plain: bool) -> Text:
    """Full at 0 dB and below, empty from 60 dB on."""
    share = 1.0 if snr_db is None else min(max(1 - snr_db / BAR_DB, 0), 1)
    if plain:
        return Text(("#" * round(share * BAR)).ljust(BAR, "."))
    eighths = round(share * BAR * 8)
    bar = "█" * (eighths // 8) + ("", *"▏▎▍▌▋▊▉")[eighths % 8]
    style = "red" if snr_db is None or snr_db < 10 else "yellow" if snr_db < 30 else "green"
    return Text(bar.ljust(BAR), style=style)


def _print_evidence(report: Report, to: Console) -> None:
    to.print()
    for layer in report.layers + report.other_changes:
        for evidence in layer.evidence:
            to.print(Text(sentence(f"{layer.display_name}: {layer.format}: {evidence}")), soft_wrap=True)


def _worst_first(report: Report) -> list[Finding]:
    """Findings of layers by their SNR, an undefined one first; of whole checkpoints before these."""
    levels = {layer.layer_name: layer.snr_db for layer in report.layers}

    def level(finding: Finding) -> float:
        if finding.layer not in levels:
            return -inf
        snr_db = levels[finding.layer]
        return -inf if snr_db is None else snr_db

    return sorted(report.findings, key=level)


def _print_reasons(report: Report, to: Console) -> None:
    """Those that neither a finding nor the answer gives."""
    if report.verdict == "pass":
        return
    found = [item.message for item in report.findings]
    for reason in report.reasons:
        if not any(reason.startswith(message) for message in found):
            to.print(Text(sentence(reason)), soft_wrap=not to.is_terminal)
