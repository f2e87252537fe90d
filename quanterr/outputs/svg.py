"""The plot of candidates as an SVG file, which needs no other package.

It draws its own background, as a page in which it is embedded may be light or dark, and follows the theme of the
reader's system.
"""

from typing import IO

from quanterr.documents.document import Result
from quanterr.errors import UsageError
from quanterr.outputs.page.environment import environment
from quanterr.outputs.sections import Dots


def write(document: Result, file: IO[str]) -> None:
    """Write the plot of a document.

    Raises:
        UsageError: the document has no candidates, or none of them has a number to draw.
    """
    parts = (part for section in document.view(0).sections for part in section.parts)
    dots = next((part for part in parts if isinstance(part, Dots)), None)
    if dots is None:
        raise UsageError("an SVG file plots the candidates of a ranking or an evaluation; there are none with a number")
    file.write(environment().get_template("dots.svg").render(noun=document.noun, part=dots))
