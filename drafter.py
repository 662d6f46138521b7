"""The drafter: token ids in, a greedy draft out, from an export's packed weights.

One static KV cache is live. A request keeps of it what it has in common with the request's own
tokens, takes what the prefix cache (cache.py) has beyond that, computes the rest and decodes. Every
drafted token is the argmax of the forward pass over the shipped weights; ties go to the lowest id.

The engines that do the computing are in engines.py.

A warm cache changes the shape of the matrix products (how many positions are computed at once), so
its logits differ from a cold run's by rounding. In float32 (CPU) that is below 1e-3 in practice: a
token can differ only where the best two logits are closer than that. In bf16 (CUDA) it is below
0.5. The same two tolerances decide whether the export's known answer is repeated at load.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from artifacts import ArtifactError
from cache import PrefixCache, blake2b, common_prefix, to_ids
from contract import read_contract
from engines import GraphEngine, TorchEngine
from formats import Export
from model import KVCache

if TYPE_CHECKING:
    from packed import PersistentEngine

MARGIN_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.5}
CACHE_BYTES = 2 << 30
ENGINES = ("torch", "graph")  # slowest first
UNPROVEN = ("persistent",)  # only by name: has not run on a GPU yet


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
    if engine not in ENGINES + UNPROVEN:
        raise ArtifactError(f"--engine {engine}: there are {', '.join(ENGINES + UNPROVEN)}")
    if engine != "torch" and device.type != "cuda":
        raise ArtifactError(f"--engine {engine} needs a CUDA GPU, the device is {device.type}")
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
        length = self.context_limit + 1  # captured graphs are tried out behind the last position
        self.kv = KVCache(self.config, length, self.device, self.dtype)
        self._domain = f"draft-conversation/1\0{self.contract['fingerprint']}\0".encode()
        self._cache_bytes = cache_bytes
        self.reset()
        self.engine = self._make_engine(engine)
        self._check_known_answer()

    def _make_engine(self, name: str) -> TorchEngine | PersistentEngine:
        if name == "persistent":
            from kernels.ops import TRITON
            from packed import PersistentEngine

            with torch.inference_mode():
                return PersistentEngine(self.export, self.kv, self.draft_length, TRITON)
        model = self.export.load(self.dtype, str(self.device))
        if name == "torch":
            return TorchEngine(model, self.kv)
        with torch.inference_mode():
            return GraphEngine(model, self.kv, self.context_limit, self.draft_length)

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
            end = min(start + self.engine.prefill_chunk, len(ids))
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
