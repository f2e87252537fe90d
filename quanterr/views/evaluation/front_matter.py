"""The front matter of a model card: the results of an evaluation as metadata of the Hugging Face Hub.

``base_model``, ``base_model_relation`` (only together with ``base_model``) and ``model-index`` are keys of the hub;
details are under ``quanterr``. Other keys are not changed, nor is a ``model-index`` that quanterr has not written. No
value contains the path of a local folder.

Reference: the hub's model card metadata, docs/hub/model-cards.md and modelcard.md of huggingface/hub-docs.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence

from quanterr.documents.evaluation.model import Evaluated, Evaluation
from quanterr.errors import UsageError
from quanterr.util.text import display
from quanterr.views.evaluation.numbers_as_text import list_metrics

FENCE, BASE_MODEL, BASE_RELATION, MODEL_INDEX, DETAILS = (
    "---",
    "base_model",
    "base_model_relation",
    "model-index",
    "quanterr",
)
TASKS = {
    "causal": "text-generation",
    "sequence to sequence": "text2text-generation",
    "transcription": "automatic-speech-recognition",
    "encoder": "feature-extraction",
}
DIGITS = 6  # significant digits of a number

_KEY = re.compile(r"""["']?([^\s"'#:][^:"']*)["']?\s*:(\s|$)""")
_CACHED = re.compile(r"models--([\w.-]+)--([\w.-]+?)(?:/|$)")  # a folder of the hub's cache
_HUB = re.compile(r"hf://(?:models/)?([\w.-]+/[\w.-]+)")

Value = str | int | float | None | Sequence["Value"] | Mapping[str, "Value"]


def put_front_matter(text: str, where: str, evaluation: Evaluation) -> str:
    """Return a model card with the front matter of an evaluation; ``where`` names the card in errors.

    Raises:
        UsageError: the card's front matter has no end, or is not a block of keys.
    """
    mark = "\ufeff" if text.startswith("\ufeff") else ""
    newline = "\r\n" if "\r\n" in text else "\n"
    lines = text.removeprefix(mark).splitlines()
    ends = [n for n, line in enumerate(lines) if line.rstrip() == FENCE]
    present, rest = [], lines
    if ends and ends[0] == 0:
        if len(ends) < 2:
            raise UsageError(f"{where}: its front matter has no second {FENCE}: add it")
        present, rest = lines[1 : ends[1]], lines[ends[1] + 1 :]
    blocks = _split_blocks(present, where)
    made = _make_keys(evaluation)
    if MODEL_INDEX in blocks and DETAILS not in blocks:
        del made[MODEL_INDEX]  # results that quanterr has not written
    for key, value in made.items():
        blocks[key] = list(_format_mapping({key: value}))
    body = [line for block in blocks.values() for line in block]
    end = newline if text.endswith("\n") or not text else ""
    return mark + newline.join([FENCE, *body, FENCE, *([] if present or ends[:1] == [0] else [""]), *rest]) + end


def _split_blocks(lines: Sequence[str], where: str) -> dict[str, list[str]]:
    """Return the lines of each key; lines before the first key, such as comments, are stored under ""."""
    blocks: dict[str, list[str]] = {"": []}
    key = ""
    for line in lines:
        if line and not line[0].isspace() and line[0] not in "#-":
            match = _KEY.match(line)
            if match is None or line[0] in "{[":
                raise UsageError(f'{where}: its front matter is not a block of keys: "{display(line)}"')
            key = match[1].strip()
        blocks.setdefault(key, []).append(line)
    return blocks


def _make_keys(evaluation: Evaluation) -> dict[str, Value]:
    base = _find_base_model(evaluation.original)
    tokens, metrics = evaluation.tokens, list_metrics(evaluation)
    source = ", ".join(text.name for text in evaluation.texts) or _strip_folder(tokens.source)
    results: list[Value] = [
        _make_result(candidate, metrics, TASKS.get(evaluation.kind, "other"), source)
        for candidate in evaluation.candidates
    ]
    words = [word.rpartition("=") for word in evaluation.run.command]  # NAME=FILE keeps NAME
    command = [f"{display(name) if name else ''}{equal}{_strip_folder(path)}" for name, equal, path in words]
    details: dict[str, Value] = {
        "version": evaluation.tool.version,
        "verdict": "evaluated" if evaluation.verdict == "pass" and not evaluation.gates else evaluation.verdict,
        "reasons": [_strip_folders(reason) for reason in evaluation.reasons] if evaluation.verdict != "pass" else [],
        "model": evaluation.model,
        "dtype": evaluation.dtype,
        "text": source,
        "text_sha256": tokens.sha256,
        "context": tokens.context,
        "chunks": tokens.chunks,
        "command": " ".join(command) or None,
        "findings": [
            f"{_strip_folder(candidate.name)}: {finding.code}"
            for candidate in evaluation.candidates
            for finding in candidate.findings
        ],
    }
    name = (
        _strip_folder(evaluation.candidates[0].name)
        if len(evaluation.candidates) == 1
        else _strip_folder(evaluation.original)
    )
    return {
        **({BASE_MODEL: base, BASE_RELATION: "quantized"} if base else {}),
        MODEL_INDEX: [{"name": name, "results": results}],
        DETAILS: {key: value for key, value in details.items() if value not in (None, [])},
    }


def _make_result(candidate: Evaluated, metrics: Sequence[tuple[str, str]], task: str, source: str) -> Value:
    name = _strip_folder(candidate.name)
    values: list[Value] = []
    for title, metric in metrics:
        value = candidate.value(metric)
        if value is not None:
            values.append({"type": metric, "name": f"{title}, {name}", "value": value})
    return {"task": {"type": task}, "dataset": {"name": source, "type": source}, "metrics": values}


def _find_base_model(original: str) -> str | None:
    """Return the original's name on the hub; None if its path is neither an address nor in a cache of the hub."""
    if match := _HUB.match(original):
        return match[1].partition("@")[0]
    match = _CACHED.search(original.replace("\\", "/"))
    return f"{match[1]}/{match[2]}" if match else None


def _strip_folder(path: str) -> str:
    """Return the last part of a path, and addresses as they are."""
    if "://" in path:
        return display(path)
    return display(os.path.basename(path.replace("\\", "/").rstrip("/")) or path)


def _strip_folders(sentence: str) -> str:
    """Return a sentence without the folders of paths in it."""
    return display(re.sub(r"(?<![\w:/])(?:[A-Za-z]:)?[\\/](?:[^\s,;:\\/]+[\\/])+", "", sentence))


def _format_mapping(value: Mapping[str, Value], pad: str = "") -> Iterator[str]:
    """Yield the lines of a mapping in YAML; strings are quoted as in JSON, which YAML includes."""
    for key, item in value.items():
        if isinstance(item, Mapping):
            yield f"{pad}{key}:"
            yield from _format_mapping(item, f"{pad}  ")
        elif isinstance(item, Sequence) and not isinstance(item, str):
            yield f"{pad}{key}:{'' if item else ' []'}"
            for element in item:
                inner = (
                    list(_format_mapping(element, f"{pad}  "))
                    if isinstance(element, Mapping)
                    else [_format_scalar(element)]
                )
                yield f"{pad}- {inner[0].lstrip()}"
                yield from inner[1:]
        else:
            yield f"{pad}{key}: {_format_scalar(item)}"


def _format_scalar(value: Value) -> str:
    """Return a string or number in YAML; "1e-05" becomes "1.0e-05", as YAML 1.1 reads the former as a string."""
    if isinstance(value, float):
        shown = repr(float(f"{value:.{DIGITS}g}"))
        return shown.replace("e", ".0e") if "e" in shown and "." not in shown else shown
    return json.dumps(value, ensure_ascii=False)
