"""Weights that vLLM cannot split among devices, because groups, blocks or heads would be cut.

Linear layers whose inputs are split need whole groups of columns on each device, and those whose outputs are split
whole blocks of rows; q, k and v, and gate and up, are one matrix, whose parts hold whole blocks even on one device.
Groups of a row must be whole there, too, but the last block of columns may be narrower.

Reference: vllm-project/vllm@0.33.0 distributed/utils.py verify_group_size_divides_partition;
model_executor/layers/quantization/utils/fp8_utils.py validate_fp8_block_shape; config/model.py
verify_with_parallel_config.
"""

from collections.abc import Iterator

from quanterr.documents.loading import LoadingReason
from quanterr.findings.contents import Contents, Stored
from quanterr.findings.runtimes.model import WHOLE_ROW, find_group_size, refuse, words
from quanterr.util.text import count, itemize

BY_COLUMNS = words("o_proj out_proj down_proj wo w2 c_proj fc2 dense_4h_to_h")  # modules whose inputs are split
BY_ROWS = words("q_proj k_proj v_proj gate_proj up_proj w1 w3 fc1 dense_h_to_4h")
MERGED = words("q_proj k_proj gate_proj w1")  # parts of a fused matrix that are not its last
GROUPS = "distributed/utils.py: verify_group_size_divides_partition"
BLOCKS = "model_executor/layers/quantization/utils/fp8_utils.py: validate_fp8_block_shape"
HEADS = "config/model.py: verify_with_parallel_config"


def find_cuts(contents: Contents, devices: int) -> Iterator[LoadingReason]:
    """Yield what vLLM refuses if it splits the model among this number of devices."""
    heads = contents.checkpoint.model_config.get("num_attention_heads")
    if isinstance(heads, int) and heads % devices:
        yield refuse(f"cannot split {count(heads, 'attention head')} among {devices} devices: ValueError", HEADS)
    cut_groups = [stored.name for stored in contents.weights if _cuts_groups(stored, devices)]
    cut_blocks = [stored.name for stored in contents.weights if _cuts_blocks(stored, devices)]
    among = f" among {devices} devices" if devices > 1 else ""
    if cut_groups:
        message = f"would cut groups of columns{among}: {count(len(cut_groups), 'weight')}: {itemize(cut_groups, 3)}"
        yield refuse(f"{message}: ValueError", GROUPS, cut_groups)
    if cut_blocks:
        message = f"would cut blocks of rows{among}: {count(len(cut_blocks), 'weight')}: {itemize(cut_blocks, 3)}"
        yield refuse(f"{message}: ValueError", BLOCKS, cut_blocks)


def _find_module(stored: Stored) -> str:
    """Return the last component of the name of a quantized matrix; empty for other weights."""
    if not stored.weight.has_codes or len(stored.weight.shape) != 2:
        return ""
    return stored.weight.name.removesuffix(".weight").rpartition(".")[2]


def _cuts_groups(stored: Stored, devices: int) -> bool:
    size, block = find_group_size(stored.weight), stored.weight.block_size
    if devices == 1 and block is not None and block[0] > 1:
        return False  # the last block of a row may be narrower: validate_fp8_block_shape
    return _find_module(stored) in BY_COLUMNS and size != WHOLE_ROW and stored.weight.matrix[1] % (devices * size) != 0


def _cuts_blocks(stored: Stored, devices: int) -> bool:
    block, module = stored.weight.block_size, _find_module(stored)
    if block is None or block[0] == 1 or block[0] >= stored.weight.matrix[0]:
        return False
    is_split = devices > 1 and module in BY_ROWS
    return (is_split or module in MERGED) and stored.weight.matrix[0] % (devices * block[0]) != 0
