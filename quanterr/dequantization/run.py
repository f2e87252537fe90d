"""The run of dequantize, which decodes, writes next to the output, and renames; later runs keep finished files."""

import os
import shutil
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from html import escape
from math import isfinite, log10
from pathlib import Path
from typing import Any, NamedTuple

from quanterr.checkpoints import Checkpoint, open_checkpoints
from quanterr.comparison.scheduler import Progress
from quanterr.dequantization.layout import (
    OutputFile,
    identify,
    is_file_name,
    lay_out,
    list_other_files,
    make_index,
)
from quanterr.dequantization.tensors import WrittenTensor, count_formats, list_tensors, list_tensors_like
from quanterr.errors import CheckpointError, Interrupted, ResourceError, UsageError
from quanterr.evaluation.models.folder import is_language_model, model_folder
from quanterr.formats.reading import Reader
from quanterr.lazy_torch import Tensor, torch
from quanterr.options import DequantizeOptions
from quanterr.options.keywords import accept_fields_of
from quanterr.outputs.files import DEFAULT_MODE
from quanterr.selection import LayerSelection
from quanterr.tensors.chunks import CPU_CHUNK, Cut
from quanterr.tensors.memory import view_memory
from quanterr.tensors.pool import map_in_threads
from quanterr.tensors.workspace import find_dtype
from quanterr.util import platform
from quanterr.util.amounts import parse_bytes
from quanterr.util.atomic_file import replace_atomically
from quanterr.util.small_file import read_small
from quanterr.util.text import display, size

DTYPES = {"bf16": "BF16", "f16": "F16", "f32": "F32"}
# The folder next to the output, in which files are written until all are complete.
PARTIAL_FOLDER = ".{}.quanterr-partial"
# The file in it that identifies the inputs and outputs, which must be equal for a run to continue it.
IDENTITY_FILE = "identity"
PIECE_BYTES = 1 << 23  # number of bytes that are copied at once
CHUNKS_AT_ONCE = 16  # number of chunks of a task
TASKS_AHEAD = 2  # number of waiting tasks for each thread


@dataclass(frozen=True)
class Dequantized:
    """The result of dequantize: the written files.

    Attributes:
        path: the file or folder.
        files: the names of the files of tensors.
        nbytes: the bytes of all tensors.
        formats: number of weights that were decoded, by format.
        copied: number of tensors whose bytes were copied.
        rounding_db: Σx² over the squared error of rounding decoded values to the dtype, in dB; None if nothing was
                    rounded, or if an earlier run has written some of the files.
        left_out: number of the original's tensors that the converter left out and that are not written, by reason.
    """

    path: str
    files: tuple[str, ...]
    nbytes: int
    formats: dict[str, int]
    copied: int
    rounding_db: float | None
    left_out: dict[str, int] = field(default_factory=dict)

    def _repr_html_(self) -> str:
        rows = "".join(f"<tr><th>{name}</th><td>{escape(str(value))}</td></tr>" for name, value in vars(self).items())
        return f"<table>{rows}</table>"


class _Task(NamedTuple):
    """A piece of a tensor: some chunks of its weight, or some bytes of its entry."""

    tensor: WrittenTensor
    first: int
    stop: int


class _Rounding(NamedTuple):
    """Sums over decoded values: Σx², and the squared error of rounding them."""

    x_sq: float = 0.0
    e_sq: float = 0.0

    def add(self, other: "_Rounding") -> "_Rounding":
        """Return the sums over the values of both."""
        return _Rounding(self.x_sq + other.x_sq, self.e_sq + other.e_sq)


class _Piece(NamedTuple):
    """The bytes of a piece of a tensor, as they are written."""

    memory: memoryview
    rounding: _Rounding
    owner: Tensor | None = None  # keeps the memory alive


@accept_fields_of(DequantizeOptions)
def dequantize(
    model: str | os.PathLike[str] | Checkpoint, output: str | os.PathLike[str], **options: Any
) -> Dequantized:
    """Write a checkpoint back as plain floats, in safetensors.

    ``output`` is a file (``.safetensors``) or a folder, into which shards, an index, and the other files of the model's
    folder are written.

    The output appears when it is complete. Until then, it is in a temporary folder next to it, where a later run with
    the same inputs and options continues.

    Raises:
        UsageError: the output exists or is an input's folder; or a GGUF file of an unknown model is given without
            ``like``.
        CheckpointError: a tensor cannot be written as a float, or has no counterpart in ``like``.
        ResourceError: the disk is full, or what was written is not what was decoded (``verify``).
        Interrupted: the run was stopped.
    """
    return dequantize_checkpoint(model, Path(output), DequantizeOptions(**options))


def dequantize_checkpoint(
    model: str | os.PathLike[str] | Checkpoint, output: Path, chosen: DequantizeOptions
) -> Dequantized:
    """Write a checkpoint back as :func:`dequantize` does, with all options in one object."""
    sides = [model] if chosen.like is None else [model, chosen.like]
    with open_checkpoints(sides, chosen.lenient, chosen.cache) as sources:
        checkpoint, like = sources[0], sources[1] if len(sources) > 1 else None
        _check_output(output, sources)
        selection = LayerSelection(chosen.layers, chosen.exclude)
        dtype = None if chosen.dtype is None else DTYPES[chosen.dtype]
        left_out: dict[str, int] = {}
        is_made = like is None and is_language_model(checkpoint)
        if is_made:
            like, dtype = _describe_model(checkpoint), dtype or "BF16"
        if like is None:
            tensors = list_tensors(checkpoint, selection, dtype or "BF16")
        else:
            tensors, left_out = list_tensors_like(like, checkpoint, selection, dtype, by_names=is_made)
        if not tensors:
            raise UsageError("no tensor is selected, so there is nothing to write")
        files = lay_out(
            tensors,
            output.name if is_file_name(output) else None,
            int(parse_bytes("--max-shard", chosen.max_shard, "5GB")),
            (like or checkpoint).modules,
        )
        if is_file_name(output):
            others = {}
        else:
            others = _list_made(checkpoint) if is_made else list_other_files(like or checkpoint)
        rounding = _write_all(output, files, sources, chosen)
        for source in sources:
            source.check_unchanged()
        _finish(output, files, others)
    return Dequantized(
        str(output),
        tuple(file.name for file in files),
        sum(tensor.nbytes for tensor in tensors),
        count_formats(tensors),
        sum(tensor.weight is None for tensor in tensors),
        None if not rounding.e_sq else 10 * log10(rounding.x_sq / rounding.e_sq),
        left_out,
    )


def _describe_model(checkpoint: Checkpoint) -> Checkpoint:
    """Return the names and shapes of the model that a GGUF file describes.

    Raises:
        UsageError: its architecture is not known, or transformers is not installed.
    """
    try:
        from quanterr.evaluation.models.gguf_original import describe_model

        return describe_model(checkpoint)
    except ImportError as error:
        why = f'{error}; pip install "quanterr[evaluate]"'
    except CheckpointError as error:
        why = str(error)
    raise UsageError(f"the names of a GGUF file are those of llama.cpp: give --like ORIGINAL ({why})")


def _list_made(checkpoint: Checkpoint) -> dict[str, bytes]:
    """Return config.json and the tokenizer, as far as they can be derived from a GGUF file."""
    with model_folder(checkpoint) as folder:
        return {path.name: path.read_bytes() for path in folder.path.iterdir()}


def _check_output(output: Path, sources: Sequence[Checkpoint]) -> None:
    """Raise UsageError if the output exists or is an input's folder, ResourceError if its own folder is missing."""
    if output.exists() and not (output.is_dir() and not is_file_name(output) and not any(output.iterdir())):
        raise UsageError(f"-o {display(str(output))}: exists; nothing is overwritten: give another name, or remove it")
    if not output.absolute().parent.is_dir():
        raise ResourceError(f"-o {display(str(output))}: no such folder: {display(str(output.absolute().parent))}")
    folders = {os.path.realpath(str(source.folder)) for source in sources if isinstance(source.folder, Path)}
    if os.path.realpath(output) in folders:
        raise UsageError(f"-o {display(str(output))}: is the folder of an input; choose another one")


def _write_all(
    output: Path, files: Sequence[OutputFile], sources: Sequence[Checkpoint], chosen: DequantizeOptions
) -> _Rounding:
    """Write those files that an earlier run has not finished into the folder next to the output.

    Returns:
        The sums over all decoded values; none if some files are of an earlier run.
    """
    try:
        folder = _begin(output, identify(sources, files))
    except OSError as error:
        raise ResourceError(f"-o {display(str(output))}: {error.strerror}") from error
    left = [file for file in files if not (folder / file.name).exists()]
    needed, free = sum(file.size for file in left), shutil.disk_usage(folder).free
    if needed > free:
        raise ResourceError(f"-o {display(str(output))}: needs {size(needed)}, but only {size(free)} are free there")
    progress = Progress(needed * (2 if chosen.verify else 1), total_weights=sum(len(file.tensors) for file in left))
    rounding, readers = _Rounding(), [Reader() for _ in range(platform.usable_cores())]
    try:
        for file in left:
            unfinished = folder / f"{file.name}.unfinished"
            unfinished.parent.mkdir(exist_ok=True)  # the folder of a module, as in 2_Dense/model.safetensors
            with unfinished.open("wb") as to:
                to.write(file.header)
                with closing(_decode_all(file, readers, chosen, progress)) as pieces:
                    for piece in pieces:
                        to.write(piece.memory)
                        rounding = rounding.add(piece.rounding)
                to.flush()
                os.fsync(to.fileno())
            if chosen.verify:
                with closing(_decode_all(file, readers, chosen, progress)) as pieces:
                    _verify(unfinished, pieces, len(file.header))
            os.replace(unfinished, folder / file.name)
    except OSError as error:
        raise ResourceError(f"-o {display(str(output))}: {error.strerror}") from error
    return rounding if len(left) == len(files) else _Rounding()  # the rounding of files of an earlier run is unknown


def _name_partial_folder(output: Path) -> Path:
    return output.absolute().with_name(PARTIAL_FOLDER.format(output.name))


def _begin(output: Path, identity: str) -> Path:
    """Return the folder next to the output; if a run with other inputs or options has left one, remove that first."""
    folder = _name_partial_folder(output)
    try:
        begun = read_small(folder / IDENTITY_FILE, 1 << 10).decode("ascii", "replace")
    except (OSError, ValueError):
        begun = ""
    if begun != identity:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        with replace_atomically(folder / IDENTITY_FILE) as file:
            file.write(identity.encode())
    return folder


def _decode_all(
    file: OutputFile, readers: Sequence[Reader], chosen: DequantizeOptions, progress: Progress
) -> Generator[_Piece, None, None]:
    """Yield the bytes of a file's tensors in order; threads decode a few pieces ahead.

    Raises:
        Interrupted: the run was stopped.
    """
    with map_in_threads(_decode, _list_tasks(file, progress), readers, TASKS_AHEAD * len(readers)) as pieces:
        for piece in pieces:
            if chosen.stop is not None and chosen.stop.is_set():
                raise Interrupted("interrupted; the same command goes on with the files that are complete")
            progress.done_bytes += len(piece.memory)
            if chosen.on_progress is not None:
                chosen.on_progress(progress)
            yield piece


def _list_tasks(file: OutputFile, progress: Progress) -> Iterator[_Task]:
    for tensor in file.tensors:
        progress.name = tensor.name
        yield from _split(tensor)
        progress.done_weights += 1


def _split(tensor: WrittenTensor) -> Iterator[_Task]:
    """Yield the pieces of a tensor in the order of their bytes."""
    weight = tensor.weight
    if weight is None:
        yield from (
            _Task(tensor, at, min(at + PIECE_BYTES, tensor.nbytes)) for at in range(0, tensor.nbytes, PIECE_BYTES)
        )
        return
    n = len(Cut(*weight.matrix, CPU_CHUNK))
    yield from (_Task(tensor, at, min(at + CHUNKS_AT_ONCE, n)) for at in range(0, n, CHUNKS_AT_ONCE))


def _decode(task: _Task, reader: Reader) -> _Piece:
    weight, entry = task.tensor.weight, task.tensor.entry
    if weight is None:
        assert entry is not None  # noqa: S101 - a tensor has one of both
        return _Piece(memoryview(entry.file.read(entry.offset + task.first, task.stop - task.first)), _Rounding())
    chunks = Cut(*weight.matrix, CPU_CHUNK)[task.first : task.stop]
    weight.will_need(chunks[0], chunks[-1])
    made = torch.empty(sum(chunk.n for chunk in chunks), dtype=find_dtype(task.tensor.dtype))
    at, rounding = 0, _Rounding()
    for chunk in chunks:
        values = reader.read(weight, chunk).view(-1)
        rounded = made[at : at + chunk.n].copy_(values)
        if made.dtype != values.dtype:
            rounding = rounding.add(_measure(values, rounded, task.tensor))
        at += chunk.n
    return _Piece(view_memory(made), rounding, made)


def _measure(values: Tensor, rounded: Tensor, tensor: WrittenTensor) -> _Rounding:
    """Return the sums over a chunk's values and their rounding.

    Raises:
        UsageError: a finite value is beyond the range of the dtype.
    """
    error = values - rounded
    e = float(torch.linalg.vector_norm(error, dtype=torch.float64))
    if not isfinite(e) and bool((values.isfinite() & ~rounded.isfinite()).any()):
        raise UsageError(
            f"{display(tensor.name)}: its largest value, {float(values.abs().max()):.4g}, is beyond the range of "
            f"{tensor.dtype}: give --dtype bf16 or f32"
        )
    x = float(torch.linalg.vector_norm(values, dtype=torch.float64))
    return _Rounding(x * x, e * e) if isfinite(e) and isfinite(x) else _Rounding()


def _verify(path: Path, pieces: Iterator[_Piece], start: int) -> None:
    """Read a written file back and compare its bytes with a second decoding.

    Raises:
        ResourceError: bytes differ.
    """
    with path.open("rb") as file:
        file.seek(start)
        for piece in pieces:
            if file.read(len(piece.memory)) != piece.memory:
                raise ResourceError(
                    f"{display(str(path))}: its bytes differ from those written: the disk or the memory is faulty"
                )


def _finish(output: Path, files: Sequence[OutputFile], others: Mapping[str, bytes]) -> None:
    """Write the other files of the model, by name, and move everything to the output."""
    folder = _name_partial_folder(output)
    try:
        if is_file_name(output):
            os.replace(folder / output.name, output)
            shutil.rmtree(folder)
        else:
            for name, content in {**others, **make_index(files)}.items():
                (folder / name).parent.mkdir(exist_ok=True)
                with replace_atomically(folder / name, DEFAULT_MODE) as file:
                    file.write(content)
            (folder / IDENTITY_FILE).unlink()
            if output.exists():
                output.rmdir()  # it is empty
            os.replace(folder, output)
        platform.sync_folder(output.absolute().parent)
    except OSError as error:
        raise ResourceError(f"-o {display(str(output))}: {error.strerror}") from error
