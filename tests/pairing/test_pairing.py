import json
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from support.making import (
    FP8,
    NEW_LIBRARY,
    compare,
    fp8_codes,
    header,
    int8_codes,
    label,
    numbers,
    open_pairing,
    quantized_fp8,
    quantized_int8,
    store,
)

from quanterr.checkpoints.labels import PREFIXES
from quanterr.documents.gate_results import exit_status
from quanterr.errors import Status, UsageError
from quanterr.pairing.model import Bucket

GOLDEN = Path(__file__).parents[1] / "golden"
ONE, SCALE = torch.tensor(1.0), torch.tensor(0.01)
NOT_COMPARED = {
    Bucket.SHAPE_MISMATCH,
    Bucket.ONLY_IN_ORIGINAL,
    Bucket.ONLY_IN_QUANTIZED,
    Bucket.UNSUPPORTED,
    Bucket.ERROR,
}


def plan_of(folder, original, quantized, metadata=None, config=None, layers=()):
    """Return pairs by name, and for every unpaired entry its bucket and the reason, by side."""
    x = store(folder / "original.safetensors", original)
    y = store(folder / ("quantized" if config else "quantized.safetensors"), quantized, metadata, config)
    with open_pairing(x, y, layers) as plan:
        pairs = {pair.name: pair for pair in plan.pairs}
        left = {"original": {}, "quantized": {}}
        for leftover in plan.leftovers:
            for entry in leftover.entries:
                left[leftover.side][entry.name] = leftover.bucket, leftover.reason
        return pairs, left["original"], left["quantized"], plan


def fp8(name, *shape, scale="weight_scale"):
    """Return FP8 codes of that shape with a scale."""
    codes, factor = quantized_fp8(numbers(*shape))
    return {f"{name}.weight": codes, f"{name}.{scale}": factor}


NAMES = ("layers.0.attn.q.weight", "layers.0.attn.q.bias", "layers.1.mlp.up.weight", "head.weight")
WEIGHTS = {name: numbers(*((8,) if name.endswith("bias") else (8, 32)), seed=n) for n, name in enumerate(NAMES)}


def with_prefix(prefix, tensors):
    return {prefix + name: tensor for name, tensor in tensors.items()}


def test_missing_embedding_is_named_beside_a_head_and_another_prefix(tmp_path):
    original = with_prefix("model.", WEIGHTS) | {"model.embed_tokens.weight": numbers(16, 8)}
    head = {"lm_head.weight": numbers(16, 8, seed=1)}
    pairs, left, extra, _ = plan_of(tmp_path, original | head, with_prefix("transformer.", WEIGHTS) | head)

    assert {*with_prefix("model.", WEIGHTS), "lm_head.weight", "model.embed_tokens.weight"} == {*pairs, *left}
    assert {} == extra


class TestPrefixes:
    @pytest.mark.parametrize("prefix", PREFIXES)
    def test_prefix_on_the_quantized_side_is_removed(self, tmp_path, prefix):
        pairs, left, extra, plan = plan_of(tmp_path, WEIGHTS, with_prefix(prefix, WEIGHTS))

        assert (set(NAMES), {}, {}) == (pairs.keys(), left, extra)
        assert {"original": "", "quantized": prefix} == plan.prefixes

    @pytest.mark.parametrize("prefix", PREFIXES)
    def test_prefix_on_the_original_side_is_removed(self, tmp_path, prefix):
        pairs, left, extra, plan = plan_of(tmp_path, with_prefix(prefix, WEIGHTS), WEIGHTS)

        assert ({prefix + name for name in NAMES}, {}, {}) == (pairs.keys(), left, extra)
        assert {"original": prefix, "quantized": ""} == plan.prefixes

    def test_prefixes_may_differ(self, tmp_path):
        original = with_prefix("model.diffusion_model.", WEIGHTS)
        pairs, left, extra, plan = plan_of(tmp_path, original, with_prefix("net.", WEIGHTS))

        assert (original.keys(), {}, {}) == (pairs.keys(), left, extra)
        assert {"original": "model.diffusion_model.", "quantized": "net."} == plan.prefixes

    @pytest.mark.parametrize("prefix", ["", *PREFIXES])
    def test_prefix_on_both_sides_stays(self, tmp_path, prefix):
        tensors = with_prefix(prefix, WEIGHTS)
        pairs, left, extra, plan = plan_of(tmp_path, tensors, tensors)

        assert (tensors.keys(), {}, {}) == (pairs.keys(), left, extra)
        assert {"original": "", "quantized": ""} == plan.prefixes

    def test_prefix_is_chosen_by_most_names(self, tmp_path):
        alone = {f"model.{n}.weight": numbers(2, 8) for n in range(3)}
        original = WEIGHTS | alone
        quantized = with_prefix("model.diffusion_model.", WEIGHTS) | alone
        pairs, left, extra, plan = plan_of(tmp_path, original, quantized)

        assert (original.keys(), {}, {}) == (pairs.keys(), left, extra)
        assert plan.prefixes["quantized"] == "model.diffusion_model."

    def test_prefix_is_kept_where_more_names_match_with_it(self, tmp_path):
        original = with_prefix("model.", WEIGHTS) | {"extra.weight": numbers(2, 8)}
        quantized = with_prefix("model.", WEIGHTS) | {"model.extra.weight": numbers(2, 8)}
        pairs, left, extra, plan = plan_of(tmp_path, original, quantized)

        assert original.keys() == pairs.keys()
        assert ({}, {}) == (left, extra)
        assert plan.prefixes["quantized"] == ""

    def test_prefix_is_kept_where_a_name_would_collide(self, tmp_path):
        quantized = with_prefix("model.", WEIGHTS) | {"head.weight": numbers(3, 3)}
        pairs, left, extra, _ = plan_of(tmp_path, WEIGHTS, quantized)

        assert set(NAMES) - {"head.weight"} == pairs.keys()
        assert left["head.weight"][0] == Bucket.SHAPE_MISMATCH
        assert extra["head.weight"][0] == Bucket.SHAPE_MISMATCH
        assert extra["model.head.weight"][0] == Bucket.ONLY_IN_QUANTIZED

    def test_prefix_applies_to_scales_and_labels_too(self, tmp_path):
        prefix = "model.diffusion_model."
        codes = fp8_codes(8, 32)
        quantized = {
            "head.weight": codes,
            "head.weight_scale": SCALE,
            "head.input_scale": SCALE,
            "head.comfy_quant": label(format="float8_e4m3fn"),
            "scaled_fp8": torch.zeros(2).to(FP8),
        }
        header_bytes = header({"head": {"format": "float8_e4m3fn"}})
        pairs, left, extra, _ = plan_of(
            tmp_path, {"head.weight": WEIGHTS["head.weight"]}, with_prefix(prefix, quantized), header_bytes
        )

        assert {} == left
        assert {"fp8_tensor"} == {pair.quantized.format for pair in pairs.values()}
        assert {Bucket.CONSUMED} == {bucket for bucket, _ in extra.values()}
        consumed = {entry.name for pair in pairs.values() for entry in pair.other_entries[1]}
        assert with_prefix(prefix, quantized).keys() - {f"{prefix}head.weight"} == consumed | extra.keys()


EMBEDDING = {"model.embed_tokens.weight": numbers(16, 32, seed=7)}
HEAD = {"lm_head.weight": numbers(16, 32, seed=8)}
BLOCKS = {f"model.layers.{n}.mlp.up_proj.weight": numbers(8, 32, seed=n) for n in range(3)}


class TestEmbeddingAndHeadUnderOtherPrefixes:
    @pytest.mark.parametrize(("x", "y"), [("", "language_model."), ("model.", ""), ("language_model.", ""), ("", "")])
    @pytest.mark.parametrize(("kept", "absent"), [(HEAD, EMBEDDING), (EMBEDDING, HEAD)], ids=["head", "embedding"])
    def test_weight_missing_from_the_quantized_side_is_listed_for_the_original(self, tmp_path, x, y, kept, absent):
        original, quantized = with_prefix(x, BLOCKS | HEAD | EMBEDDING), with_prefix(y, BLOCKS | kept)
        report = compare(tmp_path, original, quantized)

        (name,) = with_prefix(x, absent)
        assert [(name, "only_in_original")] == [(left.layer_name, left.bucket) for left in report.not_compared]
        assert len(BLOCKS) + 1 == len(report.lossless)

    @pytest.mark.parametrize(("x", "y"), [("", "language_model."), ("language_model.", "")])
    @pytest.mark.parametrize("tied", [EMBEDDING, {"lm_head.weight": EMBEDDING["model.embed_tokens.weight"]}])
    def test_one_of_two_equal_tensors_stands_for_both(self, tmp_path, x, y, tied):
        both = EMBEDDING | {"lm_head.weight": EMBEDDING["model.embed_tokens.weight"]}
        report = compare(tmp_path, with_prefix(x, BLOCKS | both), with_prefix(y, BLOCKS | tied))

        assert [] == report.not_compared
        assert len(BLOCKS) + 2 == len(report.lossless)

    @pytest.mark.parametrize(("x", "y"), [("", "language_model."), ("language_model.", "")])
    def test_head_that_only_the_quantized_side_has_is_compared_with_the_embedding(self, tmp_path, x, y):
        original, quantized = with_prefix(x, BLOCKS | EMBEDDING), with_prefix(y, BLOCKS | EMBEDDING | HEAD)
        report = compare(tmp_path, original, quantized)

        assert [] == report.not_compared
        assert len(BLOCKS) + 1 == len(report.lossless)

    def test_embedding_in_codes_without_a_layout_is_explained_under_the_prefix(self, tmp_path):
        parts = {"model.embed_tokens.codes7": torch.ones(4, 32, dtype=torch.int32), "model.embed_tokens.steps": ONE}
        quantized = with_prefix("language_model.", BLOCKS | HEAD | parts)
        _, left, _, _ = plan_of(tmp_path, BLOCKS | HEAD | EMBEDDING, quantized)

        assert {"model.embed_tokens.weight": Bucket.UNSUPPORTED} == _buckets(left)
        assert "codes7" in left["model.embed_tokens.weight"][1]


class TestOneSide:
    def test_tensors_on_one_side_only_are_listed(self, tmp_path):
        pairs, left, extra, _ = plan_of(
            tmp_path,
            {"a.weight": numbers(2, 8), "b.weight": numbers(2, 8), "b.bias": numbers(2)},
            {"a.weight": numbers(2, 8), "c.weight": numbers(2, 8), "c.bias": numbers(2)},
        )

        assert ["a.weight"] == list(pairs)
        assert {"b.weight": Bucket.ONLY_IN_ORIGINAL, "b.bias": Bucket.ONLY_IN_ORIGINAL} == _buckets(left)
        assert {"c.weight": Bucket.ONLY_IN_QUANTIZED, "c.bias": Bucket.ONLY_IN_QUANTIZED} == _buckets(extra)

    def test_tensor_on_one_side_only_is_inconclusive(self, tmp_path):
        both = {"a.weight": numbers(2, 8)}
        for n, (original, quantized) in enumerate([(both | {"b.weight": ONE}, both), (both, both | {"b.weight": ONE})]):
            (tmp_path / str(n)).mkdir()
            report = compare(tmp_path / str(n), original, quantized)

            assert Status.INCONCLUSIVE == exit_status(report)
            assert Status.OK == exit_status(report, allow_partial=True)
            assert "b.weight" in " ".join(report.reasons)

    def test_unpaired_quantized_weight_is_listed_with_its_scale(self, tmp_path):
        _, _, extra, _ = plan_of(tmp_path, {"a.weight": numbers(2, 8)}, fp8("a", 2, 8) | fp8("b", 2, 8))
        buckets = _buckets(extra)

        assert {"b.weight": Bucket.ONLY_IN_QUANTIZED, "b.weight_scale": Bucket.ONLY_IN_QUANTIZED} == buckets

    @pytest.mark.parametrize(
        "name", ["a.input_scale", "a.k_scale", "a.scale_input", "a.activation_scale", "layers.0.attn.k_cache_scale"]
    )
    def test_activation_scales_may_be_on_one_side_only(self, tmp_path, name):
        report = compare(tmp_path, {"a.weight": numbers(2, 8)}, fp8("a", 2, 8) | {name: torch.tensor(0.3)})

        assert report.not_compared == []
        assert Status.OK == exit_status(report)
        assert 2 == report.coverage.quantized[Bucket.CONSUMED].tensors

    @pytest.mark.parametrize("name", ["q_scale", "k_scale", "output_scale", "input_scale", "scaled_fp8"])
    def test_parameter_named_like_an_activation_scale_must_be_on_both_sides(self, tmp_path, name):
        original = {"a.weight": numbers(2, 8), f"a.{name}": numbers(8)}
        report = compare(tmp_path, original, fp8("a", 2, 8))

        assert [(f"a.{name}", "only_in_original")] == [(left.layer_name, left.bucket) for left in report.not_compared]
        assert Status.INCONCLUSIVE == exit_status(report)

    def test_checkpoints_without_a_match_are_inconclusive_with_examples(self, tmp_path):
        report = compare(tmp_path, {"a.weight": ONE}, {"b.weight": ONE})

        assert Status.INCONCLUSIVE == exit_status(report)
        assert report.reasons[0].startswith(
            "nothing matches: the original has a.weight; the quantized checkpoint b.weight"
        )
        assert report.layers == report.lossless == []

    def test_misfitting_parts_are_explained_as_an_unsupported_layout(self, tmp_path):
        """W_q, which has no counterpart in the original, lacks rows."""
        name = "axis1_group48"
        stored = load_file(GOLDEN / "hqq/hqq_4_bits.safetensors")
        parts = {key: part for key, part in stored.items() if key.startswith(f"{name}.")}
        parts[f"{name}.W_q"] = parts[f"{name}.W_q"][3:].contiguous()
        report = compare(tmp_path, {f"{name}.weight": numbers(16, 48)}, parts)

        assert Status.INCONCLUSIVE == exit_status(report)
        assert report.reasons[0].startswith("1 tensor in an unsupported layout: ")

    def test_equal_names_with_different_shapes_count_as_a_match(self, tmp_path):
        report = compare(tmp_path, {"a.weight": ONE}, {"a.weight": torch.zeros(2)})

        assert Status.INCONCLUSIVE == exit_status(report)
        assert len(report.reasons) == 1
        assert report.reasons[0].startswith("1 tensor of different shape: a.weight")


class TestShapes:
    @pytest.mark.parametrize(
        ("x", "y", "hint"),
        [
            ((8, 32), (32, 8), "its values are in the original's order: it was reshaped, not transposed"),
            ((8, 32), (24, 32), "fused or padded rows?"),
            ((8, 32), (16, 32), "fused or padded rows?"),
            ((8, 32), (8, 16), "packed codes"),
            ((8, 32), (8, 8), "packed codes"),
        ],
    )
    @pytest.mark.parametrize("quantized", [False, True])
    def test_different_shapes_are_reported_with_a_hint(self, tmp_path, x, y, hint, quantized):
        tensors = fp8("a", *y) if quantized else {"a.weight": numbers(*y)}
        pairs, left, extra, _ = plan_of(tmp_path, {"a.weight": numbers(*x)}, tensors)
        bucket, reason = left["a.weight"]

        assert {} == pairs
        assert {Bucket.SHAPE_MISMATCH} == {bucket, *_buckets(extra).values()}
        assert tensors.keys() == extra.keys()
        assert all(part in reason for part in (f"shape {list(x)} in the original", f"{list(y)}", hint))

    @pytest.mark.parametrize(
        ("change", "hint"),
        [
            (lambda x: x.t(), "its values are the original's, transposed"),
            (lambda x: x.reshape(64, 256), "it was reshaped, not transposed"),
            (lambda x: numbers(64, 256, seed=9), "transposed?"),
        ],
    )
    def test_transpose_and_reshape_are_distinguished_by_values(self, tmp_path, change, hint):
        x = numbers(256, 64)
        _, left, *_ = plan_of(tmp_path, {"a.weight": x}, {"a.weight": change(x).contiguous()})

        assert left["a.weight"][1].endswith(hint)

    @pytest.mark.parametrize(
        ("x", "y"), [((8, 32), (8, 32, 1)), ((8, 32), (256,)), ((), (1,)), ((1, 8), (8,)), ((4, 8), (2, 16))]
    )
    def test_equal_element_counts_do_not_suffice_for_a_pair(self, tmp_path, x, y):
        _, left, extra, _ = plan_of(tmp_path, {"a": numbers(*x)}, {"a": numbers(*y)})

        assert {"a": Bucket.SHAPE_MISMATCH} == _buckets(left) == _buckets(extra)

    def test_transposed_square_weights_are_compared(self, tmp_path):
        x = numbers(32, 32)
        report = compare(tmp_path, {"a.weight": x}, {"a.weight": x.T.contiguous()})

        assert [layer.layer_name for layer in report.layers] == ["a.weight"]


class TestMissingScale:
    @pytest.mark.parametrize("others", [fp8("b", 4, 32), fp8("b", 4, 32, scale="scale_weight")], ids=["new", "old"])
    def test_missing_scale_among_scaled_weights_is_an_error(self, tmp_path, others):
        original = {"a.weight": numbers(4, 32), "b.weight": numbers(4, 32)}
        report = compare(tmp_path, original, {"a.weight": fp8_codes(4, 32)} | others)

        assert [layer.layer_name for layer in report.layers] == ["b.weight"]
        assert {("a.weight", "original", "error"), ("a.weight", "quantized", "error")} == {
            (item.layer_name, item.side, item.bucket) for item in report.not_compared
        }
        assert "scale is missing" in report.not_compared[0].reason
        assert Status.INCONCLUSIVE == exit_status(report)

    def test_missing_scale_next_to_an_activation_scale_is_an_error(self, tmp_path):
        codes = {"a.weight": fp8_codes(4, 32), "a.input_scale": torch.tensor(1.0)}
        report = compare(tmp_path, {"a.weight": numbers(4, 32)}, codes)

        assert {"error"} == {item.bucket for item in report.not_compared}
        assert "its scale is missing: activations have one (a.input_scale)" in report.not_compared[0].reason

    def test_missing_int8_scale_is_always_an_error(self, tmp_path):
        report = compare(tmp_path, {"a.weight": numbers(4, 32)}, {"a.weight": int8_codes(4, 32)})

        assert {"error"} == {item.bucket for item in report.not_compared}
        assert Status.INCONCLUSIVE == exit_status(report)

    @pytest.mark.parametrize("dtype", [FP8, torch.float8_e5m2])
    def test_fp8_without_any_scale_is_a_plain_cast_and_noted(self, tmp_path, dtype):
        x = numbers(4, 32)
        report = compare(tmp_path, {"a.weight": x, "a.bias": x[0]}, {"a.weight": x.to(dtype), "a.bias": x[0]})

        assert ["fp8_cast"] == [layer.format for layer in report.layers]
        assert [("fp8_without_scale", "info")] == [(f.code, f.severity) for f in report.findings]
        assert Status.OK == exit_status(report)

    def test_missing_scale_in_a_labelled_layer_is_not_silent(self, tmp_path):
        x = numbers(4, 32)
        tensors = {"a.weight": x.to(FP8), "a.comfy_quant": label(format="float8_e4m3fn")}
        report = compare(tmp_path, {"a.weight": x}, tensors)
        findings = [f for f in report.findings if f.severity != "info" and "a.weight" in f.message]

        assert findings or Status.INCONCLUSIVE == exit_status(report)

    def test_missing_scale_with_the_old_marker_means_one(self, tmp_path):
        """In older versions of comfy/ops.py, a layer without scale_weight in a scaled_fp8 file is a plain cast."""
        tensors = fp8("b", 4, 32, scale="scale_weight") | {
            "a.weight": fp8_codes(4, 32),
            "scaled_fp8": torch.zeros(2).to(FP8),
        }
        pairs, left, _, _ = plan_of(tmp_path, {"a.weight": numbers(4, 32), "b.weight": numbers(4, 32)}, tensors)

        assert {"a.weight": "fp8_cast", "b.weight": "fp8_tensor"} == {n: p.quantized.format for n, p in pairs.items()}
        assert {} == left


class TestScaleOnPlainNumbers:
    @pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("name", ["scale_weight", "weight_scale"])
    def test_scale_equal_to_one_on_plain_numbers_is_a_dummy_and_reported(self, tmp_path, shape, dtype, name):
        x = numbers(4, 32)
        tensors = {"a.weight": x, f"a.{name}": torch.ones(shape, dtype=dtype), "b.weight": x}
        report = compare(tmp_path, {"a.weight": x, "b.weight": x}, tensors)

        assert ["a.weight", "b.weight"] == [layer.layer_name for layer in report.lossless]
        assert [("dummy_scale", "warning", "a.weight")] == [
            (f.code, f.severity, f.layer) for f in report.findings if f.code != "identical"
        ]
        assert 1 == report.coverage.quantized[Bucket.CONSUMED].tensors

    @pytest.mark.parametrize("scale", [torch.tensor(2.0), torch.tensor(0.0), torch.ones(4), torch.ones(4, 1), -ONE])
    @pytest.mark.parametrize("changed", [False, True])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    def test_any_other_scale_on_plain_numbers_is_an_error(self, tmp_path, scale, changed, dtype):
        x = numbers(4, 32)
        y = (2 * x if changed else x).to(dtype)
        report = compare(tmp_path, {"a.weight": x}, {"a.weight": y, "a.weight_scale": scale})

        assert Status.INCONCLUSIVE == exit_status(report)
        assert "a.weight_scale" in " ".join(report.reasons)
        assert [] == report.lossless == report.layers

    def test_scale_that_the_original_also_has_is_a_parameter(self, tmp_path):
        x = {"a.weight": numbers(4, 32), "a.scale": torch.ones(4)}
        report = compare(tmp_path, x, x | {"a.scale": 2 * torch.ones(4)})

        assert ["a.weight"] == [layer.layer_name for layer in report.lossless]
        assert ["a.scale"] == [layer.layer_name for layer in report.other_changes]
        assert Status.OK == exit_status(report)


class TestUnsupportedLayouts:
    def test_nested_part_is_not_lost(self, tmp_path):
        quantized = fp8("a", 8, 32, scale="scale") | {"a.scale_7": SCALE, "a.scale_7_8": SCALE}
        _, left, extra, _ = plan_of(tmp_path, {"a.weight": numbers(8, 32)}, quantized)

        assert quantized.keys() == extra.keys()
        assert "unused: a.scale_7" in left["a.weight"][1]

    def test_unsupported_packed_codes_are_named_and_exit_with_4(self, tmp_path):
        original = {"a.weight": numbers(16, 64), "a.bias": numbers(16), "norm.weight": numbers(64)}
        quantized = {
            "a.weight": torch.randint(0, 256, (16, 32), dtype=torch.uint8),
            "a.weight_scale": fp8_codes(16, 4),
            "a.weight_scale_7": SCALE,
            "a.input_scale": SCALE,
            "a.bias": original["a.bias"],
            "norm.weight": original["norm.weight"],
        }
        report = compare(tmp_path, original, quantized)

        assert Status.INCONCLUSIVE == exit_status(report)
        assert report.verdict == "inconclusive"
        assert "a.weight" in " ".join(report.reasons)
        assert [] == report.layers
        assert None is report.aggregate.overall_snr_db
        assert {"a.weight"} == {item.layer_name for item in report.not_compared}
        assert {"lossless": 2, "unsupported": 4} == _tensors(report.coverage.quantized)

    @pytest.mark.parametrize(
        "parts",
        [
            {"codes7": (torch.int32, (8, 64)), "offsets7": (torch.int32, (1, 8)), "steps": (torch.float16, (1, 64))},
            {"weight._codes7": (torch.int8, (64, 64)), "weight._steps": (torch.float32, (64, 1))},
            {"_weight_codes7": (torch.int8, (64, 64)), "_weight_steps": (torch.float32, (64, 1))},
        ],
        ids=lambda parts: next(iter(parts)),
    )
    def test_unsupported_layout_with_other_names_is_not_called_absent(self, tmp_path, parts):
        quantized = {f"a.{name}": torch.ones(shape).to(dtype) for name, (dtype, shape) in parts.items()}
        _, left, extra, _ = plan_of(
            tmp_path, {"a.weight": numbers(64, 64), "b.weight": ONE}, quantized | {"b.weight": ONE}
        )

        assert {"a.weight": Bucket.UNSUPPORTED} == _buckets(left)
        assert quantized.keys() == extra.keys()
        assert {Bucket.UNSUPPORTED} == {*_buckets(extra).values()}
        assert all(name in left["a.weight"][1] for name in list(quantized)[:2])

    @pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, *[torch.float8_e4m3fnuz] * NEW_LIBRARY])
    def test_codes_shaped_like_the_original_are_never_compared_as_numbers(self, tmp_path, dtype):
        codes = torch.randint(0, 100, (8, 32), dtype=torch.uint8)
        x, y = numbers(8, 32), codes.view(dtype) if dtype.itemsize == 1 else codes.to(dtype)
        for n, (original, quantized) in enumerate([(x, y), (y, x)]):
            (tmp_path / str(n)).mkdir()
            report = compare(tmp_path / str(n), {"a.weight": original}, {"a.weight": quantized})

            assert [] == report.layers == report.other_changes == report.lossless
            assert Status.INCONCLUSIVE == exit_status(report)


class TestIntegers:
    @pytest.mark.parametrize(
        "dtype",
        [torch.bool, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64, torch.uint64],
    )
    def test_equal_integers_are_lossless(self, tmp_path, dtype):
        x = {"ids": torch.arange(100).to(dtype), "a.weight": numbers(2, 8)}
        report = compare(tmp_path, x, x)

        assert [("ids", "verbatim"), ("a.weight", "dense")] == sorted(
            ((layer.layer_name, layer.format) for layer in report.lossless), reverse=True
        )
        assert Status.OK == exit_status(report)

    @pytest.mark.parametrize(
        ("dtype", "bits"), [(torch.uint8, 8), (torch.int16, 16), (torch.int32, 32), (torch.int64, 64)]
    )
    @pytest.mark.parametrize("base", [0, -1, 1 << 40, (1 << 53) + 5, (1 << 62) + 12345])
    def test_integers_that_differ_in_any_single_bit_are_not_lossless(self, tmp_path, dtype, bits, base):
        same = torch.full((bits,), base).to(dtype)
        single_bits = torch.tensor([1 << n if n < 63 else -(1 << 63) for n in range(bits)]).to(dtype)
        x, y = ({f"ids.{n}": row.clone() for n, row in enumerate(t)} for t in (same, same ^ single_bits))
        report = compare(tmp_path, x, y)

        assert [] == report.lossless == report.layers == report.other_changes
        assert x.keys() == {item.layer_name for item in report.not_compared}
        assert Status.INCONCLUSIVE == exit_status(report)

    @pytest.mark.parametrize(
        ("x", "y"),
        [
            (torch.uint8, torch.bool),
            (torch.int16, torch.uint16),
            (torch.int32, torch.int64),
            (torch.int64, torch.uint64),
            (torch.int64, torch.float32),
            (torch.float32, torch.int64),
        ],
    )
    def test_integers_with_different_dtypes_are_not_compared(self, tmp_path, x, y):
        report = compare(tmp_path, {"ids": torch.ones(4, dtype=x)}, {"ids": torch.ones(4, dtype=y)})

        assert [] == report.lossless == report.other_changes
        assert Status.INCONCLUSIVE == exit_status(report)


class TestBothSidesQuantized:
    def test_quantized_sides_are_compared_by_their_values(self, tmp_path):
        codes = fp8_codes(8, 32)
        report = compare(
            tmp_path,
            {"a.weight": codes, "a.weight_scale": ONE, "b.weight": codes, "b.weight_scale": ONE},
            {"a.weight": codes, "a.weight_scale": 2 * ONE, "b.weight": codes.float()},
        )

        assert {"b.weight": "dense"} == {layer.layer_name: layer.format for layer in report.lossless}
        assert {"a.weight": 1.0} == {layer.layer_name: layer.relative_error for layer in report.layers}
        assert {"fp8_tensor"} == {layer.original_format for layer in [*report.layers, *report.lossless]}

    @pytest.mark.parametrize(
        ("original", "quantized"),
        [
            # unsupported layouts of the same codes
            (
                {"a.weight_scale": torch.full((8, 1), 120, dtype=torch.uint8)},
                {"a.weight_scale": torch.full((8, 1), 121, dtype=torch.uint8)},
            ),
            ({"a.weight_scale": torch.ones(5, 3)}, {"a.weight_scale": 2 * torch.ones(5, 3)}),
            ({"a.weight_scale": ONE, "a.scale": ONE}, {"a.weight_scale": ONE, "a.scale": 2 * ONE}),
            ({}, {"a.weight_scale": SCALE, "a.weight_scale_2": SCALE}),
            (
                {"a.weight_scale": SCALE, "a.comfy_quant": label(format="float8_e4m3fn", convrot=True)},
                {"a.weight_scale": 2 * SCALE, "a.comfy_quant": label(format="float8_e4m3fn", convrot=True)},
            ),
            (
                {"a.weight_scale": SCALE, "a.comfy_quant": label(format="float8_e4m3fn", convrot=True)},
                {"a.weight_scale": SCALE, "a.comfy_quant": label(format="float8_e4m3fn")},
            ),
        ],
        ids=["exponents", "no rule", "two scales", "unused on one side", "rotated", "rotated on one side"],
    )
    def test_same_codes_with_other_parts_are_not_lossless(self, tmp_path, original, quantized):
        codes = {"a.weight": fp8_codes(8, 32)}
        report = compare(tmp_path, codes | original, codes | quantized)

        assert [] == [layer.layer_name for layer in report.lossless if layer.layer_name == "a.weight"]
        assert Status.INCONCLUSIVE == exit_status(report)


class TestSelection:
    def test_unselected_tensors_have_their_own_bucket(self, tmp_path):
        original = {"a.attn.weight": numbers(4, 32), "a.mlp.weight": numbers(4, 32), "b.mlp.weight": numbers(4, 32)}
        quantized = fp8("a.attn", 4, 32) | fp8("a.mlp", 4, 32) | {"c.mlp.weight": ONE}
        quantized |= {"a.mlp.comfy_quant": label(format="float8_e4m3fn")}
        report = compare(tmp_path, original, quantized, layers=["attn"])
        coverage = report.coverage

        assert [layer.layer_name for layer in report.layers] == ["a.attn.weight"]
        assert {"compared": 1, "filtered_out": 2} == _tensors(coverage.original)
        assert {"compared": 1, "consumed": 2, "filtered_out": 3} == _tensors(coverage.quantized)
        assert Status.OK == exit_status(report)
        assert coverage.original_compared_fraction == 1.0

    def test_selected_but_uncompared_tensor_is_reported(self, tmp_path):
        original = {"a.attn.weight": numbers(4, 32), "a.mlp.weight": numbers(4, 32)}
        report = compare(tmp_path, original, fp8("a.mlp", 4, 32), layers=["attn"])

        assert Status.INCONCLUSIVE == exit_status(report)
        assert [item.layer_name for item in report.not_compared] == ["a.attn.weight"]

    def test_selection_uses_original_names(self, tmp_path):
        report = compare(
            tmp_path, {"model.a.weight": numbers(2, 8)}, {"a.weight": numbers(2, 8, seed=1)}, layers=["model.*"]
        )

        assert [layer.layer_name for layer in report.layers] == ["model.a.weight"]

    def test_empty_selection_is_wrong_usage(self, tmp_path):
        with pytest.raises(UsageError, match="attn"):
            compare(tmp_path, {"a.weight": ONE}, {"a.weight": ONE}, layers=["attn"])


class TestParts:
    def test_parts_belong_to_the_weight_whose_name_they_carry(self, tmp_path):
        tensors = fp8("a", 4, 32) | fp8("ab", 4, 32) | {"a.b.weight": fp8_codes(4, 32), "a.b.weight_scale": SCALE}
        names = ("a.weight", "ab.weight", "a.b.weight")
        pairs, _, extra, _ = plan_of(tmp_path, {name: numbers(4, 32) for name in names}, tensors)

        assert {name: [f"{name}_scale"] for name in names} == {
            name: [entry.name for entry in pair.other_entries[1]] for name, pair in pairs.items()
        }
        assert {} == extra

    def test_parts_in_expert_stacks_have_names_without_weight(self, tmp_path):
        quantized = {
            "experts.gate_up_proj": fp8_codes(3, 8, 32),
            "experts.gate_up_proj_scale": torch.ones(3, 8, 1),
            "experts.down_proj": fp8_codes(3, 32, 64),
            "experts.down_proj_scale_inv": torch.ones(3),
            "experts.weight": numbers(4, 4),
        }
        original = {name: torch.zeros(tensor.shape) for name, tensor in quantized.items() if "scale" not in name}
        pairs, left, extra, _ = plan_of(tmp_path, original, quantized)

        assert ({}, {}) == (left, extra)
        assert original.keys() == pairs.keys()

    def test_parts_may_lie_in_another_shard_than_their_weight(self, tmp_path):
        folder = tmp_path / "quantized"
        folder.mkdir()
        tensors = fp8("a", 4, 32)
        for n, (name, tensor) in enumerate(tensors.items(), 1):
            store(folder / f"model-{n:05}-of-00002.safetensors", {name: tensor})
        original = store(tmp_path / "original.safetensors", {"a.weight": numbers(4, 32)})
        with open_pairing(original, folder) as plan:
            formats = [pair.quantized.format for pair in plan.pairs]

        assert formats == ["fp8_tensor"]


LAYERS = ("layers.0.attn.q", "layers.0.mlp.up", "layers.1.attn.q", "norm", "head")
CODES, FACTOR = quantized_fp8(numbers(4, 32))
INT8, STEP = quantized_int8(numbers(4, 32))
BAD = numbers(4, 32)
BAD[0, 0] = torch.nan
VARIANTS = {
    "absent": {},
    "bf16": {"weight": numbers(4, 32)},
    "changed": {"weight": numbers(4, 32, seed=1)},
    "f32 with bias": {"weight": numbers(4, 32).float(), "bias": numbers(4)},
    "not finite": {"weight": BAD},
    "transposed": {"weight": numbers(32, 4)},
    "vector": {"weight": numbers(32)},
    "fp8": {"weight": CODES, "weight_scale": FACTOR},
    "fp8 with auxiliaries": {"weight": CODES, "weight_scale": FACTOR, "input_scale": ONE, "k_scale": ONE},
    "fp8 a row": {"weight": CODES, "scale_weight": FACTOR.repeat(4)},
    "fp8 a block": {"weight": CODES, "weight_scale_inv": FACTOR.repeat(2, 2)},
    "fp8 with a label": {"weight": CODES, "weight_scale": FACTOR, "comfy_quant": label(format="float8_e4m3fn")},
    "fp8 rotated": {"weight": CODES, "weight_scale": FACTOR, "comfy_quant": label(convrot=True)},
    "fp8 cast": {"weight": CODES},
    "fp8 with a wrong shape": {"weight": CODES, "weight_scale": torch.ones(5, 3)},
    "fp8 with two scales": {"weight": CODES, "weight_scale": FACTOR, "scale_weight": FACTOR},
    "int8": {"weight": INT8, "weight_scale": STEP.repeat(4, 1)},
    "int8 without scale": {"weight": INT8},
    "dummy scale": {"weight": numbers(4, 32), "scale_weight": ONE},
    "unused scale": {"weight": numbers(4, 32), "weight_scale": 2 * ONE},
    "nvfp4": {
        "weight": torch.zeros(4, 16, dtype=torch.uint8),
        "weight_scale": fp8_codes(4, 2),
        "weight_scale_2": SCALE,
    },
    "gptq": {"qweight": torch.zeros(4, 4, dtype=torch.int32), "scales": torch.ones(4), "g_idx": torch.zeros(4)},
    "bnb": {"weight": torch.zeros(64, 1, dtype=torch.uint8), "weight.absmax": torch.ones(2)},
    "integers": {"weight": torch.arange(8)},
    "empty": {"weight": torch.zeros(0, 32)},
    "scalar": {"weight": torch.tensor(1.0)},
    "label alone": {"comfy_quant": label(format="float8_e4m3fn")},
    "scale alone": {"weight_scale": SCALE},
}

variants = st.fixed_dictionaries(dict.fromkeys(LAYERS, st.sampled_from(sorted(VARIANTS))))


def checkpoint_of(chosen, prefix, marker):
    tensors = {
        f"{prefix}{layer}.{name}": tensor
        for layer, variant in chosen.items()
        for name, tensor in VARIANTS[variant].items()
    }
    return tensors | ({f"{prefix}scaled_fp8": torch.zeros(1).to(FP8)} if marker else {"extra": numbers(3)})


class TestAnyTwoCheckpoints:
    @pytest.mark.session
    @given(
        variants,
        variants,
        st.sampled_from(["", "model."]),
        st.sampled_from(["", "model.diffusion_model."]),
        st.booleans(),
        st.sampled_from([(), ("!norm",), ("re:.",)]),
    )
    @settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
    def test_every_entry_is_in_exactly_one_bucket(self, tmp_path, original, quantized, mine, yours, marker, layers):
        x, y = checkpoint_of(original, mine, False), checkpoint_of(quantized, yours, marker)
        try:
            report = compare(tmp_path, x, y, layers=layers)
        except UsageError:  # no layer matches the pattern
            return
        for tensors, coverage in ((x, report.coverage.original), (y, report.coverage.quantized)):
            sizes = coverage.values()

            assert len(tensors) == sum(size.tensors for size in sizes)
            assert sum(t.numel() for t in tensors.values()) == sum(size.elements for size in sizes)
            assert sum(t.nbytes for t in tensors.values()) == sum(size.bytes for size in sizes)
            assert {str(bucket) for bucket in Bucket} >= coverage.keys()
        left_out = NOT_COMPARED & (report.coverage.original.keys() | report.coverage.quantized.keys())
        wrong = [finding for finding in report.findings if finding.severity == "error"]
        listed_layers = report.layers or report.lossless or report.other_changes

        assert (Status.INCONCLUSIVE if left_out or wrong or not listed_layers else Status.OK) == exit_status(report)
        assert bool(left_out) == bool(report.not_compared)
        assert json.loads(report.to_json(), parse_constant=_no_constant)["verdict"] == report.verdict

    @pytest.mark.session
    @given(variants)
    @settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
    def test_same_checkpoint_twice_has_no_different_layer(self, tmp_path, chosen):
        tensors = checkpoint_of(chosen, "", False)
        report = compare(tmp_path, tensors, tensors)

        assert [layer.layer_name for layer in report.layers if layer.finite] == []
        assert report.other_changes == []
        assert not {Bucket.ONLY_IN_ORIGINAL, Bucket.ONLY_IN_QUANTIZED} & report.coverage.original.keys()


def _no_constant(name):
    raise AssertionError(f"{name} is not JSON")


def _buckets(left):
    return {name: bucket for name, (bucket, _) in left.items()}


def _tensors(coverage):
    return {bucket: size.tensors for bucket, size in coverage.items()}
