"""Benches of a small model that is trained once, and kept in a folder."""

import argparse
import shutil
from collections.abc import Callable
from pathlib import Path

from quanterr.checkpoints import Checkpoint, open_checkpoint


def run(
    about: str, default: str, made: str, train: Callable[[Path], None], bench: Callable[[Path, Checkpoint], None]
) -> None:
    """Train in the folder of the command line, unless ``made``, a file that it writes, is there; then bench."""
    parser = argparse.ArgumentParser(description=about.partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path(default))
    folder = parser.parse_args().folder
    if not (folder / made).exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        train(folder)
    with open_checkpoint(folder / "original") as original:
        bench(folder, original)
