import pytest
import torch
from support.gguf_stored import Stored, architecture, pair_rows, write_gguf
from support.making import numbers, open_pairing, read_whole, store

import quanterr
from quanterr.documents.gate_results import exit_status
from quanterr.errors import Status
from quanterr.pairing.model import Bucket

HEADS, KV_HEADS, DIM = 4, 2, 64  # the numbers that LLAMA declares

ORIGINAL = {
    "model.embed_tokens.weight": numbers(32, DIM, seed=1),
    "model.norm.weight": numbers(DIM, seed=2),
    "lm_head.weight": numbers(32, DIM, seed=3),
    "model.layers.0.input_layernorm.weight": numbers(DIM, seed=4),
    "model.layers.0.self_attn.q_proj.weight": numbers(DIM, DIM, seed=5),
    "model.layers.0.self_attn.q_proj.bias": numbers(DIM, seed=6),
    "model.layers.0.self_attn.k_proj.weight": numbers(DIM // 2, DIM, seed=7),
    "model.layers.0.self_attn.v_proj.weight": numbers(DIM // 2, DIM, seed=8),
    "model.layers.0.mlp.down_proj.weight": numbers(DIM, 96, seed=9),
}
EXPERTS = {
    f"model.layers.0.block_sparse_moe.experts.{e}.{w}.weight": numbers(96, DIM, seed=20 + 3 * e + n)
    for e in range(3)
    for n, w in enumerate(("w1", "w3"))
}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers.0.input_layernorm": "blk.0.attn_norm",
    "model.layers.0.self_attn.q_proj": "blk.0.attn_q",
    "model.layers.0.self_attn.k_proj": "blk.0.attn_k",
    "model.layers.0.self_attn.v_proj": "blk.0.attn_v",
    "model.layers.0.mlp.down_proj": "blk.0.ffn_down",
}


def convert(original, permuted=True, one_more=False):
    """Return the converter's version of an original, all in F32."""
    made = {}
    for name, weight in original.items():
        module, _, ending = name.rpartition(".")
        weight = weight.float()
        if "q_proj" in name and permuted:
            weight = pair_rows(weight, HEADS)
        if "k_proj" in name and permuted:
            weight = pair_rows(weight, KV_HEADS)
        if "norm" in name and one_more:
            weight = weight + 1
        if module in NAMES:
            made[f"{NAMES[module]}.{ending}"] = weight
    for w, word in (("w1", "gate"), ("w3", "up")):
        experts = [weight.float() for name, weight in original.items() if name.endswith(f"{w}.weight")]
        if experts:
            made[f"blk.0.ffn_{word}_exps.weight"] = torch.stack(experts)
    return made


def write(path, tensors, name="llama"):
    stored = [Stored(name, "F32", tuple(t.shape), t.contiguous().numpy().tobytes()) for name, t in tensors.items()]
    return write_gguf(path, stored, architecture(name))


def compare_both_ways(folder, original, tensors, name="llama"):
    x = store(folder / "original.safetensors", original)
    y = write(folder / "model.gguf", tensors, name)
    return quanterr.compare(x, y, device="cpu"), quanterr.compare(y, x, device="cpu")


def test_every_tensor_finds_its_counterpart_in_both_directions(tmp_path):
    for report in compare_both_ways(tmp_path, ORIGINAL, convert(ORIGINAL)):
        assert [] == report.layers == report.other_changes == report.not_compared
        assert len(ORIGINAL) == len(report.lossless)
        assert Status.OK == exit_status(report)


def test_head_rows_are_reordered_even_at_two_bits(tmp_path):
    made = convert(ORIGINAL)
    made["blk.0.attn_q.weight"] += 0.6 * numbers(DIM, DIM, seed=50).float()
    for report in compare_both_ways(tmp_path, ORIGINAL, made, "baichuan"):
        assert 1 == len(report.layers)
        assert 3 < report.layers[0].snr_db < 6


def contradiction_of(report):
    """Return the only finding about a convention, and the names of its layers."""
    (finding,) = (finding for finding in report.findings if finding.code == "wrong_convention")
    return finding, set(finding.evidence["layers"])


@pytest.mark.parametrize(
    ("name", "permuted", "prescribed", "other"),
    [
        ("llama", False, "rows of heads in pairs, as llama.cpp expects for llama", "rows of heads in halves"),
        ("qwen2", True, "rows of heads in halves, as llama.cpp expects for qwen2", "rows of heads in pairs"),
    ],
)
def test_unexpected_head_row_order_is_an_error(tmp_path, name, permuted, prescribed, other):
    report, reverse = compare_both_ways(tmp_path, ORIGINAL, convert(ORIGINAL, permuted=permuted), name)
    finding, layers = contradiction_of(report)

    assert Status.INCONCLUSIVE == exit_status(report) == exit_status(reverse)
    assert (prescribed, other) == (finding.evidence["prescribed"], finding.evidence["other"])
    assert {"model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.q_proj.bias"} < layers
    assert all(layer.snr_db < 3 for layer in report.layers)  # as it will be loaded
    assert {"blk.0.attn_q.weight", "blk.0.attn_q.bias", "blk.0.attn_k.weight"} == contradiction_of(reverse)[1]


def test_single_reordered_q_is_an_error(tmp_path):
    made = convert(ORIGINAL, permuted=True)
    made["blk.0.attn_q.weight"] = ORIGINAL["model.layers.0.self_attn.q_proj.weight"].float()
    for report in compare_both_ways(tmp_path, ORIGINAL, made, "baichuan"):
        _, layers = contradiction_of(report)

        assert layers in ({"model.layers.0.self_attn.q_proj.weight"}, {"blk.0.attn_q.weight"})
        assert Status.INCONCLUSIVE == exit_status(report)


def test_other_values_are_repaired_by_no_order(tmp_path):
    made = convert(ORIGINAL)
    made["blk.0.attn_q.weight"] = numbers(DIM, DIM, seed=99).float()
    report, _ = compare_both_ways(tmp_path, ORIGINAL, made)

    assert ["model.layers.0.self_attn.q_proj.weight"] == [layer.layer_name for layer in report.layers]
    assert Status.INCONCLUSIVE == exit_status(report)


TIED = {name: weight for name, weight in ORIGINAL.items() if name != "lm_head.weight"}


@pytest.mark.parametrize("name", ["gemma", "gemma2"])
def test_norms_stored_plus_one_are_compared_as_such(tmp_path, name):
    made = convert(TIED, permuted=False, one_more=True)
    for report in compare_both_ways(tmp_path, TIED, made, name):
        assert [] == report.layers == report.other_changes == report.not_compared


@pytest.mark.parametrize(
    ("name", "one_more", "prescribed", "other"),
    [
        ("llama", True, "values as in the original, as llama.cpp expects for llama", "values plus one"),
        ("gemma", False, "values plus one, as llama.cpp expects for gemma", "values as in the original"),
    ],
)
def test_unexpected_norm_offset_is_an_error(tmp_path, name, one_more, prescribed, other):
    made = convert(TIED, permuted=name == "llama", one_more=one_more)
    report, reverse = compare_both_ways(tmp_path, TIED, made, name)
    finding, layers = contradiction_of(report)

    assert Status.INCONCLUSIVE == exit_status(report) == exit_status(reverse)
    assert {"model.norm.weight", "model.layers.0.input_layernorm.weight"} == layers
    assert (prescribed, other) == (finding.evidence["prescribed"], finding.evidence["other"])
    assert {"output_norm.weight", "blk.0.attn_norm.weight"} == contradiction_of(reverse)[1]


def test_embedding_does_not_replace_a_head_on_the_other_side(tmp_path):
    made = convert(ORIGINAL, permuted=False, one_more=True)  # Gemma has no separate head
    report, _ = compare_both_ways(tmp_path, ORIGINAL, made, "gemma")

    assert [] == report.layers
    assert {("lm_head.weight", "only_in_original"), ("output.weight", "only_in_quantized")} == {
        (left.layer_name, left.bucket) for left in report.not_compared
    }


def test_tensor_with_another_shape_is_not_compared(tmp_path):
    made = convert(ORIGINAL)
    made["blk.0.ffn_down.weight"] = made["blk.0.ffn_down.weight"].view(96, DIM)
    for report in compare_both_ways(tmp_path, ORIGINAL, made):
        assert Status.INCONCLUSIVE == exit_status(report)
        assert [Bucket.SHAPE_MISMATCH] * 2 == [left.bucket for left in report.not_compared]
        assert "[64, 96]" in report.not_compared[0].reason
        assert "[96, 64]" in report.not_compared[0].reason


@pytest.mark.parametrize("fused", [False, True], ids=["single", "stacked"])
def test_experts_are_found_in_their_stacks(tmp_path, fused):
    original = dict(EXPERTS)
    if fused:
        gate, up = (torch.stack([t for n, t in EXPERTS.items() if n.endswith(f"{w}.weight")]) for w in ("w1", "w3"))
        original = {"model.layers.0.mlp.experts.gate_up_proj": torch.cat([gate, up], 1)}
    made = convert(EXPERTS) | {"token_embd.weight": ORIGINAL["model.embed_tokens.weight"].float()}
    original["model.embed_tokens.weight"] = ORIGINAL["model.embed_tokens.weight"]
    x = store(tmp_path / "original.safetensors", original)
    with open_pairing(x, write(tmp_path / "model.gguf", made)) as plan:
        assert original.keys() == {pair.name for pair in plan.pairs}
        assert [] == plan.leftovers
        for pair in plan.pairs:
            assert torch.equal(original[pair.name].float().view(pair.quantized.matrix), read_whole(pair.quantized))


def test_tensor_computed_by_the_converter_is_not_a_weight(tmp_path):
    made = convert(ORIGINAL) | {"rope_freqs.weight": torch.ones(8)}
    report, _ = compare_both_ways(tmp_path, ORIGINAL, made)

    assert Status.OK == exit_status(report)
    assert 1 == report.coverage.quantized[Bucket.CONSUMED].tensors


def test_missing_tensor_is_reported(tmp_path):
    made = convert(ORIGINAL)
    del made["blk.0.attn_v.weight"]
    report, _ = compare_both_ways(tmp_path, ORIGINAL, made)

    assert ["model.layers.0.self_attn.v_proj.weight"] == [left.layer_name for left in report.not_compared]
    assert Status.INCONCLUSIVE == exit_status(report)


def test_leading_ones_dropped_by_ggml_are_restored(tmp_path):
    original = {"blocks.0.modulation": numbers(1, 6, 64, seed=1), "x_pad_token": numbers(1, 64, seed=2)}
    without = {name: weight.float().squeeze(0) for name, weight in original.items()}
    x = store(tmp_path / "x.safetensors", original)
    report = quanterr.compare(x, write(tmp_path / "y.gguf", without, "wan"), device="cpu")
    of_another = quanterr.compare(x, store(tmp_path / "z.safetensors", without), device="cpu")

    assert ([], 2) == (report.not_compared, len(report.lossless))
    assert {"shape_mismatch"} == {left.bucket for left in of_another.not_compared}
