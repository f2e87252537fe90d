"""The methods by which weights are quantized: the errors that each leaves, and those that it never makes.

A method is recognized from config.json, or from a format that only one program writes. Findings compare measured errors
with the row of the method, whose comment names the experiment that its limits come from. "Real weights" are those of
all-MiniLM-L6-v2 (36 matrices of 384 to 1,536 columns), with the inputs of 28 texts.
"""

import json
import re
from typing import NamedTuple

from quanterr.util.strict_json import JsonFields


class Method(NamedTuple):
    """The errors that a method of quantization leaves, and the errors that it never makes."""

    # Maximum dB that the method loses against the nearest codes. A larger loss has another cause.
    max_loss_db: float
    # Maximum ratio of a stored to a good scale, or its inverse: GPTQ changes values to compensate errors before it
    # computes the scales of later groups.
    max_factor: float = 1.0
    compensates: bool = False  # later columns compensate the errors of earlier ones
    may_compensate: bool = False  # the method compensates, or nothing in the configuration excludes it
    rounds_first_column: bool = False  # the first column, which has nothing to compensate, gets the nearest codes
    learns: bool = False  # the method learns which of the two codes around a value to take
    may_learn_ranges: bool = False  # the method also learns the range of each group's codes, or nothing excludes it
    by_importance: bool = False  # the method minimises errors weighted by column, and may neglect single groups
    folded: bool = False  # factors were folded into the weight; the comparison undid them approximately
    by_norm: bool = False  # factors of columns were undone exactly: the preceding norm has their inverse

    @property
    def is_nearest(self) -> bool:
        """Whether each code is the nearest to its value, unless scales were rounded after the codes."""
        return not (self.compensates or self.learns)


# Rounding to the nearest costs 0 to 0.3 dB in all files of current quantizers, because they round scales after the
# codes. Zero points rounded after the codes cost up to 2.0 (compressed-tensors) and 3.8 (MLX, 8 bits), rounding at
# random 3.0, truncation 6.0.
ROUNDING = Method(5.0)
# A compressed-tensors file by GPTQ or AutoRound may not name its method. GPTQ costs 2.9 to 4.2 dB with inputs that are
# correlated like those of real models.
UNKNOWN = ROUNDING._replace(may_compensate=True, may_learn_ranges=True)
# Frantar et al., arXiv:2210.17323: min ‖(W - Ŵ)X‖² column by column. On real weights, with groups of 32 to 128, damping
# of 0.01 and 0.1 and both orders of columns, a weight loses 0.5 to 6.1 dB; with columns in the order of inputs 5.3.
GPTQ = Method(8.0, 4.0, compensates=True, may_compensate=True, rounds_first_column=True)
# AutoRound (arXiv:2309.05516), AdaRound, stochastic rounding: each code is one of the two around its value; to 3 dB.
LEARNED = Method(ROUNDING.max_loss_db, learns=True, may_learn_ranges=True)
# SpQR (arXiv:2306.03078) and QuIP# (arXiv:2402.04396) compensate as GPTQ does, with other groups.
OTHER = GPTQ._replace(rounds_first_column=False)
# Lin et al., arXiv:2306.00978: columns are scaled, then rounded to the nearest, so the errors are those of rounding.
AWQ = Method(ROUNDING.max_loss_db)
# ggml-quants.c of llama.cpp: min Σ importance · e² over scales of each block, importance being x² or that of an
# importance matrix. Codes are rounded to the nearest, then a scale is fitted to them. This costs 0 to 1.5 dB on real
# weights with importances of 1 to 1,000, of single columns or log-uniform.
GGML = Method(2.5, by_importance=True)

# The first pattern that occurs in the quantization_config decides: AutoRound also exports as GPTQ and AWQ. Of
# compressed-tensors' files, only those by GPTQ declare an order of columns.
DECLARED = (
    (re.compile(r"auto.?round|adaround|learned|stochastic", re.IGNORECASE), LEARNED),
    (re.compile(r"spqr|quip", re.IGNORECASE), OTHER),
    (re.compile(r'gptq|"actorder": "', re.IGNORECASE), GPTQ),
    (re.compile(r"awq", re.IGNORECASE), AWQ),
    (re.compile(r"compressed.tensors"), UNKNOWN),
)


def find_declared_method(config: JsonFields) -> Method:
    """Return the method that a quantization_config names; rounding if it names none."""
    text = json.dumps(config, default=str)
    return next((method for pattern, method in DECLARED if pattern.search(text)), ROUNDING)


def find_method(declared: Method, format_name: str, folded: bool) -> Method:
    """Return the method by which a weight of this format was quantized.

    Args:
        declared: the method that config.json names.
        format_name: the weight's format.
        folded: whether factors were folded into the weight and undone.
    """
    method = GGML if format_name.startswith("gguf_") else declared
    return method._replace(folded=True) if folded else method
