"""The HTTP contract, against real server processes. cases.md: 7 – 9, 11, 15, 16, 18, 19, 22."""

from __future__ import annotations

import itertools
import json
import re
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from exports import NO_EOS, SCHEME, make_export, random_prompt
from served import HTTP, Served, metric, post, serve_sh, serving, wait_for, with_faults

from drafter import Drafter

LIMIT = 512


@pytest.fixture(scope="module")
def server(export: Path) -> Iterator[Served]:
    with serving(serve_sh(export, "--device", "cpu")) as served:
        yield served


@pytest.fixture(scope="module")
def faulty(export: Path) -> Iterator[Served]:
    """Two may wait, for a second; see served.FAULTS."""
    flags = ("--queue", "2", "--timeout", "1", "--port", "0")
    with serving(with_faults(export, *flags)) as served:
        yield served


@pytest.fixture(scope="module")
def local(export: Path) -> Drafter:
    """The same export without HTTP."""
    return Drafter(export, device="cpu", cache_bytes=0)


def alone(local: Drafter, ids: list[int], max_tokens: int = 16) -> list[int]:
    local.reset()
    return local.draft(ids, max_tokens).token_ids


# ------------------------------------------------------------------------------------ contract


def test_draft_answers_as_the_contract_says(server: Served, local: Drafter):
    prompt = random_prompt(1, 40)
    response = post(server, {"token_ids": prompt, "return_probabilities": True})
    assert response.status_code == 200
    value = response.json()
    probabilities = value.pop("probabilities")
    assert len(probabilities) == 16 and all(0 < p <= 1 for p in probabilities)
    assert re.fullmatch("[0-9a-f]{64}", value.pop("conversation_key"))
    assert value == {
        "draft_token_ids": alone(local, prompt),
        "finish_reason": "length",
        "usage": {"prompt_tokens": 40, "cached_tokens": 0, "draft_tokens": 16},
        "contract": local.contract["fingerprint"],
    }
    assert re.fullmatch(
        r"queue;dur=[\d.]+, prefill;dur=[\d.]+, decode;dur=[\d.]+",
        response.headers["server-timing"],
    )
    assert post(server, {"token_ids": prompt}).json()["probabilities"] is None


def test_follow_ups_compute_only_what_is_new(server: Served, local: Drafter):
    """cases 6, 7 and 8, through HTTP."""
    prompt = random_prompt(2, 100)
    draft = post(server, {"token_ids": prompt}).json()["draft_token_ids"]
    again = post(server, {"token_ids": prompt}).json()
    assert again["draft_token_ids"] == draft
    assert again["usage"]["cached_tokens"] == 99
    follow_up = prompt + draft[:5] + [3]
    third = post(server, {"token_ids": follow_up, "max_tokens": 8}).json()
    assert third["usage"] == {"prompt_tokens": 106, "cached_tokens": 105, "draft_tokens": 8}
    assert third["draft_token_ids"] == alone(local, follow_up, 8)


def test_max_tokens_and_min_probability(server: Served, local: Drafter):
    prompt = random_prompt(3, 20)
    nothing = post(server, {"token_ids": prompt, "max_tokens": 0}).json()
    assert (nothing["draft_token_ids"], nothing["finish_reason"]) == ([], "length")
    sure = post(server, {"token_ids": prompt, "min_probability": 1}).json()
    assert (sure["draft_token_ids"], sure["finish_reason"]) == ([], "confidence")


@pytest.mark.parametrize(("room", "drafted"), [(1, 1), (0, 0)])
def test_near_the_context_limit_the_draft_is_clamped(server: Served, room: int, drafted: int):
    """case 11."""
    value = post(server, {"token_ids": random_prompt(4, LIMIT - room)}).json()
    assert (len(value["draft_token_ids"]), value["finish_reason"]) == (drafted, "context")


def test_past_the_context_limit_is_a_clear_refusal(server: Served):
    """case 11."""
    response = post(server, {"token_ids": random_prompt(4, LIMIT + 1)})
    assert response.status_code == 422
    [problem] = response.json()["detail"]
    assert problem["loc"] == ["body", "token_ids"] and "at most 512" in problem["msg"]


def test_an_end_of_sequence_id_ends_the_draft(export: Path, tmp_path: Path, local: Drafter):
    """case 18, through HTTP."""
    prompt = random_prompt(5, 30)
    third = alone(local, prompt)[2]
    directory = make_export(tmp_path / "export", eos=(third, NO_EOS[0]))
    with serving(serve_sh(directory, "--device", "cpu")) as served:
        value = post(served, {"token_ids": prompt}).json()
        assert value["finish_reason"] == "stop"
        assert value["draft_token_ids"] == alone(local, prompt)[:3]
        # A contract of its own: what another export served is refused.
        refused = post(served, {"token_ids": [5], "contract": local.contract["fingerprint"]})
        assert refused.status_code == 409


def test_a_contract_that_differs_is_refused_with_both(server: Served, local: Drafter):
    served = local.contract["fingerprint"]
    assert post(server, {"token_ids": [5], "contract": served}).status_code == 200
    response = post(server, {"token_ids": [5], "contract": "abc"})
    assert response.status_code == 409
    value = response.json()
    assert (value["requested"], value["served"]) == ("abc", served)
    assert value["detail"][0]["loc"] == ["body", "contract"]


def test_info_and_the_log_state_what_is_served(server: Served, local: Drafter):
    """case 16."""
    info = HTTP.get(f"{server.url}/info").json()
    assert info["quantization"]["scheme"] == SCHEME
    assert info["model"]["rope_theta"] == 1e6
    assert (info["engine"], info["device"], info["dtype"]) == ("torch", "cpu", "float32")
    assert info["limits"]["context_tokens"] == LIMIT
    assert info["limits"]["draft_tokens"] == 16
    assert info["contract"] == local.contract
    assert "torch" in info["versions"]
    assert "linear nf4 g64, embedding int6 g64, norm bf16" in server.log
    assert "engine: torch on cpu" in server.log
    assert local.contract["fingerprint"] in server.log


def test_the_docs_describe_the_endpoint(server: Served):
    assert HTTP.get(f"{server.url}/docs").status_code == 200
    operation = HTTP.get(f"{server.url}/openapi.json").json()["paths"]["/draft"]["post"]
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    assert set(schema["properties"]) == {
        *("token_ids", "max_tokens", "min_probability", "return_probabilities", "contract")
    }
    assert {"200", "409", "413", "422", "503"} <= set(operation["responses"])


def test_metrics_count_requests_and_tokens(server: Served):
    names = ('requests_total{outcome="ok"}', 'tokens_total{kind="prompt"}')
    names = [f"drafter_{name}" for name in (*names, 'tokens_total{kind="cached"}')]
    names += ['drafter_tokens_total{kind="drafted"}', "drafter_decode_steps_total"]
    before = [metric(server, name) for name in names]
    for _ in range(2):
        post(server, {"token_ids": [*range(300, 330)], "max_tokens": 5})
    after = [metric(server, name) for name in names]
    assert [b - a for a, b in zip(before, after, strict=True)] == [2, 60, 29, 10, 8]
    assert metric(server, "drafter_queue_depth") == 0
    assert metric(server, 'drafter_seconds_count{phase="decode"}') >= 2


# -------------------------------------------------------------------------------- bad requests

BAD_IDS = {
    "negative": (-1, "greater than or equal to 0"),
    "past the vocabulary": (512, "less than 512"),
    "huge": (10**30, "less than 512"),
    "astronomic": (10**200, "less than 512"),
    "float": (3.0, "valid integer"),
    "string": ("3", "valid integer"),
    "bool": (True, "valid integer"),
    "null": (None, "valid integer"),
    "nested": ([3], "valid integer"),
    "object": ({"id": 3}, "valid integer"),
}


@pytest.mark.parametrize("kind", BAD_IDS)
def test_a_bad_token_id_is_refused_with_its_place(server: Served, kind: str):
    """case 19; the next request works."""
    value, reason = BAD_IDS[kind]
    response = post(server, {"token_ids": [1, 2, value, -5]})
    assert response.status_code == 422
    [problem] = response.json()["detail"]  # the list stops at its first error
    assert problem["loc"] == ["body", "token_ids", 2]
    assert reason in problem["msg"]
    assert post(server, {"token_ids": [1, 2, 3], "max_tokens": 1}).status_code == 200


BAD_FIELDS = [
    ("token_ids", []),
    ("token_ids", None),
    ("token_ids", "1,2"),
    ("token_ids", {"0": 1}),
    ("max_tokens", 17),
    ("max_tokens", -1),
    ("max_tokens", 2.0),
    ("max_tokens", True),
    ("max_tokens", None),
    ("min_probability", 1.1),
    ("min_probability", -0.1),
    ("min_probability", "0.5"),
    ("min_probability", False),
    ("return_probabilities", 1),
    ("return_probabilities", "true"),
    ("contract", 7),
    ("contract", "x" * 1000),
    ("temperature", 1.0),
]


@pytest.mark.parametrize(("name", "value"), BAD_FIELDS)
def test_a_bad_field_is_refused_by_name(server: Served, name: str, value: object):
    """case 19."""
    response = post(server, {"token_ids": [1]} | {name: value})
    assert response.status_code == 422
    [problem] = response.json()["detail"]
    assert problem["loc"] == ["body", name]


BAD_BODIES = {
    "empty": b"",
    "not JSON": b"token_ids=1",
    "cut off": b'{"token_ids": [1, 2',
    "not UTF-8": b'{"token_ids": [1], "contract": "\xff"}',
    "a lone surrogate": b'{"token_ids": [1], "contract": "\\ud800"}',
    "an array": b"[1, 2]",
    "null": b"null",
    "NaN": b'{"token_ids": [1], "min_probability": NaN}',
    "infinity": b'{"token_ids": [1], "min_probability": 1e999}',
    "deeply nested": b'{"token_ids": ' + b"[" * 5000,
    "no token_ids": b"{}",
    "many unknown fields": json.dumps({f"x{i}": i for i in range(500)}).encode(),
}


@pytest.mark.parametrize("kind", BAD_BODIES)
def test_a_bad_body_is_refused(server: Served, kind: str):
    """case 19."""
    response = HTTP.post(f"{server.url}/draft", content=BAD_BODIES[kind])
    assert response.status_code == 422
    detail = response.json()["detail"]
    assert 1 <= len(detail) <= 8
    assert all(problem["loc"][0] == "body" and problem["msg"] for problem in detail)
    assert post(server, {"token_ids": [1], "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize("chunked", [False, True])
def test_a_huge_list_is_refused_without_being_kept(server: Served, chunked: bool):
    """case 19: 3 MB of ids, with its length stated and without."""
    body = json.dumps({"token_ids": [1] * 1_000_000}).encode()
    content = (body[i : i + 65536] for i in range(0, len(body), 65536)) if chunked else body
    response = HTTP.post(f"{server.url}/draft", content=content)
    assert response.status_code == 413
    assert "more than" in response.json()["detail"][0]["msg"]
    assert post(server, {"token_ids": [1], "max_tokens": 1}).status_code == 200


def test_garbage_on_the_socket_harms_nobody(server: Served):
    for garbage in (b"\x00\xff" * 100, b"POST /draft HTTP/1.1\r\nContent-Length: -5\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", server.port)) as sock:
            sock.sendall(garbage)
    assert HTTP.get(f"{server.url}/draft").status_code == 405
    assert HTTP.get(f"{server.url}/nothing").status_code == 404
    assert post(server, {"token_ids": [1], "max_tokens": 1}).status_code == 200


def test_the_log_holds_no_token_ids(server: Served, faulty: Served):
    """Neither requests nor refusals nor failures are logged with what they carried."""
    ids = [487, 391, 402, 467]
    for served in (server, faulty):
        post(served, {"token_ids": ids})
        post(served, {"token_ids": [*ids, -48739]})
        post(served, {"token_ids": [2, *ids]})  # fails in the engine of one
    time.sleep(0.1)
    assert "planted" in faulty.log
    for log in (server.log, faulty.log):
        assert not re.search(r"487.{1,3}391|48739", log)


# --------------------------------------------------------------------------- load and failures


def test_concurrent_conversations_get_what_each_gets_alone(server: Served, local: Drafter):
    """case 9: eight clients at once, several turns each."""

    def converse(seed: int) -> list[tuple[list[int], list[int]]]:
        ids, turns = random_prompt(seed, 30 + seed), []
        with httpx.Client(verify=False, trust_env=False, timeout=20) as client:
            for turn in range(4):
                body = {"token_ids": ids, "max_tokens": 8}
                draft = client.post(f"{server.url}/draft", json=body).json()["draft_token_ids"]
                turns.append((ids, draft))
                ids = ids + draft[: 2 * turn] + [seed]
        return turns

    with ThreadPoolExecutor(8) as pool:
        conversations = list(pool.map(converse, range(100, 108)))
    for ids, draft in itertools.chain(*conversations):
        assert draft == alone(local, ids, 8)


def test_an_exception_in_the_engine_is_a_500_and_the_next_request_works(faulty: Served):
    response = post(faulty, {"token_ids": [2, 3]})
    assert response.status_code == 500
    assert response.json()["detail"][0]["msg"]
    assert post(faulty, {"token_ids": [3], "max_tokens": 1}).status_code == 200
    wait_for(lambda: "KeyError" in faulty.log)


def open_request(served: Served, ids: list[int]) -> socket.socket:
    """Send a request and don't read its answer."""
    body = json.dumps({"token_ids": ids}).encode()
    sock = socket.create_connection(("127.0.0.1", served.port), timeout=10)
    head = f"POST /draft HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    sock.sendall(head.encode() + body)
    return sock


def test_a_client_that_leaves_frees_its_place(faulty: Served):
    """case 22: it leaves while its draft runs, while it waits, and in the middle of its body."""
    before = metric(faulty, 'drafter_requests_total{outcome="disconnected"}')
    started = time.monotonic()
    running = open_request(faulty, [1])  # would run until its timeout
    time.sleep(0.1)
    waiting = open_request(faulty, [3])
    wait_for(lambda: metric(faulty, "drafter_queue_depth") == 1)
    waiting.close()
    wait_for(lambda: metric(faulty, "drafter_queue_depth") == 0)
    running.close()
    assert post(faulty, {"token_ids": [3], "max_tokens": 1}).status_code == 200
    assert time.monotonic() - started < 0.9, "the place was freed by the timeout only"
    with socket.create_connection(("127.0.0.1", faulty.port)) as sock:
        sock.sendall(b"POST /draft HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    name = 'drafter_requests_total{outcome="disconnected"}'
    wait_for(lambda: metric(faulty, name) == before + 3)


def test_timeouts_free_the_place(faulty: Served):
    """case 22: 504 for the draft that runs too long, 503 for the one that got no turn."""
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(post, faulty, {"token_ids": [1]})
        time.sleep(0.1)
        # Starts to wait while the first one runs; behind it for the whole second is another.
        waiting = pool.submit(post, faulty, {"token_ids": [1]})
        assert running.result().status_code == 504
        assert waiting.result().status_code in (503, 504)
    assert post(faulty, {"token_ids": [3], "max_tokens": 1}).status_code == 200


def test_a_full_queue_is_a_503_with_retry_after(faulty: Served):
    running = open_request(faulty, [1])
    time.sleep(0.1)
    waiting = [open_request(faulty, [1]) for _ in range(2)]
    wait_for(lambda: metric(faulty, "drafter_queue_depth") == 2)
    response = post(faulty, {"token_ids": [3]})
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) >= 1
    assert "queue is full" in response.json()["detail"][0]["msg"]
    for sock in (running, *waiting):
        sock.close()
    wait_for(lambda: post(faulty, {"token_ids": [3], "max_tokens": 1}).status_code == 200)
