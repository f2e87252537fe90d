"""Shared by the scripts of all producers: the choice of models and settings, and the record of each result."""

import importlib.metadata
import json
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

REFERENCE = "reference.safetensors"  # next to each written folder: the producer's values, float32
RESULTS = "results.json"
PROGRESS = "progress.json"  # the results so far: some producers end the process with an error of one of their threads
TOKENS = [torch.randint(0, 500, (1, 64), generator=torch.Generator().manual_seed(n)) for n in range(8)]

# Writes the quantized model of a folder into another, by a setting; gives what the producer's library dequantizes.
Quantize = Callable[[Path, Any, Path], Mapping[str, Tensor]]
# Returns the setting that excludes the modules of the first tuple, and gives those of the second other bits.
Declare = Callable[[tuple[str, ...], tuple[str, ...]], Any]


class Declaration(NamedTuple):
    """What a configuration says: the modules that it excludes, and those to which it gives other bits.

    With ``beside``, another setting's weights are put beside it, of which it is wrong about the module ``about``.
    """

    exclude: tuple[str, ...]
    other_bits: tuple[str, ...] = ()
    beside: str = ""
    about: str = ""


DECLARING = "llama"  # the model that is quantized with each declaration
HEAD, DOWN = "lm_head", "model.layers.1.mlp.down_proj"
QUERY, UP = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj"
ONE, MIXED = "excluded", "excluded, mixed"
DECLARATIONS = {
    ONE: Declaration((HEAD, DOWN)),
    f"{ONE}: one more": Declaration((HEAD, DOWN, QUERY), beside=ONE, about=QUERY),
    f"{ONE}: one less": Declaration((HEAD,), beside=ONE, about=DOWN),
    MIXED: Declaration((HEAD, DOWN), (UP,)),
    f"{MIXED}: one more": Declaration((HEAD, DOWN, QUERY), (UP,), beside=MIXED, about=QUERY),
    f"{MIXED}: one less": Declaration((HEAD,), (UP,), beside=MIXED, about=DOWN),
    f"{MIXED}: bits of the others": Declaration((HEAD, DOWN), beside=MIXED, about=UP),
}


def loader(model: Path) -> Any:
    """Return the class that loads a model of models.py."""
    import transformers

    if model.name == "flux":
        from diffusers import FluxTransformer2DModel

        return FluxTransformer2DModel
    return transformers.AutoModelForSeq2SeqLM if model.name == "t5" else transformers.AutoModelForCausalLM


def run(
    package: str, settings: Mapping[str, Any], quantize: Quantize, declare: Declare, simulated: bool = False
) -> None:
    """Run python SCRIPT MODELS OUT [SETTING ...]: quantize each model of a folder in each setting.

    One of them is also quantized with each of the DECLARATIONS. With ``simulated``, the values are those before
    writing, as the library cannot read what it writes.
    """
    declared = {
        name: declare(declaration.exclude, declaration.other_bits)
        for name, declaration in DECLARATIONS.items()
        if not name.startswith(MIXED) or declare((), ()) != declare((), (UP,))
    }
    settings = {**settings, **declared}
    models, out, names = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:] or list(settings)
    progress = out / PROGRESS
    made = json.loads(progress.read_text()) if progress.exists() else []
    tried = {(attempt["model"], attempt["setting"]) for attempt in made}
    for model in sorted(path for path in models.iterdir() if path.is_dir()):
        for name in names:
            if (name in DECLARATIONS and model.name != DECLARING) or (model.name, name) in tried:
                continue
            folder = out / model.name / name
            shutil.rmtree(folder, ignore_errors=True)
            made.append({"model": model.name, "setting": name, "error": "it ends the process"})
            progress.write_text(json.dumps(made))
            error = None
            try:
                values = quantize(model, settings[name], folder)
                if name in DECLARATIONS and DECLARATIONS[name].beside:
                    take_weights(folder.with_name(DECLARATIONS[name].beside), folder)
                kept = {key: value.detach().float().contiguous().clone() for key, value in values.items()}
                save_file(kept, folder.with_name(f"{name}.{REFERENCE}"))
            except (Exception, SystemExit) as problem:  # each failure of a producer is a row of the table
                error = f"{type(problem).__name__}: {problem}"[:200]
                shutil.rmtree(folder, ignore_errors=True)
            made[-1]["error"] = error
            print(model.name, name, error or "made", flush=True)
    done = {"producer": package, "version": importlib.metadata.version(package), "made": made, "simulated": simulated}
    (out / RESULTS).write_text(json.dumps(done, indent=1))
    progress.unlink()


def take_weights(source: Path, folder: Path) -> None:
    """Replace the weights of a folder, and their index, by those of another, and keep all that configures them."""
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    for file in source.glob("*.safetensors*"):
        shutil.copy(file, folder)
