"""Recipes: named ways to quantize a weight, and checkpoints that exist only as a recipe applied to an original.

base.py            the interface of a recipe
names.py           the parser of recipe names, and the list of all names
scaled.py          FP8 and INT8 with a scale per tensor, row or block
integers.py        2 to 8 bits in groups
mlx.py             integers of MLX
microscaled.py     MXFP8, MXFP4, NVFP4
tables.py          NF4 and FP4 of bitsandbytes
blocks.py          legacy types of ggml
superblocks.py     K types of ggml
searches.py        searches for the best scales of ggml's types
lookup.py          nearest numbers of a small table, by torch
calibration.py     calibrators, which find the numbers that scales are derived from
matrices.py        stored weights as the matrices that recipes quantize; stacks of experts
quantized_file.py  an original as a checkpoint that is quantized while it is read
scales.py          scales of the weights being quantized
tensors.py         tensors in memory, for training and for tests of quantizers
studies.py         what outliers cost a recipe, and how its error depends on the scales
sampling.py        recipes on a sample of rows, with an error margin
synthetic.py       errors of recipes on synthetic weights
"""

from quanterr.recipes.base import Encoder, Recipe, Source
from quanterr.recipes.names import PRESETS, list_recipes, parse_recipe, parse_recipes

__all__ = ["PRESETS", "Encoder", "Recipe", "Source", "list_recipes", "parse_recipe", "parse_recipes"]
