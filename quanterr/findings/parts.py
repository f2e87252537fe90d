"""Optional parts of a layout that most weights of a kind have and some lack, from headers alone.

Weights of a kind have the same name in other blocks or as other experts, and the same format. A quantizer that did not
see a weight during calibration, as with experts that no token reached, leaves out its factors or zero points. Runtimes
fuse such weights, or expect the part in each: they refuse the file, or compute with numbers of nothing.
"""

import re
from collections.abc import Iterator

from quanterr.documents.base import Finding
from quanterr.findings.checks import HEADERS, QUANTIZED, check
from quanterr.findings.codes import make_finding
from quanterr.findings.contents import Contents
from quanterr.formats import Weight, find_rows
from quanterr.selection.roles import without_numbers
from quanterr.util.text import count, display, listed

# Roles of parts that change a weight or its inputs, which a layout may have or not. Others are settings, orders, or
# corrections that a quantizer adds where they pay.
ROLES = frozenset(
    {
        *("pre_quant_scale", "act_pre_scale", "smooth_orig", "row_scale", "tensor_scale", "global_scale", "dual_scale"),
        *("second_scale", "second_offset", "scale_bias", "quant_bias", "deq_scale", "input_scale", "input_offset"),
        "zero_point",
    }
)
PIECE = re.compile(r"(\d+)\.(.+)")  # role of a part in a weight that is stacked from several: which one, and its role
Kind = tuple[object, ...]


@check("missing_part", needs=HEADERS, of=QUANTIZED)
def check_optional_parts(contents: Contents) -> Iterator[Finding]:
    """Report parts that less than half of the weights of a kind lack, in one finding for each part."""
    kinds: dict[Kind, list[tuple[str, frozenset[str]]]] = {}
    for weight in (one.weight for one in contents.stored if one.weight.has_codes):
        for name, dtype, roles in _list_pieces(weight):
            kind = without_numbers(name), weight.format, weight.code_bits, weight.block_size, dtype
            kinds.setdefault(kind, []).append((name, roles))
    lacking: dict[str, list[str]] = {}
    of: dict[str, int] = {}
    for (_, format_name, *_), found in kinds.items():
        for role in ROLES & set().union(*(roles for _, roles in found)):
            without = sorted({name for name, roles in found if role not in roles})
            if 0 < 2 * len(without) < len(found):
                part = _name_part(str(format_name), role)
                lacking.setdefault(part, []).extend(without)
                of[part] = of.get(part, 0) + len(found)
    for part, names in lacking.items():
        message = (
            f"{count(len(names), 'weight')} of {of[part]} {'lacks' if len(names) == 1 else 'lack'} {part}, which the "
            f"others of the same kind have: {listed(names, 3)}"
        )
        remedy = (
            "quantize them again with calibration data that reaches them; runtimes that fuse such weights refuse the "
            "file, or read them wrongly"
        )
        yield make_finding("missing_part", "warning", None, message, remedy, layers=names, part=part)


def _list_pieces(weight: Weight) -> Iterator[tuple[str, str, frozenset[str]]]:
    """Yield for each weight as it is stored: the name of its codes, their dtype, and the roles of its parts."""
    pieces: dict[str, dict[str, str]] = {}
    codes: dict[str, tuple[str, str]] = {}
    for role, entry in weight.parts.items():
        found = PIECE.fullmatch(role)
        number, own = (found[1], found[2]) if found else ("", role)
        pieces.setdefault(number, {})[own] = entry.name
        codes.setdefault(number, (entry.name, entry.dtype))
    for number, parts in pieces.items():
        yield *codes[number], frozenset(parts)


def _name_part(format_name: str, role: str) -> str:
    """Return the end of the name under which a format stores a part."""
    specifications = [row.needs[role] for row in find_rows(format_name) if role in row.needs]
    names = [specification.candidates("X.weight")[0] for specification in specifications]
    return display(names[0].removeprefix("X.").removeprefix("weight_") if names else role)
