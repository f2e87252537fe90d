"""Open checkpoints: headers are read first, tensor bytes only on request."""

import os
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from quanterr.checkpoints import (
    foreign_files,
    gguf_file,
    hub_cache,
    ollama_store,
    onnx_file,
    pickle_file,
    safetensors_file,
)
from quanterr.checkpoints.base import Checkpoint, CheckpointFile, Entry, Unread, close_all, make_open_error
from quanterr.checkpoints.ggml_blocks import type_blocks
from quanterr.checkpoints.gguf_metadata import GgufMetadata
from quanterr.checkpoints.modules import MODEL_FILE, find_modules
from quanterr.checkpoints.places import (
    Place,
    find_missing,
    is_folder,
    is_missing,
    list_names,
    open_file,
    read_small_file,
)
from quanterr.checkpoints.stores import remote_path
from quanterr.checkpoints.unread import ADAPTER, COMPUTED, WEIGHT_SUFFIXES, find_unread
from quanterr.errors import CheckpointError, UsageError
from quanterr.util import strict_json
from quanterr.util.addresses import is_address, strip_credentials
from quanterr.util.platform import with_slashes
from quanterr.util.strict_json import JsonObject
from quanterr.util.text import count, display, itemize

__all__ = [
    "Checkpoint",
    "CheckpointFile",
    "Entry",
    "GgufMetadata",
    "open_checkpoint",
    "open_checkpoints",
    "open_readable",
]

GGUF = ".gguf"
SUFFIXES = (*WEIGHT_SUFFIXES, GGUF)
INDEX_SUFFIX = ".safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
PICKLE_INDEX_SUFFIX = ".bin.index.json"
# Pickles beside weights that hold something else.
OTHER_PICKLES = re.compile(
    r"(?:optimizer|scheduler|scaler|rng_state|random_states|training_args|trainer_state|qmodel)[._\d].*|.*_cache\.pt"
)
SHARD = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<total>\d{5})(?P<suffix>\.\w+)")
# Files next to config.json that declare only a quantization.
MODELOPT_CONFIG = "hf_quant_config.json"
QUANTIZATION_CONFIGS = ("quantize_config.json", "quant_config.json", "quantization_config.json")
ASCEND_CONFIG = "quant_model_description.json"  # written by ModelSlim: the type of each tensor, by its name
JANG_CONFIG = "jang_config.json"  # beside MLX's codes: the widths and the group of all of them
SINQ_CONFIG, QUANTO_MAP = "model.safetensors.index.json.meta.json", "quanto_qmap.json"  # settings of each layer
OF_CODES = {SINQ_CONFIG: ".W_q", QUANTO_MAP: "._data"}  # files that are beside codes of such names only
CONFIGS = ("config.json", MODELOPT_CONFIG, *QUANTIZATION_CONFIGS, ASCEND_CONFIG, JANG_CONFIG, "params.json")
PIPELINE = "model_index.json"  # the file at the root of a diffusers pipeline
DENOISERS = ("transformer", "transformer_2", "unet")  # folders of a pipeline
MAX_INDEX = 256 * 2**20
MAX_CONFIG, MAX_NAMES = 16 * 2**20, 64 * 2**20  # bytes; the second for a file that names each tensor


def open_checkpoint(
    path: str | os.PathLike[str], lenient: bool = False, cache: str | os.PathLike[str] | None = None
) -> Checkpoint:
    """Open a checkpoint and read its headers; no weight is read.

    ``path`` is a ``.safetensors``, ``.sft``, ``.gguf`` or ``.onnx`` file, a file of torch.save (``.bin``, ``.pt``,
    ``.pth``, ``.ckpt``, of which nothing is executed), a folder with an index or with the shards of one model, an
    index, ``org/name`` in the local Hugging Face cache, ``ollama:NAME`` in Ollama's store, or an address
    (``hf://org/name@revision/file``, ``https://…``, ``s3://…``). One shard of a split GGUF opens all of them, and the
    folder of a pipeline of diffusers its denoiser.

    ``lenient`` accepts, and notes, non-standard but unambiguous files: bytes after the last tensor, a header padded
    with characters other than spaces or preceded by white space, names of more than 4096 characters.

    ``cache`` is a folder that keeps the bytes read from a store for the next run.

    Raises:
        CheckpointError: the checkpoint is missing, unreadable or damaged, or the path is not a checkpoint.
        UsageError: the folder holds several checkpoints, or the library that reads the address is not installed.
        ResourceError: too many files are open, or the store does not answer.
    """
    given = os.fspath(path)
    where: Place = Path(given)
    revision = None
    try:
        if given.startswith(ollama_store.PREFIX) and not os.path.lexists(given):
            model = ollama_store.find_model(given, DENOISERS)
            return _open_files(given, "file", model.files, None, None, lenient, model.configs)
        if is_address(given) and not given.startswith("hf://"):  # hf:// may be in the local cache
            where, revision = remote_path(given, cache)
        elif given.startswith("hf://") or (hub_cache.is_model_id(given) and not os.path.lexists(given)):
            where, revision = _find_on_hub(given, cache)
        if is_folder(where):
            if denoiser := _find_denoiser(where):
                where /= denoiser
                scheme = "hf://" if hub_cache.is_model_id(given) and not os.path.lexists(given) else ""
                given = f"{scheme}{given.rstrip('/')}/{denoiser}"
            kind, paths, index = _resolve_folder(where)
        elif where.name.endswith(".index.json"):
            kind, (paths, index) = "index", _read_index(where)
        else:
            kind, paths, index = "file", _add_other_shards(where), None
        return _open_files(with_slashes(strip_credentials(given)), kind, paths, index, revision, lenient)
    except OSError as error:
        raise make_open_error(Path(str(where)), error) from error
    except ValueError as error:
        raise CheckpointError(f"{display(given)}: not a file name") from error


@contextmanager
def open_checkpoints(
    sides: Iterable[str | os.PathLike[str] | Checkpoint],
    lenient: bool = False,
    cache: str | os.PathLike[str] | None = None,
) -> Iterator[list[Checkpoint]]:
    """Open the paths among the sides of a run like :func:`open_checkpoint`, and close them at the end.

    Checkpoints that are open already are shared as they are, and left open.
    """
    with ExitStack() as stack:
        yield [
            side if isinstance(side, Checkpoint) else stack.enter_context(open_checkpoint(side, lenient, cache))
            for side in sides
        ]


class Unreadable(NamedTuple):
    """A checkpoint that is there but cannot be read, among several that can."""

    path: str
    reason: str


@contextmanager
def open_readable(
    sides: Iterable[str | os.PathLike[str] | Checkpoint | Unreadable],
    lenient: bool = False,
    cache: str | os.PathLike[str] | None = None,
) -> Iterator[list[Checkpoint | Unreadable]]:
    """Open the paths of several sides like :func:`open_checkpoints`, and go on where one is damaged.

    Raises:
        CheckpointError: a path does not exist.
    """
    with ExitStack() as stack:
        checkpoints: list[Checkpoint | Unreadable] = []
        for side in sides:
            if isinstance(side, Checkpoint | Unreadable):
                checkpoints.append(side)
                continue
            try:
                checkpoints.append(stack.enter_context(open_checkpoint(side, lenient, cache)))
            except CheckpointError as error:
                if not os.path.exists(side):
                    raise
                checkpoints.append(Unreadable(os.fspath(side), str(error)))
        yield checkpoints


def require_readable(sides: Sequence[object], minimum: int) -> None:
    """Check that enough of several sides can be read.

    Raises:
        CheckpointError: fewer than ``minimum`` can, for the reason of the first that cannot.
    """
    unreadable = [side for side in sides if isinstance(side, Unreadable)]
    if unreadable and len(sides) - len(unreadable) < minimum:
        raise CheckpointError(unreadable[0].reason)


def _find_on_hub(given: str, cache: str | os.PathLike[str] | None) -> tuple[Place, str | None]:
    """Find a model in the local cache, or on the hub if the address is ``hf://``; also return its commit.

    Raises:
        CheckpointError: the model is in neither.
    """
    try:
        return hub_cache.find_snapshot(given)
    except CheckpointError as error:
        if not given.startswith("hf://") or not hub_cache.names_a_model(given) or not hub_cache.may_ask_the_hub():
            raise
        try:
            return remote_path(given, cache)
        except UsageError as missing:
            raise CheckpointError(f"{error}; or read it from the hub: {missing}") from missing


def _find_denoiser(folder: Place) -> str | None:
    """Return the name of the folder with the denoiser, if ``folder`` is a pipeline of diffusers without weights.

    Raises:
        UsageError: it has several denoisers, as Wan 2.2 has one for each range of noise.
    """
    names = list_names(folder)
    if PIPELINE not in names or any(name.endswith((*SUFFIXES, INDEX_SUFFIX)) for name in names):
        return None
    denoisers = [name for name in DENOISERS if is_folder(folder / name)]
    if len(denoisers) > 1:
        raise UsageError(
            f"{display(str(folder))}: a pipeline with several denoisers, choose one of "
            f"{itemize([str(folder / name) for name in denoisers])}"
        )
    return denoisers[0] if denoisers else None


class _Index(NamedTuple):
    """The content of a safetensors index."""

    shards: dict[str, str]  # tensor → file name of its shard
    total_size: object


def _resolve_folder(folder: Place) -> tuple[str, Sequence[Place], _Index | None]:
    names = list_names(folder)
    indexes = [name for name in names if name.endswith(INDEX_SUFFIX)]
    if "model" + INDEX_SUFFIX in indexes:
        indexes = ["model" + INDEX_SUFFIX]
    candidates = indexes or [name for name in names if name.endswith(SUFFIXES) and name != COMPUTED]
    if not candidates:
        indexes = [name for name in names if name.endswith(PICKLE_INDEX_SUFFIX)]
        candidates = indexes or [name for name in names if name.endswith(PICKLES) and not OTHER_PICKLES.fullmatch(name)]
        candidates = candidates or [name for name in names if name.endswith(onnx_file.SUFFIX)]
    if len(indexes) == 1:
        return "folder", *_read_index(folder / indexes[0])
    if any(not name.startswith("consolidated") for name in candidates):
        # Mistral ships the same weights twice; the other files use the usual tensor names.
        candidates = [name for name in candidates if not name.startswith("consolidated")]
    if not all(map(ADAPTER.match, candidates)):
        candidates = [name for name in candidates if not ADAPTER.match(name)]
    if not candidates:
        seen = f"it holds {itemize(names)}" if names else "it is empty"
        kinds = ", ".join(
            f"*{suffix}" for suffix in (INDEX_SUFFIX, *SUFFIXES, PICKLE_INDEX_SUFFIX, *PICKLES, onnx_file.SUFFIX)
        )
        raise CheckpointError(
            f"{display(str(folder))}: no checkpoint found (looked for {kinds}; {seen}){foreign_files.advise(names)}"
        )
    shards = [SHARD.fullmatch(name) for name in candidates]
    if len(candidates) == 1 and not shards[0]:
        return "folder", [folder / candidates[0]], None
    series = {(match["stem"], match["total"], match["suffix"]) for match in shards if match}
    if None in shards or len(series) != 1 or len(candidates) > int(next(iter(series))[1]):
        candidates += [f"{name}/" for name in DENOISERS if name in names and PIPELINE in names]
        raise UsageError(f"{display(str(folder))}: ambiguous, choose one of {itemize(candidates, 20)}")
    return "folder", _list_series(folder, *series.pop()), None


def _list_series(folder: Place, stem: str, total: str, suffix: str) -> Sequence[Place]:
    """Return the paths of all shards of a series; raise CheckpointError if one is missing."""
    expected = [f"{stem}-{number:05}-of-{total}{suffix}" for number in range(1, int(total) + 1)]
    _require_shards(folder, expected)
    return [folder / name for name in expected]


def _add_other_shards(path: Place) -> Sequence[Place]:
    """Return the file, or all shards of a split GGUF, as a single shard does not list all tensors."""
    match = SHARD.fullmatch(path.name)
    if not match or match["suffix"] != GGUF or not 1 <= int(match["number"]) <= int(match["total"]):
        return [path]
    return _list_series(path.parent, match["stem"], match["total"], GGUF)


def _read_index(path: Place) -> tuple[Sequence[Place], _Index]:
    """Read an index; return the paths of its shards, sorted, and its content."""
    file = open_file(path)
    try:
        if file.size > MAX_INDEX:
            raise CheckpointError(f"{file}: index of {file.size} bytes; the limit is {MAX_INDEX}")
        index = strict_json.loads(file.read(0, file.size))
    except strict_json.InvalidJson as error:
        raise CheckpointError(f"{file}: index {display(str(error))}") from error
    finally:
        file.close()
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f'{file}: index has no "weight_map"')
    for shard in weight_map.values():
        if not isinstance(shard, str) or shard in ("", ".", "..") or any(character in shard for character in "/\\:\0"):
            raise CheckpointError(f"{file}: index: shard name {display(repr(shard))} is not a plain file name")
    names = sorted(set(weight_map.values()))
    _require_shards(path.parent, names)
    metadata = index.get("metadata")
    total_size = metadata.get("total_size") if isinstance(metadata, dict) else None
    return [path.parent / name for name in names], _Index(weight_map, total_size)


def _require_shards(folder: Place, names: list[str]) -> None:
    missing = find_missing(folder, names)
    if missing:
        raise CheckpointError(
            f"{display(str(folder))}: {len(missing)} of {len(names)} shards missing: {itemize(missing, 20)}"
        )


def _open_files(
    given: str,
    kind: str,
    paths: Sequence[Place],
    index: _Index | None,
    revision: str | None,
    lenient: bool,
    configs: Mapping[str, Place] | None = None,
) -> Checkpoint:
    """Open files; ``configs`` are the config files by their names, if these are not their names in the folder."""
    files: list[CheckpointFile] = []
    entries: dict[str, Entry] = {}
    metadata: list[dict[str, str]] = []
    stated: list[tuple[dict[str, str], list[str]]] = []  # metadata and names of tensors of each file
    ggufs: list[GgufMetadata] = []
    notes: list[str] = []
    folder = paths[0].parent
    unnamed: list[str] = []
    whole = kind == "folder" and isinstance(folder, Path)
    stored = list_names(folder) if whole or index is not None else []  # ask a store only if there is an index
    try:
        for path in paths:
            files.append(open_file(path))
            new_entries, header, odd, beside = _read_header(files[-1], folder, lenient)
            if isinstance(header, GgufMetadata):
                ggufs.append(header)
                header = {}
            files += beside
            metadata += [header, *({} for _ in beside)]
            stated.append((header, [entry.name for entry in new_entries]))
            notes += odd
            _add(entries, new_entries)
        if index is not None:
            notes += _check_index(index.shards, entries, display(given))
            unnamed = _find_unnamed(paths, stored)
            if unnamed:
                notes.append(
                    f"{display(given)}: index does not name {itemize(unnamed)}, which "
                    f"{'is' if len(unnamed) == 1 else 'are'} in the same folder; ignored"
                )
            notes += _check_size(index.total_size, entries, display(given))
        modules: list[str] = []
        unread: list[Unread] = []
        if kind == "folder":  # a user who names a file or an index means nothing else
            unread += find_unread(folder, stored, [*(path.name for path in paths), *unnamed], entries)
            if not ggufs:
                modules = find_modules(folder)
        for module in modules:
            files.append(open_file(folder / module / MODEL_FILE))
            new_entries, header, odd = safetensors_file.read_header(files[-1], lenient)
            metadata.append(header)
            notes += odd
            _add(entries, [replace(entry, name=f"{module}.{entry.name}") for entry in new_entries])
        notes += _note_twins(entries, display(given))
        config: dict[str, JsonObject] = {}
        if ggufs:  # a GGUF file describes itself: config files in its folder belong to another checkpoint
            _check_split(files, ggufs, len(entries))
        else:
            config, odd = _read_configs(folder, entries, configs)
            notes += odd
            if declared := ollama_store.find_declared(stated):
                config = ollama_store.declare(config, declared, (MODELOPT_CONFIG, *QUANTIZATION_CONFIGS))
            entries = type_blocks(entries, config)
    except BaseException:
        close_all(files)
        raise
    gguf = ggufs[0] if ggufs else None
    return Checkpoint(
        given,
        kind,
        tuple(files),
        entries,
        tuple(metadata),
        config,
        revision,
        tuple(notes),
        gguf,
        folder,
        tuple(unread),
        modules=tuple(modules),
    )


def _add(entries: dict[str, Entry], new_entries: Iterable[Entry]) -> None:
    """Add the entries of a file; raise CheckpointError if another file has one of the same name."""
    for entry in new_entries:
        if entry.name in entries:
            first = entries[entry.name].file
            raise CheckpointError(f"{itemize([entry.name])} is in {first} and in {entry.file}")
        entries[entry.name] = entry


def _read_header(
    file: CheckpointFile, folder: Place, lenient: bool
) -> tuple[list[Entry], dict[str, str] | GgufMetadata, list[str], list[CheckpointFile]]:
    """Read the entries, metadata and notes of a file; its first bytes decide the format, not its name.

    The last part of the result are further files, opened here, that hold the bytes of its tensors.
    """
    if onnx_file.is_onnx(file):
        return onnx_file.read_header(file, folder, lenient)
    if pickle_file.is_pickle(file):
        return *pickle_file.read_header(file, lenient), []
    if not gguf_file.is_gguf(file):
        content = safetensors_file.read_header(file, lenient)
        if file.path.suffix == GGUF:
            content[2].append(f"{file}: is a safetensors file, despite its name")
        return *content, []
    header = gguf_file.read_header(file, lenient)
    if file.path.suffix in WEIGHT_SUFFIXES:
        header.notes.append(f"{file}: is a GGUF file, despite its name")
    return *header, []


def _check_split(files: list[CheckpointFile], ggufs: list[GgufMetadata], n_tensors: int) -> None:
    """Check that the shards of a split GGUF are complete and in order, by their split.* keys."""
    if len(ggufs) < len(files):
        raise CheckpointError(f"{files[0]}: only {len(ggufs)} of {len(files)} shards are GGUF files")
    for number, (file, metadata) in enumerate(zip(files, ggufs, strict=True)):
        total, shard_number = metadata.get_int("split.count") or 1, metadata.get_int("split.no") or 0
        if total != len(files) or shard_number != number:
            hint = (
                f"its name should end in -{shard_number + 1:05}-of-{total:05}{GGUF}, in the same folder as the others"
            )
            raise CheckpointError(
                f"{file}: shard {shard_number + 1} of {total} (split.no, split.count), but opened as {number + 1} of "
                f"{len(files)}; {hint}"
            )
        tensors = metadata.get_int("split.tensors.count")
        if total > 1 and tensors is not None and tensors != n_tensors:
            expected = count(tensors, "tensor")
            raise CheckpointError(f"{file}: split.tensors.count states {expected}, the shards hold {n_tensors}")


def _check_index(index: dict[str, str], entries: dict[str, Entry], given: str) -> list[str]:
    """Check that all tensors of the index are in the shards that it names; return a note on tensors that it omits."""
    for name, shard in index.items():
        if name not in entries or entries[name].file.path.name != shard:
            raise CheckpointError(f"{given}: index: {display(name)} is not in {display(shard)}")
    unlisted = [name for name in entries if name not in index]
    return [f"{given}: index does not list {itemize(unlisted)}; compared anyway"] if unlisted else []


def _check_size(total: object, entries: dict[str, Entry], given: str) -> list[str]:
    """Return a note if total_size in the index differs from the bytes of the tensors."""
    stored = sum(entry.nbytes for entry in entries.values())
    if not isinstance(total, int | float) or not total or total == stored:
        return []
    return [f"{given}: index states {total:,} bytes (total_size), its tensors have {stored:,}: is it outdated?"]


def _find_unnamed(paths: Sequence[Place], stored: Sequence[str]) -> list[str]:
    """Return files in the same folder that the index does not name: shards of the same series, or a whole model."""
    series = {
        (match["stem"], match["total"], match["suffix"]) for path in paths if (match := SHARD.fullmatch(path.name))
    }
    matches = [match for name in stored if (match := SHARD.fullmatch(name))]
    names = [match[0] for match in matches if (match["stem"], match["total"], match["suffix"]) in series]
    names += [MODEL_FILE] if MODEL_FILE in stored else []
    return [name for name in names if paths[0].parent / name not in paths]


def _note_twins(names: Iterable[str], given: str) -> list[str]:
    """Return a note on names that look the same to people and may be meant to be one tensor."""
    first: dict[str, str] = {}
    twins = []
    for name in names:
        looks = name.lower() if name.isascii() else unicodedata.normalize("NFC", name).casefold()
        other = first.setdefault(looks, name)
        if other is not name:
            twins.append(f"{other!a} and {name!a}")
    return [f"{given}: names that differ only by case or in how accents are stored: {itemize(twins)}"] if twins else []


def _read_configs(
    folder: Place, names: Iterable[str], configs: Mapping[str, Place] | None
) -> tuple[dict[str, JsonObject], list[str]]:
    """Read the config files in the folder of the weights, one key per file; return them and notes on unreadable ones.

    Configs are hints: whatever they declare, a weight is read only by a format that fits its stored tensors.
    """
    contents: dict[str, JsonObject] = {}
    notes = []
    limits, stored = dict.fromkeys((ASCEND_CONFIG, SINQ_CONFIG, QUANTO_MAP), MAX_NAMES), list(names)
    for name in (
        *CONFIGS,
        *(file for file, ending in OF_CODES.items() if any(stored_name.endswith(ending) for stored_name in stored)),
    ):
        path = folder / name if configs is None else configs.get(name)
        if path is None or is_missing(path):
            continue
        try:
            content = strict_json.loads(read_small_file(path, limits.get(name, MAX_CONFIG)), lenient=True)
            contents[name] = strict_json.as_object(content)
        except FileNotFoundError:
            continue
        except (OSError, ValueError, CheckpointError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            notes.append(f"{display(str(path))}: ignored: {display(str(reason))}")
    return contents, notes
