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

LAYERS = "srt/layers/quantization/"
METHODS = words(
    "auto-round auto-round-int8 awq awq_marlin bitsandbytes blockwise_int8 compressed-tensors fp8 gguf gptq "
    "gptq_marlin humming minimax_m3_nvfp4 modelopt modelopt_fp4 modelopt_fp8 modelopt_mixed modelslim moe_wna16 mxfp4 "
    "mxfp8 mxfp_w4a8 nvfp4_online petit_nvfp4 quark quark_int4fp8_moe quark_mxfp4 w4afp8 w8a8_fp8 w8a8_int8"
)
GPTQ, AWQ, CT = words("gptq gptq_marlin"), words("awq awq_marlin"), words("compressed-tensors")


def check_class(contents: Contents) -> Iterator[LoadingReason]:
    """Yield why no class is found for the model."""
    if contents.checkpoint.gguf is not None:
        yield leave_open("reads some GGUF files, with gguf; no rule covers these", LAYERS + "gguf.py")
        return
    missing = refuse(f"needs {CONFIG}, which is not stored", "srt/utils/hf_transformers_utils.py: get_config")
    yield from check_architectures(contents, SGLANG, missing, "srt/models/")


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
        Layout(words("w4afp8 fp8_block"), LAYERS + "w4afp8.py", words("w4afp8")),
        Layout(words("gpt_oss_mxfp4"), LAYERS + "mxfp4.py", words("mxfp4")),
    ),
    rules=(check_class, partial(check_lost_order, place=LAYERS + "gptq/schemes/gptq_marlin.py: create_weights")),
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
            words("fp8"),
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
