"""Explanations of files that are not checkpoints, based on their first bytes or names, with advice on what to do."""

from collections.abc import Iterable

BEFORE = "compare the checkpoint that it was exported from"
LITERT = f"a LiteRT (TensorFlow Lite) model, which is not read; {BEFORE}"
# First bytes of a file, from byte 0 on → what it is.
STORIES = (
    *(
        (b"\x80" + protocol, "is a Python pickle, not a file of torch.save; save its tensors as safetensors")
        for protocol in (b"\x02", b"\x03", b"\x04", b"\x05")
    ),
    (b"\x93NUMPY", "is a NumPy file, not safetensors"),
    *(
        (magic, "is a GGML file from before GGUF; convert the model again with llama.cpp")
        for magic in (b"lmgg", b"fmgg", b"tjgg")
    ),
)
# Ending of a file's name in a folder without weights → what it is.
IN_FOLDERS = (
    ("qmodel.pt", "objects of hqq; AutoHQQHFModel.save_to_safetensors(model, folder) of hqq writes safetensors"),
    ("openvino_model.xml", f"an OpenVINO model, which is not read; {BEFORE}"),
    (".mlpackage", f"a Core ML model, which is not read; {BEFORE}"),
    (".tflite", LITERT),
    (".litertlm", LITERT),
    ("ndarray-cache.json", f"a model of MLC-LLM, which is not read; {BEFORE}"),
    ("tensor-cache.json", f"a model of MLC-LLM, which is not read; {BEFORE}"),
)


def advise(names: Iterable[str]) -> str:
    """Return advice for a folder without weights, from its file ``names``; empty if none is known."""
    stored = sorted(names)
    for ending, what in IN_FOLDERS:
        for name in stored:
            if name.endswith(ending):
                return f". {name} holds {what}"
    return ""


def describe(start: bytes) -> str | None:
    """Describe the file that starts with these bytes, as the end of a sentence; None if its type is unknown."""
    for magic, description in STORIES:
        if start.startswith(magic):
            return description
    if start[4:8] == b"TFL3":
        return f"is {LITERT}"
    text = start.lstrip()
    if text.startswith(b"version https://git-lfs"):
        sizes = [line.split()[-1] for line in text.splitlines() if line.startswith(b"size ")]
        real = sizes[0].decode(errors="replace") if sizes else "unknown"
        return f"is a Git LFS pointer, not the weights (real size {real} bytes); run `git lfs pull`"
    if text[:1] in (b"<", b"{", b"[") and all(byte >= 32 or byte in b"\t\r\n" for byte in start[:8]):
        content_type = "HTML or XML" if text[:1] == b"<" else "a JSON document"
        return f"looks like {content_type}, not weights; download it again (is a login needed?)"
    return None
