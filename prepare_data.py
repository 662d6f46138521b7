"""Stage 2: prompts from the train splits that data_manifest.json pins.

Reads data_manifest.json and models/base (its tokenizer, to measure prompts); writes
workspace/<profile>/data/base/prompts.parquet and rows.json, the account of every row. Only files of
train splits are opened, each verified against its sha256 first.

    python prepare_data.py
    python prepare_data.py --profile tiny
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator

from tqdm import tqdm

from artifacts import (
    Profile,
    Stage,
    digest,
    load_profile,
    number_between,
    own_command,
    parse_profile_args,
    positive,
    run_command,
    stage_digest,
    write_json,
)
from dedup import Exclusions, add_exclusion_flags, exclusion_hashes
from gate import Gate
from hub import check_split, fetch_source, fill_pins
from prompts import load_tokenizer, prompt_token_ids
from records import PROMPT_SCHEMA, read_source, source_record, write_records


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0, help="of the sampling (default: 0)")
    parser.add_argument(
        "--max-rows",
        type=positive,
        default=60000,
        metavar="N",
        help="rows sampled from each source at most (default: %(default)s)",
    )
    parser.add_argument(
        "--max-prompt-tokens",
        type=positive,
        default=4096,
        metavar="N",
        help="longer prompts are dropped (default: %(default)s)",
    )
    parser.add_argument(
        "--holdout-percent",
        type=number_between(0, 100),
        default=2.0,
        metavar="P",
        help="share of prompts held out by a hash of their text (default: %(default)s)",
    )
    add_exclusion_flags(parser)
    parser.add_argument("--force", action="store_true", help="replace an earlier result")
    parser.add_argument(
        "--pin",
        action="store_true",
        help="compare data_manifest.json with the Hub at the pinned revisions; prepare nothing",
    )
    parser.add_argument(
        "--write", action="store_true", help="with --pin: fill in what is null, overwrite nothing"
    )
    return parse_profile_args(parser, argv, max_prompt_tokens=512, holdout_percent=10.0)


def sampled_rows(rows: int, args: argparse.Namespace, name: str) -> set[int] | None:
    """Row numbers that are kept of a source, None for all; seeded by the source's name."""
    if rows <= args.max_rows:
        return None
    return set(random.Random(f"{args.seed}/{name}").sample(range(rows), args.max_rows))


def base_records(profile: Profile, args: argparse.Namespace, gate: Gate) -> Iterator[dict]:
    """Records of all base sources, in manifest order."""
    for source in profile.manifest()["sources"]:
        if source["stage"] != "base":
            continue
        path = fetch_source(profile, source, profile.command("prepare_data"))
        chosen = sampled_rows(source["rows"] or 0, args, source["name"])
        rows = tqdm(read_source(path, source), desc=source["name"], unit="row")
        with gate.part(source["name"]):
            for number, row in gate.see(rows):
                if chosen is not None and number not in chosen:
                    gate.drop("not_sampled")
                    continue
                if row is None:
                    gate.drop("no_usable_prompt")
                    continue
                record = source_record(source, number, row, args.holdout_percent)
                if gate.admit(row.messages, record["id"]):
                    yield record


def pin(profile: Profile, write: bool) -> None:
    """Ask the Hub about the files of all sources, those of the extended stage too."""
    manifest = profile.manifest()
    pins = []
    for source in manifest["sources"]:
        check_split(source)
        if source["repo"]:
            file = {"path": source["file"], "bytes": source["bytes"], "sha256": source["sha256"]}
            entry = {"repo": source["repo"], "revision": source["revision"], "files": [file]}
            pins.append((source["name"], "dataset", entry, [file]))
    if fill_pins(pins, write):
        filled = {name: files[0] for name, _, _, files in pins}
        for source in manifest["sources"]:
            facts = filled.get(source["name"], source)
            source["bytes"], source["sha256"] = facts["bytes"], facts["sha256"]
        write_json(profile.directory / "data_manifest.json", manifest)
        print(f"wrote {profile.directory / 'data_manifest.json'}")


def main(args: argparse.Namespace) -> None:
    profile = load_profile(args.profile)
    if args.pin:
        return pin(profile, args.write)
    base = profile.workspace / "models" / "base"
    stage = Stage(
        name="prepare_data",
        directory=profile.workspace / "data" / "base",
        command=own_command(),
        arguments={
            "seed": args.seed,
            "max_rows": args.max_rows,
            "max_prompt_tokens": args.max_prompt_tokens,
            "holdout_percent": args.holdout_percent,
            "thinking": profile.architecture["thinking"],
            "exclude": exclusion_hashes(args),
        },
        inputs={
            "manifest": digest([s for s in profile.manifest()["sources"] if s["stage"] == "base"]),
            "models/base": stage_digest(base, profile.command("download_models")),
        },
    )
    if stage.is_done(args.force):
        return
    tokenizer = load_tokenizer(base)
    thinking = profile.architecture["thinking"]
    gate = Gate(
        lambda m: len(prompt_token_ids(tokenizer, m, thinking)),
        args.max_prompt_tokens,
        Exclusions(args.exclude, args.exclude_columns) if args.exclude else None,
    )
    with stage.working_directory() as directory:
        records = base_records(profile, args, gate)
        write_records(directory / "prompts.parquet", records, PROMPT_SCHEMA)
        gate.write_report(directory)
        stage.finish(rows=gate.accounts)
    gate.report()


if __name__ == "__main__":
    sys.exit(run_command(main, parse_args))
