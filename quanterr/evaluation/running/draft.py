"""Other models as drafts of the original, as in speculative decoding: they have the same tokens, but another config.

Only distributions over the same tokens can be compared. A draft's head may have more or fewer rows that stand for no
token; such rows are left out on both sides, as runtimes do.
"""

from collections.abc import Mapping
from threading import Event
from types import SimpleNamespace
from typing import Any, NamedTuple

from quanterr.checkpoints import Checkpoint
from quanterr.errors import UsageError
from quanterr.evaluation.models.building import Architecture, read_config
from quanterr.evaluation.models.folder import model_folder
from quanterr.evaluation.models.weights import Candidate, OriginalWeights
from quanterr.evaluation.preparation import Prepared
from quanterr.evaluation.running.batches import Batch
from quanterr.evaluation.running.candidate import CandidateRun, Step
from quanterr.evaluation.running.logits import head_of
from quanterr.evaluation.running.model_run import OnProgress, take_turns
from quanterr.evaluation.running.rounding import DECLARED
from quanterr.evaluation.running.stream import open_stream
from quanterr.evaluation.running.workload import CAUSAL
from quanterr.evaluation.texts.tokens import read_vocabulary
from quanterr.options import EvaluateOptions
from quanterr.util.text import display, quote

DRAFT = "--draft"
UNCHECKED = "neither side has a tokenizer.json: whether the same ids are the same tokens was not checked"
NO_STEP = Step(None, {}, lambda: None)  # a draft has no unit of the original to be compared with


class Draft(NamedTuple):
    """A draft: its model, its weights in the form of a candidate, and the number of tokens that both heads have."""

    architecture: Architecture
    candidate: Candidate
    vocabulary: int
    doubts: list[str]


def read_draft(draft: Checkpoint, original: Checkpoint, prepared: Prepared, chosen: EvaluateOptions) -> Draft:
    """Read the config and recognize the weights of a draft, a folder with config.json in any format.

    Raises:
        UsageError: the draft does not predict the next token, or has another vocabulary.
        CheckpointError: its config.json is missing, or transformers lacks the model.
    """
    architecture = prepared.architecture
    assert isinstance(architecture, Architecture)  # noqa: S101 - prepare() takes drafts of such models only
    where = f"{DRAFT} {display(draft.path)}"
    with model_folder(draft) as folder, model_folder(original) as other:
        draft_architecture = Architecture(read_config(folder), architecture.dtype, architecture.device)
        if draft_architecture.workload is not CAUSAL:
            model_type = draft_architecture.config.model_type
            raise UsageError(f"{where}: works only with models that predict the next token; {model_type} does not")
        tokens, known = read_vocabulary(folder), read_vocabulary(other)
    if any(text.chunks.media for text in prepared.texts):
        raise UsageError(f"{where}: conversations of --chat have images or sounds, which a draft does not take")
    sizes = [each.config.get_text_config().vocab_size for each in (draft_architecture, architecture)]
    if (tokens is None) != (known is None):
        lacking = folder if tokens is None else other
        raise UsageError(f"{where}: {lacking.locate('tokenizer.json')} is missing: are both vocabularies the same?")
    if tokens is None and sizes[0] != sizes[1]:
        raise UsageError(f"{where}: another vocabulary: {sizes[0]:,} tokens, the original has {sizes[1]:,}")
    if tokens is not None and known is not None:
        _check_same(where, tokens, known)
    highest = max(int(text.chunks.raw.max()) for text in prepared.texts)
    if max([highest, *(tokens or {})]) >= min(sizes):
        raise UsageError(f"{where}: heads of {sizes[0]:,} and {sizes[1]:,} rows: one lacks tokens of the vocabulary")
    if len(kv := list(chosen.kv) or [DECLARED]) > 1:
        raise UsageError(f"{where}: give --kv only once, as a draft is evaluated only once")
    candidate = Candidate(
        OriginalWeights(draft, draft_architecture.device), draft, chosen.activations, kv[0], undo=False
    )
    return Draft(draft_architecture, candidate, min(sizes), [] if tokens is not None else [UNCHECKED])


def _check_same(where: str, tokens: dict[int, str], known: dict[int, str]) -> None:
    """Check that both tokenizers have the same tokens.

    Raises:
        UsageError: a token differs.
    """
    for n in sorted(tokens.keys() | known.keys()):
        if tokens.get(n) != known.get(n):
            token, token_of_original = (display(quote(each[n])) if n in each else "none" for each in (tokens, known))
            raise UsageError(
                f"{where}: another vocabulary: token {n} is {token}, the original's is {token_of_original}"
            )


class DraftRun(CandidateRun):
    """The run of a draft up to its head, which then computes logits together with the original's head."""

    def __init__(self, draft: Draft, batches: Mapping[int, Batch]) -> None:
        """Build the model.

        Raises:
            CheckpointError: the draft lacks a weight of its model, or has it in another shape.
            UsageError: the model has no head of its own.
        """
        candidate = draft.candidate
        stream = open_stream(draft.architecture, candidate.originals, candidate.names, candidate.get, batches)
        super().__init__(candidate, stream, draft.architecture.workload, batches)
        self._vocabulary, head = draft.vocabulary, head_of(stream.model, stream.units)
        if head is None:
            raise UsageError(f"{DRAFT} {display(candidate.checkpoint.path)}: {type(stream.model).__name__} has no head")
        self._head = head

    def run_to_head(self, stop: Event | None, on_progress: OnProgress | None) -> None:
        """Run all units except the head for every micro-batch, and load the head.

        Raises:
            Interrupted: ``stop`` was set.
        """
        for batch in take_turns(self.stream, self.load, self.free, stop, on_progress, until=self._head):
            self.follow(batch, NO_STEP)
        self.load(self._head)

    def follow(self, batch: int, step: Step) -> None:
        """Run the loaded unit for a micro-batch; the head once the original's forward has ended."""
        if self.unit is not self._head or step.result() is not None:
            super().follow(batch, NO_STEP._replace(result=step.result))

    def begin(self, batch: int) -> bool:
        """Prepare the logits of some positions at a time.

        Raises:
            UsageError: the logits do not follow from the inputs of the head.
        """
        if not super().begin(batch):
            name = type(self.stream.model).__name__
            raise UsageError(f"{DRAFT}: {name}'s logits are not what its head makes of its inputs: lower --context")
        return True

    def measure(self, batch: int, base: Any, result: Any) -> bool:
        """Measure the logits of tokens that both heads have."""
        return super().measure(batch, self._cut(base), self._cut(result))

    def measure_piece(self, batch: int, base: Any, result: Any, first: int) -> bool:
        """Measure the logits of tokens that both heads have."""
        return super().measure_piece(batch, self._cut(base), self._cut(result), first)

    def _cut(self, output: Any) -> SimpleNamespace:
        """Return logits without the rows that stand for no token."""
        return SimpleNamespace(logits=output.logits[..., : self._vocabulary])
