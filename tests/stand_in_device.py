"""An evaluation on a device that is none: tensors on it cannot meet others, and are computed on the CPU.

python tests/stand_in_device.py original quantized ids.safetensors     prints the evaluation as JSON

What would fail on CUDA fails here too, where there is none: an operation that is given tensors of both places.
"""

import sys

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from quanterr import evaluation
from quanterr.evaluation import preparation, sides, states
from quanterr.tensors.devices import CPU

NAME = "elsewhere"
MOVES = ("aten._to_copy", "aten.copy_")  # between devices


class There(torch.Tensor):
    """A tensor on the device; ``here`` has its values."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, here):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            here.size(),
            strides=here.stride(),
            storage_offset=here.storage_offset(),
            dtype=here.dtype,
            device=torch.device(NAME, 0),
        )

    def __init__(self, here):
        self.here = here

    def data_ptr(self):
        return self.here.data_ptr()

    def tolist(self):
        return self.here.tolist()

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return computed(function, args, kwargs or {})


class Elsewhere(TorchDispatchMode):
    """What is made on the device is there."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return computed(function, args, kwargs or {})


def here(value):
    return value.here if isinstance(value, There) else value


def computed(function, args, kwargs):
    given = [value for value in tree_iter((args, kwargs)) if isinstance(value, torch.Tensor)]
    there = [value for value in given if isinstance(value, There)]
    if there and not str(function).startswith(MOVES):
        stranger = [value for value in given if not isinstance(value, There) and value.dim() and not value.is_meta]
        assert not stranger, f"{function} on two devices: {[(type(value).__name__, value.shape) for value in given]}"
    asked = kwargs.get("device")
    to = NAME if there and asked is None else "cpu" if asked is None else torch.device(asked).type
    if str(function).startswith("aten.copy_"):
        to = NAME if isinstance(args[0], There) else "cpu"
    own = tree_map(here, kwargs) | ({"device": CPU} if asked is not None and to == NAME else {})
    made = function(*tree_map(here, args), **own)
    known = {id(here(value)): value for value in given}  # what works in place gives its argument back

    def back(value):
        if not isinstance(value, torch.Tensor) or id(value) in known:
            return known.get(id(value), value)
        return There(value) if to == NAME else value

    return tree_map(back, made)


def prepare():
    """Let quanterr take it for a device."""
    _setup_privateuseone_for_python_backend(NAME)
    getattr(torch, NAME)._lazy_init = lambda: None
    torch.inference_mode = torch.no_grad  # such tensors have no version counters
    of_storage, dequantized = states.storage_of, sides.Sides.whole
    states.storage_of = lambda weight: of_storage(here(weight))
    init = sides.Sides.__init__
    sides.Sides.__init__ = lambda side, original, device: init(side, original)
    sides.Sides.whole = lambda side, weight: There(dequantized(side, weight))
    preparation.pick_device = lambda name: torch.device(NAME, 0)


if __name__ == "__main__":
    prepare()
    original, quantized, tokens, *rest = sys.argv[1:]
    by_products = dict(word.split("=") for word in rest)
    with Elsewhere():
        found = evaluation.evaluate(original, [quantized], tokens=tokens, context=16, **by_products)
    print(found.to_json())
