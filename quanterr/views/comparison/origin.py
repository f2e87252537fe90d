"""What a reader sees of the classes of tensors: ``--every-code``."""

from collections.abc import Iterator, Sequence

from quanterr.documents.comparison.model import Report
from quanterr.documents.comparison.origin import NOT_SHOWN, TensorOrigin, sum_classes
from quanterr.outputs.sections import CARD, PAGE, VERBOSE, CellColumn, Column, LayerName, Section, Table, fill
from quanterr.util.text import count

LISTED = 200  # rows of tensors of which nothing is shown
NONE = "-"
COLUMNS: Sequence[CellColumn[TensorOrigin]] = (
    (Column("elements", 1), lambda tensor: f"{tensor.off_codes:,}" if tensor.off_codes else NONE),
    (Column("rows", 3), lambda tensor: f"{tensor.off_rows:,}" if tensor.off_rows else NONE),
    (Column("first place", 1, right=False), lambda tensor: _find_place(tensor) or NONE),
    (Column("reason", 0, right=False), lambda tensor: tensor.reason or NONE),
)


def describe_origin(report: Report) -> Iterator[str]:
    """Yield how many tensors are of each class, and the first of which nothing is shown."""
    if not report.settings.every_code or not report.origin:
        return
    sizes = sum_classes(report.origin)
    parts = [f"{size.tensors:,} {origin_class.replace('_', ' ')}" for origin_class, size in sizes.items()]
    yield f"every code of {count(len(report.origin), 'tensor')}: {', '.join(parts)}"
    for tensor in [tensor for tensor in report.origin if tensor.kind == NOT_SHOWN][:1]:
        yield f"not shown: {_describe(tensor)}"


def _describe(tensor: TensorOrigin) -> str:
    place = _find_place(tensor)
    where = f": the first at {place}" if place else ""
    amount = f", {count(tensor.off_codes, 'element')} in {count(tensor.off_rows, 'row')}" if tensor.off_codes else ""
    return f"{tensor.display_name}: {tensor.reason}{amount}{where}"


def _find_place(tensor: TensorOrigin) -> str:
    """Return the place of the first element that is not as expected; empty if there is none."""
    places = tensor.places or tensor.unlike_places
    return f"row {places[0][0]:,}, column {places[0][1]:,}" if places else ""


def make_origin_section(report: Report) -> Iterator[Section]:
    """Yield the table of tensors of which nothing is shown, if there are any."""
    lost = [tensor for tensor in report.origin if tensor.kind == NOT_SHOWN]
    if lost:
        rows = ((LayerName(tensor.layer_name), tensor) for tensor in lost[:LISTED])
        title = f"Not shown to be the original, rounded: {count(len(lost), 'tensor')}"
        table = Table(title, "tensor", *fill(COLUMNS, rows), len(lost) - min(len(lost), LISTED))
        yield Section("origin", title, [table], (PAGE, CARD, VERBOSE))
