"""Pairing of a GGUF file with an original under other names: the map of names, and the converter's changes.

    names        by the map of gguf_names.py; blk.3.ffn_gate_exps holds the gate_proj of all experts of block 3
    q, k         llama and similar: rows of each head in pairs (0, d/2), (1, d/2 + 1), … instead of halves
    norms        Gemma and some others: one is added to each element
    A            Mamba: -exp(A_log)

The architecture gives the expected changes, which are checked on a few rows. If only the other form fits, it is used
and reported. For architectures where llama.cpp is known to expect one form, the other is an error: llama.cpp would
compute with wrong weights.

Reference: ggml-org/llama.cpp (as of gguf 0.19.0) convert_hf_to_gguf.py (LlamaModel.permute, GemmaModel, MambaModel).
"""

from dataclasses import dataclass
from functools import cache

from msgspec.structs import replace

from quanterr.checkpoints import Checkpoint
from quanterr.checkpoints.gguf_metadata import GgufMetadata
from quanterr.formats import Weight
from quanterr.pairing.gguf_names import architectures, names_of
from quanterr.pairing.model import Alternative, Bucket, Pair
from quanterr.pairing.names import CONVENTIONS, Atoms, atoms_of, canonicalize
from quanterr.pairing.rotary import has_row_pairs
from quanterr.pairing.sampling import ORDER, VALUES
from quanterr.pairing.views import add_number, negate_exp, unpair_rows

CONVENTION = next(row for row in CONVENTIONS if row.program == "llama.cpp")
EXPERTS = "_exps"

REORDERED = "rows of heads reordered from pairs to halves"  # evidence for a weight


@dataclass(frozen=True)
class Translation:
    """The names and conventions of the GGUF file on one of the two sides."""

    metadata: GgufMetadata
    architecture: str
    stored: frozenset[str]  # names in the GGUF file, without .weight and .bias
    gguf_side: int  # 0: the original, 1: the quantized

    @classmethod
    def between(cls, original: Checkpoint, quantized: Checkpoint) -> "Translation | None":
        """Return the translation between two checkpoints; None if both or neither have llama.cpp's names."""
        known = [checkpoint.gguf is not None and _has_llama_names(checkpoint) for checkpoint in (original, quantized)]
        if known[0] == known[1]:
            return None
        side = known.index(True)
        checkpoint = (original, quantized)[side]
        metadata = checkpoint.gguf
        if metadata is None or metadata.architecture is None:
            return None
        stored = frozenset(_split_name(name)[0] for name in checkpoint.entries)
        return cls(metadata, metadata.architecture, stored, side)

    def is_derived(self, name: str) -> bool:
        """Return whether the converter computed this tensor of the GGUF file from the configuration."""
        return _split_name(name)[0] in CONVENTION.derived

    def atoms(self, side: int, name: str, shape: tuple[int, ...]) -> Atoms:
        """Return the atoms of a weight on a side (0 or 1), in llama.cpp's names."""
        if side == self.gguf_side:
            path, kind = _split_name(name)
            stacked = path.endswith(EXPERTS) and len(shape) > 2 - bool(kind)
            names = tuple(f"{path}.{expert}{kind}" for expert in range(shape[0])) if stacked else (path + kind,)
            return Atoms(names, True)
        path, kind = canonicalize(name)
        whole = to_llama_name(self.architecture, path)
        if whole in self.stored and len(shape) < 3 - bool(kind):
            return Atoms((f"{whole}{kind}",), True)
        found = atoms_of(name, shape)
        paths = (atom.removesuffix(kind) for atom in found.names)
        return Atoms(tuple(to_llama_name(self.architecture, path) + kind for path in paths), found.equal)

    def adapt(self, pair: Pair) -> Pair:
        """Undo the converter's change, or apply it to the original too; add the other form as an alternative."""
        gguf, other = self._swap_sides(pair.original, pair.quantized)
        path, kind = _split_name(gguf.codes.name)
        word = path.rpartition(".")[2]
        if pair.alternative is None and word in ("attn_q", "attn_k"):
            return self._adapt_heads(pair, gguf, other, path, word)
        if pair.alternative is None and word.endswith("norm") and len(other.shape) == 1 and not kind:
            return self._adapt_norm(pair, gguf, other)
        return self._replace_weights(pair, gguf, negate_exp(other)) if word in CONVENTION.negated_exp else pair

    def _swap_sides(self, first: Weight, second: Weight) -> tuple[Weight, Weight]:
        """Map (original, quantized) to (GGUF, other), and back: both ways are the same swap."""
        return (first, second) if self.gguf_side == 0 else (second, first)

    def _replace_weights(self, pair: Pair, gguf: Weight, other: Weight, alternative: Alternative | None = None) -> Pair:
        original, quantized = self._swap_sides(gguf, other)
        return replace(pair, original=original, quantized=quantized, alternative=alternative)

    def _adapt_norm(self, pair: Pair, gguf: Weight, other: Weight) -> Pair:
        one_more = add_number(other, 1.0)
        one_more = replace(one_more, evidence=(*one_more.evidence, "stored plus one"))
        if self.architecture in CONVENTION.plus_one:
            problem = f"stored as in the original, without the added one that llama.cpp expects for {self.architecture}"
            left = pair.leave(Bucket.UNSUPPORTED, problem)
            return self._replace_weights(
                pair, gguf, one_more, Alternative(*self._swap_sides(gguf, other), VALUES, leftovers=left)
            )
        problem = f"stored plus one, which llama.cpp does not expect for {self.architecture}"
        left = pair.leave(Bucket.UNSUPPORTED, problem) if self.architecture in CONVENTION.not_plus_one else ()
        return self._replace_weights(
            pair, gguf, other, Alternative(*self._swap_sides(gguf, one_more), VALUES, leftovers=left)
        )

    def _adapt_heads(self, pair: Pair, gguf: Weight, other: Weight, path: str, word: str) -> Pair:
        block = int(path.split(".")[1]) if path.startswith("blk.") else 0
        heads = self.metadata.heads(block) if word == "attn_q" else self.metadata.kv_heads(block)
        if not heads or gguf.shape[0] % (2 * heads):
            return pair
        halves = unpair_rows(gguf, heads)
        halves = replace(halves, evidence=(*halves.evidence, REORDERED))
        expected = f"llama.cpp expects for {self.architecture}: it would use the wrong rows"
        bar = ORDER if len(other.shape) > 1 else VALUES
        if self.architecture in CONVENTION.paired:
            as_stored = replace(gguf, evidence=(*gguf.evidence, "rows of heads as they are"))
            problem = f"rows of heads are as in the original, not in the pairs that {expected}"
            left = () if has_row_pairs(other.codes.name) else pair.leave(Bucket.UNSUPPORTED, problem)
            return self._replace_weights(
                pair, halves, other, Alternative(*self._swap_sides(as_stored, other), bar, leftovers=left)
            )
        problem = f"rows of heads are in pairs, not in the halves that {expected}"
        left = pair.leave(Bucket.UNSUPPORTED, problem) if self.architecture in CONVENTION.unpaired else ()
        return self._replace_weights(
            pair, gguf, other, Alternative(*self._swap_sides(halves, other), bar, leftovers=left)
        )


def to_llama_name(architecture: str, path: str) -> str:
    """Return llama.cpp's name of a path (gguf_names.py), with an expert's number appended; unknown paths are kept."""
    words = path.split(".")
    numbers = [n for n, word in enumerate(words) if word.isdecimal()]
    block = words[numbers[0]] if numbers else ""
    expert = ""
    if len(numbers) > 1 and words[numbers[1] - 1] == "experts":
        expert = "." + words.pop(numbers[1])
    if numbers:
        words[numbers[0]] = "{bid}"
    name = _map_names(architecture).get(".".join(words))
    return path if name is None else name.replace("{bid}", block) + expert


@cache
def _map_names(architecture: str) -> dict[str, str]:
    """Map paths to llama.cpp's names, leaving out ambiguous paths."""
    found: dict[str, set[str]] = {}
    for original, name in names_of(architecture).items():
        found.setdefault(canonicalize(f"{original}.weight")[0], set()).add(name)
    return {path: next(iter(names)) for path, names in found.items() if len(names) == 1}


def _split_name(name: str) -> tuple[str, str]:
    """Split a llama.cpp name into its path and its kind: ``.bias``, or empty for a weight."""
    if name.endswith(".bias"):
        return name.removesuffix(".bias"), ".bias"
    return name.removesuffix(".weight"), ""


def _has_llama_names(checkpoint: Checkpoint) -> bool:
    """Return whether a GGUF file uses llama.cpp's names (files for ComfyUI keep the original's names)."""
    names = ("token_embd.weight", "blk.0.", "output_norm.weight")
    known = checkpoint.gguf is not None and checkpoint.gguf.architecture in architectures()
    return known and any(name.startswith(names) for name in checkpoint.entries)
