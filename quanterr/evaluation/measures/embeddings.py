"""The error of an encoder's embeddings; the embedding of a chunk is the mean of its last hidden states."""

from dataclasses import dataclass, field
from math import isfinite

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - its usual name

from quanterr.documents.evaluation.model import Embeddings
from quanterr.evaluation.measures.hidden_states import HiddenError


@dataclass
class Embedded:
    """The embeddings of both sides, and the error of the hidden states."""

    of_x: dict[int, Tensor] = field(default_factory=dict)  # by micro-batch
    of_y: dict[int, Tensor] = field(default_factory=dict)
    error: HiddenError = field(default_factory=HiddenError)

    @property
    def chunks(self) -> int:
        """The number of chunks."""
        return sum(map(len, self.of_x.values()))

    def add(self, batch: int, x: Tensor, y: Tensor) -> None:
        """Add the last hidden states of both sides, (chunks, tokens, d)."""
        self.of_x[batch], self.of_y[batch] = (each.double().mean(1).cpu() for each in (x, y))
        self.error.add((0, batch), x, y)

    def result(self) -> Embeddings:
        """Return mean and minimum cosine between the embeddings of both sides, rank correlation and relative error."""
        x, y = (torch.cat([each for _, each in sorted(side.items())]) for side in (self.of_x, self.of_y))
        cosines = F.cosine_similarity(x, y, -1)
        places = torch.triu_indices(len(x), len(x), 1)
        near_x, near_y = (F.cosine_similarity(each[places[0]], each[places[1]], -1) for each in (x, y))
        correlation = spearman(near_x, near_y) if len(near_x) > 1 else None
        return Embeddings(
            chunks=len(x),
            cosine_mean=float(cosines.mean()),
            cosine_min=float(cosines.min()),
            rank_correlation=correlation,
            relative_error=self.error.row()["relative_error"],
        )


def spearman(x: Tensor, y: Tensor) -> float | None:
    """Return Spearman's rank correlation; None if one side is constant."""
    ranks = torch.stack([_compute_ranks(each) for each in (x, y)])
    correlation = float(torch.corrcoef(ranks)[0, 1])
    return correlation if isfinite(correlation) else None


def _compute_ranks(values: Tensor) -> Tensor:
    """Return ranks from 1; equal values share their mean rank."""
    _, which, counts = torch.unique(values, return_inverse=True, return_counts=True)
    last: Tensor = counts.cumsum(0).double()
    middle: Tensor = last - (counts.double() - 1) / 2
    return middle[which]
