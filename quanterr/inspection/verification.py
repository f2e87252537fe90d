"""Comparison of a checkpoint's files with the checksums that the hub states."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from quanterr.checkpoints import Checkpoint, CheckpointFile
from quanterr.checkpoints.checksums import compute_sha256, find_stated_sha256
from quanterr.documents.base import Finding
from quanterr.errors import UsageError
from quanterr.findings import make_finding
from quanterr.util.platform import usable_cores
from quanterr.util.text import count, display, listed

MISMATCH = "checksum_mismatch"


def verify(checkpoint: Checkpoint) -> tuple[int, list[Finding]]:
    """Read all files that the hub states a checksum of; return the number that are right, and findings about others.

    Raises:
        UsageError: the hub states no checksum of any file.
        CheckpointError: a file cannot be read.
    """
    stated = {file: wanted for file in checkpoint.files if (wanted := find_stated_sha256(file)) is not None}
    if not stated:
        raise UsageError(
            f"{display(checkpoint.path)}: no checksum to verify: the hub states them of weights at hf://org/name, in "
            "its local cache, and in folders of `hf download --local-dir`"
        )
    with ThreadPoolExecutor(usable_cores()) as pool:
        found = dict(zip(stated, pool.map(compute_sha256, stated), strict=True))
    wrong = [file for file, wanted in stated.items() if found[file] != wanted]
    unknown = [file for file in checkpoint.files if file not in stated]
    findings = [_report_mismatch(file, found[file], stated[file]) for file in wrong]
    return len(stated) - len(wrong), findings + (_report_unknown(unknown) if unknown else [])


def _report_mismatch(file: CheckpointFile, found: str, stated: str) -> Finding:
    message = f"{file}: its SHA-256 is {found}, and the hub states {stated}: it is damaged, or was changed"
    remedy = "download the file again"
    return make_finding(MISMATCH, "error", None, message, remedy, file=str(file), found=found, stated=stated)


def _report_unknown(files: Sequence[CheckpointFile]) -> list[Finding]:
    names = [file.path.name for file in files]
    message = f"the hub states no SHA-256 of {count(len(names), 'file')}: {listed(names, 3)}; not verified"
    return [make_finding(MISMATCH, "warning", None, message, "compare them with the source by hand")]
