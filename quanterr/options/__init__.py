"""Options of each command, declared once for the command line, the library and settings files.

A field with an :class:`Option` is an option of the command line (``cli/options.py``), a key of settings files, and a
keyword of the library (``keywords.py``), each with the option's text. One with a plain text is a keyword of the library
alone, and one without any is neither: the program sets it.
"""

import os
import re
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from functools import cache
from math import isfinite
from typing import Annotated, Any, Literal, NamedTuple, Protocol, get_type_hints, runtime_checkable

from quanterr.errors import UsageError
from quanterr.metrics import OUTLIER
from quanterr.selection import LayerSelection, select
from quanterr.util.arguments import check_types

Path = str | os.PathLike[str]
SameIn = Literal["fused", "block", "role"]

INPUTS, SELECTION, METRICS, RECIPES = "Inputs", "Selection", "Metrics", "Recipes"
GATES, TEXT, GOAL, OUTPUT, PERFORMANCE = "Gates", "Text", "Goal (one of them)", "Output", "Performance"
RUNTIME, WEIGHTS = "Runtime", "Weights"
KNOWN_DEVICES = re.compile(r"auto|(cpu|cuda|xpu|mps)(:\d+)?")  # torch may have others; ROCm's are called cuda
MADE_UP_CALLS = "gaussian:"  # before their number, in the place of a file
# Help texts that several commands share.
DEVICES = "auto, cpu, cuda, cuda:N, or another accelerator that torch has, such as xpu"
DEVICE_CHOICES = f"choose {DEVICES}"
READ_TEXT = "A UTF-8 text file, tokenized with the original's tokenizer.json."
BANDWIDTH = "Show how many tokens per second this memory bandwidth allows: H100, 4090, M3-max, 900GB/s."
CONTEXT, CHUNKS = "Tokens per chunk; the predictions of its second half are scored.", "Maximum number of chunks."
NOTHING_TO_DO = (
    "no candidate is given: evaluate needs one, or a --draft, or --sensitivity-out, --importance-out, --saliency-out "
    "or --save-reference alone"
)
PANELS = (
    INPUTS,
    TEXT,
    RUNTIME,
    WEIGHTS,
    RECIPES,
    GOAL,
    OUTPUT,
    GATES,
    SELECTION,
    METRICS,
    PERFORMANCE,
)  # in display order


@runtime_checkable
class Array(Protocol):
    """A tensor of torch or an array of numpy."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The extent of each dimension."""

    def tolist(self) -> Any:
        """Return the numbers as lists."""


@runtime_checkable
class Result(Protocol):
    """A result of the library, such as a Report."""

    schema_: str

    def to_json(self) -> str:
        """Return the result as JSON."""


class Option(NamedTuple):
    """The command line option of a field, or of a parameter of a command."""

    help: str
    panel: str | None = None  # heading in the help
    metavar: str | None = None  # FILE and FOLDER: paths in a settings file are relative to its folder
    flags: str = ""  # such as "--json"; empty: made from the field's name
    minimum: float | None = None  # smallest allowed value
    maximum: float | None = None  # largest allowed value
    words: str | None = None  # the function of cli/completion.py that completes the value
    rare: bool = False  # --help leaves it out, --help-all shows it


class CheckedOptions:
    """Base class: the values of a repeatable field become a tuple, a single string or path a tuple of length one.

    Raises:
        UsageError: a value has another type than its field, or a number is not finite or outside of its range.
    """

    def __post_init__(self) -> None:
        check_types({name: getattr(self, name) for name in list_notes(type(self))}, get_type_hints(type(self)))
        for name in list_multiple_fields(type(self)):
            value = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, str | os.PathLike) else tuple(value))
        for name, option in list_options(type(self)).items():
            _check_range(name, getattr(self, name), option)


def _check_range(name: str, value: object, option: Option) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    shown = f"{list_flags(name, option)[0]} {value}"
    if isinstance(value, float) and not isfinite(value):
        raise UsageError(f"{shown}: must be a finite number")
    if option.minimum is not None and value < option.minimum:
        raise UsageError(f"{shown}: must be at least {option.minimum}")
    if option.maximum is not None and value > option.maximum:
        raise UsageError(f"{shown}: must be at most {option.maximum}")


def list_flags(name: str, option: Option) -> list[str]:
    """Return the flags of a field on the command line, the long one first."""
    return option.flags.split() or [f"--{name.replace('_', '-')}"]


@cache
def read_annotations(class_: type) -> dict[str, Any]:
    """Return the annotations of a dataclass's fields, with those of its bases."""
    return get_type_hints(class_, include_extras=True)


def list_options(class_: type) -> dict[str, Option]:
    """Return the command line options of a dataclass by the names of their fields."""
    return {name: note for name, note in list_notes(class_).items() if isinstance(note, Option)}


def list_notes(class_: type) -> dict[str, Option | str]:
    """Return the option, or the text, of each field of a dataclass that has one, by the names of the fields."""
    hints = read_annotations(class_)
    return {
        field.name: note
        for field in fields(class_)
        for note in getattr(hints[field.name], "__metadata__", ())
        if isinstance(note, Option | str)
    }


def list_multiple_fields(class_: type) -> list[str]:
    """Return the names of the dataclass fields that take any number of values."""
    hints = get_type_hints(class_)
    return [field.name for field in fields(class_) if getattr(hints[field.name], "__origin__", None) is Iterable]


@dataclass(frozen=True, kw_only=True)
class ReadOptions(CheckedOptions):
    """Options of everything that reads checkpoints."""

    lenient: Annotated[
        bool,
        Option(
            "Accept non-standard files that can be read in one way only, and warn: trailing bytes, a header not padded "
            "with spaces.",
            INPUTS,
            rare=True,
        ),
    ] = False
    cache: Annotated[
        Path | None,
        Option(
            "Cache data read from remote stores (https://, hf://, s3:// …) here for the next run. Default: no cache.",
            INPUTS,
            "FOLDER",
            rare=True,
        ),
    ] = None
    stop: threading.Event | None = None  # ends the run, once set, after the work in progress
    command: Iterable[str] = ()  # the command line, which the result records


@dataclass(frozen=True, kw_only=True)
class RunOptions(ReadOptions):
    """Options of runs that compute on a device."""

    device: Annotated[str, Option(f"{DEVICES}.", PERFORMANCE, "NAME")] = "auto"


@dataclass(frozen=True, kw_only=True)
class LoadingOptions(CheckedOptions):
    """Programs that are to load a checkpoint."""

    runtimes: Annotated[
        Iterable[str],
        Option(
            "Say whether programs load it: transformers, vllm, sglang, tensorrt-llm, llama.cpp, ik_llama.cpp, ollama, "
            "comfyui, diffusers, mlx, exllamav3, or all.",
            METRICS,
            "NAMES",
            flags="--for",
        ),
    ] = ()
    devices: Annotated[
        int, Option("Number of devices among which vLLM splits the model.", METRICS, "N", flags="--tp", minimum=1)
    ] = 1


@dataclass(frozen=True, kw_only=True)
class InspectOptions(ReadOptions, LoadingOptions):
    """Options of :func:`quanterr.inspect`."""

    hardware: Annotated[str | None, Option(BANDWIDTH, METRICS, "NAME|GB/s")] = None
    values: Annotated[
        bool,
        Option("Read every weight once: NaN and infinity, zeros, repetitions, wrong scales, unused codes.", METRICS),
    ] = False
    verify: Annotated[
        bool,
        Option(
            "Compare the SHA-256 of each file with the one that the Hugging Face hub states: hf://, downloads.",
            METRICS,
            flags="--hub-checksums --verify",
        ),
    ] = False


def _describe_thresholds(presets: str) -> Option:
    return Option(f"Rules to apply: {presets}.", GATES, "FILE", words="presets")


def _describe_require(example: str) -> Option:
    return Option(f"A condition that must hold, such as {example}.", GATES, "CONDITION")


def _describe_fail_if(example: str) -> Option:
    return Option(
        f"A condition that must not hold, such as {example}; an undefined value fails, too.", GATES, "CONDITION"
    )


def _describe_baseline(baseline: str, no_worse: str) -> Option:
    return Option(
        f"{baseline} (JSON), for delta, rel_delta and ratio. Without a rule that uses it, {no_worse} must hold.",
        GATES,
        "FILE",
    )


@dataclass(frozen=True, kw_only=True)
class GateOptions(CheckedOptions):
    """Rules that judge a result; see ``quanterr guide gates``."""

    thresholds: Annotated[Path | None, _describe_thresholds("a TOML file or a preset (fp8, int8, …)")] = None
    require: Annotated[Iterable[str], _describe_require("'snr_db >= 28'")] = ()
    fail_if: Annotated[Iterable[str], _describe_fail_if("'snr_db < 28'")] = ()
    baseline: Annotated[
        Path | Result | None,
        _describe_baseline(
            "An older result of the same command, for rank and sweep a report of compare", "'delta(snr_db) >= -0.5'"
        ),
    ] = None
    baseline_original: Annotated[
        Literal["same", "any"],
        Option(
            "any accepts a --baseline of another original, such as another finetune, whose layers have the same names "
            "and sizes.",
            GATES,
            rare=True,
        ),
    ] = "same"
    strict_warnings: Annotated[
        bool, Option("Treat rules of severity warn as errors, and refuse edited reports.", GATES, rare=True)
    ] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("thresholds", "baseline"):
            if getattr(self, name) == "":  # such as from an undefined variable: a gate would be switched off
                raise UsageError(f"--{name}: is empty; give a file, or leave the option out")

    @property
    def has_rules(self) -> bool:
        """True if some option sets rules."""
        return bool(self.require or self.fail_if) or self.thresholds is not None or self.baseline is not None


@dataclass(frozen=True, kw_only=True)
class ImageGateOptions(GateOptions):
    """Rules that judge pairs of images, which have no presets."""

    thresholds: Annotated[Path | None, _describe_thresholds("a TOML file")] = None
    require: Annotated[Iterable[str], _describe_require("'min(ssim) >= 0.9'")] = ()
    fail_if: Annotated[Iterable[str], _describe_fail_if("'psnr_db < 25'")] = ()
    baseline: Annotated[
        Path | Result | None, _describe_baseline("An older result of images", "'delta(ssim) >= -0.01'")
    ] = None


@dataclass(frozen=True, kw_only=True)
class EvaluationGateOptions(GateOptions):
    """Rules that judge an evaluation, which have no presets."""

    thresholds: Annotated[Path | None, _describe_thresholds("a TOML file")] = None
    require: Annotated[Iterable[str], _describe_require("'upper(kld_mean) <= 0.01'")] = ()
    fail_if: Annotated[Iterable[str], _describe_fail_if("'top1 < 0.95'")] = ()
    baseline: Annotated[Path | Result | None, _describe_baseline("An older evaluation", "'ratio(kld_mean) <= 1.1'")] = (
        None
    )


@dataclass(frozen=True, kw_only=True)
class JudgedLayers(CheckedOptions):
    """The choice of layers that rules judge."""

    layers: Annotated[
        Iterable[str],
        Option(
            "Rules about layers judge only these, by the patterns of compare. Default: all.",
            SELECTION,
            "PATTERN",
            "--layers -l",
        ),
    ] = ()


@dataclass(frozen=True, kw_only=True)
class SelectionOptions(CheckedOptions):
    """The choice of layers."""

    layers: Annotated[
        Iterable[str],
        Option(
            "Layers to compare: attn, mlp, experts, norm, embed, head …; part of a name; a glob; re:REGEX; !PATTERN "
            "excludes. Separated by commas.",
            SELECTION,
            "PATTERN",
            "--layers-to-compare -l",
        ),
    ] = ()
    exclude: Annotated[
        Iterable[str],
        Option("Layers to leave out, by the same patterns without !, which shells expand.", SELECTION, "PATTERN"),
    ] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.selection  # an invalid pattern is a mistake at once, before anything is opened

    @property
    def selection(self) -> LayerSelection:
        """The selected layers.

        Raises:
            UsageError: a pattern is invalid.
        """
        return select(tuple(self.layers), tuple(self.exclude))


@dataclass(frozen=True, kw_only=True)
class PairOptions(ReadOptions, SelectionOptions):
    """Options of :func:`quanterr.iterate_pairs`."""


@dataclass(frozen=True, kw_only=True)
class ComparisonOptions(RunOptions, SelectionOptions):
    """Options of a comparison, of one candidate or several."""

    outlier_threshold: Annotated[
        float, Option("An element with a larger |e| counts as an outlier.", METRICS, "NUMBER", minimum=0, rare=True)
    ] = OUTLIER
    importance: Annotated[
        Path | None,
        Option(
            "An importance matrix of llama.cpp (.gguf or .dat): weights errors by the importance of each input.",
            METRICS,
            "FILE",
        ),
    ] = None
    sensitivity: Annotated[
        Path | None,
        Option(
            "A file written by quanterr evaluate --sensitivity-out: predicts the KLD, or output error, that the errors "
            "cause.",
            METRICS,
            "FILE",
        ),
    ] = None
    resume: Annotated[
        Path | None,
        Option(
            "A journal: stores finished weights and reuses those already in it, for runs that may be killed.",
            PERFORMANCE,
            "FILE",
            rare=True,
        ),
    ] = None
    on_progress: Annotated[
        Callable[[Any], None] | None, "Called ten times per second with the progress; in a notebook, a bar."
    ] = None
    on_layer: Annotated[
        Callable[[Any], None] | None,
        "Called from a thread of the run with each layer that differs, as soon as it is compared.",
    ] = None


@dataclass(frozen=True, kw_only=True)
class DequantizeOptions(ReadOptions):
    """Options for writing a checkpoint back as floats."""

    layers: Annotated[
        Iterable[str],
        Option("Tensors to write, by the patterns of compare. Default: all.", SELECTION, "PATTERN", "--layers -l"),
    ] = ()
    exclude: Annotated[Iterable[str], Option("Tensors to leave out.", SELECTION, "PATTERN")] = ()
    dtype: Annotated[
        Literal["bf16", "f16", "f32"] | None,
        Option("Dtype of decoded weights. Default: the original's with --like, otherwise bf16.", OUTPUT),
    ] = None
    like: Annotated[
        Path | None,
        Option(
            "The original: write its names, shapes, orders and dtypes. Needed for GGUF of unknown models.",
            INPUTS,
            "ORIGINAL",
        ),
    ] = None
    max_shard: Annotated[str, Option("Maximum size of a shard, such as 5GB.", OUTPUT, "BYTES")] = "5GB"
    verify: Annotated[bool, Option("Read the output back and compare it with a second decoding.", OUTPUT)] = False
    on_progress: Annotated[Callable[[Any], None] | None, "Called with the progress after each piece."] = None


@dataclass(frozen=True, kw_only=True)
class JudgedOptions(ComparisonOptions, GateOptions):
    """Options of comparisons that rules judge."""


@dataclass(frozen=True, kw_only=True)
class CompareOptions(JudgedOptions, LoadingOptions):
    """Options of :func:`quanterr.compare`."""

    every_code: Annotated[
        bool,
        Option(
            "Look at every code: is each tensor the original, rounded, and nothing else? -o X.intoto.json writes a "
            "statement. See quanterr guide origin.",
            METRICS,
        ),
    ] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.every_code and self.resume is not None:
            raise UsageError("--every-code: cannot be combined with --resume, as a journal does not hold every code")


@dataclass(frozen=True, kw_only=True)
class KeepOptions(CheckedOptions):
    """The option that proposes layers to leave unquantized."""

    keep_original: Annotated[
        str | None,
        Option(
            "Propose layers to leave unquantized: 500MiB, at most that many bytes, without layers that gain little; "
            "3dB, enough to gain that much SNR.",
            METRICS,
            "BYTES|dB",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class RankOptions(JudgedOptions, KeepOptions, LoadingOptions):
    """Options of :func:`quanterr.rank`."""

    evaluation: Annotated[
        Path | None,
        Option("An evaluation (JSON) of these candidates, whose KLD and perplexity join the table.", INPUTS, "FILE"),
    ] = None
    against: Annotated[
        Iterable[str],
        Option(
            "Recipes as further candidates: fp8_row,int4_g128 quantize the original on the fly.",
            INPUTS,
            "RECIPES",
            words="recipes",
        ),
    ] = ()


@dataclass(frozen=True, kw_only=True)
class RecipeOptions(CheckedOptions):
    """Recipes that quantize the original on the fly."""

    to: Annotated[
        Iterable[str],
        Option(
            "Recipes, separated by commas; int4_g{32,64} stands for two. Default: a preset list.",
            RECIPES,
            "RECIPES",
            words="recipes",
        ),
    ] = ()
    scales: Annotated[
        str | None,
        Option("Run each recipe with each calibrator: absmax, mse, p99.9, ema.", RECIPES, "CALIBRATORS"),
    ] = None


@dataclass(frozen=True, kw_only=True)
class BenchOptions(RecipeOptions):
    """Options of ``quanterr bench-formats``."""

    rows: Annotated[int, Option("Rows of each weight.", WEIGHTS, "N", minimum=1)] = 1024
    columns: Annotated[int, Option("Columns of each weight.", WEIGHTS, "N", minimum=1)] = 4096
    seed: Annotated[int, Option("Seed of the random numbers.", WEIGHTS, "N", minimum=0)] = 0


@dataclass(frozen=True, kw_only=True)
class SweepOptions(JudgedOptions, RecipeOptions, KeepOptions):
    """Options of :func:`quanterr.sweep`."""

    sample: Annotated[
        str | None,
        Option(
            "Read only this share of each weight's rows, such as 10%; numbers become estimates with margins of error.",
            RECIPES,
            "SHARE",
        ),
    ] = None
    study: Annotated[
        bool,
        Option(
            "Measure what outliers cost each recipe, and how much the error depends on the scales.", RECIPES, rare=True
        ),
    ] = False
    hardware: Annotated[
        str | None,
        Option(BANDWIDTH, METRICS, "NAME|GB/s", rare=True),
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sample is not None and self.has_rules:
            raise UsageError("--sample cannot be combined with rules, which need all rows; leave one of them out")


@dataclass(frozen=True, kw_only=True)
class PlanOptions(ComparisonOptions, RecipeOptions):
    """Options of :func:`quanterr.plan`; exactly one of ``size``, ``bits`` and the limits is required."""

    same_in: Annotated[SameIn, Option("Layers that must share a recipe.", RECIPES, rare=True)] = "fused"
    size: Annotated[float | str | None, Option("Maximum checkpoint size, e.g. 6GiB.", GOAL, "BYTES")] = None
    bits: Annotated[
        float | None,
        Option("Maximum bits per weight of the planned layers, scales included.", GOAL, "NUMBER", minimum=0),
    ] = None
    max_kld: Annotated[
        float | None,
        Option("Smallest size with at most this predicted KLD; needs --sensitivity.", GOAL, "NAT", minimum=0),
    ] = None
    max_output_error: Annotated[
        float | None,
        Option(
            "Smallest size with at most this predicted error of a denoiser's output (1: 100 %); needs --sensitivity.",
            GOAL,
            "SHARE",
            minimum=0,
        ),
    ] = None
    min_snr: Annotated[
        float | None, Option("Smallest size with at least this SNR over the planned layers.", GOAL, "dB")
    ] = None
    verify: Annotated[
        bool,
        Option("Measure the plan on --text; --max-kld then bounds the measured KLD.", TEXT, flags="--measure --verify"),
    ] = False
    text: Annotated[Path | None, Option(READ_TEXT, TEXT, "FILE")] = None
    context: Annotated[int, Option(CONTEXT, TEXT, "N", minimum=2, rare=True)] = 512
    chunks: Annotated[int | None, Option(CHUNKS, TEXT, "N", minimum=1)] = None


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(RunOptions, EvaluationGateOptions):
    """Options of :func:`quanterr.evaluate`. The model reads ``text`` and ``chat``, or ``tokens``, or ``inputs``."""

    text: Annotated[
        Iterable[Path],
        Option(f"{READ_TEXT} prose=a.txt gives it a name.", TEXT, "[NAME=]FILE"),
    ] = ()
    chat: Annotated[
        Iterable[Path],
        Option(
            "Conversations, a JSON line each, through the original's chat template; the assistant's tokens are scored.",
            TEXT,
            "[NAME=]FILE",
        ),
    ] = ()
    tokens: Annotated[
        Path | Array | Iterable[int] | None,
        Option("Token ids instead of a text: a safetensors file with one integer tensor.", TEXT, "FILE"),
    ] = None
    inputs: Annotated[
        Path | None,
        Option(
            "Recorded calls of the model instead (denoisers, vision towers): safetensors with tensors CALL/ARGUMENT. "
            "gaussian:8 makes up eight calls, as a smoke test.",
            TEXT,
            "FILE",
        ),
    ] = None
    allow_gaussian: Annotated[
        bool,
        Option(
            "Let gates judge calls that --inputs gaussian:N made up; they are inconclusive otherwise.", TEXT, rare=True
        ),
    ] = False
    config: Annotated[
        Path | None,
        Option(
            "Folder with the config.json of a denoiser in a single file, or with config.json and tokenizer of a GGUF "
            "file, if they do not follow from the file.",
            TEXT,
            "FOLDER",
            rare=True,
        ),
    ] = None
    lora: Annotated[
        Path | None,
        Option(
            "Merge this LoRA into both sides of a denoiser before they are compared (with --inputs).",
            TEXT,
            "FILE",
            rare=True,
        ),
    ] = None
    rollout: Annotated[
        bool,
        Option(
            "With --inputs: also let each side follow its own path of flow matching, and compare the final latents.",
            TEXT,
            rare=True,
        ),
    ] = False
    draft: Annotated[
        Iterable[Path],
        Option(
            "Another, smaller model with the same vocabulary: the share of its tokens that speculative decoding would "
            "accept.",
            METRICS,
            "FOLDER",
        ),
    ] = ()
    tasks: Annotated[
        Iterable[Path],
        Option(
            "Multiple-choice questions, one JSON object per line: question, choices, answer (an index from 0).",
            TEXT,
            "FILE",
            "--task",
        ),
    ] = ()
    context: Annotated[int, Option(CONTEXT, TEXT, "N", minimum=2, rare=True)] = 512
    chunks: Annotated[int | None, Option(CHUNKS, TEXT, "N", minimum=1)] = None
    sensitivity: Annotated[
        Path | None,
        Option(
            "Write each weight's sensitivity (JSON), and predict the divergence, or output error, of the candidates.",
            OUTPUT,
            "FILE",
            flags="--sensitivity-out --sensitivity",
        ),
    ] = None
    swap: Annotated[
        Iterable[str],
        Option(
            "Also measure the divergence of each of these weights alone in the original; patterns as for "
            "quanterr compare -l.",
            METRICS,
            "PATTERN",
            rare=True,
        ),
    ] = ()
    swap_blocks: Annotated[
        bool,
        Option(
            "Also measure the divergence of each block alone in the original; of L blocks, takes L / 4 times as long.",
            METRICS,
            rare=True,
        ),
    ] = False
    sensitivity_chunks: Annotated[
        int,
        Option(
            "Number of chunks or calls to measure the sensitivity on; their activations are kept in memory.",
            TEXT,
            "N",
            minimum=1,
            rare=True,
        ),
    ] = 4
    importance_out: Annotated[
        Path | None,
        Option(
            "Write the second moments of inputs as an importance matrix of llama.cpp (GGUF).", OUTPUT, "FILE", rare=True
        ),
    ] = None
    saliency_out: Annotated[
        Path | None,
        Option(
            "Write the columns and elements of each weight with the largest Var(x) · w² (JSON).",
            OUTPUT,
            "FILE",
            rare=True,
        ),
    ] = None
    saliency: Annotated[
        float,
        Option(
            "Percentage of columns and elements that --saliency-out writes.",
            OUTPUT,
            "PERCENT",
            minimum=0,
            maximum=100,
            rare=True,
        ),
    ] = 1.0
    save_reference: Annotated[
        Path | None,
        Option("Store what evaluating candidates needs of the original, for --reference.", OUTPUT, "FOLDER"),
    ] = None
    reference: Annotated[
        Path | None,
        Option(
            "A folder that --save-reference wrote, instead of the original: every path is then a candidate.",
            INPUTS,
            "FOLDER",
        ),
    ] = None
    activations: Annotated[
        str,
        Option(
            "Rounding of the inputs of quantized weights: declared (by the files), none, or a scheme such as "
            "fp8_token, int8_token, nvfp4.",
            RUNTIME,
            "NAME",
        ),
    ] = "declared"
    kv: Annotated[
        Iterable[str],
        Option(
            "Rounding of keys and values: declared (by the files, the default), none, or a type such as q8_0, q4_0, "
            "fp8, int8_token, int4, k=q8_0,v=q4_0. Each makes a row.",
            RUNTIME,
            "NAME",
        ),
    ] = ()
    split: Annotated[
        bool,
        Option("Where inputs, keys or values are rounded, evaluate the weights alone as well.", RUNTIME, rare=True),
    ] = False
    dtype: Annotated[
        str, Option("Compute dtype of both sides: float32, bfloat16 or float64.", PERFORMANCE, "NAME", rare=True)
    ] = "float32"
    batch: Annotated[
        int, Option("Number of chunks that run through a block together.", PERFORMANCE, "N", minimum=1, rare=True)
    ] = 2
    on_progress: Annotated[
        Callable[[int, int, int, int], None] | None,
        "Called with the numbers of units done, of units, of micro-batches done, and of micro-batches.",
    ] = None

    @property
    def with_moments(self) -> bool:
        """True if an output needs the second moments of inputs."""
        return self.importance_out is not None or self.saliency_out is not None

    def check_alone(self) -> None:
        """Check that some output needs no candidate, and that nothing asks for one.

        Raises:
            UsageError: there is no such output, weights of candidates should be swapped, or rules are given.
        """
        if not (self.with_moments or self.sensitivity is not None or self.save_reference is not None):
            raise UsageError(NOTHING_TO_DO)
        if self.swap or self.swap_blocks:
            option = "--swap" if self.swap else "--swap-blocks"
            raise UsageError(f"{option}: puts weights of candidates into the original; give a candidate")
        if self.has_rules:
            raise UsageError("--require, --fail-if, --thresholds and --baseline judge candidates; give a candidate")
