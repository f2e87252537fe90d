"""What the five commonest runtimes do with each format, by the rows of their rules: the table of the guide."""

from collections.abc import Iterator
from fnmatch import fnmatchcase

from quanterr.documents.loading import LOADS, NOT_KNOWN, REFUSES
from quanterr.findings.runtimes.conditions import always
from quanterr.findings.runtimes.judging import OF_GGML, READ, RUN, RUNTIMES
from quanterr.findings.runtimes.model import Runtime
from quanterr.formats import FORMATS

SHOWN = ("transformers", "vLLM", "llama.cpp", "ComfyUI", "MLX")
# The quant_method that the configuration of a format's program declares, where it has one.
METHODS = {
    "aqlm": "aqlm",
    "awq_*": "awq",
    "bitnet": "bitnet",
    "bnb_*": "bitsandbytes",
    "ct_*": "compressed-tensors",
    "eetq": "eetq",
    "exl2": "exl2",
    "exl3": "exl3",
    "gemma_*": "gemma",
    "gptq*": "gptq",
    "hqq": "hqq",
    "modelopt_int4": "modelopt",
    "mlx_*": "",  # a quantization_config without quant_method
    "paroquant": "paroquant",
    "quanto_*": "quanto",
    "quark_*": "quark",
    "sinq": "sinq",
    "spqr": "spqr",
    "torchao_*": "torchao",
    "vptq": "vptq",
}


def answer(runtime: Runtime, name: str) -> str:
    """Return what a runtime does with a format that is declared as its own program does, as ``loads (run)``."""
    is_gguf, only = name.startswith(OF_GGML), runtime.container
    if only is not None and only.is_gguf != is_gguf:
        return REFUSES
    if rows := [row for row in runtime.layouts if name in row.formats]:
        return f"{LOADS} ({RUN if any(row.is_run for row in rows) else READ})"
    if is_gguf:
        return REFUSES if runtime.other_types else NOT_KNOWN
    method = next((method for pattern, method in METHODS.items() if fnmatchcase(name, pattern)), None)
    declared = {"quant_method": method} if method else {}
    for rule in runtime.configs if method is not None else ():
        is_general = not rule.methods or (method in rule.methods and rule.is_broken is always)
        if is_general and rule.is_broken(declared):
            return rule.effect
    return NOT_KNOWN


def list_rows() -> Iterator[tuple[list[str], list[str]]]:
    """Yield groups of formats that have the same answers, and the answers in the order of ``SHOWN``."""
    runtimes = [runtime for name in SHOWN for runtime in RUNTIMES if runtime.name == name]
    alike: dict[tuple[str, ...], list[str]] = {}
    for row in FORMATS:
        alike.setdefault(tuple(answer(runtime, row.name) for runtime in runtimes), []).append(row.name)
    for answers, names in alike.items():
        yield names, list(answers)
