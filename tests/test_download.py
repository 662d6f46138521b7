"""Pinned downloads through the real Hub client, against a stand-in Hub that can misbehave."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import signal
import subprocess
import sys

import pytest
from hub_server import Repo, serve_hub
from profiles import random_qwen3

from artifacts import ROOT, ArtifactError
from hub import check_split

REVISION = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A small checkpoint's files, as a repository holds them."""
    directory = tmp_path_factory.mktemp("repo") / "model"
    config = random_qwen3(directory, vocab_size=300, seed=1)
    return config, {p.name: p.read_bytes() for p in directory.iterdir()}


@pytest.fixture
def setup(files, tmp_path):
    """(hub, profile directory, a function that runs download_models.py against the hub)."""
    config, contents = files
    repos = [
        Repo("models", name, REVISION, dict(contents), {"model.safetensors"})
        for name in ("test/base", "test/teacher")
    ]
    profile = tmp_path / "remote"
    profile.mkdir()
    pins = [
        {"path": p, "bytes": len(d), "sha256": hashlib.sha256(d).hexdigest()}
        for p, d in contents.items()
    ]
    entry = {"revision": REVISION, "licence": None, "files": pins}
    names = json.loads((ROOT / "architecture.json").read_text())["dimensions"]
    config = config | {"rope_theta": config["rope_parameters"]["rope_theta"]}
    architecture = {
        "format": 1,
        "name": "remote",
        "base": {"repo": "test/base"} | entry,
        "teacher": {"repo": "test/teacher"} | entry,
        "dimensions": {key: config[key] for key in names},
        "thinking": False,
        "eos_token_ids": [1, 0],
        "quantization": {},
        "draft_length": 16,
        "labelling_engine": "transformers",
    }

    def run(*flags, limit=None, **changes):
        text = json.dumps(architecture | changes)
        (profile / "architecture.json").write_text(text)
        environment = os.environ | {
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(tmp_path / "home"),
            "HF_HUB_OFFLINE": "0",
            "HF_TOKEN": "hf_secret",
            "WORKSPACE": str(tmp_path / "workspace"),
        }
        command = [sys.executable, str(ROOT / "download_models.py"), "--profile", str(profile)]

        def full_disk():
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

        return subprocess.run(
            [*command, *flags],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            preexec_fn=full_disk if limit else None,
        )

    with serve_hub(repos) as hub:
        yield hub, architecture, run, tmp_path / "workspace" / "remote" / "models"


def last_line(result):
    assert result.returncode == 1, result.stdout + result.stderr
    line = result.stderr.strip().splitlines()[-1]
    assert line.startswith("error: "), result.stderr
    return line


def test_every_pinned_file_arrives_and_the_token_is_neither_shown_nor_stored(setup, files):
    hub, _, run, models = setup
    result = run()
    assert result.returncode == 0, result.stderr
    for which in ("base", "teacher"):
        for name, data in files[1].items():
            assert (models / which / name).read_bytes() == data
        assert "hf_secret" not in (models / which / "stage.json").read_text()
    assert "hf_secret" not in result.stdout + result.stderr
    assert "Bearer hf_secret" in hub.authorization
    before = len(hub.requests)
    assert "up to date" in run().stdout
    assert len(hub.requests) == before, "asked again for what is there"


def test_same_size_wrong_bytes_are_found(setup, files):
    """The client accepts them; the stage must not."""
    hub, _, run, models = setup
    good = files[1]["model.safetensors"]
    hub.faults.wrong["model.safetensors"] = good[:-1] + bytes([good[-1] ^ 1])
    line = last_line(run())
    assert "model.safetensors has sha256" in line and "run" in line
    assert not (models / "base").exists()


def test_a_moved_revision_a_missing_repository_and_a_gated_one_are_told_apart(setup):
    hub, architecture, run, _ = setup
    base = architecture["base"]
    moved = last_line(run(base=base | {"revision": "f" * 40}))
    assert "test/base has no revision " + "f" * 40 in moved
    # Nothing was fetched of either: no partial directory may stand in the way of the right pin.
    assert "no such model" in last_line(run(base=base | {"repo": "test/nothing"}))
    hub.repos["models", "test/base"].gated = True
    assert "gated" in last_line(run()) and "HF_TOKEN" in last_line(run())


def test_a_file_that_the_repository_lacks_is_named(setup):
    hub, _, run, _ = setup
    del hub.repos["models", "test/base"].files["config.json"]
    assert "config.json" in last_line(run())


def test_no_network_is_one_line(setup):
    hub, _, run, _ = setup
    hub.url = "http://127.0.0.1:9"
    assert "can't be reached" in last_line(run())


def test_a_broken_transfer_is_mended(setup, files):
    hub, _, run, models = setup
    hub.faults.short["model.safetensors"] = 20_000
    result = run()
    if result.returncode:  # the client may try again by itself; if not, the next run must
        result = run()
    assert result.returncode == 0, result.stderr
    assert (models / "base" / "model.safetensors").read_bytes() == files[1]["model.safetensors"]
    assert hub.fetched("test/base/resolve/" + REVISION + "/model.safetensors") >= 2


def test_a_full_disk_is_one_line_and_leaves_nothing_that_looks_whole(setup, files):
    """A limit on file size stands in for it: writes beyond it fail as they do on a full disk."""
    _, _, run, models = setup
    line = last_line(run(limit=60_000))
    assert "run the same command again" in line
    assert not (models / "base").exists()
    result = run()
    assert result.returncode == 0, result.stderr
    assert (models / "base" / "model.safetensors").read_bytes() == files[1]["model.safetensors"]


def unpinned(architecture, **known):
    """The base's entry with null pins, but for what `known` states of config.json."""
    files = [
        {"path": f["path"], "bytes": None, "sha256": None} for f in architecture["base"]["files"]
    ]
    for file in files:
        if file["path"] == "config.json":
            file.update(known)
    return architecture["base"] | {"files": files}


def test_pinning_shows_first_writes_when_asked_and_fills_lfs_and_plain_files(setup, tmp_path):
    _, architecture, run, models = setup
    path = tmp_path / "remote" / "architecture.json"
    base = unpinned(architecture)
    assert "no sha256 is pinned" in last_line(run(base=base))
    shown = run("--pin", base=base)
    assert shown.returncode == 0, shown.stderr
    assert "missing   base model.safetensors sha256" in shown.stdout
    assert "add --write" in shown.stdout
    assert json.loads(path.read_text())["base"] == base, "written without being asked"
    written = run("--pin", "--write", base=base)
    assert written.returncode == 0, written.stderr
    assert json.loads(path.read_text())["base"]["files"] == architecture["base"]["files"]
    assert not (models / "base").exists()


def test_pinning_never_overwrites_a_known_pin(setup, tmp_path):
    _, architecture, run, _ = setup
    path = tmp_path / "remote" / "architecture.json"
    base = unpinned(architecture, sha256="0" * 64)
    line = last_line(run("--pin", "--write", base=base))
    assert "config.json sha256: " + "0" * 64 in line and "not overwritten" in line
    assert json.loads(path.read_text())["base"] == base, "filled in beside a contradiction"


def test_every_pin_that_agrees_is_said_to_agree(setup):
    _, _, run, _ = setup
    assert "every pin is known and agrees" in run("--pin").stdout


@pytest.mark.parametrize(
    ("file", "refused"),
    [
        ("data/train-00000-of-00001.parquet", False),
        ("main/train-00000-of-00001.parquet", False),
        ("latest/contest/train.parquet", False),
        ("devices/train.parquet", False),
        ("main/test/0000.parquet", True),
        ("data/Test-00000.parquet", True),
        ("default/validation/0.parquet", True),
        ("data/train_eval.parquet", True),
        ("dev/train.parquet", True),
        ("data/test_sft-00000.parquet", True),
        ("data/mytest-0.parquet", True),
        ("data/traintest-0.parquet", True),
        ("data/heldout-0.parquet", True),
        ("data/development-0.parquet", True),
        ("data/\uff54est-0.parquet", True),
        ("./socratic/train-0.parquet", True),
        ("main/../socratic/train-0.parquet", True),
        ("Socratic/train-0.parquet", True),
        ("../../x/train.parquet", True),
        ("/etc/train", True),
        ("data/other-0.parquet", True),
    ],
)
def test_a_held_out_split_is_known_by_any_part_of_its_path(file, refused):
    excluded = ["main/test-*", "socratic/*"]
    source = {"name": "x", "repo": "a/b", "file": file, "split": "train"}
    source |= {"excluded_splits": excluded}
    if not refused:
        return check_split(source)
    with pytest.raises(ArtifactError, match="only train splits"):
        check_split(source)
