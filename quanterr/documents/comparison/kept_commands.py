"""Commands that quantize a checkpoint again and keep some layers as they are, for the program that wrote it.

The layers are listed by the page (outputs/page/scripts/keep.js), between the two parts of a command.
"""

import shlex
from collections import Counter

from quanterr.documents.comparison.model import Report

# Options of convert_to_quant 1.3 (--help-experimental) by the format that it writes.
CONVERT_TO_QUANT = {
    "fp8_tensor": "",
    "fp8_row": " --scaling_mode row",
    "fp8_block": " --scaling_mode block",
    "int8_tensor": " --int8 --scaling_mode tensor",
    "int8_row": " --int8 --scaling_mode row",
    "int8_block": " --int8 --scaling_mode block",
    "int8_convrot": " --int8 --scaling_mode row --convrot",
    "mxfp8": " --mxfp8",
    "nvfp4": " --nvfp4",
}
# llama-quantize's name for a file, by its most frequent type, where the two differ; llama.cpp,
# tools/quantize/quantize.cpp.
GGUF_FILES = {"q2_k": "Q2_K", "q3_k": "Q3_K_M", "q4_k": "Q4_K_M", "q5_k": "Q5_K_M", "mxfp4": "MXFP4_MOE"}
GGUF = "gguf_"
PLAIN = ("dense", "gguf_f32", "gguf_f16", "gguf_bf16")  # formats that are not quantized


def find_commands(report: Report) -> dict[str, tuple[str, str]]:
    """Return the command of each program that could have written all quantized layers; none if no program is known.

    A command comes in two parts; the list of layers goes between them.
    """
    sizes: Counter[str] = Counter()
    for layer in report.layers:
        sizes[layer.format] += layer.tensor_elements
    formats = [name for name, _ in sizes.most_common() if name not in PLAIN]
    original = report.original.path
    if formats and all(name.startswith(GGUF) for name in formats):
        kind = formats[0].removeprefix(GGUF)
        source = shlex.quote(original) if original.endswith(".gguf") else "original.gguf"
        name = GGUF_FILES.get(kind, kind.upper())
        return {"llama-quantize": ("llama-quantize", f"{source} kept.gguf {name}")}
    is_comfy = all(layer.comfy_format for layer in report.layers if layer.format not in PLAIN)
    if len(formats) == 1 and formats[0] in CONVERT_TO_QUANT and is_comfy and original.endswith(".safetensors"):
        before = f"convert_to_quant -i {shlex.quote(original)} --comfy_quant{CONVERT_TO_QUANT[formats[0]]}"
        return {"convert_to_quant": (before, "-o kept.safetensors")}
    return {}
