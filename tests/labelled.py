"""A workspace with a small random base and labels of a made-up teacher, without running stages."""

from __future__ import annotations

import random
from pathlib import Path

from profiles import TOKENIZER, make_random_profile, succeed

from artifacts import Stage
from records import label_schema, write_records

EOS = [2, 0]
TOP_K = 4


def label(rng: random.Random, name: str) -> dict:
    """A continuation that follows a rule, so that it can be learnt; some end, some are cut off."""
    prompt = [rng.randrange(10, 300) for _ in range(rng.randrange(4, 20))]
    output, token = [], prompt[-1]
    for _ in range(rng.randrange(6, 40)):
        token = 10 + (token * 7 + 3) % 40
        output.append(token)
    if ended := rng.random() < 0.7:
        output.append(EOS[0])
    others = [rng.sample(range(400, 2000), TOP_K - 1) for _ in output]
    first = [-rng.uniform(0.05, 0.5) for _ in output]
    return {
        "id": name,
        "source": "made-up",
        "prompt_token_ids": prompt,
        "output_token_ids": output,
        "finish_reason": "stop" if ended else "length",
        "top_ids": [[t, *o] for t, o in zip(output, others, strict=True)],
        "top_logprobs": [[f, f - 2, f - 3, f - 4] for f in first],
        "margin": [2.0] * len(output),
    }


def write_labels(directory: Path, counts: dict[str, int], seed: int, top_k: int = TOP_K) -> None:
    """A finished label directory with `counts` records a split."""
    rng = random.Random(seed)
    stage = Stage("generate_teacher", directory, "python generate_teacher.py", {"seed": seed}, {})
    with stage.working_directory() as partial:
        for split, count in counts.items():
            (partial / split).mkdir()
            records = [label(rng, f"{seed}/{split}/{n}") for n in range(count)]
            if not top_k:
                records = [{k: r[k] for k in label_schema(0).names} for r in records]
            write_records(partial / split / "00000.parquet", records, label_schema(top_k))
        stage.finish()


def make_labelled(directory: Path) -> tuple[Path, Path]:
    """(profile, workspace root) with models/base, labels and labels-more."""
    profile = make_random_profile(directory / "labelled", TOKENIZER, 2048, EOS)
    root = directory / "work"
    succeed("download_models", profile, root)
    write_labels(root / "labelled" / "labels", {"train": 90, "holdout": 24}, seed=1)
    write_labels(root / "labelled" / "labels-more", {"train": 20}, seed=2)
    write_labels(root / "labelled" / "labels-plain", {"train": 20, "holdout": 4}, 3, top_k=0)
    return profile, root
