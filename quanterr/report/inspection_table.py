"""Inspections in the terminal: formats first, findings last."""

from rich.console import Console
from rich.text import Text

from quanterr.report.inspection import DecodeBound, Inspection, StoredWeight, Tally
from quanterr.report.sections import Column
from quanterr.report.terminal import fit_table, print_findings
from quanterr.util.text import count, display, size

TALLY_COLUMNS = (
    Column("weights", 1),
    Column("parameters", 2),
    Column("share", 4),
    Column("size", 3),
    Column("bits/w", 0),
)
SCALES = Column("scales", 5)
WEIGHT_COLUMNS = (
    Column("format", 0, right=False),
    Column("shape", 2, right=False),
    Column("dtype", 4, right=False),
    Column("group", 3, right=False),
    Column("bits", 5),
    Column("bits/w", 1),
    Column("activations", 6, right=False),
)


def show(inspection: Inspection, to: Console, verbose: bool = False) -> None:
    """Print an inspection; ``verbose`` adds all weights and all findings."""
    plain = not to.file.isatty() or "utf" not in (to.encoding or "").lower()
    to.print(_head(inspection), soft_wrap=not to.is_terminal)
    total = inspection.total
    rows = [(name, [*_cells(tally, total), f"{tally.scales:,}"]) for name, tally in inspection.formats.items()]
    to.print()
    to.print(fit_table("By format", "format", (*TALLY_COLUMNS, SCALES), rows, plain, to))
    rows = [
        (f"{role}, {name}", _cells(tally, total))
        for role, formats in inspection.groups.items()
        for name, tally in formats.items()
    ]
    to.print()
    to.print(fit_table("By role and format", "role", TALLY_COLUMNS, rows, plain, to))
    if inspection.decode is not None:
        to.print()
        to.print(Text(_bound(inspection.decode)), soft_wrap=not to.is_terminal)
    if verbose:
        to.print()
        weights = [(weight.display_name, _weight_cells(weight)) for weight in inspection.weights]
        to.print(fit_table("All weights", "weight", WEIGHT_COLUMNS, weights, plain, to))
    print_findings([("", found) for found in inspection.findings], to, verbose)


def _bound(decode: DecodeBound) -> str:
    experts = f" ({display(decode.experts)})" if decode.experts else ""
    return (
        f"{decode.hardware}, {decode.gigabytes_per_second:g} GB/s: at most {decode.tokens_per_second:,.0f} tokens/s "
        f"for one sequence, which reads {size(decode.active_bytes)} of weights per token{experts}. "
        "This is a bound by memory bandwidth alone."
    )


def _head(inspection: Inspection) -> Text:
    total = inspection.total
    parts = [
        f"{display(inspection.path)}: {inspection.kind}",
        f"{count(len(inspection.files), 'file')}, {count(inspection.tensors, 'tensor')}, {size(inspection.bytes)}",
        f"{total.elements:,} parameters",
    ]
    if total.bits_per_weight is not None:
        parts.append(f"{total.bits_per_weight:.4g} bits per weight")
    if inspection.architecture:
        parts.append(display(inspection.architecture))
    if inspection.quant_method:
        parts.append(f"config says {display(inspection.quant_method)}")
    runs = [f"{name} in {count(n, 'weight')}" for name, n in inspection.activations.items()]
    if runs:
        parts.append(f"activations: {', '.join(runs)}")
    if inspection.kv:
        parts.append(f"KV cache: {inspection.kv}")
    return Text("; ".join(parts))


def _cells(tally: Tally, total: Tally) -> list[str]:
    return [
        f"{tally.weights:,}",
        f"{tally.elements:,}",
        f"{100 * tally.elements / max(total.elements, 1):.3g} %",
        size(tally.bytes),
        _bits(tally.bits_per_weight),
    ]


def _weight_cells(weight: StoredWeight) -> list[str]:
    return [
        weight.format or "unread",
        " x ".join(map(str, weight.shape)) or "scalar",
        weight.dtype,
        _group(weight.block_size),
        str(weight.code_bits or "-"),
        _bits(weight.bits_per_weight),
        weight.activations or "-",
    ]


def _group(block: list[int] | None) -> str:
    """Return the elements that share a scale: "128" columns, or "128 x 128"."""
    if block is None:
        return "-"
    return str(block[1]) if block[0] == 1 else f"{block[0]} x {block[1]}"


def _bits(bits: float | None) -> str:
    return "unknown" if bits is None else f"{bits:.4g}"
