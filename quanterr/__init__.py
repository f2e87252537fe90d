"""Measure how far a quantized checkpoint is from its original, layer by layer.

>>> import quanterr
>>> report = quanterr.compare("orig.safetensors", "quant.safetensors")  # doctest: +SKIP
>>> report.aggregate.overall_snr_db  # doctest: +SKIP
31.48

Importing this module loads nothing else: public names are imported when first used, so that ``quanterr --help`` does
not wait for torch. Editors and type checkers read ``__init__.pyi``, which ``tests/make_stub.py`` writes.
"""

from importlib import import_module
from types import FunctionType

from quanterr.version import __version__ as __version__

_HOMES = {
    "FORMATS": "quanterr.formats",
    "METRICS": "quanterr.documents.comparison.layer",
    "CandidateDiff": "quanterr.documents.diff.candidates.model",
    "Checkpoint": "quanterr.checkpoints",
    "CheckpointError": "quanterr.errors",
    "CompareOptions": "quanterr.options",
    "Dequantized": "quanterr.dequantization.run",
    "Diff": "quanterr.documents.diff.reports.model",
    "EvaluateOptions": "quanterr.options",
    "Evaluation": "quanterr.documents.evaluation.model",
    "Images": "quanterr.documents.images.model",
    "Inspection": "quanterr.documents.inspection.model",
    "Interrupted": "quanterr.errors",
    "Plan": "quanterr.documents.plan.model",
    "QuanterrError": "quanterr.errors",
    "Ranking": "quanterr.documents.ranking.model",
    "Report": "quanterr.documents.comparison.model",
    "ReportError": "quanterr.errors",
    "ResourceError": "quanterr.errors",
    "UnjudgedError": "quanterr.errors",
    "UsageError": "quanterr.errors",
    "calibrate": "quanterr.recipes.tensors",
    "compare": "quanterr.comparison",
    "compare_images": "quanterr.evaluation.images",
    "dequantize": "quanterr.dequantization.run",
    "diff": "quanterr.differences.making",
    "error_within_bounds": "quanterr.recipes.tensors",
    "evaluate": "quanterr.evaluation.run",
    "fake_quantize": "quanterr.recipes.tensors",
    "inspect": "quanterr.inspection",
    "iterate_pairs": "quanterr.comparison.pairs",
    "judge": "quanterr.gates",
    "measure": "quanterr.comparison.measure",
    "open_checkpoint": "quanterr.checkpoints",
    "plan": "quanterr.planning.run",
    "quantize_tensor": "quanterr.recipes.tensors",
    "rank": "quanterr.comparison.ranking",
    "read_document": "quanterr.documents.kinds",
    "read_report": "quanterr.documents.reading",
    "sweep": "quanterr.comparison.ranking",
    "theoretical_max_error": "quanterr.recipes.tensors",
    "theoretical_sqnr": "quanterr.metrics",
}

__all__ = list(_HOMES)


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


def __getattr__(name: str) -> object:
    """Import a public name from its module at first use; functions check the types of their arguments."""
    if name not in _HOMES:
        raise AttributeError(f"module 'quanterr' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    if type(value) is FunctionType and not hasattr(value, "options"):  # options are checked already
        from quanterr.util.arguments import public

        value = public(value)
        value.__module__ = __name__  # pickle finds it here
    globals()[name] = value
    return value
