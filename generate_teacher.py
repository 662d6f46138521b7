"""Stage 4: the teacher's greedy continuations, the labels of distillation.

Reads data/extended, models/base (tokenizer and template) and models/teacher; writes
workspace/<profile>/labels/{train,holdout,diagnostic}/*.parquet and skipped.jsonl. Prompts go in as
token ids. Finished shards survive a crash: run the same command again and only the missing ones
are computed. `diagnostic` repeats the first N train records, so that acceptance can be measured on
what training saw. Real pair: needs a GPU with 24 GB or more.

    python generate_teacher.py
    python generate_teacher.py --profile tiny
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
from tqdm import tqdm

from artifacts import (
    ArtifactError,
    Profile,
    Stage,
    account,
    load_profile,
    parse_profile_args,
    run_command,
    stage_digest,
)
from labelling import Engine, Label, TransformersEngine, VllmEngine
from prompts import load_tokenizer, prompt_token_ids
from records import label_schema, read_records, write_records

SPLITS = ("train", "holdout")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--engine",
        choices=["vllm", "transformers"],
        default="vllm",
        help="what runs the teacher (default: vllm; the tiny profile: transformers)",
    )
    parser.add_argument(
        "--max-output-tokens",
        type=int,
        default=1024,
        metavar="N",
        help="longer answers are cut and marked finish_reason length (default: %(default)s)",
    )
    parser.add_argument(
        "--logprobs",
        type=int,
        default=0,
        metavar="K",
        choices=range(21),
        help="also store the K best log-probabilities a position, 0..20 (default: 0)",
    )
    parser.add_argument(
        "--limit", type=int, metavar="N", help="label only the first N prompts (default: all)"
    )
    parser.add_argument(
        "--diagnostic",
        type=int,
        default=256,
        metavar="N",
        help="train records repeated as the diagnostic set (default: %(default)s)",
    )
    parser.add_argument(
        "--shard-size",
        type=int,
        default=4096,
        metavar="N",
        help="prompts a shard: what a crash can lose (default: %(default)s)",
    )
    parser.add_argument(
        "--batch-size",
        type=int,
        default=64,
        metavar="N",
        help="prompts a batch of the transformers engine (default: %(default)s)",
    )
    parser.add_argument(
        "--tensor-parallel",
        type=int,
        default=1,
        metavar="N",
        help="GPUs that vLLM splits the teacher over (default: 1)",
    )
    parser.add_argument("--force", action="store_true", help="replace an earlier label set")
    return parse_profile_args(
        parser, argv, max_output_tokens=192, engine="transformers", shard_size=256
    )


class Prompts:
    """Streams the prompt records as (split, [(record, token ids)]) shards.

    `skipped` collects prompts that can't be labelled; `counts` what was seen by split.
    """

    def __init__(self, path: Path, tokenizer, thinking: bool, room: int, limit: int | None):
        self.path, self.tokenizer, self.thinking = path, tokenizer, thinking
        self.room, self.limit = room, limit
        self.skipped: list[dict] = []
        total = pq.ParquetFile(path).metadata.num_rows
        self.total = total if limit is None else min(total, limit)

    def shards(self, size: int) -> Iterator[tuple[str, int, list[tuple[dict, list[int]]]]]:
        """(split, shard number, records with their token ids), each shard as soon as it is full."""
        waiting: dict[str, list] = {split: [] for split in SPLITS}
        numbers = dict.fromkeys(SPLITS, 0)
        for count, record in enumerate(read_records(self.path)):
            if count == self.total:
                break
            ids = prompt_token_ids(self.tokenizer, record["messages"], self.thinking)
            if len(ids) > self.room:
                self.skipped.append({"id": record["id"], "status": "dropped", "reason": "too_long"})
                continue
            split = record["split"]
            waiting[split].append((record, ids))
            if len(waiting[split]) == size:
                yield split, numbers[split], waiting[split]
                waiting[split] = []
                numbers[split] += 1
        for split in SPLITS:
            if waiting[split]:
                yield split, numbers[split], waiting[split]


def make_engine(args: argparse.Namespace, profile: Profile, context: int) -> Engine:
    teacher = profile.workspace / "models" / "teacher"
    eos = profile.architecture["eos_token_ids"]
    if args.engine == "transformers":
        return TransformersEngine(
            teacher, eos, args.max_output_tokens, args.logprobs, args.batch_size
        )
    try:
        return VllmEngine(
            teacher, eos, args.max_output_tokens, args.logprobs, context, args.tensor_parallel
        )
    except ImportError as error:
        raise ArtifactError(
            f"vLLM can't be imported ({error}); install requirements.txt on a GPU machine, or pass "
            "--engine transformers"
        ) from None


def to_record(prompt: dict, ids: list[int], label: Label) -> dict:
    record = {
        "id": prompt["id"],
        "source": prompt["source"],
        "prompt_token_ids": ids,
        "output_token_ids": label.output_token_ids,
        "finish_reason": label.finish_reason,
    }
    if label.top is not None:
        top_ids, top_logprobs = label.top
        margin = [v[0] - v[1] if len(v) > 1 else float("inf") for v in top_logprobs]
        record |= {"top_ids": top_ids, "top_logprobs": top_logprobs, "margin": margin}
    return record


def write_shard(path: Path, records: list[dict], top_k: int) -> None:
    """A shard appears whole or not at all."""
    path.parent.mkdir(exist_ok=True)
    partial = path.with_suffix(".tmp")
    write_records(partial, records, label_schema(top_k))
    os.replace(partial, path)


def label_all(
    args: argparse.Namespace, profile: Profile, prompts: Prompts, context: int, directory: Path
) -> dict[str, int]:
    """Label every shard that is not on disk yet; returns the number of labels by split."""
    engine = None  # a resumed run may find nothing left to do
    counts = dict.fromkeys(SPLITS, 0)
    tokens, began = 0, time.monotonic()
    with tqdm(total=prompts.total, unit="prompt", desc="label") as progress:
        for split, number, shard in prompts.shards(args.shard_size):
            path = directory / split / f"{number:05d}.parquet"
            if not path.exists():
                engine = engine or make_engine(args, profile, context)
                labels = engine.label([ids for _, ids in shard])
                records = [
                    to_record(prompt, ids, label)
                    for (prompt, ids), label in zip(shard, labels, strict=True)
                    if label.output_token_ids
                ]
                write_shard(path, records, args.logprobs)
                tokens += sum(len(label.output_token_ids) for label in labels)
                progress.set_postfix_str(f"{tokens / (time.monotonic() - began):.0f} tokens/s")
            labelled = {record["id"] for record in read_records(path, ["id"])}
            counts[split] += len(labelled)
            for prompt, _ in shard:
                if prompt["id"] not in labelled:
                    prompts.skipped.append(
                        {"id": prompt["id"], "status": "failed", "reason": "empty_output"}
                    )
            progress.update(len(shard))
    return counts


def write_diagnostic(directory: Path, count: int, top_k: int) -> int:
    """The first `count` train records once more, as a split of their own."""
    records = []
    for shard in sorted((directory / "train").glob("*.parquet")):
        records += read_records(shard)
        if len(records) >= count:
            break
    write_shard(directory / "diagnostic" / "00000.parquet", records[:count], top_k)
    return len(records[:count])


def main(args: argparse.Namespace) -> None:
    profile = load_profile(args.profile)
    workspace, architecture = profile.workspace, profile.architecture
    download = profile.command("download_models")
    stage = Stage(
        name="generate_teacher",
        directory=workspace / "labels",
        command=profile.command("generate_teacher"),
        arguments={
            "engine": args.engine,
            "max_output_tokens": args.max_output_tokens,
            "logprobs": args.logprobs,
            "limit": args.limit,
            "diagnostic": args.diagnostic,
            "shard_size": args.shard_size,
            "batch_size": args.batch_size if args.engine == "transformers" else None,
            "thinking": architecture["thinking"],
            "eos_token_ids": architecture["eos_token_ids"],
        },
        inputs={
            "data/extended": stage_digest(
                workspace / "data" / "extended", profile.command("prepare_extended")
            ),
            "models/base": stage_digest(workspace / "models" / "base", download),
            "models/teacher": stage_digest(workspace / "models" / "teacher", download),
        },
    )
    if stage.is_done(args.force):
        return
    context = architecture["dimensions"]["max_position_embeddings"]
    room = context - args.max_output_tokens
    if room < 1:
        raise ArtifactError(
            f"--max-output-tokens {args.max_output_tokens} leaves no room for a prompt in a "
            f"context of {context}"
        )
    tokenizer = load_tokenizer(workspace / "models" / "base")
    prompts = Prompts(
        workspace / "data" / "extended" / "prompts.parquet",
        tokenizer,
        architecture["thinking"],
        room,
        args.limit,
    )
    with stage.working_directory(resume=True, force=args.force) as directory:
        counts = label_all(args, profile, prompts, context, directory)
        if not counts["train"]:
            raise ArtifactError("no train prompt was labelled: nothing to distil from")
        rows = account(
            prompts.total,
            sum(counts.values()),
            {"too_long": sum(s["status"] == "dropped" for s in prompts.skipped)},
            sum(s["status"] == "failed" for s in prompts.skipped),
        )
        counts["diagnostic"] = write_diagnostic(directory, args.diagnostic, args.logprobs)
        text = "".join(json.dumps(s) + "\n" for s in prompts.skipped)
        (directory / "skipped.jsonl").write_text(text)
        stage.finish(rows=rows | {"by_split": counts})
    print(f"  labels: {counts}, skipped {len(prompts.skipped)}")


if __name__ == "__main__":
    sys.exit(run_command(main, parse_args))
