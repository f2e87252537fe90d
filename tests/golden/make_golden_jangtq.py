"""Makes the golden file of JANGTQ by the formulas of jang_tools.turboquant, whose library runs on Macs only.

python tests/golden/make_golden_jangtq.py        needs numpy and safetensors
"""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

HERE = Path(__file__).parent / "jangtq"
RANDOM = np.random.default_rng(0)


def codebook(dim: int, bits: int) -> np.ndarray:
    """Return the centroids of Lloyd's algorithm as compute_codebook finds them, cell by cell."""
    grid = np.linspace(-1.0, 1.0, 10000)
    density = np.exp((dim - 3) / 2.0 * np.log(np.maximum(1.0 - grid**2, 1e-30)))
    density /= np.trapezoid(density, grid)
    centroids = np.linspace(-3 / np.sqrt(dim), 3 / np.sqrt(dim), 1 << bits)
    for _ in range(200):
        edges = np.concatenate([[-1.0], (centroids[:-1] + centroids[1:]) / 2, [1.0]])
        moved = np.zeros(len(centroids))
        for n, (low, high) in enumerate(pairwise(edges)):
            cell = (grid >= low) & ((grid < high) | (n == len(centroids) - 1))
            mass = np.trapezoid(density[cell], grid[cell])
            moved[n] = np.trapezoid(grid[cell] * density[cell], grid[cell]) / max(mass, 1e-10)
        if np.allclose(centroids, moved, atol=1e-10):
            break
        centroids = moved
    return np.sort(centroids).astype(np.float32)


def hadamard(dim: int) -> np.ndarray:
    """Return the matrix of hadamard_rotate without signs: a block for each power of two in ``dim``."""
    whole, start = np.zeros((dim, dim)), 0
    for size in (1 << place for place in reversed(range(dim.bit_length())) if dim >> place & 1):
        block = np.ones((1, 1))
        while len(block) < size:
            block = np.kron([[1, 1], [1, -1]], block)
        whole[start : start + size, start : start + size] = block / np.sqrt(size)
        start += size
    return whole


def quantize(weight: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return packed codes, norms, and the values that they stand for, as tq_quantize_weight and TurboQuantLinear do."""
    dim = weight.shape[1]
    signs, matrix = np.random.default_rng(42).choice([-1.0, 1.0], size=dim), hadamard(dim)
    rotated = weight * signs @ matrix
    norms = np.linalg.norm(rotated, axis=1)
    table = codebook(dim, bits)
    codes = (rotated / norms[:, None] > ((table[:-1] + table[1:]) / 2)[:, None, None]).sum(0)
    codes_per_word = 32 // bits
    words = np.pad(codes, ((0, 0), (0, -dim % codes_per_word))).reshape(len(codes), -1, codes_per_word)
    packed = (words << bits * np.arange(codes_per_word)).sum(2).astype(np.uint32)
    norms = norms.astype(np.float16)
    return packed, norms, ((table[codes] * norms.astype(np.float64)[:, None]) @ matrix * signs).astype(np.float32)


def make() -> None:
    """Write the files."""
    stored, expected = {}, {}
    for name, shape, bits in (
        ("two", (1, 5, 96), 2),
        ("three", (1, 4, 60), 3),
        ("experts", (2, 3, 64), 4),
        ("one", (1, 4, 64), 1),
    ):
        made = [quantize(0.1 * RANDOM.standard_normal(shape[1:]), bits) for _ in range(shape[0])]
        packed, norms, values = (np.stack(x) if shape[0] > 1 else x[0] for x in zip(*made, strict=True))
        stored |= {f"{name}.tq_packed": packed, f"{name}.tq_norms": norms}
        stored[f"{name}.tq_bits"] = np.array([bits], np.int32 if shape[0] > 1 else np.uint8)
        expected[f"{name}.weight"] = values
    HERE.mkdir(exist_ok=True)
    save_file(stored, HERE / "layers.safetensors")
    how = "by the formulas of jjang-ai/jangq@44a3c554 jang_tools/turboquant, in float64"
    origin = {"producer": f"hand-made with numpy {np.__version__}", "how": how, "tolerance": 1e-6}
    save_file(expected, HERE / "layers.expected.safetensors", {"origin": json.dumps(origin)})


if __name__ == "__main__":
    make()
