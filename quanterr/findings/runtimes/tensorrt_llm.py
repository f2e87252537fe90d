"""What TensorRT-LLM loads, with its PyTorch backend.

Reference: NVIDIA/TensorRT-LLM@008e0af8980f tensorrt_llm/_torch/model_config.py ModelConfig.load_hf_quant_config,
_build_modelopt_quant_config; @21156a7a57ac tensorrt_llm/models/quant_config_utils.py.
"""

from collections.abc import Iterator

from quanterr.documents.loading import DIFFERS, LoadingReason
from quanterr.findings.configs import CONFIG
from quanterr.findings.contents import Contents
from quanterr.findings.runtimes.classes import TENSORRT_LLM
from quanterr.findings.runtimes.conditions import find_algorithm, has_groups_where
from quanterr.findings.runtimes.model import (
    OF_FUSED,
    PLAIN,
    ConfigRule,
    Container,
    Layout,
    Runtime,
    is_one_of,
    leave_open,
    refuse,
    words,
)
from quanterr.util.strict_json import JsonFields, as_object
from quanterr.util.text import display

QUANTIZATION = "tensorrt_llm/_torch/model_config.py: ModelConfig.load_hf_quant_config"
GROUPS = "tensorrt_llm/models/quant_config_utils.py: _quant_config_from_config_group"
CT, MODELOPT = words("compressed-tensors"), words("modelopt modelopt_fp4 modelopt_mixed nvfp4 fp8")
MODELOPT_PLACE = "tensorrt_llm/_torch/model_config.py: ModelConfig._build_modelopt_quant_config"
ALGORITHMS = words("FP8 NVFP4")  # the algorithms of ModelOpt that it knows
READ = words("fp8 mxfp4 mxfp8 compressed-tensors")  # quant_method of others
MXFP4 = "mxfp4-pack-quantized"


def check_class(contents: Contents) -> Iterator[LoadingReason]:
    """Yield why no class is found for the model."""
    config = contents.checkpoint.config.get(CONFIG, {})
    names = config.get("architectures")
    first = names[0] if isinstance(names, list) and names else None
    if not config:
        yield refuse(f"needs {CONFIG}, which is not stored", "tensorrt_llm/_torch/pyexecutor/config_utils.py")
    elif not is_one_of(first, TENSORRT_LLM):
        message = f"has no class for {display(str(first))} in its PyTorch backend; AutoDeploy may load it"
        yield leave_open(message, "tensorrt_llm/_torch/models/_arch_index.py: MODEL_ARCH_TO_MODULE")


def check_method(contents: Contents) -> Iterator[LoadingReason]:
    """Yield a reason if no branch reads what the configuration declares, so that modules are built unquantized."""
    config, method = contents.labels.config, contents.labels.method
    if algorithm := find_algorithm(config):
        if algorithm not in ALGORITHMS:
            yield leave_open(f"no rule covers {display(algorithm)} of ModelOpt", MODELOPT_PLACE)
    elif method is None:
        return
    elif method not in READ:
        message = f"reads no quant_method {display(method)}, and builds unquantized modules; no rule covers these"
        yield leave_open(message, QUANTIZATION)
    elif method == "fp8" and not config.get("weight_block_size"):
        yield leave_open("no rule covers FP8 without weight_block_size", QUANTIZATION)
    elif method in CT and len(as_object(config.get("config_groups"))) > 1:
        yield leave_open("no rule covers several config_groups", "tensorrt_llm/models/quant_config_utils.py")


def _is_mxfp4(group: JsonFields, weights: JsonFields) -> bool:
    is_float = (weights.get("num_bits"), weights.get("type"), weights.get("strategy")) == (4, "float", "group")
    return group.get("format") == MXFP4 or (is_float and not group.get("input_activations"))


def _lacks_inputs(group: JsonFields, weights: JsonFields) -> bool:
    """Return whether a group has no scheme for inputs, and is not MXFP4, which needs none."""
    return not group.get("input_activations") and not _is_mxfp4(group, weights)


def _has_other_scheme(group: JsonFields, weights: JsonFields) -> bool:
    """Return whether a group with a scheme for inputs is none of those that it knows."""
    inputs = as_object(group.get("input_activations"))
    scheme = (weights.get("num_bits"), weights.get("strategy"), inputs.get("strategy"))
    if not inputs or _is_mxfp4(group, weights):
        return False
    if scheme == (8, "block", "group"):
        return inputs.get("group_size") != 128
    if scheme == (4, "tensor_group", "tensor_group"):
        return weights.get("type") != "float" or weights.get("group_size") != 16
    return scheme != (8, "channel", "token")


RUNTIME = Runtime(
    "TensorRT-LLM",
    "008e0af8980f",
    layouts=(
        Layout(frozenset({PLAIN}), "tensorrt_llm/_torch/models/checkpoints/hf/weight_loader.py"),
        Layout(words("fp8_block"), QUANTIZATION, words("fp8 compressed-tensors")),
        Layout(words("gpt_oss_mxfp4"), QUANTIZATION, words("mxfp4")),
        Layout(words("mxfp8"), QUANTIZATION, words("mxfp8")),
        Layout(words("fp8_row ct_nvfp4 ct_mxfp4"), GROUPS, CT),
        Layout(words("fp8_tensor nvfp4"), MODELOPT_PLACE, MODELOPT),
    ),
    rules=(check_class, check_method),
    configs=(
        ConfigRule(
            words("fp8"),
            lambda config: (config.get("weight_block_size") or [128, 128]) != [128, 128],
            "takes blocks of 128 x 128 only: AssertionError",
            QUANTIZATION,
        ),
        ConfigRule(
            CT,
            lambda config: not as_object(config.get("config_groups")),
            "needs config_groups in the configuration: ValueError",
            "tensorrt_llm/models/quant_config_utils.py: update_quant_config_from_compressed_tensors",
        ),
        ConfigRule(
            CT,
            lambda config: config.get("format") != MXFP4 and has_groups_where(config, _lacks_inputs),
            "takes weights without quantized inputs (input_activations) in MXFP4 only: TypeError",
            GROUPS,
        ),
        ConfigRule(
            CT,
            lambda config: config.get("format") != MXFP4 and has_groups_where(config, _has_other_scheme),
            "takes FP8 of rows with tokens or in blocks of 128, and NVFP4 in groups of 16 only: ValueError",
            GROUPS,
        ),
        ConfigRule(
            CT,
            lambda config: has_groups_where(
                config, lambda group, weights: weights.get("num_bits") == 8 and weights.get("type") == "int"
            ),
            "takes INT8 of rows for FP8, as it does not look at the type",
            GROUPS,
            DIFFERS,
        ),
    ),
    container=Container(
        False, "reads safetensors, not GGUF files", "tensorrt_llm/_torch/models/checkpoints/hf/weight_loader.py"
    ),
    findings=OF_FUSED,
)
