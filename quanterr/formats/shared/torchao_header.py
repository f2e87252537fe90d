"""Descriptions of tensors in the header of a torchao checkpoint, and checks that torchao's tensor types share.

    __metadata__["X.weight"]    {"_type": "Int8Tensor", "_data": {"block_size": [1, 128], …},
                                 "_tensor_data_names": ["qdata", "scale"]}

Reference: pytorch/ao@36027d82 torchao/prototype/safetensors/safetensors_utils.py.
"""

from functools import lru_cache

from quanterr.errors import FormatMismatch
from quanterr.formats.base import Parts
from quanterr.util import strict_json
from quanterr.util.strict_json import JsonFields

Description = JsonFields


@lru_cache(maxsize=64)
def parse_description(text: str) -> tuple[str, Description, tuple[str, ...]]:
    """Parse a tensor's description into its type, its attributes and the names of its parts.

    Raises:
        FormatMismatch: the text is not JSON.
    """
    try:
        declared = strict_json.loads_text(text)
    except strict_json.InvalidJson as error:
        raise FormatMismatch(f"its description in the header {error}") from error
    declared = declared if isinstance(declared, dict) else {}
    data, names = declared.get("_data"), declared.get("_tensor_data_names")
    listed = tuple(map(str, names)) if isinstance(names, list) else ()
    return str(declared.get("_type")), data if isinstance(data, dict) else {}, listed


def read_block_size(parts: Parts, declared: Description) -> tuple[int, ...]:
    """Return the sizes of a block along each axis of the codes.

    Raises:
        FormatMismatch: the header gives no valid block_size.
    """
    block, shape = declared.get("block_size"), parts.codes.shape
    if not isinstance(block, list) or len(block) != len(shape) or not all(isinstance(b, int) and b > 0 for b in block):
        raise FormatMismatch(f"the header declares block_size {block} for {parts.codes}")
    return tuple(block)
