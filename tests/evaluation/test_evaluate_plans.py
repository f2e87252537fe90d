"""A plan is evaluated as the recipes it names, and measured while it is made."""

import json
import random
from math import exp, sqrt

import pytest
from support.small_models import ids, save_model, with_words

import quanterr
from quanterr.documents.sensitivity import KLD, Sensitivity, read_sensitivity
from quanterr.errors import UsageError
from quanterr.views.plan.view import conclusion

pytestmark = pytest.mark.session

pytest.importorskip("transformers", reason='transformers is not installed (pip install "quanterr[evaluate]")')
CONTEXT = 16


def divergences(original, tokens, against):
    evaluation = quanterr.evaluate(original, against=against, tokens=tokens, context=CONTEXT)
    return {candidate.name: candidate.scores.kld_mean for candidate in evaluation.candidates}


def test_uniform_plan_equals_its_recipe_and_a_mix_equals_neither(tmp_path):
    original, tokens = save_model("llama", tmp_path / "original"), ids(tmp_path)
    plan = quanterr.plan(original, bits=20, to=["int8_row"], device="cpu")
    names = [layer.layer_name for layer in plan.layers]
    for title, recipes in (("uniform", ["int8_row"]), ("mix", ["int8_row", "original"])):
        for n, layer in enumerate(plan.layers):
            layer.recipe = recipes[n % len(recipes)]
        plan.save(tmp_path / f"{title}.json")
    by_candidate = divergences(
        original, tokens, ["int8_row", str(tmp_path / "uniform.json"), str(tmp_path / "mix.json")]
    )
    recipe, uniform, mix = by_candidate.values()

    assert len(names) > 2
    assert 0 < mix < recipe == uniform


def test_plan_for_another_original_is_refused(tmp_path):
    original, tokens = save_model("llama", tmp_path / "original"), ids(tmp_path)
    plan = quanterr.plan(original, bits=20, to=["int8_row"], device="cpu")
    plan.layers[0].layer_name = "model.layers.9.mlp.up_proj.weight"
    plan.save(tmp_path / "plan.json")
    with pytest.raises(UsageError, match=r"it was made for another original: .* is not there"):
        divergences(original, tokens, str(tmp_path / "plan.json"))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A model with a tokenizer, a text, and a sensitivity with three measured recipes."""
    folder = tmp_path_factory.mktemp("studied")
    original = save_model("llama", folder / "original")
    with_words(original)
    draw = random.Random(5)
    text = folder / "text.txt"
    text.write_text(" ".join(f"w{draw.randrange(90)}" for _ in range(640)))
    made = quanterr.evaluate(
        original, against=RECIPES, text=text, context=CONTEXT, sensitivity=folder / "s.json", sensitivity_chunks=20
    )
    return original, text, folder / "s.json", {candidate.name: candidate.scores for candidate in made.candidates}


# A relative bound: errors and values are rounded to float32, squared, and added along at most 96 columns.
SUMMED = 2 * 96 * 2.0**-24
RECIPES = ["int8_row", "int6_g32", "int4_g32"]


class TestCalibration:
    def test_measured_recipe_costs_its_measured_divergence(self, files):
        original, _, path, scores = files
        ranking = quanterr.sweep(original, to=[*RECIPES, "int5_g32"], sensitivity=path, device="cpu")
        predicted = {candidate.name: candidate.predicted_kld for candidate in ranking.candidates}

        for recipe in RECIPES:
            assert pytest.approx(scores[recipe].kld_mean, rel=SUMMED) == predicted[recipe]
        assert predicted["int6_g32"] < predicted["int5_g32"] < predicted["int4_g32"]

    def test_other_recipes_are_corrected_by_the_average_ratio(self, files):
        *_, path, scores = files
        rows = json.loads(path.read_text())["recipes"]
        off = [scores[recipe].kld_mean / rows[recipe]["predicted_kld"] for recipe in RECIPES]
        sensitivity = read_sensitivity(str(path))
        name, alpha = next(iter(sensitivity.weights.items()))

        average = (off[0] * off[1] * off[2]) ** (1 / 3)
        assert pytest.approx(average * alpha) == sensitivity.alphas()[name] == sensitivity.alphas("int5_g32")[name]
        assert f"int8_row {off[0]:.2f}" in sensitivity.note

    def test_interval_for_other_recipes_covers_one_further_ratio(self):
        """ln of the ratios is -1, 0, 1 with deviation 1; t comes from NIST's table for two degrees of freedom."""
        sensitivity = Sensitivity({"w": 2.0}, factors={"a": exp(-1), "b": 1.0, "c": exp(1)})
        margin = exp(4.303 * sqrt(4 / 3))

        assert sensitivity.margin == pytest.approx(margin, rel=0.0005 * sqrt(4 / 3))  # t has three decimals
        assert f"19 of 20 measurements are {1 / margin:.2g} to {margin:.2g} times the prediction" in sensitivity.note

    def test_two_recipes_give_no_interval(self):
        sensitivity = Sensitivity({"w": 2.0}, factors={"a": 0.5, "b": 1.0})

        assert sensitivity.margin is None
        assert "measure 3 or more" in sensitivity.note

    @pytest.mark.parametrize(("kld", "error"), [(1e-3, 5e-4), (KLD.farthest + 0.01, 1e-4), (0.0, 0.0), (-1e-9, 0.0)])
    def test_noise_and_extreme_ratios_are_not_used_for_calibration(self, files, tmp_path, kld, error):
        document = json.loads(files[2].read_text())
        document["recipes"] = {"int8_row": {"kld": kld, "kld_se": error, "predicted_kld": 1e-3}}
        (tmp_path / "s.json").write_text(json.dumps(document))
        sensitivity = read_sensitivity(str(tmp_path / "s.json"))

        assert (sensitivity.factors, sensitivity.factor, sensitivity.note) == ({}, 1.0, None)

    def test_alphas_are_unchanged_without_measured_recipes(self):
        assert Sensitivity({"w": 2.0}).alphas("int8_row") == {"w": 2.0}

    def test_plans_mention_the_calibration(self, files):
        original, _, path, _ = files
        plan = quanterr.plan(original, bits=6, to=RECIPES, sensitivity=path, device="cpu")

        assert "calibrated by recipes measured" in plan.notes[0]


class TestVerify:
    def test_verified_number_equals_an_evaluation(self, files):
        original, text, path, _ = files
        options = {"text": text, "context": CONTEXT, "device": "cpu"}
        plan = quanterr.plan(original, bits=6, to=RECIPES, sensitivity=path, verify=True, **options)
        alone = quanterr.evaluate(original, against=[plan], **options).candidates[0].scores

        assert (alone.kld_mean, alone.kld_error) == (plan.measured.kld, plan.measured.kld_se)
        assert f"measured {plan.measured.kld:.4g}" in conclusion(plan)

    @pytest.mark.parametrize("wrong", [0.2, 1, 5])
    def test_measured_divergence_keeps_within_the_limit(self, files, tmp_path, wrong):
        original, text, path, scores = files
        document = json.loads(path.read_text())
        document["recipes"] = {}  # the predictions are wrong by a factor
        document["weights"] = [
            {"layer_name": row["layer_name"], "alpha": wrong * row["alpha"]}
            for row in document["weights"]
            if row["alpha"]
        ]
        (tmp_path / "s.json").write_text(json.dumps(document))
        limit = (scores["int6_g32"].kld_mean * scores["int4_g32"].kld_mean) ** 0.5
        plan = quanterr.plan(
            original, max_kld=limit, to=RECIPES, sensitivity=tmp_path / "s.json", verify=True, text=text,
            context=CONTEXT, device="cpu",
        )  # fmt: skip

        assert limit / 2 < plan.measured.kld <= limit
        assert plan.goal == f"--max-kld {limit:g}"

    def test_verification_needs_a_text_and_a_text_needs_verification(self, files):
        original, text, path, _ = files
        for options in ({"verify": True}, {"text": text}):
            with pytest.raises(UsageError, match="give both"):
                quanterr.plan(original, bits=6, sensitivity=path, **options)

    def test_verification_excludes_an_importance_matrix(self, files):
        original, text, path, _ = files
        with pytest.raises(UsageError, match="omit importance"):
            quanterr.plan(original, bits=6, sensitivity=path, verify=True, text=text, importance="imatrix.gguf")

    def test_uninformative_text_is_refused_for_verification(self, files, tmp_path):
        original, _, path, _ = files
        (tmp_path / "same.txt").write_text("w1 " * 640)
        with pytest.raises(UsageError, match=r"^verify: "):
            quanterr.plan(
                original, bits=6, to=RECIPES, sensitivity=path, verify=True, text=tmp_path / "same.txt", context=CONTEXT
            )
