"""Checks of ComfyUI's labels against the stored tensors.

Tensors decide, labels break ties: a label that names a plain layout other than the stored one, or a granularity other
than the scale's, causes a warning. A label that names a special layout (packed 4-bit codes, low-rank branches) must
agree with the tensors.

Reference: comfyanonymous/ComfyUI@6db4fa2f comfy/quant_ops.py QUANT_ALGOS and comfy/utils.py convert_old_quants;
silveroxides/ComfyUI-QuantOps; silveroxides/convert_to_quant@1.3.4 comfy/quant_ops.py.
"""

from quanterr.checkpoints import Entry
from quanterr.checkpoints.labels import HEADER, Label
from quanterr.errors import FormatMismatch
from quanterr.formats.base import Hints, Parts
from quanterr.formats.shared.convrot import DEFAULT_GROUP
from quanterr.util.text import display

FP8 = frozenset({"F8_E4M3", "F8_E5M2"})
INT8 = frozenset({"I8"})
FLOATS = frozenset({"F32", "BF16", "F16"})  # dtypes of scales

# Label names of codes with a plain scale, with the granularities they claim. The scale's shape alone decides: labels
# are often wrong.
FP8_GRANULARITY = {
    "float8_e4m3fn": ("tensor",),
    "float8_e5m2": ("tensor",),
    "float8_e4m3fn_rowwise": ("row",),
    "float8_e4m3fn_blockwise": ("block",),
    "float8_e4m3fn_block3d": ("block",),
}
INT8_GRANULARITY = {
    "int8_tensorwise": ("tensor", "row"),  # comfy-kitchen: TensorWiseINT8Layout.quantize, per_channel
    "int8_blockwise": ("block",),
    "int8_lodewise": ("block",),
    "int8": (),
    "int8_convrot": (),
}
GRANULARITY = FP8_GRANULARITY | INT8_GRANULARITY
FP8_LABELS, INT8_LABELS = frozenset(FP8_GRANULARITY), frozenset(INT8_GRANULARITY)
MXFP8_LABELS, NVFP4_LABELS = frozenset({"mxfp8", "hybrid_mxfp8"}), frozenset({"nvfp4"})
INTERCHANGEABLE_LABELS = FP8_LABELS | INT8_LABELS | MXFP8_LABELS | NVFP4_LABELS
ROTATED_LABELS = frozenset({"convrot_w4a4", "int4_convrot_w4a4", "asym_w4a8_int8"})

# Known layouts that quanterr does not read, and what to do.
REFUSED_FORMATS = {
    "int8_block32": "no release wrote it; quantize again as int8_blockwise",
}
NUMBERS = frozenset({"F64", "F32", "F16", "BF16"})


def refuse_by_name(codes: Entry, hints: Hints) -> None:
    """Refuse the layouts in :data:`REFUSED_FORMATS`, whatever their tensors look like.

    Raises:
        FormatMismatch: a label names such a layout, or config.json does and there are codes. The message has a remedy.
    """
    if not hints.labels and not hints.config:
        return
    method = hints.config.get("quant_method")
    declared = [(label.format, str(label)) for label in hints.labels[:1]]
    if isinstance(method, str) and codes.dtype not in NUMBERS:
        declared.append((method, f"config.json declares quant_method {display(method)}"))
    for name, source_says in declared:
        if name in REFUSED_FORMATS:
            raise FormatMismatch(f"{source_says}: an unsupported layout; {REFUSED_FORMATS[name]}")


def check_labels(parts: Parts, names: frozenset[str], rotates: bool = False) -> tuple[str | None, tuple[str, ...]]:
    """Return the label's format name and warnings about the labels.

    ``names`` are the label names of the format being tried; ``rotates`` means that it undoes a rotation. If the
    label's tensor and the header disagree, the tensor wins: it was written together with the codes, while headers are
    often rewritten.

    Raises:
        FormatMismatch: the first label names another layout, or a rotation that this format does not undo.
    """
    labels = parts.hints.labels
    if not labels:
        return None, ()
    warnings = []
    first = next((label for label in labels if label.format), labels[0])
    stored = f"{parts.codes.dtype} {list(parts.codes.shape)}"
    names_other_format = first.format is not None and first.format not in names
    if names_other_format and (first.format not in INTERCHANGEABLE_LABELS or not names <= INTERCHANGEABLE_LABELS):
        raise FormatMismatch(f"{first}, but the codes are {stored}")
    labelled, stored_e5m2 = first.format == "float8_e5m2", parts.codes.dtype == "F8_E5M2"
    if names_other_format or (first.format in FP8_LABELS and parts.codes.dtype in FP8 and labelled != stored_e5m2):
        warnings.append(f"{first}, but the codes are {stored}: read as stored")
    if labels[0].rotated and not rotates:
        raise FormatMismatch(f"{labels[0].source} declares rotated codes (convrot), but they are {parts.codes.dtype}")
    disagreeing = next((label for label in labels[1:] if _disagree(labels[0], label)), None)
    if disagreeing is not None:
        warning = (
            f"labels disagree: {labels[0].source} declares {_describe_label(labels[0])}, {disagreeing.source} declares "
            f"{_describe_label(disagreeing)}; the {labels[0].source} and the scale's shape were used"
        )
        warnings.append(warning + (", but ComfyUI follows the header" if disagreeing.source == HEADER else ""))
    return first.format, tuple(warnings)


def check_granularity(parts: Parts, comfy_format: str | None, granularity: str) -> tuple[str, ...]:
    """Return a warning if the label's name and the scale's shape imply different granularities."""
    configured = GRANULARITY.get(comfy_format or "", ())
    scale = parts["scale"]
    if not configured or granularity in configured or scale.n == 1 or len(parts.codes.shape) != 2:
        return ()  # a block that covers the weight also has one scale; stacked experts have one scale each
    return (
        f"labelled {display(comfy_format or '')}, but its scale {scale} is one per {granularity}: the shape was used",
    )


def _disagree(first: Label, second: Label) -> bool:
    """Return whether labels contradict each other: rotations must be equal, but a format or block may be missing."""
    configured = ((label.format, label.block) for label in (first, second))
    return _find_rotation(first) != _find_rotation(second) or any(
        a != b for a, b in zip(*configured, strict=True) if a and b
    )


def _describe_label(label: Label) -> str:
    """Format the fields of a label that change the meaning of the codes."""
    size = f" with group_size {label.block[0]}" if label.block else ""
    rotation = f", convrot {_find_rotation(label)}" if _find_rotation(label) else ""
    return display(label.format or "no format") + size + rotation


def _find_rotation(label: Label) -> int | None:
    """Return the columns that were rotated together; None if the label mentions no rotation."""
    if not label.rotated and label.format not in ROTATED_LABELS:
        return None
    return label.number("convrot_groupsize") or DEFAULT_GROUP
