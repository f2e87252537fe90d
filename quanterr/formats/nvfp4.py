"""NVFP4: E2M1 codes, an E4M3 scale per 16 columns, and a float32 scale for the tensor.

    weight            u8              (rows, cols / 2), two codes per byte; or (experts, rows, cols / 2)
                      f4              (rows, cols), or (experts, rows, cols)
    weight_scale      f8_e4m3 or u8   (rows, cols / 16), or the same in tiles: shared/swizzled_scales.py
                                      (rows, cols / 32) in W4A8_NVFP4_FP8, which config.json declares
    weight_scale_2    f32             one, or one per expert
    pre_quant_scale   floating        (cols,), if the layer multiplies its input by it; optional

    scale = float32(weight_scale[r, c // 16]) * weight_scale_2                        rounded
    weight[r, c] = e2m1(code[r, c]) * scale                                           rounded
                   * pre_quant_scale[c], if stored                                    rounded

Four dialects share these names: ComfyUI (convert_to_quant, BFL) puts the first column into the high nibble and scales
into tiles, and pads rows and columns to multiples of 16; its label may have nibble_order lo_first; ModelOpt puts the
first column into the low nibble and scales into rows, as do vLLM's and SGLang's loaders for it and for Quark; its
exports for ComfyUI, which hold quantization_config in the header, may use tiles. A label, or else the method in
config.json, prescribes the dialect, whatever the original says; if nothing does, the original chooses.

Reference: Comfy-Org/comfy-kitchen@7d86acf comfy_kitchen/tensor/nvfp4.py, backends/eager/quantization.py;
NVIDIA/Model-Optimizer@a2fbac7b modelopt/torch/quantization/qtensor/nvfp4_tensor.py; comfyanonymous/ComfyUI@6db4fa2f
comfy/ops.py for pre_quant_scale; NVIDIA/Model-Optimizer@a2fbac7b modelopt/torch/export/unified_export_hf.py
_postprocess_safetensors for exports in tiles; vllm-project/vllm vllm/model_executor/layers/quantization/modelopt.py.
"""

from quanterr.formats.base import Format, FormatMismatch, Parts, Weight
from quanterr.formats.shared.comfy_labels import NVFP4_LABELS, check_labels
from quanterr.formats.shared.config_checks import find_declared_method
from quanterr.formats.shared.element_types import E4M3
from quanterr.formats.shared.microscaling import NVFP4_PARTS, check_global_scale, multiply_scales, read_microscaled
from quanterr.formats.shared.padding import fit_padded
from quanterr.formats.shared.pre_quant_scale import fit_pre_scale
from quanterr.formats.shared.quark_config import has_e5m3_scales
from quanterr.formats.shared.swizzled_scales import fit_block_scales
from quanterr.kernel.grid import Grid
from quanterr.kernel.levels import E2M1

MULTIPLE = 16  # ComfyUI pads rows and columns to multiples of this
BLOCK, WIDE_BLOCK = 16, 32  # columns that share a scale
WIDE_BLOCK_ALGO = "W4A8_NVFP4"  # beginning of the quant_algo that has wide blocks


def fit(parts: Parts) -> Weight | None:
    """Return the weight in the dialect that label and shapes imply, with other dialects as alternatives."""
    codes = parts.codes
    if has_e5m3_scales(parts):
        return None
    if len(codes.shape) not in (2, 3):
        raise FormatMismatch(f"NVFP4 codes are (rows, cols / 2) or (experts, rows, cols / 2), not {codes}")
    comfy_format, warnings = check_labels(parts, NVFP4_LABELS)
    stored = (*codes.shape[:-1], codes.shape[-1] * (1 if codes.dtype == "F4" else 2))
    experts = codes.shape[0] if len(codes.shape) == 3 else 1
    block, layouts = _fit_layouts(parts, stored, experts)
    check_global_scale(parts["global_scale"], experts)
    padded = fit_padded(parts, stored, block, MULTIPLE)
    factor = fit_pre_scale(parts, padded.cols, padded.stored_cols)
    orders = [label.fields.get("nibble_order") for label in parts.hints.labels]
    tiled_first = comfy_format is not None
    high_first = tiled_first and "lo_first" not in orders
    declared = None if comfy_format else find_declared_method(parts.hints.config, "modelopt", "quark")
    may_be_tiled = len(layouts) > 1 and "quantization_config" in parts.hints.metadata
    if block == WIDE_BLOCK and not parts.hints.config:
        warnings = (*warnings, _describe_wide_blocks(parts))
    alternatives = [
        parts.weight(
            padded.shape,
            read_microscaled(
                codes,
                "e2m1",
                padded,
                multiply_scales(layout, parts["global_scale"], padded.stored_rows),
                factor,
                high_first=high,
            ),
            code_bits=4,
            levels=E2M1.centred_levels,
            block_size=(1, block),
            evidence=(
                f"NVFP4, first column in the {'high' if high else 'low'} nibble, "
                f"scales in {'tiles' if layout.tiles else 'rows'}"
                + (f", as {declared} prescribes" if declared and not layout.tiles and not high else ""),
            ),
            warnings=warnings,
            comfy_format=comfy_format,
            prescribed=comfy_format is not None or (declared is not None and not may_be_tiled),
        )
        for layout in sorted(layouts, key=lambda layout: bool(layout.tiles) != tiled_first)
        for high in (high_first, not high_first)
    ]
    return alternatives[0].with_alternatives(alternatives[1:])


def _fit_layouts(parts: Parts, stored: tuple[int, ...], experts: int) -> tuple[int, tuple[Grid, ...]]:
    """Return the columns that share a scale, and the possible layouts of the scales."""
    for block in (BLOCK, WIDE_BLOCK):
        layouts = fit_block_scales(parts["scale"], stored[-2], -(-stored[-1] // block), experts, block, E4M3)
        if layouts and block == WIDE_BLOCK and parts.hints.config and not _declares_wide_blocks(parts.hints.config):
            raise FormatMismatch(f"{_describe_wide_blocks(parts)}; quantize this layer again")
        if layouts:
            return block, layouts
    raise FormatMismatch(
        f"its scale {parts['scale']} fits codes {list(parts.codes.shape)} neither in rows nor in tiles: "
        f"expected {[*stored[:-1], -(-stored[-1] // 16)]}, or the same rounded up to multiples of 128 × 4"
    )


def _describe_wide_blocks(parts: Parts) -> str:
    return (
        f"its scale {parts['scale']} has one number for each {WIDE_BLOCK} columns, but NVFP4 has one for each {BLOCK} "
        "unless config.json declares W4A8_NVFP4_FP8: half of the scales are missing, as when packed bytes are taken "
        "for columns"
    )


def _declares_wide_blocks(declared: object) -> bool:
    """Return whether a configuration declares, for any layer, the wide blocks of ModelOpt's W4A8_NVFP4_FP8."""
    if not isinstance(declared, dict):
        return False
    wide = declared.get("group_size") == WIDE_BLOCK or str(declared.get("quant_algo")).startswith(WIDE_BLOCK_ALGO)
    return wide or any(_declares_wide_blocks(value) for value in declared.values())


FORMATS = (Format("nvfp4", NVFP4_PARTS, fit, usual_db=(19, 21), corrects_biases=True),)
