"""Non-standard files and contradictions of config.json, as findings."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from quanterr.checkpoints import Checkpoint
from quanterr.findings.codes import finding
from quanterr.report.model import Finding
from quanterr.util.text import count, display

NOTE = "nonstandard_file"
MAX_NOTES = 20

BITS = ("bits", "w_bit", "num_bits")  # keys of a quantization_config, or of the weights of one of its groups
METHODS = {"fp8": 8, "fbgemm_fp8": 8}  # quant_method → bits of a code
OF_BYTES = ("int-quantized", "naive-quantized")  # of compressed-tensors: codes of fewer bits have a byte each, too
LOADED = {"load_in_4bit": 4, "load_in_8bit": 8}


def of_notes(checkpoint: Checkpoint) -> Iterator[Finding]:
    """What was noted when the files were opened."""
    for note in checkpoint.notes[:MAX_NOTES]:
        yield finding(NOTE, "warning", None, note)
    if more := checkpoint.notes[MAX_NOTES:]:
        yield finding(NOTE, "warning", None, f"{display(checkpoint.path)}: {count(len(more), 'more note')}")


def of_config(config: Mapping[str, Any], code_bits: Iterable[int | None]) -> Iterator[Finding]:
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


def _told_bits(config: Mapping[str, Any]) -> set[int]:
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
