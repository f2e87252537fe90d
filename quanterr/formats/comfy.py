"""The formats that ComfyUI's labels name, and what a label may change for a reader.

Reference: comfyanonymous/ComfyUI comfy/quant_ops.py QUANT_ALGOS; silveroxides/ComfyUI-QuantOps;
silveroxides/convert_to_quant comfy/quant_ops.py.
"""

from quanterr.errors import Misfit
from quanterr.formats.base import Parts
from quanterr.labels import Label
from quanterr.text import display

FP8 = frozenset({"F8_E4M3", "F8_E5M2"})
INT8 = frozenset({"I8"})

# Label → dtypes of the codes. The granularity of the scale is told from its shape alone: labels
# are often wrong about it.
SCALED = {
    "float8_e4m3fn": FP8,
    "float8_e5m2": FP8,
    "float8_e4m3fn_rowwise": FP8,
    "float8_e4m3fn_blockwise": FP8,
    "float8_e4m3fn_block3d": FP8,
    "int8_tensorwise": INT8,
    "int8_blockwise": INT8,
    "int8_lodewise": INT8,
    "int8": INT8,
}


def check_labels(parts: Parts, dtype: str) -> tuple[str | None, tuple[str, ...]]:
    """The label's format name, and what is odd about the labels.

    Raises:
        Misfit: a label names a layout that changes what the codes mean.
    """
    for label in parts.labels:
        if label.rotated:
            raise Misfit(f"{label.source} says the codes are rotated (convrot), which this version does not undo")
        if label.format is not None and label.format not in SCALED:
            raise Misfit(f"{label}, a layout this version does not read")
    named = [label for label in parts.labels if label.format]
    wrong = [label for label in named if dtype not in SCALED[label.format or ""]]
    if wrong:
        raise Misfit(f"{wrong[0]}, but the codes are {dtype}")
    doubts = []
    if len({(label.format, label.block) for label in named}) > 1:
        doubts.append(f"labels disagree: {' and '.join(_told(label) for label in named)}; the scale's shape decided")
    return (named[0].format if named else None), tuple(doubts)


def _told(label: Label) -> str:
    size = f" with group_size {label.block[0]}" if label.block else ""
    return f"the {label.source} says {display(label.format or '')}{size}"
