"""How programs match the names in a configuration with the modules of a model.

An entry of a list or mapping is a plain name or a pattern; each program has its own rules for both. Programs that load
a checkpoint under other names also rename the entries, so prefixes of wrappers are ignored here, and the name of a
fused module also matches its parts.

Reference: vllm-project/vllm model_executor/layers/quantization/utils/quant_utils.py is_layer_skipped and
compressed_tensors/utils.py should_ignore_layer, find_matched_target; huggingface/transformers
quantizers/quantizers_utils.py should_convert_module.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from fnmatch import translate
from functools import lru_cache

# Prefixes under which wrappers hold the same model; the longest first.
WRAPPERS = (
    "model.language_model.model.",
    "model.language_model.",
    "language_model.model.",
    "language_model.",
    "model.",
)
# Name of a part of a module that runtimes fuse → the name of the fused module.
FUSED = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    **dict.fromkeys(("query", "key", "value"), "qkv"),
    **dict.fromkeys(("to_q", "to_k", "to_v"), "to_qkv"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
    **dict.fromkeys(("w1", "w3"), "w13"),
    **dict.fromkeys(("q_a_proj", "kv_a_proj_with_mqa"), "fused_qkv_a_proj"),
    **dict.fromkeys(("in_proj_qkv", "in_proj_z"), "in_proj_qkvz"),
    **dict.fromkeys(("in_proj_b", "in_proj_a"), "in_proj_ba"),
}
# Patterns come from the file, and one with nested or many repetitions could take exponential time to match a long name.
MAX_PATTERN_LENGTH, MAX_REPETITIONS, MAX_NAME_LENGTH = 512, 8, 256
REGEX = "re:"
# An expression that matches one name; configurations of mixed precision have hundreds.
LITERAL = re.compile(r"re:\^?((?:\w|\\\W)+)\$")


class Matching(Enum):
    """The rule by which a program matches the entries of one list or mapping."""

    EXACT = "a whole name, or re: and an expression that matches from the start"
    GLOB = "a whole name, re: and an expression, or a pattern with * and ?"
    PATH = "a name, its beginning or end, or an expression that matches from the start"  # should_convert_module
    TEXT = "a text that occurs anywhere in the name, or a pattern with * and ?"
    START = "an expression that matches from the start"
    SEARCH = "a whole name, or an expression that matches anywhere"
    # As SDNQ matches entries.
    PARAMETER = "the name of a parameter or one of its components, or a pattern with *; after a dot its beginning"


class Entries:
    """The entries of a list or mapping that name modules, by the rule of the program that reads them."""

    def __init__(self, entries: Iterable[str], matching: Matching, optional: Iterable[str] = ()) -> None:
        """Compile the patterns; those that could take too long are put into ``refused``, and match nothing.

        ``optional`` are entries that need not match a module, such as those that exclude modules.
        """
        self._matching, self._names, self._texts = matching, dict[str, str](), list[str]()
        self._patterns: list[tuple[str, Callable[[str], object]]] = []
        self.refused: list[str] = []
        self._used = set(optional)
        self.all = list(entries)
        for entry in self.all:
            self._add(entry)

    def _add(self, entry: str) -> None:
        expression = _find_expression(entry, self._matching)
        if expression is None:
            literal = LITERAL.fullmatch(entry)
            name = re.sub(r"\\(.)", r"\1", literal[1]) if literal else entry
            self._names.setdefault(_unwrap(name), entry)
            if self._matching in (Matching.PATH, Matching.TEXT) and "." not in entry:
                self._texts.append(entry)
        elif (pattern := _compile(expression)) is None:
            self.refused.append(entry)
        else:
            whole = pattern.search if self._matching is Matching.SEARCH else pattern.match
            self._patterns.append((entry, whole))

    def find(self, module: str) -> str | None:
        """Return the entry that names a module; None if there is none."""
        if not self.all:
            return None
        for name in [f"{module}.weight"] if self._matching is Matching.PARAMETER else _spell(module):
            if (entry := self._find(name)) is not None:
                self._used.add(entry)
                return entry
        return None

    @property
    def idle(self) -> list[str]:
        """Entries that have matched no module so far."""
        return [entry for entry in self.all if entry not in self._used and entry not in self.refused]

    def _find(self, module: str) -> str | None:
        name = _unwrap(module)
        if (entry := self._names.get(name)) is not None:
            return entry
        if self._names and self._matching in (Matching.PATH, Matching.TEXT):
            if (
                entry := next((self._names[path] for path in _list_paths(name) if path in self._names), None)
            ) is not None:
                return entry
            matches = str.endswith if self._matching is Matching.PATH else str.__contains__
            if (entry := next((text for text in self._texts if matches(name, text)), None)) is not None:
                return entry
        if self._matching is Matching.PARAMETER and (
            words := [word for word in name.split(".") if word in self._names]
        ):
            return self._names[words[0]]
        if not self._patterns or len(module) > MAX_NAME_LENGTH:
            return None
        wrapped = _wrap(module)
        return next((entry for entry, match in self._patterns if any(match(word) for word in wrapped)), None)


def _find_expression(entry: str, matching: Matching) -> str | None:
    """Return the regular expression that an entry is; None for a plain name."""
    if matching is Matching.START:
        return entry
    if matching is Matching.PARAMETER and (entry.startswith(".") or "*" in entry):
        return re.escape(entry[1:]) if entry.startswith(".") else re.escape(entry).replace(r"\*", ".*")
    if entry.startswith(REGEX) and matching in (Matching.EXACT, Matching.GLOB):
        return None if LITERAL.fullmatch(entry) else entry.removeprefix(REGEX)
    if matching in (Matching.GLOB, Matching.TEXT) and any(sign in entry for sign in "*?["):
        return translate(entry)
    if matching in (Matching.PATH, Matching.SEARCH) and any(sign in entry for sign in "*+?^$()[]{}|\\"):
        return entry
    return None


def _compile(expression: str) -> re.Pattern[str] | None:
    repetitions = sum(expression.count(sign) for sign in "*+{")
    if len(expression) > MAX_PATTERN_LENGTH or repetitions > MAX_REPETITIONS or re.search(r"[*+}]\)[*+{]", expression):
        return None
    try:
        return re.compile(expression)
    except (re.error, OverflowError, RecursionError):
        return None


def _unwrap(name: str) -> str:
    """Return a name without the prefix of a wrapper."""
    prefix = next((prefix for prefix in WRAPPERS if name.startswith(prefix)), "")
    return name[len(prefix) :]


def _wrap(name: str) -> list[str]:
    """Return a name as stored, and with each other prefix of a wrapper."""
    bare = _unwrap(name)
    return list(dict.fromkeys((name, bare, *(prefix + bare for prefix in WRAPPERS[1:]))))


def _spell(module: str) -> Iterator[str]:
    """Yield the name of a module, then that of the fused module that contains it."""
    yield module
    parent, dot, last = module.rpartition(".")
    if fused := FUSED.get(last):
        yield parent + dot + fused


@lru_cache(maxsize=1 << 10)
def _list_paths(name: str) -> tuple[str, ...]:
    """Return all paths within a name: for a.b.c, these are a, a.b, b, b.c and c."""
    words = name.split(".")
    return tuple(".".join(words[start:stop]) for start in range(len(words)) for stop in range(len(words), start, -1))
