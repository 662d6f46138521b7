"""Which checkpoint a run's name means, and what it was made from."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from artifacts import Profile, digest, read_stage, stage_digest


class Checkpoint(NamedTuple):
    """A checkpoint's directory, the digest of the stage that made it, and that of its labels."""

    directory: Path
    digest: str
    labels: str | None


def run_checkpoint(profile: Profile, run: str) -> Checkpoint:
    """The checkpoint of a training run; `base` is models/base.

    Raises ArtifactError, naming the command that makes it, where there is none.
    """
    if run == "base":
        directory = profile.workspace / "models" / "base"
        made_by = profile.command("download_models")
        return Checkpoint(directory, stage_digest(directory, made_by), None)
    command = profile.command("train") + ("" if run == "distilled" else f" --name {run}")
    record = read_stage(profile.workspace / "runs" / run, command)
    directory = profile.workspace / "runs" / run / "checkpoint"
    return Checkpoint(directory, digest(record["outputs"]), record["inputs"]["labels"])
