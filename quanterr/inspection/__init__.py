"""Inspection of one checkpoint: formats, sizes, bits per weight, problems.

Reads headers and labels only, unless values are asked for.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from math import prod
from typing import NamedTuple

from quanterr.checkpoints import Checkpoint, Entry, enter_checkpoint
from quanterr.checkpoints.checksums import find_stated_sha256
from quanterr.documents.base import Finding, RunInfo, Tool
from quanterr.documents.comparison.model import StoredFile
from quanterr.documents.inspection.model import NOT_READ, DecodeBound, Inspection, StoredWeight, Tally
from quanterr.errors import FormatMismatch
from quanterr.findings import make_finding
from quanterr.findings.activations import report_absent_scales
from quanterr.findings.adapters import check_adapter
from quanterr.findings.completeness import check_completeness, report_lone_parts
from quanterr.findings.declared import Stored
from quanterr.findings.files import report_notes, report_unread
from quanterr.findings.headers import report_layouts
from quanterr.findings.structure import check_structure
from quanterr.formats import CODE_DTYPES, Weight, find_rows, is_auxiliary
from quanterr.inspection.values import check_values
from quanterr.inspection.verification import verify as verify_files
from quanterr.pairing.inputs import (
    Inputs,
    find_declared_cache,
    inputs_of,
)
from quanterr.pairing.side import CheckpointSide
from quanterr.selection.roles import block_of, role_of
from quanterr.tensors.clock import Clock
from quanterr.tensors.in_memory import Side, hold
from quanterr.util.hardware import bandwidth_of
from quanterr.util.platform import usable_cores
from quanterr.util.strict_json import as_object
from quanterr.util.text import count, display, escape_surrogates, listed
from quanterr.version import __version__

UNKNOWN = "unknown"  # an activation scheme that recipes/inputs.py does not emulate
UNREAD = "unread"  # weights that no format recognizes
PLAIN = ("dense", "verbatim")
USED = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts")  # keys in config.json
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


def inspect(
    checkpoint: Side,
    lenient: bool = False,
    hardware: str | None = None,
    command: Iterable[str] = (),
    values: bool = False,
    verify: bool = False,
) -> Inspection:
    """Inspect a checkpoint: a file, a folder, an index, a cached ``org/name``, an open checkpoint, or one in memory.

    ``lenient`` is passed to :func:`quanterr.open_checkpoint`. ``hardware``, a machine such as ``"H100"`` or a bandwidth
    in GB/s, adds an upper bound on tokens per second, as far as memory bandwidth limits it. ``command`` is the command
    line, which ``run`` records. With ``values``, every weight is read once and checked: NaN and infinity, zeros,
    constants, repetitions, scales, unused codes. With ``verify``, the SHA-256 of each file is compared with the one
    that the Hugging Face hub states.

    Raises:
        CheckpointError: the checkpoint is missing or damaged, or a label in it is damaged.
        UsageError: the hardware is unknown, or there is no checksum to verify.
    """
    machine = None if hardware is None else bandwidth_of(hardware)
    asked = _Asked(machine, command, values, verify)
    with ExitStack() as stack:
        return _inspect(enter_checkpoint(stack, hold(checkpoint), lenient), asked)


class _Asked(NamedTuple):
    """Requests besides headers; see :func:`inspect`."""

    machine: tuple[str, float] | None
    command: Iterable[str]
    values: bool
    verify: bool


def _inspect(checkpoint: Checkpoint, asked: _Asked) -> Inspection:
    clock = Clock()
    verified, mismatches = verify_files(checkpoint) if asked.verify else (0, [])
    side = CheckpointSide("checkpoint", checkpoint)
    side.attach_siblings()
    weights, warnings, readable = [], [], []
    absent: dict[str, str] = {}
    calibrated = False
    for name in side.codes:
        weight, reason = _recognize(side, name)
        if weight is None and is_auxiliary(name):
            continue
        inputs = inputs_of(weight, side.labels, checkpoint.entries) if weight else None
        calibrated = calibrated or (inputs is not None and inputs.scale is not None)
        if inputs is not None and inputs.absent:
            absent[name] = inputs.absent
        weights.append(_make_row(side, name, weight, reason, inputs))
        if weight is not None:
            warnings += [(name, warning) for warning in weight.warnings]
            readable.append((weight, side.siblings.get(name, ())))
    formats: dict[str, list[StoredWeight]] = {}
    groups: dict[str, dict[str, list[StoredWeight]]] = {}
    for stored in weights:
        formats.setdefault(stored.format or UNREAD, []).append(stored)
        groups.setdefault(stored.role, {}).setdefault(stored.format or UNREAD, []).append(stored)
    return Inspection(
        tool=Tool(name="quanterr", version=__version__),
        path=escape_surrogates(checkpoint.path),
        kind=checkpoint.kind,
        files=[StoredFile(name=escape_surrogates(file.path.name), bytes=file.size) for file in checkpoint.files],
        tensors=len(checkpoint.entries),
        bytes=checkpoint.nbytes,
        architecture=_architecture(checkpoint),
        quant_method=side.labels.method,
        total=_tally(weights),
        formats=_tallies(formats),
        groups={role: _tallies(groups[role]) for role in sorted(groups)},
        activations=dict(Counter(weight.activations for weight in weights if weight.activations)),
        kv="fp8" if find_declared_cache(side.labels.config, checkpoint.entries)[0] else None,
        decode=None if asked.machine is None else _bound_decoding(*asked.machine, weights, checkpoint),
        findings=[
            *mismatches,
            *(
                make_finding(NOT_READ, "error", one.name, f"{one.display_name}: not read: {one.reason}")
                for one in weights
                if one.reason
            ),
            *report_layouts(warnings),
            *check_adapter(checkpoint),
            *_find_in_checkpoint(side, weights),
            *check_structure(checkpoint, side.labels, [_describe(*one) for one in readable]),
            *check_completeness(checkpoint),
            *report_lone_parts(side.codes),
            *report_absent_scales(absent, calibrated),
            *(_check_values(checkpoint, readable) if asked.values else ()),
        ],
        weights=weights,
        values=asked.values,
        verified=verified,
        run=_describe_run(clock, checkpoint, asked),
    )


def _describe(weight: Weight, parts: Sequence[Entry]) -> Stored:
    is_guessed = any(row.is_shaped_by_original for row in find_rows(weight.format))
    return Stored(weight.name, weight, parts, has_shape=not is_guessed)


def _describe_run(clock: Clock, checkpoint: Checkpoint, asked: _Asked) -> RunInfo:
    hashed = [file for file in checkpoint.files if asked.verify and find_stated_sha256(file) is not None]
    read = asked.values * checkpoint.nbytes + sum(file.size for file in hashed)
    return clock.describe_run(asked.command, "cpu", usable_cores() if read else 1, read)


def _check_values(checkpoint: Checkpoint, weights: Sequence[tuple[Weight, Sequence[Entry]]]) -> list[Finding]:
    found = list(check_values(weights))
    checkpoint.check_unchanged()
    return found


def _bound_decoding(
    hardware: str, bandwidth: float, weights: list[StoredWeight], checkpoint: Checkpoint
) -> DecodeBound:
    """Return the bound that bandwidth sets on decoding; it leaves out embeddings, except one that is also the head."""
    has_head = any(weight.role == "head" for weight in weights)
    experts = sum(weight.bytes for weight in weights if _is_expert(weight.name))
    share, why = _active_experts(checkpoint) if experts else (1.0, None)
    others = sum(
        weight.bytes
        for weight in weights
        if not _is_expert(weight.name) and (weight.role != "embedding" or (not has_head and len(weight.shape) > 1))
    )
    active = others + round(share * experts)
    return DecodeBound(hardware, bandwidth, active, 1e9 * bandwidth / active if active else 0.0, why)


def _is_expert(name: str) -> bool:
    """Return whether a weight belongs to a routed expert; shared experts always run."""
    return role_of(name) == "experts" and "shared" not in name and "shexp" not in name


def _active_experts(checkpoint: Checkpoint) -> tuple[float, str]:
    """Return the share of the experts that one token uses, and the explanation for the report."""
    config = as_object(checkpoint.config.get("config.json"))
    fields = as_object(config.get("text_config")) or config
    used = next((fields[key] for key in USED if isinstance(fields.get(key), int)), None)
    total = next((fields[key] for key in EXPERTS if isinstance(fields.get(key), int)), None)
    if checkpoint.gguf:
        prefix = checkpoint.gguf.architecture
        used, total = (checkpoint.gguf.get_int(f"{prefix}.{key}") for key in ("expert_used_count", "expert_count"))
    if not used or not total:
        return 1.0, "the number of experts per token is not declared: all are counted"
    return min(used / total, 1.0), f"{used} of {total} experts per token"


def _architecture(checkpoint: Checkpoint) -> str | None:
    if checkpoint.gguf:
        return checkpoint.gguf.architecture
    config = checkpoint.config.get("config.json")
    names = config.get("architectures") if isinstance(config, dict) else None
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None


def _recognize(side: CheckpointSide, name: str) -> tuple[Weight | None, str | None]:
    try:
        weight = side.recognize(name)
    except FormatMismatch as mismatch:
        return None, str(mismatch)
    return weight, None


def _make_row(
    side: CheckpointSide, name: str, weight: Weight | None, reason: str | None, inputs: Inputs | None
) -> StoredWeight:
    codes = side.codes[name]
    entries = [codes, *side.siblings.get(name, ())]
    shape = weight.shape if weight else codes.shape
    n, n_bytes = prod(shape), sum(entry.nbytes for entry in entries)
    return StoredWeight(
        name=name,
        display_name=display(name),
        role=role_of(name),
        block=block_of(name),
        format=weight.format if weight else None,
        dtype=codes.dtype,
        shape=list(shape),
        elements=n,
        bytes=n_bytes,
        bits_per_weight=8 * n_bytes / n if n and weight else None,
        code_bits=weight.code_bits if weight else None,
        block_size=list(weight.block_size) if weight and weight.block_size else None,
        scales=weight.scale.n if weight and weight.scale else 0,
        comfy_format=weight.comfy_format if weight else None,
        evidence=list(weight.evidence) if weight else [],
        reason=reason,
        activations=None if inputs is None else inputs.scheme or UNKNOWN,
    )


def _tally(weights: Iterable[StoredWeight]) -> Tally:
    weights = list(weights)
    n, n_bytes = sum(weight.elements for weight in weights), sum(weight.bytes for weight in weights)
    known = bool(n) and all(weight.format for weight in weights)
    scales = sum(weight.scales for weight in weights)
    return Tally(len(weights), n, n_bytes, 8 * n_bytes / n if known else None, scales)


def _tallies(groups: dict[str, list[StoredWeight]]) -> dict[str, Tally]:
    """Return the tally of each group, the most bytes first."""
    tallies = {name: _tally(weights) for name, weights in groups.items()}
    return dict(sorted(tallies.items(), key=lambda item: -item[1].bytes))


def _find_in_checkpoint(side: CheckpointSide, weights: list[StoredWeight]) -> Iterator[Finding]:
    labels = side.labels
    if labels.orphans:
        message = f"the header labels layers that are not stored: {listed(list(labels.orphans))}"
        yield make_finding("label_without_layer", "warning", None, message)
    casts = [weight.name for weight in weights if weight.format == "fp8_cast"]
    if casts:
        message = f"FP8 without a scale, read as a plain cast: {count(len(casts), 'tensor')}: {listed(casts, 3)}"
        yield make_finding("fp8_without_scale", "info", None, message)
    if labels.method and all(weight.format in PLAIN for weight in weights):
        message = f"the configuration declares {display(labels.method)}, but no weight is stored quantized"
        yield make_finding("config_without_codes", "warning", None, message)
    bare = [w.name for w in weights if w.format == "verbatim" and w.dtype in CODE_DTYPES]
    if bare:
        yield make_finding("codes_without_scale", "warning", None, f"codes without a scale: {listed(bare)}")
    yield from report_notes(side.checkpoint)
    yield from report_unread(side.checkpoint)
