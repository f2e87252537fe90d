"""Layers to leave unquantized, in the form that programs read: a list, or a command that makes the whole file.

A command quantizes exactly the layers that the compared file quantizes, except those to keep. The list for
llmcompressor also contains the layers that the compared file leaves unquantized.
"""

import re
import shlex
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from quanterr.advice.quantizers import (
    CONTINUED,
    CONVERT_TO_QUANT,
    GGUF_FILES,
    GGUF_MIXTURES,
    LLAMA_QUANTIZE,
    UNQUANTIZED,
    escape,
    gguf_input,
    join_names,
    quote,
    tensor_type,
)
from quanterr.documents.comparison.layer import Layer, LosslessLayer
from quanterr.documents.comparison.model import Report

GGUF = "gguf_"
MAX_PATTERN_LENGTH = 100_000  # characters, as Linux limits an argument of a command to 128 KiB
# Paths of Llama-like models in transformers and in llama.cpp (its gguf-py/gguf/tensor_mapping.py).
LLAMA_CPP = {
    **{f"self_attn.{projection}_proj": f"attn_{projection}" for projection in "qkv"},
    **{f"mlp.{projection}_proj": f"ffn_{projection}" for projection in ("gate", "up", "down")},
    "self_attn.o_proj": "attn_output",
    "mlp.gate": "ffn_gate_inp",
}
LLAMA_CPP_WHOLE = {"model.embed_tokens": "token_embd", "lm_head": "output"}


class Words(NamedTuple):
    """A list of layers as a program reads it: ``start``, a word for each layer, separated by ``between``, and ``end``.

    In a word, ``{name}`` stands for a layer's name, ``{module}`` for it without ``.weight``, ``{pattern}`` for the name
    as a regular expression. The list names the layers to keep or, if ``quantized`` is given, those of its layers that
    are not kept.
    """

    program: str
    is_command: bool
    start: str
    word: str
    between: str
    end: str
    quantized: Sequence[str] | None = None
    own_names: Sequence[str] | None = None  # the program's names of the layers that may be kept


def list_words(report: Report, names: Sequence[str]) -> list[Words]:
    """Return the list of layers for each program; a program that can have made the file comes first."""
    llama_names = [_to_llama_name(name) for name in names]
    ignored = _list_ignored([layer.layer_name.removesuffix(".weight") for layer in _list_unquantized(report)])
    words_of_programs = [
        Words("names", False, "", "{name}", "\n", ""),
        _describe_convert_to_quant(report)
        or Words("convert_to_quant", False, "--exclude-layers '^(", "{pattern}", "|", ")$'"),
        Words("llmcompressor", False, f"ignore:\n{ignored}", '  - "{module}"', "\n", ""),
    ]
    if all(llama_names):
        words = _describe_llama_quantize(report)
        words_of_programs.append(
            words._replace(own_names=None if llama_names == list(names) else [name or "" for name in llama_names])
        )
    return sorted(words_of_programs, key=lambda words: not words.is_command)


def _list_ignored(modules: Sequence[str]) -> str:
    """Return modules as llmcompressor's list, several blocks in one line."""
    patterns = join_names(modules)
    if len(patterns) == len(modules):
        return "".join(f'  - "{module}"\n' for module in modules)
    return "".join(f"  - 're:^{pattern}$'\n" for pattern in patterns)


def _describe_convert_to_quant(report: Report) -> Words | None:
    """Return the command of convert_to_quant, if it can have written all quantized layers.

    The layers that it chooses by itself depend on its version and on options that files do not record, so the pattern
    excludes all layers that the compared file does not quantize.
    """
    quantized = [layer for layer in _list_weights(report) if layer.format not in UNQUANTIZED]
    formats = {layer.format for layer in quantized}
    original, prefix = report.original.path, report.original.prefix
    names = [layer.layer_name for layer in quantized]
    if (
        len(formats) != 1
        or not formats <= CONVERT_TO_QUANT.keys()
        or not all(layer.comfy_format for layer in quantized)
        or not original.endswith(".safetensors")
        or sum(len(escape(name)) + 1 for name in names) > MAX_PATTERN_LENGTH
    ):
        return None
    options = CONVERT_TO_QUANT[formats.pop()]
    start = f"convert_to_quant -i {shlex.quote(original)} --comfy_quant{options}{CONTINUED}--exclude-layers '^(?!"
    if prefix:
        start += f"({escape(prefix)})?"
    end = f")$)'{CONTINUED}-o kept.safetensors"
    return Words("convert_to_quant", True, start + "(", "{pattern}", "|", end, names)


def _describe_llama_quantize(report: Report) -> Words:
    """Return the command of llama-quantize if all quantized layers have types of ggml, otherwise only its options."""
    sizes: Counter[str] = Counter()
    for layer in report.layers:
        sizes[layer.format] += layer.tensor_elements
    formats = [name for name, _ in sizes.most_common() if name not in UNQUANTIZED]
    stay = [(_to_llama_name(layer.layer_name), UNQUANTIZED[layer.format]) for layer in _list_unquantized(report)]
    word = tensor_type("{pattern}", "bf16")
    are_known = all(name.startswith(GGUF) and name.removeprefix(GGUF) in LLAMA_QUANTIZE for name in formats)
    if not formats or not are_known or not all(map(all, stay)):
        return Words("llama-quantize", False, "", word, "\n", "")
    ggml_type = formats[0].removeprefix(GGUF)
    name = GGUF_FILES.get(ggml_type) or GGUF_MIXTURES.get(ggml_type) or ggml_type.upper()
    source, making = gguf_input(report.original.path)
    options = [
        tensor_type(quote(pattern), ggml_type)
        for ggml_type in dict.fromkeys(ggml_type for _, ggml_type in stay)
        for pattern in join_names(name or "" for name, same in stay if same == ggml_type)
    ]
    start = making + CONTINUED.join(["llama-quantize", *options, ""])
    return Words("llama-quantize", True, start, word, CONTINUED, f"{CONTINUED}{source} kept.gguf {name}")


def _list_weights(report: Report) -> list[Layer | LosslessLayer]:
    return [*report.layers, *report.lossless]


def _list_unquantized(report: Report) -> list[Layer | LosslessLayer]:
    """Return the matrices that the compared file leaves unquantized."""
    return [layer for layer in _list_weights(report) if layer.format in UNQUANTIZED and len(layer.tensor_shape) > 1]


def _to_llama_name(name: str) -> str | None:
    """Return llama.cpp's name of a layer of a Llama-like model, without ``.weight``; None for other layers."""
    path = name.removesuffix(".weight")
    if re.fullmatch(r"blk\.\d+\..+|token_embd|output", path):
        return path
    if match := re.fullmatch(r"model\.layers\.(\d+)\.(.+)", path):
        name_in_block = LLAMA_CPP.get(match[2])
        return name_in_block and f"blk.{match[1]}.{name_in_block}"
    return LLAMA_CPP_WHOLE.get(path)
