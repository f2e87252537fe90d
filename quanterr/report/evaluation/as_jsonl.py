"""Evaluations as JSON Lines: first the evaluation without its weights, then a line per weight of each candidate."""

from dataclasses import fields
from typing import IO

from quanterr.report.base import dumps
from quanterr.report.evaluation.model import Evaluated, Evaluation


def write(evaluation: Evaluation, file: IO[str]) -> None:
    """Write the evaluation line by line; ``record`` names the kind of line, and the first line counts the weights."""
    own = Evaluation.model_fields.items()
    head = {info.alias or name: getattr(evaluation, name) for name, info in own if name != "candidates"}
    kept = [field.name for field in fields(Evaluated) if field.name != "weights"]
    head["candidates"] = [{name: getattr(candidate, name) for name in kept} for candidate in evaluation.candidates]
    count = sum(len(candidate.weights) for candidate in evaluation.candidates)
    file.write(dumps({"record": "evaluation", **head, "records": {"weight": count}}) + "\n")
    for candidate in evaluation.candidates:
        for weight in candidate.weights:
            file.write(f'{{"record": "weight", "candidate": {dumps(candidate.name)}, {dumps(weight)[1:]}\n')
