"""What stands between the matrix products: norms, rotation, activation, the choice (Triton).

The first three work on many rows (prefill, and extensions by a few tokens), with the residual in
float32 and everything else in the weights' dtype; `advance` ends a decode step and begins the next.

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

from kernels.attention import Heads, _normed_halves, store_plain
from kernels.linear import Best, has_dependent_launch, rms_normed


class State(NamedTuple):
    """Where a draft stands, on the device. x: (hidden,) float32, the residual that the next step
    starts from; position, step: (1,) int64, its position and index in the draft; tokens (n,) int64
    and probabilities (n,) float32: the draft so far."""

    x: Tensor
    position: Tensor
    step: Tensor
    tokens: Tensor
    probabilities: Tensor


@triton.jit
def _add_norm(
    x_ptr,
    delta_ptr,
    norm_ptr,
    out_ptr,
    eps,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ADD: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * WIDTH
    k = tl.arange(0, COLUMNS)
    inside = k < WIDTH
    x = tl.load(x_ptr + row + k, mask=inside, other=0.0)
    if ADD:
        x += tl.load(delta_ptr + row + k, mask=inside, other=0.0).to(tl.float32)
        tl.store(x_ptr + row + k, x, mask=inside)
    scale = tl.rsqrt(tl.sum(x * x) / WIDTH + eps)
    out = x * scale * tl.load(norm_ptr + k, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row + k, out.to(out_ptr.dtype.element_ty), mask=inside)


def add_norm(x: Tensor, delta: Tensor | None, norm: Tensor, eps: float) -> Tensor:
    """x += delta; returns rmsnorm(x) × norm.

    x: (tokens, hidden) float32, changed in place; delta: (tokens, hidden) or None; norm: (hidden,),
    whose dtype the result has.
    """
    tokens, width = x.shape
    out = torch.empty_like(x, dtype=norm.dtype)
    _add_norm[(tokens,)](
        *(x, x if delta is None else delta, norm, out, eps),
        WIDTH=width,
        COLUMNS=triton.next_power_of_2(width),
        ADD=delta is not None,
        num_warps=4 if width <= 4096 else 8,
    )
    return out


def add_norm_plain(x: Tensor, delta: Tensor | None, norm: Tensor, eps: float) -> Tensor:
    if delta is not None:
        x += delta
    return rms_normed(x, norm, eps).to(norm.dtype)


@triton.jit
def _rotate_and_store(
    qkv_ptr,
    start_ptr,
    count_ptr,
    q_norm_ptr,
    k_norm_ptr,
    cos_ptr,
    sin_ptr,
    keys_ptr,
    values_ptr,
    length,
    eps,
    HEADS: tl.constexpr,
    HEADS_P: tl.constexpr,
    KV_HEADS: tl.constexpr,
    KV_HEADS_P: tl.constexpr,
    D: tl.constexpr,
):
    token = tl.program_id(0)
    if token >= tl.load(count_ptr).to(tl.int32):
        return
    position = tl.load(start_ptr).to(tl.int32) + token
    cos_ptr += position * (D // 2)
    sin_ptr += position * (D // 2)
    qkv_ptr += token * (HEADS + 2 * KV_HEADS) * D
    d = tl.arange(0, D // 2)[None, None, :]
    h = tl.arange(0, HEADS_P)[:, None, None]
    at = qkv_ptr + h * D + d
    first = tl.load(at, mask=h < HEADS, other=0.0).to(tl.float32)
    second = tl.load(at + D // 2, mask=h < HEADS, other=0.0).to(tl.float32)
    first, second = _normed_halves(first, second, q_norm_ptr, cos_ptr, sin_ptr, d, eps, D)
    tl.store(at, first.to(qkv_ptr.dtype.element_ty), mask=h < HEADS)
    tl.store(at + D // 2, second.to(qkv_ptr.dtype.element_ty), mask=h < HEADS)

    kind = keys_ptr.dtype.element_ty
    h = tl.arange(0, KV_HEADS_P)[:, None, None]
    inside = h < KV_HEADS
    at = qkv_ptr + (HEADS + h) * D + d
    first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + D // 2, mask=inside, other=0.0).to(tl.float32)
    first, second = _normed_halves(first, second, k_norm_ptr, cos_ptr, sin_ptr, d, eps, D)
    to = (h * length + position) * D + d
    tl.store(keys_ptr + to, first.to(kind), mask=inside)
    tl.store(keys_ptr + to + D // 2, second.to(kind), mask=inside)
    at = qkv_ptr + (HEADS + KV_HEADS + h) * D + d
    tl.store(values_ptr + to, tl.load(at, mask=inside, other=0.0).to(kind), mask=inside)
    second = tl.load(at + D // 2, mask=inside, other=0.0)
    tl.store(values_ptr + to + D // 2, second.to(kind), mask=inside)


def rotate_and_store(
    qkv: Tensor, start: Tensor, count: Tensor, heads: Heads, keys: Tensor, values: Tensor
) -> None:
    """Norm and rotate the first `count` tokens' q in place; their k and v go into the cache.

    qkv: (tokens, (heads + 2·kv_heads)·head_dim); start, count: (1,) int64 on the device, the first
    token's position and how many there are; keys, values: (kv_heads, length, head_dim), one layer.
    """
    kv_heads, length, head_dim = keys.shape
    query_heads = qkv.shape[1] // head_dim - 2 * kv_heads
    _rotate_and_store[(len(qkv),)](
        *(qkv, start, count, heads.q_norm, heads.k_norm, heads.cos, heads.sin, keys, values),
        *(length, heads.eps),
        HEADS=query_heads,
        HEADS_P=triton.next_power_of_2(query_heads),
        KV_HEADS=kv_heads,
        KV_HEADS_P=triton.next_power_of_2(kv_heads),
        D=head_dim,
        num_warps=4,
    )


def rotate_and_store_plain(
    qkv: Tensor, start: Tensor, count: Tensor, heads: Heads, keys: Tensor, values: Tensor
) -> None:
    q = store_plain(qkv, start.item(), count.item(), heads, keys, values)
    qkv[: len(q), : q.shape[1] * q.shape[2]] = q.flatten(1)


@triton.jit
def _silu_up(gate_up_ptr, out_ptr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = k < WIDTH
    at = gate_up_ptr + row * 2 * WIDTH + k
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + WIDTH, mask=inside, other=0.0).to(tl.float32)
    out = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + row * WIDTH + k, out.to(out_ptr.dtype.element_ty), mask=inside)


def silu_up(gate_up: Tensor) -> Tensor:
    """(tokens, 2·n), the gate first → silu(gate) × up (tokens, n), rounded once."""
    tokens, both = gate_up.shape
    out = gate_up.new_empty(tokens, both // 2)
    columns = min(triton.next_power_of_2(both // 2), 2048)
    _silu_up[(tokens, triton.cdiv(both // 2, columns))](
        gate_up, out, WIDTH=both // 2, COLUMNS=columns, num_warps=4
    )
    return out


def silu_up_plain(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


@triton.jit
def _advance(
    best_ptr,
    token_ptr,
    total_ptr,
    embedding_ptr,
    x_ptr,
    position_ptr,
    step_ptr,
    tokens_ptr,
    probabilities_ptr,
    programs,
    vocab,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    EMBED: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i = tl.arange(0, PROGRAMS)
    inside = i < programs
    best = tl.load(best_ptr + i, mask=inside, other=-float("inf"))
    largest = tl.max(best)
    candidates = tl.load(token_ptr + i, mask=inside & (best == largest), other=2147483647)
    token = tl.minimum(tl.min(candidates), vocab - 1)  # no candidate among NaNs
    total = tl.load(total_ptr + i, mask=inside, other=0.0)
    total = tl.sum(tl.where(inside, total * tl.exp(best - largest), 0.0))
    step = tl.load(step_ptr)
    tl.store(tokens_ptr + step, token.to(tl.int64))
    tl.store(probabilities_ptr + step, 1.0 / total)
    if EMBED:
        k = tl.arange(0, COLUMNS)
        row = embedding_ptr + token.to(tl.int64) * WIDTH
        x = tl.load(row + k, mask=k < WIDTH, other=0.0).to(tl.float32)
        tl.store(x_ptr + k, x, mask=k < WIDTH)
    position = tl.load(position_ptr)
    tl.debug_barrier()  # each thread has read both before one of them writes
    tl.store(step_ptr, step + 1)
    tl.store(position_ptr, position + 1)


def advance(best: Best, embedding: Tensor, state: State) -> None:
    """Choose the token with the largest logit (the lowest id of equal ones) and step on to it.

    best: from `head`; embedding: (vocab, hidden); state: token and probability are kept at index
    `step`, x becomes the token's embedding, step and position grow by one. A logit that is not a
    number makes the probability not a number.
    """
    launch_advance(best, embedding, state, *embedding.shape)


def launch_advance(
    best: Best, embedding: Tensor | None, state: State, vocab: int, width: int
) -> None:
    """`advance`; without an embedding x stays as it is."""
    programs = len(best.logit)
    pdl = has_dependent_launch(state.x.device)
    _advance[(1,)](
        *(*best, state.x if embedding is None else embedding, *state, programs, vocab),
        WIDTH=width,
        COLUMNS=triton.next_power_of_2(width),
        PROGRAMS=triton.next_power_of_2(programs),
        EMBED=embedding is not None,
        PDL=pdl,
        num_warps=8,
        launch_pdl=pdl,
    )


def advance_plain(best: Best, embedding: Tensor, state: State) -> None:
    largest = best.logit.amax()
    winners = best.token[best.logit == largest]
    token = winners.amin().item() if len(winners) else len(embedding) - 1
    total = (best.total * (best.logit - largest).exp()).sum()
    step = state.step.item()
    state.tokens[step] = token
    state.probabilities[step] = 1.0 / total
    state.x.copy_(embedding[token])
    state.step.add_(1)
    state.position.add_(1)
