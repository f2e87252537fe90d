"""Benches of a small model that is trained once, and kept in a folder."""

import argparse
import shutil
from collections.abc import Callable
from pathlib import Path

from quanterr.checkpoints import open_checkpoint


def run(
    about: str, default: str, made: str, train: Callable[[Path], None], bench: Callable[..., None], **numbers: int
) -> None:
    """Train in the folder of the command line, unless ``made``, a file that it writes, is there; then bench.

    ``bench`` gets the folder, the opened original, and the numbers, which are options with these defaults.
    """
    parser = argparse.ArgumentParser(description=about.partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path(default))
    for name, number in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=number, metavar="N")
    given = vars(parser.parse_args())
    folder = given.pop("folder")
    if not (folder / made).exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        train(folder)
    with open_checkpoint(folder / "original") as original:
        bench(folder, original, **given)
