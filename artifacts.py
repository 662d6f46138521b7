"""Artefacts: profiles, stage records, hashes and atomic writes.

Stages meet only through directories. A finished directory holds `stage.json`, written last, that
says what made it (argv, resolved arguments, hashes of its inputs, versions, commit) and what is in
it (every file with size and sha256). Until then its files live in `<directory>.partial/`, so that
unfinished work can't be taken for finished: the directory appears by one rename.

"Already done" means: same arguments, same inputs, outputs intact. Anything else stops with an
`ArtifactError` that names the command to run.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent
STAGE_FORMAT = 1
PACKAGES = ("torch", "transformers", "datasets", "safetensors", "pyarrow", "numpy", "vllm")


class ArtifactError(Exception):
    """Something on disk is missing, unfinished, damaged or another run's; says what to do."""


# ------------------------------------------------------------------------------------- files


def sha256_file(path: Path) -> str:
    """sha256 of a file's bytes, as 64 hex digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest(value: Any) -> str:
    """sha256 of a JSON value in canonical form (sorted keys, no spaces), as 64 hex digits."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a file beside `path`, then put it there: the old one or the new, never a
    part, whenever a kill comes. What a kill leaves behind, `Stage.finish` removes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    write(partial)
    with open(partial, "rb") as file:
        os.fsync(file.fileno())
    os.replace(partial, path)


def write_atomic(path: Path, data: bytes) -> None:
    """`replace_file` with bytes that are at hand."""
    replace_file(path, lambda partial: partial.write_bytes(data))


def write_json(path: Path, value: Any) -> None:
    write_atomic(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def read_json(path: Path, remedy: str) -> Any:
    """Read a JSON file; ArtifactError with `remedy` where it is missing or not JSON."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise ArtifactError(f"{path} is missing; {remedy}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ArtifactError(f"{path} is not JSON ({error}); {remedy}") from None


def check_file(path: Path, expected: dict, remedy: str) -> None:
    """Compare a file with `{"bytes": n, "sha256": hex}` (None: not known); raises ArtifactError."""
    if not path.is_file():
        raise ArtifactError(f"{path} is missing; {remedy}")
    size = path.stat().st_size
    if expected.get("bytes") is not None and size != expected["bytes"]:
        raise ArtifactError(f"{path} has {size} bytes, expected {expected['bytes']}; {remedy}")
    if expected.get("sha256") is not None:
        actual = sha256_file(path)
        if actual != expected["sha256"]:
            raise ArtifactError(
                f"{path} has sha256 {actual}, expected {expected['sha256']}; {remedy}"
            )


# ---------------------------------------------------------------------------------- profiles


@dataclass(frozen=True)
class Profile:
    """One pair of models and its data: `architecture.json` + `data_manifest.json` + a workspace.

    name: what `--profile` was given; directory: where the two files are; workspace: where the
    stages read and write.
    """

    name: str
    directory: Path
    workspace: Path
    architecture: dict = field(repr=False)

    @property
    def flag(self) -> str:
        """The flag to add to a command that is named in an error."""
        return "" if self.name == "qwen3" else f" --profile {shlex.quote(self.name)}"

    def command(self, stage: str) -> str:
        return f"python {stage}.py{self.flag}"

    def manifest(self) -> dict:
        """The data manifest, format-checked."""
        path = self.directory / "data_manifest.json"
        manifest = read_json(path, "restore it from the repository")
        if manifest.get("format") != 1:
            raise ArtifactError(f"{path}: format {manifest.get('format')!r}, this code reads 1")
        return manifest


REQUIRED_ARCHITECTURE = (
    *("name", "base", "teacher", "dimensions", "thinking", "eos_token_ids"),
    *("quantization", "draft_length", "labelling_engine"),
)


def load_profile(name: str) -> Profile:
    """`qwen3` (the repository's root), `tiny`, or a directory with the two JSON files."""
    directory = {"qwen3": ROOT, "tiny": ROOT / "tiny"}.get(name, Path(name))
    path = directory / "architecture.json"
    architecture = read_json(path, "--profile takes qwen3, tiny or a directory that has this file")
    if architecture.get("format") != 1:
        raise ArtifactError(f"{path}: format {architecture.get('format')!r}, this code reads 1")
    missing = [key for key in REQUIRED_ARCHITECTURE if key not in architecture]
    if missing:
        raise ArtifactError(f"{path} lacks {', '.join(missing)}")
    workspace = Path(os.environ.get("WORKSPACE") or ROOT / "workspace") / architecture["name"]
    return Profile(name, directory, workspace, architecture)


def parse_profile_args(
    parser: argparse.ArgumentParser, argv: list[str] | None, **tiny: Any
) -> argparse.Namespace:
    """Add `--profile` and parse; for a small pair, `tiny` replaces defaults of those names.

    Sizes that suit an 8B teacher don't suit a pair that runs on a laptop; they still have one home,
    the function that calls this as its last step. A pair is small where its architecture.json says
    that transformers labels it: the embedded one, and any profile of that kind elsewhere.
    """
    parser.allow_abbrev = False  # or `--prof tiny` would run tiny with the real pair's sizes
    parser.add_argument(
        "--profile",
        default="qwen3",
        metavar="P",
        help="qwen3 (the real pair), tiny (embedded, for a CPU), or a directory with its own "
        "architecture.json and data_manifest.json (default: qwen3)",
    )
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--profile", default="qwen3")
    if is_small(early.parse_known_args(argv)[0].profile):
        # After the arguments: add_argument's own default would win over an earlier one.
        parser.set_defaults(**tiny)
    return parser.parse_args(argv)


def is_small(name: str) -> bool:
    """Whether a profile's labelling engine is transformers; False where it can't be read."""
    try:
        return load_profile(name).architecture["labelling_engine"] == "transformers"
    except ArtifactError:
        return False  # the stage itself says what is wrong with it


def positive(text: str) -> int:
    """argparse type: a whole number from 1 on."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def not_negative(text: str) -> int:
    """argparse type: a whole number from 0 on."""
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 on")
    return int(text)


def number_between(low: float, high: float) -> Callable[[str], float]:
    """argparse type: a finite number in low..high."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high or math.isinf(value):
            raise argparse.ArgumentTypeError(f"{text!r} is not a number in {low:g}..{high:g}")
        return value

    return parse


def plain_name(text: str) -> str:
    """argparse type: a name for a directory in the workspace, not a path."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", text) or text.endswith(".partial"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a plain name")
    return text


def run_command(
    main: Callable[[argparse.Namespace], int | None],
    parse_args: Callable[[list[str] | None], argparse.Namespace],
    argv: list[str] | None = None,
) -> int:
    """Run a stage's main; an ArtifactError becomes one line on stderr and exit status 1.

    So does what the operating system refuses: a full disk, a path that can't be written. SIGTERM
    unwinds like an exit, so that what a stage started ends with it.
    """
    args = parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        return main(args) or 0
    except ArtifactError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"error: {where}{error.strerror or error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; run the same command again to go on", file=sys.stderr)
        return 130


# ------------------------------------------------------------------------------------ stages


def versions() -> dict[str, str]:
    """Installed versions of the packages that can change an artefact."""
    found = {"python": sys.version.split()[0]}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def git_commit() -> str | None:
    """HEAD of the checkout, with `+` where tracked files differ; None outside a checkout."""
    try:
        run = ["git", "-C", str(ROOT)]
        head = subprocess.run([*run, "rev-parse", "HEAD"], capture_output=True, text=True)
        dirty = subprocess.run([*run, "status", "--porcelain", "-uno"], capture_output=True)
    except OSError:
        return None
    return head.stdout.strip() + ("+" if dirty.stdout else "") if head.returncode == 0 else None


# In a stage's directory, but not made by it: its record, the mark of a release, the marker of an
# unfinished run, and what a run needs only to go on. A write that was killed leaves a name that
# starts with a dot.
ADDED = ("stage.json", "release.json")
UNFINISHED = ("started.json", "state.pt", "best.safetensors")
NO_OUTPUT = (*ADDED, *UNFINISHED)


def own_command() -> str:
    """The command that is running, as a person would type it, without `--force`."""
    words = [Path(sys.argv[0]).name, *(word for word in sys.argv[1:] if word != "--force")]
    return f"python {shlex.join(words)}"


def list_outputs(directory: Path) -> dict[str, dict]:
    """`{relative path: {"bytes", "sha256"}}` of every file but `stage.json`, sorted."""
    files = sorted(p for p in directory.rglob("*") if p.is_file() and p.name not in NO_OUTPUT)
    return {
        str(p.relative_to(directory)): {"bytes": p.stat().st_size, "sha256": sha256_file(p)}
        for p in files
    }


def read_stage(directory: Path, command: str, verify: bool = True) -> dict:
    """The stage record of a finished directory; checks every output's size and sha256.

    directory: what a stage wrote; command: what makes it, for the error.
    Raises ArtifactError where it is missing, unfinished or changed since.
    """
    if not (directory / "stage.json").is_file():
        partial = directory.with_name(directory.name + ".partial")
        state = "was not finished" if partial.exists() else "is missing"
        raise ArtifactError(f"{directory} {state}; run: {command}")
    record = read_json(directory / "stage.json", f"run: {command} --force")
    known = isinstance(record, dict) and "outputs" in record
    if not known and (not isinstance(record, dict) or record.get("format") == STAGE_FORMAT):
        raise ArtifactError(f"{directory}/stage.json is not a stage record; run: {command} --force")
    if record.get("format") != STAGE_FORMAT:
        raise ArtifactError(
            f"{directory}: stage format {record.get('format')!r}, this code reads {STAGE_FORMAT}; "
            f"run: {command} --force"
        )
    if verify:
        present = {str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file()}
        extra = present - set(record["outputs"]) - set(ADDED)
        if extra:
            raise ArtifactError(
                f"{directory} has a file that its stage did not write: {min(extra)}; "
                f"move it away or run: {command} --force"
            )
        for name, expected in record["outputs"].items():
            check_file(directory / name, expected, f"run: {command} --force")
    return record


def stage_digest(directory: Path, command: str) -> str:
    """One hash over all output files of a finished stage; reads and verifies each of them."""
    return digest(read_stage(directory, command)["outputs"])


@dataclass
class Stage:
    """One run of a stage that writes `directory`.

    arguments: resolved flags that can change the output; inputs: `{name: sha256}` of what is read.
    """

    name: str
    directory: Path
    command: str
    arguments: dict[str, Any]
    inputs: dict[str, str | None]
    argv: list[str] = field(default_factory=lambda: list(sys.argv))
    started: float = field(default_factory=time.monotonic)

    @property
    def partial(self) -> Path:
        return self.directory.with_name(self.directory.name + ".partial")

    @property
    def identity(self) -> dict:
        # Through JSON once, so that tuples and lists compare as they will after a reload.
        return json.loads(json.dumps({"arguments": self.arguments, "inputs": self.inputs}))

    def is_done(self, force: bool = False) -> bool:
        """True where the directory already is what this run would make.

        Raises ArtifactError where it was made with other arguments or inputs and `force` is off.
        """
        self._recover()
        if not self.directory.exists():
            return False
        self._check_owner()
        if force:
            return False
        record = read_stage(self.directory, self.command)
        changed = differences({k: record.get(k) for k in ("arguments", "inputs")}, self.identity)
        if changed:
            raise ArtifactError(
                f"{self.directory} was made differently ({changed}); to replace it run: "
                f"{self.command} --force"
            )
        print(f"{self.name}: {self.directory} is up to date")
        return True

    def _check_owner(self) -> None:
        """Never replace what another stage made, whatever the flags say."""
        path = self.directory / "stage.json"
        if not path.is_file():
            return
        record = read_json(path, f"remove {self.directory} if it is of no use")
        maker = record.get("stage") if isinstance(record, dict) else None
        if maker not in (None, self.name):
            raise ArtifactError(f"{self.directory} was made by {maker}; take another name")

    def _recover(self) -> None:
        """Complete what a kill between the last writes and renames of `finish` left."""
        if not self.directory.exists() and self._replaced.exists():
            os.rename(self._replaced, self.directory)
        if (self.partial / "stage.json").is_file():
            record = read_json(self.partial / "stage.json", f"remove {self.partial}")
            if {k: record.get(k) for k in ("arguments", "inputs")} == self.identity:
                self._put_in_place()

    @property
    def _replaced(self) -> Path:
        return self.directory.with_name(self.directory.name + ".replaced")

    def _put_in_place(self) -> None:
        for name in UNFINISHED:
            (self.partial / name).unlink(missing_ok=True)
        shutil.rmtree(self._replaced, ignore_errors=True)
        if self.directory.exists():
            os.rename(self.directory, self._replaced)
        os.rename(self.partial, self.directory)
        shutil.rmtree(self._replaced, ignore_errors=True)

    @contextlib.contextmanager
    def working_directory(self, resume: bool = False, force: bool = False) -> Iterator[Path]:
        """The `.partial` directory to write into, locked against a second run.

        resume: go on with what an interrupted run of the same identity left there; what a run of
        another identity left is hours of somebody's work, so it stops unless `force` is on.
        Without resume it starts empty.
        """
        self.directory.parent.mkdir(parents=True, exist_ok=True)
        lock_path = self.directory.with_name(f".{self.directory.name}.lock")
        with open(lock_path, "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ArtifactError(
                    f"another run is writing {self.directory}; wait for it to end"
                ) from None
            marker = self.partial / "started.json"
            begun = read_json(marker, "remove it") if resume and marker.is_file() else None
            changed = differences(begun, self.identity) if begun else ""
            empty = begun is not None and len(list(self.partial.iterdir())) == 1
            if changed and not force and not empty:
                raise ArtifactError(
                    f"{self.partial} is of an unfinished run that differs ({changed}); finish that "
                    f"one, or discard it with: {self.command} --force"
                )
            if begun is None or changed:
                shutil.rmtree(self.partial, ignore_errors=True)
            self.partial.mkdir(parents=True, exist_ok=True)
            write_json(marker, self.identity)
            yield self.partial

    def finish(self, rows: dict | None = None, results: dict | None = None) -> dict:
        """Write `stage.json`, then put the directory in place by a rename. Returns the record."""
        for leftover in self.partial.rglob(".*.tmp"):
            leftover.unlink()
        record = {
            "format": STAGE_FORMAT,
            "stage": self.name,
            "argv": self.argv,
            **self.identity,
            "outputs": list_outputs(self.partial),
            "rows": rows,
            "results": results,
            "versions": versions(),
            "git_commit": git_commit(),
            "wall_seconds": round(time.monotonic() - self.started, 3),
            "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        write_json(self.partial / "stage.json", record)
        self._put_in_place()
        print(f"{self.name}: wrote {self.directory} in {record['wall_seconds']:.1f} s")
        return record


def differences(old: dict, new: dict, prefix: str = "") -> str:
    """A short text of the leaves in which two nested dicts differ; empty where they are equal."""
    found = []
    for key in sorted(set(old) | set(new)):
        a, b = old.get(key), new.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            found.append(differences(a, b, f"{prefix}{key}."))
        elif a != b:
            found.append(f"{prefix}{key}: {shorten(a)} there, {shorten(b)} now")
    return "; ".join(text for text in found if text)


def shorten(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 20 else text[:16] + "…"


def account(total: int, kept: int, dropped: dict[str, int], failed: int = 0) -> dict:
    """The row account of a stage: in = kept + dropped + failed, or it is a bug and raises."""
    if total != kept + sum(dropped.values()) + failed:
        raise AssertionError(f"rows do not add up: {total} in, {kept=}, {dropped=}, {failed=}")
    return {"in": total, "kept": kept, "dropped": dropped, "failed": failed}
