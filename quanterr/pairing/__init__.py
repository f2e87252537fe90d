"""Which stored tensors of one side belong to which weight of the other; what is left over.

names      made equal by taking a known prefix from either side
weights    every tensor that is no part of another; recognized on both sides alike
pairs      weights of one name and one shape
the rest   every entry of both checkpoints that is in no pair, with the reason
"""

from collections.abc import Iterable
from dataclasses import replace

from quanterr.checkpoints import Checkpoint, Entry
from quanterr.checkpoints.labels import PREFIXES
from quanterr.errors import CheckpointError, FormatMismatch
from quanterr.formats import CODE_DTYPES, Weight, is_auxiliary, refused
from quanterr.formats.verbatim import verbatim
from quanterr.pairing.fusing import Composer, plain_naming, swapped
from quanterr.pairing.gguf import Translation
from quanterr.pairing.names import COPIES, EMBEDDINGS, HEADS, canonical, may_be_turned
from quanterr.pairing.plan import Bucket, Leftover, Pair, Plan
from quanterr.pairing.rotary import in_one_order
from quanterr.pairing.sampling import SAME, on_cpu, relative_error
from quanterr.pairing.side import Side
from quanterr.pairing.views import rows_of, transposed
from quanterr.roles import role_of
from quanterr.selection import Selection
from quanterr.tensors.workspace import TORCH_DTYPES
from quanterr.util.text import display, listed

SIDES = ("original", "quantized")

WITH_HEADS = ("config.json", "params.json")  # files that tell how many there are
MOST_PADDING = 1024  # rows that writers append to a vocabulary
LONGEST_BIAS = 1 << 22  # bytes


def pair(original: Checkpoint, quantized: Checkpoint, selection: Selection) -> Plan:
    """Pair two checkpoints from their headers.

    Raises:
        CheckpointError: a label in a file is damaged, or a selected tensor has an unknown dtype.
        UsageError: a pattern of the selection matches no weight.
    """
    plan = Plan()
    first, second = Side("original", original), Side("quantized", quantized)
    stripped = _common_prefixes(first.codes, second.codes)
    plan.prefixes = dict(zip(SIDES, stripped, strict=True))
    plan.labels = {side.side: side.labels for side in (first, second)}
    names = [_shared_names(side.codes, prefix) for side, prefix in zip((first, second), stripped, strict=True)]
    both = names[0].keys() & names[1].keys()
    for side, shared in zip((first, second), names, strict=True):
        side.attach_siblings({shared[name] for name in both})
    _pair_weights(plan, first, second, names, selection)
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


def _pair_weights(
    plan: Plan, original: Side, quantized: Side, stored: list[dict[str, str]], selection: Selection
) -> None:
    translation = Translation.between(original.checkpoint, quantized.checkpoint)
    names, there = (
        {shared: own for shared, own in given.items() if own in side.codes}
        for given, side in zip(stored, (original, quantized), strict=True)
    )
    extra = {shared: own for shared, own in there.items() if shared not in names}
    shapes = {own: original.codes[own].shape for own in names.values()} if extra else {}
    naming = translation.atoms if translation else plain_naming
    alone = [own for shared, own in names.items() if extra and shared not in there]
    composer = Composer.of(shapes, alone, quantized, list(extra.values()), naming)
    selection.check([*names.values(), *extra])
    for side in (original, quantized):
        _refuse_unknown(side, plan.prefixes[side.side], selection)
    for shared, own in names.items():
        other = there.get(shared)
        if not selection.takes(own):
            _leave(plan, original, own, own, Bucket.FILTERED_OUT, "not selected")
            if other:
                _leave(plan, quantized, own, other, Bucket.FILTERED_OUT, "not selected")
        elif translation and translation.is_derived(own):
            _leave(plan, original, own, own, Bucket.CONSUMED, "worked out by the converter")
        elif other is None:
            _compose(plan, original, quantized, composer, translation, shared, own)
        else:
            _pair_weight(plan, original, quantized, own, other)
    head = None
    if not any(canonical(name)[0] in HEADS for name in original.codes):  # else the embedding does not stand for it
        head = _head_without_like((own for shared, own in extra.items() if selection.takes(shared)), composer)
    if head and (embedding := _embedding(names.values())):
        _pair_tied(plan, original, quantized, embedding, head, head)
        composer.used.add(head)
    for shared, own in extra.items():
        if translation and translation.is_derived(own):
            _leave(plan, quantized, shared, own, Bucket.CONSUMED, "worked out by the converter")
        elif own not in composer.used:
            _leave(plan, quantized, shared, own, *_why_extra(shared, quantized.codes[own], names, there, selection))
    for side in (original, quantized):
        for name in sorted(side.labels.consumed):
            plan.leftovers.append(Leftover(name, side.side, Bucket.CONSUMED, "a label", (side.entries[name],)))


def _refuse_unknown(side: Side, prefix: str, selection: Selection) -> None:
    """What has a dtype that safetensors may have got since is an error, unless it is left out.

    A type of GGUF is not: forks add their own, and the other layers can be compared.
    """
    unknown = [] if side.checkpoint.gguf else [entry for entry in side.entries.values() if entry.unknown]
    for entry in unknown:
        if any(selection.takes(name) for name in (entry.name, entry.name.removeprefix(prefix))):
            raise CheckpointError(f"{entry.file}: {display(entry.name)}: {entry.unknown}")


def _compose(
    plan: Plan,
    original: Side,
    quantized: Side,
    composer: Composer,
    translation: Translation | None,
    shared: str,
    own: str,
) -> None:
    """Pair a weight that the quantized checkpoint stores under another name, if it does."""
    y: Weight | None = None
    try:
        x = original.recognized(own)
        y = composer.compose(own, x.shape)
        embedding = _embedding(quantized.codes) if canonical(own)[0] in HEADS | COPIES else None
        if y is None and embedding and _tied(original, x):
            _pair_tied(plan, original, quantized, own, embedding, own)
            return
        if y is None:
            _leave(plan, original, own, own, *_why_absent(shared, quantized))
            return
        x, y = _turned_to(x, y)
        if x.shape != y.shape:
            there = f"{list(y.shape)} in {listed(quantized.owners(y), 3)} of the quantized"
            reason = f"shape {list(x.shape)} in the original, {there}{_shape_hint(x.shape, y.shape)}"
            _refuse(plan, original, quantized, own, y, Bucket.SHAPE_MISMATCH, reason)
            return
        if translation:
            x, y = translation.adapted(x, y)
        else:
            configs = [side.checkpoint.config.get(name) for side in (original, quantized) for name in WITH_HEADS]
            x, y = in_one_order(x, y, [config for config in configs if isinstance(config, dict)])
    except FormatMismatch as mismatch:
        _refuse(plan, original, quantized, own, y, Bucket.UNSUPPORTED, str(mismatch))
        return
    holders = listed(quantized.owners(y), 3)
    _add(plan, original, quantized, own, x, replace(y, evidence=(*y.evidence, f"held by {holders}")))


def _refuse(
    plan: Plan, original: Side, quantized: Side, own: str, y: Weight | None, bucket: Bucket, reason: str
) -> None:
    """Leave a weight of the original, and what holds it in the quantized checkpoint where that is known."""
    _leave(plan, original, own, own, bucket, reason)
    for holder in quantized.owners(y) if y else ():
        _leave(plan, quantized, holder, holder, bucket, reason)


def _tied(side: Side, head: Weight) -> bool:
    """Whether an output layer is its embedding once more: only then may one stand for the other elsewhere."""
    embedding = _embedding(side.codes)
    if embedding is None:
        return True  # nothing says that it is not
    other = side.recognized(embedding)
    if other.shape != head.shape:
        return False
    with on_cpu() as workspaces:
        return relative_error(other, head, workspaces) <= SAME


def _head_without_like(extra: Iterable[str], composer: Composer) -> str | None:
    """An output layer that only the quantized checkpoint has."""
    free = (own for own in extra if own not in composer.used)
    return next((own for own in free if canonical(own) in {(head, "") for head in HEADS}), None)


def _embedding(names: Iterable[str]) -> str | None:
    """The embedding of tokens, if there is just one."""
    found = [name for name in names if canonical(name)[0] in EMBEDDINGS and canonical(name)[1] == ""]
    return found[0] if len(found) == 1 else None


def _pair_tied(plan: Plan, original: Side, quantized: Side, own: str, there: str, name: str) -> None:
    """An output layer that one side stores, with the embedding of the other, which stands for it there."""
    try:
        x = original.recognized(own)
        y = _cropped(x, quantized.recognized(there, x.shape))
    except FormatMismatch as mismatch:
        _leave(plan, original, name, own, Bucket.UNSUPPORTED, str(mismatch))
        return
    if x.shape != y.shape:
        reason = f"shape {list(x.shape)} of {own} in the original, {list(y.shape)} of {there} in the quantized"
        _leave(plan, quantized, name, there, Bucket.SHAPE_MISMATCH, reason)
        return
    said = f"tied: {own} of the original beside {there}"
    _add(plan, original, quantized, name, x, replace(y, evidence=(*y.evidence, said)))


def _add(plan: Plan, original: Side, quantized: Side, own: str, x: Weight, y: Weight) -> None:
    """A pair, with all entries that it uses."""
    codes, consumed = [], []
    for side, weight in ((original, x), (quantized, y)):
        owners = side.owners(weight)
        codes.append(tuple(side.codes[owner] for owner in owners))
        consumed.append(tuple(entry for owner in owners for entry in side.siblings.get(owner, ())))
    plan.pairs.append(Pair(own, x, y, (codes[0], codes[1]), (consumed[0], consumed[1])))
    if y.format == "dense" and consumed[1]:
        plan.dummies.append(own)


def _why_extra(
    shared: str, entry: Entry, names: dict[str, str], there: dict[str, str], selection: Selection
) -> tuple[Bucket, str]:
    """Where a quantized tensor ends that no weight of the original uses."""
    if is_auxiliary(entry.name):
        return Bucket.CONSUMED, "changes no weight"
    if not selection.takes(shared):
        return Bucket.FILTERED_OUT, "not selected"
    if weight := _part_of(shared, names, there):
        return Bucket.UNSUPPORTED, f"part of {weight} in a layout this version does not read"
    if _is_zero_bias(shared, entry):  # AutoGPTQ
        return Bucket.CONSUMED, "a bias of zeros, which changes nothing"
    return Bucket.ONLY_IN_QUANTIZED, "the original has no tensor of this name"


def _is_zero_bias(shared: str, entry: Entry) -> bool:
    small = shared.endswith(".bias") and not entry.unknown and entry.nbytes <= LONGEST_BIAS
    return small and not entry.read().strip(b"\0")


def _part_of(shared: str, names: dict[str, str], there: dict[str, str]) -> str | None:
    """The weight of the original that the quantized side stores under other names, this being one of them."""
    module = shared.rpartition(".")[0]
    owners = (f"{module}.weight", module)
    return next((owner for owner in owners if owner in names and owner not in there), None)


def _why_absent(shared: str, quantized: Side) -> tuple[Bucket, str]:
    """A weight without its like: not stored at all, or stored in parts that no format claims."""
    module = shared.removesuffix(".weight")
    parts = [own for place in (module, shared) for own in quantized.by_module.get(place, ())]
    stored = {own.removeprefix(f"{module}."): quantized.entries[own] for own in parts}
    if parts and (told := refused(stored, quantized.labels.config)):
        return Bucket.UNSUPPORTED, told
    if shared.endswith(".weight") and parts:
        kinds = ", ".join(str(quantized.entries[own]) for own in parts[:4])
        return (
            Bucket.UNSUPPORTED,
            f"stored as {kinds}: a layout this version does not read; see `quanterr formats`",
        )
    return Bucket.ONLY_IN_ORIGINAL, "the quantized checkpoint has no tensor of this name"


def _pair_weight(plan: Plan, original: Side, quantized: Side, own: str, there: str) -> None:
    entries = original.codes[own], quantized.codes[there]
    try:
        x = original.recognized(own)
        y = _cropped(x, _recognized(quantized, there, x))
        x, y = _turned_to(x, y)
    except FormatMismatch as mismatch:
        alone = not any(
            side.siblings.get(name) or side.labels.of(name) for side, name in ((original, own), (quantized, there))
        )
        if alone and _same_kind(*entries):  # what nobody can read may still be the same
            x, y = (verbatim(own, entry, str(mismatch)) for entry in entries)
        else:
            bucket = Bucket.ERROR if any(entry.dtype in CODE_DTYPES for entry in entries) else Bucket.UNSUPPORTED
            _leave(plan, original, own, own, bucket, str(mismatch))
            _leave(plan, quantized, own, there, bucket, str(mismatch))
            return
    if "verbatim" in (x.format, y.format) and not _same_kind(x.codes, y.codes):
        reason = f"{x.codes.dtype} in the original, {y.codes.dtype} in the quantized: not comparable"
    elif x.shape != y.shape:
        reason = f"shape {list(x.shape)} in the original, {list(y.shape)} ({y.codes.dtype}) in the quantized"
        reason += _shape_hint(x.shape, y.shape)
    else:
        _add(plan, original, quantized, own, x, y)
        return
    bucket = Bucket.SHAPE_MISMATCH if x.shape != y.shape else Bucket.UNSUPPORTED
    _leave(plan, original, own, own, bucket, reason)
    _leave(plan, quantized, own, there, bucket, reason)


def _recognized(quantized: Side, there: str, x: Weight) -> Weight:
    """The quantized weight, told the original's shape, or that shape with its last axes swapped."""
    try:
        return quantized.recognized(there, x.shape)
    except FormatMismatch:
        if swapped(x.shape) == x.shape:
            raise
        try:
            return quantized.recognized(there, swapped(x.shape))
        except FormatMismatch:
            pass
        raise


def _turned_to(x: Weight, y: Weight) -> tuple[Weight, Weight]:
    """The original with inputs and outputs swapped, if the other side has it so and its name allows it."""
    turned = x.shape != y.shape == swapped(x.shape) and may_be_turned(x.name, x.shape)
    if not turned or x.format != "dense":
        return x, y
    said = f"the original is stored {list(x.shape)}, this {list(y.shape)}: transposed"
    return transposed(x), replace(y, evidence=(*y.evidence, said))


def _cropped(x: Weight, y: Weight) -> Weight:
    """A vocabulary without the rows that a writer appended to it."""
    extra = y.matrix[0] - x.matrix[0]
    padded = len(x.shape) == len(y.shape) == 2 and x.shape[1] == y.shape[1] and 0 < extra < MOST_PADDING
    if not padded or role_of(x.name) not in ("embedding", "head"):
        return y
    cropped = rows_of(y, 0, x.shape)
    return replace(cropped, warnings=(*y.warnings, f"{extra} rows more than the original has were left out as padding"))


def _same_kind(x: Entry, y: Entry) -> bool:
    """Whether two entries can be held against each other bit by bit."""
    return x.dtype == y.dtype and x.shape == y.shape and x.dtype in TORCH_DTYPES


def _shape_hint(x: tuple[int, ...], y: tuple[int, ...]) -> str:
    if x == y[::-1]:
        return "; transposed?"
    if len(x) == len(y) == 2 and x[0] == y[0] and x[1] / max(y[1], 1) in (2, 4, 4 / 3):
        return "; packed codes, and no label or config.json that says of which layout?"
    if len(x) == len(y) and x[1:] == y[1:]:
        return "; fused or padded rows?"
    return ""


def _leave(plan: Plan, side: Side, name: str, own: str, bucket: Bucket, reason: str) -> None:
    """Put a tensor and all that belongs to it into a bucket."""
    plan.leftovers.append(Leftover(name, side.side, bucket, reason, (side.codes[own], *side.siblings.get(own, ()))))
