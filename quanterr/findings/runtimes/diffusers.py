"""What diffusers loads: a model of a pipeline in its folder, and GGUF files of denoisers with ``from_single_file``.

Reference: huggingface/diffusers@0.42.1 models/modeling_utils.py, models/model_loading_utils.py, quantizers/auto.py and
the quantizers that it names, quantizers/gguf/utils.py.
"""

from collections.abc import Iterator
from functools import partial

from quanterr.documents.loading import DIFFERS, LoadingReason
from quanterr.findings.configs import CONFIG
from quanterr.findings.contents import Contents
from quanterr.findings.runtimes.classes import DIFFUSERS
from quanterr.findings.runtimes.comfyui import DENOISERS
from quanterr.findings.runtimes.conditions import check_repacked, check_torchao
from quanterr.findings.runtimes.model import (
    PLAIN,
    ConfigRule,
    Layout,
    Runtime,
    is_one_of,
    leave_open,
    refuse,
    words,
)
from quanterr.util.strict_json import JsonFields, as_object
from quanterr.util.text import display

LOADING = "models/modeling_utils.py: ModelMixin.from_pretrained"
OF_GGUF = "models/model_loading_utils.py: load_gguf_checkpoint; quantizers/gguf/utils.py: SUPPORTED_GGUF_QUANT_TYPES"
METHODS = words("auto-round bfl gguf modelopt nunchaku_lite quanto sdnq torchao")
WEIGHTS = "diffusion_pytorch_model"  # begins the names of the files of a model


def check_class(contents: Contents) -> Iterator[LoadingReason]:
    """Yield why the files are not read, or why no rule covers them."""
    checkpoint = contents.checkpoint
    if checkpoint.gguf is not None:
        if (name := checkpoint.gguf.architecture) not in DENOISERS:
            message = f"tells denoisers in GGUF files by their tensors; no rule covers {display(str(name))}"
            yield leave_open(message, "loaders/single_file_model.py: FromOriginalModelMixin.from_single_file")
        return
    config = checkpoint.config.get(CONFIG, {})
    name = config.get("_class_name")
    files = [file.path.name for file in checkpoint.files]
    if not config:
        message = "tells models in single files by their tensors; no rule covers these"
        yield leave_open(message, "loaders/single_file_utils.py: infer_diffusers_model_type")
    elif name is None:
        yield leave_open(f"leaves models without _class_name in {CONFIG}, such as text encoders, to transformers")
    elif not is_one_of(name, DIFFUSERS):
        yield leave_open(f"has no class {display(str(name))}; the model's own code may have one", "models/__init__.py")
    elif not all(file.startswith(WEIGHTS) for file in files):
        yield refuse(f"reads {WEIGHTS}.* alone, not {display(files[0])}: OSError", LOADING)


def read_config(contents: Contents) -> JsonFields:
    """Return the configuration that diffusers follows: that of a model with a class of its own."""
    config = contents.checkpoint.config.get(CONFIG, {})
    return as_object(config.get("quantization_config")) if "_class_name" in config else {}


def _is_unknown(config: JsonFields) -> bool:
    is_of_bitsandbytes = config.get("load_in_4bit") or config.get("load_in_8bit")
    return not is_of_bitsandbytes and not is_one_of(config.get("quant_method"), METHODS)


RUNTIME = Runtime(
    "diffusers",
    "0.42.1",
    layouts=(
        Layout(frozenset({PLAIN}), LOADING, is_run=True),
        Layout(
            words("bnb_nf4 bnb_fp4 bnb_int8"),
            "quantizers/bitsandbytes/bnb_quantizer.py",
            words("bitsandbytes bitsandbytes_4bit bitsandbytes_8bit"),
        ),
        Layout(
            words("torchao_int8 torchao_intx torchao_fp8"),
            "quantizers/torchao/torchao_quantizer.py: TorchAoHfQuantizer",
            words("torchao"),
        ),
        Layout(words("sdnq"), "quantizers/sdnq/sdnq_quantizer.py, by sdnq", words("sdnq")),
        Layout(
            words(
                "gguf_q4_0 gguf_q4_1 gguf_q5_0 gguf_q5_1 gguf_q8_0 gguf_q2_k gguf_q3_k gguf_q4_k gguf_q5_k gguf_q6_k "
                "gguf_iq4_nl gguf_iq4_xs"
            ),
            OF_GGUF,
        ),
    ),
    rules=(check_class, partial(check_repacked, place=OF_GGUF), check_torchao),
    configs=(
        ConfigRule(
            frozenset(),
            _is_unknown,
            "does not know the quant_method: ValueError, Unknown quantization type",
            "quantizers/auto.py: DiffusersAutoQuantizer.from_dict",
        ),
    ),
    read_config=read_config,
    other_types="dequantizes no such type of ggml: ValueError",
    findings=dict.fromkeys(("undeclared_codes", "incomplete", "missing_codes"), DIFFERS),
)
