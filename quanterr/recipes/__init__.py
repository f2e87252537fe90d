"""Recipes: named ways to quantize a weight, and checkpoints that exist only as a recipe applied to an original.

base.py            the interface of a recipe
names.py           parsing of recipe names; the list of all names
scaled.py          FP8 and INT8 with a scale per tensor, row or block
integers.py        2 to 8 bits in groups
mlx.py             integers of MLX
microscaled.py     MXFP8, MXFP4, NVFP4
tables.py          NF4 and FP4 of bitsandbytes
blocks.py          legacy types of ggml
superblocks.py     K types of ggml
searches.py        searches for the scales of ggml's types
lookup.py          nearest numbers of a small table, by torch
calibration.py     calibrators: the numbers that scales are derived from
matrices.py        stored weights as the matrices that recipes quantize; stacks of experts
quantized_file.py  an original as a checkpoint that is quantized while it is read
scales.py          scales of the weights being quantized
tensors.py         tensors in memory, for training and for tests of quantizers
studies.py         the cost of outliers, and the sensitivity to scales
sampling.py        recipes on a sample of rows, with an error margin
synthetic.py       recipes on synthetic weights
"""

from quanterr.recipes.base import Encoder, Recipe, Source
from quanterr.recipes.names import PRESETS, list_recipes, parse_recipe, parse_recipes

__all__ = ["PRESETS", "Encoder", "Recipe", "Source", "list_recipes", "parse_recipe", "parse_recipes"]
