"""Gates: rules that a report has to satisfy.

    rules.py         from a thresholds file, a preset or the command line
    expression.py    the language of their conditions
    selecting.py     the layers that a rule is about
    judging.py       which hold, and by how much
    fail_fast.py     what a single layer violates, while others are still to come
    explaining.py    what a gate means, in words
    as_text.py       what is reported of them; github.py: on GitHub

What a gate sees of a report is in report/values.py, the comparison with an older one in report/same_original.py.

To add a function: a row of FUNCTIONS. Metrics are those of METRICS and AGGREGATES; those of the report itself
are rows of REPORT_METRICS.
"""

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

from quanterr.gates.judging import judge_values, needed
from quanterr.gates.rules import Rule, check_baseline_use, read_rules
from quanterr.report.reading import extract
from quanterr.report.values import Values

if TYPE_CHECKING:
    from quanterr.report.model import Report


def judge(
    report: "Report",
    thresholds: str | os.PathLike[str] | None = None,
    *,
    require: Iterable[str] = (),
    fail_if: Iterable[str] = (),
    baseline: "Report | None" = None,
) -> "Report":
    """The report, judged: the same with new ``gates``, ``verdict`` and ``reasons``.

    Args:
        report: of :func:`quanterr.compare`, or of :func:`quanterr.read_report`.
        thresholds: a thresholds file, or the name of a preset.
        require: conditions that have to hold, such as ``snr_db >= 30``.
        fail_if: conditions that must not hold; what is undefined fails these too.
        baseline: an older report, for rules with ``delta`` or ``rel_delta``; alone it asks for delta(snr_db) >= -0.5.

    Raises:
        UsageError: no rule, one that cannot be understood, a pattern that matches nothing, a baseline that cannot be
            relied on, is of another original or selection, that no rule compares with, or is not given and needed.
    """
    rules = read_rules(thresholds, require, fail_if, baseline=baseline is not None)
    check_baseline_use(rules, baseline is not None)
    return judged(report, rules, Values(extract(baseline, *needed(rules))) if baseline else None)


def judged(report: "Report", rules: list[Rule], baseline: Values | None) -> "Report":
    """The same with rules and a baseline that were read before."""
    verdict = judge_values(Values(extract(report, *needed(rules))), rules, baseline)
    return report.model_copy(update=verdict._asdict())
