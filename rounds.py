"""Rounds of drafting and verification through a running server, and what they amount to."""

from __future__ import annotations

import math
import statistics
import time
from typing import NamedTuple

from tqdm import tqdm

from client import DraftClient, Reply


class Round(NamedTuple):
    """One draft and its verification. asked: tokens asked for; accepted: how many of the drafted
    ones agree, from the first on; gained: those and the target's own next token, where one follows.
    """

    asked: int
    drafted: int
    accepted: int
    gained: int
    reply: Reply


def matching(draft: list[int], truth: list[int]) -> int:
    """Length of the longest common prefix."""
    for index, (a, b) in enumerate(zip(draft, truth, strict=False)):
        if a != b:
            return index
    return min(len(draft), len(truth))


def draft_rounds(client: DraftClient, label: dict, max_tokens: int, contract: str) -> list[Round]:
    """Draft along one label until its end.

    A round asks for no more than the label still covers: nothing is known of what the teacher says
    after a cut, and after its EOS nothing follows.
    """
    prompt, truth = label["prompt_token_ids"], label["output_token_ids"]
    done, rounds = 0, []
    while done < len(truth):
        asked = min(max_tokens, len(truth) - done)
        reply = client.draft(prompt + truth[:done], max_tokens=asked, contract=contract)
        draft = reply.body["draft_token_ids"]
        accepted = matching(draft, truth[done:])
        gained = min(accepted + 1, len(truth) - done)
        rounds.append(Round(asked, len(draft), accepted, gained, reply))
        done += accepted + 1
    return rounds


def summarise(rounds: list[Round], seconds: float, max_tokens: int) -> dict:
    """The figures of one model.

    acceptance_at[i]: of the rounds in which position i + 1 was drafted and covered by the label,
    the share in which it and all before it were accepted.
    """
    accepted = [r.accepted for r in rounds]
    at = []
    for position in range(1, max_tokens + 1):
        eligible = [r for r in rounds if r.asked >= position]
        hits = sum(r.accepted >= position for r in eligible)
        at.append(round(hits / len(eligible), 4) if eligible else None)
    walls = sorted(r.reply.wall_ms for r in rounds)
    drafted = sum(r.drafted for r in rounds)
    overhead = [r.reply.wall_ms - r.reply.prefill_ms - r.reply.decode_ms for r in rounds]
    full = [r for r in rounds if r.asked == max_tokens]
    return {
        "rounds": len(rounds),
        "mean_accepted": statistics.fmean(accepted),
        "tokens_per_round": statistics.fmean(r.gained for r in rounds),
        "full_length_rounds": len(full),
        "mean_accepted_full_length": statistics.fmean(r.accepted for r in full) if full else None,
        "acceptance_at": at,
        "fully_accepted": statistics.fmean(r.accepted == r.asked for r in rounds),
        "requests_per_second": len(rounds) / seconds,
        "wall_ms_p50": percentile(walls, 0.50),
        "wall_ms_p95": percentile(walls, 0.95),
        "overhead_ms_p50": statistics.median(overhead),
        "prefill_ms_p50": statistics.median(r.reply.prefill_ms for r in rounds),
        "decode_ms_per_token": sum(r.reply.decode_ms for r in rounds) / max(drafted, 1),
        "full_length_wall_ms_p50": statistics.median(r.reply.wall_ms for r in full or rounds),
    }


def percentile(ordered: list[float], share: float) -> float:
    """Nearest-rank percentile of sorted values."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def net_speedup(figures: dict, target_step_ms: float) -> dict:
    """What the draft gains beside a target whose verifying step takes `target_step_ms`.

    Speculative decoding's wall-time model (arXiv:2211.17192, theorem 3.8), with the measured
    request time: a round yields 1 + accepted tokens and costs one draft and one target step. The
    cost of a shorter draft is the measured fixed part plus its tokens; longer is not better by
    itself.
    """
    fixed = figures["overhead_ms_p50"] + figures["prefill_ms_p50"]
    by_length = []
    for length in range(1, len(figures["acceptance_at"]) + 1):
        tokens = 1 + sum(share or 0.0 for share in figures["acceptance_at"][:length])
        cost = target_step_ms + fixed + length * figures["decode_ms_per_token"]
        by_length.append(tokens * target_step_ms / cost)
    best = max(range(len(by_length)), key=by_length.__getitem__)
    measured = figures["full_length_wall_ms_p50"]
    gain = figures["tokens_per_round"] * target_step_ms / (target_step_ms + measured)
    return {
        "target_step_ms": target_step_ms,
        "speedup": gain,
        "verdict": "gain" if gain > 1 else "loss",
        "best_draft_length": best + 1,
        "speedup_at_best_length": by_length[best],
        "speedup_by_length": [round(value, 3) for value in by_length],
    }


def measure(
    client: DraftClient, labels: list[dict], contract: str, target_step_ms: float | None, name: str
) -> dict:
    """All rounds over all labels, one request at a time."""
    max_tokens = client.get("/info")["limits"]["draft_tokens"]
    rounds: list[Round] = []
    per_prompt = []
    began = time.perf_counter()
    for label in tqdm(labels, desc=name, unit="prompt"):
        found = draft_rounds(client, label, max_tokens, contract)
        per_prompt.append([len(found), sum(r.accepted for r in found)])
        rounds += found
    figures = summarise(rounds, time.perf_counter() - began, max_tokens)
    figures["per_prompt"] = per_prompt  # (rounds, accepted tokens), in the order of the labels
    if target_step_ms is not None:
        figures["net"] = net_speedup(figures, target_step_ms)
    return figures
