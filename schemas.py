"""The bodies of the HTTP contract, and how errors in a request are told."""

from __future__ import annotations

import json
import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError, create_model

SHOWN_ERRORS = 8
SHOWN_INPUT = 64  # characters of JSON


class Usage(BaseModel):
    prompt_tokens: int
    cached_tokens: int
    draft_tokens: int


class DraftResponse(BaseModel):
    draft_token_ids: list[int]
    finish_reason: Literal["length", "stop", "context", "confidence"]
    probabilities: list[float] | None
    conversation_key: str
    usage: Usage
    contract: str


class Problem(BaseModel):
    loc: list[str | int]
    msg: str
    input: Any = None


class Refused(BaseModel):
    detail: list[Problem]


def make_request_model(vocab_size: int, context_tokens: int, draft_tokens: int) -> type[BaseModel]:
    """The body of POST /draft within an export's limits.

    Strict: an integer is an integer, not a float, string or bool that could pass for one. A list
    stops at its first error, so that a large wrong one costs no more than a right one.
    """
    token_id = Annotated[int, Field(ge=0, lt=vocab_size)]
    token_ids = Annotated[
        list[token_id], Field(min_length=1, max_length=context_tokens), FailFast()
    ]
    return create_model(
        "DraftRequest",
        __config__=ConfigDict(extra="forbid", strict=True, allow_inf_nan=False),
        token_ids=(
            token_ids,
            Field(description="the whole context so far: prompt and accepted tokens"),
        ),
        max_tokens=(Annotated[int, Field(ge=0, le=draft_tokens)], draft_tokens),
        min_probability=(
            Annotated[float, Field(ge=0, le=1)],
            Field(default=0.0, description="end before a token less probable than this"),
        ),
        return_probabilities=(bool, False),
        contract=(
            Annotated[str, Field(max_length=256)] | None,
            Field(default=None, description="refuse unless this fingerprint is served"),
        ),
    )


def describe_errors(error: ValidationError) -> list[dict]:
    """The first few errors as {loc, msg, input}; input only where it is short enough to show."""
    shown = []
    for problem in error.errors(include_url=False, include_context=False)[:SHOWN_ERRORS]:
        entry = {"loc": ["body", *problem["loc"]], "msg": problem["msg"]}
        if problem["type"] != "json_invalid" and is_showable(problem["input"]):
            entry["input"] = problem["input"]
        shown.append(entry)
    return shown


def is_showable(value: Any) -> bool:
    if isinstance(value, float) and not math.isfinite(value):
        return False  # JSON has no such number
    if isinstance(value, int) and abs(value) >= 10**SHOWN_INPUT:
        return False
    return isinstance(value, (int, float, str, type(None))) and (
        len(json.dumps(value)) <= SHOWN_INPUT
    )
