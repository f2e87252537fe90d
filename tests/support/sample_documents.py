"""Small documents of every kind, in which every number is made up or follows from synthetic sums: for snapshots."""

import dataclasses

from msgspec.structs import replace
from support.sample_reports import Model, report_of, tiny

from quanterr.differences.making import diff
from quanterr.documents.base import RunInfo, Tool
from quanterr.documents.comparison.model import Selection, StoredFile
from quanterr.documents.diff.candidates.model import CandidateDiff
from quanterr.documents.diff.reports.model import Diff
from quanterr.documents.evaluation.model import (
    BlockError,
    Embeddings,
    Evaluated,
    Evaluation,
    LikelyToken,
    Missing,
    PositionScores,
    Scores,
    Task,
    Tokens,
    WeightError,
    WorstToken,
)
from quanterr.documents.images.model import ImagePair, Images, Mean, NotCompared, WorstPair
from quanterr.documents.inspection.model import Inspection, StoredWeight, Tally
from quanterr.documents.kinds import KINDS
from quanterr.documents.plan.model import Plan, PlannedLayer, Point, Uniform
from quanterr.documents.ranking.model import Changed, Ranking, Study
from quanterr.findings import make_finding
from quanterr.gates import judge
from quanterr.ranking.making import make_ranking

# Kinds of documents but reports: the function of that name returns a sample, and NAME_diff a sample of its diff.
KINDS_WITH_SAMPLES = [document_kind.name.lower() for document_kind in KINDS.values() if document_kind.name != "Report"]

TOOL = Tool(name="quanterr", version="1.0")
RUN = RunInfo(
    started="2026-01-01T00:00:00+00:00",
    seconds=1.5,
    device="cpu",
    threads=2,
    kernel="torch",
    torch="2.13.0",
    python="3.11",
    read_bytes=1 << 20,
    command=["quanterr"],
)
TEXT = Tokens(
    source="wiki.txt",
    sha256="0" * 64,
    context=512,
    chunks=16,
    scored=4080,
    distinct=1500,
    commonest=0.05,
    unknown=0.0,
    repeated=0,
    tokenizer="1" * 64,
)


def model(path: str, change_db: float = 0.0, **changes: object) -> Model:
    """Return the tiny model with everything compared, so many dB better."""
    tiny_model = tiny()
    weights = [(name, shape, form, level + change_db) for name, shape, form, level in tiny_model.weights]
    return dataclasses.replace(tiny_model, **{"name": path, "weights": weights, "missing": [], "floor": None} | changes)


def ranking() -> Ranking:
    """Return a ranking of two candidates, and one that is not ranked."""
    int8 = model("int8", 2.0, weights=[(n, s, "int8_row", level + 4) for n, s, _, level in model("").weights])
    models = {"fp8": model("fp8"), "int8": int8, "damaged": tiny()}
    ranked = make_ranking(list(models), [report_of(model) for model in models.values()])
    studies = [
        Study(name, [Changed(0.1, 1.25), Changed(1.0, 2.5)], [Changed(-5.0, -0.25), Changed(5.0, None)])
        for name in ("fp8", "int8")
    ]
    candidates = [replace(c, tokens_per_second=1000.0 / n) for n, c in enumerate(ranked.candidates, 1)]
    return replace(ranked, studies=studies, candidates=candidates, tool=TOOL, run=RUN)


def scores(scale: float = 1.0) -> Scores:
    """Return scores with this multiple of a divergence."""
    kld = 0.0125 * scale
    return Scores(
        tokens=4080,
        chunks=16,
        ppl_original=12.5,
        ppl_original_se=0.25,
        ppl=12.5 + kld * 10,
        ppl_se=0.26,
        ppl_ratio=1 + kld * 0.8,
        ln_ppl_ratio=kld * 0.8,
        ln_ppl_ratio_se=0.001,
        ln_ppl_ratio_chunk_se=0.0011,
        kld_mean=kld,
        kld_mean_se=0.0005,
        kld_mean_chunk_se=0.0006,
        kld_median=kld / 2,
        kld_p90=kld * 2,
        kld_p95=kld * 3,
        kld_p99=kld * 6,
        kld_p99_9=kld * 12,
        kld_max=kld * 30,
        top1=1 - kld * 4,
        top1_se=0.004,
        top5_overlap=1 - kld * 3,
        delta_p_mean=-kld / 10,
        delta_p_mean_se=0.0002,
        delta_p_rms=kld * 2,
        delta_p_rms_se=0.001,
        confident_flips=kld / 5,
        acceptance=1 - kld,
        acceptance_se=0.002,
        acceptance_chunk_se=0.003,
    )


def candidate(name: str, scale: float = 1.0) -> Evaluated:
    """Return a candidate of an evaluation, with everything that a candidate can have."""
    weights = [
        WeightError(
            f"model.layers.{n}.{part}.weight",
            f"model.layers.{n}.{part}.weight",
            f"layers.{n}",
            1e-3 * scale / (n + 1),
            share,
            8192,
            2e-3 * scale,
        )
        for n in range(2)
        for part, share in (("self_attn.q_proj", 0.4), ("mlp.up_proj", 0.6))
    ]
    return Evaluated(
        name=name,
        path=f"{name}.safetensors",
        verdict="pass",
        reasons=["evaluated"],
        bytes=1 << 20,
        scores=scores(scale),
        predicted_kld=0.011 * scale,
        embeddings=None,
        tasks=[Task("arc", 40, 0.75, 0.725, 0.725 / 0.75, 0.9, 0.75)],
        not_finite=None,
        blocks=[BlockError(f"layers.{n}", 0.01 * scale * (n + 1), 1 - 1e-4 * scale, 17, 0.05) for n in range(2)],
        weights=weights,
        missing=[Missing("lm_head.weight", "lm_head.weight", "tied: the embedding stands for it")],
        gates=[],
        findings=[make_finding("config_mismatch", "warning", None, "rope_theta is 10000, the original's 500000")],
        positions=[PositionScores(257 + 32 * n, 288 + 32 * n, 0.02 * scale / (n + 1), 512) for n in range(8)],
        worst_tokens=[
            WorstToken(
                chunk=3,
                position=300,
                source="wiki",
                kld=1.5 * scale,
                before="the capital of France is",
                token=LikelyToken(17, " Paris", 0.9, 0.2),
                predicted_original=LikelyToken(17, " Paris", 0.9, None),
                predicted=LikelyToken(23, " the", None, 0.5),
            )
        ],
    )


def evaluation(scale: float = 1.0) -> Evaluation:
    """Return an evaluation of two candidates of a language model, of which one fails a gate."""
    made = Evaluation(
        tool=TOOL,
        verdict="pass",
        reasons=["evaluated"],
        original="original.safetensors",
        original_bytes=1 << 21,
        model="LlamaForCausalLM",
        kind="causal",
        dtype="float32",
        tokens=TEXT,
        candidates=[candidate("fp8", scale), candidate("int4", 6 * scale)],
        run=RUN,
    )
    return judge(made, require=["upper(kld_mean) <= 0.02", "top1 >= 0.9"])


def encoder() -> Evaluation:
    """Return an evaluation of one candidate of a model that embeds texts."""
    without = {"scores": None, "positions": [], "worst_tokens": [], "predicted_kld": None, "tasks": []}
    candidate_q8 = replace(candidate("q8"), **without, embeddings=Embeddings(16, 0.999, 0.99, 0.98, 0.02))
    changed = {"candidates": [candidate_q8], "kind": "encoder", "model": "BertModel", "tokens": replace(TEXT, scored=0)}
    return replace(evaluation(), **changed, verdict="pass", reasons=["evaluated"])


def plan() -> Plan:
    """Return a plan of four layers."""
    layers = [
        PlannedLayer(
            name,
            name,
            recipe,
            form,
            131072,
            n_bytes,
            bits,
            snr,
            cost,
            3.5,
            "0a1b2c3d",
        )
        for name, recipe, form, n_bytes, bits, snr, cost in (
            ("model.layers.0.self_attn.q_proj.weight", "fp8_row", "fp8_row", 132096, 8.0625, 31.5, 0.001),
            ("model.layers.0.mlp.up_proj.weight", "int4_g128", "ct_pack_int4", 67584, 4.125, 20.25, 0.008),
            ("model.layers.1.self_attn.q_proj.weight", "int4_g128", "ct_pack_int4", 67584, 4.125, 20.5, 0.002),
            ("model.layers.1.mlp.down_proj.weight", "original", "dense", 262144, 16.0, None, 0.0),
        )
    ]
    layers[-1].usual_bytes, layers[-1].usual_cost = 67584, 0.034
    return Plan(
        tool=TOOL,
        original="original.safetensors",
        original_bytes=1 << 21,
        architecture="llama",
        selection=Selection(patterns=[]),
        goal="--size 1.5MiB",
        minimizes="cost",
        measure="predicted KLD",
        notes=["the sensitivity was measured on 16 chunks"],
        recipes=["fp8_row", "int4_g128"],
        bytes=1_577_984,
        bits_per_weight=8.078125,
        cost=0.011,
        bound=0.0105,
        snr_db=22.75,
        least_bytes=1_318_912,
        unplanned_bytes=1_048_576,
        layers=layers,
        uniform=[Uniform("int4_g128", 1_318_912, 0.045, True), Uniform("fp8_row", 1_576_960, 0.012, True)],
        curve=[Point(1_318_912, 0.045), Point(1_400_000, 0.02), Point(1_577_984, 0.011), Point(2_097_152, 0.0)],
        knee=Point(1_400_000, 0.02),
        run=RUN,
    )


def report_diff() -> Diff:
    """Return the change to a report with one better block, one worse, and a layer in another format."""
    changed = model("new", 0.0)
    weights = [(n, s, f, level + (1.5 if ".0." in n else -2.0)) for n, s, f, level in changed.weights]
    weights[2] = (*weights[2][:2], "fp8_row", 31.0)
    weights.append(("model.layers.2.mlp.up_proj.weight", (256, 512), "fp8_row", 31.0))
    return diff(report_of(model("old")), report_of(dataclasses.replace(changed, weights=weights)), force=True)


def evaluation_diff() -> CandidateDiff:
    """Return the change to an evaluation with less divergence."""
    return diff(evaluation(), evaluation(0.8))


def ranking_diff() -> CandidateDiff:
    """Return the change to a ranking in which one candidate is larger and another has a better layer."""
    new = ranking()
    layers = [replace(layer, choices=[replace(c) for c in layer.choices]) for layer in new.layers]
    layers[0].choices[0].snr_db += 3.0
    candidates = [replace(c, bytes=c.bytes and c.bytes + 4096 * n) for n, c in enumerate(new.candidates)]
    return diff(ranking(), replace(new, layers=layers, candidates=candidates))


def plan_diff() -> CandidateDiff:
    """Return the change to a plan that gives one layer fewer bytes and has one more layer."""
    new = plan()
    cheap = replace(new.layers[0], recipe="int4_g128", bytes=new.layers[0].bytes // 2, cost=new.layers[0].cost * 4)
    layers = [cheap, *new.layers[1:]]
    return diff(plan(), replace(new, layers=layers, bytes=new.bytes - 100_000, cost=0.03))


def inspection(path: str = "tiny-8bit/model.safetensors", width: int = 8) -> Inspection:
    """Return an inspection of two weights of one block, and a norm, with codes of so many bits."""
    layers = {"self_attn.q_proj": "attention", "mlp.up_proj": "mlp"}
    weights = [
        StoredWeight(
            name=f"model.layers.0.{name}.weight",
            display_name=f"model.layers.0.{name}.weight",
            role=role,
            block="layers.0",
            format=f"int{width}_row",
            dtype="I8",
            shape=[256, 512],
            elements=131072,
            bytes=131072 * width // 8 + 512,
            bits_per_weight=width + 0.03125,
            code_bits=width,
            block_size=[1, 512],
            scales=256,
            comfy_format=None,
            evidence=["codes and a scale for each row"],
            reason=None,
            activations="int8_token",
        )
        for name, role in layers.items()
    ]
    norm = {"format": "dense", "dtype": "BF16", "shape": [512], "elements": 512, "bytes": 1024, "bits_per_weight": 16.0}
    norm |= {
        "name": "model.norm.weight",
        "display_name": "model.norm.weight",
        "role": "norm",
        "block": None,
        "scales": 0,
    }
    norm |= {"code_bits": None, "block_size": None, "activations": None, "evidence": []}
    weights.append(replace(weights[0], **norm))
    quantized, nbytes = sum(weight.bytes for weight in weights[:2]), sum(weight.bytes for weight in weights)
    coded, rest = Tally(2, 262144, quantized, width + 0.03125, 512), Tally(1, 512, 1024, 16.0, 0)
    return Inspection(
        tool=TOOL,
        path=path,
        kind="file",
        files=[StoredFile(name="model.safetensors", bytes=nbytes + 400)],
        tensors=5,
        bytes=nbytes,
        architecture="LlamaForCausalLM",
        quant_method=None,
        total=Tally(3, 262656, nbytes, 8 * nbytes / 262656, 512),
        formats={f"int{width}_row": coded, "dense": rest},
        groups={
            "attention": {f"int{width}_row": Tally(1, 131072, quantized // 2, width + 0.03125, 256)},
            "mlp": {f"int{width}_row": Tally(1, 131072, quantized // 2, width + 0.03125, 256)},
            "norm": {"dense": rest},
        },
        activations={"int8_token": 2},
        findings=[make_finding("unread_weights", "warning", None, "a finding for the snapshot")],
        weights=weights,
        run=RUN,
    )


def inspection_diff() -> CandidateDiff:
    """Return the change from codes of eight bits to four."""
    return diff(inspection(), inspection("tiny-4bit/model.safetensors", 4))


def images(loss: float = 0.01) -> Images:
    """Return two pairs that differ, one that does not, and an image without a counterpart, not judged."""
    ssim = {"cat-1": 1 - 2 * loss, "cat-2": 1 - loss, "sky": 1.0}
    psnr = {"cat-1": 28.0, "cat-2": 32.0, "sky": None}
    pairs = [
        ImagePair(
            name=name,
            display_name=name,
            width=512,
            height=384,
            identical=psnr[name] is None,
            psnr_db=psnr[name],
            ssim=value,
            lpips=None,
            original_sha256="0" * 64,
        )
        for name, value in ssim.items()
    ]
    jpeg = "data:image/jpeg;base64,/9j/4AAQ"
    return Images(
        tool=TOOL,
        verdict="inconclusive",
        reasons=["dog: not compared: no image of this name in fp8"],
        gated=False,
        original="original",
        quantized="fp8",
        psnr_db=Mean(30.0, 2.0, None, None, 2),
        ssim=Mean(1 - loss, loss / 3**0.5, None, None, 3),
        lpips=None,
        lpips_by=None,
        lpips_absent="neither lpips nor torchmetrics is installed",
        gates=[],
        other_files=["prompts.txt"],
        pairs=pairs,
        not_compared=[NotCompared("dog", "dog", "no image of this name in fp8")],
        worst=[WorstPair("cat-1", jpeg, jpeg)],
        run=RUN,
    )


def images_diff() -> CandidateDiff:
    """Return the change to twice the loss."""
    return diff(images(), images(0.02))
