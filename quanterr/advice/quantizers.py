"""Options and names of types of quantizing programs, for plans and for layers to keep."""

import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import PurePosixPath

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
# Most frequent type of a file → llama-quantize's name for the file, where the two differ; llama.cpp,
# tools/quantize/quantize.cpp. Of the mixtures of K types, these are the usual ones.
GGUF_FILES = {"mxfp4": "MXFP4_MOE"}
GGUF_MIXTURES = {"q2_k": "Q2_K", "q3_k": "Q3_K_M", "q4_k": "Q4_K_M", "q5_k": "Q5_K_M"}
# The types that llama-quantize writes, without those of ik_llama.cpp.
LLAMA_QUANTIZE = frozenset(
    [
        "q4_0",
        "q4_1",
        "q5_0",
        "q5_1",
        "q8_0",
        "q2_k",
        "q3_k",
        "q4_k",
        "q5_k",
        "q6_k",
        "iq1_s",
        "iq1_m",
        "iq2_xxs",
        "iq2_xs",
        "iq2_s",
        "iq3_xxs",
        "iq3_s",
        "iq4_nl",
        "iq4_xs",
        "tq1_0",
        "tq2_0",
        "mxfp4",
        "nvfp4",
        "q1_0",
        "q2_0",
    ]
)
# Formats of weights that are not quantized, and llama-quantize's names for them in GGUF files.
UNQUANTIZED = {"dense": "", "gguf_f32": "f32", "gguf_f16": "f16", "gguf_bf16": "bf16"}
CONTINUED = " \\\n  "  # continues a shell command on the next line
BLOCK = re.compile(r"(.*?\.)(\d+)\.(.+)")  # a module of a block: what is before the number, the number, the module


def tensor_type(pattern: str, ggml_type: str) -> str:
    """Return llama-quantize's option for the type of a tensor; the pattern is its name without ``.weight``, escaped."""
    return f"--tensor-type '^{pattern}\\.weight$={ggml_type}'"


def gguf_input(original: str) -> tuple[str, str]:
    """Return the GGUF file that llama-quantize reads, quoted, and the shell line that makes it from other files.

    llama-quantize reads only GGUF files, which llama.cpp's convert_hf_to_gguf.py makes from a folder or from the Hub.
    """
    if original.endswith(".gguf"):
        return shlex.quote(original), ""
    source = shlex.quote(original)
    if original.startswith("hf://"):
        source = f"--remote {shlex.quote(original.removeprefix('hf://'))}"
    elif original.endswith(".safetensors"):
        source = shlex.quote(str(PurePosixPath(original).parent))
    return "original.gguf", f"convert_hf_to_gguf.py {source} --outfile original.gguf --outtype bf16\n"


def escape(name: str) -> str:
    """Return a name as a regular expression within single quotes of a shell; keep.js escapes in the same way."""
    return quote(_escape_pattern(name))


def quote(pattern: str) -> str:
    """Return a pattern as it is written within single quotes of a shell."""
    return pattern.replace("'", "'\\''")


def _escape_pattern(name: str) -> str:
    return re.sub(r"[.*+?^${}()|\[\]\\]", r"\\\g<0>", name)


def join_names(names: Iterable[str]) -> list[str]:
    """Return regular expressions that together match these names alone; modules of the same blocks share one."""
    patterns, blocks = [], dict[tuple[str, str], list[str]]()
    for name in names:
        if match := BLOCK.fullmatch(name):
            blocks.setdefault((match[1], match[3]), []).append(match[2])
        else:
            patterns.append(_escape_pattern(name))
    modules: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for (before, module), numbers in blocks.items():
        modules.setdefault((before, tuple(sorted(numbers, key=int))), []).append(_escape_pattern(module))
    alike = (
        rf"{_escape_pattern(before)}{_list_alternatives(numbers)}\.{_list_alternatives(sorted(names_of_modules))}"
        for (before, numbers), names_of_modules in modules.items()
    )
    return [*patterns, *alike]


def _list_alternatives(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"({'|'.join(words)})"
