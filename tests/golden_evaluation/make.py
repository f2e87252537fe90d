"""A small Llama, its Q4_0 by llama.cpp, and llama-perplexity's numbers for both.

python tests/golden_evaluation/make.py LLAMA_CPP     a checkout with build/bin/llama-quantize and llama-perplexity

Made with llama-cpp-python 0.3.36's llama.cpp (ggml 0c1e570) and transformers 5. llama.cpp's kernels round activations
for quantized weights; so its numbers are those of the same Q4_0, dequantized by llama-quantize to F32.
"""

import json
import re
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).parent
VOCABULARY, CONTEXT, CHUNKS = 512, 64, 12
FOUND = {  # patterns of the numbers that llama-perplexity prints
    "ppl_original": r"Mean PPL\(base\)\s*:\s*(\S+) ±\s*(\S+)",
    "ppl": r"Mean PPL\(Q\)\s*:\s*(\S+) ±\s*(\S+)",
    "ln_ppl_ratio": r"Mean ln\(PPL\(Q\)/PPL\(base\)\)\s*:\s*(\S+) ±\s*(\S+)",
    "kld_mean": r"Mean\s+KLD:\s*(\S+) ±\s*(\S+)",
    "kld_max": r"Maximum KLD:\s*(\S+)",
    "kld_p99": r"99\.0%\s+KLD:\s*(\S+)",
    "kld_median": r"Median\s+KLD:\s*(\S+)",
    "delta_p_mean": r"Mean\s+Δp:\s*(\S+) ±\s*(\S+) %",
    "delta_p_rms": r"RMS Δp\s*:\s*(\S+) ±\s*(\S+) %",
    "top1": r"Same top p:\s*(\S+) ±\s*(\S+) %",
}


def main() -> None:
    """Write the files next to this one."""
    llama_cpp = Path(sys.argv[1])
    tokenizer, text = words()
    original = HERE / "original"
    train(tokenizer, text, original)
    held_out = text[-6000:]
    ids = torch.tensor(tokenizer.encode(held_out).ids)[: CONTEXT * CHUNKS]
    save_file({"ids": ids.to(torch.int32)}, HERE / "ids.safetensors")
    with tempfile.TemporaryDirectory() as folder:
        output = run_perplexity(llama_cpp, Path(folder), held_out)
    printed = {}
    for name, pattern in FOUND.items():
        match = re.search(pattern, output)
        assert match is not None, name
        values = [float(group) for group in match.groups()]
        printed[name] = [value / 100 for value in values] if pattern.endswith("%") else values
    (HERE / "expected.json").write_text(json.dumps(printed, indent=1) + "\n")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (original / name).unlink(missing_ok=True)


def words() -> tuple[Tokenizer, str]:
    """Return a byte-level BPE like GPT-2's, and its text, the standard library."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:40]
    text = "\n".join(path.read_text(encoding="utf-8", errors="ignore") for path in paths)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([text], trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet))
    return tokenizer, text


def train(tokenizer: Tokenizer, text: str, folder: Path) -> None:
    """Train for a minute, so that predictions differ."""
    torch.manual_seed(0)
    ids = torch.tensor(tokenizer.encode(text[:-6000]).ids)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=CONTEXT, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(300):
        starts = torch.randint(0, len(ids) - CONTEXT, (16,)).tolist()
        batch = torch.stack([ids[start : start + CONTEXT] for start in starts])
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.bfloat16().save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')


def run_perplexity(llama_cpp: Path, folder: Path, text: str) -> str:
    """Return the output of llama-perplexity."""

    def run(program: str, *options: object) -> str:
        done = subprocess.run(
            [llama_cpp / "build/bin" / program, *map(str, options)], check=True, capture_output=True, text=True
        )
        return done.stdout + done.stderr

    base, quantized, dequantized = folder / "f32.gguf", HERE / "q4_0.gguf", folder / "dequantized.gguf"
    convert = llama_cpp / "convert_hf_to_gguf.py"
    subprocess.run([sys.executable, convert, HERE / "original", "--outtype", "f32", "--outfile", base], check=True)
    run("llama-quantize", "--pure", base, quantized, "Q4_0")
    run("llama-quantize", "--allow-requantize", quantized, dequantized, "F32")
    (folder / "text").write_text(text, encoding="utf-8")
    exact = ["-c", CONTEXT, "--cache-type-k", "f32", "--cache-type-v", "f32", "--flash-attn", "off"]
    logits = ["--kl-divergence-base", folder / "logits"]
    run("llama-perplexity", "-m", base, "-f", folder / "text", "--chunks", CHUNKS, *exact, *logits)
    return run("llama-perplexity", "-m", dequantized, *exact, *logits, "--kl-divergence")


main()
