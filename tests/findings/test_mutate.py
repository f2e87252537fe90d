"""A few pairs of each family of `make mutate`, and whether the suite reports faults of quanterr."""

import pytest
import torch
from mutation import alone, both_sides, coding, configs, excuses, golden, judging, scales, sources, unquantized
from mutation.__main__ import verdict
from mutation.accidents import MUTATIONS, Mutation
from mutation.judging import STRUCTURAL, Loss, Outcome, Pair, loss
from mutation.layouts import LAYOUTS, STACKS, find_layout
from mutation.originals import LAYERS, make_generator, make_stacks, matrix, norm
from mutation.pairs import Bench, Case, as_matrix, make_pair, not_compared
from mutation.parts import DAMAGES
from mutation.running import JOBS

from quanterr.errors import CheckpointError

pytestmark = pytest.mark.session

SOME_PAIRS = [
    "fp8_row/ct_fp8_channel.safetensors",
    "gptq/gptq_v1_w4_g32_asym_gptqmodel",
    "gguf_q4_1/llama_quantize.gguf",
    "nvfp4/modelopt_nvfp4.safetensors",
]
ONE_EACH = sorted(golden.of_each_format())
NOTICED_RESULTS = ("noticed", "slight", "small", "by design")
DAMAGE = {damage.name: damage for damage in scales.DAMAGES}


@pytest.fixture
def few():
    """Return two blocks, each with two matrices, a bias and a norm."""
    tensors = {}
    for n in range(LAYERS):
        block = f"model.layers.{n}."
        tensors[f"{block}mlp.down_proj.weight"] = matrix(128, 512, n)
        tensors[f"{block}self_attn.v_proj.weight"] = matrix(128, 256, 10 + n)
        tensors[f"{block}self_attn.v_proj.bias"] = norm(128, 20 + n)
        tensors[f"{block}input_layernorm.weight"] = norm(256, 30 + n)
    return tensors


@pytest.fixture
def bench(tmp_path):
    return Bench(tmp_path)


def list_bad(outcomes):
    """Return the outcomes that count against quanterr."""
    return [str(outcome) for outcome in outcomes if outcome.told in judging.BAD]


class TestFamilies:
    @pytest.mark.parametrize("layout", ["INT8 row", "AWQ", "Q4_0"])
    def test_bad_scales_are_noticed(self, bench, few, layout):
        pair = make_pair(bench, find_layout(layout), few)
        cases = [scales.case(pair, DAMAGE[name]) for name in ("all × 64", "tensor / 6", "tile zero")]
        assert [] == list_bad(pair.outcome("scales", case) for case in cases if case)
        assert ["clean"] == [judging.of_sound("scales", layout, pair.report).told]

    @pytest.mark.parametrize("layout", ["Q2_K", "Q6_K", "IQ4_XS", "Q8_0", "NF4 double", "FP8 tensor"])
    def test_unusual_but_correct_scales_cause_no_warning(self, bench, few, layout):
        for name in few:
            if name.endswith("_proj.weight"):
                few[name] = few[name].clone()
                few[name][5::9] *= 3e-4
                few[name][7::16, :64] = 0
        pair = make_pair(bench, find_layout(layout), few)
        assert judging.of_sound("scales", layout, pair.report).told in ("clean", "told")

    @pytest.mark.parametrize("layout", ["FP8 tensor", "FP8 128 × 128"])
    def test_small_values_lost_to_a_large_scale_are_noticed(self, bench, few, layout):
        pair = make_pair(bench, find_layout(layout), few)
        outcome = pair.outcome("scales", scales.case(pair, DAMAGE["all × 64"]))
        assert ("noticed", True) == (outcome.told, outcome.loss.layer < 1)

    def test_other_sources_are_noticed(self, bench, few):
        pair = make_pair(bench, find_layout("CT INT4 g128"), few)
        change = sources.SOURCES["LoRA of 15 %"]
        changed = {name: coding.sound(pair.layout, change(few[name])) for name in few if name.endswith("_proj.weight")}
        assert "noticed" == pair.outcome("sources", Case("LoRA", changed)).told

    def test_another_config_is_noticed(self, bench, few):
        pair = make_pair(bench, find_layout("FP8 row"), few)
        cases = list(configs.of_models(pair))
        outcomes = [
            pair.outcome("configs", case) for case in cases if case.name.split()[1] in ("rope_theta", "model_type")
        ]
        assert ["noticed", "by design"] == [outcome.told for outcome in outcomes]

    def test_change_in_an_unquantized_tensor_is_noticed(self, bench, few):
        pair = make_pair(bench, find_layout("FP8 row"), few, dtype=torch.float32)
        changed = {unquantized.V_BIAS: few[unquantized.V_BIAS].float().roll(1)}
        assert "noticed" == pair.outcome("casts", Case("rolled", changed)).told

    @pytest.mark.parametrize("name", ["FP8 expert", "FP8 row"])
    def test_loss_on_both_sides_is_noticed(self, bench, name):
        outcomes = list(both_sides.experts(bench, name))
        assert {"noticed", "clean", "told"} == {outcome.told for outcome in outcomes}
        assert all(outcome.loss is None for outcome in outcomes if outcome.told == "told")

    def test_damage_is_noticed_without_an_original(self, bench):
        assert {"noticed", "clean"} == {outcome.told for outcome in alone.outcomes(bench, "FP8 expert")}

    @pytest.mark.parametrize("name", SOME_PAIRS)
    def test_accidents_are_noticed(self, bench, name):
        sound = golden.make_sound(golden.GOLDEN / name, bench)
        outcomes = [outcome for mutation in MUTATIONS for outcome in golden.break_together(sound, mutation)]
        outcomes += [outcome for damage in DAMAGES for outcome in golden.damage_parts(sound, damage)]
        assert len(outcomes) > 10
        assert [] == list_bad(outcomes)

    @pytest.mark.slow  # a file of each format
    @pytest.mark.parametrize("case", ONE_EACH, ids=golden.name_of)
    def test_sound_file_raises_no_error(self, bench, case):
        report = golden.make_sound(case, bench).report
        assert [] == [finding.message for finding in report.findings if finding.severity == "error"]


class TestLosses:
    def test_loss_covers_the_whole_and_the_worst_part(self):
        x = torch.randn(64, 128, generator=make_generator(1))
        y = x + 0.01 * torch.randn(x.shape, generator=make_generator(2))
        worse = y.clone()
        worse[5] = x[5] + 10 * (y - x)[5]  # 20 dB
        lost = loss(Pair(x, y), Pair(x, worse))
        energy = (y - x).double().square()
        whole = 10 * torch.log10(1 + 99 * energy[5].sum() / energy.sum())

        assert lost.layer == pytest.approx(float(whole), abs=1e-3)  # the dequantized values are float32
        assert lost.part == pytest.approx(20, abs=1e-3)

    def test_loss_with_infinite_values_is_structural(self):
        x = torch.ones(4, 4)
        assert STRUCTURAL == loss(Pair(x, x), Pair(x, x * torch.inf))

    def test_lucky_values_do_not_count_as_loss(self):
        x = torch.randn(64, 128, generator=make_generator(1))
        pairs = Pair(x, x), Pair(x, x * 1.001)
        assert loss(*pairs, best_db=50.0).layer == pytest.approx(0)
        assert loss(*pairs, best_db=70.0).layer == pytest.approx(10, abs=0.01)

    @pytest.mark.parametrize("layout", [*LAYOUTS, *STACKS], ids=lambda layout: layout.name)
    def test_loss_is_measured_on_stored_values(self, bench, few, layout):
        """Two programs measure one SNR: on the values written here and on those read back."""
        x = make_stacks() if layout.family == "experts" else few
        pair = make_pair(bench, layout, x)
        shown = {layer.layer_name: layer.snr_db for layer in pair.report.layers}
        snr_written = {
            name: judging.snr(as_matrix(x[name]), y.values) for name, y in pair.weights.items() if name in shown
        }

        assert snr_written
        assert snr_written == pytest.approx(shown, abs=1e-4)  # the values are float32


class TestVerdicts:
    def test_unreported_damage_is_silent(self, bench, few):
        pair = make_pair(bench, find_layout("INT8 row"), few)
        outcome = pair.outcome("scales", Case("nothing", {}))
        assert ("SILENT", 1) == (outcome.told, verdict([outcome]))

    def test_small_loss_may_be_silent(self, bench, few):
        pair = make_pair(bench, find_layout("INT8 row"), few)
        outcome = pair.outcome("scales", Case("nothing", {}, Loss(0.9, 5.9)))
        assert ("small", 0) == (outcome.told, verdict([outcome]))

    def test_failure_is_silent_and_a_refusal_is_not(self):
        refused, failed = (
            not_compared("family", "name", STRUCTURAL, error)
            for error in (CheckpointError("file", "why"), ValueError())
        )
        assert ("noticed", "SILENT") == (refused.told, failed.told)
        assert "ERROR" == not_compared("family", "name", None, CheckpointError("file", "why")).told

    def test_three_in_a_thousand_sound_pairs_may_have_warnings(self):
        clean, warned = (Outcome("family", "name", label, None) for label in ("clean", "WARNED"))
        assert 0 == verdict([warned] * 3 + [clean] * 997)
        assert 1 == verdict([warned] * 3 + [clean] * 996)

    def test_one_percent_of_the_losses_may_be_an_info(self):
        noticed, info = (Outcome("family", "name", label, STRUCTURAL) for label in ("noticed", "info"))
        small = Outcome("family", "name", "small", Loss(0.9, 5.9))
        assert 0 == verdict([info, *[noticed] * 99])
        assert 1 == verdict([info, *[noticed] * 98, small])

    def test_change_without_effect_is_not_counted(self, bench):
        sound = golden.make_sound(golden.GOLDEN / SOME_PAIRS[0], bench)
        assert [] == list(golden.break_together(sound, Mutation("nothing", lambda _stored, _weight: True)))

    def test_table_counts_both_sides(self):
        outcomes = [
            Outcome("a", "x", "noticed", STRUCTURAL),
            Outcome("a", "y", "clean", None),
            Outcome("b", "z", "SILENT", STRUCTURAL),
        ]
        table = judging.table(outcomes, "family", lambda outcome: outcome.family)
        rows = {line.split()[0]: line.split()[1:] for line in table.splitlines()}
        assert rows["a"] == ["1", "1", "1", "1"]
        assert rows["b"] == ["1", "1"]
        assert rows["all"] == ["2", "1", "1", "1", "1"]

    def test_excuses_have_a_table_of_their_own(self):
        outcomes = [Outcome("a", "x", "info", STRUCTURAL, excuse="folded"), Outcome("a", "y", "clean", None)]
        lines = judging.table(outcomes, "excuse", lambda outcome: outcome.excuse).splitlines()
        assert [["folded", "1", "1"], ["all", "1", "1"]] == [line.split() for line in lines[1:]]


class TestExcuses:
    @pytest.mark.parametrize("file", excuses.OWN_DECLARATIONS)
    def test_files_of_methods_cause_no_warning(self, bench, file):
        pair = excuses.make_pair(bench, excuses.OWN_DECLARATIONS[file], file)
        assert judging.of_sound("excuses", file, pair.report).told in ("clean", "told")

    def test_importance_causes_no_warning(self, bench):
        assert [] == excuses.make_pair(bench, "Q4_K", "importance").report.findings

    def test_folded_factors_are_known(self):
        x = matrix(64, 128, 1).double()
        y = x * norm(64, 2).double()[:, None] * norm(128, 3).double()
        assert judging.snr(y, excuses.fold(x, y)) > judging.BEST_DB


def test_names_are_unique():
    for table in (MUTATIONS, DAMAGES, scales.DAMAGES, JOBS):
        assert len(table) == len({entry.name for entry in table})
