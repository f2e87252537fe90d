"""Tensors that a checkpoint promises, or that its other blocks have, and that it lacks."""

import pytest
import torch
from safetensors.torch import save_file
from support.gguf_stored import Stored, architecture, key, write_gguf
from support.making import numbers, store

import quanterr

UINT32 = 4  # type of a GGUF key
NAMES = ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")
CAUSAL = {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False}


def model(blocks=5, but=()):
    x = {f"model.layers.{n}.{name}.weight": numbers(8, 8, seed=n) for n in range(blocks) for name in NAMES}
    x |= {"model.embed_tokens.weight": numbers(16, 8), "lm_head.weight": numbers(16, 8, seed=1)}
    return {name: value for name, value in x.items() if name not in but}


def said(folder, tensors, config=None):
    findings = quanterr.inspect(store(folder / "x", tensors, config=config or CAUSAL)).findings
    return [
        finding.message for finding in findings if finding.code in ("incomplete", "missing_codes", "config_mismatch")
    ]


def test_complete_model_is_silent(tmp_path):
    assert [] == said(tmp_path, model())


def test_block_that_lacks_a_matrix_is_named(tmp_path):
    (message,) = said(tmp_path, model(but=["model.layers.3.mlp.down_proj.weight"]))

    assert "model.layers.3 lacks mlp.down_proj, which the other 4 blocks of model.layers have" == message


def test_block_of_another_kind_lacks_nothing(tmp_path):
    x = model(but=["model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.down_proj.weight"])

    assert [] == said(tmp_path, x | {"model.layers.0.linear_attn.in_proj.weight": numbers(8, 8)})


def test_matrix_of_few_blocks_is_not_missed(tmp_path):
    assert [] == said(tmp_path, model() | {"model.layers.4.cross.q_proj.weight": numbers(8, 8)})


def with_norms():
    norms = {f"model.layers.{n}.input_layernorm.weight": torch.ones(8) for n in range(5)}
    return model() | norms | {"model.norm.weight": torch.ones(8)}


@pytest.mark.parametrize(
    ("name", "what"),
    [("model.embed_tokens.weight", "an embedding"), ("model.norm.weight", "a norm after the last block")],
)
def test_absent_end_of_a_model_is_named(tmp_path, name, what):
    x = with_norms()
    del x[name]

    assert [f"model.layers has blocks, but model lacks {what}"] == said(tmp_path, x)


def test_embedding_of_a_tied_head_may_be_absent(tmp_path):
    x = with_norms()
    del x["model.embed_tokens.weight"]

    assert [] == said(tmp_path, x, CAUSAL | {"tie_word_embeddings": True})


def test_blocks_alone_are_a_part_of_a_model(tmp_path):
    assert [] == said(tmp_path, {name: x for name, x in with_norms().items() if ".layers." in name})


def test_model_whose_norms_have_no_weights_is_complete(tmp_path):
    assert [] == said(tmp_path, {name: x for name, x in with_norms().items() if "norm" not in name})


@pytest.mark.parametrize(("tied", "n"), [(False, 1), (True, 0), (None, 0)])
def test_absent_head_is_named_unless_the_embedding_replaces_it(tmp_path, tied, n):
    messages = said(tmp_path, model(but=["lm_head.weight"]), CAUSAL | {"tie_word_embeddings": tied})

    assert n == sum("no lm_head is stored" in message for message in messages)


def test_model_without_a_head_by_its_class_is_silent(tmp_path):
    config = CAUSAL | {"architectures": ["LlamaModel"]}

    assert [] == said(tmp_path, model(but=["lm_head.weight"]), config)


@pytest.mark.parametrize(
    ("more", "n"),
    [({}, 1), ({"mtp.fc.weight": numbers(8, 8)}, 0), ({"model.layers.5.eh_proj.weight": numbers(8, 8)}, 0)],
)
def test_promised_layer_of_multi_token_prediction_is_missed(tmp_path, more, n):
    messages = said(tmp_path, model() | more, CAUSAL | {"num_hidden_layers": 5, "num_nextn_predict_layers": 1})

    assert n == sum("no layer of multi-token prediction (MTP) is stored" in message for message in messages)


@pytest.mark.parametrize(("rows", "n"), [(16, 0), (17, 1), (15, 1)])
def test_vocabulary_that_the_configuration_contradicts_is_reported(tmp_path, rows, n):
    messages = said(tmp_path, model(), CAUSAL | {"vocab_size": rows})

    assert n == sum(
        f"declares vocab_size {rows}, but model.embed_tokens.weight has 16 rows" in message for message in messages
    )


def test_scales_without_codes_are_an_error(tmp_path):
    module = "model.layers.0.mlp.up_proj"
    parts = {f"{module}.qzeros": torch.zeros(1, 1, dtype=torch.int32), f"{module}.scales": numbers(1, 8)}
    messages = said(tmp_path, model(but=[f"{module}.weight"]) | parts)

    assert f"{module} has qzeros and scales, but no codes: its weight is missing" in messages


def test_file_without_tensors_is_named(tmp_path):
    save_file({}, tmp_path / "x.safetensors")

    (finding,) = quanterr.inspect(tmp_path / "x.safetensors").findings
    assert ("incomplete", "warning") == (finding.code, finding.severity)


@pytest.mark.parametrize(("promised", "n"), [(1, 0), (2, 1)])
def test_missing_blocks_of_an_image_tower_are_named(tmp_path, promised, n):
    tensors = [Stored("v.blk.0.attn_q.weight", "F16", (8, 8), bytes(128))]
    path = write_gguf(
        tmp_path / "x.gguf", tensors, (*architecture("clip"), key("clip.vision.block_count", UINT32, promised))
    )
    messages = [finding.message for finding in quanterr.inspect(path).findings]

    assert n == sum("no tensor is stored for v.blk.1" in message for message in messages)
