"""Progress on stderr: a tqdm bar in a terminal, elsewhere a line from time to time, so that no CI job times out."""

import sys
import time
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any, Never

from quanterr.util.text import display, size

if TYPE_CHECKING:
    from tqdm import tqdm

    from quanterr.comparison.scheduler import Progress

BAR_DELAY = 0.5  # seconds before a bar is drawn, so that short comparisons draw none
MIN_LINE_INTERVAL = 10  # seconds before the first line, and the minimum between two lines
LINE_INTERVAL = 30  # seconds after which a line is due even without progress
NARROW_COLUMNS = 90  # columns; narrower bars leave out sizes and rate
BAR_FORMAT = "{percentage:3.0f}% {bar} {n_fmt}iB of {total_fmt}iB, {rate_fmt}, eta {remaining}{postfix}"
SHORT_BAR_FORMAT = "{percentage:3.0f}% {bar} eta {remaining}{postfix}"
LINE_STEP = (
    0.05  # share of all bytes after which a line is due, but not within MIN_LINE_INTERVAL seconds of the last one
)


class TerminalBar:
    """A tqdm bar in a terminal; until its first step it shows "loading torch", which takes the first second."""

    def __init__(self) -> None:
        """Print "loading torch"."""
        self._bar: tqdm[Never] | None = None
        print("loading torch", end="\r", file=sys.stderr, flush=True)

    def show(self, done: int, total: int, words: str, **settings: Any) -> None:
        """Draw the bar, which the first call creates with tqdm's ``settings``."""
        if self._bar is None:
            from tqdm import tqdm

            self._bar = tqdm(total=total, file=sys.stderr, leave=False, dynamic_ncols=True, **settings)
        self._bar.set_postfix_str(words, refresh=False)
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()
        print(" " * len("loading torch"), end="\r", file=sys.stderr, flush=True)


class Bar(TerminalBar):
    """A bar over the bytes to read from both files."""

    def __call__(self, progress: "Progress") -> None:
        """Update the bar."""
        columns = get_terminal_size().columns
        done = f"{min(progress.done_weights + 1, progress.total_weights):,}/{progress.total_weights:,}"
        name = shorten(display(progress.name), max(columns // 3 - len(done), 12))
        self.show(
            progress.done_bytes,
            progress.total_bytes,
            f"{done} {name}",
            unit="iB",  # tqdm puts K, M or G before it
            unit_scale=True,
            unit_divisor=1024,
            delay=BAR_DELAY,
            mininterval=0,  # the bar is called ten times per second
            bar_format=SHORT_BAR_FORMAT if columns < NARROW_COLUMNS else BAR_FORMAT,
        )


def shorten(name: str, room: int) -> str:
    """Shorten a name to ``room`` characters by an ellipsis in the middle: block and module are at the ends."""
    if len(name) <= room:
        return name
    head = (room - 1) // 2
    return f"{name[:head]}…{name[len(name) - (room - 1 - head) :]}"


class Heartbeat:
    """A progress line every 5 % of the bytes, at least 10 and at most 30 seconds apart."""

    def __init__(self) -> None:
        """Start the clock."""
        self._started = self._last = time.monotonic()
        self._last_done = 0

    def __call__(self, progress: "Progress") -> None:
        """Print a line if one is due."""
        now = time.monotonic()
        total = max(progress.total_bytes, 1)
        moved = (progress.done_bytes - self._last_done) / total
        if now - self._last < (MIN_LINE_INTERVAL if moved >= LINE_STEP else LINE_INTERVAL):
            return
        self._last, self._last_done = now, progress.done_bytes
        rate = progress.done_bytes / (now - self._started)
        left = f"{(total - progress.done_bytes) / rate:.0f} s" if rate else "unknown"
        print(
            f"progress {100 * progress.done_bytes / total:.0f}% {size(progress.done_bytes)}/{size(total)}"
            f" {size(rate)}/s eta {left} layer={display(progress.name)}",
            file=sys.stderr,
            flush=True,
        )

    def close(self) -> None:
        """Do nothing: printed lines stay in the terminal."""


def show_bytes(terminal: bool) -> Bar | Heartbeat:
    """Return the progress of a comparison: a bar in a terminal, elsewhere lines."""
    return Bar() if terminal else Heartbeat()


class Steps:
    """Progress of an evaluation by units and micro-batches: a bar in a terminal, elsewhere a line every 30 seconds."""

    def __init__(self, terminal: bool) -> None:
        """Start the clock."""
        self._bar = TerminalBar() if terminal else None
        self._started = self._last = time.monotonic()

    def __call__(self, unit: int, units: int, batch: int, batches: int) -> None:
        """Show that ``unit`` of ``units`` and ``batch`` of ``batches`` micro-batches of the next unit are done."""
        done, total, now = unit * batches + batch, units * batches, time.monotonic()
        words = f"unit {unit + 1:,}/{units:,}"
        if self._bar is not None:
            self._bar.show(done, total, words, bar_format=SHORT_BAR_FORMAT)
        elif now - self._last >= LINE_INTERVAL:
            self._last = now
            left = (now - self._started) * (total - done) / done
            print(f"progress {100 * done / total:.0f}% {words} eta {left:.0f} s", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Remove the bar; printed lines stay in the terminal."""
        if self._bar is not None:
            self._bar.close()
