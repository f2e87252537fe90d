"""Verification of a statement of origin: the files are those that it names, and the comparison gives the same again."""

import os
from collections.abc import Iterable, Sequence

from quanterr.checkpoints import Checkpoint, open_checkpoint
from quanterr.comparison.every_code import hash_configs, hash_files
from quanterr.comparison.run import compare_each
from quanterr.documents.statement import Resource, Statement
from quanterr.errors import CheckpointError, Interrupted
from quanterr.options import CompareOptions
from quanterr.util.text import count, display, itemize

Path = str | os.PathLike[str]


def check_files(path: Path, stated: Sequence[Resource], side: str, options: CompareOptions) -> int:
    """Check that a checkpoint's files are those of a statement; return how many there are.

    Raises:
        CheckpointError: a file differs, is missing, or is not stated; the message names it.
    """
    with open_checkpoint(path, options.lenient, options.cache) as opened:
        stored = _hash_all(opened)
    wanted = _group((file.name, str(file.digest.get("sha256"))) for file in stated)
    for name, sums in stored.items():
        if name in wanted and sums != wanted[name]:
            raise CheckpointError(
                f"{display(os.fspath(path))}: {display(name)} was changed: its SHA-256 is {itemize(sums, 3)}, and the "
                f"statement has {display(itemize(wanted[name], 3), 200)} for the {side} side; get the file that the "
                "statement is about"
            )
    for names, what in ((wanted.keys() - stored, "is missing"), (stored.keys() - wanted, "is not in the statement")):
        if names:
            listing = itemize(sorted(names), 3)
            raise CheckpointError(f"{display(os.fspath(path))}: {listing} {what}, on the {side} side")
    return sum(map(len, stored.values()))


def _hash_all(checkpoint: Checkpoint) -> dict[str, list[str]]:
    """Return the SHA-256 of all files of a checkpoint, by their names; files of several folders may share one."""
    with hash_files([checkpoint]) as hashed:
        files = [(file.path.name, checksum) for file, checksum in hashed]
    return _group([*files, *((file.name, str(file.sha256)) for file in hash_configs(checkpoint))])


def compare_again(statement: Statement, original: Path, quantized: Path, options: CompareOptions) -> None:
    """Repeat the comparison of a statement.

    Raises:
        CheckpointError: a tensor is in another class than the statement says.
        Interrupted: the run was stopped.
    """
    [report] = compare_each(original, [quantized], options, every_code=True)
    if not report.complete:
        raise Interrupted("interrupted: the comparison was not repeated")
    stated, repeated = (
        _group((tensor.layer_name, tensor.kind) for tensor in tensors)
        for tensors in (statement.predicate.tensors, report.origin)
    )
    differ = [name for name in {**stated, **repeated} if stated.get(name) != repeated.get(name)]
    if differ:
        before, now = (", ".join(kinds.get(differ[0], ["nothing"])) for kinds in (stated, repeated))
        raise CheckpointError(
            f"{display(os.fspath(quantized))}: the comparison gives another result for {count(len(differ), 'tensor')}: "
            f"{display(differ[0])} is {display(before, 100)} in the statement, and {now} now"
        )


def _group(items: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Return the sorted values of each name: a name can have several."""
    by_name: dict[str, list[str]] = {}
    for name, value in sorted(items):
        by_name.setdefault(name, []).append(value)
    return by_name
