"""The loaders of quantized checkpoints, by families of formats and by the quant_methods of config.json.

A family has the formats that the same loaders read. Formats in no family need no quant_method, as their files describe
them: GGUF, the files of exllama, layouts of ComfyUI.
"""

from typing import NamedTuple

from quanterr.advice.runtimes import OF_COMFYUI

MLX = "MLX"
EXCLUSIVE_FAMILIES = (
    "bitsandbytes",
    "GPTQ",
    "AWQ",
    "HQQ",
    "quanto",
    "torchao",
)  # families: only their loaders read them


def _split_words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Formats that ComfyUI reads by their labels.
COMFYUI_FORMATS = OF_COMFYUI - {"int4_tensorwise"}


COMMON_FORMATS = _split_words("fp8_tensor fp8_row int8_tensor int8_row")  # plain codes with a scale: easy to read


class Family(NamedTuple):
    """Formats that the same loaders read: what these are called, and the quant_methods that select them."""

    name: str
    formats: frozenset[str]
    methods: frozenset[str] = frozenset()  # empty: several loaders read such tensors
    tensors: str = ""  # families with an equal value name tensors alike, so the loader of another refuses their shapes
    has_own: bool = False  # the file describes its weights itself, in its header or in tensors


def _make_family(name: str, formats: str, methods: str = "", tensors: str = "", has_own: bool = False) -> Family:
    return Family(name, _split_words(formats), _split_words(methods), tensors, has_own)


MULTI_LAYOUT_METHODS = _split_words(
    "auto-round auto_round intel/auto-round inc ipex moe_wna16 rtn"
)  # methods with layouts of others
FAMILIES = (
    _make_family("bitsandbytes", "bnb_nf4 bnb_fp4 bnb_int8", "bitsandbytes bitsandbytes_4bit bitsandbytes_8bit"),
    _make_family(
        "GPTQ",
        "gptq gptq_v2 gptq_p gptq_marlin",
        "gptq gptq_v2 gptq_marlin gptqmodel marlin bitblas gptq_bitblas",
        "qweight",
    ),
    _make_family("AWQ", "awq_gemm awq_gemv awq_gemv_fast awq_marlin", "awq awq_marlin", "qweight"),
    _make_family(
        "compressed-tensors",
        "ct_pack ct_nvfp4 ct_nvfp4_e5m3 ct_mxfp4 ct_mxfp6 ct_marlin24 ct_sparse_bitmask ct_sparse24_bitmask",
        "compressed-tensors compressed_tensors sparseml nvfp4",
    ),
    # INT8 with a scale: vllm-project/vllm model_executor/layers/quantization/quark/quark.py QuarkW8A8Int8.
    _make_family("compressed-tensors", "ct_int", "compressed-tensors compressed_tensors sparseml quark"),
    _make_family(MLX, "mlx_affine mlx_mxfp4 mlx_nvfp4 mlx_mxfp8"),
    _make_family("scaled codes", "fp8_tensor fp8_row fp8_block int8_tensor int8_row int8_block mxfp8 nvfp4"),
    _make_family("MXFP4 of gpt-oss", "gpt_oss_mxfp4", "mxfp4 gpt_oss_mxfp4 quark modelopt"),
    _make_family("MX", "mxfp4 mxfp6_e2m3 mxfp6_e3m2", "quark modelopt modelopt_mixed mx mxfp4 mxfp6 fp8"),
    _make_family(
        "ModelSlim", "modelslim_int modelslim_int4 modelslim_fp8 modelslim_mxfp4_dual", "ascend modelslim msmodelslim"
    ),
    _make_family("SINQ", "sinq", "sinq"),
    _make_family("QQQ", "qqq", "qqq"),
    _make_family("ParoQuant", "paroquant", "paroquant"),
    _make_family("W4AFP8", "w4afp8", "w4afp8"),
    _make_family("HQQ", "hqq", "hqq", has_own=True),
    _make_family("EETQ", "eetq", "eetq"),
    _make_family("BitNet", "bitnet", "bitnet"),
    _make_family("SpQR", "spqr", "spqr"),
    _make_family("VPTQ", "vptq", "vptq"),
    _make_family("quanto", "quanto_int8 quanto_float8 quanto_int4 quanto_int2", "quanto"),
    _make_family("ModelOpt's INT4", "modelopt_int4", "modelopt modelopt_mixed"),
    _make_family("Quark", "quark_fp4 quark_int4 quark_int4_fp8", "quark"),
    _make_family(
        "torchao",
        "torchao_int8 torchao_intx torchao_fp8 torchao_mx torchao_nvfp4 torchao_int4",
        "torchao",
    ),
)
# Other methods that some loader knows: transformers' AUTO_QUANTIZER_MAPPING, vLLM's and SGLang's QUANTIZATION_METHODS,
# diffusers' and those of programs that have formats of their own.
OTHER_METHODS = _split_words(
    "aqlm autoawq bitnet blockwise_int8 deepspeedfp eetq exl2 exl3 experts_int8 fbgemm_fp8 finegrained_fp8 "
    "fouroversix fp8 fp_quant gemma gguf higgs hqq humming int8 metal mlx modelopt modelopt_fp4 modelopt_fp8 "
    "modelopt_mixed modelopt_mxfp8 mx mxfp4 mxfp6 mxfp8 nunchaku nvfp4 nvidia petit_nvfp4 prism "
    "ptpc_fp8 qoq qserve quanto quark quartet quip quip# quip_sharp sdnq smoothquant spinquant spqr svdquant "
    "torchao tpu_int8 vptq w4a8_awq w8a8_fp8 w8a8_int8"
)
KNOWN_METHODS = OTHER_METHODS.union(MULTI_LAYOUT_METHODS, *(family.methods for family in FAMILIES))
EXCLUSIVE_METHODS = frozenset[str]().union(
    *(family.methods for family in FAMILIES if family.name in EXCLUSIVE_FAMILIES)
)
# Formats of scaled codes that the loaders of a method read, where these are not all:
# vllm-project/vllm model_executor/layers/quantization/fp8.py Fp8LinearMethod.create_weights, and what the names say.
FORMATS_BY_METHOD = {
    "fp8": _split_words("fp8_tensor fp8_row fp8_block mxfp8 nvfp4"),
    "w4afp8": _split_words("fp8_tensor fp8_row fp8_block"),
    "mxfp8": _split_words("mxfp8"),
    "w8a8_int8": _split_words("int8_tensor int8_row int8_block"),
    "blockwise_int8": _split_words("int8_block"),
}
INVERSE, COMPRESSED = "_scale_inv", "compressed-tensors"  # the end of a scale's name; a method that does not write it
# Settings that quant_method bitsandbytes needs or forbids: transformers' AutoHfQuantizer.supports_quant_method.
BNB_SETTINGS = {
    "bnb_nf4": ("load_in_4bit", "load_in_8bit"),
    "bnb_fp4": ("load_in_4bit", "load_in_8bit"),
    "bnb_int8": ("load_in_8bit", "load_in_4bit"),
}
