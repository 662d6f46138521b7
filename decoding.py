"""One decode step over static buffers, from bf16 or float32 matrices: what GraphEngine captures.

Five kernels a layer (kernels/): norm and q, k, v; attention with q/k-norm, rotation and cache
write; o and residual; norm, gate, up and SiLU; down and residual. Then the head and the choice.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.attention import Splits
from kernels.fused import State
from kernels.linear import best_buffers
from kernels.ops import Ops
from model import KVCache, Qwen3
from prefill import Prefill, fuse_projections


class Decoder:
    """The model's layers with every buffer in place.

    model: its projections are fused (see prefill.fuse_projections); kv: read and written.
    state: where the draft stands; logits: (vocab,) float32 of the last choice.
    """

    def __init__(self, model: Qwen3, kv: KVCache, draft_length: int, ops: Ops):
        config, device = model.config, kv.keys.device
        self.model, self.kv, self.ops, self.config = model, kv, ops, config
        self.layers = fuse_projections(model)
        self.prefill = Prefill(config, self.layers.__getitem__, kv, ops)
        self.embedding = model.model.embed_tokens.weight
        self._one = torch.ones(1, dtype=torch.int64, device=device)

        def vector(size: int) -> Tensor:
            return torch.zeros(size, device=device)

        self._qkv = vector(len(self.layers[0].qkv))[None]
        self._attended = vector(config.num_attention_heads * config.head_dim)[None]
        self._activation = vector(config.intermediate_size)
        self.logits = vector(config.vocab_size)
        self._best = best_buffers(config.vocab_size, device)
        # One buffer, so that the host reads a whole draft in one copy.
        self._length = max(draft_length, 1)
        self._result = torch.zeros(2 * self._length + 1, dtype=torch.int64, device=device)
        self.state = State(
            vector(config.hidden_size),
            torch.zeros(1, dtype=torch.int64, device=device),
            *self._views(self._result),
        )

    def _views(self, result: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        step, tokens, rest = result.split((1, self._length, self._length))
        return step, tokens, rest.view(torch.float32)[: self._length]

    def seed(self, token: Tensor, position: Tensor) -> None:
        """Let the next step start from `token` at `position`, both (1,) int64; a draft begins."""
        self.state.x.copy_(self.embedding.index_select(0, token)[0])
        self.state.position.copy_(position)
        self.state.step.zero_()

    def step(self, splits: Splits) -> None:
        """Compute the position in `state`, choose the next token, step on to it."""
        ops, state, eps = self.ops, self.state, self.config.rms_norm_eps
        for i, w in enumerate(self.layers):
            ops.linear(state.x, w.qkv, self._qkv[0], w.input_norm, eps)
            ops.decode_attention(
                *(self._qkv, state.position, self._one, self.prefill.heads(w)),
                *(self.kv.keys[i], self.kv.values[i], self._attended, splits),
            )
            ops.linear(self._attended[0], w.o, state.x, add=True)
            ops.gate_up(state.x, w.gate_up, self._activation, w.post_norm, eps)
            ops.linear(self._activation, w.down, state.x, add=True)
        self._choose(state.x)

    def extend(self, inputs: Tensor, splits: Splits | None) -> None:
        """Compute new positions from device values; the token after them becomes a draft's first.

        inputs: int64: first position, how many ids count, the ids, padding. splits: for a few
        tokens (see Prefill.few_attend).
        """
        start, count, ids = inputs[:1], inputs[1:2], inputs[2:]
        x = self.embedding.index_select(0, ids).float()
        if splits is None:
            attend = self.prefill.chunk_attend(start, count)
        else:
            attend = self.prefill.few_attend(start, count, splits)
        x = self.prefill.forward(x, start, count, attend)
        self.state.position.copy_(start + count - 1)
        self.state.step.zero_()
        self._choose(x[0])

    def extend_by(self, ids: Tensor, start: int, last: bool) -> None:
        """Compute ids, (n,) int64, at positions start…; `last`: choose the next token too."""
        x = self.embedding.index_select(0, ids).float()
        x = self.prefill.run(x, start)
        if last:
            self.state.position.fill_(start + len(ids) - 1)
            self.state.step.zero_()
            self._choose(x[0])

    def read(self) -> tuple[int, list[int], list[float]]:
        """(steps that ran, tokens, probabilities) of the draft so far; waits for the device."""
        step, tokens, probabilities = self._views(self._result.cpu())
        return step.item(), tokens.tolist(), probabilities.tolist()

    def _choose(self, x: Tensor) -> None:
        norm, eps = self.model.model.norm.weight, self.config.rms_norm_eps
        self.ops.head(x, self.embedding, self.logits, self._best, norm, eps)
        self.ops.advance(self._best, self.embedding, self.state)
