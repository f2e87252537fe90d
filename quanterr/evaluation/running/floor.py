"""The floor of an evaluation: the error of the original in its stored dtype, compared with float32.

Runtimes compute in bfloat16 or float16. This rounding alone changes outputs, and a candidate whose error is no larger
cannot be distinguished from the original by the outputs of a runtime.

The rounding is nearly the same in all chunks, so the first two to four chunks of each text are enough; encoders read
all chunks, as they are small.

In denoisers, timesteps and scales of guidance stay exact: models of diffusers round them to 16 bits and then multiply
them by 1000 (3.5 becomes 3504), which changes the outputs of both sides alike and is not noise. ComfyUI computes them
in float32.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - its usual name
from torch.overrides import TorchFunctionMode

from quanterr.documents.evaluation.model import Floor
from quanterr.documents.evaluation.model import Scores as ReportedScores
from quanterr.errors import QuanterrError
from quanterr.evaluation.models.building import Architecture, Denoiser
from quanterr.evaluation.models.units import Unit
from quanterr.evaluation.models.weights import OriginalWeights
from quanterr.evaluation.running.batches import Batch
from quanterr.evaluation.running.candidate import Step
from quanterr.evaluation.running.model_run import MeasuredRun
from quanterr.evaluation.running.stream import open_stream
from quanterr.evaluation.running.workload import CALLS, ENCODER, Measures
from quanterr.util.text import display

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16}  # stored floats that runtimes compute in
HALF_DTYPES = frozenset(DTYPES.values())
REFERENCE_DTYPES = (torch.float32, torch.float64)
MIN_CHUNKS, MAX_CHUNKS = 2, 4  # minimum and maximum number of chunks to read of each text
MIN_TOKENS = 1024  # number of tokens of a text after which no further chunk is read


class _Products(TorchFunctionMode):
    """Computes linear layers in float32 and rounds once, as GPUs do; in 16 bits, a CPU would take 8 times as long."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: set[int] = set()  # addresses of weights
        self._converted: dict[tuple[int, ...], Tensor] = {}  # weights in float32, by their address, shape and strides

    def keep(self, unit: Unit) -> None:
        """Keep the weights of this unit in float32 after they are first used; forget those of other units."""
        self.forget()
        self._kept = {slot.tensor.data_ptr() for slot in unit.slots}

    def forget(self) -> None:
        """Keep no weights in float32."""
        self._kept, self._converted = set(), {}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        dtype = args[1].dtype if function is F.linear and len(args) > 1 else None
        if dtype not in HALF_DTYPES or args[0].device.type != "cpu":
            return function(*args, **(kwargs or {}))
        x, weight, *bias = args
        rest = [each if each is None else each.float() for each in bias]
        return function(x.float(), self._convert(weight), *rest, **(kwargs or {})).to(dtype)

    def _convert(self, weight: Tensor) -> Tensor:
        if weight.data_ptr() not in self._kept:  # a tensor that the model computes, whose memory may be used again
            return weight.float()
        key = weight.data_ptr(), *weight.shape, *weight.stride()
        if key not in self._converted:
            self._converted[key] = weight.float()
        return self._converted[key]


class _ExactScalars(TorchFunctionMode):
    """Keeps scalars and vectors in float32 where a model converts them to 16 bits, until they enter a product."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = (*args[1:], *(kwargs or {}).values())
        to_half = function is torch.Tensor.to and any(
            argument in HALF_DTYPES for argument in given if isinstance(argument, torch.dtype)
        )
        if to_half and args[0].dim() <= 1 and args[0].dtype is torch.float32:
            return args[0]
        if function is F.linear and args[0].dtype is torch.float32 and args[1].dtype in HALF_DTYPES:
            args = (args[0].to(args[1].dtype), *args[1:])
        return function(*args, **(kwargs or {}))


class FloorRun:
    """A run of the original in its stored dtype on some micro-batches; if it fails, only the floor is missing."""

    def __init__(
        self, architecture: Architecture | Denoiser, weights: OriginalWeights, batches: Mapping[int, Batch]
    ) -> None:
        """Start a forward for each micro-batch that the floor reads."""
        self.measures = Measures()
        self._batches = {place: batch for place, batch in batches.items() if _is_read(architecture, batch)}
        self._workload = architecture.workload
        self._side: MeasuredRun | None = None
        self._tensors: Mapping[str, Tensor] | None = None  # weights of a unit that is not loaded yet
        self._products = _Products()
        self.dtype, self.reason = _find_dtype(weights), ""
        if self.dtype is None:
            self.reason = "the original is not stored in a 16-bit float"
        elif architecture.dtype not in REFERENCE_DTYPES:
            self.reason = "both sides compute in 16 bits: --dtype float32 measures it"
        else:
            own_architecture = replace(architecture, dtype=self.dtype)
            with self._attempt():
                stream = open_stream(own_architecture, weights, weights.weights, weights.get, self._batches)
                self._side = MeasuredRun(stream, self._workload, self._batches)
                self.measures = self._side.measures

    def load(self, unit: Unit, tensors: Mapping[str, Tensor]) -> None:
        """Take the original's weights of a unit, which are loaded later, when the unit runs."""
        self._unit, self._tensors = unit, tensors

    def _load(self, batch: int) -> MeasuredRun | None:
        """Load the unit and return the run if a micro-batch waits for the unit; otherwise return None."""
        side = self._side
        if side is None or batch not in self._batches or not side.stream.waits(batch, self._unit):
            return None
        if self._tensors is not None:
            side.load(self._unit, self._tensors)
            self._products.keep(side.unit)
            self._tensors = None
        return side

    def follow(self, batch: int, step: Step) -> None:
        """Run the unit for a micro-batch if the original's forward has ended, as the result is compared."""
        if (base := step.result()) is not None:
            self._run(batch, base)

    def free(self) -> None:
        """Run the unit for all micro-batches that wait for it, and free it.

        All other sides have freed the unit before, so that the floor's weights reuse their memory.
        """
        for batch in self._batches:
            self._run(batch)
        if self._tensors is None and self._side is not None:
            self._side.free()
        self._tensors = None
        self._products.forget()

    def _run(self, batch: int, base: object = None) -> None:
        if side := self._load(batch):
            with self._attempt():
                result = side.run(batch)
                if base is not None and result is not None and not side.measure(batch, base, result):
                    self._end(f"the original's output is not finite in {_name_dtype(self.dtype)}")

    def begin(self, batch: int) -> bool:
        """Prepare the logits of some positions at a time; if that is not possible, only the floor is missing."""
        if side := self._load(batch):
            with self._attempt():
                if not side.begin(batch):
                    self._end("its logits are not what its head makes of its inputs")
        return True

    def follow_piece(self, batch: int, base: object, first: int, last: int) -> None:
        """Compute the logits of some positions, counted from the end, and measure them."""
        if self._side is not None and batch in self._batches:
            with self._attempt():
                if not self._side.measure_piece(batch, base, self._side.compute(first, last), first):
                    self._end(f"the original's output is not finite in {_name_dtype(self.dtype)}")

    def end(self, batch: int) -> None:
        """End the forward of a micro-batch whose positions were computed."""
        if self._side is not None and batch in self._batches:
            self._side.end(batch)

    @contextmanager
    def _attempt(self) -> Iterator[None]:
        """Set the modes in which the floor computes; an error within the context ends only the floor."""
        try:
            with self._products, _ExactScalars() if self._workload is CALLS else nullcontext():
                yield
        except QuanterrError as error:
            self._end(f"the original does not run in {_name_dtype(self.dtype)}: {display(str(error), 200)}")

    def _end(self, reason: str) -> None:
        self.close()
        self.reason, self.measures = reason, Measures()

    def close(self) -> None:
        """End all forwards."""
        side, self._side = self._side, None
        if side is not None:
            side.close()

    def merge(self, measures: Measures, reason: str) -> None:
        """Add the measurements of another process on its share of the micro-batches."""
        self.measures.merge(measures)
        self.reason = self.reason or reason

    def result(self) -> Floor:
        """Return the floor, or why there is none."""
        name = None if self.dtype is None else _name_dtype(self.dtype)
        measures = self.measures
        if not self.reason and measures.scores.columns:
            return Floor(name, None, None, ReportedScores(**measures.scores.result()), sorted(measures.scores.columns))
        if not self.reason and measures.outputs.calls:
            return Floor(name, measures.outputs.result(), None)
        if not self.reason and measures.embedded.chunks:
            return Floor(name, None, None, embeddings=measures.embedded.result())
        return Floor(name, None, self.reason or "nothing was completed")


def _is_read(architecture: Architecture | Denoiser, batch: Batch) -> bool:
    """Return whether the floor reads a micro-batch: every call, every chunk of an encoder, the first of each text."""
    if architecture.workload in (CALLS, ENCODER) or batch.in_text < MIN_CHUNKS:
        return True
    return batch.in_text < MAX_CHUNKS and batch.in_text * batch.raw.shape[1] < MIN_TOKENS


def _find_dtype(weights: OriginalWeights) -> torch.dtype | None:
    """Return the dtype of most of the original's bytes if it has 16 bits; otherwise None."""
    sizes = Counter[str]()
    for entry in weights.checkpoint.entries.values():
        sizes[entry.dtype] += entry.nbytes
    return DTYPES.get(sizes.most_common(1)[0][0]) if sizes else None


def _name_dtype(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")
