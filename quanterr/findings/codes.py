"""The codes of findings and what each means; how a finding is made."""

from math import isfinite
from typing import NamedTuple

from quanterr.report.model import Finding


class Code(NamedTuple):
    """A row of CODES. Severities: info (worth knowing), warning (look at it), error (the result is unreliable)."""

    told_severities: str
    meaning: str

    @property
    def severities(self) -> list[str]:
        """Those that a finding of this code may have."""
        return self.told_severities.split()


CODES = {
    # headers, labels, config.json
    "odd_file": Code("warning", "a file is odd in a way that was accepted"),
    "config_mismatch": Code("warning", "config.json tells of other codes than those that are stored"),
    "label_without_layer": Code("warning", "a header labels layers that are not stored"),
    "rotated_weights": Code("error", "config.json tells of rotations that are part of the stored weights"),
    "config_without_codes": Code(
        "warning", "config.json tells of a quantization method, and no weight is stored quantized"
    ),
    "codes_without_scale": Code("warning", "codes are stored that nothing scales"),
    "dummy_scale": Code("warning", "a scale of 1 lies beside a weight that is not quantized"),
    "fp8_without_scale": Code("info", "FP8 without any scale, taken as a plain cast"),
    "layout_doubt": Code("warning", "how the tensors were read, and what speaks against it"),
    "not_read": Code("error", "no format fits the tensors of a weight"),
    # scales and sums of one weight
    "nonfinite_original": Code("error", "NaN or infinite elements in the original"),
    "nonfinite_quantized": Code("error", "NaN or infinite elements in the quantized weight"),
    "scale_nonfinite": Code("error", "scales, of weights or activations, that are NaN or infinite"),
    "scale_negative": Code("warning", "negative scales"),
    "scale_zero": Code("warning", "scales that are zero: their blocks are dead"),
    "scale_constant": Code("info", "every scale is 1, as if there were none"),
    "saturated": Code("warning", "more codes at the end of their range than a right scale leaves there"),
    "far_off": Code("warning error", "further off than any right weight of as many bits"),
    "below_usual": Code("warning", "far below the level that its format usually has, whatever the weight"),
    "one_sided": Code("warning", "errors lean to one side, as with zero points that are off"),
    "dead_rows": Code("warning", "rows that are all zero, and not in the original"),
    "bad_rows": Code("info warning", "rows far worse than the others of their weight"),
    "zero_original": Code("warning", "the original is all zeros, the quantized weight is not"),
    # repairs that were tried on a sample of a doubtful weight
    "scale_factor": Code(
        "warning error", "one factor, or one for each row, column or block, mends the weight: its scales are wrong"
    ),
    "zero_points": Code("warning error", "a shift of each row or block mends the weight: its zero points are wrong"),
    "order": Code("warning error", "rows or columns in another order mend the weight: permuted, or nibbles swapped"),
    "transposed": Code("warning error", "the matrix is stored the other way round"),
    "another_weight": Code("error", "the values are those of another weight of the original"),
    # all weights together
    "below_group": Code("warning", "far below the other weights of its format and role"),
    "norm_offset": Code(
        "warning error",
        "norms that differ by one: stored around 0 on one side, around 1 on the other; if all do, a warning",
    ),
    "folded_scales": Code(
        "warning error", "scales moved from weights into what comes before them; compared with that undone"
    ),
    "identical": Code("info", "all compared tensors are the same on both sides"),
    "lossless_codes": Code("warning", "weights are stored quantized, and yet nothing was lost"),
    "importance_of_nothing": Code("error", "the importance matrix names none of the compared weights"),
    "importance_missing": Code("info", "weights whose importance is not known"),
    "importance_uncovered": Code("warning", "experts that no input reached when the importance matrix was made"),
    "other_changes": Code("info", "norms, biases or other 1-D tensors changed"),
    "many_blocks": Code("info", "too many blocks for a group of each"),
}


def finding(
    code: str, severity: str, layer: str | None, message: str, remedy: str | None = None, **evidence: object
) -> Finding:
    """A finding; ``code`` is one of CODES, ``severity`` info, warning or error, ``layer`` None for the whole."""
    return Finding.model_validate(
        {
            "code": code,
            "severity": severity,
            "layer": layer,
            "message": message,
            "remedy": remedy,
            "evidence": {key: _finite(value) for key, value in evidence.items()},
        }
    )


def _finite(value: object) -> object:
    """The value; None for a number that JSON cannot hold."""
    return None if isinstance(value, float) and not isfinite(value) else value
