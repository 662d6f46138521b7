"""Distillation objectives, and the packing of label records into training rows."""

from __future__ import annotations

import random
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from model import Qwen3, packed_attention

IGNORE = -100


class Example(NamedTuple):
    """One label as a training sequence. targets[i] is what position i must predict, or IGNORE."""

    token_ids: list[int]
    targets: list[int]


def make_example(prompt: list[int], output: list[int], max_tokens: int) -> Example | None:
    """Loss on the output's tokens only, the EOS among them if the label has one.

    The last prompt position predicts the first output token. A label longer than `max_tokens` is
    cut at its end, which teaches no false end, since only an EOS id in the label is an end. None
    where the prompt leaves no room for any output.
    """
    room = max_tokens + 1 - len(prompt)
    if room < 1 or not output:
        return None
    output = output[:room]
    ids = prompt + output[:-1]
    return Example(ids, [IGNORE] * (len(prompt) - 1) + output)


def pack(lengths: list[int], row_tokens: int, seed: str) -> list[list[int]]:
    """Indices of sequences, shuffled and packed into rows of at most `row_tokens` tokens.

    First fit over the last few open rows: keeps the order random and the rows well filled.
    """
    order = list(range(len(lengths)))
    random.Random(seed).shuffle(order)
    rows: list[list[int]] = []
    open_rows: list[tuple[int, int]] = []  # (row, free tokens)
    for index in order:
        for slot, (row, free) in enumerate(open_rows):
            if lengths[index] <= free:
                rows[row].append(index)
                open_rows[slot] = (row, free - lengths[index])
                break
        else:
            rows.append([index])
            open_rows.append((len(rows) - 1, row_tokens - lengths[index]))
            open_rows = open_rows[-8:]
    return rows


class Batch(NamedTuple):
    """Packed rows, all (rows, tokens) int64. segments: -1 is padding."""

    token_ids: Tensor
    positions: Tensor
    segments: Tensor
    targets: Tensor


def collate(rows: list[list[Example]], device: str = "cpu") -> Batch:
    """Lay each row's sequences side by side; positions restart, segments tell them apart."""
    width = max(sum(len(e.token_ids) for e in row) for row in rows)
    shape = (len(rows), width)
    batch = Batch(
        torch.zeros(shape, dtype=torch.int64),
        torch.zeros(shape, dtype=torch.int64),
        torch.full(shape, -1),
        torch.full(shape, IGNORE),
    )
    for number, row in enumerate(rows):
        at = 0
        for segment, example in enumerate(row):
            span = slice(at, at + len(example.token_ids))
            batch.token_ids[number, span] = torch.tensor(example.token_ids)
            batch.positions[number, span] = torch.arange(len(example.token_ids))
            batch.segments[number, span] = segment
            batch.targets[number, span] = torch.tensor(example.targets)
            at = span.stop
    return Batch(*(t.to(device) for t in batch))


class Loss(NamedTuple):
    """Sums over the label positions: loss in nats, correct argmax count, number of positions."""

    total: Tensor
    correct: Tensor
    positions: int


def sequence_loss(model: Qwen3, batch: Batch, chunk: int = 2048) -> Loss:
    """Cross-entropy with the teacher's greedy tokens: sequence-level distillation.

    Kim and Rush, Sequence-Level Knowledge Distillation (arXiv:1606.07947). Logits exist for label
    positions only and for `chunk` of them at a time (recomputed in the backward pass), since
    (tokens × 151,936) of them would be the largest tensor by far.
    """
    hidden = model(batch.token_ids, batch.positions, packed_attention(batch.segments))
    labelled = batch.targets != IGNORE
    hidden, targets = hidden[labelled], batch.targets[labelled]
    total = hidden.new_zeros((), dtype=torch.float32)
    correct = torch.zeros((), dtype=torch.int64, device=hidden.device)
    for part, target in zip(hidden.split(chunk), targets.split(chunk), strict=True):
        loss, hits = checkpoint(chunk_loss, model, part, target, use_reentrant=False)
        total, correct = total + loss, correct + hits
    return Loss(total, correct, len(targets))


def chunk_loss(model: Qwen3, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """hidden: (n, hidden), targets: (n,) → summed cross-entropy, number of correct argmaxes."""
    logits = F.linear(hidden, model.model.embed_tokens.weight).float()
    hits = (logits.detach().argmax(-1) == targets).sum()
    return F.cross_entropy(logits, targets, reduction="sum"), hits
