"""Makes the files of tests/golden_methods: a block of a small trained Llama, as programs with methods write it.

    python tests/producers/make_methods.py MODELS OUT              train the model, in an environment with transformers
    python tests/producers/make_methods.py MODELS OUT PROGRAM      quantize it, in the environment of that program

The environments are those of tests/producers/run.py; `importance` needs transformers and xllamacpp. The
model has read the sources of Python's standard library for a few minutes, and the programs take their samples from
what it has not read. llama.cpp's own quantizer is called through the library of xllamacpp 2026.10.11549, with the
mean squares of inputs that llama-imatrix collects.
"""

import ctypes
import json
import sys
import sysconfig
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

import common
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

VOCABULARY, LENGTH, BATCH, STEPS = 2048, 128, 8, 400
SAMPLE, SAMPLES, HELD_OUT = 64, 128, 0.1
BLOCK, AS = "model.layers.1.", "model.layers.0."  # what is kept, and how it is named
LEFT_OUT = (".q_proj.", ".o_proj.")  # a test learns nothing from them that it does not learn from other layers
Q4_K = 12  # its number in ggml.h
SUPERBLOCK, BLOCK_BYTES = 256, 144  # columns and bytes: llama.cpp takes another type for rows of other sizes


def read_sources() -> str:
    """Return the standard library's own sources, in the order of their names."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return "\n".join(path.read_text(encoding="utf-8", errors="ignore") for path in paths)


def train(folder: Path) -> None:
    """Train a tokenizer and a model of two blocks; write the ids of the text that it has not read."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    whole = read_sources()
    cut = int(len(whole) * (1 - HELD_OUT))
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    words.train_from_iterator(
        [whole[:cut]],
        trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet, special_tokens=["<end>"]),
    )
    ids = torch.tensor(words.encode(whole[:cut]).ids)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=256, tie_word_embeddings=True, pad_token_id=0,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, STEPS)
    generator = torch.Generator().manual_seed(0)
    for step in range(STEPS):
        starts = torch.randint(0, len(ids) - LENGTH - 1, (BATCH,), generator=generator)
        batch = torch.stack([ids[start : start + LENGTH] for start in starts.tolist()])
        loss: Any = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == STEPS - 1:
            print(f"step {step}: loss {float(loss.detach()):.3f}", flush=True)
    model.train(False).bfloat16().save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<end>", eos_token="<end>").save_pretrained(folder)
    unread = words.encode(whole[cut:]).ids[: SAMPLES * SAMPLE]
    (folder / "samples.json").write_text(json.dumps([unread[n : n + SAMPLE] for n in range(0, len(unread), SAMPLE)]))


def samples(model: Path) -> list[list[int]]:
    """Return the ids that the programs take as samples of inputs."""
    return json.loads((model / "samples.json").read_text())


def gptqmodel(model: Path, out: Path) -> None:
    """GPTQ of 4 bits in groups of 32, as GPTQModel does it without other settings."""
    import_module("with_gptqmodel").quantize(model, {"bits": 4}, out)


def autoawq(model: Path, out: Path) -> None:
    """AWQ of 4 bits in groups of 32: searched factors of columns, and searched ranges.

    It keeps the weights by Tensor.cpu() while it tries factors. On a CPU that is no copy, so that all trials stay in
    the weights: here it is a copy, as from a GPU.
    """
    plain = Tensor.cpu
    with patch.object(Tensor, "cpu", lambda values: plain(values).clone()):
        import_module("with_autoawq").quantize(model, {"version": "GEMM"}, out)


def autoround(model: Path, out: Path) -> None:
    """AutoRound of 4 bits in groups of 32, in 200 steps."""
    module = import_module("with_autoround")
    module.CALIBRATION.update(
        iters=200, seqlen=SAMPLE, nsamples=SAMPLES, dataset=[torch.tensor([ids]) for ids in samples(model)]
    )
    module.quantize(model, ("W4A16", "auto_round", {}), out)


def llmcompressor(model: Path, out: Path) -> None:
    """GPTQ of 4 bits in groups of 128, as llm-compressor does it without other settings."""
    module = import_module("with_llmcompressor")
    module.quantize(model, module.SETTINGS["GPTQ W4A16"], out)


def llmcompressor_awq(model: Path, out: Path) -> None:
    """AWQ of 4 bits in groups of 128, with zero points, by llm-compressor, which pins memory for a GPU."""
    module = import_module("with_llmcompressor")
    with patch.object(Tensor, "pin_memory", lambda values: values):
        module.quantize(model, module.SETTINGS["AWQ W4A16_ASYM"], out)


def importance(model: Path, out: Path) -> None:
    """Q4_K by llama.cpp's quantizer: blocks of its type as rows of bytes."""
    import xllamacpp.xllamacpp as library
    from transformers import LlamaForCausalLM

    ggml = ctypes.CDLL(library.__file__)
    of_floats = ctypes.POINTER(ctypes.c_float)
    ggml.ggml_quantize_chunk.argtypes = [ctypes.c_int, of_floats, ctypes.c_void_p, *3 * [ctypes.c_int64], of_floats]
    ggml.ggml_quantize_chunk.restype = ctypes.c_size_t
    made = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
    squares: dict[str, Tensor] = {}

    def collect(name: str) -> Callable[..., None]:
        def add(_module: object, given: tuple[Tensor]) -> None:
            squares[name] = squares.get(name, torch.zeros(given[0].shape[-1])) + given[0].square().sum((0, 1))

        return add

    modules = {name: m for name, m in made.named_modules() if name.startswith(BLOCK) and name.endswith("_proj")}
    for name, module in modules.items():
        module.register_forward_pre_hook(collect(name))
    with torch.no_grad():
        for ids in samples(model):
            made(input_ids=torch.tensor([ids]))
    stored = {name: norm.detach() for name, norm in made.state_dict().items() if "norm" in name}
    for name, module in modules.items():
        x = module.weight.detach().contiguous()
        if x.shape[1] % SUPERBLOCK == 0:
            blocks = torch.zeros(len(x), x.shape[1] // SUPERBLOCK * BLOCK_BYTES, dtype=torch.uint8)
            weights = (squares[name] / (SAMPLES * SAMPLE)).contiguous()
            pointers = (ctypes.cast(values.data_ptr(), of_floats) for values in (x, weights))
            ggml.ggml_quantize_chunk(Q4_K, next(pointers), blocks.data_ptr(), 0, *x.shape, next(pointers))
            stored[f"{name}.weight"] = blocks
    out.mkdir(parents=True)
    save_file(stored, out / "model.safetensors")


PROGRAMS: dict[str, tuple[str, Callable[[Path, Path], None]]] = {  # file → package, and what it does
    "gptqmodel": ("gptqmodel", gptqmodel),
    "autoawq": ("autoawq", autoawq),
    "autoround": ("auto-round", autoround),
    "llmcompressor": ("llmcompressor", llmcompressor),
    "llmcompressor_awq": ("llmcompressor", llmcompressor_awq),
    "importance": ("xllamacpp", importance),
}


def keep_block(folder: Path, path: Path, origin: str) -> None:
    """Write the tensors of one block to a file; to its header, where they are from and what config.json says."""
    stored = {key: value for file in sorted(folder.glob("*.safetensors")) for key, value in load_file(file).items()}
    config = folder / "config.json"
    config_json = json.loads(config.read_text()).get("quantization_config", {}) if config.exists() else {}
    config_json.get("meta", {}).pop("offload_to_disk_path", None)  # GPTQModel's, of this machine
    kept = {
        name.replace(BLOCK, AS): value.contiguous()
        for name, value in stored.items()
        if name.startswith(BLOCK) and not any(part in name for part in LEFT_OUT)
    }
    save_file(kept, path, {"origin": origin, "quantization_config": json.dumps(config_json)})


def main(models: Path, out: Path, program: str = "") -> None:
    """Train the model, or quantize it by a program."""
    model = models / "trained"
    if not program:
        train(model)
        keep_block(model, out / "original.safetensors", "trained by tests/producers/make_methods.py")
        return
    common.TOKENS[:] = [torch.tensor([ids]) for ids in samples(model)]
    package, quantize = PROGRAMS[program]
    quantize(model, models / program)
    keep_block(models / program, out / f"{program}.safetensors", f"{package} {version(package)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve(), *sys.argv[3:])
