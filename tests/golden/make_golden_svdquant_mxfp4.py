"""Makes the golden file of SVDQuant with MXFP4 codes by AutoRound's packer, and what its own functions unpack.

python tests/golden/make_golden_svdquant_mxfp4.py        needs auto-round (made with its modules at b9f3d007)
"""

import json
from pathlib import Path

import torch
from auto_round.export.svdquant_mxfp4 import NunchakuMXFP4Packer, pack_lowrank_weight, unpack_lowrank_weight
from auto_round.export.svdquant_nunchaku import pack_nunchaku_16bit_vector
from safetensors.torch import save_file

HERE = Path(__file__).parent / "nunchaku_mxfp4"
ROWS, COLS, RANK = 6, 96, 16


def make() -> None:
    """Write one layer, whose rows and columns are padded to 128."""
    torch.manual_seed(0)
    packer, shape = NunchakuMXFP4Packer(), (ROWS, COLS)
    residual, smooth = 0.1 * torch.randn(shape), 2.0 ** torch.randint(-2, 3, (COLS,))
    down, up = (0.1 * torch.randn(size).bfloat16() for size in ((RANK, COLS), (ROWS, RANK)))
    packed = packer.pack_residual(residual)
    stored = {
        "a.qweight": packed.qweight,
        "a.wscales": packed.wscales,
        "a.smooth": pack_nunchaku_16bit_vector(smooth.bfloat16()),
        "a.smooth_orig": pack_nunchaku_16bit_vector(smooth.bfloat16()),
        "a.lora_down": pack_lowrank_weight(down, down=True),
        "a.lora_up": pack_lowrank_weight(up, down=False),
    }
    unpacked = packer.unpack_residual(packed.qweight, packed.wscales, shape).double()
    branch = [unpack_lowrank_weight(stored[f"a.lora_{name}"], name == "down").double() for name in ("up", "down")]
    values = unpacked / smooth.double() + (branch[0] @ branch[1])[:ROWS, :COLS]
    HERE.mkdir(exist_ok=True)
    dtypes = {"dtype": "fp4_e2m1_all", "scale_dtype": "ue8m0", "group_size": 32}
    metadata = {"quantization_config": json.dumps({"method": "svdquant", "weight": dtypes, "rank": RANK})}
    save_file({name: x.contiguous() for name, x in stored.items()}, HERE / "auto_round.safetensors", metadata)
    how = "NunchakuMXFP4Packer and pack_lowrank_weight; unpacked by their inverses, residual / smooth + up @ down"
    origin = {"producer": "auto-round b9f3d007", "how": how, "tolerance": 1e-6}
    save_file({"a.weight": values.float()}, HERE / "auto_round.expected.safetensors", {"origin": json.dumps(origin)})


if __name__ == "__main__":
    make()
