"""Conditions on a configuration that several runtimes have: keys, methods, groups of compressed-tensors, classes."""

import json
import re
from collections.abc import Callable, Collection, Iterator

from quanterr.documents.loading import LoadingReason
from quanterr.findings.configs import CONFIG
from quanterr.findings.contents import Contents
from quanterr.findings.runtimes.model import differ, is_one_of, leave_open, refuse, words
from quanterr.util.strict_json import JsonFields, as_object
from quanterr.util.text import count, display, itemize

Condition = Callable[[JsonFields], bool]
OTHER_AWQ = words("awq_gemv awq_gemv_fast awq_marlin")
REPACKED = re.compile(r"_R\d+$")  # suffix of a ggml type


def always(config: JsonFields) -> bool:
    """Return True: whatever else a configuration says."""
    return True


def lacks(*keys: str) -> Condition:
    """Return the condition that a configuration lacks one of these keys."""
    return lambda config: not config.keys() >= set(keys)


def has_unknown_method(methods: Collection[str]) -> Condition:
    """Return the condition that a configuration declares a quant_method that is none of these."""
    return lambda config: config.get("quant_method") is not None and not is_one_of(config["quant_method"], methods)


def lacks_activation_scheme(config: JsonFields) -> bool:
    """Return whether a configuration of FP8, not ModelOpt's, does not say how inputs are rounded."""
    return not config.keys() & {"quant_algo", "activation_scheme"}


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


def find_algorithm(config: JsonFields) -> str:
    """Return the quant_algo of ModelOpt's configuration, in config.json or in a file of its own; empty if none."""
    return str(as_object(config.get("quantization")).get("quant_algo") or config.get("quant_algo") or "").upper()


def check_repacked(contents: Contents, place: str) -> Iterator[LoadingReason]:
    """Yield a reason if types have interleaved rows (Q4_K_R4), which only ik_llama.cpp has."""
    names = [entry.name for entry in contents.checkpoint.entries.values() if REPACKED.search(entry.dtype)]
    if names:
        message = f"has no types with interleaved rows: {count(len(names), 'tensor')}: {itemize(names, 3)}"
        yield refuse(message, place, names)


def check_torchao(contents: Contents) -> Iterator[LoadingReason]:
    """Yield a reason unless the header lists all tensors and describes each: torchao raises even for a plain one."""
    header = {key: text for metadata in contents.checkpoint.metadata for key, text in metadata.items()}
    if contents.labels.method != "torchao" or not header:
        return
    try:
        listed_names = json.loads(header.get("tensor_names", ""))
    except ValueError:
        listed_names = []
    if not listed_names or not isinstance(listed_names, list) or any(str(name) not in header for name in listed_names):
        message = "finds no tensor_names in the header (__metadata__), or one that it does not describe: ValueError"
        yield refuse(message, "torchao 0.18.0 prototype/safetensors/safetensors_utils.py: is_metadata_torchao")


def check_lost_order(contents: Contents, place: str) -> Iterator[LoadingReason]:
    """Yield a reason if the configuration declares an order of columns for GPTQ's groups that is not stored."""
    config = contents.labels.config
    if contents.labels.method != "gptq" or config.get("desc_act") is not True or config.get("group_size") == -1:
        return
    of_gptq = [stored for stored in contents.weights if stored.weight.format in ("gptq", "gptq_v2")]
    if names := [stored.name for stored in of_gptq if not any(entry.name.endswith(".g_idx") for entry in stored.parts)]:
        message = f"finds no order of columns (g_idx), which desc_act declares, and takes another: {itemize(names, 3)}"
        yield differ(message, place, names)


def check_awq_layout(contents: Contents, place: str) -> Iterator[LoadingReason]:
    """Yield a reason if AWQ's layout is not GEMM, for runtimes that do not look at ``version``."""
    others = [stored.name for stored in contents.weights if stored.weight.format in OTHER_AWQ]
    if contents.labels.method == "awq" and others:
        message = f"takes all of AWQ for the layout GEMM, whose scales have other shapes: {itemize(others, 3)}"
        yield refuse(f"{message}: AssertionError", place, others)


def check_architectures(
    contents: Contents, known: Collection[str], if_missing: LoadingReason, place: str
) -> Iterator[LoadingReason]:
    """Yield why a runtime that falls back on the classes of transformers has none of its own for a model.

    ``known`` are the architectures that it has, listed at ``place``; ``if_missing`` is yielded without a config.json.
    """
    config = contents.checkpoint.config.get(CONFIG, {})
    names = config.get("architectures")
    if not config:
        yield if_missing
    elif not isinstance(names, list) or not any(is_one_of(name, known) for name in names):
        said = display(str(names[0])) if isinstance(names, list) and names else "a model without architectures"
        yield leave_open(f"has no class of its own for {said}, and tries those of transformers", place)
