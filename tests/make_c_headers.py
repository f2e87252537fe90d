"""Write two headers of the kernel: c/enums.h from kernel/enums.py, and ggml's blocks as constants, c/blocks.h.

python tests/make_c_headers.py
"""

import ctypes
import textwrap
from collections.abc import Iterator
from typing import Any

from quanterr.checkpoints.ggml_types import OF_NAME
from quanterr.formats import gguf_basic, gguf_codebook, gguf_iq, gguf_k
from quanterr.formats.shared.ggml_fields import Block, describe
from quanterr.kernel.enums import CodeKind, ElementType, Order, Packing, SampleState, Zeros
from quanterr.kernel.structs import ENUMS

BLOCKS = ENUMS.with_name("blocks.h")
MADE = "/* Made by tests/make_c_headers.py from kernel/enums.py, which describes the members. */\n"
TOP = """/* The blocks of ggml that compare.c decodes with functions of their own, as constants for the compiler.
 *
 * Made by tests/make_c_headers.py from the rows of quanterr/formats/gguf_*.py.
 */
"""
C_TYPES = {ctypes.c_uint16: "uint16_t", ctypes.c_uint8: "uint8_t", ctypes.c_float: "float"}
WIDTH = 118
MAX_EXACT_INTEGER = 1 << 24


def list_blocks() -> dict[str, Block]:
    """Return the blocks that have an element type of their own, in the order of the types."""
    types = *gguf_basic.TYPES, *gguf_k.TYPES, *gguf_codebook.TYPES, gguf_codebook.NVFP4, *gguf_iq.TYPES
    every = {name: block for block_type in types for name, block in block_type.blocks.items()}
    return {name: every[name] for name in ElementType.__members__ if name in every}


def make_enums() -> str:
    """Return the contents of enums.h."""
    every = (CodeKind, ElementType, Order, Packing, SampleState, Zeros)
    lines = [
        line for enum in every for line in break_lines(f"enum {enum.__name__} {{ {', '.join(enum.__members__)} }};")
    ]
    return "\n".join([MADE, *lines]) + "\n"


def make_blocks() -> str:
    """Return the contents of blocks.h."""
    blocks = list_blocks()
    every = f"#define EACH_BLOCKS(DO) {' '.join(f'DO({name})' for name in blocks)}"
    lines = [line for name, block in blocks.items() for line in describe_in_c(name, block)]
    return "\n".join([TOP, *lines, *break_lines(every)]) + "\n"


def describe_in_c(name: str, block: Block) -> Iterator[str]:
    """Yield the arrays of a description, then the description."""
    described = describe(block, OF_NAME[name])
    arrays = {ctypes.addressof(array): array for array in described.alive}
    names: dict[int, str] = {}
    for address, array in arrays.items():
        names[address] = f"{name}_{len(names)}"
        numbers = ", ".join(repr_in_c(number) for number in array)
        yield from break_lines(f"static const {C_TYPES[array._type_]} {names[address]}[] = {{{numbers}}};")
    yield from break_lines(f"static const Blocks {name}_BLOCKS = {write_struct(described, names)};")


def write_struct(struct: ctypes.Structure, names: dict[int, str]) -> str:
    """Return an initializer of the fields that are not zero."""
    parts = []
    for field, field_type in struct._fields_:
        value = getattr(struct, field)
        if isinstance(value, ctypes.Array):
            given = [write_struct(item, names) for item in value if item.at]
            parts += [f".{field} = {{{', '.join(given)}}}"] if given else []
        elif value:
            parts.append(f".{field} = {names[value] if field_type is ctypes.c_void_p else repr_in_c(value)}")
    return f"{{{', '.join(parts)}}}"


def repr_in_c(number: Any) -> str:
    """Return a number as C reads it back exactly."""
    whole = isinstance(number, int) or (number.is_integer() and abs(number) < MAX_EXACT_INTEGER)
    return str(int(number)) if whole else f"{number.hex()}f"


def break_lines(statement: str) -> Iterator[str]:
    """Break a statement at spaces; a macro's lines end in a backslash."""
    end = " \\" if statement.startswith("#") else ""
    lines = textwrap.wrap(statement, WIDTH, subsequent_indent="    ", break_on_hyphens=False)
    yield from (line + end for line in lines[:-1])
    yield lines[-1]


if __name__ == "__main__":
    ENUMS.write_text(make_enums(), encoding="utf-8")
    BLOCKS.write_text(make_blocks(), encoding="utf-8")
