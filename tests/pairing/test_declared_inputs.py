"""Declarations about inputs, keys and values in producers' own files, compared with their libraries' behaviour."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.making import numbers, store

import quanterr
from quanterr.checkpoints import Entry
from quanterr.checkpoints.ggml_types import BLOCKS, INPUT_SCHEMES
from quanterr.checkpoints.labels import Label
from quanterr.declarations import Declarations
from quanterr.findings.caches import report_cache_scales, report_lone_rotations
from quanterr.pairing.inputs import _read_comfy, _read_module, find_cache_scales
from quanterr.pairing.transforms import find_lone_transforms, find_online_transforms

FOLDER = Path(__file__).parents[1] / "golden_declared"  # make.py in that folder documents the files
CASES = [
    (path.stem, setting) for path in sorted(FOLDER.glob("*.json")) for setting in json.loads(path.read_text())["cases"]
]
SIZES = {"F8_E4M3": 1, "I8": 1, "U8": 1, "F16": 2, "BF16": 2, "F32": 4, "I32": 4, "I64": 8}


def write(
    folder: Path, producer: str, setting: str, without: str | tuple[str, ...] = ""
) -> tuple[Path, dict[str, str]]:
    """Write a checkpoint of zeros with these headers, except names ending in ``without``; return its declarations."""
    case = json.loads((FOLDER / f"{producer}.json").read_text())["cases"][setting]
    header, end = {}, 0
    for name, (dtype, shape) in case["tensors"].items():
        if without and name.endswith(without):
            continue
        size = SIZES[dtype]
        for edge in shape:
            size *= edge
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps({"__metadata__": case.get("metadata", {}) | {"format": "pt"}, **header}).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)  # zeros
    (folder / "config.json").write_text(json.dumps({"quantization_config": case["config"]}))
    return folder, case["declared"]


@pytest.mark.parametrize(("producer", "setting"), CASES)
def test_inspect_agrees_with_the_producer_library(producer, setting, tmp_path):
    folder, declared = write(tmp_path, producer, setting)
    inspection = quanterr.inspect(folder)

    assert declared == {w.name.removesuffix(".weight"): w.activations for w in inspection.weights if w.activations}


MISSING = ("missing_input_scale", "missing_kv_scale")


@pytest.mark.parametrize(("producer", "setting"), CASES)
def test_producer_files_lack_no_scale(producer, setting, tmp_path):
    inspection = quanterr.inspect(write(tmp_path, producer, setting)[0])

    assert [] == [finding.code for finding in inspection.findings if finding.code in MISSING]


@pytest.mark.parametrize(
    ("without", "message"),
    [
        (".k_scale", "scales of keys are missing for 1 attention module: model.layers.0.self_attn; vLLM refuses"),
        (".v_scale", "scales of values are missing for 1 attention module: model.layers.0.self_attn; vLLM uses those"),
        ((".k_scale", ".v_scale"), "scales of keys and values are missing for 1 attention module"),
    ],
    ids=["k", "v", "both"],
)
def test_declared_cache_without_scales_is_a_finding(without, message, tmp_path):
    inspection = quanterr.inspect(write(tmp_path, "modelopt", "FP8_KV", without)[0])
    (missing,) = (finding for finding in inspection.findings if finding.code in MISSING)

    assert ("fp8", "missing_kv_scale", "warning") == (inspection.kv, missing.code, missing.severity)
    assert ["model.layers.0.self_attn"] == missing.evidence["modules"]
    assert message in missing.message


def cache_findings(stored, **scheme):
    sizes = {"a.k_proj.weight": 64} | stored
    entries = {name: Entry(name, "F32", (n,), None, 0, 4 * n) for name, n in sizes.items()}
    declared = {"type": "float", "num_bits": 8, "strategy": "tensor", "dynamic": False} | scheme
    findings = report_cache_scales(find_cache_scales({"kv_cache_scheme": declared}, entries))
    return [(finding.code, finding.severity, finding.message) for finding in findings]


def test_scale_shared_by_keys_and_values_is_not_missing():
    ((code, severity, message),) = cache_findings({"a.kv_scale": 1})

    assert ("missing_kv_scale", "info") == (code, severity)
    assert "keys and values share one scale, kv_scale, in 1 attention module: a; vLLM uses it for both" in message


def test_scales_with_several_numbers_are_not_missing():
    ((code, severity, message),) = cache_findings({"a.k_scale": 128, "a.v_scale": 128})

    assert ("scale_misfit", "warning") == (code, severity)
    assert "several numbers in 2 tensors, where one was declared: a.k_scale (128), a.v_scale (128)" in message


def test_declared_scales_by_head_are_silent():
    assert [] == cache_findings({"a.k_scale": 4, "a.v_scale": 4}, strategy="attn_head")


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        (["weight_input", "weight_output"], []),
        (["weight_input", "input"], ["r4 (input)"]),
        (["k_cache"], ["r4 (k_cache)"]),
    ],
)
def test_input_rotations_are_distinguished_from_fused_ones(places, expected):
    apply = [{"targets": ["Linear"], "location": place} for place in places]
    config = {"transform_config": {"config_groups": {"r4": {"type": "hadamard", "apply": apply}}}}

    assert expected == find_online_transforms(config, [])


# compressed-tensors stores the matrix once, beside the layer
STORED_MATRIX = {"model.layers.0.mlp.down_proj.r4_input.weight": None}


@pytest.mark.parametrize(
    ("matrix_type", "places", "entries", "expected"),
    [
        ("hadamard", ["weight_input", "input"], {}, []),
        ("random-hadamard", ["weight_input", "input"], STORED_MATRIX, []),
        ("random-hadamard", ["weight_output", "weight_input"], {}, []),
        ("hadamard", ["q_attn", "k_cache"], {}, []),
        ("hadamard", ["weight_input"], {}, ["applied as weight_input only"]),
        ("random-hadamard", ["weight_input", "input"], {}, ["r4_input.weight, is not stored"]),
    ],
)
def test_rotation_without_its_counterpart_is_noticed(matrix_type, places, entries, expected):
    apply = [{"targets": ["re:.*down_proj$"], "location": place} for place in places]
    config = {"transform_config": {"config_groups": {"r4": {"type": matrix_type, "apply": apply}}}}
    findings = list(report_lone_rotations(find_lone_transforms(config, entries)))

    assert [("missing_rotation", "warning")] * len(expected) == [
        (finding.code, finding.severity) for finding in findings
    ]
    for finding, words in zip(findings, expected, strict=True):
        assert words in finding.message


@pytest.mark.parametrize(
    ("producer", "setting", "without"),
    [
        ("compressed_tensors", "FP8", ".input_scale"),
        ("compressed_tensors", "NVFP4", ".input_global_scale"),
        ("modelopt", "INT8_SMOOTHQUANT", ".input_scale"),
        ("quark", "fp8", ".input_scale"),
        ("quark", "nvfp4", ".input_scale_2"),
    ],
)
def test_missing_static_scale_is_not_made_up(producer, setting, without, tmp_path):
    inspection = quanterr.inspect(write(tmp_path, producer, setting, without)[0])
    (missing,) = (finding for finding in inspection.findings if finding.code == "missing_input_scale")

    assert {"unknown": 7} == inspection.activations
    assert 7 == len(missing.evidence["layers"])
    assert f"{without[1:]} is missing for 7 weights: " in missing.message


AO, INT8 = "Float8DynamicActivationFloat8WeightConfig", "Int8DynamicActivationInt8WeightConfig"


def torchao(class_name: str, **fields: object) -> dict[str, object]:
    return {"_type": class_name, "_version": 2, "_data": fields}


@pytest.mark.parametrize(
    ("quant_type", "expected"),
    [
        ({"default": torchao(AO, granularity=[{"_type": "PerRow"}, {"_type": "PerRow"}])}, "fp8_token"),
        ({"default": torchao(AO, granularity=[{"_type": "PerTensor"}, {"_type": "PerTensor"}])}, "fp8_tensor"),
        ({"default": torchao(INT8, granularity={"_type": "PerTensor"})}, "int8_tensor"),
        ({"default": torchao(INT8, act_mapping_type={"_data": "ASYMMETRIC"})}, "int8_token_asym"),
        ({"default": torchao("Int8DynamicActivationIntxWeightConfig")}, "int8_token_asym"),
        ({"default": torchao("Int8StaticActivationInt8WeightConfig")}, ""),
        ({"default": torchao("Int8WeightOnlyConfig")}, None),
        ({"default": torchao("FqnToConfig", fqn_to_config={"a": torchao(AO), "_default": None})}, "fp8_tensor"),
        ({"default": torchao("FqnToConfig", fqn_to_config={"b": torchao(AO), "_default": None})}, None),
        ({"default": torchao("FqnToConfig", fqn_to_config={"re:[ac]": torchao(AO)})}, "fp8_tensor"),
        ("int8_dynamic_activation_int8_weight", ""),
    ],
)  # fmt: skip
def test_torchao_configurations_are_read_field_by_field(quant_type, expected):
    declarations = Declarations({"quant_method": "torchao", "quant_type": quant_type})
    inputs = _read_module("a", SimpleNamespace(of=lambda _weight: (), declarations=declarations), {})

    assert expected == (None if inputs is None else inputs.scheme)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"format": "float8_e4m3fn"}, "fp8_static"),
        ({"format": "float8_e4m3fn", "full_precision_matrix_mult": True}, None),
        ({"format": "mxfp8"}, "mxfp8_ceil"),
        ({"format": "int8_tensorwise", "convrot": True}, "int8_token"),
        ({"format": "convrot_w4a4"}, "int4_token_narrow"),
        ({"format": "convrot_w4a4", "linear_dtype": "int8"}, "int8_token"),
        ({"format": "asym_w4a8_int8"}, "int8_token"),
        ({"format": "svdquant_w4a4"}, "int4_g64_narrow"),
        ({"format": "svdquant_w4a4", "act_unsigned": True}, ""),
        ({"format": "awq_w4a16"}, None),
    ],
)
def test_comfyui_labels_determine_input_rounding(fields, expected):
    inputs = _read_comfy("a", Label("tensor", fields), {})

    assert expected == (None if inputs is None else inputs.scheme)


def test_every_ggml_type_rounds_inputs_to_its_vec_dot_type():
    """Copied from type_traits_cpu in ggml-cpu.c; Q8_1, for Q4_1 and Q5_1, has the codes of Q8_0.

    ik_llama.cpp's types come from type_traits in its ggml.c, as compiled for AVX2; Q8_2_X4 has the codes of Q8_0.
    """
    blocks_of_32 = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4", "NVFP4", "Q1_0", "Q2_0", "Q6_0"]
    blocks_of_32 += ["Q4_0_R8", "Q5_0_R4", "Q6_0_R4", "Q8_0_R8", "IQ4_NL_R4", "MXFP4_R8"]
    blocks_of_32 += ["IQ1_KT", "IQ2_KT", "IQ3_KT", "IQ4_KT"]
    others = {"PQ2_0", "PTQ1_0", "I2_S", "Q8_KV", "Q8_KV_R8", "IQ1_BN", "IQ2_BN", "IQ2_BN_R4", "IQ1_S_R4", "IQ1_M_R4"}
    others |= {"Q4_0_ROCMFP4", "Q4_0_ROCMFP4_FAST"}
    expected = dict.fromkeys(BLOCKS, "q8_k") | dict.fromkeys(blocks_of_32, "q8_0")

    assert {name: scheme for name, scheme in expected.items() if name in {*BLOCKS} - others} == INPUT_SCHEMES


@pytest.mark.parametrize(
    "lacking", [{0: "kv"}, {0: "v"}, {}, dict.fromkeys(range(3), "kv"), dict.fromkeys(range(8), "kv")]
)
def test_scales_that_few_modules_lack_are_missing_although_no_cache_is_declared(tmp_path, lacking):
    tensors = {}
    for block in range(8):
        module = f"model.layers.{block}.self_attn"
        tensors[f"{module}.k_proj.weight"] = numbers(8, 8, seed=block)
        tensors |= {f"{module}.{item}_scale": torch.tensor(0.1) for item in "kv" if item not in lacking.get(block, "")}
    findings = quanterr.inspect(store(tmp_path / "model", tensors, config={"model_type": "llama"})).findings
    reported = [(item.severity, item.evidence["modules"]) for item in findings if item.code == "missing_kv_scale"]

    assert reported == ([("warning", ["model.layers.0.self_attn"])] if len(lacking) == 1 else [])
