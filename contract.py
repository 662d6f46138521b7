"""The contract between a draft and whoever verifies it: one fingerprint over what both rely on.

A draft is useful only to a target that tokenises, templates and stops as the draft was trained to.
`contract.json` in an export lists those facts; their hash is what the server shows and a client
may assert with every request.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from artifacts import ArtifactError, digest, read_json, sha256_file, write_json
from prompts import load_tokenizer

CONTRACT_FORMAT = 1


def model_identity(entry: dict) -> dict:
    """What pins a model of architecture.json: repo and revision, or its files' hashes."""
    files = {file["path"]: file["sha256"] for file in entry["files"]}
    return {"repo": entry["repo"], "revision": entry["revision"], "files": digest(files)}


def make_contract(
    model: Path,
    architecture: dict,
    labels: str | None,
    scheme: dict,
    checkpoint: str,
    weights: str,
) -> dict:
    """The contract of an export.

    model: directory with the tokenizer files; labels: digest of the label set, None for a model
    that was not distilled; scheme: codec per tensor kind; checkpoint: digest of the source weights;
    weights: sha256 of weights.safetensors, since a checkpoint can be packed with other scales.
    """
    fields = {
        "format": CONTRACT_FORMAT,
        "tokenizer_sha256": sha256_file(model / "tokenizer.json"),
        "chat_template_sha256": digest(load_tokenizer(model).chat_template),
        "thinking": architecture["thinking"],
        "eos_token_ids": sorted(architecture["eos_token_ids"]),
        "base": model_identity(architecture["base"]),
        "teacher": model_identity(architecture["teacher"]),
        "labels": labels,
        "quantization": scheme,
        "checkpoint": checkpoint,
        "weights": weights,
    }
    return {"fingerprint": digest(fields), "fields": fields}


def write_contract(directory: Path, contract: dict) -> None:
    write_json(directory / "contract.json", contract)


def read_contract(directory: Path, remedy: str = "run: python quantize.py") -> dict[str, Any]:
    """contract.json of an export, its fingerprint checked against its fields."""
    path = directory / "contract.json"
    contract = read_json(path, remedy)
    if contract.get("fields", {}).get("format") != CONTRACT_FORMAT:
        raise ArtifactError(f"{path}: a contract format that this code does not read; {remedy}")
    if digest(contract["fields"]) != contract.get("fingerprint"):
        raise ArtifactError(f"{path}: the fingerprint is not that of its fields; {remedy}")
    return contract
