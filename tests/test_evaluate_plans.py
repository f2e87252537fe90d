"""A plan is evaluated as the recipes that it names."""

import pytest
from small_models import ids, saved

import quanterr
from quanterr.errors import UsageError

pytest.importorskip("transformers", reason='transformers is not installed (pip install "quanterr[evaluate]")')
CONTEXT = 16


def divergences(original, tokens, against):
    found = quanterr.evaluate(original, against=against, tokens=tokens, context=CONTEXT)
    return {candidate.name: candidate.scores.kld_mean for candidate in found.candidates}


def test_a_plan_of_one_recipe_is_that_recipe_and_a_mix_is_neither(tmp_path):
    original, tokens = saved("llama", tmp_path / "original"), ids(tmp_path)
    plan = quanterr.plan(original, bits=20, to=["int8_row"], device="cpu")
    names = [layer.layer_name for layer in plan.layers]
    for title, recipes in (("uniform", ["int8_row"]), ("mix", ["int8_row", "original"])):
        for n, layer in enumerate(plan.layers):
            layer.recipe = recipes[n % len(recipes)]
        plan.save(tmp_path / f"{title}.json")
    found = divergences(original, tokens, ["int8_row", str(tmp_path / "uniform.json"), str(tmp_path / "mix.json")])
    one, uniform, mix = found.values()

    assert len(names) > 2
    assert 0 < mix < one == uniform


def test_a_plan_of_another_original_is_refused(tmp_path):
    original, tokens = saved("llama", tmp_path / "original"), ids(tmp_path)
    plan = quanterr.plan(original, bits=20, to=["int8_row"], device="cpu")
    plan.layers[0].layer_name = "model.layers.9.mlp.up_proj.weight"
    plan.save(tmp_path / "plan.json")
    with pytest.raises(UsageError, match=r"it is of another original: .* is not there"):
        divergences(original, tokens, str(tmp_path / "plan.json"))
