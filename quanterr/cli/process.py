"""This process: its command line and its rank in a distributed run."""

import sys
from contextlib import suppress

from quanterr.errors import UsageError
from quanterr.util.addresses import clean_words
from quanterr.util.processes import this_process


def command_line() -> list[str]:
    """Return the words of the command line without credentials, for the report."""
    return ["quanterr", *clean_words(sys.argv[1:])]


def is_other_rank() -> bool:
    """Return True in each process of a distributed run except rank 0, which alone prints and writes."""
    with suppress(UsageError):  # the run itself raises it
        return this_process().rank > 0
    return False
