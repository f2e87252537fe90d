"""What config.json, and what was undone, say of how a weight was quantized: how much worse than its nearest codes."""

import json
import re
from typing import NamedTuple

from quanterr.util.strict_json import JsonFields

# Names of methods that let the error of one weight make up for that of another, or learn which way to round; of
# compressed-tensors the order of columns, which only GPTQ has.
COMPENSATING = re.compile(r'gptq|awq|auto.?round|adaround|learned|spqr|quip|"actorder": "', re.IGNORECASE)


class Method(NamedTuple):
    """How a weight was quantized."""

    compensates: bool = False  # its outputs are near, not each of its elements
    folded: bool = False  # it had factors that were undone, as near as they could be found


def compensates(config: JsonFields) -> bool:
    """Whether a quantization_config names a method whose codes are not meant to be the nearest."""
    return COMPENSATING.search(json.dumps(config, default=str)) is not None
