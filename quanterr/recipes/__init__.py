"""Recipes: ways to quantize a weight, by name, and checkpoints that exist only as a recipe of an original.

base.py           what a recipe is
names.py          from a name to a recipe, and all names
scaled.py         FP8 and INT8 with a scale per tensor, row or block
integers.py       2 to 8 bits in groups
mlx.py            integers of MLX
microscaled.py    MXFP8, MXFP4, NVFP4
tables.py         NF4 and FP4 of bitsandbytes
blocks.py         legacy types of ggml
superblocks.py    its K types
searches.py       scales of ggml's types, searched
lookup.py         the nearest numbers of a small table
calibration.py    from which numbers scales are made
matrices.py       stored weights as the matrices that recipes quantize; stacks of experts
candidate.py      an original as a checkpoint that is quantized while it is read
scales.py         scales of the weights that are being quantized
tensors.py        tensors in memory, for training and for tests of quantizers
studies.py        what outliers cost, and how much scales matter
sampling.py       recipes on a sample of rows, and how sure that is
synthetic.py      recipes on synthetic weights
"""

from quanterr.recipes.base import Recipe, Scheme, Source
from quanterr.recipes.names import PRESETS, listing, recipe_named, recipes_named

__all__ = ["PRESETS", "Recipe", "Scheme", "Source", "listing", "recipe_named", "recipes_named"]
