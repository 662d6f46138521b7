"""Stage 3: the base prompts plus one more pinned source and seeded synthesis.

Reads data/base, data_manifest.json and models/base (its tokenizer); writes
workspace/<profile>/data/extended/prompts.parquet and rows.json. Added are the sources that the
manifest marks `extended`, bug-repair problems whose programs were run (bugs.py), and augmentations
of a share of the rows (augment.py), which stay on their row's side of the hold-out.

    python prepare_extended.py
    python prepare_extended.py --profile tiny
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

import augment
import bugs
from artifacts import (
    Profile,
    Stage,
    account,
    add_profile,
    digest,
    load_profile,
    read_stage,
    run_command,
    stage_digest,
    write_json,
)
from hub import fetch_source
from prompts import load_tokenizer, prompt_token_ids
from records import (
    PROMPT_SCHEMA,
    Gate,
    read_records,
    read_source,
    source_record,
    split_of,
    write_records,
)

AUGMENTATIONS = ("frame", "format", "multi_turn", "system", "continue")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_profile(parser, argv, bug_repairs=200)
    parser.add_argument("--seed", type=int, default=0, help="of the synthesis (default: 0)")
    parser.add_argument(
        "--bug-repairs",
        type=int,
        default=8000,
        metavar="N",
        help="bug-repair problems to make (default: %(default)s)",
    )
    parser.add_argument(
        "--augment-share",
        type=float,
        default=0.2,
        metavar="S",
        help="share of base rows that get one augmentation each (default: %(default)s)",
    )
    parser.add_argument("--force", action="store_true", help="replace an earlier result")
    return parser.parse_args(argv)


class Counter:
    """Rows of the part at hand; `close` checks that they add up."""

    def __init__(self, gate: Gate, counts: dict):
        self.gate, self.counts, self.total = gate, counts, 0

    def open(self) -> None:
        self.gate.dropped, self.gate.passed, self.total = {}, 0, 0

    def close(self, name: str) -> None:
        self.counts[name] = account(self.total, self.gate.passed, dict(self.gate.dropped))


def extended_sources(profile: Profile, holdout: float, counter: Counter) -> Iterator[dict]:
    for source in profile.manifest()["sources"]:
        if source["stage"] != "extended":
            continue
        path = fetch_source(profile, source, profile.command("prepare_extended"))
        counter.open()
        for number, row in tqdm(read_source(path, source), desc=source["name"], unit="row"):
            counter.total += 1
            if row is None:
                counter.gate.drop("no_usable_prompt")
            elif counter.gate.admit(row.messages):
                yield source_record(source, number, row, holdout)
        counter.close(source["name"])


def bug_repairs(args: argparse.Namespace, holdout: float, counter: Counter) -> Iterator[dict]:
    """Synthetic problems; the broken program was seen to fail, the repaired one to pass."""
    problems = bugs.bug_repairs(args.seed, args.bug_repairs)
    bugs.verify(problems)
    counter.open()
    for number, problem in enumerate(problems):
        counter.total += 1
        messages = bugs.to_messages(problem, random.Random(f"{args.seed}/bug/{number}"))
        if counter.gate.admit(messages):
            yield {
                "id": f"bug_repair/{problem.kind}/train/{number}",
                "source": "bug_repair",
                "messages": messages,
                "augmentation": None,
                "parent_id": None,
                "reference": bugs.answer(problem),
                "split": split_of(messages, holdout),
            }
    counter.close("bug_repair")


def augmentations(base: Path, args: argparse.Namespace, counter: Counter) -> Iterator[dict]:
    """One augmentation for each row that the seed picks; its kind is drawn too."""
    counter.open()
    for parent in read_records(base):
        rng = random.Random(f"{args.seed}/augment/{parent['id']}")
        counter.total += 1
        if rng.random() >= args.augment_share:
            counter.gate.drop("not_sampled")
            continue
        kind = rng.choice(AUGMENTATIONS)
        messages = augment.augment(kind, parent["messages"], parent["reference"] or "", rng)
        if messages is None:
            counter.gate.drop(f"{kind}_does_not_apply")
        elif counter.gate.admit(messages):
            yield {
                **parent,
                "id": f"{parent['id']}/{kind}",
                "messages": messages,
                "augmentation": kind,
                "parent_id": parent["id"],
                "reference": None,
            }
    counter.close("augmentations")


def base_rows(base: Path, counter: Counter) -> Iterator[dict]:
    counter.open()
    for record in read_records(base):
        counter.total += 1
        if counter.gate.admit(record["messages"]):
            yield record
    counter.close("base")


def main(args: argparse.Namespace) -> None:
    profile = load_profile(args.profile)
    models, base = profile.workspace / "models" / "base", profile.workspace / "data" / "base"
    made = read_stage(base, profile.command("prepare_data"))["arguments"]
    extended = [s for s in profile.manifest()["sources"] if s["stage"] == "extended"]
    stage = Stage(
        name="prepare_extended",
        directory=profile.workspace / "data" / "extended",
        command=profile.command("prepare_extended"),
        arguments={
            "seed": args.seed,
            "bug_repairs": args.bug_repairs,
            "augment_share": args.augment_share,
        },
        inputs={
            "manifest": digest(extended),
            "data/base": stage_digest(base, profile.command("prepare_data")),
            "models/base": stage_digest(models, profile.command("download_models")),
        },
    )
    if stage.is_done(args.force):
        return
    tokenizer, thinking = load_tokenizer(models), profile.architecture["thinking"]
    gate = Gate(lambda m: len(prompt_token_ids(tokenizer, m, thinking)), made["max_prompt_tokens"])
    counts: dict[str, dict] = {}
    counter = Counter(gate, counts)

    def records() -> Iterator[dict]:
        yield from base_rows(base / "prompts.parquet", counter)
        yield from extended_sources(profile, made["holdout_percent"], counter)
        yield from bug_repairs(args, made["holdout_percent"], counter)
        yield from augmentations(base / "prompts.parquet", args, counter)

    with stage.working_directory() as directory:
        write_records(directory / "prompts.parquet", records(), PROMPT_SCHEMA)
        write_json(directory / "rows.json", counts)
        stage.finish(rows=counts)
    for name, rows in counts.items():
        print(f"  {name}: {rows['in']} rows, {rows['kept']} kept, dropped {rows['dropped']}")


if __name__ == "__main__":
    sys.exit(run_command(main, parse_args))
