"""Stage 4: the teacher's greedy continuations, the labels of distillation.

Reads data/extended, models/base (tokenizer and template) and models/teacher; writes
workspace/<profile>/labels/{train,holdout,diagnostic}/*.parquet and skipped.jsonl. Prompts go in as
token ids. Finished shards survive a crash: run the same command again and only the missing ones
are computed. `diagnostic` repeats the first N train records, so that acceptance can be measured on
what training saw. Real pair: needs a GPU with 24 GB or more.

    python generate_teacher.py
    python generate_teacher.py --profile tiny
    python generate_teacher.py --data-parallel 8             # one teacher on each of 8 GPUs
    python generate_teacher.py --shard 0/2                   # this machine's half; then, with all
    python generate_teacher.py --merge 2                     # halves side by side, the whole
    python generate_teacher.py --self-agreement 200          # how far the teacher repeats itself
    python generate_teacher.py --from-rejections distilled   # → labels-rejections/: on from where
                                                             # that run's draft first goes wrong
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from itertools import islice
from pathlib import Path

import pyarrow.parquet as pq
import torch
from tqdm import tqdm

from artifacts import (
    ArtifactError,
    Profile,
    Stage,
    account,
    differences,
    digest,
    load_profile,
    not_negative,
    own_command,
    parse_profile_args,
    plain_name,
    positive,
    read_stage,
    replace_file,
    run_command,
    stage_digest,
    write_json,
)
from checkpoints import run_checkpoint
from label_prompts import SPLITS, Prompts, RejectionPrompts
from labelling import Engine, Label, TransformersEngine, VllmEngine
from model import load_checkpoint
from prompts import load_tokenizer
from records import label_schema, read_records, write_records

NEAR_TIE = 0.05  # nats between the best two; bf16 kernels of other shapes differ by that much


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
        type=positive,
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
        "--limit", type=positive, metavar="N", help="label only the first N prompts (default: all)"
    )
    parser.add_argument(
        "--diagnostic",
        type=not_negative,
        default=256,
        metavar="N",
        help="train records repeated as the diagnostic set (default: %(default)s)",
    )
    parser.add_argument(
        "--shard-size",
        type=positive,
        default=4096,
        metavar="N",
        help="prompts a shard: what a crash can lose (default: %(default)s)",
    )
    parser.add_argument(
        "--batch-size",
        type=positive,
        default=64,
        metavar="N",
        help="prompts a batch of the transformers engine (default: %(default)s)",
    )
    parser.add_argument(
        "--tensor-parallel",
        type=positive,
        default=1,
        metavar="N",
        help="GPUs that vLLM splits the teacher over (default: 1)",
    )
    parser.add_argument(
        "--data-parallel",
        type=positive,
        default=1,
        metavar="N",
        help="processes that each run a teacher on GPUs of their own (default: 1)",
    )
    parser.add_argument(
        "--shard",
        type=parse_part,
        metavar="I/N",
        help="label only part I (0..N-1) of N, into labels.I-of-N, on one of N machines",
    )
    parser.add_argument(
        "--merge",
        type=positive,
        metavar="N",
        help="put N parts together into labels; labels nothing",
    )
    parser.add_argument(
        "--self-agreement",
        type=positive,
        metavar="N",
        help="label the first N train prompts once more, one at a time, and compare",
    )
    parser.add_argument(
        "--from-rejections",
        type=plain_name,
        metavar="RUN",
        help="continue the train labels from the first token that this run's draft gets wrong",
    )
    # What --data-parallel starts: shards I, I + N, … of a run whose lock the parent holds.
    parser.add_argument("--worker", type=parse_part, help=argparse.SUPPRESS)
    parser.add_argument("--force", action="store_true", help="replace an earlier label set")
    return parse_profile_args(
        parser, argv, max_output_tokens=192, engine="transformers", shard_size=256
    )


def parse_part(text: str) -> tuple[int, int]:
    """`I/N` → (I, N), 0 <= I < N."""
    part, _, parts = text.partition("/")
    if not (part.isdigit() and parts.isdigit() and int(part) < int(parts)):
        raise argparse.ArgumentTypeError(f"{text!r} is not I/N with I from 0 to N - 1")
    return int(part), int(parts)


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
    replace_file(path, lambda partial: write_records(partial, records, label_schema(top_k)))


def label_all(
    args: argparse.Namespace,
    profile: Profile,
    prompts: Prompts | RejectionPrompts,
    context: int,
    directory: Path,
) -> dict[str, int]:
    """Label every shard that is not on disk yet; returns the number of labels by split."""
    engine = None  # a resumed run, or the parent of workers, may find nothing left to do
    worker, workers = args.worker or (0, 1)
    counts = dict.fromkeys(SPLITS, 0)
    tokens, began = 0, time.monotonic()
    with tqdm(total=prompts.total, unit="prompt", desc="label") as progress:
        for count, (split, number, shard) in enumerate(prompts.shards(args.shard_size)):
            path = directory / split / f"{number:05d}.parquet"
            if count % workers != worker:
                continue
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
            try:
                labelled = {record["id"] for record in read_records(path, ["id"])}
            except ArtifactError as error:
                text = f"{error}: remove it, and the same command labels it again"
                raise ArtifactError(text) from None
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


def run_workers(args: argparse.Namespace) -> None:
    """Start `--data-parallel` copies of this command, each on its own GPUs, and wait for all."""
    environment = os.environ.copy()
    devices = [d for d in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if d]
    count, width = args.data_parallel, args.tensor_parallel
    devices = devices or [str(i) for i in range(count * width)]
    if len(devices) < count * width:
        raise ArtifactError(
            f"--data-parallel {count} × --tensor-parallel {width} needs {count * width} GPUs, "
            f"CUDA_VISIBLE_DEVICES names {len(devices)}"
        )
    workers = []
    for index in range(count):
        mine = ",".join(devices[index * width : (index + 1) * width])
        command = [sys.executable, *sys.argv, "--worker", f"{index}/{count}"]
        workers.append(subprocess.Popen(command, env=environment | {"CUDA_VISIBLE_DEVICES": mine}))
    try:
        codes = [worker.wait() for worker in workers]
    except BaseException:
        for worker in workers:
            worker.terminate()
        raise
    if any(codes):
        raise ArtifactError(
            f"{sum(map(bool, codes))} of {count} workers failed; what they finished is kept: run "
            "the same command again"
        )


def make_stage(args: argparse.Namespace, profile: Profile, part: tuple[int, int] | None) -> Stage:
    workspace, architecture = profile.workspace, profile.architecture
    download = profile.command("download_models")
    name = "labels" if args.from_rejections is None else "labels-rejections"
    return Stage(
        name="generate_teacher",
        directory=workspace / (name if part is None else f"{name}.{part[0]}-of-{part[1]}"),
        command=own_command(),
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
        inputs=prompt_inputs(args, profile)
        | {
            "models/base": stage_digest(workspace / "models" / "base", download),
            "models/teacher": stage_digest(workspace / "models" / "teacher", download),
        },
    )


def prompt_inputs(args: argparse.Namespace, profile: Profile) -> dict[str, str]:
    """Digests of what the prompts are made from."""
    workspace, run = profile.workspace, args.from_rejections
    if run is None:
        made_by = profile.command("prepare_extended")
        return {"data/extended": stage_digest(workspace / "data" / "extended", made_by)}
    labels = stage_digest(workspace / "labels", profile.command("generate_teacher"))
    return {"labels": labels, f"runs/{run}": run_checkpoint(profile, run).digest}


def make_prompts(
    args: argparse.Namespace, profile: Profile, room: int
) -> Prompts | RejectionPrompts:
    """What will be labelled: the prepared prompts, or where a draft went wrong."""
    workspace, architecture = profile.workspace, profile.architecture
    if args.from_rejections is None:
        return Prompts(
            workspace / "data" / "extended" / "prompts.parquet",
            load_tokenizer(workspace / "models" / "base"),
            architecture["thinking"],
            room,
            args.limit,
            args.shard,
        )
    cuda = torch.cuda.is_available()
    draft = load_checkpoint(
        workspace / "runs" / args.from_rejections / "checkpoint",
        torch.bfloat16 if cuda else torch.float32,
        "cuda" if cuda else "cpu",
    )
    shards = sorted((workspace / "labels" / "train").glob("*.parquet"))
    return RejectionPrompts(shards, draft, architecture["eos_token_ids"], room, args.limit)


def finish(args: argparse.Namespace, stage: Stage, total: int, skipped: list[dict]) -> None:
    """Account for every prompt, add the diagnostic set, put the label set in place."""
    counts = {
        split: sum(pq.ParquetFile(p).metadata.num_rows for p in (stage.partial / split).glob("*"))
        for split in SPLITS
    }
    dropped = Counter(s["reason"] for s in skipped if s["status"] == "dropped")
    if not counts["train"] and args.shard is None:
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(dropped.items()))
        why = f" ({reasons})" if reasons else ""
        raise ArtifactError(f"no train prompt was labelled{why}: nothing to distil from")
    rows = account(
        total,
        sum(counts.values()),
        {"too_long": 0} | dict(sorted(dropped.items())),
        sum(s["status"] == "failed" for s in skipped),
    )
    if args.from_rejections is None:
        counts["diagnostic"] = write_diagnostic(stage.partial, args.diagnostic, args.logprobs)
    lines = "".join(json.dumps(entry) + "\n" for entry in skipped)
    (stage.partial / "skipped.jsonl").write_text(lines)
    stage.finish(rows=rows | {"by_split": counts})
    print(f"  labels: {counts}, skipped {len(skipped)}")


def merge(args: argparse.Namespace, profile: Profile) -> None:
    """Put the parts that N machines labelled together, in the order of the prompts."""
    stage = make_stage(args, profile, None)
    command = f"{stage.command} --shard I/{args.merge}"
    total, skipped = 0, []
    if stage.is_done(args.force):
        return
    # A merge's own shards are named by their part; a killed merge starts over.
    unfinished = [p for p in (stage.partial / "train").glob("*.parquet") if "-" not in p.name]
    if unfinished and not args.force:
        raise ArtifactError(
            f"{stage.partial} has shards of an unfinished run without parts; finish that one, or "
            f"discard it with: {stage.command} --force"
        )
    with stage.working_directory() as directory:
        for index in range(args.merge):
            part = make_stage(args, profile, (index, args.merge)).directory
            record = read_stage(part, command)
            changed = differences({k: record[k] for k in ("arguments", "inputs")}, stage.identity)
            if changed:
                raise ArtifactError(f"{part} was made differently ({changed}); merge nothing")
            for split in SPLITS:
                (directory / split).mkdir(exist_ok=True)
                for shard in sorted((part / split).glob("*.parquet")):
                    name = f"{index:03d}-{shard.name}"
                    shutil.copyfile(shard, directory / split / name)
            text = (part / "skipped.jsonl").read_text()
            skipped += [json.loads(line) for line in text.splitlines()]
            total += record["rows"]["in"]
        finish(args, stage, total, skipped)


def measure_self_agreement(args: argparse.Namespace, profile: Profile, context: int) -> None:
    """Relabel in another batch shape, one prompt at a time: the ceiling of any draft's acceptance.

    Kernels of another shape round otherwise; where the best two log-probabilities nearly tie, the
    teacher then says something else, and no draft can foresee which.
    """
    labels = profile.workspace / "labels"
    stage_record = read_stage(labels, profile.command("generate_teacher"))
    shards = sorted((labels / "train").glob("*.parquet"))
    rows = (record for shard in shards for record in read_records(shard))
    records = list(islice(rows, args.self_agreement))
    # As the labels were made, whatever the flags say: only the batch's shape shall differ.
    made = stage_record["arguments"]
    args.engine, args.max_output_tokens = made["engine"], made["max_output_tokens"]
    args.logprobs = max(made["logprobs"], 2)
    engine = make_engine(args, profile, context)
    equal, ties, matched, total = 0, 0, 0, 0
    for record in tqdm(records, desc="relabel", unit="prompt"):
        again = engine.label([record["prompt_token_ids"]])[0]
        ours, theirs = record["output_token_ids"], again.output_token_ids
        pairs = enumerate(zip(ours, theirs, strict=False))
        parted = next((i for i, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
        matched, total = matched + parted, total + len(ours)
        if parted == len(ours) == len(theirs):
            equal += 1
        elif parted < len(theirs):
            values = again.top[1][parted]
            ties += values[0] - values[1] < NEAR_TIE
    results = {
        "prompts": len(records),
        "identical": equal,
        "parted_at_a_near_tie": ties,
        "parted_otherwise": len(records) - equal - ties,
        "near_tie_nats": NEAR_TIE,
        "tokens_before_parting": matched / max(total, 1),
    }
    stage = Stage(
        name="self_agreement",
        directory=profile.workspace / "self_agreement",
        command=own_command(),
        arguments={
            "engine": args.engine,
            "max_output_tokens": args.max_output_tokens,
            "prompts": args.self_agreement,
        },
        inputs={"labels": digest(stage_record["outputs"])},
    )
    with stage.working_directory() as directory:
        write_json(directory / "results.json", results)
        stage.finish(results=results)
    print(json.dumps(results))


def main(args: argparse.Namespace) -> None:
    profile = load_profile(args.profile)
    context = profile.architecture["dimensions"]["max_position_embeddings"]
    room = context - args.max_output_tokens
    if room < 1:
        raise ArtifactError(
            f"--max-output-tokens {args.max_output_tokens} leaves no room for a prompt in a "
            f"context of {context}"
        )
    if args.from_rejections is not None and (args.shard or args.merge):
        raise ArtifactError("--from-rejections is for one machine: leave out --shard and --merge")
    if args.merge is not None:
        return merge(args, profile)
    if args.self_agreement is not None:
        return measure_self_agreement(args, profile, context)
    stage = make_stage(args, profile, args.shard)
    if stage.is_done(args.force):
        return
    prompts = make_prompts(args, profile, room)
    if args.worker:
        label_all(args, profile, prompts, context, stage.partial)
        return
    with stage.working_directory(resume=True, force=args.force) as directory:
        if args.data_parallel > 1:
            run_workers(args)
        label_all(args, profile, prompts, context, directory)
        finish(args, stage, prompts.total, prompts.skipped)


if __name__ == "__main__":
    sys.exit(run_command(main, parse_args))
