"""Matrices with a single value, and experts and layers that repeat each other, on both sides."""

import pytest
import torch
from support.making import compare, numbers, quantized_int8

GATE, UP, DOWN = (f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down"))
NORM = "model.layers.0.input_layernorm.weight"
EXPERT = "model.layers.{}.mlp.experts.{}.up_proj.weight"
STACK = "model.layers.0.mlp.experts.gate_up_proj"
SHAPE = 64, 128


def select_findings(report, code):
    return [finding for finding in report.findings if finding.code == code]


def store_codes(x):
    """Return codes of all matrices with a scale each; zeros have a scale of one."""
    y = {}
    for name, weight in x.items():
        if weight.dim() < 2:
            y[name] = weight
        elif weight.any():
            y[name], y[f"{name}_scale"] = quantized_int8(weight)
        else:
            y[name], y[f"{name}_scale"] = weight.to(torch.int8), torch.tensor(1.0)
    return y


def cast(x):
    return {name: weight.float() for name, weight in x.items()}


def same(x):
    return x


class TestConstants:
    @pytest.mark.parametrize("by", [store_codes, cast, same])
    @pytest.mark.parametrize(("value", "words"), [(0.0, "zero throughout"), (0.25, "a single value throughout")])
    def test_constants_are_one_warning_that_names_the_layers(self, tmp_path, by, value, words):
        x = {DOWN: numbers(*SHAPE), GATE: torch.full(SHAPE, value).bfloat16(), UP: torch.full(SHAPE, value).bfloat16()}
        report = compare(tmp_path, x, by(x))
        (constant,) = select_findings(report, "constant_weight")

        assert ("warning", None, [GATE, UP]) == (constant.severity, constant.layer, constant.evidence["layers"])
        assert f"2 weights are {words} on both sides" in constant.message
        assert "error" not in {finding.severity for finding in report.findings}

    @pytest.mark.parametrize("by", [store_codes, cast, same])
    @pytest.mark.parametrize("value", [0.0, 0.25])
    def test_constants_without_another_matrix_of_their_shape_are_an_info(self, tmp_path, by, value):
        x = {DOWN: numbers(128, 64), GATE: torch.full(SHAPE, value).bfloat16(), UP: torch.full(SHAPE, value).bfloat16()}
        (finding,) = select_findings(compare(tmp_path, x, by(x)), "constant_weight")

        assert ("info", [GATE, UP]) == (finding.severity, finding.evidence["layers"])

    @pytest.mark.parametrize(
        "name",
        [
            "model.layers.0.self_attn.q_norm.weight",
            "model.layers.0.mlp.experts.gate_up_proj_bias",
            "base_model.layers.0.self_attn.q_proj.lora_B.weight",
            "lora.up_proj.lora_up.weight",
            "zero_convs.0.0.weight",
            "embeddings.token_type_embeddings.weight",
            "model.layers.0.mixer.A_log",
            "attn.mask",
        ],
    )
    @pytest.mark.parametrize("value", [0.0, 1.0])
    def test_some_constants_are_silent(self, tmp_path, name, value):
        x = {name: torch.full(SHAPE, value), UP: numbers(*SHAPE)}

        assert [] == select_findings(compare(tmp_path, x, cast(x)), "constant_weight")

    @pytest.mark.parametrize("shape", [(64,), (1, 64), (64, 1), (1,), (0, 64)])
    def test_only_matrices_count_as_constant(self, tmp_path, shape):
        x = {GATE: torch.zeros(shape), NORM: torch.ones(64), "a.bias": torch.zeros(64), UP: numbers(*SHAPE)}

        assert [] == select_findings(compare(tmp_path, x, x), "constant_weight")

    def test_constant_has_the_same_value_everywhere(self, tmp_path):
        almost, signs, padded = torch.full(SHAPE, 0.25), torch.full(SHAPE, 0.25), numbers(*SHAPE)
        almost[-1, -1] = 0.2501
        signs[::2] *= -1
        padded[0] = 0
        zeros = torch.zeros(SHAPE)
        zeros[5, 7] = 1e-30
        x = {GATE: almost, UP: signs, "model.embed_tokens.weight": padded, DOWN: zeros}

        assert [] == select_findings(compare(tmp_path, x, x), "constant_weight")

    @pytest.mark.parametrize("sides", [(0.0, None), (None, 0.0), (0.25, None), (None, 0.25), (0.0, 1.0), (0.25, 9.0)])
    def test_constants_on_one_side_have_other_findings(self, tmp_path, sides):
        x, y = ({UP: numbers(*SHAPE) if value is None else torch.full(SHAPE, value)} for value in sides)
        report = compare(tmp_path, cast(x), cast(y))

        assert [] == select_findings(report, "constant_weight")
        assert report.findings

    def test_weights_with_nan_are_not_constant(self, tmp_path):
        x = {UP: torch.zeros(SHAPE)}
        x[UP][3, 4] = torch.nan

        assert [] == select_findings(compare(tmp_path, x, x), "constant_weight")

    @pytest.mark.parametrize("by", [store_codes, cast, same])
    def test_constant_experts_in_a_stack_are_counted(self, tmp_path, by):
        x = {f"{STACK}.weight": numbers(4, 32, 64)}
        x[f"{STACK}.weight"][[1, 3]] = 0
        (finding,) = select_findings(compare(tmp_path, x, by(x)), "constant_weight")

        assert [f"{STACK}.weight"] == finding.evidence["layers"]
        assert f"{STACK}.weight (experts 1, 3);" in finding.message


class TestRepeatedExperts:
    @pytest.mark.parametrize("by", [store_codes, cast, same])
    def test_repeated_experts_in_a_layer_are_one_warning(self, tmp_path, by):
        seeds = {(0, 0): 1, (0, 1): 2, (0, 2): 1, (1, 0): 3, (1, 1): 3, (1, 2): 4}
        x = {EXPERT.format(*place): numbers(*SHAPE, seed=seed) for place, seed in seeds.items()}
        (finding,) = select_findings(compare(tmp_path, x, by(x)), "repeated_weights")

        assert ("warning", None) == (finding.severity, finding.layer)
        assert [EXPERT.format(*place) for place in ((0, 0), (0, 2), (1, 0), (1, 1))] == finding.evidence["layers"]
        assert f"{EXPERT.format(0, 0)} and 1 other, {EXPERT.format(1, 0)} and 1 other" in finding.message

    @pytest.mark.parametrize("by", [cast, same])
    def test_repeated_experts_in_a_stack_are_counted(self, tmp_path, by):
        x = {STACK: numbers(8, 48, 64)[[0, 1, 2, 3, 0, 1, 0, 7]]}
        (finding,) = select_findings(compare(tmp_path, x, by(x)), "repeated_weights")

        assert ("warning", [STACK]) == (finding.severity, finding.evidence["layers"])
        assert f"{STACK} (5 of 8 distinct)" in finding.message

    def test_repeated_experts_are_found_where_chunks_cut_them(self, tmp_path):
        experts = numbers(3, 500, 640)
        x = {STACK: experts[[0, 1, 2, 1]]}
        (finding,) = select_findings(compare(tmp_path, x, cast(x)), "repeated_weights")

        assert "(3 of 4 distinct)" in finding.message

    def test_repeated_experts_may_be_rounded_each_in_its_way(self, tmp_path):
        """Quantizers may see other inputs for each expert."""
        x = {EXPERT.format(0, n): numbers(*SHAPE) for n in range(2)}
        y = store_codes(x)
        y[EXPERT.format(0, 1)] = y[EXPERT.format(0, 1)].clone()
        y[EXPERT.format(0, 1)][::3] += 1

        assert ["warning"] == [
            finding.severity for finding in select_findings(compare(tmp_path, x, y), "repeated_weights")
        ]

    @pytest.mark.parametrize("change", [lambda x: x.flip(0), lambda x: -x, lambda x: x.roll(1, 1)])
    def test_experts_with_equal_energies_are_different(self, tmp_path, change):
        weight = numbers(*SHAPE)
        apart = {EXPERT.format(0, n): matrix for n, matrix in enumerate((weight, change(weight)))}
        x = {**apart, STACK: torch.stack((weight, change(weight)))}

        assert [] == select_findings(compare(tmp_path, x, x), "repeated_weights")

    def test_repeated_experts_on_one_side_have_other_findings(self, tmp_path):
        right, wrong = {STACK: numbers(8, 48, 64)}, {STACK: numbers(8, 48, 64)[[0, 1, 2, 3] * 2]}
        (tmp_path / "a").mkdir()
        (tmp_path / "b").mkdir()
        for report in (compare(tmp_path / "a", right, wrong), compare(tmp_path / "b", wrong, right)):
            assert [] == select_findings(report, "repeated_weights")
            assert "inconclusive" == report.verdict

    def test_zero_experts_are_not_copies(self, tmp_path):
        x = {EXPERT.format(0, n): torch.zeros(SHAPE) for n in range(3)}

        assert [] == select_findings(compare(tmp_path, x, x), "repeated_weights")


class TestRepeatedLayers:
    def test_repeated_layers_are_an_info_as_merges_make_them(self, tmp_path):
        x = {f"model.layers.{n}.mlp.up_proj.weight": numbers(*SHAPE, seed=n // 2) for n in range(3)}
        (finding,) = select_findings(compare(tmp_path, x, store_codes(x)), "repeated_weights")

        assert ("info", list(x)[:2]) == (finding.severity, finding.evidence["layers"])
        assert "layers repeat each other" in finding.message

    def test_repeated_layers_may_share_heads_and_embeddings(self, tmp_path):
        names = "bbox_embed.{}.layers.0.weight", "mtp.{}.embed_tokens.weight", "mtp.{}.lm_head.weight"
        x = {name.format(n): numbers(*SHAPE) for name in names for n in range(2)}
        x |= {"model.embed_tokens.weight": numbers(*SHAPE), "lm_head.weight": numbers(*SHAPE)}

        assert [] == select_findings(compare(tmp_path, x, cast(x)), "repeated_weights")

    def test_equal_weights_in_one_block_are_not_repeated_layers(self, tmp_path):
        x = {f"model.layers.0.self_attn.{name}_proj.weight": numbers(*SHAPE) for name in "qkv"}

        assert [] == select_findings(compare(tmp_path, x, cast(x)), "repeated_weights")
