"""What is known of a runtime: the layouts that it loads, and rules that say when it does not, as rows.

Each row names the place in the runtime's code. A row was read there, unless it says that the runtime has run it.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

from quanterr.checkpoints import Entry
from quanterr.declarations import Scheme
from quanterr.documents.loading import DIFFERS, NOT_KNOWN, REFUSES, LoadingReason
from quanterr.findings.contents import Contents
from quanterr.formats import Weight
from quanterr.pairing.model import Bucket
from quanterr.util.strict_json import JsonFields
from quanterr.util.text import count

FLOAT8 = frozenset({"F8_E4M3", "F8_E5M2"})
WHOLE_ROW = -1  # the group size of weights whose rows have one scale


class Limits(NamedTuple):
    """What a runtime takes of a layout; None: anything."""

    bits: frozenset[int] | None = None
    group_sizes: frozenset[int] | None = None  # columns that share a scale; WHOLE_ROW: all
    symmetric: bool | None = None  # whether the configuration declares symmetric codes

    def find_excess(self, weight: Weight, scheme: Scheme | None) -> str:
        """Return what a weight has beyond these limits, in words; empty if nothing."""
        if self.bits is not None and weight.code_bits not in self.bits:
            return f"codes of {count(weight.code_bits or 0, 'bit')}, where it takes {_list_numbers(self.bits)}"
        if self.group_sizes is not None and (size := find_group_size(weight)) not in self.group_sizes:
            row = " or a row" if WHOLE_ROW in self.group_sizes else ""
            return f"groups of {size} columns, where it takes {_list_numbers(self.group_sizes - {WHOLE_ROW})}{row}"
        if self.symmetric is not None and scheme and scheme.is_symmetric is (not self.symmetric):
            return f"sym {str(scheme.is_symmetric).lower()}, where it takes {str(self.symmetric).lower()}"
        return ""


def _list_numbers(numbers: Iterable[int]) -> str:
    return " or ".join(map(str, sorted(numbers)))


def find_group_size(weight: Weight) -> int:
    """Return the number of columns that share a scale; WHOLE_ROW if a whole row does."""
    if weight.block_size is None or weight.block_size[-1] >= weight.matrix[1]:
        return WHOLE_ROW
    return weight.block_size[-1]


# What the kernels named Marlin take of GPTQ: those of vLLM, which SGLang has as well.
MARLIN = Limits(frozenset({4, 8}), frozenset({WHOLE_ROW, 32, 64, 128}), symmetric=True)
UNKNOWN = "has no such type of ggml"
PLAIN = "dense"  # the format of all weights that are stored as F32, F16 or BF16


class Layout(NamedTuple):
    """Formats that a runtime loads."""

    formats: frozenset[str]
    place: str
    methods: frozenset[str] = frozenset()  # quant_method of which one must be declared; empty: any, or none
    limits: Limits = Limits()
    is_run: bool = False  # the runtime has loaded such a file: tests/loaders/results.json


# What findings mean to runtimes that fuse q, k and v, and gate and up, and take one global scale for all.
OF_FUSED = {
    **dict.fromkeys(("missing_codes", "incomplete", "undeclared_codes"), REFUSES),
    **dict.fromkeys(("config_mismatch", "sibling_scales", "wrong_convention"), DIFFERS),
}


class Container(NamedTuple):
    """The only kind of files that a runtime reads: GGUF, or safetensors."""

    is_gguf: bool
    message: str  # what it says when it refuses other files
    place: str


class TensorRule(NamedTuple):
    """Tensors that a runtime refuses or misreads; empty conditions are always met."""

    runtime: str  # with its version
    place: str
    expects: str
    fails: str  # what it does with other tensors
    name: re.Pattern[str]  # name of the tensor after the module's name
    dtypes: frozenset[str] = frozenset()
    dimensions: int | None = None
    method: str = ""  # quant_method that config.json declares
    # Ending of the name of another tensor of the module → its dtypes; {}: any.
    beside: Mapping[str, frozenset[str]] = {}
    effect: str = REFUSES

    def find(self, contents: Contents) -> list[Entry]:
        """Return the tensors of a checkpoint that it concerns."""
        if self.method not in ("", contents.labels.method):
            return []
        entries = contents.checkpoint.entries
        return [entry for entry in entries.values() if self._is_met(entry, entries)]

    def _is_met(self, entry: Entry, entries: Mapping[str, Entry]) -> bool:
        match = self.name.search(entry.name)
        if match is None or (self.dtypes and entry.dtype not in self.dtypes):
            return False
        if self.dimensions is not None and (len(entry.shape) != self.dimensions or entry.n < 2):
            return False
        module = entry.name[: match.start()]
        others = ((entries.get(module + ending), dtypes) for ending, dtypes in self.beside.items())
        return all(other is not None and (not dtypes or other.dtype in dtypes) for other, dtypes in others)


class ConfigRule(NamedTuple):
    """A quantization_config that a runtime refuses or reads otherwise."""

    methods: frozenset[str]  # values of quant_method; empty: any declared method
    is_broken: Callable[[JsonFields], object]
    message: str  # follows the runtime's name
    place: str
    effect: str = REFUSES


Rule = Callable[[Contents], Iterable[LoadingReason]]


class Runtime(NamedTuple):
    """A program that loads checkpoints."""

    name: str  # the name that users type
    version: str  # the version whose source was read
    layouts: tuple[Layout, ...]
    rules: tuple[Rule, ...]  # ordered as it would fail
    configs: tuple[ConfigRule, ...] = ()
    tensors: tuple[TensorRule, ...] = ()
    findings: Mapping[str, str] = {}  # code of a finding → its effect
    read_config: Callable[[Contents], JsonFields] = lambda contents: contents.labels.config  # of the quantization
    # Yields what it refuses on several devices; the second argument is their number.
    split: Callable[[Contents, int], Iterable[LoadingReason]] | None = None
    container: Container | None = None  # None: it reads both kinds of files, or a check reports more
    other_types: str = ""  # what it does with types of ggml without a layout; empty: not known


def list_unread(contents: Contents) -> list[str]:
    """Return the names of tensors that quanterr reads in no format."""
    return [leftover.name for leftover in contents.leftovers if leftover.bucket is Bucket.ERROR]


def is_one_of(value: object, known: Collection[str]) -> bool:
    """Return whether a value of a configuration, which may be of any type, is one of these words."""
    return isinstance(value, str) and value in known


def words(text: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(text.split())


def leave_open(message: str, place: str = "", layers: Iterable[str] = ()) -> LoadingReason:
    """Return the reason that nothing is known of a runtime and a checkpoint."""
    return LoadingReason(NOT_KNOWN, message, place, list(layers))


def refuse(message: str, place: str, layers: Iterable[str] = ()) -> LoadingReason:
    """Return the reason that a runtime refuses a checkpoint."""
    return LoadingReason(REFUSES, message, place, list(layers))


def differ(message: str, place: str, layers: Iterable[str] = ()) -> LoadingReason:
    """Return the reason that a runtime loads a checkpoint, but not as it is stored."""
    return LoadingReason(DIFFERS, message, place, list(layers))
