"""Recognition of adapters, which hold low-rank changes of a model's weights, but not the model.

    X.lora_A.weight, X.lora_B.weight         PEFT, diffusers; with the adapter's name in front of .weight, too
    X.lora_down.weight, X.lora_up.weight     kohya
    X.lora.down.weight, X.lora.up.weight     older diffusers
    X.lora_a, X.lora_b                       MLX
    X.hada_w1_a, X.lokr_w1, …                LyCORIS (LoHa, LoKr)

A checkpoint that also has X.weight or X.base_layer.weight is a model.

Reference: huggingface/peft src/peft/utils/save_and_load.py; kohya-ss/sd-scripts networks/lora.py;
KohakuBlueleaf/LyCORIS lycoris/modules; ml-explore/mlx-lm mlx_lm/tuner/lora.py.
"""

import re
from collections.abc import Collection

from quanterr.checkpoints.base import Checkpoint
from quanterr.util.text import count, display, itemize

ADAPTER_TENSOR = re.compile(
    r"(.+)\.(?:lora_[AB](?:\.\w+)?\.weight|lora[._](?:down|up)\.weight|lora_[ab]|(?:hada|lokr)_w[12](?:_[ab])?)"
)
MODEL_SUFFIXES = ("", ".weight", ".base_layer.weight")  # ends of the name of the weight that an adapter changes
ADVICE = (
    "merge it into its model (merge_and_unload() of peft) and compare the merged model; `quanterr evaluate --lora` "
    "shows how an adapter works on a quantized denoiser"
)


def describe_adapter(checkpoint: Checkpoint) -> str | None:
    """Return a sentence that says that a checkpoint is only an adapter; None for a model."""
    layers = _find_layers(checkpoint.entries)
    if not layers:
        return None
    layers_text = f"{count(len(layers), 'layer')}: {itemize(layers, 3)}"
    return f"{display(checkpoint.path)}: a LoRA adapter, not a model: it has low-rank changes of {layers_text}"


def _find_layers(names: Collection[str]) -> list[str]:
    """Return the layers that an adapter changes; none if the names are those of a model."""
    matches = [match for name in names if (match := ADAPTER_TENSOR.fullmatch(name))]
    layers = list(dict.fromkeys(match[1] for match in matches))
    is_model = 2 * len(matches) < len(names) or any(layer + end in names for layer in layers for end in MODEL_SUFFIXES)
    return [] if is_model else layers
