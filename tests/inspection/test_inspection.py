import json
import shlex
import subprocess
import sys

import pytest
import torch
from support.making import fp8_codes, header, int8_codes, label, numbers, quantized_fp8, quantized_int8, store
from typer.testing import CliRunner

import quanterr
from quanterr.cli import app
from quanterr.errors import CheckpointError, Status, UsageError

X = numbers(64, 128)
CODES, SCALE = quantized_fp8(X)
INTS, STEP = quantized_int8(X)
MODEL = {
    "model.layers.0.self_attn.q_proj.weight": CODES,
    "model.layers.0.self_attn.q_proj.weight_scale": SCALE,
    "model.layers.0.self_attn.q_proj.input_scale": torch.tensor(1.0),
    "model.layers.0.mlp.up_proj.weight": INTS,
    "model.layers.0.mlp.up_proj.weight_scale": STEP.expand(64, 1).contiguous(),
    "model.layers.0.input_layernorm.weight": numbers(128),
    "model.embed_tokens.weight": numbers(32, 128),
}


def findings(inspection):
    return {finding.code: finding.message for finding in inspection.findings}


class TestInspection:
    def test_inspection_counts_stored_tensors(self, tmp_path):
        inspection = quanterr.inspect(store(tmp_path / "m.safetensors", MODEL))

        assert {"fp8_tensor": 1, "int8_row": 1, "dense": 2} == {k: t.weights for k, t in inspection.formats.items()}
        assert 8192 * 2 + 128 + 4096 == inspection.total.elements
        assert sum(t.nbytes for t in MODEL.values()) == inspection.total.bytes == inspection.bytes
        assert 8 * (8192 + 4 + 4) / 8192 == inspection.formats["fp8_tensor"].bits_per_weight
        assert (1, 64) == (inspection.formats["fp8_tensor"].scales, inspection.formats["int8_row"].scales)
        assert {"attention", "mlp", "norm", "embedding"} == inspection.groups.keys()
        assert [] == inspection.findings

    def test_inspection_describes_each_weight(self, tmp_path):
        inspection = quanterr.inspect(store(tmp_path / "m.safetensors", MODEL))
        weights = {weight.name: weight for weight in inspection.weights}
        q = weights["model.layers.0.self_attn.q_proj.weight"]

        assert ("fp8_tensor", "F8_E4M3", [64, 128], 8, "layers.0") == (q.format, q.dtype, q.shape, q.code_bits, q.block)
        assert MODEL.keys() - weights.keys() == {name for name in MODEL if name.endswith("_scale")}

    def test_inspection_reads_only_headers_and_labels(self, tmp_path):
        path = store(tmp_path / "m.safetensors", {f"{n}.weight": numbers(512, 512, seed=n) for n in range(4)})
        with quanterr.open_checkpoint(path) as checkpoint:
            offsets = []
            for file in checkpoint.files:
                file.read_into = lambda view, offset: offsets.append(offset)
            quanterr.inspect(checkpoint)

        assert [] == offsets

    def test_unread_weights_are_named_with_the_reason(self, tmp_path):
        tensors = {"a.weight": fp8_codes(4, 64), "b.weight": fp8_codes(4, 64), "b.weight_scale": torch.ones(3)}
        inspection = quanterr.inspect(store(tmp_path / "m.safetensors", tensors))

        assert {"unread"} == inspection.formats.keys()
        assert None is inspection.total.bits_per_weight
        assert all(weight.reason for weight in inspection.weights)
        assert "fits no known layout" in inspection.findings[1].message
        assert {"error"} == {finding.severity for finding in inspection.findings}

    def test_contradictory_and_orphaned_labels_are_reported(self, tmp_path):
        tensors = {
            "a.weight": int8_codes(4, 64),
            "a.weight_scale": torch.ones(4),
            "a.comfy_quant": label(format="int8_tensorwise"),
        }
        labels = header({"a": {"format": "int8_blockwise"}, "gone": {"format": "int8_blockwise"}})
        reported = findings(quanterr.inspect(store(tmp_path / "m.safetensors", tensors, labels)))

        assert "labels disagree" in reported["ambiguous_layout"]
        assert "gone" in reported["label_without_layer"]

    def test_configuration_without_codes_is_reported(self, tmp_path):
        config = {"architectures": ["LlamaForCausalLM"], "quantization_config": {"quant_method": "fp8"}}
        inspection = quanterr.inspect(store(tmp_path / "m", {"a.weight": X}, config=config))

        assert ("fp8", "LlamaForCausalLM") == (inspection.quant_method, inspection.architecture)
        assert "no weight is stored quantized" in findings(inspection)["config_without_codes"]

    def test_damaged_file_is_an_error(self, tmp_path):
        (tmp_path / "m.safetensors").write_bytes(b"\x00" * 20)
        with pytest.raises(CheckpointError):
            quanterr.inspect(tmp_path / "m.safetensors")


class TestCommand:
    def run(self, *arguments):
        return CliRunner().invoke(app, ["inspect", *map(str, arguments)])

    def test_command_prints_totals_per_format(self, tmp_path):
        done = self.run(store(tmp_path / "m.safetensors", MODEL))

        assert 0 == done.exit_code
        assert all(word in done.stdout for word in ("4 weights at ", "fp8_tensor", "int8_row", "bits/w"))
        assert "q_proj.weight" not in done.stdout

    def test_unread_weight_exits_with_its_status(self, tmp_path):
        codes = {"a.weight": torch.zeros(4, 32, dtype=torch.uint32), "a.scales": torch.ones(4, 4)}
        done = self.run(store(tmp_path / "m.safetensors", MODEL | codes | {"a.biases": torch.ones(4, 4)}))

        assert Status.INCONCLUSIVE == done.exit_code
        assert "a.weight: not read: " in " ".join(done.stdout.split())

    def test_command_prints_every_weight_if_asked(self, tmp_path):
        done = self.run(store(tmp_path / "m.safetensors", MODEL), "-v")

        assert all(name in done.stdout for name in MODEL if not name.endswith("scale"))
        assert all(word in done.stdout for word in ("By format", "By role and format", "attention"))

    def test_command_prints_strict_json(self, tmp_path):
        done = self.run(store(tmp_path / "m.safetensors", MODEL), "--json")
        document = json.loads(done.stdout, parse_constant=pytest.fail)

        assert ("quanterr.inspection", "1.5") == (document["schema"], document["schema_version"])
        assert 4 == len(document["weights"]) == document["total"]["weights"]

    def test_file_name_with_invalid_unicode_is_escaped(self, tmp_path):
        path = store(tmp_path / "\udcff.safetensors", MODEL)

        assert r"\\udcff.safetensors" in quanterr.inspect(path).to_json()

    def test_empty_checkpoint_gives_an_empty_table(self, tmp_path):
        done = self.run(store(tmp_path / "m.safetensors", {}), "-v")

        assert 0 == done.exit_code, done.exception
        assert "0 tensors" in done.stdout

    def test_hostile_name_is_escaped(self, tmp_path):
        done = self.run(store(tmp_path / "m.safetensors", {"a\x1b[31m.weight": X}), "-v")

        assert "\x1b" not in done.stdout
        assert "\\x1b[31m" in done.stdout

    @pytest.mark.slow
    def test_closed_pipe_ends_the_command_silently(self, tmp_path):
        path = store(tmp_path / "m.safetensors", {f"layers.{n}.weight": numbers(4, 8) for n in range(2000)})
        command = shlex.join([sys.executable, "-m", "quanterr", "inspect", "-v", str(path)])
        line = command + " | head -1; exit ${PIPESTATUS[0]}"
        done = subprocess.run(["bash", "-c", line], capture_output=True, text=True)

        assert (141, "") == (done.returncode, done.stderr)


class TestHardware:
    @pytest.fixture
    def folder(self, tmp_path):
        """A model of experts: an embedding, a head, attention, four experts and a shared one, 2 bytes per weight."""
        tensors = {
            "model.embed_tokens.weight": numbers(100, 16),
            "model.layers.0.self_attn.q_proj.weight": numbers(16, 16),
            "model.layers.0.mlp.shared_experts.up_proj.weight": numbers(8, 16),
            "lm_head.weight": numbers(100, 16),
        }
        tensors |= {f"model.layers.0.mlp.experts.{n}.up_proj.weight": numbers(32, 16, seed=n) for n in range(4)}
        store(tmp_path / "model.safetensors", tensors)
        (tmp_path / "config.json").write_text('{"num_experts_per_tok": 1, "n_routed_experts": 4}')
        return tmp_path

    def test_each_token_reads_active_weights_once(self, folder):
        decode = quanterr.inspect(folder, hardware="1000 GB/s").decode

        assert 2 * 16 * (100 + 16 + 8 + 32) == decode.active_bytes
        assert pytest.approx(1e12 / decode.active_bytes) == decode.tokens_per_second
        assert "1 of 4 experts per token" == decode.experts

    def test_embedding_serves_as_the_head_and_unknown_experts_all_count(self, folder, tmp_path):
        (folder / "config.json").unlink()
        tensors = {"model.embed_tokens.weight": numbers(100, 16), "a.experts.0.up.weight": numbers(32, 16)}
        store(folder / "model.safetensors", tensors)
        decode = quanterr.inspect(folder, hardware="H100").decode

        assert (2 * 16 * 132, 3350.0) == (decode.active_bytes, decode.gigabytes_per_second)
        assert "all are counted" in decode.experts

    def test_command_calls_the_speed_a_bound_and_unknown_hardware_is_refused(self, folder):
        done = CliRunner().invoke(app, ["inspect", str(folder), "--hardware", "4090"])
        assert "4090, 1008 GB/s: at most " in done.stdout
        assert "Only memory bandwidth is taken into account." in done.stdout
        with pytest.raises(UsageError, match="did you mean H100"):
            quanterr.inspect(folder, hardware="H10")


class TestDocument:
    """An inspection is a document like others: stored, rendered, judged, compared."""

    @pytest.fixture
    def inspection_and_path(self, tmp_path):
        path = store(tmp_path / "m.safetensors", MODEL)
        inspection = quanterr.inspect(path)
        inspection.save(tmp_path / "i.json")
        return inspection, tmp_path / "i.json"

    def test_document_is_read_back_unchanged(self, inspection_and_path):
        inspection, path = inspection_and_path

        assert inspection.to_json() == quanterr.read_document(str(path)).to_json()

    @pytest.mark.parametrize("suffix", ["html", "md", "csv", "jsonl", "xml"])
    def test_document_has_every_output(self, inspection_and_path, tmp_path, suffix):
        inspection, _ = inspection_and_path
        inspection.save(tmp_path / f"i.{suffix}")

        assert "fp8_tensor" in (tmp_path / f"i.{suffix}").read_text()

    def test_document_is_judged(self, inspection_and_path):
        _, path = inspection_and_path
        status = [
            CliRunner().invoke(app, ["gate", str(path), "--require", f"bits_per_weight <= {bits}"]).exit_code
            for bits in (32, 1)
        ]

        assert [Status.OK, Status.GATE_FAILED] == status

    def test_rules_are_inconclusive_where_a_weight_is_unread(self, tmp_path):
        codes = {"a.weight": torch.zeros(4, 32, dtype=torch.uint32), "a.scales": torch.ones(4, 4)}
        inspection = quanterr.inspect(store(tmp_path / "m.safetensors", MODEL | codes | {"a.biases": torch.ones(4, 4)}))
        inspection.save(tmp_path / "i.json")
        done = CliRunner().invoke(app, ["gate", str(tmp_path / "i.json"), "--require", "bits_per_weight <= 32"])

        assert 1 == inspection.unread
        assert Status.INCONCLUSIVE == done.exit_code

    def test_diff_lists_a_weight_whose_storage_changed(self, inspection_and_path, tmp_path):
        inspection, _ = inspection_and_path
        (name, *_) = [weight.name for weight in inspection.weights if weight.format == "fp8_tensor"]
        plain = {key: value for key, value in MODEL.items() if not key.startswith(name)} | {name: X}
        (change,) = quanterr.diff(inspection, quanterr.inspect(store(tmp_path / "n.safetensors", plain))).candidates

        assert [(name, "fp8_tensor", "dense")] == [
            (weight.layer, weight.old_format, weight.new_format) for weight in (*change.worse, *change.better)
        ]


def test_quiet_line_names_the_first_error(tmp_path):
    damaged = {name: torch.full((2, 2), float("nan")) for name in ("a.weight", "b.weight")}
    inspection = quanterr.inspect(store(tmp_path / "m.safetensors", damaged), values=True)

    assert f"; error: {inspection.problems[0]}" in inspection.brief()
