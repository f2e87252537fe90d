"""What a reader sees of a document, without a medium: the terminal, the page and Markdown show the same.

A document says what it is about in a :class:`View`. Cells and lines are plain text; a text that comes from a file or a
user and stands by itself is a :class:`Name`, which no medium takes for anything but text.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol, Self

from quanterr.report.base import Finding, RunInfo
from quanterr.report.gate_results import Gate
from quanterr.util.strict_json import JsonObject


class Name(str):
    """A name or path from a file or a user."""

    __slots__ = ()


class LayerName(Name):
    """The name of a layer, which a page links to everything that is known of it."""

    __slots__ = ()


class Bar(str):
    """A share from 0 to 1 that a terminal draws; its text draws it in ASCII."""

    WIDTH = 12  # characters
    share: float

    def __new__(cls, share: float) -> Self:
        """Draw a share in ASCII."""
        drawn = super().__new__(cls, ("#" * round(share * cls.WIDTH)).ljust(cls.WIDTH, "."))
        drawn.share = share
        return drawn


class Column(NamedTuple):
    """A column of a table after the first: a narrow terminal drops the columns of the highest rank first."""

    header: str
    rank: int
    right: bool = True  # as numbers are
    legend: str = ""  # of a column of bars, which terminals alone show


class Table(NamedTuple):
    """A table; the first cell of each row is what the row is about."""

    title: str
    first: str  # heading of the first column
    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    more: int = 0  # rows that are not shown


class Lines(NamedTuple):
    """Sentences, one below the other; ``warn`` if they are to be noticed."""

    lines: Iterable[str]
    warn: bool = False


class Findings(NamedTuple):
    """Findings, and of which candidate they are where there are several."""

    found: Sequence[tuple[str, Finding]]


class Gates(NamedTuple):
    """Judged gates, each with the name of its candidate where there are several; terminals have them on stderr."""

    judged: Sequence[tuple[str, Gate]]


class Figure(NamedTuple):
    """A number of the whole result, large on a page."""

    title: str
    value: str
    unit: str = ""
    note: str = ""


class Figures(NamedTuple):
    """The numbers of the whole result, without a heading of their own on a page."""

    title: str
    shown: Sequence[Figure]


class Share(NamedTuple):
    """A part of a whole; ``key`` is its colour on a page."""

    key: str
    title: str
    tensors: int
    bytes: int


class Whole(NamedTuple):
    """A whole that divides into shares."""

    title: str
    note: str
    shares: Sequence[Share]


class Shares(NamedTuple):
    """How wholes divide by bytes: tables, which a page draws as strips as well."""

    wholes: Sequence[Whole]


class Facts(NamedTuple):
    """Titles with texts."""

    shown: Sequence[tuple[str, str]]


class MapCell(NamedTuple):
    """A weight of a block map: its name, a status of html_data, its SNR in dB (None: undefined) and avoidable dB."""

    name: str
    status: int
    snr_db: float | None
    excess_db: float | None


class BlockMap(NamedTuple):
    """The weights of a model by block and module: terminals draw it in characters, a page by its scripts."""

    weights: Callable[[], Iterable[MapCell]]


class Interactive(NamedTuple):
    """A part that only a page has: ``html/<file>.html``, which the page's scripts fill."""

    file: str


Part = Table | Lines | Findings | Gates | Figures | Shares | Facts | BlockMap | Interactive
TERMINAL, VERBOSE, PAGE, CARD = "terminal", "verbose", "page", "card"  # verbose: a terminal where -v is given


class Section(NamedTuple):
    """Parts under one heading; ``key`` is its id on a page."""

    key: str
    title: str
    parts: Sequence[Part]
    media: Sequence[str] = (TERMINAL, PAGE, CARD)
    is_open: bool = True  # on a page, which folds sections
    is_problem: bool = False


MAP = Section("places", "Map", [Interactive("map")], (PAGE,))
LAYERS = Section("layers", "Layers", [Interactive("layers")], (PAGE,))
FRONT = Section("front", "Size and error", [Interactive("front")], (PAGE,))


class Metric(NamedTuple):
    """A number of each layer, as a page's scripts show it."""

    title: str
    better: str  # lower, higher
    unit: str = ""  # dB, bit, %: a share
    log: bool = False  # whether its colours are by its logarithm
    column: str = ""  # its heading in the table of layers
    is_wide: bool = False  # whether narrow screens leave it out
    is_signed: bool = False  # whether it is a change


class Details(NamedTuple):
    """A table for each layer, by its number, which a page shows where the layer is chosen."""

    title: str
    heads: Sequence[str]
    of: Callable[[int], Sequence[Sequence[str]]]


class Scripted(NamedTuple):
    """The scripts of a page, beside those of any page with layers, and the data that they show."""

    scripts: Sequence[str]
    data: Callable[[], JsonObject]


class Maps(NamedTuple):
    """Metrics that the map and the table of layers of a page show. ``data`` are columns: see html_data.columns_of."""

    metrics: Mapping[str, Metric]  # by their key in the data
    words: Mapping[str, str]  # titles of the columns of words, by their key: filters choose by these
    data: Callable[[], JsonObject]
    order: str  # the metric by which layers are sorted, the worst first
    colour: str  # the metric that colours the map
    front: Sequence[tuple[str, int, float | None, bool]] = ()  # candidates: name, bytes, SNR in dB, none beats it
    details: Details | None = None


class View(NamedTuple):
    """A document as its reader sees it."""

    heading: str  # in Markdown
    verdict: str | None  # pass, fail, inconclusive; None of what is not judged
    conclusion: str  # the answer, in a sentence
    reasons: Sequence[str]  # of the verdict
    facts: Sequence[tuple[str, Sequence[str]]]  # what it is about: titles with texts
    sections: Sequence[Section]
    about: str  # what the numbers mean and leave out
    made_by: str  # program and version
    maps: Maps | Scripted | None = None
    done: str = ""  # what is said in place of pass where no limits were set: compared, evaluated
    doubts: Sequence[str] = ()  # what questions the comparison itself

    @property
    def word(self) -> str | None:
        """The verdict in a word."""
        return self.done if self.done and self.verdict == "pass" else self.verdict


class Case(NamedTuple):
    """A test of JUnit, which passes unless it has a ``problem``: error or failure."""

    group: str
    name: str
    problem: str = ""
    message: str = ""
    text: str = ""  # of the problem
    output: str = ""


class Suite(NamedTuple):
    """Tests of JUnit: of a candidate, of a comparison."""

    name: str
    cases: Sequence[Case]
    gates: Sequence[Gate] = ()


Cells = Iterable[tuple[str, object]]  # names of columns, with values


class Shown(Protocol):
    """A result that a reader sees and a spreadsheet takes in."""

    @property
    def noun(self) -> str:
        """What it is called: report, plan, diff."""

    def view(self, top: int) -> View:
        """What is seen of it, with ``top`` layers of each kind."""

    def columns(self) -> Sequence[str]:
        """The columns of its CSV."""

    def rows(self) -> Iterable[Cells]:
        """The rows of its CSV."""


class Judged(Shown, Protocol):
    """One that CI judges."""

    @property
    def run(self) -> RunInfo:
        """When and how it was made."""

    def suites(self) -> Sequence[Suite]:
        """What JUnit has of it."""
