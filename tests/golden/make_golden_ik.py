"""Makes the golden files of ik_llama.cpp's GGUF types for tests/formats/test_formats.py.

    python tests/golden/make_golden_ik.py LIBRARY           needs numpy and safetensors

LIBRARY is a shared library of ik_llama.cpp's own C and C++, at commit 8337e4cd, without fused multiplications and
additions, whose rounding differs from one machine to the next:

    cd ik_llama.cpp/ggml; flags="-O2 -fPIC -mavx2 -mf16c -mfma -ffp-contract=off -D_GNU_SOURCE"
    include="-Iinclude -Isrc -Isrc/iqk"
    for file in ggml ggml-quants ggml-aarch64; do gcc -std=gnu11 $flags $include -c src/$file.c; done
    g++ -std=c++17 $flags $include -c src/iqk/iqk_quantize.cpp
    g++ -shared *.o -o missing.so           # ggml.c also names functions for whole models, which nothing calls here
    nm -Du missing.so | awk '!/@| w /{print "void "$2"(void){__builtin_trap();}"}' > stubs.c
    gcc -fPIC -c stubs.c; g++ -shared *.o -o LIBRARY

It quantizes weights and reads the values of all blocks, also of such with random bytes, which have every code and every
scale. No number comes from quanterr.
"""

import ctypes
import json
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import load, save_file

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from support.gguf_stored import Stored, gguf  # noqa: E402

from quanterr.checkpoints.ggml_types import OF_NAME  # noqa: E402

Rows = dict[str, tuple[str, np.ndarray]]  # name → type, rows of bytes
PRODUCER = "ikawrakow/ik_llama.cpp 8337e4cd"
HOW = {
    "quantized": "normal numbers, quantized by quantize_{0}",
    "random": "blocks of random bytes, with scales as those of weights",
    "odd": "blocks of random bytes, with scales of all kinds",
}
# A scale that is NaN, and one that is a number.
ODD = tuple((no_number, number) for no_number in (np.inf, -np.inf, np.nan) for number in (1e-30, -1e-20, 1e30, 1))
ODD_HALVES = tuple((no_number, number) for no_number in (np.inf, -np.inf, np.nan) for number in (6e-8, -6e-5, 65504, 1))

# Types of blocks without a float16 scale for each row at their beginning: it is in heads alone, or a power of two.
WITHOUT_D = {"IQ1_BN", "IQ2_BN", "MXFP4", "IQ1_S", "IQ1_M", "Q8_KV", "IQ4_KSS", "IQ2_KL"}
WITHOUT_D |= {"IQ2_KS", "IQ3_KS", "IQ4_KS", "IQ5_KS", "IQ1_KT", "IQ2_KT", "IQ3_KT", "IQ4_KT"}
WITH_MINIMA = {"Q2_K", "Q4_K", "Q5_K"}  # two such scales
ADDS_ZERO = {"Q5_0_R4", "Q6_0_R4", "Q8_K_R16"}
PLAIN = ("Q6_0", "IQ2_K", "IQ3_K", "IQ4_K", "IQ5_K", "IQ6_K", "IQ2_KS", "IQ3_KS", "IQ4_KS", "IQ5_KS", "IQ4_KSS")
PLAIN += ("IQ1_BN", "IQ2_BN", "IQ2_KL", "Q8_KV", "IQ1_KT", "IQ2_KT", "IQ3_KT", "IQ4_KT")


def function_name(ggml_type: str) -> str:
    """Return the type as names of functions spell it."""
    return ggml_type.lower().replace("q8_kv", "q8_KV")


class InitParams(ctypes.Structure):
    """The argument of ggml_init."""

    _fields_ = [("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]


def pointer(array: np.ndarray) -> ctypes.c_void_p:
    """Return the address of an array."""
    return array.ctypes.data_as(ctypes.c_void_p)


class Library:
    """The functions of ik_llama.cpp."""

    def __init__(self, path: str) -> None:
        self.functions = ctypes.CDLL(path)
        self.functions.ggml_init(InitParams(1 << 20, None, False))  # makes the table of float16 numbers

    def quantize(self, ggml_type: str, values: np.ndarray) -> np.ndarray:
        """Return quantized rows, uint8 (rows, bytes)."""
        rows, cols = values.shape
        stored = np.zeros((rows, OF_NAME[ggml_type].count_bytes((1, cols))), np.uint8)
        function = self.functions[f"quantize_{function_name(ggml_type)}"]
        function.restype = ctypes.c_size_t
        size = function(
            pointer(values),
            pointer(stored),
            ctypes.c_int64(rows),
            ctypes.c_int64(cols),
            None,
            None,
        )
        assert size == stored.size, (ggml_type, size, stored.shape)
        return stored

    def dequantize(self, ggml_type: str, stored: np.ndarray, cols: int) -> np.ndarray:
        """Return values, float32 (rows, cols). The library reads interleaved rows together."""
        if ggml_type in ("IQ1_BN", "IQ2_BN"):  # these functions ignore the head of a row, which kernels multiply by
            head = OF_NAME[ggml_type].head
            d = stored[:, :head].copy().view(np.float16 if head == 2 else np.float32).astype(np.float32)
            return d * self._dequantize(ggml_type, stored[:, head:], cols)
        return self._dequantize(ggml_type, stored, cols)

    def _dequantize(self, ggml_type: str, stored: np.ndarray, cols: int) -> np.ndarray:
        together = OF_NAME[ggml_type].rows
        values = np.zeros((len(stored), cols), np.float32)
        function = self.functions[f"dequantize_row_{function_name(ggml_type)}"]
        function.restype = None
        for row in range(0, len(stored), together):
            group = np.ascontiguousarray(stored[row : row + together])
            decoded = np.zeros((together, cols), np.float32)
            function(
                pointer(group),
                pointer(decoded),
                ctypes.c_int64(together * cols),
            )
            values[row : row + together] = decoded
        return values


def random_rows(rng: np.random.Generator, ggml_type: str, rows: int, cols: int, odd: bool = False) -> np.ndarray:
    """Return rows of random bytes, uint8 (rows, bytes), with tame scales unless ``odd``."""
    of = OF_NAME[ggml_type]
    groups, blocks = rows // of.rows, cols // of.elements
    raw = rng.integers(0, 256, (groups, blocks, of.rows * of.n_bytes), dtype=np.uint8)
    if base_of(ggml_type) not in WITHOUT_D:
        shape = groups, blocks, of.rows * (2 if base_of(ggml_type) in WITH_MINIMA else 1)
        scale = rng.standard_normal(shape) * 1e-3
        if odd:
            scale = np.resize(rng.choice(ODD_HALVES), shape)
        scale = scale.astype(np.float16)
        raw[:, :, : 2 * shape[2]] = np.ascontiguousarray(scale).view(np.uint8)
    heads = np.zeros((groups, 0), np.uint8)
    if of.head:
        floats = rng.standard_normal((groups, of.rows)) * 1e-3
        if odd:
            floats = np.resize(rng.choice(ODD_HALVES if of.head == 2 else ODD), floats.shape)
        heads = floats.astype(np.float16 if of.head == 2 else np.float32).view(np.uint8)
        if of.head == 8:
            heads = np.concatenate([heads, rng.integers(0, 256, heads.shape, dtype=np.uint8)], 1)
    return np.concatenate([heads, raw.reshape(groups, -1)], 1).reshape(rows, -1)


def base_of(ggml_type: str) -> str:
    """Return the variant of a type that does not interleave rows."""
    return "Q8_K_R8" if ggml_type.startswith("Q8_K_R") else ggml_type.split("_R")[0]


def make_plain(library: Library, ggml_type: str) -> None:
    """Write weights of a type that does not interleave rows."""
    of, rng = OF_NAME[ggml_type], np.random.default_rng(OF_NAME[ggml_type].number)
    of_one_row, two = (1, of.elements), (1, 2 * of.elements)
    weights = (rng.standard_normal(two if of.head else of_one_row) * 0.02).astype(np.float32)
    rows = {
        "quantized": library.quantize(ggml_type, weights),
        "random": random_rows(rng, ggml_type, *of_one_row),
        "odd": random_rows(rng, ggml_type, *((2, of.elements) if of.head else two), odd=True),
    }
    how = "; ".join(f"{name}: {HOW[name].format(function_name(ggml_type))}" for name in rows)
    save(library, "ik_llama_cpp", {f"{name}.weight": (ggml_type, raw) for name, raw in rows.items()}, how)


def make_interleaved(library: Library, ggml_type: str) -> None:
    """Write a weight of a type that interleaves rows."""
    of, rng = OF_NAME[ggml_type], np.random.default_rng(OF_NAME[ggml_type].number)
    shape = (of.rows, 256) if of.elements >= 64 else (2 * of.rows, 2 * of.elements)
    if ggml_type == "MXFP4_R8":  # dequantize_row_mxfp4_r8 writes beyond its rows
        weights = (rng.standard_normal(shape) * 0.02).astype(np.float32)
        values = library.dequantize("MXFP4", library.quantize("MXFP4", weights), shape[1])
        how = f"{HOW['quantized'].format('mxfp4_r8')}; the values are those that quantize_mxfp4 stores"
        rows = {"interleaved.weight": (ggml_type, library.quantize(ggml_type, weights))}
        write("ik_llama_cpp_rows", rows, {"interleaved.weight": values}, how)
        return
    raw = random_rows(rng, ggml_type, *shape)
    save(library, "ik_llama_cpp_rows", {"interleaved.weight": (ggml_type, raw)}, HOW["random"])


def save(library: Library, case: str, rows: Rows, how: str) -> None:
    """Write the file, and the values of its weights that the library reads."""
    values = {
        name: library.dequantize(ggml_type, raw, cols_of(ggml_type, raw)) for name, (ggml_type, raw) in rows.items()
    }
    ggml_type = next(iter(rows.values()))[0]
    times = ", times the number before each row" if ggml_type in ("IQ1_BN", "IQ2_BN") else ""
    write(case, rows, values, f"{how}; read by dequantize_row_{function_name(ggml_type)}{times}")


def make_i2_s(library: Library) -> None:
    """Write codes of three values, followed by the scale of the tensor."""
    rng, (rows, cols) = np.random.default_rng(36), (2, 256)
    packed = sum(rng.integers(0, 3, (rows, cols // 4), dtype=np.uint8) << shift for shift in (0, 2, 4, 6))
    raw = np.concatenate([packed.ravel(), np.array([0.0123] + 7 * [0], np.float32).view(np.uint8)])
    values = np.zeros((rows, cols), np.float32)
    library.functions.dequantize_row_ms_i2s(pointer(raw), pointer(values), ctypes.c_int64(rows * cols))
    how = "random codes of three values, read by dequantize_row_ms_i2s"
    write("ik_llama_cpp", {"x.weight": ("I2_S", raw.reshape(1, -1))}, {"x.weight": values}, how)


def cols_of(ggml_type: str, raw: np.ndarray) -> int:
    """Return how many columns rows of bytes have."""
    of = OF_NAME[ggml_type]
    return (raw.shape[1] - of.head) // of.n_bytes * of.elements


def write(case: str, rows: Rows, values: dict[str, np.ndarray], how: str) -> None:
    """Write the file and the values of its weights."""
    ggml_type = next(iter(rows.values()))[0]
    origin = {"producer": PRODUCER, "how": how}
    if ggml_type in ADDS_ZERO:
        origin["zeros"] = "positive: it adds d * code and -32 d, -16 d or -128 d"
    path = HERE / f"gguf_{base_of(ggml_type).lower()}" / f"{case}.gguf"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(
        gguf(Stored(name, ggml_type, values[name].shape, raw.tobytes()) for name, (ggml_type, raw) in rows.items())
    )
    expected = path.with_suffix(".expected.safetensors")
    save_file(values, expected)
    save_file(load(expected.read_bytes()), expected, {"origin": json.dumps(origin)})
    for file in (path, expected):
        file.chmod(0o644)


def main() -> None:
    library = Library(sys.argv[1])
    make_i2_s(library)
    for ggml_type in PLAIN:
        make_plain(library, ggml_type)
    for ggml_type in OF_NAME.values():
        if ggml_type.rows > 1:
            make_interleaved(library, ggml_type.name)


if __name__ == "__main__":
    main()
