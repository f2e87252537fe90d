"""The choice of the device on which torch computes."""

import torch

from quanterr.errors import ResourceError, UsageError
from quanterr.util.processes import this_process
from quanterr.util.text import display

CPU = torch.device("cpu")


def pick_device(name: str) -> torch.device:
    """Return the device of that name; ``auto`` is CUDA if available, else the CPU.

    Raises:
        UsageError: no device has that name.
        ResourceError: CUDA was requested but is not available.
    """
    if name == "auto":
        name = f"cuda:{this_process().local_rank}" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"--device {display(name)}: choose auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"--device {display(name)}: choose auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        n = torch.cuda.device_count()
        raise ResourceError(f"--device {name}: torch {torch.__version__} sees {n} CUDA devices here; try --device cpu")
    return device


def describe_device(device: torch.device) -> str:
    """Format the device's name; for CUDA, with the GPU's name."""
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)
