"""What changed, in lines for the terminal."""

from collections.abc import Iterator

from quanterr.report.diff.model import Change, Diff
from quanterr.util.colors import painted
from quanterr.util.text import count, display, size

TONES = {"worse": "fail", "better": "pass"}
SHOWN_DB = 0.5  # of excess, or of its change: less is nothing but rounding


def diff_lines(found: Diff, top: int, colored: bool = False) -> Iterator[str]:
    """What is reported of it: at most ``top`` layers of each kind. No line begins with a name."""
    if found.difference:
        yield f"{painted('warning', 'warning', colored)}: not comparable: {found.difference}"
    for word, totals in (("old", found.old), ("new", found.new)):
        snr, bits = _db(totals.overall_snr_db), totals.bits_per_weight
        stored = f"{size(totals.quantized_bytes)}" + ("" if bits is None else f", {bits:.4g} bits per weight")
        excess = totals.excess_db or 0.0
        beyond = f", {excess:.2f} dB below what its scales allow" if excess > SHOWN_DB else ""
        differ = f"{count(totals.layers, 'layer')} {'differs' if totals.layers == 1 else 'differ'}"
        yield f"{word}: {display(totals.path)}: {totals.verdict}, {differ}, {snr} pooled{beyond}, {stored}"
    yield from _size_line(found)
    for word, items in (("worse", found.worse), ("better", found.better)):
        title = painted(f"{count(len(items), 'layer')} {word}", TONES[word], colored)
        yield from listed(title, [_changed(item) for item in items], top)
    yield f"{count(found.unchanged, 'layer')} unchanged"
    for word, names in (("undefined in both", found.undefined), ("new", found.added), ("gone", found.gone)):
        yield from listed(f"{count(len(names), 'layer')} {word}", [display(name) for name in names], top)
    formats = [f"{display(c.layer)}: {c.old_format} -> {c.new_format}" for c in found.format_changes]
    yield from listed(f"{count(len(formats), 'layer')} in another format", formats, top)


def _size_line(found: Diff) -> Iterator[str]:
    old, new = found.old.quantized_bytes, found.new.quantized_bytes
    if old != new and old:
        yield f"size: {size(old)} -> {size(new)} ({100 * (new - old) / old:+.2f} %)"


def _changed(item: Change) -> str:
    by = f"{item.change_db:+.4g} dB" if item.change_db is not None else display(item.reason or "", 2000)
    excess = f"; excess {_db(item.old_excess_db)} -> {_db(item.new_excess_db)}"
    told = excess if abs((item.old_excess_db or 0.0) - (item.new_excess_db or 0.0)) > SHOWN_DB else ""
    return f"{display(item.layer)}: {_db(item.old_snr_db)} -> {_db(item.new_snr_db)} ({by}{told})"


def listed(title: str, lines: list[str], top: int) -> Iterator[str]:
    """A title and at most ``top`` lines below it; nothing where there are none."""
    if not lines:
        return
    yield f"{title}:" if top else title
    yield from (f"  - {line}" for line in lines[:top])
    if top and len(lines) > top:
        yield f"  and {len(lines) - top:,} more"


def _db(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} dB"
