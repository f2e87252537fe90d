"""The kernel picks the codes that may not be the nearest: all that the specification finds are among them."""

import pytest
import torch

from quanterr.kernel.doubts import list_doubtful
from quanterr.kernel.levels import E2M1, E4M3, E5M2, INT4, INT8, Scaling, nibbles, uniform
from quanterr.kernel.library import find_best
from quanterr.origin.nearest import BFLOAT16, FLOAT16, FLOAT32, check_codes, pick

KERNEL = find_best().kernel
LEVELS = {
    "int8": INT8,
    "int4": INT4,
    "unsigned": uniform(4),
    "e4m3": E4M3,
    "e5m2": E5M2,
    "e2m1": E2M1,
    "table": nibbles(
        [-1.0, -0.7, -0.52, -0.39, -0.28, -0.18, -0.09, 0.0, 0.08, 0.16, 0.25, 0.34, 0.44, 0.56, 0.72, 1.0]
    ),
}
ROWS, COLS = 24, 300

pytestmark = pytest.mark.skipif(KERNEL is None, reason="no kernel was compiled")


def draw(levels, shifted):
    """Return values, stored values and scales; most codes are the nearest, others are a little off, or out of range."""
    generator = torch.Generator().manual_seed(3)
    unit = 0.01 * (0.5 + torch.rand(ROWS, 1 if not shifted else COLS, generator=generator))
    unit[2] = 0
    shift = 0.05 * torch.randn(ROWS, COLS, generator=generator) if shifted else None
    spread = levels.highest - levels.lowest
    codes = levels.lowest + spread * (1.1 * torch.rand(ROWS, COLS, generator=generator) - 0.05)
    codes[5] = levels.numbers(codes[5]) + 0.5  # ties of integers
    numbers = levels.numbers(codes)
    moved = torch.rand(ROWS, COLS, generator=generator) < 0.02
    ends = levels.numbers(torch.tensor([levels.lowest, levels.highest])).tolist()
    stored = levels.values((numbers + moved.to(numbers.dtype)).clamp(*map(int, ends)))
    x, y = codes * unit, stored * unit
    return (x, y, Scaling(unit)) if shift is None else (x + shift, y + shift, Scaling(unit, shift))


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("levels", LEVELS.values(), ids=LEVELS)
def test_doubtful_codes_are_all_that_are_off_or_free(levels, shifted):
    x, y, scales = draw(levels, shifted)

    for arithmetic in (FLOAT32, FLOAT16, BFLOAT16):
        checked = check_codes(levels, x, y, scales, arithmetic)
        out = torch.empty(x.numel(), dtype=torch.int64)
        places = list_doubtful(KERNEL, levels, x, y, scales, arithmetic.margin, arithmetic.absolute, out)
        again = check_codes(levels, *pick(x, y, scales, places), arithmetic)

        assert (checked.off.sum(), checked.free.sum()) == (again.off.sum(), again.free.sum())
        assert len(places) < x.numel() / 4 or arithmetic is not FLOAT32
        assert checked.off.any() or arithmetic is not FLOAT32


def test_nan_is_doubtful():
    x, y, scales = draw(INT8, False)
    x[7, 9], y[8, 0] = torch.nan, torch.nan
    out = torch.empty(x.numel(), dtype=torch.int64)

    places = list_doubtful(KERNEL, INT8, x, y, scales, FLOAT32.margin, 0.0, out)

    assert {7 * COLS + 9, 8 * COLS} <= set(places.tolist())
