"""Measure how far a quantized checkpoint is from its original, layer by layer.

>>> import quanterr
>>> report = quanterr.compare("orig.safetensors", "quant.safetensors")  # doctest: +SKIP
>>> report.aggregate.overall_snr_db  # doctest: +SKIP
31.48

Importing this module loads nothing else: public names are imported when first used, so that ``quanterr --help`` does
not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from quanterr.version import __version__ as __version__

if TYPE_CHECKING:
    from quanterr.checkpoints import open_checkpoint
    from quanterr.comparison import compare
    from quanterr.comparison.measure import measure
    from quanterr.comparison.ranking import rank, sweep
    from quanterr.dequantization.run import dequantize
    from quanterr.differences.making import diff
    from quanterr.documents.comparison.layer import METRICS
    from quanterr.documents.comparison.model import Report
    from quanterr.documents.kinds import read_document
    from quanterr.documents.reading import read_report
    from quanterr.errors import CheckpointError, QuanterrError, UsageError
    from quanterr.evaluation.images import compare_images
    from quanterr.evaluation.run import evaluate
    from quanterr.formats import FORMATS
    from quanterr.gates import judge
    from quanterr.inspection import inspect
    from quanterr.metrics import theoretical_sqnr
    from quanterr.options import CompareOptions, EvaluateOptions
    from quanterr.planning.run import plan
    from quanterr.recipes.tensors import (
        calibrate,
        error_within_bounds,
        fake_quantize,
        quantize_tensor,
        theoretical_max_error,
    )


_HOMES = {
    "CompareOptions": "quanterr.options",
    "compare": "quanterr.comparison",
    "compare_images": "quanterr.evaluation.images",
    "dequantize": "quanterr.dequantization.run",
    "diff": "quanterr.differences.making",
    "evaluate": "quanterr.evaluation.run",
    "inspect": "quanterr.inspection",
    "open_checkpoint": "quanterr.checkpoints",
    "judge": "quanterr.gates",
    "measure": "quanterr.comparison.measure",
    "plan": "quanterr.planning.run",
    "rank": "quanterr.comparison.ranking",
    "sweep": "quanterr.comparison.ranking",
    "calibrate": "quanterr.recipes.tensors",
    "error_within_bounds": "quanterr.recipes.tensors",
    "fake_quantize": "quanterr.recipes.tensors",
    "quantize_tensor": "quanterr.recipes.tensors",
    "theoretical_max_error": "quanterr.recipes.tensors",
    "read_report": "quanterr.documents.reading",
    "theoretical_sqnr": "quanterr.metrics",
    "Report": "quanterr.documents.comparison.model",
    "FORMATS": "quanterr.formats",
    "METRICS": "quanterr.documents.comparison.layer",
    "CheckpointError": "quanterr.errors",
    "QuanterrError": "quanterr.errors",
    "UsageError": "quanterr.errors",
    "EvaluateOptions": "quanterr.options",
    "read_document": "quanterr.documents.kinds",
}

__all__ = [
    "FORMATS",
    "METRICS",
    "CheckpointError",
    "CompareOptions",
    "EvaluateOptions",
    "QuanterrError",
    "Report",
    "UsageError",
    "calibrate",
    "compare",
    "compare_images",
    "dequantize",
    "diff",
    "error_within_bounds",
    "evaluate",
    "fake_quantize",
    "inspect",
    "judge",
    "measure",
    "open_checkpoint",
    "plan",
    "quantize_tensor",
    "rank",
    "read_document",
    "read_report",
    "sweep",
    "theoretical_max_error",
    "theoretical_sqnr",
]


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


def __getattr__(name: str) -> object:
    """Import a public name from its module at first use."""
    if name not in _HOMES:
        raise AttributeError(f"module 'quanterr' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
