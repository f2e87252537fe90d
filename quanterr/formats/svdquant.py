"""SVDQuant W4A4 in ComfyUI files: signed four-bit codes of a smoothed weight and a low-rank branch.

    in order
      weight           i8                (rows, cols / 2), two codes per byte, the first column in the low nibble
      weight_scale     bf16, f16, f32    (cols / 64, rows)
      proj_up          bf16, f16, f32    (rows, rank)
    in tiles (layout kitchen_tile_packed_w4a4)
      weight           i8                (rows / 128, cols / 64, 32, 128)
      weight_scale                       (rows / 128, cols / 64, 128)
      proj_up                            (rows / 128, rank, 128)
      byte (r, c) of the ordered weight, r = 128 t + 4 a + b, c = 32 g + d, is [t, g, a, 32 b + d] in tiles;
      number (r, g), r = 128 t + a, of the other parts is [t, g, a]
    both
      smooth_factor    bf16, f16, f32    (cols,)
      proj_down        bf16, f16, f32    (cols, rank)

    residual[r, c] = float32(code[r, c]) * float32(scale[c // 64, r])      code in -8 … 7    rounded
    weight = residual / smooth_factor + proj_up @ proj_down^T                    float64, rounded
    weight = (residual + proj_up @ proj_down^T) / smooth_factor                  the same, if the label's
                                                            lowrank_branch_input_basis is post_smoothing

comfy-kitchen and convert_to_quant name the other parts weight_smooth_factor, weight_proj_down and weight_proj_up.
act_unsigned shifts activations at run time, not the weight.

Reference: Comfy-Org/comfy-kitchen@7d86acf comfy_kitchen/tensor/svdquant_w4a4.py, backends/eager/svdquant.py;
Comfy-Org/comfy-quants@55f0a26 formats/kitchen_tilepack.py, formats/svdquant_w4a4.py.
"""

from functools import partial

from msgspec.structs import replace

from quanterr.checkpoints import Entry
from quanterr.formats.base import Branch, Decoder, Format, FormatMismatch, Parts, PartSpec, Weight
from quanterr.formats.shared import element_types
from quanterr.formats.shared.comfy_labels import FLOATS, INT8, check_labels
from quanterr.formats.shared.padding import Padded, fit_padded, read_padded
from quanterr.kernel.decoder import LowRank
from quanterr.kernel.grid import Grid
from quanterr.kernel.levels import INT4
from quanterr.kernel.tiles import Tiles
from quanterr.util.text import display

LABELS = frozenset({"svdquant_w4a4"})
GROUP = 64
TILE_ROWS, INTERLEAVED = 128, 4
TILE = (TILE_ROWS // INTERLEAVED, INTERLEAVED * GROUP // 2)
TILES, ROW_SCALE_TILES = Tiles("R C a32 b4 d32 n2", "Rab", "Cdn", 4), Tiles("R C a128", "Ra", "C")
BASES = {None: False, "raw": False, "post_smoothing": True}
NEEDS = {
    "codes": PartSpec(("{weight}",), INT8),
    "scale": PartSpec(("{weight}_scale",), FLOATS),
    "smooth": PartSpec(("{weight}_smooth_factor", "{module}.smooth_factor"), FLOATS),
    "down": PartSpec(("{weight}_proj_down", "{module}.proj_down"), FLOATS),
    "up": PartSpec(("{weight}_proj_up", "{module}.proj_up"), FLOATS),
}


def fit(parts: Parts) -> Weight:
    """Return the weight, stored in order or in tiles, as its codes' shape implies."""
    comfy_format, warnings = check_labels(parts, LABELS)
    tiled = len(parts.codes.shape) == 4
    rows, cols = _find_shape(parts.codes)
    rank = parts["down"].shape[-1] if parts["down"].shape else 0
    tiles = rows // TILE_ROWS
    expected = {
        "scale": (tiles, cols // GROUP, TILE_ROWS) if tiled else (cols // GROUP, rows),
        "smooth": (cols,),
        "down": (cols, rank),
        "up": (tiles, rank, TILE_ROWS) if tiled else (rows, rank),
    }
    for role, shape in expected.items():
        if parts[role].shape != shape:
            raise FormatMismatch(f"{parts[role]} should be {list(shape)} for codes {parts.codes}")
    low_rank = _fit_low_rank(parts, rank)
    padded = fit_padded(parts, (rows, cols), GROUP, 1)
    lies = "in tiles" if tiled else "in order"
    return parts.weight(
        padded.shape,
        _read(parts, padded, low_rank),
        code_bits=4,
        levels=INT4,
        uniform_bits=None,  # the low-rank product corrects errors of codes
        block_size=(1, GROUP),
        branch=Branch(partial(low_rank.read_factors, (padded.rows, padded.cols), 0), parts["smooth"]),
        evidence=(
            f"4-bit codes {lies}, a branch of rank {rank}" + (", the branch smoothed too" if low_rank.smoothed else ""),
        ),
        warnings=warnings,
        comfy_format=comfy_format,
    )


def _find_shape(codes: Entry) -> tuple[int, int]:
    """Return (rows, cols) of the weight."""
    shape = codes.shape
    if len(shape) == 4 and shape[2:] == TILE:
        return shape[0] * TILE_ROWS, shape[1] * GROUP
    if len(shape) == 2 and 2 * shape[1] % GROUP == 0:
        return shape[0], 2 * shape[1]
    raise FormatMismatch(
        f"SVDQuant codes are (rows, cols / 2) with cols in groups of {GROUP}, or in tiles of {TILE}: {codes}"
    )


def _smooths_branch(parts: Parts) -> bool:
    """Return whether the low-rank product, too, is divided by the smoothing factors."""
    label = next(iter(parts.hints.labels), None)
    basis = label.fields.get("lowrank_branch_input_basis") if label else None
    if basis not in BASES:
        raise FormatMismatch(
            f"its label's lowrank_branch_input_basis {display(str(basis))} is neither raw nor post_smoothing"
        )
    return BASES[basis]


def _read(parts: Parts, padded: Padded, low_rank: LowRank) -> Decoder:
    """Return the decoder of the weight: code · scale with smoothing undone, plus the low-rank product."""
    codes, cols, scale = parts.codes, padded.stored_cols, Grid(parts["scale"], padded.stored_cols // GROUP, GROUP)
    if len(codes.shape) == 4:
        code_grid = Grid(codes, cols, 1, key="codes", tiles=TILES, levels=element_types.INT4)
        decoder = Decoder(
            codes, cols, scale=replace(scale, tiles=ROW_SCALE_TILES), group=GROUP, read=code_grid, low_rank=low_rank
        )
    else:
        scale = replace(scale, turned=True)
        decoder = Decoder(codes, cols, levels=element_types.INT4, scale=scale, group=GROUP, low_rank=low_rank)
    return read_padded(padded, decoder)


def _fit_low_rank(parts: Parts, rank: int) -> LowRank:
    tiles = ROW_SCALE_TILES if len(parts.codes.shape) == 4 else None
    up, down = Grid(parts["up"], rank, key="up", tiles=tiles), Grid(parts["down"], rank, key="down")
    return LowRank(up, down, Grid(parts["smooth"], key="smooth"), _smooths_branch(parts))


FORMATS = (Format("svdquant_w4a4", NEEDS, fit, usual_db=(24, 26), corrects_biases=True),)
