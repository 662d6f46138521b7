"""Augmentations keep the task, change nothing in place, and know where they don't apply."""

from __future__ import annotations

import copy
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from augment import CONTINUE, FOLLOW_UPS, FORMATS, KINDS, augment, split_reference

text = st.text(min_size=1, max_size=80).filter(str.strip)


@given(
    kind=st.sampled_from(sorted(KINDS)),
    content=text,
    reference=st.text(max_size=200),
    seed=st.integers(0, 1000),
)
def test_any_text_gives_a_conversation_that_ends_with_a_user_turn(kind, content, reference, seed):
    """Braces, quotes and newlines of a prompt are text, never a format string."""
    messages = [{"role": "user", "content": content}]
    before = copy.deepcopy(messages)
    made = augment(kind, messages, reference, random.Random(seed))
    assert messages == before
    if made is None:
        assert kind in ("multi_turn", "continue")
        return
    assert made[-1]["role"] == "user"
    assert made != messages
    assert all(m["role"] in ("system", "user", "assistant") and m["content"] for m in made)
    assert any(content in m["content"] for m in made)
    assert made == augment(kind, messages, reference, random.Random(seed))


def test_each_kind_does_what_its_name_says():
    messages = [{"role": "user", "content": "Name a river."}]
    reference = "The Rhine is a river that flows through several countries of Europe."
    rng = random.Random(3)
    assert augment("system", messages, reference, rng)[0]["role"] == "system"
    turns = augment("multi_turn", messages, reference, rng)
    assert [m["role"] for m in turns] == ["user", "assistant", "user"]
    assert turns[1]["content"] == reference and turns[2]["content"] in FOLLOW_UPS
    assert augment("format", messages, reference, rng)[-1]["content"].endswith(FORMATS)
    shown = augment("continue", messages, reference, rng)[-1]["content"]
    start = shown.rsplit("\n\n", 1)[1]
    assert reference.startswith(start) and 0 < len(start) < len(reference)
    assert CONTINUE.split("{text}")[1].split("{start}")[0].strip() in shown


def test_what_does_not_apply_is_none():
    chat = [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]
    rng = random.Random(0)
    assert augment("system", chat, "", rng) is None
    assert augment("multi_turn", chat, " ", rng) is None
    assert augment("continue", chat, "too short", rng) is None
    with pytest.raises(KeyError):
        augment("unknown", chat, "", rng)


@given(words=st.lists(st.from_regex(r"[a-z]{1,6}", fullmatch=True), min_size=7, max_size=40))
def test_the_beginning_and_the_rest_are_the_reference(words):
    reference = " ".join(words)
    start, rest = split_reference(reference, random.Random(1))
    assert f"{start} {rest}" == reference
    assert start and rest
