"""One block or weight of a candidate in the original, compared with plain transformers and the same mix of weights."""

import pytest
from safetensors.torch import load_file, save_file
from support.small_models import ids, load_tensors, save_model
from support.tolerances import FLOAT64
from test_evaluate import CONTEXT, EXACTLY, candidate, compute_expected, plain

import quanterr
from quanterr.errors import UsageError
from quanterr.evaluation.run import study

pytestmark = pytest.mark.session

pytest.importorskip("transformers", reason='transformers is not installed (pip install "quanterr[evaluate]")')


def measure(folder, name="llama", **options):
    """Return the original, its candidate as plain weights, tokens, and an evaluation with swaps."""
    original, tokens = save_model(name, folder / "original"), ids(folder)
    quantized, values = candidate(original)
    evaluation = quanterr.evaluate(original, [quantized], tokens=tokens, context=CONTEXT, **EXACTLY | options)
    return original, values, load_file(tokens)["ids"].view(-1, CONTEXT), evaluation


def divergence_of_mix(name, original, values, chunks, takes):
    """Return the divergence of the original with those tensors of the candidate, by plain transformers."""
    first, second = load_tensors(original), load_tensors(values)
    mixed = {key: second[key] if takes(key) else tensor for key, tensor in first.items()}
    folder = original.parent / "mixed"
    folder.mkdir(exist_ok=True)
    save_file(mixed, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_bytes((original / "config.json").read_bytes())
    return compute_expected(name, *(plain(name, path, chunks) for path in (original, folder)), chunks)[2]


@pytest.mark.parametrize("name", ["llama", "gemma2", "mixtral"])
def test_swapped_blocks_equal_plain_transformers(name, tmp_path):
    original, values, chunks, evaluation = measure(tmp_path, name, swap_blocks=True)
    swaps = {swap.name: swap.kld_mean for swap in evaluation.candidates[0].swaps}

    for n in range(2):
        unit = f"model.layers.{n}"
        want = divergence_of_mix(name, original, values, chunks, lambda key, unit=unit: key.startswith(f"{unit}."))
        assert want == pytest.approx(swaps[unit], rel=FLOAT64)
        assert want > 1e-7
    assert swaps["model.embed_tokens"] == swaps["model.norm"] == 0  # the candidate has these unchanged
    assert list(swaps.values()) == sorted(swaps.values(), reverse=True)


def test_swapped_weights_equal_plain_transformers(tmp_path):
    original, values, chunks, evaluation = measure(tmp_path, swap=["q_proj", "*.1.mlp.down_proj.weight"])
    swaps = {swap.name: swap.kld_mean for swap in evaluation.candidates[0].swaps}
    named = [f"model.layers.{n}.self_attn.q_proj.weight" for n in range(2)]

    assert {*named, "model.layers.1.mlp.down_proj.weight"} == set(swaps)
    for name, kld in swaps.items():
        want = divergence_of_mix("llama", original, values, chunks, lambda key, name=name: key == name)
        assert want == pytest.approx(kld, rel=FLOAT64)


def test_each_candidate_has_its_own_swaps_in_any_batch(tmp_path):
    original, values, chunks, evaluation = measure(
        tmp_path, against=["int4_g32"], swap_blocks=True, batch=1, sensitivity=tmp_path / "s.json"
    )
    near, far = evaluation.candidates
    swaps = {swap.name: swap for swap in near.swaps}
    want = divergence_of_mix("llama", original, values, chunks, lambda key: key.startswith("model.layers.1."))
    block = [weight.predicted_kld for weight in near.weights if weight.block == "model.layers.1"]

    assert want == pytest.approx(swaps["model.layers.1"].kld_mean, rel=FLOAT64)
    assert sum(block) == pytest.approx(swaps["model.layers.1"].predicted_kld, rel=1e-12)
    assert {swap.name for swap in far.swaps} == set(swaps)
    assert far.swaps[0].kld_mean > near.swaps[0].kld_mean


def test_every_output_has_swaps_and_gates_hold(tmp_path):
    _, _, _, evaluation = measure(tmp_path, swap_blocks=True, require=["max(swap_kld) <= 0"])
    for ending in ("md", "html", "csv", "json"):
        evaluation.save(tmp_path / f"e.{ending}")
    worst = evaluation.candidates[0].swaps[0]

    assert "Measured alone in the original" in (tmp_path / "e.html").read_text()
    assert f"swaps,quantized,{worst.name},{worst.block},{worst.kld_mean!r}" in (tmp_path / "e.csv").read_text()
    assert evaluation.candidates == quanterr.read_document(str(tmp_path / "e.json")).candidates
    assert "fail" == evaluation.verdict
    assert worst.kld_mean == evaluation.candidates[0].gates[0].observed


def test_swaps_change_no_other_number(tmp_path):
    """Measuring swaps does not change the candidate's own numbers."""
    _, _, _, alone = measure(tmp_path, swap_blocks=True)
    _, _, _, evaluation = measure(tmp_path)

    assert evaluation.candidates[0].scores == alone.candidates[0].scores
    assert evaluation.candidates[0].weights == alone.candidates[0].weights
    assert [] == evaluation.candidates[0].swaps


def test_pattern_without_a_match_is_refused(tmp_path):
    with pytest.raises(UsageError, match='no layer matches "down_prj"; did you mean down_proj'):
        measure(tmp_path, swap=["down_prj"])


def test_other_models_are_refused(tmp_path):
    with pytest.raises(
        UsageError, match="swap_blocks: works only with models that predict the next token; bert does not"
    ):
        measure(tmp_path, "bert", swap_blocks=True)


def test_original_alone_has_nothing_to_judge(tmp_path):
    with pytest.raises(UsageError, match="--baseline judge candidates; give a candidate"):
        study(tmp_path, sensitivity=tmp_path / "s.json", require=["kld_mean <= 1"])


def test_original_alone_has_nothing_to_swap(tmp_path):
    with pytest.raises(UsageError, match="--swap-blocks: puts weights of candidates into the original"):
        study(tmp_path, sensitivity=tmp_path / "s.json", swap_blocks=True)
