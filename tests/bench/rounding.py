"""The cost of rounding inputs, keys and values of a small model: divergence by scheme.

python tests/bench/rounding.py [FOLDER] [--chunks 12] [--context 512]

Prints a table like that of the guide's page numbers, after evaluate.py, or of any Llama in FOLDER/original, on the
text FOLDER/held_out.txt. Static scales come from the largest inputs on the text itself. Files are in the layout of
compressed-tensors, and of ComfyUI where the scheme is ComfyUI's.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import quanterr

SMOOTH = 0.5  # SmoothQuant's alpha: how much of the inputs' range goes into the weights
TOO_SMALL = 8.0  # times, a wrong calibration


class Calibration(NamedTuple):
    """The largest magnitudes on the text: of inputs by module and column, of keys and values of each block."""

    inputs: dict[str, Tensor]
    cache: dict[str, float]


class Row(NamedTuple):
    """A row of the table and its file."""

    weights: str
    inputs: str
    path: Path


def main() -> None:
    """Calibrate, write the files, evaluate and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path(".bench-evaluate"))
    parser.add_argument("--chunks", type=int, default=12)
    parser.add_argument("--context", type=int, default=512)
    given = parser.parse_args()
    folder, started = given.folder, time.monotonic()
    text = {"text": folder / "held_out.txt", "chunks": given.chunks, "context": given.context}
    rows = list(make_rows(folder, calibrate(folder, given.chunks, given.context)))
    whole = measure(folder, [row.path for row in rows], text)
    alone = {row.weights: row.path for row in rows}
    by_weights = measure(folder, list(alone.values()), text | {"activations": "none", "kv": "none"})
    of_weights = dict(zip(alone, by_weights, strict=True))
    print("| weights | inputs | KLD, weights alone | KLD, as the runtime computes |\n|---|---|---|---|")
    for row, score in zip(rows, whole, strict=True):
        print(f"| {row.weights} | {row.inputs} | {of_weights[row.weights]:.5f} | {score:.5f} |")
    for recipe, scheme in (("nvfp4", "nvfp4"), ("mxfp4", "mxfp4"), ("gguf_q8_0", "q8_0"), ("gguf_q4_0", "q8_0")):
        both = quanterr.evaluate(folder / "original", against=[recipe], activations=scheme, split=True, **text)
        rounded, of_recipe = (
            candidate.scores.kld_mean for candidate in both.candidates if candidate.scores is not None
        )
        print(f"| {recipe} | {scheme} | {of_recipe:.5f} | {rounded:.5f} |")
    print(f"\n{time.monotonic() - started:.0f} s", file=sys.stderr)


def measure(folder: Path, paths: Sequence[Path], options: Mapping[str, Any]) -> list[float]:
    """Return the divergence of each file [nat]."""
    evaluation = quanterr.evaluate(folder / "original", paths, **options)
    return [candidate.scores.kld_mean for candidate in evaluation.candidates if candidate.scores is not None]


def make_rows(folder: Path, calibration: Calibration) -> Iterator[Row]:
    """Write the file of each row."""
    static = {name: float(columns.amax()) for name, columns in calibration.inputs.items()}
    small = {name: largest / TOO_SMALL for name, largest in static.items()}
    token = {"strategy": "token", "dynamic": True}
    tensor = {"strategy": "tensor", "dynamic": False}
    smooth = smoothing(folder, calibration.inputs)
    smoothed = {name: float((columns / smooth[name]).amax()) for name, columns in calibration.inputs.items()}
    rows = "FP8, a scale per row"
    yield Row(rows, "FP8 by token", write(folder, "fp8_token", 8, "float", token))
    scaled = write(folder, "fp8_kv", 8, "float", token, cache=calibration.cache)
    yield Row(rows, "FP8 by token, cache FP8 with scales", scaled)
    yield Row(rows, "FP8 by token, cache FP8, scale 1", write(folder, "fp8_kv_1", 8, "float", token, cache={}))
    yield Row(rows, "FP8, static", write(folder, "fp8_static", 8, "float", tensor, static))
    yield Row(rows, "FP8, static, ranges 8 × too small", write(folder, "fp8_small", 8, "float", tensor, small))
    yield Row("FP8 of ComfyUI", "FP8, with input_scale", comfy(folder, "comfy", static))
    yield Row("FP8 of ComfyUI", "FP8, without input_scale", comfy(folder, "comfy_without", {}))
    rows = "INT8, a scale per row"
    yield Row(rows, "INT8 by token", write(folder, "int8_token", 8, "int", token))
    yield Row(rows, "INT8, static", write(folder, "int8_static", 8, "int", tensor, static))
    path = write(folder, "int8_smooth", 8, "int", tensor, smoothed, smooth=smooth)
    yield Row(f"{rows}, SmoothQuant", "INT8, static", path)
    yield Row(f"{rows}, SmoothQuant", "INT8 by token", write(folder, "int8_both", 8, "int", token, smooth=smooth))


def calibrate(folder: Path, chunks: int, context: int) -> Calibration:
    """Run the original on the chunks that are scored."""
    from transformers import AutoTokenizer, LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder / "original", dtype=torch.float32).train(False)
    tokenizer = AutoTokenizer.from_pretrained(folder / "original")
    ids = torch.tensor(tokenizer((folder / "held_out.txt").read_text(encoding="utf-8"))["input_ids"])
    calibration = Calibration({}, {})

    def look(name: str, x: Tensor) -> None:
        largest = x.abs().flatten(0, -2).amax(0)
        calibration.inputs[name] = (
            torch.maximum(calibration.inputs[name], largest) if name in calibration.inputs else largest
        )

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.register_forward_pre_hook(lambda _, args, name=name: look(name, args[0]))
    with torch.inference_mode():
        cached = model(ids[: chunks * context].view(chunks, context), use_cache=True).past_key_values
    for n, layer in enumerate(cached.layers):
        calibration.cache[f"model.layers.{n}.self_attn.k_scale"] = float(layer.keys.abs().amax()) / 448
        calibration.cache[f"model.layers.{n}.self_attn.v_scale"] = float(layer.values.abs().amax()) / 448
    return calibration


def load(folder: Path) -> dict[str, Tensor]:
    """Return the original's tensors, float32."""
    return {name: tensor.float() for name, tensor in load_file(folder / "original" / "model.safetensors").items()}


def smoothing(folder: Path, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the factors by which SmoothQuant divides the inputs after a norm, shared by the weights that it feeds."""
    tensors = load(folder)
    factor_by_weight = {name: torch.ones(len(columns)) for name, columns in inputs.items()}
    for group in (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")):
        for block in {name.rsplit(".", 2)[0] for name in inputs}:
            names = [f"{block}.{part}" for part in group]
            of_weights = torch.stack([tensors[f"{name}.weight"].abs().amax(0) for name in names]).amax(0)
            factors = (inputs[names[0]] ** SMOOTH / of_weights ** (1 - SMOOTH)).clamp(min=1e-5)
            factor_by_weight |= dict.fromkeys(names, factors)
    return factor_by_weight


def write(
    folder: Path,
    name: str,
    bits: int,
    number_type: str,
    args: Mapping[str, Any] | None,
    static: Mapping[str, float] | None = None,
    cache: Mapping[str, float] | None = None,
    smooth: Mapping[str, Tensor] | None = None,
) -> Path:
    """Write a checkpoint of compressed-tensors: weights by rows; ``static`` and ``cache`` are ranges and scales."""
    highest, dtype = (448.0, torch.float8_e4m3fn) if number_type == "float" else (127.0, torch.int8)
    written: dict[str, Tensor] = {key: torch.tensor(scale) for key, scale in (cache or {}).items()}
    for key, tensor in load(folder).items():
        module = key.removesuffix(".weight")
        if "layers." not in key or tensor.dim() < 2:
            feeds = {"input_layernorm": "self_attn.q_proj", "post_attention_layernorm": "mlp.gate_proj"}
            block, _, norm = module.rpartition(".")
            fed = f"{block}.{feeds.get(norm)}"
            written[key] = tensor / smooth[fed] if smooth and norm in feeds else tensor
            continue
        weight = tensor * smooth[module] if smooth else tensor
        scale = weight.abs().amax(1, keepdim=True) / highest
        codes = weight / scale
        written[key] = (codes if number_type == "float" else codes.round()).to(dtype)
        written[f"{module}.weight_scale"] = scale
        if static:
            written[f"{module}.input_scale"] = torch.tensor(static[module] / highest)
    common = {"num_bits": bits, "type": number_type, "symmetric": True}
    group = {
        "weights": common | {"strategy": "channel", "dynamic": False},
        "input_activations": None if args is None else common | dict(args),
        "targets": ["Linear"],
    }
    fields = {
        "quant_method": "compressed-tensors", "format": f"{number_type}-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
        "kv_cache_scheme": None if cache is None else common | {"strategy": "tensor", "dynamic": False},
    }  # fmt: skip
    config = json.loads((folder / "original" / "config.json").read_text())
    path = folder / name
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": fields}))
    save_file({key: value.contiguous() for key, value in written.items()}, path / "model.safetensors", {"format": "pt"})
    return path


def comfy(folder: Path, name: str, static: Mapping[str, float]) -> Path:
    """Write a file of ComfyUI: FP8 with one scale for a weight, labels, and input_scale where a range is given."""
    written = {}
    label = torch.tensor(list(json.dumps({"format": "float8_e4m3fn"}).encode()), dtype=torch.uint8)
    for key, tensor in load(folder).items():
        module = key.removesuffix(".weight")
        written[key] = tensor
        if "layers." in key and tensor.dim() == 2:
            scale = tensor.abs().amax() / 448
            written |= {key: (tensor / scale).to(torch.float8_e4m3fn), f"{module}.weight_scale": scale}
            written[f"{module}.comfy_quant"] = label.clone()
            if static:
                written[f"{module}.input_scale"] = torch.tensor(static[module] / 448)
    path = folder / f"{name}.safetensors"
    save_file(written, path)
    return path


if __name__ == "__main__":
    main()
