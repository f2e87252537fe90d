"""GPTQ: integers of 2 to 8 bits, packed down columns of the transposed weight.

    qweight    i32; i8, i16, i64    (cols · b / 32, rows), codes of a column packed
    qzeros     as qweight           (blocks, rows · b / 32), codes of a row packed
    scales     f16, bf16, f32       (blocks, rows)
    g_idx      i32                  (cols,), optional: shared/column_groups.py

    weight[r, c] = (code[c, r] - zero_point[block of c, r]) * scale[block of c, r]    exact for 16-bit scales

    gptq       zero points are stored minus one: 1 is subtracted from each code of a word, so that a zero point of
               0 borrows from the next code; with 3, 5, 6 and 7 bits from each code separately, modulo 2^b
    gptq_v2    zero points are stored unchanged
    gptq_p     in planes: kernel/packing.py; used for 5, 6 and 7 bits, except by AutoRound; zero points are
               unchanged, or minus one as in gptq

config.json declares the variant (checkpoint_format; AutoRound's packing_format), often wrongly. If it declares none, or
sym, and all zero points of the first and last block are equal, they decide: 2^(b-1) means unchanged, 2^(b-1) - 1 means
minus one. Otherwise the configuration is used and, unless such zero points confirm it, the other variants are tried on
the original, as a wrong variant is a whole step off.
Columns may be padded, to a multiple of 32 or of the block.

If config.json declares desc_act false, vLLM gives its kernels no g_idx (vllm/model_executor/layers/quantization/
auto_gptq.py create_weights: has_g_idx; kernels/linear/mixed_precision/marlin.py process_weights_after_loading), so that
blocks are of consecutive columns whatever g_idx holds: the weight is read so, and by g_idx as an alternative.

Reference: AutoGPTQ/AutoGPTQ@0.7.1 auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py; ModelCloud/GPTQModel@f4c327a1
gptqmodel/nn_modules/qlinear/__init__.py, gptqmodel/utils/model.py convert_gptq_v1_to_v2_format_module;
intel/auto-round@b9f3d007 auto_round_extension/torch/qlinear_torch.py, qlinear_torch_zp.py.
"""

from dataclasses import dataclass
from functools import lru_cache

from msgspec.structs import replace

from quanterr.checkpoints import Entry
from quanterr.formats.base import Decoder, Format, FormatMismatch, Order, Parts, PartSpec, Weight
from quanterr.formats.shared.column_groups import ColumnBlocks, fit_blocks, list_orders
from quanterr.formats.shared.element_types import list_integers
from quanterr.formats.shared.gptq_awq_common import (
    ORDER,
    SCALE,
    find_gemm_bits,
    is_gemv,
    read_declared_bits,
    read_declared_group_size,
)
from quanterr.kernel.grid import Grid
from quanterr.kernel.levels import uniform
from quanterr.kernel.packing import ALIGNED_BITS, WORD_BITS, CodePacking
from quanterr.util.strict_json import JsonFields
from quanterr.util.text import display

BITS = (2, 3, 4, 5, 6, 7, 8)
CONTAINERS = frozenset({"I32", "I8", "I16", "I64"})
NEEDS = {
    "codes": PartSpec(("{module}.qweight",), CONTAINERS),
    "scale": SCALE,
    "zero_point": PartSpec(("{module}.qzeros",), CONTAINERS),
    "order": ORDER,
}
CHECKPOINT_FORMATS = {  # packing, where known, and whether zero points are stored minus one
    "gptq": (None, True),
    "gptq_v2": (None, False),
    "gptq_p": ("planar", False),
    "auto_round:auto_gptq": ("dense", True),
    "auto_round:gptq": ("dense", True),
}
AUTO_ROUND = "auto_round"  # all other names with this prefix: dense, zero points unchanged
NO_CHECKPOINT_FORMAT = "config.json names no checkpoint_format"
ASSUMED_CHECKPOINT_FORMAT = (
    "config.json declares quant_method gptq without checkpoint_format, which loaders read as gptq"
)
MAX_ZERO_POINT_BYTES = 1 << 12  # larger tensors are not read to find out whether all zero points are equal
NAMES = {("dense", True): "gptq", ("dense", False): "gptq_v2"}  # all others are gptq_p


@dataclass(frozen=True, slots=True)
class Variant:
    """The packing of codes, and whether zero points are stored minus one."""

    packing: CodePacking
    less_one: bool

    @property
    def name(self) -> str:
        """The name of the format."""
        return NAMES.get((self.packing.name, self.less_one), "gptq_p")

    def __str__(self) -> str:
        stored = "less one" if self.less_one else "as they are"
        return f"{self.packing.bits}-bit codes, {self.packing.name}, zero points stored {stored}"


def fit(parts: Parts) -> Weight | None:
    """Return the weight if it has the variant being tried, with other variants that fit as alternatives."""
    codes, scale, zero_point = parts.codes, parts["scale"], parts["zero_point"]
    if not _is_gptq(codes, scale, zero_point):
        if find_gemm_bits(codes, scale) or is_gemv(parts):
            return None
        raise FormatMismatch(
            f"{codes}, {scale} and {zero_point} fit neither GPTQ (scales as wide as qweight, as high as qzeros) "
            "nor AWQ (gemm: scales 8 times as wide as qweight; gemv: as high as qweight)"
        )
    rows = codes.shape[1]
    bits, cols = _find_bits_and_cols(parts)
    if is_gemv(parts) and parts.hints.shape not in ((rows, cols), (cols, rows)):
        return None  # read as GPTQ, the blocks would have 8 columns
    stored = fit_blocks(scale.shape[0], cols, read_declared_group_size(parts), parts.get("order"))
    variants, declared, warnings = _find_variants(parts, bits)
    if variants[0].name != parts.format:
        return None
    warnings += stored.warnings
    scheme = parts.hints.declarations.of(parts.name)
    orders = _find_orders(stored, scheme.fields if scheme else parts.hints.config)
    if len(orders) > 1 and stored.named == stored.n:
        warnings += (f"config.json declares desc_act false, but {parts['order']} orders columns: vLLM leaves it out",)
    alternatives = [
        parts.weight(
            (rows, cols),
            _read(parts, blocks, variant),
            block_size=blocks.edges,
            levels=uniform(bits),
            scale=scale,
            evidence=(f"{variant}: {declared}{order}" if variant is variants[0] else f"{variant}{order}",),
            warnings=warnings,
            close_alternatives=True,
            prescribed=declared != NO_CHECKPOINT_FORMAT or len(orders) > 1,
            format=variant.name,
        )
        for blocks, order in orders
        for variant in variants
    ]
    return alternatives[0].with_alternatives(alternatives[1:])


def _find_orders(stored: ColumnBlocks, fields: JsonFields) -> list[tuple[ColumnBlocks, str]]:
    """Return the possible blocks of columns, those that loaders use first, each with the deciding fact in words."""
    if stored.order is None or fields.get("desc_act") is not False:
        return list_orders(stored)
    return [
        (replace(stored, order=None), "; columns in order, as config.json declares desc_act false"),
        (stored, "; columns in the order of g_idx"),
    ]


def _is_gptq(codes: Entry, scale: Entry, zero_point: Entry) -> bool:
    if not len(codes.shape) == len(scale.shape) == len(zero_point.shape) == 2 or not codes.n * zero_point.n:
        return False
    return (
        codes.shape[1] == scale.shape[1] and scale.shape[0] == zero_point.shape[0] and codes.dtype == zero_point.dtype
    )


def _find_bits_and_cols(parts: Parts) -> tuple[int, int]:
    """Find the bits of a code from the zero points, and the columns from the order, the original or the codes.

    Raises:
        FormatMismatch: no number of bits, or several, gives these shapes.
    """
    codes, zero_point, order = parts.codes, parts["zero_point"], parts.get("order")
    rows, container = codes.shape[1], codes.bits
    cols_by_bits = {
        bits: codes.shape[0] * container // bits for bits in BITS if bits in ALIGNED_BITS or container == WORD_BITS
    }
    original_cols = order.n if order else _find_original_cols(parts, rows)
    fitting = [
        bits
        for bits, cols in cols_by_bits.items()
        if zero_point.shape[1] == -(-rows * bits // container) and (original_cols is None or original_cols <= cols)
    ]
    if len(fitting) > 1 and original_cols is not None:  # very few rows: prefer the bits with minimum padding
        fitting = [bits for bits in fitting if codes.shape[0] == -(-original_cols * bits // container)] or fitting
    named = read_declared_bits(parts)
    bits = fitting[0] if len(fitting) == 1 else named
    if bits not in fitting:
        raise FormatMismatch(
            f"{codes} and {zero_point} fit {' or '.join(map(str, fitting)) or 'no number of'} bits per code"
            + (f" in {original_cols} columns" if original_cols is not None else "")
        )
    stored_cols = cols_by_bits[bits]
    if original_cols is None or stored_cols - original_cols >= max(WORD_BITS, read_declared_group_size(parts) or 0):
        return bits, stored_cols
    return bits, original_cols


def _find_original_cols(parts: Parts, rows: int) -> int | None:
    """Return the columns of the original, which may be stored transposed; None if they are unknown."""
    shape = parts.hints.shape
    if shape is None or len(shape) != 2 or rows not in shape:
        return None
    return shape[1] if shape[0] == rows else shape[0]


def _find_variants(parts: Parts, bits: int) -> tuple[list[Variant], str, tuple[str, ...]]:
    """Return the possible variants, the likeliest first, with the deciding fact and warnings."""
    configured, declared = _read_declared_variant(parts.hints.config, bits)
    packings = ("dense",) if bits in ALIGNED_BITS else ("dense", "planar")
    variants = [Variant(CodePacking(packing, bits), less_one) for packing in packings for less_one in (True, False)]
    if configured in variants:
        variants.sort(key=lambda v: (v.packing != configured.packing, v.less_one != configured.less_one))
    is_declared = declared != NO_CHECKPOINT_FORMAT
    prescribed = is_declared and parts.hints.config.get("sym") is not True  # kernels for sym ignore zero points
    for variant in variants:
        middle = (1 << bits - 1) - variant.less_one
        if (prescribed and variant != configured) or _find_common_zero_point(parts, variant.packing) != middle:
            continue
        same = variant.packing == configured.packing
        harm = "one step off" if same else "wrong, as codes are packed in another way"
        warning = (
            f"{declared}, but all its zero points are {middle}, as {variant.name} stores them: "
            f"a program that follows the configuration reads every weight {harm}"
        )
        return [variant], f"all are {middle}", (warning,) if is_declared and variant != configured else ()
    ignored = "config.json declares sym, but its zero points are not all in the middle: kernels for sym ignore them"
    return variants, declared, (ignored,) if parts.hints.config.get("sym") is True else ()


def _read_declared_variant(config: JsonFields, bits: int) -> tuple[Variant, str]:
    """Return the variant that the configuration names, and the setting that names it."""
    usual = "dense" if bits in (*ALIGNED_BITS, 3) else "planar"
    for key in ("packing_format", "checkpoint_format", "format", "backend"):
        named = config.get(key)
        if isinstance(named, str) and (named in CHECKPOINT_FORMATS or named.startswith(AUTO_ROUND)):
            packing, less_one = CHECKPOINT_FORMATS.get(named, ("dense", False))
            packing = "dense" if bits in ALIGNED_BITS else packing or usual
            return Variant(CodePacking(packing, bits), less_one), f"config.json declares {key} {display(named)}"
    if str(config.get("quant_method")).lower() == "gptq":
        return Variant(CodePacking(usual, bits), True), ASSUMED_CHECKPOINT_FORMAT
    return Variant(CodePacking(usual, bits), True), NO_CHECKPOINT_FORMAT


def _find_common_zero_point(parts: Parts, packing: CodePacking) -> int | None:
    """Return the stored zero point if all are equal; of many, only the first and the last block are read."""
    entry = parts["zero_point"]
    if entry.nbytes <= MAX_ZERO_POINT_BYTES:
        return _find_common_code(entry.read(), entry.shape[0], packing, parts.codes.shape[1])
    blocks = entry.shape[0]
    size = entry.nbytes // blocks
    stored = entry.file.read(entry.offset, size) + entry.file.read(entry.offset + (blocks - 1) * size, size)
    return _find_common_code(stored, 2, packing, parts.codes.shape[1])


@lru_cache(maxsize=8)  # symmetric weights of a model have the same zero points
def _find_common_code(stored: bytes, rows: int, packing: CodePacking, n: int) -> int | None:
    """Return the code that each of several rows of containers holds ``n`` times; None if there are others."""
    size, every = len(stored) // rows, (1 << packing.bits) - 1
    mask = packing.repeat(every, n)
    row, *others = {
        int.from_bytes(stored[first : first + size], "little") & mask for first in range(0, len(stored), size)
    }
    first = row & packing.repeat(every, 1)
    code = next(code for code in range(every + 1) if packing.repeat(code, 1) == first)
    return code if not others and row == packing.repeat(code, n) else None


def _read(parts: Parts, blocks: ColumnBlocks, variant: Variant) -> Decoder:
    """Return the decoder of the weight: (code - zero point) · scale."""
    codes, zero_point, bits = parts.codes, parts["zero_point"], variant.packing.bits
    is_stream = variant.packing.name == "dense"
    zero = (
        _find_common_zero_point(parts, variant.packing)
        if is_stream and zero_point.nbytes <= MAX_ZERO_POINT_BYTES
        else None
    )
    one_zero = 0 if zero is None else (zero + variant.less_one) % (1 << bits)
    stored = variant.packing._replace(less_one=variant.less_one)
    cols = codes.shape[0] * codes.bits // bits
    return Decoder(
        codes,
        cols,
        levels=list_integers(bits, one_zero),
        scale=blocks.grid(parts["scale"], turned=True),
        zero=blocks.packed_grid(zero_point, stored, turned=True) if zero is None else None,
        group=blocks.group,
        order=Order.WORDS_DOWN,
        columns=blocks.order,
        read=None if is_stream else Grid(codes, cols, 1, key="columns", packing=variant.packing, words_down=True),
    )


FORMATS = tuple(
    Format(
        name,
        NEEDS,
        fit,
        summary=f"integers of {bits} bits, a scale and a zero point for each block of columns; {stored}",
        usual_db=usual_db,
    )
    for name, bits, stored, usual_db in (
        ("gptq", "2, 3, 4 or 8", "zero points less one", (6, 42)),
        ("gptq_v2", "2, 3, 4 or 8", "zero points as they are", (6, 42)),
        ("gptq_p", "3, 5, 6 or 7", "in planes of bits", (12, 38)),
    )
)
