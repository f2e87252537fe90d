"""What a reader sees of a document, without a medium: the terminal, the page and Markdown show the same.

A document says what it is about in a :class:`View`. Cells and lines are plain text; a text that comes from a file or a
user and stands by itself is a :class:`Name`, which no medium takes for anything but text.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from quanterr.report.base import Finding, RunInfo
from quanterr.report.gate_results import Gate
from quanterr.util.strict_json import JsonObject


class Name(str):
    """A name or path from a file or a user."""

    __slots__ = ()


class LayerName(Name):
    """The name of a layer, which a page links to everything that is known of it."""

    __slots__ = ()


class Column(NamedTuple):
    """A column behind that of names: in narrow terminals the ones with the highest rank go first."""

    header: str
    rank: int
    right: bool = True  # as numbers are


class Table(NamedTuple):
    """A table; the first cell of each row is what the row is about."""

    title: str
    first: str  # heading of the first column
    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    more: int = 0  # rows that are not shown


class Lines(NamedTuple):
    """Sentences, one below the other; ``warn`` if they are to be noticed."""

    lines: Sequence[str]
    warn: bool = False


class Findings(NamedTuple):
    """Findings, and of which candidate they are where there are several."""

    found: Sequence[tuple[str, Finding]]


class Gates(NamedTuple):
    """Gates, judged, and of which candidate they are where there are several."""

    judged: Sequence[tuple[str, Gate]]


Part = Table | Lines | Findings | Gates


class Section(NamedTuple):
    """Parts under one heading; ``key`` is its id in a page, which folds details, and alone shows them."""

    key: str
    title: str
    parts: Sequence[Part]
    is_detail: bool = False


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


class Maps(NamedTuple):
    """Maps and a table of all layers: what only a page can show. ``data`` are columns: see html_data.columns_of."""

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
    maps: Maps | None = None
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
