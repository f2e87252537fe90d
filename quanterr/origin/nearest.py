"""Specifies whether each code is the level nearest to the original's value, under the stored scales.

A code is the nearest if no other level of its scale and zero point is nearer; at a tie either is, and so is the first
or last level for what lies beyond it. Programs round x / scale in the arithmetic of the dtypes that they load, and may
round scales after the codes. Both move the bounds between levels, by at most ``margin`` · (|x| + |offset| + half of
the range of codes, if they have an offset: programs round the sum of x / scale and a zero point, too):

    float32     2⁻²¹        eight roundings of float32: of the quantizer, the decoded levels and this comparison
    float16     2⁻¹⁰        two roundings to float16, such as those of the scale and of the quotient
    bfloat16    3 · 2⁻⁹     three roundings to bfloat16: of the scale, its inverse, and x times that, as by ComfyUI

A float16 scale below 2⁻¹⁴ is rounded by up to 2⁻²⁵, whatever its size. Other programs load an original of more digits
in 16 bits, and then round in float32. The first of these arithmetics that explains every code of a weight is its own,
unless rounding in it would have moved far more codes: at least one in FREE_CODES_PER_MOVED of those near a bound.
"""

from collections.abc import Sequence
from typing import NamedTuple

from quanterr.checkpoints.ggml_types import BLOCKS
from quanterr.kernel.levels import Levels, Scaling, find_cells
from quanterr.lazy_torch import Tensor, torch
from quanterr.pairing.model import Pair
from quanterr.samples.nearest import find_nearest

HALF_ULP = 2.0**-25  # half the distance between float16 numbers below the smallest normal one
# A coarse arithmetic is plausible if it moves at least one in this many of the codes near a bound between levels: in
# files of AutoAWQ, one in 1,700 is the smallest share.
FREE_CODES_PER_MOVED = 4000


class Arithmetic(NamedTuple):
    """The arithmetic by which a program may have rounded a weight."""

    name: str
    margin: float
    loads: str = ""  # dtype to which the original is rounded first
    absolute: float = 0.0  # rounding error of a scale that is too small for a relative one

    def load(self, x: Tensor) -> Tensor:
        """Return the original's values as the program loads them, float32."""
        return x.to(getattr(torch, self.loads)).float() if self.loads else x


FLOAT32 = Arithmetic("float32", 2.0**-21)
FLOAT16 = Arithmetic("float16", 2.0**-10, absolute=HALF_ULP)
BFLOAT16 = Arithmetic("bfloat16", 3 * 2.0**-9)
HALVES = {"BF16": "bfloat16", "F16": "float16"}


def list_arithmetics(pair: Pair) -> Sequence[Arithmetic]:
    """Return the arithmetics that the dtypes of a pair allow, the most exact first."""
    x = pair.original.codes.dtype
    dtypes = {x, *(entry.dtype for entry in pair.quantized.parts.values())}
    others = [name for dtype, name in HALVES.items() if x not in (dtype, "BF16")]
    arithmetics = [
        FLOAT32,
        *(FLOAT32._replace(name=f"float32, of the original in {name}", loads=name) for name in others),
    ]
    if pair.quantized.scales_are_float16 or "F16" in dtypes:
        arithmetics.append(FLOAT16)
    if "BF16" in dtypes and pair.quantized.codes.dtype not in BLOCKS:  # ggml computes in float32
        arithmetics.append(BFLOAT16)
    return arithmetics


class CheckedCodes(NamedTuple):
    """The codes of some elements, (r, c) each."""

    off: Tensor  # bool: another level is nearer, beyond what the arithmetic explains
    free: Tensor  # bool: another level would do as well: near a bound between two levels, or the scale is zero
    steps: Tensor  # distance to the nearest level, in levels


def check_codes(levels: Levels, x: Tensor, y: Tensor, scales: Scaling, arithmetic: Arithmetic) -> CheckedCodes:
    """Compare the stored values ``y`` with the levels nearest to ``x``, as loaded, both (r, c) float32."""
    nearest, cells = find_nearest(levels, x, y, scales), find_cells(levels, x, scales)
    wide, margins = x.double(), _find_margins(levels, x, scales, arithmetic)
    gap = (y - wide).abs_() - (nearest.values - wide).abs_()
    rest = (wide - cells.nearest).abs()
    free = ((cells.width.double() / 2 - rest).abs() <= margins) & (rest <= cells.width) & (cells.width > 0)
    return CheckedCodes(~(gap <= 2 * margins), free | (scales.unit == 0), nearest.steps)  # NaN is off


def pick(x: Tensor, y: Tensor, scales: Scaling, places: Tensor) -> tuple[Tensor, Tensor, Scaling]:
    """Return elements at places in a chunk, (1, n) each."""
    row, col = places // x.shape[1], places % x.shape[1]
    x_of, y_of, *of = (
        side.expand(x.shape)[row, col][None] for side in (x, y, *(part for part in scales if part is not None))
    )
    return x_of, y_of, Scaling(*of)


def _find_margins(levels: Levels, x: Tensor, scales: Scaling, arithmetic: Arithmetic) -> Tensor:
    """Return the possible error of the bounds between levels at each element, (r, c) float64."""
    sizes = x.double().abs()
    if scales.shift is not None:
        sizes = sizes + scales.shift.double().abs()
        sizes = sizes + scales.unit.double().abs() * ((levels.highest - levels.lowest) / 2)
    margins = sizes * arithmetic.margin
    if arithmetic.absolute:
        margins += sizes * (arithmetic.absolute / scales.unit.double().abs()).nan_to_num(posinf=0.0)
    return margins
