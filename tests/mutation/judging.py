"""The cost of a break, in float64, and what quanterr reports of it."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from math import inf, log10
from typing import NamedTuple

import torch
from torch import Tensor

from quanterr.documents.base import Finding
from quanterr.documents.comparison.model import Report
from quanterr.documents.inspection.model import Inspection

LAYER_DB, PART_DB = 1.0, 6.0  # losses that must be noticed
PART = 64  # elements
BEST_DB = 60.0  # no loss is counted above this SNR
BROKEN = ("noticed", "slight", "info", "SILENT", "small", "by design")
SOUND = ("clean", "told", "WARNED", "ERROR")  # "told": there is an info, and nothing worse
BAD = ("info", "SILENT", "WARNED", "ERROR")
UNMAPPED = "CT INT4 experts"  # no loader maps the names of this layout: a finding reports that


class Loss(NamedTuple):
    """The loss in dB of the whole weight that loses most, and of the worst row, column or run in a row."""

    layer: float = 0.0
    part: float = 0.0

    @property
    def counts(self) -> bool:
        """True if the loss must be noticed. A change that improves the whole weight was another choice."""
        return self.layer >= LAYER_DB or (self.part >= PART_DB and self.layer >= 0)


STRUCTURAL = Loss(inf, inf)  # a change that no number shows, but that runtimes notice


class Outcome(NamedTuple):
    """The outcome of a pair."""

    family: str
    name: str
    told: str  # a word of BROKEN or SOUND
    loss: Loss | None  # None: sound
    findings: tuple[Finding, ...] = ()
    note: str = ""  # the other findings, or the reason for silence
    excuse: str = ""  # the declaration, and the trace of a method in the sound file, which findings excuse

    def __str__(self) -> str:
        loss = f"{self.loss.layer:.1f} dB, worst part {self.loss.part:.1f} dB: " if self.loss else ""
        messages = "; ".join(f"{f.severity} {f.code}: {f.message}"[:220] for f in self.findings)
        return f"{self.told}: {self.family}: {self.name}: {loss}{self.note or messages or 'no finding'}"


class Pair(NamedTuple):
    """A weight before quantization and as stored, (rows, cols) each."""

    x: Tensor
    y: Tensor


def loss(sound: Pair, broken: Pair, best_db: float = BEST_DB) -> Loss:
    """Return the loss of a broken pair compared with a sound one; ``best_db`` is an SNR that only luck exceeds."""
    energies = [(x.square(), (pair.y - x).square()) for pair in (sound, broken) for x in [pair.x.double()]]
    if not bool(energies[1][1].isfinite().all()):
        return STRUCTURAL
    lost = [_find_worst_loss(energies, part, best_db) for part in (torch.sum, *_parts(broken.x.shape))]
    return Loss(lost[0], max(lost))


def _find_worst_loss(energies: list[tuple[Tensor, Tensor]], part: Callable[[Tensor], Tensor], best_db: float) -> float:
    """Return how much SNR the worst part loses."""
    shares = []
    for x_sq, e_sq in energies:
        signal, noise = part(x_sq), part(e_sq)
        shares.append((noise + 1e-300) / (signal + 1e-300))
    lowest, highest = 10 ** (-best_db / 10), 10 ** (BEST_DB / 10)  # beyond these bounds, no loss is counted
    return float(10 * (shares[1].clamp(lowest, highest) / shares[0].clamp(lowest, highest)).log10().max())


def _parts(shape: torch.Size) -> Iterator[Callable[[Tensor], Tensor]]:
    rows, cols = shape
    if cols >= PART:
        yield lambda values: values.sum(1)
        yield lambda values: values[:, : cols // PART * PART].reshape(rows, -1, PART).sum(2)
    if rows >= PART:
        yield lambda values: values.sum(0)


def snr(x: Tensor, y: Tensor) -> float:
    """Return the SNR in dB."""
    return 10 * log10(float(x.double().square().sum()) / float((y.double() - x.double()).square().sum()))


def worst(losses: Iterable[Loss]) -> Loss:
    """Return the greatest loss of several weights."""
    all_losses = list(losses)
    return Loss(max(loss_.layer for loss_ in all_losses), max(loss_.part for loss_ in all_losses))


def new(report: Report, sound: Report, names: Iterable[str]) -> tuple[Finding, ...]:
    """Return findings whose words the sound report lacks, about these layers if any are named."""
    wanted = set(names)
    before = {(finding.code, finding.layer, finding.severity, finding.message) for finding in sound.findings}
    return tuple(
        finding
        for finding in report.findings
        if (finding.code, finding.layer, finding.severity, finding.message) not in before
        and (
            finding.layer is None
            or not wanted
            or not wanted.isdisjoint((finding.layer, *finding.evidence.get("layers", ())))
        )
    )


def judge_broken(family: str, name: str, report: Report, sound: Report, names: Iterable[str], cost: Loss) -> Outcome:
    """Return the outcome of a broken pair compared with the sound one; ``names`` are the broken layers."""
    findings = new(report, sound, names)
    severities = {finding.severity for finding in findings}
    missing = {tensor.layer_name for tensor in report.not_compared} - {
        tensor.layer_name for tensor in sound.not_compared
    }
    if missing or not severities.isdisjoint(("error", "warning")):
        label = "noticed"
    elif not cost.counts:
        label = "small"
    else:
        label = "info" if severities else "SILENT"
    return Outcome(family, name, label, cost, findings)


def of_sound(family: str, name: str, report: Report | Inspection, true: Collection[str] = ()) -> Outcome:
    """Return the outcome of a sound pair; findings with the codes in ``true`` are right."""
    if name.startswith(UNMAPPED):
        true = {*true, "unloadable"}
    severities = {"info" if finding.code in true else finding.severity for finding in report.findings}
    severity = next((label for label in ("error", "warning", "info") if label in severities), "")
    findings = tuple(finding for finding in report.findings if finding.severity != "info")
    label = {"error": "ERROR", "warning": "WARNED", "info": "told", "": "clean"}[severity]
    return Outcome(family, name, label, None, findings)


def as_unsound(outcome: Outcome) -> Outcome:
    """Return the outcome of a pair whose quantizer caused a loss: findings are right, and must be there."""
    return outcome._replace(told="noticed" if outcome.told in ("WARNED", "ERROR") else "SILENT", loss=STRUCTURAL)


def table(outcomes: Iterable[Outcome], heading: str, label: Callable[[Outcome], str]) -> str:
    """Return a table of what was reported of broken and sound pairs, by family or by excuse; no label, no row."""
    labelled = [(label(outcome), outcome) for outcome in outcomes if label(outcome)]
    rows = sorted({row for row, _ in labelled})
    width = max(map(len, (*rows, heading))) + 2
    headings = ("broken", *BROKEN, "| sound", *SOUND)
    lines = [f"{heading:<{width}}" + "".join(f"{label:>10}" for label in headings)]
    for row in [*rows, "all"]:
        of_row = [outcome for name, outcome in labelled if row in ("all", name)]
        label_counts = Counter(outcome.told for outcome in of_row)
        n_sound = sum(outcome.loss is None for outcome in of_row)
        n_broken = len(of_row) - n_sound
        counts = (
            n_broken,
            *(label_counts[label_of_column] for label_of_column in BROKEN),
            n_sound,
            *(label_counts[label_of_column] for label_of_column in SOUND),
        )
        lines.append(f"{row:<{width}}" + "".join(f"{count or '':>10}" for count in counts))
    return "\n".join(lines)
