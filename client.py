"""A keep-alive client of `/draft`, and a context manager that serves an export for a while."""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx

from artifacts import ROOT, ArtifactError

START_TIMEOUT = 300  # seconds until a server must be ready; a cold 1 GB export on a slow disk


class Reply(NamedTuple):
    """A `/draft` answer with its times in milliseconds. wall_ms: as the client saw it."""

    body: dict
    wall_ms: float
    queue_ms: float
    prefill_ms: float
    decode_ms: float


class DraftClient:
    def __init__(self, url: str):
        self.url = url.rstrip("/")
        try:
            self.http = httpx.Client(base_url=self.url, timeout=120, trust_env=False)
        except httpx.InvalidURL as error:
            raise ArtifactError(f"{url!r} is not a URL: {error}") from None

    def get(self, path: str) -> dict:
        try:
            response = self.http.get(path)
            response.raise_for_status()
            return response.json()
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise ArtifactError(f"{self.url}{path}: {error}; is ./serve.sh running?") from None

    def draft(self, token_ids: list[int], **options) -> Reply:
        """POST /draft. Raises ArtifactError with the server's own words where it refuses."""
        began = time.perf_counter()
        try:
            response = self.http.post("/draft", json={"token_ids": token_ids, **options})
        except httpx.HTTPError as error:
            raise ArtifactError(f"{self.url}/draft: {error}; is ./serve.sh running?") from None
        wall = (time.perf_counter() - began) * 1e3
        if response.status_code != 200:
            raise ArtifactError(f"{self.url}/draft: {response.status_code} {response.text}")
        times = dict(part.strip().split(";dur=") for part in timing_parts(response))
        return Reply(response.json(), wall, *(float(times[k]) for k in TIMES))

    def close(self) -> None:
        self.http.close()


TIMES = ("queue", "prefill", "decode")


def timing_parts(response: httpx.Response) -> list[str]:
    return response.headers["server-timing"].split(",")


@contextlib.contextmanager
def serve(export: Path, *flags: str) -> Iterator[DraftClient]:
    """Run server.py on a free port for an export; ends it, and only it, afterwards."""
    command = [sys.executable, str(ROOT / "server.py"), "--export", str(export), "--port", "0"]
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    process = subprocess.Popen(
        [*command, *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | offline,
    )
    try:
        client = DraftClient(wait_until_ready(process))
        try:
            yield client
        finally:
            client.close()
    finally:
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_until_ready(process: subprocess.Popen) -> str:
    """The URL that a starting server prints; ArtifactError with its output where it ends first."""
    lines: queue.Queue[str | None] = queue.Queue()

    def pump() -> None:
        # Goes on reading until the end, or a full pipe would block the server's log.
        for line in process.stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=pump, daemon=True).start()
    seen: list[str] = []
    deadline = time.monotonic() + START_TIMEOUT
    while time.monotonic() < deadline:
        try:
            line = lines.get(timeout=1)
        except queue.Empty:
            continue
        if line is None:
            raise ArtifactError("the server did not start:\n" + "".join(seen[-15:]).rstrip())
        seen.append(line)
        if line.startswith("serving on "):
            return line.split()[-1]
    raise ArtifactError(f"the server was not ready after {START_TIMEOUT} s")
