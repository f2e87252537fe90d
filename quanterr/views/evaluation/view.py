"""The view of an evaluation: scores, tasks, blocks, the largest errors of weights, gates, findings.

This module also makes its CSV rows and JUnit tests.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from math import exp
from statistics import fmean

from quanterr.documents.evaluation.model import (
    METRICS,
    OF_ROLLOUTS,
    OF_ROUTERS,
    OF_TEXTS,
    BlockError,
    Evaluated,
    Evaluation,
    Floor,
    LikelyToken,
    RouterAgreement,
    Scores,
    StepError,
    SwapScore,
    Task,
    WeightError,
    WorstToken,
)
from quanterr.documents.evaluation.pairs import compare_neighbours
from quanterr.documents.gate_results import list_reasons
from quanterr.outputs.formatting import format_if_known, format_percent, sentence
from quanterr.outputs.page.columns import DIFFERS, DIGITS, SHARE_DIGITS, round_digits
from quanterr.outputs.sections import (
    CARD,
    MAP,
    PAGE,
    VERBOSE,
    Case,
    CellColumn,
    Chart,
    Column,
    Curve,
    Dot,
    Dots,
    Gates,
    Item,
    LayerName,
    Lines,
    MapMetric,
    Maps,
    Name,
    Part,
    Row,
    Section,
    Suite,
    Table,
    View,
    fill,
    merge_findings,
)
from quanterr.selection.roles import role_of
from quanterr.util.strict_json import JsonObject
from quanterr.util.text import count, display, quote, size
from quanterr.views.diff.candidates.items import ItemWords
from quanterr.views.evaluation.numbers_as_text import (
    conclusion,
    describe_floor,
    describe_nearer,
    describe_precision,
    describe_setup,
    find_nearest,
    format_caveat,
    format_inputs,
    format_metric,
    list_floor_lines,
    list_metrics,
    order_candidates,
)
from quanterr.views.parts import find_best, list_number_columns, make_view, pick_columns

NOT_FINITE = "not finite"
MAX_SUMMARIZED = 3  # weights in the summary
BLOCK_COLUMNS = list_number_columns(BlockError, otherwise=NOT_FINITE, digits=5)
*WEIGHT_COLUMNS, _, _ = list_number_columns(WeightError)
INPUT_COLUMNS = list_number_columns(WeightError)[len(WEIGHT_COLUMNS) :]
ROUTER_COLUMNS: Sequence[CellColumn[Sequence[RouterAgreement]]] = (
    (Column("same experts", 0), lambda routers: f"{100 * fmean(router.same_experts for router in routers):.4g} %"),
    (
        Column("router KLD", 1),
        lambda routers: format_if_known(_average([router.router_kld for router in routers]), ".4g", NOT_FINITE),
    ),
)
TASK_COLUMNS: Sequence[CellColumn[Task]] = (
    (Column("questions", 3), lambda task: f"{task.questions:,}"),
    (Column("original", 1), lambda task: f"{100 * task.accuracy_original:.4g} %"),
    (Column("accuracy", 0), lambda task: f"{100 * task.accuracy:.4g} %"),
    (Column("agreement", 2), lambda task: f"{100 * task.agreement:.4g} %"),
    (Column("p", 4), lambda task: f"{task.mcnemar_p:.3g}"),
)
TEXT_COLUMNS: Sequence[CellColumn[Scores]] = (
    (Column("predictions", 5), lambda scores: f"{scores.tokens:,}"),
    (Column("KLD", 0), lambda scores: f"{scores.kld_mean:.5g} ± {scores.kld_error:.2g}"),
    (Column("KLD 99 %", 1), lambda scores: f"{scores.kld_p99:.5g}"),
    (Column("PPL", 4), lambda scores: f"{scores.ppl:.5g}"),
    (Column("PPL ratio", 2), lambda scores: f"{scores.ppl_ratio:.5g}"),
    (Column("same top token", 3), lambda scores: f"{100 * scores.top1:.4g} %"),
)
TOKEN_COLUMNS: Sequence[CellColumn[WorstToken]] = (
    (Column("where", 3, right=False), lambda token: Name(f"{token.source}, chunk {token.chunk}, {token.position}")),
    (
        Column("text before", 2, right=False),
        lambda token: Name("-" if token.before is None else quote(token.before[-CONTEXT_CHARACTERS:])),
    ),
    (Column("token", 1, right=False), lambda worst: _format_token(worst.token)),
    (Column("original predicted", 0, right=False), lambda worst: _format_token(worst.predicted_original)),
    (Column("predicted", 0, right=False), lambda worst: _format_token(worst.predicted)),
)
MACRO = "macro average"
CONTEXT_CHARACTERS = 40  # characters of the text before a token
MAX_SHOWN = 8  # blocks, routers, steps or positions in a table
MAX_DETAILED = 2  # candidates shown with blocks and weights
CSV_COLUMNS = (
    *("quanterr_verdict", "list", "candidate", "name", "block", "value", "cosine", "share_of_block"),
    *("reason", "severity", "input_error", "share_of_inputs"),
)


def view(evaluation: Evaluation, top: int) -> View:
    """Return the view of an evaluation with ``top`` weights of each candidate."""
    facts: list[tuple[str, list[str]]] = [
        ("original", [Name(evaluation.original), f", {size(evaluation.original_bytes)}"]),
        ("calls" if evaluation.kind == "calls" else "text", [Name(evaluation.tokens.source)]),
        ("model", [describe_setup(evaluation)]),
    ]
    if evaluation.lora is not None:
        facts.append(("LoRA on both sides", [Name(evaluation.lora)]))
    if evaluation.reference is not None:
        facts.insert(1, ("reference", [Name(evaluation.reference), ", in the place of the original"]))
    maps = None
    if any(candidate.weights for candidate in evaluation.candidates):
        words, first = {"role": "Role", "unit": "Block"}, "output_0"
        maps = Maps(_make_metrics(evaluation), words, lambda: map_rows(evaluation), first, first)
    answer, sections, about = conclusion(evaluation), _make_sections(evaluation, top), format_caveat(evaluation)
    summary = list(_summarize(evaluation))
    return make_view(
        evaluation,
        "Quality",
        answer,
        facts,
        sections,
        about,
        maps,
        list_reasons(evaluation),
        "evaluated",
        summary=summary,
        overview=pick_columns(make_scores_table(evaluation)),
    )


def _summarize(evaluation: Evaluation) -> Iterator[str]:
    """Yield differences between candidates, and the largest errors."""
    for part in _compare_candidates(evaluation):
        yield from part.lines if isinstance(part, Lines) else ()
    nearest = find_nearest(evaluation) or evaluation.candidates[0]
    weights = [weight for weight in nearest.weights if weight.output_error][:MAX_SUMMARIZED]
    whose = "" if len(evaluation.candidates) == 1 else f" of {display(nearest.name)}"
    for weight in weights:
        share = f", {format_percent(weight.share_of_block)} of its block" if weight.share_of_block else ""
        error = format_percent(weight.output_error)
        yield f"largest output errors{whose}: {error}  {display(weight.layer_name)}{share}"
    yield from (_describe_missing(candidate) for candidate in evaluation.candidates if candidate.missing)


def _make_sections(evaluation: Evaluation, top: int) -> Iterator[Section]:
    candidates = evaluation.candidates
    findings = [(candidate.name, item) for candidate in candidates for item in candidate.findings]
    gates = [(candidate.name, gate) for candidate in candidates for gate in candidate.gates]
    yield Section("scores", "Scores", [make_scores_table(evaluation), *_compare_candidates(evaluation)])
    dots = make_dots(evaluation)
    yield Section("size", "Error and size", [dots] if dots else [], (PAGE,) if len(candidates) > 1 else ())
    yield Section("gates", "Gates", [Gates(gates)] if gates else [])
    yield Section("findings", "Findings", [merge_findings(findings, len(candidates))] if findings else [])
    yield Section("texts", "By text", [_make_texts_table(candidate) for candidate in candidates if candidate.texts])
    yield Section("positions", "Divergence by position", list(_make_positions(evaluation)), (VERBOSE, PAGE))
    yield Section("steps", "Output error by step", list(_make_steps(evaluation)))
    yield Section("rollout", "Rollout", list(_make_rollouts(evaluation)))
    yield from [MAP] if any(candidate.weights for candidate in candidates) else []
    tasks = [(Name(f"{task.name}, {candidate.name}"), task) for candidate in candidates for task in candidate.tasks]
    yield Section(
        "tasks", "Tasks", [Table("Tasks, by log-likelihood", "task", *fill(TASK_COLUMNS, tasks))] if tasks else []
    )
    detailed = _pick_detailed(evaluation) if top else []
    yield Section("blocks", "Hidden states by block", list(_make_blocks(evaluation)) if top else [])
    yield Section(
        "worst",
        "Largest output errors",
        [_make_weights_table(candidate, top) for candidate in detailed if candidate.weights],
    )
    yield Section(
        "routers",
        "Experts that routers choose",
        [_make_routers_table(candidate) for candidate in detailed if candidate.routers],
    )
    swaps = [_make_swaps_table(candidate, top) for candidate in candidates if top and candidate.swaps]
    yield Section("swaps", "Measured alone in the original", swaps)
    missing = [_describe_missing(candidate) for candidate in candidates if candidate.missing]
    yield Section("missing", "Taken from the original", [Lines(missing, warn=True)] if missing else [])
    tokens = [_make_tokens_table(candidate, top) for candidate in detailed if candidate.worst_tokens]
    yield Section("tokens", "Worst tokens", tokens, (VERBOSE, PAGE, CARD), is_open=False)


def _compare_candidates(evaluation: Evaluation) -> Iterator[Part]:
    """Yield lines that say which differences between candidates are significant, and whether more text is needed."""
    lines = [describe_nearer(*finding) for finding in compare_neighbours(evaluation)]
    lines += [advice] if (advice := describe_precision(evaluation)) else []
    lines += list_floor_lines(evaluation)
    if lines:
        yield Lines(lines)


def make_scores_table(evaluation: Evaluation) -> Table:
    """Return the table of each candidate's scores, the nearest to the original first, and of the floor's."""
    columns: list[CellColumn[Evaluated | Floor]] = [
        (
            Column("size", 1),
            lambda candidate: size(evaluation.original_bytes if isinstance(candidate, Floor) else candidate.bytes),
        ),
        (Column("bits/w", 4), lambda candidate: format_if_known(getattr(candidate, "bits_per_weight", None), ".4g")),
        *(
            (Column(title, n), partial(format_metric, metric=metric))
            for n, (title, metric) in enumerate(list_metrics(evaluation))
        ),
    ]
    if any(candidate.activations or candidate.kv for candidate in evaluation.candidates):
        columns.append((Column("emulated inputs", 7, right=False), format_inputs))
    rows: list[tuple[str, Evaluated | Floor]] = [
        (Name(candidate.name), candidate) for candidate in order_candidates(evaluation)
    ]
    if evaluation.floor is not None and evaluation.floor.reason is None:
        rows.append((describe_floor(evaluation, evaluation.floor), evaluation.floor))
    if not any(candidate.bits_per_weight for candidate in evaluation.candidates):  # older versions did not store it
        del columns[1]
    return Table("Against the original", "candidate", *fill(columns, rows))


def make_dots(evaluation: Evaluation) -> Dots | None:
    """Return an error of the model over size: KLD, the error of outputs, or the distance of embeddings."""
    errors = [(candidate, *_pick_error(candidate)) for candidate in evaluation.candidates]
    values = [(candidate, value, se) for candidate, _, value, se in errors if value is not None]
    sizes = [(candidate.bytes, value) for candidate, value, _ in values]
    dots = [
        Dot(candidate.name, candidate.bytes, value, se, is_best)
        for (candidate, value, se), is_best in zip(values, find_best(sizes), strict=True)
    ]
    label = next((label for _, label, value, _ in errors if value is not None), "")
    return Dots(label, dots, all(dot.value > 0 for dot in dots)) if dots else None


def _pick_error(candidate: Evaluated) -> tuple[str, float | None, float]:
    """Return the label, value and standard error to draw for a candidate."""
    if candidate.scores is not None:
        return "KLD [nat]", candidate.scores.kld_mean, candidate.scores.kld_error
    if candidate.outputs is not None:
        return "relative error of the output", candidate.outputs.output_error, candidate.outputs.output_error_se or 0.0
    if candidate.embeddings is not None and candidate.embeddings.cosine_mean is not None:
        return "1 - cosine of the embeddings", 1 - candidate.embeddings.cosine_mean, 0.0
    return "", None, 0.0


def _make_texts_table(candidate: Evaluated) -> Part:
    """Return the scores of each text, and their macro average, in which each text has the same weight."""
    columns, rows = fill(TEXT_COLUMNS, ((Name(text.name), text.scores) for text in candidate.texts))
    scores = [text.scores for text in candidate.texts]
    ratio = exp(fmean(text_scores.ln_ppl_ratio for text_scores in scores))
    cells = [
        f"{fmean(text_scores.kld_mean for text_scores in scores):.5g}",
        f"{fmean(text_scores.kld_p99 for text_scores in scores):.5g}",
    ]
    cells += ["-", f"{ratio:.5g}", f"{100 * fmean(text_scores.top1 for text_scores in scores):.4g} %"]
    return Table(f"By text, {display(candidate.name)}", "text", columns, [*rows, [MACRO, "", *cells]])


def _make_tokens_table(candidate: Evaluated, top: int) -> Part:
    """Return the predictions with the largest divergence, with their text."""
    rows = [(f"{token.kld:.4g}", token) for token in candidate.worst_tokens[:top]]
    return Table(f"Worst tokens, {display(candidate.name)}", "KLD", *fill(TOKEN_COLUMNS, rows))


def _format_token(token: LikelyToken) -> Name:
    """Return a token in quotes, or its number, with its known probabilities in the original and the candidate."""
    shares = [format_percent(p) for p in (token.p_original, token.p) if p is not None]
    return Name(f"{f'#{token.id}' if token.text is None else quote(token.text)} {' → '.join(shares)}")


def _make_positions(evaluation: Evaluation) -> Iterator[Part]:
    """Yield the divergence by position of the predicted token in its chunk."""
    candidates = [candidate for candidate in evaluation.candidates if len(candidate.positions) > 1]
    if not candidates:
        return
    spans = candidates[0].positions
    shown = _thin_out(range(len(spans)))
    columns = [Column(f"{spans[n].first:,}-{spans[n].last:,}", k) for k, n in enumerate(shown)]
    rows = [
        [Name(candidate.name), *(f"{candidate.positions[n].kld_mean:.4g}" for n in shown)]
        for candidate in candidates
        if len(candidate.positions) == len(spans)
    ]
    curves = [
        Curve(Name(candidate.name), [((span.first + span.last) / 2, span.kld_mean) for span in candidate.positions])
        for candidate in candidates
    ]
    yield Chart("KLD [nat] by position in the chunk", "position", curves)
    title = "KLD by position in the chunk"
    yield Table(title, "candidate", columns, rows, minor=len(rows), minor_because="in numbers")


def _make_rollouts(evaluation: Evaluation) -> Iterator[Part]:
    """Yield the errors of latents after the last and after each step, where each side continues its own latents."""
    rollouts = [(candidate, candidate.rollout) for candidate in evaluation.candidates if candidate.rollout]
    if rollouts:
        columns = [Column(score.title, n) for n, score in enumerate(OF_ROLLOUTS.values())]
        rows = [
            [Name(candidate.name), *(format_metric(candidate, metric) for metric in OF_ROLLOUTS)]
            for candidate, _ in rollouts
        ]
        yield Table("Final latents, each side on its own path", "candidate", columns, rows)
        yield from _make_steps_table(
            "Error of the latents after a step",
            [(Name(candidate.name), rollout.steps) for candidate, rollout in rollouts],
        )


def _make_steps(evaluation: Evaluation) -> Iterator[Part]:
    """Yield the output errors of each candidate and of the floor by step."""
    floor = evaluation.floor.outputs if evaluation.floor else None
    sides = [*((Name(candidate.name), candidate.outputs) for candidate in evaluation.candidates), ("floor", floor)]
    yield from _make_steps_table("Output error by step", [(name, outputs.steps) for name, outputs in sides if outputs])


def _make_steps_table(title: str, errors_by_side: Sequence[tuple[Name | str, Sequence[StepError]]]) -> Iterator[Part]:
    """Yield the errors at evenly spaced steps, including the first and the last; nothing for a single step."""
    steps = sorted({error.step for _, side_errors in errors_by_side for error in side_errors})
    if len(steps) < 2:
        return
    shown = _thin_out(steps)
    rows = []
    for name, side_errors in errors_by_side:
        errors = {error.step: error.output_error for error in side_errors}
        cells = [errors.get(step) for step in shown]
        rows.append([name, *("–" if error is None else f"{100 * error:.4g} %" for error in cells)])
    yield Table(title, "candidate", [Column(f"step {step}", n) for n, step in enumerate(shown)], rows)


def _thin_out(items: Sequence[Item]) -> list[Item]:
    """Return up to ``MAX_SHOWN`` evenly spaced items, including the first and the last."""
    shown = min(len(items), MAX_SHOWN)
    return [items[round(k * (len(items) - 1) / max(shown - 1, 1))] for k in range(shown)]


def _pick_detailed(evaluation: Evaluation) -> Sequence[Evaluated]:
    """Return the candidates whose blocks and weights are shown: all up to MAX_DETAILED, otherwise the nearest one."""
    best = find_nearest(evaluation)
    return evaluation.candidates if len(evaluation.candidates) <= MAX_DETAILED or best is None else [best]


def _make_blocks(evaluation: Evaluation) -> Iterator[Part]:
    """Yield a curve of each candidate, then tables of evenly spaced blocks, including the first and the last."""
    candidates = [candidate for candidate in evaluation.candidates if len(candidate.blocks) > 1]
    if candidates:
        errors = [[block.relative_error for block in candidate.blocks] for candidate in candidates]
        curves = [
            Curve(Name(candidate.name), [(n, error) for n, error in enumerate(block_errors, 1) if error is not None])
            for candidate, block_errors in zip(candidates, errors, strict=True)
        ]
        yield Chart("Relative error of hidden states", "after the n-th unit", curves)
    for candidate in _pick_detailed(evaluation):
        if not candidate.blocks:
            continue
        shown = _thin_out(candidate.blocks)
        minor, because = (len(shown), f"of {count(len(candidate.blocks), 'block')}") if candidates else (0, "")
        filled = fill(BLOCK_COLUMNS, ((Name(block.name), block) for block in shown))
        title = f"Hidden states, {display(candidate.name)}"
        yield Table(title, "after", *filled, minor=minor, minor_because=because)


def _make_weights_table(candidate: Evaluated, top: int) -> Part:
    weights = [weight for weight in candidate.weights if weight.output_error][:top]
    columns = [*WEIGHT_COLUMNS, *(INPUT_COLUMNS if _has_rounded_inputs(candidate) else ())]
    filled = fill(columns, ((LayerName(weight.layer_name), weight) for weight in weights))
    largest = f"{len(weights)} largest output errors" if len(weights) != 1 else "largest output error"
    title = f"The {largest} of {count(len(candidate.weights), 'weight')}"
    return Table(f"{title}, {display(candidate.name)}", "weight", *filled)


def _make_routers_table(candidate: Evaluated) -> Part:
    """Return the agreement of evenly spaced routers, including the first and the last, and the mean of all."""
    routers = candidate.routers
    rows = [(Name(router.name), [router]) for router in _thin_out(routers)]
    mean_row = (f"mean of {count(len(routers), 'router')}", routers)
    title = f"{routers[0].chosen} of {routers[0].experts} experts for a token, {display(candidate.name)}"
    return Table(title, "router", *fill(ROUTER_COLUMNS, [*rows, mean_row]))


def _average(values: Sequence[float | None]) -> float | None:
    """Return the mean; None if a value is None."""
    known = [value for value in values if value is not None]
    return fmean(known) if len(known) == len(values) else None


def _make_swaps_table(candidate: Evaluated, top: int) -> Part:
    """Return the blocks and weights with the largest divergence alone in the original."""
    columns: list[CellColumn[SwapScore]] = [
        (Column("KLD", 0), _format_swap),
        (Column("same top token", 1), lambda swap: "-" if swap.top1 is None else f"{100 * swap.top1:.4g} %"),
    ]
    if any(swap.predicted_kld is not None for swap in candidate.swaps):
        predicted = Column("predicted KLD", 2)
        columns.append((predicted, lambda swap: format_if_known(swap.predicted_kld, ".4g")))
    filled = fill(columns, ((Name(swap.name), swap) for swap in candidate.swaps[:top]))
    more = max(len(candidate.swaps) - top, 0)
    return Table(f"One at a time in the original, {display(candidate.name)}", "swapped", *filled, more)


def _format_swap(swap: SwapScore) -> str:
    return NOT_FINITE if swap.kld_mean is None else f"{swap.kld_mean:.4g} ± {swap.kld_error or 0.0:.2g}"


def _has_rounded_inputs(candidate: Evaluated) -> bool:
    return any(weight.input_error is not None for weight in candidate.weights)


def _describe_missing(candidate: Evaluated) -> str:
    names = [missing.display_name for missing in candidate.missing]
    return f"{display(candidate.name)}: {count(len(names), 'missing tensor')}: {', '.join(names[:3])}"


def _make_metrics(evaluation: Evaluation) -> dict[str, MapMetric]:
    """Return the output error of each candidate, its share of the block, and the error that rounded inputs add."""
    single, metrics = len(evaluation.candidates) == 1, {}
    for n, candidate in enumerate(evaluation.candidates):
        name = display(candidate.name)
        suffix, column = ("", "Output error %") if single else (f", {name}", f"{name} %")
        metrics[f"output_{n}"] = MapMetric(
            f"Output error{suffix}", "lower", "%", log=True, column=column, is_wide=n > 0
        )
    for n, candidate in enumerate(evaluation.candidates):
        suffix, column = ("", "Share of block %") if single else (f", {display(candidate.name)}", "")
        metrics[f"share_{n}"] = MapMetric(
            f"Share of block{suffix}", "lower", "%", log=True, column=column, is_wide=True
        )
    for n, candidate in enumerate(evaluation.candidates):
        if _has_rounded_inputs(candidate):
            suffix, column = ("", "Input error %") if single else (f", {display(candidate.name)}", "")
            title = f"Input error{suffix}"
            metrics[f"inputs_{n}"] = MapMetric(title, "lower", "%", log=True, column=column, is_wide=True)
            title, column = f"Share of inputs{suffix}", "Share of inputs %" if single else ""
            metrics[f"of_both_{n}"] = MapMetric(title, "lower", "%", log=False, column=column, is_wide=True)
    return metrics


def map_rows(evaluation: Evaluation) -> Iterator[Row]:
    """Yield all weights with the output errors of each candidate, for the page's scripts."""
    by_name: dict[str, JsonObject] = {}
    blocks: dict[str, str] = {}
    keys = list(_make_metrics(evaluation))
    for n, candidate in enumerate(evaluation.candidates):
        for weight in candidate.weights:
            blocks[weight.layer_name] = weight.block
            row = by_name.setdefault(weight.layer_name, dict.fromkeys(keys))
            row[f"output_{n}"] = round_digits(weight.output_error, DIGITS)
            row[f"share_{n}"] = round_digits(weight.share_of_block, SHARE_DIGITS)
            if f"inputs_{n}" in row:
                row[f"inputs_{n}"] = round_digits(weight.input_error, DIGITS)
                row[f"of_both_{n}"] = round_digits(weight.share_of_inputs, SHARE_DIGITS)
    return (
        Row(name, DIFFERS, {"role": role_of(name), "unit": display(blocks[name])}, numbers)
        for name, numbers in by_name.items()
    )


def rows(evaluation: Evaluation) -> Iterator[JsonObject]:
    """Yield CSV rows: the reasons, then each score, block, weight and finding of each candidate, by ``list``."""
    yield {"list": "evaluation", "reason": "; ".join(evaluation.reasons)}
    for floor, metric in product(filter(None, [evaluation.floor]), METRICS):
        if (value := floor.value(metric)) is not None:
            yield {"list": "floor", "name": metric, "value": value}
    for candidate in evaluation.candidates:
        yield {"list": "candidates", "candidate": candidate.name, "reason": "; ".join(candidate.reasons)}
        for row in _list_rows(candidate):
            yield {"candidate": candidate.name, **row}


def _list_rows(candidate: Evaluated) -> Iterator[JsonObject]:
    for metric in METRICS:
        if (value := candidate.value(metric)) is not None:
            yield {"list": "scores", "name": metric, "value": value}
    for span in candidate.positions:
        yield {"list": "positions", "name": f"{span.first}-{span.last}", "value": span.kld_mean}
    for text in candidate.texts:
        for metric in OF_TEXTS:
            yield {"list": "texts", "name": text.name, "block": metric, "value": getattr(text, metric)}
    for block in candidate.blocks:
        yield {"list": "blocks", "name": block.name, "value": block.relative_error, "cosine": block.cosine}
    for router in candidate.routers:
        for metric in OF_ROUTERS:
            yield {"list": "routers", "name": router.name, "block": metric, "value": getattr(router, metric)}
    for swap in candidate.swaps:
        yield {"list": "swaps", "name": swap.name, "block": swap.block, "value": swap.kld_mean}
    for w in candidate.weights:
        numbers = {"value": w.output_error, "share_of_block": w.share_of_block}
        numbers |= {"input_error": w.input_error, "share_of_inputs": w.share_of_inputs}
        yield {"list": "weights", "name": w.layer_name, "block": w.block, **numbers}
    for finding in candidate.findings:
        yield {"list": "findings", "name": finding.code, "severity": finding.severity, "reason": finding.message}


def suites(evaluation: Evaluation) -> list[Suite]:
    """Return the JUnit suites, one per candidate, with a test for its reliability and a test for each gate."""
    return [_make_suite(candidate) for candidate in evaluation.candidates]


def _make_suite(candidate: Evaluated) -> Suite:
    problem, message = "", ""
    if candidate.verdict == "inconclusive":
        problem, message = "error", f"inconclusive: {sentence(candidate.reasons[0])}"
    others = [finding for finding in candidate.findings if finding.message not in candidate.reasons]
    noticed = "\n".join(f"{finding.severity}: {sentence(finding.message)}" for finding in others)
    case = Case("evaluation", "evaluated completely and reliably", problem, message, output=noticed)
    return Suite(candidate.name, [case], candidate.gates)


ITEM_WORDS = ItemWords(
    "with worse output",
    "with better output",
    columns=(
        (Column("old output error", 1), lambda weight: format_percent(weight.old_output_error)),
        (Column("new output error", 2), lambda weight: format_percent(weight.new_output_error)),
        (Column("ratio", 0), lambda weight: "-" if weight.ratio is None else f"× {weight.ratio:.3g}"),
    ),
    ends=lambda weight: (
        weight.old_output_error,
        weight.new_output_error,
        weight.new_output_error - weight.old_output_error,
    ),
)
