"""The names of tensors in GGUF files equal those of the gguf package."""

import pytest

from quanterr.pairing.converters.gguf_names import architectures, names_of


@pytest.mark.parametrize(
    ("architecture", "original", "name"),
    [
        ("llama", "model.embed_tokens", "token_embd"),
        ("llama", "lm_head", "output"),
        ("llama", "model.norm", "output_norm"),
        ("llama", "model.layers.{bid}.self_attn.q_proj", "blk.{bid}.attn_q"),
        ("llama", "model.layers.{bid}.mlp.gate_proj", "blk.{bid}.ffn_gate"),
        ("llama", "model.layers.{bid}.post_attention_layernorm", "blk.{bid}.ffn_norm"),
        ("gemma2", "model.layers.{bid}.post_attention_layernorm", "blk.{bid}.post_attention_norm"),
        ("arctic", "model.layers.{bid}.post_attention_layernorm", "blk.{bid}.ffn_norm_exps"),
        ("gpt2", "h.{bid}.attn.c_attn", "blk.{bid}.attn_qkv"),
        ("qwen3moe", "model.layers.{bid}.mlp.experts.down_proj", "blk.{bid}.ffn_down_exps"),
    ],
)
def test_tensor_has_its_name_in_its_architecture(architecture, original, name):
    assert name == names_of(architecture)[original]


def test_unknown_architecture_has_no_names():
    assert {} == names_of("flux")
    assert "flux" not in architectures()


def test_names_cannot_be_changed():
    with pytest.raises(TypeError):
        names_of("llama")["a"] = "b"


# Changes in llama.cpp since the package was published.
CHANGED = {"clip": {"encoder.layers.{bid}.conv.batch_norm"}}


def test_names_equal_the_package_for_every_architecture(monkeypatch):
    package = pytest.importorskip("gguf")
    rules = package.TensorNameMap.block_mappings_cfg
    assert set(package.MODEL_ARCH_NAMES.values()) <= architectures()

    for architecture, name in package.MODEL_ARCH_NAMES.items():
        # The package permanently changes its own table for some architectures.
        monkeypatch.setattr(package.TensorNameMap, "block_mappings_cfg", dict(rules))
        expected = package.get_tensor_name_map(architecture, 1).mapping
        changed = {key.replace("{bid}", "0") for key in CHANGED.get(name, ())}
        names = {key.replace("{bid}", "0"): of.replace("{bid}", "0") for key, of in names_of(name).items()}
        package_names = {of for _, of in expected.values()}
        wanted = {key: of for key, (_, of) in expected.items() if key not in package_names or key in names}

        assert {key: of for key, of in wanted.items() if key not in changed}.items() <= names.items()
