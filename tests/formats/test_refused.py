"""Known but unsupported layouts have a name, and never pass."""

import pytest
import torch
from support.making import open_pairing, store

import quanterr
from quanterr.formats.shared.unsupported import REFUSALS, SETTINGS


def files(folder, stored, config=None):
    """Write an original, and a quantized checkpoint that holds one of its weights in this layout."""
    values = {"a.weight": torch.ones(4, 32), "b.weight": torch.ones(2, 32)}
    original = store(folder / "original.safetensors", values)
    quantized = {**stored, "b.weight": torch.ones(2, 32)}
    if config is None:
        return original, store(folder / "quantized.safetensors", quantized)
    return original, store(folder / "quantized", quantized, config={"quantization_config": config})


def reason(folder, stored, config=None):
    """Return why the original's weight is not compared."""
    with open_pairing(*files(folder, stored, config)) as plan:
        assert [pair.name for pair in plan.pairs] == ["b.weight"]
        return next(left.reason for left in plan.leftovers if left.side == "original")


def store_as(row, nonzero=1):
    """Return tensors with the names of an unsupported layout."""
    stored = {}
    for name in row.stored:
        codes = torch.zeros(4, 16, dtype=torch.uint8 if name == "qweight" else torch.int32)
        stored[f"a.{name}"] = codes
    if "SCB" in row.stored:
        stored["a.weight"] = torch.zeros(4, 32, dtype=torch.int8)
        stored["a.SCB"] = torch.ones(4)
        stored["a.weight_format"] = torch.tensor(nonzero, dtype=torch.uint8)
    if "dqweight" in row.stored:
        stored["a.dqweight"] = torch.ones(4, 32)
    return stored


class TestUnsupportedLayouts:
    @pytest.mark.parametrize("row", [row for row in REFUSALS if row.stored], ids=lambda row: row.name)
    def test_known_but_unread_layouts_are_named_by_their_tensors(self, tmp_path, row):
        report = quanterr.compare(*files(tmp_path, store_as(row)), device="cpu")
        reasons = {item.layer_name: item.reason for item in report.not_compared}

        assert reasons["a.weight"].startswith(f"stored as {row.name}, which is not supported: ")
        assert report.verdict == "inconclusive"
        (message,) = [message.message for message in report.findings if message.code == "identical"]
        assert message.startswith(
            "nothing that is quantized was compared: 1 weight could not be read, and all that was"
        )

    @pytest.mark.parametrize("row", [row for row in REFUSALS if row.called], ids=lambda row: row.name)
    @pytest.mark.parametrize("key", SETTINGS)
    def test_known_but_unread_layouts_are_named_by_config_json(self, tmp_path, row, key):
        stored = {"a.qweight": torch.zeros(4, 16, dtype=torch.int8), "a.unheard_of": torch.ones(4)}
        config = {key: next(iter(row.called)).upper()}

        assert reason(tmp_path, stored, config).startswith(f"stored as {row.name}, which is not")

    def test_tensor_names_take_precedence_over_config_json(self, tmp_path):
        row = next(row for row in REFUSALS if row.name == "QTIP")

        assert reason(tmp_path, store_as(row), {"quant_method": "higgs"}).startswith("stored as QTIP")

    def test_readable_layout_is_not_called_unread(self, tmp_path):
        stored = {"a.weight": torch.ones(4, 32, dtype=torch.int8), "a.weight_scale": torch.tensor(1.0)}
        with open_pairing(*files(tmp_path, stored, {"quant_method": "higgs"})) as plan:
            assert {"a.weight": "int8_tensor", "b.weight": "dense"} == {p.name: p.quantized.format for p in plan.pairs}

    def test_missing_weight_is_not_called_unread(self, tmp_path):
        stored = {"c.qweight": torch.zeros(4, 16, dtype=torch.int8)}

        assert (
            reason(tmp_path, stored, {"quant_method": "higgs"}) == "the quantized checkpoint has no tensor of this name"
        )

    def test_plain_bitsandbytes_rows_are_not_called_unread(self, tmp_path):
        row = next(row for row in REFUSALS if row.nonzero)
        with open_pairing(*files(tmp_path, store_as(row, 0))) as plan:
            reasons = [left.reason for left in plan.leftovers]

        assert not any("in tiles" in reason for reason in reasons)

    def test_every_refusal_proposes_a_remedy(self):
        assert all("compare" in row.reason or "save it again" in row.reason for row in REFUSALS)
