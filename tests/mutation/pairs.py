"""A sound checkpoint and its damaged copies, which are made next to it, compared, judged and deleted."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import quanterr
from mutation import files
from mutation.coding import Coded, Layout, code, sound
from mutation.judging import BAD, STRUCTURAL, Loss, Outcome, judge_broken, of_sound
from mutation.originals import CONFIG, Tensors, linear, make_stacks, model
from quanterr.documents.comparison.model import Report
from quanterr.errors import QuanterrError

FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
Quantize = Callable[[Layout, Tensor], Coded | Tensor]


class Bench:
    """A folder where pairs are made; wrongly judged pairs are kept in ``keep``."""

    def __init__(self, folder: Path, keep: Path | None = None) -> None:
        self.folder, self.keep, self._n = folder, keep, 0

    def place(self, suffix: str = "") -> Path:
        """Return a new path."""
        self._n += 1
        return self.folder / f"{self._n}{suffix}"

    def done(self, outcome: Outcome, original: Path, quantized: Path) -> Outcome:
        """Return an outcome; keep its files if it is a bad one."""
        if self.keep and outcome.told in BAD:
            kept_folder = self.keep / f"{outcome.family} {outcome.name}".replace("/", "over").replace(" ", "_")
            files.remove([kept_folder])
            kept_folder.mkdir(parents=True)
            for path, name in ((original, "original"), (quantized, "quantized")):
                target = kept_folder / (name + path.suffix)
                shutil.copytree(path, target) if path.is_dir() else shutil.copy(path, target)
            (kept_folder / "told.txt").write_text(f"{outcome}\n")
        return outcome


class Case(NamedTuple):
    """One change of a sound checkpoint."""

    name: str
    changed: Mapping[str, Coded | Tensor]
    cost: Loss = STRUCTURAL
    config: Mapping[str, Any] = {}  # entries of config.json, or of a GGUF file's metadata
    more: Mapping[str, bytes] = {}  # other files of the folder, by name
    names: tuple[str, ...] = ()  # layers with findings, if these are not the changed layers
    sound: bool = False  # the change does no harm
    why_silent: str = ""  # the reason why quanterr reports nothing by design


@dataclass
class Sound:
    """A sound pair, written and compared."""

    bench: Bench
    layout: Layout
    original: Path
    config: Mapping[str, Any]
    x: Tensors
    weights: dict[str, Coded | Tensor]
    excuse: str = ""  # what a method left that findings excuse
    path: Path = field(init=False)
    report: Report = field(init=False)

    def __post_init__(self) -> None:
        self.path = self.write(Case("sound", self.weights))
        self.report = quanterr.compare(self.original, self.path, device="cpu")

    def write(self, case: Case, beside: Path | None = None) -> Path:
        """Write a checkpoint, which shares its other weights with ``beside``."""
        if self.layout.family == "GGUF":
            all_weights = {**self.weights, **case.changed}
            plain = {name: w if isinstance(w, Coded) else w.float() for name, w in all_weights.items()}
            return files.write_gguf(self.bench.place(".gguf"), plain, {**self.config, **case.config})
        said = dict(self.config) | ({"quantization_config": self.layout.config} if self.layout.config else {})
        if self.layout.family == "MLX":
            said["quantization"] = self.layout.config
        config = {key: value for key, value in {**said, **case.config}.items() if value is not None}
        path = files.write(self.bench.place(), case.changed, config, beside)
        for name, content in case.more.items():
            (path / name).write_bytes(content)
        return path

    def outcome(self, family: str, case: Case) -> Outcome:
        """Return what is reported of a case."""
        path = self.write(case, self.path if self.path.is_dir() else None)
        outcome = self._judge(family, case, path)._replace(excuse=self.excuse)
        if case.why_silent and outcome.told in ("SILENT", "info"):
            outcome = outcome._replace(told="by design", note=case.why_silent)
        self.bench.done(outcome, self.original, path)
        files.remove([path])
        return outcome

    def _judge(self, family: str, case: Case, path: Path) -> Outcome:
        name = f"{self.layout.name}, {case.name}"
        try:
            report = quanterr.compare(self.original, path, device="cpu")
        except Exception as error:
            return not_compared(family, name, None if case.sound else case.cost, error)
        if case.sound:
            return of_sound(family, name, report)
        return judge_broken(family, name, report, self.report, case.names or tuple(case.changed), case.cost)


def not_compared(family: str, name: str, cost: Loss | None, error: Exception) -> Outcome:
    """Return the outcome of a pair that is refused or breaks a comparison; ``cost`` is None for a sound pair."""
    label = "ERROR" if cost is None else "noticed" if isinstance(error, QuanterrError) else "SILENT"
    return Outcome(family, name, label, cost, note=f"{type(error).__name__}: {error}"[:220])


def as_matrix(x: Tensor) -> Tensor:
    """Return experts one after the other, as a matrix."""
    return x.reshape(-1, x.shape[-1])


def quantize(layout: Layout, x: Tensors, by: Quantize = sound) -> dict[str, Coded | Tensor]:
    """Return a model in which all weights that quantizers quantize are codes."""
    stored_weights = {name: by(layout, as_matrix(weight)) if linear(name) else weight for name, weight in x.items()}
    for names in FUSED:
        _fuse(
            stored_weights,
            x,
            [name for name in stored_weights if name.split(".")[-2:-1] and name.split(".")[-2] in names],
        )
    return stored_weights


def _fuse(weights: dict[str, Coded | Tensor], x: Tensors, names: Sequence[str]) -> None:
    """Give the weights of a block that runtimes fuse one global scale, as programs do that have one."""
    blocks: dict[str, list[tuple[str, Coded]]] = {}
    for name in names:
        weight = weights[name]
        if isinstance(weight, Coded) and "global" in weight.stored.parts:
            blocks.setdefault(name.rsplit(".", 2)[0], []).append((name, weight))
    for block in blocks.values():
        largest = max(float(weight.stored.parts["global"]) for _, weight in block)
        for name, weight in block:
            shared = largest / float(weight.stored.parts["global"])
            weights[name] = code(weight.layout, as_matrix(x[name]), *weight.wanted, shared)


@cache
def _originals(experts: bool) -> Tensors:
    return make_stacks() if experts else model()


def originals_of(layout: Layout) -> Tensors:
    """Return the tensors to quantize."""
    return _originals(layout.family == "experts")


def make_pair(
    bench: Bench,
    layout: Layout,
    x: Tensors | None = None,
    by: Quantize = sound,
    dtype: torch.dtype | None = None,
    declared: Mapping[str, Any] = CONFIG,
    excuse: str = "",
) -> Sound:
    """Return the sound pair of a layout; ``dtype`` is that of unquantized tensors."""
    given = originals_of(layout) if x is None else x
    config = dict(declared) | ({"num_hidden_layers": 1} if layout.family == "experts" else {})
    original = files.write(bench.place(), given, config)
    weights = quantize(layout, given, by)
    if dtype:
        weights = {name: w if isinstance(w, Coded) else w.to(dtype) for name, w in weights.items()}
    return Sound(bench, layout, original, config, given, weights, excuse)


def sound_outcome(family: str, name: str, pair: Sound) -> Outcome:
    """Return what is reported of a sound pair, and delete the pair."""
    outcome = of_sound(family, f"{pair.layout.name}, {name}", pair.report)
    pair.bench.done(outcome, pair.original, pair.path)
    files.remove([pair.original, pair.path])
    return outcome
