"""VPTQ: vectors of a few rows of one column from codebooks, one for each group of columns, and their residuals.

    indices                     i32           (groups, n, words): of each n-th vector of rows a little-endian stream,
                                              for each column of the group log2 C bits of the index into centroids,
                                              then log2 R bits of that into res_centroids; or
                                i16, u16      (groups, n, columns of a group), and so res_indices
    centroids.weight            f16 …         (groups, C · v): C vectors of v rows; n = rows / v, rounded up
    res_centroids.weight        f16 …         (groups, R · v); optional
    outlier_indices             i16 …         (1, m, outliers): indices of the first columns, into
    outlier_centroids.weight    f16 …         (1, O · w), O vectors of w rows; m = rows / w, rounded up; optional
    perm                        i16 … i64     (cols,): which column of the weight is stored at a place; optional
    weight_scale, weight_bias   f16 …         (cols,); optional

    stored[:, c] = centroids[index] + res_centroids[residual index]                                     rounded
    weight[:, perm[c]] = stored[:, c]; then weight * weight_scale + weight_bias               rounded, each of both

What is beyond rows and cols is padding. v is that for which all shapes fit; where several do, config.json must
give it (config_for_layers or shared_layer_config: vector_lens).

Reference: microsoft/VPTQ@950716d7 vptq/ops/quant_gemm.py dequant, vptq/utils/pack.py; ModelCloud/GPTQModel@f4c327a1
gptqmodel/nn_modules/qlinear/vptq_torch.py.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from quanterr.checkpoints import Entry
from quanterr.errors import CheckpointError
from quanterr.formats.base import WEIGHT_SUFFIX, Chunk, Format, FormatMismatch, Part, Parts, Values, Weight, Workspace
from quanterr.formats.shared.config_checks import check_permutation, check_told, integers
from quanterr.formats.shared.padding import crop
from quanterr.util.strict_json import JsonFields

FLOATS = frozenset({"F16", "BF16", "F32"})
SHORTS = frozenset({"I16", "U16"})
INTEGERS = SHORTS | {"I32"}
MASKS = {"I16": 0xFFFF, "U16": 0xFFFF, "I32": 0xFFFFFFFF, "I64": -1}  # they are unsigned
WORD = 32
READ = {"norm_dim": 0, "vector_quant_dim": "out"}  # settings of config.json, and what is read
PROMISED = {  # by settings of config.json
    "enable_norm": "scale",
    "enable_perm": "order",
    "outlier_size": "outlier_indices",
    "num_res_centroids": "res_centroids",
}
NEEDS = {
    "indices": Part(("{module}.indices",), INTEGERS),
    "centroids": Part(("{module}.centroids.weight",), FLOATS),
    "res_indices": Part(("{module}.res_indices",), SHORTS, optional=True),
    "res_centroids": Part(("{module}.res_centroids.weight",), FLOATS, optional=True),
    "outlier_indices": Part(("{module}.outlier_indices",), INTEGERS, optional=True),
    "outlier_centroids": Part(("{module}.outlier_centroids.weight",), FLOATS, optional=True),
    "order": Part(("{module}.perm",), INTEGERS | {"I64"}, optional=True),
    "scale": Part(("{module}.weight_scale",), FLOATS, optional=True),
    "bias": Part(("{module}.weight_bias",), FLOATS, optional=True),
}


class Codebook(NamedTuple):
    """The vectors of all groups: ``size`` of ``rows`` rows in each."""

    entry: Entry
    rows: int
    size: int

    @property
    def bits(self) -> int:
        """Of an index."""
        return self.size.bit_length() - 1


class Layer(NamedTuple):
    """What shapes and config.json give; (rows, cols) of the weight."""

    rows: int
    cols: int
    group_cols: int
    main: Codebook
    residual: Codebook | None
    outliers: Codebook | None


def fit(parts: Parts) -> Weight:
    """The weight of the shape that the original or config.json gives."""
    settings = _settings(parts)
    rows, cols = _shape(parts, settings)
    for name, value in READ.items():
        if settings.get(name, value) != value:
            raise FormatMismatch(
                f"config.json declares {name} {settings[name]}, but only VPTQ with {value} is supported"
            )
    _check_promised(parts, settings)
    for one, other in (("outlier_indices", "outlier_centroids"), ("scale", "bias")):
        if (parts.get(one) is None) != (parts.get(other) is None):
            raise FormatMismatch(
                f"{parts.get(one) or parts.get(other)} has no {other if parts.get(one) else one} beside it"
            )
    for role in ("order", "scale", "bias"):
        if (entry := parts.get(role)) and entry.shape != (cols,):
            raise FormatMismatch(f"{entry} should have one for each of {cols} columns")
    if order := parts.get("order"):
        check_permutation(order, [number & MASKS[order.dtype] for number in integers(order)])
    layer = _layer(parts, settings, rows, cols)
    books = [f"{book.size} vectors" for book in (layer.main, layer.residual) if book]
    return parts.weight(
        (rows, cols),
        partial(dequantize, parts, layer),
        evidence=(
            f"VPTQ, {' and '.join(books)} of {layer.main.rows} rows in each of {layer.main.entry.shape[0]} groups",
        ),
        warnings=check_told(parts, "vptq"),
    )


def _settings(parts: Parts) -> JsonFields:
    """What config.json declares of the layer."""
    module = parts.name.removesuffix(WEIGHT_SUFFIX)
    for place, name in (("config_for_layers", module), ("shared_layer_config", module.rpartition(".")[2])):
        layers = parts.hints.config.get(place)
        found = layers.get(name) if isinstance(layers, dict) else None
        if isinstance(found, dict):
            return found
    return {}


def _check_promised(parts: Parts, settings: JsonFields) -> None:
    """Exactly the parts that config.json declares have to be stored: without one the weight is another."""
    for name, role in PROMISED.items():
        declared, stored = settings.get(name), parts.get(role) is not None
        number = (
            declared[1] if isinstance(declared, list) and len(declared) == 2 else declared
        )  # of two the first is of outliers
        if isinstance(number, int) and (number > 0) != stored:
            raise FormatMismatch(
                f"config.json declares {name} {declared}, but {NEEDS[role].names[0].removeprefix('{module}.')} is "
                + ("stored" if stored else "missing")
            )


def _shape(parts: Parts, settings: JsonFields) -> tuple[int, int]:
    shape = parts.hints.shape or (settings.get("out_features"), settings.get("in_features"))
    if len(shape) != 2 or not all(isinstance(n, int) and n > 0 for n in shape):
        raise FormatMismatch(
            "VPTQ pads rows and columns: without an original config.json must say out_features and in_features"
        )
    return int(shape[0] or 0), int(shape[1] or 0)


def _layer(parts: Parts, settings: JsonFields, rows: int, cols: int) -> Layer:
    indices, centroids, res_centroids = parts["indices"], parts["centroids"], parts.get("res_centroids")
    if len(indices.shape) != 3 or not indices.n:
        raise FormatMismatch(f"VPTQ indices are (groups, vectors, words), not {indices}")
    packed = indices.dtype == "I32"
    if (res_centroids is not None and not packed) != (parts.get("res_indices") is not None):
        raise FormatMismatch(
            f"{indices}: residual indices are stored alone if the others are, as I16, and else with them"
        )
    outliers = _outliers(parts, settings, rows)
    groups, main_cols = indices.shape[0], cols - (parts["outlier_indices"].shape[2] if outliers else 0)
    declared = settings.get("group_size")
    group_cols = declared if isinstance(declared, int) and declared > 0 else -(-main_cols // groups)
    group_cols = group_cols if packed else indices.shape[2]
    if not (groups - 1) * group_cols < main_cols <= groups * group_cols:
        raise FormatMismatch(f"{indices}: {groups} groups of {group_cols} columns are not {main_cols} columns")
    books = [centroids, res_centroids] if res_centroids else [centroids]
    found = [
        fitting
        for fitting in _codebooks(indices, rows, groups, books, _told_rows(settings, 1))
        if not packed or indices.shape[2] == -(-group_cols * sum(book.bits for book in fitting) // WORD)
    ]
    main, *residual = _only(found, indices, rows, _told_rows(settings, 1))
    if parts.get("res_indices") and parts["res_indices"].shape != indices.shape:
        raise FormatMismatch(f"{parts['res_indices']} should be of the shape of {indices}")
    return Layer(rows, cols, group_cols, main, residual[0] if residual else None, outliers)


def _outliers(parts: Parts, settings: JsonFields, rows: int) -> Codebook | None:
    indices = parts.get("outlier_indices")
    if indices is None:
        return None
    if len(indices.shape) != 3 or indices.shape[0] != 1 or not indices.n:
        raise FormatMismatch(f"outlier indices are (1, vectors, columns), not {indices}")
    found = _codebooks(indices, rows, 1, [parts["outlier_centroids"]], _told_rows(settings, 0))
    return _only(found, indices, rows, _told_rows(settings, 0))[0]


def _told_rows(settings: JsonFields, place: int) -> int | None:
    """Rows of a vector, as config.json declares: vector_lens is [of outliers, of the others]."""
    lens = settings.get("vector_lens")
    declared = lens[place] if isinstance(lens, list) and len(lens) == 2 else None
    return declared if isinstance(declared, int) and declared > 0 else None


def _codebooks(
    indices: Entry, rows: int, groups: int, books: list[Entry], declared: int | None
) -> Iterator[tuple[Codebook, ...]]:
    """The codebooks as vectors of each length that fits rows and shapes."""
    for book in books:
        if len(book.shape) != 2 or book.shape[0] != groups:
            raise FormatMismatch(f"{book} should have a row for each of {groups} groups")
    n = indices.shape[1]
    most = (rows - 1) // (n - 1) if n > 1 else books[0].shape[1]
    for length in range(-(-rows // n), most + 1):
        found = tuple(Codebook(book, length, book.shape[1] // length) for book in books)
        fits = all(book.size > 1 and book.rows * book.size == book.entry.shape[1] for book in found)
        if fits and all(book.size == 1 << book.bits for book in found) and declared in (None, length):
            yield found


def _only(
    found: Iterable[tuple[Codebook, ...]], indices: Entry, rows: int, declared: int | None
) -> tuple[Codebook, ...]:
    candidates = list(found)
    if len(candidates) != 1:
        if declared:
            raise FormatMismatch(
                f"{indices}: config.json declares vectors of {declared} rows (vector_lens), which do not fit "
                f"{rows} rows"
            )
        lengths = " and ".join(str(books[0].rows) for books in candidates)
        fitting = f"vectors of {lengths} rows fit" if candidates else "no length of vectors fits"
        raise FormatMismatch(f"{indices}: {fitting}, for {rows} rows; config.json should declare it (vector_lens)")
    return candidates[0]


def dequantize(parts: Parts, layer: Layer, chunk: Chunk, workspace: Workspace) -> Values:
    """(centroid + residual) · weight_scale + weight_bias, (r, c)."""
    r = chunk.stop_row - chunk.row
    values = workspace.output((r, layer.cols))
    stored = workspace.buffer("stored", (r, layer.cols), torch.float32) if parts.get("order") else values
    outliers = 0
    if layer.outliers:
        index = _read_rows("outlier index", parts["outlier_indices"], 0, layer.outliers, chunk, workspace)
        outliers = index.shape[1]
        stored[:, :outliers] = _expanded("outlier", index, layer.outliers, chunk, workspace)
    main, residual = _indices(parts, layer, chunk, workspace)
    stored[:, outliers:] = _expanded("main", main, layer.main, chunk, workspace)[:, : layer.cols - outliers]
    if residual is not None and layer.residual:
        rest = _expanded("residual", residual, layer.residual, chunk, workspace)
        stored[:, outliers:] += rest[:, : layer.cols - outliers]
    if order := parts.get("order"):
        torch.index_select(stored, 1, _inverse(order, workspace), out=values)
    if (scale := parts.get("scale")) and (bias := parts.get("bias")):
        values.mul_(workspace.whole("scale", scale).float()).add_(workspace.whole("bias", bias).float())
    return Values(crop(values, chunk, workspace))


def _indices(parts: Parts, layer: Layer, chunk: Chunk, workspace: Workspace) -> tuple[Tensor, Tensor | None]:
    """Of the vectors that have rows in the chunk, (vectors, columns): into the centroids of all groups, one after
    the other, and into those of the residuals."""
    entry, main, residual = parts["indices"], layer.main, layer.residual
    packed = entry.dtype == "I32"
    found: list[Tensor] = []
    rest: list[Tensor] = []
    for group in range(entry.shape[0]):
        codes = _read_rows("index", entry, group, main, chunk, workspace)
        if packed:
            codes = _unpacked(codes, main.bits + (residual.bits if residual else 0), layer.group_cols)
        found.append((codes & main.size - 1 if packed else codes) + group * main.size)
        if residual and not packed:
            codes = _read_rows("residual index", parts["res_indices"], group, residual, chunk, workspace)
        if residual:
            rest.append((codes >> main.bits if packed else codes) + group * residual.size)
    return torch.cat(found, 1), torch.cat(rest, 1) if rest else None


def _read_rows(key: str, entry: Entry, group: int, book: Codebook, chunk: Chunk, workspace: Workspace) -> Tensor:
    """Stored integers of the vectors that have rows in the chunk, (vectors, words) int64."""
    _, n, words = entry.shape
    first, stop = chunk.row // book.rows, -(-chunk.stop_row // book.rows)
    stored = workspace.read(key, entry, (group * n + first) * words, (stop - first, words))
    return stored.long() & MASKS[entry.dtype]


def _unpacked(words: Tensor, bits: int, n: int) -> Tensor:
    """The first ``n`` values of little-endian streams of 32-bit words, one per row: (r, n) int64."""
    start = torch.arange(n, device=words.device) * bits
    low = words.index_select(1, start // WORD)
    high = words.index_select(1, (start // WORD + 1).clamp_(max=words.shape[1] - 1))
    return (high << WORD | low) >> start % WORD & (1 << bits) - 1


def _expanded(key: str, index: Tensor, book: Codebook, chunk: Chunk, workspace: Workspace) -> Tensor:
    """The vectors of an index, of the rows of the chunk: (r, columns) float32."""

    def make() -> Tensor:
        stored = workspace.whole(f"{key} codebook", book.entry)
        return workspace.buffer(f"{key} table", tuple(stored.shape), torch.float32).copy_(stored)

    table = workspace.made(f"{key} table", book.entry, 0, make).view(-1, book.rows)
    if int(index.max()) >= len(table):
        raise CheckpointError(
            f"{book.entry.file}: an index of {int(index.max())} into the {len(table)} of {book.entry}"
        )
    vectors = workspace.buffer(f"{key} vectors", (index.numel(), book.rows), torch.float32)
    torch.index_select(table, 0, index.reshape(-1), out=vectors)
    n, cols = index.shape
    rows = workspace.buffer(f"{key} rows", (n, book.rows, cols), torch.float32)
    rows.copy_(vectors.view(n, cols, book.rows).transpose(1, 2))
    skipped = chunk.row % book.rows
    return rows.view(-1, cols)[skipped : skipped + chunk.stop_row - chunk.row]


def _inverse(order: Entry, workspace: Workspace) -> Tensor:
    """Where each column of the weight is stored, (cols,) int64."""

    def make() -> Tensor:
        stored = workspace.whole("order", order).long() & MASKS[order.dtype]
        return torch.argsort(stored)

    return workspace.made("inverse", order, 0, make)


FORMATS = (Format("vptq", NEEDS, fit),)
