"""Rounds from one forward pass, bootstrap intervals, and the ladder's verdict."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from labelled import make_labelled

import ladder
from acceptance import (
    Counts,
    accepted_length,
    accepted_ratio,
    rounds_of,
    simulate,
)
from client import Reply
from ladder import RUNGS
from model import greedy, load_checkpoint
from packing import LabelSet
from rounds import draft_rounds


@given(correct=st.lists(st.booleans(), max_size=60), length=st.integers(1, 16))
def test_rounds_tile_the_label_and_stop_at_the_first_wrong_token(correct, length):
    done = 0
    for asked, accepted in rounds_of(correct, length):
        assert asked == min(length, len(correct) - done)
        assert all(correct[done : done + accepted])
        assert accepted == asked or not correct[done + accepted]
        done += accepted + 1
    assert done >= len(correct)


class Drafting:
    """A client that drafts by the plain greedy path, a token at a time."""

    def __init__(self, model):
        self.model = model

    def draft(self, token_ids, max_tokens, contract):
        draft = greedy(self.model, token_ids, max_tokens, eos=()).token_ids
        return Reply({"draft_token_ids": draft}, 1.0, 0.0, 0.5, 0.5)


def test_teacher_forcing_counts_what_drafting_step_by_step_accepts(tmp_path):
    """cases.md 14. The base itself wrote half of each label, so there is something to accept."""
    _, root = make_labelled(tmp_path)
    model = load_checkpoint(root / "labelled/models/base", torch.float32)
    held = LabelSet([root / "labelled/labels"], "holdout", 128)
    labels = []
    for example in list(held)[:6]:
        prompt = [t for t in example.token_ids[:8]]
        own = greedy(model, prompt, 12, eos=()).token_ids
        other = [(t + 1) % 2048 for t in greedy(model, prompt + own, 1, eos=()).token_ids]
        more = greedy(model, prompt + own + other, 9, eos=()).token_ids
        labels.append({"prompt_token_ids": prompt, "output_token_ids": own + other + more})
    from packing import make_example

    examples = [make_example(x["prompt_token_ids"], x["output_token_ids"], 128) for x in labels]
    counts = simulate(model, examples, 16, "cpu")
    for index, label in enumerate(labels):
        rounds = draft_rounds(Drafting(model), label, 16, "c")
        assert counts.rounds[index] == len(rounds)
        assert counts.accepted[index] == sum(r.accepted for r in rounds) == 21


def drawn(seed, prompts=200, mean=3.0):
    rng = np.random.default_rng(seed)
    rounds = rng.integers(3, 12, prompts).astype(float)
    return Counts(rounds, rng.poisson(mean * rounds).astype(float))


def test_the_interval_holds_the_truth_about_as_often_as_it_says():
    inside = sum(i.low <= 3.0 <= i.high for i in (accepted_length(drawn(s)) for s in range(100)))
    assert 85 <= inside <= 100


def test_a_ratio_on_the_same_prompts_is_far_sharper_than_two_intervals():
    a = drawn(1)
    assert accepted_ratio(a, a) == pytest.approx((1.0, 1.0, 1.0))
    b = Counts(a.rounds, a.accepted * 0.9)
    ratio = accepted_ratio(b, a)
    assert ratio.value == pytest.approx(0.9) and ratio.high - ratio.low < 1e-6
    own = accepted_length(a)
    assert own.high - own.low > 0.05
    with pytest.raises(ValueError, match="same prompts"):
        accepted_ratio(a, drawn(2, prompts=10))


@pytest.mark.parametrize(("kept", "releasable"), [(1.0, True), (0.985, True), (0.97, False)])
def test_the_verdict_compares_what_is_served_with_the_bf16_draft(monkeypatch, kept, releasable):
    counts = drawn(3)
    shares = {"base": 0.3, "distilled": 1.0, "body": 0.99, "packed": kept, "served": kept}

    def measure(client, labels, contract, target, name):
        accepted = (counts.accepted * shares[name]).tolist()
        pairs = [[r, a] for r, a in zip(counts.rounds.tolist(), accepted, strict=True)]
        return {"per_prompt": pairs, "acceptance_at": [0.5] * 16}

    class Serving:
        def __init__(self, *_):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def get(self, path):
            return {"engine": "torch", "device": "cpu", "quantization": {"summary": ""}}

    monkeypatch.setattr(ladder, "measure", measure)
    monkeypatch.setattr(ladder, "serve", Serving)
    monkeypatch.setattr(ladder, "read_contract", lambda directory: {"fingerprint": "c"})
    found = ladder.climb(dict.fromkeys(RUNGS), [{}] * 200, 0.02)
    assert found["releasable"] is releasable
    assert found["rungs"]["served"]["of_distilled"]["value"] == pytest.approx(kept)
    ladder.print_ladder(found, "holdout")
