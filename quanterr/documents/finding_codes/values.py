"""Findings about values that no error shows, or that no trained weight has."""

from quanterr.documents.finding_codes.base import FindingCode

TITLE = "Values"
CODES = {
    "nonfinite_original": FindingCode(
        "error",
        meaning="NaN or infinite elements in the original",
        example=(
            "model.layers.3.mlp.down_proj.weight: 2 of 8,388,608 elements of the original weight are NaN or infinite"
        ),
        remedy="Find out where the original overflowed.",
    ),
    "nonfinite_quantized": FindingCode(
        "error",
        meaning="NaN or infinite elements in the quantized weight",
        example=(
            "model.layers.3.mlp.down_proj.weight: 4,096 of 8,388,608 elements of the quantized weight are NaN or "
            "infinite"
        ),
        remedy="Quantize this layer again. NaN codes and infinite scales are the usual causes.",
    ),
    "nonfinite_values": FindingCode(
        "error",
        meaning="a checkpoint holds NaN or infinite elements (inspect --values)",
        example="elements are NaN or infinite in 1 tensor: model.layers.3.mlp.down_proj.weight (64 of 65,536)",
        remedy="Quantize these layers again, or find out where the original overflowed. Masks may hold minus infinity.",
    ),
    "zero_original": FindingCode(
        "warning",
        meaning="the original is all zeros, the quantized weight is not",
        example="model.layers.3.bias: the original is all zeros, the quantized weight is not",
        remedy="Check that the original is the checkpoint that was quantized: it lacks these values.",
    ),
    "dead_rows": FindingCode(
        "warning",
        meaning="rows are zero that are not zero in the original",
        example="model.layers.3.mlp.up_proj.weight: 2 rows of zeros that the original does not have: 17, 1040",
        remedy="Quantize this layer again.",
    ),
    "constant_weight": FindingCode(
        "info, warning",
        meaning="matrices are a single value throughout on both sides; an info if no other has their shape",
        example=(
            "2 weights are zero throughout on both sides: model.layers.0.mlp.gate_proj.weight, "
            "model.layers.0.mlp.up_proj.weight; trained matrices are not"
        ),
        remedy="Compare the original with its source: values were lost, unless layers were pruned on purpose.",
    ),
    "constant_rows": FindingCode(
        "info, warning",
        meaning="rows are zero, or a single value, throughout; an info if they may be padding (inspect --values)",
        example=(
            "rows are a single value throughout, as no training leaves them in 1 tensor: "
            "model.layers.3.mlp.down_proj.weight (2 rows: 17, 90)"
        ),
        remedy="Compare with the original: values were lost, unless rows were pruned or padded on purpose.",
    ),
    "repeated_weights": FindingCode(
        "info, warning",
        meaning="experts repeat each other on both sides, or in an inspected checkpoint; an info if layers do",
        example=(
            "experts repeat each other on both sides, which no error shows: model.layers.0.mlp.experts.gate_up_proj (4 "
            "of 16 distinct)"
        ),
        remedy="Compare the original with its source, unless its layers or experts are untrained copies.",
    ),
    "unused_codes": FindingCode(
        "warning",
        meaning="scales are so large that half of a code's bits would do (inspect --values)",
        example=(
            "half of the bits of a code would do in 1 tensor: model.layers.3.mlp.down_proj.weight (-5 to 6 of 256 "
            "codes)"
        ),
        remedy="The scales are wrong, or one outlier sets the scale of all values: then use a scale per row or block.",
    ),
    "values_unlike": FindingCode(
        "warning",
        meaning=(
            "values are far from those of the same weight in other blocks, or rows from other rows (inspect --values)"
        ),
        example=(
            "values are 100 times as large or small as in other blocks in 1 tensor: model.layers.3.mlp.down_proj.weight"
        ),
        remedy="Compare with the original: a scale is probably wrong.",
    ),
}
