"""Calibrators: how the number of a block that its scale is derived from is found.

    absmax    the largest magnitude
    pNN       the magnitude that NN % of the elements do not exceed; for a tensor or a column,
              the largest such number of its pieces of rows
    mse       the largest magnitude times the one of 20 ratios from 0.5 to 1 that gives the smallest squared error;
              errors are weighted by the importance of their columns, if known
    ema       only for scales of a whole tensor: a moving average of the largest magnitudes of its pieces, as
              computed in quantization-aware training

Asymmetric codes use the minimum and the maximum instead, which ``mse`` and ``pNN`` shrink by the same ratio.
"""

from collections.abc import Callable
from dataclasses import dataclass

from quanterr.errors import UsageError
from quanterr.lazy_torch import Tensor, torch
from quanterr.util.text import display

RATIOS = tuple(1 - n / 38 for n in range(20))  # from 1 to 0.5
MOMENTUM = 0.9  # weight of the previous average in ema
NAMES = "absmax, p99.9 (any percentile from 50 to 100), mse, ema"

RoundCodes = Callable[[Tensor], Tensor]  # numbers in units of a code → the nearest codes, float32, perhaps in place


@dataclass(frozen=True)
class Calibrator:
    """A calibrator: absmax by default; ``percentile`` and ``searches`` cannot be combined."""

    name: str = "absmax"
    percentile: float = 100.0
    searches: bool = False
    averages: bool = False

    @property
    def takes_largest(self) -> bool:
        """True if only the largest magnitude of a block counts."""
        return self.percentile == 100 and not self.searches

    def find_ends(
        self, blocks: Tensor, highest: float, round_codes: RoundCodes, importance: Tensor | None = None
    ) -> Tensor:
        """Return the magnitude, (a, b), that gets the code ``highest`` in each of the blocks, (a, high, b, wide).

        ``importance`` of the columns is (1, 1, b, wide).
        """
        largest = blocks.abs().amax((1, 3))
        if self.percentile < 100:
            flat = blocks.abs().transpose(1, 2).flatten(2)
            return torch.quantile(flat, self.percentile / 100, dim=2) if flat.shape[2] <= 1 << 24 else largest
        if not self.searches:
            return largest
        best, min_error = largest.clone(), torch.full_like(largest, torch.inf)
        for ratio in RATIOS:
            scale = largest * (ratio / highest)
            unit = scale.masked_fill(scale == 0, 1)[:, None, :, None]
            error = weigh_errors((round_codes(blocks / unit) * unit - blocks).square_(), importance).sum((1, 3))
            better = error < min_error
            min_error = torch.where(better, error, min_error)
            best = torch.where(better, largest * ratio, best)
        return best

    def merge_pieces(self, ends: Tensor) -> Tensor:
        """Merge what find_ends returned for the pieces of a tensor, (n, 1), into the largest or the moving average."""
        if not self.averages:
            return ends.amax()
        average = ends.view(-1)[0]
        for end in ends.view(-1)[1:]:
            average = MOMENTUM * average + (1 - MOMENTUM) * end
        return average


ABSMAX = Calibrator()


def weigh_errors(squares: Tensor, importance: Tensor | None) -> Tensor:
    """Multiply squared errors by the importance of their columns, in place."""
    return squares if importance is None else squares.mul_(importance)


def parse_calibrator(name: str) -> Calibrator:
    """Parse a calibrator's name.

    Raises:
        UsageError: no calibrator has that name.
    """
    if name in ("absmax", "minmax"):
        return ABSMAX
    if name == "mse":
        return Calibrator(name, searches=True)
    if name == "ema":
        return Calibrator(name, averages=True)
    try:
        percentile = float(name.removeprefix("p")) if name.startswith("p") else 0.0
    except ValueError:
        percentile = 0.0
    if not 50 <= percentile <= 100:
        raise UsageError(f"scales={display(name)}: choose one of {NAMES}")
    return Calibrator(name, percentile)
