import json
from typing import NamedTuple

import pytest
import torch
from support.making import fp8_codes, header, label, numbers, store

from quanterr.checkpoints import open_checkpoint
from quanterr.checkpoints.labels import PREFIXES, read_labels
from quanterr.errors import CheckpointError, Status

TENSOR, HEADER = "comfy_quant tensor", "header"


class Said(NamedTuple):
    """What the parsed labels of a layer say about its format, groups and rotation."""

    source: str
    format: str | None
    block: tuple[int, int] | None = None
    rotated: bool = False


def said_by(labels):
    return tuple(Said(label.source, label.format, label.block, label.rotated) for label in labels)


def labels_of(folder, tensors=None, metadata=None, config=None):
    """Return the labels of a checkpoint with a weight ``a.weight`` and these additional tensors."""
    path = folder / ("model" if config is not None else "file.safetensors")
    with open_checkpoint(store(path, {"a.weight": numbers(2, 8)} | (tensors or {}), metadata, config)) as checkpoint:
        return read_labels(checkpoint)


class TestTensor:
    @pytest.mark.parametrize(
        ("fields", "expected"),
        [
            ({"format": "float8_e4m3fn"}, Said(TENSOR, "float8_e4m3fn")),
            ({"format": "int8_blockwise", "group_size": 128}, Said(TENSOR, "int8_blockwise", (128, 128))),
            (
                {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 256},
                Said(TENSOR, "int8_tensorwise", rotated=True),
            ),
            ({"format": "int8_tensorwise", "convrot": False}, Said(TENSOR, "int8_tensorwise")),
            ({"convrot": True, "per_row": True}, Said(TENSOR, None, rotated=True)),
            ({}, Said(TENSOR, None)),
            ({"format": 7}, Said(TENSOR, None)),
            ({"format": "x", "group_size": 0}, Said(TENSOR, "x")),
            ({"format": "x", "group_size": -64}, Said(TENSOR, "x")),
            ({"format": "x", "group_size": True}, Said(TENSOR, "x")),
            ({"format": "x", "group_size": 64.0}, Said(TENSOR, "x")),
            ({"format": "x", "group_size": "64"}, Said(TENSOR, "x")),
            ({"params": {"format": "x", "group_size": 64}}, Said(TENSOR, "x", (64, 64))),
            ({"format": "x", "params": {"group_size": 64, "convrot": True}}, Said(TENSOR, "x", (64, 64), True)),
            ({"format": "x", "params": {"format": "y"}}, Said(TENSOR, "x")),
            ({"format": "x", "group_size": 32, "params": {"group_size": 64}}, Said(TENSOR, "x", (32, 32))),
            ({"format": "x", "params": None}, Said(TENSOR, "x")),
            ({"format": "x", "full_precision_matrix_mult": True, "orig_shape": [2, 8]}, Said(TENSOR, "x")),
        ],
        ids=str,
    )
    def test_label_tensor_is_read(self, tmp_path, fields, expected):
        labels = labels_of(tmp_path, {"a.comfy_quant": label(**fields)})

        assert (expected,) == said_by(labels.of("a.weight"))
        assert {"a.comfy_quant"} == labels.consumed

    def test_label_applies_to_its_own_layer_only(self, tmp_path):
        labels = labels_of(tmp_path, {"ab.weight": numbers(2, 8), "a.comfy_quant": label(format="x")})

        assert labels.of("ab.weight") == ()

    def test_label_without_a_layer_is_consumed(self, tmp_path):
        labels = labels_of(tmp_path, {"b.comfy_quant": label(format="x")})

        assert {"b.comfy_quant"} == labels.consumed
        assert labels.of("a.weight") == ()

    @pytest.mark.parametrize(
        ("tensor", "says"),
        [
            (b"", "not valid UTF-8 JSON at byte 0"),
            (b"{", "not valid UTF-8 JSON at byte 1"),
            (b"\xff\xfe", "not valid UTF-8 JSON at byte 0"),
            (b"[1, 2]", "label is not a JSON object"),
            (b'"x"', "label is not a JSON object"),
            (b"null", "label is not a JSON object"),
            (b'{"format": "x", "format": "y"}', 'duplicate key "format"'),
            (b'{"group_size": NaN}', "NaN is not JSON"),
            (b'{"format": "x"}\x00\x00', "not valid UTF-8 JSON at byte 15"),
            (b"[" * 60_000, "nested too deep"),
            (
                b'{"format": "' + b"x" * (1 << 16) + b'"}',
                "a.comfy_quant (U8 [65550]): a .comfy_quant label must be a short row",
            ),
        ],
        ids=lambda value: None if isinstance(value, str) else repr(value[:30]),
    )
    def test_damaged_label_tensor_is_an_error(self, tmp_path, tensor, says):
        raw = torch.tensor(list(tensor), dtype=torch.uint8)
        with pytest.raises(CheckpointError) as raised:
            labels_of(tmp_path, {"a.comfy_quant": raw})

        assert says in str(raised.value)
        assert "file.safetensors: a.comfy_quant" in str(raised.value)
        assert Status.UNREADABLE == raised.value.status

    @pytest.mark.parametrize(
        "tensor",
        [
            label(format="x").to(torch.int32),
            label(format="x").view(torch.int8),
            label(format="x")[None],
            torch.tensor(123, dtype=torch.uint8),
        ],
        ids=["I32", "I8", "2-D", "0-D"],
    )
    def test_label_tensor_with_another_dtype_or_shape_is_an_error(self, tmp_path, tensor):
        with pytest.raises(CheckpointError, match=r"a \.comfy_quant label must be a short row of U8"):
            labels_of(tmp_path, {"a.comfy_quant": tensor})


class TestHeader:
    def test_header_label_is_read(self, tmp_path):
        metadata = header({"a": {"format": "int8_blockwise", "group_size": 64}})
        labels = labels_of(tmp_path, metadata=metadata)

        assert (Said(HEADER, "int8_blockwise", (64, 64)),) == said_by(labels.of("a.weight"))
        assert labels.orphans == ()
        assert labels.consumed == frozenset()

    def test_header_is_less_trustworthy_than_the_tensor(self, tmp_path):
        metadata = header({"a": {"format": "int8_blockwise", "group_size": 1}})
        labels = labels_of(tmp_path, {"a.comfy_quant": label(format="int8_tensorwise", convrot=True)}, metadata)
        expected = Said(TENSOR, "int8_tensorwise", rotated=True), Said(HEADER, "int8_blockwise", (1, 1))

        assert expected == said_by(labels.of("a.weight"))

    def test_header_nests_the_same_keys_as_the_tensor(self, tmp_path):
        labels = labels_of(tmp_path, metadata=header({"a": {"format": "x", "params": {"group_size": 64}}}))

        assert (Said(HEADER, "x", (64, 64)),) == said_by(labels.of("a.weight"))

    @pytest.mark.parametrize("prefix", PREFIXES)
    def test_header_may_leave_out_the_file_prefix(self, tmp_path, prefix):
        tensors = {f"{prefix}b.weight": fp8_codes(2, 8)}
        labels = labels_of(tmp_path, tensors, header({"b": {"format": "float8_e4m3fn"}}))

        assert (Said(HEADER, "float8_e4m3fn"),) == said_by(labels.of(f"{prefix}b.weight"))
        assert labels.orphans == ()

    @pytest.mark.parametrize("prefix", PREFIXES)
    def test_header_may_have_a_prefix_missing_from_the_file(self, tmp_path, prefix):
        labels = labels_of(tmp_path, metadata=header({f"{prefix}a": {"format": "float8_e4m3fn"}}))

        assert (Said(HEADER, "float8_e4m3fn"),) == said_by(labels.of("a.weight"))

    def test_header_names_match_full_names_first(self, tmp_path):
        tensors = {"model.a.weight": fp8_codes(2, 8)}
        labels = labels_of(tmp_path, tensors, header({"a": {"format": "x"}, "model.a": {"format": "y"}}))

        assert (Said(HEADER, "x"),) == said_by(labels.of("a.weight"))
        assert (Said(HEADER, "y"),) == said_by(labels.of("model.a.weight"))

    def test_header_label_without_a_stored_layer_is_noted(self, tmp_path):
        labels = labels_of(tmp_path, metadata=header({"a": {"format": "x"}, "gone": {"format": "x"}}))

        assert labels.orphans == ("gone",)

    @pytest.mark.parametrize("entry_value", [None, "x", 3, ["x"]])
    def test_header_entry_that_is_not_an_object_is_skipped(self, tmp_path, entry_value):
        labels = labels_of(tmp_path, metadata=header({"a": entry_value}))

        assert labels.of("a.weight") == ()

    @pytest.mark.parametrize(
        ("raw", "says"),
        [
            ("{", "not valid UTF-8 JSON at byte 1"),
            ("", "not valid UTF-8 JSON at byte 0"),
            ("{}", '_quantization_metadata in the header has no "layers"'),
            ("[]", '_quantization_metadata in the header has no "layers"'),
            ('{"layers": []}', '_quantization_metadata in the header has no "layers"'),
            ('{"layers": {}, "layers": {}}', 'duplicate key "layers"'),
        ],
    )
    def test_damaged_header_is_an_error(self, tmp_path, raw, says):
        with pytest.raises(CheckpointError) as raised:
            labels_of(tmp_path, metadata={"_quantization_metadata": raw})

        assert says in str(raised.value)
        assert "file.safetensors: _quantization_metadata in the header" in str(raised.value)

    def test_header_without_the_key_holds_no_label(self, tmp_path):
        labels = labels_of(tmp_path, metadata={"format": "pt", "quantization": "{"})

        assert labels.by_module == {}


class TestMarker:
    @pytest.mark.parametrize("name", ["scaled_fp8", "model.diffusion_model.scaled_fp8", "text_encoders.t5.scaled_fp8"])
    @pytest.mark.parametrize("n", [0, 1, 2])
    @pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float32])
    def test_marker_is_found_under_any_prefix_and_never_read(self, tmp_path, name, n, dtype):
        marker = torch.full((n,), torch.nan).to(dtype)
        labels = labels_of(tmp_path, {name: marker})

        assert name == labels.marker
        assert {name} == labels.consumed

    @pytest.mark.parametrize("name", ["not_scaled_fp8", "scaled_fp8.weight", "a.scaled_fp8_weight"])
    def test_similar_name_is_not_a_marker(self, tmp_path, name):
        labels = labels_of(tmp_path, {name: torch.zeros(1)})

        assert labels.marker is None
        assert labels.consumed == frozenset()


def quantization(**fields):
    return {"quantization_config": fields}


def group(structure):
    return {"weights": {"num_bits": 8, "block_structure": structure}}


class TestConfig:
    @pytest.mark.parametrize(
        ("config", "block", "method"),
        [
            ({}, None, None),
            (quantization(quant_method="fp8"), None, "fp8"),
            (quantization(quant_method="fp8", weight_block_size=[128, 64]), (128, 64), "fp8"),
            ({"compression_config": {"quant_method": "compressed-tensors"}}, None, "compressed-tensors"),
            ({"quantization": {"group_size": 64, "bits": 4}}, None, None),
            ({"text_config": quantization(quant_method="fp8", weight_block_size=[1, 128])}, (1, 128), "fp8"),
            ({"llm_config": quantization(quant_method="fp8", weight_block_size=[1, 128])}, (1, 128), "fp8"),
            (
                quantization(quant_method="fp8") | {"text_config": quantization(weight_block_size=[1, 2])},
                None,
                "fp8",
            ),
            (quantization(quant_algo="FP8"), None, "FP8"),
            (quantization(config_groups={"group_0": group([128, 128])}), (128, 128), None),
            (quantization(config_groups={"group_0": group("128x64")}), (128, 64), None),
            (quantization(config_groups={"a": group([128, 128]), "b": group(None)}), (128, 128), None),
            (quantization(config_groups={"a": group([128, 128]), "b": group([64, 64])}), None, None),
            (quantization(config_groups={"a": group([128, 128]), "b": group([128, 128])}), (128, 128), None),
            (quantization(weight_block_size=[128]), None, None),
            (quantization(weight_block_size=[128, 0]), None, None),
            (quantization(weight_block_size=[128, -1]), None, None),
            (quantization(weight_block_size=[128.0, 128.0]), None, None),
            (quantization(weight_block_size=128), None, None),
            (quantization(weight_block_size="128"), None, None),
            (quantization(config_groups=[group([128, 128])]), None, None),
            (quantization(config_groups={"a": None, "b": {"weights": None}}), None, None),
            ({"quantization_config": "fp8"}, None, None),
            ({"quantization_config": None, "text_config": None}, None, None),
            (quantization(quant_method=["fp8"]), None, None),
        ],
        ids=json.dumps,
    )
    def test_config_gives_block_and_method(self, tmp_path, config, block, method):
        labels = labels_of(tmp_path, config=config)

        assert (block, method) == (labels.block, labels.method)

    @pytest.mark.parametrize(("semantics", "expected"), [("inverse", True), ("scale", False), (None, False)])
    def test_config_decides_whether_scales_divide(self, tmp_path, semantics, expected):
        labels = labels_of(tmp_path, config=quantization(quant_method="fp8", weight_scale_semantics=semantics))

        assert expected is labels.divides

    def test_config_may_come_from_modelopt(self, tmp_path):
        folder = store(tmp_path / "model", {"a.weight": numbers(2, 8)}, config={})
        config = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
        (folder / "hf_quant_config.json").write_text(json.dumps(config))
        with open_checkpoint(folder) as checkpoint:
            labels = read_labels(checkpoint)

        assert labels.method == "FP8"

    @pytest.mark.parametrize("text", ["", "{", "[]", "null", '"fp8"', "\xff"])
    def test_unreadable_config_gives_nothing(self, tmp_path, text):
        folder = store(tmp_path / "model", {"a.weight": numbers(2, 8)}, config={})
        (folder / "config.json").write_bytes(text.encode("latin-1"))
        with open_checkpoint(folder) as checkpoint:
            labels = read_labels(checkpoint)

        assert (None, None, False) == (labels.block, labels.method, labels.divides)
