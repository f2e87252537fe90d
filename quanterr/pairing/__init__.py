"""Pairing of the weights of two checkpoints from headers alone, with a reason for each tensor left over.

    names        match after a known prefix, such as ``model.``, is stripped from either side
    weights      are the tensors that are no part of another tensor; both sides recognize them in the same way
    pairs        hold each weight of the original with its counterpart, which may have the same name, be fused, split,
                 stacked or tied (names.py, fusing.py, tied.py), or have another program's names, orders and values
                 (conversion.py)
    leftovers    are all entries of both checkpoints that are in no pair, with the reason

If headers allow several interpretations of a weight, the pair keeps alternatives, and choose_alternatives compares
values to decide.
"""

from collections.abc import Iterable
from functools import partial
from math import prod
from typing import NamedTuple

from msgspec.structs import replace

from quanterr.checkpoints import Checkpoint, Entry
from quanterr.checkpoints.adapters import ADVICE, describe_adapter
from quanterr.checkpoints.labels import PREFIXES
from quanterr.errors import CheckpointError, FormatMismatch
from quanterr.formats import CODE_DTYPES, Weight, explain_unsupported, find_rows, is_auxiliary
from quanterr.formats.verbatim import verbatim
from quanterr.pairing.buffers import is_computed
from quanterr.pairing.conversion import find_conversion
from quanterr.pairing.fusing import HeldWeight, Holders, swap_last_axes
from quanterr.pairing.kernels import Kernels
from quanterr.pairing.model import COMPUTED, NOT_SELECTED, Alternative, Bucket, Contradiction, Leftover, Pair, Pairing
from quanterr.pairing.names import may_be_transposed
from quanterr.pairing.reversal import describe_reversal
from quanterr.pairing.sampling import NO_COPY, TRANSPOSITION
from quanterr.pairing.side import CheckpointSide, WeightCache
from quanterr.pairing.tied import DROPPED, TiedHead, Ties, find_tied_head
from quanterr.pairing.views import reshape_weight, take_rows, transpose_weight
from quanterr.selection import LayerSelection
from quanterr.selection.roles import role_of
from quanterr.tensors.chunks import as_matrix
from quanterr.tensors.workspace import TORCH_DTYPES
from quanterr.util.text import display, itemize

SIDES = ("original", "quantized")

MAX_PADDING_ROWS = 1024  # maximum number of rows that writers append to a vocabulary
MAX_RESHAPED_ELEMENTS = 1 << 22  # maximum size of a vector that a GGUF file stores as rows
MAX_ZERO_BIAS_BYTES = 1 << 22  # maximum size of an extra bias that is read to see whether it is zero


def pair(
    original: Checkpoint, quantized: Checkpoint, selection: LayerSelection, recognized: WeightCache | None = None
) -> Pairing:
    """Pair the weights of two checkpoints from their headers.

    ``recognized`` caches the weights of the original for further calls with the same original.

    Raises:
        CheckpointError: a label is damaged, a selected tensor has an unknown dtype, or one side is only an adapter.
        UsageError: a pattern of the selection matches no weight.
    """
    _refuse_adapters(original, quantized)
    return _Pairer(
        CheckpointSide("original", original, recognized), CheckpointSide("quantized", quantized), selection
    ).pair_all()


def _refuse_adapters(original: Checkpoint, quantized: Checkpoint) -> None:
    """Raise CheckpointError if just one of the checkpoints is an adapter; two of them can be compared."""
    descriptions = [describe_adapter(side) for side in (original, quantized)]
    if None in descriptions and (description := descriptions[0] or descriptions[1]):
        raise CheckpointError(f"{description}; {ADVICE}")


class _Counterpart(NamedTuple):
    """The counterpart of an original's weight, and an alternative that values must confirm or reject."""

    held: HeldWeight
    alternative: Alternative | None = None


class _Pairer:
    """One pass over the weights of the original, then over the remaining weights of the quantized checkpoint."""

    def __init__(self, original: CheckpointSide, quantized: CheckpointSide, selection: LayerSelection) -> None:
        self.original, self.quantized, self.selection = original, quantized, selection
        self.pairs: list[Pair] = []
        self.leftovers: list[Leftover] = []
        self.prefixes = _find_prefixes(original.codes, quantized.codes)
        names = [_map_shared_names(side.codes, prefix) for side, prefix in self._zip_prefixes()]
        both = names[0].keys() & names[1].keys()
        self.conversion = find_conversion(original.checkpoint, quantized.checkpoint)
        self.kernels = Kernels(self.conversion.mlx_side)
        for number, (side, shared) in enumerate(zip((original, quantized), names, strict=True)):
            there = self.conversion.find_counterparts(names[1 - number].values())
            side.attach_siblings({*(shared[name] for name in both), *there})
            side.undo_order = partial(self.conversion.undo_order, number)
        if dropped := _find_dropped_head(quantized):
            quantized.drop(dropped.head, DROPPED)
            if tied := _find_tied_head(original):
                original.drop(tied.head, DROPPED)
        # Name without prefix → stored name of each weight, in the original and in the quantized checkpoint.
        self.names, self.there = (
            {shared: stored for shared, stored in given.items() if stored in side.codes}
            for given, side in zip(names, (original, quantized), strict=True)
        )
        self.extra = {shared: stored for shared, stored in self.there.items() if shared not in self.names}
        counterparts = {stored: self.there[shared] for shared, stored in self.names.items() if shared in self.there}
        self.ties = Ties(original.codes, quantized.codes, counterparts)
        shapes = {stored: original.codes[stored].shape for stored in self.names.values()} if self.extra else {}
        alone = [stored for shared, stored in self.names.items() if self.extra and shared not in self.there]
        self.conversion.name_denoisers(alone, self.extra.values())
        self.holders = Holders(quantized, self.conversion, shapes, alone, self.extra.values())

    def pair_all(self) -> Pairing:
        """Pair all weights, and account for all other entries."""
        self.selection.check([*self.names.values(), *self.extra])
        for side, prefix in self._zip_prefixes():
            _refuse_unknown(side, prefix, self.selection)
        for shared, stored in self.names.items():
            if not self.selection.takes(stored):
                self._leave_both(stored, self.there.get(shared), Bucket.FILTERED_OUT, NOT_SELECTED)
            elif reason := self.conversion.explain_absence(stored):
                self._leave(self.original, stored, stored, Bucket.CONSUMED, reason)
            else:
                self._pair(shared, stored)
        copies = self._pair_extra_copies()
        for shared, stored in self.extra.items():
            if stored not in copies and stored not in self.holders.used:
                self._leave(self.quantized, shared, stored, *self._explain_extra(shared, self.quantized.codes[stored]))
        for side in (self.original, self.quantized):
            for name, reason in side.consumed.items():
                self.leftovers.append(Leftover(name, side.side, Bucket.CONSUMED, reason, (side.entries[name],)))
        self._adapt()
        return Pairing(
            self._offer_transposed_squares(),
            self.leftovers,
            dict(zip(SIDES, self.prefixes, strict=True)),
            {side.side: side.labels for side in (self.original, self.quantized)},
            key_heads=self.conversion.key_heads,
            idle=self.selection.describe_idle([*self.names.values(), *self.extra]),
        )

    def _offer_transposed_squares(self) -> list[Pair]:
        """Return the pairs; a square weight that may be transposed has the other orientation as an alternative.

        A known model prescribes the orientation. Otherwise, the shapes of its rectangular weights show whether the
        original is stored transposed, or the values do.
        """
        transposable = [pair for pair in self.pairs if may_be_transposed(pair.name, pair.original.shape)]
        swaps = {pair.original.shape != pair.original.codes.shape for pair in transposable if not _is_square(pair)}
        made = []
        for pair in self.pairs:
            x = pair.original
            if x.encoding == "floats" and _is_square(pair) and may_be_transposed(pair.name, x.shape):
                pair = self._orient_square(pair, swaps)
            made.append(pair)
        return made

    def _orient_square(self, pair: Pair, swaps: set[bool]) -> Pair:
        x = pair.original
        swapped_x = self.original.memoize(("transposed", x.name), lambda: transpose_weight(x))
        prescribed = self.conversion.stores_inputs_first(pair)
        if prescribed is not None:
            interpretations = "[in, out]", "[out, in]"
            first, other = (swapped_x, x) if prescribed else (x, swapped_x)
            said, text = interpretations if prescribed else interpretations[::-1]
            contradiction = Contradiction(f"the original {said}, as its model is stored", f"the original {text}")
            offered = Alternative(other, None, TRANSPOSITION, contradiction)
            return replace(pair, original=first, alternatives=(*pair.alternatives, offered))
        if swaps == {False}:
            return pair
        evidence = "the original is stored [in, out]: relative error {error} on a sample once transposed"
        warning = "" if True in swaps else f"{evidence}, and no rectangular weight confirms it"
        offered = Alternative(swapped_x, None, TRANSPOSITION, None, evidence, warning)
        return replace(pair, alternatives=(*pair.alternatives, offered))

    def _zip_prefixes(self) -> Iterable[tuple[CheckpointSide, str]]:
        return zip((self.original, self.quantized), self.prefixes, strict=True)

    def _pair(self, shared: str, name: str) -> None:
        """Pair one weight of the original with its counterpart, or record it as a leftover with the reason."""
        there, y = self.there.get(shared), None
        try:
            x = self.conversion.crop_vocabulary(name, self.original.recognize(name))
            counterpart = self._find_elsewhere(shared, name, x) if there is None else self._find_by_name(there, x)
            if counterpart is None:
                self._leave(self.original, name, name, *self._explain_absent(shared))
                return
            y = counterpart.held
            self._add(name, x, y, there, counterpart.alternative)
        except FormatMismatch as mismatch:
            if there is not None and self._pair_verbatim(name, there, str(mismatch)):
                return
            bucket = Bucket.UNSUPPORTED
            dtypes = (
                {self.original.codes[name].dtype, self.quantized.codes[there].dtype} if there is not None else set()
            )
            if dtypes & CODE_DTYPES:
                bucket = Bucket.ERROR
            self._leave_both(name, there, bucket, str(mismatch), y)

    def _find_by_name(self, there: str, x: Weight) -> _Counterpart:
        """Find the quantized weight of the same name, in the original's shape or with its last two axes swapped."""
        problem: FormatMismatch | None = None
        for shape in dict.fromkeys((x.shape, swap_last_axes(x.shape))):
            try:
                return _Counterpart(HeldWeight(_crop_padding(x, self.quantized.recognize(there, shape)), (there,)))
            except FormatMismatch as mismatch:
                problem = problem or mismatch
        raise problem or AssertionError

    def _find_elsewhere(self, shared: str, name: str, x: Weight) -> _Counterpart | None:
        """Find the weight under other names in the quantized checkpoint, or the weight that it is tied to."""
        if held := self.holders.find(name, x.shape):
            holders = itemize(list(held.holders), 3)
            y = held.weight
            return _Counterpart(held._replace(weight=replace(y, evidence=(*y.evidence, f"held by {holders}"))))
        twin = self.ties.find_twin(name)
        if twin is None:
            return None
        alternative = None
        if twin.copy is not None:  # valid only if the weight equals the other weight of the original
            left = self._make_leftover(self.original, name, name, *self._explain_absent(shared))
            alternative = Alternative(x, self.original.recognize(twin.copy), NO_COPY, leftovers=(left,))
        return _Counterpart(self._recognize_tied(x, name, twin.there), alternative)

    def _recognize_tied(self, x: Weight, name: str, there: str) -> HeldWeight:
        """Return the quantized weight ``there`` as the counterpart of ``x``, because the model ties them."""
        y = _crop_padding(x, self.quantized.recognize(there, x.shape))
        evidence = f"tied: {name} of the original stands for {there}"
        return HeldWeight(replace(y, evidence=(*y.evidence, evidence)), (there,))

    def _pair_extra_copies(self) -> set[str]:
        """Pair extra copies of the embedding in the quantized checkpoint with the original's; return their names."""
        paired = set()
        for shared, name in self.extra.items():
            embedding = self.ties.find_original(name)
            if embedding is None or name in self.holders.used or not self.selection.takes(shared):
                continue
            paired.add(name)
            try:
                x = self.original.recognize(embedding)
                held = self._recognize_tied(x, embedding, name)
            except FormatMismatch as mismatch:
                self._leave(self.quantized, name, name, Bucket.UNSUPPORTED, str(mismatch))
                continue
            if x.shape == held.weight.shape:
                self.pairs.append(self._make_pair(name, x, held.weight, embedding, (name,)))
            else:
                reason = f"shape {list(x.shape)} of {embedding} in the original, {list(held.weight.shape)} of {name}"
                self._leave(self.quantized, name, name, Bucket.SHAPE_MISMATCH, f"{reason} in the quantized")
        return paired

    def _add(self, name: str, x: Weight, held: HeldWeight, there: str | None, alternative: Alternative | None) -> None:
        """Add a pair with both weights in one orientation, or record both as leftovers with the reason."""
        x, y, interpretations = self.kernels.unify(*_orient(x, held.weight, self.original))
        if self.quantized.checkpoint.gguf is not None:
            y = _restore_shape(y, x.shape)
        elif self.original.checkpoint.gguf is not None:
            x = _restore_shape(x, y.shape)
        if "bits" in (x.encoding, y.encoding) and not _has_same_layout(x.codes, y.codes):
            reason = f"{x.codes.dtype} in the original, {y.codes.dtype} in the quantized: not comparable"
            bucket = Bucket.SHAPE_MISMATCH if x.shape != y.shape else Bucket.UNSUPPORTED
            self._leave_both(name, there, bucket, reason, held)
        elif x.shape != y.shape:
            place = (
                f"({y.codes.dtype}) in the quantized"
                if there is not None
                else f"in {itemize(list(held.holders), 3)} of the quantized"
            )
            reason = f"shape {list(x.shape)} in the original, {list(y.shape)} {place}{_describe_mismatch(x, y)}"
            self._leave_both(name, there, Bucket.SHAPE_MISMATCH, reason, held)
        else:
            offered = (*interpretations, *(() if alternative is None else (alternative,)))
            self.pairs.append(self._make_pair(name, x, y, name, held.holders, offered))

    def _make_pair(
        self,
        name: str,
        x: Weight,
        y: Weight,
        original_name: str,
        holders: tuple[str, ...],
        offered: tuple[Alternative, ...] = (),
    ) -> Pair:
        """Make a pair with all entries that it uses."""
        sides = (self.original, (original_name,)), (self.quantized, holders)
        codes, other_codes = [tuple([side.codes[name] for name in names]) for side, names in sides]
        consumed, other_consumed = [
            tuple([entry for name in names for entry in side.siblings.get(name, ())]) for side, names in sides
        ]
        return Pair(name, x, y, codes, other_codes, consumed, other_consumed, offered)

    def _adapt(self) -> None:
        """Bring both weights of each pair into the same order of axes and rows, and the same form of values."""
        pairs, self.pairs = self.pairs, []
        for pair in pairs:
            try:
                self.pairs.append(self.conversion.adapt(self.kernels.settle(pair)))
            except FormatMismatch as mismatch:
                self.leftovers += pair.leave(Bucket.UNSUPPORTED, str(mismatch))

    def _pair_verbatim(self, stored_name: str, there: str, reason: str) -> bool:
        """Pair two tensors of an unreadable format to compare their bits; return False if that is impossible."""
        entries = self.original.codes[stored_name], self.quantized.codes[there]
        named = (self.original, stored_name), (self.quantized, there)
        if any(side.siblings.get(name) or side.labels.of(name) for side, name in named) or not _has_same_layout(
            *entries
        ):
            return False
        if any(side.transforms.applies_to(name, side.codes[name].shape) for side, name in named):
            return False  # the model's weights also depend on the transform, not only on these bytes
        x, y = (verbatim(stored_name, entry, reason) for entry in entries)
        self.pairs.append(self._make_pair(stored_name, x, y, stored_name, (there,)))
        return True

    def _explain_extra(self, shared: str, entry: Entry) -> tuple[Bucket, str]:
        """Return the bucket and the reason for a quantized tensor that no weight of the original uses."""
        if reason := self.conversion.explain_absence(entry.name):
            return Bucket.CONSUMED, reason
        if is_auxiliary(entry.name):
            return Bucket.CONSUMED, "does not affect any weight"
        if reason := self.quantized.transforms.explain(entry.name):
            return Bucket.UNSUPPORTED, reason
        if is_computed(entry):
            return Bucket.CONSUMED, COMPUTED
        if not self.selection.takes(shared):
            return Bucket.FILTERED_OUT, NOT_SELECTED
        module = shared.rpartition(".")[0]
        for owner in (f"{module}.weight", module):
            if owner in self.names and owner not in self.there:
                return Bucket.UNSUPPORTED, f"part of {owner} in a layout that this version does not support"
        small = shared.endswith(".bias") and not entry.unknown and entry.nbytes <= MAX_ZERO_BIAS_BYTES
        if small and not entry.read().strip(b"\0"):  # AutoGPTQ adds these
            return Bucket.CONSUMED, "a bias of zeros, which changes nothing"
        if reason := self.conversion.explain_omission(entry.name):
            return Bucket.FILTERED_OUT, reason
        return Bucket.ONLY_IN_QUANTIZED, "the original has no tensor of this name"

    def _explain_absent(self, shared: str) -> tuple[Bucket, str]:
        """Return the bucket and the reason for a weight that is not stored, or only in parts of an unknown format."""
        side, module = self.quantized, shared.removesuffix(".weight")
        places = dict.fromkeys(prefix + name for prefix in ("", self.prefixes[1]) for name in (module, shared))
        parts = [part for place in places for part in side.by_module.get(place, ())]
        stored = {part.removeprefix(self.prefixes[1]).removeprefix(f"{module}."): side.entries[part] for part in parts}
        if not parts and is_computed(self.original.codes[self.names[shared]]):
            return Bucket.CONSUMED, COMPUTED
        if parts and (reason := explain_unsupported(stored, side.labels.config)):
            return Bucket.UNSUPPORTED, reason
        if shared.endswith(".weight") and parts:
            descriptions = ", ".join(str(side.entries[part]) for part in parts[:4])
            return (
                Bucket.UNSUPPORTED,
                f"stored as {descriptions}: its codes are missing, or in a layout that this version does not support; "
                "see `quanterr formats`",
            )
        if reason := self.conversion.explain_omission(self.names[shared]):
            return Bucket.FILTERED_OUT, reason
        return Bucket.ONLY_IN_ORIGINAL, "the quantized checkpoint has no tensor of this name"

    def _make_leftover(
        self, side: CheckpointSide, name: str, stored_name: str, bucket: Bucket, reason: str
    ) -> Leftover:
        """Make a leftover of a tensor and all its parts."""
        return Leftover(name, side.side, bucket, reason, (side.codes[stored_name], *side.siblings.get(stored_name, ())))

    def _leave(self, side: CheckpointSide, name: str, stored_name: str, bucket: Bucket, reason: str) -> None:
        self.leftovers.append(self._make_leftover(side, name, stored_name, bucket, reason))

    def _leave_both(
        self, name: str, there: str | None, bucket: Bucket, reason: str, held: HeldWeight | None = None
    ) -> None:
        """Record a weight of the original as a leftover, and also the quantized weights that hold it, if known."""
        self._leave(self.original, name, name, bucket, reason)
        if there is not None:
            self._leave(self.quantized, name, there, bucket, reason)
        for holder in held.holders if held and there is None else ():
            if holder in self.holders.used:  # otherwise the holder is a tied weight, which has its own pair
                self._leave(self.quantized, holder, holder, bucket, reason)


def _find_prefixes(original: Iterable[str], quantized: Iterable[str]) -> tuple[str, str]:
    """Return the prefix to strip from each side so that the most names match; prefer short or empty prefixes."""
    names = [set(original), set(quantized)]
    if names[0] <= names[1] or names[1] <= names[0]:  # no prefix makes more names match
        return "", ""
    candidates = [["", *(p for p in PREFIXES if any(name.startswith(p) for name in side))] for side in names]
    stripped = [
        {p: {name.removeprefix(p) for name in side} for p in ps} for side, ps in zip(names, candidates, strict=True)
    ]
    choices = [(x, y) for x in candidates[0] for y in candidates[1] if not (x and x == y)]
    return max(choices, key=lambda pq: (len(stripped[0][pq[0]] & stripped[1][pq[1]]), -len(pq[0]) - len(pq[1])))


def _map_shared_names(names: Iterable[str], prefix: str) -> dict[str, str]:
    """Map names without the prefix to stored names; a name keeps its prefix if the name without it exists as well."""
    stored_names = list(names)
    present = set(stored_names)
    shared = {}
    for name in stored_names:
        short = name.removeprefix(prefix)
        shared[name if short != name and short in present else short] = name
    return shared


def _refuse_unknown(side: CheckpointSide, prefix: str, selection: LayerSelection) -> None:
    """Raise CheckpointError if a selected safetensors entry has an unknown, perhaps newer dtype.

    Unknown types of GGUF are accepted: forks add their own, and the other layers can still be compared.
    """
    unknown = [] if side.checkpoint.gguf else [entry for entry in side.entries.values() if entry.unknown]
    for entry in unknown:
        if any(selection.takes(name) for name in (entry.name, entry.name.removeprefix(prefix))):
            raise CheckpointError(f"{entry.file}: {display(entry.name)}: {entry.unknown}")


def _orient(x: Weight, y: Weight, original: CheckpointSide) -> tuple[Weight, Weight]:
    """Transpose the original if the quantized side stores inputs and outputs swapped and the name allows that."""
    swap = x.shape != y.shape == swap_last_axes(x.shape) and may_be_transposed(x.name, x.shape)
    if not swap or x.encoding != "floats":
        return x, y
    evidence = f"the original is stored {list(x.shape)}, this {list(y.shape)}: transposed"
    return original.memoize(("transposed", x.name), lambda: transpose_weight(x)), replace(
        y, evidence=(*y.evidence, evidence)
    )


def _find_tied_head(side: CheckpointSide) -> TiedHead | None:
    return find_tied_head(side.checkpoint.config.get("config.json", {}), side.codes)


def _find_dropped_head(side: CheckpointSide) -> TiedHead | None:
    """Return an output layer that loaders replace by the embedding although it may differ, as one is quantized."""
    tied = _find_tied_head(side)
    if tied is None:
        return None
    try:
        head, embedding = (side.recognize(name) for name in tied)
    except FormatMismatch:  # pairing reports why
        return None
    takes_head = any(row.takes_tied_head for row in find_rows(head.format))
    return tied if (head.has_codes or embedding.has_codes) and not takes_head else None


def _is_square(pair: Pair) -> bool:
    shape = pair.original.shape
    return len(shape) > 1 and shape[-1] == shape[-2]


def _crop_padding(x: Weight, y: Weight) -> Weight:
    """Return a vocabulary weight without the padding rows that a writer appended."""
    if x.shape == y.shape:
        return y
    extra = y.matrix[0] - x.matrix[0]
    padded = len(x.shape) == len(y.shape) == 2 and x.shape[1] == y.shape[1] and 0 < extra <= MAX_PADDING_ROWS
    if not padded or role_of(x.name) not in ("embedding", "head"):
        return y
    return take_rows(y, 0, x.shape)


def _restore_shape(y: Weight, shape: tuple[int, ...]) -> Weight:
    """Return a weight of a GGUF file in the original's shape, if only axes of length 1 differ or a vector was cut.

    Elements keep their order: [C, 1, K] is stored as [C, K], [H] as [H, 1], and a vector as rows of equal length.
    """
    if y.shape == shape or prod(y.shape) != prod(shape):
        return y
    without_ones = [[n for n in each if n != 1] for each in (y.shape, shape)]
    if without_ones[0] != without_ones[1] and not (len(shape) == 1 and len(y.shape) == 2):
        return y
    return reshape_weight(y, shape) if y.n <= MAX_RESHAPED_ELEMENTS or as_matrix(shape) == y.matrix else y


def _has_same_layout(x: Entry, y: Entry) -> bool:
    """Return whether two entries can be compared bit by bit."""
    return x.dtype == y.dtype and x.shape == y.shape and x.dtype in TORCH_DTYPES


def _describe_mismatch(x: Weight, y: Weight) -> str:
    if x.shape == y.shape[::-1]:
        return describe_reversal(x, y) if len(x.shape) == 2 else "; transposed?"
    is_matrix = len(x.shape) == len(y.shape) == 2
    if is_matrix and x.shape[0] == y.shape[0] and x.shape[1] / max(y.shape[1], 1) in (2, 4, 4 / 3):
        return "; packed codes without a label or config.json that names the layout?"
    if len(x.shape) == len(y.shape) and x.shape[1:] == y.shape[1:]:
        return "; fused or padded rows?"
    return ""
