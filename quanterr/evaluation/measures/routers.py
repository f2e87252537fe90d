"""The agreement of routers: how often both sides choose the same experts for a token.

A router of transformers returns its logits (tokens, experts), weights, and the chosen experts (tokens, k); Llama 4's
returns weights and logits, of which it takes the k largest.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from quanterr.documents.evaluation.model import RouterAgreement

ROUTER = "Router"  # suffix of their class names


class Routing(NamedTuple):
    """A router's output for some tokens."""

    logits: Tensor  # (tokens, experts)
    chosen: Tensor  # (tokens, k), in the order of the experts


class Agreement(NamedTuple):
    """The agreement of two routers on some tokens, as sums."""

    tokens: int
    same: int  # tokens with the same experts
    kld: float  # Σ KL(original || candidate) [nat]


class RouterWatch:
    """Hooks on a model's routers, which keep their outputs until they are taken."""

    def __init__(self, model: nn.Module) -> None:
        """Watch every router of the model."""
        self._seen: dict[str, Routing] = {}
        for name, module in model.named_modules():
            if type(module).__name__.endswith(ROUTER):
                module.register_forward_hook(partial(self._keep, name))

    def _keep(self, name: str, module: nn.Module, _: object, output: object) -> None:
        routing = _find_routing(module, output)
        if routing is not None:
            self._seen[name] = routing

    def take(self) -> dict[str, Routing]:
        """Return the outputs since the last call, by the routers' names in the model."""
        seen, self._seen = self._seen, {}
        return seen


def _find_routing(module: nn.Module, output: object) -> Routing | None:
    """Return the routing in a router's output; None if its layout is unknown."""
    parts = [part for part in output if isinstance(part, Tensor)] if isinstance(output, tuple) else []
    chosen = next((part for part in parts if not part.is_floating_point()), None)
    floats = [part.flatten(0, -2) for part in parts if part.is_floating_point() and part.dim() > 1]
    if not floats:
        return None
    logits, k = (floats[-1] if chosen is None else floats[0]), getattr(module, "top_k", None)
    if chosen is None and isinstance(k, int):
        chosen = logits.topk(k, -1).indices
    if chosen is None or chosen.shape[-1] > logits.shape[-1]:
        return None
    return Routing(logits, chosen.flatten(0, -2).sort(-1).values)


@dataclass
class Routers:
    """The agreement of a candidate's routers with the original's, by router and micro-batch."""

    parts: dict[tuple[str, int], Agreement] = field(default_factory=dict)
    # Number of experts, and of those that a token is sent to.
    experts: dict[str, tuple[int, int]] = field(default_factory=dict)

    def add(self, batch: int, base: Mapping[str, Routing], other: Mapping[str, Routing]) -> None:
        """Compare the outputs of both sides' routers for a micro-batch."""
        for name in base.keys() & other.keys():
            x, y = base[name], other[name]
            log_p, log_q = (each.logits.double().log_softmax(-1) for each in (x, y))
            kld = float((log_p.exp() * (log_p - log_q)).sum())
            same = int((x.chosen == y.chosen).all(-1).sum())
            self.parts[name, batch] = Agreement(len(x.logits), same, kld)
            self.experts[name] = x.logits.shape[-1], x.chosen.shape[-1]

    def merge(self, other: "Routers") -> None:
        """Add the sums over other micro-batches."""
        self.parts |= other.parts
        self.experts |= other.experts

    def rows(self) -> list[RouterAgreement]:
        """Return the agreement of each router, in the order of the model."""
        agreements = []
        for name, (experts, k) in self.experts.items():
            parts = [part for (router, _), part in sorted(self.parts.items()) if router == name]
            tokens = sum(part.tokens for part in parts)
            kld = sum(part.kld for part in parts) / tokens
            same = sum(part.same for part in parts) / tokens
            finite = torch.isfinite(torch.tensor(kld)).item()
            agreements.append(RouterAgreement(name, experts, k, tokens, same, kld if finite else None))
        return agreements
