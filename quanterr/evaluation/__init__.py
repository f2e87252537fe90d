"""Is the model still good? Both sides in lockstep through the original's own architecture, a block of each in memory.

models.py     the model of a config.json without memory for weights, and its units
names.py      which stored tensors make up a parameter
sides.py      the weights of both checkpoints in the original's terms
stepping.py   a forward that stops at each unit
rounding.py   inputs, keys and values as a runtime rounds them
tokens.py     texts as tokens; conversations.py: those of chats
references.py what is kept of an original, to evaluate candidates without it
lockstep.py   all sides, unit by unit, compared as they pass
scores.py     perplexity, divergence, agreement
states.py     errors of hidden states and of the outputs of weights
together.py   several processes for one evaluation
"""

import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from math import isfinite, prod
from pathlib import Path
from typing import NamedTuple, Unpack

import torch
from torch import Tensor

from quanterr.checkpoints import Checkpoint, enter_checkpoint
from quanterr.errors import UsageError
from quanterr.evaluation import models, together
from quanterr.evaluation.calls import Calls, read_calls
from quanterr.evaluation.conversations import read_conversations
from quanterr.evaluation.folder import ModelFolder, model_folder
from quanterr.evaluation.importance import Origin, write_importance
from quanterr.evaluation.lockstep import BesideReference, Lockstep, Outcome, RunSettings
from quanterr.evaluation.profiling import Measured, profile_of, write_sensitivity
from quanterr.evaluation.references import SAVE, USE, Reference, Settings, check_place, write_reference
from quanterr.evaluation.rollout import check_rollout, roll_out
from quanterr.evaluation.rounding import check_schemes, of_rounding
from quanterr.evaluation.saliency import Saliency
from quanterr.evaluation.sides import Candidate, Sides
from quanterr.evaluation.tasks import Asked, answered, read_task
from quanterr.evaluation.tokens import (
    LEAST_CONTEXTS,
    Chunks,
    Likeness,
    Text,
    chunks_of,
    fingerprint,
    likeness,
    named_files,
    read_text,
    read_tokens,
    tokenizer_fingerprint,
)
from quanterr.evaluation.workload import CAUSAL
from quanterr.findings import make_finding
from quanterr.findings.configs import compare_configs
from quanterr.findings.files import RECIPE, report_notes
from quanterr.gates import PreparedRules, prepare
from quanterr.gates.plan_check import read_plan
from quanterr.keywords import accept_fields_of
from quanterr.options import EvaluateKeywords, EvaluateOptions
from quanterr.pairing.importance import architecture_of
from quanterr.recipes import parse_recipe, parse_recipes
from quanterr.recipes.quantized_file import mix_recipes, quantize_by
from quanterr.report.base import Finding, RunInfo, Tool
from quanterr.report.documents import KINDS
from quanterr.report.evaluation import SCHEMA
from quanterr.report.evaluation.model import (
    Evaluated,
    Evaluation,
    Missing,
    NamedTokens,
    Rollout,
    Task,
    TextScores,
    Tokens,
)
from quanterr.report.plan.model import ORIGINAL, Plan
from quanterr.report.ranking.making import shorten_names
from quanterr.report.subjects import combine_verdicts
from quanterr.selection import LayerSelection
from quanterr.tensors.clock import Clock
from quanterr.tensors.devices import describe_device, pick_device
from quanterr.util.rank_group import RankGroup, join_rank_group
from quanterr.util.text import count, display, listed
from quanterr.version import __version__

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


PLAN = ".json"  # how the name of a plan ends
NOTHING_TO_DO = (
    "no candidate is given: evaluate needs one, or --sensitivity, --importance-out, --saliency-out or --save-reference "
    "alone"
)


@accept_fields_of(EvaluateOptions)
def evaluate(
    original: str | os.PathLike[str] | Checkpoint,
    candidates: Sequence[str | os.PathLike[str] | Checkpoint] = (),
    *,
    against: Iterable[str | Plan] = (),
    **options: Unpack[EvaluateKeywords],
) -> Evaluation:
    """Are quantized checkpoints still good models? Runs the original's architecture with the weights of each side.

    ``original`` is a folder with config.json, here or in a store; ``against`` are recipes such as ``"fp8_row"`` and
    plans, or files of them, ``"plan.json"``, by which it is quantized on the fly; ``options`` are the fields of
    :class:`quanterr.options.EvaluateOptions`, by name.

    Raises:
        UsageError: transformers is missing, no text or too little of it, a rule that is none.
        CheckpointError: an input that is missing or damaged, a model that transformers lacks, a weight that is
            missing or has another shape.
        ResourceError: no memory.
    """
    chosen = EvaluateOptions(**options)
    return evaluate_candidates(original, candidates, against, chosen, prepare(chosen, KINDS[SCHEMA]))


def evaluate_candidates(
    original: str | os.PathLike[str] | Checkpoint,
    candidates: Sequence[str | os.PathLike[str] | Checkpoint],
    against: Iterable[str | Plan],
    chosen: EvaluateOptions,
    rules: PreparedRules,
) -> Evaluation:
    """Evaluate candidates as :func:`evaluate`, by rules that were read before."""
    clock = Clock()
    if chosen.reference is not None:
        return _evaluate_beside_reference([original, *candidates], against, chosen, rules, clock)
    plans, words = _plans_and_recipes(against)
    recipes = parse_recipes(words) if words else []
    paths = [side.path if isinstance(side, Checkpoint) else os.fspath(side) for side in candidates]
    paths += [*(recipe.name for recipe in recipes), *plans]
    check_schemes(chosen.activations, chosen.kv)
    if not paths:
        raise UsageError(NOTHING_TO_DO)
    stop = chosen.stop or threading.Event()
    saliency = _saliency(chosen)
    with join_rank_group(stop) as company, ExitStack() as stack:
        opened = enter_checkpoint(stack, original, chosen.lenient, chosen.cache)
        prepared = _prepared(chosen, opened)
        every = [
            opened,
            *(enter_checkpoint(stack, side, chosen.lenient, chosen.cache) for side in candidates),
            *quantize_by(recipes, opened, LayerSelection(())),
            *(_quantize_as_planned(plan, name, opened) for name, plan in plans.items()),
        ]
        sides = Sides(opened, prepared.architecture.device)
        counterparts = prepared.architecture.counterparts(sides, every[1:])
        found = [
            Candidate(own, checkpoint, chosen.activations, chosen.kv, ignored)
            for checkpoint, (own, ignored) in zip(every[1:], counterparts, strict=True)
        ]
        names = shorten_names(paths)
        for name, one in list(zip(names, found, strict=True)) if chosen.split else ():
            if one.rounding.is_any:
                names.append(f"{name}, weights alone")
                found.append(Candidate(one.sides, one.checkpoint))
        together.agree(company, every, prepared.chunks, chosen.batch, chosen.dtype)
        settings = _run_settings(chosen, stop, company)
        with Lockstep(prepared.architecture, sides, found, prepared.chunks, settings, with_floor=True) as lockstep:
            together.run(lockstep, company)
            outcomes = lockstep.outcomes()
            _write_by_products(chosen, prepared, lockstep, saliency, opened)
            if chosen.save_reference is not None:
                _save_reference(chosen, prepared, lockstep, opened)
        answers = (
            answered(prepared.architecture, sides, found, prepared.tasks) if prepared.tasks else [[] for _ in found]
        )
        rollouts = _rolled_out(chosen, prepared, sides, found, stop)
        predictions = _profiled(chosen, prepared, sides, found, outcomes)
        for checkpoint in every:
            checkpoint.check_unchanged()
        evaluated = [
            _evaluated(*each, prepared) for each in zip(names, found, outcomes, predictions, answers, strict=True)
        ]
        for row, rollout in zip(evaluated, rollouts, strict=True):
            row.rollout = rollout
        verdict, reasons = combine_verdicts({candidate.name: candidate for candidate in evaluated})
        n_read = _read_bytes(sides, found)
        made = Evaluation.model_construct(
            tool=Tool(name="quanterr", version=__version__),
            verdict=verdict,
            reasons=reasons,
            original=every[0].path,
            original_bytes=every[0].nbytes,
            model=type(lockstep.model).__name__,
            kind=prepared.architecture.workload.kind,
            dtype=chosen.dtype,
            tokens=_tokens(prepared, chosen, outcomes),
            texts=_named_texts(prepared, chosen, outcomes),
            floor=lockstep.floor(),
            candidates=evaluated,
            run=_describe_run(chosen, prepared.architecture.device, clock, n_read),
        )
    return rules.judge(made)


def _rolled_out(
    chosen: EvaluateOptions, prepared: "_Prepared", sides: Sides, found: Sequence[Candidate], stop: threading.Event
) -> Sequence[Rollout | None]:
    """Return the rollout of each candidate, where rollouts are asked for."""
    if not chosen.rollout or not isinstance(prepared.chunks, Calls):
        return [None for _ in found]
    return roll_out(prepared.architecture, sides, found, prepared.chunks, stop, chosen.on_progress)


def _read_bytes(sides: Sides, found: Iterable[Candidate]) -> int:
    """Return the bytes read of all checkpoints; a candidate with names of its own has sides of its own."""
    return sum(each.read_bytes for each in {sides, *(candidate.sides for candidate in found)})


def _evaluate_beside_reference(
    candidates: Sequence[str | os.PathLike[str] | Checkpoint],
    against: Iterable[str | Plan],
    chosen: EvaluateOptions,
    rules: PreparedRules,
    clock: Clock,
) -> Evaluation:
    """Evaluate candidates on the text of a reference; the original is not needed, so weights have no output errors."""
    _check_needs_no_original(against, chosen)
    check_schemes(chosen.activations, chosen.kv)
    stop = chosen.stop or threading.Event()
    paths = [side.path if isinstance(side, Checkpoint) else os.fspath(side) for side in candidates]
    reference = Reference(Path(chosen.reference or ""))
    with ExitStack() as stack:
        original = reference.checkpoint()
        prepared = _prepared(chosen, original)
        reference.check(_settings_of(chosen, prepared))
        every = [enter_checkpoint(stack, side, chosen.lenient, chosen.cache) for side in candidates]
        sides = Sides(original, prepared.architecture.device)
        found = [Candidate(sides, checkpoint, chosen.activations, chosen.kv, undo=False) for checkpoint in every]
        assert isinstance(prepared.architecture, models.Architecture)  # noqa: S101 - none of another kind is saved
        settings = _run_settings(chosen, stop, None)
        with BesideReference(
            prepared.architecture, sides, found, [text.chunks for text in prepared.texts], settings, reference
        ) as running:
            running.run()
            outcomes = running.outcomes()
        for checkpoint in every:
            checkpoint.check_unchanged()
        evaluated = [
            _evaluated(*each, {}, [], prepared) for each in zip(shorten_names(paths), found, outcomes, strict=True)
        ]
        verdict, reasons = combine_verdicts({candidate.name: candidate for candidate in evaluated})
        made = Evaluation.model_construct(
            tool=Tool(name="quanterr", version=__version__),
            verdict=verdict,
            reasons=reasons,
            original=reference.original,
            original_bytes=reference.original_bytes,
            model=type(running.model).__name__,
            kind=prepared.architecture.workload.kind,
            dtype=chosen.dtype,
            tokens=_tokens(prepared, chosen, outcomes),
            texts=_named_texts(prepared, chosen, outcomes),
            candidates=evaluated,
            reference=os.fspath(chosen.reference or ""),
            run=_describe_run(chosen, prepared.architecture.device, clock, sides.read_bytes),
        )
    return rules.judge(made)


def _check_needs_no_original(against: Iterable[str | Plan], chosen: EvaluateOptions) -> None:
    """Refuse options that a reference cannot serve.

    Raises:
        UsageError: one of them is given.
    """
    given = {
        "--against": against,
        "--task": chosen.tasks,
        "--sensitivity": chosen.sensitivity,
        "--importance-out": chosen.importance_out,
        "--saliency-out": chosen.saliency_out,
        SAVE: chosen.save_reference,
    }
    for option, value in given.items():
        if value:
            raise UsageError(f"{option}: needs the original, and {USE} has none of its weights; leave one of them out")
    with join_rank_group(threading.Event()) as company:
        if company is not None:
            raise UsageError(f"{USE}: one process reads a reference")


def _save_reference(chosen: EvaluateOptions, prepared: "_Prepared", lockstep: Lockstep, original: Checkpoint) -> None:
    with model_folder(original) as folder:
        settings = _settings_of(chosen, prepared)
        write_reference(Path(chosen.save_reference or ""), original, folder, settings, lockstep.hidden, lockstep.head)


def _settings_of(chosen: EvaluateOptions, prepared: "_Prepared") -> Settings:
    chunks = [text.chunks for text in prepared.texts]
    return Settings(
        dtype=chosen.dtype,
        batch=chosen.batch,
        device=prepared.architecture.device.type,
        context=chosen.context,
        chunks=sum(len(each.raw) for each in chunks),
        tokens=fingerprint(*(each.given for each in chunks)),
        targets=fingerprint(*(part for each in chunks for part in _scored_parts(each))),
    )


def study(original: str | os.PathLike[str] | Checkpoint, **options: Unpack[EvaluateKeywords]) -> None:
    """Measure an original alone: write its ``sensitivity``, ``importance_out``, ``saliency_out``, ``save_reference``.

    ``options`` are the fields of :class:`quanterr.options.EvaluateOptions`, by name. Errors are those of
    :func:`evaluate`.
    """
    study_original(original, EvaluateOptions(**options))


def study_original(original: str | os.PathLike[str] | Checkpoint, chosen: EvaluateOptions) -> None:
    """Write what :func:`evaluate` writes of the original alone, by options that were parsed before."""
    stop, saliency = chosen.stop or threading.Event(), _saliency(chosen)
    if chosen.sensitivity is None and chosen.save_reference is None and not chosen.with_moments:
        raise UsageError(NOTHING_TO_DO)
    with join_rank_group(stop) as company, ExitStack() as stack:
        checkpoint = enter_checkpoint(stack, original, chosen.lenient, chosen.cache)
        prepared = _prepared(chosen, checkpoint)
        sides = Sides(checkpoint, prepared.architecture.device)
        together.agree(company, [checkpoint], prepared.chunks, chosen.batch, chosen.dtype)
        if chosen.with_moments or chosen.save_reference is not None:
            settings = _run_settings(chosen, stop, company)
            with Lockstep(prepared.architecture, sides, [], prepared.chunks, settings) as lockstep:
                together.run(lockstep, company)
                _write_by_products(chosen, prepared, lockstep, saliency, checkpoint)
                if chosen.save_reference is not None:
                    _save_reference(chosen, prepared, lockstep, checkpoint)
        else:
            together.leave_to_rank_0(company)
        _profiled(chosen, prepared, sides, [], [])
        checkpoint.check_unchanged()


def _write_by_products(
    chosen: EvaluateOptions, prepared: "_Prepared", lockstep: Lockstep, saliency: Saliency, original: Checkpoint
) -> None:
    if chosen.saliency_out is not None:
        for name, weight, product in lockstep.weights():
            saliency.add(name, weight, product)
        saliency.write(os.fspath(chosen.saliency_out), original.path, prepared.source)
    if chosen.importance_out is not None:
        origin = Origin(prepared.source, chosen.context, len(prepared.given))
        write_importance(os.fspath(chosen.importance_out), lockstep.moments(), architecture_of(original), origin)


class ReadText(NamedTuple):
    """A text, or conversations, as tokens."""

    name: str
    source: str
    chunks: Chunks
    like: Likeness


class _Prepared(NamedTuple):
    """All that is known before a weight is read."""

    architecture: models.Architecture | models.Denoiser
    texts: list[ReadText]
    calls: Calls | None
    tasks: list[Asked]
    vocabulary: int
    tokenizer: str | None  # fingerprint

    @property
    def chunks(self) -> list[Chunks] | Calls:
        """The tokens of all texts, or recorded calls."""
        return [text.chunks for text in self.texts] if self.calls is None else self.calls

    @property
    def doubts(self) -> list[str]:
        """The reasons why numbers of these texts say nothing."""
        found = []
        for text in self.texts:
            named = f"{text.name}: " if len(self.texts) > 1 else ""
            found += [f"{named}{why}" for why in text.like.doubts(len(text.chunks.raw), self.vocabulary)]
        return found

    @property
    def source(self) -> str:
        """The paths of all that both sides read."""
        return self.calls.source if self.calls is not None else ", ".join(text.source for text in self.texts)

    @property
    def given(self) -> Tensor:
        """Token ids (n, context) of the texts as the model gets them, a chunk of each text in turn.

        Raises:
            UsageError: there is no text.
        """
        plain = [text.chunks.given for text in self.texts if text.chunks.scored is None]
        if not plain:
            raise UsageError("--sensitivity, --importance-out: need a text, with --text or --tokens")
        order = sorted((n, k) for k, given in enumerate(plain) for n in range(len(given)))
        return torch.stack([plain[k][n] for n, k in order])


def _prepared(chosen: EvaluateOptions, original: Checkpoint) -> _Prepared:
    dtype = DTYPES.get(chosen.dtype)
    if dtype is None:
        raise UsageError(f"--dtype {display(chosen.dtype)}: choose one of {', '.join(DTYPES)}")
    device = pick_device(chosen.device)
    given = None if chosen.config is None else Path(chosen.config)
    with model_folder(original) as folder:
        denoiser = models.read_denoiser_config(folder, original, given, chosen.inputs is not None)
        if denoiser is not None:
            return _of_calls(chosen, models.Denoiser(denoiser, dtype, device), str(denoiser["_class_name"]))
        config = models.read_config(folder)
        if chosen.inputs is not None:
            return _of_calls(chosen, models.Architecture(config, dtype, device, recorded=True), config.model_type)
        if chosen.rollout:
            raise UsageError("--rollout: for denoisers, with recorded calls: give them with --inputs")
        vocabulary = config.get_text_config().vocab_size
        texts = _texts(chosen, folder, vocabulary)
        tasks = [read_task(os.fspath(path), folder) for path in chosen.tasks]
        tokenizer = tokenizer_fingerprint(folder)
    architecture = models.Architecture(config, dtype, device)
    if (tasks or chosen.chat or chosen.sensitivity is not None) and architecture.workload is not CAUSAL:
        option = "--task" if tasks else "--chat" if chosen.chat else "--sensitivity"
        raise UsageError(f"{option}: for models that continue a text; {config.model_type} does not")
    if chosen.save_reference is not None:
        check_place(Path(chosen.save_reference))
    if (chosen.save_reference or chosen.reference) and architecture.workload is not CAUSAL:
        option = SAVE if chosen.save_reference else USE
        raise UsageError(f"{option}: for models that continue a text; {config.model_type} does not")
    return _Prepared(architecture, texts, None, tasks, vocabulary, tokenizer)


def _of_calls(chosen: EvaluateOptions, architecture: models.Architecture | models.Denoiser, name: str) -> "_Prepared":
    """Return a model with the recorded calls that it runs on; ``name`` names the model in errors."""
    if chosen.inputs is None or chosen.text or chosen.chat or chosen.tokens is not None:
        raise UsageError(
            f"{display(name)} reads no text: give recorded calls of it with --inputs FILE.safetensors, and no other"
        )
    of_texts = {"--task": chosen.tasks, "--sensitivity": chosen.sensitivity, SAVE: chosen.save_reference}
    for option, given in of_texts.items():
        if given:
            raise UsageError(f"{option}: for models that continue a text")
    calls = read_calls(os.fspath(chosen.inputs))
    if chosen.rollout:
        check_rollout(architecture, calls)
    return _Prepared(architecture, [], calls, [], 0, None)


def _saliency(chosen: EvaluateOptions) -> Saliency:
    if not 0 < chosen.saliency <= 100:
        raise UsageError(f"--saliency {chosen.saliency:g}: per cent, above 0 and up to 100")
    return Saliency(chosen.saliency)


def _plans_and_recipes(against: Iterable[str | Plan]) -> tuple[dict[str, Plan], list[str]]:
    """Plans, by their paths or goals, and names of recipes.

    Raises:
        ReportError: a file is no plan.
    """
    given = [against] if isinstance(against, str | Plan) else list(against)
    plans = {f"{one.goal}{PLAN}": one for one in given if isinstance(one, Plan)}
    words = [one for one in given if isinstance(one, str)]
    if any(PLAN in word for word in words):
        words = [word for one in words for word in one.split(",")]
    plans |= {word: read_plan(word) for word in words if word.endswith(PLAN)}
    return plans, [word for word in words if not word.endswith(PLAN)]


def _quantize_as_planned(plan: Plan, path: str, original: Checkpoint) -> Checkpoint:
    """The original with each layer as a plan says.

    Raises:
        UsageError: it is one of another original.
    """
    for layer in plan.layers:
        entry = original.entries.get(layer.layer_name)
        if entry is None or prod(entry.shape) != layer.elements:
            found = "is not there" if entry is None else f"has the shape {list(entry.shape)}"
            raise UsageError(
                f"--against {display(path)}: it is of another original: {layer.display_name} {found}, where "
                f"{layer.elements:,} elements are planned; plan again, from this one"
            )
    recipes = {one.layer_name: parse_recipe(one.recipe) for one in plan.layers if one.recipe != ORIGINAL}
    made, left = mix_recipes(original, recipes, path)
    if left:
        raise UsageError(f"--against {display(path)}: {display(left[0].name)} cannot be stored so: {left[0].reason}")
    return made


def _run_settings(chosen: EvaluateOptions, stop: threading.Event, company: RankGroup | None) -> RunSettings:
    """Return the settings of a run.

    Raises:
        UsageError: several processes cannot save one reference.
    """
    rank, world = (0, 1) if company is None else (company.rank, company.world)
    with_hidden = chosen.save_reference is not None
    if with_hidden and world > 1:
        raise UsageError(f"{SAVE}: one process saves a reference")
    return RunSettings(chosen.batch, chosen.on_progress, stop, chosen.with_moments, rank, world, with_hidden)


def _profiled(
    chosen: EvaluateOptions,
    prepared: _Prepared,
    sides: Sides,
    found: Sequence[Candidate],
    outcomes: Sequence[Outcome],
) -> Sequence[Mapping[str, float]]:
    """Predictions by weight of each candidate, where the sensitivity is asked for."""
    if chosen.sensitivity is None:
        return [{} for _ in found]
    given = prepared.given[: chosen.sensitivity_chunks]
    profiled = profile_of(prepared.architecture, sides, found, given)
    measured = {
        candidate.checkpoint.path: Measured(n, outcome.scores.kld_mean, outcome.scores.kld_error)
        for n, (candidate, outcome) in enumerate(zip(found, outcomes, strict=True))
        if outcome.scores is not None and _is_of_recipe(candidate) and not candidate.rounding.is_any
    }
    path = os.fspath(chosen.sensitivity)
    write_sensitivity(path, profiled, measured, sides.checkpoint.path, prepared.source, given)
    return profiled.predictions


def _is_of_recipe(candidate: Candidate) -> bool:
    checkpoint = candidate.checkpoint
    return checkpoint.kind == RECIPE and not checkpoint.path.endswith(PLAN)


def _texts(chosen: EvaluateOptions, folder: ModelFolder, vocabulary: int) -> list[ReadText]:
    """Read all texts and conversations.

    Raises:
        UsageError: there is none, or one cannot be read.
    """
    texts, chats = list(chosen.text), list(chosen.chat)
    if bool(texts or chats) == (chosen.tokens is not None):
        raise UsageError("give a text with --text FILE or --chat FILE, or token ids with --tokens FILE.safetensors")
    if chosen.context < 2:
        raise UsageError(f"--context {chosen.context}: at least 2 tokens are needed")
    if chosen.tokens is not None:
        text = read_tokens(os.fspath(chosen.tokens))
        return [_read_text(Path(text.source).stem, text, chosen, vocabulary)]
    enough = None if chosen.chunks is None else max(chosen.chunks, LEAST_CONTEXTS) * chosen.context
    named = named_files([*texts, *chats], "--text" if texts else "--chat")
    found = [
        _read_text(one.name, read_text(one.path, folder, enough), chosen, vocabulary) for one in named[: len(texts)]
    ]
    for one in named[len(texts) :]:
        chunks = read_conversations(one.path, folder, chosen.context, chosen.chunks)
        tokens = torch.cat([row[:length] for row, length in zip(chunks.raw, chunks.lengths, strict=True)])
        like = likeness(Text(tokens, one.path, None), tokens[None])._replace(repeated=_repeated(chunks.raw))
        found.append(ReadText(one.name, one.path, chunks, like))
    return found


def _read_text(name: str, text: Text, chosen: EvaluateOptions, vocabulary: int) -> ReadText:
    chunks = chunks_of(text, chosen.context, chosen.chunks, vocabulary)
    return ReadText(name, text.source, chunks, likeness(text, chunks.raw))


def _repeated(raw: Tensor) -> int:
    """Return how many of some conversations repeat others."""
    return len(raw) - len({row.numpy().tobytes() for row in raw})


def _evaluated(
    name: str,
    candidate: Candidate,
    outcome: Outcome,
    predicted: Mapping[str, float],
    tasks: list[Task],
    prepared: _Prepared,
) -> Evaluated:
    for weight in outcome.weights:
        found = predicted.get(weight.layer_name)
        weight.predicted_kld = found if found is not None and isfinite(found) else None
    known = {one.layer_name: one.predicted_kld for one in outcome.weights if one.predicted_kld is not None}
    missing = [Missing(key, display(key), why) for key, why in candidate.not_found.items()]
    reasons = prepared.doubts
    if missing:
        names = listed([item.layer_name for item in missing], 3)
        reasons.append(f"{count(len(missing), 'tensor')} taken from the original: {names} ({missing[0].reason})")
    extra = {key: why for key, why in candidate.unused.items() if key not in candidate.not_found}
    if extra:
        why = next(iter(extra.values()))
        names = listed(list(extra), 3)
        reasons.append(f"{count(len(extra), 'tensor')} of it took no part: {names} ({why})")
    if outcome.not_finite:
        reasons.append(f"not finite from {outcome.not_finite} on")
    reasons += candidate.rounding.reasons()
    return Evaluated(
        name=name,
        path=candidate.checkpoint.path,
        verdict="inconclusive" if reasons else "pass",
        reasons=reasons or ["evaluated on all tokens; no gates set"],
        bytes=candidate.checkpoint.nbytes,
        scores=outcome.scores,
        texts=[TextScores(text.name, each) for text, each in zip(prepared.texts, outcome.texts, strict=False)],
        predicted_kld=sum(known.values()) if known else None,
        embeddings=outcome.embeddings,
        outputs=outcome.outputs,
        tasks=tasks,
        not_finite=outcome.not_finite,
        blocks=outcome.blocks,
        weights=outcome.weights,
        missing=missing,
        gates=[],
        findings=list(_findings(candidate, outcome, prepared)),
        activations=candidate.rounding.schemes,
        kv="fp8" if candidate.rounding.cached else None,
    )


def _findings(candidate: Candidate, outcome: Outcome, prepared: _Prepared) -> Iterator[Finding]:
    """Report how a candidate describes its model differently from the original, and that it equals the original."""
    same = {block.relative_error for block in outcome.blocks} == {0.0}
    if same and not any(pair.quantized.has_codes for pair in candidate.plan.pairs):
        message = "nothing differs from the original; is this the quantized checkpoint?"
        yield make_finding("identical", "warning", None, message, "check that it is the quantized one")
    yield from compare_configs(candidate.sides.checkpoint, candidate.checkpoint)
    yield from of_rounding(candidate.rounding)
    if candidate.checkpoint.kind == RECIPE:
        yield from report_notes(candidate.checkpoint)
    if candidate.checkpoint.gguf is not None:  # which has its own: a tokenizer.json beside it is another model's
        return
    with model_folder(candidate.checkpoint) as folder:
        own = tokenizer_fingerprint(folder)
    if None not in (own, prepared.tokenizer) and own != prepared.tokenizer:
        message = f"{folder.named('tokenizer.json')} is another tokenizer than the original's, with which both were run"
        yield make_finding("config_mismatch", "warning", None, message, "take the original's tokenizer.json")


def _tokens(prepared: _Prepared, chosen: EvaluateOptions, outcomes: Sequence[Outcome]) -> Tokens:
    scored = next((outcome.scores.tokens for outcome in outcomes if outcome.scores), 0)
    if prepared.calls is not None:
        return Tokens(prepared.calls.source, prepared.calls.sha256, 0, len(prepared.calls.calls), 0)
    if len(prepared.texts) == 1:
        return _tokens_of(prepared.texts[0], prepared, chosen, scored)
    n = sum(len(text.chunks.raw) for text in prepared.texts)
    digest = fingerprint(*(part for text in prepared.texts for part in _scored_parts(text.chunks)))
    return Tokens(prepared.source, digest, chosen.context, n, scored, tokenizer=prepared.tokenizer)


def _tokens_of(text: ReadText, prepared: _Prepared, chosen: EvaluateOptions, scored: int) -> Tokens:
    return Tokens(
        text.source,
        fingerprint(*_scored_parts(text.chunks)),
        chosen.context,
        len(text.chunks.raw),
        scored,
        **text.like._asdict(),
        tokenizer=prepared.tokenizer,
    )


def _scored_parts(chunks: Chunks) -> list[Tensor]:
    return [chunks.raw] if chunks.scored is None else [chunks.raw, chunks.scored]


def _named_texts(prepared: _Prepared, chosen: EvaluateOptions, outcomes: Sequence[Outcome]) -> list[NamedTokens]:
    """Return each of several texts."""
    found = next((outcome.texts for outcome in outcomes if outcome.texts), [])
    return [
        NamedTokens(text.name, _tokens_of(text, prepared, chosen, scores.tokens))
        for text, scores in zip(prepared.texts, found, strict=False)
    ]


def _describe_run(chosen: EvaluateOptions, device: torch.device, clock: Clock, read_bytes: int) -> RunInfo:
    return clock.describe_run(chosen.command, describe_device(device), torch.get_num_threads(), read_bytes)
