"""Stages 2 and 3 at the real size: 300,000 stand-in prompts of real length, time and peak memory.

Writes a throw-away profile with parquet files in the five real schemas (random words with a natural
spread of lengths; some exact and near repeats), runs prepare_data.py and prepare_extended.py on it
as a user would, and keeps seconds and peak resident memory of each. The tokenizer is the tiny one
unless --tokenizer names a directory with the real one.

    python benchmarks/prepare_scale.py --out benchmarks/prepare_scale.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from artifacts import sha256_file, versions, write_json  # noqa: E402

# Rows of the real files, scaled to the asked total, and the median of words in a prompt.
SOURCES = {
    "no_robots": (9500, 60),
    "gsm8k": (7473, 45),
    "aya": (202362, 40),
    "personas_code": (34999, 130),
    "personas_instruction_following": (29980, 90),
}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=300_000, help="(default: %(default)s)")
    parser.add_argument("--tokenizer", type=Path, default=ROOT / "tiny" / "base")
    parser.add_argument("--out", type=Path, help="JSON file to keep the result in")
    return parser.parse_args(argv)


def texts(rng: random.Random, count: int, median: int) -> Iterator[str]:
    """Random prose; one in 30 repeats an earlier text, one in 30 nearly does."""
    letters = "etaoinshrdlucmfwypvbgk"
    words = ["".join(rng.choices(letters, k=rng.randint(2, 9))) for _ in range(20_000)]
    weights = [1 / (rank + 10) for rank in range(len(words))]
    sums, total = [], 0.0
    for weight in weights:
        total += weight
        sums.append(total)
    earlier: list[str] = []
    for _ in range(count):
        draw = rng.random()
        if earlier and draw < 1 / 30:
            yield rng.choice(earlier)
            continue
        if earlier and draw < 2 / 30:
            chosen = rng.choice(earlier).split()
            chosen[rng.randrange(len(chosen))] = "changed"
        else:
            length = min(1500, max(4, round(median * rng.lognormvariate(0, 0.7))))
            chosen = rng.choices(words, cum_weights=sums, k=length)
        text = " ".join(chosen)
        if len(earlier) < 2000:
            earlier.append(text)
        yield text


def to_row(source: str, number: int, text: str) -> dict:
    chat = [{"role": "user", "content": text}, {"role": "assistant", "content": text[:200]}]
    if source == "gsm8k":
        return {"question": text, "answer": "#### 1"}
    if source == "aya":
        return {
            **{"inputs": text, "targets": text[:200], "language": "English"},
            **{"language_code": "eng", "annotation_type": "x", "user_id": "u"},
        }
    if source == "no_robots":
        return {"prompt": text, "prompt_id": str(number), "messages": chat, "category": "x"}
    row = {"id": str(number), "prompt": text, "messages": chat}
    return row | ({"constraints": ["x"]} if source.endswith("following") else {})


def write_profile(directory: Path, prompts: int, tokenizer: Path) -> int:
    """Data, manifest and a base directory that holds just what the stages read; returns rows."""
    (directory / "data").mkdir(parents=True)
    shutil.copytree(ROOT / "tiny" / "base", directory / "base")
    shutil.copytree(ROOT / "tiny" / "teacher", directory / "teacher")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tokenizer / name, directory / "base" / name)
    architecture = json.loads((ROOT / "tiny" / "architecture.json").read_text())
    architecture["name"] = "scale"
    for file in architecture["base"]["files"]:
        path = directory / "base" / file["path"]
        file["bytes"], file["sha256"] = path.stat().st_size, sha256_file(path)
    write_json(directory / "architecture.json", architecture)
    manifest = json.loads((ROOT / "data_manifest.json").read_text())
    scale, total = prompts / sum(rows for rows, _ in SOURCES.values()), 0
    for source in manifest["sources"]:
        rows, median = SOURCES[source["name"]]
        count, rng = round(rows * scale), random.Random(source["name"])
        made = [to_row(source["name"], i, t) for i, t in enumerate(texts(rng, count, median))]
        path = directory / "data" / f"{source['name']}.parquet"
        pq.write_table(pa.Table.from_pylist(made), path)
        facts = {"bytes": path.stat().st_size, "sha256": sha256_file(path), "rows": count}
        source.update(facts, repo=None, revision=None, file=f"data/{path.name}")
        total += count
    write_json(directory / "data_manifest.json", manifest)
    return total


def run_stage(stage: str, directory: Path, *flags: str) -> dict:
    """Run a stage; seconds and peak resident memory of its process."""
    command = [sys.executable, str(ROOT / f"{stage}.py"), "--profile", str(directory), *flags]
    environment = os.environ | {"WORKSPACE": str(directory / "workspace")}
    began = time.monotonic()
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{stage} failed")
    return {
        "seconds": round(time.monotonic() - began, 1),
        "peak_gb": round(usage.ru_maxrss * 1024 / 1e9, 2),
    }


def main(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary) / "scale"
        rows = write_profile(directory, args.prompts, args.tokenizer)
        run_stage("download_models", directory)
        result = {
            "command": " ".join(["python", "benchmarks/prepare_scale.py"]),
            "rows": rows,
            "prepare_data": run_stage("prepare_data", directory, "--max-rows", str(rows)),
            "prepare_extended": run_stage("prepare_extended", directory),
            "accounts": json.loads(
                (directory / "workspace/scale/data/extended/rows.json").read_text()
            ),
            "tokenizer": "tiny" if "tiny" in str(args.tokenizer) else "Qwen3",
            "cores": os.cpu_count(),
            "machine": platform.machine(),
            "versions": versions(),
        }
    if args.out:
        write_json(args.out, result)
    print(json.dumps(result))


if __name__ == "__main__":
    main(parse_args())
