"""The names of tensors in GGUF files are those of the gguf package."""

import json
from importlib.metadata import PackageNotFoundError, version

import pytest

from quanterr.pairing.converters import gguf_names
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
def test_a_tensor_has_its_name_in_its_architecture(architecture, original, name):
    assert name == names_of(architecture)[original]


def test_an_unknown_architecture_has_no_names():
    assert {} == names_of("flux")
    assert "flux" not in architectures()


def test_names_are_not_changed_by_whoever_reads_them():
    with pytest.raises(TypeError):
        names_of("llama")["a"] = "b"


def of_package():
    """The package, where it is the one that the file was made from."""
    source = json.loads(gguf_names.Path(gguf_names.__file__).with_suffix(".json").read_text())["source"]
    wanted = source.split()[1].rstrip(":")
    try:
        installed = version("gguf")
    except PackageNotFoundError:
        installed = "not installed"
    if installed != wanted:
        pytest.skip(f"the names were made from gguf {wanted}; it is {installed}")
    return pytest.importorskip("gguf")


def test_are_what_make_gguf_names_makes():
    of_package()
    import make_gguf_names

    assert make_gguf_names.document() == make_gguf_names.FILE.read_text()


def test_are_those_of_the_package_for_every_architecture(monkeypatch):
    package = of_package()
    rules = package.TensorNameMap.block_mappings_cfg
    assert set(package.MODEL_ARCH_NAMES.values()) == architectures()

    for architecture, name in package.MODEL_ARCH_NAMES.items():
        # The package changes its own table for some architectures, for good.
        monkeypatch.setattr(package.TensorNameMap, "block_mappings_cfg", dict(rules))
        expected = package.get_tensor_name_map(architecture, 1).mapping
        found = {key.replace("{bid}", "0"): of.replace("{bid}", "0") for key, of in names_of(name).items()}
        own = {of for _, of in expected.values()}

        assert {key: of for key, (_, of) in expected.items() if key not in own or key in found} == found
