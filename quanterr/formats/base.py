"""The building blocks of a format: data that describes a layout, and a function that recognizes it.

A format is a row of data (the stored tensors it needs, with names and dtypes) and one function, ``fit``, which
checks shapes and labels and returns a :class:`Weight` that dequantizes any chunk.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from math import prod
from typing import Literal, NamedTuple, TypedDict, Unpack, overload

from msgspec import Struct, field
from msgspec.structs import replace

from quanterr.checkpoints import Entry
from quanterr.checkpoints.labels import Label
from quanterr.declarations import NOTHING, Declarations
from quanterr.errors import FormatMismatch
from quanterr.kernel.decoder import Decoder, ElementType, Order
from quanterr.kernel.interpreter import Native, Values, decoder_of
from quanterr.kernel.levels import Levels, ScaleSteps, Scaling, derive_scaling
from quanterr.lazy_torch import Tensor
from quanterr.tensors.chunks import Chunk, as_matrix
from quanterr.tensors.workspace import FilledWorkspace, Workspace
from quanterr.util.strict_json import JsonFields

# Everything that a format's module imports from here.
__all__ = [
    "FUSED",
    "WEIGHT_SUFFIX",
    "Branch",
    "Chunk",
    "Decoder",
    "Dequantize",
    "ElementType",
    "Encoding",
    "Format",
    "FormatMismatch",
    "Hints",
    "InputRotation",
    "LazyWeights",
    "Order",
    "PartSpec",
    "Parts",
    "RotatedWeight",
    "Values",
    "Weight",
    "Workspace",
    "expand_templates",
    "names_for",
    "private_name",
]

WEIGHT_SUFFIX = ".weight"
# Meaning of a weight's stored bytes: plain numbers; FP8 numbers without a scale; codes that need scales or tables;
# bits that can only be compared for equality.
Encoding = Literal["floats", "cast", "codes", "bits"]
FilledWorkspaces = tuple[FilledWorkspace, FilledWorkspace]  # filled with the lowest codes, and with the highest
SMALL_SCALES = frozenset({"F8_E4M3", "U8"})  # dtypes of one-byte float scales: byte 1 is the smallest positive scale
FUSED = "fused"  # role of the part that holds one factor for each of the layers fused into the weight's rows


Dequantize = Callable[[Chunk, Workspace], Values]


class PartSpec(Struct, frozen=True):
    """A stored tensor that a format needs: its possible names and dtypes.

    In a name, ``{weight}`` is the weight's name, ``{module}`` for that name without ``.weight`` (skipped if the
    name does not end in it), and ``{private}`` for X._weight if the weight is X.weight.
    """

    names: tuple[str, ...]
    dtypes: frozenset[str]
    optional: bool = False

    def __str__(self) -> str:
        names = " | ".join(names_for("X.weight", self.names))
        optional = ", optional" if self.optional else ""
        return f"{names} ({', '.join(sorted(self.dtypes))}{optional})"

    def candidates(self, weight: str) -> list[str]:
        """Return the names that this part may have for the weight named ``weight``."""
        return names_for(weight, self.names)


def names_for(weight: str, templates: Iterable[str]) -> list[str]:
    """Expand templates such as ``{module}.scale`` for the weight named ``weight``; see :class:`PartSpec`."""
    return list(expand_templates(weight, templates).values())


def expand_templates(weight: str, templates: Iterable[str]) -> dict[str, str]:
    """Map templates to the names that they give for the weight named ``weight``; omit templates that give none."""
    names = {}
    for template in templates:
        stem, ending = _split_template(template)
        if stem == "private":
            names[template] = private_name(weight) + ending
        elif stem == "weight":
            names[template] = weight + ending
        elif weight.endswith(WEIGHT_SUFFIX):
            names[template] = weight.removesuffix(WEIGHT_SUFFIX) + ending
    return names


@cache
def _split_template(template: str) -> tuple[str, str]:
    """Split a template such as ``{module}.scale``, which begins with a name in braces, at the closing brace."""
    stem, _, ending = template.removeprefix("{").partition("}")
    return stem, ending


def private_name(weight: str) -> str:
    """Return ``X._weight`` for X.weight, ``X._up_proj`` for X.up_proj."""
    above, dot, last = weight.rpartition(".")
    return f"{above}{dot}_{last}"


class Hints(Struct, frozen=True):
    """Facts about a weight from outside its stored tensors, checked against the tensors."""

    labels: tuple[Label, ...] = ()
    blocks: tuple[tuple[tuple[int, int], str], ...] = ()  # (rows, cols) of a block, and the source that declares it
    expects_scale: str | None = None  # the source by which codes in this checkpoint have scales
    shape: tuple[int, ...] | None = None  # shape in the original, if known: stored codes may be padded or flattened
    config: JsonFields = field(default_factory=dict)  # quantization_config of config.json or an equivalent file
    declarations: Declarations = NOTHING  # what that configuration declares for each module
    metadata: Mapping[str, str] = field(default_factory=dict)  # __metadata__ of the safetensors files


class Parts(Struct, gc=False):
    """The stored tensors of one weight, by their role in the format, and hints about the weight."""

    name: str
    entries: Mapping[str, Entry]
    hints: Hints = Hints()
    checkpoint: Mapping[str, Entry] = field(default_factory=dict)  # every entry of the checkpoint
    format: str = ""  # name of the row of FORMATS that is being tried

    def __repr__(self) -> str:
        return f"Parts({self.name!r}, {self.entries!r})"  # the checkpoint's many entries are left out

    def __getitem__(self, role: str) -> Entry:
        return self.entries[role]

    def get(self, role: str) -> Entry | None:
        """Return the part with that role, or None if it is not stored."""
        return self.entries.get(role)

    @property
    def codes(self) -> Entry:
        """The part that holds the elements."""
        return next(iter(self.entries.values()))

    @property
    def matrix(self) -> tuple[int, int]:
        """The stored (rows, cols) of the part that holds the elements."""
        return as_matrix(self.codes.shape)

    def weight(
        self,
        shape: tuple[int, ...],
        values: Decoder | Dequantize,
        format: str | None = None,
        **facts: Unpack["WeightFacts"],
    ) -> "Weight":
        """Build the :class:`Weight` that these parts form, whose values a decoder describes or a function returns.

        ``format`` defaults to the row that is being tried, bits to those of the levels.
        """
        dequantize = Native(values) if isinstance(values, Decoder) else values
        if levels := facts.get("levels"):
            facts.setdefault("uniform_bits", levels.uniform_bits)
            facts.setdefault("code_bits", levels.uniform_bits)
        return Weight(self.name, format or self.format, shape, self.entries, dequantize, **facts)


class WeightFacts(TypedDict, total=False):
    """The fields of :class:`Weight` that a format may give."""

    code_bits: int | None
    uniform_bits: int | None
    block_size: tuple[int, int] | None
    scale: Entry | None
    encoding: Encoding
    needs_float64: bool
    refusal: str | None
    evidence: tuple[str, ...]
    warnings: tuple[str, ...]
    comfy_format: str | None
    close_alternatives: bool
    prescribed: bool
    levels: Levels | None
    scale_steps: ScaleSteps | None
    unit: Callable[[Chunk, Workspace], Tensor] | None
    rotated: "RotatedWeight | None"
    branch: "Branch | None"


class Weight(Struct, gc=False):  # nothing here is part of a cycle
    """A tensor of the model as one checkpoint stores it.

    ``dequantize(chunk, workspace)`` returns the values of any chunk, which are the same on every device and however the
    weight is cut. The result may be a buffer of the workspace: it is valid until the next call.
    """

    name: str
    format: str
    shape: tuple[int, ...]
    parts: Mapping[str, Entry]
    dequantize: Callable[[Chunk, Workspace], Values]
    block_size: tuple[int, int] | None = None  # (rows, cols) of a block that shares a scale, if any
    encoding: Encoding = "codes"
    needs_float64: bool = False  # float32 would round the values
    refusal: str | None = None  # the reason why it is compared only for equality
    code_bits: int | None = None  # bits of one code, without scales
    uniform_bits: int | None = None  # bits of one code, if the steps between levels are equal
    scale: Entry | None = None
    evidence: tuple[str, ...] = ()  # the facts that decided the format, in words
    warnings: tuple[str, ...] = ()  # doubts about the format, in words
    comfy_format: str | None = None
    byte_share: float = 1.0  # share of its parts' bytes, where several weights share the parts
    alternatives: "Sequence[Weight]" = ()  # other interpretations of the same tensors, tried if this one proves wrong
    close_alternatives: bool = False  # alternatives differ little: the clearly nearest wins, even if the first is near
    undeclared: bool = False  # no metadata chooses among the alternatives: picking another causes no warning
    # A label, configuration or convention prescribes this interpretation: it is an error if another fits better.
    prescribed: bool = False
    levels: Levels | None = None  # levels of the codes; None if the nearest code does not depend on one element alone
    scale_steps: ScaleSteps | None = None  # None: scales are floats
    coded: tuple[Entry, ...] = ()  # the parts that hold the codes, if not the first part alone
    unit: Callable[[Chunk, Workspace], Tensor] | None = None  # (r or 1, 1): factor of the codes of each row
    rotated: "RotatedWeight | None" = None  # the weight before the rotation of its columns is undone
    branch: "Branch | None" = None  # a low-rank product, which its values include
    computed: bool = False  # its values are the result of float32 arithmetic on stored numbers
    # What follows from the shape, the encoding and the parts; all steps ask for it.
    n: int = 0  # number of elements
    matrix: tuple[int, int] = (0, 0)  # (rows, cols) of the weight as a matrix
    matrix_rows: int = 0  # rows of each matrix in a stack (of experts, for example); 0 if the weight is not a stack
    has_codes: bool = False  # the stored bytes are codes, not plain numbers
    nbytes: int = 0  # this weight's share of the parts' bytes
    codes: Entry = None  # type: ignore[assignment] # the part that holds the elements

    def __post_init__(self) -> None:
        """Derive the last fields."""
        self.n, self.matrix = prod(self.shape), as_matrix(self.shape)
        is_stack = len(self.shape) == 3 and self.matrix[1] == self.shape[2]
        self.matrix_rows, self.has_codes = self.shape[1] if is_stack else 0, self.encoding in ("codes", "cast")
        self.nbytes, self.codes = int(self.byte_share * self.stored_bytes), next(iter(self.parts.values()))

    @property
    def unrotated(self) -> "Weight":
        """The weight in which each element has one code: before its columns are rotated back, if they are."""
        return self.rotated.weight if self.rotated else self

    def with_alternatives(self, others: "Iterable[Weight]") -> "Weight":
        """Return this weight with ``others``, read from the same tensors, as alternatives."""
        return replace(self, alternatives=tuple(others))

    def scaling(
        self, chunk: Chunk, filled: FilledWorkspaces, decode: Callable[[Chunk, Workspace], Tensor] | None = None
    ) -> Scaling | None:
        """Return the factor and offset of a chunk's codes; None for a weight without levels.

        ``decode`` returns the same values as :attr:`dequantize`, but faster.
        """
        if self.levels is None:
            return None
        if (units := self.units(chunk, filled[0])) is not None:
            return Scaling(units)
        for workspace, byte in zip(filled, (self.levels.low, self.levels.high), strict=True):
            workspace.fill(self.coded or (self.codes,), byte, self.levels.block, self.levels.span, self.levels.rows)
        decode = decode or (lambda chunk, workspace: self.dequantize(chunk, workspace).weight)
        high = decode(chunk, filled[1])
        if self.levels.centred:
            return Scaling(high.div_(self.levels.end_values[1]))
        return derive_scaling(self.levels, decode(chunk, filled[0]), high)

    def units(self, chunk: Chunk, workspace: Workspace, rows: Tensor | None = None) -> Tensor | None:
        """Return the factor of a chunk's codes, (1 or r, 1 or c), or of some of its ``rows``, counted from the first.

        Return None if the codes have an offset, or if only dequantizing shows their factor.
        """
        if self.unit is None:
            return self._find_units(chunk, workspace, rows)
        return _pick(self.unit(chunk, workspace), rows)

    @property
    def scales_are_float16(self) -> bool:
        """True if codes are multiplied by a float16 scale; in GGUF, by the scale of each block."""
        scale = self.parts.get("scale") or self.scale
        in_blocks = self.levels is not None and self.levels.span is not None and self.scale_steps is None
        return in_blocks if scale is None else scale.dtype == "F16"

    def smallest_units(self, chunk: Chunk, workspace: FilledWorkspace) -> Tensor | None:
        """Return the factors of the codes at the smallest storable scales, (1 or r, c).

        The shape is (1, 1) if only the overall factor is known. Return None if scales are not one-byte floats, as other
        scales can be smaller than any weight needs.
        """
        scale = self.parts.get("scale")
        if scale is None or scale.dtype not in SMALL_SCALES:
            return None
        workspace.fill((scale,), 1)
        units = self._find_units(chunk, workspace)
        if units is None and self.levels is not None and self.levels.centred:  # decoded without a table of units
            values = self.dequantize(chunk, workspace).weight
            return values.abs().amax().view(1, 1) / self.levels.highest  # the largest code occurs in nearly every group
        return units

    def _find_units(self, chunk: Chunk, workspace: Workspace, rows: Tensor | None = None) -> Tensor | None:
        """Return the block scale of each element, (1 or r, c), for codes without an offset; None for other codes."""
        decoder = decoder_of(self.dequantize)
        if decoder is None or decoder.scale is None or not (self.levels and self.levels.centred):
            return None
        if decoder.zero or decoder.shift or decoder.columns or not decoder.group or chunk.col % decoder.group:
            return None
        factor = decoder.factor if isinstance(decoder.factor, float) else 1.0
        scales = _pick(decoder.scale(chunk, workspace).float() * factor, rows)
        return scales[:, :, None].expand(-1, -1, decoder.group).flatten(1)[:, : chunk.shape[1]]

    def will_need(self, first: Chunk, last: Chunk) -> None:
        """Hint that the first to the last chunk will be read soon, if codes are stored in the order of elements."""
        codes, cols = self.codes, self.matrix[1]
        if codes.n == self.n:
            begin = (first.row * cols + first.col) * codes.nbytes // self.n
            end = ((last.stop_row - 1) * cols + last.stop_col) * codes.nbytes // self.n
            codes.file.will_need(codes.offset + begin, end - begin)

    @property
    def stored_bytes(self) -> int:
        """The number of bytes of all parts."""
        return sum([entry.nbytes for entry in self.parts.values()])


def _pick(of_rows: Tensor, rows: Tensor | None) -> Tensor:
    """Pick the numbers, (1 or r, n), of some ``rows``; None means all rows."""
    return of_rows if rows is None or len(of_rows) == 1 else of_rows[rows]


class LazyWeights(Sequence[Weight]):
    """Weights that are made anew each time they are accessed: alternatives that only a broken weight needs."""

    def __init__(self, make: Callable[[int], Weight], sizes: Sequence[int]) -> None:
        """Keep the function that makes the weight of each size."""
        self._make, self._sizes = make, sizes

    def __len__(self) -> int:
        return len(self._sizes)

    @overload
    def __getitem__(self, index: int) -> Weight: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Weight]: ...
    def __getitem__(self, index: int | slice) -> Weight | Sequence[Weight]:
        size = self._sizes[index]
        return self._make(size) if isinstance(size, int) else LazyWeights(self._make, size)


class RotatedWeight(NamedTuple):
    """A weight before its rotated columns are rotated back."""

    weight: Weight  # has levels; its rows may be longer
    rotate: Callable[[Tensor, Workspace], Tensor]  # rotates whole rows of the original, (r, c), as the quantizer did
    of_inputs: "InputRotation | None" = None  # None: ``rotate`` also rotates inputs, and is its own inverse


class InputRotation(NamedTuple):
    """Functions that rotate the inputs of a rotated weight, (r, c) float32, in place, and undo that."""

    rotate: Callable[[Tensor, Workspace], Tensor]
    undo: Callable[[Tensor, Workspace], Tensor]


class Branch(NamedTuple):
    """A product of two thin matrices in a weight. Runtimes multiply it by inputs that they have not rounded."""

    factors: Callable[[Workspace], tuple[Tensor, Tensor]]  # (rows, rank) and (rank, cols) of the weight, float32
    smooth: Entry | None = None  # (cols or more,): factors by which the codes' inputs are divided


class Format(Struct, frozen=True):
    """One row of FORMATS: a format that quanterr reads."""

    name: str
    needs: Mapping[str, PartSpec]  # by role; the first holds the elements
    # Returns None if the tensors belong to another row; raises FormatMismatch with what is stored and expected.
    fit: Callable[[Parts], Weight | None]
    summary: str = ""  # default: the first line of the module's docstring
    usual_db: tuple[int, int] | None = None  # typical SNR of whole models after plain rounding: a guide, not a limit
    declared: tuple[str, str] | None = None  # key and value in quantization_config that declare this format
    takes_tied_head: bool = False  # loaders use a quantized output layer even if config.json ties it to the embedding
    is_shaped_by_original: bool = False  # its files do not show the shape of a weight: without an original, a guess
    min_scale: float = 0.0  # smallest scale that it can store, if real weights can need a smaller one
    corrects_biases: bool = False  # quantizers (convert_to_quant) adjust biases for the errors of weights
    specification: str = ""  # its module's docstring, filled in where FORMATS is made

    @property
    def codes(self) -> PartSpec:
        """The part that holds the elements."""
        return next(iter(self.needs.values()))

    @property
    def stated_needs(self) -> str:
        """The tensors that must be stored for a weight X.weight, in words."""
        return "; ".join(str(part) for part in self.needs.values())

    def with_specification(self, specification: str) -> "Format":
        """Return the row with ``specification``, its module's docstring, whose first line is the default summary."""
        first = specification.partition("\n")[0].removesuffix(".")
        return replace(self, specification=specification, summary=self.summary or first)
