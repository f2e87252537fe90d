"""Weights in codebooks and rare layouts that no fixture has, made by hand with numpy alone: see make_golden.py.

Packers here go the way of the writers (numbers to bytes), quanterr's readers the other way.
"""

from collections.abc import Iterable, Iterator
from itertools import product

import numpy as np
from diffusion import Arrays, Made, f32

RNG = np.random.default_rng(20250901)
F16 = np.float16
EMBEDDING = ("embedding_quantized", "embedding_scale")
SUMS = "1e-6"  # tolerance of sums of hundreds of numbers in any order


def every() -> Iterator[Made]:
    """Yield all cases."""
    yield exl3()
    yield exl2()
    yield aqlm()
    yield vptq()
    yield from quip_sharp()
    yield spqr()
    yield eetq()
    yield bitnet()
    yield from gemma()


# ---- what they share


def codes_of(low: int, high: int, *shape: int) -> np.ndarray:
    return RNG.integers(low, high, shape)


def factors(*shape: int) -> np.ndarray:
    """Return random factors of both signs."""
    return ((0.5 + RNG.random(shape)) * RNG.choice([-1, 1], shape)).astype(F16)


def little_endian(values: Iterable[int], bits: int) -> list[int]:
    """Return a stream of bits, the low ones first, as 32-bit words."""
    values = [int(value) for value in values]
    stream = sum(value << bits * place for place, value in enumerate(values))
    return [stream >> 32 * word & 0xFFFFFFFF for word in range(-(-bits * len(values) // 32))]


def to_signed(words: object, dtype: type = np.int32) -> np.ndarray:
    """Return unsigned words as signed integers of the same bits."""
    unsigned = {np.int16: np.uint16, np.int32: np.uint32, np.int64: np.uint64}[dtype]
    return np.array(words, dtype=unsigned).view(dtype)


def sylvester(size: int) -> np.ndarray:
    return np.array([[(-1.0) ** (i & j).bit_count() for j in range(size)] for i in range(size)]) / np.sqrt(size)


def half(bits: np.ndarray) -> np.ndarray:
    """Return the numbers of the float16 with these bits."""
    return bits.astype(np.uint16).view(F16).astype(np.float32)


# ---- EXL3


def exl3_value(x: int, codebook: str) -> np.float32:
    if codebook == "mul1":
        y = x * 0x83DCD12D & 0xFFFFFFFF
        total = 0x6400 + sum(y.to_bytes(4, "little"))
        s, factor, bias = half(np.array([total, 0x1EEE, 0xC931]))
        return np.float32(s * factor + bias)
    y = (x * 0xCBAC1FED if codebook == "mcg" else x * 89226354 + 64248484) & 0xFFFFFFFF
    z = (y & 0x8FFF8FFF) ^ 0x3B603B60
    low, high = half(np.array([z & 0xFFFF, z >> 16]))
    return np.float32(low + high)


def exl3_tile(bits: int, codebook: str) -> tuple[list[int], np.ndarray]:
    """Return the words of a tile, and its values (columns, rows) as the weight has them."""
    symbols = codes_of(0, 1 << bits, 256)
    string = "".join(f"{symbol:0{bits}b}" for symbol in symbols)
    words = [int(string[at : at + 32], 2) for at in range(0, len(string), 32)]
    stored = [half_word for word in words for half_word in (word & 0xFFFF, word >> 16)]
    values = np.empty((16, 16), np.float32)
    for t in range(256):
        end = (t + 1) * bits
        code = int((string + string)[end - 16 + len(string) * (end < 16) :][:16], 2)
        lane, i = divmod(t, 8)
        values[2 * (lane % 4) + i % 2 + 8 * (i // 2 % 2), lane // 4 + 8 * (i // 4)] = exl3_value(code, codebook)
    return stored, values


def exl3() -> Made:
    stored: Arrays = {}
    values: Arrays = {}
    for name, bits, codebook, cols, rows, shape in (
        ("a", 5, "3inst", 128, 128, (9, 128)),
        ("b", 1, "mcg", 128, 256, (130, 20)),
        ("c", 8, "mul1", 256, 128, (3, 256)),
    ):
        tiles = [[exl3_tile(bits, codebook) for _ in range(rows // 16)] for _ in range(cols // 16)]
        stored[f"{name}.trellis"] = to_signed([[words for words, _ in line] for line in tiles], np.int16)
        inner = np.block([[tile for _, tile in line] for line in tiles]).astype(np.float64)
        if name == "a":
            signs = [codes_of(0, 2, n) for n in (cols, rows)]
            for key, bit in zip(("su", "sv"), signs, strict=True):
                words = (bit.reshape(-1, 16) << np.arange(16)).sum(1)
                stored[f"{name}.{key}"] = to_signed(words, np.int16)
            suh, svh = (1.0 - 2.0 * bit for bit in signs)
        else:
            stored[f"{name}.suh"], stored[f"{name}.svh"] = factors(cols), factors(rows)
            suh, svh = (stored[f"{name}.{key}"].astype(np.float64) for key in ("suh", "svh"))
        if codebook != "3inst":
            number = {"mcg": 0xCBAC1FED, "mul1": 0x83DCD12D}[codebook]
            stored[f"{name}.{codebook}"] = np.array(number, np.uint32).view(np.int32)
        left, right = (np.kron(np.eye(n // 128), sylvester(128)) for n in (cols, rows))
        weight = suh[:, None] * (left @ inner @ right) * svh
        values[f"{name}.weight"] = f32(weight.T[: shape[0], : shape[1]])
    how = "random symbols as strings of bits, their trellis and Hadamard products in float64"
    return Made("exl3/handmade", how, stored, values, SUMS)


# ---- EXL2


def exl2() -> Made:
    stored: Arrays = {}
    values: Arrays = {}
    for name, rows, groups, dtype in (
        ("a", 8, ((8, 8), (6, 32), (2, 48)), np.int16),
        ("b", 24, ((5, 64), (4, 8), (3, 32), (2, 16)), np.int32),
    ):
        cols = sum(n for _, n in groups)
        order = RNG.permutation(cols)
        columns, packed, pairs, scales = [], [], [], []
        scale_max = (0.1 + RNG.random(len(groups))).astype(F16)
        for (bits, n), largest in zip(groups, scale_max, strict=True):
            codes, scale = codes_of(0, 1 << bits, n, rows), codes_of(0, 16, rows)
            pairs += [bits, sum(len(piece) for piece in packed)]
            packed.append(np.array([little_endian(column, bits) for column in codes.T], np.uint32).T)
            scales.append(little_endian(scale, 4))
            factor = f32((scale + 1) ** 2) * (np.float32(largest) / np.float32(256))
            columns.append(f32(codes - (1 << (bits - 1))) * factor)
        stored |= {
            f"{name}.q_weight": to_signed(np.concatenate(packed)),
            f"{name}.q_groups": to_signed(pairs, np.int16),
            f"{name}.q_scale": to_signed(scales),
            f"{name}.q_scale_max": scale_max,
            f"{name}.q_invperm": order.astype(dtype),
        }
        values[f"{name}.weight"] = np.concatenate(columns)[order].T
    return Made("exl2/handmade", "(code - 2^(bits - 1)) * (scale + 1)^2 * (scale_max / 256)", stored, values)


# ---- AQLM


def aqlm() -> Made:
    stored: Arrays = {}
    values: Arrays = {}
    for name, n, bits, out, into, tall, across, scales in (
        ("a", 3, 5, 2, 4, 7, 9, (7, 1, 1, 1)),
        ("b", 1, 9, 1, 8, 6, 5, (6, 5, 1, 1)),
        ("c", 2, 8, 4, 8, 3, 4, (3, 4, 4, 8)),
        ("d", 2, 6, 1, 4, 5, 9, (1, 1, 1, 1)),
    ):
        codes = codes_of(0, 1 << bits, tall, across, n)
        books = (0.1 * RNG.normal(size=(n, 1 << bits, out, into))).astype(F16)
        scale = factors(*scales)
        total = f32(books[0][codes[..., 0]])
        for number in range(1, n):
            total = total + f32(books[number][codes[..., number]])
        total = total * f32(scale)
        centred = np.where(codes >= 1 << (bits - 1), codes - (1 << bits), codes)
        stored |= {
            f"{name}.codes": centred.astype(np.int8 if bits <= 8 else np.int16),
            f"{name}.codebooks": books,
            f"{name}.scales": scale,
        }
        values[f"{name}.weight"] = total.transpose(0, 2, 1, 3).reshape(tall * out, across * into)
    return Made("aqlm/handmade", "sums of vectors in order, times the scale", stored, values)


# ---- VPTQ


def vptq() -> Made:
    stored: Arrays = {}
    values: Arrays = {}
    for name, rows, cols, groups, v, size, residual, outliers, packed, perm, norm in (
        ("a", 21, 40, 1, 4, 64, 16, 0, True, True, False),
        ("b", 30, 46, 3, 6, 16, 64, 6, True, True, True),
        ("c", 16, 33, 1, 8, 32, 0, 0, False, False, True),
        ("d", 25, 36, 2, 12, 8, 128, 0, False, True, True),
    ):
        n, width = -(-rows // v), -(-(cols - outliers) // groups)
        books = (0.1 * RNG.normal(size=(groups, size, v))).astype(F16)
        rest = (0.02 * RNG.normal(size=(groups, max(residual, 1), v))).astype(F16)
        index, second = codes_of(0, size, groups, n, width), codes_of(0, max(residual, 1), groups, n, width)
        vectors = np.stack([f32(books[g][index[g]]) for g in range(groups)])
        stored[f"{name}.centroids.weight"] = books.reshape(groups, -1)
        if residual:
            vectors = vectors + np.stack([f32(rest[g][second[g]]) for g in range(groups)])
            stored[f"{name}.res_centroids.weight"] = rest.reshape(groups, -1)
        if packed:
            bits = [size.bit_length() - 1, residual.bit_length() - 1]
            both = index | second << bits[0]
            words = [[little_endian(line, sum(bits)) for line in group] for group in both]
            stored[f"{name}.indices"] = to_signed(words)
        else:
            stored[f"{name}.indices"] = to_signed(index, np.int16)
            if residual:
                stored[f"{name}.res_indices"] = to_signed(second, np.int16)
        weight = vectors.transpose(1, 3, 0, 2).reshape(n * v, groups * width)[:rows, : cols - outliers]
        if outliers:
            w = 4
            book = RNG.normal(size=(32, w)).astype(F16)
            places = codes_of(0, 32, -(-rows // w), outliers)
            stored[f"{name}.outlier_centroids.weight"] = book.reshape(1, -1)
            stored[f"{name}.outlier_indices"] = to_signed(places[None], np.int16)
            first = f32(book[places]).transpose(0, 2, 1).reshape(-1, outliers)[:rows]
            weight = np.concatenate([first, weight], 1)
        if perm:
            order = RNG.permutation(cols)
            stored[f"{name}.perm"] = to_signed(order, np.int16)
            turned = np.empty_like(weight)
            turned[:, order] = weight
            weight = turned
        if norm:
            scale, bias = factors(cols), factors(cols)
            stored[f"{name}.weight_scale"], stored[f"{name}.weight_bias"] = scale, bias
            weight = weight * f32(scale) + f32(bias)
        values[f"{name}.weight"] = weight
    how = "vectors of rows by index, added, in the order of perm, times weight_scale plus weight_bias"
    return Made("vptq/handmade", how, stored, values)


# ---- QuIP#

NORM_12 = """31113333 13113333 11313333 11133333 33313311 33313131 33311331 33313113 33311313 33311133 33133311
33133131 33131331 33133113 33131313 33131133 31333311 31333131 31331331 31333113 31331313 13331133 13333311
13333131 13331331 13333113 13331313 11331333 33113331"""
MAGNITUDES = [v for v in product((1, 3, 5), repeat=8) if sum(x * x for x in v) <= 40]  # doubled
MAGNITUDES += [tuple(map(int, vector)) for vector in NORM_12.split()]
E81B = [v for v in product((-2, 0, 2), repeat=8) if sum(x * x for x in v) <= 8 and sum(v) % 4 == 0]
E81B += [v for v in product((-1, 1), repeat=8) if sum(v) % 4 == 0]
E81B += [tuple(sign * 4 * (place == axis) for place in range(8)) for sign in (1, -1) for axis in range(8)][:15]


def e8p_vector(magnitude: int, signs: int) -> np.ndarray:
    vector = [x / 2 for x in MAGNITUDES[magnitude]]
    if sum(MAGNITUDES[magnitude]) % 4 == 2:  # an odd sum
        vector[7] = -vector[7]
    odd = signs.bit_count() % 2
    signs ^= odd
    for bit, place in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
        vector[place] *= -1 if signs >> bit & 1 else 1
    return np.array(vector) + (-0.25 if odd else 0.25)


def e8p(rows: int, cols: int) -> tuple[np.ndarray, np.ndarray]:
    """Return packed codes (rows, cols / 32), and the vectors they stand for."""
    magnitudes, signs = codes_of(0, 256, rows, cols // 8), codes_of(0, 256, rows, cols // 8)
    words = np.empty((rows // 16, cols // 64, 8, 4), np.uint64)
    for i, j, k, m in np.ndindex(words.shape):
        word = 0
        for number in range(4):
            at = 16 * i + 2 * k + number % 2, 8 * j + 2 * m + number // 2
            word |= int(magnitudes[at]) << 8 * number
            for bit in range(8):
                word |= (int(signs[at]) >> bit & 1) << 32 + 4 * bit + number
        words[i, j, k, m] = word
    pairs = zip(magnitudes.ravel(), signs.ravel(), strict=True)
    vectors = np.array([e8p_vector(int(magnitude), int(sign)) for magnitude, sign in pairs])
    return words.view(np.int64).reshape(rows, -1), vectors.reshape(rows, cols)


def quip_sharp() -> Iterator[Made]:
    for case, identity, rows, cols in (("rvq4", 17, 16, 128), ("rvq3", 18, 32, 64)):
        codes, vectors = e8p(rows, cols)
        if identity == 17:
            more, rest = e8p(rows, cols)
            vectors = vectors + rest / 3.45
        else:
            index = codes_of(0, 256, rows, cols // 8)
            more = index.astype(np.uint8).view(np.int64)
            vectors = vectors + np.array(E81B)[index].reshape(rows, cols) / 2 / 2.04
        stored: Arrays = {
            "a.Qidxs": np.concatenate([codes, more], 1),
            "a.SU": factors(cols),
            "a.SV": factors(rows),
            "a.Wscale": np.array(0.03125 * 1.25, np.float32),
            "a.codebook_id": np.array(identity),
        }
        scaled = stored["a.SU"].astype(np.float64)
        if identity == 18:
            stored["a.scaleWH"] = f32(0.5 + RNG.random(cols))
            scaled = scaled / stored["a.scaleWH"]
        weight = sylvester(rows) @ vectors @ sylvester(cols).T * scaled
        weight *= stored["a.SV"].astype(np.float64)[:, None] * float(stored["a.Wscale"])
        how = "vectors of E8P and of their residuals, rotated by matrices in float64"
        yield Made(f"quip_sharp/handmade_{case}", how, stored, {"a.weight": f32(weight)}, SUMS)


# ---- SpQR


def spqr() -> Made:
    stored: Arrays = {}
    values: Arrays = {}
    for name, rows, cols, interleaved in (("a", 48, 24, False), ("b", 32, 40, True)):
        tall, across = -(-rows // 16), -(-cols // 16)
        words = np.zeros((tall, across, 16), np.uint64)
        weight = np.zeros((tall * 16, across * 16), np.float32)
        for i, j in np.ndindex(tall, across):
            ss, zs, sz, zz = (0.02 * RNG.normal(size=4)).astype(F16)
            record = b"".join(number.tobytes() for number in (ss, zs, sz, zz))
            for k in range(16):
                s, z, *q = (int(code) for code in codes_of(0, 8, 18))
                bits = sum(code << 3 * place for place, code in enumerate((s, z, *q)))
                words[i, j, k] = bits | record[k // 2] << 54
                scale = F16(ss * F16(F16(s) - sz))
                zero = F16(zs * F16(F16(z) - zz))
                row = [F16(scale * F16(F16(code) - zero)) for code in q]
                weight[16 * i + k, 16 * j : 16 * j + 16] = row
        weight = weight[:rows, :cols]
        outlier_columns = [sorted(RNG.choice(cols, RNG.integers(0, 6), replace=False)) for _ in range(rows)]
        numbers = [[F16(RNG.normal()) for _ in line] for line in outlier_columns]
        merged = [
            [int(number.view(np.uint16)) << 16 | int(col) for number, col in zip(*pair, strict=True)]
            for pair in zip(numbers, outlier_columns, strict=True)
        ]
        for row, (line, cols_of_row) in enumerate(zip(numbers, outlier_columns, strict=True)):
            for number, col in zip(line, cols_of_row, strict=True):
                weight[row, col] += np.float32(number)
        if interleaved:
            lines = []
            for top in range(0, rows, 16):
                longest = max(len(line) for line in merged[top : top + 16])
                filled = [line + [0] * (longest - len(line)) for line in merged[top : top + 16]]
                lines.append([filled[k % 16][k // 16] for k in range(16 * longest)])
            weight[:, 0] += 0.0  # padded zeros are added to the first column
        else:
            lines = merged
        order = RNG.permutation(cols)
        stored |= {
            f"{name}.dense_weights": words.view(np.int64).reshape(-1),
            f"{name}.row_offsets": np.cumsum([0, *map(len, lines)]).astype(np.int32),
            f"{name}.col_vals": to_signed([word for line in lines for word in line]),
            f"{name}.in_perm": to_signed(order[0::2] | order[1::2] << 16) if name == "a" else np.zeros(0, np.int32),
        }
        weight = f32(weight.astype(F16))
        values[f"{name}.weight"] = weight
        if name == "a":
            values[f"{name}.weight"] = np.empty_like(weight)
            values[f"{name}.weight"][:, order] = weight
    return Made("spqr/handmade", "each step in float16, outliers added in float32", stored, values)


# ---- EETQ, BitNet, Gemma


def eetq() -> Made:
    """Return weights in EETQ's order: rows of each 16 permuted, transposed, two columns interleaved, biased."""
    stored: Arrays = {}
    values: Arrays = {}
    for name, rows, cols in (("a", 2, 64), ("b", 6, 192), ("c", 40, 128)):
        codes = codes_of(-128, 128, rows, cols).astype(np.int8)
        scale = np.abs(factors(rows))
        turned = codes.T.reshape(-1, 16, rows)
        permuted = turned[:, [8 * (t % 4 // 2) + t % 2 + 2 * (t // 4) for t in range(16)]].reshape(cols, rows)
        pairs = permuted.T.reshape(rows // 2, 2, cols // 64, 64).transpose(0, 2, 1, 3)
        biased = (pairs.astype(np.int16) + 128).astype(np.uint8).reshape(-1, 4)[:, [0, 2, 1, 3]]
        stored[f"{name}.weight"] = np.ascontiguousarray(biased).view(np.int8).reshape(cols, rows)
        stored[f"{name}.weight_scales"] = scale
        values[f"{name}.weight"] = f32(codes) * f32(scale)[:, None]
    return Made("eetq/handmade", "float32(code) * float32(scale)", stored, values)


def bitnet() -> Made:
    stored: Arrays = {}
    values: Arrays = {}
    for name, rows, cols, dtype in (("a", 7, 40, np.float32), ("b", 10, 33, F16), ("c", 1, 64, F16)):
        codes, scale = codes_of(-1, 2, rows, cols), (20 + 40 * RNG.random(1)).astype(dtype)
        height = -(-rows // 4)
        padded = np.concatenate([codes + 1, np.zeros((4 * height - rows, cols), np.int64)])
        planes = padded.reshape(4, height, cols) << 2 * np.arange(4)[:, None, None]
        stored[f"{name}.weight"] = planes.sum(0).astype(np.uint8)
        stored[f"{name}.weight_scale"] = scale
        values[f"{name}.weight"] = f32(codes) / f32(scale)
    return Made("bitnet/handmade", "float32(code) / float32(scale)", stored, values)


def gemma() -> Iterator[Made]:
    how = "float32(code - 2^(bits - 1)) * scale"
    for case, weights in (
        ("gemma_embedding", (("a", 4, 33, 1), ("b", 2, 30, 3), ("c", 8, 24, 2))),
        ("gemma_int", (("a", 2, 37, 1), ("b", 4, 31, 1))),
    ):
        stored: Arrays = {}
        values: Arrays = {}
        codes_name, scale_name = ("weight", "weight_scale") if case == "gemma_int" else EMBEDDING
        for name, n_bits, cols, blocks in weights:
            rows, per_byte = 11, 8 // n_bits
            codes, scale = codes_of(0, 1 << n_bits, rows, cols), f32(0.01 + RNG.random((rows, blocks)))
            if n_bits == 8:
                packed = (codes - 128).astype(np.int8)
            else:
                padded = np.pad(codes, ((0, 0), (0, -cols % per_byte))).reshape(rows, -1, per_byte)
                packed = (padded << n_bits * np.arange(per_byte)).sum(2).astype(np.uint8)
            stored[f"{name}.{codes_name}"] = packed
            stored[f"{name}.{scale_name}"] = scale
            values[f"{name}.weight"] = f32(codes - (1 << (n_bits - 1))) * scale.repeat(cols // blocks, 1)
        yield Made(f"{case}/handmade", how, stored, values)
