"""The labelling engine of the real pair, run for real: vLLM on the CPU beside transformers, killed
once in the middle."""

from __future__ import annotations

import json
import shutil

import pytest
from profiles import kill_when, run_stage, start_stage, succeed

from artifacts import ROOT
from records import read_labels

PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
FLAGS = ("--limit", "96", "--logprobs", "5", "--max-output-tokens", "64", "--shard-size", "32")
# Two kernels may round a near-tie the other way; above this log-probability margin they may not.
NEAR_TIE = 1e-3

pytestmark = pytest.mark.vllm


def test_vllm_labels_equal_those_of_transformers(tmp_path, monkeypatch):
    assert PYTHON.exists(), "the vLLM environment is missing; run ./test.sh, which builds it"
    workspace = tmp_path / "tiny"
    for stage in ("download_models", "prepare_data", "prepare_extended"):
        succeed(stage, "tiny", tmp_path)
    succeed("generate_teacher", "tiny", tmp_path, *FLAGS)
    shutil.move(workspace / "labels", workspace / "by_transformers")
    for name, value in {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "TORCHDYNAMO_DISABLE": "1",
    }.items():
        monkeypatch.setenv(name, value)
    flags = (*FLAGS, "--engine", "vllm")
    first = workspace / "labels.partial" / "train" / "00000.parquet"
    process = start_stage("generate_teacher", "tiny", tmp_path, *flags, python=str(PYTHON))
    kill_when(process, first.exists)
    kept = first.stat().st_mtime_ns
    result = run_stage("generate_teacher", "tiny", tmp_path, *flags, python=str(PYTHON))
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    finished = workspace / "labels" / "train" / "00000.parquet"
    assert finished.stat().st_mtime_ns == kept, "a finished shard was labelled again"
    record = json.loads((workspace / "labels/stage.json").read_text())
    assert record["arguments"]["engine"] == "vllm"

    near_ties = total = 0
    for split in ("train", "holdout"):
        ours = read_labels(workspace / "by_transformers", split)
        theirs = read_labels(workspace / "labels", split)
        assert [r["id"] for r in ours] == [r["id"] for r in theirs]
        for a, b in zip(ours, theirs, strict=True):
            total += 1
            near_ties += compare(a, b)
    print(f"{total} labels, {near_ties} of them differ after a near-tie")
    assert total == 96
    assert near_ties <= total // 20


def compare(a: dict, b: dict) -> bool:
    """False where the two records are equal, True where they part at a near-tie; else fails."""
    assert a["prompt_token_ids"] == b["prompt_token_ids"]
    pairs = zip(a["output_token_ids"], b["output_token_ids"], strict=False)
    parted = next((i for i, (x, y) in enumerate(pairs) if x != y), None)
    if parted is None:
        assert a["output_token_ids"] == b["output_token_ids"]
        assert a["finish_reason"] == b["finish_reason"]
    else:
        assert a["margin"][parted] < NEAR_TIE, f"{a['id']} differs at {parted} without a tie"
    for x, y in list(zip(a["top_logprobs"], b["top_logprobs"], strict=False))[:parted]:
        assert max(abs(p - q) for p, q in zip(x, y, strict=True)) < 1e-3
    return parted is not None
