"""Keywords of the library: signatures, and errors that name arguments."""

import inspect
from dataclasses import fields

import pytest
from support.making import numbers, store

import quanterr
from quanterr import options
from quanterr.errors import CheckpointError, UsageError

FUNCTIONS = {
    "compare": options.CompareOptions,
    "rank": options.RankOptions,
    "sweep": options.SweepOptions,
    "plan": options.PlanOptions,
    "evaluate": options.EvaluateOptions,
}


@pytest.mark.parametrize("name", FUNCTIONS)
class TestSignatures:
    def test_signatures_name_every_field_with_its_default(self, name):
        parameters = inspect.signature(getattr(quanterr, name)).parameters

        for field in fields(FUNCTIONS[name]):
            assert field.default == parameters[field.name].default
        assert all(one.kind is not inspect.Parameter.VAR_KEYWORD for one in parameters.values())

    def test_unknown_keyword_is_a_type_error_with_the_nearest_name(self, name):
        with pytest.raises(
            TypeError, match=rf"{name}\(\) got an unexpected keyword argument 'devise'; did you mean 'device'"
        ):
            getattr(quanterr, name)("a", devise="cpu")


def test_errors_name_arguments_and_leave_commands_unchanged():
    with pytest.raises(UsageError, match=r"^give one goal: size, bits, max_kld, max_output_error or min_snr$"):
        quanterr.plan("original")
    with pytest.raises(UsageError, match=r"^max_kld needs sensitivity, written by quanterr evaluate --sensitivity$"):
        quanterr.plan("original", max_kld=0.1)


def test_single_string_counts_as_a_list(tmp_path):
    with pytest.raises(UsageError, match=r"is not a recipe|no recipe"):
        quanterr.sweep("original", "int8_rwo")
    original = store(tmp_path / "x.safetensors", {"a.weight": numbers(32, 32)})
    with pytest.raises(CheckpointError, match=r"^quantized: no such file"):
        quanterr.rank(original, "quantized", against="int8_row")
