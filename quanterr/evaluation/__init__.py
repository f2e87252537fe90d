"""Evaluation of quantized models: all sides run in lockstep through the original's own architecture, block by block.

models.py     the model of a config.json without memory for weights, and its units
names.py      which stored tensors make up a parameter
sides.py      the weights of both checkpoints in the original's terms
stepping.py   a forward that stops at each unit
rounding.py   inputs, keys and values as a runtime rounds them
tokens.py     texts as tokens; conversations.py: chats as tokens
references.py what is kept of an original, to evaluate candidates without it
lockstep.py   runs all sides unit by unit and compares them on the way
scores.py     perplexity, divergence, agreement
states.py     errors of hidden states and of the outputs of weights
floor.py      the original in its own dtype
linear.py     products in float32, by the faster library
swaps.py      one block or weight of a candidate in the original
routers.py    the experts that both sides choose
together.py   several processes for one evaluation

An evaluation opens the candidates (opening.py), prepares the model and the texts (preparation.py), runs them beside the
original (beside_original.py) or a reference (beside_reference.py), writes other files (by_products.py) and assembles
the document (assembly.py).
"""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Unpack

from quanterr.checkpoints import Checkpoint
from quanterr.evaluation.beside_original import measure, measure_alone
from quanterr.evaluation.beside_reference import measure_beside
from quanterr.evaluation.linear import LinearLayers
from quanterr.gates import PreparedRules, prepare
from quanterr.keywords import accept_fields_of, list_given
from quanterr.options import EvaluateKeywords, EvaluateOptions
from quanterr.report.documents import KINDS
from quanterr.report.evaluation.model import Evaluation
from quanterr.report.plan.model import Plan
from quanterr.tensors.clock import Clock
from quanterr.tensors.devices import device_memory


@accept_fields_of(EvaluateOptions)
def evaluate(
    original: str | os.PathLike[str] | Checkpoint,
    candidates: str | os.PathLike[str] | Checkpoint | Iterable[str | os.PathLike[str] | Checkpoint] = (),
    *,
    against: str | Plan | Iterable[str | Plan] = (),
    **options: Unpack[EvaluateKeywords],
) -> Evaluation:
    """Measure how well quantized checkpoints still perform, in the original's own model with the weights of each side.

    ``original`` is a folder with config.json, here or in a store; ``candidates`` are one or several checkpoints.
    ``against`` are recipes such as ``"fp8_row"``, plans, or files of plans such as ``"plan.json"``, by which the
    original is quantized on the fly; ``options`` are the fields of :class:`quanterr.options.EvaluateOptions`, by name.

    Raises:
        UsageError: transformers is missing, the text is missing or too short, or a rule cannot be parsed.
        CheckpointError: an input is missing or damaged, transformers lacks the model, or a weight is missing or has
            another shape.
        ResourceError: there is not enough memory.
    """
    chosen = EvaluateOptions(**options)
    return evaluate_candidates(
        original, list_given(candidates), against, chosen, prepare(chosen, KINDS["quanterr.evaluation"])
    )


def evaluate_candidates(
    original: str | os.PathLike[str] | Checkpoint,
    candidates: Sequence[str | os.PathLike[str] | Checkpoint],
    against: str | Plan | Iterable[str | Plan],
    chosen: EvaluateOptions,
    rules: PreparedRules,
) -> Evaluation:
    """Evaluate candidates as :func:`evaluate` does, by rules that were read before."""
    clock = Clock()
    with device_memory(), LinearLayers(chosen.dtype):
        if chosen.reference is not None:
            found = measure_beside(Path(chosen.reference), [original, *candidates], against, chosen, clock)
        else:
            found = measure(original, candidates, against, chosen, clock)
    return rules.judge(found)


def study(original: str | os.PathLike[str] | Checkpoint, **options: Unpack[EvaluateKeywords]) -> None:
    """Measure an original alone: write its ``sensitivity``, ``importance_out``, ``saliency_out``, ``save_reference``.

    ``options`` are the fields of :class:`quanterr.options.EvaluateOptions`, by name. Raises the same errors as
    :func:`evaluate`.
    """
    chosen = EvaluateOptions(**options)
    with device_memory(), LinearLayers(chosen.dtype):
        measure_alone(original, chosen)
