"""Recorded calls of a model's forward, which ``--inputs`` reads, and the errors of the model's outputs for them.

    CALL/ARGUMENT      a tensor of a call, such as 0007/hidden_states
    CALL/ARGUMENT.KEY  an item of an argument that is a dictionary, such as 0007/added_cond_kwargs.time_ids
    CALL/ARGUMENT.0    an item of an argument that is a list
    quanterr.inputs    in the metadata, JSON: {"version": 1, "class": the model's, "calls": {CALL: {"group": …,
                       "step": …, "arguments": {…}}}}; a group is a prompt and a seed, "arguments" holds values that
                       are not tensors; rollouts also need "sigma", and with guidance "branch" and "guidance_scale"

Both sides get the same calls (teacher forcing). The error of a call is ‖y - x‖² / ‖x‖², of its outputs x and y.
"""

import hashlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import log10, sqrt
from statistics import stdev
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from quanterr.documents.evaluation.model import Outputs, StepError
from quanterr.errors import CheckpointError, UsageError
from quanterr.util import strict_json
from quanterr.util.strict_json import JsonObject, as_object
from quanterr.util.text import display, itemize

KEY = "quanterr.inputs"
OUTPUTS = ("sample", "last_hidden_state", "logits")  # fields of a model's result that may hold its output


class Call(NamedTuple):
    """One call of a forward."""

    name: str
    group: str
    step: int | None
    arguments: dict[str, object]
    sigma: float | None = None  # noise level of flow matching
    branch: str | None = None  # branch of guidance: conditional or unconditional
    guidance_scale: float | None = None


@dataclass(frozen=True)
class Calls:
    """Recorded calls, in order."""

    source: str
    sha256: str
    model: str | None  # the class of the model that was recorded
    calls: Sequence[Call]

    def spread(self, n: int) -> Sequence[Call]:
        """Return up to ``n`` calls, spread over the whole file because the steps of a group are next to each other."""
        return self.calls if n >= len(self.calls) else [self.calls[k * len(self.calls) // n] for k in range(n)]

    def check(self, model: nn.Module) -> None:
        """Check that the calls are for this model.

        Raises:
            UsageError: the calls are for another class, lack an argument, or have one that the forward does not take.
        """
        name = type(model).__name__
        if self.model not in (None, name):
            raise UsageError(f"--inputs {display(self.source)}: calls of {display(self.model or '')}, not of {name}")
        known = inspect.signature(model.forward).parameters
        needed = {
            key
            for key, parameter in known.items()
            if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        }
        for call in self.calls:
            where = f"--inputs {display(self.source)}: call {display(call.name)}"
            if missing := sorted(needed - call.arguments.keys()):
                raise UsageError(f"{where} lacks {itemize(missing)}, which {name} needs")
            if extra := sorted(call.arguments.keys() - known.keys()):
                raise UsageError(f"{where} has {itemize(extra)}, which {name} does not take")


def read_calls(path: str) -> Calls:
    """Read recorded calls.

    Raises:
        UsageError: the file is missing or not safetensors, a name is not CALL/ARGUMENT, or the metadata are not JSON.
    """
    where = f"--inputs {display(path)}"
    tensors: dict[str, dict[str, object]] = {}
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            for key in file.keys():  # noqa: SIM118 - not a mapping
                call, slash, argument = key.rpartition("/")
                if not slash or not call:
                    raise UsageError(f"{where}: {display(key)}: tensors are called CALL/ARGUMENT")
                tensors.setdefault(call, {})[argument] = file.get_tensor(key)
        with open(path, "rb") as raw:
            digest = hashlib.file_digest(raw, "sha256").hexdigest()
    except (OSError, SafetensorError) as error:
        raise UsageError(f"{where}: {display(str(error), 200)}") from error
    description = _read_description(metadata, where)
    by_name = as_object(description.get("calls")) or description
    if not tensors:
        raise UsageError(f"{where}: holds no call")
    calls = [
        _make_call(name, tensors_of_call, as_object(by_name.get(name)), where)
        for name, tensors_of_call in sorted(tensors.items())
    ]
    model = description.get("class")
    return Calls(path, digest, model if isinstance(model, str) else None, calls)


def _read_description(metadata: Mapping[str, str], where: str) -> JsonObject:
    """Return the description of the calls in the metadata.

    Raises:
        UsageError: the description is not JSON.
    """
    if KEY not in metadata:
        return {}
    try:
        return as_object(strict_json.loads(metadata[KEY].encode()))
    except ValueError as error:
        raise UsageError(f"{where}: {KEY} in its metadata: {display(str(error), 200)}") from error


def _make_call(name: str, tensors: dict[str, object], description: JsonObject, where: str) -> Call:
    step, group = description.get("step"), description.get("group", name)
    plain = {key: _convert_lists(value) for key, value in as_object(description.get("arguments")).items()}
    return Call(
        name,
        group if isinstance(group, str) else json.dumps(group, sort_keys=True),
        step if isinstance(step, int) else None,
        _nest(plain | tensors, f"{where}: call {display(name)}"),
        _as_number(description.get("sigma")),
        branch if isinstance(branch := description.get("branch"), str) else None,
        _as_number(description.get("guidance_scale")),
    )


def _as_number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _convert_lists(value: object) -> object:
    """Turn the innermost of nested lists into tuples, which models expect in arguments such as ``img_shapes``."""
    if isinstance(value, list) and value and not isinstance(value[0], list):
        return tuple(value)
    return [_convert_lists(each) for each in value] if isinstance(value, list) else value


def _nest(flat: Mapping[str, object], where: str) -> dict[str, object]:
    """Put ARGUMENT.KEY into dictionaries, and ARGUMENT.0, ARGUMENT.1, … into lists.

    Raises:
        UsageError: an argument is given twice, or a list has a gap.
    """
    nested: dict[str, object] = {}
    items: dict[str, dict[str, object]] = {}
    for key, value in flat.items():
        argument, dot, item = key.partition(".")
        if dot:
            items.setdefault(argument, {})[item] = value
        else:
            nested[argument] = value
    for argument, values in items.items():
        if argument in nested:
            raise UsageError(f"{where}: {display(argument)} is given both whole and in items")
        if all(item.isdecimal() for item in values):
            if values.keys() != {str(n) for n in range(len(values))}:
                raise UsageError(
                    f"{where}: items of {display(argument)} are not numbered from 0 on: {itemize(list(values))}"
                )
            nested[argument] = [values[str(n)] for n in range(len(values))]
        else:
            nested[argument] = values
    return nested


def map_tensors(value: object, change: Callable[[Tensor], Tensor]) -> object:
    """Return an argument with every tensor in it changed, also in dictionaries, lists and tuples."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: map_tensors(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([map_tensors(item, change) for item in value])
    return value


def output_of(returned: object) -> Tensor:
    """Return the output among everything that a model's forward returns; tensors of a list are joined end to end.

    Raises:
        UsageError: the forward returns no tensor.
    """
    named = (getattr(returned, name, None) for name in OUTPUTS)
    output = next((each for each in named if each is not None), returned)
    while isinstance(output, tuple | Mapping) and not isinstance(output, Tensor) and output:
        output = next(iter(output.values())) if isinstance(output, Mapping) else output[0]
    if isinstance(output, list) and output and all(isinstance(each, Tensor) for each in output):
        return torch.cat([each.flatten() for each in output])
    if not isinstance(output, Tensor):
        raise UsageError(f"--inputs: the model returns no tensor, but {type(output).__name__}")
    return output


class CallError(NamedTuple):
    """The error of one call's output."""

    name: str
    group: str
    step: int | None
    error: float
    cosine: float


@dataclass
class OutputMeasures:
    """The error of each call's output, by the number of the call."""

    calls: dict[int, CallError] = field(default_factory=dict)

    def add(self, number: int, call: Call, x: Tensor, y: Tensor) -> bool:
        """Add the outputs of the original (x) and of the candidate (y); return whether y is finite.

        Raises:
            CheckpointError: the original's output is zero and the other is not.
        """
        x, y = x.double().flatten(), y.double().flatten()
        signal, other = float(x.square().sum()), float(y.square().sum())
        error = float((y - x).square().sum())
        if error and not signal:
            where = f"call {display(call.name)}"
            raise CheckpointError(f"{where}: the original's output is zero, so that no relative error is defined")
        relative = error / signal if signal else 0.0
        cosine = float(x @ y) / sqrt(signal * other) if signal and other else 0.0
        self.calls[number] = CallError(call.name, call.group, call.step, relative, cosine)
        return bool(torch.isfinite(y).all())

    def result(self) -> Outputs:
        """Return means over calls, the worst call, and means by step; standard errors are over groups."""
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
            output_error_se=standard_error(means),
            output_snr_db=-10 * log10(mean) if mean > 0 else None,
            output_cosine=sum(row.cosine for row in rows) / len(rows),
            output_error_worst=worst.error,
            worst_call=worst.name,
            calls=len(rows),
            groups=len(by_group),
            steps=[StepError(step, sum(errors) / len(errors), len(errors)) for step, errors in sorted(by_step.items())],
        )


def standard_error(means: Sequence[float]) -> float | None:
    """Return the standard error of the mean over groups, which are drawn at random; None for a single group."""
    return stdev(means) / sqrt(len(means)) if len(means) > 1 else None
