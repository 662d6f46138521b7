"""Matrix-vector products of one decode step, each fused with what surrounds it (Triton).

A step reads every weight once and little else, so these kernels are built to keep as many bytes of
weights in flight as they can: a program takes a few whole rows, the tile of weights is asked for
before anything that depends on the previous kernel, and the products are plain float32 (tensor
cores would have nothing to do). Vectors stay float32 between kernels.

RMSNorm is folded in: its per-column weight multiplies the vector while it is read, and the common
factor 1 / rms is applied after the dot product, so that no pass over the vector comes first.

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


class Tile(NamedTuple):
    """rows and columns that a program reads at once, and its warps."""

    rows: int
    columns: int
    warps: int


# Fastest of a sweep on one H200 for Qwen3-1.7B's shapes; other shapes take them as they are.
LINEAR_TILE = Tile(4, 2048, 4)
NORMED_TILE = Tile(2, 1024, 2)  # of `linear` with a norm
LONG_TILE = Tile(8, 2048, 8)  # of `linear` over rows of more than LONG columns
LONG = 4096
GATE_UP_TILE = Tile(4, 1024, 4)
HEAD_TILE = Tile(8, 2048, 8)
HEAD_ROWS = 128  # of the vocabulary, a program


class Best(NamedTuple):
    """What each program of `head` found among its rows, all (programs,): the largest logit
    (float32), its lowest id (int32), and the sum of exp(logit - largest) (float32)."""

    logit: Tensor
    token: Tensor
    total: Tensor


def has_dependent_launch(device: torch.device) -> bool:
    """Whether kernels may start before their predecessor's end (sm_90 on)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def best_buffers(vocab_size: int, device: torch.device) -> Best:
    programs = triton.cdiv(vocab_size, HEAD_ROWS)
    return Best(
        torch.empty(programs, device=device),
        torch.empty(programs, dtype=torch.int32, device=device),
        torch.empty(programs, device=device),
    )


def columns_at_once(columns: int, most: int) -> int:
    """The largest power of two that divides `columns`, up to `most`: a loop without a mask."""
    return min(columns & -columns, most)


@triton.jit
def _linear(
    x_ptr,
    norm_ptr,
    weight_ptr,
    out_ptr,
    eps,
    N,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    NORM: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, COLUMNS)
    tile = weight_ptr + n[:, None] * K + k[None, :]
    weight = tl.load(tile, mask=n[:, None] < N, other=0.0)  # constant: needs no wait
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    products = tl.zeros((ROWS, COLUMNS), tl.float32)
    squares = tl.zeros((COLUMNS,), tl.float32)
    for begin in tl.static_range(0, K, COLUMNS):
        x = tl.load(x_ptr + begin + k)
        if NORM:
            squares += x * x
            x *= tl.load(norm_ptr + begin + k).to(tl.float32)
        products += weight.to(tl.float32) * x[None, :]
        if begin + COLUMNS < K:
            weight = tl.load(tile + begin + COLUMNS, mask=n[:, None] < N, other=0.0)
    out = tl.sum(products, axis=1)
    if NORM:
        out *= tl.rsqrt(tl.sum(squares) / K + eps)
    if ADD:
        out += tl.load(out_ptr + n, mask=n < N, other=0.0)
    tl.store(out_ptr + n, out, mask=n < N)


@triton.jit
def _gate_up(
    x_ptr,
    norm_ptr,
    weight_ptr,
    out_ptr,
    eps,
    N,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, COLUMNS)
    inside = n[:, None] < N
    tile = weight_ptr + n[:, None] * K + k[None, :]
    gate = tl.load(tile, mask=inside, other=0.0)
    up = tl.load(tile + N * K, mask=inside, other=0.0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    gates = tl.zeros((ROWS, COLUMNS), tl.float32)
    ups = tl.zeros((ROWS, COLUMNS), tl.float32)
    squares = tl.zeros((COLUMNS,), tl.float32)
    for begin in tl.static_range(0, K, COLUMNS):
        x = tl.load(x_ptr + begin + k)
        squares += x * x
        x *= tl.load(norm_ptr + begin + k).to(tl.float32)
        gates += gate.to(tl.float32) * x[None, :]
        ups += up.to(tl.float32) * x[None, :]
        if begin + COLUMNS < K:
            gate = tl.load(tile + begin + COLUMNS, mask=inside, other=0.0)
            up = tl.load(tile + N * K + begin + COLUMNS, mask=inside, other=0.0)
    scale = tl.rsqrt(tl.sum(squares) / K + eps)
    g, u = tl.sum(gates, axis=1) * scale, tl.sum(ups, axis=1) * scale
    tl.store(out_ptr + n, g * tl.sigmoid(g) * u, mask=n < N)


@triton.jit
def _head(
    x_ptr,
    norm_ptr,
    weight_ptr,
    logits_ptr,
    best_ptr,
    token_ptr,
    total_ptr,
    eps,
    N,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILES: tl.constexpr,
    PDL: tl.constexpr,
):
    program = tl.program_id(0)
    n = program * ROWS * TILES + tl.arange(0, ROWS)
    k = tl.arange(0, COLUMNS)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    squares = tl.zeros((COLUMNS,), tl.float32)
    for begin in tl.static_range(0, K, COLUMNS):
        x = tl.load(x_ptr + begin + k)
        squares += x * x
    scale = tl.rsqrt(tl.sum(squares) / K + eps)
    best, total = -float("inf"), 0.0
    token = program * ROWS * TILES
    for _ in range(TILES):
        products = tl.zeros((ROWS, COLUMNS), tl.float32)
        for begin in tl.static_range(0, K, COLUMNS):
            at = n[:, None] * K + begin + k[None, :]
            weight = tl.load(weight_ptr + at, mask=n[:, None] < N, other=0.0)
            x = tl.load(x_ptr + begin + k) * tl.load(norm_ptr + begin + k).to(tl.float32)
            products += weight.to(tl.float32) * x[None, :]
        logits = tl.sum(products, axis=1) * scale
        tl.store(logits_ptr + n, logits, mask=n < N)
        logits = tl.where(n < N, logits, -float("inf"))
        largest = tl.max(logits)
        first = tl.min(tl.where(logits == largest, n, 2147483647))
        token = tl.where(largest > best, first, token)  # the earlier of equal ones stays
        highest = tl.maximum(best, largest)
        # exp(NaN) keeps a logit that is not a number visible: its probability is one neither.
        total = total * tl.exp(best - highest) + tl.sum(tl.exp(logits - highest))
        best = highest
        n += ROWS
    tl.store(best_ptr + program, best)
    tl.store(token_ptr + program, token)
    tl.store(total_ptr + program, total)


def linear(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    norm: Tensor | None = None,
    eps: float = 0.0,
    add: bool = False,
    tile: Tile | None = None,
) -> None:
    """out = weight @ x, or out += with `add`; of rmsnorm(x) × norm where `norm` is given.

    x: (K,) float32; weight: (N, K) bf16 or float32; out: (N,) float32; norm: (K,). tile: None for
    the one measured best.
    """
    rows, columns = weight.shape
    if tile is None:
        tile = NORMED_TILE if norm is not None else LONG_TILE if columns > LONG else LINEAR_TILE
    pdl = has_dependent_launch(x.device)
    _linear[(triton.cdiv(rows, tile.rows),)](
        *(x, weight if norm is None else norm, weight, out, eps, rows),
        K=columns,
        ROWS=tile.rows,
        COLUMNS=columns_at_once(columns, tile.columns),
        NORM=norm is not None,
        ADD=add,
        PDL=pdl,
        num_warps=tile.warps,
        launch_pdl=pdl,
    )


def rms_normed(x: Tensor, norm: Tensor, eps: float) -> Tensor:
    """(…, K) float32 → float32."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * norm.float()


def linear_plain(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    norm: Tensor | None = None,
    eps: float = 0.0,
    add: bool = False,
) -> None:
    x = x if norm is None else rms_normed(x, norm, eps)
    found = F.linear(x, weight.float())
    out.copy_(out + found if add else found)


def gate_up(
    x: Tensor, weight: Tensor, out: Tensor, norm: Tensor, eps: float, tile: Tile = GATE_UP_TILE
) -> None:
    """out = silu(gate @ y) × (up @ y) of y = rmsnorm(x) × norm.

    x: (K,) float32; weight: (2N, K), the gate's rows first; out: (N,) float32.
    """
    columns = weight.shape[1]
    pdl = has_dependent_launch(x.device)
    _gate_up[(triton.cdiv(len(out), tile.rows),)](
        *(x, norm, weight, out, eps, len(out)),
        K=columns,
        ROWS=tile.rows,
        COLUMNS=columns_at_once(columns, tile.columns),
        PDL=pdl,
        num_warps=tile.warps,
        launch_pdl=pdl,
    )


def gate_up_plain(x: Tensor, weight: Tensor, out: Tensor, norm: Tensor, eps: float) -> None:
    gate, up = F.linear(rms_normed(x, norm, eps), weight.float()).chunk(2)
    out.copy_(F.silu(gate) * up)


def head(
    x: Tensor,
    weight: Tensor,
    logits: Tensor,
    best: Best,
    norm: Tensor,
    eps: float,
    tile: Tile = HEAD_TILE,
) -> None:
    """logits = weight @ (rmsnorm(x) × norm), and each program's Best of its rows.

    x: (K,) float32; weight: (vocab, K); logits: (vocab,) float32; best: see best_buffers.
    """
    vocab, columns = weight.shape
    pdl = has_dependent_launch(x.device)
    _head[(len(best.logit),)](
        *(x, norm, weight, logits, *best, eps, vocab),
        K=columns,
        ROWS=tile.rows,
        COLUMNS=columns_at_once(columns, tile.columns),
        TILES=HEAD_ROWS // tile.rows,
        PDL=pdl,
        num_warps=tile.warps,
        launch_pdl=pdl,
    )


def head_plain(
    x: Tensor, weight: Tensor, logits: Tensor, best: Best, norm: Tensor, eps: float
) -> None:
    logits.copy_(F.linear(rms_normed(x, norm, eps), weight.float()))
    padded = F.pad(logits, (0, -len(logits) % HEAD_ROWS), value=-torch.inf).view(-1, HEAD_ROWS)
    best.logit.copy_(padded.amax(-1))
    first = torch.arange(len(padded), device=x.device) * HEAD_ROWS
    best.token.copy_(first + padded.argmax(-1))
    best.total.copy_((padded - best.logit[:, None]).exp().sum(-1))
