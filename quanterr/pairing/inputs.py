"""The declared rounding of each weight's inputs (activations), in the scheme names of recipes/inputs.py.

    compressed-tensors   config_groups.*.input_activations, targets, ignore; input_scale, input_zero_point,
                         input_global_scale (a factor: 448 · 6 / amax)
    ModelOpt             quant_algo, global or in quantized_layers; input_scale = amax / 448, NVFP4: amax / (6 · 448)
    Quark                global_quant_config, layer_quant_config: input_tensors
    DeepSeek             quant_method fp8, activation_scheme, weight_block_size, scale_fmt
    FBGEMM               quant_method fbgemm_fp8, activation_scale_ub
    torchao              the class name of the configuration
    SDNQ                 use_quantized_matmul, quantized_matmul_dtype
    ComfyUI              label: format, full_precision_matrix_mult; input_scale; without it, FP8 is clamped to ±448

Reference: vllm-project/compressed-tensors quantization/quant_scheme.py; NVIDIA/Model-Optimizer modelopt/torch/export/
quant_utils.py; amd/Quark; comfyanonymous/ComfyUI comfy/ops.py, comfy/quant_ops.py; pytorch/ao torchao/quantization.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import NamedTuple

from quanterr.checkpoints import Entry
from quanterr.checkpoints.labels import Label, Labels
from quanterr.formats import Weight
from quanterr.pairing.model import Pairing
from quanterr.util.strict_json import JsonFields, as_object
from quanterr.util.text import display

WEIGHT = ".weight"


class Inputs(NamedTuple):
    """The rounding that a runtime applies to the inputs of a weight."""

    scheme: str = ""  # "": not emulated, and ``why_not`` gives the reason
    scale: Entry | None = None
    is_divisor: bool = False  # the inputs are divided by the stored scale: the factor of nvfp4 is 1 / scale
    zero_point: Entry | None = None
    bound: float | None = None
    factors: Entry | None = None  # (k,): the inputs are first multiplied by these
    why_not: str = ""
    clamps: bool = False  # no scale is stored, so the scale is 1 and large inputs are clamped


Stored = Mapping[str, Entry]
Declared = Inputs | None


def find_declared_inputs(pairing: Pairing, entries: Stored) -> dict[str, Inputs]:
    """Map original weight names to the rounding of their inputs; ``entries`` are the quantized checkpoint's."""
    labels = pairing.labels["quantized"]
    found = {pair.name: inputs_of(pair.quantized, labels, entries) for pair in pairing.pairs}
    return {name: inputs for name, inputs in found.items() if inputs is not None}


def find_clamped_inputs(pairing: Pairing, entries: Stored) -> list[str]:
    """Return the weights whose inputs ComfyUI clamps: its labels declare FP8, but no input scale is stored."""
    labels = pairing.labels["quantized"]
    labelled = (pair for pair in pairing.pairs if labels.of(pair.quantized.name))
    found = ((pair.name, inputs_of(pair.quantized, labels, entries)) for pair in labelled)
    return [name for name, inputs in found if inputs is not None and inputs.clamps]


def inputs_of(weight: Weight, labels: Labels, entries: Stored) -> Declared:
    """Return how the inputs of a weight are rounded; None if they are not, or the weight is not quantized."""
    if not weight.has_codes or weight.matrix[0] < 2:
        return None
    module = weight.name.removesuffix(WEIGHT)
    own = _read_module(module, labels, entries)
    if own is None:
        return None
    if any(label.rotated for label in labels.of(weight.name)):
        return Inputs(why_not="inputs are rotated first")
    return own._replace(factors=entries.get(f"{module}.pre_quant_scale"))


def _read_module(module: str, labels: Labels, entries: Stored) -> Declared:
    if comfy := labels.of(module + WEIGHT):
        return _read_comfy(module, comfy[0], entries)
    config = labels.config
    method = str(config.get("quant_method", "")).lower()
    for applies, read in READERS:
        if applies(method, config):
            return read(module, config, entries)
    return None


def _read_comfy(module: str, label: Label, entries: Stored) -> Declared:
    form = label.format or ""
    if label.fields.get("full_precision_matrix_mult"):
        return None
    scale = entries.get(f"{module}.input_scale")
    if form.startswith("float8_e4m3fn"):
        return Inputs("fp8_static", scale, clamps=scale is None)
    if form.startswith("nvfp4"):
        return Inputs("nvfp4", scale, is_divisor=True)
    if form.startswith("mxfp8"):
        return Inputs(why_not="ComfyUI rounds the scales of MXFP8 up, which is not emulated")
    if form.startswith("int8"):
        return Inputs("int8_token")
    if not form or form.endswith("a16") or form.startswith("bnb_"):
        return None  # only the weights are quantized
    return Inputs(why_not=f"how ComfyUI rounds the inputs of {display(form)} is not emulated")


def _read_compressed_tensors(module: str, config: JsonFields, entries: Stored) -> Declared:
    ignored = config.get("ignore")
    if _matches(module, ignored if isinstance(ignored, list) else []):
        return None
    groups = [as_object(group) for group in as_object(config.get("config_groups")).values()]
    fitting = [group for group in groups if _matches(module, _keep_texts(group.get("targets")))]
    own = fitting or [group for group in groups if "Linear" in _keep_texts(group.get("targets"))]
    args = as_object(own[0].get("input_activations")) if own else {}
    return _read_arguments(module, args, entries) if args else None


def _read_arguments(module: str, args: JsonFields, entries: Stored) -> Inputs:
    """Read the QuantizationArgs of compressed-tensors."""
    bits, kind, strategy = args.get("num_bits", 8), str(args.get("type", "int")), str(args.get("strategy", "tensor"))
    dynamic = args.get("dynamic", False)
    scale, zero = entries.get(f"{module}.input_scale"), entries.get(f"{module}.input_zero_point")
    if (bits, kind, strategy) == (4, "float", "tensor_group"):
        return Inputs("nvfp4", entries.get(f"{module}.input_global_scale"))
    if kind == "float" and strategy == "group" and args.get("group_size") == 32 and bits in (4, 8):
        return Inputs(f"mxfp{bits}")
    if (bits, kind, strategy, args.get("group_size")) == (8, "float", "group", 128) and dynamic:
        return Inputs("fp8_g128")
    name = {(8, "float"): "fp8", (8, "int"): "int8", (4, "int"): "int4"}.get((bits, kind))
    if name in ("fp8", "int8") and not dynamic and strategy == "tensor":
        return Inputs(f"{name}_static", scale, zero_point=zero) if scale else _make_missing("input_scale")
    if dynamic and strategy in ("token", "tensor"):
        known = name in ("fp8", "int8") or (name, strategy) == ("int4", "token")
        if args.get("symmetric", True) is not False and known:
            return Inputs(f"{name}_{strategy}")
        if (name, strategy) == ("int8", "token"):
            return Inputs("int8_token_asym")
    when = "dynamic" if dynamic else "static"
    return Inputs(why_not=f"{when} activations of {bits} bits, {kind}, by {strategy}, are not emulated")


def _make_missing(name: str) -> Inputs:
    return Inputs(why_not=f"its files declare a static activation scale, but store no {name}")


def _read_modelopt(module: str, config: JsonFields, entries: Stored) -> Declared:
    layers = as_object(config.get("quantized_layers"))
    algorithm = str(as_object(layers.get(module)).get("quant_algo") if layers else config.get("quant_algo")).upper()
    excluded = config.get("exclude_modules") or config.get("ignore")
    if _matches(module, _keep_texts(excluded)):
        return None
    scale = entries.get(f"{module}.input_scale")
    if algorithm in ("FP8", "W4A8_AWQ"):
        return Inputs("fp8_static", scale) if scale else _make_missing("input_scale")
    if algorithm.startswith("FP8_PER_CHANNEL_PER_TOKEN"):
        return Inputs("fp8_token")
    if algorithm in ("NVFP4", "NVFP4_AWQ", "NVFP4_SVD"):
        return Inputs("nvfp4", scale, is_divisor=True)
    if algorithm == "MXFP8":
        return Inputs("mxfp8")
    if algorithm.startswith(("W4A16", "W8A16", "NONE")) or not algorithm:
        return None
    return Inputs(why_not=f"the activations of {algorithm} are not emulated")


def _read_fp8(module: str, config: JsonFields, entries: Stored) -> Declared:
    if _matches(module, _keep_texts(config.get("modules_to_not_convert"))):
        return None
    if str(config.get("activation_scheme", "dynamic")) == "static":
        scale = entries.get(f"{module}.input_scale") or entries.get(f"{module}.activation_scale")
        return Inputs("fp8_static", scale) if scale else _make_missing("input_scale")
    if config.get("weight_block_size"):
        return Inputs("fp8_g128_ue8m0" if config.get("scale_fmt") == "ue8m0" else "fp8_g128")
    return Inputs("fp8_token")


def _read_fbgemm(module: str, config: JsonFields, entries: Stored) -> Declared:
    bound = config.get("activation_scale_ub")
    return Inputs("fp8_token", bound=float(bound) if isinstance(bound, int | float) else None)


def _read_quark(module: str, config: JsonFields, entries: Stored) -> Declared:
    if _matches(module, _keep_texts(config.get("exclude"))):
        return None
    layers = as_object(config.get("layer_quant_config"))
    own = next((as_object(found) for pattern, found in layers.items() if fnmatchcase(module, pattern)), None)
    given = (own or as_object(config.get("global_quant_config"))).get("input_tensors")
    if isinstance(given, list):
        return Inputs(why_not="activations of two stages are not emulated") if given else None
    args = as_object(given)
    if not args:
        return None
    dtype, scheme, dynamic = str(args.get("dtype")), str(args.get("qscheme")), bool(args.get("is_dynamic"))
    kind = "fp8" if "fp8_e4m3" in dtype else "int8" if dtype == "int8" else ""
    if kind and scheme == "per_tensor" and not dynamic:
        scale = entries.get(f"{module}.input_scale")
        zero = entries.get(f"{module}.input_zero_point")
        return Inputs(f"{kind}_static", scale, zero_point=zero) if scale else _make_missing("input_scale")
    if kind and dynamic and scheme in ("per_channel", "per_token", "per_tensor") and args.get("symmetric") is not False:
        return Inputs(f"{kind}_{'tensor' if scheme == 'per_tensor' else 'token'}")
    if dtype == "fp4" and scheme == "per_group" and args.get("group_size") == 32:
        return Inputs("mxfp4")
    return Inputs(why_not=f"activations of {dtype}, {scheme}, are not emulated")


def _read_torchao(module: str, config: JsonFields, entries: Stored) -> Declared:
    said = str(config.get("quant_type"))
    if "DynamicActivation" not in said and "StaticActivation" not in said:
        return None
    if "Float8DynamicActivation" in said:
        return Inputs("fp8_token" if "PerRow" in said else "fp8_tensor")
    if "Int8DynamicActivationInt8Weight" in said:
        return Inputs("int8_token")
    if "Int8DynamicActivation" in said:
        return Inputs("int8_token_asym")
    return Inputs(why_not="torchao's activations of this class are not emulated")


def _read_sdnq(module: str, config: JsonFields, entries: Stored) -> Declared:
    if not config.get("use_quantized_matmul") or _matches(module, _keep_texts(config.get("modules_to_not_convert"))):
        return None
    dtype = str(config.get("quantized_matmul_dtype") or config.get("weights_dtype"))
    return Inputs("fp8_token" if "float8" in dtype or dtype == "fp8" else "int8_token")


Applies = Callable[[str, JsonFields], bool]
READERS: tuple[tuple[Applies, Callable[[str, JsonFields, Stored], Declared]], ...] = (
    (lambda method, config: "quant_algo" in config or "quantized_layers" in config, _read_modelopt),
    (lambda method, config: method == "quark", _read_quark),
    (lambda method, config: "config_groups" in config, _read_compressed_tensors),
    (lambda method, config: method == "fbgemm_fp8", _read_fbgemm),
    (lambda method, config: method == "fp8", _read_fp8),
    (lambda method, config: method == "torchao", _read_torchao),
    (lambda method, config: method == "sdnq", _read_sdnq),
)


def _keep_texts(value: object) -> list[str]:
    return [text for text in value if isinstance(text, str)] if isinstance(value, list) else []


def _matches(module: str, patterns: list[str]) -> bool:
    """Return whether a module matches any pattern: a name, the end of one, a glob or a ``re:`` expression."""
    return any(_fits(module, pattern) for pattern in patterns)


def _fits(module: str, pattern: str) -> bool:
    if pattern.startswith("re:"):
        try:
            return re.match(pattern[3:], module) is not None
        except re.error:
            return False
    return module == pattern or module.endswith(f".{pattern}") or fnmatchcase(module, pattern)


def find_declared_cache(config: JsonFields, entries: Stored) -> tuple[bool, dict[str, Entry]]:
    """Return whether quantization_config declares an FP8 KV cache, and the cache's scales by stored name."""
    scheme = as_object(config.get("kv_cache_scheme"))
    algorithm = str(config.get("kv_cache_quant_algo", "")).upper()
    declared = (scheme.get("type"), scheme.get("num_bits")) == ("float", 8) or algorithm == "FP8"
    return declared, dict(_find_cache_scales(entries)) if declared else {}


def _find_cache_scales(entries: Stored) -> Iterator[tuple[str, Entry]]:
    for name, entry in entries.items():
        if name.endswith((".k_scale", ".v_scale", "k_proj.output_scale", "v_proj.output_scale")) and entry.n == 1:
            yield name, entry
