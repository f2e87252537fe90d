"""The limits that findings share, each with what it rests on.

What a method of quantization may cost stands with the method (``methods``), and what a single sign needs beside it.
"Sound files" are those of all producers in the tests; "real weights" are those of ``methods``.
"""

from quanterr.findings.methods import GPTQ

# Losses in dB.
BIT_DB = 6.0  # a step twice as wide, that is a bit less: 20 · log10 2; truncation costs as much
DOUBLE_DB = BIT_DB / 2  # twice the energy of error, which is what rounding at random costs
SLIGHT_DB = 0.5  # rounding of scales after the codes costs 0 to 0.3
SMALL_DB = 1.0  # clipping costs 0.2 in sound 8-bit files; factors folded into 3 bits look like another grid at 0.7
RANDOM_DB = 2.9  # less than DOUBLE_DB by the noise of a sample; 8-bit routers of MLX look alike, and lose up to 2.8
NEAR_DB = 1.5  # searches for scales cost 0 to 1.5 on real weights; so does clipping: 1.2 in MXFP4 (Quark, AutoRound)
SEARCHED_DB = 2.0  # what scales of sound files lose against good ones: up to 1.8, as products of coarse scales
WORST_DB = GPTQ.most_db  # no method loses more; rows of sound files are up to 7.6 below their weight, outliers cost 7.5
FINE_DB = 60.0  # SNR above which nothing is reported: it is better than rounding to BF16, 6.02 · 7 + 14 = 56
ROUNDED_DB = 50.0  # SNR of casts: BF16 has 53 to 57; of codes, 8 bits in small groups have at most 46
CHANGED_DB = 20.0  # SNR below which a norm or a bias is another than before, or is not once corrected

# Shares of a number of values, or of an energy.
TINY = 1e-3  # float32 sums and scales differ by less
TRACE = 0.01  # so much of the codes, or of an energy, is left to scales that were rounded after the codes
FEW = 0.05  # Q3_K searched by importance gives up 0.04 of its groups
MANY = 0.2  # of sound mixtures of GGUF a third has the type of the name; right zero points clip no such share

# Factors and cosines.
ALIKE = 0.02  # distance from 1: 127 and 128 differ by 0.8 %, casts to BF16 by 0.4 %
FAR = 1e3  # factor from the median of other blocks or rows: those of sound models differ by about 100
APART = 1.25  # scales rounded to 8 bits of a code are off by up to 1/7, those of symmetric 4 bits by 8/7
ALIGNED = 0.9  # cosine that rounding at 7 dB leaves, as of normal weights in 2 bits: √(1 - 10^-0.7)
LIKE = 0.6  # cosine above which two vectors are one, each quantized in another way
AGREE = 0.75  # share of rows that must agree; of the excess that few directions must hold, where GPTQ leaves 0.65
UNRELATED = 0.3  # cosine below which the tensors have nothing in common

# Numbers of values.
ENOUGH = 32  # elements, or distinct values: fewer may agree by chance
PEERS = 3  # weights or scales of which a median is taken
DEVIATIONS = 6.0  # standard or median absolute deviations that chance does not reach among all weights of a model
