"""What a file is that is not a checkpoint, inferred from its first bytes, and what to do about it."""

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


def advice(names: Iterable[str]) -> str:
    """What to do with a folder whose weights are pickles, as a sentence; nothing of any other. ``names`` are in it."""
    pickles = [name for name in names if name.endswith(PICKLES)]
    if not pickles:
        return ""
    how = "model.save_pretrained(folder) of transformers"
    if HQQ in pickles:
        how = "AutoHQQHFModel.save_to_safetensors(model, folder) of hqq"
    return f". {listed(pickles, 3)}: pickles can run code, and quanterr never unpickles; {how} writes safetensors"


def describe(start: bytes) -> str | None:
    """The end of a sentence about the file that starts with these bytes; None where nothing is known of it."""
    for magic, description in STORIES:
        if start.startswith(magic):
            return description
    text = start.lstrip()
    if text.startswith(b"version https://git-lfs"):
        real = next((line.split()[-1].decode() for line in text.splitlines() if line.startswith(b"size ")), "unknown")
        return f"is a Git LFS pointer, not the weights (real size {real} bytes); run `git lfs pull`"
    if text[:1] in (b"<", b"{", b"[") and all(byte >= 32 or byte in b"\t\r\n" for byte in start[:8]):
        kind = "HTML or XML" if text[:1] == b"<" else "a JSON document"
        return f"looks like {kind}, not weights; download it again (is a login needed?)"
    return None
