"""Exports of plans for quantizing programs, with a module for each program.

A plan with a recipe that the program cannot write is an error, as plans are not exported in part. For programs that
read a plan from a file, :func:`export_command` returns the command that does so.
"""

import re
import shlex
from collections import defaultdict
from typing import IO

from quanterr.documents.plan.model import ORIGINAL, Plan, PlannedLayer
from quanterr.errors import UsageError
from quanterr.outputs.formatting import MAX_SENTENCE_LENGTH
from quanterr.planning.exports import (
    bitsandbytes,
    convert_to_quant,
    llama_quantize,
    llmcompressor,
    mlx,
    modelopt,
    torchao,
)
from quanterr.planning.exports.base import STACK
from quanterr.recipes.matrices import is_stack
from quanterr.recipes.names import list_recipes
from quanterr.util.text import display, itemize

CONSUMERS = {
    "llama-quantize": llama_quantize.CONSUMER,
    "llmcompressor": llmcompressor.CONSUMER,
    "torchao": torchao.CONSUMER,
    "modelopt": modelopt.CONSUMER,
    "bitsandbytes": bitsandbytes.CONSUMER,
    "convert_to_quant": convert_to_quant.CONSUMER,
    "mlx": mlx.CONSUMER,
}
END_MARK = "END_OF_PLAN"  # a line that no export contains
SHELL_SPECIAL = re.compile(r'[$`"\\!]')  # characters that a shell interprets within double quotes


def export_plan(plan: Plan, consumer: str) -> str:
    """Return the plan in the form that one of :data:`CONSUMERS` reads.

    Raises:
        UsageError: the program is unknown, or does not write a recipe of the plan.
    """
    check_consumer(consumer)
    modules: dict[str, list[str]] = defaultdict(list)
    for layer in plan.layers:
        modules[_find_base_recipe(layer)].append(layer.layer_name.removesuffix(".weight"))
    if refused := _list_unwritable_recipes(plan, consumer):
        raise UsageError(
            f"--export {consumer}: {consumer} does not write {itemize(refused, 5)}; plan with recipes that it writes, "
            f"such as --to {','.join(list_writable(consumer))}"
        )
    if not CONSUMERS[consumer].takes_stacks and (stack := _find_quantized_stack(plan)) is not None:
        raise UsageError(
            f"--export {consumer}: {display(stack)} is a stack of experts, for which it has no option; -l '!experts' "
            "leaves these out"
        )
    return CONSUMERS[consumer].export(plan, modules)


def export_command(plan: Plan, consumer: str) -> str:
    """Return the shell command that reads the result of :func:`export_plan` from a file and quantizes as planned.

    The command is empty if the export is itself a command.
    """
    program = CONSUMERS[consumer]
    name = plan.original.removeprefix("hf://")
    command = program.command.format(original=shlex.quote(name), file=program.file)
    if program.python:
        code = program.python.format(original=repr(name), file=repr(program.file))
        command = "python -c " + (shlex.quote(code) if SHELL_SPECIAL.search(code) else f'"{code}"')
    return command


def write(plan: Plan, file: IO[str], program: str) -> None:
    """Write a shell script that carries out the plan: it writes the file that the program reads, and runs the program.

    Raises:
        UsageError: for the reasons that :func:`export_plan` states.
    """
    text = export_plan(plan, program)
    if command := export_command(plan, program):
        text = f"cat > {CONSUMERS[program].file} <<'{END_MARK}'\n{text}{END_MARK}\n{command}\n"
    planned_by = display(shlex.join(plan.run.command), MAX_SENTENCE_LENGTH)
    file.write(f"#!/bin/sh\n# Quantizes as planned by {planned_by}\nset -e\n{text}")


def consumers_of(plan: Plan) -> list[str]:
    """Return the programs that can write all recipes and layers of a plan; those that read its original come first."""
    stack = _find_quantized_stack(plan)
    able = [
        name
        for name, consumer in CONSUMERS.items()
        if not _list_unwritable_recipes(plan, name) and (consumer.takes_stacks or stack is None)
    ]
    suffix = next((ending for ending in (".safetensors", ".gguf") if plan.original.endswith(ending)), "")
    return sorted(able, key=lambda name: CONSUMERS[name].reads != suffix)


def list_writable(consumer: str) -> list[str]:
    """Return the recipes of ``quanterr formats --recipes`` that a program writes into one checkpoint."""
    recipes = [recipe for recipe in list_recipes() if CONSUMERS[consumer].writes(recipe)]
    return recipes if CONSUMERS[consumer].mixes else recipes[:1]


def check_consumer(consumer: str | None) -> None:
    """Refuse an unknown program before anything is computed.

    Raises:
        UsageError: :data:`CONSUMERS` lacks ``consumer``.
    """
    if consumer is not None and consumer not in CONSUMERS:
        raise UsageError(f"--export {display(consumer)}: choose one of {', '.join(CONSUMERS)}")


def _find_base_recipe(layer: PlannedLayer) -> str:
    """Return a layer's recipe without ``:scales=absmax``, as programs scale by the largest element."""
    return layer.recipe.removesuffix(":strict").replace(":scales=absmax", "")


def _list_unwritable_recipes(plan: Plan, consumer: str) -> list[str]:
    """Return the recipes of the plan that a program does not write."""
    recipes = dict.fromkeys(map(_find_base_recipe, plan.layers))
    return [recipe for recipe in recipes if recipe != ORIGINAL and not CONSUMERS[consumer].writes(recipe)]


def _find_quantized_stack(plan: Plan) -> str | None:
    """Return the name of a stack of experts that a plan quantizes."""
    quantized = (layer.layer_name for layer in plan.layers if layer.recipe != ORIGINAL)
    return next((name for name in quantized if is_stack(name, STACK)), None)
