"""Inspection of one checkpoint: formats, sizes, bits per weight, problems.

Reads headers and labels only, unless values are asked for.
"""

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import prod
from typing import Any

from quanterr.checkpoints import Checkpoint, open_checkpoints
from quanterr.checkpoints.checksums import find_stated_sha256
from quanterr.documents.base import Finding, RunInfo, Tool
from quanterr.documents.comparison.model import StoredFile
from quanterr.documents.inspection.model import DecodeBound, Inspection, StoredWeight, Tally
from quanterr.errors import FormatMismatch
from quanterr.findings.checks import DECLARED, VALUES
from quanterr.findings.contents import Contents
from quanterr.findings.running import run_checks_alone
from quanterr.findings.runtimes.judging import choose_runtimes, judge
from quanterr.formats import Weight, is_auxiliary
from quanterr.formats.reading import open_reader
from quanterr.inspection.values import collect_values
from quanterr.inspection.verification import verify as verify_files
from quanterr.options import InspectOptions
from quanterr.options.keywords import accept_fields_of
from quanterr.pairing import SIDES
from quanterr.pairing.inputs import Inputs, find_declared_cache
from quanterr.pairing.model import Bucket, Leftover, Pair, Pairing
from quanterr.pairing.side import CheckpointSide
from quanterr.selection.roles import block_of, is_routed_expert, role_of
from quanterr.tensors.clock import Clock
from quanterr.tensors.in_memory import Side, hold
from quanterr.util.hardware import bandwidth_of
from quanterr.util.platform import usable_cores
from quanterr.util.strict_json import as_object
from quanterr.util.text import display, escape_surrogates
from quanterr.version import __version__

QUANTIZED = SIDES[1]  # the checks treat a single checkpoint as the quantized side of a comparison
UNKNOWN = "unknown"  # an activation scheme that recipes/inputs.py does not emulate
UNREAD = "unread"  # weights that no format recognizes
USED_EXPERTS_KEYS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts")
EXPERT_COUNT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts")


@accept_fields_of(InspectOptions)
def inspect(checkpoint: Side, **options: Any) -> Inspection:
    """Inspect a checkpoint: a file, a folder, an index, a cached ``org/name``, an open checkpoint, or one in memory.

    Raises:
        CheckpointError: the checkpoint is missing or damaged, or a label in it is damaged.
        UsageError: the hardware or a runtime is unknown, or there is no checksum to verify.
    """
    return inspect_checkpoint(hold(checkpoint), InspectOptions(**options))


def inspect_checkpoint(checkpoint: str | os.PathLike[str] | Checkpoint, asked: InspectOptions) -> Inspection:
    """Inspect a checkpoint as :func:`inspect` does, with all options in one object."""
    if asked.hardware is not None:
        bandwidth_of(asked.hardware)  # fail on unknown hardware before the run
    choose_runtimes(asked.runtimes)
    with open_checkpoints([checkpoint], asked.lenient, asked.cache) as [opened]:
        return _inspect(opened, asked)


def _inspect(checkpoint: Checkpoint, asked: InspectOptions) -> Inspection:
    clock = Clock()
    verified, mismatches = verify_files(checkpoint) if asked.verify else (0, [])
    side = CheckpointSide("checkpoint", checkpoint)
    side.attach_siblings()
    recognized = {name: _recognize(side, name) for name in side.codes}
    contents = _gather_contents(side, recognized)
    weights = [
        _make_row(side, name, weight, reason, contents.inputs.get(name))
        for name, (weight, reason) in recognized.items()
        if weight is not None or not is_auxiliary(name)
    ]
    findings = [*mismatches, *_run_checks(contents, asked.values)]
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
        architecture=_find_architecture(checkpoint),
        quant_method=side.labels.method,
        total=_tally(weights),
        formats=_tally_groups(formats),
        groups={role: _tally_groups(groups[role]) for role in sorted(groups)},
        activations=dict(Counter(weight.activations for weight in weights if weight.activations)),
        kv="fp8" if find_declared_cache(side.labels.config, checkpoint.entries)[0] else None,
        decode=None if asked.hardware is None else _bound_decoding(*bandwidth_of(asked.hardware), weights, checkpoint),
        loading=[judge(runtime, contents, findings, asked.devices) for runtime in choose_runtimes(asked.runtimes)],
        findings=findings,
        weights=weights,
        values=asked.values,
        verified=verified,
        run=_describe_run(clock, checkpoint, asked),
    )


def _gather_contents(side: CheckpointSide, recognized: Mapping[str, tuple[Weight | None, str | None]]) -> Contents:
    """Pair each weight of a checkpoint with itself; tensors that are no weights, or are not read, become leftovers."""
    pairs, leftovers = [], []
    for name, (weight, reason) in recognized.items():
        parts = tuple(side.siblings.get(name, ()))
        if is_auxiliary(name):
            entries = tuple(weight.parts.values()) if weight else ()
            leftovers.append(Leftover(name, QUANTIZED, Bucket.CONSUMED, "", entries))
        elif weight is None:
            leftovers.append(Leftover(name, QUANTIZED, Bucket.ERROR, reason or "", (side.codes[name], *parts)))
        else:
            pairs.append(Pair(name, weight, weight, (weight.codes,), (weight.codes,), (), parts))
    return Contents(side.checkpoint, Pairing(pairs, leftovers, labels={QUANTIZED: side.labels}), QUANTIZED)


def _run_checks(contents: Contents, with_values: bool) -> list[Finding]:
    """Run the checks of one checkpoint; with ``with_values``, read all its values first."""
    if not with_values:
        return list(run_checks_alone(contents, DECLARED))
    collected = collect_values(contents.pairing.pairs)
    with open_reader() as reader:
        contents = replace(contents, value_findings=collected.findings, reader=reader)
        findings = list(run_checks_alone(contents, VALUES))
    contents.checkpoint.check_unchanged()
    return findings


def _describe_run(clock: Clock, checkpoint: Checkpoint, asked: InspectOptions) -> RunInfo:
    hashed = [file for file in checkpoint.files if asked.verify and find_stated_sha256(file) is not None]
    read = asked.values * checkpoint.nbytes + sum(file.size for file in hashed)
    return clock.describe_run(asked.command, "cpu", usable_cores() if read else 1, read)


def _bound_decoding(
    hardware: str, bandwidth: float, weights: list[StoredWeight], checkpoint: Checkpoint
) -> DecodeBound:
    """Return the bound that bandwidth sets on decoding; embeddings do not count, unless one is also the head."""
    has_head = any(weight.role == "head" for weight in weights)
    experts = sum(weight.bytes for weight in weights if is_routed_expert(weight.name))
    share, why = _find_active_experts(checkpoint) if experts else (1.0, None)
    others = sum(
        weight.bytes
        for weight in weights
        if not is_routed_expert(weight.name)
        and (weight.role != "embedding" or (not has_head and len(weight.shape) > 1))
    )
    active = others + round(share * experts)
    return DecodeBound(hardware, bandwidth, active, 1e9 * bandwidth / active if active else 0.0, why)


def _find_active_experts(checkpoint: Checkpoint) -> tuple[float, str]:
    """Return the share of the experts that one token uses, and the explanation for the report."""
    config = checkpoint.config.get("config.json", {})
    fields = as_object(config.get("text_config")) or config
    used = next((fields[key] for key in USED_EXPERTS_KEYS if isinstance(fields.get(key), int)), None)
    total = next((fields[key] for key in EXPERT_COUNT_KEYS if isinstance(fields.get(key), int)), None)
    if checkpoint.gguf:
        prefix = checkpoint.gguf.architecture
        used, total = (checkpoint.gguf.get_int(f"{prefix}.{key}") for key in ("expert_used_count", "expert_count"))
    if not used or not total:
        return 1.0, "the number of experts per token is not declared: all are counted"
    return min(used / total, 1.0), f"{used} of {total} experts per token"


def _find_architecture(checkpoint: Checkpoint) -> str | None:
    if checkpoint.gguf:
        return checkpoint.gguf.architecture
    names = checkpoint.config.get("config.json", {}).get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None


def _recognize(side: CheckpointSide, name: str) -> tuple[Weight | None, str | None]:
    """Return a weight, or None and the reason why it is not read."""
    try:
        return side.recognize(name), None
    except FormatMismatch as mismatch:
        return None, str(mismatch)


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


def _tally_groups(groups: dict[str, list[StoredWeight]]) -> dict[str, Tally]:
    """Return the tally of each group, sorted by decreasing bytes."""
    tallies = {name: _tally(weights) for name, weights in groups.items()}
    return dict(sorted(tallies.items(), key=lambda item: -item[1].bytes))
