"""The best candidate for its size, and layers worth taking from another, from real reports of tiny models."""

import json
import math
import shutil
import threading

import pytest
import torch
from msgspec.structs import replace
from support.making import numbers, quantized_fp8, quantized_int8, store

import quanterr
from quanterr.comparison import compare_each
from quanterr.errors import ReportError, UsageError
from quanterr.gates import apply_rules
from quanterr.gates.expression import parse
from quanterr.gates.rules import Rule
from quanterr.options import CompareOptions
from quanterr.ranking.making import make_ranking, name_candidates
from quanterr.views.ranking.view import conclusion

A, B, C = "layers.0.mlp.up_proj.weight", "layers.1.mlp.up_proj.weight", "layers.2.mlp.up_proj.weight"
NORM = "layers.0.input_layernorm.weight"


def original():
    return {name: numbers(64, 128, seed=n) for n, name in enumerate((A, B, C))} | {NORM: numbers(128, seed=7)}


def store_by(recipe, tensors, names=(A, B, C)):
    stored = dict(tensors)
    for name in names:
        stored[name], stored[f"{name}_scale"] = recipe(tensors[name])
    return stored


def coarse(x):
    """Quantize to FP8 with two bits of mantissa: 6 dB less than with three, in as many bytes."""
    scale = x.float().abs().max() / torch.finfo(torch.float8_e5m2).max
    return (x.float() / scale).to(torch.float8_e5m2), scale


@pytest.fixture
def x(tmp_path):
    return store(tmp_path / "x.safetensors", original())


@pytest.fixture
def rank(tmp_path, x):
    """A function that ranks candidates given as tensors by name."""

    def ranking(of=x, **candidates):
        paths = [store(tmp_path / f"{name}.safetensors", tensors) for name, tensors in candidates.items()]
        return quanterr.rank(of, paths, device="cpu")

    return ranking


def by_name(ranking):
    return {candidate.name: candidate for candidate in ranking.candidates}


class TestOrder:
    def test_smallest_error_comes_first_in_any_given_order(self, rank):
        ranking = rank(
            coarse=store_by(coarse, original()),
            fp8=store_by(quantized_fp8, original()),
            int8=store_by(quantized_int8, original()),
        )

        assert ["int8", "fp8", "coarse"] == [c.name for c in ranking.candidates]
        assert [1, 2, 3] == [c.rank for c in ranking.candidates]
        assert ("pass", [A, B, C]) == (ranking.verdict, [layer.layer_name for layer in ranking.layers])

    def test_numbers_equal_compare_where_the_same_layers_differ(self, rank, tmp_path, x):
        candidates = by_name(rank(fp8=store_by(quantized_fp8, original()), int8=store_by(quantized_int8, original())))
        report = quanterr.compare(x, tmp_path / "fp8.safetensors", device="cpu")
        n = 3 * 64 * 128

        # Energies of the original are summed in float32 or float64, as their errors require.
        assert math.isclose(report.aggregate.overall_snr_db, candidates["fp8"].snr_db, rel_tol=1e-9)
        assert report.aggregate.overall_snr_db == candidates["fp8"].overall_snr_db
        assert math.isclose(n * report.aggregate.mean_squared_error, candidates["fp8"].squared_error, rel_tol=1e-12)
        assert report.aggregate.worst_layer_snr_db == candidates["fp8"].worst_layer.snr_db
        assert n + 3 * 4 + 2 * 128 == candidates["fp8"].bytes
        assert 8 * (n + 3 * 4 + 2 * 128) / (n + 128) == candidates["fp8"].bits_per_weight
        assert {"fp8_tensor": 3} == candidates["fp8"].formats

    def test_layer_left_alone_adds_no_error_but_stays_in_the_sum(self, rank):
        """If each candidate were pooled over its own layers, the one that quantizes only one of them would be last."""
        ranking = rank(all=store_by(quantized_fp8, original()), one=store_by(quantized_fp8, original(), [A]))
        candidate, every = by_name(ranking)["one"], by_name(ranking)["all"]

        assert ([1, 2], ["all", "one"]) == ([candidate.rank, every.rank], ranking.front)
        assert candidate.squared_error == next(
            c.squared_error for c in ranking.layers[0].choices if c.candidate == "all"
        )
        assert candidate.snr_db > every.snr_db + 4
        assert abs(candidate.overall_snr_db - every.overall_snr_db) < 1

    def test_copy_has_neither_error_nor_snr(self, rank):
        ranking = rank(copy=original(), fp8=store_by(quantized_fp8, original()))
        copy = by_name(ranking)["copy"]

        assert (1, 0.0, None, True) == (copy.rank, copy.squared_error, copy.snr_db, copy.on_front)
        assert ["fp8", "copy"] == ranking.front
        assert {"copy"} == {layer.best for layer in ranking.layers}

    def test_equal_candidates_are_both_on_the_front(self, rank):
        tensors = store_by(quantized_fp8, original())

        assert {"a", "b"} == set(rank(a=tensors, b=tensors).front)

    def test_changed_norms_do_not_count_as_weight_error(self, rank):
        tensors = store_by(quantized_fp8, original())
        candidates = by_name(rank(a=tensors, b=tensors | {NORM: original()[NORM] * 1.001}))

        assert candidates["a"].squared_error == candidates["b"].squared_error


class TestFront:
    def test_dominated_candidate_names_a_better_one(self, rank):
        rows = store_by(coarse, original())
        for name in (A, B, C):  # the same numbers in more bytes
            rows[f"{name}_scale"] = rows[f"{name}_scale"].expand(64, 1).contiguous()
        ranking = rank(rows=rows, int8=store_by(quantized_int8, original()), copy=original())
        behind = by_name(ranking)["rows"]

        assert (False, "int8") == (behind.on_front, behind.behind)
        assert ["int8", "copy"] == ranking.front


class TestInconclusive:
    @pytest.fixture
    def ranking(self, rank):
        broken = store_by(quantized_int8, original())
        broken[f"{B}_scale"] = broken[f"{B}_scale"] * 3
        return rank(broken=broken, fp8=store_by(quantized_fp8, original()), coarse=store_by(coarse, original()))

    def test_inconclusive_candidate_is_not_ranked_and_gives_its_reason(self, ranking):
        broken = ranking.candidates[-1]

        assert ("broken", "inconclusive", None, False) == (broken.name, broken.verdict, broken.rank, broken.on_front)
        assert None is broken.snr_db is broken.bytes is broken.squared_error
        assert "the scale is off by a factor of 3" in broken.not_ranked
        assert "inconclusive" == ranking.verdict
        assert ranking.reasons[0].startswith("broken: ")

    def test_candidate_with_vanishing_squares_is_inconclusive(self, rank, x):
        """Squared errors that underflow to 0 in float64 look like no error."""
        tiny = 1e-200 * numbers(64, 128).double()
        candidates = by_name(rank(good={A: tiny}, bad={A: -tiny}, of=store(x.parent / "tiny.safetensors", {A: tiny})))

        assert (1, None) == (candidates["good"].rank, candidates["bad"].rank)

    def test_inconclusive_candidate_changes_nothing_for_the_others(self, ranking, rank):
        alone = rank(fp8=store_by(quantized_fp8, original()), coarse=store_by(coarse, original()))

        assert alone.candidates == ranking.candidates[:2]
        assert (alone.layers, alone.swaps, alone.front) == (ranking.layers, ranking.swaps, ranking.front)

    def test_inconclusive_candidates_alone_rank_nothing(self, rank):
        less = store_by(quantized_fp8, original())
        del less[A], less[f"{A}_scale"]
        ranking = rank(a=less, b=less)

        assert ([], [], []) == (ranking.front, ranking.layers, ranking.swaps)
        assert [None, None] == [candidate.rank for candidate in ranking.candidates]
        assert "only in the original" in ranking.reasons[0]

    def test_candidate_without_a_finite_error_is_not_ranked(self, tmp_path, x):
        paths = [store(tmp_path / f"{n}.safetensors", store_by(quantized_fp8, original())) for n in range(2)]
        first, second = compare_each(x, paths, CompareOptions(device="cpu"))
        undefined = [replace(second.layers[0], error_norm=None), *second.layers[1:]]
        ranking = make_ranking(["a", "b"], [first, replace(second, layers=undefined)])

        assert ("inconclusive", ["a"]) == (ranking.verdict, ranking.front)
        assert f"the error of {A} is undefined" == ranking.candidates[1].not_ranked

    def test_interrupted_candidates_are_all_inconclusive(self, tmp_path, x):
        stop = threading.Event()
        stop.set()
        paths = [store(tmp_path / f"{n}.safetensors", store_by(quantized_fp8, original())) for n in range(2)]
        ranking = quanterr.rank(x, paths, device="cpu", stop=stop)

        assert (False, "inconclusive", []) == (ranking.complete, ranking.verdict, ranking.front)
        assert all("interrupted" in candidate.not_ranked for candidate in ranking.candidates)


class TestLayers:
    def test_layers_come_in_natural_order_wherever_they_are_identical(self, tmp_path):
        names = [f"layers.{n}.mlp.up_proj.weight" for n in (0, 2, 10)]
        x = {name: numbers(64, 128, seed=n) for n, name in enumerate(names)}
        paths = [
            store(tmp_path / f"{n}.safetensors", store_by(quantized_fp8, x, [name])) for n, name in enumerate(names)
        ]
        ranking = quanterr.rank(store(tmp_path / "x.safetensors", x), paths[::-1], device="cpu")

        assert names == [layer.layer_name for layer in ranking.layers]

    def test_each_layer_has_its_best_candidate(self, rank):
        half_good = store_by(quantized_int8, original(), [A]) | store_by(coarse, {B: original()[B]}, [B])
        mixed = original() | half_good | store_by(quantized_int8, {C: original()[C]}, [C])
        ranking = rank(mixed=mixed, fp8=store_by(quantized_fp8, original()))

        assert {A: "mixed", B: "fp8", C: "mixed"} == {layer.layer_name: layer.best for layer in ranking.layers}
        assert {"mixed": 2, "fp8": 1} == {c.name: c.best_layers for c in ranking.candidates}


class TestSwaps:
    def test_swap_proposes_worse_layers_and_skips_negligible_gains(self, rank):
        x = original()
        bad = store_by(quantized_int8, x, [A, C]) | store_by(coarse, {B: x[B]}, [B])
        # C stays unquantized, so the candidate is much larger.
        ranking = rank(bad=bad, good=store_by(quantized_int8, x, [A, B]))
        (swaps,) = (swaps for swaps in ranking.swaps if swaps.candidate == "bad")
        (swap,) = swaps.layers
        candidate = by_name(ranking)["bad"]
        errors = {choice.candidate: choice.squared_error for choice in ranking.layers[1].choices}

        assert (B, "good", "int8_tensor", 0) == (swap.layer_name, swap.take_from, swap.format, swap.bytes_change)
        assert errors["good"] - errors["bad"] == swap.squared_error_change == swaps.squared_error_change
        assert candidate.bytes == swaps.bytes
        error = candidate.squared_error + swap.squared_error_change
        assert math.isclose(
            10 ** (-swaps.snr_db / 10) / 10 ** (-candidate.snr_db / 10), error / candidate.squared_error
        )

    def test_swaps_state_their_cost_and_come_by_gain_per_byte(self, rank):
        ranking = rank(coarse=store_by(coarse, original()), copy=original())
        (swaps,) = ranking.swaps
        gains = [swap.squared_error_change / swap.bytes_change for swap in swaps.layers]

        assert ("coarse", sorted(gains)) == (swaps.candidate, gains)
        assert {64 * 128 - 4} == {swap.bytes_change for swap in swaps.layers}
        assert by_name(ranking)["copy"].bytes == swaps.bytes
        assert None is swaps.snr_db

    def test_swaps_include_all_layers_that_cost_nothing_and_few_others(self, tmp_path):
        names = [f"layers.{n}.mlp.up_proj.weight" for n in range(15)]
        x = {name: numbers(64, 128, seed=n) for n, name in enumerate(names)}
        int8, fp8 = (store_by(recipe, x, names) for recipe in (quantized_int8, quantized_fp8))
        early = {name for name in int8 if int(name.split(".")[1]) < 6}
        mixed = [int8 | {name: fp8[name] for name in early}, fp8 | {name: int8[name] for name in early}]
        paths = [store(tmp_path / f"{n}.safetensors", tensors) for n, tensors in enumerate(mixed)]

        (free,) = quanterr.rank(store(tmp_path / "x.safetensors", x), paths, device="cpu").swaps
        taken = {swap.layer_name for swap in free.layers}
        assert ("0", 0, early & set(names)) == (free.candidate, free.bytes_change, taken)

    def test_swaps_mix_only_formats_that_one_runtime_loads(self, x):
        """Better layers in ggml's types cannot be loaded with INT4 from compressed-tensors; those in INT8 can."""
        ranking = quanterr.sweep(x, to=["int4_g32", "gguf_q4_1", "gguf_q8_0", "int8_row"], device="cpu")
        taken = {swaps.candidate: {swap.take_from for swap in swaps.layers} for swaps in ranking.swaps}

        assert {"int4_g32": {"int8_row"}, "gguf_q4_1": {"gguf_q8_0"}} == {
            name: taken[name] for name in ("int4_g32", "gguf_q4_1")
        }

    def test_swaps_leave_out_layers_tied_to_a_norm(self, tmp_path):
        """The factors that AWQ moved into a norm would be missing with another candidate's norm."""
        x = {A.replace("up_proj", "gate_proj"): numbers(64, 128, seed=1), A: numbers(64, 128)}
        norm = "layers.0.post_attention_layernorm.weight"
        x[norm] = torch.ones(128).bfloat16()
        factors = torch.linspace(0.25, 4, 128)
        folded = {name: (w.float() * factors).bfloat16() if w.dim() > 1 else w for name, w in x.items()}
        folded = store_by(quantized_int8, folded, [name for name in x if name != norm])
        folded[norm] = (x[norm].float() / factors).bfloat16()
        plain = store_by(coarse, x, [name for name in x if name != norm])
        paths = [store(tmp_path / f"{name}.safetensors", t) for name, t in (("folded", folded), ("plain", plain))]
        ranking = quanterr.rank(store(tmp_path / "x.safetensors", x), paths, device="cpu")

        assert any(f.code == "folded_scales" for f in by_name(ranking)["folded"].findings)
        assert 2 == len(ranking.layers)
        assert [] == ranking.swaps


class TestKept:
    def test_keeping_a_few_layers_of_the_best_is_proposed_without_asking(self, tmp_path):
        names = [f"layers.{n}.mlp.up_proj.weight" for n in range(24)]
        x = {name: numbers(64, 128, seed=n) for n, name in enumerate(names)}
        bad = store_by(quantized_int8, x, names[1:]) | store_by(coarse, {names[0]: x[names[0]]}, names[:1])
        paths = [
            store(tmp_path / "bad.safetensors", bad),
            store(tmp_path / "fp8.safetensors", store_by(quantized_fp8, x, names)),
        ]
        ranking = quanterr.rank(store(tmp_path / "x.safetensors", x), paths, device="cpu")
        (kept,) = ranking.kept
        (layer,) = kept.layers

        assert ("bad", names[0], None, "BF16") == (kept.candidate, layer.layer_name, layer.take_from, layer.format)
        assert kept.bytes == by_name(ranking)["bad"].bytes + layer.bytes_change
        assert "; 1 layer of " in conclusion(ranking)
        assert " kept in BF16 gives" in conclusion(ranking)

    def test_budget_applies_to_each_candidate(self, tmp_path, x):
        paths = [
            store(tmp_path / f"{name}.safetensors", store_by(recipe, original()))
            for name, recipe in (("int8", quantized_int8), ("coarse", coarse))
        ]
        ranking = quanterr.rank(x, paths, device="cpu", keep_original=f"{2 * 64 * 128}")
        candidates = by_name(ranking)

        assert ["int8", "coarse"] == [kept.candidate for kept in ranking.kept]
        for kept in ranking.kept:
            assert 2 == len(kept.layers)
            assert kept.bytes_change <= 2 * 64 * 128
            left = candidates[kept.candidate].squared_error + kept.squared_error_change
            gain = kept.snr_db - candidates[kept.candidate].snr_db
            assert math.isclose(gain, 10 * math.log10(candidates[kept.candidate].squared_error / left))

    def test_requested_gain_is_reached(self, tmp_path, x):
        paths = [
            store(tmp_path / f"{name}.safetensors", store_by(recipe, original()))
            for name, recipe in (("int8", quantized_int8), ("coarse", coarse))
        ]
        ranking = quanterr.rank(x, paths, device="cpu", keep_original="3dB")

        for kept in ranking.kept:
            assert kept.snr_db >= by_name(ranking)[kept.candidate].snr_db + 3
            assert 2 == len(kept.layers)


def sensitivity(path, **alphas):
    """Write a file as evaluate --sensitivity does, with these alphas."""
    weights = [{"layer_name": {"a": A, "b": B}.get(name, name), "alpha": alpha} for name, alpha in alphas.items()]
    document = {"schema": "quanterr.sensitivity", "schema_version": "1.0", "weights": weights}
    path.write_text(json.dumps(document))
    return path


class TestSensitivity:
    def test_sensitivity_predicts_the_best_candidate(self, tmp_path, x):
        """The candidate with less error overall stores the most important layer worse."""
        int8 = store_by(quantized_int8, original())
        int8[B], int8[f"{B}_scale"] = coarse(original()[B])
        paths = [
            store(tmp_path / "int8.safetensors", int8),
            store(tmp_path / "fp8.safetensors", store_by(quantized_fp8, original())),
        ]
        ranking = quanterr.rank(
            x, paths, device="cpu", sensitivity=sensitivity(tmp_path / "s.json", a=0.5, b=100.0, x=1)
        )
        reports = {path.stem: quanterr.compare(x, path, device="cpu") for path in paths}

        for candidate in ranking.candidates:
            nmse = {layer.layer_name: layer.nmse for layer in reports[candidate.name].layers}
            assert math.isclose(0.5 * nmse[A] + 100 * nmse[B], candidate.predicted_kld, rel_tol=1e-12)
        best, other = sorted(ranking.candidates, key=lambda candidate: candidate.predicted_kld)
        is_named = f"; {best.name} has the lowest predicted KLD" in conclusion(ranking)
        assert is_named == (best.name != ranking.candidates[0].name)
        assert best.predicted_kld < other.predicted_kld

    def test_sensitivity_gives_each_layer_its_share_and_gates_may_ask_for_it(self, tmp_path, x):
        y = store(tmp_path / "fp8.safetensors", store_by(quantized_fp8, original()))
        report = quanterr.compare(x, y, device="cpu", sensitivity=sensitivity(tmp_path / "s.json", a=0.5))
        known = [layer for layer in report.layers if layer.predicted_kld is not None]

        assert [(A, 0.5 * known[0].nmse)] == [(layer.layer_name, layer.predicted_kld) for layer in known]
        assert known[0].predicted_kld == report.aggregate.predicted_kld
        assert str(tmp_path / "s.json") == report.settings.sensitivity
        assert "sensitivity_missing" in [finding.code for finding in report.findings]
        assert any(line.startswith("predicted KLD: ") and line.endswith(f"from {A}") for line in report.view(0).summary)
        assert "pass" == apply_rules(report, [Rule("g", parse("global(predicted_kld) <= 1"))]).verdict
        assert quanterr.compare(x, y, device="cpu").aggregate.predicted_kld is None

    def test_sensitivity_from_another_model_is_inconclusive(self, tmp_path, x):
        y = store(tmp_path / "fp8.safetensors", store_by(quantized_fp8, original()))
        report = quanterr.compare(x, y, device="cpu", sensitivity=sensitivity(tmp_path / "s.json", other=1.0))

        assert ("inconclusive", ["the sensitivity names none of the compared weights"]) == (
            report.verdict,
            report.reasons,
        )

    @pytest.mark.parametrize(
        "text", ["{", "[]", '{"schema": "x"}', '{"schema": "quanterr.sensitivity", "weights": []}']
    )
    def test_invalid_sensitivity_file_is_refused(self, tmp_path, x, text):
        (tmp_path / "s.json").write_text(text)
        with pytest.raises(ReportError):
            quanterr.rank(x, [x, shutil.copy(x, tmp_path / "y.safetensors")], sensitivity=tmp_path / "s.json")


class TestNames:
    def test_names_are_path_ends_without_the_shared_parts(self):
        assert ["q4", "q5"] == name_candidates(["a/q4.gguf", "b/q5.gguf"])
        assert ["q4.gguf", "q4.sft"] == name_candidates(["a/q4.gguf", "b/q4.sft"])

    def test_equal_file_names_get_their_folders(self):
        paths = ["a/x/model.safetensors", "b/x/model.safetensors", "c/other.safetensors"]

        assert ["a/x/model", "b/x/model", "other"] == name_candidates(paths)
        assert ["model", "q8"] == name_candidates(["org/model/", "recipes/q8/"])
        assert ["/a/q4", "b/a/q4"] == name_candidates(["/a/q4.sft", "/b/a/q4.sft"])

    @pytest.mark.parametrize("paths", [[], ["a"], ["a", "a"], ["a/b", "./a//b"]])
    def test_two_different_names_are_required(self, paths):
        with pytest.raises(UsageError, match=r"at least two|given twice"):
            name_candidates(paths)

    def test_names_without_unicode_are_shown_in_ascii(self):
        names = name_candidates(["a\udcff.sft", "b.sft"])

        assert ["a\\udcff", "b"] == names


def test_json_is_strict_and_only_run_changes(rank):
    candidates = {"copy": original(), "fp8": store_by(quantized_fp8, original())}
    documents = [json.loads(rank(**candidates).to_json(), parse_constant=pytest.fail) for _ in range(2)]
    for document in documents:
        document.pop("run")

    assert documents[0] == documents[1]
    assert ("quanterr.ranking", "1.7") == (documents[0]["schema"], documents[0]["schema_version"])


def test_candidate_may_be_an_open_checkpoint(tmp_path, x):
    y = store(tmp_path / "y.safetensors", store_by(quantized_fp8, original()))
    z = store(tmp_path / "z.safetensors", store_by(quantized_int8, original()))
    with quanterr.open_checkpoint(y) as checkpoint:
        assert ["z", "y"] == [c.name for c in quanterr.rank(x, [checkpoint, z], device="cpu").candidates]


class TestConclusion:
    def test_conclusion_names_the_best_its_lead_and_its_price(self, rank):
        ranking = rank(fp8=store_by(quantized_fp8, original()), int8=store_by(quantized_int8, original()))
        lead = ranking.candidates[0].snr_db - ranking.candidates[1].snr_db

        assert conclusion(ranking).startswith(f"int8 is best by its weights: {lead:.2f} dB more than fp8 ")

    @pytest.mark.parametrize(
        ("sizes", "words"),
        [
            ((1007, 1000), "for 0.7 % more bytes"),
            ((970, 1000), "in 3 % fewer bytes"),
            ((1999, 1000), "for 100 % more bytes"),
            ((1000, 1000), "in as many bytes"),
        ],
    )
    def test_conclusion_compares_the_price_with_the_second(self, rank, sizes, words):
        ranking = rank(fp8=store_by(quantized_fp8, original()), int8=store_by(quantized_int8, original()))
        for candidate, size in zip(ranking.candidates, sizes, strict=True):
            candidate.bytes = size

        assert conclusion(ranking).endswith(words)

    def test_conclusion_states_that_no_candidate_can_be_ranked(self, rank):
        ranking = rank(fp8=store_by(quantized_fp8, original()), int8=store_by(quantized_int8, original()))
        for candidate in ranking.candidates:
            candidate.rank = None

        assert "no candidate can be ranked" == conclusion(ranking)


class TestGivenNames:
    """Candidates in a dict are called as its keys."""

    def test_candidates_in_a_dict_have_its_names(self, x, tmp_path):
        path = store(tmp_path / "fp8.safetensors", store_by(quantized_fp8, original()))
        in_memory = {A: original()[A] + 0.01, B: original()[B], C: original()[C], NORM: original()[NORM]}
        ranking = quanterr.rank(x, {"of/mine": path, "theirs": in_memory}, against="int8_row", device="cpu")

        assert {"of/mine", "theirs", "int8_row"} == by_name(ranking).keys()
        assert str(path) == by_name(ranking)["of/mine"].path

    def test_name_that_occurs_twice_is_refused(self, x):
        with pytest.raises(UsageError, match=r"^int8_row: two candidates have this name$"):
            quanterr.rank(x, {"int8_row": x}, against="int8_row")
