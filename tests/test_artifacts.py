"""Finished or not, same or other, whole or damaged: what a stage's directory can be."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys

import pytest
from profiles import ROOT

import artifacts
from artifacts import ArtifactError, Stage, account, load_profile, read_stage


def make_stage(directory, arguments=None, inputs=None):
    return Stage(
        "test", directory, "python test.py", arguments or {"n": 1}, inputs or {"x": "a" * 64}
    )


def complete(stage, text="content", **options):
    with stage.working_directory(**options) as directory:
        (directory / "part").mkdir(exist_ok=True)
        (directory / "part" / "file").write_text(text)
        return stage.finish()


def test_a_finished_stage_describes_itself(tmp_path):
    record = complete(make_stage(tmp_path / "out"))
    again = read_stage(tmp_path / "out", "python test.py")
    assert again == record
    assert list(again["outputs"]) == ["part/file"]
    assert again["arguments"] == {"n": 1}
    assert again["versions"]["torch"]
    assert not (tmp_path / "out.partial").exists()


def test_same_arguments_and_inputs_are_done_others_stop(tmp_path):
    complete(make_stage(tmp_path / "out"))
    assert make_stage(tmp_path / "out").is_done()
    with pytest.raises(ArtifactError, match=r"n: 1 there, 2 now.*python test.py --force"):
        make_stage(tmp_path / "out", {"n": 2}).is_done()
    with pytest.raises(ArtifactError, match="x: "):
        make_stage(tmp_path / "out", inputs={"x": "b" * 64}).is_done()
    assert not make_stage(tmp_path / "out", {"n": 2}).is_done(force=True)


def test_a_kill_while_finishing_loses_nothing(tmp_path, monkeypatch):
    """Killed while outputs are hashed: the run goes on. Killed at the renames: it is completed."""
    stage = make_stage(tmp_path / "out")

    def kill(*_):
        raise RuntimeError("killed")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError):
        patch.setattr(artifacts, "git_commit", kill)
        complete(stage, resume=True)
    assert not stage.is_done()
    with stage.working_directory(resume=True) as directory:
        assert (directory / "part/file").read_text() == "content", "thrown away"
    with monkeypatch.context() as patch, pytest.raises(RuntimeError):
        patch.setattr(artifacts.os, "rename", kill)
        complete(stage, resume=True)
    assert make_stage(tmp_path / "out").is_done()
    assert not stage.partial.exists()


def test_a_kill_between_the_renames_of_a_replacement_is_completed(tmp_path, monkeypatch):
    complete(make_stage(tmp_path / "out"), "old")
    calls, rename = [], os.rename

    def once(a, b):
        if calls:
            raise RuntimeError("killed")
        calls.append(a)
        rename(a, b)

    newer = make_stage(tmp_path / "out", {"n": 2})
    with monkeypatch.context() as patch, pytest.raises(RuntimeError):
        patch.setattr(artifacts.os, "rename", once)
        complete(newer, "new")
    assert not (tmp_path / "out").exists()
    assert make_stage(tmp_path / "out", {"n": 2}).is_done()
    assert (tmp_path / "out/part/file").read_text() == "new"


def test_what_another_stage_made_is_never_replaced(tmp_path):
    complete(make_stage(tmp_path / "out"))
    other = Stage("other", tmp_path / "out", "python other.py", {"n": 1}, {})
    with pytest.raises(ArtifactError, match="was made by test"):
        other.is_done(force=True)


def test_the_named_command_is_the_one_that_ran(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/x/train.py", "--name", "my run", "--force", "--seed", "3"])
    assert artifacts.own_command() == "python train.py --name 'my run' --seed 3"


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "nan", ""])
def test_senseless_numbers_are_refused(text):
    with pytest.raises(argparse.ArgumentTypeError):
        artifacts.positive(text)
    if text != "0" and text != "1.5":
        with pytest.raises(argparse.ArgumentTypeError):
            artifacts.number_between(0, 2)(text)


def test_an_unfinished_directory_is_not_taken_for_a_finished_one(tmp_path):
    stage = make_stage(tmp_path / "out")
    with pytest.raises(RuntimeError), stage.working_directory() as directory:
        (directory / "file").write_text("half")
        raise RuntimeError("killed")
    assert not (tmp_path / "out").exists()
    with pytest.raises(ArtifactError, match="was not finished; run: python test.py"):
        read_stage(tmp_path / "out", "python test.py")
    with pytest.raises(ArtifactError, match="is missing; run: python other.py"):
        read_stage(tmp_path / "nothing", "python other.py")


def test_resuming_keeps_the_same_run_and_never_another(tmp_path):
    stage = make_stage(tmp_path / "out")
    with pytest.raises(RuntimeError), stage.working_directory(resume=True) as directory:
        (directory / "shard").write_text("done")
        raise RuntimeError("killed")
    with pytest.raises(ArtifactError, match="unfinished run that differs"):
        complete(make_stage(tmp_path / "out", {"n": 2}), resume=True)
    assert (tmp_path / "out.partial" / "shard").exists(), "another run's work was lost"
    record = complete(make_stage(tmp_path / "out"), resume=True)
    assert sorted(record["outputs"]) == ["part/file", "shard"]
    with pytest.raises(RuntimeError), stage.working_directory(resume=True) as directory:
        (directory / "shard").write_text("done")
        raise RuntimeError("killed")
    forced = complete(make_stage(tmp_path / "out", {"n": 2}), resume=True, force=True)
    assert list(forced["outputs"]) == ["part/file"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: (d / "part/file").write_text("contenT"), "sha256"),
        (lambda d: (d / "part/file").write_text("short"), "bytes, expected"),
        (lambda d: (d / "part/file").unlink(), "is missing"),
        (lambda d: (d / "part/extra").write_text("x"), "did not write: part/extra"),
        (lambda d: (d / "stage.json").write_text('{"format": 1'), "not JSON"),
        (lambda d: (d / "stage.json").write_text('{"format": 9}'), "format 9"),
        (lambda d: (d / "stage.json").write_text('{"format": 1}'), "not a stage record"),
        (lambda d: (d / "stage.json").write_text("[]"), "not a stage record"),
    ],
)
def test_damage_is_named_with_the_command_that_mends_it(tmp_path, damage, message):
    complete(make_stage(tmp_path / "out"))
    damage(tmp_path / "out")
    with pytest.raises(ArtifactError, match=message) as error:
        read_stage(tmp_path / "out", "python test.py")
    assert "python test.py" in str(error.value)


def test_two_runs_do_not_write_the_same_directory(tmp_path):
    """The lock holds across processes."""
    code = (
        "import sys, pathlib; sys.path.insert(0, sys.argv[1])\n"
        "from artifacts import Stage, ArtifactError\n"
        "stage = Stage('t', pathlib.Path(sys.argv[2]), 'c', {}, {})\n"
        "try:\n"
        "    with stage.working_directory(): pass\n"
        "except ArtifactError as error: print(error)\n"
    )
    with make_stage(tmp_path / "out").working_directory():
        command = [sys.executable, "-c", code, str(ROOT), str(tmp_path / "out")]
        result = subprocess.run(command, capture_output=True, text=True)
    assert "another run is writing" in result.stdout


def test_replacing_leaves_nothing_of_the_old(tmp_path):
    complete(make_stage(tmp_path / "out"), "old")
    complete(make_stage(tmp_path / "out", {"n": 2}), "new")
    assert (tmp_path / "out/part/file").read_text() == "new"
    left = {p.name for p in tmp_path.iterdir()}
    assert left == {"out", ".out.lock"}


def test_atomic_write_keeps_the_old_file_when_it_fails(tmp_path, monkeypatch):
    path = tmp_path / "file.json"
    artifacts.write_json(path, {"old": 1})

    def full(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(artifacts.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        artifacts.write_json(path, {"new": 2})
    assert json.loads(path.read_text()) == {"old": 1}


def test_rows_that_do_not_add_up_are_a_bug():
    account(10, 7, {"duplicate": 2}, 1)
    with pytest.raises(AssertionError, match="do not add up"):
        account(10, 7, {"duplicate": 2})


def test_profiles_know_their_commands(tmp_path):
    assert load_profile("qwen3").command("train") == "python train.py"
    with pytest.raises(ArtifactError, match="architecture.json is missing"):
        load_profile(str(tmp_path))
    (tmp_path / "architecture.json").write_text('{"format": 1, "name": "x"}')
    with pytest.raises(ArtifactError, match="lacks base, teacher"):
        load_profile(str(tmp_path))
