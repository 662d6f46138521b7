"""The gate that every prompt passes once: length, duplicates, contamination, and the account."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from artifacts import account, write_atomic
from dedup import Exclusions, Match, NearDuplicates, readings, signature, token_list
from records import fingerprint

T = TypeVar("T")


class Gate:
    """Decides which prompts pass, and accounts for those that don't.

    A prompt passes up to `max_tokens` tokens; once (exact duplicates after `normalise` are dropped
    across all parts, near-duplicates where `admit` is asked to look); and not if it shares text
    with the exclusions. count(messages): a prompt's length in tokens. `accounts` holds, for each
    finished part, in = kept + dropped by reason; `excluded` names each contaminated prompt and the
    evaluation row that it repeats.
    """

    def __init__(
        self,
        count: Callable[[list[dict]], int],
        max_tokens: int,
        exclusions: Exclusions | None = None,
    ):
        self.count, self.max_tokens, self.exclusions = count, max_tokens, exclusions
        self.seen: set[bytes] = set()
        self.near = NearDuplicates()
        self.excluded: list[dict] = []
        self.accounts: dict[str, dict] = {}

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Rows that `see` and `admit` get inside belong to this part."""
        self.total, self.kept, self.dropped = 0, 0, {}
        yield
        self.accounts[name] = account(self.total, self.kept, self.dropped)

    def see(self, rows: Iterable[T]) -> Iterator[T]:
        """Count rows as they come in."""
        for row in rows:
            self.total += 1
            yield row

    def drop(self, reason: str) -> bool:
        self.dropped[reason] = self.dropped.get(reason, 0) + 1
        return False

    def admit(
        self, messages: list[dict], name: str, near: bool = True, measure: bool = True
    ) -> bool:
        """Whether a prompt passes. name: its id, for reports.

        near: drop near-duplicates too. Off for what repeats others by design: augmentations of a
        row, and problems that come from templates; those are not remembered either.
        measure: count its tokens. Off for prompts that passed a gate before.
        """
        key = fingerprint(messages)
        if key in self.seen:
            return self.drop("duplicate")
        if measure and self.count(messages) > self.max_tokens:
            return self.drop("too_long")
        found = self.contamination(messages)
        if found is not None:
            self.excluded.append({"id": name, "reason": found.reason, "repeats": found.found})
            return self.drop(f"contaminated_{found.reason}")
        if near:
            minhash = signature(token_list(" ".join(m["content"] for m in messages)))
            if self.near.find(minhash) is not None:
                return self.drop("near_duplicate")
            self.near.add(minhash, name)
        self.seen.add(key)
        self.kept += 1
        return True

    def contamination(self, messages: list[dict]) -> Match | None:
        """What any turn shares with an evaluation prompt; turn by turn, since a short evaluation
        prompt within a long conversation is not near to the whole of it."""
        if self.exclusions is None:
            return None
        turns = (words for m in messages for words in readings(m["content"]))
        matches = (self.exclusions.match(words, signature(words)) for words in turns if words)
        return next((match for match in matches if match is not None), None)

    def write_report(self, directory: Path) -> None:
        """rows.json (the accounts) and excluded.jsonl (what was contaminated, and by what)."""
        write_atomic(directory / "rows.json", json.dumps(self.accounts, indent=2).encode())
        lines = "".join(json.dumps(entry) + "\n" for entry in self.excluded)
        write_atomic(directory / "excluded.jsonl", lines.encode())

    def report(self) -> None:
        for name, rows in self.accounts.items():
            print(f"  {name}: {rows['in']} in, {rows['kept']} kept, dropped {rows['dropped']}")
        for entry in self.excluded[:5]:
            print(f"  excluded {entry['id']}: {entry['reason']} of {entry['repeats']}")
