"""Make a small model with a known error, compare it, and check every number.

    python examples/synthetic.py [FOLDER]

A BF16 model of five layers is quantized twice, to FP8 with one scale per tensor and to INT8 with one scale per block.
The SNR that quanterr reports for each layer is printed next to the SNR computed here, in float64 from the stored codes
and scales. Deeper layers have weights with longer tails, which costs INT8 with its uniform steps, but not FP8. The exit
status is 1 if a number is wrong.
"""

import argparse
import sys
import tempfile
from math import log10
from pathlib import Path

import torch
from quantize import write_quantized
from safetensors.torch import load_file, save_file
from torch import Tensor

import quanterr
from quanterr.documents.comparison.model import Report
from quanterr.outputs.terminal import make_console, show

LAYERS = 5
HIDDEN = 320  # not a multiple of the block: the last blocks are partial
INNER = 864
BLOCK = 128
TOLERANCE = 1e-6  # relative difference of the dB values
FORMATS = ("fp8_tensor", "int8_block")


def make_model() -> dict[str, Tensor]:
    """Return a model of five layers, always the same."""
    random = torch.Generator().manual_seed(0)
    model = {"model.embed_tokens.weight": _weight((1000, HIDDEN), 0, random)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        model |= {
            f"{prefix}.input_layernorm.weight": torch.ones(HIDDEN),
            f"{prefix}.self_attn.q_proj.weight": _weight((HIDDEN, HIDDEN), layer, random),
            f"{prefix}.self_attn.o_proj.weight": _weight((HIDDEN, HIDDEN), layer, random),
            f"{prefix}.post_attention_layernorm.weight": torch.ones(HIDDEN),
            f"{prefix}.mlp.up_proj.weight": _weight((INNER, HIDDEN), layer, random),
            f"{prefix}.mlp.down_proj.weight": _weight((HIDDEN, INNER), layer, random),
        }
    return {name: tensor.bfloat16() for name, tensor in model.items()}


def _weight(shape: tuple[int, int], depth: int, random: torch.Generator) -> Tensor:
    """Draw normal values, with longer tails at larger depths.

    They are computed in float64, because processors disagree on exp() in float32.
    """
    spread, drawn = (torch.randn(shape, generator=random, dtype=torch.float64) for _ in range(2))
    return 0.02 * torch.exp(0.25 * depth * spread) * drawn


def compute_snr_db(original: Path, quantized: Path) -> dict[str, float]:
    """Compute the SNR of each quantized weight from the definition."""
    before, after = load_file(original), load_file(quantized)
    return {
        name: _snr_db(x.double(), _dequantize(after[name], after[f"{name}_scale"]))
        for name, x in before.items()
        if f"{name}_scale" in after
    }


def _dequantize(codes: Tensor, scale: Tensor) -> Tensor:
    values = codes.to(torch.float64)
    if scale.dim():  # repeat the scale of each block over its rows and columns
        rows, cols = codes.shape
        scale = scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :cols]
    return values * scale.double()


def _snr_db(x: Tensor, y: Tensor) -> float:
    return 10 * log10(float(x.square().sum()) / float((y - x).square().sum()))


def check(report: Report, known: dict[str, float]) -> bool:
    """Print the reported next to the known SNR; return True if they agree for every quantized weight."""
    reported = {layer.layer_name: layer.snr_db for layer in report.layers}
    good = report.verdict == "pass" and reported.keys() == known.keys()
    print(f"{'layer':40} {'reported dB':>14} {'known dB':>14}")
    for name, expected in known.items():
        snr_db = reported.get(name)
        same = snr_db is not None and abs(snr_db - expected) <= TOLERANCE * abs(expected)
        shown = "missing" if snr_db is None else f"{snr_db:.9f}"
        print(f"{name:40} {shown:>14} {expected:14.9f}{'' if same else '  DIFFERS'}")
        good &= same
    return good


def run(folder: Path) -> bool:
    """Make the model and its versions in a folder, check each, and return True if all numbers are right."""
    original = folder / "original.safetensors"
    model = make_model()
    save_file(model, original, {"format": "pt"})
    print(f"{original}: {len(model)} tensors, {sum(tensor.numel() for tensor in model.values()):,} elements")
    good = True
    for to in FORMATS:
        quantized = folder / f"{to}.safetensors"
        write_quantized(original, quantized, f"{to}{BLOCK}" if to.endswith("block") else to)
        report = quanterr.compare(original, quantized)
        print(f"\n{quantized}\n")
        good &= check(report, compute_snr_db(original, quantized))
        print()
        show(report.view(5), make_console(sys.stdout))
    print(f"\n{'every number is as known' if good else 'NOT every number is as known'}")
    return good


def main() -> int:
    """Work in the given folder, or in a temporary one, and return the exit status."""
    parser = argparse.ArgumentParser(description="Check quanterr on a model with a known error.")
    parser.add_argument("folder", type=Path, nargs="?", help="where to keep the files (default: nowhere)")
    folder = parser.parse_args().folder
    if folder is None:
        with tempfile.TemporaryDirectory() as temporary:
            return 0 if run(Path(temporary)) else 1
    folder.mkdir(parents=True, exist_ok=True)
    return 0 if run(folder) else 1


if __name__ == "__main__":
    sys.exit(main())
