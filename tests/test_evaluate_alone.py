"""GGUF files without the folder of their original: config, weights and tokenizer follow from the file.

The files are those of llama.cpp's converter (golden conversions), with random weights: what the model of the file
computes is what transformers computes from the folder that was converted.
"""

import json
import lzma
from pathlib import Path

import pytest
import torch
from conversions import materialize, read_conversion

from quanterr.checkpoints import open_checkpoint
from quanterr.evaluation.models.building import Architecture, read_config
from quanterr.evaluation.models.folder import ModelFolder, model_folder
from quanterr.evaluation.models.gguf_original import as_original
from quanterr.evaluation.models.gguf_tokenizer import tokenizer_files
from quanterr.evaluation.models.sides import Sides
from quanterr.evaluation.texts.tokens import tokenizer_of

transformers = pytest.importorskip(
    "transformers", reason='transformers is not installed (pip install "quanterr[evaluate]")'
)

FAMILIES = [
    "llama", "llama-fuse_qkv", "llama3", "llama_biased", "mistral", "mixtral", "qwen2", "qwen2-fuse_qkv", "qwen2_yarn",
    "qwen2_moe", "qwen2_moe-fuse_qkv", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3", "gemma3_text",
    "gemma3_scaled", "phi3", "phi3_long", "phi3_partial", "bert", "xlm_roberta",
]  # fmt: skip
FLOAT64 = 1e-9
# Factors of rotations and epsilons are stored as float32, and norms after the addition of one.
FLOAT32 = 1e-5
# What no file holds, as llama.cpp computes it for each model of the architecture.
ASSUMED = {"norm_topk_prob": True, "query_pre_attn_scalar": 32}
TOKENS = torch.randint(3, 96, (2, 100), generator=torch.Generator().manual_seed(1))  # longer than any window


def converted(name, folder, quantization="F32", **changed):
    """The folder of an original, and its file."""
    conversion = read_conversion(f"llama.cpp-{name}")
    config = conversion.config
    text = config.get("text_config", config)
    text |= {key: value for key, value in ASSUMED.items() if key in text and "qwen2_moe" not in name}
    conversion.keys.update(changed)
    made = materialize(conversion, folder, quantization=quantization)
    return made.original, made.quantized / "model.gguf"


def of_folder(folder):
    """The logits or hidden states that transformers computes."""
    kind = getattr(transformers, json.loads((folder / "config.json").read_text())["architectures"][0])
    model = kind.from_pretrained(folder, dtype=torch.float64).eval()
    model.config.get_text_config()._experts_implementation = "eager"  # the usual one has no float64
    return computed(model)


def of_file(path):
    """The logits or hidden states of the model of a file."""
    with open_checkpoint(path) as checkpoint:
        original = as_original(checkpoint, None)
        with model_folder(original) as folder:
            architecture = Architecture(read_config(folder), torch.float64)
        model, sides = architecture.build(), Sides(original)
        names = architecture.names(model, sides, sides.weights)
        tensors = {
            name: each.double() for name, each in names.tensors(dict(model.named_parameters()), sides.get).items()
        }
        assert names.missing() == []
    model.load_state_dict(tensors, strict=False, assign=True)
    model.tie_weights()
    return computed(model)


@torch.inference_mode()
def computed(model):
    found = model(input_ids=TOKENS, use_cache=False) if "Bert" not in type(model).__name__ else model(input_ids=TOKENS)
    return found.logits if hasattr(found, "logits") else found.last_hidden_state


@pytest.mark.parametrize("name", FAMILIES)
def test_the_model_of_a_file_computes_what_the_original_computes(name, tmp_path):
    folder, path = converted(name, tmp_path)
    want, found = of_folder(folder), of_file(path)
    want = want[..., : found.shape[-1]]  # a file of Gemma 3 has no rows of no token
    exact = not name.startswith(("gemma", "llama3"))
    torch.testing.assert_close(found, want, rtol=0, atol=(FLOAT64 if exact else FLOAT32) * float(want.abs().max()))


GOLDEN = json.loads(lzma.decompress((Path(__file__).parent / "golden_tokenizers/tokenizers.json.xz").read_bytes()))
TEXTS = [
    "The quick brown fox doesn't jump over 12345 lazy dogs: it's 3.50, or 1,234,567!",
    "  two spaces before, \t a tab,    four,      six and \n\n two lines \r\n\n   end   ",
    "naïve cafe\u0301 Größe ÜBERMASS e\u0301\u0323 — „Привет“, мир! 你好,世界 日本語 한국어 עברית",
    "😀🦙👩‍👩‍👧 ½ ⅷ ٣٤ x² \u200b\u00a0\ufeff a\u0000b <0x0A> <s>[INST] Ġthe ▁the [PAD5] ##ing",
    "They'll've thought; WE'RE THERE'S I'M 'twas\n    def f(x):\n\treturn x  # ok",
]


@pytest.fixture(params=GOLDEN)
def tokenizers(request, tmp_path):
    """A tokenizer of a folder as it is published, and that of the file that llama.cpp's converter made of it."""
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


def test_a_files_tokenizer_gives_the_same_tokens(tokenizers):
    want = tokenizers[0]
    special = [token for token in want.all_special_tokens if token in want.get_vocab()]
    texts = [*TEXTS, "".join(TEXTS), *(f"a{token}  {token} b" for token in special), "<think> </think>"]
    for text in texts:
        for with_special in (False, True):
            ids = [each(text, add_special_tokens=with_special, verbose=False)["input_ids"] for each in tokenizers]
            assert ids[0] == ids[1], text
