"""Kinds of models: how each is built, which inputs it gets, and which outputs are measured.

To add a kind, write a class with the members of :class:`Workload`, and return it from :func:`workload_of`.
"""

import inspect
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor, nn

from quanterr.evaluation.denoisers.calls import Call, OutputMeasures, map_tensors, output_of
from quanterr.evaluation.measures.embeddings import Embedded
from quanterr.evaluation.measures.scores import Scores
from quanterr.evaluation.running.batches import Batch, WithMedia

if TYPE_CHECKING:
    from transformers import PretrainedConfig
    from transformers.utils import ModelOutput

Kind = Literal["causal", "sequence to sequence", "transcription", "encoder", "calls"]
Inputs = dict[str, object]  # arguments of a model's forward
POSITIONS_SUFFIX = "_ids"  # ending of names of positions, such as img_ids, which must not be rounded to 16 bits


@dataclass
class Measures:
    """The measures of a candidate's outputs against the original's."""

    scores: Scores = field(default_factory=Scores)
    embedded: Embedded = field(default_factory=Embedded)
    outputs: OutputMeasures = field(default_factory=OutputMeasures)

    def merge(self, other: "Measures") -> None:
        """Add measurements on other micro-batches."""
        self.scores.columns |= other.scores.columns
        self.embedded.of_x |= other.embedded.of_x
        self.embedded.of_y |= other.embedded.of_y
        self.embedded.error.merge(other.embedded.error)
        self.outputs.calls |= other.outputs.calls


class Workload(Protocol):
    """A kind of model."""

    kind: Kind
    loader: str  # class of transformers that builds it from a config

    def inputs(self, model: nn.Module, config: object, batch: Batch) -> Inputs:
        """Return the arguments of the model for a micro-batch."""

    def measure(self, base: object, other: object, batch: Batch, to: Measures) -> bool:
        """Add the outputs of both models for a micro-batch; return whether all are finite."""


class Causal:
    """A causal model: predictions of the second half of each chunk are scored, as in llama.cpp's perplexity."""

    kind: Kind = "causal"

    def __init__(self, loader: str = "AutoModelForCausalLM") -> None:
        """Describe a model that predicts the next token; ``loader`` is the class that builds it."""
        self.loader = loader

    def inputs(self, model: nn.Module, config: object, batch: Batch) -> Inputs:
        """Return the chunks; if the model can leave out logits, those before the first scored one are not computed."""
        given = batch.given if isinstance(batch.given, WithMedia) else WithMedia(batch.given, {})
        kept = {"logits_to_keep": self.count_rows(batch)} if _takes(model, "logits_to_keep") else {}
        return inputs_of(model, given.ids) | _convert_floats(model, given.media) | kept

    def measure(self, base: "ModelOutput", other: "ModelOutput", batch: Batch, to: Measures) -> bool:
        """Score the tokens that the micro-batch marks, or all but the first token of the second half."""
        rows = self.count_rows(batch)
        return self._score(base.logits[:, -rows:], other.logits[:, -rows:], -rows, batch, to)

    def measure_piece(self, base: "ModelOutput", other: "ModelOutput", at: int, batch: Batch, to: Measures) -> bool:
        """Score logits that begin at position ``at``, counted from the end of the chunks, as :meth:`measure` does."""
        return self._score(base.logits, other.logits, at, batch, to)

    def _score(self, base: Tensor, other: Tensor, at: int, batch: Batch, to: Measures) -> bool:
        """Score logits (chunks, positions, vocabulary) of both models."""
        width, finite = batch.raw.shape[1], []
        places = torch.arange(width + at + 1, width)[: base.shape[1]]  # positions of the predicted tokens
        for n, tokens in enumerate(batch.raw):
            x, y, positions = base[n, : len(places)], other[n, : len(places)], places
            if batch.scored is not None:
                mask = batch.scored[n, places]
                x, y, positions = x[mask.to(x.device)], y[mask.to(y.device)], places[mask]
            finite.append(to.scores.add(batch.first + n, x, y, tokens[positions], positions))
        return all(finite)

    def count_rows(self, batch: Batch) -> int:
        """Return the number of positions at the end of chunks whose logits are needed."""
        width: int = batch.raw.shape[1]
        return width - (width // 2 if batch.scored is None else _find_first_position(batch.scored))


class SequenceToSequence:
    """An encoder-decoder: the encoder reads the first half of a chunk; predictions of the second half are scored."""

    kind: Kind = "sequence to sequence"
    loader = "AutoModelForSeq2SeqLM"

    def inputs(self, model: nn.Module, config: "PretrainedConfig", batch: Batch) -> Inputs:
        """Return the first half for the encoder; for the decoder, the start token and the rest but its last token."""
        chunks, half = batch.given, batch.given.shape[1] // 2
        start = torch.full((len(chunks), 1), config.decoder_start_token_id or 0)
        decoder = torch.cat([start, chunks[:, half:-1]], 1)
        return {"input_ids": chunks[:, :half], "decoder_input_ids": decoder, "use_cache": False}

    def measure(self, base: "ModelOutput", other: "ModelOutput", batch: Batch, to: Measures) -> bool:
        """Score each token of the second half."""
        width = batch.raw.shape[1]
        places, pairs = torch.arange(width // 2, width), zip(base.logits, other.logits, batch.raw, strict=True)
        finite = [
            to.scores.add(batch.first + n, x, y, tokens[places], places) for n, (x, y, tokens) in enumerate(pairs)
        ]
        return all(finite)


class Transcription(Causal):
    """An encoder-decoder that transcribes sounds; predictions of the transcript are scored."""

    kind: Kind = "transcription"

    def inputs(self, model: nn.Module, config: Any, batch: Batch) -> Inputs:
        """Return a sound for the encoder, and for the decoder the transcript after its start token."""
        given: WithMedia = batch.given
        ids, start = given.ids, config.decoder_start_token_id
        if start is not None and int(ids[0, 0]) != start:
            ids = torch.cat([torch.full((1, 1), start), ids], 1)
        return _convert_floats(model, given.media) | {"decoder_input_ids": ids, "use_cache": False}


class Encoder:
    """An encoder, whose last hidden states are compared."""

    kind: Kind = "encoder"
    loader = "AutoModel"

    def inputs(self, model: nn.Module, config: object, batch: Batch) -> Inputs:
        """Return the chunks."""
        return inputs_of(model, batch.given)

    def measure(self, base: "ModelOutput", other: "ModelOutput", batch: Batch, to: Measures) -> bool:
        """Compare the embedding of each chunk; one that is not finite has an undefined cosine."""
        to.embedded.add(batch.first, base.last_hidden_state, other.last_hidden_state)
        return True


class Recorded:
    """A model that runs on recorded calls, whose outputs are compared."""

    kind: Kind = "calls"
    loader = "AutoModel"  # used if the config names no class

    def inputs(self, model: nn.Module, config: object, batch: Batch) -> Inputs:
        """Return the arguments of a call, floats in the dtype of the model."""
        given: Call = batch.given
        return _convert_floats(model, given.arguments)

    def measure(self, base: object, other: object, batch: Batch, to: Measures) -> bool:
        """Compare the outputs of a call."""
        return to.outputs.add(batch.first, batch.raw, output_of(base), output_of(other))


CAUSAL, SEQUENCE, ENCODER, CALLS = Causal(), SequenceToSequence(), Encoder(), Recorded()
TRANSCRIPTION = Transcription("AutoModelForSpeechSeq2Seq")
WITH_IMAGES, WITH_SOUNDS = Causal("AutoModelForImageTextToText"), Causal("AutoModelForSeq2SeqLM")


def workload_of(config: "PretrainedConfig") -> Workload:
    """Return the kind of model that a config describes."""
    from transformers.models.auto import modeling_auto as auto

    names, model_type = getattr(config, "architectures", None) or [], config.model_type
    if getattr(config, "is_encoder_decoder", False):
        return TRANSCRIPTION if model_type in auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES else SEQUENCE
    if any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in names):
        return CAUSAL
    if auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(model_type) in names:
        return WITH_IMAGES
    if auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.get(model_type) in names:
        return WITH_SOUNDS
    masked = model_type in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    return CAUSAL if model_type in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not masked else ENCODER


def inputs_of(model: nn.Module, ids: Tensor) -> Inputs:
    """Return the arguments of the model's forward for token ids (n, tokens), without a cache."""
    return {"input_ids": ids} | ({"use_cache": False} if _takes(model, "use_cache") else {})


def _find_first_position(scored: Tensor) -> int:
    """Return the position whose logits predict the first scored token of any chunk."""
    return int(scored.any(0).to(torch.uint8).argmax()) - 1


def _convert_floats(model: nn.Module, arguments: Mapping[str, object]) -> Inputs:
    """Return arguments with their floats in the dtype of the model.

    Positions and numbers such as timesteps keep their dtype, as the model converts them itself.
    """
    if not arguments:
        return {}
    dtype = Counter(parameter.dtype for parameter in model.parameters()).most_common(1)[0][0]

    def convert(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and tensor.dim() > 1 else tensor

    return {
        key: value if key.endswith(POSITIONS_SUFFIX) else map_tensors(value, convert)
        for key, value in arguments.items()
    }


def _takes(model: nn.Module, argument: str) -> bool:
    return argument in inspect.signature(model.forward).parameters
