"""Export a checkpoint of Qwen3-1.7B's true shape, in its published layout: size, time, memory.

Random weights in two shards with an index and the tied head once more, as the model is published;
a handful of made-up labels; then quantize.py as a user runs it, watched from outside. Ends with an
error where the export breaks a limit or its inventory is not the design's.

    python benchmarks/true_shape_export.py --out work --result benchmarks/true_shape_export.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from artifacts import Stage, load_profile, read_json, versions, write_json  # noqa: E402
from formats import tensor_kind  # noqa: E402
from model import Config, empty_model  # noqa: E402
from records import label_schema, write_records  # noqa: E402

LIMITS = {"bytes": 1_000_000_000, "seconds": 300, "peak_bytes": 12_000_000_000}
CODECS = {"linear": "nf4", "embedding": "int6", "norm": "bf16"}
SECOND_SHARD = "model.layers.27."  # and the copy of the head


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="workspace; needs 6 GB")
    parser.add_argument("--scales", default="mse", help="of quantize.py (default: %(default)s)")
    parser.add_argument("--result", type=Path, help="JSON file to keep the figures in")
    return parser.parse_args(argv)


def write_checkpoint(directory: Path, dimensions: dict) -> None:
    """models/base with its stage record, as download_models.py would leave it."""
    raw = dimensions | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    config = Config.from_dict(raw)
    stage = Stage("download_models", directory, "python download_models.py", {}, {})
    with stage.working_directory() as partial:
        write_json(partial / "config.json", raw)
        generator = torch.Generator().manual_seed(0)
        shards: list[dict] = [{}, {}]
        for name, parameter in empty_model(config).named_parameters():
            value = torch.ones(parameter.shape, dtype=torch.bfloat16)
            if parameter.ndim == 2:
                value = torch.empty_like(value).normal_(std=0.02, generator=generator)
            shards[name.startswith(SECOND_SHARD)][name] = value
        shards[1]["lm_head.weight"] = shards[0]["model.embed_tokens.weight"].clone()
        weight_map = {}
        for number, tensors in enumerate(shards, 1):
            file = f"model-{number:05d}-of-00002.safetensors"
            save_file(tensors, partial / file, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(tensors, file)
        index = {"metadata": {}, "weight_map": weight_map}
        write_json(partial / "model.safetensors.index.json", index)
        tokenizer = ROOT / "tiny" / "base"  # any; only the contract's hash reads it
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (partial / name).write_bytes((tokenizer / name).read_bytes())
        stage.finish()


def write_labels(directory: Path) -> None:
    rng = random.Random(0)
    record = {
        "id": "made-up/0",
        "source": "made-up",
        "prompt_token_ids": [rng.randrange(150000) for _ in range(64)],
        "output_token_ids": [rng.randrange(150000) for _ in range(32)],
        "finish_reason": "length",
    }
    stage = Stage("generate_teacher", directory, "python generate_teacher.py", {}, {})
    with stage.working_directory() as partial:
        (partial / "holdout").mkdir()
        write_records(partial / "holdout" / "00000.parquet", [record], label_schema(0))
        stage.finish()


def check_inventory(quantization: dict) -> None:
    """Every weight in the codec that the design gives its kind, nothing else in the file."""
    for name, entry in quantization["tensors"].items():
        if entry["codec"] != CODECS[tensor_kind(name)]:
            raise SystemExit(f"{name} is {entry['codec']}")
    if "lm_head.weight" in quantization["tensors"]:
        raise SystemExit("the tied head was exported a second time")


def main(args: argparse.Namespace) -> None:
    os.environ["WORKSPACE"] = str(args.out.resolve())
    profile = load_profile("qwen3")
    base, labels = profile.workspace / "models" / "base", profile.workspace / "labels"
    if not base.exists():
        write_checkpoint(base, profile.architecture["dimensions"])
    if not labels.exists():
        write_labels(labels)
    flags = ["--run", "base", "--scales", args.scales, "--agreement-records", "1", "--force"]
    command = ["quantize.py", *flags, "--out", "export-true-shape"]
    began = time.monotonic()
    subprocess.run([sys.executable, str(ROOT / command[0]), *command[1:]], check=True)
    export = profile.workspace / "export-true-shape"
    quantization = read_json(export / "quantization.json", "")
    check_inventory(quantization)
    result = {
        "command": " ".join(["python", *command]),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "bytes": quantization["weights"]["bytes"],
        "seconds": round(time.monotonic() - began, 1),
        "peak_bytes": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
        "tensors": len(quantization["tensors"]),
        "limits": LIMITS,
        "versions": versions(),
    }
    if args.result:
        write_json(args.result, result)
    print(json.dumps(result))
    over = [name for name, limit in LIMITS.items() if result[name] > limit]
    if over:
        raise SystemExit(f"over the limit: {', '.join(over)}")


if __name__ == "__main__":
    main(parse_args())
