"""What the table, the page and Markdown of a ranking have in common."""

from quanterr.report.ranking.model import Ranking

NONE = "-"


def study_cells(ranking: Ranking) -> tuple[list[str], list[list[str]]]:
    """Headings and cells of what outliers and scales do to each recipe [dB]; its name is the first cell."""
    first = ranking.studies[0]
    heads = [f"{one.percent:g} % out" for one in first.outliers]
    heads += [f"{one.percent:g} % of columns out" for one in first.columns]
    heads += [f"scale {one.percent:+g} %" for one in first.scales]
    rows = []
    for one in ranking.studies:
        changes = (*one.outliers, *one.columns, *one.scales)
        rows.append([one.candidate, *(NONE if c.gain_db is None else f"{c.gain_db:+.2f}" for c in changes)])
    return heads, rows


STUDY_TITLE = "dB gained without outliers, and by other scales (a sample of rows)"


def margin(snr_db_margin: float | None) -> str:
    """Behind an SNR, where it is an estimate."""
    return "" if snr_db_margin is None else f" ± {snr_db_margin:.2f}"


def speed(tokens_per_second: float | None) -> str:
    """How many tokens a second memory bandwidth allows."""
    return NONE if tokens_per_second is None else f"{tokens_per_second:,.0f}"


def has_speeds(ranking: Ranking) -> bool:
    """Whether they are known."""
    return any(candidate.tokens_per_second is not None for candidate in ranking.candidates)
