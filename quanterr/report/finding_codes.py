"""The codes of findings as data, for the guide and ``quanterr explain``: meaning, an example, what to do."""

from typing import NamedTuple


class FindingCode(NamedTuple):
    """A row of CODES. Severities: info (worth knowing), warning (look at it), error (the result is unreliable)."""

    severities: tuple[str, ...]
    meaning: str
    example: str  # a message as a report shows it
    remedy: str


CODES = {
    # headers, labels, config.json
    "nonstandard_file": FindingCode(
        ("warning",),
        "a file is non-standard and was accepted",
        "model.safetensors: 8 trailing bytes after the last tensor; some loaders ignore them, others refuse",
        "Save the file again with the safetensors library. Without --lenient, such files are refused.",
    ),
    "unread_weights": FindingCode(
        ("info", "warning"),
        "the folder contains weight files that were not read; a warning if tensors of the same name have another shape "
        "or size",
        "model-fp8: weight files in the same folder were not read: consolidated.safetensors",
        "Nothing, if the file is for another runtime. If a quantizer left it unchanged, or if it belongs to another "
        "model, remove it: some runtimes read it instead of the others.",
    ),
    "config_mismatch": FindingCode(
        ("warning",),
        "config.json, or the metadata of a GGUF file, declares another model or other codes than those stored",
        "config.json declares codes of 4 bits, but the tensors hold codes of 8 bits: read as stored",
        "Check that config.json belongs to this model. Loaders that follow it will misread the weights.",
    ),
    "label_without_layer": FindingCode(
        ("warning",),
        "a header labels layers that are not stored",
        "the header of the quantized checkpoint labels layers that are not stored: blocks.7.attn.qkv",
        "Check that no shard is missing and that the header was written for this file.",
    ),
    "outlier_column": FindingCode(
        ("info",),
        "a few outlier columns set the scales of most rows",
        "model.layers.3.mlp.down_proj.weight: its scales allow no more than 21.3 dB where its peers reach 41.2: 2 "
        "outlier columns, 17, 900, set the scale of 96 % of the rows; without them the SNR would be about 38 dB",
        "Use a scale per block of columns, smooth or rotate the layer's inputs, or leave the weight unquantized.",
    ),
    "computed_buffer": FindingCode(
        ("info",),
        "tensors that the model computes itself are stored on one side only",
        "only the original checkpoint stores 1 tensor that the model computes: embeddings.position_ids; the stored "
        "values equal the computed ones",
        "Nothing. Loaders compute these tensors (position_ids, inv_freq, causal masks).",
    ),
    "rotated_weights": FindingCode(
        ("error",),
        "config.json declares rotations that are fused into the stored weights, and that their inputs do not undo",
        "config.json of the quantized checkpoint declares rotations fused into its weights: R1 (hadamard)",
        "Compare the checkpoint from before the rotations were fused, or use the rotated original.",
    ),
    "config_without_codes": FindingCode(
        ("warning",),
        "config.json declares a quantization method, but no weight is stored quantized",
        "config.json declares quant_method fp8, but no weight is stored quantized",
        "Check that this is the quantized checkpoint, and not the original with a copied config.json.",
    ),
    "codes_without_scale": FindingCode(
        ("warning",),
        "codes are stored without a scale",
        "codes without a scale: model.layers.0.mlp.up_proj.weight",
        "If the model was quantized with scales, they are missing from this file: write the file again.",
    ),
    "dummy_scale": FindingCode(
        ("warning",),
        "an unquantized weight has a scale of 1",
        "lm_head.weight is not quantized but has a scale of 1, which was ignored",
        "Nothing, if the layer was excluded on purpose. Otherwise, the quantizer skipped it.",
    ),
    "fp8_without_scale": FindingCode(
        ("info",),
        "FP8 weights without a scale, read as plain casts",
        "FP8 without a scale, read as a plain cast: 304 tensors: blocks.0.attn.qkv.weight and 303 more",
        "Nothing, if the weights were cast. If they were quantized with scales, the scales are missing from this file.",
    ),
    "ambiguous_layout": FindingCode(
        ("warning",),
        "the stored tensors allow more than one reading, or metadata contradicts them",
        "model.layers.0.mlp.up_proj.weight: config.json declares group_size 64, the scale has 16 blocks of 2048 "
        "columns",
        "Find out which reading is correct, and correct the metadata. Runtimes that follow it may read other values.",
    ),
    "not_read": FindingCode(
        ("error",),
        "no format fits the tensors of a weight",
        "model.layers.0.mlp.up_proj.weight: not read: its scale is missing",
        "Read the reason, then see quanterr guide formats and quanterr guide troubleshooting.",
    ),
    # scales and sums of one weight
    "nonfinite_original": FindingCode(
        ("error",),
        "NaN or infinite elements in the original",
        "model.layers.3.mlp.down_proj.weight: 2 of 8,388,608 elements of the original weight are NaN or infinite",
        "Find out where the original overflowed. The weight fails every gate until all its elements are finite.",
    ),
    "nonfinite_quantized": FindingCode(
        ("error",),
        "NaN or infinite elements in the quantized weight",
        "model.layers.3.mlp.down_proj.weight: 4,096 of 8,388,608 elements of the quantized weight are NaN or infinite",
        "Quantize this layer again. NaN codes and infinite scales are the usual causes.",
    ),
    "scale_nonfinite": FindingCode(
        ("error",),
        "scales of weights or activations are NaN or infinite",
        "model.layers.3.mlp.up_proj.weight: 1 of 2,048 scales in model.layers.3.mlp.up_proj.weight_scale are NaN or "
        "infinite",
        "Quantize this layer again. A division by an all-zero row or block is the usual cause.",
    ),
    "scale_negative": FindingCode(
        ("warning",),
        "scales are negative",
        "model.layers.3.mlp.up_proj.weight: 12 of 2,048 scales in model.layers.3.mlp.up_proj.weight_scale are negative",
        "Check the quantizer. Negative scales that the codes fit, as AutoRound writes them, are not reported.",
    ),
    "scale_zero": FindingCode(
        ("warning",),
        "scales are zero, and so are all elements that they apply to",
        "model.layers.3.mlp.up_proj.weight: 1 of 2,048 scales in model.layers.3.mlp.up_proj.weight_scale are zero",
        "A scale underflowed: store it in a wider dtype. Scales of elements that are zero in the original are not "
        "reported.",
    ),
    "scale_constant": FindingCode(
        ("info",),
        "every scale of a weight is 1, as if there were none",
        "every scale of 304 weights is 1: blocks.0.attn.qkv.weight, blocks.0.attn.proj.weight and 302 more",
        "Nothing, if the weights were cast without scaling. Otherwise, the scales were dropped.",
    ),
    "saturated": FindingCode(
        ("warning",),
        "a weight has more codes at the end of their range than a correct scale produces",
        "model.layers.3.mlp.up_proj.weight: 6.2 % of the codes are at the end of their range: larger values were "
        "clipped",
        "Use a larger scale, or finer ones.",
    ),
    "implausible_error": FindingCode(
        ("warning", "error"),
        "a weight has more error than its bit width explains",
        "model.layers.3.mlp.up_proj.weight: -2.9 dB as int8_row; norm 1.001 times the original's, cosine 0.0021: rows "
        "or columns permuted, a rotation, or another tensor",
        "Compare the scale and the rows of this layer with what the quantizer wrote. Often another finding about the "
        "same layer names the cause.",
    ),
    "below_usual": FindingCode(
        ("warning",),
        "the SNR of a weight is far below the usual level of its format",
        "model.layers.3.mlp.up_proj.weight: 17.4 dB as fp8_row; 31 to 33 dB is usual",
        "Quantize it again, or leave it in higher precision.",
    ),
    "biased_error": FindingCode(
        ("warning",),
        "the error of a weight has a nonzero mean, as incorrect zero points produce",
        "model.layers.3.mlp.up_proj.weight: the error is biased: its mean 0.0021 makes up 64% of the squared error; "
        "the zero points are wrong, or rounding always goes one way",
        "Compare the zero points (some formats store them minus one) and the rounding with the quantizer's.",
    ),
    "dead_rows": FindingCode(
        ("warning",),
        "rows are zero that are not zero in the original",
        "model.layers.3.mlp.up_proj.weight: 2 rows of zeros that the original does not have: 17, 1040",
        "Quantize this layer again.",
    ),
    "excess_error": FindingCode(
        ("info", "warning", "error"),
        "a weight is worse than its stored scales allow: its codes are not the nearest to the original",
        "model.layers.3.mlp.up_proj.weight: 13.6 dB, where its stored scales allow 31.8 dB: 71 % of its codes are two "
        "or more steps off",
        "Compare codes, scales and their order with what the quantizer wrote. A warning: check the rounding. An info: "
        "no more than GPTQ, AutoRound, or zero points rounded after the codes leave.",
    ),
    "another_source": FindingCode(
        ("warning",),
        "codes are a step or two off, as if other values than the original's had been quantized",
        "another source? 112 weights lost more than rounding costs; of 8 read again 8 were not made from the "
        "original's values alone: model.layers.0.mlp.up_proj.weight and 7 more; 1.7 to 3.4 dB are lost: no rounding, "
        "with or without error compensation, makes these codes from the original: a finetune, another revision, or "
        "noise; few directions hold the difference: a LoRA was merged into one side",
        "Compare with the checkpoint that was actually quantized: the same revision, the same merged adapters, not "
        "quantized before. A third sign is the grid of an earlier format: then quantize from the original instead.",
    ),
    "scale_loss": FindingCode(
        ("info", "warning", "error"),
        "stored scales do not suit the values: with good scales, the nearest codes would lose much less",
        "model.layers.3.mlp.up_proj.weight: codes use 2 of 8 bits: scales are 64 x what the values need: its scales "
        "overall allow 7.6 dB, good ones 43.5 dB",
        "Derive scales from the original: for each group its largest absolute value divided by the largest code. Check "
        "the unit of the stored scales, and whether several scales were multiplied.",
    ),
    "clipped": FindingCode(
        ("warning",),
        "many values of the original are beyond the range of their scales, and clipping them costs more than rounding",
        "model.layers.3.mlp.up_proj.weight: 0.27 % of the original's values are beyond the range of their scales: "
        "33.9 dB at best, 43.5 dB without clipping",
        "Use larger scales, or finer ones. Scales of zero lose all values.",
    ),
    "underflow": FindingCode(
        ("info", "warning"),
        "the values of a weight are too small for the scales of its format, and became zeros or coarse values",
        "blk.3.ffn_up.weight: its values are too small for the scales of gguf_q8_0, which are float16: they become "
        "zeros, or a few coarse values",
        "Leave this layer in higher precision. An info: only a few groups, next to far larger values, are concerned.",
    ),
    "excess_rows": FindingCode(
        ("info", "warning"),
        "rows of a weight are far worse than their scales allow",
        "model.layers.3.mlp.up_proj.weight: 2 sampled rows (17, 19): 9.1 dB at worst; their scales allow 38.2 dB",
        "Compare these rows with what the quantizer wrote.",
    ),
    "excess_columns": FindingCode(
        ("info", "warning"),
        "columns of a weight are far worse than their scales allow",
        "model.layers.3.mlp.up_proj.weight: 4 sampled columns (252 to 255): 0.0 dB at worst, all zero; their scales "
        "allow 38.2 dB",
        "Compare these columns with what the quantizer wrote.",
    ),
    "excess_blocks": FindingCode(
        ("info", "warning"),
        "blocks of 64 columns of a row are far worse than their scales allow",
        "model.layers.3.mlp.up_proj.weight: 1 block of 64 columns, the worst at row 3, columns 128 to 191: 13.6 dB at "
        "worst, 1.21 times the original's; their scales allow 38.2 dB",
        "Compare these blocks, and their scales, with what the quantizer wrote.",
    ),
    "scale_extreme": FindingCode(
        ("warning",),
        "activation scales are implausibly large or small",
        "activation scales are above 1e+12 or below 1e-12 in 1 tensor of the quantized checkpoint: "
        "model.layers.0.mlp.up_proj.input_scale",
        "Recalibrate. No weight depends on these scales, but runtimes that use them compute zeros or infinities.",
    ),
    "scale_unlike": FindingCode(
        ("warning",),
        "scales of activations or of the KV cache differ from the same module's in other blocks by a factor of 1,000, "
        "equal the scale of the weight, or are missing",
        "activation scales of the quantized checkpoint are far from their neighbours in 1 tensor: "
        "model.layers.3.mlp.down_proj.input_scale (1.2e-07; the others' median is 0.0123)",
        "Recalibrate. No weight depends on these scales, but runtimes that use them give wrong outputs.",
    ),
    "scale_misfit": FindingCode(
        ("warning",),
        "the number of activation scales fits neither the rows nor the columns of their weight",
        "activation scales whose number fits neither the rows nor the columns of their weight: "
        "model.layers.0.mlp.up_proj.input_scale (7)",
        "Recalibrate, or find out which other layer the scales belong to.",
    ),
    "mixed_row_orders": FindingCode(
        ("error",),
        "a GGUF file stores the rows of some q and k in pairs, and of others in halves",
        "rows of heads are in pairs in model.layers.0.self_attn.q_proj.weight, but in halves in "
        "model.layers.0.self_attn.k_proj.weight: runtimes rotate all of them the same way",
        "Convert the model again. Runtimes rotate all heads the same way.",
    ),
    "bias_corrected": FindingCode(
        ("info", "warning"),
        "biases of quantized weights changed, as some quantizers change them to compensate for the weight's error",
        "2 biases of quantized weights changed, as corrections do: layers.0.attention.key.bias, "
        "layers.1.attention.key.bias; outputs shift by at most 0.083 times the norm of their row, and by 0.31 times "
        "the error that the weight causes on typical inputs",
        "Nothing, for an info. A warning: check the model's outputs; a correction is no larger than the error that the "
        "weight causes on inputs of the size that the norm before it gives.",
    ),
    "bad_table": FindingCode(
        ("error",),
        "a tensor outside any weight, such as rope_freqs, holds NaN, infinities or implausibly large numbers",
        "NaN, infinity or values above 1e+09 in 1 tensor of the quantized checkpoint outside any weight: "
        "rope_freqs.weight",
        "Copy the tensor from the original. Runtimes read it.",
    ),
    "bad_rows": FindingCode(
        ("info", "warning"),
        "rows have far more error than the other rows of their weight",
        "model.layers.3.mlp.up_proj.weight: 3.1 dB in row 17, 31.4 dB overall: 1 row with far more error than the rest "
        "(17)",
        "One bad row is damage: quantize the layer again. Bad rows in many layers come from outliers: use finer "
        "scales.",
    ),
    "zero_original": FindingCode(
        ("warning",),
        "the original is all zeros, the quantized weight is not",
        "model.layers.3.bias: the original is all zeros, the quantized weight is not",
        "Check what wrote this tensor.",
    ),
    # repairs tried on a sample of a doubtful weight
    "scale_factor": FindingCode(
        ("warning", "error"),
        "one factor, or one per row, column or block, corrects the weight: its scales are wrong",
        "model.layers.3.mlp.up_proj.weight: -5.9 dB as fp8_tensor: the scale is off by a factor of 448; 31.6 dB once "
        "corrected on a sample",
        "Check how the scale is applied: omitted, applied twice, inverted, shifted, or in another order.",
    ),
    "zero_points": FindingCode(
        ("warning", "error"),
        "one shift per row or block corrects the weight: its zero points are wrong",
        "model.layers.3.mlp.up_proj.weight: 6.0 dB as gptq: one shift per block corrects it (1.1e-02 on average): its "
        "zero points are wrong; 19.8 dB once corrected on a sample",
        "Check the convention: some formats store zero points minus one.",
    ),
    "permuted": FindingCode(
        ("warning", "error"),
        "another order of rows or columns corrects the weight: they were permuted, or nibbles swapped",
        "model.layers.3.mlp.up_proj.weight: -3.0 dB as nvfp4: its columns are in a different order (neighbours are "
        "swapped, as with nibbles in the wrong order); 20.2 dB once corrected on a sample",
        "Look for a permutation that only one side undoes: nibbles, act-order, g_idx, rotary halves and pairs.",
    ),
    "transposed": FindingCode(
        ("warning", "error"),
        "the matrix is stored transposed",
        "h.0.mlp.c_fc.weight: -3.1 dB as int8_row: it is stored transposed; 38.2 dB once corrected on a sample",
        "Transpose the matrix, or correct its metadata.",
    ),
    "swapped_weight": FindingCode(
        ("error",),
        "the values of a weight match another weight of the original",
        "model.layers.3.mlp.up_proj.weight: its values match model.layers.4.mlp.up_proj.weight of the original "
        "(cosine 0.9998 on a sample)",
        "Find out where the layers were swapped.",
    ),
    # all weights together
    "group_outlier": FindingCode(
        ("warning",),
        "the SNR of a weight is far below the other weights of its format and role",
        "model.layers.3.mlp.up_proj.weight: 17.4 dB; the median of the 64 weights of fp8_row in mlp is 31.5 dB",
        "Quantize it again, or leave it in higher precision.",
    ),
    "norm_offset": FindingCode(
        ("warning", "error"),
        "norms differ by one: centred on 0 on one side and on 1 on the other; a warning if all norms do, else an error",
        "65 norms of the quantized checkpoint are the original's plus 1 throughout: model.norm.weight and 64 more",
        "Some models compute (1 + weight) · x: check that the runtime of the quantized model expects what is stored.",
    ),
    "folded_scales": FindingCode(
        ("info", "error"),
        "scales were folded into the preceding layer; the comparison undoes that",
        "scales of 3 weights (model.layers.0.self_attn.q_proj.weight and 2 more) were folded into "
        "model.layers.0.input_layernorm.weight; the comparison undoes that: 19.8 dB on a sample of "
        "model.layers.0.self_attn.q_proj.weight, 6.1 dB as stored",
        "Nothing, if the quantizer does this (AWQ, SmoothQuant) and both tensors are used together. An error: some "
        "layers, or a bias, lack the scales; quantize them again.",
    ),
    "massive_activations": FindingCode(
        ("info",),
        "a few tokens have inputs of a weight a hundred times as large as all others (evaluate): massive activations, "
        "which super weights make and pass on",
        "massive activations: 1 changed weight with an input 310 times as large as others: "
        "model.layers.1.mlp.down_proj.weight",
        "Measure the weight alone with `evaluate --swap`: predictions are the least certain here. Keep it unquantized "
        "if it matters; one or two weights of a model are small.",
    ),
    "not_emulated": FindingCode(
        ("warning",),
        "the files declare rounding of activations, keys or values that evaluate does not emulate",
        "inputs of 112 weights were not rounded: model.layers.0.mlp.up_proj.weight: its files declare a static "
        "activation scale, but store no input_scale",
        "The numbers describe the weights alone. --activations none --kv none says so, and is judged accordingly.",
    ),
    "reference_versions": FindingCode(
        ("info",),
        "other versions of torch or transformers compute the candidates than computed the reference (evaluate)",
        "the reference was computed by torch 2.12.0, now 2.13.0: numbers may differ by roundings",
        "Save the reference again with `evaluate --save-reference` to compare to the last digit.",
    ),
    "sibling_scales": FindingCode(
        ("info", "warning"),
        "weights that runtimes fuse have different global scales, or different static scales of their inputs, of which "
        "a runtime uses one; a warning from a ratio of 4 on, of inputs from 1.25 on",
        "runtimes fuse 12 groups of weights whose global scales differ, by a factor of up to 2.14: "
        "model.layers.0.self_attn.k_proj.weight, model.layers.1.self_attn.k_proj.weight and 10 more; "
        "model.layers.7.self_attn.k_proj.weight has 20.6 dB as stored and 5.5 dB as fused",
        "Quantize fused weights (q, k and v; gate and up; w1 and w3) with one shared global scale.",
    ),
    "no_input_scale": FindingCode(
        ("info",),
        "FP8 layers of ComfyUI without input_scale, whose inputs are clamped at 448",
        "57 layers in FP8 without input_scale: blocks.0.mlp.up_proj.weight and 56 more; ComfyUI uses a scale of 1 and "
        "clamps inputs at 448",
        "Calibrate an input_scale, or set full_precision_matrix_mult in the layer's label.",
    ),
    "missing_input_scale": FindingCode(
        ("warning",),
        "config.json declares static scales of inputs, and the file has none for some weights",
        "static scales of inputs are declared, and 112 weights have no input_scale: model.layers.0.mlp.up_proj.weight, "
        "model.layers.0.mlp.gate_proj.weight and 110 more",
        "Calibrate again, or declare dynamic activations. Runtimes refuse such a file or take a scale of 1.",
    ),
    "missing_rotation": FindingCode(
        ("warning",),
        "config.json declares a rotation of weights that nothing undoes at run time, or whose matrix is not stored",
        "config.json declares the transform R4: it is applied as weight_input only, and nothing undoes it; the weights "
        "stay rotated at run time",
        "Export the model again with both sides of the transform, and with its matrix.",
    ),
    "missing_kv_scale": FindingCode(
        ("warning",),
        "config.json declares a KV cache of FP8, and attention modules have no scale of keys or values",
        "a KV cache of FP8 is declared, and 32 attention modules have no scale of keys or values: "
        "model.layers.0.self_attn, model.layers.1.self_attn and 30 more; runtimes take 1",
        "Calibrate k_scale and v_scale. With 1, keys above 448 are clamped and small ones lose their last bits.",
    ),
    "left_unquantized": FindingCode(
        ("warning",),
        "a recipe cannot store some weights and leaves them unquantized; the numbers describe the others",
        "gguf_q4_k: 180 weights cannot be stored and stay: model.layers.0.self_attn.q_proj.weight and 179 more "
        "(gguf_q4_k: its 576 columns are not a multiple of 256)",
        "Choose a recipe that can store them. Otherwise the numbers describe only the weights that are quantized.",
    ),
    "fallback_recipe": FindingCode(
        ("info",),
        "weights whose rows do not fill the blocks of a K type, stored in another type of ggml as llama-quantize does",
        "gguf_q4_k: 180 weights are stored as gguf_q5_0, as llama-quantize does: "
        "model.layers.0.self_attn.q_proj.weight and 179 more (576 columns do not fill its blocks)",
        "Nothing: the size counts what is stored. gguf_q4_k:strict leaves these weights as they are instead.",
    ),
    "nothing_excluded": FindingCode(
        ("info",),
        "a pattern that excludes layers matches none",
        '"!vae" excludes nothing: no layer matches it',
        "Nothing, if you use one pattern for many files and this one lacks them. Otherwise, correct the pattern.",
    ),
    "identical": FindingCode(
        ("info", "warning"),
        "all compared tensors are the same on both sides; a warning if their names and dtypes are the same too",
        "all compared tensors are identical; is this the quantized checkpoint?",
        "Check that the second checkpoint is the quantized one. If names and dtypes are the same too, no gate passes.",
    ),
    "unquantized_changed": FindingCode(
        ("warning", "error"),
        "tensors that both sides store unquantized differ by more than a cast explains; an error if at least half do, "
        "and not norms alone",
        "3 of 65 tensors that both checkpoints store unquantized differ by more than a cast explains: "
        "model.norm.weight, model.layers.0.input_layernorm.weight and 1 more; the worst, model.norm.weight, has "
        "21.3 dB",
        "Check that both checkpoints come from the same training step and the same merge. A quantizer copies what it "
        "does not quantize, or casts it to the nearest values of another dtype.",
    ),
    "cast_coarse": FindingCode(
        ("info",),
        "tensors were cast to another dtype without rounding to the nearest: truncated, or rounded at random",
        "3 tensors cast without rounding to the nearest value: model.embed_tokens.weight, lm_head.weight and 1 more; "
        "truncated, or rounded at random",
        "Nothing urgent: each number is less than one step off. Rounding to the nearest value halves the error.",
    ),
    "swapped_sides": FindingCode(
        ("warning",),
        "the original is stored quantized and the quantized checkpoint is not: the arguments may be swapped",
        "the original stores 224 weights quantized, the quantized checkpoint none: are the arguments swapped?",
        "Pass the original first. Until then, no gate passes.",
    ),
    "lossless_codes": FindingCode(
        ("info", "warning"),
        "quantized weights are identical to the original",
        "quantization lost nothing: 224 weights stored quantized, each identical to the original: "
        "model.layers.0.mlp.up_proj.weight and 223 more; the original holds values that are already rounded",
        "Compare with the checkpoint from before the quantization. An info: the original is ternary, binary or "
        "constant, and codes hold such values exactly.",
    ),
    "importance_unmatched": FindingCode(
        ("error",),
        "the importance matrix names none of the compared weights",
        "the importance matrix names none of the compared weights",
        "Pass the importance matrix that was made for this model.",
    ),
    "importance_missing": FindingCode(
        ("info", "warning"),
        "the importance matrix does not cover all weights; a warning if it lacks more than 5 % of the quantized "
        "weights, embeddings and the head aside",
        "the importance matrix does not cover 112 of 224 quantized weights, 50% of their elements: "
        "model.layers.16.mlp.up_proj.weight and 111 more",
        "Nothing, for the output layer: llama-imatrix skips it unless --process-output is given. Otherwise, collect "
        "the matrix from the whole model: weighted numbers leave these weights out.",
    ),
    "importance_uncovered": FindingCode(
        ("warning",),
        "the importance matrix has no activations for some experts",
        "no activations for 3 experts, whose inputs are weighted equally: model.layers.7.mlp.experts.down_proj",
        "Calibrate with more text, so that every expert receives tokens.",
    ),
    "sensitivity_unmatched": FindingCode(
        ("error",),
        "the sensitivity names none of the compared weights",
        "the sensitivity names none of the compared weights",
        "Pass the file that `evaluate --sensitivity` wrote for this original.",
    ),
    "sensitivity_missing": FindingCode(
        ("info",),
        "the sensitivity does not cover all weights",
        "the sensitivity does not cover 1 weight: model.layers.0.conv.weight",
        "Nothing. Predictions leave these weights out.",
    ),
    "other_changes": FindingCode(
        ("info",),
        "norms, biases or other 1-D tensors changed, other than biases that bias_corrected names",
        "64 norms, biases or other 1-D tensors changed: model.layers.0.input_layernorm.weight and 63 more; see "
        "other_changes",
        "Nothing, if the quantizer casts them, folds scales into them or corrects biases.",
    ),
    "many_blocks": FindingCode(
        ("info",),
        "the model has too many blocks to report each as a group",
        "more than 512 blocks: not grouped by block",
        "Nothing. Layers are still reported one by one.",
    ),
}

# Name in reports of version 0.1.0 → present name.
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
