"""Attention of one token, or of a few, over the live part of a KV cache (Triton).

Flash-decoding (https://crfm.stanford.edu/2023/10/12/flashdecoding.html): the context is split over
blocks; the last block to finish combines what the others left, in a fixed order, so that the result
does not depend on which one that was. All query heads of one key head are computed together, as
they read the same keys. Products are plain float32. The position is read from device memory, so
that one captured graph serves every length.

Each function has a plain torch twin of the same signature (…_plain).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.linear import has_dependent_launch, rms_normed

LOG2E = 1.4426950408889634
NOTHING = tl.constexpr(-1e30)  # a maximum over nothing; finite, as inf - inf is not a number


class Splits(NamedTuple):
    """How decode_attention splits a context, and its scratch.

    block: positions read at once; out: (tokens, heads, splits, head_dim) float32; largest, total:
    (tokens, heads, splits) float32; arrivals: (tokens, kv_heads) int32, zero between calls.
    """

    block: int

    out: Tensor
    largest: Tensor
    total: Tensor
    arrivals: Tensor


class Heads(NamedTuple):
    """What turns a projection into q and k. q_norm, k_norm: (head_dim,); cos, sin: (length,
    head_dim / 2) float32, one row a position; eps: of the norms."""

    q_norm: Tensor
    k_norm: Tensor
    cos: Tensor
    sin: Tensor
    eps: float


def split_buffers(
    tokens: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    splits: int,
    block: int,
    device: torch.device,
) -> Splits:
    return Splits(
        block,
        torch.empty(tokens, heads, splits, head_dim, device=device),
        torch.empty(tokens, heads, splits, device=device),
        torch.empty(tokens, heads, splits, device=device),
        torch.zeros(tokens, kv_heads, dtype=torch.int32, device=device),
    )


@triton.jit
def _normed_halves(first, second, norm_ptr, cos_ptr, sin_ptr, d, eps, D: tl.constexpr):
    """RMSNorm over a head's two halves (…, D / 2), then their rotation."""
    squares = tl.sum(first * first, axis=2, keep_dims=True)
    squares += tl.sum(second * second, axis=2, keep_dims=True)
    scale = tl.rsqrt(squares / D + eps)
    first *= scale * tl.load(norm_ptr + d).to(tl.float32)
    second *= scale * tl.load(norm_ptr + D // 2 + d).to(tl.float32)
    cos, sin = tl.load(cos_ptr + d), tl.load(sin_ptr + d)
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def _new_key(
    qkv_ptr,
    keys_ptr,
    values_ptr,
    k_norm_ptr,
    cos_ptr,
    sin_ptr,
    eps,
    split,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
):
    """This position's own key (two halves) and value, rounded as the cache rounds them; split 0
    stores them. keys_ptr, values_ptr: of the position."""
    d = tl.arange(0, D // 2)[None, None, :]
    dd = tl.arange(0, D)[None, None, :]
    kv_head = tl.program_id(0)
    k_ptr = qkv_ptr + (HEADS + kv_head) * D
    first = tl.load(k_ptr + d).to(tl.float32)
    second = tl.load(k_ptr + D // 2 + d).to(tl.float32)
    first, second = _normed_halves(first, second, k_norm_ptr, cos_ptr, sin_ptr, d, eps, D)
    kind = keys_ptr.dtype.element_ty
    first, second = first.to(kind), second.to(kind)
    value = tl.load(qkv_ptr + (HEADS + KV_HEADS + kv_head) * D + dd).to(kind)
    if split == 0:
        tl.store(keys_ptr + d, first)
        tl.store(keys_ptr + D // 2 + d, second)
        tl.store(values_ptr + dd, value)
    return first.to(tl.float32), second.to(tl.float32), value.to(tl.float32)


@triton.jit
def _attend_past(
    q1,
    q2,
    keys_ptr,
    values_ptr,
    highest,
    weight,
    sums,
    begin,
    end,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Positions begin … end - 1 of the cache.

    Each of a tile's BLOCK rows runs a softmax of its own: nothing crosses threads in the loop.
    """
    t = tl.arange(0, BLOCK)[None, :, None]
    d = tl.arange(0, D // 2)[None, None, :]
    dd = tl.arange(0, D)[None, None, :]
    for first in range(begin, end, BLOCK):
        inside = first + t < end
        at = (first + t) * D
        k1 = tl.load(keys_ptr + at + d, mask=inside, other=0.0).to(tl.float32)
        k2 = tl.load(keys_ptr + at + D // 2 + d, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(values_ptr + at + dd, mask=inside, other=0.0).to(tl.float32)
        score = tl.sum(q1 * k1 + q2 * k2, axis=2, keep_dims=True)
        score = tl.where(inside, score, -float("inf"))
        above = tl.maximum(highest, score)
        old, new = tl.exp2(highest - above), tl.exp2(score - above)
        weight = weight * old + new
        sums = sums * old + new * value
        highest = above
    return highest, weight, sums


@triton.jit
def _queries(
    qkv_ptr,
    position,
    q_norm_ptr,
    k_norm_ptr,
    cos_ptr,
    sin_ptr,
    keys_ptr,
    values_ptr,
    eps,
    scale,
    split,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    GROUP_P: tl.constexpr,
    BLOCK: tl.constexpr,
    OWN: tl.constexpr,
):
    """The group's queries (two halves), scaled, and the state of a softmax that has seen nothing,
    or, in split 0, with OWN, the token's own position."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    g = tl.arange(0, GROUP_P)[:, None, None]
    t = tl.arange(0, BLOCK)[None, :, None]
    d = tl.arange(0, D // 2)[None, None, :]
    q_ptr = qkv_ptr + (tl.program_id(0) * GROUP + g) * D
    q1 = tl.load(q_ptr + d, mask=g < GROUP, other=0.0).to(tl.float32)
    q2 = tl.load(q_ptr + D // 2 + d, mask=g < GROUP, other=0.0).to(tl.float32)
    highest = tl.full((GROUP_P, BLOCK, 1), NOTHING, tl.float32)
    weight = tl.zeros((GROUP_P, BLOCK, 1), tl.float32)
    sums = tl.zeros((GROUP_P, BLOCK, D), tl.float32)
    if OWN:
        cos_ptr += position * (D // 2)
        sin_ptr += position * (D // 2)
        keys_ptr += position * D
        values_ptr += position * D
        q1, q2 = _normed_halves(q1, q2, q_norm_ptr, cos_ptr, sin_ptr, d, eps, D)
        own = (qkv_ptr, keys_ptr, values_ptr, k_norm_ptr, cos_ptr, sin_ptr, eps, split)
        k1, k2, value = _new_key(*own, HEADS, KV_HEADS, D)
        score = tl.sum(q1 * k1 + q2 * k2, axis=2, keep_dims=True) * scale
        mine = (t == 0) & (split == 0) & (g >= 0)
        highest = tl.where(mine, score, highest)
        weight = tl.where(mine, 1.0, weight)
        sums = tl.where(mine, value, sums)
    return q1 * scale, q2 * scale, highest, weight, sums


@triton.jit
def _combine(
    out_ptr,
    largest_ptr,
    total_ptr,
    result_ptr,
    live,
    GROUP: tl.constexpr,
    GROUP_P: tl.constexpr,
    SPLITS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    D: tl.constexpr,
):
    """Add up the splits of one key head's query heads, in order of their number.

    The others' stores came before their arrival was counted; .cg passes by this multiprocessor's
    own, possibly stale, cache.
    """
    g = tl.arange(0, GROUP_P)[:, None, None]
    s = tl.arange(0, AT_ONCE)[None, :, None]
    dd = tl.arange(0, D)[None, None, :]
    highest = tl.full((GROUP_P, 1, 1), NOTHING, tl.float32)
    weight = tl.zeros((GROUP_P, 1, 1), tl.float32)
    sums = tl.zeros((GROUP_P, 1, D), tl.float32)
    for begin in range(0, live, AT_ONCE):
        inside = (g < GROUP) & (begin + s < live)
        at = g * SPLITS + begin + s
        largest = tl.load(largest_ptr + at, mask=inside, other=NOTHING, cache_modifier=".cg")
        total = tl.load(total_ptr + at, mask=inside, other=0.0, cache_modifier=".cg")
        part = tl.load(out_ptr + at * D + dd, mask=inside, other=0.0, cache_modifier=".cg")
        above = tl.maximum(highest, tl.max(largest, axis=1, keep_dims=True))
        old, new = tl.exp2(highest - above), tl.exp2(largest - above)
        weight = weight * old + tl.sum(total * new, axis=1, keep_dims=True)
        sums = sums * old + tl.sum(part * new, axis=1, keep_dims=True)
        highest = above
    result = (sums / weight).to(result_ptr.dtype.element_ty)
    tl.store(result_ptr + g * D + dd, result, mask=g < GROUP)


@triton.jit
def _hand_in(
    highest,
    weight,
    sums,
    result_ptr,
    out_ptr,
    largest_ptr,
    total_ptr,
    arrived_ptr,
    split,
    live,
    GROUP: tl.constexpr,
    GROUP_P: tl.constexpr,
    SPLITS: tl.constexpr,
    D: tl.constexpr,
):
    """Merge the tile's rows and keep the result; the last of the `live` blocks combines them.

    Pointers: of the group's first head.
    """
    g = tl.arange(0, GROUP_P)[:, None, None]
    dd = tl.arange(0, D)[None, None, :]
    at = g * SPLITS + split
    largest = tl.max(highest, axis=1, keep_dims=True)
    share = tl.exp2(highest - largest)
    tl.store(largest_ptr + at, largest, mask=g < GROUP)
    tl.store(total_ptr + at, tl.sum(weight * share, axis=1, keep_dims=True), mask=g < GROUP)
    part = tl.sum(sums * share, axis=1, keep_dims=True)
    tl.store(out_ptr + at * D + dd, part, mask=g < GROUP)
    tl.debug_barrier()  # every thread's stores come before this block's arrival
    if tl.atomic_add(arrived_ptr, 1, sem="acq_rel") == live - 1:
        _combine(out_ptr, largest_ptr, total_ptr, result_ptr, live, GROUP, GROUP_P, SPLITS, 16, D)
        tl.store(arrived_ptr, 0)


@triton.jit
def _decode_attention(
    qkv_ptr,
    position_ptr,
    count_ptr,
    q_norm_ptr,
    k_norm_ptr,
    cos_ptr,
    sin_ptr,
    keys_ptr,
    values_ptr,
    result_ptr,
    out_ptr,
    largest_ptr,
    total_ptr,
    arrivals_ptr,
    length,
    eps,
    scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    GROUP_P: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    OWN: tl.constexpr,
    PDL: tl.constexpr,
):
    GROUP: tl.constexpr = HEADS // KV_HEADS
    kv_head, split, token = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    position = tl.load(position_ptr).to(tl.int32) + token
    past = position if OWN else position + 1  # how many positions are read from the cache
    per_split = tl.cdiv(tl.cdiv(past, SPLITS), BLOCK) * BLOCK
    live = tl.where(past == 0, 1, tl.cdiv(past, tl.maximum(per_split, 1)))
    if split >= live or token >= tl.load(count_ptr).to(tl.int32):
        return
    qkv_ptr += token * (HEADS + 2 * KV_HEADS) * D
    keys_ptr += kv_head * length * D
    values_ptr += kv_head * length * D
    tables = (q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr)
    cache = (keys_ptr, values_ptr, eps, scale, split)
    q1, q2, highest, weight, sums = _queries(
        qkv_ptr, position, *tables, *cache, HEADS, KV_HEADS, D, GROUP_P, BLOCK, OWN
    )
    span = (split * per_split, tl.minimum((split + 1) * per_split, past))
    highest, weight, sums = _attend_past(
        q1, q2, keys_ptr, values_ptr, highest, weight, sums, *span, D, BLOCK
    )
    head = token * HEADS + kv_head * GROUP
    parts = (out_ptr + head * SPLITS * D, largest_ptr + head * SPLITS, total_ptr + head * SPLITS)
    arrived = arrivals_ptr + token * KV_HEADS + kv_head
    result = (highest, weight, sums, result_ptr + head * D)
    _hand_in(*result, *parts, arrived, split, live, GROUP, GROUP_P, SPLITS, D)


def decode_attention(
    qkv: Tensor,
    position: Tensor,
    count: Tensor,
    heads: Heads | None,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    splits: Splits,
) -> None:
    """Attention of the first `count` of a few tokens at `position`, position + 1, …

    qkv: (tokens, (heads + 2·kv_heads)·head_dim); position, count: (1,) int64 on the device; keys,
    values: (kv_heads, length, head_dim), one layer; out: (tokens, heads·head_dim).
    heads: given for one token whose qkv is as projected: q and k are normed and rotated here, and
    its key and value written into the cache. None: `rotate_and_store` has done that for all tokens.
    """
    own = heads is not None
    heads = heads or Heads(qkv, qkv, qkv, qkv, 0.0)  # read nowhere then
    tokens, arrivals = len(qkv), splits.arrivals
    kv_heads, length, head_dim = keys.shape
    query_heads = out.shape[1] // head_dim
    number = splits.out.shape[2]
    pdl = own and has_dependent_launch(qkv.device)
    _decode_attention[(kv_heads, number, tokens)](
        *(qkv, position, count, heads.q_norm, heads.k_norm, heads.cos, heads.sin),
        *(keys, values, out, splits.out, splits.largest, splits.total, arrivals),
        *(length, heads.eps, head_dim**-0.5 * LOG2E),
        HEADS=query_heads,
        KV_HEADS=kv_heads,
        D=head_dim,
        GROUP_P=triton.next_power_of_2(query_heads // kv_heads),
        SPLITS=number,
        BLOCK=splits.block,
        OWN=own,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )


def rotated_plain(x: Tensor, norm: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """x: (tokens, heads, head_dim) float32, cos, sin: (tokens, head_dim / 2)."""
    first, second = rms_normed(x, norm, eps).chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def store_plain(
    qkv: Tensor, start: int, count: int, heads: Heads, keys: Tensor, values: Tensor
) -> Tensor:
    """Write `count` tokens' keys and values; returns q (count, heads, head_dim) float32."""
    kv_heads, _, head_dim = keys.shape
    rows = qkv[:count].float().unflatten(1, (-1, head_dim))
    q, k, v = rows.split((rows.shape[1] - 2 * kv_heads, kv_heads, kv_heads), dim=1)
    end = start + count
    cos, sin = heads.cos[start:end], heads.sin[start:end]
    keys[:, start:end] = rotated_plain(k, heads.k_norm, cos, sin, heads.eps).transpose(0, 1)
    values[:, start:end] = v.transpose(0, 1)
    return rotated_plain(q, heads.q_norm, cos, sin, heads.eps)


def attended_plain(q: Tensor, start: int, keys: Tensor, values: Tensor) -> Tensor:
    """q: (count, heads, head_dim) at start…, rotated → (count, heads·head_dim) float32."""
    count, end = len(q), start + len(q)
    mask = torch.ones(count, end, dtype=torch.bool, device=q.device).tril(start)
    out = F.scaled_dot_product_attention(
        q.float().transpose(0, 1)[None],
        keys[None, :, :end].float(),
        values[None, :, :end].float(),
        attn_mask=mask,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1).flatten(1)


def decode_attention_plain(
    qkv: Tensor,
    position: Tensor,
    count: Tensor,
    heads: Heads | None,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    splits: Splits,
) -> None:
    start, number = position.item(), count.item()
    if heads is not None:
        q = store_plain(qkv, start, number, heads, keys, values)
    else:
        q = qkv[:number, : out.shape[1]].unflatten(1, (-1, keys.shape[2]))
    out[:number] = attended_plain(q, start, keys, values)
