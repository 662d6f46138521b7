"""The forward pass over many new positions at once: chunks of a context, and short extensions.

Weights come from a provider, layer by layer, so that they may be matrices in memory or scratch
buffers that are filled on demand. Keys and values go straight into the cache, attention reads them
there, no mask is built. The residual stream is float32, the rest has the weights' dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.attention import Heads, Splits, split_buffers
from kernels.ops import Ops
from model import Config, KVCache, Qwen3, rope_tables


class LayerWeights(NamedTuple):
    """One layer's matrices and norms, all of one dtype.

    qkv: ((heads + 2·kv_heads)·head_dim, hidden), q first; o: (hidden, heads·head_dim);
    gate_up: (2·intermediate, hidden), the gate first; down: (hidden, intermediate); input_norm,
    post_norm: (hidden,); q_norm, k_norm: (head_dim,).
    """

    qkv: Tensor
    o: Tensor
    gate_up: Tensor
    down: Tensor
    input_norm: Tensor
    post_norm: Tensor
    q_norm: Tensor
    k_norm: Tensor


SPLITS = 32  # blocks over which a key head's context is split

# attend(layer, qkv) -> (tokens, heads·head_dim), q in `qkv` and the cache being normed and rotated
ChunkAttend = Callable[[int, Tensor], Tensor]


@torch.no_grad()
def fuse_projections(model: Qwen3) -> list[LayerWeights]:
    """One matrix for q, k, v and one for gate and up of each layer.

    The model's parameters become views of them, so that nothing is held twice.
    """

    def fused(*linears: torch.nn.Linear) -> Tensor:
        whole = torch.cat([linear.weight.detach() for linear in linears])
        parts = whole.split([len(linear.weight) for linear in linears])
        for linear, part in zip(linears, parts, strict=True):
            linear.weight = torch.nn.Parameter(part, requires_grad=False)
        return whole

    return [
        LayerWeights(
            fused(b.self_attn.q_proj, b.self_attn.k_proj, b.self_attn.v_proj),
            b.self_attn.o_proj.weight.detach(),
            fused(b.mlp.gate_proj, b.mlp.up_proj),
            b.mlp.down_proj.weight.detach(),
            b.input_layernorm.weight.detach(),
            b.post_attention_layernorm.weight.detach(),
            b.self_attn.q_norm.weight.detach(),
            b.self_attn.k_norm.weight.detach(),
        )
        for b in model.model.layers
    ]


def half_rope_tables(config: Config, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin (length, head_dim / 2) float32 of positions 0 … length - 1."""
    cos, sin = rope_tables(torch.arange(length, device=device)[None], config)
    half = config.head_dim // 2
    return cos[0, 0, :, :half].contiguous(), sin[0, 0, :, :half].contiguous()


class Prefill:
    """All layers over new positions, whose keys and values go into the cache.

    weights: layer → LayerWeights, called once a layer, in order, before that layer's work is
    launched; kv: the cache that is written and read; ops: kernels/ops.py.
    """

    def __init__(
        self, config: Config, weights: Callable[[int], LayerWeights], kv: KVCache, ops: Ops
    ):
        self.config, self.weights, self.kv, self.ops = config, weights, kv, ops
        device = kv.keys.device
        self.cos, self.sin = half_rope_tables(config, kv.length, device)
        self._one = torch.ones(1, dtype=torch.int64, device=device)
        self._splits = self.splits(1, 64)

    def splits(self, tokens: int, block: int) -> Splits:
        """Scratch for `tokens` tokens' attention, `block` positions being read at once."""
        c = self.config
        sizes = (c.num_attention_heads, c.num_key_value_heads, c.head_dim, SPLITS, block)
        return split_buffers(tokens, *sizes, self.kv.keys.device)

    def heads(self, layer: LayerWeights) -> Heads:
        return Heads(layer.q_norm, layer.k_norm, self.cos, self.sin, self.config.rms_norm_eps)

    def forward(
        self, x: Tensor, start: Tensor, count: Tensor, attend: ChunkAttend, cache_only: bool = False
    ) -> Tensor | None:
        """The last real position's residual before the last norm, (1, hidden) float32.

        cache_only: return as soon as all keys and values are in the cache, without a result.

        x: (tokens, hidden) float32, the embeddings, overwritten. start, count: (1,) int64 on the
        device: the first position, and how many of x's rows are real; the rest is padding, whose
        keys and values are written nowhere.
        """
        eps, kv, ops, delta = self.config.rms_norm_eps, self.kv, self.ops, None
        last = self.config.num_hidden_layers - 1
        for layer in range(last + 1):
            w = self.weights(layer)
            qkv = F.linear(ops.add_norm(x, delta, w.input_norm, eps), w.qkv)
            keys, values = kv.keys[layer], kv.values[layer]
            ops.rotate_and_store(qkv, start, count, self.heads(w), keys, values)
            if layer == last and cache_only:
                return None
            if layer == last:  # nothing reads the other positions' results
                row = (count - 1).clamp(min=0)
                x, qkv = x.index_select(0, row), qkv.index_select(0, row)
                attended = self.few_attend(start + row, self._one, self._splits)(layer, qkv)
            else:
                attended = attend(layer, qkv)
            normed = ops.add_norm(x, F.linear(attended, w.o), w.post_norm, eps)
            delta = F.linear(ops.silu_up(F.linear(normed, w.gate_up)), w.down)
        return x + delta

    def run(self, x: Tensor, start: int, cache_only: bool = False) -> Tensor | None:
        """forward for all rows of x at positions start…, not captured.

        On an H200 torch's attention (cuDNN's) was the faster one from position 0 on, 461 TFLOP/s
        against 360 at 4,096 tokens, and the slower one behind a prefix, 285 against 432.
        """
        at = torch.tensor([[start], [len(x)]], device=x.device)
        attend = self.chunk_attend(*at) if start else self.whole_attend()
        return self.forward(x, *at, attend, cache_only)

    def chunk_attend(self, start: Tensor, count: Tensor) -> ChunkAttend:
        """Any start and length by device values: fit for a captured graph."""

        def attend(layer: int, qkv: Tensor) -> Tensor:
            out = self._out(qkv)
            keys, values = self.kv.keys[layer], self.kv.values[layer]
            self.ops.chunk_attention(qkv, start, count, keys, values, out)
            return out

        return attend

    def few_attend(self, start: Tensor, count: Tensor, splits: Splits) -> ChunkAttend:
        """As chunk_attend, for a few tokens: the context is split over blocks."""

        def attend(layer: int, qkv: Tensor) -> Tensor:
            out = self._out(qkv)
            keys, values = self.kv.keys[layer], self.kv.values[layer]
            self.ops.decode_attention(qkv, start, count, None, keys, values, out, splits)
            return out

        return attend

    def whole_attend(self) -> ChunkAttend:
        """torch's attention, for a chunk that starts at position 0 and has no padding."""
        head_dim = self.config.head_dim

        def attend(layer: int, qkv: Tensor) -> Tensor:
            width = self.config.num_attention_heads * head_dim
            q = qkv[:, :width].unflatten(1, (-1, head_dim)).transpose(0, 1)[None]
            keys, values = (t[layer][None, :, : len(qkv)] for t in (self.kv.keys, self.kv.values))
            out = F.scaled_dot_product_attention(q, keys, values, is_causal=True, enable_gqa=True)
            return out[0].transpose(0, 1).flatten(1)

        return attend

    def _out(self, qkv: Tensor) -> Tensor:
        # Zeros: rows of padding are not written, and go through the products that follow.
        return qkv.new_zeros(len(qkv), self.config.num_attention_heads * self.config.head_dim)
