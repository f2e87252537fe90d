"""The few weights that are worst off are read again: what corrects a sample of them says what is wrong.

Valid weights are never read again, of doubtful ones the first rows of a few.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import inf

import torch
from torch import Tensor

from quanterr.findings.codes import finding
from quanterr.findings.excess import FINE_DB
from quanterr.findings.factors import meaning, pattern
from quanterr.findings.figures import EXACT_DB, Figures
from quanterr.findings.layers import WeightSummary, severity
from quanterr.findings.repairs import LIKE, ONE_FACTOR, Correction, Sample, simplest, snr_db
from quanterr.formats import Weight
from quanterr.formats.shared.scale_grid import chunks_of_scale
from quanterr.pairing.model import Pair
from quanterr.pairing.sampling import Workspaces, on_cpu
from quanterr.report.base import Finding
from quanterr.tensors.chunks import CPU_CHUNK, Chunk, Cut
from quanterr.tensors.workspace import FilledWorkspace, Workspace
from quanterr.util.text import count, display, listed

MOST_WRONG = 8  # weights that are looked at, of those with a finding
MOST_LOW = 3  # and of those that are but below what is usual
MOST_OTHERS = 64  # weights that one is held against
ITS_OWN = 0.98  # of a cosine: no other weight is nearer
CLOSER = 0.5  # times the distance to the own original: another one is nearer
VALUES = 32  # of which so few are a weight that many formats hold exactly
TERNARY = 3  # values
ELEMENTS = 1 << 18  # of a sample
LOST = 0.5  # of a value: what is left of it is not what was meant


def diagnoses(
    seen: Sequence[WeightSummary], doubtful: Collection[str | None], pairs: Sequence[Pair]
) -> Iterator[Finding]:
    """For the worst of the weights that are doubtful, or that a factor or their level makes so, what corrects them."""
    matrices = [(o, o.figures) for o in seen if o.figures and o.figures.snr_db < FINE_DB and _matrix(o.pair)]
    matrices.sort(key=lambda item: item[1].snr_db)
    wrong = [item for item in matrices if item[0].pair.name in doubtful or item[1].gains]
    low = [item for item in matrices if item[0].pair.name not in doubtful and item[1].low and not item[1].gains]
    chosen = [*wrong[:MOST_WRONG], *low[:MOST_LOW]]
    with one_thread(), on_cpu() as workspaces:
        for one, figures in sorted(chosen, key=lambda item: item[0].number):
            found = _another(one.pair, figures, pairs, workspaces) or _diagnosis(one, figures, workspaces)
            if found:
                yield found


def rounded_before(better: Sequence[Pair], same: Sequence[Pair]) -> Iterator[Finding]:
    """Quantized weights whose original holds what codes stand for: ``better`` than rounding, or the ``same``.

    Those of a few values, as ternary ones, are exact in many formats.
    """
    coded = [p for p in same if p.quantized.has_codes and not p.original.has_codes and p.original.n >= VALUES**2]
    with one_thread(), on_cpu() as workspaces:
        found = [pair.name for pair in (*better, *coded[:MOST_OTHERS]) if _is_varied(pair, workspaces[0])]
    if found:
        message = (
            f"{count(len(found), 'quantized weight')} lost far less than rounding must: {listed(found, 3)}; "
            "the original was made from the quantized model, or both from the same codes"
        )
        remedy = "compare with the checkpoint from before the quantization"
        yield finding("lossless_codes", "warning", None, message, remedy, layers=found)


def lossless(coded: Sequence[Pair]) -> Finding:
    """Of quantized weights of which none lost anything: rounded before, or of so few values that codes hold them."""
    names = [pair.name for pair in coded]
    message = (
        f"quantization lost nothing: {count(len(coded), 'weight')} stored quantized, each identical to the original: "
        f"{listed(names, 3)}"
    )
    with one_thread(), on_cpu() as workspaces:
        ternary = all(_is_ternary(pair, workspaces[0]) for pair in coded[:MOST_OTHERS])
    if ternary:
        message += "; the original is ternary, binary or constant, as BitNet's weights are: codes hold that exactly"
        remedy = "nothing, if the model was trained so: codes of 2 bits (BitNet, TQ2_0) hold it as well, in less space"
        return finding("lossless_codes", "info", None, message, remedy, weights=len(coded))
    message += "; the original holds values that are already rounded"
    remedy = "compare with the checkpoint from before the quantization"
    return finding("lossless_codes", "warning", None, message, remedy, weights=len(coded))


def _is_ternary(pair: Pair, workspace: Workspace) -> bool:
    """Whether sampled rows hold three values each, or fewer."""
    return all(len(torch.unique(row)) <= TERNARY for row in _rows(pair.original, workspace, VALUES**2))


def lost_by_zero_scales(found: Sequence[Finding], pairs: Mapping[str, Pair]) -> list[Finding]:
    """The findings but those of zero scales where the original is zero too, as in pruned weights: all of it is read."""
    told = {one.layer for one in found if one.code == "scale_zero"}
    with one_thread(), on_cpu() as workspaces:
        harmless = {name for name, pair in pairs.items() if name in told and not _loses_by_zeros(pair, workspaces)}
    return [one for one in found if one.code != "scale_zero" or one.layer not in harmless]


def _loses_by_zeros(pair: Pair, workspaces: Workspaces) -> bool:
    """Whether scales of zero take values away; also where that is not known."""
    ends = FilledWorkspace(workspaces[0].device), FilledWorkspace(workspaces[0].device)
    for chunk in Cut(*pair.original.matrix, CPU_CHUNK):
        scales = pair.quantized.scaling(chunk, ends)
        if scales is None:
            return True
        zero = scales.unit == 0
        if bool(zero.any()):
            x = pair.original.dequantize(chunk, workspaces[0]).weight
            y = pair.quantized.dequantize(chunk, workspaces[1]).weight
            if bool((zero & ((y - x).abs() > LOST * x.abs())).any()):
                return True
    return False


def _is_varied(pair: Pair, workspace: Workspace) -> bool:
    """Whether it holds more values than codes of few bits do."""
    return len(torch.unique(_rows(pair.original, workspace, VALUES**2))) > VALUES


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread of torch: samples are so small that several would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def one_factor_mends(pair: Pair, figures: Figures) -> bool:
    """Whether the rows of a sample agree on one factor, and it corrects them."""
    with one_thread(), on_cpu() as workspaces:
        found = simplest(sample_of(pair, workspaces), figures.bits)
    return found is not None and found[0] is ONE_FACTOR


def _matrix(pair: Pair) -> bool:
    return pair.original.matrix[0] > 1 or pair.quantized.encoding != "floats"


def _diagnosis(one: WeightSummary, figures: Figures, workspaces: Workspaces) -> Finding | None:
    """The simplest repair that corrects a sample of a weight."""
    pair, bits = one.pair, figures.bits
    if bits < 2:
        return None
    sample = sample_of(pair, workspaces)
    levels = pair.quantized.levels
    has_zero = levels is None or not (levels.table or levels.mantissa)
    found = simplest(sample, bits, -inf if one.attainable_db is None else one.attainable_db, has_zero)
    if found is None:
        return _partly(pair, figures)
    repair, corrected = found
    description = repair.message.format(description=corrected.description)
    description += (
        meaning(float(corrected.description), one.scales)
        if repair is ONE_FACTOR
        else _pattern(pair, corrected, workspaces[1])
    )
    before = snr_db(sample.x, sample.y - sample.x)
    return finding(
        repair.code,
        severity(before, corrected.snr_db),
        pair.name,
        f"{display(pair.name)}: {figures.snr_db:.1f} dB as {pair.quantized.format}: {description}; "
        f"{'exact once corrected' if corrected.snr_db == EXACT_DB else f'{corrected.snr_db:.1f} dB once corrected'} on "
        "a sample",
        repair.remedy,
        snr_db=before,
        snr_db_repaired=corrected.snr_db,
        found=corrected.description,
    )


def _pattern(pair: Pair, corrected: Correction, workspace: Workspace) -> str:
    """What the factors of all rows, or of all blocks of them, suggest of the scales, where those are as many."""
    if corrected.factors is None or pair.quantized.scale is None or pair.quantized.scale.n != corrected.factors.numel():
        return ""
    stored = torch.cat([piece.flatten().double() for piece in chunks_of_scale(pair.quantized.scale, workspace)])
    return pattern(corrected.factors.flatten(), stored)


def _partly(pair: Pair, figures: Figures) -> Finding | None:
    """A factor that takes away much of the error, though rows do not agree on it."""
    if not figures.gains or figures.cosine < LIKE:
        return None
    return finding(
        "scale_factor",
        "warning",
        pair.name,
        f"{display(pair.name)}: {figures.snr_db:.1f} dB as {pair.quantized.format}; its values are "
        f"{figures.factor:.4g} times the original's overall, {figures.rescaled_db:.1f} dB without that factor: "
        "some of its scales are wrong, or large values were clipped",
        "compare its scales with what the quantizer wrote",
        snr_db=figures.snr_db,
        snr_db_repaired=figures.rescaled_db,
        found=f"{figures.factor:.4g}",
    )


def _another(pair: Pair, figures: Figures, pairs: Sequence[Pair], workspaces: Workspaces) -> Finding | None:
    """The weight of the original whose values these are, among those of one shape: experts may be much alike."""
    if figures.cosine > ITS_OWN:
        return None
    shape = pair.original.shape
    others = [one for one in pairs if one.original.shape == shape and one.name != pair.name][:MOST_OTHERS]
    y = _rows(pair.quantized, workspaces[1], ELEMENTS // 16)
    own = _cosine(_rows(pair.original, workspaces[0], ELEMENTS // 16), y) if others else 1.0
    for other in others:
        cosine = _cosine(_rows(other.original, workspaces[0], ELEMENTS // 16), y)
        if cosine > LIKE and 1 - cosine < CLOSER * (1 - own):
            return finding(
                "swapped_weight",
                "error",
                pair.name,
                f"{display(pair.name)}: its values are those of {display(other.name)} of the original "
                f"(cosine {cosine:.4f} on a sample)",
                "find out where the layers were swapped",
                weight=other.name,
                cosine_similarity=cosine,
            )
    return None


def _cosine(x: Tensor, y: Tensor) -> float:
    return float((x * y).sum() / (x.norm() * y.norm()))


def sample_of(pair: Pair, workspaces: Workspaces) -> Sample:
    """The first rows of a pair."""
    x, y = first_rows(pair.original, workspaces[0]), first_rows(pair.quantized, workspaces[1])
    finite = x.isfinite() & y.isfinite()
    return Sample(x.where(finite, 0.0), y.where(finite, 0.0))


def first_rows(weight: Weight, workspace: Workspace) -> Tensor:
    """As many of the first rows as a sample has, (r, c) float64."""
    return _rows(weight, workspace, ELEMENTS)


def _rows(weight: Weight, workspace: Workspace, elements: int) -> Tensor:
    """The first rows, at most so many elements but at least one row or a piece of one; (r, c) float64."""
    rows, cols = weight.matrix
    if cols >= elements:
        return weight.dequantize(Chunk(0, 1, 0, elements), workspace).weight.double()
    n = min(elements // max(cols, 1), rows)
    chunks = Cut(n, cols, CPU_CHUNK)
    return torch.cat([weight.dequantize(chunk, workspace).weight.double() for chunk in chunks])
