"""What ComfyUI's labels may say of a weight, and what a label may change for a reader.

Reference: comfyanonymous/ComfyUI comfy/quant_ops.py QUANT_ALGOS and comfy/utils.py convert_old_quants;
silveroxides/ComfyUI-QuantOps; silveroxides/convert_to_quant comfy/quant_ops.py.
"""

from quanterr.errors import Misfit
from quanterr.formats.base import Parts
from quanterr.labels import Label
from quanterr.text import display

FP8 = frozenset({"F8_E4M3", "F8_E5M2"})
INT8 = frozenset({"I8"})

# Names that labels use for codes with a plain scale. The granularity of the scale is told from its
# shape alone: labels are often wrong about it.
FP8_LABELS = frozenset(
    {
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e4m3fn_rowwise",
        "float8_e4m3fn_blockwise",
        "float8_e4m3fn_block3d",
    }
)
INT8_LABELS = frozenset({"int8_tensorwise", "int8_blockwise", "int8_lodewise", "int8", "int8_convrot"})


def check_labels(parts: Parts, names: frozenset[str], rotates: bool = False) -> tuple[str | None, tuple[str, ...]]:
    """The label's format name, and what is odd about the labels.

    ``names`` are those of the format that is tried, ``rotates`` whether it undoes a rotation. Where a
    tensor and the header disagree the tensor is believed: it was written together with the codes,
    while headers are often made anew.

    Raises:
        Misfit: the first label names another layout, or a rotation that this format does not undo.
    """
    labels = parts.hints.labels
    if not labels:
        return None, ()
    first = next((label for label in labels if label.format), labels[0])
    if first.format is not None and first.format not in names:
        raise Misfit(f"{first}, but the codes are {parts.codes.dtype} {list(parts.codes.shape)}")
    if labels[0].rotated and not rotates:
        raise Misfit(f"{labels[0].source} says the codes are rotated (convrot), but they are {parts.codes.dtype}")
    disagreeing = next((label for label in labels[1:] if _disagree(labels[0], label)), None)
    if disagreeing is None:
        return first.format, ()
    doubt = (
        f"labels disagree: the {labels[0].source} says {_told(labels[0])} and the {disagreeing.source} says "
        f"{_told(disagreeing)}; the {labels[0].source} and the scale's shape decided"
    )
    if disagreeing.source == "header":
        doubt += ", while ComfyUI obeys the header"
    return first.format, (doubt,)


def _disagree(one: Label, other: Label) -> bool:
    """Whether two labels say different things; what only one of them says is no contradiction, but a rotation is."""
    said = ((label.format, label.block, label.number("convrot_groupsize")) for label in (one, other))
    return one.rotated != other.rotated or any(a != b for a, b in zip(*said, strict=True) if a and b)


def _told(label: Label) -> str:
    """The part of a label that changes what the codes mean."""
    size = f" with group_size {label.block[0]}" if label.block else ""
    rotation = f", convrot {label.number('convrot_groupsize') or ''}".rstrip() if label.rotated else ""
    return display(label.format or "nothing of the format") + size + rotation
