"""Multiple-choice tasks, answered by log-likelihood, which show whether a quantized model still answers as well.

Each line of a file is JSON: {"question": "2 + 2 =", "choices": [" 3", " 4"], "answer": 1}. The model answers with the
choice that has the highest log-likelihood after the question, like ``acc`` in lm-evaluation-harness.
"""

import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from math import comb
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from quanterr.documents.evaluation.model import Task
from quanterr.errors import UsageError
from quanterr.evaluation.models.building import Architecture, Denoiser
from quanterr.evaluation.models.folder import ModelFolder
from quanterr.evaluation.models.names import ConversionNames, Get
from quanterr.evaluation.models.weights import Candidate, OriginalWeights
from quanterr.evaluation.running.model_run import ModelRun, take_turns
from quanterr.evaluation.running.rounding import Rounding
from quanterr.evaluation.running.stream import Stream
from quanterr.evaluation.running.workload import inputs_of
from quanterr.evaluation.texts.tokens import read_utf8, tokenizer_of
from quanterr.util.text import display

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BATCH_TOKENS = 4096  # maximum number of tokens of a micro-batch, with padding


class Question(NamedTuple):
    """A question, its choices and the index of the right one."""

    question: str
    choices: tuple[str, ...]
    answer: int


class Scored(NamedTuple):
    """Token ids; the last ``scored`` of them are predicted."""

    ids: tuple[int, ...]
    scored: int


class Likelihood(NamedTuple):
    """Σ ln p of tokens, and whether greedy decoding would generate them."""

    total: float
    is_greedy: bool


@dataclass(frozen=True, slots=True)
class Asked:
    """A task and the token sequences of its questions."""

    name: str
    questions: tuple[Question, ...]
    sequences: tuple[Scored, ...]  # one for each choice of each question


def read_task(path: str, folder: ModelFolder) -> Asked:
    """Read a task and tokenize its questions with the original's tokenizer.

    Raises:
        UsageError: the file is missing, or a line is not a question.
        CheckpointError: the tokenizer.json is missing or damaged.
    """
    where = f"--task {display(path)}"
    lines = enumerate(read_utf8(path, where).split("\n"), 1)
    questions = tuple(_read_question(line, f"{where}, line {n}") for n, line in lines if line.strip())
    if not questions:
        raise UsageError(f"{where}: holds no question")
    tokenizer = tokenizer_of(folder)
    sequences = [sequence(tokenizer, each.question, choice) for each in questions for choice in each.choices]
    return Asked(Path(path).stem, questions, tuple(sequences))


def _read_question(line: str, where: str) -> Question:
    try:
        fields = json.loads(line)
        question, choices, answer = fields["question"], fields["choices"], fields["answer"]
    except (ValueError, KeyError, TypeError) as error:
        form = '{"question": "2 + 2 =", "choices": [" 3", " 4"], "answer": 1}'
        raise UsageError(f"{where}: no question; write it as {form}") from error
    texts = isinstance(choices, list) and all(isinstance(choice, str) and choice for choice in choices)
    if not isinstance(question, str) or not texts or len(choices) < 2:
        raise UsageError(f"{where}: a question must be a text, and its choices at least two texts that are not empty")
    if isinstance(answer, bool) or not isinstance(answer, int) or not 0 <= answer < len(choices):
        raise UsageError(f"{where}: answer {display(str(answer), 40)} is out of range ({len(choices)} choices, from 0)")
    return Question(question, tuple(choices), answer)


def sequence(tokenizer: "PreTrainedTokenizerBase", context: str, continuation: str) -> Scored:
    """Return the tokens of a context and its continuation together; the continuation's are scored.

    Raises:
        UsageError: both together are a single token.
    """
    whole = tokenizer(context + continuation)["input_ids"]
    if len(whole) < 2:
        raise UsageError(f'"{display(context + continuation)}": a single token has nothing before it that predicts it')
    behind = len(tokenizer(context)["input_ids"])
    scored = max(len(whole) - max(behind, 1), 1)
    return Scored(tuple(whole), scored)


def loglikelihoods(
    architecture: Architecture | Denoiser,
    stored: Sequence[str],
    get: Get,
    sequences: Sequence[Scored],
    rounding: Rounding | None = None,
) -> list[Likelihood]:
    """Return ln p of the scored tokens of each sequence; the model is read once, unit by unit.

    Padding follows the sequence, so that causal attention does not read it.
    """
    order = sorted(range(len(sequences)), key=lambda n: len(sequences[n].ids))
    batches = _make_batches(order, sequences)
    model = architecture.build()
    inputs = {k: inputs_of(model, _pad([sequences[n].ids for n in batch])) for k, batch in enumerate(batches)}
    side = ModelRun(Stream(model, ConversionNames(model, stored), get, inputs, architecture.device), rounding)
    likelihoods = [Likelihood(0.0, False)] * len(sequences)
    with closing(side):
        for number in take_turns(side.stream, side.load, side.free):
            result = side.run(number)
            if result is not None:
                for row, n in enumerate(batches[number]):
                    likelihoods[n] = _measure_likelihood(result.logits[row], sequences[n])
            del result
    return likelihoods


def _make_batches(order: Sequence[int], sequences: Sequence[Scored]) -> list[list[int]]:
    """Group sequences of similar length into batches."""
    batches: list[list[int]] = []
    for n in order:
        if batches and (len(batches[-1]) + 1) * len(sequences[n].ids) <= BATCH_TOKENS:
            batches[-1].append(n)
        else:
            batches.append([n])
    return batches


def _pad(rows: Sequence[Sequence[int]]) -> Tensor:
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])


def _measure_likelihood(logits: Tensor, of: Scored) -> Likelihood:
    first, last = len(of.ids) - of.scored, len(of.ids)
    targets = torch.tensor(of.ids[first:last], device=logits.device)
    rows = logits[first - 1 : last - 1]
    total = float(rows.double().log_softmax(-1).gather(1, targets[:, None]).sum())
    return Likelihood(total, bool((rows.argmax(-1) == targets).all()))


def answer_tasks(
    architecture: Architecture | Denoiser,
    originals: OriginalWeights,
    candidates: Sequence[Candidate],
    tasks: Sequence[Asked],
) -> list[list[Task]]:
    """Return the results of every candidate on every task, compared with the original's answers."""
    sequences = [each for task in tasks for each in task.sequences]
    base = _choose_answers(tasks, loglikelihoods(architecture, list(originals.weights), originals.get, sequences))
    made = []
    for candidate in candidates:
        likelihoods = loglikelihoods(architecture, candidate.names, candidate.get, sequences, candidate.rounding)
        answers_of_candidate = _choose_answers(tasks, likelihoods)
        made.append([_compare_answers(*each) for each in zip(tasks, base, answers_of_candidate, strict=True)])
    return made


def _choose_answers(tasks: Sequence[Asked], likelihoods: Sequence[Likelihood]) -> list[list[int]]:
    """Return the most likely choice for each question of each task."""
    answers, at = [], 0
    for task in tasks:
        choices = []
        for question in task.questions:
            values = [likelihood.total for likelihood in likelihoods[at : at + len(question.choices)]]
            choices.append(values.index(max(values)))
            at += len(values)
        answers.append(choices)
    return answers


def _compare_answers(task: Asked, base: Sequence[int], answers: Sequence[int]) -> Task:
    right = [question.answer == answer for question, answer in zip(task.questions, base, strict=True)]
    right_too = [question.answer == answer for question, answer in zip(task.questions, answers, strict=True)]
    n, before, after = len(right), sum(right), sum(right_too)
    lost = sum(was and not now for was, now in zip(right, right_too, strict=True))
    won = sum(now and not was for was, now in zip(right, right_too, strict=True))
    return Task(
        name=task.name,
        questions=n,
        accuracy_original=before / n,
        accuracy=after / n,
        retention=after / before if before else None,
        agreement=sum(x == y for x, y in zip(base, answers, strict=True)) / n,
        mcnemar_p=mcnemar(lost, won),
    )


def mcnemar(lost: int, won: int) -> float:
    """Return the exact two-sided p-value of McNemar's test, for the questions that only one side answers right."""
    n, fewer = lost + won, min(lost, won)
    tail: float = 2 * sum(comb(n, k) for k in range(fewer + 1)) / 2**n
    return min(1.0, tail)
