"""Codes that loaders do not read as such, because no configuration or label declares them, or declares another method.

Loaders choose how they read a checkpoint by its config.json. Without quantization_config, transformers has no quantizer
and builds plain layers, which take codes for weights or get random weights; it does the same if it does not know the
quant_method. mlx-lm quantizes layers only if config.json has "quantization". ComfyUI reads a layer by its label; once
one layer has a label, it casts the codes of a layer without one to the dtype of computation.

Reference: huggingface/transformers@5.24.0 quantizers/auto.py get_hf_quantizer, AutoHfQuantizer.supports_quant_method;
ml-explore/mlx-lm@003da2e9 mlx_lm/utils.py load_model; comfyanonymous/ComfyUI comfy/ops.py _load_quantized_module.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from quanterr.checkpoints import Checkpoint
from quanterr.checkpoints.labels import Labels
from quanterr.checkpoints.places import list_names
from quanterr.findings.codes import make_finding
from quanterr.formats import Weight
from quanterr.report.base import Finding
from quanterr.util.strict_json import JsonFields
from quanterr.util.text import count, display, listed

OF_LOADERS = "model"  # loaders of Hugging Face's layout read model.safetensors and model-00001-of-….safetensors
COMFY_SCALE = "scale_weight"  # the end of a name of scales that only ComfyUI has
METADATA = ("format", "total_size")  # keys of a safetensors header that say nothing of codes


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Formats that ComfyUI reads by their labels.
OF_COMFY = _words(
    "fp8_tensor fp8_row fp8_block int8_tensor int8_row int8_block int8_convrot mxfp8 nvfp4 svdquant_w4a4 awq_w4a16 "
    "asym_w4a8_int8 convrot_w4a4"
)


class Family(NamedTuple):
    """Formats that the same loaders read: what these are called, and the quant_methods that select them."""

    name: str
    formats: frozenset[str]
    methods: frozenset[str] = frozenset()  # empty: several loaders read such tensors
    tensors: str = ""  # families with the same have the same names of tensors: a loader of the other refuses the shapes


def _make_family(name: str, formats: str, methods: str = "", tensors: str = "") -> Family:
    return Family(name, _words(formats), _words(methods), tensors)


OF_GPTQ_AND_AWQ = "auto-round auto_round intel/auto-round inc ipex moe_wna16 rtn"
FAMILIES = (
    _make_family("bitsandbytes", "bnb_nf4 bnb_fp4 bnb_int8", "bitsandbytes bitsandbytes_4bit bitsandbytes_8bit"),
    _make_family(
        "GPTQ",
        "gptq gptq_v2 gptq_p gptq_marlin",
        f"gptq gptq_v2 gptq_marlin gptqmodel marlin bitblas gptq_bitblas {OF_GPTQ_AND_AWQ}",
        "qweight",
    ),
    _make_family("AWQ", "awq_gemm awq_gemv awq_gemv_fast awq_marlin", f"awq awq_marlin {OF_GPTQ_AND_AWQ}", "qweight"),
    _make_family(
        "compressed-tensors",
        "ct_pack ct_int ct_nvfp4 ct_mxfp4 ct_mxfp6 ct_marlin24 ct_sparse_bitmask ct_sparse24_bitmask",
        "compressed-tensors compressed_tensors sparseml nvfp4",
    ),
    _make_family("MLX", "mlx_affine mlx_mxfp4 mlx_nvfp4 mlx_mxfp8"),
    _make_family("scaled codes", "fp8_tensor fp8_row fp8_block int8_tensor int8_row int8_block mxfp8 nvfp4"),
    _make_family("MXFP4 of gpt-oss", "gpt_oss_mxfp4", "mxfp4 gpt_oss_mxfp4 quark modelopt"),
)
# Other methods that some loader knows: transformers' AUTO_QUANTIZER_MAPPING, vLLM's and SGLang's QUANTIZATION_METHODS,
# diffusers' and those of programs that have formats of their own.
OTHER_METHODS = _words(
    "aqlm ascend autoawq bitnet blockwise_int8 deepspeedfp eetq exl2 exl3 experts_int8 fbgemm_fp8 finegrained_fp8 "
    "fouroversix fp8 fp_quant gemma gguf higgs hqq humming int8 metal mlx modelopt modelopt_fp4 modelopt_fp8 "
    "modelopt_mixed modelopt_mxfp8 modelslim msmodelslim mx mxfp4 mxfp6 mxfp8 nunchaku nvfp4 nvidia petit_nvfp4 prism "
    "ptpc_fp8 qoq qqq qserve quanto quark quartet quip quip# quip_sharp sdnq sinq smoothquant spinquant spqr svdquant "
    "torchao tpu_int8 vptq w4afp8 w8a8_fp8 w8a8_int8"
)
KNOWN = OTHER_METHODS.union(*(family.methods for family in FAMILIES))


def check_loading(checkpoint: Checkpoint, labels: Labels, weights: Sequence[Weight]) -> Iterator[Finding]:
    """Check that config.json, or what stands for it, lets loaders read the codes of a checkpoint's weights."""
    yield from _check_labels(labels, weights)
    coded = [(weight, family) for weight in weights if weight.has_codes and (family := _find_family(weight))]
    if labels.config:
        yield from _check_method(labels.config, coded)
    elif coded and _has_layout_of_loaders(checkpoint) and not _is_declared_elsewhere(checkpoint, labels):
        yield from _report_undeclared([weight for weight, _ in coded if not _is_of_comfy(weight, labels)])


def _check_labels(labels: Labels, weights: Sequence[Weight]) -> Iterator[Finding]:
    """Report weights without a label for ComfyUI in a file whose other weights have one."""
    of_comfy = [weight for weight in weights if weight.format in OF_COMFY]
    bare = [weight.name for weight in of_comfy if not labels.of(weight.codes.name)]
    if bare and len(bare) < len(of_comfy) and not labels.marker and not labels.config:
        message = (
            f"{count(len(bare), 'weight')} of {len(of_comfy)} {'has' if len(bare) == 1 else 'have'} codes and scales, "
            f"but no comfy_quant label as the others have: {listed(bare, 3)}: ComfyUI takes the codes for weights"
        )
        remedy = "write the file again with a label for each quantized layer"
        yield make_finding("undeclared_codes", "error", None, message, remedy, layers=bare)


def _find_family(weight: Weight) -> Family | None:
    return next((family for family in FAMILIES if weight.format in family.formats), None)


def _has_layout_of_loaders(checkpoint: Checkpoint) -> bool:
    """Return whether transformers and its like load this: files named so beside the config.json of a model."""
    main = checkpoint.config.get("config.json")
    is_model = isinstance(main, dict) and bool(main.get("model_type") or main.get("architectures"))
    named = checkpoint.kind in ("folder", "index") or any(
        file.path.name.startswith(OF_LOADERS) for file in checkpoint.files
    )
    return is_model and named and checkpoint.gguf is None


def _is_declared_elsewhere(checkpoint: Checkpoint, labels: Labels) -> bool:
    """Return whether something else says that there are codes: a part of config.json, a header, another file."""
    if labels.marker or _mentions_quantization(checkpoint.config):
        return True
    if any("quant" in f"{key} {text}".lower() for key, text in labels.metadata.items() if key not in METADATA):
        return True
    names = list_names(checkpoint.folder) if checkpoint.folder else []
    return any("quant" in name.lower() and name.endswith(".json") for name in names)


def _mentions_quantization(declared: object) -> bool:
    """Return whether a part of the configurations, at any depth, has settings of a quantization."""
    if not isinstance(declared, dict):
        return False
    return any(
        (isinstance(value, dict) and bool(value) and ("quant" in key.lower() or "compression" in key.lower()))
        or _mentions_quantization(value)
        for key, value in declared.items()
    )


def _is_of_comfy(weight: Weight, labels: Labels) -> bool:
    """Return whether ComfyUI reads the weight, which needs no config.json."""
    return bool(labels.of(weight.codes.name)) or any(
        entry.name.endswith(COMFY_SCALE) for entry in weight.parts.values()
    )


def _report_undeclared(weights: Sequence[Weight]) -> Iterator[Finding]:
    """Report codes that nothing declares."""
    if not weights:
        return
    names = [weight.name for weight in weights]
    formats = sorted({weight.format for weight in weights})
    message = (
        f"config.json declares no quantization, but {count(len(names), 'weight')} "
        f"{'is' if len(names) == 1 else 'are'} stored as {' and '.join(formats)}: {listed(names, 3)}: "
        f"loaders {_describe_reading(weights[0])}"
    )
    remedy = "put the quantization_config that the quantizer wrote (MLX: quantization) back into config.json"
    yield make_finding("undeclared_codes", "error", None, message, remedy, layers=names)


def _describe_reading(weight: Weight) -> str:
    """Return what loaders do with a weight that they take to be unquantized."""
    codes = weight.codes
    if codes.name != weight.name:
        return f"look for {display(weight.name)}, which is not stored, and refuse or fill it with random numbers"
    if codes.shape != weight.shape:
        return f"refuse codes of another shape than the weight, {list(codes.shape)} for {list(weight.shape)}"
    return "take its codes for weights, without their scales"


def _check_method(config: JsonFields, coded: Sequence[tuple[Weight, Family]]) -> Iterator[Finding]:
    """Report weights that the declared quant_method does not read."""
    named = config.get("quant_method")
    method = named.lower() if isinstance(named, str) else ""
    wrong: dict[Family, list[Weight]] = {}
    for weight, family in coded:
        if method and not _reads(method, family):
            wrong.setdefault(family, []).append(weight)
    for family, weights in wrong.items():
        yield _report_method(method, family, weights)


def _reads(method: str, family: Family) -> bool:
    """Return whether loaders that this quant_method selects read the tensors of a family."""
    if family.methods:
        return method in family.methods
    others = frozenset[str]().union(*(other.methods for other in FAMILIES if other.tensors))
    return method in KNOWN and method not in others | {"bitsandbytes"}


def _report_method(method: str, family: Family, weights: Sequence[Weight]) -> Finding:
    """Return the finding that loaders selected by a quant_method do not read these weights.

    It is an error if they leave layers without the weights, a warning if they refuse the file.
    """
    names = [weight.name for weight in weights]
    owner = next((other for other in FAMILIES if other != family and method in other.methods), None)
    is_refused = method not in KNOWN and not family.methods
    if owner is not None and owner.tensors and owner.tensors == family.tensors:
        is_refused, does = True, f"loaders of {owner.name} refuse these shapes"
    elif method in KNOWN:
        does = f"loaders that follow it {_describe_reading(weights[0])}"
    else:
        does = f"no loader has this method; transformers skips it, so that loaders {_describe_reading(weights[0])}"
    message = (
        f"config.json declares quant_method {display(method)}, but {count(len(names), 'weight')} "
        f"{'has' if len(names) == 1 else 'have'} the tensors of {family.name} ({weights[0].format}): "
        f"{listed(names, 3)}: {does}"
    )
    remedy = "declare the method that made these tensors, with its settings"
    severity = "warning" if is_refused else "error"
    return make_finding("config_mismatch", severity, None, message, remedy, layers=names, key="quant_method")
