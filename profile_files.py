"""Write the two files of a profile of local models and data."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from artifacts import sha256_file, write_json

DIMENSIONS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings"),
    *("rms_norm_eps", "tie_word_embeddings"),
)


def model_entry(profile: Path, path: str, licence: str | None = None) -> dict:
    """The entry of a model whose files are in `profile / path`."""
    files = sorted(p for p in (profile / path).iterdir() if p.is_file())
    return {
        "repo": None,
        "path": path,
        "revision": None,
        "licence": licence,
        "files": [
            {"path": p.name, "bytes": p.stat().st_size, "sha256": sha256_file(p)} for p in files
        ],
    }


def write_architecture(
    profile: Path, config: dict, eos: list[int], licence: str | None = None
) -> None:
    """architecture.json of a small pair whose base/ and teacher/ directories are in place.

    config: the base's config.json.
    """
    rope = {"rope_theta": config["rope_parameters"]["rope_theta"]}
    architecture = {
        "format": 1,
        "name": profile.name,
        "base": model_entry(profile, "base", licence),
        "teacher": model_entry(profile, "teacher", licence),
        "dimensions": {key: config[key] for key in DIMENSIONS} | rope,
        "thinking": False,
        "eos_token_ids": eos,
        "quantization": {
            "linear": {"codec": "nf4", "group_size": 64},
            "embedding": {"codec": "int6", "group_size": 64},
        },
        "draft_length": 16,
        "labelling_engine": "transformers",
    }
    write_json(profile / "architecture.json", architecture)


def source_entry(profile: Path, name: str, rows: list[dict], stage: str = "base") -> dict:
    """Write rows as the parquet file of one source; returns its manifest entry."""
    path = profile / "data" / f"{name}.parquet"
    path.parent.mkdir(exist_ok=True)
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, path)
    return {
        "name": name,
        "schema": name,
        "stage": stage,
        "repo": None,
        "config": "default",
        "split": "train",
        "revision": None,
        "file": f"data/{name}.parquet",
        "bytes": path.stat().st_size,
        "rows": len(rows),
        "columns": table.column_names,
        "sha256": sha256_file(path),
        "licence": None,
        "excluded_splits": [],
        "pin_source": "local",
    }


def write_manifest(profile: Path, sources: list[dict]) -> None:
    write_json(profile / "data_manifest.json", {"format": 1, "sources": sources})
