"""Parts that all documents share: base classes, scores, findings and run information."""

from typing import Annotated, Any, Literal, NamedTuple, get_type_hints

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, FiniteFloat, GetJsonSchemaHandler
from pydantic_core import CoreSchema

from quanterr.report.finding_codes import FORMER_NAMES
from quanterr.util import strict_json
from quanterr.util.strict_json import JsonObject

Number = FiniteFloat | None


class Model(BaseModel):
    """Base of all parts of documents; ignores unknown fields, so that results of newer minor versions can be read."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class Score(NamedTuple):
    """A number that tables, gates, diffs and the JSON Schema describe: an annotation of its field."""

    title: str
    better: Literal["lower", "higher"]
    formula: str
    unit: Literal["", "nat", "dB", "B", "%"] = ""  # "%": a share, shown in per cent
    column: int | None = None  # place in tables, from the left; None: not shown there

    def __get_pydantic_json_schema__(self, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonObject:
        """Return the JSON Schema of the field, described by its formula."""
        return handler(core_schema) | {"description": self.formula}


def collect_scores(kind: type[object]) -> dict[str, Score]:
    """Return the annotated scores among the fields of a class, by field name."""
    hints = get_type_hints(kind, include_extras=True)
    annotated = ((name, note) for name, hint in hints.items() for note in getattr(hint, "__metadata__", ()))
    return {name: note for name, note in annotated if isinstance(note, Score)}


def _check_json(value: JsonObject) -> JsonObject:
    """Return the value unchanged, after checking that strict JSON can hold it: no NaN, no infinity."""
    strict_json.dumps(value)
    return value


class Finding(Model):
    """Something wrong or suspicious, with what to do about it."""

    code: Annotated[
        str, AfterValidator(lambda code: FORMER_NAMES.get(code, code)), Field(description="see `quanterr explain`")
    ]
    severity: Literal["info", "warning", "error"]
    layer: str | None
    message: str
    remedy: str | None
    evidence: Annotated[JsonObject, AfterValidator(_check_json)]


class Tool(Model):
    """The program that wrote the document."""

    name: str
    version: str


class RunInfo(Model):
    """The part of a document that changes from run to run; all else is the same for the same inputs."""

    started: str
    seconds: FiniteFloat
    device: str
    threads: int
    kernel: str | None = None  # kernel that computed the sums: native (with its instruction set) or torch
    torch: str
    python: str
    read_bytes: int
    command: list[str]


def dumps(value: object) -> str:
    """Return a part of a document as strict ASCII JSON on one line."""
    return strict_json.dumps(value, _as_dict)


def _as_dict(value: Any) -> JsonObject:
    if isinstance(value, Model):
        return value.__dict__
    return {name: getattr(value, name) for name in value.__dataclass_fields__}
