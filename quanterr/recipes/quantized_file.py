"""An original as a checkpoint that is quantized while it is read.

Each weight that a recipe quantizes is a file of its own with the tensors that the recipe stores. These are computed
when they are read, and not kept. So this candidate goes through the same pairing, readers and findings as one on disk.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import NamedTuple

from quanterr.checkpoints import Checkpoint, CheckpointFile, Entry
from quanterr.checkpoints.base import DTYPE_BITS, RECIPE
from quanterr.checkpoints.ggml_types import BLOCKS
from quanterr.errors import UsageError
from quanterr.lazy_torch import Tensor, torch
from quanterr.recipes.base import QUANTIZED_AS, Recipe, Rows, Source, StoredTensor
from quanterr.recipes.matrices import is_stack, matrices_of
from quanterr.recipes.scales import ScaleCache
from quanterr.selection import LayerSelection
from quanterr.util.text import count, display, itemize

# Elements measured or encoded at once: with fewer, calls from Python cost more than the cache saves.
PIECE_ELEMENTS = 1 << 19

# Codes of larger weights are not cached, as a comparison samples so few of their rows that encoding them again is
# cheap.
MAX_CACHED_ELEMENTS = 1 << 22

# Words in names of tensors that stay unquantized. Norms and biases are small and sensitive; embeddings (also T5's
# relative_attention_bias) are looked up and not multiplied; the head and the routers of experts choose among
# alternatives, where a small error changes the choice. Recipes quantize embeddings and heads only if a pattern names
# them; most programs have an option for that, and llama-quantize always quantizes them.
UNQUANTIZED_WORDS = ("norm", "bias", "router", ".gate.", "wpe")
VOCABULARY_WORDS = ("embed", "wte", "lm_head")

ImportanceOf = Callable[[str, tuple[int, ...]], Tensor | None]  # name and shape of a weight → (cols,) float32


class QuantizedFile(CheckpointFile):
    """A file with the tensors that a recipe stores for one weight, which are made while they are read."""

    is_certain = True

    def __init__(
        self,
        weight: str,
        recipe: Recipe,
        source: Source,
        rows: Rows,
        kept: ScaleCache,
        stretch: float = 1.0,
        importance: Tensor | None = None,
    ) -> None:
        """Describe the file without reading anything; ``rows`` returns rows of the weight.

        ``stretch`` multiplies the numbers that scales are derived from; ``importance`` of the columns is for
        calibrators.
        """
        self.stretch, self.importance, self.wanted = stretch, importance, recipe
        recipe = recipe.for_columns(source.cols)
        self.path = Path(recipe.name)
        self.weight, self.recipe, self.source, self.rows, self._kept = weight, recipe, source, rows, kept
        self.entries = list(self._make_entries(recipe.encoder.list_tensors(source)))
        self.size = self.entries[-1].offset + self.entries[-1].nbytes
        self._known = {
            self._expand_name(name): tensor for name, tensor in recipe.encoder.constant_tensors(source).items()
        }
        self._made = [entry.name for entry in self.entries[1:] if entry.name not in self._known]
        together = min(recipe.encoder.joint_rows(source), source.rows)
        self._together, self._unit = together, self.entries[0].nbytes * together // source.rows  # bytes of joint rows
        self._step = max(PIECE_ELEMENTS // max(source.cols, 1) // together, 1) * together
        self._keeps_codes = source.rows * source.cols <= MAX_CACHED_ELEMENTS
        self._codes = kept.codes if self._keeps_codes else kept.samples
        kept.register(self)

    @property
    def fell_back(self) -> bool:
        """True if another recipe stores the weight because its rows do not fill the blocks of the wanted one."""
        return self.recipe.name != self.wanted.name

    @property
    def shared_key(self) -> tuple[str, int]:
        """A key that recipes share if they can be measured together."""
        return self.weight, self._together

    def _expand_name(self, name: str) -> str:
        return name.format(weight=self.weight, module=self.weight.removesuffix(".weight"))

    def _make_entries(self, stored: tuple[StoredTensor, ...]) -> Iterator[Entry]:
        offset = 0
        for name, dtype, shape in stored:
            entry = Entry(self._expand_name(name), dtype, shape, self, offset, _count_bytes(dtype, shape))
            offset += entry.nbytes
            yield entry

    def __str__(self) -> str:
        return f"{display(self.recipe.name)} of {display(self.weight)}"

    @torch.inference_mode()
    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill ``view`` with the bytes from ``offset`` on.

        Raises:
            CheckpointError: the original cannot be read, or holds NaN or infinity.
        """
        for entry in self.entries:
            begin, end = max(offset, entry.offset), min(offset + len(view), entry.offset + entry.nbytes)
            if begin < end:
                into = torch.frombuffer(view[begin - offset : end - offset], dtype=torch.uint8)
                if entry is self.entries[0]:
                    self._encode(into, begin)
                else:
                    part = self._known.get(entry.name)
                    if part is None:
                        part = self._kept.get(self)[self._made.index(entry.name)]
                    stored = part.contiguous().view(-1).view(torch.uint8)
                    into.copy_(stored[begin - entry.offset : end - entry.offset])

    def _encode(self, into: Tensor, begin: int) -> None:
        """Write the bytes of the codes from ``begin`` on to ``into``."""
        settled = self._kept.get(self)
        first, last = begin // self._unit * self._together, -(-(begin + len(into)) // self._unit) * self._together
        if self._keeps_codes:  # the cache stores only whole pieces
            first, last = first // self._step * self._step, -(-last // self._step) * self._step
        done = 0
        for row, stop in self.pieces(first, min(last, self.source.rows)):
            at = row // self._together * self._unit  # offset of the piece in the entry
            size = min(-(-stop // self._together) * self._unit, self.entries[0].nbytes) - at
            skip = max(begin - at, 0)
            n = min(size - skip, len(into) - done)
            wanted = into[done : done + n]
            done += n
            if n == size and stop - row == self._step and not self._keeps_codes:
                self._encode_rows(row, stop, settled, wanted)
                continue
            make = partial(self._make_codes, row, stop, settled, size)
            wanted.copy_(self._codes.get(self, (row, stop), make)[skip : skip + n])

    def _make_codes(self, row: int, stop: int, settled: tuple[Tensor, ...], size: int) -> Tensor:
        codes = torch.empty(size, dtype=torch.uint8)
        self._encode_rows(row, stop, settled, codes)
        return codes

    def _encode_rows(self, row: int, stop: int, settled: tuple[Tensor, ...], out: Tensor) -> None:
        self.recipe.encoder.encode(self.rows(row, stop), row, settled, out, self.importance)

    def pieces(self, first: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield the spans of rows that are measured or encoded at once."""
        for row in range(first, stop, self._step):
            yield row, min(row + self._step, stop)

    def will_need(self, offset: int, n: int) -> None:
        """Do nothing, as no file need be read ahead."""

    def check_unchanged(self) -> None:
        """Do nothing, as the original's file is checked."""

    def close(self) -> None:
        """Do nothing, as no file is open."""


def _count_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    elements, n_bytes = BLOCKS.get(dtype) or (8, DTYPE_BITS[dtype])
    return prod(shape) * n_bytes // elements


class SkippedWeight(NamedTuple):
    """A weight that stays unquantized."""

    name: str
    reason: str


def choose_weights(original: Checkpoint, selection: LayerSelection) -> tuple[list[str], list[SkippedWeight]]:
    """Return the selected weights to quantize, and the matrices that stay unquantized, with the reason.

    Embeddings and heads stay unquantized unless a pattern names them.
    """
    chosen, left = [], []
    for name, entry in original.entries.items():
        if len(entry.shape) < 2 or not selection.takes(name):
            continue
        stays = UNQUANTIZED_WORDS if selection.names(name) else (*UNQUANTIZED_WORDS, *VOCABULARY_WORDS)
        skipped = next((part for part in stays if part in name.lower()), None)
        is_matrix = len(entry.shape) == 2 and name.endswith(".weight")
        if not is_matrix and not is_stack(name, entry.shape):
            why = "recipes quantize matrices X.weight and stacks of experts"
            left.append(SkippedWeight(name, f"of shape {list(entry.shape)}: {why}"))
        elif entry.dtype not in QUANTIZED_AS:
            left.append(SkippedWeight(name, f"stored as {entry.dtype}, not as floats"))
        elif skipped:
            why = "norms and routers stay unquantized, and embeddings and heads unless a pattern names them"
            left.append(SkippedWeight(name, f'"{skipped}" in its name: {why}'))
        elif not all(entry.shape):
            left.append(SkippedWeight(name, "it is empty"))
        else:
            chosen.append(name)
    return chosen, left


def quantize_by(
    recipes: Sequence[Recipe], original: Checkpoint, selection: LayerSelection, importance: ImportanceOf | None = None
) -> list[Checkpoint]:
    """Return, for each recipe, the original with the selected weights quantized; notes list those it cannot store.

    ``importance`` returns the importance of a weight's columns, if known.

    Raises:
        UsageError: there is nothing to quantize.
    """
    if not recipes:
        return []
    kept, (chosen, stay) = ScaleCache(), choose_weights(original, selection)
    return [_quantize_by_one(recipe, original, chosen, stay, importance, kept) for recipe in recipes]


def _quantize_by_one(
    recipe: Recipe,
    original: Checkpoint,
    chosen: list[str],
    stay: list[SkippedWeight],
    importance: ImportanceOf | None,
    kept: ScaleCache,
) -> Checkpoint:
    virtual, left = mix_recipes(original, dict.fromkeys(chosen, recipe), recipe.name, importance, kept)
    if len(left) == len(chosen):
        why = (left or stay)[0] if left or stay else None
        reason = f": {display(why.name)} ({why.reason})" if why else ""
        raise UsageError(f"{recipe.name}: no selected weight can be quantized{reason}")
    if left:
        names = itemize([weight.name for weight in left], 3)
        verb = "stays" if len(left) == 1 else "stay"
        note = f"{recipe.name}: {count(len(left), 'weight')} cannot be stored and {verb}: {names} ({left[0].reason})"
        return replace(virtual, notes=(note,))
    return virtual


def mix_recipes(
    original: Checkpoint,
    recipes: Mapping[str, Recipe],
    name: str,
    importance: ImportanceOf | None = None,
    kept: ScaleCache | None = None,
) -> tuple[Checkpoint, list[SkippedWeight]]:
    """Return the original with some weights quantized, each by its recipe, and the weights that cannot be stored so.

    ``importance`` returns the importance of a weight's columns; candidates may share the cache ``kept``.
    """
    entries: dict[str, Entry] = {}
    left: list[SkippedWeight] = []
    kept = kept or ScaleCache()
    for name_of_entry, entry in original.entries.items():
        recipe = recipes.get(name_of_entry)
        if recipe is None:
            entries[name_of_entry] = entry
            continue
        matrices = matrices_of(name_of_entry, original.entries)
        source = Source(*matrices[0].shape, matrices[0].dtype)
        why = recipe.encoder.explain_refusal(source)
        if why:
            left.append(SkippedWeight(name_of_entry, f"{recipe.name}: {why}"))
            entries[name_of_entry] = entry
            continue
        for each in matrices:
            columns = None if importance is None else importance(each.name, each.shape)
            for part in QuantizedFile(each.name, recipe, source, each.read, kept, importance=columns).entries:
                entries[part.name] = part
    needed = [recipe.encoder.config for recipe in recipes.values() if recipe.encoder.config]
    configs = {str(config): config for config in needed}
    config = dict(original.config)
    if len(configs) == 1:
        declared = {"quantization_config": dict(next(iter(configs.values())))}
        config["config.json"] = config.get("config.json", {}) | declared
    return Checkpoint(name, RECIPE, (), entries, (), config), left
