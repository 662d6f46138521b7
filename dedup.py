"""Near-duplicates and contamination among prompts.

Near-duplicates: MinHash with banded locality-sensitive hashing (Broder 1997; datasketch) over word
shingles; two prompts count as near-duplicates where the estimated Jaccard similarity reaches
THRESHOLD. Contamination: a training prompt that shares a 13-gram of words with an evaluation
prompt, the measure of the GPT-3 paper (arXiv:2005.14165, appendix C), or near-duplicates one.
"""

from __future__ import annotations

import argparse
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
from datasketch import MinHash, MinHashLSH

from artifacts import ArtifactError, sha256_file
from records import fold

PERMUTATIONS = 64
THRESHOLD = 0.8
SHINGLE_WORDS = 3
NGRAM_WORDS = 13


# Thai, Lao, Myanmar, Khmer; Han, Kana and their neighbours.
UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\ua4cf\uf900-\ufaff\U00020000-\U0003ffff]"
)
SCHEME = "affine32"
# Drawn once: drawing them takes longer than a signature.
HASHES = MinHash(PERMUTATIONS, seed=1, scheme=SCHEME).permutations


def word_list(text: str) -> list[str]:
    """Words of a text as they are compared: folded, runs of letters and digits.

    Scripts that write no spaces give a word for each character.
    """
    spaced = (f" {c} " if UNSPACED.match(c) else c if c.isalnum() else " " for c in fold(text))
    return "".join(spaced).split()


def token_list(text: str) -> list[str]:
    """Words and, each by itself, symbols: `3 + 4` is no near-duplicate of `3 - 4`."""
    spaced = (c if c.isalnum() and not UNSPACED.match(c) else f" {c} " for c in fold(text))
    return "".join(spaced).split()


def readings(text: str) -> list[list[str]]:
    """A text's words, and once more with what is not seen between letters taken for spaces.

    A zero-width space may hide inside a word, or be the only thing between two.
    """
    spaced = "".join(" " if unicodedata.category(c) == "Cf" else c for c in text)
    found = [word_list(text)]
    if spaced != text:
        found.append(word_list(spaced))
    return found


def windows(words: list[str], size: int) -> Iterator[str]:
    """Every run of `size` words; the whole text where it is shorter."""
    for start in range(max(1, len(words) - size + 1)):
        yield " ".join(words[start : start + size])


def signature(words: list[str]) -> MinHash:
    """MinHash over a text's word shingles, from a fixed seed."""
    minhash = MinHash(
        PERMUTATIONS, hashfunc=xxhash.xxh32_intdigest, permutations=HASHES, scheme=SCHEME
    )
    minhash.update_batch([shingle.encode() for shingle in set(windows(words, SHINGLE_WORDS))])
    return minhash


def add_exclusion_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--exclude",
        nargs="+",
        type=Path,
        default=[],
        metavar="FILE",
        help="evaluation prompts (.jsonl, .json or .parquet): training prompts that share "
        f"{NGRAM_WORDS} words in a row with one, or nearly repeat one, are dropped",
    )
    parser.add_argument(
        "--exclude-columns",
        nargs="+",
        default=["prompt"],
        metavar="NAME",
        help="their text columns (default: prompt)",
    )


def exclusion_hashes(args: argparse.Namespace) -> dict:
    """What identifies the exclusions in a stage record: each file's sha256, and the columns."""
    for path in args.exclude:
        if not path.is_file():
            raise ArtifactError(f"--exclude {path}: no such file")
    # Pairs: two files of one name in different directories are two files.
    files = [[path.name, sha256_file(path)] for path in args.exclude]
    return {"files": files, "columns": args.exclude_columns if files else []}


class NearDuplicates:
    """Texts seen so far, to be asked whether a new one is nearly one of them.

    Only signatures are kept: (PERMUTATIONS,) uint32 each, and the bands' tables.
    """

    def __init__(self) -> None:
        self.index = MinHashLSH(
            threshold=THRESHOLD,
            num_perm=PERMUTATIONS,
            weights=(0.1, 0.9),  # find compares anyway
        )
        self.signatures: list[np.ndarray] = []
        self.names: list[str] = []

    def find(self, minhash: MinHash) -> str | None:
        """The name of a text that this one nearly repeats, None where there is none."""
        mine = minhash.hashvalues.astype(np.uint32)
        for key in sorted(self.index.query(minhash)):
            if np.mean(self.signatures[key] == mine) >= THRESHOLD:
                return self.names[key]
        return None

    def add(self, minhash: MinHash, name: str) -> None:
        self.index.insert(len(self.names), minhash, check_duplication=False)
        self.signatures.append(minhash.hashvalues.astype(np.uint32))
        self.names.append(name)


class Match(NamedTuple):
    """Why a prompt was dropped: reason is `ngram` or `near_duplicate`, found the row it repeats."""

    reason: str
    found: str


class Exclusions:
    """Evaluation prompts that training must not contain."""

    def __init__(self, files: list[Path], columns: list[str]):
        self.near = NearDuplicates()
        self.ngrams: dict[int, str] = {}
        self.rows = 0
        names = Counter(path.name for path in files)
        for path in files:
            before, shown = self.rows, path.name if names[path.name] == 1 else str(path)
            for number, text in enumerate(read_texts(path, columns)):
                self.add(text, f"{shown}:{number}")
            if self.rows == before:
                raise ArtifactError(f"--exclude {path} has no text: it would guard against nothing")

    def add(self, text: str, name: str) -> None:
        found = [words for words in readings(text) if words]
        self.rows += bool(found)
        for words in found:
            self.near.add(signature(words), name)
            if len(words) >= NGRAM_WORDS:
                for gram in windows(words, NGRAM_WORDS):
                    self.ngrams.setdefault(xxhash.xxh64_intdigest(gram.encode()), name)

    def match(self, words: list[str], minhash: MinHash) -> Match | None:
        """What the prompt shares with an evaluation prompt; None where nothing."""
        if len(words) >= NGRAM_WORDS:
            for gram in windows(words, NGRAM_WORDS):
                found = self.ngrams.get(xxhash.xxh64_intdigest(gram.encode()))
                if found is not None:
                    return Match("ngram", found)
        found = self.near.find(minhash)
        return Match("near_duplicate", found) if found is not None else None


def read_texts(path: Path, columns: list[str]) -> Iterator[str]:
    """The named text columns of every row, of a .jsonl, .json (a list of objects) or .parquet file.

    Raises ArtifactError on an unknown ending, an unreadable file or a missing column, with the row.
    """
    for number, row in enumerate(read_rows(path)):
        for column in columns:
            if not isinstance(row, dict) or not isinstance(row.get(column), str):
                raise ArtifactError(
                    f"{path}, row {number}: no text column {column!r}; name the columns that hold "
                    "the prompts with --exclude-columns"
                )
        yield "\n".join(row[column] for column in columns)


def read_rows(path: Path) -> Iterator[dict]:
    try:
        if path.suffix == ".parquet":
            with pq.ParquetFile(path) as file:
                for batch in file.iter_batches():
                    yield from batch.to_pylist()
        elif path.suffix == ".jsonl":
            with open(path) as file:
                for line in file:
                    if line.strip():
                        yield json.loads(line)
        elif path.suffix == ".json":
            yield from json.loads(path.read_text())
        else:
            raise ArtifactError(f"{path}: --exclude takes .jsonl, .json or .parquet files")
    except (OSError, ValueError, TypeError, pa.ArrowException) as error:
        raise ArtifactError(f"{path} can't be read: {error}") from None
