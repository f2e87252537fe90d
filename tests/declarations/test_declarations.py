"""What a configuration declares for a module, by each program's way to match names."""

import pytest

from quanterr.declarations import Declarations

Q, K, UP = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj", "model.layers.1.mlp.up_proj"


def group(targets, **weights):
    return {
        "targets": targets,
        "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128} | weights,
    }


def declare(ignore=(), **groups):
    return {"quant_method": "compressed-tensors", "ignore": list(ignore), "config_groups": groups}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True}
QUARK = {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp8_e4m3"}}}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8"}
SDNQ = {"quant_method": "sdnq", "weights_dtype": "uint4"}
MLX = {"bits": 4, "group_size": 64}
FP8 = {"quant_method": "fp8"}
HQQ = {"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4}}}
QKV, INT4 = "model.layers.0.self_attn.qkv_proj", {"weight": {"dtype": "int4"}}
INT4_OF_FP8 = {"weight": [{"dtype": "fp8_e4m3"}, {"dtype": "int4"}]}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}


class TestExclusions:
    @pytest.mark.parametrize(
        ("config", "module", "entry"),
        [
            (declare([Q], a=group(["Linear"])), Q, Q),
            (declare(["re:.*q_proj$"], a=group(["Linear"])), Q, "re:.*q_proj$"),
            (declare([QKV], a=group(["Linear"])), K, QKV),
            (declare(["re:visual.*"], a=group(["Linear"])), "model.visual.blocks.0.mlp.up_proj", "re:visual.*"),
            (declare([Q], a=group(["Linear"])), Q.replace("model.", "language_model.model."), Q),
            (GPTQ | {"dynamic": {"-:.*self_attn.*": {}}}, Q, "-:.*self_attn.*"),
            (AWQ | {"modules_to_not_convert": ["self_attn"]}, Q, "self_attn"),
            (AWQ | {"modules_to_not_convert": ["q_pro"]}, Q, "q_pro"),
            (AUTO_ROUND | {"extra_config": {Q: {"bits": 16}}}, Q, Q),
            (AUTO_ROUND | {"extra_config": {r".*q_pro\w": {"bits": 16}}}, Q, r".*q_pro\w"),
            (QUARK | {"exclude": ["*q_proj"]}, Q, "*q_proj"),
            (MODELOPT | {"exclude_modules": ["*.layers.0.*"]}, Q, "*.layers.0.*"),
            (MODELOPT | {"ignore": ["layers.0.self_attn"]}, Q, "layers.0.self_attn"),
            (FP8 | {"modules_to_not_convert": ["model.layers.0"]}, Q, "model.layers.0"),
            (FP8 | {"ignored_layers": ["q_proj"]}, Q, "q_proj"),
            ({"load_in_4bit": True, "llm_int8_skip_modules": ["layers.0"]}, Q, "layers.0"),
            (HQQ | {"skip_modules": ["q_proj"]}, Q, "q_proj"),
            (SDNQ | {"modules_to_not_convert": ["q_proj"]}, Q, "q_proj"),
            (SDNQ | {"modules_to_not_convert": [f"{Q}.weight"]}, Q, f"{Q}.weight"),
            (MLX | {Q: False}, Q, Q),
        ],
    )  # fmt: skip
    def test_excluded_module_is_resolved_with_the_entry_that_names_it(self, config, module, entry):
        scheme = Declarations(config).of(f"{module}.weight")

        assert (False, entry) == (scheme.is_quantized, scheme.entry)

    @pytest.mark.parametrize(
        ("config", "module"),
        [
            (declare(["q_proj"], a=group(["Linear"])), Q),  # compressed-tensors compares whole names
            (declare(["Q_PROJ", "re:.*Q_PROJ"], a=group(["Linear"])), Q),
            (declare(["model.layers.1.mlp"], a=group(["Linear"])), UP),
            (GPTQ | {"dynamic": {"-:self_attn": {}}}, Q),  # GPTQModel matches expressions from the start of a name
            (QUARK | {"exclude": ["self_attn"]}, Q),
            (MODELOPT | {"exclude_modules": ["layers.0*"]}, "model.visual.layers.0"),
            (FP8 | {"modules_to_not_convert": ["layers.0.self_attn.q"]}, Q),
            (SDNQ | {"modules_to_not_convert": [Q]}, Q),  # SDNQ compares names of parameters, not of modules
            (SDNQ | {"modules_to_not_convert": [".q_proj"]}, Q),  # SDNQ does not match the end of a name
        ],
    )
    def test_entry_that_its_program_does_not_match_excludes_nothing(self, config, module):
        assert Declarations(config).of(module).is_quantized


class TestSchemes:
    @pytest.mark.parametrize(
        ("config", "module", "expected"),
        [
            (declare(a=group(["re:.*q_proj"]), b=group(["Linear"], num_bits=8)), Q, ("config_groups.a", 4, 128)),
            (declare(a=group(["Linear"]), b=group([UP], num_bits=8)), UP, ("config_groups.b", 8, 128)),
            (GPTQ | {"dynamic": {r"+:.*up_proj": {"bits": 8, "group_size": 32}}}, UP, ("dynamic", 8, 32)),
            (GPTQ | {"dynamic": {r".*up_proj": {"bits": 8}}}, UP, ("dynamic", 8, 128)),
            (AUTO_ROUND | {"extra_config": {UP: {"bits": 8}}}, UP, ("extra_config", 8, 128)),
            (QUARK | {"layer_quant_config": {"*up_proj": INT4}}, UP, ("layer_quant_config", 4, None)),
            (QUARK | {"global_quant_config": INT4_OF_FP8}, UP, ("global_quant_config", 4, None)),
            (
                {"quant_algo": "MIXED_PRECISION", "quantized_layers": {UP: {"quant_algo": "NVFP4", "group_size": 16}}},
                UP,
                ("quantized_layers", 4, 16),
            ),
            (SDNQ | {"modules_dtype_dict": {"int8": ["up_proj"]}}, UP, ("modules_dtype_dict", 8, None)),
            (MLX | {UP: {"bits": 8, "group_size": 32}}, UP, ("quantization", 8, 32)),
            (MLX, UP, ("quantization", 4, 64)),
        ],
    )  # fmt: skip
    def test_scheme_of_a_module_takes_precedence(self, config, module, expected):
        scheme = Declarations(config).of(module)

        assert expected == (scheme.key, scheme.bits, scheme.group_size)
        assert scheme.is_quantized

    def test_module_that_no_target_names_has_no_scheme(self):
        assert Declarations(declare(a=group(["re:.*q_proj"]))).of(UP) is None

    def test_first_of_two_groups_that_claim_all_layers_wins(self):
        declared = Declarations(declare(a=group(["Linear"]), b=group(["Linear"], num_bits=8)))

        assert ("config_groups.a", 4) == declared.of(UP)[0:4:3]
        assert ["config_groups.a", "config_groups.b"] == declared.find_rivals(UP)

    def test_group_that_names_its_layers_has_no_rival_in_a_class(self):
        declared = Declarations(declare(a=group(["Linear"]), b=group(["re:.*up_proj"], num_bits=8)))

        assert ["config_groups.b"] == declared.find_rivals(UP)


class TestEntries:
    def test_entries_that_name_nothing_are_found(self):
        declared = Declarations(declare(a=group(["re:.*upp_proj", "re:.*q_proj"]), b=group(["re:.*k_proj"])))
        names = [f"{Q}.weight", f"{UP}.weight"]
        a, b = (f"config_groups.{name}.targets" for name in "ab")

        assert [(a, ["re:.*upp_proj"], False), (b, ["re:.*k_proj"], True)] == declared.find_idle(names)

    def test_excluding_entry_without_a_match_is_not_idle(self):
        config = GPTQ | {"dynamic": {"-:.*router": {}, "+:.*upp_proj": {"bits": 8}}}

        assert [("dynamic", [".*upp_proj"], False)] == Declarations(config).find_idle([f"{UP}.weight"])

    @pytest.mark.parametrize("pattern", ["re:(a*)*b", "re:[", "re:" + 513 * "a", "re:" + 9 * ".*a"])
    def test_expression_that_cannot_be_matched_safely_is_named(self, pattern):
        declared = Declarations(declare([pattern], a=group(["Linear"])))

        assert declared.of(Q).is_quantized
        assert [("ignore", pattern)] == declared.refusals

    def test_unknown_key_that_names_modules_is_found(self):
        declared = Declarations(GPTQ | {"keep_these": [Q], "damp_percent": 0.01, "meta": {"a.b": 1}})

        assert ["keep_these"] == declared.unknown
        assert declared.of(UP).is_quantized
