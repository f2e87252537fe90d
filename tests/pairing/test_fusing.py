import json

import pytest
import torch
from support.making import compare, label, numbers, open_pairing, quantized_fp8, read_whole, store

from quanterr.pairing.model import Bucket
from quanterr.pairing.names import atoms_of, canonicalize


def fp8(name, weight):
    """Return FP8 codes with a scale per row, and the values they stand for."""
    rows = weight.float().view(-1, weight.shape[-1])
    scale = rows.abs().amax(1, keepdim=True) / 448
    codes = (rows / scale).to(torch.float8_e4m3fn).view(weight.shape)
    values = (codes.float().view(rows.shape) * scale).view(weight.shape)
    stored = scale.view(*weight.shape[:-1], 1)
    return {name: codes, f"{name}_scale": stored}, values


def values_of(folder, original, quantized):
    """Return the quantized checkpoint's values for each weight of the original, and the leftovers."""
    x = store(folder / "original.safetensors", original)
    y = store(folder / "quantized.safetensors", quantized)
    with open_pairing(x, y) as plan:
        values = {pair.name: read_whole(pair.quantized).clone() for pair in plan.pairs}
        shapes = {pair.name: (pair.original.shape, pair.quantized.shape) for pair in plan.pairs}
        left = {(leftover.side, leftover.name): (leftover.bucket, leftover.reason) for leftover in plan.leftovers}
    assert all(x == y for x, y in shapes.values())
    return values, left


ROWS = (48, 16, 24)
ATTENTION = {
    f"model.layers.0.self_attn.{n}_proj.weight": numbers(r, 64, seed=r) for n, r in zip("qkv", ROWS, strict=True)
}
EXPERTS = {
    f"model.layers.1.mlp.experts.{e}.{name}.weight": numbers(*shape, seed=10 * e + n)
    for e in range(3)
    for n, (name, shape) in enumerate({"gate_proj": (40, 64), "up_proj": (40, 64), "down_proj": (64, 40)}.items())
}


def fuse(weights, words):
    return torch.cat([weights[word] for word in words])


class TestFused:
    def test_fused_projections_are_compared_separately(self, tmp_path):
        stored, values = fp8("model.layers.0.self_attn.qkv_proj.weight", torch.cat(list(ATTENTION.values())))
        compared, left = values_of(tmp_path, ATTENTION, stored)

        assert ATTENTION.keys() == compared.keys()
        assert {} == left
        assert torch.equal(values, torch.cat([compared[name] for name in ATTENTION]))

    def test_fused_originals_are_compared_with_split_ones(self, tmp_path):
        stored, values = {}, []
        for name, weight in ATTENTION.items():
            more, value = fp8(name, weight)
            stored |= more
            values.append(value)
        name = "model.layers.0.self_attn.qkv_proj.weight"
        compared, left = values_of(tmp_path, {name: torch.cat(list(ATTENTION.values()))}, stored)

        assert [name] == list(compared)
        assert {} == left
        assert torch.equal(torch.cat(values), compared[name])

    def test_biases_are_fused_like_their_weights(self, tmp_path):
        original = {f"l.0.attn.{n}_proj.bias": numbers(r, seed=r) for n, r in zip("qkv", ROWS, strict=True)}
        stored = {"l.0.attn.qkv_proj.bias": torch.cat(list(original.values()))}
        values, left = values_of(tmp_path, original, stored)

        assert original.keys() == values.keys()
        assert {} == left
        assert torch.equal(stored["l.0.attn.qkv_proj.bias"].float(), torch.cat([values[name][0] for name in original]))

    def test_undetermined_rows_are_refused(self, tmp_path):
        original = {name: weight for name, weight in ATTENTION.items() if "v_proj" not in name}
        stored, _ = fp8("model.layers.0.self_attn.qkv_proj.weight", torch.cat(list(ATTENTION.values())))
        values, left = values_of(tmp_path, original, stored)

        assert {} == values
        assert {Bucket.UNSUPPORTED} == {bucket for (side, _), (bucket, _) in left.items() if side == "original"}
        assert all("cannot be inferred" in reason for (side, _), (_, reason) in left.items() if side == "original")

    def test_missing_part_is_named(self, tmp_path):
        name = "model.layers.0.self_attn.qkv_proj.weight"
        stored = {n: w for n, w in ATTENTION.items() if "k_proj" not in n}
        values, left = values_of(tmp_path, {name: torch.cat(list(ATTENTION.values()))}, stored)

        assert {} == values
        assert "no tensor holds layers.0.self_attn.k_proj" in left["original", name][1]

    def test_part_held_by_two_tensors_is_refused_and_both_are_named(self, tmp_path):
        stored = {f"{place}.self_attn.qkv_proj.weight": numbers(88, 64) for place in ("layers.0", "module.layers.0")}
        values, left = values_of(tmp_path, ATTENTION, stored)

        assert {} == values
        reasons = [reason for (side, _), (_, reason) in left.items() if side == "original"]
        assert 3 == len(reasons)
        assert all(name in reason for name in stored for reason in reasons)

    def test_ambiguous_name_is_paired_with_neither(self, tmp_path):
        original = {"a.model.w.weight": numbers(64, 128), "a.net.w.weight": numbers(64, 128, seed=1)}
        codes, _ = fp8("a.w.weight", original["a.model.w.weight"])
        values, left = values_of(tmp_path, original, codes)

        assert {} == values
        for name in original:
            assert "a.w.weight may be a.model.w.weight or a.net.w.weight of the original" == left["original", name][1]


class TestExperts:
    def stack(self, word):
        return torch.stack([EXPERTS[f"model.layers.1.mlp.experts.{e}.{word}.weight"] for e in range(3)])

    def test_stacked_experts_are_compared_separately(self, tmp_path):
        gate_up = torch.cat([self.stack("gate_proj"), self.stack("up_proj")], 1)
        stored, up = fp8("model.layers.1.mlp.experts.gate_up_proj", gate_up)
        more, down = fp8("model.layers.1.mlp.experts.down_proj", self.stack("down_proj"))
        values, left = values_of(tmp_path, EXPERTS, stored | more)

        assert EXPERTS.keys() == values.keys()
        assert {} == left
        for e in range(3):
            names = [f"model.layers.1.mlp.experts.{e}.{word}.weight" for word in ("gate_proj", "up_proj")]
            assert torch.equal(up[e], torch.cat([values[name] for name in names]))
            assert torch.equal(down[e], values[f"model.layers.1.mlp.experts.{e}.down_proj.weight"])

    @pytest.mark.parametrize("turned", [False, True], ids=["out first", "in first"])
    def test_stacks_are_compared_with_single_experts(self, tmp_path, turned):
        stored, values = {}, {}
        for name, weight in EXPERTS.items():
            more, values[name] = fp8(name, weight)
            stored |= more
        gate_up = torch.cat([self.stack("gate_proj"), self.stack("up_proj")], 1)
        original = {
            "model.layers.1.mlp.experts.gate_up_proj": gate_up,
            "model.layers.1.mlp.experts.down_proj": self.stack("down_proj"),
        }
        if turned:
            original = {name: weight.transpose(1, 2).contiguous() for name, weight in original.items()}
        compared, left = values_of(tmp_path, original, stored)

        assert original.keys() == compared.keys()
        assert {} == left
        down = [values[f"model.layers.1.mlp.experts.{e}.down_proj.weight"] for e in range(3)]
        assert torch.equal(torch.cat(down), compared["model.layers.1.mlp.experts.down_proj"])

    def test_mixtral_and_mlx_words_mean_the_same_expert_parts(self, tmp_path):
        words = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
        original = {
            name.replace(f"mlp.experts.{e}.{word}", f"block_sparse_moe.experts.{e}.{w}"): EXPERTS[name]
            for w, word in words.items()
            for e in range(3)
            for name in [f"model.layers.1.mlp.experts.{e}.{word}.weight"]
        }
        prefix = "language_model.model.layers.1.mlp.switch_mlp"
        stored = {f"{prefix}.{word}.weight": self.stack(word) for word in words.values()}
        values, left = values_of(tmp_path, original, stored)

        assert original.keys() == values.keys()
        assert {} == left
        assert all(torch.equal(original[name].float(), values[name]) for name in original)

    def test_entry_for_many_weights_is_counted_once(self, tmp_path):
        gate_up = torch.cat([self.stack("gate_proj"), self.stack("up_proj")], 1)
        stored, _ = fp8("model.layers.1.mlp.experts.gate_up_proj", gate_up)
        original = {name: weight for name, weight in EXPERTS.items() if "down" not in name}
        report = compare(tmp_path, original, stored)

        assert "pass" == report.verdict
        assert {"compared", "consumed"} == report.coverage.quantized.keys()
        assert 1 == report.coverage.quantized["compared"].tensors == report.coverage.quantized["consumed"].tensors
        assert gate_up.numel() == report.coverage.quantized["compared"].elements
        assert pytest.approx(8 * (1 + 4 / 64)) == report.aggregate.bits_per_weight


class TestTransposed:
    def test_transposed_original_is_transposed_back(self, tmp_path):
        x = numbers(32, 96)
        codes, scale = quantized_fp8(x.T)
        quantized = {"h.0.attn.c_attn.weight": codes.contiguous(), "h.0.attn.c_attn.weight_scale": scale}
        report = compare(tmp_path, {"h.0.attn.c_attn.weight": x}, quantized)

        assert report.layers[0].snr_db > 30
        assert any("transposed" in text for text in report.layers[0].evidence)

    @pytest.mark.parametrize(("name", "turned"), [("h.0.attn.c_proj.weight", True), ("h.0.attn.o_proj.weight", False)])
    def test_square_original_is_transposed_only_where_its_name_allows_it(self, tmp_path, name, turned):
        x = numbers(64, 64)
        codes, scale = quantized_fp8(x.T)
        report = compare(tmp_path, {name: x}, {name: codes.contiguous(), f"{name}_scale": scale})

        assert turned == (report.layers[0].snr_db > 30)
        assert turned == (report.verdict == "pass")
        assert turned == any("no rectangular weight confirms it" in finding.message for finding in report.findings)

    @pytest.mark.parametrize("turned", [True, False])
    def test_square_original_is_transposed_only_if_the_others_are(self, tmp_path, turned):
        square, long = numbers(64, 64), numbers(64, 192)
        stored = {"h.0.attn.c_attn.weight": (long.T if turned else long).contiguous()}
        stored["h.0.attn.c_proj.weight"] = square.T.contiguous()
        report = compare(tmp_path, {"h.0.attn.c_attn.weight": long, "h.0.attn.c_proj.weight": square}, stored)

        assert turned == (report.verdict == "pass")
        assert turned == (len(report.lossless) == 2)
        assert [] == [finding for finding in report.findings if finding.code == "ambiguous_layout"]


@pytest.mark.parametrize(("more", "severity"), [(torch.zeros(28, 64), "info"), (numbers(28, 64), "warning")])
def test_vocabulary_is_cropped_with_a_note(tmp_path, more, severity):
    x = numbers(100, 64)
    codes, scale = quantized_fp8(torch.cat([x, more]))
    quantized = {"lm_head.weight": codes, "lm_head.weight_scale": scale}
    report = compare(tmp_path, {"lm_head.weight": x}, quantized)

    assert report.layers[0].snr_db > 30
    assert [severity] == [finding.severity for finding in report.findings if "28 more rows" in finding.message]


class TestNames:
    @pytest.mark.parametrize(
        ("first", "second"),
        [
            ("model.layers.0.mlp.up_proj.weight", "language_model.model.layers.0.mlp.up_proj.weight"),
            ("model.language_model.layers.0.x.weight", "module._orig_mod.layers.0.x.weight"),
            ("model.layers.0.x.weight", "_fsdp_wrapped_module.model.layers.0._checkpoint_wrapped_module.x.weight"),
            ("model.layers.0.x.weight", "_forward_module.model.layers.0.x.weight"),
            ("transformer_blocks.3.out_proj.weight", "transformer.transformer_blocks.3.attn.to_out.0.weight"),
            ("layers.0.x.base_layer.weight", "layers.0.x.weight"),
            ("transformer_blocks.0.mlp_fc1.bias", "transformer_blocks.0.ff.net.0.proj.bias"),
            ("transformer_blocks.0.mlp_fc2.weight", "transformer_blocks.0.ff.net.2.weight"),
            ("transformer_blocks.0.mlp_context_fc1.weight", "transformer_blocks.0.ff_context.net.0.proj.weight"),
            ("transformer_blocks.0.mlp_context_fc2.weight", "transformer_blocks.0.ff_context.net.2.weight"),
            ("transformer_blocks.0.norm_added_q.weight", "transformer_blocks.0.attn.norm_added_q.weight"),
            ("single_transformer_blocks.0.norm_k.weight", "single_transformer_blocks.0.attn.norm_k.weight"),
            ("single_transformer_blocks.0.out_proj.weight", "single_transformer_blocks.0.attn.to_out.weight"),
        ],
    )
    def test_names_for_one_weight_are_equal(self, first, second):
        assert canonicalize(first) == canonicalize(second)

    @pytest.mark.parametrize(
        ("first", "second"),
        [
            ("visual.blocks.0.q_proj.weight", "model.blocks.0.q_proj.weight"),
            ("layers.0.q_proj.weight", "layers.0.q_proj.bias"),
            ("layers.0.q_proj.weight", "layers.1.q_proj.weight"),
        ],
    )
    def test_names_for_two_weights_differ(self, first, second):
        assert canonicalize(first) != canonicalize(second)

    def test_stacked_experts_have_a_name_for_each(self):
        names = atoms_of("l.3.mlp.experts.gate_up_proj", (2, 8, 4)).names

        assert ("l.3.mlp.experts.0.gate_proj", "l.3.mlp.experts.0.up_proj") == names[:2]
        assert ("l.3.mlp.experts.1.gate_proj", "l.3.mlp.experts.1.up_proj") == names[2:]


def test_columns_are_joined_side_by_side(tmp_path):
    left, right = numbers(32, 48), numbers(32, 16, seed=1)
    stored = {
        "single_transformer_blocks.0.out_proj.weight": left,
        "single_transformer_blocks.0.mlp_fc2.weight": right,
        "other.comfy_quant": label(format="x"),
    }
    name = "single_transformer_blocks.0.proj_out.weight"
    values, _ = values_of(tmp_path, {name: torch.cat([left, right], 1)}, stored)

    assert torch.equal(torch.cat([left, right], 1).float(), values[name])


class TestTied:
    EMBEDDING = numbers(96, 64, seed=3)

    @pytest.mark.parametrize("side", ["original", "quantized"])
    def test_missing_head_is_compared_with_the_embedding(self, tmp_path, side):
        both = {"model.embed_tokens.weight": self.EMBEDDING, "lm_head.weight": self.EMBEDDING}
        alone = {"model.embed_tokens.weight": self.EMBEDDING}
        sides = (alone, both) if side == "original" else (both, alone)
        report = compare(tmp_path, *sides)

        assert "pass" == report.verdict
        assert {"model.embed_tokens.weight", "lm_head.weight"} == {layer.layer_name for layer in report.lossless}
        assert [] == report.not_compared

    def test_missing_untied_head_is_reported(self, tmp_path):
        x = {"model.embed_tokens.weight": self.EMBEDDING, "lm_head.weight": numbers(96, 64, seed=4)}
        report = compare(tmp_path, x, {"model.embed_tokens.weight": self.EMBEDDING})

        assert "inconclusive" == report.verdict
        assert [("lm_head.weight", "only_in_original")] == [(i.layer_name, i.bucket) for i in report.not_compared]

    def test_t5_copies_are_compared_with_their_source(self, tmp_path):
        x = {"shared.weight": self.EMBEDDING, "encoder.embed_tokens.weight": self.EMBEDDING}
        report = compare(tmp_path, x, {"shared.weight": self.EMBEDDING})

        assert "pass" == report.verdict
        assert x.keys() == {layer.layer_name for layer in report.lossless}

    @pytest.mark.parametrize(
        ("stored", "copy"),
        [
            ("model.decoder.embed_tokens.weight", "lm_head.weight"),  # OPT
            ("bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"),
            ("gpt_neox.embed_in.weight", "embed_out.weight"),
            ("encoder.embed_tokens.weight", "shared.weight"),  # T5
        ],
    )
    @pytest.mark.parametrize("side", ["original", "quantized"])
    def test_tied_copies_have_other_names_in_other_models(self, tmp_path, stored, copy, side):
        both, alone = dict.fromkeys((stored, copy), self.EMBEDDING), {stored: self.EMBEDDING}
        report = compare(tmp_path, *((alone, both) if side == "original" else (both, alone)))

        assert "pass" == report.verdict
        assert both.keys() == {layer.layer_name for layer in report.lossless}

    def test_repeated_head_bias_is_compared(self, tmp_path):
        x = dict.fromkeys(("cls.predictions.bias", "cls.predictions.decoder.bias"), numbers(1, 96)[0])
        report = compare(tmp_path, x, {"cls.predictions.bias": numbers(1, 96)[0]})

        assert ("pass", []) == (report.verdict, report.not_compared)

    def test_head_with_another_shape_is_reported(self, tmp_path):
        x = {"model.embed_tokens.weight": self.EMBEDDING}
        report = compare(tmp_path, x, x | {"lm_head.weight": numbers(10, 64)})

        assert "inconclusive" == report.verdict
        assert ["shape_mismatch"] == [left.bucket for left in report.not_compared]


def window(width):
    rows, cols = (axis.flatten() for axis in torch.meshgrid(*2 * [torch.arange(width)], indexing="ij"))
    return (rows[:, None] - rows + width - 1) * (2 * width - 1) + cols[:, None] - cols + width - 1


class TestComputedBuffers:
    BUFFERS = (
        ("embeddings.position_ids", torch.arange(512)[None]),
        ("embeddings.token_type_ids", torch.zeros(1, 512, dtype=torch.int64)),
        ("model.layers.0.self_attn.rotary_emb.inv_freq", 1e4 ** (-torch.arange(0, 64, 2) / 64)),
        ("model.layers.0.self_attn.rotary_emb.inv_freq", (5e5 ** (-torch.arange(0, 128, 2) / 128)).bfloat16()),
        ("h.0.attn.bias", torch.ones(1, 1, 16, 16).tril().to(torch.uint8)),
        ("h.0.attn.masked_bias", torch.tensor(-1e4)),
        ("layers.0.attention.relative_position_index", window(7)),
    )

    @pytest.mark.parametrize(("name", "buffer"), BUFFERS)
    @pytest.mark.parametrize("side", ["original", "quantized"])
    def test_computed_buffers_may_be_missing_on_one_side(self, tmp_path, name, buffer, side):
        alone = {"model.embed_tokens.weight": numbers(96, 64)}
        sides = (alone | {name: buffer}, alone)
        report = compare(tmp_path, *(sides if side == "original" else sides[::-1]))
        (finding,) = [finding for finding in report.findings if finding.code == "computed_buffer"]

        assert ("pass", "info", [name]) == (report.verdict, finding.severity, finding.evidence["tensors"])

    @pytest.mark.parametrize(("name", "buffer"), BUFFERS)
    def test_buffers_with_other_values_may_not_be_missing(self, tmp_path, name, buffer):
        other = buffer.clone()
        other.view(-1)[-1] = 3
        report = compare(tmp_path, {"x.weight": numbers(96, 64), name: other}, {"x.weight": numbers(96, 64)})

        assert [name] == [left.layer_name for left in report.not_compared]


def per_head(pairs):
    """Return rows of 3 heads of 8 in Mistral's order, from transformers' order (its own permute, undone)."""
    rows, cols = pairs.shape
    return pairs.view(3, 2, rows // 6, cols).transpose(1, 2).reshape(rows, cols)


def with_config(folder, config, name="config.json"):
    (folder / name).write_text(json.dumps(config))


MISTRAL = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "layers.0.attention_norm.weight": "model.layers.0.input_layernorm.weight",
    "layers.0.ffn_norm.weight": "model.layers.0.post_attention_layernorm.weight",
    "layers.0.attention.wq.weight": "model.layers.0.self_attn.q_proj.weight",
    "layers.0.attention.wk.weight": "model.layers.0.self_attn.k_proj.weight",
    "layers.0.attention.wv.weight": "model.layers.0.self_attn.v_proj.weight",
    "layers.0.attention.wo.weight": "model.layers.0.self_attn.o_proj.weight",
    "layers.0.feed_forward.w1.weight": "model.layers.0.mlp.gate_proj.weight",
    "layers.0.feed_forward.w2.weight": "model.layers.0.mlp.down_proj.weight",
    "layers.0.feed_forward.w3.weight": "model.layers.0.mlp.up_proj.weight",
    "layers.1.feed_forward.gate.weight": "model.layers.1.block_sparse_moe.gate.weight",
    "layers.1.feed_forward.experts.4.w2.weight": "model.layers.1.block_sparse_moe.experts.4.w2.weight",
}


class TestMistral:
    def test_mistral_names_mean_the_same_paths(self):
        assert all(canonicalize(native) == canonicalize(usual) for native, usual in MISTRAL.items())

    def test_mistral_head_rows_are_restored_on_either_side(self, tmp_path):
        usual = {f"model.layers.0.self_attn.{n}_proj.weight": numbers(24, 64, seed=ord(n)) for n in "qkv"}
        native = {
            f"layers.0.attention.w{n}.weight": w if n == "v" else per_head(w)
            for n, w in zip("qkv", usual.values(), strict=True)
        }
        with_config(tmp_path, {"dim": 64, "n_heads": 3, "n_kv_heads": 3}, "params.json")
        for given, stored in ((usual, native), (native, usual)):
            with open_pairing(
                store(tmp_path / "original.safetensors", given), store(tmp_path / "quantized.safetensors", stored)
            ) as plan:
                assert [] == plan.leftovers
                assert 3 == len(plan.pairs)
                assert all(torch.equal(read_whole(p.original), read_whole(p.quantized)) for p in plan.pairs)

    def test_mistral_names_without_a_head_count_are_refused(self, tmp_path):
        usual = {"model.layers.0.self_attn.q_proj.weight": numbers(24, 64)}
        values, left = values_of(tmp_path, usual, {"layers.0.attention.wq.weight": numbers(24, 64)})

        assert {} == values
        assert "gives the number of heads" in left["original", "model.layers.0.self_attn.q_proj.weight"][1]

    def test_misfitting_head_count_is_refused(self, tmp_path):
        with_config(tmp_path, {"num_attention_heads": 5})
        usual = {"model.layers.0.self_attn.q_proj.weight": numbers(24, 64)}
        values, left = values_of(tmp_path, usual, {"layers.0.attention.wq.weight": numbers(24, 64)})

        assert {} == values
        assert (
            "24 rows do not divide into pairs of rows for 5 heads"
            in left["original", "model.layers.0.self_attn.q_proj.weight"][1]
        )

    def test_mistral_names_with_rows_in_transformers_order_are_an_error(self, tmp_path):
        with_config(tmp_path, {"num_attention_heads": 3})
        weight = numbers(24, 64)
        usual = {"model.layers.0.self_attn.q_proj.weight": weight}
        report = compare(tmp_path, usual, {"layers.0.attention.wq.weight": weight})

        (finding,) = (finding for finding in report.findings if finding.code == "wrong_convention")
        assert ("rows of 3 heads in pairs, as its name implies", "rows of heads in halves") == (
            finding.evidence["prescribed"],
            finding.evidence["other"],
        )
        assert "inconclusive" == report.verdict
        assert [True] == [layer.snr_db < 3 for layer in report.layers]


class TestInterleavedGateAndUp:
    """In gpt-oss, the rows of gate and up alternate in the fused weight and bias."""

    def checkpoints(self, apart):
        gate, up = numbers(3, 40, 64, seed=1), numbers(3, 40, 64, seed=2)
        gate_bias, up_bias = numbers(3, 40, seed=3), numbers(3, 40, seed=4)
        place = "model.layers.0.mlp.experts"
        original = {
            f"{place}.gate_up_proj": torch.stack([gate, up], 2).view(3, 80, 64).transpose(1, 2).contiguous(),
            f"{place}.gate_up_proj_bias": torch.stack([gate_bias, up_bias], 2).view(3, 80),
            f"{place}.down_proj_bias": numbers(3, 64, seed=5),
        }
        if apart:
            stored = {
                f"{place}.{e}.{word}.{ending}": values[e].clone()
                for word, weight, bias in (("gate_proj", gate, gate_bias), ("up_proj", up, up_bias))
                for ending, values in (("weight", weight), ("bias", bias))
                for e in range(3)
            }
            stored |= {f"{place}.{e}.down_proj.bias": original[f"{place}.down_proj_bias"][e].clone() for e in range(3)}
        else:
            stored = {f"{place}.gate_proj.weight": gate, f"{place}.up_proj.weight": up}
            stored |= {f"{place}.gate_proj.bias": gate_bias, f"{place}.up_proj.bias": up_bias}
            stored[f"{place}.down_proj.bias"] = original[f"{place}.down_proj_bias"]
        return original, stored

    @pytest.mark.parametrize("apart", [True, False], ids=["experts apart", "stacked"])
    @pytest.mark.parametrize("message", [True, False], ids=["config tells", "the values tell"])
    def test_interleaved_gate_and_up_are_compared(self, tmp_path, apart, message):
        if message:
            with_config(tmp_path, {"model_type": "gpt_oss"})
        report = compare(tmp_path, *self.checkpoints(apart))

        assert "pass" == report.verdict
        assert 3 == len(report.lossless)
        assert message != any("alternating" in finding.message for finding in report.findings)

    @pytest.mark.session
    def test_interleaved_gate_and_up_give_the_same_in_any_cut(self, tmp_path):
        with_config(tmp_path, {"model_type": "gpt_oss"})
        original, stored = self.checkpoints(apart=False)
        x, y = store(tmp_path / "x.safetensors", original), store(tmp_path / "y.safetensors", stored)
        with open_pairing(x, y) as plan:
            for pair in plan.pairs:
                whole = read_whole(pair.quantized).clone()
                for size in (1, 7, 64, 1000):
                    assert torch.equal(whole, read_whole(pair.quantized, size))


class TestMlaHeads:
    """MLX stores kv_b_proj, [heads · (nope + v), rank], as embed_q, [heads, rank, nope], and unembed_out."""

    NAME = "model.layers.0.self_attn.kv_b_proj.weight"

    def test_mla_heads_are_put_together(self, tmp_path):
        weight = numbers(4 * (32 + 48), 64)
        by_head = weight.view(4, 80, 64)
        stored = {
            "model.layers.0.self_attn.embed_q.weight": by_head[:, :32].transpose(1, 2).contiguous(),
            "model.layers.0.self_attn.unembed_out.weight": by_head[:, 32:].contiguous(),
        }
        values, left = values_of(tmp_path, {self.NAME: weight}, stored)

        assert {} == left
        assert torch.equal(weight.float(), values[self.NAME])

    def test_mla_heads_with_another_shape_are_refused(self, tmp_path):
        stored = {
            "model.layers.0.self_attn.embed_q.weight": numbers(4, 64, 32),
            "model.layers.0.self_attn.unembed_out.weight": numbers(4, 47, 64),
        }
        values, left = values_of(tmp_path, {self.NAME: numbers(320, 64)}, stored)

        assert {} == values
        assert "[4, 64, 32] and [4, 47, 64]" in left["original", self.NAME][1]

    def test_incomplete_mla_heads_are_named(self, tmp_path):
        stored = {"model.layers.0.self_attn.embed_q.weight": numbers(4, 64, 32)}
        values, left = values_of(tmp_path, {self.NAME: numbers(320, 64)}, stored)

        assert {} == values
        assert "only a part of it is stored: no tensor holds " in left["original", self.NAME][1]
