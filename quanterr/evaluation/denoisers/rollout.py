"""Rollouts of flow matching: each side takes Euler steps from the same noise, each with its own outputs.

    x ← x + (σ' - σ) · v(x, σ),   v = v_u + s · (v_c - v_u) if a step has both branches of guidance with scale s

σ belongs to a recorded step, σ' to the next one; after the last step, σ' is 0. In each step, the original and every
candidate read their weights once for all groups. Conditionings come from the calls; each side has its own latents.

Source: huggingface/diffusers, src/diffusers/schedulers/scheduling_flow_match_euler_discrete.py, step.
"""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from math import log10, sqrt
from threading import Event
from typing import NamedTuple

import torch
from torch import Tensor

from quanterr.documents.evaluation.model import Rollout, StepError
from quanterr.errors import Interrupted, UsageError
from quanterr.evaluation.denoisers.calls import Call, Calls, output_of, standard_error
from quanterr.evaluation.models.building import Architecture, Denoiser
from quanterr.evaluation.models.weights import Candidate, OriginalWeights
from quanterr.evaluation.running.batches import batches_of_calls
from quanterr.evaluation.running.model_run import ModelRun, take_turns
from quanterr.evaluation.running.rounding import Rounding
from quanterr.evaluation.running.stream import open_stream
from quanterr.util.text import display

LATENTS = ("hidden_states", "sample", "x")  # arguments that may hold latents
CONDITIONAL, UNCONDITIONAL = "conditional", "unconditional"
# Models whose output is minus the velocity (diffusers, pipelines/z_image/pipeline_z_image.py,
# pipelines/lumina2/pipeline_lumina2.py: noise_pred = -noise_pred).
NEGATED = frozenset({"ZImageTransformer2DModel", "Lumina2Transformer2DModel"})
PREDICT_NOISE = frozenset({"UNet2DConditionModel", "PixArtTransformer2DModel"})  # without flow matching: no rollouts

OnProgress = Callable[[int, int, int, int], None]


class Step(NamedTuple):
    """A step of a group: its σ, that of the next step, and its calls, of which the conditional one is first."""

    number: int
    sigma: float
    next_sigma: float
    calls: tuple[Call, ...]
    scale: float  # guidance scale


@dataclass
class _Follower:
    """One side during a rollout, with the current latents of each group."""

    originals: OriginalWeights
    stored: Sequence[str]
    get: Callable[[str], Tensor]
    rounding: Rounding | None
    latents: list[list[Tensor]]


def roll_out(
    architecture: Architecture | Denoiser,
    originals: OriginalWeights,
    candidates: Sequence[Candidate],
    calls: Calls,
    stop: Event,
    on_progress: OnProgress | None,
) -> list[Rollout]:
    """Take the steps of the original and of each candidate, and compare the latents after each step.

    Raises:
        UsageError: :func:`check_rollout` refuses the calls, or an output is not a velocity of the latents.
        Interrupted: ``stop`` was set.
    """
    groups = steps_of(calls)
    starts = [_find_latents(steps[0].calls[0])[1] for steps in groups]
    dtype, device = architecture.dtype, architecture.device
    followers = [
        _Follower(
            side_originals, stored, get, rounding, [[part.to(device, dtype) for part in start] for start in starts]
        )
        for side_originals, stored, get, rounding in (
            (originals, list(originals.weights), originals.get, None),
            *((each.originals, each.names, each.get, each.rounding) for each in candidates),
        )
    ]
    passes = max(len(steps) for steps in groups)
    errors: list[list[list[float]]] = [[[] for _ in range(passes)] for _ in candidates]
    for n in range(passes):
        going = [place for place, steps in enumerate(groups) if n < len(steps)]
        for k, follower in enumerate(followers):
            _advance(architecture, follower, {place: groups[place][n] for place in going}, stop)
            if on_progress is not None:
                on_progress(n, passes, k + 1, len(followers))
        for side_originals, candidate in zip(errors, followers[1:], strict=True):
            side_originals[n] = [
                _measure_error(followers[0].latents[place], candidate.latents[place]) for place in going
            ]
    steps = max(groups, key=len)
    return [
        _summarize(followers[0].latents, candidate.latents, side_originals, steps)
        for side_originals, candidate in zip(errors, followers[1:], strict=True)
    ]


def check_rollout(architecture: Architecture | Denoiser, calls: Calls) -> None:
    """Check, before anything runs, that a rollout of a model is possible with these calls.

    Raises:
        UsageError: the model does not use flow matching, or a call lacks σ or its branch.
    """
    name = architecture.config.get("_class_name") if isinstance(architecture, Denoiser) else None
    if name is None or name in PREDICT_NOISE:
        raise UsageError("--rollout: works only with denoisers of flow matching, such as FLUX, SD3, Wan, Qwen-Image")
    steps_of(calls)


def steps_of(calls: Calls) -> list[list[Step]]:
    """Sort the calls into the steps of each group, in the order of the groups.

    Raises:
        UsageError: a call has no σ, σ does not decrease, or two calls of a step are not the two branches of guidance.
    """
    where = f"--rollout: {display(calls.source)}"
    by_group: dict[str, dict[int, list[Call]]] = {}
    for call in calls.calls:
        if call.step is None or call.sigma is None:
            raise UsageError(
                f"{where}: call {display(call.name)} has no step and sigma in the metadata; "
                "examples/capture_inputs.py writes them where it is given the scheduler"
            )
        by_group.setdefault(call.group, {}).setdefault(call.step, []).append(call)
    groups = []
    for group, by_step in by_group.items():
        ordered = [
            _order_branches(by_step[step], f"{where}: group {display(group)}, step {step}") for step in sorted(by_step)
        ]
        sigmas = [calls_of_step[0].sigma or 0.0 for calls_of_step in ordered]
        if any(later >= earlier for earlier, later in pairwise(sigmas)) or sigmas[-1] <= 0:
            raise UsageError(
                f"{where}: group {display(group)}: sigma does not fall from step to step towards 0: {sigmas}"
            )
        groups.append(
            [
                Step(number, sigma, following, calls_of_step, calls_of_step[0].guidance_scale or 1.0)
                for number, sigma, following, calls_of_step in zip(
                    sorted(by_step), sigmas, [*sigmas[1:], 0.0], ordered, strict=True
                )
            ]
        )
    return groups


def _order_branches(calls: list[Call], where: str) -> tuple[Call, ...]:
    """Return the only call of a step, or its conditional call and its unconditional one.

    Raises:
        UsageError: there are other calls, or two branches without a guidance scale.
    """
    if len(calls) == 1:
        return (calls[0],)
    by_branch = {call.branch: call for call in calls}
    if len(calls) == 2 and by_branch.keys() == {CONDITIONAL, UNCONDITIONAL}:
        if by_branch[CONDITIONAL].guidance_scale is None:
            raise UsageError(f"{where}: two branches without a guidance_scale in the metadata")
        return by_branch[CONDITIONAL], by_branch[UNCONDITIONAL]
    raise UsageError(
        f'{where}: {len(calls)} calls; a step has one, or two whose "branch" is "conditional" and "unconditional"'
    )


def _find_latents(call: Call) -> tuple[str, list[Tensor]]:
    """Return the name of the argument that holds the latents, and the latents: a tensor, or a list of tensors.

    Raises:
        UsageError: the call has no such argument.
    """
    for name in LATENTS:
        latents = call.arguments.get(name)
        if isinstance(latents, Tensor):
            return name, [latents]
        if isinstance(latents, list) and latents and all(isinstance(part, Tensor) for part in latents):
            return name, latents
    raise UsageError(f"--rollout: call {display(call.name)} has no latents (one of {', '.join(LATENTS)})")


def _advance(architecture: Architecture | Denoiser, follower: _Follower, steps: dict[int, Step], stop: Event) -> None:
    """Change the latents of each group by one step, with the weights of one side."""
    calls = [
        (place, call._replace(arguments=_replace_latents(call, follower.latents[place])))
        for place, step in steps.items()
        for call in step.calls
    ]
    outputs: dict[int, list[Tensor]] = {}
    for (place, call), output in zip(
        calls, _run_calls(architecture, follower, [call for _, call in calls], stop), strict=True
    ):
        outputs.setdefault(place, []).append(_find_velocity(architecture, call, follower.latents[place], output))
    for place, step in steps.items():
        conditional, unconditional = outputs[place][0], outputs[place][-1]
        velocity = unconditional + step.scale * (conditional - unconditional) if len(step.calls) == 2 else conditional
        parts = torch.split(velocity, [part.numel() for part in follower.latents[place]])
        follower.latents[place] = [
            part + (step.next_sigma - step.sigma) * each.view(part.shape)
            for part, each in zip(follower.latents[place], parts, strict=True)
        ]


def _replace_latents(call: Call, latents: list[Tensor]) -> dict[str, object]:
    name, recorded = _find_latents(call)
    if [part.shape for part in recorded] != [part.shape for part in latents]:
        raise UsageError(
            f"--rollout: call {display(call.name)}: its latents have another shape than those of its group"
        )
    return call.arguments | {name: latents if isinstance(call.arguments[name], list) else latents[0]}


def _find_velocity(architecture: Architecture | Denoiser, call: Call, latents: list[Tensor], output: Tensor) -> Tensor:
    """Return the velocity of the latents (n,), in the order of their elements.

    Raises:
        UsageError: the shapes of output and latents differ, as they do if the latents come with an image.
    """
    is_tensor = len(latents) == 1 and output.dim() > 1
    if output.numel() != sum(part.numel() for part in latents) or (is_tensor and output.shape != latents[0].shape):
        shapes = [list(part.shape) for part in latents]
        raise UsageError(
            f"--rollout: call {display(call.name)}: the output {list(output.shape)} is not a velocity of latents "
            f"{shapes}; models that get an image together with the latents cannot be rolled out"
        )
    name = architecture.config.get("_class_name") if isinstance(architecture, Denoiser) else ""
    return -output.flatten() if name in NEGATED else output.flatten()


def _run_calls(
    architecture: Architecture | Denoiser, follower: _Follower, calls: list[Call], stop: Event
) -> list[Tensor]:
    """Run calls through one side's model, a unit at a time; return its outputs."""
    batches = dict(enumerate(batches_of_calls(calls)))
    side = ModelRun(
        open_stream(architecture, follower.originals, follower.stored, follower.get, batches), follower.rounding
    )
    outputs: dict[int, Tensor] = {}
    with closing(side):
        for place in take_turns(side.stream, side.load, side.free):
            if stop.is_set():
                raise Interrupted("interrupted during the rollout")
            result = side.run(place)
            if result is not None:
                outputs[place] = output_of(result)
    return [outputs[place] for place in batches]


def _measure_error(x: list[Tensor], y: list[Tensor]) -> float:
    """Return ‖y - x‖² / ‖x‖²."""
    signal = sum(float(part.double().square().sum()) for part in x)
    noise = sum(float((b.double() - a.double()).square().sum()) for a, b in zip(x, y, strict=True))
    return noise / signal if signal else 0.0


def _measure_cosine(x: list[Tensor], y: list[Tensor]) -> float:
    a, b = (torch.cat([part.double().flatten() for part in each]) for each in (x, y))
    norms = sqrt(float(a @ a) * float(b @ b))
    return float(a @ b) / norms if norms else 0.0


def _summarize(
    x: list[list[Tensor]], y: list[list[Tensor]], errors: list[list[float]], steps: Sequence[Step]
) -> Rollout:
    """Return means over groups: the errors of the final latents, and the error after each step."""
    final = [_measure_error(a, b) for a, b in zip(x, y, strict=True)]
    finite = all(torch.isfinite(part).all() for parts in y for part in parts)
    mean_squares = [
        _measure_error(a, b) * sum(float(part.double().square().sum()) for part in a) / sum(part.numel() for part in a)
        for a, b in zip(x, y, strict=True)
    ]
    ratios = []
    for latents, square in zip(x, mean_squares, strict=True):
        if square > 0:  # the peak of the PSNR is the range of the original's latents
            flat = torch.cat([part.double().flatten() for part in latents])
            ratios.append(float(flat.max() - flat.min()) ** 2 / square)
    psnr = sum(10 * log10(ratio) for ratio in ratios) / len(ratios) if len(ratios) == len(x) and finite else None
    mean = sum(final) / len(final)
    return Rollout(
        rollout_error=mean if finite else None,
        rollout_error_se=standard_error(final) if finite else None,
        rollout_psnr_db=psnr,
        rollout_cosine=sum(_measure_cosine(a, b) for a, b in zip(x, y, strict=True)) / len(x) if finite else None,
        groups=len(x),
        steps=[
            StepError(step.number, sum(step_errors) / len(step_errors) if finite else None, len(step_errors))
            for step, step_errors in zip(steps, errors, strict=True)
        ],
    )
