"""The prefix cache: what it finds is exactly what was stored under the same tokens."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cache import PrefixCache, blake2b, common_prefix, to_ids

WIDTH = 4  # tokens in a block here
POSITION_BYTES = 16  # two tensors of (1, 1, n, 1) float64


def kv_of(ids: np.ndarray) -> torch.Tensor:
    """(1, 1, n, 1) float64 that names, at each position, the whole prefix that led there."""
    names = [hash(ids[: i + 1].tobytes()) % 2**52 for i in range(len(ids))]
    return torch.tensor(names, dtype=torch.float64).reshape(1, 1, -1, 1)


def make_cache(capacity: int = 1 << 20, hasher=blake2b, fingerprint: str = "a") -> PrefixCache:
    return PrefixCache(capacity, fingerprint, torch.float64, WIDTH, hasher)


def store(cache: PrefixCache, ids: np.ndarray) -> None:
    kv = kv_of(ids)
    cache.store(ids, kv, -kv)


def match(cache: PrefixCache, ids: np.ndarray, above: int = 0) -> int:
    """Length of what is found; checks that every position's KV is that of `ids`."""
    end = above
    truth = kv_of(ids)
    for piece in cache.match(ids, above):
        assert piece.start == end
        end = piece.start + piece.count
        assert torch.equal(piece.keys, truth[:, :, piece.start : end])
        assert torch.equal(piece.values, -truth[:, :, piece.start : end])
    return end


def check_order(cache: PrefixCache) -> None:
    """Children are older than parents, so that the oldest is a leaf; bytes add up."""
    age = {id(block): i for i, block in enumerate(cache._blocks.values())}
    assert cache.statistics.bytes == sum(b.size for b in cache._blocks.values())
    for block in cache._blocks.values():
        assert block.parent.children[block.key] is block
        if block.parent is not cache._root:
            assert age[id(block.parent)] > age[id(block)]


contexts = st.lists(st.integers(0, 1), min_size=1, max_size=14).map(to_ids)
operations = st.lists(st.tuples(st.booleans(), contexts, st.integers(0, 9)), max_size=30)


@settings(max_examples=150, deadline=None)
@given(operations)
def test_finds_exactly_the_longest_stored_prefix(steps):
    cache, stored = make_cache(), []
    for is_store, ids, above in steps:
        if is_store:
            store(cache, ids)
            stored.append(ids)
        else:
            above = min(above, len(ids))
            longest = max((common_prefix(ids, other) for other in stored), default=0)
            assert match(cache, ids, above) == max(longest, above)
        check_order(cache)


@settings(max_examples=150, deadline=None)
@given(operations, st.integers(0, 20))
def test_memory_is_bounded_and_chains_never_break(steps, positions):
    """case 7: whatever was evicted, what is found is right and no longer than what was stored."""
    cache, stored = make_cache(capacity=positions * POSITION_BYTES), []
    for is_store, ids, _ in steps:
        if is_store:
            store(cache, ids)
            stored.append(ids)
        else:
            longest = max((common_prefix(ids, other) for other in stored), default=0)
            assert match(cache, ids) <= longest
        check_order(cache)
        assert cache.statistics.bytes <= cache.capacity


@settings(max_examples=150, deadline=None)
@given(operations, st.sampled_from([1, 2, 8]))
def test_colliding_keys_never_serve_anothers_kv(steps, distinct):
    """case 10: with only a few distinct keys there are collisions of every kind."""

    def collide(data: bytes) -> bytes:
        return bytes([blake2b(data)[0] % distinct])

    cache = make_cache(hasher=collide)
    for is_store, ids, _ in steps:
        if is_store:
            store(cache, ids)
        else:
            match(cache, ids)
        check_order(cache)


def test_a_planted_collision_is_seen_and_counted():
    """case 10: two contexts of one length share their key; the second gets nothing."""

    def length_only(data: bytes) -> bytes:
        return len(data).to_bytes(4, "little") + data[-1:]

    cache = make_cache(hasher=length_only)
    first, second = to_ids([1, 2, 3, 4]), to_ids([5, 6, 7, 4])
    store(cache, first)
    assert match(cache, second) == 0
    assert match(cache, first) == 4
    assert cache.statistics.collisions > 0


def test_equal_tokens_after_another_beginning_are_no_hit():
    """case 10: a block's KV depends on all before it, so equal ids under an equal key don't do."""
    cache = make_cache(hasher=lambda data: data[-4 * WIDTH :])  # forgets the parent
    store(cache, to_ids([1] * 4 + [3] * 4))
    store(cache, to_ids([2] * 4))
    assert match(cache, to_ids([2] * 4 + [3] * 4)) == 4


def test_keys_are_separated_by_contract_dtype_and_block_size():
    """case 10: equal tokens have other keys under another model, dtype or block size."""
    domains = [
        PrefixCache(1, fingerprint, dtype, width)._root.key
        for fingerprint in ("a", "b")
        for dtype in (torch.float32, torch.bfloat16)
        for width in (4, 8)
    ]
    assert len(set(domains)) == len(domains)


def test_the_least_recently_used_conversation_leaves_first():
    cache = make_cache(capacity=8 * POSITION_BYTES)
    old, new, third = to_ids([1] * 4), to_ids([2] * 4), to_ids([3] * 4)
    store(cache, old)
    store(cache, new)
    match(cache, old)
    store(cache, third)
    assert [match(cache, ids) for ids in (old, new, third)] == [4, 0, 4]
    assert cache.statistics.evictions == 1


def test_a_context_larger_than_the_memory_keeps_its_beginning():
    cache = make_cache(capacity=10 * POSITION_BYTES)
    ids = to_ids(range(20))
    store(cache, ids)
    assert match(cache, ids) == 8  # whole blocks from the start


def test_stored_kv_is_a_copy():
    cache, ids = make_cache(), to_ids([1, 2, 3])
    keys, values = kv_of(ids), -kv_of(ids)
    cache.store(ids, keys, values)
    keys.zero_()
    assert match(cache, ids) == 3


def test_nothing_leads_from_a_context_to_its_continuation():
    """case 5: a context is found only by a request that states all of it."""
    cache = make_cache()
    store(cache, to_ids([1, 2, 3, 4, 5, 6]))
    assert match(cache, to_ids([1, 2, 3])) == 3  # and the KV of 4, 5, 6 stays where it is
    assert match(cache, to_ids([4, 5, 6])) == 0
