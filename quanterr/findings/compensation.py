"""Rows and blocks that look damaged, though a method that compensates errors left them so.

GPTQ (arXiv:2210.17323) rounds column after column and moves the error of each into the columns that follow:
W - Ŵ = R·M, where R holds errors of rounding, at most half a step each, and M, (columns, columns), depends on the
inputs alone. So the errors of all rows share directions, and a row with one large step spreads its error over columns
with small steps, beside which it is large. Four facts tell this from damage:

direction   The error of the row points where the errors of most other rows are large, once all columns have equal
            errors: columns that are moved or lost are no direction. On the real weights of ``methods``, the rows that
            GPTQ leaves so have 7 to 21 times the energy of a direction drawn by chance in half of the other rows; a
            row that is scaled, moved, noisy, another's or zero has less than other rows have among themselves, and one
            that shares lost codes or zero points with a few others 0.6 to 1.7.
factor      The error of a row has no more in common with the row's values than errors of other rows have with theirs: a
            row that was scaled has. A single value that is clipped, though it holds most of a row, is no factor.
whole       Where inputs have few directions or a few large channels, GPTQ costs 10 dB: nearly all of that is in
            directions that all rows share, and the column rounded first still has the nearest codes.
level       The error of a block is about as large as that of the coarsest block of its row, rounded to the nearest
            codes, where compensation has cost as much as in the rest of the weight, and no factor explains it: errors
            are moved, and not made. Where nothing declares the method, errors of most rows must share directions: by
            1.5 to 3.1 times what chance gives on these weights, where rounding gives 1.0 to 1.2.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import inf, log10, sqrt
from typing import NamedTuple

from msgspec.structs import replace

from quanterr.documents.base import Finding
from quanterr.findings.code_samples import choose_runs, find_cells_of
from quanterr.findings.layers import WeightSummary
from quanterr.findings.limits import (
    CHANCE_DEVIATIONS,
    DOUBLE_DB,
    FACTOR_TOLERANCE,
    FLOAT32_TOLERANCE,
    MIN_VALUES,
    MISMATCH_FACTOR,
    NEGLIGIBLE_SHARE,
    UNRELATED_COSINE,
)
from quanterr.findings.methods import GPTQ
from quanterr.findings.sources import has_nearest_column
from quanterr.formats.reading import Reader
from quanterr.kernel.structs import TILE
from quanterr.lazy_torch import Tensor, torch
from quanterr.metrics.attainable import level
from quanterr.pairing.model import Pair
from quanterr.tensors.chunks import Chunk

CHANCE = 0.455  # median of a squared normal number
DIRECTED, AMONG_OTHERS = 4.0, 2.0  # energy of the row's direction over a random one, and over other rows' directions
MOST_DIRECTIONS = 16  # directions that rows may share; of other errors, 16 of 256 hold a tenth
SHARED = AMONG_OTHERS * DIRECTED  # energy of rows in the directions of others where inputs have few directions
WHOLE = ("excess_error", "implausible_error")  # findings about a whole weight
CODES = ("excess_rows", "excess_blocks", "bad_rows", "scale_loss")  # findings about rows or blocks, with their places


def drop_compensated(
    found: Sequence[Finding], weights: Mapping[str, WeightSummary], is_declared: bool, reader: Reader
) -> list[Finding]:
    """Return the findings without those that compensation explains; the excess of a whole weight becomes an info.

    Args:
        found: findings about single weights.
        weights: the weights by a method that compensates errors, or may, by name.
        is_declared: whether it does.
        reader: reads them again.
    """
    # Findings about a weight come one after the other, so that its rows are read once.
    read = lru_cache(maxsize=1)(lambda name: _read_rows(weights[name].pair, reader))

    def is_left(one: Finding) -> bool:
        weight = weights.get(one.layer or "")
        if weight is None or one.severity == "info" or weight.pair.quantized.matrix[0] < MIN_VALUES:
            return False
        if weight.excess_db is not None and weight.excess_db < 10 * log10(1 + NEGLIGIBLE_SHARE):
            return False  # all codes are the nearest: no error was moved
        if not is_declared and weight.pair.quantized.uniform_bits is None:
            return False  # steps of floats grow with the values, so that errors of rounding share directions as well
        if one.code in WHOLE:
            return _is_shared(weight, read(weight.pair.name)) and has_nearest_column(weight.pair, reader)
        places = _places_of(one) if one.code in CODES and one.severity == "warning" else []
        factor = one.evidence.get("factor")
        is_scaled = factor is not None and abs(factor - 1) >= FACTOR_TOLERANCE
        if not places or (is_scaled and not is_declared):
            return False
        spread = read(weight.pair.name)
        by_level = (is_declared or spread.alike > MISMATCH_FACTOR) and not is_scaled
        return all(_is_compensation(weight, *place, spread, by_level, reader) for place in places)

    kept = []
    for one in found:
        if not is_left(one):
            kept.append(one)
        elif one.code == "excess_error":
            kept.append(replace(one, severity="info"))  # how much the method costs
    return kept


class _Rows(NamedTuple):
    """Rows that are spread over a weight."""

    numbers: Tensor  # (r,)
    errors: Tensor  # (r, c) float64: the same in all columns, and of length 1
    columns: Tensor  # (c,) float64: error of each column before
    cosines: Tensor  # (r,) float64: of the errors before with the values, without the element that adds most
    alike: float  # median energy of each in the directions of the others, relative to chance


def _places_of(one: Finding) -> list[tuple[int, int]]:
    """Return the (row, column) of the regions that a finding names; column -1 stands for the whole row."""
    if one.code == "bad_rows":
        return [(row, -1) for row in one.evidence.get("rows", ())]
    whole = one.evidence.get("scale_ratio", 0.0) >= 1  # with a scale that is too wide, the nearest codes show nothing
    return [(row, -1 if whole else col) for row, col in one.evidence.get("places", ())]


def _is_compensation(weight: WeightSummary, row: int, col: int, spread: _Rows, by_level: bool, reader: Reader) -> bool:
    """Return True if the error of a row, or of a block from a column on, is one that compensation leaves."""
    if row < 0:
        return False
    x, errors = _read_errors(weight.pair, row, row + 1, reader)
    error, others = errors[0], spread.errors[spread.numbers != row]
    if _has_factor(float(_measure_cosines(x, errors)), spread.cosines):
        return False
    # Where all rows share directions, the half of a row's error that is in them is as much as compensation explains.
    least = spread.alike / AMONG_OTHERS if spread.alike > SHARED else max(DIRECTED, AMONG_OTHERS * spread.alike)
    if float(_measure_energy(_normalize(error / spread.columns), others)) > least:
        return True
    level_db = DOUBLE_DB + (weight.excess_db or 0.0)  # above what the weight loses by compensation
    return by_level and col >= 0 and _compare_levels(weight.pair, row, col, error, reader) < level_db


def _is_shared(weight: WeightSummary, spread: _Rows) -> bool:
    """Return True if directions that all rows share hold so much of the error that the rest is no more than usual."""
    if spread.alike <= SHARED or weight.excess_db is None:
        return False
    directions = torch.linalg.eigh(spread.errors.T @ spread.errors).eigenvectors[:, -MOST_DIRECTIONS:]
    rest = 1 - float((spread.errors @ directions).square().sum()) / len(spread.errors)
    return weight.excess_db + 10 * log10(max(rest, FLOAT32_TOLERANCE)) < GPTQ.max_loss_db


def _normalize(errors: Tensor) -> Tensor:
    lengths: Tensor = errors.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(errors.dtype).tiny)
    return errors / lengths


def _measure_cosines(x: Tensor, errors: Tensor) -> Tensor:
    """Return the cosine of each row with its error, without the element that adds most to it."""
    most = (x * errors).abs().argmax(-1, keepdim=True)
    x, errors = (_normalize(side.scatter(-1, most, 0.0)) for side in (x, errors))
    return (x * errors).sum(-1)


def _has_factor(cosine: float, others: Tensor) -> bool:
    """Return True if a row's error points along its values, as a factor makes it, and those of other rows do not."""
    median = others.median()
    deviation = float((others - median).abs().median()) / sqrt(CHANCE)
    return abs(cosine - float(median)) > max(UNRELATED_COSINE, CHANCE_DEVIATIONS * deviation)


def _measure_energy(directions: Tensor, errors: Tensor) -> Tensor:
    """Return the energy that half of the errors, (r, c) of length 1, have in each direction, relative to chance."""
    return (directions @ errors.T).square().median(-1).values * (errors.shape[1] / CHANCE)


def _compare_levels(pair: Pair, row: int, col: int, error: Tensor, reader: Reader) -> float:
    """Return by how many dB a block's error exceeds that of the nearest codes in any of its row; inf if unknown."""
    if pair.quantized.rotated:
        return inf
    chunk = Chunk(row, row + 1, 0, len(error))
    x = reader.read(pair.original, chunk).float()
    around = find_cells_of(pair.quantized, chunk, x, reader)
    if around is None:
        return inf
    nearest = (around.nearest - x).masked_fill(~around.inside, 0.0)[0].double()
    coarsest = max(float(nearest[at : at + TILE].square().mean()) for at in range(0, len(nearest), TILE))
    return level(float(error[col : col + TILE].square().mean()), coarsest)


def _read_rows(pair: Pair, reader: Reader) -> _Rows:
    runs = choose_runs(*pair.quantized.matrix)
    numbers = torch.tensor([number for run in runs for number in run])
    read = [_read_errors(pair, run.start, run.stop, reader) for run in runs]
    x, errors = (torch.cat(side) for side in zip(*read, strict=True))
    cosines, errors = _measure_cosines(x, errors), _normalize(errors)
    columns = errors.square().mean(0).sqrt().clamp(min=torch.finfo(errors.dtype).tiny)
    errors = _normalize(errors / columns)
    return _Rows(numbers, errors, columns, cosines, float(_measure_energy(errors, errors).median()))


def _read_errors(pair: Pair, first: int, stop: int, reader: Reader) -> tuple[Tensor, Tensor]:
    """Return x and y - x of rows, (r, c) float64 each."""
    chunk = Chunk(first, stop, 0, pair.quantized.matrix[1])
    x, y = (side.double() for side in reader.read_both((pair.original, pair.quantized), chunk))
    return x, y - x
