"""MLX: codes in 32-bit words, row by row, with a scale and a bias, or only a scale, for each group of columns.

    weight    u32                             (rows, cols·b / 32), or with experts or heads as leading axes; codes
                                              of b bits follow each other in a stream: low bits first
    scales    bf16, f16, f32; u8              (rows, cols / group), with the same leading axes
    biases    bf16, f16, f32                  shaped as scales, if codes are integers; transformers: qbiases
    weight.scale, weight.bias, weight.global_scale
                                              the same in Ollama's store, and an f32 for the tensor or for each expert,
                                              if NVFP4 was not quantized by MLX; it multiplies the scales

    mlx_affine    1 2 3 4 5 6 8 bits, group 32, 64, 128     weight = code * scale           rounded
                                                                     + bias                 rounded
    mlx_mxfp4     4 bits, group 32                          weight = e2m1(code) * 2^(scale - 127)
    mlx_nvfp4     4 bits, group 16                          weight = e2m1(code) * e4m3(scale), rounded
    mlx_mxfp8     8 bits, group 32                          weight = e4m3(code) * 2^(scale - 127)

The shapes give only bits times group. The original's number of columns gives both and wins over config.json, whose
layer names often differ from the tensors' names. Without an original (`inspect`), config.json decides, by layer or for
all layers, unless the shapes leave only one possibility. If config.json declares no quantization, the widths and the
block_size in jang_config.json decide, which JANG's files have.

Reference: ml-explore/mlx@846d1762 mlx/ops.cpp quantize and dequantize, mlx/backend/cpu/quantized.cpp;
ml-explore/mlx-lm@d78bf58e mlx_lm/utils.py; huggingface/transformers@5.23.0 integrations/metal_quantization.py
(qbiases); jjang-ai/vmlx@3e256e3f vmlx_engine/utils/jang_loader.py; ollama/ollama@fb307609 x/create/prequant.go,
x/mlxrunner/model/linear.go.
"""

from collections.abc import Iterator
from functools import partial

from quanterr.formats.base import (
    Decoder,
    Format,
    FormatMismatch,
    Parts,
    PartSpec,
    Weight,
)
from quanterr.formats.shared.element_types import E4M3, list_integers
from quanterr.formats.shared.microscaling import (
    CODE_BITS,
    LEVELS,
    SmallFloat,
    check_global_scale,
    multiply_scales,
    read_microscaled,
)
from quanterr.formats.shared.padding import Padded, fit_unpadded
from quanterr.kernel.grid import E8M0, Grid
from quanterr.kernel.levels import uniform

WORD = 32  # bits
BITS = (1, 2, 3, 4, 5, 6, 8)
GROUPS = (32, 64, 128)
DEFAULTS = (("bits", 4), ("group_size", 64))  # settings for integers if config.json has null
FLOATS = frozenset({"F32", "BF16", "F16"})
CODES = PartSpec(("{weight}",), frozenset({"U32"}))
SCALES = "{module}.scales", "{weight}.scale"
AFFINE = {
    "codes": CODES,
    "scale": PartSpec(SCALES, FLOATS),
    "bias": PartSpec(("{module}.biases", "{module}.qbiases", "{weight}.bias"), FLOATS),
}
FLOAT = {"codes": CODES, "scale": PartSpec(SCALES, frozenset({"U8"}))}
GLOBAL = {"global_scale": PartSpec(("{weight}.global_scale",), frozenset({"F32"}), optional=True)}


def fit_affine(parts: Parts) -> Weight:
    """Return the weight with the bits and the group that the original's shape gives."""
    codes, scale, bias = parts.codes, parts["scale"], parts["bias"]
    _check_rows(parts)
    if bias.shape != scale.shape:
        raise FormatMismatch(f"its biases {bias} should have the shape of its scales {scale}")
    code_bits, group, source = _find_bits_and_group(parts)
    shape = (*codes.shape[:-1], scale.shape[-1] * group)
    declared = set(_list_declared_layouts(parts.hints.config))
    warning = f"config.json declares no layer of {code_bits} bits in groups of {group}, which {source} implies"
    return parts.weight(
        shape,
        _read(parts, fit_unpadded(parts, shape, group), code_bits),
        levels=uniform(code_bits),
        block_size=(1, group),
        evidence=(f"{code_bits} bits in groups of {group}: {source}",),
        warnings=(warning,) if declared and (code_bits, group) not in declared else (),
    )


def _check_rows(parts: Parts) -> None:
    codes, scale = parts.codes, parts["scale"]
    if len(codes.shape) < 2 or codes.shape[:-1] != scale.shape[:-1] or 0 in (*codes.shape, *scale.shape):
        raise FormatMismatch(f"its scales {scale} should have the rows of its codes {codes}")


def _find_bits_and_group(parts: Parts) -> tuple[int, int, str]:
    """Return the bits of a code, the columns of a group, and the source of both."""
    codes, scale, config = parts.codes, parts["scale"], parts.hints.config
    ratio = WORD * codes.shape[-1] / scale.shape[-1]  # bits times group
    possible = {scale.shape[-1] * group: (b, group) for group in GROUPS for b in BITS if b * group == ratio}
    if not possible:
        raise FormatMismatch(f"codes {codes} and scales {scale} fit no group of 32, 64 or 128 columns of 1 to 8 bits")
    for cols in _list_possible_columns(parts):
        if cols in possible:
            return *possible[cols], f"the original's {cols} columns"
    declared = [
        pair for pair in _list_declared_layouts(config, parts.name.removesuffix(".weight")) if pair in possible.values()
    ]
    everywhere = [pair for pair in _list_declared_layouts(config, "") if pair in possible.values()]
    if declared or everywhere:
        return *(declared or everywhere)[0], "config.json"
    if len(possible) > 1:
        choices = " or ".join(f"{b} bits in groups of {group}" for b, group in possible.values())
        raise FormatMismatch(
            f"codes {codes} and scales {scale} could be {choices}; only the original or config.json decides"
        )
    return *next(iter(possible.values())), "the shapes"


def _list_possible_columns(parts: Parts) -> Iterator[int]:
    """Yield the numbers of columns that the original's shape allows, the likeliest first."""
    shape, rows = parts.hints.shape, parts.codes.shape[:-1]
    if shape is None or len(shape) < 2:
        return
    if shape[:-1] != rows and (*shape[:-2], shape[-1]) == rows:  # inputs and outputs are swapped in the original
        yield shape[-2]
    yield shape[-1]


def _list_declared_layouts(config: object, layer: str | None = None) -> Iterator[tuple[int, int]]:
    """Yield (bits, group) that config.json declares: for a layer, for all layers ("") or anywhere (None)."""
    if not isinstance(config, dict):
        return
    if isinstance(widths := config.get("bit_widths_used"), list) and layer in (None, ""):
        yield from ((bits, config["block_size"]) for bits in widths if "block_size" in config)
    places = {"": config} | {key: value for key, value in config.items() if isinstance(value, dict)}
    for name, configured in places.items():
        if layer not in (None, name) or not {"bits", "group_size"} & configured.keys():
            continue
        bits, group = (default if configured.get(key) is None else configured[key] for key, default in DEFAULTS)
        if isinstance(bits, int) and isinstance(group, int):
            yield bits, group


def _read(parts: Parts, padded: Padded, code_bits: int) -> Decoder:
    """Return the decoder of the weight: code · scale + bias."""
    cols, group = padded.stored_cols, padded.step
    return Decoder(
        parts.codes,
        cols,
        levels=list_integers(code_bits),
        scale=Grid(parts["scale"], cols // group, group),
        shift=Grid(parts["bias"], cols // group, group, key="bias"),
        group=group,
    )


def fit_float(element: SmallFloat, group: int, levels: tuple[float, ...], parts: Parts) -> Weight | None:
    """Return the weight if its codes have this element type."""
    codes, scale = parts.codes, parts["scale"]
    _check_rows(parts)
    ratio = WORD * codes.shape[-1] / scale.shape[-1]
    if ratio not in (4 * 32, 4 * 16, 8 * 32):
        raise FormatMismatch(f"codes {codes} and scales {scale} are neither MXFP4 nor NVFP4 nor MXFP8")
    if ratio != CODE_BITS[element] * group:
        return None
    shape = (*codes.shape[:-1], scale.shape[-1] * group)
    if (global_scale := parts.get("global_scale")) is not None:
        check_global_scale(global_scale, shape[0] if len(shape) == 3 else 1)
    scales = multiply_scales(Grid(scale, scale.shape[-1], group, levels=levels), global_scale, shape[-2])
    return parts.weight(
        shape,
        read_microscaled(codes, element, fit_unpadded(parts, shape, group), scales),
        code_bits=CODE_BITS[element],
        levels=LEVELS[element],
        block_size=(1, group),
        scale=scale if levels is E8M0 else None,
        evidence=(f"codes {codes}, scales {scale}",),
    )


FORMATS = (
    Format(
        "mlx_affine",
        AFFINE,
        fit_affine,
        summary="MLX: integers of 1 to 8 bits, a scale and a bias for each group of columns",
    ),
    Format(
        "mlx_mxfp4",
        FLOAT,
        partial(fit_float, "e2m1", 32, E8M0),
        summary="MLX: E2M1 codes, an E8M0 exponent per 32 columns",
        usual_db=(17, 19),
    ),
    Format(
        "mlx_nvfp4",
        FLOAT | GLOBAL,
        partial(fit_float, "e2m1", 16, E4M3),
        summary="MLX: E2M1 codes, an E4M3 scale per 16 columns",
        usual_db=(19, 21),
    ),
    Format(
        "mlx_mxfp8",
        FLOAT,
        partial(fit_float, "e4m3", 32, E8M0),
        summary="MLX: E4M3 codes, an E8M0 exponent per 32 columns",
        usual_db=(30, 32),
    ),
)
