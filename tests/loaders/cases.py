"""Small checkpoints: one that is loaded and one that is not for each rule of ``findings/runtimes/`` that is run.

A model of Llama with one block; each case changes one thing.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import gguf
import torch
from safetensors.torch import save_file
from torch import Tensor

from quanterr.formats.bnb_4bit import TABLES

WIDTH, INNER, HEADS, WORDS = 64, 128, 4, 32
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "vocab_size": WORDS,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}
BLOCK = "model.layers.0."
LINEAR = {
    **{f"{BLOCK}self_attn.{letter}_proj": (WIDTH, WIDTH) for letter in "qkvo"},
    **{f"{BLOCK}mlp.{side}_proj": (INNER, WIDTH) for side in ("gate", "up")},
    f"{BLOCK}mlp.down_proj": (WIDTH, INNER),
}
GROUP = 32
Config = dict[str, object]
Tensors = dict[str, Tensor]


class Case(NamedTuple):
    """A checkpoint, and the runtime that is asked to load it."""

    runtime: str
    make: Callable[[Path], None]


def _numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * 0.02


def _dense() -> Tensors:
    weights = {f"{name}.weight": _numbers(*shape) for name, shape in LINEAR.items()}
    norms = {f"{BLOCK}{name}_layernorm.weight": torch.ones(WIDTH) for name in ("input", "post_attention")}
    outside = {"model.embed_tokens.weight": _numbers(WORDS, WIDTH), "lm_head.weight": _numbers(WORDS, WIDTH)}
    tensors = weights | norms | outside | {"model.norm.weight": torch.ones(WIDTH)}
    return {name: tensor.bfloat16() for name, tensor in tensors.items()}


def _save(
    folder: Path,
    tensors: Tensors,
    config: Config | None = None,
    name: str = "model.safetensors",
    header: dict[str, str] | None = None,
) -> None:
    if config is not None:
        (folder / "config.json").write_text(json.dumps(CONFIG | config))
    save_file(
        {key: tensor.contiguous() for key, tensor in tensors.items()}, folder / name, {"format": "pt"} | (header or {})
    )


def _quantize(by: Callable[[str, Tensor], Tensors], leave: tuple[str, ...] = ()) -> Tensors:
    """Return the model with all linear layers of the block stored as ``by`` makes them."""
    tensors = _dense()
    for name in LINEAR:
        if name not in leave:
            tensors |= by(name, tensors.pop(f"{name}.weight").float())
    return tensors


def _by_rows(name: str, x: Tensor) -> Tensors:
    scale = x.abs().amax(1, keepdim=True) / 127
    return {f"{name}.weight": (x / scale).round().to(torch.int8), f"{name}.weight_scale": scale.bfloat16()}


def _by_blocks(name: str, x: Tensor) -> Tensors:
    tiles = x.unflatten(1, (-1, GROUP)).unflatten(0, (-1, GROUP))
    scale = tiles.abs().amax((1, 3)) / 448
    codes = (tiles / scale[:, None, :, None]).to(torch.float8_e4m3fn).reshape(x.shape)
    return {f"{name}.weight": codes, f"{name}.weight_scale_inv": scale}


def _by_rows_of_floats(name: str, x: Tensor) -> Tensors:
    scale = x.abs().amax(1, keepdim=True) / 448
    return {f"{name}.weight": (x / scale).to(torch.float8_e4m3fn), f"{name}.weight_scale": scale.bfloat16()}


def _by_nvfp4(name: str, x: Tensor) -> Tensors:
    """Return NVFP4 of compressed-tensors; the codes are all alike."""
    return {
        f"{name}.weight_packed": torch.full((x.shape[0], x.shape[1] // 2), 0x22, dtype=torch.uint8),
        f"{name}.weight_scale": torch.ones(x.shape[0], x.shape[1] // 16).to(torch.float8_e4m3fn),
        f"{name}.weight_global_scale": torch.tensor([100.0]),
    }


def _by_mx(name: str, x: Tensor) -> Tensors:
    """Return MXFP8: a power of two for 32 elements, as its biased exponent."""
    groups = x.unflatten(1, (-1, 32))
    exponent = groups.abs().amax(2).log2().floor() - 8
    codes = (groups / exponent[..., None].exp2()).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {f"{name}.weight": codes.reshape(x.shape), f"{name}.weight_scale": (exponent + 127).to(torch.uint8)}


def pack(codes: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Pack codes of 4 bits along rows, eight in a word, the lowest bits first."""
    words = codes.to(torch.int64).unflatten(1, (-1, 8))
    return sum(words[..., at] << (4 * n) for n, at in enumerate(order)).to(torch.int32)  # type: ignore[union-attr]


def _by_groups(name: str, x: Tensor) -> Tensors:
    groups = x.unflatten(1, (-1, GROUP))
    scale = groups.abs().amax(2) / 7
    codes = (groups / scale[..., None]).round().clamp(-8, 7).reshape(x.shape) + 8
    shape = torch.tensor(x.shape)
    return {
        f"{name}.weight_packed": pack(codes),
        f"{name}.weight_scale": scale.bfloat16(),
        f"{name}.weight_shape": shape,
    }


def by_mlx(name: str, x: Tensor) -> Tensors:
    groups = x.unflatten(1, (-1, GROUP))
    low, high = groups.amin(2), groups.amax(2)
    scale = (high - low) / 15
    codes = ((groups - low[..., None]) / scale[..., None]).round().reshape(x.shape)
    packed = pack(codes).view(torch.uint32)
    return {f"{name}.weight": packed, f"{name}.scales": scale.bfloat16(), f"{name}.biases": low.bfloat16()}


def _by_gptq(name: str, x: Tensor) -> Tensors:
    columns = x.shape[1]
    tensors = _by_groups(name, x)
    return {
        f"{name}.qweight": tensors[f"{name}.weight_packed"].T,
        f"{name}.qzeros": pack(torch.full((columns // GROUP, x.shape[0]), 7)),
        f"{name}.scales": tensors[f"{name}.weight_scale"].T.half(),
        f"{name}.g_idx": torch.arange(columns, dtype=torch.int32) // GROUP,
    }


def _as_bytes(text: str) -> Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def _by_bnb(name: str, x: Tensor, quant_type: str = "nf4") -> Tensors:
    """Return codes of 4 bits for 64 elements, row by row."""
    table = torch.tensor(TABLES[quant_type])
    parts = x.reshape(-1, 64)
    absmax = parts.abs().amax(1)
    codes = (parts[..., None] / absmax[:, None, None] - table).abs().argmin(2).to(torch.uint8).reshape(-1, 2)
    state = {"quant_type": quant_type, "blocksize": 64, "dtype": "bfloat16", "shape": list(x.shape)}
    return {
        f"{name}.weight": (codes[:, :1] << 4) | codes[:, 1:],
        f"{name}.weight.absmax": absmax,
        f"{name}.weight.quant_map": table,
        f"{name}.weight.quant_state.bitsandbytes__{quant_type}": _as_bytes(json.dumps(state)),
    }


def _by_llm_int8(name: str, x: Tensor) -> Tensors:
    largest = x.abs().amax(1)
    codes = (x / largest[:, None] * 127).round().to(torch.int8)
    return {f"{name}.weight": codes, f"{name}.SCB": largest, f"{name}.weight_format": torch.tensor(0).byte()}


def _by_hqq(name: str, x: Tensor) -> Tensors:
    """Return codes of 4 bits for 64 elements; a byte holds one of the first half of the groups in its high bits."""
    groups = x.reshape(-1, 64)
    low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    scale = (high - low) / 15
    codes = ((groups - low) / scale).round().to(torch.uint8)
    first, last = codes.chunk(2)
    facts = {"nbits": 4, "group_size": 64, "axis": 1}
    return {
        f"{name}.W_q": (first << 4) | last,
        f"{name}.scale": scale.bfloat16(),
        f"{name}.zero": (-low / scale).bfloat16(),
        f"{name}.shape": torch.tensor(x.shape),
        f"{name}.packing": _as_bytes("4bit_u8"),
        **{f"{name}.{key}": torch.tensor(n, dtype=torch.int32) for key, n in facts.items()},
    }


def _by_quark(name: str, x: Tensor) -> Tensors:
    """Return codes of 4 bits, transposed, as Quark interleaves them."""
    interleaved, shape = (0, 4, 1, 5, 2, 6, 3, 7), (x.shape[1] // GROUP, x.shape[0])
    groups = x.T.unflatten(0, (-1, GROUP))
    scale = groups.abs().amax(1) / 7
    codes = (groups / scale[:, None]).round().reshape(x.T.shape) + 8
    return {
        f"{name}.weight": pack(codes, interleaved),
        f"{name}.weight_scale": scale.bfloat16(),
        f"{name}.weight_zero_point": pack(torch.full(shape, 8), interleaved),
    }


def _by_quark_in_two_steps(name: str, x: Tensor) -> Tensors:
    """Return NVFP4 as Quark stores it; the codes are all alike."""
    return {
        f"{name}.weight": torch.full((x.shape[0], x.shape[1] // 2), 0x22, dtype=torch.uint8),
        f"{name}.weight_scale": torch.ones(x.shape[0], x.shape[1] // 16).to(torch.float8_e4m3fn),
        f"{name}.weight_scale_2": torch.tensor(0.01),
    }


def _of_quark(weight: object) -> Config:
    """Return the configuration of Quark for all linear layers but the head, with this scheme of weights."""
    scheme = {"weight": weight, "input_tensors": None, "output_tensors": None, "bias": None, "target_device": None}
    export = {"kv_cache_group": [], "min_kv_scale": 0.0, "pack_method": "reorder", "weight_format": "real_quantized"}
    layers: Config = {"layer_quant_config": {}, "layer_type_quant_config": {}, "exclude": ["lm_head"]}
    about = {"quant_method": "quark", "quant_mode": "eager_mode", "version": "0.13", "algo_config": None}
    return {"quantization_config": about | layers | {"global_quant_config": scheme, "export": export}}


def _save_torchao(folder: Path, class_name: str, *, describe_dense: bool = True) -> None:
    """Write the model as torchao 0.18 does: INT8 or FP8 with a scale per row, or INT4 in bytes with one per group."""
    group = GROUP if class_name == "IntxUnpackedToInt8Tensor" else None
    dtype = {"_type": "torch.dtype", "_data": "bfloat16"}
    fields: dict[str, object]
    if class_name == "Int8Tensor":
        fields = {"act_quant_kwargs": None, "reduce_range": False}
        quant = {"_type": "Int8WeightOnlyConfig", "_version": 2, "_data": {"granularity": PER_ROW, "group_size": None}}
    elif class_name == "Float8Tensor":
        preference = {"_type": "KernelPreference", "_data": "AUTO"}
        fields = {"mm_config": None, "act_quant_kwargs": None, "kernel_preference": preference}
        weight = {"_type": "torch.dtype", "_data": "float8_e4m3fn"}
        options = {"granularity": PER_ROW, "weight_dtype": weight}
        quant = {"_type": "Float8WeightOnlyConfig", "_version": 2, "_data": options}
    else:
        target = {"_type": "torch.dtype", "_data": "int4"}
        fields = {"target_dtype": target, "activation_quantization": None}
        granularity = {"_type": "PerGroup", "_version": 1, "_data": {"group_size": GROUP}}
        options = {"granularity": granularity, "weight_dtype": target}
        quant = {"_type": "IntxWeightOnlyConfig", "_version": 2, "_data": options}
    tensors, header = _dense(), {"tensor_names": json.dumps(list(_dense()))}
    header |= {name: json.dumps({"_type": "Tensor"}) for name in tensors if describe_dense}
    for name, shape in LINEAR.items():
        x = tensors.pop(f"{name}.weight").float().unflatten(1, (-1, group or shape[1]))
        scale = x.abs().amax(2) / {"Int8Tensor": 127, "Float8Tensor": 448}.get(class_name, 7)
        codes = (x / scale[..., None]).reshape(shape)
        parts = {
            "qdata": codes.to(torch.float8_e4m3fn) if class_name == "Float8Tensor" else codes.round().to(torch.int8)
        }
        parts["scale"] = scale.bfloat16() if group else scale
        if class_name != "Float8Tensor":
            parts["zero_point"] = torch.zeros_like(scale, dtype=torch.int8)
        about = {"block_size": [1, group or shape[1]], "dtype": dtype}
        described = {"_type": class_name, "_data": fields | about, "_tensor_data_names": list(parts)}
        header[f"{name}.weight"] = json.dumps(described)
        tensors |= {f"{name}._weight_{part}": tensor for part, tensor in parts.items()}
    config = {"quant_method": "torchao", "quant_type": {"default": quant}, "modules_to_not_convert": ["lm_head"]}
    _save(folder, tensors, {"quantization_config": config}, header=header)


def _declare_compressed(form: str, bits: int, inputs: object = None, **weights: object) -> Config:
    """Return the configuration of compressed-tensors for all linear layers but the head."""
    usual = {"num_bits": bits, "type": "int", "symmetric": True, "dynamic": False, "observer": "minmax"}
    group = {"targets": ["Linear"], "weights": usual | weights, "input_activations": inputs, "output_activations": None}
    declared = {"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed"}
    return {"quantization_config": declared | {"config_groups": {"group_0": group}, "ignore": ["lm_head"]}}


TOKENS = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True, "strategy": "token"}
ALONE = _declare_compressed("int-quantized", 8, strategy="channel")
INTEGERS = _declare_compressed("int-quantized", 8, TOKENS, strategy="channel")
PACKED = _declare_compressed("pack-quantized", 4, strategy="group", group_size=GROUP)
FLOATS = _declare_compressed("float-quantized", 8, TOKENS | {"type": "float"}, type="float", strategy="channel")
NVFP4 = _declare_compressed(
    "nvfp4-pack-quantized", 4, type="float", strategy="tensor_group", group_size=16, scale_dtype="torch.float8_e4m3fn"
)
MX = _declare_compressed("mxfp8-quantized", 8, type="float", strategy="group", group_size=32, scale_dtype="torch.uint8")
FLOAT8: Config = {
    "quantization_config": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [GROUP, GROUP],
        "modules_to_not_convert": ["lm_head"],
    }
}
PER_ROW = {"_type": "PerRow", "_version": 1, "_data": {"dim": -1}}
OF_BNB: Config = {"quant_method": "bitsandbytes", "llm_int8_skip_modules": ["lm_head"]}
FOUR_BITS: Config = OF_BNB | {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
OF_HQQ: Config = {
    "quant_method": "hqq",
    "skip_modules": ["lm_head"],
    "quant_config": {
        "weight_quant_params": {"nbits": 4, "group_size": 64, "axis": 1, "channel_wise": True, "optimize": True},
        "scale_quant_params": None,
        "zero_quant_params": None,
        "offload_meta": False,
    },
}
OF_MLX = {"group_size": GROUP, "bits": 4}
QUARK: Config = {
    **{"is_dynamic": False, "ch_axis": -1, "round_method": "half_even", "zero_point_type": "int32"},
    **{"group_size": None, "block_size": None, "scale_format": None, "scale_calculation_mode": None},
    **{"symmetric": None, "is_scale_quant": False, "mx_element_dtype": None},
}
QUARK_INT4 = QUARK | {
    "dtype": "uint4",
    "qscheme": "per_group",
    "group_size": GROUP,
    "symmetric": False,
    "scale_type": "float",
    "observer_cls": "PerGroupMinMaxObserver",
}
QUARK_FP4 = QUARK | {
    "dtype": "fp4",
    "qscheme": "per_group",
    "group_size": 16,
    "scale_format": "float32",
    "scale_type": "float32",
    "observer_cls": "PerBlockMXObserver",
}
QUARK_SCALES = QUARK | {
    "dtype": "fp8_e4m3",
    "qscheme": "per_tensor",
    "is_scale_quant": True,
    "symmetric": True,
    "scale_type": "float32",
    "observer_cls": "PerTensorMinMaxObserver",
}


def _write_gguf(folder: Path, architecture: str = "llama", ggml_type: str = "Q8_0") -> None:
    """Write the model as GGUF, with the tokens that its vocabulary has."""
    writer = gguf.GGUFWriter(folder / "model.gguf", architecture)
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(1)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(WORDS)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"w{n}" for n in range(WORDS)])
    names = {"self_attn.": "attn_", "mlp.": "ffn_", "_proj": "", "input_layernorm": "attn_norm"}
    names |= {"post_attention_layernorm": "ffn_norm", BLOCK: "blk.0.", "attn_o.": "attn_output."}
    names |= {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    for name, tensor in _dense().items():
        for old, new in names.items():
            name = name.replace(old, new)
        x = tensor.float().numpy()
        if x.ndim == 1:
            writer.add_tensor(name, x)
        else:
            wanted = gguf.GGMLQuantizationType[ggml_type]
            writer.add_tensor(name, gguf.quantize(x, wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# FLUX without blocks: the layers outside of blocks are enough for a model of diffusers.
DENOISER: Config = {
    "_class_name": "FluxTransformer2DModel",
    "patch_size": 1,
    "in_channels": WIDTH,
    "num_layers": 0,
    "num_single_layers": 0,
    "attention_head_dim": 32,
    "num_attention_heads": 2,
    "joint_attention_dim": WIDTH,
    "pooled_projection_dim": WIDTH,
    "axes_dims_rope": [8, 12, 12],
}
OF_DENOISER = {
    **dict.fromkeys(("x_embedder", "context_embedder", "proj_out"), (WIDTH, WIDTH)),
    **{f"time_text_embed.text_embedder.linear_{n}": (WIDTH, WIDTH) for n in (1, 2)},
    "time_text_embed.timestep_embedder.linear_1": (WIDTH, 256),
    "time_text_embed.timestep_embedder.linear_2": (WIDTH, WIDTH),
    "norm_out.linear": (2 * WIDTH, WIDTH),
}


def _save_denoiser(folder: Path, name: str = "diffusion_pytorch_model.safetensors", **config: object) -> None:
    weights = {f"{module}.weight": _numbers(*shape) for module, shape in OF_DENOISER.items()}
    biases = {f"{module}.bias": torch.zeros(shape[0]) for module, shape in OF_DENOISER.items()}
    (folder / "config.json").write_text(json.dumps(DENOISER | config))
    _save(folder, weights | biases, name=name)


TRANSFORMERS, MLX, LLAMA_CPP, DIFFUSERS = "transformers", "MLX", "llama.cpp", "diffusers"
DOWN = f"{BLOCK}mlp.down_proj"
CASES = {
    "plain": Case(TRANSFORMERS, lambda to: _save(to, _dense(), {})),
    "no config.json": Case(TRANSFORMERS, lambda to: _save(to, _dense())),
    "unknown class": Case(TRANSFORMERS, lambda to: _save(to, _dense(), {"model_type": "no_such_model"})),
    "compressed-tensors INT8": Case(TRANSFORMERS, lambda to: _save(to, _quantize(_by_rows), INTEGERS)),
    "compressed-tensors INT8, inputs unquantized": Case(TRANSFORMERS, lambda to: _save(to, _quantize(_by_rows), ALONE)),
    "compressed-tensors FP8": Case(TRANSFORMERS, lambda to: _save(to, _quantize(_by_rows_of_floats), FLOATS)),
    "compressed-tensors NVFP4": Case(TRANSFORMERS, lambda to: _save(to, _quantize(_by_nvfp4), NVFP4)),
    "compressed-tensors MXFP8": Case(TRANSFORMERS, lambda to: _save(to, _quantize(_by_mx), MX)),
    "compressed-tensors packed INT4": Case(TRANSFORMERS, lambda to: _save(to, _quantize(_by_groups), PACKED)),
    "compressed-tensors, a layer left dense": Case(
        TRANSFORMERS, lambda to: _save(to, _quantize(_by_groups, leave=(DOWN,)), PACKED)
    ),
    "FP8 in blocks": Case(TRANSFORMERS, lambda to: _save(to, _quantize(_by_blocks), FLOAT8)),
    "unknown quant_method": Case(
        TRANSFORMERS,
        lambda to: _save(to, _quantize(_by_rows), {"quantization_config": {"quant_method": "no_such_method"}}),
    ),
    "no quant_method": Case(TRANSFORMERS, lambda to: _save(to, _quantize(by_mlx), {"quantization_config": OF_MLX})),
    "codes of MLX": Case(TRANSFORMERS, lambda to: _save(to, _quantize(by_mlx), {"quantization": OF_MLX})),
    "undeclared INT8": Case(TRANSFORMERS, lambda to: _save(to, _quantize(_by_rows), {})),
    "bitsandbytes NF4": Case(
        TRANSFORMERS, lambda to: _save(to, _quantize(_by_bnb), {"quantization_config": FOUR_BITS})
    ),
    "bitsandbytes FP4": Case(
        TRANSFORMERS,
        lambda to: _save(
            to,
            _quantize(partial(_by_bnb, quant_type="fp4")),
            {"quantization_config": FOUR_BITS | {"bnb_4bit_quant_type": "fp4"}},
        ),
    ),
    "bitsandbytes INT8": Case(
        TRANSFORMERS,
        lambda to: _save(to, _quantize(_by_llm_int8), {"quantization_config": OF_BNB | {"load_in_8bit": True}}),
    ),
    "torchao INT8": Case(TRANSFORMERS, partial(_save_torchao, class_name="Int8Tensor")),
    "torchao FP8": Case(TRANSFORMERS, partial(_save_torchao, class_name="Float8Tensor")),
    "torchao INT4 in bytes": Case(TRANSFORMERS, partial(_save_torchao, class_name="IntxUnpackedToInt8Tensor")),
    "torchao, dense tensors without description": Case(
        TRANSFORMERS, partial(_save_torchao, class_name="Int8Tensor", describe_dense=False)
    ),
    "HQQ": Case(TRANSFORMERS, lambda to: _save(to, _quantize(_by_hqq), {"quantization_config": OF_HQQ})),
    "Quark INT4": Case(TRANSFORMERS, lambda to: _save(to, _quantize(_by_quark), _of_quark(QUARK_INT4))),
    "Quark NVFP4": Case(
        TRANSFORMERS, lambda to: _save(to, _quantize(_by_quark_in_two_steps), _of_quark([QUARK_FP4, QUARK_SCALES]))
    ),
    "GGUF": Case(TRANSFORMERS, _write_gguf),
    "GGUF of an unknown class": Case(TRANSFORMERS, lambda to: _write_gguf(to, "grok")),
    "MLX: plain": Case(MLX, lambda to: _save(to, _dense(), {})),
    "MLX: another file name": Case(MLX, lambda to: _save(to, _dense(), {}, "weights.safetensors")),
    "MLX: unknown class": Case(MLX, lambda to: _save(to, _dense(), {"model_type": "no_such_model"})),
    "MLX: affine": Case(MLX, lambda to: _save(to, _quantize(by_mlx), {"quantization": OF_MLX})),
    "MLX: undeclared": Case(MLX, lambda to: _save(to, _quantize(by_mlx), {})),
    "MLX: INT8 of compressed-tensors": Case(MLX, lambda to: _save(to, _quantize(_by_rows), INTEGERS)),
    "MLX: unknown quant_method": Case(
        MLX, lambda to: _save(to, _quantize(_by_rows), {"quantization_config": {"quant_method": "bitsandbytes"}})
    ),
    "MLX: GPTQ": Case(
        MLX,
        lambda to: _save(
            to,
            _quantize(_by_gptq),
            {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True}},
        ),
    ),
    "MLX: GGUF": Case(MLX, _write_gguf),
    "llama.cpp: Q8_0": Case(LLAMA_CPP, _write_gguf),
    "llama.cpp: Q4_0": Case(LLAMA_CPP, partial(_write_gguf, ggml_type="Q4_0")),
    "llama.cpp: F32": Case(LLAMA_CPP, partial(_write_gguf, ggml_type="F32")),
    "llama.cpp: unknown class": Case(LLAMA_CPP, partial(_write_gguf, architecture="no_such_model")),
    "llama.cpp: no experts": Case(LLAMA_CPP, partial(_write_gguf, architecture="grok")),
    "llama.cpp: keys of the architecture lacking": Case(LLAMA_CPP, partial(_write_gguf, architecture="granite")),
    "llama.cpp: safetensors": Case(LLAMA_CPP, lambda to: _save(to, _dense(), {})),
    "diffusers: plain": Case(DIFFUSERS, _save_denoiser),
    "diffusers: another file name": Case(DIFFUSERS, partial(_save_denoiser, name="model.safetensors")),
    "diffusers: unknown quant_method": Case(
        DIFFUSERS, partial(_save_denoiser, quantization_config={"quant_method": "gptq"})
    ),
}
