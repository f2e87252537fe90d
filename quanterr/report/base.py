"""What all documents consist of: their base, numbers, findings, and what a run was."""

from typing import Annotated, Any, Literal, NamedTuple, get_type_hints

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, FiniteFloat

from quanterr.report.finding_codes import FORMER_NAMES
from quanterr.util import strict_json
from quanterr.util.strict_json import JsonObject


class Model(BaseModel):
    """Reads what a newer minor version wrote: unknown fields are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class Score(NamedTuple):
    """What is said of a number beside its formula: an annotation of its field, from which everything else follows."""

    title: str
    better: Literal["lower", "higher"]
    unit: Literal["", "nat", "dB", "B", "%"] = ""  # %: a share, which people read in per cent
    column: int | None = None  # of tables, from the left; None: it is no column


def scores_of(kind: type[object]) -> dict[str, Score]:
    """The numbers among the fields of a class, by their names."""
    hints = get_type_hints(kind, include_extras=True)
    annotated = ((name, note) for name, hint in hints.items() for note in getattr(hint, "__metadata__", ()))
    return {name: note for name, note in annotated if isinstance(note, Score)}


def _as_json(value: JsonObject) -> JsonObject:
    """What is written as it was read: without NaN and infinity."""
    strict_json.dumps(value)
    return value


def _current_code(code: str) -> str:
    return FORMER_NAMES.get(code, code)


class Finding(Model):
    """Something wrong or suspicious that was noticed."""

    code: Annotated[str, AfterValidator(_current_code), Field(description="see `quanterr explain`")]
    severity: Literal["info", "warning", "error"]
    layer: str | None
    message: str
    remedy: str | None
    evidence: Annotated[JsonObject, AfterValidator(_as_json)]


class Tool(Model):
    """What wrote the report."""

    name: str
    version: str


class RunInfo(Model):
    """Everything that changes from run to run: two reports of the same inputs differ here alone."""

    started: str
    seconds: FiniteFloat
    device: str
    threads: int
    kernel: str | None = None  # that added up the errors: native (and its instructions) or torch
    torch: str
    python: str
    read_bytes: int
    command: list[str]


def dumps(value: object) -> str:
    """A part of a report as strict, ASCII JSON on one line."""
    return strict_json.dumps(value, _as_dict)


def _as_dict(value: Any) -> JsonObject:
    if isinstance(value, Model):
        return value.__dict__
    return {name: getattr(value, name) for name in value.__dataclass_fields__}
