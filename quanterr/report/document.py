"""A document: a file of its own, in strict JSON, with everything that is seen of it declared in a module."""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from os import PathLike, fspath
from types import ModuleType
from typing import IO, Any, ClassVar

from quanterr.report import checksum
from quanterr.report.base import Model, dumps
from quanterr.report.sections import Cells, Suite, View
from quanterr.util.strict_json import JsonObject

Figure = Any  # a matplotlib.figure.Figure: matplotlib is optional
DRAFT = "https://json-schema.org/draft/2020-12/schema"


class Declared:
    """A result, and what is seen of it: ``VIEW`` is the module that declares that, in a package with ``OUTPUTS``."""

    VIEW: ClassVar[str]

    def view(self, top: int) -> View:
        """What its reader sees, with ``top`` layers of each kind."""
        return self.declared().view(self, top)  # type: ignore[no-any-return] # by name: what shows it imports this

    def brief(self) -> str:
        """The answer on one line, for ``--quiet``."""
        return self.declared().brief(self)  # type: ignore[no-any-return]

    def columns(self) -> Sequence[str]:
        """The columns of its CSV."""
        return self.declared().CSV_COLUMNS  # type: ignore[no-any-return]

    def rows(self) -> Iterator[Cells]:
        """The rows of its CSV."""
        return self.declared().rows(self)  # type: ignore[no-any-return]

    def declared(self) -> ModuleType:
        """The module."""
        return import_module(self.VIEW)

    @property
    def noun(self) -> str:
        """What it is called: report, plan, diff."""
        return type(self).__name__.lower()

    def save(self, path: str | PathLike[str]) -> None:
        """Write it to a file, as ``--output-report`` does: the suffix chooses the output.

        Raises:
            UsageError: an unknown suffix.
            ResourceError: the file cannot be written.
        """
        from quanterr.report.files import save

        save(self, fspath(path), import_module(self.VIEW.rpartition(".")[0]).OUTPUTS)


class Document(Model, Declared):
    """A file of its own, in strict, ASCII JSON; ``run`` is its last field, and a checksum covers those before it.

    ``ITEMS`` are the fields of which JSON Lines have an item per line, with what a line of each is called.
    """

    schema_: str
    ITEMS: ClassVar[Mapping[str, str]] = {}

    def suites(self) -> Sequence[Suite]:
        """What JUnit has of it."""
        return self.declared().suites(self)  # type: ignore[no-any-return]

    def plot(self) -> Figure:
        """A picture, as a matplotlib Figure: where the error is, or what a size buys.

        Raises:
            UsageError: matplotlib is not installed, or there is nothing to draw.
        """
        return import_module("quanterr.report.plot").plot(self)

    def write_json(self, file: IO[str]) -> None:
        """Write it as strict, ASCII JSON."""
        file.write(self.to_json())

    def to_json(self) -> str:
        """Strict, ASCII JSON."""
        own = {info.alias or name: getattr(self, name) for name, info in type(self).model_fields.items()}
        run = own.pop("run")
        checked = dumps(own).removesuffix("}")
        crc = zlib.crc32(checked.encode("ascii"))
        return f'{checked},\n"checksum": "{crc:08x}",\n"run": {dumps(run)}}}\n'

    @classmethod
    def json_schema(cls) -> JsonObject:
        """Its JSON Schema (2020-12)."""
        schema = cls.model_json_schema(by_alias=True, mode="serialization")
        schema["properties"]["checksum"] = checksum.SCHEMA
        return {"$schema": DRAFT} | schema
