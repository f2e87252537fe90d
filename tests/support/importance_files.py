"""Importance matrices as files."""

import numpy as np
from support.gguf_stored import TEXT, Stored, key, write_gguf


def gguf(path, entries):
    """Write a GGUF imatrix: name → (means (matrices, columns), counts)."""
    tensors = []
    for name, (means, counts) in entries.items():
        means, counts = np.asarray(means, np.float32), np.asarray(counts, np.float32)
        tensors.append(Stored(f"{name}.in_sum2", "F32", means.shape, (means * counts[:, None]).tobytes()))
        tensors.append(Stored(f"{name}.counts", "F32", (len(counts), 1), counts.tobytes()))
    return write_gguf(path, tensors, [key("general.type", TEXT, "imatrix")])
