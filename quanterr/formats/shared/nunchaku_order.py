"""The storage order of Nunchaku's tensors, in which the threads of a warp load them for a matrix instruction.

Rows and columns of a weight are padded to multiples of 128. The index of a stored number, in mixed-radix digits, the
slowest first:

    codes     32-bit words of eight codes, the first in the lowest bits: (t, k, a 8, b 8, c 4, d 2, e 2)
              row 128 t + 16 a + 8 d + b, columns 64 k + 32 e + 8 c and on
    scales    of 16 bits, also smoothing factors, channel scales and biases: (t, g, a 8, b 4, c 2, d 2)
              row 128 t + 16 a + 8 c + 2 b + d, group g
    scales    of 8 bits: (t, k, a 8, b 4, c 4, d 4)
              row 128 t + 32 c + 8 b + a, group 4 k + d
    exponents of 8 bits: (t, k, a 8, b 4, c 4, d 2)
              the same rows, group 2 k + d
    branch    (c, r, a 8, b 4, d 2, e 2, f 2)
              down[16 r + 8 d + a, 16 c + 8 e + 2 b + f]        (rank, columns)
              up  [16 c + 8 d + a, 16 r + 8 e + 2 b + f]        (rows, rank)

Reference: mit-han-lab/deepcompressor@69f3473 deepcompressor/backend/nunchaku/utils.py, NunchakuWeightPacker;
intel/auto-round@b9f3d007 auto_round/export/svdquant_mxfp4.py NunchakuMXFP4Packer.
"""

from quanterr.kernel.tiles import Tiles

TILE = 128  # rows of a tile
CODES = Tiles("R C a8 b8 c4 d2 e2 f8", "Radb", "Cecf", 4)
NUMBER_TILES = Tiles("R C a8 b4 c2 d2", "Racbd", "C")  # numbers of 16 bits
BYTE_TILES = Tiles("R C a8 b4 c4 d4", "Rcba", "Cd")
EXPONENT_TILES = Tiles("R C a8 b4 c4 d2", "Rcba", "Cd")
UP = Tiles("R C a8 b4 d2 e2 f2", "Rda", "Cebf")
DOWN = Tiles("R C a8 b4 d2 e2 f2", "Rebf", "Cda")  # its rows are the weight's columns
