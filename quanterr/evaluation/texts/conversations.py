"""Conversations in the original's own chat template; only the assistant's tokens are scored.

A file of JSON lines: a list of messages, or {"messages": [...]}, each {"role": "user", "content": "…"}.

Some templates mark the assistant's tokens ({% generation %}). For others, a turn is the text that the template appends
to the earlier turns, from the beginning of the answer to the token that ends it. A template that rewrites earlier turns
is refused.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from quanterr.errors import UsageError
from quanterr.evaluation.models.folder import ModelFolder
from quanterr.evaluation.texts.tokens import Chunks, tokenizer_of
from quanterr.util.strict_json import JsonObject
from quanterr.util.text import display

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OPTION = "--chat"
FORM = '{"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}'
MARK = "{% generation"  # in a template; {%- generation works, too


def read_conversations(path: str, folder: ModelFolder, context: int, limit: int | None) -> Chunks:
    """Read at most ``limit`` conversations, each cut to its first ``context`` tokens.

    Raises:
        UsageError: the file is missing, a line is not a conversation, or the tokenizer has no chat template, or one
            that rewrites earlier turns.
        CheckpointError: the tokenizer.json is missing or damaged.
    """
    where = f"{OPTION} {display(path)}"
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UsageError(f"{where}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{where}: not UTF-8 text") from error
    tokenizer = tokenizer_of(folder)
    if not tokenizer.chat_template:
        raise UsageError(f"{where}: the tokenizer of {display(folder.address)} has no chat template")
    found: list[tuple[list[int], list[bool]]] = []
    for n, line in enumerate(lines, 1):
        if line.strip() and (limit is None or len(found) < limit):
            messages = _messages(line, f"{where}, line {n}")
            ids, scored = _tokens(tokenizer, messages, f"{where}, line {n}")
            if any(scored[1:context]):
                found.append((ids[:context], scored[:context]))
    if not found:
        raise UsageError(f"{where}: no assistant's token is among the first {context} tokens of any conversation")
    longest = max(len(ids) for ids, _ in found)
    ids_of = torch.tensor([[*ids, *[0] * (longest - len(ids))] for ids, _ in found])
    mask = torch.tensor([[*own, *[False] * (longest - len(own))] for _, own in found])
    mask[:, 0] = False  # nothing predicts the first token
    return Chunks(ids_of, ids_of, mask, tuple(len(ids) for ids, _ in found))


def _messages(line: str, where: str) -> list[JsonObject]:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{where}: not JSON; write it as {FORM}") from error
    messages = found.get("messages") if isinstance(found, dict) else found
    if not isinstance(messages, list) or not all(_is_message(each) for each in messages):
        raise UsageError(f"{where}: no conversation; write it as {FORM}")
    if not any(each["role"] == "assistant" for each in messages):
        raise UsageError(f"{where}: the assistant says nothing in it, and its tokens are those that are scored")
    return messages


def _is_message(message: object) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))


def _tokens(
    tokenizer: "PreTrainedTokenizerBase", messages: Sequence[JsonObject], where: str
) -> tuple[list[int], list[bool]]:
    """Return the token ids of a conversation and a mask of the assistant's tokens."""
    try:
        ids = _apply_template(tokenizer, messages)
        if MARK in tokenizer.chat_template.replace("{%-", "{%"):
            marked = tokenizer.apply_chat_template(
                messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
            )
            return list(marked["input_ids"]), [bool(one) for one in marked["assistant_masks"]]
        scored = [False] * len(ids)
        for n, message in enumerate(messages):
            if message["role"] == "assistant":
                before = _apply_template(tokenizer, messages[:n], add_generation_prompt=True)
                behind = _apply_template(tokenizer, messages[: n + 1])
                if ids[: len(behind)] != behind or behind[: len(before)] != before:
                    raise UsageError(
                        f"{where}: the chat template rewrites what it made of earlier messages, and marks no "
                        "{% generation %}: the assistant's tokens cannot be told apart"
                    )
                turn = behind[len(before) :]
                stop = len(before) + _length_of(turn, tokenizer.eos_token_id)
                scored[len(before) : stop] = [True] * (stop - len(before))
    except UsageError:
        raise
    except Exception as error:  # jinja raises many kinds when a template refuses a conversation
        raise UsageError(f"{where}: the chat template refuses it: {display(str(error), 300)}") from error
    return ids, scored


def _apply_template(tokenizer: "PreTrainedTokenizerBase", messages: Sequence[JsonObject], **more: bool) -> list[int]:
    found = tokenizer.apply_chat_template(list(messages), tokenize=True, return_dict=True, **more)
    return list(found["input_ids"])


def _length_of(turn: Sequence[int], end: int | None) -> int:
    """Return the number of tokens that the assistant generates in a turn, including the one that ends it."""
    places = [n for n, token in enumerate(turn) if token == end]
    return places[-1] + 1 if places else len(turn)
