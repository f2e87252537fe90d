"""The floor of an evaluation: the original in the dtype that it is stored in, against float32.

Runtimes compute in bfloat16 or float16. This rounding alone changes outputs, and a candidate whose error is no larger
cannot be distinguished from the original by the outputs of a runtime.

The rounding is nearly the same everywhere, so that the first two to four chunks of each text are enough; encoders are
small, so they read all chunks.

In denoisers, timesteps and scales of guidance stay exact: models of diffusers round them to 16 bits and then multiply
them by 1000 (3.5 becomes 3504), which changes the outputs of both sides alike and is not noise. ComfyUI computes them
in float32.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, TypedDict

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - its usual name
from torch.overrides import TorchFunctionMode

from quanterr.documents.evaluation.model import Floor
from quanterr.documents.evaluation.model import Scores as ReportedScores
from quanterr.errors import QuanterrError
from quanterr.evaluation.models.building import Architecture, Denoiser
from quanterr.evaluation.models.sides import Sides
from quanterr.evaluation.models.units import Unit
from quanterr.evaluation.running.batches import Batch
from quanterr.evaluation.running.stepping import Stream
from quanterr.evaluation.running.tail import Pieces
from quanterr.evaluation.running.workload import CALLS, CAUSAL, ENCODER, FoundMeasures, Measures
from quanterr.util.text import display

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16}  # stored floats that runtimes compute in
HALVES = frozenset(DTYPES.values())
REFERENCES = (torch.float32, torch.float64)
FEWEST, MOST = 2, 4  # minimum and maximum number of chunks to read of each text
TOKENS = 1024  # number of a text's tokens after which no further chunk is read


class _Products(TorchFunctionMode):
    """Adds up the products of a linear layer in float32 and rounds once, as a GPU does: a CPU takes 8 times as long."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: set[int] = set()  # addresses of weights
        self._converted: dict[tuple[int, ...], Tensor] = {}  # weights in float32, by their address, shape and strides

    def keep(self, unit: Unit) -> None:
        """Keep the weights of this unit in float32 once they are used; forget all others."""
        self.forget()
        self._kept = {slot.tensor.data_ptr() for slot in unit.slots}

    def forget(self) -> None:
        """Keep no weights in float32."""
        self._kept, self._converted = set(), {}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        dtype = args[1].dtype if function is F.linear and len(args) > 1 else None
        if dtype not in HALVES or args[0].device.type != "cpu":
            return function(*args, **(kwargs or {}))
        x, weight, *bias = args
        rest = [each if each is None else each.float() for each in bias]
        return function(x.float(), self._convert(weight), *rest, **(kwargs or {})).to(dtype)

    def _convert(self, weight: Tensor) -> Tensor:
        if weight.data_ptr() not in self._kept:  # what the model computes from weights may reuse memory
            return weight.float()
        key = weight.data_ptr(), *weight.shape, *weight.stride()
        if key not in self._converted:
            self._converted[key] = weight.float()
        return self._converted[key]


class _ExactScalars(TorchFunctionMode):
    """Keeps scalars and vectors in float32 where a model converts them to 16 bits, until they enter a product."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = (*args[1:], *(kwargs or {}).values())
        to_half = function is torch.Tensor.to and any(one in HALVES for one in given if isinstance(one, torch.dtype))
        if to_half and args[0].dim() <= 1 and args[0].dtype is torch.float32:
            return args[0]
        if function is F.linear and args[0].dtype is torch.float32 and args[1].dtype in HALVES:
            args = (args[0].to(args[1].dtype), *args[1:])
        return function(*args, **(kwargs or {}))


class FoundFloor(TypedDict):
    """A floor in the form in which processes exchange it."""

    measures: FoundMeasures
    reason: str


class FloorRun:
    """A run of the original in its own dtype on some of the micro-batches; if it fails, only the floor is lost."""

    def __init__(self, architecture: Architecture | Denoiser, sides: Sides, batches: Sequence[Batch]) -> None:
        """Start a forward for each micro-batch that the floor reads."""
        self._measures = Measures()
        self._batches = {place: batch for place, batch in enumerate(batches) if _is_read(architecture, batch)}
        self._places = {place: n for n, place in enumerate(self._batches)}
        self._workload = architecture.workload
        self._stream: Stream | None = None
        self._inputs: Sequence[dict[str, object]] = []
        self._pieces: Pieces | None = None
        self._device = architecture.device
        self._loaded: str | None = None  # name of the loaded unit
        self._products = _Products()
        self.dtype, self.reason = _own_dtype(sides), ""
        if self.dtype is None:
            self.reason = "the original is not stored in a 16-bit float"
        elif architecture.dtype not in REFERENCES:
            self.reason = "both sides compute in 16 bits: --dtype float32 measures it"
        else:
            own = replace(architecture, dtype=self.dtype)
            self._attempt(lambda: self._start(own, sides))

    def _start(self, own: Architecture | Denoiser, sides: Sides) -> None:
        model = own.build()
        inputs = [own.workload.inputs(model, own.config, each.given, each.scored) for each in self._batches.values()]
        names = own.names(model, sides, sides.weights)
        self._stream = Stream(model, names, sides.get, inputs, own.device, recorded=own.workload is CALLS)
        self._inputs = inputs

    def load(self, unit: str, tensors: Mapping[str, Tensor]) -> None:
        """Load a unit with the original's weights, unless it is loaded."""
        if self._stream is not None and self._loaded != unit:
            self._stream.units[unit].load(tensors)
            self._products.keep(self._stream.units[unit])
            self._loaded = unit

    def free(self, unit: str) -> None:
        """Free a unit."""
        self._loaded = None
        self._products.forget()
        if self._stream is not None:
            self._stream.units[unit].free()

    def run(self, place: int, unit: str, base: object) -> None:
        """Run a unit for the micro-batch at a place; ``base`` is the original's result, where its forward has ended."""
        if place in self._batches:
            self._attempt(lambda: self._run(place, unit, base))

    def _run(self, place: int, unit: str, base: object) -> None:
        stream, own = self._stream, self._places[place]
        if stream is None or not stream.waits(own, stream.units[unit]):
            return
        stream.resume(own, stream.run(own))
        result = stream.result(own)
        if base is not None and result is not None:
            batch = self._batches[place]
            finite = self._workload.measure(base, result, batch.raw, batch.first, self._measures, batch.scored)
            if not finite:
                self._end(f"the original's output is not finite in {_name(self.dtype)}")

    def run_piece(self, place: int, unit: str, base: object, first: int, last: int) -> None:
        """Run the head, which is loaded, for some positions; ``base`` is the original's result for them."""
        if place in self._batches:
            self._attempt(lambda: self._run_piece(place, unit, base, first, last))

    def _run_piece(self, place: int, unit: str, base: Any, first: int, last: int) -> None:
        stream, own, batch = self._stream, self._places[place], self._batches[place]
        if stream is None:
            return
        if self._pieces is None:
            self._pieces = Pieces(stream, stream.units[unit], self._inputs, self._device)
        is_first = first == -CAUSAL.count_rows(batch.raw, batch.scored)
        if is_first and not self._pieces.begin(own):
            self._end("its logits are not what its head makes of its inputs")
            return
        result = self._pieces.compute(first, last)
        if not CAUSAL.measure_piece(base, result, first, batch.raw, batch.first, self._measures, batch.scored):
            self._end(f"the original's output is not finite in {_name(self.dtype)}")
        elif not last:
            self._pieces.end()

    def _attempt(self, action: Callable[[], object]) -> None:
        try:
            with self._products, _ExactScalars() if self._workload is CALLS else nullcontext():
                action()
        except QuanterrError as error:
            self._end(f"the original does not run in {_name(self.dtype)}: {display(str(error), 200)}")

    def _end(self, reason: str) -> None:
        self.close()
        self.reason, self._measures = reason, Measures()

    def close(self) -> None:
        """End all forwards."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()

    def found(self) -> FoundFloor:
        """Return the measurements in the form that :meth:`add` of another process takes."""
        return {"measures": self._measures.found(), "reason": self.reason}

    def add(self, found: FoundFloor) -> None:
        """Add what another process found for its share of the micro-batches."""
        self._measures.add(found["measures"])
        self.reason = self.reason or found["reason"]

    def result(self) -> Floor:
        """Return the floor, or why there is none."""
        name = None if self.dtype is None else _name(self.dtype)
        found = self._measures
        if not self.reason and found.scores.columns:
            return Floor(name, None, None, ReportedScores(**found.scores.result()), sorted(found.scores.columns))
        if not self.reason and found.outputs.calls:
            return Floor(name, found.outputs.result(), None)
        if not self.reason and found.embedded.chunks:
            return Floor(name, None, None, embeddings=found.embedded.result())
        return Floor(name, None, self.reason or "nothing was completed")


def _is_read(architecture: Architecture | Denoiser, batch: Batch) -> bool:
    """Return whether the floor reads a micro-batch: every call, every chunk of an encoder, the first of each text."""
    if architecture.workload in (CALLS, ENCODER) or batch.in_text < FEWEST:
        return True
    return batch.in_text < MOST and batch.in_text * batch.raw.shape[1] < TOKENS


def _own_dtype(sides: Sides) -> torch.dtype | None:
    """Return the 16-bit dtype that most of the original's bytes have; None if most have another dtype."""
    sizes = Counter[str]()
    for entry in sides.checkpoint.entries.values():
        sizes[entry.dtype] += entry.nbytes
    return DTYPES.get(sizes.most_common(1)[0][0]) if sizes else None


def _name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")
