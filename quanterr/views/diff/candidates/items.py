"""Changed items of each kind of document with candidates, in the words and columns of diffs."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from quanterr.documents.diff.candidates.model import RecipeChange, StoredChange
from quanterr.outputs.formatting import format_if_known, format_percent, format_size_change
from quanterr.outputs.sections import CellColumn, Column

ABOUT = (
    "From two stored results. ± is a standard error as if both had read different tokens. Within chance: the change is "
    "no larger than different tokens would cause."
)


class ItemWords(NamedTuple):
    """How a diff shows the changed items of a kind of document."""

    worse: str  # "12 layers …" above the items that are worse, and those that are better
    better: str
    columns: Sequence[CellColumn[Any]]
    ends: Callable[[Any], tuple[object, object, object]]  # the old value, the new one and the change, for CSV
    about: str = ABOUT


def _format_bytes(one: RecipeChange | StoredChange) -> str:
    return format_size_change(one.new_bytes - one.old_bytes)


ITEM_WORDS: Mapping[str, ItemWords] = {
    "evaluation": ItemWords(
        "with worse output",
        "with better output",
        columns=(
            (Column("old output error", 1), lambda one: format_percent(one.old_output_error)),
            (Column("new output error", 2), lambda one: format_percent(one.new_output_error)),
            (Column("ratio", 0), lambda one: "-" if one.ratio is None else f"× {one.ratio:.3g}"),
        ),
        ends=lambda one: (one.old_output_error, one.new_output_error, one.new_output_error - one.old_output_error),
    ),
    "ranking": ItemWords(
        "worse",
        "better",
        columns=(
            (Column("old dB", 1), lambda one: format_if_known(one.old_snr_db, otherwise="exact")),
            (Column("new dB", 2), lambda one: format_if_known(one.new_snr_db, otherwise="exact")),
            (Column("change dB", 0), lambda one: format_if_known(one.change_db, "+.4g")),
        ),
        ends=lambda one: (one.old_snr_db, one.new_snr_db, one.change_db),
        about="From two stored rankings. A positive change of SNR is better. Weight error is not task accuracy.",
    ),
    "plan": ItemWords(
        "changed, at more cost",
        "changed, at no more cost",
        columns=(
            (Column("old recipe", 0, right=False), lambda one: one.old_recipe),
            (Column("new recipe", 1, right=False), lambda one: one.new_recipe),
            (Column("bytes", 3), _format_bytes),
            (Column("cost", 2), lambda one: f"{one.new_cost - one.old_cost:+.3g}"),
        ),
        ends=lambda one: (one.old_recipe, one.new_recipe, one.new_bytes - one.old_bytes),
        about="From two stored plans. Costs are predicted, in the same measure for both.",
    ),
    "inspection": ItemWords(
        "changed, with more bytes",
        "changed, with no more bytes",
        columns=(
            (Column("old format", 0, right=False), lambda one: one.old_format or "unread"),
            (Column("new format", 1, right=False), lambda one: one.new_format or "unread"),
            (Column("bytes", 2), _format_bytes),
        ),
        ends=lambda one: (one.old_format, one.new_format, one.new_bytes - one.old_bytes),
        about="From two stored inspections: formats and sizes, no values.",
    ),
    "images": ItemWords(
        "further from the original",
        "nearer to it",
        columns=(
            (Column("old SSIM", 1), lambda one: f"{one.old_ssim:.4g}"),
            (Column("new SSIM", 2), lambda one: f"{one.new_ssim:.4g}"),
            (Column("change", 0), lambda one: f"{one.change:+.3g}"),
        ),
        ends=lambda one: (one.old_ssim, one.new_ssim, one.change),
        about="From two stored results. ± is a standard error as if both had compared different images.",
    ),
}
