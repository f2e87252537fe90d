"""The guide: a Markdown page per topic, shipped with the package, and the entries of ``quanterr explain``."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct

from quanterr.documents.comparison.aggregate import AGGREGATES
from quanterr.documents.comparison.layer import METRICS
from quanterr.documents.comparison.values import REPORT_METRICS
from quanterr.documents.finding_codes import CODES, FORMER_NAMES
from quanterr.errors import MEANINGS, UsageError
from quanterr.gates.expression import FUNCTIONS
from quanterr.guide.words import WORDS
from quanterr.metrics.scores import Score, collect_scores
from quanterr.selection.roles import ALIASES
from quanterr.util.text import display, with_article

if TYPE_CHECKING:
    from quanterr.documents.kinds import DocumentKind

PAGES = Path(__file__).parent
MARKER = re.compile(r"^<!-- /?[a-z-]+(?:: made by \S+)? -->\n", re.MULTILINE)  # markers of generated parts
PERCENTILE = re.compile(r"p\d+(_\d+)?")
OLD_OR_NEW, UNIT = re.compile(r"(old|new) (?=.)", re.IGNORECASE), re.compile(r"(?<=.) (dB|%)$")  # ends of headings
# Pages in the order in which ``quanterr guide`` lists them.
TOPICS = (
    "start",
    "gguf",
    "comfyui",
    "verdict",
    "findings",
    "formats",
    "metrics",
    "gates",
    "rank",
    "plan",
    "evaluate",
    "evaluate-data",
    "evaluate-rounding",
    "inspect",
    "dequantize",
    "origin",
    "scale",
    "outputs",
    "settings",
    "library",
    "automation",
    "troubleshooting",
    "numbers",
    "producers",
    "adding-a-format",
)


def read_page(topic: str) -> str:
    """Return the Markdown of a page, without the markers of generated parts.

    Raises:
        UsageError: there is no such page; the message suggests the nearest.
    """
    if topic not in TOPICS:
        raise UsageError(f"no guide page named {display(topic)}; {_suggest(topic, TOPICS)}")
    return MARKER.sub("", (PAGES / f"{topic}.md").read_text("utf-8"))


def list_pages() -> str:
    """Return a line per page with its name and its first sentence."""
    width = max(map(len, TOPICS))
    lines = [f"  {topic:{width}}  {read_page(topic).splitlines()[2]}" for topic in TOPICS]
    return "\n".join([*lines, "", "quanterr guide TOPIC shows a page, quanterr explain NAME a single entry."])


def explain(name: str) -> str:
    """Explain a word of an output in Markdown: a finding, metric, heading, verdict, role, format, recipe and so on.

    Case does not matter. "old SNR dB" is explained as "SNR", and "worst_rows.row", without an entry, as "worst_rows".

    Raises:
        UsageError: nothing has this name; the message suggests the nearest.
    """
    spellings = (
        "pNN" if PERCENTILE.fullmatch(name) else FORMER_NAMES.get(name, name),
        UNIT.sub("", OLD_OR_NEW.sub("", name, count=1)),
        name.partition(".")[0],
    )
    texts = next(filter(None, (_find_texts(KINDS, spelling) for spelling in spellings)), [])
    if not texts or name in {entry.name for entry in list_presets()}:  # some presets share a name with a format
        texts += _find_texts(LATER_KINDS, name)
    if not texts:
        from quanterr.recipes.names import find_listed_recipe  # imports torch

        listed = find_listed_recipe(name)  # int4_g32:asym is explained as int4_g128
        texts = [] if listed is None else _find_texts(LATER_KINDS, listed)
    if not texts:
        raise UsageError(
            f"nothing to explain is named {display(name)}; {_suggest(name, list_names((*KINDS, *LATER_KINDS)))}"
        )
    return "\n\n".join(texts)


def _find_texts(listings: "Sequence[Kind]", name: str) -> list[str]:
    wanted = name.casefold()
    entries = (entry for list_entries in listings for entry in list_entries())
    return [entry.text for entry in entries if any(wanted == known.casefold() for known in (entry.name, *entry.also))]


def list_names(listings: "Sequence[Kind]") -> list[str]:
    """Return the names of entries and their synonyms, without duplicates."""
    entries = (entry for list_entries in listings for entry in list_entries())
    return list(dict.fromkeys(name for entry in entries for name in (entry.name, *entry.also)))


class GuideEntry(NamedTuple):
    """Something that ``quanterr explain`` explains by name, or by another word for it."""

    name: str
    text: str
    also: Sequence[str] = ()


Kind = Callable[[], Iterable[GuideEntry]]


def list_findings() -> Iterator[GuideEntry]:
    """Yield one entry per finding."""
    for name, row in CODES.items():
        severities = " or ".join(row.severities)
        text = (
            f"## {name}\n\nFinding, {severities}: {row.meaning}.\n\nLooks like: `{row.example}`\n\nWhat to do: "
            f"{row.remedy}"
        )
        yield GuideEntry(name, text)


def list_metrics() -> Iterator[GuideEntry]:
    """Yield one entry per metric of layers, of the model and of reports."""
    for place, rows in (("a layer", METRICS), ("the model and each group", AGGREGATES)):
        for metric in rows:
            what = f"Metric of {place}{_describe_direction(metric)}, shown as {metric.title}"
            text = f"## {metric.name}\n\n{what}: {metric.formula}."
            yield GuideEntry(metric.name, text, [metric.title])
    for name, row in REPORT_METRICS.items():
        yield GuideEntry(name, f"## {name}\n\nMetric of the report: {row.summary}.")


def _describe_direction(declared: Score) -> str:
    """Return the unit of a number and which direction is better."""
    unit = {"": "", "share": ", a share"}.get(declared.unit, f", in {declared.unit}")
    return f"{unit}, {declared.better} is better" if declared.better else unit


def list_functions() -> Iterator[GuideEntry]:
    """Yield one entry per function of rules."""
    for row in FUNCTIONS:
        yield GuideEntry(row.name, f"## {row.name}\n\nFunction of rules: {row.summary}. See quanterr guide gates.")


def list_statuses() -> Iterator[GuideEntry]:
    """Yield one entry per exit status."""
    for status, meaning in MEANINGS.items():
        yield GuideEntry(str(status.value), f"## {status.value}\n\nExit status: {meaning}.")


def list_words() -> Iterator[GuideEntry]:
    """Yield one entry per word of an answer or a table."""
    from quanterr.views.comparison.layers import BUCKETS

    synonyms = [*ALIASES.items(), *BUCKETS.items()]
    for name, meaning in WORDS.items():
        yield GuideEntry(name, f"## {name}\n\n{meaning}", [other for other, word in synonyms if word == name])


@cache  # the schemas take a quarter of a second
def list_fields() -> Sequence[GuideEntry]:
    """Return one entry per metric or described field of each kind of document, except those in list_metrics."""
    from quanterr.documents.kinds import KINDS

    entries: list[GuideEntry] = []
    known = {metric.name for metric in (*METRICS, *AGGREGATES)} | REPORT_METRICS.keys()
    for document_kind in KINDS.values():
        noun = document_kind.name.lower()
        of = noun if noun.endswith("s") else with_article(noun)
        scores, described = _collect_scores(document_kind), _describe_fields(document_kind)
        for name in dict.fromkeys((*scores, *described)):
            if (name in known and name not in scores) or PERCENTILE.fullmatch(name):
                continue
            what, words = f"Field of {of}", []
            if declared := scores.get(name):
                what = f"Metric of {of}{_describe_direction(declared)}, shown as {declared.title}"
                words = [declared.title]
            texts = described.get(name, [])
            text = f": {texts[0]}." if len(texts) == 1 else "\n- ".join([":\n", *texts]) if texts else "."
            entries.append(GuideEntry(name, f"## {name}\n\n{what}{text}", words))
    return entries


def _collect_scores(document_kind: "DocumentKind") -> dict[str, Score]:
    """Return the numbers that the parts of a kind of document declare."""
    scores = dict(document_kind.values.VOCABULARY.scores)
    for part in vars(import_module(f"{document_kind.package}.model")).values():
        if isinstance(part, type) and issubclass(part, Struct):
            scores |= collect_scores(part) | scores
    return scores


def _describe_fields(document_kind: "DocumentKind") -> dict[str, list[str]]:
    """Return the different descriptions of each field in a kind of document, and of properties that rules may name."""
    vocabulary, schema = document_kind.values.VOCABULARY, document_kind.model.json_schema()
    texts_by_name: dict[str, list[str]] = {}
    for part in (schema, *schema["$defs"].values()):
        for name, declaration in part.get("properties", {}).items():
            if "description" in declaration:
                texts_by_name.setdefault(name, []).append(declaration["description"])
    for part in vars(import_module(f"{document_kind.package}.model")).values():
        for name, declaration in vars(part).items() if isinstance(part, type) else ():
            if name in (*vocabulary.items, *vocabulary.whole) and isinstance(declaration, property):
                texts_by_name.setdefault(name, []).append((declaration.__doc__ or "").rstrip("."))
    return {name: list(dict.fromkeys(distinct)) for name, distinct in texts_by_name.items()}


def list_presets() -> Iterator[GuideEntry]:
    """Yield one entry per preset of thresholds."""
    from quanterr.gates.rules import PRESETS

    for name, path in PRESETS.items():
        yield GuideEntry(
            name, f"## {name}\n\nPreset of --thresholds:\n\n```toml\n{path.read_text('utf-8').rstrip()}\n```"
        )


def list_recipes() -> Iterator[GuideEntry]:
    """Yield one entry per recipe of sweep, plan and rank --against."""
    from quanterr.recipes import list_recipes

    for name, summary in list_recipes().items():
        yield GuideEntry(name, f"## {name}\n\nRecipe: {summary}.")


def list_formats() -> Iterator[GuideEntry]:
    """Yield one entry per format."""
    from quanterr.formats import FORMATS

    for row in FORMATS:
        usual = f"\n\nUsual SNR: {row.usual_db[0]} to {row.usual_db[1]} dB." if row.usual_db else ""
        needs = "\n".join(f"- {part}" for part in row.needs.values())
        yield GuideEntry(
            row.name, f"## {row.name}\n\nFormat: {row.summary}.{usual}\n\nStored for a weight X.weight:\n\n{needs}"
        )


KINDS: tuple[Kind, ...] = (
    list_findings,
    list_metrics,
    list_words,
    list_fields,
    list_functions,
    list_statuses,
    list_presets,
)
LATER_KINDS = (list_formats, list_recipes)  # importing them takes longer, and recipes need torch


def _suggest(name: str, names: Sequence[str]) -> str:
    """Return a suggestion of similar names, with which a message ends."""
    part = [known for known in names if len(name) > 2 and name in known]
    near = list(dict.fromkeys([*get_close_matches(name, names, 4), *part]))[:6]
    return f"did you mean {', '.join(near)}?" if near else "quanterr guide lists the pages"
