"""Explanations of files that are not checkpoints, based on their first bytes, with advice on what to do."""

from collections.abc import Iterable

from quanterr.util.text import listed

STORIES = (
    (b"PK\x03\x04", "is a PyTorch or other zip archive; quanterr never unpickles. Convert it to safetensors first"),
    (b"\x80\x02", "is a Python pickle; quanterr never unpickles. Convert to safetensors first"),
    (b"\x93NUMPY", "is a NumPy file, not safetensors"),
    *(
        (magic, "is a GGML file from before GGUF; convert the model again with llama.cpp")
        for magic in (b"lmgg", b"fmgg", b"tjgg")
    ),
)


PICKLES = (".bin", ".pt", ".pth", ".ckpt")
HQQ = "qmodel.pt"


def advise(names: Iterable[str]) -> str:
    """Return advice for a folder with pickled weights among its file ``names``; empty for other folders."""
    pickles = [name for name in names if name.endswith(PICKLES)]
    if not pickles:
        return ""
    how = "model.save_pretrained(folder) of transformers"
    if HQQ in pickles:
        how = "AutoHQQHFModel.save_to_safetensors(model, folder) of hqq"
    return f". {listed(pickles, 3)}: pickles can run code, and quanterr never unpickles; {how} writes safetensors"


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
