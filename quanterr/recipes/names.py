"""Recipe names and their parser: ``format[_gGROUP][:asym][:double][:strict][:scales=CALIBRATOR]``.

fp8_tensor  fp8_row  fp8_column  fp8_block128  fp8_block1x128  int8_tensor  int8_row  int8_column  int8_block128
int2_g32 … int8_g128  int4_channel  int4_g64:asym  mlx_q4_g64
mxfp8  mxfp4  nvfp4  nf4  nf4_g128  nf4:double  fp4
gguf_q8_0  gguf_q5_1  gguf_q5_0  gguf_q4_1  gguf_q4_0  gguf_q6_k  gguf_q5_k  gguf_q4_k  gguf_q3_k  gguf_q2_k
gguf_q4_k:strict
"""

import re
from collections.abc import Iterable
from difflib import get_close_matches

from quanterr.errors import UsageError
from quanterr.recipes.base import Encoder, Recipe
from quanterr.recipes.blocks import FALLBACKS, LEGACY, BlockEncoder
from quanterr.recipes.calibration import ABSMAX, Calibrator, parse_calibrator
from quanterr.recipes.integers import IntegerEncoder
from quanterr.recipes.microscaled import MicroscaledEncoder
from quanterr.recipes.mlx import AffineEncoder
from quanterr.recipes.scaled import FP8, INT8, ScaledEncoder
from quanterr.recipes.superblocks import K_TYPES
from quanterr.recipes.tables import TableEncoder
from quanterr.util.text import display

NUMBER = re.compile(r"\d+")
EDGE = r"[1-9]\d{0,3}"
SCALED = re.compile(rf"(?P<codes>fp8|int8)_(?P<per>tensor|row|column|block(?P<high>{EDGE})?(?:x(?P<wide>{EDGE}))?)")
INTEGER = re.compile(r"int(?P<bits>[2-8])_(?:g(?P<group>[1-9]\d{0,4})|channel)")
TABLE = re.compile(r"(?P<kind>nf4|fp4)(?:_g(?P<block>32|64|128|256|512|1024|2048|4096))?")
MLX = re.compile(r"mlx_q(?P<bits>[2-68])_g(?P<group>32|64|128)")
GGML = LEGACY | K_TYPES
WITHOUT_IMPORTANCE = ("Q8_0",)  # llama.cpp searches no scale for these
BLOCK_EDGES = {"tensor": (0, 0), "row": (1, 0), "column": (0, 1)}  # rows and columns that share a scale; 0: all
BLOCK = 128  # default edge of a block
TABLE_BLOCK = 64  # default of bitsandbytes
PRESETS = ("fp8_tensor", "fp8_row", "int8_row", "nvfp4", "mxfp4", "int4_g32", "nf4", "gguf_q4_0")

# Recipe names and descriptions. Numbers in names stand for any allowed number.
LISTING = {
    "fp8_tensor": "E4M3 codes, one scale",
    "fp8_row": "E4M3 codes, a scale per row",
    "fp8_column": "E4M3 codes, a scale per column",
    "fp8_block128": "E4M3 codes, a scale per block of 128 × 128; fp8_block1x128",
    "int8_tensor": "8-bit integers, one scale",
    "int8_row": "8-bit integers, a scale per row",
    "int8_column": "8-bit integers, a scale per column",
    "int8_block128": "8-bit integers, a scale per block of 128 × 128; int8_block1x128",
    "int4_g128": "2- to 8-bit integers, a scale per 128 columns; :asym with zero points (compressed-tensors)",
    "int8_channel": "2- to 8-bit integers, a scale per row; :asym with zero points (compressed-tensors)",
    "mlx_q4_g64": "2- to 6- and 8-bit integers, a scale and a bias per 32, 64 or 128 columns (MLX)",
    "mxfp8": "E4M3 codes, a power of two per 32 columns",
    "mxfp4": "E2M1 codes, a power of two per 32 columns",
    "nvfp4": "E2M1 codes, an E4M3 scale per 16 columns, and one of the tensor",
    "nf4": "16 numbers of a normal distribution, a scale per 64 elements; nf4_g128; :double (bitsandbytes)",
    "fp4": "E2M1 codes of bitsandbytes, a scale per 64 elements; fp4_g128; :double",
    **{f"gguf_{dtype.lower()}": f"ggml's {dtype}" for dtype in LEGACY},
    **{
        f"gguf_{dtype.lower()}": f"ggml's {dtype}; {other} for rows that do not fill blocks of 256; :strict"
        for dtype, other in FALLBACKS.items()
    },
}


def list_recipes() -> dict[str, str]:
    """Return all recipe names and their descriptions; numbers in names stand for any allowed number."""
    return dict(LISTING)


def find_listed_recipe(name: str) -> str | None:
    """Return the listed recipe that describes a recipe with other numbers or options; None for other names."""
    try:
        base = parse_recipe(name).name.partition(":")[0]
    except UsageError:
        return None
    pattern = NUMBER.sub("0", base)
    near = [listed for listed in LISTING if pattern.startswith(NUMBER.sub("0", listed))]
    return base if base in LISTING else max(near, key=len, default=None)


def split_at_commas(text: str) -> list[str]:
    """Split names at commas that are not in braces."""
    return [piece.strip() for piece in re.split(r",(?![^{]*\})", text)]


def parse_recipes(given: Iterable[str], scales: str | None = None) -> list[Recipe]:
    """Parse comma-separated recipe names with braces, such as ``int4_g{32,64}``; combine each with all ``scales``.

    Raises:
        UsageError: a name is unknown or given twice, or there is none.
    """
    pieces = [piece for text in given for piece in split_at_commas(text)]
    names = [name for piece in pieces if piece for name in _expand_braces(piece)]
    if scales is not None:
        names = [f"{name}:scales={calibrator}" for name in names for calibrator in split_at_commas(scales)]
    recipes = [parse_recipe(name) for name in names]
    twice = [
        recipe.name for n, recipe in enumerate(recipes) if recipe.name in {earlier.name for earlier in recipes[:n]}
    ]
    if twice:
        raise UsageError(f"{twice[0]} is given twice")
    if not recipes:
        raise UsageError("no recipe is given; quanterr formats --recipes lists them")
    return recipes


def _expand_braces(name: str) -> list[str]:
    match = re.fullmatch(r"([^{}]*)\{([^{}]*)\}(.*)", name)
    if match is None:
        return [name]
    return [other for word in match[2].split(",") for other in _expand_braces(f"{match[1]}{word.strip()}{match[3]}")]


def parse_recipe(name: str) -> Recipe:
    """Parse a recipe's name.

    Raises:
        UsageError: no recipe has that name; the message proposes a similar one.
    """
    base, *options = name.lower().split(":")
    flags = {option for option in options if "=" not in option}
    values = dict(option.split("=", 1) for option in options if "=" in option)
    calibrator = parse_calibrator(values.pop("scales", "absmax"))
    encoder = _parse_encoder(base, flags, calibrator)
    if encoder is None:
        near = get_close_matches(base, LISTING, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else "quanterr formats --recipes lists them"
        raise UsageError(f"{display(name)} is not a recipe; {hint}")
    if values:
        raise UsageError(f"{display(name)}: unknown option {display(next(iter(values)))}; there is scales=")
    return Recipe(name.lower(), encoder)


def _parse_encoder(base: str, flags: set[str], calibrator: Calibrator) -> Encoder | None:
    """Return the encoder of a name and its options; None if the name is unknown.

    Raises:
        UsageError: the encoder does not have that option.
    """
    allowed: set[str] = set()
    encoder: Encoder | None = None
    calibrates = calibrator == ABSMAX
    if match := SCALED.fullmatch(base):
        high = int(match["high"] or BLOCK)
        edges = BLOCK_EDGES.get(match["per"], (high, int(match["wide"] or high)))
        encoder = ScaledEncoder(FP8 if match["codes"] == "fp8" else INT8, edges, calibrator)
        calibrates = not calibrator.averages or edges == (0, 0)
    elif match := INTEGER.fullmatch(base):
        allowed = {"asym"}
        encoder = IntegerEncoder(int(match["bits"]), int(match["group"] or 0), "asym" not in flags, calibrator)
        calibrates = not calibrator.averages
    elif match := MLX.fullmatch(base):
        encoder = AffineEncoder(int(match["bits"]), int(match["group"]))
    elif match := TABLE.fullmatch(base):
        allowed = {"double"}
        encoder = TableEncoder(match["kind"], int(match["block"] or TABLE_BLOCK), "double" in flags)
    elif base in ("mxfp8", "mxfp4", "nvfp4"):
        encoder = MicroscaledEncoder(8 if base == "mxfp8" else 4, nv=base == "nvfp4")
    elif (dtype := base.removeprefix("gguf_").upper()) in GGML and base.startswith("gguf_"):
        allowed = {"strict"} if dtype in FALLBACKS else set()
        encoder = _make_blocks(dtype, falls_back="strict" not in flags)
    if encoder is None:
        return None
    if flags - allowed:
        known = f"there is :{', :'.join(sorted(allowed))}" if allowed else "it has none"
        raise UsageError(f"{base}: unknown option :{display(min(flags - allowed))}; {known}")
    if not calibrates:
        why = (
            "ema works only for the scale of a whole tensor" if calibrator.averages else "its format derives its scales"
        )
        raise UsageError(f"{base} has no scales={calibrator.name}: {why}")
    return encoder


def _make_blocks(dtype: str, falls_back: bool = False) -> BlockEncoder:
    """Return the encoder of a type of ggml; with ``falls_back``, another type stores rows that do not fill blocks."""
    other = FALLBACKS.get(dtype) if falls_back else None
    recipe = None if other is None else Recipe(f"gguf_{other.lower()}", _make_blocks(other))
    return BlockEncoder(dtype, GGML[dtype], dtype not in WITHOUT_IMPORTANCE, recipe)
