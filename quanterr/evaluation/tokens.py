"""What is read by both models: a text through the original's own tokenizer, or token ids as they are."""

from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quanterr.errors import CheckpointError, UsageError
from quanterr.evaluation.folder import ModelFolder
from quanterr.evaluation.models import EXTRA
from quanterr.util.text import display

LEAST_CONTEXTS = 2
CHARACTERS = 8  # of a token, at first
CUT = 64  # tokens at the end of a beginning, which the rest of the text might have made others


@dataclass(frozen=True, slots=True)
class Text:
    """Token ids (n,) int64, where they are from, and the token that begins each chunk."""

    ids: Tensor
    source: str
    bos: int | None


def fingerprint(chunks: Tensor) -> str:
    """SHA-256 of token ids: two evaluations compare only over the same ones."""
    return sha256(chunks.contiguous().numpy().tobytes()).hexdigest()


def read_text(path: str, folder: ModelFolder, enough: int | None = None) -> Text:
    """A text file through the tokenizer.json of the original; of a long one a beginning with ``enough`` tokens.

    Raises:
        UsageError: no such file, not UTF-8, or tokenizers is not installed.
        CheckpointError: no tokenizer.json, or one that is damaged.
    """
    try:
        text = Path(path).read_bytes().decode("utf-8")
    except OSError as error:
        raise UsageError(f"--text {display(path)}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"--text {display(path)}: not UTF-8 at byte {error.start:,}; convert it first") from error
    tokenizer = tokenizer_of(folder)
    length = len(text) if enough is None else CHARACTERS * enough
    while True:
        ids = tokenizer(text[:length], add_special_tokens=False, verbose=False)["input_ids"]
        if length >= len(text) or len(ids) >= (enough or 0) + CUT:
            break
        length *= 2
    return Text(torch.tensor(ids, dtype=torch.int64), path, _bos(tokenizer))


def tokenizer_of(folder: ModelFolder) -> Any:
    """The tokenizer of a model.

    Raises:
        UsageError: transformers is not installed.
        CheckpointError: no tokenizer.json, or one that is damaged.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise UsageError(EXTRA) from error
    shown = folder.named("tokenizer.json")
    if not (folder.path / "tokenizer.json").exists():
        raise CheckpointError(f"{shown}: missing; give token ids with --tokens ids.safetensors instead of a text")
    try:
        return AutoTokenizer.from_pretrained(folder.path, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        reason = display(str(error), 300)
        raise CheckpointError(
            f"{shown}: transformers cannot read it: {reason}; give token ids with --tokens instead of a text"
        ) from error


def _bos(tokenizer: Any) -> int | None:
    """The token that the tokenizer puts before a text; None: it puts none."""
    first = tokenizer("a")["input_ids"][:1]
    bos: int | None = tokenizer.bos_token_id
    return bos if bos is not None and first == [bos] else None


def read_tokens(path: str) -> Text:
    """Token ids from a safetensors file with one tensor of integers.

    Raises:
        UsageError: no such file, or not such a file.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(path)
    except OSError as error:
        raise UsageError(f"--tokens {display(path)}: {error.strerror or 'cannot be read'}") from error
    except SafetensorError as error:
        raise UsageError(f"--tokens {display(path)}: not a safetensors file") from error
    ids = next(iter(tensors.values())) if len(tensors) == 1 else None
    if ids is None or ids.is_floating_point() or ids.is_complex():
        raise UsageError(f"--tokens {display(path)}: one tensor of integers is needed, the ids of the text")
    return Text(ids.flatten().to(torch.int64), path, None)


class Chunks(NamedTuple):
    """Chunks (n, context) without overlap: as the model gets them, and as they are in the text."""

    given: Tensor
    raw: Tensor


def chunks_of(text: Text, context: int, limit: int | None, vocabulary: int) -> Chunks:
    """The chunks of a text, ``limit`` at most.

    Raises:
        UsageError: less than two contexts, or an id that the vocabulary does not have.
    """
    n = len(text.ids) // context
    if n < LEAST_CONTEXTS:
        raise UsageError(
            f"{display(text.source)}: {len(text.ids):,} tokens; at least {LEAST_CONTEXTS * context:,} are needed for a "
            f"context of {context}: give more text, or a smaller --context"
        )
    lowest, highest = int(text.ids.min()), int(text.ids.max())
    if lowest < 0 or highest >= vocabulary:
        raise UsageError(
            f"{display(text.source)}: has token {highest if lowest >= 0 else lowest}, the vocabulary has {vocabulary:,}"
        )
    raw = text.ids[: n * context].view(n, context)[:limit].clone()
    given = raw.clone()
    if text.bos is not None:
        given[:, 0] = text.bos
    return Chunks(given, raw)
