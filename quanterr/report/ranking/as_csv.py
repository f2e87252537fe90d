"""The ranking as CSV: a line with the verdict, one for each candidate, then one for each layer of each candidate.

``list`` says which a line is. Numbers are written in full; an undefined one is empty.
"""

import csv
from typing import IO, Any

from quanterr.report.as_csv import cell
from quanterr.report.ranking.model import Ranking

COLUMNS = (
    *("quanterr_verdict", "list", "candidate", "rank", "layer_name", "format", "bytes", "squared_error", "snr_db"),
    *("snr_db_margin", "tokens_per_second", "best", "reason"),
)


def write(ranking: Ranking, file: IO[str]) -> None:
    """Write it; the verdict is in every line, so that no extract of them loses it."""
    rows = csv.DictWriter(file, COLUMNS, restval="", lineterminator="\n")
    rows.writeheader()

    def write_row(**values: Any) -> None:
        texts = {key: cell(value) if isinstance(value, str) else value for key, value in values.items()}
        rows.writerow({"quanterr_verdict": ranking.verdict} | texts)

    write_row(list="ranking", reason="; ".join(ranking.reasons))
    for candidate in ranking.candidates:
        write_row(
            list="candidates",
            candidate=candidate.name,
            rank=candidate.rank,
            bytes=candidate.bytes,
            squared_error=candidate.squared_error,
            snr_db=candidate.snr_db,
            snr_db_margin=candidate.snr_db_margin,
            tokens_per_second=candidate.tokens_per_second,
            reason=candidate.not_ranked or "; ".join(candidate.reasons),
        )
    for layer in ranking.layers:
        for choice in layer.choices:
            write_row(
                list="layers",
                candidate=choice.candidate,
                layer_name=layer.layer_name,
                format=choice.format,
                bytes=choice.bytes,
                squared_error=choice.squared_error,
                snr_db=choice.snr_db,
                snr_db_margin=choice.snr_db_margin,
                best=layer.best,
            )
