"""Findings about causes that a repair, tried on a sample, has shown."""

from quanterr.documents.finding_codes.base import FindingCode

TITLE = "Repairs"
CODES = {
    "scale_factor": FindingCode(
        "warning, error",
        meaning="one factor, or one per row, column or block, corrects the weight: its scales are wrong",
        example=(
            "model.layers.3.mlp.up_proj.weight: -5.9 dB as fp8_tensor: the scale is off by a factor of 448; 31.6 dB "
            "once corrected on a sample"
        ),
        remedy="Check how the scale is applied: omitted, applied twice, inverted, shifted, or in another order.",
    ),
    "zero_points": FindingCode(
        "warning, error",
        meaning=(
            "one shift per row or block corrects the weight, or many codes are at the end of their range despite right "
            "scales: zero points are wrong"
        ),
        example=(
            "model.layers.3.mlp.up_proj.weight: 6.0 dB as gptq: one shift per block corrects it: its zero points are "
            "wrong; 19.8 dB once corrected"
        ),
        remedy="Check the convention: some formats store zero points minus one, others those of signed codes (8 less).",
    ),
    "permuted": FindingCode(
        "info, warning, error",
        meaning="another order of rows, columns or experts corrects the weight; an info if routers have it, too",
        example=(
            "model.layers.3.mlp.up_proj.weight: -3.0 dB as nvfp4: its columns are in a different order (neighbours are "
            "swapped); 20.2 dB once corrected on a sample"
        ),
        remedy=(
            "Look for a permutation that only one side undoes: nibbles, gate and up, act-order, g_idx, rotary halves."
        ),
    ),
    "transposed": FindingCode(
        "warning, error",
        meaning="the matrix is stored transposed",
        example="h.0.mlp.c_fc.weight: -3.1 dB as int8_row: it is stored transposed; 38.2 dB once corrected on a sample",
        remedy="Transpose the matrix, or correct its metadata.",
    ),
    "swapped_weight": FindingCode(
        "error",
        meaning=(
            "the values of a weight match another weight of the original, or experts of a stack hold others and repeat "
            "them"
        ),
        example=(
            "model.layers.3.mlp.up_proj.weight: its values match model.layers.4.mlp.up_proj.weight of the original "
            "(cosine 0.9998 on a sample)"
        ),
        remedy="Convert or quantize the model again.",
    ),
    "another_source": FindingCode(
        "warning",
        meaning=(
            "codes are a step or two off, as if other values had been quantized; or hardly a weight resembles the "
            "original's (evaluate)"
        ),
        example=(
            "another source? 112 weights lost more than rounding costs; few directions hold the difference: a LoRA was "
            "merged into one side"
        ),
        remedy=(
            "Compare with the checkpoint that was quantized. If codes show the grid of an earlier format, "
            "quantize from the original instead."
        ),
    ),
}
