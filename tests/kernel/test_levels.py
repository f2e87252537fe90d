from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.golden_files import NUMBERS, expected_of
from support.making import open_pairing, same_bits

from quanterr.kernel.decoder import tabulate
from quanterr.kernel.decoding import read_values
from quanterr.kernel.levels import (
    E2M1,
    E2M3,
    E4M3,
    E5M2,
    INT8,
    OF_DTYPE,
    TERNARY,
    Scaling,
    derive_scaling,
    nibbles,
    signed_bytes,
    uniform,
)
from quanterr.kernel.library import find_best
from quanterr.samples.nearest import find_nearest, measure_rounding
from quanterr.tensors.chunks import Chunk
from quanterr.tensors.workspace import FilledWorkspace, Workspace

NO_NEAREST = {  # vectors, trellises, learned codebooks, mixed bits, scaled rotated columns, plain numbers
    "aqlm",
    "ct_sparse_bitmask",
    "dense",
    "exl2",
    "exl3",
    "gguf_iq1_kt",
    "gguf_iq1_m",
    "gguf_iq1_s",
    "gguf_iq2_kl",
    "gguf_iq2_kt",
    "gguf_iq2_s",
    "gguf_iq2_xs",
    "gguf_iq2_xxs",
    "gguf_iq3_kt",
    "gguf_iq3_s",
    "gguf_iq3_xxs",
    "gguf_iq4_kss",
    "gguf_iq4_kt",
    "jangtq",
    "nunchaku_bias",
    "onnx_float",
    "paroquant",
    "quip_sharp",
    "spqr",
    "vptq",
}
WITH_NEAREST = [case for case in NUMBERS if case.parent.name not in NO_NEAREST]


def read_levels(weight):
    """Return the whole weight in the space of its codes: stored values, scales, and the weight itself."""
    inner = weight.rotated.weight if weight.rotated else weight
    chunk = Chunk(0, inner.matrix[0], 0, inner.matrix[1])
    y = inner.dequantize(chunk, Workspace()).weight.float().clone()
    scales = inner.scaling(chunk, (FilledWorkspace(), FilledWorkspace()))
    unit = scales.unit.expand(y.shape).clone() if scales else None
    return inner, y, scales and Scaling(unit, None if scales.shift is None else scales.shift.clone())


def read_codes(case):
    with open_pairing(expected_of(case), case) as plan:
        parts = [read_levels(pair.quantized) for pair in plan.pairs]
    return [(weight, y, scales) for weight, y, scales in parts if scales]


def usable(weight, y, scales):
    """Return where values are finite and no code is beyond the last level, as in random blocks of TQ2_0."""
    codes = (y if scales.shift is None else y - scales.shift) / scales.unit
    fine = y.isfinite() & scales.unit.isfinite() & ~(codes > weight.levels.highest + 0.5)
    return fine if scales.shift is None else fine & scales.shift.isfinite()


@pytest.mark.parametrize(
    ("levels", "bits"),
    [(uniform(2), 2), (uniform(5), 5), (signed_bytes(4), 4), (INT8, 8), (TERNARY, None), (E2M1, None), (E4M3, None)],
    ids=str,
)
def test_levels_that_are_equally_far_apart_have_uniform_bits(levels, bits):
    assert levels.uniform_bits == bits


def test_levels_of_a_table_have_no_uniform_bits():
    assert nibbles(range(16)).uniform_bits is None


@pytest.mark.skipif(find_best().kernel is None, reason="no compiled kernel here")
@pytest.mark.parametrize("case", WITH_NEAREST, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_scales_are_the_same_if_the_kernel_decodes_codes(case):
    filled = [FilledWorkspace() for _ in range(4)]
    with open_pairing(expected_of(case), case) as plan:
        for weight in (pair.quantized for pair in plan.pairs):
            chunk = Chunk(0, weight.matrix[0], 0, weight.matrix[1])
            expected = weight.scaling(chunk, filled[:2])
            by_kernel = weight.scaling(chunk, filled[2:], partial(read_values, find_best().kernel, weight))

            assert (expected is None) == (by_kernel is None)
            assert expected is None or all(
                expected_part is other or same_bits(expected_part.float(), other.float())
                for expected_part, other in zip(expected, by_kernel, strict=True)
            )


@pytest.mark.parametrize("case", WITH_NEAREST, ids=lambda path: f"{path.parent.name}/{path.stem}")
class TestEveryGoldenCaseWithNearestCodes:
    def test_stored_value_is_nearest_to_itself(self, case):
        for weight, y, scales in read_codes(case):
            fine = usable(weight, y, scales)
            nearest = find_nearest(weight.levels, y, y, scales)

            assert torch.equal(nearest.values[fine], y[fine])
            assert not nearest.outside[fine].any()
            assert not nearest.steps[fine].any()

    def test_nearest_code_is_at_least_as_near_as_the_stored_one(self, case):
        for weight, y, scales in read_codes(case):
            fine = usable(weight, y, scales)
            noise = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
            x = y + noise * scales.unit.abs()
            nearest = find_nearest(weight.levels, x, y, scales)
            room = 1e-6 * y.abs()[fine].amax() + 1e-5 * scales.unit.abs()[fine]

            assert ((nearest.values - x).abs()[fine] <= (y - x).abs()[fine] + room).all()


# asym_w4a8_int8 rounds its codes to byte integers before it scales them again, so they are not on one line.
ON_A_LINE = [case for case in WITH_NEAREST if case.parent.name != "asym_w4a8_int8"]


@pytest.mark.parametrize("case", ON_A_LINE, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_levels_equal_the_producer_values(case):
    for weight, y, scales in read_codes(case):
        fine = usable(weight, y, scales) & (scales.unit != 0)
        other = torch.full_like(y, torch.nan)  # no stored value is given
        nearest = find_nearest(weight.levels, y, other, scales)
        far = (nearest.values - y).abs()[fine] > 1e-5 * scales.unit.abs()[fine] + 4e-7 * y.abs()[fine].amax()

        assert not far.any()


@pytest.mark.session
def test_other_formats_have_no_nearest_code():
    formats_by_answer = {True: set(), False: set()}
    for case in NUMBERS:
        with open_pairing(expected_of(case), case) as plan:
            for pair in plan.pairs:
                inner = pair.quantized.rotated.weight if pair.quantized.rotated else pair.quantized
                formats_by_answer[inner.levels is not None].add(pair.quantized.format)

    assert formats_by_answer[False] - formats_by_answer[True] == NO_NEAREST


ALL_LEVELS = [uniform(2), uniform(8), signed_bytes(3), INT8, E2M1, E2M3, E4M3, E5M2, nibbles([-1.0, 0.1, 0.5, 2.0])]


def values_of(levels):
    """Return the value of every code, by its definition."""
    if levels.table:
        return torch.tensor(levels.table)
    if levels.mantissa:
        exponents = [2.0**e for e in range(-20, 16) if 2.0**e >= levels.normal]
        steps = range(2**levels.mantissa)
        magnitudes = [levels.normal * m / 2**levels.mantissa for m in steps]
        magnitudes += [e * (1 + m / 2**levels.mantissa) for e in exponents for m in steps]
        kept = [m for m in magnitudes if m <= levels.highest]
        return torch.tensor(sorted({*kept, *(-m for m in kept)}))
    return torch.arange(levels.lowest, levels.highest + 1)


@pytest.mark.parametrize("levels", [*ALL_LEVELS, *OF_DTYPE.values()])
class TestLevels:
    def test_levels_are_numbered_consecutively(self, levels):
        values = values_of(levels)
        numbers = levels.numbers(values)

        assert (numbers.diff() == 1).all()
        assert torch.equal(levels.values(numbers), values)

    @settings(max_examples=40)
    @given(st.data())
    def test_nearest_level_is_nearest_among_all(self, levels, data):
        numbers = st.floats(2 * levels.lowest - 1, 2 * levels.highest + 1, width=32)
        codes = torch.tensor(data.draw(st.lists(numbers, min_size=1, max_size=50)))
        values = values_of(levels)
        nearest = levels.nearest(codes)
        distances = (codes[:, None] - values).abs().min(1).values

        assert torch.allclose((nearest - codes).abs(), distances, rtol=1e-5, atol=1e-6)
        assert torch.equal(levels.values(levels.numbers(codes)), nearest)

    @settings(max_examples=40)
    @given(st.data())
    def test_short_test_never_wrongly_confirms_nearest_codes(self, levels, data):
        values = values_of(levels)
        numbers = st.floats(1.5 * levels.lowest, 1.5 * levels.highest, width=32)
        x = torch.tensor([data.draw(st.lists(numbers, min_size=8, max_size=8))])
        y = values[torch.tensor([data.draw(st.lists(st.integers(0, len(values) - 1), min_size=8, max_size=8))])]
        scales = Scaling(torch.ones(1, 1))
        if measure_rounding(levels, x, y - x, scales, Workspace()) is not None:
            distances = (x[..., None] - values).abs().amin(-1)

            assert ((y - x).abs() <= distances * 1.0001).all()


def test_short_test_confirms_plain_rounding():
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(3))
    unit = x.abs().amax(1, keepdim=True) / 448
    y = (x / unit).to(torch.float8_e4m3fn).float() * unit

    assert measure_rounding(E4M3, x, y - x, Scaling(unit), Workspace()) == pytest.approx(1 / 12, rel=0.1)
    y[3, 5] += 64 * unit[3, 0]
    assert measure_rounding(E4M3, x, y - x, Scaling(unit), Workspace()) is None


def test_zero_scale_keeps_the_stored_value_and_is_out_of_range():
    x, y = torch.tensor([[1.0, 0.0]]), torch.zeros(1, 2)
    nearest = find_nearest(INT8, x, y, Scaling(torch.zeros(1, 1)))

    assert nearest.values.tolist() == [[0.0, 0.0]]
    assert nearest.outside.tolist() == [[True, False]]


def test_values_are_out_of_range_half_a_step_beyond_the_last_of_a_table():
    assert (-1.5, 5.0) == nibbles([0.0, 4.0, -1.0, 2.0]).ends


def test_scale_is_finite_where_the_span_of_its_values_overflows():
    high = torch.full((1, 32), 6 * 2.0**125)  # E2M1's largest code, as MXFP4 scales it by its exponent 252

    assert torch.full((1, 32), 2.0**125).equal(derive_scaling(E2M1, -high, high).unit)


def test_code_that_no_quantizer_writes_is_a_step_beyond_the_last():
    """Two bits hold a fourth value, twice the third: it is nearest only to values nearer to it."""
    x, y = torch.tensor([[1.0, 1.9, 1.0]]), torch.tensor([[2.0, 2.0, 1.0]])
    nearest = find_nearest(TERNARY, x, y, Scaling(torch.ones(1, 1)))

    assert nearest.values.tolist() == [[1.0, 2.0, 1.0]]
    assert nearest.steps.tolist() == [[1.0, 1.0, 0.0]]


def test_table_keeps_the_signs_of_its_zeros_beside_an_equal_table():
    """Tables of bitsandbytes and convert_to_quant differ only in the sign of a zero; 0.0 and -0.0 compare equal."""
    for zero in (0.0, -0.0, 0.0):
        assert same_bits(torch.tensor([zero, 1.0]), tabulate((zero, 1.0) * 128, n_codes=1)[:2, 0])
