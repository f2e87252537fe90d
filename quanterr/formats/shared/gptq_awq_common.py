"""Names that GPTQ, AWQ and AutoRound share, and what their configuration says.

qweight, qzeros, scales, g_idx    beside X.weight's own name: X.qweight holds X.weight
bits, w_bit                       config.json, quantize_config.json, quant_config.json
group_size, q_group_size          -1: a whole row
dynamic, extra_config             other bits or sizes for some layers
"""

from torch import Tensor

from quanterr.checkpoints import Entry
from quanterr.formats.base import Part, Parts
from quanterr.formats.shared.bit_packing import Packing
from quanterr.tensors.chunks import Chunk
from quanterr.tensors.workspace import Workspace
from quanterr.util.strict_json import JsonFields

FLOATS = frozenset({"F16", "BF16", "F32"})
WORDS = frozenset({"I32"})

SCALE = Part(("{module}.scales",), FLOATS)
ORDER = Part(("{module}.g_idx",), WORDS, optional=True)


def configured(config: JsonFields, *keys: str) -> int | None:
    """The number that the configuration gives for all layers; None where layers differ."""
    if config.get("dynamic") or config.get("extra_config"):
        return None
    values = (config.get(key) for key in keys)
    return next((value for value in values if isinstance(value, int) and not isinstance(value, bool)), None)


def said_bits(parts: Parts) -> int | None:
    """Bits of a code, as the configuration says."""
    return configured(parts.hints.config, "bits", "w_bit")


def configured_group_size(parts: Parts) -> int | None:
    """Columns of a block, as the configuration says; -1 for a whole row."""
    return configured(parts.hints.config, "group_size", "q_group_size")


def contradictions(parts: Parts, bits: int, n_blocks: int, cols: int) -> tuple[str, ...]:
    """Where the configuration says something else than the tensors, which are believed."""
    warnings = []
    if (declared := said_bits(parts)) and declared != bits:
        warnings.append(f"config.json declares {declared} bits, the shape of {parts.codes} {bits}")
    size = configured_group_size(parts)
    if size and (1 if size < 0 else -(-cols // size)) != n_blocks:
        warnings.append(
            f"config.json declares group_size {size}, {parts['scale']} has {n_blocks} blocks of {cols} columns"
        )
    return tuple(warnings)


def gemm_bits(codes: Entry, scale: Entry) -> list[int]:
    """Bits of a code with which shapes are those of AWQ's gemm, the likeliest first."""
    if len(codes.shape) != 2 or len(scale.shape) != 2:
        return []
    return [bits for bits in (4, 2, 3, 5, 6, 7, 8) if codes.shape[1] == Packing("dense", bits).words(scale.shape[1])]


def is_gemv(parts: Parts) -> bool:
    """Whether shapes are those of AWQ's gemv: a row of codes, of scales and of zero points for each output."""
    shapes = [parts[role].shape for role in ("codes", "scale", "zero_point")]
    if any(len(shape) != 2 for shape in shapes):
        return False
    codes, scale, zero_point = shapes
    return codes[0] == scale[0] == zero_point[0] and scale[1] == 8 * zero_point[1]


def turned_scale(entry: Entry, chunk: Chunk, workspace: Workspace, key: str = "scales") -> Tensor:
    """Scales of the rows of a chunk as float32, (r, blocks), stored as (blocks, rows)."""
    return workspace.whole(key, entry)[:, chunk.row : chunk.stop_row].t().float().contiguous()
