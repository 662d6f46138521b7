"""What the teacher continues: prompt records, or contexts in which a draft went wrong."""

from __future__ import annotations

from collections.abc import Container, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
import torch
from tqdm import tqdm

from losses import labelled_hidden
from model import Qwen3
from packing import collate, make_example
from prompts import prompt_token_ids
from records import read_records

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SPLITS = ("train", "holdout")
LABELS_AT_ONCE = 16


class Prompts:
    """Streams the prompt records as (split, [(record, token ids)]) shards.

    room: tokens that a prompt may have; longer ones, which leave no room for an answer, are noted
    in `skipped`. part: (i, n) for the i-th of n contiguous parts of the records. `total`: records
    that will be seen.
    """

    def __init__(
        self,
        path: Path,
        tokenizer: PreTrainedTokenizerBase,
        thinking: bool,
        room: int,
        limit: int | None,
        part: tuple[int, int] | None,
    ):
        self.path, self.tokenizer, self.thinking, self.room = path, tokenizer, thinking, room
        self.skipped: list[dict] = []
        rows = pq.ParquetFile(path).metadata.num_rows
        rows = rows if limit is None else min(rows, limit)
        index, parts = part or (0, 1)
        self.first, self.end = index * rows // parts, (index + 1) * rows // parts
        self.total = self.end - self.first

    def shards(self, size: int) -> Iterator[tuple[str, int, list[tuple[dict, list[int]]]]]:
        """(split, shard number, records with their token ids), each shard as soon as it is full."""
        waiting: dict[str, list] = {split: [] for split in SPLITS}
        numbers = dict.fromkeys(SPLITS, 0)
        for record in islice(read_records(self.path), self.first, self.end):
            ids = prompt_token_ids(self.tokenizer, record["messages"], self.thinking)
            if len(ids) > self.room:
                self.skipped.append({"id": record["id"], "status": "dropped", "reason": "too_long"})
                continue
            split = record["split"]
            waiting[split].append((record, ids))
            if len(waiting[split]) == size:
                yield split, numbers[split], waiting[split]
                waiting[split] = []
                numbers[split] += 1
        for split in SPLITS:
            if waiting[split]:
                yield split, numbers[split], waiting[split]


@torch.inference_mode()
def first_rejections(model: Qwen3, labels: list[dict]) -> list[tuple[int, int] | None]:
    """For each label, where the draft's argmax first differs from it: (how many of the label's
    tokens come before, the draft's own token); None where it never does."""
    pairs = [(label["prompt_token_ids"], label["output_token_ids"]) for label in labels]
    examples = [make_example(p, o, len(p) + len(o)) for p, o in pairs]
    batch = collate([[e] for e in examples], str(model.head_weight().device))
    hidden = labelled_hidden(model, batch)
    sizes = [len(output) for _, output in pairs]
    found = []
    for states, targets in zip(hidden.split(sizes), batch.targets.split(sizes), strict=True):
        best = model.logits(states).argmax(-1)
        wrong = (best != targets).nonzero()[:, 0].tolist()
        found.append((wrong[0], best[wrong[0]].item()) if wrong else None)
    return found


class RejectionPrompts:
    """Train labels up to where a draft first goes wrong, with the draft's own token at their end.

    On-policy data in the sense of DistillSpec (arXiv:2310.08461) and GKD (arXiv:2306.13649): the
    draft meets what it does itself, and greedy text is all that the teacher has to give. Same
    interface as `Prompts`; labels on which the draft is never wrong, or wrongly ends, are noted in
    `skipped`.
    """

    def __init__(
        self, shards: list[Path], draft: Qwen3, eos: Container[int], room: int, limit: int | None
    ):
        self.eos, self.room = eos, room
        self.skipped: list[dict] = []
        rows = sum(pq.ParquetFile(path).metadata.num_rows for path in shards)
        self.total = rows if limit is None else min(rows, limit)
        # All of them before the teacher is loaded: the two don't fit onto a small GPU together.
        self.found = list(self._find(shards, draft))

    def _find(self, shards: list[Path], draft: Qwen3) -> Iterator[tuple[dict, list[int]]]:
        records = (record for path in shards for record in read_records(path))
        chosen = islice(records, self.total)
        with tqdm(total=self.total, desc="find rejections", unit="label") as progress:
            while group := list(islice(chosen, LABELS_AT_ONCE)):
                for label, at in zip(group, first_rejections(draft, group), strict=True):
                    made = self._continue(label, at)
                    if made is not None:
                        yield made
                progress.update(len(group))

    def shards(self, size: int) -> Iterator[tuple[str, int, list[tuple[dict, list[int]]]]]:
        """(split, shard number, records with their token ids)."""
        for number, start in enumerate(range(0, len(self.found), size)):
            yield "train", number, self.found[start : start + size]

    def _continue(
        self, label: dict, rejection: tuple[int, int] | None
    ) -> tuple[dict, list[int]] | None:
        """The record and token ids to continue, or None with the reason noted."""
        name, reason = f"{label['id']}/rejection", None
        if rejection is None:
            reason = "never_rejected"
        elif rejection[1] in self.eos:
            reason = "draft_ended"
        else:
            at, token = rejection
            ids = [*label["prompt_token_ids"], *label["output_token_ids"][:at], token]
            if len(ids) <= self.room:
                return {"id": name, "source": label["source"]}, ids
            reason = "too_long"
        self.skipped.append({"id": name, "status": "dropped", "reason": reason})
        return None
