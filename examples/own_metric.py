"""A metric of one's own, over the weights of two checkpoints as a comparison pairs and decodes them.

    python examples/own_metric.py original quantized

Prints the weights whose columns change direction most: the smallest cosine of a column with its original.
"""

import sys

import torch

import quanterr


def find_worst_column(x: torch.Tensor, y: torch.Tensor) -> float:
    """Return the smallest cosine between a column of ``x`` and the same column of ``y``."""
    return float(torch.nn.functional.cosine_similarity(x, y, dim=0).min())


def main() -> None:
    """Measure every matrix, and print the worst ten."""
    pairs = quanterr.iterate_pairs(sys.argv[1], sys.argv[2])
    smallest_cosines = {name: find_worst_column(x, y) for name, x, y in pairs if x.dim() == 2}
    for name, cosine in sorted(smallest_cosines.items(), key=lambda item: item[1])[:10]:
        print(f"{cosine:.6f}  {name}")


if __name__ == "__main__":
    main()
