"""Stage 5: distil the base on the teacher's labels.

Reads models/base and labels; writes workspace/<profile>/runs/<name>/: checkpoint/ (a Hugging Face
directory, bf16), metrics.jsonl and loss.png. Only label positions carry loss; sequences are packed
and don't see each other. The last part of training goes through the packed formats that are served
(--qat). The checkpoint is the one that drafted best for the hold-out. An interrupted run goes on
from its last saved step and, on a CPU, ends with the same bytes as an undisturbed one.

    python train.py
    python train.py --profile tiny
    python train.py --name kl --objective topk-kl            # labels with --logprobs
    python train.py --name more --also labels-rejections     # generate_teacher.py --from-rejections
    python train.py --optimizer adamw8bit --checkpointing --micro-rows 1    # a 24 GB GPU
    torchrun --nproc-per-node 8 train.py                     # FSDP2 over 8 GPUs
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tqdm import tqdm

from artifacts import (
    ArtifactError,
    Profile,
    Stage,
    account,
    load_profile,
    number_between,
    own_command,
    parse_profile_args,
    plain_name,
    positive,
    run_command,
    stage_digest,
)
from checkpoints import run_checkpoint
from losses import Distiller
from model import load_checkpoint
from objectives import mix, needs_top_k, parse_objective
from packing import Example, LabelSet, pack
from parallel import World, join_world, leave_world, shard
from prompts import TOKENIZER_FILES
from qat import attach, attach_scales, save_scales
from runstate import State
from training import (
    compile_blocks,
    evaluate,
    make_optimizer,
    micro_batches,
    schedule,
    train_step,
)


def run_name(text: str) -> str:
    """A plain name; `base` is taken: quantize.py means the undistilled base by it."""
    if text == "base":
        raise argparse.ArgumentTypeError(
            "'base' stands for the undistilled base; take another name"
        )
    return plain_name(text)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--name", type=run_name, default="distilled", help="of the run (default: distilled)"
    )
    add_objective_flags(parser)
    add_schedule_flags(parser)
    add_machine_flags(parser)
    parser.add_argument("--force", action="store_true", help="replace an earlier run")
    return parse_profile_args(
        parser,
        argv,
        epochs=6,
        learning_rate=2e-3,
        row_tokens=512,
        batch_rows=8,
        micro_rows=8,
        save_every=50,
        evaluate_every=50,
        compile=False,
    )


def add_objective_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--objective",
        type=parse_objective,
        default="ce",
        metavar="O",
        help="ce, topk-kl, topk-tv (objectives.py) or a mix: ce=0.5,topk-tv=0.5 (%(default)s)",
    )
    parser.add_argument(
        "--teacher-temperature",
        type=number_between(0.05, 20),
        default=1.0,
        metavar="T",
        help="at which topk-kl and topk-tv take the teacher's distribution; below 1: sharper "
        "(%(default)s)",
    )
    parser.add_argument(
        "--survival",
        action="store_true",
        help="a token that comes after a likely rejection counts less (objectives.py)",
    )
    parser.add_argument(
        "--also",
        type=plain_name,
        nargs="+",
        default=[],
        metavar="LABELS",
        help="more label directories of the workspace, e.g. labels-rejections",
    )
    parser.add_argument(
        "--init", type=plain_name, default="base", metavar="RUN", help="start from (%(default)s)"
    )
    parser.add_argument(
        "--qat",
        type=number_between(0, 1),
        default=0.25,
        metavar="SHARE",
        help="of the steps, the last ones, that train through the packed formats (%(default)s)",
    )
    parser.add_argument(
        "--qat-scales", choices=["absmax", "mse"], default="mse", help="(default: %(default)s)"
    )


def add_schedule_flags(parser: argparse.ArgumentParser) -> None:
    number = {"type": positive, "metavar": "N"}
    parser.add_argument("--seed", type=int, default=0, help="of the data order (default: 0)")
    parser.add_argument(
        "--epochs", default=2, **number, help="passes over the labels (%(default)s)"
    )
    parser.add_argument(
        "--learning-rate",
        type=number_between(0, 1),
        default=1e-5,
        help="peak of the schedule (%(default)s)",
    )
    parser.add_argument(
        "--warmup",
        type=number_between(0, 1),
        default=0.05,
        help="share of steps that warm up (%(default)s)",
    )
    parser.add_argument(
        "--weight-decay", type=number_between(0, 10), default=0.01, help="(%(default)s)"
    )
    parser.add_argument("--row-tokens", default=4096, **number, help="a packed row (%(default)s)")
    parser.add_argument("--batch-rows", default=8, **number, help="rows a step (%(default)s)")
    parser.add_argument("--save-every", default=200, **number, help="steps (%(default)s)")
    parser.add_argument("--evaluate-every", default=200, **number, help="steps (%(default)s)")
    parser.add_argument(
        "--evaluate-records", default=64, **number, help="hold-out labels measured (%(default)s)"
    )


def add_machine_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--micro-rows",
        type=positive,
        default=2,
        metavar="N",
        help="rows a forward pass; gradients accumulate (%(default)s)",
    )
    parser.add_argument(
        "--optimizer",
        choices=["adamw", "adamw8bit"],
        default="adamw",
        help="states in float32, or in 8 bits by bitsandbytes (default: %(default)s)",
    )
    parser.add_argument(
        "--checkpointing",
        action="store_true",
        help="keep no activations inside blocks: less memory, a third more work",
    )
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="on a GPU: fuse kernels by torch.compile; takes a minute at the start",
    )
    parser.add_argument(
        "--tensorboard", action="store_true", help="also write events for TensorBoard, if installed"
    )


def make_plan(lengths: list[int], args: argparse.Namespace) -> list[list[list[int]]]:
    """Every step's rows of example indices, for the whole run: a function of the seed alone."""
    steps = []
    for epoch in range(args.epochs):
        rows = pack(lengths, args.row_tokens, f"{args.seed}/{epoch}")
        steps += [rows[i : i + args.batch_rows] for i in range(0, len(rows), args.batch_rows)]
    return steps


class Run:
    """The training loop over a plan; its parts share this state."""

    def __init__(
        self,
        args: argparse.Namespace,
        profile: Profile,
        world: World,
        state: State,
        train: LabelSet,
        holdout: list[Example],
    ):
        self.args, self.world, self.state = args, world, state
        self.train, self.holdout = train, holdout
        self.plan = make_plan(train.lengths, args)
        self.scheme = profile.architecture["quantization"]
        self.draft_length = profile.architecture["draft_length"]
        self.through_formats = len(self.plan) - round(args.qat * len(self.plan))
        # Compiled kernels want one shape.
        self.width = args.row_tokens if world.kind == "cuda" else None

    def evaluate(self) -> dict[str, float]:
        """The hold-out's figures; nothing where there is none."""
        if not self.holdout:
            return {}
        args = self.args
        return evaluate(
            self.state.distiller,
            self.holdout,
            self.draft_length,
            self.world,
            args.row_tokens,
            args.micro_rows,
            self.width,
        )

    def enter_formats(self) -> None:
        """From here on the forward pass uses the packed values; what drafted best before does not
        count, as it is another model that will be served."""
        model = self.state.distiller.model
        try:
            self.state.scales = attach(model, self.scheme, self.args.qat_scales)
        except ValueError as error:
            raise ArtifactError(f"--qat: {error}; train with --qat 0") from None
        self.state.best = None

    def steps(self, first: int) -> Iterator[dict]:
        """One dict of figures a step, from `first` on."""
        args, state, plan = self.args, self.state, self.plan
        if state.scales is not None:
            attach_scales(state.distiller.model, self.scheme, state.scales)
        for step in range(first, len(plan)):
            if step == self.through_formats:
                self.enter_formats()
            for group in state.optimizer.param_groups:
                group["lr"] = args.learning_rate * schedule(step, len(plan), args.warmup)
            rows = [[self.train[i] for i in row] for row in plan[step]]
            batches = micro_batches(rows, self.world, args.micro_rows, self.width)
            result = {"step": step + 1, "learning_rate": state.optimizer.param_groups[0]["lr"]}
            result |= train_step(state.distiller, state.optimizer, batches, self.world)
            result["tokens"] = sum(self.train.lengths[i] for row in plan[step] for i in row)
            last = step + 1 == len(plan)
            if last or (step + 1) % args.evaluate_every == 0 or step + 1 == self.through_formats:
                result |= self.evaluate()
                state.keep_if_best(step + 1, result.get("holdout_accepted", step + 1))
            yield result
            if last or (step + 1) % args.save_every == 0:
                state.save(step + 1)

    def run(self) -> dict:
        """All steps; returns the run's figures."""
        first = self.state.restore()
        began, tokens, total = time.monotonic(), 0, len(self.plan)
        with (
            open(self.state.metrics if self.world.first else os.devnull, "a") as metrics,
            event_writer(self.args, self.state.metrics.parent, self.world) as events,
            tqdm(
                total=total, initial=first, unit="step", desc="train", disable=not self.world.first
            ) as progress,
        ):
            for result in self.steps(first):
                metrics.write(json.dumps(result) + "\n")
                metrics.flush()
                events(result)
                tokens += result["tokens"]
                progress.set_postfix(loss=f"{result['loss']:.3f}")
                progress.update()
        seconds = max(time.monotonic() - began, 1e-9)
        return {
            "steps": total,
            "through_formats": len(self.plan) - self.through_formats,
            "best": self.state.best,
            "tokens_per_second": round(tokens / seconds, 1),
            "peak_memory_bytes": peak_memory(self.world),
        }


def peak_memory(world: World) -> int | None:
    return torch.cuda.max_memory_allocated() if world.kind == "cuda" else None


@contextlib.contextmanager
def event_writer(
    args: argparse.Namespace, directory: Path, world: World
) -> Iterator[Callable[[dict], None]]:
    """Gives what takes a step's figures to TensorBoard, or to nowhere."""
    if not args.tensorboard or not world.first:
        yield lambda result: None
        return
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ArtifactError("--tensorboard: pip install tensorboard, or leave it out") from None
    # Beside the run's directory: event files carry times, which no artefact should.
    with SummaryWriter(directory.with_name(f"{args.name}.events")) as writer:

        def write(result: dict) -> None:
            for name, value in result.items():
                if name != "step":
                    writer.add_scalar(name, value, result["step"])

        yield write


def write_checkpoint(state: State, base: Path, directory: Path) -> None:
    """The best bf16 weights beside the base's own config and tokenizer files, and the scales of the
    formats that they were trained through."""
    directory.mkdir(exist_ok=True)
    tensors = load_file(state.best_path)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    if state.scales is not None:
        save_scales(state.scales, directory)
    for name in ("config.json", "generation_config.json", *TOKENIZER_FILES):
        if (base / name).is_file():
            shutil.copyfile(base / name, directory / name)


def plot_losses(metrics: Path, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    held = [row for row in rows if "holdout_loss" in row]
    figure, axes = plt.subplots(figsize=(7, 4))
    axes.plot([r["step"] for r in rows], [r["loss"] for r in rows], label="train")
    axes.plot([r["step"] for r in held], [r["holdout_loss"] for r in held], "o-", label="hold-out")
    axes.set(xlabel="step", ylabel="cross-entropy (nats a token)", yscale="log")
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)


def stage_arguments(args: argparse.Namespace, world: World) -> dict:
    """Flags that can change the result."""
    neutral = ("profile", "force", "name", "save_every", "tensorboard")
    flags = {name: value for name, value in vars(args).items() if name not in neutral}
    return flags | {"device": world.kind, "processes": world.size}


def make_stage(args: argparse.Namespace, profile: Profile, world: World, source: str) -> Stage:
    labels = profile.command("generate_teacher")
    inputs = {
        "models/base" if args.init == "base" else f"runs/{args.init}": source,
        "labels": stage_digest(profile.workspace / "labels", labels),
    }
    for name in args.also:
        made_by = f"{labels} --from-rejections"
        inputs[name] = stage_digest(profile.workspace / name, made_by)
    return Stage(
        name="train",
        directory=profile.workspace / "runs" / args.name,
        command=own_command(),
        arguments=stage_arguments(args, world),
        inputs=inputs,
    )


def check_machine(args: argparse.Namespace, world: World) -> None:
    if args.optimizer == "adamw8bit" and world.size > 1:
        raise ArtifactError(
            "--optimizer adamw8bit is for one process; sharded, AdamW's states are small: "
            "--optimizer adamw"
        )


def make_state(
    args: argparse.Namespace, world: World, checkpoint: Path, directory: Path, draft_length: int
) -> State:
    model = load_checkpoint(checkpoint, torch.float32, world.device)
    model.recompute = args.checkpointing
    survival = draft_length if args.survival else None
    distiller = Distiller(model, mix(args.objective, args.teacher_temperature), survival)
    shard(distiller, world)
    if args.compile and world.kind == "cuda":
        compile_blocks(model)
    optimizer = make_optimizer(distiller, args.optimizer, args.learning_rate, args.weight_decay)
    return State(directory, world, distiller, optimizer)


def run_in(args: argparse.Namespace, world: World) -> None:
    profile = load_profile(args.profile)
    check_machine(args, world)
    checkpoint, source, _ = run_checkpoint(profile, args.init)
    stage = make_stage(args, profile, world, source)
    if world.from_first(stage.is_done(args.force) if world.first else None):
        return
    directories = [profile.workspace / name for name in ("labels", *args.also)]
    train = LabelSet(directories, "train", args.row_tokens, needs_top_k(args.objective))
    if not len(train):
        raise ArtifactError(f"no label fits into --row-tokens {args.row_tokens}")
    rows = account(train.total, len(train), {"prompt_fills_the_row": train.total - len(train)})
    held = LabelSet(directories[:1], "holdout", args.row_tokens)
    holdout = [held[i] for i in range(min(args.evaluate_records, len(held)))]
    # Rank 0 holds the directory's lock; the others begin when it is there.
    working = stage.working_directory(resume=True, force=args.force)
    with working if world.first else contextlib.nullcontext(stage.partial) as directory:
        world.from_first(None)
        length = profile.architecture["draft_length"]
        state = make_state(args, world, checkpoint, directory, length)
        run = Run(args, profile, world, state, train, holdout)
        before = run.evaluate()
        figures = run.run()
        after = run.evaluate()
        if world.first:
            base = profile.workspace / "models" / "base"
            write_checkpoint(state, base, directory / "checkpoint")
            plot_losses(state.metrics, directory / "loss.png")
            stage.finish(rows=rows, results=figures | {"before": before, "after": after})
            print(f"  {figures}; hold-out before {before}, after {after}")


def main(args: argparse.Namespace) -> None:
    world = join_world()
    try:
        run_in(args, world)
    finally:
        leave_world(world)


if __name__ == "__main__":
    sys.exit(run_command(main, parse_args))
