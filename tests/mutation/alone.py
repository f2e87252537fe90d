"""Checkpoints that are inspected with their values, without an original: as quantized, and after damage that shows."""

from collections.abc import Callable, Iterator, Mapping

from torch import Tensor

import quanterr
from mutation import files
from mutation.both_sides import BROKEN as CONSTANTS
from mutation.both_sides import BROKEN_EXPERTS, MLP, SOUND_EXPERTS
from mutation.both_sides import SOUND as SPARED
from mutation.judging import Outcome, as_unsound, of_sound
from mutation.layouts import STACKS, find_layout
from mutation.originals import STACK, Tensors
from mutation.pairs import Bench, Case, Sound, make_pair, quantize

Change = Callable[[Tensors], Mapping[str, Tensor]]


def with_rows(weight: Tensor, rows: list[int], factor: float) -> Tensor:
    """Multiply rows of a weight by a factor."""
    changed = weight.clone()
    changed[rows] *= factor
    return changed


BROKEN: dict[str, Change] = CONSTANTS | {
    "rows zero": lambda x: {MLP[1]: with_rows(x[MLP[1]], [5, 77], 0.0)},
    "rows of another size": lambda x: {MLP[1]: with_rows(x[MLP[1]], [5, 77], 1e5)},
}
# Rows share a scale of integers: a row of small numbers becomes zero, so that zeros are an info.
SHARED = {f"{name}, rows zero" for name in ("INT8 tensor", "INT8 128 × 128")}
OF_EXPERTS = [*((label, change, False) for label, change in BROKEN_EXPERTS.items()),
              *((label, change, True) for label, change in SOUND_EXPERTS.items())]  # fmt: skip


def outcomes(bench: Bench, name: str) -> Iterator[Outcome]:
    """Change the original, quantize it soundly, and inspect the quantized file alone."""
    layout = find_layout(name)
    pair = make_pair(bench, layout)
    yield _inspect(pair, Case("as quantized", {}, sound=True))
    if layout in STACKS:
        for label, change, is_sound in OF_EXPERTS:
            coded = quantize(layout, {**pair.x, STACK: change(pair.x[STACK])})
            yield _inspect(pair, Case(label, {STACK: coded[STACK]}, sound=is_sound))
        return
    for changes, is_sound in ((BROKEN, False), (SPARED, True)):
        for label, change in changes.items():
            yield _inspect(pair, Case(label, quantize(layout, dict(change(pair.x))), sound=is_sound))


def _inspect(pair: Sound, case: Case) -> Outcome:
    path = pair.write(case, pair.path if pair.path.is_dir() else None)
    inspection, name = quanterr.inspect(path, values=True), f"{pair.layout.name}, {case.name}"
    outcome = of_sound("alone", name, inspection)
    if not case.sound:
        outcome = as_unsound(outcome)
    if name in SHARED:
        outcome = outcome._replace(told="by design", note="small rows become zero, too")
    pair.bench.done(outcome, pair.original, path)
    files.remove([path])
    return outcome
