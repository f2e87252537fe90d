"""GPTQModel: its GPTQ of 2 to 8 bits, in both formats, and its AWQ."""

from pathlib import Path

import gptqmodel
import torch
from common import TOKENS, run
from gptqmodel import BACKEND, GPTQModel, QuantizeConfig
from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm
from torch import Tensor

SETTINGS = {f"GPTQ {bits} bits": {"bits": bits} for bits in (8, 4, 3, 2)} | {
    "GPTQ 4 bits, order of activations": {"bits": 4, "desc_act": True},
    "GPTQ 4 bits, not symmetric": {"bits": 4, "sym": False},
    "GPTQ 4 bits, second format": {"bits": 4, "format": "gptq_v2"},
    "AWQ 4 bits": {"bits": 4, "method": "awq", "format": "gemm"},
}


def quantize(model: Path, setting: dict, folder: Path) -> dict[str, Tensor]:
    """Quantize with a few random sequences; return the values of its modules, which refuse float32."""
    # With two cores, GPTQModel would choose one worker and then refuse that number.
    gptqmodel._default_cpu_workers = lambda: 2
    with_awq = setting.get("method") == "awq"
    made = GPTQModel.load(str(model), QuantizeConfig(group_size=32, **setting), device="cpu", dtype=torch.float16)
    made.quantize([{"input_ids": t[0].tolist(), "attention_mask": [1] * t.shape[1]} for t in TOKENS])
    made.save(str(folder))
    backend = BACKEND.AWQ_TORCH if with_awq else BACKEND.GPTQ_TORCH
    read = GPTQModel.load(str(folder), device="cpu", backend=backend, dtype=torch.float16)
    modules = {name: module for name, module in read.model.named_modules() if hasattr(module, "qweight")}
    if with_awq:
        parts = {n: (m.qweight, m.qzeros, m.scales, m.bits, m.group_size) for n, m in modules.items()}
        return {f"{name}.weight": dequantize_gemm(*part).T for name, part in parts.items()}
    return {f"{name}.weight": module.dequantize_weight().T for name, module in modules.items()}


def declare(exclude: tuple[str, ...], other_bits: tuple[str, ...]) -> dict:
    """Return the setting whose patterns leave modules out, and give others 8 bits; the head is quantized on request."""
    rules = {f"+:{name}": {"bits": 8} for name in other_bits} | {f"-:{name}": {} for name in exclude}
    return {"bits": 4, "dynamic": rules}


if __name__ == "__main__":
    run("gptqmodel", SETTINGS, quantize, declare)
