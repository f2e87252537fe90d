"""The SNR that is usual for a format follows from the bits and groups of its weights."""

import pytest
import torch
from msgspec.structs import replace
from support.making import in_memory

from quanterr.formats import FORMATS
from quanterr.formats.usual import estimate_usual_snr

ROWS = {row.name: row for row in FORMATS}


def store(bits, columns):
    return replace(in_memory(torch.zeros(4, 4096)), uniform_bits=bits, block_size=(1, columns) if columns else None)


def rounded_db(bits, columns):
    """Return the SNR of normal values that plain rounding with a scale for each group stores."""
    groups = torch.randn(4096, columns, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    scale = groups.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
    error = (groups / scale).round() * scale - groups
    return 10 * float(torch.log10(groups.square().sum() / error.square().sum()))


@pytest.mark.parametrize(("bits", "columns"), [(3, 128), (4, 32), (4, 128), (8, 128)])
def test_usual_range_of_integers_holds_what_rounding_of_normal_values_reaches(bits, columns):
    low, high = estimate_usual_snr(ROWS["ct_pack"], [store(bits, columns)])

    assert low < rounded_db(bits, columns) < high
    assert high - low <= 7


def test_usual_range_of_several_weights_spans_their_ranges():
    four, eight = (estimate_usual_snr(ROWS["gptq"], [store(bits, 128)]) for bits in (4, 8))

    assert (four[0], eight[1]) == estimate_usual_snr(ROWS["gptq"], [store(4, 128), store(8, 128), store(4, 128)])
    assert estimate_usual_snr(ROWS["gptq"], [store(4, None)])[0] < four[0]  # outliers decide in rows


def test_narrow_range_is_the_declared_one():
    assert ROWS["nvfp4"].usual_db == estimate_usual_snr(ROWS["nvfp4"], [store(4, 16)])


def test_scale_of_a_whole_tensor_has_the_declared_range():
    """Outliers decide: two real models have 20 and 29 dB with INT8."""
    assert ROWS["int8_tensor"].usual_db == estimate_usual_snr(ROWS["int8_tensor"], [store(8, None)])
    assert ROWS["int8_tensor"].usual_db == estimate_usual_snr(
        ROWS["int8_tensor"], [replace(store(8, None), block_size=(4, 4096))]
    )


# Of all-MiniLM-L6-v2 and SmolLM2-135M, all layers together, by the recipes of the same names.
MEASURED = {
    ("int8_row", 8, None): (40.05, 41.40),
    ("ct_pack", 4, None): (16.64, 16.82),
    ("ct_pack", 2, 64): (5.49, 5.62),
    ("gguf_q4_0", 4, 32): (20.93, 21.25),
    ("gguf_q5_0", 5, 32): (26.99, 27.16),
    ("gguf_q3_k", 3, 16): (15.89, 16.23),
}


@pytest.mark.parametrize("case", MEASURED)
def test_real_models_are_within_the_usual_range(case):
    name, bits, columns = case
    weight = replace(store(bits, columns), scale=in_memory(torch.ones(4, 1)).codes)
    low, high = estimate_usual_snr(ROWS[name], [weight])

    assert all(low <= snr_db <= high for snr_db in MEASURED[case])
