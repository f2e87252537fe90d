"""Signs that a quantized weight was made of other values than the original's, on a sample of a few.

The codes of such a weight are no more than a step or two from the nearest, so its SNR is but some dB too low, as error
compensation leaves it. Three signs tell the two apart:

rounding    Codes that no method makes of the original. To round to the nearest, at random or as learned takes one of
            the two codes around a value. GPTQ moves values on before it rounds them, but not those of the columns that
            it rounds first. So errors of more than the distance of two codes, in all columns alike, are of others:
            a finetune, another revision, a merge.
directions  A few singular values hold the excess: the update of a LoRA that was merged into one side. Those of rounding
            have none above the edge of Marchenko and Pastur, (1 + √(rows / columns))², once rows and columns are
            brought to one variance.
grid        The error follows the original's place between the points of an even grid that is not that of the codes:
            the weight was rounded to an earlier format before.

Limits, learned on the matrices of a real model (all-MiniLM-L6-v2, 36 of 384 to 1536 columns) and its own activations,
with all recipes of this program.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import log10, pi, sqrt
from typing import NamedTuple

import torch
from torch import Tensor

from quanterr.findings.codes import finding
from quanterr.findings.excess import NOTED_DB
from quanterr.findings.layers import WeightSummary
from quanterr.findings.samples import one_thread
from quanterr.formats.base import Weight
from quanterr.pairing.model import Pair
from quanterr.pairing.sampling import Workspaces, on_cpu
from quanterr.report.base import Finding
from quanterr.tensors.chunks import Chunk
from quanterr.tensors.levels import Scaling, cells
from quanterr.tensors.workspace import FilledWorkspace
from quanterr.util.text import count, listed

MOST_READ = 8  # weights that are read again
FEWEST_LEVELS = 5  # of codes of 2 bits most are the first or the last
RUNS, RUN = 16, 16  # runs of rows, spread over a weight, and the rows of each
READ, WIDTH = 1 << 20, 1024  # elements that are read of a weight; columns that are looked at
FEWEST = 32  # rows, and columns, of a weight that is judged

# Codes that no method makes of the original.
BEYOND = 1.05  # of the distance of the two codes around a value; 1 at most, scales that are rounded afterwards aside
BEYOND_SHARE, BEYOND_LEAST = 1.5e-5, 4  # of the elements; noise that costs 1 dB puts 4e-5 there, methods none
# GPTQ: energies of columns scatter by 0.4 to 1.1 of their excess, and a tenth of them has less than half of it. A
# finetune: by 0.05 to 0.4, and 0.6 to 1.0.
SCATTER, FIRST, LEFT = 0.38, 10, 0.4
MOST_AGREE = 0.5  # of the weights that are read: fewer may be chance

# Few directions.
EDGE = 1.1  # times that of Marchenko and Pastur; noise reaches 1.0
CAPPED = 4.0  # standard deviations: an outlier is no direction
SPREAD = 3  # times that rows and columns are brought to one variance, in turn
# Of the excess: a LoRA of few directions is wholly in them (0.96 and more), of one of many some drown in noise (0.4 to
# 0.7 of 64). GPTQ on inputs of few directions leaves up to 0.65 in 8 of 128.
SHARE, OF_FEW, MANY_DIRECTIONS = 0.55, 0.75, 16

# An earlier grid.
GRID_WINDOWS = 512  # that are looked at
WINDOW = 32  # columns of a row: no format of groups has fewer, but those of 16
PERIODS = 1.5, 16.0, 0.25  # of the grid in the largest value of a window: from, to, step
CELLS = 16  # places between two codes
FOLLOWS = 0.035
DEVIATIONS = 6.0
GRID_DB = 1.0  # of excess: factors that were folded into 3 bits and not found look like a grid at 0.7 dB

MEANINGS = {
    "rounding": "codes that rounding, however it compensates errors, does not make of the original: a finetune, "
    "another revision, or noise",
    "directions": "few directions hold the difference: a LoRA that was merged into one side",
    "grid": "the difference follows the grid of an earlier format: it was quantized before",
}


def of_sources(seen: Sequence[WeightSummary], named: bool) -> Iterator[Finding]:
    """The weights that show a sign, of a few of those whose codes are not the nearest.

    ``named`` if the configuration names a method that compensates errors: codes beyond any rounding are no sign then.
    """
    off = [one for one in seen if _is_off(one)]
    read = off[:: max(-(-len(off) // MOST_READ), 1)]
    with one_thread(), on_cpu() as workspaces:
        signs = {one.pair.name: signs_of(one.pair, workspaces, named) for one in read}
    if sum("rounding" in found for found in signs.values()) < MOST_AGREE * len(read):
        signs = {name: [sign for sign in found if sign != "rounding"] for name, found in signs.items()}
    losses = [one.excess_db for one in read if signs[one.pair.name] and one.excess_db is not None]
    if losses:
        yield _finding({name: found for name, found in signs.items() if found}, losses, len(read), len(off))


def _is_off(one: WeightSummary) -> bool:
    weight = _coded(one.pair)
    levels = weight.levels
    return (
        one.excess_db is not None
        and one.excess_db >= NOTED_DB
        and levels is not None
        and levels.number >= FEWEST_LEVELS
        and weight.shape == one.pair.quantized.shape
        and min(*weight.matrix) >= FEWEST
        and weight.matrix[1] <= READ // FEWEST
    )


def _coded(pair: Pair) -> Weight:
    """The weight that has codes element by element: that before its columns were rotated back."""
    return pair.quantized.rotated.weight if pair.quantized.rotated else pair.quantized


class Sample(NamedTuple):
    """Rows of a weight, (r, c) float32 each; of rotated columns both sides are rotated."""

    x: Tensor
    error: Tensor  # of what is stored
    least: Tensor  # of the nearest codes
    width: Tensor  # between the two codes around each element
    fine: Tensor  # bool: finite, and neither the first nor the last code is the nearest; elsewhere errors are 0


def signs_of(pair: Pair, workspaces: Workspaces, named: bool) -> list[str]:
    """The signs that a weight shows; ``named`` if a method that compensates errors is said to have made it."""
    sample = _sampled(pair, workspaces)
    if sample is None:
        return []
    stored = 10 * log10(float(sample.error.square().sum() / sample.least.square().sum()))
    found = ["grid"] if stored > GRID_DB and not pair.quantized.rotated and _follows_grid(sample) else []
    error, least = _beside_scales_of(pair, sample)
    excess = float(error.square().sum() / least.square().sum())
    if not excess > 10 ** (NOTED_DB / 10):  # scales or zero points that were rounded after the codes
        return found
    if not named and _no_rounding(
        (sample.error / sample.width, error / sample.width), least / sample.width, sample.fine
    ):
        found.append("rounding")
    share, number = _directions(error)
    if share > (SHARE if number >= MANY_DIRECTIONS else OF_FEW) * (1 - 1 / excess):
        found.append("directions")
    return found


def _beside_scales_of(pair: Pair, sample: Sample) -> list[Tensor]:
    """The errors of the stored and of the nearest codes, (r, c), with the best scale and shift for each group."""
    shape = len(sample.x), -1, _group(pair, sample.x.shape[1])
    x, fine = sample.x.view(shape), sample.fine.view(shape)
    return [_beside_scales(of.view(shape), x, fine).view_as(of) for of in (sample.error, sample.least)]


def _sampled(pair: Pair, workspaces: Workspaces) -> Sample | None:
    weight, turn = _coded(pair), pair.quantized.rotated
    rows, cols = weight.matrix
    height = min(RUN, max(READ // cols // RUNS, 1))
    starts = sorted({number * (rows - height) // (RUNS - 1) for number in range(RUNS)})
    ends = FilledWorkspace(torch.device("cpu")), FilledWorkspace(torch.device("cpu"))
    pieces: list[tuple[Tensor, ...]] = []
    after = 0
    for start in starts:
        chunk = Chunk(max(start, after), start + height, 0, cols)
        after = chunk.stop_row
        x = pair.original.dequantize(chunk, workspaces[0]).weight.float()
        x = turn.turn(x.clone(), workspaces[0]) if turn else x
        y = weight.dequantize(chunk, workspaces[1]).weight.float()
        scales = weight.scaling(chunk, ends)
        if scales is None or weight.levels is None:
            return None
        unit, shift = (None if side is None else side.float().expand_as(x)[:, :WIDTH] for side in scales)
        assert unit is not None  # noqa: S101
        x, y = x[:, :WIDTH], y[:, :WIDTH]
        around = cells(weight.levels, x, Scaling(unit, shift))
        fine = around.inside & x.isfinite() & y.isfinite() & around.nearest.isfinite() & (around.width > 0)
        sides = (x, y - x, around.nearest - x)
        pieces.append((*(side.masked_fill(~fine, 0.0) for side in sides), around.width.masked_fill(~fine, 1.0), fine))
    found = Sample(*(torch.cat(parts) for parts in zip(*pieces, strict=True)))
    return found if bool(found.error.any()) and bool(found.least.any()) else None


def _group(pair: Pair, cols: int) -> int:
    """Columns that share a scale, of so many."""
    block = _coded(pair).block_size
    return block[1] if block and cols % block[1] == 0 else cols


def _beside_scales(error: Tensor, x: Tensor, fine: Tensor) -> Tensor:
    """The errors without what another scale and shift would take away, of groups along the last axis."""
    n = fine.sum(-1, keepdim=True).clamp(min=1)
    x = (x - x.sum(-1, keepdim=True) / n) * fine
    e = (error - error.sum(-1, keepdim=True) / n) * fine
    slope = (e * x).sum(-1, keepdim=True) / x.square().sum(-1, keepdim=True).clamp_(min=torch.finfo(x.dtype).tiny)
    return e - slope * x


def _no_rounding(errors: Sequence[Tensor], least: Tensor, fine: Tensor) -> bool:
    """Whether errors are beyond those of any rounding, and in all columns alike.

    ``errors``, as they are and with other scales, and ``least`` are in distances between codes.
    """
    beyond = int(torch.stack([error.abs() > BEYOND for error in errors]).all(0).sum())
    if beyond < max(BEYOND_LEAST, BEYOND_SHARE * int(fine.sum())):
        return False
    of = least.square().mean(0)
    used = of > of.mean() / 2  # others hold so little that their codes are the nearest whatever was done
    halves = [errors[-1][first::2, used].square().mean(0) / of[used] for first in (0, 1)]  # of the rows
    more = float(torch.stack(halves).mean()) - 1
    scatter = float(((halves[0] - halves[0].mean()) * (halves[1] - halves[1].mean())).mean())
    number = max(len(halves[0]) // FIRST, 1)
    first = [b[a.argsort()[:number]].mean() for a, b in (halves, halves[::-1])]
    return scatter < (SCATTER * more) ** 2 and float(sum(first) / 2) - 1 > LEFT * more


def _directions(error: Tensor) -> tuple[float, int]:
    """How much more energy than noise the directions hold that stand out of it, as a share of all, and their number."""
    e = error.double()
    for turn in range(SPREAD + 1):
        if turn == SPREAD:
            e = e.clamp(-CAPPED, CAPPED)
        for dim in (1, 0):
            e = e / e.square().mean(dim, keepdim=True).sqrt().clamp_(min=torch.finfo(e.dtype).tiny)
    e = e if e.shape[0] <= e.shape[1] else e.T
    rows, cols = e.shape
    energies = torch.linalg.eigvalsh(e @ e.T / cols)
    out = energies[energies > EDGE * (1 + sqrt(rows / cols)) ** 2]
    return float((out - 1).sum()) / rows, len(out)


def _follows_grid(sample: Sample) -> bool:
    """Whether errors depend on where the original's values are between the points of an even grid, of each window."""
    windows = sample.x.shape[1] // WINDOW
    rows = slice(None, None, max(len(sample.x) * windows // GRID_WINDOWS, 1))
    rest = _beside_own_grid(sample)[rows]
    x, rest = (side[:, : windows * WINDOW].reshape(-1, 1, WINDOW) for side in (sample.x[rows], rest))
    rest = _beside_scales(rest, x, torch.ones_like(x))
    tiny = torch.finfo(x.dtype).tiny
    rest = rest / rest.square().sum(2, keepdim=True).sqrt().clamp_(min=tiny)
    both = torch.cat((rest, rest.roll(1, 0)), 1).mT  # of another window: what chance gives
    places = x / x.abs().amax(2, keepdim=True).clamp_(min=tiny)
    phases = 2 * pi * torch.arange(*PERIODS).view(1, -1, 1) * places
    shares = ((phases.cos() @ both).square() + (phases.sin() @ both).square()) * (2 / WINDOW)
    found, chance = shares.amax(1).unbind(1)
    more = float(found.mean() - chance.mean())
    doubt = float((found.var() + chance.var()).sqrt()) / sqrt(len(found))
    return more > max(FOLLOWS, DEVIATIONS * doubt)


def _beside_own_grid(sample: Sample) -> Tensor:
    """The errors without what follows from where values are between two codes, whatever rounds them; (r, c).

    That is the mean error at each place, on either side of the nearest code and of zero, as to truncate tells them
    apart; and in each window of columns, as GPTQ moves those least that it rounds first.
    """
    x, error, least, width, fine = sample
    place = (least.abs() / width * 2 * CELLS).long().clamp_(max=CELLS - 1)  # from the nearest code to half way
    place += CELLS * ((least > 0) + 2 * (x > 0))
    place += 4 * CELLS * (torch.arange(x.shape[1]) // WINDOW)
    own, numbers = place[fine], torch.bincount(place[fine], minlength=int(place.max()) + 1)
    usual = torch.zeros(len(numbers)).index_add_(0, own, (error / width)[fine]) / numbers.clamp_(min=1)
    return (error - width * usual[place]) * fine


def _finding(signs: Mapping[str, Sequence[str]], losses: Sequence[float], read: int, off: int) -> Finding:
    """``signs`` are those of each weight that shows one, ``losses`` what these lose [dB]."""
    names, shown = list(signs), [sign for sign in MEANINGS if any(sign in found for found in signs.values())]
    least, most = (f"{loss:.1f}" for loss in (min(losses), max(losses)))
    message = (
        f"another source? {count(off, 'weight')} lost more than rounding; of {read} that were read again "
        f"{len(names)} {'was' if len(names) == 1 else 'were'} not made of the original's values alone: "
        f"{listed(names, 3)}; {least if least == most else f'{least} to {most}'} dB are lost: "
        f"{'; '.join(MEANINGS[sign] for sign in shown)}"
    )
    remedy = (
        "compare with the checkpoint that was quantized: of the same revision, with the same adapters merged, and not "
        "quantized before"
    )
    evidence = {"layers": names, "signs": shown, "excess_db": max(losses), "read": read, "off": off}
    return finding("another_source", "warning", None, message, remedy, **evidence)
