"""GGUF files without the folder of their original: config, weights and tokenizer are derived from the file.

The files come from llama.cpp's converter (golden conversions), with random weights: the model in the file must
compute the same as transformers does from the folder that was converted.
"""

import json
import lzma
import re
import shutil
from dataclasses import replace
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import save_file
from support.conversions import materialize, read_conversion
from support.small_models import load_tensors, save_model
from test_evaluate_gguf import LLAMA, PERPLEXITY, PRINTED, PRINTED_DIGITS, convert, rename

import quanterr
from quanterr.checkpoints import open_checkpoint
from quanterr.evaluation.models.building import Architecture, read_config
from quanterr.evaluation.models.folder import ModelFolder, model_folder
from quanterr.evaluation.models.gguf_original import as_original
from quanterr.evaluation.models.gguf_tokenizer import tokenizer_files
from quanterr.evaluation.models.weights import OriginalWeights
from quanterr.evaluation.run import study
from quanterr.evaluation.texts.tokens import tokenizer_of

pytestmark = pytest.mark.session

transformers = pytest.importorskip(
    "transformers", reason='transformers is not installed (pip install "quanterr[evaluate]")'
)

FAMILIES = [
    "llama", "llama-fuse_qkv", "llama3", "llama_biased", "mistral", "mixtral", "qwen2", "qwen2-fuse_qkv", "qwen2_yarn",
    "qwen2_moe", "qwen2_moe-fuse_qkv", "qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe-fuse_gate_up",
    "gemma", "gemma2", "gemma3", "gemma3_text", "gemma3_scaled", "phi3", "phi3_long", "phi3_partial", "bert",
    "xlm_roberta",
]  # fmt: skip
FLOAT64 = 1e-9
# Factors of rotations are stored as float32, norms after the addition of one, and decays of linear attention, which
# transformers computes in float32, as their exponentials.
FLOAT32 = 1e-5
# Values missing from every file, as llama.cpp computes them for each model of the architecture.
ASSUMED = {"norm_topk_prob": True, "query_pre_attn_scalar": 32}
TOKENS = torch.randint(3, 96, (2, 100), generator=torch.Generator().manual_seed(1))  # longer than any window


def convert_model(name, folder, quantization="F32", **changed):
    """Return the folder of an original and its converted file."""
    conversion = read_conversion(f"llama.cpp-{name}")
    config = conversion.config
    text = config.get("text_config", config)
    text |= {key: value for key, value in ASSUMED.items() if key in text and "qwen2_moe" not in name}
    conversion = replace(conversion, keys=conversion.keys | changed)
    made = materialize(conversion, folder, quantization=quantization)
    return made.original, made.quantized / "model.gguf"


def of_folder(folder):
    """Return the logits or hidden states that transformers computes."""
    [name] = json.loads((folder / "config.json").read_text())["architectures"]
    if (model_class := getattr(transformers, name, None)) is None:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    model = model_class.from_pretrained(folder, dtype=torch.float64).eval()
    # transformers' default for experts cannot compute in float64.
    model.config.get_text_config()._experts_implementation = "eager"
    return compute(model)


def of_file(path):
    """Return the logits or hidden states of the model in a file."""
    with open_checkpoint(path) as checkpoint:
        original = as_original(checkpoint, None)
        with model_folder(original) as folder:
            architecture = Architecture(read_config(folder), torch.float64)
        model, sides = architecture.build(), OriginalWeights(original)
        names = architecture.names(model, sides, sides.weights)
        tensors = {
            name: tensor.double() for name, tensor in names.tensors(dict(model.named_parameters()), sides.get).items()
        }
        assert names.missing() == []
    model.load_state_dict(tensors, strict=False, assign=True)
    model.tie_weights()
    return compute(model)


@torch.inference_mode()
def compute(model):
    output = model(input_ids=TOKENS, use_cache=False) if "Bert" not in type(model).__name__ else model(input_ids=TOKENS)
    return output.logits if hasattr(output, "logits") else output.last_hidden_state


@pytest.mark.parametrize("name", FAMILIES)
def test_model_from_a_file_computes_the_same_as_the_original(name, tmp_path):
    folder, path = convert_model(name, tmp_path)
    want, output = of_folder(folder), of_file(path)
    want = want[..., : output.shape[-1]]  # a Gemma 3 file has no rows without a token
    exact = not name.startswith(("gemma", "llama3", "qwen3_5"))
    torch.testing.assert_close(output, want, rtol=0, atol=(FLOAT64 if exact else FLOAT32) * float(want.abs().max()))


GOLDEN = json.loads(lzma.decompress((Path(__file__).parents[1] / "golden_tokenizers/tokenizers.json.xz").read_bytes()))
TEXTS = [
    "The quick brown fox doesn't jump over 12345 lazy dogs: it's 3.50, or 1,234,567!",
    "  two spaces before, \t a tab,    four,      six and \n\n two lines \r\n\n   end   ",
    "naïve cafe\u0301 Größe ÜBERMASS e\u0301\u0323 — „Привет“, мир! 你好,世界 日本語 한국어 עברית",
    "😀🦙👩‍👩‍👧 ½ ⅷ ٣٤ x² \u200b\u00a0\ufeff a\u0000b <0x0A> <s>[INST] Ġthe ▁the [PAD5] ##ing",
    "They'll've thought; WE'RE THERE'S I'M 'twas\n    def f(x):\n\treturn x  # ok",
]


@pytest.fixture(params=GOLDEN)
def tokenizers(request, tmp_path):
    """A tokenizer from a folder as published, and the one from the file that llama.cpp's converter made of it."""
    golden = GOLDEN[request.param]
    folders = tmp_path / "published", tmp_path / "made"
    made = tokenizer_files(
        {key: tuple(value) if isinstance(value, list) else value for key, value in golden["keys"].items()}
    )
    for folder, files in zip(folders, (golden["files"], made), strict=True):
        folder.mkdir()
        for name, content in ({"config.json": golden["config"]} | files).items():
            (folder / name).write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return [tokenizer_of(ModelFolder(folder, str(folder))) for folder in folders]


def test_tokenizer_from_a_file_gives_the_same_tokens(tokenizers):
    want = tokenizers[0]
    special = [token for token in want.all_special_tokens if token in want.get_vocab()]
    texts = [*TEXTS, "".join(TEXTS), *(f"a{token}  {token} b" for token in special), "<think> </think>"]
    for text in texts:
        for with_special in (False, True):
            ids = [
                tokenizer(text, add_special_tokens=with_special, verbose=False)["input_ids"] for tokenizer in tokenizers
            ]
            assert ids[0] == ids[1], text


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("llama", {"llama.attention.temperature_scale": 0.1}, "llama.attention.temperature_scale may change what"),
        ("llama", {"llama.rope.scaling.type": "dynamic"}, "rotations are scaled as dynamic"),
        ("llama", {"llama.rope.dimension_count": 8}, "rope.dimension_count is 8, but heads are 16 long"),
        ("llama", {"llama.attention.value_length": 8}, "heads of keys have 16 elements, those of values 8"),
        ("llama", {"llama.attention.head_count": [4, 2]}, "head_count differs from block to block"),
        ("llama", {"llama.block_count": 3}, "llama.block_count is 3, but tensors are in 2 blocks"),
        (
            "llama",
            {"llama.embedding_length": 32},
            "and 18 more of the model, or has another shape",
        ),
        ("llama", {"llama.context_length": 1 << 30}, "llama.context_length is 1,073,741,824, which no model has"),
        ("llama3", {"llama.rope.scaling.type": "linear"}, "rope_freqs.weight is stored, but rotations are also scaled"),
        ("qwen2_yarn", {"qwen2.rope.scaling.yarn_attn_factor": 2.0}, "yarn_attn_factor may change what the model"),
        ("phi3_long", {"general.architecture": "llama"}, "llama.block_count is missing"),
        ("phi3", {"phi3.rope.dimension_count": 7}, "rope.dimension_count is 7, but heads are 16 long"),
        ("bert", {"bert.attention.causal": True}, "bert.attention.causal is not false"),
        ("smollm3", {}, "no config follows from the metadata of the architecture smollm3 yet"),
    ],
)
def test_unsupported_metadata_is_refused_by_name(name, changed, message, tmp_path):
    _, path = convert_model(name, tmp_path, **changed)
    with open_checkpoint(path) as checkpoint, pytest.raises(quanterr.CheckpointError) as caught:
        as_original(checkpoint, None)
    assert message in str(caught.value)
    assert "with --config FOLDER" in str(caught.value)


def test_metadata_refused_by_transformers_is_an_error(tmp_path):
    _, path = convert_model("llama", tmp_path, **{"llama.attention.head_count": 3})
    with (
        open_checkpoint(path) as checkpoint,
        pytest.raises(quanterr.CheckpointError, match="transformers refuses it"),
    ):
        as_original(checkpoint, None)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tokenizer.ggml.pre": "falcon"}, "tokenizer.ggml.pre is falcon"),
        ({"tokenizer.ggml.model": "rwkv"}, "tokenizer.ggml.model is rwkv"),
        ({"tokenizer.ggml.precompiled_charsmap": (1, 2)}, "tokenizer.ggml.precompiled_charsmap may change tokens"),
        ({"tokenizer.ggml.merges": ("a b c",)}, "tokenizer.ggml.merges has a b c, which is not a pair"),
        ({"tokenizer.ggml.token_type": (1,)}, "has not one type for each of"),
    ],
)
def test_unknown_tokenizer_is_refused_by_name(changed, message):
    keys = {key: tuple(value) if isinstance(value, list) else value for key, value in GOLDEN["smollm"]["keys"].items()}
    with pytest.raises(ValueError, match=re.escape(message)):
        tokenizer_files(keys | changed)


def test_text_is_refused_where_a_file_has_no_tokenizer(tmp_path):
    _, path = convert_model("llama", tmp_path)
    with pytest.raises(quanterr.CheckpointError, match=r"tokens is missing; .* config, or token ids with tokens "):
        quanterr.evaluate(path, text=__file__, against="int8_row")


def test_given_config_replaces_the_metadata(tmp_path):
    folder, path = convert_model("smollm3", tmp_path)
    save_file({"ids": TOKENS.flatten()}, tmp_path / "ids.safetensors")
    (tmp_path / "config").mkdir()
    shutil.copy(folder / "config.json", tmp_path / "config")
    options = {"tokens": tmp_path / "ids.safetensors", "context": 16, "against": "int8_row"}
    want = quanterr.evaluate(folder, **options).candidates[0].scores
    scores = quanterr.evaluate(path, config=tmp_path / "config", **options).candidates[0].scores
    assert (scores.ppl_original, scores.kld_mean) == pytest.approx((want.ppl_original, want.kld_mean), rel=1e-6)
    with pytest.raises(quanterr.CheckpointError, match=r"tokenizer.json: missing"):
        quanterr.evaluate(path, config=tmp_path / "config", text=__file__, against="int8_row")


def test_perplexity_equals_the_number_printed_by_llama_cpp():
    """The whole file comes from llama.cpp: its metadata, its conversion and its quantization."""
    evaluation = quanterr.evaluate(
        PERPLEXITY / "q4_0.gguf", against="int8_row", tokens=PERPLEXITY / "ids.safetensors", context=64
    )
    assert evaluation.candidates[0].scores.ppl_original == pytest.approx(PRINTED["ppl"][0], **PRINTED_DIGITS)


CHAT = '{"messages": [{"role": "user", "content": "Is it there?"}, {"role": "assistant", "content": "The fox is."}]}'


@pytest.fixture(scope="module")
def sides(tmp_path_factory):
    """A folder with a tokenizer and a file of the same model, both with Q8_0's values, and a text and conversations."""
    folder = tmp_path_factory.mktemp("alone")
    golden = GOLDEN["smollm"]
    save_model("llama", folder / "original", vocab_size=432)
    for name, content in golden["files"].items():
        (folder / "original" / name).write_text(content if isinstance(content, str) else json.dumps(content))
    writer = gguf.GGUFWriter(folder / "model.gguf", "llama")
    for key, value in (LLAMA_KEYS | golden["keys"]).items():
        if key != "general.architecture":
            value_type = gguf.GGUFValueType.get_type(value)
            of = gguf.GGUFValueType.get_type(value[0]) if isinstance(value, list) else None
            writer.add_key_value(key, value, value_type, of)
    for name, tensor in load_tensors(folder / "original").items():
        writer.add_tensor(rename(name, LLAMA), convert("llama", name, tensor)[0].contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (folder / "text.txt").write_text("\n".join(TEXTS * 3), encoding="utf-8")
    (folder / "chat.jsonl").write_text(CHAT, encoding="utf-8")
    return folder


LLAMA_KEYS = {
    "llama.block_count": 2, "llama.context_length": 128, "llama.embedding_length": 32, "llama.feed_forward_length": 48,
    "llama.attention.head_count": 4, "llama.attention.head_count_kv": 2, "llama.rope.dimension_count": 8,
    "llama.rope.freq_base": 10000.0, "llama.attention.layer_norm_rms_epsilon": 1e-6,
}  # fmt: skip


def test_file_alone_is_evaluated_as_with_its_folder(sides):
    options = {"text": sides / "text.txt", "chat": sides / "chat.jsonl", "context": 32, "against": "int8_row"}
    want, alone = (quanterr.evaluate(sides / name, **options) for name in ("original", "model.gguf"))
    assert (alone.verdict, alone.tokens.sha256, alone.model) == ("pass", want.tokens.sha256, want.model)
    assert alone.original_bytes == open_checkpoint(sides / "model.gguf").nbytes
    for text, other in zip(want.candidates[0].texts, alone.candidates[0].texts, strict=True):
        for measure in ("ppl_original", "ppl", "kld_mean"):
            assert getattr(other.scores, measure) == pytest.approx(getattr(text.scores, measure), rel=1e-6)
        assert text.scores.kld_mean > 1e-6


def test_blocks_that_predict_further_tokens_are_left_out(tmp_path):
    (_, path), (_, candidate) = (convert_model("qwen3_5", tmp_path / case, case) for case in ("F32", "Q8_0"))
    save_file({"ids": TOKENS.flatten()}, tmp_path / "ids.safetensors")
    evaluation = quanterr.evaluate(path, candidate, tokens=tmp_path / "ids.safetensors", context=16)
    assert (evaluation.verdict, evaluation.candidates[0].missing) == ("pass", [])


def test_plan_for_a_file_alone_is_verified_and_names_its_tensors(sides, tmp_path):
    options = {"text": sides / "text.txt", "context": 32}
    study(sides / "model.gguf", sensitivity=tmp_path / "s.json", **options)
    plan = quanterr.plan(
        sides / "model.gguf", bits=6, to="int8_row,int4_g32", sensitivity=tmp_path / "s.json", verify=True, **options
    )
    names = {layer.layer_name for layer in plan.layers}
    assert {"blk.0.attn_q.weight", "blk.1.ffn_down.weight"} <= names
    again = quanterr.evaluate(sides / "model.gguf", against=plan, **options).candidates[0]
    assert (again.verdict, again.scores.kld_mean) == ("pass", plan.measured.kld)
    [swept] = quanterr.sweep(sides / "model.gguf", to="int8_row", sensitivity=tmp_path / "s.json").candidates
    assert swept.verdict == "pass"
    assert swept.predicted_kld > 0
