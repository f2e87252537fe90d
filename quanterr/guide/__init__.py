"""The guide: a Markdown page per topic, shipped with the package, and the entries of ``quanterr explain``."""

import re
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

from quanterr.errors import MEANINGS, UsageError
from quanterr.gates.expression import FUNCTIONS
from quanterr.metrics import AGGREGATES, METRICS, Metric
from quanterr.report.finding_codes import CODES, FORMER_NAMES
from quanterr.report.values import REPORT_METRICS
from quanterr.util.text import display

PAGES = Path(__file__).parent
MARKER = re.compile(r"^<!-- /?[a-z-]+(?:: made by \S+)? -->\n", re.MULTILINE)  # markers of generated parts
WORDS = {
    "pass": "Verdict: everything selected was compared, and all gates hold. Without gates, the answer says `compared`.",
    "compared": "Everything selected was compared, but no limits were set, so nothing says whether the error is small "
    "enough. In the JSON, the verdict is `pass` and `gated` is false.",
    "evaluated": "The model ran with the weights of both sides, but no limits were set: see compared.",
    "fail": "Verdict: a gate does not hold. Exit status 1.",
    "inconclusive": "Verdict: something selected was not compared, or a finding of severity error says that the "
    "numbers cannot be relied on. Exit status 4.",
    "Pareto-optimal": "A candidate is Pareto-optimal if every other candidate is larger or has more error.",
    "front": "The Pareto-optimal candidates: every other candidate is larger or has more error.",
    "knee": "The size beyond which more bytes gain little: where the curve of error over size bends.",
    "bits/w": "Column: the bytes of a weight's stored parts, scales included, in bits per element (`bits_per_weight`).",
    "worst dB": "Column: the SNR of the layer with the lowest SNR (`worst_layer_snr_db`).",
    "avoidable dB": "Column: the dB that the stored codes lose against the nearest codes under their scales "
    "(`excess_db`).",
    "attainable": "Column: the SNR of the nearest codes under the stored scales (`attainable_snr_db`).",
    "lowest error in": "Column: the layers in which a candidate has less error than the others.",
    "same top token": "Column: the share of predictions with the same most likely token on both sides (`top1`).",
    "confident flips": "Column: predictions that changed although the original was confident (`confident_flips`).",
    "margin": "Distance of an observed value from a gate's limit: negative if the gate does not hold.",
    "coverage": "The share of the selected tensors and bytes of the original that was compared.",
}
PERCENTILE = re.compile(r"p\d+(_\d+)?")
# Pages in the order in which ``quanterr guide`` lists them.
TOPICS = (
    "verdict",
    "findings",
    "formats",
    "metrics",
    "gates",
    "rank",
    "plan",
    "evaluate",
    "inspect",
    "scale",
    "outputs",
    "settings",
    "library",
    "troubleshooting",
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
    """Explain a finding, metric, function of rules, exit status, verdict, preset, format or recipe in Markdown.

    Raises:
        UsageError: nothing has this name; the message suggests the nearest.
    """
    wanted = "pNN" if PERCENTILE.fullmatch(name) else FORMER_NAMES.get(name, name)
    found = [entry.text for kind in KINDS for entry in kind() if entry.name == wanted]
    if not found or name in {entry.name for entry in list_presets()}:  # some presets share a name with a format
        found += [entry.text for kind in LATER for entry in kind() if entry.name == name]
    if not found:
        names = [entry.name for kind in (*KINDS, *LATER) for entry in kind()]
        raise UsageError(f"nothing to explain is named {display(name)}; {_suggest(name, names)}")
    return "\n\n".join(found)


class GuideEntry(NamedTuple):
    """Something that ``quanterr explain`` explains by name."""

    name: str
    text: str


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
            yield GuideEntry(
                metric.name, f"## {metric.name}\n\nMetric of {place}{_describe_direction(metric)}: {metric.formula}."
            )
    for name, row in REPORT_METRICS.items():
        yield GuideEntry(name, f"## {name}\n\nMetric of the report: {row.summary}.")


def _describe_direction(metric: Metric) -> str:
    """Return the unit of a metric and which direction is better."""
    unit = f", in {metric.unit}" if metric.unit else ""
    return f"{unit}, {metric.better} is better" if metric.better else unit


def list_functions() -> Iterator[GuideEntry]:
    """Yield one entry per function of rules."""
    for row in FUNCTIONS:
        yield GuideEntry(row.name, f"## {row.name}\n\nFunction of rules: {row.summary}. See quanterr guide gates.")


def list_statuses() -> Iterator[GuideEntry]:
    """Yield one entry per exit status."""
    for status, meaning in MEANINGS.items():
        yield GuideEntry(str(status.value), f"## {status.value}\n\nExit status: {meaning}.")


def list_words() -> Iterator[GuideEntry]:
    """Yield one entry per word of an answer."""
    for name, meaning in WORDS.items():
        yield GuideEntry(name, f"## {name}\n\n{meaning}")


def list_scores() -> Iterator[GuideEntry]:
    """Yield one entry per metric of a ranking, an evaluation, a plan, an inspection or compared images."""
    from quanterr.report.documents import KINDS

    units = {"": "", "%": ", a share"}
    for kind in KINDS.values():
        noun = kind.name.lower()
        of = noun if noun.endswith("s") else f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"
        for name, score in kind.values.VOCABULARY.scores.items():
            unit = units.get(score.unit, f", in {score.unit}")
            text = f"Metric of {of}{unit}, {score.better} is better: {score.title}."
            yield GuideEntry(name, f"## {name}\n\n{text}")


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


KINDS: tuple[Callable[[], Iterator[GuideEntry]], ...] = (
    list_findings,
    list_metrics,
    list_scores,
    list_functions,
    list_statuses,
    list_words,
    list_presets,
)
LATER = (list_formats, list_recipes)  # they import torch


def _suggest(name: str, names: "tuple[str, ...] | list[str]") -> str:
    """Return the nearest names as the end of a sentence."""
    part = [known for known in names if len(name) > 2 and name in known]
    near = list(dict.fromkeys([*get_close_matches(name, names, 4), *part]))[:6]
    return f"did you mean {', '.join(near)}?" if near else "quanterr guide lists the pages"
