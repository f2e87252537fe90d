"""Calls of a model's forward that were recorded: what ``--inputs`` reads, and how far outputs are apart.

    CALL/ARGUMENT      a tensor of a call, such as 0007/hidden_states
    quanterr.inputs    in the metadata, JSON: {"version": 1, "class": the model's, "calls": {CALL: {"group": …,
                       "step": …, "arguments": {…}}}}; a group is a prompt and a seed, arguments are no tensors

Both sides get the same calls (teacher forcing). The error of a call is ‖y - x‖² / ‖x‖² of its output.
"""

import hashlib
import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import log10, sqrt
from statistics import stdev
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from quanterr.errors import CheckpointError, UsageError
from quanterr.report.evaluation.model import Outputs, StepError
from quanterr.util import strict_json
from quanterr.util.strict_json import JsonObject, as_object
from quanterr.util.text import display, listed

KEY = "quanterr.inputs"
RETURNED = ("sample", "last_hidden_state", "logits")  # what holds the output of a model


class Call(NamedTuple):
    """A call: its name, what it belongs to, its step, its arguments."""

    name: str
    group: str
    step: int | None
    arguments: dict[str, object]


@dataclass(frozen=True)
class Calls:
    """Recorded calls, in order."""

    source: str
    sha256: str
    model: str | None  # class that they are for
    calls: Sequence[Call]

    def check(self, model: nn.Module) -> None:
        """Refuse calls of another model.

        Raises:
            UsageError: another class, an argument that is missing or that its forward does not have.
        """
        name = type(model).__name__
        if self.model not in (None, name):
            raise UsageError(f"--inputs {display(self.source)}: calls of {display(self.model or '')}, not of {name}")
        known = inspect.signature(model.forward).parameters
        needed = {
            key for key, one in known.items() if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD
        }
        for call in self.calls:
            where = f"--inputs {display(self.source)}: call {display(call.name)}"
            if missing := sorted(needed - call.arguments.keys()):
                raise UsageError(f"{where} lacks {listed(missing)}, which {name} needs")
            if extra := sorted(call.arguments.keys() - known.keys()):
                raise UsageError(f"{where} has {listed(extra)}, which {name} does not take")


def read_calls(path: str) -> Calls:
    """Recorded calls.

    Raises:
        UsageError: no such file, no safetensors file, names that are not CALL/ARGUMENT, metadata that are not JSON.
    """
    where = f"--inputs {display(path)}"
    tensors: dict[str, dict[str, object]] = {}
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            for key in file.keys():  # noqa: SIM118 - it is no mapping
                call, slash, argument = key.rpartition("/")
                if not slash or not call:
                    raise UsageError(f"{where}: {display(key)}: tensors are called CALL/ARGUMENT")
                tensors.setdefault(call, {})[argument] = file.get_tensor(key)
        with open(path, "rb") as raw:
            digest = hashlib.file_digest(raw, "sha256").hexdigest()
    except (OSError, SafetensorError) as error:
        raise UsageError(f"{where}: {display(str(error), 200)}") from error
    said = _said(metadata, where)
    by_name = as_object(said.get("calls")) or said
    if not tensors:
        raise UsageError(f"{where}: no call is in it")
    calls = [_call(name, found, as_object(by_name.get(name))) for name, found in sorted(tensors.items())]
    model = said.get("class")
    return Calls(path, digest, model if isinstance(model, str) else None, calls)


def _said(metadata: Mapping[str, str], where: str) -> JsonObject:
    if KEY not in metadata:
        return {}
    try:
        return as_object(strict_json.loads(metadata[KEY].encode()))
    except ValueError as error:
        raise UsageError(f"{where}: {KEY} in its metadata: {display(str(error), 200)}") from error


def _call(name: str, tensors: dict[str, object], said: JsonObject) -> Call:
    step, group = said.get("step"), said.get("group", name)
    plain = {key: _plain(value) for key, value in as_object(said.get("arguments")).items()}
    return Call(
        name,
        group if isinstance(group, str) else json.dumps(group, sort_keys=True),
        step if isinstance(step, int) else None,
        plain | tensors,
    )


def _plain(value: object) -> object:
    """Lists of lists as models have them: tuples innermost, as img_shapes are."""
    if isinstance(value, list) and value and not isinstance(value[0], list):
        return tuple(value)
    return [_plain(each) for each in value] if isinstance(value, list) else value


def output_of(returned: Any) -> Tensor:
    """The output of a model among what it returns."""
    if isinstance(returned, Tensor):
        return returned
    for name in RETURNED:
        found = getattr(returned, name, None)
        if isinstance(found, Tensor):
            return found
    first: Tensor = returned[0]
    return first


class Measured(NamedTuple):
    """What came of a call."""

    name: str
    group: str
    step: int | None
    error: float
    cosine: float


@dataclass
class OutputMeasures:
    """Errors of the outputs of calls, by their numbers."""

    calls: dict[int, Measured] = field(default_factory=dict)

    def add(self, number: int, call: Call, x: Tensor, y: Tensor) -> bool:
        """What both models gave; whether it is finite.

        Raises:
            CheckpointError: the original gave zeros, and the other did not.
        """
        x, y = x.double().flatten(), y.double().flatten()
        signal, other = float(x.square().sum()), float(y.square().sum())
        error = float((y - x).square().sum())
        if error and not signal:
            where = f"call {display(call.name)}"
            raise CheckpointError(f"{where}: the original's output is zero, beside which no error is known")
        relative = error / signal if signal else 0.0
        cosine = float(x @ y) / sqrt(signal * other) if signal and other else 0.0
        self.calls[number] = Measured(call.name, call.group, call.step, relative, cosine)
        return bool(torch.isfinite(y).all())

    def result(self) -> Outputs:
        """Means over calls, the worst one, by step; standard errors over groups."""
        rows = [self.calls[number] for number in sorted(self.calls)]
        mean = sum(row.error for row in rows) / len(rows)
        worst = max(rows, key=lambda row: row.error)
        by_group: dict[str, list[float]] = {}
        by_step: dict[int, list[float]] = {}
        for row in rows:
            by_group.setdefault(row.group, []).append(row.error)
            if row.step is not None:
                by_step.setdefault(row.step, []).append(row.error)
        means = [sum(group) / len(group) for group in by_group.values()]
        return Outputs(
            output_error=mean,
            output_error_se=_standard_error(means),
            output_snr_db=-10 * log10(mean) if mean > 0 else None,
            output_cosine=sum(row.cosine for row in rows) / len(rows),
            output_error_worst=worst.error,
            worst_call=worst.name,
            calls=len(rows),
            groups=len(by_group),
            steps=[StepError(step, sum(found) / len(found), len(found)) for step, found in sorted(by_step.items())],
        )


def _standard_error(means: Sequence[float]) -> float | None:
    """Of the mean over groups, which are what is drawn at random; None of one alone."""
    return stdev(means) / sqrt(len(means)) if len(means) > 1 else None
