"""The choice of the device on which torch computes, and the differences between accelerators."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from quanterr.errors import ResourceError, UsageError
from quanterr.lazy_torch import torch
from quanterr.options import DEVICE_CHOICES, KNOWN_DEVICES
from quanterr.util.processes import this_process
from quanterr.util.text import count, display

NEEDED_DTYPES = ("float64", "float8_e4m3fn")  # sums are float64, and FP8 codes are decoded by torch's cast


def check_name(name: str) -> None:
    """Raise UsageError if no device has that name, here or on another machine."""
    if not KNOWN_DEVICES.fullmatch(name) and re.sub(r":\d+$", "", name) != _find_accelerator():
        raise UsageError(f"--device {display(name)}: {DEVICE_CHOICES}")


def pick_device(name: str) -> torch.device:
    """Return the device of that name; ``auto`` is the accelerator if one can be used, else the CPU.

    Raises:
        UsageError: no device has that name.
        ResourceError: the device is not available, or lacks a dtype that is needed.
    """
    check_name(name)
    accelerator = _find_accelerator()
    automatic = "cpu" if accelerator is None else f"{accelerator}:{this_process().local_rank}"
    device = torch.device(automatic if name == "auto" else name)
    if device.type == "cpu":
        return device
    n = torch.accelerator.device_count() if device.type == accelerator else 0
    if (device.index or 0) >= n:
        available = f"torch {torch.__version__} sees {count(n, f'{device.type.upper()} device')} here"
        raise ResourceError(f"--device {name}: {available}; try --device cpu")
    missing = _find_missing(device)
    if missing and name == "auto":
        return torch.device("cpu")
    if missing:
        raise ResourceError(f"--device {name}: it does not compute in {missing}, which is needed; try --device cpu")
    return device


def _find_accelerator() -> str | None:
    """Return the type of accelerator that torch can use on this machine, as in the names of its devices."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return None if device is None else device.type


def _find_missing(device: torch.device) -> str:
    """Return the name of a dtype that the device lacks; an empty string if it has all that are needed."""
    for dtype in () if device.type in ("cpu", "cuda") else NEEDED_DTYPES:  # CPU and CUDA have all of them
        try:
            torch.zeros(1, device=device).to(getattr(torch, dtype)).float()
        except torch.OutOfMemoryError:
            break
        except (RuntimeError, TypeError):  # MPS raises TypeError
            return dtype
    return ""


def describe_device(device: torch.device) -> str:
    """Format the device's name; for an accelerator, with the name of the product."""
    get_name = None if device.type == "cpu" else getattr(torch.get_device_module(device), "get_device_name", None)
    return str(device) if get_name is None else f"{device} ({get_name(device)})"


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """Let this thread use a new stream of the device; on the CPU there are none."""
    if device.type == "cpu":
        yield
        return
    with use_stream(torch.Stream(device=device)):
        yield


@contextmanager
def use_stream(stream: torch.Stream) -> Iterator[None]:
    """Let this thread use a stream of a device."""
    before = torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


def give_back_device_memory(device: torch.device) -> None:
    """Return freed memory to the device, as another size may be needed, or another process needs it."""
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()
