"""A straightforward comparison, as people write it: both files whole, float32, torch reductions.

    python naive.py ORIGINAL QUANTIZED [--basic]

Computes the metrics that `quanterr compare` reports for each layer; --basic leaves out what such scripts
usually lack: percentiles, relative errors of single elements, rows, counts.
"""

import json
import sys

import torch
from safetensors.torch import load_file
from torch import Tensor

PERCENTILES = (0.5, 0.75, 0.9, 0.95, 0.99, 0.999)


def dequantize(quantized: dict[str, Tensor], name: str) -> Tensor:
    """Return the values of one weight."""
    codes, scale = quantized[name].float(), quantized[name + "_scale"]
    if scale.dim() == 2:
        for dim in (0, 1):
            scale = scale.repeat_interleave(codes.shape[dim] // scale.shape[dim], dim=dim)
    return codes * scale


def basic(x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Return the numbers that such scripts report."""
    e = y - x
    e_abs = e.abs()
    return {
        "mean_absolute_error": e_abs.mean(),
        "relative_error": e_abs.mean() / x.abs().mean(),
        "max_absolute_error": e_abs.max(),
        "min_absolute_error": e_abs.min(),
        "std_absolute_error": e_abs.std(),
        "mean_squared_error": e.pow(2).mean(),
        "mean_error": e.mean(),
        "snr_db": 20 * torch.log10(x.norm() / e.norm()),
        "cosine_similarity": torch.nn.functional.cosine_similarity(x.flatten(), y.flatten(), dim=0),
        "original_norm": x.norm(),
        "quantized_norm": y.norm(),
        "error_norm": e.norm(),
    }


def the_rest(x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Return the numbers that such scripts usually lack."""
    e, e_abs = y - x, (y - x).abs()
    nonzero = x != 0
    relative = e_abs[nonzero] / x[nonzero].abs()
    centred_x, centred_y = x - x.mean(), y - y.mean()
    row_snr = 20 * torch.log10(x.norm(dim=1) / e.norm(dim=1))
    ordered = e_abs.flatten().sort().values  # torch.quantile refuses more than 16 M elements
    return {
        "mean_relative_error": relative.mean(),
        "max_relative_error": relative.max(),
        "pearson_correlation": (centred_x * centred_y).sum() / (centred_x.norm() * centred_y.norm()),
        "percentiles": torch.stack([ordered[int(q * (len(ordered) - 1))] for q in PERCENTILES]),
        "outlier_pct": 100 * (e_abs > 0.01).float().mean(),
        "relative_outlier_pct": 100 * (e_abs > 0.01 * x.abs()).float().mean(),
        "zeroed_pct": 100 * ((x != 0) & (y == 0)).float().mean(),
        "worst_rows": row_snr.topk(5, largest=False).indices,
        "worst_element": e_abs.argmax(),
    }


def main() -> None:
    """Compare the files that the command line names."""
    original, quantized = load_file(sys.argv[1]), load_file(sys.argv[2])
    report = {}
    for name, weight in original.items():
        x, y = weight.float(), dequantize(quantized, name)
        values = basic(x, y) if "--basic" in sys.argv else basic(x, y) | the_rest(x, y)
        report[name] = {key: value.tolist() for key, value in values.items()}
    print(json.dumps(report))


main()
