"""Packing of codes of a few bits into bytes."""

from quanterr.lazy_torch import Tensor, torch

WORD = 32
HALVES = {8: 0x00FF00FF00FF00FF, 16: 0x0000FFFF0000FFFF, 32: 0x00000000FFFFFFFF}  # width → mask of every other field


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Pack codes below 2^bits, uint8 (r, 8n), as a stream of bits, the lowest first: uint8 (r, n · bits).

    Eight codes are packed as one 64-bit number: first in pairs, then in fours, then all together.
    """
    if bits == 4:
        return pack_pairs(codes)
    eight = codes.reshape(-1).view(torch.int64)
    for width, half in HALVES.items():
        eight = eight & half | (eight >> width & half) << bits * width // 8
    return eight.view(torch.uint8).view(-1, 8)[:, :bits].reshape(len(codes), -1)


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """Pack codes below 2^bits, uint8 (r, n), as a stream of bits in words, the lowest first: uint8 (r, 4 · words)."""
    words = -(-codes.shape[1] * bits // WORD)
    missing = -codes.shape[1] % WORD
    if not missing:
        return pack_codes(codes, bits)
    return pack_codes(torch.nn.functional.pad(codes, (0, missing)), bits)[:, : 4 * words].clone(
        memory_format=torch.contiguous_format
    )


def pack_pairs(codes: Tensor, low_first: bool = True) -> Tensor:
    """Pack pairs of 4-bit codes, uint8 (r, 2n), in bytes, (r, n); the first is in the low bits or in the high bits."""
    pairs = codes.reshape(-1).view(torch.int16)
    packed = pairs | pairs >> 4 if low_first else pairs << 4 | pairs >> 8
    return packed.to(torch.uint8).view(len(codes), -1)


def pack_halves(codes: Tensor) -> Tensor:
    """Pack 4-bit codes, uint8 (n, 32), in bytes, (n, 16); the first 16 codes are in the low bits."""
    eights = codes.reshape(len(codes), -1).view(torch.int64)
    return (eights[:, :2] | eights[:, 2:] << 4).view(torch.uint8)
