"""Load the checkpoints of ``cases.py`` by the runtimes themselves, and keep what happened in ``results.json``.

``make loaders`` installs the runtimes into a folder of their own and runs this. It fails if a verdict of quanterr's
contradicts its runtime.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from loaders.cases import CASES

import quanterr

RESULTS = Path(__file__).parent / "results.json"
LOADS, DIFFERS, REFUSES = "loads", "loads, but", "refuses"


def load_by_transformers(folder: Path) -> tuple[str, str]:
    """Return what transformers does with a checkpoint, and what it says."""
    from transformers import AutoModelForCausalLM

    files = [path.name for path in folder.glob("*.gguf")]
    options = {"gguf_file": files[0]} if files else {}
    _, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
    key_names = {key: sorted(map(str, info[key])) for key in ("missing_keys", "unexpected_keys", "mismatched_keys")}
    problems = [f"{key} {names[0]}" for key, names in key_names.items() if names]
    return (DIFFERS, "; ".join(problems)) if problems else (LOADS, "")


def load_by_mlx(folder: Path) -> tuple[str, str]:
    """Return what mlx-lm does with a checkpoint."""
    from mlx_lm.utils import load_model

    load_model(folder)
    return LOADS, ""


def load_by_llama_cpp(folder: Path) -> tuple[str, str]:
    """Return what llama.cpp does with a GGUF file, by the server in xllamacpp."""
    import xllamacpp

    options = xllamacpp.CommonParams()
    options.model.path = str(next(folder.glob("*.gguf"), folder))
    options.n_gpu_layers, options.n_ctx, options.warmup = 0, 64, False
    server = xllamacpp.Server(options)
    time.sleep(1)  # a server that ends before its loop runs never ends
    del server
    return LOADS, ""


def load_by_diffusers(folder: Path) -> tuple[str, str]:
    """Return what diffusers does with a model of a pipeline, and what it says."""
    import diffusers

    name = json.loads((folder / "config.json").read_text())["_class_name"]
    _, info = getattr(diffusers, name).from_pretrained(folder, output_loading_info=True)
    problems = [f"{key} {sorted(map(str, names))[0]}" for key, names in info.items() if names]
    return (DIFFERS, "; ".join(problems)) if problems else (LOADS, "")


LOADERS: dict[str, tuple[str, Callable[[Path], tuple[str, str]]]] = {
    "transformers": ("transformers", load_by_transformers),
    "MLX": ("mlx-lm", load_by_mlx),
    "llama.cpp": ("xllamacpp", load_by_llama_cpp),
    "diffusers": ("diffusers", load_by_diffusers),
}


def run_case(name: str, folder: Path) -> dict[str, str]:
    """Make a checkpoint, load it, and return the outcome."""
    case = CASES[name]
    package, load = LOADERS[case.runtime]
    case.make(folder)
    try:
        outcome, message = load(folder)
    except Exception as error:
        outcome, message = REFUSES, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    message = message.replace(str(folder), "FOLDER")[:160]
    number = version(package)
    if package == "xllamacpp":
        number = f"b{number.rpartition('.')[2]}"  # the build of llama.cpp
    return {"runtime": case.runtime, "version": number, "outcome": outcome, "said": message}


def find_verdict(runtime: str, folder: Path) -> str:
    """Return quanterr's verdict about a checkpoint."""
    files = list(folder.glob("*.gguf"))
    [loading] = quanterr.inspect(files[0] if files else folder, runtimes=[runtime]).loading
    return loading.verdict


def main() -> int:
    """Run all cases; the exit status is 1 if a verdict contradicts a runtime."""
    results, contradictions = {}, 0
    for name, case in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            results[name] = run_case(name, Path(folder))
            verdict = find_verdict(case.runtime, Path(folder))
        is_right = verdict == results[name]["outcome"]
        contradictions += not is_right
        print(f"{'' if is_right else 'WRONG '}{name}: {verdict}; {results[name]}", flush=True)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    return 1 if contradictions else 0


if __name__ == "__main__":
    sys.exit(main())
