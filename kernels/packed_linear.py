"""kernels/linear.py's products, and the choice, over packed weights: NF4 and INT6 (Triton).

For any GPU that Triton supports and any shape. A byte of codes is two neighbouring columns, the
even one in its high nibble; INT6 keeps its codes' upper two bits in a plane of their own, four to a
byte, so that both formats are read alike. Values are made in registers: an NF4 code by a look-up
in the codebook (64 bytes, which stay in the L1 cache), an INT6 code by arithmetic. Sums are plain
float32 with the scale inside.

Each function has the signature of its namesake in kernels/linear.py or kernels/fused.py, with a
`Matrix` for the weight, and a plain torch twin (…_plain).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from formats import NF4_CODEBOOK, pack_nibbles, unpack_nibbles
from kernels.fused import State, advance_plain, launch_advance
from kernels.linear import (
    HEAD_ROWS,
    Best,
    Tile,
    columns_at_once,
    gate_up_plain,
    has_dependent_launch,
    head_plain,
    linear_plain,
)

# columns: bytes of codes, two columns each
LINEAR_TILE = Tile(4, 1024, 4)
GATE_UP_TILE = Tile(2, 1024, 4)
HEAD_TILE = Tile(4, 1024, 4)


class Matrix(NamedTuple):
    """A packed weight (rows, columns). codes: (rows, columns / 2) uint8; top: INT6's upper bits,
    (rows, columns / 4) uint8, None for NF4; scales: (rows, groups) bf16; codebook: (16,) float32,
    None for INT6."""

    codes: Tensor
    top: Tensor | None
    scales: Tensor
    codebook: Tensor | None

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.codes), 2 * self.codes.shape[1]

    def __len__(self) -> int:
        return len(self.codes)

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.codes, self.top, self.scales) if t is not None)

    def rows(self, index: Tensor) -> Tensor:
        """(n,) int64 → (n, columns) float32."""
        top = None if self.top is None else self.top.index_select(0, index)
        codes, scales = (t.index_select(0, index) for t in (self.codes, self.scales))
        return Matrix(codes, top, scales, self.codebook).float()

    def float(self) -> Tensor:
        """(rows, columns) float32."""
        codes = unpack_nibbles(self.codes)
        if self.top is None:
            values = self.codebook[codes.int()]
        else:
            shifts = torch.tensor([0, 2, 4, 6], device=self.device, dtype=torch.uint8)
            top = (self.top[..., None] >> shifts & 3).flatten(1)
            values = (codes | top << 4).float() - 32.0
        groups = values.unflatten(1, (self.scales.shape[1], -1))
        return (groups * self.scales.float()[..., None]).flatten(1)


def nf4_matrix(codes: Tensor, scales: Tensor) -> Matrix:
    """(rows, columns) uint8 codes below 16, (rows, groups) bf16."""
    return Matrix(pack_nibbles(codes), None, scales, NF4_CODEBOOK.to(codes.device))


def int6_matrix(codes: Tensor, scales: Tensor) -> Matrix:
    """(rows, columns) uint8 codes below 64, (rows, groups) bf16."""
    a, b, c, d = (codes[:, i::4] >> 4 for i in range(4))
    return Matrix(pack_nibbles(codes & 15), a | b << 2 | c << 4 | d << 6, scales, None)


# ------------------------------------------------------------------------------------- kernels


@triton.jit
def _read(codes_ptr, top_ptr, scales_ptr, n, j, inside, K, GROUP, SIX):
    """The bytes, upper bits and scales of rows n at bytes j."""
    byte = tl.load(codes_ptr + n[:, None] * (K // 2) + j[None, :], mask=inside, other=0)
    at = n[:, None] * (K // GROUP) + (2 * j // GROUP)[None, :]
    scale = tl.load(scales_ptr + at, mask=inside, other=0.0)
    top = byte
    if SIX:
        top = tl.load(top_ptr + n[:, None] * (K // 4) + (j // 2)[None, :], mask=inside, other=0)
    return byte, top, scale


@triton.jit
def _dot(byte, top, scale, codebook_ptr, even_x, odd_x, j, SIX):
    """Products of the two columns of each byte with x, added up."""
    high, low = (byte >> 4).to(tl.int32), (byte & 15).to(tl.int32)
    if SIX:
        bits = top.to(tl.int32) >> ((j % 2) * 4)[None, :]
        even = ((high | (bits & 3) << 4) - 32).to(tl.float32)
        odd = ((low | (bits >> 2 & 3) << 4) - 32).to(tl.float32)
    else:
        even, odd = tl.load(codebook_ptr + high), tl.load(codebook_ptr + low)
    return (even * even_x[None, :] + odd * odd_x[None, :]) * scale.to(tl.float32)


@triton.jit
def _two(ptr, j):
    """Columns 2j and 2j + 1."""
    return tl.load(ptr + 2 * j).to(tl.float32), tl.load(ptr + 2 * j + 1).to(tl.float32)


@triton.jit
def _packed_linear(
    x_ptr,
    norm_ptr,
    codes_ptr,
    top_ptr,
    scales_ptr,
    codebook_ptr,
    out_ptr,
    eps,
    N,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    SIX: tl.constexpr,
    ROWS: tl.constexpr,
    BYTES: tl.constexpr,
    NORM: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = n[:, None] < N
    j = tl.arange(0, BYTES)
    byte, top, scale = _read(codes_ptr, top_ptr, scales_ptr, n, j, inside, K, GROUP, SIX)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    products = tl.zeros((ROWS, BYTES), tl.float32)
    squares = tl.zeros((BYTES,), tl.float32)
    for begin in tl.static_range(0, K // 2, BYTES):
        even, odd = _two(x_ptr, begin + j)
        if NORM:
            squares += even * even + odd * odd
            even_norm, odd_norm = _two(norm_ptr, begin + j)
            even *= even_norm
            odd *= odd_norm
        products += _dot(byte, top, scale, codebook_ptr, even, odd, j, SIX)
        if begin + BYTES < K // 2:
            byte, top, scale = _read(
                codes_ptr, top_ptr, scales_ptr, n, begin + BYTES + j, inside, K, GROUP, SIX
            )
    out = tl.sum(products, axis=1)
    if NORM:
        out *= tl.rsqrt(tl.sum(squares) / K + eps)
    if ADD:
        out += tl.load(out_ptr + n, mask=n < N, other=0.0)
    tl.store(out_ptr + n, out, mask=n < N)


@triton.jit
def _packed_gate_up(
    x_ptr,
    norm_ptr,
    codes_ptr,
    top_ptr,
    scales_ptr,
    codebook_ptr,
    out_ptr,
    eps,
    N,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    SIX: tl.constexpr,
    ROWS: tl.constexpr,
    BYTES: tl.constexpr,
    PDL: tl.constexpr,
):
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = n[:, None] < N
    j = tl.arange(0, BYTES)
    byte, top, scale = _read(codes_ptr, top_ptr, scales_ptr, n, j, inside, K, GROUP, SIX)
    byte2, top2, scale2 = _read(codes_ptr, top_ptr, scales_ptr, n + N, j, inside, K, GROUP, SIX)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    gates = tl.zeros((ROWS, BYTES), tl.float32)
    ups = tl.zeros((ROWS, BYTES), tl.float32)
    squares = tl.zeros((BYTES,), tl.float32)
    for begin in tl.static_range(0, K // 2, BYTES):
        even, odd = _two(x_ptr, begin + j)
        squares += even * even + odd * odd
        even_norm, odd_norm = _two(norm_ptr, begin + j)
        even *= even_norm
        odd *= odd_norm
        gates += _dot(byte, top, scale, codebook_ptr, even, odd, j, SIX)
        ups += _dot(byte2, top2, scale2, codebook_ptr, even, odd, j, SIX)
        if begin + BYTES < K // 2:
            after = begin + BYTES + j
            byte, top, scale = _read(
                codes_ptr, top_ptr, scales_ptr, n, after, inside, K, GROUP, SIX
            )
            byte2, top2, scale2 = _read(
                codes_ptr, top_ptr, scales_ptr, n + N, after, inside, K, GROUP, SIX
            )
    scale = tl.rsqrt(tl.sum(squares) / K + eps)
    g, u = tl.sum(gates, axis=1) * scale, tl.sum(ups, axis=1) * scale
    tl.store(out_ptr + n, g * tl.sigmoid(g) * u, mask=n < N)


@triton.jit
def _packed_head(
    x_ptr,
    norm_ptr,
    codes_ptr,
    top_ptr,
    scales_ptr,
    codebook_ptr,
    logits_ptr,
    best_ptr,
    token_ptr,
    total_ptr,
    eps,
    N,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    SIX: tl.constexpr,
    ROWS: tl.constexpr,
    BYTES: tl.constexpr,
    TILES: tl.constexpr,
    PDL: tl.constexpr,
):
    program = tl.program_id(0)
    n = program * ROWS * TILES + tl.arange(0, ROWS)
    j = tl.arange(0, BYTES)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    squares = tl.zeros((BYTES,), tl.float32)
    for begin in tl.static_range(0, K // 2, BYTES):
        even, odd = _two(x_ptr, begin + j)
        squares += even * even + odd * odd
    norm_scale = tl.rsqrt(tl.sum(squares) / K + eps)
    best, total = -float("inf"), 0.0
    token = program * ROWS * TILES
    for _ in range(TILES):
        inside = n[:, None] < N
        products = tl.zeros((ROWS, BYTES), tl.float32)
        for begin in tl.static_range(0, K // 2, BYTES):
            at = begin + j
            byte, top, scale = _read(codes_ptr, top_ptr, scales_ptr, n, at, inside, K, GROUP, SIX)
            even, odd = _two(x_ptr, at)
            even_norm, odd_norm = _two(norm_ptr, at)
            products += _dot(
                byte, top, scale, codebook_ptr, even * even_norm, odd * odd_norm, j, SIX
            )
        logits = tl.sum(products, axis=1) * norm_scale
        tl.store(logits_ptr + n, logits, mask=n < N)
        logits = tl.where(n < N, logits, -float("inf"))
        largest = tl.max(logits)
        first = tl.min(tl.where(logits == largest, n, 2147483647))
        token = tl.where(largest > best, first, token)  # the earlier of equal ones stays
        highest = tl.maximum(best, largest)
        total = total * tl.exp(best - highest) + tl.sum(tl.exp(logits - highest))
        best = highest
        n += ROWS
    tl.store(best_ptr + program, best)
    tl.store(token_ptr + program, token)
    tl.store(total_ptr + program, total)


@triton.jit
def _unpack_row(
    tokens_ptr,
    step_ptr,
    codes_ptr,
    top_ptr,
    scales_ptr,
    codebook_ptr,
    x_ptr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    SIX: tl.constexpr,
    BYTES: tl.constexpr,
    PDL: tl.constexpr,
):
    j = tl.program_id(0) * BYTES + tl.arange(0, BYTES)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    n = tl.load(tokens_ptr + tl.load(step_ptr) - 1 + tl.arange(0, 1))
    inside = (n[:, None] >= 0) & (j[None, :] < K // 2)
    byte, top, scale = _read(codes_ptr, top_ptr, scales_ptr, n, j, inside, K, GROUP, SIX)
    one, none = tl.full((BYTES,), 1.0, tl.float32), tl.zeros((BYTES,), tl.float32)
    even = _dot(byte, top, scale, codebook_ptr, one, none, j, SIX)
    odd = _dot(byte, top, scale, codebook_ptr, none, one, j, SIX)
    at = 2 * j[None, :] + n[:, None] * 0
    tl.store(x_ptr + at, even, mask=inside)
    tl.store(x_ptr + at + 1, odd, mask=inside)


# ----------------------------------------------------------------------------------- functions


def _sources(weight: Matrix) -> tuple[Tensor, ...]:
    """The kernels' pointers; one that a format lacks is never read."""
    spare = weight.scales
    codebook = spare if weight.codebook is None else weight.codebook
    return weight.codes, weight.codes if weight.top is None else weight.top, spare, codebook


def _constants(weight: Matrix, tile: Tile) -> dict:
    columns = weight.shape[1]
    pdl = has_dependent_launch(weight.device)
    return {
        "K": columns,
        "GROUP": columns // weight.scales.shape[1],
        "SIX": weight.top is not None,
        "ROWS": tile.rows,
        "BYTES": columns_at_once(columns // 2, tile.columns),
        "PDL": pdl,
        "num_warps": tile.warps,
        "launch_pdl": pdl,
    }


def linear(
    x: Tensor,
    weight: Matrix,
    out: Tensor,
    norm: Tensor | None = None,
    eps: float = 0.0,
    add: bool = False,
    tile: Tile = LINEAR_TILE,
) -> None:
    rows = len(weight)
    _packed_linear[(triton.cdiv(rows, tile.rows),)](
        *(x, x if norm is None else norm, *_sources(weight), out, eps, rows),
        NORM=norm is not None,
        ADD=add,
        **_constants(weight, tile),
    )


def gate_up(
    x: Tensor, weight: Matrix, out: Tensor, norm: Tensor, eps: float, tile: Tile = GATE_UP_TILE
) -> None:
    _packed_gate_up[(triton.cdiv(len(out), tile.rows),)](
        *(x, norm, *_sources(weight), out, eps, len(out)), **_constants(weight, tile)
    )


def head(
    x: Tensor,
    weight: Matrix,
    logits: Tensor,
    best: Best,
    norm: Tensor,
    eps: float,
    tile: Tile = HEAD_TILE,
) -> None:
    _packed_head[(len(best.logit),)](
        *(x, norm, *_sources(weight), logits, *best, eps, len(weight)),
        TILES=HEAD_ROWS // tile.rows,
        **_constants(weight, tile),
    )


def advance(best: Best, embedding: Matrix, state: State) -> None:
    launch_advance(best, None, state, *embedding.shape)
    constants = _constants(embedding, Tile(1, 256, 2))
    del constants["ROWS"]
    _unpack_row[(triton.cdiv(embedding.shape[1] // 2, constants["BYTES"]),)](
        state.tokens, state.step, *_sources(embedding), state.x, **constants
    )


def linear_packed_plain(
    x: Tensor,
    weight: Matrix,
    out: Tensor,
    norm: Tensor | None = None,
    eps: float = 0.0,
    add: bool = False,
) -> None:
    linear_plain(x, weight.float(), out, norm, eps, add)


def gate_up_packed_plain(x: Tensor, weight: Matrix, out: Tensor, norm: Tensor, eps: float) -> None:
    gate_up_plain(x, weight.float(), out, norm, eps)


def head_packed_plain(
    x: Tensor, weight: Matrix, logits: Tensor, best: Best, norm: Tensor, eps: float
) -> None:
    head_plain(x, weight.float(), logits, best, norm, eps)


def advance_packed_plain(best: Best, embedding: Matrix, state: State) -> None:
    advance_plain(best, embedding.float(), state)
