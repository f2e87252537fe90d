"""Signs that a quantized weight was made from values other than the original's.

The codes of such a weight are only a step or two from the nearest, so its SNR is a few dB too low, just as after error
compensation. Five signs in a sample of a few weights distinguish the two cases:

rounding    No method makes these codes from the original. Rounding to the nearest, at random or as learned yields one
            of the two codes around a value. GPTQ moves values before it rounds them, but not in the columns that it
            rounds first. So if errors exceed the distance of two codes equally in all columns, other values were
            quantized: a finetune, another revision, a merge.
first       If GPTQ is declared, the column that it rounds first has the nearest codes. If random codes are wrong in
            all columns, GPTQ did not cause it.
directions  A few singular values hold the excess: a LoRA update was merged into one side. Rounding errors have no
            singular values above the edge of Marchenko and Pastur, (1 + √(rows / columns))², once rows and columns are
            scaled to equal variance.
grid        The error follows the position of the original's values on an even grid other than the grid of the codes:
            the weight was rounded to an earlier format.
scattered   Single codes are several steps off, among codes near their values, equally in all columns. GPTQ hardly
            moves values of the columns that it rounds first, and those of later columns in proportion to the steps of
            their groups. Inexactly undone factors do not make single codes stand out either.

The limits come from a real model (all-MiniLM-L6-v2, 36 matrices of 384 to 1,536 columns) with its activations and all
recipes of this program.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from math import inf, log10, nan, pi, sqrt
from typing import NamedTuple

from quanterr.documents.base import Finding
from quanterr.findings.code_samples import MAX_SAMPLE_ELEMENTS, CodeSample, read_code_sample
from quanterr.findings.codes import make_finding
from quanterr.findings.explanations import NEAR, USUAL
from quanterr.findings.layers import WeightSummary
from quanterr.findings.limits import (
    AGREEING_SHARE,
    CHANCE_DEVIATIONS,
    MIN_PEERS,
    MIN_VALUES,
    NEAR_DB,
    NEGLIGIBLE_SHARE,
    SLIGHT_DB,
    SMALL_DB,
)
from quanterr.findings.methods import Method, find_method
from quanterr.findings.scale_faults import ScaleFault, find_scale_fault, report_scale_faults
from quanterr.formats.reading import Reader
from quanterr.lazy_torch import Tensor, torch
from quanterr.metrics.attainable import level
from quanterr.pairing.model import Pair
from quanterr.util.text import count, itemize

MAX_OUTLIERS = 16  # maximum number of weights far below their peers to read again
MAX_SPREAD_WEIGHTS, MAX_WORST_WEIGHTS = 8, 4  # weights to read again: spread over all, and with the largest losses
MAX_COLUMNS = 1024  # maximum number of columns to examine

# Sign "rounding": codes that no method makes from the original.
MAX_ERROR_STEPS = 1.05  # error / distance of the two codes around a value; above 1 only if scales were rounded later
MAX_BEYOND_SHARE = 1.5e-5  # share of elements with larger errors; noise of 1 dB causes 4e-5, methods cause none
# With GPTQ, energies of columns scatter by 0.4 to 1.1 of their mean excess, and a tenth of the columns has less than
# half of this excess. With a finetune they scatter by 0.05 to 0.4, and that tenth has 0.6 to 1.0 of the excess.
MAX_SCATTER, FIRST_COLUMNS_PART = 0.4, 10

# Sign "first": minimum over columns of the error relative to that of the nearest codes. GPTQ leaves 1.00 in the column
# that it rounds first (real weights, 24 settings); if one code in a hundred is a step off, it is 1.1. Sign
# "directions": singular values relative to the edge of Marchenko and Pastur; noise reaches 1.0.
NOISE_RATIO = 1.1

# Sign "directions": few singular values.
SCALING_ROUNDS = 3  # rounds of scaling rows and columns to equal variance
# Share of the excess in the directions above noise. A LoRA of few directions lies entirely in them (0.96 and more); of
# 64 directions, noise hides some (0.4 to 0.7). GPTQ on inputs of few directions leaves up to 0.65 in 8 of 128.
MIN_DIRECTIONS_SHARE, MANY_DIRECTIONS = 0.55, 16

# Sign "grid": an earlier format.
GRID_WINDOWS = 512  # approximate number of windows to examine
WINDOW = 32  # columns of a window, in one row; apart from groups of 16, no format has smaller groups
PERIOD_RANGE = 1.5, 16.0, 0.25  # number of grid periods up to the largest value of a window: from, to, step
POSITIONS = 16  # number of positions that are distinguished between a code and halfway to the next
MIN_GRID_SHARE = 0.035  # minimum share of the error that follows a grid, in addition to chance

# Sign "scattered": errors that exceed the median of their row and group by SCATTERED_FACTOR. GPTQ causes such errors in
# columns that it rounds late, but hardly in the quarter of the columns with the smallest error: a share of 0 to 6e-5 (2
# to 8 bits; inputs that are correlated, nearly collinear, of few directions, or with channels 100 times as large;
# weights of normal to nearly Cauchy distribution; all orders). If GPTQ moved the values of all columns, errors are sums
# of many, and 7e-4 of normal numbers exceed five medians. Noise, or random steps, of 1 dB leaves 1e-3 to 1e-2.
SCATTERED = "scattered"
SCATTERED_FACTOR, SCATTERED_SHARE, BEST_COLUMNS_PART = 5.0, 1e-3, 4
MAX_SCATTERED = 8  # in samples of 64 rows, the best columns are uncertain, and up to 5 of 4,000 errors are large
MIN_USUAL_ERROR = 0.25  # the median of rounding errors, in steps

MEANINGS = {
    "rounding": "no rounding, with or without error compensation, makes these codes from the original: a finetune, "
    "another revision, or noise",
    "first": "no column holds the nearest codes, as the one that GPTQ rounds first does: noise, or another source",
    "directions": "few directions hold the difference: a LoRA was merged into one side",
    "grid": "the difference follows the grid of an earlier format: the weight was quantized before",
    SCATTERED: "single codes are several steps off among others that are near, which no method causes: noise, "
    "another revision, or wrong bits",
}


class CodesReadAgain:
    """Cache of the faults and signs in samples of the few weights that are read again; each is read once."""

    def __init__(self, reader: Reader, declared: Method, folded: Collection[str], undone: Collection[str] = ()) -> None:
        """Start without weights.

        Args:
            reader: reads the samples.
            declared: the method that config.json names; if it does not round to the nearest, codes beyond any rounding
                prove nothing.
            folded: modules that absorbed scales of other weights, which are known only as exactly as codes show them.
            undone: names of weights whose folded scales were undone from such codes. This explains errors of whole rows
                or columns, but not of single codes.
        """
        self._reader, self._declared, self._folded, self._undone = reader, declared, folded, undone
        self._results: dict[int, tuple[ScaleFault | None, list[str]]] = {}

    def find(self, weight: WeightSummary) -> tuple[ScaleFault | None, list[str]]:
        """Return the fault of a weight's scales, or else the signs of another source."""
        if weight.number not in self._results:
            sample = read_code_sample(weight.pair, self._reader)
            is_folded = weight.pair.name.rpartition(".")[0] in self._folded
            fault = find_scale_fault(weight.pair, sample) if sample and not is_folded else None
            signs = find_signs(weight.pair, sample, self._declared) if sample and not fault else []
            if weight.pair.name in self._undone:
                signs = [sign for sign in signs if sign == SCATTERED]
            self._results[weight.number] = fault, signs
        return self._results[weight.number]


def find_limited(outliers: Sequence[WeightSummary], reader: Reader) -> set[str]:
    """Return the names of weights whose scales limit them, because codes are about the nearest.

    The sample that is taken of every weight may leave out the rows that lower its SNR; the sample here has more rows.
    """
    limited = {weight.pair.name for weight in outliers if {NEAR, USUAL} & weight.facts}
    for weight in [weight for weight in outliers if weight.pair.name not in limited][:MAX_OUTLIERS]:
        sample = read_code_sample(weight.pair, reader)
        if sample and weight.figures and _is_limited(sample, weight.figures.snr_db):
            limited.add(weight.pair.name)
    return limited


def _is_limited(sample: CodeSample, snr_db: float) -> bool:
    """Return True if the rows have about the SNR of the weight, and the nearest codes are hardly better."""
    x, error, nearest = (
        side.double() for side in (sample.x, sample.y - sample.x, sample.find_cells().nearest - sample.x)
    )
    signal, noise, rest = (float(side.square().sum()) for side in (x, error, nearest))
    return level(signal, noise) < snr_db + NEAR_DB and level(noise, rest) < NEAR_DB


def check_scale_faults(seen: Sequence[WeightSummary], again: CodesReadAgain, kinds: Collection[str]) -> list[Finding]:
    """Report weights whose codes fit other scales; only a few of the weights with excess error are read."""
    lossy, read = _choose_weights(seen)
    faults = [(weight, fault) for weight in read if (fault := again.find(weight)[0]) and fault.name in kinds]
    return list(report_scale_faults(faults, lossy, len(read)))


def check_sources(seen: Sequence[WeightSummary], again: CodesReadAgain) -> Iterator[Finding]:
    """Report weights that show a sign of another source; only a few weights with excess error are read."""
    lossy, read = _choose_weights(seen)
    signs = {weight.pair.name: again.find(weight)[1] for weight in read}
    if 2 * sum("rounding" in weight_signs for weight_signs in signs.values()) < len(read):
        signs = {name: [sign for sign in weight_signs if sign != "rounding"] for name, weight_signs in signs.items()}
    losses = [weight.excess_db for weight in read if signs[weight.pair.name] and weight.excess_db is not None]
    if losses:
        yield _report_sources(
            {name: weight_signs for name, weight_signs in signs.items() if weight_signs}, losses, len(read), len(lossy)
        )


def _choose_weights(seen: Sequence[WeightSummary]) -> tuple[list[WeightSummary], list[WeightSummary]]:
    """Return the weights with excess error, and those of them to read again."""
    lossy = [weight for weight in seen if _is_off(weight)]
    worst = sorted(lossy, key=lambda weight: -(weight.excess_db or 0.0))[:MAX_WORST_WEIGHTS]
    spread = lossy[:: max(-(-len(lossy) // MAX_SPREAD_WEIGHTS), 1)]
    chosen = {weight.number for weight in (*spread, *worst)}
    return lossy, [weight for weight in lossy if weight.number in chosen]


def _is_off(summary: WeightSummary) -> bool:
    """Return True for a weight with excess error and known levels that is large enough for the signs.

    Weights with a low-rank branch are left out, as rounding the branch after the codes costs 3 dB in SDNQ.
    """
    if (
        summary.excess_db is None
        or not (summary.excess_db >= SLIGHT_DB or summary.moved)
        or summary.pair.quantized.branch is not None
    ):
        return False
    weight = summary.pair.quantized.unrotated
    return (
        weight.levels is not None
        and weight.shape == summary.pair.quantized.shape
        and min(*weight.matrix) >= MIN_VALUES
        and weight.matrix[1] <= MAX_SAMPLE_ELEMENTS // MIN_VALUES
    )


class ErrorSample(NamedTuple):
    """Errors of sampled rows, (r, c) float32 each; both sides are rotated if the codes are rotated."""

    x: Tensor
    error: Tensor  # error of the stored codes
    nearest: Tensor  # error of the nearest codes
    width: Tensor  # distance between the two codes around each element
    counted: Tensor  # bool: finite, and the nearest code is not at an end of the range; other errors are set to 0
    columns: Tensor  # (2, columns of the weight) float64: Σ error² of the stored and of the nearest codes


def find_signs(pair: Pair, of_codes: CodeSample, declared: Method) -> list[str]:
    """Return the signs that a weight shows, as keys of MEANINGS; for ``declared`` see :class:`CodesReadAgain`."""
    sample = _measure_errors(of_codes)
    if sample is None:
        return []
    method, levels = find_method(declared, pair.quantized.format, folded=False), pair.quantized.unrotated.levels
    signs = ["first"] if method.rounds_first_column and _is_off_everywhere(sample) else []
    is_even = levels is not None and not (levels.table or levels.mantissa)
    if is_even and not method.by_importance and _has_scattered_errors(sample, of_codes.unit):
        signs.append(SCATTERED)
    if levels is None or levels.number <= 2**2:
        return signs
    stored = 10 * log10(float(sample.error.square().sum() / sample.nearest.square().sum()))
    max_loss = method.max_loss_db if method.by_importance else SMALL_DB
    signs += ["grid"] if stored > max_loss and not pair.quantized.rotated and _follows_grid(sample) else []
    error, nearest = _refit_both(pair, sample)
    excess = float(error.square().sum() / nearest.square().sum())
    if not excess > 10 ** (SLIGHT_DB / 10):  # rounding of scales or zero points after the codes explains it
        return signs
    if method.is_nearest and _is_beyond_rounding(
        (sample.error / sample.width, error / sample.width), nearest / sample.width, sample.counted
    ):
        signs.append("rounding")
    if method.may_compensate and _find_min_ratio(sample) < 1 + NEGLIGIBLE_SHARE:
        return signs  # GPTQ with inputs of few directions also concentrates errors, but not in its first column
    share, number = _measure_directions(error)
    if share > (MIN_DIRECTIONS_SHARE if number >= MANY_DIRECTIONS else AGREEING_SHARE) * (1 - 1 / excess):
        signs.append("directions")
    return signs


def _refit_both(pair: Pair, sample: ErrorSample) -> list[Tensor]:
    """Return the errors of the stored and the nearest codes, (r, c), with the best scale and shift per group."""
    shape = len(sample.x), -1, _count_columns_per_scale(pair, sample.x.shape[1])
    x, counted = sample.x.view(shape), sample.counted.view(shape)
    return [_refit_scales(errors.view(shape), x, counted).view_as(errors) for errors in (sample.error, sample.nearest)]


def _measure_errors(sample: CodeSample) -> ErrorSample | None:
    """Return the errors of a sample; None if the stored or the nearest codes have no error."""
    x, y, around = sample.x, sample.y, sample.find_cells()
    counted = around.inside & x.isfinite() & y.isfinite() & around.nearest.isfinite() & (around.width > 0)
    x, error, nearest = (side.masked_fill(~counted, 0.0) for side in (x, y - x, around.nearest - x))
    columns = torch.stack([side.double().square().sum(0) for side in (error, nearest)])
    width = around.width.masked_fill(~counted, 1.0)
    x, error, nearest, width, counted = (side[:, :MAX_COLUMNS] for side in (x, error, nearest, width, counted))
    errors = ErrorSample(x, error, nearest, width, counted, columns)
    return errors if bool(errors.error.any()) and bool(errors.nearest.any()) else None


def _count_columns_per_scale(pair: Pair, cols: int) -> int:
    """Return the number of columns that share a scale; it divides ``cols``."""
    block = pair.quantized.unrotated.block_size
    return block[1] if block and cols % block[1] == 0 else cols


def _refit_scales(error: Tensor, x: Tensor, counted: Tensor) -> Tensor:
    """Return errors without the part that another scale and shift would remove, per group along the last axis."""
    n = counted.sum(-1, keepdim=True).clamp(min=1)
    x = (x - x.sum(-1, keepdim=True) / n) * counted
    e = (error - error.sum(-1, keepdim=True) / n) * counted
    slope = (e * x).sum(-1, keepdim=True) / x.square().sum(-1, keepdim=True).clamp_(min=torch.finfo(x.dtype).tiny)
    return e - slope * x


def _is_beyond_rounding(errors: Sequence[Tensor], nearest: Tensor, counted: Tensor) -> bool:
    """Return True if errors are larger than any rounding makes them, equally in all columns.

    Args:
        errors: the errors as stored and with refitted scales, in distances between codes.
        nearest: errors of the nearest codes, in the same unit.
        counted: elements that count, bool.
    """
    beyond = int(torch.stack([error.abs() > MAX_ERROR_STEPS for error in errors]).all(0).sum())
    if beyond < max(MIN_PEERS + 1, MAX_BEYOND_SHARE * int(counted.sum())):
        return False
    energies = nearest.square().mean(0)
    is_used = energies > energies.mean() / 2  # columns of smaller values always have the nearest codes
    halves = [errors[-1][first::2, is_used].square().mean(0) / energies[is_used] for first in (0, 1)]  # even, odd rows
    more = float(torch.stack(halves).mean()) - 1
    scatter = float(((halves[0] - halves[0].mean()) * (halves[1] - halves[1].mean())).mean())
    number = max(len(halves[0]) // FIRST_COLUMNS_PART, 1)
    first = [b[a.argsort()[:number]].mean() for a, b in (halves, halves[::-1])]
    return scatter < (MAX_SCATTER * more) ** 2 and float(sum(first) / 2) - 1 > MAX_SCATTER * more


def _is_off_everywhere(sample: ErrorSample) -> bool:
    """Return True if no column has the nearest codes, and many codes are neither of the two around their values."""
    if int((sample.error.abs() > MAX_ERROR_STEPS * sample.width).sum()) < NEGLIGIBLE_SHARE * int(sample.counted.sum()):
        return False  # rounding at random explains it
    return _find_min_ratio(sample) > NOISE_RATIO


def has_nearest_column(pair: Pair, reader: Reader) -> bool:
    """Return True if a column has the nearest codes, like the first column of GPTQ; False if that is unknown."""
    of_codes = read_code_sample(pair, reader)
    sample = _measure_errors(of_codes) if of_codes else None
    return sample is not None and _find_min_ratio(sample) < 1 + NEGLIGIBLE_SHARE


def _find_min_ratio(sample: ErrorSample) -> float:
    """Return the minimum over columns of the energy of errors, relative to that of the nearest codes' errors."""
    stored, nearest = sample.columns
    used = nearest > nearest.mean() / 2  # other columns have too few errors to compare
    return float((stored[used] / nearest[used]).min())


def _has_scattered_errors(sample: ErrorSample, unit: Tensor) -> bool:
    """Return True if single errors are far larger than others of their row and group, even in the best columns.

    The best columns are those with the smallest errors in every other row; the errors of the remaining rows are
    counted, so that the choice does not bias the count.
    """
    errors = (sample.error / sample.width).abs().masked_fill_(~sample.counted | (sample.x == 0), nan)
    groups = unit[:, : errors.shape[1]].sum(0).argsort(stable=True)  # puts columns with equal scales together
    errors = errors[:, groups[: len(groups) // WINDOW * WINDOW]].reshape(len(errors), -1, WINDOW)
    usual = errors.nanmedian(2, keepdim=True).values.clamp_(min=MIN_USUAL_ERROR)
    is_known = 2 * errors.isfinite().sum(2, keepdim=True) >= WINDOW  # the median of fewer errors is uncertain
    errors = (errors / usual).masked_fill_(~is_known, nan).flatten(1)
    halves = errors[::2], errors[1::2]
    number = errors.shape[1] // BEST_COLUMNS_PART
    best = torch.cat([b[:, _rate_columns(a).argsort()[:number]].flatten() for a, b in (halves, halves[::-1])])
    far = int((best > SCATTERED_FACTOR).sum())
    return far > max(MAX_SCATTERED, SCATTERED_SHARE * int(best.isfinite().sum()))


def _rate_columns(errors: Tensor) -> Tensor:
    """Return the mean square of each column's errors, (c,); columns without any come last."""
    return errors.square().nanmean(0).nan_to_num(nan=inf)


def _measure_directions(error: Tensor) -> tuple[float, int]:
    """Return the share of the energy in directions that noise does not explain, and their number."""
    e = error.double()
    for round_number in range(SCALING_ROUNDS + 1):
        if round_number == SCALING_ROUNDS:
            e = e.clamp(-CHANCE_DEVIATIONS, CHANCE_DEVIATIONS)
        for dim in (1, 0):
            e = e / e.square().mean(dim, keepdim=True).sqrt().clamp_(min=torch.finfo(e.dtype).tiny)
    e = e if e.shape[0] <= e.shape[1] else e.T
    rows, cols = e.shape
    energies = torch.linalg.eigvalsh(e @ e.T / cols)
    out = energies[energies > NOISE_RATIO * (1 + sqrt(rows / cols)) ** 2]
    return float((out - 1).sum()) / rows, len(out)


def _follows_grid(sample: ErrorSample) -> bool:
    """Return True if errors depend on where the original's values lie between the points of an even grid.

    Zeros are left out: they lie on every grid, and error compensation leaves other errors there than elsewhere.
    """
    windows = sample.x.shape[1] // WINDOW
    rows = slice(None, None, max(len(sample.x) * windows // GRID_WINDOWS, 1))
    rest = _remove_own_grid(sample)[rows]
    x, rest = (side[:, : windows * WINDOW].reshape(-1, 1, WINDOW) for side in (sample.x[rows], rest))
    used, tiny = x != 0, torch.finfo(x.dtype).tiny
    rest = _refit_scales(rest, x, used)
    rest = rest / rest.square().sum(2, keepdim=True).sqrt().clamp_(min=tiny)
    both = torch.cat((rest, _exchange(rest, used)), 1).mT  # exchanged errors show which share chance causes
    places = x / x.abs().amax(2, keepdim=True).clamp_(min=tiny)
    phases = 2 * pi * torch.arange(*PERIOD_RANGE).view(1, -1, 1) * places
    shares = ((phases.cos() @ both).square() + (phases.sin() @ both).square()) * (2 / WINDOW)
    follows, chance = shares.amax(1).unbind(1)
    more = float(follows.mean() - chance.mean())
    doubt = float((follows.var() + chance.var()).sqrt()) / sqrt(len(follows))
    return more > max(MIN_GRID_SHARE, CHANCE_DEVIATIONS * doubt)


def _exchange(rest: Tensor, used: Tensor) -> Tensor:
    """Rotate the errors of the used elements of each window by half of their number."""
    order = used.byte().argsort(stable=True, dim=2, descending=True)  # used elements first
    number = used.sum(2, keepdim=True).clamp(min=1)
    source = (torch.arange(rest.shape[2]) + number // 2) % number
    return torch.zeros_like(rest).scatter_(2, order, rest.gather(2, order.gather(2, source))) * used


def _remove_own_grid(sample: ErrorSample) -> Tensor:
    """Return the errors, (r, c), without the part that follows from the position of values between two codes.

    This part is the mean error at each position. It is computed separately on either side of the nearest code and of
    zero, which truncation treats differently, and for each window of columns, as GPTQ hardly changes the first columns.
    """
    x, error, nearest, width, counted, _ = sample
    place = (nearest.abs() / width * 2 * POSITIONS).long().clamp_(max=POSITIONS - 1)  # from the nearest code to halfway
    place += POSITIONS * ((nearest > 0) + 2 * (x > 0))
    place += 4 * POSITIONS * (torch.arange(x.shape[1]) // WINDOW)
    positions, numbers = place[counted], torch.bincount(place[counted], minlength=int(place.max()) + 1)
    usual = torch.zeros(len(numbers)).index_add_(0, positions, (error / width)[counted]) / numbers.clamp_(min=1)
    return (error - width * usual[place]) * counted


def _report_sources(signs: Mapping[str, Sequence[str]], losses: Sequence[float], read: int, lossy: int) -> Finding:
    """Report the weights that show signs of another source.

    Args:
        signs: name → its signs.
        losses: excess error of these weights, in dB.
        read: number of weights that were read.
        lossy: number of weights with excess error.
    """
    names, shown = (
        list(signs),
        [sign for sign in MEANINGS if any(sign in weight_signs for weight_signs in signs.values())],
    )
    lowest, highest = (f"{loss:.1f}" for loss in (min(losses), max(losses)))
    message = (
        f"another source? {count(lossy, 'weight')} lost more than rounding costs; of {read} read again "
        f"{len(names)} {'was' if len(names) == 1 else 'were'} not made from the original's values alone: "
        f"{itemize(names, 3)}; {lowest if lowest == highest else f'{lowest} to {highest}'} dB are lost: "
        f"{'; '.join(MEANINGS[sign] for sign in shown)}"
    )
    remedy = (
        "compare with the checkpoint that was actually quantized: the same revision, the same merged adapters, not "
        "quantized before"
    )
    evidence = {"layers": names, "signs": shown, "excess_db": max(losses), "read": read, "off": lossy}
    return make_finding("another_source", "warning", None, message, remedy, **evidence)
