"""SVDQuant W4A4 in Nunchaku files: four-bit codes of a smoothed weight and a low-rank branch, in fragments.

    X.qweight        i8            (rows, cols / 2)
    X.wscales        bf16, f16     (cols / 64, rows): int4, signed codes
                     f8_e4m3       (cols / 16, rows): nvfp4, E2M1 codes
                     u8            (cols / 32, rows): mxfp4, E2M1 codes, E8M0 exponents (AutoRound)
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
nunchaku/models/linear.py, models/transformers/transformer_flux_v2.py; intel/auto-round@b9f3d007
auto_round/export/svdquant_mxfp4.py, svdquant_nunchaku.py (format svdquant_nunchaku).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from quanterr.checkpoints import Entry
from quanterr.formats.base import Chunk, Decoder, Format, FormatMismatch, Parts, PartSpec, Weight, Workspace
from quanterr.formats.shared import element_types
from quanterr.formats.shared.nunchaku_order import BYTE_TILES, CODES, DOWN, EXPONENT_TILES, NUMBER_TILES, TILE, UP
from quanterr.formats.shared.padding import Padded, fit_padded, read_padded
from quanterr.kernel.decoder import LowRank
from quanterr.kernel.grid import E8M0, Grid
from quanterr.kernel.interpreter import Nested
from quanterr.kernel.levels import E2M1, INT4
from quanterr.lazy_torch import Tensor, torch
from quanterr.util import strict_json
from quanterr.util.text import display

HALVES = frozenset({"BF16", "F16"})
ONE_BYTES = {"BF16": b"\x80\x3f", "F16": b"\x00\x3c"}
GROUPS = {"int4": 64, "nvfp4": 16, "mxfp4": 32}
CODES_BY_SCALE_DTYPE = {"F8_E4M3": "nvfp4", "U8": "mxfp4"}  # dtype of scales → codes; of others, int4
NAMES = {"int4": ("int4",), "fp4_e2m1_all": ("nvfp4", "mxfp4")}  # names in quantization_config

# Fused projections, and the projection that consumes their V rows; relative to the name of the block.
VALUE_CONSUMERS = {
    "qkv_proj": ("out_proj",),
    "qkv_proj_context": ("out_proj_context",),
    "to_qkv": ("to_out.0", "to_out"),
    "add_qkv_proj": ("to_add_out",),
}


NEEDS = {
    "codes": PartSpec(("{module}.qweight",), frozenset({"I8"})),
    "scale": PartSpec(("{module}.wscales",), HALVES | CODES_BY_SCALE_DTYPE.keys()),
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
    if codes != CODES_BY_SCALE_DTYPE.get(parts["scale"].dtype, "int4"):
        return None
    layout = _fit_layout(codes, parts)
    declared = f"{codes} codes in fragments, a branch of rank {parts['down'].shape[1]}"
    if layout.folded:
        declared += "; its smoothing is folded into the V rows before it, and undone on both sides"
    if layout.v_factors:
        declared += f"; V rows times {layout.v_factors.name}, which is folded into them"
    return parts.weight(
        layout.padded.shape,
        _read(parts, layout),
        code_bits=4,
        levels=INT4 if codes == "int4" else E2M1,
        uniform_bits=None,  # the low-rank product corrects errors of codes
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
    scaled_cols = scale.n // rows * group  # columns with scales: fewer if the codes have more padding
    rank = parts["down"].shape[-1] if parts["down"].shape else 0
    expected = {
        "scale": (scaled_cols // group, rows),
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
    if not cols - TILE < scaled_cols <= cols or (scaled_cols // group) % (TILE // 64 if codes == "int4" else 4):
        raise FormatMismatch(f"{scale} should be [{cols // group}, {rows}] for codes {stored}")
    for role in ("tensor_scale", "row_scale"):
        if codes != "nvfp4" and (part := parts.get(role)):
            raise FormatMismatch(f"{part} is not expected with {codes} codes")
    if rank % 16 or not rank:
        raise FormatMismatch(f"{parts['down']} should have a rank in multiples of 16")
    if (tensor_scale := parts.get("tensor_scale")) and tensor_scale.n != 1:
        raise FormatMismatch(f"{tensor_scale} should be one number")
    padded = fit_padded(parts, (rows, scaled_cols), group, TILE)
    return NunchakuLayout(
        group, padded, _is_folded(parts["smooth"], parts.get("smooth_orig")), _find_v_factors(parts, padded)
    )


def _is_folded(smooth: Entry, smooth_orig: Entry | None) -> bool:
    """Return whether the layer was smoothed but the runtime does not smooth its input; both tensors are read."""
    ones = ONE_BYTES[smooth.dtype] * smooth.n
    return (
        smooth_orig is not None
        and smooth.read() == ones
        and smooth_orig.read() != ONE_BYTES[smooth_orig.dtype] * smooth.n
    )


def _find_v_factors(parts: Parts, padded: Padded) -> Entry | None:
    """Return the factors folded into the V rows of this fused projection; None if there are none."""
    block, _, last = parts.name.removesuffix(".weight").rpartition(".")
    for after in VALUE_CONSUMERS.get(last, ()):
        stored = [
            next((entry for name in names if (entry := parts.checkpoint.get(f"{block}.{after}.{name}"))), None)
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
    if dtype is not None and codes not in NAMES.get(str(dtype), ()):
        declared = display(str(dtype))
        yield f"quantization_config in the header declares {declared}, but {parts['scale']} scales {codes} codes"


def _read(parts: Parts, layout: NunchakuLayout) -> Decoder:
    """Return the decoder of the weight: codes with smoothing undone, plus the product, times V factors."""
    codes, padded, group = parts.codes, layout.padded, layout.group
    cols, rank = 2 * codes.shape[1], parts["up"].shape[1]
    levels = element_types.INT4 if group == GROUPS["int4"] else element_types.E2M1
    order, of_scales = {16: (BYTE_TILES, element_types.E4M3), 32: (EXPONENT_TILES, E8M0), 64: (NUMBER_TILES, ())}[group]
    scale = Grid(parts["scale"], parts["scale"].shape[0], group, levels=of_scales, tiles=order)
    tensor_scale, row_scale = parts.get("tensor_scale"), parts.get("row_scale")
    decoder = Decoder(
        codes,
        padded.stored_cols,
        scale=scale,
        group=group,
        factor=Grid(tensor_scale, key="tensor_scale") if tensor_scale else None,
        read=Grid(codes, cols, 1, key="codes", tiles=CODES, levels=levels),
    )
    if row_scale:
        of_rows = Grid(row_scale, key="row_scale", tiles=NUMBER_TILES)
        decoder = Decoder(codes, padded.stored_cols, scale=of_rows, group=group, read=Nested(decoder))
    decoder.low_rank = LowRank(
        Grid(parts["up"], rank, key="up", tiles=UP),
        Grid(parts["down"], rank, key="down", tiles=DOWN),
        Grid(parts["smooth_orig" if layout.folded else "smooth"], key="smooth", tiles=NUMBER_TILES),
        layout.folded,
    )
    if layout.v_factors:
        factors = partial(_read_v_factors, layout.v_factors, padded.rows // 3)
        decoder = Decoder(codes, padded.stored_cols, scale=factors, group=group, read=Nested(decoder))
    return read_padded(padded, decoder)


def _read_v_factors(entry: Entry, n: int, chunk: Chunk, workspace: Workspace) -> Tensor:
    """Return the factors of a chunk's rows, (r, 1) float32: ones for the first 2 ``n``, which are not V's."""
    factors = Grid(entry, key="v_factors", tiles=NUMBER_TILES)(Chunk(0, n, 0, 1), workspace)
    return torch.cat([factors.new_ones(2 * n, 1), factors])[chunk.row : chunk.stop_row]


FORMATS = tuple(
    Format(
        f"nunchaku_{codes}",
        NEEDS,
        partial(fit, codes),
        summary=f"{codes} codes of a smoothed weight and a branch of low rank, in the order of Nunchaku",
        usual_db=usual_db,
    )
    for codes, usual_db in (("int4", (23, 24)), ("nvfp4", (24, 25)), ("mxfp4", (22, 25)))
)
