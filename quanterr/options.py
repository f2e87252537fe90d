"""What each command can be asked: declared once, for the command line, the library and settings files.

A field with an :class:`Option` is an option of the command line as well; ``cli/options.py`` makes it one. The keywords
that the library takes are the same, as ``TypedDict`` at the end: for checkers and editors.
"""

import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, NamedTuple, TypedDict, get_type_hints

from quanterr.metrics import OUTLIER

Path = str | os.PathLike[str]
SameIn = Literal["fused", "block", "role"]

INPUTS, SELECTION, METRICS, RECIPES = "Inputs", "Selection", "Metrics", "Recipes"
GATES, TEXT, GOAL, OUTPUT, PERFORMANCE = "Gates", "Text", "Goal (one of them)", "Output", "Performance"
RUNTIME = "What runs"
# Options that several commands have in these words.
READ_TEXT = "A text, UTF-8, read through the original's tokenizer.json."
CONTEXT, CHUNKS = "Tokens of a chunk; predictions of its second half are scored.", "Number of chunks at most."
PANELS = (INPUTS, TEXT, RUNTIME, RECIPES, GOAL, SELECTION, METRICS, GATES, OUTPUT, PERFORMANCE)  # as help shows them


class Option(NamedTuple):
    """How a field is an option of the command line."""

    help: str
    panel: str
    metavar: str | None = None  # FILE and FOLDER: a settings file says it as seen from its own folder
    flags: str = ""  # "--json"; empty: the name of the field
    least: float | None = None  # allowed
    words: str | None = None  # the function of cli/completion.py that completes it


class _Options:
    """A string where several are meant is one of them, as on the command line."""

    def __post_init__(self) -> None:
        for name in several(type(self)):
            value = getattr(self, name)
            if isinstance(value, str | os.PathLike):
                object.__setattr__(self, name, (value,))


def several(kind: type) -> list[str]:
    """Its fields that take any number of words."""
    hints = get_type_hints(kind)
    return [field.name for field in fields(kind) if getattr(hints[field.name], "__origin__", None) is Iterable]


@dataclass(frozen=True, kw_only=True)
class ReadOptions(_Options):
    """How checkpoints are read.

    Attributes:
        lenient: accept non-standard files that can be read in one way only, see :func:`quanterr.open_checkpoint`.
        cache: a folder that keeps what is read from stores for the next run.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        stop: when it is set, the run ends after what it is doing.
        command: the command line, for ``run`` in the result.
    """

    lenient: Annotated[
        bool,
        Option(
            "Accept non-standard files that can be read in one way only, and warn: bytes at the end, a header padded "
            "with other than spaces.",
            INPUTS,
        ),
    ] = False
    cache: Annotated[
        Path | None,
        Option(
            "Keep what is read from stores (https://, hf://, s3:// …) there, for the next run; without it nothing is.",
            INPUTS,
            "FOLDER",
        ),
    ] = None
    device: Annotated[str, Option("auto, cpu, cuda or cuda:N.", PERFORMANCE, "NAME")] = "auto"
    stop: threading.Event | None = None
    command: Iterable[str] = ()


@dataclass(frozen=True, kw_only=True)
class GateOptions(_Options):
    """By which rules a result is judged; see ``quanterr guide gates``.

    Attributes:
        thresholds: a file of rules, or the name of a preset.
        require: conditions that must hold, such as ``snr_db >= 28``.
        fail_if: conditions that must not hold; an undefined value fails them too.
        baseline: an older result, for ``delta``, ``rel_delta`` and ``ratio``.
        strict_warnings: whether rules of severity warn decide.
    """

    thresholds: Annotated[
        Path | None,
        Option("Rules: a TOML file, or a preset (fp8, int8, …) to start from.", GATES, "FILE", words="presets"),
    ] = None
    require: Annotated[
        Iterable[str],
        Option(
            "A condition that must hold, such as 'snr_db >= 28', of evaluate 'upper(kld_mean) <= 0.01'. Repeatable.",
            GATES,
            "CONDITION",
        ),
    ] = ()
    fail_if: Annotated[
        Iterable[str],
        Option(
            "A condition that must not hold, such as 'snr_db < 28'; an undefined value fails too. Repeatable.",
            GATES,
            "CONDITION",
        ),
    ] = ()
    baseline: Annotated[
        Path | None,
        Option(
            "An older JSON of its kind, for delta, rel_delta and ratio; without such a rule it asks for "
            "'delta(snr_db) >= -0.5', of evaluate 'ratio(kld_mean) <= 1.1'.",
            GATES,
            "FILE",
        ),
    ] = None
    strict_warnings: Annotated[bool, Option("Treat rules of severity warn as errors.", GATES)] = False


@dataclass(frozen=True, kw_only=True)
class ComparisonOptions(ReadOptions):
    """What a comparison does; the same for one candidate and for several.

    Attributes:
        layers: patterns as for ``--layers-to-compare``; without any, all.
        exclude: patterns of what is left out: ``exclude="norm"`` is ``layers="!norm"``.
        outlier_threshold: an element with a larger ``|e|`` is an outlier.
        importance: an importance matrix of llama.cpp; gives weighted_nmse and weighted_snr_db.
        sensitivity: a file of ``evaluate --sensitivity``; gives predicted_kld.
        resume: a journal of finished weights, taken over and written on; see comparison/journal.py.
        on_progress: called ten times per second with the progress.
        on_layer: called with each layer that differs as soon as it is compared, by a thread of the run.
    """

    layers: Annotated[
        Iterable[str],
        Option(
            "attn, mlp, experts, norm, embed, head …; a part of a name; a glob; re:REGEX; !PATTERN leaves out. "
            "Separated by commas, repeatable.",
            SELECTION,
            "PATTERN",
            "--layers-to-compare -l",
        ),
    ] = ()
    exclude: Annotated[
        Iterable[str],
        Option("Leave these out: the same patterns without !, which shells would read.", SELECTION, "PATTERN"),
    ] = ()
    outlier_threshold: Annotated[
        float, Option("An element with a larger |e| counts as an outlier.", METRICS, "NUMBER", least=0)
    ] = OUTLIER
    importance: Annotated[
        Path | None,
        Option(
            "An importance matrix of llama.cpp (.gguf or .dat): errors weighted by how much an input matters.",
            METRICS,
            "FILE",
        ),
    ] = None
    sensitivity: Annotated[
        Path | None,
        Option(
            "What evaluate --sensitivity wrote: predict the divergence that the errors cost.",
            METRICS,
            "FILE",
        ),
    ] = None
    resume: Annotated[
        Path | None,
        Option(
            "Keep finished weights in this journal, and reuse those already in it: for a run that may be killed.",
            PERFORMANCE,
            "FILE",
        ),
    ] = None
    on_progress: Callable[[Any], None] | None = None
    on_layer: Callable[[Any], None] | None = None


@dataclass(frozen=True, kw_only=True)
class CompareOptions(ComparisonOptions, GateOptions):
    """What :func:`quanterr.compare` does, and by which rules it judges."""


@dataclass(frozen=True, kw_only=True)
class KeepOptions(_Options):
    """Which layers to leave unquantized.

    Attributes:
        keep_original: as ``500MiB`` or ``3dB``: propose for each candidate layers to leave unquantized, so that they
            add no more bytes, or give so much more SNR.
    """

    keep_original: Annotated[
        str | None,
        Option(
            "Propose which layers to leave unquantized: they add at most 500MiB, none that gains little, or gain 3dB.",
            METRICS,
            "BYTES|dB",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class RankOptions(CompareOptions, KeepOptions):
    """What :func:`quanterr.rank` does.

    Attributes:
        against: recipes such as ``fp8_row``, by which the original is quantized on the fly.
    """

    against: Annotated[
        Iterable[str],
        Option("Recipes as candidates: fp8_row,int4_g128. The original is quantized on the fly.", INPUTS, "RECIPES"),
    ] = ()


@dataclass(frozen=True, kw_only=True)
class RecipeOptions(_Options):
    """What the original is quantized to, on the fly.

    Attributes:
        to: recipes, such as ``fp8_row`` or ``int4_g{32,64}``; without any, a preset.
        scales: calibrators, such as ``absmax,mse``: every recipe is made with each of them.
    """

    to: Annotated[
        Iterable[str],
        Option(
            "What to quantize to, separated by commas; int4_g{32,64} is two. Without it, a preset. Repeatable.",
            RECIPES,
            "RECIPES",
        ),
    ] = ()
    scales: Annotated[
        str | None, Option("Make each recipe with each of these: absmax, mse, p99.9, ema.", RECIPES, "CALIBRATORS")
    ] = None


@dataclass(frozen=True, kw_only=True)
class SweepOptions(CompareOptions, RecipeOptions, KeepOptions):
    """What :func:`quanterr.sweep` does.

    Attributes:
        sample: as ``10%``: read only so many of the rows of each weight, and say how near the numbers are.
        study: measure what outliers cost each recipe, and how much its error depends on its scales.
        hardware: as ``H100`` or ``900GB/s``: how many tokens a second its memory bandwidth allows.
    """

    sample: Annotated[
        str | None,
        Option(
            "Read a part of the rows of each weight, such as 10%; numbers are estimates with their margins.",
            RECIPES,
            "SHARE",
        ),
    ] = None
    study: Annotated[
        bool, Option("Measure what outliers cost each recipe, and how much its error depends on its scales.", RECIPES)
    ] = False
    hardware: Annotated[
        str | None,
        Option(
            "How many tokens a second the memory bandwidth of a machine allows: H100, 4090, M3-max, 900GB/s.",
            METRICS,
            "NAME|GB/s",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class PlanOptions(ComparisonOptions, RecipeOptions):
    """What :func:`quanterr.plan` does; exactly one of the four goals is given.

    Attributes:
        same_in: layers of which group have one recipe: those that runtimes fuse, a block, a role.
        size: of the whole checkpoint at most, in bytes or as ``6GiB``.
        bits: per weight of the planned layers at most, scales included.
        max_kld: the smallest size whose predicted KLD is no larger; needs ``sensitivity`` [nat].
        min_snr: the smallest size whose SNR over the planned layers is no lower [dB].
        verify: measure the plan on ``text``, quantized on the fly; with ``max_kld`` it is then the measured divergence
            that is no larger. Needs transformers.
        text: a text file, read through the original's tokenizer.json.
        context: tokens of a chunk of it; predictions of its second half are scored.
        chunks: how many chunks at most; all of them where it is None.
    """

    same_in: Annotated[SameIn, Option("Layers that must share a recipe.", RECIPES)] = "fused"
    size: Annotated[float | str | None, Option("Maximum checkpoint size, e.g. 6GiB.", GOAL, "BYTES")] = None
    bits: Annotated[
        float | None, Option("Maximum bits per weight of the planned layers, scales included.", GOAL, "NUMBER")
    ] = None
    max_kld: Annotated[
        float | None, Option("The smallest size whose predicted KLD is no larger; needs --sensitivity.", GOAL, "NAT")
    ] = None
    min_snr: Annotated[
        float | None, Option("The smallest size whose SNR over the planned layers is no lower.", GOAL, "dB")
    ] = None
    verify: Annotated[
        bool, Option("Measure the plan on --text; with --max-kld the measured KLD is no larger.", TEXT)
    ] = False
    text: Annotated[Path | None, Option(READ_TEXT, TEXT, "FILE")] = None
    context: Annotated[int, Option(CONTEXT, TEXT, "N", least=2)] = 512
    chunks: Annotated[int | None, Option(CHUNKS, TEXT, "N", least=1)] = None


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(ReadOptions, GateOptions):
    """What :func:`quanterr.evaluate` does.

    Attributes:
        text: text files, read through the original's tokenizer.json, each with a name if given as ``prose=a.txt``; and
        chat: files of conversations, through its chat template; see evaluation/conversations.py; or
        tokens: a safetensors file with one tensor of token ids; or
        inputs: recorded calls of a model of diffusers; see evaluation/calls.py.
        tasks: files of questions with choices; see evaluation/tasks.py.
        context: tokens of a chunk; predictions of its second half are scored.
        chunks: how many chunks at most; all of them where it is None.
        sensitivity: where to write how much each weight matters; predictions for the candidates go into the result.
        sensitivity_chunks: how many chunks that is measured on, all of them in memory.
        importance_out: where to write the second moments of inputs, as an importance matrix of llama.cpp (GGUF).
        saliency_out: where to write which columns and elements of each weight are the most salient (JSON).
        saliency: how many of them, in per cent.
        save_reference: a folder in which to keep all that is needed of the original to evaluate candidates without it.
        reference: such a folder in the place of the original; then every path is a candidate.
        activations: how inputs of quantized weights are rounded: as declared, none, or a scheme of recipes/inputs.py.
        kv: how keys and values are rounded: as declared, none, or fp8.
        split: evaluate the weights alone as well, of each candidate whose inputs are rounded.
        dtype: of the computation on both sides: float32, bfloat16 or float64.
        batch: chunks that run through a unit together.
        on_progress: called with (units done, units, micro-batches done, micro-batches).
    """

    text: Annotated[
        Iterable[Path],
        Option(f"{READ_TEXT} Repeatable, with names: prose=a.txt.", TEXT, "[NAME=]FILE"),
    ] = ()
    chat: Annotated[
        Iterable[Path],
        Option(
            "Conversations, a JSON line each, through the original's chat template; the assistant's tokens are scored. "
            "Repeatable.",
            TEXT,
            "[NAME=]FILE",
        ),
    ] = ()
    tokens: Annotated[
        Path | None,
        Option("Token ids instead: a safetensors file with one tensor of integers.", TEXT, "FILE"),
    ] = None
    inputs: Annotated[
        Path | None,
        Option(
            "Recorded calls of a denoiser of diffusers instead: a safetensors file with tensors CALL/ARGUMENT.",
            TEXT,
            "FILE",
        ),
    ] = None
    tasks: Annotated[
        Iterable[Path],
        Option(
            "Questions with choices, a JSON line each: question, choices, answer (its number). Repeatable.",
            TEXT,
            "FILE",
            "--task",
        ),
    ] = ()
    context: Annotated[int, Option(CONTEXT, TEXT, "N", least=2)] = 512
    chunks: Annotated[int | None, Option(CHUNKS, TEXT, "N", least=1)] = None
    sensitivity: Annotated[
        Path | None,
        Option(
            "Write how much each weight matters (JSON), and predict the divergence of the candidates.",
            OUTPUT,
            "FILE",
        ),
    ] = None
    sensitivity_chunks: Annotated[
        int,
        Option(
            "Number of chunks that the sensitivity is measured on; their activations are kept in memory.",
            TEXT,
            "N",
            least=1,
        ),
    ] = 4
    importance_out: Annotated[
        Path | None,
        Option("Write the second moments of inputs as an importance matrix of llama.cpp (GGUF).", OUTPUT, "FILE"),
    ] = None
    saliency_out: Annotated[
        Path | None,
        Option("Write the most salient columns and elements of each weight (JSON): Var(x) · w².", OUTPUT, "FILE"),
    ] = None
    saliency: Annotated[float, Option("Percentage of columns and elements to write.", OUTPUT, "PERCENT")] = 1.0
    save_reference: Annotated[
        Path | None,
        Option("Keep what is needed of the original to evaluate candidates without it.", OUTPUT, "FOLDER"),
    ] = None
    reference: Annotated[
        Path | None,
        Option(
            "What --save-reference kept, in the place of the original: then every path is a candidate.",
            INPUTS,
            "FOLDER",
        ),
    ] = None
    activations: Annotated[
        str,
        Option(
            "Round the inputs of quantized weights: declared (as the files say), none, or a scheme such as fp8_token, "
            "int8_token, nvfp4.",
            RUNTIME,
            "NAME",
        ),
    ] = "declared"
    kv: Annotated[str, Option("Round keys and values: declared, none, or fp8.", RUNTIME, "NAME")] = "declared"
    split: Annotated[
        bool, Option("Evaluate the weights alone as well, where inputs or keys and values are rounded.", RUNTIME)
    ] = False
    dtype: Annotated[str, Option("Compute dtype of both sides: float32, bfloat16 or float64.", PERFORMANCE, "NAME")] = (
        "float32"
    )
    batch: Annotated[int, Option("Chunks that run through a block together.", PERFORMANCE, "N", least=1)] = 2
    on_progress: Callable[[int, int, int, int], None] | None = None

    @property
    def with_moments(self) -> bool:
        """Whether second moments of inputs are asked for."""
        return self.importance_out is not None or self.saliency_out is not None


class ReadKeywords(TypedDict, total=False):
    """The fields of :class:`ReadOptions`."""

    lenient: bool
    cache: Path | None
    device: str
    stop: threading.Event | None
    command: Iterable[str]


class GateKeywords(TypedDict, total=False):
    """The fields of :class:`GateOptions`."""

    thresholds: Path | None
    require: Iterable[str]
    fail_if: Iterable[str]
    baseline: Path | None
    strict_warnings: bool


class ComparisonKeywords(ReadKeywords, total=False):
    """The fields of :class:`ComparisonOptions`."""

    layers: Iterable[str]
    exclude: Iterable[str]
    outlier_threshold: float
    importance: Path | None
    sensitivity: Path | None
    resume: Path | None
    on_progress: Callable[[Any], None] | None
    on_layer: Callable[[Any], None] | None


class CompareKeywords(ComparisonKeywords, GateKeywords, total=False):
    """The fields of :class:`CompareOptions`."""


class RankKeywords(CompareKeywords, total=False):
    """The fields of :class:`RankOptions`."""

    against: Iterable[str]
    keep_original: str | None


class SweepKeywords(CompareKeywords, total=False):
    """The fields of :class:`SweepOptions` but the recipes."""

    scales: str | None
    keep_original: str | None
    sample: str | None
    study: bool
    hardware: str | None


class PlanKeywords(ComparisonKeywords, total=False):
    """The fields of :class:`PlanOptions`."""

    to: Iterable[str]
    scales: str | None
    same_in: SameIn
    size: float | str | None
    bits: float | None
    max_kld: float | None
    min_snr: float | None
    verify: bool
    text: Path | None
    context: int
    chunks: int | None


class EvaluateKeywords(ReadKeywords, GateKeywords, total=False):
    """The fields of :class:`EvaluateOptions`."""

    text: Iterable[Path]
    chat: Iterable[Path]
    tokens: Path | None
    inputs: Path | None
    tasks: Iterable[Path]
    context: int
    chunks: int | None
    sensitivity: Path | None
    sensitivity_chunks: int
    importance_out: Path | None
    saliency_out: Path | None
    saliency: float
    save_reference: Path | None
    reference: Path | None
    activations: str
    kv: str
    split: bool
    dtype: str
    batch: int
    on_progress: Callable[[int, int, int, int], None] | None
