"""The limits that findings share, each with what it rests on.

What a method of quantization may cost stands with the method (``methods``), and what a single sign needs beside it.
"Sound files" are those of all producers in the tests; "real weights" are those of ``methods``.
"""

from math import log10

from quanterr.findings.methods import GPTQ

# Losses in dB: the first two follow from definitions.
DOUBLE_DB = 10 * log10(2)  # twice the energy of error, which is what rounding at random costs
BIT_DB = 20 * log10(2)  # a step twice as wide, that is a bit less; also what truncation costs
SLIGHT_DB = 0.5  # rounding of scales after the codes costs 0 to 0.3
SMALL_DB = 1.0  # a loss that rounding of scales and zero points does not explain
NEAR_DB = 1.5  # searches for scales cost 0 to 1.5 on real weights; so does clipping: 1.2 in MXFP4 (Quark, AutoRound)
SEARCHED_DB = 2.0  # what scales of sound files lose against good ones: up to 1.8, as products of coarse scales
WORST_DB = GPTQ.most_db  # no method loses more; rows of sound files are up to 7.6 below their weight, outliers cost 7.5
FINE_DB = 60.0  # SNR above which nothing is reported: BF16 reaches 52 to 56, F16 more
CHANGED_DB = 20.0  # SNR below which a norm or a bias is another than before, or is not once corrected

# Shares of a number of values, or of an energy.
TINY = 1e-3  # float32 sums and scales differ by less
TRACE = 0.01  # no method leaves more codes, or energy of them, that are two or more steps off, but for its scales
FEW = 0.05  # learned rounding moves 5.9 % of FP8 codes near zero; Q3_K searched by importance gives up 0.04 of groups
MANY = 0.2  # in sound mixtures of GGUF a third has the type of the name; smoothing factors flip no sign at all

# Factors and cosines.
ALIKE = 0.02  # distance from 1: 127 and 128 differ by 0.8 %, casts to BF16 by 0.4 %
FAR = 1e3  # factor from the median of other blocks or rows: those of sound models differ by about 100
APART = 1.25  # scales rounded to 8 bits of a code are off by up to 1/7, zero-point-free 4-bit scales by 8/7
ALIGNED = 0.9  # cosine: 2-bit codes of sound files reach 0.9
LIKE = 0.6  # cosine above which two vectors are one, each quantized in another way
AGREE = 0.75  # share of rows, or of an energy, that must agree
UNRELATED = 0.3  # cosine below which the tensors have nothing in common

# Numbers of values.
ENOUGH = 32  # elements, or distinct values: fewer may agree by chance
PEERS = 3  # weights or scales of which a median is taken
DEVIATIONS = 6.0  # standard or median absolute deviations that chance does not reach among all weights of a model
