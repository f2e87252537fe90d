"""The figure of a document as a PNG file, drawn by matplotlib."""

from typing import IO

from quanterr.documents.document import Document


def write(document: Document, file: IO[str]) -> None:
    """Write the figure to the bytes below a text stream.

    Raises:
        UsageError: matplotlib is not installed, or there is nothing to draw.
    """
    file.buffer.write(document.plot()._repr_png_())  # type: ignore[attr-defined]
