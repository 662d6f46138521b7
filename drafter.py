"""The drafter: token ids in, a greedy draft out, from an export's packed weights.

One static KV cache is live. A request keeps of it what it has in common with the request's own
tokens, takes what the prefix cache (cache.py) has beyond that, computes the rest and decodes. Every
drafted token is the argmax of the forward pass over the shipped weights; ties go to the lowest id.

Two engines run the same model code:
  torch  eager, on any device: the oracle.
  graph  CUDA only: one decode step captured as a CUDA graph, its argmax fed back on the device, so
         that a draft is one chain of replays without a word from the host.

A warm cache changes the shape of the matrix products (how many positions are computed at once), so
its logits differ from a cold run's by rounding. In float32 (CPU) that is below 1e-3 in practice: a
token can differ only where the best two logits are closer than that. In bf16 (CUDA) it is below
0.5. The same two tolerances decide whether the export's known answer is repeated at load.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from artifacts import ArtifactError
from cache import PrefixCache, blake2b, common_prefix, to_ids
from contract import read_contract
from formats import Export
from model import KVCache, Qwen3

PREFILL_CHUNK = 512  # bounds the mask and the attention scores: (512, context)
EXTEND_TOKENS = 32  # up to so many new positions go through a captured graph, padded
SMALLEST_BUCKET = 256
LARGEST_READY_BUCKET = 2048  # longer contexts capture their graph at first use
MARGIN_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.5}
CACHE_BYTES = 2 << 30


class Cancelled(Exception):
    """The caller no longer wants the draft; the drafter is ready for the next one."""


@dataclass(frozen=True)
class Draft:
    """token_ids: the draft; probabilities: of each, softmax in float32.

    finish_reason: "stop" (ends with an EOS id), "length" (max_tokens reached), "context" (no room
    left in the context), "confidence" (the next token was less probable than asked for).
    conversation_key: blake2b over the request's ids, hex; cached_tokens: positions of the request
    whose KV was not computed again.
    """

    token_ids: list[int]
    finish_reason: str
    probabilities: list[float]
    conversation_key: str
    cached_tokens: int
    prefill_seconds: float
    decode_seconds: float


def choose(logits: Tensor) -> tuple[Tensor, Tensor]:
    """logits: (1, vocab) float32 → the argmax (1,) int64 and its probability (1,) float32.

    torch.argmax gives the first of equal maxima, on the CPU and on CUDA: the lowest id.
    """
    best = logits.argmax(-1)
    return best, logits.softmax(-1).gather(-1, best[:, None])[:, 0]


# ------------------------------------------------------------------------------------- engines


class TorchEngine:
    """Eager forward passes: the plain path, and the oracle of every other engine."""

    name = "torch"

    def __init__(self, model: Qwen3, kv: KVCache):
        self.model, self.kv, self.device = model, kv, kv.keys.device
        self.decode_steps = 0
        self.graph_replays = 0
        self._next: tuple[Tensor, Tensor] | None = None

    def begin(self, reach: int) -> None:
        """Get ready for a request that ends below position `reach`."""

    def extend(self, ids: np.ndarray, start: int, last: bool) -> None:
        """Compute the KV of `ids` at positions start…; `last`: the next token is wanted too."""
        hidden = self._forward(torch.from_numpy(ids.astype(np.int64)), start)
        if last:
            self._next = choose(self.model.logits(hidden[-1:]))

    def continuation(self, position: int, count: int) -> Iterator[tuple[int, float]]:
        """Up to `count` greedy (token, probability) after `extend`; the first is at `position`.

        The KV of a token is computed only when the one after it is asked for.
        """
        for i in range(count):
            if i > 0:
                hidden = self._forward(self._next[0].cpu(), position + i - 1)
                self._next = choose(self.model.logits(hidden))
                self.decode_steps += 1
            yield self._next[0].item(), self._next[1].item()

    def synchronize(self) -> None:
        """Wait for the device, so that times are true."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _forward(self, ids: Tensor, start: int) -> Tensor:
        """ids: (tokens,) int64 at positions start… → hidden states (tokens, hidden)."""
        end = start + len(ids)
        positions = torch.arange(start, end, device=self.device)
        attend = self.kv.attention(positions, end)
        return self.model(ids.to(self.device)[None], positions[None], attend)[0]


class GraphEngine(TorchEngine):
    """CUDA graphs over static buffers, one pair per bucket of context lengths.

    A bucket's graphs attend over its whole length with a mask, so one capture serves every context
    that fits. `step` computes one position; `extend` up to EXTEND_TOKENS new ones: the padding
    writes KV above what is valid, where decoding overwrites it before anything attends to it.
    """

    name = "graph"

    def __init__(self, model: Qwen3, kv: KVCache, context_limit: int, draft_length: int):
        super().__init__(model, kv)
        self.extend_replays = 0
        self.buckets = bucket_lengths(context_limit)
        self._scratch = context_limit  # positions that no request reaches; capturing writes there

        def integers(n: int) -> Tensor:
            return torch.zeros(n, dtype=torch.int64, device=self.device)

        self._token, self._position, self._step = integers(1), integers(1), integers(1)
        self._inputs = integers(EXTEND_TOKENS + 2)  # ids, first position, row of the last id
        self._tokens = integers(max(draft_length, 1))
        self._probabilities = torch.zeros(len(self._tokens), device=self.device)
        self._pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None
        self._captured: dict[int, tuple[Callable, Callable]] = {}
        self._replay_step = self._replay_extend = None
        for bucket in self.buckets:
            if bucket <= LARGEST_READY_BUCKET or bucket == self.buckets[0]:
                self.begin(bucket)

    def begin(self, reach: int) -> None:
        bucket = next(b for b in self.buckets if b >= reach)
        if bucket not in self._captured:
            self._captured[bucket] = (
                self._capture(lambda: self._run_step(bucket)),
                self._capture(lambda: self._run_extend(bucket)),
            )
        self._replay_step, self._replay_extend = self._captured[bucket]

    def extend(self, ids: np.ndarray, start: int, last: bool) -> None:
        if last and len(ids) <= EXTEND_TOKENS:
            inputs = np.zeros(EXTEND_TOKENS + 2, dtype=np.int64)
            inputs[: len(ids)] = ids
            inputs[EXTEND_TOKENS:] = start, len(ids) - 1
            self._inputs.copy_(torch.from_numpy(inputs))
            self._replay_extend()
            self.extend_replays += 1
            return
        hidden = self._forward(torch.from_numpy(ids.astype(np.int64)), start)
        if last:
            self._step.zero_()
            self._position.fill_(start + len(ids))
            self._record(hidden[-1:])

    def continuation(self, position: int, count: int) -> Iterator[tuple[int, float]]:
        """All `count` tokens at once; the caller drops what follows an end."""
        self.decode_steps += max(count - 1, 0)
        for _ in range(count - 1):
            self._replay_step()
            self.graph_replays += 1
        # The device counts too: a graph that was captured but did nothing would not get past this.
        if count and self._step.item() != count:
            raise RuntimeError(f"{self._step.item()} steps ran on the device, expected {count}")
        tokens, probabilities = self._tokens[:count].tolist(), self._probabilities[:count].tolist()
        return iter(list(zip(tokens, probabilities, strict=True)))

    def _record(self, hidden: Tensor) -> None:
        """Choose after hidden: (1, hidden); keep it at index `step` and as the next input."""
        best, probability = choose(self.model.logits(hidden))
        self._tokens.index_copy_(0, self._step, best)
        self._probabilities.index_copy_(0, self._step, probability)
        self._token.copy_(best)
        self._step.add_(1)

    def _run_step(self, bucket: int) -> None:
        attend = self.kv.attention(self._position, bucket)
        hidden = self.model(self._token[None], self._position[None], attend)[0]
        self._position.add_(1)
        self._record(hidden)

    def _run_extend(self, bucket: int) -> None:
        ids, start, row = self._inputs.split((EXTEND_TOKENS, 1, 1))
        positions = start + torch.arange(EXTEND_TOKENS, device=self.device)
        attend = self.kv.attention(positions, bucket)
        hidden = self.model(ids[None], positions[None], attend)[0]
        self._step.zero_()
        self._position.copy_(start + row + 1)
        self._record(hidden.index_select(0, row))

    def _aim_at_scratch(self) -> None:
        self._step.zero_()
        self._position.fill_(self._scratch)
        self._inputs.zero_()[EXTEND_TOKENS] = self._scratch

    def _capture(self, body: Callable[[], None]) -> Callable[[], None]:
        """Capture `body` as a CUDA graph; returns its replay."""
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(2):  # libraries allocate at first use, which a capture forbids
                self._aim_at_scratch()
                body()
            self._aim_at_scratch()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # One pool for all: nothing in it outlives a replay, the results are in buffers outside.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            body()
        return graph.replay


def bucket_lengths(context_limit: int) -> list[int]:
    """Powers of two from SMALLEST_BUCKET below the limit, then the limit."""
    lengths, length = [], SMALLEST_BUCKET
    while length < context_limit:
        lengths.append(length)
        length *= 2
    return [*lengths, context_limit]


def resolve_device(device: str) -> torch.device:
    """auto | cpu | cuda[:n] → a device that is there; ArtifactError otherwise."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ArtifactError(f"--device {device}: no CUDA GPU can be used here; use --device cpu")
    return torch.device(device)


def resolve_engine(engine: str | None, device: torch.device) -> str:
    """None → the fastest that the device supports; ArtifactError where a named one can't run."""
    if engine is None:
        return "graph" if device.type == "cuda" else "torch"
    if engine not in ("torch", "graph"):
        raise ArtifactError(f"--engine {engine}: there are torch and graph")
    if engine == "graph" and device.type != "cuda":
        raise ArtifactError(f"--engine graph needs a CUDA GPU, the device is {device.type}")
    return engine


# ------------------------------------------------------------------------------------- drafter


class Drafter:
    """Drafts one request at a time; not thread-safe.

    export_dir: what quantize.py wrote; device: auto | cpu | cuda; engine: torch | graph | None (the
    fastest that runs); context_limit: at most the model's (None: the model's); cache_bytes: of
    parked KV. dtype: None for float32 on the CPU, bf16 on CUDA. command: what makes the export, for
    errors.
    Raises ArtifactError on a damaged export, a known answer that is not repeated, or a device,
    engine or limit that can't be had.
    """

    def __init__(
        self,
        export_dir: Path,
        device: str = "auto",
        engine: str | None = None,
        context_limit: int | None = None,
        cache_bytes: int = CACHE_BYTES,
        dtype: torch.dtype | None = None,
        command: str = "python quantize.py",
    ):
        self.device = resolve_device(device)
        engine = resolve_engine(engine, self.device)
        self._remedy = f"run: {command} --force"
        self.export = Export(Path(export_dir), self._remedy)
        self.contract = read_contract(Path(export_dir), self._remedy)
        self.config = self.export.config
        self.draft_length = self.export.quantization["draft_length"]
        self.eos_token_ids = frozenset(self.contract["fields"]["eos_token_ids"])
        self.context_limit = self._check_limit(context_limit)
        self.dtype = dtype or (torch.bfloat16 if self.device.type == "cuda" else torch.float32)
        model = self.export.load(self.dtype, str(self.device))
        length = self.context_limit + (EXTEND_TOKENS if engine == "graph" else 0)
        self.kv = KVCache(self.config, length, self.device, self.dtype)
        self._domain = f"draft-conversation/1\0{self.contract['fingerprint']}\0".encode()
        self._cache_bytes = cache_bytes
        self.reset()
        with torch.inference_mode():
            self.engine = (
                TorchEngine(model, self.kv)
                if engine == "torch"
                else GraphEngine(model, self.kv, self.context_limit, self.draft_length)
            )
        self._check_known_answer()

    def _check_limit(self, asked: int | None) -> int:
        largest = self.config.max_position_embeddings
        prompt = self._known_answer()["prompt_token_ids"]
        smallest = len(prompt) + self.draft_length
        limit = largest if asked is None else asked
        if not smallest <= limit <= largest:
            raise ArtifactError(
                f"--max-context {limit} is not in {smallest}..{largest} (the known answer's length "
                "and the model's limit)"
            )
        return limit

    def _known_answer(self) -> dict:
        answer = self.export.quantization.get("known_answer")
        if not answer:
            raise ArtifactError(
                f"{self.export.directory}: no known answer; run: python quantize.py"
            )
        return answer

    def _check_known_answer(self) -> None:
        """Repeat the draft that the export states; a checksum can't see a wrong forward pass.

        A token that differs where the margin is below the tolerance is a near-tie that rounding
        decided, and what follows it is another text.
        """
        answer = self._known_answer()
        draft = self.draft(answer["prompt_token_ids"], self.draft_length)
        tolerance = MARGIN_TOLERANCE[self.dtype]
        stated = answer["draft_token_ids"]
        for i in range(max(len(stated), len(draft.token_ids))):
            here = draft.token_ids[i] if i < len(draft.token_ids) else None
            there = stated[i] if i < len(stated) else None
            if here != there:
                margin = answer["margins"][i] if i < len(stated) else math.inf
                if margin > tolerance:
                    raise ArtifactError(
                        f"{self.export.directory}: the known answer is not repeated (token {i} of "
                        f"{len(stated)}, margin {margin:.3f}, tolerance {tolerance}); "
                        f"{self._remedy}"
                    )
                break
        self.reset()

    def reset(self) -> None:
        """Forget every context, live and parked."""
        self._live = to_ids([])  # ids of the positions whose KV in `kv` is valid
        self._context = 0  # how many of them a request sent; the rest was drafted
        self.cache = PrefixCache(self._cache_bytes, self.contract["fingerprint"], self.dtype)

    def conversation_key(self, ids: np.ndarray) -> str:
        """blake2b over the contract and a request's ids, 64 hex digits."""
        return blake2b(self._domain + ids.tobytes()).hex()

    @torch.inference_mode()
    def draft(
        self,
        token_ids: list[int],
        max_tokens: int,
        min_probability: float = 0.0,
        cancelled: Callable[[], bool] | None = None,
    ) -> Draft:
        """Continue `token_ids` greedily by up to `max_tokens`.

        token_ids: 1 … context_limit ids; max_tokens: 0 … draft_length, 0 only computes and keeps
        the context; min_probability: the draft ends before a token less probable than this.
        cancelled: polled between chunks of the prefill, and between tokens on the torch engine.
        Raises ValueError on arguments out of range and Cancelled; both leave the state valid.
        """
        ids = self._check(token_ids, max_tokens)
        started = time.perf_counter()
        room = self.context_limit - len(ids)
        count = min(max_tokens, room)
        self.engine.begin(len(ids) + count)
        cached = self._reuse(ids)
        self._prefill(ids, cached, cancelled)
        self.engine.synchronize()
        prefilled = time.perf_counter()
        found, reason = self._decode(len(ids), count, min_probability, cancelled)
        # An ended draft has the KV of all its tokens but the last: nothing came after that one.
        # Where a token was computed and not taken, the last one's KV exists as well.
        valid = len(found) if reason == "confidence" else max(len(found) - 1, 0)
        self._live = np.concatenate((ids, to_ids([token for token, _ in found[:valid]])))
        if reason is None:
            reason = "length" if count == max_tokens else "context"
        return Draft(
            token_ids=[token for token, _ in found],
            finish_reason=reason,
            probabilities=[probability for _, probability in found],
            conversation_key=self.conversation_key(ids),
            cached_tokens=cached,
            prefill_seconds=prefilled - started,
            decode_seconds=time.perf_counter() - prefilled,
        )

    def _check(self, token_ids: list[int], max_tokens: int) -> np.ndarray:
        if not 0 <= max_tokens <= self.draft_length:
            raise ValueError(f"max_tokens {max_tokens} is not in 0..{self.draft_length}")
        if not 0 < len(token_ids) <= self.context_limit:
            raise ValueError(f"{len(token_ids)} token ids, not 1..{self.context_limit}")
        if min(token_ids) < 0 or max(token_ids) >= self.config.vocab_size:
            raise ValueError(f"a token id is not in 0..{self.config.vocab_size - 1}")
        return to_ids(token_ids)

    def _reuse(self, ids: np.ndarray) -> int:
        """Make the KV of a prefix of `ids` live without computing any; returns its length.

        The last position is never among it, as its logits are needed. A request that does not carry
        on from the live context would overwrite some of it: that context is parked first. What was
        drafted and then rejected is overwritten without a copy.
        """
        shared = common_prefix(self._live, ids)
        if shared < self._context:
            self.cache.store(self._live, self.kv.keys, self.kv.values)
        cached = min(shared, len(ids) - 1)
        self._keep(ids, cached)
        for piece in self.cache.match(ids[:-1], above=cached):
            end = piece.start + piece.count
            self.kv.keys[:, :, piece.start : end].copy_(piece.keys)
            self.kv.values[:, :, piece.start : end].copy_(piece.values)
            cached = end
            self._keep(ids, cached)
        return cached

    def _keep(self, ids: np.ndarray, valid: int) -> None:
        """State that the KV of exactly ids[:valid] is live; what is above may be overwritten."""
        self._live, self._context = ids[:valid], valid

    def _prefill(self, ids: np.ndarray, start: int, cancelled: Callable[[], bool] | None) -> None:
        while start < len(ids):
            if cancelled is not None and cancelled():
                raise Cancelled
            end = min(start + PREFILL_CHUNK, len(ids))
            self.engine.extend(ids[start:end], start, last=end == len(ids))
            self._keep(ids, end)
            start = end

    def _decode(
        self,
        position: int,
        count: int,
        min_probability: float,
        cancelled: Callable[[], bool] | None,
    ) -> tuple[list[tuple[int, float]], str | None]:
        """(the tokens with their probabilities, why they ended; None at `count`)."""
        found: list[tuple[int, float]] = []
        for token, probability in self.engine.continuation(position, count):
            if math.isnan(probability):
                raise RuntimeError("the logits are not finite")
            if probability < min_probability:
                return found, "confidence"
            found.append((token, probability))
            if token in self.eos_token_ids:
                return found, "stop"
            if cancelled is not None and cancelled():
                raise Cancelled
        return found, None
