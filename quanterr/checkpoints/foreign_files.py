"""Explanations of files that are not checkpoints, based on their first bytes, with advice on what to do."""

from collections.abc import Iterable

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


HQQ = "qmodel.pt"


def advise(names: Iterable[str]) -> str:
    """Return advice for a folder with a model of HQQ among its file ``names``; empty for other folders."""
    if HQQ not in names:
        return ""
    return f". {HQQ} holds objects of hqq; AutoHQQHFModel.save_to_safetensors(model, folder) of hqq writes safetensors"


def describe(start: bytes) -> str | None:
    """Describe the file that starts with these bytes, as the end of a sentence; None if its type is unknown."""
    for magic, description in STORIES:
        if start.startswith(magic):
            return description
    text = start.lstrip()
    if text.startswith(b"version https://git-lfs"):
        sizes = [line.split()[-1] for line in text.splitlines() if line.startswith(b"size ")]
        real = sizes[0].decode(errors="replace") if sizes else "unknown"
        return f"is a Git LFS pointer, not the weights (real size {real} bytes); run `git lfs pull`"
    if text[:1] in (b"<", b"{", b"[") and all(byte >= 32 or byte in b"\t\r\n" for byte in start[:8]):
        kind = "HTML or XML" if text[:1] == b"<" else "a JSON document"
        return f"looks like {kind}, not weights; download it again (is a login needed?)"
    return None
