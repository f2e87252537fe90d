"""SVDQuant W4A4 in Nunchaku files: four-bit codes of a smoothed weight and a low-rank branch, in fragments.

    X.qweight        i8            (rows, cols / 2)
    X.wscales        bf16, f16     (cols / 64, rows): int4, signed codes
                     f8_e4m3       (cols / 16, rows): nvfp4, E2M1 codes
    X.smooth         bf16, f16     (cols,)
    X.smooth_orig    bf16, f16     (cols,), optional
    X.lora_down      bf16, f16     (cols, rank)
    X.lora_up        bf16, f16     (rows, rank)
    X.wtscale        floating      one; nvfp4, optional
    X.wcscales       bf16, f16     (rows,); nvfp4, optional

    newer names: smooth_factor, smooth_factor_orig, proj_down, proj_up

    residual[r, c] = float32(code[r, c]) * float32(wscales[r, group of c])                       rounded
                     * float32(wtscale) * float32(wcscales[r]), if stored                        rounded each
    weight = residual / smooth + lora_up @ lora_down                                    float64, rounded

All parts are in the order of shared/nunchaku_order.py; rows and columns are padded to multiples of 128, and the weight
is the first of them.

If smooth is one everywhere and smooth_orig is not, the smoothing was folded into the V rows of the fused projection
before this layer: there V[j, :] = stored * smooth_orig[j], here

    weight = (residual + lora_up @ lora_down) / smooth_orig                             float64, rounded

Reference: mit-han-lab/deepcompressor@69f3473 backend/nunchaku/convert.py, utils.py; nunchaku-tech/nunchaku@3a3cc3d
nunchaku/models/linear.py, models/transformers/transformer_flux_v2.py.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from quanterr.checkpoints import Entry
from quanterr.formats.base import Chunk, Format, FormatMismatch, Parts, PartSpec, Values, Weight, Workspace
from quanterr.formats.shared import element_types
from quanterr.formats.shared.lowrank_branch import add_branch
from quanterr.formats.shared.nunchaku_order import (
    TILE,
    find_tiles,
    order_codes,
    order_down,
    order_scales,
    order_small_scales,
    order_up,
    read_tiles,
)
from quanterr.formats.shared.padding import Padded, fit_padded
from quanterr.formats.shared.scale_grid import multiply
from quanterr.kernel.levels import E2M1, INT4
from quanterr.lazy_torch import Tensor
from quanterr.util import strict_json
from quanterr.util.text import display

HALVES = frozenset({"BF16", "F16"})
ONE = {"BF16": b"\x80\x3f", "F16": b"\x00\x3c"}
GROUPS = {"int4": 64, "nvfp4": 16}
CODES = {"int4": "int4", "fp4_e2m1_all": "nvfp4"}  # names in quantization_config

# Fused projections, and the projection that consumes their V rows; relative to the name of the block.
BEFORE = {
    "qkv_proj": ("out_proj",),
    "qkv_proj_context": ("out_proj_context",),
    "to_qkv": ("to_out.0", "to_out"),
    "add_qkv_proj": ("to_add_out",),
}


NEEDS = {
    "codes": PartSpec(("{module}.qweight",), frozenset({"I8"})),
    "scale": PartSpec(("{module}.wscales",), HALVES | {"F8_E4M3"}),
    "smooth": PartSpec(("{module}.smooth", "{module}.smooth_factor"), HALVES),
    "down": PartSpec(("{module}.lora_down", "{module}.proj_down"), HALVES),
    "up": PartSpec(("{module}.lora_up", "{module}.proj_up"), HALVES),
    "smooth_orig": PartSpec(("{module}.smooth_orig", "{module}.smooth_factor_orig"), HALVES, optional=True),
    "tensor_scale": PartSpec(("{module}.wtscale",), HALVES | {"F32"}, optional=True),
    "row_scale": PartSpec(("{module}.wcscales",), HALVES, optional=True),
}


@dataclass(frozen=True, slots=True)
class NunchakuLayout:
    """The layout of one weight."""

    group: int
    padded: Padded
    folded: bool  # the smoothing is folded into the previous layer
    v_factors: Entry | None  # the next layer's smoothing factors, folded into this one's V rows


def fit(codes: str, parts: Parts) -> Weight | None:
    """Return the weight, without its padding, if its codes are of this kind."""
    if codes != ("nvfp4" if parts["scale"].dtype == "F8_E4M3" else "int4"):
        return None
    layout = _fit_layout(codes, parts)
    declared = f"{codes} codes in fragments, a branch of rank {parts['down'].shape[1]}"
    if layout.folded:
        declared += "; its smoothing is folded into the V rows before it, and undone on both sides"
    if layout.v_factors:
        declared += f"; V rows times {layout.v_factors.name}, which is folded into them"
    return parts.weight(
        layout.padded.shape,
        partial(dequantize, parts, layout),
        code_bits=4,
        levels=E2M1 if codes == "nvfp4" else INT4,
        block_size=(1, layout.group),
        evidence=(declared,),
        warnings=tuple(_find_doubts(codes, parts)),
    )


def _fit_layout(codes: str, parts: Parts) -> NunchakuLayout:
    stored, scale = parts.codes, parts["scale"]
    rows, cols = (stored.shape[0], 2 * stored.shape[1]) if len(stored.shape) == 2 else (0, 0)
    if not rows or not cols or rows % TILE or cols % TILE:
        raise FormatMismatch(f"Nunchaku codes are (rows, cols / 2), both in multiples of {TILE}, not {stored}")
    group = GROUPS[codes]
    scaled = scale.n // rows * group  # columns with scales: fewer if the codes have more padding
    rank = parts["down"].shape[-1] if parts["down"].shape else 0
    expected = {
        "scale": (scaled // group, rows),
        "smooth": (cols,),
        "smooth_orig": (cols,),
        "down": (cols, rank),
        "up": (rows, rank),
        "row_scale": (rows,),
    }
    for role, shape in expected.items():
        part = parts.get(role)
        if part and part.shape != shape:
            raise FormatMismatch(f"{part} should be {list(shape)} for codes {stored}")
    if not cols - TILE < scaled <= cols or (scaled // group) % (TILE // 64 if codes == "int4" else 4):
        raise FormatMismatch(f"{scale} should be [{cols // group}, {rows}] for codes {stored}")
    for role in ("tensor_scale", "row_scale"):
        if codes == "int4" and (part := parts.get(role)):
            raise FormatMismatch(f"{part} is not expected with int4 codes")
    if rank % 16 or not rank:
        raise FormatMismatch(f"{parts['down']} should have a rank in multiples of 16")
    if (tensor_scale := parts.get("tensor_scale")) and tensor_scale.n != 1:
        raise FormatMismatch(f"{tensor_scale} should be one number")
    padded = fit_padded(parts, (rows, scaled), group, TILE)
    return NunchakuLayout(
        group, padded, _is_folded(parts["smooth"], parts.get("smooth_orig")), _find_v_factors(parts, padded)
    )


def _is_folded(smooth: Entry, smooth_orig: Entry | None) -> bool:
    """Return whether the layer was smoothed but the runtime does not smooth its input; both tensors are read."""
    ones = ONE[smooth.dtype] * smooth.n
    return smooth_orig is not None and smooth.read() == ones and smooth_orig.read() != ONE[smooth_orig.dtype] * smooth.n


def _find_v_factors(parts: Parts, padded: Padded) -> Entry | None:
    """Return the factors folded into the V rows of this fused projection; None if there are none."""
    block, _, last = parts.name.removesuffix(".weight").rpartition(".")
    for after in BEFORE.get(last, ()):
        stored = [
            next((found for name in names if (found := parts.checkpoint.get(f"{block}.{after}.{name}"))), None)
            for names in (("smooth", "smooth_factor"), ("smooth_orig", "smooth_factor_orig"))
        ]
        smooth, smooth_orig = stored
        if smooth and smooth_orig and smooth.dtype in HALVES and _is_folded(smooth, smooth_orig):
            if padded.rows % 3 or not 0 <= smooth_orig.n - padded.rows // 3 < TILE:
                raise FormatMismatch(
                    f"{smooth_orig} is folded into V rows that cannot be located in {padded.rows} rows"
                )
            return smooth_orig
    return None


def _find_doubts(codes: str, parts: Parts) -> Iterable[str]:
    for label in parts.hints.labels:
        yield f"{label}, but the codes are Nunchaku's: read as stored"
    configured = parts.hints.metadata.get("quantization_config")
    try:
        config = strict_json.loads_text(configured) if configured else None
    except strict_json.InvalidJson:
        return
    weight = config.get("weight") if isinstance(config, dict) else None
    dtype = weight.get("dtype") if isinstance(weight, dict) else None
    if dtype is not None and CODES.get(str(dtype)) != codes:
        yield f"quantization_config in the header declares {display(str(dtype))}, but {parts['scale']} is of {codes}"


def dequantize(parts: Parts, layout: NunchakuLayout, chunk: Chunk, workspace: Workspace) -> Values:
    """Return the codes' values with smoothing undone, plus the low-rank branch, (r, c)."""
    return layout.padded.dequantize(chunk, workspace, partial(_dequantize_block, parts, layout))


def _dequantize_block(parts: Parts, layout: NunchakuLayout, chunk: Chunk, workspace: Workspace) -> Values:
    top, bottom = find_tiles(chunk.row, chunk.stop_row)
    rows = slice(chunk.row - top * TILE, chunk.stop_row - top * TILE)
    cols = slice(chunk.col, chunk.stop_col)
    rank = parts["up"].shape[1]
    residual = _dequantize_residual(parts, layout, chunk, workspace)
    smooth = _read_factors("smooth_orig" if layout.folded else "smooth", parts, workspace)[cols]
    down = order_down(workspace.read_whole("down", parts["down"]))[:, cols]
    up = order_up(read_tiles("up", parts["up"], top, bottom, rank, workspace).view(-1, rank))[rows]
    values = add_branch(residual, smooth, up, down, layout.folded, workspace)
    if layout.v_factors:
        first_v = layout.padded.rows // 3 * 2
        begin = max(first_v, chunk.row)
        if begin < chunk.stop_row:
            factors = order_scales(workspace.read_whole("v_factors", layout.v_factors)).float()
            values[begin - chunk.row :].mul_(factors[begin - first_v : chunk.stop_row - first_v])
    return Values(values)


def _dequantize_residual(parts: Parts, layout: NunchakuLayout, chunk: Chunk, workspace: Workspace) -> Tensor:
    """Return codes times their scales, (r, c)."""
    top, bottom = find_tiles(chunk.row, chunk.stop_row)
    rows = slice(chunk.row - top * TILE, chunk.stop_row - top * TILE)
    width, group = parts.codes.shape[1], layout.group
    groups = slice(chunk.col // group, -(-chunk.stop_col // group))
    stored = read_tiles("codes", parts.codes, top, bottom, width, workspace).view(-1, width)
    codes = order_codes(stored, workspace)[rows, chunk.col // 2 : chunk.stop_col // 2]
    n_groups = parts["scale"].shape[0]
    scales = read_tiles("scale", parts["scale"], top, bottom, n_groups, workspace)
    if group == GROUPS["int4"]:
        values = element_types.unpack(codes, element_types.INT4)
        scale = order_scales(scales, n_groups)[rows, groups].float()
        return multiply(values, scale, chunk.col, group)
    values = element_types.unpack(codes, element_types.E2M1)
    scale = element_types.decode_e4m3_scales(order_small_scales(scales, n_groups)[rows, groups])
    multiply(values, scale, chunk.col, group)
    if tensor_scale := parts.get("tensor_scale"):
        values.mul_(workspace.read_whole("tensor_scale", tensor_scale).view(()).float())
    if parts.get("row_scale"):
        values.mul_(_read_factors("row_scale", parts, workspace)[chunk.row : chunk.stop_row, None])
    return values


def _read_factors(role: str, parts: Parts, workspace: Workspace) -> Tensor:
    """Read one number per row or column, in order, as flat float32."""
    return order_scales(workspace.read_whole(role, parts[role])).view(-1).float()


FORMATS = tuple(
    Format(
        f"nunchaku_{codes}",
        NEEDS,
        partial(fit, codes),
        summary=f"{codes} codes of a smoothed weight and a branch of low rank, in the order of Nunchaku",
        usual_db=usual_db,
    )
    for codes, usual_db in (("int4", (23, 24)), ("nvfp4", (24, 25)))
)
