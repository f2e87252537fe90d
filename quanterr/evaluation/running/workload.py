"""Kinds of models: how each is built, its inputs, and the outputs that are measured.

To add a kind, write a class with the members of :class:`Workload`, and return it from :func:`workload_of`.
"""

import inspect
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypedDict

import torch
from torch import Tensor, nn

from quanterr.evaluation.denoisers.calls import Call, CallError, OutputMeasures, map_tensors, output_of
from quanterr.evaluation.measures.embeddings import Embedded
from quanterr.evaluation.measures.scores import Scores
from quanterr.evaluation.measures.states import PlainErrors

if TYPE_CHECKING:
    from transformers import PretrainedConfig
    from transformers.utils import ModelOutput

Kind = Literal["causal", "sequence to sequence", "transcription", "encoder", "calls"]
Inputs = dict[str, object]  # arguments of a model's forward
POSITIONS = "_ids"  # end of names of positions, such as img_ids, which 16 bits would round


class WithMedia(NamedTuple):
    """A conversation with images or sounds: its token ids (1, tokens), and what the processor made of these."""

    ids: Tensor
    media: Mapping[str, object]


class FoundMeasures(TypedDict):
    """Measures in the form in which processes exchange them."""

    scores: dict[int, Tensor]
    embedded: tuple[dict[int, Tensor], dict[int, Tensor], PlainErrors]
    outputs: dict[int, tuple[Any, ...]]  # fields of CallError


@dataclass
class Measures:
    """The measures of a candidate's outputs against the original's."""

    scores: Scores = field(default_factory=Scores)
    embedded: Embedded = field(default_factory=Embedded)
    outputs: OutputMeasures = field(default_factory=OutputMeasures)

    def found(self) -> FoundMeasures:
        """Return the measurements in the form that :meth:`add` of another process takes."""
        embedded = self.embedded
        return {
            "scores": self.scores.columns,
            "embedded": (embedded.of_x, embedded.of_y, embedded.error.plain()),
            "outputs": {number: tuple(row) for number, row in self.outputs.calls.items()},
        }

    def add(self, found: FoundMeasures) -> None:
        """Add what was measured on other micro-batches."""
        self.scores.columns |= found["scores"]
        of_x, of_y, error = found["embedded"]
        self.embedded.of_x |= of_x
        self.embedded.of_y |= of_y
        self.embedded.error.add_plain(error)
        self.outputs.calls |= {number: CallError(*row) for number, row in found["outputs"].items()}


class Workload(Protocol):
    """A kind of model."""

    kind: Kind
    loader: str  # class of transformers that builds it from a config

    def inputs(self, model: nn.Module, config: object, chunks: Tensor, scored: Tensor | None = None) -> Inputs:
        """Return the arguments of the model for chunks of token ids (n, context); for ``scored``, see measure."""

    def measure(
        self, base: object, other: object, chunks: Tensor, first: int, to: Measures, scored: Tensor | None = None
    ) -> bool:
        """Add the outputs of both models for the chunks from number ``first`` on; return whether all are finite.

        ``scored``, (n, context) bool, marks the scored tokens; None: the second half.
        """


class Causal:
    """A causal model: predictions of the second half of each chunk are scored, as in llama.cpp's perplexity."""

    kind: Kind = "causal"

    def __init__(self, loader: str = "AutoModelForCausalLM") -> None:
        """Describe a model that continues a text; ``loader`` builds it."""
        self.loader = loader

    def inputs(self, model: nn.Module, config: object, chunks: Any, scored: Tensor | None = None) -> Inputs:
        """Return the chunks; a model that can leave out logits computes none before the first scored one."""
        given = chunks if isinstance(chunks, WithMedia) else WithMedia(chunks, {})
        rows = self.count_rows(given.ids, scored)
        kept = {"logits_to_keep": rows} if _takes(model, "logits_to_keep") else {}
        return inputs_of(model, given.ids) | _in_dtype_of(model, given.media) | kept

    def measure(
        self,
        base: "ModelOutput",
        other: "ModelOutput",
        chunks: Tensor,
        first: int,
        to: Measures,
        scored: Tensor | None = None,
    ) -> bool:
        """Score the tokens that ``scored`` marks, or all but the first token of the second half."""
        if scored is not None:
            kept = chunks.shape[1] - _before_first(scored)
            finite = []
            for n, mask in enumerate(scored[:, -kept + 1 :]):
                x, y = (each[n, -kept:-1][mask.to(each.device)] for each in (base.logits, other.logits))
                places = mask.nonzero()[:, 0] + chunks.shape[1] - kept + 1
                finite.append(to.scores.add(first + n, x, y, chunks[n, places], places))
            return all(finite)
        half = chunks.shape[1] // 2
        rows = chunks.shape[1] - half
        pairs = ((x[-rows:-1], y[-rows:-1]) for x, y in zip(base.logits, other.logits, strict=True))
        return _score(to.scores, first, pairs, chunks, half + 1)

    def count_rows(self, chunks: Tensor, scored: Tensor | None) -> int:
        """Return the number of positions at the end of chunks whose logits are needed."""
        return chunks.shape[1] - (chunks.shape[1] // 2 if scored is None else _before_first(scored))

    def measure_piece(
        self,
        base: "ModelOutput",
        other: "ModelOutput",
        at: int,
        chunks: Tensor,
        first: int,
        to: Measures,
        scored: Tensor | None = None,
    ) -> bool:
        """Score logits that begin at position ``at``, counted from the end of the chunks, as :meth:`measure` does."""
        width = chunks.shape[1]
        places = torch.arange(base.logits.shape[1]) + width + at + 1  # positions of the predicted tokens
        known = places < width
        finite = []
        for n in range(len(chunks)):
            wanted = known if scored is None else known & scored[n, places.clamp(max=width - 1)]
            x, y = (each[n][wanted.to(each.device)] for each in (base.logits, other.logits))
            finite.append(to.scores.add(first + n, x, y, chunks[n, places[wanted]], places[wanted]))
        return all(finite)


class SequenceToSequence:
    """An encoder-decoder: the encoder reads the first half of a chunk, predictions of the second half are scored."""

    kind: Kind = "sequence to sequence"
    loader = "AutoModelForSeq2SeqLM"

    def inputs(
        self, model: nn.Module, config: "PretrainedConfig", chunks: Tensor, scored: Tensor | None = None
    ) -> Inputs:
        """Return the first half for the encoder; for the decoder its start token and the second half up to the last."""
        half = chunks.shape[1] // 2
        start = torch.full((len(chunks), 1), config.decoder_start_token_id or 0)
        decoder = torch.cat([start, chunks[:, half:-1]], 1)
        return {"input_ids": chunks[:, :half], "decoder_input_ids": decoder, "use_cache": False}

    def measure(
        self,
        base: "ModelOutput",
        other: "ModelOutput",
        chunks: Tensor,
        first: int,
        to: Measures,
        scored: Tensor | None = None,
    ) -> bool:
        """Score each token of the second half."""
        return _score(to.scores, first, zip(base.logits, other.logits, strict=True), chunks, chunks.shape[1] // 2)


class Transcription(Causal):
    """An encoder-decoder that writes down what its encoder hears; predictions of the transcript are scored."""

    kind: Kind = "transcription"

    def inputs(self, model: nn.Module, config: Any, chunks: Any, scored: Tensor | None = None) -> Inputs:
        """Return a sound for the encoder, and for the decoder the transcript after its start token."""
        given: WithMedia = chunks
        ids, start = given.ids, config.decoder_start_token_id
        if start is not None and int(ids[0, 0]) != start:
            ids = torch.cat([torch.full((1, 1), start), ids], 1)
        return _in_dtype_of(model, given.media) | {"decoder_input_ids": ids, "use_cache": False}


class Encoder:
    """An encoder: the last hidden states are compared."""

    kind: Kind = "encoder"
    loader = "AutoModel"

    def inputs(self, model: nn.Module, config: object, chunks: Tensor, scored: Tensor | None = None) -> Inputs:
        """Return the chunks."""
        return inputs_of(model, chunks)

    def measure(
        self,
        base: "ModelOutput",
        other: "ModelOutput",
        chunks: Tensor,
        first: int,
        to: Measures,
        scored: Tensor | None = None,
    ) -> bool:
        """Compare the embedding of each chunk; one that is not finite has an undefined cosine."""
        to.embedded.add(first, base.last_hidden_state, other.last_hidden_state)
        return True


class Recorded:
    """A model that runs on recorded calls: its outputs are compared."""

    kind: Kind = "calls"
    loader = "AutoModel"  # if the config names no class

    def inputs(self, model: nn.Module, config: object, chunks: Any, scored: Tensor | None = None) -> Inputs:
        """Return the arguments of a call, floats in the dtype of the model."""
        given: Call = chunks
        return _in_dtype_of(model, given.arguments)

    def measure(
        self, base: object, other: object, chunks: Any, first: int, to: Measures, scored: Tensor | None = None
    ) -> bool:
        """Compare the outputs of a call."""
        return to.outputs.add(first, chunks, output_of(base), output_of(other))


CAUSAL, SEQUENCE, ENCODER, CALLS = Causal(), SequenceToSequence(), Encoder(), Recorded()
TRANSCRIPTION = Transcription("AutoModelForSpeechSeq2Seq")
WITH_IMAGES, WITH_SOUNDS = Causal("AutoModelForImageTextToText"), Causal("AutoModelForSeq2SeqLM")


def workload_of(config: "PretrainedConfig") -> Workload:
    """Return the kind of model that a config describes."""
    from transformers.models.auto import modeling_auto as auto

    names, kind = getattr(config, "architectures", None) or [], config.model_type
    if getattr(config, "is_encoder_decoder", False):
        return TRANSCRIPTION if kind in auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES else SEQUENCE
    if any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in names):
        return CAUSAL
    if auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(kind) in names:
        return WITH_IMAGES
    if auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.get(kind) in names:
        return WITH_SOUNDS
    masked = kind in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    return CAUSAL if kind in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not masked else ENCODER


def inputs_of(model: nn.Module, ids: Tensor) -> Inputs:
    """Return the arguments of the model's forward for token ids (n, tokens), without a cache."""
    return {"input_ids": ids} | ({"use_cache": False} if _takes(model, "use_cache") else {})


def _before_first(scored: Tensor) -> int:
    """Return the position whose logits predict the first scored token of any chunk."""
    return int(scored.any(0).to(torch.uint8).argmax()) - 1


def _in_dtype_of(model: nn.Module, arguments: Mapping[str, object]) -> Inputs:
    """Return arguments with their floats in the dtype of the model.

    Positions and numbers such as timesteps keep their dtype: the model converts them itself.
    """
    if not arguments:
        return {}
    dtype = Counter(parameter.dtype for parameter in model.parameters()).most_common(1)[0][0]

    def convert(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and tensor.dim() > 1 else tensor

    return {key: value if key.endswith(POSITIONS) else map_tensors(value, convert) for key, value in arguments.items()}


def _takes(model: nn.Module, argument: str) -> bool:
    return argument in inspect.signature(model.forward).parameters


def _score(scores: Scores, first: int, pairs: Iterable[tuple[Tensor, Tensor]], chunks: Tensor, begin: int) -> bool:
    """Add the logits of both models for the tokens of each chunk from ``begin`` on; return whether all are finite."""
    places = torch.arange(begin, chunks.shape[1])
    finite = [scores.add(first + n, x, y, chunks[n, begin:], places) for n, (x, y) in enumerate(pairs)]
    return all(finite)
