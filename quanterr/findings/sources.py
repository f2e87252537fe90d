"""Signs that a quantized weight was made from values other than the original's.

The codes of such a weight are only a step or two from the nearest, so its SNR is a few dB too low, just as after error
compensation. Five signs on a sample of a few weights tell the two cases apart:

rounding    Codes that no method makes from the original. Rounding to nearest, at random or as learned yields one of the
            two codes around a value. GPTQ moves values before it rounds them, but not in the columns that it rounds
            first. So errors larger than the distance of two codes, in all columns alike, come from other values: a
            finetune, another revision, a merge.
first       For GPTQ, where it is declared: the column that it rounds first has the nearest codes. Codes that are off
            by chance, in all columns, do not come from it.
directions  A few singular values hold the excess: a LoRA update was merged into one side. Rounding errors have no
            singular values above the edge of Marchenko and Pastur, (1 + √(rows / columns))², once rows and columns are
            scaled to equal variance.
grid        The error follows the position of the original's values on an even grid other than the grid of the codes:
            the weight was rounded to an earlier format.
scattered   Single codes are several steps off among codes near their values, in all columns alike. GPTQ moves values
            of the columns that it rounds first by little, and those of later columns in proportion to the steps of
            their groups. Factors that were undone roughly make no single code stand out either.

Limits were determined on a real model (all-MiniLM-L6-v2, 36 matrices of 384 to 1536 columns) with its own activations
and all recipes of this program.
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
from quanterr.util.text import count, listed

MOST_OUTLIERS = 16  # weights far below their peers to read again, at most
SPREAD_READ, MOST_READ = 8, 4  # most weights to read again: spread over all, and with the greatest losses
WIDTH = 1024  # columns that are examined

# Sign "rounding": codes that no method makes from the original.
BEYOND = 1.05  # error over the distance of the two codes around a value; more than 1 only if scales were rounded later
BEYOND_SHARE = 1.5e-5  # share of such elements; noise of 1 dB causes 4e-5, methods none
# With GPTQ, column energies scatter by 0.4 to 1.1 of their excess, and a tenth of the columns has less than half of it.
# With a finetune they scatter by 0.05 to 0.4, and that tenth has 0.6 to 1.0.
SCATTER, FIRST = 0.4, 10

# Sign "first": the least error of a column over that of its nearest codes. GPTQ leaves 1.00 in the first one (real
# weights, 24 settings); where one of a hundred codes is a step off, it is 1.1. Sign "directions": singular values over
# the edge of Marchenko and Pastur; noise reaches 1.0.
ABOVE = 1.1

# Sign "directions": few singular values.
SPREAD = 3  # rounds of scaling rows and columns to equal variance
# Share of the excess in the directions found. A LoRA of few directions lies entirely in them (0.96 and more); with 64
# directions, some drown in noise (0.4 to 0.7). GPTQ on inputs of few directions leaves up to 0.65 in 8 of 128.
SHARE, MANY_DIRECTIONS = 0.55, 16

# Sign "grid": an earlier format.
GRID_WINDOWS = 512  # about this many windows are examined
WINDOW = 32  # columns of a window, in one row; apart from groups of 16, no format has smaller groups
PERIODS = 1.5, 16.0, 0.25  # number of grid periods up to the largest value of a window: from, to, step
CELLS = 16  # number of positions that are distinguished between a code and halfway to the next
FOLLOWS = 0.035  # least share of the error that follows a grid, beyond chance

# Sign "scattered": errors so many times as large as is usual in their row and group. GPTQ makes some errors large in
# columns that it rounds late, and none in the quarter of the columns with the least error, in which it moved values by
# little: a share of 0 to 6e-5 (2 to 8 bits; inputs that are correlated, nearly collinear, of few directions, or with
# channels 100 times as large; weights of normal to nearly Cauchy distribution; all orders). Where it moved the values
# of all columns, errors are sums of many, and 7e-4 of normal numbers are beyond five medians. Noise, or steps at
# random, that costs 1 dB leaves 1e-3 to 1e-2.
SCATTERED = "scattered"
TIMES_USUAL, SCATTERED_SHARE, BEST = 5.0, 1e-3, 4
FEW_SCATTERED = 8  # 64 rows show less surely which columns are the best: up to 5 of 4,000
USUAL_ERROR = 0.25  # in steps, at least: the median of errors of rounding

MEANINGS = {
    "rounding": "no rounding, with or without error compensation, makes these codes from the original: a finetune, "
    "another revision, or noise",
    "first": "no column holds the nearest codes, as the one that GPTQ rounds first does: noise, or another source",
    "directions": "few directions hold the difference: a LoRA was merged into one side",
    "grid": "the difference follows the grid of an earlier format: the weight was quantized before",
    SCATTERED: "single codes are several steps off among others that are near, which no method leaves: noise, "
    "another revision, or wrong bits",
}


class CodesReadAgain:
    """What samples of the few weights that are read again show; each is read once."""

    def __init__(self, reader: Reader, declared: Method, folded: Collection[str], undone: Collection[str] = ()) -> None:
        """Start without weights.

        Args:
            reader: reads the samples.
            declared: the method that config.json names: if this method does not round to the nearest, codes beyond any
                rounding prove nothing.
            folded: modules that absorbed scales of others: their own are known only as exactly as codes show them.
            undone: names of weights that absorbed scales, which were undone as exactly as that. All errors of a row or
                column follow from it, but none of single codes.
        """
        self._reader, self._declared, self._folded, self._undone = reader, declared, folded, undone
        self._found: dict[int, tuple[ScaleFault | None, list[str]]] = {}

    def find(self, one: WeightSummary) -> tuple[ScaleFault | None, list[str]]:
        """Return the fault of a weight's scales, or else the signs of another source."""
        if one.number not in self._found:
            sample = read_code_sample(one.pair, self._reader)
            is_folded = one.pair.name.rpartition(".")[0] in self._folded
            fault = find_scale_fault(one.pair, sample) if sample and not is_folded else None
            signs = find_signs(one.pair, sample, self._declared) if sample and not fault else []
            if one.pair.name in self._undone:
                signs = [sign for sign in signs if sign == SCATTERED]
            self._found[one.number] = fault, signs
        return self._found[one.number]


def find_limited(outliers: Sequence[WeightSummary], reader: Reader) -> set[str]:
    """Return the names of weights whose codes are about the nearest, on the same rows, so that scales limit them.

    The sample that is taken of every weight may leave out the rows that lower its SNR; these rows are more.
    """
    found = {one.pair.name for one in outliers if {NEAR, USUAL} & one.facts}
    for one in [one for one in outliers if one.pair.name not in found][:MOST_OUTLIERS]:
        sample = read_code_sample(one.pair, reader)
        if sample and one.figures and _is_limited(sample, one.figures.snr_db):
            found.add(one.pair.name)
    return found


def _is_limited(sample: CodeSample, snr_db: float) -> bool:
    """Return True if rows are about as bad as the weight, and the nearest codes would hardly gain."""
    x, error, least = (
        side.double() for side in (sample.x, sample.y - sample.x, sample.find_cells().nearest - sample.x)
    )
    signal, noise, rest = (float(side.square().sum()) for side in (x, error, least))
    return level(signal, noise) < snr_db + NEAR_DB and level(noise, rest) < NEAR_DB


def check_scale_faults(seen: Sequence[WeightSummary], again: CodesReadAgain, kinds: Collection[str]) -> list[Finding]:
    """Report weights whose codes fit other scales; of those with excess error, only a few are read."""
    off, read = _choose_weights(seen)
    faults = [(one, fault) for one in read if (fault := again.find(one)[0]) and fault.kind in kinds]
    return list(report_scale_faults(faults, off, len(read)))


def check_sources(seen: Sequence[WeightSummary], again: CodesReadAgain) -> Iterator[Finding]:
    """Report weights that show a sign of another source; only a few weights with excess error are read."""
    off, read = _choose_weights(seen)
    signs = {one.pair.name: again.find(one)[1] for one in read}
    if 2 * sum("rounding" in found for found in signs.values()) < len(read):
        signs = {name: [sign for sign in found if sign != "rounding"] for name, found in signs.items()}
    losses = [one.excess_db for one in read if signs[one.pair.name] and one.excess_db is not None]
    if losses:
        yield _report_sources({name: found for name, found in signs.items() if found}, losses, len(read), len(off))


def _choose_weights(seen: Sequence[WeightSummary]) -> tuple[list[WeightSummary], list[WeightSummary]]:
    """Return the weights with excess error, and those of them to read again."""
    off = [weight for weight in seen if _is_off(weight)]
    worst = sorted(off, key=lambda one: -(one.excess_db or 0.0))[:MOST_READ]
    chosen = {one.number for one in (*off[:: max(-(-len(off) // SPREAD_READ), 1)], *worst)}
    return off, [one for one in off if one.number in chosen]


def _is_off(one: WeightSummary) -> bool:
    """Return True for a weight with excess error, known levels, and a size that allows a judgement.

    Weights with a low-rank branch are left out: rounding the branch after the codes costs 3 dB in SDNQ.
    """
    if one.excess_db is None or not (one.excess_db >= SLIGHT_DB or one.moved) or one.pair.quantized.branch is not None:
        return False
    weight = one.pair.quantized.unrotated
    return (
        weight.levels is not None
        and weight.shape == one.pair.quantized.shape
        and min(*weight.matrix) >= MIN_VALUES
        and weight.matrix[1] <= MAX_SAMPLE_ELEMENTS // MIN_VALUES
    )


class ErrorSample(NamedTuple):
    """Errors of sampled rows, (r, c) float32 each; both sides are rotated if the codes are."""

    x: Tensor
    error: Tensor  # error of the stored codes
    least: Tensor  # error of the nearest codes
    width: Tensor  # distance between the two codes around each element
    fine: Tensor  # bool: finite, and neither the first nor the last code is the nearest; elsewhere errors are 0
    columns: Tensor  # (2, columns of the weight) float64: Σ error² of the stored and of the nearest codes


def find_signs(pair: Pair, of_codes: CodeSample, declared: Method) -> list[str]:
    """Return the signs that a weight shows, as keys of MEANINGS; for ``declared`` see :class:`CodesReadAgain`."""
    sample = _measure_errors(of_codes)
    if sample is None:
        return []
    method, levels = find_method(declared, pair.quantized.format, folded=False), pair.quantized.unrotated.levels
    found = ["first"] if method.rounds_first_column and _is_off_everywhere(sample) else []
    is_even = levels is not None and not (levels.table or levels.mantissa)
    if is_even and not method.by_importance and _has_scattered_errors(sample, of_codes.unit):
        found.append(SCATTERED)
    if levels is None or levels.number <= 2**2:
        return found
    stored = 10 * log10(float(sample.error.square().sum() / sample.least.square().sum()))
    least = method.max_loss_db if method.by_importance else SMALL_DB
    found += ["grid"] if stored > least and not pair.quantized.rotated and _follows_grid(sample) else []
    error, nearest = _refit_both(pair, sample)
    excess = float(error.square().sum() / nearest.square().sum())
    if not excess > 10 ** (SLIGHT_DB / 10):  # only scales or zero points were rounded after the codes
        return found
    if method.is_nearest and _is_beyond_rounding(
        (sample.error / sample.width, error / sample.width), nearest / sample.width, sample.fine
    ):
        found.append("rounding")
    if method.may_compensate and _find_least_ratio(sample) < 1 + NEGLIGIBLE_SHARE:
        return found  # few directions of inputs cause the same, but the column that GPTQ rounds first has no part in it
    share, number = _measure_directions(error)
    if share > (SHARE if number >= MANY_DIRECTIONS else AGREEING_SHARE) * (1 - 1 / excess):
        found.append("directions")
    return found


def _refit_both(pair: Pair, sample: ErrorSample) -> list[Tensor]:
    """Return the errors of the stored and the nearest codes, (r, c), with the best scale and shift per group."""
    shape = len(sample.x), -1, _columns_per_scale(pair, sample.x.shape[1])
    x, fine = sample.x.view(shape), sample.fine.view(shape)
    return [_refit_scales(of.view(shape), x, fine).view_as(of) for of in (sample.error, sample.least)]


def _measure_errors(sample: CodeSample) -> ErrorSample | None:
    """Return the errors of a sample; None if nothing differs."""
    x, y, around = sample.x, sample.y, sample.find_cells()
    fine = around.inside & x.isfinite() & y.isfinite() & around.nearest.isfinite() & (around.width > 0)
    x, error, least = (side.masked_fill(~fine, 0.0) for side in (x, y - x, around.nearest - x))
    columns = torch.stack([side.double().square().sum(0) for side in (error, least)])
    width = around.width.masked_fill(~fine, 1.0)
    x, error, least, width, fine = (side[:, :WIDTH] for side in (x, error, least, width, fine))
    found = ErrorSample(x, error, least, width, fine, columns)
    return found if bool(found.error.any()) and bool(found.least.any()) else None


def _columns_per_scale(pair: Pair, cols: int) -> int:
    """Return the number of columns that share a scale, which divides ``cols``."""
    block = pair.quantized.unrotated.block_size
    return block[1] if block and cols % block[1] == 0 else cols


def _refit_scales(error: Tensor, x: Tensor, fine: Tensor) -> Tensor:
    """Return errors without the part that another scale and shift would remove, per group along the last axis."""
    n = fine.sum(-1, keepdim=True).clamp(min=1)
    x = (x - x.sum(-1, keepdim=True) / n) * fine
    e = (error - error.sum(-1, keepdim=True) / n) * fine
    slope = (e * x).sum(-1, keepdim=True) / x.square().sum(-1, keepdim=True).clamp_(min=torch.finfo(x.dtype).tiny)
    return e - slope * x


def _is_beyond_rounding(errors: Sequence[Tensor], least: Tensor, fine: Tensor) -> bool:
    """Return True if errors are larger than any rounding makes them, in all columns alike.

    Args:
        errors: the errors as stored and with refitted scales, in distances between codes.
        least: errors of the nearest codes, in the same unit.
        fine: elements that count, bool.
    """
    beyond = int(torch.stack([error.abs() > BEYOND for error in errors]).all(0).sum())
    if beyond < max(MIN_PEERS + 1, BEYOND_SHARE * int(fine.sum())):
        return False
    of = least.square().mean(0)
    used = of > of.mean() / 2  # other columns hold so little that their codes are always the nearest
    halves = [errors[-1][first::2, used].square().mean(0) / of[used] for first in (0, 1)]  # every other row
    more = float(torch.stack(halves).mean()) - 1
    scatter = float(((halves[0] - halves[0].mean()) * (halves[1] - halves[1].mean())).mean())
    number = max(len(halves[0]) // FIRST, 1)
    first = [b[a.argsort()[:number]].mean() for a, b in (halves, halves[::-1])]
    return scatter < (SCATTER * more) ** 2 and float(sum(first) / 2) - 1 > SCATTER * more


def _is_off_everywhere(sample: ErrorSample) -> bool:
    """Return True if no column has the nearest codes, and many codes are none of the two around their values."""
    if int((sample.error.abs() > BEYOND * sample.width).sum()) < NEGLIGIBLE_SHARE * int(sample.fine.sum()):
        return False  # rounded at random
    return _find_least_ratio(sample) > ABOVE


def has_nearest_column(pair: Pair, reader: Reader) -> bool:
    """Return True if a column has the nearest codes, as the one that GPTQ rounds first; False if that is unknown."""
    of_codes = read_code_sample(pair, reader)
    sample = _measure_errors(of_codes) if of_codes else None
    return sample is not None and _find_least_ratio(sample) < 1 + NEGLIGIBLE_SHARE


def _find_least_ratio(sample: ErrorSample) -> float:
    """Return the least energy of a column's errors over that of its nearest codes."""
    stored, nearest = sample.columns
    used = nearest > nearest.mean() / 2  # in others, few codes are off
    return float((stored[used] / nearest[used]).min())


def _has_scattered_errors(sample: ErrorSample, unit: Tensor) -> bool:
    """Return True if single errors are far larger than others of their row and group, even in the best columns.

    The best columns are those where errors of every other row are least; errors of the rows between are counted there.
    """
    errors = (sample.error / sample.width).abs().masked_fill_(~sample.fine | (sample.x == 0), nan)
    groups = unit[:, : errors.shape[1]].sum(0).argsort(stable=True)  # columns whose scales are the same are together
    errors = errors[:, groups[: len(groups) // WINDOW * WINDOW]].reshape(len(errors), -1, WINDOW)
    usual = errors.nanmedian(2, keepdim=True).values.clamp_(min=USUAL_ERROR)
    is_known = 2 * errors.isfinite().sum(2, keepdim=True) >= WINDOW  # a median of fewer is uncertain
    errors = (errors / usual).masked_fill_(~is_known, nan).flatten(1)
    halves = errors[::2], errors[1::2]
    number = errors.shape[1] // BEST
    counted = torch.cat([b[:, _rate_columns(a).argsort()[:number]].flatten() for a, b in (halves, halves[::-1])])
    far = int((counted > TIMES_USUAL).sum())
    return far > max(FEW_SCATTERED, SCATTERED_SHARE * int(counted.isfinite().sum()))


def _rate_columns(errors: Tensor) -> Tensor:
    """Return the mean square of each column's errors, (c,); columns without any come last."""
    return errors.square().nanmean(0).nan_to_num(nan=inf)


def _measure_directions(error: Tensor) -> tuple[float, int]:
    """Return the share of the energy in the few directions that stand out from the noise, and their number."""
    e = error.double()
    for turn in range(SPREAD + 1):
        if turn == SPREAD:
            e = e.clamp(-CHANCE_DEVIATIONS, CHANCE_DEVIATIONS)
        for dim in (1, 0):
            e = e / e.square().mean(dim, keepdim=True).sqrt().clamp_(min=torch.finfo(e.dtype).tiny)
    e = e if e.shape[0] <= e.shape[1] else e.T
    rows, cols = e.shape
    energies = torch.linalg.eigvalsh(e @ e.T / cols)
    out = energies[energies > ABOVE * (1 + sqrt(rows / cols)) ** 2]
    return float((out - 1).sum()) / rows, len(out)


def _follows_grid(sample: ErrorSample) -> bool:
    """Return True if errors depend on where the original's values lie between the points of an even grid.

    Zeros lie on every grid: what error compensation leaves of them differs from other errors, and shows no grid.
    """
    windows = sample.x.shape[1] // WINDOW
    rows = slice(None, None, max(len(sample.x) * windows // GRID_WINDOWS, 1))
    rest = _remove_own_grid(sample)[rows]
    x, rest = (side[:, : windows * WINDOW].reshape(-1, 1, WINDOW) for side in (sample.x[rows], rest))
    used, tiny = x != 0, torch.finfo(x.dtype).tiny
    rest = _refit_scales(rest, x, used)
    rest = rest / rest.square().sum(2, keepdim=True).sqrt().clamp_(min=tiny)
    both = torch.cat((rest, _exchange(rest, used)), 1).mT  # errors of other elements show what chance gives
    places = x / x.abs().amax(2, keepdim=True).clamp_(min=tiny)
    phases = 2 * pi * torch.arange(*PERIODS).view(1, -1, 1) * places
    shares = ((phases.cos() @ both).square() + (phases.sin() @ both).square()) * (2 / WINDOW)
    found, chance = shares.amax(1).unbind(1)
    more = float(found.mean() - chance.mean())
    doubt = float((found.var() + chance.var()).sqrt()) / sqrt(len(found))
    return more > max(FOLLOWS, CHANCE_DEVIATIONS * doubt)


def _exchange(rest: Tensor, used: Tensor) -> Tensor:
    """Give each used element of a window the error of the one that is half of the used elements further on."""
    order = used.byte().argsort(stable=True, dim=2, descending=True)  # used ones first
    number = used.sum(2, keepdim=True).clamp(min=1)
    source = (torch.arange(rest.shape[2]) + number // 2) % number
    return torch.zeros_like(rest).scatter_(2, order, rest.gather(2, order.gather(2, source))) * used


def _remove_own_grid(sample: ErrorSample) -> Tensor:
    """Return the errors, (r, c), without the part that follows from the position of values between two codes.

    This part is the mean error at each position. It is taken separately on either side of the nearest code and of zero,
    because truncation distinguishes them, and per window of columns, because GPTQ changes the first columns least.
    """
    x, error, least, width, fine, _ = sample
    place = (least.abs() / width * 2 * CELLS).long().clamp_(max=CELLS - 1)  # from the nearest code to halfway
    place += CELLS * ((least > 0) + 2 * (x > 0))
    place += 4 * CELLS * (torch.arange(x.shape[1]) // WINDOW)
    own, numbers = place[fine], torch.bincount(place[fine], minlength=int(place.max()) + 1)
    usual = torch.zeros(len(numbers)).index_add_(0, own, (error / width)[fine]) / numbers.clamp_(min=1)
    return (error - width * usual[place]) * fine


def _report_sources(signs: Mapping[str, Sequence[str]], losses: Sequence[float], read: int, off: int) -> Finding:
    """Report the weights that show signs of another source.

    Args:
        signs: name → its signs.
        losses: excess error of these weights, in dB.
        read: number of weights that were read.
        off: number of weights with excess error.
    """
    names, shown = list(signs), [sign for sign in MEANINGS if any(sign in found for found in signs.values())]
    least, most = (f"{loss:.1f}" for loss in (min(losses), max(losses)))
    message = (
        f"another source? {count(off, 'weight')} lost more than rounding costs; of {read} read again "
        f"{len(names)} {'was' if len(names) == 1 else 'were'} not made from the original's values alone: "
        f"{listed(names, 3)}; {least if least == most else f'{least} to {most}'} dB are lost: "
        f"{'; '.join(MEANINGS[sign] for sign in shown)}"
    )
    remedy = (
        "compare with the checkpoint that was actually quantized: the same revision, the same merged adapters, not "
        "quantized before"
    )
    evidence = {"layers": names, "signs": shown, "excess_db": max(losses), "read": read, "off": off}
    return make_finding("another_source", "warning", None, message, remedy, **evidence)
