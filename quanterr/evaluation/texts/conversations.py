"""Conversations in the original's own chat template; only the assistant's tokens are scored.

Each line of a file is JSON: a list of messages, or {"messages": [...]}, each {"role": "user", "content": "…"}. For a
model that takes images or audio, the content may be a list of parts: {"type": "text", "text": "…"}, images and sounds
(:mod:`~quanterr.evaluation.texts.media`), from which the model's own processor makes its inputs. A model that
transcribes has no template: a conversation is one sound and its transcript, in the tokens of the model's own tokenizer.

Some templates mark the assistant's tokens ({% generation %}). For others, a turn is the text that the template appends
to the earlier turns, from the beginning of the answer to the token that ends it. A template that rewrites earlier turns
is refused.
"""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from quanterr.errors import UsageError
from quanterr.evaluation.models.folder import ModelFolder
from quanterr.evaluation.texts.media import is_part, list_parts, make_processor, open_media
from quanterr.evaluation.texts.tokens import Chunks, read_utf8, tokenizer_of
from quanterr.util.strict_json import JsonObject
from quanterr.util.text import display

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHAT_OPTION = "--chat"
FORM = '{"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}'
TRANSCRIPT = (
    '[{"role": "user", "content": [{"type": "audio", "path": "a.wav"}]}, {"role": "assistant", "content": "hello"}]'
)
TOKEN_FIELDS = ("input_ids", "attention_mask")  # what a processor returns of the text
GENERATION_MARK = "{% generation"  # marks the assistant's tokens; so does {%- generation


def read_conversations(
    path: str, folder: ModelFolder, context: int, limit: int | None, transcribes: bool = False
) -> Chunks:
    """Read up to ``limit`` conversations, and cut each to its first ``context`` tokens.

    ``transcribes`` means that the model transcribes sounds.

    Raises:
        UsageError: the file is missing, a line is not a conversation, or the tokenizer has no chat template, or one
            that rewrites earlier turns.
        CheckpointError: the tokenizer.json is missing or damaged.
    """
    where = f"{CHAT_OPTION} {display(path)}"
    lines = read_utf8(path, where).split("\n")
    tokenizer = tokenizer_of(folder)
    if not (tokenizer.chat_template or transcribes):
        raise UsageError(f"{where}: the tokenizer of {display(folder.address)} has no chat template")
    reader = _Reader(folder, tokenizer, Path(path).parent)
    read = reader.read_transcript if transcribes else reader.read
    conversations: list[_Conversation] = []
    for n, line in enumerate(lines, 1):
        if line.strip() and (limit is None or len(conversations) < limit):
            conversation = read(_read_messages(line, f"{where}, line {n}"), f"{where}, line {n}")
            if conversation.media and len(conversation.ids) > context:
                raise UsageError(
                    f"{where}, line {n}: {len(conversation.ids)} tokens with its images and sounds, which cannot be "
                    f"cut: --context {context} must be at least as large"
                )
            if any(conversation.scored[1:context]):
                conversations.append(
                    conversation._replace(ids=conversation.ids[:context], scored=conversation.scored[:context])
                )
    if not conversations:
        raise UsageError(f"{where}: no assistant's token is among the first {context} tokens of any conversation")
    longest = max(len(conversation.ids) for conversation in conversations)
    ids_of = torch.tensor(
        [[*conversation.ids, *[0] * (longest - len(conversation.ids))] for conversation in conversations]
    )
    mask = torch.tensor(
        [[*conversation.scored, *[False] * (longest - len(conversation.scored))] for conversation in conversations]
    )
    mask[:, 0] = False  # no position predicts the first token
    media = (
        tuple(conversation.media for conversation in conversations)
        if any(conversation.media for conversation in conversations)
        else ()
    )
    return Chunks(ids_of, ids_of, mask, tuple(len(conversation.ids) for conversation in conversations), media)


class _Conversation(NamedTuple):
    ids: list[int]
    scored: list[bool]  # the assistant's tokens
    media: dict[str, Tensor]  # arguments of the model


class _Reader:
    """Reads conversations by the model's tokenizer, or by its processor if they have images or sounds."""

    def __init__(self, folder: ModelFolder, tokenizer: "PreTrainedTokenizerBase", files: Path) -> None:
        """Take the tokenizer, and the folder ``files`` of images and sounds."""
        self._folder, self._tokenizer, self._files = folder, tokenizer, files
        self._processor: Any = None

    def read(self, messages: list[JsonObject], where: str) -> _Conversation:
        """Return the tokens of a conversation; raises UsageError."""
        if all(isinstance(each["content"], str) for each in messages):
            apply = partial(_apply_template, self._tokenizer)
            has_marks = GENERATION_MARK in self._tokenizer.chat_template.replace("{%-", "{%")
            ids, scored = _find_tokens(apply, self._tokenizer, messages, where, has_marks)
            return _Conversation(ids, scored, {})
        shown = self._open(messages, where)
        if not self._processor.chat_template:
            self._processor.chat_template = self._tokenizer.chat_template
        ids, scored = _find_tokens(self._list_ids, self._tokenizer, shown, where)
        made = self._process(shown)
        return _Conversation(ids, scored, {key: made[key] for key in made if key not in TOKEN_FIELDS})

    def read_transcript(self, messages: list[JsonObject], where: str) -> _Conversation:
        """Return the tokens of a transcript with those that the tokenizer puts around it; raises UsageError."""
        shown = self._open(messages, where)
        part_types = [(each["role"], [part["type"] for part in each["content"]]) for each in shown]
        if part_types != [("user", ["audio"]), ("assistant", ["text"])]:
            raise UsageError(f"{where}: for a model that transcribes, write one sound and its transcript: {TRANSCRIPT}")
        (sound,), (transcript,) = (each["content"] for each in shown)
        extract, known = self._processor.feature_extractor, set(self._tokenizer.all_special_ids)
        heard = extract(sound["audio"], sampling_rate=extract.sampling_rate, return_tensors="pt")
        ids = list(self._tokenizer(transcript["text"])["input_ids"])
        # Index of the first scored token; the transcript of silence has only special tokens, and its last is scored.
        first = next((n for n, token in enumerate(ids) if token not in known), len(ids) - 1)
        return _Conversation(ids, [n >= first for n in range(len(ids))], dict(heard))

    def _open(self, messages: Sequence[JsonObject], where: str) -> list[JsonObject]:
        """Return messages as lists of parts, with the files read."""
        self._processor = self._processor or make_processor(self._folder, where)
        opened = partial(open_media, folder=self._files, processor=self._processor, where=where)
        return [each | {"content": list(map(opened, list_parts(each)))} for each in messages]

    def _list_ids(self, messages: Sequence[JsonObject], **more: bool) -> list[int]:
        return self._process(messages, **more)["input_ids"][0].tolist()

    def _process(self, messages: Sequence[JsonObject], **more: bool) -> dict[str, Tensor]:
        """Return the arguments of the model, by name."""
        return self._processor.apply_chat_template(  # type: ignore[no-any-return]
            list(messages), tokenize=True, return_dict=True, return_tensors="pt", **more
        )


def _read_messages(line: str, where: str) -> list[JsonObject]:
    try:
        parsed = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{where}: not JSON; write it as {FORM}") from error
    messages = parsed.get("messages") if isinstance(parsed, dict) else parsed
    if not isinstance(messages, list) or not all(_is_message(each) for each in messages):
        raise UsageError(f"{where}: no conversation; write it as {FORM}")
    if not any(each["role"] == "assistant" for each in messages):
        raise UsageError(f"{where}: has no message of the assistant, whose tokens are scored")
    return messages


def _is_message(message: object) -> bool:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        return False
    content = message.get("content")
    return isinstance(content, str) or (isinstance(content, list) and all(map(is_part, content)))


def _find_tokens(
    apply: Callable[..., list[int]],
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[JsonObject],
    where: str,
    has_marks: bool = False,
) -> tuple[list[int], list[bool]]:
    """Return the token ids of a conversation and a mask of the assistant's tokens; ``apply`` is the chat template.

    ``has_marks`` means that the tokenizer's own template marks these tokens.
    """
    try:
        if has_marks:
            return _find_marked_tokens(tokenizer, messages)
        ids = apply(messages)
        scored = [False] * len(ids)
        for n, message in enumerate(messages):
            if message["role"] == "assistant":
                before = apply(messages[:n], add_generation_prompt=True)
                after = apply(messages[: n + 1])
                if ids[: len(after)] != after or after[: len(before)] != before:
                    raise UsageError(
                        f"{where}: the chat template rewrites what it made of earlier messages, and marks no "
                        "{% generation %}: the assistant's tokens cannot be told apart"
                    )
                turn = after[len(before) :]
                stop = len(before) + _count_generated(turn, tokenizer.eos_token_id)
                scored[len(before) : stop] = [True] * (stop - len(before))
    except UsageError:
        raise
    except Exception as error:  # jinja raises errors of many classes when a template refuses a conversation
        raise UsageError(f"{where}: the chat template refuses it: {display(str(error), 300)}") from error
    return ids, scored


def _find_marked_tokens(
    tokenizer: "PreTrainedTokenizerBase", messages: Sequence[JsonObject]
) -> tuple[list[int], list[bool]]:
    """Return the token ids of a conversation, and which of them overlap what the template marks as the assistant's.

    The mask of transformers before 5.24 reaches to the end of the conversation if marked text ends in white space.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    (text,), (spans,) = render_jinja_template(
        [list(messages)],
        chat_template=tokenizer.get_chat_template(),
        return_assistant_tokens_mask=True,
        **tokenizer.special_tokens_map,
    )
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    is_marked = [any(start < last and first < end for first, last in spans) for start, end in encoded["offset_mapping"]]
    return list(encoded["input_ids"]), is_marked


def _apply_template(tokenizer: "PreTrainedTokenizerBase", messages: Sequence[JsonObject], **more: bool) -> list[int]:
    encoded = tokenizer.apply_chat_template(list(messages), tokenize=True, return_dict=True, **more)
    return list(encoded["input_ids"])


def _count_generated(turn: Sequence[int], end: int | None) -> int:
    """Return the number of tokens that the assistant generates in a turn, including the one that ends it."""
    places = [n for n, token in enumerate(turn) if token == end]
    return places[-1] + 1 if places else len(turn)
