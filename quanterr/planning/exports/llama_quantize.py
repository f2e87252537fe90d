"""Export of plans with types of ggml as a command of llama-quantize, with ``--tensor-type NAMES=TYPE``."""

import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence

from quanterr.advice.quantizers import CONTINUED, GGUF_FILES, gguf_input, join_names, quote, tensor_type
from quanterr.documents.plan.model import ORIGINAL, Plan
from quanterr.errors import UsageError
from quanterr.pairing.conversion import to_llama_name
from quanterr.pairing.names import atoms_of, canonicalize
from quanterr.planning.exports.base import STACK, Consumer
from quanterr.recipes.matrices import is_stack
from quanterr.util.text import display


def _export(plan: Plan, modules: Mapping[str, Sequence[str]]) -> str:
    """Return the command of llama-quantize, after one that makes its input if the original is not a GGUF file.

    The command names the importance matrix by which the plan chose scales. An embedding or head that is not in the plan
    gets bf16, as it would otherwise get the base type. No tensor matches two patterns, because which of them would
    apply depends on the version of llama-quantize. Gate and up of experts are two stacks in GGUF files, even if they
    are one in the original.
    """
    lines: dict[str, str] = {}
    for recipe, names in modules.items():
        ggml_type = "bf16" if recipe == ORIGINAL else recipe.removeprefix("gguf_")
        stacks = {name for name in names if is_stack(name, STACK)}
        paths = [canonicalize(f"{name}.weight")[0] for name in names if name not in stacks]
        paths += [path for name in stacks for path in atoms_of(name, STACK).names]
        for path in paths:
            llama_name = re.sub(r"\.\d+$", "", to_llama_name(plan.architecture, path))
            if lines.setdefault(llama_name, ggml_type) != ggml_type:
                raise UsageError(
                    f"--export llama-quantize: {display(llama_name)} is one tensor there, but has two recipes"
                )
    ends = {"--token-embedding-type": "token_embd", "--output-tensor-type": "output"}
    words = [] if plan.importance is None else [f"--imatrix {shlex.quote(plan.importance)}"]
    words += [f"{option} {lines.pop(name, 'bf16')}" for option, name in ends.items()]
    words += [
        tensor_type(quote(pattern), ggml_type)
        for ggml_type in dict.fromkeys(lines.values())
        for pattern in join_names(name for name, planned in lines.items() if planned == ggml_type)
    ]
    quantized = Counter(ggml_type for ggml_type in lines.values() if ggml_type != "bf16")
    base = quantized.most_common(1)[0][0] if quantized else "bf16"
    source, making = gguf_input(plan.original)
    words.append(f"{source} planned.gguf {GGUF_FILES.get(base, base.upper())}")
    return making + CONTINUED.join(["llama-quantize", *words]) + "\n"


CONSUMER = Consumer(lambda recipe: recipe.startswith("gguf_"), _export, takes_stacks=True, reads=".gguf")
