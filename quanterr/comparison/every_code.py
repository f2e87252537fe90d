"""Finds out how each quantized tensor follows from the original, and hashes all files, for ``--every-code``."""

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from hashlib import sha256
from pathlib import Path

from msgspec.structs import replace

from quanterr.checkpoints import MAX_NAMES, Checkpoint, CheckpointFile
from quanterr.checkpoints.checksums import compute_sha256
from quanterr.comparison.inputs import Inputs
from quanterr.comparison.scheduler import Progress
from quanterr.documents.base import Finding
from quanterr.documents.comparison.model import ComparedFile, Report, Side
from quanterr.documents.comparison.origin import TensorOrigin
from quanterr.documents.gate_results import Reason, list_reasons, store_reasons
from quanterr.errors import Interrupted
from quanterr.findings.excess import CODES_BY_REGION
from quanterr.kernel.library import Kernel
from quanterr.origin.classes import classify
from quanterr.origin.exact import requantize
from quanterr.origin.tracing import trace_pairs
from quanterr.pairing.importance import make_importance_lookup
from quanterr.pairing.model import Pairing
from quanterr.util.pool import map_in_threads
from quanterr.util.small_file import read_small
from quanterr.util.text import count

HASHING_THREADS = 2
EXCESS = ("excess_error", *CODES_BY_REGION.values())  # findings about codes of sampled rows


def add_origin(
    reports: Sequence[Report],
    inputs: Inputs,
    pairings: Sequence[Pairing],
    equal: Sequence[Collection[int]],
    kernel: Kernel | None,
    stop: threading.Event,
    progress: Progress,
    on_progress: Callable[[Progress], None],
) -> list[Report]:
    """Return the reports with ``origin`` and the checksums of files; marked incomplete if the run is stopped.

    ``equal`` holds, for each candidate, the numbers of the pairs whose values are equal on both sides. ``on_progress``
    is called with ``progress`` ten times per second, as by the scheduler.
    """
    original, origins = inputs.original, []
    sizes = [[pair.original.nbytes + pair.quantized.nbytes for pair in pairing.pairs] for pairing in pairings]
    progress.total_bytes += sum(map(sum, sizes))
    with hash_files([original, *inputs.candidates]) as hashed:
        for n, (report, candidate, pairing) in enumerate(zip(reports, inputs.candidates, pairings, strict=True)):
            requantized = requantize(original, pairing.pairs, make_importance_lookup(original, inputs.means))
            traces = []
            try:
                show = partial(on_progress, progress)
                with trace_pairs(pairing.pairs, equal[n], requantized, kernel, stop, show) as pair_traces:
                    for trace, size in zip(pair_traces, sizes[n], strict=True):
                        traces.append(trace)
                        progress.done_bytes += size
            except Interrupted:
                return [_mark_interrupted(report) for report in reports]
            origins.append(classify(pairing, traces, candidate, report.findings, report.not_compared))
        sums = dict(hashed)
    for checkpoint in (original, *inputs.candidates):
        checkpoint.check_unchanged()
    return [
        replace(
            report,
            origin=origin,
            findings=_complete_findings(report.findings, origin),
            original=_add_checksums(report.original, original, sums),
            quantized=_add_checksums(report.quantized, candidate, sums),
        )
        for report, origin, candidate in zip(reports, origins, inputs.candidates, strict=True)
    ]


def _complete_findings(findings: Sequence[Finding], origin: Sequence[TensorOrigin]) -> list[Finding]:
    """Return the findings; those about codes of sampled rows that are not the nearest say so of all codes, too."""
    off = {tensor.layer_name: tensor for tensor in origin if tensor.off_codes}
    return [
        _complete_finding(finding, off[finding.layer]) if finding.code in EXCESS and finding.layer in off else finding
        for finding in findings
    ]


def _complete_finding(finding: Finding, tensor: TensorOrigin) -> Finding:
    amount = f"{tensor.off_codes:,} in {count(tensor.off_rows, 'row')}"
    row, col = tensor.places[0]
    more = f"of all codes, {amount} differ from the nearest, first in row {row:,}, column {col:,}"
    evidence = {"off_codes": tensor.off_codes, "off_rows": tensor.off_rows, "places": [*map(list, tensor.places)]}
    return replace(finding, message=f"{finding.message}; {more}", evidence={**finding.evidence, **evidence})


def _mark_interrupted(report: Report) -> Report:
    before = list_reasons(report) if report.verdict == "inconclusive" else []
    why = Reason("interrupted: not every code was looked at", "result")
    return replace(report, complete=False, verdict="inconclusive", **store_reasons([why, *before]))


@contextmanager
def hash_files(checkpoints: Sequence[Checkpoint]) -> Iterator[Iterator[tuple[CheckpointFile, str]]]:
    """Compute the SHA-256 of all files in threads while other work goes on; yield each file with its checksum."""
    files = list(dict.fromkeys(file for checkpoint in checkpoints for file in checkpoint.files))
    with map_in_threads(lambda file, _: compute_sha256(file), files, [None] * HASHING_THREADS) as sums:
        yield zip(files, sums, strict=True)


def _add_checksums(side: Side, checkpoint: Checkpoint, sums: Mapping[CheckpointFile, str]) -> Side:
    files = [replace(file, sha256=sums[read]) for file, read in zip(side.files, checkpoint.files, strict=True)]
    return replace(side, files=files, configs=hash_configs(checkpoint))


def hash_configs(checkpoint: Checkpoint) -> list[ComparedFile]:
    """Return the configurations of a checkpoint on a local disk, with their SHA-256."""
    configs, folder = list[ComparedFile](), checkpoint.folder
    if not isinstance(folder, Path):
        return configs
    for name in sorted(checkpoint.config):
        with suppress(OSError, ValueError):
            raw = read_small(folder / name, MAX_NAMES)
            configs.append(ComparedFile(name=name, bytes=len(raw), sha256=sha256(raw).hexdigest()))
    return configs
