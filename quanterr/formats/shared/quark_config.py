"""Settings of AMD Quark for one weight.

A specification has dtype (int4, uint4, fp4, fp6_e2m3, fp8_e4m3, fp8_e5m3 …), group_size, scale_format (e8m0, e5m3 …).

Reference: amd-quark 0.13, quark/torch/quantization/config/config.py QTensorConfig.
"""

from quanterr.formats.base import Parts
from quanterr.util.strict_json import JsonFields


def find_specifications(parts: Parts) -> list[JsonFields]:
    """Return the weight's specifications in the order of quantization; empty if the configuration has none."""
    scheme = parts.hints.declarations.of(parts.name)
    weight = scheme.fields.get("weight") if scheme else None
    return [item for item in (weight if isinstance(weight, list) else [weight]) if isinstance(item, dict)]


def has_e5m3_scales(parts: Parts) -> bool:
    """Return whether the configuration declares that block scales are E5M3 numbers."""
    return any(
        "e5m3" in (specification.get("scale_format"), str(specification.get("dtype")).removeprefix("fp8_"))
        for specification in find_specifications(parts)
    )
