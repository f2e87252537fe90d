"""What a format is.

A format is a row of data (what must be stored, under which names, as which dtypes) and one function,
``fit``, that checks shapes and labels and returns a :class:`Weight`, which can dequantize any chunk.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Literal, NamedTuple

from torch import Tensor

from quanterr.checkpoints import Entry
from quanterr.checkpoints.labels import Label
from quanterr.errors import FormatMismatch
from quanterr.tensors.chunks import Chunk, as_matrix
from quanterr.tensors.decoder import Decoder, Element, Native, Order, decoder_of
from quanterr.tensors.levels import Levels, ScaleSteps, Scaling, scaling
from quanterr.tensors.workspace import FilledWorkspace, Workspace
from quanterr.util.strict_json import JsonFields

# What the file of a format needs: all of it from here.
__all__ = [
    "FUSED",
    "WEIGHT_SUFFIX",
    "Chunk",
    "Decoder",
    "Dequantize",
    "Element",
    "Encoding",
    "Format",
    "FormatMismatch",
    "Hints",
    "Native",
    "Order",
    "Part",
    "Parts",
    "Rotated",
    "Values",
    "Weight",
    "Workspace",
    "names_for",
    "private_name",
]

WEIGHT_SUFFIX = ".weight"
# What the stored bytes of a weight are: numbers as they are; FP8 numbers without a scale; codes to which scales or
# tables give a meaning; bits that are only compared for equality.
Encoding = Literal["floats", "cast", "codes", "bits"]
FilledWorkspaces = tuple[FilledWorkspace, FilledWorkspace]  # of the lowest and of the highest codes
SMALL_SCALES = frozenset({"F8_E4M3", "U8"})  # dtypes: small floats, whose least bits are those of the least number
FUSED = "fused"  # role of the part that holds a factor for each of the layers whose rows a weight holds


class Values(NamedTuple):
    """A dequantized chunk."""

    weight: Tensor  # (r, c) float32, or float64 where float32 would lose something
    saturated: Tensor | None = None  # 0-d: how many codes are at the end of their range
    zeros: Tensor | None = None  # 0-d: how many elements are zero, where the codes give


Dequantize = Callable[[Chunk, Workspace], Values]


@dataclass(frozen=True, slots=True)
class Part:
    """A stored tensor that a format needs: its possible names and dtypes.

    In a name ``{weight}`` stands for the weight's name, ``{module}`` for that name without ``.weight``
    (not tried for weights that are called otherwise), ``{private}`` for X._weight of X.weight.
    """

    names: tuple[str, ...]
    dtypes: frozenset[str]
    optional: bool = False

    def __str__(self) -> str:
        names = " | ".join(names_for("X.weight", self.names))
        optional = ", optional" if self.optional else ""
        return f"{names} ({', '.join(sorted(self.dtypes))}{optional})"

    def candidates(self, weight: str) -> list[str]:
        """The names this part may have for a weight of that name."""
        return names_for(weight, self.names)


def names_for(weight: str, templates: Iterable[str]) -> list[str]:
    """What templates such as ``{module}.scale`` stand for; see :class:`Part`."""
    module = weight.removesuffix(WEIGHT_SUFFIX)
    private = private_name(weight)
    return [
        template.replace("{weight}", weight).replace("{module}", module).replace("{private}", private)
        for template in templates
        if module != weight or "{module}" not in template
    ]


def private_name(weight: str) -> str:
    """``X._weight`` of X.weight, ``X._up_proj`` of X.up_proj."""
    above, dot, last = weight.rpartition(".")
    return f"{above}{dot}_{last}"


@dataclass(frozen=True, slots=True)
class Hints:
    """What is known of a weight besides its stored tensors, and checked against them."""

    labels: tuple[Label, ...] = ()
    blocks: tuple[tuple[tuple[int, int], str], ...] = ()  # (rows, cols) of a block, and what says so
    expects_scale: str | None = None  # what says that codes in this checkpoint have scales
    shape: tuple[int, ...] | None = None  # of the original, where there is one: codes may be padded or flat
    config: JsonFields = field(default_factory=dict)  # quantization_config of config.json or its like
    metadata: Mapping[str, str] = field(default_factory=dict)  # __metadata__ of the files


@dataclass(frozen=True, slots=True)
class Parts:
    """The stored tensors of one weight by their role in the format, and what else is known of it."""

    name: str
    entries: Mapping[str, Entry]
    hints: Hints = Hints()
    checkpoint: Mapping[str, Entry] = field(default_factory=dict, repr=False)  # all: what others give of this one
    format: str = ""  # the name of the row that is tried

    def __getitem__(self, role: str) -> Entry:
        return self.entries[role]

    def get(self, role: str) -> Entry | None:
        """A part that may be missing."""
        return self.entries.get(role)

    @property
    def codes(self) -> Entry:
        """The part that holds the elements."""
        return next(iter(self.entries.values()))

    @property
    def matrix(self) -> tuple[int, int]:
        """(rows, cols) of the part that holds the elements, as it is stored."""
        return as_matrix(self.codes.shape)

    def weight(
        self,
        shape: tuple[int, ...],
        dequantize: "Callable[[Chunk, Workspace], Values]",
        *,
        code_bits: int | None = None,
        uniform_bits: int | None = None,
        block_size: tuple[int, int] | None = None,
        scale: Entry | None = None,
        encoding: Encoding = "codes",
        needs_float64: bool = False,
        refusal: str | None = None,
        evidence: tuple[str, ...] = (),
        warnings: tuple[str, ...] = (),
        comfy_format: str | None = None,
        close_alternatives: bool = False,
        undeclared: bool = False,
        format: str | None = None,
        levels: Levels | None = None,
        scale_steps: ScaleSteps | None = None,
        unit: Callable[[Chunk, Workspace], Tensor] | None = None,
        rotated: "Rotated | None" = None,
    ) -> "Weight":
        """The weight that these parts make up, as :class:`Weight` has it; ``format`` is the row that is tried."""
        return Weight(
            self.name,
            format or self.format,
            shape,
            self.entries,
            dequantize,
            code_bits=code_bits,
            uniform_bits=uniform_bits,
            block_size=block_size,
            scale=scale,
            encoding=encoding,
            needs_float64=needs_float64,
            refusal=refusal,
            evidence=evidence,
            warnings=warnings,
            comfy_format=comfy_format,
            close_alternatives=close_alternatives,
            undeclared=undeclared,
            scale_steps=scale_steps,
            levels=levels,
            unit=unit,
            rotated=rotated,
        )


@dataclass(frozen=True, slots=True)
class Weight:
    """A logical tensor of the model, as one checkpoint stores it.

    ``dequantize(chunk, workspace)`` gives any chunk, in any cut, with the same values on every device. The result is a
    buffer of the workspace, best ``workspace.output(chunk.shape)``, and holds until the next call.
    """

    name: str
    format: str
    shape: tuple[int, ...]
    parts: Mapping[str, Entry]
    dequantize: Callable[[Chunk, Workspace], Values]
    block_size: tuple[int, int] | None = None  # (rows, cols) that share a scale, where it is a block
    encoding: Encoding = "codes"
    needs_float64: bool = False  # its values need float64
    refusal: str | None = None  # why it is not compared unless both sides are equal
    code_bits: int | None = None  # of one code, scales not included
    uniform_bits: int | None = None  # the same, of codes with equal steps
    scale: Entry | None = None
    evidence: tuple[str, ...] = ()  # what decided, in words
    warnings: tuple[str, ...] = ()  # what speaks against it, in words
    comfy_format: str | None = None
    byte_share: float = 1.0  # of its parts' bytes, where they are those of several weights
    alternatives: "tuple[Weight, ...]" = ()  # alternatives of the same tensors, for when this one proves wrong
    close_alternatives: bool = (
        False  # its alternatives are close to each other: the clearly nearest is right, however near the first
    )
    undeclared: bool = False  # nothing says which of its alternatives it is: to take another is no cause for a warning
    levels: Levels | None = None  # of its codes; None where the nearest one cannot be found element by element
    scale_steps: ScaleSteps | None = None  # None: scales are floats
    coded: tuple[Entry, ...] = ()  # the parts that hold these codes, if not the first of them alone
    unit: Callable[[Chunk, Workspace], Tensor] | None = None  # (r or 1, 1): what codes of a row are multiplied by
    rotated: "Rotated | None" = None  # what its codes stand for, where its columns are rotated
    computed: bool = False  # its values are those of stored numbers after arithmetic in float32

    def or_else(self, others: "Iterable[Weight]") -> "Weight":
        """This weight, with others of the same tensors as alternatives."""
        return replace(self, alternatives=tuple(others))

    def scaling(self, chunk: Chunk, filled: FilledWorkspaces) -> Scaling | None:
        """What the codes of a chunk are multiplied by, and what is added then; None of a weight without levels."""
        if self.levels is None:
            return None
        if self.unit is not None:
            return Scaling(self.unit(chunk, filled[0]))
        if (units := self._units(chunk, filled[0])) is not None:
            return Scaling(units)
        for workspace, byte in zip(filled, (self.levels.low, self.levels.high), strict=True):
            workspace.fill(self.coded or (self.codes,), byte, self.levels.block, self.levels.span)
        high = self.dequantize(chunk, filled[1]).weight
        if self.levels.centred:
            return Scaling(high.div_(self.levels.known[1]))
        return scaling(self.levels, self.dequantize(chunk, filled[0]).weight, high)

    @property
    def scales_are_float16(self) -> bool:
        """Whether codes are multiplied by a float16, in GGUF by the one of each block."""
        scale = self.parts.get("scale") or self.scale
        in_blocks = self.levels is not None and self.levels.span is not None and self.scale_steps is None
        return in_blocks if scale is None else scale.dtype == "F16"

    def least_units(self, chunk: Chunk, workspace: FilledWorkspace) -> Tensor | None:
        """What codes would be multiplied by if all scales were the least that can be stored, (1 or r, c).

        Of small floats of one byte, (1, 1) where one number is all that is known; None of other scales, which go on to
        where no weight is.
        """
        scale = self.parts.get("scale")
        if scale is None or scale.dtype not in SMALL_SCALES:
            return None
        workspace.fill((scale,), 1)
        units = self._units(chunk, workspace)
        if units is None and self.levels is not None and self.levels.centred:  # an expert of a stack
            values = self.dequantize(chunk, workspace).weight
            return values.abs().amax().view(1, 1) / self.levels.highest  # the largest code is in every few groups
        return units

    def _units(self, chunk: Chunk, workspace: Workspace) -> Tensor | None:
        """Of codes that are only multiplied, by scales of blocks of columns: the scale of each element, (1 or r, c)."""
        decoder = decoder_of(self.dequantize)
        if decoder is None or decoder.scale is None or not (self.levels and self.levels.centred):
            return None
        if decoder.zero or decoder.shift or not decoder.group or chunk.col % decoder.group:
            return None
        scales = decoder.scale(chunk, workspace).float()
        return scales.repeat_interleave(decoder.group, 1)[:, : chunk.shape[1]]

    @property
    def has_codes(self) -> bool:
        """Whether its bytes are codes, and not the numbers themselves."""
        return self.encoding in ("codes", "cast")

    @property
    def n(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def matrix(self) -> tuple[int, int]:
        """(rows, cols)."""
        return as_matrix(self.shape)

    @property
    def matrix_rows(self) -> int:
        """Rows of each matrix of a stack, as of experts; 0 of what is not a stack."""
        return self.shape[1] if len(self.shape) == 3 and self.matrix[1] == self.shape[2] else 0

    @property
    def codes(self) -> Entry:
        """The part that holds the elements."""
        return next(iter(self.parts.values()))

    @property
    def stored_bytes(self) -> int:
        """Bytes of all its parts."""
        return sum(entry.nbytes for entry in self.parts.values())

    @property
    def nbytes(self) -> int:
        """Its share of them."""
        return int(self.byte_share * self.stored_bytes)


class Rotated(NamedTuple):
    """What codes stand for before their columns are rotated back."""

    weight: Weight  # with levels; its rows may be longer
    turn: Callable[[Tensor, Workspace], Tensor]  # whole rows of the original, (r, c), to the same


@dataclass(frozen=True, slots=True)
class Format:
    """One row of FORMATS."""

    name: str
    needs: Mapping[str, Part]  # by role; the first holds the elements
    # None: the tensors are another row's. Raises FormatMismatch, which says what was found and expected.
    fit: Callable[[Parts], Weight | None]
    summary: str = ""  # without one, the first line of its module's docstring
    usual_db: tuple[int, int] | None = None  # SNR of whole models in it, by plain rounding: a guide, no limit
    declared: tuple[str, str] | None = None  # key of a quantization_config, and the value there that means this format
    takes_tied_head: bool = False  # its loaders use the codes of an output layer that is said to be the embedding's
    least_scale: float = 0.0  # the smallest that it can store, where weights are known to be smaller
    corrects_biases: bool = False  # a quantizer of it (convert_to_quant) changes biases for the errors of weights
    specification: str = field(default="", repr=False)  # the docstring of its module, filled in by FORMATS

    @property
    def codes(self) -> Part:
        """The part that holds the elements."""
        return next(iter(self.needs.values()))

    @property
    def stated_needs(self) -> str:
        """What must be stored for a weight X.weight, in words."""
        return "; ".join(str(part) for part in self.needs.values())

    def documented(self, specification: str) -> "Format":
        """The row with the docstring of its module."""
        first = specification.partition("\n")[0].removesuffix(".")
        return replace(self, specification=specification, summary=self.summary or first)
