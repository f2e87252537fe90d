"""Puts the document of an evaluation together from the measurements."""

import os
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from typing import NamedTuple

import torch

from quanterr.checkpoints.base import RECIPE
from quanterr.documents.base import Finding, Tool
from quanterr.documents.evaluation.model import (
    Evaluated,
    Evaluation,
    Floor,
    LikelyToken,
    Missing,
    NamedTokens,
    Rollout,
    SwapScore,
    Task,
    TextScores,
    Tokens,
    WorstToken,
)
from quanterr.documents.gate_results import Reason, store_reasons
from quanterr.documents.sensitivity import KLD, OUTPUT_ERROR
from quanterr.documents.subjects import combine_verdicts
from quanterr.evaluation.denoisers.gaussian import is_made_up
from quanterr.evaluation.measures.scores import Prediction
from quanterr.evaluation.models.folder import model_folder
from quanterr.evaluation.models.weights import Candidate
from quanterr.evaluation.preparation import Prepared, ReadText
from quanterr.evaluation.running.candidate import Outcome
from quanterr.evaluation.running.draft import Draft
from quanterr.evaluation.running.rounding import of_rounding
from quanterr.evaluation.texts.tokens import fingerprint, tokenizer_fingerprint
from quanterr.findings import make_finding
from quanterr.findings.configs import compare_configs
from quanterr.findings.files import report_notes
from quanterr.findings.headers import group_omissions
from quanterr.options import EvaluateOptions
from quanterr.tensors.clock import Clock
from quanterr.tensors.devices import describe_device
from quanterr.util.text import count, display, itemize
from quanterr.version import __version__

MIN_MASSIVE_SPREAD = 100.0  # activations with at least this input_spread count as massive
# Unrelated weights have an output error of 1 if they are far smaller, and of 2 if they are as large.
MIN_UNRELATED_ERROR = 0.8
MIN_LARGE_ERROR = 0.5  # weights with a larger output error are reported
# Another model is reported if so many weights, and such a share of the changed ones, are unrelated.
MIN_UNRELATED_WEIGHTS, MIN_UNRELATED_SHARE = 4, 0.9
SHOWN_TOKENS = 16  # number of preceding tokens that are shown


class Measured(NamedTuple):
    """All measurements of a candidate."""

    name: str
    candidate: Candidate
    outcome: Outcome
    predicted: Mapping[str, float]  # cost by weight
    tasks: list[Task]
    rollout: Rollout | None
    draft: Draft | None = None


class Baseline(NamedTuple):
    """The side that candidates are compared with: the original, or a reference in its place."""

    original: str
    nbytes: int
    model: str  # class of the model
    floor: Floor | None = None
    reference: str | None = None  # folder of the reference
    findings: Sequence[Finding] = ()  # findings about the baseline, which each candidate repeats


def assemble(
    measurements: Sequence[Measured],
    baseline: Baseline,
    prepared: Prepared,
    chosen: EvaluateOptions,
    clock: Clock,
    read_bytes: int,
) -> Evaluation:
    """Return the document, without gates."""
    candidates = [_evaluate_candidate(each, prepared) for each in measurements]
    for candidate in candidates:
        candidate.findings += baseline.findings
    outcomes = [each.outcome for each in measurements]
    verdict, reasons = combine_verdicts({candidate.name: candidate for candidate in candidates})
    return Evaluation(
        tool=Tool(name="quanterr", version=__version__),
        verdict=verdict,
        **reasons,
        original=baseline.original,
        original_bytes=baseline.nbytes,
        model=baseline.model,
        kind=prepared.architecture.workload.kind,
        dtype=chosen.dtype,
        tokens=_describe_tokens(prepared, chosen, outcomes),
        texts=_name_texts(prepared, chosen, outcomes),
        floor=baseline.floor,
        candidates=candidates,
        reference=baseline.reference,
        made_up=prepared.calls is not None and is_made_up(prepared.calls.source),
        made_up_allowed=chosen.allow_gaussian,
        lora=None if chosen.lora is None else os.fspath(chosen.lora),
        run=clock.describe_run(
            chosen.command, describe_device(prepared.architecture.device), torch.get_num_threads(), read_bytes
        ),
    )


def _evaluate_candidate(measured: Measured, prepared: Prepared) -> Evaluated:
    candidate, outcome, predicted = measured.candidate, measured.outcome, measured.predicted
    cost = KLD if prepared.calls is None else OUTPUT_ERROR
    known = {
        changed.layer_name: predicted[changed.layer_name]
        for changed in outcome.weights
        if changed.layer_name in predicted
    }
    known = {name: each for name, each in known.items() if isfinite(each)}
    for weight in outcome.weights:
        setattr(weight, cost.metric, known.get(weight.layer_name))
    total = sum(known.values()) if known else None
    missing = [Missing(key, display(key), why) for key, why in candidate.not_found.items()]
    reasons = prepared.doubts
    if missing:
        names = itemize([item.layer_name for item in missing], 3)
        reasons.append(f"{count(len(missing), 'tensor')} taken from the original: {names} ({missing[0].reason})")
    extra = {key: why for key, why in candidate.unused.items() if key not in candidate.not_found}
    if extra:
        why = next(iter(extra.values()))
        names = itemize(list(extra), 3)
        reasons.append(f"{count(len(extra), 'tensor')} of the candidate not used: {names} ({why})")
    if outcome.not_finite:
        reasons.append(f"not finite from {outcome.not_finite} on")
    reasons += candidate.rounding.reasons()
    reasons += measured.draft.doubts if measured.draft else []
    done = f"evaluated on all {'tokens' if prepared.calls is None else 'calls'}; no gates set"
    return Evaluated(
        name=measured.name,
        path=candidate.checkpoint.path,
        verdict="inconclusive" if reasons else "pass",
        **store_reasons(Reason(text, "result") for text in reasons or [done]),
        bytes=candidate.checkpoint.nbytes,
        scores=outcome.scores,
        texts=[TextScores(text.name, each) for text, each in zip(prepared.texts, outcome.texts, strict=False)],
        predicted_kld=total if cost is KLD else None,
        embeddings=outcome.embeddings,
        outputs=outcome.outputs,
        tasks=measured.tasks,
        not_finite=outcome.not_finite,
        blocks=outcome.blocks,
        weights=outcome.weights,
        missing=missing,
        gates=[],
        findings=list(_find_findings(candidate, outcome, prepared)),
        activations=candidate.rounding.schemes,
        kv=candidate.rounding.cache.name if candidate.rounding.cache and candidate.rounding.cached else None,
        rollout=measured.rollout,
        positions=outcome.positions,
        routers=outcome.routers,
        swaps=_predict_swaps(outcome),
        worst_tokens=[_show_prediction(each, prepared) for each in outcome.worst],
        predicted_output_error=total if cost is OUTPUT_ERROR else None,
        draft=measured.draft is not None,
        bits_per_weight=_count_bits(candidate),
    )


def _count_bits(candidate: Candidate) -> float | None:
    """Return the bits per weight of the tensors that pair with the original's."""
    elements = sum(pair.quantized.n for pair in candidate.plan.pairs)
    return 8 * sum(pair.quantized.nbytes for pair in candidate.plan.pairs) / elements if elements else None


def _predict_swaps(outcome: Outcome) -> list[SwapScore]:
    """Return the swaps with their predicted KLD; that of a block is the sum over its weights."""
    for swap in outcome.swaps:
        predictions = {
            weight.layer_name: weight.predicted_kld
            for weight in outcome.weights
            if swap.name in (weight.block, weight.layer_name)
        }
        known = [each for each in predictions.values() if each is not None]
        swap.predicted_kld = sum(known) if known else None
    return outcome.swaps


def _show_prediction(prediction: Prediction, prepared: Prepared) -> WorstToken:
    """Return a prediction with the text of its tokens."""
    decode, spans = prepared.decode, prepared.spans
    place = next(n for n, span in enumerate(spans) if prediction.chunk in span)
    text, number = prepared.texts[place], prediction.chunk - spans[place][0]
    before = text.chunks.raw[number, max(prediction.position - SHOWN_TOKENS, 0) : prediction.position].tolist()

    def likely(token: int, p: float | None, p_q: float | None) -> LikelyToken:
        return LikelyToken(token, None if decode is None else decode([token]), p, p_q)

    return WorstToken(
        chunk=number,
        position=prediction.position,
        source=text.name,
        kld=prediction.kld,
        before=None if decode is None else decode(before),
        token=likely(prediction.target, prediction.p, prediction.p_q),
        predicted_original=likely(prediction.first, prediction.confidence, None),
        predicted=likely(prediction.first_q, None, prediction.confidence_q),
    )


def _find_findings(candidate: Candidate, outcome: Outcome, prepared: Prepared) -> Iterator[Finding]:
    """Yield the findings about a candidate, such as that it is a copy of the original or has another tokenizer."""
    same = {block.relative_error for block in outcome.blocks} == {0.0}
    if same and not any(pair.quantized.has_codes for pair in candidate.plan.pairs):
        message = "nothing differs from the original; is this the quantized checkpoint?"
        yield make_finding("identical", "warning", None, message, "check that it is the quantized one")
    yield from _report_another_model(outcome) or _report_large(outcome)
    yield from _report_massive(outcome)
    yield from compare_configs(candidate.originals.checkpoint, candidate.checkpoint)
    yield from _report_parts(candidate)
    yield from of_rounding(candidate.rounding)
    if candidate.checkpoint.kind == RECIPE:
        yield from report_notes(candidate.checkpoint)
    if (
        candidate.checkpoint.gguf is not None
    ):  # a GGUF file holds its tokenizer; one in its folder may belong to another model
        return
    with model_folder(candidate.checkpoint) as folder:
        fingerprint = tokenizer_fingerprint(folder)
    if None not in (fingerprint, prepared.tokenizer) and fingerprint != prepared.tokenizer:
        message = (
            f"{folder.locate('tokenizer.json')} is another tokenizer than the original's, with which both were run"
        )
        yield make_finding("config_mismatch", "warning", None, message, "take the original's tokenizer.json")


def _report_parts(candidate: Candidate) -> Iterator[Finding]:
    """Report parts of the model that a converter writes to another file: a tower, or the language model next to it."""
    for (side, reason), names in group_omissions(candidate.plan.leftovers).items():
        if side == "original":
            message = f"{count(len(names), 'tensor')} run as the original has them: {reason}: {itemize(names, 3)}"
            yield make_finding("omitted_parts", "info", None, message, "evaluate the other file as well", tensors=names)


def _report_another_model(outcome: Outcome) -> list[Finding]:
    """Return a finding if the outputs of nearly all changed weights have errors as large as the original's outputs.

    Unrelated weights of the same size have twice that error. In small models, the scores may hardly change.
    """
    changed = [weight for weight in outcome.weights if weight.output_error]
    unlike = [
        weight for weight in changed if weight.output_error is not None and weight.output_error > MIN_UNRELATED_ERROR
    ]
    if len(unlike) < MIN_UNRELATED_WEIGHTS or len(unlike) < MIN_UNRELATED_SHARE * len(changed):
        return []
    names = [weight.layer_name for weight in unlike]
    message = (
        f"another model? The outputs of {len(unlike):,} of {count(len(changed), 'changed weight')} differ from the "
        f"original's by as much as these are: {itemize(names, 3)}"
    )
    remedy = "compare both checkpoints: they are of different models, or the weights are read wrongly"
    return [make_finding("another_source", "warning", None, message, remedy, layers=names)]


def _report_large(outcome: Outcome) -> list[Finding]:
    """Report weights whose output error is above one half, as the scores may hardly change."""
    changed = [weight for weight in outcome.weights if weight.output_error]
    large = [weight for weight in changed if (weight.output_error or 0.0) > MIN_LARGE_ERROR]
    if not large:
        return []
    names = [weight.layer_name for weight in large]
    message = (
        f"large output errors: {len(large):,} of {count(len(changed), 'changed weight')}, up to "
        f"{100 * (large[0].output_error or 0.0):.3g} %: {itemize(names, 3)}"
    )
    remedy = "compare both checkpoints, which names damage; otherwise give these weights more bits"
    return [make_finding("large_output_errors", "warning", large[0].layer_name, message, remedy, layers=names)]


def _report_massive(outcome: Outcome) -> Iterator[Finding]:
    """Report changed weights whose inputs hold massive activations.

    Reference: Sun et al., Massive Activations in Large Language Models (COLM 2024); Yu et al., The Super Weight in
    Large Language Models (2024).
    """
    massive = [
        weight
        for weight in outcome.weights
        if weight.output_error and (weight.input_spread or 0.0) >= MIN_MASSIVE_SPREAD
    ]
    massive.sort(key=lambda weight: -(weight.input_spread or 0.0))
    if massive:
        names = itemize([weight.layer_name for weight in massive], 3)
        message = (
            f"massive activations: {count(len(massive), 'changed weight')} with an input "
            f"{massive[0].input_spread:,.0f} times as large as others: {names}"
        )
        spreads = {weight.layer_name: weight.input_spread for weight in massive}
        remedy = "measure them alone with --swap; keep them unquantized if they matter"
        yield make_finding("massive_activations", "info", massive[0].layer_name, message, remedy, spreads=spreads)


def _describe_tokens(prepared: Prepared, chosen: EvaluateOptions, outcomes: Sequence[Outcome]) -> Tokens:
    scored = next((outcome.scores.tokens for outcome in outcomes if outcome.scores), 0)
    if prepared.calls is not None:
        return Tokens(prepared.calls.source, prepared.calls.sha256, 0, len(prepared.calls.calls), 0)
    if len(prepared.texts) == 1:
        return _describe_text(prepared.texts[0], prepared, chosen, scored)
    n = sum(len(text.chunks.raw) for text in prepared.texts)
    digest = fingerprint(*(part for text in prepared.texts for part in text.chunks.parts))
    return Tokens(prepared.source, digest, chosen.context, n, scored, tokenizer=prepared.tokenizer)


def _describe_text(text: ReadText, prepared: Prepared, chosen: EvaluateOptions, scored: int) -> Tokens:
    return Tokens(
        text.source,
        fingerprint(*text.chunks.parts),
        chosen.context,
        len(text.chunks.raw),
        scored,
        **text.like._asdict(),
        tokenizer=prepared.tokenizer,
    )


def _name_texts(prepared: Prepared, chosen: EvaluateOptions, outcomes: Sequence[Outcome]) -> list[NamedTokens]:
    """Return the name and the tokens of each text; empty if no candidate has scores by text."""
    texts = next((outcome.texts for outcome in outcomes if outcome.texts), [])
    return [
        NamedTokens(text.name, _describe_text(text, prepared, chosen, scores.tokens))
        for text, scores in zip(prepared.texts, texts, strict=False)
    ]
