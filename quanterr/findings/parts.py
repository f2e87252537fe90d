"""Optional parts of a layout that most corresponding weights have and some lack, from headers alone.

Corresponding weights have the same format, and names that differ only in the numbers of blocks or experts. If
calibration never reaches a weight, such as an expert to which no token is routed, quantizers leave out its factors or
zero points. Runtimes fuse such weights, or expect the part in each: they refuse the file, or use uninitialized numbers.
"""

import re
from collections.abc import Iterator

from quanterr.documents.base import Finding
from quanterr.findings.checks import HEADERS, QUANTIZED, check
from quanterr.findings.codes import make_finding
from quanterr.findings.contents import Contents
from quanterr.formats import Weight, find_rows
from quanterr.selection.roles import without_numbers
from quanterr.util.text import count, display, itemize

# Roles of optional parts that change a weight or its inputs. Other optional parts are settings, orders of columns, or
# corrections that a quantizer adds only where they help.
ROLES = frozenset(
    {
        *("pre_quant_scale", "act_pre_scale", "smooth_orig", "row_scale", "tensor_scale", "global_scale", "dual_scale"),
        *("second_scale", "second_offset", "scale_bias", "quant_bias", "deq_scale", "input_scale", "input_offset"),
        "zero_point",
    }
)
STACKED_ROLE = re.compile(r"(\d+)\.(.+)")  # a part of a weight that is stacked from several: number and role
GroupKey = tuple[object, ...]


@check("missing_part", needs=HEADERS, of=QUANTIZED)
def check_optional_parts(contents: Contents) -> Iterator[Finding]:
    """Report parts that less than half of corresponding weights lack, with one finding for each part."""
    groups: dict[GroupKey, list[tuple[str, frozenset[str]]]] = {}
    for weight in (stored.weight for stored in contents.weights if stored.weight.has_codes):
        for name, dtype, roles in _list_stacked(weight):
            key = without_numbers(name), weight.format, weight.code_bits, weight.block_size, dtype
            groups.setdefault(key, []).append((name, roles))
    lacking: dict[str, list[str]] = {}
    of: dict[str, int] = {}
    for (_, format_name, *_), members in groups.items():
        for role in ROLES & set().union(*(roles for _, roles in members)):
            without = sorted({name for name, roles in members if role not in roles})
            if 0 < 2 * len(without) < len(members):
                part = _name_part(str(format_name), role)
                lacking.setdefault(part, []).extend(without)
                of[part] = of.get(part, 0) + len(members)
    for part, names in lacking.items():
        message = (
            f"{count(len(names), 'weight')} of {of[part]} {'lacks' if len(names) == 1 else 'lack'} {part}, which the "
            f"others of the same kind have: {itemize(names, 3)}"
        )
        remedy = (
            "quantize them again with calibration data that reaches them; runtimes that fuse such weights refuse the "
            "file, or read them wrongly"
        )
        yield make_finding("missing_part", "warning", None, message, remedy, layers=names, part=part)


def _list_stacked(weight: Weight) -> Iterator[tuple[str, str, frozenset[str]]]:
    """Yield, for each of the weights that were stacked, the name of its codes, their dtype and the roles of its parts.

    A weight that is not stacked yields one row.
    """
    parts_by_number: dict[str, dict[str, str]] = {}
    codes: dict[str, tuple[str, str]] = {}
    for role, entry in weight.parts.items():
        match = STACKED_ROLE.fullmatch(role)
        number, part_role = (match[1], match[2]) if match else ("", role)
        parts_by_number.setdefault(number, {})[part_role] = entry.name
        codes.setdefault(number, (entry.name, entry.dtype))
    for number, parts in parts_by_number.items():
        yield *codes[number], frozenset(parts)


def _name_part(format_name: str, role: str) -> str:
    """Return the end of the name under which a format stores a part."""
    specifications = [row.needs[role] for row in find_rows(format_name) if role in row.needs]
    names = [specification.candidates("X.weight")[0] for specification in specifications]
    return display(names[0].removeprefix("X.").removeprefix("weight_") if names else role)
