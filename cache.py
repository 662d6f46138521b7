"""The KV prefix cache: keys and values of earlier contexts, found by a request's own tokens.

A context is cut into blocks of 64 tokens. A block's key is blake2b(parent's key ‖ its token ids):
it stands for everything before it too. The chain starts from a key of format, contract, dtype and
block size, so that nothing is shared between models or versions. A hit compares the parent and the
stored ids as well: two contexts whose keys collide never get each other's KV.

It holds keys and values only. There is no way from a prompt to a continuation: what is drafted is
computed from the weights every time.

Memory is bounded. Blocks leave least recently used first, and a block never before its children:
a chain that was used is touched from its end to its start, so the oldest entry is always a leaf.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

CACHE_FORMAT = 1
BLOCK_TOKENS = 64

Hash = Callable[[bytes], bytes]


def blake2b(data: bytes) -> bytes:
    """blake2b with 32 bytes of output."""
    return hashlib.blake2b(data, digest_size=32).digest()


def to_ids(token_ids: object) -> np.ndarray:
    """Token ids as (n,) little-endian int32, the form in which they are compared and hashed."""
    return np.asarray(token_ids, dtype="<i4")


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """How many leading entries of two one-dimensional arrays are equal."""
    length = min(len(a), len(b))
    different = np.flatnonzero(a[:length] != b[:length])
    return int(different[0]) if len(different) else length


@dataclass(eq=False, slots=True)
class Block:
    """KV of up to BLOCK_TOKENS positions; fewer only in a leaf.

    token_ids: their int32 bytes; keys, values: (layers, kv_heads, tokens, head_dim).
    """

    key: bytes
    parent: Block | None
    token_ids: bytes
    keys: Tensor | None
    values: Tensor | None
    children: dict[bytes, Block] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return self.keys.nbytes + self.values.nbytes


class Piece(NamedTuple):
    """KV for the positions start … start + count - 1.

    keys, values: (layers, kv_heads, count, head_dim), views of the cache: to be copied at once.
    """

    start: int
    count: int
    keys: Tensor
    values: Tensor


@dataclass
class Statistics:
    """Counters since the start; `bytes` is what is held now."""

    lookups: int = 0
    hits: int = 0
    tokens_reused: int = 0
    bytes: int = 0
    evictions: int = 0
    collisions: int = 0


class PrefixCache:
    """Blocks of KV in a tree over token ids. Not thread-safe: the engine's thread owns it.

    capacity: bytes of KV tensors, 0 keeps nothing; fingerprint: the contract's; hasher: replaced in
    tests by one that collides.
    """

    def __init__(
        self,
        capacity: int,
        fingerprint: str,
        dtype: torch.dtype,
        block_tokens: int = BLOCK_TOKENS,
        hasher: Hash = blake2b,
    ):
        self.capacity = capacity
        self.block_tokens = block_tokens
        self.statistics = Statistics()
        self._hash = hasher
        domain = f"draft-kv/{CACHE_FORMAT}\0{fingerprint}\0{dtype}\0{block_tokens}"
        self._root = Block(hasher(domain.encode()), None, b"", None, None)
        self._blocks: OrderedDict[bytes, Block] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._blocks)

    def match(self, token_ids: np.ndarray, above: int = 0) -> list[Piece]:
        """KV of the longest stored prefix of `token_ids`, from position `above` on.

        token_ids: (n,) int32. Empty where nothing longer than `above` is stored.
        """
        self.statistics.lookups += 1
        data = token_ids.tobytes()
        chain = self._walk(data)
        start = len(chain) * self.block_tokens
        tail, shared = self._best_child(chain[-1] if chain else self._root, data[4 * start :])
        chain += [tail] if tail else []
        if start + shared <= above:
            return []
        self._touch(chain)
        self.statistics.hits += 1
        self.statistics.tokens_reused += start + shared - above
        pieces = []
        for i in range(above // self.block_tokens, len(chain)):
            first = i * self.block_tokens
            low, high = max(above, first), min(start + shared, first + self.block_tokens)
            part = slice(low - first, high - first)
            block = chain[i]
            pieces.append(Piece(low, high - low, block.keys[:, :, part], block.values[:, :, part]))
        return pieces

    def store(self, token_ids: np.ndarray, keys: Tensor, values: Tensor) -> None:
        """Copy the KV of `token_ids` that is not stored yet, as far as the capacity goes.

        token_ids: (n,) int32; keys, values: (layers, kv_heads, at least n, head_dim), position i
        at index i.
        """
        data = token_ids.tobytes()
        chain = self._walk(data)
        start, end = len(chain) * self.block_tokens, len(token_ids)
        node = chain[-1] if chain else self._root
        rest = data[4 * start :]
        covering = [child for child in node.children.values() if child.token_ids.startswith(rest)]
        if not rest or covering:
            self._touch(chain + covering[:1])
            return
        for child in list(node.children.values()):
            # A shorter partial block is a part of what comes now.
            if len(child.token_ids) < 4 * self.block_tokens and rest.startswith(child.token_ids):
                self._remove(child)
        self._touch(chain)
        position_bytes = (keys[:, :, :1].nbytes + values[:, :, :1].nbytes) if end else 0
        self._make_room((end - start) * position_bytes, keep=len(chain))
        try:
            for low in range(start, end, self.block_tokens):
                part = slice(low, min(low + self.block_tokens, end))
                if self.statistics.bytes + (part.stop - low) * position_bytes > self.capacity:
                    break
                ids = data[4 * part.start : 4 * part.stop]
                block = self._add(node, ids, keys[:, :, part], values[:, :, part])
                if block is None:
                    break
                chain.append(block)
                node = block
        finally:  # the order that eviction relies on holds even where a copy ran out of memory
            self._touch(chain)

    def _add(self, node: Block, ids: bytes, keys: Tensor, values: Tensor) -> Block | None:
        """A new child of `node` with copies of the KV; None where its key is another block's."""
        key = self._hash(node.key + ids)
        if key in self._blocks or key == self._root.key:
            self.statistics.collisions += 1
            return None
        copies = (t.clone(memory_format=torch.contiguous_format) for t in (keys, values))
        block = Block(key, node, ids, *copies)
        node.children[key] = self._blocks[key] = block
        self.statistics.bytes += block.size
        return block

    def _walk(self, data: bytes) -> list[Block]:
        """The chain of full blocks that `data` starts with."""
        chain, node, width = [], self._root, 4 * self.block_tokens
        for start in range(0, len(data) - width + 1, width):
            ids = data[start : start + width]
            block = self._blocks.get(self._hash(node.key + ids))
            if block is None:
                break
            if block.parent is not node or block.token_ids != ids:
                self.statistics.collisions += 1
                break
            chain.append(block)
            node = block
        return chain

    def _best_child(self, node: Block, rest: bytes) -> tuple[Block | None, int]:
        """(the child that shares the longest prefix with `rest`, how many tokens it shares)."""
        best, shared = None, 0
        ids = np.frombuffer(rest[: 4 * self.block_tokens], dtype="<i4")
        for child in node.children.values():
            if child.token_ids[:4] == rest[:4]:
                length = common_prefix(np.frombuffer(child.token_ids, dtype="<i4"), ids)
                best, shared = (child, length) if length > shared else (best, shared)
        return best, shared

    def _touch(self, chain: list[Block]) -> None:
        for block in reversed(chain):
            self._blocks.move_to_end(block.key)

    def _make_room(self, size: int, keep: int) -> None:
        """Evict the oldest until `size` fits, but not the `keep` most recently used."""
        while self.statistics.bytes + size > self.capacity and len(self._blocks) > keep:
            self._remove(next(iter(self._blocks.values())))
            self.statistics.evictions += 1

    def _remove(self, block: Block) -> None:
        if block.children:
            raise AssertionError("a block with children was about to leave its chain")
        del self._blocks[block.key]
        del block.parent.children[block.key]
        self.statistics.bytes -= block.size
