"""Opening of inputs before torch is imported, which takes longer than many runs: mistakes end the command first.

While torch is imported, the system reads the files ahead.
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from quanterr.checkpoints import Checkpoint, open_checkpoint
from quanterr.checkpoints.base import CheckpointFile
from quanterr.checkpoints.read_ahead import read_ahead
from quanterr.errors import UsageError
from quanterr.options import ComparisonOptions, ReadOptions
from quanterr.selection import LayerSelection
from quanterr.util.processes import this_process
from quanterr.util.text import display

DEVICE = re.compile(r"auto|(cpu|cuda)(:\d+)?")


@contextmanager
def open_inputs(paths: Iterable[str], options: ReadOptions) -> Iterator[list[str] | list[Checkpoint]]:
    """Open checkpoints, read them ahead, and close them at the end.

    A run of several processes gets the paths: it opens them later, when each process can tell the others of an error.

    Raises:
        UsageError: the device is unknown, or a pattern of layers is invalid; or as :func:`open_checkpoint`.
        CheckpointError: the importance matrix is missing; or as :func:`open_checkpoint`.
    """
    if not DEVICE.fullmatch(options.device):
        raise UsageError(f"--device {display(options.device)}: choose auto, cpu, cuda or cuda:N")
    if this_process().world > 1:
        yield list(paths)
        return
    with ExitStack() as stack:
        found = [stack.enter_context(open_checkpoint(path, options.lenient, options.cache)) for path in paths]
        if isinstance(options, ComparisonOptions):
            _check_selection(options)
        stack.enter_context(read_ahead(found))
        yield found


def _check_selection(options: ComparisonOptions) -> None:
    LayerSelection(options.layers, options.exclude)  # raises
    if options.importance is not None:
        CheckpointFile(Path(options.importance)).close()
