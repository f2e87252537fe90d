"""What mlx-lm loads.

Reference: ml-explore/mlx-lm@0.32.2 mlx_lm/utils.py load_model, _get_classes, _compressed_tensors_quantization,
_transform_awq_weights.
"""

from collections.abc import Iterator

from quanterr.documents.loading import DIFFERS, REFUSES, LoadingReason
from quanterr.findings.configs import CONFIG
from quanterr.findings.contents import Contents
from quanterr.findings.runtimes.classes import MLX
from quanterr.findings.runtimes.model import (
    PLAIN,
    ConfigRule,
    Container,
    Layout,
    Runtime,
    is_one_of,
    leave_open,
    list_unread,
    refuse,
    words,
)
from quanterr.util.strict_json import JsonFields, as_object
from quanterr.util.text import display, itemize

LOADING = "mlx_lm/utils.py: load_model"
# model_type → the module of another type that loads it (MODEL_REMAPPING).
OTHERS = words(
    "mistral llava phi-msft falcon_mamba joyai_llm_flash kimi_k2 qwen2_5_vl minimax_m2 iquestcoder xverse "
    "gemma4_unified deepseek_v41_text"
)
METHODS = words("bitnet mxfp4 mxfp8 fp8 compressed-tensors modelopt awq gptq")
COMPRESSED = words("nvfp4-pack-quantized mxfp4-pack-quantized pack-quantized")


def check_files(contents: Contents) -> Iterator[LoadingReason]:
    """Yield why the files are not read, or no class is found for the model."""
    checkpoint = contents.checkpoint
    config = checkpoint.config.get(CONFIG, {})
    name = config.get("model_type")
    names = [file.path.name for file in checkpoint.files]
    if not config:
        yield refuse(f"needs {CONFIG}, which is not stored: FileNotFoundError", "mlx_lm/utils.py: load_config")
    elif not all(file.startswith("model") and file.endswith(".safetensors") for file in names):
        yield refuse(f"reads model*.safetensors alone, not {display(names[0])}: FileNotFoundError", LOADING)
    elif "model_file" in config:
        yield leave_open("takes the class from the model's own code", LOADING)
    elif not is_one_of(name, MLX | OTHERS):
        message = f"has no class for model_type {display(str(name))}: ValueError; mlx-vlm may have one"
        yield refuse(message, "mlx_lm/utils.py: _get_classes")


def _has_own(contents: Contents) -> bool:
    return "quantization" in contents.checkpoint.config.get(CONFIG, {})


def read_config(contents: Contents) -> JsonFields:
    """Return the configuration of another program, which counts without one of MLX."""
    return {} if _has_own(contents) else contents.labels.config


def check_method(contents: Contents) -> Iterator[LoadingReason]:
    """Yield what becomes of codes that no configuration declares, and of an order of columns."""
    checkpoint, config = contents.checkpoint, contents.labels.config
    if _has_own(contents):
        return
    coded = [*(stored.name for stored in contents.weights if stored.weight.has_codes), *list_unread(contents)]
    if not config and coded:
        message = f'finds no "quantization" in {CONFIG}, and tensors of no module: {itemize(coded, 3)}: ValueError'
        yield refuse(message, LOADING, coded)
    if config.get("quant_method") == "gptq" and (
        names := [name for name in checkpoint.entries if name.endswith(".g_idx")]
    ):
        yield refuse("takes no order of columns (g_idx): ValueError", "mlx_lm/utils.py: _transform_awq_weights", names)


RUNTIME = Runtime(
    "MLX",
    "mlx-lm 0.32.2",
    layouts=(
        Layout(frozenset({PLAIN}), LOADING, is_run=True),
        Layout(words("mlx_affine"), LOADING, is_run=True),
        Layout(words("mlx_mxfp4 mlx_nvfp4 mlx_mxfp8"), LOADING),
        Layout(words("gpt_oss_mxfp4"), LOADING, words("mxfp4")),
        Layout(words("bitnet"), LOADING, words("bitnet")),
    ),
    rules=(check_files, check_method),
    container=Container(False, "reads safetensors files alone: FileNotFoundError", LOADING),
    read_config=read_config,
    configs=(
        ConfigRule(
            frozenset(),
            lambda config: not is_one_of(config.get("quant_method"), METHODS),
            "does not know the quant_method, and finds tensors of no module: ValueError",
            LOADING,
        ),
        ConfigRule(
            words("compressed-tensors"),
            lambda config: not is_one_of(config.get("format"), COMPRESSED),
            f"takes of compressed-tensors only {', '.join(sorted(COMPRESSED))}: ValueError",
            "mlx_lm/utils.py: _compressed_tensors_quantization",
        ),
        ConfigRule(
            words("modelopt"),
            lambda config: (as_object(config.get("quantization")) or config).get("quant_algo") != "NVFP4",
            "takes of ModelOpt's quant_algo only NVFP4: ValueError",
            LOADING,
        ),
        ConfigRule(
            words("awq gptq"),
            lambda config: config.get("bits", 4) != 4,
            "takes 4 bits only: ValueError",
            "mlx_lm/utils.py: _transform_awq_weights",
        ),
    ),
    findings={
        **dict.fromkeys(("missing_codes", "incomplete", "undeclared_codes"), REFUSES),
        **dict.fromkeys(("config_mismatch", "norm_offset", "wrong_convention"), DIFFERS),
    },
)
