"""Stored reports and rules: each gives a clear error or a verdict, and no damage turns a failure into a pass."""

import contextlib
import io
import json
from functools import cache
from random import Random
from typing import Any, NamedTuple
from zlib import crc32

from support.sample_reports import report_of, tiny
from support.stored import original, to_fp8, write

import quanterr
from fuzz.finding import Target, folder, refusal, require
from fuzz.mutating import STRANGE, Pairs, Raw, change, changed_bytes, dump, few, other_text, seed
from quanterr.differences.making import LAYER_FIELDS
from quanterr.differences.making import diff_reports as diff
from quanterr.documents.checksum import KEY as CHECKSUM
from quanterr.documents.comparison import LISTS
from quanterr.documents.comparison.values import ReportValues
from quanterr.documents.reading import read_report
from quanterr.errors import QuanterrError
from quanterr.gates.as_text import format_gates
from quanterr.gates.github import format_summary, make_annotations
from quanterr.gates.rules import PRESETS, Rule, read_rules
from quanterr.gates.verdicts import Verdict, judge_subject, list_needed_metrics
from quanterr.outputs import OUTPUTS
from quanterr.outputs.terminal import make_console
from quanterr.outputs.terminal import show as show_view

LENIENT = ("snr_db >= 1", "min(snr_db) >= 1", "max(relative_error) <= 0.5", "global(overall_snr_db) >= 1")
LENIENT += ("original_compared_fraction >= 0.9", "findings.error <= 0", "not_compared <= 0", "mean(nmse) <= 0.9")
STRICT = (
    "snr_db >= 31",
    "snr_db >= 20",
    "min(snr_db) >= 31.9",
    "max(relative_error) <= 0.001",
    "findings.warning <= 0",
)
WORDS = (
    "pass",
    "fail",
    "inconclusive",
    "error",
    "warning",
    "info",
    "nan",
    "+inf",
    "-inf",
    "layers",
    "snr_db",
    1e308,
    -1e308,
)


class Sound(NamedTuple):
    """A report as it was written, and which rules hold for it."""

    text: bytes
    tree: Any
    holds: frozenset[str]


@cache
def rules() -> list[Rule]:
    """Return the rules; each is judged by itself."""
    return read_rules(None, (*LENIENT, *STRICT))


@cache
def sound() -> list[Sound]:
    """Return a good report, one with other changes and a failed gate, and an inconclusive one."""
    place = folder()
    x = write(place / "x.safetensors", original())
    changed_norm = to_fp8(original())
    changed_norm["model.layers.0.input_layernorm.weight"] = changed_norm["model.layers.0.input_layernorm.weight"] * 1.2
    lost = to_fp8(original())
    del lost["model.layers.0.mlp.up_proj.weight"], lost["model.layers.0.mlp.up_proj.weight_scale"]
    wrong = to_fp8(original())
    wrong["model.layers.0.mlp.up_proj.weight_scale"] *= 3
    candidates = (changed_norm, lost, wrong)
    reports = [quanterr.compare(x, write(place / "y.safetensors", y), device="cpu") for y in candidates]
    reports = [quanterr.judge(report, require=["snr_db >= 1", "snr_db >= 40"]) for report in reports]
    cases = []
    for report in (*reports, report_of(tiny())):
        text = report.to_json().encode()
        path = place / "sound.json"
        path.write_bytes(text)
        cases.append(Sound(text, seed(text), holding(judge(path))))
    return cases


def judge(path: Any) -> Verdict:
    """Judge the report by all rules."""
    return judge_subject(ReportValues(read_report(path, list_needed_metrics(rules()), judged=False)), rules())


def holding(verdict: Verdict) -> frozenset[str]:
    """Return the rules that hold, and ``whole`` if nothing else makes the report inconclusive."""
    ids = {gate.id for gate in verdict.gates if gate.status == "pass"}
    return frozenset(ids | ({"whole"} if verdict.verdict != "inconclusive" else set()))


# Damage: what is lost. It never makes anything better.


def lose(random: Random, tree: Any) -> Any:
    """Remove something from the tree, or replace it by nothing."""
    copy = type(tree)(tree)
    n = random.randrange(len(copy))
    value = copy[n][1] if isinstance(copy, Pairs) else copy[n]
    if isinstance(value, list) and value and random.random() < 0.85:
        value = lose(random, value)
    elif random.random() < 0.5:
        del copy[n]
        return copy
    else:
        value = random.choice((None, None, [], Pairs(), Raw("NaN")))
    copy[n] = (copy[n][0], value) if isinstance(copy, Pairs) else value
    return copy


def shorten(random: Random, tree: Any) -> Any:
    """Remove items from one list of the report, and adapt the number of layers."""
    key = random.choice(LISTS)
    fields = dict(tree)
    if not isinstance(fields.get(key), list):  # lost before
        return tree
    kept = [item for item in fields[key] if random.random() < 0.6]
    fields[key] = kept
    if key == "layers" and isinstance(fields.get("aggregate"), list):
        fields["aggregate"] = Pairs((dict(fields["aggregate"]) | {"total_layers": len(kept)}).items())
    return Pairs(fields.items())


def make_lost(random: Random) -> bytes:
    """Make a report that lost one thing; its first byte is the number of the sound report."""
    n = random.randrange(len(sound()))
    if random.random() < 0.1:
        text = sound()[n].text
        at = random.randint(0, len(text))
        raw = text[:at] + (b"" if random.random() < 0.5 else text[at + random.randint(1, 2000) :])
        return bytes([n]) + raw
    tree = sound()[n].tree
    for _ in range(few(random)):
        tree = shorten(random, tree) if random.random() < 0.3 else lose(random, tree)
    return bytes([n]) + _sign(random, dump(tree).encode())


def check_lost(raw: bytes) -> str:
    """Check that a report is refused, or that no rule holds that did not hold for the sound report."""
    before = sound()[raw[0]]
    outcome, verdict = _judge(raw[1:])
    if verdict is None:
        return outcome
    better = holding(verdict) - before.holds
    require(not better, f"holds now, and did not for the sound report: {sorted(better)}")
    return outcome


# Any other change


def make(random: Random) -> bytes:
    """Make a report with any change, sometimes with a matching checksum."""
    tree = random.choice(sound()).tree
    for _ in range(few(random)):
        tree = change(random, tree, WORDS, stop=0.03)
    raw = dump(tree).encode()
    if random.random() < 0.1:
        raw = changed_bytes(random, raw)
    return _sign(random, raw)


def _sign(random: Random, raw: bytes) -> bytes:
    """Sometimes write the report as quanterr does, checksum included."""
    if random.random() < 0.6 or not raw.startswith(b'{"schema":'):
        return raw
    head, _, tail = raw.rpartition(b',"run":')
    text = b'{\n"schema": ' + head[len(b'{"schema":') :].replace(b',"schema_version":', b',\n"schema_version": ', 1)
    text, _, _ = text.partition(b',"checksum":')
    return text + CHECKSUM + f'{crc32(text):08x}"'.encode() + b',"run":' + tail


def check(raw: bytes) -> str:
    """Check that a report is refused, or judged, compared and rendered."""
    outcome, verdict = _judge(raw)
    if verdict is None:
        return outcome
    path = folder() / "report.json"
    try:
        read = [read_report(path, LAYER_FIELDS) for _ in range(2)]
        shown = io.StringIO()
        show_view(diff(*read, ("a", "b")).view(3), make_console(shown))
        for line in shown.getvalue().splitlines():
            require(line.isprintable(), f"diff: {line!a}")
        report = read_report(path)
    except QuanterrError as error:
        return f"{outcome}; {refusal(error)}"
    pick = crc32(raw) % (len(OUTPUTS) + 1)
    if pick < len(OUTPUTS):
        OUTPUTS[pick].write(report, io.StringIO())
    else:
        show_view(report.view(3), make_console(io.StringIO(), "never"), verbose=True)
    return f"{outcome}; rendered"


def _judge(raw: bytes) -> tuple[str, Verdict | None]:
    path = folder() / "report.json"
    path.write_bytes(raw)
    try:
        verdict = judge(path)
    except QuanterrError as error:
        return refusal(error), None
    for line in (*format_gates(verdict.gates), *make_annotations(verdict)):
        require(line.isprintable(), f"said: {line!a}")
    format_summary(verdict)
    json.dumps(verdict.reasons)
    return f"{verdict.verdict}, {sum(gate.status == 'pass' for gate in verdict.gates)} gates hold", verdict


# Rules

THRESHOLDS = """schema = 1
[[rule]]
id = "attn"
require = "snr_db >= 30"
layers = ["attn", "re:.*q_proj.*", "!norm"]
severity = "warn"
undefined = "skip"
reason = "why"
[[rule]]
id = "share"
require = "share(snr_db >= 28.5) >= 0.9"
[[rule]]
id = "whole"
require = "p99(absolute_error_percentiles.p99_9) <= 1e-3"
"""
TOKENS = (
    '"',
    "'",
    "[",
    "]]",
    "=",
    "\n",
    "#",
    "snr_db",
    ">=",
    "<",
    "(",
    ")",
    "delta(snr_db) >= 0",
    "1e999",
    "nan",
    "true",
)
TOKENS += (
    "layers = []",
    'id = "attn"',
    "re:(",
    "re:(a*)*b",
    "*" * 50,
    "!",
    "global(",
    "p101(snr_db)",
    "\\u0000",
    '"""',
    "0x1F",
)


def make_rules(random: Random) -> bytes:
    """Make a thresholds file."""
    text = random.choice((THRESHOLDS, THRESHOLDS, *(path.read_text() for path in PRESETS.values())))
    for _ in range(random.choice((0, 1, 1, 2, 3))):
        at = random.randint(0, len(text))
        end = at + random.choice((0, 0, 1, 3, 10))
        text = (
            text[:at] + random.choice((*TOKENS, *STRANGE)) + text[end:]
            if random.random() < 0.7
            else other_text(random, text)
        )
    raw = text.encode(errors="surrogatepass")
    return changed_bytes(random, raw) if random.random() < 0.1 else raw


@cache
def _values(metrics: frozenset[str]) -> ReportValues:
    path = folder() / "sound.json"
    path.write_bytes(sound()[0].text)
    return ReportValues(read_report(path, metrics, judged=False))


def check_rules(raw: bytes) -> str:
    """Check that rules are refused, or that they judge a report."""
    path = folder() / "thresholds.toml"
    path.write_bytes(raw)
    try:
        accepted_rules = read_rules(path)
        verdict = judge_subject(_values(frozenset(list_needed_metrics(accepted_rules))), accepted_rules)
    except QuanterrError as error:
        return refusal(error)
    require(len(verdict.gates) == len(accepted_rules), "a rule was left out")
    for line in (*format_gates(verdict.gates), *make_annotations(verdict)):
        require(line.isprintable(), f"said: {line!a}")
    with contextlib.redirect_stderr(io.StringIO()):
        format_summary(verdict)
    return f"{verdict.verdict}, {len(accepted_rules)} rules"


LOST = Target("lost", make_lost, check_lost)
TARGET = Target("report", make, check)
RULES = Target("rules", make_rules, check_rules)
