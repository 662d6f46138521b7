"""Steps of training and evaluation: what train.py repeats, and what its speed is measured on."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from acceptance import Counts, rounds_of
from artifacts import ArtifactError
from losses import Distiller
from model import Config, Qwen3
from packing import IGNORE, Batch, Example, collate, pack
from parallel import World, settle, whole

CLIP_NORM = 1.0


def schedule(step: int, steps: int, warmup: float) -> float:
    """Factor on the learning rate: linear warm-up, then a cosine down to a tenth."""
    rising = max(1, round(steps * warmup))
    if step < rising:
        return (step + 1) / rising
    progress = (step - rising) / max(1, steps - rising)
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress))


def make_optimizer(
    distiller: Distiller, kind: str, learning_rate: float, weight_decay: float
) -> torch.optim.Optimizer:
    """AdamW (arXiv:1711.05101), its states in float32 (adamw) or 8 bits (adamw8bit, block-wise,
    arXiv:2110.02861); norms are not decayed."""
    matrices = [p for p in distiller.parameters() if p.ndim > 1]
    norms = [p for p in distiller.parameters() if p.ndim == 1]
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": norms, "weight_decay": 0.0},
    ]
    options = {"lr": learning_rate, "betas": (0.9, 0.95)}
    if kind == "adamw8bit":
        from bitsandbytes.optim import AdamW8bit

        return AdamW8bit(groups, **options)
    return torch.optim.AdamW(groups, **options, fused=matrices[0].is_cuda)


def autocast(world: World) -> torch.autocast:
    """bf16 products on a GPU around float32 master weights; float32 on a CPU.

    Sharded weights are gathered as bf16 already, but q and k come out of float32 norms: autocast
    is what tells `packed_attention` to take the flash kernel.
    """
    return torch.autocast(world.kind, dtype=torch.bfloat16, enabled=world.kind == "cuda")


def compile_blocks(model: Qwen3) -> None:
    """Fuse the small kernels around the matrix products; one compilation serves all blocks.

    They differ in the layer's number, which training's attention does not read.
    """
    for block in model.model.layers:
        block.self_attn.layer = 0
        block.compile()


def micro_batches(
    rows: list[list[Example]], world: World, micro: int, width: int | None
) -> list[Batch]:
    """This rank's share of a step's rows, `micro` at a time.

    Sharded ranks compute in lockstep, so all of them get equally many: short ones an empty row.
    """
    share = -(-len(rows) // world.size)
    mine = rows[world.rank :: world.size]
    batches = []
    for start in range(0, share, micro):
        part = mine[start : start + micro] or [[]]
        batches.append(collate(part, width=width or max(8, longest(part))))
    return batches


def longest(rows: list[list[Example]]) -> int:
    return max(sum(len(example.token_ids) for example in row) for row in rows)


def train_step(
    distiller: Distiller, optimizer: torch.optim.Optimizer, batches: list[Batch], world: World
) -> dict[str, float]:
    """One update over all micro-batches of all ranks, normalised by their label positions together.

    FSDP averages gradients over the ranks, hence the factor of their number. Raises ArtifactError,
    before the weights change, where the gradients are not finite.
    """
    (positions,) = world.sum(sum(len(b.targets) for b in batches))
    totals = torch.zeros(2, device=world.device)
    for batch in batches:
        with autocast(world):
            loss, correct = distiller(batch.to(world.device))
        (loss * (world.size / positions)).backward()
        totals += torch.stack((loss.detach(), correct.to(loss.dtype)))
    norm = torch.nn.utils.clip_grad_norm_(distiller.parameters(), CLIP_NORM)
    norm = whole(norm)
    if not torch.isfinite(norm):
        raise ArtifactError("the gradients are not finite any more; lower --learning-rate")
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    total, correct = world.sum(*totals.tolist())
    return {
        "loss": total / positions,
        "accuracy": correct / positions,
        "gradient_norm": norm.item(),
        "label_tokens": int(positions),
    }


@torch.no_grad()
def evaluate(
    distiller: Distiller,
    examples: list[Example],
    draft_length: int,
    world: World,
    row_tokens: int,
    micro: int,
    width: int | None = None,
) -> dict[str, float]:
    """On the hold-out: cross-entropy and top-1 agreement with the teacher, teacher-forced, and the
    tokens a round that its greedy verification would accept (acceptance.py)."""
    rows = pack([len(e.token_ids) for e in examples], row_tokens, "evaluate")
    mine = rows[world.rank :: world.size]
    loss = 0.0
    found: dict[int, list[bool]] = {}
    batches = micro_batches([[examples[i] for i in row] for row in rows], world, micro, width)
    for number, batch in enumerate(batches):
        with autocast(world):
            losses, hits = distiller(batch.to(world.device), detail=True)
        loss += losses.sum().item()
        order = [i for row in mine[number * micro : (number + 1) * micro] for i in row]
        sizes = [sum(t != IGNORE for t in examples[i].targets) for i in order]
        for index, part in zip(order, hits.cpu().split(sizes), strict=True):
            found[index] = part.tolist()
    settle(distiller)
    (loss,) = world.sum(loss)
    parts = world.gather(found)
    correct = [flags for part in parts for flags in part.values()]
    positions = sum(map(len, correct))
    accepted = Counts.of(rounds_of(flags, draft_length) for flags in correct).mean()
    return {
        "holdout_loss": loss / positions,
        "holdout_accuracy": sum(map(sum, correct)) / positions,
        "holdout_accepted": accepted,
    }


class Flops(NamedTuple):
    """Floating-point operations of one trained token: forward and backward, without recomputing."""

    matrices: float
    attention: float

    @property
    def total(self) -> float:
        return self.matrices + self.attention


def model_flops(config: Config, context: int) -> Flops:
    """Per token: 6 a weight that multiplies (the tied embedding once, as the head), and causal
    attention over a mean context of `context` / 2 (PaLM, arXiv:2204.02311, appendix B).
    """
    hidden, width = config.hidden_size, config.num_attention_heads * config.head_dim
    kv = config.num_key_value_heads * config.head_dim
    block = hidden * (2 * width + 2 * kv) + 3 * hidden * config.intermediate_size
    weights = config.num_hidden_layers * block + config.vocab_size * hidden
    attention = 12 * config.num_hidden_layers * width * context / 2
    return Flops(6.0 * weights, attention)
