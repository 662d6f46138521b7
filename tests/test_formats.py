"""NF4 and INT6: bitsandbytes' codes, exact packing for every legal shape, refusals."""

from __future__ import annotations

from functools import partial

import bitsandbytes.functional as bnb
import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import formats
from formats import (
    NF4_CODEBOOK,
    absmax_scales,
    dequantize,
    int6_codes,
    nf4_codes,
    pack_nibbles,
    pack_sixes,
    quantize,
    unpack_nibbles,
    unpack_sixes,
)

quantize_nf4, quantize_int6 = partial(quantize, "nf4"), partial(quantize, "int6")
dequantize_nf4, dequantize_int6 = partial(dequantize, "nf4"), partial(dequantize, "int6")

shapes = st.tuples(st.integers(1, 9), st.integers(1, 6)).map(lambda s: (s[0], s[1] * 64))
seeds = st.integers(0, 2**31)


def drawn_codes(shape, seed, below):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(below, shape, generator=generator, dtype=torch.uint8)


@given(shape=shapes, seed=seeds)
def test_packing_round_trips(shape, seed):
    nibbles, sixes = drawn_codes(shape, seed, 16), drawn_codes(shape, seed, 64)
    assert torch.equal(unpack_nibbles(pack_nibbles(nibbles)), nibbles)
    assert torch.equal(unpack_sixes(pack_sixes(sixes)), sixes)
    assert pack_nibbles(nibbles).shape == (shape[0], shape[1] // 2)
    assert pack_sixes(sixes).shape == (shape[0], shape[1] * 3 // 4)


@given(seed=seeds)
def test_bit_order_is_the_stated_one(seed):
    """High nibble = even column; four 6-bit codes are one little-endian 24-bit number."""
    nibbles, sixes = drawn_codes((1, 8), seed, 16), drawn_codes((1, 8), seed, 64)
    expected = [16 * int(nibbles[0, i]) + int(nibbles[0, i + 1]) for i in range(0, 8, 2)]
    assert pack_nibbles(nibbles)[0].tolist() == expected
    packed = pack_sixes(sixes)[0].tolist()
    for group in range(2):
        a, b, c, d = (int(x) for x in sixes[0, 4 * group : 4 * group + 4])
        number = a + (b << 6) + (c << 12) + (d << 18)
        assert packed[3 * group : 3 * group + 3] == list(number.to_bytes(3, "little"))


def with_bf16_absmax(weight):
    """The weight with each group's largest magnitude replaced by its bf16 rounding, so that
    bitsandbytes (float32 absmax) and these formats (bf16 scales) have equal scales."""
    scales = absmax_scales(weight, 64, 1.0).float()[..., None]
    groups = weight.unflatten(1, (-1, 64))
    largest = groups.abs().argmax(-1, keepdim=True)
    groups = groups.clamp(-scales, scales)
    groups.scatter_(2, largest, groups.gather(2, largest).sign() * scales)
    return groups.flatten(1)


@settings(max_examples=60, deadline=None)
@given(
    shape=shapes,
    seed=seeds,
    spread=st.sampled_from([1e-6, 0.02, 1.0, 300.0]),
    tail=st.booleans(),
)
def test_nf4_codes_equal_bitsandbytes_at_equal_scales(shape, seed, spread, tail):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator) * spread
    if tail:
        weight = weight**3
    weight = with_bf16_absmax(weight)
    codes, state = bnb.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    packed = quantize_nf4(weight)
    assume(torch.equal(packed.scales.float().flatten(), state.absmax))
    assert torch.equal(packed.codes.flatten(), codes.flatten())
    restored = bnb.dequantize_4bit(codes, state)
    assert torch.equal(dequantize_nf4(packed.codes, packed.scales), restored.float())


def test_equal_scales_are_the_rule_not_the_exception():
    """Guards the `assume` above: the construction does give equal scales."""
    weight = with_bf16_absmax(torch.randn(16, 256))
    _, state = bnb.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    assert torch.equal(quantize_nf4(weight).scales.float().flatten(), state.absmax)


def test_codebook_is_that_of_bitsandbytes():
    table = bnb.get_4bit_type("nf4", device="cpu")
    assert torch.equal(NF4_CODEBOOK, table)


def test_codebook_midpoints_take_the_lower_entry():
    midpoints = (NF4_CODEBOOK[:-1] + NF4_CODEBOOK[1:]) / 2
    row = torch.zeros(1, 64)
    row[0, :15], row[0, 63] = midpoints, 1.0
    scales = torch.ones(1, 1, dtype=torch.bfloat16)
    assert nf4_codes(row, scales)[0, :15].tolist() == list(range(15))


@given(shape=shapes, seed=seeds, spread=st.sampled_from([1e-5, 1.0, 100.0]))
@settings(max_examples=40, deadline=None)
def test_every_value_is_within_half_a_step(shape, seed, spread):
    """Each code is the nearest one: no other code of its group comes closer."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator) * spread
    for pack, unpack, table in (
        (quantize_nf4, dequantize_nf4, NF4_CODEBOOK),
        (quantize_int6, dequantize_int6, torch.arange(-32.0, 32.0)),
    ):
        packed = pack(weight)
        values = unpack(packed.codes, packed.scales)
        scales = packed.scales.float().repeat_interleave(64, 1)
        nearest = (weight[..., None] - table * scales[..., None]).abs().amin(-1)
        error = (weight - values).abs()
        assert (error <= nearest * (1 + 1e-5) + 1e-7 * scales).all()
        np.testing.assert_allclose(packed.max_error, error.max().item())
        np.testing.assert_allclose(
            packed.relative_error, (error.norm() / weight.norm()).item(), rtol=1e-5
        )


def test_requantising_what_was_dequantised_changes_nothing():
    weight = torch.randn(8, 192)
    nf4, int6 = quantize_nf4(weight), quantize_int6(weight)
    again = quantize_nf4(dequantize_nf4(nf4.codes, nf4.scales), scales=nf4.scales)
    assert torch.equal(again.codes, nf4.codes)
    again = quantize_int6(dequantize_int6(int6.codes, int6.scales), scales=int6.scales)
    assert torch.equal(again.codes, int6.codes)


def test_a_group_of_zeros_stays_zero():
    weight = torch.randn(2, 128)
    weight[0, :64] = 0
    for pack, unpack in (
        (quantize_nf4, dequantize_nf4),
        (quantize_int6, dequantize_int6),
    ):
        packed = pack(weight)
        assert unpack(packed.codes, packed.scales)[0, :64].abs().max() == 0
    assert (nf4_codes(weight, absmax_scales(weight, 64, 1.0))[0, :64] == 7).all()
    assert (int6_codes(weight, absmax_scales(weight, 64, 31.0))[0, :64] == 32).all()


@pytest.mark.parametrize(
    ("weight", "reason"),
    [
        (torch.randn(4, 65), "multiple of the group size"),
        (torch.randn(4, 32), "multiple of the group size"),
        (torch.randn(64), "two dimensions"),
        (torch.randn(2, 2, 64), "two dimensions"),
        (torch.randn(0, 64), "none empty"),
        (torch.full((2, 64), float("nan")), "NaN or infinity"),
        (torch.full((2, 64), float("inf")), "NaN or infinity"),
    ],
)
def test_what_the_formats_cannot_hold_is_refused_with_the_reason(weight, reason):
    for pack in (quantize_nf4, quantize_int6):
        with pytest.raises(ValueError, match=reason):
            pack(weight)


def test_a_refusal_names_the_tensor():
    scheme = {"linear": {"codec": "nf4", "group_size": 64}}
    with pytest.raises(ValueError, match="layers.0.mlp.up_proj"):
        formats.pack_tensor("model.layers.0.mlp.up_proj.weight", torch.randn(4, 70), scheme)
