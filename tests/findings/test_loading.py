"""Codes that loaders do not read as codes, and the declarations that config.json and labels need."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from mutation.coding import sound
from mutation.layouts import bnb, find_layout, gptq, labelled_int8, nvfp4
from safetensors.torch import save_file
from support.gguf_stored import Stored, architecture, key, write_gguf
from support.making import numbers, store

import quanterr
from quanterr.findings.attention_heads import Heads
from quanterr.findings.families import FAMILIES, KNOWN_METHODS
from quanterr.formats import FORMATS

GOLDEN = Path(__file__).parents[1] / "golden"
MODEL = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
UINT32 = 4  # type of a GGUF key
NAME = "model.layers.0.self_attn.q_proj.weight"
OTHER_WEIGHT = "model.layers.0.mlp.up_proj.weight"
CASES = {
    "gptq": "gptq/gptq_v1_w8_g128_sym",
    "awq": "awq_gemm/awq_gemm_g128",
    "fp8": "fp8_row/ct_fp8_channel.safetensors",
    "int8": "ct_int/handmade_order",
}
SHAPES = {"q": (64, 64), "k": (32, 64), "v": (32, 64), "o": (64, 64)}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
X = numbers(128, 256).float()


def folder(path, tensors, config=MODEL):
    """Write a checkpoint in Hugging Face's layout."""
    return store(path, tensors, config=config)


def of_golden(path, case, config):
    """Write a golden file in this layout, next to another config.json."""
    path.mkdir()
    source = GOLDEN / case
    files = source.glob("*.safetensors") if source.is_dir() else [source]
    for file in files:
        shutil.copy(file, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    return path


def select_findings(checkpoint, code="undeclared_codes"):
    return [finding for finding in quanterr.inspect(checkpoint).findings if finding.code == code]


def compare(tmp_path, x, y, config):
    """Return findings about these tensors for an original, by code."""
    report = quanterr.compare(
        store(tmp_path / "x.safetensors", x), folder(tmp_path / "y", y, MODEL | config), device="cpu"
    )
    return {finding.code: finding for finding in report.findings}


class TestUndeclared:
    @pytest.mark.parametrize(
        ("case", "does"),
        [
            ("gptq/gptq_v1_w8_g128_sym", "which is not stored, and refuse"),
            ("torchao_int8/handmade_pre_scale.safetensors", "which is not stored, and refuse"),
            ("torchao_fp8/torchao_granularities.safetensors", "which is not stored, and refuse"),
            ("awq_gemm/awq_gemm_g128", "which is not stored, and refuse"),
            ("ct_pack/ct_w4a16_g32_asym", "which is not stored, and refuse"),
            ("bnb_nf4/bnb_nf4_double_quant.safetensors", "refuse codes of another shape"),
            ("mlx_affine/mlx_5_bits.safetensors", "refuse codes of another shape"),
            ("fp8_block/fp8_block128_scale_inv.safetensors", "take its codes for weights"),
            ("fp8_row/ct_fp8_channel.safetensors", "take its codes for weights"),
            ("nvfp4/modelopt_nvfp4.safetensors", "refuse codes of another shape"),
        ],
    )
    def test_undeclared_codes_are_reported(self, tmp_path, case, does):
        (finding,) = select_findings(of_golden(tmp_path / "y", case, MODEL | {"quantization_config": None}))

        assert ("warning" if case.startswith("fp8_row/") else "error") == finding.severity
        assert "config.json declares no quantization, but " in finding.message
        assert does in finding.message

    @pytest.mark.parametrize(
        "config",
        [
            {"hidden_size": 64},
            {"_class_name": "FluxTransformer2DModel"},
            MODEL | {"quantization_config": {"quant_method": "compressed-tensors"}},
            MODEL | {"text_config": {"quantization_config": {"quant_method": "fp8"}}},
            MODEL | {"thinker_config": {"text_config": {"quantization_config": {"quant_method": "fp8"}}}},
        ],
        ids=["no model", "diffusers", "declared", "declared for the text", "declared deeper"],
    )
    def test_declared_codes_and_other_configs_are_silent(self, tmp_path, config):
        assert [] == select_findings(of_golden(tmp_path / "y", "fp8_row/ct_fp8_channel.safetensors", config))

    @pytest.mark.parametrize("name", ["hf_quant_config.json", "quantize_config.json", "quant_model_description.json"])
    def test_another_file_may_declare_the_codes(self, tmp_path, name):
        path = of_golden(tmp_path / "y", "fp8_row/ct_fp8_channel.safetensors", MODEL)
        (path / name).write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))

        assert [] == select_findings(path)

    def test_header_may_declare_the_codes(self, tmp_path):
        x = numbers(64, 64).float()
        tensors = {NAME: x.to(torch.float8_e4m3fn), f"{NAME}_scale": torch.ones(64, 1)}
        path = folder(tmp_path / "y", {})
        save_file(tensors, path / "model.safetensors", {"quantization": "fp8"})

        assert [] == select_findings(path)

    def test_files_with_other_names_belong_to_other_programs(self, tmp_path):
        path = of_golden(tmp_path / "y", "fp8_row/ct_fp8_channel.safetensors", MODEL)
        file = (path / "model.safetensors").rename(path / "denoiser_fp8.safetensors")

        assert [] == select_findings(file)

    def test_numbers_and_casts_need_no_declaration(self, tmp_path):
        x = numbers(64, 64).float()

        assert [] == select_findings(folder(tmp_path / "y", {NAME: x, OTHER_WEIGHT: x.to(torch.float8_e4m3fn)}))


class TestLabels:
    def tensors(self, labels):
        layout, stored_tensors = find_layout("INT8 128 × 128"), {}
        for n in range(3):
            name = f"blocks.{n}.attn.weight"
            stored = labelled_int8(name, sound(layout, numbers(256, 256, seed=n).float()))
            stored_tensors |= {key: value for key, value in stored.items() if "comfy" not in key or n in labels}
        return stored_tensors

    def test_layer_without_a_label_among_labelled_ones_is_an_error(self, tmp_path):
        (finding,) = select_findings(store(tmp_path / "y.safetensors", self.tensors((0, 2))))

        assert ("error", ["blocks.1.attn.weight"]) == (finding.severity, finding.evidence["layers"])
        assert "1 weight has codes and scales, but no comfy_quant label as others have: blocks.1." in finding.message

    @pytest.mark.parametrize(("labels", "severities"), [((0, 1, 2), []), ((), ["info"])])
    def test_labels_must_cover_all_layers_or_none(self, tmp_path, labels, severities):
        findings = select_findings(store(tmp_path / "y.safetensors", self.tensors(labels)))

        assert severities == [finding.severity for finding in findings]

    @pytest.mark.parametrize("in_header", [True, False])
    def test_label_without_a_format_is_a_warning(self, tmp_path, in_header):
        tensors = self.tensors((0, 1, 2))
        bare = {"convrot": False}
        text = torch.frombuffer(bytearray(json.dumps(bare).encode()), dtype=torch.uint8)
        header = {"_quantization_metadata": json.dumps({"layers": {"blocks.1.attn": bare}})}
        tensors |= {} if in_header else {"blocks.1.attn.comfy_quant": text}
        save_file(tensors, tmp_path / "y.safetensors", header if in_header else {})
        (finding,) = select_findings(tmp_path / "y.safetensors")

        assert ("warning", ["blocks.1.attn"]) == (finding.severity, finding.evidence["layers"])
        assert '1 layer, whose label lacks "format": blocks.1.attn: ComfyUI refuses the file' in finding.message

    @pytest.mark.parametrize(
        ("names", "severities"),
        [
            (("double_blocks.0.a.weight", "blocks.1.a.weight", "cap_embedder.1.weight"), ["warning"]),
            (("visual.blocks.0.a.weight", "model.layers.0.a.weight", "model.layers.1.a.weight"), []),
        ],
        ids=["denoiser", "language model"],
    )
    def test_nvfp4_of_a_denoiser_without_labels_is_a_warning(self, tmp_path, names, severities):
        stored = {}
        for name in names:
            stored |= nvfp4(name, sound(find_layout("NVFP4"), numbers(64, 64).float()))
        findings = select_findings(store(tmp_path / "y.safetensors", stored))

        assert severities == [finding.severity for finding in findings]
        assert all(
            "no label for ComfyUI (comfy_quant, _quantization_metadata)" in finding.message for finding in findings
        )

    def test_blocks_labelled_tensorwise_are_doubted(self, tmp_path):
        coded = sound(find_layout("INT8 128 × 128"), numbers(256, 256).float())
        stored = labelled_int8("a.weight", coded, "int8_tensorwise")
        (finding,) = select_findings(store(tmp_path / "y.safetensors", stored), "ambiguous_layout")

        assert "labelled int8_tensorwise, but its scale a.weight_scale (F32 [2, 2]) is one per block" in finding.message


class TestMethods:
    @pytest.mark.parametrize(
        ("stored", "method", "severity"),
        [
            ("gptq", "awq", "warning"),
            ("awq", "gptq", "warning"),
            ("gptq", "fp8", "error"),
            ("gptq", "unheard-of", "error"),
            ("fp8", "gptq", "error"),
            ("fp8", "unheard-of", "warning"),
            ("fp8", "modelopt", None),
            ("gptq", "auto-round", None),
            ("awq", "intel/auto-round", None),
            ("fp8", "auto-round", None),
            ("int8", "quark", None),
            ("int8", "gptq", "error"),
        ],
    )
    def test_unsuitable_method_is_reported(self, tmp_path, stored, method, severity):
        path = of_golden(tmp_path / "y", CASES[stored], MODEL | {"quantization_config": {"quant_method": method}})
        findings = [
            finding
            for finding in select_findings(path, "config_mismatch")
            if finding.evidence.get("key") == "quant_method"
        ]

        assert [severity] * bool(severity) == [finding.severity for finding in findings]
        assert all(f"declares quant_method {method}, but " in finding.message for finding in findings)

    @pytest.mark.parametrize(
        ("config", "n"),
        [
            ({"quantization_config": {"group_size": 64, "bits": 5}}, 1),
            ({"quantization": {"group_size": 64, "bits": 5}}, 0),
            ({"quantization": {"group_size": 64, "bits": 5}, "quantization_config": {"quant_method": "fp8"}}, 0),
        ],
        ids=["another key", "its key", "with the original's key"],
    )
    def test_mlx_needs_its_own_key(self, tmp_path, config, n):
        path = of_golden(tmp_path / "y", "mlx_affine/mlx_5_bits.safetensors", MODEL | config)

        assert n == sum(
            "mlx-lm looks for it" in finding.message for finding in select_findings(path, "config_mismatch")
        )
        assert not any(
            "declares quant_method" in finding.message for finding in select_findings(path, "config_mismatch")
        )

    @pytest.mark.parametrize(("four", "eight", "n"), [(True, False, 0), (True, True, 1), (False, False, 1)])
    def test_bitsandbytes_must_declare_the_stored_bits(self, tmp_path, four, eight, n):
        method = {"quant_method": "bitsandbytes", "load_in_4bit": four, "load_in_8bit": eight}
        case = "bnb_nf4/bnb_nf4_double_quant.safetensors"
        findings = select_findings(
            of_golden(tmp_path / "y", case, MODEL | {"quantization_config": method}), "config_mismatch"
        )

        assert n == sum(" stored as bnb_nf4: " in finding.message for finding in findings)

    def test_family_formats_exist_and_methods_are_in_lower_case(self):
        names = {row.name for row in FORMATS}

        assert all(family.formats <= names for family in FAMILIES)
        assert all(method == method.lower() for method in KNOWN_METHODS)


class TestReadings:
    """The report shows the numbers that a runtime would load."""

    def test_bitsandbytes_is_read_by_its_state(self, tmp_path):
        coded = sound(find_layout("NF4"), X)
        config = {"quantization_config": find_layout("NF4").config}
        finding = compare(tmp_path, {NAME: X}, bnb(NAME, coded, "fp4"), config)["wrong_convention"]

        assert "error" == finding.severity
        assert "as quant_type states fp4, which is how it will be loaded; " in finding.message
        assert finding.evidence["snr_db"] < 0 < 15 < finding.evidence["snr_db_other"]

    def test_misnamed_state_is_read_correctly_and_doubted(self, tmp_path):
        stored = bnb(NAME, sound(find_layout("NF4"), X))
        stored[f"{NAME}.quant_state.bitsandbytes__fp4"] = stored.pop(f"{NAME}.quant_state.bitsandbytes__nf4")
        findings = compare(tmp_path, {NAME: X}, stored, {"quantization_config": find_layout("NF4").config})

        assert "wrong_convention" not in findings
        assert "declares quant_type nf4, which bitsandbytes uses" in findings["ambiguous_layout"].message

    @pytest.mark.parametrize(("denied", "codes"), [(True, {"wrong_convention", "ambiguous_layout"}), (False, set())])
    def test_column_order_denied_by_the_configuration_is_reported(self, tmp_path, denied, codes):
        layout, order = find_layout("GPTQ 4 bits"), torch.randperm(256, generator=torch.Generator().manual_seed(3))
        x = X * torch.linspace(0.1, 4, 256)
        config = {"quantization_config": layout.config | {"desc_act": not denied}}
        stored = gptq(NAME, sound(layout, x[:, order]), 4, order)
        findings = compare(tmp_path, {NAME: x}, stored, config)

        assert codes == findings.keys() & {"wrong_convention", "ambiguous_layout"}
        if denied:
            assert "columns in order, as config.json declares desc_act false" in findings["wrong_convention"].message
            assert findings["wrong_convention"].evidence["snr_db_other"] > 15


class TestDialects:
    """A method that config.json names prescribes how loaders read the codes, whatever the original says."""

    def swap(self, x):
        stored = nvfp4(NAME, sound(find_layout("NVFP4"), x))
        return stored | {NAME: stored[NAME] >> 4 | stored[NAME] << 4}

    @pytest.mark.parametrize(
        "files",
        [
            {"config.json": {"quantization_config": MODELOPT}},
            {"config.json": {"quantization_config": {"quant_method": "quark"}}},
            {"hf_quant_config.json": {"quantization": {"quant_algo": "NVFP4"}}},
            {"hf_quant_config.json": {"quantization": {"quantized_layers": {"x": {"quant_algo": "NVFP4"}}}}},
        ],
        ids=["modelopt", "quark", "hf_quant_config", "quantized_layers"],
    )
    def test_swapped_nibbles_count_as_the_declared_method_reads_them(self, tmp_path, files):
        x = numbers(128, 256).float()
        y = folder(tmp_path / "y", self.swap(x))
        for name, fields in files.items():
            (y / name).write_text(json.dumps(MODEL | fields))
        report = quanterr.compare(store(tmp_path / "x.safetensors", {NAME: x}), y, device="cpu")
        (finding,) = [finding for finding in report.findings if finding.code == "wrong_convention"]

        assert "first column in the low nibble, scales in rows, as quant" in finding.evidence["prescribed"]
        assert "first column in the high nibble" in finding.evidence["other"]
        assert report.layers[0].snr_db < 0 < 15 < finding.evidence["snr_db_other"]

    def test_nibbles_that_nothing_prescribes_are_read_as_the_original_says(self, tmp_path):
        x = numbers(128, 256).float()
        findings = compare(tmp_path, {NAME: x}, self.swap(x), {})

        assert "read as NVFP4, first column in the high nibble" in findings["ambiguous_layout"].message
        assert "wrong_convention" not in findings

    @pytest.mark.parametrize("merged", [True, False])
    def test_only_exports_for_comfyui_may_have_scales_in_tiles(self, tmp_path, merged):
        x = numbers(128, 256).float() * torch.linspace(0.01, 30, 128)[:, None]
        stored = nvfp4(NAME, sound(find_layout("NVFP4"), x))
        tiles = stored[f"{NAME}_scale"].view(torch.uint8).view(4, 32, 4, 4).permute(2, 1, 0, 3).reshape(128, 16)
        stored[f"{NAME}_scale"] = tiles.contiguous().view(torch.float8_e4m3fn)
        y = folder(tmp_path / "y", {}, MODEL | {"quantization_config": MODELOPT})
        save_file(stored, y / "model.safetensors", {"quantization_config": json.dumps(MODELOPT)} if merged else {})
        report = quanterr.compare(store(tmp_path / "x.safetensors", {NAME: x}), y, device="cpu")

        assert merged == (report.layers[0].snr_db > 15)
        assert merged == ("wrong_convention" not in {finding.code for finding in report.findings})

    @pytest.mark.parametrize(("config", "is_error"), [({"quant_method": "modelopt"}, True), ({}, False)])
    def test_declared_mxfp8_has_its_exponents_in_rows(self, tmp_path, config, is_error):
        codes = torch.randint(0, 0x7E, (128, 128), dtype=torch.uint8).view(torch.float8_e4m3fn)
        exponents = torch.arange(128, dtype=torch.uint8)[:, None].expand(128, 4) // 8 + 110
        x = codes.float() * torch.exp2(exponents.repeat_interleave(32, 1).float() - 127)
        tiles = exponents.reshape(4, 32, 4).permute(1, 0, 2).reshape(128, 4).contiguous()
        findings = compare(tmp_path, {NAME: x}, {NAME: codes, f"{NAME}_scale": tiles}, {"quantization_config": config})

        assert is_error == ("wrong_convention" in findings)
        assert is_error != ("ambiguous_layout" in findings)


class TestRefused:
    def test_nvfp4_with_half_its_scales_is_refused(self, tmp_path):
        stored = nvfp4(NAME, sound(find_layout("NVFP4"), numbers(64, 256).float()))
        stored[f"{NAME}_scale"] = stored[f"{NAME}_scale"][:, ::2].contiguous()
        config = MODEL | {"quantization_config": find_layout("NVFP4").config}
        (finding,) = select_findings(folder(tmp_path / "y", stored, config), "not_read")
        assert "has one number for each 32 columns, but NVFP4 has one for each 16" in finding.message

        wide = {"quant_method": "modelopt", "quant_algo": "W4A8_NVFP4_FP8"}
        assert [] == select_findings(folder(tmp_path / "z", stored, MODEL | {"quantization_config": wide}), "not_read")

    @pytest.mark.parametrize(
        "config", [{"quantization_config": {"load_in_4bit": True}}, {}], ids=["declared", "recognized"]
    )
    def test_bitsandbytes_codes_without_their_state_are_refused(self, tmp_path, config):
        stored = bnb(NAME, sound(find_layout("NF4"), self.x()))
        bare = {OTHER_WEIGHT: bnb(OTHER_WEIGHT, sound(find_layout("NF4"), self.x()))[OTHER_WEIGHT]}
        (finding,) = select_findings(folder(tmp_path / "y", stored | bare, config), "not_read")

        assert finding.layer == OTHER_WEIGHT
        assert (
            "are 4-bit codes of bitsandbytes, of which absmax (their scales), quant_map and quant_state"
            in finding.message
        )

    def x(self):
        return numbers(64, 128).float()

    def test_byte_column_elsewhere_is_not_a_bitsandbytes_code(self, tmp_path):
        assert [] == select_findings(
            folder(tmp_path / "y", {OTHER_WEIGHT: torch.ones(8, 1, dtype=torch.uint8)}), "not_read"
        )


class TestHeads:
    def find(self, tmp_path, config, shapes):
        x = {f"model.layers.0.self_attn.{n}_proj.weight": numbers(*shape).float() for n, shape in shapes.items()}
        findings = compare(tmp_path, x, {name: weight.bfloat16() for name, weight in x.items()}, config)
        return findings.get("config_mismatch")

    @pytest.mark.parametrize(
        ("config", "shapes"),
        [
            (HEADS, SHAPES),
            (HEADS, SHAPES | {"q": (128, 64)}),
            ({**HEADS, "head_dim": None}, SHAPES | {"k": (16, 64)}),
            (HEADS | {"kv_lora_rank": 8}, SHAPES | {"k": (16, 64)}),
            (HEADS | {"v_head_dim": 8}, SHAPES | {"v": (16, 64), "o": (64, 32)}),
        ],
        ids=["plain", "gated", "undeclared", "latent", "other values"],
    )
    def test_fitting_or_unknown_heads_are_silent(self, tmp_path, config, shapes):
        assert self.find(tmp_path, config, shapes) is None

    @pytest.mark.parametrize("changed", [{"head_dim": 32}, {"num_key_value_heads": 4}, {"num_attention_heads": 8}])
    def test_misfitting_heads_are_a_warning(self, tmp_path, changed):
        finding = self.find(tmp_path, HEADS | changed, SHAPES)

        assert ("warning", "head_dim") == (finding.severity, finding.evidence["key"])
        assert "k [32, 64]" in finding.message

    def test_heads_need_a_single_fitting_layer(self):
        assert Heads(4, 2, 16, 16).fit(SHAPES)
        assert not Heads(4, 2, 8, 8).fit(SHAPES)

    @pytest.mark.parametrize(
        ("changed", "expected_message"),
        [
            ({}, None),
            ({"rope.dimension_count": 16}, None),
            ({"rope.dimension_count": 8}, "rope.dimension_count 8, but heads have 16 elements: llama.cpp refuses"),
            ({"attention.key_length": 32}, "declares 4 query heads and 2 key heads, keys of 32"),
            ({"attention.value_length": 8}, "values of 8 elements, but the projections are of other sizes"),
        ],
    )
    def test_gguf_heads_must_fit(self, tmp_path, changed, expected_message):
        x = {f"blk.0.attn_{n}.weight": numbers(*SHAPES[n[0]]).float() for n in ("q", "k", "v", "output")}
        declared = {"embedding_length": 64, "attention.head_count": 4, "attention.head_count_kv": 2} | changed
        keys = [key(f"llama.{name}", UINT32, value) for name, value in declared.items()]
        tensors = [Stored(name, "F16", tuple(w.shape), w.half().numpy().tobytes()) for name, w in x.items()]
        path = write_gguf(tmp_path / "y.gguf", tensors, (*architecture("llama")[:1], *keys))
        report = quanterr.compare(store(tmp_path / "x.safetensors", x), path, device="cpu")
        messages = [finding.message for finding in report.findings if finding.code == "config_mismatch"]

        assert (expected_message is None) == (messages == [])
        assert expected_message is None or expected_message in messages[0]
