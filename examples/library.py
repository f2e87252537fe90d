"""A session with quanterr as a library.

    python examples/library.py original.safetensors quantized.safetensors

Each side may also be a folder of shards, an index, or org/name in the local Hugging Face cache. The session writes
report.json into the current folder.
"""

import argparse
import sys
from math import inf
from pathlib import Path

import torch

import quanterr
from quanterr.documents.comparison.layer import Layer
from quanterr.documents.comparison.model import Report


def look(path: str) -> None:
    """Print what a checkpoint stores, from the headers alone: no weight is read."""
    with quanterr.open_checkpoint(path) as checkpoint:
        dtypes = sorted({entry.dtype for entry in checkpoint.entries.values()})
        print(f"{path}: {len(checkpoint.entries)} tensors, {checkpoint.nbytes:,} bytes, {', '.join(dtypes)}")


def summarize(report: Report) -> None:
    """Print the verdict before any number: an inconclusive comparison has numbers too."""
    print(f"\nverdict: {report.verdict} ({'; '.join(report.reasons)})")
    whole = report.aggregate  # over the layers that differ; every value may be None: undefined
    print(f"{whole.total_layers} layers differ, {len(report.lossless)} tensors are identical")
    print(f"{_db(whole.overall_snr_db)} with {whole.quantized_bytes:,} of {whole.original_bytes:,} bytes")


def worst(report: Report, n: int = 5) -> list[Layer]:
    """Return the n layers with the lowest SNR; an undefined SNR (None) is worse than any."""
    return sorted(report.layers, key=lambda layer: -inf if layer.snr_db is None else layer.snr_db)[:n]


def show_worst(report: Report) -> None:
    """Print the worst layers, a line each."""
    print("\nworst layers:")
    for layer in worst(report):
        print(f"  {_db(layer.snr_db):>9}  max |e| {layer.max_absolute_error:<22} {layer.display_name}")


def measure_tensors() -> None:
    """Print the same metrics for two tensors that were never in a file, here INT8 with one scale per row."""
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    scale = x.abs().amax(dim=1, keepdim=True) / 127
    y = (x / scale).round() * scale
    metrics = quanterr.measure(x, y)
    print(f"\nnormal weights, INT8 by rows: {metrics['snr_db']:.2f} dB")
    print(f"a full-scale sine in 8 bits:  {quanterr.theoretical_sqnr(8):.2f} dB")


def _db(value: float | None) -> str:
    return "undefined" if value is None else f"{value:.2f} dB"


def main() -> None:
    """Compare the two checkpoints that the command line names."""
    parser = argparse.ArgumentParser(description="A session with quanterr as a library.")
    parser.add_argument("original")
    parser.add_argument("quantized")
    given = parser.parse_args()
    try:
        look(given.original)
        look(given.quantized)
        report = quanterr.compare(given.original, given.quantized)  # layers=["attn", "!q_proj"] selects
    except quanterr.QuanterrError as error:  # The message of the error names the file and says what to do.
        sys.exit(f"library.py: {error}")
    summarize(report)
    show_worst(report)
    measure_tensors()
    Path("report.json").write_text(report.to_json())  # what `quanterr compare -o report.json` writes
    print("\nwritten: report.json")


if __name__ == "__main__":
    main()
