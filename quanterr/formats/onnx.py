"""ONNX: weights of quantized operators, as checkpoints/onnx_file.py names them.

    X.onnx_nbits         u8       (N, blocks, block·b / 8) MatMulNBits; (V, D·b / 8) GatherBlockQuantized;
                                  (E, N, K·b / 8) QMoE: codes of b bits in a stream, low bits first
    X.onnx_codes         u8, i8, f8_e4m3, f8_e5m2, f4; or codes of 2 or 4 bits, two or four in a byte, as a row of u8
    X.onnx_inputs_first  floating (in, out)
    X.onnx_scale         floating one for each block of columns; or one for the tensor, for each index of an axis, or
                                  for each block along an axis
    X.onnx_zero_point    as the codes, packed row by row; or floating, if not packed; optional
    __metadata__["X"]    JSON: operator, shape, block_size, axis and other attributes of the node

    onnx_nbits     weight = (code - zero point) * scale                                   rounded
                   without zero points, 2^(b - 1) in u8, 0 in types of 4 bits
    onnx_linear    the same for DequantizeLinear and for ONNX Runtime's dynamic and static quantizers
    onnx_float     floats that a MatMul has transposed

MatMul stores (in, out): such weights are transposed. Under the name of a parameter the model's own order is also
possible, and the original's shape decides, or its values if the weight is square.

Reference: microsoft/onnxruntime@1.32.0 docs/ContribOperators.md, onnxruntime/python/tools/quantization
matmul_nbits_quantizer.py and quant_utils.py; onnx/onnx@1.23.2 docs/Operators.md DequantizeLinear.
"""

from functools import lru_cache, partial
from math import prod

from msgspec import Struct

from quanterr.checkpoints import Entry
from quanterr.formats.base import Decoder, Format, FormatMismatch, Parts, PartSpec, Weight
from quanterr.formats.shared.element_types import E2M1, E4M3, E5M2, INT4, INT8, list_integers, read_floats
from quanterr.formats.shared.padding import check_width
from quanterr.kernel import levels
from quanterr.kernel.grid import Grid
from quanterr.kernel.levels import Levels
from quanterr.kernel.packing import CodePacking
from quanterr.tensors.chunks import as_matrix
from quanterr.util import strict_json
from quanterr.util.strict_json import JsonFields
from quanterr.util.text import display

FLOATS = frozenset({"F32", "BF16", "F16"})
ENDS = tuple(f"{{weight}}.onnx_{end}" for end in ("nbits", "codes", "inputs_first", "scale", "zero_point"))
NBITS, CODES, INPUTS_FIRST, SCALE, ZERO_POINT = ENDS
MAX_ZERO_POINT_BYTES = 1 << 12  # larger tensors are not read to find out whether all zero points are 0
INT2 = (0.0, 1.0, -2.0, -1.0)
# Dtype → the value of each code, its levels and its bits.
ELEMENTS: dict[str, tuple[tuple[float, ...], Levels | None, int]] = {
    "U8": (list_integers(8), levels.uniform(8), 8),
    "I8": (INT8, levels.INT8, 8),
    "F8_E4M3": (E4M3, levels.E4M3, 8),
    "F8_E5M2": (E5M2, levels.E5M2, 8),
    "F4": (E2M1, levels.E2M1, 4),
    "I32": ((), None, 32),
}
PACKED_ELEMENTS = {  # bits, signed → the same
    (4, False): (list_integers(4), levels.uniform(4), 4),
    (4, True): (INT4, levels.INT4, 4),
    (2, False): (list_integers(2), levels.uniform(2), 2),
    (2, True): (INT2, None, 2),
}


class Blocks(Struct, frozen=True):
    """The blocks of ``rows`` × ``cols`` elements of a stored matrix that share a scale; ``turned``: it is [in, out]."""

    matrix: tuple[int, int]
    rows: int
    cols: int
    turned: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """The blocks down and across the stored matrix."""
        return -(-self.matrix[0] // self.rows), -(-self.matrix[1] // self.cols)

    @property
    def group(self) -> int:
        """The columns of the weight that share a scale; 0 if a row has one."""
        size, cols = (self.rows, self.matrix[0]) if self.turned else (self.cols, self.matrix[1])
        return 0 if size >= cols else size

    def grid(self, entry: Entry, key: str, bits: int = 0, table: tuple[float, ...] = ()) -> Grid:
        """Return the numbers of the blocks; those of ``bits`` bits are packed row by row."""
        down, across = self.shape
        packing = CodePacking("dense", bits) if bits else None
        if self.turned:
            return Grid(entry, down, self.rows, self.cols, turned=True, key=key, levels=table, packing=packing)
        return Grid(entry, across, self.cols, self.rows, key=key, levels=table, packing=packing)


def fit_nbits(parts: Parts) -> Weight:
    """Return the weight of an operator of ONNX Runtime that has a scale for each block of columns."""
    fields, codes = _parse(parts.hints.metadata.get(parts.name, "{}")), parts.codes
    if any(_read(fields, key, 0) > 0 for key in ("weight_prepacked", "weights_prepacked")):
        raise FormatMismatch(f"its node states that {codes} is prepacked for one device; export the model again")
    if (quant_type := fields.get("quant_type", "int")) != "int":
        raise FormatMismatch(f"its node has quant_type {display(str(quant_type))}, of which only int is supported")
    packed = _read(fields, "packed_bits", 0)
    bits = packed or _read(fields, "bits", 4)
    if not 2 <= bits <= 8:
        raise FormatMismatch(f"its node states {bits} bits for each code, not 2 to 8")
    shape, stored_cols, group = _read_sizes(fields, bits, packed)
    check_width(parts, shape)
    rows = prod(shape[:-1])
    if group < 1 or codes.nbytes * 8 != rows * stored_cols * bits or stored_cols * bits % 8:
        raise FormatMismatch(f"{codes} does not hold {list(shape)} codes of {bits} bits in blocks of {group} columns")
    element = PACKED_ELEMENTS.get(
        (packed, fields.get("signed") is True), (list_integers(bits), levels.uniform(bits), bits)
    )
    return _make(parts, shape, Blocks((rows, stored_cols), 1, group), element, 0 if packed else 1 << bits - 1)


def _read_sizes(fields: JsonFields, bits: int, packed: int) -> tuple[tuple[int, ...], int, int]:
    """Return the shape of a weight in blocks, the columns that are stored, and the columns of a block."""
    if fields.get("operator") == "MatMulNBits":
        rows, cols, group = (_read(fields, key, 0) for key in ("N", "K", "block_size"))
        return (rows, cols), -(-cols // group) * group if group > 0 else 0, group
    *front, last = _read_shape(fields)
    cols = last if packed else last * 8 // bits
    if _read(fields, "quantize_axis", len(front)) not in (-1, len(front)):
        raise FormatMismatch("its blocks are not of columns (quantize_axis), which is not supported")
    return (*front, cols), cols, _read(fields, "block_size", cols if fields.get("operator") == "QMoE" else 128)


def fit_linear(parts: Parts) -> Weight:
    """Return the weight of a DequantizeLinear, or of an operator with the same parts, in each possible orientation."""
    fields = _parse(parts.hints.metadata.get(parts.name, "{}"))
    shape, codes = _read_shape(fields), parts.codes
    element = PACKED_ELEMENTS.get((_read(fields, "packed_bits", 0), fields.get("signed") is True)) or ELEMENTS.get(
        codes.dtype
    )
    if element is None:
        raise FormatMismatch(f"{codes} has codes of a type that no {fields.get('operator')} of weights has")
    if codes.nbytes * 8 != prod(shape) * element[2] or as_matrix(shape)[1] * element[2] % 8:
        raise FormatMismatch(
            f"{codes} does not hold {list(shape)} codes of {element[2]} bits in whole bytes of each row"
        )
    weights = []
    for is_transposed in _list_orientations(parts, fields, shape):
        blocks = _fit_blocks(parts, fields, shape, is_transposed)
        weights.append(_make(parts, shape[::-1] if is_transposed else shape, blocks, element, 0))
    return weights[0].with_alternatives(weights[1:])


def fit_float(parts: Parts) -> Weight:
    """Return a matrix of floats that is stored [in, out]."""
    codes = parts.codes
    if len(codes.shape) != 2:
        raise FormatMismatch(f"{codes} should be (in, out)")
    code_grid = Grid(codes, codes.shape[0], 1, turned=True, key="columns")
    decoder = Decoder(codes, codes.shape[0], read=code_grid)
    return parts.weight(codes.shape[::-1], decoder, encoding="floats", evidence=(f"{codes}, transposed",))


def _list_orientations(parts: Parts, fields: JsonFields, shape: tuple[int, ...]) -> list[bool]:
    """Return whether the weight is stored [in, out], the likeliest answer first."""
    if fields.get("inputs_first") is not True or len(shape) != 2:
        return [False]
    if fields.get("is_named") is not True:
        return [True]
    if shape[0] == shape[1]:
        return [False, True]
    return [parts.hints.shape == shape[::-1]]


def _fit_blocks(parts: Parts, fields: JsonFields, shape: tuple[int, ...], is_transposed: bool) -> Blocks:
    """Return the blocks that the scale's shape and the node's attributes give."""
    scale, (rows, cols) = parts["scale"], as_matrix(shape)
    size, is_matrix = _read(fields, "block_size", 0), len(shape) == 2
    is_last = fields.get("operator") == "DequantizeLinear" or fields.get("inputs_first") is True
    axis = _read(fields, "axis", int(is_last and len(shape) > 1)) % len(shape)
    if scale.n == 1:
        return Blocks((rows, cols), rows, cols, is_transposed)
    if size and is_matrix:
        blocks = Blocks((rows, cols), *((size, 1) if axis == 0 else (1, size)), is_transposed)
        if scale.shape == blocks.shape:
            return blocks
    elif len(shape) == 1 or (axis == 1 and is_matrix):
        blocks = Blocks((rows, cols), rows, 1, is_transposed)
    else:
        blocks = Blocks((rows, cols), 1, cols, is_transposed)
    if size or scale.shape != (prod(blocks.shape),) or (axis and not is_matrix):
        raise FormatMismatch(
            f"its scale {scale} fits {list(shape)} codes neither along axis {axis} nor in blocks of {size}"
        )
    return blocks


def _make(
    parts: Parts,
    shape: tuple[int, ...],
    blocks: Blocks,
    element: tuple[tuple[float, ...], Levels | None, int],
    middle: int,
) -> Weight:
    """Return the weight; ``middle`` is its zero point where none is stored."""
    codes, scale, zero_point = parts.codes, parts["scale"], parts.get("zero_point")
    table, code_levels, bits = element
    if scale.n not in (1, prod(blocks.shape)):
        raise FormatMismatch(f"its scale {scale} should have {prod(blocks.shape)} numbers, one for each block")
    zero, one_zero = _read_zero_point(zero_point, blocks, table, bits) if zero_point else (None, float(middle))
    code_grid = Grid(codes, blocks.matrix[0], 1, turned=True, key="columns", packing=CodePacking("dense", bits))
    is_centred = code_levels is not None and zero is None and one_zero == 0 and code_levels.lowest < 0
    decoder = Decoder(
        codes,
        blocks.matrix[0] if blocks.turned else blocks.matrix[1],
        levels=tuple([value - one_zero for value in table]),
        scale=blocks.grid(scale, "scale"),
        zero=zero,
        group=blocks.group,
        read=code_grid if blocks.turned else None if table else partial(read_floats, codes),
    )
    order = ", transposed" if blocks.turned else ""
    return parts.weight(
        shape,
        decoder,
        levels=code_levels.centred_levels if code_levels and is_centred else code_levels,
        code_bits=bits,
        scale=scale,
        block_size=(1, blocks.group) if blocks.group else None,
        evidence=(f"{codes}, scale {scale}, {bits} bits{order}",),
    )


def _read_zero_point(entry: Entry, blocks: Blocks, table: tuple[float, ...], bits: int) -> tuple[Grid | None, float]:
    """Return the zero points of the blocks, or else the one of all blocks."""
    n, (down, across) = prod(blocks.shape), blocks.shape
    is_packed = entry.dtype in ("U8", "I8")
    if entry.nbytes != down * -(-across * bits // 8) if is_packed else entry.n not in (1, n):
        raise FormatMismatch(f"its zero point {entry} should have {n} numbers, codes of each row in whole bytes")
    if entry.nbytes <= MAX_ZERO_POINT_BYTES and not any(entry.read()):
        return None, 0.0
    if n == 1 and is_packed and table:
        return None, table[entry.read()[0] & (1 << bits) - 1]
    return blocks.grid(entry, "zero_point", bits if is_packed else 0, table if is_packed else ()), 0.0


def _read_shape(fields: JsonFields) -> tuple[int, ...]:
    shape = fields.get("shape")
    if not isinstance(shape, list) or not shape or not all(isinstance(size, int) for size in shape):
        raise FormatMismatch("its metadata do not state the shape of the tensor")
    return tuple(shape)


@lru_cache(maxsize=64)
def _parse(text: str) -> JsonFields:
    try:
        return strict_json.as_object(strict_json.loads_text(text))
    except strict_json.InvalidJson as error:
        raise FormatMismatch(f"its description in the metadata {error}") from error


def _read(fields: JsonFields, key: str, default: int) -> int:
    number = fields.get(key, default)
    return number if isinstance(number, int) else default


def _list_needs(codes: str, dtypes: frozenset[str]) -> dict[str, PartSpec]:
    return {
        "codes": PartSpec((codes,), dtypes),
        "scale": PartSpec((SCALE,), FLOATS),
        "zero_point": PartSpec((ZERO_POINT,), FLOATS | {"U8", "I8", "I32"}, optional=True),
    }


FORMATS = (
    Format(
        "onnx_nbits",
        _list_needs(NBITS, frozenset({"U8"})),
        fit_nbits,
        summary="ONNX: codes of 2 to 8 bits of MatMulNBits, GatherBlockQuantized and QMoE",
        usual_db=(6, 42),
    ),
    Format(
        "onnx_linear",
        _list_needs(CODES, frozenset(ELEMENTS)),
        fit_linear,
        summary="ONNX: codes of DequantizeLinear and of ONNX Runtime's dynamic and static quantizers",
        usual_db=(6, 42),
    ),
    Format(
        "onnx_float", {"codes": PartSpec((INPUTS_FIRST,), FLOATS)}, fit_float, summary="ONNX: floats stored (in, out)"
    ),
)
