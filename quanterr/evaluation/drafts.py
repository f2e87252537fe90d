"""Other models as drafts of the original, as speculative decoding runs them: same tokens, another config.

Only distributions over the same tokens can be compared. A runtime may use a draft whose head has more or fewer rows
that stand for no token: these rows take no part on either side.
"""

from quanterr.checkpoints import Checkpoint
from quanterr.errors import UsageError
from quanterr.evaluation.models.building import Architecture, read_config
from quanterr.evaluation.models.folder import model_folder
from quanterr.evaluation.models.sides import Candidate, Sides
from quanterr.evaluation.preparation import Prepared
from quanterr.evaluation.running.lockstep import DRAFT, Draft
from quanterr.evaluation.running.rounding import DECLARED
from quanterr.evaluation.running.workload import CAUSAL
from quanterr.evaluation.texts.tokens import read_vocabulary
from quanterr.options import EvaluateOptions
from quanterr.util.text import display, quote

UNCHECKED = "neither side has a tokenizer.json: whether the same ids are the same tokens was not checked"


def read_draft(draft: Checkpoint, original: Checkpoint, prepared: Prepared, chosen: EvaluateOptions) -> Draft:
    """Read the config and recognize the weights of a draft, a folder with config.json in any format.

    Raises:
        UsageError: it does not continue a text, or has another vocabulary.
        CheckpointError: its config.json is missing, or transformers lacks the model.
    """
    architecture = prepared.architecture
    assert isinstance(architecture, Architecture)  # noqa: S101 - prepare() takes drafts of such models only
    where = f"{DRAFT} {display(draft.path)}"
    with model_folder(draft) as folder, model_folder(original) as other:
        own = Architecture(read_config(folder), architecture.dtype, architecture.device)
        if own.workload is not CAUSAL:
            raise UsageError(f"{where}: for models that continue a text; {own.config.model_type} does not")
        tokens, known = read_vocabulary(folder), read_vocabulary(other)
    if any(text.chunks.media for text in prepared.texts):
        raise UsageError(f"{where}: conversations of --chat have images or sounds, which a draft does not take")
    sizes = [each.config.get_text_config().vocab_size for each in (own, architecture)]
    if (tokens is None) != (known is None):
        lacking = folder if tokens is None else other
        raise UsageError(f"{where}: {lacking.named('tokenizer.json')} is missing: are both vocabularies the same?")
    if tokens is None and sizes[0] != sizes[1]:
        raise UsageError(f"{where}: another vocabulary: {sizes[0]:,} tokens, the original has {sizes[1]:,}")
    if tokens is not None and known is not None:
        _check_same(where, tokens, known)
    most = max(int(text.chunks.raw.max()) for text in prepared.texts)
    if max([most, *(tokens or {})]) >= min(sizes):
        raise UsageError(f"{where}: heads of {sizes[0]:,} and {sizes[1]:,} rows: one lacks tokens of the vocabulary")
    if len(kv := list(chosen.kv) or [DECLARED]) > 1:
        raise UsageError(f"{where}: give --kv once: a draft has one row")
    candidate = Candidate(Sides(draft, own.device), draft, chosen.activations, kv[0], undo=False)
    return Draft(own, candidate, min(sizes), [] if tokens is not None else [UNCHECKED])


def _check_same(where: str, tokens: dict[int, str], known: dict[int, str]) -> None:
    """Check that both tokenizers have the same tokens.

    Raises:
        UsageError: they do not.
    """
    for n in sorted(tokens.keys() | known.keys()):
        if tokens.get(n) != known.get(n):
            one, other = (display(quote(each[n])) if n in each else "none" for each in (tokens, known))
            raise UsageError(f"{where}: another vocabulary: token {n} is {one}, the original's is {other}")
