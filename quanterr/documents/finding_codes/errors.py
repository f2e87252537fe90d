"""Findings about weights with more error than they need to have."""

from quanterr.documents.finding_codes.base import FindingCode

TITLE = "Errors"
CODES = {
    "implausible_error": FindingCode(
        "warning, error",
        meaning="a weight has more error than its bit width explains",
        example=(
            "model.layers.3.mlp.up_proj.weight: -2.9 dB as int8_row; norm 1.001 times the original's, cosine 0.0021: "
            "rows or columns permuted, or another tensor"
        ),
        remedy="Quantize this layer again; if the error returns, the quantizer writes wrong codes or scales.",
    ),
    "below_usual": FindingCode(
        "warning",
        meaning="the SNR of a weight is far below the usual level of its format",
        example="model.layers.3.mlp.up_proj.weight: 17.4 dB as fp8_row; 31 to 33 dB is usual",
        remedy="Quantize it again, or leave it in higher precision.",
    ),
    "group_outlier": FindingCode(
        "info, warning",
        meaning=(
            "the SNR of a weight is far below the other weights of its format and role; an info if its codes are about "
            "the nearest that its scales allow"
        ),
        example="model.layers.3.mlp.up_proj.weight: 17.4 dB; the median of the 64 weights of fp8_row in mlp is 31.5 dB",
        remedy="Quantize it again, or leave it in higher precision. An info: only a finer format would change it.",
    ),
    "outlier_column": FindingCode(
        "info",
        meaning="a few outlier columns make the scales of most rows too coarse for the other columns",
        example=(
            "model.layers.3.mlp.down_proj.weight: its scales allow no more than 21.3 dB where its peers reach 41.2: 2 "
            "outlier columns"
        ),
        remedy=(
            "Use a scale per block of columns, smooth or rotate the layer's inputs, or leave the weight unquantized."
        ),
    ),
    "biased_error": FindingCode(
        "warning",
        meaning="the error of a weight has a nonzero mean, as incorrect zero points produce",
        example=(
            "model.layers.3.mlp.up_proj.weight: the error is biased: its mean 0.0021 makes up 64% of the squared error"
        ),
        remedy="Quantize it again; if the bias returns, check the quantizer's zero points and rounding.",
    ),
    "bad_rows": FindingCode(
        "info, warning",
        meaning="rows have far more error than the other rows of their weight",
        example="model.layers.3.mlp.up_proj.weight: 3.1 dB in row 17, 31.4 dB overall",
        remedy=(
            "One bad row is damage: quantize the layer again. In many layers, outliers are the cause: use finer scales."
        ),
    ),
    "excess_error": FindingCode(
        "info, warning, error",
        meaning=(
            "a weight is worse than its stored scales allow: its codes are not the nearest to the original; an info if "
            "no worse than GPTQ or AutoRound leave it"
        ),
        example=(
            "model.layers.3.mlp.up_proj.weight: 13.6 dB, where its stored scales allow 31.8 dB: 71 % of its codes are "
            "two or more steps off"
        ),
        remedy=(
            "Quantize this layer again; if the error returns, the quantizer writes wrong codes, or in a wrong order."
        ),
    ),
    "excess_rows": FindingCode(
        "info, warning",
        meaning="rows of a weight are far worse than their scales allow",
        example=(
            "model.layers.3.mlp.up_proj.weight: 2 sampled rows (17, 19): 9.1 dB at worst; their scales allow 38.2 dB"
        ),
        remedy="Quantize this layer again; see excess_error.",
    ),
    "excess_columns": FindingCode(
        "info, warning",
        meaning="columns of a weight are far worse than their scales allow",
        example=(
            "model.layers.3.mlp.up_proj.weight: 4 sampled columns (252 to 255): 0.0 dB at worst, all zero; their "
            "scales allow 38.2 dB"
        ),
        remedy="Quantize this layer again; see excess_error.",
    ),
    "excess_blocks": FindingCode(
        "info, warning",
        meaning="blocks of 64 columns of a row are far worse than their scales allow",
        example=(
            "model.layers.3.mlp.up_proj.weight: 1 block of 64 columns: 13.6 dB at worst; their scales allow 38.2 dB"
        ),
        remedy="Quantize this layer again; see excess_error.",
    ),
    "scale_loss": FindingCode(
        "info, warning, error",
        meaning="stored scales do not suit the values: with good scales, the nearest codes would lose much less",
        example=(
            "model.layers.3.mlp.up_proj.weight: codes use 2 of 8 bits: scales are 64 x what the values need: 7.6 dB, "
            "good ones 43.5 dB"
        ),
        remedy="Derive scales from the original: the largest absolute value of each group divided by the largest code.",
    ),
    "shared_scale": FindingCode(
        "info",
        meaning=(
            "a weight shares its single scale with others of its module, one of which needs it, as runtimes fuse q, k "
            "and v, or gate and up"
        ),
        example=(
            "model.layers.0.self_attn.v_proj.weight: scales are 2.93 x what the values need; a runtime fuses it with "
            "q_proj, which needs this scale"
        ),
        remedy="Nothing, unless the loss matters: then use a scale for each row, which costs little and fuses as well.",
    ),
    "clipped": FindingCode(
        "warning",
        meaning=(
            "many values of the original are beyond the range of their scales, and clipping them costs more than "
            "rounding"
        ),
        example=(
            "model.layers.3.mlp.up_proj.weight: 0.27 % of the original's values are beyond the range of their scales: "
            "33.9 dB at best, 43.5 dB without clipping"
        ),
        remedy="Use larger scales, or smaller groups. Scales of zero lose all values.",
    ),
    "saturated": FindingCode(
        "warning",
        meaning="a weight has more codes at the end of their range than a correct scale produces",
        example=(
            "model.layers.3.mlp.up_proj.weight: 6.2 % of the codes are at the end of their range: larger values were "
            "clipped"
        ),
        remedy="Use larger scales, or smaller groups.",
    ),
    "underflow": FindingCode(
        "info, warning, error",
        meaning=(
            "the values of a weight are too small for the scales of its format, and became zeros or coarse values; an "
            "info if only a few groups did"
        ),
        example=(
            "blk.3.ffn_up.weight: its values are too small for the scales of gguf_q8_0: they become zeros, or a few "
            "coarse values (0.0 dB)"
        ),
        remedy="Leave this layer in higher precision.",
    ),
}
