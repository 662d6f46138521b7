"""The benchmark measures what it says: fresh contexts, bytes that are read, a JSON line last."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from exports import random_prompt
from profiles import succeed

from benchmarks.straightforward import StraightforwardEngine
from formats import Export
from model import greedy


def test_bench_times_random_weights_of_the_profiles_shape(tmp_path):
    out, plot = tmp_path / "bench.json", tmp_path / "bench.png"
    text = succeed(
        *("bench", "tiny", tmp_path, "--random", "--contexts", "32", "100", "5000"),
        *("--repeats", "3", "--out", str(out), "--plot", str(plot)),
    )
    assert "left out: --engine graph needs a CUDA GPU" in text
    result = json.loads(text.strip().splitlines()[-1])
    assert result == json.loads(out.read_text())
    bandwidth, *rows = result["results"]
    assert bandwidth["copy_bandwidth"] > 1e9
    assert [(r["engine"], r["context"]) for r in rows] == [
        *(("transformers", 32), ("transformers", 100), ("torch", 32), ("torch", 100)),
    ], "a context beyond the limit is left out"
    first, longer = rows[2:]
    # 4 layers x 2 heads x 32 x (key, value) x 4 bytes for each of 68 positions more.
    assert longer["bytes_per_step"] - first["bytes_per_step"] == 68 * 4 * 2 * 32 * 2 * 4
    for row in rows:
        assert row["prefill_ms"] > 0
        assert row["ms_per_token"] * 16 == pytest.approx(row["draft_ms"])
    for row in (first, longer):
        assert row["gb_per_s"] == pytest.approx(row["bytes_per_step"] / row["ms_per_token"] / 1e6)
        assert 0 < row["of_bandwidth"] < 1
    assert plot.read_bytes().startswith(b"\x89PNG")


class UncapturedStraightforwardEngine(StraightforwardEngine):
    def _capture(self) -> None:
        self._graph = self

    def replay(self) -> None:
        self._run()


@torch.inference_mode()
def test_the_straightforward_design_drafts_what_the_plain_path_does(export):
    """So that what the engines are compared with does the same work."""
    model = Export(export).load(torch.float32)
    engine = UncapturedStraightforwardEngine(model, 16)
    for length in (1, 40, 300):
        prompt = random_prompt(length, length)
        engine.begin(length + 16)
        engine.extend(np.array(prompt, dtype=np.int32), 0, last=True)
        found = [token for token, _ in engine.continuation(length, 16)]
        assert found == greedy(model, prompt, 16, ()).token_ids
    with pytest.raises(ValueError, match="does not fit"):
        engine.begin(2049)
