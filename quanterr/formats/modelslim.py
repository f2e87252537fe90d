"""ModelSlim, for Huawei's Ascend: integers or FP8 with scales and offsets; MXFP4 with a second scale.

    modelslim_int     weight                 i8        (rows, cols): one code a byte, also of 4 bits
                      weight_scale           floating  (rows, 1) or (rows, groups)
                      weight_offset          floating  shaped as weight_scale
    modelslim_fp8     weight                 f8_e4m3   (rows, cols), with the same scale and offset
    modelslim_int4    weight                 i8        (rows / 2, cols): the even row in the low nibble
                      weight_scale, weight_offset
                      weight_scale_second, weight_offset_second
                                             floating  (rows, groups); the first scale is then (rows, 1); optional
                      scale_bias             f32       (rows, 1 or 16): 8 times the sums of weights; not read
    layers with static inputs (W8A8, W8A8_MIX) also have, and may have instead of scale and offset
                      deq_scale              f32       (rows,): weight_scale · input_scale; or its bits in i64
                      input_scale            floating  one
                      input_offset           any       one; not read
                      quant_bias             i32       (rows,): a bias and a correction; not read

    weight[r, c] = (float32(code[r, c]) - weight_offset[r, g]) * weight_scale[r, g]      each operation rounds
    without a weight_scale, it is float32(deq_scale[r] / input_scale)
    with second scales, code stands for (code - weight_offset_second[r, g]) * weight_scale_second[r, g], each rounded

    modelslim_mxfp4_dual
                      weight                 u8        (rows, cols / 2): E2M1, the first in the low bits
                      weight_scale           u8        (rows, cols / 32): exponents
                      weight_dual_scale      f32       (rows, cols / 512, 1)

    weight[r, c] = e2m1(code[r, c]) * 2^(weight_scale[r, c // 32] - 127) * weight_dual_scale[r, c // 512]

quant_model_description.json names the type of each tensor. A deq_scale that is not the product of the layer's scales is
refused: runtimes follow it, other readers the scales. 8-bit codes declared as 4-bit are refused, too. W8A8_MXFP8,
W4A8_MXFP and W4A4_MXFP4 are mxfp8 and mxfp4. vllm-ascend loads no second scales; SGLang rounds their products to F16.

Reference: msmodelslim 26.1.0 (PyPI), core/quant_service/modelslim_v1/save/ascendv1.py, ir/api/impl/int_quantization.py,
pytorch/llm_ptq/llm_ptq_tools/calibrator/calibrator_classes/fake_quantize/w8a8_fakequantizer.py;
vllm-project/vllm-ascend@182b75ea vllm_ascend/quantization/methods.
"""

import struct
from functools import partial

from quanterr.checkpoints import Entry
from quanterr.formats.base import (
    Chunk,
    Decoder,
    Format,
    FormatMismatch,
    Parts,
    PartSpec,
    Weight,
    Workspace,
)
from quanterr.formats.shared import element_types
from quanterr.formats.shared.ascend_types import TYPES
from quanterr.formats.shared.column_groups import ColumnBlocks, fit_blocks
from quanterr.formats.shared.comfy_labels import FLOATS, INT8
from quanterr.formats.shared.config_checks import read_floats, read_integers
from quanterr.formats.shared.microscaling import LEVELS, read_microscaled
from quanterr.formats.shared.padding import fit_unpadded
from quanterr.formats.shared.row_pairs import read_pairs_of_rows
from quanterr.kernel.grid import E8M0, Grid
from quanterr.kernel.interpreter import Nested
from quanterr.kernel.levels import INT4, OF_DTYPE, signed_bytes
from quanterr.lazy_torch import Tensor, torch
from quanterr.util.text import display

MX, DUAL = 32, 512  # numbers of columns that share an exponent, and a second scale
SAMPLE_CODES = 1 << 16  # codes that are read: enough to distinguish 8 bits from 4
BFLOAT16_STEP = (
    2.0**-8
)  # maximum relative distance of neighbouring numbers: the producer may round a product to bfloat16
NUMBER_DTYPES = FLOATS | INT8 | frozenset({"I32", "I64"})
SCALE = PartSpec(("{weight}_scale",), FLOATS)
OFFSET = PartSpec(("{weight}_offset",), FLOATS, optional=True)  # only ModelSlim stores it, and always
INPUT_PARTS = {  # parts of layers with static inputs
    "deq_scale": PartSpec(("{module}.deq_scale",), frozenset({"F32", "I64"}), optional=True),
    "input_scale": PartSpec(("{module}.input_scale",), FLOATS, optional=True),
    "input_offset": PartSpec(("{module}.input_offset",), NUMBER_DTYPES, optional=True),
    "quant_bias": PartSpec(("{module}.quant_bias",), frozenset({"I32"}), optional=True),
}
INTEGERS = {
    "codes": PartSpec(("{weight}",), INT8),
    "scale": PartSpec(SCALE.names, FLOATS, optional=True),
    "zero_point": OFFSET,
    **INPUT_PARTS,
}
PAIRS = {
    "codes": PartSpec(("{weight}",), INT8),
    "scale": SCALE,
    "zero_point": OFFSET,
    "second_scale": PartSpec(("{weight}_scale_second",), FLOATS, optional=True),
    "second_offset": PartSpec(("{weight}_offset_second",), FLOATS, optional=True),
    "scale_bias": PartSpec(("{module}.scale_bias",), FLOATS, optional=True),
}
FP8 = {"codes": PartSpec(("{weight}",), frozenset({"F8_E4M3"})), "scale": SCALE, "zero_point": OFFSET}
TWO_SCALES = {
    "codes": PartSpec(("{weight}",), frozenset({"U8"})),
    "scale": PartSpec(SCALE.names, frozenset({"U8"})),
    "dual_scale": PartSpec(("{weight}_dual_scale",), frozenset({"F32"}), optional=True),
}


def fit_bytes(parts: Parts) -> Weight | None:
    """Return the weight, a code in each byte, if offsets or a deq_scale are stored."""
    codes, scale, offset = parts.codes, parts.get("scale"), parts.get("zero_point")
    if parts.hints.labels or not (offset or parts.get("deq_scale")):
        return None  # a label is ComfyUI's
    if len(codes.shape) != 2:
        raise FormatMismatch(f"codes of ModelSlim are (rows, cols), not {codes}")
    rows, cols = codes.shape
    if scale and scale.shape == (2 * rows, 1):
        return None  # two rows in a byte
    blocks = _fit_blocks(parts, rows, cols, scale, offset) if scale else ColumnBlocks(1, cols)
    if parts.get("deq_scale"):
        _check_deq_scale(parts, rows)
    elif not scale:
        raise FormatMismatch(f"its weight_scale is missing, without which {offset} means nothing")
    bits, declared = _find_bits(parts)
    if bits == 4:
        _check_four_bits(codes, declared)
    levels = OF_DTYPE[codes.dtype] if codes.dtype in OF_DTYPE and bits == 8 else signed_bytes(bits)
    return parts.weight(
        (rows, cols),
        element_types.read_one_by_one(
            parts,
            blocks.grid(scale) if scale else partial(_divide, parts),
            blocks.group,
            blocks.grid(offset, "zero_point") if offset else None,
        ),
        block_size=blocks.edges,
        code_bits=8,
        levels=levels,
        scale=scale,
        evidence=(f"codes {codes}, {declared}{scale or parts['deq_scale']}",),
        warnings=(*blocks.warnings, *_doubt_offset(parts)),
    )


def fit_pairs(parts: Parts) -> Weight | None:
    """Return the weight if there are twice as many rows of scales as of codes."""
    codes, scale, offset = parts.codes, parts["scale"], parts.get("zero_point")
    if offset is None or len(codes.shape) != 2 or scale.shape[:1] != (2 * codes.shape[0],):
        return None
    _find_bits(parts)
    rows, cols = 2 * codes.shape[0], codes.shape[1]
    blocks = _fit_blocks(parts, rows, cols, scale, offset)
    if second := parts.get("second_scale"):
        if blocks.n > 1:
            raise FormatMismatch(f"{scale} should have one number for each row if there is {second}")
        blocks = _fit_blocks(parts, rows, cols, second, parts.get("second_offset"))
        at_first = parts.get("second_offset")
        first_zero = blocks.grid(at_first, "second_offset") if at_first else None
        inner = read_pairs_of_rows(codes, blocks.grid(second, "second_scale"), blocks.group, first_zero)
        product, zero = Nested(inner), Grid(offset, key="zero_point")
        decoder = Decoder(codes, cols, scale=Grid(scale), zero=zero, read=product)
    else:
        decoder = read_pairs_of_rows(codes, blocks.grid(scale), blocks.group, blocks.grid(offset, "zero_point"))
    return parts.weight(
        (rows, cols),
        decoder,
        block_size=blocks.edges,
        levels=INT4,
        scale=scale,
        evidence=(f"two rows of 4-bit codes in each of {codes}, {scale}, {offset}",),
        warnings=(*blocks.warnings, *_doubt_offset(parts)),
    )


def fit_dual(parts: Parts) -> Weight | None:
    """Return the weight of MXFP4 codes whose scales are multiplied by a second scale, if one is stored."""
    codes, scale, dual = parts.codes, parts["scale"], parts.get("dual_scale")
    if dual is None:
        return None
    if len(codes.shape) != 2:
        raise FormatMismatch(f"MXFP4 codes are (rows, cols / 2), not {codes}")
    rows, cols = codes.shape[0], 2 * codes.shape[-1]
    across = -(-cols // DUAL)
    if scale.shape != (rows, cols // MX) or cols % MX:
        raise FormatMismatch(f"{scale} should have an exponent per {MX} columns of {codes}")
    if dual.shape != (rows, across, 1):
        raise FormatMismatch(f"{dual} should be {[rows, across, 1]}: a number per {DUAL} columns of {codes}")
    second = Grid(dual, across, DUAL, key="dual_scale")
    scales = Grid(scale, cols // MX, MX, levels=E8M0, steps=(("mul", second),))
    return parts.weight(
        (rows, cols),
        read_microscaled(codes, "e2m1", fit_unpadded(parts, (rows, cols), MX), scales),
        code_bits=4,
        levels=LEVELS["e2m1"],
        block_size=(1, MX),
        evidence=(f"codes {codes}, exponents {scale}, second scales {dual}",),
    )


def _fit_blocks(parts: Parts, rows: int, cols: int, scale: Entry, offset: Entry | None) -> ColumnBlocks:
    """Return the groups of columns that share a scale and an offset."""
    if len(scale.shape) != 2 or scale.shape[0] != rows:
        raise FormatMismatch(f"{scale} should have one number or more for each of {rows} rows of {parts.codes}")
    if offset and offset.shape != scale.shape:
        raise FormatMismatch(f"{offset} should have the shape of {scale}")
    size = parts.hints.config.get("group_size")
    return fit_blocks(scale.shape[1], cols, size if isinstance(size, int) else None)


def _find_bits(parts: Parts) -> tuple[int, str]:
    """Return the bits of a code that takes a byte, and the declared type as words.

    Raises:
        FormatMismatch: the declared type is one that is stored otherwise, such as W4A16, or unknown.
    """
    declared = parts.hints.config.get(parts.codes.name)
    if not isinstance(declared, str) or declared == "FLOAT":  # a finding reports it
        return 8, ""
    if declared not in TYPES:
        raise FormatMismatch(f"quant_model_description.json declares {display(declared)}, which is not supported")
    return TYPES[declared].bits, f"declared {declared}, "


def _check_four_bits(codes: Entry, declared: str) -> None:
    """Check that the first codes have 4 bits: runtimes drop the upper bits of a layer of 8 bits that is declared as 4.

    Raises:
        FormatMismatch: one has more.
    """
    first = memoryview(codes.file.read(codes.offset, min(codes.nbytes, SAMPLE_CODES))).cast("b")
    low, high = min(first, default=0), max(first, default=0)
    if low < -8 or high > 7:
        raise FormatMismatch(f"{declared}but {codes} has codes from {low} to {high}, not of 4 bits")


def _check_deq_scale(parts: Parts, rows: int) -> None:
    """Check the shapes of a static layer's scales, and that deq_scale is their product.

    Raises:
        FormatMismatch: it is not: runtimes multiply by deq_scale, other readers by weight_scale.
    """
    deq, inputs, scale = parts["deq_scale"], parts.get("input_scale"), parts.get("scale")
    if deq.shape != (rows,) or inputs is None or inputs.n != 1 or (scale and scale.shape != (rows, 1)):
        raise FormatMismatch(
            f"a layer with static inputs has one input_scale, and a deq_scale and a weight_scale for each of {rows} "
            f"rows, but found {deq}, {inputs or 'no input_scale'} and {scale or 'no weight_scale'}"
        )
    products = _read_deq_scale(deq)
    if scale is None:
        return
    (of_inputs,) = read_floats(inputs)
    for row, (product, factor) in enumerate(zip(products, read_floats(scale), strict=True)):
        expected = factor * of_inputs
        if not abs(product - expected) <= BFLOAT16_STEP * abs(expected):
            raise FormatMismatch(
                f"{deq} is not weight_scale · input_scale: row {row} has {product:.6g}, expected {expected:.6g}; "
                "runtimes multiply by deq_scale: quantize the layer again"
            )


def _read_deq_scale(entry: Entry) -> tuple[float, ...]:
    """Return the numbers of a deq_scale, which may be stored as integers with the bits of float32 numbers."""
    if entry.dtype == "F32":
        return read_floats(entry)
    try:
        return struct.unpack(f"<{entry.n}f", struct.pack(f"<{entry.n}i", *read_integers(entry)))
    except struct.error as error:
        raise FormatMismatch(f"{entry} should hold the bits of float32 numbers") from error


def _divide(parts: Parts, chunk: Chunk, workspace: Workspace) -> Tensor:
    """Return deq_scale / input_scale of a chunk's rows, (r, 1) float32."""
    deq, inputs = parts["deq_scale"], parts["input_scale"]
    stored = workspace.read("deq_scale", deq, chunk.row, (chunk.shape[0], 1))
    product = stored if stored.dtype == torch.float32 else stored.to(torch.int32).view(torch.float32)
    return product / workspace.read_whole("input_scale", inputs).view(1, 1).float()


def _doubt_offset(parts: Parts) -> tuple[str, ...]:
    """Return a warning if offsets are not 0 but runtimes ignore them: the producer may write such offsets for W4A4."""
    declared, offset = parts.hints.config.get(parts.codes.name), parts.get("zero_point")
    if declared != "W4A4_DYNAMIC" or offset is None or not any(offset.read()):
        return ()
    return ("its weight_offset is not 0, but vllm-ascend and SGLang ignore it for W4A4: they get other weights",)


FORMATS = (
    Format(
        "modelslim_int",
        INTEGERS,
        fit_bytes,
        summary="ModelSlim W8A8, W8A16, W4A4: a code in each byte, a scale and an offset per row or group",
    ),
    Format(
        "modelslim_int4",
        PAIRS,
        fit_pairs,
        summary="ModelSlim W4A8: 4-bit codes of two rows in a byte, a scale per row",
    ),
    Format(
        "modelslim_fp8",
        FP8,
        fit_bytes,
        summary="ModelSlim FP8: E4M3 codes, a scale and an offset per row",
        usual_db=(31, 33),
    ),
    Format(
        "modelslim_mxfp4_dual",
        TWO_SCALES,
        fit_dual,
        summary="ModelSlim W4A4_MXFP4_DUALSCALE: MXFP4 with a second scale per 512 columns",
    ),
)
