"""What vLLM loads.

Reference: vllm-project/vllm@0.33.0 config/model.py, model_executor/models/registry.py,
model_executor/layers/quantization/, model_executor/model_loader/.
"""

import re
from collections.abc import Iterator
from functools import partial

from quanterr.advice.runtimes import OF_COMPRESSED_TENSORS, OF_MODELOPT
from quanterr.documents.loading import LoadingReason
from quanterr.findings.configs import CONFIG
from quanterr.findings.contents import Contents
from quanterr.findings.declared import list_left
from quanterr.findings.runtimes.classes import VLLM
from quanterr.findings.runtimes.conditions import (
    always,
    check_architectures,
    check_awq_layout,
    check_torchao,
    find_algorithm,
    has_groups_where,
    has_integers_alone,
    has_unknown_method,
    lacks,
    lacks_activation_scheme,
)
from quanterr.findings.runtimes.model import (
    FLOAT8,
    MARLIN,
    OF_FUSED,
    PLAIN,
    ConfigRule,
    Layout,
    Limits,
    Runtime,
    TensorRule,
    differ,
    refuse,
    words,
)
from quanterr.findings.runtimes.schemes import check_quark, check_rounded
from quanterr.findings.runtimes.tensor_parallel import find_cuts
from quanterr.util.strict_json import JsonFields, as_object
from quanterr.util.text import count, itemize

LAYERS = "model_executor/layers/quantization/"
METHODS = words(
    "auto-round auto_awq auto_gptq awq awq_marlin compressed-tensors deepseek_v4_fp8 experts_int8 fbgemm_fp8 fp8 "
    "fp_quant gpt_oss_mxfp4 gptq gptq_marlin humming inc modelopt modelopt_fp4 modelopt_mixed modelopt_mxfp8 "
    "moe_wna16 mxfp4 mxfp8 online quark torchao"
)
GPTQ, AWQ, CT = words("gptq gptq_marlin auto_gptq"), words("awq awq_marlin auto_awq"), words("compressed-tensors")
MODELOPT = words("modelopt modelopt_fp4 modelopt_mixed modelopt_mxfp8")
ALGORITHMS = words("FP8 FP8_PER_CHANNEL_PER_TOKEN FP8_PB_WO NVFP4 W4A16_NVFP4 MXFP8 FP8_BLOCK_SCALES MIXED_PRECISION")
# Names of scales of a KV cache, and those that maybe_remap_kv_scale_name and get_cache_scale_mapper map.
OF_CACHE = re.compile(r"\b(?:k|v|kv)_(?:proj\.)?(?:cache_)?(?:output_)?(?:scales?|scaling_factor)$")
MAPPED = re.compile(r"\.(?:[kv]_scale|kv_scale|[kv]_proj\.output_scale)$")


def check_class(contents: Contents) -> Iterator[LoadingReason]:
    """Yield why no class is found for the model."""
    if contents.checkpoint.gguf is not None:
        message = "reads GGUF files with vllm-gguf-plugin alone: ValueError"
        yield refuse(message, "model_executor/model_loader/__init__.py: LoadFormats has none")
        return
    missing = refuse(f"needs {CONFIG}, which is not stored: ValueError", "transformers_utils/config.py: get_config")
    yield from check_architectures(contents, VLLM, missing, "model_executor/models/registry.py: _VLLM_MODELS")


def check_left(contents: Contents) -> Iterator[LoadingReason]:
    """Yield what becomes of modules that the configuration quantizes and that are stored unquantized."""
    names = list_left(contents)
    scheme = contents.labels.declarations.of(names[0]) if names else None
    if scheme is None:
        return
    shown = f"{count(len(names), 'layer')} that the configuration does not exclude: {itemize(names, 3)}"
    if (scheme.number, scheme.bits) == ("float", 8):
        message = f"casts unquantized weights to FP8, without scales, in {shown}"
        yield differ(message, LAYERS + "fp8.py: Fp8LinearMethod.create_weights", names)
    else:
        message = f"builds quantized modules, and finds no codes, for {shown}: KeyError, or shapes that differ"
        yield refuse(message, "model_executor/models/: load_weights, params_dict", names)


def check_cache_scales(contents: Contents) -> Iterator[LoadingReason]:
    """Yield a reason if scales of a KV cache have names that nothing maps, so that the cache has no scales."""
    of_weights = {entry.name for stored in contents.weights for entry in stored.parts}
    names = [name for name in contents.checkpoint.entries if OF_CACHE.search(name) and not MAPPED.search(name)]
    names = [name for name in names if name not in of_weights]
    if names:
        message = f"does not map {count(len(names), 'scale')} of a KV cache, and takes 1: {itemize(names, 3)}"
        yield differ(message, "model_executor/model_loader/weight_utils.py: maybe_remap_kv_scale_name", names)


def _has_quark_scheme(scheme: JsonFields) -> bool:
    """Return whether linear layers have a class for a scheme of Quark: FP8 or INT8 with inputs, INT4, or OCP MX."""
    weight, inputs = scheme.get("weight"), scheme.get("input_tensors")
    if scheme.get("output_tensors") or scheme.get("bias") or not isinstance(weight, dict):
        return False
    if not (inputs is None or isinstance(inputs, dict)) or weight.get("is_dynamic"):
        return False
    is_of_rows, of_inputs = weight.get("qscheme") in ("per_tensor", "per_channel"), as_object(inputs)
    is_dynamic = bool(of_inputs.get("is_dynamic"))
    is_static = of_inputs.get("qscheme") == "per_tensor" and not is_dynamic
    match weight.get("dtype"):
        case "fp8_e4m3":
            return is_of_rows and of_inputs.get("dtype") == "fp8_e4m3" and (is_static or is_dynamic)
        case "int8":
            is_of_tokens = of_inputs.get("qscheme") == "per_channel" and of_inputs.get("is_dynamic") is True
            known = is_of_rows and weight.get("symmetric") is True and of_inputs.get("dtype") == "int8"
            return known and (is_static or is_of_tokens)
        case "int4" | "uint4":
            return not of_inputs and isinstance(weight.get("group_size"), int) and "symmetric" in weight
        case "fp4" | "fp6_e2m3" | "fp6_e3m2":
            is_mx = (weight.get("qscheme"), weight.get("group_size"), weight.get("scale_format"))
            is_same = of_inputs.get("dtype") == weight["dtype"] and of_inputs.get("is_dynamic") is True
            return is_mx == ("per_group", 32, "e8m0") and (not of_inputs or is_same)
        case _:
            return False


def _orders_groups(config: JsonFields) -> bool:
    return has_groups_where(config, lambda _, weights: weights.get("actorder") in ("group", "dynamic"))


def _is_sparse(config: JsonFields) -> bool:
    return bool(as_object(config.get("sparsity_config")).get("targets"))


def _orders_columns(config: JsonFields) -> bool:
    """Return whether GPTQ's groups follow an order of columns."""
    return config.get("desc_act") is True and config.get("group_size") != -1


RUNTIME = Runtime(
    "vLLM",
    "0.33.0",
    layouts=(
        Layout(frozenset({PLAIN}), "model_executor/model_loader/default_loader.py"),
        Layout(
            words("gptq gptq_v2"),
            LAYERS + "auto_gptq.py: AutoGPTQConfig.TYPE_MAP; utils/marlin_utils.py: MARLIN_SUPPORTED_GROUP_SIZES",
            GPTQ,
            MARLIN,
        ),
        Layout(words("awq_gemm"), LAYERS + "auto_awq.py: AutoAWQConfig.TYPE_MAP", AWQ, Limits(frozenset({4}))),
        Layout(
            words("ct_pack"),
            LAYERS + "compressed_tensors/schemes/compressed_tensors_wNa16.py: WNA16_SUPPORTED_TYPES_MAP",
            CT,
            Limits(frozenset(range(2, 9))),
        ),
        Layout(
            OF_COMPRESSED_TENSORS - words("ct_pack"),
            LAYERS + "compressed_tensors/compressed_tensors.py: _get_scheme_from_parts",
            CT,
        ),
        Layout(words("fp8_tensor fp8_block"), LAYERS + "fp8.py: Fp8LinearMethod.create_weights", words("fp8")),
        Layout(
            OF_MODELOPT,
            LAYERS + "modelopt.py: LINEAR_ALGOS",
            MODELOPT | words("nvfp4 w4a16_nvfp4 fp8 mxfp8 mixed_precision"),
        ),
        Layout(words("gpt_oss_mxfp4"), LAYERS + "mxfp4.py", words("mxfp4 gpt_oss_mxfp4")),
        Layout(
            words("gptq gptq_v2"),
            LAYERS + "inc/schemes/inc_wna16_linear.py: INCWNA16LinearScheme._build_gptq_method",
            words("auto-round"),
            MARLIN,
        ),
        Layout(
            words("awq_gemm"),
            LAYERS + "inc/schemes/inc_wna16_linear.py: INCWNA16LinearScheme._build_awq_method",
            words("auto-round"),
            Limits(frozenset({4})),
        ),
        Layout(
            words("fp8_tensor fp8_row int8_tensor int8_row mxfp4 mxfp6_e2m3 mxfp6_e3m2 quark_int4"),
            LAYERS + "quark/quark.py: QuarkConfig._get_scheme_cls_from_config",
            words("quark"),
        ),
        Layout(
            words("torchao_int4 torchao_int8 torchao_intx torchao_fp8"),
            LAYERS + "torchao.py: TorchAOLinearMethod; model_loader/default_loader.py, strategy torchao",
            words("torchao"),
        ),
        Layout(words("mxfp8"), LAYERS + "__init__.py: mxfp8", words("mxfp8")),
    ),
    rules=(
        check_class,
        check_left,
        check_cache_scales,
        partial(check_awq_layout, place=LAYERS + "auto_awq.py: AutoAWQLinearMethod.create_weights"),
        partial(check_rounded, place=LAYERS + "inc/inc.py: INCConfig"),
        partial(check_quark, has_scheme=_has_quark_scheme, layers=LAYERS),
        check_torchao,
    ),
    configs=(
        ConfigRule(
            frozenset(),
            has_unknown_method(METHODS),
            "does not know the quant_method: ValueError, Unknown quantization method",
            "config/model.py: ModelConfig._verify_quantization",
        ),
        ConfigRule(
            words("fbgemm_fp8 fp_quant"),
            always,
            "refuses this method, which is deprecated, unless allow_deprecated_quantization is set: ValueError",
            LAYERS + "__init__.py: DEPRECATED_QUANTIZATION_METHODS",
        ),
        ConfigRule(
            GPTQ,
            lacks("bits", "group_size", "desc_act", "sym"),
            "needs bits, group_size, desc_act and sym in the configuration: ValueError",
            LAYERS + "auto_gptq.py: AutoGPTQConfig.from_config",
        ),
        ConfigRule(
            GPTQ,
            _orders_columns,
            "no longer loads GPTQ with groups in the order of activations (desc_act true): ValueError",
            LAYERS + "utils/gptq_utils.py: normalize_and_validate_gptq_desc_act",
        ),
        ConfigRule(
            AWQ,
            lambda config: (
                "zero_point" not in config
                or not config.keys() & {"w_bit", "bits"}
                or not config.keys() & {"q_group_size", "group_size"}
            ),
            "needs bits, group_size and zero_point in the configuration: ValueError",
            LAYERS + "auto_awq.py: AutoAWQConfig.from_config",
        ),
        ConfigRule(
            words("auto-round"),
            lacks("bits", "group_size"),
            "needs bits and group_size in the configuration: ValueError",
            LAYERS + "inc/inc.py: INCConfig.from_config",
        ),
        ConfigRule(
            words("quark"),
            lacks("export"),
            "needs export in the configuration: ValueError",
            LAYERS + "quark/quark.py: QuarkConfig.from_config",
        ),
        ConfigRule(
            words("torchao"),
            lambda config: list(as_object(config.get("quant_type"))) != ["default"],
            'needs one quant_type, "default", in the configuration: AssertionError',
            LAYERS + "torchao.py: TorchAOConfig.from_config",
        ),
        ConfigRule(
            words("fp8"),
            lacks_activation_scheme,
            "needs activation_scheme in the configuration: ValueError",
            LAYERS + "fp8.py: Fp8Config.from_config",
        ),
        ConfigRule(
            words("fp8"),
            lambda config: config.get("weight_block_size") is not None and config.get("activation_scheme") == "static",
            "takes blocks with dynamic activations only: ValueError",
            LAYERS + "fp8.py: Fp8Config.__init__",
        ),
        ConfigRule(
            CT,
            _orders_groups,
            "no longer loads groups in the order of activations (actorder group or dynamic): ValueError",
            LAYERS + "compressed_tensors/compressed_tensors.py: _quantization_scheme_map_from_config",
        ),
        ConfigRule(
            CT,
            has_integers_alone,
            "takes int-quantized weights only with quantized inputs (input_activations): AssertionError",
            LAYERS + "compressed_tensors/compressed_tensors.py: _quantization_scheme_map_from_config",
        ),
        ConfigRule(
            CT,
            _is_sparse,
            "no longer loads sparse weights (sparsity_config): DeprecationWarning, raised",
            LAYERS + "compressed_tensors/compressed_tensors.py: _parse_sparsity_config",
        ),
        ConfigRule(
            MODELOPT,
            lambda config: find_algorithm(config) not in ALGORITHMS,
            f"takes of ModelOpt's quant_algo only {', '.join(sorted(ALGORITHMS))}: ValueError",
            LAYERS + "modelopt.py: QUANT_ALGOS",
        ),
    ),
    tensors=(
        TensorRule(
            "vLLM (at 0045689bdb23)",
            "vllm/model_executor/parameter.py: _ColumnvLLMParameter.load_column_parallel_weight and BasevLLMParameter."
            "_assert_and_load want equal shapes; fp8_utils.py, create_fp8_scale_parameter, and "
            "schemes/compressed_tensors_w8a8_int8.py make it (rows, 1)",
            "scales of channels as [rows, 1], not [rows]",
            "refuses the file with an AssertionError",
            re.compile(r"\.weight_scale$"),
            dimensions=1,
            method="compressed-tensors",
            beside={".weight": FLOAT8 | {"I8"}},
        ),
        TensorRule(
            "vLLM (at 0045689bdb23)",
            "vllm/model_executor/layers/quantization/modelopt.py: ModelOptFp8LinearMethod.create_weights; the names "
            "are in NVIDIA/TensorRT-LLM docs/source/architecture/checkpoint.md",
            "scales as weight_scale, not under TensorRT-LLM's name weights_scaling_factor",
            "does not find them; TensorRT-LLM reads them",
            re.compile(r"\.weights_scaling_factor$"),
            beside={".weight": FLOAT8},
        ),
    ),
    split=find_cuts,
    findings=OF_FUSED,
)
