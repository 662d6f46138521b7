"""The kernel's order of the weights: nothing lost, every lane finds its codes."""

from __future__ import annotations

import pytest
import torch
from exports import make_export
from hypothesis import given, settings
from hypothesis import strategies as st

from formats import Export, decode
from kernels.layout import (
    COLUMNS,
    GROUP,
    INT6_BYTES,
    NF4_BYTES,
    ROWS,
    Packed,
    block_rows,
    check_shape,
    head_stream,
    int6_chunks,
    layer_stream,
    nf4_chunks,
    read_int6_chunks,
    read_nf4_chunks,
)
from model import Config
from packed import Weights

CONFIG = Config(2048, 6144, 1, 16, 8, 128, 4096, 4096, 1e6, 1e-6)


def drawn(chunks: int, below: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(below, (chunks, ROWS, COLUMNS), generator=generator, dtype=torch.uint8)
    scales = torch.rand(chunks, ROWS, COLUMNS // GROUP, generator=generator).bfloat16()
    return codes, scales


@given(chunks=st.integers(1, 3), seed=st.integers(0, 2**31))
@settings(max_examples=10)
def test_packing_into_chunks_round_trips(chunks, seed):
    codes, scales = drawn(chunks, 16, seed)
    packed = nf4_chunks(codes, scales)
    assert packed.shape == (chunks, NF4_BYTES) and packed.dtype == torch.uint8
    for found, expected in zip(read_nf4_chunks(packed), (codes, scales), strict=True):
        assert torch.equal(found, expected)
    codes, scales = drawn(chunks, 64, seed)
    packed = int6_chunks(codes, scales)
    assert packed.shape == (chunks, INT6_BYTES)
    for found, expected in zip(read_int6_chunks(packed), (codes, scales), strict=True):
        assert torch.equal(found, expected)


def test_a_lane_of_the_kernel_reads_its_nf4_codes():
    """By the addresses and shifts that decode.cu computes, not by the inverse above."""
    codes, scales = drawn(1, 16, 3)
    data = nf4_chunks(codes, scales)[0].tolist()
    for warp, group, lane, tile, register in [(0, 0, 0, 0, 0), (5, 1, 17, 2, 1), (15, 1, 31, 3, 3)]:
        byte = data[warp * 1024 + group * 512 + lane * 16 + tile * 4 + register]
        row = lane // 4 + 8 * (register % 2)
        column = warp * 128 + (group * 4 + tile) * 16 + 2 * (lane % 4) + 8 * (register // 2)
        assert byte >> 4 == codes[0, row, column] and byte & 15 == codes[0, row, column + 1]
    at = ROWS * COLUMNS // 2 + (7 * ROWS + 11) * 2  # scale of group 7, row 11
    assert (
        torch.tensor(data[at : at + 2], dtype=torch.uint8).view(torch.bfloat16) == scales[0, 11, 7]
    )


def test_a_lane_of_the_kernel_reads_its_int6_codes():
    codes, scales = drawn(1, 64, 4)
    words = int6_chunks(codes, scales)[0, : ROWS * COLUMNS * 3 // 4].view(torch.int32)
    words = [w & 0xFFFFFFFF for w in words.tolist()]
    for warp, tiles, lane in [(0, 0, 0), (3, 2, 9), (15, 3, 31)]:
        w = [words[warp * 384 + tiles * 96 + i * 32 + lane] for i in range(3)]
        registers = []
        for i in range(3):
            registers += [w[i] & 0x003F003F, w[i] >> 6 & 0x003F003F]
        registers.append((w[0] >> 12 & 0x000F000F) | (w[1] >> 8 & 0x00300030))
        registers.append((w[2] >> 12 & 0x000F000F) | (w[1] >> 10 & 0x00300030))
        for index, value in enumerate(registers):
            tile, register = 2 * tiles + index // 4, index % 4
            row = lane // 4 + 8 * (register % 2)
            column = warp * 128 + tile * 16 + 2 * (lane % 4) + 8 * (register // 2)
            assert value & 0xFFFF == codes[0, row, column]
            assert value >> 16 == codes[0, row, column + 1]


def test_every_row_is_in_one_block_and_groups_share_a_key_head():
    rows = block_rows(CONFIG, 128)
    assert {k: tuple(v.shape) for k, v in rows.items()} == {
        "qkv": (128, 32),
        "o": (128, 16),
        "gate_up": (128, 96),
        "down": (128, 16),
    }
    for index in rows.values():
        flat = index.flatten().sort().values
        assert torch.equal(flat, torch.arange(len(flat)))
    of_head_3 = rows["qkv"][48:64].flatten()
    expected = [
        *range(6 * 128, 8 * 128),
        *range(2048 + 384, 2048 + 512),
        *range(3072 + 384, 3072 + 512),
    ]
    assert of_head_3.tolist() == expected
    gate_up = rows["gate_up"][2].view(-1, 16)
    assert torch.equal(gate_up[:, 8:], gate_up[:, :8] + 6144)


def test_a_layer_is_twelve_chunks_a_block_in_the_order_of_use():
    generator = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int) -> Packed:
        codes = torch.randint(16, (rows, columns), generator=generator, dtype=torch.uint8)
        return Packed(codes, torch.rand(rows, columns // GROUP, generator=generator).bfloat16())

    qkv, o, gate_up, down = (
        matrix(*s) for s in ((4096, 2048), (2048, 2048), (12288, 2048), (2048, 6144))
    )
    stream = layer_stream(CONFIG, qkv, o, gate_up, down, 128)
    assert stream.shape == (128, 12, NF4_BYTES)
    block, rows = 77, block_rows(CONFIG, 128)
    codes, scales = read_nf4_chunks(stream[block])
    assert torch.equal(codes[:2].flatten(0, 1), qkv.codes[rows["qkv"][block]])
    assert torch.equal(codes[2], o.codes[rows["o"][block]])
    assert torch.equal(codes[3:9].flatten(0, 1), gate_up.codes[rows["gate_up"][block]])
    for number in range(3):
        part = slice(number * COLUMNS, (number + 1) * COLUMNS)
        assert torch.equal(codes[9 + number], down.codes[rows["down"][block], part])
    assert torch.equal(scales[10], down.scales[rows["down"][block], 32:64])
    head = head_stream(Packed(qkv.codes, qkv.scales))
    assert head.shape == (256, INT6_BYTES)


def test_a_model_that_does_not_fit_is_refused_with_the_reason():
    check_shape(CONFIG, 128)
    small = Config(64, 128, 1, 4, 2, 32, 300, 1024, 1e6, 1e-6)
    with pytest.raises(ValueError, match="hidden size 64 is not 2048.*vocabulary of 300"):
        check_shape(small, 128)


def kernel_matrix_row(block: int, c: int, row: int) -> tuple[int, int]:
    """decode.cu's matrix_row for CONFIG, spelt again: (which matrix, row of it)."""
    if c < 2:
        head, i = block // 16, block % 16 * 32 + c * 16 + row
        if i < 256:
            return 0, head * 256 + i
        i -= 256
        return 0, (16 + head) * 128 + i % 128 + i // 128 * 8 * 128
    c -= 2
    which = 1 if c < 1 else 2 if c < 7 else 3
    if which != 2:
        return which, block * 16 + row
    return which, block * 48 + (c - 1) * 8 + row % 8 + row // 8 * 6144


def test_unpacking_puts_rows_back_where_packing_took_them_from():
    rows = block_rows(CONFIG, 128)
    expected = [rows["qkv"], rows["o"], rows["gate_up"], rows["down"]]
    first = [0, 2, 3, 9]
    for block in (0, 1, 15, 16, 77, 127):
        for c in range(12):
            for row in range(16):
                which, at = kernel_matrix_row(block, c, row)
                place = (c - first[which] if which != 3 else 0) * 16 + row
                assert at == expected[which][block, place]


def test_an_exports_weights_are_all_in_the_streams(tmp_path):
    """A model of the kernel's width: what the streams decode to is what Export.load gives."""
    sizes = {
        "hidden_size": 2048,
        "intermediate_size": 2048,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_hidden_layers": 1,
        "vocab_size": 64,
    }
    export = Export(make_export(tmp_path / "wide", **sizes))
    weights = Weights(export, torch.device("cpu"))
    model = dict(export.load(torch.float32).named_parameters())
    codes, scales = read_nf4_chunks(weights.body[0].flatten(0, 1))
    values = decode("nf4", codes.flatten(0, 1), scales.flatten(0, 1)).view(128, 6, 16, 2048)
    rows, at = block_rows(export.config, 128), "model.layers.0."
    parts = [model[f"{at}self_attn.{n}_proj.weight"] for n in "qkv"]
    assert torch.equal(values[:, :2].flatten(0, 2), torch.cat(parts)[rows["qkv"].flatten()])
    o, down = (model[f"{at}{n}_proj.weight"] for n in ("self_attn.o", "mlp.down"))
    assert torch.equal(values[:, 2].flatten(0, 1), o)
    assert torch.equal(values[:, 5].flatten(0, 1), down)
    gate_up = torch.cat([model[f"{at}mlp.{n}_proj.weight"] for n in ("gate", "up")])
    assert torch.equal(values[:, 3:5].flatten(0, 2), gate_up[rows["gate_up"].flatten()])
    codes, scales = read_int6_chunks(weights.head)
    embedding = decode("int6", codes.flatten(0, 1), scales.flatten(0, 1))
    assert torch.equal(embedding, model["model.embed_tokens.weight"])
    assert torch.equal(weights.norms[2], model["model.norm.weight"])
