"""The engines: a forward pass over new positions, then greedy tokens one after the other.

torch  eager, on any device: the oracle.
graph  CUDA only: a decode step captured as a CUDA graph of fused kernels, its argmax fed back on
       the device, so that a draft is one chain of replays without a word from the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from graphs import Capturer
from model import KVCache, Qwen3

if TYPE_CHECKING:
    from kernels.ops import Ops

EXTEND_TOKENS = 8  # up to so many new positions share the decode step's attention
CHUNK_BUCKETS = (32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048)  # captured sizes of a prefill
SHORT_CONTEXT = 4096  # longer ones have a graph of their own, captured at first use
BLOCKS = {"short": 32, "long": 64}  # positions that a block of attention reads at once


def choose(logits: Tensor) -> tuple[Tensor, Tensor]:
    """logits: (1, vocab) float32 → the argmax (1,) int64 and its probability (1,) float32.

    torch.argmax gives the first of equal maxima, on the CPU and on CUDA: the lowest id.
    """
    best = logits.argmax(-1)
    return best, logits.softmax(-1).gather(-1, best[:, None])[:, 0]


class TorchEngine:
    """Eager forward passes: the plain path, and the oracle of every other engine."""

    name = "torch"
    prefill_chunk = 512  # positions a call of extend; bounds the mask and the scores

    def __init__(self, model: Qwen3, kv: KVCache):
        self.model, self.kv, self.device = model, kv, kv.keys.device
        self.decode_steps = 0
        self.graph_replays = 0
        self._next: tuple[Tensor, Tensor] | None = None

    @property
    def weight_bytes(self) -> int:
        """What a decode step reads of the weights: all of them, as this engine holds them."""
        return sum(parameter.nbytes for parameter in self.model.parameters())

    def begin(self, reach: int) -> None:
        """Get ready for a request that ends below position `reach`."""

    def extend(self, ids: np.ndarray, start: int, last: bool) -> None:
        """Compute the KV of `ids` at positions start…; `last`: the next token is wanted too."""
        hidden = self._forward(torch.from_numpy(ids.astype(np.int64)), start)
        if last:
            self._next = choose(self.model.logits(hidden[-1:]))

    def continuation(self, position: int, count: int) -> Iterator[tuple[int, float]]:
        """Up to `count` greedy (token, probability) after `extend`; the first is at `position`.

        The KV of a token is computed only when the one after it is asked for.
        """
        for i in range(count):
            if i > 0:
                hidden = self._forward(self._next[0].cpu(), position + i - 1)
                self._next = choose(self.model.logits(hidden))
                self.decode_steps += 1
            yield self._next[0].item(), self._next[1].item()

    def synchronize(self) -> None:
        """Wait for the device, so that times are true."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _forward(self, ids: Tensor, start: int) -> Tensor:
        """ids: (tokens,) int64 at positions start… → hidden states (tokens, hidden)."""
        end = start + len(ids)
        positions = torch.arange(start, end, device=self.device)
        attend = self.kv.attention(positions, end)
        return self.model(ids.to(self.device)[None], positions[None], attend)[0]


class GraphEngine(TorchEngine):
    """CUDA graphs over static buffers (decoding.py).

    Positions and lengths are read from device memory, so a captured step serves every context of
    its bucket, and a captured prefill every start and every length up to its size. Buckets of
    context differ in how attention reads them.
    """

    name = "graph"
    prefill_chunk = 4096  # nothing grows with chunk times context

    def __init__(
        self,
        model: Qwen3,
        kv: KVCache,
        context_limit: int,
        draft_length: int,
        ops: Ops | None = None,
    ):
        """ops: None for the Triton kernels. Tests without a GPU pass the plain twins."""
        super().__init__(model, kv)
        # Triton comes with torch's CUDA builds; the plain path must run where it isn't.
        from decoding import Decoder
        from kernels.ops import TRITON

        self.decoder = Decoder(model, kv, draft_length, ops or TRITON)
        self.extend_replays = 0
        self.buckets = bucket_lengths(context_limit)
        self._scratch = context_limit  # a position that no request reaches; capturing writes there
        self._chunks = [EXTEND_TOKENS, *(size for size in CHUNK_BUCKETS if size <= context_limit)]
        self._inputs = torch.zeros(2 + max(self._chunks), dtype=torch.int64, device=self.device)
        self._capturer = Capturer(self.device, self._aim_at_scratch)
        self._captured: dict[int, tuple[Callable, Callable]] = {}
        self._splits: dict[int, tuple] = {}
        self._replay_step = self._replay_few = None
        start, token = self._inputs[:1], self._inputs[2:3]
        self._replay_seed = self._capture(lambda: self.decoder.seed(token, start))
        self._replay_chunk = {size: self._capture_chunk(size) for size in self._chunks[1:]}
        self.begin(1)

    def _capture_chunk(self, size: int) -> Callable[[], None]:
        return self._capture(lambda: self.decoder.extend(self._inputs[: 2 + size], None))

    def begin(self, reach: int) -> None:
        bucket = next(b for b in self.buckets if b >= reach)
        if bucket not in self._captured:
            block = BLOCKS["short" if bucket <= SHORT_CONTEXT else "long"]
            alone, few = (self.decoder.prefill.splits(n, block) for n in (1, EXTEND_TOKENS))
            self._splits[bucket] = alone, few  # a graph does not keep what it uses alive
            inputs = self._inputs[: 2 + EXTEND_TOKENS]
            self._captured[bucket] = (
                self._capture(lambda: self.decoder.step(alone)),
                self._capture(lambda: self.decoder.extend(inputs, few)),
            )
        self._replay_step, self._replay_few = self._captured[bucket]

    def extend(self, ids: np.ndarray, start: int, last: bool) -> None:
        size = next((size for size in self._chunks if size >= len(ids)), None)
        if size is None:
            tokens = torch.from_numpy(ids.astype(np.int64)).to(self.device)
            self.decoder.extend_by(tokens, start, last)
            return
        inputs = np.concatenate(([start, len(ids)], ids)).astype(np.int64)
        self._inputs[: len(inputs)].copy_(torch.from_numpy(inputs))
        self.extend_replays += 1
        if len(ids) == 1:
            self._replay_seed()
            self._replay_step()
        elif size == EXTEND_TOKENS:
            self._replay_few()
        else:
            self._replay_chunk[size]()

    def continuation(self, position: int, count: int) -> Iterator[tuple[int, float]]:
        """All `count` tokens at once; the caller drops what follows an end."""
        self.decode_steps += max(count - 1, 0)
        for _ in range(count - 1):
            self._replay_step()
            self.graph_replays += 1
        if count == 0:
            return iter(())
        steps, tokens, probabilities = self.decoder.read()
        # The device counts too: a graph that was captured but did nothing would not get past this.
        if steps != count:
            raise RuntimeError(f"{steps} steps ran on the device, expected {count}")
        return iter(list(zip(tokens[:count], probabilities[:count], strict=True)))

    def _capture(self, body: Callable[[], None]) -> Callable[[], None]:
        return self._capturer.capture(body)

    def _aim_at_scratch(self) -> None:
        """So that a trial run writes no request's KV, and no result beyond the first."""
        self.decoder.state.step.zero_()
        self.decoder.state.position.fill_(self._scratch)
        self._inputs.zero_()[0] = self._scratch


def bucket_lengths(context_limit: int) -> list[int]:
    """SHORT_CONTEXT where it is below the limit, then the limit."""
    return [*([SHORT_CONTEXT] if context_limit > SHORT_CONTEXT else []), context_limit]
