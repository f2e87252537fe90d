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

Exit status 1 if anything is WRONG. Writes the table of the guide (quanterr/guide/producers.md) if all producers ran.
"""

import argparse
import json
import subprocess
import sys
import venv
from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from support.making import dequantized, planned  # noqa: E402  # tests/support/making.py
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
}
MODELS = (HUB, "diffusers")
CLOSE = 2e-6  # largest norm of the difference, relative to the values' norm
AS_NEAR = 1.1  # times the error
OUTCOMES = ("right", "undone", "noted", "refused", "WRONG", "not made")
UNDONE = "scales folded into"
TABLE = HERE.parent.parent / "quanterr" / "guide" / "producers.md"
MARK = "<!-- producers: made by tests/producers/run.py -->", "<!-- /producers -->"


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


def judged(original: Path, quantized: Path, simulated: bool) -> tuple[str, str]:
    """Return the outcome of a quantized model, and the reason for it.

    If its values are ``simulated``, those before writing, a value that is as near to the original may differ.
    """
    expected = load_file(f"{quantized}.reference.safetensors")
    try:
        report = quanterr.compare(original, quantized, device="cpu")
    except QuanterrError as error:
        return "refused", str(error)
    wrong, unheld, undone = [], 0, False
    with planned(original, quantized) as plan:
        for pair in plan.pairs:
            if any(UNDONE in text for text in pair.quantized.evidence):
                undone = True
            elif pair.quantized.has_codes and pair.name not in expected:
                unheld += 1
            elif pair.quantized.has_codes:
                y, truth = dequantized(pair.quantized).float(), expected[pair.name]
                apart = min(_apart(y, one.reshape(y.shape)) for one in (truth, truth.mT) if one.numel() == y.numel())
                x = dequantized(pair.original).float()
                as_near = simulated and x.shape == truth.shape and _apart(y, x) <= AS_NEAR * _apart(truth, x)
                if not apart <= CLOSE and not as_near:
                    wrong.append(f"{pair.name} as {pair.quantized.format}: {apart:.2g}")
    if wrong:
        return "WRONG", f"{len(wrong)} weights, {wrong[0]}"
    if report.not_compared:
        return "refused", report.reasons[0]
    noted = [finding for finding in report.findings if finding.severity != "info"]
    if noted or report.verdict != "pass":
        return "noted", "; ".join(dict.fromkeys(f"{one.severity} {one.code}" for one in noted)) or report.reasons[0]
    return ("undone" if undone else "right"), f"{unheld} weights without a reference" if unheld else ""


def _apart(y: Tensor, truth: Tensor) -> float:
    """Return the relative error of values against the producer's, which some libraries round to 16 bits."""
    if torch.equal(y.isnan(), truth.isnan()):
        y, truth = y.nan_to_num(), truth.nan_to_num()
    rounded = (y, y.bfloat16().float(), y.half().float())
    return min(float((one - truth).norm() / truth.norm().clamp(min=1e-30)) for one in rounded)


def outcomes(producer: str, models: Path, out: Path) -> tuple[str, list[Outcome]]:
    """Return the producer's name and version, and the outcomes of all models and settings that its script made."""
    done = json.loads((out / "results.json").read_text())
    found = []
    for made in done["made"]:
        model, setting = made["model"], made["setting"]
        kind, why = (
            ("not made", made["error"])
            if made["error"]
            else judged(models / model, out / model / setting, done["simulated"])
        )
        found.append(Outcome(model, setting, kind, why))
        if kind not in ("right", "not made"):
            print(f"{kind:8} {producer}, {model}, {setting}: {why[:200]}", flush=True)
    return f"{done['producer']} {done['version']}", found


def table(found: dict[str, list[Outcome]]) -> str:
    """Count outcomes by producer and setting, and name the models with wrong values.

    Settings of a producer with the same outcomes share a row.
    """
    rows: dict[tuple[str, str], list[str]] = defaultdict(list)
    for producer, of_producer in found.items():
        by_setting = defaultdict(list)
        for one in of_producer:
            by_setting[one.setting].append(one)
        for setting, ones in by_setting.items():
            counts = Counter(one.kind for one in ones)
            cells = [str(counts[kind] or "") for kind in OUTCOMES]
            rows[producer, f"{' | '.join(cells)} | {_why(ones)}"].append(setting)
    lines = ["| producer | setting | " + " | ".join(OUTCOMES) + " | what |", "|---|---|" + "---|" * (len(OUTCOMES) + 1)]
    lines += [f"| {producer} | {'; '.join(settings)} | {cells} |" for (producer, cells), settings in rows.items()]
    return "\n".join(lines)


def _why(ones: list[Outcome]) -> str:
    """List the wrong models by what came out instead; only count what a producer cannot make."""
    kinds = defaultdict(list)
    for one in ones:
        if one.kind not in ("right", "undone", "not made") and one.why:
            kinds[one.kind, one.why.split(":")[0][:60] if one.kind != "noted" else one.why[:60]].append(one.model)
    return "; ".join(f"{kind}: {', '.join(models)} ({why})" for (kind, why), models in kinds.items()).replace("|", "/")


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
    found = {}
    for producer in arguments.producers or PRODUCERS:
        out = folder / producer
        if not (arguments.keep and (out / "results.json").exists()):
            out.mkdir(parents=True, exist_ok=True)
            python = environment(folder / f"env-{producer}", PRODUCERS[producer])
            log = (out / "log.txt").open("w")
            subprocess.run([python, HERE / f"with_{producer}.py", models, out], stdout=log, stderr=log, check=False)
        if not (out / "results.json").exists():
            sys.exit(f"{producer}: its script failed, see {out / 'log.txt'}")
        version, made = outcomes(producer, models, out)
        found[version] = made
        print(version, dict(Counter(one.kind for one in made)), flush=True)
    if not arguments.producers:
        begin, end = MARK
        text = TABLE.read_text()
        TABLE.write_text(f"{text.partition(begin)[0]}{begin}\n{table(found)}\n{end}{text.partition(end)[2]}")
    return any(one.kind == "WRONG" for made in found.values() for one in made)


if __name__ == "__main__":
    sys.exit(main())
