"""All metrics of two tensors in memory, by the same kernel as for checkpoints."""

from msgspec import to_builtins

from quanterr.documents.comparison.layer import Layer
from quanterr.kernel.library import choose_kernel
from quanterr.kernel.specification import SUMS_ALONE
from quanterr.kernel.summing import Summer
from quanterr.lazy_torch import Tensor, torch
from quanterr.metrics import OUTLIER, Measurement, Value
from quanterr.metrics.scores import compute_scores
from quanterr.metrics.sums import Sums
from quanterr.tensors.arrays import as_tensor
from quanterr.tensors.chunks import CPU_CHUNK, DEVICE_CHUNK, Chunk, Cut, as_matrix
from quanterr.tensors.workspace import Workspace


def measure(x: Tensor, y: Tensor, outlier_threshold: float = OUTLIER) -> dict[str, Value]:
    """Compute every metric of a layer for an original ``x`` and its dequantized version ``y``.

    Both have the same shape and device, and any floating dtype; neither is changed. They may be arrays of numpy.
    Metrics that depend on how y is stored (``bits_per_weight``, ``saturated_pct``, ``theoretical_sqnr_db``) are None,
    and so are undefined ones. The SNR of equal tensors is infinite.

    Raises:
        UsageError: x or y is neither a tensor nor an array.
        ValueError: the shapes or devices differ, or a dtype is not floating.
    """
    x, y = as_tensor("x", x), as_tensor("y", y)
    if x.shape != y.shape or x.device != y.device:
        raise ValueError(f"x is {tuple(x.shape)} on {x.device}, y {tuple(y.shape)} on {y.device}: they must agree")
    if not x.is_floating_point() or not y.is_floating_point():
        raise ValueError(f"x is {x.dtype}, y {y.dtype}: both must be floating")
    rows, cols = as_matrix(tuple(x.shape))
    workspace = Workspace(x.device)
    matrices = [side.detach().reshape(rows, cols) for side in (x, y)]
    wide = torch.float64 in (x.dtype, y.dtype)

    def load(chunk: Chunk) -> tuple[Tensor, Tensor]:
        pieces = [side[chunk.row : chunk.stop_row, chunk.col : chunk.stop_col] for side in matrices]
        if wide:
            return pieces[0], pieces[1]
        x_buffer, y_buffer = workspace.buffer("sides", (2, *chunk.shape), torch.float32)
        return x_buffer.copy_(pieces[0]), y_buffer.copy_(pieces[1])

    kernel = choose_kernel().kernel if x.device.type == "cpu" else None
    summer, total = Summer(kernel, workspace, outlier_threshold), Sums()
    for chunk in Cut(rows, cols, CPU_CHUNK if x.device.type == "cpu" else DEVICE_CHUNK):
        total.add(summer.sum_values(load, chunk, (rows, cols), SUMS_ALONE, wide))
    values, nonfinite = compute_scores(Layer, Measurement(total))
    plain: dict[str, Value] = to_builtins(values | {"bits_per_weight": None})
    return plain | {name: float(value) for name, value in nonfinite.items() if value != "nan"}
