"""Makes an evaluation's document from the measurements."""

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
from quanterr.util.text import count, display, listed
from quanterr.version import __version__

MASSIVE = 100.0  # input_spread from which activations count as massive
UNLIKE = 0.8  # output error of weights that are unrelated: 1 if they are far smaller, 2 if they are as large
LARGE = 0.5  # output error of a weight that is reported
FEWEST_UNLIKE, NEARLY_ALL = 4, 0.9  # least number of such weights, and their share of the changed ones, to report it
BEFORE = 16  # preceding tokens to show


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
    """The side that candidates are measured against: the original, or a reference in its place."""

    original: str
    nbytes: int
    model: str  # class of the model
    floor: Floor | None = None
    reference: str | None = None  # folder of the reference
    findings: Sequence[Finding] = ()  # about the baseline, repeated for each candidate


def assemble(
    found: Sequence[Measured],
    baseline: Baseline,
    prepared: Prepared,
    chosen: EvaluateOptions,
    clock: Clock,
    read_bytes: int,
) -> Evaluation:
    """Return the document, without gates."""
    candidates = [_evaluated(each, prepared) for each in found]
    for candidate in candidates:
        candidate.findings += baseline.findings
    outcomes = [each.outcome for each in found]
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
        tokens=_tokens(prepared, chosen, outcomes),
        texts=_named_texts(prepared, chosen, outcomes),
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


def _evaluated(measured: Measured, prepared: Prepared) -> Evaluated:
    candidate, outcome, predicted = measured.candidate, measured.outcome, measured.predicted
    cost = KLD if prepared.calls is None else OUTPUT_ERROR
    known = {one.layer_name: predicted[one.layer_name] for one in outcome.weights if one.layer_name in predicted}
    known = {name: each for name, each in known.items() if isfinite(each)}
    for weight in outcome.weights:
        setattr(weight, cost.metric, known.get(weight.layer_name))
    total = sum(known.values()) if known else None
    missing = [Missing(key, display(key), why) for key, why in candidate.not_found.items()]
    reasons = prepared.doubts
    if missing:
        names = listed([item.layer_name for item in missing], 3)
        reasons.append(f"{count(len(missing), 'tensor')} taken from the original: {names} ({missing[0].reason})")
    extra = {key: why for key, why in candidate.unused.items() if key not in candidate.not_found}
    if extra:
        why = next(iter(extra.values()))
        names = listed(list(extra), 3)
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
        findings=list(_findings(candidate, outcome, prepared)),
        activations=candidate.rounding.schemes,
        kv=candidate.rounding.cache.name if candidate.rounding.cache and candidate.rounding.cached else None,
        rollout=measured.rollout,
        positions=outcome.positions,
        routers=outcome.routers,
        swaps=_with_predictions(outcome),
        worst_tokens=[_worst_token(each, prepared) for each in outcome.worst],
        predicted_output_error=total if cost is OUTPUT_ERROR else None,
        draft=measured.draft is not None,
        bits_per_weight=_count_bits(candidate),
    )


def _count_bits(candidate: Candidate) -> float | None:
    """Return the bits per weight of the tensors that pair with the original's."""
    elements = sum(pair.quantized.n for pair in candidate.plan.pairs)
    return 8 * sum(pair.quantized.nbytes for pair in candidate.plan.pairs) / elements if elements else None


def _with_predictions(outcome: Outcome) -> list[SwapScore]:
    """Return the swaps with their predicted KLD; a block's is the sum over its weights."""
    for swap in outcome.swaps:
        own = {one.layer_name: one.predicted_kld for one in outcome.weights if swap.name in (one.block, one.layer_name)}
        known = [each for each in own.values() if each is not None]
        swap.predicted_kld = sum(known) if known else None
    return outcome.swaps


def _worst_token(found: Prediction, prepared: Prepared) -> WorstToken:
    """Return a prediction with the text of its tokens."""
    decode, spans = prepared.decode, prepared.spans
    place = next(n for n, span in enumerate(spans) if found.chunk in span)
    text, number = prepared.texts[place], found.chunk - spans[place][0]
    before = text.chunks.raw[number, max(found.position - BEFORE, 0) : found.position].tolist()

    def likely(token: int, p: float | None, p_q: float | None) -> LikelyToken:
        return LikelyToken(token, None if decode is None else decode([token]), p, p_q)

    return WorstToken(
        chunk=number,
        position=found.position,
        source=text.name,
        kld=found.kld,
        before=None if decode is None else decode(before),
        token=likely(found.target, found.p, found.p_q),
        predicted_original=likely(found.first, found.confidence, None),
        predicted=likely(found.first_q, None, found.confidence_q),
    )


def _findings(candidate: Candidate, outcome: Outcome, prepared: Prepared) -> Iterator[Finding]:
    """Yield findings: a copy of the original, another config or tokenizer, massive activations, rounding, notes."""
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
    if candidate.checkpoint.gguf is not None:  # it has its own tokenizer: one in its folder is another model's
        return
    with model_folder(candidate.checkpoint) as folder:
        own = tokenizer_fingerprint(folder)
    if None not in (own, prepared.tokenizer) and own != prepared.tokenizer:
        message = f"{folder.named('tokenizer.json')} is another tokenizer than the original's, with which both were run"
        yield make_finding("config_mismatch", "warning", None, message, "take the original's tokenizer.json")


def _report_parts(candidate: Candidate) -> Iterator[Finding]:
    """Report parts of the model that a converter leaves to another file: a tower, or the language model next to it."""
    for (side, reason), names in group_omissions(candidate.plan.leftovers).items():
        if side == "original":
            message = f"{count(len(names), 'tensor')} run as the original has them: {reason}: {listed(names, 3)}"
            yield make_finding("omitted_parts", "info", None, message, "evaluate the other file as well", tensors=names)


def _report_another_model(outcome: Outcome) -> list[Finding]:
    """Return a finding if the outputs of nearly all changed weights have errors as large as the original's outputs.

    Unrelated weights of the same size cause twice that error. Scores of small models hardly show it.
    """
    changed = [one for one in outcome.weights if one.output_error]
    unlike = [one for one in changed if one.output_error is not None and one.output_error > UNLIKE]
    if len(unlike) < FEWEST_UNLIKE or len(unlike) < NEARLY_ALL * len(changed):
        return []
    names = [one.layer_name for one in unlike]
    message = (
        f"another model? The outputs of {len(unlike):,} of {count(len(changed), 'changed weight')} differ from the "
        f"original's by as much as these are: {listed(names, 3)}"
    )
    remedy = "compare both checkpoints: they are of different models, or the weights are read wrongly"
    return [make_finding("another_source", "warning", None, message, remedy, layers=names)]


def _report_large(outcome: Outcome) -> list[Finding]:
    """Report weights whose outputs differ by more than half from the original's: scores may hardly show them."""
    changed = [one for one in outcome.weights if one.output_error]
    large = [one for one in changed if (one.output_error or 0.0) > LARGE]
    if not large:
        return []
    names = [one.layer_name for one in large]
    message = (
        f"large output errors: {len(large):,} of {count(len(changed), 'changed weight')}, up to "
        f"{100 * (large[0].output_error or 0.0):.3g} %: {listed(names, 3)}"
    )
    remedy = "compare both checkpoints, which names damage; otherwise give these weights more bits"
    return [make_finding("large_output_errors", "warning", large[0].layer_name, message, remedy, layers=names)]


def _report_massive(outcome: Outcome) -> Iterator[Finding]:
    """Report changed weights whose inputs hold massive activations.

    Reference: Sun et al., Massive Activations in Large Language Models (COLM 2024); Yu et al., The Super Weight in
    Large Language Models (2024).
    """
    found = [one for one in outcome.weights if one.output_error and (one.input_spread or 0.0) >= MASSIVE]
    found.sort(key=lambda one: -(one.input_spread or 0.0))
    if found:
        names = listed([one.layer_name for one in found], 3)
        message = (
            f"massive activations: {count(len(found), 'changed weight')} with an input {found[0].input_spread:,.0f} "
            f"times as large as others: {names}"
        )
        spreads = {one.layer_name: one.input_spread for one in found}
        remedy = "measure them alone with --swap; keep them unquantized if they matter"
        yield make_finding("massive_activations", "info", found[0].layer_name, message, remedy, spreads=spreads)


def _tokens(prepared: Prepared, chosen: EvaluateOptions, outcomes: Sequence[Outcome]) -> Tokens:
    scored = next((outcome.scores.tokens for outcome in outcomes if outcome.scores), 0)
    if prepared.calls is not None:
        return Tokens(prepared.calls.source, prepared.calls.sha256, 0, len(prepared.calls.calls), 0)
    if len(prepared.texts) == 1:
        return _tokens_of(prepared.texts[0], prepared, chosen, scored)
    n = sum(len(text.chunks.raw) for text in prepared.texts)
    digest = fingerprint(*(part for text in prepared.texts for part in text.chunks.parts))
    return Tokens(prepared.source, digest, chosen.context, n, scored, tokenizer=prepared.tokenizer)


def _tokens_of(text: ReadText, prepared: Prepared, chosen: EvaluateOptions, scored: int) -> Tokens:
    return Tokens(
        text.source,
        fingerprint(*text.chunks.parts),
        chosen.context,
        len(text.chunks.raw),
        scored,
        **text.like._asdict(),
        tokenizer=prepared.tokenizer,
    )


def _named_texts(prepared: Prepared, chosen: EvaluateOptions, outcomes: Sequence[Outcome]) -> list[NamedTokens]:
    """Return the name and the tokens of each text; empty if no candidate has scores by text."""
    found = next((outcome.texts for outcome in outcomes if outcome.texts), [])
    return [
        NamedTokens(text.name, _tokens_of(text, prepared, chosen, scores.tokens))
        for text, scores in zip(prepared.texts, found, strict=False)
    ]
