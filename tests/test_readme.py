"""The README's own command lines for the real pair, run against a stand-in Hub."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys

import pytest
from hub_server import Repo, serve_hub
from profiles import add_tokenizer, random_qwen3
from test_real_input import DATA, EOS, lines, tokenizer  # noqa: F401 (a fixture)

from artifacts import ROOT
from profile_files import source_entry
from records import read_labels

VLLM_PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
STAGES = ("download_models", "prepare_data", "prepare_extended", "generate_teacher")
# A random model on two cores labels a few short answers in the time of this test, not thousands.
FEWER = ["--limit", "24", "--max-output-tokens", "32"]

pytestmark = pytest.mark.vllm


def no_robots_rows():
    return [
        {
            "prompt": f"Write a short note about topic {n}.",
            "prompt_id": f"{n:064x}",
            "messages": [
                {"role": "user", "content": f"Write a short note about topic {n} for friends."},
                {"role": "assistant", "content": f"Topic {n} is worth a short note, my friends."},
            ],
            "category": "Generation",
        }
        for n in range(12)
    ]


def aya_rows():
    return [
        {
            "inputs": f"¿Cuál es la capital del país número {n}?",
            "targets": f"La capital número {n}.",
            "language": "Spanish",
            "language_code": "spa",
            "annotation_type": "original-annotations",
            "user_id": "u",
        }
        for n in range(12)
    ]


def file_pins(files):
    return [
        {"path": p, "bytes": len(d), "sha256": hashlib.sha256(d).hexdigest()}
        for p, d in sorted(files.items())
    ]


def stand_in(copy, tokenizer_directory, scratch):
    """Repositories under the real names, and the two JSON files that pin them, in `copy`."""
    architecture = json.loads((ROOT / "architecture.json").read_text())
    manifest = json.loads((ROOT / "data_manifest.json").read_text())
    repos = []
    shapes = {"base": {}, "teacher": {"hidden_size": 128}}
    for seed, (which, sizes) in enumerate(shapes.items()):
        directory = scratch / which
        config = random_qwen3(directory, 151936, seed + 1, max_position_embeddings=4096, **sizes)
        add_tokenizer(directory, tokenizer_directory)
        files = {p.name: p.read_bytes() for p in directory.iterdir()}
        entry = architecture[which]
        entry["files"] = file_pins(files)
        repos.append(Repo("models", entry["repo"], entry["revision"], files, set()))
        if which == "base":
            facts = config | {"rope_theta": config["rope_parameters"]["rope_theta"]}
            architecture["dimensions"] = {k: facts[k] for k in architecture["dimensions"]}
    rows = {
        "no_robots": no_robots_rows(),
        "gsm8k": lines("gsm8k_train.jsonl", 20),
        "aya": aya_rows(),
        "personas_code": lines("code.sample.jsonl", 5),
        "personas_instruction_following": lines("instruction_following.sample.jsonl", 5),
    }
    for source in manifest["sources"]:
        made = source_entry(scratch, source["name"], rows[source["name"]])
        data = (scratch / made["file"]).read_bytes()
        source.update({k: made[k] for k in ("bytes", "rows", "columns", "sha256")})
        files = {source["file"]: data, "data/test-00000-of-00001.parquet": b"never read"}
        repo = Repo("datasets", source["repo"], source["revision"], files, {source["file"]})
        repos.append(repo)
    (copy / "architecture.json").write_text(json.dumps(architecture))
    (copy / "data_manifest.json").write_text(json.dumps(manifest))
    return repos


def readme_commands():
    """The numbered steps of the README up to the labels, as they stand there."""
    text = (ROOT / "README.md").read_text()
    found = re.findall(r"^(python (\w+)\.py)\s+# +\d", text, re.MULTILINE)
    commands = {stage: command for command, stage in found if stage in STAGES}
    assert tuple(commands) == STAGES, "the README's steps are not the pipeline's"
    return commands


def test_the_readmes_commands_run_against_a_stand_in_hub(
    tokenizer,  # noqa: F811
    tmp_path,
):
    assert VLLM_PYTHON.exists(), "the vLLM environment is missing; run ./test.sh, which builds it"
    if not (DATA / "gsm8k_train.jsonl").is_file():
        pytest.skip(f"the real GSM8K train rows are not in {DATA}")
    copy = tmp_path / "repository"
    copy.mkdir()
    for path in ROOT.glob("*.py"):
        shutil.copyfile(path, copy / path.name)
    with serve_hub(stand_in(copy, tokenizer, tmp_path)) as hub:
        environment = os.environ | {
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(tmp_path / "home"),
            "HF_HUB_OFFLINE": "0",
            "WORKSPACE": str(tmp_path / "workspace"),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "TORCHDYNAMO_DISABLE": "1",
        }
        for stage, command in readme_commands().items():
            labels = stage == "generate_teacher"
            words = [str(VLLM_PYTHON) if labels else sys.executable, *command.split()[1:]]
            result = subprocess.run(
                words + (FEWER if labels else []),
                cwd=copy,
                env=environment,
                capture_output=True,
                text=True,
                timeout=400,
            )
            assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr[-3000:]}"
        touched = {path for _, path, _ in hub.requests}
    assert not any("test-00000" in path for path in touched), "a test split was opened"
    workspace = tmp_path / "workspace" / "qwen3"
    record = json.loads((workspace / "labels" / "stage.json").read_text())
    assert record["arguments"]["engine"] == "vllm"
    assert record["rows"]["in"] == 24
    labels = read_labels(workspace / "labels", "train")
    assert labels and all(1 <= len(r["output_token_ids"]) <= 32 for r in labels)
    assert all(r["prompt_token_ids"][-4:] == [151667, 271, 151668, 271] for r in labels)
    assert all((r["output_token_ids"][-1] in EOS) == (r["finish_reason"] == "stop") for r in labels)
