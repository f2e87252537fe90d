"""Record the calls of a denoiser in a diffusers pipeline, for quanterr evaluate --inputs.

    with Recorder(pipe.transformer) as recorder:      # or pipe.unet
        for seed in (1, 2):
            with recorder.group(f"a fox, {seed}"):
                pipe("a fox", generator=torch.Generator().manual_seed(seed))
    recorder.save("calls.safetensors")

With ``scheduler=pipe.scheduler`` a call has the sigma of its step, which ``quanterr evaluate --rollout`` needs; with
``guidance_scale=4.0`` the two calls of a step are the branches of guidance, as the pipelines of Wan and Qwen-Image make
them: the conditional one first.

Each call takes several megabytes, and few evaluations need every step: ``every=4`` keeps every fourth.
"""

import inspect
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from safetensors.torch import save_file


class Recorder:
    """Recorder of the arguments of a model's forward calls.

    A group holds the calls of one random draw: one prompt and seed.
    """

    def __init__(
        self, model: torch.nn.Module, every: int = 1, scheduler: Any = None, guidance_scale: float | None = None
    ) -> None:
        """Prepare to record every ``every``-th step of ``model``."""
        self._model, self._every, self._names = model, every, list(inspect.signature(model.forward).parameters)
        self._scheduler, self._scale = scheduler, guidance_scale
        self._tensors: dict[str, torch.Tensor] = {}
        self._calls: dict[str, dict[str, Any]] = {}
        self._group, self._n_calls = "all", 0

    def __enter__(self) -> Self:
        self._hook = self._model.register_forward_pre_hook(self._record, with_kwargs=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.remove()

    @contextmanager
    def group(self, name: str) -> Iterator[None]:
        """Assign the calls in this context to the group ``name``."""
        self._group, self._n_calls = name, 0
        yield

    def _record(self, _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        step, place = divmod(self._n_calls, 1 if self._scale is None else 2)
        self._n_calls += 1
        if step % self._every:
            return
        given = dict(zip(self._names, args, strict=False)) | kwargs
        call = f"{len(self._calls):04}"
        flat = {name: value for key, argument in given.items() for name, value in _items(key, argument)}
        plain = {key: value for key, value in flat.items() if not isinstance(value, torch.Tensor) and value is not None}
        self._calls[call] = {"group": self._group, "step": step, "arguments": plain}
        if self._scale is not None:
            branch = "unconditional" if place else "conditional"
            self._calls[call] |= {"branch": branch, "guidance_scale": self._scale}
        if self._scheduler is not None:
            self._calls[call]["sigma"] = float(self._scheduler.sigmas[step])
        for key, value in flat.items():
            if isinstance(value, torch.Tensor):
                self._tensors[f"{call}/{key}"] = value.detach().cpu().clone().contiguous()

    def save(self, path: str) -> None:
        """Write the recorded calls to a safetensors file."""
        description = {"version": 1, "class": type(self._model).__name__, "calls": self._calls}
        save_file(self._tensors, path, {"quanterr.inputs": json.dumps(description)})


def _items(name: str, argument: Any) -> list[tuple[str, Any]]:
    """An argument by its name; items of dictionaries and lists that hold tensors as NAME.KEY and NAME.0."""
    if isinstance(argument, dict):
        return [(f"{name}.{key}", value) for key, value in argument.items()]
    if isinstance(argument, list) and any(isinstance(value, torch.Tensor) for value in argument):
        return [(f"{name}.{number}", value) for number, value in enumerate(argument)]
    return [(name, argument)]
