"""The stages of a comparison, and the tensors that each stage reads."""

import torch
from support import stored

import quanterr
from quanterr.comparison.assembly import ReportBuilder


def test_no_file_is_read_while_the_report_is_assembled(tmp_path, monkeypatch):
    x = stored.original()
    y = stored.to_fp8(x)
    y["model.layers.0.mlp.up_proj.weight_scale"] *= 2  # weights are read again to find this factor,
    y["model.layers.0.input_layernorm.weight"] = x["model.layers.0.input_layernorm.weight"].roll(1)  # this order
    y["model.layers.0.self_attn.q_proj.input_scale"] = torch.tensor(-1.0)  # and this sign
    paths = stored.write(tmp_path / "x.safetensors", x), stored.write(tmp_path / "y.safetensors", y)
    make_report = ReportBuilder.report

    def close_first(self, original, quantized, *others):
        for checkpoint in (original, quantized):
            checkpoint.close()
        return make_report(self, original, quantized, *others)

    monkeypatch.setattr(ReportBuilder, "report", close_first)
    codes = {finding.code for finding in quanterr.compare(*paths, device="cpu").findings}

    assert {"scale_factor", "scale_negative"} <= codes
