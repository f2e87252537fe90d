"""GGUF files without the folder of their original: config, weights and tokenizer follow from the file.

The files are those of llama.cpp's converter (golden conversions), with random weights: what the model of the file
computes is what transformers computes from the folder that was converted.
"""

import json

import pytest
import torch
from conversions import materialize, read_conversion

from quanterr.checkpoints import open_checkpoint
from quanterr.evaluation.models.building import Architecture, read_config
from quanterr.evaluation.models.folder import model_folder
from quanterr.evaluation.models.gguf_original import as_original
from quanterr.evaluation.models.sides import Sides

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
