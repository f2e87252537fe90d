"""A small Llama that is trained here, quantized in many ways: weight error, output error, divergence, prediction.

python tests/bench/evaluate.py [FOLDER] [--chunks N] [--mixes N]
                                            ten minutes on two cores; prints the table of the guide's page numbers

The model (3 M parameters) learns from the text of Python's standard library; tokens that it has not seen are scored.
Eight recipes quantize all matrices of its blocks, and a few more models take each matrix from a recipe at random.
"""

import json
import random
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import quanterr
from quanterr.checkpoints import Checkpoint
from quanterr.evaluation.measures.embeddings import spearman
from quanterr.recipes import parse_recipe
from quanterr.recipes.quantized_file import mix_recipes

sys.path.insert(0, str(Path(__file__).parent))

from plans import show_plans
from trained import run

VOCABULARY, LENGTH, BATCH, STEPS = 2048, 256, 12, 700
COLUMNS = (
    *("recipe", "bits", "weight SNR dB", "output error", "KLD", "predicted KLD", "predicted ÷ measured", "PPL"),
    "same top token",
)
HELD_OUT = 0.1  # share of the text
SEED = 0
RECIPES = ("fp8_tensor", "fp8_row", "int8_g64", "int6_g64", "int5_g32", "int4_g32", "int4_g64", "int3_g32")
PLANNED = ("int2_g32", "int3_g64", "int3_g32", "int4_g64", "int4_g32", "int5_g64", "int6_g64", "int8_g64")
BUDGETS = (3.6, 4.1, 4.6, 5.1, 6.1)  # bits per weight of the matrices in blocks


def read_sources() -> str:
    """Return the standard library's own sources, in the order of their names."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return "\n".join(path.read_text(encoding="utf-8", errors="ignore") for path in paths)


def train(folder: Path) -> None:
    """Train a tokenizer and a model, and write a text that the model has not seen."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(SEED)
    whole = read_sources()
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
    model.train(False).save_pretrained(folder / "original")
    tokenizer.save(str(folder / "original/tokenizer.json"))
    (folder / "original/tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')


def bench(folder: Path, original: Checkpoint, chunks: int, mixes: int) -> None:
    """Print both tables."""
    names = [name for name, entry in original.entries.items() if len(entry.shape) == 2 and "layers." in name]
    chosen = random.Random(SEED)
    assignments = {recipe: dict.fromkeys(names, recipe) for recipe in RECIPES}
    assignments |= {f"mix_{n}": {name: chosen.choice(RECIPES[2:]) for name in names} for n in range(mixes)}
    candidates = [
        mix_recipes(original, {name: parse_recipe(recipe) for name, recipe in recipe_of.items()}, title)[0]
        for title, recipe_of in assignments.items()
    ]
    text = [folder / "held_out.txt"]
    started = time.monotonic()
    sensitivity = folder / "sensitivity.json"
    evaluation = quanterr.evaluate(folder / "original", candidates, text=text, chunks=chunks, sensitivity=sensitivity)
    seconds = time.monotonic() - started
    evaluation.save(folder / "evaluation.json")
    alphas = {row["layer_name"]: row["alpha"] for row in json.loads(sensitivity.read_text())["weights"]}
    rows = [row_of(original, *candidate, alphas) for candidate in zip(candidates, evaluation.candidates, strict=True)]
    show(evaluation, rows, seconds)

    # Recipes that are evaluated with the sensitivity calibrate what plans predict for them.
    quanterr.evaluate(folder / "original", against=PLANNED, text=text, chunks=chunks, sensitivity=sensitivity)

    def measure(plans: Sequence[Checkpoint], uniform: Sequence[str]) -> dict[str, float]:
        evaluation = quanterr.evaluate(folder / "original", plans, against=uniform, text=text, chunks=chunks)
        return {
            candidate.name: candidate.scores.kld_mean
            for candidate in evaluation.candidates
            if candidate.scores is not None
        }

    show_plans(original, sensitivity, PLANNED, BUDGETS, measure, layers=["layers."])


def row_of(original: Checkpoint, made: Checkpoint, candidate: Any, alphas: dict[str, float]) -> dict[str, Any]:
    """Return the predicted and measured numbers of one model."""
    report = quanterr.compare(original, made, layers=["layers."], device="cpu")
    nmse = {layer.layer_name: layer.nmse for layer in report.layers if layer.nmse is not None}
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


def show(result: Any, rows: list[dict[str, Any]], seconds: float) -> None:
    """Print the table in Markdown, and the rank correlations."""
    base = result.candidates[0].scores
    print(
        f"PPL of the original {base.ppl_original:.3f} ± {base.ppl_original_se:.2f}; {base.tokens:,} predictions scored"
    )
    print()
    print(f"| {' | '.join(COLUMNS)} |")
    print(f"|{'---|' * len(COLUMNS)}")
    for row in rows[: len(RECIPES)]:
        cells = (
            row["name"],
            f"{row['bits']:.2f}",
            f"{row['snr_db']:.2f}",
            f"{row['output']:.3g}",
            f"{row['kld']:.5f} ± {row['kld_se']:.1g}",
            f"{row['predicted']:.5f}",
            f"{row['predicted'] / row['kld']:.2f}",
            f"{row['ppl']:.3f}",
            f"{100 * row['top1']:.1f} %",
        )
        print(f"| {' | '.join(cells)} |")
    print()
    for title, part in (
        (f"{len(RECIPES)} recipes", rows[: len(RECIPES)]),
        (f"{len(rows) - len(RECIPES)} mixes", rows[len(RECIPES) :]),
    ):
        kld = torch.tensor([row["kld"] for row in part])
        values = {key: torch.tensor([row[key] for row in part]) for key in ("nmse", "output", "alpha", "predicted")}
        ranked = ", ".join(f"{key} {spearman(value, kld):.3f}" for key, value in values.items())
        ratios = sorted((values["predicted"] / kld).tolist())
        print(f"Spearman with the measured KLD over {title}: {ranked}")
        print(f"predicted ÷ measured over {title}: {ratios[0]:.2f} to {ratios[-1]:.2f}")
    print(f"{len(rows)} candidates with the sensitivity in {seconds:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    run(__doc__ or "", ".bench-evaluate", "original/model.safetensors", train, bench, chunks=12, mixes=16)
