"""Settings of compressed-tensors for one weight.

    config_groups.*.targets    the name of a module, "re:" and a regular expression, or a class
    config_groups.*.weights    num_bits, group_size, …

Reference: vllm-project/compressed-tensors@ac8e2ba8 quantization/quant_config.py, quant_args.py, utils/match.py.
"""

from collections.abc import Iterator

from quanterr.formats.base import WEIGHT_SUFFIX, Parts
from quanterr.formats.shared.config_checks import matches
from quanterr.util.strict_json import JsonFields


def read_setting(parts: Parts, key: str) -> int | None:
    """Return the number that the configuration gives for a weight under ``key``; None if it is unknown."""
    groups = list(_find_groups(parts.hints.config))
    if len({_read_number(weights, key) for _, weights in groups}) > 1:  # only groups that target this module count
        module = parts.name.removesuffix(WEIGHT_SUFFIX)
        groups = [
            (targets, weights)
            for targets, weights in groups
            if any(
                matches(target.removeprefix("re:"), module, from_start=True)
                if target.startswith("re:")
                else target == module  # never true of a class, as the classes of modules are unknown here
                for target in targets
            )
        ]
    found = {_read_number(weights, key) for _, weights in groups}
    return found.pop() if len(found) == 1 else None


def _find_groups(config: JsonFields) -> Iterator[tuple[list[str], JsonFields]]:
    groups = config.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        targets = group.get("targets") if isinstance(group, dict) else None
        if isinstance(weights, dict):
            yield [t for t in targets if isinstance(t, str)] if isinstance(targets, list) else [], weights


def _read_number(weights: JsonFields, key: str) -> int | None:
    value = weights.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
