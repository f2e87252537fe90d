"""The view of an inspection: formats, roles, findings, all weights."""

from collections.abc import Iterator, Sequence

from quanterr.documents.inspection.model import DecodeBound, Inspection, StoredWeight, Tally
from quanterr.outputs.formatting import format_if_known, format_percent, format_size_change, sentence
from quanterr.outputs.page.columns import CHANGED, DIFFERS, DIGITS, NOT_COMPARED, round_digits
from quanterr.outputs.sections import (
    MAP,
    VERBOSE,
    Case,
    CellColumn,
    Column,
    Findings,
    Lines,
    MapMetric,
    Maps,
    Name,
    Row,
    Section,
    Suite,
    Table,
    View,
    fill,
)
from quanterr.util.strict_json import JsonObject
from quanterr.util.text import count, display, size
from quanterr.views.diff.candidates.items import ItemWords
from quanterr.views.loading import make_loading_section
from quanterr.views.parts import make_view

WEIGHT_COLUMNS: Sequence[CellColumn[StoredWeight]] = (
    (Column("format", 0, right=False), lambda weight: weight.format or "unread"),
    (Column("shape", 2, right=False), lambda weight: " x ".join(map(str, weight.shape)) or "scalar"),
    (Column("dtype", 4, right=False), lambda weight: weight.dtype),
    (Column("group", 3, right=False), lambda weight: _format_group(weight.block_size)),
    (Column("bits", 5), lambda weight: str(weight.code_bits or "-")),
    (Column("bits/w", 1), lambda weight: format_if_known(weight.bits_per_weight, ".4g", "unknown")),
    (Column("activations", 6, right=False), lambda weight: weight.activations or "-"),
)
METRICS = {
    "bits": MapMetric("Bits/w", "lower", "bit", column="Bits/w"),
    "bytes": MapMetric("Bytes", "lower", "B", log=True, column="Bytes", is_wide=True),
}
WORDS = {"role": "Role", "format": "Format", "group": "Group", "activations": "Activations"}
CSV_WEIGHT = (
    *("name", "role", "block", "format", "dtype", "shape", "elements", "bytes", "bits_per_weight", "code_bits"),
    *("block_size", "scales", "comfy_format", "activations", "reason"),
)
CSV_COLUMNS = ("list", *CSV_WEIGHT)
MAX_SUMMARIZED = 5  # formats in the summary
# Code of a finding about values → the fault that was searched.
FAULTS_BY_CODE = {
    "nonfinite_values": "NaN",
    "constant_rows": "constant rows",
    "constant_weight": "constant weights",
    "repeated_weights": "repeated weights",
    "values_unlike": "far larger rows",
    "scale_nonfinite": "NaN in scales",
    "scale_zero": "zero scales",
    "unused_codes": "unused codes",
}
ABOUT = "From headers and labels alone: no value was read."
ABOUT_VALUES = "From headers and labels; every value was read once. There was no original to compare with."


def view(inspection: Inspection, top: int) -> View:
    """Return the view of an inspection; pages show all weights, terminals only with ``-v``."""
    total = inspection.total
    bits = "" if total.bits_per_weight is None else f", {total.bits_per_weight:.4g} bits per weight"
    stored = f"{count(inspection.tensors, 'tensor')}, {size(inspection.bytes)}"
    runs = ", ".join(f"{name} in {count(n, 'weight')}" for name, n in inspection.activations.items())
    facts = [
        ("checkpoint", [Name(inspection.path), f", {inspection.kind}"]),
        ("stored", [f"{count(len(inspection.files), 'file')}, {stored}, {total.elements:,} parameters{bits}"]),
        *([("architecture", [inspection.architecture])] if inspection.architecture else []),
        *([("config says", [inspection.quant_method])] if inspection.quant_method else []),
        *([("activations", [runs])] if runs else []),
        *([("KV cache", [inspection.kv])] if inspection.kv else []),
        *([("verified", [f"SHA-256 of {count(inspection.verified, 'file')}"])] if inspection.verified else []),
    ]
    maps = Maps(METRICS, WORDS, lambda: map(_make_row, inspection.weights), "bytes", "bits")
    about = ABOUT_VALUES if inspection.values else ABOUT
    answer, sections, summary = conclusion(inspection), _make_sections(inspection), list(_summarize(inspection))
    return make_view(inspection, "What is stored", answer, facts, sections, about, maps, summary=summary)


def _summarize(inspection: Inspection) -> Iterator[str]:
    """Yield the weights of each format, declared properties, and what was checked."""
    for name, tally in list(inspection.formats.items())[:MAX_SUMMARIZED]:
        bits = format_if_known(tally.bits_per_weight, ".4g", "unknown")
        yield f"  {display(name)}: {count(tally.weights, 'weight')}, {tally.elements:,} parameters, {bits} bits/w"
    if len(inspection.formats) > MAX_SUMMARIZED:
        yield f"  and {count(len(inspection.formats) - MAX_SUMMARIZED, 'more format')}"
    declared = [("architecture", inspection.architecture), ("config", inspection.quant_method), ("KV", inspection.kv)]
    runs = [f"inputs {display(name)} in {count(n, 'weight')}" for name, n in inspection.activations.items()]
    facts = [f"{title} {display(value)}" for title, value in declared if value] + runs
    if facts:
        yield f"declared: {', '.join(facts)}"
    yield _describe_checks(inspection)
    for result in inspection.loading:
        yield f"{result.runtime} ({result.version}): {result.describe()}"
    if inspection.verified:
        yield f"verified: SHA-256 of {count(inspection.verified, 'file')}"
    if inspection.decode is not None:
        yield _describe_bound(inspection.decode)


def _describe_checks(inspection: Inspection) -> str:
    """Return which headers and values were checked, and with which outcome."""
    codes = {finding.code for finding in inspection.findings if finding.severity != "info"}
    model = display(inspection.architecture) if inspection.architecture else "each other"
    outcome = ": see the findings" if codes - FAULTS_BY_CODE.keys() else f" agree with {model}"
    headers = f"checked: names, shapes and labels of {count(inspection.tensors, 'tensor')}{outcome}"
    if not inspection.values:
        return f"{headers}; values not read (--values)"
    absent = [what for code, what in FAULTS_BY_CODE.items() if code not in codes]
    nothing = " or ".join([", ".join(absent[:-1]), *absent[-1:]])
    return f"{headers}; {count(inspection.total.weights, 'weight')} read: no {nothing}"


def brief(inspection: Inspection) -> str:
    """Return the answer in one line, for ``--quiet``, with the first error."""
    problems = inspection.problems
    more = f" and {count(len(problems) - 1, 'more error')}" if problems[1:] else ""
    error = f"; error: {sentence(problems[0])}{more}" if problems else ""
    return f"quanterr: {conclusion(inspection)}{error}"


def conclusion(inspection: Inspection) -> str:
    """Return the size of the checkpoint, its formats, and how many weights are not read."""
    total = inspection.total
    bits = "" if total.bits_per_weight is None else f" at {total.bits_per_weight:.4g} bits per weight"
    formats = ", ".join(name for name in inspection.formats if name != "unread")
    unread = f"; {count(inspection.unread, 'weight')} not read" if inspection.unread else ""
    return f"{count(total.weights, 'weight')}{bits}, {size(inspection.bytes)}: {formats or 'no format'}{unread}"


def _make_sections(inspection: Inspection) -> Iterator[Section]:
    yield from make_loading_section(inspection.loading)
    tallies = _make_tally_columns(inspection.total)
    formats = [(Name(name), tally) for name, tally in inspection.formats.items()]
    yield Section("formats", "By format", [Table("By format", "format", *fill(tallies, formats))])
    roles = [
        (Name(f"{role}, {name}"), tally) for role, group in inspection.groups.items() for name, tally in group.items()
    ]
    yield Section("roles", "By role and format", [Table("By role and format", "role", *fill(tallies, roles))])
    if inspection.decode is not None:
        yield Section("decode", "Upper bound on speed", [Lines([_describe_bound(inspection.decode)])])
    if inspection.findings:
        yield Section("findings", "Findings", [Findings([("", finding) for finding in inspection.findings])])
    weights = [(Name(weight.name), weight) for weight in inspection.weights]
    yield Section(
        "weights", "All weights", [Table("All weights", "weight", *fill(WEIGHT_COLUMNS, weights))], (VERBOSE,)
    )
    yield MAP


def _describe_bound(decode: DecodeBound) -> str:
    experts = f" ({display(decode.experts)})" if decode.experts else ""
    return (
        f"{decode.hardware}, {decode.gigabytes_per_second:g} GB/s: at most {decode.tokens_per_second:,.0f} tokens/s "
        f"for one sequence, as each token reads {size(decode.active_bytes)} of weights{experts}. "
        "Only memory bandwidth is taken into account."
    )


def _make_tally_columns(total: Tally) -> Sequence[CellColumn[Tally]]:
    return (
        (Column("weights", 1), lambda tally: f"{tally.weights:,}"),
        (Column("parameters", 2), lambda tally: f"{tally.elements:,}"),
        (Column("share", 4), lambda tally: format_percent(tally.elements / max(total.elements, 1))),
        (Column("size", 3), lambda tally: size(tally.bytes)),
        (Column("bits/w", 0), lambda tally: format_if_known(tally.bits_per_weight, ".4g", "unknown")),
        (Column("scales", 5), lambda tally: f"{tally.scales:,}"),
    )


def _format_group(block: list[int] | None) -> str:
    """Return ``128`` for groups of 128 columns, ``128 x 128`` for blocks, and ``-`` if neither is known."""
    if block is None:
        return "-"
    return str(block[1]) if block[0] == 1 else f"{block[0]} x {block[1]}"


def _make_row(weight: StoredWeight) -> Row:
    words = {
        "role": display(weight.role),
        "format": display(weight.format or "unread"),
        "group": _format_group(weight.block_size),
        "activations": weight.activations and display(weight.activations),
        "reason": weight.reason and sentence(weight.reason),
    }
    numbers = {"bits": round_digits(weight.bits_per_weight, DIGITS), "bytes": weight.bytes}
    status = NOT_COMPARED if weight.reason is not None else DIFFERS if len(weight.shape) > 1 else CHANGED
    return Row(weight.name, status, words, numbers)


def rows(inspection: Inspection) -> Iterator[JsonObject]:
    """Yield the rows of CSV: the checkpoint, then each weight."""
    whole = {"list": "inspection", "name": inspection.path, "bytes": inspection.bytes}
    yield whole | {"elements": inspection.total.elements, "bits_per_weight": inspection.bits_per_weight}
    for weight in inspection.weights:
        yield {"list": "weights"} | {name: getattr(weight, name) for name in CSV_WEIGHT}


def suites(inspection: Inspection) -> list[Suite]:
    """Return one JUnit test, which is an error if weights are not read, or if there are other errors."""
    problems = [*map(sentence, inspection.problems)]
    what = count(inspection.unread, "weight") + " not read" if inspection.unread else count(len(problems), "error")
    problem = ("error", what, "\n".join(problems)) if problems else ("", "", "")
    return [Suite("inspection", [Case("inspection", "every weight is read", *problem, output=conclusion(inspection))])]


ITEM_WORDS = ItemWords(
    "changed, with more bytes",
    "changed, with as many or fewer bytes",
    columns=(
        (Column("old format", 0, right=False), lambda weight: weight.old_format or "unread"),
        (Column("new format", 1, right=False), lambda weight: weight.new_format or "unread"),
        (Column("bytes", 2), lambda weight: format_size_change(weight.new_bytes - weight.old_bytes)),
    ),
    ends=lambda weight: (weight.old_format, weight.new_format, weight.new_bytes - weight.old_bytes),
    about="From two stored inspections. Formats and sizes are compared, values are not.",
)
