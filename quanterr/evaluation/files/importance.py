"""Second moments of the inputs of each weight as an importance matrix of llama.cpp (GGUF).

Layout: llama.cpp, tools/imatrix/imatrix.cpp, save_imatrix: for each weight ``<name>.in_sum2`` (matrices, columns) and
``<name>.counts`` (matrices, 1), both float32; the mean of squares is their quotient.
"""

import struct
from collections.abc import Mapping
from typing import IO, NamedTuple

from quanterr.evaluation.measures.outputs_of_weights import Product
from quanterr.outputs.files import open_replacement
from quanterr.pairing.conversion import to_llama_name
from quanterr.pairing.names import canonicalize

ALIGNMENT = 32
STRING, U32, ARRAY, F32 = 8, 4, 9, 0
VERSION = 3


class Origin(NamedTuple):
    """The text, context and chunks that the moments were measured on."""

    source: str
    context: int
    chunks: int


def write_importance(path: str, moments: Mapping[str, Product], architecture: str, origin: Origin) -> None:
    """Write the matrix with llama.cpp's names for an architecture; weights without such a name keep theirs.

    Stacked experts are left out, as the inputs of single experts are not recorded.

    Raises:
        ResourceError: the file cannot be written.
    """
    known = {
        f"{to_llama_name(architecture, canonicalize(name)[0])}.weight": product
        for name, product in moments.items()
        if product.moments is not None and not product.is_stack
    }
    with open_replacement(path, "--importance-out") as file:
        _write(file, known, origin)


def _write(file: IO[bytes], moments: Mapping[str, Product], origin: Origin) -> None:
    tensors: list[tuple[str, tuple[int, int], bytes]] = []
    for name, product in moments.items():
        assert product.moments is not None  # noqa: S101 - the caller chose products with moments
        sums = product.moments.tolist()
        tensors.append((f"{name}.in_sum2", (1, len(sums)), struct.pack(f"<{len(sums)}f", *sums)))
        tensors.append((f"{name}.counts", (1, 1), struct.pack("<f", float(product.inputs))))
    fields = [
        _encode_text("general.type") + struct.pack("<I", STRING) + _encode_text("imatrix"),
        _encode_text("imatrix.datasets") + struct.pack("<IIQ", ARRAY, STRING, 1) + _encode_text(origin.source),
        _encode_text("imatrix.chunk_count") + struct.pack("<II", U32, origin.chunks),
        _encode_text("imatrix.chunk_size") + struct.pack("<II", U32, origin.context),
    ]
    head = b"GGUF" + struct.pack("<IQQ", VERSION, len(tensors), len(fields)) + b"".join(fields)
    offset, infos = 0, b""
    for name, (rows, cols), raw in tensors:
        infos += _encode_text(name) + struct.pack("<IQQIQ", 2, cols, rows, F32, offset)
        offset += _pad_size(len(raw))
    head += infos
    file.write(head.ljust(_pad_size(len(head)), b"\0"))
    for _, _, raw in tensors:
        file.write(raw.ljust(_pad_size(len(raw)), b"\0"))


def _encode_text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _pad_size(n_bytes: int) -> int:
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT
