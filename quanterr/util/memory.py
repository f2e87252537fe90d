"""Memory that was freed, given back to the system."""

import ctypes


def give_back() -> None:
    """Let glibc return what it keeps: after much was freed that nothing will need again.

    The large tables of headers and names of 50,000 tensors would stay with it to the end.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
