"""Every format that quanterr reads, one row each; the first that fits is taken.

To add a format: write its module (start from a close one, such as ct_nvfp4.py), put a golden file made by its producer
into tests/golden/, and add the module to MODULES. Another package gives its module as an entry point in the group
``quanterr.formats``.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from importlib.metadata import entry_points
from types import ModuleType
from typing import NamedTuple

from quanterr.checkpoints import Entry
from quanterr.checkpoints.ggml_types import BLOCKS
from quanterr.errors import FormatMismatch, UsageError
from quanterr.formats import (
    aqlm,
    asym_w4a8,
    awq,
    awq_w4a16,
    bitnet,
    bnb_4bit,
    bnb_int8,
    convrot_w4a4,
    ct_int,
    ct_nvfp4,
    ct_pack,
    ct_sparse,
    ctq_4bit,
    dense,
    eetq,
    exl2,
    exl3,
    fp8_cast,
    fp8_scaled,
    gemma_int,
    gguf_basic,
    gguf_codebook,
    gguf_ik,
    gguf_iq,
    gguf_k,
    gguf_low,
    gguf_trellis,
    gptq,
    hqq,
    int8_convrot,
    int8_scaled,
    jangtq,
    marlin,
    mlx,
    modelopt_int4,
    modelslim,
    mx,
    mxfp8,
    nunchaku,
    nunchaku_awq,
    nunchaku_bias,
    nvfp4,
    nvfp4_experts,
    onnx,
    paroquant,
    qqq,
    quanto,
    quark_fp4,
    quark_int4,
    quip_sharp,
    sdnq,
    sinq,
    spqr,
    svdquant,
    torchao,
    verbatim,
    vptq,
    w4afp8,
)
from quanterr.formats.base import (
    WEIGHT_SUFFIX,
    Format,
    Hints,
    Parts,
    PartSpec,
    Values,
    Weight,
    expand_templates,
    private_name,
)
from quanterr.formats.dense import CODES as CODES_OF_FLOATS
from quanterr.formats.shared.cast_codes import read_beside_scale
from quanterr.formats.shared.comfy_labels import refuse_by_name
from quanterr.formats.shared.unsupported import explain_unsupported
from quanterr.util.text import display, itemize

__all__ = [
    "FORMATS",
    "SEVERAL",
    "Format",
    "Hints",
    "Parts",
    "StoredParts",
    "Values",
    "Weight",
    "explain_unsupported",
    "find_anchored",
    "find_rows",
    "is_auxiliary",
    "recognize",
]

NO_HINTS = Hints()
SEVERAL = " + "  # joins the format names of a weight whose parts have several formats
# Writers store a scale of 1 with weights that they left unquantized.
ONES = frozenset({("F32", b"\x00\x00\x80\x3f"), ("BF16", b"\x80\x3f"), ("F16", b"\x00\x3c")})

# In the order in which recognize() tries them.
MODULES = (
    nunchaku_bias,
    dense,
    bnb_4bit,
    bnb_int8,
    ct_nvfp4,
    hqq,
    sinq,
    mlx,
    jangtq,
    mx,
    quanto,
    torchao,
    nunchaku,
    nunchaku_awq,
    mxfp8,
    sdnq,
    modelslim,
    w4afp8,
    fp8_scaled,
    svdquant,
    asym_w4a8,
    awq_w4a16,
    int8_convrot,
    int8_scaled,
    nvfp4_experts,
    convrot_w4a4,
    nvfp4,
    ctq_4bit,
    eetq,
    bitnet,
    gemma_int,
    aqlm,
    exl2,
    exl3,
    quip_sharp,
    spqr,
    vptq,
    paroquant,
    qqq,
    gptq,
    awq,
    marlin,
    ct_pack,
    ct_int,
    ct_sparse,
    modelopt_int4,
    onnx,
    quark_fp4,
    quark_int4,
    fp8_cast,
    gguf_basic,
    gguf_k,
    gguf_codebook,
    gguf_ik,
    gguf_iq,
    gguf_low,
    gguf_trellis,
    verbatim,
)
GROUP = "quanterr.formats"  # entry points of other packages


def _list_formats() -> Iterable[Format]:
    """Yield the rows of all modules; those of other packages before ``verbatim``, which takes everything.

    Raises:
        UsageError: the module of another package cannot be imported, or has a format of a name that exists.
    """
    others = [
        _load_module(entry_point.name, entry_point.value, entry_point.load)
        for entry_point in sorted(entry_points(group=GROUP))
    ]
    names = {row.name for module in MODULES for row in module.FORMATS}
    for module in (*MODULES[:-1], *others, MODULES[-1]):
        for row in module.FORMATS:
            if module in others and row.name in names:
                raise UsageError(f"{module.__name__}: a format named {display(row.name)} exists already")
            names.add(row.name)
            yield row.with_specification(module.__doc__ or "")


def _load_module(name: str, value: str, load: Callable[[], ModuleType]) -> ModuleType:
    try:
        return load()
    except Exception as error:  # whatever another package raises
        reason = f"{type(error).__name__}: {display(str(error), 200)}"
        raise UsageError(f"the format {display(name)} of a package, {value}, is not importable: {reason}") from error


FORMATS: tuple[Format, ...] = tuple(_list_formats())

# Endings of the names of tensors that accompany quantized weights and never change them: scales and zero points of
# activations and of the KV cache, and a marker.
AUXILIARY = (
    "input_scale",
    "input_scale_2",
    "scale_input",
    "input_global_scale",
    "input_zero_point",
    "activation_scale",
    "activation_scaling_factor",
    "act_scale",
    "qscale_act",
    "output_scale",
    "output_zero_point",
    "k_scale",
    "v_scale",
    "q_scale",
    "kv_scale",
    "k_cache_scale",
    "kv_cache_scale",
    "kv_cache_scaling_factor",
    "kv_cache_offset",
    "v_cache_scale",
    "prob_output_scale",
    "scaled_fp8",
)
_AUXILIARY_ENDINGS = tuple(sign + ending for ending in AUXILIARY for sign in "._")
CODE_DTYPES = frozenset({"F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "I8", *BLOCKS})


@cache
def find_rows(format_name: str) -> tuple[Format, ...]:
    """Return the rows of a weight's format; several if the weight is assembled from parts in several formats."""
    names = format_name.split(SEVERAL)
    return tuple(row for row in FORMATS if row.name in names)


def is_auxiliary(name: str) -> bool:
    """Return whether a tensor of this name never changes a weight."""
    return name.endswith(_AUXILIARY_ENDINGS) or name in AUXILIARY


def find_anchored(entries: Mapping[str, Entry]) -> dict[str, str]:
    """Map entries that hold the elements of a weight under another name to this weight: X.qweight to X.weight.

    Entries that hold no such weight are left out, and those for which each matching format lacks a part that it needs.
    """
    weights = ((name, _find_anchored_weight(entry, entries)) for name, entry in entries.items())
    return {name: weight for name, weight in weights if weight is not None}


def _find_anchored_weight(entry: Entry, entries: Mapping[str, Entry]) -> str | None:
    if not entry.name.endswith(_find_anchors()):
        return None
    for template, format in _list_anchored(entry.dtype):
        weight = _match_template(template, entry.name)
        if weight and all(
            part.optional or any(name in entries for name in part.candidates(weight)) for part in format.needs.values()
        ):
            return weight
    return None


@cache
def _list_anchored(dtype: str) -> tuple[tuple[str, Format], ...]:
    """Return the templates under which codes of this dtype have another name than the weight, with their formats."""
    rows = (row for row in FORMATS if dtype in row.codes.dtypes)
    return tuple((template, row) for row in rows for template in row.codes.names if template != "{weight}")


@cache
def _find_anchors() -> tuple[str, ...]:
    """Return the endings of code names that differ from the weight's name."""
    templates = {template for format in FORMATS for template in format.codes.names}
    return tuple(sorted(template.partition("}")[2] for template in templates - {"{weight}"}))


def _match_template(template: str, stored: str) -> str | None:
    """Return the weight for which ``template`` expands to ``stored``; None if there is none."""
    placeholder, _, ending = template.partition("}")
    if not ending or not stored.endswith(ending):
        return None
    stem = stored.removesuffix(ending)
    if placeholder == "{private":
        above, dot, last = stem.rpartition(".")
        return f"{above}{dot}{last[1:]}" if last.startswith("_") else None
    if placeholder == "{module" and stem.endswith(WEIGHT_SUFFIX):
        return None
    return stem + WEIGHT_SUFFIX if placeholder == "{module" else stem


class StoredParts:
    """The tensors of a checkpoint, in which the parts of a weight are looked up by name."""

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        """Collect the last words of all names, so that ``find`` skips templates that no stored name can match."""
        self.entries = entries
        self._words = {name.rpartition(".")[2] for name in entries}
        self._templates: dict[tuple[str, str], list[str]] = {}  # the parts' templates, by the codes' template and dtype

    def find(self, weight: str, codes: Entry) -> dict[str, Entry]:
        """Return the other parts that a weight with these codes may have, by the templates of their names."""
        key = _name_template(weight, codes.name), codes.dtype
        templates = self._templates.get(key)
        if templates is None:
            templates = self._templates[key] = [name for name in _find_part_templates(*key) if self._may_occur(name)]
        if not templates:
            return {}
        names = expand_templates(weight, templates)
        return {template: self.entries[name] for template, name in names.items() if name in self.entries}

    def _may_occur(self, template: str) -> bool:
        _, dot, last = template.partition("}")[2].rpartition(".")
        return last in self._words if dot else any(word.endswith(last) for word in self._words)


@cache
def _find_part_templates(template: str, dtype: str) -> frozenset[str]:
    """Return the name templates of all other parts, for codes with this name template and dtype."""
    return frozenset(
        name
        for format in _list_matching_formats(template, dtype)
        for part in format.needs.values()
        if part is not format.codes
        for name in part.names
    )


def _name_template(weight: str, stored: str) -> str:
    """Return the template of the codes' name, as in :class:`PartSpec`."""
    if stored == weight:
        return "{weight}"
    if stored.startswith(weight):
        return "{weight}" + stored.removeprefix(weight)
    if stored.startswith(private := private_name(weight)):
        return "{private}" + stored.removeprefix(private)
    return "{module}" + stored.removeprefix(weight.removesuffix(WEIGHT_SUFFIX))


@cache
def _list_matching_formats(template: str, dtype: str) -> tuple[Format, ...]:
    """Return the formats whose codes may have this name template and dtype."""
    return tuple(row for row in FORMATS if template in row.codes.names and dtype in row.codes.dtypes)


def recognize(
    name: str, codes: Entry, stored: StoredParts, siblings: Sequence[Entry] = (), hints: Hints = NO_HINTS
) -> Weight:
    """Return the weight ``name``, read by the first format that fits the stored tensors exactly.

    ``codes`` holds the elements; ``stored`` is the whole checkpoint; ``siblings`` are the tensors that belong to this
    weight only: a sibling that may change it and that no format uses is an error, never ignored.

    Raises:
        FormatMismatch: no format fits. The message names what was found, and what the nearest format lacks or leaves
            unused.
    """
    refuse_by_name(codes, hints)
    template, parts = _name_template(name, codes.name), stored.find(name, codes)
    candidates, fitting = _gather_each(
        template, codes.dtype, tuple([(part, entry.dtype) for part, entry in parts.items()])
    )
    stored_parts = Parts(name, {CODES: codes, **parts}, hints, stored.entries)
    for candidate in fitting:
        try:
            weight = _fit(candidate, stored_parts, siblings)
        except FormatMismatch:  # explained below, unless another format fits
            continue
        if weight is not None:
            return weight
    reason = _explain_nearest(candidates, stored_parts, siblings)
    module = name.removesuffix(WEIGHT_SUFFIX) + "."
    explained = (
        explain_unsupported({entry.name.removeprefix(module): entry for entry in (codes, *siblings)}, hints.config)
        or reason
    )
    if explained:
        raise FormatMismatch(explained)
    beside = f"; stored with it: {itemize([entry.name for entry in siblings])}" if siblings else ""
    raise FormatMismatch(f"{codes} is in a layout that this version does not support; see `quanterr formats`{beside}")


def _fit(candidate: "_Candidate", stored: Parts, siblings: Sequence[Entry]) -> Weight | None:
    """Return the weight as read by a format whose needs are met, or None if it belongs to another row.

    ``stored`` maps the templates of names to the stored tensors.
    """
    parts = {role: stored.entries[template] for role, template in candidate.templates.items()}
    weight = candidate.format.fit(Parts(stored.name, parts, stored.hints, stored.checkpoint, candidate.format.name))
    if weight is None or not (unused := _find_unused(weight, siblings)):
        return weight
    if weight.encoding == "floats" and len(unused) == 1 and "scale" in unused[0].name:
        cast_weight = read_beside_scale(
            weight.codes, unused[0], Parts(stored.name, parts, stored.hints, stored.checkpoint)
        )
        if cast_weight is not None:
            return cast_weight
    raise FormatMismatch(_explain_unused(weight, unused))


def _explain_nearest(candidates: "Iterable[_Candidate]", stored: Parts, siblings: Sequence[Entry]) -> str:
    """Return why the nearest format does not fit; empty if there is none."""
    nearest, reason = (0, 0, False), partial(str)
    for candidate in candidates:
        if candidate.problem is not None:
            description = partial(candidate.problem.describe, stored)
        else:
            try:
                _fit(candidate, stored, siblings)
                continue
            except FormatMismatch as mismatch:
                description = partial(str, str(mismatch))
        near = len(candidate.templates), candidate.named, candidate.problem is None
        if near >= nearest:  # on a tie the last format wins, as it needs the fewest tensors
            nearest, reason = near, description
    return reason()


BYTE_BITS = 8
CODES = ""  # replaces the template of the codes' name


class _Problem(NamedTuple):
    """A need of a format that the tensors stored under its names do not meet."""

    role: str
    part: PartSpec
    templates: list[str]

    def describe(self, stored: Parts) -> str:
        """Describe the problem for a weight; ``stored`` maps the templates of names to its tensors."""
        entries, codes = [stored.entries[template] for template in self.templates], stored.entries[CODES]
        if len(entries) > 1:
            return f"two tensors could be its {self.role}: {entries[0]} and {entries[1]}"
        if entries:
            return f"its {self.role} {entries[0]} should be one of {', '.join(sorted(self.part.dtypes))}"
        looked_for = itemize(self.part.candidates(stored.name), 10)
        return f"its {self.role} is missing: {codes.dtype} codes, but none of {looked_for} is stored"


class _Candidate(NamedTuple):
    """A format that may fit: the stored parts that it needs, how many of them have its names, and the last problem."""

    format: Format
    templates: dict[str, str]  # templates of names, by the part's role
    named: int
    problem: _Problem | None


@cache  # a checkpoint has only a few kinds of weights
def _gather_each(
    template: str, dtype: str, stored: tuple[tuple[str, str], ...]
) -> tuple[list[_Candidate], list[_Candidate]]:
    """Gather the parts of a weight for each format whose codes may have this name template and dtype.

    ``stored`` holds the name templates of the other stored tensors, with their dtypes. The second list is for the
    formats whose needs are met.
    """
    candidates = [_gather(format, {CODES: dtype, **dict(stored)}) for format in _list_matching_formats(template, dtype)]
    return candidates, [candidate for candidate in candidates if candidate.problem is None]


def _gather(format: Format, dtypes: Mapping[str, str]) -> _Candidate:
    """Gather the parts of a weight; ``dtypes`` maps the name templates of the stored tensors to their dtypes."""
    templates, named, problem, elements = {}, 0, None, format.codes
    for role, part in format.needs.items():
        matches = [CODES] if part is elements else [name for name in part.names if name in dtypes]
        named += bool(matches)
        if len(matches) == 1 and dtypes[matches[0]] in part.dtypes:
            templates[role] = matches[0]
        elif matches or not part.optional:
            problem = _Problem(role, part, matches)
    return _Candidate(format, templates, named, problem)


def _find_unused(weight: Weight, siblings: Sequence[Entry]) -> list[Entry]:
    """Return the siblings of a weight that its format does not use, and that may change it."""
    if not siblings:
        return []
    used_names = {entry.name for entry in weight.parts.values()}
    unused = [e for e in siblings if e.name not in used_names and not is_auxiliary(e.name)]
    are_ones = all(entry.n == 1 and (entry.dtype, entry.read()) in ONES for entry in unused)
    return [] if weight.encoding == "floats" and are_ones else unused


def _explain_unused(weight: Weight, unused: Sequence[Entry]) -> str:
    """Return why a weight is not read, and what may have left tensors beside it."""
    reason = (
        f"stored as {weight.format} ({weight.codes.dtype}), but unused: {itemize([entry.name for entry in unused])}"
    )
    if weight.encoding != "floats":
        return reason
    codes = [entry for entry in unused if entry.dtype not in CODES_OF_FLOATS and BYTE_BITS * entry.nbytes >= weight.n]
    if codes:
        return (
            f"{reason}; it is stored twice, as {weight.codes.dtype} and as the codes {codes[0]}, and programs differ "
            "in which they load: save the checkpoint with one of them"
        )
    if any("scale" in entry.name for entry in unused):
        reason += (
            "; its producer computed scales but left the weight unquantized, as llm-compressor does with layers of "
            "other classes than Linear: quantize it, or save the checkpoint without these tensors"
        )
    return reason
