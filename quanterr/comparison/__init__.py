"""The comparison of checkpoints; run.py has its steps."""

from typing import Unpack

from quanterr.checkpoints import Checkpoint
from quanterr.comparison.run import Path, compare_each
from quanterr.documents.comparison.model import Report
from quanterr.gates import prepare
from quanterr.options import CompareKeywords, CompareOptions
from quanterr.options.keywords import accept_fields_of

__all__ = ["Path", "compare", "compare_each"]


@accept_fields_of(CompareOptions)
def compare(original: Path | Checkpoint, quantized: Path | Checkpoint, **options: Unpack[CompareKeywords]) -> Report:
    """Measure how far a quantized checkpoint is from its original, layer by layer.

    Args:
        original: a file, a folder, an index, a cached ``org/name``, or an open checkpoint.
        quantized: the same.
        options: the fields of :class:`quanterr.CompareOptions`, by name. Rules (``require=["snr_db >= 28"]``) decide
            the verdict.

    Tensors that cannot be compared are in ``report.not_compared`` and make the verdict ``inconclusive``.

    Raises:
        UsageError: a pattern matches nothing, no layer is left, the device is unknown, or a rule is invalid.
        CheckpointError: an input is missing, damaged, or changes while it is read.
        ResourceError: the device is not available, or memory runs out.
    """
    chosen = CompareOptions(**options)
    rules = prepare(chosen)
    return rules.judge(compare_each(original, [quantized], chosen)[0])
