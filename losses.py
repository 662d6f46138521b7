"""The distillation loss of packed rows, without the logits of all positions at once."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from model import Qwen3, packed_attention
from objectives import Labels, Objective, cross_entropy, survival_weights
from packing import Batch

CHUNK = 1024  # label positions whose logits exist at a time: 0.6 GB in float32 at 151,936


class Loss(NamedTuple):
    """Sums over the label positions, scalars: the objective, and how often the argmax is the
    teacher's token; and the number of positions."""

    total: Tensor
    correct: Tensor
    positions: int


class ChunkedLoss(torch.autograd.Function):
    """Σ objective(hidden · weightᵀ), `CHUNK` positions at a time.

    (tokens × 151,936) logits would be the largest tensor by far. A chunk's gradient is taken while
    its logits exist, in the forward pass, so that none are kept and none are computed twice.
    """

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        hidden: Tensor,
        weight: Tensor,
        labels: Labels,
        importance: Tensor | None,
        objective: Objective,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        """hidden: (n, hidden), weight: (vocab, hidden) → (sum of the objective, correct argmaxes).

        importance: (n,) factors on the positions' losses, or None.
        """
        training = any(ctx.needs_input_grad)
        dtype = compute_dtype(hidden)
        h, w = hidden.to(dtype), weight.to(dtype)
        d_hidden = torch.empty_like(h) if training else None
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if training else None
        total = hidden.new_zeros((), dtype=torch.float32)
        correct = torch.zeros((), dtype=torch.int64, device=hidden.device)
        for number, part in enumerate(labels.split(chunk)):
            span = slice(number * chunk, number * chunk + len(part.targets))
            logits = (h[span] @ w.t()).float().detach().requires_grad_(training)
            with torch.set_grad_enabled(training), torch.autocast(h.device.type, enabled=False):
                losses = objective(logits, part)
                if importance is not None:
                    losses = losses * importance[span]
                loss = losses.sum()
            total += loss.detach()
            correct += (logits.detach().argmax(-1) == part.targets).sum()
            if training:
                (gradient,) = torch.autograd.grad(loss, logits)
                gradient = gradient.to(dtype)
                d_hidden[span] = gradient @ w
                d_weight += product(gradient.t(), h[span])
        if training:
            ctx.save_for_backward(d_hidden.to(hidden.dtype), d_weight.to(weight.dtype))
        return total, correct

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, d_total: Tensor, _: Tensor) -> tuple:
        d_hidden, d_weight = ctx.saved_tensors
        return d_hidden * d_total, d_weight * d_total, None, None, None, None


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype of products here: autocast's where it is on."""
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensor.dtype


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in float32; bf16 factors accumulate into it without rounding the result."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return (a @ b).float()


@torch.no_grad()
def position_losses(
    hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int = CHUNK
) -> tuple[Tensor, Tensor]:
    """(n,) cross-entropy with the teacher's token, and (n,) bool whether the argmax is it."""
    weight = weight.to(compute_dtype(hidden))
    losses, hits = [], []
    for part, target in zip(hidden.split(chunk), targets.split(chunk), strict=True):
        logits = (part.to(weight.dtype) @ weight.t()).float()
        losses.append(cross_entropy(logits, Labels(target)))
        hits.append(logits.argmax(-1) == target)
    return torch.cat(losses), torch.cat(hits)


def labelled_hidden(model: Qwen3, batch: Batch, head: Tensor | None = None) -> Tensor:
    """(label positions, hidden) after the last norm. head: as in Qwen3.forward."""
    attend = packed_attention(batch.segments, batch.bounds)
    return batch.at_labels(model(batch.token_ids, batch.positions, attend, head))


def sequence_loss(
    model: Qwen3,
    batch: Batch,
    objective: Objective = cross_entropy,
    survival: int | None = None,
    chunk: int = CHUNK,
) -> Loss:
    """The objective over a batch's label positions.

    survival: the draft length for `survival_weights`, scaled to a mean of 1; None: all positions
    count alike.
    """
    weight = model.head_weight()
    hidden = labelled_hidden(model, batch, weight)
    labels = Labels(batch.targets, batch.top_ids, batch.top_logprobs)
    importance = None
    if survival is not None:
        rows = torch.arange(len(batch.segments), device=hidden.device)[:, None]
        sequence = (batch.segments + rows * batch.segments.shape[1]).flatten()[batch.where]
        surprise, _ = position_losses(hidden, weight, labels.targets, chunk)
        importance = survival_weights((-surprise).exp(), sequence, survival)
        importance = importance / importance.mean().clamp(min=1e-6)
    total, correct = ChunkedLoss.apply(hidden, weight, labels, importance, objective, chunk)
    return Loss(total, correct, len(labels.targets))


class Distiller(nn.Module):
    """A draft with its loss as one module: sharded training (FSDP2) gathers weights in `forward`,
    so the head has to be used inside of it."""

    def __init__(self, model: Qwen3, objective: Objective, survival: int | None = None):
        super().__init__()
        self.model = model
        self.objective, self.survival = objective, survival

    def forward(self, batch: Batch, detail: bool = False) -> tuple[Tensor, Tensor]:
        """(sum of the objective, correct argmaxes) over the batch's label positions; detail: what
        `position_losses` gives for each of them."""
        if detail:
            weight = self.model.head_weight()
            hidden = labelled_hidden(self.model, batch, weight)
            return position_losses(hidden, weight, batch.targets)
        loss = sequence_loss(self.model, batch, self.objective, self.survival)
        return loss.total, loss.correct
