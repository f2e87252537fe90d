"""The method by which a weight was quantized, from config.json and from undone factors."""

import json
import re
from typing import NamedTuple

from quanterr.util.strict_json import JsonFields

# Names of methods that let one weight compensate for another's error, or that learn which way to round. In
# compressed-tensors only GPTQ declares an order of columns.
COMPENSATING = re.compile(r'gptq|awq|auto.?round|adaround|learned|spqr|quip|"actorder": "', re.IGNORECASE)


class Method(NamedTuple):
    """The method by which a weight was quantized."""

    compensates: bool = False  # it keeps the layer's outputs close, not each element
    folded: bool = False  # factors were folded into the weight; the comparison undid them approximately


def is_compensating(config: JsonFields) -> bool:
    """Return True if a quantization_config names a method whose codes are not meant to be the nearest."""
    return COMPENSATING.search(json.dumps(config, default=str)) is not None
