"""optimum-quanto: integers of 2, 4 and 8 bits and FP8, frozen and saved."""

import json
from pathlib import Path

import torch
from common import loader, run
from optimum.quanto import freeze, qfloat8, qint2, qint4, qint8, quantization_map
from optimum.quanto import quantize as quantize_modules
from safetensors.torch import save_file
from torch import Tensor

SETTINGS = {kind.name: kind for kind in (qint8, qint4, qint2, qfloat8)}


def quantize(model: Path, kind: object, folder: Path) -> dict[str, Tensor]:
    """Quantize in float32; return the values that quanto's tensors dequantize."""
    made = loader(model).from_pretrained(model, dtype=torch.float32)
    quantize_modules(made, weights=kind)
    freeze(made)
    folder.mkdir(parents=True)
    stored = {name: value.contiguous().clone() for name, value in made.state_dict().items()}
    save_file(stored, folder / "model.safetensors")
    (folder / "quanto_qmap.json").write_text(json.dumps(quantization_map(made)))
    (folder / "config.json").write_text((model / "config.json").read_text())
    found = {name: parameter for name, parameter in made.named_parameters() if hasattr(parameter, "dequantize")}
    return {name: value.dequantize() for name, value in found.items() if value.dim() > 1 and type(value) is not Tensor}


if __name__ == "__main__":
    run("optimum-quanto", SETTINGS, quantize)
