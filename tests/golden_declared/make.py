"""Note what producers' own files store and declare, and how their own libraries would round the inputs of each layer.

    python tests/golden_declared/make.py PRODUCER ORIGINAL OUT        writes tests/golden_declared/PRODUCER.json

Run in the environment that tests/producers/run.py makes for the producer. OUT has the folders SETTING that
tests/producers/with_PRODUCER.py wrote of ORIGINAL, the "llama" of tests/producers/models.py; modelopt quantizes it
again, because it cannot read what it exports. A case has the quantization_config, the metadata, names, dtypes and
shapes of the tensors of the first block and outside of blocks, and under ``declared`` the scheme, by the names of
quanterr/recipes/inputs.py, that follows from the attributes of the layers that the library holds.
"""

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

Case = tuple[str, Path, dict[str, str]]
BITS = {(4, 3): "fp8", 8: "int8", (2, 1): "fp4"}


def load(folder: Path, **more: Any) -> Any:
    """Load a model with transformers."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **more)


def compressed_tensors(folders: list[Path], original: Path) -> Iterator[Case]:
    """Read the schemes from the QuantizationScheme that compressed-tensors attaches to each module."""
    from transformers import CompressedTensorsConfig

    for folder in folders:
        schemes = {}
        for path, module in load(folder, quantization_config=CompressedTensorsConfig()).named_modules():
            args = getattr(getattr(module, "quantization_scheme", None), "input_activations", None)
            if args is not None:
                code_type = f"{'fp' if args.type == 'float' else 'int'}{args.num_bits}"
                name = {
                    "token": f"{code_type}_token", "tensor": f"{code_type}_{'tensor' if args.dynamic else 'static'}",
                    "tensor_group": "nvfp4", "group": f"{code_type}_g{args.group_size}",
                }[str(getattr(args.strategy, "value", args.strategy))]  # fmt: skip
                schemes[path] = name.replace("fp8_g32", "mxfp8").replace("fp4_g32", "mxfp4")
        yield folder.name, folder, schemes


def quark(folders: list[Path], original: Path) -> Iterator[Case]:
    """Read the schemes from the input quantizers of the model that Quark imports from its own file."""
    from quark.torch import import_model_from_safetensors

    for folder in folders:
        schemes = {}
        for path, module in import_model_from_safetensors(load(original), str(folder)).named_modules():
            quantizer = getattr(module, "input_quantizer", None)
            if quantizer is not None:
                schemes[path] = _of_quark(quantizer)
        yield folder.name, folder, schemes


def _of_quark(quantizer: Any) -> str:
    parts = list(quantizer.children()) if type(quantizer).__name__.startswith("Sequential") else [quantizer]
    specs = [(part.qspec.dtype.value, part.qspec.qscheme.value) for part in parts]
    if len(specs) == 2:
        return "nvfp4" if specs == [("fp4", "per_group"), ("fp8_e4m3", "per_tensor")] else str(specs)
    (dtype, scheme), code_type = specs[0], specs[0][0].removesuffix("_e4m3")
    is_dynamic, spec = quantizer.is_dynamic, parts[0].qspec
    if scheme == "per_group":
        of_groups = dtype, spec.group_size, getattr(spec.scale_format, "value", spec.scale_format)
        return "mxfp4" if of_groups == ("fp4", 32, "e8m0") else "unknown"
    return f"{code_type}_{'static' if not is_dynamic else 'token' if scheme == 'per_channel' else 'tensor'}"


def torchao(folders: list[Path], original: Path) -> Iterator[Case]:
    """Read the schemes from the ``act_quant_kwargs`` of the weights."""
    for folder in folders:
        schemes = {}
        for path, module in load(folder).named_modules():
            args = getattr(getattr(module, "weight", None), "act_quant_kwargs", None)
            if args is not None:
                code_type = "int8" if "Int8" in type(args).__name__ else "fp8"
                schemes[path] = f"{code_type}_{'token' if type(args.granularity).__name__ == 'PerRow' else 'tensor'}"
        yield folder.name, folder, schemes


def sdnq(folders: list[Path], original: Path) -> Iterator[Case]:
    """Read the schemes from the forward function that SDNQ gives a layer."""
    import sdnq  # noqa: F401 - transformers finds its quantizer then

    for folder in folders:
        schemes = {}
        for path, module in load(folder).named_modules():
            name = getattr(getattr(module, "forward_func", None), "__name__", "")
            if name.endswith("_matmul"):
                schemes[path] = {"int8": "int8_token", "fp8": "fp8_token"}[name.split("_")[-2]]
        yield folder.name, folder, schemes


def modelopt(folders: list[Path], original: Path) -> Iterator[Case]:
    """Read the schemes from the input quantizers before the export; 8 random sequences calibrate."""
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint

    tokens = [torch.randint(0, 500, (1, 64), generator=torch.Generator().manual_seed(n)) for n in range(8)]
    for name in ("FP8_DEFAULT", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_2D_BLOCKWISE_WEIGHT_ONLY", "INT8_SMOOTHQUANT",
                 "INT8_WEIGHT_ONLY", "W4A8_AWQ_BETA", "FP8_KV"):  # fmt: skip
        config = mtq.FP8_KV_CFG if name == "FP8_KV" else getattr(mtq, f"{name}_CFG")
        if name == "FP8_KV":
            config = mtq.utils.update_quant_cfg_with_kv_cache_quant(mtq.FP8_DEFAULT_CFG, config["quant_cfg"])
        made = mtq.quantize(load(original), config, lambda model: [model(token) for token in tokens])
        schemes = {}
        for path, module in made.named_modules():
            quantizer = getattr(module, "input_quantizer", None)
            if quantizer is not None and quantizer.is_enabled:
                is_dynamic = getattr(quantizer, "_dynamic", False)
                schemes[path] = f"{BITS[quantizer.num_bits]}_{'token' if is_dynamic else 'static'}"
        folder = Path(tempfile.mkdtemp()) / name
        export_hf_checkpoint(made, export_dir=str(folder))
        yield name, folder, schemes


PRODUCERS: dict[str, tuple[str, Callable[[list[Path], Path], Iterator[Case]]]] = {
    "compressed_tensors": ("compressed-tensors", compressed_tensors),
    "quark": ("amd-quark", quark),
    "torchao": ("torchao", torchao),
    "sdnq": ("sdnq", sdnq),
    "modelopt": ("nvidia-modelopt", modelopt),
}


def main() -> None:
    """Write the file of a producer."""
    name, original, out = sys.argv[1], *map(Path, sys.argv[2:4])
    package, read = PRODUCERS[name]
    folders = sorted(path for path in out.iterdir() if path.is_dir())
    cases = {}
    for setting, folder, declared in read(folders, original):
        tensors, metadata = {}, {}
        for path in folder.glob("*.safetensors"):
            with safe_open(path, "pt") as file:
                metadata |= file.metadata() or {}
                for key in file.keys():  # noqa: SIM118 - it is no dict
                    part = file.get_slice(key)
                    tensors[key] = [part.get_dtype(), part.get_shape()]
        kept, metadata, first_block = (
            {key: value for key, value in sorted(all_of.items()) if ".layers.1." not in key}
            for all_of in (tensors, metadata, declared)
        )
        config = json.loads((folder / "config.json").read_text())["quantization_config"]
        cases[setting] = {"config": config, "metadata": metadata, "tensors": kept, "declared": first_block}
        print(setting, sorted(set(first_block.values())), len(first_block), flush=True)
    origin = {"producer": package, "version": version(package), "how": read.__doc__}
    text = json.dumps({"origin": origin, "cases": cases}, separators=(",", ":"))
    (Path(__file__).parent / f"{name}.json").write_text(text.replace('"cases":', '\n"cases":') + "\n")


if __name__ == "__main__":
    main()
