"""The choice between the CPU and an accelerator for a comparison, by measured rates.

``make bench-device`` measures the rates of a machine.
"""

from quanterr.kernel.library import Kernel
from quanterr.lazy_torch import torch
from quanterr.tensors.devices import describe_device, pick_device
from quanterr.util.platform import usable_cores
from quanterr.util.processes import this_process
from quanterr.util.waiting import notices

# G weights/s of BF16 and FP8 that one core compares, by the instructions of the compiled kernel; other formats take up
# to 1.7 times as long.
CORE_RATES = {"base": 0.3, "avx2": 0.4, "avx512": 0.5}
# G weights/s of BF16 and FP8 that an accelerator compares, by a part of its name, when the files are in memory.
ACCELERATOR_RATES = {"H200": 1.6}


def count_own_cores() -> int:
    """Return the number of cores for this process, among those on this machine that share the run."""
    return max(usable_cores() // this_process().local_world, 1)


def choose_device(name: str, kernel: Kernel | None) -> torch.device:
    """Return the device of that name for a comparison; ``auto`` chooses the device that is expected to be faster.

    An accelerator that was not measured is expected to be as fast as the fastest that was. Without the compiled kernel,
    any accelerator is faster than the CPU. If the CPU is chosen although there is an accelerator, a notice says why.

    Raises:
        UsageError: no device has that name.
        ResourceError: the device is not available, or lacks a dtype that is needed.
    """
    device = pick_device(name)
    if name != "auto" or device.type == "cpu" or kernel is None:
        return device
    product, cores = describe_device(device), count_own_cores()
    measured = next((rate for part, rate in ACCELERATOR_RATES.items() if part in product), None)
    here = cores * CORE_RATES[kernel.instructions]
    there = max(ACCELERATOR_RATES.values()) if measured is None else measured
    if there > here:
        return device
    notices.warning(
        "--device auto takes the CPU: %d cores compare about %.1f G weights/s, %s %s %.1f; to use it, say --device %s",
        cores,
        here,
        product,
        "was measured at" if measured is not None else "was not measured and is expected to compare",
        there,
        device,
    )
    return torch.device("cpu")
