"""What Ollama loads: GGUF files, with the llama.cpp that it is built with, and what ``ollama create`` makes of others.

Reference: ollama/ollama@v0.33.0-rc2 LLAMA_CPP_VERSION (b10488), llm/llama_server.go, fs/ggml/, server/create.go;
convert/convert.go LoadModelMetadata, convert/reader_safetensors.go. Tensors for its MLX engine, which need
``--experimental``, are not judged.
"""

from collections.abc import Iterator
from functools import partial

from quanterr.documents.loading import DIFFERS, REFUSES, LoadingReason
from quanterr.findings.configs import CONFIG
from quanterr.findings.contents import Contents
from quanterr.findings.runtimes.classes import LLAMA_CPP, NEWER_THAN_OLLAMA, OLLAMA
from quanterr.findings.runtimes.conditions import check_repacked
from quanterr.findings.runtimes.llama_cpp import OF_BOTH, TYPES, check_file
from quanterr.findings.runtimes.model import PLAIN, Layout, Runtime, is_one_of, leave_open, refuse, words
from quanterr.util.text import count, display, itemize

READING = "convert/reader_safetensors.go"
READ = frozenset({"F32", "F16", "BF16", "F8_E4M3", "U8"})  # the dtypes that its converter reads
OPEN = words("gguf_q2_0")  # types that its llama.cpp may be too old for


def check_gguf(contents: Contents) -> Iterator[LoadingReason]:
    """Yield why a GGUF file is not read, or what llama.cpp may have learned later."""
    metadata = contents.checkpoint.gguf
    if metadata is None:
        return
    if metadata.architecture in NEWER_THAN_OLLAMA:
        message = f"is built with llama.cpp b10488, which may not know the architecture {metadata.architecture}"
        yield leave_open(message, "LLAMA_CPP_VERSION")
        return
    yield from check_file(contents, {name: keys for name, keys in LLAMA_CPP.items() if name not in NEWER_THAN_OLLAMA})
    if names := [stored.name for stored in contents.weights if stored.weight.format in OPEN]:
        message = f"is built with llama.cpp b10488, which may not know this type: {itemize(names, 3)}"
        yield leave_open(message, "LLAMA_CPP_VERSION", names)


def check_conversion(contents: Contents) -> Iterator[LoadingReason]:
    """Yield why ``ollama create`` does not convert safetensors files."""
    checkpoint = contents.checkpoint
    if checkpoint.gguf is not None:
        return
    config = checkpoint.config.get(CONFIG, {})
    names = config.get("architectures")
    first = names[0] if isinstance(names, list) and names else None
    if not config:
        yield refuse(f"needs {CONFIG}, which is not stored", "convert/convert.go: LoadModelMetadata")
    elif not is_one_of(first, OLLAMA):
        message = f"does not convert {display(str(first))}: unsupported architecture; --experimental is not judged"
        yield refuse(message, "convert/convert.go: LoadModelMetadata")
    others = [stored for stored in contents.weights if stored.weight.codes.dtype not in READ]
    if others:
        layers = [stored.name for stored in others]
        message = (
            f"does not convert {count(len(layers), 'weight')} of {others[0].weight.codes.dtype}: {itemize(layers, 3)}"
        )
        yield refuse(f"{message}: unknown data type", f"{READING}: safetensor.WriteTo", layers)


def check_floats(contents: Contents) -> Iterator[LoadingReason]:
    """Yield a reason if FP8 weights have no blocks: ``ollama create`` dequantizes only those with blocks."""
    if contents.checkpoint.gguf is not None:
        return
    of_fp8 = [stored for stored in contents.weights if stored.weight.codes.dtype == "F8_E4M3"]
    if names := [stored.name for stored in of_fp8 if stored.weight.format != "fp8_block"]:
        message = f"converts FP8 with scales of blocks alone, not {count(len(names), 'weight')}: {itemize(names, 3)}"
        yield refuse(f"{message}: missing fp8 block size metadata", f"{READING}: parseSafetensors", names)


RUNTIME = Runtime(
    "Ollama",
    "0.33.0-rc2",
    layouts=(
        Layout(frozenset({PLAIN}), "llm/llama_server.go; convert/reader_safetensors.go"),
        Layout(words(f"{OF_BOTH} gguf_tq1_0 gguf_tq2_0 gguf_mxfp4 gguf_nvfp4 gguf_q1_0"), TYPES),
        Layout(words("fp8_block"), f"{READING}: decodeFP8E4M3, to BF16", words("fp8")),
        Layout(words("gpt_oss_mxfp4"), "convert/convert_gptoss.go", words("mxfp4")),
    ),
    rules=(check_gguf, partial(check_repacked, place=TYPES), check_conversion, check_floats),
    other_types="has no such type of ggml: invalid ggml type",
    findings={
        "incomplete": REFUSES,
        **dict.fromkeys(("config_mismatch", "norm_offset", "wrong_convention", "missing_codes"), DIFFERS),
    },
)
