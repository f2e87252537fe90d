"""Export of plans as JSON with the arguments of transformers' BitsAndBytesConfig."""

from collections.abc import Mapping, Sequence

from quanterr.documents.plan.model import ORIGINAL, Plan
from quanterr.errors import UsageError
from quanterr.planning.exports.base import Consumer, format_json, list_kept_modules
from quanterr.util.text import itemize


def _export(plan: Plan, modules: Mapping[str, Sequence[str]]) -> str:
    quantized = [recipe for recipe in modules if recipe != ORIGINAL]
    if len(quantized) > 1:
        raise UsageError(
            f"--export bitsandbytes: bitsandbytes writes one format, but the plan has {itemize(quantized, 5)}"
        )
    quant_type, _, double = (quantized or ["nf4"])[0].partition(":")
    fields = {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": quant_type,
        "bnb_4bit_use_double_quant": double == "double",
        "llm_int8_skip_modules": list_kept_modules(modules),
    }
    return format_json(fields)


CONSUMER = Consumer(
    lambda recipe: recipe in ("nf4", "fp4", "nf4:double", "fp4:double"),
    _export,
    mixes=False,
    file="bitsandbytes.json",
    python="import json; from transformers import AutoModelForCausalLM, BitsAndBytesConfig; "
    "config = BitsAndBytesConfig(**json.load(open({file}))); "
    "AutoModelForCausalLM.from_pretrained({original}, dtype='auto', quantization_config=config)"
    ".save_pretrained('quantized')",
)
