"""The audit finds what was changed behind the stages' backs, even where every hash was forged."""

from __future__ import annotations

import json
import shutil

import pytest
from profiles import run_stage, succeed

from artifacts import list_outputs, write_json
from records import PROMPT_SCHEMA, read_records, write_records

FAST = ("--epochs", "1", "--row-tokens", "256")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished tiny workspace over a few labels."""
    workspace = tmp_path_factory.mktemp("audit")
    for stage in ("download_models", "prepare_data", "prepare_extended"):
        succeed(stage, "tiny", workspace)
    succeed("generate_teacher", "tiny", workspace, "--limit", "60")
    succeed("train", "tiny", workspace, *FAST)
    succeed("quantize", "tiny", workspace, "--agreement-records", "2")
    return workspace


def test_an_undisturbed_chain_has_no_findings(finished):
    out = succeed("audit", "tiny", finished)
    assert "every pin holds" in out
    assert "runs/distilled" in out and "downloads/gsm8k" in out and "contract " in out


def reseal(directory):
    """Write a stage record whose hashes fit files that were changed by hand."""
    record = json.loads((directory / "stage.json").read_text())
    record["outputs"] = list_outputs(directory)
    write_json(directory / "stage.json", record)


def test_one_changed_byte_is_found(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "copy")
    path = tmp_path / "copy/tiny/export/weights.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    result = run_stage("audit", "tiny", tmp_path / "copy")
    assert result.returncode == 1 and "weights.safetensors has sha256" in result.stderr


def test_a_forged_prompt_set_is_found_by_who_read_the_true_one(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "copy")
    directory = tmp_path / "copy/tiny/data/extended"
    records = list(read_records(directory / "prompts.parquet"))
    moved = next(r for r in records if r["split"] == "holdout")
    moved["split"] = "train"
    write_records(directory / "prompts.parquet", records, PROMPT_SCHEMA)
    reseal(directory)
    result = run_stage("audit", "tiny", tmp_path / "copy")
    assert result.returncode == 1
    assert "labels was made from another data/extended" in result.stderr
    assert "records of another side" in result.stderr


def test_rows_that_vanish_are_found(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "copy")
    path = tmp_path / "copy/tiny/data/base/stage.json"
    record = json.loads(path.read_text())
    record["rows"]["gsm8k"]["kept"] -= 3
    write_json(path, record)
    result = run_stage("audit", "tiny", tmp_path / "copy")
    assert result.returncode == 1
    assert "data/base gsm8k: rows in against kept + dropped + failed" in result.stderr
