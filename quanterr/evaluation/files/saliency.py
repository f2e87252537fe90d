"""The columns and elements of a weight with the largest saliency, Var(x_j) · w_ij², as AWQ measures it.

x_j is input j of the weight, measured on the text. The saliency of a column is the sum over its elements, which is the
variance that the column contributes to the output.

Reference: Lin et al., AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration (MLSys 2024), 3.1.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from quanterr.evaluation.measures.outputs_of_weights import Product
from quanterr.outputs.files import open_replacement
from quanterr.util import strict_json
from quanterr.util.text import display
from quanterr.version import __version__

SCHEMA = "quanterr.saliency"
SCHEMA_VERSION = "1.0"


class Salient(NamedTuple):
    """The most salient columns and elements of a weight of shape (rows, columns) as stored, in descending order."""

    name: str
    shape: tuple[int, int]
    inputs: int  # number of input vectors
    columns: list[int]  # indices of inputs
    column_share: float  # share of the weight's saliency
    weights: list[int]  # row · columns + column
    weight_share: float


@dataclass
class Saliency:
    """The most salient ``percent`` of columns and of elements of each weight, at least one."""

    percent: float
    salient_weights: list[Salient] = field(default_factory=list)

    def add(self, name: str, weight: Tensor, product: Product) -> None:
        """Add a matrix as the model has it, with the statistics of its inputs."""
        if product.moments is None or product.sums is None or weight.dim() != 2 or not product.inputs:
            return
        mean = product.sums / product.inputs
        variance = (product.moments / product.inputs - mean.square()).clamp_(min=0).to(weight.device)
        axis = 0 if product.transposed else 1  # the axis of the inputs
        saliency = weight.float().square() * variance.float().unsqueeze(1 - axis)
        columns, column_share = self._take_largest(saliency.sum(1 - axis, dtype=torch.float64))
        weights, weight_share = self._take_largest(saliency.view(-1))
        rows, cols = weight.shape
        salient = Salient(name, (rows, cols), product.inputs, columns, column_share, weights, weight_share)
        self.salient_weights.append(salient)

    def _take_largest(self, saliency: Tensor) -> tuple[list[int], float]:
        """Return the indices of the most salient columns or elements, and their share of the total."""
        n = max(round(saliency.numel() * self.percent / 100), 1)
        values, places = torch.topk(saliency, n)
        total = float(saliency.sum(dtype=torch.float64))
        return places.tolist(), float(values.sum(dtype=torch.float64)) / total if total else 0.0

    def write(self, path: str, original: str, source: str) -> None:
        """Write JSON with one line per weight.

        Raises:
            ResourceError: the file cannot be written.
        """
        head: dict[str, object] = {
            "schema": SCHEMA,
            "schema_version": SCHEMA_VERSION,
            "tool": {"name": "quanterr", "version": __version__},
            "original": original,
            "source": source,
            "percent": self.percent,
        }
        with open_replacement(path, "--saliency-out") as file:
            file.write(strict_json.dumps(head).removesuffix("}").encode() + b', "weights": [')
            for n, salient in enumerate(self.salient_weights):
                fields = salient._asdict()
                name = fields.pop("name")
                row = {"layer_name": name, "display_name": display(name), **fields}
                file.write((",\n" if n else "\n").encode() + strict_json.dumps(row).encode())
            file.write(b"\n]}\n")
