"""Producers' files of every format: damaged like users' files, or compared with an original that has another part.

Each golden file is compared with an original that it could have been rounded from: its expected values, each moved
within half a step (where a format has no nearest codes, plus noise of the level that is usual). What an accident costs
is measured on what is read then: nothing else reads all formats.

These weights are small, and codes of many formats have no nearest ones: an info, or an SNR that is 1 dB lower than that
of the sound file, as a gate sees it, counts as slight. What a part loses counts where weights have the statistics of
real ones, so not here.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from support.golden_files import EXPECTED, expected_of
from support.making import open_pairing, read_whole

import quanterr
from mutation.accidents import MUTATIONS, Mutation, Stored, Weight
from mutation.judging import LAYER_DB, STRUCTURAL, Outcome, Pair, as_unsound, judge_broken, loss, of_sound
from mutation.originals import Tensors, make_generator
from mutation.pairs import Bench, not_compared
from mutation.parts import DAMAGES, Damage
from quanterr.documents.comparison.model import Report
from quanterr.errors import QuanterrError
from quanterr.formats import FORMATS
from quanterr.tensors.chunks import Chunk
from quanterr.tensors.workspace import FilledWorkspace, Workspace

GOLDEN = Path(__file__).parents[1] / "golden"
ACCIDENTS = "golden, accidents"
DOUBTS = ("ambiguous_layout",)  # some files were made to raise these
CORRECT_FINDINGS = {  # golden file → the code of a finding that is correct about it
    "fp8_block/handmade_experts.safetensors": "scale_loss",  # codes by hand, which use a third of their range
    "fp8_tensor/degenerate_fp8.safetensors": "constant_weight",  # weights of zeros
    "int8_convrot/int8_formatless_convrot.safetensors": "undeclared_codes",  # labels without a format
    "int8_row/int8_formatless_convrot.safetensors": "undeclared_codes",
    "nvfp4/modelopt_nvfp4_linear_lowfirst.safetensors": "undeclared_codes",  # codes without any label
    "onnx_linear/onnxruntime.onnx": "scale_loss",  # codes by hand, which use half of their range
}
UNSOUND = (
    # The file is cut: it lacks the columns that determined most of its scales.
    "int8_row/comfy_int8_rowwise.safetensors",
    "int8_tensor/int8_legacy.safetensors",  # cut in the same way
    "torchao_nvfp4/torchao_shapes.safetensors",  # without a scale of the tensor, torchao stores none below 2^-6
)
CHANGED = 1.0  # dB
USUAL = {row.name: row.usual_db for row in FORMATS}


def cases() -> list[Path]:
    """Return all golden cases whose values are numbers."""
    plain = ("__pycache__", "verbatim", "dense", "onnx_float")
    glob = [path for path in GOLDEN.glob("*/*") if path.parent.name not in plain]
    return sorted(path for path in glob if not path.name.endswith(EXPECTED))


@cache
def of_each_format() -> frozenset[Path]:
    """Return one case of each format, preferably one that a producer made from weights, not from random codes."""
    return frozenset({case.parent.name: case for case in sorted(cases(), key=_has_statistics)}.values())


def _has_statistics(case: Path) -> bool:
    return not case.name.startswith(("random_", "every_", "handmade"))


def name_of(case: Path) -> str:
    """Return the name of a golden case."""
    return f"{case.parent.name}/{case.name}"


def level(format_name: str, bits: float) -> float:
    """Return the SNR in dB of good weights of a format: the usual one, or the one that so many bits give."""
    usual = USUAL.get(format_name)
    if usual and usual[1] - usual[0] <= 4:
        return sum(usual) / 2
    return {1: 4.5, 2: 8.0, 3: 14.0}.get(round(bits), 6.0 * bits - 4)


def noisy(values: torch.Tensor, snr_db: float, generator: torch.Generator) -> torch.Tensor:
    """Return values with noise of one level in each run of 32 elements of a row.

    Like :func:`within_steps`, leave runs of zeros as they are.
    """
    rows = values.double().reshape(-1, values.shape[-1] if values.dim() else 1)
    pad = -rows.shape[1] % 32
    blocks = torch.nn.functional.pad(rows, (0, pad)).reshape(len(rows), -1, 32)
    step = blocks.square().mean(2, keepdim=True).sqrt() * 10 ** (-snr_db / 20)
    noise = torch.randn(blocks.shape, generator=generator, dtype=torch.float64) * step
    noise = noise.reshape(len(rows), -1)[:, : rows.shape[1]].masked_fill(in_zeros(rows), 0)
    return (rows + noise).reshape(values.shape).float()


def within_steps(weight: Any, y: torch.Tensor, generator: torch.Generator) -> torch.Tensor | None:
    """Return numbers, (r, c), that would be rounded to ``y``; None if the format has no nearest codes."""
    if not y.any():
        return y
    inner = weight.rotated.weight if weight.rotated else weight
    chunk = Chunk(0, inner.matrix[0], 0, inner.matrix[1])
    scales = inner.scaling(chunk, (FilledWorkspace(), FilledWorkspace()))
    if scales is None:
        return None
    if weight.rotated:
        y = inner.dequantize(chunk, Workspace()).weight.clone()
    shift = 0.0 if scales.shift is None else scales.shift
    numbers = inner.levels.numbers(((y - shift) / scales.unit).nan_to_num(0.0, 0.0, 0.0))
    lowest, highest = (inner.levels.numbers(torch.tensor([end])) for end in (inner.levels.lowest, inner.levels.highest))
    here, above, below = (inner.levels.values((numbers + by).clamp(lowest, highest)) for by in (0, 1, -1))
    gaps = torch.stack([(above - here).abs(), (here - below).abs()])
    half = torch.where(gaps > 0, gaps, torch.inf).amin(0).nan_to_num(0.0, 0.0, 0.0) / 2
    moved = (2 * torch.rand(y.shape, generator=generator) - 1) * 0.999 * half * scales.unit.abs()
    x = y + torch.where(in_zeros(y), 0.0, moved)
    if inner.levels.mantissa or inner.levels.table:  # half a step is up to a sixth of the largest: no value is beyond
        ends = (end * scales.unit + shift for end in (inner.levels.lowest, inner.levels.highest))
        within = torch.stack(torch.broadcast_tensors(y, *ends))
        x = x.clamp(within.amin(0), within.amax(0))
    return weight.rotated.rotate(x, Workspace()) if weight.rotated else x


def in_zeros(y: torch.Tensor) -> torch.Tensor:
    """Return a mask of runs of 8 zeros in a row. A quantizer would have made smaller scales from other numbers."""
    cols = y.shape[1]
    runs = torch.nn.functional.pad(y, (0, -cols % 8)).reshape(len(y), -1, 8)
    return (runs == 0).all(2).repeat_interleave(8, 1)[:, :cols]


@dataclass
class Sound:
    """A golden case with an original whose error is that of its format."""

    bench: Bench
    case: Path
    original: Path
    x: Tensors
    weights: list[Weight]
    y: Tensors
    report: Report


def make_sound(case: Path, bench: Bench) -> Sound:
    """Return the case with an original from which it could have been quantized."""
    expected = {name: values.float() for name, values in load_file(expected_of(case)).items()}
    generator = make_generator(0)
    weights, x = [], {}
    with open_pairing(expected_of(case), case) as plan:
        for pair in plan.pairs:
            y = pair.quantized
            values = expected[pair.name]
            if not bool(values.isfinite().all()):
                continue
            bits = y.code_bits or 8 * y.nbytes / max(y.n, 1)
            parts = {role: entry.name for role, entry in y.parts.items()}
            weights.append(Weight(pair.name, y.format, round(bits), parts))
            near = within_steps(y, values.reshape(y.matrix).float(), generator)
            x[pair.name] = noisy(values, level(y.format, bits), generator) if near is None else near.view(values.shape)
    original = bench.place(".safetensors")
    save_file(x, original)
    report = quanterr.compare(original, case, device="cpu")
    return Sound(bench, case, original, x, weights, read_values(original, case), report)


def read_values(original: Path, quantized: Path) -> Tensors:
    """Return the values of each paired weight as stored, (rows, cols), without trying or undoing conversions."""
    with open_pairing(original, quantized) as plan:
        return {pair.name: read_whole(pair.quantized) for pair in plan.pairs}


def break_together(sound: Sound, mutation: Mutation) -> Iterator[Outcome]:
    """Yield the outcomes of an accident to several weights at once."""
    stored = Stored.read(sound.case, list(sound.weights))
    hit: list[Weight] = []
    for weight in sound.weights:
        touched = {name for other in hit for name in other.parts.values()}
        if touched.isdisjoint(weight.parts.values()) and mutation.change(stored, weight):
            hit.append(weight)
    if not hit:
        return
    folder = sound.bench.place()
    folder.mkdir()
    path = stored.write(folder, mutation.truncated)
    try:
        y = read_values(sound.original, path)
    except QuanterrError:
        y = {}
    pairs = {
        weight.name: Pair(_matrix(sound.x[weight.name], sound.y[weight.name]), y[weight.name])
        if weight.name in y and y[weight.name].shape == sound.y[weight.name].shape
        else None
        for weight in hit
    }
    yield from _judge(sound, ACCIDENTS, mutation.name, pairs, sound.original, path)


def damage_parts(sound: Sound, damage: Damage) -> Iterator[Outcome]:
    """Yield the outcome of each weight of which a part differs from the original."""
    generator = make_generator(7)
    changed = {name: damage.change(x.clone(), generator).contiguous() for name, x in sound.x.items() if x.dim() > 1}
    path = sound.bench.place(".safetensors")
    save_file(sound.x | changed, path)
    pairs = {name: Pair(_matrix(x, sound.y[name]), sound.y[name]) for name, x in changed.items()}
    yield from _judge(sound, "golden, parts", damage.name, pairs, path, sound.case)


def _matrix(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.reshape(y.shape)


def _judge(
    sound: Sound, family: str, what: str, pairs: dict[str, Pair | None], original: Path, quantized: Path
) -> Iterator[Outcome]:
    """Yield the outcome of each broken weight; its pair is None if it cannot be read."""
    try:
        report: Report | Exception = quanterr.compare(original, quantized, device="cpu")
    except Exception as error:
        report = error
    for name, pair in pairs.items():
        cost = loss(Pair(_matrix(sound.x[name], sound.y[name]), sound.y[name]), pair) if pair else STRUCTURAL
        if cost.layer < LAYER_DB:
            continue
        title = f"{name_of(sound.case)} {name}, {what}"
        if isinstance(report, Report):
            outcome = judge_broken(family, title, report, sound.report, [name], cost)
        else:
            outcome = not_compared(family, title, cost, report)
        if outcome.told == "info" or (outcome.told == "SILENT" and _shows(sound.report, report, name)):
            outcome = outcome._replace(told="slight")
        yield sound.bench.done(outcome, original, quantized)


def _shows(sound: Report, broken: Report | Exception, name: str) -> bool:
    """Return True if the number of a layer alone shows the damage."""
    return isinstance(broken, Report) and _snr(sound, name) - _snr(broken, name) >= CHANGED


def _snr(report: Report, name: str) -> float:
    """Return the SNR in dB of a layer; of an identical one, more than any."""
    layers = (*report.layers, *report.other_changes)
    return next((layer.snr_db or 0.0 for layer in layers if layer.layer_name == name), 1000.0)


def outcomes(bench: Bench, case: Path) -> Iterator[Outcome]:
    """Yield the outcomes of the sound pair of a golden case, of every accident, and of every replaced part."""
    sound = make_sound(case, bench)
    outcome = of_sound(ACCIDENTS, name_of(case), sound.report, (*DOUBTS, CORRECT_FINDINGS.get(name_of(case), "")))
    yield bench.done(as_unsound(outcome) if name_of(case) in UNSOUND else outcome, sound.original, case)
    for mutation in MUTATIONS:
        yield from break_together(sound, mutation)
    for damage in DAMAGES if case in of_each_format() and _has_statistics(case) else ():
        yield from damage_parts(sound, damage)
