"""The view of a ranking: candidates, layers in which they differ most, possible swaps of layers.

This module also makes its CSV rows and JUnit tests.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from quanterr.advice.kept_layers import MAX_PROPOSED
from quanterr.documents.gate_results import list_reasons
from quanterr.documents.ranking.model import Candidate, Choice, Gain, RankedLayer, Ranking, Swaps
from quanterr.metrics.scores import Score, collect_scores
from quanterr.outputs.formatting import (
    MAX_SENTENCE_LENGTH,
    format_answer,
    format_change,
    format_db,
    format_if_known,
    format_in_units,
    sentence,
)
from quanterr.outputs.page.columns import DB_PLACES, DIFFERS, DIGITS, SAME, SHARE_DIGITS, round_digits
from quanterr.outputs.sections import (
    FRONT,
    MAP,
    PAGE,
    Case,
    CellColumn,
    Column,
    Details,
    Dot,
    Dots,
    Gates,
    LayerName,
    Lines,
    MapMetric,
    Maps,
    Name,
    Row,
    Section,
    Suite,
    Table,
    View,
    fill,
)
from quanterr.selection.roles import role_of
from quanterr.util.strict_json import JsonObject
from quanterr.util.text import count, cut_prefix, display, size
from quanterr.views.diff.candidates.items import ItemWords
from quanterr.views.loading import make_candidates_section, summarize_candidates
from quanterr.views.parts import find_best, make_view, pick_columns

# A sensitivity predicts one of these two costs.
PREDICTED_TITLES = {"predicted_kld": "predicted KLD", "predicted_output_error": "predicted output error"}
EVALUATED_SCORES = {  # scores from an evaluation, with their standard errors
    "kld_mean": "kld_mean_se",
    "ppl": "ppl_se",
    "top1": "top1_se",
    "output_error": "output_error_se",
}
SHARE_METRICS = ("predicted_output_error",)  # shown in per cent, as in other outputs
SWAP_COLUMNS = (Column("take from", 0, right=False), Column("bytes", 2), Column("error", 1))
STUDY_TITLE = "dB gained by keeping outliers unquantized and by other scales (on a sample of rows)"
SAME_SIZE_PCT = 0.05  # difference of sizes in per cent that counts as none
MINOR_SHARE, MINOR_BECAUSE = 0.01, "below 1 % of the error"
ABSENT = "-"
FALLBACK_CODE = "fallback_recipe"  # the finding that many weights of a ggml type are stored as another type
SWAPPED_CODE = "swapped_sides"  # the finding that the original is given as a candidate, or the reverse
MAX_LISTED_POINTS = 4  # in the conclusion
CSV_COLUMNS = (
    *("quanterr_verdict", "list", "candidate", "rank", "layer_name", "format", "bytes", "squared_error", "snr_db"),
    *(
        "snr_db_margin",
        "tokens_per_second",
        "best",
        "reason",
        "bits_per_weight",
        *EVALUATED_SCORES,
        *EVALUATED_SCORES.values(),
    ),
)


def view(ranking: Ranking, top: int) -> View:
    """Return the view of a ranking with ``top`` layers."""
    tensors = f"{count(ranking.tensors, 'tensor')} common to all, {ranking.elements:,} elements"
    differ = count(len(ranking.layers), "layer differs", "layers differ")
    facts = [
        ("original", [Name(ranking.original), f", {size(ranking.original_bytes)}"]),
        ("ranked", [f"{len(ranking.ranked):,} of {count(len(ranking.candidates), 'candidate')}"]),
        ("compared", [f"{tensors}; {differ} in at least one candidate"]),
    ]
    rows = "" if ranking.sample is None else f"{100 * ranking.sample:g} % of the rows of "
    about = (
        f"From {rows}the weights of all checkpoints. SNR is the energy of the original over the energy of "
        "the error, in dB, over the layers that differ in at least one candidate. Weight error is not task accuracy."
    )
    answer, sections = conclusion(ranking), _make_sections(ranking, top)
    reasons = list_reasons(ranking) if ranking.sample is None else []  # the conclusion mentions a sample
    return make_view(
        ranking,
        "Quantized candidates",
        answer,
        facts,
        sections,
        about,
        _make_maps(ranking),
        reasons,
        done="compared",
        summary=list(_summarize(ranking)),
        overview=pick_columns(_make_candidates_table(ranking)),
    )


def _make_sections(ranking: Ranking, top: int) -> Iterator[Section]:
    excluded = _list_excluded(ranking)
    behind = [
        f"{display(c.name)}: {display(c.behind)} is no larger and has no more error"
        for c in ranking.candidates
        if c.behind
    ]
    if excluded and ranking.sample is not None:  # otherwise the reasons of the verdict name these candidates
        yield Section("excluded", "Not ranked", [Lines(excluded, warn=True)])
    yield Section("candidates", "Candidates", [_make_candidates_table(ranking), *([Lines(behind)] if behind else [])])
    yield from make_candidates_section([(candidate.name, candidate.loading) for candidate in ranking.candidates])
    dots = make_dots(ranking)
    yield Section("size", "Quality and size", [dots] if dots else [], (PAGE,) if ranking.evaluation else ())
    swaps = [_make_swaps_table(layer, ranking, top) for layer in (*ranking.swaps, *ranking.kept)]
    yield Section("mix", "Layers to change", swaps)
    if len(ranking.ranked) > 1:
        yield FRONT
    yield MAP
    yield Section("gains", "Gain of each choice", [_make_gains_table(ranking)] if ranking.gains else [])
    yield Section("studies", "Outliers and scales", [_make_studies_table(ranking)] if ranking.studies else [])
    spread = [_make_spread_table(ranking, top)] if top and ranking.layers else []
    yield Section("spread", "Layers that differ most", spread)
    gates = [(candidate.name, gate) for candidate in ranking.candidates for gate in candidate.gates]
    yield Section("gates", "Gates", [Gates(gates)] if gates else [], (PAGE,))


def _make_candidates_table(ranking: Ranking) -> Table:
    """Return the table of candidates, with optional columns only if a candidate has values for them."""
    layers, predicted = len(ranking.layers), _find_predicted(ranking)
    columns: list[CellColumn[Candidate]] = [
        (
            Column("rank", 0),
            lambda candidate: str(candidate.rank or _describe_lack(candidate)),
        ),
        (Column("Pareto", 2, right=False), _if_ranked(lambda candidate: "yes" if candidate.on_front else "no")),
        (Column("size", 1), _format_size),
        (Column("bits/w", 3), lambda candidate: format_if_known(candidate.bits_per_weight, ".4g")),
        (Column("SNR dB", 1), _if_ranked(_format_snr_of)),
        *_list_evaluated(ranking),
        (Column("worst layer dB", 5), _if_ranked(_format_worst)),
        (Column("lowest error in", 9), _if_ranked(lambda candidate: f"{candidate.best_layers:,} of {layers:,}")),
        (
            Column("worst layer", 10, right=False),
            _if_ranked(
                lambda candidate: LayerName(candidate.worst_layer.layer_name) if candidate.worst_layer else ABSENT
            ),
        ),
    ]
    if any(candidate.excess_db is not None for candidate in ranking.candidates):
        columns.append((Column("excess dB", 8), _if_ranked(lambda candidate: format_if_known(candidate.excess_db))))
    if any(_count_warnings(candidate) for candidate in ranking.candidates):
        columns.append((Column("warnings", 7), lambda candidate: f"{_count_warnings(candidate):,}"))
    if any(candidate.weighted_snr_db is not None for candidate in ranking.candidates):
        columns.append((Column("weighted SNR dB", 2), lambda candidate: format_if_known(candidate.weighted_snr_db)))
    if predicted:
        columns.append(
            (Column(PREDICTED_TITLES[predicted], 2), lambda candidate: _format_predicted(candidate, predicted))
        )
    if any(candidate.tokens_per_second is not None for candidate in ranking.candidates):
        columns.append(
            (Column("max. tokens/s", 2), lambda candidate: format_if_known(candidate.tokens_per_second, ",.0f"))
        )
    if any(candidate.gates for candidate in ranking.candidates):
        held = Column("gates held", 1)
        columns.append(
            (
                held,
                lambda candidate: f"{sum(gate.status == 'pass' for gate in candidate.gates)} of {len(candidate.gates)}",
            )
        )
    rows = ((Name(candidate.name), candidate) for candidate in ranking.candidates)
    return Table("Candidates, the least error first", "candidate", *fill(columns, rows))


def _count_warnings(candidate: Candidate) -> int:
    return sum(finding.severity != "info" for finding in candidate.findings)


def _describe_lack(candidate: Candidate) -> str:
    """Return the word that says why a candidate has no rank."""
    if candidate.unreadable:
        return "unreadable"
    return "inconclusive" if candidate.verdict == "inconclusive" else "undefined"


def _format_size(candidate: Candidate) -> str:
    if candidate.unreadable:
        return ABSENT
    return size(candidate.checkpoint_bytes if candidate.rank is None else candidate.bytes or 0)


def _list_evaluated(ranking: Ranking) -> Iterator[CellColumn[Candidate]]:
    """Yield a column for each score of an evaluation that some candidate has."""
    for rank, (name, error) in enumerate(EVALUATED_SCORES.items()):
        declared = collect_scores(Candidate)[name]
        if any(getattr(candidate, name) is not None for candidate in ranking.candidates):
            yield Column(declared.title, 2 * rank), partial(_format_evaluated, declared=declared, error=error)


def _format_evaluated(candidate: Candidate, declared: Score, error: str) -> str:
    value = getattr(candidate, declared.name)
    return ABSENT if value is None else format_in_units(declared, value, getattr(candidate, error))


def make_dots(ranking: Ranking) -> Dots | None:
    """Return over size the KLD from an evaluation, or the SNR if there is none."""
    evaluated = [
        candidate for candidate in ranking.candidates if candidate.bytes is not None and candidate.kld_mean is not None
    ]
    if evaluated:
        best = find_best([(candidate.bytes or 0, candidate.kld_mean or 0.0) for candidate in evaluated])
        dots = [
            Dot(candidate.name, candidate.bytes or 0, candidate.kld_mean or 0.0, candidate.kld_mean_se or 0.0, is_best)
            for candidate, is_best in zip(evaluated, best, strict=True)
        ]
        return Dots("KLD [nat]", dots, all(dot.value > 0 for dot in dots))
    ranked = [
        candidate for candidate in ranking.candidates if candidate.bytes is not None and candidate.snr_db is not None
    ]
    dots = [
        Dot(candidate.name, candidate.bytes or 0, candidate.snr_db or 0.0, is_best=candidate.on_front)
        for candidate in ranked
    ]
    return Dots("SNR [dB]", dots) if dots else None


def _if_ranked(cell: Callable[[Candidate], str]) -> Callable[[Candidate], str]:
    """Return a function that leaves the cell of a candidate without a rank empty."""
    return lambda candidate: ABSENT if candidate.rank is None else cell(candidate)


def _format_worst(candidate: Candidate) -> str:
    return ABSENT if candidate.worst_layer is None else format_db(candidate.worst_layer.snr_db)


def _find_predicted(ranking: Ranking) -> str | None:
    """Return the name of the predicted cost that a candidate has; None if no candidate has one."""
    every = ((name, getattr(candidate, name)) for name in PREDICTED_TITLES for candidate in ranking.candidates)
    return next((name for name, cost in every if cost is not None), None)


def _format_predicted(candidate: Candidate, metric: str) -> str:
    cost = getattr(candidate, metric)
    return ABSENT if cost is None else f"{100 * cost:.4g} %" if metric in SHARE_METRICS else f"{cost:.4g}"


def conclusion(ranking: Ranking) -> str:
    """Return the best candidate, its lead in error and bytes, and what would improve it further."""
    best = ranking.candidates[0]
    changes = [swaps for swaps in (*ranking.swaps, *ranking.kept) if swaps.candidate == best.name]
    more = "".join(f"; {_describe_change(swaps, best)}" for swaps in changes)
    failing = [display(candidate.name) for candidate in ranking.candidates if candidate.verdict == "fail"]
    if metric := _find_predicted(ranking):
        known = [candidate for candidate in ranking.candidates if getattr(candidate, metric) is not None]
        cheapest = min(known, key=lambda candidate: (getattr(candidate, metric), candidate.name))
        if cheapest.name != best.name:
            cost = _format_predicted(cheapest, metric)
            more += f"; {display(cheapest.name)} has the lowest {PREDICTED_TITLES[metric]} ({cost})"
    evaluated = [candidate for candidate in ranking.candidates if candidate.kld_mean is not None]
    if evaluated:
        nearest = min(evaluated, key=lambda candidate: (candidate.kld_mean, candidate.name))
        kld = _format_evaluated(nearest, collect_scores(Candidate)["kld_mean"], "kld_mean_se")
        more += f"; {display(nearest.name)} has the lowest KLD ({kld})"
    held = f"; gates do not hold for {', '.join(failing)}" if failing else ""
    sampled = "" if ranking.sample is None else f"; estimated from {100 * ranking.sample:g} % of the rows"
    return f"{_describe_best(ranking)}{more}{held}{sampled}"


def _describe_change(change: Swaps, candidate: Candidate) -> str:
    several = len(change.layers) > 1
    if change.snr_db is None or candidate.snr_db is None:
        gain = f"{'make' if several else 'makes'} it identical to the original"
    else:
        gain = f"{'give' if several else 'gives'} {change.snr_db - candidate.snr_db:.2f} dB more"
    cost = _describe_cost(100 * change.bytes_change / (candidate.bytes or 1))
    whose = f"{count(len(change.layers), 'layer')} of {display(candidate.name)}"
    return f"{whose} {_describe_sources(change)} {gain} {cost}"


def _describe_sources(change: Swaps) -> str:
    sources = {swap.take_from or swap.format for swap in change.layers}
    if not any(swap.take_from for swap in change.layers):
        return f"kept in {min(sources)}" if len(sources) == 1 else "kept as in the original"
    return f"taken from {display(min(sources)) if len(sources) == 1 else 'other candidates'}"


def _describe_best(ranking: Ranking) -> str:
    """Return the candidate with the least error if it is among the smallest, else the Pareto-optimal ones."""
    ranked = ranking.ranked
    if len(ranked) < 2:
        return f"only {display(ranked[0].name)} can be ranked" if ranked else "no candidate can be ranked"
    best, second = ranked[:2]
    share = 100 * ((best.bytes or 0) / (second.bytes or 1) - 1)
    front = [candidate for candidate in ranked if candidate.on_front]
    if share >= SAME_SIZE_PCT and len(front) > 1:
        points = [
            f"{display(candidate.name)} ({size(candidate.bytes or 0)}, {_format_level(candidate)})"
            for candidate in front[:MAX_LISTED_POINTS]
        ]
        more = f" and {len(front) - MAX_LISTED_POINTS:,} more" if len(front) > MAX_LISTED_POINTS else ""
        return f"more bytes buy less error: {', '.join(points)}{more}"
    cost = _describe_cost(share)
    if best.snr_db is None or second.snr_db is None:
        gain = "identical to the original" if not best.squared_error else f"less error than {display(second.name)}"
        return f"{display(best.name)} is best by its weights: {gain}, {cost}"
    if best.squared_error == second.squared_error:
        return f"{display(best.name)} and {display(second.name)} are equally good by their weights, {cost}"
    gain = f"{best.snr_db - second.snr_db:.2f} dB more than {display(second.name)}"
    return f"{display(best.name)} is best by its weights: {gain} {cost}"


def _format_level(candidate: Candidate) -> str:
    return f"{_format_snr_of(candidate)} dB" if candidate.snr_db is not None else _format_snr_of(candidate)


def _summarize(ranking: Ranking) -> Iterator[str]:
    """Yield fallbacks of recipes, which runtimes load which candidates, and why candidates are not ranked."""
    yield from (
        sentence(finding.message)
        for candidate in ranking.candidates
        for finding in candidate.findings
        if finding.code == FALLBACK_CODE
    )
    yield from (
        f"{display(candidate.name)}: {sentence(finding.message)}"
        for candidate in ranking.candidates
        for finding in candidate.findings
        if finding.code == SWAPPED_CODE and finding.severity != "info"
    )
    yield from summarize_candidates([(candidate.name, candidate.loading) for candidate in ranking.candidates])
    if ranking.sample is not None:  # otherwise the reasons of the verdict name these candidates
        yield from _list_excluded(ranking)


def _describe_cost(share: float) -> str:
    """Return a change of size [%] in words."""
    if abs(share) < SAME_SIZE_PCT:
        return "in as many bytes"
    return f"for {format_change(share)} % more bytes" if share > 0 else f"in {format_change(-share)} % fewer bytes"


def brief(ranking: Ranking) -> str:
    """Return candidates without a rank and the Pareto-optimal candidates, one line each, for ``--quiet``."""
    description = []
    for name in ranking.front:
        candidate = next(candidate for candidate in ranking.candidates if candidate.name == name)
        description.append(f"{display(name)} ({size(candidate.bytes or 0)}, {_format_level(candidate)})")
    front = (
        f"Pareto-optimal in size and error: {', '.join(description)}" if description else "no candidate can be ranked"
    )
    seen = view(ranking, 0)
    answer = format_answer(seen.word or "", seen.doubts, front)
    return "\n".join(f"quanterr: {line}" for line in (*_list_excluded(ranking), answer))


def _list_excluded(ranking: Ranking) -> list[str]:
    return [
        f"not ranked: {display(c.name)}: {display(c.not_ranked, MAX_SENTENCE_LENGTH)}"
        for c in ranking.candidates
        if c.not_ranked
    ]


def _format_snr_of(item: Candidate | Choice) -> str:
    return _format_snr(item.snr_db, item.squared_error, item.snr_db_margin)


def _format_snr(snr_db: float | None, squared_error: float | None, margin: float | None = None) -> str:
    if snr_db is not None:
        return f"{snr_db:.2f}" + ("" if margin is None else f" ± {margin:.2f}")
    return "undefined" if squared_error else "identical"  # undefined: the original is all zeros


def _make_studies_table(ranking: Ranking) -> Table:
    """Return the table of the gains from outliers and scales for each recipe."""
    first = ranking.studies[0]
    heads = [f"{study_point.percent:g} % out" for study_point in first.outliers]
    heads += [f"{study_point.percent:g} % of columns out" for study_point in first.columns]
    heads += [f"scale {study_point.percent:+g} %" for study_point in first.scales]
    rows = []
    for study in ranking.studies:
        changes = (*study.outliers, *study.columns, *study.scales)
        rows.append([Name(study.candidate), *(format_if_known(change.gain_db, "+.2f") for change in changes)])
    return Table(STUDY_TITLE, "candidate", [Column(head, n) for n, head in enumerate(heads)], rows)


def _make_gains_table(ranking: Ranking) -> Table:
    sizes = {candidate.name: candidate.bytes or 1 for candidate in ranking.candidates}
    columns: Sequence[CellColumn[Gain]] = (
        (Column("instead of", 0, right=False), lambda gain: Name(gain.instead_of)),
        (Column("what", 3, right=False), lambda gain: gain.what),
        (Column("dB", 1), lambda gain: f"{gain.snr_gain_db:+.2f}"),
        (Column("bytes", 2), lambda gain: _format_percent(gain.bytes_change, sizes[gain.instead_of])),
    )
    return Table(
        "Gain of each choice", "recipe", *fill(columns, ((Name(gain.candidate), gain) for gain in ranking.gains))
    )


def _make_spread_table(ranking: Ranking, top: int) -> Table:
    """Return the layers in which the candidates' errors differ most."""
    layers = sorted(ranking.layers, key=_compute_spread, reverse=True)[:top]
    names, prefix = cut_prefix([choice.candidate for choice in layers[0].choices])
    columns = [Column("best", len(names), right=False)]
    columns += [Column(display(name), n) for n, name in enumerate(names)]  # the last, the worst, is dropped first
    rows = [
        [LayerName(layer.layer_name), Name(layer.best.removeprefix(prefix)), *map(_format_snr_of, layer.choices)]
        for layer in layers
    ]
    these = f"{len(layers):,} layers that differ" if len(layers) > 1 else "layer that differs"
    without = f"; candidates without {display(prefix)}" if prefix else ""
    title = f"SNR in dB of the {these} most, of {count(len(ranking.layers), 'layer')}{without}"
    largest = _find_largest_error(ranking)
    minor = sum(_compute_spread(layer) < MINOR_SHARE * largest for layer in layers)
    return Table(title, "layer", columns, rows, minor=minor, minor_because=MINOR_BECAUSE)


def _find_largest_error(ranking: Ranking) -> float:
    return max((candidate.squared_error or 0.0 for candidate in ranking.candidates), default=0.0)


def _compute_spread(layer: RankedLayer) -> float:
    errors = [choice.squared_error for choice in layer.choices]
    return max(errors) - min(errors)


def _make_swaps_table(swaps: Swaps, ranking: Ranking, top: int) -> Table:
    candidate = next(candidate for candidate in ranking.candidates if candidate.name == swaps.candidate)
    error = candidate.squared_error or 1.0  # a candidate without an error has nothing to swap
    after = _format_snr(swaps.snr_db, error + swaps.squared_error_change) + (" dB" if swaps.snr_db is not None else "")
    title = (
        f"{display(swaps.candidate)} with {count(len(swaps.layers), 'layer')} {_describe_sources(swaps)}: "
        f"{_format_percent(swaps.bytes_change, candidate.bytes or 1)} bytes, "
        f"{_format_percent(swaps.squared_error_change, error)} squared error, {_format_snr_of(candidate)} -> {after}"
    )
    shown = sorted(swaps.layers[: max(top, MAX_PROPOSED)], key=lambda swap: swap.squared_error_change)
    rows = [
        [
            LayerName(swap.layer_name),
            f"{display(swap.take_from or 'original')} ({swap.format})",
            f"{swap.bytes_change:+,}",
            _format_percent(swap.squared_error_change, error),
        ]
        for swap in shown
    ]
    minor = sum(abs(swap.squared_error_change) < MINOR_SHARE * error for swap in shown)
    return Table(title, "layer", SWAP_COLUMNS, rows, len(swaps.layers) - len(rows), minor, MINOR_BECAUSE)


def _format_percent(change: float, whole: float) -> str:
    return f"{100 * change / whole:+.3g} %"


def _make_maps(ranking: Ranking) -> Maps:
    """Return the map's metrics: the SNR of each ranked candidate, and the spread of errors."""
    metrics = {"spread": MapMetric("Spread", "lower", "%", log=True, column="Spread %")}
    for n, candidate in enumerate(ranking.ranked):
        name = display(candidate.name)
        metrics[f"snr_{n}"] = MapMetric(name, "higher", "dB", column=name, is_wide=n > 0)
    front = [(display(c.name), c.bytes or 0, c.snr_db, c.on_front) for c in ranking.ranked]
    details = Details(
        "Candidates", ["", "format", "SNR dB", "bytes", "Σe²"], lambda n: _list_choices(ranking.layers[n])
    )
    words, largest = {"role": "Role", "best": "Best"}, _find_largest_error(ranking)
    return Maps(
        metrics,
        words,
        lambda: (_make_row(layer, largest) for layer in ranking.layers),
        "spread",
        "snr_0",
        front,
        details,
    )


def _list_choices(layer: RankedLayer) -> list[list[str]]:
    return [
        [
            display(choice.candidate),
            display(choice.format),
            _format_snr_of(choice),
            f"{choice.bytes:,}",
            f"{choice.squared_error:{DIGITS}}",
        ]
        for choice in layer.choices
    ]


def _make_row(layer: RankedLayer, largest_error: float) -> Row:
    """Return a layer of the map with its spread, as a share of the largest error, and the SNR of each candidate."""
    levels = {f"snr_{n}": _format_map_level(choice) for n, choice in enumerate(layer.choices)}
    spread = round_digits(_compute_spread(layer) / largest_error, SHARE_DIGITS) if largest_error else None
    words = {"role": role_of(layer.layer_name), "best": display(layer.best)}
    return Row(layer.layer_name, DIFFERS, words, {"spread": spread, **levels})


def _format_map_level(choice: Choice) -> float | str | None:
    if choice.snr_db is not None:
        return round(choice.snr_db, DB_PLACES)
    return None if choice.squared_error else SAME


def rows(ranking: Ranking) -> Iterator[JsonObject]:
    """Yield CSV rows: the reasons, each candidate, then each layer of each candidate, by ``list``."""
    yield {"list": "ranking", "reason": "; ".join(ranking.reasons)}
    for candidate in ranking.candidates:
        values = {name: getattr(candidate, name) for name in CSV_COLUMNS if hasattr(candidate, name)}
        reason = candidate.not_ranked or "; ".join(candidate.reasons)
        yield {"list": "candidates", "candidate": candidate.name, "reason": reason} | values
    for layer in ranking.layers:
        named = {"list": "layers", "layer_name": layer.layer_name, "best": layer.best}
        for choice in layer.choices:
            values = {name: getattr(choice, name) for name in CSV_COLUMNS if hasattr(choice, name)}
            yield named | values


def suites(ranking: Ranking) -> Sequence[Suite]:
    """Return the JUnit suites, one per candidate, with a test that it can be ranked and a test for each gate."""
    name, answer, suites_of_candidates = "everything selected was compared reliably", sentence(conclusion(ranking)), []
    for n, candidate in enumerate(ranking.candidates):
        problem = ("error", f"not ranked: {sentence(candidate.not_ranked)}") if candidate.not_ranked else ("", "")
        case = Case("ranking", name, *problem, output="" if n else answer)
        suites_of_candidates.append(Suite(candidate.name, [case], candidate.gates))
    return suites_of_candidates


ITEM_WORDS = ItemWords(
    "worse",
    "better",
    columns=(
        (Column("old dB", 1), lambda layer: format_if_known(layer.old_snr_db, otherwise="exact")),
        (Column("new dB", 2), lambda layer: format_if_known(layer.new_snr_db, otherwise="exact")),
        (Column("change dB", 0), lambda layer: format_if_known(layer.change_db, "+.4g")),
    ),
    ends=lambda layer: (layer.old_snr_db, layer.new_snr_db, layer.change_db),
    about="From two stored rankings. A positive change of SNR is better. Weight error is not task accuracy.",
)
