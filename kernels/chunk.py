"""Attention of many new tokens over a KV cache (Triton), on the tensor cores.

FlashAttention-2 (arXiv:2307.08691). The first position and the number of tokens are read from
device memory, so that one captured graph serves every start and every length up to its size.

Each function has a plain torch twin of the same signature (…_plain).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention import LOG2E, NOTHING, attended_plain

ROWS = 64  # queries of a block


@triton.jit
def _attend_tiles(
    q,
    keys_ptr,
    values_ptr,
    highest,
    weight,
    sums,
    rows,
    begin,
    end,
    scale,
    D: tl.constexpr,
    COLUMNS: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Positions begin … end - 1 for the queries at positions `rows`; MASKED: up to their own."""
    n = tl.arange(0, COLUMNS)
    d = tl.arange(0, D)
    for at in range(begin, end, COLUMNS):
        kept = (at + n) < end
        if MASKED:
            k = tl.load(keys_ptr + (at + n)[None, :] * D + d[:, None], kept[None, :], other=0.0)
            v = tl.load(values_ptr + (at + n)[:, None] * D + d[None, :], kept[:, None], other=0.0)
        else:
            k = tl.load(keys_ptr + (at + n)[None, :] * D + d[:, None])
            v = tl.load(values_ptr + (at + n)[:, None] * D + d[None, :])
        score = tl.dot(q, k, input_precision=PRECISION) * scale
        if MASKED:
            score = tl.where((at + n)[None, :] <= rows[:, None], score, -float("inf"))
        above = tl.maximum(highest, tl.max(score, axis=1))
        share = tl.exp2(score - above[:, None])
        old = tl.exp2(highest - above)
        weight = weight * old + tl.sum(share, axis=1)
        sums = sums * old[:, None]
        sums = tl.dot(share.to(v.dtype), v, sums, input_precision=PRECISION)
        highest = above
    return highest, weight, sums


@triton.jit
def _chunk_attention(
    qkv_ptr,
    start_ptr,
    count_ptr,
    keys_ptr,
    values_ptr,
    out_ptr,
    length,
    scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    head = tl.program_id(1)
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS  # the longest rows start first
    start = tl.load(start_ptr).to(tl.int32)
    count = tl.load(count_ptr).to(tl.int32)
    if first >= count:
        return
    m = first + tl.arange(0, ROWS)
    d = tl.arange(0, D)
    stride: tl.constexpr = (HEADS + 2 * KV_HEADS) * D
    q_ptr = qkv_ptr + m[:, None] * stride + head * D + d[None, :]
    q = tl.load(q_ptr, mask=m[:, None] < count, other=0.0)
    kv_head = head // (HEADS // KV_HEADS)
    keys_ptr += kv_head * length * D
    values_ptr += kv_head * length * D
    highest = tl.full((ROWS,), NOTHING, tl.float32)
    weight = tl.zeros((ROWS,), tl.float32)
    sums = tl.zeros((ROWS, D), tl.float32)
    common = (start + first) // COLUMNS * COLUMNS  # every query of this block sees what is below
    end = start + tl.minimum(first + ROWS, count)
    rows = start + m
    highest, weight, sums = _attend_tiles(
        *(q, keys_ptr, values_ptr, highest, weight, sums, rows, 0, common, scale),
        *(D, COLUMNS, False, PRECISION),
    )
    highest, weight, sums = _attend_tiles(
        *(q, keys_ptr, values_ptr, highest, weight, sums, rows, common, end, scale),
        *(D, COLUMNS, True, PRECISION),
    )
    out = (sums / weight[:, None]).to(out_ptr.dtype.element_ty)
    at = m[:, None] * (HEADS * D) + head * D + d[None, :]
    tl.store(out_ptr + at, out, mask=m[:, None] < count)


def stages_of(device: torch.device) -> int:
    """How many tiles of keys and values are on their way at once.

    Three take 112 KB of shared memory a block, which A100, H100 and B200 have; the smaller chips of
    their generations have 99.
    """
    if device.type != "cuda":
        return 1
    capability = torch.cuda.get_device_capability(device)
    return 3 if capability == (8, 0) or capability[0] in (9, 10) else 2


def chunk_attention(
    qkv: Tensor, start: Tensor, count: Tensor, keys: Tensor, values: Tensor, out: Tensor
) -> None:
    """Causal attention of `count` tokens at positions start…, after `rotate_and_store`.

    Shapes as in decode_attention; rows of `out` from `count` on are left as they are. float32
    operands are multiplied in full float32, not in tf32.
    """
    kv_heads, length, head_dim = keys.shape
    query_heads = out.shape[1] // head_dim
    full = qkv.dtype == torch.float32
    rows = 16 if full else ROWS
    _chunk_attention[(triton.cdiv(len(qkv), rows), query_heads)](
        *(qkv, start, count, keys, values, out, length, head_dim**-0.5 * LOG2E),
        HEADS=query_heads,
        KV_HEADS=kv_heads,
        D=head_dim,
        ROWS=rows,
        COLUMNS=16 if full else 64,
        PRECISION="ieee" if full else "tf32",
        num_warps=4,
        num_stages=1 if full else stages_of(qkv.device),
    )


def chunk_attention_plain(
    qkv: Tensor, start: Tensor, count: Tensor, keys: Tensor, values: Tensor, out: Tensor
) -> None:
    q = qkv[: count.item(), : out.shape[1]].unflatten(1, (-1, keys.shape[2]))
    out[: count.item()] = attended_plain(q, start.item(), keys, values)
