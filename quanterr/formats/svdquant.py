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

from quanterr.checkpoints import Entry
from quanterr.formats.base import Branch, Chunk, Format, FormatMismatch, Parts, PartSpec, Values, Weight, Workspace
from quanterr.formats.shared import element_types
from quanterr.formats.shared.comfy_labels import FLOATS, INT8, check_labels
from quanterr.formats.shared.lowrank_branch import add_branch
from quanterr.formats.shared.padding import Padded, fit_padded
from quanterr.formats.shared.scale_grid import multiply
from quanterr.kernel.levels import INT4
from quanterr.lazy_torch import Tensor
from quanterr.util.text import display

LABELS = frozenset({"svdquant_w4a4"})
GROUP = 64
TILE_ROWS, INTERLEAVED = 128, 4
TILE = (TILE_ROWS // INTERLEAVED, INTERLEAVED * GROUP // 2)
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
    smoothed = _smooths_branch(parts)
    padded = fit_padded(parts, (rows, cols), GROUP, 1)
    lies = "in tiles" if tiled else "in order"
    return parts.weight(
        padded.shape,
        partial(dequantize, parts, padded, smoothed),
        code_bits=4,
        levels=INT4,
        block_size=(1, GROUP),
        branch=Branch(partial(_read_branch, parts, padded, smoothed), parts["smooth"]),
        evidence=(f"4-bit codes {lies}, a branch of rank {rank}" + (", the branch smoothed too" if smoothed else ""),),
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


def dequantize(parts: Parts, padded: Padded, smoothed: bool, chunk: Chunk, workspace: Workspace) -> Values:
    """Return float32(code) · float32(scale) with smoothing undone, plus the low-rank branch, (r, c)."""
    return padded.dequantize(chunk, workspace, partial(_dequantize_block, parts, padded, smoothed))


def _dequantize_block(parts: Parts, padded: Padded, smoothed: bool, chunk: Chunk, workspace: Workspace) -> Values:
    tiled = len(parts.codes.shape) == 4
    read = _read_tiles if tiled else _read_rows
    codes, scale, up = read(parts, padded, chunk, workspace)
    columns = slice(chunk.col, chunk.stop_col)
    values = element_types.unpack(codes, element_types.INT4)
    multiply(values, scale.float()[:, chunk.col // GROUP : chunk.stop_col // GROUP], chunk.col, GROUP)
    smooth = workspace.read_whole("smooth", parts["smooth"])[columns]
    down = workspace.read_whole("down", parts["down"])[columns].t()
    return Values(add_branch(values, smooth, up, down, smoothed, workspace))


def _read_rows(parts: Parts, padded: Padded, chunk: Chunk, workspace: Workspace) -> tuple[Tensor, Tensor, Tensor]:
    """Read codes, (r, c / 2), scales, (r, groups), and rows of proj_up, (r, rank), stored in order."""
    rows, rank = slice(chunk.row, chunk.stop_row), parts["up"].shape[1]
    first = (chunk.row * padded.stored_cols + chunk.col) // 2
    codes = workspace.read("codes", parts.codes, first, (chunk.shape[0], chunk.shape[1] // 2))
    scale = workspace.read_whole("whole_scale", parts["scale"])[:, rows].t()
    return codes, scale, workspace.read("up", parts["up"], chunk.row * rank, (chunk.shape[0], rank))


def _read_tiles(parts: Parts, padded: Padded, chunk: Chunk, workspace: Workspace) -> tuple[Tensor, Tensor, Tensor]:
    """Read codes, scales and rows of proj_up stored in tiles, like :func:`_read_rows`."""
    top, bottom = chunk.row // TILE_ROWS, -(-chunk.stop_row // TILE_ROWS)
    groups, rank = padded.stored_cols // GROUP, parts["up"].shape[1]
    tiles, inside = bottom - top, slice(chunk.row - top * TILE_ROWS, chunk.stop_row - top * TILE_ROWS)
    whole = tiles, groups, TILE[0], INTERLEAVED, GROUP // 2
    stored = workspace.read("codes", parts.codes, top * groups * TILE[0] * TILE[1], whole)
    codes = stored.permute(0, 2, 3, 1, 4).reshape(tiles * TILE_ROWS, padded.stored_cols // 2)
    codes = codes[inside, chunk.col // 2 : chunk.stop_col // 2]
    scale = workspace.read("scale", parts["scale"], top * groups * TILE_ROWS, (tiles, groups, TILE_ROWS))
    up = workspace.read("up", parts["up"], top * rank * TILE_ROWS, (tiles, rank, TILE_ROWS))
    return codes, _untile(scale)[inside], _untile(up)[inside]


def _read_branch(parts: Parts, padded: Padded, smoothed: bool, workspace: Workspace) -> tuple[Tensor, Tensor]:
    """Read the whole branch, (rows, rank) and (rank, cols) float32, for inputs that are not smoothed."""
    rows, cols = padded.shape
    stored = workspace.read_whole("up", parts["up"])
    up = (_untile(stored) if len(stored.shape) == 3 else stored)[:rows].float()
    down = workspace.read_whole("down", parts["down"])[:cols].t().float()
    if smoothed:
        down = down / workspace.read_whole("smooth", parts["smooth"])[:cols].float()
    return up.clone(), down.clone()


def _untile(stored: Tensor) -> Tensor:
    """Reorder (tiles, n, 128) to (rows, n)."""
    return stored.transpose(1, 2).reshape(-1, stored.shape[1])


FORMATS = (Format("svdquant_w4a4", NEEDS, fit, usual_db=(24, 26), corrects_biases=True),)
