"""Write a quantized version of a safetensors file by any recipe of quanterr, rounded to nearest.

    python examples/quantize.py model.safetensors model-fp8.safetensors --to fp8_row
    python examples/quantize.py model.safetensors model-int4/model.safetensors --to int4_g128:asym -l attn,mlp

`quanterr formats --recipes` lists the recipes. Recipes of ggml need a GGUF file, which this script does not write.
Rounding to nearest is the simplest way to quantize and the baseline for better ones. `quanterr sweep` measures the
recipes without writing a file.

The header of the output follows from the header of the input, so it is written first, and then one piece of a tensor at
a time: a model may be larger than the memory.
"""

import argparse
import json
import struct
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from quanterr.checkpoints import Entry, open_checkpoint
from quanterr.checkpoints.base import DTYPE_BITS
from quanterr.errors import QuanterrError, UsageError
from quanterr.recipes import parse_recipe
from quanterr.recipes.quantized_file import choose_weights, mix_recipes
from quanterr.selection import LayerSelection

PIECE = 1 << 24  # bytes written at once


def make_layout(entries: Mapping[str, Entry]) -> tuple[bytes, list[Entry]]:
    """Return the header of a safetensors file and its tensors in order.

    The widest elements come first, so that all are aligned.

    Raises:
        UsageError: a safetensors file cannot hold the dtype of a tensor.
    """
    foreign = next((entry for entry in entries.values() if entry.dtype not in DTYPE_BITS), None)
    if foreign is not None:
        raise UsageError(f"{foreign}: a safetensors file cannot hold it; write a GGUF file with llama-quantize")
    ordered = sorted(entries.values(), key=lambda entry: (-DTYPE_BITS[entry.dtype], entry.name))
    fields: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in ordered:
        begin, end = end, end + entry.nbytes
        fields[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": (begin, end)}
    header = json.dumps(fields, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header, ordered


def write_quantized(source: Path, target: Path, recipe: str, layers: Iterable[str] = ()) -> list[str]:
    """Write the quantized version of a file, whole or not at all, and return the names of the quantized weights.

    Raises:
        QuanterrError: the input cannot be read or quantized, or is also the output; the recipe is unknown.
        OSError: a file cannot be written.
    """
    if target.exists() and target.samefile(source):
        raise UsageError(f"{target}: is the input")
    temporary = target.with_name(f".{target.name}.tmp")
    made_by = parse_recipe(recipe)
    with open_checkpoint(source) as original:
        chosen, _ = choose_weights(original, LayerSelection(layers))
        made, left = mix_recipes(original, dict.fromkeys(chosen, made_by), recipe)
        done = [name for name in chosen if name not in {name.name for name in left}]
        if not done:
            raise UsageError(f"{source}: nothing to quantize (matrices of floats called *.weight)")
        head, ordered = make_layout(made.entries)
        try:
            with temporary.open("wb") as file:
                file.write(head)
                for entry in ordered:
                    for begin in range(0, entry.nbytes, PIECE):
                        file.write(entry.file.read(entry.offset + begin, min(PIECE, entry.nbytes - begin)))
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
    return done


def main() -> None:
    """Quantize the file that the command line names."""
    parser = argparse.ArgumentParser(description="Quantize a safetensors file by rounding to nearest.")
    parser.add_argument("source", type=Path, metavar="IN.safetensors")
    parser.add_argument("target", type=Path, metavar="OUT.safetensors")
    parser.add_argument("--to", required=True, metavar="RECIPE", help="such as fp8_row; quanterr formats --recipes")
    parser.add_argument("-l", "--layers", action="append", default=[], help="as --layers-to-compare of quanterr")
    given = parser.parse_args()
    try:
        done = write_quantized(given.source, given.target, given.to, given.layers)
    except (OSError, QuanterrError) as error:
        sys.exit(f"quantize.py: {error}")
    before, after = (path.stat().st_size / 2**20 for path in (given.source, given.target))
    print(f"{given.target}: {given.to}, {len(done)} quantized, {before:.1f} MiB -> {after:.1f} MiB")
    if config := parse_recipe(given.to).encoder.config:
        print(
            'note: put beside it a config.json with {"quantization_config": ' + json.dumps(dict(config)) + "}",
            file=sys.stderr,
        )


if __name__ == "__main__":
    main()
