"""Whether runtimes load a checkpoint: verdicts beside what the runtimes did, and cases that people reported."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from loaders.cases import CASES, by_mlx, pack
from safetensors.torch import load_file, save_file
from support.gguf_stored import F32, TEXT, U32, Stored, key, write_gguf
from support.gguf_stored import LLAMA as LLAMA_KEYS
from support.making import fp8_codes, label, numbers, quantized_fp8, quantized_int8, store
from typer.testing import CliRunner

import quanterr
from quanterr import guide
from quanterr.cli import app
from quanterr.errors import Status, UsageError
from quanterr.findings.runtimes.judging import RUNTIMES
from quanterr.gates.expression import parse
from quanterr.options import InspectOptions, list_options

RESULTS = json.loads((Path(__file__).parents[1] / "loaders" / "results.json").read_text())
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
UP, DOWN = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"


def judge(path, runtime):
    """Return the verdict about a checkpoint, and the first reason."""
    [verdict] = quanterr.inspect(path, runtimes=[runtime]).loading
    return verdict.verdict, verdict.reasons[0].message if verdict.reasons else ""


def find_checkpoint(folder):
    """Return the file to open: a GGUF file, or the folder."""
    return next(folder.glob("*.gguf"), folder)


class TestResults:
    """``make loaders`` writes what the runtimes did."""

    @pytest.mark.parametrize("name", CASES)
    def test_verdict_is_what_the_runtime_did(self, tmp_path, name):
        CASES[name].make(tmp_path)

        assert RESULTS[name]["outcome"] == judge(find_checkpoint(tmp_path), CASES[name].runtime)[0]

    def test_layouts_marked_as_run_were_loaded_by_a_runtime(self, tmp_path):
        claimed = {
            (runtime.name, name)
            for runtime in RUNTIMES
            for row in runtime.layouts
            if row.is_run
            for name in row.formats
        }
        loaded = set()
        for name, case in CASES.items():
            if RESULTS[name]["outcome"] == "loads":
                folder = tmp_path / name
                folder.mkdir()
                case.make(folder)
                inspection = quanterr.inspect(find_checkpoint(folder), runtimes=[case.runtime])
                loaded |= {(case.runtime, form) for form in inspection.formats}
                assert ["run"] == [verdict.proof for verdict in inspection.loading]

        assert claimed == {(runtime, "dense" if form == "gguf_f32" else form) for runtime, form in loaded}

    def test_rules_are_of_the_versions_that_were_run(self):
        versions = {result["runtime"]: result["version"] for result in RESULTS.values()}

        assert versions == {
            runtime.name: runtime.version.split()[-1] for runtime in RUNTIMES if runtime.name in versions
        }


def make_fp8(names):
    return {
        key: tensor
        for name in names
        for key, tensor in zip((f"{name}.weight", f"{name}.weight_scale"), quantized_fp8(numbers(64, 64)), strict=True)
    }


def declare(**fields):
    return LLAMA | {"quantization_config": fields}


OF_QUARK = {"qscheme": "per_tensor", "dtype": "fp8_e4m3", "is_dynamic": False, "symmetric": True}


class TestVllm:
    FP8 = declare(quant_method="fp8", activation_scheme="dynamic")

    def test_fp8_of_whole_tensors_is_loaded(self, tmp_path):
        assert ("loads", "") == judge(store(tmp_path / "m", make_fp8([UP]), config=self.FP8), "vllm")

    def test_dense_layer_that_nothing_excludes_has_no_scale(self, tmp_path):
        tensors = make_fp8([UP]) | {"mtp.fc.weight": numbers(64, 128).bfloat16()}
        weights = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
        groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": weights}}
        config = declare(quant_method="compressed-tensors", format="float-quantized", config_groups=groups)
        verdict, reason = judge(store(tmp_path / "m", tensors, config=config), "vllm")

        assert "loads, but" == verdict
        assert "without scales" in reason
        assert "mtp.fc.weight" in reason

    def test_dense_layer_under_packed_codes_is_refused(self, tmp_path):
        CASES["compressed-tensors, a layer left dense"].make(tmp_path)

        assert "refuses" == judge(tmp_path, "vllm")[0]

    @pytest.mark.parametrize(
        ("name", "verdict"),
        [("k_scale", "loads"), ("k_cache_scale", "loads, but"), ("kv_scaling_factor", "loads, but")],
    )
    def test_scales_of_a_cache_need_a_name_that_is_mapped(self, tmp_path, name, verdict):
        cache = {f"model.layers.0.self_attn.{name}": torch.tensor(0.5)}
        config = declare(**self.FP8["quantization_config"], kv_cache_scheme=None)

        assert verdict == judge(store(tmp_path / "m", make_fp8([UP]) | cache, config=config), "vllm")[0]

    def test_flat_scales_of_channels_are_refused(self, tmp_path):
        codes, scale = quantized_int8(numbers(64, 128))
        tensors = {f"{UP}.weight": codes, f"{UP}.weight_scale": scale.expand(64).contiguous()}
        config = declare(quant_method="compressed-tensors", format="int-quantized")
        verdict, reason = judge(store(tmp_path / "m", tensors, config=config), "vllm")

        assert "refuses" == verdict
        assert "[rows, 1]" in reason

    @pytest.mark.parametrize(
        ("fields", "expected_reason"),
        [
            ({"quant_method": "fp8"}, "activation_scheme"),
            ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "Unknown quantization method"),
            ({"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": [64, 64]}, "dynamic"),
            ({"quant_method": "gptq", "bits": 4, "group_size": 32}, "desc_act"),
            ({"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": True}, "activations"),
            ({"quant_method": "awq", "bits": 4, "group_size": 32}, "zero_point"),
            ({"quant_method": "modelopt", "quant_algo": "INT4_AWQ"}, "quant_algo"),
            (
                {
                    "quant_method": "compressed-tensors",
                    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"actorder": "group"}}},
                },
                "actorder",
            ),
        ],
    )
    def test_configuration_is_refused(self, tmp_path, fields, expected_reason):
        inspection = quanterr.inspect(
            store(tmp_path / "m", make_fp8([UP]), config=declare(**fields)), runtimes=["vllm"]
        )

        assert "refuses" == inspection.loading[0].verdict
        assert any(expected_reason in reason.message for reason in inspection.loading[0].reasons)
        assert inspection.loading[0].reasons[0].place

    @pytest.mark.parametrize(
        ("devices", "expected_reason"),
        [(1, ""), (2, ""), (3, "cannot split 4 attention heads"), (4, "would cut groups of columns")],
    )
    def test_devices_share_whole_groups_and_heads(self, tmp_path, devices, expected_reason):
        CASES["compressed-tensors packed INT4"].make(tmp_path)  # groups of 32; o_proj has 64 columns
        [verdict] = quanterr.inspect(tmp_path, runtimes=["vllm"], devices=devices).loading

        assert ("refuses" if expected_reason else "loads") == verdict.verdict
        assert expected_reason in "".join(reason.message for reason in verdict.reasons)

    @pytest.mark.parametrize(("devices", "verdict"), [(1, "loads"), (2, "loads"), (4, "refuses")])
    def test_devices_share_whole_blocks_of_rows(self, tmp_path, devices, verdict):
        CASES["FP8 in blocks"].make(tmp_path)

        assert verdict == quanterr.inspect(tmp_path, runtimes=["vllm"], devices=devices).loading[0].verdict

    @pytest.mark.parametrize(("devices", "verdict"), [(1, "loads"), (2, "refuses")])
    def test_last_block_of_columns_may_be_narrower_on_one_device(self, tmp_path, devices, verdict):
        down = "model.layers.0.mlp.down_proj"
        scales = {f"{down}.weight_scale_inv": numbers(2, 3).abs()}
        tensors = {f"{down}.weight": numbers(128, 160).to(torch.float8_e4m3fn)} | scales
        blocks = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [64, 64]}
        store(tmp_path / "m", tensors, config=declare(**blocks))

        assert verdict == quanterr.inspect(tmp_path / "m", runtimes=["vllm"], devices=devices).loading[0].verdict

    def declare_quark(self, weight=None, inputs=None, **fields):
        scheme = {"weight": OF_QUARK | (weight or {}), "input_tensors": inputs, "output_tensors": None, "bias": None}
        export = {"kv_cache_group": [], "pack_method": "reorder"}
        known = {"global_quant_config": scheme, "layer_quant_config": {}, "layer_type_quant_config": {}}
        return declare(quant_method="quark", **({"export": export} | known | fields))

    @pytest.mark.parametrize(
        ("config", "verdict"),
        [
            ({"inputs": OF_QUARK}, "loads"),
            ({"inputs": OF_QUARK | {"is_dynamic": True}}, "loads"),
            ({}, "not known"),  # weights alone have no class
            ({"inputs": OF_QUARK, "weight": {"qscheme": "per_group"}}, "not known"),
            ({"inputs": OF_QUARK, "export": {"kv_cache_group": ["*k_proj"], "pack_method": "reorder"}}, "not known"),
            ({"inputs": OF_QUARK, "layer_quant_config": {"*v_proj": {"weight": {"dtype": "int3"}}}}, "not known"),
        ],
    )
    def test_schemes_of_quark_have_a_class_or_are_not_known(self, tmp_path, config, verdict):
        path = store(tmp_path / "m", make_fp8([UP]), config=self.declare_quark(**config))

        assert verdict == judge(path, "vllm")[0]

    def test_experts_of_quark_are_not_known(self, tmp_path):
        tensors = make_fp8(["model.layers.0.mlp.experts.0.up_proj"])
        path = store(tmp_path / "m", tensors, config=self.declare_quark(inputs=OF_QUARK))

        assert ("not known", "no rule covers experts that Quark quantizes") == judge(path, "vllm")

    def test_export_of_quark_is_needed(self, tmp_path):
        path = store(tmp_path / "m", make_fp8([UP]), config=declare(quant_method="quark"))

        assert "refuses" == judge(path, "vllm")[0]

    @pytest.mark.parametrize(
        ("fields", "verdict"),
        [
            ({}, "loads"),
            ({"packing_format": "auto_round:auto_gptq"}, "loads"),
            ({"packing_format": "auto_round:auto_awq"}, "not known"),
            ({"packing_format": "auto_round"}, "not known"),
            ({"data_type": "mx_fp"}, "not known"),
            ({"sym": False}, "refuses"),
        ],
    )
    def test_auto_round_is_loaded_as_gptq(self, tmp_path, fields, verdict):
        CASES["MLX: GPTQ"].make(tmp_path)
        known = {"bits": 4, "group_size": 32, "sym": True} | fields
        (tmp_path / "config.json").write_text(json.dumps(declare(quant_method="auto-round", **known)))

        assert verdict == judge(tmp_path, "vllm")[0]

    @pytest.mark.parametrize(
        ("name", "verdict"),
        [
            ("torchao FP8", "loads"),
            ("torchao INT8", "loads"),
            ("torchao, dense tensors without description", "refuses"),
            ("bitsandbytes NF4", "refuses"),
            ("HQQ", "refuses"),
        ],
    )
    def test_codes_of_libraries_are_loaded_by_torchao_alone(self, tmp_path, name, verdict):
        CASES[name].make(tmp_path)

        assert verdict == judge(tmp_path, "vllm")[0]

    def test_class_of_transformers_is_not_known(self, tmp_path):
        config = self.FP8 | {"architectures": ["NoSuchModel"]}

        assert "not known" == judge(store(tmp_path / "m", make_fp8([UP]), config=config), "vllm")[0]


class TestSglang:
    def test_fp8_of_whole_tensors_is_loaded(self, tmp_path):
        assert ("loads", "") == judge(store(tmp_path / "m", make_fp8([UP]), config=TestVllm.FP8), "sglang")

    @pytest.mark.parametrize(("is_ordered", "of_vllm"), [(False, "loads"), (True, "refuses")])
    def test_order_of_columns_is_loaded_where_vllm_refuses_it(self, tmp_path, is_ordered, of_vllm):
        fields = {"bits": 4, "group_size": 32, "desc_act": is_ordered, "sym": True}
        CASES["MLX: GPTQ"].make(tmp_path)
        (tmp_path / "config.json").write_text(json.dumps(declare(quant_method="gptq", **fields)))

        assert ["loads", of_vllm] == [judge(tmp_path, runtime)[0] for runtime in ("sglang", "vllm")]

    def test_unknown_method_is_refused(self, tmp_path):
        path = store(tmp_path / "m", make_fp8([UP]), config=declare(quant_method="hqq"))

        assert "refuses" == judge(path, "sglang")[0]

    @pytest.mark.parametrize(
        ("architecture", "dtype", "verdict"),
        [
            ("qwen3", "Q4_K", "loads"),
            ("qwen3", "MXFP4", "refuses"),
            ("llama", "Q4_K", "not known"),  # whose q and k have another order of rows
        ],
    )
    def test_gguf_is_loaded_by_types_and_architectures(self, tmp_path, architecture, dtype, verdict):
        keys = [key("general.architecture", TEXT, architecture)]
        path = write_gguf(tmp_path / "m.gguf", [Stored("blk.0.attn_output.weight", dtype, (256, 256))], keys)

        assert [verdict, "refuses"] == [judge(path, runtime)[0] for runtime in ("sglang", "vllm")]

    def test_weights_of_quark_need_quantized_inputs(self, tmp_path):
        CASES["Quark INT4"].make(tmp_path)

        assert ["not known", "loads"] == [judge(tmp_path, runtime)[0] for runtime in ("sglang", "vllm")]


@pytest.mark.parametrize(
    ("version", "verdicts"),
    [("gemm", ["loads", "loads", "loads"]), ("gemv", ["loads", "refuses", "refuses"]), ("marlin", ["refuses"] * 3)],
)
def test_layouts_of_awq_are_loaded_by_those_that_look_at_the_version(tmp_path, version, verdicts):
    golden = Path(__file__).parents[1] / "golden" / f"awq_{version}"
    folder = next(path.parent for path in sorted(golden.rglob("config.json")))
    copied = shutil.copytree(folder, tmp_path / "m")
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(LLAMA | config))

    assert verdicts == [judge(copied, runtime)[0] for runtime in ("transformers", "vllm", "sglang")]


class TestTensorrtLlm:
    @pytest.mark.parametrize(
        ("name", "verdict", "expected_reason"),
        [
            ("plain", "loads", ""),
            ("FP8 in blocks", "refuses", "128 x 128"),
            ("compressed-tensors FP8", "loads", ""),
            ("compressed-tensors INT8", "loads, but", "takes INT8 of rows for FP8"),
            ("compressed-tensors packed INT4", "refuses", "without quantized inputs"),
            ("GGUF", "refuses", "not GGUF files"),
            ("HQQ", "not known", "no quant_method hqq"),
        ],
    )
    def test_schemes_of_floats_are_loaded(self, tmp_path, name, verdict, expected_reason):
        CASES[name].make(tmp_path)
        actual, reason = judge(find_checkpoint(tmp_path), "tensorrt-llm")

        assert (verdict, True) == (actual, expected_reason in reason)

    @pytest.mark.parametrize(("algorithm", "verdict"), [("FP8", "loads"), ("W4A8_AWQ", "not known")])
    def test_fp8_of_modelopt_is_loaded(self, tmp_path, algorithm, verdict):
        config = declare(quant_method="modelopt", quant_algo=algorithm)

        assert verdict == judge(store(tmp_path / "m", make_fp8([UP]), config=config), "tensorrt-llm")[0]

    def test_gate_may_name_tensorrt_llm(self):
        assert "tensorrt-llm" == parse("loads(tensorrt-llm)").metric


class TestOllama:
    @pytest.mark.parametrize(
        ("name", "verdict", "expected_reason"),
        [
            ("GGUF", "loads", ""),
            ("llama.cpp: unknown class", "refuses", "unknown model architecture"),
            ("plain", "loads", ""),
            ("FP8 in blocks", "loads", ""),
            ("compressed-tensors INT8", "refuses", "unknown data type"),
            ("no config.json", "refuses", "needs config.json"),
        ],
    )
    def test_gguf_and_what_it_converts_are_loaded(self, tmp_path, name, verdict, expected_reason):
        CASES[name].make(tmp_path)
        actual, reason = judge(find_checkpoint(tmp_path), "ollama")

        assert (verdict, True) == (actual, expected_reason in reason)

    def test_architecture_that_is_newer_than_its_llama_cpp_is_not_known(self, tmp_path):
        keys = [key("general.architecture", TEXT, "minimax-m3")]
        path = write_gguf(tmp_path / "m.gguf", [Stored("blk.0.attn_output.weight", "Q4_K", (256, 256))], keys)

        assert "not known" == judge(path, "ollama")[0]

    def test_fp8_without_blocks_is_refused(self, tmp_path):
        verdict, reason = judge(store(tmp_path / "m", make_fp8([UP]), config=TestVllm.FP8), "ollama")

        assert ("refuses", True) == (verdict, "missing fp8 block size" in reason)


class TestDiffusers:
    @pytest.mark.parametrize(("dtype", "verdict"), [("Q4_K", "loads"), ("IQ4_NL", "loads"), ("IQ3_S", "refuses")])
    def test_gguf_of_denoisers_is_loaded(self, tmp_path, dtype, verdict):
        assert verdict == judge(TestComfy().make_gguf(tmp_path, "flux", dtype), "diffusers")[0]

    def test_model_of_transformers_is_not_known(self, tmp_path):
        CASES["HQQ"].make(tmp_path)

        assert "not known" == judge(tmp_path, "diffusers")[0]


class TestComfy:
    BLOCK = "double_blocks.0.img_attn.qkv"

    def make(self, *, with_label=True, dtype=torch.float32):
        codes, scale = quantized_fp8(numbers(64, 64))
        tensors = {f"{self.BLOCK}.weight": codes, f"{self.BLOCK}.weight_scale": scale.to(dtype)}
        return tensors | ({f"{self.BLOCK}.comfy_quant": label(format="float8_e4m3fn")} if with_label else {})

    def test_labelled_file_is_loaded(self, tmp_path):
        assert ("loads", "") == judge(store(tmp_path / "m.safetensors", self.make()), "comfyui")

    def test_codes_without_label_are_taken_for_weights(self, tmp_path):
        verdict, reason = judge(store(tmp_path / "m.safetensors", self.make(with_label=False)), "comfyui")

        assert "loads, but" == verdict
        assert "takes codes for weights" in reason

    def test_label_without_format_is_refused(self, tmp_path):
        tensors = self.make() | {f"{self.BLOCK}.comfy_quant": label(group_size=64)}

        assert "refuses" == judge(store(tmp_path / "m.safetensors", tensors), "comfyui")[0]

    def test_scale_of_sixteen_bits_is_refused_by_older_versions(self, tmp_path):
        verdict, reason = judge(store(tmp_path / "m.safetensors", self.make(dtype=torch.bfloat16)), "comfyui")

        assert "loads, but" == verdict
        assert "NoCapableBackendError" in reason

    def make_gguf(self, folder, architecture, dtype="Q4_K"):
        keys = [key("general.architecture", TEXT, architecture)]
        return write_gguf(folder / "m.gguf", [Stored(f"{self.BLOCK}.weight", dtype, (256, 256))], keys)

    @pytest.mark.parametrize(
        ("architecture", "dtype", "verdict"),
        [
            ("flux", "Q4_K", "loads"),
            ("flux", "IQ3_S", "loads"),
            ("flux", "Q4_K_R4", "refuses"),
            ("flux", "IQ4_K", "not known"),
            ("llama", "Q4_K", "not known"),
            ("bert", "Q4_K", "refuses"),
        ],
    )
    def test_gguf_of_denoisers_is_loaded(self, tmp_path, architecture, dtype, verdict):
        assert verdict == judge(self.make_gguf(tmp_path, architecture, dtype), "comfyui")[0]

    def test_unrecognized_names_give_the_verdict_not_known(self, tmp_path):
        assert "not known" == judge(store(tmp_path / "m.safetensors", make_fp8(["a"])), "comfyui")[0]


class TestLlamaCpp:
    def test_keys_of_the_architecture_are_needed(self, tmp_path):
        CASES["GGUF of an unknown class"].make(tmp_path)  # a class that only transformers does not know
        verdict, reason = judge(find_checkpoint(tmp_path), "llama.cpp")

        assert ("refuses", True) == (verdict, "grok.expert_count" in reason)

    def make(self, folder, dtype, *keys):
        sizes = {"context_length": 64, "embedding_length": 256, "block_count": 1}
        known = [key(f"llama.{name}", U32, n) for name, n in sizes.items()]
        known.append(key("llama.attention.layer_norm_rms_epsilon", F32, 1e-5))
        tensors = [Stored("blk.0.attn_output.weight", dtype, (256, 256))]
        return write_gguf(folder / "m.gguf", tensors, [*LLAMA_KEYS, *known, *keys])

    @pytest.mark.parametrize(
        ("dtype", "theirs", "forks"),
        [
            ("Q4_K", "loads", "loads"),
            ("IQ2_K", "refuses", "loads"),
            ("TQ1_0", "loads", "not known"),
            ("Q4_K_R4", "refuses", "loads"),
        ],
    )
    def test_types_of_forks_are_loaded_by_forks(self, tmp_path, dtype, theirs, forks):
        path = self.make(tmp_path, dtype, key("tokenizer.ggml.model", TEXT, "llama"))

        assert [theirs, forks] == [judge(path, runtime)[0] for runtime in ("llama.cpp", "ik_llama.cpp")]

    def test_file_without_tokenizer_is_refused(self, tmp_path):
        verdict, reason = judge(self.make(tmp_path, "Q4_K"), "llama.cpp")

        assert "refuses" == verdict
        assert "tokenizer.ggml.model" in reason

    def test_other_files_are_refused(self, tmp_path):
        assert "refuses" == judge(store(tmp_path / "m", make_fp8([UP]), config=LLAMA), "llama.cpp")[0]


class TestTransformers:
    @pytest.mark.parametrize(("scales", "verdict"), [([], "loads"), (["blk.0.attn_output.scale"], "loads, but")])
    def test_scale_beside_nvfp4_is_not_applied(self, tmp_path, scales, verdict):
        tensors = [
            Stored("blk.0.attn_output.weight", "NVFP4", (256, 256)),
            *(Stored(scale, "F32", (1,)) for scale in scales),
        ]

        assert verdict == judge(write_gguf(tmp_path / "m.gguf", tensors, LLAMA_KEYS), "transformers")[0]

    @pytest.mark.parametrize("dtype", ["Q4_K_R4", "IQ4_K"])
    def test_types_of_forks_are_refused(self, tmp_path, dtype):
        tensors = [Stored("blk.0.attn_output.weight", dtype, (256, 256))]

        assert "refuses" == judge(write_gguf(tmp_path / "m.gguf", tensors, LLAMA_KEYS), "transformers")[0]


class TestExllama:
    def make_exl3(self, folder, **fields):
        tensors = {
            f"{UP}.trellis": torch.zeros(8, 8, 64, dtype=torch.int16),
            f"{UP}.suh": torch.ones(128, dtype=torch.float16),
            f"{UP}.svh": torch.ones(128, dtype=torch.float16),
        }
        return store(folder / "m", tensors, config=declare(quant_method="exl3", bits=4, **fields))

    def test_codes_of_exl3_are_loaded(self, tmp_path):
        path = self.make_exl3(tmp_path)

        assert ["loads", "refuses"] == [judge(path, runtime)[0] for runtime in ("exllamav3", "vllm")]

    @pytest.mark.parametrize(
        ("name", "verdict"),
        [("plain", "loads"), ("FP8 in blocks", "loads"), ("MLX: GPTQ", "refuses"), ("GGUF", "refuses")],
    )
    def test_codes_of_other_names_are_refused(self, tmp_path, name, verdict):
        CASES[name].make(tmp_path)

        assert verdict == judge(find_checkpoint(tmp_path), "exllamav3")[0]

    @pytest.mark.parametrize("names", [["NoSuchModel"], ["LlamaForCausalLM"] * 2])
    def test_unknown_model_class_is_refused(self, tmp_path, names):
        path = store(tmp_path / "m", {f"{UP}.weight": numbers(64, 64)}, config={"architectures": names})

        assert "refuses" == judge(path, "exllamav3")[0]


class TestReported:
    """Files that people reported, with correct numbers, which the cases above do not cover."""

    def make_block(self, folder, names, config, **more):
        tensors = make_fp8([f"model.layers.{n}.self_attn.{name}_proj" for n, name in names])
        return store(folder / "m", tensors | more, config=config)

    @pytest.mark.parametrize(("is_shared", "verdict"), [(True, "loads"), (False, "refuses")])
    def test_keys_that_are_values_need_no_projection_of_values(self, tmp_path, is_shared, verdict):
        names = [(n, letter) for n in range(6) for letter in "qkvo" if (n, letter) != (5, "v")]
        model = {"model_type": "gemma4_text", "architectures": ["Gemma4ForCausalLM"], "attention_k_eq_v": is_shared}

        assert verdict == judge(self.make_block(tmp_path, names, TestVllm.FP8 | model), "vllm")[0]

    def test_vocabulary_with_another_number_of_rows_is_reported(self, tmp_path):
        more = {"model.embed_tokens.weight": numbers(32, 64)}
        verdict, reason = judge(
            self.make_block(tmp_path, [(0, "q")], TestVllm.FP8 | {"vocab_size": 40}, **more), "vllm"
        )

        assert ("loads, but", True) == (verdict, "declares vocab_size 40" in reason)

    def test_tied_head_with_codes_of_its_own_is_not_used(self, tmp_path):
        codes, scale = quantized_fp8(numbers(32, 64))
        more = {"model.embed_tokens.weight": numbers(32, 64), "lm_head.weight": codes, "lm_head.weight_scale": scale}
        config = TestVllm.FP8 | {"tie_word_embeddings": True}
        verdict, reason = judge(self.make_block(tmp_path, [(0, "q")], config, **more), "vllm")

        assert ("loads, but", True) == (verdict, "lm_head.weight is quantized separately" in reason)

    @pytest.mark.parametrize(("ignored", "verdict"), [("in_proj_qkvz", "loads"), ("in_proj_qkv", "refuses")])
    def test_ignored_layers_need_the_names_that_are_stored(self, tmp_path, ignored, verdict):
        CASES["compressed-tensors packed INT4"].make(tmp_path)
        stem = "model.layers.0.linear_attn."
        tensors = load_file(tmp_path / "model.safetensors") | {f"{stem}in_proj_qkvz.weight": numbers(128, 64)}
        save_file(tensors, tmp_path / "model.safetensors")
        config = json.loads((tmp_path / "config.json").read_text())
        config["quantization_config"]["ignore"] = ["lm_head", stem + ignored]
        (tmp_path / "config.json").write_text(json.dumps(config))

        assert verdict == judge(tmp_path, "vllm")[0]

    def test_stacked_experts_stay_random_under_transformers(self, tmp_path):
        stem = "model.layers.0.mlp.experts.gate_up_proj"
        tensors = {f"{stem}_packed": torch.zeros(2, 8, 16, dtype=torch.int32), f"{stem}_scale": torch.ones(2, 8, 1)}
        config = declare(quant_method="compressed-tensors", format="pack-quantized")
        verdict, reason = judge(store(tmp_path / "m", tensors, config=config), "transformers")

        assert ("loads, but", True) == (verdict, "keep random values" in reason)

    def test_nvfp4_without_label_is_refused_by_comfyui(self, tmp_path):
        name = f"{TestComfy.BLOCK}.weight"
        scales = {f"{name}_scale": fp8_codes(64, 4).abs(), f"{name}_scale_2": torch.tensor(0.1)}
        path = store(tmp_path / "m.safetensors", {name: torch.zeros(64, 32, dtype=torch.uint8)} | scales)

        assert "refuses" == judge(path, "comfyui")[0]

    @pytest.mark.parametrize(
        ("is_ordered", "is_stored", "verdict"),
        [(True, True, "loads"), (True, False, "loads, but"), (False, False, "loads")],
    )
    def test_lost_order_of_columns_is_reported(self, tmp_path, is_ordered, is_stored, verdict):
        CASES["MLX: GPTQ"].make(tmp_path)
        fields = {"bits": 4, "group_size": 32, "desc_act": is_ordered, "sym": True}
        (tmp_path / "config.json").write_text(json.dumps(declare(quant_method="gptq", **fields)))
        tensors = load_file(tmp_path / "model.safetensors")
        kept = {name: tensor for name, tensor in tensors.items() if is_stored or not name.endswith("g_idx")}
        save_file(kept, tmp_path / "model.safetensors")

        assert [verdict] * 2 == [judge(tmp_path, runtime)[0] for runtime in ("transformers", "sglang")]


class TestCompared:
    """Faults that show only in a comparison with the original."""

    def judge(self, folder, original, quantized, config, runtime, of_original=LLAMA):
        before = store(folder / "original", original, config=of_original)
        after = store(folder / "quantized", quantized, config=config)
        [verdict] = quanterr.compare(before, after, runtimes=[runtime], device="cpu").loading
        return verdict.verdict, verdict.reasons[0].message if verdict.reasons else ""

    def make_nvfp4(self, name, x, factor):
        """Return NVFP4 of compressed-tensors, whose scales of 16 columns are multiplied by ``factor``."""
        groups = x.float().unflatten(1, (-1, 16))
        scale = (groups.abs().amax(2) / 6 * factor).to(torch.float8_e4m3fn)
        levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        exact = groups / (scale.float() / factor)[..., None]
        codes = (exact.abs()[..., None] - levels).abs().argmin(-1) + 8 * (exact < 0)
        codes = codes.flatten(1).to(torch.uint8)
        return {
            f"{name}.weight_packed": codes[:, ::2] | (codes[:, 1::2] << 4),
            f"{name}.weight_scale": scale,
            f"{name}.weight_global_scale": torch.tensor([float(factor)]),
        }

    @pytest.mark.parametrize(("ratio", "verdict"), [(1, "loads"), (1.1, "loads, but"), (4, "loads, but")])
    @pytest.mark.parametrize("runtime", ["vllm", "sglang"])
    def test_fused_weights_share_one_global_scale(self, tmp_path, ratio, verdict, runtime):
        names = {f"model.layers.0.self_attn.{letter}_proj": 1000 / (ratio if letter == "k" else 1) for letter in "qkv"}
        x = {f"{name}.weight": numbers(64, 128, seed=n) for n, name in enumerate(names)}
        y = {
            key: tensor
            for name, factor in names.items()
            for key, tensor in self.make_nvfp4(name, x[f"{name}.weight"], factor).items()
        }
        weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
        groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
        config = declare(quant_method="compressed-tensors", format="nvfp4-pack-quantized", config_groups=groups)
        actual, reason = self.judge(tmp_path, x, y, config, runtime)

        assert verdict == actual
        assert ("global scales differ" in reason) == (ratio != 1)

    @pytest.mark.parametrize(("shift", "verdict"), [(1, "loads"), (2, "loads, but"), (0, "loads, but")])
    def test_norms_are_shifted_once_under_mlx(self, tmp_path, shift, verdict):
        norms = {f"model.layers.0.{name}_layernorm.weight": numbers(64) / 10 for name in ("input", "post_attention")}
        weight = numbers(128, 64)
        of_mlx = {"group_size": 32, "bits": 4}
        model = {"model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"]}
        y = by_mlx(UP, weight.float()) | {name: norm + shift for name, norm in norms.items()}
        x = {f"{UP}.weight": weight} | norms

        assert verdict == self.judge(tmp_path, x, y, model | {"quantization": of_mlx}, "mlx", of_original=model)[0]

    @pytest.mark.parametrize(("less", "verdict"), [(1, "loads"), (0, "loads, but")])
    def test_zero_points_are_those_of_the_declared_version(self, tmp_path, less, verdict):
        weight = numbers(64, 128)
        groups = weight.float().unflatten(1, (-1, 32))
        scale = ((groups.amax(2) - groups.amin(2)) / 15).half().float()
        zeros = (-groups.amin(2) / scale).round().clamp(1, 15)
        codes = ((groups / scale[..., None]).round() + zeros[..., None]).clamp(0, 15).flatten(1)
        parts = {"qweight": pack(codes).T, "qzeros": pack((zeros - less).T), "scales": scale.T.half()}
        tensors = {f"{UP}.{part}": tensor.contiguous() for part, tensor in parts.items()}
        fields = {"bits": 4, "group_size": 32, "desc_act": False, "sym": False, "checkpoint_format": "gptq"}
        config = declare(quant_method="gptq", **fields)

        assert verdict == self.judge(tmp_path, {f"{UP}.weight": weight}, tensors, config, "transformers")[0]

    def test_rotary_base_missing_from_the_metadata_is_reported(self, tmp_path):
        weight = {"model.layers.0.self_attn.o_proj.weight": numbers(256, 256)}
        config = LLAMA | {"rope_theta": 500000.0, "hidden_size": 256, "num_hidden_layers": 1}
        original = store(tmp_path / "original", weight, config=config)
        path = TestLlamaCpp().make(tmp_path, "Q4_K", key("tokenizer.ggml.model", TEXT, "llama"))
        [verdict] = quanterr.compare(original, path, runtimes=["llama.cpp"], device="cpu").loading

        assert "loads, but" == verdict.verdict
        assert "lacks llama.rope.freq_base" in verdict.reasons[0].message


class TestAnswers:
    @pytest.mark.parametrize("value", [["llama"], {"llama": 1}, 5, True, None, ""])
    @pytest.mark.parametrize("key", ["model_type", "architectures", "quant_method", "format"])
    def test_value_of_another_type_is_not_taken_for_a_name(self, tmp_path, key, value):
        CASES["compressed-tensors packed INT4"].make(tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())
        place = config if key in config else config["quantization_config"]
        place[key] = [value] if key == "architectures" else value
        (tmp_path / "config.json").write_text(json.dumps(config))
        loading = quanterr.inspect(tmp_path, runtimes=["all"]).loading

        assert "loads" not in {verdict.verdict for verdict in loading if verdict.runtime in ("MLX", "llama.cpp")}
        if key == "model_type":
            assert {"refuses"} == {verdict.verdict for verdict in loading if verdict.runtime in ("transformers", "MLX")}

    def test_weight_of_no_format_is_not_known(self, tmp_path):
        tensors = {f"{UP}.weight": fp8_codes(4, 64), f"{UP}.weight_scale": torch.ones(3, 1)}
        config = declare(quant_method="compressed-tensors")

        assert "not known" == judge(store(tmp_path / "m", tensors, config=config), "vllm")[0]

    def test_unknown_runtime_is_wrong_usage(self, tmp_path):
        with pytest.raises(UsageError, match=r"no rules for the runtime vlm: choose from transformers, vllm"):
            quanterr.inspect(store(tmp_path / "m", make_fp8([UP]), config=LLAMA), runtimes=["vlm"])

    def test_help_and_guide_name_each_runtime(self):
        shown = list_options(InspectOptions)["runtimes"].help
        names = [runtime.name.lower() for runtime in RUNTIMES]

        assert names == re.findall(r"[\w.-]+", shown.partition(": ")[2].partition(", or all")[0])
        assert all(f"`{name}`" in guide.read_page("inspect") for name in names)

    def test_no_devices_are_wrong_usage(self, tmp_path):
        with pytest.raises(UsageError, match="devices 0: must be at least 1"):
            quanterr.inspect(store(tmp_path / "m", make_fp8([UP]), config=LLAMA), runtimes=["vllm"], devices=0)

    def test_no_runtime_is_judged_unasked(self, tmp_path):
        assert [] == quanterr.inspect(store(tmp_path / "m", make_fp8([UP]), config=LLAMA)).loading

    @pytest.mark.parametrize(
        ("wanted", "status"), [("vllm", Status.OK), ("vllm,llama.cpp", Status.INCONCLUSIVE), ("mlx, all", Status.OK)]
    )
    def test_command_fails_unless_each_named_runtime_loads(self, tmp_path, wanted, status):
        path = store(tmp_path / "m", make_fp8([UP]), config=TestVllm.FP8)
        done = CliRunner().invoke(app, ["inspect", str(path), "--for", wanted])

        assert status == done.exit_code
        assert "vLLM (0.33.0): loads (read)" in done.output

    @pytest.mark.parametrize(
        ("wanted", "verdict"), [(["vllm"], "pass"), (["vllm", "llama.cpp"], "inconclusive"), (["all"], "pass")]
    )
    def test_comparison_of_a_file_that_is_refused_is_inconclusive(self, tmp_path, wanted, verdict):
        path = store(tmp_path / "m", make_fp8([UP]), config=TestVllm.FP8)
        report = quanterr.compare(path, path, runtimes=wanted, device="cpu")

        assert verdict == report.verdict
        assert ("llama.cpp" in report.reasons[0]) == (verdict == "inconclusive")
        assert report.loading == quanterr.inspect(path, runtimes=wanted).loading

    def test_comparison_shows_who_loads_the_file(self, tmp_path):
        path = store(tmp_path / "m", make_fp8([UP]), config=TestVllm.FP8)
        done = CliRunner().invoke(app, ["compare", str(path), str(path), "--for", "vllm,mlx", "-v"])

        assert Status.INCONCLUSIVE == done.exit_code
        assert "MLX (mlx-lm 0.32.2): not known" in done.output
        assert "Whether it loads" in done.output

    def test_command_takes_the_number_of_devices(self, tmp_path):
        CASES["FP8 in blocks"].make(tmp_path)
        done = CliRunner().invoke(app, ["inspect", str(tmp_path), "--for", "vllm", "--tp", "4"])

        assert Status.INCONCLUSIVE == done.exit_code
        assert "among 4 devices" in done.output
