"""A GGUF file beside an original with its own names: which tensor is which, and what the converter changed.

    names        by the map of gguf_names.py; blk.3.ffn_gate_exps holds the gate_proj of all experts of block 3
    q, k         llama and its kin: rows of each head in pairs (0, d/2), (1, d/2 + 1), … instead of halves
    norms        Gemma and some others: one more than in the original
    A            Mamba: -exp(A_log)

What the converter does is known by architecture and checked on a few rows: where another way fits and this
one does not, that one is taken, and told. Of architectures of which llama.cpp is known to expect one way alone
the other is an error: it would compute with wrong weights.

Reference: ggml-org/llama.cpp convert_hf_to_gguf.py (LlamaModel.permute, GemmaModel, MambaModel).
"""

from dataclasses import dataclass, replace
from functools import cache

from quanterr.checkpoints import Checkpoint
from quanterr.checkpoints.gguf_metadata import GgufMetadata
from quanterr.errors import FormatMismatch
from quanterr.formats import Weight
from quanterr.pairing.gguf_names import architectures, names_of
from quanterr.pairing.names import Atoms, atoms_of, canonical
from quanterr.pairing.rotary import in_pairs
from quanterr.pairing.sampling import BETTER, RELATED, SUSPICIOUS, UNRELATED, on_cpu, relative_error
from quanterr.pairing.views import minus_exp, plus, unpaired

# Architectures whose converter puts the rows of q and k in pairs.
PAIRED = frozenset(
    {"llama", "deci", "granite", "granitemoe", "granitehybrid", "llada", "nanbeige", "arcee", "smollm3", "minicpm3"}
)
IN_HALVES = frozenset({"qwen2", "qwen2moe", "qwen3", "qwen3moe", "gemma", "gemma2", "gemma3", "phi3"})

# Architectures whose converter adds one to all norms, and some of those where none is.
PLUS_ONE = frozenset({"gemma", "gemma2", "gemma3", "nemotron"})
NOT_PLUS_ONE = frozenset({"llama", "qwen2", "qwen2moe", "qwen3", "qwen3moe", "phi3"})

EXPERTS = "_exps"

# Tensors that a converter works out from the configuration.
DERIVED = ("rope_freqs", "rope_factors_long", "rope_factors_short")


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
        """Whether a tensor of the GGUF file was worked out from the configuration."""
        return _path(name)[0] in DERIVED

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
        return Atoms(tuple(llama_name(self.architecture, path) + kind for path in paths), found.even)

    def adapted(self, original: Weight, quantized: Weight) -> tuple[Weight, Weight]:
        """Both weights with what the converter changed undone, or done to the original too."""
        sides = [original, quantized]
        gguf, other = sides[self.gguf_side], sides[1 - self.gguf_side]
        path, kind = _path(gguf.codes.name)
        word = path.rpartition(".")[2]
        if word in ("attn_q", "attn_k"):
            sides[self.gguf_side] = self._unpaired(gguf, other, path, word)
        elif word.endswith("norm") and len(other.shape) == 1 and not kind:
            sides[1 - self.gguf_side] = self._plus_one(other, gguf)
        elif word == "ssm_a":
            sides[1 - self.gguf_side] = minus_exp(other)
        return sides[0], sides[1]

    def _plus_one(self, other: Weight, gguf: Weight) -> Weight:
        more = plus(other, 1.0)
        found = _nearest(other, (more, "stored plus one"), gguf)
        changed = found is not other
        if self.architecture in PLUS_ONE and not changed and _nearest(more, (other, ""), gguf) is not more:
            raise FormatMismatch(
                f"stored as in the original, without the one that llama.cpp expects of {self.architecture}"
            )
        if self.architecture in NOT_PLUS_ONE and changed:
            raise FormatMismatch(f"stored plus one, which llama.cpp does not expect of {self.architecture}")
        return found

    def _unpaired(self, gguf: Weight, other: Weight, path: str, word: str) -> Weight:
        block = int(path.split(".")[1]) if path.startswith("blk.") else 0
        heads = self.metadata.heads(block) if word == "attn_q" else self.metadata.kv_heads(block)
        rows = gguf.shape[0]
        if not heads or rows % (2 * heads):
            return gguf
        halves, told = unpaired(gguf, heads), "rows of heads put back from pairs to halves"
        if self.architecture in PAIRED:
            undone = replace(halves, evidence=(*halves.evidence, told))
            found = _nearest(undone, (gguf, "rows of heads as they are"), other)
            if found is not undone and not in_pairs(other.codes.name):
                raise FormatMismatch(f"rows of heads are as in the original, not in the pairs that {self._expected}")
            return found
        found = _nearest(gguf, (halves, told), other)
        if found is not gguf and self.architecture in IN_HALVES:
            raise FormatMismatch(f"rows of heads are in pairs, not in the halves that {self._expected}")
        return found

    @property
    def _expected(self) -> str:
        return f"llama.cpp expects of {self.architecture}: it would compute with the wrong rows"


def llama_name(architecture: str, path: str) -> str:
    """llama.cpp's name of a path (conventions.py), with the number of an expert behind it; unknown ones stay."""
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


def _nearest(usual: Weight, unusual: tuple[Weight, str], other: Weight) -> Weight:
    """The usual weight, or the unusual one where that alone is near the other side."""
    with on_cpu() as workspaces:
        error = relative_error(other, usual, workspaces)
        if error <= SUSPICIOUS and len(other.shape) > 1:
            return usual
        weight, told = unusual
        better = relative_error(other, weight, workspaces)
        if not (BETTER * better < error or better < RELATED < UNRELATED < error):
            return usual
    return replace(weight, evidence=(*weight.evidence, told))


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
