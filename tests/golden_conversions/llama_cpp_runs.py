"""Runs of llama.cpp's converter on a folder, without its tokenizer."""

import importlib
import json
import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

LEFT_OUT = ("tokenizer.", "GGUF.", "general.")
KEPT = ("general.architecture", "general.type")


@dataclass(frozen=True)
class Run:
    """The output of a converter: metadata, values of tensors, and their types."""

    keys: dict[str, Any]
    tensors: dict[str, np.ndarray]
    types: dict[str, Any]


class LlamaCpp:
    """The converter in a checkout of llama.cpp."""

    version = "llama.cpp (llama-cpp-python 0.3.36)"

    def __init__(self, folder: Path) -> None:
        sys.path[:0] = [str(folder), str(folder / "gguf-py")]
        self.conversion = importlib.import_module("conversion")
        self.gguf = importlib.import_module("gguf")
        logging.disable(logging.WARNING)

    def run(self, folder: Path, quantized: bool, options: dict[str, Any]) -> Run:
        """Convert a folder as convert_hf_to_gguf.py does, with outtype f32 or q8_0."""
        options = dict(options)
        mmproj = options.pop("mmproj", False)
        model_type = self.conversion.ModelType.MMPROJ if mmproj else self.conversion.ModelType.TEXT
        types = self.gguf.LlamaFileType
        out = folder.parent / "out.gguf"
        with torch.inference_mode():
            hparams = self.conversion.ModelBase.load_hparams(folder, False)
            if options.pop("plain_config", False):  # fields that this transformers no longer returns are read
                options["hparams"] = json.loads((folder / "config.json").read_text())
            architecture = self.conversion.get_model_architecture(hparams, model_type)
            model_class = self.conversion.get_model_class(architecture, mmproj=mmproj)
            model = model_class(folder, types.MOSTLY_Q8_0 if quantized else types.ALL_F32, out, **options)
            for of in (model, getattr(model, "impl", model)):  # Mistral 3 is written by a second object
                of.set_vocab = lambda: None
                if not quantized:  # some tensors are F16 even then, which cannot hold labels
                    of.tensor_force_quant = lambda *_: False
            model.write()
        return self.read(out)

    def read(self, path: Path) -> Run:
        """Read a GGUF file; values only of tensors that are not quantized."""
        reader = self.gguf.GGUFReader(path)
        keys = {
            name: shorten(field.contents())
            for name, field in reader.fields.items()
            if name in KEPT or not name.startswith(LEFT_OUT)
        }
        tensors = {tensor.name: np.array(tensor.data) for tensor in reader.tensors}
        types = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
        return Run(keys, tensors, types)


def shorten(value: Any) -> Any:
    """Return a metadata value whose float32 numbers are short decimals."""
    if isinstance(value, list):
        return [shorten(item) for item in value]
    return float(str(np.float32(value))) if isinstance(value, float) else value
