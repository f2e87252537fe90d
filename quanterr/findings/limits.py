"""The limits that findings share, each with what it rests on.

``methods`` has the losses that each method of quantization may cause; a limit that only one check needs is beside that
check. "Correct files" are those that all producers wrote for the tests; "real weights" are those of ``methods``.
"""

from quanterr.findings.methods import GPTQ

# Losses in dB.
BIT_DB = 6.0  # a step twice as wide, that is a bit less: 20 · log10 2; truncation costs as much
DOUBLE_DB = BIT_DB / 2  # twice the energy of error, which is what rounding at random costs
SLIGHT_DB = 0.5  # rounding of scales after the codes costs 0 to 0.3
SMALL_DB = 1.0  # clipping costs 0.2 in correct 8-bit files; factors folded into 3 bits look like another grid at 0.7
RANDOM_DB = 2.9  # DOUBLE_DB less a sample's noise; 8-bit routers of MLX look rounded at random, and lose up to 2.8
NEAR_DB = 1.5  # searches for scales cost 0 to 1.5 on real weights; so does clipping: 1.2 in MXFP4 (Quark, AutoRound)
SEARCHED_DB = 2.0  # scales of correct files lose up to 1.8 against good ones, as they are products of coarse scales
MAX_METHOD_LOSS_DB = (
    GPTQ.max_loss_db
)  # no method loses more; rows of correct files are up to 7.6 below their weight, outliers cost 7.5
FINE_DB = 60.0  # SNR above which nothing is reported: it is better than rounding to BF16, 6.02 · 7 + 14 = 56
ROUNDED_DB = 50.0  # SNR of casts: BF16 has 53 to 57; of codes, 8 bits in small groups have at most 46
CHANGED_DB = 20.0  # SNR below which a norm or a bias is a different one, or a correction of it explains nothing

# Shares of a number of values, or of an energy.
FLOAT32_TOLERANCE = 1e-3  # rounding to float32 changes sums and scales by less
NEGLIGIBLE_SHARE = 0.01  # scales that are rounded after the codes change at most this share of codes, or of an energy
MINOR_SHARE = 0.05  # Q3_K searched by importance gives up 0.04 of its groups
MAJOR_SHARE = (
    0.2  # in correct mixtures of GGUF a third of the weights has the type of the name; correct zero points clip less
)

# Factors and cosines.
FACTOR_TOLERANCE = 0.02  # distance from 1: 127 and 128 differ by 0.8 %, casts to BF16 by 0.4 %
OUTLIER_FACTOR = 1e3  # factor from the median of other blocks or rows: those of correct models differ by about 100
MISMATCH_FACTOR = 1.25  # scales rounded to 8 bits of a code are off by up to 1/7, those of symmetric 4 bits by 8/7
ALIGNED_COSINE = 0.9  # cosine that rounding at 7 dB leaves, as of normal weights in 2 bits: √(1 - 10^-0.7)
SAME_VECTOR_COSINE = 0.6  # cosine above which two vectors are the same vector, quantized in two ways
AGREEING_SHARE = (
    0.75  # share of rows that must agree; also of the excess that a few directions must hold (GPTQ leaves 0.65)
)
UNRELATED_COSINE = 0.3  # cosine below which the tensors have nothing in common

# Numbers of values.
MIN_VALUES = 32  # elements, or distinct values: fewer may agree by chance
MIN_PEERS = 3  # minimum number of weights or scales whose median says something
CHANCE_DEVIATIONS = (
    6.0  # standard or median absolute deviations that chance does not reach among all weights of a model
)
