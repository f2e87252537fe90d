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


def measured(plan: Plan, original: Checkpoint, chosen: PlanOptions) -> Plan:
    """The plan with the divergence that it really makes, on the text of ``chosen``.

    Raises:
        UsageError: too little text, or one that says nothing; a model that predicts no tokens; transformers is missing.
    """
    options = EvaluateOptions(
        text=chosen.text,
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
    on = Measurement(
        kld=candidate.scores.kld_mean,
        kld_se=candidate.scores.kld_error,
        ppl_ratio=candidate.scores.ppl_ratio,
        source=found.tokens.source,
        sha256=found.tokens.sha256,
        context=found.tokens.context,
        chunks=found.tokens.chunks,
    )
    return plan.model_copy(update={"measured": on})


def within(limit: float, make: Callable[[float], Plan], original: Checkpoint, chosen: PlanOptions) -> Plan:
    """The smallest plan whose measured divergence is no larger than ``limit`` [nat].

    ``make`` gives the smallest plan of a predicted divergence. What is off in a prediction is nearly the same for plans
    of about the same size, so each is made with what was learned of the one before.

    Raises:
        UsageError: none was found.
    """
    best: Plan | None = None
    predicted, last = limit, None
    for _ in range(ROUNDS):
        plan = make(predicted)
        if last is not None and plan.bytes == last.bytes:
            break
        last = measured(plan, original, chosen)
        assert last.measured is not None  # noqa: S101 - measured() says it
        kld = last.measured.kld
        if kld <= limit and (best is None or last.bytes < best.bytes):
            best = last
        if CLOSE * limit <= kld <= limit or not kld:
            break
        predicted = plan.cost * limit / kld * (1.0 if kld <= limit else CLOSE)
    if best is None:
        assert last is not None  # noqa: S101 - there was a round
        assert last.measured is not None  # noqa: S101
        raise UsageError(
            f"--max-kld {limit:g}: cannot be kept; a plan of {size(last.bytes)} measured {last.measured.kld:.4g} nat"
        )
    return best
