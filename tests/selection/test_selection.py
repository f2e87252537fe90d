import pytest

from quanterr.errors import UsageError
from quanterr.selection import LayerSelection
from quanterr.selection.roles import ALIASES, OTHER, ROLES, block_of, place_of, role_of

NAMES = [
    "model.embed_tokens.weight",
    "model.layers.0.input_layernorm.weight",
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.0.self_attn.k_norm.weight",
    "model.layers.0.mlp.up_proj.weight",
    "model.layers.1.mlp.experts.7.up_proj.weight",
    "model.layers.1.router.weight",
    "lm_head.weight",
]
EMBED, NORM, ATTN, K_NORM, MLP, EXPERT, ROUTER, HEAD = NAMES


@pytest.mark.parametrize(
    ("name", "role"),
    [
        # Llama, Qwen
        ("model.embed_tokens.weight", "embedding"),
        ("model.layers.0.self_attn.q_proj.weight", "attention"),
        ("model.layers.0.self_attn.o_proj.weight", "attention"),
        ("model.layers.0.self_attn.q_norm.weight", "norm"),
        ("model.layers.31.mlp.gate_proj.weight", "mlp"),
        ("model.layers.31.mlp.down_proj.weight", "mlp"),
        ("model.layers.0.input_layernorm.weight", "norm"),
        ("model.layers.0.post_attention_layernorm.weight", "norm"),
        ("model.layers.0.pre_feedforward_layernorm.weight", "norm"),
        ("model.norm.weight", "norm"),
        ("lm_head.weight", "head"),
        # Llama and Mistral as their makers name them
        ("tok_embeddings.weight", "embedding"),
        ("layers.0.attention.wq.weight", "attention"),
        ("layers.0.attention_norm.weight", "norm"),
        ("layers.0.feed_forward.w2.weight", "mlp"),
        ("layers.0.ffn_norm.weight", "norm"),
        ("output.weight", "head"),
        # llama.cpp
        ("token_embd.weight", "embedding"),
        ("blk.0.attn_q.weight", "attention"),
        ("blk.0.attn_output.weight", "attention"),
        ("blk.0.attn_norm.weight", "norm"),
        ("blk.0.ffn_gate.weight", "mlp"),
        ("blk.0.ffn_down.weight", "mlp"),
        ("blk.0.ffn_norm.weight", "norm"),
        ("blk.0.ffn_up_exps.weight", "experts"),
        ("blk.0.ffn_up_shexp.weight", "experts"),
        ("blk.0.ffn_gate_inp.weight", "other"),
        ("output_norm.weight", "norm"),
        # DeepSeek, Mixtral, Qwen MoE, gpt-oss
        ("model.layers.3.mlp.experts.17.gate_proj.weight", "experts"),
        ("model.layers.3.mlp.shared_experts.up_proj.weight", "experts"),
        ("model.layers.3.mlp.shared_expert.up_proj.weight", "experts"),
        ("model.layers.3.mlp.experts.gate_up_proj", "experts"),
        ("model.layers.3.mlp.gate.weight", "mlp"),
        ("model.layers.3.self_attn.kv_a_proj_with_mqa.weight", "attention"),
        ("model.layers.3.self_attn.kv_a_layernorm.weight", "norm"),
        ("model.layers.0.block_sparse_moe.experts.0.w1.weight", "experts"),
        # GPT-2, Falcon
        ("transformer.wte.weight", "embedding"),
        ("h.0.ln_1.weight", "norm"),
        ("h.0.attn.c_attn.weight", "attention"),
        ("h.0.mlp.c_fc.weight", "mlp"),
        ("transformer.h.0.self_attention.query_key_value.weight", "attention"),
        # Flux
        ("img_in.weight", "embedding"),
        ("model.diffusion_model.txt_in.weight", "embedding"),
        ("time_in.in_layer.weight", "conditioning"),
        ("guidance_in.out_layer.weight", "conditioning"),
        ("double_blocks.0.img_attn.qkv.weight", "attention"),
        ("double_blocks.0.img_attn.norm.query_norm.scale", "norm"),
        ("double_blocks.0.txt_mlp.2.weight", "mlp"),
        ("double_blocks.0.img_mod.lin.weight", "modulation"),
        ("single_blocks.0.linear1.weight", "single_block"),
        ("model.diffusion_model.single_blocks.37.linear2.weight", "single_block"),
        ("single_blocks.0.modulation.lin.weight", "modulation"),
        ("final_layer.adaLN_modulation.1.weight", "modulation"),
        ("single_blocks.0.norm.key_norm.scale", "norm"),
        ("final_layer.linear.weight", "head"),
        # Flux, Wan and Qwen-Image in diffusers and ComfyUI
        ("transformer_blocks.0.attn.to_q.weight", "attention"),
        ("transformer_blocks.0.attn.to_out.0.weight", "attention"),
        ("transformer_blocks.0.ff.net.2.weight", "mlp"),
        ("x_embedder.weight", "embedding"),
        ("transformer_blocks.0.norm1.linear.weight", "modulation"),
        ("transformer_blocks.0.norm1_context.linear.weight", "modulation"),
        ("single_transformer_blocks.0.norm.linear.weight", "modulation"),
        ("transformer_blocks.0.img_mod.1.weight", "modulation"),
        ("time_text_embed.timestep_embedder.linear_1.weight", "conditioning"),
        ("joint_blocks.0.x_block.adaLN_modulation.1.weight", "modulation"),
        ("t_embedder.mlp.0.weight", "conditioning"),
        ("blocks.0.modulation", "modulation"),
        ("time_projection.1.weight", "modulation"),
        ("text_embedding.0.weight", "conditioning"),
        ("blocks.0.cross_attn.k.weight", "attention"),
        ("blocks.0.self_attn.norm_q.weight", "norm"),
        ("blocks.0.ffn.0.weight", "mlp"),
        ("patch_embedding.weight", "embedding"),
        ("head.head.weight", "head"),
        # SDXL as ComfyUI stores it
        ("model.diffusion_model.input_blocks.4.1.transformer_blocks.0.attn1.to_q.weight", "attention"),
        ("model.diffusion_model.input_blocks.4.1.transformer_blocks.0.ff.net.0.proj.weight", "mlp"),
        ("model.diffusion_model.input_blocks.4.1.transformer_blocks.0.norm1.weight", "norm"),
        ("model.diffusion_model.input_blocks.0.0.weight", "other"),
        ("model.diffusion_model.time_embed.0.weight", "conditioning"),
        ("model.diffusion_model.input_blocks.1.0.in_layers.2.weight", "convolution"),
        ("model.diffusion_model.input_blocks.1.0.emb_layers.1.weight", "conditioning"),
        ("first_stage_model.decoder.mid.attn_1.q.weight", "vae"),
        ("vae.decoder.conv_in.weight", "vae"),
        ("conditioner.embedders.0.transformer.text_model.encoder.layers.0.mlp.fc1.weight", "text_encoder"),
        ("text_encoders.clip_l.transformer.text_model.embeddings.token_embedding.weight", "text_encoder"),
        ("text_encoder_2.encoder.block.0.layer.0.SelfAttention.q.weight", "text_encoder"),
        # T5
        ("shared.weight", "embedding"),
        ("encoder.block.0.layer.0.SelfAttention.q.weight", "attention"),
        ("encoder.block.0.layer.0.layer_norm.weight", "norm"),
        ("encoder.final_layer_norm.weight", "norm"),
        # BERT
        ("bert.embeddings.word_embeddings.weight", "embedding"),
        ("bert.embeddings.LayerNorm.weight", "norm"),
        ("bert.encoder.layer.0.attention.self.query.weight", "attention"),
        ("bert.encoder.layer.0.attention.output.dense.weight", "attention"),
        ("bert.encoder.layer.0.attention.output.LayerNorm.weight", "norm"),
        ("bert.encoder.layer.0.intermediate.dense.weight", "mlp"),
        ("bert.encoder.layer.0.output.LayerNorm.weight", "norm"),
        ("bert.pooler.dense.weight", "other"),
        ("classifier.weight", "head"),
        # names without a role
        ("weight", "other"),
        ("", "other"),
        ("...", "other"),
        ("model.layers.0.something_new.weight", "other"),
    ],
)
def test_weight_role_follows_from_its_name(name, role):
    assert role == role_of(name)


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("model.layers.12.self_attn.q_proj.weight", "layers.12"),
        ("model.layers.12.mlp.experts.3.up_proj.weight", "layers.12"),
        ("double_blocks.3.img_attn.qkv.weight", "double_blocks.3"),
        ("model.diffusion_model.input_blocks.4.1.proj_in.weight", "input_blocks.4"),
        ("h.0.ln_1.weight", "h.0"),
        ("blocks.7", "blocks.7"),
        ("lm_head.weight", None),
        ("layer4.weight", None),
        ("7.weight", None),
        ("", None),
    ],
)
def test_weight_block_is_its_first_numbered_component(name, block):
    assert block == block_of(name)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("model.layers.12.self_attn.q_proj.weight", ("model.layers", 12, "self_attn.q_proj")),
        ("double_blocks.3.txt_mlp.2.weight", ("double_blocks", 3, "txt_mlp.2")),
        ("layers.5.mlp.experts.17.up_proj.weight", ("layers", 5, "mlp.experts.*.up_proj")),
        ("input_blocks.4.1.blocks.0.to_out.0.weight", ("input_blocks", 4, "*.blocks.*.to_out.0")),
        ("layers.5.weight", ("layers", 5, "weight")),
        ("layers.5", ("layers", 5, "weight")),
        ("model.norm.weight", None),
        ("5.weight", None),
        (f"layers.{'9' * 5000}.weight", None),
    ],
)
def test_weight_place_is_stack_block_and_module(name, place):
    assert place == place_of(name)


def test_every_alias_stands_for_a_role():
    assert set(ALIASES.values()) <= {role for role, _ in ROLES}
    assert not set(ALIASES) & {role for role, _ in ROLES}


@pytest.mark.parametrize(
    ("patterns", "taken"),
    [
        ([], NAMES),
        # roles and their other names
        (["attention"], [ATTN]),
        (["attn"], [ATTN]),
        (["mlp"], [MLP]),
        (["expert"], [EXPERT]),
        (["norm"], [NORM, K_NORM]),
        (["norms"], [NORM, K_NORM]),
        (["embed"], [EMBED]),
        (["head"], [HEAD]),
        ([OTHER], [ROUTER]),
        # parts of a name
        (["q_proj"], [ATTN]),
        (["up_pr"], [MLP, EXPERT]),
        (["layers.1.mlp"], [EXPERT]),
        # globs on the full name
        (["*up_proj.weight"], [MLP, EXPERT]),
        (["*.mlp.up_proj.*"], [MLP]),
        (["lm_head.weigh?"], [HEAD]),
        (["model.layers.[1-9].*"], [EXPERT, ROUTER]),
        # regular expressions, searched in the full name
        (["re:layers\\.0\\..*proj"], [ATTN, MLP]),
        (["re:^lm"], [HEAD]),
        (["re:experts\\.\\d{1,3}"], [EXPERT]),
        # several
        (["attn,mlp"], [ATTN, MLP]),
        (["attn", "mlp"], [ATTN, MLP]),
        (["attn , lm_head"], [ATTN, HEAD]),
        (["mlp,up_proj"], [MLP, EXPERT]),
        # exclusions
        (["!norm"], [EMBED, ATTN, MLP, EXPERT, ROUTER, HEAD]),
        (["layers.0,!norm"], [ATTN, MLP]),
        (["!norm", "layers.0"], [ATTN, MLP]),
        (["!re:^model"], [HEAD]),
        (["up_proj", "!*experts*"], [MLP]),
    ],
)
def test_patterns_choose_the_compared_layers(patterns, taken):
    selection = LayerSelection(patterns)
    selection.check(NAMES)

    assert taken == [name for name in NAMES if selection.takes(name)]


def test_patterns_are_kept_separately_for_the_report():
    assert ("attn", "!norm", "re:a,b") == LayerSelection(["attn, !norm", "re:a,b"]).patterns


def test_exclude_option_works_like_an_exclamation_mark():
    assert ("mlp", "!norm", "!re:a,b") == LayerSelection(["mlp"], ["norm", "re:a,b"]).patterns
    assert LayerSelection("!norm,!head").patterns == LayerSelection((), "norm,head").patterns


def test_exclamation_mark_in_exclude_is_refused():
    with pytest.raises(UsageError, match='"!norm" in --exclude: leave out the !'):
        LayerSelection((), ["head,!norm"])


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("attn2", 'no layer matches "attn2"; did you mean attn'),
        ("q_porj", 'no layer matches "q_porj"; did you mean q_proj'),
        ("!nrom", 'no layer matches "!nrom"; did you mean norm'),
        ("vae", 'no layer matches "vae"'),
        ("attn,zzz", 'no layer matches "zzz"; the layers are called model.embed_tokens.weight'),
        ("*.Q_PROJ.*", 'no layer matches "*.Q_PROJ.*"'),
        ("re:blocks", 'no layer matches "re:blocks"'),
        ("a\x1b", 'no layer matches "a\\x1b"'),
    ],
)
def test_pattern_without_a_match_is_refused_with_the_nearest_names(pattern, says):
    with pytest.raises(UsageError) as raised:
        LayerSelection([pattern]).check_all(NAMES)

    assert 2 == raised.value.status
    assert says in str(raised.value)


def test_idle_exclusion_is_noted_where_another_one_applies():
    selection = LayerSelection(["!vae,!norm"])
    selection.check(NAMES)

    assert ['"!vae" excludes nothing: no layer matches it'] == selection.describe_idle(NAMES)


@pytest.mark.parametrize("word", ["head", "!head", "lm_head", "haed"])
def test_unsuitable_names_are_not_proposed(word):
    with pytest.raises(UsageError, match="; the layers are called model"):
        LayerSelection([word]).check_all(NAMES[:-1])


@pytest.mark.parametrize("patterns", [["attn,!attn"], ["!*"], ["lm_head", "!head"], ["mlp,re:up_proj", "!re:."]])
def test_patterns_that_exclude_everything_are_refused(patterns):
    with pytest.raises(UsageError, match=r"selects no layer: it excludes everything it includes") as raised:
        LayerSelection(patterns).check(NAMES)

    assert ",".join(patterns) in str(raised.value)


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("", "an empty pattern"),
        ("attn,,mlp", "an empty pattern"),
        ("attn,", "an empty pattern"),
        ("!", "an empty pattern"),
        ("re:(", '"re:(" is not a regular expression'),
        ("!re:*", '"re:*" is not a regular expression'),
    ],
)
def test_meaningless_pattern_is_refused(pattern, says):
    with pytest.raises(UsageError) as raised:
        LayerSelection([pattern])

    assert says in str(raised.value)
