"""Goals of plans: what the options ask for, checked before anything is read."""

from typing import Final, Literal, NamedTuple

from quanterr.errors import UsageError
from quanterr.options import PlanOptions
from quanterr.report.kept_layers import UNITS, parse_amount
from quanterr.report.plan.model import Measure
from quanterr.util.text import display, size

SQUARED: Final = "squared error"
WEIGHTED: Final = "weighted squared error"
KLD: Final = "predicted KLD"


class Goal(NamedTuple):
    """Goal of a plan: a budget of bytes, or a limit of the cost for which the size is minimized."""

    kind: Literal["size", "bits", "kld", "snr"]
    amount: float

    def __str__(self) -> str:
        return {
            "size": f"--size {size(self.amount)}",
            "bits": f"--bits {self.amount:g}",
            "kld": f"--max-kld {self.amount:g}",
            "snr": f"--min-snr {self.amount:g}",
        }[self.kind]


def parse_goal(chosen: PlanOptions) -> Goal:
    """Return the goal that the options give.

    Raises:
        UsageError: there is no goal or more than one, or other options contradict it.
    """
    nbytes_at_most = _parse_bytes(chosen.size) if isinstance(chosen.size, str) else chosen.size
    given = {"size": nbytes_at_most, "bits": chosen.bits, "kld": chosen.max_kld, "snr": chosen.min_snr}
    goals = [Goal(kind, amount) for kind, amount in given.items() if amount is not None]  # type: ignore[arg-type]
    if len(goals) != 1:
        raise UsageError("give one goal: --size, --bits, --max-kld or --min-snr")
    if goals[0].kind == "kld" and chosen.sensitivity is None:
        raise UsageError("--max-kld needs --sensitivity FILE, written by quanterr evaluate --sensitivity")
    if chosen.verify != (chosen.text is not None):
        raise UsageError("--verify measures a plan on a text: give both --verify and --text FILE")
    if chosen.verify and chosen.importance is not None:
        raise UsageError("--verify quantizes without an importance matrix; omit --importance")
    measured_as = choose_measure(chosen)
    if goals[0].kind == "snr" and measured_as != SQUARED:
        raise UsageError("--min-snr limits the squared error; omit --sensitivity and --importance")
    return goals[0]


def choose_measure(options: PlanOptions) -> Measure:
    """Return the measure of cost; with both files the importance still decides the scales of recipes that search."""
    if options.sensitivity is not None:
        return KLD
    return SQUARED if options.importance is None else WEIGHTED


def _parse_bytes(text: str) -> float:
    amount, unit = parse_amount(text)
    if unit not in UNITS:
        raise UsageError(f"--size {display(text)}: give bytes, such as 6GiB or 700MB")
    return amount * UNITS[unit]
