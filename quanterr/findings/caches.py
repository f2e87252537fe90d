"""Scales of a KV cache and rotations of inputs that are declared, but that runtimes cannot apply."""

from collections.abc import Iterator, Mapping

from quanterr.documents.base import Finding
from quanterr.findings.checks import DECLARED, QUANTIZED, check
from quanterr.findings.codes import make_finding
from quanterr.findings.contents import Contents
from quanterr.pairing.inputs import CacheScales, find_cache_scales
from quanterr.pairing.transforms import find_lone_transforms
from quanterr.util.text import count, display, itemize

# What is missing of a KV cache → what vLLM or other runtimes do (see find_cache_scales).
WITHOUT_SCALES = {
    "keys": "vLLM refuses the file",
    "values": "vLLM uses those of keys",
    "keys and values": "runtimes use 1",
    "keys or values": "runtimes use 1 or another scale, or refuse",
}


@check("missing_rotation", needs=DECLARED, of=QUANTIZED)
def check_rotations(contents: Contents) -> Iterator[Finding]:
    """Report declared rotations that nothing undoes."""
    yield from report_lone_rotations(find_lone_transforms(contents.labels.config, contents.checkpoint.entries))


def report_lone_rotations(reasons: Mapping[str, str]) -> Iterator[Finding]:
    """Report rotations of weights without a counterpart; ``reasons`` maps names of transforms to reasons."""
    for name, why in reasons.items():
        message = f"config.json declares the transform {display(name)}: {why}; the weights stay rotated at run time"
        remedy = "export the model again with both sides of the transform, and with its matrix"
        yield make_finding("missing_rotation", "warning", None, message, remedy, transform=name)


@check("missing_kv_scale", "scale_misfit", needs=DECLARED, of=QUANTIZED)
def check_cache_scales(contents: Contents) -> Iterator[Finding]:
    """Report missing, shared or too many scales of a KV cache."""
    yield from report_cache_scales(find_cache_scales(contents.labels.config, contents.checkpoint.entries))


def report_cache_scales(cache: CacheScales) -> Iterator[Finding]:
    """Report what is wrong with the scales that are stored for a KV cache, and which are not stored."""
    remedy = "calibrate k_scale and v_scale"
    if names := list(cache.missing):
        kinds = dict.fromkeys(cache.missing.values())
        what = next(iter(kinds)) if len(kinds) == 1 else "keys or values"
        there = "an FP8 KV cache is declared" if cache.is_declared else "the other modules have scales of a KV cache"
        message = (
            f"{there}, but scales of {what} are missing for "
            f"{count(len(names), 'attention module')}: {itemize(names, 3)}; {WITHOUT_SCALES[what]}"
        )
        yield make_finding("missing_kv_scale", "warning", None, message, remedy, modules=names)
    if cache.shared:
        message = (
            f"keys and values share one scale, kv_scale, in {count(len(cache.shared), 'attention module')}: "
            f"{itemize(cache.shared, 3)}; vLLM uses it for both, and calls that deprecated"
        )
        yield make_finding("missing_kv_scale", "info", None, message, remedy, modules=cache.shared)
    if (names := [scale.name for scale in cache.several]) and not cache.of_heads:
        shown = itemize([f"{scale.name} ({scale.n:,})" for scale in cache.several], 3)
        message = (
            f"scales of keys or values hold several numbers in {count(len(names), 'tensor')}, where one was declared: "
            f"{shown}; vLLM refuses them"
        )
        yield make_finding("scale_misfit", "warning", None, message, "store one scale per module", tensors=names)
