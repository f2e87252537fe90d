"""Broken pairs, and sound ones, through plans, baselines, reports, journals, evaluations and sweeps."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from support.casting import swap_rows
from support.forked import call

from mutation import files
from mutation.judging import STRUCTURAL, Outcome
from mutation.layouts import find_layout
from mutation.originals import CONFIG, EMBEDDING, VOCABULARY, linear, make_generator, model
from mutation.pairs import Bench, quantize

INT8 = find_layout("INT8 row")
EVALUATE = ("--tokens", "ids.safetensors", "--context", 32, "--chunks", 8)
WARNING_WORDS = ("warning:", "edited", "INCONCLUSIVE")


class Try(NamedTuple):
    """A command, and whether all is well with what it is given."""

    name: str
    words: tuple[Any, ...]
    sound: bool = False
    before: Callable[[Path], object] = lambda folder: None  # changes the folder first


def outcomes(bench: Bench) -> Iterator[Outcome]:
    """Run each command in a folder that it shares with earlier commands."""
    folder = bench.place()
    prepare(folder)
    for attempt in TRIES:
        attempt.before(folder)
        done = call(*attempt.words, cwd=folder)
        is_noticed = done.returncode != 0 or any(word in done.stdout + done.stderr for word in WARNING_WORDS)
        label = ("ERROR" if done.returncode else "WARNED") if attempt.sound else "noticed"
        note = f"exit status {done.returncode}: {(done.stderr or done.stdout).strip()[:200]}"
        silent = "clean" if attempt.sound else "SILENT"
        yield Outcome(
            "commands", attempt.name, label if is_noticed else silent, None if attempt.sound else STRUCTURAL, note=note
        )


def prepare(folder: Path) -> None:
    """Write an original, another model with the same norms, both quantized, broken copies, and tokens."""
    x = model()
    other = {name: weight.roll(1, 0) if linear(name) else weight for name, weight in x.items()}
    folder.mkdir()
    declared = CONFIG | {"quantization_config": INT8.config}
    for name, tensors in {"original": x, "other": other}.items():
        files.write(folder / name, tensors, CONFIG)
        files.write(folder / f"{name}-int8", quantize(INT8, tensors), declared)
    sound = folder / "original-int8"
    files.write(folder / "embedding", {EMBEDDING: swap_rows(x[EMBEDDING])}, declared, sound)
    files.write(folder / "rope", {}, declared | {"rope_theta": 1e4}, sound)
    shutil.copytree(sound, folder / "copy")
    save_file({"ids": torch.randint(VOCABULARY, (1024,), generator=make_generator(5))}, folder / "ids.safetensors")


def replace_file(folder: Path) -> None:
    """Replace a file of the copy by one of the same size and times, with another scale."""
    path = next((folder / "copy").glob("*.down_proj.weight.safetensors"))
    raw, status = bytearray(path.read_bytes()), path.stat()
    raw[-1] ^= 1
    path.unlink()
    path.write_bytes(raw)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def edit_document(name: str, before: str, after: str) -> Callable[[Path], None]:
    """Return a change that edits a stored document."""

    def edit(folder: Path) -> None:
        text = (folder / f"{name}.json").read_text()
        assert before in text
        (folder / f"{name}-edited.json").write_text(text.replace(before, after, 1))

    return edit


def _compare(what: str, *words: Any) -> tuple[Any, ...]:
    """Return the words of a comparison with the original from which ``what`` was quantized."""
    return ("compare", "other" if what.startswith("other") else "original", what, *words)


GATE = ("--require", "kld_mean <= 1")
TRIES = (
    Try("plan", ("plan", "original", "--bits", "8.2", "--to", "int8_row", "-o", "plan.json"), sound=True),
    Try("planned", _compare("original-int8", "--plan", "plan.json"), sound=True),
    Try("planned, another original", _compare("other-int8", "--plan", "plan.json")),
    Try("planned, another embedding", _compare("embedding", "--plan", "plan.json")),
    Try("planned, a part of it", _compare("original-int8", "--plan", "plan.json", "-l", "attn")),
    Try(
        "planned, edited",
        _compare("original-int8", "--plan", "plan-edited.json"),
        before=edit_document("plan", '"snr_db":', '"snr_db": 1e-1, "was":'),
    ),
    Try("report", _compare("original-int8", "-o", "report.json"), sound=True),
    Try(
        "report, edited",
        ("gate", "report-edited.json", "--require", "snr_db >= 1"),
        before=edit_document("report", "int8_row", "fp8_row"),
    ),
    Try("baseline", _compare("original-int8", "--baseline", "report.json"), sound=True),
    Try("baseline of another original", _compare("other-int8", "--baseline", "report.json")),
    Try("report of another original", _compare("other-int8", "-o", "other.json"), sound=True),
    Try("diff", ("diff", "report.json", "report.json"), sound=True),
    Try("diff of two originals", ("diff", "report.json", "other.json")),
    Try("journal", _compare("copy", "--resume", "journal"), sound=True),
    Try("journal again", _compare("copy", "--resume", "journal"), sound=True),
    Try("journal, a file replaced", _compare("copy", "--resume", "journal"), before=replace_file),
    Try("evaluate", ("evaluate", "original", "original-int8", *EVALUATE, "-o", "evaluation.json"), sound=True),
    Try("evaluate, another rope_theta", ("evaluate", "original", "rope", *EVALUATE)),
    Try("evaluate, the original itself", ("evaluate", "original", "original", *EVALUATE, *GATE)),
    Try("evaluate, gate", ("gate", "evaluation.json", *GATE), sound=True),
    Try(
        "evaluate, edited",
        ("gate", "evaluation-edited.json", *GATE),
        before=edit_document("evaluation", '"kld_mean":', '"kld_mean": 0.0, "was":'),
    ),
    Try("sweep", ("sweep", "original", "--to", "fp8_row,int8_row,int4_g128,nvfp4,nf4,gguf_q4_k"), sound=True),
)
