"""Check: where did what is served come from?

Reads every finished stage of workspace/<profile>/; hashes all their files again and follows the
inputs that each states, from the export back to the pinned files. Prints the chain and ends with an
error where a file changed, an input is not what lies there now, a pin differs from the profile's
JSON files, or a row count does not add up. Writes nothing.

    python audit.py
    python audit.py --profile tiny --export export
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from artifacts import (
    ArtifactError,
    Profile,
    digest,
    load_profile,
    parse_profile_args,
    read_stage,
    run_command,
)
from contract import read_contract
from records import read_labels, read_records


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--export", default="export", metavar="NAME", help="which export (default: export)"
    )
    return parse_profile_args(parser, argv)


class Audit:
    """Findings over the stages of one workspace."""

    def __init__(self, profile: Profile):
        self.profile, self.findings = profile, []
        self.digests: dict[str, str] = {}

    def stage(self, name: str) -> dict:
        """The record of a finished directory, its files hashed; prints one line of the chain."""
        directory = self.profile.workspace / name
        record = read_stage(directory, f"the stage that makes {name}")
        self.digests[name] = digest(record["outputs"])
        size = sum(file["bytes"] for file in record["outputs"].values())
        commit = (record["git_commit"] or "unknown commit")[:12]
        print(f"{name:28} {len(record['outputs']):4} files {size:14,} bytes  {commit}")
        return record

    def expect(self, what: str, stated: object, found: object) -> None:
        if stated != found:
            self.findings.append(f"{what}: stated {stated}, found {found}")

    def inputs(self, name: str, record: dict) -> None:
        """Each directory that a stage states as input must still be what it read."""
        for key, value in record["inputs"].items():
            if key in self.digests:
                self.expect(f"{name} was made from another {key}", value, self.digests[key])

    def rows(self, name: str, rows: dict) -> None:
        total = rows["kept"] + sum(rows["dropped"].values()) + rows["failed"]
        self.expect(f"{name}: rows in against kept + dropped + failed", rows["in"], total)


def audit_models(audit: Audit) -> None:
    for which in ("base", "teacher"):
        record = audit.stage(f"models/{which}")
        entry = audit.profile.architecture[which]
        audit.expect(f"models/{which}: its pin", record["inputs"][which], digest(entry))
        for file in entry["files"]:
            found = record["outputs"].get(file["path"], {}).get("sha256")
            audit.expect(f"models/{which}/{file['path']}", file["sha256"], found)


def audit_data(audit: Audit) -> None:
    for source in audit.profile.manifest()["sources"]:
        name = f"downloads/{source['name']}"
        record = audit.stage(name)
        found = record["outputs"].get(source["file"], {}).get("sha256")
        audit.expect(f"{name}/{source['file']}", source["sha256"], found)
    for name in ("data/base", "data/extended"):
        record = audit.stage(name)
        audit.inputs(name, record)
        for part, rows in record["rows"].items():
            audit.rows(f"{name} {part}", rows)


def audit_labels(audit: Audit) -> None:
    """Every label is of a prompt of data/extended and on its side of the hold-out."""
    record = audit.stage("labels")
    audit.inputs("labels", record)
    audit.rows("labels", record["rows"])
    workspace = audit.profile.workspace
    prompts = workspace / "data" / "extended" / "prompts.parquet"
    sides = {r["id"]: r["split"] for r in read_records(prompts, ["id", "split"])}
    for split in ("train", "holdout"):
        ids = [r["id"] for r in read_labels(workspace / "labels", split, ["id"])]
        wrong = sum(sides.get(i) != split for i in ids)
        audit.expect(f"labels/{split}: records of another side or of no prompt", 0, wrong)
        audit.expect(f"labels/{split}: records that stand twice", 0, len(ids) - len(set(ids)))


def audit_more_labels(audit: Audit, name: str) -> None:
    """Labels that go on from where a draft was wrong: each belongs to a train label."""
    if name in audit.digests:
        return
    record = audit.stage(name)
    audit_run_inputs(audit, name, record)
    audit.rows(name, record["rows"])
    workspace = audit.profile.workspace
    parents = {r["id"] for r in read_labels(workspace / "labels", "train", ["id"])}
    ids = [r["id"] for r in read_labels(workspace / name, "train", ["id"])]
    strays = sum(i.removesuffix("/rejection") not in parents for i in ids)
    audit.expect(f"{name}: records that belong to no train label", 0, strays)
    held = len(read_labels(workspace / name, "holdout", ["id"]))
    audit.expect(f"{name}: held-out records", 0, held)


def audit_run(audit: Audit, name: str) -> None:
    """A training run, and the runs and labels that it was made from."""
    if name not in audit.digests:
        audit_run_inputs(audit, name, audit.stage(name))


def audit_run_inputs(audit: Audit, name: str, record: dict) -> None:
    for key in record["inputs"]:
        if key.startswith("runs/"):
            audit_run(audit, key)
        elif key.startswith("labels-"):
            audit_more_labels(audit, key)
    audit.inputs(name, record)


def audit_export(audit: Audit, name: str) -> None:
    record = audit.stage(name)
    run = record["arguments"]["run"]
    source = "models/base" if run == "base" else f"runs/{run}"
    if run != "base":
        audit_run(audit, source)
    audit.inputs(name, record)
    audit.expect(
        f"{name} was made from another checkpoint",
        record["inputs"]["checkpoint"],
        audit.digests[source],
    )
    contract = read_contract(audit.profile.workspace / name)
    labels = None if run == "base" else audit.digests["labels"]
    audit.expect("the contract's label set", contract["fields"]["labels"], labels)
    print(f"contract {contract['fingerprint']}")


def main(args: argparse.Namespace) -> None:
    profile = load_profile(args.profile)
    print(f"workspace {Path(profile.workspace)}")
    audit = Audit(profile)
    audit_models(audit)
    audit_data(audit)
    audit_labels(audit)
    audit_export(audit, args.export)
    if audit.findings:
        raise ArtifactError(f"{len(audit.findings)} findings:\n  " + "\n  ".join(audit.findings))
    print("every file is what its stage wrote, every input what it read, every pin holds")


if __name__ == "__main__":
    sys.exit(run_command(main, parse_args))
