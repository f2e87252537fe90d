"""Verification of plans: evaluate them on the fly, and plan again until the divergence is within a limit."""

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

ROUNDS = 6
CLOSE = 0.97  # share of the limit above which a plan is close enough


def measure(plan: Plan, original: Checkpoint, chosen: PlanOptions) -> Measurement:
    """Evaluate the plan, quantized on the fly, on the text of ``chosen``.

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
    found = evaluate_candidates(original, [], [plan], options, prepare(options, KINDS["quanterr.evaluation"]))
    [candidate] = found.candidates
    if candidate.scores is None or candidate.verdict == "inconclusive":
        raise UsageError(f"--verify: {'; '.join(candidate.reasons)}")
    return Measurement(
        kld=candidate.scores.kld_mean,
        kld_se=candidate.scores.kld_error,
        ppl_ratio=candidate.scores.ppl_ratio,
        source=found.tokens.source,
        sha256=found.tokens.sha256,
        context=found.tokens.context,
        chunks=found.tokens.chunks,
    )


def keep_limit(limit: float, make: Callable[[float], Plan], original: Checkpoint, chosen: PlanOptions) -> Plan:
    """Return the smallest plan found whose measured divergence is at most ``limit`` [nat].

    The error of the prediction is nearly the same for plans of about the same size, so the measurement of each plan
    corrects the prediction for the next one.

    Args:
        limit: the largest divergence.
        make: returns the smallest plan whose predicted divergence is within a limit.
        original: the checkpoint.
        chosen: the options.

    Raises:
        UsageError: no plan within the limit was found.
    """
    plan, best, why = make(limit), None, ""
    for _ in range(ROUNDS):
        found = measure(plan, original, chosen)
        kept = found.kld <= limit
        if kept and (best is None or plan.bytes < best.bytes):
            best = replace(plan, measured=found)
        why = f"a plan of {size(plan.bytes)} has a measured KLD of {found.kld:.4g} nat"
        if not found.kld or CLOSE * limit <= found.kld <= limit:
            break
        after = make(plan.cost * limit / found.kld * (1.0 if kept else CLOSE))
        if after.bytes == plan.bytes:
            break
        plan = after
    if best is None:
        raise UsageError(f"--max-kld {limit:g}: cannot be met; {why}")
    return best
