"""Reports of models that nobody has: every number follows from synthetic sums, by the program's own formulas.

python tests/support/sample_reports.py small|mixed|large FILE...     writes one of them in any of the outputs
"""

import io
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import cycle
from math import pi, sqrt
from random import Random
from statistics import NormalDist

import torch
from msgspec.structs import replace
from support.hostile_names import HOSTILE_NAMES

from quanterr.comparison.assembly import LayerGroup, _compute_compared_fraction, _describe_bucket
from quanterr.documents.base import RunInfo, Tool
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
from quanterr.documents.gate_results import Gate, Reason, Violation, store_reasons
from quanterr.findings import make_finding
from quanterr.metrics import Measurement
from quanterr.metrics.histogram import Histogram
from quanterr.metrics.scores import compute_scores
from quanterr.metrics.sums import RowSums, Sums, exact
from quanterr.pairing.model import Bucket
from quanterr.selection.roles import block_of, role_of
from quanterr.util.text import count, display

SIGMA = 0.02  # standard deviation of weights
NORMAL = torch.tensor([NormalDist().inv_cdf(0.5 + (n + 0.5) / 1024) for n in range(512)])

FORMATS = {
    "fp8_row": FormatNote(summary="FP8 codes, one scale per row", usual_snr_db=[31, 33]),
    "fp8_block": FormatNote(summary="FP8 codes, one scale per block", usual_snr_db=[31, 33]),
    "int8_row": FormatNote(summary="INT8 codes, one scale per row", usual_snr_db=[32, 41]),
    "dense": FormatNote(summary="F64, F32, F16 or BF16 numbers", usual_snr_db=None),
}
DTYPES = {"fp8_row": "torch.float8_e4m3fn", "fp8_block": "torch.float8_e4m3fn", "int8_row": "torch.int8"}


@dataclass
class Model:
    """The contents of a synthetic pair of checkpoints."""

    name: str
    weights: list[tuple[str, tuple[int, ...], str, float]]  # name, shape, format, SNR in dB
    lossless: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    changed: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)  # vectors: name, shape
    missing: list[tuple[str, tuple[int, ...], str, str]] = field(default_factory=list)  # name, shape, bucket, reason
    floor: float | None = None  # the lower limit of a gate on each layer's SNR


def small(bad: bool = True) -> Model:
    """Return a language model of 16 blocks in FP8, with one bad layer if ``bad``."""
    random, weights, norms = Random(1), [], []
    shapes = {
        "mlp.down_proj": (2048, 8192),
        "mlp.gate_proj": (8192, 2048),
        "mlp.up_proj": (8192, 2048),
        "self_attn.k_proj": (512, 2048),
        "self_attn.o_proj": (2048, 2048),
        "self_attn.q_proj": (2048, 2048),
        "self_attn.v_proj": (512, 2048),
    }
    for n in range(16):
        for module, shape in shapes.items():
            level = 31.6 + random.gauss(0, 0.15) - (2.5 if "down" in module and n in (0, 15) else 0) - 0.03 * n
            if bad and (n, module) == (11, "mlp.down_proj"):
                level = 4.12
            weights.append((f"model.layers.{n}.{module}.weight", shape, "fp8_row", level))
        norms += [(f"model.layers.{n}.{norm}_layernorm.weight", (2048,)) for norm in ("input", "post_attention")]
    return Model("llama-1b", weights, [("model.embed_tokens.weight", (128256, 2048)), *norms], floor=29 if bad else 25)


def make_mixed() -> Model:
    """Return a diffusion model with two stacks of blocks and two formats; two tensors were not compared."""
    random, weights, lossless, changed = Random(2), [], [], []
    double = {
        f"{stream}_{module}": shape
        for stream in ("img", "txt")
        for module, shape in {
            "attn.proj": (3072, 3072),
            "attn.qkv": (9216, 3072),
            "mlp.0": (12288, 3072),
            "mlp.2": (3072, 12288),
            "mod.lin": (18432, 3072),
        }.items()
    }
    single = {"linear1": (21504, 3072), "linear2": (3072, 15360), "modulation.lin": (9216, 3072)}
    for stack, blocks, modules in (("double_blocks", 19, double), ("single_blocks", 38, single)):
        for n in range(blocks):
            for module, shape in modules.items():
                kept = "mod" in module
                format_name, level = ("int8_row", 38.5) if kept else ("fp8_row", 31.5)
                depth = 3 * abs(n / blocks - 0.45) ** 2
                level += random.gauss(0, 0.25 if not kept else 0.8) - depth - (4 if module == "linear2" else 0)
                weights.append((f"{stack}.{n}.{module}.weight", shape, format_name, level))
                (changed if kept and n % 7 == 0 else lossless).append((f"{stack}.{n}.{module}.bias", shape[:1]))
    reason = "its scale double_blocks.7.txt_mlp.2.weight_scale is missing"
    lost = "double_blocks.7.txt_mlp.2.weight"
    weights = [weight for weight in weights if weight[0] != lost]
    missing = [
        (lost, (3072, 12288), "error", reason),
        ("final_layer.linear.weight", (64, 3072), "only_in_original", "no tensor of that name"),
    ]
    return Model("flux-like", weights, lossless, changed, missing)


def large() -> Model:
    """Return the first quarter of a mixture of experts with more than 47,000 weights."""
    blocks = 16
    random, weights = Random(3), []
    attention = {
        "kv_a_proj_with_mqa": (576, 7168),
        "kv_b_proj": (32768, 512),
        "o_proj": (7168, 16384),
        "q_a_proj": (1536, 7168),
        "q_b_proj": (24576, 1536),
    }

    def mlp(prefix: str, level: float, width: int) -> Iterator[tuple[str, tuple[int, ...], str, float]]:
        for part, shape in (("down", (7168, width)), ("gate", (width, 7168)), ("up", (width, 7168))):
            yield f"{prefix}.{part}_proj.weight", shape, "fp8_block", level + random.gauss(0, 0.2)

    for n in range(blocks):
        base = f"model.layers.{n}"
        if n < 3:
            weights += mlp(f"{base}.mlp", 31.8, 18432)
        else:
            for expert in range(256):
                rare = random.random() < 0.004
                weights += mlp(f"{base}.mlp.experts.{expert}", 31.5 - (random.expovariate(0.2) if rare else 0), 2048)
            weights += mlp(f"{base}.mlp.shared_experts", 31.2, 2048)
        for module, shape in attention.items():
            level = 31.4 + random.gauss(0, 0.2) - (3.5 if module == "kv_b_proj" and n > 12 else 0)
            weights.append((f"{base}.self_attn.{module}.weight", shape, "fp8_block", level))
    norms = [
        (f"model.layers.{n}.{which}.weight", (7168,)) for n in range(blocks) for which in ("input_norm", "post_norm")
    ]
    return Model("moe-700b", weights, [("model.embed_tokens.weight", (129280, 7168)), *norms])


def tiny() -> Model:
    """Return two blocks with everything that an output can show, for snapshots."""
    weights = [
        (f"model.layers.{n}.{module}.weight", (256, 512), format_name, level - n)
        for n in range(2)
        for module, format_name, level in (
            ("mlp.up_proj", "fp8_row", 31.5),
            ("self_attn.q_proj", "fp8_row", 31.2),
            ("self_attn.o_proj", "int8_row", 38.0),
        )
    ]
    missing = [("model.layers.1.mlp.down_proj.weight", (512, 256), "error", "its scale is missing")]
    return Model(
        "tiny",
        weights,
        lossless=[("model.embed_tokens.weight", (1024, 512))],
        changed=[("model.norm.weight", (512,))],
        missing=missing,
        floor=31.0,
    )


MODELS: dict[str, Callable[[], Model]] = {"tiny": tiny, "small": small, "mixed": make_mixed, "large": large}


def sums_of(shape: tuple[int, ...], snr_db: float, random: Random) -> Sums:
    """Return the sums of normal weights and normal errors at that level."""
    n = rows = shape[0]
    for dimension in shape[1:]:
        n *= dimension
    spread = SIGMA * 10 ** (-snr_db / 20)  # standard deviation of errors
    top = spread * (3.5 + 2 * random.random())
    histogram = Histogram.of(spread * NORMAL)
    histogram.counts *= -(-n // len(NORMAL))
    histogram.zeros *= -(-n // len(NORMAL))
    sums = Sums(elements=n, n=n, x_nonzero=n - n // 5000, zeroed=int(n * spread / 10), outliers=0)
    sums.x_sq, sums.e_sq = exact(n * SIGMA**2), exact(n * spread**2)
    sums.xy = sums.x_sq - sums.e_sq // 400
    sums.y_sq = 2 * sums.xy + sums.e_sq - sums.x_sq
    sums.x_abs, sums.e_abs = exact(n * SIGMA * sqrt(2 / pi)), exact(n * spread * sqrt(2 / pi))
    sums.x, sums.y, sums.e = exact(n * 1e-6), exact(n * 1.01e-6), exact(n * 1e-8)
    sums.relative, sums.relative_max = exact(n * 4 * spread / SIGMA), 900 * spread / SIGMA
    sums.relative_outliers, sums.saturated = n // 2, n // 40000
    sums.e_max, sums.e_min, sums.histogram = top, 0.0, histogram
    for _ in range(5):
        energy = n // rows * spread**2 * (2 + random.random())
        sums.rows[random.randrange(rows)] = RowSums(exact(n // rows * SIGMA**2), exact(energy), top, True)
    return sums


def header(name: str, shape: tuple[int, ...], format_name: str) -> dict[str, object]:
    """Return the fields that describe a weight."""
    n = 1
    for dimension in shape:
        n *= dimension
    return {
        "layer_name": name,
        "display_name": display(name),
        "role": role_of(name),
        "block": block_of(name),
        "format": format_name,
        "original_format": "dense",
        "comfy_format": None,
        "original_dtype": "torch.bfloat16",
        "quantized_dtype": DTYPES.get(format_name, "torch.bfloat16"),
        "tensor_shape": shape,
        "tensor_elements": n,
        "original_bytes": 2 * n,
        "quantized_bytes": n + 4 * shape[0] if format_name in DTYPES else 2 * n,
    }


def measured_of(shape: tuple[int, ...], format_name: str, sums: Sums) -> Measurement:
    """Return what is measured of a weight, in BF16 or in 8 bits with a scale for each row."""
    bits = 8 if format_name in DTYPES else 16
    scales = shape[0] if bits == 8 else 0
    uniform = 8 if format_name.startswith("int8") else None
    return Measurement(sums, sums.n * bits + 32 * scales, sums.n * 16, uniform, counts_saturated=bits == 8)


def layer_of(name: str, shape: tuple[int, ...], format_name: str, sums: Sums) -> Layer:
    """Return a layer with everything that follows from its sums."""
    scales = shape[0] if format_name in DTYPES else 0
    values, nonfinite = compute_scores(Layer, measured_of(shape, format_name, sums))
    return Layer(
        **header(name, shape, format_name),
        block_size=(1, shape[-1]) if scales else None,
        scale_factor=2.1e-4 if scales else None,
        scale_min=0.9e-4 if scales else None,
        scale_max=7.7e-4 if scales else None,
        scale_count=scales,
        exact=False,
        finite=True,
        nonfinite_original_elements=0,
        nonfinite_quantized_elements=0,
        worst_element=WorstElement((sums.n % shape[0], 17), 0.1, 0.1 + sums.e_max),
        evidence=(f"codes {format_name}, scale {display(name)}_scale",) if scales else (),
        nonfinite=nonfinite,
        **values,
    )


def report_of(model: Model) -> Report:
    """Return the report of a synthetic model."""
    random, groups = Random(0), {"role": {}, "format": {}, "block": {}}
    layers, whole = [], LayerGroup()
    for name, shape, format_name, level in model.weights:
        sums = sums_of(shape, level, random)
        layer = layer_of(name, shape, format_name, sums)
        measured = measured_of(shape, format_name, sums)
        layers.append(layer)
        whole.add(measured, layer)
        for grouping, key in (("role", layer.role), ("format", layer.format), ("block", layer.block)):
            if key and key not in groups[grouping]:
                groups[grouping][key] = LayerGroup()
            if key:
                groups[grouping][key].add(measured, layer)
    other = [layer_of(name, shape, "dense", sums_of(shape, 55, random)) for name, shape in model.changed]
    lossless = [LosslessLayer(**header(name, shape, "dense"), bits_per_weight=16.0) for name, shape in model.lossless]
    not_compared = [missing(*item) for item in model.missing]
    findings = [*implausible_error(layers), *changes(other)]
    reasons = [
        Reason(f"1 tensor {_describe_bucket(Bucket(item.bucket))}: {item.display_name} ({item.reason})", "result")
        for item in not_compared
    ]
    reasons += [Reason(finding.message, "finding") for finding in findings if finding.severity == "error"]
    buckets = coverage(layers + other, lossless, not_compared)
    gates = [] if model.floor is None else [*gates_of(layers, model.floor)]
    held = all(gate.status == "pass" for gate in gates)
    return Report(
        tool=Tool(name="quanterr", version="0.1.0"),
        verdict="inconclusive" if reasons else "pass" if held else "fail",
        **store_reasons(reasons or [Reason("everything selected was compared; no gates set", "result")]),
        complete=True,
        original=side(f"{model.name}/model.safetensors", buckets.original),
        quantized=side(f"{model.name}-8bit/model.safetensors", buckets.quantized),
        selection=Selection(patterns=[]),
        settings=Settings(outlier_threshold=0.01, metrics_version=1),
        formats={name: FORMATS[name] for name in sorted({layer.format for layer in layers + other})},
        coverage=buckets,
        findings=findings,
        gates=gates,
        aggregate=whole.aggregate(),
        groups={
            grouping: {key: group.aggregate() for key, group in members.items()} for grouping, members in groups.items()
        },
        layers=layers,
        other_changes=other,
        lossless=lossless,
        not_compared=not_compared,
        run=RunInfo(
            started="2026-01-01T12:00:00+00:00",
            seconds=12.5,
            device="cpu",
            threads=8,
            kernel="native (avx2)",
            torch="2.13.0",
            python="3.11.7",
            read_bytes=1 << 33,
            command=["quanterr", "compare", model.name, f"{model.name}-8bit"],
        ),
    )


@cache
def large_page() -> str:
    """Return the page of the large model, which takes a while to make."""
    from quanterr.outputs.page import rendering as page

    file = io.StringIO()
    page.write(report_of(large()), file)
    return file.getvalue()


def missing(name: str, shape: tuple[int, ...], bucket: str, reason: str) -> NotCompared:
    """Return a tensor that was not compared."""
    n = header(name, shape, "")["tensor_elements"]
    fields = {"layer_name": name, "display_name": display(name), "side": "original", "bucket": bucket}
    return NotCompared(**fields, reason=reason, elements=n, bytes=2 * n)


def implausible_error(layers: list[Layer]) -> Iterator[object]:
    """Yield the finding of each broken layer."""
    for layer in layers:
        if layer.snr_db < 9:
            message = (
                f"{layer.display_name}: {layer.snr_db:.1f} dB as {layer.format}; large outliers, beside "
                "which other values become zeros, or a damaged layer"
            )
            remedy = "quantize this layer again; if the error returns, the quantizer writes wrong codes or scales"
            yield make_finding("implausible_error", "error", layer.layer_name, message, remedy, snr_db=layer.snr_db)


def gates_of(layers: list[Layer], floor: float) -> Iterator[Gate]:
    """Yield a gate on each layer, and one on the size of the whole."""
    ordered = sorted(layers, key=lambda layer: layer.snr_db)
    worst = ordered[0]
    below = [Violation(x.layer_name, x.snr_db, x.snr_db - floor, None) for x in ordered if x.snr_db < floor]
    yield Gate(
        id="snr",
        require=f"snr_db >= {floor}",
        layers=[],
        severity="error",
        reason="what the last release reached",
        status="fail" if below else "pass",
        judged=len(layers),
        identical=0,
        skipped=0,
        observed=worst.snr_db,
        limit=float(floor),
        margin=worst.snr_db - floor,
        worst_layer=worst.layer_name,
        message=f"{len(below)} of {len(layers)} layers are below {floor} dB; the worst is {worst.layer_name}",
        violations=below,
    )
    yield Gate("size", "bits <= 8.5", [], "warn", None, "pass", 0, 0, 0, 8.01, 8.5, 0.49, None, "it holds", [])


def changes(other: list[Layer]) -> Iterator[object]:
    """Yield the finding of norms and biases that changed."""
    if other:
        what = count(len(other), "norm, bias or other 1-D tensor", "norms, biases or other 1-D tensors")
        message = f"{what} changed: {other[0].display_name}; see other_changes"
        yield make_finding("other_changes", "info", None, message, tensors=len(other))


def coverage(compared: list[Layer], lossless: list[LosslessLayer], not_compared: list[NotCompared]) -> Coverage:
    """Return the coverage, with every tensor in its bucket."""
    buckets: dict[str, list[int]] = {}
    for bucket, layers in (("compared", compared), ("lossless", lossless)):
        for layer in layers:
            buckets.setdefault(bucket, []).append(layer.tensor_elements)
    for item in not_compared:
        buckets.setdefault(item.bucket, []).append(item.elements)
    sizes = {
        bucket: BucketSize(tensors=len(tensors), elements=sum(tensors), bytes=2 * sum(tensors))
        for bucket, tensors in buckets.items()
    }
    quantized = {bucket: size for bucket, size in sizes.items() if bucket != "only_in_original"}
    return Coverage(
        original=sizes,
        quantized=quantized,
        original_compared_fraction=_compute_compared_fraction(sizes),
        quantized_compared_fraction=_compute_compared_fraction(quantized),
    )


def side(path: str, buckets: dict[str, BucketSize]) -> Side:
    """Return one synthetic checkpoint."""
    n_bytes = sum(size.bytes for size in buckets.values())
    return Side(
        path=path,
        revision=None,
        files=[ComparedFile(name="model.safetensors", bytes=n_bytes)],
        tensors=sum(size.tensors for size in buckets.values()),
        bytes=n_bytes,
        prefix="",
        notes=[],
    )


# Names that want to be more than text: in a page, a terminal, a spreadsheet, a CI log, Markdown.


def hostile() -> Report:
    """Return a report in which every text from a file is hostile."""
    report, texts = report_of(tiny()), cycle(HOSTILE_NAMES)
    for n, layer in enumerate([*report.layers, *report.other_changes, *report.lossless]):
        layer.layer_name = f"{HOSTILE_NAMES[n // 2]}.layers.{n}.{HOSTILE_NAMES[-1 - n // 2]}"
        layer.display_name, layer.role, layer.format, layer.block = (next(texts) for _ in range(4))
    for layer in report.layers:
        layer.evidence = tuple(HOSTILE_NAMES)
    for gate, text in zip(report.gates, HOSTILE_NAMES, strict=False):
        gate.id = gate.require = gate.reason = gate.message = gate.worst_layer = text
        gate.layers = list(HOSTILE_NAMES)
        gate.violations = [Violation(text, None, None, text) for text in HOSTILE_NAMES]
    names = [layer.layer_name for layer in report.layers]
    side_texts = {
        "path": HOSTILE_NAMES[0],
        "prefix": HOSTILE_NAMES[1],
        "revision": HOSTILE_NAMES[2],
        "notes": list(HOSTILE_NAMES),
    }
    side = replace(report.original, **side_texts)
    lost = report.not_compared[0]
    changed = {
        "reasons": list(HOSTILE_NAMES),
        "original": side,
        "quantized": side,
        "selection": Selection(patterns=list(HOSTILE_NAMES)),
        "formats": _by_text(report.formats),
        "findings": [
            make_finding(text, "error", name, text, text)
            for text, name in zip(HOSTILE_NAMES, cycle(names), strict=False)
        ],
        "groups": {grouping: _by_text(group) for grouping, group in report.groups.items()},
        "not_compared": [replace(lost, layer_name=text, reason=text) for text in HOSTILE_NAMES],
        "run": replace(
            report.run,
            command=list(HOSTILE_NAMES),
            device=HOSTILE_NAMES[0],
            started=HOSTILE_NAMES[1],
            torch=HOSTILE_NAMES[2],
        ),
    }
    return replace(report, **changed)


def _by_text(values: dict[str, object]) -> dict[str, object]:
    return dict(zip(HOSTILE_NAMES, cycle(values.values()), strict=False))


def main() -> None:
    """Write one of them."""
    from quanterr.outputs.files import check_targets, write

    report = report_of(MODELS[sys.argv[1]]())
    for target in check_targets(sys.argv[2:], []):
        write(target, lambda file, target=target: target.output.write(report, file))


if __name__ == "__main__":
    main()
