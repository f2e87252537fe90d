"""Verification of plans: they are evaluated on the fly, and planned again until the divergence is within a limit."""

from collections.abc import Callable

from msgspec.structs import replace

from quanterr.checkpoints import Checkpoint
from quanterr.documents.kinds import KINDS
from quanterr.documents.plan.model import Measurement, Plan
from quanterr.errors import UsageError
from quanterr.evaluation.run import evaluate_candidates
from quanterr.gates import prepare
from quanterr.options import EvaluateOptions, PlanOptions
from quanterr.util.text import size

MAX_ROUNDS = 6
MIN_LIMIT_SHARE = 0.97  # a plan with at least this share of the allowed divergence is close enough


def measure(plan: Plan, original: Checkpoint, chosen: PlanOptions) -> Measurement:
    """Evaluate the original, quantized on the fly as planned, on the text of ``chosen``.

    Raises:
        UsageError: there is too little text, or its result is inconclusive; the model does not predict tokens;
            transformers is missing.
    """
    options = EvaluateOptions(
        text=() if chosen.text is None else [chosen.text],
        context=chosen.context,
        chunks=chosen.chunks,
        device=chosen.device,
        lenient=chosen.lenient,
        cache=chosen.cache,
        stop=chosen.stop,
    )
    evaluation = evaluate_candidates(original, [], [plan], options, prepare(options, KINDS["quanterr.evaluation"]))
    [candidate] = evaluation.candidates
    if candidate.scores is None or candidate.verdict == "inconclusive":
        raise UsageError(f"--measure: {'; '.join(candidate.reasons)}")
    return Measurement(
        kld=candidate.scores.kld_mean,
        kld_se=candidate.scores.kld_error,
        ppl_ratio=candidate.scores.ppl_ratio,
        source=evaluation.tokens.source,
        sha256=evaluation.tokens.sha256,
        context=evaluation.tokens.context,
        chunks=evaluation.tokens.chunks,
    )


def keep_limit(limit: float, make: Callable[[float], Plan], original: Checkpoint, chosen: PlanOptions) -> Plan:
    """Return the smallest plan that was found with a measured divergence of at most ``limit`` [nat].

    The error of the prediction is nearly the same for plans of about the same size, so the measurement of each plan
    corrects the prediction for the next one.

    Args:
        limit: maximum divergence.
        make: returns the smallest plan whose predicted divergence is within a limit.
        original: the checkpoint.
        chosen: the options.

    Raises:
        UsageError: no plan within the limit was found.
    """
    plan, best, why = make(limit), None, ""
    for _ in range(MAX_ROUNDS):
        measured = measure(plan, original, chosen)
        kept = measured.kld <= limit
        if kept and (best is None or plan.bytes < best.bytes):
            best = replace(plan, measured=measured)
        why = f"a plan of {size(plan.bytes)} has a measured KLD of {measured.kld:.4g} nat"
        if not measured.kld or MIN_LIMIT_SHARE * limit <= measured.kld <= limit:
            break
        after = make(plan.cost * limit / measured.kld * (1.0 if kept else MIN_LIMIT_SHARE))
        if after.bytes == plan.bytes:
            break
        plan = after
    if best is None:
        raise UsageError(f"--max-kld {limit:g}: cannot be met; {why}")
    return best
