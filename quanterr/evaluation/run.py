"""The steps of an evaluation: prepare, run, judge."""

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from quanterr.checkpoints import Checkpoint
from quanterr.documents.evaluation.model import Evaluation
from quanterr.documents.kinds import KINDS
from quanterr.documents.plan.model import Plan
from quanterr.evaluation.beside_original import measure, measure_alone
from quanterr.evaluation.beside_reference import measure_beside
from quanterr.evaluation.running.attention import attention_in_pieces
from quanterr.evaluation.running.linear import LinearLayers
from quanterr.gates import PreparedRules, prepare
from quanterr.options import EvaluateOptions
from quanterr.options.keywords import accept_fields_of, list_given
from quanterr.tensors.clock import Clock
from quanterr.tensors.in_memory import Side, hold_all
from quanterr.util.memory import device_memory


@accept_fields_of(EvaluateOptions)
def evaluate(
    original: Side,
    candidates: Side | Iterable[Side] | Mapping[str, Side] = (),
    *,
    against: str | Plan | Iterable[str | Plan] = (),
    **options: Any,
) -> Evaluation:
    """Measure how well quantized checkpoints still perform, in the original's own model with the weights of each side.

    ``original`` is a folder with config.json, here or in a store, or a GGUF file; ``candidates`` are one or several
    checkpoints, or state dicts or models in memory; in a dict, its keys are their names.
    ``against`` are recipes such as ``"fp8_row"``, plans, or files of plans such as ``"plan.json"``, by which the
    original is quantized on the fly.

    Raises:
        UsageError: transformers is missing, the text is missing or too short, or a rule cannot be parsed.
        CheckpointError: an input is missing or damaged, transformers lacks the model, or a weight is missing or has
            another shape.
        ResourceError: there is not enough memory.
    """
    chosen = EvaluateOptions(**options)
    sides: list[Side]
    sides, names = list_given(candidates)
    before, *after = hold_all([original, *sides])
    return evaluate_candidates(before, after, against, chosen, prepare(chosen, KINDS["quanterr.evaluation"]), names)


def evaluate_candidates(
    original: str | os.PathLike[str] | Checkpoint,
    candidates: Sequence[str | os.PathLike[str] | Checkpoint],
    against: str | Plan | Iterable[str | Plan],
    chosen: EvaluateOptions,
    rules: PreparedRules,
    names: Sequence[str] = (),
) -> Evaluation:
    """Evaluate candidates as :func:`evaluate` does, with rules that have been read; ``names`` are the given names."""
    clock = Clock()
    with device_memory(), LinearLayers(chosen.dtype), attention_in_pieces():
        if chosen.reference is not None:
            evaluation = measure_beside(Path(chosen.reference), [original, *candidates], against, chosen, clock, names)
        else:
            evaluation = measure(original, candidates, against, chosen, clock, names)
    return rules.judge(evaluation)


def study(original: str | os.PathLike[str] | Checkpoint, **options: Any) -> None:
    """Measure an original alone: write its ``sensitivity``, ``importance_out``, ``saliency_out``, ``save_reference``.

    The keywords are those of :func:`evaluate`, and so are the errors.
    """
    chosen = EvaluateOptions(**options)
    with device_memory(), LinearLayers(chosen.dtype), attention_in_pieces():
        measure_alone(original, chosen)
