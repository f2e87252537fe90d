"""bitsandbytes 4-bit: codes into a table, with a scale per block of elements.

    weight                      u8                 ceil(elements / 2) bytes, two codes each, the first in the
                                bf16, f16, f32     high bits; or the same bytes viewed as another dtype
    weight.quant_map            f32                (16,), the table
    weight.absmax               f32                (blocks,), one per blocksize elements
                                u8                 (blocks,), codes into nested_quant_map
    weight.nested_absmax        f32                one per nested_blocksize of absmax, if absmax is u8
    weight.nested_quant_map     f32                (256,), if absmax is u8
    weight.quant_state.bitsandbytes__nf4, …__fp4    u8    JSON: quant_type, shape, blocksize, nested_blocksize,
                                                          nested_offset

    absmax = nested_quant_map[absmax[i]] * nested_absmax[i // nested_blocksize]       rounded
             + float32(nested_offset)                                                 rounded
    weight[e] = quant_map[code[e]] * absmax[e // blocksize]                           rounded

Each kind has a fixed table, which runtimes have built in: a different quant_map causes a warning. If quant_type names
another kind than the end of the tensor's name, bitsandbytes goes by quant_type (QuantState.from_dict): the weight then
has the built-in table of that kind. Elements are numbered row by row, and blocks run across the ends of rows.

Reference: bitsandbytes-foundation/bitsandbytes@95f9af30 bitsandbytes/functional.py QuantState,
backends/default/ops.py.
"""

from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import compress
from math import isfinite, prod
from typing import NamedTuple, TypeGuard

from quanterr.checkpoints import Entry
from quanterr.formats.base import (
    Chunk,
    Decoder,
    Format,
    FormatMismatch,
    Parts,
    PartSpec,
    Weight,
    Workspace,
)
from quanterr.formats.shared.config_checks import read_floats
from quanterr.formats.shared.flat_blocks import read_flat_codes
from quanterr.kernel.decoder import BlockNumbers, NestedScales, StoredScales
from quanterr.kernel.grid import Grid, Run
from quanterr.kernel.levels import Levels, ScaleSteps, nibbles
from quanterr.lazy_torch import Tensor
from quanterr.tensors.chunks import as_matrix
from quanterr.util import strict_json
from quanterr.util.text import count, display

MAX_STATE_BYTES = 1 << 16  # size of the JSON
MAX_BLOCK_ELEMENTS = 1 << 16  # bitsandbytes has at most 4096
F32 = frozenset({"F32"})

# bitsandbytes/functional.py get_4bit_type. FP4 lists codes 0 to 7; codes 8 to 15 are their negatives.
NF4 = (
    -1.0,
    -0.6961928,
    -0.52507305,
    -0.39491749,
    -0.28444138,
    -0.18477343,
    -0.091050036,
    0.0,
    0.0795803,
    0.1609302,
    0.2461123,
    0.33791524,
    0.44070983,
    0.562617,
    0.72295684,
    1.0,
)
FP4 = (0.0, 0.0052083335, 0.6666667, 1.0, 0.33333334, 0.5, 0.16666667, 0.25)
# Half the step between codes in the last decade of the dynamic map, which has 64 codes. It is relative to the largest
# value, a nested absmax.
WIDEST_STEP = 0.45 / 63
MAX_TABLE_DISTANCE = 1e-5  # between a stored table and the usual one; relative above 1
TABLES = {"nf4": NF4, "fp4": (*FP4, *(-value for value in FP4))}


def _make_needs(quant_type: str) -> dict[str, PartSpec]:
    return {
        "codes": PartSpec(("{weight}",), frozenset({"U8", "I8", "BF16", "F16", "F32", "F64"})),
        "state": PartSpec((f"{{weight}}.quant_state.bitsandbytes__{quant_type}",), frozenset({"U8"})),
        "quant_map": PartSpec(("{weight}.quant_map",), F32),
        "absmax": PartSpec(("{weight}.absmax",), frozenset({"F32", "U8"})),
        "nested_absmax": PartSpec(("{weight}.nested_absmax",), F32, optional=True),
        "nested_quant_map": PartSpec(("{weight}.nested_quant_map",), F32, optional=True),
    }


@dataclass(frozen=True, slots=True)
class State:
    """The fields of a quant_state tensor."""

    shape: tuple[int, ...]
    block: int
    nested_block: int
    nested_offset: float
    quant_type: str | None = None  # the table by which bitsandbytes decodes


def fit(quant_type: str, parts: Parts) -> Weight:
    """Return the weight with the shape and blocks of its quant_state."""
    state = _read_state(parts["state"], nested="nested_absmax" in parts.entries)
    n = prod(state.shape)
    _check_size(parts.codes, parts.codes.nbytes, -(-n // 2), "byte", f" for {n} codes")
    _check_size(parts["quant_map"], parts["quant_map"].n, 16, "value")
    absmax, blocks = parts["absmax"], -(-n // state.block)
    _check_size(absmax, absmax.n, blocks, "number", f", one per {state.block} of {n} elements")
    if absmax.dtype == "U8":
        nested = [parts.get(role) for role in ("nested_absmax", "nested_quant_map")]
        if not all(nested):
            raise FormatMismatch(f"{absmax} are codes, but nested_absmax or nested_quant_map is missing")
        _check_size(parts["nested_quant_map"], parts["nested_quant_map"].n, 256, "value")
        above = -(-blocks // state.nested_block)
        shared = f", one per {state.nested_block} of {blocks} scales"
        _check_size(parts["nested_absmax"], parts["nested_absmax"].n, above, "number", shared)
    if state.quant_type in (None, quant_type):
        table = _describe_table(read_floats(parts["quant_map"]), quant_type)
        warnings = (
            f"its table {parts['quant_map']} is not the {quant_type} table, which runtimes use regardless",
            f"{parts['state']} declares no quant_type, without which bitsandbytes does not load it",
        )
        true = not table.is_usual, state.quant_type is None
        return _make_weight(parts, quant_type, state, table, None, tuple(compress(warnings, true)))
    warning = f"{parts['state']} declares quant_type {state.quant_type}, which bitsandbytes uses, whatever the name"
    as_stored, as_named = (
        _make_weight(parts, table_name, state, _describe_table(TABLES[table_name], table_name), table_name, (warning,))
        for table_name in (state.quant_type, quant_type)
    )
    return as_stored.with_alternatives([as_named])


def _make_weight(
    parts: Parts, quant_type: str, state: State, table: "_Table", built_in: str | None, warnings: tuple[str, ...]
) -> Weight:
    """Return the weight as read by a table; ``built_in`` names it if it is not the stored one."""
    nested = parts["absmax"].dtype == "U8"
    nested_said = f", absmax in blocks of {state.nested_block}" if nested else ""
    source = (
        f", as quant_type states {state.quant_type}"
        if built_in == state.quant_type
        else f", as {parts['state']} states"
    )
    return parts.weight(
        state.shape,
        _read(parts, state, table.values),
        code_bits=4,
        levels=table.levels,
        block_size=(1, state.block),
        scale_steps=ScaleSteps(state.nested_block, of_largest=WIDEST_STEP) if nested else None,
        evidence=(f"quant_state: {quant_type} in blocks of {state.block}{nested_said}{source if built_in else ''}",),
        warnings=warnings,
        prescribed=built_in is not None,
        format=f"bnb_{quant_type}",
    )


class _Table(NamedTuple):
    """A quant_map: the value of each code, and their levels."""

    values: tuple[float, ...]
    levels: Levels | None  # None if the table is damaged, so that no nearest code exists
    is_usual: bool  # whether runtimes have this table built in


@lru_cache  # cached, as many weights have the same table
def _describe_table(values: tuple[float, ...], quant_type: str) -> _Table:
    pairs = zip(values, TABLES[quant_type], strict=True)
    is_usual = all(abs(value - usual) <= MAX_TABLE_DISTANCE * (1 + abs(usual)) for value, usual in pairs)
    is_sound = all(map(isfinite, values)) and len(set(values)) > 1
    return _Table(values, nibbles(values).centred_levels if is_sound else None, is_usual)


def _check_size(entry: Entry, actual: int, expected: int, noun: str, of_what: str = "") -> None:
    if actual != expected:
        raise FormatMismatch(f"{entry} should have {count(expected, noun)}{of_what}, not {actual}")


def _read_state(entry: Entry, nested: bool) -> State:
    if entry.nbytes > MAX_STATE_BYTES:
        raise FormatMismatch(f"its quant_state {entry} is too large")
    try:
        declared = _parse(entry.read())
    except strict_json.InvalidJson as error:
        raise FormatMismatch(f"its quant_state {entry} {error}") from error
    declared = declared if isinstance(declared, dict) else {}
    shape = declared.get("shape")
    if not isinstance(shape, list) or not shape or not all(_is_positive_integer(size) for size in shape):
        raise FormatMismatch(f"its quant_state {entry} has no shape")
    offset = declared.get("nested_offset", 0.0)
    block, nested_block = declared.get("blocksize"), declared.get("nested_blocksize") if nested else 1
    quant_type = declared.get("quant_type")
    if quant_type is not None and not (isinstance(quant_type, str) and quant_type in TABLES):
        raise FormatMismatch(f"its quant_state {entry} declares quant_type {display(str(quant_type))}, not nf4 or fp4")
    if (
        not _is_positive_integer(block)
        or block % 2
        or block > MAX_BLOCK_ELEMENTS
        or not _is_positive_integer(nested_block)
        or not isinstance(offset, int | float)
    ):
        raise FormatMismatch(f"its quant_state {entry} has no usable blocksize or nested_offset: {declared}")
    return State(tuple(shape), block, nested_block, float(offset), quant_type)


_parse = lru_cache(strict_json.loads)  # weights of one shape have the same state


def _is_positive_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _read(parts: Parts, state: State, table: tuple[float, ...]) -> Decoder:
    """Return the decoder of the weight: table[code] · absmax."""
    entry, cols, block = parts["absmax"], as_matrix(state.shape)[1], state.block
    are_rows = cols % block == 0
    across = cols // block
    stored: StoredScales | None = None
    scale: BlockNumbers = Grid(entry, across, block) if are_rows else Run(entry, cols, block)
    if entry.dtype == "U8":
        scale = partial(_read_nested_absmax, parts, state, cols)
        nested = NestedScales(parts["nested_absmax"], state.nested_block, state.nested_offset)
        stored = StoredScales(entry, 1, across, table=partial(_copy_nested_map, parts), nested=nested)
    return Decoder(
        parts.codes,
        cols,
        levels=table,
        scale=scale,
        group=block if are_rows else 0,
        stored=stored,
        high_first=True,
        read=None if are_rows else partial(read_flat_codes, parts.codes, cols, True),
    )


def _copy_nested_map(parts: Parts, workspace: Workspace) -> Tensor:
    return _read_nested_map(parts, workspace).clone()  # several weights may wait for the kernel


def _read_nested_map(parts: Parts, workspace: Workspace) -> Tensor:
    """Return the value of each byte of absmax, (256,) float32."""
    return workspace.read_whole("nested_quant_map", parts["nested_quant_map"]).view(-1)


def _read_nested_absmax(parts: Parts, state: State, cols: int, chunk: Chunk, workspace: Workspace) -> Tensor:
    """Return the scale of each block of a chunk if rows are whole blocks, else of each element, float32."""
    entry, block = parts["absmax"], state.block
    if cols % block:
        places = Run(entry, cols, block).find_places(chunk, workspace)
    else:
        of_blocks = chunk._replace(col=chunk.col // block, stop_col=-(-chunk.stop_col // block))
        places = Run(entry, cols // block).find_places(of_blocks, workspace)
    first, stop = int(places[0, 0]), int(places[-1, -1]) + 1
    stored = workspace.read("absmax", entry, first, (stop - first,))[places - first]
    nested = workspace.read_whole("nested_absmax", parts["nested_absmax"]).view(-1)
    scale = _read_nested_map(parts, workspace)[stored.int()]
    return scale.mul_(nested[places // state.nested_block]).add_(state.nested_offset)


FORMATS = (
    Format(
        "bnb_nf4",
        _make_needs("nf4"),
        partial(fit, "nf4"),
        summary="bitsandbytes NF4: 4-bit codes of a table, a scale for each few elements",
        usual_db=(20, 21),
        declared=("bnb_4bit_quant_type", "nf4"),
    ),
    Format(
        "bnb_fp4",
        _make_needs("fp4"),
        partial(fit, "fp4"),
        summary="bitsandbytes FP4: 4-bit codes of another table, a scale for each few elements",
        usual_db=(17, 19),
        declared=("bnb_4bit_quant_type", "fp4"),
    ),
)
