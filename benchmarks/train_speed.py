"""How fast and in how much memory train.py's step runs at the true shape, on one GPU.

Random weights of the profile's shape, packed rows of random labels (several sequences a row), and
exactly the step that train.py repeats. Prints tokens/s, the share of the GPU's peak that the
model's own operations take (PaLM's count: recomputing does not count), and the peak memory.

    python benchmarks/train_speed.py --result benchmarks/train_speed.json
    python benchmarks/train_speed.py --only full --steps 3 --profile-steps
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from artifacts import load_profile, versions, write_json  # noqa: E402
from losses import Distiller  # noqa: E402
from model import Config, Qwen3, empty_model  # noqa: E402
from objectives import mix  # noqa: E402
from packing import IGNORE, Batch, Example, collate  # noqa: E402
from parallel import World  # noqa: E402
from qat import attach  # noqa: E402
from training import compile_blocks, make_optimizer, model_flops, train_step  # noqa: E402

# Dense bf16, as the data sheets state it.
PEAK_FLOPS = {"NVIDIA H200": 989.5e12, "NVIDIA H100 80GB HBM3": 989.5e12}
ROW_TOKENS = 4096
SEQUENCES = 6  # a row: prompts and answers of about 700 tokens

LARGE = {"optimizer": "adamw", "recompute": False, "rows_a_pass": 2}
SMALL = {"optimizer": "adamw8bit", "recompute": True, "rows_a_pass": 1}
SETUPS = {
    "full": LARGE | {"qat": False, "objective": "ce"},
    "topk-kl": LARGE | {"qat": False, "objective": "topk-kl"},
    "formats": LARGE | {"qat": True, "objective": "topk-kl"},
    "small-gpu": SMALL | {"qat": False, "objective": "ce"},
}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--profile", default="qwen3", help="whose shape (default: %(default)s)")
    parser.add_argument("--only", choices=list(SETUPS), nargs="+", default=list(SETUPS))
    parser.add_argument("--rows", type=int, default=8, help="a step (%(default)s)")
    parser.add_argument("--steps", type=int, default=6, help="timed ones (%(default)s)")
    parser.add_argument("--profile-steps", action="store_true", help="print the costliest kernels")
    parser.add_argument("--result", type=Path, help="JSON file to keep the figures in")
    return parser.parse_args(argv)


def random_model(config: Config, device: str) -> Qwen3:
    model = empty_model(config).to_empty(device=device)
    generator = torch.Generator(device).manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data.fill_(1.0)
        else:
            parameter.data.normal_(std=0.02, generator=generator)
    return model


def random_row(rng: np.random.Generator, vocabulary: int, top_k: int) -> list[Example]:
    """Sequences that fill a row; two thirds of each carry loss."""
    cuts = np.sort(rng.choice(np.arange(64, ROW_TOKENS - 64), SEQUENCES - 1, replace=False))
    examples = []
    for length in np.diff([0, *cuts, ROW_TOKENS]):
        ids = rng.integers(0, vocabulary, length + 1)
        prompt = length // 3
        targets = np.concatenate((np.full(prompt, IGNORE), ids[1 + prompt :]))
        top_ids = rng.integers(0, vocabulary, (length - prompt, top_k))
        logprobs = -np.sort(rng.uniform(1, 12, (length - prompt, top_k))).astype(np.float32) - 3
        examples.append(Example(ids[:-1], targets, top_ids, logprobs))
    return examples


def measure(args: argparse.Namespace, name: str, config: Config, scheme: dict) -> dict:
    """Medians over the timed steps of one setup."""
    setup, world = SETUPS[name], World(0, 1, "cuda" if torch.cuda.is_available() else "cpu")
    model = random_model(config, world.device)
    model.recompute = setup["recompute"]
    if world.kind == "cuda":
        compile_blocks(model)
        torch.cuda.reset_peak_memory_stats()
    if setup["qat"]:
        attach(model, scheme, "absmax")
    distiller = Distiller(model, mix({setup["objective"]: 1.0}))
    optimizer = make_optimizer(distiller, setup["optimizer"], 1e-5, 0.01)
    rng = np.random.default_rng(0)

    def batches() -> list[Batch]:
        rows = [random_row(rng, config.vocab_size, 8) for _ in range(args.rows)]
        at_once = setup["rows_a_pass"]
        parts = range(0, args.rows, at_once)
        return [collate(rows[i : i + at_once], width=ROW_TOKENS) for i in parts]

    seconds = []
    for step in range(args.steps + 2):
        given = batches()
        synchronize(world)
        began = time.perf_counter()
        train_step(distiller, optimizer, given, world)
        synchronize(world)
        seconds.append(time.perf_counter() - began)
        print(f"  {name} step {step}: {seconds[-1]:.3f} s", flush=True)
    if args.profile_steps:
        show_kernels(lambda: train_step(distiller, optimizer, batches(), world))
    tokens = args.rows * ROW_TOKENS
    speed = tokens / statistics.median(seconds[2:])
    peak = PEAK_FLOPS.get(device_name(world))
    flops = model_flops(config, ROW_TOKENS // SEQUENCES).total
    return {
        "setup": name,
        **setup,
        "tokens_per_second": round(speed),
        "flop_utilisation": speed * flops / peak if peak else None,
        "peak_memory_gb": torch.cuda.max_memory_allocated() / 1e9 if world.kind == "cuda" else None,
        "first_step_seconds": round(seconds[0], 1),
    }


def show_kernels(body: object) -> None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        body()
        torch.cuda.synchronize()
    print(found.key_averages().table(sort_by="self_cuda_time_total", row_limit=25)[:6000])


def synchronize(world: World) -> None:
    if world.kind == "cuda":
        torch.cuda.synchronize()


def device_name(world: World) -> str:
    return torch.cuda.get_device_name() if world.kind == "cuda" else "cpu"


def main(args: argparse.Namespace) -> None:
    architecture = load_profile(args.profile).architecture
    dimensions = architecture["dimensions"]
    config = Config.from_dict(dimensions | {"model_type": "qwen3"})
    scheme, rows = architecture["quantization"], []
    for name in args.only:
        rows.append(measure(args, name, config, scheme))
        print(json.dumps(rows[-1]), flush=True)
        if torch.cuda.is_available():
            torch._dynamo.reset()
            torch.cuda.empty_cache()
    result = {
        "command": " ".join(["python", *sys.argv]),
        "device": device_name(World(0, 1, "cuda" if torch.cuda.is_available() else "cpu")),
        "row_tokens": ROW_TOKENS,
        "rows": args.rows,
        "setups": rows,
        "versions": versions(),
    }
    if args.result:
        write_json(args.result, result)
    print(json.dumps(result))


if __name__ == "__main__":
    main(parse_args())
