"""Which stored tensors of one side belong to which weight of the other; what is left over. From headers alone.

    names        equal once a known prefix is stripped from either side
    weights      every tensor that is no part of another; recognized on both sides in the same way
    pairs        each weight of the original with what the other side has of it: under the same name, fused, split,
                 stacked or tied (names.py, fusing.py), in the order and form of another program (rotary.py, gguf.py)
    leftovers    every entry of both checkpoints that is in no pair, with the reason

What headers cannot decide stays open as alternatives; choose_alternatives looks at values and decides.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from quanterr.checkpoints import Checkpoint, Entry
from quanterr.checkpoints.labels import PREFIXES
from quanterr.errors import CheckpointError, FormatMismatch
from quanterr.formats import CODE_DTYPES, Weight, explain_unsupported, is_auxiliary
from quanterr.formats.verbatim import verbatim
from quanterr.pairing.buffers import is_computed
from quanterr.pairing.fusing import Held, Holders, plain_naming, swapped
from quanterr.pairing.gguf import Translation
from quanterr.pairing.names import may_be_transposed
from quanterr.pairing.plan import COMPUTED, Alternative, Bucket, Leftover, Pair, Plan
from quanterr.pairing.rotary import in_one_order
from quanterr.pairing.sampling import NO_COPY, TRANSPOSITION
from quanterr.pairing.side import Recognized, Side
from quanterr.pairing.tied import Ties
from quanterr.pairing.views import rows_of, transposed
from quanterr.roles import role_of
from quanterr.selection import Selection
from quanterr.tensors.workspace import TORCH_DTYPES
from quanterr.util.text import display, listed

SIDES = ("original", "quantized")

WITH_HEADS = ("config.json", "params.json")  # files that give the number of heads
MOST_PADDING = 1024  # rows that writers append to a vocabulary
LONGEST_BIAS = 1 << 22  # bytes


def pair(
    original: Checkpoint, quantized: Checkpoint, selection: Selection, recognized: Recognized | None = None
) -> Plan:
    """Pair two checkpoints from their headers.

    ``recognized`` keeps the weights of the original for other calls with the same original.

    Raises:
        CheckpointError: a label in a file is damaged, or a selected tensor has an unknown dtype.
        UsageError: a pattern of the selection matches no weight.
    """
    return _Pairing(Side("original", original, recognized), Side("quantized", quantized), selection).plan()


class _Found(NamedTuple):
    """What the quantized checkpoint has of a weight of the original, and what must be true of it."""

    held: Held
    alternative: Alternative | None = None


class _Pairing:
    """Goes through the weights of the original once, then through what is left of the quantized checkpoint."""

    def __init__(self, original: Side, quantized: Side, selection: Selection) -> None:
        self.original, self.quantized, self.selection = original, quantized, selection
        self.pairs: list[Pair] = []
        self.leftovers: list[Leftover] = []
        self.prefixes = _common_prefixes(original.codes, quantized.codes)
        names = [_shared_names(side.codes, prefix) for side, prefix in self._with_prefixes()]
        both = names[0].keys() & names[1].keys()
        for side, shared in zip((original, quantized), names, strict=True):
            side.attach_siblings({shared[name] for name in both})
        # Shared name → own name, of the weights
        self.names, self.there = (
            {shared: own for shared, own in given.items() if own in side.codes}
            for given, side in zip(names, (original, quantized), strict=True)
        )
        self.extra = {shared: own for shared, own in self.there.items() if shared not in self.names}
        counterparts = {own: self.there[shared] for shared, own in self.names.items() if shared in self.there}
        self.ties = Ties(original.codes, quantized.codes, counterparts)
        self.translation = Translation.between(original.checkpoint, quantized.checkpoint)
        naming = self.translation.atoms if self.translation else plain_naming
        shapes = {own: original.codes[own].shape for own in self.names.values()} if self.extra else {}
        alone = [own for shared, own in self.names.items() if self.extra and shared not in self.there]
        self.holders = Holders(quantized, naming, shapes, alone, self.extra.values())

    def plan(self) -> Plan:
        """The whole plan."""
        self.selection.check([*self.names.values(), *self.extra])
        for side, prefix in self._with_prefixes():
            _refuse_unknown(side, prefix, self.selection)
        for shared, own in self.names.items():
            if not self.selection.takes(own):
                self._leave_both(own, self.there.get(shared), Bucket.FILTERED_OUT, "not selected")
            elif self._is_derived(own):
                self._leave(self.original, own, own, Bucket.CONSUMED, "computed by the converter")
            else:
                self._pair(shared, own)
        copies = self._pair_extra_copies()
        for shared, own in self.extra.items():
            if own not in copies and own not in self.holders.used:
                self._leave(self.quantized, shared, own, *self._why_extra(shared, self.quantized.codes[own]))
        for side in (self.original, self.quantized):
            for name in sorted(side.labels.consumed):
                self.leftovers.append(Leftover(name, side.side, Bucket.CONSUMED, "a label", (side.entries[name],)))
        self._adapt()
        return Plan(
            _with_transposed_squares(self.pairs, self.original),
            self.leftovers,
            dict(zip(SIDES, self.prefixes, strict=True)),
            {side.side: side.labels for side in (self.original, self.quantized)},
            idle=self.selection.idle([*self.names.values(), *self.extra]),
        )

    def _with_prefixes(self) -> Iterable[tuple[Side, str]]:
        return zip((self.original, self.quantized), self.prefixes, strict=True)

    def _is_derived(self, name: str) -> bool:
        return self.translation is not None and self.translation.is_derived(name)

    def _pair(self, shared: str, own: str) -> None:
        """One weight of the original, with what the quantized checkpoint has of it."""
        there, y = self.there.get(shared), None
        try:
            x = self.original.recognized(own)
            found = self._elsewhere(own, x) if there is None else self._direct(there, x)
            if found is None:
                self._leave(self.original, own, own, *self._why_absent(shared))
                return
            y = found.held
            self._add(own, x, y, there, found.alternative)
        except FormatMismatch as mismatch:
            if there is not None and self._both_verbatim(own, there, str(mismatch)):
                return
            bucket = Bucket.UNSUPPORTED
            dtypes = {self.original.codes[own].dtype, self.quantized.codes[there].dtype} if there is not None else set()
            if dtypes & CODE_DTYPES:
                bucket = Bucket.ERROR
            self._leave_both(own, there, bucket, str(mismatch), y)

    def _direct(self, there: str, x: Weight) -> _Found:
        """The quantized weight of the same name, of the original's shape or with its last axes swapped."""
        problem: FormatMismatch | None = None
        for shape in dict.fromkeys((x.shape, swapped(x.shape))):
            try:
                return _Found(Held(_cropped(x, self.quantized.recognized(there, shape)), (there,)))
            except FormatMismatch as mismatch:
                problem = problem or mismatch
        raise problem or AssertionError

    def _elsewhere(self, own: str, x: Weight) -> _Found | None:
        """The weight under other names of the quantized checkpoint; an output layer as its embedding."""
        if held := self.holders.find(own, x.shape):
            holders = listed(list(held.holders), 3)
            y = held.weight
            return _Found(held._replace(weight=replace(y, evidence=(*y.evidence, f"held by {holders}"))))
        twin = self.ties.twin(own)
        if twin is None:
            return None
        alternative = None
        if twin.copy is not None:  # only if it is that weight of the original once more
            left = self._left(self.original, own, own, *self._why_absent(own))
            alternative = Alternative(x, self.original.recognized(twin.copy), NO_COPY, leftovers=(left,))
        return _Found(self._tied(x, own, twin.there), alternative)

    def _tied(self, x: Weight, own: str, there: str) -> Held:
        """A weight of the quantized checkpoint that stands for another one, as embedding or output layer."""
        y = _cropped(x, self.quantized.recognized(there, x.shape))
        evidence = f"tied: {own} of the original stands for {there}"
        return Held(replace(y, evidence=(*y.evidence, evidence)), (there,))

    def _pair_extra_copies(self) -> set[str]:
        """Pair copies of the embedding that only the quantized checkpoint has with the original's; their names."""
        paired = set()
        for shared, own in self.extra.items():
            embedding = self.ties.original_of(own)
            if embedding is None or own in self.holders.used or not self.selection.takes(shared):
                continue
            paired.add(own)
            try:
                x = self.original.recognized(embedding)
                held = self._tied(x, embedding, own)
            except FormatMismatch as mismatch:
                self._leave(self.quantized, own, own, Bucket.UNSUPPORTED, str(mismatch))
                continue
            if x.shape == held.weight.shape:
                self.pairs.append(self._made(own, x, held.weight, embedding, (own,), None))
            else:
                reason = f"shape {list(x.shape)} of {embedding} in the original, {list(held.weight.shape)} of {own}"
                self._leave(self.quantized, own, own, Bucket.SHAPE_MISMATCH, f"{reason} in the quantized")
        return paired

    def _add(self, own: str, x: Weight, held: Held, there: str | None, alternative: Alternative | None) -> None:
        """A pair, both weights in the same orientation, order and form; or why they cannot be compared."""
        x, y = _oriented(x, held.weight, self.original)
        if "bits" in (x.encoding, y.encoding) and not _same_kind(x.codes, y.codes):
            reason = f"{x.codes.dtype} in the original, {y.codes.dtype} in the quantized: not comparable"
            bucket = Bucket.SHAPE_MISMATCH if x.shape != y.shape else Bucket.UNSUPPORTED
            self._leave_both(own, there, bucket, reason, held)
        elif x.shape != y.shape:
            place = (
                f"({y.codes.dtype}) in the quantized"
                if there is not None
                else f"in {listed(list(held.holders), 3)} of the quantized"
            )
            reason = f"shape {list(x.shape)} in the original, {list(y.shape)} {place}{_shape_hint(x.shape, y.shape)}"
            self._leave_both(own, there, Bucket.SHAPE_MISMATCH, reason, held)
        else:
            self.pairs.append(self._made(own, x, y, own, held.holders, alternative))

    def _made(
        self, name: str, x: Weight, y: Weight, own: str, holders: tuple[str, ...], alternative: Alternative | None
    ) -> Pair:
        """A pair, with all entries that it uses."""
        sides = (self.original, (own,)), (self.quantized, holders)
        codes, consumed = (
            [tuple(side.codes[name] for name in names) for side, names in sides],
            [tuple(entry for name in names for entry in side.siblings.get(name, ())) for side, names in sides],
        )
        return Pair(name, x, y, (codes[0], codes[1]), (consumed[0], consumed[1]), alternative)

    def _adapt(self) -> None:
        """Bring both weights of each pair into one order of rows and one form of values."""
        configs = [side.checkpoint.config.get(name) for side in (self.original, self.quantized) for name in WITH_HEADS]
        objects = [config for config in configs if isinstance(config, dict)]
        pairs, self.pairs = self.pairs, []
        for pair in pairs:
            try:
                adapted = self.translation.adapted(pair) if self.translation else in_one_order(pair, objects)
                self.pairs.append(adapted)
            except FormatMismatch as mismatch:
                self.leftovers += pair.left(Bucket.UNSUPPORTED, str(mismatch))

    def _both_verbatim(self, own: str, there: str, reason: str) -> bool:
        """Pair what nobody can read, which may still be the same; whether that could be done."""
        entries = self.original.codes[own], self.quantized.codes[there]
        named = (self.original, own), (self.quantized, there)
        if any(side.siblings.get(name) or side.labels.of(name) for side, name in named) or not _same_kind(*entries):
            return False
        x, y = (verbatim(own, entry, reason) for entry in entries)
        self.pairs.append(self._made(own, x, y, own, (there,), None))
        return True

    def _why_extra(self, shared: str, entry: Entry) -> tuple[Bucket, str]:
        """Where a quantized tensor ends that no weight of the original uses."""
        if self._is_derived(entry.name):
            return Bucket.CONSUMED, "computed by the converter"
        if is_auxiliary(entry.name):
            return Bucket.CONSUMED, "changes no weight"
        if is_computed(entry):
            return Bucket.CONSUMED, COMPUTED
        if not self.selection.takes(shared):
            return Bucket.FILTERED_OUT, "not selected"
        module = shared.rpartition(".")[0]
        for owner in (f"{module}.weight", module):
            if owner in self.names and owner not in self.there:
                return Bucket.UNSUPPORTED, f"part of {owner} in a layout that this version does not support"
        if _is_zero_bias(shared, entry):  # AutoGPTQ
            return Bucket.CONSUMED, "a bias of zeros, which changes nothing"
        return Bucket.ONLY_IN_QUANTIZED, "the original has no tensor of this name"

    def _why_absent(self, shared: str) -> tuple[Bucket, str]:
        """A weight without a counterpart: not stored at all, or stored in parts that no format claims."""
        module, side = shared.removesuffix(".weight"), self.quantized
        parts = [own for place in (module, shared) for own in side.by_module.get(place, ())]
        stored = {own.removeprefix(f"{module}."): side.entries[own] for own in parts}
        if not parts and is_computed(self.original.codes[self.names[shared]]):
            return Bucket.CONSUMED, COMPUTED
        if parts and (reason := explain_unsupported(stored, side.labels.config)):
            return Bucket.UNSUPPORTED, reason
        if shared.endswith(".weight") and parts:
            kinds = ", ".join(str(side.entries[own]) for own in parts[:4])
            return (
                Bucket.UNSUPPORTED,
                f"stored as {kinds}: a layout that this version does not support; see `quanterr formats`",
            )
        return Bucket.ONLY_IN_ORIGINAL, "the quantized checkpoint has no tensor of this name"

    def _left(self, side: Side, name: str, own: str, bucket: Bucket, reason: str) -> Leftover:
        """A tensor and all that belongs to it."""
        return Leftover(name, side.side, bucket, reason, (side.codes[own], *side.siblings.get(own, ())))

    def _leave(self, side: Side, name: str, own: str, bucket: Bucket, reason: str) -> None:
        self.leftovers.append(self._left(side, name, own, bucket, reason))

    def _leave_both(self, own: str, there: str | None, bucket: Bucket, reason: str, held: Held | None = None) -> None:
        """Leave a weight of the original, and what holds it in the quantized checkpoint where that is known."""
        self._leave(self.original, own, own, bucket, reason)
        if there is not None:
            self._leave(self.quantized, own, there, bucket, reason)
        for holder in held.holders if held and there is None else ():
            if holder in self.holders.used:  # else it is the other side of a tie, and a weight of its own
                self._leave(self.quantized, holder, holder, bucket, reason)


def _common_prefixes(original: Iterable[str], quantized: Iterable[str]) -> tuple[str, str]:
    """The prefixes to strip from each side so that the most names match; none where that is as good."""
    names = [set(original), set(quantized)]
    candidates = [["", *(p for p in PREFIXES if any(name.startswith(p) for name in side))] for side in names]
    stripped = [
        {p: {name.removeprefix(p) for name in side} for p in ps} for side, ps in zip(names, candidates, strict=True)
    ]
    choices = [(x, y) for x in candidates[0] for y in candidates[1] if not (x and x == y)]
    return max(choices, key=lambda pq: (len(stripped[0][pq[0]] & stripped[1][pq[1]]), -len(pq[0]) - len(pq[1])))


def _shared_names(names: Iterable[str], prefix: str) -> dict[str, str]:
    """Shared name → own name; a name keeps its prefix where another has the same without."""
    own = list(names)
    present = set(own)
    shared = {}
    for name in own:
        short = name.removeprefix(prefix)
        shared[name if short != name and short in present else short] = name
    return shared


def _refuse_unknown(side: Side, prefix: str, selection: Selection) -> None:
    """What has a dtype that safetensors may have got since is an error, unless it is left out.

    A type of GGUF is not: forks add their own, and the other layers can be compared.
    """
    unknown = [] if side.checkpoint.gguf else [entry for entry in side.entries.values() if entry.unknown]
    for entry in unknown:
        if any(selection.takes(name) for name in (entry.name, entry.name.removeprefix(prefix))):
            raise CheckpointError(f"{entry.file}: {display(entry.name)}: {entry.unknown}")


def _is_zero_bias(shared: str, entry: Entry) -> bool:
    small = shared.endswith(".bias") and not entry.unknown and entry.nbytes <= LONGEST_BIAS
    return small and not entry.read().strip(b"\0")


def _oriented(x: Weight, y: Weight, original: Side) -> tuple[Weight, Weight]:
    """The original with inputs and outputs swapped, if the other side has it so and its name allows it."""
    swap = x.shape != y.shape == swapped(x.shape) and may_be_transposed(x.name, x.shape)
    if not swap or x.encoding != "floats":
        return x, y
    evidence = f"the original is stored {list(x.shape)}, this {list(y.shape)}: transposed"
    return original.once(("transposed", x.name), lambda: transposed(x)), replace(y, evidence=(*y.evidence, evidence))


def _with_transposed_squares(pairs: Sequence[Pair], original: Side) -> list[Pair]:
    """The pairs, those of square weights that may be transposed with that as an alternative.

    Weights that are not square, whose shape decides, say whether the original is stored transposed.
    """
    transposable = [pair for pair in pairs if may_be_transposed(pair.name, pair.original.shape)]
    swaps = {pair.original.shape != pair.original.codes.shape for pair in transposable if not _is_square(pair)}
    if swaps == {False}:
        return list(pairs)
    evidence = "the original is stored [in, out]: relative error {error} on a sample once transposed"
    warning = "" if True in swaps else f"{evidence}, and no rectangular weight confirms it"
    made = []
    for pair in pairs:
        x = pair.original
        if x.encoding == "floats" and _is_square(pair) and may_be_transposed(pair.name, x.shape):
            swapped_x = original.once(("transposed", x.name), lambda x=x: transposed(x))  # type: ignore[misc]
            pair = replace(pair, alternative=Alternative(swapped_x, None, TRANSPOSITION, evidence, warning))
        made.append(pair)
    return made


def _is_square(pair: Pair) -> bool:
    shape = pair.original.shape
    return len(shape) > 1 and shape[-1] == shape[-2]


def _cropped(x: Weight, y: Weight) -> Weight:
    """A vocabulary without the rows that a writer appended to it."""
    extra = y.matrix[0] - x.matrix[0]
    padded = len(x.shape) == len(y.shape) == 2 and x.shape[1] == y.shape[1] and 0 < extra < MOST_PADDING
    if not padded or role_of(x.name) not in ("embedding", "head"):
        return y
    cropped = rows_of(y, 0, x.shape)
    return replace(cropped, warnings=(*y.warnings, f"{extra} rows more than the original has were dropped as padding"))


def _same_kind(x: Entry, y: Entry) -> bool:
    """Whether two entries can be held against each other bit by bit."""
    return x.dtype == y.dtype and x.shape == y.shape and x.dtype in TORCH_DTYPES


def _shape_hint(x: tuple[int, ...], y: tuple[int, ...]) -> str:
    if x == y[::-1]:
        return "; transposed?"
    if len(x) == len(y) == 2 and x[0] == y[0] and x[1] / max(y[1], 1) in (2, 4, 4 / 3):
        return "; packed codes without a label or config.json that names the layout?"
    if len(x) == len(y) and x[1:] == y[1:]:
        return "; fused or padded rows?"
    return ""
