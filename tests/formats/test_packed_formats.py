"""Packed codes in LLM checkpoints: inference from labels, headers and the original, and refusals."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.making import chunk_of, compare, fp8_codes, numbers, open_pairing, read_whole, same_bits, store

import quanterr
from quanterr.formats import bnb_4bit
from quanterr.formats.shared import element_types
from quanterr.inspection import inspect
from quanterr.kernel.packing import CodePacking
from quanterr.pairing.model import Bucket
from quanterr.tensors.chunks import Chunk
from quanterr.tensors.workspace import Workspace

CPU = torch.device("cpu")
F8 = torch.float8_e4m3fn
GOLDEN = Path(__file__).parents[1] / "golden"


def random_bytes(*shape, seed=0):
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed)).to(torch.uint8)


def words(rows, cols):
    return torch.from_numpy(random_bytes(rows, 4 * cols).numpy().view(np.uint32).copy())


def planned_with(folder, shape, quantized, metadata=None, config=None, name="a.weight"):
    """Plan a comparison with an original that has one weight of that shape."""
    original = store(folder / "original.safetensors", {name: torch.zeros(shape)})
    path = folder / ("quantized" if config else "quantized.safetensors")
    return open_pairing(original, store(path, quantized, metadata, config))


def weight_of(folder, shape, quantized, metadata=None, config=None):
    with planned_with(folder, shape, quantized, metadata, config) as plan:
        assert [left.reason for left in plan.leftovers if left.bucket != Bucket.CONSUMED] == []
        return plan.pairs[0].quantized


def read_refusal(folder, shape, quantized, metadata=None, config=None):
    """Return why ``a.weight`` is not read."""
    with planned_with(folder, shape, quantized, metadata, config) as plan:
        assert plan.pairs == []
        return next(left.reason for left in plan.leftovers if left.name == "a.weight" and left.side == "quantized")


def codes_of_stream(stored, code_bits):
    """Return the codes of a stream of bytes, bit by bit."""
    stream = "".join(f"{byte:08b}"[::-1] for byte in stored)
    return [int(stream[i : i + code_bits][::-1], 2) for i in range(0, len(stream), code_bits)]


class TestStreams:
    @pytest.mark.parametrize("code_bits", range(1, 9))
    def test_streams_hold_codes_with_any_width_lowest_bits_first(self, code_bits):
        stored = random_bytes(3, 8 * code_bits, seed=code_bits)
        codes = CodePacking("dense", code_bits).unpack(stored, 0, 64)

        assert [codes_of_stream(row.tolist(), code_bits) for row in stored] == codes.tolist()

    @pytest.mark.parametrize(
        ("table", "name"), [(element_types.E2M1, "float4_e2m1fn"), (element_types.E2M3, "float6_e2m3fn")]
    )
    def test_small_floats_equal_ml_dtypes(self, table, name):
        import ml_dtypes

        codes = np.arange(len(table), dtype=np.uint8)

        assert same_bits(torch.from_numpy(codes.view(getattr(ml_dtypes, name)).astype(np.float32)), torch.tensor(table))


def mlx(code_bits, group, rows=4, cols=256):
    scale = 0.01 * torch.ones(rows, cols // group, dtype=torch.bfloat16)
    return {"a.weight": words(rows, cols * code_bits // 32), "a.scales": scale, "a.biases": -scale}


def mlx_config(**said):
    return {"quantization": said, "quantization_config": said}


class TestMLX:
    @pytest.mark.parametrize("code_bits", [1, 2, 3, 4, 5, 6, 8])
    @pytest.mark.parametrize("group", [32, 64, 128])
    def test_mlx_bits_and_group_follow_the_original_columns(self, tmp_path, code_bits, group):
        weight = weight_of(tmp_path, (4, 256), mlx(code_bits, group))

        assert (weight.code_bits, weight.block_size, weight.shape) == (code_bits, (1, group), (4, 256))
        assert weight.warnings == ()

    def test_mlx_bits_and_group_follow_the_original_against_config_json(self, tmp_path):
        weight = weight_of(tmp_path, (4, 256), mlx(8, 32), config=mlx_config(bits=4, group_size=64))

        assert (weight.code_bits, weight.block_size) == (8, (1, 32))
        assert "config.json declares no layer of 8 bits in groups of 32" in weight.warnings[0]

    def test_mlx_layer_may_have_another_name_in_config_json(self, tmp_path):
        config = mlx_config(bits=4, group_size=64, **{"language_model.model.a": {"bits": 8, "group_size": 32}})
        weight = weight_of(tmp_path, (4, 256), mlx(8, 32), config=config)

        assert weight.warnings == ()

    def test_mlx_original_with_inputs_first_is_read(self, tmp_path):
        name = "transformer.h.0.attn.c_attn"
        quantized = {key.replace("a.", f"{name}.", 1): part for key, part in mlx(4, 64, rows=128, cols=512).items()}
        with planned_with(tmp_path, (512, 128), quantized, name=f"{name}.weight") as plan:
            weight = plan.pairs[0].quantized

        assert (weight.code_bits, weight.shape) == (4, (128, 512))

    def test_mlx_default_group_raises_no_doubt(self, tmp_path):
        config = mlx_config(bits=4, group_size=None, a={"bits": 4, "group_size": None})
        weight = weight_of(tmp_path, (4, 256), mlx(4, 64), config=config)

        assert ((1, 64), ()) == (weight.block_size, weight.warnings)

    @pytest.mark.parametrize("shape", [(32, 1, 4), (32, 8, 3), (32, 16, 16)])
    def test_mlx_convolutions_have_their_inputs_last(self, tmp_path, shape):
        x = {"layers.0.mixer.conv1d.weight": torch.randn(shape, generator=torch.Generator().manual_seed(0))}
        report = compare(tmp_path, x, {name: w.transpose(1, 2).contiguous() for name, w in x.items()})

        assert ("pass", list(x)) == (report.verdict, [layer.layer_name for layer in report.lossless])

    @pytest.mark.parametrize(
        ("declared", "expected"),
        [
            ({"bits": 4, "group_size": 64}, (4, 64)),
            ({"bits": 4, "group_size": 64, "a": {"bits": 8, "group_size": 32}}, (8, 32)),
            ({"bits": 4, "group_size": 64, "b": {"bits": 8, "group_size": 32}}, (4, 64)),
            ({"bits": 4, "group_size": None}, (4, 64)),
            ({"bits": 8, "group_size": 64, "a": {"bits": None, "group_size": None, "mode": "affine"}}, (4, 64)),
        ],
    )
    def test_mlx_config_json_decides_without_an_original(self, tmp_path, declared, expected):
        stored = inspect(store(tmp_path / "quantized", mlx(4, 64), config=mlx_config(**declared))).weights[0]

        assert expected == (stored.code_bits, stored.block_size[1])

    def test_jang_config_decides_where_config_json_does_not(self, tmp_path):
        path = store(tmp_path / "quantized", mlx(4, 64), config={})
        jang = {"quantization": {"bit_widths_used": [2, 4, 8], "block_size": 64}}
        (path / "jang_config.json").write_text(json.dumps(jang))
        stored = inspect(path).weights[0]

        assert (4, 64) == (stored.code_bits, stored.block_size[1])

    def test_jangtq_needs_no_file_of_its_runtime(self, tmp_path):
        tensors = load_file(GOLDEN / "jangtq" / "layers.safetensors")
        path = store(tmp_path / "quantized", tensors, config={})
        (path / "jang_config.json").write_text(json.dumps({"mxtq_seed": 42, "quantization": {"block_size": 64}}))
        store(path / "jangtq_runtime.safetensors", {"signs.64.42": torch.ones(64)})
        report = quanterr.compare(GOLDEN / "jangtq" / "layers.expected.safetensors", path, device="cpu")

        assert ([], []) == (
            report.not_compared,
            [finding.code for finding in report.findings if finding.code == "unread_file"],
        )
        assert all(layer.snr_db > 120 for layer in report.layers)  # the file's values are rounded to float32

    def test_mlx_single_possibility_is_taken_without_original_and_config_json(self, tmp_path):
        stored = inspect(store(tmp_path / "quantized.safetensors", mlx(3, 32))).weights[0]

        assert (3, 32) == (stored.code_bits, stored.block_size[1])

    def test_mlx_ambiguous_layout_is_not_read_without_original_and_config_json(self, tmp_path):
        stored = inspect(store(tmp_path / "quantized.safetensors", mlx(4, 64))).weights[0]

        assert stored.format is None
        assert "could be 8 bits in groups of 32 or 4 bits in groups of 64 or 2 bits in groups of 128" in stored.reason

    def test_words_without_scales_are_not_codes(self, tmp_path):
        assert "U32 in the quantized" in read_refusal(tmp_path, (4, 256), {"a.weight": words(4, 32)})


class TestCompressedTensors:
    PARTS = {"a.weight_packed": random_bytes(4, 32), "a.weight_scale": random_bytes(4, 2) // 2}  # noqa: RUF012

    @pytest.mark.parametrize(("version", "doubted"), [("0.13.0", True), ("0.14.0", False), (None, False)])
    def test_mxfp4_from_version_0_13_is_doubted(self, tmp_path, version, doubted):
        config = {"quantization_config": {"quant_method": "compressed-tensors", "version": version}}
        weight = weight_of(tmp_path, (4, 64), self.PARTS, config=config)

        assert [doubted] == ["a quarter of each weight" in doubt for doubt in weight.warnings or ("",)]

    def test_compressed_tensors_global_scale_divides(self, tmp_path):
        codes, scale = random_bytes(1, 8), torch.ones(1, 1).to(F8)
        parts = {"a.weight_packed": codes, "a.weight_scale": scale, "a.weight_global_scale": torch.tensor([4.0])}
        with planned_with(tmp_path, (1, 16), {**parts, "a.input_global_scale": torch.tensor([8.0])}) as plan:
            actual = read_whole(plan.pairs[0].quantized)
        plain = [element_types.E2M1[code] / 4 for byte in codes[0].tolist() for code in (byte & 15, byte >> 4)]

        assert [plain] == actual.tolist()


class TestGptOss:
    @pytest.mark.parametrize("shape", [(2, 96, 64), (2, 64, 64)])
    def test_original_with_inputs_as_rows_is_transposed(self, tmp_path, shape):
        experts, rows, cols = shape
        blocks, scales = random_bytes(experts, rows, cols // 32, 16), 120 + random_bytes(experts, rows, cols // 32) % 8
        name = "model.layers.0.mlp.experts.down_proj"
        path = store(tmp_path / "quantized.safetensors", {f"{name}_blocks": blocks, f"{name}_scales": scales})
        original = torch.zeros(shape)
        with open_pairing(store(tmp_path / "zeros.safetensors", {name: original}), path) as plan:
            plain = read_whole(plan.pairs[0].quantized).view(shape)
        turned = {name: plain.transpose(1, 2).contiguous()}
        report = quanterr.compare(store(tmp_path / "original.safetensors", turned), path, device="cpu")

        assert {name: "gpt_oss_mxfp4"} == {layer.layer_name: layer.format for layer in report.lossless}


def nf4(**changed):
    """Return the parts of an NF4 weight, with changes to its state."""
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [6, 40]} | changed
    parts = {
        "a.weight": random_bytes(120, 1),
        "a.weight.absmax": torch.ones(4),
        "a.weight.quant_map": torch.linspace(-1, 1, 16),
        "a.weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }
    return parts


@pytest.mark.parametrize(("quant_type", "doubted"), [("nf4", False), ("fp4", True)])
def test_unknown_bitsandbytes_table_is_doubted(tmp_path, quant_type, doubted):
    parts = nf4() | {"a.weight.quant_map": torch.tensor(bnb_4bit.TABLES[quant_type])}
    weight = weight_of(tmp_path, (6, 40), parts)

    assert ["is not the nf4 table" in doubt for doubt in weight.warnings] == [True] * doubted


def test_bitsandbytes_state_without_a_type_is_doubted(tmp_path):
    parts = nf4(quant_type=None) | {"a.weight.quant_map": torch.tensor(bnb_4bit.TABLES["nf4"])}
    (doubt,) = weight_of(tmp_path, (6, 40), parts).warnings

    assert "declares no quant_type, without which bitsandbytes does not load it" in doubt


@pytest.mark.parametrize("table", [torch.zeros(16), torch.tensor([torch.nan, *range(15)])], ids=["alike", "nan"])
def test_damaged_bitsandbytes_table_is_compared_and_doubted(tmp_path, table):
    x = store(tmp_path / "x.safetensors", {"a.weight": torch.ones(6, 40)})
    y = store(tmp_path / "y.safetensors", nf4() | {"a.weight.quant_map": table})
    report = quanterr.compare(x, y, device="cpu")

    assert (6 * 40, None) == (report.layers[0].tensor_elements, report.layers[0].attainable_snr_db)
    assert [finding for finding in report.findings if "is not the nf4 table" in finding.message]


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float32, torch.float64])
def test_bitsandbytes_codes_are_read_from_any_dtype(tmp_path, dtype):
    parts, values = nf4(), []
    for n, codes in enumerate((parts["a.weight"], parts["a.weight"].view(-1).view(dtype).view(-1, 1))):
        (tmp_path / str(n)).mkdir()
        with planned_with(tmp_path / str(n), (6, 40), parts | {"a.weight": codes}) as plan:
            assert ["bnb_nf4"] == [pair.quantized.format for pair in plan.pairs]
            values.append(read_whole(plan.pairs[0].quantized))

    assert torch.equal(*values)


def torchao(class_name, **data):
    return {"a.weight": json.dumps({"_type": class_name, "_data": data}), "tensor_names": '["a.weight"]'}


def int8(rows=4, cols=64):
    return {"a._weight_qdata": random_bytes(rows, cols).view(torch.int8), "a._weight_scale": torch.ones(rows, 1)}


def words32(**changed):
    parts = {"qdata": torch.zeros(4, 8, dtype=torch.int32), "scale": torch.ones(2, 4)}
    parts |= {"zero_point": torch.zeros(2, 4, dtype=torch.int8)} | changed
    return {f"a._weight_{name}": part for name, part in parts.items()}


def ascii_bytes(text):
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def hqq(**changed):
    parts = {
        "a.W_q": random_bytes(4, 32),
        "a.scale": torch.ones(8, 1),
        "a.zero": torch.ones(8, 1),
        "a.shape": torch.tensor([4, 64]),
        "a.axis": torch.tensor(1, dtype=torch.int32),
        "a.group_size": torch.tensor(32, dtype=torch.int32),
        "a.nbits": torch.tensor(4, dtype=torch.int32),
        "a.packing": ascii_bytes("4bit_u8"),
        "a.view_as_float": torch.tensor(0, dtype=torch.uint8),
    }
    return parts | {f"a.{name}": part for name, part in changed.items()}


ONE = torch.tensor(1, dtype=torch.uint8)
PACKED = TestCompressedTensors.PARTS
MXFP4 = {"a.weight": random_bytes(4, 32), "a.weight_scale": random_bytes(4, 2) // 2}
NVFP4 = {"a.weight_packed": random_bytes(4, 32), "a.weight_scale": torch.ones(4, 4).to(F8)}
QUANTO = {
    "a.weight._data._data": random_bytes(4, 32),
    "a.weight._scale": torch.ones(8, 1),
    "a.weight._shift": torch.ones(8, 1),
}
INT8 = random_bytes(4, 64).view(torch.int8)
BLOCK = {"block_size": [1, 64]}
LISTED = ["qdata", "scale", "zero_point"]

REFUSED = {
    "mxfp4 with exponents of another block": (
        MXFP4 | {"a.weight_scale": random_bytes(4, 8)},
        None,
        "its scale a.weight_scale (U8 [4, 8]) does not fit a.weight (U8 [4, 32])",
    ),
    "mxfp4 with an unnecessary scale": (
        MXFP4 | {"a.weight_zero_point": torch.ones(1)},
        None,
        "unused: a.weight_zero_point",
    ),
    "packed codes of neither mxfp4 nor mxfp6": (
        PACKED | {"a.weight_scale": random_bytes(4, 8)},
        None,
        "neither of MXFP4 nor of MXFP6",
    ),
    "nvfp4 with a scale of another block": (
        NVFP4 | {"a.weight_scale": torch.ones(4, 8).to(F8), "a.weight_global_scale": torch.ones(1)},
        None,
        "its scale a.weight_scale (F8_E4M3 [4, 8]) does not fit a.weight_packed (U8 [4, 32])",
    ),
    "nvfp4 without a global scale": (
        NVFP4,
        None,
        "its global_scale is missing: U8 codes, but none of a.weight_global_scale is stored",
    ),
    "nvfp4 with scales of an unknown kind": (
        NVFP4 | {"a.weight_scale": random_bytes(4, 4), "a.weight_global_scale": torch.ones(1)},
        None,
        "its scale a.weight_scale (U8 [4, 4]) should be one of F8_E4M3",
    ),
    "nvfp4 with several global scales": (
        NVFP4 | {"a.weight_global_scale": torch.ones(4)},
        None,
        "its global scale a.weight_global_scale (F32 [4]) should be one",
    ),
    "bnb of another size": (
        nf4() | {"a.weight": random_bytes(100, 1)},
        None,
        "a.weight (U8 [100, 1]) should have 120 bytes for 240 codes, not 100",
    ),
    "bnb with too few scales": (
        nf4() | {"a.weight.absmax": torch.ones(3)},
        None,
        "a.weight.absmax (F32 [3]) should have 4 numbers, one per 64 of 240 elements, not 3",
    ),
    "bnb with a short table": (
        nf4() | {"a.weight.quant_map": torch.ones(8)},
        None,
        "a.weight.quant_map (F32 [8]) should have 16 values, not 8",
    ),
    "bnb with nested scales and no table of them": (
        nf4() | {"a.weight.absmax": random_bytes(4)},
        None,
        "a.weight.absmax (U8 [4]) are codes, but nested_absmax or nested_quant_map is missing",
    ),
    "bnb with nested scales of another block": (
        nf4(nested_blocksize=2, nested_offset=0.5)
        | {
            "a.weight.absmax": random_bytes(4),
            "a.weight.nested_absmax": torch.ones(1),
            "a.weight.nested_quant_map": torch.ones(256),
        },
        None,
        "a.weight.nested_absmax (F32 [1]) should have 2 numbers, one per 2 of 4 scales, not 1",
    ),
    "bnb with a state other than JSON": (
        nf4() | {"a.weight.quant_state.bitsandbytes__nf4": ascii_bytes("{nonsense")},
        None,
        "its quant_state a.weight.quant_state.bitsandbytes__nf4 (U8 [9]) is not valid UTF-8 JSON",
    ),
    "bnb with another type in its state": (nf4(quant_type="int4"), None, "declares quant_type int4, not nf4 or fp4"),
    "bnb with a list in its state": (nf4(quant_type=["nf4"]), None, "declares quant_type ['nf4'], not nf4 or fp4"),
    "bnb whose state has no shape": (nf4(shape="many"), None, "has no shape"),
    "bnb whose state tells no block": (nf4(blocksize=0), None, "has no usable blocksize"),
    "bnb in old tiles": (
        {"a.weight": INT8, "a.SCB": torch.ones(4), "a.weight_format": ONE},
        None,
        "its weight_format is not 0 (row major)",
    ),
    "bnb int8 with a scale for each column": (
        {"a.weight": INT8, "a.SCB": torch.ones(64)},
        None,
        "its SCB a.SCB (F32 [64]) should have one number for each row of a.weight (I8 [4, 64])",
    ),
    "mlx whose biases are missing": (
        {"a.weight": words(4, 8), "a.scales": torch.ones(4, 1)},
        None,
        "its bias is missing: U32 codes, but none of a.biases, a.qbiases, a.weight.bias is stored",
    ),
    "mlx with biases of another shape": (
        mlx(4, 64) | {"a.biases": torch.ones(4, 2)},
        None,
        "its biases a.biases (F32 [4, 2]) should have the shape of its scales",
    ),
    "mlx of no known group": (
        {"a.weight": words(4, 8), "a.scales": torch.ones(4, 7), "a.biases": torch.ones(4, 7)},
        None,
        "fit no group of 32, 64 or 128 columns of 1 to 8 bits",
    ),
    "mlx with a global scale": (
        {"a.weight": words(4, 8), "a.scales": random_bytes(4, 4), "a.global_scale": torch.ones(1)},
        None,
        "stored as mlx_nvfp4 (U32), but unused: a.global_scale",
    ),
    "mlx of no known float": (
        {"a.weight": words(4, 8), "a.scales": random_bytes(4, 8)},
        None,
        "are neither MXFP4 nor NVFP4 nor MXFP8",
    ),
    "quanto with a scale for each column": (
        {"a.weight._data": INT8, "a.weight._scale": torch.ones(1, 64)},
        None,
        "its scale a.weight._scale (F32 [1, 64]) should be one, or one for each row",
    ),
    "quanto of another size": (
        QUANTO,
        None,
        "hold 256 elements in groups of 32, but the original has the shape [6, 40]",
    ),
    "quanto with codes of no bits": (
        QUANTO | {"a.weight._data._data": random_bytes(8, 32)},
        None,
        "a.weight._data._data (U8 [8, 32]) should have half or a quarter as many rows as",
    ),
    "quanto with too few shifts": (
        QUANTO | {"a.weight._shift": torch.ones(4, 1)},
        None,
        "should have one number for each group of a.weight._data._data (U8 [4, 32])",
    ),
    "hqq with a quantized scale": (hqq(quant_scale=ONE), None, "its scale or zero point is itself quantized"),
    "hqq in an unknown packing": (
        hqq(packing=ascii_bytes("9bit_u8")),
        None,
        "its packing 9bit_u8 is not one of 8bit_u8, 4bit_u8, 3bit_32, 2bit_u8, 1bit_u8",
    ),
    "hqq of another dtype": (hqq(packing=ascii_bytes("3bit_32")), None, "should be I32, or floating"),
    "hqq of another size": (
        hqq(packing=ascii_bytes("2bit_u8")),
        None,
        "a.W_q (U8 [4, 32]) holds 512 codes of 2 bits, which is not a weight of [4, 64]",
    ),
    "hqq with too few scales": (
        hqq(scale=torch.ones(4, 1)),
        None,
        "a.scale (F32 [4, 1]) should have one number for each of 8 groups",
    ),
    "hqq of more bits than it packs": (
        hqq(nbits=torch.tensor(float("nan"))),
        None,
        "a.nbits (F32 []) declares nan bits, but its packing is 4bit_u8",
    ),
    "hqq along an invalid axis": (
        hqq(axis=torch.tensor(7, dtype=torch.int32)),
        None,
        "a.axis (I32 []) declares groups along axis 7",
    ),
    "hqq along another axis than its scale": (
        hqq(axis=torch.tensor(0, dtype=torch.int32)),
        None,
        "a.axis (I32 []) declares groups along axis 0, the shape of a.scale (F32 [8, 1]) implies axis 1",
    ),
    "hqq with scales that fit no axis": (
        {name: part for name, part in hqq(scale=torch.ones(8)).items() if name != "a.axis"},
        None,
        "the axis of its groups is unknown: a.scale (F32 [8]) is neither (1, groups) nor (groups, 1)",
    ),
    "hqq with misfitting groups": (
        hqq(group_size=torch.tensor(30, dtype=torch.int32)),
        None,
        "groups of 30 along axis 1 do not divide a weight of shape [4, 64]",
    ),
    "torchao without its header": (int8(), None, "the header (__metadata__) does not describe a.weight"),
    "torchao with a header other than JSON": (int8(), {"a.weight": "{"}, "its description in the header is not valid"),
    "torchao of an unknown type": (
        int8(),
        torchao("Int4PreshuffledTensor"),
        "the header declares Int4PreshuffledTensor, which is not supported; supported are Int8Tensor,",
    ),
    "torchao with a missing part": (
        {"a._weight_qdata": INT8},
        torchao("Int8Tensor", **BLOCK),
        "its scale is missing, which a torchao Int8Tensor needs",
    ),
    "torchao with a part over": (
        int8() | {"a._weight_per_tensor_scale": torch.ones(1)},
        torchao("Int8Tensor", **BLOCK),
        "unused: a._weight_per_tensor_scale",
    ),
    "torchao with an unknown part": (
        int8() | {"a._weight_permutation": torch.ones(1)},
        torchao("Int8Tensor", **BLOCK),
        "unused: a._weight_permutation",
    ),
    "torchao without a listed part": (
        int8(),
        {"a.weight": json.dumps({"_type": "Int8Tensor", "_data": BLOCK, "_tensor_data_names": LISTED})},
        "its zero_point is missing, which the header lists (_tensor_data_names)",
    ),
    "torchao of another block": (
        int8(),
        torchao("Int8Tensor", block_size=[1, 32]),
        "a._weight_scale (F32 [4, 1]) should have 8 numbers: one per 32 columns",
    ),
    "torchao with a strange block": (
        int8(),
        torchao("Int8Tensor", block_size=[2, 64]),
        "block_size [2, 64] for a._weight_qdata (I8 [4, 64]): neither groups of columns nor the whole tensor",
    ),
    "torchao for NPUs": (
        words32(zero_point=torch.zeros(2, 4)),
        torchao("Int4PlainInt32Tensor", block_size=[1, 32], shape=[4, 64]),
        "a._weight_zero_point (F32 [2, 4]) is not I8: made for NPUs",
    ),
    "torchao of other groups of words": (
        words32(),
        torchao("Int4PlainInt32Tensor", block_size=[1, 64], shape=[4, 64]),
        "a._weight_scale (F32 [2, 4]) should have the shape [1, 4]",
    ),
    "torchao of another shape of words": (
        words32(),
        torchao("Int4PlainInt32Tensor", block_size=[1, 32], shape=[4, 32]),
        "the header declares block_size [1, 32] and shape [4, 32] for a._weight_qdata (I32 [4, 8])",
    ),
    "torchao without a block": (int8(), torchao("Int8Tensor"), "the header declares block_size None"),
    "torchao of other codes": (
        int8() | {"a._weight_qdata": random_bytes(4, 64)},
        torchao("Int8Tensor", **BLOCK),
        "codes of torchao_int8 are I8 (rows, cols), not a._weight_qdata (U8 [4, 64])",
    ),
    "torchao with unsupported elements": (
        int8(),
        torchao("MXTensor", elem_dtype="fp6_e1m4", block_size=32),
        "the header declares elements fp6_e1m4 in blocks of 32, which is not supported",
    ),
    "torchao with scales other than tiles": (
        {"a._weight_qdata": random_bytes(4, 32), "a._weight_scale": torch.ones(4, 4).to(F8)},
        torchao("NVFP4Tensor", block_size=16, is_swizzled_scales=True),
        "should have 512 numbers, in tiles: one per 16 columns",
    ),
    "torchao int4 with scales in rows": (
        {"a._weight_qdata": INT8, "a._weight_scale": torch.ones(4, 2), "a._weight_zero_point": torch.ones(4, 2)},
        torchao("Int4Tensor", **BLOCK, shape=[4, 128]),
        "a._weight_scale (F32 [4, 2]) should have the shape [2, 4]: groups of 64 columns",
    ),
    "torchao tiles too small": (
        {
            "a._weight_qdata": torch.zeros(1, 8, 32, 4, dtype=torch.int32),
            "a._weight_scale_and_zero": torch.ones(16, 8, 2),
        },
        torchao("Int4TilePackedTo4dTensor", **BLOCK, shape=[9, 64]),
        "the header declares shape [9, 64] and block_size [1, 64], which a._weight_qdata (I32 [1, 8, 32, 4]) "
        "cannot hold",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("quantized", "metadata", "says"), REFUSED.values(), ids=REFUSED)
def test_unsupported_tensors_are_refused(tmp_path, quantized, metadata, says):
    reason = read_refusal(tmp_path, (6, 40), quantized, metadata)

    assert says in reason


def test_packed_quanto_weights_are_recognized_without_an_original(tmp_path):
    stored = inspect(store(tmp_path / "quantized.safetensors", QUANTO)).weights[0]

    assert (stored.format, stored.elements, stored.code_bits) == ("quanto_int4", 256, 4)
    assert "shaped as groups" in stored.evidence[0]


def test_expert_bias_does_not_belong_to_the_weight(tmp_path):
    name = "mlp.experts.down_proj"
    parts = {f"{name}_blocks": random_bytes(2, 4, 2, 16), f"{name}_scales": random_bytes(2, 4, 2)}
    inspected = inspect(store(tmp_path / "quantized.safetensors", parts | {f"{name}_bias": numbers(2, 4)}))

    assert {name: "gpt_oss_mxfp4", f"{name}_bias": "dense"} == {w.name: w.format for w in inspected.weights}


def test_workspace_serves_weights_held_and_read_in_turns(tmp_path):
    stored, plain = {}, {}
    for axis in (0, 1):
        factor = torch.full((8, 1) if axis else (1, 8), 2.0**axis)
        parts = hqq(axis=torch.tensor(axis, dtype=torch.int32), scale=factor, zero=factor)
        stored |= {name.replace("a.", f"{axis}.", 1): part for name, part in parts.items()}
        codes = parts["a.W_q"].view(-1)
        plain[f"{axis}.weight"] = (torch.cat([codes >> 4, codes & 15]).float() - 2**axis).view(4, 64) * 2**axis
    workspace = Workspace()
    original = store(tmp_path / "original.safetensors", {name: torch.zeros(4, 64) for name in plain})
    with open_pairing(original, store(tmp_path / "quantized.safetensors", stored)) as plan:
        for pair in [*plan.pairs, *plan.pairs]:
            actual = chunk_of(pair.quantized, Chunk(0, 4, 0, 64), workspace)

            assert same_bits(plain[pair.name], actual), pair.name


@pytest.mark.parametrize("config", [None, {"quantization_config": {"quant_method": "quanto", "weights": "int2"}}])
def test_ambiguous_quanto_width_follows_config_or_original(tmp_path, config):
    codes = torch.randint(0, 4, (2, 64), generator=torch.Generator().manual_seed(0))
    scale, shift = torch.tensor([[0.1], [0.2]]), torch.tensor([[0.15], [0.3]])
    parts = {
        "a.weight._data._data": (codes[:1] | codes[1:] << 2).to(torch.uint8),
        "a.weight._scale": scale,
        "a.weight._shift": shift,
    }
    report = compare(tmp_path, {"a.weight": scale * codes - shift}, parts, config=config)

    assert ["quanto_int2"] == [layer.format for layer in report.lossless]


def test_torchao_parameters_may_have_any_name(tmp_path):
    stack = numbers(3, 40, 64).float()
    parts = {"experts._up_proj_qdata": fp8_codes(3, 40, 64), "experts._up_proj_scale": torch.full((3, 40, 1), 0.5)}
    description = {
        "_type": "Float8Tensor",
        "_data": {"block_size": [1, 1, 64]},
        "_tensor_data_names": ["qdata", "scale"],
    }
    report = compare(tmp_path, {"experts.up_proj": stack}, parts, {"experts.up_proj": json.dumps(description)})

    assert [] == report.not_compared
    assert ["torchao_fp8"] == [layer.format for layer in report.layers]


class TestUndeclared:
    """Only the original shows the layout of these codes."""

    @pytest.mark.parametrize(
        ("case", "format"),
        [
            ("mxfp6_e2m3/quark", "mxfp6_e2m3"),
            ("mxfp6_e3m2/quark", "mxfp6_e3m2"),
            ("quark_fp4/amdfp4", "quark_fp4"),
            ("sdnq/floats", "sdnq"),
            ("sdnq/rotated", "sdnq"),
        ],
    )
    def test_undeclared_layouts_are_read_as_the_original_confirms(self, case, format):
        path = GOLDEN / case
        report = quanterr.compare(f"{path}.expected.safetensors", path / "model.safetensors", device="cpu")
        small = [layer for layer in report.layers if layer.relative_error > 1e-5]
        formats = {layer.format for layer in (*report.layers, *report.lossless)}

        assert ([], {format}) == (small, formats)
        assert "pass" == report.verdict
        assert not [finding for finding in report.findings if finding.code == "ambiguous_layout"]

    def test_e5m3_scales_are_not_exponents(self, tmp_path):
        weight = {"dtype": "fp4", "group_size": 32, "scale_format": "e5m3"}
        config = {"quantization_config": {"quant_method": "quark", "global_quant_config": {"weight": weight}}}
        stored = {"a.weight": random_bytes(4, 32), "a.weight_scale": random_bytes(4, 2)}

        assert "quark_fp4" == weight_of(tmp_path, (4, 64), stored, config=config).format


W4AFP8 = {"quantization_config": {"quant_method": "w4afp8", "weight_block_size": [128, 128]}}


class TestW4afp8:
    def store_tensors(self, **parts):
        codes = torch.full((4, 128), 0x21, dtype=torch.int8)
        return {"a.weight": codes, "a.weight_scale_inv": torch.ones(4, 2)} | parts

    def test_w4afp8_is_recognized_by_configuration_or_original(self, tmp_path):
        assert weight_of(tmp_path, (4, 256), self.store_tensors(), config={}).format == "w4afp8"

    def test_int8_blocks_are_the_default_without_original_and_configuration(self, tmp_path):
        assert weight_of(tmp_path, (4, 128), self.store_tensors(), config={}).format == "int8_block"

    def test_w4afp8_scale_for_other_groups_is_refused(self, tmp_path):
        stored = self.store_tensors(**{"a.weight_scale_inv": torch.ones(4, 4)})
        path = store(tmp_path / "y", stored, config=W4AFP8)
        with open_pairing(store(tmp_path / "x.safetensors", {"a.weight": torch.zeros(4, 256)}), path) as plan:
            reasons = {left.reason for left in plan.leftovers if left.side == "quantized"}

        assert any("a.weight_scale_inv (F32 [4, 4]) should be [4, 2]" in reason for reason in reasons)

    def test_w4afp8_other_layers_are_fp8(self, tmp_path):
        fp8 = {"b.weight": torch.ones(128, 128).to(torch.float8_e4m3fn), "b.weight_scale_inv": torch.ones(1, 1)}
        inspection = quanterr.inspect(
            store(tmp_path / "y", self.store_tensors() | fp8, config=W4AFP8 | {"model_type": "x"})
        )

        assert ({"w4afp8", "fp8_tensor"}, []) == (set(inspection.formats), inspection.findings)


def test_sdnq_tables_are_recognized_by_their_shape(tmp_path):
    """The file has no config.json; a table for the whole weight needs an original."""
    tensors = load_file(GOLDEN / "sdnq" / "codebooks" / "model.safetensors")
    values = load_file(GOLDEN / "sdnq" / "codebooks.expected.safetensors")
    path = store(tmp_path / "alone.safetensors", tensors)
    with open_pairing(store(tmp_path / "original.safetensors", values), path) as plan:
        decoded = {pair.name: read_whole(pair.quantized) for pair in plan.pairs}

    assert [] == [
        name for name, value in values.items() if name != "svd.weight" and not same_bits(value, decoded[name])
    ]
    reasons = {weight.name: weight.reason for weight in quanterr.inspect(path).weights if weight.reason}
    assert {"t_uint4.weight"} == set(reasons)
    assert "is unknown: give an original" in reasons["t_uint4.weight"]


@pytest.mark.parametrize(
    ("role", "change", "says"),
    [
        ("pairs", lambda t: t.clone().fill_(1), "should name each of 64 columns of a block once in each rotation"),
        ("pairs", lambda t: t[:, :64], "a.pairs (I16 [8, 64]) does not fit 128 columns"),
        ("theta", lambda t: t[:3], "a.pairs (I16 [8, 128]) does not fit 128 columns and a.theta (F16 [3, 64])"),
        ("channel_scales", lambda t: t[:, 1:], "a.channel_scales (F16 [1, 127]) does not fit 128 columns"),
        ("qzeros", lambda t: t[:1], "should have a row for each block of 128 columns"),
        ("scales", lambda t: t[:, 1:], "should have eight numbers in a row for each word"),
    ],
)
def test_misfitting_paroquant_parts_are_refused(tmp_path, role, change, says):
    tensors = load_file(GOLDEN / "paroquant" / "layers" / "model.safetensors")
    tensors[f"a.{role}"] = change(tensors[f"a.{role}"]).contiguous()
    config = {"quantization_config": {"quant_method": "paroquant"}}
    reasons = {weight.name: weight.reason for weight in inspect(store(tmp_path / "y", tensors, config=config)).weights}

    assert says in reasons["a.weight"]
    assert not reasons["b.weight"]


@pytest.mark.parametrize(
    ("role", "change", "says"),
    [
        ("B", lambda t: t[:, 1:], "should have two words for each of groups.s_channel (F32 [1, 64])"),
        ("s_group", lambda t: t[:, 1:], "should have groups of one size of 64 columns, and 64 numbers for each"),
        ("s_group", lambda t: torch.ones(3, 64).half(), "should have groups of one size of 64 columns"),
    ],
)
def test_misfitting_qqq_parts_are_refused(tmp_path, role, change, says):
    tensors = load_file(GOLDEN / "qqq" / "layers" / "model.safetensors")
    tensors[f"groups.{role}"] = change(tensors[f"groups.{role}"]).contiguous()
    config = {"quantization_config": {"quant_method": "qqq"}}
    reasons = {weight.name: weight.reason for weight in inspect(store(tmp_path / "y", tensors, config=config)).weights}

    assert says in reasons["groups.weight"]
    assert not reasons["channel.weight"]


SIDECAR = "model.safetensors.index.json.meta.json"


@pytest.mark.parametrize(
    ("tensors", "declared", "says"),
    [
        ({}, None, f"{SIDECAR} does not describe uint4: its method is unknown"),
        ({}, {"packing": "5bit_32"}, "its packing 5bit_32 is not one of 8bit_u8"),
        ({}, {"shape": [64]}, "declares shape [64], not rows and columns"),
        ({}, {"group_size": 48}, "declares group_size 48 and axis 1 for 16 × 64"),
        ({}, {"axis": 0}, "declares group_size 32 and axis 0 for 16 × 64"),
        ({}, {"shape": [8, 64]}, "does not hold 8 × 64 codes of 4 bits"),
        ({"scale2": torch.ones(2, 1, 32)}, {}, "tiles of rows and columns are not supported"),
        ({"scale.s": torch.ones(1, 3)}, {}, "should be one scale for each of 32 groups"),
        ({"zero": torch.ones(32, 1)}, {}, "should be one zero for each of 32 groups"),
    ],
)
def test_misfitting_sinq_parts_are_refused(tmp_path, tensors, declared, says):
    case = GOLDEN / "sinq" / "layers"
    stored = load_file(case / "model.safetensors") | {f"uint4.meta.{name}": part for name, part in tensors.items()}
    path = store(tmp_path / "y", stored, config={"quantization_config": {"quant_method": "sinq"}})
    settings = json.loads((case / SIDECAR).read_text())
    settings["uint4"]["meta"] |= declared or {}
    (path / SIDECAR).write_text(json.dumps(settings if declared is not None else settings | {"uint4": {}}))
    reasons = {weight.name: weight.reason for weight in inspect(path).weights}

    assert says in reasons["uint4.weight"]
    assert not reasons["nf4.weight"]
