"""optimum-quanto: integers of 2, 4 and 8 bits and FP8, frozen and saved."""

import json
from pathlib import Path

import torch
from common import loader, run
from optimum.quanto import freeze, qfloat8, qint2, qint4, qint8, quantization_map
from optimum.quanto import quantize as quantize_modules
from safetensors.torch import save_file
from torch import Tensor

SETTINGS = {qtype.name: ({"weights": qtype},) for qtype in (qint8, qint4, qint2, qfloat8)}


def quantize(model: Path, passes: tuple[dict, ...], folder: Path) -> dict[str, Tensor]:
    """Quantize in float32; return the values that quanto's tensors dequantize."""
    made = loader(model).from_pretrained(model, dtype=torch.float32)
    for of_pass in passes:
        quantize_modules(made, **of_pass)
    freeze(made)
    folder.mkdir(parents=True)
    stored = {name: value.contiguous().clone() for name, value in made.state_dict().items()}
    save_file(stored, folder / "model.safetensors")
    (folder / "quanto_qmap.json").write_text(json.dumps(quantization_map(made)))
    (folder / "config.json").write_text((model / "config.json").read_text())
    tensors = {name: parameter for name, parameter in made.named_parameters() if hasattr(parameter, "dequantize")}
    return {
        name: value.dequantize() for name, value in tensors.items() if value.dim() > 1 and type(value) is not Tensor
    }


def declare(exclude: tuple[str, ...], other_bits: tuple[str, ...]) -> tuple[dict, ...]:
    """Return the setting with a pass over the modules of 8 bits, and one over the rest without those left out."""
    first = ({"weights": qint8, "include": [*other_bits]},) if other_bits else ()
    return *first, {"weights": qint4, "exclude": [*exclude, *other_bits]}


if __name__ == "__main__":
    run("optimum-quanto", SETTINGS, quantize, declare)
