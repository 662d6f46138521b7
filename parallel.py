"""Training in several processes: FSDP2 over torchrun's ranks, and nothing special for one.

FSDP2 (torch.distributed.fsdp.fully_shard; ZeRO-3, arXiv:1910.02054) keeps a part of every weight,
gradient and optimizer state on each rank and gathers one block's weights while it computes. Rank 0
alone writes files.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from losses import Distiller

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


@dataclass(frozen=True)
class World:
    """This process among those that train together. device: cpu | cuda:n."""

    rank: int
    size: int
    device: str

    @property
    def first(self) -> bool:
        return self.rank == 0

    @property
    def kind(self) -> str:
        """cpu | cuda"""
        return self.device.partition(":")[0]

    def sum(self, *values: float) -> list[float]:
        """The sums over all ranks."""
        if self.size == 1:
            return [float(v) for v in values]
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor)
        return tensor.tolist()

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, by rank, on each of them."""
        if self.size == 1:
            return [value]
        found = [None] * self.size
        dist.all_gather_object(found, value)
        return found

    def from_first(self, value: Any) -> Any:
        """Rank 0's value, on each rank."""
        box = [value]
        if self.size > 1:
            dist.broadcast_object_list(box, src=0)
        return box[0]


def join_world() -> World:
    """The processes that torchrun started, or this one alone."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    cuda = torch.cuda.is_available()
    if size == 1:
        return World(0, 1, "cuda" if cuda else "cpu")
    device = f"cuda:{os.environ['LOCAL_RANK']}" if cuda else "cpu"
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    return World(dist.get_rank(), size, device)


def leave_world(world: World) -> None:
    if world.size > 1:
        dist.destroy_process_group()


def shard(distiller: Distiller, world: World) -> None:
    """Spread the parameters over the ranks, a block at a time; nothing with one process.

    On a GPU the gathered weights are bf16 and gradients are summed in float32; activations keep
    their own dtype, since the residual stream has to stay float32.
    """
    if world.size == 1:
        return
    policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    if world.kind == "cuda":
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    for block in distiller.model.model.layers:
        fully_shard(block, mp_policy=policy)
    fully_shard(distiller, mp_policy=policy)


def settle(distiller: nn.Module) -> None:
    """After a forward pass that no backward pass follows: FSDP2 keeps the root's weights gathered,
    as plain tensors, until then, and states and parameters would be taken from those."""
    if hasattr(distiller, "reshard"):
        distiller.reshard()


def whole(tensor: Tensor) -> Tensor:
    """A parameter in full, wherever its parts are. Every rank has to call this."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def gather_states(
    world: World, distiller: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict, dict]:
    """(model, optimizer) state dicts in full: on rank 0, empty elsewhere."""
    if world.size == 1:
        return distiller.state_dict(), optimizer.state_dict()
    return (
        get_model_state_dict(distiller, options=FULL),
        get_optimizer_state_dict(distiller, optimizer, options=FULL),
    )


def restore_states(
    world: World, distiller: nn.Module, optimizer: torch.optim.Optimizer, states: tuple[dict, dict]
) -> None:
    """What `gather_states` gave, back in place; rank 0 passes the whole, the others get it."""
    if world.size == 1:
        distiller.load_state_dict(states[0])
        optimizer.load_state_dict(states[1])
        return
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(distiller, states[0], options=options)
    set_optimizer_state_dict(distiller, optimizer, states[1], options=options)


def whole_parameters(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    """(name, tensor) of every parameter in full, one at a time. Every rank has to iterate."""
    for name, parameter in model.named_parameters():
        yield name, whole(parameter.detach())
