"""The straightforward design, to compare the engines with: what a careful first version is.

The weights are dequantised to bf16 at load; a decode step is the plain torch forward over a static
cache of 2,048 positions, captured as one CUDA graph; attention is torch's, over the whole cache
with a mask; the argmax is fed back on the device. Prefill is eager.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from engines import TorchEngine, choose
from model import KVCache, Qwen3

CACHE = 2048


class StraightforwardEngine(TorchEngine):
    name = "straightforward"

    def __init__(self, model: Qwen3, draft_length: int):
        weight = model.model.embed_tokens.weight
        device = weight.device
        super().__init__(model, KVCache(model.config, CACHE, device, weight.dtype))

        def integers(n: int) -> Tensor:
            return torch.zeros(n, dtype=torch.int64, device=device)

        self._token, self._position, self._step = integers(1), integers(1), integers(1)
        self._tokens = integers(draft_length)
        self._probabilities = torch.zeros(draft_length, device=device)
        self._capture()

    def begin(self, reach: int) -> None:
        if reach > CACHE:
            raise ValueError(f"a context of {reach} tokens does not fit into {CACHE}")

    def extend(self, ids: np.ndarray, start: int, last: bool) -> None:
        hidden = self._forward(torch.from_numpy(ids.astype(np.int64)), start)
        self._step.zero_()
        self._position.fill_(start + len(ids))
        self._record(hidden[-1:])

    def continuation(self, position: int, count: int) -> Iterator[tuple[int, float]]:
        for _ in range(count - 1):
            self._graph.replay()
        tokens, probabilities = self._tokens[:count].tolist(), self._probabilities[:count].tolist()
        return iter(list(zip(tokens, probabilities, strict=True)))

    def _run(self) -> None:
        attend = self.kv.attention(self._position, CACHE)
        hidden = self.model(self._token[None], self._position[None], attend)[0]
        self._position.add_(1)
        self._record(hidden)

    def _record(self, hidden: Tensor) -> None:
        best, probability = choose(self.model.logits(hidden))
        self._tokens.index_copy_(0, self._step, best)
        self._probabilities.index_copy_(0, self._step, probability)
        self._token.copy_(best)
        self._step.add_(1)

    def _capture(self) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._step.zero_()
                self._run()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._run()
