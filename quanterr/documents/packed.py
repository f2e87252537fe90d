"""Files of documents, plain or packed by gzip (``.json.gz``)."""

import gzip
import io
import zlib
from os import PathLike
from typing import IO

GZIP = b"\x1f\x8b"
MAX_UNPACKED_BYTES = 1 << 32  # the report of a model with 47,000 layers has 130 million


def open_document(path: str | PathLike[str], max_bytes: int = MAX_UNPACKED_BYTES) -> IO[bytes]:
    """Open the file of a document for reading; a file that gzip packed is unpacked, up to ``max_bytes``.

    Raises:
        OSError: the file cannot be read, or is a damaged gzip file.
        ValueError: the path cannot be a file name.
    """
    file = open(path, "rb")  # noqa: SIM115 - the caller closes it
    if not file.peek(len(GZIP)).startswith(GZIP):  # a pipe could not be read twice
        return file
    with file, gzip.open(file) as unpacked:
        try:
            return io.BytesIO(unpacked.read(max_bytes))
        except (EOFError, zlib.error) as error:
            raise gzip.BadGzipFile(f"a damaged gzip file: {error}") from error
