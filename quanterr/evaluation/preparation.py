"""What an evaluation prepares before it reads any weight: the model, the texts or calls, the tasks."""

import os
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from quanterr.checkpoints import Checkpoint
from quanterr.errors import UsageError
from quanterr.evaluation.denoisers.calls import Calls, read_calls
from quanterr.evaluation.denoisers.gaussian import is_made_up, make_calls
from quanterr.evaluation.denoisers.rollout import check_rollout
from quanterr.evaluation.files.references import SAVE, USE, Settings, check_place
from quanterr.evaluation.models import building
from quanterr.evaluation.models.folder import ModelFolder, model_folder
from quanterr.evaluation.models.lora import read_lora
from quanterr.evaluation.running.rounding import list_caches
from quanterr.evaluation.running.workload import CAUSAL, ENCODER, TRANSCRIPTION
from quanterr.evaluation.texts.conversations import read_conversations
from quanterr.evaluation.texts.tasks import Asked, read_task
from quanterr.evaluation.texts.tokens import (
    MIN_CONTEXTS,
    Chunks,
    Decode,
    Likeness,
    Text,
    chunks_of,
    decoder_of,
    fingerprint,
    likeness,
    named_files,
    read_text,
    read_tokens,
    spans_of,
    tokenizer_fingerprint,
)
from quanterr.options import EvaluateOptions
from quanterr.tensors.devices import pick_device
from quanterr.util.text import display


class ReadText(NamedTuple):
    """A tokenized text, or tokenized conversations."""

    name: str
    source: str
    chunks: Chunks
    like: Likeness


class Prepared(NamedTuple):
    """The prepared inputs of an evaluation."""

    architecture: building.Architecture | building.Denoiser
    texts: list[ReadText]
    calls: Calls | None
    tasks: list[Asked]
    vocabulary: int
    tokenizer: str | None  # fingerprint
    decode: Decode | None = None  # token ids to text

    @property
    def chunks(self) -> list[Chunks] | Calls:
        """The tokens of all texts, or recorded calls."""
        return [text.chunks for text in self.texts] if self.calls is None else self.calls

    @property
    def spans(self) -> list[range]:
        """The range of chunk numbers of each text; empty for calls."""
        return spans_of([text.chunks for text in self.texts])

    @property
    def doubts(self) -> list[str]:
        """The reasons why results on these texts mean little."""
        reasons = []
        for text in self.texts:
            named = f"{text.name}: " if len(self.texts) > 1 else ""
            reasons += [f"{named}{why}" for why in text.like.doubts(len(text.chunks.raw), self.vocabulary)]
        return reasons

    @property
    def source(self) -> str:
        """The paths of all texts, or of the recorded calls, that both sides read."""
        return self.calls.source if self.calls is not None else ", ".join(text.source for text in self.texts)

    @property
    def input_ids(self) -> Tensor:
        """Token ids of the texts as the model gets them, (n, context), taking chunks from the texts in turn.

        Raises:
            UsageError: there is no text.
        """
        plain = [text.chunks.given for text in self.texts if text.chunks.scored is None]
        if not plain:
            raise UsageError("--sensitivity-out, --importance-out: need a text, with --text or --tokens")
        order = sorted((n, k) for k, given in enumerate(plain) for n in range(len(given)))
        return torch.stack([plain[k][n] for n, k in order])


def prepare(chosen: EvaluateOptions, original: Checkpoint) -> Prepared:
    """Read the config, the texts and the tasks, and check that the options fit the model.

    Raises:
        UsageError: an option does not fit, or the text is missing or too short.
        CheckpointError: transformers lacks the model.
    """
    dtype = building.DTYPES.get(chosen.dtype)
    if dtype is None:
        raise UsageError(f"--dtype {display(chosen.dtype)}: choose one of {', '.join(building.DTYPES)}")
    device = pick_device(chosen.device)
    given = None if chosen.config is None else Path(chosen.config)
    with model_folder(original) as folder:
        denoiser = None
        if original.source is None:  # other sources are files of llama.cpp, which are language models
            denoiser = building.read_denoiser_config(folder, original, given, chosen.inputs is not None)
        if denoiser is not None:
            lora = None if chosen.lora is None else read_lora(os.fspath(chosen.lora))
            model = building.Denoiser(denoiser, dtype, device, lora)
            return _prepare_calls(chosen, model, str(denoiser["_class_name"]))
        if chosen.lora is not None:
            raise UsageError(
                "--lora: works only with denoisers of diffusers, on recorded calls: give them with --inputs"
            )
        config = building.read_config(folder)
        if chosen.inputs is not None:
            return _prepare_calls(
                chosen, building.Architecture(config, dtype, device, recorded=True), config.model_type
            )
        if chosen.rollout:
            raise UsageError("--rollout: works only with denoisers, on recorded calls: give them with --inputs")
        vocabulary = config.get_text_config().vocab_size
        architecture = building.Architecture(config, dtype, device)
        _check_texts(chosen, architecture)
        if chosen.chat and not chosen.text and (chosen.sensitivity is not None or chosen.importance_out is not None):
            raise UsageError("--sensitivity-out and --importance-out need a text; give one with --text or --tokens")
        texts = _read_texts(chosen, folder, vocabulary, architecture.workload is TRANSCRIPTION)
        tasks = [read_task(os.fspath(path), folder) for path in chosen.tasks]
        tokenizer, decode = tokenizer_fingerprint(folder), decoder_of(folder)
    if chosen.save_reference is not None:
        check_place(Path(chosen.save_reference))
    return Prepared(architecture, texts, None, tasks, vocabulary, tokenizer, decode)


def _check_texts(chosen: EvaluateOptions, architecture: building.Architecture) -> None:
    """Raise UsageError if a model cannot read the texts, or does not support an option."""
    workload, name = architecture.workload, architecture.config.model_type
    if workload.kind == CAUSAL.kind:
        return
    if workload is ENCODER:
        _refuse_cache(chosen, name)
    refused = _list_text_options(chosen) | {"--sensitivity-out": chosen.sensitivity}
    if workload is TRANSCRIPTION:
        if not refused.pop("--chat"):
            raise UsageError(f"{display(name)} takes audio: give sound files and their transcripts with --chat FILE")
        refused |= {"--text": chosen.text, "--tokens": chosen.tokens}
    for option, value in refused.items():
        if value:
            raise UsageError(f"{option}: works only with models that predict the next token; {display(name)} does not")


def _list_text_options(chosen: EvaluateOptions) -> dict[str, object]:
    """Return the options that work only with causal models, with their values."""
    return {
        "--task": chosen.tasks,
        "--chat": chosen.chat,
        "--draft": chosen.draft,
        "--swap": chosen.swap,
        "--swap-blocks": chosen.swap_blocks,
        SAVE: chosen.save_reference,
        USE: chosen.reference,
    }


def _prepare_calls(
    chosen: EvaluateOptions, architecture: building.Architecture | building.Denoiser, name: str
) -> Prepared:
    """Return a model with the recorded calls that it runs on; ``name`` names the model in errors."""
    if chosen.inputs is None or chosen.text or chosen.chat or chosen.tokens is not None:
        raise UsageError(
            f"{display(name)} reads no text: give recorded calls with --inputs FILE.safetensors, and no text"
        )
    for option, value in _list_text_options(chosen).items():
        if value:
            raise UsageError(f"{option}: works only with models that predict the next token")
    _refuse_cache(chosen, name)
    inputs = os.fspath(chosen.inputs)
    calls = make_calls(inputs, architecture.build()) if is_made_up(inputs) else read_calls(inputs)
    calls.check(architecture.build())
    if chosen.rollout:
        check_rollout(architecture, calls)
    return Prepared(architecture, [], calls, [], 0, None)


def _refuse_cache(chosen: EvaluateOptions, name: str) -> None:
    """Raise UsageError if --kv names a rounding, as no runtime caches keys and values of such a model."""
    if asked := list_caches(chosen.kv):
        raise UsageError(
            f"--kv {display(asked[0])}: works only with models that generate; {display(name)} has no cache"
        )


def _read_texts(chosen: EvaluateOptions, folder: ModelFolder, vocabulary: int, transcribes: bool) -> list[ReadText]:
    """Read all texts and conversations.

    Raises:
        UsageError: no text is given, or one cannot be read.
    """
    texts, chats = list(chosen.text), list(chosen.chat)
    if bool(texts or chats) == (chosen.tokens is not None):
        raise UsageError("give a text with --text FILE or --chat FILE, or token ids with --tokens FILE.safetensors")
    if chosen.context < 2:
        raise UsageError(f"--context {chosen.context}: at least 2 tokens are needed")
    if chosen.tokens is not None:
        text = read_tokens(chosen.tokens)
        return [_read_text(Path(text.source).stem, text, chosen, vocabulary)]
    enough = None if chosen.chunks is None else max(chosen.chunks, MIN_CONTEXTS) * chosen.context
    named = named_files([*texts, *chats], "--text" if texts else "--chat")
    read_texts = [
        _read_text(given.name, read_text(given.path, folder, enough), chosen, vocabulary)
        for given in named[: len(texts)]
    ]
    for given in named[len(texts) :]:
        chunks = read_conversations(given.path, folder, chosen.context, chosen.chunks, transcribes)
        tokens = torch.cat([row[:length] for row, length in zip(chunks.raw, chunks.lengths, strict=True)])
        repeated = len(chunks.raw) - len({row.numpy().tobytes() for row in chunks.raw})
        like = likeness(Text(tokens, given.path, None), tokens[None])._replace(repeated=repeated)
        read_texts.append(ReadText(given.name, given.path, chunks, like))
    return read_texts


def _read_text(name: str, text: Text, chosen: EvaluateOptions, vocabulary: int) -> ReadText:
    chunks = chunks_of(text, chosen.context, chosen.chunks, vocabulary)
    return ReadText(name, text.source, chunks, likeness(text, chunks.raw))


def reference_settings(chosen: EvaluateOptions, prepared: Prepared) -> Settings:
    """Return the settings of a reference, with the hashes of its text."""
    chunks = [text.chunks for text in prepared.texts]
    return Settings(
        dtype=chosen.dtype,
        batch=chosen.batch,
        device=prepared.architecture.device.type,
        context=chosen.context,
        chunks=sum(len(each.raw) for each in chunks),
        tokens=fingerprint(*(each.given for each in chunks)),
        targets=fingerprint(*(part for each in chunks for part in each.parts)),
    )
