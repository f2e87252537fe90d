"""A checkpoint's declarations about its model, compared with its tensors."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.gguf_stored import Stored, architecture, key, write_gguf
from support.making import numbers, quantized_fp8, store

import quanterr
from quanterr.checkpoints import open_checkpoint
from quanterr.checkpoints.base import Unread

GOLDEN = Path(__file__).parents[1] / "golden"
UINT32 = 4  # type of a GGUF key
NAMES = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")
CONFIG = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
TIED = CONFIG | {"tie_word_embeddings": True}


def model():
    x = {f"model.layers.{n}.{name}.weight": numbers(64, 64, seed=n).float() for n in range(2) for name in NAMES}
    return x | {"model.embed_tokens.weight": numbers(32, 64, seed=9).float()}


def code(x, but=()):
    tensors = {}
    for name, weight in x.items():
        if "embed" in name or name in but:
            tensors[name] = weight
            continue
        unit = weight.abs().amax(1, keepdim=True) / 127
        tensors |= {name: (weight / unit).round().to(torch.int8), f"{name}_scale": unit}
    return tensors


def coded_by_tensor(x):
    tensors = {}
    for name, weight in x.items():
        tensors[name], tensors[f"{name}_scale"] = quantized_fp8(weight)
    return tensors


def report_of(folder, y, config=None, x=None):
    (folder / "x").mkdir(exist_ok=True)
    (folder / "y").mkdir(exist_ok=True)
    save_file(x or model(), folder / "x/model.safetensors")
    save_file(y, folder / "y/model.safetensors")
    if config is not None:
        (folder / "y/config.json").write_text(json.dumps(config))
    return quanterr.compare(folder / "x", folder / "y", device="cpu")


def mismatches(report):
    return [finding.message for finding in report.findings if finding.code == "config_mismatch"]


def map_findings(report):
    return {finding.code: finding for finding in report.findings}


def test_matching_config_is_silent(tmp_path):
    assert [] == mismatches(report_of(tmp_path, code(model()), CONFIG))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_hidden_layers": 3}, "config.json declares 3 blocks, but the tensors belong to 2"),
        ({"num_hidden_layers": 1}, "config.json declares 1 block, but the tensors belong to 2"),
        ({"hidden_size": 128}, "config.json declares a width of 128, but model.embed_tokens.weight has 64"),
        ({"num_attention_heads": 5}, "config.json declares 5 heads (num_attention_heads), which do not divide"),
        ({"text_config": {"num_hidden_layers": 4}}, "config.json declares 4 blocks, but the tensors belong to 2"),
    ],
)
def test_mismatched_sizes_are_reported(tmp_path, changed, message):
    (finding,) = mismatches(report_of(tmp_path, code(model()), CONFIG | changed))

    assert finding.startswith(message)


def test_multi_token_prediction_blocks_may_follow(tmp_path):
    config = CONFIG | {"num_hidden_layers": 1, "num_nextn_predict_layers": 1}

    assert [] == mismatches(report_of(tmp_path, code(model()), config))


@pytest.mark.parametrize(
    ("method", "key", "entry"),
    [
        ("compressed-tensors", "ignore", "model.layers.1.mlp.up_proj"),
        ("compressed-tensors", "ignore", "re:.*layers.1.*up_proj"),
        ("fp8", "modules_to_not_convert", "up_proj"),
        ("modelopt", "exclude_modules", "*.up_proj"),
    ],
)
def test_quantized_layer_that_config_excludes_is_reported(tmp_path, method, key, entry):
    config = CONFIG | {"quantization_config": {"quant_method": method, key: [entry]}}
    (mismatch,) = [
        finding for finding in mismatches(report_of(tmp_path, code(model()), config)) if "excludes" in finding
    ]

    assert f"from quantization ({key}: {entry}), but codes are stored: " in mismatch
    assert "model.layers.1.mlp.up_proj.weight" in mismatch


@pytest.mark.parametrize(("ignored", "n"), [([], 1), (["model.layers.1.mlp.down_proj"], 0), (["re:["], 1)])
def test_unquantized_layer_that_config_includes_is_reported(tmp_path, ignored, n):
    config = CONFIG | {"quantization_config": {"quant_method": "fp8", "modules_to_not_convert": ignored}}
    findings = mismatches(report_of(tmp_path, code(model(), ["model.layers.1.mlp.down_proj.weight"]), config))

    assert n == sum(
        "does not exclude model.layers.1.mlp.down_proj.weight, which is stored" in finding for finding in findings
    )


@pytest.mark.parametrize(("by_name", "n"), [({"model.layers.1.mlp.down_proj": None}, 0), ({}, 1)])
def test_torchao_excludes_layers_by_null(tmp_path, by_name, n):
    every = {"_default": {"_type": "IntxWeightOnlyConfig"}}
    kinds = {"default": {"_type": "FqnToConfig", "_data": {"fqn_to_config": every | by_name}}}
    config = CONFIG | {"quantization_config": {"quant_method": "torchao", "quant_type": kinds}}
    findings = mismatches(report_of(tmp_path, code(model(), ["model.layers.1.mlp.down_proj.weight"]), config))

    assert n == sum(
        "does not exclude model.layers.1.mlp.down_proj.weight, which is stored" in finding for finding in findings
    )


@pytest.mark.parametrize(("method", "n"), [("bitsandbytes", 0), ("sdnq", 0), ("torchao", 0), ("fp8", 1)])
@pytest.mark.parametrize("are_left", [True, False], ids=["all experts", "one expert"])
def test_experts_are_no_linear_modules_unless_one_is_quantized(tmp_path, method, n, are_left):
    """Of the stacks that transformers 5 makes of experts, programs that replace Linear modules quantize nothing."""
    x = model() | {f"model.layers.0.mlp.experts.{k}.up_proj.weight": numbers(64, 64, seed=k).float() for k in range(3)}
    config = CONFIG | {"quantization_config": {"quant_method": method, "modules_to_not_convert": ["lm_head"]}}
    left = [name for name in x if ".experts." in name][: None if are_left else 1]
    findings = mismatches(report_of(tmp_path, code(x, left), config, x))

    assert (n if are_left else 1) == sum("does not exclude model.layers.0.mlp.experts.0" in text for text in findings)


@pytest.mark.parametrize(("tied", "n"), [(True, 1), (False, 0)])
def test_quantized_head_with_a_tied_embedding_is_reported(tmp_path, tied, n):
    x = model() | {"lm_head.weight": numbers(32, 64, seed=8).float()}
    findings = mismatches(report_of(tmp_path, code(x), CONFIG | {"tie_word_embeddings": tied}, x))

    assert n == sum(
        "tie_word_embeddings, but lm_head.weight is quantized separately" in finding for finding in findings
    )


class TestTiedHead:
    """An output layer that loaders drop, since config.json ties it to the embedding."""

    HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"

    def compare(self, path, x, y):
        path.mkdir(exist_ok=True)
        return quanterr.compare(store(path / "x", x, config=TIED), store(path / "y", y, config=TIED), device="cpu")

    def quantize(self, x, but=()):
        weights = {name.replace("embed", "?"): weight for name, weight in x.items() if name not in but}
        tensors = {name.replace("?", "embed"): tensor for name, tensor in code(weights).items()}
        return tensors | {name: x[name] for name in but}

    @pytest.mark.parametrize(("but", "how"), [([], "quantized"), ([HEAD], "stored")])
    @pytest.mark.parametrize("is_stored", [True, False], ids=["stored twice", "stored once"])
    def test_head_that_loaders_drop_does_not_count(self, tmp_path, but, how, is_stored):
        x = model()
        head = {self.HEAD: x[self.EMBEDDING].clone()}
        expected = self.compare(tmp_path / "without", x, self.quantize(x))
        report = self.compare(tmp_path / "with", x | (head if is_stored else {}), self.quantize(x | head, but))
        (message,) = [finding for finding in mismatches(report) if "tie_word_embeddings" in finding]

        assert f"lm_head.weight is {how} separately: loaders use the embedding instead" in message
        assert [layer.layer_name for layer in expected.layers] == [layer.layer_name for layer in report.layers]
        assert expected.aggregate == report.aggregate
        assert expected.verdict == report.verdict

    def test_copy_of_an_unquantized_embedding_is_compared(self, tmp_path):
        x = model()
        x[self.HEAD] = x[self.EMBEDDING].clone()
        report = self.compare(tmp_path, x, self.quantize(x, [self.HEAD, self.EMBEDDING]))

        assert self.HEAD in {layer.layer_name for layer in report.lossless}
        assert [] == [finding for finding in mismatches(report) if "tie_word_embeddings" in finding]


def of_golden(folder, case, quantization_config):
    """Compare a golden folder that has another configuration with its expected values."""
    shutil.copytree(GOLDEN / case, folder / "y")
    for path in (folder / "y").glob("*config.json"):
        path.unlink()
    (folder / "y/config.json").write_text(json.dumps({"quantization_config": quantization_config}))
    return quanterr.compare(f"{GOLDEN / case}.expected.safetensors", folder / "y", device="cpu")


@pytest.mark.parametrize(("version", "n"), [("GEMM", 0), ("gemv", 1), ("0.14.0", 0)])
def test_declared_awq_layout_must_match(tmp_path, version, n):
    findings = mismatches(of_golden(tmp_path, "awq_gemm/awq_gemm_g128", {"quant_method": "awq", "version": version}))

    assert n == sum("declares awq_gemv, but" in finding for finding in findings)


@pytest.mark.parametrize(
    ("case", "sym", "told"),
    [("w4_g32_asym_gptqmodel", True, True), ("w4_g32_asym_gptqmodel", False, False), ("w2_g64_sym", True, False)],
)
def test_undeclared_zero_points_are_reported(tmp_path, case, sym, told):
    report = of_golden(tmp_path, f"gptq/gptq_v1_{case}", {"quant_method": "gptq", "sym": sym})

    assert told == any(
        "config.json declares sym, but its zero points" in finding.message for finding in report.findings
    )


def test_mismatched_gguf_metadata_is_reported(tmp_path):
    x = {"blk.0.attn_q.weight": numbers(64, 64, seed=1).float(), "token_embd.weight": numbers(32, 64, seed=2).float()}
    tensors = [Stored(name, "F16", tuple(w.shape), w.half().numpy().tobytes()) for name, w in x.items()]
    keys = (*architecture("llama"), key("llama.block_count", UINT32, 3), key("llama.embedding_length", UINT32, 32))
    path = write_gguf(tmp_path / "y.gguf", tensors, keys)
    save_file(x, tmp_path / "x.safetensors")
    findings = mismatches(quanterr.compare(tmp_path / "x.safetensors", path, device="cpu"))

    assert "the GGUF metadata declares 3 blocks, but the tensors belong to 1" in findings
    assert "the GGUF metadata declares a width of 32, but token_embd.weight has 64" in findings


class TestIndex:
    def folder(self, tmp_path, total):
        x = model()
        save_file(x, tmp_path / "x.safetensors")
        (tmp_path / "y").mkdir()
        save_file(x, tmp_path / "y/model-00001-of-00001.safetensors")
        index = {"metadata": {"total_size": total}, "weight_map": dict.fromkeys(x, "model-00001-of-00001.safetensors")}
        (tmp_path / "y/model.safetensors.index.json").write_text(json.dumps(index))
        return sum(weight.numel() * 4 for weight in x.values())

    def notes(self, tmp_path):
        report = quanterr.compare(tmp_path / "x.safetensors", tmp_path / "y", device="cpu")
        return [finding.message for finding in report.findings if finding.code == "nonstandard_file"]

    def test_wrong_total_size_is_noted(self, tmp_path):
        size = self.folder(tmp_path, 17)
        (note,) = self.notes(tmp_path)

        assert f"index states 17 bytes (total_size), its tensors have {size:,}" in note

    def test_right_total_size_is_silent(self, tmp_path):
        self.folder(tmp_path, 12 * 64 * 64 * 4 + 32 * 64 * 4)

        assert [] == self.notes(tmp_path)

    def test_whole_model_read_by_some_loaders_is_noted(self, tmp_path):
        self.folder(tmp_path, 12 * 64 * 64 * 4 + 32 * 64 * 4)
        save_file({"a": torch.ones(1)}, tmp_path / "y/model.safetensors")
        (note,) = self.notes(tmp_path)

        assert "index does not name model.safetensors, which is in the same folder; ignored" in note


class TestUnread:
    """Weights in the same folder."""

    def find(self, tmp_path, name, tensors, side="y", index=True):
        TestIndex().folder(tmp_path, None)
        if not index:
            (tmp_path / "y/model.safetensors.index.json").unlink()
        (tmp_path / "x").mkdir()
        (tmp_path / "x.safetensors").rename(tmp_path / "x/model.safetensors")
        save_file(tensors, tmp_path / side / name)
        report = quanterr.compare(tmp_path / "x", tmp_path / "y", device="cpu")
        return [finding for finding in report.findings if finding.code in ("unread_weights", "nonstandard_file")]

    @pytest.mark.parametrize("index", [True, False])
    def test_copy_for_another_runtime_is_an_info(self, tmp_path, index):
        tensors = {"layers.0.attention.wq.weight": torch.ones(64, 64)}
        (finding,) = self.find(tmp_path, "consolidated.safetensors", tensors, index=index)

        assert ("info", ["consolidated.safetensors"]) == (finding.severity, finding.evidence["files"])
        assert (
            f"{tmp_path / 'y'}: weight files in the same folder were not read: consolidated.safetensors"
            == finding.message
        )

    @pytest.mark.parametrize("side", ["x", "y"])
    @pytest.mark.parametrize(
        "tensor", [torch.ones(64, 64, dtype=torch.bfloat16), torch.ones(32, 64)], ids=["dtype", "shape"]
    )
    def test_different_copy_is_a_warning(self, tmp_path, tensor, side):
        tensors = {"model.layers.0.mlp.up_proj.weight": tensor, "other": torch.ones(1)}
        (finding,) = self.find(tmp_path, "consolidated.safetensors", tensors, side)

        assert ("warning", ["consolidated.safetensors"]) == (finding.severity, finding.evidence["files"])
        assert "stores 1 tensor of the same name with another shape or size: model.layers.0.mlp.up_proj.weight" in (
            finding.message
        )

    def test_identical_copy_is_an_info(self, tmp_path):
        (finding,) = self.find(tmp_path, "model-copy.safetensors", model())

        assert "info" == finding.severity

    @pytest.mark.parametrize(
        "name",
        [
            "adapter_model.safetensors",
            "adapters.safetensors",
            "model.fp16.safetensors",
            "model.fp16-00001-of-00002.safetensors",
            "model-00001-of-00002.fp16.safetensors",
            "pytorch_model.bin",
            "model.gguf",
        ],
    )
    def test_file_read_only_on_demand_is_silent(self, tmp_path, name):
        assert [] == self.find(tmp_path, name, {key: weight.half() for key, weight in model().items()})

    @pytest.mark.parametrize("content", [b"", b"version https://git-lfs", bytes(100)])
    def test_unreadable_copy_is_named(self, tmp_path, content):
        x = store(tmp_path / "x", model(), config={})
        (x / "consolidated.safetensors").write_bytes(content)
        with open_checkpoint(x) as checkpoint:
            assert (Unread("consolidated.safetensors"),) == checkpoint.unread

    def test_other_side_may_be_in_the_same_folder(self, tmp_path):
        x = store(tmp_path / "x", model(), config={})
        y = store(x / "consolidated.safetensors", {name: weight.half() for name, weight in model().items()})

        assert "unread_weights" not in map_findings(quanterr.compare(x, y, device="cpu"))

    def test_inspect_reports_unread_weights_too(self, tmp_path):
        x = store(tmp_path / "x", model(), config={})
        store(x / "consolidated.safetensors", {name: weight.half() for name, weight in model().items()})
        (finding,) = [finding for finding in quanterr.inspect(x).findings if finding.code == "unread_weights"]

        assert "warning" == finding.severity

    def test_named_file_is_the_intended_one(self, tmp_path):
        x = store(tmp_path / "x", model(), config={})
        store(x / "other.safetensors", model())
        with open_checkpoint(x / "model.safetensors") as checkpoint:
            assert () == checkpoint.unread


class TestActivations:
    @pytest.mark.parametrize("scale", [1e29, 1e-38])
    def test_impossible_activation_scale_is_a_warning(self, tmp_path, scale):
        name = "model.layers.0.mlp.up_proj.input_scale"
        finding = map_findings(report_of(tmp_path, code(model()) | {name: torch.tensor(scale)}))["scale_extreme"]

        assert ("warning", [name]) == (finding.severity, finding.evidence["tensors"])

    def test_input_scale_with_an_unsuitable_length_is_a_warning(self, tmp_path):
        name = "model.layers.0.mlp.up_proj.input_scale"
        finding = map_findings(report_of(tmp_path, code(model()) | {name: torch.ones(7)}))["scale_misfit"]

        assert f"{name} (7)" in finding.message

    @pytest.mark.parametrize("value", [float("nan"), 1e29])
    def test_unusable_rope_freqs_are_reported(self, tmp_path, value):
        x = {"blk.0.attn_q.weight": numbers(64, 64, seed=1).float()}
        freqs = torch.tensor([1.0, value])
        tensors = [Stored(name, "F32", tuple(w.shape), w.numpy().tobytes()) for name, w in x.items()]
        tensors.append(Stored("rope_freqs.weight", "F32", (2,), freqs.numpy().tobytes()))
        path = write_gguf(tmp_path / "y.gguf", tensors, architecture("llama"))
        save_file(x, tmp_path / "x.safetensors")
        finding = map_findings(quanterr.compare(tmp_path / "x.safetensors", path, device="cpu"))["bad_table"]

        assert ("error", ["rope_freqs.weight"]) == (finding.severity, finding.evidence["tensors"])


class TestNeighbours:
    """Activation scales are compared with those of the same module in other blocks."""

    BLOCKS = 4
    NAME = "model.layers.2.mlp.down_proj.input_scale"

    def x(self):
        return {
            f"model.layers.{n}.{name}.weight": numbers(64, 64, seed=n) for n in range(self.BLOCKS) for name in NAMES
        }

    def scales(self):
        """Return calibrated scales, which differ a hundredfold between blocks and more between modules."""
        y = {}
        for n in range(self.BLOCKS):
            for at, name in enumerate(NAMES):
                y[f"model.layers.{n}.{name}.input_scale"] = torch.tensor(0.00123 * 4.1**n * 1.7**at)
            for name in "kv":
                y[f"model.layers.{n}.self_attn.{name}_scale"] = torch.tensor(0.0321 * 3.1**n)
        return y

    def find(self, tmp_path, changed, without=()):
        scales = {name: scale for name, scale in (self.scales() | changed).items() if name not in without}
        x = self.x()
        report = report_of(tmp_path, coded_by_tensor(x) | scales, x=x)
        return [finding for finding in report.findings if finding.code == "scale_unlike"]

    def test_calibrated_scales_are_silent(self, tmp_path):
        assert [] == self.find(tmp_path, {})

    @pytest.mark.parametrize("factor", [1e-5, 1e5])
    def test_scale_far_from_the_others_is_reported_with_both_values(self, tmp_path, factor):
        value = 0.02 * factor
        (finding,) = self.find(tmp_path, {self.NAME: torch.tensor(value)})

        assert ("warning", [self.NAME]) == (finding.severity, finding.evidence["tensors"])
        assert f"{self.NAME} ({value:.3g}; the others' median is " in finding.message

    def test_inverse_scale_is_reported(self, tmp_path):
        name = "model.layers.2.self_attn.q_proj.input_scale"
        (finding,) = self.find(tmp_path, {name: 1 / self.scales()[name]})

        assert [name] == finding.evidence["tensors"]

    def test_weight_scale_as_input_scale_is_reported(self, tmp_path):
        weight_scale = coded_by_tensor(self.x())[self.NAME.replace("input_scale", "weight_scale")]
        (finding,) = self.find(tmp_path, {self.NAME: weight_scale})

        assert "equal to the scale of the weight in 1 tensor, unlike in others" in finding.message

    def test_input_scales_that_all_copy_weight_scales_are_a_convention(self, tmp_path):
        y = coded_by_tensor(self.x())
        copies = {name.replace("weight_scale", "input_scale"): y[name] for name in y if name.endswith("weight_scale")}

        assert [] == self.find(tmp_path, copies)

    @pytest.mark.parametrize("name", [NAME, "model.layers.1.self_attn.v_scale"])
    def test_missing_scale_is_reported(self, tmp_path, name):
        (finding,) = self.find(tmp_path, {}, [name])

        assert f"missing for 1 layer, unlike for the same layers of other blocks: {name}" in finding.message

    @pytest.mark.parametrize("value", [0.0, -0.1, float("inf"), float("nan")])
    @pytest.mark.parametrize("name", [NAME, "model.layers.1.self_attn.v_scale"])
    def test_stored_scale_is_not_missing(self, tmp_path, name, value):
        assert [] == self.find(tmp_path, {name: torch.tensor(value)})

    def test_scales_missing_in_half_the_blocks_are_deliberate(self, tmp_path):
        assert [] == self.find(
            tmp_path, {}, [name for name in self.scales() if "layers.0" in name or "layers.1" in name]
        )

    def test_implausible_cache_scale_is_reported(self, tmp_path):
        huge = {f"model.layers.{n}.self_attn.k_scale": torch.tensor(1e6) for n in range(self.BLOCKS)}
        (finding,) = self.find(tmp_path, huge)

        assert "above 1e+05 for 4 tensors of the KV cache: model.layers.0.self_attn.k_scale (1e+06)" in finding.message

    @pytest.mark.parametrize(("factor", "n"), [(5e3, 0), (1e5, 1)])
    def test_expert_scales_may_differ_by_more(self, tmp_path, factor, n):
        name = "model.layers.0.mlp.experts.{}.up_proj.input_scale"
        experts = {name.format(k): torch.tensor(0.01) for k in range(8)}

        assert n == len(self.find(tmp_path, experts | {name.format(3): torch.tensor(0.01 * factor)}))


class TestScheme:
    """config.json declares groups, zero points and codes."""

    CASE = "ct_pack/ct_w4a16_g32_asym"

    def find(self, folder, case, **changed):
        config = json.loads((GOLDEN / case / "config.json").read_text())["quantization_config"]
        for group in config["config_groups"].values():
            group["weights"] |= changed
        return mismatches(of_golden(folder, case, config))

    def test_matching_scheme_is_silent(self, tmp_path):
        assert [] == self.find(tmp_path, self.CASE)

    @pytest.mark.parametrize(
        ("changed", "told"),
        [
            ({"group_size": 64}, "declares group_size 64, but groups of 32 columns are stored for 1 weight"),
            ({"symmetric": True}, "declares symmetric codes, but zero points are stored for 1 weight"),
        ],
    )
    def test_mismatched_compressed_tensors_scheme_is_reported(self, tmp_path, changed, told):
        assert any(told in message for message in self.find(tmp_path, self.CASE, **changed))

    def test_scheme_with_another_code_type_is_reported(self, tmp_path):
        weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
        groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
        config = {"quant_method": "compressed-tensors", "config_groups": groups}
        findings = mismatches(report_of(tmp_path, code(model()), CONFIG | {"quantization_config": config}))

        assert any(
            "declares codes of type float, but codes of I8 are stored for 12 weights" in message for message in findings
        )

    def find_declared(self, folder, format="int-quantized", own=None, targets=("Linear",), **weights):
        """Return the findings about INT8 by rows with a configuration of compressed-tensors."""
        weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True} | weights
        groups = {"group_0": {"targets": list(targets), "weights": weights, "format": own}}
        config = {"quant_method": "compressed-tensors", "format": format, "config_groups": groups}
        x = {name: torch.cat([weight] * 4, 1) for name, weight in model().items()}
        return mismatches(report_of(folder, code(x), {"quantization_config": config}, x))

    @pytest.mark.parametrize(
        ("changed", "told"),
        [
            ({}, None),
            ({"format": "naive-quantized"}, None),
            ({"format": "pack-quantized", "own": "int-quantized"}, "format pack-quantized, but int8_row are stored"),
            ({"own": "pack-quantized"}, "format pack-quantized, but int8_row are stored for 12 weights"),
            ({"format": "mixed-precision"}, None),
            ({"format": "pack-quantized"}, "format pack-quantized, but int8_row are stored for 12 weights"),
            ({"strategy": "group", "group_size": 256}, None),
            ({"strategy": "group", "group_size": 128}, "group_size 128, but groups of 256 columns are stored for 12"),
            ({"strategy": "tensor"}, "strategy tensor, but a scale for each channel are stored for 12 weights"),
            ({"strategy": "block"}, "strategy block, but a scale for each channel are stored for 12 weights"),
            ({"targets": ["re:.*proj$"]}, None),
            ({"targets": ["model.language_model.layers.0.self_attn", "QKVParallelLinear"]}, None),
            ({"targets": ["re:.*mlp.*"]}, "targets re:.*mlp.* and no others, but codes are stored for 8 weights"),
            ({"targets": ["Conv2d"]}, "targets Conv2d and no others, but codes are stored for 12 weights"),
        ],
    )
    def test_compressed_tensors_scheme_must_match(self, tmp_path, changed, told):
        messages = self.find_declared(tmp_path, **changed)

        assert (told is None) == (messages == [])
        assert told is None or told in messages[0]

    def test_one_row_has_groups_as_well_as_blocks(self, tmp_path):
        name, x = "model.layers.0.mlp.up_proj.weight", numbers(1, 128)
        y = {name: x.to(torch.float8_e4m3fn), f"{name}_scale": torch.full((1, 4), 127, dtype=torch.uint8)}
        weights = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}
        groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
        config = {"quant_method": "compressed-tensors", "format": "mxfp8-quantized", "config_groups": groups}

        assert [] == mismatches(report_of(tmp_path, y, {"quantization_config": config}, {name: x}))

    @pytest.mark.parametrize(("size", "n"), [(None, 1), ([128, 128], 0)], ids=["not declared", "declared"])
    def test_fp8_block_size_must_be_declared(self, tmp_path, size, n):
        x = {"model.layers.0.mlp.up_proj.weight": numbers(256, 256).float()}
        ((name, weight),) = x.items()
        y = {name: weight.to(torch.float8_e4m3fn), f"{name}_scale_inv": torch.ones(2, 2)}
        config = {"quant_method": "fp8", "weight_block_size": size}
        findings = mismatches(report_of(tmp_path, y, {"quantization_config": config}, x))

        assert n == sum(
            "declares quant_method fp8 without weight_block_size, but scales of blocks" in m for m in findings
        )

    @pytest.mark.parametrize(("said", "n"), [(False, 1), (True, 0)])
    def test_denied_awq_zero_points_are_reported(self, tmp_path, said, n):
        config = {"quant_method": "awq", "zero_point": said}
        report = of_golden(tmp_path, "awq_gemm/awq_gemm_g128", config)

        assert n == sum("declares zero_point false, but " in finding.message for finding in report.findings)

    def test_contradictory_config_files_are_reported(self, tmp_path):
        config = CONFIG | {"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}}
        (tmp_path / "y").mkdir()
        (tmp_path / "y/hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
        findings = mismatches(report_of(tmp_path, code(model()), config))

        (finding,) = findings
        assert (
            "declares quant_algo FP8, but hf_quant_config.json declares NVFP4: some runtimes read one, some the other"
            in finding
        )

    @pytest.mark.parametrize("where", ["config.json", "hf_quant_config.json"])
    @pytest.mark.parametrize(("algorithm", "told"), [("FP8", False), ("NVFP4", True), ("W4A8_NVFP4_FP8", True)])
    def test_mismatched_modelopt_algorithm_is_reported(self, tmp_path, where, algorithm, told):
        config = CONFIG
        (tmp_path / "y").mkdir()
        if where == "config.json":
            config = CONFIG | {"quantization_config": {"quant_method": "modelopt", "quant_algo": algorithm}}
        else:
            (tmp_path / "y" / where).write_text(json.dumps({"quantization": {"quant_algo": algorithm}}))
        findings = mismatches(report_of(tmp_path, coded_by_tensor(model()), config))

        assert told == any(
            f"{where} declares quant_algo {algorithm}, but fp8_tensor are stored for 13 weights" in finding
            for finding in findings
        )

    @pytest.mark.parametrize(("more", "n"), [({}, 1), ({"dynamic": {"-:.*": {}}}, 0)])
    def test_mostly_unquantized_linears_are_reported(self, tmp_path, more, n):
        names = [name for name in model() if "embed" not in name]
        config = CONFIG | {"quantization_config": {"quant_method": "gptq"} | more}
        findings = mismatches(report_of(tmp_path, code(model(), names[1:]), config))

        assert n == sum("and does not exclude" in message for message in findings)
