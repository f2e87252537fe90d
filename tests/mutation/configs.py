"""Damage to what checkpoints declare: config.json, metadata of GGUF, schemes, files next to the index."""

import json
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from safetensors.torch import save

from mutation.coding import Coded, sound
from mutation.judging import Outcome
from mutation.layouts import LARGEST_INPUT, bnb, find_layout, gptq, labelled_int8, nvfp4, plain_int8
from mutation.originals import HIDDEN, NORM, make_generator, norm
from mutation.pairs import Bench, Case, Sound, make_pair
from mutation.unquantized import without_mlp

LAYOUT_NAMES = ("FP8 row", "CT INT4 asym g128", "CT INT4 g32", "GPTQ 4 bits", "AWQ", "NVFP4", "Q4_K", "INT8 row",
                "INT8 128 × 128", "FP8 tensor", "FP8 128 × 128", "CT NVFP4", "MXFP4", "NF4", "MLX 4 bits")  # fmt: skip

OUTPUT = "model.layers.1.self_attn.o_proj.weight"

OF_MODELS: dict[str, Any] = {
    "rope_theta": 1e4,
    "rms_norm_eps": 1e-5,
    "hidden_act": "gelu",
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 640,
    "num_hidden_layers": 3,
    "hidden_size": 1024,
    "intermediate_size": 1408,
    "tie_word_embeddings": True,
    "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    "sliding_window": 128,
    "partial_rotary_factor": 0.5,
    "model_type": "llama",
}
UNSAID = "the original does not declare it, and programs leave out or add defaults"
SILENT = {
    "sliding_window": UNSAID,
    "partial_rotary_factor": UNSAID,
    "model_type": "converters rename architectures; what it computes is compared key by key",
}
OF_GGUF = ("rope_theta", "rms_norm_eps", "num_attention_heads", "num_key_value_heads", "num_hidden_layers",
           "hidden_size", "intermediate_size")  # fmt: skip
ONLY_GGUF = {"rope_dimension_count": 32, "key_length": 32, "value_length": 32}
OF_CODES = {"group_size": 32, "bits": 8}
UNKNOWN = "unheard-of"
METHODS = ("gptq", "awq", "bitsandbytes", UNKNOWN)
# Settings of a layout that contradict its tensors; of compressed-tensors' keys by their group or its weights.
EDITS: dict[str, tuple[dict[str, Any], ...]] = {
    "AWQ": ({"zero_point": False},),
    "FP8 128 × 128": ({"weight_block_size": None}, {"weight_block_size": [64, 64]}),
    "NF4": ({"bnb_4bit_quant_type": "fp4"}, {"load_in_4bit": False, "load_in_8bit": True}),
}
FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "nvfp4-pack-quantized")
# strategy → the group_size that is declared with it
STRATEGIES = {"tensor": None, "channel": None, "group": 128, "block": None}
TARGETS = (["re:.*mlp.*"], ["Conv2d"], ["model.layers.7.mlp.up_proj"])
OF_GROUPS = {"group_size": 64, "symmetric": True, "num_bits": 8, "type": "float"}
MODELOPT = {"quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}}


def outcomes(bench: Bench, name: str) -> Iterator[Outcome]:
    """Change each key of the quantized checkpoint alone."""
    pair = make_pair(bench, find_layout(name), without_mlp())
    for case in (*of_models(pair), *of_schemes(pair), *of_loading(pair), *of_labels(pair), *of_files(pair)):
        yield pair.outcome("configs", case)


def of_models(pair: Sound) -> Iterator[Case]:
    """Change keys that decide what a model computes."""
    if pair.layout.name == "Q4_K":
        for key in OF_GGUF:
            yield Case(f"GGUF {key}", {}, config={key: OF_MODELS[key]})
        for key, value in ONLY_GGUF.items():
            yield Case(f"GGUF {key}", {}, config={key: value})
            yield Case(f"GGUF {key} as it is", {}, config={key: 64}, sound=True)
        factors = {"rope_freqs.weight": torch.linspace(1, 8, 32)}
        yield Case("GGUF rope_freqs", factors)
    elif pair.layout.name == "FP8 row":
        for key, value in OF_MODELS.items():
            yield Case(f"config {key}", {}, config={key: value}, why_silent=SILENT.get(key, ""))


def of_schemes(pair: Sound) -> Iterator[Case]:
    """Yield schemes that contradict what is stored."""
    config = pair.layout.config
    if "config_groups" in config:
        for key, value in OF_GROUPS.items():
            changed = deepcopy(config)
            weights = changed["config_groups"]["group_0"]["weights"]
            if weights[key] != value:
                weights[key] = value
                yield Case(f"scheme {key} {value}", {}, config={"quantization_config": changed})
    elif config:
        for key, value in OF_CODES.items():
            if key in config:
                yield Case(f"scheme {key} {value}", {}, config={"quantization_config": config | {key: value}})
    if "quant_method" in config:  # mlx-lm quantizes the layers that have scales
        coded = [name for name, weight in pair.weights.items() if isinstance(weight, Coded)]
        yield Case("one linear left, though declared", {coded[0]: pair.x[coded[0]]})
        yield Case("all linears but one left, though declared", {name: pair.x[name] for name in coded[1:]})
    if pair.layout.name == "NVFP4":
        yield from of_modelopt(pair)


def of_loading(pair: Sound) -> Iterator[Case]:
    """Yield changes of what decides how a runtime reads the codes: no method, another one, contradicting settings."""
    config, name = pair.layout.config, pair.layout.name
    if not config:
        return
    yield Case("no quantization_config", {}, config={"quantization_config": None, "quantization": None})
    if pair.layout.family == "MLX":
        yield Case("no quantization", {}, config={"quantization": None})
    if "quant_method" in config:
        for method in METHODS:
            if method != config["quant_method"]:
                yield Case(f"quant_method {method}", {}, config=_said(config | {"quant_method": method}))
    for edit in EDITS.get(name, ()):
        yield Case(f"{edit}", {}, config=_said({k: v for k, v in {**config, **edit}.items() if v is not None}))
    if "config_groups" in config:
        yield from contradict_compressed(config)
    if name == "GPTQ 4 bits":
        order = torch.randperm(512, generator=make_generator(5))
        ordered = replace(pair.layout, store=partial(gptq, bits=4, order=order))
        changed = {key: sound(ordered, pair.x[key][:, order]) for key in pair.x if key.endswith("q_proj.weight")}
        yield Case("act-order", changed, config=_said(config | {"desc_act": True}), sound=True)
        yield Case("act-order, though desc_act false", changed)


def contradict_compressed(config: dict[str, Any]) -> Iterator[Case]:
    """Declare formats, strategies and targets of compressed-tensors that contradict the tensors."""
    (group,) = config["config_groups"].values()
    for format in FORMATS:
        if format != config["format"]:
            yield Case(f"format {format}", {}, config=_said(config | {"format": format}))
    for strategy, size in STRATEGIES.items():
        if strategy != group["weights"]["strategy"] and "fp4" not in config["format"]:
            weights = group["weights"] | {"strategy": strategy, "group_size": size}
            changed = {"config_groups": {"group_0": group | {"weights": weights}}}
            yield Case(f"strategy {strategy}", {}, config=_said(config | changed))
    for targets in TARGETS:
        yield Case(f"targets {targets}", {}, config=_said(_of_group(config, targets=targets)))


def _of_group(config: dict[str, Any], **changed: Any) -> dict[str, Any]:
    return config | {"config_groups": {"group_0": config["config_groups"]["group_0"] | changed}}


def _said(config: dict[str, Any]) -> dict[str, Any]:
    return {"quantization_config": config}


def of_labels(pair: Sound) -> Iterator[Case]:
    """Remove or change labels in the file: the state of bitsandbytes, ComfyUI's labels."""
    coded = {name: weight for name, weight in pair.weights.items() if isinstance(weight, Coded)}
    of_layout = {
        "NF4": {"quant_state fp4": partial(bnb, said="fp4")},
        "INT8 128 × 128": {"label int8_tensorwise": partial(labelled_int8, said="int8_tensorwise"), "no": plain_int8},
    }
    for what, store in of_layout.get(pair.layout.name, {}).items():
        changed = {name: replace(w, layout=replace(pair.layout, store=store)) for name, w in coded.items()}
        yield Case(f"{what}, every layer", changed)
        yield Case(f"{what}, one layer", dict(list(changed.items())[:1]))


def of_modelopt(pair: Sound) -> Iterator[Case]:
    """Change hf_quant_config.json next to config.json, and remove a scale of inputs."""
    declared = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"]}
    both = {"quantization_config": declared}
    text = json.dumps(MODELOPT).encode()
    yield Case("ModelOpt", {}, config=both, more={"hf_quant_config.json": text}, sound=True)
    without = replace(pair.layout, store=partial(nvfp4, largest_input=None))
    bare = {name: replace(w, layout=without) for name, w in pair.weights.items() if isinstance(w, Coded)}
    for what, changed in {"one": dict(list(bare.items())[:1]), "every": bare}.items():
        yield Case(f"ModelOpt, {what} input_scale missing", changed, config=both, more={"hf_quant_config.json": text})
    for by in (100, 0.002):
        scaled = replace(pair.layout, store=partial(nvfp4, largest_input=by * LARGEST_INPUT))
        yield Case(f"ModelOpt, input_scale × {by}", {OUTPUT: replace(bare[OUTPUT], layout=scaled)}, config=both)
    for key, value in {"quant_algo": "FP8", "group_size": 32}.items():
        other = json.dumps({"quantization": MODELOPT["quantization"] | {key: value}}).encode()
        yield Case(f"hf_quant_config {key} {value}", {}, config=both, more={"hf_quant_config.json": other})
    other = json.dumps({"quantization": MODELOPT["quantization"] | {"quant_algo": "FP8"}}).encode()
    yield Case("hf_quant_config FP8, stored NVFP4", {}, more={"hf_quant_config.json": other})


def of_files(pair: Sound) -> Iterator[Case]:
    """Put other weights next to those of the index."""
    if pair.layout.name == "FP8 row":
        other = save({NORM: norm(HIDDEN, 77)})
        why = "an info names the file: the index decides which is read, and sizes are the same"
        more = {"consolidated.safetensors": other}
        yield Case("consolidated.safetensors with another norm", {}, more=more, why_silent=why)
