"""The types of weights in ModelSlim's quant_model_description.json, and how each is stored.

Reference: msmodelslim 26.1.0 core/quant_service/modelslim_v1/save/ascendv1.py; vllm-project/vllm-ascend@182b75ea
vllm_ascend/quantization/methods and modelslim_config.py; sgl-project/sglang 0.5.23 layers/quantization/modelslim.
"""

from typing import NamedTuple

NOT_EMULATED = "?"


class AscendType(NamedTuple):
    """A type: the formats in which its weights are read, a part that runtimes need, and the rounding of inputs."""

    formats: tuple[str, ...]
    needs: str = "scale"  # role of the part
    bits: int = 8  # bits of a code, if each code takes a byte
    inputs: str = NOT_EMULATED  # scheme; empty: inputs are not rounded


TYPES = {
    "W8A8": AscendType(("modelslim_int",), "deq_scale", inputs="int8_static"),
    "W8A8S": AscendType(("modelslim_int",), "deq_scale", inputs="int8_static"),
    "W8A8_MIX": AscendType(("modelslim_int",), "deq_scale"),
    "W8A8_DYNAMIC": AscendType(("modelslim_int",), inputs="int8_token"),
    "W8A16": AscendType(("modelslim_int",), inputs=""),
    "W4A4_DYNAMIC": AscendType(("modelslim_int", "modelslim_int4"), bits=4, inputs="int4_token"),
    "W4A8_DYNAMIC": AscendType(("modelslim_int4", "modelslim_int"), bits=4, inputs="int8_token"),
    "WFP8AFP8_DYNAMIC": AscendType(("modelslim_fp8",), inputs="fp8_token"),
    "W8A8FP8_DYNAMIC": AscendType(("modelslim_fp8",), inputs="fp8_token"),
    "W8A8_MXFP8": AscendType(("mxfp8",)),
    "W4A8_MXFP": AscendType(("mxfp4",), bits=4),
    "W4A16_MXFP4": AscendType(("mxfp4",), bits=4, inputs=""),
    "W4A4_MXFP4": AscendType(("mxfp4",), bits=4),
    "W4A4_MXFP4_DUALSCALE": AscendType(("modelslim_mxfp4_dual",), bits=4),
}
