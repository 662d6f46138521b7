"""Seeded augmentations of prompts: the same task in another frame, format or turn.

Pure functions of a conversation, its row's reference answer and a random.Random. They keep the task
itself, so that the teacher's label stays meaningful, and they return None where they don't apply.
"""

from __future__ import annotations

import random

Messages = list[dict]

FRAMES = (
    "Please help me with the following.\n\n{text}",
    "Here is a request from a colleague. Answer it as well as you can.\n\n{text}",
    "{text}\n\nTake your time and answer carefully.",
    "I was asked this today and I am not sure what to say:\n\n{text}",
    "Task:\n{text}\n\nYour answer:",
)

FORMATS = (
    "Give only the final result, without any explanation.",
    'Answer as a JSON object with the single key "answer".',
    "Answer in at most one short sentence.",
)

FOLLOW_UPS = (
    "Thanks. Now give me only the final result.",
    "Can you say that again in at most one short sentence?",
    "Please check this once more and answer again in full.",
)

SYSTEMS = (
    "You are a helpful assistant.",
    "You are a careful assistant. Answer what is asked, completely and correctly.",
    "You answer questions from people who are in a hurry.",
    "You are a patient teacher.",
)

CONTINUE = (
    "{text}\n\nThe answer begins as follows. Write what comes next, and do not repeat it."
    "\n\n{start}"
)

MINIMUM_WORDS = 6  # of a reference, below which there is no beginning worth showing


def augment(kind: str, messages: Messages, reference: str, rng: random.Random) -> Messages | None:
    """One augmentation of a conversation that ends with a user turn; the input is not changed.

    kind: a name in KINDS; reference: the row's own answer, "" where it has none. None where the
    kind does not apply. Raises KeyError for an unknown kind.
    """
    return KINDS[kind](messages, reference, rng)


def with_last(messages: Messages, text: str) -> Messages:
    """The conversation with the text of its last turn replaced."""
    return [*messages[:-1], {"role": "user", "content": text}]


def frame(messages: Messages, reference: str, rng: random.Random) -> Messages:
    text = rng.choice(FRAMES).format_map({"text": messages[-1]["content"]})
    return with_last(messages, text)


def other_format(messages: Messages, reference: str, rng: random.Random) -> Messages:
    return with_last(messages, f"{messages[-1]['content']}\n\n{rng.choice(FORMATS)}")


def multi_turn(messages: Messages, reference: str, rng: random.Random) -> Messages | None:
    """The row's own answer as the assistant's turn, then a follow-up question."""
    if not reference.strip():
        return None
    turns = [{"role": "assistant", "content": reference}]
    return [*messages, *turns, {"role": "user", "content": rng.choice(FOLLOW_UPS)}]


def system(messages: Messages, reference: str, rng: random.Random) -> Messages | None:
    if messages[0]["role"] == "system":
        return None
    return [{"role": "system", "content": rng.choice(SYSTEMS)}, *messages]


def split_reference(reference: str, rng: random.Random) -> tuple[str, str] | None:
    """(beginning, rest) of an answer, cut between words between a fifth and three fifths of it."""
    ends = [i for i, c in enumerate(reference) if c == " " and i > 0]
    if len(ends) < MINIMUM_WORDS - 1:
        return None
    low, high = len(ends) // 5, max(len(ends) // 5, 3 * len(ends) // 5)
    cut = ends[rng.randint(low, high)]
    return reference[:cut], reference[cut:].strip()


def continuation(messages: Messages, reference: str, rng: random.Random) -> Messages | None:
    parts = split_reference(reference, rng)
    if parts is None:
        return None
    fields = {"text": messages[-1]["content"], "start": parts[0]}
    return with_last(messages, CONTINUE.format_map(fields))


KINDS = {
    "frame": frame,
    "format": other_format,
    "multi_turn": multi_turn,
    "system": system,
    "continue": continuation,
}
