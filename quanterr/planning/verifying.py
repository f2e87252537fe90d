"""Plans that are measured: evaluated on the fly, and made again until a limit of the divergence holds."""

from collections.abc import Callable

from quanterr.checkpoints import Checkpoint
from quanterr.errors import UsageError
from quanterr.evaluation import evaluate_candidates
from quanterr.gates import prepare
from quanterr.options import EvaluateOptions, PlanOptions
from quanterr.report.documents import KINDS
from quanterr.report.evaluation import SCHEMA
from quanterr.report.plan.model import Measurement, Plan
from quanterr.util.text import size

ROUNDS = 6
CLOSE = 0.97  # of a limit that is used so far


def measure(plan: Plan, original: Checkpoint, chosen: PlanOptions) -> Measurement:
    """Evaluate the plan on the text of ``chosen``, quantized on the fly.

    Raises:
        UsageError: too little text, or one that says nothing; a model that predicts no tokens; transformers is missing.
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
    found = evaluate_candidates(original, [], [plan], options, prepare(options, KINDS[SCHEMA]))
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
    """The smallest plan that was found whose measured divergence is no larger than ``limit`` [nat].

    ``make`` gives the smallest plan of a predicted divergence. What is off in a prediction is nearly the same for plans
    of about the same size, so each is made with what was learned of the one before.

    Raises:
        UsageError: none was found.
    """
    plan, best, why = make(limit), None, ""
    for _ in range(ROUNDS):
        found = measure(plan, original, chosen)
        kept = found.kld <= limit
        if kept and (best is None or plan.bytes < best.bytes):
            best = plan.model_copy(update={"measured": found})
        why = f"a plan of {size(plan.bytes)} measured {found.kld:.4g} nat"
        if not found.kld or CLOSE * limit <= found.kld <= limit:
            break
        after = make(plan.cost * limit / found.kld * (1.0 if kept else CLOSE))
        if after.bytes == plan.bytes:
            break
        plan = after
    if best is None:
        raise UsageError(f"--max-kld {limit:g}: cannot be kept; {why}")
    return best
