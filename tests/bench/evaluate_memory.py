"""Time and memory of evaluate next to transformers with both models in memory, on the same tokens.

python tests/bench/evaluate_memory.py [--folder .bench-evaluate/memory] [--sizes 0.1,0.5]

Models have random weights, BF16, the candidate is FP8. Each figure is that of a whole process. Then evaluate runs once
more under a limit of memory (``ulimit -v``) that ends the plain run.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

SIZES = {
    # G parameters: hidden, intermediate, layers, heads, vocabulary
    "0.1": (768, 2048, 12, 12, 16000),
    "0.5": (1536, 4096, 18, 12, 32000),
}
CONTEXT, CHUNKS = 512, 12
GIB = 2**30


def make(folder: Path, size: str) -> None:
    """Write the model, its FP8 copy, that copy's values as BF16 for the plain run, and tokens."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, inner, layers, heads, vocabulary = SIZES[size]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config).bfloat16()
    model.save_pretrained(folder / "original", max_shard_size="10GB")
    tensors = load_file(folder / "original/model.safetensors")
    written, values = dict(tensors), dict(tensors)
    for name, weight in tensors.items():
        if weight.dim() == 2 and "proj" in name:
            scale = weight.abs().max().float() / 448
            codes = (weight.float() / scale).to(torch.float8_e4m3fn)
            written[name], written[f"{name}_scale"] = codes, scale
            values[name] = codes.float() * scale
    for side, written_tensors in (("quantized", written), ("values", values)):
        (folder / side).mkdir(exist_ok=True)
        save_file(written_tensors, folder / side / "model.safetensors", {"format": "pt"})
        (folder / side / "config.json").write_text((folder / "original/config.json").read_text())
    generator = torch.Generator().manual_seed(1)
    save_file(
        {"ids": torch.randint(3, vocabulary, (CHUNKS * CONTEXT,), generator=generator)}, folder / "ids.safetensors"
    )


def evaluate_streamed(folder: Path) -> dict[str, float]:
    """Evaluate with quanterr."""
    import quanterr

    evaluation = quanterr.evaluate(
        folder / "original", [folder / "quantized"], tokens=folder / "ids.safetensors", context=CONTEXT
    )
    scores = evaluation.candidates[0].scores
    assert scores is not None
    return {"ppl_original": scores.ppl_original, "ppl": scores.ppl, "kld": scores.kld_mean}


def plain(folder: Path) -> dict[str, float]:
    """Measure with plain transformers: both models in memory, in float32."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    both = [
        AutoModelForCausalLM.from_pretrained(folder / side, dtype=torch.float32).train(False)
        for side in ("original", "values")
    ]
    chunks = load_file(folder / "ids.safetensors")["ids"].view(-1, CONTEXT)
    half = CONTEXT // 2
    nll: list[list[torch.Tensor]] = [[], []]
    kld = []
    with torch.inference_mode():
        for chunk in chunks:
            logs = [
                model(chunk[None], use_cache=False, logits_to_keep=half).logits[0, :-1].double().log_softmax(-1)
                for model in both
            ]
            targets = chunk[half + 1 :, None]
            for side_losses, log in zip(nll, logs, strict=True):
                side_losses.append(-log.gather(1, targets))
            kld.append((logs[0].exp() * (logs[0] - logs[1])).sum(-1))
    means = [float(torch.cat(side_losses).mean().exp()) for side_losses in nll]
    return {"ppl_original": means[0], "ppl": means[1], "kld": float(torch.cat(kld).mean())}


def run(way: str, folder: Path, limit: int | None = None) -> tuple[int, float, float, dict[str, float]]:
    """Run one of the two in a process of its own; return its status, seconds, peak in MB and numbers."""

    def limit_memory() -> None:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    started = time.monotonic()
    code = (
        f"import json; from evaluate_memory import {way}; from pathlib import Path; "
        f"found = {way}(Path({str(folder)!r})); "
        "status = dict(line.split(':', 1) for line in open('/proc/self/status')); "  # ru_maxrss counts the parent
        "print(json.dumps([int(status['VmHWM'].split()[0]), found]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, text=True, preexec_fn=limit_memory
    )
    seconds = time.monotonic() - started
    if done.returncode:
        return done.returncode, seconds, 0.0, {}
    peak, numbers = json.loads(done.stdout.splitlines()[-1])
    return 0, seconds, peak / 1024, numbers


def main() -> None:
    """Print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path(".bench-evaluate/memory"))
    parser.add_argument("--sizes", default=",".join(SIZES))
    parser.add_argument("--limit", type=float, default=4.0, help="GiB of ulimit -v, for the largest model")
    chosen = parser.parse_args()
    for size in chosen.sizes.split(","):
        folder = (chosen.folder / size).resolve()
        if not (folder / "ids.safetensors").exists():
            folder.mkdir(parents=True, exist_ok=True)
            make(folder, size)
        for way in ("streamed", "plain"):
            status, seconds, peak, numbers = run(way, folder)
            shown_numbers = ", ".join(f"{name} {value:.9g}" for name, value in numbers.items())
            print(f"{size} G {way}: status {status}, {seconds:.1f} s, {peak:.0f} MB; {shown_numbers}", flush=True)
    for way in ("streamed", "plain"):
        status, seconds, *_ = run(way, folder, int(chosen.limit * GIB))
        print(f"{size} G {way} with ulimit -v {chosen.limit:g} GiB: status {status} after {seconds:.1f} s", flush=True)


if __name__ == "__main__":
    main()
