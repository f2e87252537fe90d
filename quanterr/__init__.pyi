"""Types of the public names, made by tests/make_stub.py."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

from quanterr.checkpoints import Checkpoint as Checkpoint
from quanterr.checkpoints import open_checkpoint as open_checkpoint
from quanterr.comparison.measure import measure as measure
from quanterr.comparison.pairs import TensorPair
from quanterr.dequantization.run import Dequantized as Dequantized
from quanterr.differences.making import diff as diff
from quanterr.documents.comparison.layer import METRICS as METRICS
from quanterr.documents.comparison.model import Report as Report
from quanterr.documents.diff.candidates.model import CandidateDiff as CandidateDiff
from quanterr.documents.diff.reports.model import Diff as Diff
from quanterr.documents.evaluation.model import Evaluation as Evaluation
from quanterr.documents.images.model import Images as Images
from quanterr.documents.inspection.model import Inspection as Inspection
from quanterr.documents.kinds import read_document as read_document
from quanterr.documents.plan.model import Plan as Plan
from quanterr.documents.ranking.model import Ranking as Ranking
from quanterr.documents.reading import read_report as read_report
from quanterr.errors import CheckpointError as CheckpointError
from quanterr.errors import Interrupted as Interrupted
from quanterr.errors import QuanterrError as QuanterrError
from quanterr.errors import ReportError as ReportError
from quanterr.errors import ResourceError as ResourceError
from quanterr.errors import UnjudgedError as UnjudgedError
from quanterr.errors import UsageError as UsageError
from quanterr.formats import FORMATS as FORMATS
from quanterr.gates import judge as judge
from quanterr.metrics import theoretical_sqnr as theoretical_sqnr
from quanterr.options import Array, Path, Result, SameIn
from quanterr.options import CompareOptions as CompareOptions
from quanterr.options import EvaluateOptions as EvaluateOptions
from quanterr.recipes.tensors import calibrate as calibrate
from quanterr.recipes.tensors import error_within_bounds as error_within_bounds
from quanterr.recipes.tensors import fake_quantize as fake_quantize
from quanterr.recipes.tensors import quantize_tensor as quantize_tensor
from quanterr.recipes.tensors import theoretical_max_error as theoretical_max_error
from quanterr.tensors.in_memory import Side
from quanterr.version import __version__ as __version__

__all__ = [
    "FORMATS",
    "METRICS",
    "CandidateDiff",
    "Checkpoint",
    "CheckpointError",
    "CompareOptions",
    "Dequantized",
    "Diff",
    "EvaluateOptions",
    "Evaluation",
    "Images",
    "Inspection",
    "Interrupted",
    "Plan",
    "QuanterrError",
    "Ranking",
    "Report",
    "ReportError",
    "ResourceError",
    "UnjudgedError",
    "UsageError",
    "calibrate",
    "compare",
    "compare_images",
    "dequantize",
    "diff",
    "error_within_bounds",
    "evaluate",
    "fake_quantize",
    "inspect",
    "iterate_pairs",
    "judge",
    "measure",
    "open_checkpoint",
    "plan",
    "quantize_tensor",
    "rank",
    "read_document",
    "read_report",
    "sweep",
    "theoretical_max_error",
    "theoretical_sqnr",
]

def compare(
    original: Side,
    quantized: Side,
    *,
    thresholds: Path | None = None,
    require: Iterable[str] = (),
    fail_if: Iterable[str] = (),
    baseline: Path | Result | None = None,
    layers: Iterable[str] = (),
    exclude: Iterable[str] = (),
    runtimes: Iterable[str] = (),
    devices: int = 1,
    importance: Path | None = None,
    sensitivity: Path | None = None,
    every_code: bool = False,
    device: str = "auto",
    lenient: bool = False,
    cache: Path | None = None,
    baseline_original: Literal["same", "any"] = "same",
    strict_warnings: bool = False,
    outlier_threshold: float = 0.01,
    resume: Path | None = None,
    on_progress: Callable[[Any], None] | None = None,
    on_layer: Callable[[Any], None] | None = None,
    tp: int = 1,
    layers_to_compare: Iterable[str] = (),
) -> Report:
    """Measure how far a quantized checkpoint is from its original, layer by layer.

    Args:
        original: a file, a folder, an index, a cached ``org/name``, an open checkpoint, a state dict or a model in
            memory.
        quantized: the same.

    Rules (``require=["snr_db >= 28"]``) decide the verdict. Tensors that cannot be compared are in
    ``report.not_compared`` and make the verdict ``inconclusive``.

    Keyword Args:
        thresholds (FILE): Rules to apply: a TOML file or a preset (fp8, int8, …).
        require (CONDITION, one or several): A condition that must hold, such as 'snr_db >= 28'.
        fail_if (CONDITION, one or several): A condition that must not hold, such as 'snr_db < 28'; an undefined
            value fails, too.
        baseline (FILE): An older result of the same command, for rank and sweep a report of compare (JSON), for
            delta, rel_delta and ratio. Without a rule that uses it, 'delta(snr_db) >= -0.5' must hold.
        layers (PATTERN, one or several): Layers to compare: attn, mlp, experts, norm, embed, head …; part of a
            name; a glob; re:REGEX; !PATTERN excludes. Separated by commas. layers_to_compare is the same.
        exclude (PATTERN, one or several): Layers to leave out, by the same patterns without !, which shells
            expand.
        runtimes (NAMES, one or several): Say whether programs load it: transformers, vllm, sglang, tensorrt-llm,
            llama.cpp, ik_llama.cpp, ollama, comfyui, diffusers, mlx, exllamav3, or all.
        devices (N, default 1): Number of devices among which vLLM splits the model. tp is the same.
        importance (FILE): An importance matrix of llama.cpp (.gguf or .dat): weights errors by the importance of
            each input.
        sensitivity (FILE): A file written by quanterr evaluate --sensitivity-out: predicts the KLD, or output
            error, that the errors cause.
        every_code: Look at every code: is each tensor the original, rounded, and nothing else? -o X.intoto.json
            writes a statement. See quanterr guide origin.
        device (NAME, default auto): auto, cpu, cuda, cuda:N, or another accelerator that torch has, such as xpu.
        lenient: Accept non-standard files that can be read in one way only, and warn: trailing bytes, a header
            not padded with spaces.
        cache (FOLDER): Cache data read from remote stores (https://, hf://, s3:// …) here for the next run.
            Default: no cache.
        baseline_original (default same): any accepts a baseline of another original, such as another finetune,
            whose layers have the same names and sizes.
        strict_warnings: Treat rules of severity warn as errors, and refuse edited reports.
        outlier_threshold (NUMBER, default 0.01): An element with a larger |e| counts as an outlier.
        resume (FILE): A journal: stores finished weights and reuses those already in it, for runs that may be
            killed.
        on_progress: Called ten times per second with the progress; in a notebook, a bar.
        on_layer: Called from a thread of the run with each layer that differs, as soon as it is compared.

    Raises:
        UsageError: a pattern matches nothing, no layer is left, the device is unknown, or a rule is invalid.
        UnjudgedError: the rules cannot judge the report. The error keeps the report as its ``document``.
        CheckpointError: an input is missing, damaged, or changes while it is read.
        ResourceError: the device is not available, or memory runs out."""
    ...

def compare_images(
    original: str | os.PathLike[str],
    quantized: str | os.PathLike[str],
    *,
    thresholds: Path | None = None,
    require: Iterable[str] = (),
    fail_if: Iterable[str] = (),
    baseline: Path | Result | None = None,
    baseline_original: Literal["same", "any"] = "same",
    strict_warnings: bool = False,
) -> Images:
    """Compare images of the same name (PNG, JPEG, WebP, 8 bits) in two folders, made from the same prompts and seeds.

    PSNR is 10 log10(255² / MSE) over all channels. SSIM is the mean over channels and over the pixels whose window
    lies within the image, with a Gaussian window of 11 x 11 and sigma 1.5, K1 0.01 and K2 0.03 (Wang, Bovik, Sheikh,
    Simoncelli: Image quality assessment, 2004). LPIPS (Zhang et al. 2018, version 0.1, AlexNet) needs lpips or
    torchmetrics, and its weights on this machine: nothing is downloaded.

    Rules are conditions such as ``min(ssim) >= 0.9``; a baseline is a stored result of the same original images.

    Keyword Args:
        thresholds (FILE): Rules to apply: a TOML file.
        require (CONDITION, one or several): A condition that must hold, such as 'min(ssim) >= 0.9'.
        fail_if (CONDITION, one or several): A condition that must not hold, such as 'psnr_db < 25'; an undefined
            value fails, too.
        baseline (FILE): An older result of images (JSON), for delta, rel_delta and ratio. Without a rule that
            uses it, 'delta(ssim) >= -0.01' must hold.
        baseline_original (default same): any accepts a baseline of another original, such as another finetune,
            whose layers have the same names and sizes.
        strict_warnings: Treat rules of severity warn as errors, and refuse edited reports.

    Raises:
        UsageError: Pillow is not installed, a folder holds no image, both are the same folder, or a rule is invalid,
            or the baseline has other images.
        CheckpointError: a folder is missing or cannot be read.
        ReportError: the baseline cannot be read."""
    ...

def dequantize(
    model: str | os.PathLike[str] | Checkpoint,
    output: str | os.PathLike[str],
    *,
    like: Path | None = None,
    dtype: Literal["bf16", "f16", "f32"] | None = None,
    max_shard: str = "5GB",
    verify: bool = False,
    layers: Iterable[str] = (),
    exclude: Iterable[str] = (),
    lenient: bool = False,
    cache: Path | None = None,
    on_progress: Callable[[Any], None] | None = None,
) -> Dequantized:
    """Write a checkpoint back as plain floats, in safetensors.

    ``output`` is a file (``.safetensors``) or a folder, into which shards, an index, and the other files of the model's
    folder are written.

    The output appears when it is complete. Until then, it is in a temporary folder next to it, where a later run with
    the same inputs and options continues.

    Keyword Args:
        like (ORIGINAL): The original: write its names, shapes, orders and dtypes. Needed for GGUF of unknown
            models.
        dtype: Dtype of decoded weights. Default: the original's with like, otherwise bf16.
        max_shard (BYTES, default 5GB): Maximum size of a shard, such as 5GB.
        verify: Read the output back and compare it with a second decoding.
        layers (PATTERN, one or several): Tensors to write, by the patterns of compare. Default: all.
        exclude (PATTERN, one or several): Tensors to leave out.
        lenient: Accept non-standard files that can be read in one way only, and warn: trailing bytes, a header
            not padded with spaces.
        cache (FOLDER): Cache data read from remote stores (https://, hf://, s3:// …) here for the next run.
            Default: no cache.
        on_progress: Called with the progress after each piece.

    Raises:
        UsageError: the output exists or is an input's folder; or a GGUF file of an unknown model is given without
            ``like``.
        CheckpointError: a tensor cannot be written as a float, or has no counterpart in ``like``.
        ResourceError: the disk is full, or what was written is not what was decoded (``verify``).
        Interrupted: the run was stopped."""
    ...

def evaluate(
    original: Side,
    candidates: Side | Iterable[Side] | Mapping[str, Side] = (),
    *,
    against: str | Plan | Iterable[str | Plan] = (),
    reference: Path | None = None,
    text: Iterable[Path] = (),
    chat: Iterable[Path] = (),
    tokens: Path | Array | Iterable[int] | None = None,
    inputs: Path | None = None,
    tasks: Iterable[Path] = (),
    chunks: int | None = None,
    activations: str = "declared",
    kv: Iterable[str] = (),
    sensitivity: Path | None = None,
    save_reference: Path | None = None,
    thresholds: Path | None = None,
    require: Iterable[str] = (),
    fail_if: Iterable[str] = (),
    baseline: Path | Result | None = None,
    draft: Iterable[Path] = (),
    device: str = "auto",
    lenient: bool = False,
    cache: Path | None = None,
    allow_gaussian: bool = False,
    config: Path | None = None,
    lora: Path | None = None,
    rollout: bool = False,
    context: int = 512,
    sensitivity_chunks: int = 4,
    split: bool = False,
    importance_out: Path | None = None,
    saliency_out: Path | None = None,
    saliency: float = 1.0,
    baseline_original: Literal["same", "any"] = "same",
    strict_warnings: bool = False,
    swap: Iterable[str] = (),
    swap_blocks: bool = False,
    dtype: str = "float32",
    batch: int = 2,
    on_progress: Callable[[int, int, int, int], None] | None = None,
    task: Iterable[Path] = (),
    sensitivity_out: Path | None = None,
) -> Evaluation:
    """Measure how well quantized checkpoints still perform, in the original's own model with the weights of each side.

    ``original`` is a folder with config.json, here or in a store, or a GGUF file; ``candidates`` are one or several
    checkpoints, or state dicts or models in memory; in a dict, its keys are their names.
    ``against`` are recipes such as ``"fp8_row"``, plans, or files of plans such as ``"plan.json"``, by which the
    original is quantized on the fly.

    Keyword Args:
        reference (FOLDER): A folder that save_reference wrote, instead of the original: every path is then a
            candidate.
        text ([NAME=]FILE, one or several): A UTF-8 text file, tokenized with the original's tokenizer.json.
            prose=a.txt gives it a name.
        chat ([NAME=]FILE, one or several): Conversations, a JSON line each, through the original's chat template;
            the assistant's tokens are scored.
        tokens (FILE): Token ids instead of a text: a safetensors file with one integer tensor.
        inputs (FILE): Recorded calls of the model instead (denoisers, vision towers): safetensors with tensors
            CALL/ARGUMENT. gaussian:8 makes up eight calls, as a smoke test.
        tasks (FILE, one or several): Multiple-choice questions, one JSON object per line: question, choices,
            answer (an index from 0). task is the same.
        chunks (N): Maximum number of chunks.
        activations (NAME, default declared): Rounding of the inputs of quantized weights: declared (by the
            files), none, or a scheme such as fp8_token, int8_token, nvfp4.
        kv (NAME, one or several): Rounding of keys and values: declared (by the files, the default), none, or a
            type such as q8_0, q4_0, fp8, int8_token, int4, k=q8_0,v=q4_0. Each makes a row.
        sensitivity (FILE): Write each weight's sensitivity (JSON), and predict the divergence, or output error,
            of the candidates. sensitivity_out is the same.
        save_reference (FOLDER): Store what evaluating candidates needs of the original, for reference.
        thresholds (FILE): Rules to apply: a TOML file.
        require (CONDITION, one or several): A condition that must hold, such as 'upper(kld_mean) <= 0.01'.
        fail_if (CONDITION, one or several): A condition that must not hold, such as 'top1 < 0.95'; an undefined
            value fails, too.
        baseline (FILE): An older evaluation (JSON), for delta, rel_delta and ratio. Without a rule that uses it,
            'ratio(kld_mean) <= 1.1' must hold.
        draft (FOLDER, one or several): Another, smaller model with the same vocabulary: the share of its tokens
            that speculative decoding would accept.
        device (NAME, default auto): auto, cpu, cuda, cuda:N, or another accelerator that torch has, such as xpu.
        lenient: Accept non-standard files that can be read in one way only, and warn: trailing bytes, a header
            not padded with spaces.
        cache (FOLDER): Cache data read from remote stores (https://, hf://, s3:// …) here for the next run.
            Default: no cache.
        allow_gaussian: Let gates judge calls that inputs gaussian:N made up; they are inconclusive otherwise.
        config (FOLDER): Folder with the config.json of a denoiser in a single file, or with config.json and
            tokenizer of a GGUF file, if they do not follow from the file.
        lora (FILE): Merge this LoRA into both sides of a denoiser before they are compared (with inputs).
        rollout: With inputs: also let each side follow its own path of flow matching, and compare the final
            latents.
        context (N, default 512): Tokens per chunk; the predictions of its second half are scored.
        sensitivity_chunks (N, default 4): Number of chunks or calls to measure the sensitivity on; their
            activations are kept in memory.
        split: Where inputs, keys or values are rounded, evaluate the weights alone as well.
        importance_out (FILE): Write the second moments of inputs as an importance matrix of llama.cpp (GGUF).
        saliency_out (FILE): Write the columns and elements of each weight with the largest Var(x) · w² (JSON).
        saliency (PERCENT, default 1.0): Percentage of columns and elements that saliency_out writes.
        baseline_original (default same): any accepts a baseline of another original, such as another finetune,
            whose layers have the same names and sizes.
        strict_warnings: Treat rules of severity warn as errors, and refuse edited reports.
        swap (PATTERN, one or several): Also measure the divergence of each of these weights alone in the
            original; patterns as for quanterr compare -l.
        swap_blocks: Also measure the divergence of each block alone in the original; of L blocks, takes L / 4
            times as long.
        dtype (NAME, default float32): Compute dtype of both sides: float32, bfloat16 or float64.
        batch (N, default 2): Number of chunks that run through a block together.
        on_progress: Called with the numbers of units done, of units, of micro-batches done, and of micro-batches.

    Raises:
        UsageError: transformers is missing, the text is missing or too short, or a rule cannot be parsed.
        CheckpointError: an input is missing or damaged, transformers lacks the model, or a weight is missing or has
            another shape.
        ResourceError: there is not enough memory."""
    ...

def inspect(
    checkpoint: Side,
    *,
    runtimes: Iterable[str] = (),
    devices: int = 1,
    hardware: str | None = None,
    values: bool = False,
    verify: bool = False,
    lenient: bool = False,
    cache: Path | None = None,
    tp: int = 1,
    hub_checksums: bool = False,
) -> Inspection:
    """Inspect a checkpoint: a file, a folder, an index, a cached ``org/name``, an open checkpoint, or one in memory.

    Keyword Args:
        runtimes (NAMES, one or several): Say whether programs load it: transformers, vllm, sglang, tensorrt-llm,
            llama.cpp, ik_llama.cpp, ollama, comfyui, diffusers, mlx, exllamav3, or all.
        devices (N, default 1): Number of devices among which vLLM splits the model. tp is the same.
        hardware (NAME|GB/s): Show how many tokens per second this memory bandwidth allows: H100, 4090, M3-max,
            900GB/s.
        values: Read every weight once: NaN and infinity, zeros, repetitions, wrong scales, unused codes.
        verify: Compare the SHA-256 of each file with the one that the Hugging Face hub states: hf://, downloads.
            hub_checksums is the same.
        lenient: Accept non-standard files that can be read in one way only, and warn: trailing bytes, a header
            not padded with spaces.
        cache (FOLDER): Cache data read from remote stores (https://, hf://, s3:// …) here for the next run.
            Default: no cache.

    Raises:
        CheckpointError: the checkpoint is missing or damaged, or a label in it is damaged.
        UsageError: the hardware or a runtime is unknown, or there is no checksum to verify."""
    ...

def iterate_pairs(
    original: Side,
    quantized: Side,
    *,
    layers: Iterable[str] = (),
    exclude: Iterable[str] = (),
    lenient: bool = False,
    cache: Path | None = None,
    layers_to_compare: Iterable[str] = (),
) -> Iterator[TensorPair]:
    """Pair the weights of two checkpoints as ``compare`` does, and return an iterator over their values.

    >>> for name, x, y in quanterr.iterate_pairs("original", "fp8"):  # doctest: +SKIP
    ...     print(name, torch.nn.functional.cosine_similarity(x.flatten(), y.flatten(), dim=0))

    Changes that a converter or quantizer made to names, orders and numbers are undone. Tensors that cannot be
    compared, or only for equality, are left out, and their number is logged: ``compare`` lists them.

    Keyword Args:
        layers (PATTERN, one or several): Layers to compare: attn, mlp, experts, norm, embed, head …; part of a
            name; a glob; re:REGEX; !PATTERN excludes. Separated by commas. layers_to_compare is the same.
        exclude (PATTERN, one or several): Layers to leave out, by the same patterns without !, which shells
            expand.
        lenient: Accept non-standard files that can be read in one way only, and warn: trailing bytes, a header
            not padded with spaces.
        cache (FOLDER): Cache data read from remote stores (https://, hf://, s3:// …) here for the next run.
            Default: no cache.

    Raises:
        UsageError: a pattern matches nothing.
        CheckpointError: an input is missing, damaged, or changes while it is read."""
    ...

def plan(
    original: Side,
    *,
    verify: bool = False,
    text: Path | None = None,
    chunks: int | None = None,
    to: Iterable[str] = (),
    scales: str | None = None,
    size: float | str | None = None,
    bits: float | None = None,
    max_kld: float | None = None,
    max_output_error: float | None = None,
    min_snr: float | None = None,
    layers: Iterable[str] = (),
    exclude: Iterable[str] = (),
    importance: Path | None = None,
    sensitivity: Path | None = None,
    device: str = "auto",
    lenient: bool = False,
    cache: Path | None = None,
    context: int = 512,
    same_in: SameIn = "fused",
    outlier_threshold: float = 0.01,
    resume: Path | None = None,
    on_progress: Callable[[Any], None] | None = None,
    on_layer: Callable[[Any], None] | None = None,
    layers_to_compare: Iterable[str] = (),
    measure: bool = False,
) -> Plan:
    """Choose a recipe for each layer: the minimum cost within a budget, or the minimum size within a limit on the cost.

    Every layer may also be left unquantized. With ``sensitivity``, the cost is the predicted KLD or output error; with
    ``importance`` alone, the squared error weighted by the importance matrix; otherwise the squared error.

    Keyword Args:
        verify: Measure the plan on text; max_kld then bounds the measured KLD. measure is the same.
        text (FILE): A UTF-8 text file, tokenized with the original's tokenizer.json.
        chunks (N): Maximum number of chunks.
        to (RECIPES, one or several): Recipes, separated by commas; int4_g{32,64} stands for two. Default: a
            preset list.
        scales (CALIBRATORS): Run each recipe with each calibrator: absmax, mse, p99.9, ema.
        size (BYTES): Maximum checkpoint size, e.g. 6GiB.
        bits (NUMBER): Maximum bits per weight of the planned layers, scales included.
        max_kld (NAT): Smallest size with at most this predicted KLD; needs sensitivity.
        max_output_error (SHARE): Smallest size with at most this predicted error of a denoiser's output (1: 100
            %); needs sensitivity.
        min_snr (dB): Smallest size with at least this SNR over the planned layers.
        layers (PATTERN, one or several): Layers to compare: attn, mlp, experts, norm, embed, head …; part of a
            name; a glob; re:REGEX; !PATTERN excludes. Separated by commas. layers_to_compare is the same.
        exclude (PATTERN, one or several): Layers to leave out, by the same patterns without !, which shells
            expand.
        importance (FILE): An importance matrix of llama.cpp (.gguf or .dat): weights errors by the importance of
            each input.
        sensitivity (FILE): A file written by quanterr evaluate --sensitivity-out: predicts the KLD, or output
            error, that the errors cause.
        device (NAME, default auto): auto, cpu, cuda, cuda:N, or another accelerator that torch has, such as xpu.
        lenient: Accept non-standard files that can be read in one way only, and warn: trailing bytes, a header
            not padded with spaces.
        cache (FOLDER): Cache data read from remote stores (https://, hf://, s3:// …) here for the next run.
            Default: no cache.
        context (N, default 512): Tokens per chunk; the predictions of its second half are scored.
        same_in (default fused): Layers that must share a recipe.
        outlier_threshold (NUMBER, default 0.01): An element with a larger |e| counts as an outlier.
        resume (FILE): A journal: stores finished weights and reuses those already in it, for runs that may be
            killed.
        on_progress: Called ten times per second with the progress; in a notebook, a bar.
        on_layer: Called from a thread of the run with each layer that differs, as soon as it is compared.

    Raises:
        UsageError: there is no goal or more than one; the goal cannot be met (the message states the minimum); or
            as ``sweep``.
        CheckpointError, ResourceError: as ``sweep``.
        Interrupted: the run was stopped."""
    ...

def rank(
    original: Side,
    candidates: Side | Iterable[Side] | Mapping[str, Side],
    *,
    evaluation: Path | None = None,
    against: Iterable[str] = (),
    thresholds: Path | None = None,
    require: Iterable[str] = (),
    fail_if: Iterable[str] = (),
    baseline: Path | Result | None = None,
    layers: Iterable[str] = (),
    exclude: Iterable[str] = (),
    runtimes: Iterable[str] = (),
    devices: int = 1,
    keep_original: str | None = None,
    importance: Path | None = None,
    sensitivity: Path | None = None,
    device: str = "auto",
    lenient: bool = False,
    cache: Path | None = None,
    baseline_original: Literal["same", "any"] = "same",
    strict_warnings: bool = False,
    outlier_threshold: float = 0.01,
    resume: Path | None = None,
    on_progress: Callable[[Any], None] | None = None,
    on_layer: Callable[[Any], None] | None = None,
    tp: int = 1,
    layers_to_compare: Iterable[str] = (),
) -> Ranking:
    """Rank quantized checkpoints by error and size, and find layers that could better come from another candidate.

    Candidates in a dict have its keys as names: ``{"mine": a, "theirs": b}``. The original is read once. A candidate
    whose report is inconclusive is not ranked, and makes the ranking's verdict ``inconclusive``; so does one that
    cannot be read, if two others can.

    Keyword Args:
        evaluation (FILE): An evaluation (JSON) of these candidates, whose KLD and perplexity join the table.
        against (RECIPES, one or several): Recipes as further candidates: fp8_row,int4_g128 quantize the original
            on the fly.
        thresholds (FILE): Rules to apply: a TOML file or a preset (fp8, int8, …).
        require (CONDITION, one or several): A condition that must hold, such as 'snr_db >= 28'.
        fail_if (CONDITION, one or several): A condition that must not hold, such as 'snr_db < 28'; an undefined
            value fails, too.
        baseline (FILE): An older result of the same command, for rank and sweep a report of compare (JSON), for
            delta, rel_delta and ratio. Without a rule that uses it, 'delta(snr_db) >= -0.5' must hold.
        layers (PATTERN, one or several): Layers to compare: attn, mlp, experts, norm, embed, head …; part of a
            name; a glob; re:REGEX; !PATTERN excludes. Separated by commas. layers_to_compare is the same.
        exclude (PATTERN, one or several): Layers to leave out, by the same patterns without !, which shells
            expand.
        runtimes (NAMES, one or several): Say whether programs load it: transformers, vllm, sglang, tensorrt-llm,
            llama.cpp, ik_llama.cpp, ollama, comfyui, diffusers, mlx, exllamav3, or all.
        devices (N, default 1): Number of devices among which vLLM splits the model. tp is the same.
        keep_original (BYTES|dB): Propose layers to leave unquantized: 500MiB, at most that many bytes, without
            layers that gain little; 3dB, enough to gain that much SNR.
        importance (FILE): An importance matrix of llama.cpp (.gguf or .dat): weights errors by the importance of
            each input.
        sensitivity (FILE): A file written by quanterr evaluate --sensitivity-out: predicts the KLD, or output
            error, that the errors cause.
        device (NAME, default auto): auto, cpu, cuda, cuda:N, or another accelerator that torch has, such as xpu.
        lenient: Accept non-standard files that can be read in one way only, and warn: trailing bytes, a header
            not padded with spaces.
        cache (FOLDER): Cache data read from remote stores (https://, hf://, s3:// …) here for the next run.
            Default: no cache.
        baseline_original (default same): any accepts a baseline of another original, such as another finetune,
            whose layers have the same names and sizes.
        strict_warnings: Treat rules of severity warn as errors, and refuse edited reports.
        outlier_threshold (NUMBER, default 0.01): An element with a larger |e| counts as an outlier.
        resume (FILE): A journal: stores finished weights and reuses those already in it, for runs that may be
            killed.
        on_progress: Called ten times per second with the progress; in a notebook, a bar.
        on_layer: Called from a thread of the run with each layer that differs, as soon as it is compared.

    Raises:
        UsageError: there are fewer than two candidates, a candidate is given twice, or :func:`compare` raises it.
        CheckpointError, ResourceError: :func:`compare` raises it."""
    ...

def sweep(
    original: Side,
    to: Iterable[str] = (),
    *,
    scales: str | None = None,
    sample: str | None = None,
    thresholds: Path | None = None,
    require: Iterable[str] = (),
    fail_if: Iterable[str] = (),
    baseline: Path | Result | None = None,
    layers: Iterable[str] = (),
    exclude: Iterable[str] = (),
    keep_original: str | None = None,
    importance: Path | None = None,
    sensitivity: Path | None = None,
    device: str = "auto",
    lenient: bool = False,
    cache: Path | None = None,
    study: bool = False,
    baseline_original: Literal["same", "any"] = "same",
    strict_warnings: bool = False,
    outlier_threshold: float = 0.01,
    hardware: str | None = None,
    resume: Path | None = None,
    on_progress: Callable[[Any], None] | None = None,
    on_layer: Callable[[Any], None] | None = None,
    layers_to_compare: Iterable[str] = (),
) -> Ranking:
    """Quantize the original on the fly by several recipes, and rank them by error and size.

    Keyword Args:
        to (RECIPES, one or several): Recipes, separated by commas; int4_g{32,64} stands for two. Default: a
            preset list.
        scales (CALIBRATORS): Run each recipe with each calibrator: absmax, mse, p99.9, ema.
        sample (SHARE): Read only this share of each weight's rows, such as 10%; numbers become estimates with
            margins of error.
        thresholds (FILE): Rules to apply: a TOML file or a preset (fp8, int8, …).
        require (CONDITION, one or several): A condition that must hold, such as 'snr_db >= 28'.
        fail_if (CONDITION, one or several): A condition that must not hold, such as 'snr_db < 28'; an undefined
            value fails, too.
        baseline (FILE): An older result of the same command, for rank and sweep a report of compare (JSON), for
            delta, rel_delta and ratio. Without a rule that uses it, 'delta(snr_db) >= -0.5' must hold.
        layers (PATTERN, one or several): Layers to compare: attn, mlp, experts, norm, embed, head …; part of a
            name; a glob; re:REGEX; !PATTERN excludes. Separated by commas. layers_to_compare is the same.
        exclude (PATTERN, one or several): Layers to leave out, by the same patterns without !, which shells
            expand.
        keep_original (BYTES|dB): Propose layers to leave unquantized: 500MiB, at most that many bytes, without
            layers that gain little; 3dB, enough to gain that much SNR.
        importance (FILE): An importance matrix of llama.cpp (.gguf or .dat): weights errors by the importance of
            each input.
        sensitivity (FILE): A file written by quanterr evaluate --sensitivity-out: predicts the KLD, or output
            error, that the errors cause.
        device (NAME, default auto): auto, cpu, cuda, cuda:N, or another accelerator that torch has, such as xpu.
        lenient: Accept non-standard files that can be read in one way only, and warn: trailing bytes, a header
            not padded with spaces.
        cache (FOLDER): Cache data read from remote stores (https://, hf://, s3:// …) here for the next run.
            Default: no cache.
        study: Measure what outliers cost each recipe, and how much the error depends on the scales.
        baseline_original (default same): any accepts a baseline of another original, such as another finetune,
            whose layers have the same names and sizes.
        strict_warnings: Treat rules of severity warn as errors, and refuse edited reports.
        outlier_threshold (NUMBER, default 0.01): An element with a larger |e| counts as an outlier.
        hardware (NAME|GB/s): Show how many tokens per second this memory bandwidth allows: H100, 4090, M3-max,
            900GB/s.
        resume (FILE): A journal: stores finished weights and reuses those already in it, for runs that may be
            killed.
        on_progress: Called ten times per second with the progress; in a notebook, a bar.
        on_layer: Called from a thread of the run with each layer that differs, as soon as it is compared.

    Raises:
        UsageError: a recipe is unknown, there is nothing to quantize, or :func:`compare` raises it.
        CheckpointError: a weight contains NaN or infinity, or :func:`compare` raises it.
        ResourceError: :func:`compare` raises it."""
    ...
