"""Whether a runtime loads a checkpoint: by its names, configuration and headers, without running it."""

from collections.abc import Collection, Iterable, Iterator, Sequence

from quanterr.documents.base import Finding
from quanterr.documents.loading import DIFFERS, LOADS, NOT_KNOWN, REFUSES, Loading, LoadingReason
from quanterr.errors import UsageError
from quanterr.findings.contents import Contents, Stored
from quanterr.findings.runtimes import (
    comfyui,
    diffusers,
    exllamav3,
    llama_cpp,
    mlx,
    ollama,
    sglang,
    tensorrt_llm,
    transformers,
    vllm,
)
from quanterr.findings.runtimes.model import PLAIN, Layout, Runtime, list_unread
from quanterr.util.text import count, display, itemize

RUNTIMES: Sequence[Runtime] = (
    transformers.RUNTIME,
    vllm.RUNTIME,
    sglang.RUNTIME,
    tensorrt_llm.RUNTIME,
    llama_cpp.RUNTIME,
    llama_cpp.IK_RUNTIME,
    ollama.RUNTIME,
    comfyui.RUNTIME,
    diffusers.RUNTIME,
    mlx.RUNTIME,
    exllamav3.RUNTIME,
)
ALL = "all"
WORST_FIRST = (REFUSES, NOT_KNOWN, DIFFERS)
FLOATS = frozenset({"F32", "F16", "BF16"})  # dtypes of unquantized weights
RUN, READ = "run", "read"
CONFIG, SIBLINGS = "config_mismatch", "sibling_scales"
COMPARED = (CONFIG, SIBLINGS, "norm_offset", "wrong_convention")  # findings that need the original
OF_GGML = "gguf_"  # begins the names of formats that are types of ggml


def choose_runtimes(names: Iterable[str]) -> list[Runtime]:
    """Return the runtimes of these names, in the order in which reports list them; ``all`` stands for each.

    A name may be several, with commas between them.

    Raises:
        UsageError: a name is unknown.
    """
    wanted = _split(names)
    known = [runtime.name.lower() for runtime in RUNTIMES]
    for name in wanted:
        if name not in (*known, ALL):
            raise UsageError(f"no rules for the runtime {display(name)}: choose from {', '.join(known)} or {ALL}")
    return [runtime for runtime in RUNTIMES if ALL in wanted or runtime.name.lower() in wanted]


def find_refusals(names: Iterable[str], loading: Iterable[Loading]) -> list[str]:
    """Return a sentence about each runtime of these names that refuses the checkpoint, or may not load it as stored.

    Among them, ``all`` asks for a table: then none has to.
    """
    wanted = _split(names)
    if ALL in wanted:
        return []
    return [outcome.refusal for outcome in loading if outcome.refusal is not None and outcome.name in wanted]


def _split(names: Iterable[str]) -> list[str]:
    return [name.strip().lower() for several in names for name in several.split(",")]


def judge(runtime: Runtime, contents: Contents, findings: Sequence[Finding], devices: int = 1) -> Loading:
    """Return whether a runtime loads a checkpoint, about which checks made these findings, on a number of devices."""
    reasons = list(_judge_container(runtime, contents)) or [
        reason for rule in runtime.rules for reason in rule(contents)
    ]
    if not any(reason.effect == REFUSES for reason in reasons):  # else the rest is of no interest
        of_config = list(_judge_config(runtime, contents))
        reasons += [*of_config, *_judge_tensors(runtime, contents), *_judge_findings(runtime, findings)]
        reasons += runtime.split(contents, devices) if runtime.split else ()
        if not of_config:  # which says what becomes of all weights
            named = {name for reason in reasons for name in reason.layers}
            reasons += _judge_weights(runtime, contents, named)
    if reasons:
        return _conclude(runtime, reasons)
    is_run = all(
        any(layout.is_run for layout in _find_layouts(runtime, contents, weight)) for weight in contents.weights
    )
    return Loading(runtime.name, runtime.version, LOADS, RUN if is_run else READ, [])


def add_compared(loading: Iterable[Loading], findings: Iterable[Finding]) -> list[Loading]:
    """Add to verdicts what only a comparison shows: settings that differ from the original's, and unequal scales."""
    runtimes = {runtime.name: runtime for runtime in RUNTIMES}
    compared = [
        finding
        for finding in findings
        if finding.code in COMPARED and (finding.code != CONFIG or "original" in finding.evidence)
    ]
    return [_add(outcome, runtimes[outcome.runtime], compared) for outcome in loading]


def _add(outcome: Loading, runtime: Runtime, findings: Sequence[Finding]) -> Loading:
    more = [] if outcome.verdict == REFUSES else list(_judge_findings(runtime, findings))
    return _conclude(runtime, [*outcome.reasons, *more]) if more else outcome


def _conclude(runtime: Runtime, reasons: Iterable[LoadingReason]) -> Loading:
    """Return the verdict for these reasons, of which there is one at least."""
    ordered = sorted(reasons, key=lambda reason: WORST_FIRST.index(reason.effect))
    return Loading(runtime.name, runtime.version, ordered[0].effect, READ, ordered)


def _judge_container(runtime: Runtime, contents: Contents) -> Iterator[LoadingReason]:
    only = runtime.container
    if only is not None and only.is_gguf != (contents.checkpoint.gguf is not None):
        yield LoadingReason(REFUSES, only.message, only.place, [])


def _judge_config(runtime: Runtime, contents: Contents) -> Iterator[LoadingReason]:
    config = runtime.read_config(contents)
    method = str(config.get("quant_method") or config.get("quant_algo") or "").lower()
    for rule in runtime.configs:
        if config and (not rule.methods or method in rule.methods) and rule.is_broken(config):
            yield LoadingReason(rule.effect, rule.message, rule.place, [])


def _judge_tensors(runtime: Runtime, contents: Contents) -> Iterator[LoadingReason]:
    for rule in runtime.tensors:
        if entries := rule.find(contents):
            names = [entry.name for entry in entries]
            message = f"expects {rule.expects}, and {rule.fails}: {count(len(names), 'tensor')}: {itemize(names, 3)}"
            yield LoadingReason(rule.effect, message, rule.place, names)


def _judge_weights(runtime: Runtime, contents: Contents, named: Collection[str]) -> Iterator[LoadingReason]:
    """Yield a reason for each kind of weights that the runtime does not load, or of which nothing is known.

    Other reasons name the weights in ``named``.
    """
    names_by_reason: dict[tuple[str, str, str], list[str]] = {}
    for stored in contents.weights:
        if stored.name not in named and (reason := _judge_weight(runtime, contents, stored)) is not None:
            names_by_reason.setdefault(reason, []).append(stored.name)
    if unread := [name for name in list_unread(contents) if name not in named]:
        names_by_reason[NOT_KNOWN, "quanterr reads these in no format", ""] = unread
    for (effect, message, place), names in names_by_reason.items():
        shown = f"{message}: {count(len(names), 'weight')}: {itemize(names, 3)}"
        yield LoadingReason(effect, shown, place, names)


def _judge_weight(runtime: Runtime, contents: Contents, stored: Stored) -> tuple[str, str, str] | None:
    """Return what the runtime does with a weight, a message and the place in its code; None if it loads it."""
    if layouts := _find_layouts(runtime, contents, stored):
        return _judge_limits(layouts, contents, stored)
    if runtime.other_types and stored.weight.format.startswith(OF_GGML):
        return REFUSES, f"{runtime.other_types}: {stored.weight.format}", ""
    method = contents.labels.method
    of_method = f" with quant_method {display(method)}" if method and stored.weight.has_codes else ""
    return NOT_KNOWN, f"no rule covers {stored.weight.format}{of_method}", ""


def _find_layouts(runtime: Runtime, contents: Contents, stored: Stored) -> list[Layout]:
    """Return the layouts under which the runtime loads a weight, whatever its bits and groups."""
    is_plain = not stored.weight.has_codes and stored.weight.codes.dtype in FLOATS
    name, method = PLAIN if is_plain else stored.weight.format, (contents.labels.method or "").lower()
    return [row for row in runtime.layouts if name in row.formats and (not row.methods or method in row.methods)]


def _judge_limits(layouts: Sequence[Layout], contents: Contents, stored: Stored) -> tuple[str, str, str] | None:
    scheme = contents.labels.declarations.of(stored.weight.name)
    excesses = [layout.limits.find_excess(stored.weight, scheme) for layout in layouts]
    if not all(excesses):
        return None
    return REFUSES, f"{stored.weight.format} has {excesses[0]}", layouts[0].place


def _judge_findings(runtime: Runtime, findings: Sequence[Finding]) -> Iterator[LoadingReason]:
    """Yield what findings about the files mean to this runtime."""
    for finding in findings:
        is_told = finding.severity != "info" or finding.code == SIBLINGS  # an info if they cost little
        if is_told and (effect := runtime.findings.get(finding.code)):
            yield LoadingReason(effect, finding.message, "", [finding.layer] if finding.layer else [])
