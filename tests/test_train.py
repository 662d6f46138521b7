"""train.py on made-up labels: killed, sharded, through the formats, with every option."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from labelled import make_labelled
from profiles import environment, kill_when, run_stage, start_stage, succeed
from safetensors.torch import load_file

from acceptance import simulate
from artifacts import ROOT, digest, read_stage
from formats import CODES, Export, codec_of, decode
from model import load_checkpoint
from packing import LabelSet, collate, make_example
from qat import attach_scales, read_scales

TRAIN = (
    *("--row-tokens", "128", "--batch-rows", "4", "--micro-rows", "2", "--epochs", "6"),
    *("--learning-rate", "2e-2", "--evaluate-every", "4", "--evaluate-records", "24"),
)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[Path, Path]:
    """(profile, workspace root), with one undisturbed run `distilled`."""
    profile, root = make_labelled(tmp_path_factory.mktemp("train"))
    succeed("train", profile, root, *TRAIN)
    return profile, root


def rows_of(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def copied(root: Path, tmp_path: Path) -> Path:
    """A workspace of its own, with the same models and labels."""
    shutil.copytree(root / "labelled", tmp_path / "labelled", ignore=shutil.ignore_patterns("runs"))
    return tmp_path / "labelled"


def test_the_draft_learns_and_the_best_of_the_last_phase_is_kept(made):
    profile, root = made
    run = root / "labelled" / "runs" / "distilled"
    rows, record = rows_of(run), read_stage(run, "")
    results = record["results"]
    assert rows[-1]["loss"] < 0.5 * rows[0]["loss"]
    first = results["steps"] - results["through_formats"]
    measured = [r for r in rows if "holdout_accepted" in r]
    assert [r["step"] for r in measured if r["step"] == first], "measured before the formats begin"
    last_phase = [r for r in measured if r["step"] > first]
    assert results["best"]["accepted"] == max(r["holdout_accepted"] for r in last_phase)
    # The checkpoint is that step's: its packed weights accept what was measured then.
    model = load_checkpoint(run / "checkpoint", torch.float32)
    scheme = json.loads((profile / "architecture.json").read_text())["quantization"]
    attach_scales(model, scheme, read_scales(run / "checkpoint"))
    held = list(LabelSet([root / "labelled" / "labels"], "holdout", 128))
    assert simulate(model, held, 16, "cpu").mean() == pytest.approx(results["best"]["accepted"])
    assert results["best"]["accepted"] > 2 * results["before"]["holdout_accepted"] + 1


@pytest.mark.parametrize("lines", [3, 35], ids=["before the formats", "in the formats"])
def test_killed_and_run_again_ends_with_the_same_bytes(made, tmp_path, lines):
    profile, root = made
    workspace = copied(root, tmp_path)
    flags = (*TRAIN, "--save-every", "2")
    process = start_stage("train", profile, tmp_path, *flags)
    partial = workspace / "runs" / "distilled.partial"

    def far_enough() -> bool:
        metrics = partial / "metrics.jsonl"
        done = metrics.read_text().count("\n") if metrics.exists() else 0
        return (partial / "state.pt").exists() and done >= lines

    kill_when(process, far_enough)
    assert "going on from step" in succeed("train", profile, tmp_path, *flags)
    run = workspace / "runs" / "distilled"
    undisturbed = root / "labelled" / "runs" / "distilled"
    assert (run / "metrics.jsonl").read_text() == (undisturbed / "metrics.jsonl").read_text()
    assert digest(read_stage(run, "")["outputs"]) == digest(read_stage(undisturbed, "")["outputs"])


def test_the_export_holds_the_trained_codes_bit_for_bit(made, tmp_path):
    """The packed weights are those of the last forward passes, and so are the export's logits."""
    profile, root = made
    succeed("quantize", profile, root, "--agreement-records", "4")
    checkpoint = root / "labelled" / "runs" / "distilled" / "checkpoint"
    weights, scales = load_file(checkpoint / "model.safetensors"), read_scales(checkpoint)
    export = Export(root / "labelled" / "export")
    assert export.quantization["scales"] == "trained"
    scheme = export.quantization["scheme"]
    packed = dict((name, stored) for name, _, stored in export.tensors())
    for name, scale in scales.items():
        codec, _ = codec_of(name, scheme)
        codes = CODES[codec](weights[name], scale)
        assert torch.equal(packed[name]["scales"], scale)
        value = dict(export.load(torch.float32).named_parameters())[name]
        assert torch.equal(value, decode(codec, codes, scale))
        break
    trained = load_checkpoint(checkpoint, torch.float32)
    attach_scales(trained, scheme, scales)
    example = make_example(list(range(20, 40)), list(range(50, 60)), 64)
    batch = collate([[example]])
    from model import packed_attention

    served = export.load(torch.float32)
    with torch.inference_mode():
        attend = packed_attention(batch.segments)
        a, b = (m(batch.token_ids, batch.positions, attend) for m in (trained, served))
        assert torch.equal(a, b)
        assert torch.equal(trained.logits(a[0]), served.logits(b[0]))


def test_two_processes_train_as_one(made, tmp_path):
    """FSDP2 over gloo: the losses of a single process, killed once in the middle."""
    profile, root = made
    workspace = copied(root, tmp_path)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--standalone", str(ROOT / "train.py"), "--profile", str(profile), *TRAIN]
    command += ["--save-every", "2"]
    extra = environment(tmp_path, OMP_NUM_THREADS="1")
    process = subprocess.Popen(
        command, env=extra, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    partial = workspace / "runs" / "distilled.partial"
    workers: list[int] = []

    def saved() -> bool:
        path = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        workers[:] = map(int, path.read_text().split())
        return (partial / "state.pt").exists()

    kill_when(process, saved)
    for worker in workers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)
    assert len(workers) == 2
    done = subprocess.run(command, env=extra, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "going on from step" in done.stdout
    ours = rows_of(workspace / "runs" / "distilled")
    single = rows_of(root / "labelled" / "runs" / "distilled")
    assert len(ours) == len(single)
    for a, b in zip(ours, single, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=2e-3)
        assert a["gradient_norm"] == pytest.approx(b["gradient_norm"], rel=2e-2)
        assert a["label_tokens"] == b["label_tokens"]
        if "holdout_loss" in b:
            assert a["holdout_loss"] == pytest.approx(b["holdout_loss"], rel=5e-3)


@pytest.mark.parametrize(
    "flags",
    [
        ("--objective", "topk-kl"),
        ("--objective", "ce=0.5,topk-tv=0.5", "--survival"),
        ("--optimizer", "adamw8bit", "--checkpointing"),
        ("--also", "labels-more", "--qat", "1", "--qat-scales", "absmax"),
    ],
    ids=lambda f: " ".join(f),
)
def test_every_way_of_training_learns(made, tmp_path, flags):
    profile, root = made
    workspace = copied(root, tmp_path)
    succeed("train", profile, tmp_path, *TRAIN, *flags)
    record = read_stage(workspace / "runs" / "distilled", "")
    results = record["results"]
    assert results["after"]["holdout_loss"] < 0.6 * results["before"]["holdout_loss"]
    assert record["rows"]["in"] == 90 + 20 * ("labels-more" in flags)


def test_checkpointing_changes_memory_and_nothing_else(made, tmp_path):
    profile, root = made
    workspace = copied(root, tmp_path)
    succeed("train", profile, tmp_path, *TRAIN, "--checkpointing", "--epochs", "1", "--qat", "0")
    with_it = rows_of(workspace / "runs" / "distilled")
    succeed("train", profile, tmp_path, *TRAIN, "--name", "b", "--epochs", "1", "--qat", "0")
    without = rows_of(workspace / "runs" / "b")
    assert [r["loss"] for r in with_it] == pytest.approx([r["loss"] for r in without], rel=1e-6)


def test_a_run_can_start_from_another_run(made, tmp_path):
    profile, root = made
    workspace = copied(root, tmp_path)
    shutil.copytree(root / "labelled" / "runs", workspace / "runs")
    succeed("train", profile, tmp_path, *TRAIN, "--name", "more", "--init", "distilled")
    record = read_stage(workspace / "runs" / "more", "")
    assert "runs/distilled" in record["inputs"] and "models/base" not in record["inputs"]
    first = read_stage(workspace / "runs" / "distilled", "")["results"]
    assert record["results"]["before"]["holdout_loss"] < 0.6 * first["before"]["holdout_loss"]


REFUSED = [
    (("--objective", "topk-kl", "--also", "labels-plain"), "has no log-probabilities"),
    (("--also", "labels-none"), "labels-none is missing"),
    (("--init", "none"), "train.py"),
    (("--row-tokens", "2"), "no label fits"),
]


@pytest.mark.parametrize(("flags", "reason"), REFUSED, ids=[r for _, r in REFUSED])
def test_what_cannot_be_trained_is_refused_in_one_line(made, tmp_path, flags, reason):
    profile, root = made
    copied(root, tmp_path)
    done = run_stage("train", profile, tmp_path, *TRAIN, *flags)
    assert done.returncode == 1, done.stdout
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and reason in errors[0]
