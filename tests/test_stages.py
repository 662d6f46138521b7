"""The chain on a small random pair: what each stage hands over, refuses, and survives."""

from __future__ import annotations

import json

import pyarrow.parquet as pq
import pytest
import torch
from profiles import (
    TOKENIZER,
    kill_when,
    make_random_profile,
    run_stage,
    start_stage,
    succeed,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

from artifacts import ROOT, digest, read_stage
from profile_files import source_entry, write_manifest
from records import read_labels, read_records, split_of

EOS = json.loads((ROOT / "tiny" / "architecture.json").read_text())["eos_token_ids"]
LABEL = ("--engine", "transformers", "--max-output-tokens", "24", "--shard-size", "16")
TRAIN = ("--row-tokens", "256", "--batch-rows", "2", "--learning-rate", "1e-3")


def question_rows():
    """60 questions, of them one repeated with other spacing and case, one empty, one huge."""
    rows = [
        {"question": f"Ann has {n} pens and buys {n % 7} more. How many?", "answer": f"#### {n}"}
        for n in range(57)
    ]
    rows.append({"question": "ann  has 3 pens and buys 3 more. how many?", "answer": "#### 6"})
    rows.append({"question": "", "answer": "#### 0"})
    rows.append({"question": "very long " * 3000, "answer": "#### 1"})
    return rows


def chat_rows():
    return [
        {
            "id": f"p{n}",
            "prompt": f"Write item {n}.",
            "messages": [
                {"role": "user", "content": f"Write item {n}."},
                {"role": "assistant", "content": f"Item {n}. It is done now, in full."},
            ],
        }
        for n in range(20)
    ]


@pytest.fixture(scope="module")
def profile(tmp_path_factory):
    path = make_random_profile(tmp_path_factory.mktemp("profile") / "small", TOKENIZER, 2048, EOS)
    following = [row | {"constraints": ["one"]} for row in chat_rows()]
    for row in following:
        row["messages"][0]["content"] += " In one word."
    write_manifest(
        path,
        [
            source_entry(path, "gsm8k", question_rows()),
            source_entry(path, "personas_code", chat_rows()),
            source_entry(path, "personas_instruction_following", following, "extended"),
        ],
    )
    return path


@pytest.fixture(scope="module")
def chain(profile, tmp_path_factory):
    """A workspace in which every stage ran undisturbed."""
    workspace = tmp_path_factory.mktemp("workspace")
    succeed("download_models", profile, workspace)
    succeed("prepare_data", profile, workspace, "--holdout-percent", "25")
    succeed(
        *("prepare_extended", profile, workspace),
        *("--bug-repairs", "8", "--augment-share", "0.5"),
    )
    succeed("generate_teacher", profile, workspace, *LABEL, "--logprobs", "5")
    succeed("train", profile, workspace, *TRAIN)
    succeed("quantize", profile, workspace)
    return workspace / "small"


def outputs(directory):
    return digest(read_stage(directory, "")["outputs"])


def test_every_row_is_accounted_for(chain):
    rows = json.loads((chain / "data/base/rows.json").read_text())
    assert rows["gsm8k"] == {
        "in": 60,
        "kept": 57,
        "dropped": {"duplicate": 1, "no_usable_prompt": 1, "too_long": 1},
        "failed": 0,
    }
    assert rows["personas_code"]["kept"] == 20
    records = list(read_records(chain / "data/extended/prompts.parquet"))
    extended = json.loads((chain / "data/extended/rows.json").read_text())
    assert len(records) == sum(part["kept"] for part in extended.values())
    labels = read_stage(chain / "labels", "")["rows"]
    assert labels["in"] == len(records) == labels["kept"] + labels["failed"]
    assert len({r["id"] for r in records}) == len(records)


def test_the_holdout_is_a_function_of_the_text_and_never_trained_on(chain):
    records = {r["id"]: r for r in read_records(chain / "data/extended/prompts.parquet")}
    sides = {r["split"] for r in records.values()}
    assert sides == {"train", "holdout"}
    for record in records.values():
        root = records[record["parent_id"]] if record["parent_id"] else record
        assert record["split"] == split_of(root["messages"], 25)
    augmented = [r for r in records.values() if r["augmentation"]]
    assert len({r["augmentation"] for r in augmented}) >= 3
    train = {r["id"] for r in read_labels(chain / "labels", "train")}
    holdout = {r["id"] for r in read_labels(chain / "labels", "holdout")}
    assert train == {i for i, r in records.items() if r["split"] == "train"}
    assert holdout == {i for i, r in records.items() if r["split"] == "holdout"}
    diagnostic = [r["id"] for r in read_labels(chain / "labels", "diagnostic")]
    assert diagnostic == [r["id"] for r in read_labels(chain / "labels", "train")][:256]


def test_labels_are_the_teachers_greedy_continuations(chain):
    """Against transformers' generate, one prompt at a time and unpadded."""
    tokenizer = AutoTokenizer.from_pretrained(chain / "models/base")
    teacher = AutoModelForCausalLM.from_pretrained(chain / "models/teacher", dtype="float32")
    prompts = {r["id"]: r for r in read_records(chain / "data/extended/prompts.parquet")}
    labels = read_labels(chain / "labels", "holdout")[:6]
    for label in labels:
        encoded = tokenizer.apply_chat_template(
            prompts[label["id"]]["messages"],
            add_generation_prompt=True,
            enable_thinking=False,
            return_tensors="pt",
        )
        ids = encoded["input_ids"]
        assert label["prompt_token_ids"] == ids[0].tolist()
        out = teacher.generate(
            ids, max_new_tokens=24, do_sample=False, eos_token_id=EOS, pad_token_id=EOS[1]
        )[0, ids.shape[1] :].tolist()
        differs = next(
            (
                i
                for i, (a, b) in enumerate(zip(out, label["output_token_ids"], strict=False))
                if a != b
            ),
            None,
        )
        assert differs is None or label["margin"][differs] < 1e-3
        if differs is None:
            assert label["output_token_ids"] == out
        ended = label["output_token_ids"][-1] in EOS
        assert label["finish_reason"] == ("stop" if ended else "length")
        assert [ids[0] for ids in label["top_ids"]] == label["output_token_ids"]
        assert all(p == sorted(p, reverse=True) for p in label["top_logprobs"])


def test_the_checkpoint_opens_in_transformers(chain):
    model = AutoModelForCausalLM.from_pretrained(chain / "runs/distilled/checkpoint")
    assert model.config.vocab_size == 2048
    rows = [
        json.loads(line)
        for line in (chain / "runs/distilled/metrics.jsonl").read_text().splitlines()
    ]
    assert [r["step"] for r in rows] == list(range(1, len(rows) + 1))
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert rows[-1]["holdout_loss"] > 0
    assert (chain / "runs/distilled/loss.png").stat().st_size > 1000


def test_the_export_has_the_stated_inventory(chain):
    quantization = json.loads((chain / "export/quantization.json").read_text())
    codecs = {name.split(".")[-2]: e["codec"] for name, e in quantization["tensors"].items()}
    assert codecs["embed_tokens"] == "int6"
    assert codecs["q_proj"] == codecs["down_proj"] == "nf4"
    assert codecs["q_norm"] == codecs["input_layernorm"] == "bf16"
    for entry in quantization["tensors"].values():
        assert len(entry["source_sha256"]) == 64
        assert set(entry["error"]) == {"relative", "max"}
    assert 0 < quantization["agreement"]["argmax_equal"] <= 1
    assert len(quantization["known_answer"]["draft_token_ids"]) == 16


def test_running_again_is_done_at_once_and_other_arguments_stop(profile, chain):
    workspace = chain.parent
    assert "up to date" in succeed("train", profile, workspace, *TRAIN)
    other = run_stage("train", profile, workspace, *TRAIN, "--seed", "5")
    assert other.returncode == 1
    assert "seed: 0 there, 5 now" in other.stderr
    assert "--force" in other.stderr


MISSING = [
    ("prepare_data", (), "download_models.py"),
    ("prepare_extended", (), "prepare_data.py"),
    ("generate_teacher", LABEL, "prepare_extended.py"),
    ("train", (), "download_models.py"),
    ("quantize", (), "train.py"),
    ("evaluate", (), "generate_teacher.py"),
    ("server", ("--port", "0"), "quantize.py"),
]


@pytest.mark.parametrize(("stage", "flags", "command"), MISSING, ids=[m[0] for m in MISSING])
def test_a_missing_input_names_the_command_that_makes_it(profile, tmp_path, stage, flags, command):
    result = run_stage(stage, profile, tmp_path, *flags)
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert f"run: python {command} --profile {profile}" in last


DAMAGED = [
    ("prepare_data", (), "models/base/tokenizer.json"),
    ("prepare_extended", (), "data/base/prompts.parquet"),
    ("generate_teacher", LABEL, "models/teacher/model.safetensors"),
    ("train", TRAIN, "labels/train/00000.parquet"),
    ("quantize", (), "runs/distilled/checkpoint/model.safetensors"),
    ("server", ("--port", "0"), "export/weights.safetensors"),
]


@pytest.mark.parametrize(("stage", "flags", "file"), DAMAGED, ids=[d[0] for d in DAMAGED])
def test_one_wrong_byte_in_an_input_is_found_before_use(profile, chain, stage, flags, file):
    path = chain / file
    good = path.read_bytes()
    middle = len(good) // 2
    path.write_bytes(good[:middle] + bytes([good[middle] ^ 1]) + good[middle + 1 :])
    try:
        result = run_stage(stage, profile, chain.parent, *flags)
    finally:
        path.write_bytes(good)
    assert result.returncode == 1
    assert path.name in result.stderr and "sha256" in result.stderr and "run: " in result.stderr


def linked_workspace(chain, tmp_path, *parts):
    """A new workspace that shares some finished parts with the chain's."""
    workspace = tmp_path / "small"
    workspace.mkdir()
    for part in parts:
        (workspace / part).symlink_to(chain / part)
    return workspace


def test_labelling_killed_half_way_ends_with_the_same_labels(profile, chain, tmp_path):
    workspace = linked_workspace(chain, tmp_path, "models", "data")
    process = start_stage("generate_teacher", profile, tmp_path, *LABEL, "--logprobs", "5")
    shards = workspace / "labels.partial" / "train"
    kill_when(process, lambda: (shards / "00001.parquet").exists())
    kept = {p.name: p.stat().st_mtime_ns for p in shards.glob("*.parquet")}
    assert not (workspace / "labels").exists()
    refused = run_stage("train", profile, tmp_path, *TRAIN)
    assert "was not finished" in refused.stderr
    other = run_stage("generate_teacher", profile, tmp_path, *LABEL, "--logprobs", "4")
    assert "unfinished run that differs (arguments.logprobs: 5 there, 4 now)" in other.stderr
    succeed("generate_teacher", profile, tmp_path, *LABEL, "--logprobs", "5")
    assert outputs(workspace / "labels") == outputs(chain / "labels")
    done = workspace / "labels" / "train"
    assert all((done / n).stat().st_mtime_ns == t for n, t in kept.items()), "computed again"


def test_parts_from_two_machines_merge_into_the_whole(profile, chain, tmp_path):
    """The same labels, in the same order, as one machine's; nothing twice, nothing lost."""
    workspace = linked_workspace(chain, tmp_path, "models", "data")
    flags = (*LABEL, "--logprobs", "5")
    succeed("generate_teacher", profile, tmp_path, *flags, "--shard", "0/2")
    missing = run_stage("generate_teacher", profile, tmp_path, *flags, "--merge", "2")
    assert "labels.1-of-2 is missing" in missing.stderr
    other = ("--engine", "transformers", "--max-output-tokens", "23", "--shard-size", "16")
    succeed("generate_teacher", profile, tmp_path, *other, "--logprobs", "5", "--shard", "1/2")
    mixed = run_stage("generate_teacher", profile, tmp_path, *flags, "--merge", "2")
    assert "was made differently (arguments.max_output_tokens: 23 there, 24 now)" in mixed.stderr
    assert not (workspace / "labels").exists()
    succeed("generate_teacher", profile, tmp_path, *flags, "--shard", "1/2", "--force")
    succeed("generate_teacher", profile, tmp_path, *flags, "--merge", "2")
    for split in ("train", "holdout", "diagnostic"):
        whole, merged = (
            read_labels(chain / "labels", split),
            read_labels(workspace / "labels", split),
        )
        assert [r["id"] for r in merged] == [r["id"] for r in whole]
        same = sum(
            a["output_token_ids"] == b["output_token_ids"]
            for a, b in zip(whole, merged, strict=True)
        )
        assert same >= len(whole) - 2  # other batches may round a near-tie the other way
    assert read_stage(workspace / "labels", "")["rows"] == read_stage(chain / "labels", "")["rows"]


def test_data_parallel_workers_give_the_labels_of_one(profile, chain, tmp_path):
    workspace = linked_workspace(chain, tmp_path, "models", "data")
    flags = (*LABEL, "--logprobs", "5")
    succeed("generate_teacher", profile, tmp_path, *flags, "--data-parallel", "2")
    assert outputs(workspace / "labels") == outputs(chain / "labels")


def test_self_agreement_compares_another_batch_shape(profile, chain, tmp_path):
    workspace = linked_workspace(chain, tmp_path, "models", "data", "labels")
    out = succeed("generate_teacher", profile, tmp_path, *LABEL, "--self-agreement", "12")
    results = json.loads(out.strip().splitlines()[-1])
    assert results["prompts"] == 12
    parted = results["parted_at_a_near_tie"] + results["parted_otherwise"]
    assert results["identical"] + parted == 12
    assert results["parted_otherwise"] == 0
    assert results["identical"] >= 10
    assert (workspace / "self_agreement" / "results.json").is_file()


def test_training_killed_half_way_ends_with_the_same_bytes(profile, chain, tmp_path):
    workspace = linked_workspace(chain, tmp_path, "models", "labels")
    process = start_stage("train", profile, tmp_path, *TRAIN, "--save-every", "2")
    partial = workspace / "runs" / "distilled.partial"

    def past_a_checkpoint():
        # Later than the saved step, so that the metrics must be cut back too.
        metrics = partial / "metrics.jsonl"
        lines = metrics.read_text().count("\n") if metrics.exists() else 0
        return (partial / "state.pt").exists() and lines >= 3

    kill_when(process, past_a_checkpoint)
    out = succeed("train", profile, tmp_path, *TRAIN, "--save-every", "2")
    assert "going on from step" in out
    assert outputs(workspace / "runs/distilled") == outputs(chain / "runs/distilled")


@pytest.mark.parametrize("stage", ["prepare_data", "prepare_extended", "quantize"])
def test_a_stage_killed_half_way_starts_over_cleanly(profile, chain, tmp_path, stage):
    """What a killed run left behind is neither used nor kept."""
    made = {
        "prepare_data": ("data/base", ("models",), ("--holdout-percent", "25")),
        "prepare_extended": (
            "data/extended",
            ("models",),
            ("--bug-repairs", "8", "--augment-share", "0.5"),
        ),
        "quantize": ("export", ("models", "labels", "runs"), ()),
    }[stage]
    directory, parts, flags = made
    workspace = linked_workspace(chain, tmp_path, *parts)
    (workspace / directory).parent.mkdir(exist_ok=True)
    if stage == "prepare_extended":
        (workspace / "data/base").symlink_to(chain / "data/base")
    partial = (workspace / directory).with_name((workspace / directory).name + ".partial")
    partial.mkdir()
    (partial / "prompts.parquet").write_bytes(b"half")
    (partial / "weights.safetensors").write_bytes(b"half")
    succeed(stage, profile, tmp_path, *flags)
    assert outputs(workspace / directory) == outputs(chain / directory)


def edit_manifest(profile, tmp_path, **changes):
    """A copy of the profile whose first source is changed."""
    copy = tmp_path / "small"
    copy.mkdir()
    for name in ("base", "teacher", "data", "architecture.json"):
        (copy / name).symlink_to(profile / name)
    manifest = json.loads((profile / "data_manifest.json").read_text())
    manifest["sources"][0] |= changes
    (copy / "data_manifest.json").write_text(json.dumps(manifest))
    return copy


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"split": "test"}, "only train splits"),
        ({"file": "data/test-00000.parquet"}, "only train splits"),
        ({"excluded_splits": ["data/*"]}, "only train splits"),
        ({"sha256": "0" * 64}, "sha256"),
        ({"sha256": None}, "no sha256 is pinned"),
        ({"bytes": 17}, "bytes, expected 17"),
        ({"rows": 61}, "60 rows, the manifest states 61"),
        ({"columns": ["question"]}, "columns"),
        ({"schema": "unknown"}, "no schema 'unknown'"),
        ({"file": "data/missing.parquet"}, "is missing"),
    ],
    ids=lambda v: "-".join(v) if isinstance(v, dict) else None,
)
def test_a_source_that_is_not_what_the_manifest_says_is_refused(
    profile, chain, tmp_path, changes, message
):
    changed = edit_manifest(profile, tmp_path, **changes)
    workspace = tmp_path / "workspace" / "small"
    workspace.mkdir(parents=True)
    (workspace / "models").symlink_to(chain / "models")
    result = run_stage("prepare_data", changed, workspace.parent)
    assert result.returncode == 1
    assert message in result.stderr.strip().splitlines()[-1]
    assert not (workspace / "data/base").exists()


def test_a_base_whose_config_differs_from_the_architecture_is_refused(profile, tmp_path):
    copy = edit_manifest(profile, tmp_path)
    architecture = json.loads((profile / "architecture.json").read_text())
    architecture["dimensions"]["rope_theta"] = 10000
    (copy / "architecture.json").unlink()
    (copy / "architecture.json").write_text(json.dumps(architecture))
    result = run_stage("download_models", copy, tmp_path / "workspace")
    assert result.returncode == 1
    assert "differs from architecture.json in rope_theta" in result.stderr


def test_too_little_room_for_a_prompt_is_refused(profile, chain, tmp_path):
    linked_workspace(chain, tmp_path, "models", "data")
    result = run_stage("generate_teacher", profile, tmp_path, "--max-output-tokens", "5000")
    assert result.returncode == 1
    assert "leaves no room for a prompt" in result.stderr


def test_label_shards_have_the_stated_schema(chain):
    file = next((chain / "labels/train").glob("*.parquet"))
    names = pq.ParquetFile(file).schema_arrow.names
    assert names == [
        *("id", "source", "prompt_token_ids", "output_token_ids", "finish_reason"),
        *("top_ids", "top_logprobs", "margin"),
    ]


def test_rejections_continue_from_the_drafts_first_wrong_token(profile, chain, tmp_path):
    """Against transformers: where the draft's argmax leaves the label, and what the teacher says
    after the draft's own token; killed once, and trained on together with the labels."""
    workspace = linked_workspace(chain, tmp_path, "models", "labels", "runs")
    flags = (*LABEL, "--from-rejections", "distilled", "--logprobs", "5")
    process = start_stage("generate_teacher", profile, tmp_path, *flags)
    shards = workspace / "labels-rejections.partial" / "train"
    kill_when(process, lambda: any(shards.glob("*.parquet")))
    succeed("generate_teacher", profile, tmp_path, *flags)

    made = {r["id"]: r for r in read_labels(workspace / "labels-rejections", "train")}
    rows = read_stage(workspace / "labels-rejections", "")["rows"]
    labels = read_labels(workspace / "labels", "train")
    assert rows["in"] == len(labels) == len(made) + sum(rows["dropped"].values())
    assert not read_labels(workspace / "labels-rejections", "holdout")
    draft = AutoModelForCausalLM.from_pretrained(
        workspace / "runs/distilled/checkpoint", dtype="float32"
    )
    teacher = AutoModelForCausalLM.from_pretrained(workspace / "models/teacher", dtype="float32")
    checked = 0
    for label in labels[:12]:
        found = made.get(f"{label['id']}/rejection")
        prompt, output = label["prompt_token_ids"], label["output_token_ids"]
        logits = draft(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
        wrong = (logits.argmax(-1) != torch.tensor(output)).nonzero()[:, 0].tolist()
        if found is None:
            assert not wrong or logits[wrong[0]].argmax().item() in EOS
            continue
        at = wrong[0]
        context = prompt + output[:at] + [logits[at].argmax().item()]
        assert found["prompt_token_ids"] == context
        first = teacher(torch.tensor([context])).logits[0, -1]
        assert first[found["output_token_ids"][0]] > first.max() - 1e-3
        checked += 1
    assert checked >= 6
    succeed("train", profile, tmp_path, *TRAIN, "--name", "more", "--also", "labels-rejections")
    assert read_stage(workspace / "runs/more", "")["rows"]["in"] == len(labels) + len(made)
