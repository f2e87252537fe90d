"""What the groups of compressed-tensors declare, as runtimes ask it."""

from collections.abc import Callable

from quanterr.util.strict_json import JsonFields, as_object


def has_groups_where(config: JsonFields, *conditions: Callable[[JsonFields, JsonFields], object]) -> bool:
    """Return whether a group meets all conditions, which are functions of its fields and of those of its weights."""
    groups = [as_object(group) for group in as_object(config.get("config_groups")).values()]
    return any(all(met(group, as_object(group.get("weights"))) for met in conditions) for group in groups)


def has_integers_alone(config: JsonFields) -> bool:
    """Return whether INT8 codes that are not packed have no scheme for inputs."""
    return has_groups_where(
        config,
        lambda group, _: (group.get("format") or config.get("format")) == "int-quantized",
        lambda group, weights: weights.get("type") == "int" and not group.get("input_activations"),
    )
