"""Acceptance of the drafts, measured through the real endpoint.

Reads labels (hold-out by default) and the exports; serves one export after the other and drafts
round by round as a verifier would: the context so far goes to /draft, the drafted tokens are kept
up to the first that differs from the teacher's greedy continuation, and the teacher's own next
token is added. Writes workspace/<profile>/evaluation/results.json and prints a table.

    python evaluate.py
    python evaluate.py --target-step-ms 5.4     # net speed-up beside a target of that step time
    python evaluate.py --text "Why is the sky blue?" --url http://127.0.0.1:8000
    python evaluate.py --profile tiny --example
    python evaluate.py --ladder                 # what each step of the export costs; the gate that
                                                # quantize.py --release looks at
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from artifacts import (
    ArtifactError,
    Profile,
    Stage,
    digest,
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
from client import DraftClient, serve
from contract import read_contract
from ladder import RUNGS, climb, print_ladder
from prompts import load_tokenizer, prompt_token_ids
from records import read_labels
from rounds import matching, measure

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

COMPARED = {"base": "base", "distilled": "distilled", "quantised": "packed"}  # rungs of the ladder
EXPORTS = {name: RUNGS[rung].export for name, rung in COMPARED.items()}
MAKE = {name: RUNGS[rung].made_by for name, rung in COMPARED.items()}


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
    parser.add_argument(
        "--ladder",
        action="store_true",
        help="base, distilled in bf16, body packed, all packed, as served: on the same prompts, "
        "with intervals; writes ladder/",
    )
    parser.add_argument(
        "--max-loss",
        type=number_between(0, 1),
        default=0.02,
        metavar="SHARE",
        help="of the bf16 draft's accepted length that a releasable export may lose "
        "(default: %(default)s)",
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


def measure_ladder(args: argparse.Namespace, profile: Profile) -> None:
    """Climb the ladder and keep it, with the verdict on this very export."""
    labels_digest = stage_digest(profile.workspace / "labels", profile.command("generate_teacher"))
    labels = load_labels(profile, args.split, args.records)
    directories, digests = {}, {}
    for rung in RUNGS.values():
        directory = profile.workspace / rung.export
        record = read_stage(directory, profile.command("quantize") + rung.made_by)
        directories[rung.name], digests[rung.name] = directory, digest(record["outputs"])
    stage = Stage(
        name="ladder",
        directory=profile.workspace / "ladder",
        command=own_command(),
        arguments={"split": args.split, "records": args.records, "max_loss": args.max_loss},
        inputs={"labels": labels_digest} | digests,
    )
    results = climb(directories, labels, args.max_loss) | {"export": digests["served"]}
    with stage.working_directory() as directory:
        write_json(directory / "results.json", results)
        stage.finish(rows={"in": len(labels), "kept": len(labels), "dropped": {}, "failed": 0})
    print_ladder(results, args.split)
    if results["rungs"]["served"]["of_distilled"]["high"] < 1 - args.max_loss:
        raise ArtifactError(f"chance alone does not explain that {results['verdict']}")


def main(args: argparse.Namespace) -> None:
    profile = load_profile(args.profile)
    if args.ladder:
        return measure_ladder(args, profile)
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
