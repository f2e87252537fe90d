"""Errors for wrong arguments of the library: a line with the argument, what was given and what is expected."""

import pickle
import re

import numpy as np
import pytest
import torch
from support.stored import pair

import quanterr
from quanterr.errors import CheckpointError, ReportError, UsageError

SIDE = "a path, a Checkpoint, a state dict or a Model"
TENSOR = torch.zeros(2, 3)
WRONG = [
    ("compare", (TENSOR, TENSOR), {}, f"original: expected {SIDE}; got a Tensor of shape [2, 3]; for two tensors: "),
    ("compare", ("X", None), {}, f"quantized: expected {SIDE}; got None"),
    (
        "compare",
        ({"a.weight": "x"}, "X"),
        {},
        "state dict: a.weight: expected a tensor or an array of numpy; got a str",
    ),
    ("compare", ("X", "X"), {"layers": 5}, "layers: expected a string, or several; got 5, an int"),
    ("compare", ("X", "X"), {"layers": ["attn", 5]}, "layers: expected a string, or several; got 5, an int"),
    ("compare", ("X", "X"), {"outlier_threshold": "8"}, "outlier_threshold: expected a number; got '8', a str"),
    ("compare", ("X", "X"), {"device": 0}, "device: expected a string; got 0, an int"),
    ("compare", ("X", "X"), {"baseline": 5}, "baseline: expected a path or a Result; got 5, an int"),
    ("compare", ("X", "X"), {"thresholds": {"a": 1}}, "thresholds: expected a path; got a dict"),
    ("compare", ("X", "X"), {"lenient": "yes"}, "lenient: expected True or False; got 'yes', a str"),
    ("compare", ("X", "X"), {"on_layer": 5}, "on_layer: expected a function; got 5, an int"),
    ("rank", ("X", 5), {}, f"candidates: expected {SIDE}, or several; got 5, an int"),
    ("rank", ("X", {"mine": 5}), {"against": "int8_row"}, f"a checkpoint: expected {SIDE}; got 5, an int"),
    ("sweep", ("X", 5), {}, "to: expected a string, or several; got 5, an int"),
    ("sweep", ("X", "fp8_row"), {"sample": 0.1}, "sample: expected a string; got 0.1, a float"),
    ("plan", ("X",), {"same_in": "row"}, "same_in: expected 'fused', 'block' or 'role'; got 'row', a str"),
    ("plan", ("X",), {"bits": True}, "bits: expected a number; got True, a bool"),
    ("inspect", (5,), {}, f"checkpoint: expected {SIDE}; got 5, an int"),
    (
        "dequantize",
        ("X", "Y"),
        {"dtype": torch.bfloat16},
        "dtype: expected 'bf16', 'f16' or 'f32'; got torch",
    ),
    ("evaluate", ("X", "X"), {"text": 5}, "text: expected a path, or several; got 5, an int"),
    ("measure", ("x", TENSOR), {}, "x: expected a tensor or an array of numpy; got a str"),
    ("fake_quantize", (TENSOR, 8), {}, "recipe: expected a string; got 8, an int"),
    ("judge", (5,), {"require": "snr_db >= 1"}, "document: expected a path or a Result; got 5, an int"),
    ("diff", (5, "X"), {}, "old: expected a path or a Document; got 5, an int"),
    ("read_report", (5,), {}, "path: expected a path; got 5, an int"),
]


@pytest.mark.parametrize(("name", "given", "keywords", "message"), WRONG, ids=[f"{row[0]} {row[3]}" for row in WRONG])
def test_wrong_argument_is_named_in_one_line(name, given, keywords, message):
    with pytest.raises(UsageError, match=re.escape(message)) as error:
        getattr(quanterr, name)(*given, **keywords)

    assert "\n" not in str(error.value)
    assert "--" not in str(error.value)


def test_missing_argument_is_an_error_that_names_the_function():
    with pytest.raises(TypeError, match=r"^compare\(\) missing 1 required positional argument: 'quantized'$"):
        quanterr.compare("original")


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: quanterr.compare("nowhere", "nowhere"), CheckpointError),
        (lambda: quanterr.open_checkpoint("nowhere"), CheckpointError),
        (lambda: quanterr.read_document("nowhere"), ReportError),
    ],
)
def test_missing_file_is_a_sentence_without_inner_frames(call, error):
    with pytest.raises(error, match=r"^nowhere: no such file$") as caught:
        call()

    frames, trace = 0, caught.value.__traceback__
    while trace is not None:
        frames, trace = frames + 1, trace.tb_next
    assert frames <= 5
    assert caught.value.__suppress_context__


def test_functions_can_be_sent_to_other_processes():
    for name in ("compare", "read_report", "measure"):
        assert getattr(quanterr, name) is pickle.loads(pickle.dumps(getattr(quanterr, name)))


def test_saving_names_no_option_of_the_command(tmp_path):
    report = quanterr.compare({"a.weight": TENSOR + 1}, {"a.weight": TENSOR})
    with pytest.raises(UsageError, match=r"^save\(\) x\.pdf: unknown suffix; choose one of \.json, "):
        report.save("x.pdf")


class TestArrays:
    """numpy's arrays are accepted wherever tensors are."""

    def test_arrays_are_measured_and_compared_like_tensors(self):
        x = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
        y = x + np.float32(0.01)

        assert quanterr.measure(torch.tensor(x), torch.tensor(y)) == quanterr.measure(x, y)
        reports = [
            quanterr.compare({"a.weight": convert(x)}, {"a.weight": convert(y)})
            for convert in (np.asarray, torch.tensor)
        ]
        assert reports[0].layers[0].snr_db == reports[1].layers[0].snr_db
        assert bool(
            (quanterr.fake_quantize(x, "int8_row") == quanterr.fake_quantize(torch.tensor(x), "int8_row")).all()
        )

    def test_arrays_of_bfloat16_are_read(self):
        ml_dtypes = pytest.importorskip("ml_dtypes")
        x = np.arange(4, dtype=np.float32).reshape(2, 2)

        assert quanterr.measure(x, x.astype(ml_dtypes.bfloat16))["max_absolute_error"] == 0

    def test_unknown_dtype_of_an_array_is_named(self):
        with pytest.raises(UsageError, match="x: torch has no dtype str32, which the array has"):
            quanterr.measure(np.array(["a"]), TENSOR)


def test_equal_tensors_have_an_infinite_snr():
    assert float("inf") == quanterr.measure(TENSOR + 1, TENSOR + 1)["snr_db"]


def test_baseline_may_be_a_result_or_its_file(tmp_path):
    x, y = pair(tmp_path)
    old = quanterr.compare(x, y)
    old.save(tmp_path / "old.json")

    for baseline in (old, tmp_path / "old.json"):
        assert "pass" == quanterr.compare(x, y, baseline=baseline).verdict
        assert "pass" == quanterr.judge(tmp_path / "old.json", baseline=baseline).verdict
    plan = quanterr.plan({"a.weight": torch.randn(64, 64)}, bits=9, to="int8_row")
    with pytest.raises(UsageError, match=r"^baseline a Plan: the kind of the baseline \(plan\) differs"):
        quanterr.compare(x, y, baseline=plan)
