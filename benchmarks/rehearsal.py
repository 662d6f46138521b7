"""A rehearsal of the whole chain with a pair that can be made in minutes, and the ablation on it.

The real weights can't be had everywhere; this makes a pair of its own with the real tokenizer: a
teacher of 8 layers × 512 and a base of 4 × 256, pre-trained on one half of GSM8K's train rows, of
the Python standard library and of this repository's bug repairs. The other half becomes prompts;
the pipeline's own stages label, distil and export. Every objective is trained from the same base
on the same labels, and measured on the same held-out prompts, in bf16 and exported. Texts and
weights stay in --out; only the figures are kept.

    python benchmarks/rehearsal.py pair --tokenizer DIR --gsm8k gsm8k_train.jsonl --out work
    python benchmarks/rehearsal.py ablation --out work --result benchmarks/rehearsal.json

DIR holds Qwen3's tokenizer.json and tokenizer_config.json. `--small` is a trial on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import bugs  # noqa: E402
from acceptance import Counts, accepted_length, accepted_ratio, simulate  # noqa: E402
from artifacts import load_profile, read_json, versions, write_json  # noqa: E402
from formats import Export  # noqa: E402
from losses import Distiller  # noqa: E402
from model import Qwen3, load_checkpoint  # noqa: E402
from objectives import cross_entropy  # noqa: E402
from packing import Example, LabelSet, collate, pack  # noqa: E402
from parallel import World  # noqa: E402
from profile_files import source_entry, write_architecture, write_manifest  # noqa: E402
from prompts import load_tokenizer, prompt_token_ids  # noqa: E402
from training import compile_blocks, make_optimizer, schedule, train_step  # noqa: E402

EOS = [151645, 151643]  # <|im_end|>, <|endoftext|>
ROW_TOKENS = 1024
DRAFT_LENGTH = 16
SHAPES = {
    "teacher": {
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
    "base": {
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("step", choices=["pair", "ablation"])
    parser.add_argument("--out", type=Path, required=True, help="directory for all that is made")
    parser.add_argument("--tokenizer", type=Path, help="pair: directory of Qwen3's tokenizer files")
    parser.add_argument("--gsm8k", type=Path, help="pair: GSM8K's train rows, JSONL")
    parser.add_argument("--result", type=Path, help="ablation: JSON file to keep the figures in")
    parser.add_argument("--teacher-steps", type=int, default=900, help="(%(default)s)")
    parser.add_argument("--base-steps", type=int, default=300, help="(%(default)s)")
    parser.add_argument("--batch-rows", type=int, default=64, help="rows a step (%(default)s)")
    parser.add_argument("--epochs", type=int, default=3, help="of each distillation (%(default)s)")
    parser.add_argument("--at-once", type=int, default=3, help="trainings side by side")
    parser.add_argument("--small", action="store_true", help="a trial: little text, few steps")
    return parser.parse_args(argv)


# ----------------------------------------------------------------------------------------- text


def python_windows(rng: random.Random, limit: int) -> list[tuple[str, str]]:
    """(request with the first lines, the lines that follow) from the standard library."""
    library = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"test", "tests", "idlelib", "site-packages", "dist-packages", "lib2to3"}
    found = []
    for path in sorted(library.rglob("*.py")):
        if skipped & set(path.relative_to(library).parts):
            continue
        lines = path.read_text(errors="replace").splitlines()
        for start in range(0, len(lines) - 30, 36):
            head = "\n".join(lines[start : start + 20])
            tail = "\n".join(lines[start + 20 : start + 36])
            if len(head) > 200 and tail.strip():
                request = f"Continue this Python module.\n\n```python\n{head}\n```"
                found.append((request, f"```python\n{tail}\n```"))
    rng.shuffle(found)
    return found[:limit]


def all_text(args: argparse.Namespace) -> dict[str, list[tuple[str, str]]]:
    """(request, answer) by source, shuffled by a fixed seed."""
    rng = random.Random("rehearsal")
    rows = [json.loads(line) for line in args.gsm8k.read_text().splitlines()]
    problems = bugs.bug_repairs(77, 120 if args.small else 2000)
    text = {
        "gsm8k": [(row["question"], row["answer"]) for row in rows],
        "python": python_windows(rng, 8000),
        "bugs": [(bugs.to_messages(p, rng)[0]["content"], bugs.answer(p)) for p in problems],
    }
    for pairs in text.values():
        rng.shuffle(pairs)
    return {name: pairs[:160] if args.small else pairs for name, pairs in text.items()}


def documents(profile: Path, pairs: list[tuple[str, str]]) -> list[Example]:
    """Whole conversations as training sequences: every token is learnt, the end included."""
    tokenizer = load_tokenizer(profile / "base")
    found = []
    for request, answer in pairs:
        ids = prompt_token_ids(tokenizer, [{"role": "user", "content": request}], False)
        ids = [*ids, *tokenizer(answer, add_special_tokens=False)["input_ids"], EOS[0]]
        ids = ids[: ROW_TOKENS + 1]
        found.append(Example(ids[:-1], ids[1:]))
    return found


# ----------------------------------------------------------------------------------------- pair


def fresh_model(profile: Path, which: str) -> Qwen3:
    """A random model of the shape, its config.json and tokenizer files written to the profile."""
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=151936,
        head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        initializer_range=0.02,
        **SHAPES[which],
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig()
    model.bfloat16().save_pretrained(profile / which)
    return load_checkpoint(profile / which, torch.float32, device())


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def batches(examples: list[Example], rows: int, steps: int, seed: str) -> Iterator[list]:
    """`steps` lists of micro-batches, going over the examples as often as needed."""
    epoch, packed = 0, []
    for _ in range(steps):
        while len(packed) < rows:
            lengths = [len(e.token_ids) for e in examples]
            packed += pack(lengths, ROW_TOKENS, f"{seed}/{epoch}")
            epoch += 1
        chosen, packed = packed[:rows], packed[rows:]
        width = ROW_TOKENS if torch.cuda.is_available() else None
        micro = 16
        yield [
            collate([[examples[i] for i in row] for row in chosen[at : at + micro]], width=width)
            for at in range(0, rows, micro)
        ]


def pretrain(profile: Path, which: str, examples: list[Example], args: argparse.Namespace) -> None:
    from safetensors.torch import save_file

    steps = args.teacher_steps if which == "teacher" else args.base_steps
    if args.small:
        steps = 4
    model = fresh_model(profile, which)
    world = World(0, 1, device())
    if world.kind == "cuda":
        compile_blocks(model)
    distiller = Distiller(model, cross_entropy)
    optimizer = make_optimizer(distiller, "adamw", 1.5e-3, 0.05)
    began = time.monotonic()
    for step, group in enumerate(batches(examples, args.batch_rows, steps, which)):
        for parameters in optimizer.param_groups:
            parameters["lr"] = 1.5e-3 * schedule(step, steps, 0.05)
        result = train_step(distiller, optimizer, group, world)
        if step % 100 == 0 or step + 1 == steps:
            print(f"{which} {step + 1}/{steps}: {result['loss']:.3f}", flush=True)
    tensors = {n: p.detach().to("cpu", torch.bfloat16) for n, p in model.named_parameters()}
    save_file(tensors, profile / which / "model.safetensors", metadata={"format": "pt"})
    print(f"{which}: {time.monotonic() - began:.0f} s", flush=True)


def make_pair(args: argparse.Namespace) -> None:
    """profile/: two trained models, and the prompts of the other half of the text."""
    profile = args.out / "rehearsal"
    shutil.rmtree(profile, ignore_errors=True)
    for which in SHAPES:
        (profile / which).mkdir(parents=True)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(args.tokenizer / name, profile / which / name)
    text = all_text(args)
    halves = {name: (p[: len(p) // 2], p[len(p) // 2 :]) for name, p in text.items()}
    examples = documents(profile, [pair for first, _ in halves.values() for pair in first])
    tokens = sum(len(e.token_ids) for e in examples)
    print(f"pre-training text: {len(examples)} documents, {tokens} tokens", flush=True)
    for which in SHAPES:
        pretrain(profile, which, examples, args)
    config = json.loads((profile / "base" / "config.json").read_text())
    write_architecture(profile, config, EOS)
    write_manifest(
        profile, sources(profile, {name: second for name, (_, second) in halves.items()})
    )


def sources(profile: Path, pairs: dict[str, list[tuple[str, str]]]) -> list[dict]:
    """The prompts as parquet in the schemas of the real data sets."""

    def chats(name: str) -> list[dict]:
        return [
            {
                "id": f"{name}-{number}",
                "prompt": request,
                "messages": [
                    {"role": "user", "content": request},
                    {"role": "assistant", "content": answer},
                ],
            }
            for number, (request, answer) in enumerate(pairs[name])
        ]

    questions = [{"question": q, "answer": a} for q, a in pairs["gsm8k"]]
    following = [row | {"constraints": []} for row in chats("bugs")]
    return [
        source_entry(profile, "gsm8k", questions),
        source_entry(profile, "personas_code", chats("python")),
        source_entry(profile, "personas_instruction_following", following, "extended"),
    ]


# ------------------------------------------------------------------------------------- ablation


class Chain:
    """Runs the repository's stages on the rehearsal profile."""

    def __init__(self, args: argparse.Namespace):
        self.profile = args.out / "rehearsal"
        self.environment = os.environ | {
            "WORKSPACE": str((args.out / "workspace").resolve()),
            "TQDM_MININTERVAL": "20",
            "HF_HUB_OFFLINE": "1",
        }
        os.environ["WORKSPACE"] = self.environment["WORKSPACE"]
        self.logs = args.out / "logs"
        self.logs.mkdir(exist_ok=True)

    def start(self, stage: str, *flags: str) -> tuple[subprocess.Popen, Path]:
        log = self.logs / f"{stage}-{len(list(self.logs.iterdir()))}.log"
        command = [sys.executable, str(ROOT / f"{stage}.py"), "--profile", str(self.profile)]
        with open(log, "w") as file:
            process = subprocess.Popen(
                [*command, *flags], stdout=file, stderr=subprocess.STDOUT, env=self.environment
            )
        return process, log

    def run(self, stage: str, *flags: str) -> float:
        """Seconds of one stage; its log's end is shown where it fails."""
        (seconds,) = self.run_all([(stage, *flags)], 1)
        return seconds

    def run_all(self, commands: list[tuple[str, ...]], at_once: int) -> list[float]:
        """Seconds of each command, up to `at_once` side by side."""
        seconds, waiting, running = [0.0] * len(commands), list(enumerate(commands)), {}
        while waiting or running:
            while waiting and len(running) < at_once:
                number, command = waiting.pop(0)
                running[number] = (*self.start(*command), time.monotonic(), command)
            time.sleep(0.1)
            for number, (process, log, began, command) in list(running.items()):
                if process.poll() is None:
                    continue
                seconds[number] = time.monotonic() - began
                del running[number]
                if process.returncode:
                    tail = log.read_text(errors="replace")[-1500:]
                    raise SystemExit(f"{' '.join(command)} failed:\n{tail}")
                print(f"  {' '.join(command)}: {seconds[number]:.0f} s", flush=True)
        return seconds


def first_variants(epochs: int) -> dict[str, list[str]]:
    """train.py's flags of the runs that start from the base, without the packed formats."""
    common = ["--epochs", str(epochs), "--qat", "0"]
    longer = ["--epochs", str(2 * epochs), "--qat", "0"]
    return {
        "ce": ["--objective", "ce", *common],
        "topk-kl": ["--objective", "topk-kl", *common],
        "topk-tv": ["--objective", "topk-tv", *common],
        "mix": ["--objective", "ce=0.3,topk-kl=0.4,topk-tv=0.3", *common],
        "sharp-kl": ["--objective", "topk-kl", "--teacher-temperature", "0.5", *common],
        "ce-longer": ["--objective", "ce", *longer],
        "topk-kl-longer": ["--objective", "topk-kl", *longer],
    }


def shared_flags(args: argparse.Namespace) -> list[str]:
    if args.small:
        return ["--row-tokens", "512", "--batch-rows", "4", "--micro-rows", "4"]
    sizes = ["--row-tokens", "1024", "--batch-rows", "16", "--micro-rows", "16"]
    return [*sizes, "--learning-rate", "1e-3", "--evaluate-every", "1000", "--save-every", "100000"]


def ablation(args: argparse.Namespace) -> dict:
    chain, shared = Chain(args), shared_flags(args)
    for stage in ("download_models", "prepare_data"):
        chain.run(stage)
    chain.run("prepare_extended", "--bug-repairs", "20" if args.small else "1000")
    label = ["--logprobs", "20", "--batch-size", "512" if torch.cuda.is_available() else "64"]
    if args.small:
        label += ["--limit", "60", "--max-output-tokens", "24"]
    chain.run("generate_teacher", *label)
    variants = first_variants(args.epochs)
    names = list(variants)
    commands = [("train", "--name", name, *variants[name], *shared) for name in names]
    cost = dict(zip(names, chain.run_all(commands, args.at_once), strict=True))
    figures = measure(chain, ["base", *names], args.at_once)
    keep(args, report(chain, variants, figures, cost))
    best = max(names, key=lambda name: figures[name]["bf16"].mean())
    print(f"best so far: {best}", flush=True)

    chain.run("generate_teacher", *label, "--from-rejections", best)
    more = variants[best][: -len(["--qat", "0"])]
    also = ["--also", "labels-rejections"]
    later = {
        "survival": [*more, "--qat", "0", "--survival"],
        "ce-then-tv": ["--init", "ce", "--objective", "topk-tv", "--epochs", "1", "--qat", "0"],
        "on-policy": [*more, "--qat", "0", *also],
        "on-policy+qat": [*more, "--qat", "0.3", *also],
        "qat": [*more, "--qat", "0.3"],
        "ce+qat": ["--objective", "ce", "--epochs", str(args.epochs), "--qat", "0.3"],
    }
    commands = [("train", "--name", plain(name), *later[name], *shared) for name in later]
    cost |= dict(zip(later, chain.run_all(commands, args.at_once), strict=True))
    figures |= measure(chain, list(later), args.at_once)
    return report(chain, variants | later, figures, cost)


def plain(name: str) -> str:
    """A variant's name as that of a run."""
    return name.replace("+", "-")


def measure(chain: Chain, names: list[str], at_once: int) -> dict[str, dict]:
    """Accepted lengths of runs on all held-out prompts: their bf16 weights, and exported."""
    workspace = load_profile(str(chain.profile)).workspace
    held = list(LabelSet([workspace / "labels"], "holdout", ROW_TOKENS))
    checkpoints = {name: workspace / "runs" / plain(name) / "checkpoint" for name in names}
    if "base" in names:
        checkpoints["base"] = workspace / "models" / "base"
    kinds = {name: scale_methods(name, path) for name, path in checkpoints.items()}
    commands = [
        ("quantize", "--run", plain(n), "--scales", m, "--out", f"export-{plain(n)}-{m}")
        for n, methods in kinds.items()
        for m in methods
    ]
    chain.run_all(commands, 2 * at_once)
    found = {}
    for name, path in checkpoints.items():
        exact = load_checkpoint(path, torch.float32, device())
        found[name] = {"bf16": simulate(exact, held, DRAFT_LENGTH, device())}
        for method in kinds[name]:
            export = Export(workspace / f"export-{plain(name)}-{method}")
            packed = export.load(torch.float32, device())
            found[name][method] = simulate(packed, held, DRAFT_LENGTH, device())
    return found


def scale_methods(name: str, checkpoint: Path) -> list[str]:
    """Ways of choosing scales that are compared on a run."""
    if (checkpoint / "scales.safetensors").is_file():
        return ["trained"]
    return ["absmax", "mse", "calibrated"] if name in ("base", "ce", "topk-kl") else ["mse"]


def report(
    chain: Chain, flags: dict[str, list[str]], figures: dict[str, dict], cost: dict[str, float]
) -> dict:
    """The table, printed and returned."""
    rows = []
    reference: Counts = figures["ce"]["bf16"]
    print(
        f"\n{'run':16}{'kind':12}{'accepted a round':>22}{'over ce':>24}{'kept':>8}{'train s':>9}"
    )
    for name, kinds in figures.items():
        for kind, counts in kinds.items():
            length, ratio = accepted_length(counts), accepted_ratio(counts, reference)
            kept = counts.mean() / max(kinds["bf16"].mean(), 1e-9)
            rows.append(
                {
                    "run": name,
                    "kind": kind,
                    "flags": flags.get(name),
                    "accepted": length._asdict(),
                    "over_ce": ratio._asdict(),
                    "of_its_bf16": kept,
                    "train_seconds": cost.get(name),
                    "prompts": len(np.atleast_1d(counts.rounds)),
                }
            )
            print(
                f"{name:16}{kind:12}{length.value:8.3f} [{length.low:.2f}, {length.high:.2f}]"
                f"{ratio.value:10.3f} [{ratio.low:.3f}, {ratio.high:.3f}]{kept:8.3f}"
                f"{cost.get(name, 0):9.0f}"
            )
    labels = read_json(load_profile(str(chain.profile)).workspace / "labels" / "stage.json", "")
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "command": " ".join(["python", *sys.argv]),
        "labels": labels["rows"],
        "rows": rows,
        "versions": versions(),
    }


def keep(args: argparse.Namespace, result: dict) -> None:
    """Write the figures so far: a later step that fails does not take them along."""
    if args.result:
        write_json(args.result, result)


def main(args: argparse.Namespace) -> None:
    args.out.mkdir(parents=True, exist_ok=True)
    if args.step == "pair":
        if not args.tokenizer or not args.gsm8k:
            raise SystemExit("pair needs --tokenizer and --gsm8k")
        return make_pair(args)
    result = ablation(args)
    keep(args, result)
    print(json.dumps({row["run"] + "/" + row["kind"]: row["accepted"] for row in result["rows"]}))


if __name__ == "__main__":
    main(parse_args())
