"""Types of the KV cache: values as the runtimes' own code stores them, and evaluations that use them."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.forked import call
from support.small_models import auto_of, ids, load_tensors, save_model
from test_rounding import CONTEXT, EXACTLY, KLD_TOLERANCE, evaluate, kld, quantize
from torch.nn import functional

import quanterr
from quanterr.errors import CheckpointError, UsageError
from quanterr.evaluation.run import study
from quanterr.recipes.caches import CACHE_TYPES, UNROTATED, parse_cache

pytest.importorskip("transformers", reason='transformers is not installed (pip install "quanterr[evaluate]")')
GOLDEN = load_file(Path(__file__).parents[1] / "golden_inputs/caches.safetensors")  # made by make_caches.py
ONE, SCALE = torch.ones(()), torch.tensor(0.03)  # the scale of the golden fp8
GGML = ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")


@pytest.mark.parametrize("name", [*GGML, "int8_token", "fp8_token", "fp8"])
def test_keys_and_values_equal_the_runtime(name):
    cache = parse_cache(name + (UNROTATED if name in GGML else ""))

    for kept in (cache.keys, cache.values):
        assert torch.equal(GOLDEN[name], kept(GOLDEN["x"], SCALE if name == "fp8" else ONE))


def test_kivi_rounds_keys_by_channels_and_values_by_tokens():
    cache, y = parse_cache("int4"), GOLDEN["y"]

    assert torch.equal(GOLDEN["int4 k"], cache.keys(y, ONE))
    assert torch.equal(GOLDEN["int4 v"], cache.values(y, ONE))
    longer = torch.cat([y, y[:, :, :5]], 2)  # the last group of keys is not full and stays unrounded
    assert torch.equal(torch.cat([GOLDEN["int4 k"], y[:, :, :5]], 2), cache.keys(longer, ONE))


@pytest.mark.parametrize("name", GGML)
def test_ggml_stores_rotated_values(name):
    """Sums of signed multiples of 1/64 are exact, so all codes agree; rotating back adds 64 numbers in any order."""
    x, expected = GOLDEN["x"], GOLDEN[f"{name} rotated v"]
    rounded = parse_cache(name).values(x, ONE)
    size = expected.norm(dim=-1, keepdim=True)

    assert bool(((rounded - expected).abs() <= 2 * 64 * 2.0**-24 * size).all())
    assert not torch.allclose(GOLDEN[name], expected)


@pytest.mark.parametrize("size", [128, 256])
def test_keys_are_rotated_over_the_largest_power_of_two_in_a_head(size):
    """For 128, 1/√128 and sums are rounded, but none of the codes of these numbers changes."""
    expected = GOLDEN[f"q4_0 rotated k {size}"]
    rounded = parse_cache("q4_0").keys(GOLDEN["x"].view_as(expected), ONE)
    norm = expected.norm(dim=-1, keepdim=True)

    assert bool(((rounded - expected).abs() <= 4 * size * 2.0**-24 * norm).all())


def test_heads_that_64_does_not_divide_are_not_rotated():
    x = GOLDEN["x"].view(1, 2, 8, 32)

    assert torch.equal(parse_cache("q4_0:unrotated").keys(x, ONE), parse_cache("q4_0").keys(x, ONE))


@pytest.mark.parametrize("name", CACHE_TYPES)
def test_zeros_stay_zeros_in_their_dtype(name):
    cache, x = parse_cache(name), torch.zeros(2, 1, 40, 64, dtype=torch.bfloat16)

    for kept in (cache.keys, cache.values):
        assert (torch.bfloat16, 0) == (kept(x, ONE).dtype, int(kept(x, ONE).count_nonzero()))


@pytest.mark.parametrize(("name", "axes"), [("fp8_tensor", (1, 2, 3)), ("fp8_head", (2, 3))])
def test_scales_calibrated_on_a_chunk_are_its_largest_magnitudes(name, axes):
    x = torch.cat([GOLDEN["x"], GOLDEN["x"] / 7])
    scale = x.abs().amax(axes, keepdim=True) / 448
    expected = (x / scale).to(torch.float8_e4m3fn).float() * scale

    assert torch.equal(expected, parse_cache(name).keys(x, ONE))


def test_fp4_scales_cover_16_and_32_numbers():
    x = torch.tensor([6.0, 2.4, -0.2, *[0.0] * 13, 12.0, 5.1, *[0.0] * 14]).view(1, 1, 1, 32)

    assert [6.0, 2.0, 0.0, 12.0, 6.0] == parse_cache("nvfp4").keys(x, ONE)[0, 0, 0, [0, 1, 2, 16, 17]].tolist()
    assert [6.0, 2.0, 0.0, 12.0, 6.0] == parse_cache("mxfp4").keys(x, ONE)[0, 0, 0, [0, 1, 2, 16, 17]].tolist()


REFUSED = [
    ("q9_0", "kv q9_0: q9_0 is unknown; choose declared, none or one of f16, bf16, q8_0"),
    ("k=q8_0,q4_0", "kv k=q8_0,q4_0: give one type, or one for keys and one for values"),
    ("k=q8_0,k=q4_0", "give one type, or one for keys"),
    ("fp8:unrotated", "kv fp8:unrotated: fp8 is not rotated"),
    (["q8_0", "Q8_0"], "kv q8_0: is given twice"),
]


@pytest.mark.parametrize(("given", "why"), REFUSED, ids=lambda value: str(value)[:16])
def test_unknown_types_are_refused_before_anything_is_read(given, why):
    with pytest.raises(UsageError, match=why):
        quanterr.evaluate("nothing", "here", kv=given, text="none")


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A model whose heads have 64 values, a size that ggml rotates."""
    folder = tmp_path_factory.mktemp("caches")
    path = save_model("llama", folder / "original", hidden_size=64, num_attention_heads=2, head_dim=64)
    ids(folder)
    return path


def plain(original, name):
    """Return the divergence of a plain model with a rounded cache."""
    attention, cache = functional.scaled_dot_product_attention, parse_cache(name)
    chunks = load_file(original.parent / "ids.safetensors")["ids"].view(-1, CONTEXT)
    model = auto_of("llama").from_pretrained(original, dtype=torch.float64).eval()

    def attend_rounded(query, key, value, *args, **kwargs):
        keys, values = (x if kept is None else kept(x, ONE) for kept, x in ((cache.keys, key), (cache.values, value)))
        return attention(query, keys, values, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        base = model(input_ids=chunks).logits[:, CONTEXT // 2 : -1].log_softmax(-1)
        patch.setattr(functional, "scaled_dot_product_attention", attend_rounded)
        other = model(input_ids=chunks).logits[:, CONTEXT // 2 : -1].log_softmax(-1)
    return float((base.exp() * (base - other)).sum(-1).mean())


def test_original_alone_gets_a_row_for_each_cache(original):
    """Each row equals a plain model whose attention gets rounded keys and values; weights are read once for all."""
    caches = ["q8_0", "q4_0:unrotated", "k=int4,v=fp8_head", "v=q4_0"]
    options = {"tokens": original.parent / "ids.safetensors", "context": CONTEXT, **EXACTLY}
    evaluation = quanterr.evaluate(original, kv=caches, **options)
    alone = quanterr.evaluate(original, kv="q8_0", **options)

    assert [f"original, kv {name}" for name in caches] == [candidate.name for candidate in evaluation.candidates]
    assert caches == [candidate.kv for candidate in evaluation.candidates]
    for name, candidate in zip(caches, evaluation.candidates, strict=True):
        assert plain(original, name) == pytest.approx(candidate.scores.kld_mean, rel=KLD_TOLERANCE), name
        assert candidate.scores.kld_mean > 1e-9
        assert ("pass", []) == (candidate.verdict, candidate.findings)
    assert evaluation.run.read_bytes == alone.run.read_bytes
    assert alone.candidates[0].scores == evaluation.candidates[0].scores
    assert all(candidate.positions for candidate in evaluation.candidates)


@pytest.mark.session
def test_command_takes_several_caches(original, tmp_path):
    tokens = original.parent / "ids.safetensors"
    done = call(
        "evaluate", original, "--against", "int8_row", "--tokens", tokens, "--context", CONTEXT, "--kv", "none",
        "--kv", "q8_0", "--split", "-o", tmp_path / "e.json",
    )  # fmt: skip
    written = json.loads((tmp_path / "e.json").read_text())

    assert 0 == done.returncode, done.stderr
    assert ["int8_row, kv none", "int8_row, kv q8_0", "int8_row, weights alone"] == [
        candidate["name"] for candidate in written["candidates"]
    ]
    assert [None, "q8_0", None] == [candidate["kv"] for candidate in written["candidates"]]
    assert written["candidates"][0]["scores"] == written["candidates"][2]["scores"]


def test_reference_takes_several_caches(original, tmp_path):
    options = {"tokens": original.parent / "ids.safetensors", "context": CONTEXT}
    study(original, save_reference=tmp_path / "reference", **options)
    caches = ["q8_0", "q4_0"]
    evaluation = quanterr.evaluate(original, reference=tmp_path / "reference", kv=caches, **options)
    beside = quanterr.evaluate(original, kv=caches, **options)

    assert [candidate.scores for candidate in beside.candidates] == [
        candidate.scores for candidate in evaluation.candidates
    ]


def test_heads_that_do_not_fill_blocks_are_refused(tmp_path):
    path = save_model("llama", tmp_path / "original")

    with pytest.raises(UsageError, match="kv q8_0: heads of 8 numbers do not fill blocks of 32"):
        quanterr.evaluate(path, kv="q8_0", tokens=ids(tmp_path), context=CONTEXT)


def test_models_without_a_cache_are_refused(tmp_path):
    path = save_model("bert", tmp_path / "original")

    with pytest.raises(UsageError, match="kv q8_0: works only with models that generate; bert has no cache"):
        quanterr.evaluate(path, kv="q8_0", tokens=ids(tmp_path), context=CONTEXT)


def test_latent_keys_are_not_called_emulated(tmp_path):
    path = save_model("deepseek_v3", tmp_path / "original")
    evaluation = quanterr.evaluate(path, kv="fp8", tokens=ids(tmp_path), context=CONTEXT)

    assert "inconclusive" == evaluation.verdict
    assert "keys and values were rounded after kv_b_proj, although runtimes cache its input" in evaluation.reasons[0]


def test_head_scales_come_from_the_file(tmp_path):
    original = save_model("llama", tmp_path / "original")
    ids(tmp_path)
    path, values = quantize(tmp_path / "quantized", original, "fp8_token", None, cache=True)
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["kv_cache_scheme"]["strategy"] = "attn_head"
    (path / "config.json").write_text(json.dumps(config))
    tensors, scales = load_tensors(path), torch.tensor([0.005, 0.02])
    tensors |= {name: scales.clone() for name in tensors if name.endswith(".k_scale")}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    candidate = evaluate(original, path).candidates[0]
    chunks = load_file(tmp_path / "ids.safetensors")["ids"].view(-1, CONTEXT)

    assert ("pass", "fp8") == (candidate.verdict, candidate.kv), candidate.reasons
    assert kld(original, values, chunks, cache=(scales, 0.01)) == pytest.approx(
        candidate.scores.kld_mean, rel=KLD_TOLERANCE
    )
    tensors |= {name: torch.ones(3) for name in tensors if name.endswith(".k_scale")}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"3 scales of keys or values are stored for [24] heads"):
        evaluate(original, path)
