"""Distillation objectives against their definitions over the whole vocabulary, by hypothesis."""

from __future__ import annotations

import argparse

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from objectives import Labels, mix, parse_objective, survival_weights, topk_kl, topk_tv

VOCABULARY = 40
seeds = st.integers(0, 2**31)


def drawn(seed, n=6, spread=2.0):
    """Teacher and draft logits, (n, vocabulary)."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(n, VOCABULARY, generator=generator) * spread for _ in range(2))


def labels_of(teacher, k):
    top = teacher.log_softmax(-1).topk(k)
    return Labels(teacher.argmax(-1), top.indices, top.values)


@given(seed=seeds)
def test_with_the_whole_vocabulary_stored_they_are_the_textbook_distances(seed):
    teacher, draft = drawn(seed)
    labels = labels_of(teacher, VOCABULARY)
    p, q = teacher.softmax(-1), draft.softmax(-1)
    kl = F.kl_div(q.log(), p, reduction="none").sum(-1)
    torch.testing.assert_close(topk_kl(draft, labels), kl, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(topk_tv(draft, labels), (p - q).abs().sum(-1) / 2, atol=1e-5, rtol=0)


@given(seed=seeds, k=st.integers(1, VOCABULARY - 1))
def test_the_rest_is_one_more_outcome_on_both_sides(seed, k):
    """Merging outcomes can only lower a divergence, and the merged mass is not forgotten."""
    teacher, draft = drawn(seed)
    labels = labels_of(teacher, k)
    p, q = teacher.softmax(-1), draft.softmax(-1)
    inside = torch.zeros_like(p, dtype=torch.bool).scatter(-1, labels.top_ids, True)
    merged = [
        torch.cat((x[inside].view(len(x), k), (x * ~inside).sum(-1, keepdim=True)), -1)
        for x in (p, q)
    ]
    kl = (merged[0] * (merged[0] / merged[1]).log()).sum(-1)
    tv = (merged[0] - merged[1]).abs().sum(-1) / 2
    torch.testing.assert_close(topk_kl(draft, labels), kl, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(topk_tv(draft, labels), tv, rtol=1e-3, atol=1e-5)
    full = F.kl_div(q.log(), p, reduction="none").sum(-1)
    assert (topk_kl(draft, labels) <= full + 1e-4).all()


@given(seed=seeds, k=st.integers(1, 8))
def test_the_teachers_own_logits_cost_nothing_and_gradients_are_finite(seed, k):
    teacher, draft = drawn(seed, spread=12.0)
    labels = labels_of(teacher, k)
    for objective in (topk_kl, topk_tv):
        assert objective(teacher, labels).abs().max() < 1e-3
        logits = draft.clone().requires_grad_()
        objective(logits, labels).sum().backward()
        assert torch.isfinite(logits.grad).all()


def test_a_draft_that_puts_its_mass_outside_the_top_k_pays():
    teacher = torch.zeros(1, VOCABULARY)
    teacher[0, :2] = 8.0
    labels = labels_of(teacher, 2)
    outside = torch.zeros(1, VOCABULARY)
    outside[0, 30] = 8.0
    assert topk_kl(outside, labels) > 3 and topk_tv(outside, labels) > 0.9


def test_a_step_down_the_gradient_brings_the_draft_closer():
    teacher, draft = drawn(3)
    labels = labels_of(teacher, 5)
    for objective in (topk_kl, topk_tv):
        logits = draft.clone().requires_grad_()
        before = objective(logits, labels).sum()
        before.backward()
        after = objective(draft - 0.1 * logits.grad, labels).sum()
        assert after < before


def test_a_mix_is_the_weighted_sum():
    teacher, draft = drawn(5)
    labels = labels_of(teacher, 4)
    weights = parse_objective("ce=1,topk-tv=3")
    assert weights == {"ce": 0.25, "topk-tv": 0.75}
    expected = 0.25 * F.cross_entropy(draft, labels.targets, reduction="none")
    expected = expected + 0.75 * topk_tv(draft, labels)
    torch.testing.assert_close(mix(weights)(draft, labels), expected)


def test_a_lower_temperature_moves_kl_towards_the_greedy_token():
    """With all tokens stored: exactly the teacher's logits divided by T; near 0, cross-entropy."""
    teacher, draft = drawn(6)
    labels = labels_of(teacher, VOCABULARY)
    at_half = labels_of(teacher / 0.5, VOCABULARY)
    found = mix({"topk-kl": 1.0}, 0.5)(draft, labels)
    torch.testing.assert_close(found, topk_kl(draft, at_half), rtol=1e-3, atol=1e-3)
    cold = mix({"topk-kl": 1.0}, 0.05)(draft, labels_of(teacher * 3, 8))
    expected = F.cross_entropy(draft, labels.targets, reduction="none")
    torch.testing.assert_close(cold, expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("text", ["", "kl", "ce,ce", "ce=0", "ce=-1", "ce=nan", "ce=inf", "ce=x"])
def test_what_is_no_objective_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="topk-kl"):
        parse_objective(text)


# ----------------------------------------------------------------------------------- survival


def brute_force(accepted, segments, length):
    """The definition, spelt out: the mean over where the round began."""
    found = []
    for t in range(len(accepted)):
        total = 0.0
        for distance in range(length):
            reached = 1.0
            for j in range(max(0, t - distance), t):
                if segments[j] == segments[t]:
                    reached *= accepted[j]
            total += reached
        found.append(total / length)
    return torch.tensor(found)


@given(
    values=st.lists(st.floats(0, 1, width=32), min_size=1, max_size=24),
    cut=st.integers(0, 24),
    length=st.integers(1, 18),
)
def test_survival_is_the_share_of_rounds_that_reach_a_position(values, cut, length):
    accepted = torch.tensor(values)
    segments = (torch.arange(len(values)) >= cut).int()
    found = survival_weights(accepted, segments, length)
    torch.testing.assert_close(found, brute_force(values, segments.tolist(), length))


def test_after_a_certain_rejection_only_a_new_round_reaches_a_token():
    weights = survival_weights(torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.zeros(4), 4)
    assert weights.tolist() == [1.0, 1.0, 0.25, 0.5]
