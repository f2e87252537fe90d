"""The grids of the IQ types equal those of the gguf package."""

import numpy as np
import pytest

from quanterr.formats import gguf_iq

LEVELS = {
    "IQ1_S": gguf_iq.TERNARY,
    "IQ2_XXS": gguf_iq.IQ2,
    "IQ2_XS": gguf_iq.IQ2,
    "IQ2_S": gguf_iq.IQ2,
    "IQ3_XXS": gguf_iq.IQ3_XXS,
    "IQ3_S": gguf_iq.IQ3_S,
}


@pytest.fixture
def quants():
    return pytest.importorskip("gguf.quants", reason="the gguf package is not installed")


@pytest.mark.parametrize("name", LEVELS)
def test_grid_equals_the_gguf_package(quants, name):
    quant_class = getattr(quants, name)
    quant_class.init_grid()

    assert np.array_equal(quant_class.grid[0, 0], gguf_iq.decode_grid(name, LEVELS[name]).numpy())


def test_seven_bit_signs_equal_the_gguf_package(quants):
    bits = np.unpackbits(np.frombuffer(quants.IQ2_XXS.ksigns, np.uint8)[:, None], axis=1, bitorder="little")

    assert np.array_equal(np.packbits(bits, axis=1, bitorder="little")[:, 0], gguf_iq.EVEN_SIGNS)


def test_file_is_up_to_date_with_make_gguf_grids(quants):
    import make_gguf_grids

    made, checked_in = (
        text.split('"""', 2)[2] for text in (make_gguf_grids.module(), make_gguf_grids.FILE.read_text())
    )
    assert made == checked_in
