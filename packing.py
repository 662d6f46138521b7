"""Label records as training sequences, packed side by side into rows.

A label set of the real size is hundreds of thousands of records, so it stays in flat arrays:
`LabelSet` keeps token ids in memory and log-probabilities, which are 2·k numbers a token, in an
unnamed temporary file that is mapped.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow.parquet as pq
import torch
from torch import Tensor

from artifacts import ArtifactError

IGNORE = -100


class Example(NamedTuple):
    """One label as a training sequence. targets[i] is what position i must predict, or IGNORE.

    top_ids, top_logprobs: (label positions, k) of the teacher, or None.
    """

    token_ids: Sequence[int]
    targets: Sequence[int]
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None


def make_example(
    prompt: Sequence[int],
    output: Sequence[int],
    max_tokens: int,
    top: tuple[np.ndarray, np.ndarray] | None = None,
) -> Example | None:
    """Loss on the output's tokens only, the EOS among them if the label has one.

    The last prompt position predicts the first output token. A label longer than `max_tokens` is
    cut at its end, which teaches no false end, since only an EOS id in the label is an end. None
    where the prompt leaves no room for any output.
    """
    room = max_tokens + 1 - len(prompt)
    if room < 1 or not len(output):
        return None
    output = output[:room]
    ids = [*prompt, *output[:-1]]
    targets = [IGNORE] * (len(prompt) - 1) + [*output]
    return Example(ids, targets, *(values[:room] for values in top or ()))


class Lists(NamedTuple):
    """A parquet column of lists: row i is values[offsets[i] : offsets[i + 1]]."""

    values: np.ndarray
    offsets: np.ndarray

    def row(self, index: int) -> np.ndarray:
        return self.values[self.offsets[index] : self.offsets[index + 1]]

    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)


class Shard(NamedTuple):
    prompts: Lists
    outputs: Lists
    tops: tuple[np.ndarray, np.ndarray] | None  # (all output positions, k) of both


def read_lists(table, name: str) -> Lists:
    column = table.column(name).combine_chunks()
    return Lists(column.values.to_numpy(), column.offsets.to_numpy())


class LabelSet:
    """The labels of a split, from one or more label directories, as a sequence of examples.

    row_tokens: longer sequences are cut; top_k: read the teacher's log-probabilities too.
    `lengths`: tokens of each example; `total`: records read, those included whose prompt leaves no
    room. Raises ArtifactError where log-probabilities are asked for and not there.
    """

    def __init__(self, directories: list[Path], split: str, row_tokens: int, top_k: bool = False):
        self.row_tokens, self.total = row_tokens, 0
        self._shards: list[Shard] = []
        where, lengths = [], []
        for directory in directories:
            for path in sorted((directory / split).glob("*.parquet")):
                shard = self._read(path, top_k)
                prompts, outputs = shard.prompts.lengths(), shard.outputs.lengths()
                room = row_tokens + 1 - prompts
                rows = np.flatnonzero((room >= 1) & (outputs > 0))
                where.append(np.stack((np.full(len(rows), len(self._shards)), rows), axis=1))
                lengths.append((prompts + np.minimum(outputs, room) - 1)[rows])
                self._shards.append(shard)
                self.total += len(prompts)
        self._where = np.concatenate(where) if where else np.zeros((0, 2), int)
        self.lengths: list[int] = np.concatenate(lengths).tolist() if lengths else []

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Example:
        number, row = self._where[index]
        shard = self._shards[number]
        top = None
        if shard.tops is not None:
            start, end = shard.outputs.offsets[row : row + 2]
            top = tuple(np.array(values[start:end]) for values in shard.tops)
        prompt, output = shard.prompts.row(row).tolist(), shard.outputs.row(row).tolist()
        return make_example(prompt, output, self.row_tokens, top)

    def __iter__(self) -> Iterator[Example]:
        return (self[i] for i in range(len(self)))

    @staticmethod
    def _read(path: Path, top_k: bool) -> Shard:
        names = ["prompt_token_ids", "output_token_ids"]
        with pq.ParquetFile(path) as file:
            if top_k and "top_ids" not in file.schema_arrow.names:
                raise ArtifactError(
                    f"{path} has no log-probabilities, which this objective needs; label with "
                    "generate_teacher.py --logprobs 8, or train with --objective ce"
                )
            table = file.read(columns=names)
            prompts, outputs = (read_lists(table, name) for name in names)
            tops = None
            if top_k:
                tops = tuple(
                    spool(file, name, len(outputs.values), kind)
                    for name, kind in (("top_ids", np.int32), ("top_logprobs", np.float32))
                )
        return Shard(prompts, outputs, tops)


def spool(file: pq.ParquetFile, name: str, positions: int, kind: type) -> np.ndarray:
    """A (positions, k) column as an array that is mapped from an unnamed temporary file."""
    store = None
    at = 0
    for batch in file.iter_batches(batch_size=1000, columns=[name]):
        # list<list<number>>: one outer row a record, one inner row a position.
        values = batch.column(0).flatten().flatten().to_numpy()
        inner = len(batch.column(0).flatten())
        if not inner:
            continue
        values = values.reshape(inner, -1)
        if store is None:
            shape = (positions, values.shape[1])
            # The mapping outlives the open file, and the file its name.
            with tempfile.TemporaryFile() as unnamed:
                store = np.memmap(unnamed, dtype=kind, mode="w+", shape=shape)
        store[at : at + inner] = values
        at += inner
    return store if store is not None else np.zeros((0, 1), kind)


def pack(lengths: list[int], row_tokens: int, seed: str) -> list[list[int]]:
    """Indices of sequences, shuffled and packed into rows of at most `row_tokens` tokens.

    First fit over the last few open rows: keeps the order random and the rows well filled.
    """
    order = list(range(len(lengths)))
    random.Random(seed).shuffle(order)
    rows: list[list[int]] = []
    open_rows: list[tuple[int, int]] = []  # (row, free tokens)
    for index in order:
        for slot, (row, free) in enumerate(open_rows):
            if lengths[index] <= free:
                rows[row].append(index)
                open_rows[slot] = (row, free - lengths[index])
                break
        else:
            rows.append([index])
            open_rows.append((len(rows) - 1, row_tokens - lengths[index]))
            open_rows = open_rows[-8:]
    return rows


class Batch(NamedTuple):
    """Packed rows. token_ids, positions, segments: (rows, tokens) int64; segments: -1 is padding.

    where: (n,) int64, the label positions in the rows laid end to end; targets: (n,) int64, the
    teacher's tokens there; top_ids (int64), top_logprobs (float32): (n, k), or None. bounds: int32,
    where each sequence starts in the rows laid end to end, then their end, more than once. All are
    made on the CPU: finding them on a GPU would make it wait.
    """

    token_ids: Tensor
    positions: Tensor
    segments: Tensor
    where: Tensor
    targets: Tensor
    bounds: Tensor
    top_ids: Tensor | None = None
    top_logprobs: Tensor | None = None

    def to(self, device: str) -> Batch:
        return Batch(*(t.to(device, non_blocking=True) if t is not None else None for t in self))

    def at_labels(self, hidden: Tensor) -> Tensor:
        """(rows, tokens, width) → (n, width): those of the label positions."""
        return hidden.flatten(0, 1).index_select(0, self.where)


def collate(rows: list[list[Example]], device: str = "cpu", width: int | None = None) -> Batch:
    """Lay each row's sequences side by side; positions restart, segments tell them apart.

    width: tokens a row, padded; None: as many as the longest row has.
    """
    width = width or max(sum(len(e.token_ids) for e in row) for row in rows)
    shape = (len(rows), width)
    ids, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    segments, targets = np.full(shape, -1, np.int64), np.full(shape, IGNORE, np.int64)
    for number, row in enumerate(rows):
        at = 0
        for segment, example in enumerate(row):
            span = slice(at, at + len(example.token_ids))
            ids[number, span] = example.token_ids
            positions[number, span] = np.arange(len(example.token_ids))
            segments[number, span] = segment
            targets[number, span] = example.targets
            at = span.stop
    flat = targets.ravel()
    where = np.flatnonzero(flat != IGNORE)
    parts = (ids, positions, segments, where, flat[where], sequence_bounds(segments))
    return Batch(*map(torch.from_numpy, parts), *collated_tops(rows)).to(device)


def sequence_bounds(segments: np.ndarray, multiple: int = 8) -> np.ndarray:
    """Starts of the sequences (padding is one), and the end: repeated, so that the length, on which
    compiled code specialises, rarely changes."""
    new = np.ones(segments.shape, bool)
    new[:, 1:] = segments[:, 1:] != segments[:, :-1]
    starts = np.flatnonzero(new)
    padding = multiple - len(starts) % multiple
    return np.pad(starts, (0, padding), constant_values=segments.size).astype(np.int32)


def collated_tops(rows: list[list[Example]]) -> tuple[Tensor | None, Tensor | None]:
    """The teacher's top-k of all label positions, or None where an example has none."""
    examples = [example for row in rows for example in row]
    if not examples or any(example.top_ids is None for example in examples):
        return None, None
    top_ids = np.concatenate([e.top_ids for e in examples]).astype(np.int64)
    return torch.from_numpy(top_ids), torch.from_numpy(
        np.concatenate([e.top_logprobs for e in examples])
    )
