"""VPTQ: vectors of a few rows of one column, from codebooks per group of columns, plus residual vectors.

    indices                     i32           (groups, n, words): for each of n vectors of rows a stream, little-endian
                                              (for each column of the group log2 C bits of the index into
                                              centroids, then log2 R bits into res_centroids); or
                                i16, u16      (groups, n, columns of a group), with res_indices alike
    centroids.weight            f16 …         (groups, C · v): C vectors of v rows; n = rows / v, rounded up
    res_centroids.weight        f16 …         (groups, R · v); optional
    outlier_indices             i16 …         (1, m, outliers): indices of the first columns into outlier_centroids
    outlier_centroids.weight    f16 …         (1, O · w), O vectors of w rows; m = rows / w, rounded up; optional
    perm                        i16 … i64     (cols,): column of the weight that is stored at each place; optional
    weight_scale, weight_bias   f16 …         (cols,); optional

    stored[:, c] = centroids[index] + res_centroids[residual index]                                     rounded
    weight[:, perm[c]] = stored[:, c]; then weight * weight_scale + weight_bias             rounded, each operation

Elements beyond rows and cols are padding. v is the length for which all shapes fit; if several fit, config.json must
give it (config_for_layers or shared_layer_config: vector_lens).

Reference: microsoft/VPTQ@950716d7 vptq/ops/quant_gemm.py dequant, vptq/utils/pack.py; ModelCloud/GPTQModel@f4c327a1
gptqmodel/nn_modules/qlinear/vptq_torch.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import NamedTuple

from quanterr.checkpoints import Entry
from quanterr.errors import CheckpointError
from quanterr.formats.base import (
    WEIGHT_SUFFIX,
    Chunk,
    Format,
    FormatMismatch,
    Parts,
    PartSpec,
    Weight,
)
from quanterr.formats.shared.config_checks import check_permutation, check_quant_method, read_integers
from quanterr.formats.shared.custom import Custom, Stored
from quanterr.lazy_torch import Tensor, torch
from quanterr.util.strict_json import JsonFields
from quanterr.util.text import count

FLOATS = frozenset({"F16", "BF16", "F32"})
SHORTS = frozenset({"I16", "U16"})
INTEGERS = SHORTS | {"I32"}
MASKS = {"I16": 0xFFFF, "U16": 0xFFFF, "I32": 0xFFFFFFFF, "I64": -1}  # stored integers are unsigned
WORD = 32
# Settings of config.json, each with its only supported value.
SUPPORTED_SETTINGS = {"norm_dim": 0, "vector_quant_dim": "out"}
REQUIRED_PARTS = {  # setting of config.json, and the part that it requires
    "enable_norm": "scale",
    "enable_perm": "order",
    "outlier_size": "outlier_indices",
    "num_res_centroids": "res_centroids",
}
NEEDS = {
    "indices": PartSpec(("{module}.indices",), INTEGERS),
    "centroids": PartSpec(("{module}.centroids.weight",), FLOATS),
    "res_indices": PartSpec(("{module}.res_indices",), SHORTS, optional=True),
    "res_centroids": PartSpec(("{module}.res_centroids.weight",), FLOATS, optional=True),
    "outlier_indices": PartSpec(("{module}.outlier_indices",), INTEGERS, optional=True),
    "outlier_centroids": PartSpec(("{module}.outlier_centroids.weight",), FLOATS, optional=True),
    "order": PartSpec(("{module}.perm",), INTEGERS | {"I64"}, optional=True),
    "scale": PartSpec(("{module}.weight_scale",), FLOATS, optional=True),
    "bias": PartSpec(("{module}.weight_bias",), FLOATS, optional=True),
}


class VectorCodebook(NamedTuple):
    """The vectors of all groups: ``size`` vectors of ``rows`` rows in each group."""

    entry: Entry
    rows: int
    size: int

    @property
    def bits(self) -> int:
        """The bits of an index."""
        return self.size.bit_length() - 1


class VptqLayout(NamedTuple):
    """The shape, groups and codebooks of a weight, as its parts and config.json imply."""

    rows: int
    cols: int
    group_cols: int
    main: VectorCodebook
    residual: VectorCodebook | None
    outliers: VectorCodebook | None


def fit(parts: Parts) -> Weight:
    """Return the weight with the shape that the original or config.json gives."""
    settings = _read_settings(parts)
    rows, cols = _find_shape(parts, settings)
    for name, value in SUPPORTED_SETTINGS.items():
        if settings.get(name, value) != value:
            raise FormatMismatch(
                f"config.json declares {name} {settings[name]}, but only VPTQ with {value} is supported"
            )
    _check_declared_parts(parts, settings)
    for part, partner in (("outlier_indices", "outlier_centroids"), ("scale", "bias")):
        if (parts.get(part) is None) != (parts.get(partner) is None):
            raise FormatMismatch(
                f"{parts.get(part) or parts.get(partner)} is stored without "
                + NEEDS[partner if parts.get(part) else part].names[0].removeprefix("{module}.")
            )
    for role in ("order", "scale", "bias"):
        if (entry := parts.get(role)) and entry.shape != (cols,):
            raise FormatMismatch(f"{entry} should have one number for each of {cols} columns")
    if order := parts.get("order"):
        check_permutation(order, [number & MASKS[order.dtype] for number in read_integers(order)])
    layer = _fit_layout(parts, settings, rows, cols)
    books = [f"{book.size} vectors" for book in (layer.main, layer.residual) if book]
    return parts.weight(
        (rows, cols),
        Custom(parts.entries, partial(decode, parts, layer)),
        evidence=(
            f"VPTQ, {' and '.join(books)} of {layer.main.rows} rows, {count(layer.main.entry.shape[0], 'group')}",
        ),
        warnings=check_quant_method(parts, "vptq"),
    )


def _read_settings(parts: Parts) -> JsonFields:
    """Return the settings that config.json declares for the layer."""
    module = parts.name.removesuffix(WEIGHT_SUFFIX)
    for place, name in (("config_for_layers", module), ("shared_layer_config", module.rpartition(".")[2])):
        layers = parts.hints.config.get(place)
        layer = layers.get(name) if isinstance(layers, dict) else None
        if isinstance(layer, dict):
            return layer
    return {}


def _check_declared_parts(parts: Parts, settings: JsonFields) -> None:
    """Check that exactly the parts that config.json declares are stored: a missing part would change the weight."""
    for name, role in REQUIRED_PARTS.items():
        declared, stored = settings.get(name), parts.get(role) is not None
        number = (
            declared[1] if isinstance(declared, list) and len(declared) == 2 else declared
        )  # the first of two numbers is for outliers
        if isinstance(number, int) and (number > 0) != stored:
            raise FormatMismatch(
                f"config.json declares {name} {declared}, but {NEEDS[role].names[0].removeprefix('{module}.')} is "
                + ("stored" if stored else "missing")
            )


def _find_shape(parts: Parts, settings: JsonFields) -> tuple[int, int]:
    shape = parts.hints.shape or (settings.get("out_features"), settings.get("in_features"))
    if len(shape) != 2 or not all(isinstance(n, int) and n > 0 for n in shape):
        raise FormatMismatch(
            "VPTQ pads rows and columns: without an original, config.json must declare out_features and in_features"
        )
    return int(shape[0] or 0), int(shape[1] or 0)


def _fit_layout(parts: Parts, settings: JsonFields, rows: int, cols: int) -> VptqLayout:
    indices, centroids, res_centroids = parts["indices"], parts["centroids"], parts.get("res_centroids")
    if len(indices.shape) != 3 or not indices.n:
        raise FormatMismatch(f"VPTQ indices are (groups, vectors, words), not {indices}")
    packed = indices.dtype == "I32"
    if (res_centroids is not None and not packed) != (parts.get("res_indices") is not None):
        raise FormatMismatch(
            f"{indices}: residual indices should be a separate tensor for I16 indices, else packed with them"
        )
    outliers = _fit_outliers(parts, settings, rows)
    groups, main_cols = indices.shape[0], cols - (parts["outlier_indices"].shape[2] if outliers else 0)
    declared = settings.get("group_size")
    group_cols = declared if isinstance(declared, int) and declared > 0 else -(-main_cols // groups)
    group_cols = group_cols if packed else indices.shape[2]
    if not (groups - 1) * group_cols < main_cols <= groups * group_cols:
        raise FormatMismatch(f"{indices}: {groups} groups of {group_cols} columns do not make {main_cols} columns")
    books = [centroids, res_centroids] if res_centroids else [centroids]
    layouts = [
        fitting
        for fitting in _list_possible_codebooks(indices, rows, groups, books, _read_declared_rows(settings, 1))
        if not packed or indices.shape[2] == -(-group_cols * sum(book.bits for book in fitting) // WORD)
    ]
    main, *residual = _pick_only(layouts, indices, rows, _read_declared_rows(settings, 1))
    if parts.get("res_indices") and parts["res_indices"].shape != indices.shape:
        raise FormatMismatch(f"{parts['res_indices']} should have the shape of {indices}")
    return VptqLayout(rows, cols, group_cols, main, residual[0] if residual else None, outliers)


def _fit_outliers(parts: Parts, settings: JsonFields, rows: int) -> VectorCodebook | None:
    indices = parts.get("outlier_indices")
    if indices is None:
        return None
    if len(indices.shape) != 3 or indices.shape[0] != 1 or not indices.n:
        raise FormatMismatch(f"outlier indices are (1, vectors, columns), not {indices}")
    layouts = _list_possible_codebooks(indices, rows, 1, [parts["outlier_centroids"]], _read_declared_rows(settings, 0))
    return _pick_only(layouts, indices, rows, _read_declared_rows(settings, 0))[0]


def _read_declared_rows(settings: JsonFields, place: int) -> int | None:
    """Return the rows per vector that config.json declares, where vector_lens is [outliers, others]."""
    lens = settings.get("vector_lens")
    declared = lens[place] if isinstance(lens, list) and len(lens) == 2 else None
    return declared if isinstance(declared, int) and declared > 0 else None


def _list_possible_codebooks(
    indices: Entry, rows: int, groups: int, books: list[Entry], declared: int | None
) -> Iterator[tuple[VectorCodebook, ...]]:
    """Yield the codebooks that each vector length implies, if it fits the rows and shapes."""
    for book in books:
        if len(book.shape) != 2 or book.shape[0] != groups:
            raise FormatMismatch(f"{book} should have a row for each of {groups} groups")
    n = indices.shape[1]
    max_length = (rows - 1) // (n - 1) if n > 1 else books[0].shape[1]
    for length in range(-(-rows // n), max_length + 1):
        codebooks = tuple(VectorCodebook(book, length, book.shape[1] // length) for book in books)
        fits = all(book.size > 1 and book.rows * book.size == book.entry.shape[1] for book in codebooks)
        if fits and all(book.size == 1 << book.bits for book in codebooks) and declared in (None, length):
            yield codebooks


def _pick_only(
    layouts: Iterable[tuple[VectorCodebook, ...]], indices: Entry, rows: int, declared: int | None
) -> tuple[VectorCodebook, ...]:
    candidates = list(layouts)
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


def decode(parts: Parts, layer: VptqLayout, stored: Stored, chunk: Chunk) -> Tensor:
    """Return (centroid + residual) · weight_scale + weight_bias of a chunk's rows, (r, cols)."""
    main, residual = _find_indices(parts, layer, stored, chunk)
    values = _look_up_vectors(main, layer.main, stored["centroids"], chunk)
    if residual is not None and layer.residual:
        values = values + _look_up_vectors(residual, layer.residual, stored["res_centroids"], chunk)
    if layer.outliers:
        indices = _cut_rows(parts["outlier_indices"], stored["outlier_indices"][0], layer.outliers, chunk)
        values = torch.cat([_look_up_vectors(indices, layer.outliers, stored["outlier_centroids"], chunk), values], 1)
    values = values[:, : layer.cols]
    if order := parts.get("order"):
        places = torch.argsort(stored["order"].long() & MASKS[order.dtype])  # where each column is stored
        values = values.index_select(1, places)
    return values * stored["scale"].float() + stored["bias"].float() if parts.get("scale") else values


def _find_indices(parts: Parts, layer: VptqLayout, stored: Stored, chunk: Chunk) -> tuple[Tensor, Tensor | None]:
    """Return the indices of the main and the residual vectors that the chunk's rows touch, (vectors, columns) each.

    An index counts through the centroids of all groups, one group after the other.
    """
    entry, main, residual = parts["indices"], layer.main, layer.residual
    codes = _cut_rows(entry, stored["indices"], main, chunk)  # (groups, vectors, words)
    residual_codes = None
    if entry.dtype == "I32":
        bits = main.bits + (residual.bits if residual else 0)
        fields = _unpack(codes, bits, layer.group_cols)
        codes, residual_codes = fields & main.size - 1, fields >> main.bits
    elif residual:
        residual_codes = _cut_rows(parts["res_indices"], stored["res_indices"], residual, chunk)
    groups = torch.arange(len(codes), device=codes.device).view(-1, 1, 1)
    main_indices = _join_groups(codes + groups * main.size)
    if residual_codes is None or not residual:
        return main_indices, None
    return main_indices, _join_groups(residual_codes + groups * residual.size)


def _unpack(words: Tensor, bits: int, n: int) -> Tensor:
    """Return the first ``n`` fields of each stream of 32-bit words, little-endian: (…, words) to (…, n) int64."""
    starts = bits * torch.arange(n, device=words.device)
    place = starts // WORD
    low, high = (words.index_select(-1, at.clamp(max=words.shape[-1] - 1)) for at in (place, place + 1))
    return (low | high << WORD) >> starts % WORD & (1 << bits) - 1


def _join_groups(codes: Tensor) -> Tensor:
    """Join the columns of groups, (groups, vectors, columns) to (vectors, columns)."""
    return codes.transpose(0, 1).flatten(1)


def _cut_rows(entry: Entry, indices: Tensor, book: VectorCodebook, chunk: Chunk) -> Tensor:
    """Return the integers of the vectors that the chunk's rows touch, (…, vectors, words) int64."""
    return indices[..., chunk.row // book.rows : -(-chunk.stop_row // book.rows), :].long() & MASKS[entry.dtype]


def _look_up_vectors(index: Tensor, book: VectorCodebook, centroids: Tensor, chunk: Chunk) -> Tensor:
    """Look up the vectors by index, (vectors, columns), and cut out the chunk's rows: (r, columns) float32."""
    table = centroids.view(-1, book.rows)
    if int(index.max()) >= len(table):
        raise CheckpointError(
            f"{book.entry.file}: an index is {int(index.max())}, but {book.entry} has {len(table)} vectors"
        )
    rows = table[index].transpose(1, 2).flatten(0, 1)
    skipped = chunk.row % book.rows
    return rows[skipped : skipped + chunk.stop_row - chunk.row].float()


FORMATS = (Format("vptq", NEEDS, fit),)
