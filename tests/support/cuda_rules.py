"""Rules of CUDA that the CPU lacks: about operations, dtypes, and tensors of both devices together.

Made from torch 2.13: operations and dtypes from the tables that torch's own tests use (``dtypes`` beside
``dtypesIfCUDA`` of ``common_methods_invocations.op_db``), where a CPU kernel stands alone in ``native_functions.yaml``,
and the operations that let a number on the host stand beside tensors on the device: those with ``device_check:
NoCheck`` whose iterators have ``allow_cpu_scalars``. All others are refused anything on the host.
"""

import torch

HALVES = frozenset({torch.float16, torch.bfloat16})
INTEGERS = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
INT64_ONLY = frozenset({torch.int64})
PRODUCTS = "mm addmm bmm baddbmm addbmm mv addmv dot vdot _addmm_activation linalg_multi_dot"
POOLS = "max_pool2d_with_indices max_pool3d_with_indices"
ON_CPU_ALONE = (
    "histogram _histogramdd_bin_edges _histogramdd_from_bin_cts _histogramdd_from_bin_tensors _add_relu "
    "slow_conv3d_forward _spdiags from_file _weight_int4pack_mm_for_cpu "
    "_scaled_dot_product_flash_attention_for_cpu"
)
LACKS = (
    dict.fromkeys((PRODUCTS + " " + POOLS).split(), INTEGERS)
    | dict.fromkeys(("histc", "igamma", "igammac", "angle"), HALVES)
    | dict.fromkeys(("convolution", "avg_pool2d", "avg_pool3d"), INT64_ONLY)
)
BESIDE_NUMBERS = (
    "add sub rsub mul div true_divide floor_divide fmod remainder pow atan2 copysign eq ne lt le gt ge maximum minimum "
    "fmax fmin hypot heaviside xlogy bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift __and__ "
    "__or__ __xor__ __lshift__ __rshift__ __iand__ __ior__ __ixor__ __ilshift__ __irshift__ logical_and logical_or "
    "logical_xor lerp addcmul addcdiv clamp_min clamp_max where masked_fill index_fill fill"
)
NO_KERNEL, TAKES_A_NUMBER = frozenset(ON_CPU_ALONE.split()), frozenset(BESIDE_NUMBERS.split())
INDEXING = frozenset({"index", "index_put", "_index_put_impl", "_unsafe_index", "_unsafe_index_put"})
MOVES = frozenset({"_to_copy", "copy"})
ELSEWHERE = "Expected all tensors to be on the same device"


def check_operation(name, dtypes):
    """Raise if CUDA has no kernel of this name (without the ``_`` of operations in place) for one of the dtypes."""
    if name in NO_KERNEL:
        raise NotImplementedError(f"aten::{name} has no CUDA kernel")
    if name in LACKS and (lacking := LACKS[name].intersection(dtypes)):
        raise NotImplementedError(f"aten::{name} is not implemented on CUDA for {lacking}")


def check_places(name, args, on_device, on_host, written):
    """Raise as CUDA does if an operation on the device is given tensors on the host."""
    if not on_host or name in MOVES:
        return
    if name in INDEXING:
        check_indexing(name, args, on_device, on_host)
    elif name not in TAKES_A_NUMBER or len(on_host) > 1 or on_host[0].dim() or _has(written, on_host[0]):
        raise RuntimeError(
            f"{ELSEWHERE}: aten::{name} of {_describe(on_device)} and, on the host, {_describe(on_host)}"
        )


def check_indexing(name, args, on_device, on_host):
    """Allow indices on the host.

    The indexed tensor and the new values must be on the device, apart from single numbers.
    """
    target, numbers = args[0], args[2:3] if "put" in name else ()
    strange = [value for value in numbers if _has(on_host, value) and value.dim()]
    if not _has(on_device, target) or strange:
        raise RuntimeError(f"{ELSEWHERE}: aten::{name}, indices on one, {_describe([target, *strange])} on the other")


def _has(tensors, wanted):
    return any(tensor is wanted for tensor in tensors)


def _describe(tensors):
    return ", ".join(f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in tensors)
