"""Whether a checkpoint is what was planned, layer by layer: one gate."""

from collections.abc import Iterator

from quanterr.errors import UsageError
from quanterr.report.gate_results import Gate, Violation
from quanterr.report.model import Report
from quanterr.report.plan.model import ORIGINAL, SCHEMA, SCHEMA_VERSION, Plan, PlannedLayer
from quanterr.report.stored import read_stored
from quanterr.util.text import count, display

REQUIRE = "as planned: format, bits, SNR"
TOLERANCE = 0.5  # dB below the prediction
BITS = 0.05  # of the planned bits: scales may be stored in another dtype

# Formats that store the same codes and scales in other tensors.
SAME = (
    frozenset({"ct_nvfp4", "nvfp4", "nvfp4_experts", "gguf_nvfp4", "torchao_nvfp4", "mlx_nvfp4"}),
    frozenset({"ct_mxfp4", "mxfp4", "gpt_oss_mxfp4", "gguf_mxfp4", "mlx_mxfp4"}),
    frozenset({"mxfp8", "mlx_mxfp8", "torchao_mx"}),
    frozenset({"fp8_row", "torchao_fp8"}),
    frozenset({"int8_row", "ct_int", "bnb_int8", "torchao_int8"}),
    frozenset(
        {
            *("ct_pack", "gptq", "gptq_v2", "gptq_p", "gptq_marlin", "ct_int", "mlx_affine", "modelopt_int4", "hqq"),
            *("awq_gemm", "awq_gemv", "awq_gemv_fast", "awq_marlin", "quark_int4", "torchao_int4", "torchao_intx"),
            *("sdnq", "quanto_int4", "quanto_int2", "quanto_int8"),
        }
    ),
)


def read_plan(path: str) -> Plan:
    """A plan that ``quanterr plan`` wrote.

    Raises:
        ReportError: it is none.
    """
    return read_stored(path, Plan, SCHEMA, SCHEMA_VERSION)


def judged_by_plan(report: Report, plan: Plan) -> Report:
    """The report with one more gate: whether each planned layer that was selected is as planned.

    Raises:
        UsageError: none of the planned layers was compared.
    """
    actual = {layer.layer_name: layer for layer in (*report.layers, *report.lossless)}
    planned = [layer for layer in plan.layers if layer.layer_name in actual]
    if not planned:
        raise UsageError("--plan: names none of the compared layers; it is of another original")
    found = [violation for layer in planned for violation in _violations(layer, actual[layer.layer_name])]
    found.sort(key=lambda violation: violation.margin if violation.margin is not None else float("-inf"))
    gate = _gate(found, len(planned))
    if report.verdict == "inconclusive":
        return report.model_copy(update={"gates": [*report.gates, gate]})
    failed = [one.message for one in (*report.gates, gate) if one.status == "fail" and one.severity == "error"]
    reasons = failed or [f"everything selected was compared; {gate.message}"]
    return report.model_copy(
        update={"gates": [*report.gates, gate], "verdict": "fail" if failed else "pass", "reasons": reasons}
    )


def _violations(planned: PlannedLayer, actual: object) -> Iterator[Violation]:
    name, found_format = planned.layer_name, getattr(actual, "format", "")
    if not _alike(planned.format, found_format):
        expected = "the original's" if planned.recipe == ORIGINAL else planned.format
        yield Violation(name, None, None, f"is {found_format}, planned {expected} ({planned.recipe})")
        return
    bits = getattr(actual, "bits_per_weight", None)
    if bits is not None and abs(bits - planned.bits_per_weight) > BITS * planned.bits_per_weight:
        yield Violation(name, bits, None, f"has {bits:.4g} bits per weight, planned {planned.bits_per_weight:.4g}")
        return
    snr = getattr(actual, "snr_db", None)
    if planned.snr_db is not None and snr is not None and snr < planned.snr_db - TOLERANCE:
        margin = snr - (planned.snr_db - TOLERANCE)
        yield Violation(name, snr, margin, f"has {snr:.2f} dB, planned {planned.snr_db:.2f}")


def _alike(planned: str, found: str) -> bool:
    return planned == found or any({planned, found} <= same for same in SAME)


def _gate(violations: list[Violation], n: int) -> Gate:
    worst = violations[0] if violations else None
    message = f"gate {REQUIRE} holds: {count(n, 'layer')}"
    if worst is not None:
        message = (
            f"gate {REQUIRE} does not hold: {len(violations):,} of {count(n, 'layer')}, the worst "
            f"{display(worst.layer or '')}: {worst.reason}"
        )
    return Gate(
        id="plan",
        require=REQUIRE,
        layers=[],
        severity="error",
        reason=None,
        status="fail" if violations else "pass",
        judged=n,
        identical=0,
        skipped=0,
        observed=worst.observed if worst else None,
        limit=TOLERANCE,
        margin=worst.margin if worst else None,
        worst_layer=worst.layer if worst else None,
        message=message,
        violations=violations,
    )
