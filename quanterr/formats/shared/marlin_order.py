"""The order of the scales of Marlin and QQQ, in runs of rows.

a scale for each group    runs of 64: number 8 i + j belongs to row i + 8 j
a scale for the row       runs of 32: number 8 i + 2 j + k belongs to row 8 j + 2 i + k
"""

from quanterr.kernel.tiles import Tiles

GROUP_SCALE_TILES = Tiles("C R i8 j8", "Rji", "C")
ROW_SCALE_TILES = Tiles("C R i4 j4 k2", "Rjik", "C")
