"""Changes of ONNX Runtime GenAI's model builder to tensors besides their names, by ``model_type`` of config.json.

Norms of some models have one added to them: the operator multiplies by what is stored, where transformers
multiplies by one plus that. The norm within linear attention stays as it is.

Reference: microsoft/onnxruntime-genai@a0c04eb1 src/python/py/models/builders/gemma.py, nemotron.py and qwen.py
(add_offset), base.py make_layernorm.
"""

from collections.abc import Collection, Iterable

SHIFTED = frozenset(("gemma", "gemma2", "gemma3", "gemma3_text", "nemotron", "qwen3_5", "qwen3_5_text"))
LAST_NORM = ".final_norm_layernorm."  # part of the name that only this program gives the last norm


def is_genai(names: Iterable[str]) -> bool:
    """Return whether the tensors of a checkpoint have the names of GenAI's builder."""
    return any(LAST_NORM in name for name in names)


def adds_one(kinds: Collection[str], path: str) -> bool:
    """Return whether a norm has one added to it, by its path without wrappers."""
    return not SHIFTED.isdisjoint(kinds) and "linear_attn" not in path
