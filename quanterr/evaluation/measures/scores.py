"""Perplexity, KL divergence and agreement as llama.cpp defines them (tools/perplexity/perplexity.cpp), in float64.

``acceptance`` is 1 - D_LK of Leviathan et al., Fast Inference from Transformers via Speculative Decoding (2023), 3.2,
for the candidate as draft.

llama.cpp stores the base's logits in 16 bits; here, logits are not rounded. Logarithms are natural. A standard error
assumes independent values, but tokens of the same chunk depend on each other: ``*_chunk_se`` is the standard error
that follows from the means of chunks.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import exp, inf, sqrt
from typing import NamedTuple

import torch
from torch import Tensor

from quanterr.documents.evaluation.model import PositionScores
from quanterr.evaluation.measures.hidden_states import are_finite
from quanterr.util.strict_json import JsonObject

# Number of logits of each side that are scored at once on the CPU, so that they stay in its cache.
SLAB_LOGITS = 1 << 18
DEVICE_SLAB_LOGITS = 1 << 22  # number of logits of each side that are scored at once on another device
TOP_CHOICES = 5
# Minimum number of chunks for a bootstrap, and number of draws, which give a standard error within 7 %.
MIN_BOOTSTRAP_CHUNKS, BOOTSTRAP_DRAWS = 8, 100
MIN_CONFIDENCE = 0.5  # a flip counts as confident if the original's first choice had a larger probability

# Columns of the numbers kept for each scored token.
NLL, NLL_Q, KLD, SAME_TOP, OVERLAP, CONFIDENCE, P, P_Q = range(8)
CONFIDENCE_Q, FIRST, FIRST_Q, TARGET, POSITION, ACCEPTED = range(8, 14)
MAX_SPANS = 16  # maximum number of spans of positions
KEPT_PREDICTIONS = 50  # number of worst predictions that are kept with the tokens that both sides predicted


class Prediction(NamedTuple):
    """The prediction of one token: its place, the actual token, and the most probable token of each side."""

    chunk: int
    position: int
    kld: float
    target: int
    p: float
    p_q: float
    first: int
    confidence: float
    first_q: int
    confidence_q: float


@dataclass
class Scores:
    """The scored predictions of a candidate and the original: for each chunk, columns with one value per token."""

    columns: dict[int, Tensor] = field(default_factory=dict)  # (14, tokens) float64 of each chunk, by its number

    def add(self, chunk: int, base: Tensor, other: Tensor, targets: Tensor, positions: Tensor) -> bool:
        """Score a chunk, or a further part: logits of both sides (T, V), the next tokens (T,), their positions (T,).

        Return whether all are finite.
        """
        slabs, finite = [self.columns[chunk]] if chunk in self.columns else [], True
        step = max((SLAB_LOGITS if base.device.type == "cpu" else DEVICE_SLAB_LOGITS) // base.shape[1], 1)
        for begin in range(0, len(targets), step):
            rows = slice(begin, begin + step)
            x, y, target = base[rows], other[rows], targets[rows, None].to(base.device)
            finite = finite and are_finite(x) and are_finite(y)
            log_p, log_q = (each.log_softmax(-1, dtype=torch.float64) for each in (x, y))
            p, q = log_p.exp(), log_q.exp()
            nll, nll_q = -log_p.gather(1, target)[:, 0], -log_q.gather(1, target)[:, 0]
            top, top_q = x.topk(min(TOP_CHOICES, x.shape[1])).indices, y.topk(min(TOP_CHOICES, y.shape[1])).indices
            overlap = (top[:, :, None] == top_q[:, None, :]).any(-1).double().mean(-1)
            first, first_q = x.argmax(-1, keepdim=True), y.argmax(-1, keepdim=True)
            same = (first == first_q).double()
            confidence, confidence_q = p.gather(1, first), q.gather(1, first_q)
            accepted = torch.minimum(p, q).sum(-1)
            kld = log_p.sub_(log_q).mul_(p).nan_to_num_(nan=float("nan")).sum(-1)
            of_both = [nll, nll_q, kld, same, overlap, confidence, (-nll).exp(), (-nll_q).exp()]
            of_both += [confidence_q, first, first_q, target, positions[rows].to(base.device), accepted]
            slabs.append(torch.stack([each.double().view(-1) for each in of_both]).cpu())
        self.columns[chunk] = torch.cat(slabs, 1)
        return finite

    def result(self) -> JsonObject:
        """Return all numbers; see documents/evaluation/model.py."""
        rows = torch.cat(self._in_order(), 1)
        n = rows.shape[1]
        nll, nll_q, kld, same, overlap, confidence, p, p_q = rows[:CONFIDENCE_Q]
        base, base_se = _mean(nll)
        mean, mean_se = _mean(nll_q)
        covariance = float(((nll - nll.mean()) * (nll_q - nll_q.mean())).mean()) / max(n - 1, 1)
        ratio = mean - base
        top, delta = float(same.mean()), p_q - p
        kld_mean, kld_se = _mean(kld)
        quantiles = torch.quantile(kld, torch.tensor([0.5, 0.9, 0.95, 0.99, 0.999], dtype=torch.float64)).tolist()
        square, square_se = _mean(delta.square())
        acceptance, acceptance_se = _mean(rows[ACCEPTED])
        rms = sqrt(square)
        return {
            "tokens": n,
            "chunks": len(self.columns),
            "ppl_original": exp(base),
            "ppl_original_se": exp(base) * base_se,
            "ppl": exp(mean),
            "ppl_se": exp(mean) * mean_se,
            "ln_ppl_ratio": ratio,
            "ln_ppl_ratio_se": sqrt(max(base_se**2 + mean_se**2 - 2 * covariance, 0.0)),
            "ln_ppl_ratio_chunk_se": self._chunk_se(NLL_Q, NLL),
            "ppl_ratio": exp(ratio),
            "kld_mean": kld_mean,
            "kld_mean_se": kld_se,
            "kld_mean_chunk_se": self._chunk_se(KLD),
            "kld_chunks": [float(columns[KLD].mean()) for columns in self._in_order()],
            "kld_p99_se": self._quantile_se(0.99),
            **dict(zip(("kld_median", "kld_p90", "kld_p95", "kld_p99", "kld_p99_9"), quantiles, strict=True)),
            "kld_max": float(kld.max()),
            "top1": top,
            "top1_se": sqrt(top * (1 - top) / max(n - 1, 1)),
            "top5_overlap": float(overlap.mean()),
            "delta_p_mean": float(delta.mean()),
            "delta_p_mean_se": _mean(delta)[1],
            "delta_p_rms": rms,
            "delta_p_rms_se": 0.5 / rms * square_se if rms else 0.0,
            "confident_flips": float(((same == 0) & (confidence > MIN_CONFIDENCE)).double().mean()),
            "acceptance": acceptance,
            "acceptance_se": acceptance_se,
            "acceptance_chunk_se": self._chunk_se(ACCEPTED),
        }

    def by_position(self) -> list[PositionScores]:
        """Return the mean divergence in up to ``MAX_SPANS`` spans of positions of the same width."""
        rows = torch.cat(self._in_order(), 1)
        first, last = (int(end) for end in rows[POSITION].aminmax())
        width = -(-(last + 1 - first) // MAX_SPANS)
        span = (rows[POSITION].long() - first) // width
        spans = []
        for n in sorted(set(span.tolist())):
            klds = rows[KLD][span == n]
            end = min(first + (n + 1) * width - 1, last)
            spans.append(PositionScores(first + n * width, end, float(klds.mean()), len(klds)))
        return spans

    def worst(self) -> list[Prediction]:
        """Return the ``KEPT_PREDICTIONS`` predictions with the largest divergence, the largest first."""
        numbers = sorted(self.columns)
        chunks = torch.cat([torch.full((self.columns[n].shape[1],), n) for n in numbers])
        rows = torch.cat(self._in_order(), 1)
        order = rows[KLD].nan_to_num(nan=-inf).sort(descending=True, stable=True).indices[:KEPT_PREDICTIONS]
        predictions = []
        for n in order.tolist():
            row = rows[:, n]
            position, target, first, first_q = (int(row[at]) for at in (POSITION, TARGET, FIRST, FIRST_Q))
            kld, p, p_q, confidence, confidence_q = (float(row[at]) for at in (KLD, P, P_Q, CONFIDENCE, CONFIDENCE_Q))
            fields = (position, kld, target, p, p_q, first, confidence, first_q, confidence_q)
            predictions.append(Prediction(int(chunks[n]), *fields))
        return predictions

    def among(self, chunks: Iterable[int]) -> "Scores":
        """Return the scores of these chunks only."""
        return Scores({number: self.columns[number] for number in chunks})

    def _in_order(self) -> list[Tensor]:
        return [columns for _, columns in sorted(self.columns.items())]

    def _chunk_se(self, column: int, less: int | None = None) -> float | None:
        """Return the standard error of a mean over tokens from chunk means; None for a single chunk.

        Longer chunks, which conversations produce, have more weight: Cochran, Sampling Techniques, 3rd edition, 6.4.
        """
        values = [c[column] if less is None else c[column] - c[less] for c in self._in_order()]
        if len(values) < 2:
            return None
        sizes = torch.tensor([len(each) for each in values], dtype=torch.float64)
        means = torch.stack([each.mean() for each in values])
        whole = float((means * sizes).sum() / sizes.sum())
        apart = (means - whole) * sizes / sizes.mean()
        return sqrt(float(apart.square().sum()) / (len(values) - 1) / len(values))

    def _quantile_se(self, q: float) -> float | None:
        """Return the bootstrap standard error over chunks of a quantile of the divergence; None for too few chunks."""
        chunks = [columns[KLD] for columns in self._in_order()]
        if len(chunks) < MIN_BOOTSTRAP_CHUNKS:
            return None
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randint(len(chunks), (BOOTSTRAP_DRAWS, len(chunks)), generator=generator).tolist()
        return float(torch.stack([torch.cat([chunks[n] for n in row]).quantile(q) for row in drawn]).std())


def _mean(values: Tensor) -> tuple[float, float]:
    """Return mean and standard error as llama.cpp's mean_and_uncertainty: the biased variance over n - 1."""
    n, mean = len(values), float(values.mean())
    variance = float((values - mean).square().mean())
    return mean, sqrt(variance / (n - 1)) if n > 1 else 0.0
