"""Acceptance: how many drafted tokens a greedy verifier keeps, and how sure that figure is.

A round drafts up to `draft_length` tokens; the verifier keeps the longest prefix that agrees with
its own greedy text and adds its next token. With greedy drafts on the teacher's own text, whether a
token agrees does not depend on where a round began. So one forward pass over a label says what
every round would accept: `rounds_of` plays them, and evaluate.py's drafts through the server are
the cross-check.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from losses import labelled_hidden
from model import Qwen3
from packing import Example, collate

RESAMPLES = 2000


def rounds_of(correct: Sequence[bool], draft_length: int) -> list[tuple[int, int]]:
    """(asked, accepted) of each round along a label.

    correct[i]: the draft's argmax after the label's first i tokens is the label's token i.
    """
    rounds, done = [], 0
    while done < len(correct):
        asked = min(draft_length, len(correct) - done)
        accepted = 0
        while accepted < asked and correct[done + accepted]:
            accepted += 1
        rounds.append((asked, accepted))
        done += accepted + 1
    return rounds


@torch.inference_mode()
def teacher_forced(model: Qwen3, examples: Iterable[Example], device: str) -> list[np.ndarray]:
    """For each example, at its label positions: is the draft's argmax the teacher's token?"""
    found = []
    for example in examples:
        batch = collate([[example]], device)
        best = model.logits(labelled_hidden(model, batch)).argmax(-1)
        found.append((best == batch.targets).cpu().numpy())
    return found


class Counts(NamedTuple):
    """Rounds and accepted tokens of each prompt, both (prompts,)."""

    rounds: np.ndarray
    accepted: np.ndarray

    @classmethod
    def of(cls, rounds: Iterable[list[tuple[int, int]]]) -> Counts:
        """From every prompt's rounds of (asked, accepted)."""
        pairs = [(len(r), sum(accepted for _, accepted in r)) for r in rounds]
        table = np.array(pairs, dtype=float).reshape(-1, 2)
        return cls(table[:, 0], table[:, 1])

    def mean(self) -> float:
        """Accepted tokens a round."""
        return float(self.accepted.sum() / max(self.rounds.sum(), 1))


def simulate(model: Qwen3, examples: Iterable[Example], draft_length: int, device: str) -> Counts:
    """What rounds along the examples' labels accept, from one forward pass over each."""
    correct = teacher_forced(model, examples, device)
    return Counts.of(rounds_of(c.tolist(), draft_length) for c in correct)


class Interval(NamedTuple):
    """A figure and the 95% interval of its bootstrap."""

    value: float
    low: float
    high: float


def resampled(counts: Counts, seed: int) -> np.ndarray:
    """(RESAMPLES,) accepted tokens a round over prompts drawn with replacement.

    Efron, Bootstrap methods (Ann. Statist. 7, 1979). Whole prompts are drawn: the rounds of one are
    not independent. The same seed draws the same prompts, so figures of two drafts pair up.
    """
    size = len(counts.rounds)
    drawn = np.random.default_rng(seed).integers(0, size, (RESAMPLES, size))
    return counts.accepted[drawn].sum(1) / np.maximum(counts.rounds[drawn].sum(1), 1)


def interval(value: float, samples: np.ndarray) -> Interval:
    low, high = np.percentile(samples, [2.5, 97.5])
    return Interval(value, float(low), float(high))


def accepted_length(counts: Counts, seed: int = 0) -> Interval:
    """Accepted tokens a round."""
    return interval(counts.mean(), resampled(counts, seed))


def accepted_ratio(counts: Counts, reference: Counts, seed: int = 0) -> Interval:
    """Accepted length over that of another draft on the same prompts.

    Raises ValueError where the two did not draft along the same number of prompts.
    """
    if len(counts.rounds) != len(reference.rounds):
        raise ValueError("the two drafts were not measured on the same prompts")
    below = np.maximum(resampled(reference, seed), 1e-9)
    samples = resampled(counts, seed) / below
    return interval(counts.mean() / max(reference.mean(), 1e-9), samples)
