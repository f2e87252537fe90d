"""Several candidates in one pass give the digits of separate comparisons and read the original once."""

import pytest
import torch
from msgspec.structs import replace
from support.making import numbers, quantized_fp8, quantized_int8, store

import quanterr
from quanterr.checkpoints import CheckpointFile, open_checkpoint
from quanterr.comparison import compare_each, finishing, run
from quanterr.comparison.tasks import group_by_original
from quanterr.kernel.library import VARIABLE
from quanterr.options import CompareOptions
from quanterr.pairing import pair
from quanterr.selection import LayerSelection

SHAPES = {"layers.0.mlp.up_proj.weight": (700, 1000), "layers.0.mlp.down_proj.weight": (300, 2000), "small": (9, 7)}
WILD = "layers.1.mlp.up_proj.weight"  # only exact sums can reveal differences


def original():
    tensors = {name: numbers(*shape, seed=n) for n, (name, shape) in enumerate(SHAPES.items())}
    wild = numbers(64, 128, seed=9).float()
    wild[3, 5] = 1e30
    return tensors | {WILD: wild.bfloat16()}


def store_by(recipe, tensors):
    stored_tensors = {}
    for name, weight in tensors.items():
        stored_tensors[name], stored_tensors[f"{name}_scale"] = recipe(weight)
    return stored_tensors


@pytest.fixture
def files(tmp_path):
    """An original and three candidates: FP8, INT8 and a BF16 copy of half of it."""
    x = original()
    made = [store_by(quantized_fp8, x), store_by(quantized_int8, x), x | {"small": x["small"] * 1.5}]
    return store(tmp_path / "x.safetensors", x), [
        store(tmp_path / f"{n}.safetensors", tensors) for n, tensors in enumerate(made)
    ]


def without_run(report):
    return [line for line in report.to_json().splitlines() if not line.startswith('"run"')]


@pytest.fixture
def reads(monkeypatch):
    """(file name, offset, bytes) of every read."""
    monkeypatch.setenv(VARIABLE, "torch")  # reads with the torch kernel go through Python
    seen = []
    read = CheckpointFile.read_into
    monkeypatch.setattr(
        CheckpointFile,
        "read_into",
        lambda self, view, offset: seen.append((self.path.name, offset, len(view))) or read(self, view, offset),
    )
    return seen


class TestPass:
    def test_each_report_has_the_same_digits_as_a_comparison(self, files):
        x, candidates = files
        together = [without_run(report) for report in compare_each(x, candidates, CompareOptions(device="cpu"))]

        assert together == [without_run(quanterr.compare(x, y, device="cpu")) for y in candidates]

    def test_candidate_order_changes_nothing(self, files):
        x, candidates = files
        forth, back = (compare_each(x, order, CompareOptions(device="cpu")) for order in (candidates, candidates[::-1]))

        assert [without_run(r) for r in forth] == [without_run(r) for r in back][::-1]

    def test_original_is_read_once_except_for_samples_and_worst_rows(self, files, reads):
        x, candidates = files
        with open_checkpoint(x) as checkpoint, pytest.MonkeyPatch.context() as patch:
            patch.setattr(finishing, "_find_worst", lambda *_: None)  # a check that reads a row again
            patch.setattr(finishing, "compute_fingerprint", lambda *_: None)  # a check that reads a few bytes again
            patch.setattr(run, "choose_alternatives", lambda plan, undo: plan)  # looks at samples beforehand
            # Looks at samples of doubtful weights afterwards
            patch.setattr("quanterr.findings.diagnose", lambda *_: ())
            reads.clear()
            compare_each(checkpoint, candidates, CompareOptions(device="cpu"), samples=False)
            weights = sorted((entry.offset, entry.nbytes) for entry in checkpoint.entries.values())
        pieces = sorted((offset, n) for name, offset, n in reads if name == x.name)

        assert sum(n for _, n in weights) == sum(n for _, n in pieces)
        assert weights[0][0] == pieces[0][0]
        assert all(offset + n == pieces[k + 1][0] for k, (offset, n) in enumerate(pieces[:-1]))

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
    def test_each_report_equals_a_comparison_on_cuda(self, files):
        """Codes are decoded elsewhere if several candidates share them, so sums are added in another order."""
        x, candidates = files
        together = compare_each(x, candidates, CompareOptions(device="cuda"))
        alone = [quanterr.compare(x, y, device="cuda") for y in candidates]

        for report, other in zip(together, alone, strict=True):
            for layer, same in zip(report.layers, other.layers, strict=True):
                assert layer.mean_squared_error == pytest.approx(same.mean_squared_error, rel=1e-12)
                assert layer.max_absolute_error == same.max_absolute_error

    def test_incomplete_candidate_does_not_affect_the_others(self, files, tmp_path):
        x, candidates = files
        less = store_by(quantized_fp8, {name: t for name, t in original().items() if name != "small"})
        partial = store(tmp_path / "partial.safetensors", less)
        reports = compare_each(x, [partial, candidates[0]], CompareOptions(device="cpu"))

        assert ["inconclusive", "pass"] == [report.verdict for report in reports]
        assert without_run(quanterr.compare(x, candidates[0], device="cpu")) == without_run(reports[1])


class TestGrouping:
    def jobs(self, original, *candidates):
        with open_checkpoint(original) as x:
            plans, recognized = [], {}
            for path in candidates:
                with open_checkpoint(path) as y:
                    plans.append(pair(x, y, LayerSelection(), recognized).pairs)
            return group_by_original(plans)

    def test_pairs_sharing_an_original_weight_are_one_task(self, files):
        x, candidates = files
        tasks = self.jobs(x, *candidates)

        assert [len(SHAPES) + 1, {3}] == [len(tasks), {len(jobs) for jobs in tasks}]
        assert [0, 1, 2] == [job.candidate for job in tasks[0]]

    def test_quantized_original_is_shared_too(self, files):
        _, candidates = files

        assert {2} == {len(jobs) for jobs in self.jobs(candidates[0], *candidates[1:])}

    def test_transposed_original_needs_its_own_task(self, tmp_path):
        name = "h.0.mlp.c_fc.weight"
        weight = numbers(64, 32)
        x = store(tmp_path / "x.safetensors", {name: weight})
        as_it_is = store(tmp_path / "a.safetensors", {name: weight * 1.01})
        turned = [store(tmp_path / f"{n}.safetensors", {name: n * weight.t().contiguous()}) for n in (1.01, 1.02)]
        tasks = self.jobs(x, as_it_is, *turned)
        reports = compare_each(x, [as_it_is, *turned], CompareOptions(device="cpu"))

        assert [[0], [1, 2]] == [[job.candidate for job in jobs] for jobs in tasks]
        assert [(64, 32), (32, 64), (32, 64)] == [report.layers[0].tensor_shape for report in reports]
        assert reports[0].layers[0].error_norm == pytest.approx(reports[1].layers[0].error_norm)

    def test_originals_that_may_be_decoded_differently_get_separate_tasks(self, files):
        x, candidates = files
        with open_checkpoint(x) as checkpoint, open_checkpoint(candidates[0]) as y:
            first = pair(checkpoint, y, LayerSelection()).pairs[0]
        first_pair = replace(first, original=replace(first.original, dequantize=lambda *_: torch.zeros(1)))
        other = replace(first, original=replace(first.original, dequantize=lambda *_: torch.zeros(1)))

        assert 2 == len(group_by_original([[first_pair], [other]]))
