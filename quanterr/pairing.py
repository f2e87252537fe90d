"""Which stored tensors of one side belong to which weight of the other; what is left over.

names      made equal by taking a known prefix from either side
weights    every tensor that is no part of another; recognized on both sides alike
pairs      weights of one name and one shape
the rest   every entry of both checkpoints that is in no pair, with the reason
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from quanterr.checkpoints import Checkpoint, Entry
from quanterr.errors import Misfit
from quanterr.formats import CODE_DTYPES, Weight, is_auxiliary, part_names, recognize
from quanterr.formats.scaled import CONFIG, common_block
from quanterr.formats.verbatim import verbatim
from quanterr.labels import PREFIXES, Labels, read_labels
from quanterr.selection import Selection
from quanterr.tensors import TORCH_DTYPES

SIDES = ("original", "quantized")


class Bucket(StrEnum):
    """Where an entry of a checkpoint ends: in exactly one of these."""

    COMPARED = "compared"
    LOSSLESS = "lossless"
    CONSUMED = "consumed"  # a scale or another part of a compared weight, or a label
    NON_FINITE = "non_finite"  # compared, but NaN or infinity was found
    SHAPE_MISMATCH = "shape_mismatch"
    ONLY_IN_ORIGINAL = "only_in_original"
    ONLY_IN_QUANTIZED = "only_in_quantized"
    UNSUPPORTED = "unsupported"
    ERROR = "error"
    FILTERED_OUT = "filtered_out"


@dataclass(frozen=True, slots=True)
class Pair:
    """A weight as both sides store it; ``name`` is the original's."""

    name: str
    original: Weight
    quantized: Weight
    consumed: tuple[tuple[Entry, ...], tuple[Entry, ...]]  # of each side: what belongs to it besides the codes


@dataclass(frozen=True, slots=True)
class Leftover:
    """Entries that are not compared, and why."""

    name: str
    side: str
    bucket: Bucket
    reason: str
    entries: tuple[Entry, ...]


@dataclass(slots=True)
class Plan:
    """What will be compared, and what not."""

    pairs: list[Pair] = field(default_factory=list)
    leftovers: list[Leftover] = field(default_factory=list)
    prefixes: dict[str, str] = field(default_factory=dict)  # side → the prefix taken from its names
    labels: dict[str, Labels] = field(default_factory=dict)
    dummies: list[str] = field(default_factory=list)  # weights with a scale that scales nothing


@dataclass(slots=True)
class _Side:
    """One checkpoint, by the names that both sides share."""

    side: str
    checkpoint: Checkpoint
    labels: Labels
    names: dict[str, str]  # shared name → own name
    by_module: dict[str, list[str]] = field(default_factory=dict)  # shared module → own names, but weight and bias
    parts: set[str] = field(default_factory=set)  # own names of parts of weights that hold codes
    siblings: dict[str, list[Entry]] = field(default_factory=dict)  # own name of the weight → what belongs to it
    expects_scale: str | None = None
    blocks: tuple[tuple[tuple[int, int], str], ...] = ()  # that config.json and the other weights tell


def pair(original: Checkpoint, quantized: Checkpoint, selection: Selection) -> Plan:
    """Pair two checkpoints from their headers.

    Raises:
        CheckpointError: a label in a file is damaged.
        UsageError: a pattern of the selection matches no weight.
    """
    plan = Plan()
    stripped = _common_prefixes(original.entries, quantized.entries)
    first, second = (
        _Side(side, checkpoint, read_labels(checkpoint), _shared_names(checkpoint.entries, prefix))
        for side, checkpoint, prefix in zip(SIDES, (original, quantized), stripped, strict=True)
    )
    plan.prefixes = dict(zip(SIDES, stripped, strict=True))
    plan.labels = {side.side: side.labels for side in (first, second)}
    _gather_parts(first)
    _gather_parts(second)
    _attach_siblings(first, second)
    _attach_siblings(second, first)
    _pair_weights(plan, first, second, selection)
    return plan


def _common_prefixes(original: Iterable[str], quantized: Iterable[str]) -> tuple[str, str]:
    """The prefixes to take from each side so that the most names match; none where that is as good."""
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


def _gather_parts(mine: _Side) -> None:
    """Find the known parts of the weights that hold codes, and whether this checkpoint uses scales."""
    entries = mine.checkpoint.entries
    scaled: list[tuple[Entry, Entry]] = []
    for name, entry in entries.items():
        if entry.dtype in CODE_DTYPES:
            parts = part_names(name, entry.dtype) & entries.keys()
            mine.parts |= parts
            scaled += [(entry, entries[part]) for part in parts]
            if parts and not mine.expects_scale:
                mine.expects_scale = f"another weight of this checkpoint has one ({min(parts)})"
    if mine.labels.method and not mine.expects_scale:
        mine.expects_scale = f"config.json says quant_method {mine.labels.method}"
    told = ((mine.labels.block, CONFIG), (common_block(scaled), "the other weights of this checkpoint"))
    mine.blocks = tuple((block, source) for block, source in told if block)
    if mine.labels.marker:  # in those files a weight without a scale has the scale 1
        mine.expects_scale = None


def _attach_siblings(mine: _Side, other: _Side) -> None:
    """Give every tensor that the other side does not have to the weight whose name it carries."""
    entries = mine.checkpoint.entries
    for shared, own in mine.names.items():
        module, _, last = shared.rpartition(".")
        if last not in ("weight", "bias"):
            mine.by_module.setdefault(module, []).append(own)
        if own in mine.labels.consumed or (shared in other.names and own not in mine.parts):
            continue
        weight = _owner(own, entries)
        if weight is not None:
            mine.siblings.setdefault(weight, []).append(entries[own])


def _owner(name: str, entries: dict[str, Entry]) -> str | None:
    """The weight that a part of that name belongs to; None for what stands alone."""
    module, _, last = name.rpartition(".")
    if last in ("weight", "bias"):
        return None
    words = last.split("_")
    prefix = module + "." if module else ""
    # experts.down_proj_scale belongs to experts.down_proj, X.scale to X.weight, X.weight.absmax to X.weight;
    # X.weight_scale_2 belongs to X.weight and not to X.weight_scale: the shortest stem
    stems = [prefix + "_".join(words[:n]) for n in range(1, len(words))]
    return next((owner for owner in (*stems, prefix + "weight", module) if owner and owner in entries), None)


def _pair_weights(plan: Plan, original: _Side, quantized: _Side, selection: Selection) -> None:
    weights = {side.side: _weights(side) for side in (original, quantized)}
    names = {shared: own for shared, own in original.names.items() if own in weights["original"]}
    extra = {s: own for s, own in quantized.names.items() if own in weights["quantized"] and s not in names}
    selection.check([*names.values(), *extra])
    for shared, own in names.items():
        there = quantized.names.get(shared)
        if there not in weights["quantized"]:
            there = None
        if not selection.takes(own):
            _leave(plan, original, own, own, Bucket.FILTERED_OUT, "not selected")
            if there:
                _leave(plan, quantized, own, there, Bucket.FILTERED_OUT, "not selected")
        elif there is None:
            _leave(plan, original, own, own, *_why_absent(shared, quantized))
        else:
            _pair_weight(plan, original, quantized, own, there)
    for shared, own in extra.items():
        bucket, reason = Bucket.ONLY_IN_QUANTIZED, "the original has no tensor of this name"
        if is_auxiliary(own):
            bucket, reason = Bucket.CONSUMED, "changes no weight"
        elif not selection.takes(shared):
            bucket, reason = Bucket.FILTERED_OUT, "not selected"
        elif weight := _part_of(shared, names, quantized):
            bucket, reason = Bucket.UNSUPPORTED, f"part of {weight} in a layout this version does not read"
        _leave(plan, quantized, shared, own, bucket, reason)
    for side in (original, quantized):
        for name in sorted(side.labels.consumed):
            entry = side.checkpoint.entries[name]
            plan.leftovers.append(Leftover(name, side.side, Bucket.CONSUMED, "a label", (entry,)))


def _weights(side: _Side) -> dict[str, None]:
    """Own names of all tensors that are no part of another, in order."""
    attached = {entry.name for siblings in side.siblings.values() for entry in siblings}
    skipped = attached | side.parts | side.labels.consumed
    return dict.fromkeys(name for name in side.checkpoint.entries if name not in skipped)


def _part_of(shared: str, names: dict[str, str], quantized: _Side) -> str | None:
    """The weight of the original that the quantized side stores under other names, this being one of them."""
    module = shared.rpartition(".")[0]
    owners = (f"{module}.weight", module)
    return next((owner for owner in owners if owner in names and owner not in quantized.names), None)


def _why_absent(shared: str, quantized: _Side) -> tuple[Bucket, str]:
    """A weight without its like: not stored at all, or stored in parts that no format claims."""
    module = shared.removesuffix(".weight")
    parts = [own for place in (module, shared) for own in quantized.by_module.get(place, ())]
    if shared.endswith(".weight") and parts:
        kinds = ", ".join(str(quantized.checkpoint.entries[own]) for own in parts[:4])
        return (
            Bucket.UNSUPPORTED,
            f"stored as {kinds}: a layout this version does not read; see `quanterr formats`",
        )
    return Bucket.ONLY_IN_ORIGINAL, "the quantized checkpoint has no tensor of this name"


def _pair_weight(plan: Plan, original: _Side, quantized: _Side, own: str, there: str) -> None:
    entries = original.checkpoint.entries[own], quantized.checkpoint.entries[there]
    try:
        x, y = _recognized(original, own), _recognized(quantized, there)
    except Misfit as misfit:
        alone = not any(
            side.siblings.get(entry.name) or side.labels.of(entry.name)
            for side, entry in zip((original, quantized), entries, strict=True)
        )
        if alone and _same_kind(*entries):  # what nobody can read may still be the same
            x, y = (verbatim(own, entry, str(misfit)) for entry in entries)
        else:
            bucket = Bucket.ERROR if any(entry.dtype in CODE_DTYPES for entry in entries) else Bucket.UNSUPPORTED
            _leave(plan, original, own, own, bucket, str(misfit))
            _leave(plan, quantized, own, there, bucket, str(misfit))
            return
    if "verbatim" in (x.format, y.format) and not _same_kind(x.codes, y.codes):
        reason = f"{x.codes.dtype} in the original, {y.codes.dtype} in the quantized: not comparable"
    elif x.shape != y.shape:
        reason = f"shape {list(x.shape)} in the original, {list(y.shape)} ({y.codes.dtype}) in the quantized"
        reason += _shape_hint(x.shape, y.shape)
    else:
        consumed = tuple(original.siblings.get(own, ())), tuple(quantized.siblings.get(there, ()))
        plan.pairs.append(Pair(own, x, y, consumed))
        if y.format == "dense" and consumed[1]:
            plan.dummies.append(own)
        return
    bucket = Bucket.SHAPE_MISMATCH if x.shape != y.shape else Bucket.UNSUPPORTED
    _leave(plan, original, own, own, bucket, reason)
    _leave(plan, quantized, own, there, bucket, reason)


def _same_kind(x: Entry, y: Entry) -> bool:
    """Whether two entries can be held against each other bit by bit."""
    return x.dtype == y.dtype and x.shape == y.shape and x.dtype in TORCH_DTYPES


def _recognized(side: _Side, name: str) -> Weight:
    if side.labels.divides:
        raise Misfit("config.json says that scales divide (weight_scale_semantics: inverse), which is not read yet")
    return recognize(
        name,
        side.checkpoint.entries,
        side.siblings.get(name, ()),
        side.labels.of(name),
        side.blocks,
        side.expects_scale,
    )


def _shape_hint(x: tuple[int, ...], y: tuple[int, ...]) -> str:
    if x == y[::-1]:
        return "; transposed?"
    if len(x) == len(y) == 2 and x[0] == y[0] and x[1] in (2 * y[1], 4 * y[1]):
        return "; packed codes of a layout this version does not read?"
    if len(x) == len(y) and x[1:] == y[1:]:
        return "; fused or padded rows?"
    return ""


def _leave(plan: Plan, side: _Side, name: str, own: str, bucket: Bucket, reason: str) -> None:
    """Put a tensor and all that belongs to it into a bucket."""
    entries = side.checkpoint.entries
    parts = [entry for entry in side.siblings.get(own, ()) if entry.name != own]
    plan.leftovers.append(Leftover(name, side.side, bucket, reason, (entries[own], *parts)))
