"""Golden conversions: converters' output for each tensor of an original, element by element, and their files.

tests/golden_conversions/CONVERTER.json.xz holds all of a converter, by name: ``tests/golden_conversions/make.py``
derives them from converters' own code. They hold no weights: ``materialize`` fills both sides with random ones.
"""

import json
import lzma
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from ml_dtypes import bfloat16
from safetensors.numpy import save_file

GOLDEN = Path(__file__).resolve().parents[1] / "golden_conversions"
CONVERTERS = ("llama.cpp", "mlx", "mlx_vlm", "mlx_audio")
# Refused, as they are compared only in part: PLaMo 2 adds other numbers to its norms; MLX turns w2 of each expert.
REFUSED = {"llama.cpp-plamo2", "mlx-dbrx"}
# Each transform of a converter is in one of these.
TRANSFORMED = (
    "llama.cpp-bloom", "llama.cpp-deepseek_v2", "llama.cpp-falcon_h1", "llama.cpp-gemma2", "llama.cpp-gemma3-mmproj",
    "llama.cpp-gemma4_towers-mmproj", "llama.cpp-gpt2", "llama.cpp-gpt_oss", "llama.cpp-llama_biased",
    "llama.cpp-pixtral-mmproj", "llama.cpp-qwen3_5", "mlx-deepseek_v3_plain", "mlx-falcon_h1", "mlx-gpt2_published",
    "mlx-llama4", "mlx-qwen3_5", "mlx-qwen3_next", "mlx_vlm-internvl", "mlx_vlm-llama4", "mlx_vlm-ministral3",
    "mlx_vlm-qwen3_5", "mlx_audio-moonshine", "mlx_audio-qwen2_audio", "mlx_audio-wav2vec2",
)  # fmt: skip
AFFINE_BITS = {"affine-4": 4, "affine-8": 8}
SMALLEST_SCALE = np.float32(1e-7)  # the least scale of mlx.core.quantize


@dataclass(frozen=True)
class Conversion:
    """An original, what is stored of it, and how each stored element comes about.

    ``tensors``: stored name → ``shape``, ``type`` (the type that the converter gives it if it is asked for Q8_0, or the
    quantization that mlx-lm gives it), ``op`` (the arithmetic) and ``source`` (``elements_of``). ``derived``: stored
    tensors that have no source. ``uses``: sources whose elements are not all used exactly once, with how many elements
    are used how often.
    """

    name: str
    converter: str
    origin: dict[str, str]
    config: dict[str, Any]
    original: dict[str, dict[str, Any]]
    keys: dict[str, Any]
    tensors: dict[str, dict[str, Any]]
    derived: dict[str, dict[str, Any]]
    dropped: list[str]
    uses: dict[str, dict[str, int]]

    @property
    def is_gguf(self) -> bool:
        """True if the converter writes GGUF."""
        return self.converter.startswith("llama.cpp")


@dataclass(frozen=True)
class Made:
    """Folders of both sides, the library's values of each stored tensor, and Σx² and Σe².

    The stored tensor stands for x; the library reads x + e.
    """

    original: Path
    quantized: Path
    read: dict[str, np.ndarray]
    squares: dict[str, float]
    errors: dict[str, float]


def list_conversions() -> list[str]:
    """Return the names of all golden conversions: CONVERTER-ORIGINAL."""
    return [f"{converter}-{original}" for converter in CONVERTERS for original in read_golden(converter)]


def read_conversion(name: str) -> Conversion:
    """Return a golden conversion."""
    converter, original = name.split("-", 1)
    return Conversion(name=name, **read_golden(converter)[original])


@cache
def read_golden(converter: str) -> dict[str, dict[str, Any]]:
    """Return all golden conversions of a converter, by name of the original."""
    return json.loads(lzma.decompress((GOLDEN / f"{converter}.json.xz").read_bytes()))


def write_golden(converter: str, documents: dict[str, dict[str, Any]]) -> None:
    """Write all golden conversions of a converter."""
    data = json.dumps(dict(sorted(documents.items())), separators=(",", ":")).encode()
    (GOLDEN / f"{converter}.json.xz").write_bytes(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME))


def elements_of(source: list[Any]) -> list[tuple[str, np.ndarray]]:
    """Expand a map: for each piece, in order, the source's name and its flat elements.

    A piece is [name, first element, [[count, step], …]]: nested loops, the outermost first.
    """
    pieces = []
    for name, first, loops in source:
        elements = np.array([first])
        for count, step in loops:
            elements = (elements[:, None] + np.arange(count) * step).ravel()
        pieces.append((name, elements))
    return pieces


def gather(source: list[Any], originals: dict[str, np.ndarray]) -> np.ndarray:
    """Return the elements that a map takes from the originals, flat, before arithmetic."""
    return np.concatenate([originals[name].ravel()[elements] for name, elements in elements_of(source)])


def plain(source: list[Any], originals: dict[str, np.ndarray]) -> np.ndarray:
    """Return the same elements in the order of the originals: as if the converter had not moved them."""
    taken: dict[str, list[np.ndarray]] = {}
    for name, elements in elements_of(source):
        taken.setdefault(name, []).append(elements)
    return np.concatenate([originals[name].ravel()[np.sort(np.concatenate(of))] for name, of in taken.items()])


def apply(op: Any, x: np.ndarray) -> np.ndarray:
    """Return flat float32 values after the converter's arithmetic, in float32."""
    x = x.astype(np.float32)
    match op:
        case "identity":
            return x
        case ["add", value]:
            return x + np.float32(value)
        case ["mul", value]:
            return x * np.float32(value)
        case ["exp"]:
            return np.exp(x)
        case ["negexp"]:
            return -np.exp(x)
        case ["softplus"]:
            return np.logaddexp(x, np.float32(0))
        case ["set", value]:  # the converter fills these elements, whatever the source
            return np.full_like(x, value)
        case ["pieces", pieces]:
            ends = np.cumsum([count for count, _ in pieces])[:-1]
            return np.concatenate([apply(of, part) for (_, of), part in zip(pieces, np.split(x, ends), strict=True)])
    raise ValueError(op)


def undone(op: Any, x: np.ndarray) -> np.ndarray:
    """Return flat values before the converter's arithmetic, in float64."""
    x = x.astype(np.float64)
    match op:
        case "identity":
            return x
        case ["add", value]:
            return x - value
        case ["mul", value]:
            return x / value
        case ["exp"]:
            return np.log(x)
        case ["negexp"]:
            return np.log(-x)
        case ["softplus"]:
            return np.log(np.expm1(x))
        case ["pieces", pieces]:
            ends = np.cumsum([count for count, _ in pieces])[:-1]
            return np.concatenate([undone(of, part) for (_, of), part in zip(pieces, np.split(x, ends), strict=True)])
    raise ValueError(op)


def put_back(conversion: Conversion, read: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the original's tensors, float64, as stored tensors stand for them; 0 where nothing is stored."""
    values = {name: np.zeros(of["shape"]) for name, of in conversion.original.items()}
    for name, tensor in conversion.tensors.items():
        x, start = undone(tensor["op"], read[name].ravel()), 0
        for source, elements in elements_of(tensor["source"]):
            values[source].reshape(-1)[elements] = x[start : start + len(elements)]
            start += len(elements)
    return values


def random_originals(conversion: Conversion, seed: int) -> dict[str, np.ndarray]:
    """Return random values for the original, float32 that its dtypes can hold exactly."""
    rng = np.random.default_rng(seed)
    originals = {}
    for name, tensor in conversion.original.items():
        x = np.asarray(_random(name, tuple(tensor["shape"]), rng), np.float32)
        originals[name] = x if tensor["dtype"] == "F32" else x.astype(bfloat16).astype(np.float32)
    return originals


def _random(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    if name.endswith("A_log"):
        return np.log(rng.uniform(1, 16, shape))
    if "norm" in name and len(shape) == 1:
        # Gemma and Qwen3-Next store norms around 0, others around 1: either is sound input of a converter.
        return rng.standard_normal(shape) * 0.1 + (0 if rng.random() < 0.5 else 1)
    return rng.standard_normal(shape) * (0.05 if len(shape) > 1 else 1)


def materialize(
    conversion: Conversion,
    folder: Path,
    seed: int = 0,
    quantization: str | None = None,
    left_out: Collection[str] = frozenset(),
    group: int = 64,
) -> Made:
    """Write the original and what the converter makes of it, with random weights, into two folders.

    ``quantization``: of GGUF "Q8_0" (default) or "F32", of MLX "affine-4" (default), "affine-8" or "BF16", in groups of
    ``group``. ``left_out``: stored tensors whose transform is left out: their elements are in the order of the sources,
    without arithmetic. What they should stand for is unchanged.
    """
    originals = random_originals(conversion, seed)
    _write_original(conversion, originals, folder / "original")
    right, stored = {}, {}
    for name, tensor in conversion.tensors.items():
        x = gather(tensor["source"], originals)
        right[name] = apply(tensor["op"], x).reshape(tensor["shape"])
        wrong = name in left_out
        stored[name] = plain(tensor["source"], originals).reshape(tensor["shape"]) if wrong else right[name]
    for name, tensor in conversion.derived.items():
        stored[name] = np.array(tensor["values"], np.float32).reshape(tensor["shape"])
    quantized = folder / "quantized"
    quantized.mkdir(parents=True)
    if conversion.is_gguf:
        read = _write_gguf(conversion, stored, quantized / "model.gguf", quantization or "Q8_0")
    else:
        read = _write_mlx(conversion, stored, quantized, quantization or "affine-4", group)
    squares = {name: float(np.sum(np.square(x, dtype=np.float64))) for name, x in right.items()}
    errors = {name: float(np.sum(np.square(read[name].astype(np.float64) - x))) for name, x in right.items()}
    return Made(folder / "original", quantized, read, squares, errors)


def _write_original(conversion: Conversion, originals: dict[str, np.ndarray], folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(conversion.config))
    kinds = {"F32": np.float32, "BF16": bfloat16}
    stored = {name: x.astype(kinds[conversion.original[name]["dtype"]]) for name, x in originals.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})


def _write_gguf(conversion: Conversion, stored: dict[str, np.ndarray], path: Path, type_: str) -> dict[str, np.ndarray]:
    """Return what is read back."""
    import gguf

    writer = gguf.GGUFWriter(path, conversion.keys["general.architecture"])
    for key, value in conversion.keys.items():
        if key != "general.architecture":  # the writer adds this key itself
            writer.add_key_value(key, value, *_gguf_types(value))
    read = {}
    for name, x in stored.items():
        ggml_type = conversion.tensors[name]["type"] if name in conversion.tensors and type_ == "Q8_0" else "F32"
        of = gguf.GGMLQuantizationType[ggml_type]
        quantized = gguf.quants.quantize(x, of)
        writer.add_tensor(name, quantized, raw_dtype=of)
        read[name] = gguf.quants.dequantize(quantized, of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read


def _gguf_types(value: Any) -> tuple[Any, Any]:
    import gguf

    types = gguf.GGUFValueType
    if isinstance(value, list):
        return types.ARRAY, types.get_type(value[0]) if value else types.UINT32
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return types.UINT32, None
    return types.get_type(value), None


def _write_mlx(
    conversion: Conversion, stored: dict[str, np.ndarray], folder: Path, type_: str, group: int
) -> dict[str, np.ndarray]:
    """Return what is read back. Layers that mlx-lm quantizes in a way of their own keep it."""
    config = dict(conversion.keys)
    parts: dict[str, np.ndarray] = {}
    read = {}
    settings_of_layers: dict[str, Any] = {}
    for name, x in stored.items():
        mlx_type = conversion.tensors.get(name, {}).get("type")
        bits, size = (
            (mlx_type["bits"], mlx_type["group_size"])
            if isinstance(mlx_type, dict)
            else (AFFINE_BITS.get(type_), group)
        )
        if bits is None or type_ == "BF16" or mlx_type is None or x.shape[-1] % max(size, group):
            parts[name] = x if _is_float32(conversion, name) else x.astype(bfloat16)
            read[name] = parts[name].astype(np.float32)
            continue
        module = name.removesuffix(".weight")
        codes, scales, biases, read[name] = affine(x.astype(bfloat16), bits, size)
        parts |= {name: codes, f"{module}.scales": scales, f"{module}.biases": biases}
        if isinstance(mlx_type, dict):
            settings_of_layers[module] = {"group_size": size, "bits": bits}
    if type_ != "BF16":
        config["quantization"] = {
            "group_size": group,
            "bits": AFFINE_BITS[type_],
            "mode": "affine",
        } | settings_of_layers
        config["quantization_config"] = config["quantization"]
    (folder / "config.json").write_text(json.dumps(config))
    save_file(parts, folder / "model.safetensors", metadata={"format": "mlx"})
    return read


def _is_float32(conversion: Conversion, name: str) -> bool:
    """Return whether all sources of a stored tensor are float32: mlx-lm keeps their type."""
    sources = {source for source, *_ in conversion.tensors[name]["source"]}
    return all(conversion.original[source]["dtype"] == "F32" for source in sources)


def affine(x: np.ndarray, bits: int, group: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Quantize bfloat16 values as mlx.core.quantize does on a CPU: codes, scales, biases, and the float32 values read.

    In float32, of each group: scale = max((max − min) / (2^bits − 1), 1e-7), negative if |min| > |max|; edge is the one
    of min and max that is further from 0; q = round(edge / scale); scale = edge / q and bias = edge unless q is 0, else
    bias = 0. Codes are round((x − bias) / scale), clipped, from unrounded scale and bias; the first is in the lowest
    bits of a uint32. Scale and bias are stored in bfloat16.
    """
    groups = x.astype(np.float32).reshape(*x.shape[:-1], -1, group)
    low, high = groups.min(-1), groups.max(-1)
    levels = np.float32(2**bits - 1)
    far_low = np.abs(low) > np.abs(high)
    scale = np.maximum((high - low) / levels, SMALLEST_SCALE) * np.where(far_low, np.float32(1), np.float32(-1))
    edge = np.where(far_low, low, high)
    steps = np.rint(edge / scale)
    scale = np.where(steps == 0, scale, edge / np.where(steps == 0, np.float32(1), steps))
    bias = np.where(steps == 0, np.float32(0), edge)
    codes = np.clip(np.rint((groups - bias[..., None]) / scale[..., None]), 0, levels).astype(np.uint32)
    per_word = 32 // bits
    words = codes.reshape(*x.shape[:-1], -1, per_word) << (np.arange(per_word, dtype=np.uint32) * np.uint32(bits))
    scales, biases = scale.astype(bfloat16), bias.astype(bfloat16)
    values = codes * scales.astype(np.float32)[..., None] + biases.astype(np.float32)[..., None]
    return np.bitwise_or.reduce(words, axis=-1), scales, biases, values.reshape(x.shape)
