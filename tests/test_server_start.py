"""How a server starts, what it refuses to serve, and how it ends. cases.md: 15."""

from __future__ import annotations

import json
import re
import shutil
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from served import (
    HTTP,
    end,
    free_port,
    metric,
    post,
    serve_sh,
    spawn,
    wait_for,
    wait_ready,
    with_faults,
)

import server as server_module
from artifacts import ROOT, run_command


def is_alive(url: str) -> bool:
    try:
        return HTTP.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False


def check_loading(url: str) -> None:
    for path in ("ready", "info"):
        loading = HTTP.get(f"{url}/{path}")
        assert (loading.status_code, loading.headers["retry-after"]) == (503, "1")
    early = HTTP.post(f"{url}/draft", json={"token_ids": [3]})
    assert (early.status_code, early.headers["retry-after"]) == (503, "1")


def test_from_alive_over_ready_to_the_end(export: Path):
    """/health answers while the model loads; SIGTERM ends a server in any state with status 0.

    Both processes would not survive an attempt to connect anywhere.
    """
    ports = [free_port(), free_port()]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    served = [
        spawn(with_faults(export, "--port", str(port), "--timeout", "1"), SLOW_LOAD=seconds)
        for port, seconds in zip(ports, ("2.5", "60"), strict=True)
    ]
    first, loading = served
    try:
        wait_for(lambda: all(map(is_alive, urls)), 20)
        check_loading(urls[0])
        assert not first.output
        started = time.monotonic()
        assert end(loading) == 0
        assert time.monotonic() - started < 5
        wait_ready(first)
        assert first.output == [f"serving on {urls[0]}\n"]
        assert HTTP.get(f"{urls[0]}/ready").status_code == 200
        assert post(first, {"token_ids": [3]}).status_code == 200
        with ThreadPoolExecutor(1) as pool:
            under_way = pool.submit(post, first, {"token_ids": [1]})
            wait_for(lambda: metric(first, 'drafter_requests_total{outcome="not_ready"}') == 1)
            time.sleep(0.1)
            assert end(first) == 0
            assert under_way.result().status_code == 504  # an answer, not a broken connection
    finally:
        for process in (s.process for s in served):
            process.kill()
    assert not is_alive(urls[0])
    for log in (s.log for s in served):
        assert "outgoing connection" not in log and "Traceback" not in log


def flip_a_byte(export: Path) -> None:
    path = export / "weights.safetensors"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    path.write_bytes(data)


def change_the_answer(export: Path) -> None:
    path = export / "quantization.json"
    quantization = json.loads(path.read_text())
    ids = quantization["known_answer"]["draft_token_ids"]
    ids[0] = (ids[0] + 1) % 512
    path.write_text(json.dumps(quantization))


REMEDY = r".*; run: python quantize\.py --force"
DAMAGE = {  # kind: what to do to a copy, flags, what the one line says
    "a flipped byte": (flip_a_byte, (), r"sha256 \w+, expected \w+" + REMEDY),
    "another known answer": (change_the_answer, (), "known answer is not repeated" + REMEDY),
    "no weights": (
        lambda export: (export / "weights.safetensors").unlink(),
        (),
        r"weights\.safetensors is missing" + REMEDY,
    ),
    "a file that the stage did not write": (
        lambda export: (export / "stage.json").write_text('{"format": 1, "outputs": {}}'),
        (),
        "a file that its stage did not write.*run: python quantize",
    ),
    "a limit above the model's": (
        lambda export: None,
        ("--max-context", "513"),
        "--max-context 513 is not in",
    ),
}


def test_what_cannot_be_served_ends_the_process(export: Path, tmp_path: Path):
    """case 15: one clear line, a status that is not zero. All at once, to save time."""
    started = {}
    for i, (kind, (damage, flags, _)) in enumerate(DAMAGE.items()):
        copy = Path(shutil.copytree(export, tmp_path / str(i) / "export"))
        damage(copy)
        started[kind] = spawn(serve_sh(copy, "--device", "cpu", *flags))
    for kind, served in started.items():
        assert served.process.wait(40) == 1, kind
        wait_for(lambda served=served: "error: " in served.log)
        [line] = [line for line in served.errors if line.startswith("error: ")]
        assert re.search(DAMAGE[kind][2], line), line
        assert "Traceback" not in served.log
        assert not served.output


def refused(capsys: pytest.CaptureFixture, export: Path, *flags: str) -> str:
    """The one line with which the server refuses to start at all."""
    argv = ["--export", str(export), "--device", "cpu", *flags]
    assert run_command(server_module.main, server_module.parse_args, argv) == 1
    [line] = capsys.readouterr().err.splitlines()
    return line


def test_a_missing_or_unfinished_export_is_named(
    export: Path, tmp_path: Path, capsys: pytest.CaptureFixture
):
    line = refused(capsys, tmp_path / "nothing")
    assert re.search(r"missing or no export; run: python quantize\.py", line)
    shutil.copytree(export, tmp_path / "export.partial")
    line = refused(capsys, tmp_path / "export", "--profile", str(ROOT))
    assert re.search(r"was not finished; run: python quantize\.py --profile", line)


def test_a_fast_path_that_cannot_run_is_an_error(export: Path, capsys: pytest.CaptureFixture):
    assert "--engine graph needs a CUDA GPU" in refused(capsys, export, "--engine", "graph")


def test_a_port_that_is_taken_is_an_error(export: Path, capsys: pytest.CaptureFixture):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        line = refused(capsys, export, "--port", str(taken.getsockname()[1]))
    assert "can't listen on 127.0.0.1" in line


def test_serve_sh_sets_the_offline_variables():
    text = (ROOT / "serve.sh").read_text()
    for name in ("HF_HUB_OFFLINE=1", "TRANSFORMERS_OFFLINE=1", "HF_DATASETS_OFFLINE=1"):
        assert name in text


def test_help_says_what_it_reads(capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit) as status:
        server_module.parse_args(["--help"])
    assert status.value.code == 0
    text = capsys.readouterr().out
    assert "workspace/<profile>/export" in text and "--max-context" in text
