"""A gate that checks a checkpoint against the plan that it was made from, layer by layer."""

from collections.abc import Iterator
from math import sqrt

from msgspec.structs import replace

from quanterr.documents.comparison.layer import Layer, LosslessLayer
from quanterr.documents.comparison.model import Report
from quanterr.documents.comparison.same_original import find_other_tensor
from quanterr.documents.gate_results import Gate, Reason, Violation, store_reasons
from quanterr.documents.plan.model import ORIGINAL, Plan, PlannedLayer
from quanterr.errors import UsageError
from quanterr.util.text import count, display

CONDITION = "as planned: format, bits, SNR; the rest unchanged"
TOLERANCE_DB = 0.5  # maximum number of dB below the predicted SNR
# The tolerance for 8-bit integers. If a program divides by the scale in BF16, this rounds codes of 64 and more to
# halves. That adds (1/2)² / 12 to an error of 1² / 12, which is 0.97 dB if all codes are so large.
INT8_TOLERANCE_DB = 1.0
BITS_TOLERANCE = 0.05  # relative difference of bits per weight, as scales may be stored in another dtype

FLOAT16 = "torch.float16"

# Float dtype → maximum relative error of a cast of normal numbers, and half of the smallest subnormal number.
CASTS = {
    "torch.float32": (2.0**-24, 2.0**-150),
    "torch.bfloat16": (2.0**-8, 2.0**-134),
    FLOAT16: (2.0**-11, 2.0**-25),
}

# Formats that store the same codes and scales in different tensors: integers with a scale per row, integers in groups.
INTEGER_FORMATS = (
    frozenset({"int8_row", "ct_int", "bnb_int8", "torchao_int8"}),
    frozenset(
        {
            *("ct_pack", "gptq", "gptq_v2", "gptq_p", "gptq_marlin", "ct_int", "mlx_affine", "modelopt_int4", "hqq"),
            *("awq_gemm", "awq_gemv", "awq_gemv_fast", "awq_marlin", "quark_int4", "torchao_int4", "torchao_intx"),
            *("sdnq", "quanto_int4", "quanto_int2", "quanto_int8"),
        }
    ),
)
INT8_BY_ROWS = "int8_channel"  # a recipe in a format with groups, which stores the same as int8_row
INT8_FORMATS = frozenset({"int8_tensor", "int8_block"})
EQUIVALENT_FORMATS = (
    frozenset({"ct_nvfp4", "nvfp4", "nvfp4_experts", "gguf_nvfp4", "torchao_nvfp4", "mlx_nvfp4"}),
    frozenset({"ct_mxfp4", "mxfp4", "gpt_oss_mxfp4", "gguf_mxfp4", "mlx_mxfp4"}),
    frozenset({"mxfp8", "mlx_mxfp8", "torchao_mx"}),
    frozenset({"fp8_row", "torchao_fp8"}),
    *INTEGER_FORMATS,
)


def check_against_plan(report: Report, plan: Plan) -> Report:
    """Return the report with one more gate, which holds if planned layers are as planned, and others unchanged.

    Raises:
        UsageError: none of the planned layers was compared, or one belongs to another original.
    """
    actual: dict[str, Layer | LosslessLayer] = {}
    for layers in (report.layers, report.other_changes, report.lossless):
        actual |= {layer.layer_name: layer for layer in layers}
    if actual.keys().isdisjoint(layer.layer_name for layer in plan.layers):
        raise UsageError("--plan: names none of the compared layers; the plan was made for another original")
    compared = [actual[layer.layer_name] for layer in plan.layers if layer.layer_name in actual]
    if why := find_other_tensor(plan.layers, compared):
        raise UsageError(f"--plan: the plan was made for another original: {why}; plan again from this one")
    violations = [
        violation for layer in plan.layers for violation in _find_violations(layer, actual.get(layer.layer_name))
    ]
    violations += _find_unplanned_changes(report, plan)
    violations.sort(key=lambda violation: violation.margin if violation.margin is not None else float("-inf"))
    gate = _make_gate(violations, len(plan.layers))
    if report.verdict == "inconclusive":
        return replace(report, gates=[*report.gates, gate], gated=True)
    failed = [
        Reason(failed_gate.message, "gate")
        for failed_gate in (*report.gates, gate)
        if failed_gate.status == "fail" and failed_gate.severity == "error"
    ]
    reasons = store_reasons(failed or [Reason(f"everything selected was compared; {gate.message}", "result")])
    verdict = "fail" if failed else "pass"
    return replace(report, gates=[*report.gates, gate], gated=True, verdict=verdict, **reasons)


def _find_unplanned_changes(report: Report, plan: Plan) -> Iterator[Violation]:
    """Find layers outside the plan that changed by more than casts, absorbed scales or corrected biases explain."""
    expected = {layer.layer_name for layer in plan.layers}
    harmless = [finding for finding in report.findings if finding.severity == "info"]
    folded = [finding for finding in harmless if finding.code == "folded_scales"]
    expected |= {name for finding in folded for name in (finding.layer, *finding.evidence.get("sources", ()))}
    corrected = [finding for finding in harmless if finding.code == "bias_corrected"]
    expected |= {name for finding in corrected for name in finding.evidence["layers"]}
    for layer in (*report.layers, *report.other_changes):
        if layer.layer_name not in expected and not _is_cast(layer):
            snr = "" if layer.snr_db is None else f" ({layer.snr_db:.2f} dB)"
            yield Violation(layer.layer_name, None, None, f"is not in the plan, but was changed{snr}")


def _is_cast(layer: Layer) -> bool:
    """Return True if the errors are no larger than a cast to the stored dtype would cause."""
    if layer.quantized_dtype not in CASTS or layer.quantized_dtype == layer.original_dtype or not layer.finite:
        return False
    relative, subnormal = CASTS[layer.quantized_dtype]
    if layer.error_norm is None or layer.original_norm is None:
        return False
    if layer.error_norm > relative * layer.original_norm + subnormal * sqrt(layer.tensor_elements):
        return False
    may_be_subnormal = layer.quantized_dtype == FLOAT16  # relative errors of subnormals have no limit
    return may_be_subnormal or layer.max_relative_error is None or bool(layer.max_relative_error <= relative)


def _find_violations(planned: PlannedLayer, actual: Layer | LosslessLayer | None) -> Iterator[Violation]:
    name = planned.layer_name
    if actual is None:
        yield Violation(name, None, None, "was planned but not compared: is it missing, or excluded by -l?")
        return
    found_format = actual.format
    wanted = {planned.format, "int8_row"} if planned.recipe == INT8_BY_ROWS else {planned.format}
    if found_format not in wanted and not any(found_format in same and wanted & same for same in EQUIVALENT_FORMATS):
        expected = "the original's" if planned.recipe == ORIGINAL else planned.format
        yield Violation(name, None, None, f"is {found_format}, planned {expected} ({planned.recipe})")
        return
    bits = actual.bits_per_weight
    if bits is not None and abs(bits - planned.bits_per_weight) > BITS_TOLERANCE * planned.bits_per_weight:
        yield Violation(name, None, None, f"has {bits:.4g} bits per weight, planned {planned.bits_per_weight:.4g}")
        return
    snr = getattr(actual, "snr_db", None)
    if planned.snr_db is None or snr is None:
        return
    is_int8 = planned.bits_per_weight >= 8 and any(
        planned.format in formats for formats in (*INTEGER_FORMATS, INT8_FORMATS)
    )
    margin = snr - (planned.snr_db - (INT8_TOLERANCE_DB if is_int8 else TOLERANCE_DB))
    if margin < 0:
        yield Violation(name, None, margin, f"has {snr:.2f} dB, planned {planned.snr_db:.2f}")


def _make_gate(violations: list[Violation], n: int) -> Gate:
    worst = violations[0] if violations else Violation(None, None, None, None)
    result = f"holds: {count(n, 'layer')}"
    if violations:
        where = f"{count(len(violations), 'layer')} (planned: {n:,}), the worst {display(worst.layer or '')}"
        result = f"does not hold: {where}: {worst.reason}"
    return Gate(
        id="plan",
        require=CONDITION,
        layers=[],
        severity="error",
        reason=None,
        status="fail" if violations else "pass",
        judged=n,
        identical=0,
        skipped=0,
        observed=worst.observed,
        limit=TOLERANCE_DB,
        margin=worst.margin,
        worst_layer=worst.layer,
        message=f"gate {CONDITION} {result}",
        violations=violations,
    )
