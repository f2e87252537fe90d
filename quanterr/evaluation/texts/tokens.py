"""The tokens that both models read: texts in the original's own tokenizer, or stored token ids."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from quanterr.errors import CheckpointError, UsageError
from quanterr.evaluation.extras import EXTRA
from quanterr.evaluation.models.folder import ModelFolder
from quanterr.options import Array
from quanterr.tensors.arrays import as_tensor
from quanterr.util.text import count, display, named_path

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

MIN_CONTEXTS = 2
CHARACTERS_PER_TOKEN = 8  # how many are read at first for each wanted token
MAX_UNKNOWN = 0.1  # maximum share of unknown tokens
# Maximum share of the most frequent token; even if each character is a token, spaces are less than a fifth.
MAX_COMMONEST = 0.5
MIN_DISTINCT = 16  # minimum number of distinct tokens
MAX_REPEATED = 0.1  # maximum share of repeated chunks
UNCERTAIN_TOKENS = 64  # last tokens of a cut text, which may differ from those of the whole text


@dataclass(frozen=True, slots=True)
class Text:
    """Token ids, (n,) int64, their source, the token that begins each chunk, and the unknown token."""

    ids: Tensor
    source: str
    bos: int | None
    unknown: int | None = None


def fingerprint(*chunks: Tensor) -> str:
    """Return the SHA-256 of token ids, which must be equal if evaluations are to be compared."""
    return sha256(b"".join(each.contiguous().numpy().tobytes() for each in chunks)).hexdigest()


def read_utf8(path: str, where: str) -> str:
    """Read a text file; ``where`` names it in errors.

    Raises:
        UsageError: the file is missing or not UTF-8.
    """
    try:
        return Path(path).read_bytes().decode("utf-8")
    except OSError as error:
        raise UsageError(f"{where}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{where}: not UTF-8 at byte {error.start:,}; convert it first") from error


def read_text(path: str, folder: ModelFolder, enough: int | None = None) -> Text:
    """Tokenize a text file with the original's tokenizer.json; of a long file only the first ``enough`` tokens.

    Raises:
        UsageError: the file is missing or not UTF-8, or tokenizers is not installed.
        CheckpointError: the tokenizer.json is missing or damaged.
    """
    text, tokenizer = read_utf8(path, f"--text {display(path)}"), tokenizer_of(folder)
    length = len(text) if enough is None else CHARACTERS_PER_TOKEN * enough
    while True:
        ids = tokenizer(text[:length], add_special_tokens=False, verbose=False)["input_ids"]
        if length >= len(text) or len(ids) >= (enough or 0) + UNCERTAIN_TOKENS:
            break
        length *= 2
    bos: int | None = tokenizer.bos_token_id
    begins = tokenizer("a")["input_ids"][:1] == [bos]  # whether the tokenizer begins a text with it
    return Text(torch.tensor(ids, dtype=torch.int64), path, bos if begins else None, tokenizer.unk_token_id)


def tokenizer_of(folder: ModelFolder) -> "PreTrainedTokenizerBase":
    """Read the tokenizer of a model.

    Raises:
        UsageError: transformers is not installed.
        CheckpointError: the tokenizer.json is missing or damaged.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise UsageError(EXTRA) from error
    shown = folder.locate("tokenizer.json")
    if not (folder.path / "tokenizer.json").exists():
        why = folder.lacks.get("tokenizer.json", "missing; give")
        raise CheckpointError(f"{shown}: {why} token ids with --tokens FILE.safetensors instead of a text")
    try:
        return AutoTokenizer.from_pretrained(folder.path, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        reason = display(str(error), 300)
        raise CheckpointError(
            f"{shown}: transformers cannot read it: {reason}; give token ids with --tokens instead of a text"
        ) from error


def read_tokens(tokens: str | PathLike[str] | Array | Iterable[int]) -> Text:
    """Return token ids in memory, or those of a safetensors file with one tensor of integers.

    Raises:
        UsageError: the file is missing, or holds something else.
    """
    if not isinstance(tokens, str | PathLike):
        given = as_tensor("tokens", tokens) if isinstance(tokens, Array) else torch.tensor(list(tokens))
        if given.is_floating_point() or given.is_complex():
            raise UsageError(f"tokens: expected integers, the ids of a text; got {given.dtype}")
        return Text(given.flatten().to(torch.int64), "tokens", None)
    path = fspath(tokens)
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
    """Chunks without overlap, (n, context): as the model gets them, and as they are in the text.

    A conversation is one chunk with its own length and a mask of its scored tokens.
    """

    given: Tensor
    raw: Tensor
    scored: Tensor | None = None  # (n, width) bool; None: the second half of each chunk
    lengths: tuple[int, ...] = ()  # lengths of conversations, which are padded
    media: tuple[dict[str, Tensor], ...] = ()  # images and sounds of each conversation, as its model takes them

    @property
    def parts(self) -> list[Tensor]:
        """Token ids, a mask of the scored ones unless they are the second half of each chunk, and images and sounds."""
        shown = [media[key] for media in self.media for key in sorted(media)]
        return [self.raw, *([] if self.scored is None else [self.scored]), *shown]


def digest_of(chunks: Chunks) -> str:
    """Return the SHA-256 of all inputs of the model and of the scored tokens."""
    return fingerprint(chunks.given, *chunks.parts)


def spans_of(texts: Sequence[Chunks]) -> list[range]:
    """Return the range of chunk numbers of each text; chunks are numbered across all texts."""
    spans, first = [], 0
    for chunks in texts:
        spans.append(range(first, first + len(chunks.raw)))
        first += len(chunks.raw)
    return spans


class Given(NamedTuple):
    """A text file and its name among several texts."""

    name: str
    path: str


def named_files(given: Iterable[str | PathLike[str]], option: str) -> list[Given]:
    """Return files with their names: ``prose`` for ``prose=a.txt``, otherwise the file's own name.

    Raises:
        UsageError: two files have the same name.
    """
    files = []
    for text in given:
        name, path = named_path(fspath(text))
        files.append(Given(name or Path(path).stem, path))
    names = [text.name for text in files]
    twice = next((name for n, name in enumerate(names) if name in names[:n]), None)
    if twice is not None:
        raise UsageError(f"{option}: two texts are called {display(twice)}; name them, as in {option} prose=a.txt")
    return files


def chunks_of(text: Text, context: int, limit: int | None, vocabulary: int) -> Chunks:
    """Cut a text into up to ``limit`` chunks.

    Raises:
        UsageError: the text is shorter than two contexts, or an id is not in the vocabulary.
    """
    n = len(text.ids) // context
    if n < MIN_CONTEXTS:
        raise UsageError(
            f"{display(text.source)}: {len(text.ids):,} tokens; at least {MIN_CONTEXTS * context:,} are needed for a "
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


class Likeness(NamedTuple):
    """Counts that distinguish running text from files that only look like text."""

    distinct: int
    commonest: float  # share
    unknown: float | None  # share; None if there is no unknown token
    repeated: int  # chunks

    def doubts(self, chunks: int, vocabulary: int) -> list[str]:
        """Return the reasons, as sentences, why results on such a text mean little."""
        reasons = []
        if (self.unknown or 0) > MAX_UNKNOWN:
            reasons.append(
                f"{self.unknown:.0%} of the tokens are unknown to the tokenizer: is it the model's language?"
            )
        if self.distinct < min(MIN_DISTINCT, vocabulary // 4) or self.commonest > MAX_COMMONEST:
            share = f"one of them makes up {self.commonest:.0%}"
            reasons.append(f"the text has {count(self.distinct, 'different token')}, {share}: give another text")
        if self.repeated > MAX_REPEATED * chunks:
            reasons.append(
                f"{self.repeated:,} of {count(chunks, 'chunk')} repeat earlier ones: they say nothing new, and errors "
                "look smaller than they are"
            )
        return reasons


def likeness(text: Text, raw: Tensor) -> Likeness:
    """Count frequent, unknown and repeated tokens of a text's chunks, (n, context)."""
    numbers = raw.flatten().bincount()
    unknown = None if text.unknown is None else float((raw == text.unknown).double().mean())
    commonest = float(numbers.max()) / raw.numel()
    return Likeness(
        int(numbers.count_nonzero()), commonest, unknown, len(raw) - len({chunk.numpy().tobytes() for chunk in raw})
    )


Decode = Callable[[Sequence[int]], str]


def decoder_of(folder: ModelFolder) -> Decode | None:
    """Return a function from token ids to text with special tokens; None without a tokenizer.json."""
    read = _read_tokenizer(folder)
    return None if read is None else lambda ids: str(read.decode(list(ids), skip_special_tokens=False))


def _read_tokenizer(folder: ModelFolder) -> "Tokenizer | None":
    """Return the tokenizer of a tokenizer.json; None if it cannot be read."""
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(folder.path / "tokenizer.json"))
    except Exception:  # the library has no class for its errors
        return None


def read_vocabulary(folder: ModelFolder) -> dict[int, str] | None:
    """Return the tokens of a tokenizer.json by their ids, added ones included; None if it cannot be read."""
    read = _read_tokenizer(folder)
    return None if read is None else {number: token for token, number in read.get_vocab().items()}


def tokenizer_fingerprint(folder: ModelFolder) -> str | None:
    """Return the SHA-256 of the parts of a tokenizer.json that determine tokens; None if it cannot be read.

    None, too, for a tokenizer derived from a GGUF file, which stores these parts in another form.
    """
    read = None if folder.is_made else _read_tokenizer(folder)
    if read is None:
        return None
    fields = json.loads(read.to_str())
    special = [[token["id"], token["content"]] for token in fields["added_tokens"]]
    parts = [fields["model"], special, fields["normalizer"], fields["pre_tokenizer"]]
    return sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
