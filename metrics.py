"""What the server counts, for Prometheus: numbers only, never token ids."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from drafter import Draft, Drafter

SECONDS = (
    *(0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032),
    *(0.064, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0),
)
OUTCOMES = (
    *("ok", "invalid", "too_large", "contract", "not_ready", "overloaded"),
    *("timeout", "disconnected", "error"),
)


class Metrics:
    """The server's metrics in a registry of their own.

    drafter: gives the Drafter, or None until it is loaded; depth: gives the number of waiting jobs.
    """

    def __init__(self, drafter: Callable[[], Drafter | None], depth: Callable[[], int]):
        self._drafter, self._depth = drafter, depth
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "drafter_requests", "Draft requests by outcome", ["outcome"], registry=self.registry
        )
        for outcome in OUTCOMES:
            self.requests.labels(outcome)
        self.tokens = Counter(
            "drafter_tokens",
            "Token ids: sent (prompt), of them not computed again (cached), drafted",
            ["kind"],
            registry=self.registry,
        )
        self.seconds = Histogram(
            "drafter_seconds",
            "Seconds of a drafted request: waiting, prefill, decode, and all with HTTP",
            ["phase"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self.registry.register(self)

    def observe(self, draft: Draft, prompt_tokens: int, queue: float, total: float) -> None:
        """Count one finished draft; queue, total: seconds."""
        self.tokens.labels("prompt").inc(prompt_tokens)
        self.tokens.labels("cached").inc(draft.cached_tokens)
        self.tokens.labels("drafted").inc(len(draft.token_ids))
        for phase, seconds in (
            ("queue", queue),
            ("prefill", draft.prefill_seconds),
            ("decode", draft.decode_seconds),
            ("total", total),
        ):
            self.seconds.labels(phase).observe(seconds)

    def collect(self) -> Iterator[Metric]:
        """The engine's own counters, read when somebody asks."""
        yield GaugeMetricFamily("drafter_queue_depth", "Requests that wait", self._depth())
        drafter = self._drafter()
        if drafter is None:
            return
        engine, cache = drafter.engine, asdict(drafter.cache.statistics)
        held = cache.pop("bytes")
        yield CounterMetricFamily("drafter_decode_steps", "Decode steps", engine.decode_steps)
        yield CounterMetricFamily(
            "drafter_graph_replays", "Decode steps run by a CUDA graph", engine.graph_replays
        )
        yield GaugeMetricFamily("drafter_cache_bytes", "Bytes of parked KV", held)
        for name, value in cache.items():
            yield CounterMetricFamily(f"drafter_cache_{name}", f"Prefix cache: {name}", value)

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self.registry)
