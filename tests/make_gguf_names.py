"""Generate quanterr/pairing/converters/gguf_names.json from the tables of the gguf package.

The package on PyPI is older than llama.cpp. The source distribution of llama-cpp-python has a newer one:

    pip download --no-binary :all: --no-deps llama-cpp-python==0.3.36        and unpack it
    PYTHONPATH=llama_cpp_python-0.3.36/vendor/llama.cpp/gguf-py python tests/make_gguf_names.py

tests/pairing/test_gguf_names.py checks the file against the installed package.
"""

import json
from pathlib import Path

from gguf.constants import MODEL_ARCH_NAMES, MODEL_TENSOR, MODEL_TENSORS, TENSOR_NAMES
from gguf.tensor_mapping import TensorNameMap

FILE = Path(__file__).resolve().parent.parent / "quanterr" / "pairing" / "converters" / "gguf_names.json"
SOURCE = "llama-cpp-python 0.3.36: ggml-org/llama.cpp gguf-py/gguf/tensor_mapping.py (MIT License, the ggml authors)"


def document() -> str:
    """Return the content of the generated file, a tensor or an architecture per line."""
    rows: list[list[str]] = []
    architectures = {}
    for architecture, name in MODEL_ARCH_NAMES.items():
        # If two tensors share a name in the original, the later one wins; an architecture's own rule is kept.
        of_blocks = TensorNameMap.block_mappings_cfg | TensorNameMap.arch_block_mappings_cfg.get(architecture, {})
        rules = [*TensorNameMap.mappings_cfg.items(), *of_blocks.items()]
        wanted = [row(tensor, names) for tensor, names in rules if tensor in MODEL_TENSORS[architecture]]
        rows += [line for line in wanted if line not in rows]
        architectures[name] = [rows.index(line) for line in wanted]
    lines = [f'"source": {json.dumps(SOURCE)},']
    lines += ['"tensors": [', ",\n".join(map(json.dumps, rows)), "],"]
    lines += ['"architectures": {', ",\n".join(f'"{name}": {of}' for name, of in architectures.items()), "}"]
    return "\n".join(["{", *lines, "}\n"])


def row(tensor: MODEL_TENSOR, names: tuple[str, ...]) -> list[str]:
    """Return a tensor's GGUF name, followed by its names in originals."""
    return [TENSOR_NAMES[tensor], *dict.fromkeys(names)]


if __name__ == "__main__":
    FILE.write_text(document())
