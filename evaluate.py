"""Acceptance of the drafts, measured through the real endpoint.

Reads labels (hold-out by default) and the exports; serves one export after the other and drafts
round by round as a verifier would: the context so far goes to /draft, the drafted tokens are kept
up to the first that differs from the teacher's greedy continuation, and the teacher's own next
token is added. Writes workspace/<profile>/evaluation/results.json and prints a table.

    python evaluate.py
    python evaluate.py --target-step-ms 5.4     # net speed-up beside a target of that step time
    python evaluate.py --text "Why is the sky blue?" --url http://127.0.0.1:8000
    python evaluate.py --profile tiny --example
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tqdm import tqdm

from artifacts import (
    ArtifactError,
    Profile,
    Stage,
    load_profile,
    number_between,
    own_command,
    parse_profile_args,
    positive,
    read_stage,
    run_command,
    stage_digest,
    write_json,
)
from client import DraftClient, Reply, serve
from contract import read_contract
from prompts import load_tokenizer, prompt_token_ids
from records import read_labels

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EXPORTS = {"base": "export-base-bf16", "distilled": "export-distilled-bf16", "quantised": "export"}
MAKE = {"base": " --run base --codec bf16", "distilled": " --codec bf16", "quantised": ""}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", help="draft once for this text and show it; no table")
    parser.add_argument(
        "--example",
        action="store_true",
        help="draft once for the first hold-out prompt, beside the teacher's words; no table",
    )
    parser.add_argument(
        "--url", help="for --text and --example: a running server (default: start one)"
    )
    parser.add_argument(
        "--models",
        nargs="+",
        choices=list(EXPORTS),
        default=list(EXPORTS),
        help="which drafts to measure (default: all three)",
    )
    parser.add_argument("--split", choices=["holdout", "diagnostic"], default="holdout")
    parser.add_argument(
        "--records",
        type=positive,
        default=200,
        metavar="N",
        help="labels to draft along, the first N of the split (default: %(default)s)",
    )
    parser.add_argument(
        "--target-step-ms",
        type=number_between(0.001, 1e6),
        metavar="MS",
        help="time of one verifying step of the target; adds net speed-up and the draft length "
        "that pays best (an 8B target on one H200: about 5.4)",
    )
    parser.add_argument(
        "--require-ratio",
        type=number_between(0, 1000),
        metavar="R",
        help="end with an error unless the quantised draft is accepted at least R times as long "
        "as the base",
    )
    return parse_profile_args(parser, argv, records=60)


# -------------------------------------------------------------------------------------- rounds


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
    began = time.perf_counter()
    for label in tqdm(labels, desc=name, unit="prompt"):
        rounds += draft_rounds(client, label, max_tokens, contract)
    figures = summarise(rounds, time.perf_counter() - began, max_tokens)
    if target_step_ms is not None:
        figures["net"] = net_speedup(figures, target_step_ms)
    return figures


# --------------------------------------------------------------------------------------- output

ROWS = (
    ("mean_accepted", "accepted tokens a round", "{:.2f}"),
    ("tokens_per_round", "  with the target's own next token", "{:.2f}"),
    ("fully_accepted", "rounds fully accepted", "{:.1%}"),
    ("rounds", "rounds", "{:d}"),
    ("requests_per_second", "requests/s", "{:.1f}"),
    ("wall_ms_p50", "request p50, ms", "{:.2f}"),
    ("wall_ms_p95", "request p95, ms", "{:.2f}"),
    ("overhead_ms_p50", "  of it fixed (HTTP, queue), ms", "{:.2f}"),
    ("prefill_ms_p50", "  of it prefill, ms", "{:.2f}"),
    ("decode_ms_per_token", "decode, ms a drafted token", "{:.2f}"),
)


def print_table(results: dict[str, dict], split: str, labels: int) -> None:
    names = list(results)
    print(f"\nDrafts against the teacher's greedy continuations ({split}, {labels} prompts)")
    print(f"{'':34}" + "".join(f"{name:>12}" for name in names))
    for key, title, form in ROWS:
        print(f"{title:34}" + "".join(f"{form.format(results[n][key]):>12}" for n in names))
    for position in range(len(results[names[0]]["acceptance_at"])):
        cells = [results[n]["acceptance_at"][position] for n in names]
        text = "".join(f"{'-' if c is None else f'{c:.1%}':>12}" for c in cells)
        print(f"{f'accepted at position {position + 1}':34}{text}")
    if "base" in results and results["base"]["mean_accepted"] > 0:
        base = results["base"]["mean_accepted"]
        ratios = [f"{results[n]['mean_accepted'] / base:.2f}x" for n in names]
        print(f"{'accepted length over the base':34}" + "".join(f"{r:>12}" for r in ratios))
    for name in names:
        net = results[name].get("net")
        if net:
            print(
                f"{name}: beside a target step of {net['target_step_ms']} ms a {net['verdict']}, "
                f"{net['speedup']:.2f}x; best draft length {net['best_draft_length']} "
                f"({net['speedup_at_best_length']:.2f}x)"
            )


def show_draft(
    client: DraftClient,
    tokenizer: PreTrainedTokenizerBase,
    prompt: list[int],
    truth: list[int] | None,
    contract: str,
) -> None:
    """One draft as a person sees it: text, probabilities, and the teacher's words beside it."""
    max_tokens = client.get("/info")["limits"]["draft_tokens"]
    body = {"token_ids": prompt, "max_tokens": max_tokens, "return_probabilities": True}
    print(f"curl -s {client.url}/draft -H 'content-type: application/json' -d '{json.dumps(body)}'")
    reply = client.draft(
        prompt, max_tokens=max_tokens, return_probabilities=True, contract=contract
    )
    draft = reply.body["draft_token_ids"]
    print(json.dumps(reply.body))
    print(f"\nprompt   {tokenizer.decode(prompt)!r}")
    print(f"draft    {tokenizer.decode(draft)!r}")
    if truth is not None:
        print(f"teacher  {tokenizer.decode(truth[: len(draft)])!r}")
        print(f"accepted {matching(draft, truth)} of {len(draft)}")
    for token, probability in zip(draft, reply.body["probabilities"], strict=True):
        print(f"  {probability:6.3f}  {tokenizer.decode([token])!r}")
    print(
        f"{reply.body['finish_reason']}; {reply.wall_ms:.1f} ms, of it prefill "
        f"{reply.prefill_ms:.1f} and decode {reply.decode_ms:.1f}"
    )


def check_ratio(results: dict[str, dict], required: float) -> None:
    """ArtifactError where the quantised draft does not beat the base by the required factor."""
    if not {"base", "quantised"} <= set(results):
        raise ArtifactError(
            "--require-ratio compares the base and the quantised draft: measure both"
        )
    base, quantised = (results[name]["mean_accepted"] for name in ("base", "quantised"))
    if quantised < required * base:
        raise ArtifactError(
            f"the quantised draft is accepted for {quantised:.2f} tokens a round, less than "
            f"{required} times the base's {base:.2f}"
        )


# ----------------------------------------------------------------------------------------- main


def export_directory(profile: Profile, name: str) -> Path:
    """The checked export of one of the three drafts; names the command where it is missing."""
    directory = profile.workspace / EXPORTS[name]
    read_stage(directory, profile.command("quantize") + MAKE[name], verify=False)
    return directory


def run_once(args: argparse.Namespace, profile: Profile) -> None:
    export = export_directory(profile, "quantised")
    tokenizer = load_tokenizer(export)
    contract = read_contract(export)["fingerprint"]
    truth = None
    if args.text is not None:
        # What the shell passes may not be text; the tokenizer takes nothing else.
        text = os.fsencode(args.text).decode(errors="replace")
        messages = [{"role": "user", "content": text}]
        prompt = prompt_token_ids(tokenizer, messages, profile.architecture["thinking"])
    else:
        label = load_labels(profile, args.split, 1)[0]
        prompt, truth = label["prompt_token_ids"], label["output_token_ids"]
    if args.url:
        show_draft(DraftClient(args.url), tokenizer, prompt, truth, contract)
    else:
        with serve(export) as client:
            show_draft(client, tokenizer, prompt, truth, contract)


def load_labels(profile: Profile, split: str, count: int) -> list[dict]:
    labels = read_labels(
        profile.workspace / "labels", split, ["id", "prompt_token_ids", "output_token_ids"]
    )[:count]
    if not labels:
        raise ArtifactError(
            f"the label set has no {split} records; label more prompts: "
            f"{profile.command('generate_teacher')} --force"
        )
    return labels


def main(args: argparse.Namespace) -> None:
    profile = load_profile(args.profile)
    if args.text is not None or args.example:
        return run_once(args, profile)
    command = profile.command("generate_teacher")
    label_digest = stage_digest(profile.workspace / "labels", command)
    labels = load_labels(profile, args.split, args.records)
    contracts = {
        name: read_contract(export_directory(profile, name))["fingerprint"] for name in args.models
    }
    stage = Stage(
        name="evaluate",
        directory=profile.workspace / "evaluation",
        command=own_command(),
        arguments={
            "split": args.split,
            "records": args.records,
            "target_step_ms": args.target_step_ms,
        },
        inputs={"labels": label_digest} | {f"contract {k}": v for k, v in contracts.items()},
    )
    results = {}
    for name in args.models:
        with serve(export_directory(profile, name)) as client:
            results[name] = measure(client, labels, contracts[name], args.target_step_ms, name)
            results[name]["server"] = client.get("/info")
    with stage.working_directory() as directory:
        write_json(directory / "results.json", results)
        stage.finish(rows={"in": len(labels), "kept": len(labels), "dropped": {}, "failed": 0})
    print_table(results, args.split, len(labels))
    if args.require_ratio is not None:
        check_ratio(results, args.require_ratio)


if __name__ == "__main__":
    sys.exit(run_command(main, parse_args))
