"""Real server processes for tests: started on a free port, ended by their own handle."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from artifacts import ROOT

HTTP = httpx.Client(
    verify=False, trust_env=False, timeout=20
)  # one for all: each would read the CA certificates

# Runs before the server in a process of its own: a draft whose first id is 1 takes until it is
# cancelled, one that starts with 2 fails, and a connection to anywhere ends the process.
FAULTS = """
import os, socket, sys, time
import drafter
from artifacts import run_command

def refuse(*args):
    os.write(2, b"outgoing connection\\n")
    os._exit(99)

socket.socket.connect = socket.socket.connect_ex = socket.create_connection = refuse
socket.getaddrinfo = socket.gethostbyname = refuse
draft = drafter.Drafter.draft

def faulty(self, token_ids, max_tokens, min_probability=0.0, cancelled=None):
    while token_ids[0] == 1:
        if cancelled():
            raise drafter.Cancelled
        time.sleep(0.005)
    if token_ids[0] == 2:
        raise KeyError("planted")
    return draft(self, token_ids, max_tokens, min_probability, cancelled)

drafter.Drafter.draft = faulty
load = drafter.Drafter.__init__

def slow(self, *args, **kwargs):
    time.sleep(float(os.environ.get("SLOW_LOAD", 0)))
    load(self, *args, **kwargs)

drafter.Drafter.__init__ = slow
import server
sys.exit(run_command(server.main, server.parse_args))
"""


@dataclass
class Served:
    """A running server. errors: its stderr so far."""

    process: subprocess.Popen
    url: str = ""
    output: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    @property
    def log(self) -> str:
        return "".join(self.errors)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def spawn(command: list[str], **environment: str) -> Served:
    """Start a process and collect what it prints."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PATH": path, "OMP_NUM_THREADS": "1"} | environment,
    )
    served = Served(process)
    for stream, lines in ((process.stdout, served.output), (process.stderr, served.errors)):
        threading.Thread(target=lambda s=stream, into=lines: into.extend(s), daemon=True).start()
    return served


def wait_ready(served: Served, seconds: float = 40) -> Served:
    """Wait for the line that states the address."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for line in list(served.output):
            if line.startswith("serving on "):
                served.url = line.split()[-1]
                return served
        if served.process.poll() is not None:
            raise AssertionError(f"the server ended:\n{served.log}")
        time.sleep(0.02)
    raise AssertionError(f"the server was not ready in {seconds} s:\n{served.log}")


def end(served: Served) -> int:
    """SIGTERM, then the exit status."""
    served.process.terminate()
    try:
        return served.process.wait(20)
    except subprocess.TimeoutExpired:
        served.process.kill()
        served.process.wait()
        raise


@contextlib.contextmanager
def serving(command: list[str], **environment: str) -> Iterator[Served]:
    """A ready server for the length of a block."""
    served = spawn(command, **environment)
    try:
        yield wait_ready(served)
    finally:
        end(served)


def serve_sh(export: Path, *flags: str) -> list[str]:
    return [str(ROOT / "serve.sh"), "--export", str(export), "--port", "0", *flags]


def with_faults(export: Path, *flags: str) -> list[str]:
    return [sys.executable, "-c", FAULTS, "--export", str(export), "--device", "cpu", *flags]


def post(served: Served, body: object) -> httpx.Response:
    return HTTP.post(f"{served.url}/draft", json=body)


def metric(served: Served, name: str) -> float:
    text = HTTP.get(f"{served.url}/metrics").text
    return float(re.search(rf"^{re.escape(name)} (\S+)$", text, re.M).group(1))


def wait_for(condition: Callable[[], bool], seconds: float = 5) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
