"""The numbers of compared images that rules may name, and that diffs compare: each pair's, and the means over pairs."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import inf
from typing import Self

from quanterr.documents.diff.base import Changes
from quanterr.documents.diff.candidates.model import ItemChange
from quanterr.documents.gate_results import Reason
from quanterr.documents.images.model import SCORES, Images, find_copies, find_difference, list_uncompared
from quanterr.documents.subjects import Item, Subject, Vocabulary
from quanterr.errors import UsageError
from quanterr.util.text import display

SAME_SSIM = 1e-6
MIN_PAIRS = 8  # minimum number of pairs for a confidence interval
PERFECT = {"psnr_db": inf}  # an identical pair's; the others are ordinary numbers

VOCABULARY = Vocabulary(
    "images",
    dict.fromkeys(SCORES, "pair"),
    tuple(SCORES),
    "min(ssim) >= 0.9",
    "delta(ssim) >= -0.01",
    errors=tuple(SCORES),
    done="every image was compared",
    scores=SCORES,
)


@dataclass(kw_only=True)
class ImageValues(Subject):
    """The subject of a comparison of images."""

    images: Images

    def list_items(self, metric: str) -> list[Item]:
        """Return all images: identical pairs hold, images that were not compared violate."""
        return self.items

    def check_baseline(
        self, baseline: Self, metrics: Collection[str], any_original: bool = False, among: Sequence[str] = ()
    ) -> None:
        """Check that both are means over the same images.

        Raises:
            UsageError: the baseline has other images or other originals; for the PSNR, other pairs are identical.
        """
        old, new = baseline.images, self.images
        if why := find_difference(old, new):
            raise UsageError(f"--baseline: {why}")
        if other := {pair.name for pair in old.pairs} ^ {pair.name for pair in new.pairs}:
            raise UsageError(f"--baseline: only one of both compares {display(min(other))}: means over other images")
        if "psnr_db" in metrics and (
            other := {p.name for p in old.pairs if p.identical} ^ {p.name for p in new.pairs if p.identical}
        ):
            raise UsageError(
                f"--baseline: {display(min(other))} is identical in only one of both, so that the means of psnr_db are "
                "over other pairs; compare ssim"
            )


def list_subjects(images: Images) -> list[Subject]:
    """Return the only subject; images that were not compared make every verdict inconclusive."""
    pairs = [Item(pair.name, "lossless" if pair.identical else "pair", pair, perfect=PERFECT) for pair in images.pairs]
    lost = [Item(pair.name, "not_compared", None, pair.reason) for pair in images.not_compared]
    means = {name: getattr(images, name) for name in SCORES}
    n = len(images.pairs) - images.identical
    return [
        ImageValues(
            VOCABULARY,
            [*pairs, *lost],
            {name: None if mean is None else mean.mean for name, mean in means.items()},
            errors={name: None if mean is None else mean.se for name, mean in means.items()},
            unreliable=[Reason(text, "result") for text in list_uncompared(images)],
            unquantized=[Reason(text, "result") for text in find_copies(images)],
            images=images,
            too_few=f"needs at least {MIN_PAIRS} pairs that differ, found {n}" if n < MIN_PAIRS else None,
        )
    ]


@dataclass(slots=True)
class ImageChange(ItemChange):
    """A pair of images whose SSIM changed."""

    old_ssim: float
    new_ssim: float
    change: float


def _compare_pairs(was: Item, now: Item) -> tuple[float, ItemChange] | None:
    x, y = was.values.ssim, now.values.ssim
    return None if abs(y - x) <= SAME_SSIM else (x - y, ImageChange(now.name, x, y, y - x))


CHANGES = Changes("pair", _compare_pairs, find_difference)
