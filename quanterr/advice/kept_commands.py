"""Layers to keep, in the words of quantizing programs: a list, or the command that also makes the rest of the file.

A command quantizes the layers that the compared file quantizes, except those to keep, and no others; llmcompressor's
list has the layers that the compared file leaves unquantized, too.
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
LONGEST = 100_000  # characters of a pattern; Linux passes at most 128 KiB as one argument
# Paths of Llama-like models in transformers and in llama.cpp (its gguf-py/gguf/tensor_mapping.py).
LLAMA_CPP = {
    **{f"self_attn.{one}_proj": f"attn_{one}" for one in "qkv"},
    **{f"mlp.{one}_proj": f"ffn_{one}" for one in ("gate", "up", "down")},
    "self_attn.o_proj": "attn_output",
    "mlp.gate": "ffn_gate_inp",
}
LLAMA_CPP_WHOLE = {"model.embed_tokens": "token_embd", "lm_head": "output"}


class Words(NamedTuple):
    """A list of layers as a program reads it: ``start``, a word for each layer with ``between`` them, and ``end``.

    In a word, ``{name}`` stands for a layer's name, ``{module}`` for it without ``.weight``, ``{pattern}`` for the name
    as a regular expression. The list has the layers to keep; if ``quantized`` is given, its layers that are not kept.
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
    """Return the layers that may be kept in the words of each program; one that could have made the file is first."""
    own = [_llama_name(name) for name in names]
    ignored = _list_ignored([layer.layer_name.removesuffix(".weight") for layer in _list_unquantized(report)])
    found = [
        Words("names", False, "", "{name}", "\n", ""),
        _convert_to_quant(report) or Words("convert_to_quant", False, "--exclude-layers '^(", "{pattern}", "|", ")$'"),
        Words("llmcompressor", False, f"ignore:\n{ignored}", '  - "{module}"', "\n", ""),
    ]
    if all(own):
        words = _llama_quantize(report)
        found.append(words._replace(own_names=None if own == list(names) else [name or "" for name in own]))
    return sorted(found, key=lambda words: not words.is_command)


def _list_ignored(modules: Sequence[str]) -> str:
    """Return modules as llmcompressor's list, several blocks in one line."""
    patterns = join_names(modules)
    if len(patterns) == len(modules):
        return "".join(f'  - "{module}"\n' for module in modules)
    return "".join(f"  - 're:^{pattern}$'\n" for pattern in patterns)


def _convert_to_quant(report: Report) -> Words | None:
    """Return the command of convert_to_quant, if it can have written all quantized layers.

    Its own choice of layers depends on its version and on options that no file records, so the pattern excludes all
    that the compared file does not quantize.
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
        or sum(len(escape(name)) + 1 for name in names) > LONGEST
    ):
        return None
    options = CONVERT_TO_QUANT[formats.pop()]
    start = f"convert_to_quant -i {shlex.quote(original)} --comfy_quant{options}{CONTINUED}--exclude-layers '^(?!"
    if prefix:
        start += f"({escape(prefix)})?"
    end = f")$)'{CONTINUED}-o kept.safetensors"
    return Words("convert_to_quant", True, start + "(", "{pattern}", "|", end, names)


def _llama_quantize(report: Report) -> Words:
    """Return the command of llama-quantize if all quantized layers are of a GGUF file, or else its options alone."""
    sizes: Counter[str] = Counter()
    for layer in report.layers:
        sizes[layer.format] += layer.tensor_elements
    formats = [name for name, _ in sizes.most_common() if name not in UNQUANTIZED]
    stay = [(_llama_name(layer.layer_name), UNQUANTIZED[layer.format]) for layer in _list_unquantized(report)]
    word = tensor_type("{pattern}", "bf16")
    are_known = all(name.startswith(GGUF) and name.removeprefix(GGUF) in LLAMA_QUANTIZE for name in formats)
    if not formats or not are_known or not all(map(all, stay)):
        return Words("llama-quantize", False, "", word, "\n", "")
    kind = formats[0].removeprefix(GGUF)
    name = GGUF_FILES.get(kind) or GGUF_MIXTURES.get(kind) or kind.upper()
    source, making = gguf_input(report.original.path)
    options = [
        tensor_type(quote(pattern), kind)
        for kind in dict.fromkeys(kind for _, kind in stay)
        for pattern in join_names(own or "" for own, same in stay if same == kind)
    ]
    start = making + CONTINUED.join(["llama-quantize", *options, ""])
    return Words("llama-quantize", True, start, word, CONTINUED, f"{CONTINUED}{source} kept.gguf {name}")


def _list_weights(report: Report) -> list[Layer | LosslessLayer]:
    return [*report.layers, *report.lossless]


def _list_unquantized(report: Report) -> list[Layer | LosslessLayer]:
    """Return the matrices that the compared file leaves unquantized."""
    return [layer for layer in _list_weights(report) if layer.format in UNQUANTIZED and len(layer.tensor_shape) > 1]


def _llama_name(name: str) -> str | None:
    """Return llama.cpp's name of a layer without ``.weight``; None if a model like Llama has no such layer."""
    path = name.removesuffix(".weight")
    if re.fullmatch(r"blk\.\d+\..+|token_embd|output", path):
        return path
    if found := re.fullmatch(r"model\.layers\.(\d+)\.(.+)", path):
        own = LLAMA_CPP.get(found[2])
        return own and f"blk.{found[1]}.{own}"
    return LLAMA_CPP_WHOLE.get(path)
