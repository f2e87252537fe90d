"""The Fisher information of each weight of a language model: how much errors change the predicted probabilities.

With labels drawn from the model's own distribution, an error e of a weight causes the divergence

    KLD ≈ ½ Σ_ij e_ij² G_ij² / scored        G = ∂(-Σ ln p(label)) / ∂W

summed over chunks. A token to which many later tokens attend contributes to the gradient of each of their labels. The
formula ranks weights; as a prediction it holds up to about 0.1 nat.

Source: Kunstner, Balles, Hennig, Limitations of the Empirical Fisher Approximation for Natural Gradient Descent (2019),
section 2: labels must be drawn, as the labels of the text would give another matrix.
"""

from math import sqrt
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F  # noqa: N812 - its usual name

if TYPE_CHECKING:
    from transformers.utils import ModelOutput

SEED = 11  # seed of the random labels


class Fisher:
    """The divergence of the predictions from position ``first`` of each chunk on, with labels drawn from the model."""

    def __init__(self, first: int) -> None:
        """Seed the generator that draws the labels."""
        self._first, self._generator = first, torch.Generator().manual_seed(SEED)

    def backward(self, number: int, result: "ModelOutput") -> int:
        """Compute the gradients of -√½ ln p of labels drawn from the model; return the number of labels."""
        with torch.enable_grad():
            rows = result.logits[:, self._first : -1].flatten(0, 1)
            drawn = torch.multinomial(rows.detach().softmax(-1).cpu(), 1, generator=self._generator)  # on any device
            labels = drawn[:, 0].to(rows.device)
            loss = sqrt(0.5) * F.cross_entropy(rows, labels, reduction="sum")
            torch.autograd.backward(loss)
        return len(labels)
