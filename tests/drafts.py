"""Stand-ins and comparisons for the tests of the drafter, on the CPU and on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from drafter import Draft, Drafter
from engines import GraphEngine
from kernels.ops import PLAIN
from model import KVCache, Qwen3, greedy


class UncapturedGraphEngine(GraphEngine):
    """The graph engine with its buffers, buckets and padding, each "replay" run eagerly, and the
    kernels' plain twins in place of Triton."""

    def _capture(self, body: Callable[[], None]) -> Callable[[], None]:
        self._aim_at_scratch()
        body()  # leaves its marks in the buffers, as a capture's warm-up does
        return body


def use_uncaptured_graphs(drafter: Drafter) -> Drafter:
    """Swap the engine of a CPU drafter for the stand-in."""
    length = drafter.context_limit + 1
    drafter.kv = KVCache(drafter.config, length, drafter.device, drafter.dtype)
    limits = (drafter.context_limit, drafter.draft_length)
    with torch.inference_mode():
        drafter.engine = UncapturedGraphEngine(drafter.engine.model, drafter.kv, *limits, ops=PLAIN)
    drafter.reset()
    return drafter


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first token in which two drafts differ, None where they are equal."""
    if list(a) == list(b):
        return None
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


def assert_same_draft(
    draft: Draft, expected: Draft, model: Qwen3, context: list[int], tolerance: float = 1e-3
) -> bool:
    """Equal up to a near-tie (case 13): True where equal, False at a tie within the tolerance."""
    index = first_difference(draft.token_ids, expected.token_ids)
    if index is None:
        assert draft.finish_reason == expected.finish_reason
        return True
    margin = greedy(model, context + expected.token_ids[:index], 1, ()).margins[0]
    assert margin < tolerance, f"token {index} differs at a margin of {margin}"
    return False
