"""The SNR that is usual for a format follows from the bits and groups of its weights."""

import pytest
import torch
from msgspec.structs import replace
from support.making import in_memory

from quanterr.formats import FORMATS
from quanterr.formats.usual import estimate_usual_snr

ROWS = {row.name: row for row in FORMATS}


def stored(bits, columns):
    return replace(in_memory(torch.zeros(4, 4096)), uniform_bits=bits, block_size=(1, columns) if columns else None)


def rounded_db(bits, columns):
    """Return the SNR of normal values that plain rounding with a scale for each group stores."""
    groups = torch.randn(4096, columns, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    scale = groups.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
    error = (groups / scale).round() * scale - groups
    return 10 * float(torch.log10(groups.square().sum() / error.square().sum()))


@pytest.mark.parametrize(("bits", "columns"), [(3, 128), (4, 32), (4, 128), (8, 128)])
def test_usual_range_of_integers_holds_what_rounding_of_normal_values_reaches(bits, columns):
    low, high = estimate_usual_snr(ROWS["ct_pack"], [stored(bits, columns)])

    assert low < rounded_db(bits, columns) < high
    assert high - low <= 7


def test_usual_range_of_weights_of_several_sizes_spans_them():
    four, eight = (estimate_usual_snr(ROWS["gptq"], [stored(bits, 128)]) for bits in (4, 8))

    assert (four[0], eight[1]) == estimate_usual_snr(ROWS["gptq"], [stored(4, 128), stored(8, 128), stored(4, 128)])
    assert estimate_usual_snr(ROWS["gptq"], [stored(4, None)])[0] < four[0]  # outliers decide in rows


def test_narrow_range_is_the_declared_one():
    assert ROWS["nvfp4"].usual_db == estimate_usual_snr(ROWS["nvfp4"], [stored(4, 16)])


def test_scale_of_a_whole_tensor_is_judged_by_its_largest_values():
    whole, groups = (estimate_usual_snr(ROWS["gptq"], [stored(8, columns)]) for columns in (None, 128))

    assert whole[0] < groups[0] - 5
