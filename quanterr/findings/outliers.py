"""Single columns whose outliers decide the scales of whole rows: why a weight's scales allow no better."""

from collections.abc import Iterator, Sequence
from math import log10

from torch import Tensor

from quanterr.findings.codes import finding
from quanterr.findings.layers import WeightSummary
from quanterr.findings.samples import first_rows, one_thread
from quanterr.pairing.sampling import on_cpu
from quanterr.report.base import Finding
from quanterr.util.text import display

BIT_DB = 6.02
LOW_DB = 14.0  # below the dB of all bits: 8 are what rows of some thousand Gaussian numbers lose to their largest
GAIN_DB = 6.0  # that a column must cost
RULED = 0.5  # of the rows
MOST = 3  # weights that are read again
FEWEST = 16  # columns


def outlier_columns(seen: Sequence[WeightSummary]) -> Iterator[Finding]:
    """For the worst of the weights that are as good as their scales allow, the column that rules these."""
    low = [one for one in seen if one.near and one.figures and _is_low(one, one.figures.snr_db)]
    low.sort(key=lambda one: one.figures.snr_db if one.figures else 0.0)
    with one_thread(), on_cpu() as workspaces:
        for one in low[:MOST]:
            found = _ruling(one, first_rows(one.pair.original, workspaces[0]))
            if found:
                yield found


def _is_low(one: WeightSummary, snr_db: float) -> bool:
    weight = one.pair.quantized
    whole_rows = weight.block_size is None and weight.uniform_bits is not None and len(weight.shape) == 2
    return whole_rows and weight.shape[1] >= FEWEST and snr_db < BIT_DB * (weight.uniform_bits or 0) - LOW_DB


def _ruling(one: WeightSummary, x: Tensor) -> Finding | None:
    """``x`` are rows of the original, (r, c)."""
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
        f"{display(name)}: its scales allow no better than {one.figures.snr_db:.1f} dB: an outlier in column {column} "
        f"rules those of {whose}; without it they would reach about {reached:.0f} dB"
    )
    remedy = "use scales for blocks of columns, smooth or rotate its inputs, or leave it unquantized"
    return finding("outlier_column", "info", name, message, remedy, column=column, snr_db_without=reached)
