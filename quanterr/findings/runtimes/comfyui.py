"""What ComfyUI loads, with comfy-kitchen.

Reference: comfyanonymous/ComfyUI@617048a59f17 comfy/ops.py _load_quantized_module, comfy/quant_ops.py, comfy/utils.py
load_torch_file, convert_old_quants.
"""

import re
from collections.abc import Iterator

from quanterr.documents.loading import DIFFERS, REFUSES, LoadingReason
from quanterr.findings.contents import Contents
from quanterr.findings.families import OF_COMFY
from quanterr.findings.loading import OF_DENOISER, is_of_comfy
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
from quanterr.util.text import count, listed


def check_file(contents: Contents) -> Iterator[LoadingReason]:
    """Yield why the file is not read, or why no rule covers it."""
    checkpoint = contents.checkpoint
    if len(checkpoint.files) > 1:
        message = f"loads one file, and the checkpoint has {len(checkpoint.files)}"
        yield refuse(message, "comfy/utils.py: load_torch_file")
    elif checkpoint.gguf is not None:
        message = "reads GGUF files with the nodes of city96/ComfyUI-GGUF only; no rule covers these"
        yield leave_open(message)
    elif not any(OF_DENOISER.match(name) for name in checkpoint.entries):
        message = "tells models by the names of their tensors; no rule covers these names"
        yield leave_open(message, "comfy/model_detection.py: detect_unet_config")


def check_labels(contents: Contents) -> Iterator[LoadingReason]:
    """Yield that codes without labels are taken for weights."""
    labels = contents.labels
    if labels.marker:
        return
    coded = [one for one in contents.stored if one.weight.format in OF_COMFY and one.weight.has_codes]
    names = [one.name for one in coded if not is_of_comfy(one.weight, labels)]
    if names:
        message = (
            f"takes codes for weights, without their scales, where no label (comfy_quant) says what they are: "
            f"{count(len(names), 'weight')}: {listed(names, 3)}"
        )
        yield differ(message, "comfy/ops.py: _load_quantized_module", names)


RUNTIME = Runtime(
    "ComfyUI",
    "617048a59f17",
    layouts=(
        Layout(frozenset({PLAIN}), "comfy/utils.py: load_torch_file"),
        Layout(
            OF_COMFY | words("fp8_cast int4_tensorwise"),
            "comfy/ops.py: _load_quantized_module; comfy/quant_ops.py: QUANT_ALGOS",
        ),
    ),
    rules=(check_file, check_labels),
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
