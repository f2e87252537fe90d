"""What llama.cpp loads, and its fork ik_llama.cpp.

Reference: ggml-org/llama.cpp@0c1e57098bba (1 October 2026) src/llama-arch.cpp, src/llama-model.cpp,
src/models/, src/llama-vocab.cpp, src/llama-model-loader.cpp, ggml/include/ggml.h.
"""

from collections.abc import Collection, Iterator, Mapping
from functools import partial

from quanterr.documents.loading import DIFFERS, REFUSES, LoadingReason
from quanterr.findings.contents import Contents
from quanterr.findings.runtimes.classes import IK_LLAMA_CPP, LLAMA_CPP
from quanterr.findings.runtimes.conditions import check_repacked
from quanterr.findings.runtimes.model import PLAIN, UNKNOWN, Container, Layout, Runtime, leave_open, refuse, words
from quanterr.util.text import display, itemize

TOWER = "clip"  # architecture of a file with the tower of images or sounds alone, or of an adapter
NEEDED = ("context_length", "embedding_length", "block_count")  # keys of the architecture
TOKENIZER = "tokenizer.ggml.model"


def check_file(contents: Contents, architectures: Mapping[str, Collection[str]]) -> Iterator[LoadingReason]:
    """Yield why the file is not read: an unknown architecture, keys that are not stored.

    ``architectures`` has the keys of each that must be stored besides those that all need.
    """
    metadata = contents.checkpoint.gguf
    if metadata is None:
        return
    name = metadata.architecture
    if name == TOWER:
        message = "loads such a file beside a model, with --mmproj; no rule covers it"
        yield leave_open(message, "tools/mtmd/clip.cpp")
        return
    if name is None or name not in architectures:
        message = f"does not know the architecture {display(str(name))}: unknown model architecture"
        yield refuse(message, "src/llama-arch.cpp: LLM_ARCH_NAMES")
        return
    keys = [*(f"{name}.{key}" for key in (*NEEDED, *sorted(architectures[name]))), TOKENIZER]
    if lacking := [key for key in keys if key not in metadata.values]:
        message = f"needs keys that are not stored: {itemize(lacking, 4)}: key not found in model"
        yield refuse(message, "src/llama-model.cpp: load_hparams; src/models/; src/llama-vocab.cpp: impl::load")


TYPES = "ggml/include/ggml.h: enum ggml_type"
GGUF = Container(
    True, "reads GGUF files alone; convert_hf_to_gguf.py writes one", "ggml/src/gguf.cpp: gguf_init_from_file"
)
FINDINGS = {
    "incomplete": REFUSES,
    **dict.fromkeys(("config_mismatch", "norm_offset", "wrong_convention"), DIFFERS),
}
OF_BOTH = (
    "gguf_q4_0 gguf_q4_1 gguf_q5_0 gguf_q5_1 gguf_q8_0 gguf_q2_k gguf_q3_k gguf_q4_k gguf_q5_k gguf_q6_k gguf_iq1_s "
    "gguf_iq1_m gguf_iq2_xxs gguf_iq2_xs gguf_iq2_s gguf_iq3_xxs gguf_iq3_s gguf_iq4_nl gguf_iq4_xs"
)
RUNTIME = Runtime(
    "llama.cpp",
    "0c1e57098bba, run b11549",
    layouts=(
        Layout(frozenset({PLAIN}), TYPES, is_run=True),
        Layout(words("gguf_q4_0 gguf_q8_0"), TYPES, is_run=True),
        Layout(
            (words(OF_BOTH) - words("gguf_q4_0 gguf_q8_0"))
            | words("gguf_tq1_0 gguf_tq2_0 gguf_mxfp4 gguf_nvfp4 gguf_q1_0 gguf_q2_0"),
            TYPES,
        ),
    ),
    rules=(partial(check_file, architectures=LLAMA_CPP), partial(check_repacked, place=TYPES)),
    findings=FINDINGS,
    container=GGUF,
    other_types=f"{UNKNOWN}: invalid ggml type",
)
# Of the types of llama.cpp that are newer than the fork, nothing is known.
IK_RUNTIME = Runtime(
    "ik_llama.cpp",
    "0a9ff1255454",
    layouts=(
        Layout(frozenset({PLAIN}), TYPES),
        Layout(
            words(
                f"{OF_BOTH} gguf_iq2_k gguf_iq3_k gguf_iq4_k gguf_iq5_k gguf_iq6_k gguf_iq2_ks gguf_iq3_ks gguf_iq4_ks "
                "gguf_iq5_ks gguf_iq4_kss gguf_iq2_kl gguf_q6_0 gguf_q8_kv gguf_q8_k_r8 gguf_iq1_bn gguf_iq2_bn "
                "gguf_i2_s gguf_iq1_kt gguf_iq2_kt gguf_iq3_kt gguf_iq4_kt"
            ),
            TYPES,
        ),
        Layout(words("gguf_mxfp4 gguf_q1_0"), f"{TYPES}: MXFP4, Q1_0_G128"),
    ),
    rules=(partial(check_file, architectures=dict.fromkeys(IK_LLAMA_CPP, ())),),
    findings=FINDINGS,
    container=GGUF,
)
