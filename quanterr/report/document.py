"""A document: a file of its own, in strict JSON, with everything that is seen of it declared in a module."""

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from os import PathLike, fspath
from types import ModuleType
from typing import IO, Any, ClassVar

from pydantic.fields import FieldInfo

from quanterr.report import OUTPUTS, Output, checksum, notebook
from quanterr.report.base import Model, dumps
from quanterr.report.sections import TERMINAL, Cells, Suite, Table, View
from quanterr.util.strict_json import JsonObject
from quanterr.util.text import display

Figure = Any  # a matplotlib.figure.Figure: matplotlib is optional
LINE = 150  # characters of the answer on one line
DRAFT = "https://json-schema.org/draft/2020-12/schema"


class Declared:
    """A result with everything that readers, spreadsheets and CI see, declared in modules that are imported on use.

    ``VIEW`` is a module with ``view``, ``conclusion`` and ``brief``,; ``ROWS``, where it
    is another one, has ``CSV_COLUMNS``, ``rows`` and ``suites``.
    """

    VIEW: ClassVar[str]
    OUTPUTS: ClassVar[tuple[Output, ...]] = OUTPUTS
    ROWS: ClassVar[str] = ""

    def view(self, top: int) -> View:
        """Return everything that a reader sees, with ``top`` layers of each kind."""
        return self._shown().view(self, top)  # type: ignore[no-any-return]

    def brief(self) -> str:
        """Return the answer on one line, for ``--quiet``."""
        return self._shown().brief(self)  # type: ignore[no-any-return]

    def columns(self) -> Sequence[str]:
        """Return the columns of the CSV output."""
        return self._listed().CSV_COLUMNS  # type: ignore[no-any-return]

    def rows(self) -> Iterator[Cells]:
        """Return the rows of the CSV output."""
        return self._listed().rows(self)  # type: ignore[no-any-return]

    def _shown(self) -> ModuleType:
        return import_module(self.VIEW)

    def _listed(self) -> ModuleType:
        return import_module(self.ROWS or self.VIEW)

    @property
    def noun(self) -> str:
        """The kind of result: report, plan, diff."""
        return type(self).__name__.lower()

    def __repr__(self) -> str:
        verdict = getattr(self, "verdict", None)
        answer = display(self._shown().conclusion(self), LINE)
        return f"<quanterr.{type(self).__name__} {f'{verdict}: ' if verdict else ''}{answer}>"

    __str__ = __repr__

    def _repr_html_(self) -> str:
        view = self.view(notebook.WORST)
        shown = [section for section in view.sections if TERMINAL in section.media]
        tables = [part for section in shown for part in section.parts if isinstance(part, Table)]
        return notebook.heading(view) + "".join(map(notebook.table, tables))

    def save(self, path: str | PathLike[str]) -> None:
        """Write the result to a file, as ``--output-report`` does: the suffix chooses the output.

        Raises:
            UsageError: an unknown suffix.
            ResourceError: the file cannot be written.
        """
        from quanterr.report.files import save

        save(self, fspath(path), self.OUTPUTS)


class Document(Declared, Model):
    """A file of its own, in strict, ASCII JSON; ``run`` is its last field, and a checksum covers those before it.

    ``ITEMS`` are the fields of which JSON Lines have an item per line, with what a line of each is called.
    """

    schema_: str
    ITEMS: ClassVar[Mapping[str, str]] = {}

    def suites(self) -> Sequence[Suite]:
        """Return the suites of tests of the JUnit output."""
        return self._listed().suites(self)  # type: ignore[no-any-return]

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
        own = {info.alias or name: getattr(self, name) for name, info in self._fields()}
        run = own.pop("run")
        checked = dumps(own).removesuffix("}")
        crc = zlib.crc32(checked.encode("ascii"))
        return f'{checked},\n"checksum": "{crc:08x}",\n"run": {dumps(run)}}}\n'

    def json_lines(self) -> Iterator[str]:
        """Yield the lines of the JSON Lines output: the document without its ITEMS, then these."""
        head = {info.alias or name: getattr(self, name) for name, info in self._fields() if name not in self.ITEMS}
        records = {record: len(getattr(self, name)) for name, record in self.ITEMS.items()}
        yield dumps({"record": self.noun, **head, "records": records}) + "\n"
        for name, record in self.ITEMS.items():
            yield from (f'{{"record": "{record}", {dumps(item)[1:]}\n' for item in getattr(self, name))

    @classmethod
    def _fields(cls) -> Iterable[tuple[str, FieldInfo]]:
        return cls.model_fields.items()

    @classmethod
    def json_schema(cls) -> JsonObject:
        """Its JSON Schema (2020-12)."""
        schema = cls.model_json_schema(by_alias=True, mode="serialization")
        schema["properties"]["checksum"] = checksum.SCHEMA
        return {"$schema": DRAFT} | schema
