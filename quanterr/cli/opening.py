"""Opens a run's inputs before torch is imported, so that mistakes end the run before this slow import.

While torch is imported, the system reads the files ahead.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quanterr.checkpoints import Checkpoint, open_checkpoints, open_readable, require_readable
from quanterr.checkpoints.base import CheckpointFile
from quanterr.checkpoints.read_ahead import read_ahead
from quanterr.cli.interrupt import Interrupt
from quanterr.cli.process import command_line, is_other_rank
from quanterr.cli.progress import show_bytes
from quanterr.errors import UsageError
from quanterr.options import DEVICE_CHOICES, KNOWN_DEVICES, ComparisonOptions
from quanterr.util.memory import require_memory_for_torch
from quanterr.util.processes import this_process
from quanterr.util.text import display

if TYPE_CHECKING:
    from typing import TypeVar

    from quanterr.cli.progress import Bar, Heartbeat, Steps
    from quanterr.options import EvaluateOptions

    Asked = TypeVar("Asked", bound=ComparisonOptions | EvaluateOptions)
    Opened = Sequence[Any]  # paths, or checkpoints


@contextmanager
def open_run(
    paths: Sequence[str],
    options: "Asked",
    interrupt: Interrupt,
    quiet: bool,
    progress: "Callable[[bool], Bar | Heartbeat | Steps]" = show_bytes,
    needs: int | None = None,
) -> "Iterator[tuple[Opened, Asked]]":
    """Open the checkpoints of a run, read them ahead, and close them at the end.

    Yields the checkpoints, and options with which ``interrupt`` can stop the run and progress appears on stderr (not if
    ``quiet``, nor on ranks other than 0). A run of several processes gets the paths instead: each process opens them
    later, when it can tell the others of an error. ``needs`` is the number of paths after the first that must be
    readable, if it is fewer than all.

    Raises:
        UsageError: the device is unknown, or for a reason that :func:`open_checkpoint` states.
        CheckpointError: the importance matrix is missing, or for a reason that :func:`open_checkpoint` states.
        ResourceError: there is too little memory to load torch.
    """
    require_memory_for_torch()
    _check_device(options.device)
    with ExitStack() as stack:
        opened: Opened = list(paths)
        if this_process().world == 1:
            opener: Callable[..., Any] = open_checkpoints if needs is None else open_readable
            checkpoints = stack.enter_context(opener(paths, options.lenient, options.cache))
            require_readable(checkpoints[:1], 1)
            require_readable(checkpoints[1:], needs or 0)
            if isinstance(options, ComparisonOptions) and options.importance is not None:
                CheckpointFile(Path(options.importance)).close()
            stack.enter_context(read_ahead([side for side in checkpoints if isinstance(side, Checkpoint)]))
            opened = checkpoints
        silent = quiet or is_other_rank()
        shown: Any = None if silent else stack.enter_context(closing(progress(sys.stderr.isatty())))
        yield opened, replace(options, on_progress=shown, stop=interrupt.stop, command=tuple(command_line()))


def _check_device(name: str) -> None:
    """Raise UsageError if no device has that name. Ask torch only if a package gives it other devices."""
    if KNOWN_DEVICES.fullmatch(name):
        return
    if not entry_points(group="torch.backends"):
        raise UsageError(f"--device {display(name)}: {DEVICE_CHOICES}")
    from quanterr.tensors.devices import check_name

    check_name(name)
