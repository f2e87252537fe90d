"""Contradictions between the modules that a quantization_config names and those that are stored as codes.

In a correct checkpoint, excluded modules have no codes, quantized modules have codes (of the declared scheme, see
``schemes``), and entries name modules that exist. Loaders follow the configuration, not the tensors.
"""

import re
from collections.abc import Iterable, Iterator, Sequence

from quanterr.checkpoints.base import RECIPE
from quanterr.declarations import Declarations, Scheme, is_in_blocks
from quanterr.documents.base import Finding
from quanterr.findings.checks import DECLARED, QUANTIZED, check
from quanterr.findings.codes import make_finding
from quanterr.findings.contents import Contents, Stored
from quanterr.selection.roles import is_routed_expert, role_of, without_numbers
from quanterr.util.text import count, display, itemize

REMEDY = "correct the configuration: loaders that follow it fail, or read wrong values"
LINEAR_ROLES = frozenset({"attention", "mlp"})  # roles that only weights of linear layers have
NONLINEAR_ROLES = frozenset({"embedding", "norm", "convolution"})
# Weights that quantizers skip without declaring it: routers, T5's embedding of relative positions.
UNDECLARED_SKIPS = re.compile(r".*(attention_bias|\.gate|router|_gate|Dense\w+\.wo)\.weight")
HEAD_PREFIX = "lm_head."
HEADLESS_PROGRAMS = ("GPTQ", "AWQ")  # their loaders quantize the output layer only if the configuration says so


@check("config_mismatch", needs=DECLARED, of=QUANTIZED)
def check_declared(contents: Contents) -> Iterator[Finding]:
    """Report modules that are quantized, or not, against the configuration."""
    declared = contents.labels.declarations
    if contents.checkpoint.kind == RECIPE:  # a recipe's notes name what it leaves unquantized
        return
    if declared.program is None or declared.program.name == "ModelSlim":  # ``ascend`` checks its description
        return
    schemes = [(stored, declared.of(stored.weight.name)) for stored in contents.weights]
    coded = [(stored, scheme) for stored, scheme in schemes if stored.weight.has_codes]
    yield from _check_excluded(declared, coded)
    yield from _check_unnamed(declared, coded)
    if coded:
        yield from _check_left(declared, schemes)
    yield from _check_rivals(declared, [stored for stored, scheme in coded if scheme and not scheme.entry])
    left_over = [stored for stored, scheme in schemes if scheme is None and _is_linear(declared, stored)]
    yield from _check_entries(declared, contents.checkpoint.entries, are_missed=bool(left_over))


def report_mismatch(message: str, names: Iterable[str] = (), severity: str = "warning", **evidence: object) -> Finding:
    """Return the finding that stored weights contradict a declaration."""
    fields = {"layers": list(names)} | evidence
    return make_finding("config_mismatch", severity, None, message, REMEDY, **{k: v for k, v in fields.items() if v})


def _check_excluded(declared: Declarations, coded: Sequence[tuple[Stored, Scheme | None]]) -> Iterator[Finding]:
    """Report modules that have codes although a key leaves them unquantized."""
    by_key: dict[str, list[tuple[Stored, Scheme]]] = {}
    for stored, scheme in coded:
        if scheme and not scheme.is_quantized:
            by_key.setdefault(scheme.key, []).append((stored, scheme))
    for key, excluded in by_key.items():
        names = [stored.name for stored, _ in excluded]
        entries = itemize(list(dict.fromkeys(scheme.entry for _, scheme in excluded if scheme.entry)), 3)
        message = (
            f"{declared.place} excludes {count(len(names), 'layer')} from quantization ({key}"
            f"{': ' + entries if entries else ''}), but codes are stored: {itemize(names, 3)}"
        )
        yield report_mismatch(message, names, key=key)


def _check_unnamed(declared: Declarations, coded: Sequence[tuple[Stored, Scheme | None]]) -> Iterator[Finding]:
    """Report quantized linear layers that no entry names, if entries choose the modules to quantize.

    Reference: vllm-project/vllm model_executor/layers/quantization/compressed_tensors/utils.py find_matched_target,
    gptq.py get_linear_quant_method: loaders refuse such layers, or take their codes for weights.
    """
    unnamed = [stored.name for stored, scheme in coded if scheme is None and len(stored.weight.shape) == 2]
    names = [name for name in unnamed if role_of(name) in LINEAR_ROLES]
    if names and (targets := declared.targets):
        yield report_mismatch(
            f"{declared.place} declares targets {itemize(targets, 3)} and no others, but codes are stored for "
            f"{count(len(names), 'weight')}: {itemize(names, 3)}",
            names,
        )
    head = [
        stored.name
        for stored, scheme in coded
        if stored.weight.name.startswith(HEAD_PREFIX) and scheme and not scheme.entry
    ]
    if (
        head
        and declared.program
        and declared.program.name in HEADLESS_PROGRAMS
        and declared.config.get("lm_head") is not True
    ):
        yield report_mismatch(
            f"{declared.place} does not declare lm_head true, but codes are stored for {itemize(head)}: vLLM builds an "
            "unquantized output layer, and does not find its weight",
            head,
            key="lm_head",
        )


def _check_left(declared: Declarations, schemes: Sequence[tuple[Stored, Scheme | None]]) -> Iterator[Finding]:
    """Report linear layers that are stored unquantized although the configuration quantizes them."""
    left = _find_left(declared, _leave_out_stacks(declared, schemes))
    if not left:
        return
    program = declared.program.name if declared.program else ""
    method = declared.config.get("quant_method") or declared.config.get("quant_algo") or program
    message = (
        f"the configuration declares {display(str(method))} and does not exclude {itemize(left, 3)}, "
        f"which {'is' if len(left) == 1 else 'are'} stored unquantized"
    )
    yield report_mismatch(message, left)


def list_left(contents: Contents, has_stacks: bool = False) -> list[str]:
    """Return the names of linear layers that are stored unquantized although the configuration quantizes them.

    With ``has_stacks``, the loader keeps the experts of a block in one stack, as transformers 5 does.
    """
    declared = contents.labels.declarations
    if declared.program is None or declared.program.name == "ModelSlim":
        return []
    schemes = [(stored, declared.of(stored.weight.name)) for stored in contents.weights]
    if has_stacks:
        schemes = [*_leave_out_stacks(declared, schemes)]
    return _find_left(declared, schemes) if any(stored.weight.has_codes for stored, _ in schemes) else []


def _leave_out_stacks(
    declared: Declarations, schemes: Sequence[tuple[Stored, Scheme | None]]
) -> Sequence[tuple[Stored, Scheme | None]]:
    """Leave out experts if none is quantized, and the program saw Linear modules alone: not transformers' stacks."""
    apart = [(stored, scheme) for stored, scheme in schemes if not is_routed_expert(stored.name)]
    has_coded = any(stored.weight.has_codes for stored, _ in schemes if is_routed_expert(stored.name))
    return apart if declared.program and declared.program.is_for_linear and not has_coded else schemes


def _find_left(declared: Declarations, schemes: Sequence[tuple[Stored, Scheme | None]]) -> list[str]:
    """Return layers that are stored unquantized against the configuration.

    If the program lists what it leaves out, each such layer counts. Otherwise the same layers must be quantized in
    other blocks, or less than a quarter of linear layers may be unquantized.
    """
    linear = [(stored, scheme) for stored, scheme in schemes if _is_linear(declared, stored)]
    planned = [(stored.name, scheme) for stored, scheme in linear if stored.is_left and scheme and scheme.is_quantized]
    left = [name for name, scheme in planned if scheme.entry or not declared.follows_tensors]
    are_few = 0 < 4 * len(left) < len(linear)
    is_certain = declared.lists_exclusions or any(scheme.entry for _, scheme in planned)
    return left if is_certain or are_few or _are_quantized_elsewhere(left, linear) else []


def _is_linear(declared: Declarations, stored: Stored) -> bool:
    """Return whether a weight is the matrix of a layer that the program would quantize."""
    role = role_of(stored.name)
    if (
        len(stored.weight.shape) != 2
        or UNDECLARED_SKIPS.fullmatch(stored.name)
        or role in NONLINEAR_ROLES
        or role_of(stored.weight.name) in NONLINEAR_ROLES
    ):
        return False
    if declared.program and declared.program.is_for_blocks:
        return role in LINEAR_ROLES and is_in_blocks(stored.weight.name)
    if not declared.lists_exclusions:
        return role in LINEAR_ROLES
    return role != "head" or not (declared.program and declared.program.leaves_head)


def _are_quantized_elsewhere(left: Sequence[str], linear: Sequence[tuple[Stored, Scheme | None]]) -> bool:
    """Return True if at least one of these modules is quantized in another block."""
    coded = {without_numbers(stored.name) for stored, _ in linear if stored.weight.has_codes}
    return any(without_numbers(name) in coded for name in left)


def _check_rivals(declared: Declarations, coded: Sequence[Stored]) -> Iterator[Finding]:
    """Report groups that claim the same modules: loaders take the first, whatever is stored."""
    claimed: dict[tuple[str, ...], list[str]] = {}
    for stored in coded:
        if len(rivals := declared.find_rivals(stored.weight.name)) > 1:
            claimed.setdefault(tuple(rivals), []).append(stored.name)
    for keys, names in claimed.items():
        yield report_mismatch(
            f"{declared.place}: {' and '.join(keys)} all claim {count(len(names), 'layer')} with their targets, and "
            f"loaders take the first: {itemize(names, 3)}",
            names,
        )


def _check_entries(declared: Declarations, names: Iterable[str], are_missed: bool) -> Iterator[Finding]:
    """Report entries that name no module, expressions that cannot be matched, and keys that are not understood.

    ``are_missed`` is True if no entry names some linear layers: one of the idle entries may have been meant for these.
    """
    if idle := declared.find_idle(names):
        keys = [key for key, _, _ in idle]
        entries = [entry for _, idle_entries, _ in idle for entry in idle_entries]
        message = f"{declared.place}: {itemize(keys, 3)} names modules that are not stored: {itemize(entries, 3)}"
        is_loud = are_missed and any(are_all for _, _, are_all in idle)
        yield report_mismatch(message, severity="warning" if is_loud else "info", key=keys[0])
    for key, entry in declared.refusals:
        message = f"{declared.place}: an expression in {key} is not understood, and taken to match nothing: "
        yield report_mismatch(message + display(entry, 80), severity="info", key=key)
    if unknown := declared.unknown:
        message = f"{declared.place}: keys that seem to name modules are not understood: {itemize(unknown, 3)}"
        yield report_mismatch(message, severity="info", key=unknown[0])
