"""Single outlier columns that set the scales of whole rows and so limit a weight's SNR."""

from collections.abc import Iterator, Sequence
from math import log10

from torch import Tensor

from quanterr.findings.codes import make_finding
from quanterr.findings.layers import WeightSummary
from quanterr.findings.samples import read_first_rows, use_one_thread
from quanterr.pairing.sampling import on_cpu
from quanterr.report.base import Finding
from quanterr.util.text import display

BIT_DB = 6.02
LOW_DB = 14.0  # below 6.02 dB per bit; rows of a few thousand Gaussian values lose 8 to their largest
GAIN_DB = 6.0  # least cost of a column that is reported
RULED = 0.5  # share of the rows that the column must rule
MOST = 3  # weights that are read again
FEWEST = 16  # columns of a weight that is checked


def find_outlier_columns(seen: Sequence[WeightSummary]) -> Iterator[Finding]:
    """Report the column that limits the scales, for the worst weights that are as good as their scales allow."""
    low = [one for one in seen if one.near and one.figures and _is_low(one, one.figures.snr_db)]
    low.sort(key=lambda one: one.figures.snr_db if one.figures else 0.0)
    with use_one_thread(), on_cpu() as workspaces:
        for one in low[:MOST]:
            found = _find_ruling_column(one, read_first_rows(one.pair.original, workspaces[0]))
            if found:
                yield found


def _is_low(one: WeightSummary, snr_db: float) -> bool:
    """Return True for a weight with a scale per row (or one scale) and an SNR far below its bits."""
    weight = one.pair.quantized
    whole_rows = weight.block_size is None and weight.uniform_bits is not None and len(weight.shape) == 2
    return whole_rows and weight.shape[1] >= FEWEST and snr_db < BIT_DB * (weight.uniform_bits or 0) - LOW_DB


def _find_ruling_column(one: WeightSummary, x: Tensor) -> Finding | None:
    """Report the column that holds the largest value of most rows, if it costs GAIN_DB or more.

    Args:
        one: the weight.
        x: rows of the original, (r, c).
    """
    size = x.abs()
    by_row = one.pair.quantized.scale is not None and one.pair.quantized.scale.n > 1
    column = int(size.argmax(1).mode().values) if by_row else int(size.amax(0).argmax())
    rest = size.clone()
    rest[:, column] = 0
    largest, without = (part.amax(1) if by_row else part.amax().view(1) for part in (size, rest))
    energy, kept = float(largest.square().sum()), float(without.square().sum())
    signal = float(rest.square().sum() / size.square().sum().clamp(min=1e-30))
    ruled = float((largest > without).double().mean())
    if not kept or not signal or ruled < RULED or one.figures is None:
        return None
    reached = one.figures.snr_db + 10 * log10(energy / kept * signal)
    if reached < one.figures.snr_db + GAIN_DB:
        return None
    name = one.pair.name
    whose = f"{100 * ruled:.3g} % of the sampled rows" if by_row else "the whole weight"
    message = (
        f"{display(name)}: its scales allow no more than {one.figures.snr_db:.1f} dB: an outlier in column {column} "
        f"sets the scale of {whose}; without it the SNR would be about {reached:.0f} dB"
    )
    remedy = "use a scale per block of columns, smooth or rotate the layer's inputs, or leave the weight unquantized"
    return make_finding("outlier_column", "info", name, message, remedy, column=column, snr_db_without=reached)
