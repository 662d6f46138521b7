"""The engine's thread and the bounded queue before it.

Drafts run one at a time: a batch of one is what the engine is fast at, and there is one live KV
cache. The thread also loads the model, so that everything that touches the device is one thread. A
job that nobody waits for any more leaves the queue at once, or is cancelled where it runs.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from drafter import Cancelled, Draft, Drafter

logger = logging.getLogger("server")


class Busy(Exception):
    """The queue is full. `retry_after`: seconds until it should have room."""

    def __init__(self, retry_after: int):
        super().__init__("the queue is full")
        self.retry_after = retry_after


@dataclass(eq=False)
class Job:
    """One draft to make; `future` gets the Draft or the exception. Times: time.perf_counter()."""

    token_ids: list[int]
    max_tokens: int
    min_probability: float
    future: Future = field(default_factory=Future)
    abandoned: threading.Event = field(default_factory=threading.Event)
    submitted: float = 0.0
    started: float = 0.0

    @property
    def queue_seconds(self) -> float:
        return self.started - self.submitted


class Scheduler:
    """Runs jobs in the order of arrival on one thread.

    load: makes the Drafter, on that thread; capacity: jobs that may wait behind the one that runs;
    on_ready(drafter), on_failure(exception): called from the thread when loading ended.
    """

    def __init__(
        self,
        load: Callable[[], Drafter],
        capacity: int,
        on_ready: Callable[[Drafter], None],
        on_failure: Callable[[Exception], None],
    ):
        self._load, self._capacity = load, capacity
        self._on_ready, self._on_failure = on_ready, on_failure
        self._waiting: deque[Job] = deque()
        self._condition = threading.Condition()
        self._stopping = threading.Event()
        self._mean_seconds = 0.0
        self.drafter: Drafter | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def depth(self) -> int:
        """Jobs that wait."""
        return len(self._waiting)

    def retry_after(self) -> int:
        """Whole seconds, at least one, in which what waits now should be done."""
        return max(1, math.ceil((len(self._waiting) + 1) * self._mean_seconds))

    def submit(self, job: Job) -> None:
        """Queue a job; raises Busy where the queue is full."""
        job.submitted = time.perf_counter()
        with self._condition:
            if self._stopping.is_set() or len(self._waiting) >= self._capacity:
                raise Busy(self.retry_after())
            self._waiting.append(job)
            self._condition.notify()

    def abandon(self, job: Job) -> bool:
        """Free the job's place; True where it had not started yet."""
        job.abandoned.set()
        with self._condition:
            if job in self._waiting:
                self._waiting.remove(job)
                return True
        return False

    def stop(self, seconds: float) -> bool:
        """Cancel everything and wait for the thread; False where it is still busy after that.

        A load can't be cancelled, and is not waited for.
        """
        self._stopping.set()
        with self._condition:
            left, self._waiting = self._waiting, deque()
            self._condition.notify()
        for job in left:
            if job.future.set_running_or_notify_cancel():
                job.future.set_exception(Cancelled("the server is stopping"))
        self._thread.join(seconds if self.drafter is not None else 0)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self.drafter = self._load()
        except Exception as error:
            self._on_failure(error)
            return
        self._on_ready(self.drafter)
        while True:
            with self._condition:
                while not self._waiting and not self._stopping.is_set():
                    self._condition.wait()
                if self._stopping.is_set():
                    return
                job = self._waiting.popleft()
            self._run_job(job)

    def _run_job(self, job: Job) -> None:
        if not job.future.set_running_or_notify_cancel():
            return  # nobody waits for it any more
        job.started = time.perf_counter()
        try:
            draft: Draft = self.drafter.draft(
                job.token_ids,
                job.max_tokens,
                job.min_probability,
                cancelled=lambda: job.abandoned.is_set() or self._stopping.is_set(),
            )
        except Cancelled as error:
            job.future.set_exception(error)
        except Exception as error:
            # Whatever went wrong is this request's; the drafter states only KV that it computed.
            logger.exception("a draft failed")
            job.future.set_exception(error)
        else:
            seconds = time.perf_counter() - job.started
            self._mean_seconds += 0.1 * (seconds - self._mean_seconds)
            job.future.set_result(draft)
