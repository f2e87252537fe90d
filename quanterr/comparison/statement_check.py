"""Verification of a statement of origin: the files are those that it names, and the comparison gives the same again."""

import os
from collections.abc import Iterable, Sequence

from quanterr.checkpoints import Checkpoint, open_checkpoint
from quanterr.comparison.every_code import hash_configs, hash_files
from quanterr.comparison.run import compare_each
from quanterr.documents.comparison.origin import TensorOrigin
from quanterr.documents.statement import Resource, Statement
from quanterr.errors import CheckpointError, Interrupted
from quanterr.options import CompareOptions
from quanterr.util.text import count, display, listed

Path = str | os.PathLike[str]


def check_files(path: Path, stated: Sequence[Resource], side: str, options: CompareOptions) -> int:
    """Check that a checkpoint's files are those of a statement; return how many there are.

    Raises:
        CheckpointError: a file differs, is missing, or is not stated; the message names it.
    """
    with open_checkpoint(path, options.lenient, options.cache) as opened:
        found = _hash_all(opened)
    wanted = {one.name: one.digest.get("sha256") for one in stated}
    for name, own in found.items():
        if name in wanted and own != wanted[name]:
            raise CheckpointError(
                f"{display(os.fspath(path))}: {display(name)} was changed: its SHA-256 is {own}, and the statement has "
                f"{display(str(wanted[name]), 64)} for the {side} side; get the file that the statement is about"
            )
    for names, what in ((wanted.keys() - found, "is missing"), (found.keys() - wanted, "is not in the statement")):
        if names:
            listing = listed(sorted(names), 3)
            raise CheckpointError(f"{display(os.fspath(path))}: {listing} {what}, on the {side} side")
    return len(found)


def _hash_all(checkpoint: Checkpoint) -> dict[str, str | None]:
    """Return the SHA-256 of all files of a checkpoint, by their names."""
    with hash_files([checkpoint]) as sums:
        found: dict[str, str | None] = {file.path.name: sum_.result() for file, sum_ in sums.items()}
    return found | {one.name: one.sha256 for one in hash_configs(checkpoint)}


def compare_again(statement: Statement, original: Path, quantized: Path, options: CompareOptions) -> None:
    """Repeat the comparison of a statement.

    Raises:
        CheckpointError: a tensor is in another class than the statement says.
        Interrupted: the run was stopped.
    """
    [report] = compare_each(original, [quantized], options, every_code=True)
    if not report.complete:
        raise Interrupted("interrupted: the comparison was not repeated")
    before, now = (_by_name(tensors) for tensors in (statement.predicate.tensors, report.origin))
    differ = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    if differ:
        stated, found = (", ".join(of.get(differ[0], ["nothing"])) for of in (before, now))
        raise CheckpointError(
            f"{display(os.fspath(quantized))}: the comparison gives another result for {count(len(differ), 'tensor')}: "
            f"{display(differ[0])} is {display(stated, 100)} in the statement, and {found} now"
        )


def _by_name(tensors: Iterable[TensorOrigin]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for one in tensors:
        found.setdefault(one.layer_name, []).append(one.kind)
    return found
