"""AutoAWQ: 4 bits with zero points, in the order of its GEMM and GEMV kernels."""

import re
from pathlib import Path

import torch
from awq import AutoAWQForCausalLM
from awq.modules.linear import WQLinear_GEMM
from awq.utils.packing_utils import dequantize_gemm
from common import TOKENS, run
from torch import Tensor

SETTINGS = {"GEMM": {"version": "GEMM"}, "GEMV": {"version": "GEMV"}}


def quantize(model: Path, setting: dict, folder: Path) -> dict[str, Tensor]:
    """Quantize with a few random sequences; return the values that its modules dequantize."""
    made = AutoAWQForCausalLM.from_pretrained(str(model), device_map="cpu", torch_dtype=torch.float32)
    config = {"zero_point": True, "q_group_size": 32, "w_bit": 4, **setting}
    searching = "modules_to_not_convert" not in setting
    if not searching:
        made.get_layers_for_scaling = lambda *args, **kwargs: []  # AutoAWQ fails if a module that it knows is left out.
    made.quantize(
        None,
        quant_config=config,
        calib_data=[tokens[0].tolist() for tokens in TOKENS],
        max_calib_seq_len=64,
        apply_clip=searching,
    )
    made.save_quantized(str(folder))
    modules = {name: module for name, module in made.model.named_modules() if isinstance(module, WQLinear_GEMM)}
    return {
        f"{name}.weight": dequantize_gemm(m.qweight, m.qzeros, m.scales, m.w_bit, m.group_size).T
        for name, m in modules.items()
    }


def declare(exclude: tuple[str, ...], other_bits: tuple[str, ...]) -> dict:
    """Return the setting that leaves modules out by their names within a block; all others have the same bits."""
    names = [re.sub(r"model\.layers\.\d+\.", "", name) for name in exclude]
    return SETTINGS["GEMM"] | {"modules_to_not_convert": names}


if __name__ == "__main__":
    run("autoawq", SETTINGS, quantize, declare)
