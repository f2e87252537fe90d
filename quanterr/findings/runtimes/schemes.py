"""What AutoRound and Quark declare, for runtimes that have rules for some of their schemes."""

from collections.abc import Callable, Iterator

from quanterr.documents.loading import LoadingReason
from quanterr.findings.contents import Contents, Stored
from quanterr.findings.runtimes.model import leave_open, words
from quanterr.util.strict_json import JsonFields, as_object
from quanterr.util.text import display, itemize

# packing_format of AutoRound → what it stores; the first is its default.
ROUNDED = {"auto_round:auto_gptq": words("gptq gptq_v2"), "auto_round:auto_awq": words("awq_gemm")}


def check_rounded(contents: Contents, place: str) -> Iterator[LoadingReason]:
    """Yield a reason if no rule covers what AutoRound declares, or if it stores something else."""
    config = contents.labels.config
    if contents.labels.method != "auto-round":
        return
    packing = str(config.get("packing_format", next(iter(ROUNDED))))
    formats = ROUNDED.get(packing, frozenset()) if config.get("data_type", "int") == "int" else frozenset()
    others = [
        stored.name for stored in contents.weights if stored.weight.has_codes and stored.weight.format not in formats
    ]
    if others:
        message = f"no rule covers {display(packing)} of AutoRound for {itemize(others, 3)}"
        yield leave_open(message, place)


def list_quark_schemes(config: JsonFields) -> list[JsonFields]:
    """Return the schemes that a configuration of Quark gives to layers."""
    layer_configs = [as_object(config.get(key)) for key in ("layer_quant_config", "layer_type_quant_config")]
    schemes = [config.get("global_quant_config"), *(scheme for several in layer_configs for scheme in several.values())]
    return [as_object(scheme) for scheme in schemes]


def check_quark(contents: Contents, has_scheme: Callable[[JsonFields], bool], layers: str) -> Iterator[LoadingReason]:
    """Yield a reason if no rule covers a scheme of Quark, or the layers that use it.

    ``has_scheme`` says whether the runtime has a class for a scheme, ``layers`` where its code of layers is.
    """
    config = contents.labels.config
    if contents.labels.method != "quark":
        return
    place = f"{layers}quark/quark.py: QuarkConfig"
    export = as_object(config.get("export"))
    if export.get("kv_cache_group") != [] or export.get("pack_method") not in ("order", "reorder"):
        yield leave_open("no rule covers a cache that Quark quantizes, or codes in another order", place)
    if not all(map(has_scheme, list_quark_schemes(config))):
        yield leave_open("no rule covers a scheme that Quark declares", place)
    if any(".experts." in stored.name for stored in contents.weights if stored.weight.has_codes):
        yield leave_open("no rule covers experts that Quark quantizes", f"{layers}quark/")
    odd = [stored for stored in contents.weights if stored.weight.has_codes and not _has_quark_shape(stored)]
    if odd:
        message = f"no rule covers scales of these shapes: {itemize([stored.name for stored in odd], 3)}"
        yield leave_open(message, f"{layers}quark/schemes/: create_weights")


def _has_quark_shape(stored: Stored) -> bool:
    """Return whether scales are stored as its schemes of linear layers create them: codes of INT4 in groups alone."""
    scale = stored.weight.scale
    if scale is None or stored.weight.format not in ("fp8_row", "quark_int4"):
        return True
    return len(scale.shape) == (1 if stored.weight.format == "fp8_row" else 2)
