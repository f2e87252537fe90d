"""Quantizes small models with the programs that people use, and compares their values with quanterr's.

    python tests/producers/run.py [--folder .producers] [--keep] [PRODUCER ...]        make producers

Each producer gets an environment of its own, in which its script writes quantized models and the values that its own
library dequantizes. Of each of them quanterr's values and its verdict are looked at here:

    right      all values agree, no warning and no error
    undone     the same, apart from weights whose folded scales quanterr undoes and reports
    noted      all values agree, with a warning or an error, which is listed
    refused    something is not compared, which is listed; what is compared agrees
    WRONG      a value differs
    not made   the producer itself cannot

One model is also written with modules left out and, where the producer can, modules of other bits; and its weights with
configurations of the same producer that are wrong about one module (DECLARATIONS of common.py):

    silent     no warning and no error about the right file, and all values agree
    named      a warning or an error names the module about which the configuration is wrong
    ALARM      a warning or an error about the right file
    SILENT     the module is not named

Exit status 1 if anything is in capitals. Writes the tables of the guide (quanterr/guide/producers.md) if all ran.
"""

import argparse
import json
import shutil
import subprocess
import sys
import venv
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import torch  # noqa: E402
from common import DECLARATIONS, MIXED, ONE, PROGRESS, RESULTS  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from support.making import open_pairing, read_whole  # noqa: E402  # tests/support/making.py
from torch import Tensor  # noqa: E402

import quanterr  # noqa: E402
from quanterr.errors import QuanterrError  # noqa: E402

TORCH = "torch==2.13.0"
HUB = "transformers==5.23.0"
PRODUCERS = {  # name of the script → what it needs
    "sdnq": ("sdnq==0.2.8", HUB, "accelerate", "diffusers"),
    "quark": ("amd-quark==0.13", HUB, "accelerate"),
    "llmcompressor": ("llmcompressor==0.14.0.1",),
    "autoround": ("auto-round==0.16.1", "compressed-tensors"),
    "modelopt": ("nvidia-modelopt==0.47.0", HUB, "accelerate", "requests"),
    "torchao": ("torchao==0.18.0", HUB, "accelerate"),
    "quanto": ("optimum-quanto==0.2.7", HUB, "accelerate", "diffusers"),
    "mlx": ("mlx[cpu]==0.32.4", "mlx-lm==0.32.2", HUB),
    "hqq": ("hqq==0.2.8.post1", HUB, "accelerate"),
    "bitsandbytes": ("bitsandbytes==0.50.2", HUB, "accelerate"),
    "transformers": (HUB, "accelerate"),
    "gptqmodel": ("gptqmodel==7.7.0",),
    "autoawq": ("autoawq==0.2.9", "transformers==4.51.3", "accelerate==1.6.0", "datasets==3.6.0"),
}
MODELS = (HUB, "diffusers")
MAX_DIFFERENCE = 2e-6  # largest norm of the difference, relative to the values' norm
AS_NEAR = 1.1  # the largest error of a value, relative to the error of the producer's own
OUTCOMES = ("right", "undone", "noted", "refused", "WRONG", "not made")
UNDONE = "scales folded into"
TABLE = HERE.parent.parent / "quanterr" / "guide" / "producers.md"
EXPLANATION = """\
A small Llama is also written with `lm_head` and one other module left out, in each program's own way, and once more
with one module of other bits, where the program can. Other configurations of the same program are then put beside the
same weights:

- one more excluded: a module that is quantized; `named` if a warning or an error names it
- one less excluded: a module that is not quantized; `named` if a warning or an error names it
- the bits of the others: given to the module that has other bits; `named` if a warning or an error names it

The right configuration must be `silent`: no warning and no error. `ALARM` and `SILENT` are faults of quanterr."""
# Suffixes of ONE and MIXED in the names of settings
KINDS_OF_CONFIGURATION = ("", ": one more", ": one less", ": bits of the others")


class Outcome(NamedTuple):
    """The outcome of one model in one setting."""

    model: str
    setting: str
    kind: str
    why: str = ""


def environment(folder: Path, needs: tuple[str, ...]) -> Path:
    """Return the Python of an environment with these packages, and make it if it is missing."""
    python = folder / "bin" / "python"
    if not (folder / "made").exists():
        venv.create(folder, with_pip=True, clear=True)
        for packages in ((TORCH,), needs):
            subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
        (folder / "made").touch()
    return python


def make_models(command: Sequence[str | Path], out: Path) -> None:
    """Run a producer's script, and again after each setting that ends its process, until it has tried all."""
    tried = -1
    with (out / "log.txt").open("w") as log:
        while not (out / RESULTS).exists() and tried < (tried := _count_tried(out)):
            # In its own folder, because HQQ makes another one of each word of a name with spaces.
            subprocess.run(command, stdout=log, stderr=log, cwd=out, check=False)


def _count_tried(out: Path) -> int:
    progress = out / PROGRESS
    return len(json.loads(progress.read_text())) if progress.exists() else 0


def judge_declaration(original: Path, quantized: Path, simulated: bool, about: str) -> tuple[str, str]:
    """Return the outcome of a quantized model whose configuration is right, or wrong ``about`` a module."""
    if not about:
        outcome, why = judge(original, quantized, simulated)
        return {"right": "silent", "undone": "silent", "WRONG": "WRONG"}.get(outcome, "ALARM"), why
    try:
        report = quanterr.compare(original, quantized, device="cpu")
    except QuanterrError as error:
        messages = [str(error)]
    else:
        messages = [
            f"{finding.layer} {finding.message}" for finding in report.findings if finding.severity != "info"
        ] + report.reasons
    short = ".".join(about.split(".")[-2:])  # some programs exclude by this name, in all blocks
    return ("named", "") if any(short in text for text in messages) else ("SILENT", f"{about} is not named")


def judge(original: Path, quantized: Path, simulated: bool) -> tuple[str, str]:
    """Return the outcome of a quantized model, and the reason for it.

    If its values are ``simulated``, those before writing, a value that is as near to the original may differ.
    """
    expected = load_file(f"{quantized}.reference.safetensors")
    try:
        report = quanterr.compare(original, quantized, device="cpu")
    except QuanterrError as error:
        return "refused", str(error)
    wrong, unheld, undone = [], 0, False
    with open_pairing(original, quantized) as plan:
        for pair in plan.pairs:
            if any(UNDONE in text for text in pair.quantized.evidence):
                undone = True
            elif pair.quantized.has_codes and pair.name not in expected:
                unheld += 1
            elif pair.quantized.has_codes:
                y, truth = read_whole(pair.quantized).float(), expected[pair.name]
                apart = min(
                    _apart(y, orientation.reshape(y.shape))
                    for orientation in (truth, truth.mT)
                    if orientation.numel() == y.numel()
                )
                x = read_whole(pair.original).float()
                as_near = simulated and x.shape == truth.shape and _apart(y, x) <= AS_NEAR * _apart(truth, x)
                if not apart <= MAX_DIFFERENCE and not as_near:
                    wrong.append(f"{pair.name} as {pair.quantized.format}: {apart:.2g}")
    if wrong:
        return "WRONG", f"{len(wrong)} weights, {wrong[0]}"
    if report.not_compared:
        return "refused", report.reasons[0]
    noted = [finding for finding in report.findings if finding.severity != "info"]
    if noted or report.verdict != "pass":
        return "noted", "; ".join(
            dict.fromkeys(f"{finding.severity} {finding.code}" for finding in noted)
        ) or report.reasons[0]
    return ("undone" if undone else "right"), f"{unheld} weights without a reference" if unheld else ""


def _apart(y: Tensor, truth: Tensor) -> float:
    """Return the relative error of values against the producer's, which some libraries round to 16 bits."""
    if torch.equal(y.isnan(), truth.isnan()):
        y, truth = y.nan_to_num(), truth.nan_to_num()
    rounded = (y, y.bfloat16().float(), y.half().float())
    return min(float((tensor - truth).norm() / truth.norm().clamp(min=1e-30)) for tensor in rounded)


def outcomes(producer: str, models: Path, out: Path) -> tuple[str, list[Outcome]]:
    """Return the producer's name and version, and the outcomes of all models and settings that its script made."""
    done = json.loads((out / RESULTS).read_text())
    outcomes_found = []
    for made in done["made"]:
        model, setting = made["model"], made["setting"]
        sides = models / model, out / model / setting
        if made["error"]:
            outcome, why = "not made", made["error"]
        elif setting in DECLARATIONS:
            outcome, why = judge_declaration(*sides, done["simulated"], DECLARATIONS[setting].about)
        else:
            outcome, why = judge(*sides, done["simulated"])
        outcomes_found.append(Outcome(model, setting, outcome, why))
        if outcome not in ("right", "silent", "named", "not made"):
            print(f"{outcome:8} {producer}, {model}, {setting}: {why[:200]}", flush=True)
    return f"{done['producer']} {done['version']}", outcomes_found


def table(outcomes: dict[str, list[Outcome]]) -> str:
    """Count outcomes by producer and setting, and name the models with wrong values.

    Settings of a producer with the same outcomes share a row.
    """
    rows: dict[tuple[str, str], list[str]] = defaultdict(list)
    for producer, of_producer in outcomes.items():
        by_setting = defaultdict(list)
        for outcome in of_producer:
            if outcome.setting not in DECLARATIONS:
                by_setting[outcome.setting].append(outcome)
        for setting, ones in by_setting.items():
            counts = Counter(outcome.kind for outcome in ones)
            cells = [str(counts[outcome] or "") for outcome in OUTCOMES]
            rows[producer, f"{' | '.join(cells)} | {_why(ones)}"].append(setting)
    lines = ["| producer | setting | " + " | ".join(OUTCOMES) + " | what |", "|---|---|" + "---|" * (len(OUTCOMES) + 1)]
    lines += [f"| {producer} | {'; '.join(settings)} | {cells} |" for (producer, cells), settings in rows.items()]
    return "\n".join(lines)


def table_of_declarations(outcomes: dict[str, list[Outcome]]) -> str:
    """List what was said of each configuration, a row for each producer, and another if it mixes bits."""
    lines = [EXPLANATION, ""]
    lines.append("| producer | modules | right | one more excluded | one less excluded | the bits of the others |")
    lines.append("|---|---|---|---|---|---|")
    for producer, of_producer in outcomes.items():
        kinds = {outcome.setting: outcome.kind for outcome in of_producer}
        for base in (ONE, MIXED):
            if base in kinds:
                cells = [kinds.get(f"{base}{ending}", "") for ending in KINDS_OF_CONFIGURATION]
                lines.append(f"| {producer} | {base} | {' | '.join(cells)} |")
    return "\n".join(lines)


def write_tables(tables: dict[str, str]) -> None:
    """Replace what stands between the marks of each table in the guide."""
    text = TABLE.read_text()
    for name, made in tables.items():
        begin, end = f"<!-- {name}: made by tests/producers/run.py -->", f"<!-- /{name} -->"
        text = f"{text.partition(begin)[0]}{begin}\n{made}\n{end}{text.partition(end)[2]}"
    TABLE.write_text(text)


def _why(ones: list[Outcome]) -> str:
    """List the wrong models by what came out instead; only count what a producer cannot make."""
    kinds = defaultdict(list)
    for outcome in ones:
        if outcome.kind not in ("right", "undone", "not made") and outcome.why:
            kinds[outcome.kind, outcome.why.split(":")[0][:60] if outcome.kind != "noted" else outcome.why].append(
                outcome.model
            )
    return "; ".join(f"{outcome}: {', '.join(models)} ({why})" for (outcome, why), models in kinds.items()).replace(
        "|", "/"
    )


def main() -> int:
    """Run the producers that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("producers", nargs="*", choices=[[], *PRODUCERS], metavar="PRODUCER")
    parser.add_argument("--folder", type=Path, default=Path(".producers"))
    parser.add_argument("--keep", action="store_true", help="judge what was made before, where it is there")
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    models = folder / "models"
    subprocess.run([environment(folder / "env-models", MODELS), HERE / "models.py", models], check=True)
    outcomes_by_producer = {}
    for producer in arguments.producers or PRODUCERS:
        out = folder / producer
        if not (arguments.keep and (out / RESULTS).exists()):
            shutil.rmtree(out, ignore_errors=True)
            out.mkdir(parents=True)
            python = environment(folder / f"env-{producer}", PRODUCERS[producer])
            make_models([python, HERE / f"with_{producer}.py", models, out], out)
        if not (out / RESULTS).exists():
            sys.exit(f"{producer}: its script failed, see {out / 'log.txt'}")
        version, made = outcomes(producer, models, out)
        outcomes_by_producer[version] = made
        print(version, dict(Counter(outcome.kind for outcome in made)), flush=True)
    if not arguments.producers:
        write_tables(
            {"producers": table(outcomes_by_producer), "declarations": table_of_declarations(outcomes_by_producer)}
        )
    return any(
        outcome.kind in ("WRONG", "ALARM", "SILENT") for made in outcomes_by_producer.values() for outcome in made
    )


if __name__ == "__main__":
    sys.exit(main())
