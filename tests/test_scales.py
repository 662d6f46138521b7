"""Choosing scales: never worse than absmax by the measure that each method has."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from formats import CODES, LARGEST_CODE, absmax_scales, decode
from scales import choose_scales


def drawn(seed, rows, groups, tail):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, groups * 64, generator=generator)
    return (weight**3 if tail else weight).bfloat16()


def errors(weight, codec, scales, h):
    """Σ h·(w - w')² of each group."""
    restored = decode(codec, CODES[codec](weight, scales), scales)
    return ((weight.float() - restored).square() * h).unflatten(1, (-1, 64)).sum(-1)


arguments = {
    "seed": st.integers(0, 2**31),
    "rows": st.integers(1, 6),
    "groups": st.integers(1, 3),
    "tail": st.booleans(),
    "codec": st.sampled_from(["nf4", "int6"]),
}


@given(**arguments)
@settings(max_examples=60)
def test_no_group_gets_worse_than_by_absmax(seed, rows, groups, tail, codec):
    weight = drawn(seed, rows, groups, tail)
    moments = torch.rand(groups * 64, generator=torch.Generator().manual_seed(seed)) + 0.01
    absmax = absmax_scales(weight, 64, LARGEST_CODE[codec])
    for method, h, given_moments in (
        ("mse", torch.ones(groups * 64), None),
        ("calibrated", moments, moments),
    ):
        scales = choose_scales(weight, codec, 64, method, given_moments)
        assert scales.dtype == torch.bfloat16 and scales.shape == (rows, groups)
        found, before = (errors(weight, codec, s, h) for s in (scales, absmax))
        assert (found <= before * (1 + 1e-4) + 1e-12).all()


@pytest.mark.parametrize(("codec", "least"), [("nf4", 0.10), ("int6", 0.05)])
def test_a_typical_weight_gains(codec, least):
    """Of the squared error of normal weights, about what an exhaustive search would save."""
    weight, h = drawn(0, 128, 8, False), torch.ones(512)
    absmax = absmax_scales(weight, 64, LARGEST_CODE[codec])
    found = errors(weight, codec, choose_scales(weight, codec, 64, "mse"), h).sum()
    best = torch.stack(
        [
            errors(weight, codec, (absmax.float() * part).bfloat16(), h)
            for part in torch.linspace(0.6, 1.05, 46)
        ]
    ).amin(0)
    before = errors(weight, codec, absmax, h).sum()
    assert found < (1 - least) * before
    assert found < 1.06 * best.sum()


def test_calibration_spends_the_error_where_inputs_are_small():
    """A column that is never used may be clipped for the sake of the others."""
    weight = torch.full((1, 64), 0.1).bfloat16()
    weight[0, 0] = 1.0
    moments = torch.ones(64)
    moments[0] = 0.0
    scales = choose_scales(weight, "nf4", 64, "calibrated", moments)
    restored = decode("nf4", CODES["nf4"](weight, scales), scales)
    blind = choose_scales(weight, "nf4", 64, "mse")
    plain = decode("nf4", CODES["nf4"](weight, blind), blind)
    assert (restored - 0.1)[0, 1:].abs().max() < (plain - 0.1)[0, 1:].abs().max() + 1e-6
    assert restored[0, 0] < plain[0, 0] + 1e-6


def test_what_a_method_lacks_or_a_format_cannot_hold_is_refused():
    weight = torch.randn(2, 64).bfloat16()
    with pytest.raises(ValueError, match="second moments"):
        choose_scales(weight, "nf4", 64, "calibrated")
    with pytest.raises(ValueError, match="second moments"):
        choose_scales(weight, "nf4", 64, "mse", torch.ones(64))
    with pytest.raises(ValueError, match="not one of"):
        choose_scales(weight, "nf4", 64, "best")
    with pytest.raises(ValueError, match="multiple of the group size"):
        choose_scales(torch.randn(2, 65), "nf4", 64, "mse")


def test_a_weight_of_zeros_has_scale_zero():
    zeros = torch.zeros(2, 128).bfloat16()
    for codec in ("nf4", "int6"):
        scales = choose_scales(zeros, codec, 64, "mse")
        assert not decode(codec, CODES[codec](zeros, scales), scales).any()
