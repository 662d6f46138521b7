"""Capture of work on a GPU as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable

import torch


class Capturer:
    """Captures bodies that work on static buffers; all graphs share one memory pool.

    aim: called before a body is tried out and before it is captured, so that nothing of a request
    is overwritten by it.
    """

    def __init__(self, device: torch.device, aim: Callable[[], None]):
        self.device, self.aim = device, aim
        # One pool for all: nothing in it outlives a replay, the results are in buffers outside.
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def capture(self, body: Callable[[], None]) -> Callable[[], None]:
        """Capture `body` as a CUDA graph; returns its replay."""
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(2):  # libraries allocate at first use, which a capture forbids
                self.aim()
                body()
            self.aim()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            body()
        return graph.replay
