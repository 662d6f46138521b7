"""Prompt and label records: their parquet schemas, writers, readers, and the hold-out rule.

A prompt is one conversation up to an assistant turn. Adapters turn a row of each data set's own
schema into messages plus the row's reference answer (None where it has none).
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from artifacts import ArtifactError

MESSAGE = pa.struct([("role", pa.string()), ("content", pa.string())])

PROMPT_SCHEMA = pa.schema(
    [
        ("id", pa.string()),  # source/config/split/row[/augmentation]
        ("source", pa.string()),
        ("messages", pa.list_(MESSAGE)),
        ("augmentation", pa.string()),  # null for a row as it came
        ("parent_id", pa.string()),  # the row that an augmentation was made from
        ("reference", pa.string()),  # the row's own answer; not a label
        ("split", pa.string()),  # train | holdout
    ]
)

LABEL_FIELDS = [
    ("id", pa.string()),
    ("source", pa.string()),
    ("prompt_token_ids", pa.list_(pa.int32())),
    ("output_token_ids", pa.list_(pa.int32())),
    ("finish_reason", pa.string()),  # stop: ended by an EOS id, included | length: cut off
]
TOP_FIELDS = [
    ("top_ids", pa.list_(pa.list_(pa.int32()))),  # (positions, k), most likely first
    ("top_logprobs", pa.list_(pa.list_(pa.float32()))),  # natural log
    ("margin", pa.list_(pa.float32())),  # (positions,), first minus second log-probability
]


def label_schema(top_k: int) -> pa.Schema:
    """The schema of label shards; top_k = 0 leaves the log-probabilities out."""
    return pa.schema(LABEL_FIELDS + (TOP_FIELDS if top_k else []))


# ------------------------------------------------------------------------------------ adapters


class Row(NamedTuple):
    messages: list[dict]
    reference: str | None


def from_chat(row: dict) -> Row:
    """`messages` up to the last assistant turn (no_robots, tulu-3 personas)."""
    messages = [{"role": m["role"], "content": m["content"]} for m in row["messages"]]
    reference = None
    if messages and messages[-1]["role"] == "assistant":
        reference = messages.pop()["content"]
    return Row(messages, reference)


def from_question(row: dict) -> Row:
    return Row([{"role": "user", "content": row["question"]}], row["answer"])


def from_inputs(row: dict) -> Row:
    return Row([{"role": "user", "content": row["inputs"]}], row["targets"])


ADAPTERS: dict[str, Callable[[dict], Row]] = {
    "no_robots": from_chat,
    "gsm8k": from_question,
    "aya": from_inputs,
    "personas_code": from_chat,
    "personas_instruction_following": from_chat,
}


def is_usable(messages: list[dict]) -> bool:
    """True for a non-empty conversation of known roles that ends with a user turn with text."""
    known = all(m["role"] in ("system", "user", "assistant") and m["content"] for m in messages)
    return bool(messages) and known and messages[-1]["role"] == "user"


def fold(text: str) -> str:
    """NFKC, lower case, without what is not seen (category Cf: soft hyphens, zero-width spaces)."""
    text = unicodedata.normalize("NFKC", text).casefold()
    return "".join(c for c in text if unicodedata.category(c) != "Cf")


def normalise(messages: list[dict]) -> str:
    """The text by which prompts count as equal: folded, single spaces, roles kept."""
    return " ".join(fold("\n".join(f"{m['role']}:{m['content']}" for m in messages)).split())


def fingerprint(messages: list[dict]) -> bytes:
    """16 bytes that stand for a prompt's normalised text."""
    return hashlib.blake2b(normalise(messages).encode(), digest_size=16).digest()


def split_of(messages: list[dict], holdout_percent: float) -> str:
    """`holdout` or `train`, by a hash of the prompt's text.

    Duplicates of a prompt fall on the same side wherever they stand; an augmentation takes the
    side of the row that it was made from (its caller passes that row's messages).
    """
    value = int.from_bytes(hashlib.blake2b(fingerprint(messages), digest_size=8).digest())
    return "holdout" if value / 2**64 < holdout_percent / 100 else "train"


# --------------------------------------------------------------------------------------- files


def write_records(
    path: Path, records: Iterable[dict], schema: pa.Schema, batch_rows: int = 2000
) -> int:
    """Stream records into one parquet file; returns the number of rows."""
    rows, batch = 0, []
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for record in records:
            batch.append(record)
            if len(batch) == batch_rows:
                writer.write_table(pa.Table.from_pylist(batch, schema))
                rows, batch = rows + len(batch), []
        writer.write_table(pa.Table.from_pylist(batch, schema))
    return rows + len(batch)


def read_records(path: Path, columns: list[str] | None = None) -> Iterator[dict]:
    """Stream a parquet file's rows as dicts; ArtifactError where it can't be read."""
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=2000, columns=columns):
                yield from batch.to_pylist()
    except (OSError, pa.ArrowException) as error:
        raise ArtifactError(f"{path} can't be read as parquet: {error}") from None


def read_source(path: Path, source: dict) -> Iterator[tuple[int, Row | None]]:
    """(row number, Row) of a data set's file; None for a row without a usable prompt.

    source: its manifest entry. Raises ArtifactError where the file's columns or row count are not
    what the manifest states, or its schema has no adapter.
    """
    adapter = ADAPTERS.get(source["schema"])
    if adapter is None:
        known = ", ".join(sorted(ADAPTERS))
        raise ArtifactError(f"{source['name']}: no schema {source['schema']!r}; known: {known}")
    try:
        with pq.ParquetFile(path) as file:
            rows, columns = file.metadata.num_rows, file.schema_arrow.names
    except (OSError, pa.ArrowException) as error:
        raise ArtifactError(f"{path} can't be read as parquet: {error}") from None
    if sorted(columns) != sorted(source["columns"]):
        raise ArtifactError(
            f"{path}: columns {sorted(columns)}, the manifest states {sorted(source['columns'])}"
        )
    if source["rows"] is not None and rows != source["rows"]:
        raise ArtifactError(f"{path}: {rows} rows, the manifest states {source['rows']}")
    for number, raw in enumerate(read_records(path)):
        row = adapter(raw)
        yield number, row if is_usable(row.messages) else None


def source_record(source: dict, number: int, row: Row, holdout_percent: float) -> dict:
    """The prompt record of a data set's row."""
    return {
        "id": f"{source['name']}/{source['config']}/{source['split']}/{number}",
        "source": source["name"],
        "messages": row.messages,
        "augmentation": None,
        "parent_id": None,
        "reference": row.reference,
        "split": split_of(row.messages, holdout_percent),
    }


def read_labels(directory: Path, split: str, columns: list[str] | None = None) -> list[dict]:
    """All label records of a split (train | holdout | diagnostic), shards in order; may be none."""
    shards = sorted((directory / split).glob("*.parquet"))
    return [record for shard in shards for record in read_records(shard, columns)]
