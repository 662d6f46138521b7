"""The order in which kernels/decode.cu reads packed weights, and back.

The export stores codes row by row (formats.py). The kernel wants, for each block, one stream of
chunks: 16 rows × 2,048 columns with their scales behind them, codes in the order of tensor-core
fragments. Repacking happens once, when an export is loaded; nothing is rounded.

A 16 × 16 tile of an m16n8k16 A operand lies in a warp's lanes so (PTX ISA, mma.m16n8k16): lane
4·g + t holds the pairs of columns (2t, 2t + 1) of rows g and g + 8, then (2t + 8, 2t + 9) of both.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from model import Config

ROWS, COLUMNS, GROUP = 16, 2048, 64
WARPS = COLUMNS // 128
SCALE_BYTES = ROWS * (COLUMNS // GROUP) * 2
NF4_BYTES = ROWS * COLUMNS // 2 + SCALE_BYTES
INT6_BYTES = ROWS * COLUMNS * 3 // 4 + SCALE_BYTES


class Packed(NamedTuple):
    """codes: (rows, columns) uint8, one code each; scales: (rows, columns / 64) bf16."""

    codes: Tensor
    scales: Tensor

    def rows(self, index: Tensor) -> Packed:
        return Packed(self.codes[index], self.scales[index])


def fragments(codes: Tensor) -> Tensor:
    """(chunks, 16, 2048) codes → (chunks, warp, tile, lane, 4, 2): the four registers of each lane,
    each a pair of neighbouring columns."""
    tiles = codes.view(
        -1, 2, 8, WARPS, 8, 2, 4, 2
    )  # chunk, row half, g, warp, tile, k half, t, pair
    ordered = tiles.permute(
        0, 3, 4, 2, 6, 5, 1, 7
    )  # chunk, warp, tile, g, t, k half, row half, pair
    return ordered.reshape(-1, WARPS, 8, 32, 4, 2)


def from_fragments(ordered: Tensor) -> Tensor:
    """The inverse of `fragments`."""
    tiles = ordered.view(-1, WARPS, 8, 8, 4, 2, 2, 2)
    return tiles.permute(0, 6, 3, 1, 2, 5, 4, 7).reshape(-1, ROWS, COLUMNS)


def scale_bytes(scales: Tensor) -> Tensor:
    """(chunks, 16, 32) bf16 → (chunks, 1024) uint8: group by group, its 16 rows side by side."""
    return scales.transpose(1, 2).contiguous().view(torch.uint8).flatten(1)


def read_scales(data: Tensor) -> Tensor:
    """The inverse of `scale_bytes`."""
    return data.contiguous().view(torch.bfloat16).view(-1, COLUMNS // GROUP, ROWS).transpose(1, 2)


def nf4_chunks(codes: Tensor, scales: Tensor) -> Tensor:
    """(chunks, 16, 2048) codes below 16, (chunks, 16, 32) bf16 → (chunks, NF4_BYTES) uint8.

    A byte is a register: the high nibble the even column. A lane's four registers of four tiles are
    16 bytes, so that it reads one scale group at once.
    """
    pairs = fragments(codes)
    data = (pairs[..., 0] << 4) | pairs[..., 1]  # chunk, warp, tile, lane, register
    data = data.view(-1, WARPS, 2, 4, 32, 4).transpose(3, 4)
    return torch.cat((data.reshape(len(codes), -1), scale_bytes(scales)), dim=1)


def read_nf4_chunks(chunks: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of `nf4_chunks`."""
    data = chunks[:, :-SCALE_BYTES].reshape(-1, WARPS, 2, 32, 4, 4).transpose(3, 4)
    data = data.reshape(-1, WARPS, 8, 32, 4)
    codes = from_fragments(torch.stack((data >> 4, data & 15), dim=-1))
    return codes, read_scales(chunks[:, -SCALE_BYTES:])


def int6_chunks(codes: Tensor, scales: Tensor) -> Tensor:
    """(chunks, 16, 2048) codes below 64, (chunks, 16, 32) bf16 → (chunks, INT6_BYTES) uint8.

    Eight registers (two tiles) of a lane are three words. Each half of a word, one for the even and
    one for the odd column, holds two codes in its low 12 bits; the last two registers share what is
    left: their low four bits in words 0 and 2, their high two in word 1.
    """
    pairs = fragments(codes).int().view(-1, WARPS, 4, 2, 32, 4, 2)
    r = pairs.transpose(3, 4).reshape(-1, WARPS, 4, 32, 8, 2)  # chunk, warp, tiles, lane, register
    halves = torch.stack(
        (
            r[..., 0, :] | r[..., 1, :] << 6 | (r[..., 6, :] & 15) << 12,
            r[..., 2, :] | r[..., 3, :] << 6 | r[..., 6, :] >> 4 << 12 | r[..., 7, :] >> 4 << 14,
            r[..., 4, :] | r[..., 5, :] << 6 | (r[..., 7, :] & 15) << 12,
        ),
        dim=3,
    )  # chunk, warp, tiles, word, lane, half
    data = halves.to(torch.int32).flatten(-2)
    low, high = data & 255, data >> 8 & 255
    data = torch.stack((low, high), dim=-1).to(torch.uint8)
    return torch.cat((data.reshape(len(codes), -1), scale_bytes(scales)), dim=1)


def read_int6_chunks(chunks: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of `int6_chunks`."""
    data = chunks[:, :-SCALE_BYTES].reshape(-1, WARPS, 4, 3, 32, 2, 2).int()
    w = (data[..., 0] | data[..., 1] << 8).unbind(3)  # three of chunk, warp, tiles, lane, half
    registers = [x >> shift & 63 for x in w for shift in (0, 6)]
    registers.append(w[0] >> 12 | (w[1] >> 12 & 3) << 4)
    registers.append(w[2] >> 12 | w[1] >> 14 << 4)
    r = torch.stack(registers, dim=4)  # chunk, warp, tiles, lane, register, pair
    r = r.view(-1, WARPS, 4, 32, 2, 4, 2).transpose(3, 4).reshape(-1, WARPS, 8, 32, 4, 2)
    return from_fragments(r.to(torch.uint8)), read_scales(chunks[:, -SCALE_BYTES:])


# ------------------------------------------------------------------------------------- streams


def slices(matrix: Packed) -> list[Packed]:
    """A matrix cut into slices of 2,048 columns."""
    scales = matrix.scales.split(COLUMNS // GROUP, dim=1)
    return [Packed(c, s) for c, s in zip(matrix.codes.split(COLUMNS, dim=1), scales, strict=True)]


def block_rows(config: Config, blocks: int) -> dict[str, Tensor]:
    """Which rows of each matrix a block has, in the order of its chunks; (blocks, rows) int64.

    qkv: of q, k, v one below the other. A group of blocks has one key head: its query heads, then
    its keys, then its values, 32 rows a block. gate_up: of gate above up: eight gates, then the
    matching eight ups, and so on.
    """
    heads, kv, d = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    share = heads // kv
    parts = []
    for head in range(kv):
        query = torch.arange(head * share * d, (head + 1) * share * d)
        key = torch.arange(heads * d + head * d, heads * d + (head + 1) * d)
        parts.append(torch.cat((query, key, key + kv * d)))
    inter = torch.arange(config.intermediate_size).view(blocks, -1, 8)
    gate_up = torch.stack((inter, inter + config.intermediate_size), dim=2)
    own = torch.arange(config.hidden_size).view(blocks, -1)
    return {
        "qkv": torch.cat(parts).view(blocks, -1),
        "o": own,
        "gate_up": gate_up.flatten(1),
        "down": own,
    }


def layer_stream(
    config: Config, qkv: Packed, o: Packed, gate_up: Packed, down: Packed, blocks: int
) -> Tensor:
    """One layer's weights → (blocks, chunks, NF4_BYTES) uint8, in the order of use."""
    rows = block_rows(config, blocks)
    parts = []
    for name, matrix in (("qkv", qkv), ("o", o), ("gate_up", gate_up), ("down", down)):
        for part in slices(matrix):
            index = rows[name].to(part.codes.device)
            chosen = part.rows(index.flatten())
            chunks = nf4_chunks(
                chosen.codes.view(-1, ROWS, COLUMNS), chosen.scales.view(-1, ROWS, COLUMNS // GROUP)
            )
            parts.append(chunks.view(blocks, -1, NF4_BYTES))
    return torch.cat(parts, dim=1)


def head_stream(embedding: Packed) -> Tensor:
    """The embedding → (vocabulary / 16, INT6_BYTES) uint8."""
    codes = embedding.codes.view(-1, ROWS, COLUMNS)
    return int6_chunks(codes, embedding.scales.view(-1, ROWS, COLUMNS // GROUP))


def check_shape(config: Config, blocks: int) -> None:
    """ValueError where kernels/decode.cu can't run a model of this shape; the text says why."""
    wrong = {
        f"hidden size {config.hidden_size} is not {COLUMNS}": config.hidden_size != COLUMNS,
        f"intermediate size {config.intermediate_size} is not a multiple of {COLUMNS}": (
            config.intermediate_size % COLUMNS != 0
        ),
        f"head dimension {config.head_dim} is not 128": config.head_dim != 128,
        f"{config.num_key_value_heads} key heads are not {blocks // 16}": (
            config.num_key_value_heads * 16 != blocks
        ),
        f"{config.num_attention_heads} query heads are not two a key head": (
            config.num_attention_heads != 2 * config.num_key_value_heads
        ),
        f"a vocabulary of {config.vocab_size} is not a multiple of {ROWS}": (
            config.vocab_size % ROWS != 0
        ),
    }
    reasons = [text for text, bad in wrong.items() if bad]
    if reasons:
        raise ValueError(f"the persistent kernel does not fit this model: {'; '.join(reasons)}")
