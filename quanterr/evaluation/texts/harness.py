"""A model for lm-evaluation-harness that streams weights of any format that quanterr reads.

    import lm_eval
    from quanterr.lm_eval import StreamedModel
    lm_eval.simple_evaluate(model=StreamedModel("original/", "model-Q4_K_M.gguf"), tasks=["arc_easy"])

Every call reads the whole model once. Tasks that score choices need only one call; tasks that generate are refused.

Interface: EleutherAI/lm-evaluation-harness, lm_eval/api/model.py, class LM.
"""

import os
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol

from quanterr.checkpoints import open_checkpoint, open_checkpoints
from quanterr.errors import UsageError
from quanterr.evaluation.models.building import DTYPES, Architecture, read_config
from quanterr.evaluation.models.folder import model_folder
from quanterr.evaluation.models.gguf_original import as_original
from quanterr.evaluation.models.weights import Candidate, OriginalWeights
from quanterr.evaluation.running.linear import LinearLayers
from quanterr.evaluation.running.rounding import DECLARED, check_schemes
from quanterr.evaluation.running.workload import CAUSAL
from quanterr.evaluation.texts.tasks import Likelihood, Scored, loglikelihoods, sequence
from quanterr.evaluation.texts.tokens import tokenizer_of
from quanterr.tensors.devices import pick_device

StrPath = str | os.PathLike[str]
DEFAULT_LENGTH = 2048  # tokens, if the config names no context length


# The harness's base class, or a plain class if the harness is not installed.
BASE: Any = import_module("lm_eval.api.model").LM if find_spec("lm_eval") else object


class Request(Protocol):
    """A request of the harness, an ``Instance``."""

    @property
    def args(self) -> tuple[str, ...]:
        """The texts: a context and its continuation, or one text."""


class StreamedModel(BASE):  # type: ignore[misc]
    """The original's model with the weights of ``quantized``, or with its own if there is none."""

    def __init__(
        self,
        original: StrPath,
        quantized: StrPath | None = None,
        dtype: str = "float32",
        device: str = "auto",
        activations: str = DECLARED,
        kv: str = DECLARED,
    ) -> None:
        """Read the config and the tokenizer; inputs, keys and values are rounded as in ``evaluate``.

        A declared scheme that is not emulated raises a :class:`UserWarning`.

        Raises:
            UsageError: transformers is missing, a dtype or scheme is unknown, or the model is not causal.
            CheckpointError: an input is missing or damaged.
            ResourceError: the device is not available.
        """
        super().__init__()
        if dtype not in DTYPES:
            raise UsageError(f"dtype {dtype}: choose one of {', '.join(DTYPES)}")
        check_schemes(activations, [kv])
        self._original, self._quantized = original, quantized
        self._activations, self._kv, self._dtype = activations, kv, dtype
        with open_checkpoint(original) as checkpoint, model_folder(checkpoint) as folder:
            self._architecture = Architecture(read_config(folder), DTYPES[dtype], pick_device(device))
            self._tokenizer = tokenizer_of(folder)
        if self._architecture.workload.kind != CAUSAL.kind:
            model_type = self._architecture.config.model_type
            raise UsageError(f"tasks work only with models that predict the next token; {model_type} does not")

    def loglikelihood(self, requests: Sequence[Request], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return for each request Σ ln p of the continuation, and whether greedy decoding gives it."""
        asked = [sequence(self._tokenizer, *request.args) for request in requests]
        return [(likelihood.total, likelihood.is_greedy) for likelihood in self._score(asked)]

    def loglikelihood_rolling(self, requests: Sequence[Request], disable_tqdm: bool = False) -> list[float]:
        """Return for each request Σ ln p of its text after the first token, in chunks of the model's context length."""
        length = getattr(self._architecture.config, "max_position_embeddings", None) or DEFAULT_LENGTH
        parts: list[tuple[int, Scored]] = []
        for n, request in enumerate(requests):
            ids = self._tokenizer(request.args[0])["input_ids"]
            for first in range(0, max(len(ids) - 1, 1), length - 1):
                piece = tuple(ids[first : first + length])
                parts.append((n, Scored(piece, len(piece) - 1)))
        totals = [0.0] * len(requests)
        for (n, _), likelihood in zip(parts, self._score([part for _, part in parts]), strict=True):
            totals[n] += likelihood.total
        return totals

    def generate_until(self, requests: Sequence[Request], disable_tqdm: bool = False) -> list[str]:
        """Raise UsageError, as the model would be read again for each token.

        Raises:
            UsageError: always.
        """
        raise UsageError("a streamed model scores texts and does not generate: choose log-likelihood tasks")

    def _score(self, asked: Sequence[Scored]) -> list[Likelihood]:
        paths = [self._original] if self._quantized is None else [self._original, self._quantized]
        with LinearLayers(self._dtype), open_checkpoints(paths) as [opened, *others]:
            original = as_original(opened, None)
            originals = OriginalWeights(original, self._architecture.device)
            if not others:
                return loglikelihoods(self._architecture, list(originals.weights), originals.get, asked)
            candidate = Candidate(originals, others[0], self._activations, self._kv)
            rounding = candidate.rounding
            scores = loglikelihoods(self._architecture, candidate.names, candidate.get, asked, rounding)
            for why in rounding.reasons():
                warnings.warn(why, stacklevel=2)
            return scores
