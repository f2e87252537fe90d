"""Findings about files: notes from opening them, unread files, and codes that contradict config.json."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from quanterr.checkpoints import Checkpoint
from quanterr.checkpoints.base import RECIPE
from quanterr.documents.base import Finding
from quanterr.findings.codes import make_finding
from quanterr.util.strict_json import JsonFields
from quanterr.util.text import count, display, listed

NOTE = "nonstandard_file"
LEFT = "left_unquantized"
UNREAD, FALLBACK = "unread_weights", "fallback_recipe"
MAX_NOTES = 20

BITS = ("bits", "w_bit", "num_bits")  # keys of a quantization_config, or of the weights of one of its groups
METHODS = {"fp8": 8, "fbgemm_fp8": 8}  # quant_method → bits of a code
OF_BYTES = ("int-quantized", "naive-quantized")  # formats of compressed-tensors with a byte per code, whatever the bits
LOADED = {"load_in_4bit": 4, "load_in_8bit": 8}


def report_notes(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Report the notes made when the files were opened.

    A recipe's notes name the weights that it cannot store; weights that its fallback stores are reported too.
    """
    code = LEFT if checkpoint.kind == RECIPE else NOTE
    for note in checkpoint.notes[:MAX_NOTES]:
        yield make_finding(code, "warning", None, note)
    if more := checkpoint.notes[MAX_NOTES:]:
        yield make_finding(NOTE, "warning", None, f"{display(checkpoint.path)}: {count(len(more), 'more note')}")
    if checkpoint.kind == RECIPE:
        yield from _report_fallbacks(checkpoint)


def _report_fallbacks(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Report each recipe of a virtual checkpoint that stores weights by its fallback."""
    from quanterr.recipes.quantized_file import QuantizedFile  # a comparison of files needs no recipes

    files = (entry.file for entry in checkpoint.entries.values())
    fallen: dict[tuple[str, str], list[QuantizedFile]] = {}
    for file in (file for file in files if isinstance(file, QuantizedFile) and file.fell_back):
        fallen.setdefault((file.wanted.name, file.recipe.name), []).append(file)
    for (wanted, stored), own in fallen.items():
        names = listed([file.weight for file in own], 3)
        columns = " or ".join(f"{n:,}" for n in sorted({file.source.cols for file in own}))
        verb = "is" if len(own) == 1 else "are"
        message = (
            f"{wanted}: {count(len(own), 'weight')} {verb} stored as {stored}, as llama-quantize does: {names} "
            f"({columns} columns do not fill blocks of {wanted})"
        )
        yield make_finding(FALLBACK, "info", None, message)


def report_unread(checkpoint: Checkpoint, other: Checkpoint | None = None) -> Iterator[Finding]:
    """Report weight files in the folder that were not read, unless the other side reads them.

    A file that stores the same tensors with other shapes or sizes belongs to another model.
    """
    where, read = display(checkpoint.path), {_resolve(file.path) for file in other.files} if other else set()
    unread = [
        one for one in checkpoint.unread if checkpoint.folder and _resolve(checkpoint.folder / one.name) not in read
    ]
    for file in (one for one in unread if one.differing):
        message = (
            f"{where}: {display(file.name)}, which was not read, stores {count(len(file.differing), 'tensor')} of the "
            f"same name with another shape or size: {listed(list(file.differing), 3)}"
        )
        remedy = "remove the file, or compare it by its own path: some runtimes read it instead of the others"
        yield make_finding(UNREAD, "warning", None, message, remedy, files=[file.name])
    if others := [one.name for one in unread if not one.differing]:
        message = f"{where}: weight files in the same folder were not read: {listed(others, 3)}"
        remedy = "nothing, if they are for another runtime; otherwise a quantizer may have left them unchanged"
        yield make_finding(UNREAD, "info", None, message, remedy, files=others)


def _resolve(place: object) -> str:
    """Return one name for a file, whichever links lead to it; for a file in a store its address."""
    return os.path.realpath(place) if isinstance(place, Path) else str(place)


def check_declared_bits(config: JsonFields, code_bits: Iterable[int | None]) -> Iterator[Finding]:
    """Report declared bit widths that no stored weight has."""
    declared = _declared_bits(config)
    stored = {bits for bits in code_bits if bits}
    if declared and stored and not declared & stored:
        message = (
            f"config.json declares codes of {_format_bits(declared)}, but the tensors hold codes of "
            f"{_format_bits(stored)}: read as stored"
        )
        remedy = "check that config.json belongs to this model; loaders that follow it will misread the weights"
        yield make_finding("config_mismatch", "warning", None, message, remedy)


def _declared_bits(config: JsonFields) -> set[int]:
    """Return the bits per code that a quantization_config declares."""
    groups = config.get("config_groups")
    places = [config, *(groups.values() if isinstance(groups, dict) else ())]
    places += [place.get("weights") for place in places if isinstance(place, dict)]
    declared = [place.get(key) for place in places if isinstance(place, dict) for key in BITS]
    declared += [METHODS.get(str(config.get("quant_method")))]
    declared += [8 for place in places if isinstance(place, dict) and place.get("format") in OF_BYTES]
    declared += [bits for key, bits in LOADED.items() if config.get(key) is True]
    return {bits for bits in declared if isinstance(bits, int) and not isinstance(bits, bool)}


def _format_bits(found: set[int]) -> str:
    """Format bit widths for a message: ``4 or 8 bits``."""
    return f"{' or '.join(map(str, sorted(found)))} bits"
