"""A small Llama that is trained here, quantized in many ways: weight error, output error, divergence, prediction.

python tests/bench/evaluate.py [FOLDER]     ten minutes on two cores; prints the table of the guide's page evaluate

The model (3 M parameters) learns from the text of Python's standard library; tokens that it has not seen are scored.
Eight recipes quantize all matrices of its blocks, and a few more models take each matrix from a recipe at random.
"""

import argparse
import json
import random
import shutil
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import packing

import quanterr
from quanterr.evaluation.embeddings import spearman

VOCABULARY, LENGTH, BATCH, STEPS = 2048, 256, 12, 700
MIXES = 16
CHUNKS = 12
HELD_OUT = 0.1  # of the text
SEED = 0
INT = {"int8_g64": (8, 64), "int6_g64": (6, 64), "int5_g32": (5, 32), "int4_g32": (4, 32), "int4_g64": (4, 64),
       "int3_g32": (3, 32)}  # fmt: skip
RECIPES = ("fp8_tensor", "fp8_row", *INT)


def text() -> str:
    """The standard library's own sources, in the order of their names."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return "\n".join(path.read_text(encoding="utf-8", errors="ignore") for path in paths)


def train(folder: Path) -> None:
    """A tokenizer and a model, and the text that the model has not seen."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(SEED)
    whole = text()
    cut = int(len(whole) * (1 - HELD_OUT))
    (folder / "held_out.txt").write_text(whole[cut:], encoding="utf-8")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([whole[:cut]], trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet))
    ids = torch.tensor(tokenizer.encode(whole[:cut]).ids)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=192, intermediate_size=512, num_hidden_layers=6, num_attention_heads=6,
        num_key_value_heads=3, max_position_embeddings=512, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, STEPS)
    generator = torch.Generator().manual_seed(SEED)
    for step in range(STEPS):
        starts = torch.randint(0, len(ids) - LENGTH - 1, (BATCH,), generator=generator)
        batch = torch.stack([ids[start : start + LENGTH] for start in starts.tolist()])
        loss: Any = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 0 or step == STEPS - 1:
            print(f"step {step}: loss {float(loss.detach()):.3f}", file=sys.stderr, flush=True)
    model.eval().save_pretrained(folder / "original")
    tokenizer.save(str(folder / "original/tokenizer.json"))
    (folder / "original/tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')


def stored_as(recipe: str, name: str, weight: Tensor) -> dict[str, Tensor]:
    """A matrix as a quantizer stores it: FP8 with scales, or compressed-tensors' packed integers."""
    if recipe.startswith("fp8"):
        dims = None if recipe == "fp8_tensor" else 1
        peak = weight.abs().amax() if dims is None else weight.abs().amax(1, keepdim=True)
        scale = (peak / 448).clamp(min=1e-12)
        return {name: (weight / scale).to(torch.float8_e4m3fn), f"{name}_scale": scale.float()}
    bits, group = INT[recipe]
    rows, cols = weight.shape
    grouped = weight.view(rows, cols // group, group)
    scale = (grouped.abs().amax(-1) / (2 ** (bits - 1) - 0.5)).clamp(min=1e-12)
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    codes = (grouped / scale[..., None]).round().clamp(low, high).view(rows, cols).to(torch.int32) - low
    return {
        f"{name}_packed": torch.from_numpy(packing.dense(codes.numpy(), bits)),
        f"{name}_scale": scale,
        f"{name}_shape": torch.tensor([rows, cols]),
    }


def quantize(folder: Path, name: str, recipe_of: dict[str, str]) -> Path:
    """The model with each matrix as its recipe stores it; config.json says what compressed-tensors' readers need."""
    tensors = load_file(folder / "original/model.safetensors")
    groups: dict[tuple[int, int], list[str]] = {}
    written: dict[str, Tensor] = {}
    for key, weight in tensors.items():
        if key in recipe_of:
            written |= stored_as(recipe_of[key], key, weight)
            if recipe_of[key] in INT:
                groups.setdefault(INT[recipe_of[key]], []).append(key.removesuffix(".weight"))
        else:
            written[key] = weight
    path = folder / name
    path.mkdir(exist_ok=True)
    save_file(written, path / "model.safetensors")
    config = json.loads((folder / "original/config.json").read_text())
    if groups:
        config["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {
                f"group_{n}": {
                    "targets": targets,
                    "weights": {"num_bits": bits, "group_size": group, "strategy": "group", "symmetric": True,
                                "type": "int"},
                }
                for n, ((bits, group), targets) in enumerate(groups.items())
            },
        }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    return path


def main() -> None:
    """Train, quantize, evaluate, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path(".bench-evaluate"))
    folder = parser.parse_args().folder
    if not (folder / "original/model.safetensors").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        train(folder)
    names = [
        key for key, value in load_file(folder / "original/model.safetensors").items()
        if value.dim() == 2 and "layers." in key
    ]  # fmt: skip
    chosen = random.Random(SEED)
    assignments = {recipe: dict.fromkeys(names, recipe) for recipe in RECIPES}
    assignments |= {f"mix_{n}": {name: chosen.choice(RECIPES[2:]) for name in names} for n in range(MIXES)}
    paths = [quantize(folder, name, recipe_of) for name, recipe_of in assignments.items()]
    started = time.monotonic()
    found = quanterr.evaluate(
        folder / "original", paths, text=folder / "held_out.txt", chunks=CHUNKS, sensitivity=folder / "sensitivity.json"
    )
    seconds = time.monotonic() - started
    found.save(folder / "evaluation.json")
    alphas = {
        row["layer_name"]: row["alpha"] for row in json.loads((folder / "sensitivity.json").read_text())["weights"]
    }
    rows = [row_of(folder, path, candidate, alphas) for path, candidate in zip(paths, found.candidates, strict=True)]
    show(found, rows, seconds)


def row_of(folder: Path, path: Path, candidate: Any, alphas: dict[str, float]) -> dict[str, Any]:
    """What is known of one model."""
    report = quanterr.compare(folder / "original", path, layers=["layers."], device="cpu")
    nmse = {layer.layer_name: layer.nmse for layer in report.layers}
    outputs = [w.output_error for w in candidate.weights if w.layer_name in nmse]
    return {
        "name": candidate.name,
        "bits": report.aggregate.bits_per_weight,
        "snr_db": report.aggregate.overall_snr_db,
        "nmse": sum(nmse.values()),
        "output": sum(outputs) / len(outputs),
        "predicted": candidate.predicted_kld,
        "alpha": sum(alphas[name] * value for name, value in nmse.items()),
        "kld": candidate.scores.kld_mean,
        "kld_se": candidate.scores.kld_mean_chunk_se,
        "ppl": candidate.scores.ppl,
        "top1": candidate.scores.top1,
    }


def show(found: Any, rows: list[dict[str, Any]], seconds: float) -> None:
    """The table in Markdown, and the rank correlations."""
    base = found.candidates[0].scores
    print(
        f"PPL of the original {base.ppl_original:.3f} ± {base.ppl_original_se:.2f}; {base.tokens:,} predictions scored"
    )
    print()
    print("| recipe | bits | weight SNR dB | output error | KLD | predicted KLD | PPL | same top |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows[: len(RECIPES)]:
        cells = (
            row["name"],
            f"{row['bits']:.2f}",
            f"{row['snr_db']:.2f}",
            f"{row['output']:.3g}",
            f"{row['kld']:.5f} ± {row['kld_se']:.1g}",
            f"{row['predicted']:.5f}",
            f"{row['ppl']:.3f}",
            f"{100 * row['top1']:.1f} %",
        )
        print(f"| {' | '.join(cells)} |")
    print()
    for title, part in ((f"{len(RECIPES)} recipes", rows[: len(RECIPES)]), (f"{MIXES} mixes", rows[len(RECIPES) :])):
        kld = torch.tensor([row["kld"] for row in part])
        values = {key: torch.tensor([row[key] for row in part]) for key in ("nmse", "output", "alpha", "predicted")}
        told = ", ".join(f"{key} {spearman(value, kld):.3f}" for key, value in values.items())
        print(f"Spearman with the measured KLD over {title}: {told}")
    print(f"{len(rows)} candidates with the sensitivity in {seconds:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
