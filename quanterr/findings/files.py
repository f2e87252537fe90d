"""Non-standard files and contradictions of config.json, as findings."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from quanterr.checkpoints import Checkpoint
from quanterr.findings.codes import finding
from quanterr.report.base import Finding
from quanterr.util.strict_json import JsonFields
from quanterr.util.text import count, display, listed

NOTE = "nonstandard_file"
LEFT, RECIPE = "left_unquantized", "recipe"  # a kind of checkpoint
UNREAD, FALLBACK = "unread_weights", "fallback_recipe"
MAX_NOTES = 20

BITS = ("bits", "w_bit", "num_bits")  # keys of a quantization_config, or of the weights of one of its groups
METHODS = {"fp8": 8, "fbgemm_fp8": 8}  # quant_method → bits of a code
OF_BYTES = ("int-quantized", "naive-quantized")  # of compressed-tensors: codes of fewer bits have a byte each, too
LOADED = {"load_in_4bit": 4, "load_in_8bit": 8}


def of_notes(checkpoint: Checkpoint) -> Iterator[Finding]:
    """What was noted when the files were opened; what a recipe cannot store, and what it stores by its fallback."""
    code = LEFT if checkpoint.kind == RECIPE else NOTE
    for note in checkpoint.notes[:MAX_NOTES]:
        yield finding(code, "warning", None, note)
    if more := checkpoint.notes[MAX_NOTES:]:
        yield finding(NOTE, "warning", None, f"{display(checkpoint.path)}: {count(len(more), 'more note')}")
    if checkpoint.kind == RECIPE:
        yield from _of_fallbacks(checkpoint)


def _of_fallbacks(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Return a finding for each recipe of a virtual checkpoint that stores weights by its fallback."""
    from quanterr.recipes.candidate import QuantizedFile  # a comparison of files needs no recipes

    files = (entry.file for entry in checkpoint.entries.values())
    fallen: dict[tuple[str, str], list[QuantizedFile]] = {}
    for file in (file for file in files if isinstance(file, QuantizedFile) and file.fell_back):
        fallen.setdefault((file.wanted.name, file.recipe.name), []).append(file)
    for (wanted, stored), own in fallen.items():
        names, columns = listed([file.weight for file in own], 3), own[0].source.cols
        verb = "is" if len(own) == 1 else "are"
        message = (
            f"{wanted}: {count(len(own), 'weight')} {verb} stored as {stored}, as llama-quantize does: {names} "
            f"({columns:,} columns do not fill its blocks)"
        )
        yield finding(FALLBACK, "info", None, message)


def of_unread(checkpoint: Checkpoint, other: Checkpoint | None = None) -> Iterator[Finding]:
    """Files of weights beside those that were read, and that the other side does not read either.

    One that stores the same tensors otherwise is another model.
    """
    where, read = display(checkpoint.path), {_real(file.path) for file in other.files} if other else set()
    unread = [one for one in checkpoint.unread if checkpoint.folder and _real(checkpoint.folder / one.name) not in read]
    for file in (one for one in unread if one.differing):
        message = (
            f"{where}: {display(file.name)}, which is not read, stores {count(len(file.differing), 'tensor')} of the "
            f"same name in another shape or size: {listed(list(file.differing), 3)}"
        )
        remedy = "remove the file, or compare it by its own path: some runtimes read it in place of the others"
        yield finding(UNREAD, "warning", None, message, remedy, files=[file.name])
    if others := [one.name for one in unread if not one.differing]:
        message = f"{where}: not read, and in the same folder: {listed(others, 3)}"
        remedy = "nothing if it is for another runtime; a quantizer may have left it as it was"
        yield finding(UNREAD, "info", None, message, remedy, files=others)


def _real(place: object) -> str:
    """One name for a file, whatever links lead to it; of a store its address."""
    return os.path.realpath(place) if isinstance(place, Path) else str(place)


def of_config(config: JsonFields, code_bits: Iterable[int | None]) -> Iterator[Finding]:
    """A quantization_config that declares other codes than all those of the weights: these hold."""
    description = _told_bits(config)
    stored = {bits for bits in code_bits if bits}
    if description and stored and not description & stored:
        message = (
            f"config.json declares codes of {_bits(description)}, the tensors hold codes of {_bits(stored)}: "
            "read as stored"
        )
        remedy = "check that config.json belongs to this model; loaders that follow it will misread the weights"
        yield finding("config_mismatch", "warning", None, message, remedy)


def _told_bits(config: JsonFields) -> set[int]:
    groups = config.get("config_groups")
    places = [config, *(groups.values() if isinstance(groups, dict) else ())]
    places += [place.get("weights") for place in places if isinstance(place, dict)]
    description = [place.get(key) for place in places if isinstance(place, dict) for key in BITS]
    description += [METHODS.get(str(config.get("quant_method")))]
    description += [8 for place in places if isinstance(place, dict) and place.get("format") in OF_BYTES]
    description += [bits for key, bits in LOADED.items() if config.get(key) is True]
    return {bits for bits in description if isinstance(bits, int) and not isinstance(bits, bool)}


def _bits(found: set[int]) -> str:
    return f"{' or '.join(map(str, sorted(found)))} bits"
