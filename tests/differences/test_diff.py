"""Two reports are compared, and every layer in either ends up in exactly one place."""

import io
import json
import subprocess
import sys
from importlib import import_module
from math import inf
from typing import get_args, get_type_hints

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from support import sample_documents
from support.forked import call
from support.making import store
from support.reports import finding, make, row
from support.stored import pair

import quanterr
from quanterr.cli.formats import schema
from quanterr.differences.making import diff_reports as diff
from quanterr.documents.diff.base import SAME_DB
from quanterr.documents.kinds import KINDS
from quanterr.errors import Status, UsageError
from quanterr.outputs import DIFF_OUTPUTS
from quanterr.outputs.markdown import format_prose
from quanterr.outputs.sections import TERMINAL
from quanterr.outputs.terminal import make_console, show
from quanterr.views.diff.parts import format_sizes

pytestmark = pytest.mark.session

PATHS = ("old.json", "new.json")


def of(old, new, **more):
    return diff(old, new, PATHS, **more)


class TestLayers:
    def test_largest_change_comes_first(self):
        old = make({"a": 30.0, "b": 30.0, "c": 30.0, "d": 30.0, "e": 30.0})
        difference = of(old, make({"a": 29.0, "b": 20.0, "c": 30.0, "d": 31.0, "e": 33.0}))

        assert [("b", -10.0), ("a", -1.0)] == [(item.layer, item.change_db) for item in difference.worse]
        assert [("e", 3.0), ("d", 1.0)] == [(item.layer, item.change_db) for item in difference.better]
        assert 1 == difference.unchanged

    def test_rounding_on_another_device_counts_as_unchanged(self):
        difference = of(make({"a": 30.0, "b": 30.0}), make({"a": 30.0 + SAME_DB / 2, "b": 30.0 + 2 * SAME_DB}))

        assert (1, ["b"]) == (difference.unchanged, [item.layer for item in difference.better])

    def test_new_and_missing_layers_are_named(self):
        difference = of(make({"a": 30.0, "b": 30.0}), make({"b": 30.0, "c": 30.0}))

        assert (["c"], ["a"]) == (difference.added, difference.gone)

    @pytest.mark.parametrize(
        ("new", "reason"),
        [
            (make({"a": None}), "its SNR is undefined"),
            (make(missing=["a"]), "not compared: has no counterpart"),
            (make({"a": 99.0}, findings=[finding("a")]), "broken"),
            (make(rows=[row("a", 99.0, finite=False)]), "has elements that are NaN or infinite"),
            (make({"a": -inf}), "its SNR is minus infinity: the original is all zeros"),
        ],
    )
    def test_layers_that_lost_their_number_are_worse_and_come_first(self, new, reason):
        new.layers.extend(make({"b": 1.0}).layers)
        worse, better = of(make({"a": 30.0, "b": 30.0}), new), of(new, make({"a": 30.0, "b": 30.0}))

        assert [("a", reason), ("b", None)] == [(item.layer, item.reason) for item in worse.worse]
        assert ["a", "b"] == [item.layer for item in better.better]

    def test_layers_that_became_identical_are_better(self):
        same, differs = make(lossless=["a"]), make({"a": 90.0})

        assert ["is identical to the original"] == [item.reason for item in of(differs, same).better]
        assert ["was identical to the original"] == [item.reason for item in of(same, differs).worse]
        assert 1 == of(same, same).unchanged

    def test_layers_without_a_number_in_either_report_are_undefined(self):
        assert ["a"] == of(make({"a": None}), make(missing=["a"])).undefined

    def test_layers_with_another_format_are_named(self):
        difference = of(make({"a": 30.0}), make(rows=[row("a", 20.0, format="nvfp4")]))

        assert [("a", "fp8_tensor", "nvfp4")] == [
            (c.layer, c.old_format, c.new_format) for c in difference.format_changes
        ]

    def test_norms_and_biases_are_included(self):
        assert ["n"] == [item.layer for item in of(make(other={"n": 9.0}), make(other={"n": 3.0})).worse]


SIDE = st.dictionaries(st.sampled_from("abcdef"), st.sampled_from([None, 10.0, 20.0, inf, -inf, "same", "missing"]))


def from_side(side):
    return make(
        {name: snr for name, snr in side.items() if not isinstance(snr, str)},
        lossless=[name for name, snr in side.items() if snr == "same"],
        missing=[name for name, snr in side.items() if snr == "missing"],
    )


@given(SIDE, SIDE)
def test_every_layer_is_counted_once(old, new):
    difference = of(from_side(old), from_side(new))
    named = (
        [item.layer for item in difference.worse + difference.better]
        + difference.undefined
        + difference.added
        + difference.gone
    )

    assert len(named) == len(set(named))
    assert len(old.keys() | new.keys()) == len(named) + difference.unchanged
    json.dumps(difference.to_dict(), allow_nan=False)


@given(SIDE, SIDE)
def test_reversed_diff_is_the_opposite(old, new):
    change, back = of(from_side(old), from_side(new)), of(from_side(new), from_side(old))

    assert {item.layer for item in change.worse} == {item.layer for item in back.better}
    assert (change.added, change.unchanged) == (back.gone, back.unchanged)


class TestComparability:
    NEW = make({"a": 30.0})

    @pytest.mark.parametrize("change", [torch.neg, lambda weight: weight.roll(1, 0)], ids=["negated", "rolled"])
    def test_originals_with_equal_norms_but_other_values_do_not_compare(self, tmp_path, change):
        x, y = pair(tmp_path)
        tensors = load_file(x)
        name = next(name for name, weight in tensors.items() if weight.ndim == 2)
        other = store(tmp_path / "other.safetensors", tensors | {name: change(tensors[name])})
        (tmp_path / "old.json").write_text(quanterr.compare(x, y, device="cpu").to_json())
        (tmp_path / "new.json").write_text(quanterr.compare(other, other, device="cpu").to_json())

        with pytest.raises(UsageError, match=f"the original {name} has other values there than here"):
            quanterr.diff(tmp_path / "old.json", tmp_path / "new.json")

    @pytest.mark.parametrize(
        "old",
        [
            make({"a": 30.0}, original={"tensors": 9, "bytes": 300}),
            make({"a": 30.0}, selection={"patterns": ["attn"]}),
            make({"a": 30.0}, settings={"outlier_threshold": 0.5}),
            make({"a": 30.0}, settings={"metrics_version": 2}),
            make(rows=[row("a", 30.0, original_norm=2.0)]),
            make(lossless=["a"], lossless_norm=2.0),
        ],
        ids=[
            "another model",
            "another selection",
            "other settings",
            "other metrics",
            "another original of the same shapes",
            "another original, identical",
        ],
    )
    def test_unrelated_report_is_refused_unless_forced(self, old):
        with pytest.raises(UsageError, match=r"old\.json cannot be compared with new\.json: it .*--force"):
            of(old, self.NEW)

        difference = of(old, self.NEW, force=True)
        assert difference.difference
        assert difference.view(10).conclusion.startswith("not comparable: it ")

    def test_layer_that_is_no_longer_finite_does_not_change_the_original(self):
        difference = of(make(rows=[row("a", None, original_norm=0.9, finite=False)]), self.NEW)

        assert (None, ["a"]) == (difference.difference, [item.layer for item in difference.better])

    def test_report_elsewhere_is_comparable(self):
        assert of(make({"a": 30.0}), self.NEW).difference is None


def lines_of(difference, top):
    file = io.StringIO()
    show(difference.view(top), make_console(file))
    return file.getvalue().splitlines()


class TestView:
    def test_view_shows_verdicts_size_and_the_requested_number_of_layers(self):
        old = make({f"layer{n}": 30.0 for n in range(5)})
        new = make({f"layer{n}": 20.0 for n in range(5)}, quantized={"bytes": 75}, verdict="fail")
        view = of(old, new).view(top=2)
        totals, worse = (part for section in view.sections if TERMINAL in section.media for part in section.parts)

        assert "5 layers worse, 0 better; 28.50 -> 28.50 dB over all; 150 B -> 75 B (-50.00 %); pass -> fail" == (
            view.conclusion
        )
        assert [
            ["old", "pass", "5", "28.50", "0.50", "0.5", "150 B"],
            ["new", "fail", "5", "28.50", "0.50", "0.5", "75 B"],
        ] == totals.rows
        assert [["layer0", "30.00", "20.00", "-10"], ["layer1", "30.00", "20.00", "-10"]] == worse.rows
        assert 3 == worse.more

    def test_small_change_is_never_shown_as_zero(self):
        shown = "\n".join(lines_of(of(make({"a": 30.0}), make({"a": 30.0 - 2e-6})), 1))

        assert "-2e-06" in shown

    def test_layers_that_became_identical_come_last(self):
        difference = of(make({"a": 30.0, "b": 30.0}), make({"b": 31.0}, lossless=["a"]))

        assert ["b", "a"] == [item.layer for item in difference.better]

    def test_view_escapes_names_for_terminal_and_ci(self):
        names = ["::error::x", "a\x1b[31m\nb", "\u202ex", "c"]
        old = make(dict.fromkeys(names[:3], 30.0) | {"gone\x07": 1.0})
        lines = lines_of(of(old, make(dict.fromkeys(names, 20.0))), 10)

        assert all(line.isprintable() for line in lines)
        assert not [line for line in lines if line.lstrip().startswith("::")]

    @pytest.mark.parametrize("document_kind", ["report", *sample_documents.KINDS_WITH_SAMPLES])
    def test_every_output_states_the_changes(self, document_kind):
        difference = getattr(sample_documents, f"{document_kind}_diff")()
        outputs = {output.name: io.StringIO() for output in DIFF_OUTPUTS}
        for output in DIFF_OUTPUTS:
            output.write(difference, outputs[output.name])
        fields = json.loads(outputs["json"].getvalue())
        changed = fields if document_kind == "report" else fields["candidates"][0]
        layer = (changed["worse"] + changed["better"])[0]["layer"]

        assert f"quanterr.{document_kind}_diff".replace("report_", "") == fields["schema"]
        for name in ("csv", "html", "md"):
            assert layer in outputs[name].getvalue().replace("<wbr>", ""), name
        assert format_prose(difference.view(0).conclusion) in outputs["md"].getvalue()


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    folder = tmp_path_factory.mktemp("diff")
    old, new = folder / "old.json", folder / "new.json"
    text = quanterr.compare(*pair(folder)).to_json()
    fields = json.loads(text)
    fields["layers"][0]["snr_db"] -= 3
    fields["layers"][1]["layer_name"] = "##[error]new"
    old.write_text(text)
    new.write_text(json.dumps(fields))
    return old, new


class TestCommand:
    def test_command_shows_the_changes_and_exits_with_0(self, reports):
        done = call("diff", "-v", *reports)

        assert Status.OK == done.returncode
        assert "\n1 layer worse\n" in done.stdout
        assert "\\x23#[error]new" in done.stdout
        assert "##[" not in done.stdout

    def test_command_names_the_edited_report(self, reports):
        lines = call("diff", *reports).stderr.splitlines()

        assert [f"quanterr: warning: {reports[1]}: its checksum does not match: it was edited"] == lines

    def test_command_writes_everything_as_json(self, reports):
        fields = json.loads(call("diff", *reports, "--json", "--top-layers", "0").stdout)

        assert ("quanterr.diff", "1.1") == (fields["schema"], fields["schema_version"])
        assert -3 == pytest.approx(fields["worse"][0]["change_db"])
        assert ["##[error]new"] == fields["added"]

    def test_closed_pipe_and_full_disk_have_different_statuses(self, reports):
        words = " ".join(map(str, reports))
        script = f"{sys.executable} -m quanterr diff {words} --json"
        pipe = subprocess.run(["bash", "-c", f"{script} | true; exit ${{PIPESTATUS[0]}}"], capture_output=True)
        full = subprocess.run(["bash", "-c", f"{script} > /dev/full"], capture_output=True, text=True)

        assert pipe.returncode in (Status.OK, Status.BROKEN_PIPE)
        assert Status.ENVIRONMENT == full.returncode
        assert "standard output: No space left" in full.stderr

    def test_incomparable_reports_exit_with_2_and_unreadable_ones_with_3(self, reports, tmp_path):
        fields = json.loads(reports[0].read_text())
        fields["original"]["bytes"] += 1
        other = tmp_path / "other.json"
        other.write_text(json.dumps(fields))

        assert Status.USAGE == call("diff", other, reports[1]).returncode
        assert Status.OK == call("diff", other, reports[1], "--force").returncode
        assert Status.UNREADABLE == call("diff", reports[0], __file__).returncode
        other.write_text(json.dumps(json.loads(reports[0].read_text()) | {"complete": False}))
        assert Status.UNREADABLE == call("diff", reports[0], other).returncode
        assert Status.USAGE == call("diff", reports[0]).returncode


def test_negligible_size_change_has_no_minus_sign():
    assert "97.66 KiB -> 97.66 KiB (+0.00 %)" == format_sizes(100_001, 100_000)
    assert "100.00 KiB -> 75.00 KiB (-25.00 %)" == format_sizes(102_400, 76_800)


def test_every_kind_of_document_has_a_schema_and_a_row_of_changes():
    kinds = [
        *(document_kind.name.lower() for document_kind in KINDS.values()),
        "origin",
    ]  # a statement, which has no diffs

    assert kinds == list(get_args(get_args(get_type_hints(schema, include_extras=True)["kind"])[0]))
    for name, document_kind in KINDS.items():
        assert f"quanterr.{document_kind.name.lower()}" == name
        if document_kind.name != "Report":  # whose diffs are another kind of document
            assert document_kind.values.CHANGES.item in document_kind.values.VOCABULARY.items.values()
            assert import_module(f"quanterr.views.{document_kind.name.lower()}.view").ITEM_WORDS.columns
