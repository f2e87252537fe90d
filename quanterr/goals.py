"""Goals of plans: what the options ask for, checked before anything is read."""

import os
from collections.abc import Mapping
from typing import Final, Literal, NamedTuple

from quanterr.errors import UsageError
from quanterr.options import PlanOptions
from quanterr.report.kept_layers import UNITS, parse_amount
from quanterr.report.plan.model import Measure
from quanterr.report.sensitivity import read_sensitivity
from quanterr.util.text import display, size

SQUARED: Final = "squared error"
WEIGHTED: Final = "weighted squared error"
PREDICTED: Mapping[Measure, str] = {  # by a sensitivity: measure → metric of a layer
    "predicted KLD": "predicted_kld",
    "predicted output error": "predicted_output_error",
}
LIMITS: Mapping[str, tuple[str, Measure]] = {  # goal → its option, the measure that it limits
    "kld": ("--max-kld", "predicted KLD"),
    "output_error": ("--max-output-error", "predicted output error"),
}


class Goal(NamedTuple):
    """Goal of a plan: a budget of bytes, or a limit of the cost for which the size is minimized."""

    kind: Literal["size", "bits", "kld", "output_error", "snr"]
    amount: float

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
        ReportError: the sensitivity is no such file.
    """
    nbytes_at_most = _parse_bytes(chosen.size) if isinstance(chosen.size, str) else chosen.size
    given = {
        "size": nbytes_at_most,
        "bits": chosen.bits,
        "kld": chosen.max_kld,
        "output_error": chosen.max_output_error,
        "snr": chosen.min_snr,
    }
    goals = [Goal(kind, amount) for kind, amount in given.items() if amount is not None]  # type: ignore[arg-type]
    if len(goals) != 1:
        raise UsageError("give one goal: --size, --bits, --max-kld, --max-output-error or --min-snr")
    option, limited = LIMITS.get(goals[0].kind, ("", None))
    if limited is not None and chosen.sensitivity is None:
        raise UsageError(f"{option} needs --sensitivity FILE, written by quanterr evaluate --sensitivity")
    if chosen.verify != (chosen.text is not None):
        raise UsageError("--verify measures a plan on a text: give both --verify and --text FILE")
    if chosen.verify and chosen.importance is not None:
        raise UsageError("--verify quantizes without an importance matrix; omit --importance")
    measured_as = choose_measure(chosen)
    if limited not in (None, measured_as):
        raise UsageError(f"{option}: {display(str(chosen.sensitivity))} gives a {measured_as}, and no {limited}")
    if chosen.verify and measured_as == "predicted output error":
        raise UsageError("--verify reads a text; quanterr evaluate --against plan.json --inputs FILE measures this")
    if goals[0].kind == "snr" and measured_as != SQUARED:
        raise UsageError("--min-snr limits the squared error; omit --sensitivity and --importance")
    return goals[0]


def choose_measure(options: PlanOptions) -> Measure:
    """Return the measure of cost; with both files the importance still decides the scales of recipes that search."""
    if options.sensitivity is not None:
        cost = read_sensitivity(os.fspath(options.sensitivity)).cost
        return next(measure for measure, metric in PREDICTED.items() if metric == cost.metric)
    return SQUARED if options.importance is None else WEIGHTED


def _parse_bytes(text: str) -> float:
    amount, unit = parse_amount(text)
    if unit not in UNITS:
        raise UsageError(f"--size {display(text)}: give bytes, such as 6GiB or 700MB")
    return amount * UNITS[unit]
