"""A checkpoint that is written back as floats has the values its producer decodes, in every format."""

import json
import os
import signal
import threading
import time
from contextlib import suppress

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import smoothed
from support.forked import call, signal_after
from support.golden_files import GOLDEN, agree, values_of
from support.golden_files import NUMBERS as CASES
from support.making import numbers, quantized_fp8, quantized_int8

import quanterr
from quanterr.dequantization import run
from quanterr.errors import CheckpointError, Interrupted, ResourceError, Status, UsageError

ALONE = [case for case in CASES if case.suffix != ".gguf"]


def names(cases):
    return [f"{case.parent.name}/{case.stem}" for case in cases]


@pytest.mark.parametrize("case", CASES, ids=names(CASES))
def test_golden_values_are_written_in_the_original_form(case, tmp_path):
    wanted = values_of(case)
    save_file(wanted, tmp_path / "like.safetensors")
    quanterr.dequantize(case, tmp_path / "out.safetensors", like=tmp_path / "like.safetensors")
    made = load_file(tmp_path / "out.safetensors")

    assert {name: (x.shape, x.dtype) for name, x in wanted.items()} == {n: (x.shape, x.dtype) for n, x in made.items()}
    assert [] == [name for name, x in wanted.items() if not agree(case, x, made[name])]


@pytest.mark.parametrize("case", ALONE, ids=names(ALONE))
def test_golden_values_without_an_original_are_written_or_refused(case, tmp_path):
    with suppress(CheckpointError):  # its shape, its codes' width or similar facts are not stored
        quanterr.dequantize(case, tmp_path / "out.safetensors", dtype="f32")
    if not list(tmp_path.iterdir()):
        return
    made, wanted = load_file(tmp_path / "out.safetensors"), values_of(case)

    assert [] == [name for name, x in wanted.items() if name in made and made[name].shape != x.shape]
    assert [] == [name for name, x in wanted.items() if name in made and not agree(case, x, made[name].to(x.dtype))]


def test_scales_folded_into_a_norm_stay_in_the_norm_and_its_weights(tmp_path):
    """The divided norm works only with the multiplied weights, so both are written as they are stored."""
    x, s = smoothed.model(), smoothed.factors(128)
    norm = f"{smoothed.BLOCK}input_layernorm.weight"
    y = x | {norm: x[norm] / s} | {name: smoothed.int4(x[name] * s) for name in smoothed.FED}
    for name, of in (("original", x), ("folded", y)):
        save_file(of, tmp_path / f"{name}.safetensors")
    quanterr.dequantize(
        tmp_path / "folded.safetensors", tmp_path / "out.safetensors", like=tmp_path / "original.safetensors"
    )
    made = load_file(tmp_path / "out.safetensors")

    assert [] == [name for name, of in y.items() if not torch.equal(of.to(x[name].dtype), made[name])]


def test_rows_of_heads_are_written_in_the_order_of_the_originals_name(tmp_path):
    """Mistral's and Meta's names imply rows of each head in pairs, transformers' names in halves."""
    halves = numbers(64, 32)
    pairs = halves.view(4, 2, 8, 32).transpose(1, 2).reshape(64, 32)
    for name, key, x in (
        ("original", "layers.0.attention.wq.weight", pairs),
        ("usual", "model.layers.0.self_attn.q_proj.weight", halves),
    ):
        (tmp_path / name).mkdir()
        save_file({key: x.contiguous()}, tmp_path / name / "model.safetensors")
        (tmp_path / name / "config.json").write_text(json.dumps({"num_attention_heads": 4}))
    quanterr.dequantize(tmp_path / "usual", tmp_path / "out", like=tmp_path / "original")

    assert torch.equal(pairs, load_file(tmp_path / "out/model.safetensors")["layers.0.attention.wq.weight"])


class TestExpertsOfGptOss:
    """gpt-oss stores MXFP4 codes as [experts, out, in] and floats as [experts, in, out] under the same name."""

    @staticmethod
    def write(tmp_path, config):
        case = next(case for case in ALONE if case.parent.name == "gpt_oss_mxfp4")
        kept = {name: x for name, x in load_file(case).items() if name.startswith("model.layers")}
        (tmp_path / "model").mkdir()
        save_file(kept, tmp_path / "model/model.safetensors")
        (tmp_path / "model/config.json").write_text(json.dumps(config))
        quanterr.dequantize(tmp_path / "model", tmp_path / "out", dtype="f32")
        [(name, wanted)] = [(name, x) for name, x in values_of(case).items() if name.startswith("model.layers")]
        return wanted.float(), load_file(tmp_path / "out/model.safetensors")[name]

    def test_experts_are_written_as_the_model_stores_floats(self, tmp_path):
        wanted, made = self.write(tmp_path, {"model_type": "gpt_oss"})

        assert torch.equal(wanted.transpose(1, 2), made)

    def test_experts_of_an_unknown_model_are_refused(self, tmp_path):
        with pytest.raises(CheckpointError, match=r"down_proj: its model decides .* names the model_type"):
            self.write(tmp_path, {})


def weights():
    return {f"model.layers.{n}.mlp.up_proj.weight": numbers(64, 256, seed=n) for n in range(4)}


CONFIG = {"architectures": ["X"], "hidden_size": 64}


@pytest.fixture
def model(tmp_path):
    """A folder with an FP8 model, its config and its tokenizer, and the folder of its original."""
    for name in ("original", "fp8"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(CONFIG))
        (tmp_path / name / "tokenizer.json").write_text("{}")
    save_file(
        {k: x.bfloat16() for k, x in weights().items()} | {"norm.weight": torch.ones(64)},
        tmp_path / "original/model.safetensors",
    )
    stored = {"norm.weight": torch.ones(64)}
    for name, x in weights().items():
        stored[name], stored[f"{name}_scale"] = quantized_fp8(x)
    save_file(stored, tmp_path / "fp8/model.safetensors")
    quantization = {"quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "fp8/config.json").write_text(json.dumps(CONFIG | quantization | {"text_config": quantization}))
    (tmp_path / "fp8/quantize_config.json").write_text("{}")
    (tmp_path / "fp8/README.md").write_text("how it was quantized")
    return tmp_path


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


class TestFolder:
    def test_folder_has_shards_index_config_without_quantization_and_tokenizer(self, model):
        made = quanterr.dequantize(model / "fp8", model / "out", max_shard="40KB")
        index = json.loads((model / "out/model.safetensors.index.json").read_text())
        config = json.loads((model / "out/config.json").read_text())

        assert {"config.json", "tokenizer.json", "model.safetensors.index.json", *made.files} == set(
            contents(model / "out")
        )
        assert 5 == len(index["weight_map"])
        assert set(made.files) == set(index["weight_map"].values())
        assert CONFIG | {"text_config": {}} == config
        assert ({"fp8_tensor": 4}, 1) == (made.formats, made.copied)

    def test_folder_compares_as_the_quantized_model_does(self, model):
        quanterr.dequantize(model / "fp8", model / "out", dtype="f32")
        snr = [quanterr.compare(model / "original", model / side).aggregate.overall_snr_db for side in ("fp8", "out")]
        same = quanterr.compare(model / "fp8", model / "out")

        assert snr[0] == snr[1]
        assert ([], 5) == (same.layers, len(same.lossless))

    def test_result_is_rounded_to_the_dtype_and_the_loss_is_reported(self, model):
        made = quanterr.dequantize(model / "fp8", model / "out")
        report = quanterr.compare(model / "fp8", model / "out")

        assert {"torch.bfloat16"} == {layer.quantized_dtype for layer in report.layers}
        assert report.aggregate.overall_snr_db == pytest.approx(made.rounding_db, rel=1e-6)

    def test_result_like_an_original_has_its_dtypes_and_config(self, model):
        quanterr.dequantize(model / "fp8", model / "out", like=model / "original")
        made = load_file(model / "out/model.safetensors")

        assert {name: x.dtype for name, x in load_file(model / "original/model.safetensors").items()} == {
            name: x.dtype for name, x in made.items()
        }
        assert CONFIG == json.loads((model / "out/config.json").read_text())

    def test_only_selected_tensors_are_written_if_asked(self, model):
        quanterr.dequantize(model / "fp8", model / "out.safetensors", layers=["layers.2"])

        assert ["model.layers.2.mlp.up_proj.weight"] == list(load_file(model / "out.safetensors"))

    def test_resumed_run_states_no_partial_rounding(self, model):
        stop = threading.Event()

        def stop_after_a_file(progress):
            if list(model.glob(".out.quanterr-partial/*.safetensors")):
                stop.set()

        with pytest.raises(Interrupted):
            quanterr.dequantize(model / "fp8", model / "out", max_shard="5kB", on_progress=stop_after_a_file, stop=stop)
        again = quanterr.dequantize(model / "fp8", model / "out", max_shard="5kB")

        assert again.rounding_db is None
        assert quanterr.dequantize(model / "fp8", model / "whole", max_shard="5kB").rounding_db is not None

    def test_written_files_are_read_back_if_asked(self, model, monkeypatch):
        quanterr.dequantize(model / "fp8", model / "good", verify=True)
        monkeypatch.setattr(run.os, "fsync", lambda descriptor: os.pwrite(descriptor, b"\xff\xff", 4000))

        with pytest.raises(ResourceError, match="its bytes differ from those written"):
            quanterr.dequantize(model / "fp8", model / "bad", verify=True)
        assert not (model / "bad").exists()


class TestRefused:
    @pytest.mark.parametrize("place", ["fp8", "fp8/model.safetensors", "original"])
    def test_existing_files_are_not_overwritten(self, model, place):
        before = contents(model / "fp8")

        with pytest.raises(UsageError, match="nothing is overwritten"):
            quanterr.dequantize(model / "fp8", model / place)
        assert before == contents(model / "fp8")

    def test_name_that_the_file_system_refuses_is_an_environment_error(self, model):
        with pytest.raises(ResourceError, match=r"-o .*: File name too long"):
            quanterr.dequantize(model / "fp8", model / ("o" * 245))

    def test_values_beyond_the_dtype_are_refused(self, tmp_path):
        codes, _ = quantized_int8(numbers(8, 64))
        save_file({"a.weight": codes, "a.weight_scale": torch.tensor(1000.0)}, tmp_path / "x.safetensors")

        with pytest.raises(UsageError, match=r"a.weight: its largest value, 1.27e\+05, is beyond the range of F16"):
            quanterr.dequantize(tmp_path / "x.safetensors", tmp_path / "out.safetensors", dtype="f16")
        assert not (tmp_path / "out.safetensors").exists()

    def test_invalid_config_is_refused_before_anything_is_written(self, model):
        (model / "fp8/config.json").write_text("nonsense")

        with pytest.raises(CheckpointError, match=r"fp8/config.json: is not valid .* cannot be removed; repair it"):
            quanterr.dequantize(model / "fp8", model / "out")
        assert not list(model.glob("*out*"))

    def test_gguf_file_of_an_unknown_model_without_its_original_is_refused(self, tmp_path):
        case = next(case for case in CASES if case.suffix == ".gguf")

        with pytest.raises(UsageError, match=r"llama\.cpp.*: give like ORIGINAL"):
            quanterr.dequantize(case, tmp_path / "out")

    def test_gguf_file_of_a_known_model_is_written_as_with_its_original(self, tmp_path):
        pytest.importorskip("transformers")
        folder = GOLDEN.with_name("golden_evaluation")
        quanterr.dequantize(folder / "q4_0.gguf", tmp_path / "alone")
        quanterr.dequantize(folder / "q4_0.gguf", tmp_path / "like", like=folder / "original", dtype="bf16")
        alone, like = (load_file(tmp_path / name / "model.safetensors") for name in ("alone", "like"))

        assert alone.keys() == like.keys()
        assert all(torch.equal(alone[name].float(), like[name].float()) for name in like)
        assert {"config.json", "tokenizer.json"} <= {path.name for path in (tmp_path / "alone").iterdir()}

    def test_original_with_an_additional_weight_is_refused(self, model):
        more = load_file(model / "original/model.safetensors") | {"lm_head.weight": numbers(64, 64)}
        save_file(more, model / "original/model.safetensors")

        with pytest.raises(CheckpointError, match=r"1 tensor cannot be written: lm_head.weight: "):
            quanterr.dequantize(model / "fp8", model / "out", like=model / "original")

    def test_full_disk_is_noticed_before_anything_is_written(self, model, monkeypatch):
        monkeypatch.setattr(run.shutil, "disk_usage", lambda folder: run.shutil._ntuple_diskusage(9, 9, 9))

        with pytest.raises(ResourceError, match=r"needs 128.* KiB, but only 9 B are free there"):
            quanterr.dequantize(model / "fp8", model / "out")

    def test_invalid_size_is_refused(self, model):
        with pytest.raises(UsageError, match="max_shard 5 apples: give bytes, such as 5GB"):
            quanterr.dequantize(model / "fp8", model / "out", max_shard="5 apples")


class TestInterrupted:
    def test_interrupted_run_goes_on_with_the_complete_files(self, model, monkeypatch):
        quanterr.dequantize(model / "fp8", model / "whole", max_shard="40KB")
        stop, finished, replace = threading.Event(), [], os.replace

        def stop_after_two(source, target):
            replace(source, target)
            finished.append(target)
            if len(finished) == 3:  # the first file identifies the run
                stop.set()

        monkeypatch.setattr(run.os, "replace", stop_after_two)
        with pytest.raises(Interrupted):
            quanterr.dequantize(model / "fp8", model / "out", max_shard="40KB", stop=stop)
        assert not (model / "out").exists()
        left = {
            path.name: path.stat().st_mtime_ns for path in (model / ".out.quanterr-partial").glob("model-*.safetensors")
        }
        monkeypatch.setattr(run.os, "replace", replace)
        quanterr.dequantize(model / "fp8", model / "out", max_shard="40KB")

        assert 2 == len(left)
        assert left.items() <= {path.name: path.stat().st_mtime_ns for path in (model / "out").iterdir()}.items()
        assert contents(model / "whole") == contents(model / "out")
        assert not (model / ".out.quanterr-partial").exists()

    def test_files_from_other_settings_are_not_taken_over(self, model, monkeypatch):
        monkeypatch.setattr(run, "_finish", lambda *_: None)
        quanterr.dequantize(model / "fp8", model / "out", dtype="f16")
        monkeypatch.undo()
        quanterr.dequantize(model / "fp8", model / "out")

        assert {torch.bfloat16, torch.float32} == {x.dtype for x in load_file(model / "out/model.safetensors").values()}

    @pytest.mark.slow
    def test_run_killed_at_any_moment_ends_with_the_same_bytes(self, tmp_path):
        """Each run has its own process, which SIGKILL ends."""
        stored = {}
        for n in range(24):
            stored[f"layers.{n}.weight"], stored[f"layers.{n}.weight_scale"] = quantized_fp8(numbers(256, 1024, seed=n))
        save_file(stored, tmp_path / "x.safetensors")
        words = ["dequantize", "x.safetensors", "--max-shard", "600KB", "-q", "-o"]
        call("--version")  # the first command waits until the server of forked processes has started
        started = time.monotonic()
        assert Status.OK == call(*words, "whole", cwd=tmp_path).returncode
        took = time.monotonic() - started
        ended = [call(*words, "out", cwd=tmp_path, before=signal_after(took * (0.1 + 0.1 * n))) for n in range(8)]
        call(*words, "out", cwd=tmp_path) if not (tmp_path / "out").exists() else None

        assert -signal.SIGKILL in {command.returncode for command in ended}
        assert contents(tmp_path / "whole") == contents(tmp_path / "out")


def test_command_reports_the_files_it_wrote(model):
    done = call("dequantize", "fp8", "-o", "out", cwd=model)
    again = call("dequantize", "fp8", "-o", "out", cwd=model)

    assert (Status.OK, "") == (done.returncode, done.stderr)
    assert done.stdout.startswith(
        "wrote out: 128.25 KiB in 1 file\ndecoded fp8_tensor: 4 weights; copied 1 tensor; rounded "
    )
    assert Status.USAGE == again.returncode
    assert "-o out: exists; nothing is overwritten" in again.stderr
