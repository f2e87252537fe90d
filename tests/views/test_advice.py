"""Advice that would change nothing is not given."""

from support.making import compared, numbers, quantized_int8, store

import quanterr
from quanterr.views.comparison.summary import summarize
from quanterr.views.ranking.view import conclusion

NAMES = [f"model.layers.{layer}.mlp.up_proj.weight" for layer in range(6)]


def trained_on(share):
    """Return originals and weights that differ from them, two of these a lot."""
    x = {name: numbers(64, 64, seed=n) for n, name in enumerate(NAMES)}
    shares = [share if n < 2 else 0.01 * share for n in range(len(NAMES))]
    y = {
        name: w.float() + part * numbers(64, 64, seed=50).float()
        for (name, w), part in zip(x.items(), shares, strict=True)
    }
    return x, {name: w.bfloat16() for name, w in y.items()}


def test_layers_stored_as_in_the_original_are_not_to_be_kept(tmp_path):
    report = compared(tmp_path, *trained_on(0.1))

    assert [] == [line for line in summarize(report) if "kept" in line or "Keeping" in line]


def test_quantized_layer_among_them_may_be_kept(tmp_path):
    x, y = trained_on(0.0)
    x["lm_head.weight"] = y["lm_head.weight"] = numbers(512, 512)
    y[NAMES[0]], y[f"{NAMES[0]}_scale"] = quantized_int8(x[NAMES[0]])

    assert "kept in BF16, the file grows by" in " ".join(summarize(compared(tmp_path, x, y)))


def test_ranking_of_equal_files_names_no_best(tmp_path):
    x = {name: numbers(64, 64, seed=n) for n, name in enumerate(NAMES)}
    y = {}
    for name, w in x.items():
        y[name], y[f"{name}_scale"] = quantized_int8(w)
    original, *paths = [
        store(tmp_path / f"{name}.safetensors", tensors) for name, tensors in (("x", x), ("one", y), ("two", y))
    ]
    ranking = quanterr.rank(original, paths, device="cpu")

    assert conclusion(ranking).startswith("one and two are equally good by their weights, in as many bytes")
    assert "0.00 dB" not in conclusion(ranking)
