"""Findings about files: notes from opening them, and unread files."""

import os
from collections.abc import Iterator
from pathlib import Path

from quanterr.checkpoints import Checkpoint
from quanterr.checkpoints.base import RECIPE
from quanterr.documents.base import Finding
from quanterr.findings.checks import EACH, HEADERS, check
from quanterr.findings.codes import make_finding
from quanterr.findings.contents import Contents
from quanterr.util.text import count, display, itemize

NOTE = "nonstandard_file"
LEFT_UNQUANTIZED = "left_unquantized"
UNREAD_WEIGHTS, FALLBACK = "unread_weights", "fallback_recipe"
MAX_NOTES = 20


@check(NOTE, LEFT_UNQUANTIZED, FALLBACK, needs=HEADERS, of=EACH)
def check_notes(contents: Contents) -> Iterator[Finding]:
    """Report the notes about a checkpoint's files, or about a recipe."""
    yield from report_notes(contents.checkpoint)


def report_notes(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Report the notes made when the files were opened.

    A recipe's notes name the weights that it cannot store. Weights that its fallback recipe stores are reported too.
    """
    code = LEFT_UNQUANTIZED if checkpoint.kind == RECIPE else NOTE
    for note in checkpoint.notes[:MAX_NOTES]:
        yield make_finding(code, "warning", None, note)
    if more := checkpoint.notes[MAX_NOTES:]:
        yield make_finding(NOTE, "warning", None, f"{display(checkpoint.path)}: {count(len(more), 'more note')}")
    if checkpoint.kind == RECIPE:
        yield from _report_fallbacks(checkpoint)


def _report_fallbacks(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Report the weights that a recipe's fallback stores, with one finding for each recipe and fallback."""
    from quanterr.recipes.quantized_file import QuantizedFile  # a comparison of files needs no recipes

    files = (entry.file for entry in checkpoint.entries.values())
    fallen: dict[tuple[str, str], list[QuantizedFile]] = {}
    for file in (file for file in files if isinstance(file, QuantizedFile) and file.fell_back):
        fallen.setdefault((file.wanted.name, file.recipe.name), []).append(file)
    for (wanted, stored), fallbacks in fallen.items():
        names = itemize([file.weight for file in fallbacks], 3)
        columns = " or ".join(f"{n:,}" for n in sorted({file.source.cols for file in fallbacks}))
        verb = "is" if len(fallbacks) == 1 else "are"
        message = (
            f"{wanted}: {count(len(fallbacks), 'weight')} {verb} stored as {stored}, as llama-quantize does: {names} "
            f"({columns} columns do not fill blocks of {wanted})"
        )
        yield make_finding(FALLBACK, "info", None, message)


@check(UNREAD_WEIGHTS, needs=HEADERS, of=EACH)
def check_unread(contents: Contents) -> Iterator[Finding]:
    """Report weight files in the folder that were not read, unless the other side reads them.

    A file that stores the same tensors with other shapes or sizes belongs to another model.
    """
    checkpoint, other = contents.checkpoint, contents.other
    read = {_resolve(file.path) for file in other.files} if other else set()
    unread = [
        file for file in checkpoint.unread if checkpoint.folder and _resolve(checkpoint.folder / file.name) not in read
    ]
    if not unread:
        return
    where = display(checkpoint.path)
    for file in (file for file in unread if file.differing):
        message = (
            f"{where}: {display(file.name)}, which was not read, stores {count(len(file.differing), 'tensor')} of the "
            f"same name with another shape or size: {itemize(list(file.differing), 3)}"
        )
        remedy = "remove the file, or compare it by its own path: some runtimes read it instead of the others"
        yield make_finding(UNREAD_WEIGHTS, "warning", None, message, remedy, files=[file.name])
    if others := [file.name for file in unread if not file.differing]:
        message = f"{where}: weight files in the same folder were not read: {itemize(others, 3)}"
        remedy = "nothing, if they are for another runtime; otherwise a quantizer may have left them unchanged"
        yield make_finding(UNREAD_WEIGHTS, "info", None, message, remedy, files=others)


def _resolve(place: object) -> str:
    """Return one name for a file, whichever links lead to it; for a file in a store its address."""
    return os.path.realpath(place) if isinstance(place, Path) else str(place)
