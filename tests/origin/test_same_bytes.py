"""Weights count as the same without being decoded only if their decoders and all of their bytes are equal."""

from functools import partial

import pytest
import torch
from msgspec.structs import replace

from quanterr.checkpoints import Entry
from quanterr.kernel.decoder import Decoder, ElementType
from quanterr.kernel.grid import Grid
from quanterr.kernel.interpreter import Native
from quanterr.origin import same_bytes
from quanterr.origin.same_bytes import is_same_function

CODES, SCALES = bytes(range(24)), bytes(16)


class Memory:
    """A file whose bytes are in memory."""

    def __init__(self, raw):
        self.raw = raw

    def read_into(self, view, offset):
        view[:] = self.raw[offset : offset + len(view)]


def store(raw, dtype, shape, name="model.weight"):
    return Entry(name, dtype, shape, Memory(b"head" + raw), 4, len(raw))


def decoder(codes=CODES, scales=SCALES, name="model.weight", dtype="I8"):
    scale = Grid(store(scales, "F32", (4, 1)))
    return Decoder(store(codes, dtype, (4, 6), name), 6, ElementType.I8, scale=scale)


def change(raw, at):
    return raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]


def is_same(a, b):
    return is_same_function(a, b, lambda: None)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(same_bytes, "BYTES_AT_ONCE", 16)


def test_equal_decoders_of_equal_bytes_are_the_same_whatever_the_names():
    assert is_same(Native(decoder()), Native(decoder(name="another")))


@pytest.mark.parametrize(
    "other",
    [
        *(decoder(codes=change(CODES, at)) for at in (0, 15, 16, 23)),
        decoder(scales=change(SCALES, 15)),
        decoder(dtype="U8"),
        replace(decoder(), factor=0.5),
        replace(decoder(), rotation=2),
        replace(decoder(), scale=None),
        replace(decoder(), scale=replace(decoder().scale, steps=(("mul", 2.0),))),
        replace(decoder(), columns=store(bytes(24), "I32", (6,))),
        replace(decoder(), read=lambda chunk, workspace: None),
    ],
)
def test_one_other_byte_or_parameter_makes_another_function(other):
    assert not is_same(Native(decoder()), Native(other))


def test_function_that_wraps_a_decoder_is_another_function():
    native = Native(decoder())

    assert not is_same(native, partial(native))
    assert not is_same(lambda *given: native(*given), lambda *given: native(*given))


@pytest.mark.parametrize(
    ("given", "is_equal"),
    [
        ({"order": torch.arange(4)}, True),
        ({"order": torch.arange(4).flip(0)}, False),
        ({"order": torch.arange(5)}, False),
        ({"blocks": torch.arange(4)}, False),
    ],
)
def test_keywords_of_functions_are_compared_also_if_they_are_tensors(given, is_equal):
    def decode(**given):
        """Stand for a function that decodes."""

    assert is_equal == is_same(partial(decode, order=torch.arange(4)), partial(decode, **given))


def test_bytes_are_not_read_if_parameters_differ(monkeypatch):
    monkeypatch.setattr(Memory, "read_into", None)

    assert not is_same(Native(decoder()), Native(replace(decoder(), factor=0.5)))
