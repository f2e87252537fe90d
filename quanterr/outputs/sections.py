"""The sections of a document, which terminal, page and Markdown render.

A document describes itself by a :class:`View`. Cells and lines are plain text. A cell with text from a file or user
is a :class:`Name`, which every renderer escapes.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Self, TypeVar

from quanterr.documents.base import Finding
from quanterr.documents.gate_results import Gate, Reason
from quanterr.documents.subjects import name_candidates
from quanterr.metrics.scores import Score
from quanterr.util.strict_json import JsonFields, JsonObject


class Name(str):
    """A name or path from a file or a user."""

    __slots__ = ()


class LayerName(Name):
    """The name of a layer; a page links it to the layer's details."""

    __slots__ = ()


class BarCell(str):
    """A share from 0 to 1, drawn as a bar in a terminal; the string itself is the bar in ASCII."""

    WIDTH = 12  # characters
    share: float

    def __new__(cls, share: float) -> Self:
        """Create the bar in ASCII from a share."""
        drawn = super().__new__(cls, ("#" * round(share * cls.WIDTH)).ljust(cls.WIDTH, "."))
        drawn.share = share
        return drawn


class Column(NamedTuple):
    """A column of a table after the first; narrow terminals drop the columns of the highest rank first."""

    header: str
    rank: int
    right: bool = True  # aligned to the right, as numbers are
    legend: str = ""  # explains a column of bars, which only terminals show


Item = TypeVar("Item")
CellColumn = tuple[Column, Callable[[Item], str]]  # a column, and its cell for an item


def fill(
    columns: Sequence[CellColumn[Item]], items: Iterable[tuple[str, Item]]
) -> tuple[list[Column], list[list[str]]]:
    """Return the columns of a table, and a row for each named item."""
    return [column for column, _ in columns], [[name, *(cell(item) for _, cell in columns)] for name, item in items]


class Table(NamedTuple):
    """A table; the first cell of a row names its subject."""

    title: str
    first: str  # heading of the first column
    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    more: int = 0  # number of rows left out
    minor: int = 0  # number of rows at the end that matter little, which pages fold
    minor_because: str = ""  # such as "below 1 % of the error"
    is_asked_for: bool = (
        False  # an option of the user requests the table; model cards have it besides their first table
    )


class Lines(NamedTuple):
    """Sentences, one below the other; ``warn`` highlights them."""

    lines: Iterable[str]
    warn: bool = False


class Findings(NamedTuple):
    """Findings, each with a text that names its candidates ("" if there is only one candidate)."""

    listed: Sequence[tuple[str, Finding]]


def merge_findings(findings: Iterable[tuple[str, Finding]], candidates: int) -> Findings:
    """Return each finding once, with the names of the candidates that share it.

    The names are "" if there is only one candidate, or if the message begins with them, as messages about recipes do.
    """
    names: dict[tuple[str, str, str | None, str], tuple[list[str], Finding]] = {}
    for name, finding in findings:
        names.setdefault((finding.code, finding.severity, finding.layer, finding.message), ([], finding))[0].append(
            name
        )
    shared = []
    for candidate_names, finding in names.values():
        whose = name_candidates(list(dict.fromkeys(candidate_names)), candidates) if candidates > 1 else ""
        shared.append(("" if finding.message.startswith(f"{whose}: ") else whose, finding))
    return Findings(shared)


class Gates(NamedTuple):
    """Results of gates, each with the name of its candidate ("" if there is only one); terminals omit them."""

    judged: Sequence[tuple[str, Gate]]


class Figure(NamedTuple):
    """A number about the whole result, shown large on a page."""

    title: str
    value: str
    unit: str = ""
    note: str = ""


class FigureGroup(NamedTuple):
    """The numbers about the whole result; a page shows them without a heading."""

    title: str
    shown: Sequence[Figure]


class Share(NamedTuple):
    """A part of a whole; ``key`` selects its colour on a page."""

    key: str
    title: str
    tensors: int
    bytes: int


class Whole(NamedTuple):
    """A whole and its shares."""

    title: str
    note: str
    shares: Sequence[Share]


class Shares(NamedTuple):
    """Wholes divided by bytes, as tables; a page also draws each as a strip."""

    wholes: Sequence[Whole]


class FactList(NamedTuple):
    """Titles, each with a text."""

    shown: Sequence[tuple[str, str]]


class MapCell(NamedTuple):
    """A weight of a block map: name, status (see page/columns.py) and SNR in dB (None: undefined)."""

    name: str
    status: int
    snr_db: float | None


class BlockMap(NamedTuple):
    """The weights of a model by block and module; terminals draw it in characters, pages by scripts."""

    weights: Callable[[], Iterable[MapCell]]


class Interactive(NamedTuple):
    """A part that only pages have: ``page/templates/<file>.html``, filled by the page's scripts."""

    file: str


class Curve(NamedTuple):
    """A line of a chart, through points from left to right."""

    name: Name
    points: Sequence[tuple[float, float]]


class Chart(NamedTuple):
    """Curves of positive numbers on a logarithmic scale, which only pages draw."""

    title: str
    across: str  # title of the horizontal axis
    curves: Sequence[Curve]


class Dot(NamedTuple):
    """A candidate: its size, its value and the standard error of the value."""

    name: str
    bytes: int
    value: float
    error: float = 0.0
    is_best: bool = False  # Pareto-optimal


class Dots(NamedTuple):
    """Candidates by size and one of their numbers, which pages and pictures draw."""

    label: str  # the number with its unit
    shown: Sequence[Dot]
    log: bool = False


class Picture(NamedTuple):
    """Two small images side by side, as data: URIs, with the name of the pair and a note."""

    name: Name
    note: str
    original: str
    quantized: str


class Pictures(NamedTuple):
    """Pairs of images, which only pages show."""

    shown: Sequence[Picture]


Drawn = BlockMap | Chart | Dots | Pictures
Part = Table | Lines | Findings | Gates | FigureGroup | Shares | FactList | Interactive | Drawn
TERMINAL, VERBOSE, PAGE, CARD = "terminal", "verbose", "page", "card"  # VERBOSE: a terminal with -v


class Section(NamedTuple):
    """Parts under one heading; ``key`` is the section's id on a page."""

    key: str
    title: str
    parts: Sequence[Part]
    media: Sequence[str] = (TERMINAL, PAGE, CARD)
    is_open: bool = True  # initial state on a page
    is_problem: bool = False


MAP = Section("places", "Map", [Interactive("map")], (PAGE,))
LAYERS = Section("layers", "Layers", [Interactive("layers")], (PAGE,))
FRONT = Section("front", "Size and error", [Interactive("front")], (PAGE,))


class MapMetric(NamedTuple):
    """A number of each layer, as the scripts of a page show it."""

    title: str
    better: str  # "lower" or "higher"
    unit: str = ""  # dB, bit or B; %: a share
    log: bool = False  # colours are on a logarithmic scale
    column: str = ""  # heading in the table of layers
    is_wide: bool = False  # left out on narrow screens
    is_signed: bool = False  # the value is a change

    @classmethod
    def of(cls, score: Score) -> Self:
        """Return a declared number as pages show it; narrow screens show only the first two columns."""
        title = score.title[0].upper() + score.title[1:]
        unit, heading = (
            ("%", f"{title} %") if score.unit == "share" else (score.unit, title + score.heading[len(title) :])
        )
        log, is_wide = score.unit not in ("dB", "bit"), score.column is None or score.column > 1
        return cls(title, score.better or "lower", unit, log, heading, is_wide)


class Row(NamedTuple):
    """A layer in the data of a page; for its status, see page/columns.py."""

    name: str
    status: int
    words: Mapping[str, str | None]  # texts that many layers share; same keys in all rows
    numbers: JsonFields  # metrics; same keys in all rows


class Details(NamedTuple):
    """A table about a layer, given by its index, which a page shows when the layer is selected."""

    title: str
    heads: Sequence[str]
    of: Callable[[int], Sequence[Sequence[str]]]


class PageScripts(NamedTuple):
    """The extra scripts of a page and the data that they show."""

    scripts: Sequence[str]
    data: Callable[[], JsonObject]


class Maps(NamedTuple):
    """The metrics in the map and layer table of a page, and its layers."""

    metrics: Mapping[str, MapMetric]  # metrics by their keys in the data
    words: Mapping[str, str]  # titles of text columns by their keys; filters select by these columns
    rows: Callable[[], Iterable[Row]]
    order: str  # metric that sorts the layers, the worst first
    colour: str  # metric that colours the map
    front: Sequence[tuple[str, int, float | None, bool]] = ()  # candidates: name, bytes, SNR in dB, Pareto-optimal
    details: Details | None = None


Facts = Sequence[tuple[str, Sequence[str]]]  # titles with texts


class View(NamedTuple):
    """All that the outputs show of a document."""

    heading: str  # heading of the Markdown section
    verdict: str | None  # pass, fail, inconclusive; None: not judged
    conclusion: str  # the result in a sentence
    reasons: Sequence[Reason]  # reasons for the verdict
    facts: Facts  # the files, and properties of each as a whole
    sections: Sequence[Section]
    about: str  # explains what the numbers mean and leave out
    made_by: str  # program and version
    maps: Maps | PageScripts | None = None
    done: str = ""  # word shown for a pass without gates: compared, evaluated
    doubts: Sequence[str] = ()  # messages that question the comparison itself
    summary: Sequence[str] = ()  # what a reader should know after the conclusion, the most important first
    stated: Sequence[Finding] = ()  # findings that the summary states
    overview: Table | None = None  # a table of all candidates, which a terminal shows before the summary
    title: str = ""  # title of the page, with its subject and main number; by default the answer

    @property
    def word(self) -> str | None:
        """The word for the verdict."""
        return self.done if self.done and self.verdict == "pass" else self.verdict

    @property
    def gates(self) -> list[Gate]:
        """The results of all gates."""
        parts = (part for section in self.sections for part in section.parts if isinstance(part, Gates))
        return [gate for part in parts for _, gate in part.judged]


class Case(NamedTuple):
    """A JUnit test, which passes unless it has a ``problem``: "error" or "failure"."""

    group: str
    name: str
    problem: str = ""
    message: str = ""
    text: str = ""  # body of the problem
    output: str = ""


class Suite(NamedTuple):
    """A JUnit test suite, for a comparison or a candidate."""

    name: str
    cases: Sequence[Case]
    gates: Sequence[Gate] = ()
