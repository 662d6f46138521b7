"""Distillation objectives: per-position losses on a draft's logits, as plain functions.

    ce        cross-entropy with the teacher's greedy token: sequence-level distillation, Kim and
              Rush (arXiv:1606.07947)
    topk-kl   KL(teacher ‖ draft), Hinton et al. (arXiv:1503.02531), on the stored top-k
    topk-tv   total variation distance, DistillSpec (arXiv:2310.08461): 1 - TV is the acceptance
              rate of speculative sampling (arXiv:2211.17192, theorem 3.5)

The teacher's distribution is stored as its k best log-probabilities. What is missing of 1 is one
more outcome, "the rest", on both sides: the loss is that of the distributions with all other tokens
merged, a lower bound of the true one, and a draft that puts mass outside the top k is made to pay.

Every function takes logits (n, vocab) float32 and a `Labels`, and returns (n,) float32.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# Keeps log(1 - x) and its gradient finite where a distribution has no rest; below what float32
# resolves beside 1.
SMALLEST_REST = 1e-6


class Labels(NamedTuple):
    """What the teacher said at n positions.

    targets: (n,) int64, its greedy token; top_ids: (n, k) int64 and top_logprobs: (n, k) float32,
    natural log, or None where the label set has no log-probabilities.
    """

    targets: Tensor
    top_ids: Tensor | None = None
    top_logprobs: Tensor | None = None

    def split(self, size: int) -> list[Labels]:
        """In chunks of `size` positions."""
        parts = [t.split(size) if t is not None else None for t in self]
        return [
            Labels(*(p[i] if p is not None else None for p in parts)) for i in range(len(parts[0]))
        ]


Objective = Callable[[Tensor, Labels], Tensor]


def cross_entropy(logits: Tensor, labels: Labels) -> Tensor:
    """-log q(teacher's token), nats."""
    return F.cross_entropy(logits, labels.targets, reduction="none")


def with_rest(logprobs: Tensor) -> Tensor:
    """(n, k) log-probabilities → (n, k + 1): the last is that of everything else."""
    rest = (1.0 - logprobs.exp().sum(-1, keepdim=True)).clamp(min=SMALLEST_REST)
    return torch.cat((logprobs, rest.log()), dim=-1)


def sharpened(logprobs: Tensor, temperature: float) -> Tensor:
    """(n, k) log-probabilities at another temperature, the rest taken as one outcome.

    A greedy verifier asks for the teacher's first choice alone: below 1 the distribution moves
    towards it, and `topk-kl` towards `ce`.
    """
    return (with_rest(logprobs) / temperature).log_softmax(-1)[:, :-1]


def merged(logits: Tensor, labels: Labels) -> tuple[Tensor, Tensor]:
    """(teacher, draft) log-probabilities over the k stored tokens and the rest: (n, k + 1)."""
    draft = logits.gather(-1, labels.top_ids) - logits.logsumexp(-1, keepdim=True)
    return with_rest(labels.top_logprobs), with_rest(draft)


def topk_kl(logits: Tensor, labels: Labels) -> Tensor:
    """KL(teacher ‖ draft) over the stored tokens and the rest, nats."""
    teacher, draft = merged(logits, labels)
    return (teacher.exp() * (teacher - draft)).sum(-1)


def topk_tv(logits: Tensor, labels: Labels) -> Tensor:
    """½ Σ |teacher - draft| over the stored tokens and the rest: 0 … 1."""
    teacher, draft = merged(logits, labels)
    return (teacher.exp() - draft.exp()).abs().sum(-1) / 2


OBJECTIVES: dict[str, Objective] = {"ce": cross_entropy, "topk-kl": topk_kl, "topk-tv": topk_tv}


def parse_objective(text: str) -> dict[str, float]:
    """argparse type: `ce`, or a mix such as `ce=0.5,topk-tv=0.5` → weights by name, their sum 1."""
    weights: dict[str, float] = {}
    for part in text.split(","):
        name, _, number = part.partition("=")
        try:
            weight = float(number or 1)
        except ValueError:
            weight = -1.0
        if name not in OBJECTIVES or name in weights or not 0 < weight < float("inf"):
            raise argparse.ArgumentTypeError(
                f"{text!r} is not one of {', '.join(OBJECTIVES)}, or a mix like ce=0.5,topk-tv=0.5"
            )
        weights[name] = weight
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


def needs_top_k(weights: dict[str, float]) -> bool:
    """Whether a mix needs labels with log-probabilities."""
    return any(name != "ce" for name in weights)


def mix(weights: dict[str, float], temperature: float = 1.0) -> Objective:
    """The weighted sum of objectives, the teacher's distribution taken at `temperature`."""

    def objective(logits: Tensor, labels: Labels) -> Tensor:
        if labels.top_logprobs is not None and temperature != 1.0:
            labels = labels._replace(top_logprobs=sharpened(labels.top_logprobs, temperature))
        return sum(weight * OBJECTIVES[name](logits, labels) for name, weight in weights.items())

    return objective


def survival_weights(accepted: Tensor, segments: Tensor, draft_length: int) -> Tensor:
    """How likely a drafted token counts: the share of rounds in which it is still reached.

    accepted: (n,) float32 in 0 … 1, the chance that the draft's token at a position is kept;
    segments: (n,) int, which sequence each position belongs to, equal ones side by side. A round
    that began d positions earlier (d = 0 … draft_length - 1, each as likely) reaches position t
    only if it was right at t - d … t - 1; before a sequence's first position nothing can go wrong.
    Returns (n,) float32: 1 after certain acceptance, 1 / draft_length after certain rejection.
    """
    reached = torch.ones_like(accepted)
    total = reached.clone()
    for distance in range(1, draft_length):
        if distance < len(accepted):
            same = segments[distance:] == segments[:-distance]
            kept = torch.where(same, accepted[:-distance], 1.0)
            reached = reached * torch.cat((reached.new_ones(distance), kept))
        total = total + reached
    return total / draft_length
