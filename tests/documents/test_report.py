"""The report as data: strict JSON that follows its schema and can be read back."""

import json

import jsonschema
import msgspec
import pytest
import torch
from support.stored import original, pair, to_fp8, write

import quanterr
from quanterr.documents.comparison.layer import METRICS, WorstRow
from quanterr.documents.comparison.model import Report
from quanterr.outputs import OUTPUTS

# Keys that users have in their scripts: they never change.
CONTRACT_AGGREGATE = [
    "total_layers",
    "total_elements",
    "mean_absolute_error",
    "median_absolute_error",
    "max_absolute_error",
    "mean_relative_error",
    "median_relative_error",
    "max_relative_error",
    "relative_error_percentiles",
    "overall_snr_db",
]
CONTRACT_LAYER = [
    "layer_name",
    "original_dtype",
    "quantized_dtype",
    "tensor_shape",
    "tensor_elements",
    "mean_absolute_error",
    "relative_error",
    "max_absolute_error",
    "max_relative_error",
    "snr_db",
    "scale_factor",
    "comfy_format",
]


def write_broken(folder):
    """Write a pair with NaN, a lost scale, a missing tensor, an unknown layout and a hostile name."""
    x = original() | {"evil\x1b[31m\n::error::.weight": torch.ones(4, 4), "gone.weight": torch.ones(2, 2)}
    y = to_fp8(x)
    del y["gone.weight"], y["gone.weight_scale"], y["model.layers.0.self_attn.q_proj.weight_scale"]
    y["model.layers.0.mlp.up_proj.weight"].view(torch.uint8)[0, 0] = 0x7F
    y["model.layers.0.input_layernorm.weight"] = y["model.layers.0.input_layernorm.weight"] * 2
    return write(folder / "x.safetensors", x), write(folder / "y.safetensors", y)


def identical(folder):
    x, _ = pair(folder)
    return x, x


def strangers(folder):
    return (
        write(folder / "x.safetensors", {"a.weight": torch.ones(2, 2)}),
        write(folder / "y.safetensors", {"b.weight": torch.ones(2, 2)}),
    )


def zeros(folder):
    """Write a pair with undefined metrics: no signal, no element, one element, a constant."""
    x = {
        "a.weight": torch.zeros(2, 2),
        "b.weight": torch.ones(0, 3),
        "c.weight": torch.ones(()),
        "d.weight": torch.ones(2, 2),
    }
    y = {
        "a.weight": torch.ones(2, 2),
        "b.weight": torch.ones(0, 3),
        "c.weight": torch.zeros(()),
        "d.weight": torch.zeros(2, 2),
    }
    return write(folder / "x.safetensors", x), write(folder / "y.safetensors", y)


@pytest.fixture(
    scope="module", params=[pair, write_broken, identical, strangers, zeros], ids=lambda make: make.__name__
)
def report(request, tmp_path_factory):
    return quanterr.compare(*request.param(tmp_path_factory.mktemp("report")))


OF_SCALES = {"attainable_snr_db", "excess_db", "off_code_pct", "clipped_pct"}  # null without nearest codes
OF_SCALES |= {"format_snr_db", "scale_loss_db", "avoidable_db"}


class TestEveryReport:
    def test_schema_descriptions_are_not_indented(self):
        schema = Report.json_schema()
        texts = [part.get("description", "") for part in (schema, *schema["$defs"].values())]

        assert any("\n" in text for text in texts)
        assert not any(line.startswith(" ") for text in texts for line in text.splitlines())

    def test_report_follows_its_schema(self, report):
        jsonschema.validate(json.loads(report.to_json()), Report.json_schema(), jsonschema.Draft202012Validator)

    @pytest.mark.parametrize("other", [{"schema": "quanterr.plan"}, {"schema_version": "2.0"}, {"schema_version": "1"}])
    def test_schema_refuses_another_kind_and_another_major_version(self, other, report):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(json.loads(report.to_json()) | other, Report.json_schema())

    def test_report_is_strict_ascii_json(self, report):
        def refuse(word):
            raise AssertionError(word)

        json.loads(report.to_json(), parse_constant=refuse)

        assert report.to_json().isascii()

    def test_report_can_be_read_back(self, report):
        assert report.to_json() == msgspec.json.decode(report.to_json(), type=Report).to_json()

    def test_every_entry_is_in_exactly_one_bucket(self, report):
        for side, coverage in (
            (report.original, report.coverage.original),
            (report.quantized, report.coverage.quantized),
        ):
            assert side.tensors == sum(size.tensors for size in coverage.values())
            assert side.bytes == sum(size.bytes for size in coverage.values())

    def test_undefined_metrics_are_named(self, report):
        optional = {
            "saturated_pct",
            "theoretical_sqnr_db",
            "weighted_nmse",
            "weighted_error_norm",
            "weighted_snr_db",
            "predicted_kld",
            "predicted_output_error",
        } | OF_SCALES
        for layer in report.layers + report.other_changes:
            null = {row.name for row in METRICS if getattr(layer, row.name) is None} - optional

            assert null == set(layer.nonfinite)

    def test_report_passes_only_without_a_reason_against_it(self, report):
        errors = [finding for finding in report.findings if finding.severity == "error"]

        assert (report.verdict == "pass") == (
            not errors and not report.not_compared and bool(report.lossless or report.layers)
        )

    def test_report_keeps_the_keys_used_in_scripts(self, report):
        fields = json.loads(report.to_json())

        assert fields["aggregate"].keys() >= set(CONTRACT_AGGREGATE)
        assert {"p50", "p75", "p90", "p95", "p99"} == fields["aggregate"]["relative_error_percentiles"].keys()
        for layer in fields["layers"]:
            assert layer.keys() >= set(CONTRACT_LAYER)
            assert layer["original_dtype"].startswith("torch.")


def test_damaged_checkpoint_is_reported_in_full(tmp_path):
    report = quanterr.compare(*write_broken(tmp_path))
    codes = {finding.code for finding in report.findings}
    buckets = {item.layer_name: item.bucket for item in report.not_compared}

    assert "inconclusive" == report.verdict
    assert {"nonfinite_quantized", "other_changes"} <= codes
    assert "error" == buckets["model.layers.0.self_attn.q_proj.weight"]
    assert "only_in_original" == buckets["gone.weight"]
    assert [r"evil\x1b[31m\x0a::error::.weight"] == [
        layer.display_name for layer in report.layers + report.lossless if "evil" in layer.layer_name
    ]


def test_pair_without_common_names_shows_the_first_from_both_sides(tmp_path):
    report = quanterr.compare(*strangers(tmp_path))

    assert "nothing matches: the original has a.weight; the quantized checkpoint b.weight" in report.reasons[0]


def test_same_file_twice_is_noticed(tmp_path):
    report = quanterr.compare(*identical(tmp_path))

    assert (0, 3) == (len(report.layers), len(report.lossless))
    assert "identical" in {finding.code for finding in report.findings}


def test_rows_have_the_same_type_when_new_and_when_read_back(tmp_path):
    report = quanterr.compare(*pair(tmp_path))
    read = msgspec.json.decode(report.to_json(), type=Report)

    assert isinstance(report.layers[0].worst_rows[0], WorstRow)
    assert report.layers == read.layers


def test_newer_minor_version_can_be_read(tmp_path):
    fields = json.loads(quanterr.compare(*pair(tmp_path)).to_json())
    fields["from_the_future"] = 1
    fields["layers"][0]["from_the_future"] = 2

    read = msgspec.convert(fields, Report)
    assert "pass" == read.verdict
    assert fields["layers"][0]["layer_name"] == read.layers[0].layer_name


def test_every_output_can_be_imported():
    assert all(callable(output.write) for output in OUTPUTS)


@pytest.mark.session
def test_layer_states_the_bytes_of_all_parts_of_both_sides(tmp_path):
    x, y = pair(tmp_path)
    name = "model.layers.0.self_attn.q_proj.weight"
    with quanterr.open_checkpoint(x) as floats, quanterr.open_checkpoint(y) as codes:
        nbytes = codes.entries[name].nbytes + codes.entries[f"{name}_scale"].nbytes
        expected = [(floats.entries[name].nbytes, nbytes), (nbytes, nbytes)]
    rows = [*quanterr.compare(x, y, device="cpu").layers, *quanterr.compare(y, y, device="cpu").lossless]

    assert expected == [(row.original_bytes, row.quantized_bytes) for row in rows if row.layer_name == name]


def test_too_many_blocks_are_not_grouped(tmp_path):
    x = {f"layers.{n}.weight": torch.ones(2, 2) for n in range(600)}
    y = {name: weight / 2 for name, weight in x.items()}
    report = quanterr.compare(write(tmp_path / "x.safetensors", x), write(tmp_path / "y.safetensors", y))

    assert {} == report.groups["block"]
    assert "many_blocks" in {finding.code for finding in report.findings}
    assert 600 == report.aggregate.total_layers
