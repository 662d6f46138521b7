"""Pinned files: from the Hub at an exact revision, or from the profile's own directory.

The Hub client does not verify sha256: corrupt bytes of the right size pass. So every file is hashed
here after it arrives, and the stages hash it again before they use it.
"""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx2  # what the client speaks HTTP with; its transport errors come through unchanged
from huggingface_hub import HfApi, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoSibling

from artifacts import ArtifactError, Profile, Stage, check_file, digest


def fetch(entry: dict, kind: str, source: Path, destination: Path, pin_command: str) -> None:
    """Bring an entry's files to `destination` and verify each against its pin.

    entry: {"repo", "revision", "files": [{"path", "bytes", "sha256"}], "path"?}; repo None means
    files that lie in the profile's directory `source`/`path`. kind: "model" or "dataset".
    Raises ArtifactError: one line that says which file, what was expected and what to do.
    """
    unpinned = [file["path"] for file in entry["files"] if file["sha256"] is None]
    if unpinned:
        raise ArtifactError(
            f"{entry['repo']}: no sha256 is pinned for {', '.join(unpinned)}; {pin_command}"
        )
    if entry["repo"] is None:
        copy_local(entry, source, destination)
    else:
        download(entry, kind, destination)
    for file in entry["files"]:
        check_file(destination / file["path"], file, "remove it and run the same command again")


def copy_local(entry: dict, source: Path, destination: Path) -> None:
    """Copy an entry's files out of the profile's directory, each checked before."""
    origin = source / entry.get("path", "")
    for file in entry["files"]:
        check_file(origin / file["path"], file, "restore it from the repository")
        target = destination / file["path"]
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(origin / file["path"], target)


def download(entry: dict, kind: str, destination: Path) -> None:
    """snapshot_download of exactly the pinned files; the client resumes what is half there.

    The repository is asked about first: where it can't be reached, snapshot_download takes what
    lies in the directory for the answer, without an error.
    """
    repo, revision = entry["repo"], entry["revision"]
    names = [file["path"] for file in entry["files"]]
    with clear_errors(repo, revision, kind):
        info = HfApi().repo_info(repo, repo_type=kind, revision=revision)
        if info.sha != revision:
            raise ArtifactError(f"{repo}: asked for revision {revision}, the Hub has {info.sha}")
        missing = sorted(set(names) - {sibling.rfilename for sibling in info.siblings})
        if missing:
            raise ArtifactError(f"{repo} at {revision} has no file {', '.join(missing)}")
        snapshot_download(
            repo,
            repo_type=kind,
            revision=revision,
            local_dir=destination,
            allow_patterns=[fnmatch_escape(name) for name in names],
        )
    shutil.rmtree(destination / ".cache", ignore_errors=True)


@contextlib.contextmanager
def clear_errors(repo: str, revision: str, kind: str) -> Iterator[None]:
    """Turn what the client raises into one line that says what to do."""
    try:
        yield
    except GatedRepoError:
        text = f"{repo} is gated: accept its terms on the Hub and set HF_TOKEN"
        raise ArtifactError(text) from None
    except RepositoryNotFoundError:
        raise ArtifactError(f"{repo}: no such {kind} on the Hub, or it needs HF_TOKEN") from None
    except RevisionNotFoundError:
        raise ArtifactError(f"{repo} has no revision {revision}; compare the pin") from None
    except EntryNotFoundError as error:
        raise ArtifactError(f"{repo} at {revision}: {first_line(error)}") from None
    except (OfflineModeIsEnabled, httpx2.TransportError) as error:
        raise ArtifactError(
            f"the Hub can't be reached for {repo} ({first_line(error)}); connect and run again"
        ) from None
    except (HfHubHTTPError, OSError) as error:
        raise ArtifactError(f"{repo}: {first_line(error)}; run the same command again") from None


def fnmatch_escape(name: str) -> str:
    """A pattern that matches just this name."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


def first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__


# In any part of a path: some data sets keep their splits in directories.
HELD_OUT = re.compile(r"(?<![a-z])(test|valid|eval|held|dev(?![a-z])|develop)")
HELD_OUT_FILE = re.compile(r"test|valid|eval")  # in a file's own name wherever it stands
# A data set's own files are named by their split.
TRAIN_FILE = re.compile(r"train(?![a-z])")


def check_split(source: dict) -> None:
    """Refuse a manifest entry that names anything but a train file.

    A path is compared as it is stored: plain ASCII, relative, without detours.
    """
    name = source["file"]
    folded = name.lower()
    parts = name.split("/")
    detour = not name.isascii() or "\\" in name or any(p in ("", ".", "..") for p in parts)
    patterns = (pattern.lower() for pattern in source["excluded_splits"])
    excluded = any(fnmatch.fnmatch(folded, pattern) for pattern in patterns)
    foreign = source.get("repo") is not None and not TRAIN_FILE.match(folded.split("/")[-1])
    held_out = HELD_OUT.search(folded) or HELD_OUT_FILE.search(folded.split("/")[-1])
    if source["split"] != "train" or detour or excluded or foreign or held_out:
        raise ArtifactError(
            f"data_manifest.json: {source['name']} names {name} of split {source['split']!r}; "
            "only train splits may be read"
        )


def fetch_source(profile: Profile, source: dict, command: str) -> Path:
    """The verified parquet file of one manifest source, fetched once into `downloads/<name>`."""
    check_split(source)
    file = {"path": source["file"], "bytes": source["bytes"], "sha256": source["sha256"]}
    entry = {"repo": source["repo"], "revision": source["revision"], "files": [file]}
    stage = Stage(
        name=f"fetch ({source['name']})",
        directory=profile.workspace / "downloads" / source["name"],
        command=command,
        arguments={},
        inputs={"pin": digest(entry)},
    )
    # A changed pin replaces the download: nothing else was made of that directory.
    try:
        done = stage.is_done()
    except ArtifactError:
        done = False
    if not done:
        remedy = f"run: {profile.command('prepare_data')} --pin --write"
        with stage.working_directory(resume=True, force=True) as directory:
            fetch(entry, "dataset", profile.directory, directory, remedy)
            stage.finish()
    return stage.directory / source["file"]


# ------------------------------------------------------------------------------------- pinning


def look_up(entry: dict, kind: str) -> list[dict]:
    """What the Hub states of an entry's files at the pinned revision: path, bytes, sha256.

    LFS files carry their sha256. For a plain git file the Hub has only a git blob id, so the file,
    which is small, is fetched, compared with that id and hashed here.
    """
    repo, revision = entry["repo"], entry["revision"]
    with clear_errors(repo, revision, kind):
        info = HfApi().repo_info(repo, repo_type=kind, revision=revision, files_metadata=True)
        siblings = {sibling.rfilename: sibling for sibling in info.siblings}
        found = []
        for file in entry["files"]:
            sibling = siblings.get(file["path"])
            if sibling is None:
                raise ArtifactError(f"{repo} at {revision} has no file {file['path']}")
            if sibling.lfs is not None:
                sha256 = sibling.lfs.sha256
            else:
                sha256 = hash_plain_file(repo, kind, revision, sibling)
            found.append({"path": file["path"], "bytes": sibling.size, "sha256": sha256})
    return found


def hash_plain_file(repo: str, kind: str, revision: str, sibling: RepoSibling) -> str:
    """sha256 of a git file, after its git blob id was found to be the one that the Hub states."""
    with tempfile.TemporaryDirectory() as directory:
        path = hf_hub_download(
            repo, sibling.rfilename, repo_type=kind, revision=revision, local_dir=directory
        )
        data = Path(path).read_bytes()
    blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    if blob != sibling.blob_id:
        raise ArtifactError(f"{repo}: {sibling.rfilename} is not the blob {sibling.blob_id}")
    return hashlib.sha256(data).hexdigest()


def compare_pins(label: str, pinned: list[dict], found: list[dict]) -> tuple[list[str], list[str]]:
    """(lines of what would be filled in, lines of what contradicts a known pin); prints both."""
    filled, conflicts = [], []
    for pin, fact in zip(pinned, found, strict=True):
        for key in ("bytes", "sha256"):
            line = f"{label} {pin['path']} {key}: {pin[key]} pinned, {fact[key]} on the Hub"
            if pin[key] is None and fact[key] is not None:
                filled.append(line)
            elif pin[key] != fact[key]:
                conflicts.append(line)
    for line in filled:
        print(f"  missing   {line}")
    for line in conflicts:
        print(f"  CONFLICT  {line}")
    return filled, conflicts


def fill_pins(pins: list[tuple[str, str, dict, list[dict]]], write: bool) -> bool:
    """Compare entries with the Hub and, asked to, fill what is null; True where files changed.

    pins: (label, kind, entry for `look_up`, its file dicts as they stand in the JSON). A known pin
    is never overwritten: any conflict raises ArtifactError, and then nothing is filled.
    """
    facts, missing, wrong = [], [], []
    for label, kind, entry, pinned in pins:
        found = look_up(entry, kind)
        filled, conflicts = compare_pins(label, pinned, found)
        missing, wrong = missing + filled, wrong + conflicts
        facts.append((pinned, found))
    if wrong:
        raise ArtifactError(
            f"{len(wrong)} pins contradict the Hub, first: {wrong[0]}; a known pin is not "
            "overwritten: find out which is right and edit the file by hand"
        )
    if not missing:
        print("every pin is known and agrees with the Hub")
    elif not write:
        print(f"{len(missing)} values are missing; to fill them in add --write")
    else:
        for pinned, found in facts:
            for pin, fact in zip(pinned, found, strict=True):
                pin.update({k: v for k, v in fact.items() if pin[k] is None})
    return bool(missing) and write
