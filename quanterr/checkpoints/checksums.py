"""SHA-256 of files: computed from their content, and as the Hugging Face hub states them.

    hf://…                       the LFS object of the file at its commit, in the hub's list of files
    the local cache              the name of the blob that a snapshot links to: hub/models--…/blobs/<SHA-256>
    hf download --local-dir X    the second line of X/.cache/huggingface/download/<file>.metadata

The hub states the SHA-256 of files in LFS, where all large weights are. For other files it states only the Git hash.

Reference: huggingface_hub 2.4.0, file_download.py (blobs are named by their ETag) and _local_folder.py.
"""

import re
from hashlib import sha256
from pathlib import Path

from quanterr.checkpoints.base import CheckpointFile
from quanterr.checkpoints.remote import RemoteFile
from quanterr.util.small_file import read_small

SHA256 = re.compile(r"[0-9a-f]{64}")
BLOCK_BYTES = 8 << 20  # bytes hashed at a time
BLOCKS_AHEAD = 4  # blocks requested in advance
METADATA_FOLDER = ".cache/huggingface/download"  # path within the folder of a download
MAX_METADATA_BYTES = 1000  # maximum size of such a file
BLOBS = "blobs"


def find_stated_sha256(file: CheckpointFile) -> str | None:
    """Return the SHA-256 that the hub states for a file; None if it is not from the hub, or states none."""
    if isinstance(file, RemoteFile):
        return file.remote.store.sha256(file.remote.inner)
    blob = Path(file.path).resolve()
    if blob.parent.name == BLOBS and SHA256.fullmatch(blob.name):
        return blob.name
    return _read_metadata(Path(file.path).absolute())


def _read_metadata(path: Path) -> str | None:
    """Return the SHA-256 that huggingface_hub has recorded for a downloaded file, in any folder above the file."""
    for folder in path.parents:
        note = folder / METADATA_FOLDER / f"{path.relative_to(folder)}.metadata"
        try:
            lines = read_small(note, MAX_METADATA_BYTES).decode().splitlines()
        except (OSError, ValueError):
            continue
        return lines[1] if len(lines) > 1 and SHA256.fullmatch(lines[1]) else None
    return None


def compute_sha256(file: CheckpointFile) -> str:
    """Return the SHA-256 of a whole file, in lower case.

    Raises:
        CheckpointError: the file cannot be read.
        ResourceError: the store does not answer.
    """
    checksum, buffer = sha256(), memoryview(bytearray(min(BLOCK_BYTES, file.size)))
    for begin in range(0, file.size, BLOCK_BYTES):
        file.will_need(begin, min(BLOCKS_AHEAD * BLOCK_BYTES, file.size - begin))
        block = buffer[: file.size - begin]
        file.read_into(block, begin)
        checksum.update(block)
    return checksum.hexdigest()
