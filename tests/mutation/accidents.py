"""Accidents: a checkpoint as stored bytes, and a table of ways to break it."""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np

from quanterr.checkpoints import open_checkpoint

Array = np.ndarray

NUMPY = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I8": np.dtype("i1"),
    "I16": np.dtype("<i2"),
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
    "U8": np.dtype("u1"),
    "U32": np.dtype("<u4"),
}
FLOATS = frozenset({"F32", "F16", "BF16", "F8_E4M3", "F8_E8M0"})
E4M3_BYTES = ("mlx_nvfp4", "asym_w4a8_int8")  # formats whose scales are E4M3 stored as U8; others store E8M0

# Roles of parts, as the formats call them.
SCALES = ("scale", "absmax", "scales", "s_channel", "scale_max", "nested_absmax")
FINER = ("global_scale", "s_rel", "tensor_scale", "per_tensor_scale", "scalar", "row_scale")
ZEROS = ("zero_point", "zero", "offset", "bias", "shift")

# GGUF type → (offset of the scale in a block, its dtype, how many of them); and of what is added, if anything
BLOCK_SCALES: dict[str, tuple[int, str, int]] = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "Q1_0", "Q2_0", "IQ4_XS"), (0, "F16", 1)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, "F16", 1)),
    **dict.fromkeys(("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"), (0, "F16", 1)),
    "Q2_K": (80, "F16", 1),
    "Q3_K": (108, "F16", 1),
    "Q6_K": (208, "F16", 1),
    "TQ1_0": (52, "F16", 1),
    "TQ2_0": (64, "F16", 1),
    "MXFP4": (0, "F8_E8M0", 1),
    "NVFP4": (0, "F8_E4M3", 4),
}
BLOCK_MINIMA = {"Q4_1": 2, "Q5_1": 2}  # type → offset of the F16 that is added
BLOCK_NIBBLES = {"Q4_0": 2, "Q4_1": 4, "IQ4_NL": 2, "MXFP4": 1, "NVFP4": 4}  # type → offset of codes of 4 bits


@dataclass
class Tensor:
    """A stored tensor: its bytes may be changed in place."""

    dtype: str
    shape: tuple[int, ...]
    data: Array  # uint8
    block: int = 0  # bytes of a block of GGUF

    def values(self, dtype: str = "") -> Array:
        """Return the numbers in their shape."""
        return self.data.view(NUMPY[dtype or self.dtype]).reshape(self.shape)

    def blocks(self) -> Array:
        """Return a GGUF tensor as (blocks, bytes)."""
        return self.data.reshape(-1, self.block)


@dataclass
class Weight:
    """A weight, and which stored tensors hold its parts."""

    name: str
    format: str
    bits: int
    parts: Mapping[str, str] = field(default_factory=dict)  # role → name


@dataclass
class Stored:
    """A checkpoint whose bytes may be changed: a safetensors file, a folder with one, a GGUF file or an ONNX model."""

    case: Path
    weights: list[Weight]
    tensors: dict[str, Tensor]
    metadata: dict[str, str]
    whole: bytes  # the bytes of a GGUF file or an ONNX model
    offsets: dict[str, int]  # of the tensors that lie in the file as they are

    @classmethod
    def read(cls, case: Path, weights: list[Weight]) -> "Stored":
        """Read all tensors of a golden case, which has these weights."""
        path = case / "model.safetensors" if case.is_dir() else case
        raw = path.read_bytes()
        tensors, offsets, metadata = {}, {}, {}
        with open_checkpoint(case) as checkpoint:
            for name, entry in checkpoint.entries.items():
                data, block = np.frombuffer(entry.read(), np.uint8).copy(), BLOCK_BYTES.get(entry.dtype, 0)
                tensors[name] = Tensor(entry.dtype, entry.shape, data, block)
                if entry.file is checkpoint.files[0]:
                    offsets[name] = entry.offset
        if path.suffix == ".safetensors":
            header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
            metadata = header.get("__metadata__", {})
        in_place = path.suffix in (".gguf", ".onnx")
        return cls(case, weights, tensors, metadata, raw if in_place else b"", offsets)

    @property
    def gguf(self) -> bool:
        """True if the tensors can only be changed in place."""
        return bool(self.whole)

    def write(self, folder: Path, truncated: int = 0) -> Path:
        """Write the changed checkpoint into ``folder``, as a new file or folder."""
        path = folder / self.case.name
        if self.case.is_dir():
            shutil.copytree(self.case, path)
        raw = self._gguf() if self.gguf else self._safetensors()
        file = path / "model.safetensors" if self.case.is_dir() else path
        file.write_bytes(raw[: len(raw) - truncated])
        return path

    def _gguf(self) -> bytes:
        raw = bytearray(self.whole)
        for name, tensor in self.tensors.items():  # a part that was left out stays in the file
            if name in self.offsets:
                data, offset = tensor.data.tobytes(), self.offsets[name]
                raw[offset : offset + len(data)] = data
        return bytes(raw)

    def _safetensors(self) -> bytes:
        header: dict[str, object] = {"__metadata__": self.metadata} if self.metadata else {}
        data = b""
        for name, tensor in self.tensors.items():
            end = len(data) + len(tensor.data)
            header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [len(data), end]}
            data += tensor.data.tobytes()
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text + data


def _block_bytes() -> dict[str, int]:
    from quanterr.checkpoints.ggml_types import BLOCKS

    return {name: n_bytes for name, (_, n_bytes) in BLOCKS.items()}


BLOCK_BYTES = _block_bytes()

Change = Callable[[Stored, Weight], bool]  # changes in place; returns False without such a tensor


class Mutation(NamedTuple):
    """One kind of damage to stored tensors."""

    name: str
    change: Change
    truncated: int = 0  # bytes that the file loses


def scale_views(stored: Stored, weight: Weight, roles: tuple[str, ...] = SCALES) -> Iterator[tuple[Array, str]]:
    """Yield the scales of a weight, in any container, as arrays that may be changed in place, with their dtypes."""
    for role, name in weight.parts.items():
        tensor = stored.tensors[name]
        if tensor.dtype in BLOCK_SCALES and roles is SCALES:
            at, dtype, n = BLOCK_SCALES[tensor.dtype]
            yield tensor.blocks()[:, at : at + n * NUMPY[dtype].itemsize].view(NUMPY[dtype]), dtype
        elif role in roles and tensor.dtype in FLOATS:
            yield tensor.values(), tensor.dtype
        elif role in roles and tensor.dtype == "U8" and not weight.format.startswith("bnb"):
            dtype = "F8_E4M3" if weight.format in E4M3_BYTES else "F8_E8M0"
            yield tensor.values(dtype), dtype


def on_scales(change: Callable[[Array], Array], roles: tuple[str, ...] = SCALES) -> Change:
    """Replace scales, float64 in their shape, by a function of them."""

    def apply(stored: Stored, weight: Weight) -> bool:
        is_changed = False
        for view, dtype in scale_views(stored, weight, roles):
            before = view.copy()
            with np.errstate(all="ignore"):
                after = change(view.astype(np.float32).astype(np.float64))
                if dtype == "F8_E4M3":
                    after = np.clip(after, -448, 448)
                view[...] = after.astype(np.float32).astype(view.dtype)
            is_changed |= before.tobytes() != view.tobytes()
        return is_changed

    return apply


def on_codes(change: Callable[[Array, Weight], Array | None]) -> Change:
    """Replace the stored codes, bytes (rows, bytes of a row), by a function of them."""

    def apply(stored: Stored, weight: Weight) -> bool:
        tensor = stored.tensors[next(iter(weight.parts.values()))]
        rows = tensor.shape[0] if len(tensor.shape) > 1 and not len(tensor.data) % tensor.shape[0] else 1
        before = tensor.data.reshape(rows, -1)
        after = change(before.copy(), weight)
        if after is None or after.tobytes() == before.tobytes():
            return False
        tensor.data[...] = after.reshape(-1)
        return True

    return apply


def roll(values: Array, half: bool = False) -> Array:
    """Shift rows by one, or by half of them; shift the elements of a single row."""
    matrix = values.reshape(values.shape[0], -1) if values.ndim > 1 and values.shape[0] > 1 else values.reshape(-1, 1)
    by = max(len(matrix) // 2, 1) if half else 1
    return np.roll(matrix, by, 0).reshape(values.shape)


def transpose_grid(values: Array) -> Array:
    """Write a grid of scales column by column."""
    if values.ndim < 2 or min(values.shape[-2:]) < 2:
        return values
    return np.swapaxes(values, -1, -2).reshape(values.shape)


def first_is(value: float) -> Callable[[Array], Array]:
    """Return a change that replaces one scale."""

    def replace(values: Array) -> Array:
        values.reshape(-1)[0] = value
        return values

    return replace


def missing_scale(stored: Stored, weight: Weight) -> bool:
    """Remove the tensor of scales from the file."""
    names = [name for role, name in weight.parts.items() if role in SCALES]
    for name in names:
        del stored.tensors[name]
    return bool(names)


def missing_weight(stored: Stored, weight: Weight) -> bool:
    """Remove every part of the weight from the file."""
    if stored.gguf:
        return False
    for name in weight.parts.values():
        stored.tensors.pop(name, None)
    return True


OTHER_DTYPES = {"F16": "BF16", "BF16": "F16", "F8_E8M0": "F8_E4M3", "F8_E4M3": "F8_E8M0"}
OTHER_CODES = {"F8_E4M3": "F8_E5M2", "F8_E5M2": "F8_E4M3", "U8": "I8", "I8": "U8"}


def scale_of_other_dtype(stored: Stored, weight: Weight) -> bool:
    """Declare another dtype of the same size for the scales."""
    scales = [stored.tensors[name] for role, name in weight.parts.items() if role in SCALES]
    scales = [tensor for tensor in scales if tensor.dtype in OTHER_DTYPES]
    for tensor in scales:
        tensor.dtype = OTHER_DTYPES[tensor.dtype]
    return bool(scales) and not stored.gguf


def codes_of_other_dtype(stored: Stored, weight: Weight) -> bool:
    """Declare another dtype of the same size for the codes."""
    tensor = stored.tensors[next(iter(weight.parts.values()))]
    if tensor.dtype not in OTHER_CODES or stored.gguf:
        return False
    tensor.dtype = OTHER_CODES[tensor.dtype]
    return True


def swap_nibbles(stored: Stored, weight: Weight) -> bool:
    """Swap the 4-bit codes of each byte."""
    tensor = stored.tensors[next(iter(weight.parts.values()))]
    if weight.bits != 4:
        return False
    if stored.gguf:
        if tensor.dtype not in BLOCK_NIBBLES:
            return False
        view = tensor.blocks()[:, BLOCK_NIBBLES[tensor.dtype] :]
    else:
        view = tensor.data
    view[...] = view << 4 | view >> 4
    return True


def zero_points_off_by_one(stored: Stored, weight: Weight) -> bool:
    """Raise zero points by one."""
    tensor = stored.tensors[next(iter(weight.parts.values()))]
    if tensor.dtype in BLOCK_MINIMA:
        blocks, at = tensor.blocks(), BLOCK_MINIMA[tensor.dtype]
        blocks[:, at : at + 2].view("<f2")[...] += blocks[:, :2].view("<f2")
        return True
    roles = {role: stored.tensors[name] for role, name in weight.parts.items()}
    role = next((role for role in ZEROS if role in roles), None)
    if role is None:
        return False
    zero = roles[role]
    if zero.dtype == "I32":  # several zero points in a word
        step = sum(1 << weight.bits * n for n in range(32 // weight.bits))
        zero.data.view("<u4")[...] += np.uint32(step & 0xFFFFFFFF)
    elif zero.dtype == "I8":
        zero.values()[...] += np.int8(1)
    else:
        values = zero.values().astype(np.float64)
        counts = np.median(np.abs(values)) > 0.6  # in steps of the codes; else in units of the weight
        scale = roles.get("scale")
        if not counts and (scale is None or scale.shape != zero.shape):
            return False
        step = 1.0 if counts else scale.values().astype(np.float64)  # type: ignore[union-attr]
        zero.values()[...] = (values + step).astype(np.float32).astype(zero.values().dtype)
    return True


def zero_points_of_other_sign(stored: Stored, weight: Weight) -> bool:
    """Store the zero points of unsigned codes for signed ones, or the reverse."""
    zero_points = [stored.tensors[name] for role, name in weight.parts.items() if role in ZEROS]
    zero_points = [zero for zero in zero_points if zero.dtype in ("I32", "I8") and weight.bits in (2, 4, 8)]
    for zero in zero_points:
        tops = sum(1 << weight.bits * n + weight.bits - 1 for n in range(32 // weight.bits))
        if zero.dtype == "I32":  # several zero points in a word
            zero.data.view("<u4")[...] ^= np.uint32(tops)
        else:
            zero.values()[...] ^= np.int8(-128 if weight.bits == 8 else 1 << weight.bits - 1)
    return bool(zero_points)


def transposed_codes(stored: Stored, weight: Weight) -> bool:
    """Write codes of one byte column by column."""
    tensor = stored.tensors[next(iter(weight.parts.values()))]
    if len(tensor.shape) != 2 or len(tensor.data) != np.prod(tensor.shape) or min(tensor.shape) < 2 or stored.gguf:
        return False
    tensor.data[...] = tensor.data.reshape(tensor.shape).T.reshape(-1)
    return True


def wrong_layer(stored: Stored, weight: Weight) -> bool:
    """Replace the weight by another one of the same layout."""
    tensors = [stored.tensors[name] for name in weight.parts.values()]
    for others in stored.weights:
        other_tensors = [stored.tensors[name] for name in others.parts.values()]
        alike = [(t.dtype, t.shape) for t in tensors] == [(t.dtype, t.shape) for t in other_tensors]
        if others is not weight and alike and others.parts.keys() == weight.parts.keys():
            for a, b in zip(tensors, other_tensors, strict=True):
                a.data, b.data = b.data, a.data
            stored.weights = []  # so that no later call swaps them back
            return True
    return False


def cut_half(codes: Array, _weight: Weight) -> Array:
    """Set the second half of the bytes to zero, as if it had never arrived."""
    codes.reshape(-1)[codes.size // 2 :] = 0
    return codes


MUTATIONS = (
    Mutation("scale dropped", on_scales(np.ones_like)),
    Mutation("scale missing", missing_scale),
    Mutation("scale doubled", on_scales(lambda s: 2 * s)),
    Mutation("scale × 1.1", on_scales(lambda s: 1.1 * s)),
    Mutation("scale inverted", on_scales(lambda s: 1 / s)),
    Mutation("scale squared", on_scales(lambda s: s * s)),
    Mutation("scale negated", on_scales(lambda s: -s)),
    Mutation("scale of other dtype", scale_of_other_dtype),
    Mutation("scales shifted by one", on_scales(roll)),
    Mutation("halves of scales exchanged", on_scales(lambda s: roll(s, half=True))),
    Mutation("grid of scales transposed", on_scales(transpose_grid)),
    Mutation("one scale NaN", on_scales(first_is(np.nan))),
    Mutation("one scale zero", on_scales(first_is(0.0))),
    Mutation("second scale dropped", on_scales(np.ones_like, FINER)),
    Mutation("second scale inverted", on_scales(lambda s: 1 / s, FINER)),
    Mutation("second scales shifted", on_scales(roll, FINER)),
    Mutation("zero point off by one", zero_points_off_by_one),
    Mutation("zero point of the other sign", zero_points_of_other_sign),
    Mutation("rows of codes shifted", on_codes(lambda c, _w: np.roll(c, 1, 0) if len(c) > 1 else None)),
    Mutation("rows of codes reversed", on_codes(lambda c, _w: c[::-1] if len(c) > 1 else None)),
    Mutation("codes transposed", transposed_codes),
    Mutation("nibbles swapped", swap_nibbles),
    Mutation("codes of other dtype", codes_of_other_dtype),
    Mutation("half of the codes zero", on_codes(cut_half)),
    Mutation("wrong layer", wrong_layer),
    Mutation("weight missing", missing_weight),
    Mutation("truncated", lambda _stored, _weight: True, truncated=16),
)
