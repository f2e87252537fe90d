"""The modules that a quantization_config names, and how they are stored.

What the configuration excludes has no codes; what it quantizes has codes, of the declared kind (``schemes``); its
entries name modules that exist. Loaders follow the configuration, not the tensors.
"""

import re
from collections.abc import Iterable, Iterator, Sequence

from quanterr.checkpoints.base import RECIPE
from quanterr.declarations import Declarations, Scheme, is_in_blocks
from quanterr.documents.base import Finding
from quanterr.findings.checks import DECLARED, QUANTIZED, check
from quanterr.findings.codes import make_finding
from quanterr.findings.contents import Contents, Stored
from quanterr.selection.roles import role_of, without_numbers
from quanterr.util.text import count, display, listed

REMEDY = "correct the configuration: loaders that follow it fail, or read wrong values"
LINEAR = frozenset({"attention", "mlp"})  # roles of weights that are surely of linear layers
NOT_LINEAR = frozenset({"embedding", "norm", "convolution"})
# Weights that quantizers skip without declaring it: routers, T5's embedding of relative positions.
LEFT = re.compile(r".*(attention_bias|\.gate|router|_gate|Dense\w+\.wo)\.weight")
HEAD, OF_BLOCKS = "lm_head.", ("GPTQ", "AWQ")  # programs whose loaders leave the output layer as it is unless told


@check("config_mismatch", needs=DECLARED, of=QUANTIZED)
def check_declared(contents: Contents) -> Iterator[Finding]:
    """Check which modules are quantized against a configuration."""
    declared = contents.labels.declarations
    if contents.checkpoint.kind == RECIPE:  # its notes name what it leaves unquantized
        return
    if declared.program is None or declared.program.name == "ModelSlim":  # ``ascend`` checks its description
        return
    schemes = [(stored, declared.of(stored.weight.name)) for stored in contents.stored]
    coded = [(one, scheme) for one, scheme in schemes if one.weight.has_codes]
    yield from _check_excluded(declared, coded)
    yield from _check_unnamed(declared, coded)
    if coded:
        yield from _check_left(declared, schemes)
    yield from _check_rivals(declared, [one for one, scheme in coded if scheme and not scheme.entry])
    left_over = [one for one, scheme in schemes if scheme is None and _is_linear(declared, one)]
    yield from _check_entries(declared, contents.checkpoint.entries, are_missed=bool(left_over))


def report_mismatch(message: str, names: Iterable[str] = (), severity: str = "warning", **evidence: object) -> Finding:
    """Return the finding that stored weights contradict a declaration."""
    found = {"layers": list(names)} | evidence
    return make_finding("config_mismatch", severity, None, message, REMEDY, **{k: v for k, v in found.items() if v})


def _check_excluded(declared: Declarations, coded: Sequence[tuple[Stored, Scheme | None]]) -> Iterator[Finding]:
    """Report modules that have codes although a key leaves them unquantized."""
    found: dict[str, list[tuple[Stored, Scheme]]] = {}
    for one, scheme in coded:
        if scheme and not scheme.is_quantized:
            found.setdefault(scheme.key, []).append((one, scheme))
    for key, own in found.items():
        names = [one.name for one, _ in own]
        entries = listed(list(dict.fromkeys(scheme.entry for _, scheme in own if scheme.entry)), 3)
        message = (
            f"{declared.place} excludes {count(len(names), 'layer')} from quantization ({key}"
            f"{': ' + entries if entries else ''}), but codes are stored: {listed(names, 3)}"
        )
        yield report_mismatch(message, names, key=key)


def _check_unnamed(declared: Declarations, coded: Sequence[tuple[Stored, Scheme | None]]) -> Iterator[Finding]:
    """Report quantized linear layers that no entry names, if entries choose the modules to quantize.

    Reference: vllm-project/vllm model_executor/layers/quantization/compressed_tensors/utils.py find_matched_target,
    gptq.py get_linear_quant_method: loaders refuse such layers, or take their codes for weights.
    """
    unnamed = [one.name for one, scheme in coded if scheme is None and len(one.weight.shape) == 2]
    names = [name for name in unnamed if role_of(name) in LINEAR]
    if names and (targets := declared.targets):
        yield report_mismatch(
            f"{declared.place} declares targets {listed(targets, 3)} and no others, but codes are stored for "
            f"{count(len(names), 'weight')}: {listed(names, 3)}",
            names,
        )
    head = [one.name for one, scheme in coded if one.weight.name.startswith(HEAD) and scheme and not scheme.entry]
    if head and declared.program and declared.program.name in OF_BLOCKS and declared.config.get("lm_head") is not True:
        yield report_mismatch(
            f"{declared.place} does not declare lm_head true, but codes are stored for {listed(head)}: vLLM builds an "
            "unquantized output layer, and does not find its weight",
            head,
            key="lm_head",
        )


def _check_left(declared: Declarations, schemes: Sequence[tuple[Stored, Scheme | None]]) -> Iterator[Finding]:
    """Report linear layers that are stored unquantized although the configuration quantizes them."""
    left = _find_left(declared, schemes)
    if not left:
        return
    program = declared.program.name if declared.program else ""
    method = declared.config.get("quant_method") or declared.config.get("quant_algo") or program
    message = (
        f"the configuration declares {display(str(method))} and does not exclude {listed(left, 3)}, "
        f"which {'is' if len(left) == 1 else 'are'} stored unquantized"
    )
    yield report_mismatch(message, left)


def list_left(contents: Contents) -> list[str]:
    """Return the names of linear layers that are stored unquantized although the configuration quantizes them."""
    declared = contents.labels.declarations
    if declared.program is None or declared.program.name == "ModelSlim":
        return []
    schemes = [(stored, declared.of(stored.weight.name)) for stored in contents.stored]
    return _find_left(declared, schemes) if any(one.weight.has_codes for one, _ in schemes) else []


def _find_left(declared: Declarations, schemes: Sequence[tuple[Stored, Scheme | None]]) -> list[str]:
    """Return layers that are stored unquantized against the configuration.

    Where the program lists what it leaves out, each of them counts. Elsewhere the layers of one kind must be quantized
    in other blocks, or few may be left.
    """
    linear = [(one, scheme) for one, scheme in schemes if _is_linear(declared, one)]
    planned = [(one.name, scheme) for one, scheme in linear if one.is_left and scheme and scheme.is_quantized]
    left = [name for name, scheme in planned if scheme.entry or not declared.follows_tensors]
    few = 0 < 4 * len(left) < len(linear)
    is_certain = declared.lists_exclusions or any(scheme.entry for _, scheme in planned)
    return left if is_certain or few or _are_quantized_elsewhere(left, linear) else []


def _is_linear(declared: Declarations, one: Stored) -> bool:
    """Return whether a weight is the matrix of a layer that the program would quantize."""
    role = role_of(one.name)
    if (
        len(one.weight.shape) != 2
        or LEFT.fullmatch(one.name)
        or role in NOT_LINEAR
        or role_of(one.weight.name) in NOT_LINEAR
    ):
        return False
    if declared.program and declared.program.is_for_blocks:
        return role in LINEAR and is_in_blocks(one.weight.name)
    if not declared.lists_exclusions:
        return role in LINEAR
    return role != "head" or not (declared.program and declared.program.leaves_head)


def _are_quantized_elsewhere(left: Sequence[str], linear: Sequence[tuple[Stored, Scheme | None]]) -> bool:
    """Return True if some of these modules are quantized in other blocks."""
    coded = {without_numbers(one.name) for one, _ in linear if one.weight.has_codes}
    return any(without_numbers(name) in coded for name in left)


def _check_rivals(declared: Declarations, coded: Sequence[Stored]) -> Iterator[Finding]:
    """Report groups that claim the same modules: loaders take the first, whatever is stored."""
    claimed: dict[tuple[str, ...], list[str]] = {}
    for one in coded:
        if len(rivals := declared.find_rivals(one.weight.name)) > 1:
            claimed.setdefault(tuple(rivals), []).append(one.name)
    for keys, names in claimed.items():
        yield report_mismatch(
            f"{declared.place}: {' and '.join(keys)} all claim {count(len(names), 'layer')} with their targets, and "
            f"loaders take the first: {listed(names, 3)}",
            names,
        )


def _check_entries(declared: Declarations, names: Iterable[str], are_missed: bool) -> Iterator[Finding]:
    """Report entries that name no module, expressions that cannot be matched, and keys that are not understood.

    ``are_missed``: no entry names some linear layers, for which one of the idle entries may have been meant.
    """
    if idle := declared.find_idle(names):
        keys = [key for key, _, _ in idle]
        entries = [entry for _, own, _ in idle for entry in own]
        message = f"{declared.place}: {listed(keys, 3)} names modules that are not stored: {listed(entries, 3)}"
        is_loud = are_missed and any(are_all for _, _, are_all in idle)
        yield report_mismatch(message, severity="warning" if is_loud else "info", key=keys[0])
    for key, entry in declared.refused:
        message = f"{declared.place}: an expression in {key} is not understood, and taken to match nothing: "
        yield report_mismatch(message + display(entry, 80), severity="info", key=key)
    if unknown := declared.unknown:
        message = f"{declared.place}: keys that seem to name modules are not understood: {listed(unknown, 3)}"
        yield report_mismatch(message, severity="info", key=unknown[0])
