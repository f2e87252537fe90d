"""Plans in the form that quantizing programs read.

    llama-quantize    its command, with --tensor-type NAME=TYPE for each tensor, for types of ggml
    llmcompressor     a recipe as JSON, which is also YAML: config groups with targets, and modules to ignore
    torchao           an FqnToConfig as JSON, for torchao.core.config.config_from_dict
    bitsandbytes      the arguments of transformers' BitsAndBytesConfig as JSON
    modelopt          a weight-only quantization config as YAML, for modelopt.torch.quantization.quantize
    convert_to_quant  name patterns and their formats as JSON, for --layer-config of silveroxides/convert_to_quant
    mlx               bits and group size per module as JSON, the result of a quant_predicate

A recipe that a program cannot write is an error: a plan is exported as a whole or not at all. For programs that read
the plan from a file, :func:`export_command` returns the command that uses it.
"""

import json
import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import IO, NamedTuple

from quanterr.documents.plan.model import ORIGINAL, Plan, PlannedLayer
from quanterr.errors import UsageError
from quanterr.outputs.formatting import LONG
from quanterr.pairing.conversion import to_llama_name
from quanterr.pairing.names import atoms_of, canonicalize
from quanterr.recipes.matrices import is_stack
from quanterr.recipes.names import MLX, list_recipes
from quanterr.util.strict_json import JsonObject
from quanterr.util.text import display, listed

# ModelOpt's quantizers: modelopt_recipes/configs/numerics of nvidia-modelopt 0.47.
MODELOPT = {
    "fp8_tensor": "{num_bits: e4m3, axis: null}",
    "fp8_row": "{num_bits: e4m3, axis: 0}",
    "fp8_block128": "{num_bits: e4m3, block_sizes: {-1: 128, -2: 128}}",
    "int8_tensor": "{num_bits: 8, axis: null}",
    "int8_row": "{num_bits: 8, axis: 0}",
    "mxfp8": "{num_bits: e4m3, block_sizes: {-1: 32, type: dynamic, scale_bits: e8m0}}",
    "mxfp4": "{num_bits: e2m1, block_sizes: {-1: 32, type: dynamic, scale_bits: e8m0}}",
    "nvfp4": "{num_bits: e2m1, block_sizes: {-1: 16, type: static, scale_bits: e4m3}}",
}
# Formats of convert_to_quant 1.3: README.md, config/layer_config.py. Its --layer-config turns other formats into FP8.
CONVERT_TO_QUANT: dict[str, JsonObject] = {
    "fp8_tensor": {"format": "float8_e4m3fn", "scaling_mode": "tensor"},
    "fp8_row": {"format": "float8_e4m3fn_rowwise", "scaling_mode": "row"},
    "fp8_block128": {"format": "float8_e4m3fn_blockwise", "scaling_mode": "block", "block_size": 128},
    "int8_tensor": {"format": "int8_tensorwise", "scaling_mode": "tensor"},
    "int8_row": {"format": "int8_tensorwise", "scaling_mode": "row"},
    "int8_block128": {"format": "int8_blockwise", "scaling_mode": "block", "block_size": 128},
}
# ggml types whose name differs when llama-quantize uses them as the base type of a file.
BASE_TYPES = {"mxfp4": "MXFP4_MOE"}
STACK = (1, 1, 1)  # stands for the shape of a stack of experts
END = "END_OF_PLAN"  # a line that no export contains
SPECIAL = re.compile(r'[$`"\\!]')  # characters that a shell interprets within double quotes
INTEGER = re.compile(r"int(?P<bits>[2-8])_(?:g(?P<group>\d+)|(?P<channel>channel))(?P<asym>:asym)?")


def export_plan(plan: Plan, consumer: str) -> str:
    """Return the plan in the form that one of :data:`CONSUMERS` reads.

    Raises:
        UsageError: the program is unknown, or does not write a recipe of the plan.
    """
    check_consumer(consumer)
    modules: dict[str, list[str]] = defaultdict(list)
    for layer in plan.layers:
        modules[_base_recipe(layer)].append(layer.layer_name.removesuffix(".weight"))
    if refused := _unwritable_recipes(plan, consumer):
        raise UsageError(
            f"--export {consumer}: {consumer} does not write {listed(refused, 5)}; plan with recipes that it writes, "
            f"such as --to {','.join(list_writable(consumer))}"
        )
    if not CONSUMERS[consumer].takes_stacks and (stack := _quantized_stack(plan)) is not None:
        raise UsageError(
            f"--export {consumer}: {display(stack)} is a stack of experts, for which it has no words; -l '!experts' "
            "leaves these out"
        )
    return CONSUMERS[consumer].export(plan, modules)


def export_command(plan: Plan, consumer: str) -> str:
    """Return the shell command that quantizes by the result of :func:`export_plan`, which it reads from a file.

    It is empty if the export itself is the command.
    """
    found = CONSUMERS[consumer]
    name = plan.original.removeprefix("hf://")
    command = found.command.format(original=shlex.quote(name), file=found.file)
    if found.python:
        code = found.python.format(original=repr(name), file=repr(found.file))
        command = "python -c " + (shlex.quote(code) if SPECIAL.search(code) else f'"{code}"')
    return command


def write(plan: Plan, file: IO[str], program: str) -> None:
    """Write a shell script that carries out the plan: it writes the file that the program reads, and runs the program.

    Raises:
        UsageError: as :func:`export_plan`.
    """
    text = export_plan(plan, program)
    if command := export_command(plan, program):
        text = f"cat > {CONSUMERS[program].file} <<'{END}'\n{text}{END}\n{command}\n"
    planned_by = display(shlex.join(plan.run.command), LONG)
    file.write(f"#!/bin/sh\n# Quantizes as planned by {planned_by}\nset -e\n{text}")


def consumers_of(plan: Plan) -> list[str]:
    """Return the programs that write all recipes and layers of a plan, first those for its kind of original."""
    stack = _quantized_stack(plan)
    able = [
        name
        for name, one in CONSUMERS.items()
        if not _unwritable_recipes(plan, name) and (one.takes_stacks or stack is None)
    ]
    suffix = next((ending for ending in (".safetensors", ".gguf") if plan.original.endswith(ending)), "")
    return sorted(able, key=lambda name: CONSUMERS[name].reads != suffix)


def list_writable(consumer: str) -> list[str]:
    """Return the recipes of ``quanterr formats --recipes`` that a program writes into one checkpoint."""
    found = [recipe for recipe in list_recipes() if CONSUMERS[consumer].writes(recipe)]
    return found if CONSUMERS[consumer].mixes else found[:1]


def check_consumer(consumer: str | None) -> None:
    """Refuse an unknown program before anything is computed.

    Raises:
        UsageError: ``consumer`` is none of :data:`CONSUMERS`.
    """
    if consumer is not None and consumer not in CONSUMERS:
        raise UsageError(f"--export {display(consumer)}: choose one of {', '.join(CONSUMERS)}")


def _base_recipe(layer: PlannedLayer) -> str:
    """Return a layer's recipe without its choice of scales."""
    return layer.recipe.partition(":scales")[0].removesuffix(":strict")


def _unwritable_recipes(plan: Plan, consumer: str) -> list[str]:
    """Return the recipes of the plan that a program does not write."""
    recipes = dict.fromkeys(map(_base_recipe, plan.layers))
    return [recipe for recipe in recipes if recipe != ORIGINAL and not CONSUMERS[consumer].writes(recipe)]


def _quantized_stack(plan: Plan) -> str | None:
    """Return the name of a stack of experts that a plan quantizes."""
    quantized = (layer.layer_name for layer in plan.layers if layer.recipe != ORIGINAL)
    return next((name for name in quantized if is_stack(name, STACK)), None)


def _export_llama_quantize(plan: Plan, modules: Mapping[str, Sequence[str]]) -> str:
    """Return the command of llama-quantize.

    An embedding or head that is not in the plan gets bf16, as the base type would quantize it. Which of two matching
    patterns decides depends on the version of llama-quantize, so no tensor matches two. Gate and up of experts are two
    stacks in GGUF files, even if they are one in the original.
    """
    lines: dict[str, str] = {}
    for recipe, names in modules.items():
        kind = "bf16" if recipe == ORIGINAL else recipe.removeprefix("gguf_")
        stacks = {name for name in names if is_stack(name, STACK)}
        paths = [canonicalize(f"{name}.weight")[0] for name in names if name not in stacks]
        paths += [path for name in stacks for path in atoms_of(name, STACK).names]
        for path in paths:
            own = re.sub(r"\.\d+$", "", to_llama_name(plan.architecture, path))
            if lines.setdefault(own, kind) != kind:
                raise UsageError(f"--export llama-quantize: {display(own)} is one tensor there, but has two recipes")
    ends = {"--token-embedding-type": "token_embd", "--output-tensor-type": "output"}
    words = [f"{option} {lines.pop(name, 'bf16')}" for option, name in ends.items()]
    words += [f"--tensor-type '^{re.escape(name)}\\.weight$={kind}'" for name, kind in lines.items()]
    quantized = Counter(kind for kind in lines.values() if kind != "bf16")
    base = quantized.most_common(1)[0][0] if quantized else "bf16"
    source = plan.original if plan.original.endswith(".gguf") else "original.gguf"
    words.append(f"{shlex.quote(source)} planned.gguf {BASE_TYPES.get(base, base.upper())}")
    return " \\\n  ".join(["llama-quantize", *words]) + "\n"


def _export_llmcompressor(plan: Plan, modules: Mapping[str, Sequence[str]]) -> str:
    groups = {
        f"group_{n}": {"targets": [_match_exactly(name) for name in names], **_config_group(recipe)}
        for n, (recipe, names) in enumerate((r, names) for r, names in modules.items() if r != ORIGINAL)
    }
    ignore = ["lm_head", *(_match_exactly(name) for name in modules.get(ORIGINAL, ()))]
    modifier = {"QuantizationModifier": {"ignore": ignore, "config_groups": groups}}
    return json.dumps({"quant_stage": {"quant_modifiers": modifier}}, indent=1) + "\n"


def _match_exactly(name: str) -> str:
    """Return a target that matches one module."""
    return f"re:^{re.escape(name)}$"


def _config_group(recipe: str) -> JsonObject:
    """Return a config group of compressed-tensors, without its targets."""
    dynamic = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
    if found := INTEGER.fullmatch(recipe):
        group = found["group"]
        weights = {"num_bits": int(found["bits"]), "type": "int", "symmetric": not found["asym"]}
        return {
            "weights": weights | ({"strategy": "group", "group_size": int(group)} if group else {"strategy": "channel"})
        }
    if recipe.startswith("fp8_"):
        strategy = {"fp8_row": "channel", "fp8_tensor": "tensor"}[recipe]
        weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy}
        return {"weights": weights, "input_activations": dynamic}
    group, scale = (16, "torch.float8_e4m3fn") if recipe == "nvfp4" else (32, "torch.uint8")
    strategy = "tensor_group" if recipe == "nvfp4" else "group"
    weights = {"num_bits": 8 if recipe == "mxfp8" else 4, "type": "float", "symmetric": True, "strategy": strategy}
    return {"weights": weights | {"group_size": group, "scale_dtype": scale, "zp_dtype": scale}}


def _export_torchao(plan: Plan, modules: Mapping[str, Sequence[str]]) -> str:
    configs = {name: _torchao_config(recipe) for recipe, names in modules.items() for name in names}
    return json.dumps({"_type": "FqnToConfig", "_version": 1, "_data": {"fqn_to_config": configs}}, indent=1) + "\n"


def _torchao_config(recipe: str) -> JsonObject | None:
    if recipe == ORIGINAL:
        return None
    per_row = {"_type": "PerRow", "_version": 1, "_data": {"dim": -1}}
    if recipe == "fp8_row":
        dtype = {"_type": "torch.dtype", "_data": "float8_e4m3fn"}
        data = {"weight_dtype": dtype, "set_inductor_config": True, "granularity": per_row}
        return {"_type": "Float8WeightOnlyConfig", "_version": 2, "_data": data}
    found = INTEGER.fullmatch(recipe)
    assert found is not None  # noqa: S101 - export_plan has refused other recipes
    granularity = (
        {"_type": "PerGroup", "_version": 1, "_data": {"group_size": int(found["group"])}}
        if found["group"]
        else {"_type": "PerAxis", "_version": 1, "_data": {"axis": 0}}
    )
    data = {
        "weight_dtype": {"_type": "torch.dtype", "_data": f"int{found['bits']}"},
        "granularity": granularity,
        "mapping_type": {"_type": "MappingType", "_data": "ASYMMETRIC" if found["asym"] else "SYMMETRIC"},
        "scale_dtype": None,
        "intx_packing_format": {"_type": "IntxPackingFormat", "_data": "UNPACKED_TO_INT8"},
        "intx_choose_qparams_algorithm": {"_type": "IntxChooseQParamsAlgorithm", "_data": "AFFINE"},
    }
    return {"_type": "IntxWeightOnlyConfig", "_version": 2, "_data": data}


def _export_modelopt(plan: Plan, modules: Mapping[str, Sequence[str]]) -> str:
    """Return the plan as YAML rather than JSON, because the edges of blocks are numeric keys."""
    lines = ["quant_cfg:", '- {quantizer_name: "*", enable: false}']
    for recipe, names in modules.items():
        for name in names if recipe != ORIGINAL else ():
            quantizer = json.dumps(f"{name}.weight_quantizer")
            lines.append(f"- {{quantizer_name: {quantizer}, cfg: {_modelopt_config(recipe)}}}")
    return "\n".join([*lines, "algorithm: max", ""])


def _modelopt_config(recipe: str) -> str:
    """Return ModelOpt's quantizer for a recipe."""
    if found := INTEGER.fullmatch(recipe):
        group = found["group"]
        return f"{{num_bits: {found['bits']}, {f'block_sizes: {{-1: {group}, type: static}}' if group else 'axis: 0'}}}"
    return MODELOPT[recipe]


def _is_modelopt(recipe: str) -> bool:
    if found := INTEGER.fullmatch(recipe):
        return found["bits"] in ("4", "8") and not found["asym"]
    return recipe in MODELOPT


def _export_bitsandbytes(plan: Plan, modules: Mapping[str, Sequence[str]]) -> str:
    quantized = [recipe for recipe in modules if recipe != ORIGINAL]
    if len(quantized) > 1:
        raise UsageError(
            f"--export bitsandbytes: bitsandbytes writes one format, but the plan has {listed(quantized, 5)}"
        )
    kind, _, double = (quantized or ["nf4"])[0].partition(":")
    fields = {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": kind,
        "bnb_4bit_use_double_quant": double == "double",
        "llm_int8_skip_modules": ["lm_head", *modules.get(ORIGINAL, ())],
    }
    return json.dumps(fields, indent=1) + "\n"


def _export_convert_to_quant(plan: Plan, modules: Mapping[str, Sequence[str]]) -> str:
    """Return a config with plain rounding, as the plan measured it; layers that are not in the plan are skipped."""
    found: JsonObject = {"_default": {"skip": True}}
    for recipe, names in modules.items():
        how = {"skip": True} if recipe == ORIGINAL else CONVERT_TO_QUANT[recipe] | {"simple": True}
        found |= {f"^{re.escape(name)}$": how for name in names}
    return json.dumps(found, indent=1) + "\n"


def _export_mlx(plan: Plan, modules: Mapping[str, Sequence[str]]) -> str:
    found: JsonObject = {}
    for recipe, names in modules.items():
        match = MLX.fullmatch(recipe)
        how = {"group_size": int(match["group"]), "bits": int(match["bits"])} if match else False
        found |= dict.fromkeys(names, how)
    return json.dumps(found, indent=1) + "\n"


def _is_ct(recipe: str) -> bool:
    return bool(INTEGER.fullmatch(recipe)) or recipe in ("fp8_row", "fp8_tensor", "nvfp4", "mxfp4", "mxfp8")


class Consumer(NamedTuple):
    """A quantizing program: the recipes that it writes, and the form in which it reads a plan."""

    writes: Callable[[str], bool]
    export: Callable[[Plan, Mapping[str, Sequence[str]]], str]
    takes_stacks: bool = False  # whether it can quantize stacks of experts
    file: str = ""  # the file that the command reads
    command: str = ""  # a command with {original} and {file}
    python: str = ""  # Python code with {original} and {file}, for a library
    reads: str = ""  # suffix of the original; empty for a folder
    mixes: bool = True  # whether a checkpoint can have several recipes


CONSUMERS = {
    "llama-quantize": Consumer(
        lambda recipe: recipe.startswith("gguf_"), _export_llama_quantize, takes_stacks=True, reads=".gguf"
    ),
    "llmcompressor": Consumer(
        _is_ct,
        _export_llmcompressor,
        file="recipe.yaml",
        python="from llmcompressor import oneshot; oneshot(model={original}, recipe={file}, output_dir='quantized')",
    ),
    "torchao": Consumer(
        lambda recipe: recipe == "fp8_row" or bool(INTEGER.fullmatch(recipe)),
        _export_torchao,
        file="torchao.json",
        python="import json; from torchao.core.config import config_from_dict; "
        "from transformers import AutoModelForCausalLM, TorchAoConfig; "
        "config = TorchAoConfig(config_from_dict(json.load(open({file})))); "
        "AutoModelForCausalLM.from_pretrained({original}, dtype='auto', quantization_config=config)"
        ".save_pretrained('quantized')",
    ),
    "modelopt": Consumer(
        _is_modelopt,
        _export_modelopt,
        file="modelopt.yaml",
        python="from modelopt.torch import export, quantization; "
        "from modelopt.torch.opt.config_loader import load_config; "
        "from transformers import AutoModelForCausalLM; "
        "model = AutoModelForCausalLM.from_pretrained({original}, dtype='auto'); "
        "quantization.quantize(model, load_config({file})); "
        "export.export_hf_checkpoint(model, export_dir='quantized')",
    ),
    "bitsandbytes": Consumer(
        lambda recipe: recipe in ("nf4", "fp4", "nf4:double", "fp4:double"),
        _export_bitsandbytes,
        mixes=False,
        file="bitsandbytes.json",
        python="import json; from transformers import AutoModelForCausalLM, BitsAndBytesConfig; "
        "config = BitsAndBytesConfig(**json.load(open({file}))); "
        "AutoModelForCausalLM.from_pretrained({original}, dtype='auto', quantization_config=config)"
        ".save_pretrained('quantized')",
    ),
    "convert_to_quant": Consumer(
        lambda recipe: recipe in CONVERT_TO_QUANT,
        _export_convert_to_quant,
        file="layers.json",
        command="convert_to_quant -i {original} --layer-config {file} --comfy_quant -o quantized.safetensors",
        reads=".safetensors",
    ),
    "mlx": Consumer(
        lambda recipe: bool(MLX.fullmatch(recipe)),
        _export_mlx,
        file="mlx.json",
        python="import json; from mlx_lm import convert; plan = json.load(open({file})); "
        "convert({original}, 'quantized', quantize=True, quant_predicate=lambda name, module: plan.get(name, False))",
    ),
}
