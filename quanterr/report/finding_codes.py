"""The codes of findings as data: what each means, how it looks, what to do. For the guide and ``quanterr explain``."""

from typing import NamedTuple


class Code(NamedTuple):
    """A row of CODES. Severities: info (worth knowing), warning (look at it), error (the result is unreliable)."""

    severities: tuple[str, ...]
    meaning: str
    example: str  # a message as a report shows it
    remedy: str


CODES = {
    # headers, labels, config.json
    "nonstandard_file": Code(
        ("warning",),
        "a file is non-standard and was accepted",
        "model.safetensors: 8 trailing bytes after the last tensor; some loaders ignore them, others refuse",
        "Save the file again with the safetensors library. Without --lenient such files are refused.",
    ),
    "unread_weights": Code(
        ("info", "warning"),
        "the folder stores weights that are not read; a warning where tensors of the same name have another shape or "
        "size",
        "model-fp8: not read, and in the same folder: consolidated.safetensors",
        "Nothing if it is for another runtime. If a quantizer left it as it was, or it is of another model, remove it: "
        "some runtimes read it in place of the others.",
    ),
    "config_mismatch": Code(
        ("warning",),
        "config.json, or the metadata of a GGUF file, declares another model or other codes than those stored",
        "config.json declares codes of 4 bits, the tensors hold codes of 8 bits: read as stored",
        "Check that config.json belongs to this model. Loaders that follow it will misread the weights.",
    ),
    "label_without_layer": Code(
        ("warning",),
        "a header labels layers that are not stored",
        "the header of the quantized checkpoint labels layers that are not stored: blocks.7.attn.qkv",
        "Check that no shard is missing and that the header was written for this file.",
    ),
    "outlier_column": Code(
        ("info",),
        "a column of outliers decides the scales",
        "model.layers.3.mlp.down_proj.weight: its scales allow no better than 21.3 dB: an outlier in column 17 rules "
        "those of 96 % of the sampled rows; without it they would reach about 38 dB",
        "Use scales for blocks of columns, smooth or rotate the layer's inputs, or leave the weight unquantized.",
    ),
    "computed_buffer": Code(
        ("info",),
        "tensors that the model computes are stored on one side only",
        "only the original checkpoint stores 1 tensor that the model computes: embeddings.position_ids; the values are "
        "the computed ones",
        "Nothing. Loaders compute them (position_ids, inv_freq, causal masks).",
    ),
    "rotated_weights": Code(
        ("error",),
        "config.json declares rotations that are fused into the stored weights",
        "config.json of the quantized checkpoint declares rotations fused into its weights: R1 (hadamard)",
        "Compare before the transform is fused, or with the rotated original.",
    ),
    "config_without_codes": Code(
        ("warning",),
        "config.json declares a quantization method, but no weight is stored quantized",
        "config.json declares quant_method fp8, but no weight is stored quantized",
        "Check that this is the quantized checkpoint, and not the original with a copied config.json.",
    ),
    "codes_without_scale": Code(
        ("warning",),
        "codes are stored without a scale",
        "codes without a scale: model.layers.0.mlp.up_proj.weight",
        "If the model was quantized with scales, they are missing from this file: write it again.",
    ),
    "dummy_scale": Code(
        ("warning",),
        "an unquantized weight has a scale of 1",
        "lm_head.weight is not quantized but has a scale of 1, which was ignored",
        "Nothing, if the layer was excluded on purpose. Otherwise the quantizer skipped it.",
    ),
    "fp8_without_scale": Code(
        ("info",),
        "FP8 without a scale, read as a plain cast",
        "FP8 without a scale, read as a plain cast: 304 tensors: blocks.0.attn.qkv.weight and 303 more",
        "Nothing, if the weights were cast. If they were quantized with scales, the scales are missing from this file.",
    ),
    "ambiguous_layout": Code(
        ("warning",),
        "the stored tensors allow more than one reading, or metadata contradicts them",
        "model.layers.0.mlp.up_proj.weight: config.json declares group_size 64, the scale has 16 blocks of 2048 "
        "columns",
        "Check which reading is correct and correct the metadata. Runtimes that follow it may read other values.",
    ),
    "not_read": Code(
        ("error",),
        "no format fits the tensors of a weight",
        "model.layers.0.mlp.up_proj.weight: not read: its scale is missing",
        "Read the reason, then see quanterr guide formats and quanterr guide troubleshooting.",
    ),
    # scales and sums of one weight
    "nonfinite_original": Code(
        ("error",),
        "NaN or infinite elements in the original",
        "model.layers.3.mlp.down_proj.weight: 2 of 8,388,608 elements of the original weight are NaN or infinite",
        "Find out where the original overflowed. The weight fails every gate until it is finite.",
    ),
    "nonfinite_quantized": Code(
        ("error",),
        "NaN or infinite elements in the quantized weight",
        "model.layers.3.mlp.down_proj.weight: 4,096 of 8,388,608 elements of the quantized weight are NaN or infinite",
        "Quantize this layer again. NaN codes and infinite scales are the usual causes.",
    ),
    "scale_nonfinite": Code(
        ("error",),
        "scales, of weights or activations, that are NaN or infinite",
        "model.layers.3.mlp.up_proj.weight: 1 of 2,048 scales in model.layers.3.mlp.up_proj.weight_scale are NaN or "
        "infinite",
        "Quantize this layer again. A division by an all-zero row or block is the usual cause.",
    ),
    "scale_negative": Code(
        ("warning",),
        "negative scales",
        "model.layers.3.mlp.up_proj.weight: 12 of 2,048 scales in model.layers.3.mlp.up_proj.weight_scale are negative",
        "Check the quantizer. Where the codes fit signed scales, as AutoRound writes them, nothing is said.",
    ),
    "scale_zero": Code(
        ("warning",),
        "scales that are zero: every weight they apply to is zero",
        "model.layers.3.mlp.up_proj.weight: 1 of 2,048 scales in model.layers.3.mlp.up_proj.weight_scale are zero",
        "A scale underflowed: store it in a wider dtype. Where the original is zero too, nothing is said.",
    ),
    "scale_constant": Code(
        ("info",),
        "every scale is 1, as if there were none",
        "every scale of 304 weights is 1: blocks.0.attn.qkv.weight, blocks.0.attn.proj.weight and 302 more",
        "Nothing, if the weights were cast without scaling. Otherwise the scales were dropped.",
    ),
    "saturated": Code(
        ("warning",),
        "more codes at the end of their range than a correct scale produces",
        "model.layers.3.mlp.up_proj.weight: 6.2 % of the codes are at the end of their range: larger values were "
        "clipped",
        "Use a larger scale, or finer ones.",
    ),
    "implausible_error": Code(
        ("warning", "error"),
        "more error than the bit width explains",
        "model.layers.3.mlp.up_proj.weight: -2.9 dB as int8_row; norm 1.001 times the original's, cosine 0.0021: rows "
        "or columns permuted, a rotation, or another tensor",
        "Compare the scale and the rows of this layer with what the quantizer wrote. A finding beside it often names "
        "the cause.",
    ),
    "below_usual": Code(
        ("warning",),
        "far below the usual SNR of its format",
        "model.layers.3.mlp.up_proj.weight: 17.4 dB as fp8_row; 31 to 33 dB is usual",
        "Quantize it again, or leave it in higher precision.",
    ),
    "biased_error": Code(
        ("warning",),
        "the error has a nonzero mean, as incorrect zero points produce",
        "model.layers.3.mlp.up_proj.weight: the error is biased: its mean 0.0021 makes up 64% of the squared error; "
        "the zero points are wrong, or rounding always goes one way",
        "Compare zero points (some formats store them minus one) and rounding with the quantizer's.",
    ),
    "dead_rows": Code(
        ("warning",),
        "rows of zeros that are not zero in the original",
        "model.layers.3.mlp.up_proj.weight: 2 rows of zeros that the original does not have: 17, 1040",
        "Quantize this layer again.",
    ),
    "excess_error": Code(
        ("info", "warning", "error"),
        "a weight is worse than its stored scales allow: its codes are not those nearest to the original",
        "model.layers.3.mlp.up_proj.weight: 13.6 dB, where its stored scales allow 31.8 dB: 71 % of its codes are two "
        "or more steps off",
        "Compare codes, scales and their order with what the quantizer wrote. A warning: check how it was rounded. An "
        "info: no more than GPTQ and AutoRound leave, or zero points that are rounded afterwards.",
    ),
    "another_source": Code(
        ("warning",),
        "codes are a step or two off as if other values than the original's were quantized",
        "another source? 112 weights lost more than rounding; of 8 that were read again 8 were not made of the "
        "original's values alone: model.layers.0.mlp.up_proj.weight and 7 more; 1.7 to 3.4 dB are lost: codes that "
        "rounding, however it compensates errors, does not make of the original: a finetune, another revision, or "
        "noise; few directions hold the difference: a LoRA that was merged into one side",
        "Compare with the checkpoint that was quantized: of the same revision, with the same adapters merged, and not "
        "quantized before. The third sign is the grid of an earlier format: quantize from the original instead.",
    ),
    "scale_loss": Code(
        ("info", "warning", "error"),
        "stored scales are not those that the values need: good ones lose much less, with the nearest codes of both",
        "model.layers.3.mlp.up_proj.weight: codes use 2 of 8 bits: scales are 64 x what the values need: its scales "
        "allow 7.6 dB, good ones 43.5 dB",
        "Make scales of the original's largest values: of each group the largest over the largest code. Compare the "
        "unit of the stored scales, and whether several were multiplied.",
    ),
    "clipped": Code(
        ("warning",),
        "many values of the original are beyond the range of their scales, and cost more than rounding does",
        "model.layers.3.mlp.up_proj.weight: 0.27 % of the original's values are beyond the range of their scales, "
        "which allow 33.9 dB, 43.5 dB without them",
        "Use larger scales, or finer ones. Scales of zero lose all values.",
    ),
    "underflow": Code(
        ("info", "warning"),
        "the values of a weight are too small for the scales of the format: they became zeros or coarse",
        "blk.3.ffn_up.weight: its values are too small for the scales of gguf_q8_0, which are float16: they become "
        "zeros, or a few coarse values",
        "Leave this layer in higher precision. An info: a few groups of a scale, beside far larger ones.",
    ),
    "excess_rows": Code(
        ("info", "warning"),
        "rows are far worse than their scales allow",
        "model.layers.3.mlp.up_proj.weight: 2 sampled rows (17, 19): 9.1 dB at worst; their scales allow 38.2 dB",
        "Compare these rows with what the quantizer wrote.",
    ),
    "excess_columns": Code(
        ("info", "warning"),
        "columns of a sample are far worse than their scales allow",
        "model.layers.3.mlp.up_proj.weight: 4 sampled columns (252 to 255): 0.0 dB at worst, all zero; their scales "
        "allow 38.2 dB",
        "Compare these columns with what the quantizer wrote.",
    ),
    "excess_blocks": Code(
        ("info", "warning"),
        "blocks of 64 columns of a sampled row are far worse than their scales allow",
        "model.layers.3.mlp.up_proj.weight: 1 block of 64 columns, the worst at row 3, columns 128 to 191: 13.6 dB at "
        "worst, 1.21 times the original's; their scales allow 38.2 dB",
        "Compare these blocks, and their scales, with what the quantizer wrote.",
    ),
    "scale_extreme": Code(
        ("warning",),
        "scales of activations that no activation has",
        "scales of activations that are above 1e+12 or below 1e-12, in 1 tensor of the quantized checkpoint: "
        "model.layers.0.mlp.up_proj.input_scale",
        "Calibrate again. No weight depends on them, but runtimes that use them compute zeros or infinities.",
    ),
    "scale_unlike": Code(
        ("warning",),
        "scales of activations or of the KV cache are a thousand times those of the same module in other blocks, or a "
        "thousandth, equal the scale of the weight, or are missing",
        "scales of activations of the quantized checkpoint are far from their neighbours' in 1 tensor: "
        "model.layers.3.mlp.down_proj.input_scale (1.2e-07; the others' median is 0.0123)",
        "Calibrate again. No weight depends on them, but runtimes that use them compute otherwise.",
    ),
    "scale_misfit": Code(
        ("warning",),
        "scales of activations whose number fits neither rows nor columns of their weight",
        "scales of activations whose number fits neither rows nor columns of their weight: "
        "model.layers.0.mlp.up_proj.input_scale (7)",
        "Calibrate again, or find out which other layer they belong to.",
    ),
    "mixed_row_orders": Code(
        ("error",),
        "a GGUF file stores the rows of some q and k in pairs and of others in halves",
        "rows of heads are in pairs in model.layers.0.self_attn.q_proj.weight, in halves in "
        "model.layers.0.self_attn.k_proj.weight: a runtime rotates all alike",
        "Convert the model again. Runtimes rotate all heads in one way.",
    ),
    "bias_corrected": Code(
        ("info", "warning"),
        "biases of quantized weights were changed, as some quantizers do to make up for the error of the weight",
        "2 biases of quantized weights were corrected: layers.0.attention.key.bias, layers.1.attention.key.bias; "
        "outputs shift by 0.083 of the norm of their row at most, by 0.31 times what the error of the weight does to "
        "typical inputs",
        "Nothing for an info. A warning: check what the model puts out; a correction makes up for no more than the "
        "error of the weight does to inputs as large as the norm before it makes them.",
    ),
    "bad_table": Code(
        ("error",),
        "a tensor that belongs to no weight, such as rope_freqs, holds NaN, infinities or numbers beyond all reason",
        "NaN, infinite or above 1e+09 in 1 tensor of the quantized checkpoint that belong to no weight: "
        "rope_freqs.weight",
        "Copy it from the original. Runtimes read it.",
    ),
    "bad_rows": Code(
        ("info", "warning"),
        "rows with far more error than the others of their weight",
        "model.layers.3.mlp.up_proj.weight: 3.1 dB in row 17, 31.4 dB overall: 1 row with far more error than the rest "
        "(17)",
        "One bad row is damage: quantize the layer again. Bad rows in many layers come from outliers: use finer "
        "scales.",
    ),
    "zero_original": Code(
        ("warning",),
        "the original is all zeros, the quantized weight is not",
        "model.layers.3.bias: the original is all zeros, the quantized weight is not",
        "Check what wrote this tensor.",
    ),
    # repairs that were tried on a sample of a doubtful weight
    "scale_factor": Code(
        ("warning", "error"),
        "one factor, or one per row, column or block, corrects the weight: its scales are wrong",
        "model.layers.3.mlp.up_proj.weight: -5.9 dB as fp8_tensor: the scale is off by a factor of 448; 31.6 dB once "
        "corrected on a sample",
        "Check how the scale is applied: omitted, applied twice, inverted, shifted, or in another order.",
    ),
    "zero_points": Code(
        ("warning", "error"),
        "one shift per row or block corrects the weight: its zero points are wrong",
        "model.layers.3.mlp.up_proj.weight: 6.0 dB as gptq: one shift per block corrects it (1.1e-02 on average): its "
        "zero points are wrong; 19.8 dB once corrected on a sample",
        "Check the convention: some formats store zero points minus one.",
    ),
    "permuted": Code(
        ("warning", "error"),
        "another order of rows or columns corrects the weight: permuted, or nibbles swapped",
        "model.layers.3.mlp.up_proj.weight: -3.0 dB as nvfp4: its columns are in another order (neighbours are "
        "swapped, as nibbles in the wrong order are); 20.2 dB once corrected on a sample",
        "Look for a permutation that only one side undoes: nibbles, act-order, g_idx, rotary halves and pairs.",
    ),
    "transposed": Code(
        ("warning", "error"),
        "the matrix is stored transposed",
        "h.0.mlp.c_fc.weight: -3.1 dB as int8_row: it is stored transposed; 38.2 dB once corrected on a sample",
        "Transpose it, or correct its metadata.",
    ),
    "swapped_weight": Code(
        ("error",),
        "the values are those of another weight of the original",
        "model.layers.3.mlp.up_proj.weight: its values are those of model.layers.4.mlp.up_proj.weight of the original "
        "(cosine 0.9998 on a sample)",
        "Find out where the layers were swapped.",
    ),
    # all weights together
    "group_outlier": Code(
        ("warning",),
        "far below the other weights of its format and role",
        "model.layers.3.mlp.up_proj.weight: 17.4 dB, where the 64 weights of fp8_row in mlp have a median of 31.5 dB",
        "Quantize it again, or leave it in higher precision.",
    ),
    "norm_offset": Code(
        ("warning", "error"),
        "norms that differ by one: centred on 0 on one side and on 1 on the other; a warning if all do",
        "65 norms of the quantized checkpoint are the original's plus 1 throughout: model.norm.weight and 64 more",
        "Some models compute (1 + weight) · x: check that the runtime of the quantized model expects what is stored.",
    ),
    "folded_scales": Code(
        ("info", "error"),
        "scales were folded into the layer before; the comparison undoes that",
        "scales of 3 weights (model.layers.0.self_attn.q_proj.weight and 2 more) were folded into "
        "model.layers.0.input_layernorm.weight; the comparison undoes that: 19.8 dB on a sample of "
        "model.layers.0.self_attn.q_proj.weight, 6.1 dB as stored",
        "Nothing, if the quantizer does this (AWQ, SmoothQuant) and both tensors are used together. An error means "
        "that some layers, or the bias of one, lack the scales: quantize them again.",
    ),
    "not_emulated": Code(
        ("warning",),
        "the files declare a rounding of activations, or of keys and values, that evaluate does not emulate",
        "inputs of 112 weights were not rounded: model.layers.0.mlp.up_proj.weight: its files declare a static scale "
        "of activations, and store no input_scale",
        "Read the numbers as those of the weights alone; --activations none --kv none says so, and is judged as that.",
    ),
    "sibling_scales": Code(
        ("info", "warning"),
        "weights that runtimes fuse have global scales of their own, of which a runtime takes one; a warning from a "
        "ratio of 4 on",
        "runtimes fuse 12 groups of weights whose global scales differ, by up to 2.14 times: "
        "model.layers.0.self_attn.k_proj.weight, model.layers.1.self_attn.k_proj.weight and 10 more; "
        "model.layers.7.self_attn.k_proj.weight has 20.6 dB as stored and 5.5 dB as fused",
        "Quantize what is fused (q, k and v; gate and up; w1 and w3) with one global scale.",
    ),
    "no_input_scale": Code(
        ("info",),
        "FP8 layers of ComfyUI without input_scale, whose inputs are clamped at 448",
        "57 layers in FP8 without input_scale: blocks.0.mlp.up_proj.weight and 56 more; ComfyUI takes a scale of 1 and "
        "clamps inputs at 448",
        "Calibrate an input_scale, or set full_precision_matrix_mult in the layer's label.",
    ),
    "left_unquantized": Code(
        ("warning",),
        "weights that a recipe cannot store and leaves as they are: numbers are those of the rest",
        "gguf_q4_k: 180 weights cannot be stored and stay: model.layers.0.self_attn.q_proj.weight and 179 more "
        "(gguf_q4_k: its 576 columns are not a multiple of 256)",
        "Take a recipe that stores them, or read the numbers as those of the few weights that are quantized.",
    ),
    "fallback_recipe": Code(
        ("info",),
        "weights whose rows do not fill the blocks of a K type, stored in another type of ggml as llama-quantize does",
        "gguf_q4_k: 180 weights are stored as gguf_q5_0, as llama-quantize does: "
        "model.layers.0.self_attn.q_proj.weight and 179 more (576 columns do not fill its blocks)",
        "Nothing: the size counts what is stored. gguf_q4_k:strict leaves these weights as they are instead.",
    ),
    "nothing_excluded": Code(
        ("info",),
        "patterns that leave out layers match none",
        'no layer matches "!vae": nothing was left out by that',
        "Nothing, if the checkpoint lacks what one pattern for many files leaves out. Otherwise correct the pattern.",
    ),
    "identical": Code(
        ("info", "warning"),
        "all compared tensors are the same on both sides; a warning if their names and dtypes are the same too",
        "all compared tensors are identical; is this the quantized checkpoint?",
        "Check that the second checkpoint is the quantized one. Where names and dtypes are the same too, no gate "
        "passes.",
    ),
    "unquantized_changed": Code(
        ("warning", "error"),
        "tensors that both sides store unquantized differ by more than a cast explains; an error if half do, not norms "
        "alone",
        "3 of 65 tensors that both checkpoints store unquantized differ by more than a cast explains: "
        "model.norm.weight, model.layers.0.input_layernorm.weight and 1 more; the worst, model.norm.weight, has "
        "21.3 dB",
        "Check that both checkpoints come from the same training step and the same merge. A quantizer copies what it "
        "does not quantize, or casts it: then each number is the nearest that the other dtype has.",
    ),
    "cast_coarse": Code(
        ("info",),
        "tensors were cast to another dtype without rounding to the nearest: truncated, or rounded at random",
        "3 tensors cast to the neighbours of the nearest numbers: model.embed_tokens.weight, lm_head.weight and 1 "
        "more; truncated, or rounded at random",
        "Nothing urgent: each number is less than one step off. Rounding to the nearest halves the error.",
    ),
    "swapped_sides": Code(
        ("warning",),
        "the original is stored quantized and the quantized checkpoint is not: the arguments may be swapped",
        "the original stores 224 weights quantized, the quantized checkpoint none: are the arguments swapped?",
        "Pass the original first. Until then, no gate passes.",
    ),
    "lossless_codes": Code(
        ("info", "warning"),
        "quantized weights are identical to the original",
        "quantization lost nothing: 224 weights stored quantized, each identical to the original: "
        "model.layers.0.mlp.up_proj.weight and 223 more; the original holds values that are already rounded",
        "Compare with the checkpoint from before the quantization. An info: the original is ternary, binary or "
        "constant, which codes hold exactly.",
    ),
    "importance_unmatched": Code(
        ("error",),
        "the importance matrix names none of the compared weights",
        "the importance matrix names none of the compared weights",
        "Pass the importance matrix that was made for this model.",
    ),
    "importance_missing": Code(
        ("info", "warning"),
        "weights that the importance matrix does not cover; a warning where they are more than 5 % of the quantized "
        "ones, embeddings and the head aside",
        "the importance matrix does not cover 112 of 224 quantized weights, 50% of their elements: "
        "model.layers.16.mlp.up_proj.weight and 111 more",
        "Of the output layer nothing: llama-imatrix leaves it out, unless --process-output is given. Otherwise make "
        "the matrix from the whole of this model: weighted numbers leave these weights out.",
    ),
    "importance_uncovered": Code(
        ("warning",),
        "experts without activations in the importance matrix",
        "3 experts without activations; all their inputs count the same: model.layers.7.mlp.experts.down_proj",
        "Calibrate with more text, so that every expert is reached.",
    ),
    "sensitivity_unmatched": Code(
        ("error",),
        "the sensitivity names none of the compared weights",
        "the sensitivity names none of the compared weights",
        "Pass what `evaluate --sensitivity` wrote of this original.",
    ),
    "sensitivity_missing": Code(
        ("info",),
        "weights that the sensitivity does not cover",
        "the sensitivity does not cover 1 weight: model.layers.0.conv.weight",
        "Nothing: their error is in no predicted divergence. Stacks of experts and convolutions have no alpha.",
    ),
    "other_changes": Code(
        ("info",),
        "norms, biases or other 1-D tensors changed",
        "64 norms, biases or other 1-D tensors changed: model.layers.0.input_layernorm.weight and 63 more; see "
        "other_changes",
        "Nothing, if the quantizer casts them, folds scales into them or corrects biases.",
    ),
    "many_blocks": Code(
        ("info",),
        "too many blocks to report each as a group",
        "more than 512 blocks: not grouped by block",
        "Nothing: layers are still reported one by one.",
    ),
}

# Names in reports of version 0.1.0 → today's.
FORMER_NAMES = {
    "far_off": "implausible_error",
    "order": "permuted",
    "one_sided": "biased_error",
    "below_group": "group_outlier",
    "layout_doubt": "ambiguous_layout",
    "another_weight": "swapped_weight",
    "odd_file": "nonstandard_file",
    "importance_of_nothing": "importance_unmatched",
}
