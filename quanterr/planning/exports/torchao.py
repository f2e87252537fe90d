"""Export of plans as JSON with an FqnToConfig, for torchao.core.config.config_from_dict."""

from collections.abc import Mapping, Sequence

from quanterr.documents.plan.model import ORIGINAL, Plan
from quanterr.planning.exports.base import INTEGER, Consumer, format_json
from quanterr.util.strict_json import JsonObject


def _export(plan: Plan, modules: Mapping[str, Sequence[str]]) -> str:
    configs = {name: _make_config(recipe) for recipe, names in modules.items() for name in names}
    return format_json({"_type": "FqnToConfig", "_version": 1, "_data": {"fqn_to_config": configs}})


def _make_config(recipe: str) -> JsonObject | None:
    if recipe == ORIGINAL:
        return None
    per_row = {"_type": "PerRow", "_version": 1, "_data": {"dim": -1}}
    if recipe == "fp8_row":
        dtype = {"_type": "torch.dtype", "_data": "float8_e4m3fn"}
        data = {"weight_dtype": dtype, "set_inductor_config": True, "granularity": per_row}
        return {"_type": "Float8WeightOnlyConfig", "_version": 2, "_data": data}
    match = INTEGER.fullmatch(recipe)
    assert match is not None  # noqa: S101 - export_plan has refused other recipes
    granularity = (
        {"_type": "PerGroup", "_version": 1, "_data": {"group_size": int(match["group"])}}
        if match["group"]
        else {"_type": "PerAxis", "_version": 1, "_data": {"axis": 0}}
    )
    data = {
        "weight_dtype": {"_type": "torch.dtype", "_data": f"int{match['bits']}"},
        "granularity": granularity,
        "mapping_type": {"_type": "MappingType", "_data": "ASYMMETRIC" if match["asym"] else "SYMMETRIC"},
        "scale_dtype": None,
        "intx_packing_format": {"_type": "IntxPackingFormat", "_data": "UNPACKED_TO_INT8"},
        "intx_choose_qparams_algorithm": {"_type": "IntxChooseQParamsAlgorithm", "_data": "AFFINE"},
    }
    return {"_type": "IntxWeightOnlyConfig", "_version": 2, "_data": data}


CONSUMER = Consumer(
    lambda recipe: recipe == "fp8_row" or bool(INTEGER.fullmatch(recipe)),
    _export,
    file="torchao.json",
    python="import json; from torchao.core.config import config_from_dict; "
    "from transformers import AutoModelForCausalLM, TorchAoConfig; "
    "config = TorchAoConfig(config_from_dict(json.load(open({file})))); "
    "AutoModelForCausalLM.from_pretrained({original}, dtype='auto', quantization_config=config)"
    ".save_pretrained('quantized')",
)
