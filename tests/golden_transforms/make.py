"""A small Llama whose inputs compressed-tensors rotates while it runs, and its outputs by compressed-tensors.

    python tests/golden_transforms/make.py        needs compressed-tensors 0.20 and transformers

Writes original/ and CASE/, as ModelCompressor and save_pretrained do, and CASE.expected.safetensors: for each quantized
layer the weight that it has in effect (its outputs for the unit matrix, transposed, with inputs that are not rounded),
and the logits of the ids with all that is declared; float32.
"""

import copy
from pathlib import Path

import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationConfig,
    QuantizationStatus,
    apply_quantization_config,
)
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams
from compressed_tensors.transform import TransformConfig, apply_transform_config
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).parent
CONTEXT, CHUNKS = 32, 2
DOWN = "re:.*down_proj$"


def both(matrix_type: str, *targets: str, inverse: bool = False, name: str = "R4", **more: object) -> dict[str, object]:
    """Return a transform of the inputs of layers, and its inverse in their weights."""
    places = [
        {"targets": list(targets), "location": where, "inverse": flag, "ignore": ["lm_head"]}
        for where, flag in (("input", inverse), ("weight_input", not inverse))
    ]
    return {name: {"type": matrix_type, "apply": places, **more}}


# Case → preset of compressed-tensors, transforms.
CASES: dict[str, tuple[str, dict[str, object]]] = {
    "hadamard": ("FP8_DYNAMIC", both("hadamard", r"re:.*(q|k|v|o|gate|up)_proj$", name="R1")),
    "hadamard_blocks": ("FP8_DYNAMIC", both("hadamard", DOWN, head_dim=16)),
    "hadamard_permuted": ("W8A16", both("hadamard", r"re:.*self_attn\.[a-z]_proj$", inverse=True, randomize=True)),
    "random_hadamard": ("FP8_DYNAMIC", both("random-hadamard", "Linear")),
    "random_hadamard_inverse": ("W4A16", both("random-hadamard", DOWN, inverse=True)),
    "random_matrix": (
        "FP8_DYNAMIC",
        both("random-matrix", DOWN, head_dim=8)
        | both("random-matrix", "re:.*self_attn.o_proj$", inverse=True, name="O", head_dim=4),
    ),
}


def quantize(model: LlamaForCausalLM, preset: str) -> None:
    """Round weights to nearest with the range of each row, or of each group."""
    scheme = preset_name_to_scheme(preset, ["Linear"])
    if scheme.weights.group_size:
        scheme.weights.group_size = 16
    config = QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"])
    apply_quantization_config(model, config)
    for module in model.modules():
        args = getattr(getattr(module, "quantization_scheme", None), "weights", None)
        if args is None:
            continue
        weight = module.weight.detach()
        groups = weight.view(len(weight), -1, args.group_size) if args.group_size else weight[:, None]
        scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
        module.weight_scale.data.copy_(scale.view_as(module.weight_scale))
        module.quantization_status = QuantizationStatus.FROZEN


def main() -> None:
    """Write the files next to this one."""
    torch.manual_seed(0)
    fields = {
        "vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": False,
    }  # fmt: skip
    original = LlamaForCausalLM(LlamaConfig(**fields)).eval()
    with torch.no_grad():
        for parameter in original.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.15)
                parameter.copy_(parameter.bfloat16())
    original.save_pretrained(HERE / "original")
    ids = torch.randint(0, 32, (CHUNKS, CONTEXT))
    save_file({"ids": ids.to(torch.int32).flatten()}, HERE / "ids.safetensors")
    for case, (preset, transforms) in CASES.items():
        torch.manual_seed(1)
        model = copy.deepcopy(original)
        apply_transform_config(model, TransformConfig(config_groups=transforms))
        quantize(model, preset)
        expected = {}
        with torch.inference_mode():
            expected["logits"] = model(ids, use_cache=False).logits.float()
            for name, module in model.named_modules():
                scheme = getattr(module, "quantization_scheme", None)
                if scheme is not None:
                    args, scheme.input_activations = scheme.input_activations, None
                    expected[f"{name}.weight"] = module(torch.eye(module.in_features)).T.contiguous()
                    scheme.input_activations = args
        compressor = ModelCompressor.from_pretrained_model(model)
        compressor.compress_model(model)
        model.save_pretrained(HERE / case)
        compressor.update_config(str(HERE / case))
        (HERE / case / "generation_config.json").unlink(missing_ok=True)
        save_file(expected, HERE / f"{case}.expected.safetensors")
    (HERE / "original" / "generation_config.json").unlink(missing_ok=True)


if __name__ == "__main__":
    main()
