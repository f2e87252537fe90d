"""Every format quanterr reads, one row each; the first that fits is taken.

To add one: write its file (start from int8_scaled.py), put a golden file made by its producer into
tests/golden/, add its rows here. Nothing else knows its name.
"""

from collections.abc import Iterable, Mapping
from functools import cache

from quanterr.checkpoints import Entry
from quanterr.checkpoints.ggml_types import BLOCKS
from quanterr.errors import Misfit
from quanterr.formats import (
    dense,
    fp8_cast,
    fp8_scaled,
    gguf_basic,
    gguf_codebook,
    gguf_iq,
    gguf_k,
    gguf_low,
    int8_scaled,
    verbatim,
)
from quanterr.formats.base import Format, Part, Parts, Values, Weight
from quanterr.labels import Label
from quanterr.text import listed

__all__ = ["FORMATS", "Format", "Parts", "Values", "Weight", "is_auxiliary", "part_names", "recognize"]

FORMATS: tuple[Format, ...] = (
    *dense.FORMATS,
    *fp8_scaled.FORMATS,
    *int8_scaled.FORMATS,
    *fp8_cast.FORMATS,
    *gguf_basic.FORMATS,
    *gguf_k.FORMATS,
    *gguf_codebook.FORMATS,
    *gguf_iq.FORMATS,
    *gguf_low.FORMATS,
    *verbatim.FORMATS,
)

# Endings of the names of tensors that belong to quantized layers and never change a weight: scales of
# activations and of the KV cache.
AUXILIARY = (
    "input_scale",
    "scale_input",
    "input_global_scale",
    "input_zero_point",
    "activation_scale",
    "act_scale",
    "qscale_act",
    "output_scale",
    "output_zero_point",
    "k_scale",
    "v_scale",
    "q_scale",
    "kv_scale",
    "k_cache_scale",
    "v_cache_scale",
    "prob_output_scale",
    "scaled_fp8",
)
CODE_DTYPES = frozenset({"F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "I8", *BLOCKS})


def is_auxiliary(name: str) -> bool:
    """Whether a tensor of this name changes no weight."""
    return any(name.endswith(("." + ending, "_" + ending)) or name == ending for ending in AUXILIARY)


def part_names(name: str, dtype: str) -> set[str]:
    """Names that the other parts of a weight may have, if ``name`` is stored as that dtype."""
    return {candidate for part in _other_parts(dtype) for candidate in part.candidates(name)}


@cache
def _other_parts(dtype: str) -> frozenset[Part]:
    """What formats need besides codes of that dtype."""
    return frozenset(
        part
        for format in FORMATS
        if dtype in format.codes.dtypes
        for part in format.needs.values()
        if part is not format.codes
    )


def recognize(
    name: str,
    entries: Mapping[str, Entry],
    siblings: Iterable[Entry] = (),
    labels: tuple[Label, ...] = (),
    blocks: tuple[tuple[tuple[int, int], str], ...] = (),
    expects_scale: str | None = None,
) -> Weight:
    """The weight of that name, by the first format that needs just what is stored.

    ``entries`` is the whole checkpoint; ``siblings`` are the tensors that belong to this weight and to
    no other: what no format uses among them is an error, never ignored.

    Raises:
        Misfit: no format fits; says what was found, what the nearest one lacks or has over.
    """
    misfits: list[Misfit] = []
    gathered: dict[int, dict[str, Entry]] = {}
    siblings = list(siblings)
    dtype = entries[name].dtype
    for format in FORMATS:
        if dtype not in format.codes.dtypes:
            continue
        try:
            key = id(format.needs)  # rows of one file share what they need
            found = gathered[key] = gathered.get(key) or _gather(format, name, entries)
            weight = format.fit(Parts(name, found, labels, blocks, expects_scale))
            if weight is not None:
                _refuse_unused(weight, siblings)
                return weight
        except Misfit as misfit:
            misfits.append(misfit)
    if misfits:  # what does not fit says more than what is lacking
        raise min(misfits, key=lambda misfit: misfit.lacking)
    beside = f" (beside it: {listed([entry.name for entry in siblings])})" if siblings else ""
    raise Misfit(f"{entries[name]} is in a layout this version does not read; see `quanterr formats`{beside}")


def _gather(format: Format, name: str, entries: Mapping[str, Entry]) -> dict[str, Entry]:
    found = {}
    for role, part in format.needs.items():
        stored = [entries[candidate] for candidate in part.candidates(name) if candidate in entries]
        if not stored:
            looked_for = listed(part.candidates(name), 10)
            reason = f"its {role} is missing: {entries[name].dtype} codes, but none of {looked_for} is stored"
            raise Misfit(reason, lacking=True)
        if len(stored) > 1:
            raise Misfit(f"two tensors could be its {role}: {stored[0]} and {stored[1]}")
        if stored[0].dtype not in part.dtypes:
            expected = ", ".join(sorted(part.dtypes))
            raise Misfit(f"its {role} {stored[0]} should be one of {expected}")
        found[role] = stored[0]
    return found


def _refuse_unused(weight: Weight, siblings: list[Entry]) -> None:
    used = {entry.name for entry in weight.parts.values()}
    unused = [e for e in siblings if e.name not in used and not is_auxiliary(e.name)]
    if unused and not (weight.format == "dense" and all(_is_one(entry) for entry in unused)):
        names = listed([entry.name for entry in unused])
        raise Misfit(f"stored as {weight.format} ({weight.codes.dtype}), but unused: {names}")


def _is_one(entry: Entry) -> bool:
    """Whether it is a dummy scale, which writers put beside weights that they did not quantize."""
    return entry.n == 1 and (entry.dtype, entry.read()) in {
        ("F32", b"\x00\x00\x80\x3f"),
        ("BF16", b"\x80\x3f"),
        ("F16", b"\x00\x3c"),
    }
