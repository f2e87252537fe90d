"""The run: digits that do not depend on who computes them, bounded memory, changing files, devices."""

import gc
import math
import os
import threading
import tracemalloc

import pytest
import torch
from support.making import CPU, numbers, pair_of
from support.stored import write_pair
from support.tolerances import FEW

import quanterr
from quanterr.checkpoints import open_checkpoint
from quanterr.comparison import devices, scheduler
from quanterr.comparison.scheduler import Scheduler
from quanterr.comparison.tasks import group_by_original
from quanterr.comparison.worker import Worker
from quanterr.errors import CheckpointError, ResourceError, UsageError
from quanterr.metrics.sums import Sums, as_float
from quanterr.pairing import pair
from quanterr.selection import LayerSelection
from quanterr.tensors.chunks import CPU_CHUNK, Chunk, Cut, split_chunks
from quanterr.tensors.devices import pick_device


def without_run(report):
    return [line for line in report.to_json().splitlines() if not line.startswith('"run"')]


class TestDigits:
    def test_digits_do_not_depend_on_the_number_of_threads(self, tmp_path, monkeypatch):
        files = write_pair(tmp_path, a=(700, 1000), b=(300, 4000), c=(8, 8))
        reports = []
        for threads in (1, 2, 5):
            monkeypatch.setattr(devices, "usable_cores", lambda threads=threads: threads)
            reports.append(without_run(quanterr.compare(*files, device="cpu")))

        assert reports[0] == reports[1] == reports[2]

    @pytest.mark.parametrize("size", [1000, 4096, 1 << 16])
    def test_chunk_size_changes_digits_by_rounding_only(self, tmp_path, monkeypatch, size):
        files = write_pair(tmp_path, a=(700, 1000))
        whole = quanterr.compare(*files, device="cpu").layers[0]
        monkeypatch.setattr(scheduler, "CPU_CHUNK", size)
        cut = quanterr.compare(*files, device="cpu").layers[0]

        assert math.isclose(whole.snr_db, cut.snr_db, rel_tol=1e-9)
        assert math.isclose(whole.mean_absolute_error, cut.mean_absolute_error, rel_tol=1e-9)
        assert whole.max_absolute_error == cut.max_absolute_error
        assert whole.absolute_error_percentiles == cut.absolute_error_percentiles
        assert whole.worst_element == cut.worst_element
        assert [row.row for row in whole.worst_rows] == [row.row for row in cut.worst_rows]

    def test_digits_agree_with_measure(self, tmp_path):
        x, y = write_pair(tmp_path, a=(70, 100))
        layer = quanterr.compare(x, y, device="cpu").layers[0]
        with open_checkpoint(x) as original, open_checkpoint(y) as quantized:
            weights = pair(original, quantized, LayerSelection()).pairs[0]
            worker = Worker(CPU, CPU_CHUNK, 0.01)
            whole = Chunk(0, 70, 0, 100)
            metrics = quanterr.measure(
                weights.original.dequantize(whole, worker._buffers.original).weight.clone(),
                weights.quantized.dequantize(whole, worker._buffers.quantized[0]).weight.clone(),
            )

        assert metrics["snr_db"] == layer.snr_db
        assert metrics["cosine_similarity"] == layer.cosine_similarity


class TestMemory:
    @pytest.mark.slow
    def test_many_small_weights_take_little_memory(self, tmp_path):
        def measure(n):
            """Return the bytes that the report keeps, and the maximum that the comparison uses at once."""
            files = write_pair(tmp_path, **{f"layers.{n}.mlp.experts.{i}.up_proj": (32, 128) for i in range(n)})
            gc.collect()
            tracemalloc.start()
            try:
                kept = quanterr.compare(*files, device="cpu")
                assert (n, []) == (len(kept.layers), kept.findings)
                return tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()

        measure(10)  # fill caches that are made only once
        few, many = measure(100), measure(300)
        kept, peak = ((b - a) / 200 for a, b in zip(few, many, strict=True))

        assert kept < 4400  # bytes that a report keeps for each weight
        assert peak < 8200

    @pytest.mark.session
    @pytest.mark.parametrize("candidates", [1, 3])
    @pytest.mark.parametrize("shape", [(64, 4096), (512, 4096), (2, 1 << 19)])
    def test_reads_and_buffers_do_not_grow_with_a_weight(self, tmp_path, monkeypatch, shape, candidates):
        reads, workers = [], []
        files = write_pair(tmp_path, a=shape)
        monkeypatch.setattr(scheduler, "CPU_CHUNK", 1 << 15)
        read = quanterr.checkpoints.CheckpointFile.read_into
        monkeypatch.setattr(
            quanterr.checkpoints.CheckpointFile,
            "read_into",
            lambda self, view, offset: reads.append(len(view)) or read(self, view, offset),
        )
        make = Worker.__init__
        monkeypatch.setattr(Worker, "__init__", lambda self, *a: workers.append(self) or make(self, *a))
        with open_checkpoint(files[0]) as x, open_checkpoint(files[1]) as y:
            tasks = group_by_original([pair(x, y, LayerSelection()).pairs] * candidates)
            Scheduler(tasks, CPU, lambda candidate, done: None, 0.01, threading.Event()).run(lambda p: None)

        assert max(reads) <= 2 * (1 << 15)
        assert max(worker.nbytes for worker in workers) < (64 if candidates == 1 else 128) * (1 << 15)

    @pytest.mark.parametrize("size", [1, 3, 5, 8, 100])
    def test_chunk_may_be_split_into_smaller_ones(self, size):
        for chunk in (Chunk(2, 6, 0, 5), Chunk(3, 4, 10, 25), Chunk(0, 0, 0, 5)):
            pieces = split_chunks([chunk], size)
            seen = [(r, c) for k in pieces for r in range(k.row, k.stop_row) for c in range(k.col, k.stop_col)]

            assert [(r, c) for r in range(chunk.row, chunk.stop_row) for c in range(chunk.col, chunk.stop_col)] == seen
            assert all(piece.n <= size for piece in pieces)

    def test_chunks_cover_a_matrix_once_and_in_order(self):
        for rows, cols, size in [(7, 5, 12), (3, 100, 30), (1, 1, 1), (0, 5, 3), (5, 0, 3), (4, 4, 4)]:
            cut = Cut(rows, cols, size)
            seen = [(r, c) for k in cut for r in range(k.row, k.stop_row) for c in range(k.col, k.stop_col)]

            assert [(r, c) for r in range(rows) for c in range(cols)] == seen
            assert all(chunk.n <= size for chunk in cut)
            assert cut[:2] == list(cut)[:2]


class TestFaults:
    def test_file_changed_during_reading_is_an_error(self, tmp_path):
        x, y = write_pair(tmp_path, a=(64, 64))
        with open_checkpoint(x) as original, open_checkpoint(y) as quantized:
            os.utime(y, ns=(1, 1))
            with pytest.raises(CheckpointError, match="changed while being read"):
                quanterr.compare(original, quantized)

    def test_file_shrinking_during_reading_is_an_error(self, tmp_path):
        x, y = write_pair(tmp_path, a=(64, 64))
        with open_checkpoint(x) as original, open_checkpoint(y) as quantized:
            os.truncate(y, 100)
            with pytest.raises(CheckpointError, match=r"changed while being read \(size [0-9]+ → 100\)"):
                quanterr.compare(original, quantized)

    def test_stopping_early_gives_an_incomplete_report(self, tmp_path):
        stop = threading.Event()
        stop.set()
        report = quanterr.compare(*write_pair(tmp_path, a=(64, 64)), stop=stop)

        assert (False, "inconclusive") == (report.complete, report.verdict)
        assert report.quantized.tensors == sum(size.tensors for size in report.coverage.quantized.values())

    def test_caller_event_is_only_read(self, tmp_path):
        stop = threading.Event()
        quanterr.compare(*write_pair(tmp_path, a=(64, 64)), stop=stop)

        assert not stop.is_set()

    def test_torch_keeps_its_number_of_threads(self, tmp_path):
        before = torch.get_num_threads()
        quanterr.compare(*write_pair(tmp_path, a=(64, 64)))

        assert before == torch.get_num_threads()

    def test_memory_error_names_the_layer(self, tmp_path, monkeypatch):
        def fail(*_):
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")

        monkeypatch.setattr(Worker, "sum_chunks", fail)

        with pytest.raises(ResourceError, match=r"out of GPU memory at a\.weight; try device cpu"):
            quanterr.compare(*write_pair(tmp_path, a=(64, 64)))


DEVICE = torch.device("cpu", 0)  # stands for a device with too little memory; the CPU is the fallback


class TestRoom:
    """A device is short of memory: chunks of 2^14 elements are halved down to 2^12, and to 2^11 on the CPU."""

    @pytest.fixture
    def chunks(self, monkeypatch):
        """(device, elements) of each chunk that was computed or found too large."""
        monkeypatch.setattr(scheduler, "MIN_DEVICE_CHUNK", 1 << 12)
        monkeypatch.setattr(scheduler, "CPU_CHUNK", 1 << 11)
        return []

    def run(self, files, tried, monkeypatch, largest, may_move=False, method="sum_chunks"):
        """Return the sums of a weight where chunks larger than ``largest`` do not fit, and the run."""
        work, done = getattr(Worker, method), []

        def limit_chunks(worker, *arguments):
            tried.append((worker.device, worker.size))
            if worker.device == DEVICE and worker.size > largest:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return work(worker, *arguments)

        monkeypatch.setattr(Worker, method, limit_chunks)
        with open_checkpoint(files[0]) as x, open_checkpoint(files[1]) as y:
            tasks = group_by_original([pair(x, y, LayerSelection()).pairs])
            run = Scheduler(tasks, DEVICE, lambda _, d: done.append(d), 0.01, threading.Event(), may_move)
            run.size, run.threads = 1 << 14, 1
            run.run(lambda progress: None)
        return done[0].sums, run

    @pytest.mark.parametrize("shape", [(70, 1000), (2, 40_000)])
    @pytest.mark.parametrize("method", ["sum_chunks", "finish"])
    @pytest.mark.parametrize(
        ("largest", "sizes"),
        [(1 << 14, [14]), (1 << 13, [14, 13]), (1 << 12, [14, 13, 12]), (0, [14, 13, 12, 11])],
    )
    def test_chunks_are_halved_until_the_cpu_takes_over(
        self, tmp_path, monkeypatch, chunks, shape, method, largest, sizes
    ):
        files = write_pair(tmp_path, a=shape)
        with pytest.MonkeyPatch.context() as patch:
            whole, _ = self.run(files, [], patch, 1 << 14)
        sums, run = self.run(files, chunks, monkeypatch, largest, may_move=True, method=method)

        assert [1 << size for size in sizes] == list(dict.fromkeys(size for _, size in chunks))
        assert (sizes[-1] == 11) == (CPU in [device for device, _ in chunks])
        assert ("a.weight" if sizes[-1] == 11 else "") == run.moved_at
        assert math.isclose(as_float(whole.e_sq), as_float(sums.e_sq), rel_tol=FEW)
        assert math.isclose(as_float(whole.x_sq), as_float(sums.x_sq), rel_tol=FEW)
        assert (whole.n, whole.e_max, whole.histogram) == (sums.n, sums.e_max, sums.histogram)
        assert whole.worst == sums.worst or shape[0] == 2  # pieces of a row have their extremes in other places
        assert run.progress.done_bytes == run.progress.total_bytes

    def test_exhausted_memory_is_an_error_where_the_cpu_may_not_go_on(self, tmp_path, monkeypatch, chunks):
        with pytest.raises(ResourceError, match=r"out of GPU memory at a\.weight; try --device cpu") as raised:
            self.run(write_pair(tmp_path, a=(70, 1000)), chunks, monkeypatch, 0)

        assert 5 == raised.value.status
        assert [1 << 14, 1 << 13, 1 << 12] == [size for _, size in chunks]

    def test_memory_is_released_before_another_try(self, tmp_path, monkeypatch, chunks):
        held = []
        start_over = Worker.start_over
        monkeypatch.setattr(Worker, "start_over", lambda self, *to: start_over(self, *to) or held.append(self.nbytes))
        self.run(write_pair(tmp_path, a=(70, 1000)), chunks, monkeypatch, 1 << 12, method="finish")

        assert [0, 0, 0] == held  # at the beginning, and twice for lack of room

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
    def test_cpu_goes_on_where_cuda_memory_runs_out(self, tmp_path, monkeypatch):
        monkeypatch.setattr(devices, "usable_cores", lambda: 1)  # so that auto takes the GPU
        files = write_pair(tmp_path, a=(3000, 4096), b=(2000, 4096))
        expected = quanterr.compare(*files, device="cpu")
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(1e-5)
        try:
            report = quanterr.compare(*files, device="auto")
            with pytest.raises(ResourceError, match="out of GPU memory at"):
                quanterr.compare(*files, device="cuda")
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)

        assert "; also cpu, as memory ran out at " in report.run.device
        for x, y in zip(expected.layers, report.layers, strict=True):
            assert math.isclose(x.mean_squared_error, y.mean_squared_error, rel_tol=1e-7)
            assert x.max_absolute_error == y.max_absolute_error


class TestDevices:
    def test_auto_is_the_cpu_without_an_accelerator(self, monkeypatch):
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)

        assert CPU == pick_device("auto")

    @pytest.mark.parametrize("name", ["tpu", "cud", "meta", "cuda:x", "cuda:-1", ""])
    def test_invalid_device_name_is_wrong_usage(self, name):
        with pytest.raises(UsageError, match="choose auto, cpu, cuda"):
            pick_device(name)

    def test_missing_device_is_an_environment_error(self):
        for name in ("cuda:99", "xpu:99", "mps:99"):
            with pytest.raises(ResourceError, match="devices here; try --device cpu"):
                pick_device(name)

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
    def test_cuda_agrees_with_the_cpu(self, tmp_path):
        files = write_pair(tmp_path, a=(700, 1000), b=(300, 4000))
        reports = [quanterr.compare(*files, device=device) for device in ("cpu", "cuda")]

        for x, y in zip(reports[0].layers, reports[1].layers, strict=True):
            assert math.isclose(x.mean_squared_error, y.mean_squared_error, rel_tol=1e-7)
            assert math.isclose(x.mean_absolute_error, y.mean_absolute_error, rel_tol=1e-7)
            assert x.max_absolute_error == y.max_absolute_error
            assert x.absolute_error_percentiles == y.absolute_error_percentiles
            assert x.worst_element == y.worst_element


def test_worst_element_is_found_where_the_last_chunk_is_small():
    x = numbers(33, 64).float()
    y = x + 0.001
    y[3, 7] = 9.0
    pair, worker = pair_of(x, y), Worker(torch.device("cpu"), 64, 0.01)
    with torch.inference_mode():
        sums = Sums.merge(worker.sum_chunks([pair], [chunk])[0] for chunk in Cut(33, 64, 64))
        worst = worker.finish(0, pair, sums).worst

    assert (3, 7, 9.0) == (worst.row, worst.col, worst.y)
