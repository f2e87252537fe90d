"""Layouts of quantized diffusion models, as far as golden files do not cover them."""

import json

import numpy as np
import pytest
import torch
from support.making import (
    ALL_ROWS,
    chunk_of,
    compare,
    fp8_codes,
    int8_codes,
    label,
    numbers,
    open_pairing,
    read_whole,
    same_bits,
    store,
)

import quanterr
from quanterr.formats.shared.adanorm_rows import find_stored_rows
from quanterr.kernel.rotation import rotate
from quanterr.tensors.chunks import Cut
from quanterr.tensors.workspace import Workspace

CPU = torch.device("cpu")
HALF = torch.bfloat16


def recognize(folder, tensors, shape, name="a.weight", metadata=None):
    """Return the weight of that name, or why it is not read."""
    original = store(folder / "original.safetensors", {name: torch.zeros(shape), "b.weight": numbers(2, 32)})
    quantized = store(folder / "quantized.safetensors", {"b.weight": numbers(2, 32), **tensors}, metadata)
    with open_pairing(original, quantized) as plan:
        quantizeds = [pair.quantized for pair in plan.pairs if pair.name == name]
        left = [leftover.reason for leftover in plan.leftovers if leftover.name == name]
    return quantizeds[0] if quantizeds else left[0]


def doubts_of(report):
    return [finding.message for finding in report.findings if finding.code == "ambiguous_layout"]


def w4a4(**changed):
    """Return a weight of 4 × 64 in convrot_w4a4."""
    fields = {"format": "convrot_w4a4", "convrot_groupsize": 64}
    return {"a.weight": int8_codes(4, 32), "a.weight_scale": torch.ones(4), "a.comfy_quant": label(**fields)} | changed


def w4a8(**changed):
    """Return a weight of 4 × 64 in asym_w4a8_int8."""
    fields = {"format": "asym_w4a8_int8", "group_size": 16, "convrot_groupsize": 64}
    return {
        "a.weight": int8_codes(4, 32),
        "a.weight_s_rel": torch.ones(4, 4),
        "a.weight_s_channel": torch.ones(4),
        "a.comfy_quant": label(**fields),
    } | changed


def awq(**changed):
    """Return a weight of 4 × 128 in awq_w4a16."""
    return {
        "a.weight": int8_codes(4, 64),
        "a.weight_scale": torch.ones(2, 4),
        "a.weight_zero": torch.ones(2, 4),
        "a.comfy_quant": label(format="awq_w4a16", group_size=64),
    } | changed


def svd(**changed):
    """Return a weight of 4 × 64 in svdquant_w4a4."""
    return {
        "a.weight": int8_codes(4, 32),
        "a.weight_scale": torch.ones(1, 4),
        "a.smooth_factor": torch.ones(64),
        "a.proj_down": torch.ones(64, 2),
        "a.proj_up": torch.ones(4, 2),
        "a.comfy_quant": label(format="svdquant_w4a4"),
    } | changed


def flat(**changed):
    """Return a weight of 4 × 32 in convert_to_quant's NF4."""
    return {
        "a.weight": torch.zeros(64, dtype=torch.uint8),
        "a.absmax": torch.ones(2),
        "a.comfy_quant": label(format="bnb_nf4"),
    } | changed


def w4a4_of_nunchaku(module="a", rows=128, cols=128, **changed):
    """Return a weight in Nunchaku's order with only zero codes."""
    parts = {
        "qweight": torch.zeros(rows, cols // 2, dtype=torch.int8),
        "wscales": torch.ones(cols // 64, rows, dtype=HALF),
        "smooth": torch.ones(cols, dtype=HALF),
        "smooth_orig": torch.ones(cols, dtype=HALF),
        "lora_down": torch.zeros(cols, 16, dtype=HALF),
        "lora_up": torch.zeros(rows, 16, dtype=HALF),
    } | changed
    return {f"{module}.{name}": tensor for name, tensor in parts.items() if tensor is not None}


def awq_of_nunchaku(module="a", rows=24, **changed):
    """Return a modulation layer of 64 columns in Nunchaku's order."""
    return {
        f"{module}.qweight": int8_codes(rows // 4, 4 * 32).view(torch.int32),
        f"{module}.wscales": numbers(2, rows),
        f"{module}.wzeros": numbers(2, rows),
    } | changed


def bf16(*shape):
    return torch.ones(shape, dtype=HALF)


def scale_layer(said, codes=torch.float8_e4m3fn, **fields):
    """Return a labelled layer of 4 × 64 codes with a scale."""
    return {
        "a.weight": int8_codes(4, 64).view(codes),
        "a.weight_scale": torch.ones(4, 1),
        "a.comfy_quant": label(format=said, **fields),
    }


REFUSED = {
    "fp8, another shape than the label's": (
        scale_layer("float8_e4m3fn", orig_shape=[4, 32]),
        (4, 64),
        "the label's orig_shape is [4, 32], but the codes are a.weight (F8_E4M3 [4, 64])",
    ),
    "int8, another shape than the label's": (
        scale_layer("int8_tensorwise", torch.int8, orig_shape=[64, 4]),
        (4, 64),
        "the label's orig_shape is [64, 4], but the codes are a.weight (I8 [4, 64])",
    ),
    "rotated int8, another shape than the label's": (
        scale_layer("int8_tensorwise", torch.int8, convrot=True, convrot_groupsize=64, orig_shape=[4, 48]),
        (4, 64),
        "the label's orig_shape is [4, 48], but the codes are a.weight (I8 [4, 64])",
    ),
    "convrot_w4a4, a scale per block": (
        w4a4(**{"a.weight_scale": torch.ones(4, 2)}),
        (4, 64),
        "its scale a.weight_scale (F32 [4, 2]) should have one number for each row of a.weight (I8 [4, 32])",
    ),
    "convrot_w4a4 with misfitting groups": (
        w4a4(**{"a.comfy_quant": label(format="convrot_w4a4")}),
        (4, 64),
        "rotated in groups of 256, which is not a power of two that divides 64 columns",
    ),
    "convrot_w4a4, another shape than the label's": (
        w4a4(**{"a.comfy_quant": label(format="convrot_w4a4", convrot_groupsize=64, orig_shape=[4, 48])}),
        (4, 64),
        "the label's orig_shape is [4, 48], the original's shape [4, 64]",
    ),
    "convrot_w4a4, an unused part": (
        w4a4(**{"a.weight_offset": torch.ones(4)}),
        (4, 64),
        "unused: a.weight_offset",
    ),
    "convrot_w4a4 for another number of columns": (w4a4(), (4, 32), "shape [4, 32] in the original, [4, 64] (I8)"),
    "asym_w4a8_int8 without its groups' scales": (
        {name: tensor for name, tensor in w4a8().items() if name != "a.weight_s_rel"},
        (4, 64),
        "its s_rel is missing: I8 codes, but none of a.weight_s_rel is stored",
    ),
    "asym_w4a8_int8 with a scale of other rows": (
        w4a8(**{"a.weight_s_channel": torch.ones(5)}),
        (4, 64),
        "its scales a.weight_s_rel (F32 [4, 4]) and a.weight_s_channel (F32 [5]) should have a row of groups, and one",
    ),
    "asym_w4a8_int8 of neither 4 nor 6 bits": (
        w4a8(**{"a.weight": int8_codes(4, 40)}),
        (4, 64),
        "a.weight (I8 [4, 40]) with scales a.weight_s_rel (F32 [4, 4]) in groups of 16 are not 64 columns of 4 or 6",
    ),
    "asym_w4a8_int8 with a codebook and 6 bits": (
        w4a8(**{"a.weight": int8_codes(4, 48), "a.weight_codebook": torch.ones(16)}),
        (4, 64),
        "a.weight_codebook (F32 [16]) should be [16] for 4-bit codes; these have 6",
    ),
    "asym_w4a8_int8, a correction of another shape": (
        w4a8(**{"a.weight_correction": torch.ones(4, 3)}),
        (4, 64),
        "a.weight_correction (F32 [4, 3]) should be [4, 4] for 4-bit codes",
    ),
    "asym_w4a8_int8, labelled otherwise": (
        w4a8(**{"a.comfy_quant": label(format="int8_tensorwise")}),
        (4, 64),
        "comfy_quant tensor declares int8_tensorwise, but the codes are I8 [4, 32]",
    ),
    "awq_w4a16, scales in rows": (
        awq(**{"a.weight_scale": torch.ones(4, 2), "a.weight_zero": torch.ones(4, 2)}),
        (4, 128),
        "its scale a.weight_scale (F32 [4, 2]) and zero a.weight_zero (F32 [4, 2]) should be [groups of columns, rows]",
    ),
    "awq_w4a16, two zeros": (
        awq(**{"a.weight_zeros": torch.ones(2, 4)}),
        (4, 128),
        "two tensors could be its zero: a.weight_zero (F32 [2, 4]) and a.weight_zeros (F32 [2, 4])",
    ),
    "svdquant_w4a4 without the branch": (
        {name: tensor for name, tensor in svd().items() if "proj" not in name},
        (4, 64),
        "its up is missing: I8 codes, but none of a.weight_proj_up, a.proj_up is stored",
    ),
    "svdquant_w4a4, two smoothings": (
        svd(**{"a.weight_smooth_factor": torch.ones(64)}),
        (4, 64),
        "two tensors could be its smooth: a.weight_smooth_factor (F32 [64]) and a.smooth_factor (F32 [64])",
    ),
    "svdquant_w4a4, scales in rows": (
        svd(**{"a.weight_scale": torch.ones(4, 1)}),
        (4, 64),
        "a.weight_scale (F32 [4, 1]) should be [1, 4] for codes a.weight (I8 [4, 32])",
    ),
    "svdquant_w4a4, another basis": (
        svd(**{"a.comfy_quant": label(format="svdquant_w4a4", lowrank_branch_input_basis="rotated")}),
        (4, 64),
        "lowrank_branch_input_basis rotated is neither raw nor post_smoothing",
    ),
    "svdquant_w4a4, half a group of columns": (
        svd(**{"a.weight": int8_codes(4, 16)}),
        (4, 32),
        "SVDQuant codes are (rows, cols / 2) with cols in groups of 64, or in tiles",
    ),
    "flat codes without a label": (
        {name: tensor for name, tensor in flat().items() if name != "a.comfy_quant"},
        (4, 32),
        "4-bit codes a.weight (U8 [64]) with a.absmax (F32 [2]), but no label names their table: bnb_af4, bnb_fp4",
    ),
    "flat codes of another number": (
        flat(),
        (4, 31),
        "a weight of [4, 31] needs 62 bytes and 2 absmax (one for 64 elements), found a.weight (U8 [64])",
    ),
    "flat codes of another block": (
        flat(**{"a.comfy_quant": label(format="bnb_nf4", group_size=32)}),
        (4, 32),
        "a weight of [4, 32] needs 64 bytes and 4 absmax (one for 32 elements)",
    ),
    "Nunchaku's codes without padding": (
        w4a4_of_nunchaku(rows=96),
        (96, 128),
        "Nunchaku codes are (rows, cols / 2), both in multiples of 128, not a.qweight (I8 [96, 64])",
    ),
    "Nunchaku's scales of another group": (
        w4a4_of_nunchaku(wscales=bf16(4, 128)),
        (128, 128),
        "a.wscales (BF16 [4, 128]) should be [2, 128] for codes a.qweight (I8 [128, 64])",
    ),
    "Nunchaku's rank": (
        w4a4_of_nunchaku(lora_down=bf16(128, 8), lora_up=bf16(128, 8)),
        (128, 128),
        "a.lora_down (BF16 [128, 8]) should have a rank in multiples of 16",
    ),
    "Nunchaku's branch of two ranks": (
        w4a4_of_nunchaku(lora_up=bf16(128, 32)),
        (128, 128),
        "a.lora_up (BF16 [128, 32]) should be [128, 16] for codes a.qweight",
    ),
    "Nunchaku's tensor scale with integers": (
        w4a4_of_nunchaku(wtscale=bf16(1)),
        (128, 128),
        "a.wtscale (BF16 [1]) is not expected with int4 codes",
    ),
    "Nunchaku's codes without their scales": (
        w4a4_of_nunchaku(wscales=None),
        (128, 128),
        "stored as a.lora_down (BF16 [128, 16]), a.lora_up (BF16 [128, 16]), a.smooth (BF16 [128])",
    ),
    "Nunchaku's AWQ with half a group": (
        awq_of_nunchaku(**{"a.qweight": torch.zeros(6, 16, dtype=torch.int32)}),
        (24, 32),
        "Nunchaku's AWQ codes are (rows / 4, cols / 2), cols in multiples of 64, not a.qweight (I32 [6, 16])",
    ),
    "Nunchaku's AWQ with other rows": (
        awq_of_nunchaku(**{"a.wzeros": bf16(2, 20)}),
        (24, 64),
        "its scale a.wscales (BF16 [2, 24]) and zero a.wzeros (BF16 [2, 20]) should be [1 or more, 24]",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("said", "codes"), [("float8_e4m3fn", torch.float8_e4m3fn), ("int8_tensorwise", torch.int8)])
def test_label_with_the_shape_for_unpadded_codes_is_right(tmp_path, said, codes):
    report = compare(tmp_path, {"a.weight": bf16(4, 64)}, scale_layer(said, codes, orig_shape=[4, 64]))

    assert ["a.weight"] == [layer.layer_name for layer in report.layers]
    assert [] == report.not_compared


@pytest.mark.parametrize(("tensors", "shape", "says"), REFUSED.values(), ids=REFUSED)
def test_unsupported_tensors_are_refused(tmp_path, tensors, shape, says):
    reason = recognize(tmp_path, tensors, shape)

    assert isinstance(reason, str)
    assert says in reason


TAKEN = {
    "convrot_w4a4": (w4a4(), (4, 64)),
    "asym_w4a8_int8": (w4a8(), (4, 64)),
    "awq_w4a16": (awq(), (4, 128)),
    "svdquant_w4a4": (svd(), (4, 64)),
    "ctq_nf4": (flat(), (4, 32)),
    "nunchaku_int4": (w4a4_of_nunchaku(), (128, 128)),
    "nunchaku_awq": (awq_of_nunchaku(), (24, 64)),
}


@pytest.mark.parametrize(("format", "tensors", "shape"), [(name, *taken) for name, taken in TAKEN.items()], ids=TAKEN)
def test_supported_tensors_are_recognized(tmp_path, format, tensors, shape):
    weight = recognize(tmp_path, tensors, shape)

    assert (format, shape) == (weight.format, weight.shape)
    assert weight.warnings == ()


def test_inspection_reports_flat_codes_without_a_shape(tmp_path):
    report = quanterr.inspect(store(tmp_path / "quantized.safetensors", flat()))
    messages = [finding.message for finding in report.findings if "its shape is not stored" in finding.message]

    assert messages


def test_label_gives_flat_codes_a_shape(tmp_path):
    labels = label(format="bnb_nf4", orig_shape=[4, 32])
    report = quanterr.inspect(store(tmp_path / "quantized.safetensors", flat(**{"a.comfy_quant": labels})))

    assert [("ctq_nf4", [4, 32])] == [(weight.format, weight.shape) for weight in report.weights]


class TestDoubts:
    def test_correction_ignored_by_comfyui_is_doubted(self, tmp_path):
        weight = recognize(tmp_path, w4a8(**{"a.weight_correction": torch.ones(4, 4)}), (4, 64))

        assert [doubt for doubt in weight.warnings if "ComfyUI 0.30 leaves it out" in doubt]

    def test_group_size_contradicted_by_shapes_is_doubted(self, tmp_path):
        labels = label(format="awq_w4a16", group_size=32)
        weight = recognize(tmp_path, awq(**{"a.comfy_quant": labels}), (4, 128))

        warning = "the comfy_quant tensor declares group_size 32, the shapes 64; the shapes were used"
        assert (warning,) == weight.warnings

    def test_header_contradicted_by_nunchaku_scales_is_doubted(self, tmp_path):
        config = {"quantization_config": json.dumps({"method": "svdquant", "weight": {"dtype": "fp4_e2m1_all"}})}
        weight = recognize(tmp_path, w4a4_of_nunchaku(), (128, 128), metadata=config)

        assert 1 == len(weight.warnings)
        assert "declares fp4_e2m1_all, but a.wscales (BF16 [2, 128]) scales int4 codes" in weight.warnings[0]

    @pytest.mark.parametrize("text", ['{"weight": {"dtype": "int4"}}', "{", "[]", '{"weight": 4}', "{}"])
    def test_matching_or_missing_header_is_not_doubted(self, tmp_path, text):
        weight = recognize(tmp_path, w4a4_of_nunchaku(), (128, 128), metadata={"quantization_config": text})

        assert weight.warnings == ()


def hadamard(size):
    """Return the matrix of a rotation, made by its definition."""
    small = torch.tensor([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]], dtype=torch.float64)
    if size.bit_length() % 2 == 0:
        small = torch.tensor([[1, 1], [1, -1]], dtype=torch.float64)
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.kron(matrix, small)
    return matrix / size**0.5


@pytest.mark.parametrize("size", [2, 4, 8, 16, 32, 64, 128, 256, 512, 1024])
def test_rotation_is_undone_by_its_matrix(size):
    x = numbers(3, 2 * size, dtype=torch.float32)
    expected = (x.double().view(-1, size) @ hadamard(size)).view(x.shape).float()

    assert torch.allclose(expected, rotate(x.clone(), size), rtol=0, atol=1e-7 * float(x.abs().max()))


def quantized_rows(x, steps):
    """Return codes and one scale per row, for integers up to ``steps``."""
    scale = x.abs().amax(1, keepdim=True) / steps
    return (x / scale).round().to(torch.int8), scale


class TestReadings:
    """The original decides between readings that neither label nor shapes decide."""

    @pytest.mark.parametrize("size", [16, 64, 256])
    def test_undeclared_rotation_is_detected(self, tmp_path, size):
        x = numbers(64, 256, dtype=torch.float32)
        rotated = (x.double().view(64, -1, size) @ hadamard(size)).view(64, 256).float()
        codes, scale = quantized_rows(rotated, 127)
        report = compare(tmp_path, {"a.weight": x}, {"a.weight": codes, "a.weight_scale": scale})

        assert [("int8_convrot", True)] == [(layer.format, layer.snr_db > 35) for layer in report.layers]
        assert (
            f"read as codes I8, scale a.weight_scale (F32 [64, 1]): one scale per row; rotated in groups of {size}"
            in (doubts_of(report)[0])
        )

    def test_missing_rotation_despite_its_label_is_detected(self, tmp_path):
        x = numbers(64, 256, dtype=torch.float32)
        codes, scale = quantized_rows(x, 127)
        labels = label(format="int8_tensorwise", convrot=True)
        tensors = {"a.weight": codes, "a.weight_scale": scale, "a.comfy_quant": labels}
        report = compare(tmp_path, {"a.weight": x}, tensors)

        (finding,) = (each for each in report.findings if each.code == "wrong_convention")
        assert [("int8_convrot", True)] == [(layer.format, layer.snr_db < 0) for layer in report.layers]
        assert "one scale per row; rotated" in finding.evidence["prescribed"]
        assert finding.evidence["snr_db"] < 0 < 35 < finding.evidence["snr_db_other"]
        assert report.verdict == "inconclusive"

    def test_codes_wrong_in_either_reading_are_inconclusive(self, tmp_path):
        x = numbers(64, 256, dtype=torch.float32)
        codes, scale = quantized_rows(numbers(64, 256, seed=1, dtype=torch.float32), 127)
        report = compare(tmp_path, {"a.weight": x}, {"a.weight": codes, "a.weight_scale": scale})

        assert ["int8_row"] == [layer.format for layer in report.layers]
        assert doubts_of(report) == []
        assert report.verdict == "inconclusive"

    def test_interleaved_modulation_rows_are_detected(self, tmp_path):
        x = numbers(48, 64, dtype=torch.float32)
        codes, scale = quantized_rows(x, 7)
        order = find_stored_rows(0, 48, 48, 6, CPU).argsort()  # index: stored row, value: row of the weight
        nibbles = (codes[order] + 8).to(torch.uint8)
        module = "transformer_blocks.0.img_mod.1"
        tensors = {
            f"{module}.weight": (nibbles[:, 0::2] | nibbles[:, 1::2] << 4).view(torch.int8),
            f"{module}.weight_scale": scale[order].t().contiguous(),
            f"{module}.weight_zero": torch.zeros(1, 48),
            f"{module}.comfy_quant": label(format="awq_w4a16"),
        }
        report = compare(tmp_path, {f"{module}.weight": x}, tensors)

        (finding,) = (each for each in report.findings if each.code == "wrong_convention")
        assert [("awq_w4a16", True)] == [(layer.format, layer.snr_db < 0) for layer in report.layers]
        assert "4-bit codes in groups of 64; rows in order" == finding.evidence["prescribed"]
        assert "4-bit codes in groups of 64; rows interleaved by 6" == finding.evidence["other"]


def one_and_orig(n):
    """Return a smoothing that was folded into the previous layer: ones, and its original values."""
    return {"smooth": torch.ones(n, dtype=HALF), "smooth_orig": (1 + torch.arange(n) % 3).to(HALF)}


class TestFoldedSmoothing:
    @pytest.mark.parametrize(
        ("fused", "after"),
        [
            ("qkv_proj", "out_proj"),
            ("qkv_proj_context", "out_proj_context"),
            ("attn.to_qkv", "attn.to_out.0"),
            ("attn.add_qkv_proj", "attn.to_add_out"),
        ],
    )
    def test_folded_smoothing_is_reported_for_both_layers(self, tmp_path, fused, after):
        tensors = w4a4_of_nunchaku(f"t.{fused}", 384) | w4a4_of_nunchaku(f"t.{after}", **one_and_orig(128))
        report = quanterr.inspect(store(tmp_path / "quantized.safetensors", tensors))
        weight = recognize(tmp_path, tensors, (384, 128), f"t.{fused}.weight")

        assert {"nunchaku_int4"} == {weight.format for weight in report.weights}
        assert f"V rows times t.{after}.smooth_orig" in weight.evidence[0]

    def test_folded_smoothing_with_another_row_count_is_refused(self, tmp_path):
        tensors = w4a4_of_nunchaku("t.qkv_proj", 384) | w4a4_of_nunchaku("t.out_proj", cols=384, **one_and_orig(384))
        reason = recognize(tmp_path, tensors, (384, 128), "t.qkv_proj.weight")

        assert "t.out_proj.smooth_orig (BF16 [384]) is folded into V rows that cannot be located in 384 rows" in reason

    @pytest.mark.parametrize("named", ["smooth_orig", None])
    def test_smoothing_that_is_used_or_one_counts_as_unfolded(self, tmp_path, named):
        changed = {"smooth": one_and_orig(128)["smooth_orig"]} if named else {"smooth_orig": None}
        tensors = w4a4_of_nunchaku("t.qkv_proj", 384) | w4a4_of_nunchaku("t.out_proj", **changed)
        weights = [recognize(tmp_path, tensors, (384, 128), "t.qkv_proj.weight")]
        weights.append(recognize(tmp_path, tensors, (128, 128), "t.out_proj.weight"))

        assert not any("folded" in weight.evidence[0] or "V rows" in weight.evidence[0] for weight in weights)


class TestBias:
    def test_bias_without_an_adjacent_layer_is_plain(self, tmp_path):
        tensors = {"a.bias": numbers(128), "c.qweight": torch.zeros(128, 64, dtype=torch.int8)}

        assert "dense" == recognize(tmp_path, tensors, (128,), "a.bias").format

    def test_bias_next_to_other_codes_is_plain(self, tmp_path):
        tensors = {"a.bias": numbers(128), "a.qweight": torch.zeros(4, 128, dtype=torch.int32)}

        assert "dense" == recognize(tmp_path, tensors, (128,), "a.bias").format

    def test_bias_with_another_length_is_refused(self, tmp_path):
        weight = recognize(tmp_path, w4a4_of_nunchaku() | {"a.bias": numbers(96)}, (96,), "a.bias")
        reason = "a bias of a.qweight (I8 [128, 64]) should have one element per row, not a.bias (BF16 [96])"

        assert reason == weight.refusal

    def test_bias_for_a_layer_split_by_columns_is_the_sum(self, tmp_path):
        block = "single_transformer_blocks.0"
        bias = (torch.arange(128) / 4).to(HALF)  # where Nunchaku stores it does not matter here
        tensors = w4a4_of_nunchaku(f"{block}.out_proj", bias=torch.zeros(128, dtype=HALF))
        tensors |= w4a4_of_nunchaku(f"{block}.mlp_fc2", cols=256, bias=bias)
        original = {f"{block}.proj_out.weight": numbers(128, 384), f"{block}.proj_out.bias": bias.sort().values}
        report = compare(tmp_path, original, tensors)
        changed = {layer.layer_name: layer for layer in report.other_changes}

        assert [f"{block}.proj_out.weight"] == [layer.layer_name for layer in report.layers]
        assert changed[f"{block}.proj_out.bias"].quantized_norm == pytest.approx(float(bias.float().norm()))
        assert report.not_compared == []


def test_layers_in_every_layout_share_a_workspace(tmp_path):
    """Parts held for one layer are not taken for those of the next."""
    stored, shapes, parts = {}, {}, {}
    for n in range(2):
        for format, (tensors, shape) in TAKEN.items():
            module = f"{format}{n}"
            for name, tensor in tensors.items():
                random = torch.rand(tensor.shape, generator=torch.Generator().manual_seed(n)) + 0.5
                floats = tensor.is_floating_point() and not name.endswith((".smooth", ".smooth_orig"))
                stored[name.replace("a.", f"{module}.", 1)] = random.to(tensor.dtype) if floats else tensor
            shapes[f"{module}.weight"] = torch.zeros(shape)
    workspace = Workspace()
    with open_pairing(store(tmp_path / "x.safetensors", shapes), store(tmp_path / "y.safetensors", stored)) as plan:
        for pair in plan.pairs:
            parts[pair.name] = read_whole(pair.quantized)
        for _ in range(2):
            for pair in plan.pairs:
                rows = Cut(*pair.quantized.matrix, ALL_ROWS)[0]

                assert same_bits(parts[pair.name], chunk_of(pair.quantized, rows, workspace)), pair.name
    assert shapes.keys() == parts.keys()


def test_tiled_svdquant_equals_svdquant_in_order(tmp_path):
    generator = np.random.default_rng(3)
    codes = generator.integers(-128, 128, (256, 64)).astype(np.int8)
    scale, up = generator.random((2, 256), np.float32), generator.random((256, 5), np.float32)
    plain = svd(
        **{
            "a.weight": torch.from_numpy(codes),
            "a.weight_scale": torch.from_numpy(scale),
            "a.smooth_factor": torch.from_numpy(generator.random(128, np.float32) + 0.5),
            "a.proj_down": torch.from_numpy(generator.random((128, 5), np.float32)),
            "a.proj_up": torch.from_numpy(up),
        }
    )
    packed = {
        "a.weight": codes.reshape(2, 32, 4, 2, 32).transpose(0, 3, 1, 2, 4).reshape(2, 2, 32, 128),
        "a.weight_scale": scale.reshape(2, 2, 128).transpose(1, 0, 2),
        "a.proj_up": up.reshape(2, 128, 5).transpose(0, 2, 1),
    }
    tiled = plain | {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in packed.items()}
    reports = []
    for number, tensors in enumerate((plain, tiled)):
        folder = tmp_path / str(number)
        folder.mkdir()
        original = store(folder / "original.safetensors", {"a.weight": torch.zeros(256, 128)})
        with open_pairing(original, store(folder / "quantized.safetensors", tensors)) as plan:
            reports.append(read_whole(plan.pairs[0].quantized, 100 * 128))

    assert same_bits(*reports)


class TestBundles:
    """An original also holds a VAE and text encoders, as ComfyUI's do."""

    UNET = "double_blocks.0.img_attn.qkv.weight"
    VAE = "vae.decoder.conv_in.weight"
    TEXT = "text_encoders.clip_l.transformer.text_model.embeddings.token_embedding.weight"

    @pytest.mark.parametrize(
        ("extra", "options"),
        [
            ((VAE,), ". To leave them out: -l '!vae'"),
            ((VAE, TEXT), ". To leave them out: -l '!vae' -l '!text_encoders'"),
            ((VAE, "double_blocks.1.img_attn.qkv.weight"), ""),
        ],
    )
    def test_options_that_exclude_bundled_parts_are_named(self, tmp_path, extra, options):
        weight = torch.randn(32, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
        y = {self.UNET: fp8_codes(32, 32), self.UNET.replace("weight", "scale_weight"): torch.tensor(0.01)}
        report = compare(tmp_path, {self.UNET: weight, **dict.fromkeys(extra, torch.ones(4, 4))}, y)
        reason = next(reason for reason in report.reasons if "only in the original" in reason)

        assert ("To leave them out" in reason) == bool(options)
        assert reason.endswith(options)


def test_turbodiffusion_codes_are_int8_weight_in_wrapped_blocks(tmp_path):
    weight = numbers(320, 256)
    blocks = torch.nn.functional.pad(weight.float(), (0, 0, 0, 64)).view(3, 128, 2, 128)
    scale = blocks.abs().amax((1, 3)) / 127
    codes = (blocks / scale[:, None, :, None]).round().to(torch.int8)
    module = "blocks.0._checkpoint_wrapped_module.self_attn.q"
    stored = {f"{module}.int8_weight": codes.view(384, 256)[:320].clone(), f"{module}.scale": scale}
    x = store(tmp_path / "x.safetensors", {"blocks.0.self_attn.q.weight": weight})
    y = store(tmp_path / "y.safetensors", stored)
    with open_pairing(x, y) as plan:
        assert [] == plan.leftovers
        (pair,) = plan.pairs
        values = read_whole(pair.quantized)

    assert "int8_block" == pair.quantized.format
    assert torch.equal(values, (codes * scale[:, None, :, None]).view(384, 256)[:320])
    assert [] == quanterr.inspect(y).findings
