"""A ranking in the terminal: first who is not in it, then the candidates, where they differ, what could be swapped."""

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from quanterr.report.as_table import STYLES, Column, ended, fitted, written
from quanterr.report.keeping import FEW
from quanterr.report.ranking.cells import NONE, STUDY_TITLE, has_speeds, margin, speed, study_cells
from quanterr.report.ranking.model import Candidate, RankedLayer, Ranking, Swaps
from quanterr.util.text import count, display, size

COLUMNS = (
    Column("rank", 0),
    Column("front", 2, right=False),
    Column("size", 3),
    Column("bits/w", 4),
    Column("SNR dB", 1),
    Column("excess dB", 5),
    Column("worst dB", 6),
    Column("best in", 7),
    Column("warnings", 8),
    Column("worst layer", 9, right=False),
)
WEIGHTED = Column("weighted dB", 2)
PREDICTED = Column("predicted KLD", 2)
SPEED = Column("tokens/s at most", 2)
GATES = Column("gates held", 1)
SWAP_COLUMNS = (Column("take from", 0, right=False), Column("bytes", 2), Column("error", 1))
GAIN_COLUMNS = (
    Column("instead of", 0, right=False),
    Column("what", 3, right=False),
    Column("dB", 1),
    Column("bytes", 2),
)
SAME_SIZE = 0.05  # %


def show(ranking: Ranking, to: Console, top: int = 10, status: int | None = None, wrote: Sequence[str] = ()) -> None:
    """Print it, with at most ``top`` layers; the last line is the answer, with the exit ``status``."""
    plain = not to.file.isatty() or "utf" not in (to.encoding or "").lower()
    to.print(_head(ranking), soft_wrap=not to.is_terminal)
    for line in _excluded(ranking):
        to.print(Text(line, style=STYLES["inconclusive"]), soft_wrap=not to.is_terminal)
    to.print()
    columns, rows = _candidates(ranking)
    to.print(fitted("Candidates, the least error first", "candidate", columns, rows, plain, to))
    for candidate in ranking.candidates:
        if candidate.behind:
            line = f"{display(candidate.name)}: {display(candidate.behind)} is no larger and has no more error"
            to.print(Text(line), soft_wrap=not to.is_terminal)
    if ranking.gains:
        to.print()
        _show_gains(ranking, to, plain)
    if ranking.studies:
        to.print()
        _show_studies(ranking, to, plain)
    if top and ranking.layers:
        to.print()
        _show_layers(ranking, to, top, plain)
    for swaps in (*ranking.swaps, *ranking.kept):
        to.print()
        _show_swaps(swaps, ranking, to, plain, top)
    to.print()
    for reason in ranking.reasons if ranking.verdict != "pass" else ():
        to.print(Text(display(reason, 2000)), soft_wrap=not to.is_terminal)
    answer = ended(ranking.verdict, status, conclusion(ranking) + written(wrote))
    to.print(Text(answer, style=STYLES[ranking.verdict]), soft_wrap=not to.is_terminal)


def _candidates(ranking: Ranking) -> tuple[tuple[Column, ...], list[tuple[str, list[str]]]]:
    """The columns that mean something here, and their cells."""
    columns, rows = list(COLUMNS), []
    weighted = any(candidate.weighted_snr_db is not None for candidate in ranking.candidates)
    gates = any(candidate.gates for candidate in ranking.candidates)
    predicted = any(candidate.predicted_kld is not None for candidate in ranking.candidates)
    bounded = has_speeds(ranking)
    columns += [WEIGHTED] * weighted + [PREDICTED] * predicted + [SPEED] * bounded + [GATES] * gates
    for candidate in ranking.candidates:
        cells = _cells(candidate, len(ranking.layers))
        if weighted:
            cells.append(NONE if candidate.weighted_snr_db is None else f"{candidate.weighted_snr_db:.2f}")
        if predicted:
            cells.append(NONE if candidate.predicted_kld is None else f"{candidate.predicted_kld:.4g}")
        if bounded:
            cells.append(speed(candidate.tokens_per_second))
        if gates:
            cells.append(_gates(candidate))
        rows.append((candidate.name, cells))
    return tuple(columns), rows


def _gates(candidate: Candidate) -> str:
    return f"{sum(gate.status == 'pass' for gate in candidate.gates)} of {len(candidate.gates)}"


def conclusion(ranking: Ranking) -> str:
    """Which candidate is best, by how much, for how many bytes, and what would make it better still."""
    kept = next((swaps for swaps in ranking.kept if swaps.candidate == ranking.candidates[0].name), None)
    more = f"; {_better_kept(kept, ranking.candidates[0])}" if kept else ""
    failing = [display(candidate.name) for candidate in ranking.candidates if candidate.verdict == "fail"]
    predicted = [(c.predicted_kld, c) for c in ranking.candidates if c.predicted_kld is not None]
    least = min(predicted, key=lambda item: item[0], default=None)
    if least and least[1].name != ranking.candidates[0].name:
        more += f"; {display(least[1].name)} has the least predicted KLD ({least[0]:.4g})"
    held = f"; gates do not hold for {', '.join(failing)}" if failing else ""
    sampled = "" if ranking.sample is None else f"; estimated from {100 * ranking.sample:g} % of the rows"
    return f"{_best(ranking)}{more}{held}{sampled}"


def _better_kept(kept: Swaps, own: Candidate) -> str:
    dtypes = {swap.format for swap in kept.layers}
    where = f"in {dtypes.pop()}" if len(dtypes) == 1 else "as in the original"
    several = len(kept.layers) > 1
    if kept.snr_db is None or own.snr_db is None:
        gain = f"{'make' if several else 'makes'} it identical to the original"
    else:
        gain = f"{'give' if several else 'gives'} {kept.snr_db - own.snr_db:.2f} dB more"
    share = 100 * kept.bytes_change / (own.bytes or 1)
    return f"kept {where}, {len(kept.layers):,} of its layers {gain} for {share:.2g} % more bytes"


def _best(ranking: Ranking) -> str:
    ranked = [candidate for candidate in ranking.candidates if candidate.rank is not None]
    if len(ranked) < 2:
        return f"only {display(ranked[0].name)} can be ranked" if ranked else "no candidate can be ranked"
    best, second = ranked[:2]
    if best.snr_db is None or second.snr_db is None:
        gain = "identical to the original" if not best.squared_error else f"less error than {display(second.name)}"
        return f"{display(best.name)} is best: {gain}, {_cost(best, second)}"
    gain = f"{best.snr_db - second.snr_db:.2f} dB more than {display(second.name)}"
    return f"{display(best.name)} is best: {gain} {_cost(best, second)}"


def _cost(best: Candidate, second: Candidate) -> str:
    share = 100 * ((best.bytes or 0) / (second.bytes or 1) - 1)
    if abs(share) < SAME_SIZE:
        return "in as many bytes"
    return f"for {share:.2g} % more bytes" if share > 0 else f"in {-share:.2g} % fewer bytes"


def brief(ranking: Ranking) -> str:
    """Who is not ranked, and the front on one line, for ``--quiet``."""
    description = []
    for name in ranking.front:
        candidate = next(candidate for candidate in ranking.candidates if candidate.name == name)
        description.append(f"{display(name)} ({size(candidate.bytes or 0)}, {_db(candidate)} dB)")
    front = f"on the front of size and error: {', '.join(description)}" if description else "no candidate can be ranked"
    return "\n".join(f"quanterr: {line}" for line in (*_excluded(ranking), f"{ranking.verdict}: {front}"))


def _excluded(ranking: Ranking) -> list[str]:
    return [f"not ranked: {display(c.name)}: {display(c.not_ranked, 2000)}" for c in ranking.candidates if c.not_ranked]


def _head(ranking: Ranking) -> Text:
    ranks = [candidate for candidate in ranking.candidates if candidate.rank is not None]
    parts = [
        f"{display(ranking.original)}: {size(ranking.original_bytes)}",
        f"{len(ranks):,} of {count(len(ranking.candidates), 'candidate')} ranked",
        f"{count(ranking.tensors, 'tensor')} in all of these, {ranking.elements:,} elements",
        f"{len(ranking.layers):,} differ in at least one",
    ]
    return Text("; ".join(parts))


def _cells(candidate: Candidate, layers: int) -> list[str]:
    warnings = sum(finding.severity != "info" for finding in candidate.findings)
    worst = candidate.worst_layer
    if candidate.rank is None:
        why = "inconclusive" if candidate.verdict == "inconclusive" else "undefined"
        return [why, NONE, size(candidate.checkpoint_bytes), *[NONE] * 5, f"{warnings:,}", NONE]
    return [
        str(candidate.rank),
        "yes" if candidate.on_front else "no",
        size(candidate.bytes or 0),
        NONE if candidate.bits_per_weight is None else f"{candidate.bits_per_weight:.4g}",
        _db(candidate),
        NONE if candidate.excess_db is None else f"{candidate.excess_db:.2f}",
        NONE if worst is None else "undefined" if worst.snr_db is None else f"{worst.snr_db:.2f}",
        f"{candidate.best_layers:,} of {layers:,}",
        f"{warnings:,}",
        worst.display_name if worst else NONE,
    ]


def _db(candidate: Candidate) -> str:
    return _snr(candidate.snr_db, candidate.squared_error, candidate.snr_db_margin)


def _snr(snr_db: float | None, squared_error: float | None, near: float | None = None) -> str:
    if snr_db is not None:
        return f"{snr_db:.2f}{margin(near)}"
    return "undefined" if squared_error else "identical"  # undefined: of an original of zeros


def _show_studies(ranking: Ranking, to: Console, plain: bool) -> None:
    heads, rows = study_cells(ranking)
    columns = [Column(head, n) for n, head in enumerate(heads)]
    to.print(fitted(STUDY_TITLE, "candidate", columns, [(name, cells) for name, *cells in rows], plain, to))


def _show_gains(ranking: Ranking, to: Console, plain: bool) -> None:
    """What each choice buys."""
    sizes = {candidate.name: candidate.bytes or 1 for candidate in ranking.candidates}
    rows = [
        (
            gain.candidate,
            [
                display(gain.instead_of),
                gain.what,
                f"{gain.snr_gain_db:+.2f}",
                _percent(gain.bytes_change, sizes[gain.instead_of]),
            ],
        )
        for gain in ranking.gains
    ]
    to.print(fitted("What each choice buys", "recipe", GAIN_COLUMNS, rows, plain, to))


def _show_layers(ranking: Ranking, to: Console, top: int, plain: bool) -> None:
    """Where the candidates are furthest apart."""
    layers = sorted(ranking.layers, key=_spread, reverse=True)[:top]
    names = [choice.candidate for choice in layers[0].choices]
    columns = (Column("best", 0, right=False), *(Column(display(name), n) for n, name in enumerate(names, 1)))
    rows = [(layer.layer_name, [display(layer.best), *_snrs(layer)]) for layer in layers]
    title = f"SNR in dB where the choice matters most, {len(layers):,} of {count(len(ranking.layers), 'layer')}"
    to.print(fitted(title, "layer", columns, rows, plain, to))


def _spread(layer: RankedLayer) -> float:
    errors = [choice.squared_error for choice in layer.choices]
    return max(errors) - min(errors)


def _snrs(layer: RankedLayer) -> Sequence[str]:
    return [_snr(choice.snr_db, choice.squared_error, choice.snr_db_margin) for choice in layer.choices]


def _show_swaps(swaps: Swaps, ranking: Ranking, to: Console, plain: bool, top: int) -> None:
    own = next(candidate for candidate in ranking.candidates if candidate.name == swaps.candidate)
    error = own.squared_error or 1.0  # a candidate without an error has nothing to swap
    after = _snr(swaps.snr_db, error + swaps.squared_error_change) + (" dB" if swaps.snr_db is not None else "")
    whence = "of others" if any(swap.take_from for swap in swaps.layers) else "kept as in the original"
    description = (
        f"{display(swaps.candidate)} with {count(len(swaps.layers), 'layer')} {whence}: "
        f"{_percent(swaps.bytes_change, own.bytes or 1)} bytes, {_percent(swaps.squared_error_change, error)} "
        f"squared error, {_db(own)} -> {after}"
    )
    rows = [
        (
            swap.layer_name,
            [
                f"{display(swap.take_from or 'original')} ({swap.format})",
                f"{swap.bytes_change:+,}",
                _percent(swap.squared_error_change, error),
            ],
        )
        for swap in swaps.layers[: max(top, FEW)]
    ]
    to.print(Text(description, style="bold"), soft_wrap=not to.is_terminal)
    if rows:
        to.print(fitted("", "layer", SWAP_COLUMNS, rows, plain, to))
    if len(rows) < len(swaps.layers):
        to.print(Text(f"and {len(swaps.layers) - len(rows):,} more, in the JSON"), soft_wrap=not to.is_terminal)


def _percent(change: float, whole: float) -> str:
    return f"{100 * change / whole:+.3g} %"
