"""Breaks every golden file in the ways of the accidents that users reported, and counts what is noticed.

python tests/mutate.py [FORMAT ...]        make mutate

Each golden file is compared with an original that it could have been rounded from: its expected values, each moved
within half a step (where a format has no nearest codes, plus noise of the level that is usual). Sound so, and then
broken in each way of MUTATIONS, all its weights at once, or beside an original of which a part is another's, in each
way of DAMAGES. A weight that a mutation changes by 1 dB or more, or damage by so much or by 6 dB in any row, column or
block of 64 elements and more, ends in one of

    error       the result is unreliable: a finding of severity error, or not compared, or not readable
    finding     a warning that names the weight, or an info that it is worse than its scales allow
    number      no finding, but the SNR in the report is 3 dB or more off the sound one
    slight      no finding, but that SNR is off by 1 to 3 dB: what a gate against a baseline sees
    UNNOTICED   none of these: the report has the sound number

What is not quantized is cast to every dtype of floats, sound and damaged in each way of casting.DAMAGES.

Exit status 1 if any is unnoticed, or if a sound file has a finding of severity error.
"""

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import chain, product
from math import inf, isfinite, log10
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import casting
import torch
from damaging import DAMAGES, Damage, cost
from making import CPU, compared, dequantized, planned
from mutating import MUTATIONS, OTHERS, Mutation, Stored, Weight
from safetensors.torch import load_file, save_file

import quanterr
from quanterr.errors import QuanterrError
from quanterr.formats import FORMATS
from quanterr.report.model import Finding, Report
from quanterr.tensors.chunks import Chunk
from quanterr.tensors.workspace import FilledWorkspace, Workspace

GOLDEN = Path(__file__).parent / "golden"
EXPECTED = ".expected.safetensors"
USUAL = {row.name: row.usual_db for row in FORMATS}
CHANGED = 1.0  # dB
CLEARLY = 3.0  # dB
CAST = "cast, "  # before a damage of what is not quantized
PART = 6.0  # dB, of a row, a column or a block
OUTCOMES = ("error", "finding", "number", "slight", "UNNOTICED")


class Outcome(NamedTuple):
    """What became of one weight under one mutation."""

    case: str
    format: str
    weight: str
    mutation: str
    outcome: str
    sound_db: float
    broken_db: float


class Sound(NamedTuple):
    """A golden case with an original whose error is that of its format."""

    case: Path
    original: Path
    weights: list[Weight]
    true_db: dict[str, float]
    report: Report


def cases() -> list[Path]:
    """All golden cases whose values are numbers."""
    found = [path for path in GOLDEN.glob("*/*") if path.parent.name not in ("__pycache__", "verbatim", "dense")]
    return sorted(path for path in found if not path.name.endswith(EXPECTED))


def named(case: Path) -> str:
    """A golden case in words."""
    return f"{case.parent.name}/{case.name}"


def level(format_name: str, bits: float) -> float:
    """SNR in dB of good weights of a format: the usual one, or what so many bits give."""
    usual = USUAL.get(format_name)
    if usual and usual[1] - usual[0] <= 4:
        return sum(usual) / 2
    return {1: 4.5, 2: 8.0, 3: 14.0}.get(round(bits), 6.0 * bits - 4)


def noisy(values: torch.Tensor, snr_db: float, generator: torch.Generator) -> torch.Tensor:
    """Values plus noise of the same level in each run of 32 elements of a row, as of blocks with a scale each."""
    rows = values.double().reshape(-1, values.shape[-1] if values.dim() else 1)
    pad = -rows.shape[1] % 32
    blocks = torch.nn.functional.pad(rows, (0, pad)).reshape(len(rows), -1, 32)
    step = blocks.square().mean(2, keepdim=True).sqrt() * 10 ** (-snr_db / 20)
    noise = torch.randn(blocks.shape, generator=generator, dtype=torch.float64) * step
    return (rows + noise.reshape(len(rows), -1)[:, : rows.shape[1]]).reshape(values.shape).float()


def within_steps(weight: Any, y: torch.Tensor, generator: torch.Generator) -> torch.Tensor | None:
    """Numbers, (r, c), that would be rounded to ``y``; None where a format has no nearest codes."""
    if not y.any():
        return y
    inner = weight.rotated.weight if weight.rotated else weight
    chunk = Chunk(0, inner.matrix[0], 0, inner.matrix[1])
    scales = inner.scaling(chunk, (FilledWorkspace(CPU), FilledWorkspace(CPU)))
    if scales is None:
        return None
    if weight.rotated:
        y = inner.dequantize(chunk, Workspace(CPU)).weight.clone()
    shift = 0.0 if scales.shift is None else scales.shift
    numbers = inner.levels.numbers(((y - shift) / scales.unit).nan_to_num(0.0, 0.0, 0.0))
    least, most = (inner.levels.numbers(torch.tensor([end])) for end in (inner.levels.lowest, inner.levels.highest))
    here, above, below = (inner.levels.values((numbers + by).clamp(least, most)) for by in (0, 1, -1))
    gaps = torch.stack([(above - here).abs(), (here - below).abs()])
    half = torch.where(gaps > 0, gaps, torch.inf).amin(0).nan_to_num(0.0, 0.0, 0.0) / 2
    moved = (2 * torch.rand(y.shape, generator=generator) - 1) * 0.999 * half * scales.unit.abs()
    x = y + torch.where(in_zeros(y), 0.0, moved)
    return weight.rotated.turn(x, Workspace(CPU)) if weight.rotated else x


def in_zeros(y: torch.Tensor) -> torch.Tensor:
    """Where runs of 8 elements of a row are zero: a quantizer would have made smaller scales of other numbers."""
    cols = y.shape[1]
    runs = torch.nn.functional.pad(y, (0, -cols % 8)).reshape(len(y), -1, 8)
    return (runs == 0).all(2).repeat_interleave(8, 1)[:, :cols]


def made_sound(case: Path, folder: Path) -> Sound:
    """The case beside an original that it could have been quantized from."""
    expected = load_file(case.with_suffix(EXPECTED))
    generator = torch.Generator().manual_seed(0)
    weights = []
    original = {}
    with planned(case.with_suffix(EXPECTED), case) as plan:
        for pair in plan.pairs:
            y = pair.quantized
            if not bool(expected[pair.name].isfinite().all()):
                continue
            bits = y.code_bits or 8 * y.nbytes / max(y.n, 1)
            weights.append(
                Weight(pair.name, y.format, round(bits), {role: entry.name for role, entry in y.parts.items()})
            )
            values = expected[pair.name]
            x = within_steps(y, values.reshape(y.matrix).float(), generator)
            sound = noisy(values, level(y.format, bits), generator) if x is None else x.reshape(values.shape)
            original[pair.name] = sound
    path = folder / "original.safetensors"
    save_file(original, path)
    return Sound(case, path, weights, true_levels(path, case), quanterr.compare(path, case, device="cpu"))


def true_levels(original: Path, quantized: Path) -> dict[str, float]:
    """SNR in dB of each paired weight as it is stored, by float64: nothing is tried, undone or found."""
    values = load_file(original)
    found = {}
    with planned(original, quantized) as plan:
        for pair in plan.pairs:
            x = values[pair.name].double().reshape(pair.quantized.matrix)
            y = dequantized(pair.quantized).double()
            e = y - x
            keep = x.isfinite() & y.isfinite()
            noise, signal = float(e[keep].square().sum()), float(x[keep].square().sum())
            found[pair.name] = 10 * log10(signal / noise) if noise and signal and isfinite(noise) else inf
            if not bool(keep.all()):
                found[pair.name] = -inf
    return found


def broken(sound: Sound, mutation: Mutation, folder: Path) -> Iterator[Outcome]:
    """What becomes of each weight that the mutation changes."""
    stored = Stored.read(sound.case)
    OTHERS[id(stored)] = sound.weights
    hit: list[Weight] = []
    for weight in sound.weights:
        touched = {name for other in hit for name in other.parts.values()}
        if touched.isdisjoint(weight.parts.values()) and mutation.change(stored, weight):
            hit.append(weight)
    OTHERS.pop(id(stored))
    if not hit:
        return
    folder.mkdir()
    path = stored.write(folder, mutation.truncated)
    try:
        report, true_db = quanterr.compare(sound.original, path, device="cpu"), true_levels(sound.original, path)
    except QuanterrError:
        report, true_db = None, {}
    for weight in hit:
        before, after = sound.true_db[weight.name], true_db.get(weight.name, -inf)
        if before == after or abs(before - after) < CHANGED:
            continue
        told = "error" if report is None else outcome(report, sound.report, weight.name)
        yield Outcome(
            named(sound.case),
            weight.format,
            weight.name,
            mutation.name,
            told,
            before,
            after,
        )


def damaged(sound: Sound, damage: Damage, folder: Path) -> Iterator[Outcome]:
    """What becomes of each weight of which a part is not what the original has."""
    values = load_file(sound.original)
    generator = torch.Generator().manual_seed(7)
    broken = {name: damage.change(x.clone(), generator) for name, x in values.items() if x.dim() > 1}
    folder.mkdir()
    path = folder / "original.safetensors"
    save_file(values | {name: x.contiguous() for name, x in broken.items()}, path)
    try:
        report = quanterr.compare(path, sound.case, device="cpu")
    except QuanterrError:
        report = None
    with planned(sound.original, sound.case) as plan:
        stored = {pair.name: (pair.quantized.format, dequantized(pair.quantized)) for pair in plan.pairs}
    for name, x in broken.items():
        format_name, y = stored[name]
        before, after, part = cost(values[name].reshape(y.shape), x.reshape(y.shape), y)
        if before - after >= CHANGED or part >= PART:
            told = "error" if report is None else outcome(report, sound.report, name)
            yield Outcome(named(sound.case), format_name, name, damage.name, told, before, after)


def recast(dtypes: tuple[str, str]) -> tuple[list[Outcome], list[Finding]]:
    """What becomes of each tensor that is not quantized, damaged on the way from one dtype to another; as `judged`."""
    original, quantized = (casting.DTYPES[dtype] for dtype in dtypes)
    x, case, outcomes = casting.model(original), f"casts/{dtypes[0]} to {dtypes[1]}", []

    def report_of(folder: Path, weights: dict[str, torch.Tensor]) -> Report:
        folder.mkdir()
        cast = {name: weight.to(quantized) for name, weight in weights.items()}
        return compared(folder, x, casting.with_codes(cast))

    with tempfile.TemporaryDirectory() as folder:
        sound = report_of(Path(folder) / "sound", x)
        for name, damage in product(casting.UNQUANTIZED, casting.DAMAGES):
            broken = casting.damaged(x[name], damage)
            report = report_of(Path(folder) / f"{name}{len(outcomes)}", x | {name: broken})
            before, after = (_snr_db(x[name], y.to(quantized)) for y in (x[name], broken))
            told = outcome(report, sound, name)
            outcomes.append(Outcome(case, "dense", name, f"{CAST}{damage}", told, before, after))
    return outcomes, sound.findings


def _snr_db(x: torch.Tensor, y: torch.Tensor) -> float:
    signal, noise = float(x.double().square().sum()), float((y.double() - x.double()).square().sum())
    return 10 * log10(signal / noise) if noise else inf


def outcome(report: Report, sound: Report, name: str) -> str:
    """How a report tells that something is wrong with a weight, where that of the sound file does not."""
    before = {(f.code, f.layer) for f in sound.findings}
    new = [f for f in report.findings if (f.code, f.layer) not in before]
    about = [f for f in new if f.layer in (name, None) or name in f.evidence.get("layers", ())]
    if any(item.layer_name == name for item in report.not_compared) or any(f.severity == "error" for f in about):
        return "error"
    if any(f.severity == "warning" or f.code.startswith("excess_") for f in about):
        return "finding"
    then, now = snr(sound, name), snr(report, name)
    off = abs(then - now)
    return "number" if off >= CLEARLY else "slight" if off >= CHANGED else "UNNOTICED"


def snr(report: Report, name: str) -> float:
    """SNR in dB of a layer of a report; where there is none 0, and infinite where it is lossless."""
    for layer in (*report.layers, *report.other_changes):
        if layer.layer_name == name:
            return layer.snr_db or 0.0
    return 1000.0 if any(layer.layer_name == name for layer in report.lossless) else 0.0


def judged(
    case: Path, mutations: Iterable[Mutation] = MUTATIONS, damages: Iterable[Damage] = DAMAGES
) -> tuple[list[Outcome], list[Finding]]:
    """All outcomes of a golden case, and what is found in it while it is sound."""
    with tempfile.TemporaryDirectory() as name:
        sound = made_sound(case, Path(name))
        found = [broken(sound, mutation, Path(name) / str(number)) for number, mutation in enumerate(mutations)]
        found += [damaged(sound, damage, Path(name) / damage.name) for damage in damages]
        return [outcome for outcomes in found for outcome in outcomes], sound.report.findings


def table(outcomes: list[Outcome]) -> str:
    """Mutation × outcome, in numbers of weights; then what was unnoticed."""
    lines = [f"{'mutation':<28}" + "".join(f"{told:>11}" for told in OUTCOMES) + f"{'formats':>9}"]
    for name in (*(one.name for one in (*MUTATIONS, *DAMAGES)), *(f"{CAST}{damage}" for damage in casting.DAMAGES)):
        found = [o for o in outcomes if o.mutation == name]
        counts = Counter(o.outcome for o in found)
        formats = len({o.format for o in found})
        lines.append(f"{name:<28}" + "".join(f"{counts[told]:>11}" for told in OUTCOMES) + f"{formats:>9}")
    counts = Counter(o.outcome for o in outcomes)
    lines.append(f"{'all':<28}" + "".join(f"{counts[told]:>11}" for told in OUTCOMES))
    return "\n".join(lines)


def main() -> int:
    """Run all, or the formats named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("formats", nargs="*")
    parser.add_argument("-v", "--verbose", action="store_true", help="list what was given by its number alone")
    asked = parser.parse_args()
    started = time.monotonic()
    chosen = [case for case in cases() if not asked.formats or case.parent.name in asked.formats]
    outcomes, alarms = [], []
    one_thread = partial(torch.set_num_threads, 1)  # for very small tensors; there are several processes
    with ProcessPoolExecutor(mp_context=get_context("spawn"), initializer=one_thread) as pool:
        of_files = zip(map(named, chosen), pool.map(judged, chosen), strict=True)
        dtypes = casting.PAIRS if not asked.formats or "dense" in asked.formats else []
        of_casts = zip(map(" to ".join, dtypes), pool.map(recast, dtypes), strict=True)
        for case, (found, findings) in chain(of_files, of_casts):
            outcomes += found
            told = [
                finding for finding in findings if finding.severity != "info" and finding.code != "ambiguous_layout"
            ]
            alarms += [f"{case}: {finding.severity}: {finding.message}" for finding in told]
    print(table(outcomes))
    for o in outcomes:
        if o.outcome == "UNNOTICED" or (asked.verbose and o.outcome in ("number", "slight")):
            print(f"{o.outcome}: {o.mutation}: {o.case} {o.weight}: {o.sound_db:.1f} dB, broken {o.broken_db:.1f} dB")
    false = [alarm for alarm in alarms if ": error: " in alarm]
    print("\n".join(f"told of a sound file: {alarm}" for alarm in alarms))
    print(f"{len(chosen) + len(dtypes)} valid files, {len(false)} false alarms")
    print(f"{time.monotonic() - started:.0f} s")
    return int(bool(false) or any(o.outcome == "UNNOTICED" for o in outcomes))


if __name__ == "__main__":
    sys.exit(main())
