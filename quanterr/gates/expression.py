"""The language of rules: ``FUNCTION(metric) OPERATOR number``, one comparison, parsed by hand.

    snr_db >= 30                            each selected layer
    p05(cosine_similarity) >= 0.998         all selected layers together
    share(nmse <= 0.001) >= 0.99            the share of them for which the comparison holds
    global(overall_snr_db) >= 31            the whole model, as in the report's aggregate
    delta(snr_db) >= -0.5                   each layer against the same layer of the baseline
    original_compared_fraction >= 0.999     the report itself
    upper(kld_mean) <= 0.01                 the end of the interval of a number that has a standard error

Which metrics there are depends on the document: its vocabulary is in values.py beside its model.

A value that is undefined satisfies no comparison, neither the condition nor its negation.
"""

import operator
import re
from collections.abc import Callable, Collection, Iterable
from difflib import get_close_matches
from math import isfinite
from typing import Literal, NamedTuple

from quanterr.errors import UsageError
from quanterr.metrics import mean, median, quantile
from quanterr.report.subjects import Vocabulary
from quanterr.report.values import VOCABULARY as OF_REPORTS
from quanterr.util.text import display


class Operator(NamedTuple):
    """A comparison of a value with a limit."""

    holds: Callable[[float, float], bool]
    margin: Callable[[float, float], float]  # how far inside the limit; negative outside
    opposite: str


OPERATORS = {
    "<": Operator(operator.lt, lambda value, limit: limit - value, ">="),
    "<=": Operator(operator.le, lambda value, limit: limit - value, ">"),
    ">": Operator(operator.gt, lambda value, limit: value - limit, "<="),
    ">=": Operator(operator.ge, lambda value, limit: value - limit, "<"),
    "==": Operator(operator.eq, lambda value, limit: 0.0 - abs(value - limit), "!="),
    "!=": Operator(operator.ne, lambda value, limit: abs(value - limit), "=="),
}


class Function(NamedTuple):
    """What a rule makes of a metric."""

    name: str
    summary: str
    of: Callable[[list[float]], float] | None = None  # of the values of all selected layers, where it is of those


FUNCTIONS = (
    Function("each", "the value of each selected layer (block, task); may be omitted"),
    Function("min", "the lowest value of a selected layer", min),
    Function("max", "the highest", max),
    Function("mean", "the mean over the selected layers, unweighted", mean),
    Function("median", "their median", median),
    Function("pNN", "the percentile over the selected layers, linearly interpolated: p05, p50, p99_9"),
    Function("share", "the share of the selected layers, 0 to 1, that satisfy the comparison in the brackets"),
    Function("global", "the value of the whole model, from the report's `aggregate`"),
    Function("delta", "the value of each selected layer, or of the whole, minus that in the baseline"),
    Function("rel_delta", "the same, divided by the absolute value in the baseline"),
    Function("ratio", "the value divided by that in the baseline"),
    Function("upper", "the upper end of the 95 % interval, of a number that has a standard error"),
    Function("lower", "its lower end"),
)
STATISTICS = {row.name: row.of for row in FUNCTIONS if row.of}
OF_BASELINE = {"delta", "rel_delta", "ratio"}
OF_INTERVAL = {"upper", "lower"}
PER_ITEM = {"each", *OF_BASELINE}
PLAIN = ""  # no function: of the whole if that has the metric, of each item otherwise
PERCENTILE = re.compile(r"p(\d{1,2}(?:[._]\d+)?)")

_TOKEN = re.compile(
    r"\s*(?:(?P<name>[A-Za-z_][\w.]*)|(?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)"
    r"|(?P<operator><=|>=|==|!=|<|>)|(?P<bracket>[()]))",
    re.ASCII,
)


class Condition(NamedTuple):
    """A parsed rule. ``function`` is a name of FUNCTIONS or a percentile."""

    text: str
    function: str
    metric: str  # of the comparison in the brackets, for share()
    operator: str
    limit: float
    inner: "Condition | None" = None
    scope: Literal["items", "model", "whole"] = "items"  # what has the metric: layers, the aggregate, the report
    item: str = "layer"  # what its items are

    def holds(self, value: float) -> bool:
        """Whether the value, which is not rounded, satisfies the comparison; NaN never does."""
        return value == value and OPERATORS[self.operator].holds(value, self.limit)

    def margin(self, value: float) -> float:
        """How far inside the limit the value is: negative outside."""
        return OPERATORS[self.operator].margin(value, self.limit)

    @property
    def per_item(self) -> bool:
        """Whether it is decided for each layer by itself."""
        return self.scope == "items" and self.function in PER_ITEM

    @property
    def of_items(self) -> bool:
        """Whether it is about layers at all; otherwise it is about the whole model or the document."""
        return self.scope == "items"

    def statistic(self, values: list[float]) -> float:
        """The value of a function that takes all selected layers together."""
        if values.count(values[0]) == len(values):
            return values[0]  # also where they are infinite, and a difference of two would be undefined
        if match := PERCENTILE.fullmatch(self.function):
            return quantile(sorted(values), float(match[1].replace("_", ".")) / 100)
        return STATISTICS[self.function](values)

    def negated(self) -> "Condition":
        """The condition that holds where this one does not, and where neither is undefined."""
        opposite = OPERATORS[self.operator].opposite
        left = self.text.rpartition(self.operator)[0]
        return self._replace(text=f"{left}{opposite}{self.text[len(left) + len(self.operator) :]}", operator=opposite)


def parse(text: str, vocabulary: Vocabulary = OF_REPORTS) -> Condition:
    """The condition that a text says, of a document with these metrics.

    Raises:
        UsageError: it is none; says where, what was found and what may stand there. A name that no metric
            has, or that a metric of another scope has: names the nearest.
    """
    return _Parser(text, vocabulary).condition()


class _Parser:
    """Takes one token after the other."""

    def __init__(self, text: str, vocabulary: Vocabulary) -> None:
        self._text = text
        self._known = vocabulary
        self._at = 0

    def condition(self) -> Condition:
        if not self._rest():
            raise UsageError(f'an empty rule; write a condition such as "{self._known.example}"')
        found = self._comparison(inner=False)
        if self._rest():
            raise self._expected("the end of the rule: one comparison, a number without a unit")
        return found

    def _comparison(self, inner: bool) -> Condition:
        start = self._at
        name = self._take("name", "a metric or a function")
        function, metric, nested = PLAIN, name, None
        if self._next("bracket") == "(":
            function, metric, nested = self._call(name, inner)
        scope = "items" if nested else self._scope(metric, function, inner)
        function = "each" if function == PLAIN else function
        sign = self._take("operator", f"one of {' '.join(OPERATORS)}")
        limit = float(self._take("number", "a number"))
        if not isfinite(limit):
            raise UsageError(f"{self._shown()}: the limit is too large for a number")
        text, item = self._text[start : self._at].strip(), self._known.items.get(metric, "layer")
        return Condition(text, function, metric, sign, limit, nested, scope, item)

    def _call(self, name: str, inner: bool) -> tuple[str, str, Condition | None]:
        names = [row.name.replace("NN", "05") for row in FUNCTIONS]
        if not (name in names or PERCENTILE.fullmatch(name)):
            hint = _near(name, names, f"; there are {', '.join(names)}")
            raise UsageError(f"{self._shown()}: no function named {display(name)}{hint}")
        if PERCENTILE.fullmatch(name) and not float(name[1:].replace("_", ".")):
            raise UsageError(f"{self._shown()}: {name} is not a percentile; for the lowest value write min()")
        if inner:
            raise UsageError(f"{self._shown()}: share() takes a plain comparison, such as share(nmse <= 0.01)")
        self._take("bracket", "(")
        nested = self._comparison(inner=True) if name == "share" else None
        metric = nested.metric if nested else self._take("name", "a metric")
        if self._next("bracket") != ")":
            raise self._expected(")")
        self._take("bracket", ")")
        return name, metric, nested

    def _scope(self, metric: str, function: str, inner: bool) -> Literal["items", "model", "whole"]:
        """What has a metric, where the function looks for it. The whole comes first where both have one."""
        if function == "global" and metric in self._known.model:
            return "model"
        if function in OF_INTERVAL:
            if metric in self._known.errors:
                return "whole"
        elif function in (PLAIN, *OF_BASELINE) and metric in self._known.whole and not inner:
            return "whole"
        if function not in ("global", *OF_INTERVAL) and metric in self._known.items:
            return "items"
        raise UsageError(f"{self._shown()}: {self._unknown(metric, function)}")

    def _unknown(self, metric: str, function: str) -> str:
        """Why a function does not find a metric."""
        known, shown = self._known, display(metric)
        if function in OF_INTERVAL and metric in (*known.whole, *known.items, *known.model):
            of = ", ".join(known.errors) or f"no metric of a {known.document}"
            return f"{shown} has no standard error; write it without {function}(), which takes {of}"
        if function == "global" and metric in known.whole:
            return f"{shown} is a metric of the {known.document}; write it without global()"
        if function == "global" and metric in known.items:
            hint = f"; {shown} is a metric of {known.items[metric]}s{_near(metric, known.model)}"
        elif metric in known.model:
            hint = f"; it is a metric of the whole model: global({metric})"
        elif metric in known.whole:
            hint = f"; it is a metric of the {known.document}: write {metric} alone"
        else:
            hint = _near(metric, self._names(function))
        kinds = set(known.items.values())
        of_items = f"of a {kinds.pop()}" if len(kinds) == 1 else f"of the {known.document}"
        whose = "of the whole model" if function == "global" else of_items
        return f"no metric {whose} named {shown}{hint}"

    def _names(self, function: str) -> Collection[str]:
        """Those that a function finds."""
        if function == "global":
            return self._known.model
        if function in OF_INTERVAL:
            return self._known.errors
        return [*self._known.items, *(self._known.whole if function in (PLAIN, *OF_BASELINE) else ())]

    def _next(self, kind: str) -> str | None:
        match = _TOKEN.match(self._text, self._at)
        return match[kind] if match else None

    def _take(self, kind: str, expected: str) -> str:
        match = _TOKEN.match(self._text, self._at)
        if match is None or match[kind] is None:
            raise self._expected(expected)
        self._at = match.end()
        return match[kind]

    def _rest(self) -> str:
        return self._text[self._at :].strip()

    def _expected(self, what: str) -> UsageError:
        rest = self._rest()
        column = len(self._text) - len(self._text[self._at :].lstrip()) + 1
        found = f'found "{display(rest, 40)}"' if rest else "it ends there"
        return UsageError(f"{self._shown()}: column {column}: expected {what}; {found}")

    def _shown(self) -> str:
        return f'"{display(self._text)}"'


def _near(name: str, names: Iterable[str], otherwise: str = "; see quanterr guide metrics") -> str:
    """The nearest names as the end of a sentence."""
    near = get_close_matches(name, sorted(names), n=3, cutoff=0.5)
    return f"; did you mean {', '.join(near)}?" if near else otherwise
