"""Progress in notebooks, as a bar below the running cell."""

import sys
from typing import Any

DELAY = 0.5  # seconds before the bar appears, so that short runs show none


def is_in_notebook() -> bool:
    """Return whether this process runs in a notebook, by IPython with a kernel."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and getattr(ipython.get_ipython(), "kernel", None) is not None


class NotebookBar:
    """A callback for progress that draws a bar of tqdm, of bytes or of the units of an evaluation."""

    def __init__(self) -> None:
        """Draw nothing before the first step."""
        self._bar: Any = None

    def __call__(self, *progress: Any) -> None:
        """Show progress, which is an object with bytes, or numbers of done and of all units and micro-batches."""
        if len(progress) == 1:
            done, total, unit = progress[0].done_bytes, progress[0].total_bytes, "B"
        else:
            units, of_units, batches, of_batches = progress
            done, total, unit = units * of_batches + batches, of_units * of_batches, "step"
        if self._bar is None:
            from tqdm.auto import tqdm  # a widget, if the notebook supports widgets

            self._bar = tqdm(total=total, unit=unit, unit_scale=True, unit_divisor=1024, leave=False, delay=DELAY)
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()
