"""The evaluation as CSV: a line with the verdict, then one for each number, finding, block and weight of a candidate.

``list`` says which a line is. Numbers are written in full; an undefined one is empty.
"""

import csv
from typing import IO, Any

from quanterr.report.as_csv import cell
from quanterr.report.evaluation.model import METRICS, Evaluation

COLUMNS = ("quanterr_verdict", "list", "candidate", "name", "block", "value", "cosine", "share_of_block", "reason")


def write(evaluation: Evaluation, file: IO[str]) -> None:
    """Write it; the verdict is in every line, so that no extract of them loses it."""
    rows = csv.DictWriter(file, COLUMNS, restval="", lineterminator="\n")
    rows.writeheader()

    def write_row(**values: Any) -> None:
        texts = {key: cell(value) if isinstance(value, str) else value for key, value in values.items()}
        rows.writerow({"quanterr_verdict": evaluation.verdict} | texts)

    write_row(list="evaluation", reason="; ".join(evaluation.reasons))
    for candidate in evaluation.candidates:
        write_row(list="candidates", candidate=candidate.name, reason="; ".join(candidate.reasons))
        for metric in METRICS:
            if (value := candidate.value(metric)) is not None:
                write_row(list="scores", candidate=candidate.name, name=metric, value=value)
        for found in candidate.findings:
            write_row(list="findings", candidate=candidate.name, name=found.code, reason=found.message)
        for block in candidate.blocks:
            value, cosine = block.relative_error, block.cosine
            write_row(list="blocks", candidate=candidate.name, name=block.name, value=value, cosine=cosine)
        for weight in candidate.weights:
            write_row(
                list="weights",
                candidate=candidate.name,
                name=weight.layer_name,
                block=weight.block,
                value=weight.output_error,
                share_of_block=weight.share_of_block,
            )
