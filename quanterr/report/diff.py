"""Two reports of one original, next to each other: what got better, what worse, what is new, what is gone."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from math import inf, isfinite
from typing import Any

from quanterr.errors import UsageError
from quanterr.report.reading import Extract
from quanterr.report.same_original import NORM, change, difference
from quanterr.report.values import Values, Weight
from quanterr.util.text import count, display, size

SCHEMA = "quanterr.diff"
SCHEMA_VERSION = "1.1"
METRICS = ("snr_db", "excess_db", NORM)
AGGREGATES = ("overall_snr_db", "excess_db", "bits_per_weight")
SHOWN_DB = 0.5  # of excess, or of its change: less is nothing but rounding
SAME_DB = 1e-6  # a device adds up in another order than another: no change


@dataclass(slots=True)
class Totals:
    """One of the two reports as a whole."""

    path: str
    verdict: str
    layers: int
    overall_snr_db: float | None
    excess_db: float | None
    bits_per_weight: float | None
    quantized_bytes: int


@dataclass(slots=True)
class Change:
    """A layer of both. An SNR is null where it is undefined or infinite, as ``reason`` then says."""

    layer: str
    old_snr_db: float | None
    new_snr_db: float | None
    change_db: float | None
    reason: str | None
    old_excess_db: float | None = None  # null without nearest codes, and in reports of schema 1.1 and before
    new_excess_db: float | None = None


@dataclass(slots=True)
class FormatChange:
    """A layer of both that is stored in another format."""

    layer: str
    old_format: str
    new_format: str


@dataclass(slots=True)
class Diff:
    """All that changed. ``difference`` says why the numbers do not belong together, if that was forced.

    ``worse`` and ``better`` begin with the largest change; ``undefined`` are layers without an SNR in either.
    """

    schema: str
    schema_version: str
    old: Totals
    new: Totals
    difference: str | None
    added: list[str]
    gone: list[str]
    format_changes: list[FormatChange]
    unchanged: int = 0
    worse: list[Change] = field(default_factory=list)
    better: list[Change] = field(default_factory=list)
    undefined: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


def diff(old: Extract, new: Extract, paths: tuple[str, str], force: bool = False) -> Diff:
    """Compare two reports, read with :data:`METRICS` and :data:`AGGREGATES`.

    Raises:
        UsageError: they are of different originals, selections or settings, and it is not forced.
    """
    why = difference(old, new)
    if why and not force:
        raise UsageError(
            f"{display(paths[0])} cannot be compared with {display(paths[1])}: {why}; --force compares them"
        )
    before, after = ({weight.name: weight for weight in Values(report).weights} for report in (old, new))
    both = [(before[name], weight) for name, weight in after.items() if name in before]
    found = Diff(
        schema=SCHEMA,
        schema_version=SCHEMA_VERSION,
        difference=why,
        old=_totals(paths[0], old),
        new=_totals(paths[1], new),
        added=[name for name in after if name not in before],
        gone=[name for name in before if name not in after],
        format_changes=[change for was, now in both if (change := _format_change(was, now))],
    )
    for was, now in both:
        _sort_in(found, was, now)
    found.worse.sort(key=lambda item: (item.change_db is not None, item.change_db))
    found.better.sort(key=lambda item: (item.change_db is not None, -(item.change_db or 0)))
    return found


def _totals(path: str, report: Extract) -> Totals:
    aggregate = {name: report["aggregate"][name] for name in AGGREGATES}
    return Totals(
        path, report["verdict"], len(report["layers"]), **aggregate, quantized_bytes=report["quantized"]["bytes"]
    )


def _format_change(was: Weight, now: Weight) -> FormatChange | None:
    before, after = was.values.get("format"), now.values.get("format")
    return FormatChange(now.name, before, after) if before and after and before != after else None


def _sort_in(found: Diff, was: Weight, now: Weight) -> None:
    """Put a layer of both where it belongs. One whose SNR became undefined got worse, whatever it was."""
    before, after = (None if weight.trouble else weight.number("snr_db") for weight in (was, now))
    if before is None and after is None:
        found.undefined.append(now.name)
        return
    by = change(before, after, relative=False)
    if by is not None and abs(by) <= SAME_DB:
        found.unchanged += 1
        return
    before_db, after_db, by_db = (v if v is not None and isfinite(v) else None for v in (before, after, by))
    reason = _reason(was, now, before, after) if by_db is None else None
    excess = (weight.values.get("excess_db") for weight in (was, now))
    item = Change(now.name, before_db, after_db, by_db, reason, *excess)
    (found.worse if after is None or (by is not None and by < 0) else found.better).append(item)


def _reason(was: Weight, now: Weight, before: float | None, after: float | None) -> str:
    if after is None:
        return now.trouble or "its SNR is undefined"
    if before is None:
        return f"before: {was.trouble or 'its SNR was undefined'}"
    if inf in (before, after):
        return f"{'was' if before == inf else 'is'} the same as the original"
    return f"its SNR {'was' if before == -inf else 'is'} minus infinity: the original is all zeros"


def diff_lines(found: Diff, top: int) -> Iterator[str]:
    """What is reported of it: at most ``top`` layers of each kind. No line begins with a name."""
    if found.difference:
        yield f"warning: not comparable: {found.difference}"
    for word, totals in (("old", found.old), ("new", found.new)):
        snr, bits = _db(totals.overall_snr_db), totals.bits_per_weight
        stored = f"{size(totals.quantized_bytes)}" + ("" if bits is None else f", {bits:.4g} bits per weight")
        excess = totals.excess_db or 0.0
        beyond = f", {excess:.2f} dB below what its scales allow" if excess > SHOWN_DB else ""
        differ = f"{count(totals.layers, 'layer')} {'differs' if totals.layers == 1 else 'differ'}"
        yield f"{word}: {display(totals.path)}: {totals.verdict}, {differ}, {snr} pooled{beyond}, {stored}"
    yield from _size_line(found)
    for word, items in (("worse", found.worse), ("better", found.better)):
        yield from _listed(f"{count(len(items), 'layer')} {word}", [_changed(item) for item in items], top)
    yield f"{count(found.unchanged, 'layer')} unchanged"
    for word, names in (("undefined in both", found.undefined), ("new", found.added), ("gone", found.gone)):
        yield from _listed(f"{count(len(names), 'layer')} {word}", [display(name) for name in names], top)
    formats = [f"{display(c.layer)}: {c.old_format} -> {c.new_format}" for c in found.format_changes]
    yield from _listed(f"{count(len(formats), 'layer')} in another format", formats, top)


def _size_line(found: Diff) -> Iterator[str]:
    old, new = found.old.quantized_bytes, found.new.quantized_bytes
    if old != new and old:
        yield f"size: {size(old)} -> {size(new)} ({100 * (new - old) / old:+.2f} %)"


def _changed(item: Change) -> str:
    by = f"{item.change_db:+.4g} dB" if item.change_db is not None else display(item.reason or "", 2000)
    excess = f"; excess {_db(item.old_excess_db)} -> {_db(item.new_excess_db)}"
    told = excess if abs((item.old_excess_db or 0.0) - (item.new_excess_db or 0.0)) > SHOWN_DB else ""
    return f"{display(item.layer)}: {_db(item.old_snr_db)} -> {_db(item.new_snr_db)} ({by}{told})"


def _listed(title: str, lines: list[str], top: int) -> Iterator[str]:
    if not lines:
        return
    yield f"{title}:" if top else title
    yield from (f"  - {line}" for line in lines[:top])
    if top and len(lines) > top:
        yield f"  and {len(lines) - top:,} more"


def _db(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} dB"
