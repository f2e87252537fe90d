"""Integer layouts, packed bit by bit with numpy as their specifications say; readers are compared with these."""

import numpy as np
import torch

PLANES = {2: [2], 3: [2, 1], 4: [4], 5: [4, 1], 6: [4, 2], 7: [4, 2, 1], 8: [8]}
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
INT = {8: "<i1", 16: "<i2", 32: "<i4", 64: "<i8"}


def dense(codes, bits, container=32):
    """Pack a stream of bits along the last axis, low bits first; zeros fill the last container."""
    stream = (codes[..., None].astype(np.uint8) >> np.arange(bits, dtype=np.uint8)) & 1
    stream = stream.reshape(*codes.shape[:-1], -1)
    padded = np.zeros((*codes.shape[:-1], -(-stream.shape[-1] // container) * container), np.uint8)
    padded[..., : stream.shape[-1]] = stream
    return np.packbits(padded, axis=-1, bitorder="little").view(INT[container])


def floor(codes, bits):
    """Pack as many whole codes into each word as fit."""
    codes_per_word = 32 // bits
    padded = np.zeros((*codes.shape[:-1], -(-codes.shape[-1] // codes_per_word) * codes_per_word), np.int64)
    padded[..., : codes.shape[-1]] = codes
    words = (padded.reshape(*codes.shape[:-1], -1, codes_per_word) << bits * np.arange(codes_per_word)).sum(-1)
    return words.astype(np.uint32).view(np.int32)


def planar(codes, bits):
    """Pack each 32 codes as a stream of their low bits, then of the next ones."""
    runs, place, planes = codes.reshape(*codes.shape[:-1], -1, 32), 0, []
    for width in PLANES[bits]:
        planes.append(dense((runs >> place) & ((1 << width) - 1), width))
        place += width
    return np.concatenate(planes, -1).reshape(*codes.shape[:-1], -1)


def interleave(codes, order=AWQ_ORDER):
    """Pack eight 4-bit codes into a word: nibble i is column order[i]."""
    words = codes.reshape(*codes.shape[:-1], -1, 8).astype(np.int64)[..., order]
    return (words << 4 * np.arange(8)).sum(-1).astype(np.uint32).view(np.int32)


PACKINGS = {"dense": dense, "floor": floor, "planar": planar}


def less_one(zero_points, bits, container=32):
    """Subtract one from each code like GPTQ v1: in whole containers, or by code where codes cross borders."""
    if bits not in (2, 4, 8):
        return dense((zero_points - 1) % (1 << bits), bits, container)
    ones = sum(1 << place for place in range(0, container, bits))
    stored = dense(zero_points, bits, container).view(f"<u{container // 8}")
    return (stored - np.array(ones, stored.dtype)).view(INT[container])


def spread(of_block, order):
    """Return the numbers of blocks repeated for their columns; ``order`` has the block of each column."""
    return of_block[..., order]


def gemv_fast(codes):
    """Reorder (rows, cols) → int16 (rows / 4, cols), by the places in the specification."""
    rows, cols = codes.shape
    a, c, i = np.meshgrid(np.arange(rows // 4), np.arange(cols), np.arange(4), indexing="ij")
    s = 4 * (c % 64) + i
    t = s % 32
    k = 64 * (c // 64) + 32 * (s % 64 // 32) + 8 * (t % 4) + 2 * (t // 8) + t % 8 // 4
    nibbles = codes[4 * a + s // 64, k].astype(np.int64) << 4 * i
    return nibbles.sum(-1).astype(np.uint16).view(np.int16)


def _marlin_order(bits, sparse):
    order = []
    for i in range(32):
        col, base = i // 4, []
        for block in (0, 1):
            for row in (2 * (i % 4), 2 * (i % 4) + 1, 2 * (i % 4 + 4), 2 * (i % 4 + 4) + 1):
                place = 256 * (col // 2) + 8 * (col % 2) + 4 * block if sparse else col + 8 * block
                base.append(16 * row + place)
        for j in range(4):
            order.extend(place + (j if sparse else 256 * j) for place in base)
    runs = AWQ_ORDER if bits == 4 else [0, 2, 1, 3]
    return np.array(order).reshape(-1, len(runs))[:, runs].reshape(-1)


def marlin(codes, bits=4, sparse=False):
    """Reorder (rows, cols) → int32 (cols / 16, rows · bits / 2), by the permutation of the Marlin repositories."""
    rows, cols = codes.shape
    tiles = codes.T.reshape(cols // 16, 16, rows // 16, 16).transpose(0, 2, 1, 3).reshape(cols // 16, -1)
    return dense(tiles.reshape(-1, 1024)[:, _marlin_order(bits, sparse)].reshape(cols // 16, -1), bits)


MARLIN_SCALES = [i + 8 * j for i in range(8) for j in range(8)]
MARLIN_SCALES_SINGLE = [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]
MARLIN_24_SCALES = [8 * i + j for i in range(8) for j in (0, 4, 1, 5, 2, 6, 3, 7)]


def permute(scales, order):
    """Return (blocks, rows) with each run of rows in that order."""
    return scales.reshape(-1, len(order))[:, order].reshape(scales.shape)


def list_kept(mask):
    """Return the columns, 0 to 3, of the two elements kept in each four: (rows, cols) → (rows, cols / 2)."""
    return np.nonzero(mask)[1].reshape(len(mask), -1) % 4


def marlin_meta(kept):
    """Pack (rows, cols / 2) columns within fours → int16 (cols / 32, 2 · rows), in CUTLASS's order."""
    words = (kept.reshape(len(kept), -1, 8).astype(np.int64) << 2 * np.arange(8)).sum(-1)  # (rows, cols / 16)
    rows, cols = words.shape
    stored = np.zeros(words.size, np.int64)
    for r in range(rows):
        for c in range(cols):
            d = r // 64 * 64 + r % 2 * 2 + r % 8 // 4 + r % 32 % 4 // 2 * 32 + r % 64 // 8 * 4
            e = c
            if d % 2 == 0 and e % 2 == 1:
                d, e = d + 1, e - 1
            elif d % 2 == 1 and e % 2 == 0:
                d, e = d - 1, e + 1
            stored[e // 2 * 2 * rows + 2 * d + e % 2] = words[r, c]
    return stored.astype(np.uint16).view(np.int16).reshape(cols // 2, 2 * rows)


def bitmask(mask):
    """Pack a mask (rows, cols) → u8 (rows, cols / 8 rounded up), low bit first."""
    return np.packbits(mask, axis=-1, bitorder="little")


def as_ct_pack(name, w, bits, group=32):
    """Quantize symmetrically and store as compressed-tensors does."""
    blocks, half = w.reshape(len(w), -1, group), 2 ** (bits - 1)
    scales = np.float16(np.abs(blocks).max(2) / (half - 0.5))
    codes = np.clip(np.round(blocks / scales.astype(float)[..., None]), -half, half - 1) + half
    return {
        f"{name}_packed": torch.from_numpy(dense(codes.reshape(w.shape).astype(int), bits)),
        f"{name}_scale": torch.from_numpy(scales),
        f"{name}_shape": torch.tensor(w.shape),
    }
