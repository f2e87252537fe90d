"""What a reader sees of the classes of tensors: ``--every-code``."""

from collections.abc import Iterator, Sequence

from quanterr.documents.comparison.model import Report
from quanterr.documents.comparison.origin import NOT_SHOWN, TensorOrigin, sum_classes
from quanterr.outputs.sections import CARD, PAGE, VERBOSE, CellColumn, Column, LayerName, Section, Table, fill
from quanterr.util.text import count

LISTED = 200  # rows of tensors of which nothing is shown
NONE = "-"
COLUMNS: Sequence[CellColumn[TensorOrigin]] = (
    (Column("elements", 1), lambda one: f"{one.off_codes:,}" if one.off_codes else NONE),
    (Column("rows", 3), lambda one: f"{one.off_rows:,}" if one.off_rows else NONE),
    (Column("first place", 1, right=False), lambda one: _find_place(one) or NONE),
    (Column("reason", 0, right=False), lambda one: one.reason or NONE),
)


def describe_origin(report: Report) -> Iterator[str]:
    """Yield how many tensors are of each class, and the first of which nothing is shown."""
    if not report.settings.every_code or not report.origin:
        return
    sizes = sum_classes(report.origin)
    parts = [f"{size.tensors:,} {kind.replace('_', ' ')}" for kind, size in sizes.items()]
    yield f"every code of {count(len(report.origin), 'tensor')}: {', '.join(parts)}"
    for one in [one for one in report.origin if one.kind == NOT_SHOWN][:1]:
        yield f"not shown: {_describe(one)}"


def _describe(one: TensorOrigin) -> str:
    place = _find_place(one)
    where = f": the first at {place}" if place else ""
    amount = f", {count(one.off_codes, 'element')} in {count(one.off_rows, 'row')}" if one.off_codes else ""
    return f"{one.display_name}: {one.reason}{amount}{where}"


def _find_place(one: TensorOrigin) -> str:
    """Return the place of the first element that is not as expected; empty if there is none."""
    found = one.places or one.unlike_places
    return f"row {found[0][0]:,}, column {found[0][1]:,}" if found else ""


def make_origin_section(report: Report) -> Iterator[Section]:
    """Yield the table of tensors of which nothing is shown, if there are any."""
    lost = [one for one in report.origin if one.kind == NOT_SHOWN]
    if lost:
        rows = ((LayerName(one.layer_name), one) for one in lost[:LISTED])
        title = f"Not shown to be the original, rounded: {count(len(lost), 'tensor')}"
        table = Table(title, "tensor", *fill(COLUMNS, rows), len(lost) - min(len(lost), LISTED))
        yield Section("origin", title, [table], (PAGE, CARD, VERBOSE))
