"""The numbers of compared images that rules may name: of each pair, and the means over pairs."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import inf
from typing import Self

from quanterr.errors import UsageError
from quanterr.report.gate_results import Verdict
from quanterr.report.images.model import SCORES, Images, find_copies, list_reasons
from quanterr.report.subjects import Item, Subject, Vocabulary

LEAST_PAIRS = 8  # for a confidence interval
PERFECT = {"psnr_db": inf}  # an identical pair's; the others are ordinary numbers

VOCABULARY = Vocabulary(
    "images",
    dict.fromkeys(SCORES, "pair"),
    tuple(SCORES),
    "min(ssim) >= 0.9",
    errors=tuple(SCORES),
    done="every image was compared",
    scores=SCORES,
)


@dataclass
class ImageValues(Subject):
    """The subject of a comparison of images."""

    def list_items(self, metric: str) -> list[Item]:
        """Return all images: identical pairs hold, images that were not compared violate."""
        return self.items

    def check_baseline(self, baseline: Self, metrics: Collection[str]) -> None:
        """Refuse every baseline.

        Raises:
            UsageError: always.
        """
        raise UsageError("compared images take no baseline; quanterr diff says what changed")


def list_subjects(images: Images, metrics: Collection[str]) -> list[Subject]:
    """Return the only subject; images that were not compared make every verdict inconclusive."""
    pairs = [
        Item(
            pair.name,
            "lossless" if pair.identical else "pair",
            {name: getattr(pair, name) for name in SCORES},
            perfect=PERFECT,
        )
        for pair in images.pairs
    ]
    lost = [Item(one.name, "not_compared", dict.fromkeys(SCORES), one.reason) for one in images.not_compared]
    means = {name: getattr(images, name) for name in SCORES}
    n = len(images.pairs) - images.identical
    return [
        ImageValues(
            VOCABULARY,
            [*pairs, *lost],
            {name: None if one is None else one.mean for name, one in means.items()},
            errors={name: None if one is None else one.se for name, one in means.items()},
            unreliable=list_reasons(images),
            unquantized=find_copies(images),
            too_few=f"needs at least {LEAST_PAIRS} pairs that differ, found {n}" if n < LEAST_PAIRS else None,
        )
    ]


def store_verdicts(images: Images, judged: Sequence[Subject], verdicts: Sequence[Verdict]) -> Images:
    """Return a copy of the result with the verdict and its gates."""
    return images.model_copy(update=verdicts[0]._asdict() | {"gated": bool(verdicts[0].gates)})
