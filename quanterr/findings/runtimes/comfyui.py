"""What ComfyUI loads, with comfy-kitchen.

GGUF files need the nodes of city96/ComfyUI-GGUF.

Reference: comfyanonymous/ComfyUI@617048a59f17 comfy/ops.py _load_quantized_module, comfy/quant_ops.py, comfy/utils.py
load_torch_file, convert_old_quants; city96/ComfyUI-GGUF@795e45156ece loader.py, dequant.py.
"""

import re
from collections.abc import Iterator
from functools import partial

from quanterr.advice.runtimes import OF_COMFYUI
from quanterr.documents.loading import DIFFERS, REFUSES, LoadingReason
from quanterr.findings.contents import Contents
from quanterr.findings.families import COMFYUI_FORMATS
from quanterr.findings.loading import DENOISER_BLOCK, is_read_by_comfyui
from quanterr.findings.runtimes.conditions import check_repacked
from quanterr.findings.runtimes.model import (
    FLOAT8,
    PLAIN,
    Layout,
    Runtime,
    TensorRule,
    differ,
    leave_open,
    refuse,
    words,
)
from quanterr.util.text import count, display, itemize

OF_GGUF = "city96/ComfyUI-GGUF loader.py"
DENOISERS = words("flux sd1 sdxl sd3 aura hidream cosmos ltxv hyvid wan lumina2 qwen_image")  # IMG_ARCH_LIST
ENCODERS = words("t5 t5encoder llama qwen2vl qwen3 qwen3vl pig cow clip")  # TXT_ARCH_LIST, and what others write


def check_file(contents: Contents) -> Iterator[LoadingReason]:
    """Yield why the file is not read, or why no rule covers it."""
    checkpoint = contents.checkpoint
    if len(checkpoint.files) > 1:
        message = f"loads one file, and the checkpoint has {len(checkpoint.files)}"
        yield refuse(message, "comfy/utils.py: load_torch_file")
    elif checkpoint.gguf is not None and checkpoint.gguf.architecture not in DENOISERS:
        name = checkpoint.gguf.architecture
        if name in ENCODERS or not name:
            message = f"reads some files of this architecture: no rule covers {display(str(name))}"
            yield leave_open(message, f"{OF_GGUF}: gguf_clip_loader, gguf_sd_loader")
        else:
            message = f"knows no denoiser of the architecture {display(name)}: ValueError, Unexpected architecture type"
            yield refuse(message, f"{OF_GGUF}: IMG_ARCH_LIST")
    elif not any(DENOISER_BLOCK.match(name) for name in checkpoint.entries):
        message = "tells models by the names of their tensors; no rule covers these names"
        yield leave_open(message, "comfy/model_detection.py: detect_unet_config")


def check_labels(contents: Contents) -> Iterator[LoadingReason]:
    """Yield a reason if codes have no labels, as ComfyUI takes them for weights then."""
    labels = contents.labels
    if labels.marker:
        return
    coded = [
        stored for stored in contents.weights if stored.weight.format in COMFYUI_FORMATS and stored.weight.has_codes
    ]
    names = [stored.name for stored in coded if not is_read_by_comfyui(stored.weight, labels)]
    if names:
        message = (
            f"takes codes for weights, without their scales, where no label (comfy_quant) says what they are: "
            f"{count(len(names), 'weight')}: {itemize(names, 3)}"
        )
        yield differ(message, "comfy/ops.py: _load_quantized_module", names)


RUNTIME = Runtime(
    "ComfyUI",
    "617048a59f17",
    layouts=(
        Layout(frozenset({PLAIN}), "comfy/utils.py: load_torch_file"),
        Layout(
            OF_COMFYUI | words("fp8_cast"),
            "comfy/ops.py: _load_quantized_module; comfy/quant_ops.py: QUANT_ALGOS",
        ),
        Layout(
            words(
                "gguf_q4_0 gguf_q4_1 gguf_q5_0 gguf_q5_1 gguf_q8_0 gguf_q2_k gguf_q3_k gguf_q4_k gguf_q5_k gguf_q6_k "
                "gguf_iq4_nl gguf_iq4_xs"
            ),
            "city96/ComfyUI-GGUF dequant.py: dequantize_functions",
        ),
        Layout(
            words(
                "gguf_tq1_0 gguf_tq2_0 gguf_mxfp4 gguf_iq1_s gguf_iq1_m gguf_iq2_xxs gguf_iq2_xs gguf_iq2_s "
                "gguf_iq3_xxs gguf_iq3_s"
            ),
            "city96/ComfyUI-GGUF dequant.py: dequantize_tensor, slowly, with gguf",
        ),
    ),
    rules=(check_file, partial(check_repacked, place=f"{OF_GGUF}: GGUFReader"), check_labels),
    tensors=(
        TensorRule(
            "ComfyUI with comfy-kitchen 0.2.0",
            "comfy_kitchen/backends/eager/__init__.py and triton/__init__.py: FunctionConstraints of "
            "dequantize_per_tensor_fp8; from 0.2.1 on, TensorCoreFP8Layout.Params converts the scale",
            "scales of FP8 weights as F32",
            "refuses them with NoCapableBackendError; from 0.2.1 on, it converts them",
            re.compile(r"\.weight_scale$"),
            dtypes=frozenset({"BF16", "F16"}),
            beside={".weight": FLOAT8, ".comfy_quant": frozenset()},
            effect=DIFFERS,
        ),
        TensorRule(
            "ComfyUI (at 617048a59f17) and diffusers 0.42.1",
            "comfy/ldm/lumina/model.py: NextDiT.__init__; models/transformers/transformer_z_image.py: "
            "ZImageTransformer2DModel.__init__; both load with equal shapes only",
            "pad tokens as [1, D], not [D]",
            "refuse the file: size mismatch",
            re.compile(r"(?:^|\.)(?:x|cap|siglip)_pad_token$"),
            dimensions=1,
        ),
    ),
    findings={"missing_codes": REFUSES, "undeclared_codes": REFUSES, "label_without_layer": REFUSES},
)
