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
    digest,
    load_profile,
    not_negative,
    number_between,
    own_command,
    parse_profile_args,
    read_stage,
    run_command,
    stage_digest,
)
from dedup import Exclusions, add_exclusion_flags, exclusion_hashes
from gate import Gate
from hub import fetch_source
from prompts import load_tokenizer, prompt_token_ids
from records import (
    PROMPT_SCHEMA,
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
    parser.add_argument("--seed", type=int, default=0, help="of the synthesis (default: 0)")
    parser.add_argument(
        "--bug-repairs",
        type=not_negative,
        default=8000,
        metavar="N",
        help="bug-repair problems to make (default: %(default)s)",
    )
    parser.add_argument(
        "--augment-share",
        type=number_between(0, 1),
        default=0.2,
        metavar="S",
        help="share of base rows that get one augmentation each (default: %(default)s)",
    )
    add_exclusion_flags(parser)
    parser.add_argument("--force", action="store_true", help="replace an earlier result")
    return parse_profile_args(parser, argv, bug_repairs=200)


def base_rows(base: Path, gate: Gate) -> Iterator[dict]:
    with gate.part("base"):
        for record in gate.see(read_records(base)):
            if gate.admit(record["messages"], record["id"], measure=False):
                yield record


def extended_sources(profile: Profile, holdout_percent: float, gate: Gate) -> Iterator[dict]:
    for source in profile.manifest()["sources"]:
        if source["stage"] != "extended":
            continue
        path = fetch_source(profile, source, profile.command("prepare_extended"))
        rows = tqdm(read_source(path, source), desc=source["name"], unit="row")
        with gate.part(source["name"]):
            for number, row in gate.see(rows):
                if row is None:
                    gate.drop("no_usable_prompt")
                    continue
                record = source_record(source, number, row, holdout_percent)
                if gate.admit(row.messages, record["id"]):
                    yield record


def bug_repairs(args: argparse.Namespace, holdout_percent: float, gate: Gate) -> Iterator[dict]:
    """Synthetic problems; the broken program was seen to fail, the repaired one to pass."""
    problems = bugs.bug_repairs(args.seed, args.bug_repairs)
    bugs.verify(problems)
    with gate.part("bug_repair"):
        for number, problem in gate.see(enumerate(problems)):
            messages = bugs.to_messages(problem, random.Random(f"{args.seed}/bug/{number}"))
            name = f"bug_repair/{problem.kind}/train/{number}"
            if gate.admit(messages, name, near=False):
                yield {
                    "id": name,
                    "source": "bug_repair",
                    "messages": messages,
                    "augmentation": None,
                    "parent_id": None,
                    "reference": bugs.answer(problem),
                    "split": split_of(messages, holdout_percent),
                }


def augmentations(base: Path, args: argparse.Namespace, gate: Gate) -> Iterator[dict]:
    """One augmentation for each row that the seed picks; its kind is drawn too."""
    with gate.part("augmentations"):
        for parent in gate.see(read_records(base)):
            rng = random.Random(f"{args.seed}/augment/{parent['id']}")
            if rng.random() >= args.augment_share:
                gate.drop("not_sampled")
                continue
            kind = rng.choice(AUGMENTATIONS)
            messages = augment.augment(kind, parent["messages"], parent["reference"] or "", rng)
            if messages is None:
                gate.drop(f"{kind}_does_not_apply")
            elif gate.admit(messages, f"{parent['id']}/{kind}", near=False):
                yield {
                    **parent,  # its split too: an augmentation stays on its row's side
                    "id": f"{parent['id']}/{kind}",
                    "messages": messages,
                    "augmentation": kind,
                    "parent_id": parent["id"],
                    "reference": None,
                }


def main(args: argparse.Namespace) -> None:
    profile = load_profile(args.profile)
    models, base = profile.workspace / "models" / "base", profile.workspace / "data" / "base"
    made = read_stage(base, profile.command("prepare_data"))["arguments"]
    extended = [s for s in profile.manifest()["sources"] if s["stage"] == "extended"]
    stage = Stage(
        name="prepare_extended",
        directory=profile.workspace / "data" / "extended",
        command=own_command(),
        arguments={
            "seed": args.seed,
            "bug_repairs": args.bug_repairs,
            "augment_share": args.augment_share,
            "exclude": exclusion_hashes(args),
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
    gate = Gate(
        lambda m: len(prompt_token_ids(tokenizer, m, thinking)),
        made["max_prompt_tokens"],
        Exclusions(args.exclude, args.exclude_columns) if args.exclude else None,
    )
    holdout_percent = made["holdout_percent"]

    def records() -> Iterator[dict]:
        yield from base_rows(base / "prompts.parquet", gate)
        yield from extended_sources(profile, holdout_percent, gate)
        yield from bug_repairs(args, holdout_percent, gate)
        yield from augmentations(base / "prompts.parquet", args, gate)

    with stage.working_directory() as directory:
        write_records(directory / "prompts.parquet", records(), PROMPT_SCHEMA)
        gate.write_report(directory)
        stage.finish(rows=gate.accounts)
    gate.report()


if __name__ == "__main__":
    sys.exit(run_command(main, parse_args))
