"""Completes the result of a pair after its sums: largest error, scales, sample, and whether it is a copy."""

from quanterr.checkpoints.fingerprints import compute_fingerprint
from quanterr.formats.shared.scale_grid import iterate_scales
from quanterr.formats.shared.scale_statistics import ScaleStatistics
from quanterr.metrics.sums import Sums
from quanterr.pairing.model import LargestError, Pair, WeightResult
from quanterr.samples.measuring import SampleMeasurer
from quanterr.samples.native import PlainSample
from quanterr.samples.reading import PairReader
from quanterr.tensors.casts import CastTest, Copy, find_narrowest, get_smallest_normal, rounds_to_nearest
from quanterr.tensors.chunks import Chunk, Cut


def finish_weight(
    number: int, reader: PairReader, sums: Sums, plain: PlainSample | None, samples: bool
) -> WeightResult:
    """Complete the result of a pair, ``number`` in its pairing, from its sums.

    ``plain`` is the sample that the kernel has measured, if any; without ``samples``, no other sample is measured.
    """
    pair, attainable = reader.pair, None
    scales = plain.scales if plain else None
    if scales is None and pair.quantized.scale is not None:
        scales = ScaleStatistics.compute(iterate_scales(pair.quantized.scale, reader.quantized))
    if samples and not sums.exact:
        attainable = SampleMeasurer(reader, sums).measure(plain)
    worst = _find_worst(reader, sums)
    sums.peaks = []  # large, and no longer needed
    copy = _check_copy(reader, sums)
    fingerprint = compute_fingerprint(pair.original_codes, sums.sampled)
    return WeightResult(number, sums, scales, worst, attainable, copy, fingerprint)


def find_cast(pair: Pair) -> tuple[str, str] | None:
    """Return the narrowest dtype of the parts on each side, if both store plain floats; else None."""
    if not pair.original.encoding == pair.quantized.encoding == "floats":
        return None
    x, y = (find_narrowest({entry.dtype for entry in side.parts.values()}) for side in (pair.original, pair.quantized))
    return x, y


def _check_copy(reader: PairReader, sums: Sums) -> Copy | None:
    """Return how far an unquantized tensor is a copy of the original; read it again if the sums do not show it."""
    pair = reader.pair
    cast = find_cast(pair)
    if cast is None:
        return None
    largest = sums.cast_max if get_smallest_normal(*cast) else sums.relative_max
    if sums.exact or (not sums.zero_reference and rounds_to_nearest(*cast, largest)):
        return Copy.SAME
    test = CastTest(*cast, pair.original.computed or pair.quantized.computed)
    for chunk in Cut(*pair.original.matrix, reader.buffers.size):
        test.add(*reader.read_values(chunk))
        if test.result == Copy.CHANGED:
            break
    return test.result


def _find_worst(reader: PairReader, sums: Sums) -> LargestError | None:
    """Return the element with the largest |e|; its row is read again if only that is known."""
    if sums.worst is None:
        return None
    _, row, col, values = sums.worst
    if values is not None:
        return LargestError(row, col, *values)
    kept = reader.buffers.small.values(reader.pair)
    if kept is not None:
        x, y = (side[row : row + 1] for side in kept)
    else:
        cols = reader.pair.original.matrix[1]
        x, y = reader.read_values(Chunk(row, row + 1, col, min(col + reader.buffers.size, cols)))
    x, y = x.double(), y.double()
    at = int((y - x).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).abs().argmax())
    return LargestError(row, col + at, float(x[0, at]), float(y[0, at]))
