"""Weights with more elements than 32 bits can count."""

import json
import os
from bisect import bisect_right
from fractions import Fraction
from functools import partial

import pytest
import torch
from support.making import CPU
from support.stored import raw_header

from quanterr.checkpoints import open_checkpoint
from quanterr.comparison.worker import Worker
from quanterr.metrics.sums import ONE, Sums, as_float
from quanterr.pairing import pair
from quanterr.selection import LayerSelection
from quanterr.tensors.chunks import CPU_CHUNK, Cut

ONE_CODE, HALF_CODE, TWO_CODE = b"\x38", b"\x30", b"\x40"  # E4M3


def sparse(path, shape, codes):
    """Write a file with one FP8 weight that is zero except for these codes; it takes almost no disk space."""
    n = shape[0] * shape[1]
    raw_header(path, json.dumps({"w": {"dtype": "F8_E4M3", "shape": shape, "data_offsets": [0, n]}}).encode())
    start = path.stat().st_size
    os.truncate(path, start + n)
    with path.open("r+b") as file:
        for at, code in codes.items():
            file.seek(start + at)
            file.write(code)
    return path


@pytest.mark.slow
class TestHuge:
    """Only the first and last chunks and the chunks around element 2^31 are computed: the others are the same."""

    @pytest.mark.parametrize("shape", [(1, 2**31 + 77), (2**16 + 3, 2**15), (2**31 + 5, 1), (3, 2**32)])
    def test_huge_weights_have_all_their_elements_in_their_places(self, tmp_path, shape):
        n, cols = shape[0] * shape[1], shape[1]
        marks = [0, 2**31 - 1, 2**31, n - 1]
        files = (
            sparse(tmp_path / "x.safetensors", shape, dict.fromkeys(marks, ONE_CODE)),
            sparse(tmp_path / "y.safetensors", shape, dict.fromkeys(marks, ONE_CODE) | {n - 1: HALF_CODE}),
        )
        worker, cut = Worker(CPU, CPU_CHUNK, 0.01), Cut(*shape, CPU_CHUNK)
        begins = partial(bisect_right, cut, key=lambda chunk: chunk.row * cols + chunk.col)
        chunks = [cut[number] for number in sorted({begins(at) - 1 for at in marks})]
        with open_checkpoint(files[0]) as x, open_checkpoint(files[1]) as y, torch.inference_mode():
            weights = pair(x, y, LayerSelection()).pairs[0]
            sums = Sums.merge(worker.sum_chunks([weights], [chunk])[0] for chunk in chunks)
            done = worker.finish(0, weights, sums)

        assert n == weights.original.n
        assert sum(chunk.n for chunk in chunks) == sums.elements
        assert (4, 3.25, 0.25) == (sums.x_nonzero, *(float(Fraction(u, ONE)) for u in (sums.y_sq, sums.e_sq)))
        assert (*divmod(n - 1, cols), 1.0, 0.5) == done.worst

    def test_sums_and_counts_beyond_64_bits_are_exact(self):
        part = Sums(elements=2**62, n=2**62, e_sq=2**62 * ONE)

        assert (2**65, 2.0**65) == ((total := Sums.merge([part] * 8)).n, as_float(total.e_sq))
