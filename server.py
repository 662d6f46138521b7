"""Stage 7: serve drafts over HTTP.

Reads workspace/<profile>/export/; writes nothing, opens no connection, keeps nothing that it drafts
but keys and values in memory. POST /draft takes a whole context as token ids and gives up to 16
greedy draft tokens; GET /health, /ready, /info, /metrics and /docs say the rest.

    python server.py --profile tiny
    curl -s localhost:8000/draft -d '{"token_ids": [1, 2, 3], "max_tokens": 8}'
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import socket
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from artifacts import (
    ArtifactError,
    load_profile,
    not_negative,
    number_between,
    parse_profile_args,
    positive,
    read_json,
    read_stage,
    run_command,
    versions,
)
from drafter import Cancelled, Draft, Drafter, resolve_device, resolve_engine
from metrics import Metrics
from model import Config
from scheduler import Busy, Job, Scheduler
from schemas import DraftResponse, Refused, describe_errors, make_request_model

logger = logging.getLogger("server")

DISCONNECT_POLL = 0.05  # seconds between looks at whether the client is still there
DRAINED_BYTES = 64 << 20  # of a body that is too large, so that its sender gets to the answer
SMALL_MODEL = 50_000_000  # weights; below, threads cost more in waiting than they save
GRACE_SECONDS = 10  # for requests under way when the server is told to stop


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--export", metavar="DIR", help="what to serve (default: export/ of the profile)"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address (default: %(default)s)")
    parser.add_argument(
        "--port",
        type=not_negative,
        default=8000,
        help="port, 0 for a free one (default: %(default)s)",
    )
    parser.add_argument(
        "--device", choices=["auto", "cpu", "cuda"], default="auto", help="(default: %(default)s)"
    )
    parser.add_argument(
        "--engine",
        choices=["torch", "graph"],
        help="torch: eager; graph: CUDA graphs (default: the fastest that the device runs)",
    )
    parser.add_argument(
        "--max-context",
        type=positive,
        metavar="N",
        help="context limit in tokens; the live KV cache takes memory for all of it "
        "(default: the model's)",
    )
    parser.add_argument(
        "--cache-mb",
        type=not_negative,
        default=2048,
        metavar="MB",
        help="parked keys and values of earlier contexts (default: %(default)s)",
    )
    parser.add_argument(
        "--queue",
        type=positive,
        default=64,
        metavar="N",
        help="requests that may wait; more get 503 (default: %(default)s)",
    )
    parser.add_argument(
        "--timeout",
        type=number_between(0.001, 86400),
        default=30.0,
        metavar="S",
        help="seconds that a request may wait and run (default: %(default)s)",
    )
    parser.add_argument(
        "--threads",
        type=positive,
        metavar="N",
        help="CPU threads (default: OMP_NUM_THREADS, else 1 for a small model, else all cores)",
    )
    args = parse_profile_args(parser, argv)
    if args.port > 65535:
        parser.error(f"--port {args.port} is not in 0..65535")
    return args


# ------------------------------------------------------------------------------------- service


@dataclass(frozen=True)
class Limits:
    """What a request may ask for; known from the export's JSON before its weights are loaded."""

    vocab_size: int
    context_tokens: int
    draft_tokens: int
    body_bytes: int
    waiting_requests: int
    timeout_seconds: float


class Refusal(Exception):
    """A request that gets no draft. outcome: the metric's label; detail: list of {loc, msg, …}."""

    def __init__(
        self,
        status: int,
        outcome: str,
        detail: list[dict],
        headers: dict | None = None,
        **more: Any,
    ):
        super().__init__(outcome)
        self.outcome = outcome
        self.response = json_response({"detail": detail} | more, status, headers)


def refuse(status: int, outcome: str, message: str, **headers: str) -> Refusal:
    """A refusal that is not about one field."""
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return Refusal(status, outcome, [{"loc": [], "msg": message}], names)


def json_response(value: Any, status: int = 200, headers: dict | None = None) -> Response:
    body = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return Response(body, status, headers, media_type="application/json")


async def read_body(request: Request, limit: int) -> bytes:
    """The body, at most `limit` bytes; a longer one is read on and dropped, then refused.

    Answering at once would reset the connection under a client that is still sending, which then
    never sees why.
    """
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size <= limit:
            chunks.append(chunk)
        elif size > DRAINED_BYTES:
            break
    if size > limit:
        message = f"the body has more than {limit} bytes"
        raise refuse(413, "too_large", message, Connection="close")
    return b"".join(chunks)


class Service:
    """One request from bytes to a response."""

    def __init__(self, limits: Limits, scheduler: Scheduler):
        self.limits, self.scheduler = limits, scheduler
        self.metrics = Metrics(lambda: scheduler.drafter, lambda: scheduler.depth)
        self.request_model = make_request_model(
            limits.vocab_size, limits.context_tokens, limits.draft_tokens
        )

    async def draft(self, request: Request) -> Response:
        """Answer POST /draft; never raises for what a client can do or the engine may suffer."""
        started = time.perf_counter()
        outcome = "ok"
        try:
            response = await self._draft(request, started)
        except Refusal as refusal:
            outcome, response = refusal.outcome, refusal.response
        except ClientDisconnect:
            outcome, response = "disconnected", Response(status_code=499)
        self.metrics.requests.labels(outcome).inc()
        return response

    async def _draft(self, request: Request, started: float) -> Response:
        body = await read_body(request, self.limits.body_bytes)
        drafter = self.scheduler.drafter
        if drafter is None:
            raise refuse(503, "not_ready", "the model is being loaded", Retry_After="1")
        asked = self.parse(body)
        served = drafter.contract["fingerprint"]
        if asked.contract is not None and asked.contract != served:
            detail = [{"loc": ["body", "contract"], "msg": "not the contract that is served"}]
            both = {"requested": asked.contract, "served": served}
            raise Refusal(409, "contract", detail, **both)
        job = Job(asked.token_ids, asked.max_tokens, asked.min_probability)
        draft = await self._wait(job, request)
        total = time.perf_counter() - started
        self.metrics.observe(draft, len(asked.token_ids), job.queue_seconds, total)
        return self._respond(asked, draft, job.queue_seconds, served)

    def parse(self, body: bytes) -> BaseModel:
        try:
            return self.request_model.model_validate_json(body)
        except ValidationError as error:
            raise Refusal(422, "invalid", describe_errors(error)) from None

    async def _wait(self, job: Job, request: Request) -> Draft:
        """The job's draft; a client that left or waited too long frees its place."""
        try:
            self.scheduler.submit(job)
        except Busy as busy:
            retry = str(busy.retry_after)
            raise refuse(503, "overloaded", "the queue is full", Retry_After=retry) from None
        future = asyncio.wrap_future(job.future)
        deadline = time.perf_counter() + self.limits.timeout_seconds
        try:
            while not future.done():
                left = deadline - time.perf_counter()
                await asyncio.wait((future,), timeout=min(DISCONNECT_POLL, max(left, 0)))
                if not future.done() and await request.is_disconnected():
                    raise ClientDisconnect
                if not future.done() and left <= 0:
                    raise self._timed_out(waiting=self.scheduler.abandon(job))
        finally:
            if not future.done():
                self.scheduler.abandon(job)
                future.cancel()
        try:
            return future.result()
        except Cancelled:
            raise refuse(503, "overloaded", "the server is stopping", Retry_After="5") from None
        except Exception:  # the engine's thread has logged it
            raise refuse(500, "error", "the draft failed; the server's log says why") from None

    def _timed_out(self, waiting: bool) -> Refusal:
        seconds = f"{self.limits.timeout_seconds:g} s"
        if waiting:
            retry = str(self.scheduler.retry_after())
            message = f"no turn came within {seconds}"
            return refuse(503, "timeout", message, Retry_After=retry)
        return refuse(504, "timeout", f"the draft was not done within {seconds}")

    def _respond(self, asked: BaseModel, draft: Draft, queue: float, contract: str) -> Response:
        value = {
            "draft_token_ids": draft.token_ids,
            "finish_reason": draft.finish_reason,
            "probabilities": draft.probabilities if asked.return_probabilities else None,
            "conversation_key": draft.conversation_key,
            "usage": {
                "prompt_tokens": len(asked.token_ids),
                "cached_tokens": draft.cached_tokens,
                "draft_tokens": len(draft.token_ids),
            },
            "contract": contract,
        }
        phases = {"queue": queue, "prefill": draft.prefill_seconds, "decode": draft.decode_seconds}
        timing = ", ".join(f"{name};dur={1e3 * s:.3f}" for name, s in phases.items())
        return json_response(value, headers={"Server-Timing": timing})

    def info(self, drafter: Drafter) -> dict:
        """What /info shows."""
        quantization = drafter.export.quantization
        return {
            "model": asdict(drafter.config),
            "quantization": {
                "scheme": quantization["scheme"],
                "summary": drafter.export.summary(),
                "weights": quantization["weights"],
                "scales": quantization.get("scales"),
            },
            "release": drafter.export.release(),
            "engine": drafter.engine.name,
            "device": str(drafter.device),
            "dtype": str(drafter.dtype).removeprefix("torch."),
            "limits": asdict(self.limits),
            "contract": drafter.contract,
            "versions": versions(),
        }


def make_app(service: Service) -> FastAPI:
    """The HTTP routes. Bodies are parsed by hand, from the raw bytes, and described for /docs."""
    app = FastAPI(title="drafter", description=__doc__.split("\n\n")[1])
    schema = service.request_model.model_json_schema()
    errors = {status: {"model": Refused} for status in (409, 413, 422, 500, 503, 504)}

    @app.post(
        "/draft",
        response_model=DraftResponse,
        responses=errors,
        openapi_extra={
            "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}
        },
    )
    async def draft(request: Request) -> Response:
        """Up to `max_tokens` greedy tokens that continue `token_ids`, the whole context so far."""
        return await service.draft(request)

    @app.get("/health")
    async def health() -> Response:
        """The process is alive, whether or not the model is loaded."""
        return json_response({"status": "alive"})

    @app.get("/ready", responses={503: {"description": "the model is being loaded"}})
    async def ready() -> Response:
        """The model is loaded, checked, and its graphs are captured."""
        if service.scheduler.drafter is None:
            return json_response({"status": "loading"}, 503, {"Retry-After": "1"})
        return json_response({"status": "ready"})

    @app.get("/info", responses={503: {"description": "the model is being loaded"}})
    async def info() -> Response:
        """Model, quantisation, engine, limits, contract, versions."""
        drafter = service.scheduler.drafter
        if drafter is None:
            return json_response({"status": "loading"}, 503, {"Retry-After": "1"})
        return json_response(service.info(drafter))

    @app.get("/metrics")
    async def metrics() -> Response:
        """Prometheus text."""
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")

    return app


# ------------------------------------------------------------------------------------- process


def read_limits(args: argparse.Namespace, export: Path, command: str) -> Limits:
    """The limits from the export's small files; ArtifactError where it is missing or unfinished."""
    if (export / "started.json").exists() or not (export / "quantization.json").exists():
        raise ArtifactError(unfinished(export, command))
    config = Config.from_file(export / "config.json")
    quantization = read_json(export / "quantization.json", f"run: {command} --force")
    context = args.max_context or config.max_position_embeddings
    return Limits(
        vocab_size=config.vocab_size,
        context_tokens=context,
        draft_tokens=quantization["draft_length"],
        body_bytes=16 * context + 4096,  # an id, a comma and some indentation; the rest
        waiting_requests=args.queue,
        timeout_seconds=args.timeout,
    )


def unfinished(export: Path, command: str) -> str:
    markers = (export / "started.json", export.with_name(export.name + ".partial"))
    state = "was not finished" if any(m.exists() for m in markers) else "is missing or no export"
    return f"{export} {state}; run: {command}"


def set_threads(asked: int | None, config: Config) -> None:
    """The calling thread's share of the CPU.

    A small model's operations take microseconds: a second thread saves nothing, and where other
    work holds its core, each operation waits for it (measured: 20 times slower).
    """
    layer = 3 * config.intermediate_size + 4 * config.num_attention_heads * config.head_dim
    weights = (config.vocab_size + config.num_hidden_layers * layer) * config.hidden_size
    if asked is not None:
        torch.set_num_threads(asked)
    elif weights < SMALL_MODEL and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


def load(args: argparse.Namespace, export: Path, command: str) -> Drafter:
    """Check and load the export; says what will be served. Runs on the engine's thread."""
    if (export / "stage.json").exists():
        read_stage(export, command)
    set_threads(args.threads, Config.from_file(export / "config.json"))
    drafter = Drafter(
        export,
        device=args.device,
        engine=args.engine,
        context_limit=args.max_context,
        cache_bytes=args.cache_mb << 20,
        command=command,
    )
    logger.info("quantisation: %s", drafter.export.summary())
    logger.info(
        "engine: %s on %s in %s, %d CPU threads; context %d, draft %d",
        *(drafter.engine.name, drafter.device, drafter.dtype, torch.get_num_threads()),
        *(drafter.context_limit, drafter.draft_length),
    )
    logger.info("contract: %s", drafter.contract["fingerprint"])
    return drafter


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; connections wait in its backlog until the server takes them."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except (OSError, OverflowError) as error:
        sock.close()
        raise ArtifactError(f"can't listen on {host}:{port}: {error}") from None
    sock.listen(2048)
    return sock


def main(args: argparse.Namespace) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    profile = load_profile(args.profile)
    export = Path(args.export) if args.export else profile.workspace / "export"
    command = profile.command("quantize")
    resolve_engine(args.engine, resolve_device(args.device))  # before anything takes time
    limits = read_limits(args, export, command)
    sock = listen(args.host, args.port)
    host = f"[{args.host}]" if ":" in args.host else args.host
    url = f"http://{host}:{sock.getsockname()[1]}"
    failures: list[Exception] = []

    def on_ready(drafter: Drafter) -> None:
        print(f"serving on {url}", flush=True)

    def on_failure(error: Exception) -> None:
        failures.append(error)
        server.should_exit = True

    scheduler = Scheduler(
        lambda: load(args, export, command), args.queue, on_ready=on_ready, on_failure=on_failure
    )
    app = make_app(Service(limits, scheduler))
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="none",
        timeout_graceful_shutdown=GRACE_SECONDS,
    )
    server = uvicorn.Server(config)
    # uvicorn raises the signal again once it has shut down: that is an end as asked for, status 0.
    signal.signal(signal.SIGTERM, lambda *_: setattr(server, "should_exit", True))
    scheduler.start()
    try:
        server.run(sockets=[sock])
    finally:
        stopped = scheduler.stop(GRACE_SECONDS)
    return end(failures, stopped)


def end(failures: list[Exception], stopped: bool) -> int:
    """The exit status; one line where loading failed."""
    for error in failures:
        if isinstance(error, ArtifactError):
            raise error
        logger.error("loading failed", exc_info=error)
        print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    if not stopped:
        # The thread is inside a load that can't be cancelled; unwinding the interpreter under it
        # could crash, and there is nothing to save.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main, parse_args))
