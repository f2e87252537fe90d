"""Makes the golden files of tests/formats/test_formats.py.

    python tests/golden/make_golden.py FIXTURES

FIXTURES holds files that quantization libraries wrote, with the values that the same libraries read from
them: comfy/<fixture>/ and llm/<fixture>/ with case.json, the quantized checkpoint and
dequantized.safetensors.xz. From each a few small layers are cut out. What no library at hand writes is made
here, with values worked out by numpy and ml_dtypes alone; its origin says "hand-made". No number comes from
quanterr.

    <format>/<case>.safetensors             what is stored: codes, scales, labels
    <format>/<case>/                        the same with its config.json, where that says what tensors do not
    <format>/<case>.expected.safetensors    the values of its weights, float32 (codes of NaN as they are);
                                            __metadata__["origin"] tells producer, version and how
"""

import json
import lzma
import sys
from collections.abc import Iterator
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

import codebooks
import diffusion
import ml_dtypes
import numpy as np
import packed_integers
import safetensors
import torch
from safetensors.torch import load, save_file
from torch import Tensor

HERE = Path(__file__).parent
HEADER_KEY = "_quantization_metadata"
MARKER = "scaled_fp8"
Tensors = dict[str, Tensor]
SCALES = ("weight_scale", "scale_weight", "weight_scale_inv", "scale")
TILE = 128  # rows of a weight that is stored in tiles, as a 4-D tensor


class Piece(NamedTuple):
    """One layer of a fixture, cut to its first rows and columns."""

    layer: str
    rows: int | None = None
    cols: int | None = None
    block: tuple[int, int] | None = None  # the scale is a grid of blocks of that size


class Case(NamedTuple):
    format: str
    fixture: str  # folder in the fixtures
    pieces: tuple[Piece, ...]
    zeros: str | None = None  # why its producer knows no negative zero
    tolerance: str | None = None  # relative to the largest value, if the last bits depend on the producer's machine

    @property
    def name(self) -> str:
        return self.fixture.partition("/")[2]


QKV, PROJ = "blocks.0.attn.qkv", "blocks.1.attn.proj"
DOWN, Q_PROJ, K_PROJ = (f"model.layers.0.{name}" for name in ("mlp.down_proj", "self_attn.q_proj", "self_attn.k_proj"))

CASES = (
    Case("fp8_tensor", "comfy/comfy_fp8_tensorwise", (Piece("blocks.1.tiny"), Piece("blocks.1.odd", 13, 144))),
    Case("fp8_tensor", "comfy/comfy_fp8_tensorwise_textencoder", (Piece(PROJ, 9),)),
    Case("fp8_tensor", "comfy/comfy_fp8_tensorwise_learned", (Piece(PROJ, 9),)),
    Case("fp8_tensor", "comfy/comfy_fp8_header_only", (Piece(QKV, 5), Piece(PROJ, 9))),
    Case("fp8_tensor", "comfy/comfy_fp8_prefixed_header_unprefixed", (Piece(QKV, 5), Piece(PROJ, 9))),
    Case("fp8_tensor", "comfy/comfy_fp8_e5m2", (Piece(QKV, 5), Piece(PROJ, 9))),
    Case("fp8_tensor", "comfy/comfy_mixed_fp8_nvfp4", (Piece(QKV, 9),)),
    Case("fp8_tensor", "comfy/scaled_fp8_legacy", (Piece(PROJ, 9),)),
    Case("fp8_tensor", "comfy/scaled_fp8_legacy_input", (Piece(PROJ, 9),)),
    Case("fp8_tensor", "comfy/scaled_fp8_legacy_e5m2", (Piece(PROJ, 9),)),
    Case("fp8_tensor", "comfy/scaled_fp8_migrated", (Piece(PROJ, 9),)),
    Case(
        "fp8_tensor",
        "comfy/degenerate_fp8",
        tuple(Piece(f"blocks.0.{name}", 7) for name in ("huge", "negzero", "tinyvals", "zero")),
    ),
    Case("fp8_tensor", "llm/ct_fp8_tensor_static", (Piece(DOWN, 9), Piece(Q_PROJ, 5))),
    Case("fp8_tensor", "llm/fp8_tensor_scale_inv_static", (Piece(DOWN, 9), Piece(Q_PROJ, 5))),
    Case("fp8_tensor", "llm/modelopt_fp8", (Piece(K_PROJ, 11),)),
    Case("fp8_row", "comfy/comfy_fp8_rowwise", (Piece("blocks.1.tiny"), Piece(PROJ, 40, 40))),
    Case("fp8_row", "comfy/comfy_fp8_blockwise64", (Piece("blocks.1.tiny"), Piece("blocks.1.odd", 13))),
    Case("fp8_row", "comfy/scaled_fp8_legacy_rowwise", (Piece(PROJ, 9),)),
    Case("fp8_row", "comfy/comfy_mixed_int8row_fp8row", (Piece(PROJ, 9),)),
    Case("fp8_row", "comfy/comfy_moe_fp8", (Piece("blocks.0.experts"),)),
    Case("fp8_row", "llm/ct_fp8_channel", (Piece(DOWN, 9), Piece(Q_PROJ, 5))),
    Case("fp8_row", "llm/ct_naive_fp8_channel", (Piece(DOWN, 9), Piece(Q_PROJ, 5))),
    Case("fp8_row", "llm/fbgemm_fp8", (Piece(DOWN, 9), Piece(Q_PROJ, 5))),
    Case("fp8_row", "llm/quark_fp8", (Piece(DOWN, 9),)),
    Case("fp8_block", "comfy/comfy_fp8_blockwise64", (Piece(PROJ, 128, 80, (64, 64)),)),
    Case("fp8_block", "comfy/comfy_fp8_block3d", (Piece(PROJ, 9),)),
    Case("fp8_block", "comfy/scaled_fp8_legacy_block3d", (Piece(PROJ, 9),)),
    Case("fp8_block", "llm/ct_fp8_block128_partial", (Piece(DOWN),)),
    Case("fp8_block", "llm/fp8_block128_scale_inv", (Piece(DOWN),)),
    Case("fp8_block", "llm/deepseek_v4_fp8_fp4experts", (Piece("layers.0.attn.wq_a", 21),)),
    Case("mxfp8", "llm/hf_mxfp8_scale_inv_u8", (Piece(DOWN, 9), Piece(Q_PROJ, 5))),
    Case("mxfp8", "llm/ct_mxfp8", (Piece(Q_PROJ, 5),)),
    Case("mxfp8", "llm/modelopt_mxfp8", (Piece(K_PROJ, 5),)),
    Case("mxfp8", "comfy/comfy_mxfp8", (Piece("blocks.1.tiny"),)),
    Case("mxfp8", "comfy/comfy_mxfp8_e8m0", (Piece(PROJ),)),
    Case("mxfp8", "comfy/comfy_mxfp8_padded_noshape", (Piece("blocks.1.tiny"), Piece("blocks.1.tall"))),
    Case("mxfp8", "comfy/hybrid_mxfp8", (Piece(PROJ),)),
    Case("nvfp4", "comfy/comfy_nvfp4", (Piece("blocks.1.tiny"), Piece("blocks.1.odd"))),
    Case("nvfp4", "comfy/comfy_nvfp4_padded_noshape", (Piece("blocks.1.tiny"),)),
    Case("nvfp4", "comfy/comfy_nvfp4_pre_quant_scale", (Piece(PROJ),)),
    Case("nvfp4", "comfy/ctq_nvfp4_lo_first", (Piece(PROJ),)),
    Case("nvfp4", "comfy/modelopt_nvfp4_linear_lowfirst", (Piece(PROJ, 9),)),
    Case(
        "nvfp4",
        "comfy/degenerate_nvfp4",
        tuple(Piece(f"blocks.0.{name}") for name in ("huge", "tinyvals")),
    ),
    Case("nvfp4", "llm/modelopt_nvfp4", (Piece(K_PROJ, 9),), "ModelOpt's table has 0 for code 8"),
    Case("int8_convrot", "comfy/comfy_int8_convrot", (Piece(PROJ, 21),)),
    Case("int8_convrot", "comfy/comfy_int8_convrot_dynamic", (Piece("blocks.0.a", 5), Piece("blocks.0.b", 5))),
    Case("int8_convrot", "comfy/comfy_int8_convrot_header_conflict", (Piece(PROJ, 9),)),
    Case("int8_convrot", "comfy/comfy_int8_convrot_edit_header_lost", (Piece(PROJ, 9),)),
    Case("int8_convrot", "comfy/int8_formatless_convrot", (Piece("blocks.0.a", 5),)),
    Case("convrot_w4a4", "comfy/comfy_convrot_w4a4", (Piece(PROJ, 9),)),
    Case("asym_w4a8_int8", "comfy/comfy_asym_w4a8_int8", (Piece(PROJ, 9),)),
    Case("asym_w4a8_int8", "comfy/comfy_asym_w4a8_int8_correction", (Piece(PROJ, 9),)),
    Case("asym_w4a8_int8", "comfy/comfy_asym_w6a8_int8", (Piece(PROJ, 9),)),
    Case("awq_w4a16", "comfy/svdquant_w4a4_tilepacked_awq_w4a16", (Piece(PROJ, 9),)),
    Case("svdquant_w4a4", "comfy/svdquant_w4a4_tilepacked_awq_w4a16", (Piece(QKV, 128),)),
    Case("svdquant_w4a4", "comfy/svdquant_w4a4_kitchen", (Piece(PROJ),)),
    Case("svdquant_w4a4", "comfy/svdquant_w4a4_kitchen_smooth_defect", (Piece(PROJ),)),
    Case("ctq_nf4", "comfy/ctq_bnb_nf4", (Piece(PROJ),)),
    Case("nunchaku_int4", "comfy/nunchaku_int4", (Piece("transformer_blocks.0.attn.to_out.0"),)),
    Case("nunchaku_awq", "comfy/nunchaku_int4", (Piece("transformer_blocks.0.norm1.linear"),)),
    Case("int8_tensor", "comfy/comfy_int8_tensorwise", (Piece("blocks.1.tiny"), Piece("blocks.1.odd", 13))),
    Case("int8_tensor", "comfy/comfy_int8_blockwise128", (Piece(PROJ, 21),)),
    Case("int8_tensor", "comfy/int8_legacy", (Piece(PROJ, 21),)),
    Case("int8_tensor", "comfy/degenerate_int8_rowwise", (Piece("blocks.0.zero", 21),)),
    Case("int8_row", "comfy/comfy_int8_rowwise", (Piece("blocks.1.tiny"), Piece(PROJ, 40, 40))),
    Case("int8_row", "comfy/comfy_int8_rowwise_mislabelled", (Piece(PROJ, 9),)),
    Case("int8_row", "comfy/comfy_mixed_int8row_fp8row", (Piece(QKV, 9),)),
    Case("int8_row", "comfy/comfy_int8_convrot", (Piece("blocks.1.tiny"),)),
    Case("int8_row", "comfy/int8_bare", (Piece("blocks.0.a", 3), Piece("blocks.0.c", 11))),
    Case("int8_row", "comfy/int8_formatless_convrot", (Piece("blocks.0.d", 9),)),
    Case(
        "int8_row",
        "comfy/degenerate_int8_rowwise",
        (Piece("blocks.0.huge", 9), Piece("blocks.0.tinyvals", 9)),
    ),
    Case("int8_row", "llm/ct_int8_channel", (Piece(DOWN, 9), Piece(Q_PROJ, 5))),
    Case("int8_row", "llm/modelopt_int8_wo", (Piece(K_PROJ, 11),)),
    Case("int8_row", "llm/gemma_quant_int", (Piece("model.layers.2.mlp.up_proj"),)),
    Case("int8_block", "comfy/comfy_int8_blockwise128", (Piece("blocks.0.mlp.fc1", 256, 24, (128, 128)),)),
    Case("int8_block", "comfy/comfy_int8_blockwise64", (Piece(PROJ, 96, 80, (64, 64)),)),
    Case("int8_block", "comfy/int8_legacy", (Piece(QKV, 256, 24, (128, 128)),)),
    Case("eetq", "llm/eetq_int8", (Piece(DOWN),)),
    Case("bitnet", "llm/bitnet_offline", (Piece(DOWN), Piece(Q_PROJ))),
    Case("gemma_int", "llm/gemma_quant_int", tuple(Piece(f"model.layers.{n}.mlp.up_proj") for n in (0, 1))),
    Case("aqlm", "llm/aqlm_synthetic", (Piece(Q_PROJ),)),
    Case("exl2", "llm/exl2_handmade", (Piece(Q_PROJ),)),
    Case(
        "exl3",
        "llm/exl3_synthetic",
        tuple(Piece(f"model.layers.{n}.self_attn.q_proj", 12, 200) for n in (0, 1, 2)),
        tolerance="1e-6",
    ),
    Case("quip_sharp", "llm/quip_sharp_e8p", (Piece(DOWN),), tolerance="1e-6"),
    Case("spqr", "llm/spqr_handmade", (Piece(DOWN), Piece(Q_PROJ))),
    Case("vptq", "llm/vptq_synthetic", (Piece(Q_PROJ),)),
    Case("ct_nvfp4", "llm/ct_nvfp4", (Piece(DOWN),)),
    Case("ct_mxfp4", "llm/ct_mxfp4", (Piece(DOWN),)),
    Case("ct_mxfp6", "llm/ct_mxfp6", (Piece(DOWN),)),
    Case("mxfp4", "llm/modelopt_mxfp4", (Piece(K_PROJ, 9),)),
    Case("mxfp4", "llm/quark_mxfp4", (Piece(DOWN, 9),)),
    Case("mxfp4", "llm/deepseek_v4_fp8_fp4experts", (Piece("layers.0.ffn.experts.0.w2", 21),)),
    Case("bnb_nf4", "llm/bnb_nf4_double_quant", (Piece(DOWN),)),
    Case("bnb_nf4", "llm/bnb_nf4_storage_bf16", (Piece(DOWN),)),
    Case("bnb_fp4", "llm/bnb_fp4_double_quant", (Piece(DOWN),)),
    Case("bnb_int8", "llm/bnb_int8", (Piece(DOWN),)),
    Case("quanto_int4", "llm/quanto_int4", (Piece(DOWN),)),
    Case("mlx_affine", "llm/mlx_moe_mixed", (Piece("model.embed_tokens"),)),
    Case("torchao_int4", "llm/torchao_int4_handmade", (Piece(DOWN), Piece(Q_PROJ))),
    Case("fp8_cast", "comfy/fp8_plain_cast_e4m3fn", (Piece(QKV, 5), Piece(PROJ, 9))),
    Case("fp8_cast", "comfy/fp8_plain_cast_e5m2", (Piece(QKV, 5), Piece(PROJ, 9))),
)


class Fixture:
    """A producer's checkpoint and the values the producer reads from it."""

    def __init__(self, folder: Path) -> None:
        self.case = json.loads((folder / "case.json").read_text())
        stored = folder / self.case["quantized"]
        self.tensors: Tensors = {}
        self.header: dict[str, str] = {}
        for file in sorted(stored.glob("*.safetensors")) if stored.is_dir() else [stored]:
            with safetensors.safe_open(file, framework="pt") as opened:
                self.tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
                self.header |= opened.metadata() or {}
        self.values = load(lzma.decompress((folder / self.case["dequantized"]).read_bytes()))
        config = stored / "config.json"
        self.config = json.loads(config.read_text()) if config.exists() else {}

    @property
    def prefix(self) -> str:
        """The prefix of the quantized names before the original's."""
        first = min(name for name in self.values if name.endswith(".weight"))
        return min((name for name in self.tensors if name.endswith(first)), default=first).removesuffix(first)

    @property
    def origin(self) -> dict[str, str]:
        about = self.case["about"]
        if "library" in about:
            made = f"{about['library']} {about['version']}"
            read = f"{about['how']}; read by {about['dequantized_from']}"
        else:
            made, read = about["writer"], f"{about.get('command', '')}; read by {about['reference']}"
        exact = {} if about.get("reference_exact", True) else {"tolerance": "1e-6"}  # relative to the largest value
        return {"producer": made.replace("hand-derived -", "hand-made"), "made_by": read} | exact

    def cut(self, piece: Piece) -> tuple[Tensors, Tensors]:
        """Return the stored tensors and the values of one layer, cut."""
        names = self.case["about"].get("name_map")
        module = names[piece.layer] if names else self.prefix + piece.layer
        weight = f"{module}.weight"
        rows, cols = piece.rows, piece.cols
        values = {f"{piece.layer}.weight": first(self.values[f"{piece.layer}.weight"], rows, cols)}
        stored = {name: tensor for name, tensor in self.tensors.items() if name.startswith(module + ".")}
        stored.pop(f"{module}.bias", None)
        if not rows and not cols:
            return stored, values
        if rows and any(name.endswith(("_s_rel", "weight_zero", "proj_up")) for name in stored):
            return {name: of_rows(tensor, stored[weight], rows) for name, tensor in stored.items()}, values
        for name in stored:
            if name == weight:
                stored[name] = first(stored[name], rows, cols)
            elif name.removeprefix(module + ".") in SCALES and stored[name].numel() > 1:
                if piece.block:
                    grid = ceil((rows or 0) / piece.block[0]), ceil((cols or 0) / piece.block[1])
                    stored[name] = first(stored[name], *grid)
                elif weight in stored and stored[name].shape[0] == self.tensors[weight].shape[0]:
                    stored[name] = first(stored[name], rows, None)
        return stored, values


def of_rows(tensor: Tensor, weight: Tensor, rows: int) -> Tensor:
    """Return the part of a tensor that belongs to the first rows of a weight, along the axis with as many entries."""
    n = len(weight)
    axis = next((axis for axis in (0, 1) if axis < tensor.dim() and tensor.shape[axis] == n), None)
    if axis is None:
        return tensor
    raw = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
    return raw.narrow(axis, 0, rows // TILE if weight.dim() == 4 else rows).contiguous().clone().view(tensor.dtype)


def first(tensor: Tensor, rows: int | None, cols: int | None) -> Tensor:
    """Return the first rows and columns."""
    raw = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
    if tensor.dim() < 2:
        return raw[:rows].clone().view(tensor.dtype) if rows and tensor.dim() else tensor
    return raw[:rows, :cols].contiguous().clone().view(tensor.dtype)


def cut_from(fixture: Fixture, case: Case) -> tuple[Tensors, Tensors, dict[str, str]]:
    """Return stored tensors, values and header of a case."""
    stored = {name: tensor for name, tensor in fixture.tensors.items() if name.endswith(MARKER)}
    values = {}
    for piece in case.pieces:
        more, expected = fixture.cut(piece)
        stored |= more
        values |= expected
    header = {}
    if HEADER_KEY in fixture.header:
        document = json.loads(fixture.header[HEADER_KEY])
        kept = {piece.layer for piece in case.pieces}
        document["layers"] = {layer: fields for layer, fields in document["layers"].items() if layer in kept}
        header[HEADER_KEY] = json.dumps(document)
    header |= {name: value for name, value in fixture.header.items() if name in values}  # torchao
    return stored, values, header


def save(
    case: str,
    stored: Tensors,
    values: Tensors,
    header: dict[str, str],
    origin: dict[str, Any],
    config: dict[str, Any] | None = None,
) -> None:
    path = HERE / f"{case}.safetensors"
    expected = path.with_suffix(".expected.safetensors")
    if config:
        path = HERE / case / "model.safetensors"
    path.parent.mkdir(exist_ok=True, parents=True)
    if config:
        (path.parent / "config.json").write_text(json.dumps({"quantization_config": config}) + "\n")
    save_file(dict(sorted(stored.items())), path, header or None)
    # A header with a single key is the same in every run.
    save_file(dict(sorted(values.items())), expected, {"origin": json.dumps(origin)})
    for file in (path, expected):
        file.chmod(0o644)


# ---- hand-made: numpy and ml_dtypes only

RNG = np.random.default_rng(20250101)
HAND = {"producer": f"hand-made with numpy {np.__version__} and ml_dtypes {ml_dtypes.__version__}"}
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
TORCH = {
    E4M3: torch.float8_e4m3fn,
    np.dtype(ml_dtypes.float8_e8m0fnu): torch.float8_e8m0fnu,
    np.dtype(ml_dtypes.bfloat16): torch.bfloat16,
}


def as_torch(array: np.ndarray) -> Tensor:
    array = np.ascontiguousarray(array).reshape(array.shape)  # ascontiguousarray makes 0-D arrays 1-D
    dtype = TORCH.get(array.dtype)
    if dtype is None:
        return torch.from_numpy(array.copy())
    return torch.from_numpy(array.copy().view({1: np.uint8, 2: np.int16}[array.itemsize])).view(dtype)


def fp8_codes(*shape: int) -> np.ndarray:
    """Return finite e4m3 codes of every magnitude."""
    magnitudes = RNG.integers(0, 0x7F, shape, np.uint8)
    return (magnitudes | RNG.integers(0, 2, shape, np.uint8) << 7).view(E4M3)


def int8_codes(*shape: int) -> np.ndarray:
    return RNG.integers(-128, 128, shape).astype(np.int8)


def scales(dtype: str, *shape: int) -> np.ndarray:
    if dtype == "e8m0":
        return RNG.integers(96, 130, shape).astype(np.uint8).view(ml_dtypes.float8_e8m0fnu)
    if dtype == "u8":
        return RNG.integers(96, 130, shape).astype(np.uint8)
    kinds = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
    return (0.001 + 0.01 * RNG.random(shape)).astype(kinds[dtype])


def as_float32(scale: np.ndarray) -> np.ndarray:
    """Return the scale's numbers; bytes are exponents."""
    number = scale.astype(np.float32)
    return np.float32(2) ** (number - 127) if scale.dtype == np.uint8 else number


def blocks(scale: np.ndarray, shape: tuple[int, ...], rows: int, cols: int) -> np.ndarray:
    """Return a grid of scales, each repeated over a block, the last blocks cut."""
    return scale.repeat(rows, -2).repeat(cols, -1)[..., : shape[-2], : shape[-1]]


class Hand(NamedTuple):
    """A weight made by hand: its scale's name, and what each element is multiplied with."""

    weight: str
    codes: np.ndarray
    scale_name: str
    scale: np.ndarray
    of_element: np.ndarray  # the scale, so that numpy multiplies it right

    @property
    def stored(self) -> Tensors:
        return {self.weight: as_torch(self.codes), self.scale_name: as_torch(self.scale)}

    @property
    def values(self) -> Tensors:
        return {self.weight: torch.from_numpy(self.codes.astype(np.float32) * self.of_element)}


def one(weight: str, codes: np.ndarray, name: str, dtype: str, *shape: int) -> Hand:
    scale = scales(dtype, *shape)
    return Hand(weight, codes, name, scale, as_float32(scale).reshape(()))


def each(weight: str, codes: np.ndarray, name: str, dtype: str, shape: tuple[int, ...], over: tuple[int, ...]) -> Hand:
    """Return the scale in the shape ``over``, in which it broadcasts over the weight."""
    scale = scales(dtype, *shape)
    return Hand(weight, codes, name, scale, as_float32(scale).reshape(over))


def grid(weight: str, codes: np.ndarray, name: str, dtype: str, shape: tuple[int, ...], block: tuple[int, int]) -> Hand:
    scale = scales(dtype, *shape)
    plain = as_float32(scale)
    if len(shape) == 4:
        plain = plain[:, 0, :, 0]
    if len(shape) == 3 and codes.ndim == 2:
        plain = plain[:, :, 0]
    return Hand(weight, codes, name, scale, blocks(plain, codes.shape, *block))


def by_hand() -> Iterator[tuple[str, str, list[Hand]]]:
    """Yield (case, how, weights)."""
    how = "float32(code) * float32(scale), the scale's place as quanterr/formats/shared/scale_grid.py tells it"
    yield (
        "fp8_tensor/handmade_names",
        how,
        [
            one("a.weight", fp8_codes(3, 40), "a.scale", "f32", 1),
            one("b.weight", fp8_codes(3, 40), "b.qscale_weight", "f32"),
            one("c.weight", fp8_codes(3, 40), "c.weight.scale", "bf16", 1, 1),
            one("d.weight", fp8_codes(3, 40), "d.weight_scale_inv", "e8m0"),
            one("e.weight", fp8_codes(3, 40), "e.scale", "u8", 1),
            one("f.experts", fp8_codes(2, 3, 40), "f.experts_scale", "f32", 1, 1),
            one("g.experts", fp8_codes(2, 3, 40), "g.experts_scale_inv", "f16", 1, 1, 1),
            one("h.weight", fp8_codes(4, 3, 2, 2), "h.weight_scale", "f32", 1),
            one("i.weight", fp8_codes(37), "i.weight_scale", "f32"),
        ],
    )
    yield (
        "fp8_row/handmade_experts",
        how,
        [
            each("a.experts", fp8_codes(3, 5, 40), "a.experts_scale", "f32", (3,), (3, 1, 1)),
            each("b.experts", fp8_codes(3, 5, 40), "b.experts_scale_inv", "f16", (3, 1), (3, 1, 1)),
            each("c.experts", fp8_codes(3, 5, 40), "c.experts_scale", "bf16", (3, 1, 1), (3, 1, 1)),
            each("d.experts", fp8_codes(3, 5, 40), "d.experts_scale", "f32", (3, 5, 1), (3, 5, 1)),
            each("e.experts", fp8_codes(3, 5, 40), "e.experts_scale_inv", "f32", (3, 5), (3, 5, 1)),
        ],
    )
    yield (
        "fp8_row/handmade_convolution",
        how,
        [each("a.weight", fp8_codes(6, 3, 2, 2), "a.weight_scale", "f32", (6,), (6, 1, 1, 1))],
    )
    yield (
        "fp8_block/handmade_shapes",
        how,
        [
            grid("a.weight", fp8_codes(97, 40), "a.weight_scale", "f32", (4, 1, 2, 1), (32, 32)),
            grid("b.weight", fp8_codes(9, 96), "b.scale", "e8m0", (9, 3), (1, 32)),
            grid("c.weight", fp8_codes(9, 96), "c.scale", "u8", (9, 3), (1, 32)),
            grid("d.weight", fp8_codes(40, 72), "d.qscale_weight", "bf16", (2, 3), (32, 32)),
            grid("e.weight", fp8_codes(9, 80), "e.scale", "f16", (9, 5, 1), (1, 16)),
            grid("f.weight", fp8_codes(1, 48), "f.weight_scale", "f32", (1, 3), (1, 16)),
        ],
    )
    yield (
        "fp8_block/handmade_576_rows",
        how + "; 128 rows a block, the last of 64",
        [grid("kv_a.weight", fp8_codes(576, 24), "kv_a.weight_scale_inv", "f32", (5, 1), (128, 128))],
    )
    yield (
        "fp8_block/handmade_experts",
        how,
        [
            grid("a.experts", fp8_codes(2, 40, 72), "a.experts_scale_inv", "f32", (2, 2, 3), (32, 32)),
            each("b.experts", fp8_codes(2, 5, 40), "b.experts_scale", "f32", (2, 1, 40), (2, 1, 40)),
            each("c.experts", fp8_codes(2, 5, 40), "c.experts_scale", "f32", (2, 40), (2, 1, 40)),
        ],
    )
    yield (
        "int8_tensor/handmade_names",
        how,
        [
            one("a.weight", int8_codes(3, 40), "a.scale", "f16"),
            one("b.weight", int8_codes(3, 40), "b.weight_scale_inv", "bf16", 1),
            one("c.weight", int8_codes(3, 40), "c.weight.scale", "f32", 1, 1),
            one("d.experts", int8_codes(2, 3, 40), "d.experts_scale", "f32", 1),
        ],
    )
    yield (
        "int8_row/handmade_names",
        how,
        [
            each("a.weight", int8_codes(5, 40), "a.scale_weight", "f32", (5,), (5, 1)),
            each("b.weight", int8_codes(5, 5), "b.weight_scale_inv", "bf16", (5,), (5, 1)),
            each("c.weight", int8_codes(5, 40), "c.scale", "f16", (5, 1), (5, 1)),
            each("d.experts", int8_codes(3, 5, 40), "d.experts_scale", "f32", (3, 5, 1), (3, 5, 1)),
        ],
    )
    yield (
        "int8_block/handmade_shapes",
        how,
        [
            grid("a.weight", int8_codes(97, 40), "a.weight_scale", "f16", (4, 2), (32, 32)),
            grid("b.weight", int8_codes(9, 80), "b.weight_scale", "bf16", (9, 5, 1), (1, 16)),
            grid("c.weight", int8_codes(90, 50), "c.weight_scale", "f32", (9, 5), (10, 10)),
            grid("d.experts", int8_codes(2, 40, 72), "d.experts_scale", "f32", (2, 2, 3), (32, 32)),
        ],
    )


def nibbles(codes: np.ndarray) -> np.ndarray:
    """Return 4-bit codes, two a byte, the first in the low bits."""
    return (codes[..., ::2] | codes[..., 1::2] << 4).astype(np.uint8)


def sextets(codes: np.ndarray) -> np.ndarray:
    """Return 6-bit codes, four in three bytes, the first in the lowest bits."""
    words = (codes.astype(np.uint32).reshape(*codes.shape[:-1], -1, 4) << np.array([0, 6, 12, 18], np.uint32)).sum(
        -1, dtype=np.uint32
    )
    bytes_ = (words[..., None] >> np.array([0, 8, 16], np.uint32)) & 255
    return bytes_.astype(np.uint8).reshape(*codes.shape[:-1], -1)


def small_floats(code_type: str, *shape: int) -> tuple[np.ndarray, np.ndarray]:
    """Return codes of every value, and the values, by ml_dtypes."""
    dtype = {"e2m1": ml_dtypes.float4_e2m1fn, "e2m3": ml_dtypes.float6_e2m3fn}[code_type]
    codes = RNG.integers(0, 16 if code_type == "e2m1" else 64, shape).astype(np.uint8)
    return codes, codes.view(dtype).astype(np.float32)


def each_block(scale: np.ndarray, size: int) -> np.ndarray:
    return np.repeat(scale.astype(np.float32), size, -1)


def exponents(*shape: int) -> np.ndarray:
    return scales("e8m0", *shape).view(np.uint8)


def power(scale: np.ndarray) -> np.ndarray:
    return scale.view(ml_dtypes.float8_e8m0fnu)


def of_prefix(prefix: str, tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def describe(class_name: str, **data: object) -> str:
    """Return torchao's description of a tensor, as its header has it."""
    return json.dumps({"_type": class_name, "_data": data})


def as_f4(codes: np.ndarray) -> Tensor:
    """Return the dtype F4, whose shape counts codes."""
    return torch.from_numpy(nibbles(codes)).view(torch.float4_e2m1fn_x2)


def microscaled_by_hand() -> Iterator[tuple[str, str, Tensors, Tensors]]:
    """Yield (case, how, stored, values) of MX and NVFP4 layouts that no fixture has."""
    stored, values = {}, {}
    for name, code_type, shape in (("2d", "e2m1", (5, 96)), ("3d", "e2m1", (3, 5, 64)), ("ragged", "e2m1", (3, 80))):
        codes, plain = small_floats(code_type, *shape)
        scale = exponents(*shape[:-1], -(-shape[-1] // 32))
        for packed, prefix in (("weight_packed", "ct"), ("weight", "plain")):
            stored[f"{prefix}.{name}.{packed}"] = as_torch(nibbles(codes))
            stored[f"{prefix}.{name}.weight_scale"] = as_torch(scale)
            values[f"{prefix}.{name}.weight"] = torch.from_numpy(plain * each_block(power(scale), 32)[..., : shape[-1]])
    how = "code * 2^(scale - 127), codes and exponents widened by ml_dtypes; experts, and a last block that is short"
    yield "ct_mxfp4/handmade_shapes", how, of_prefix("ct.", stored), of_prefix("ct.", values)
    stored, values = of_prefix("plain.", stored), of_prefix("plain.", values)
    codes, plain = small_floats("e2m1", 2, 3, 64)
    scale = exponents(2, 3, 2)
    for name, code, part, dtype in (
        ("f4.weight", as_f4(codes), "f4.weight_scale", torch.uint8),
        ("i8.weight", as_torch(nibbles(codes).view(np.int8)), "i8.scale", torch.float8_e8m0fnu),
        ("mlp.experts.gate_up_proj", as_torch(nibbles(codes)), "mlp.experts.gate_up_proj_weight_scale", torch.uint8),
        ("mlp.experts.down_proj", as_torch(nibbles(codes)), "mlp.experts.down_proj_scale", torch.uint8),
    ):
        stored |= {name: code, part: as_torch(scale).view(dtype)}
        values[name] = torch.from_numpy(plain * each_block(power(scale), 32))
    yield "mxfp4/handmade_names", how, stored, values
    stored, values = {}, {}
    for name, shape in (("2d", (5, 96)), ("3d", (3, 5, 64))):
        codes, plain = small_floats("e2m3", *shape)
        scale = exponents(*shape[:-1], shape[-1] // 32)
        stored |= {f"{name}.weight_packed": as_torch(sextets(codes)), f"{name}.weight_scale": as_torch(scale)}
        values[f"{name}.weight"] = torch.from_numpy(plain * each_block(power(scale), 32))
    yield "ct_mxfp6/handmade_shapes", how, stored, values


def nvfp4_by_hand() -> Iterator[tuple[str, str, Tensors, Tensors]]:
    """Yield (case, how, stored, values) of NVFP4 layouts."""
    stored, values = {}, {}
    for name, shape, number in (("2d", (5, 80), (1,)), ("3d", (3, 5, 64), (3,)), ("one", (3, 5, 64), ())):
        codes, plain = small_floats("e2m1", *shape)
        scale = fp8_codes(*shape[:-1], shape[-1] // 16)
        divisor = (100 + 1000 * RNG.random(number)).astype(np.float32)
        stored |= {f"{name}.weight_packed": as_torch(nibbles(codes)), f"{name}.weight_scale": as_torch(scale)}
        stored[f"{name}.weight_global_scale"] = as_torch(divisor)
        whole = divisor.reshape(-1, 1, 1) if len(shape) == 3 else divisor
        values[f"{name}.weight"] = torch.from_numpy(plain * each_block(scale.astype(np.float32) / whole, 16))
    how = "code * (scale / global scale), each rounded; codes and scales widened by ml_dtypes"
    yield "ct_nvfp4/handmade_shapes", how, stored, values
    stored, values = {}, {}
    for name, shape, block, number, dtype in (
        ("f4.weight", (5, 80), 16, (), "F4"),
        ("block32.weight", (5, 96), 32, (1,), "U8"),
        ("experts.weight", (3, 5, 64), 16, (3,), "U8"),
        ("experts_three.weight", (3, 5, 64), 16, (3, 1, 1), "F4"),
        ("mlp.experts.gate_up_proj", (3, 5, 64), 16, (), "U8"),
    ):
        codes, plain = small_floats("e2m1", *shape)
        scale = fp8_codes(*shape[:-1], shape[-1] // block)
        factor = (0.001 + 0.01 * RNG.random(number)).astype(np.float32)
        part = f"{name}_scale" if name.endswith(".weight") else f"{name}_weight_scale"
        stored |= {name: as_f4(codes) if dtype == "F4" else as_torch(nibbles(codes)), part: as_torch(scale)}
        stored[f"{part}_2"] = as_torch(factor)
        whole = factor.reshape(-1, 1, 1) if len(shape) == 3 else factor
        values[name] = torch.from_numpy(plain * each_block(scale.astype(np.float32) * whole, block))
    how = "code * (scale * global scale), each rounded; codes and scales widened by ml_dtypes"
    yield "nvfp4/handmade_blocks_and_experts", how, stored, values
    stored, values = {}, {}
    for name, shape, number in (
        ("mlp.experts.down_proj", (3, 48, 40), (3,)),
        ("one.experts.down_proj", (2, 32, 33), ()),
    ):
        codes, plain = small_floats("e2m1", *shape)
        scale = fp8_codes(shape[0], shape[1] // 16, shape[2])
        factor = (0.001 + 0.01 * RNG.random(number)).astype(np.float32)
        stored[name] = as_torch(codes[:, ::2] | codes[:, 1::2] << 4)
        stored |= {f"{name}_weight_scale": as_torch(scale), f"{name}_weight_scale_2": as_torch(factor)}
        of_row = np.repeat(scale.astype(np.float32) * factor.reshape(-1, 1, 1), 16, 1)
        values[name] = torch.from_numpy(plain * of_row)
    how = "code * (scale * global scale), blocks of 16 rows; codes and scales widened by ml_dtypes"
    yield "nvfp4_experts/handmade_experts", how, stored, values


def integers_by_hand() -> Iterator[tuple[str, str, Tensors, Tensors, dict[str, str]]]:
    """Yield (case, how, stored, values, header) of integers."""
    stored, values = {}, {}
    for name, bits, rows, cols in (("int4", 4, 5, 96), ("int2", 2, 6, 40)):
        codes, per = RNG.integers(0, 1 << bits, (rows, cols)).astype(np.uint8), 8 // bits
        packed = np.zeros((-(-rows // per), cols), np.uint8)
        for row, values_of_row in enumerate(codes):
            packed[row % len(packed)] |= values_of_row << (bits * (row // len(packed)))
        scale, shift = scales("bf16", rows, 1), RNG.integers(0, 1 << bits, (rows, 1)).astype(np.int8)
        stored = {"a.weight._data._data": as_torch(packed), "a.weight._scale": as_torch(scale)}
        stored["a.weight._shift"] = as_torch(shift)
        plain = (codes.astype(np.float32) - shift.astype(np.float32)) * scale.astype(np.float32)
        how = "(code - shift) * scale, where the shift is an integer"
        yield f"quanto_{name}/handmade_integer_shift", how, stored, {"a.weight": torch.from_numpy(plain)}, {}
    words = RNG.integers(0, 1 << 32, (3, 12), np.uint64).astype(np.uint32)
    scale, bias = scales("f16", 3, 3), -scales("f16", 3, 3)
    codes = ((words[..., None] >> np.arange(0, 32, 4, dtype=np.uint32)) & 15).reshape(3, 96)
    plain = codes.astype(np.float32) * each_block(scale, 32) + each_block(bias, 32)
    stored = {"a.weight": torch.from_numpy(words), "a.scales": as_torch(scale), "a.qbiases": as_torch(bias)}
    values = {"a.weight": torch.from_numpy(plain)}
    yield "mlx_affine/handmade_qbiases", "code * scale + qbias, each rounded", stored, values, {}
    yield from torchao_by_hand()


def torchao_by_hand() -> Iterator[tuple[str, str, Tensors, Tensors, dict[str, str]]]:
    """Yield (case, how, stored, values, header) of types whose writers need CUDA, and of scaled inputs."""
    pre_scale = (0.5 + RNG.random(64)).astype(np.float32)
    codes, scale, zero = int8_codes(4, 64), scales("f32", 4, 2), RNG.integers(-5, 5, (4, 2)).astype(np.int8)
    plain = (codes.astype(np.float32) - each_block(zero, 32)) * each_block(scale, 32) * pre_scale
    stored = {f"a._weight_{name}": as_torch(part) for name, part in (("qdata", codes), ("scale", scale))}
    stored |= {"a._weight_zero_point": as_torch(zero), "a._weight_act_pre_scale": as_torch(pre_scale)}
    stored["a._weight_act_quant_scale"] = torch.ones(1)
    header = {"a.weight": describe("Int8Tensor", block_size=[1, 32])}
    how = "(code - zero_point) * scale * act_pre_scale, the products rounded"
    yield "torchao_int8/handmade_pre_scale", how, stored, {"a.weight": torch.from_numpy(plain)}, header

    stored, values, header = {}, {}, {}
    for name, shape in (("a", (4, 64)), ("b", (3, 4, 64))):
        codes = RNG.integers(-8, 8, shape)
        scale, zero = scales("bf16", *shape[:-1], 4), scales("f32", *shape[:-1], 4)
        plain = codes.astype(np.float32) * each_block(scale, 16) + each_block(zero, 16)
        parts = {"qdata": nibbles((codes & 15).astype(np.uint8)).view(np.int8)}
        parts |= {"scale": np.swapaxes(scale, -1, -2), "zero_point": np.swapaxes(zero, -1, -2)}
        if name == "a":
            parts["act_pre_scale"], plain = pre_scale, plain * pre_scale
        stored |= {f"{name}._weight_{part}": as_torch(array) for part, array in parts.items()}
        values[f"{name}.weight"] = torch.from_numpy(plain)
        header[f"{name}.weight"] = describe("Int4Tensor", block_size=[1] * (len(shape) - 1) + [16], shape=shape)
    rows, cols, group = 13, 160, 64  # padded to 16 × 1024
    codes, scale, zero = RNG.integers(0, 16, (16, 1024)), scales("bf16", 16, 16), scales("bf16", 16, 16)
    words = np.zeros((2, 8, 32, 4), np.uint32)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    for n, k, lane, j, p in np.ndindex(2, 8, 32, 4, 8):
        i = order[p]
        col = 128 * k + 32 * j + 16 * (i // 4) + 8 * (i % 4 // 2) + i % 2 + 2 * (lane % 4)
        words[n, k, lane, j] |= np.uint32(codes[8 * n + lane // 4, col]) << np.uint32(4 * p)
    plain = (codes.astype(np.float32) - 8) * each_block(scale, group) + each_block(zero, group)
    stored["c._weight_qdata"] = as_torch(words.view(np.int32))
    stored["c._weight_scale_and_zero"] = as_torch(np.stack([scale.T, zero.T], -1))
    values["c.weight"] = as_torch(plain[:rows, :cols])
    header["c.weight"] = describe("Int4TilePackedTo4dTensor", block_size=[1, group], shape=[rows, cols])
    how = "code * scale + zero, each rounded, and * act_pre_scale; tiles as the index formula of int4mm.cu puts them"
    yield "torchao_int4/handmade_layouts", how, stored, values, header


def gpt_oss(folder: Path) -> tuple[Tensors, Tensors, dict[str, str]]:
    """Return the first expert of a layer, stored as [out, in]; its producer gives [in, out]."""
    fixture, layer = Fixture(folder), "model.layers.0.mlp.experts.down_proj"
    other, values = "block.0.mlp.mlp2_weight", fixture.values[layer][:1].transpose(1, 2).contiguous()
    stored = {}
    for part in ("blocks", "scales"):
        for name in (f"{layer}_{part}", f"{other}.{part}"):
            stored[name] = fixture.tensors[f"{layer}_{part}"][:1].clone()
    how = f"the first expert of {layer} of the fixture gpt_oss_mxfp4, turned from [in, out]; again as OpenAI names it"
    return stored, {layer: values, other: values.clone()}, fixture.origin | {"how": how}


def casts() -> tuple[Tensors, Tensors]:
    """Return every FP8 code, NaN and infinity included, in several shapes."""
    codes = np.arange(256, dtype=np.uint8)
    stored, values = {}, {}
    for name, numpy_dtype, dtype in (
        ("e4m3", ml_dtypes.float8_e4m3fn, torch.float8_e4m3fn),
        ("e5m2", ml_dtypes.float8_e5m2, torch.float8_e5m2),
    ):
        for shape in ((256,), (16, 16), (2, 4, 32), (8, 4, 2, 4)):
            key = f"{name}.{len(shape)}d.weight"
            stored[key] = torch.from_numpy(codes.reshape(shape).copy()).view(dtype)
            values[key] = torch.from_numpy(codes.view(numpy_dtype).astype(np.float32).reshape(shape))
    return stored, values


def dense() -> tuple[Tensors, Tensors]:
    """Return numbers of every floating dtype, with torch's own widening as the values."""
    generator = torch.Generator().manual_seed(20250101)
    shapes = {
        "weight": (5, 7),
        "bias": (7,),
        "scalar": (),
        "experts": (2, 3, 32),
        "conv.weight": (4, 3, 2, 2),
    }
    stored = {}
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        info = torch.finfo(dtype)
        smallest = info.smallest_normal
        odd = [0.0, -0.0, info.max, info.min, smallest, smallest * info.eps, torch.inf, -torch.inf, torch.nan]
        name = str(dtype).removeprefix("torch.")
        stored[f"{name}.odd"] = torch.tensor(odd, dtype=torch.float64).to(dtype)
        for key, shape in shapes.items():
            numbers = torch.randn(shape, generator=generator, dtype=torch.float64)
            stored[f"{name}.{key}"] = numbers.to(dtype)
    return stored, {n: t if t.dtype == torch.float64 else t.to(torch.float32) for n, t in stored.items()}


def integers() -> Tensors:
    """Return numbers of every integer dtype and all bits of each."""
    stored = {"mask": torch.tensor([[True, False, True], [False, False, True]])}
    for bits in (8, 16, 32, 64):
        ones = torch.tensor([1 << n if n < 63 else -(1 << 63) for n in range(bits)])
        numbers = torch.cat([torch.tensor([0, 1, -1, 100]), ones, ones - 1, ~ones])
        stored[f"uint{bits}"] = numbers.to(getattr(torch, f"uint{bits}"))
        if bits > 8:  # A stored int8 tensor would be read as codes.
            stored[f"int{bits}"] = numbers.to(getattr(torch, f"int{bits}"))
    stored["position_ids"] = torch.arange(77).view(1, 77)
    return stored


def main() -> None:
    fixtures = Path(sys.argv[1])
    for case in CASES:
        fixture = Fixture(fixtures / case.fixture)
        stored, values, header = cut_from(fixture, case)
        cut = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in values.items())
        origin = fixture.origin | {"how": f"the first rows and columns of {cut} of the fixture {case.name}"}
        for key, value in (("zeros", case.zeros), ("tolerance", case.tolerance)):
            if value:
                origin[key] = value
        save(f"{case.format}/{case.name}", stored, values, header, origin)
    stored, values, origin = gpt_oss(fixtures / "llm/gpt_oss_mxfp4")
    save("gpt_oss_mxfp4/gpt_oss_mxfp4", stored, values, {}, origin)
    for name, how, weights in by_hand():
        stored, values = {}, {}
        for weight in weights:
            stored |= weight.stored
            values |= weight.values
        save(name, stored, values, {}, HAND | {"how": how})
    for made in (*diffusion.every(), *codebooks.every()):
        stored = {name: as_torch(array) for name, array in made.stored.items()}
        values = {name: as_torch(array) for name, array in made.values.items()}
        more = {"tolerance": made.tolerance, "also": made.also}
        save(
            made.case,
            stored,
            values,
            {},
            HAND | {"how": made.how} | {key: value for key, value in more.items() if value},
        )
    for made in packed_integers.every(lambda name: Fixture(fixtures / name)):
        save(made.case, made.stored, made.values, {}, made.origin, made.config)
    save("fp8_cast/handmade_codes", *casts(), {}, HAND | {"how": "every code once, widened by ml_dtypes"})
    producer = {"producer": f"torch {torch.__version__}"}
    how = "torch.Tensor.to(torch.float32); float64 as it is"
    save("dense/torch_floats", *dense(), {}, producer | {"how": how})
    save("verbatim/torch_integers", integers(), integers(), {}, producer | {"how": "the same tensors again"})
    for name, how, stored, values in (*microscaled_by_hand(), *nvfp4_by_hand()):
        save(name, stored, values, {}, HAND | {"how": how})
    for name, how, stored, values, header in integers_by_hand():
        save(name, stored, values, header, HAND | {"how": how})


if __name__ == "__main__":
    main()
