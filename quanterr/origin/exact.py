"""Finds the deterministic recipe that may have made a weight, and quantizes the original by it.

All of a weight follows from the original then, its scales too. The recipe makes the weight again, which is compared
value by value, with the signs of zeros: so an order of rows, or of tiles, that both sides share makes no difference.
"""

from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from quanterr.checkpoints import Checkpoint
from quanterr.formats import Weight
from quanterr.pairing import pair
from quanterr.pairing.alternatives import choose_alternatives
from quanterr.pairing.model import Pair
from quanterr.recipes import Recipe, parse_recipe
from quanterr.recipes.base import QUANTIZED_AS
from quanterr.recipes.matrices import is_stack
from quanterr.recipes.names import GGML
from quanterr.recipes.quantized_file import ImportanceOf, mix_recipes
from quanterr.selection import LayerSelection

FP8, INT8 = "F8_E4M3", "I8"
MICROSCALED = {"ct_mxfp4": "mxfp4", "mxfp4": "mxfp4", "ct_nvfp4": "nvfp4", "nvfp4": "nvfp4", "mxfp8": "mxfp8"}


def find_recipe(weight: Weight) -> Recipe | None:
    """Return the recipe that stores weights in the layout of this weight; None if there is none."""
    name = _name_recipe(weight)
    return None if name is None else parse_recipe(name)


def _name_recipe(weight: Weight) -> str | None:
    format_name, dtype = weight.format, weight.codes.dtype
    high, wide = weight.block_size or (0, 0)
    if format_name in MICROSCALED:
        return MICROSCALED[format_name]
    if format_name.startswith("gguf_") and format_name.removeprefix("gguf_").upper() in GGML:
        return format_name
    if format_name.startswith(("fp8_", "int8_")):
        scheme, _, per = format_name.partition("_")
        if dtype != (FP8 if scheme == "fp8" else INT8) or per not in ("tensor", "row", "block"):
            return None
        return f"{scheme}_block{high}x{wide}" if per == "block" else format_name
    if format_name in ("bnb_nf4", "bnb_fp4"):
        return f"{format_name.removeprefix('bnb_')}_g{wide}{':double' if 'nested_absmax' in weight.parts else ''}"
    if format_name == "mlx_affine" and weight.uniform_bits in (2, 3, 4, 5, 6, 8):
        return f"mlx_q{weight.uniform_bits}_g{wide}"
    if format_name == "ct_pack" and weight.uniform_bits in range(2, 9):
        group = f"g{wide}" if weight.block_size else "channel"
        return f"int{weight.uniform_bits}_{group}{':asym' if 'zero_point' in weight.parts else ''}"
    return None


def requantize(original: Checkpoint, pairs: Iterable[Pair], importance: ImportanceOf | None) -> Mapping[str, Weight]:
    """Return the weights as deterministic recipes make them from the original, by name; nothing is read yet."""
    suited = {matched.name: find_recipe(matched.quantized) for matched in pairs if _can_be_made(original, matched)}
    recipes = {name: recipe for name, recipe in suited.items() if recipe is not None}
    if not recipes:
        return {}
    requantized, left = mix_recipes(original, recipes, "the original by recipes", importance)
    names = recipes.keys() - {leftover.name for leftover in left}
    pairing = pair(original, requantized, LayerSelection())
    wanted = replace(pairing, pairs=[matched for matched in pairing.pairs if matched.name in names])
    return {matched.name: matched.quantized for matched in choose_alternatives(wanted, undo=False).pairs}


def _can_be_made(original: Checkpoint, pair: Pair) -> bool:
    """Return whether recipes quantize the stored original of a pair."""
    entry = original.entries.get(pair.name)
    if entry is None or entry.dtype not in QUANTIZED_AS or not entry.n or not pair.name.endswith(".weight"):
        return False
    return len(entry.shape) == 2 or is_stack(pair.name, entry.shape)
