"""Advice that would change nothing is not given."""

from support.making import compare, numbers, quantized_fp8, quantized_int8, store

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
    report = compare(tmp_path, *trained_on(0.1))

    assert [] == [line for line in summarize(report) if "kept" in line or "Keeping" in line]


def test_quantized_layer_among_unquantized_ones_may_be_kept(tmp_path):
    x, y = trained_on(0.0)
    x["lm_head.weight"] = y["lm_head.weight"] = numbers(512, 512)
    y[NAMES[0]], y[f"{NAMES[0]}_scale"] = quantized_int8(x[NAMES[0]])

    assert "kept in BF16, the file grows by" in " ".join(summarize(compare(tmp_path, x, y)))


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


def test_scales_that_would_allow_more_are_the_action(tmp_path):
    x = {name: numbers(64, 64, seed=n) for n, name in enumerate(NAMES)}
    y = {}
    for name, w in x.items():
        y[name], scale = quantized_fp8(w)
        y[f"{name}_scale"] = 1.02 * scale
    summary = summarize(compare(tmp_path, x, y))

    assert [1] == [
        n for n, line in enumerate(summary) if line.startswith("With the same scales, the nearest codes would")
    ]
    assert not any("Keeping" in line or "its scales allow" in line for line in summary)


def test_evidence_is_stated_once_for_names_that_differ_in_their_block(tmp_path):
    x = {name: numbers(64, 64, seed=n) for n, name in enumerate(NAMES)}
    y = {}
    for name, w in x.items():
        y[name], y[f"{name}_scale"] = quantized_int8(w)
    sections = compare(tmp_path, x, y).view(10).sections
    lines = [line for section in sections if section.key == "evidence" for part in section.parts for line in part.lines]

    assert len({line.partition(": ")[0] for line in lines}) == 1
    assert all(line.endswith(f"(and {len(NAMES) - 1} alike)") for line in lines)


def test_doubt_names_its_candidate(tmp_path):
    x = {name: numbers(64, 64, seed=n) for n, name in enumerate(NAMES)}
    codes = {}
    for name, w in x.items():
        codes[name], codes[f"{name}_scale"] = quantized_int8(w)
    original = store(tmp_path / "codes.safetensors", codes)
    files = [store(tmp_path / f"{name}.safetensors", x) for name in ("a", "b")]
    view = quanterr.rank(original, files, device="cpu").view(0)

    assert view.doubts[0].startswith("both candidates: the original stores 6 weights quantized")


def test_pattern_that_excludes_nothing_is_named_in_one_line(tmp_path):
    x = {name: numbers(64, 64, seed=n) for n, name in enumerate(NAMES)}
    y = {}
    for name, w in x.items():
        y[name], y[f"{name}_scale"] = quantized_int8(w)

    assert '"!no-such-layer" excludes nothing: no layer matches it' in summarize(
        compare(tmp_path, x, y, exclude=["no-such-layer"])
    )
