"""Stage 1: bring the base and the teacher, pinned to the byte.

Reads architecture.json; writes workspace/<profile>/models/base and models/teacher (3.4 + 0.6 GB
and 16.4 GB for the real pair). Every file is checked against its size and sha256; a download that
was interrupted goes on where it stopped.

    python download_models.py
    python download_models.py --profile tiny
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from artifacts import (
    ArtifactError,
    Profile,
    Stage,
    digest,
    load_profile,
    own_command,
    parse_profile_args,
    run_command,
    write_json,
)
from hub import fetch, fill_pins
from model import Config


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", choices=["base", "teacher"], help="bring one of the two (default: both)"
    )
    parser.add_argument("--force", action="store_true", help="bring them again")
    parser.add_argument(
        "--pin",
        action="store_true",
        help="compare architecture.json with the Hub at the pinned revisions; download nothing",
    )
    parser.add_argument(
        "--write", action="store_true", help="with --pin: fill in what is null, overwrite nothing"
    )
    return parse_profile_args(parser, argv)


def check_dimensions(profile: Profile, path: Path) -> None:
    """The base's config.json must say what architecture.json says."""
    config = Config.from_file(path)
    stated = profile.architecture["dimensions"]
    wrong = {k: stated.get(k) for k, v in vars(config).items() if stated.get(k) != v}
    if wrong:
        raise ArtifactError(f"{path} differs from architecture.json in {', '.join(wrong)}")


def pin(profile: Profile, write: bool) -> None:
    """Ask the Hub about every file of both models."""
    architecture = profile.architecture
    entries = [(which, architecture[which]) for which in ("base", "teacher")]
    pins = [(w, "model", entry, entry["files"]) for w, entry in entries if entry["repo"]]
    if fill_pins(pins, write):
        write_json(profile.directory / "architecture.json", architecture)
        print(f"wrote {profile.directory / 'architecture.json'}")


def main(args: argparse.Namespace) -> None:
    profile = load_profile(args.profile)
    if args.pin:
        return pin(profile, args.write)
    for which in [args.only] if args.only else ["base", "teacher"]:
        entry = profile.architecture[which]
        stage = Stage(
            name=f"download_models ({which})",
            directory=profile.workspace / "models" / which,
            command=own_command(),
            arguments={},
            inputs={which: digest(entry)},
        )
        if stage.is_done(args.force):
            continue
        with stage.working_directory(resume=True, force=args.force) as directory:
            fetch(
                entry,
                "model",
                profile.directory,
                directory,
                f"run: {profile.command('download_models')} --pin --write",
            )
            if which == "base":
                check_dimensions(profile, directory / "config.json")
            stage.finish(results={"repo": entry["repo"], "revision": entry["revision"]})


if __name__ == "__main__":
    sys.exit(run_command(main, parse_args))
