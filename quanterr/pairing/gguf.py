"""A GGUF file beside an original with its own names: which tensor is which, and what the converter changed.

    names        by the map of gguf_names.py; blk.3.ffn_gate_exps holds the gate_proj of all experts of block 3
    q, k         llama and its kin: rows of each head in pairs (0, d/2), (1, d/2 + 1), … instead of halves
    norms        Gemma and some others: one more than in the original
    A            Mamba: -exp(A_log)

What the converter does is known by architecture and checked on a few rows: where another way fits and this
one does not, that one is taken, and reported. Of architectures of which llama.cpp is known to expect one way alone
the other is an error: it would compute with wrong weights.

Reference: ggml-org/llama.cpp (as of gguf 0.19.0) convert_hf_to_gguf.py (LlamaModel.permute, GemmaModel, MambaModel).
"""

from dataclasses import dataclass, replace
from functools import cache

from quanterr.checkpoints import Checkpoint
from quanterr.checkpoints.gguf_metadata import GgufMetadata
from quanterr.formats import Weight
from quanterr.pairing.gguf_names import architectures, names_of
from quanterr.pairing.names import CONVENTIONS, Atoms, atoms_of, canonical
from quanterr.pairing.plan import Alternative, Bucket, Pair
from quanterr.pairing.rotary import in_pairs
from quanterr.pairing.sampling import ORDER, VALUES
from quanterr.pairing.views import minus_exp, plus, unpaired

CONVENTION = next(row for row in CONVENTIONS if row.program == "llama.cpp")
EXPERTS = "_exps"

REORDERED = "rows of heads reordered from pairs to halves"  # evidence of a weight


@dataclass(frozen=True)
class Translation:
    """Names and habits of the GGUF file on one of both sides."""

    metadata: GgufMetadata
    architecture: str
    stored: frozenset[str]  # names in the GGUF file, without .weight and .bias
    gguf_side: int  # 0: the original, 1: the quantized

    @classmethod
    def between(cls, original: Checkpoint, quantized: Checkpoint) -> "Translation | None":
        """The translation between two checkpoints; None where both or neither have llama.cpp's names."""
        known = [checkpoint.gguf is not None and _translated(checkpoint) for checkpoint in (original, quantized)]
        if known[0] == known[1]:
            return None
        side = known.index(True)
        checkpoint = (original, quantized)[side]
        metadata = checkpoint.gguf
        if metadata is None or metadata.architecture is None:
            return None
        stored = frozenset(_path(name)[0] for name in checkpoint.entries)
        return cls(metadata, metadata.architecture, stored, side)

    def is_derived(self, name: str) -> bool:
        """Whether a tensor of the GGUF file was computed from the configuration."""
        return _path(name)[0] in CONVENTION.derived

    def atoms(self, side: int, name: str, shape: tuple[int, ...]) -> Atoms:
        """What a weight of a side holds, in llama.cpp's names."""
        if side == self.gguf_side:
            path, kind = _path(name)
            stacked = path.endswith(EXPERTS) and len(shape) > 2 - bool(kind)
            names = tuple(f"{path}.{expert}{kind}" for expert in range(shape[0])) if stacked else (path + kind,)
            return Atoms(names, True)
        path, kind = canonical(name)
        whole = llama_name(self.architecture, path)
        if whole in self.stored and len(shape) < 3 - bool(kind):
            return Atoms((f"{whole}{kind}",), True)
        found = atoms_of(name, shape)
        paths = (atom.removesuffix(kind) for atom in found.names)
        return Atoms(tuple(llama_name(self.architecture, path) + kind for path in paths), found.equal)

    def adapted(self, pair: Pair) -> Pair:
        """A pair with what the converter changed undone, or done to the original too; with the other way to read it."""
        gguf, other = self._sides(pair.original, pair.quantized)
        path, kind = _path(gguf.codes.name)
        word = path.rpartition(".")[2]
        if pair.alternative is None and word in ("attn_q", "attn_k"):
            return self._unpaired(pair, gguf, other, path, word)
        if pair.alternative is None and word.endswith("norm") and len(other.shape) == 1 and not kind:
            return self._plus_one(pair, gguf, other)
        return self._with(pair, gguf, minus_exp(other)) if word in CONVENTION.negated_exp else pair

    def _sides(self, first: Weight, second: Weight) -> tuple[Weight, Weight]:
        """The GGUF file's weight and the other, of original and quantized; and the reverse."""
        return (first, second) if self.gguf_side == 0 else (second, first)

    def _with(self, pair: Pair, gguf: Weight, other: Weight, alternative: Alternative | None = None) -> Pair:
        original, quantized = self._sides(gguf, other)
        return replace(pair, original=original, quantized=quantized, alternative=alternative)

    def _plus_one(self, pair: Pair, gguf: Weight, other: Weight) -> Pair:
        one_more = plus(other, 1.0)
        one_more = replace(one_more, evidence=(*one_more.evidence, "stored plus one"))
        if self.architecture in CONVENTION.plus_one:
            problem = f"stored as in the original, without the added one that llama.cpp expects for {self.architecture}"
            left = pair.left(Bucket.UNSUPPORTED, problem)
            return self._with(pair, gguf, one_more, Alternative(*self._sides(gguf, other), VALUES, leftovers=left))
        problem = f"stored plus one, which llama.cpp does not expect for {self.architecture}"
        left = pair.left(Bucket.UNSUPPORTED, problem) if self.architecture in CONVENTION.not_plus_one else ()
        return self._with(pair, gguf, other, Alternative(*self._sides(gguf, one_more), VALUES, leftovers=left))

    def _unpaired(self, pair: Pair, gguf: Weight, other: Weight, path: str, word: str) -> Pair:
        block = int(path.split(".")[1]) if path.startswith("blk.") else 0
        heads = self.metadata.heads(block) if word == "attn_q" else self.metadata.kv_heads(block)
        if not heads or gguf.shape[0] % (2 * heads):
            return pair
        halves = unpaired(gguf, heads)
        halves = replace(halves, evidence=(*halves.evidence, REORDERED))
        expected = f"llama.cpp expects for {self.architecture}: it would use the wrong rows"
        bar = ORDER if len(other.shape) > 1 else VALUES
        if self.architecture in CONVENTION.paired:
            as_stored = replace(gguf, evidence=(*gguf.evidence, "rows of heads as they are"))
            problem = f"rows of heads are as in the original, not in the pairs that {expected}"
            left = () if in_pairs(other.codes.name) else pair.left(Bucket.UNSUPPORTED, problem)
            return self._with(pair, halves, other, Alternative(*self._sides(as_stored, other), bar, leftovers=left))
        problem = f"rows of heads are in pairs, not in the halves that {expected}"
        left = pair.left(Bucket.UNSUPPORTED, problem) if self.architecture in CONVENTION.unpaired else ()
        return self._with(pair, gguf, other, Alternative(*self._sides(halves, other), bar, leftovers=left))


def llama_name(architecture: str, path: str) -> str:
    """llama.cpp's name of a path (gguf_names.py), with the number of an expert behind it; unknown ones stay."""
    words = path.split(".")
    numbers = [n for n, word in enumerate(words) if word.isdecimal()]
    block = words[numbers[0]] if numbers else ""
    expert = ""
    if len(numbers) > 1 and words[numbers[1] - 1] == "experts":
        expert = "." + words.pop(numbers[1])
    if numbers:
        words[numbers[0]] = "{bid}"
    name = _names(architecture).get(".".join(words))
    return path if name is None else name.replace("{bid}", block) + expert


@cache
def _names(architecture: str) -> dict[str, str]:
    """Path → llama.cpp's name; of paths that mean two things, neither."""
    found: dict[str, set[str]] = {}
    for original, name in names_of(architecture).items():
        found.setdefault(canonical(f"{original}.weight")[0], set()).add(name)
    return {path: next(iter(names)) for path, names in found.items() if len(names) == 1}


def _path(name: str) -> tuple[str, str]:
    """A name of llama.cpp's without .weight or .bias, and which it was."""
    if name.endswith(".bias"):
        return name.removesuffix(".bias"), ".bias"
    return name.removesuffix(".weight"), ""


def _translated(checkpoint: Checkpoint) -> bool:
    """Whether a GGUF file has llama.cpp's names (those made for ComfyUI keep the original's)."""
    names = ("token_embd.weight", "blk.0.", "output_norm.weight")
    known = checkpoint.gguf is not None and checkpoint.gguf.architecture in architectures()
    return known and any(name.startswith(names) for name in checkpoint.entries)
