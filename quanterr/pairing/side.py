"""The weights of one checkpoint: which stored tensors hold elements, and which are parts of a weight."""

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence

from quanterr.checkpoints import Checkpoint, Entry
from quanterr.checkpoints.labels import read_labels
from quanterr.errors import FormatMismatch
from quanterr.formats import CODE_DTYPES, Hints, StoredParts, Weight, find_anchored, recognize
from quanterr.formats.shared.scale_grid import CONFIG, find_common_block
from quanterr.pairing.prism import read_rotation, warn_of_undeclared
from quanterr.pairing.transforms import Transforms
from quanterr.util.text import display

NEVER_CODES = frozenset({"F64", "F32", "F16", "BF16", "I64", "BOOL"})  # dtypes that no format uses for codes
# Last words of names that are never parts of another weight.
SEPARATE_WEIGHTS = ("weight", "bias", "e_score_correction_bias")

WeightCache = dict[Hashable, Weight]


class CheckpointSide:
    """One side of a comparison: the weights of a checkpoint by name, and the parts of each."""

    def __init__(self, side: str, checkpoint: Checkpoint, recognized: WeightCache | None = None) -> None:
        """Find the weights from headers and labels; ``recognized`` is a cache shared by sides of the same checkpoint.

        Raises:
            CheckpointError: a label or a declared rotation is damaged.
        """
        self.side, self.checkpoint, self._recognized = side, checkpoint, recognized
        self.undo_order: Callable[[str, Weight], Weight] = lambda _name, weight: weight  # restores the usual order
        self.labels = read_labels(checkpoint)
        self.transforms = Transforms(self.labels.config, checkpoint.entries)
        self.rotation = read_rotation(checkpoint)
        self.consumed = {  # entries that are neither weights nor parts of weights → what they are
            **dict.fromkeys(sorted(self.labels.consumed), "a label"),
            **dict.fromkeys(sorted(self.transforms.consumed), "the matrix of a transform"),
        }
        self.entries: Mapping[str, Entry] = checkpoint.entries
        self._stored = StoredParts(checkpoint.entries)
        self.part_of: dict[str, str] = {}  # name of a known part → its weight
        self.codes = self._find_anchored()  # weight → the entry that holds its elements
        self.siblings: dict[str, list[Entry]] = {}  # weight → its parts
        self.by_module: dict[str, list[str]] = {}  # module → its tensors, except weight and bias
        self.expects_scale: str | None = None
        self.blocks: tuple[tuple[tuple[int, int], str], ...] = ()  # (block size, its source)
        self._hints: dict[tuple[int, ...] | None, Hints] = {}  # shape → hints for weights without a label
        self._gather_parts()
        for name, entry in self.entries.items():
            if name not in self.part_of and name not in self.consumed:
                self.codes.setdefault(name, entry)

    def _find_anchored(self) -> dict[str, Entry]:
        """Map each weight whose elements are stored under another name, such as X.qweight, to that entry."""
        entries = {}
        for name, weight in find_anchored(self.entries).items():
            if weight not in self.entries:
                entries[weight] = self.entries[name]
                self.part_of[name] = weight
        return entries

    def _gather_parts(self) -> None:
        """Find the known parts of weights that hold codes, and evidence that this checkpoint uses scales."""
        scaled: list[tuple[Entry, Entry]] = []
        for name, entry in [*self.codes.items(), *self.entries.items()]:
            parts = {part.name: part for part in self._stored.find(name, entry).values()}
            for part in parts:
                self.part_of[part] = name
            if entry.dtype in CODE_DTYPES:
                scaled += [(entry, part) for part in parts.values()]
                if parts and not self.expects_scale:
                    self.expects_scale = f"another weight of this checkpoint has one ({min(parts)})"
                elif (scale := name.removesuffix("weight") + "input_scale") in self.entries and not self.expects_scale:
                    self.expects_scale = f"activations have one ({display(scale)})"
        if self.labels.method and not self.expects_scale:
            self.expects_scale = f"config.json declares quant_method {self.labels.method}"
        description = ((self.labels.block, CONFIG), (find_common_block(scaled), "the other weights of this checkpoint"))
        self.blocks = tuple((block, source) for block, source in description if block)
        if self.labels.marker:  # programs that write this marker store no scale if it is 1
            self.expects_scale = None

    def attach_siblings(self, elsewhere: Collection[str] = ()) -> None:
        """Assign each part to its weight by name; only weights remain in ``codes``.

        ``elsewhere`` are names that the other checkpoint has too: such a tensor counts as a part only if a format
        declares such a part. An original that stores only floats has no parts: a q_scale in it is an ordinary
        parameter.
        """
        plain = self.side == "original" and all(entry.dtype in NEVER_CODES for entry in self.entries.values())
        owners = {}
        for name, entry in self.entries.items():
            module, _, last = name.rpartition(".")
            if last not in ("weight", "bias"):
                self.by_module.setdefault(module, []).append(name)
            if name in self.consumed or (name in elsewhere and name not in self.part_of):
                continue
            owner = self.part_of.get(name) or (None if plain else _find_owner(name, self.codes))
            if owner is not None and self.codes.get(owner) is not entry:
                owners[name] = owner
        for name, owner in owners.items():
            while owner in owners:  # a part of a scale is a part of the weight
                owner = owners[owner]
            self.siblings.setdefault(owner, []).append(self.entries[name])
        for siblings in self.siblings.values():
            for entry in siblings:
                self.codes.pop(entry.name, None)

    def drop(self, weight: str, reason: str) -> None:
        """Count the tensors of a weight that no program uses as consumed, with the reason."""
        for entry in (self.codes.pop(weight), *self.siblings.pop(weight, ())):
            self.consumed[entry.name] = reason

    def recognize(self, weight: str, shape: tuple[int, ...] | None = None) -> Weight:
        """Return the weight of this name; ``shape`` is the original's shape, if known.

        Raises:
            FormatMismatch: no format fits, a tensor of the weight has an unknown type, or its inputs have a transform
                that cannot be undone.
        """
        if self.labels.divides:
            raise FormatMismatch(
                "config.json declares dividing scales (weight_scale_semantics: inverse), which are not supported yet"
            )
        siblings = self.siblings.get(weight, ())
        for entry in (self.codes[weight], *siblings):
            if entry.unknown:
                raise FormatMismatch(
                    entry.unknown if entry.name == weight else f"{display(entry.name)}: {entry.unknown}"
                )
        key = weight, shape, tuple(entry.name for entry in siblings)
        return self.undo_order(weight, self.memoize(key, lambda: self._recognize(weight, shape, siblings)))

    def _recognize(self, weight: str, shape: tuple[int, ...] | None, siblings: Sequence[Entry]) -> Weight:
        hints = self._make_hints(weight, shape)
        recognized = self.transforms.undo(recognize(weight, self.codes[weight], self._stored, siblings, hints))
        return self.rotation.undo(recognized) if self.rotation else warn_of_undeclared(recognized)

    def memoize(self, key: Hashable, make: Callable[[], Weight]) -> Weight:
        """Return the result of ``make``, cached under ``key`` if sides share a cache."""
        if self._recognized is None:
            return make()
        if key not in self._recognized:
            self._recognized[key] = make()
        return self._recognized[key]

    def _make_hints(self, weight: str, shape: tuple[int, ...] | None) -> Hints:
        """Return the hints for a weight; weights of the same shape without a label share one object."""
        layer_labels = self.labels.of(weight)
        if not layer_labels and shape in self._hints:
            return self._hints[shape]
        labels = self.labels
        hints = Hints(
            layer_labels, self.blocks, self.expects_scale, shape, labels.config, labels.declarations, labels.metadata
        )
        if not layer_labels:
            self._hints[shape] = hints
        return hints


def _find_owner(name: str, weights: Collection[str]) -> str | None:
    """Return the weight that a tensor of this name is a part of; None if it is no part."""
    module, _, last = name.rpartition(".")
    if last in SEPARATE_WEIGHTS:
        return None
    words = last.split("_")
    prefix = module + "." if module else ""
    if words[-1] == "bias" and last != "weight_bias" and name.removesuffix("_bias") in weights:
        return None  # experts.down_proj_bias is the bias of experts.down_proj
    # experts.down_proj_scale belongs to experts.down_proj, X.scale and X.weight.absmax to X.weight.
    # The shortest stem wins: X.weight_scale_2 belongs to X.weight and not to X.weight_scale.
    stems = [prefix + "_".join(words[:n]) for n in range(1, len(words))]
    owners = (*stems, prefix + "weight", module)
    return next((owner for owner in owners if owner and owner != name and owner in weights), None)
