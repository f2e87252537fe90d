"""Stored reports are read strictly: anything but a complete report by quanterr is refused with the reason."""

import gzip
import json
import os
import re
import threading
from io import BytesIO
from unittest.mock import patch
from zlib import crc32

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import asdict, replace
from support.stored import original, pair, to_fp8, write

import quanterr
from quanterr.documents import checksum
from quanterr.documents.base import dumps
from quanterr.documents.checksum import check_blocks
from quanterr.documents.comparison.layer import find_sizes
from quanterr.documents.kinds import read_document
from quanterr.documents.reading import read_report
from quanterr.errors import ReportError, Status, UsageError

METRICS = ["snr_db", "zero_reference_elements", "absolute_error_percentiles.p99"]


def read_metrics(path):
    """Read a report as gates do."""
    return read_report(path, METRICS, judged=False)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    return quanterr.compare(*pair(tmp_path_factory.mktemp("reading")))


@pytest.fixture(scope="module")
def text(report):
    return report.to_json()


@pytest.fixture(scope="module")
def lacking(tmp_path_factory):
    """The text of a report with an item in each of its lists."""
    x = original() | {"gone": torch.ones(2, 2), "same": torch.ones(2, 2)}
    y = to_fp8(original()) | {"same": torch.ones(2, 2)}
    y["model.layers.0.input_layernorm.weight"] = 1.2 * y["model.layers.0.input_layernorm.weight"]
    folder = tmp_path_factory.mktemp("lacking")
    made = quanterr.compare(write(folder / "x.safetensors", x), write(folder / "y.safetensors", y), device="cpu")
    return made.to_json()


@pytest.fixture
def path(text, tmp_path):
    path = tmp_path / "report.json"
    path.write_text(text)
    return path


def test_reading_gives_the_written_report(report, path, text):
    assert text == read_report(path).to_json()


def test_layers_for_rules_have_only_the_fields_that_rules_need(report, path):
    metrics = read_metrics(path)
    row, whole = metrics.layers[0], report.layers[0]

    assert {name: getattr(whole, name) for name in row.__struct_fields__} == asdict(row)
    assert {"layer_name", "nonfinite", "snr_db", "absolute_error_percentiles"} < set(row.__struct_fields__)
    assert "nmse" not in row.__struct_fields__
    assert report.aggregate == metrics.aggregate


@pytest.mark.parametrize("indent", [None, 2])
def test_reformatted_report_reads_the_same(path, text, indent):
    before = read_metrics(path)
    path.write_text(json.dumps(json.loads(text), indent=indent))

    assert before == read_metrics(path)
    assert text == read_report(path).to_json()


def test_wrong_type_in_a_layer_is_an_error_with_its_place(report, path):
    layers = [*report.layers[:-1], replace(report.layers[-1], snr_db="thirty")]
    path.write_text(replace(report, layers=layers).to_json())

    with pytest.raises(ReportError, match=rf"layers\[{len(layers) - 1}\]\.snr_db: .*found a text"):
        read_metrics(path)


def test_lines_cut_in_other_places_are_read(report, path, text):
    before, start = read_metrics(path), text.rindex(',\n"checksum"')
    head = text[:start].replace('  {"layer_name"', '  {\n    "layer_name"')
    path.write_text(
        head + text[start:].replace(re.search("[0-9a-f]{8}", text[start:])[0], f"{crc32(head.encode()):08x}")
    )

    assert head != text[:start]
    assert before == read_metrics(path)


def test_fields_missing_from_older_reports_are_optional(path, text):
    fields = json.loads(text)
    del fields["settings"]["importance"]
    path.write_text(json.dumps(fields))

    assert read_metrics(path).settings.importance is None
    assert read_report(path).settings.importance is None


def test_report_without_bytes_of_layers_has_their_sizes(report, path, text):
    fields = json.loads(text)
    for layer in (*fields["layers"], *fields["lossless"]):
        del layer["original_bytes"], layer["quantized_bytes"]
    path.write_text(json.dumps(fields))
    older = read_report(path)

    assert {None} == {layer.quantized_bytes for layer in (*older.layers, *older.lossless)}
    for name in ("layers", "lossless"):
        new, old = (list(map(find_sizes, getattr(given, name))) for given in (report, older))
        assert new == old


def test_fields_from_a_newer_minor_version_are_ignored(path, text):
    fields = json.loads(text)
    fields["schema_version"] = "1.99"
    fields["from_the_future"] = fields["layers"][0]["from_the_future"] = {"x": 1}
    path.write_text(json.dumps(fields))

    assert fields["layers"][0]["snr_db"] == read_metrics(path).layers[0].snr_db
    assert "pass" == read_report(path).verdict


def test_checksum_covers_everything_but_the_run(report, text):
    later = replace(report, run=replace(report.run, seconds=7.0)).to_json()
    other = replace(report, complete=False).to_json()

    def checksum(written):
        return json.loads(written)["checksum"]

    assert checksum(text) == checksum(later)
    assert checksum(text) != checksum(other)


def test_newer_major_version_is_refused_even_if_unchanged(report, path):
    path.write_text(replace(report, schema_version="2.0").to_json())

    for read in (read_report, read_metrics):
        with pytest.raises(ReportError, match=r"report schema 2\.0, this version reads 1\.x"):
            read(path)


@pytest.mark.parametrize("key", ["findings", "layers", "other_changes", "lossless", "not_compared"])
@pytest.mark.parametrize("read", [read_report, read_metrics])
def test_report_that_lost_a_list_item_is_refused(lacking, tmp_path, key, read):
    fields = json.loads(lacking)
    (tmp_path / "report.json").write_text(json.dumps(fields))
    read(tmp_path / "report.json")
    n = len(fields[key])
    del fields[key][0]
    fields["aggregate"]["total_layers"] = len(fields["layers"])
    (tmp_path / "report.json").write_text(json.dumps(fields))

    with pytest.raises(ReportError, match=f"has {n - 1} of {n} in {key}: it was edited"):
        read(tmp_path / "report.json")


@pytest.mark.parametrize("read", [read_report, read_metrics])
def test_report_that_lost_all_layers_and_counts_is_refused(path, text, read):
    fields = json.loads(text)
    for key in ("layers", "other_changes", "lossless"):
        fields[key], fields["records"][key] = [], 0
    fields["aggregate"]["total_layers"] = 0
    path.write_text(json.dumps(fields))

    with pytest.raises(ReportError, match="lists no layers, but its coverage counts compared weights"):
        read(path)


def with_item(key, **item):
    """Return an edit that adds an item to one of the lists and corrects the counts."""

    def edit(fields):
        fields[key].append(item)
        if key in fields["records"]:
            fields["records"][key] += 1

    return edit


ABSENT = {"layer_name": "gone", "display_name": "gone", "side": "original", "bucket": "only_in_original"}
BROKEN = {"code": "x", "severity": "error", "layer": None, "message": "no scale", "remedy": None, "evidence": {}}
FAILED = {"id": "g", "require": "g", "layers": [], "severity": "error", "reason": None, "status": "fail", "judged": 1}
FAILED |= {"identical": 0, "skipped": 0, "observed": 1.0, "limit": 2.0, "margin": -1.0, "worst_layer": "a"}
FAILED |= {"message": "gate g does not hold", "violations": []}
CONTRADICTIONS = {
    "incomplete": (lambda fields: fields.update(complete=False), "the run was interrupted", "fail"),
    "not compared": (
        with_item("not_compared", **ABSENT, reason="has no counterpart", elements=1, bytes=2),
        "gone was not compared",
        "fail",
    ),
    "an error": (with_item("findings", **BROKEN), "no scale", "fail"),
    "a failed gate": (with_item("gates", **FAILED), "gate g does not hold", "pass"),
}


@pytest.mark.parametrize(("edit", "told", "also"), CONTRADICTIONS.values(), ids=CONTRADICTIONS.keys())
@pytest.mark.parametrize("read", [read_report, lambda path: read_report(path, METRICS)])
def test_contradicted_verdict_is_refused_and_the_right_one_is_not(path, text, read, edit, told, also):
    fields = json.loads(text)
    edit(fields)
    for verdict in ("pass", also):
        path.write_text(json.dumps(fields | {"verdict": verdict}))
        with pytest.raises(
            ReportError, match=f"its verdict is {verdict}, which its content contradicts: {told}; it was edited"
        ):
            read(path)

    assert also == read_metrics(path).verdict  # gates form their own verdict
    path.write_text(json.dumps(fields | {"verdict": "inconclusive"}))
    read(path)


def test_warning_gate_contradicts_no_verdict(path, text):
    fields = json.loads(text)
    with_item("gates", **FAILED | {"severity": "warn"})(fields)
    path.write_text(json.dumps(fields))

    assert "pass" == read_report(path).verdict


def edit_report(**changes):
    def edit(text):
        return json.dumps(json.loads(text) | changes)

    return edit


def in_layer(**changes):
    def edit(text):
        fields = json.loads(text)
        fields["layers"][0] |= changes
        return json.dumps(fields)

    return edit


def without(key):
    def edit(text):
        fields = json.loads(text)
        del fields["layers"][0][key]
        return json.dumps(fields)

    return edit


def twice(text):
    fields = json.loads(text)
    fields["lossless"].append(fields["lossless"][0])
    return json.dumps(fields)


BAD = {
    "empty": (lambda text: "", "empty file"),
    "blank": (lambda text: " \n", "empty file"),
    "not JSON": (lambda text: "<html>", "is not valid UTF-8 JSON at byte 0"),
    "truncated": (lambda text: text[:-20], "is not valid UTF-8 JSON at byte"),
    "a list": (lambda text: "[]", "not a report of quanterr"),
    "another document": (lambda text: '{"schema": "other"}', "not a report of quanterr"),
    "a newer schema": (edit_report(schema_version="2.0"), "report schema 2.0, this version reads 1.x"),
    "a newer schema in its own layout": (
        lambda text: re.sub(r'("schema_version": )"1\.\d+"', r'\1"2.0"', text),
        "report schema 2.0, this version reads 1.x",
    ),
    "an invalid version number": (edit_report(schema_version="1.garbage"), "report schema 1.garbage"),
    "no version": (edit_report(schema_version=None), "report schema None"),
    "an unknown verdict": (edit_report(verdict="fine"), "verdict: "),
    "no layers": (edit_report(layers=None), "layers: "),
    "NaN": (lambda text: text.replace('"snr_db":', '"snr_db":NaN,"x":', 1), "holds NaN; NaN is not JSON"),
    "infinity": (
        lambda text: text.replace('"mean_absolute_error":', '"mean_absolute_error":-Infinity,"x":', 1),
        "-Infinity is not JSON",
    ),
    "a text for a number": (in_layer(snr_db="31.5"), "layers[0].snr_db: expected a number or null, found a text"),
    "a truth for a number": (in_layer(snr_db=True), "layers[0].snr_db: expected a number or null, found true or false"),
    "a negative size": (in_layer(tensor_elements=-5), "layers[0].tensor_elements: expected an integer >= 0"),
    "a number for a truth": (in_layer(finite=1), "layers[0].finite: expected true or false, found an integer"),
    "a metric too few": (without("snr_db"), "layers[0].snr_db is missing"),
    "a layer too few": (lambda text: edit_report(layers=json.loads(text)["layers"][1:])(text), "has 1 layers, but"),
    "a layer twice": (twice, "occurs twice among its layers"),
    "a negative count": (in_layer(zero_reference_elements=-1), "zero_reference_elements: "),
    "two verdicts": (lambda text: text.replace("{", '{"verdict": "pass", ', 1), 'duplicate key "verdict"'),
    "a layer's key twice": (
        lambda text: text.replace('"snr_db":', '"snr_db":99.0,"snr_db":', 1),
        'duplicate key "snr_db"',
    ),
    "a key twice, once escaped": (
        lambda text: text.replace('"snr_db":', '"snr\\u005fdb" : 99.0,"snr_db":', 1),
        'duplicate key "snr_db"',
    ),
    "a key twice, after the checksum": (
        lambda text: text.rstrip()[:-1] + ', "verdict": "pass"}',
        'duplicate key "verdict"',
    ),
    "a deep nest": (lambda text: "[" * 100_000, "is nested too deep"),
    "hostile": (lambda text: edit_report(schema_version="\x1b[31m\n::error::")(text), r"\x1b[31m\x0a::error::"),
}


@pytest.mark.parametrize(("spoil", "message"), BAD.values(), ids=BAD.keys())
def test_invalid_report_is_refused_with_the_reason(path, text, spoil, message):
    path.write_text(spoil(text))

    with pytest.raises(ReportError) as caught:
        read_metrics(path)

    assert str(caught.value).startswith(str(path))
    assert message in str(caught.value)
    assert Status.UNREADABLE == caught.value.status
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(("spoil", "message"), BAD.values(), ids=BAD.keys())
def test_whole_report_is_checked_as_strictly(path, text, spoil, message):
    path.write_text(spoil(text))

    with pytest.raises(ReportError):
        read_report(path)


@pytest.mark.parametrize("number", ["1e999", "NaN"])
def test_unwritable_evidence_is_refused(path, text, number):
    fields = json.loads(text)
    finding = {"code": "x", "severity": "info", "layer": None, "message": "x", "remedy": None, "evidence": {"x": 0.125}}
    fields["findings"], fields["records"]["findings"] = [finding], 1
    path.write_text(json.dumps(fields).replace("0.125", number))

    with pytest.raises(ReportError):
        read_report(path)


def test_report_that_gzip_packed_is_read_and_a_damaged_one_is_not(path, text):
    packed = gzip.compress(text.encode())
    path.write_bytes(packed)

    assert text == read_report(path).to_json() == read_document(path).to_json()

    path.write_bytes(packed[:-9])
    with pytest.raises(ReportError, match="a damaged gzip file: "):
        read_metrics(path)


def test_report_is_packed_where_its_suffix_says_so(tmp_path, report, text):
    report.save(tmp_path / "report.json.gz")

    assert text == gzip.decompress((tmp_path / "report.json.gz").read_bytes()).decode()
    with pytest.raises(UsageError, match="unknown suffix"):
        report.save(tmp_path / "report.csv.gz")


def test_infinity_is_not_read_as_a_large_number(path, text):
    number = json.loads(text)["layers"][0]["snr_db"]
    path.write_text(text.replace(f'"snr_db":{number!r}', '"snr_db":1e999', 1))

    for read in (read_report, read_metrics):
        with pytest.raises(ReportError, match=r"layers\[0\]\.snr_db: number out of range"):
            read(path)


def test_pipe_is_read_by_the_library_and_refused_as_a_document(path, text, tmp_path):
    """Finding out which kind of document the pipe holds would take its first bytes."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ReportError, match="a pipe or a device, which cannot be read twice; save the result"):
        read_document(str(tmp_path / "pipe"))

    writer = threading.Thread(target=(tmp_path / "pipe").write_text, args=[text])
    writer.start()
    assert read_report(path) == read_report(tmp_path / "pipe")
    writer.join()


@pytest.mark.parametrize(
    ("name", "message"),
    [("gone.json", "no such file"), (".", "is a folder"), ("a\0b", "null byte"), ("a" * 300, "long")],
)
def test_unreadable_file_is_an_error(tmp_path, name, message):
    with pytest.raises(ReportError, match=message):
        read_metrics(tmp_path / name)


@given(data=st.data())
def test_report_cut_anywhere_is_refused(report, tmp_path_factory, data):
    text = report.to_json()
    path = tmp_path_factory.mktemp("cut") / "report.json"
    path.write_text(text[: data.draw(st.integers(0, len(text.rstrip()) - 1))])

    with pytest.raises(ReportError):
        read_metrics(path)


BLOCKS = st.integers(1, 20_000).map(lambda size: patch.object(checksum, "READ_BYTES", size))


@given(data=st.data())
def test_blocks_are_checked_like_the_whole(text, data):
    raw = bytearray(text.encode())
    with data.draw(BLOCKS):
        assert raw == b"".join(check_blocks(BytesIO(raw)))
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at] ^= data.draw(st.integers(0, 255))

        try:
            is_unedited = bool(list(check_blocks(BytesIO(raw))))
        except ValueError:
            is_unedited = False
    assert checksum.is_unedited(bytes(raw)) == is_unedited


@given(blocks=BLOCKS)
def test_block_size_does_not_change_the_report(lacking, tmp_path_factory, blocks):
    path = tmp_path_factory.getbasetemp() / "blocks.json"
    path.write_text(lacking)

    with blocks, patch("quanterr.documents.reading.read_json", side_effect=AssertionError("read whole")):
        assert lacking == read_report(path).to_json()


def test_layer_columns_from_earlier_versions_are_ignored(path, text, report, capsys):
    head = text[: text.rindex(',\n"checksum"')].replace(
        '"layers": [', '"layer_columns": {\n  "layer_name": ["x"],\n  "snr_db": [99.0]\n},\n"layers": ['
    )
    path.write_text(f'{head},\n"checksum": "{crc32(head.encode()):08x}",\n"run": {dumps(report.run)}\n}}\n')

    assert "layer_columns" in path.read_text()
    assert report == read_report(path)
    assert report.layers[0].snr_db == read_metrics(path).layers[0].snr_db
    assert "" == capsys.readouterr().err


def test_interrupted_report_without_layers_is_read(tmp_path):
    weight, computed = {"a.weight": torch.ones(8, 32)}, {"embeddings.position_ids": torch.arange(8).view(1, 8)}
    x, y = write(tmp_path / "x.safetensors", weight | computed), write(tmp_path / "y.safetensors", weight)
    stop = threading.Event()
    stop.set()
    made = quanterr.compare(x, y, device="cpu", stop=stop)
    (tmp_path / "report.json").write_text(made.to_json())

    assert made.coverage.original_compared_fraction > 0  # the model computes this tensor
    assert not read_report(tmp_path / "report.json").complete
