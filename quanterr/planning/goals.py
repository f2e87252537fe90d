"""Goals of plans, which are parsed from options and checked before any file is read."""

import os
from collections.abc import Mapping
from typing import Final, Literal, NamedTuple, cast

from quanterr.documents.plan.model import Measure
from quanterr.documents.sensitivity import COSTS, KLD, OUTPUT_ERROR, read_sensitivity
from quanterr.errors import UsageError
from quanterr.options import PlanOptions
from quanterr.util.amounts import parse_bytes
from quanterr.util.text import display, size

SQUARED: Final = "squared error"
WEIGHTED: Final = "weighted squared error"
METRICS: Mapping[str, str] = {cost.measure: cost.metric for cost in COSTS}  # measure → metric of reports
LIMITS: Mapping[str, tuple[str, str]] = {  # goal → its option, and the measure that it limits
    KLD.field: ("--max-kld", KLD.measure),
    OUTPUT_ERROR.field: ("--max-output-error", OUTPUT_ERROR.measure),
}


Kind = Literal["size", "bits", "kld", "output_error", "snr"]


class Goal(NamedTuple):
    """The goal of a plan: a budget of bytes, or a limit on the cost for which the smallest size is sought."""

    kind: Kind
    amount: float
    measure: Measure  # how the cost is measured

    @property
    def minimizes(self) -> Literal["bytes", "cost"]:
        """Which of a plan's size and cost is minimized within the goal."""
        return "cost" if self.kind in ("size", "bits") else "bytes"

    def __str__(self) -> str:
        return {
            "size": f"--size {size(self.amount)}",
            "bits": f"--bits {self.amount:g}",
            "kld": f"--max-kld {self.amount:g}",
            "output_error": f"--max-output-error {self.amount:g}",
            "snr": f"--min-snr {self.amount:g}",
        }[self.kind]


def parse_goal(chosen: PlanOptions) -> Goal:
    """Return the goal that the options give.

    Raises:
        UsageError: there is no goal or more than one, or other options contradict it.
        ReportError: the sensitivity file cannot be read or is not one.
    """
    nbytes_at_most = (
        parse_bytes("--size", chosen.size, "6GiB or 700MB") if isinstance(chosen.size, str) else chosen.size
    )
    given = {
        "size": nbytes_at_most,
        "bits": chosen.bits,
        "kld": chosen.max_kld,
        "output_error": chosen.max_output_error,
        "snr": chosen.min_snr,
    }
    goals = [(goal_kind, amount) for goal_kind, amount in given.items() if amount is not None]
    if len(goals) != 1:
        raise UsageError("give one goal: --size, --bits, --max-kld, --max-output-error or --min-snr")
    [(goal_kind, amount)] = goals
    option, limited = LIMITS.get(goal_kind, ("", None))
    if limited is not None and chosen.sensitivity is None:
        raise UsageError(f"{option} needs --sensitivity FILE, written by quanterr evaluate --sensitivity-out")
    if chosen.verify != (chosen.text is not None):
        raise UsageError("--measure measures a plan on a text: give both --measure and --text FILE")
    if chosen.verify and chosen.importance is not None:
        raise UsageError("--measure quantizes without an importance matrix; omit --importance")
    measure = _choose_measure(chosen)
    if limited not in (None, measure):
        raise UsageError(f"{option}: {display(str(chosen.sensitivity))} gives a {measure}, and no {limited}")
    if chosen.verify and measure == OUTPUT_ERROR.measure:
        raise UsageError("--measure reads a text; quanterr evaluate --against plan.json --inputs FILE measures this")
    if goal_kind == "snr" and measure != SQUARED:
        raise UsageError("--min-snr limits the squared error; omit --sensitivity and --importance")
    return Goal(cast("Kind", goal_kind), amount, measure)


def _choose_measure(options: PlanOptions) -> Measure:
    """Return the measure of the cost; with a sensitivity, importance is used only by recipes that search for scales."""
    if options.sensitivity is not None:
        return cast("Measure", read_sensitivity(os.fspath(options.sensitivity)).cost.measure)
    return SQUARED if options.importance is None else WEIGHTED
