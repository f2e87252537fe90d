"""Generate quanterr/formats/shared/ggml_grids.py from the tables of the gguf package.

python tests/make_gguf_grids.py        tests/formats/test_gguf_grids.py checks the file against the package
"""

import base64
from importlib.metadata import version
from pathlib import Path

from gguf import quants

FILE = Path(__file__).resolve().parent.parent / "quanterr" / "formats" / "shared" / "ggml_grids.py"
WIDTH = 100  # characters per line
NAMES = ("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")

HEAD = '''"""The grids of the IQ types of ggml: which groups of magnitudes a stored index stands for.

An entry for each index holds the number of the level of each element, in 2 bits (IQ3: 4 bits), the lowest
first; in base85. The levels stand in gguf_iq.py. IQ1_M has the grid of IQ1_S.

Made by tests/make_gguf_grids.py from gguf {version}, quants.py: the tables of ggml-org/llama.cpp
ggml/src/ggml-common.h (MIT License, copyright the ggml authors).
"""

GRIDS = {{
'''


def pack(name: str) -> str:
    """Return a grid of the package in base85."""
    raw = bytes.fromhex(getattr(quants, name).grid_hex.decode())
    return base64.b85encode(raw).decode()


def module() -> str:
    """Return the content of the generated file."""
    lines = [HEAD.format(version=version("gguf"))]
    for name in NAMES:
        lines.append(f'    "{name}": (\n')
        text = pack(name)
        lines += [f'        "{text[begin : begin + WIDTH]}"\n' for begin in range(0, len(text), WIDTH)]
        lines.append("    ),\n")
    return "".join([*lines, "}\n"])


if __name__ == "__main__":
    FILE.write_text(module())
