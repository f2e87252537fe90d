"""Assembles the report from the sums of weights: its layers, groups, coverage, findings and verdict."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from math import inf, nan

import msgspec

from quanterr.checkpoints import Checkpoint, Entry
from quanterr.checkpoints.ggml_types import BLOCKS
from quanterr.comparison.other_models import describe_other_model
from quanterr.documents.base import Finding, RunInfo, Tool
from quanterr.documents.comparison.aggregate import Aggregate
from quanterr.documents.comparison.layer import Layer, LosslessLayer, WorstElement
from quanterr.documents.comparison.model import (
    BucketSize,
    ComparedFile,
    Coverage,
    FormatNote,
    NotCompared,
    Report,
    Selection,
    Settings,
    Side,
)
from quanterr.documents.gate_results import Reason, list_errors, store_reasons
from quanterr.findings import FindingCollector
from quanterr.findings.contents import Comparison, Contents
from quanterr.findings.results import MAX_BLOCKS
from quanterr.findings.running import run_checks
from quanterr.formats import CODE_DTYPES, FORMATS, Weight
from quanterr.formats.reading import Reader
from quanterr.formats.usual import estimate_usual_snr
from quanterr.kernel.native_sums import sum_histograms
from quanterr.metrics import PREDICTED, Measurement, finite, original_norm
from quanterr.metrics.groups import GroupMeasurement
from quanterr.metrics.histogram import Histogram
from quanterr.metrics.scores import compute_scores
from quanterr.pairing import SIDES
from quanterr.pairing.model import Bucket, Leftover, Pair, Pairing, WeightResult
from quanterr.selection.roles import block_of, role_of
from quanterr.tensors.casts import Copy
from quanterr.util.strict_json import JsonObject
from quanterr.util.text import count, display, escape_surrogates, itemize, parse_digits
from quanterr.version import __version__

MAX_WAITING_HISTOGRAMS = 64  # histograms that a group collects before it adds them up

TORCH_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F4": "float4_e2m1fn_x2",
}

# Buckets of tensors that were selected but not compared: any of them makes the result inconclusive.
NOT_COMPARED_BUCKETS = (
    Bucket.ERROR,
    Bucket.UNSUPPORTED,
    Bucket.SHAPE_MISMATCH,
    Bucket.ONLY_IN_ORIGINAL,
    Bucket.ONLY_IN_QUANTIZED,
)
ONE_SIDED_BUCKETS = (Bucket.ONLY_IN_ORIGINAL, Bucket.ONLY_IN_QUANTIZED)
SEPARATE_PARTS = {"vae": "!vae", "text_encoder": "!text_encoders"}  # parts of a bundle that often have their own files
BUCKETS_WORST_FIRST = (
    *NOT_COMPARED_BUCKETS,
    Bucket.NOT_REACHED,
    Bucket.NON_FINITE,
    Bucket.COMPARED,
    Bucket.LOSSLESS,
    Bucket.CONSUMED,
    Bucket.FILTERED_OUT,
)
COVERED_BUCKETS = (Bucket.COMPARED, Bucket.LOSSLESS, Bucket.CONSUMED, Bucket.NON_FINITE)

LAYER_SCORES = "mean_absolute_error", "relative_error", "snr_db", "excess_db", *PREDICTED  # summed up by groups
NO_GROUPS: tuple[str | None, str | None, str | None] = None, None, None  # role, format, block


class LayerGroup:
    """A group of layers and its running sums."""

    def __init__(self) -> None:
        """Start without layers."""
        self.measured = GroupMeasurement()
        self._histograms: list[Histogram] = []  # to be added later: adding many at once is faster

    def add(self, measured: Measurement, layer: Layer) -> None:
        """Add one layer."""
        values = {name: nan if name in layer.nonfinite else getattr(layer, name) for name in LAYER_SCORES}
        values["excess_db"] = layer.excess_db  # an infinite one is left out
        self.measured.add(measured, values)
        self._add_histograms([measured.sums.histogram] if measured.sums.histogram else [])

    def merge(self, other: "LayerGroup") -> None:
        """Add the layers of another group."""
        self.measured.merge(other.measured)
        self._add_histograms(other._sum_histograms())

    def _add_histograms(self, histograms: list[Histogram]) -> None:
        self._histograms += histograms
        if len(self._histograms) >= MAX_WAITING_HISTOGRAMS:
            self._sum_histograms()

    def _sum_histograms(self) -> list[Histogram]:
        """Add up the histograms collected so far; return the sum, if there is one."""
        if len(self._histograms) > 1:
            self._histograms = [sum_histograms(self._histograms)]
        return self._histograms

    def aggregate(self) -> Aggregate:
        """Compute the group's values for the report."""
        measured = self.measured
        values, nonfinite = measured.compute_scores(Aggregate, next(iter(self._sum_histograms()), None))
        return Aggregate(
            total_layers=measured.layers,
            total_elements=measured.whole.sums.elements,
            original_bytes=measured.whole.original_bits // 8,
            quantized_bytes=measured.whole.stored_bits // 8,
            nonfinite=nonfinite,
            **values,
        )


class ReportBuilder:
    """A builder that collects finished weights and makes the report at the end."""

    def __init__(
        self, pairing: Pairing, alphas: Mapping[str, float] | None = None, predicts: str = PREDICTED[0]
    ) -> None:
        """Prepare the groups of a pairing; ``alphas`` maps weight names to sensitivities of the metric ``predicts``."""
        self._pairing = pairing
        self._alphas, self._predicts = alphas, predicts
        self._all = LayerGroup()
        self._groups: dict[str, dict[str, LayerGroup]] = {"role": {}, "format": {}, "block": {}}
        self._batch, self._batch_keys = LayerGroup(), NO_GROUPS  # consecutive layers of the same groups
        self._compared: list[Layer | LosslessLayer | None] = [None] * len(pairing.pairs)
        self._refused: dict[int, list[Leftover]] = {}
        self._same_numbers: set[str] = set()  # names of 1-D tensors that differ only by the rounding of a conversion
        self._noticed = FindingCollector(pairing)
        self._by_block = len({block_of(pair.name) for pair in pairing.pairs}) <= MAX_BLOCKS

    def add(self, done: WeightResult) -> Layer | None:
        """Add a finished weight; return its layer for the report, or None if it is lossless or refused."""
        pair, sums = self._pairing.pairs[done.number], done.sums
        refusal = pair.original.refusal or pair.quantized.refusal
        if refusal and not sums.exact:
            self._refuse(done.number, pair, refusal)
            return None
        self._noticed.add(done)
        if sums.exact:
            self._compared[done.number] = LosslessLayer(
                **_make_header(pair),
                original_fingerprint=done.fingerprint,
                bits_per_weight=8 * pair.quantized.nbytes / pair.original.n if pair.original.n else None,
                original_norm=finite(original_norm(Measurement(sums))),
            )
            return None
        measured = Measurement(
            sums,
            8 * pair.quantized.nbytes,
            8 * pair.original.nbytes,
            pair.quantized.uniform_bits,
            pair.quantized.scale is not None,
            done.attainable,
            (self._alphas or {}).get(pair.name),
            self._predicts,
        )
        layer = _make_layer(pair, done, measured)
        self._compared[done.number] = layer
        if len(pair.original.shape) < 2:
            if pair.original.computed and done.copy == Copy.SAME:
                self._same_numbers.add(pair.name)
            return layer
        keys = layer.role, layer.format, layer.block if self._by_block else None
        if keys != self._batch_keys:
            self._end_batch()
            self._batch_keys = keys
        self._batch.add(measured, layer)
        return layer

    def _end_batch(self) -> None:
        """Merge the batch into its groups; without batches, each small expert would be added to several groups."""
        if not self._batch.measured.layers:
            return
        self._batch.measured.sort()
        self._all.merge(self._batch)
        for groups, key in zip(self._groups.values(), self._batch_keys, strict=True):
            if key is not None:
                groups.setdefault(key, LayerGroup()).merge(self._batch)
        self._batch = LayerGroup()

    def _refuse(self, number: int, pair: Pair, reason: str) -> None:
        bucket = Bucket.ERROR if pair.quantized.codes.dtype in CODE_DTYPES else Bucket.UNSUPPORTED
        self._refused[number] = [
            Leftover(pair.name, side, bucket, reason, codes) for side, codes in zip(SIDES, pair.codes, strict=True)
        ]

    @property
    def equal(self) -> set[int]:
        """The numbers of the pairs with equal values on both sides."""
        return {number for number, layer in enumerate(self._compared) if isinstance(layer, LosslessLayer)}

    @property
    def _layers(self) -> Iterator[Layer]:
        """The layers of weights that differ, in the order of the pairing."""
        return (layer for layer in self._compared if isinstance(layer, Layer))

    @property
    def _other_changes(self) -> list[Layer]:
        """The norms, biases and other 1-D tensors that differ."""
        return [layer for layer in self._layers if len(layer.tensor_shape) < 2]

    def _find_bucket(self, number: int) -> Bucket:
        """Return the bucket of a pair's entries."""
        if number in self._refused:
            return self._refused[number][0].bucket
        layer = self._compared[number]
        if layer is None:
            return Bucket.NOT_REACHED
        if isinstance(layer, LosslessLayer):
            return Bucket.LOSSLESS
        return Bucket.COMPARED if layer.finite else Bucket.NON_FINITE

    @property
    def _leftovers(self) -> list[Leftover]:
        """Tensors that are not compared: the pairing's leftovers, then refused pairs, both in their order."""
        return [*self._pairing.leftovers, *(left for number in sorted(self._refused) for left in self._refused[number])]

    def check(self, original: Checkpoint, quantized: Checkpoint, complete: bool, reader: Reader) -> list[Finding]:
        """Run all checks on the weights that were added, and return their findings; a few weights are read again."""
        comparison = Comparison(
            self._pairing,
            Contents(original, self._pairing, "original", quantized, reader=reader),
            Contents(quantized, self._pairing, "quantized", original, reader=reader),
            self._alphas,
            self._noticed.findings(complete, reader),
            [layer.layer_name for layer in self._other_changes if layer.layer_name not in self._same_numbers],
            self._by_block,
            self._find_lowest_snr() if complete else 0.0,
        )
        return list(run_checks(comparison))

    def _find_lowest_snr(self) -> float:
        """Return the lowest SNR of all layers that differ, in dB; infinity if no layer differs."""
        return min((-inf if layer.snr_db is None else layer.snr_db for layer in self._layers), default=inf)

    def report(
        self,
        original: Checkpoint,
        quantized: Checkpoint,
        findings: list[Finding],
        patterns: tuple[str, ...],
        settings: Settings,
        complete: bool,
        run: RunInfo,
    ) -> Report:
        """Make the report from all weights that were added and the findings about them; nothing is read."""
        self._end_batch()
        not_compared = [
            _make_not_compared(leftover) for leftover in self._leftovers if leftover.bucket in NOT_COMPARED_BUCKETS
        ]
        reasons = self._list_reasons(complete, not_compared, findings, original, quantized)
        return Report(
            tool=Tool(name="quanterr", version=__version__),
            verdict="inconclusive" if reasons else "pass",
            **store_reasons(reasons or [Reason("everything selected was compared; no gates set", "result")]),
            complete=complete,
            original=_make_side(original, self._pairing.prefixes["original"]),
            quantized=_make_side(quantized, self._pairing.prefixes["quantized"]),
            selection=Selection(patterns=list(patterns)),
            settings=settings,
            formats=_make_format_notes([pair.quantized for pair in self._pairing.pairs]),
            coverage=self._make_coverage(),
            findings=findings,
            gates=[],
            aggregate=self._all.aggregate(),
            groups={
                division: {key: group.aggregate() for key, group in sorted(groups.items(), key=_make_natural_key)}
                for division, groups in self._groups.items()
            },
            layers=[layer for layer in self._layers if len(layer.tensor_shape) > 1],
            other_changes=self._other_changes,
            lossless=[layer for layer in self._compared if isinstance(layer, LosslessLayer)],
            not_compared=not_compared,
            run=run,
        )

    def _make_coverage(self) -> Coverage:
        by_side = {side: {bucket: list[Entry]() for bucket in BUCKETS_WORST_FIRST} for side in SIDES}
        for leftover in self._leftovers:
            by_side[leftover.side][leftover.bucket] += leftover.entries
        for number, pair in enumerate(self._pairing.pairs):
            bucket = self._find_bucket(number)
            for by_bucket, codes, parts in zip(by_side.values(), pair.codes, pair.other_entries, strict=True):
                by_bucket[bucket] += codes if number not in self._refused else ()
                by_bucket[Bucket.CONSUMED] += parts
        sizes = {side: _sum_buckets(entries) for side, entries in by_side.items()}
        return Coverage(
            original=sizes["original"],
            quantized=sizes["quantized"],
            original_compared_fraction=_compute_compared_fraction(sizes["original"]),
            quantized_compared_fraction=_compute_compared_fraction(sizes["quantized"]),
        )

    def _list_reasons(
        self,
        complete: bool,
        not_compared: list[NotCompared],
        findings: list[Finding],
        original: Checkpoint,
        quantized: Checkpoint,
    ) -> list[Reason]:
        """Return the reasons why the result is inconclusive; empty if it is reliable."""
        reasons: list[str] = []
        if not complete:
            done = len(self._refused) + sum(layer is not None for layer in self._compared)
            reasons.append(f"interrupted: {done} of {len(self._pairing.pairs)} weights were compared")
        on_both_sides = [item for item in not_compared if item.bucket not in ONE_SIDED_BUCKETS]  # but refused
        if not self._pairing.pairs and not on_both_sides and original.entries.keys().isdisjoint(quantized.entries):
            matched = f"the original has {_list_names(original)}; the quantized checkpoint {_list_names(quantized)}"
            both = original.entries and quantized.entries
            other = describe_other_model(original, quantized)
            question = ". Do the names differ by a prefix?" if both else ""
            reasons.append(f"{other}: {matched}" if other else f"nothing matches: {matched}{question}")
        for bucket in NOT_COMPARED_BUCKETS:
            names = list(dict.fromkeys(item.layer_name for item in not_compared if item.bucket == bucket))
            if names:
                why = next(item.reason for item in not_compared if item.bucket == bucket)
                shown = f"{count(len(names), 'tensor')} {_describe_bucket(bucket)}: {itemize(names, 3)} ({why})"
                reasons.append(shown + _suggest_exclusion(names) if bucket in ONE_SIDED_BUCKETS else shown)
        known_faults = list_errors(findings)
        if not self._pairing.pairs and not reasons and not known_faults:
            reasons.append("nothing was compared: no selected weight is on both sides")
        return [*(Reason(text, "result") for text in reasons), *known_faults]


def _list_names(checkpoint: Checkpoint) -> str:
    return itemize(list(checkpoint.entries)) if checkpoint.entries else "no tensors"


def _describe_bucket(bucket: Bucket) -> str:
    return {
        Bucket.ERROR: "not comparable",
        Bucket.UNSUPPORTED: "in an unsupported layout",
        Bucket.SHAPE_MISMATCH: "of different shape",
        Bucket.ONLY_IN_ORIGINAL: "only in the original",
        Bucket.ONLY_IN_QUANTIZED: "only in the quantized checkpoint",
    }[bucket]


def _make_header(pair: Pair) -> JsonObject:
    """Return the report fields that every compared weight has."""
    x, y = pair.original, pair.quantized
    return {
        "layer_name": pair.name,
        "display_name": display(pair.name),
        "role": role_of(pair.name),
        "block": block_of(pair.name),
        "format": y.format,
        "original_format": x.format,
        "comfy_format": y.comfy_format,
        "original_dtype": name_torch_dtype(x.codes.dtype),
        "quantized_dtype": name_torch_dtype(y.codes.dtype),
        "tensor_shape": x.shape,
        "tensor_elements": x.n,
        "original_bytes": x.nbytes,
        "quantized_bytes": y.nbytes,
    }


@cache  # many layers refer to one string
def name_torch_dtype(dtype: str) -> str:
    """Return the name that reports use for a stored dtype."""
    if dtype in BLOCKS:
        return f"ggml.{dtype.lower()}"
    return f"torch.{TORCH_NAMES.get(dtype, dtype.lower())}"


def _make_layer(pair: Pair, done: WeightResult, measured: Measurement) -> Layer:
    values, nonfinite = compute_scores(Layer, measured)
    scales, worst = done.scales, done.worst
    any_finite = scales is not None and scales.mean is not None
    return Layer(
        **_make_header(pair),
        original_fingerprint=done.fingerprint,
        block_size=pair.quantized.block_size,
        scale_factor=scales.mean if scales else None,
        scale_min=scales.low if scales and any_finite else None,
        scale_max=scales.high if scales and any_finite else None,
        scale_count=scales.number if scales else 0,
        exact=False,
        finite=not done.sums.nonfinite,
        nonfinite_original_elements=done.sums.nonfinite_original,
        nonfinite_quantized_elements=done.sums.nonfinite_quantized,
        worst_element=WorstElement((worst.row, worst.col), worst.x, worst.y) if worst else None,
        evidence=pair.quantized.evidence,
        nonfinite=nonfinite,
        **values,
    )


def _make_not_compared(leftover: Leftover) -> NotCompared:
    return msgspec.convert(
        {
            "layer_name": leftover.name,
            "display_name": display(leftover.name),
            "side": leftover.side,
            "bucket": str(leftover.bucket),
            "reason": leftover.reason,
            "elements": sum(entry.n for entry in leftover.entries),
            "bytes": sum(entry.nbytes for entry in leftover.entries),
        },
        NotCompared,
    )


def _suggest_exclusion(names: Iterable[str]) -> str:
    """Return a hint on how to exclude these tensors if all belong to parts that are often separate; else empty."""
    roles = {role_of(name) for name in names}
    if not roles or not roles <= SEPARATE_PARTS.keys():
        return ""
    return ". To leave them out: " + " ".join(f"-l '{SEPARATE_PARTS[role]}'" for role in sorted(roles, reverse=True))


def _sum_buckets(by_bucket: Mapping[Bucket, Iterable[Entry]]) -> dict[str, BucketSize]:
    """Sum up tensors, elements and bytes per bucket; a tensor in several buckets counts only in the worst."""
    sizes, counted = {}, set[str]()
    for bucket, entries in by_bucket.items():
        if uncounted := {entry.name: entry for entry in entries if entry.name not in counted}:
            counted.update(uncounted)
            elements = sum([entry.n for entry in uncounted.values()])
            n_bytes = sum([entry.nbytes for entry in uncounted.values()])
            sizes[bucket] = BucketSize(tensors=len(uncounted), elements=elements, bytes=n_bytes)
    return {str(bucket): sizes[bucket] for bucket in Bucket if bucket in sizes}


def _compute_compared_fraction(sizes: dict[str, BucketSize]) -> float | None:
    """Return compared bytes / selected bytes; None if nothing was selected."""
    selected = sum(size.bytes for bucket, size in sizes.items() if bucket != Bucket.FILTERED_OUT)
    return sum(sizes[b].bytes for b in COVERED_BUCKETS if b in sizes) / selected if selected else None


def _make_side(checkpoint: Checkpoint, prefix: str) -> Side:
    return Side(
        path=escape_surrogates(checkpoint.path),
        revision=checkpoint.revision,
        files=[ComparedFile(name=escape_surrogates(file.path.name), bytes=file.size) for file in checkpoint.files],
        tensors=len(checkpoint.entries),
        bytes=checkpoint.nbytes,
        prefix=prefix,
        notes=list(checkpoint.notes),
    )


def _make_format_notes(weights: Sequence[Weight]) -> dict[str, FormatNote]:
    stored: dict[str, list[Weight]] = {}
    for weight in weights:
        stored.setdefault(weight.format, []).append(weight)
    notes = {}
    for row in FORMATS:
        if row.name in stored:
            usual = estimate_usual_snr(row, stored[row.name])
            notes[row.name] = FormatNote(summary=row.summary, usual_snr_db=list(usual) if usual else None)
    return notes


def _make_natural_key(item: tuple[str, LayerGroup]) -> list[tuple[int, str]]:
    """Return a sort key that puts layers.2 before layers.10."""
    numbers = [(parse_digits(part), part) for part in item[0].split(".")]
    return [(-1, part) if number is None else (number, "") for number, part in numbers]
