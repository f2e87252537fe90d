"""Compares checkpoints; the steps of a comparison are in run.py."""

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from quanterr.checkpoints import Checkpoint
from quanterr.comparison.inputs import Path
from quanterr.comparison.run import compare_each
from quanterr.documents.comparison.model import Report
from quanterr.documents.gate_results import Reason, list_reasons, store_reasons
from quanterr.documents.plan.model import Plan
from quanterr.errors import UnjudgedError, UsageError
from quanterr.findings.runtimes.judging import add_compared, choose_runtimes, find_refusals
from quanterr.gates import PreparedRules, prepare
from quanterr.gates.plan_check import check_against_plan
from quanterr.inspection import inspect
from quanterr.options import CompareOptions, LoadingOptions
from quanterr.options.keywords import accept_fields_of
from quanterr.tensors.in_memory import Side, hold_all

__all__ = ["Path", "compare", "compare_each", "compare_pair", "judge_loading"]


@accept_fields_of(CompareOptions)
def compare(original: Side, quantized: Side, **options: Any) -> Report:
    """Measure how far a quantized checkpoint is from its original, layer by layer.

    Args:
        original: a file, a folder, an index, a cached ``org/name``, an open checkpoint, a state dict or a model in
            memory.
        quantized: the same.

    Rules (``require=["snr_db >= 28"]``) decide the verdict. Tensors that cannot be compared are in
    ``report.not_compared`` and make the verdict ``inconclusive``.

    Raises:
        UsageError: a pattern matches nothing, no layer is left, the device is unknown, or a rule is invalid.
        UnjudgedError: the rules cannot judge the report. The error keeps the report as its ``document``.
        CheckpointError: an input is missing, damaged, or changes while it is read.
        ResourceError: the device is not available, or memory runs out.
    """
    chosen = CompareOptions(**options)
    rules = prepare(chosen)
    choose_runtimes([*chosen.runtimes, *rules.runtimes])
    before, after = hold_all([original, quantized])
    return compare_pair(before, after, chosen, rules)


def compare_pair(
    original: Path | Checkpoint,
    quantized: Path | Checkpoint,
    options: CompareOptions,
    rules: PreparedRules,
    plan: Plan | None = None,
) -> Report:
    """Compare as :func:`compare` does, with prepared rules; each layer must match ``plan`` if it is given."""
    report = compare_each(original, [quantized], options, every_code=options.every_code)[0]
    report = judge_loading(report, quantized, options, rules.runtimes, options.lenient)
    try:
        judged = rules.judge(report)
        return judged if plan is None else check_against_plan(judged, plan)
    except UsageError as error:
        raise UnjudgedError(str(error), _add_reasons(report, [Reason(f"not judged: {error}", "rules")])) from error


def judge_loading(
    report: Report, quantized: Path | Checkpoint, asked: LoadingOptions, of_rules: Sequence[str], lenient: bool
) -> Report:
    """Add whether runtimes load the quantized side: those of ``--for``, and those of rules (``of_rules``).

    The verdict is inconclusive if a runtime of ``--for`` does not load it. ``--for all`` only asks for a table, so that
    no runtime has to.
    """
    runtimes = [*asked.runtimes, *of_rules]
    if not runtimes:
        return report
    alone = inspect(quantized, runtimes=runtimes, devices=asked.devices, lenient=lenient).loading
    report = replace(report, loading=add_compared(alone, report.findings))
    refusals = find_refusals(asked.runtimes, report.loading)
    return _add_reasons(report, [Reason(text, "result") for text in refusals]) if refusals else report


def _add_reasons(report: Report, reasons: list[Reason]) -> Report:
    """Return the report with an inconclusive verdict and these reasons before its former ones."""
    before = list_reasons(report) if report.verdict == "inconclusive" else []
    return replace(report, verdict="inconclusive", **store_reasons([*reasons, *before]))
