"""The sums of two weights, computed by the compiled kernel, by Triton's, or by the specification in torch."""

from collections.abc import Callable, Sequence

from quanterr.kernel.fused_sums import See, can_fuse, sum_fused
from quanterr.kernel.library import Kernel
from quanterr.kernel.native_sums import KeptRows, NativeSums, Operand, Task
from quanterr.kernel.specification import Load, SumOptions, exact_sums
from quanterr.lazy_torch import Tensor, torch
from quanterr.metrics.sums import Sums
from quanterr.tensors.chunks import Chunk
from quanterr.tensors.workspace import Workspace


class Summer:
    """A computer of sums, with the buffers of one thread."""

    def __init__(self, kernel: Kernel | None, workspace: Workspace, outlier: float) -> None:
        """Compute on the workspace's device; on the CPU, ``kernel`` is None for torch.

        |e| above ``outlier`` is an outlier.
        """
        self._native = NativeSums(kernel, outlier) if kernel else None
        self._is_fused = can_fuse(workspace.device)
        self._workspace, self._outlier = workspace, outlier

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers, without the workspace."""
        return self._native.nbytes if self._native else 0

    def sum_pair(
        self,
        operands: tuple[Operand, Operand],
        chunks: Sequence[Chunk],
        wanted: SumOptions,
        kept: KeptRows | None = None,
        see: See | None = None,
    ) -> Sums:
        """Compute the sums of a few chunks of a pair.

        If the compiled kernel decodes the rows, ``kept`` receives them; otherwise ``see`` is called with them.
        """
        wide = any(operand.weight.needs_float64 for operand in operands)
        if self._is_fused and not wide:
            return Sums.merge(sum_fused(operands, chunk, self._outlier, wanted, see) for chunk in chunks)
        sums = None if self._native is None or wide else self._native.sums(operands, chunks, wanted, kept)
        return self._sum_with_torch(operands, chunks, wanted, see) if sums is None else sums

    def sum_values(self, load: Load, chunk: Chunk, matrix: tuple[int, int], wanted: SumOptions, wide: bool) -> Sums:
        """Compute the sums of a chunk of a weight of (rows, cols); ``wide`` means that its values are float64."""
        if self._native and not wide:
            sums = self._native.sum_values(*load(chunk), chunk, matrix)
            if sums is not None:
                return sums
        return exact_sums(load, [chunk], matrix[1], self._outlier, wanted)

    def prepare(
        self, operands: tuple[Operand, Operand], wanted: SumOptions, keep: Callable[[], KeptRows | None]
    ) -> Task | None:
        """Prepare a whole small pair to be computed together with others; None if it cannot wait for them.

        ``keep`` makes the argument ``kept`` of :meth:`sum_pair`.
        """
        if self._native is None or any(operand.weight.needs_float64 for operand in operands):
            return None
        return self._native.prepare_whole(operands, wanted, keep)

    def start(self, tasks: Sequence[Task]) -> Callable[[], list[Sums]]:
        """Start to compute the sums of prepared pairs; the returned function waits for them.

        It returns none if a file cannot be read to the end. Until then, nothing else may be computed.
        """
        assert self._native is not None  # noqa: S101
        return self._native.start(tasks)

    def _sum_with_torch(
        self,
        operands: tuple[Operand, Operand],
        chunks: Sequence[Chunk],
        wanted: SumOptions,
        see: See | None,
    ) -> Sums:
        saturated: list[Tensor] = []

        def load(chunk: Chunk) -> tuple[Tensor, Tensor]:
            x, values = operands[0].dequantize(chunk).weight, operands[1].dequantize(chunk)
            if values.saturated is not None:
                saturated.append(values.saturated)
            if see is not None:
                see(x, values.weight)
            return x, values.weight

        sums = exact_sums(load, chunks, operands[0].weight.matrix[1], self._outlier, wanted)
        if saturated:
            sums.saturated = int(torch.stack(saturated).sum())
        return sums
