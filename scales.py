"""Scales for the packed formats: the same bytes in the export, a smaller error.

    absmax      the largest magnitude of a group takes the largest code (QLoRA, arXiv:2305.14314)
    mse         least squared error of the weights
    calibrated  least squared error of the products, E[(Δw · x)²] with the inputs' cross terms left
                out: each column's error counts by the second moment of its input. The idea of
                AWQ (arXiv:2306.00978) and GPTQ (arXiv:2210.17323), used for the scale alone

Several parts of the absmax scale are tried for each group. From the best of them one step of
Lloyd's algorithm: with the codes c fixed, the best scale is Σ h·w·c / Σ h·c² (h = 1, or the second
moments). Whatever has the smallest error, absmax among them, is kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

from formats import (
    CODES,
    LARGEST_CODE,
    WEIGHTS_AT_ONCE,
    absmax_scales,
    check_weight,
    code_values,
)

METHODS = ("absmax", "mse", "calibrated")
# Parts of the absmax scale that are tried: 1 keeps the largest weight, less clips it and resolves
# the others better.
PARTS = (1.0, 0.97, 0.94, 0.91, 0.88, 0.85, 0.82, 0.78, 0.74)


def choose_scales(
    weight: Tensor, codec: str, group_size: int, method: str, moments: Tensor | None = None
) -> Tensor:
    """bf16 scales (rows, groups) for a weight (rows, n).

    codec: nf4 | int6; moments: (n,) second moments of the inputs, for `calibrated`.
    Raises ValueError on a weight that the format can't hold, or a method without what it needs.
    """
    if method not in METHODS:
        raise ValueError(f"scales {method!r} are not one of {', '.join(METHODS)}")
    if (method == "calibrated") != (moments is not None):
        raise ValueError("calibrated scales need the inputs' second moments, and only they do")
    check_weight(weight, group_size)
    if method == "absmax":
        return absmax_scales(weight, group_size, LARGEST_CODE[codec])
    if moments is None:
        moments = weight.new_ones(weight.shape[1], dtype=torch.float32)
    # A column that never saw an input still has to be stored as something sensible.
    moments = moments.to(weight.device).clamp(min=moments.mean().item() * 1e-3 + 1e-30)
    h = moments.view(-1, group_size)
    at_once = WEIGHTS_AT_ONCE if weight.device.type == "cpu" else WEIGHTS_AT_ONCE << 6
    rows = max(1, at_once // weight.shape[1])
    return torch.cat([least_error(part, codec, h) for part in weight.split(rows)])


def least_error(weight: Tensor, codec: str, h: Tensor) -> Tensor:
    """weight: (rows, n), h: (groups, group) → the best of the candidates' scales for each group."""
    groups = weight.float().view(len(weight), *h.shape)
    absmax = absmax_scales(weight, h.shape[1], LARGEST_CODE[codec])
    best, lowest = absmax, None
    for part in (*PARTS, None):
        if part is None:
            scales = fitted(groups, grouped_values(weight, codec, best, h), h)
        else:
            scales = (absmax.float() * part).bfloat16()
        values = grouped_values(weight, codec, scales, h)
        error = group_errors(groups, values, scales, h)
        if lowest is None:
            lowest = error
        better = error < lowest
        best, lowest = torch.where(better, scales, best), torch.where(better, error, lowest)
    return best


def grouped_values(weight: Tensor, codec: str, scales: Tensor, h: Tensor) -> Tensor:
    """The nearest codes' values, (rows, groups, group)."""
    return code_values(codec, CODES[codec](weight, scales)).view(len(weight), *h.shape)


def fitted(groups: Tensor, values: Tensor, h: Tensor) -> Tensor:
    """Σ h·w·c / Σ h·c², bf16; 0 where all codes are 0."""
    weighted = values * h
    return ((groups * weighted).sum(-1) / (values * weighted).sum(-1).clamp(min=1e-30)).bfloat16()


def group_errors(groups: Tensor, values: Tensor, scales: Tensor, h: Tensor) -> Tensor:
    """Σ h·(w - s·c)², (rows, groups)."""
    return ((groups - values * scales.float()[..., None]).square() * h).sum(-1)
