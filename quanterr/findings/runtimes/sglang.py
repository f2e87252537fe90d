"""What SGLang loads.

Reference: sgl-project/sglang@0.5.23 srt/configs/model_config.py _verify_quantization, srt/layers/quantization/.
"""

from collections.abc import Iterator
from functools import partial

from quanterr.documents.loading import LoadingReason
from quanterr.findings.configs import CONFIG
from quanterr.findings.contents import Contents
from quanterr.findings.runtimes.classes import SGLANG
from quanterr.findings.runtimes.conditions import (
    check_architectures,
    check_awq_layout,
    check_lost_order,
    has_integers_alone,
    has_unknown_method,
    lacks,
    lacks_activation_scheme,
)
from quanterr.findings.runtimes.model import (
    MARLIN,
    OF_FUSED,
    PLAIN,
    ConfigRule,
    Layout,
    Limits,
    Runtime,
    leave_open,
    refuse,
    words,
)
from quanterr.findings.runtimes.schemes import ROUNDED, check_quark, check_rounded
from quanterr.util.strict_json import JsonFields, as_object
from quanterr.util.text import display, itemize

LAYERS = "srt/layers/quantization/"
METHODS = words(
    "auto-round auto-round-int8 awq awq_marlin bitsandbytes blockwise_int8 compressed-tensors fp8 gguf gptq "
    "gptq_marlin humming minimax_m3_nvfp4 modelopt modelopt_fp4 modelopt_fp8 modelopt_mixed modelslim moe_wna16 mxfp4 "
    "mxfp8 mxfp_w4a8 nvfp4_online petit_nvfp4 quark quark_int4fp8_moe quark_mxfp4 w4afp8 w8a8_fp8 w8a8_int8"
)
# Architectures that transformers calls the same, and whose q and k have the order of rows that SGLang rotates by.
GGUF_CLASSES = words("qwen2 qwen3")
GPTQ, AWQ, CT = words("gptq gptq_marlin"), words("awq awq_marlin"), words("compressed-tensors")


def check_class(contents: Contents) -> Iterator[LoadingReason]:
    """Yield why no class is found for the model."""
    if (metadata := contents.checkpoint.gguf) is not None:
        if metadata.architecture not in GGUF_CLASSES:
            message = f"reads GGUF files of some architectures; no rule covers {display(str(metadata.architecture))}"
            yield leave_open(message, "srt/model_loader/loader.py: GGUFModelLoader._get_gguf_weights_map")
        return
    missing = refuse(f"needs {CONFIG}, which is not stored", "srt/utils/hf_transformers_utils.py: get_config")
    yield from check_architectures(contents, SGLANG, missing, "srt/models/")


def check_rounded_limits(contents: Contents) -> Iterator[LoadingReason]:
    """Yield a reason if AutoRound's codes have bits, groups or zero points that Marlin's kernels do not take."""
    declarations = contents.labels.declarations
    of_gptq = [stored for stored in contents.weights if stored.weight.format in ROUNDED["auto_round:auto_gptq"]]
    others = [
        stored.name for stored in of_gptq if MARLIN.find_excess(stored.weight, declarations.of(stored.weight.name))
    ]
    if contents.labels.method == "auto-round" and others:
        message = f"no rule covers these bits, groups or zero points: {itemize(others, 3)}"
        yield leave_open(message, LAYERS + "auto_round.py: AutoRoundConfig.apply_gptq_quant_layer", others)


def _has_quark_scheme(scheme: JsonFields) -> bool:
    """Return whether linear layers have a class for a scheme of Quark: FP8 with inputs, or MXFP4 with inputs."""
    weight, inputs = as_object(scheme.get("weight")), as_object(scheme.get("input_tensors"))
    if scheme.get("output_tensors") or scheme.get("bias") or weight.get("is_dynamic"):
        return False
    if weight.get("dtype") != inputs.get("dtype"):
        return False
    if weight.get("dtype") == "fp8_e4m3":
        is_static = inputs.get("qscheme") == "per_tensor"
        return weight.get("qscheme") in ("per_tensor", "per_channel") and bool(inputs.get("is_dynamic") or is_static)
    both = [[part.get(key) for key in ("qscheme", "group_size", "scale_format")] for part in (weight, inputs)]
    is_mxfp4 = weight.get("dtype") == "fp4" and both == [["per_group", 32, "e8m0"]] * 2
    return is_mxfp4 and inputs.get("is_dynamic") is not False


RUNTIME = Runtime(
    "SGLang",
    "0.5.23",
    layouts=(
        Layout(frozenset({PLAIN}), "srt/model_loader/loader.py"),
        Layout(
            words("gptq gptq_v2"),
            LAYERS + "gptq/gptq.py: GPTQMarlinConfig.TYPE_MAP; marlin_utils.py",
            GPTQ,
            MARLIN,
        ),
        Layout(words("awq_gemm"), LAYERS + "awq/awq.py: AWQConfig", AWQ, Limits(frozenset({4}))),
        Layout(
            words("ct_pack"),
            LAYERS + "compressed_tensors/compressed_tensors.py: WNA16_SUPPORTED_BITS",
            CT,
            Limits(frozenset({4, 8})),
        ),
        Layout(
            words("ct_int ct_nvfp4 fp8_tensor fp8_row fp8_block int8_tensor int8_row"),
            LAYERS + "compressed_tensors/compressed_tensors.py: _get_scheme_from_parts",
            CT,
        ),
        Layout(words("fp8_tensor fp8_block"), LAYERS + "fp8.py: Fp8LinearMethod", words("fp8")),
        Layout(words("mxfp8"), LAYERS + "fp8.py: Fp8Config.from_config", words("mxfp8")),
        Layout(
            words("fp8_tensor"), LAYERS + "modelopt_quant.py: ModelOptFp8Config", words("modelopt modelopt_fp8 fp8")
        ),
        Layout(words("nvfp4"), LAYERS + "modelopt_quant.py: ModelOptFp4Config", words("modelopt modelopt_fp4 nvfp4")),
        Layout(
            words("gptq gptq_v2"),
            LAYERS + "auto_round.py: AutoRoundConfig.apply_gptq_quant_layer",
            words("auto-round"),
            MARLIN,
        ),
        Layout(
            words("awq_gemm"),
            LAYERS + "auto_round.py: AutoRoundConfig.apply_awq_quant_layer",
            words("auto-round"),
            Limits(frozenset({4})),
        ),
        Layout(
            words("fp8_tensor fp8_row mxfp4"),
            LAYERS + "quark/quark.py: QuarkConfig._get_scheme_from_config",
            words("quark"),
        ),
        Layout(
            words(
                "gguf_q4_0 gguf_q4_1 gguf_q5_0 gguf_q5_1 gguf_q8_0 gguf_q2_k gguf_q3_k gguf_q4_k gguf_q5_k gguf_q6_k "
                "gguf_iq1_s gguf_iq1_m gguf_iq2_xxs gguf_iq2_xs gguf_iq2_s gguf_iq3_xxs gguf_iq3_s gguf_iq4_nl "
                "gguf_iq4_xs"
            ),
            LAYERS + "gguf.py: DEQUANT_TYPES",
        ),
        Layout(words("w4afp8 fp8_block"), LAYERS + "w4afp8.py", words("w4afp8")),
        Layout(words("gpt_oss_mxfp4"), LAYERS + "mxfp4.py", words("mxfp4")),
    ),
    rules=(
        check_class,
        partial(check_lost_order, place=LAYERS + "gptq/schemes/gptq_marlin.py: create_weights"),
        partial(check_awq_layout, place=LAYERS + "awq/schemes/: create_weights"),
        partial(check_rounded, place=LAYERS + "auto_round.py: AutoRoundConfig"),
        check_rounded_limits,
        partial(check_quark, has_scheme=_has_quark_scheme, layers=LAYERS),
    ),
    other_types="computes with no such type of ggml: NotImplementedError",
    configs=(
        ConfigRule(
            frozenset(),
            has_unknown_method(METHODS),
            "does not know the quant_method: ValueError, Invalid quantization method",
            LAYERS + "__init__.py: get_quantization_config",
        ),
        ConfigRule(
            GPTQ,
            lacks("bits", "group_size", "desc_act", "sym"),
            "needs bits, group_size, desc_act and sym in the configuration: ValueError",
            LAYERS + "gptq/gptq.py: GPTQMarlinConfig.from_config",
        ),
        ConfigRule(
            AWQ,
            lacks("zero_point"),
            "needs zero_point in the configuration: ValueError",
            LAYERS + "awq/awq.py: AWQConfig.from_config",
        ),
        ConfigRule(
            words("quark"),
            lacks("export"),
            "needs export in the configuration: ValueError",
            LAYERS + "quark/quark.py: QuarkConfig.from_config",
        ),
        ConfigRule(
            words("fp8 mxfp8"),
            lacks_activation_scheme,
            "needs activation_scheme in the configuration: ValueError",
            LAYERS + "fp8.py: Fp8Config.from_config",
        ),
        ConfigRule(
            CT,
            has_integers_alone,
            "takes int-quantized weights only with quantized inputs (input_activations)",
            LAYERS + "compressed_tensors/compressed_tensors.py: _get_scheme_from_parts",
        ),
    ),
    findings=OF_FUSED,
)
