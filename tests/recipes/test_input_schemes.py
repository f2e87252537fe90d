"""Schemes by which runtimes round inputs, compared with their producers' libraries and with worked-out rules."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from quanterr.recipes.inputs import INPUT_SCHEMES, StoredInputScale

FOLDER = Path(__file__).parents[1] / "golden_inputs"  # make.py in that folder documents the files
STATIC = StoredInputScale(torch.tensor(0.05))
STORED = {
    "nvfp4": StoredInputScale(torch.tensor(448 * 6 / 300.0)),
    "fp8_static": STATIC,
    "int8_static": STATIC._replace(zero_point=torch.tensor(3.0)),
    "int8_static_symmetric": STATIC,
    "fp8_token_bounded": StoredInputScale(bound=20.0),
}
EXACT_CASES = {
    "compressed_tensors": (
        "fp8_token", "int8_token_asym", "int4_token", "mxfp4", "mxfp8", "nvfp4", "fp8_static", "int8_static"
    ),
    "torchao": ("fp8_token", "fp8_token_bounded", "fp8_tensor", "int8_token_asym", "int8_static_symmetric"),
    "comfy_kitchen": ("fp8_static", "int8_token", "mxfp8_ceil"),
    "modelopt": ("fp8_static",),
    "quark": ("fp8_token", "fp8_tensor", "int8_token_asym", "mxfp4", "mxfp8_even"),
    "gguf": ("q8_0",),
    "ggml": ("q8_0", "q8_k"),
}  # fmt: skip
# The same codes, but the libraries compute scales in another order: codes times a scale that has up to three roundings
# more than ours, of 2^-24 each, and a last one on either side.
SAME_CODES = {"modelopt": ("fp8_token", "int8_token", "int8_static_symmetric"), "comfy_kitchen": ("nvfp4",)}
FIVE_ROUNDINGS = 5 * 2.0**-24
# These divide by 127.5 where vLLM, whose rule ours is, divides by 127. Either rounds to within half a step of x, also
# where 127.5 is clamped to 127: the results are no further apart than half of both steps, less than amax / 127.
OTHER_STEP = {
    "compressed_tensors": ("int8_token",),
    "torchao": ("int8_token", "int8_tensor"),
    "quark": ("int8_token", "int8_tensor"),
}


def cases(table):
    return [(producer, name) for producer, names in table.items() for name in names]


def results(producer, name):
    """Return the inputs, the library's result and our scheme's result."""
    golden = load_file(FOLDER / f"{producer}.safetensors")
    scheme = INPUT_SCHEMES[name.removesuffix("_bounded").removesuffix("_symmetric")]
    return golden["x"], golden[name], scheme(golden["x"], STORED.get(name, StoredInputScale()))


@pytest.mark.parametrize(("producer", "name"), cases(EXACT_CASES))
def test_schemes_equal_the_producer_libraries(producer, name):
    _, expected, rounded = results(producer, name)

    assert torch.equal(expected, rounded)


@pytest.mark.parametrize(("producer", "name"), cases(SAME_CODES))
def test_codes_equal_libraries_that_round_scales_in_another_order(producer, name):
    _, expected, rounded = results(producer, name)

    assert bool(((expected - rounded).abs() <= FIVE_ROUNDINGS * expected.abs()).all())


@pytest.mark.parametrize(("producer", "name"), cases(OTHER_STEP))
def test_schemes_stay_within_a_step_where_libraries_divide_by_127_5(producer, name):
    x, expected, rounded = results(producer, name)
    largest = x.abs().amax(-1, keepdim=True) if name == "int8_token" else x.abs().amax()

    assert not torch.equal(expected, rounded)
    assert bool(((expected - rounded).abs() <= largest / 127).all())


@pytest.mark.parametrize(("name", "size"), [("int8_token", 64), ("int4_token_narrow", 64), ("int4_token_narrow", 256)])
def test_rotated_inputs_are_rounded_as_in_comfy_kitchen(name, size):
    golden = load_file(FOLDER / "comfy_kitchen.safetensors")
    rounded = INPUT_SCHEMES[name](golden[f"rotated_{size}"], StoredInputScale())

    assert torch.equal(golden[f"{name}_rotated_{size}"], rounded)


def test_every_golden_file_states_its_producer():
    for path in FOLDER.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            assert '"producer"' in file.metadata()["origin"], path


# A token by the rules of vLLM and ggml, worked out by hand, mostly on numbers whose scales are powers of two.
ROWS = [
    ("int8_token", [127.0, 2.5, -3.5, 0.4], [127.0, 2.0, -4.0, 0.0]),
    ("int8_token_asym", [255.0, 2.5, 3.5, 0.0], [255.0, 2.0, 4.0, 0.0]),
    ("int4_token", [7.5, 1.4, -2.6, 0.0], [7.0, 1.0, -3.0, 0.0]),
    ("int4_g64_narrow", [7.0, 1.4, -2.5, 0.0], [7.0, 1.0, -2.0, 0.0]),
    ("fp8_g128", [448.0, 17.0, -19.0, 0.001], [448.0, 16.0, -20.0, 2.0**-9]),
    ("fp8_g128_ue8m0", [300.0, 17.0, -19.0, 0.001], [288.0, 16.0, -20.0, 2.0**-9]),
    ("q8_0", [127.0, 2.6, -3.4, 0.4], [127.0, 3.0, -3.0, 0.0]),
    ("q8_k", [254.0, 5.0, -3.5, 0.4], [254.0, 4.0, -4.0, 0.0]),
    ("mxfp8", [448.0, 1.0, 3.1, 0.0], [448.0, 1.0, 3.0, 0.0]),  # 448 = 1.75 · 2^8: the scale becomes 2
    ("mxfp8_ceil", [448.0, 1.0, 2.0**-9, 0.0], [448.0, 1.0, 2.0**-9, 0.0]),  # here it stays 1
]


@pytest.mark.parametrize(("name", "given", "expected"), ROWS, ids=[row[0] for row in ROWS])
def test_schemes_follow_their_rules(name, given, expected):
    assert expected == INPUT_SCHEMES[name](torch.tensor([given]), StoredInputScale())[0].tolist()


@pytest.mark.parametrize("name", INPUT_SCHEMES)
def test_zeros_stay_zeros_and_the_dtype_stays(name):
    stored = StoredInputScale(torch.tensor(0.5)) if INPUT_SCHEMES[name].is_static else StoredInputScale()
    rounded = INPUT_SCHEMES[name](torch.zeros(2, 3, 40, dtype=torch.bfloat16), stored)

    assert (torch.bfloat16, 0) == (rounded.dtype, int(rounded.count_nonzero()))
