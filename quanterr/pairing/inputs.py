"""The rounding of inputs that the files of a checkpoint declare for its weights; recipes/inputs.py has the schemes.

    compressed-tensors   config_groups.*.input_activations, targets, ignore; input_scale, input_zero_point,
                         input_global_scale (a factor: 448 · 6 / amax); rotations at runtime (see transforms.py)
    ModelOpt             quant_algo of the model or in quantized_layers; input_scale = amax / 448, for NVFP4
                         amax / (6 · 448), for INT8 amax / 127; pre_quant_scale
    Quark                global_quant_config, layer_quant_config, exclude: input_tensors; for NVFP4 input_scale_2 =
                         amax / (6 · 448)
    DeepSeek             quant_method fp8, activation_scheme, weight_block_size, scale_fmt
    FBGEMM               quant_method fbgemm_fp8, activation_scale_ub
    torchao              the class and the fields of its configuration
    SDNQ                 use_quantized_matmul, quantized_matmul_dtype
    ComfyUI              label: format, full_precision_matrix_mult; input_scale, without which FP8 is clamped at 448
    GGUF                 the type of the weight: llama.cpp's CPU backend rounds to Q8_0, Q8_1 or Q8_K

The inputs of rotated weights (ConvRot, SDNQ, compressed-tensors) are rotated, rounded and rotated back.
The inputs of a low-rank branch (SVDQuant, SDNQ) are not rounded.

Reference: vllm-project/compressed-tensors quantization/quant_scheme.py, transform/transform_args.py;
NVIDIA/Model-Optimizer modelopt/torch/export/quant_utils.py; amd-quark; comfyanonymous/ComfyUI comfy/ops.py,
comfy/quant_ops.py; Comfy-Org/comfy-kitchen tensor/; pytorch/ao torchao/quantization; ggml-org/llama.cpp
ggml/src/ggml-cpu/ggml-cpu.c (type_traits_cpu).
"""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from quanterr.checkpoints import Entry, ggml_types
from quanterr.checkpoints.labels import Label, Labels
from quanterr.declarations import Scheme, keep_texts
from quanterr.formats import Weight
from quanterr.formats.base import Branch, InputRotation
from quanterr.formats.reading import Reader
from quanterr.formats.shared.ascend_types import NOT_EMULATED, TYPES
from quanterr.pairing.model import Pairing
from quanterr.pairing.transforms import Transforms
from quanterr.util.strict_json import JsonFields, as_object
from quanterr.util.text import display

WEIGHT = ".weight"
BRANCH_ROLES = ("up", "svd_up")  # roles of the parts of a low-rank branch
GGUF_EMBEDDING, GGUF_HEAD = "token_embd.weight", "output.weight"


class Inputs(NamedTuple):
    """The rounding of the inputs of a weight at runtime."""

    scheme: str = ""  # empty if not emulated, for the reason in ``why_not``
    scale: Entry | None = None
    is_divisor: bool = False  # the stored scale is 1 / the factor of nvfp4
    zero_point: Entry | None = None
    bound: float | None = None
    factors: Entry | None = None  # (k,): inputs are first multiplied by these
    divisors: Entry | None = None  # (k or more,): inputs are first divided by these
    rotation: InputRotation | None = None  # after factors or divisors, inputs are rotated, rounded, and rotated back
    branch: Branch | None = None  # a low-rank branch of the weight, whose inputs are not rounded
    why_not: str = ""
    absent: str = ""  # the name of a static scale that is declared but not stored
    clamps: bool = False  # the scale is 1 because none is stored

    @property
    def multiplies(self) -> bool:
        """True if inputs are multiplied by the stored scale."""
        return self.scheme == "nvfp4" and not self.is_divisor


Stored = Mapping[str, Entry]
Declared = Inputs | None


def find_declared_inputs(plan: Pairing, entries: Stored) -> dict[str, Inputs]:
    """Map the original's name of each quantized weight whose inputs are rounded to that rounding.

    ``entries`` are all tensors of the quantized checkpoint.
    """
    labels = plan.labels["quantized"]
    declared = {pair.name: inputs_of(pair.quantized, labels, entries) for pair in plan.pairs}
    return {name: inputs for name, inputs in declared.items() if inputs is not None}


def find_clamped_inputs(plan: Pairing, entries: Stored) -> list[str]:
    """Return the names of FP8 weights with ComfyUI's labels whose inputs are clamped because no scale is stored."""
    labels = plan.labels["quantized"]
    labelled = (pair for pair in plan.pairs if labels.of(pair.quantized.name))
    declared = ((pair.name, inputs_of(pair.quantized, labels, entries)) for pair in labelled)
    return [name for name, inputs in declared if inputs is not None and inputs.clamps]


def find_absent_scales(declared: Mapping[str, Inputs]) -> dict[str, str]:
    """Map names of weights to the static scales that are declared for them but not stored."""
    return {name: inputs.absent for name, inputs in declared.items() if inputs.absent}


class StaticScale(NamedTuple):
    """A stored scale of a weight's inputs."""

    number: float
    multiplies: bool  # inputs are multiplied by it, so a larger scale means a smaller range


def read_static_scales(declared: Mapping[str, Inputs]) -> dict[str, StaticScale]:
    """Map names of weights to the static scales of their inputs, if these are single numbers."""
    reader = Reader()
    return {
        name: StaticScale(reader.read_number(inputs.scale), inputs.multiplies)
        for name, inputs in declared.items()
        if inputs.scale is not None and inputs.scale.n == 1
    }


def inputs_of(weight: Weight, labels: Labels, entries: Stored) -> Declared:
    """Return how the inputs of a weight are rounded; None if they are not, or the weight is not quantized."""
    if not weight.has_codes or weight.matrix[0] < 2:
        return None
    module = weight.name.removesuffix(WEIGHT)
    if scheme := ggml_types.INPUT_SCHEMES.get(weight.codes.dtype):
        is_only_looked_up = weight.codes.name == GGUF_EMBEDDING and GGUF_HEAD in entries
        return None if is_only_looked_up else Inputs(scheme)
    declared = _read_module(module, labels, entries)
    if declared is None or not declared.scheme:
        return declared
    if weight.rotated is not None:
        if weight.rotated.weight.matrix != weight.matrix:
            return Inputs(why_not="its rotated rows are padded, and the padding of its inputs is not emulated")
        declared = declared._replace(rotation=rotation_of(weight))
    elif any(label.rotated for label in labels.of(weight.name)):
        return Inputs(why_not="its label declares a rotation, but it was not read as rotated")
    elif Transforms(labels.config, {}).applies_to(weight.name, weight.matrix):
        return Inputs(why_not="config.json declares a transform of its inputs, but the weight was read without it")
    declared = declared._replace(factors=entries.get(f"{module}.pre_quant_scale"))
    if weight.branch is not None:
        return declared._replace(branch=weight.branch, divisors=weight.branch.smooth)
    if any(role.rpartition(".")[2] in BRANCH_ROLES for role in weight.parts):
        return Inputs(why_not="its low-rank branch is not stored in the model's order, which is not emulated")
    return declared


def rotation_of(weight: Weight) -> InputRotation | None:
    """Return the rotation of a weight's inputs; None if they are not rotated."""
    turned = weight.rotated
    return turned and (turned.of_inputs or InputRotation(turned.rotate, turned.rotate))


def _read_module(module: str, labels: Labels, entries: Stored) -> Declared:
    if comfy := labels.of(module + WEIGHT):
        return _read_comfy(module, comfy[0], entries)
    program, scheme = labels.declarations.program, labels.declarations.of(module)
    read = READERS.get(program.name) if program else None
    return read(module, scheme, entries) if read and scheme and scheme.is_quantized else None


COMFY_DYNAMIC = {
    "int8": "int8_token",
    "mxfp8": "mxfp8_ceil",
    "asym_w4a8_int8": "int8_token",
    "convrot_w4a4": "int4_token_narrow",
    "int4_convrot_w4a4": "int4_token_narrow",
}  # beginning of the label's format → scheme


def _read_comfy(module: str, label: Label, entries: Stored) -> Declared:
    form = label.format or ""
    if label.fields.get("full_precision_matrix_mult"):
        return None
    if f"{module}.weight_correction" in entries:
        return None  # comfy-kitchen multiplies unrounded inputs by the dequantized weight
    scale = entries.get(f"{module}.input_scale")
    if form.startswith("float8_e4m3fn"):
        return Inputs("fp8_static", scale, clamps=scale is None)
    if form.startswith("nvfp4"):
        return Inputs("nvfp4", scale, is_divisor=True)
    if form.startswith("convrot_w4a4") and label.fields.get("linear_dtype") == "int8":
        return Inputs("int8_token")
    if known := next((scheme for begin, scheme in COMFY_DYNAMIC.items() if form.startswith(begin)), None):
        return Inputs(known)
    if not form or form.endswith("a16") or form.startswith("bnb_"):
        return None  # only the weights are quantized
    if form == "svdquant_w4a4":
        if label.fields.get("act_unsigned"):
            return Inputs(why_not="its label declares act_unsigned: inputs are shifted, which is not emulated")
        return Inputs("int4_g64_narrow")
    return Inputs(why_not=f"how ComfyUI rounds the inputs of {display(form)} is not emulated")


def _read_compressed_tensors(module: str, scheme: Scheme, entries: Stored) -> Declared:
    args = as_object(scheme.fields.get("input_activations"))
    return _read_arguments(module, args, entries) if args else None


def _read_arguments(module: str, args: JsonFields, entries: Stored) -> Inputs:
    """Read the QuantizationArgs of compressed-tensors."""
    bits, number_type, strategy = (
        args.get("num_bits", 8),
        str(args.get("type", "int")),
        str(args.get("strategy", "tensor")),
    )
    dynamic = args.get("dynamic", False)
    scale, zero = entries.get(f"{module}.input_scale"), entries.get(f"{module}.input_zero_point")
    if (bits, number_type, strategy) == (4, "float", "tensor_group"):
        factor = entries.get(f"{module}.input_global_scale")
        return Inputs("nvfp4", factor) if factor else _make_missing("input_global_scale")
    if number_type == "float" and strategy == "group" and args.get("group_size") == 32 and bits in (4, 8):
        return Inputs(f"mxfp{bits}")
    if (bits, number_type, strategy, args.get("group_size")) == (8, "float", "group", 128) and dynamic:
        return Inputs("fp8_g128")
    name = {(8, "float"): "fp8", (8, "int"): "int8", (4, "int"): "int4"}.get((bits, number_type))
    if name in ("fp8", "int8") and not dynamic and strategy == "tensor":
        return Inputs(f"{name}_static", scale, zero_point=zero) if scale else _make_missing("input_scale")
    if dynamic and strategy in ("token", "tensor"):
        known = name in ("fp8", "int8") or (name, strategy) == ("int4", "token")
        if args.get("symmetric", True) is not False and known:
            return Inputs(f"{name}_{strategy}")
        if (name, strategy) == ("int8", "token"):
            return Inputs("int8_token_asym")
    when = "dynamic" if dynamic else "static"
    return Inputs(why_not=f"{when} activations of {bits} bits, {number_type}, by {strategy}, are not emulated")


def _make_missing(name: str) -> Inputs:
    return Inputs(why_not=f"its files declare a static scale of activations, but store no {name}", absent=name)


MODELOPT_STATIC = {  # quant_algo → scheme, which needs an input_scale
    "FP8": "fp8_static",
    "W4A8_AWQ": "fp8_static",
    "W4A8_MXFP4_FP8": "fp8_static",
    "W4A8_NVFP4_FP8": "fp8_static",
    "W8A8_SQ_PER_CHANNEL": "int8_static",
}
MODELOPT_DYNAMIC = {
    "FP8_PER_CHANNEL_PER_TOKEN": "fp8_token",
    "W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN": "int8_token",
    "MXFP8": "mxfp8_ceil",
}
# Beginnings of the names of algorithms that do not round inputs.
MODELOPT_NONE = ("W4A16", "W8A16", "NONE", "FP8_PB_WO", "FP8_PB_REAL", "INT4", "INT8_WO")


def _read_modelopt(module: str, scheme: Scheme, entries: Stored) -> Declared:
    if "quant_algo" not in scheme.fields:
        return _read_compressed_tensors(module, scheme, entries)
    algorithm = str(scheme.fields["quant_algo"]).upper()
    if algorithm.startswith(MODELOPT_NONE):
        return None
    scale = entries.get(f"{module}.input_scale") or entries.get(f"{module}.activation_scaling_factor")  # TensorRT-LLM
    if static := MODELOPT_STATIC.get(algorithm):
        return Inputs(static, scale) if scale else _make_missing("input_scale")
    if dynamic := MODELOPT_DYNAMIC.get(algorithm):
        return Inputs(dynamic)
    if algorithm in ("NVFP4", "NVFP4_AWQ"):
        return Inputs("nvfp4", scale, is_divisor=True) if scale else _make_missing("input_scale")
    return Inputs(why_not=f"the activations of {display(algorithm)} are not emulated")


def _read_fp8(module: str, scheme: Scheme, entries: Stored) -> Declared:
    config = scheme.fields
    method = str(config.get("quant_method")).lower()
    if method == "fbgemm_fp8":
        return Inputs("fp8_token", bound=_as_number(config.get("activation_scale_ub")))
    if method == "w4afp8" and entries[module + WEIGHT].dtype == "I8":
        return Inputs(why_not="experts of W4AFP8 share one scale of activations, which is not emulated")
    if str(config.get("activation_scheme", "dynamic")) == "static":
        scale = entries.get(f"{module}.input_scale") or entries.get(f"{module}.activation_scale")
        return Inputs("fp8_static", scale) if scale else _make_missing("input_scale")
    if config.get("weight_block_size"):
        return Inputs("fp8_g128_ue8m0" if config.get("scale_fmt") == "ue8m0" else "fp8_g128")
    return Inputs("fp8_token")


def _read_quark(module: str, scheme: Scheme, entries: Stored) -> Declared:
    given = scheme.fields.get("input_tensors")
    stages = [as_object(stage) for stage in (given if isinstance(given, list) else [given]) if stage]
    if not stages:
        return None
    stage_types = [(stage.get("dtype"), stage.get("qscheme"), stage.get("group_size")) for stage in stages]
    if stage_types == [("fp4", "per_group", 16), ("fp8_e4m3", "per_tensor", None)]:
        scale = entries.get(f"{module}.input_scale_2")
        return Inputs("nvfp4", scale, is_divisor=True) if scale else _make_missing("input_scale_2")
    if len(stages) == 1 and (known := _read_quark_stage(module, stages[0], entries)):
        return known
    shown = ", then ".join(f"{dtype} {scheme}" for dtype, scheme, _ in stage_types)
    return Inputs(why_not=f"activations in {display(shown)} are not emulated")


def _read_quark_stage(module: str, args: JsonFields, entries: Stored) -> Declared:
    """Read a QTensorConfig of Quark; None for one that is not emulated."""
    dtype, scheme, is_dynamic = str(args.get("dtype")), args.get("qscheme"), bool(args.get("is_dynamic"))
    number_type = {"fp8_e4m3": "fp8", "int8": "int8"}.get(dtype)
    if number_type and scheme == "per_tensor" and not is_dynamic:
        scale, zero = (entries.get(f"{module}.input_{name}") for name in ("scale", "zero_point"))
        return Inputs(f"{number_type}_static", scale, zero_point=zero) if scale else _make_missing("input_scale")
    is_asymmetric = number_type == "int8" and args.get("symmetric") is False
    if number_type and is_dynamic and scheme in ("per_channel", "per_token"):
        return Inputs("int8_token_asym" if is_asymmetric else f"{number_type}_token")
    if number_type and is_dynamic and scheme == "per_tensor" and not is_asymmetric:
        return Inputs(f"{number_type}_tensor")
    is_mx = scheme == "per_group" and args.get("group_size") == 32 and args.get("scale_format") == "e8m0"
    if is_mx and args.get("scale_calculation_mode") == "even":
        name = {"fp4": "mxfp4", "fp8_e4m3": "mxfp8_even"}.get(dtype)
        return Inputs(name) if name else None
    return None


def _read_torchao(module: str, scheme: Scheme, entries: Stored) -> Declared:
    chosen = scheme.fields
    quant_type = chosen.get("quant_type")  # older versions store only the name of the class
    class_name = quant_type if isinstance(quant_type, str) else str(chosen.get("_type"))
    fields = as_object(chosen.get("_data"))
    if (
        "DynamicActivation" not in class_name
        and "StaticActivation" not in class_name
        and "dynamic_activation" not in class_name
    ):
        return None
    grain = fields.get("granularity")
    of_inputs = as_object(grain[0] if isinstance(grain, list) and grain else grain).get("_type")
    is_asymmetric = as_object(fields.get("act_mapping_type")).get("_data") == "ASYMMETRIC"
    if class_name.startswith("Float8DynamicActivation") and fields.get("activation_value_lb") is None:
        bound = fields.get("activation_value_ub")
        by_token = of_inputs == "PerRow" or "Int4" in class_name
        return Inputs("fp8_token" if by_token else "fp8_tensor", bound=_as_number(bound))
    if class_name.startswith("Int8DynamicActivationInt8Weight") and not (is_asymmetric and of_inputs == "PerTensor"):
        return Inputs("int8_tensor" if of_inputs == "PerTensor" else f"int8_token{'_asym' if is_asymmetric else ''}")
    if class_name.startswith(("Int8DynamicActivationIntx", "Int8DynamicActivationInt4")):
        return Inputs("int8_token_asym" if is_asymmetric or "act_mapping_type" not in fields else "int8_token")
    return Inputs(why_not=f"the activations of torchao's {display(class_name)} are not emulated")


def _as_number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _read_sdnq(module: str, scheme: Scheme, entries: Stored) -> Declared:
    config = scheme.fields
    left_out = keep_texts(config.get("modules_to_not_use_matmul"))
    if not config.get("use_quantized_matmul") or any(
        module == name or module.endswith(f".{name}") for name in left_out
    ):
        return None
    codes = str(config.get("weights_dtype"))
    integers = codes.startswith(("int", "uint"))
    usual = "uint8" if codes == "uint8" else "int8" if integers else "float8_e4m3fn"
    dtype = str(config.get("quantized_matmul_dtype") or usual)
    if dtype.endswith("16"):
        return None
    scale = entries.get(f"{module}.scale")
    if config.get("use_codebook") or scale is None or scale.n > max(scale.shape, default=1):
        return Inputs(why_not="SDNQ quantizes its weight once more, by rows, which is not emulated")
    if known := {"int8": "int8_token", "float8_e4m3fn": "fp8_token", "fp8": "fp8_token"}.get(dtype):
        return Inputs(known)
    return Inputs(why_not=f"products of SDNQ in {display(dtype)} are not emulated")


def _read_ascend(module: str, scheme: Scheme, entries: Stored) -> Declared:
    """Read the type that ModelSlim's description gives to a weight."""
    declared = scheme.entry
    known = TYPES.get(declared)
    if known is None or not known.inputs:
        return None
    if known.inputs == NOT_EMULATED:
        return Inputs(why_not=f"the activations of {declared} are not emulated")
    if not known.inputs.endswith("static"):
        return Inputs(known.inputs)
    scale, offset = (entries.get(f"{module}.input_{name}") for name in ("scale", "offset"))
    return Inputs(known.inputs, scale, zero_point=offset) if scale else _make_missing("input_scale")


READERS: Mapping[str, Callable[[str, Scheme, Stored], Declared]] = {  # program → reader; others do not round inputs
    "ModelOpt": _read_modelopt,
    "Quark": _read_quark,
    "compressed-tensors": _read_compressed_tensors,
    "FP8": _read_fp8,
    "torchao": _read_torchao,
    "SDNQ": _read_sdnq,
    "ModelSlim": _read_ascend,
}


KEY_SCALES = (".k_scale", "k_proj.output_scale")
VALUE_SCALES = (".v_scale", "v_proj.output_scale")
SHARED_SCALE = ".kv_scale"  # one scale for both keys and values
MIN_MODULES_PER_GAP = 4  # a scale that at most one of so many modules lacks was omitted by mistake


class CacheScales(NamedTuple):
    """The scales stored for an FP8 cache of keys and values."""

    missing: dict[str, str]  # attention module → "keys", "values" or "keys and values", which have no scale
    shared: list[str]  # attention modules in which one scale serves keys and values
    several: list[Entry]  # scales of more than one number
    of_heads: bool = False  # whether the configuration declares a scale for each head
    is_declared: bool = True


def find_declared_cache(config: JsonFields, entries: Stored) -> tuple[bool, dict[str, Entry]]:
    """Return whether a quantization_config declares an FP8 cache of keys and values, and the scales stored for it."""
    scheme = as_object(config.get("kv_cache_scheme"))
    algorithm = str(config.get("kv_cache_quant_algo", "")).upper()
    declared = (scheme.get("type"), scheme.get("num_bits")) == ("float", 8) or algorithm == "FP8"
    return declared, {name: scale for name, scale in _find_cache_scales(entries) if scale.n == 1} if declared else {}


def find_cache_scales(config: JsonFields, entries: Stored) -> CacheScales:
    """Return which scales are stored, and which are missing, for an FP8 cache with static scales.

    If no such cache is declared, the result is empty, unless a few attention modules lack scales that the others have.

    Reference: vllm-project/vllm model_executor/layers/quantization/kv_cache.py, BaseKVCacheMethod, which refuses scales
    of several numbers and scales of values alone, and gives values the scale of keys if they have none;
    model_executor/model_loader/weight_utils.py, maybe_remap_kv_scale_name, for kv_scale.
    """
    scheme = as_object(config.get("kv_cache_scheme"))
    is_declared, scales = find_declared_cache(config, entries)[0], dict(_find_cache_scales(entries))
    if scheme.get("dynamic") or not (is_declared or scales):
        return CacheScales({}, [], [])
    modules = dict.fromkeys(name.partition(".k_proj.")[0] for name in entries if ".k_proj." in name)
    keys, values, shared = (
        {module for module in modules for name in scales if name.startswith(f"{module}.") and name.endswith(endings)}
        for endings in (KEY_SCALES, VALUE_SCALES, SHARED_SCALE)
    )
    missing = {
        module: " and ".join(
            what for what, modules_with in (("keys", keys), ("values", values)) if module not in modules_with
        )
        for module in modules
        if module not in shared | (keys & values)
    }
    if not is_declared:
        is_gap = MIN_MODULES_PER_GAP * len(missing) <= len(modules)
        return CacheScales(missing if is_gap else {}, [], [], is_declared=False)
    sharing = [module for module in modules if module in shared - (keys & values)]
    several = [scale for scale in scales.values() if scale.n > 1]
    return CacheScales(missing, sharing, several, scheme.get("strategy", "tensor") != "tensor")


def _find_cache_scales(entries: Stored) -> Iterator[tuple[str, Entry]]:
    for name, entry in entries.items():
        if name.endswith((*KEY_SCALES, *VALUE_SCALES, SHARED_SCALE)):
            yield name, entry
