"""Random changes of valid inputs. Each is small and copies only what it changes; several make an input."""

import json
from collections.abc import Sequence
from random import Random
from typing import Any

NUMBERS = (0, 1, 2, 3, 4, 7, 8, 16, 31, 32, 64, 127, 128, 255, 256, 1000, 4096, 65_535, 65_536, 2**31 - 1, 2**31)
NUMBERS += (2**32 - 1, 2**32, 2**40, 2**40 + 1, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -1, -2, -(2**63))
STRANGE = (
    "",
    " ",
    "\0",
    "\x1b[2J",
    "a\n::error::b",
    "\u202egnp",
    "\ud800",
    "\U0010ffff",
    "[bold]",
    "<b>",
    "=1+1",
    "²",
    "१२",
    "1e5",
    "nan",
    "-1",
    "0x10",
    "1" * 5000,
    "x" * 5000,
    "a|b`\\",
    "../x",
    "..",
    "a/b",
    "__metadata__",
    "##[error]",
)


class Raw(str):
    """JSON text that is written as it is."""

    __slots__ = ()


class Pairs(list[tuple[str, Any]]):
    """A JSON object whose keys may occur twice."""

    __slots__ = ()


RAW = (
    Raw("NaN"),
    Raw("-Infinity"),
    Raw("1e999"),
    Raw("-0"),
    Raw("4.0"),
    Raw("1E2"),
    Raw("0.1"),
    Raw("9" * 30),
    Raw("9" * 5000),
    Raw("-" + "9" * 25),
    Raw("[" * 3000 + "]" * 3000),
    Raw('{"a":' * 3000 + "1" + "}" * 3000),
    Raw('"\\ud83d"'),
    Raw('"\\u0000"'),
    Raw("01"),
    Raw("'a'"),
    Raw("//"),
    Raw(""),
)
PLAIN_VALUES = (None, True, False, [], Pairs(), [[]], "", 0, 1, -1, 0.5, [1, 2], "a", Pairs([("a", 1)]))


_known: dict[int, tuple[Any, str]] = {}  # seeds and all that is in them, which changes leave mostly as it is


def parse(text: str | bytes) -> Any:
    """Parse JSON into a tree, which :func:`dump` writes."""
    return json.loads(text, object_pairs_hook=Pairs)


def seed(text: str | bytes) -> Any:
    """Parse a text that is changed again and again."""
    tree = parse(text)
    _remember(tree)
    return tree


def _remember(tree: Any) -> None:
    if isinstance(tree, list):
        for item in tree:
            _remember(item[1] if isinstance(tree, Pairs) else item)
        _known[id(tree)] = tree, dump(tree)


def dump(tree: Any) -> str:
    """Write a tree as JSON, or nearly JSON."""
    if known := _known.get(id(tree)):
        return known[1]
    if isinstance(tree, Raw):
        return str(tree)
    if isinstance(tree, Pairs):
        return "{" + ",".join([f"{json.dumps(key)}:{dump(value)}" for key, value in tree]) + "}"
    if isinstance(tree, list):
        return "[" + ",".join(map(dump, tree)) + "]"
    return json.dumps(tree)


def change(random: Random, tree: Any, words: Sequence[Any] = (), stop: float = 0.1) -> Any:
    """Make one change somewhere in a tree; ``words`` are values that have a meaning there."""
    if not isinstance(tree, list) or not tree or random.random() < stop:
        return other_value(random, tree, words)
    copy = type(tree)(tree)
    n = random.randrange(len(copy))
    if random.random() < 0.25:
        _rearrange(random, copy, n, words)
    elif isinstance(copy, Pairs):
        key, value = copy[n]
        copy[n] = key, change(random, value, words, stop)
    else:
        copy[n] = change(random, copy[n], words, stop)
    return copy


def _rearrange(random: Random, items: Any, n: int, words: Sequence[Any]) -> None:
    """Remove, repeat, move or rename one item."""
    other = random.randrange(len(items))
    match random.randrange(4):
        case 0:
            del items[n]
        case 1:
            items.insert(other, items[n])
        case 2:
            items[n], items[other] = items[other], items[n]
        case 3 if isinstance(items, Pairs):
            named = random.choice((items[other][0], *STRANGE, *(word for word in words if isinstance(word, str))))
            items[n] = named, items[n][1]
        case _:
            items[n] = items[other]


def other_value(random: Random, value: Any, words: Sequence[Any] = ()) -> Any:
    """Return another value, near this one or far from it."""
    choice = random.random()
    if choice < 0.35 and isinstance(value, int) and not isinstance(value, bool):
        return random.choice((value + 1, value - 1, 2 * value, -value, value // 2, 3 * value + 1, float(value % 2**60)))
    if choice < 0.35 and isinstance(value, str):
        return other_text(random, value)
    if choice < 0.6 and words:
        return random.choice(words)
    if choice < 0.75:
        return random.choice(NUMBERS)
    if choice < 0.85:
        return random.choice(STRANGE)
    return random.choice(RAW if choice < 0.92 else PLAIN_VALUES)


def other_text(random: Random, text: str) -> str:
    """Change something in a text."""
    at = random.randint(0, len(text))
    match random.randrange(5):
        case 0:
            return text[:at] + random.choice(STRANGE) + text[at:]
        case 1:
            return text[:at]
        case 2:
            return text[at:]
        case 3:
            return text[:at] + text[at + 1 :]
    return text.swapcase()


def number(random: Random, bits: int) -> int:
    """Return an interesting number of so many bits."""
    return (random.choice(NUMBERS) + random.choice((-1, 0, 0, 0, 1))) % 2**bits


def changed_seed(random: Random, seeds: Sequence[bytes]) -> bytes:
    """Return one of the seeds with up to three changes."""
    raw = random.choice(seeds)
    for _ in range(random.randint(0, 3)):
        raw = changed_bytes(random, raw)
    return raw


def changed_bytes(random: Random, raw: bytes, end: int | None = None) -> bytes:
    """Make one change within the first ``end`` bytes."""
    at = random.randint(0, min(len(raw), len(raw) if end is None else end))
    match random.randrange(7):
        case 0:
            return raw[:at] + bytes([random.randrange(256)]) + raw[at + 1 :]
        case 1:
            size = random.choice((1, 2, 4, 8))
            return raw[:at] + number(random, 8 * size).to_bytes(size, "little") + raw[at + size :]
        case 2:
            return raw[:at] + raw[at + random.choice((1, 1, 2, 4, 8, 32)) :]
        case 3:
            return raw[:at] + bytes(random.choice((1, 1, 2, 4, 8, 32))) + raw[at:]
        case 4:
            return raw[:at]
        case 5:
            begin, size = random.randint(0, len(raw)), random.randint(1, 40)
            return raw[:at] + raw[begin : begin + size] + raw[at:]
    if at < len(raw):
        return raw[:at] + bytes([raw[at] ^ 1 << random.randrange(8)]) + raw[at + 1 :]
    return raw + b"\0"


def few(random: Random, maximum: int = 3) -> int:
    """Return a small number of changes: mostly one."""
    n = 1
    while n < maximum and random.random() < 0.3:
        n += 1
    return n
