"""Golden cases of packed integers: layers of fixtures with their configuration, and what numpy makes of the rest."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))  # tests/support/packing.py

from support import packing

Tensors = dict[str, Tensor]
Ends = tuple[int | None, ...]  # the end of each axis

DOWN, Q_PROJ, K_PROJ = (f"model.layers.0.{name}" for name in ("mlp.down_proj", "self_attn.q_proj", "self_attn.k_proj"))
EXPERTS = "model.layers.0.mlp.experts.gate_up_proj"
UP = "model.layers.{}.mlp.up_proj"
NO_ENDS: dict[str, Ends] = {}


class Golden(NamedTuple):
    """A case to be written."""

    case: str
    stored: Tensors
    values: Tensors
    config: dict[str, Any]
    origin: dict[str, str]


class Layer(NamedTuple):
    """A layer of a fixture; ``cut`` maps each part, or "" for the values, to the ends of its axes."""

    name: str
    cut: dict[str, Ends] = NO_ENDS


CASES: tuple[tuple[str, str, tuple[Layer, ...]], ...] = (
    ("gptq", "gptq_v1_w2_g64_sym", (Layer(DOWN),)),
    ("gptq", "gptq_v1_w4_channel", (Layer(DOWN),)),
    ("gptq", "gptq_v1_w4_g32_asym_gptqmodel", (Layer(DOWN),)),
    ("gptq", "gptq_v1_w4_g32_descact", (Layer(DOWN),)),
    ("gptq", "gptq_v1_w8_g128_sym", (Layer(DOWN),)),
    ("gptq", "autoround_gptq_w4_g32_sym", (Layer(DOWN),)),
    ("gptq_v2", "gptq_v2_w3_g32_asym", (Layer(DOWN),)),
    ("gptq_v2", "gptq_v2_w4_g32_asym", (Layer(DOWN),)),
    ("gptq_v2", "autoround_plain_w2_g32_asym", (Layer(DOWN),)),
    ("gptq_v2", "autoround_plain_w4_g32_asym", (Layer(DOWN),)),
    ("gptq_p", "gptq_p_w3_g32_asym", (Layer(DOWN),)),
    ("gptq_p", "gptq_p_w6_g32_asym", (Layer(DOWN),)),
    ("gptq_p", "gptq_p_w7_g32_asym", (Layer(DOWN),)),
    ("awq_gemm", "awq_gemm_channel", (Layer(DOWN),)),
    ("awq_gemm", "awq_gemm_g128", (Layer(DOWN),)),
    ("awq_gemv", "awq_gemv_g128", (Layer(DOWN),)),
    ("awq_gemv_fast", "awq_gemvfast_g64", (Layer(DOWN),)),
    (
        "awq_marlin",
        "awq_marlin_g128",
        tuple(Layer(name, {"qweight": (None, 128), "scales": (None, 64), "": (64,)}) for name in (DOWN, Q_PROJ)),
    ),
    ("ct_pack", "ct_pack_all_bits_dense", tuple(Layer(UP.format(n)) for n in (2, 4, 6, 10, 12))),
    ("ct_pack", "ct_pack_legacy_floor_bits", tuple(Layer(UP.format(n)) for n in (1, 5))),
    ("ct_pack", "ct_w4a16_g32_asym", (Layer(DOWN),)),
    ("ct_pack", "ct_w4a16_experts_3d", (Layer(EXPERTS, {"weight_packed": (2,), "weight_scale": (2,), "": (2,)}),)),
    ("ct_sparse24_bitmask", "ct_sparse24_bitmask", (Layer(DOWN),)),
    ("ct_sparse24_bitmask", "ct_fp8_channel_sparse24", (Layer(DOWN),)),
    ("ct_sparse_bitmask", "ct_sparse_bitmask", (Layer(DOWN),)),
    (
        "ct_marlin24",
        "ct_marlin24",
        (
            Layer(Q_PROJ, {"weight_packed": (12, 128), "scale_packed": (3, 64), "meta": (12, 128), "": (64, 384)}),
            Layer(DOWN, {"weight_packed": (4,), "meta": (4,), "": (64, 128)}),
        ),
    ),
    ("modelopt_int4", "modelopt_int4_blockwise", (Layer(DOWN, {"weight": (16,), "weight_scale": (32,), "": (32,)}),)),
)
# Fixtures whose values are the writer's own before it packed them: a rounded -0.1 is -0.0 there, and no code is.
UNPACKED = {"ct_marlin24", "modelopt_int4_blockwise"}


def every(fixture: Callable[[str], Any]) -> Iterator[Golden]:
    """Yield all cases; ``fixture`` opens the fixture of that name."""
    for format, name, layers in CASES:
        opened = fixture(f"llm/{name}")
        stored, values = {}, {}
        for layer in layers:
            more, expected = cut(opened, layer)
            stored |= more
            values |= expected
        how = f"{', '.join(f'{key} {list(value.shape)}' for key, value in values.items())} of the fixture {name}"
        if name in UNPACKED:
            how, values = f"{how}; zeros made positive", {key: value + 0.0 for key, value in values.items()}
        config = opened.config["quantization_config"]
        yield Golden(f"{format}/{name}", stored, values, config, opened.origin | {"how": how})
    yield from by_hand()


def cut(opened: Any, layer: Layer) -> tuple[Tensors, Tensors]:
    """Return the stored tensors and the values of a layer, cut."""
    stored = {}
    for name, tensor in opened.tensors.items():
        part = name.removeprefix(layer.name + ".")
        if part not in (name, "bias"):
            stored[name] = first(tensor, layer.cut.get(part, ()))
    name = next(name for name in (f"{layer.name}.weight", layer.name) if name in opened.values)
    values = first(opened.values[name], layer.cut.get("", ()))
    if layer.cut and f"{layer.name}.weight_shape" in stored:
        stored[f"{layer.name}.weight_shape"] = torch.tensor(values.shape)
    return stored, {name: values}


def first(tensor: Tensor, ends: Ends) -> Tensor:
    return tensor[tuple(slice(end) for end in ends)].contiguous().clone() if ends else tensor


RNG = np.random.default_rng(20250102)


def by_hand() -> Iterator[Golden]:
    """Yield cases that no fixture has."""
    order = RNG.permutation(96) // 32
    for case, how, made in (
        (
            "gptq_marlin/handmade",
            "codes and scales put in order by the permutations of IST-DASLab/marlin",
            gptq_marlin(),
        ),
        ("ct_int/handmade_blocks", "(code - zero point) * scale, of 32 columns each", ct_int(np.arange(96) // 32)),
        (
            "ct_int/handmade_order",
            "(code - zero point) * scale, each column's as weight_g_idx says",
            ct_int(order, True),
        ),
        (
            "quark_int4/handmade_reorder",
            "signed codes, transposed and interleaved as Quark's Pack_4_bits does",
            quark(True),
        ),
        ("quark_int4/handmade_order", "unsigned codes and zero points, transposed, not interleaved", quark(False)),
    ):
        stored, values, config = made
        origin = {"producer": f"hand-made with numpy {np.__version__}", "how": how}
        tensors = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in stored.items()}
        yield Golden(case, tensors, {"a.weight": torch.from_numpy(values)}, config, origin)


Made = tuple[dict[str, np.ndarray], np.ndarray, dict[str, Any]]


def scales(rows: int, blocks: int) -> np.ndarray:
    return (0.001 + 0.01 * RNG.random((rows, blocks))).astype(np.float16)


def gptq_marlin() -> Made:
    codes, scale = RNG.integers(0, 16, (64, 128)), scales(64, 2)
    stored = {"a.B": packing.marlin(codes), "a.s": packing.permute(scale.T, packing.MARLIN_SCALES)}
    values = (codes - 8).astype(np.float32) * scale.astype(np.float32).repeat(64, 1)
    return stored, values, {"quant_method": "gptq", "checkpoint_format": "marlin", "bits": 4, "group_size": 64}


def ct_int(order: np.ndarray, stored_order: bool = False) -> Made:
    codes, zeros = RNG.integers(-128, 128, (17, 96)), RNG.integers(-128, 128, (17, 3))
    scale = scales(17, 3)
    stored = {
        "a.weight": codes.astype(np.int8),
        "a.weight_scale": scale,
        "a.weight_zero_point": zeros.astype(np.int8),
    }
    if stored_order:
        stored["a.weight_g_idx"] = order.astype(np.int32)
    values = (codes - zeros[:, order]).astype(np.float32) * scale.astype(np.float32)[:, order]
    weights = {"num_bits": 8, "type": "int", "symmetric": False, "strategy": "group", "group_size": 32}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return stored, values, {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": groups}


def quark(signed: bool) -> Made:
    codes, zeros, scale = RNG.integers(0, 16, (40, 96)), RNG.integers(0, 16, (40, 3)), scales(40, 3)
    if signed:
        stored = {"a.weight": packing.interleave(codes.T ^ 8), "a.weight_scale": scale.T}
        zeros[:] = 8
    else:
        stored = {
            "a.weight": packing.dense(codes.T, 4),
            "a.weight_scale": scale.T,
            "a.weight_zero_point": packing.dense(zeros.T, 4),
        }
    values = (codes - zeros.repeat(32, 1)).astype(np.float32) * scale.astype(np.float32).repeat(32, 1)
    weight = {"dtype": "int4" if signed else "uint4", "qscheme": "per_group", "group_size": 32, "ch_axis": -1}
    export = {"pack_method": "reorder" if signed else "order"}
    return stored, values, {"quant_method": "quark", "global_quant_config": {"weight": weight}, "export": export}
