import pytest
import torch
from support.making import compare, numbers, store
from support.smoothed import BLOCK, FED, factors, int4, model

from quanterr.checkpoints import open_checkpoint
from quanterr.documents.gate_results import exit_status
from quanterr.errors import Status
from quanterr.formats.reading import open_reader
from quanterr.pairing import pair
from quanterr.pairing.sampling import error_up_to_factor, relative_error
from quanterr.selection import LayerSelection


def list_folded(report):
    return [finding for finding in report.findings if finding.code == "folded_scales"]


class TestNorm:
    @pytest.mark.parametrize("less_one", [False, True], ids=["norm", "norm less one"])
    def test_norm_that_absorbed_scales_is_found_and_undone(self, tmp_path, less_one):
        x, s = model(), factors(128)
        norm = f"{BLOCK}input_layernorm.weight"
        y = x | {norm: x[norm] / s} | {name: int4(x[name] * s) for name in FED}
        if less_one:
            x, y = x | {norm: x[norm] - 1}, y | {norm: y[norm] - 1}
        report = compare(tmp_path, x, y)
        layers = {layer.layer_name: layer.snr_db for layer in report.layers}

        assert set(FED) == layers.keys()
        assert all(snr > 10 for snr in layers.values())
        assert [("info", norm)] == [(finding.severity, finding.layer) for finding in list_folded(report)]
        assert list_folded(report)[0].evidence["snr_db_as_stored"] < 9 < 10 < list_folded(report)[0].evidence["snr_db"]
        assert set(FED) == set(list_folded(report)[0].evidence["layers"])
        assert Status.OK == exit_status(report)

    def test_norm_scales_missing_in_a_following_weight_are_an_error(self, tmp_path):
        x, s = model(), factors(128)
        norm = f"{BLOCK}input_layernorm.weight"
        y = x | {norm: x[norm] / s, FED[0]: int4(x[FED[0]] * s)} | {name: int4(x[name]) for name in FED[1:]}
        report = compare(tmp_path, x, y)
        _, error = list_folded(report)

        assert ("error", norm, FED[1:]) == (error.severity, error.layer, error.evidence["layers"])
        assert Status.INCONCLUSIVE == exit_status(report)

    def test_changed_norm_alone_is_not_a_fold(self, tmp_path):
        x = model()
        norm = f"{BLOCK}input_layernorm.weight"
        y = x | {norm: x[norm] / factors(128)} | {name: int4(x[name]) for name in FED}
        report = compare(tmp_path, x, y)

        assert [] == list_folded(report)
        assert all(layer.snr_db > 10 for layer in report.layers)

    def test_unchanged_norm_hides_no_scaled_weight(self, tmp_path):
        x, s = model(), factors(128)
        report = compare(tmp_path, x, x | {name: int4(x[name] * s) for name in FED})

        assert [] == list_folded(report)
        assert all(layer.snr_db < 9 for layer in report.layers)

    def test_norm_in_another_block_is_not_considered(self, tmp_path):
        x, s = model(), factors(128)
        other = "model.layers.1.input_layernorm.weight"
        x |= {other: torch.ones(128)}
        report = compare(tmp_path, x, x | {other: 1 / s} | {name: int4(x[name] * s) for name in FED})

        assert [] == list_folded(report)


class TestWeight:
    UP, DOWN = f"{BLOCK}mlp.up_proj.weight", f"{BLOCK}mlp.down_proj.weight"

    def test_weight_that_absorbed_scales_is_found_and_undone(self, tmp_path):
        x, s = model(), 3 * factors(96)
        y = x | {self.UP: int4(x[self.UP] / s[:, None]), self.DOWN: int4(x[self.DOWN] * s)}
        report = compare(tmp_path, x, y)

        assert {self.UP, self.DOWN} == set(list_folded(report)[0].evidence["layers"])
        assert all(layer.snr_db > 10 for layer in report.layers)

    @pytest.mark.parametrize("wrong", [UP, DOWN])
    def test_row_with_another_factor_than_its_column_is_a_warning(self, tmp_path, wrong):
        x, s, other = model(), factors(96), torch.ones(96)
        other[40] = 1.5
        moved = {self.UP: x[self.UP] / s[:, None], self.DOWN: x[self.DOWN] * s}
        moved[wrong] = moved[wrong] * (other[:, None] if wrong == self.UP else other)
        report = compare(tmp_path, x, x | {name: int4(weight) for name, weight in moved.items()})
        _, finding = list_folded(report)

        assert ("warning", self.UP, [40]) == (finding.severity, finding.layer, finding.evidence["rows"])

    def test_single_scaled_weight_is_not_repaired(self, tmp_path):
        x, s = model(), 3 * factors(96)
        report = compare(tmp_path, x, x | {self.UP: int4(x[self.UP] / s[:, None]), self.DOWN: int4(x[self.DOWN])})

        assert [] == list_folded(report)
        assert [(self.UP, "scale_factor")] == [(f.layer, f.code) for f in report.findings if f.severity == "error"]


def true_db(x, y):
    return float(10 * torch.log10(x.double().square().sum() / (x - y).double().square().sum()))


def int2(weight):
    """Return the weight rounded to 2-bit codes in groups of 32, most of which are too small."""
    groups = weight.float().view(-1, 32)
    scale = groups.abs().amax(1, keepdim=True) / 1.5
    return ((groups / scale).round().clamp(-2, 1) * scale).view(weight.shape).to(torch.bfloat16)


@pytest.mark.parametrize("seed", range(6))
def test_coarse_rounding_is_not_a_fold(tmp_path, seed):
    names = (TestWeight.UP, TestWeight.DOWN)
    x = {name: numbers(128, 128, seed=2 * seed + n) for n, name in enumerate(names)}
    for weight in x.values():
        weight[:, 7::30] *= 4

    assert [] == list_folded(compare(tmp_path, x, {name: int2(weight) for name, weight in x.items()}))


class TestConnectedFolds:
    NORM, UP, DOWN = (f"{BLOCK}{name}.weight" for name in ("post_attention_layernorm", "mlp.up_proj", "mlp.down_proj"))
    GATE, V, OUT = (f"{BLOCK}{name}.weight" for name in ("mlp.gate_proj", "self_attn.v_proj", "self_attn.o_proj"))

    @pytest.mark.parametrize("spread", [0.1, 0.5, 1.0], ids=["little", "some", "much"])
    def test_connected_folds_are_all_undone(self, tmp_path, spread):
        """Norm → gate and up, up → down, norm → q, k and v, v → o for two heads of 64 rows."""
        x = model() | {self.NORM: torch.rand(128) + 0.5, self.GATE: numbers(96, 128, seed=9)}
        x[self.OUT] = numbers(64, 128, seed=10)
        x[self.NORM][5] = 0  # the factor of a channel of zeros cannot be found
        norm = f"{BLOCK}input_layernorm.weight"
        s, t, u, v = (factors(n, seed) ** spread for seed, n in enumerate((128, 128, 64, 96)))
        moved = dict.fromkeys(FED[:2], s) | {self.V: s / u[:, None], self.OUT: u.repeat(2)}
        moved |= {self.GATE: t, self.UP: t / v[:, None], self.DOWN: v}
        y = (
            x
            | {norm: x[norm] / s, self.NORM: x[self.NORM] / t}
            | {name: int4(x[name] * f) for name, f in moved.items()}
        )
        report = compare(tmp_path, x, y)
        (fold,) = list_folded(report)

        assert set(moved) == set(fold.evidence["layers"])
        assert {layer.layer_name: pytest.approx(layer.snr_db, abs=0.3) for layer in report.layers} == {
            name: true_db(x[name], y[name] / f) for name, f in moved.items()
        }
        assert not [finding.message for finding in report.findings if finding.severity != "info"]
        assert "pass" == report.verdict

    def test_folds_explain_norms_with_biases_and_other_names(self, tmp_path):
        block, s, t = "model.decoder.layers.0.", factors(128), factors(96, 2)
        first = [f"{block}{name}.weight" for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")]
        first_name, second = (f"{block}{name}.weight" for name in ("fc1", "fc2"))
        x = {name: numbers(96, 128, seed=n) for n, name in enumerate((*first, first_name))}
        x |= {second: numbers(128, 96, seed=7), f"{block}fc1.bias": numbers(1, 96, seed=8)[0].float()}
        for norm in ("self_attn_layer_norm", "final_layer_norm"):
            x |= {f"{block}{norm}.{ending}": 1 + numbers(1, 128, seed=9)[0].float() for ending in ("weight", "bias")}
        moved = dict.fromkeys(first, s) | {first_name: s / t[:, None], second: t}
        y = (
            x
            | {name: x[name] / s for name in x if "layer_norm" in name}
            | {f"{block}fc1.bias": x[f"{block}fc1.bias"] / t}
        )
        y |= {name: int4(x[name] * f) for name, f in moved.items()}
        report = compare(tmp_path, x, y)

        assert {layer.layer_name: pytest.approx(layer.snr_db, abs=0.3) for layer in report.layers} == {
            name: true_db(x[name], y[name] / f) for name, f in moved.items()
        }
        assert not [first_name.message for first_name in report.findings if first_name.severity != "info"]

    @pytest.mark.parametrize("declared", [{"head_dim": 32}, {"hidden_size": 128, "num_attention_heads": 4}])
    @pytest.mark.parametrize("tiled", [False, True], ids=["repeated", "tiled"])
    def test_declared_heads_decide_which_columns_have_the_factors(self, tmp_path, tiled, declared):
        x, u = {self.V: numbers(64, 128, seed=3), self.OUT: numbers(128, 128, seed=10)}, 3 * factors(64)
        repeated = u.repeat(2) if tiled else u.view(2, 1, 32).expand(2, 2, 32).reshape(-1)
        y = {self.V: int4(x[self.V] / u[:, None]), self.OUT: int4(x[self.OUT] * repeated)}
        report = compare(tmp_path, x, y, config=declared | {"num_key_value_heads": 2})
        wrong = [
            finding.layer
            for finding in report.findings
            if (finding.code, finding.severity) == ("folded_scales", "error")
        ]

        assert ([self.OUT] if tiled else []) == wrong
        assert {self.V, self.OUT} == set(list_folded(report)[0].evidence["layers"])

    BIASED = "model.layers.0.self_attn.v_proj.bias"

    @pytest.mark.parametrize("forgotten", [False, True], ids=["undone", "forgotten"])
    def test_row_folds_apply_to_the_bias_too(self, tmp_path, forgotten):
        x, u = {self.V: numbers(64, 128, seed=3), self.OUT: numbers(64, 64, seed=10)}, 3 * factors(64)
        x[self.BIASED] = numbers(64, seed=11)
        y = {self.V: int4(x[self.V] / u[:, None]), self.OUT: int4(x[self.OUT] * u)}
        report = compare(tmp_path, x, y | {self.BIASED: x[self.BIASED] / (1 if forgotten else u)})
        errors = [(finding.code, finding.layer) for finding in report.findings if finding.severity == "error"]

        assert ([("folded_scales", self.BIASED)] if forgotten else []) == errors
        assert ("inconclusive" if forgotten else "pass") == report.verdict

    @pytest.mark.parametrize("forgotten", [False, True], ids=["undone", "forgotten"])
    def test_norm_folds_apply_to_the_norm_bias_too(self, tmp_path, forgotten):
        norm, bias = (f"{BLOCK}input_layernorm.{ending}" for ending in ("weight", "bias"))
        x, s = model() | {bias: numbers(128, seed=11)}, factors(128)
        y = x | {norm: x[norm] / s, bias: x[bias] / (1 if forgotten else s)} | {name: int4(x[name] * s) for name in FED}
        errors = [
            (finding.code, finding.layer) for finding in compare(tmp_path, x, y).findings if finding.severity == "error"
        ]

        assert ([("folded_scales", bias)] if forgotten else []) == errors

    def test_zero_columns_and_mismatched_rows_are_not_explained(self, tmp_path):
        x, s = model(), factors(96)
        y = x | {self.UP: int4(x[self.UP] / s[:, None]), self.DOWN: int4(x[self.DOWN] * s.flip(0))}
        report = compare(tmp_path, x, y)

        assert [] == list_folded(report)
        assert "pass" != report.verdict


def test_declared_fused_rotation_is_an_error(tmp_path):
    place = {"targets": ["re:.*q_proj$"], "location": "weight_input"}
    transform = {"config_groups": {"R1": {"type": "hadamard", "apply": [place]}}}
    config = {"quantization_config": {"quant_method": "compressed-tensors", "transform_config": transform}}
    x = {"q_proj.weight": numbers(32, 64)}
    report = compare(tmp_path, x, {"q_proj.weight": numbers(32, 64, seed=1)}, config=config)

    assert "rotated_weights" in {finding.code for finding in report.findings}
    assert Status.INCONCLUSIVE == exit_status(report)


@pytest.mark.parametrize("bits", [3, 4])
def test_nearly_constant_norm_factor_is_a_fold_if_weights_compensate(tmp_path, bits):
    norm, s = f"{BLOCK}input_layernorm.weight", (1 + 0.06 * numbers(128, seed=9).float()) / 1.066
    x = model()
    rounded = int4 if bits == 4 else lambda weight: (weight.float() * 50).round() / 50
    y = x | {norm: x[norm] / s} | {name: rounded(x[name] * s).bfloat16() for name in FED}
    right, wrong = (
        compare(tmp_path, x, y),
        compare(tmp_path, x, y | {name: rounded(x[name]).bfloat16() for name in FED}),
    )

    assert [norm] == [finding.layer for finding in list_folded(right)]
    assert "scale_factor" not in {finding.code for finding in right.findings}
    assert [] == list_folded(wrong)
    assert "scale_factor" in {finding.code for finding in wrong.findings}


def test_noisy_norm_is_not_a_fold(tmp_path):
    """Rounding changed these weights more than such factors would, so the factors cannot be found."""
    norm = f"{BLOCK}input_layernorm.weight"
    x = model()
    noisy = x[norm] * (1 + 0.02 * torch.randn(128, generator=torch.Generator().manual_seed(1)))
    y = x | {norm: noisy} | {name: int4(x[name]).bfloat16() for name in FED}
    report = compare(tmp_path, x, y)

    assert [] == list_folded(report)
    assert "unquantized_changed" in {finding.code for finding in report.findings}


@pytest.mark.parametrize("rows", [64, 1024], ids=["read at once", "read in pieces"])
def test_float64_sample_has_all_its_rows(tmp_path, rows):
    """Pieces of float64 are not converted, so they must be copied before the next is read."""
    x = torch.randn(rows, 128, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    sides = [open_checkpoint(store(tmp_path / f"{y.dtype}.safetensors", {"a.weight": y})) for y in (x, x.float())]
    made = pair(*sides, LayerSelection()).pairs[0]
    with open_reader() as reader:
        errors = [find(made.original, made.quantized, reader) for find in (relative_error, error_up_to_factor)]

    assert max(errors) <= 2**-24  # the largest relative rounding error of float32
