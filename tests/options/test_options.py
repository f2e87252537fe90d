"""Options are declared once: the command line, the library and settings files have the same."""

import re
from math import inf, nan
from typing import Annotated, get_args, get_type_hints

import pytest
import typer
from support.stored import pair
from typer.testing import CliRunner

import quanterr
from quanterr.cli.options import AllBut, Only, with_options
from quanterr.errors import UsageError
from quanterr.options import CompareOptions, EvaluateOptions, PlanOptions, RankOptions, SweepOptions

KINDS = (CompareOptions, RankOptions, SweepOptions, PlanOptions, EvaluateOptions)


@pytest.mark.parametrize(
    ("given", "expected"),
    [("attn", ("attn",)), (["attn", "mlp"], ("attn", "mlp")), (iter(["attn"]), ("attn",)), ((), ())],
)
def test_values_and_single_strings_become_tuples(given, expected):
    assert expected == CompareOptions(layers=given).layers


NUMBERS = [
    (options_class, name)
    for options_class in KINDS
    for name, hint in get_type_hints(options_class).items()
    if float in get_args(hint) or hint is float
]


@pytest.mark.parametrize(("options_class", "name"), NUMBERS, ids=lambda value: getattr(value, "__name__", value))
@pytest.mark.parametrize("value", [nan, inf, -inf])
def test_number_must_be_finite(options_class, name, value):
    with pytest.raises(UsageError, match=f"--{name.replace('_', '-')} {value}: must be a finite number"):
        options_class(**{name: value})


def test_number_must_be_within_its_range():
    with pytest.raises(UsageError, match="--context 1: must be at least 2"):
        EvaluateOptions(context=1)
    with pytest.raises(UsageError, match="--saliency 101: must be at most 100"):
        EvaluateOptions(saliency=101)


def test_help_text_names_no_rare_option():
    from quanterr.cli import app

    for command in typer.main.get_command(app).commands.values():
        rare = [param.opts[0] for param in command.params if param.name in getattr(command.callback, "rare", ())]
        assert set() == {*rare} & {*re.findall(r"--[a-z-]+", command.help)}, command.name


class TestLibrary:
    def test_library_takes_a_string_as_the_command_line_does(self, tmp_path):
        report = quanterr.compare(*pair(tmp_path), layers="attn,mlp", require="snr_db >= 1")

        assert (["attn", "mlp"], ["snr_db >= 1"]) == (report.selection.patterns, [gate.id for gate in report.gates])

    def test_library_judges_its_comparison(self, tmp_path):
        x, y = pair(tmp_path)

        assert "fail" == quanterr.compare(x, y, fail_if=["snr_db < 90"]).verdict
        assert "fail" == quanterr.sweep(x, "fp8_row,int8_row", require="snr_db >= 90").verdict

    def test_wrong_rule_costs_no_run(self, tmp_path):
        with pytest.raises(UsageError, match="no metric of a layer named snr; did you mean"):
            quanterr.compare(tmp_path / "nowhere", tmp_path / "nothing", require=["snr >= 1"])

    def test_size_may_have_a_unit(self, tmp_path):
        x, _ = pair(tmp_path)

        assert 700 * 1024 >= quanterr.plan(x, size="700KiB", to="fp8_row,int8_row").bytes
        with pytest.raises(UsageError, match="give bytes, such as 6GiB"):
            quanterr.plan(x, size="3dB", to="fp8_row")


class TestCommand:
    """with_options makes a command from options."""

    def complete(self, options_class, *words):
        options_seen = []

        def command(options: options_class, number: int = 1) -> None:
            options_seen.append(options)

        app = typer.Typer()
        app.command()(with_options(command))
        result = CliRunner().invoke(app, list(words))
        return options_seen[0] if options_seen else result.output

    def test_command_has_the_fields_in_its_options(self):
        options = self.complete(
            CompareOptions, "-l", "attn", "-l", "mlp", "--outlier-threshold", "0.5", "--fail-if", "a < 1"
        )

        assert (("attn", "mlp"), 0.5, ("a < 1",), ()) == (
            options.layers,
            options.outlier_threshold,
            options.fail_if,
            options.require,
        )

    def test_command_rejects_excluded_options(self):
        assert "No such option" in self.complete(Annotated[CompareOptions, AllBut(("layers",))], "-l", "attn")
        assert "No such option" in self.complete(Annotated[CompareOptions, Only(("layers",))], "--device", "cpu")

    def test_command_refuses_a_word_outside_a_literal(self):
        assert "block" == self.complete(PlanOptions, "--same-in", "block").same_in
        assert "is not one of" in self.complete(PlanOptions, "--same-in", "nothing")

    def test_command_defaults_equal_the_library(self):
        assert PlanOptions() == self.complete(PlanOptions)


@pytest.mark.parametrize("name", ["baseline", "thresholds"])
def test_empty_path_of_a_gate_is_wrong_usage(name):
    with pytest.raises(UsageError, match=f"--{name}: is empty"):
        CompareOptions(**{name: ""})
