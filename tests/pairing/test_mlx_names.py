"""Names that MLX's programs give to tensors, and tensors that they leave out."""

import pytest
from support.making import compare, numbers

MLX = {"format": "mlx"}
BLOCK = "model.language_model.layers.0.mlp.up_proj.weight"
WHISPER = {  # names of transformers → names of mlx-audio and mlx-examples
    "model.encoder.layers.0.self_attn.q_proj.weight": "encoder.blocks.0.attn.query.weight",
    "model.encoder.layers.0.self_attn.k_proj.weight": "encoder.blocks.0.attn.key.weight",
    "model.encoder.layers.0.self_attn.v_proj.bias": "encoder.blocks.0.attn.value.bias",
    "model.encoder.layers.0.self_attn.out_proj.weight": "encoder.blocks.0.attn.out.weight",
    "model.encoder.layers.0.self_attn_layer_norm.weight": "encoder.blocks.0.attn_ln.weight",
    "model.encoder.layers.0.final_layer_norm.bias": "encoder.blocks.0.mlp_ln.bias",
    "model.encoder.layers.0.fc1.weight": "encoder.blocks.0.mlp1.weight",
    "model.encoder.layers.0.fc2.bias": "encoder.blocks.0.mlp2.bias",
    "model.encoder.layer_norm.weight": "encoder.ln_post.weight",
    "model.decoder.layers.0.self_attn.q_proj.weight": "decoder.blocks.0.attn.query.weight",
    "model.decoder.layers.0.encoder_attn.v_proj.weight": "decoder.blocks.0.cross_attn.value.weight",
    "model.decoder.layers.0.encoder_attn.out_proj.bias": "decoder.blocks.0.cross_attn.out.bias",
    "model.decoder.layers.0.encoder_attn_layer_norm.weight": "decoder.blocks.0.cross_attn_ln.weight",
    "model.decoder.layer_norm.weight": "decoder.ln.weight",
    "model.decoder.embed_positions.weight": "decoder.positional_embedding",
    "model.decoder.embed_tokens.weight": "decoder.token_embedding.weight",
}
RENAMED = {
    "model.visual.blocks.0.attn.qkv.weight": "vision_tower.blocks.0.attn.qkv.weight",
    "vision_tower.transformer.layers.0.norm.weight": "vision_tower.vision_model.transformer.layers.0.norm.weight",
    "vpm.encoder.layers.0.mlp.fc1.weight": "vision_tower.encoder.layers.0.mlp.fc1.weight",
    "model.text_model.layers.0.mlp.up_proj.weight": "language_model.layers.0.mlp.up_proj.weight",
    "model.vision_model.head.attention.in_proj_weight": "vision_tower.head.attention.in_proj.weight",
    "model.layers.0.share_expert.up_proj.weight": "model.layers.0.mlp.share_expert.up_proj.weight",
    "wav2vec2.encoder.layer_norm.weight": "encoder.layer_norm.weight",
}


def tensors_of(names):
    return {
        name: numbers(*((16, 32) if name.endswith(("weight", "embedding")) else (16,)), seed=n)
        for n, name in enumerate(names)
    }


@pytest.mark.parametrize("renamed", [WHISPER, RENAMED], ids=["Whisper", "others"])
def test_renamed_tensors_are_compared(tmp_path, renamed):
    original = tensors_of(renamed)
    report = compare(tmp_path, original, {renamed[name]: x for name, x in original.items()}, MLX)

    assert [] == report.not_compared
    assert original.keys() == {layer.layer_name for layer in report.lossless}


class TestTowers:
    TOWER = ("model.visual.blocks.0.mlp.fc1.weight", "model.visual.blocks.0.mlp.fc2.weight")

    def test_absent_tower_is_left_out(self, tmp_path):
        original = tensors_of((BLOCK, *self.TOWER))
        report = compare(tmp_path, original, {BLOCK: original[BLOCK]}, MLX)

        assert [] == report.not_compared
        assert "pass" == report.verdict

    def test_absent_part_of_a_stored_tower_is_missing(self, tmp_path):
        first, second = self.TOWER
        original = tensors_of((BLOCK, first, second))
        stored = {BLOCK: original[BLOCK], first.replace("model.visual", "vision_tower"): original[first]}
        report = compare(tmp_path, original, stored, MLX)

        assert [(second, "only_in_original")] == [(left.layer_name, left.bucket) for left in report.not_compared]

    def test_absent_part_of_a_stored_layer_that_predicts_is_missing(self, tmp_path):
        original = tensors_of((BLOCK, "mtp.fc.weight", "mtp.norm.bias"))
        report = compare(tmp_path, original, {name: x for name, x in original.items() if "norm" not in name}, MLX)

        assert [("mtp.norm.bias", "only_in_original")] == [
            (left.layer_name, left.bucket) for left in report.not_compared
        ]
