"""The parser of rules: each is one comparison, ``FUNCTION(metric) OPERATOR number``.

    snr_db >= 30                            each selected layer
    p05(cosine_similarity) >= 0.998         all selected layers together
    share(nmse <= 0.001) >= 0.99            the share of selected layers for which the comparison holds
    global(overall_snr_db) >= 31            the whole model, from the report's aggregate
    delta(snr_db) >= -0.5                   each layer compared with the same layer of the baseline
    original_compared_fraction >= 0.999     the report itself
    upper(kld_mean) <= 0.01                 the upper end of the interval of a number with a standard error
    share(not_shown) == 0                   the share of the bytes of tensors of a class, with --every-code
    loads(vllm)                             a program loads the checkpoint; has no operator and number

The metrics depend on the document: values.py next to its model declares them.

An undefined value satisfies no comparison, neither the condition nor its negation.
"""

import operator
import re
from collections.abc import Callable, Collection, Iterable
from difflib import get_close_matches
from math import isfinite
from typing import Literal, NamedTuple

from quanterr.documents.comparison.values import VOCABULARY as OF_REPORTS
from quanterr.documents.subjects import Vocabulary
from quanterr.errors import UsageError
from quanterr.metrics import mean, median, quantile
from quanterr.util.text import display


class Operator(NamedTuple):
    """Comparison of a value with a limit."""

    holds: Callable[[float, float], bool]
    margin: Callable[[float, float], float]  # distance to the limit; negative beyond it
    opposite: str


OPERATORS = {
    "<": Operator(operator.lt, lambda value, limit: limit - value, ">="),
    "<=": Operator(operator.le, lambda value, limit: limit - value, ">"),
    ">": Operator(operator.gt, lambda value, limit: value - limit, "<="),
    ">=": Operator(operator.ge, lambda value, limit: value - limit, "<"),
    "==": Operator(operator.eq, lambda value, limit: 0.0 - abs(value - limit), "!="),
    "!=": Operator(operator.ne, lambda value, limit: abs(value - limit), "=="),
}


class RuleFunction(NamedTuple):
    """A row of FUNCTIONS: a function that a rule applies to a metric."""

    name: str
    summary: str
    of: Callable[[list[float]], float] | None = None  # combines the values of all selected layers


FUNCTIONS = (
    RuleFunction("each", "the value of each selected layer (block, task); may be omitted"),
    RuleFunction("min", "the lowest value over the selected layers", min),
    RuleFunction("max", "the highest value over the selected layers", max),
    RuleFunction("mean", "the mean over the selected layers, unweighted", mean),
    RuleFunction("median", "the median over the selected layers", median),
    RuleFunction("pNN", "a percentile over the selected layers, linearly interpolated: p05, p50, p99_9"),
    RuleFunction("share", "the share of the selected layers, 0 to 1, that satisfy the comparison in the brackets"),
    RuleFunction("global", "the value of the whole model, from the report's `aggregate`"),
    RuleFunction("delta", "the value of each selected layer, or of the whole, minus its value in the baseline"),
    RuleFunction("rel_delta", "`delta`, divided by the absolute value in the baseline"),
    RuleFunction("ratio", "the value divided by its value in the baseline"),
    RuleFunction("upper", "the upper end of the 95 % interval of a number with a standard error"),
    RuleFunction("lower", "the lower end of that interval"),
    RuleFunction("loads", "a program of `--for`, which must load the checkpoint as stored: `loads(vllm)`, no operator"),
)
LOADS = "loads"
NAMES = [row.name.replace("NN", "05") for row in FUNCTIONS]
STATISTICS = {row.name: row.of for row in FUNCTIONS if row.of}
BASELINE_FUNCTIONS = {"delta", "rel_delta", "ratio"}
INTERVAL_FUNCTIONS = {"upper", "lower"}
ITEM_FUNCTIONS = {"each", *BASELINE_FUNCTIONS}
NO_FUNCTION = ""  # the value of the whole subject if it has the metric, otherwise of each item
PERCENTILE = re.compile(r"p(\d{1,2}(?:[._]\d+)?)")

_TOKEN = re.compile(
    r"\s*(?:(?P<name>[A-Za-z_][\w.]*(?:-[A-Za-z][\w.]*)*)|(?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)"
    r"|(?P<operator><=|>=|==|!=|<|>)|(?P<bracket>[()]))",
    re.ASCII,
)


# The metric is of layers (items), of the aggregate (model) or of the report (whole); loading: it names a program.
Scope = Literal["items", "model", "whole", "loading"]


class Condition(NamedTuple):
    """A parsed rule.

    ``function`` is a name from FUNCTIONS or a percentile.
    """

    text: str
    function: str
    metric: str  # with share(), the metric in the brackets
    operator: str
    limit: float
    inner: "Condition | None" = None
    scope: Scope = "items"
    item: str = "layer"  # noun for an item in messages

    def holds(self, value: float) -> bool:
        """Return True if the unrounded value satisfies the comparison; NaN never does."""
        return value == value and OPERATORS[self.operator].holds(value, self.limit)

    def margin(self, value: float) -> float:
        """Return the distance of the value to the limit; negative beyond it."""
        return OPERATORS[self.operator].margin(value, self.limit)

    @property
    def per_item(self) -> bool:
        """True if the condition is decided for each layer by itself."""
        return self.scope == "items" and self.function in ITEM_FUNCTIONS

    @property
    def of_items(self) -> bool:
        """True if the condition is about layers, and not about the whole model or the document."""
        return self.scope == "items"

    def statistic(self, values: list[float]) -> float:
        """Return the value of the function over all selected layers."""
        if values.count(values[0]) == len(values):
            return values[0]  # avoids inf - inf where all are infinite
        if match := PERCENTILE.fullmatch(self.function):
            return quantile(sorted(values), float(match[1].replace("_", ".")) / 100)
        return STATISTICS[self.function](values)

    def negate(self) -> "Condition":
        """Return the condition that holds exactly where this one does not; neither holds for undefined values.

        Raises:
            UsageError: the condition is that a program loads the checkpoint; nobody requires the opposite.
        """
        if self.scope == "loading":
            raise UsageError(f"{display(self.text)}: require it, with --require '{display(self.text)}'")
        opposite = OPERATORS[self.operator].opposite
        left = self.text.rpartition(self.operator)[0]
        return self._replace(text=f"{left}{opposite}{self.text[len(left) + len(self.operator) :]}", operator=opposite)


def parse(text: str, vocabulary: Vocabulary = OF_REPORTS) -> Condition:
    """Parse a rule for a document with the given metrics.

    Raises:
        UsageError: the text is not a rule (the message gives the column, what was found and what was expected), or it
            names a metric that does not exist or has another scope (the message suggests the nearest).
    """
    return _Parser(text, vocabulary).parse_condition()


class _Parser:
    """Recursive descent parser of one rule."""

    def __init__(self, text: str, vocabulary: Vocabulary) -> None:
        self._text = text
        self._known = vocabulary
        self._at = 0

    def parse_condition(self) -> Condition:
        if not self._remaining():
            raise UsageError(f'an empty rule; write a condition such as "{self._known.example}"')
        condition = self._parse_comparison(inner=False)
        if self._remaining():
            raise self._make_error("the end of the rule: one comparison, a number without a unit")
        return condition

    def _parse_comparison(self, inner: bool) -> Condition:
        start = self._at
        name = self._take("name", "a metric or a function")
        function, metric, nested = NO_FUNCTION, name, None
        if self._peek("bracket") == "(":
            function, metric, nested = self._parse_call(name, inner)
        if function == LOADS:
            return self._make_loads(start, metric.lower())
        scope = "items" if nested else self._find_scope(metric, function, inner)
        function = "each" if function == NO_FUNCTION else function
        sign = self._take("operator", f"one of {' '.join(OPERATORS)}")
        limit = float(self._take("number", "a number"))
        if not isfinite(limit):
            raise UsageError(f"{self._quote()}: the limit is too large for a number")
        text, item = self._text[start : self._at].strip(), self._known.items.get(metric, "layer")
        return Condition(text, function, metric, sign, limit, nested, scope, item)

    def _make_loads(self, start: int, program: str) -> Condition:
        if not self._known.loads:
            raise UsageError(f"{self._quote()}: a {self._known.document} does not say which programs load a checkpoint")
        if program == "all":
            raise UsageError(f"{self._quote()}: name the program, such as loads(vllm)")
        return Condition(self._text[start : self._at].strip(), LOADS, program, ">=", 1.0, None, "loading")

    def _parse_call(self, name: str, inner: bool) -> tuple[str, str, Condition | None]:
        if not _is_function(name):
            hint = _suggest(name, NAMES, f"; there are {', '.join(NAMES)}")
            raise UsageError(f"{self._quote()}: no function named {display(name)}{hint}")
        if PERCENTILE.fullmatch(name) and not float(name[1:].replace("_", ".")):
            raise UsageError(f"{self._quote()}: {name} is not a percentile; for the lowest value write min()")
        if inner:
            raise UsageError(f"{self._quote()}: share() takes a plain comparison, such as share(nmse <= 0.01)")
        self._take("bracket", "(")
        if name == "share" and (whole := f"share({self._peek('name')})") in self._known.whole:
            self._take("name", "a class")
            self._take("bracket", ")")
            return NO_FUNCTION, whole, None
        nested = self._parse_comparison(inner=True) if name == "share" else None
        metric = nested.metric if nested else self._take("name", "a metric")
        if self._peek("bracket") != ")":
            raise self._make_error(")")
        self._take("bracket", ")")
        return name, metric, nested

    def _find_scope(self, metric: str, function: str, inner: bool) -> Scope:
        for scope, metrics in self._list_scopes(function, inner):
            if metric in metrics:
                return scope
        raise UsageError(f"{self._quote()}: {self._explain_unknown(metric, function)}")

    def _list_scopes(self, function: str, inner: bool = False) -> list[tuple[Scope, Collection[str]]]:
        """Return the scopes in which a function looks for its metric, with their metrics; the first scope wins."""
        if function == "global":
            return [("model", self._known.model)]
        if function in INTERVAL_FUNCTIONS:
            return [("whole", self._known.errors)]
        if inner or function not in (NO_FUNCTION, *BASELINE_FUNCTIONS):
            return [("items", self._known.items)]
        return [("whole", self._known.whole), ("items", self._known.items)]

    def _explain_unknown(self, metric: str, function: str) -> str:
        """Explain why a function does not find a metric."""
        known, shown = self._known, display(metric)
        if function in INTERVAL_FUNCTIONS and metric in (*known.whole, *known.items, *known.model):
            known_metrics = ", ".join(known.errors) or f"no metric of this {known.document}"
            return f"{shown} has no standard error; write it without {function}(), which takes {known_metrics}"
        if function == "global" and metric in known.whole:
            return f"{shown} is a metric of the {known.document}; write it without global()"
        if function == "global" and metric in known.items:
            hint = f"; {shown} is a metric of {known.items[metric]}s{_suggest(metric, known.model)}"
        elif _is_function(metric):
            hint = f"; {shown} is a function: write {shown}(metric)"
        elif metric in known.model:
            hint = f"; it is a metric of the whole model: global({metric})"
        elif metric in known.whole:
            return f"{shown} is a metric of the {known.document} itself, not of its parts: write {metric} alone"
        else:
            hint = _suggest(metric, [name for _, metrics in self._list_scopes(function) for name in metrics])
        kinds = set(known.items.values())
        of_items = f"of a {kinds.pop()}" if len(kinds) == 1 else f"of the {known.document}"
        whose = "of the whole model" if function == "global" else of_items
        return f"no metric {whose} named {shown}{hint}"

    def _peek(self, token: str) -> str | None:
        match = _TOKEN.match(self._text, self._at)
        return match[token] if match else None

    def _take(self, token: str, expected: str) -> str:
        match = _TOKEN.match(self._text, self._at)
        if match is None or match[token] is None:
            raise self._make_error(expected)
        self._at = match.end()
        return match[token]

    def _remaining(self) -> str:
        return self._text[self._at :].strip()

    def _make_error(self, expected: str) -> UsageError:
        rest = self._remaining()
        column = len(self._text) - len(self._text[self._at :].lstrip()) + 1
        position = f'found "{display(rest, 40)}"' if rest else "it ends there"
        return UsageError(f"{self._quote()}: column {column}: expected {expected}; {position}")

    def _quote(self) -> str:
        return f'"{display(self._text)}"'


def _is_function(name: str) -> bool:
    return name in NAMES or PERCENTILE.fullmatch(name) is not None


def _suggest(name: str, names: Iterable[str], otherwise: str = "; see quanterr guide metrics") -> str:
    """Return the nearest names as the end of a sentence."""
    near = get_close_matches(name, sorted(names), n=3, cutoff=0.5)
    return f"; did you mean {', '.join(near)}?" if near else otherwise
