"""Base classes of documents: results that are stored as strict JSON."""

import io
import zlib
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from inspect import cleandoc
from os import PathLike
from types import ModuleType, NoneType
from typing import IO, TYPE_CHECKING, Any, ClassVar

import msgspec
from msgspec.structs import asdict, astuple

from quanterr.documents import checksum
from quanterr.documents.base import Model, RunInfo, Tool, dumps, dumps_each
from quanterr.errors import UsageError
from quanterr.util.arguments import public
from quanterr.util.strict_json import JsonObject
from quanterr.util.text import display, itemize, with_article

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from quanterr.documents.subjects import Subject

Frame = Any  # a pandas.DataFrame: pandas is optional
View = Any  # a View of outputs/sections.py, a room above
MAX_CONCLUSION_LENGTH = 150  # characters of the conclusion in ``repr``
DRAFT = "https://json-schema.org/draft/2020-12/schema"
ITEM_SEPARATOR = ",\n  "  # between the items of a list
CELL_TYPES = (str, int, float, NoneType)  # values of the cells of a data frame
ITEMS_AT_ONCE = 64  # items of a list that are encoded at once


class Result:
    """Base of all results. ``ROWS`` names the module of its views that lists its rows."""

    __slots__ = ()
    ROWS: ClassVar[str] = "view"

    def _views(self) -> ModuleType:
        """Return the package ``views``, which lays out results for people.

        It imports documents, so documents import it only when ``plot()``, ``save()`` or another such method is called.
        """
        return import_module("quanterr.views")

    def view(self, top: int) -> View:
        """Return the sections that a reader sees, with at most ``top`` layers of each kind."""
        return self._views().view(self, top)

    def brief(self) -> str:
        """Return the result in one line, for ``--quiet``; a ranking adds a line per candidate without a rank."""
        return self._views().brief(self)  # type: ignore[no-any-return]

    @property
    def listing(self) -> ModuleType:
        """The module that ``ROWS`` names."""
        return self._views().listing(self)  # type: ignore[no-any-return]

    def rows(self) -> Iterator[JsonObject]:
        """Return the rows of the CSV output as values by column; the writer adds the verdict to each row."""
        return self.listing.rows(self)  # type: ignore[no-any-return]

    @property
    def noun(self) -> str:
        """The kind of result in lower case, such as "report" or "plan"."""
        return type(self).__name__.lower()

    def __repr__(self) -> str:
        return f"<quanterr.{type(self).__name__} {display(self._views().answer(self), MAX_CONCLUSION_LENGTH)}>"

    __str__ = __repr__

    def _repr_html_(self) -> str:
        return self._views().render_notebook(self)  # type: ignore[no-any-return]

    def to_json(self) -> str:
        """Return the result as strict ASCII JSON."""
        file = io.StringIO()
        self.write_json(file)
        return file.getvalue()

    @public
    def to_pandas(self, items: str | None = None) -> Frame:
        """Return a pandas.DataFrame with a row per layer, weight, pair, candidate or change.

        ``items`` is the name of a list of the result, such as ``"candidates"`` of an evaluation, whose items are the
        rows instead, with their numbers and texts; those of a part of an item are columns such as ``scores.kld_mean``.

        Raises:
            UsageError: pandas is not installed, or the result has no such list.
        """
        try:
            pandas = import_module("pandas")
        except ImportError as error:
            raise UsageError("to_pandas() needs pandas: pip install pandas") from error
        return pandas.DataFrame(list(self._iterate_frame_rows() if items is None else self._flatten_items(items)))

    def _flatten_items(self, items: str) -> Iterator[JsonObject]:
        lists = {name: value for name, value in list_fields(self) if isinstance(value, list)}
        if items not in lists:
            known = itemize(list(lists), 20)
            raise UsageError(f"items: {display(items)} is no list of {with_article(self.noun)}; choose {known}")
        return map(_flatten, lists[items])

    def _iterate_frame_rows(self) -> Iterator[JsonObject]:
        """Yield the rows of the data frame."""
        raise NotImplementedError

    def write_json(self, file: IO[str]) -> None:
        """Write the result as strict ASCII JSON."""
        raise NotImplementedError

    @public
    def save(self, path: str | PathLike[str]) -> None:
        """Write the result to a file, as ``--output-report`` does: the suffix chooses the output.

        Raises:
            UsageError: the suffix is unknown.
            ResourceError: the file cannot be written.
        """
        self._views().save(self, path)


def list_fields(part: object) -> list[tuple[str, object]]:
    """Return the names and values of the fields of a result, or of a part of one."""
    part_type = type(part)
    names: Iterable[str] = getattr(part_type, "__struct_fields__", getattr(part_type, "__dataclass_fields__", ()))
    return [(name, getattr(part, name)) for name in names]


def _flatten(item: object) -> JsonObject:
    """Return the numbers and texts of an item under their names, and those of its parts under ``part.name``."""
    flat: JsonObject = {}
    for name, value in list_fields(item):
        flat |= {f"{name}.{key}": inner for key, inner in list_fields(value) if isinstance(inner, CELL_TYPES)}
        if isinstance(value, CELL_TYPES):
            flat[name] = value
    return flat or {"item": item}


class Document(Result, Model, kw_only=True, rename={"schema_": "schema"}):
    """A result stored as strict ASCII JSON; ``run`` is its last field, and a checksum covers all fields before it.

    ``ITEMS`` maps each field that JSON Lines write one item per line to the ``record`` name of these lines. Data frames
    have a row per item of the first such field.
    """

    schema_: str
    schema_version: str
    tool: Tool
    if TYPE_CHECKING:  # each document declares its own: fields are written in the order of declaration
        run: RunInfo
    ITEMS: ClassVar[Mapping[str, str]] = {}

    @property
    def made_by(self) -> str:
        """The program that made the document, with its version."""
        return f"{self.tool.name} {self.tool.version}"

    def _iterate_frame_rows(self) -> Iterator[JsonObject]:
        return map(asdict, getattr(self, next(iter(self.ITEMS))))

    def metrics(self) -> dict[str, float]:
        """Return the numbers of the whole by the names that gates use, flat, as trackers of experiments take them.

        A report's ``global(snr_db)`` is called ``global/snr_db``, and a candidate's ``bytes`` ``NAME/bytes``, as
        trackers allow no parentheses. Numbers without a value are left out.
        """
        values = import_module(f"{type(self).__module__.rpartition('.')[0]}.values")
        subjects: list[Subject] = values.list_subjects(self)
        return {
            name if subject.name is None else f"{subject.name}/{name}": value
            for subject in subjects
            for name, value in subject.list_metrics().items()
        }

    def plot(self) -> "Figure":
        """Return a matplotlib Figure: a map of the error, or error over size; its ``axes`` can still be changed.

        Raises:
            UsageError: matplotlib is not installed, or there is nothing to draw.
        """
        return self._views().plot(self)  # type: ignore[no-any-return]

    def write_json(self, file: IO[str]) -> None:
        """Write the document as strict ASCII JSON, one item per line, so that a large one is never in memory twice."""
        crc, separator = 0, "{\n"
        for name, value in self._iterate_stored_fields():
            if name == "run":
                file.write(f'{separator}"checksum": "{crc:08x}"')
            for piece in _split_json(f'{separator}"{name}": ', value):
                crc = zlib.crc32(piece.encode("ascii"), crc)
                file.write(piece)
            separator = ",\n"
        file.write("\n}\n")

    def _iterate_stored_fields(self) -> Iterator[tuple[str, object]]:
        """Yield the keys and values of the JSON; subclasses may add some."""
        yield from self._collect_fields().items()

    def _collect_fields(self) -> JsonObject:
        return dict(zip(self.__struct_encode_fields__, astuple(self), strict=True))

    def json_lines(self) -> Iterator[str]:
        """Yield the lines of the JSON Lines output: the document without its ITEMS, then the items."""
        head = {key: value for key, value in self._collect_fields().items() if key not in self.ITEMS}
        records = {record: len(getattr(self, name)) for name, record in self.ITEMS.items()}
        yield dumps({"record": self.noun, **head, "records": records}) + "\n"
        for name, record in self.ITEMS.items():
            yield from (f'{{"record": "{record}", {dumps(item)[1:]}\n' for item in getattr(self, name))

    @classmethod
    def json_schema(cls) -> JsonObject:
        """Return the JSON Schema (2020-12) of the document."""
        schema: JsonObject = msgspec.json.schema(cls)
        own_schema: JsonObject = schema["$defs"].pop(cls.__name__)
        name, version = (field.default for field in msgspec.structs.fields(cls)[:2])
        major = version.partition(".")[0]
        own_schema["properties"]["schema"] = {"const": name}
        own_schema["properties"]["schema_version"] = {"type": "string", "pattern": rf"^{major}\.\d+$"}
        own_schema["properties"]["checksum"] = checksum.SCHEMA
        own_schema["required"] = list(cls.__struct_encode_fields__)
        for part in (own_schema, *schema["$defs"].values()):
            if "description" in part:  # a docstring, still indented like the code
                part["description"] = cleandoc(part["description"])
        identity = f"urn:{name.replace('.', ':')}:{major}"  # the same for all versions that can be read with it
        return {"$schema": DRAFT, "$id": identity} | own_schema | {"$defs": schema["$defs"]}


def _split_json(start: str, value: object) -> Iterator[str]:
    """Yield the JSON of a field in pieces, with a line for each item of a list and each list of a mapping."""
    if isinstance(value, list) and value and not isinstance(value[0], str):
        begin = f"{start}[\n  "
        for n in range(0, len(value), ITEMS_AT_ONCE):
            yield begin + dumps_each(value[n : n + ITEMS_AT_ONCE], ITEM_SEPARATOR)
            begin = ITEM_SEPARATOR
        yield "\n]"
    elif isinstance(value, dict) and value and all(isinstance(entries, list) for entries in value.values()):
        yield f"{start}{{"
        yield from (
            f"{',' if n else ''}\n  {dumps(key)}: {dumps(entries)}" for n, (key, entries) in enumerate(value.items())
        )
        yield "\n}"
    else:
        yield f"{start}{dumps(value)}"
