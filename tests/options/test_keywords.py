"""Keywords of the library: signatures, and errors that name arguments."""

import inspect
from dataclasses import fields

import make_stub
import pytest
from support.making import numbers, store
from support.stored import pair

import quanterr
from quanterr import options
from quanterr.errors import CheckpointError, UsageError
from quanterr.options import Option, list_flags, list_notes, list_options

FUNCTIONS = {
    "compare": options.CompareOptions,
    "rank": options.RankOptions,
    "sweep": options.SweepOptions,
    "plan": options.PlanOptions,
    "evaluate": options.EvaluateOptions,
    "inspect": options.InspectOptions,
    "dequantize": options.DequantizeOptions,
    "compare_images": options.ImageGateOptions,
    "iterate_pairs": options.PairOptions,
}
INTERNAL = {"stop", "command"}


@pytest.mark.parametrize("name", FUNCTIONS)
class TestSignatures:
    def test_signatures_name_every_field_with_its_default(self, name):
        parameters = inspect.signature(getattr(quanterr, name)).parameters

        for field in fields(FUNCTIONS[name]):
            assert field.name in INTERNAL or field.default == parameters[field.name].default
        assert set() == INTERNAL & parameters.keys()
        assert all(parameter.kind is not inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())

    def test_help_has_the_text_of_every_keyword(self, name):
        text = " ".join(inspect.getdoc(getattr(quanterr, name)).split())

        for field, note in list_notes(FUNCTIONS[name]).items():
            words = (note.help if isinstance(note, Option) else note).split("--")[0].split()
            assert f" {field}" in text
            assert " ".join(words) in text

    def test_long_options_are_keywords(self, name):
        for field, option in list_options(FUNCTIONS[name]).items():
            keyword = list_flags(field, option)[0].removeprefix("--").replace("-", "_")
            with pytest.raises(TypeError, match="unexpected keyword argument 'no_such_thing'"):
                getattr(quanterr, name)("a", **{keyword: 1, "no_such_thing": 1})

    def test_unknown_keyword_is_a_type_error_with_the_nearest_name(self, name):
        field = next(iter(list_notes(FUNCTIONS[name])))
        with pytest.raises(
            TypeError, match=rf"{name}\(\) got an unexpected keyword argument '{field}z'; did you mean '{field}'"
        ):
            getattr(quanterr, name)("a", **{f"{field}z": None})


def test_stub_for_editors_is_up_to_date():
    """If the stub differs, run python tests/make_stub.py."""
    assert make_stub.make_stub() == make_stub.STUB.read_text("utf-8")


def test_layers_may_be_called_as_the_option_is(tmp_path):
    assert ["attn"] == quanterr.compare(*pair(tmp_path), layers_to_compare="attn").selection.patterns
    with pytest.raises(TypeError, match=r"^compare\(\) got 'layers' twice, once as 'layers_to_compare'$"):
        quanterr.compare("a", "b", layers="attn", layers_to_compare="mlp")


def test_errors_name_arguments_and_leave_commands_unchanged():
    with pytest.raises(UsageError, match=r"^give one goal: size, bits, max_kld, max_output_error or min_snr$"):
        quanterr.plan("original")
    needed = "max_kld needs sensitivity, written by quanterr evaluate --sensitivity-out"
    with pytest.raises(UsageError, match=rf"^{needed}$"):
        quanterr.plan("original", max_kld=0.1)


def test_single_string_counts_as_a_list(tmp_path):
    with pytest.raises(UsageError, match=r"is not a recipe|no recipe"):
        quanterr.sweep("original", "int8_rwo")
    original = store(tmp_path / "x.safetensors", {"a.weight": numbers(32, 32)})
    with pytest.raises(CheckpointError, match=r"^quantized: no such file"):
        quanterr.rank(original, "quantized", against="int8_row")
