"""INT8 codes with a scale, of columns that were rotated before quantization (ConvRot).

    weight    i8                (rows, cols)
    scale     f32, bf16, f16    one, or one per row: as int8_tensor, int8_row and int8_block

    rotated[r, c] = float32(code[r, c]) * float32(scale of r, c)                      rounded
    weight = rotated, un-rotated in groups of columns: kernel/rotation.py   rounded

The label declares it: convrot, and convrot_groupsize (default 256), which differs from layer to layer. Some writers
leave out the format's name.

Reference: Comfy-Org/comfy-kitchen@7d86acf comfy_kitchen/tensor/int8.py, int8_utils.py;
silveroxides/convert_to_quant@1.3.4 utils/convrot.py.
"""

from msgspec.structs import replace

from quanterr.formats.base import Format, Parts, Weight
from quanterr.formats.shared.comfy_labels import INT8_LABELS
from quanterr.formats.shared.convrot import find_group_size
from quanterr.formats.shared.scale_grid import fit_scaled
from quanterr.formats.shared.scaled_int8 import NEEDS, read_as_rotated


def fit(parts: Parts) -> Weight | None:
    """Return the weight if its label declares a rotation, with unrotated columns as an alternative."""
    labels = parts.hints.labels
    if not labels or not labels[0].rotated or not parts.codes.shape:
        return None
    size, warning = find_group_size(labels[0], parts.codes.shape[-1])
    plain = fit_scaled(parts, "int8", INT8_LABELS, rotates=True)
    rotated = read_as_rotated(parts, replace(plain, warnings=plain.warnings + warning), size)
    return replace(rotated, prescribed=True).with_alternatives([plain])


FORMATS = (Format("int8_convrot", NEEDS, fit, usual_db=(38, 44), corrects_biases=True),)
