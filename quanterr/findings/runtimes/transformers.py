"""What transformers loads.

Reference: huggingface/transformers@5.24.0 modeling_utils.py, quantizers/auto.py and the quantizers that it names,
modeling_gguf_pytorch_utils.py and integrations/ggml.py.
"""

import re
from collections.abc import Iterator
from functools import partial

from quanterr.documents.loading import DIFFERS, LoadingReason
from quanterr.findings.configs import CONFIG
from quanterr.findings.contents import Contents
from quanterr.findings.declared import list_left
from quanterr.findings.runtimes.classes import TRANSFORMERS
from quanterr.findings.runtimes.conditions import (
    always,
    check_lost_order,
    check_repacked,
    check_torchao,
    has_integers_alone,
    has_unknown_method,
)
from quanterr.findings.runtimes.model import (
    PLAIN,
    UNKNOWN,
    ConfigRule,
    Layout,
    Limits,
    Runtime,
    TensorRule,
    differ,
    is_one_of,
    leave_open,
    refuse,
    words,
)
from quanterr.findings.runtimes.schemes import list_quark_schemes
from quanterr.util.strict_json import JsonFields, as_object
from quanterr.util.text import count, display, itemize

QUANTIZERS = "quantizers/auto.py: AUTO_QUANTIZATION_CONFIG_MAPPING, AutoHfQuantizer.supports_quant_method"
METHODS = words(
    "aqlm auto-round awq bitnet bitsandbytes bitsandbytes_4bit bitsandbytes_8bit compressed-tensors eetq fbgemm_fp8 "
    "fouroversix fp8 fp_quant gemma gguf gptq higgs hqq metal mxfp4 mxfp8 nvfp4 quanto quark sinq spqr torchao vptq"
)
OF_AWQ = words("gemm gemv gemv_fast llm-awq")  # AwqFormat
GGUF_CLASSES = words(
    "bloom deci falcon gemma2 gemma3 gemma4 gpt2 gpt-oss lfm2 llama mamba minimax-m2 mistral nemotron phi3 qwen2 "
    "qwen2moe qwen3 qwen3moe stablelm starcoder2 t5 t5encoder"
)


def check_class(contents: Contents) -> Iterator[LoadingReason]:
    """Yield why no class is found for the model."""
    checkpoint = contents.checkpoint
    if checkpoint.gguf is not None:
        if (name := checkpoint.gguf.architecture) not in GGUF_CLASSES:
            message = f"does not convert the architecture {display(str(name))} of GGUF files: ValueError"
            yield refuse(message, "modeling_gguf_pytorch_utils.py: load_gguf_checkpoint")
        return
    config = checkpoint.config.get(CONFIG, {})
    name = config.get("model_type")
    if not config:
        yield refuse(f"needs {CONFIG}, which is not stored: OSError", "configuration_utils.py: get_config_dict")
    elif not is_one_of(name, TRANSFORMERS) and "auto_map" in config:
        message = f"takes the class of model_type {display(str(name))} from the model's own code"
        yield leave_open(message, "dynamic_module_utils.py")
    elif not is_one_of(name, TRANSFORMERS):
        message = f"has no class for model_type {display(str(name))}: ValueError"
        yield refuse(message, "models/auto/configuration_auto.py: AutoConfig.from_pretrained")


def check_left(contents: Contents) -> Iterator[LoadingReason]:
    """Yield a reason if modules that the configuration quantizes are stored unquantized: their codes are random."""
    if names := list_left(contents, has_stacks=True):
        message = (
            f"builds quantized modules for {count(len(names), 'layer')} stored unquantized, and leaves their codes "
            f"random: {itemize(names, 3)}"
        )
        yield differ(message, "modeling_utils.py: _load_pretrained_model (missing and unexpected keys)", names)


def read_config(contents: Contents) -> JsonFields:
    """Return the configuration that transformers follows: other files and keys do not count."""
    config = contents.checkpoint.config.get(CONFIG, {})
    return as_object(config.get("quantization_config")) or as_object(config.get("compression_config"))


def check_undeclared(contents: Contents) -> Iterator[LoadingReason]:
    """Yield what becomes of codes where config.json has no quantization_config."""
    if contents.checkpoint.gguf is not None or read_config(contents):
        return
    coded = [stored.weight for stored in contents.weights if stored.weight.has_codes]
    misfit = [
        weight.name for weight in coded if weight.codes.name == weight.name and weight.codes.shape != weight.shape
    ]
    others = [weight.name for weight in coded if weight.name not in misfit]
    place = "modeling_utils.py: _load_pretrained_model"
    if misfit:
        message = f"finds no quantization_config, and codes of other shapes than its weights: {itemize(misfit, 3)}"
        yield refuse(f"{message}: RuntimeError", place, misfit)
    if others:
        message = f"finds no quantization_config: takes codes for weights, or leaves these random: {itemize(others, 3)}"
        yield differ(message, place, others)


def check_outer_scales(contents: Contents) -> Iterator[LoadingReason]:
    """Yield a reason if scales stand beside NVFP4 weights of GGUF files, as they are not applied."""
    entries = contents.checkpoint.entries
    of_nvfp4 = [name for name, entry in entries.items() if entry.dtype == "NVFP4"]
    if names := [name for name in of_nvfp4 if f"{name.removesuffix('.weight')}.scale" in entries]:
        message = f"does not apply the scale beside {count(len(names), 'NVFP4 weight')}: {itemize(names, 3)}"
        yield differ(message, DEQUANTIZING, names)


def _is_of_bitsandbytes(config: JsonFields) -> bool:
    """Return whether a configuration means bitsandbytes, whatever its quant_method."""
    return bool(config.get("load_in_4bit") or config.get("load_in_8bit"))


def _has_stages(config: JsonFields) -> bool:
    """Return whether a scheme of Quark has several steps for weights."""
    return any(isinstance(scheme.get("weight"), list) for scheme in list_quark_schemes(config))


QUARK = "quantizers/quantizer_quark.py, by amd-quark 0.13: quark/torch/export/api.py _map_to_quark"
COMPRESSED = "quantizers/quantizer_compressed_tensors.py; compressed_tensors/compressors/"
DEQUANTIZING = "modeling_gguf_pytorch_utils.py: load_gguf_checkpoint, which dequantizes with gguf"
RUNTIME = Runtime(
    "transformers",
    "5.24.0",
    layouts=(
        Layout(frozenset({PLAIN}), "modeling_utils.py: PreTrainedModel.from_pretrained", is_run=True),
        Layout(
            words("ct_pack ct_nvfp4 fp8_row int8_row mxfp8"),
            COMPRESSED,
            words("compressed-tensors"),
            is_run=True,
        ),
        Layout(
            words("ct_int ct_mxfp4 ct_mxfp6 fp8_tensor fp8_block int8_tensor"),
            COMPRESSED,
            words("compressed-tensors"),
        ),
        Layout(
            words("gptq gptq_v2"),
            "utils/quantization_config.py: GPTQConfig.post_init; quantizers/quantizer_gptq.py, by gptqmodel",
            words("gptq"),
            Limits(bits=frozenset({2, 3, 4, 8})),
        ),
        Layout(words("awq_gemm awq_gemv"), "quantizers/quantizer_awq.py, by gptqmodel", words("awq")),
        Layout(words("gptq gptq_v2 awq_gemm"), "quantizers/quantizer_auto_round.py", words("auto-round")),
        Layout(
            words("bnb_nf4 bnb_fp4 bnb_int8"),
            "quantizers/quantizer_bnb_4bit.py, quantizer_bnb_8bit.py",
            words("bitsandbytes bitsandbytes_4bit bitsandbytes_8bit"),
            is_run=True,
        ),
        Layout(words("fp8_block"), "quantizers/quantizer_finegrained_fp8.py", words("fp8"), is_run=True),
        Layout(words("mxfp8"), "quantizers/auto.py: mxfp8", words("mxfp8")),
        Layout(words("gpt_oss_mxfp4"), "quantizers/quantizer_mxfp4.py", words("mxfp4")),
        Layout(
            words("torchao_int8 torchao_intx torchao_fp8"),
            "quantizers/quantizer_torchao.py",
            words("torchao"),
            is_run=True,
        ),
        Layout(words("torchao_mx torchao_nvfp4 torchao_int4"), "quantizers/quantizer_torchao.py", words("torchao")),
        Layout(words("quark_int4"), QUARK, words("quark"), is_run=True),
        Layout(
            words("fp8_tensor fp8_row int8_tensor int8_row mxfp4 mxfp6_e2m3 mxfp6_e3m2"),
            QUARK,
            words("quark"),
        ),
        Layout(words("eetq"), "quantizers/quantizer_eetq.py", words("eetq")),
        Layout(words("aqlm"), "quantizers/quantizer_aqlm.py", words("aqlm")),
        Layout(words("spqr"), "quantizers/quantizer_spqr.py", words("spqr")),
        Layout(words("vptq"), "quantizers/quantizer_vptq.py", words("vptq")),
        Layout(words("bitnet"), "quantizers/quantizer_bitnet.py", words("bitnet")),
        Layout(
            words(
                "gguf_q4_0 gguf_q4_1 gguf_q5_0 gguf_q5_1 gguf_q2_k gguf_q3_k gguf_q4_k gguf_q5_k gguf_q6_k "
                "gguf_tq1_0 gguf_tq2_0 gguf_mxfp4 gguf_nvfp4 gguf_iq1_s gguf_iq1_m gguf_iq2_xxs gguf_iq2_xs gguf_iq2_s "
                "gguf_iq3_xxs gguf_iq3_s gguf_iq4_nl gguf_iq4_xs"
            ),
            DEQUANTIZING,
        ),
        Layout(words("gguf_q8_0"), DEQUANTIZING, is_run=True),
    ),
    rules=(
        check_class,
        partial(check_repacked, place=DEQUANTIZING),
        partial(check_lost_order, place="gptqmodel 7.7.0 nn_modules/qlinear/__init__.py: register_buffer g_idx"),
        check_outer_scales,
        check_torchao,
        check_undeclared,
        check_left,
    ),
    other_types=UNKNOWN,
    read_config=read_config,
    configs=(
        ConfigRule(
            frozenset(),
            lambda config: "quant_method" not in config and not _is_of_bitsandbytes(config),
            "refuses a quantization_config without quant_method: ValueError",
            QUANTIZERS,
        ),
        ConfigRule(
            frozenset(),
            lambda config: has_unknown_method(METHODS)(config) and not _is_of_bitsandbytes(config),
            "does not know the quant_method, skips the configuration, and leaves weights random",
            QUANTIZERS,
            DIFFERS,
        ),
        ConfigRule(
            words("hqq"),
            always,
            "reads no codes of HQQ, which it no longer loads, and leaves weights random",
            "quantizers/quantizer_hqq.py: HqqHfQuantizer has no get_load_operations",
            DIFFERS,
        ),
        ConfigRule(
            words("quark"),
            _has_stages,
            "does not map scales that are quantized themselves, as of NVFP4, and leaves them random",
            "quantizers/quantizer_quark.py: CHECKPOINT_KEYS",
            DIFFERS,
        ),
        ConfigRule(
            words("awq"),
            lambda config: str(config.get("version") or config.get("format") or "gemm").lower() not in OF_AWQ,
            f"takes of AWQ's formats only {', '.join(sorted(OF_AWQ))}: ValueError",
            "utils/quantization_config.py: AwqConfig.post_init",
        ),
        ConfigRule(
            words("nvfp4"),
            always,
            "loads no checkpoints that are already in NVFP4: ValueError",
            "quantizers/quantizer_nvfp4.py: NVFP4HfQuantizer.validate_environment",
        ),
        ConfigRule(
            words("compressed-tensors"),
            has_integers_alone,
            "expects packed codes where int-quantized weights have no quantized inputs, and leaves weights random",
            "compressed_tensors/compressors/format.py: infer_module_format",
            DIFFERS,
        ),
    ),
    tensors=(
        TensorRule(
            "transformers 5.24.0",
            "quantizers/quantizer_compressed_tensors.py: CompressedTensorsHfQuantizer.serialized_names; "
            "integrations/compressed_tensors.py: CompressedTensorsDequantize",
            "codes of each expert as weight_packed of a module of its own",
            "does not map them to the experts, which keep random values",
            re.compile(r"\.experts\.(?:gate_up_proj|down_proj)_packed$"),
            method="compressed-tensors",
            effect=DIFFERS,
        ),
    ),
    findings=dict.fromkeys(
        ("undeclared_codes", "config_mismatch", "incomplete", "missing_codes", "wrong_convention"), DIFFERS
    ),
)
