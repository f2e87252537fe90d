"""Rows and blocks that look damaged although they result from a method that compensates errors.

GPTQ (arXiv:2210.17323) rounds column after column and moves the error of each into the columns that follow:
W - Ŵ = R·M, where R holds errors of rounding, at most half a step each, and M, (columns, columns), depends on the
inputs alone. So the errors of all rows share directions, and a row with one large step spreads its error over columns
with small steps, where it looks too large. Four properties distinguish this from damage:

direction   After columns are scaled to equal errors, which removes the effect of moved or lost columns, the error of
            the row points where the errors of most other rows are large. On the real weights of ``methods``, such
            rows of GPTQ have 7 to 21 times the energy of a random direction in half of the other rows. A row that is
            scaled, moved, noisy, zero or another row has less than other rows have among themselves, and a row that
            shares lost codes or zero points with a few others 0.6 to 1.7.
factor      The error of the row is no more proportional to the row's values than the errors of other rows are to
            theirs. A row that was scaled has such an error. A single clipped value is not a factor, even if it holds
            most of the row's energy.
whole       If inputs have few directions or a few large channels, GPTQ costs 10 dB. Nearly all of this error is in
            directions that all rows share, and the column rounded first still has the nearest codes.
level       The error of the block is about as large as the rounding error of the coarsest block of its row, plus what
            compensation costs in the rest of the weight, and no factor explains it: the error was moved there. If the
            configuration does not declare the method, errors of most rows must also share directions: 1.5 to 3.1 times
            as much as random errors on these weights, where rounding has 1.0 to 1.2.
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

NORMAL_MEDIAN_SQUARE = 0.455  # median of the square of a normal number
MIN_ENERGY_RATIO = 4.0  # minimum energy of other rows' errors in the direction of the row, relative to a random one
MIN_RATIO_TO_ROWS = 2.0  # minimum of this energy relative to that in other rows' directions
MAX_DIRECTIONS = 16  # maximum number of directions that rows share; 16 of 256 hold a tenth of unrelated errors
SHARED_ENERGY_RATIO = MIN_RATIO_TO_ROWS * MIN_ENERGY_RATIO  # above it, inputs have few directions, which all rows share
WEIGHT_CODES = ("excess_error", "implausible_error")  # findings about a whole weight
PLACE_CODES = ("excess_rows", "excess_blocks", "bad_rows", "scale_loss")  # findings about rows or blocks


def drop_compensated(
    findings: Sequence[Finding], weights: Mapping[str, WeightSummary], is_declared: bool, reader: Reader
) -> list[Finding]:
    """Return the findings without those that compensation explains; the excess of a whole weight becomes an info.

    Args:
        findings: findings about single weights.
        weights: the weights whose method compensates errors, or may do so, by name.
        is_declared: whether the configuration declares such a method.
        reader: reads weights again.
    """
    # Findings about a weight come one after the other, so that its rows are read once.
    read = lru_cache(maxsize=1)(lambda name: _read_rows(weights[name].pair, reader))

    def is_left(finding: Finding) -> bool:
        weight = weights.get(finding.layer or "")
        if weight is None or finding.severity == "info" or weight.pair.quantized.matrix[0] < MIN_VALUES:
            return False
        if weight.excess_db is not None and weight.excess_db < 10 * log10(1 + NEGLIGIBLE_SHARE):
            return False  # all codes are the nearest: nothing was compensated
        if not is_declared and weight.pair.quantized.uniform_bits is None:
            return False  # steps of float codes grow with the values, so rounding errors share directions as well
        if finding.code in WEIGHT_CODES:
            return _is_shared(weight, read(weight.pair.name)) and has_nearest_column(weight.pair, reader)
        places = _list_places(finding) if finding.code in PLACE_CODES and finding.severity == "warning" else []
        factor = finding.evidence.get("factor")
        is_scaled = factor is not None and abs(factor - 1) >= FACTOR_TOLERANCE
        if not places or (is_scaled and not is_declared):
            return False
        spread = read(weight.pair.name)
        by_level = (is_declared or spread.shared_energy > MISMATCH_FACTOR) and not is_scaled
        return all(_is_compensation(weight, *place, spread, by_level, reader) for place in places)

    kept = []
    for finding in findings:
        if not is_left(finding):
            kept.append(finding)
        elif finding.code == "excess_error":
            kept.append(replace(finding, severity="info"))  # an info: it still says what the method costs
    return kept


class _Rows(NamedTuple):
    """Rows that are spread over a weight."""

    numbers: Tensor  # (r,)
    errors: Tensor  # (r, c) float64: errors divided by ``columns``, and scaled to unit length
    columns: Tensor  # (c,) float64: root mean square error of each column
    cosines: Tensor  # (r,) float64: cosine of each row's errors with its values, without the element that adds most
    shared_energy: float  # median energy of each row in the directions of the others, relative to random ones


def _list_places(finding: Finding) -> list[tuple[int, int]]:
    """Return the (row, column) of the regions that a finding names; column -1 stands for the whole row."""
    if finding.code == "bad_rows":
        return [(row, -1) for row in finding.evidence.get("rows", ())]
    is_too_wide = finding.evidence.get("scale_ratio", 0.0) >= 1  # the nearest codes of a wide scale prove nothing
    return [(row, -1 if is_too_wide else col) for row, col in finding.evidence.get("places", ())]


def _is_compensation(weight: WeightSummary, row: int, col: int, spread: _Rows, by_level: bool, reader: Reader) -> bool:
    """Return True if the error of a row, or of a block from a column on, is one that compensation leaves."""
    if row < 0:
        return False
    x, errors = _read_errors(weight.pair, row, row + 1, reader)
    error, others = errors[0], spread.errors[spread.numbers != row]
    if _has_factor(float(_measure_cosines(x, errors)), spread.cosines):
        return False
    # If all rows share directions, half of a row's error must be in these directions.
    min_energy = (
        spread.shared_energy / MIN_RATIO_TO_ROWS
        if spread.shared_energy > SHARED_ENERGY_RATIO
        else max(MIN_ENERGY_RATIO, MIN_RATIO_TO_ROWS * spread.shared_energy)
    )
    if float(_measure_energy(_normalize(error / spread.columns), others)) > min_energy:
        return True
    level_db = DOUBLE_DB + (weight.excess_db or 0.0)  # what compensation costs in the whole weight, and a margin
    return by_level and col >= 0 and _compare_levels(weight.pair, row, col, error, reader) < level_db


def _is_shared(weight: WeightSummary, spread: _Rows) -> bool:
    """Return True if the error that is not in directions shared by all rows is no larger than usual."""
    if spread.shared_energy <= SHARED_ENERGY_RATIO or weight.excess_db is None:
        return False
    directions = torch.linalg.eigh(spread.errors.T @ spread.errors).eigenvectors[:, -MAX_DIRECTIONS:]
    rest = 1 - float((spread.errors @ directions).square().sum()) / len(spread.errors)
    return weight.excess_db + 10 * log10(max(rest, FLOAT32_TOLERANCE)) < GPTQ.max_loss_db


def _normalize(errors: Tensor) -> Tensor:
    lengths: Tensor = errors.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(errors.dtype).tiny)
    return errors / lengths


def _measure_cosines(x: Tensor, errors: Tensor) -> Tensor:
    """Return the cosine of each row with its error, without the element that adds most to it."""
    largest = (x * errors).abs().argmax(-1, keepdim=True)
    x, errors = (_normalize(side.scatter(-1, largest, 0.0)) for side in (x, errors))
    return (x * errors).sum(-1)


def _has_factor(cosine: float, others: Tensor) -> bool:
    """Return True if a row's error is proportional to its values, as by a factor, and those of other rows are not."""
    median = others.median()
    deviation = float((others - median).abs().median()) / sqrt(NORMAL_MEDIAN_SQUARE)
    return abs(cosine - float(median)) > max(UNRELATED_COSINE, CHANCE_DEVIATIONS * deviation)


def _measure_energy(directions: Tensor, errors: Tensor) -> Tensor:
    """Return the median energy of errors, (r, c) of unit length, in each direction, relative to random errors."""
    return (directions @ errors.T).square().median(-1).values * (errors.shape[1] / NORMAL_MEDIAN_SQUARE)


def _compare_levels(pair: Pair, row: int, col: int, error: Tensor, reader: Reader) -> float:
    """Return by how many dB a block's error exceeds the rounding error of any block of its row; inf if unknown."""
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
