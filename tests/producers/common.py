"""Shared by the scripts of all producers: the choice of models and settings, and the record of each result."""

import importlib.metadata
import json
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

REFERENCE = "reference.safetensors"  # next to each written folder: the producer's values, float32
RESULTS = "results.json"
TOKENS = [torch.randint(0, 500, (1, 64), generator=torch.Generator().manual_seed(n)) for n in range(8)]

# Writes the quantized model of a folder into another, by a setting; gives what the producer's library dequantizes.
Quantize = Callable[[Path, Any, Path], Mapping[str, Tensor]]


def loader(model: Path) -> Any:
    """Return the class that loads a model of models.py."""
    import transformers

    if model.name == "flux":
        from diffusers import FluxTransformer2DModel

        return FluxTransformer2DModel
    return transformers.AutoModelForSeq2SeqLM if model.name == "t5" else transformers.AutoModelForCausalLM


def run(package: str, settings: Mapping[str, Any], quantize: Quantize, simulated: bool = False) -> None:
    """Run python SCRIPT MODELS OUT [SETTING ...]: quantize each model of a folder in each setting.

    With ``simulated``, the values are those before writing, as the library cannot read what it writes.
    """
    models, out, names = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:] or list(settings)
    made = []
    for model in sorted(path for path in models.iterdir() if path.is_dir()):
        for name in names:
            folder = out / model.name / name
            shutil.rmtree(folder, ignore_errors=True)
            error = None
            try:
                values = quantize(model, settings[name], folder)
                kept = {key: value.detach().float().contiguous().clone() for key, value in values.items()}
                save_file(kept, folder.with_name(f"{name}.{REFERENCE}"))
            except (Exception, SystemExit) as problem:  # each failure of a producer is a row of the table
                error = f"{type(problem).__name__}: {problem}"[:200]
                shutil.rmtree(folder, ignore_errors=True)
            made.append({"model": model.name, "setting": name, "error": error})
            print(model.name, name, error or "made", flush=True)
    done = {"producer": package, "version": importlib.metadata.version(package), "made": made, "simulated": simulated}
    (out / RESULTS).write_text(json.dumps(done, indent=1))
