"""Settings of compressed-tensors for one weight.

Reference: vllm-project/compressed-tensors@ac8e2ba8 quantization/quant_args.py.
"""

from quanterr.formats.base import Parts
from quanterr.util.strict_json import as_object


def read_setting(parts: Parts, key: str) -> int | None:
    """Return the number that the weight's group declares under ``key``; None if there is none."""
    scheme = parts.hints.declarations.of(parts.name)
    value = as_object(scheme.fields.get("weights")).get(key) if scheme else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None
