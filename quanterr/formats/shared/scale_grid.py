"""Codes times a scale; the shapes show which scale belongs to each element.

    scale                       weight       scale of an element
    [], [1], [1, 1] …           any          the only one
    [M], [M, 1]                 [M, …]       of its row
    [a, b]                      [M, K]       of its block, in a grid of a × b
    [M, b, 1]                   [M, K]       of its row and block of columns
    [a, 1, b, 1]                [M, K]       as [a, b]
    [E], [E, 1], [E, 1, 1]      [E, M, K]    of its expert
    [E, M, 1], [E, M]           [E, M, K]    of its expert's row
    [E, 1, K], [E, K]           [E, M, K]    of its expert's column
    [E, a, b]                   [E, M, K]    of its expert's block

The edges of a block are not stored, and the last block may be partial: 140 rows in 2 blocks are 128 + 12 or 70 + 70.
The first of these that fits gives the edges: a label, config.json or all other weights of the checkpoint, if their
edges produce this grid; powers of two, if just one pair fits; config.json, if the grid is larger than its edges need;
a divisor that is not a power of two, with a warning. If two pairs fit, nothing is guessed, except that square blocks
are preferred, that divisors are preferred for groups of columns, and that a weight_scale_inv has blocks of 128 × 128,
as its writers use nothing else. Broadcasting is never used: it would take [M] for the columns of a square weight.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from math import prod
from typing import NamedTuple

from msgspec.structs import replace

from quanterr.checkpoints import Entry
from quanterr.checkpoints.labels import HEADER, TENSOR
from quanterr.errors import FormatMismatch
from quanterr.formats.base import Decoder, Format, Parts, PartSpec, Weight
from quanterr.formats.shared import element_types
from quanterr.formats.shared.comfy_labels import check_granularity, check_labels
from quanterr.formats.shared.padding import check_unpadded
from quanterr.formats.shared.pre_quant_scale import fit_pre_scale
from quanterr.kernel.grid import E8M0, MAX_READ_WHOLE, Grid, decode_e8m0
from quanterr.kernel.interpreter import Native
from quanterr.kernel.levels import OF_DTYPE
from quanterr.lazy_torch import Tensor, torch
from quanterr.tensors.chunks import as_matrix
from quanterr.tensors.workspace import Workspace

Edges = tuple[int, int]

EXPONENTS = ("U8", "F8_E8M0")  # dtypes of E8M0 exponents
DEEPSEEK_BLOCK = (128, 128)
CONFIG = "config.json"
DECLARING_SOURCES = (CONFIG, f"the {TENSOR}", f"the {HEADER}")  # sources that declare block sizes


class FittedGrid(NamedTuple):
    """The scales of a weight, the block that shares each, and the reason why these blocks are assumed."""

    numbers: Grid
    granularity: str  # "tensor" | "row" | "block"
    block: Edges
    reason: str
    warning: str | None = None


def collect_hints(parts: Parts, shaped: Iterable[tuple[Edges, str]] = ()) -> list[tuple[Edges, str]]:
    """Return block edges that labels, ``shaped`` and config.json declare, the most reliable source first."""
    labelled = [(label.block, f"the {label.source}") for label in parts.hints.labels if label.block]
    return [*labelled, *shaped, *parts.hints.blocks]


def find_common_block(pairs: Iterable[tuple[Entry, Entry]]) -> Edges | None:
    """Return the square block edges on which all weights with unambiguous shapes agree; None if there are none.

    Each of ``pairs`` is codes and their scale.
    """
    common: set[Edges] = set()
    for codes, scale in pairs:
        if len(codes.shape) == len(scale.shape) == 2 and 1 not in scale.shape and scale.shape[0] != codes.shape[0]:
            candidates = [_list_possible_edges(n, blocks) for n, blocks in zip(codes.shape, scale.shape, strict=True)]
            square = set(candidates[0]) & set(candidates[1])
            if len(square) == 1:
                common |= {(edge, edge) for edge in square}
    return common.pop() if len(common) == 1 else None


def iterate_scales(entry: Entry, workspace: Workspace, at_once: int = 1 << 18) -> Iterator[Tensor]:
    """Yield all scales as float32, some at a time, for statistics."""
    to_float = decode_e8m0 if entry.dtype in EXPONENTS else torch.Tensor.float
    if entry.n <= MAX_READ_WHOLE:  # usually in the workspace already
        yield to_float(workspace.read_whole("scale", entry)).view(-1)
        return
    for first in range(0, entry.n, at_once):
        n = min(at_once, entry.n - first)
        yield to_float(workspace.read("scale", entry, first, (n,)))


DEEPSEEK_SUFFIX = "_inv"  # suffix of DeepSeek's scales: blocks as in config.json, or 128 × 128


def fit_scaled(parts: Parts, family: str, labels: frozenset[str], rotates: bool = False) -> Weight:
    """Return the weight that codes and a scale form; its format is ``family`` with the scale's granularity.

    If the scale fits no rule but all codes are zero (they are read to check), the weight is zeros.

    Raises:
        FormatMismatch: a label changes the meaning of the codes or names another shape, or the scale fits no rule.
    """
    codes, scale = parts["codes"], parts["scale"]
    comfy_format, warnings = check_labels(parts, labels, rotates)
    check_unpadded(parts)
    edges = _find_dividing_edges(scale, codes.shape)
    divided = [(edges, f"the scale's shape {list(scale.shape)}")] if edges else []
    declared = collect_hints(parts, divided if comfy_format else [])
    try:
        grid = fit_grid(scale, codes.shape, declared)
    except FormatMismatch:
        if parts.hints.shape not in (None, codes.shape) or not _is_all_zero(codes):
            raise
        return _make_zeros(parts, comfy_format, warnings)
    warnings += check_granularity(parts, comfy_format, grid.granularity)
    factor = fit_pre_scale(parts, as_matrix(codes.shape)[1])
    weight = parts.weight(
        codes.shape,
        read_grid(parts, grid, factor),
        block_size=grid.block if grid.granularity == "block" else None,
        code_bits=8,
        levels=OF_DTYPE[codes.dtype].centred_levels if codes.dtype in OF_DTYPE else None,
        unit=None if factor or grid.granularity == "block" else grid.numbers,
        scale=scale,
        evidence=(f"codes {codes.dtype}, scale {scale}: {grid.reason}",),
        warnings=(*warnings, grid.warning) if grid.warning else warnings,
        comfy_format=comfy_format,
        format=sys.intern(f"{family}_{grid.granularity}"),
    )
    is_declared = any(block == grid.block for block, _ in declared)
    other_edges = _find_other_edges(scale, codes.shape, grid.block, edges, is_declared)
    if other_edges is None:
        return weight
    alternative = replace(
        weight,
        dequantize=Native(read_grid(parts, fit_grid(scale, codes.shape, [(other_edges, "")]), factor)),
        unit=None,
        block_size=other_edges,
        evidence=(
            f"blocks of {other_edges[0]} × {other_edges[1]}{', which divide it' if other_edges == edges else ''}",
        ),
    )
    first = replace(
        weight,
        evidence=(f"blocks of {grid.block[0]} × {grid.block[1]}", *weight.evidence),
        close_alternatives=True,
        prescribed=is_declared,
    )
    return first.with_alternatives([alternative])


def read_grid(parts: Parts, grid: FittedGrid, factor: Grid | None = None) -> Decoder:
    """Return the decoder of elements stored one by one, times scales and factors of columns."""
    group = grid.block[1] if grid.granularity == "block" else 0
    return element_types.read_one_by_one(parts, grid.numbers, group, factor=factor)


def _make_zeros(parts: Parts, comfy_format: str | None, warnings: tuple[str, ...]) -> Weight:
    """Return a weight of zeros, whose scale is meaningless: convert_to_quant gives it any shape, even an empty one."""
    warning = (
        f"all its codes are zero and its scale {parts['scale']} fits no known layout: read as zeros; ComfyUI "
        "does not load it"
    )
    return parts.weight(
        parts.codes.shape,
        element_types.read_one_by_one(parts),
        code_bits=8,
        evidence=("all codes are zero",),
        warnings=(*warnings, warning),
        comfy_format=comfy_format,
    )


def _is_all_zero(codes: Entry) -> bool:
    """Return whether all bytes of an entry are zero, reading no further than the first chunk that has another byte."""
    step = 1 << 20
    pieces = (
        codes.file.read(codes.offset + first, min(step, codes.nbytes - first)) for first in range(0, codes.nbytes, step)
    )
    return not any(piece.strip(b"\0") for piece in pieces)


def make_scaled_formats(
    family: str,
    needs: Mapping[str, PartSpec],
    fit: Callable[[Parts], Weight | None],
    usual_db: Mapping[str, tuple[int, int]],
) -> tuple[Format, ...]:
    """Return the rows of a family, one for each granularity of its scale; all share ``fit``, which finds out which."""
    return tuple(
        Format(
            f"{family}_{granularity}",
            needs,
            fit,
            summary=f"{family.upper()} codes, one scale {of}",
            usual_db=usual_db[granularity],
            corrects_biases=True,
        )
        for granularity, of in (("tensor", "for the tensor"), ("row", "a row"), ("block", "a block"))
    )


def fit_grid(entry: Entry, shape: tuple[int, ...], hints: list[tuple[Edges, str]]) -> FittedGrid:
    """Return the grid of a scale for a weight of that shape.

    ``hints`` are block edges with their source, the most reliable first.

    Raises:
        FormatMismatch: no rule fits, or two do; the message names both shapes.
    """
    rows, cols = as_matrix(shape)
    stored = entry.shape
    if entry.n == 1:
        block = _share_edges(max(rows, 1), max(cols, 1))
        return FittedGrid(_make_grid(entry, 0, (1, 1), block), "tensor", block, "one scale")
    if entry.n == 0 or len(shape) < 2:
        raise FormatMismatch(_describe_misfit(entry, shape))
    if len(shape) == 2:
        return _fit_matrix(entry, rows, cols, _match_matrix_scale(stored, rows), hints, shape)
    if prod(stored) == stored[0] == shape[0]:  # a scale per leading index, with or without trailing ones in the shape
        rows_each = rows // shape[0]
        of_each = f"one scale for each of {shape[0]}"
        return FittedGrid(
            _make_grid(entry, 0, (shape[0], 1), (rows_each, cols)), "row", _share_edges(rows_each, cols), of_each
        )
    if len(shape) == 3 and stored[0] == shape[0] and cols == shape[2]:  # stacked experts, not a 1-D convolution
        return _fit_matrix(entry, shape[1], shape[2], _match_expert_scale(stored, shape), hints, shape)
    raise FormatMismatch(_describe_misfit(entry, shape))


@lru_cache
def _share_edges(rows: int, cols: int) -> Edges:
    """Return block edges as an object that equal grids share, to save memory."""
    return rows, cols


def _find_dividing_edges(entry: Entry, shape: tuple[int, ...]) -> Edges | None:
    """Return block edges that divide rows and columns, as ComfyUI's rule requires; None if there are none."""
    rows, cols = as_matrix(shape)
    grid = _match_matrix_scale(entry.shape, rows)
    if len(shape) != 2 or len(grid) != 2 or 0 in grid or entry.n == 1 or grid == (rows, 1):
        return None
    return None if rows % grid[0] or cols % grid[1] else (rows // grid[0], cols // grid[1])


def _find_other_edges(
    entry: Entry, shape: tuple[int, ...], block: Edges, dividing: Edges | None, is_declared: bool
) -> Edges | None:
    """Return other block edges that fit: the dividing ones, or groups of columns with a partial last group.

    ``is_declared`` means that the edges of ``block`` do not come from the scale's shape.
    """
    if dividing is None or entry.name.endswith(DEEPSEEK_SUFFIX):
        return None
    if dividing != block:
        return dividing
    power, *divisor = _list_possible_edges(shape[1], shape[1] // block[1])
    return (1, power) if block[0] == 1 and divisor and not is_declared else None


def _match_matrix_scale(stored: tuple[int, ...], rows: int) -> tuple[int, ...]:
    """Return the scale's shape as (a, b); () if that is impossible."""
    if stored == (rows,):
        return rows, 1
    if len(stored) == 2:
        return stored
    if len(stored) == 3 and stored[0] == rows and stored[2] == 1:
        return stored[:2]
    if len(stored) == 4 and stored[1] == stored[3] == 1:
        return stored[0], stored[2]
    return ()


def _match_expert_scale(stored: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of one expert's scale as (a, b); () if no rule fits or two do."""
    if len(stored) == 3:
        return stored[1:]
    if len(stored) == 2 and shape[1] != shape[2]:
        return {shape[1]: (shape[1], 1), shape[2]: (1, shape[2])}.get(stored[1], ())
    return ()


def _fit_matrix(
    entry: Entry,
    rows: int,
    cols: int,
    grid: tuple[int, ...],
    hints: list[tuple[Edges, str]],
    shape: tuple[int, ...],
) -> FittedGrid:
    if not grid:
        raise FormatMismatch(_describe_misfit(entry, shape))
    grid_rows, grid_cols = grid
    if grid == (rows, 1):
        return FittedGrid(_make_grid(entry, rows, grid, (1, cols)), "row", _share_edges(1, cols), "one scale per row")
    minimum_counts = [(-(-rows // edges[0]), -(-cols // edges[1])) for edges, _ in hints]
    wrong = [
        hint
        for hint, needed in zip(hints, minimum_counts, strict=True)
        if needed != grid and hint[1] in DECLARING_SOURCES
    ]
    for (edges, source), needed in zip(hints, minimum_counts, strict=True):
        if needed == grid:
            reason, warning = f"block size from {source}", _describe_contradiction(wrong, edges)
            return FittedGrid(_make_grid(entry, rows, grid, edges), "block", edges, reason, warning)
    inferred = _infer_edges(entry, (rows, cols), (grid_rows, grid_cols))
    usual = inferred is not None and all(
        edge & (edge - 1) == 0 or edge == n for edge, n in zip(inferred, (rows, cols), strict=True)
    )
    for (edges, source), needed in zip(hints, minimum_counts, strict=True):
        padded = needed[0] <= grid_rows and needed[1] <= grid_cols  # padded for a parallel layout
        if not usual and padded and source == CONFIG:
            reason = f"block size from {source}; the scale has more blocks than the weight needs"
            return FittedGrid(_make_grid(entry, rows, grid, edges), "block", edges, reason)
    if inferred is None:
        raise FormatMismatch(_describe_misfit(entry, shape))
    reason = f"block size from the scale's shape {list(entry.shape)}"
    warning = _describe_contradiction(wrong, inferred)
    if warning is None and not usual:
        warning = f"blocks of {inferred[0]} × {inferred[1]} are inferred from the scale's shape alone"
    return FittedGrid(_make_grid(entry, rows, grid, inferred), "block", inferred, reason, warning)


def _make_grid(entry: Entry, rows: int, grid: tuple[int, ...], block: Edges) -> Grid:
    """Return the grid of blocks, (rows, cols) each, of a matrix of ``rows`` rows or a stack of such matrices."""
    down, across = grid
    stack_rows, down = (0, 0) if entry.n == down * across else (rows, down)
    group, levels = block[1] if across > 1 else 0, E8M0 if entry.dtype in EXPONENTS else ()
    return Grid(entry, across, group, block[0], stack_rows=stack_rows, down=down, levels=levels)


def _describe_contradiction(wrong: list[tuple[Edges, str]], block: Edges) -> str | None:
    """Return a warning about declared blocks that the scale's shape rules out."""
    configured = [f"{source} declares blocks of {edges[0]} × {edges[1]}" for edges, source in wrong]
    return (
        f"{' and '.join(configured)}, but the scale's shape implies {block[0]} × {block[1]}, which is used"
        if configured
        else None
    )


def _infer_edges(entry: Entry, sizes: Edges, blocks: Edges) -> Edges | None:
    """Infer the block edges from sizes and numbers of blocks alone; return None if nothing fits.

    Raises:
        FormatMismatch: several pairs of edges fit; the message names them.
    """
    needed = tuple(-(-n // edge) for n, edge in zip(sizes, DEEPSEEK_BLOCK, strict=True))
    of_modelopt = len(entry.shape) == 4 and entry.shape[1] == entry.shape[3] == 1
    if (entry.name.endswith(DEEPSEEK_SUFFIX) or of_modelopt) and needed == blocks:
        return DEEPSEEK_BLOCK
    candidates = [_list_possible_edges(n, count) for n, count in zip(sizes, blocks, strict=True)]
    if blocks[0] == sizes[0]:  # groups of columns: most writers require that they divide the row
        candidates[1] = candidates[1][-1:]
    pairs = [(r, c) for r in candidates[0] for c in candidates[1]]
    free = any(count in (1, n) for n, count in zip(sizes, blocks, strict=True))  # a row or a column of blocks
    square = pairs if free else [pair for pair in pairs if pair[0] == pair[1]]
    if len(square or pairs) > 1:
        possible_blocks = " and ".join(f"{r} × {c}" for r, c in square or pairs)
        raise FormatMismatch(
            f"scale {entry} fits blocks of {possible_blocks} in a weight of {sizes[0]} × {sizes[1]}; declare one in "
            "config.json beside it (quantization_config.weight_block_size) or in a .comfy_quant label (group_size)"
        )
    return next(iter(square or pairs), None)


def _list_possible_edges(n: int, blocks: int) -> list[int]:
    """Return the possible edges of ``blocks`` blocks that cover ``n`` elements: a power of two, then a divisor."""
    if not 0 < blocks <= n:
        return []
    if blocks == 1:
        return [n]
    divisor = n // blocks if n % blocks == 0 else 0
    power = 1 << (-(-n // blocks) - 1).bit_length()
    if divisor == power or -(-n // power) != blocks:
        return [divisor] if divisor else []
    return [power, divisor] if divisor else [power]


def _describe_misfit(entry: Entry, shape: tuple[int, ...]) -> str:
    return f"scale {entry} fits no known layout for a weight of shape {list(shape)}"
