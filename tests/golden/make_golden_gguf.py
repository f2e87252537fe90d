"""Makes the golden files of the GGUF formats for tests/formats/test_formats.py.

    python tests/golden/make_golden_gguf.py FIXTURES        needs numpy, safetensors and gguf

FIXTURES/gguf/<fixture>/ holds files written by llama-quantize and gguf-py with the values that llama.cpp's own C code
reads from them: case.json, quantized.gguf, dequantized.safetensors.xz. A few rows are cut out of each. Blocks of
random bytes hold what real weights have not: every code, every scale; gguf-py reads them, and for types it does not
know numpy does by hand. No number comes from quanterr.

    <format>/<case>.gguf                    what is stored, written by gguf-py where it knows the type
    <format>/<case>.expected.safetensors    the values of its weights, float32
"""

import json
import lzma
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize
from safetensors.numpy import load, save_file

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

Arrays = dict[str, np.ndarray]
GGUF_PY = {"producer": f"gguf {version('gguf')}"}
RNG = np.random.default_rng(20250101)

# Type → where its blocks hold float16 numbers.
HALVES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ1_S": (0,),
    "IQ1_M": (),  # its scale is stored in pieces
    "IQ2_XXS": (0,),
    "IQ2_XS": (0,),
    "IQ2_S": (0,),
    "IQ3_XXS": (0,),
    "IQ3_S": (0,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
    "MXFP4": (),
    "NVFP4": (),
    "Q1_0": (0,),
    "Q2_0": (0,),
    "PQ2_0": (0,),
    "PTQ1_0": (26,),
    "Q4_0_ROCMFP4": (),
    "Q4_0_ROCMFP4_FAST": (),
}
ROCM = ("Q4_0_ROCMFP4", "Q4_0_ROCMFP4_FAST")
SIZES = {ggml_type.name: sizes for ggml_type, sizes in GGML_QUANT_SIZES.items()} | {
    "Q2_0": (64, 18),
    "PQ2_0": (128, 34),
    "PTQ1_0": (128, 28),
    "Q4_0_ROCMFP4": (32, 18),
    "Q4_0_ROCMFP4_FAST": (32, 17),
}
ODD_HALVES = (0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x0400, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00, 0x3C00)

FIXTURES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q6_K", "IQ1_S", "IQ1_M", "IQ2_XXS")
FIXTURES += ("IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ4_NL", "TQ1_0", "MXFP4", "NVFP4", "Q1_0")


# ---- values


def q1_0(blocks: np.ndarray) -> np.ndarray:
    """Dequantize by hand: d where the bit is set, else -d."""
    d = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    return np.where(np.unpackbits(blocks[:, 2:], axis=1, bitorder="little") == 1, d, -d)


def q2_0(blocks: np.ndarray) -> np.ndarray:
    """Dequantize by hand: (code - 1) * d."""
    d = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    codes = np.stack([blocks[:, 2:] >> shift & 3 for shift in (0, 2, 4, 6)], 2).reshape(len(blocks), -1)
    return (codes.astype(np.int32) - 1).astype(np.float32) * d


def ptq1_0(blocks: np.ndarray) -> np.ndarray:
    """Dequantize by hand: (digit - 1) * d, for digits of base 3 in runs of 16, 8 and 2 bytes."""
    d = blocks[:, 26:].copy().view(np.float16).astype(np.float32)
    values, end = np.empty((len(blocks), 128), np.float32), 0
    for begin, run, digits in ((0, 16, 5), (16, 8, 5), (24, 2, 4)):
        for digit in range(digits):
            powers = blocks[:, begin : begin + run] * np.uint8(3**digit)  # modulo 256
            values[:, end : end + run] = (powers.astype(np.int32) * 3 >> 8) - 1
            end += run
    return values * d


def rocmfp4(blocks: np.ndarray) -> np.ndarray:
    """Dequantize by hand: the code's entry in a table times half of an E4M3 number, of both halves or of each."""
    table = np.array([0, 1, 2, 3, 4, 6, 8, 10, 0, -1, -2, -3, -4, -6, -8, -10], np.float32)
    codes, scales = blocks[:, :16], blocks[:, 16:]
    exponent, fraction = (scales >> 3 & 15).astype(np.int32), (scales & 7).astype(np.float32)
    halved = np.where(exponent > 0, (fraction + 8) * 2.0 ** (exponent - 11), fraction / 1024).astype(np.float32)
    halved[(scales & 0x7F) == 0x7F] = 0  # 0x7F and 0xFF
    return np.concatenate([table[codes & 15] * halved[:, :1], table[codes >> 4] * halved[:, -1:]], 1)


BY_HAND: dict[str, Callable[[np.ndarray], np.ndarray]] = {"Q1_0": q1_0, "Q2_0": q2_0, "PQ2_0": q2_0, "PTQ1_0": ptq1_0}
BY_HAND |= dict.fromkeys(ROCM, rocmfp4)
NOT_IN_GGUF_PY = ("Q2_0", "PQ2_0", "PTQ1_0", *ROCM)
HAND = {"producer": f"hand-made with numpy {np.__version__}"}
HOW_BY_HAND = "by the formula of llama.cpp (P…: PrismML's fork) ggml/src/ggml-quants.c dequantize_row_"
HOW_OF_ROCM = "by the formula of ROCmFPX's fork of llama.cpp, ggml/rocmfp4/rocmfp4.c rocmfp4_dequantize_row_"


def values_of(ggml_type: str, blocks: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return the values that the producer reads from blocks, uint8 (n, bytes of a block)."""
    with np.errstate(all="ignore"):
        if ggml_type in BY_HAND:
            return BY_HAND[ggml_type](blocks).astype(np.float32).reshape(shape)
        values = dequantize(blocks.reshape(1, -1), GGMLQuantizationType[ggml_type])
    return values.astype(np.float32).reshape(shape)


# ---- files


def save(format: str, case: str, ggml_type: str, stored: Arrays, values: Arrays, origin: dict[str, str]) -> None:
    """Write a case; ``stored`` has bytes in the shape of the weight, the last dimension in bytes, or plain numbers."""
    path = HERE / format / f"{case}.gguf"
    path.parent.mkdir(exist_ok=True)
    if ggml_type in NOT_IN_GGUF_PY:
        from support.gguf_stored import Stored, gguf

        tensors = [Stored(name, ggml_type, values[name].shape, array.tobytes()) for name, array in stored.items()]
        path.write_bytes(gguf(tensors))
    else:
        write(path, ggml_type, stored, values)
    expected = path.with_suffix(".expected.safetensors")
    save_file({name: np.ascontiguousarray(array) for name, array in sorted(values.items())}, expected)
    save_file(load(expected.read_bytes()), expected, {"origin": json.dumps(origin)})
    for file in (path, expected):
        file.chmod(0o644)


def write(path: Path, ggml_type: str, stored: Arrays, values: Arrays) -> None:
    writer = GGUFWriter(path, "none")
    for name, array in stored.items():
        if array.dtype == np.uint8:
            n, n_bytes = SIZES[ggml_type]
            shape = values[name].shape
            if array.size * n // n_bytes != values[name].size or shape[-1] % n:  # the shape it is stored in
                shape = (array.size // n_bytes, n)
            if shape != values[name].shape:
                writer.add_array(f"comfy.gguf.orig_shape.{name}", [int(size) for size in values[name].shape])
            raw = array.reshape(*shape[:-1], shape[-1] // n * n_bytes)
            writer.add_tensor(name, raw, raw_dtype=GGMLQuantizationType[ggml_type])
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# ---- cut from fixtures


def cut_rows(fixture: Path, format: str, ggml_type: str, rows: int) -> None:
    """Write the first rows of a weight as llama-quantize wrote them, with the values that llama.cpp's C code reads."""
    case = json.loads((fixture / "case.json").read_text())
    reader = GGUFReader(fixture / "quantized.gguf")
    known = load(lzma.decompress((fixture / "dequantized.safetensors.xz").read_bytes()))
    heads = reader.fields["llama.attention.head_count_kv"].contents()
    name = "blk.0.attn_k.weight"
    stored = next(tensor for tensor in reader.tensors if tensor.name == name)
    assert stored.tensor_type.name == ggml_type
    whole = known[case["about"]["name_map"][name]]  # as in the original; llama.cpp stores k with its rows permuted
    whole = whole.reshape(heads, 2, whole.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(whole.shape)
    producer = case["about"]["producer"]
    origin = {"producer": f"{producer} of llama.cpp" if producer.startswith("llama") else producer}
    origin["how"] = f"the first {rows} rows of {name} of the fixture {fixture.name}, read by llama.cpp's C code"
    save(format, producer.replace("-", "_"), ggml_type, {name: stored.data[:rows]}, {name: whole[:rows]}, origin)


# ---- random blocks


def random_blocks(ggml_type: str, n: int, tame: bool) -> np.ndarray:
    """Return blocks of random bytes; with ``tame``, their scales are those of weights."""
    blocks = RNG.integers(0, 256, (n, SIZES[ggml_type][1]), dtype=np.uint8)
    for at in HALVES[ggml_type]:
        if tame:
            scale = (RNG.standard_normal(n) * 0.01).astype(np.float16).view(np.uint16)
        else:
            scale = np.resize(RNG.permutation(np.array(ODD_HALVES, np.uint16)), n)
        blocks[:, at : at + 2] = scale[:, None].view(np.uint8)
    if ggml_type == "IQ1_M" and tame:  # the highest bits of d: a magnitude below 1
        blocks[:, 55] &= 0xBF
    if ggml_type == "MXFP4" and tame:
        blocks[:, 0] = RNG.integers(110, 128, n)
    return blocks


def random_case(ggml_type: str) -> None:
    n, n_bytes = SIZES[ggml_type]
    stored, values = {}, {}
    for name, shape, tame in (
        ("matrix.weight", (3, 2 * n), True),
        ("experts.weight", (2, 2, n), True),
        ("vector.weight", (n,), True),
        ("odd.weight", (3, 4 * n), False),
    ):
        blocks = random_blocks(ggml_type, int(np.prod(shape)) // n, tame)
        values[name] = values_of(ggml_type, blocks, shape)
        stored[name] = blocks.reshape(*shape[:-1], shape[-1] // n * n_bytes)
        assert np.isfinite(values[name]).any()
        assert np.isfinite(values[name]).all() or not tame
    origin = HAND if ggml_type in BY_HAND else GGUF_PY
    by_hand = (HOW_OF_ROCM if ggml_type in ROCM else HOW_BY_HAND) + ggml_type.lower()
    how = by_hand if ggml_type in BY_HAND else "gguf.quants.dequantize"
    origin = origin | {"how": f"blocks of random bytes, read by {how}"}
    save(f"gguf_{ggml_type.lower()}", "random_blocks", ggml_type, stored, values, origin)


def every_index() -> None:
    """Write every entry of the grids with random scales and signs."""
    for ggml_type, entries, per_entry in (
        ("IQ1_S", 2048, 32),
        ("IQ2_XXS", 256, 32),
        ("IQ2_XS", 512, 32),
        ("IQ2_S", 1024, 32),
        ("IQ3_XXS", 256, 64),
        ("IQ3_S", 512, 64),
    ):
        blocks = random_blocks(ggml_type, entries // per_entry, True)
        index = np.arange(entries).reshape(-1, per_entry)
        low, high = (index & 255).astype(np.uint8), index >> 8
        if ggml_type == "IQ1_S":
            words = blocks[:, 34:].view(np.uint16) & 0xF000
            words |= (high.reshape(-1, 8, 4) << np.array([0, 3, 6, 9])).sum(2).astype(np.uint16)
            blocks[:, 2:34], blocks[:, 34:] = low, words.view(np.uint8)
        elif ggml_type == "IQ2_XXS":
            blocks[:, 2:].reshape(-1, 8, 8)[:, :, :4] = low.reshape(-1, 8, 4)
        elif ggml_type == "IQ2_XS":
            words = blocks[:, 2:66].copy().view(np.uint16) & 0xFE00 | index.astype(np.uint16)
            blocks[:, 2:66] = words.view(np.uint8)
        elif ggml_type == "IQ2_S":
            blocks[:, 2:34] = low
            blocks[:, 66:74] = (high.reshape(-1, 8, 4) << np.array([0, 2, 4, 6])).sum(2)
        else:
            blocks[:, 2:66] = low
            if ggml_type == "IQ3_S":
                blocks[:, 66:74] = (high.reshape(-1, 8, 8) << np.arange(8)).sum(2)
        shape = (len(blocks), 256)
        values = {"grid.weight": values_of(ggml_type, blocks, shape)}
        how = {"how": "every index once, random scales and signs, read by gguf.quants.dequantize"}
        save(f"gguf_{ggml_type.lower()}", "every_index", ggml_type, {"grid.weight": blocks}, values, GGUF_PY | how)


def every_exponent() -> None:
    """Write every scale of the two types whose scale is a byte."""
    for ggml_type, per_block in (("MXFP4", 1), ("NVFP4", 4)):
        n, n_bytes = SIZES[ggml_type]
        blocks = RNG.integers(0, 256, (256 // per_block, n_bytes), dtype=np.uint8)
        blocks[:, :per_block] = np.arange(256, dtype=np.uint8).reshape(-1, per_block)
        shape = (len(blocks), n)
        values = {"scales.weight": values_of(ggml_type, blocks, shape)}
        how = {"how": "every scale once, random codes, read by gguf.quants.dequantize"}
        save(f"gguf_{ggml_type.lower()}", "every_scale", ggml_type, {"scales.weight": blocks}, values, GGUF_PY | how)


# ---- side tensors and shapes


def write_scaled(fixtures: Path) -> None:
    """Write NVFP4 with X.scale: one from a fixture, and one for each expert by hand."""
    reader = GGUFReader(fixtures / "gguf_nvfp4_modelopt" / "quantized.gguf")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    name = "blk.0.attn_k"
    weight, scale = tensors[f"{name}.weight"], tensors[f"{name}.scale"].data
    blocks = weight.data[:5].reshape(-1, 36)
    stored = {f"{name}.weight": weight.data[:5], f"{name}.scale": scale}
    stored[f"{name}.input_scale"] = tensors[f"{name}.input_scale"].data
    values = {f"{name}.weight": values_of("NVFP4", blocks, (5, 64)) * scale}
    for shape in ((3, 2, 128), (3, 2, 64)):
        name = f"{shape[2]}_exps"
        blocks = random_blocks("NVFP4", int(np.prod(shape)) // 64, True)
        scale = RNG.random(3).astype(np.float32)
        stored |= {f"{name}.weight": blocks.reshape(3, 2, -1), f"{name}.scale": scale}
        values[f"{name}.weight"] = values_of("NVFP4", blocks, shape) * scale[:, None, None]
    how = "blk.0.attn_k: the first rows of the fixture gguf_nvfp4_modelopt (convert_hf_to_gguf.py), the others random; "
    how += "read by gguf.quants.dequantize, times X.scale in numpy"
    save("gguf_nvfp4", "modelopt_and_experts", "NVFP4", stored, values, GGUF_PY | {"how": how})


def write_reshaped(fixtures: Path) -> None:
    """Write shapes whose rows are not whole blocks, as ComfyUI-GGUF stores them."""
    for ggml_type, shapes in (
        ("Q8_0", {"conv.weight": (8, 4, 3, 3), "video.weight": (2, 3, 4, 2, 4), "narrow.weight": (24, 20)}),
        ("Q5_K", {"conv.weight": (16, 16, 3, 3), "wide.weight": (3, 256), "narrow.weight": (64, 36)}),
    ):
        stored, values = {}, {}
        for name, shape in shapes.items():
            blocks = random_blocks(ggml_type, int(np.prod(shape)) // SIZES[ggml_type][0], True)
            stored[name], values[name] = blocks.reshape(1, -1), values_of(ggml_type, blocks, shape)
        how = "comfy.gguf.orig_shape, random blocks, read by gguf.quants.dequantize and put into that shape"
        save(f"gguf_{ggml_type.lower()}", "comfy_shapes", ggml_type, stored, values, GGUF_PY | {"how": how})


def plain() -> None:
    """Write numbers that are not in blocks."""
    numbers = np.concatenate([RNG.standard_normal(50), [0.0, -0.0, np.inf, -np.inf, np.nan, 6e-8, 65504]])
    stored: Arrays = {"f64": numbers, "f32": numbers.astype(np.float32), "f16": numbers.astype(np.float16)}
    stored["matrix.f16"] = RNG.standard_normal((5, 7)).astype(np.float16)
    stored["conv.f32"] = RNG.standard_normal((4, 3, 2, 2)).astype(np.float32)
    values = {name: array if name == "f64" else array.astype(np.float32) for name, array in stored.items()}
    how = {"how": "written by gguf.GGUFWriter, widened by numpy"}
    save("dense", "gguf_floats", "F32", stored, values, GGUF_PY | how)
    integers = {
        f"int{8 * size}": RNG.integers(-(2 ** (8 * size - 1)), 2 ** (8 * size - 1), (3, 11)).astype(f"i{size}")
        for size in (1, 2, 4, 8)
    }
    save("verbatim", "gguf_integers", "F32", integers, integers, GGUF_PY | {"how": "written by gguf.GGUFWriter"})


def rocm() -> None:
    """Write the types of ROCmFPX, from random numbers of their own."""
    RNG.bit_generator.state = np.random.default_rng(1).bit_generator.state
    for ggml_type in ROCM:
        random_case(ggml_type)


def main() -> None:
    fixtures = Path(sys.argv[1]) / "gguf"
    for ggml_type in FIXTURES:
        cut_rows(fixtures / f"gguf_{ggml_type.lower()}", f"gguf_{ggml_type.lower()}", ggml_type, 3)
    for ggml_type in ("TQ1_0", "TQ2_0"):
        cut_rows(fixtures / f"gguf_py_{ggml_type.lower()}", f"gguf_{ggml_type.lower()}", ggml_type, 3)
    cut_rows(fixtures / "gguf_bf16", "dense", "BF16", 3)
    for ggml_type in HALVES:
        if ggml_type not in ROCM:
            random_case(ggml_type)
    every_index()
    every_exponent()
    write_scaled(fixtures)
    write_reshaped(fixtures)
    plain()
    rocm()


if __name__ == "__main__":
    main()
