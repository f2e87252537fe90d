"""References: all data of an original that are needed to evaluate candidates without its weights.

A folder that ``evaluate --save-reference`` writes:

    reference.json          the text, the settings, hashes of everything, the headers of the original's tensors
    reference.safetensors   ``hidden/N``: the inputs of the head for micro-batch N, (chunks, positions, width);
                            ``head/NAME``: the head; ``rows/NAME``: bytes of a few rows of each stored tensor
    config.json, tokenizer.json, …

Hidden states are smaller than logits by width / vocabulary. The head and the model's own code after it compute the same
logits from them, bit for bit. The few rows are those that pairing reads to choose among interpretations of
a candidate's weight; to read any other row raises an error.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from importlib.metadata import version
from math import prod
from pathlib import Path
from shutil import copyfile
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from quanterr.checkpoints import Checkpoint, CheckpointFile, Entry
from quanterr.documents.base import Finding
from quanterr.errors import CheckpointError, ResourceError, UsageError
from quanterr.evaluation.models.building import Architecture, Denoiser
from quanterr.evaluation.models.folder import FILES, ModelFolder
from quanterr.evaluation.models.units import units_of
from quanterr.evaluation.running.logits import Tail, head_of
from quanterr.evaluation.running.stream import Stream
from quanterr.findings import make_finding
from quanterr.outputs.files import open_replacement
from quanterr.pairing.sampling import sampled_rows
from quanterr.util import strict_json
from quanterr.util.rank_group import RankGroup
from quanterr.util.strict_json import as_object
from quanterr.util.text import display
from quanterr.version import __version__

SCHEMA, SCHEMA_VERSION = "quanterr.reference", "1.0"
HEADER, TENSORS = "reference.json", "reference.safetensors"
KIND = "reference"  # kind of the checkpoint
MAX_WHOLE_BYTES = 1 << 16  # larger tensors are kept only in part
HIDDEN, HEAD, ROWS = "hidden/", "head/", "rows/"
SAVE, USE = "--save-reference", "--reference"


class Settings(NamedTuple):
    """The settings and the text of a reference, with which candidates must be evaluated, too."""

    dtype: str
    batch: int
    device: str
    context: int
    chunks: int
    tokens: str  # SHA-256 of the token ids as the model gets them
    targets: str  # SHA-256 of the token ids of the text


SETTING_NAMES = {
    "dtype": "--dtype",
    "batch": "--batch",
    "device": "--device",
    "context": "--context",
    "chunks": "the number of chunks",
    "tokens": "the text",
    "targets": "the text",
}


def versions() -> dict[str, str]:
    """Return the versions of the libraries on which the numbers depend."""
    return {"torch": torch.__version__, "transformers": version("transformers")}


class Head(Tail):
    """The head of a model and the code after it, which turn hidden states into logits."""

    def __init__(self, architecture: Architecture, tensors: Mapping[str, Tensor]) -> None:
        """Load the head into a model that is otherwise empty; ``tensors`` are its weights, by names of the model."""
        self.model = architecture.build()
        unit = head_of(self.model, units_of(self.model, architecture.device))
        assert unit is not None  # noqa: S101 - it was found when the reference was saved
        unit.load({name: tensor.to(architecture.device) for name, tensor in tensors.items()})
        super().__init__(self.model, architecture.device)


class KeptHead:
    """The head of an original and its inputs, which are collected while the original runs."""

    def __init__(self, architecture: Architecture | Denoiser, stream: Stream, group: RankGroup | None) -> None:
        """Find the head.

        Raises:
            UsageError: the model has no head of its own, or each of several processes would keep some of the inputs.
        """
        if group is not None:
            raise UsageError(f"{SAVE} cannot be used with several processes: start one")
        unit = head_of(stream.model, stream.units)
        if unit is None or not isinstance(architecture, Architecture):
            raise UsageError(f"{SAVE}: {type(stream.model).__name__} has no head whose inputs could be kept")
        self.unit, self._architecture = unit, architecture
        self.weights: dict[str, Tensor] = {}  # keys are the model's names
        self.hidden: dict[int, Tensor] = {}  # inputs, (chunks, positions, width), by number of the micro-batch

    def check(self, number: int, given: Mapping[str, object], result: Any) -> None:
        """Check that the head computes the same logits again from the kept inputs of a micro-batch.

        Raises:
            UsageError: the logits differ, as the model computes something else between its blocks and its logits.
        """
        head = Head(self._architecture, self.weights)
        if not torch.equal(head(self.hidden[number], given).logits, result.logits):
            name = type(head.model).__name__
            raise UsageError(f"{SAVE}: {name}'s logits are not what its head makes of its inputs")


class Reference:
    """A saved reference."""

    def __init__(self, folder: Path) -> None:
        """Read the reference in a folder.

        Raises:
            UsageError: the folder holds no reference, or one of another version.
            CheckpointError: the reference is damaged.
        """
        self.folder, where = folder, f"{USE} {display(str(folder))}"
        try:
            raw = (folder / HEADER).read_bytes()
            self._header = as_object(strict_json.loads(raw))
            self._tensors = load_file(folder / TENSORS)
        except OSError as error:
            raise UsageError(
                f"{where}: no reference: {error.strerror or 'cannot be read'}; {SAVE} writes one"
            ) from error
        except (ValueError, SafetensorError) as error:
            raise CheckpointError(f"{where}: damaged: {display(str(error), 200)}") from error
        if self._header.get("schema") != SCHEMA or self._header.get("schema_version") != SCHEMA_VERSION:
            raise UsageError(f"{where}: no reference of version {SCHEMA_VERSION}; save it again with {SAVE}")
        for name, tensor in self._tensors.items():
            if _hash_tensor(tensor) != self._header["sha256"].get(name):
                raise CheckpointError(f"{where}: {display(name)} is not what was saved: the reference is damaged")
        for name, digest in self._header["files"].items():
            if _hash_file(folder / name) != digest:
                raise CheckpointError(f"{where}: {name} is not what was saved; save the reference again")
        self.settings = Settings(**self._header["settings"])
        self.original: str = self._header["original"]
        self.original_bytes: int = self._header["original_bytes"]

    def checkpoint(self) -> Checkpoint:
        """Return the original as a checkpoint with the headers of all tensors, and the values of a few."""
        file = _Sparse(self.folder)
        entries: dict[str, Entry] = {}
        at = 0
        for name, dtype, shape, nbytes, spans in self._header["tensors"]:
            entries[name] = Entry(name, dtype, tuple(shape), file, at, nbytes)
            file.keep(at, nbytes, name, [tuple(span) for span in spans], self._tensors.get(ROWS + name))
            at += nbytes
        file.size = at
        config = json.loads((self.folder / "config.json").read_text(encoding="utf-8"))
        return Checkpoint(self.original, KIND, (), entries, (), {"config.json": config}, folder=self.folder)

    def findings(self) -> Iterator[Finding]:
        """Report libraries whose version has changed since the reference was computed."""
        saved = as_object(self._header.get("versions") or {})
        other = [
            f"{name} {saved.get(name) or 'of an unknown version'}, now {now}"
            for name, now in versions().items()
            if saved.get(name) != now
        ]
        if other:
            message = f"the reference was computed by {', '.join(other)}: numbers may differ by roundings"
            yield make_finding("reference_versions", "info", None, message, f"save it again with {SAVE}")

    def check(self, settings: Settings) -> None:
        """Check that candidates are evaluated with the settings and the text of the reference.

        Raises:
            UsageError: a setting or the text differs.
        """
        for name, saved in self.settings._asdict().items():
            given = getattr(settings, name)
            if given != saved:
                shown = "" if name in ("tokens", "targets") else f": {given}, and {saved} in the reference"
                raise UsageError(f"{USE} {display(str(self.folder))}: {SETTING_NAMES[name]} differs{shown}")

    def head(self, architecture: Architecture) -> Head:
        """Return the original's head."""
        weights = {name.removeprefix(HEAD): tensor for name, tensor in self._tensors.items() if name.startswith(HEAD)}
        return Head(architecture, weights)

    def read_hidden(self, batch: int) -> Tensor:
        """Return the inputs of the head for a micro-batch, (chunks, positions, width)."""
        return self._tensors[f"{HIDDEN}{batch}"]


class _Sparse(CheckpointFile):
    """A file of all tensors of the original, end to end, of which only the bytes that a reference holds can be read."""

    is_certain = True

    def __init__(self, folder: Path) -> None:
        """Start without bytes."""
        self.path, self.size = folder / TENSORS, 0
        self._spans: list[tuple[int, int, Tensor]] = []  # first byte, end, bytes
        self._names: list[tuple[int, int, str]] = []

    def keep(self, at: int, nbytes: int, name: str, spans: Sequence[tuple[int, int]], rows: Tensor | None) -> None:
        """Add a tensor that begins at byte ``at``; ``rows`` are the bytes of its ``spans``, which can be read."""
        self._names.append((at, at + nbytes, name))
        done = 0
        for first, stop in spans if rows is not None else ():
            assert rows is not None  # noqa: S101 - without rows, the loop has no spans
            self._spans.append((at + first, at + stop, rows[done : done + stop - first]))
            done += stop - first

    def __str__(self) -> str:
        return display(str(self.path))

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill ``view`` with the bytes from ``offset`` on.

        Raises:
            CheckpointError: the reference does not hold them.
        """
        stop = offset + len(view)
        if not view:
            return
        for first, last, held in self._spans:
            if first <= offset and stop <= last:
                torch.frombuffer(view, dtype=torch.uint8).copy_(held[offset - first : stop - first])
                return
        name = next((name for first, last, name in self._names if first <= offset < last), "")
        raise CheckpointError(
            f"{self}: does not hold the values of {display(name)}, which this candidate needs: evaluate it beside the "
            "original"
        )

    def will_need(self, offset: int, n: int) -> None:
        """Do nothing, as the bytes are in memory."""

    def check_unchanged(self) -> None:
        """Do nothing, as the bytes are in memory."""

    def close(self) -> None:
        """Do nothing, as no file is open."""


def check_place(folder: Path) -> None:
    """Check that a reference may be written to a folder: it must be new, empty, or hold a reference.

    Raises:
        UsageError: the folder holds other files, or cannot be read.
    """
    try:
        holds_others = any(folder.iterdir()) and not (folder / HEADER).exists()
    except FileNotFoundError:
        return
    except OSError as error:
        raise UsageError(f"{SAVE} {display(str(folder))}: {error.strerror}") from error
    if holds_others:
        raise UsageError(f"{SAVE} {display(str(folder))}: holds other files; name a new folder")


def write_reference(
    folder: Path,
    original: Checkpoint,
    files: ModelFolder,
    settings: Settings,
    kept: KeptHead,
) -> None:
    """Write a reference.

    Raises:
        ResourceError: a file cannot be written.
    """
    tensors = {f"{HIDDEN}{number}": each.contiguous() for number, each in kept.hidden.items()}
    tensors |= {HEAD + name: each.detach().cpu().clone() for name, each in kept.weights.items()}
    headers = []
    for name, entry in original.entries.items():
        spans = _spans(entry)
        headers.append([name, entry.dtype, list(entry.shape), entry.nbytes, spans])
        if spans:
            held = b"".join(entry.file.read(entry.offset + first, stop - first) for first, stop in spans)
            tensors[ROWS + name] = torch.frombuffer(bytearray(held), dtype=torch.uint8)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        copied = [name for name in FILES if (files.path / name).exists()]
        for name in copied:
            copyfile(files.path / name, folder / name)
        save_file(tensors, folder / TENSORS)
    except (OSError, SafetensorError) as error:
        why = error.strerror if isinstance(error, OSError) else display(str(error), 200)
        raise ResourceError(f"{SAVE} {display(str(folder))}: {why}") from error
    document = {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "tool": {"name": "quanterr", "version": __version__},
        "original": original.path,
        "original_bytes": original.nbytes,
        "revision": original.revision,
        "settings": settings._asdict(),
        "versions": versions(),
        "files": {name: _hash_file(folder / name) for name in copied},
        "sha256": {name: _hash_tensor(each) for name, each in tensors.items()},
        "tensors": headers,
    }
    with open_replacement(str(folder / HEADER), SAVE) as file:
        file.write(strict_json.dumps(document).encode() + b"\n")


def _spans(entry: Entry) -> list[tuple[int, int]]:
    """Return the spans of bytes to keep: a whole small tensor or vector, otherwise the rows that pairing samples."""
    if not entry.nbytes or entry.unknown:
        return []
    if entry.nbytes <= MAX_WHOLE_BYTES or len(entry.shape) < 2:
        return [(0, entry.nbytes)]
    cols = entry.shape[-1]
    rows = prod(entry.shape[:-1])
    of_row = entry.nbytes // rows
    return [(first * of_row, stop * of_row) for first, stop in sampled_rows(rows, cols)]


def _hash_tensor(tensor: Tensor) -> str:
    return sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def _hash_file(path: Path) -> str | None:
    try:
        return sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None
