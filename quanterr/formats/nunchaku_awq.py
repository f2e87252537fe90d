"""AWQ W4A16 in Nunchaku files: four-bit codes with a scale and an offset per 64 columns, in fragments.

    X.qweight    i32           (rows / 4, cols / 2)
    X.wscales    bf16, f16     (cols / 64 or more, rows); the excess is padding
    X.wzeros     bf16, f16     shaped as wscales

    weight[r, c] = float32(code[r, c]) * float32(wscales[c // 64, r])      code in 0 … 15    rounded
                   + float32(wzeros[c // 64, r])                                             rounded

    codes    16-bit words of four, the first in the lowest bits; the word's index has the digits (t, k, d 4, b 2, c 8):
             code a of a word is row 4 t + d, column 64 k + 32 b + 8 a + c

These are modulation layers, whose rows are interleaved: shared/adanorm_rows.py. The module's name gives the number of
parts; if that proves wrong, other numbers are tried.

Reference: mit-han-lab/deepcompressor@69f3473 backend/tinychat/utils.py, backend/nunchaku/utils.py;
nunchaku-tech/nunchaku@3a3cc3d nunchaku/models/linear.py AWQW4A16Linear.
"""

from functools import partial

from quanterr.formats.base import (
    Chunk,
    Decoder,
    Format,
    FormatMismatch,
    Parts,
    PartSpec,
    Weight,
    Workspace,
)
from quanterr.formats.shared.adanorm_rows import count_parts_by_name, find_stored_rows, read_ordered_rows
from quanterr.formats.shared.padding import Padded, fit_padded, read_padded
from quanterr.kernel.levels import uniform
from quanterr.kernel.packing import CodePacking
from quanterr.lazy_torch import Tensor, torch

HALVES = frozenset({"BF16", "F16"})
GROUP = 64
CODES = CodePacking("dense", 4)
NEEDS = {
    "codes": PartSpec(("{module}.qweight",), frozenset({"I32"})),
    "scale": PartSpec(("{module}.wscales",), HALVES),
    "zero": PartSpec(("{module}.wzeros",), HALVES),
}


def fit(parts: Parts) -> Weight:
    """Return the weight with its rows in the order that its name implies, and with other orders as alternatives."""
    codes, scale, zero = parts.codes, parts["scale"], parts["zero"]
    rows, cols = (4 * codes.shape[0], 2 * codes.shape[1]) if len(codes.shape) == 2 else (0, 0)
    if not rows or not cols or cols % GROUP:
        raise FormatMismatch(
            f"Nunchaku's AWQ codes are (rows / 4, cols / 2), cols in multiples of {GROUP}, not {codes}"
        )
    groups = scale.shape[0] if len(scale.shape) == 2 and scale.shape[1] == rows else 0
    if groups < cols // GROUP or zero.shape != scale.shape:
        raise FormatMismatch(
            f"its scale {scale} and zero {zero} should be [{cols // GROUP} or more, {rows}] for {codes}"
        )
    padded = fit_padded(parts, (rows, cols), GROUP, 1)
    by_name = count_parts_by_name(parts.name.removesuffix(".weight"))
    alternatives = [
        parts.weight(
            padded.shape,
            _read(parts, padded, n),
            levels=uniform(4),
            block_size=(1, GROUP),
            prescribed=by_name > 1,
            evidence=("4-bit codes in fragments, rows " + (f"interleaved by {n}" if n > 1 else "in order"),),
        )
        for n in dict.fromkeys((by_name, 1, 6, 3))
        if rows % n == 0
    ]
    return alternatives[0].with_alternatives(alternatives[1:])


def _read(parts: Parts, padded: Padded, interleaved: int) -> Decoder:
    """Return the decoder of the weight: float32(code) · float32(scale) + float32(zero)."""
    of_weight = padded.rows, interleaved

    def read_codes(chunk: Chunk, workspace: Workspace) -> Tensor:
        order = find_stored_rows(chunk.row, chunk.stop_row, *of_weight, workspace.device)
        # 64 columns of a row are stored together in 32 bytes, which are four 64-bit numbers.
        pieces = workspace.read_whole("fragments", parts.codes).view(torch.int64)
        pieces = pieces.view(-1, padded.stored_cols // GROUP, 4, 4)[:, chunk.col // GROUP : chunk.stop_col // GROUP]
        stored = pieces[order // 4, :, order % 4].view(torch.uint8).view(len(order), -1)
        codes = CODES.unpack(stored, 0, 2 * stored.shape[1])
        return codes.view(len(order), -1, 2, 8, 4).transpose(3, 4).reshape(chunk.shape)

    decoder = Decoder(
        parts.codes,
        padded.stored_cols,
        scale=partial(read_ordered_rows, "whole_scale", parts["scale"], of_weight, GROUP),
        shift=partial(read_ordered_rows, "whole_zero", parts["zero"], of_weight, GROUP),
        group=GROUP,
        read=read_codes,
    )
    return read_padded(padded, decoder)


FORMATS = (Format("nunchaku_awq", NEEDS, fit, usual_db=(12, 18)),)
