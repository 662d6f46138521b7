"""Stage 5: distil the base on the teacher's greedy labels.

Reads models/base and labels; writes workspace/<profile>/runs/<name>/: checkpoint/ (a Hugging Face
directory, bf16), metrics.jsonl and loss.png. Only label positions carry loss; sequences are packed
and don't see each other. An interrupted run goes on from its last saved step and ends with the
same bytes as an undisturbed one on the same machine.

    python train.py
    python train.py --profile tiny
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from tqdm import tqdm

from artifacts import (
    ArtifactError,
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
from losses import Batch, Example, collate, make_example, pack, sequence_loss
from model import Qwen3, load_checkpoint
from prompts import TOKENIZER_FILES
from records import read_labels


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
    parser.add_argument("--seed", type=int, default=0, help="of the data order (default: 0)")
    number = {"type": positive, "metavar": "N"}
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
    parser.add_argument(
        "--micro-rows",
        default=1,
        **number,
        help="rows a forward pass; gradients accumulate (%(default)s)",
    )
    parser.add_argument("--save-every", default=200, **number, help="steps (%(default)s)")
    parser.add_argument("--evaluate-every", default=200, **number, help="steps (%(default)s)")
    parser.add_argument(
        "--evaluate-records", default=64, **number, help="hold-out labels measured (%(default)s)"
    )
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
    )


def load_examples(labels: Path, split: str, row_tokens: int) -> tuple[list[Example], dict]:
    """A split's labels as training sequences, and the account of every record."""
    records = read_labels(labels, split, ["prompt_token_ids", "output_token_ids"])
    made = [make_example(r["prompt_token_ids"], r["output_token_ids"], row_tokens) for r in records]
    kept = [example for example in made if example is not None]
    return kept, account(len(made), len(kept), {"prompt_fills_the_row": len(made) - len(kept)})


def make_plan(examples: list[Example], args: argparse.Namespace) -> list[list[list[int]]]:
    """Every step's rows of example indices, for the whole run: a function of the seed alone."""
    lengths = [len(example.token_ids) for example in examples]
    steps = []
    for epoch in range(args.epochs):
        rows = pack(lengths, args.row_tokens, f"{args.seed}/{epoch}")
        steps += [rows[i : i + args.batch_rows] for i in range(0, len(rows), args.batch_rows)]
    return steps


def schedule(step: int, steps: int, warmup: float) -> float:
    """Factor on the learning rate: linear warm-up, then a cosine down to a tenth."""
    rising = max(1, round(steps * warmup))
    if step < rising:
        return (step + 1) / rising
    progress = (step - rising) / max(1, steps - rising)
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress))


def make_optimizer(model: Qwen3, args: argparse.Namespace) -> torch.optim.AdamW:
    """AdamW (arXiv:1711.05101); norms are not decayed."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    norms = [p for p in model.parameters() if p.ndim == 1]
    groups = [
        {"params": matrices, "weight_decay": args.weight_decay},
        {"params": norms, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=args.learning_rate, betas=(0.9, 0.95))


def autocast(device: str) -> torch.autocast:
    """bf16 products on a GPU around float32 master weights; float32 on a CPU."""
    return torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda")


def train_step(
    model: Qwen3, optimizer: torch.optim.Optimizer, batches: list[Batch], device: str
) -> dict[str, float]:
    """One update over all micro-batches, normalised by their label positions together."""
    positions = sum(int((b.targets != -100).sum()) for b in batches)
    total = correct = 0.0
    for batch in batches:
        with autocast(device):
            loss = sequence_loss(model, Batch(*(t.to(device) for t in batch)))
        (loss.total / positions).backward()
        total, correct = total + loss.total.item(), correct + loss.correct.item()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return {
        "loss": total / positions,
        "accuracy": correct / positions,
        "gradient_norm": norm.item(),
        "label_tokens": positions,
    }


@torch.inference_mode()
def evaluate(model: Qwen3, examples: list[Example], device: str) -> dict[str, float]:
    """Teacher-forced loss and top-1 agreement with the teacher on the hold-out."""
    total = correct = positions = 0
    for start in range(0, len(examples), 16):
        batch = collate([[example] for example in examples[start : start + 16]], device)
        with autocast(device):
            loss = sequence_loss(model, batch)
        total, correct = total + loss.total.item(), correct + loss.correct.item()
        positions += loss.positions
    return {"holdout_loss": total / positions, "holdout_accuracy": correct / positions}


class State:
    """What a run needs to go on: one file, replaced whole; metrics are cut back to match it."""

    def __init__(self, directory: Path, model: Qwen3, optimizer: torch.optim.Optimizer):
        self.path, self.metrics = directory / "state.pt", directory / "metrics.jsonl"
        self.model, self.optimizer = model, optimizer

    def save(self, step: int) -> None:
        partial = self.path.with_suffix(".tmp")
        torch.save(
            {
                "step": step,
                "metrics_bytes": self.metrics.stat().st_size if self.metrics.exists() else 0,
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
            },
            partial,
        )
        with open(partial, "rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, self.path)

    def restore(self) -> int:
        """The step to go on with: 0 where nothing was saved."""
        if not self.path.is_file():
            self.metrics.unlink(missing_ok=True)
            return 0
        try:
            saved = torch.load(self.path, map_location="cpu", weights_only=True)
        except Exception as error:  # a damaged file raises whatever its parser stumbles over
            raise ArtifactError(
                f"{self.path} is damaged ({type(error).__name__}): remove it, and the same command "
                "starts over"
            ) from None
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        os.truncate(self.metrics, saved["metrics_bytes"])
        print(f"train: going on from step {saved['step']}")
        return saved["step"]


def run_steps(
    args: argparse.Namespace,
    model: Qwen3,
    examples: list[Example],
    holdout: list[Example],
    state: State,
    device: str,
) -> dict:
    """The training loop, from the last saved step on; returns the run's figures."""
    plan = make_plan(examples, args)
    optimizer, first = state.optimizer, state.restore()
    micro = args.micro_rows
    began, tokens = time.monotonic(), 0
    with (
        open(state.metrics, "a") as metrics,
        tqdm(total=len(plan), initial=first, unit="step", desc="train") as progress,
    ):
        for step in range(first, len(plan)):
            for group in optimizer.param_groups:
                group["lr"] = args.learning_rate * schedule(step, len(plan), args.warmup)
            rows = [[examples[i] for i in row] for row in plan[step]]
            batches = [collate(rows[i : i + micro]) for i in range(0, len(rows), micro)]
            result = {"step": step + 1, "learning_rate": optimizer.param_groups[0]["lr"]}
            result |= train_step(model, optimizer, batches, device)
            last = step + 1 == len(plan)
            if holdout and (last or (step + 1) % args.evaluate_every == 0):
                result |= evaluate(model, holdout, device)
            metrics.write(json.dumps(result) + "\n")
            metrics.flush()
            tokens += sum(int((b.segments >= 0).sum()) for b in batches)
            progress.set_postfix(loss=f"{result['loss']:.3f}")
            progress.update()
            if last or (step + 1) % args.save_every == 0:
                state.save(step + 1)
    seconds = time.monotonic() - began
    return {"steps": len(plan), "tokens_per_second": round(tokens / max(seconds, 1e-9), 1)}


def save_checkpoint(model: Qwen3, base: Path, directory: Path) -> None:
    """bf16 weights beside the base's own config and tokenizer files."""
    directory.mkdir(exist_ok=True)
    tensors = {n: p.detach().to("cpu", torch.bfloat16) for n, p in model.named_parameters()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
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


def stage_arguments(args: argparse.Namespace) -> dict:
    """Flags that can change the result."""
    neutral = ("profile", "force", "name", "save_every")
    return {name: value for name, value in vars(args).items() if name not in neutral}


def main(args: argparse.Namespace) -> None:
    profile = load_profile(args.profile)
    base, labels = profile.workspace / "models" / "base", profile.workspace / "labels"
    device = "cuda" if torch.cuda.is_available() else "cpu"
    stage = Stage(
        name="train",
        directory=profile.workspace / "runs" / args.name,
        command=own_command(),
        arguments=stage_arguments(args) | {"device": device},
        inputs={
            "models/base": stage_digest(base, profile.command("download_models")),
            "labels": stage_digest(labels, profile.command("generate_teacher")),
        },
    )
    if stage.is_done(args.force):
        return
    examples, rows = load_examples(labels, "train", args.row_tokens)
    if not examples:
        raise ArtifactError(f"no label fits into --row-tokens {args.row_tokens}")
    holdout = load_examples(labels, "holdout", args.row_tokens)[0][: args.evaluate_records]
    model = load_checkpoint(base, torch.float32, device)
    with stage.working_directory(resume=True, force=args.force) as directory:
        before = evaluate(model, holdout, device) if holdout else {}
        state = State(directory, model, make_optimizer(model, args))
        figures = run_steps(args, model, examples, holdout, state, device)
        after = evaluate(model, holdout, device) if holdout else {}
        save_checkpoint(model, base, directory / "checkpoint")
        plot_losses(state.metrics, directory / "loss.png")
        stage.finish(rows=rows, results=figures | {"before": before, "after": after})
    print(f"  {figures}; hold-out before {before}, after {after}")


if __name__ == "__main__":
    sys.exit(run_command(main, parse_args))
