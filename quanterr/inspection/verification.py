"""Compares the files of a checkpoint with the checksums that the hub states."""

from quanterr.checkpoints import Checkpoint
from quanterr.checkpoints.checksums import compute_sha256, find_stated_sha256
from quanterr.documents.base import Finding
from quanterr.errors import UsageError
from quanterr.findings import make_finding
from quanterr.util.platform import usable_cores
from quanterr.util.pool import map_in_threads
from quanterr.util.text import count, display, itemize

MISMATCH = "checksum_mismatch"


def verify(checkpoint: Checkpoint) -> tuple[int, list[Finding]]:
    """Read all files for which the hub states a checksum; return how many match, and findings about the other files.

    Raises:
        UsageError: the hub states no checksum for any file.
        CheckpointError: a file cannot be read.
    """
    stated = {file: wanted for file in checkpoint.files if (wanted := find_stated_sha256(file)) is not None}
    if not stated:
        raise UsageError(
            f"{display(checkpoint.path)}: no checksum to verify: the hub states them for weights at hf://org/name, in "
            "its local cache, and in folders of `hf download --local-dir`"
        )
    with map_in_threads(lambda file, _: compute_sha256(file), stated, [None] * usable_cores()) as sums:
        computed = dict(zip(stated, sums, strict=True))
    wrong = [file for file, wanted in stated.items() if computed[file] != wanted]
    unknown = [file for file in checkpoint.files if file not in stated]
    findings = []
    for file in wrong:
        actual, hub = computed[file], stated[file]
        message = f"{file}: its SHA-256 is {actual}, and the hub states {hub}: it is damaged, or was changed"
        remedy = "download the file again"
        findings.append(
            make_finding(MISMATCH, "error", None, message, remedy, file=str(file), found=actual, stated=hub)
        )
    if unknown:
        names = itemize([file.path.name for file in unknown], 3)
        message = f"the hub states no SHA-256 for {count(len(unknown), 'file')}: {names}; not verified"
        findings.append(make_finding(MISMATCH, "warning", None, message, "compare them with the source by hand"))
    return len(stated) - len(wrong), findings
