"""Contradictions between a GGUF file's weights and the type in general.file_type or in its name.

llama-quantize chooses the type of each tensor by rules (src/llama-quant.cpp, ``llama_tensor_get_type_impl`` at
007dbbf3fd17): a mixture has more bits for some weights, and embeddings and the output follow rules of their own. Of
the other weights, at least a third keep the type in the name if the MLP has no gate; otherwise most of them do. Where
columns do not fill blocks, llama-quantize uses another type (``tensor_type_fallback``); in models with odd sizes, for
all weights.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from quanterr.checkpoints import Checkpoint, Entry
from quanterr.checkpoints.ggml_types import BLOCKS, OF_NAME
from quanterr.documents.base import Finding
from quanterr.findings.checks import DECLARED, QUANTIZED, check
from quanterr.findings.codes import make_finding
from quanterr.findings.contents import Contents
from quanterr.findings.limits import MAJOR_SHARE
from quanterr.util.text import display, itemize

# general.file_type → name, as in enum llama_ftype of include/llama.h. Files of plain floats are left out: models that
# were trained in a block type, such as gpt-oss, are converted as such.
FILE_TYPES: Mapping[int, str] = {
    2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S", 12: "Q3_K_M", 13: "Q3_K_L",
    14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS", 21: "Q2_K_S",
    22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S", 29: "IQ2_M",
    30: "IQ4_XS", 31: "IQ1_M", 36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4_MOE", 39: "NVFP4",
}  # fmt: skip
# Name → the types of weights that get no extra bits (llama_ftype_get_default_type; in IQ3_XS, most of the MLP has
# IQ3_XXS). A name that is not here begins with its type, such as Q4_K_M with Q4_K.
MAIN_TYPES: Mapping[str, tuple[str, ...]] = {
    "IQ3_XS": ("IQ3_S", "IQ3_XXS"), "IQ3_M": ("IQ3_S",), "IQ2_S": ("IQ2_XS",), "IQ2_M": ("IQ2_S",),
    "MXFP4_MOE": ("MXFP4",), "Q8_K_XL": ("Q8_0",),
}  # fmt: skip
SIZE_SUFFIX = re.compile(r"_(?:S|M|L|XL)$")  # the size of a mixture of K types; llama.cpp has no XL, but names have
IN_NAME = re.compile(
    r"(?<![A-Za-z0-9])(?P<dynamic>UD-)?(?P<type>I?Q[1-8]_(?:[01]|K(?:_(?:S|M|L|XL))?|XXS|XS|S|M|NL)|TQ[12]_0|MXFP4_MOE|MXFP4|NVFP4)(?![A-Za-z0-9_])",
    re.IGNORECASE,
)
EXCEPTED_NAMES = re.compile(r"(?:^|\.)(?:token_embd|per_layer_token_embd|output)\.weight$")  # embeddings and output
MAX_LISTED_TYPES = 3


class _Claim(NamedTuple):
    """A type that a file claims to hold, and the source of the claim."""

    name: str
    source: str
    is_dynamic: bool = False  # the types of single tensors were chosen by hand

    @property
    def types(self) -> tuple[str, ...]:
        """The types of tensors that the name stands for."""
        plain = SIZE_SUFFIX.sub("", self.name) if "_K_" in self.name else self.name
        return MAIN_TYPES.get(self.name, (plain,))


@check("misnamed_type", needs=DECLARED, of=QUANTIZED)
def check_file_type(contents: Contents) -> Iterator[Finding]:
    """Report a GGUF file if only a minor share of its weights has the type that it is named after."""
    checkpoint = contents.checkpoint
    if checkpoint.gguf is None:
        return
    weights = _list_mixed(checkpoint.entries.values())
    total = sum(entry.n for entry in weights)
    for types, claims in _group(_find_claims(checkpoint)).items() if total else ():
        share = sum(entry.n for entry in weights if _find_plain_type(entry) in types) / total
        if share < MAJOR_SHARE:
            yield _report(claims, types, share, weights)


def _list_mixed(entries: Iterable[Entry]) -> list[Entry]:
    """Return the weights whose type the mixture decides: quantized matrices, or all matrices if none is quantized."""
    matrices = [entry for entry in entries if len(entry.shape) > 1 and not EXCEPTED_NAMES.search(entry.name)]
    return [entry for entry in matrices if entry.dtype in BLOCKS] or matrices


def _find_plain_type(entry: Entry) -> str:
    """Return the entry's type; for a type that interleaves the rows of another type, that type."""
    return OF_NAME[entry.dtype].plain if entry.dtype in OF_NAME else entry.dtype


def _find_claims(checkpoint: Checkpoint) -> Iterator[_Claim]:
    number = checkpoint.gguf.get_int("general.file_type") if checkpoint.gguf else None
    if number is not None and number in FILE_TYPES:
        yield _Claim(FILE_TYPES[number], "general.file_type")
    file = checkpoint.files[0].path.name
    for match in list(IN_NAME.finditer(file))[-1:]:  # before it stands the name of the model
        claim = _Claim(match["type"].upper(), f"the name {display(file)}", bool(match["dynamic"]))
        if BLOCKS.keys() >= set(claim.types):
            yield claim


def _group(claims: Iterator[_Claim]) -> dict[tuple[str, ...], list[_Claim]]:
    """Return the claims by the types that they stand for."""
    grouped: dict[tuple[str, ...], list[_Claim]] = {}
    for claim in claims:
        grouped.setdefault(claim.types, []).append(claim)
    return grouped


def _report(claims: Sequence[_Claim], types: tuple[str, ...], share: float, weights: Sequence[Entry]) -> Finding:
    held: Counter[str] = Counter()
    for entry in weights:
        held[entry.dtype] += entry.n
    shares = {dtype: n / held.total() for dtype, n in held.most_common()}
    claimed = " and ".join(f"{claim.source} states {claim.name}" for claim in claims)
    amount = f"only {share:.1%} of the weights are" if share else "no weight is"
    message = (
        f"{claimed}, but {amount} {' or '.join(types)}: "
        f"{itemize([f'{dtype} {share:.0%}' for dtype, share in shares.items()], MAX_LISTED_TYPES)}"
        f"{_explain(types, weights)}"
    )
    is_custom = any(claim.is_dynamic for claim in claims)
    remedy = "name the file after the type that it holds; llama-quantize falls back to other types and logs it"
    return make_finding(
        "misnamed_type", "info" if is_custom else "warning", None, message, remedy, share=share, shares=shares
    )


def _explain(types: tuple[str, ...], weights: Sequence[Entry]) -> str:
    """Return why llama-quantize took another type: columns that do not fill its blocks."""
    size = BLOCKS[types[0]][0] if types[0] in BLOCKS else 1
    odd = sorted({entry.shape[-1] for entry in weights if entry.dtype not in types and entry.shape[-1] % size})
    return (
        f"; {itemize([f'{cols:,}' for cols in odd], MAX_LISTED_TYPES)} columns do not fill blocks of {size}"
        if odd
        else ""
    )
